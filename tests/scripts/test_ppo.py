"""Collection, advantages, updates and determinism of ppo_graph.py: what `main` did is recorded and
computed again in float64, and a seed fixes every bit."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium import spaces
from helpers import (
    RandomEnv,
    Record,
    everything,
    logged,
    make_envs,
    record,
    run,
    small_args,
    vector,
    weights,
)

from cleanrl_graph import ppo_graph

CPU = torch.device("cpu")


# ---- PPO in float64, from what a run of main saw ----
class Walk(gym.Env):
    """Random vectors in one array that is written again and again; the reward depends on all that
    there is. Episodes of 1 to 6 steps, of which every other is truncated."""

    observation_space, action_space = vector(3, low=-10, high=10), spaces.Discrete(3, start=2)

    def __init__(self):
        self.buffer = np.zeros(3, np.float32)

    def observe(self):
        self.buffer[:] = self.np_random.normal(size=3)
        return self.buffer

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 7))
        self.truncates = self.np_random.random() < 0.5
        return self.observe(), {}

    def step(self, action):
        reward = float(self.buffer[0] + 0.5 * action * self.buffer[1] + 0.1)
        self.left -= 1
        ended = self.left == 0
        return self.observe(), reward, ended and not self.truncates, ended and self.truncates, {}


gym.register("Walk-v0", entry_point=Walk)


class Net64(nn.Module):
    """Actor and critic of a vector and a Discrete action, in float64 and written anew."""

    def __init__(self, agent):
        super().__init__()
        for name, parameter in agent.named_parameters():
            own = nn.Parameter(parameter.detach().double().clone())
            self.register_parameter(name.replace(".", "_"), own)

    def forward(self, obs, actions):
        """(log_prob, entropy, value)"""
        x = obs["obs"].values.double()
        h = torch.tanh(x @ self.actor_0_weight.T + self.actor_0_bias)
        logits = h @ self.head_heads_0_output_weight.T + self.head_heads_0_output_bias
        p = logits.exp() / logits.exp().sum(1, keepdim=True)
        h = torch.tanh(x @ self.critic_0_weight.T + self.critic_0_bias)
        value = (h @ self.critic_2_weight.T + self.critic_2_bias).squeeze(1)
        return p.gather(1, actions.long()).squeeze(1).log(), -(p * p.log()).sum(1), value


def batch(leaves, flats):
    storage = ppo_graph.Storage(leaves, CPU)
    for flat in flats:
        storage.append(flat)
    return everything(storage)


def reference_advantages(after, values, next_values, final_values, gamma, lam):
    """GAE, [T, N]: sums of (gamma lambda)^k delta; `after` are the steps that followed."""
    names = ("terminated", "truncated", "reward")
    terminated, truncated, rewards = (np.stack([getattr(s, name) for s in after]) for name in names)
    T, N = rewards.shape
    result = np.zeros((T, N))
    for n in range(N):
        following = np.append(values[1:, n], next_values[n])
        for t in range(T):
            if truncated[t, n]:
                following[t] = final_values[t, n]
            if terminated[t, n]:
                following[t] = 0.0
        deltas = rewards[:, n].astype(np.float64) + gamma * following - values[:, n]
        ends = np.flatnonzero(terminated[:, n] | truncated[:, n])
        for t in range(T):
            stop = next((end + 1 for end in ends if end >= t), T)
            result[t, n] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, stop))
    return result


def reference_run(seen: Record, network, leaves, args):
    """(gradients per minibatch, scalars per update) of PPO on what was recorded."""
    T, N = args.num_steps, args.num_envs
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    optimizer.param_groups[0]["amsgrad"] = args.amsgrad
    minibatches, gradients, logs = list(seen.minibatches), [], []
    num_updates = args.total_timesteps // (T * N)
    largest = 0.0
    for update in range(num_updates):
        if args.anneal_lr:
            left = (num_updates - update) / num_updates
            optimizer.param_groups[0]["lr"] = args.learning_rate * left
        first = update * T
        before, after = seen.steps[first : first + T], seen.steps[first + 1 : first + T + 1]
        acts = torch.tensor(np.array(seen.actions[first : first + T])).reshape(T * N, -1)
        acts = acts - getattr(args, "start", 0)
        storage = ppo_graph.Storage(leaves, CPU)
        for step in before:
            storage.append(step.obs)
        none = torch.zeros(N, acts.shape[1], dtype=torch.long)
        with torch.no_grad():
            old_log_prob, _, old_value = network(everything(storage), acts)
            next_values = network(batch(leaves, [after[-1].obs]), none)[2].numpy()
            final_values = np.full((T, N), np.nan)
            for t, step in enumerate(after):
                if step.truncated.any():
                    num = int(step.truncated.sum())
                    last = network(batch(leaves, step.finals), none[:num])[2]
                    final_values[t, step.truncated] = last.numpy()
        V = old_value.view(T, N).numpy()
        discounts = args.gamma, args.gae_lambda
        advantages = reference_advantages(after, V, next_values, final_values, *discounts)
        advantages, clips = torch.tensor(advantages).flatten(), []
        returns = advantages + old_value
        spread = returns.std(correction=0)
        vf_coef = args.vf_coef
        if args.norm_vloss:
            vf_coef = vf_coef / (args.norm_vloss + spread**2)
        largest = max(spread, args.adv_floor_decay * largest)
        floor = args.adv_floor * largest
        for _ in range(args.update_epochs):
            for idx in (epoch := [minibatches.pop(0) for _ in range(args.num_minibatches)]):
                log_prob, entropy, value = network(storage.gather(idx)[0], acts[idx])
                A = advantages[idx]
                if args.norm_adv:
                    A = (A - A.mean()) / (A.std() + floor + 1e-8)
                difference, eps = log_prob - old_log_prob[idx], args.clip_coef
                ratio = difference.exp()
                policy_loss = -torch.min(ratio * A, ratio.clip(1 - eps, 1 + eps) * A).mean()
                error = (value - returns[idx]) ** 2
                if args.clip_vloss:
                    near = torch.minimum(value, old_value[idx] + eps)
                    near = torch.maximum(near, old_value[idx] - eps)
                    error = torch.maximum(error, (near - returns[idx]) ** 2)
                loss = policy_loss + vf_coef * error.mean() / 2 - args.ent_coef * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                found = [p.grad for p in network.parameters()]
                norm = sum(g.square().sum() for g in found if g is not None).sqrt()
                for g in found:
                    if g is not None:
                        g *= min(1.0, args.max_grad_norm / (norm.item() + 1e-6))
                gradients.append([None if g is None else g.clone() for g in found])
                optimizer.step()
                clips.append(((ratio - 1).abs() > eps).double().mean().item())
                kl = (ratio - 1 - difference).mean().item()
            assert sorted(np.concatenate(epoch)) == list(range(T * N))  # every step once
            if args.target_kl is not None and kl > args.target_kl:
                break
        unexplained = np.var((returns - old_value).numpy()) / np.var(returns.numpy())
        log = {"losses/policy_loss": policy_loss.item(), "losses/entropy": entropy.mean().item()}
        log |= {"losses/value_loss": error.mean().item() / 2, "losses/grad_norm": norm.item()}
        log |= {"losses/approx_kl": kl, "losses/old_approx_kl": -difference.mean().item()}
        log |= {"losses/clipfrac": np.mean(clips), "losses/explained_variance": 1 - unexplained}
        logs.append(log | {"charts/learning_rate": optimizer.param_groups[0]["lr"]})
    assert minibatches == []
    return gradients, logs


BASE = dict(env_id="Walk-v0", num_envs=3, num_steps=16, total_timesteps=144, num_minibatches=3)
BASE |= dict(update_epochs=2, learning_rate=1e-3, clip_coef=0.01)
FLAGS = {"base": {}, "learning_rate": 3e-3, "anneal_lr": False, "gamma": 0.5, "gae_lambda": 0.5}
FLAGS |= {"num_minibatches": 4, "update_epochs": 4, "norm_adv": False, "adv_floor": 0.2}
FLAGS |= {"adv_floor_decay": 0.9, "amsgrad": True, "clip_coef": 0.2, "clip_vloss": False}
FLAGS |= {"norm_vloss": 0.2, "ent_coef": 0.5, "vf_coef": 0.1, "max_grad_norm": 0.01}
FLAGS |= {"target_kl": 1e-12, "num_envs": 2, "num_steps": 8, "seed": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return record(tmp_path_factory.mktemp("base"), **BASE)


@pytest.mark.parametrize("name", FLAGS)
def test_updates_against_float64(name, base, tmp_path):
    """Gradients, logged losses and weights of all updates are those of the formulas, for every
    hyperparameter; and each of them changes what is learned. Truncated episodes and the rollout's
    end are bootstrapped, terminated ones are not, and last observations are kept although the
    environment writes the next one into the same array."""
    flags = BASE if name == "base" else BASE | {name: FLAGS[name]}
    if name == "adv_floor_decay":
        flags = flags | {"adv_floor": FLAGS["adv_floor"]}
    seen = base if name == "base" else record(tmp_path, **flags)
    args, network = small_args(**flags), Net64(seen.agent)
    args.start = 2  # of the action space
    leaves = ppo_graph.leaves_of(Walk.observation_space)
    gradients, logs = reference_run(seen, network, leaves, args)
    names = [name for name, _ in seen.agent.named_parameters()]
    assert len(gradients) == len(seen.gradients) > 0
    for ours, theirs in zip(gradients, seen.gradients):
        for parameter, gradient in zip(names, ours):
            torch.testing.assert_close(theirs[parameter].double(), gradient, atol=1e-5, rtol=1e-4)
    for k, log in enumerate(logs):
        for scalar, value in log.items():
            found = seen.scalars[scalar][k][1]
            assert found == pytest.approx(value, rel=1e-4, abs=1e-5), (scalar, k)
    for parameter, value in zip(names, network.parameters()):
        found = seen.weights[parameter].double()
        torch.testing.assert_close(found, value.data, atol=1e-5, rtol=1e-5)
    assert sum(step.truncated.sum() for step in seen.steps) > 2
    assert sum(step.terminated.sum() for step in seen.steps) > 2
    assert (name == "base") == all(map(torch.equal, base.weights.values(), seen.weights.values()))


def test_one_step_in_a_minibatch(tmp_path):
    """Advantages of a single step are not normalised; nothing becomes NaN."""
    result = run(tmp_path, env_id="Walk-v0", num_minibatches=24, update_epochs=1)
    assert all(np.isfinite(logged(result, tag)).all() for tag in result.scalars)


# ---- Steps and episodes ----
class Corridor(gym.Env):
    """Position 0, 1, 2, ... and reward 1 + position; `ends[k]` is (length, truncated) of the k-th
    episode, and the last pair goes on for ever. All observations are one array."""

    observation_space, action_space = vector(1, low=0, high=100), spaces.Discrete(2)

    def __init__(self, ends):
        self.ends, self.episode, self.resets, self.steps = ends, -1, 0, 0
        self.buffer = np.zeros(1, np.float32)

    def observe(self):
        self.buffer[0] = self.t
        return self.buffer

    def reset(self, *, seed=None, options=None):
        self.episode, self.t, self.resets = self.episode + 1, 0, self.resets + 1
        return self.observe(), {}

    def step(self, action):
        length, truncated = self.ends[min(self.episode, len(self.ends) - 1)]
        self.t, self.steps = self.t + 1, self.steps + 1
        ended = self.t == length
        return self.observe(), 1.0 + self.t, ended and not truncated, ended and truncated, {}


def test_what_is_known_of_an_episode():
    """Group and eval of the last info, return and length; a life is no episode."""

    class Informed(Corridor):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            info = {"group": "middle"} if not terminated else infos[self.episode]
            return obs, reward, terminated, truncated, info

    infos = [{}, {"group": "left", "eval": {"cost": 3}, "more": 1}]
    envs, seen = make_envs([lambda: Informed([(2, False)])]), []
    envs.reset(0)
    for _ in range(4):
        seen += envs.step([0]).infos
    ended = {"episode": {"r": 5, "l": 2}}
    assert seen == [(0, ended), (0, ended | {"group": "left", "eval": {"cost": 3}})]
    record = gym.wrappers.RecordEpisodeStatistics
    recorded = make_envs([lambda: record(Corridor([(2, True)]))])
    recorded.reset(0)
    assert [recorded.step([0]).infos for _ in range(2)] == [[], [(0, ended)]]


def test_both_ends_at_once_is_a_termination():
    """An episode that is terminated and truncated in the same step is not bootstrapped."""

    class Both(Corridor):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, True, True, {}

    envs = make_envs([lambda: Both([(9, False)])])
    for _ in range(2):  # a reset begins anew, whatever came before
        step = envs.reset(0)
        assert step.obs.values[0].tolist() == [[0]] and step.terminated.tolist() == [True]
        step = envs.step([0])
        assert step.terminated.tolist() == [True] and step.truncated.tolist() == [False]
        assert not step.finals and step.infos == [(0, {"episode": {"r": 2, "l": 1}})]


def test_same_seed_same_run(tmp_path):
    """A seed fixes every bit, with workers or without; another one gives others."""
    kwargs = {"observation": "mixed", "action": "mixed"}
    kwargs = dict(env_id="Random-v0", env_kwargs=kwargs, save_model=True, eval_episodes=1)

    def trained(name, **flags):
        result = run(tmp_path / name, **kwargs | flags)
        del result.scalars["charts/SPS"]
        return weights(result.folder), result.scalars, result.rows

    first = trained("first")
    torch.rand(3), np.random.rand(3)  # what ran before does not matter
    for name, flags in {"again": {}, "workers": {"num_workers": 2}, "seed": {"seed": 2}}.items():
        other = trained(name, **flags)
        same = all(torch.equal(first[0][key], other[0][key]) for key in first[0])
        assert same == (first[1:] == other[1:]) == (name != "seed")


def test_seeds_of_environments():
    """Environment i is seeded with seed + i."""

    class Seeded(Corridor):
        def reset(self, *, seed=None, options=None):
            super().reset()
            return np.array([0 if seed is None else seed], np.float32), {}

    envs = make_envs([partial(Seeded, [(9, False)])] * 5)
    assert envs.reset(30).obs.values[0].ravel().tolist() == [30, 31, 32, 33, 34]


class Net32(nn.Module):
    """The agent itself, for any observation and action."""

    def __init__(self, agent):
        super().__init__()
        self.agent = agent

    def forward(self, obs, actions):
        return [tensor.double() for tensor in self.agent(obs, {"": actions})[1:]]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"observation": "graph_edges", "head": "nodes"},
        {"observation": "mixed", "action": "multidiscrete"},
        {"observation": "set", "head": "pair"},
    ],
    ids=lambda kwargs: "+".join(kwargs.values()),
)
def test_update_on_ragged_observations(kwargs, tmp_path):
    """One update on graphs and sets of all sizes has the gradients and losses of the formulas."""
    flags = dict(env_id="Random-v0", env_kwargs=kwargs, num_envs=4, num_steps=32, seed=3)
    flags |= dict(total_timesteps=128, num_minibatches=1, update_epochs=1)
    seen = record(tmp_path, **flags)
    env = RandomEnv(**kwargs)
    leaves = ppo_graph.Envs([lambda: env]).leaves
    gradients, (log,) = reference_run(seen, Net32(seen.agent), leaves, small_args(**flags))
    for (name, _), gradient in zip(seen.agent.named_parameters(), gradients[0]):
        assert (gradient is None) == (name not in seen.gradients[0])
        if gradient is not None:
            torch.testing.assert_close(seen.gradients[0][name], gradient, atol=1e-5, rtol=1e-4)
    for scalar, value in log.items():
        assert seen.scalars[scalar][0][1] == pytest.approx(value, rel=1e-4, abs=1e-5), scalar
    num_bytes = sum(values.nbytes for step in seen.steps[:-1] for values in step.obs.values)
    (_, logged), *_ = seen.scalars["charts/obs_bytes_per_step"]
    assert logged == pytest.approx(num_bytes / 128)  # of the rollout alone
    sizes = [num for step in seen.steps for flat in step.finals for num in flat.counts.values()]
    assert len(sizes) > 3 and any(0 in num or num.max() > 20 for num in sizes)
