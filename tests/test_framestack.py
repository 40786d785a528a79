"""The views of ppo_framestack.py: what they read, that each step is stored and encoded once, and that it learns."""

import gymnasium as gym
import numpy as np
import ppo_framestack
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, graph_space, sample, small_args, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo import CASES

CPU = torch.device("cpu")


def fs_args(**kwargs):
    short = {"obs_shifts": "-3:0", "action_shifts": "-2:-1", "reward_shifts": "-4,-1"}
    return small_args(ppo_framestack, **short | kwargs)


@pytest.mark.parametrize("text, newest, shifts", [
    ("-15:0", 0, list(range(-15, 1))), ("-8,-4,-1,0", 0, [-8, -4, -1, 0]), ("0", 0, [0]), ("-1", -1, [-1]),
    ("", -1, []), ("-3:-1", -1, [-3, -2, -1]), ("-1,-5,-1", -1, [-5, -1])])
def test_shifts(text, newest, shifts):
    """T1: ranges with both ends, lists, none."""
    assert ppo_framestack.parse_shifts(text, newest, "--x").tolist() == shifts


@pytest.mark.parametrize("text, newest", [("0", -1), ("1", 0), ("-3:1", 0), ("0:-3", 0), ("a", 0), ("-1;-2", 0),
                                          ("-3:-2:-1", 0), ("1.5", 0), ("-3:", 0), (",", 0)])
def test_wrong_shifts(text, newest):
    """A view on the future, an empty range or a text that is no shifts is an error that quotes it."""
    with pytest.raises(ValueError, match="--obs-shifts '" + text):
        ppo_framestack.parse_shifts(text, newest, "--obs-shifts")


def test_no_views_at_all():
    """A policy without any input is refused."""
    envs = ppo_framestack.Envs([lambda: gym.make("CartPole-v1")])
    with pytest.raises(ValueError, match="are all empty"):
        ppo_framestack.Agent(envs.leaves, envs.action_space, fs_args(obs_shifts="", action_shifts="", reward_shifts=""))


class Script(gym.Env):
    """Random observations of `space`, reward 1, 2, 3, ...; episode k of env i has lengths[k] steps and is truncated if
    that is even. `log` holds (first step?, observation, action, reward) of every step."""

    def __init__(self, space, lengths, seed, action_space=None):
        self.observation_space, self.lengths, self.rng = space, lengths, np.random.default_rng(seed)
        self.action_space = action_space or spaces.Discrete(3)
        self.episode, self.count, self.log, self.finals, self.truncated = -1, 0, [], [], {}

    def observe(self):
        return sample(self.observation_space, self.rng, lambda rng: rng.integers(1, 5))

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        obs = self.observe()
        self.log.append([True, obs, None, None])
        return obs, {}

    def step(self, action):
        self.t, self.count = self.t + 1, self.count + 1
        self.log[-1][2:] = action, float(self.count)
        length = self.lengths[self.episode % len(self.lengths)]
        obs, ended = self.observe(), self.t == length
        if ended:
            self.finals.append((len(self.log) - 1, obs))
            self.truncated[len(self.log) - 1] = length % 2 == 0
        else:
            self.log.append([False, obs, None, None])
        return obs, float(self.count), ended and length % 2 == 1, ended and length % 2 == 0, {}


def play(space, lengths, args, num_rollouts=3, values=None, **kwargs):
    """(agent, memory, envs, rollout) after some rollouts, without updates but with new weights for each. `values`
    receives (envs, V) of every bootstrap of the last rollout."""
    games = [Script(space, row, seed, **kwargs) for seed, row in enumerate(lengths)]
    envs = ppo_framestack.Envs([lambda game=game: game for game in games], args.action_head)
    agent = ppo_framestack.Agent(envs.leaves, envs.action_space, args)
    actor = ppo_framestack.Actor(agent, envs.leaves, len(games), args, CPU)
    with torch.no_grad():
        envs.reset(0)
        for _ in range(num_rollouts):
            for parameter in agent.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
            original, calls = ppo_framestack.Actor.value, []
            actor.value = lambda step, parts, counts, which, lane: calls.append(
                (which.tolist(), original(actor, step, parts, counts, which))) or calls[-1][1]
            rollout = ppo_framestack.collect(actor, envs, args, lambda *episode: None)
    if values is not None:
        values.extend(calls)
    return agent, actor.memory, games, rollout


def window(log, position, shift):
    """The entry `shift` steps before `position` in a log, None if that is before the episode."""
    for _ in range(-shift):
        if position < 0 or log[position][0]:
            return None
        position -= 1
    return log[position]


