"""The views of ppo_framestack.py read the steps before of the same episode, and zeros before its
first, as plain loops do; each step is stored and encoded once; what views show is learned."""

from functools import partial

import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.spaces import Discrete, MultiDiscrete
from helpers import ACTIONS, OBSERVATIONS, UsageErrors, graph_space, mean_return, sample

from cleanrl_graph import ppo_framestack as script
from cleanrl_graph import ppo_graph

CPU = torch.device("cpu")
SHORT = {"obs_shifts": "-3:0", "action_shifts": "-2:-1", "reward_shifts": "-4,-1"}
NO_VIEWS = dict.fromkeys(SHORT, "")


def train(run_dir, **flags):
    return helpers.run(run_dir, script, **SHORT | flags)


@pytest.mark.parametrize(
    "text, shifts",
    [("-3:0", [-3, -2, -1, 0]), ("-8,-4,0", [-8, -4, 0]), ("", []), ("-1,-5,-1", [-5, -1])]
    + [(text, None) for text in "1 -3:1 0:-3 a -3:".split()],
)
def test_shifts(text, shifts):
    """Ranges with both ends, lists, none. The future and empty ranges are refused."""
    if shifts is not None:
        assert script.parse_shifts(text, 0, "--x").tolist() == shifts
        return
    with pytest.raises(script.UsageError, match="--obs-shifts '" + text):
        script.parse_shifts(text, 0, "--obs-shifts")


class Script(gym.Env):
    """Random observations of `space`, reward 1, 2, 3, ...; episode k of env i has lengths[k] steps
    and is truncated if that is even. `log` holds [first step?, observation, action, reward] of
    every step; `finals` what came after the last step of truncated episodes, by its place in the
    log. Actions are noted by whoever chooses them."""

    def __init__(self, space, lengths, seed, action_space=None):
        self.observation_space, self.lengths, self.rng = space, lengths, np.random.default_rng(seed)
        self.action_space = action_space or Discrete(3)
        self.episode, self.log, self.finals = -1, [], {}

    def observe(self):
        return sample(self.observation_space, self.rng, lambda rng: rng.integers(1, 5))

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        obs = self.observe()
        self.log.append([True, obs, None, None])
        return obs, {}

    def step(self, action):
        self.t += 1
        reward = self.log[-1][3] = float(len(self.log))
        length = self.lengths[self.episode % len(self.lengths)]
        obs, ended, truncates = self.observe(), self.t == length, length % 2 == 0
        if ended and truncates:
            self.finals[len(self.log) - 1] = obs
        if not ended:
            self.log.append([False, obs, None, None])
        return obs, reward, ended and not truncates, ended and truncates, {}


def begun(space, lengths, action_space=None, **flags):
    """What a run has before its first step; game i is env i."""
    games = [Script(space, row, seed, action_space) for seed, row in enumerate(lengths)]
    makers = [lambda game=game: game for game in games]
    part = helpers.begun(script, makers, **SHORT | {"num_steps": 7} | flags)
    part.games = games
    return part


@torch.no_grad()
def collect(part):
    """One rollout after a change of the weights. `part` receives the views of each step, [T, N,
    dim], and the games their actions."""
    part.views = []
    for parameter in part.agent.parameters():
        parameter += 0.01 * torch.randn_like(parameter)
    actor = part.agent.actor
    hook = actor.register_forward_pre_hook(lambda _, inputs: part.views.append(inputs[0]))
    first = [len(game.log) - 1 for game in part.games]
    helpers.collect(part)
    hook.remove()
    part.views = torch.stack(part.views)
    actions = part.actions.unflatten(0, (-1, len(part.games)))
    for game, own, place in zip(part.games, actions.unbind(1), first):
        for entry, action in zip(game.log[place:], own):
            entry[2] = action


def minibatch(memory, idx):
    """The agent's inputs for the steps `idx`: views, elements, observations, actions."""
    chosen = helpers.SimpleNamespace(permutation=lambda num: np.asarray(idx))
    ((_, inputs),) = memory.minibatches(chosen, 1)
    return inputs


