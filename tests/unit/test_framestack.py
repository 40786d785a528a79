"""The views of ppo_framestack.py: what they read, that each step is stored and encoded once, and
that it learns."""

import copy
import io
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from helpers import (
    ACTIONS,
    OBSERVATIONS,
    UsageErrors,
    graph_space,
    run,
    sample,
    small_args,
    vector,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_framestack, ppo_graph

CPU = torch.device("cpu")
SHORT = {"obs_shifts": "-3:0", "action_shifts": "-2:-1", "reward_shifts": "-4,-1"}
fs_args = partial(small_args, ppo_framestack, **SHORT)


def train(run_dir, **kwargs):
    return run(run_dir, ppo_framestack, **SHORT | kwargs)


@pytest.mark.parametrize(
    "text, newest, shifts",
    [
        ("-15:0", 0, list(range(-15, 1))),
        ("-8,-4,-1,0", 0, [-8, -4, -1, 0]),
        ("0", 0, [0]),
        ("-1", -1, [-1]),
        ("", -1, []),
        ("-3:-1", -1, [-3, -2, -1]),
        ("-1,-5,-1", -1, [-5, -1]),
    ],
)
def test_shifts(text, newest, shifts):
    """Ranges with both ends, lists, none."""
    assert ppo_framestack.parse_shifts(text, newest, "--x").tolist() == shifts


@pytest.mark.parametrize(
    "text, newest",
    [
        ("0", -1),
        ("1", 0),
        ("-3:1", 0),
        ("0:-3", 0),
        ("a", 0),
        ("-1;-2", 0),
        ("-3:-2:-1", 0),
        ("1.5", 0),
        ("-3:", 0),
        (",", 0),
        (":", 0),
    ],
)
def test_wrong_shifts(text, newest):
    """A view on the future, an empty range or a text that is no shifts is an error that quotes
    it."""
    with pytest.raises(ppo_framestack.UsageError, match="--obs-shifts '" + text):
        ppo_framestack.parse_shifts(text, newest, "--obs-shifts")


def test_no_views_at_all(tmp_path):
    """A policy without any input is refused."""
    with pytest.raises(UsageErrors, match="not all can be empty"):
        train(tmp_path, env_id="CartPole-v1", obs_shifts="", action_shifts="", reward_shifts="")


class Script(gym.Env):
    """Random observations of `space`, reward 1, 2, 3, ...; episode k of env i has lengths[k] steps
    and is truncated if that is even. `log` holds [first step?, observation, action, reward] of
    every step; `finals` what came after the last step of truncated episodes, by its place in the
    log. Actions are noted by whoever chooses them."""

    def __init__(self, space, lengths, seed, action_space=None):
        self.observation_space, self.lengths, self.rng = space, lengths, np.random.default_rng(seed)
        self.action_space = action_space or spaces.Discrete(3)
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


def start(space, lengths, args, **kwargs):
    """What a run has before its first step; game i is env i."""
    games = [Script(space, row, seed, **kwargs) for seed, row in enumerate(lengths)]
    envs = ppo_framestack.Envs([lambda game=game: game for game in games])
    agent = ppo_framestack.Agent(envs.leaves, envs.action_space, args)
    memory = ppo_framestack.Memory(agent, envs.leaves, len(games), args)
    return SimpleNamespace(
        games=games, envs=envs, agent=agent, memory=memory, step=envs.reset(0), args=args, seen=[]
    )


@torch.no_grad()
def collect(part):
    """One rollout, as `train` has it, after a change of the weights. `part` receives the views of
    each step, seen [T, N, dim], and the values of what came after the rollout and its truncated
    steps `cut`."""
    memory, envs, cut, num_envs = part.memory, part.envs, [], len(part.games)
    for parameter in part.agent.parameters():
        parameter += 0.01 * torch.randn_like(parameter)
    actor = part.agent.actor.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    memory.begin()
    seen = []
    for t in range(part.args.num_steps):
        action, _, _ = memory.act(part.step)
        for game, row in zip(part.games, action[""]):
            game.log[-1][2] = row
        part.step = envs.step(part.agent.head.env_actions(action, part.step.obs.counts))
        memory.keep(part.step)
        cut += (t * num_envs + np.flatnonzero(part.step.truncated)).tolist()
    actor.remove()
    part.values = memory.next_values(part.step)
    part.seen, part.cut = torch.stack(seen), cut


def minibatch(memory, idx):
    """What the agent is given of the steps `idx` of a rollout: views, elements, observations and
    actions."""
    chosen = SimpleNamespace(permutation=lambda num: np.asarray(idx))
    ((_, inputs),) = memory.minibatches(chosen, 1)
    return inputs


def play(*args, num_rollouts=3, **kwargs):
    part = start(*args, **kwargs)
    for _ in range(num_rollouts):
        collect(part)
    return part


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
        storage = ppo_framestack.Storage(envs.leaves, CPU)
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
        if ppo_framestack.key(leaf.path) in agent.cnns:
            shape, images = leaf.space.shape, []
            for shift in agent.shifts[ppo_framestack.key(leaf.path)]:
                entry = window(log, position, shift)
                image = np.zeros(shape, leaf.dtype) if entry is None else envs.read(entry[1])[k][0]
                images.append(image.transpose(2, 0, 1) if shape[2] < shape[0] else image)
            net = agent.cnns[ppo_framestack.key(leaf.path)]
            parts.append(
                net.net(torch.as_tensor(np.concatenate(images))[None].float() * net.scale)[0]
            )
    return torch.cat(parts).float()


close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
LENGTHS = [[5, 2, 1], [1, 4, 9], [100]]
KINDS = [
    (kind, {})
    for kind in ["vector", "discrete", "image_hwc", "image_chw", "graph_edges", "set", "mixed"]
]
KINDS += [(kind, {"image_views": "encodings"}) for kind in ["image_hwc", "mixed"]]
KINDS += [
    ("vector", {"action_space": ACTIONS["mixed"]}),
    ("vector", {"action_space": ACTIONS["multidiscrete"]}),
    ("graph_edges", {"action_space": spaces.Discrete(9), "action_head": "nodes"}),
    (
        "set",
        {"action_space": spaces.MultiDiscrete([9, 9]), "action_head": "nodes", "obs_shifts": "-2"},
    ),
    ("vector", {"obs_shifts": "", "action_shifts": "-5,-2"}),
    ("image_hwc", {"obs_shifts": "-6,-1"}),
]


@pytest.mark.parametrize(
    "kind, flags", KINDS, ids=lambda v: v if isinstance(v, str) else "+".join(map(str, v))
)
@torch.no_grad()
def test_views_against_plain_loops(kind, flags):
    """Views of every kind of observation, of actions and rewards, read the steps before in the
    episode, also those before the rollout, and zeros before its first step: when collecting, when
    training, and the last observation of a truncated episode sees the steps of that episode and not
    of the next."""
    flags, num_steps = dict(flags), 7
    action_space = flags.pop("action_space", None)
    part = play(
        OBSERVATIONS[kind],
        LENGTHS,
        fs_args(num_steps=num_steps, **flags),
        action_space=action_space,
    )
    idx = np.random.default_rng(0).permutation(3 * num_steps)
    views, *_ = minibatch(part.memory, idx)
    finals = 0
    for i, row in zip(idx, views):
        t, env = divmod(int(i), 3)
        log, position = part.games[env].log, 2 * num_steps + t
        expected = reference_views(part, log, position)
        close(row, expected)
        close(part.seen[t, env], expected)
        if i in part.cut:
            after = [*log[: position + 1], [False, part.games[env].finals[position], None, None]]
            value = part.agent.critic(reference_views(part, after, position + 1))
            close(part.values[3 + part.cut.index(i)], value[0])
            finals += 1
    for env, game in enumerate(part.games):
        close(
            part.values[env], part.agent.critic(reference_views(part, game.log, 3 * num_steps))[0]
        )
    assert finals == len(part.cut) == len(part.values) - 3 > 1


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(["-5:0", "-7,-2,0", "0", "-1"]),
)
@settings(max_examples=40, deadline=None)
def test_views_never_cross_an_episode(lengths, num_steps, shifts):
    """The row that a view reads is of the same env and episode, whatever the lengths; it is row 0
    otherwise."""
    part = play(
        vector(2), lengths, fs_args(num_envs=len(lengths), num_steps=num_steps, obs_shifts=shifts)
    )
    memory, num_envs = part.memory, len(lengths)
    idx = np.arange(memory.start, memory.size)
    later = np.repeat([0, 0, 1], memory.num_views)  # a reward comes with the next observation
    for index, row in zip(idx, np.concatenate(memory.reads), strict=True):
        t, env = divmod(int(index), num_envs)
        log = part.games[env].log
        at = 3 * num_steps - memory.size // num_envs + t  # the place in the log
        for shift, late, read in zip(memory.shifts, later, row):
            inside = window(log, at, shift) is not None
            assert read == (1 + (t + shift + late) * num_envs + env if inside else 0)