def reference_views(agent, envs, log, position, newest=None):
    """The views of one step by plain loops, one observation at a time. `newest` replaces the current observation."""
    def encoded(obs):
        storage = ppo_framestack.Storage(envs.leaves, CPU)
        storage.append(*ppo_framestack.collate(envs.leaves, [envs.flatten(0, obs)]))
        return agent.encode(storage.latest()) + (storage.latest(),)

    parts = []
    for shift in agent.shifts["obs"]:
        entry = [False, newest] if newest is not None and shift == 0 else window(log, position, shift)
        parts.append(torch.zeros(agent.encoder.dim) if entry is None else encoded(entry[1])[0][0])
    for shift in agent.shifts["actions"]:
        entry = window(log, position, shift)
        parts.append(torch.zeros(agent.view_dims["actions"]) if entry is None else
                     torch.nn.functional.one_hot(torch.tensor(entry[2]), 3).float())
    for shift in agent.shifts["rewards"]:
        entry = window(log, position, shift)
        parts.append(torch.tensor([0.0 if entry is None else entry[3]]))
    for leaf in envs.leaves:
        if ppo_framestack.key(leaf.path) in agent.cnns:
            entries = [[False, newest] if newest is not None and shift == 0 else window(log, position, shift)
                       for shift in agent.shifts["obs"]]
            images = [np.zeros(leaf.shape, leaf.dtype) if entry is None else leaf.get(entry[1]) for entry in entries]
            images = [image.transpose(2, 0, 1) if leaf.shape[2] < leaf.shape[0] else image for image in images]
            net = agent.cnns[ppo_framestack.key(leaf.path)]
            parts.append(net.net(torch.as_tensor(np.concatenate(images))[None].float() * net.scale)[0])
    return torch.cat(parts)


LENGTHS = [[5, 2, 1], [1, 4, 9], [100]]
KINDS = ["vector", "discrete", "image_hwc", "image_chw", "graph_edges", "set", "mixed"]