def play(*args, num_rollouts=3, **flags):
    part = begun(*args, **flags)
    for _ in range(num_rollouts):
        collect(part)
    return part


def test_gradient_reaches_the_encoder_through_all_views():
    """A graph that is only seen through a view on the past trains the encoder, and so does a chosen
    node."""
    for views, head in (
        ({"obs_shifts": "-2", "action_shifts": ""}, "auto"),
        ({"obs_shifts": "", "action_shifts": "-1"}, "nodes"),
    ):
        flags = dict(num_steps=5, reward_shifts="", action_head=head, **views)
        part = play(helpers.graph_space(), [[100]], Discrete(9), **flags)
        views, *_ = minibatch(part.memory, [4])
        views.sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in part.agent.encoder.parameters())


def window(log, position, shift):
    """The entry `shift` steps before `position` in a log, None if that is before the episode."""
    for _ in range(-shift):
        if position < 0 or log[position][0]:
            return None
        position -= 1
    return log[position]


def reference_views(part, log, position):
    """The views of one step by plain loops, one observation at a time."""
    agent, envs, parts = part.agent, part.envs, []

    def encoded(entry):
        storage = script.Storage(envs.leaves, CPU)
        return agent.encoder(storage.append(envs.collate([envs.read(entry[1])])))

    def embedded(entry):
        numbers = []
        for head in agent.head.heads:
            for column in entry[2][head.part.columns]:
                if head.part.group:
                    numbers.append(encoded(entry)[1][head.part.group].values[int(column)])
                elif head.part.n:
                    numbers.append(F.one_hot(column.long(), head.part.n))
                else:
                    numbers.append(column[None])
        return torch.cat(numbers)

    reads = {
        "obs": (agent.encoder.dim, lambda entry: encoded(entry)[0][0]),
        "actions": (agent.action_dim, embedded),
        "rewards": (1, lambda entry: torch.tensor([entry[3]])),
    }
    missing = reads.keys() - agent.shifts.keys()
    assert not missing or missing == {"obs"} and agent.encoder.dim == 0  # all images are channels
    for name, (dim, read) in reads.items():
        for shift in agent.shifts.get(name, ()):
            entry = window(log, position, shift)
            parts.append(torch.zeros(dim) if entry is None else read(entry))
    for k, leaf in enumerate(envs.leaves):
        name = script.module_key(leaf.path)
        if name in agent.cnns:
            shape, images, net = leaf.space.shape, [], agent.cnns[name]
            for shift in agent.shifts[name]:
                entry = window(log, position, shift)
                image = np.zeros(shape, leaf.dtype) if entry is None else envs.read(entry[1])[k][0]
                images.append(image.transpose(2, 0, 1) if shape[2] < shape[0] else image)
            images = torch.as_tensor(np.concatenate(images))[None].float()
            parts.append(net.net(images * net.scale)[0])
    return torch.cat(parts).float()


close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
LENGTHS = [[5, 2, 1], [1, 4, 9], [100]]
NODES = {"action_head": "nodes"}


@pytest.mark.parametrize(
    "kind, action_space, flags",
    [
        *((kind, None, {}) for kind in ("vector", "image_hwc", "image_chw", "mixed")),
        ("vector", ACTIONS["mixed"], {}),
        ("graph_edges", Discrete(9), NODES),
        ("set", MultiDiscrete([9, 9]), NODES | {"obs_shifts": "-2"}),
        ("vector", None, {"obs_shifts": "", "action_shifts": "-5,-2"}),
        ("image_hwc", None, {"obs_shifts": "-6,-1"}),
    ],
)
@torch.no_grad()
def test_views_against_plain_loops(kind, action_space, flags):
    """Views of every kind of observation, of actions and rewards, read the steps before in the
    episode, also those before the rollout, and zeros before its first step: when collecting, when
    training, and the last observation of a truncated episode sees the steps of that episode and not
    of the next."""
    part = play(OBSERVATIONS[kind], LENGTHS, action_space, **flags)
    idx = np.random.default_rng(0).permutation(21)
    views, *_ = minibatch(part.memory, idx)
    finals = dict(zip(part.cut, part.next_values[3:]))
    for i, row in zip(idx, views):
        t, env = divmod(int(i), 3)
        log, position = part.games[env].log, 14 + t
        expected = reference_views(part, log, position)
        close(row, expected)
        close(part.views[t, env], expected)
        if i in finals:
            after = [*log[: position + 1], [False, part.games[env].finals[position], None, None]]
            close(finals[i], part.agent.critic(reference_views(part, after, position + 1))[0])
    for value, game in zip(part.next_values, part.games):
        close(value, part.agent.critic(reference_views(part, game.log, 21))[0])
    assert len(part.next_values) - 3 == len(finals) > 1