CASES = [(kind, "discrete", "flat", {}) for kind in OBSERVATIONS]
CASES += [("mixed", action, "flat", {}) for action in ACTIONS]
CASES += [
    ("graph_edges", "discrete", "mask", {}),
    ("graph_edges", "", "nodes", {}),
    ("set", "", "nodes", {}),
    ("graph", "", "avail_actions", {}),
    ("graph_edges", "", "pair", {"autoregressive": True}),
    ("vector", "mixed", "flat", {"autoregressive": True}),
    ("vector", "box", "flat", {"state_dependent_std": True, "norm_obs": True}),
    ("image_hwc", "discrete", "flat", {"image_views": "encodings"}),
    ("mixed", "mixed", "flat", {"image_views": "encodings", "norm_obs": True}),
    ("graph_edges", "", "nodes", {"norm_obs": True}),
    ("vector", "discrete", "flat", {"action_shifts": "", "reward_shifts": ""}),
    ("mixed", "discrete", "flat", {"obs_shifts": ""}),
    ("graph", "discrete", "flat", {"obs_shifts": "-2", "action_shifts": "-9,-1"}),
]


@pytest.mark.parametrize(
    "observation, action, head, flags",
    CASES,
    ids=lambda v: v if isinstance(v, str) else "+".join(v),
)
def test_collection_and_training_agree(observation, action, head, flags, tmp_path):
    """Before the first gradient step of each update the probability ratio is 1, for every
    observation and head; all actions are legal; main runs from environment to evaluation."""
    result = train(
        tmp_path,
        env_id="Random-v0",
        eval_episodes=2,
        total_timesteps=72,
        **flags,
        env_kwargs={"observation": observation, "action": action, "head": head},
    )
    mismatch = [value for _, value in result.scalars["debug/collection_mismatch"]]
    assert len(mismatch) == 3 and 0 <= max(mismatch) < 1e-5
    assert all(np.isfinite(value) for name in result.scalars for _, value in result.scalars[name])
    assert result.scalars["losses/approx_kl"][0][1] != 0  # something was learned
    assert [row["return"] for row in result.rows] == [
        row["length"] for row in result.rows
    ]  # reward 1: legal actions


