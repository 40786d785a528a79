"""ppo_graph_agents.py, in which each row is an agent: returns and gradients equal loops over agents
that appear, leave and come back; who is who is told by node_ids; what an environment gets wrong is
named."""

import contextlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    IDS,
    UsageErrors,
    everything,
    make_envs,
    record,
    run,
    small_args,
    vector,
)
from processes import train_ranks

from cleanrl_graph import ppo_graph_agents as script
from cleanrl_graph.envs import crowd
from cleanrl_graph.services.plot import episodes_of

CPU = torch.device("cpu")
FLAGS = dict(num_envs=3, num_steps=16, num_minibatches=2, update_epochs=2, total_timesteps=96)
FLAGS |= dict(learning_rate=1e-2, clip_coef=0.01)
ROWS = spaces.Sequence(vector(3), stack=True)
MASK = spaces.Sequence(spaces.Box(0, 1, (2,), np.int8), stack=True)


class Herd(gym.Env):
    """Each of six animals is there or not, in a random order; one that left may come back. Without
    ids as many as at first stay in their places. Episodes of 1 to 9 steps are terminated and
    truncated in turn. An animal's reward depends on its row and its action."""

    def __init__(self, with_ids=True, least=0, most=6, fault="", at=7):
        self.with_ids, self.least, self.most = with_ids, least, most
        self.fault, self.at, self.num_episodes, self.num_steps = fault, at, 0, 0
        ids = {"node_ids": IDS} if with_ids else {}
        self.observation_space = spaces.Dict({"set": ROWS, "action_mask": MASK, **ids})
        self.action_space = spaces.Sequence(spaces.Discrete(2, start=3), stack=True)

    def observe(self):
        rng = self.np_random
        if self.with_ids:
            self.ids = rng.permutation(6)[: rng.integers(self.least, self.most + 1)]
        self.rows = rng.normal(size=(len(self.ids), 3)).astype(np.float32)
        mask = np.ones((len(self.ids), 2), np.int8)
        mask[:, 0] = self.ids % 3 > 0
        obs = {"set": self.rows, "action_mask": mask}
        if self.with_ids:
            obs["node_ids"] = 1000 + self.ids
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        self.num_episodes += 1
        self.ids = np.arange(self.np_random.integers(self.most + 1))
        return self.observe(), {}

    def step(self, action):
        assert len(action) == len(self.ids) and set(action) <= {3, 4}
        rewards = self.rows[:, 0] + (action - 3) * self.rows[:, 1] + 0.1 * self.ids
        self.left -= 1
        self.num_steps += 1
        ended = self.left == 0
        terminates = self.num_episodes % 2 == 0
        obs = self.observe()
        info = {"rewards": rewards}
        if self.num_steps == self.at:
            obs, info = FAULTS[self.fault](obs, info)
        return obs, float(rewards.sum()), ended and terminates, ended and not terminates, info


FAULTS = {
    "": lambda obs, info: (obs, info),
    "missing": lambda obs, info: (obs, {}),
    "short": lambda obs, info: (obs, {"rewards": info["rewards"][:-1]}),
}
gym.register("Herd-v0", entry_point=Herd)


# ---- A whole run against loops over agents ----
def ids_by_env(leaves, flat):
    """[ids of each environment]"""
    paths = [leaf.path for leaf in leaves]
    ends = flat.counts["set"].cumsum()
    if "node_ids" not in paths:
        return [list(range(num)) for num in flat.counts["set"]]
    ids = flat.values[paths.index("node_ids")]
    return [own.tolist() for own in np.split(ids, ends[:-1])]


def values_by_env(agent, leaves, flats):
    """[{id: V} of each environment]"""
    storage = script.Storage(leaves, CPU)
    for flat in flats:
        storage.append(flat)
    values = iter(agent.value(everything(storage)).tolist())
    own = [ids for flat in flats for ids in ids_by_env(leaves, flat)]
    return [{agent_id: next(values) for agent_id in ids} for ids in own]


def advantages_of(agent, leaves, before, after, args):
    """{(t, env, id): (advantage, V)}: sums of (gamma lambda)^k delta along the rows of an agent."""
    T, N = args.num_steps, args.num_envs
    V = [values_by_env(agent, leaves, [step.obs]) for step in before]
    last = values_by_env(agent, leaves, [after[-1].obs])
    delta, goes_on = {}, {}
    for t, step in enumerate(after):
        finals = values_by_env(agent, leaves, step.finals) if step.finals else []
        rewards = iter(step.rewards.tolist())
        for i in range(N):
            following = V[t + 1][i] if t + 1 < T else last[i]
            if step.terminated[i]:
                following = {}
            if step.truncated[i]:
                following = finals.pop(0)
            ended = step.terminated[i] or step.truncated[i]
            for agent_id, value in V[t][i].items():
                bootstrap = following.get(agent_id, 0.0)
                delta[t, i, agent_id] = next(rewards) + args.gamma * bootstrap - value
                goes_on[t, i, agent_id] = agent_id in following and not ended
    result = {}
    for t, i, agent_id in delta:
        total, k = 0.0, t
        while (k, i, agent_id) in delta:
            total += (args.gamma * args.gae_lambda) ** (k - t) * delta[k, i, agent_id]
            if not goes_on[k, i, agent_id]:
                break
            k += 1
        result[t, i, agent_id] = total, V[t][i][agent_id]
    return result