@pytest.mark.parametrize("kind", ["image_chw", "graph_edges"])
def test_each_step_is_stored_once(kind):
    """The stored bytes are those of a run without views, plus the steps that views reach back to:
    also after the last values were computed and minibatches were made. Images that enter as
    channels are in their table and not in the storage."""
    part = play(OBSERVATIONS[kind], LENGTHS)
    plain = ppo_graph.Storage(part.envs.leaves, CPU)
    for row in zip(*[game.log[-(4 + 7 + 1) : -1] for game in part.games]):
        plain.append(part.envs.collate([part.envs.read(entry[1]) for entry in row]))
    list(part.memory.minibatches(np.random.default_rng(0), 3))
    mine, expected = part.memory.storage.whole(), plain.whole()
    values = iter(mine.values)
    for leaf, rows in zip(part.envs.leaves, expected.values, strict=True):
        if kind == "image_chw":
            table = part.memory.tables[script.module_key(leaf.path)]
            stored = table[1 : 1 + len(rows)]
            assert table.dtype == rows.dtype and not table[0].any()
        else:
            stored = next(values)
        assert torch.equal(stored, rows)
    assert not list(values)
    assert all((mine.counts[group] == expected.counts[group]).all() for group in expected.counts)
    assert len(part.memory.recent) == 4
    assert {len(table) for table in part.memory.tables.values()} == {1 + (4 + 7 + 1) * 3}


def test_each_step_is_encoded_once(monkeypatch):
    """A minibatch encodes what its views read once, collection only the newest graphs."""
    part = play(graph_space(), LENGTHS, action_shifts="", reward_shifts="")
    encoded, original, memory = [], script.Encoder.forward, part.memory

    def forward(self, obs):
        encoded.append(len(obs["obs.nodes"].ptr) - 1)
        return original(self, obs)

    monkeypatch.setattr(script.Encoder, "forward", forward)
    idx = np.array([18, 9, 6, 20])
    read = set(np.concatenate(memory.reads)[idx].ravel().tolist()) - {0}
    minibatch(memory, idx)
    # those outside of the minibatch, then its own
    assert encoded == [len(read) - len(idx), len(idx)] and len(read) < 4 * len(idx)
    encoded.clear()
    collect(part)
    # what views still reach, each step and the last observations that it cut off, what came after
    expected = [3 * 3]
    for t in range(7):
        num_cut = sum(i // 3 == t for i in part.cut)
        expected += [3, num_cut] if num_cut else [3]
    assert encoded == [*expected, 3] and part.cut


@pytest.mark.slow
def test_stateless_cartpole(tmp_path):
    """Frames stand in for the velocities that the observation lacks; one frame does not."""
    flags = dict(env_id="envs:StatelessCartPole-v1", num_envs=8, num_steps=64, norm_obs=True)
    flags |= dict(num_minibatches=4, update_epochs=8, gamma=0.98, learning_rate=3e-3)
    flags |= dict(total_timesteps=25_600, hidden_dims=(64,), clip_vloss=False, eval_episodes=20)
    views = mean_return(train(tmp_path / "views", **flags))
    control = train(tmp_path / "control", **flags, **NO_VIEWS | {"obs_shifts": "0"})
    assert views > 150 > 100 > mean_return(control)


def test_no_views_at_all(tmp_path):
    """A policy without any input is refused."""
    with pytest.raises(UsageErrors, match="not all can be empty"):
        train(tmp_path, env_id="CartPole-v1", **NO_VIEWS)