@pytest.mark.parametrize("image_views", ["channels", "encodings"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_views_against_plain_loops(kind, image_views):
    """T1, T5: views of every kind of observation, of actions and rewards, read the steps before in the episode, also
    those before the rollout, and zeros before its first step."""
    args = fs_args(num_envs=3, num_steps=7, image_views=image_views)
    agent, memory, games, _ = play(OBSERVATIONS[kind], LENGTHS, args)
    envs = ppo_framestack.Envs([lambda: games[0]])
    start = memory.storage.size - args.num_envs * args.num_steps
    idx = start + np.random.default_rng(0).permutation(args.num_envs * args.num_steps)
    views, _, _ = memory.minibatch(idx)
    for row, i in zip(views, idx - start):
        t, env = 14 + i // 3, i % 3
        torch.testing.assert_close(row, reference_views(agent, envs, games[env].log, t), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_final_observations_have_the_views_of_their_episode():
    """V of a truncated episode's last observation sees the steps of that episode and not of the next."""
    for kind in ("vector", "image_hwc", "graph_edges"):
        args, calls = fs_args(num_envs=3, num_steps=7), []
        agent, _, games, _ = play(OBSERVATIONS[kind], LENGTHS, args, values=calls)
        envs = ppo_framestack.Envs([lambda games=games: games[0]])
        assert calls[-1][0] == [0, 1, 2] and len(calls) > 2
        for env, game in enumerate(games):
            values = [value[which.index(env)] for which, value in calls[:-1] if env in which]
            inside = [(position, obs) for position, obs in game.finals if 14 <= position < 21]
            inside = [(position, obs) for position, obs in inside if game.truncated[position]]
            expected = [agent.critic(reference_final(agent, envs, game.log, position, obs)) for position, obs in inside]
            assert len(values) == len(expected)
            if not game.log[21][0]:  # the rollout ends within an episode
                values.append(calls[-1][1][env])
                expected.append(agent.critic(reference_views(agent, envs, game.log, 21)))
            if values:
                torch.testing.assert_close(torch.stack(values), torch.cat(expected), atol=1e-5, rtol=1e-5)


def reference_final(agent, envs, log, position, obs):
    """The views of an episode's last observation `obs`, which came after the step at `position`."""
    return reference_views(agent, envs, [*log[:position + 1], [False, obs, None, None]], position + 1)


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 9),
       st.sampled_from(["-5:0", "-7,-2,0", "0", "-1"]))
@settings(max_examples=40, deadline=None)
def test_views_never_cross_an_episode(lengths, num_steps, shifts):
    """T1: the row that a view reads is of the same env and episode, whatever the lengths; it is row 0 otherwise."""
    args = fs_args(num_envs=len(lengths), num_steps=num_steps, obs_shifts=shifts)
    _, memory, games, _ = play(vector(2), lengths, args)
    episodes = [np.cumsum([entry[0] for entry in game.log[:-1]]) for game in games]  # all but the newest step
    N, size = len(lengths), memory.storage.size
    for name, rows in memory.rows(np.arange(size), memory.age[:size]).items():
        total = size // N
        for index, row in enumerate(rows):
            t, env = index // N, index % N
            for shift, r in zip(memory.agent.shifts[name], row):
                at = len(episodes[env]) - total + t  # the position in the log
                same = at + shift >= 0 and episodes[env][at + shift] == episodes[env][at]
                if same and t + shift >= 0:
                    assert r == 1 + (t + shift) * N + env
                elif not same:
                    assert r == 0


@pytest.mark.parametrize("observation, action, head, flags", CASES + [
    ("image_hwc", "discrete", "flat", {"image_views": "encodings"}),
    ("mixed", "mixed", "flat", {"image_views": "encodings", "norm_obs": True}),
    ("graph_edges", "", "nodes", {"norm_obs": True}), ("vector", "box", "flat", {"norm_obs": True}),
    ("vector", "discrete", "flat", {"action_shifts": "", "reward_shifts": ""}),
    ("graph", "discrete", "flat", {"obs_shifts": "-2", "action_shifts": "-9,-1"})],
    ids=lambda v: v if isinstance(v, str) else "+".join(v))
def test_collection_and_training_agree(observation, action, head, flags, tmp_path, monkeypatch):
    """X1, X2, T5: before the first gradient step of each update the probability ratio is 1, for every observation and
    head; all actions are legal; main runs from environment to evaluation."""
    logged = []
    monkeypatch.setattr(ppo_framestack.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    kwargs = {"observation": observation, "action": action, "head": head}
    args = fs_args(env_id="Random-v0", env_kwargs=kwargs, run_dir=str(tmp_path), eval_episodes=2, total_timesteps=72,
                   **flags)
    returns = ppo_framestack.main(args)
    assert len(logged) == 3
    for scalars in logged:
        assert 0 <= scalars["debug/collection_mismatch"] < 1e-5
        assert all(np.isfinite(value) for name, value in scalars.items() if name != "losses/explained_variance")
    assert logged[0]["losses/approx_kl"] != 0  # something was learned
    assert [row["return"] for row in returns] == [row["length"] for row in returns]  # reward 1: legal actions only


@pytest.mark.parametrize("kind", ["vector", "image_hwc", "graph_edges", "set", "mixed"])
def test_a_boundary_that_is_off_by_one_is_noticed(kind, monkeypatch, tmp_path):
    """X2: training views that reach one step over an episode's start make the ratio differ from 1."""
    original, logged = ppo_framestack.Memory.minibatch, []

    def shifted(self, idx):
        age, steps = self.age, np.arange(len(self.age)) // self.num_envs
        self.age = np.minimum(age + 1, steps)
        result = original(self, idx)
        self.age = age
        return result

    monkeypatch.setattr(ppo_framestack.Memory, "minibatch", shifted)
    monkeypatch.setattr(ppo_framestack.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    ppo_framestack.main(fs_args(env_id="Random-v0", env_kwargs={"observation": kind}, run_dir=str(tmp_path)))
    assert all(scalars["debug/collection_mismatch"] > 1e-4 for scalars in logged)


@pytest.mark.parametrize("kind", ["vector", "image_chw", "graph_edges"])
def test_each_step_is_stored_once(kind):
    """T1, G1: the stored bytes are those of a run without views, plus the steps that views reach back to."""
    args = fs_args(num_envs=3, num_steps=7)
    _, memory, games, _ = play(OBSERVATIONS[kind], LENGTHS, args)
    logs = [game.log[-(memory.depth + args.num_steps + 1):-1] for game in games]
    envs = ppo_graph.Envs([lambda: games[0]])
    plain = ppo_graph.Storage(envs.leaves, CPU)
    for row in zip(*logs):
        plain.append(*ppo_graph.collate(envs.leaves, [envs.flatten(0, entry[1]) for entry in row]))
    assert memory.depth == 4 and memory.storage.num_rows == plain.num_rows
    for a, b, num in zip(memory.storage.values, plain.values, plain.num_rows):
        assert torch.equal(a[:num], b[:num])


def test_each_step_is_encoded_once(monkeypatch):
    """T5: a minibatch encodes every graph that its views read once, and collection only the newest ones."""
    args = fs_args(num_envs=3, num_steps=7, action_shifts="", reward_shifts="")
    _, memory, _, _ = play(graph_space(), LENGTHS, args)
    encoded, original = [], ppo_framestack.Encoder.forward
    monkeypatch.setattr(ppo_framestack.Encoder, "forward", lambda self, obs: encoded.append(
        len(obs["obs.nodes"].ptr) - 1) or original(self, obs))
    start = memory.storage.size - 3 * 7
    idx = start + np.array([18, 9, 6, 20])
    read = set(memory.rows(idx, memory.age[idx])["obs"].ravel().tolist()) - {0}
    memory.minibatch(idx)
    assert encoded == [len(read)] and len(read) < 4 * len(idx)


def test_gradient_reaches_the_encoder_through_all_views():
    """T5: a graph that is only seen through a view on the past trains the encoder."""
    args = fs_args(num_envs=1, num_steps=5, obs_shifts="-2", action_shifts="", reward_shifts="")
    agent, memory, _, _ = play(graph_space(), [[100]], args)
    views, _, _ = memory.minibatch(np.array([memory.storage.size - 1]))
    views.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in agent.encoder.parameters())


@torch.no_grad()
def test_long_episodes_in_evaluation():
    """The memory of an Actor stays bounded, and the views stay right when it forgets at `begin`."""
    args = fs_args(num_envs=2, num_steps=3)
    games = [Script(vector(2), [50], seed) for seed in range(2)]
    envs = ppo_framestack.Envs([lambda game=game: game for game in games])
    agent = ppo_framestack.Agent(envs.leaves, envs.action_space, args)
    actor, step = ppo_framestack.Actor(agent, envs.leaves, 2, args, CPU), envs.reset(0)
    for t in range(40):
        if t % args.num_steps == 0:
            actor.begin()
        action = actor.act(step, greedy=True)[0]
        views = actor.memory.latest()
        for i, game in enumerate(games):
            torch.testing.assert_close(views[i], reference_views(agent, envs, game.log, t))
        step = envs.step(action[:, 0].tolist())
    assert len(actor.memory.age) == 2 * (4 + 3) and actor.storage.values[0].shape[0] <= 4 * 8


class Delay(gym.Env):
    """A random bit each step; reward 1 for naming the one of two steps before."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits = [0, 0, int(self.np_random.integers(2))]
        self.t = 0
        return self.bits[-1], {}

    def step(self, action):
        reward, self.t = float(action == self.bits[-3]), self.t + 1
        self.bits.append(int(self.np_random.integers(2)))
        return self.bits[-1], reward, False, self.t == 16, {}


gym.register("DelayedBit-v0", entry_point=Delay)
LEARN = dict(env_id="DelayedBit-v0", num_envs=8, num_steps=32, total_timesteps=12_000, learning_rate=3e-3, gamma=0.5,
             action_shifts="", reward_shifts="", eval_episodes=50)


@pytest.mark.parametrize("shifts, low, high", [("-2:0", 15.0, 16.0), ("-2", 15.0, 16.0), ("0", 6.0, 10.5),
                                               ("-1:0", 6.0, 10.5)])
def test_learns_what_the_views_show(tmp_path, shifts, low, high):
    """T1: a bit of two steps before is named with a view on it, and guessed without."""
    rows = ppo_framestack.main(fs_args(**LEARN | {"obs_shifts": shifts, "run_dir": str(tmp_path)}))
    assert low <= np.mean([row["return"] for row in rows]) <= high


def test_stateless_cartpole(tmp_path):
    """T4: frames stand in for the velocities that the observation lacks; one frame does not."""
    flags = dict(env_id="envs:StatelessCartPole-v1", num_envs=8, num_steps=64, total_timesteps=25_600, gamma=0.98,
                 learning_rate=3e-3, update_epochs=8, num_minibatches=4, hidden_dims=(64,), clip_vloss=False,
                 norm_obs=True, eval_episodes=20, run_dir=str(tmp_path))
    views = ppo_framestack.main(fs_args(**flags, obs_shifts="-3:0"))
    control = ppo_framestack.main(fs_args(**flags | {"obs_shifts": "0", "action_shifts": "", "reward_shifts": ""}))
    assert np.mean([row["return"] for row in views]) > 150 > 100 > np.mean([row["return"] for row in control])


def test_workers(tmp_path):
    """Worker processes change nothing."""
    flags = dict(env_id="Random-v0", env_kwargs={"observation": "mixed"}, eval_episodes=3)
    rows = [ppo_framestack.main(fs_args(run_dir=str(tmp_path), num_workers=n, **flags)) for n in (0, 2)]
    assert rows[0] == rows[1]