@pytest.mark.parametrize("with_ids", [True, False])
def test_gradients_against_loops_over_agents(with_ids, tmp_path):
    """Those of the first update: agents leave and come back, episodes end within the rollout."""
    flags = FLAGS | dict(env_id="Herd-v0", env_kwargs={"with_ids": with_ids}, update_epochs=1)
    found = record(tmp_path, script, **flags)
    agent, leaves, steps, actions, minibatches, gradients, scalars, _ = found
    args = small_args(script, **flags)
    T = args.num_steps
    before, after = steps[:T], steps[1 : T + 1]
    assert any(step.truncated.any() for step in after)
    assert any(step.terminated.any() for step in after)
    assert min(step.obs.counts["set"].min() for step in before) == 0
    storage = script.Storage(leaves, CPU)
    for step in before:
        storage.append(step.obs)
    acts = np.concatenate([np.concatenate(acts) for acts in actions[:T]]) - 3
    acts = torch.tensor(acts)[:, None]
    with torch.no_grad():
        _, old_log_prob, _, old_value = agent(everything(storage), acts)
    found = advantages_of(agent, leaves, before, after, args)
    advantages, V = torch.tensor(list(found.values()), dtype=torch.float64).T
    torch.testing.assert_close(old_value.double(), V, atol=1e-5, rtol=1e-5)
    returns = advantages + V
    adam = dict(lr=args.learning_rate, eps=1e-5, amsgrad=args.amsgrad)
    optimizer = torch.optim.Adam(agent.parameters(), **adam)
    ends = storage.whole().counts["set"].cumsum()
    starts = ends - storage.whole().counts["set"]
    for steps_of, gradient in zip(minibatches[: args.num_minibatches], gradients):
        idx = np.concatenate([np.arange(starts[b], ends[b]) for b in steps_of])
        _, log_prob, entropy, value = agent(storage.gather(steps_of)[0], acts[idx])
        A = advantages[idx]
        A = (A - A.mean()) / (A.std() + 1e-8)
        ratio = (log_prob.double() - old_log_prob[idx]).exp()
        clipped = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
        error = (value - returns[idx]) ** 2
        near = old_value[idx] + (value - old_value[idx]).clip(-args.clip_coef, args.clip_coef)
        error = torch.maximum(error, (near - returns[idx]) ** 2)
        loss = -torch.min(ratio * A, clipped * A).mean() + args.vf_coef * error.mean() / 2
        loss = loss - args.ent_coef * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        for name, parameter in agent.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, gradient[name], atol=2e-6, rtol=1e-3)
        optimizer.step()
    mismatches = [value for _, value in scalars["debug/collection_mismatch"]]
    assert len(mismatches) == 2 and max(mismatches) < 1e-5


def test_what_is_logged(tmp_path):
    """The environment's return of an episode, and the mean return of its agents."""
    flags = FLAGS | dict(num_steps=60, num_envs=1, total_timesteps=60)
    seen = record(tmp_path, script, env_id="Herd-v0", **flags)
    ids = [leaf.path for leaf in seen.leaves].index("node_ids")
    total, agents, expected = 0.0, set(), []
    for before, after in zip(seen.steps, seen.steps[1:]):
        total += after.rewards.sum(dtype=float)
        agents |= set(before.obs.values[ids].tolist())
        if after.terminated[0] or after.truncated[0]:
            expected.append(total / max(len(agents), 1))
            total, agents = 0.0, set()
    [(_, logged)] = seen.scalars["charts/agent_return"]
    assert logged == pytest.approx(np.mean(expected), rel=1e-4)
    assert len(episodes_of(tmp_path)) == len(expected)