@pytest.mark.parametrize("kind", ["vector", "image_hwc", "graph_edges", "set", "mixed"])
@pytest.mark.parametrize("off", [1, -1])
def test_a_boundary_that_is_off_by_one_is_noticed(kind, off, monkeypatch, tmp_path):
    """Training views that reach one step over an episode's start, or not to it, make the ratio
    differ from 1."""
    original = ppo_framestack.Memory.act

    def shifted(self, step, greedy=False):
        result = original(self, step, greedy)
        num_envs = len(self.age)
        self.size -= num_envs
        self.reads[-1] = self.next_reads(np.clip(self.age + off, 0, self.size // num_envs))
        self.size += num_envs
        return result

    monkeypatch.setattr(ppo_framestack.Memory, "act", shifted)
    result = train(tmp_path, env_id="Random-v0", env_kwargs={"observation": kind})
    assert all(value > 1e-4 for _, value in result.scalars["debug/collection_mismatch"])


@pytest.mark.parametrize("kind", ["vector", "image_chw", "graph_edges"])
def test_each_step_is_stored_once(kind):
    """The stored bytes are those of a run without views, plus the steps that views reach back to:
    also after the last values were computed and minibatches were made. Images that enter as
    channels are in their table and not in the storage."""
    part = play(OBSERVATIONS[kind], LENGTHS, fs_args(num_steps=7))
    plain = ppo_graph.Storage(part.envs.leaves, CPU)
    for row in zip(*[game.log[-(4 + 7 + 1) : -1] for game in part.games]):
        plain.append(part.envs.collate([part.envs.read(entry[1]) for entry in row]))
    list(part.memory.minibatches(np.random.default_rng(0), 3))
    mine, expected = part.memory.storage.whole(), plain.whole()
    values = iter(mine.values)
    for leaf, rows in zip(part.envs.leaves, expected.values, strict=True):
        if kind == "image_chw":
            table = part.memory.tables[ppo_framestack.key(leaf.path)]
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
    """A minibatch encodes every graph that its views read once, and collection only the newest
    ones."""
    part = play(graph_space(), LENGTHS, fs_args(num_steps=7, action_shifts="", reward_shifts=""))
    encoded, original, memory = [], ppo_framestack.Encoder.forward, part.memory
    monkeypatch.setattr(
        ppo_framestack.Encoder,
        "forward",
        lambda self, obs: encoded.append(len(obs["obs.nodes"].ptr) - 1) or original(self, obs),
    )
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


class FewRows(gym.Env):
    """A set that is empty in three of four steps; one action for each element."""

    observation_space = spaces.Sequence(vector(2), stack=True)
    action_space = spaces.Sequence(spaces.Discrete(2))

    def observe(self):
        return np.full((int(self.t % 4 == 0), 2), self.t, np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        assert len(action) == (self.t % 4 == 0)
        self.t += 1
        return self.observe(), 0.0, False, self.t == 11, {}


gym.register("FewRows-v0", entry_point=FewRows)


def test_fewer_rows_than_steps(tmp_path):
    """Actions of a Sequence are found by their rows, of which a rollout has fewer than steps."""
    result = train(tmp_path, env_id="FewRows-v0", total_timesteps=72)
    assert max(value for _, value in result.scalars["debug/collection_mismatch"]) < 1e-5


def test_gradient_reaches_the_encoder_through_all_views():
    """A graph that is only seen through a view on the past trains the encoder, and so does a chosen
    node."""
    for views, head in (
        ({"obs_shifts": "-2", "action_shifts": ""}, "auto"),
        ({"obs_shifts": "", "action_shifts": "-1"}, "nodes"),
    ):
        args = fs_args(
            num_envs=1, num_steps=5, reward_shifts="", action_head=head, readout="mean", **views
        )
        part = play(graph_space(), [[100]], args, action_space=spaces.Discrete(9))
        views, *_ = minibatch(part.memory, [4])
        views.sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in part.agent.encoder.parameters())


@torch.no_grad()
def test_long_episodes_in_evaluation():
    """What a trained agent keeps stays bounded, and its views stay right when it forgets at
    `begin`."""
    args = fs_args(num_envs=2, num_steps=3)
    part = start(vector(2), [[50], [50]], args)
    for _ in range(12):
        collect(part)
        assert len(part.memory.storage.whole().values[0]) <= 2 * (4 + 3 + 1)
        for t in range(3):
            for env, game in enumerate(part.games):
                close(part.seen[t, env], reference_views(part, game.log, len(game.log) - 4 + t))


def test_play_forgets(monkeypatch):
    """play() begins anew every --num-steps steps, with the weights as they are: nothing changes by
    it."""
    memories, original = [], ppo_framestack.Memory
    monkeypatch.setattr(
        ppo_framestack, "Memory", lambda *args: memories.append(original(*args)) or memories[-1]
    )
    returns = []
    for num_steps in (3, 100):
        torch.manual_seed(0)
        args = fs_args(num_steps=num_steps, num_envs=2)
        games = [Script(vector(2), [40], seed) for seed in range(2)]
        record = gym.wrappers.RecordEpisodeStatistics
        envs = ppo_framestack.Envs([lambda game=game: record(game) for game in games])
        agent = ppo_framestack.Agent(envs.leaves, envs.action_space, args)
        actions, step = [], Script.step
        monkeypatch.setattr(
            Script, "step", lambda self, action: actions.append(action) or step(self, action)
        )
        infos = ppo_framestack.play(agent, args, envs, True)
        monkeypatch.setattr(Script, "step", step)
        returns.append(actions)
        assert [info["episode"]["l"] for info in infos] == [40, 40]
    assert returns[0] == returns[1] and len(returns[0]) == 80
    assert memories[0].size <= 2 * (4 + 3) and memories[1].size == 2 * 40


@pytest.mark.parametrize(
    "kind, flags",
    [
        ("vector", {}),
        ("mixed", {}),
        ("vector", {"obs_shifts": "0", "action_shifts": "", "reward_shifts": ""}),
        ("graph_edges", {"action_head": "nodes"}),
    ],
)
def test_state_goes_on_bitwise(kind, flags):
    """A new memory with the saved state sees and does what the old one would have; saving changes
    nothing."""
    part = play(
        OBSERVATIONS[kind], LENGTHS, fs_args(num_steps=2, **flags), action_space=spaces.Discrete(9)
    )
    file = io.BytesIO()
    torch.save(part.memory.state(), file)
    other = copy.copy(part)
    other.games, other.envs, other.step = copy.deepcopy((part.games, part.envs, part.step))
    other.memory = ppo_framestack.Memory(part.agent, part.envs.leaves, 3, part.args)
    other.agent = copy.deepcopy(part.agent)
    other.memory.agent = other.agent
    file.seek(0)
    other.memory.restore(torch.load(file, weights_only=False))
    for run_on in (part, other):
        torch.manual_seed(1)
        collect(run_on)
        collect(run_on)
    assert torch.equal(part.seen, other.seen) and torch.equal(part.values, other.values)
    assert part.cut == other.cut


@pytest.mark.parametrize(
    "kwargs",
    [
        {"env_id": "Random-v0", "env_kwargs": {"observation": "mixed"}},
        {"env_id": "envs:StatelessCartPole-v1", "norm_obs": True},
    ],
)
def test_resumed_run_is_bitwise_the_same(tmp_path, kwargs):
    """The views of the first steps after a resume are those of the run that was not interrupted."""
    kwargs |= dict(total_timesteps=4 * 24, checkpoint_every=2, save_model=True)
    whole = train(tmp_path, **kwargs)
    before = weights(whole.folder)
    checkpoint, _ = sorted(whole.folder.glob("checkpoint_*.ckpt"))
    (whole.folder / "model.pt").unlink()
    train(tmp_path, resume=str(checkpoint), **kwargs)
    after = weights(whole.folder)
    assert all(torch.equal(before[name], after[name]) for name in before)


class Clock(gym.Env):
    """Shows how many steps were made; an episode has 5."""

    observation_space, action_space, num_steps = vector(1, low=0, high=1e6), spaces.Discrete(2), 0

    def reset(self, *, seed=None, options=None):
        return np.array([self.num_steps], np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.array([self.num_steps], np.float32), 0.0, False, self.num_steps % 5 == 0, {}


gym.register("Clock-v0", entry_point=Clock)


def test_each_step_is_counted_once_by_norm_obs(tmp_path):
    """The statistics are those of the rollouts, without what is kept of those before."""
    result = train(
        tmp_path, env_id="Clock-v0", num_envs=1, num_minibatches=1, norm_obs=True, save_model=True
    )
    statistics = [
        value for name, value in weights(result.folder).items() if name.endswith(("mean", "count"))
    ]
    assert sorted(map(float, statistics)) == [23.5, 48.0]


@pytest.mark.parametrize("num_envs", [1, 2])
def test_few_environments(num_envs, tmp_path):
    """A minibatch is any steps: fewer environments than minibatches change nothing."""
    flags = dict(num_envs=num_envs, num_steps=18, num_minibatches=4, total_timesteps=108)
    scalars = train(tmp_path, env_id="Clock-v0", **flags).scalars
    assert len(scalars["debug/collection_mismatch"]) >= 3
    assert all(0 <= value < 1e-5 for _, value in scalars["debug/collection_mismatch"])


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
LEARN = dict(
    env_id="DelayedBit-v0",
    num_envs=8,
    num_steps=32,
    total_timesteps=12_000,
    learning_rate=3e-3,
    gamma=0.5,
    action_shifts="",
    reward_shifts="",
    eval_episodes=50,
)


@pytest.mark.parametrize(
    "shifts, low, high",
    [("-2:0", 15.0, 16.0), ("-2", 15.0, 16.0), ("0", 6.0, 10.5), ("-1:0", 6.0, 10.5)],
)
def test_learns_what_the_views_show(tmp_path, shifts, low, high):
    """A bit of two steps before is named with a view on it, and guessed without."""
    rows = train(tmp_path, **LEARN | {"obs_shifts": shifts}).rows
    assert low <= np.mean([row["return"] for row in rows]) <= high


@pytest.mark.slow
def test_stateless_cartpole(tmp_path):
    """Frames stand in for the velocities that the observation lacks; one frame does not."""
    flags = dict(
        env_id="envs:StatelessCartPole-v1",
        num_envs=8,
        num_steps=64,
        total_timesteps=25_600,
        gamma=0.98,
        learning_rate=3e-3,
        update_epochs=8,
        num_minibatches=4,
        hidden_dims=(64,),
        clip_vloss=False,
        norm_obs=True,
        eval_episodes=20,
    )
    views = train(tmp_path / "views", **flags).rows
    control = train(
        tmp_path / "control", **flags, obs_shifts="0", action_shifts="", reward_shifts=""
    ).rows
    assert (
        np.mean([row["return"] for row in views])
        > 150
        > 100
        > np.mean([row["return"] for row in control])
    )


def test_workers(tmp_path):
    """Worker processes change nothing."""
    flags = dict(env_id="Random-v0", env_kwargs={"observation": "mixed"}, eval_episodes=3)
    rows = [train(tmp_path / str(num), num_workers=num, **flags).rows for num in (0, 2)]
    assert rows[0] == rows[1]