class Relay(gym.Env):
    """Three agents; agent 7 is truncated in the second step, whose info has its last row."""

    observation_space = spaces.Dict({"set": ROWS, "node_ids": IDS})
    action_space = spaces.Sequence(spaces.Discrete(2), stack=True)

    def observe(self, ids):
        rows = self.np_random.normal(size=(len(ids), 3)).astype(np.float32)
        return {"set": rows, "node_ids": np.array(ids)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.ids = 0, [5, 7, 9]
        return self.observe(self.ids), {}

    def step(self, action):
        self.t += 1
        info = {"rewards": np.ones(len(self.ids))}
        if self.t == 2:
            self.ids = [9, 5]
            info |= {"truncated": [7], "last_observation": self.observe([7, 5, 9])}
        return self.observe(self.ids), 1.0, False, False, info


@pytest.mark.parametrize("workers", [0, 2])
def test_an_agent_is_truncated(workers):
    """Its last row is what follows, in the observation that its environment gives for that."""
    args = small_args(script, num_envs=2, num_steps=3)
    with contextlib.closing(make_envs([Relay] * 2, workers, script)) as envs:
        agent = script.Agent(envs.leaves, envs.action_space, args)
        memory = script.Memory(agent, envs.leaves, 2, args)
        step = envs.reset(0)
        memory.begin()
        steps = []
        for _ in range(3):
            action, *_ = memory.act(step)
            steps.append(step)
            step = envs.step(agent.head.env_actions(action, step.obs.counts))
            memory.keep(step)
    never = np.zeros((3, 2), bool)
    next_rows = memory.next_rows(step, never, never)
    flats = [each.obs for each in steps] + [step.obs] + [flat for _, _, flat in memory.cuts]
    [place] = [k for k, leaf in enumerate(envs.leaves) if leaf.path == "node_ids"]
    ids = np.concatenate([flat.values[place] for flat in flats])
    num = len(next_rows)
    assert num == 2 * (3 + 3 + 2) and (ids[next_rows] == ids[:num]).all()
    assert [number for number, _, _ in memory.cuts] == [2, 3]
    cut = np.flatnonzero(ids[:num] == 7)[2:]  # of each env in the second step
    assert next_rows[cut].tolist() == [num + 4, num + 7]
    last = agent.value(memory.storage.batch(memory.storage.copy(memory.cuts[1][2])))
    values = memory.next_values(step)
    torch.testing.assert_close(values[-3:], last.detach())


# ---- What an environment gets wrong ----


@pytest.mark.parametrize(
    "kwargs, sentence",
    [
        ({"fault": "missing"}, r"env \d, step 7: info\['rewards'\]: KeyError"),
        ({"fault": "short"}, r"env \d, step 7: .* has the shape \(\d,\), but \d rows acted"),
        ({"most": 0, "least": 0}, "no step of the rollout has agents"),
    ],
)
def test_sentences(kwargs, sentence, tmp_path):
    """They name env, step and value."""
    with pytest.raises(UsageErrors, match=sentence):
        run(tmp_path, script, env_id="Herd-v0", env_kwargs={"least": 2} | kwargs, **FLAGS)


def test_ranks_with_other_numbers_of_agents(tmp_path):
    """The variance of the returns is that of all ranks."""
    flags = FLAGS | dict(norm_vloss=1.0, adv_floor=0.1)
    assert train_ranks(tmp_path, "ppo_graph_agents", env_id="Herd-v0", **flags) == [0, 0]


# ---- Crowds, and few agents ----


def test_crowd():
    """Who arrives is gone, rewards are those who acted, walking straight beats random walks."""
    env = gym.make("cleanrl_graph.envs:Crowd-v0", disable_env_checker=True).unwrapped
    obs, _ = env.reset(seed=1)
    seen = set()
    for _ in range(100):
        assert obs in env.observation_space
        ids = obs["node_ids"].tolist()
        obs, reward, terminated, truncated, info = env.step(crowd.straight(env))
        assert len(info["rewards"]) == len(ids) and not terminated
        assert reward == pytest.approx(info["rewards"].mean() if ids else 0)
        arrived = {k for k, own in zip(ids, info["rewards"]) if own > 0.4}
        assert arrived.isdisjoint(obs["node_ids"].tolist()) and arrived.isdisjoint(seen)
        seen |= arrived
    assert truncated and info["eval"]["arrived"] == len(seen) / env.num_ids
    scores = crowd.reference_scores(1)
    assert scores["straight"][0] > scores["random"][0]


def test_fewer_steps_with_agents_than_minibatches(tmp_path, monkeypatch):
    """Then there are as many minibatches as these steps."""
    flags = FLAGS | dict(num_steps=6, num_minibatches=18, total_timesteps=90, update_epochs=1)
    sizes = []

    class Memory(script.Memory):
        def minibatches(self, rng, num):
            found = list(super().minibatches(rng, num))
            sizes.append((np.count_nonzero(self.storage.whole().counts["set"]), len(found)))
            yield from found

    monkeypatch.setattr(script, "Memory", Memory)
    run(tmp_path, script, env_id="Herd-v0", env_kwargs={"most": 2}, **flags)
    assert len(sizes) == 5 and all(num == steps for steps, num in sizes)
    assert min(num for _, num in sizes) < 18
