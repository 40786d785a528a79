"""Random environments: sizes from 0 to 500, episodes that end at any step, all dtypes. Nothing
crashes, leaks, or differs from a collation in plain Python."""

import contextlib
import gc
import os
import weakref

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import everything, make_envs, observation_spaces, plain, sample, small_args, vector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_graph

DTYPES = [
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
]
boxes = st.builds(
    lambda dtype, shape: spaces.Box(0 if np.dtype(dtype).kind == "u" else -9, 100, shape, dtype),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (2,), (2, 1), (1, 2, 2)]),
)
ragged_boxes = st.one_of(
    st.builds(lambda box, stack: spaces.Sequence(box, stack=stack), boxes, st.booleans()),
    st.builds(lambda a, b: spaces.Graph(a, b), boxes, st.one_of(st.none(), boxes)),
)
all_spaces = st.one_of(
    observation_spaces,
    ragged_boxes,
    st.dictionaries(
        st.sampled_from("abcd"), st.one_of(boxes, ragged_boxes), min_size=1, max_size=3
    ).map(spaces.Dict),
)


def size(rng):
    """Mostly a few rows, often none, now and then up to 500."""
    return rng.choice([0, rng.integers(4), rng.integers(501)], p=[0.3, 0.67, 0.03])


def widened(obs, rng):
    """The same observation in other dtypes, as environments return them."""
    if isinstance(obs, dict):
        return {k: widened(v, rng) for k, v in obs.items()}
    if isinstance(obs, spaces.GraphInstance):
        return obs._replace(nodes=widened(obs.nodes, rng))
    if isinstance(obs, tuple):
        return tuple(widened(v, rng) for v in obs)
    if isinstance(obs, np.ndarray) and rng.random() < 0.3:
        return obs.astype(np.float64 if obs.dtype.kind == "f" else np.int64)
    return obs


class Fuzz(gym.Env):
    """Random in all that it does; notes everything that it returns in `told`."""

    action_space = spaces.Discrete(3)

    def __init__(self, space, seed):
        self.observation_space, self.rng, self.told = space, np.random.default_rng(seed), []

    def observe(self):
        return widened(sample(self.observation_space, self.rng, size), self.rng)

    def reset(self, *, seed=None, options=None):
        self.told.append((self.observe(), None, False, False))
        return self.told[-1][0], {}

    def step(self, action):
        ends = self.rng.random(2) < 0.2
        self.told.append((self.observe(), self.rng.random(), bool(ends[0]), bool(ends[1])))
        return *self.told[-1], {}


def rows_of(space, obs, path=""):
    """Leaf path -> a list of rows of plain numbers, by another way than the scripts go; what is not
    ragged is one row."""
    name = path or "obs"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return {
            k: v
            for i, child in children
            for k, v in rows_of(child, obs[i], f"{path}.{i}" if path else str(i)).items()
        }
    if isinstance(space, spaces.Graph):
        found = {
            f"{name}.nodes": numbers(space.node_space, obs.nodes),
            f"{name}.edge_links": []
            if obs.edge_links is None
            else np.asarray(obs.edge_links).tolist(),
        }
        if space.edge_space is not None:
            found[f"{name}.edges"] = (
                [] if obs.edges is None else numbers(space.edge_space, obs.edges)
            )
        return found
    if isinstance(space, spaces.Sequence):
        inner = space.feature_space
        if isinstance(inner, spaces.Dict):
            return {
                f"{name}.{k}": numbers(inner[k], obs[k] if space.stack else [row[k] for row in obs])
                for k in inner
            }
        return {name: numbers(inner, obs)}
    return {name: [numbers(space, obs)]}


def numbers(space, values):
    """Nested lists, with the precision that the scripts work with."""
    if isinstance(values, (tuple, list)):
        return [numbers(space, value) for value in values]
    kind = np.float64 if space.dtype == np.float64 else np.float32
    return np.asarray(values, kind if space.dtype.kind == "f" else np.int64).tolist()


def expected_steps(envs):
    """Per step and env: (observation, reward, terminated, truncated, last observation if the
    episode was cut off)."""
    columns = []
    for env in envs:
        told, column = iter(env.told), []
        for obs, reward, terminated, truncated in told:
            if reward is None:
                column.append((obs, 0.0, True, False, None))
                continue
            first = next(told)[0] if terminated or truncated else obs
            cut = obs if truncated and not terminated else None
            column.append((first, reward, terminated, truncated and not terminated, cut))
        columns.append(column)
    return list(zip(*columns))


def compare(leaves, space, batch, observations):
    """`batch` holds the `observations`, each row once and in order."""
    expected = [rows_of(space, obs) for obs in observations]
    assert set(batch) == {leaf.path for leaf in leaves} == set(expected[0])
    for leaf in leaves:
        found = batch[leaf.path]
        ptr = np.cumsum([0] + [len(rows[leaf.path]) for rows in expected]).tolist()
        assert found.ptr.tolist() == ptr
        assert found.batch.tolist() == [
            b for b in range(len(expected)) for _ in range(ptr[b], ptr[b + 1])
        ]
        nodes = leaf.path.removesuffix("edge_links") + "nodes"
        first = 0
        for b, rows in enumerate(expected):
            shown = found.values[ptr[b] : ptr[b + 1]]
            if leaf.is_links:
                shown = shown - first
                first += len(rows[nodes])
            assert shown.tolist() == rows[leaf.path], leaf.path


def check_run(envs, inner, space, num_steps, rng):
    """Plays and compares every step, the last observations, and a shuffled minibatch."""
    storage, played = ppo_graph.Storage(envs.leaves, torch.device("cpu")), []
    step = envs.reset(0)
    for t in range(num_steps + 1):
        shown = storage.append(step.obs)
        played.append(step)
        step = envs.step([0] * len(inner)) if t < num_steps else step
    table = expected_steps(inner)[-num_steps - 1 :]
    for step, row in zip(played, table):
        assert step.terminated.tolist() == [r[2] for r in row] and step.truncated.tolist() == [
            r[3] for r in row
        ]
        assert step.reward.tolist() == np.array([r[1] for r in row], np.float32).tolist()
        last = [r[4] for r in row if r[4] is not None]
        assert len(step.finals) == len(last)
        if last:
            compare(
                envs.leaves,
                space,
                ppo_graph.Storage(envs.leaves, torch.device("cpu")).append(
                    ppo_graph.join(step.finals)
                ),
                last,
            )
    flat = [entry[0] for row in table for entry in row]
    compare(envs.leaves, space, shown, flat[-len(inner) :])
    idx = rng.integers(len(flat), size=len(flat) // 2 + 1)
    compare(envs.leaves, space, storage.gather(idx)[0], [flat[i] for i in idx])
    compare(envs.leaves, space, everything(storage), flat)
    joined = ppo_graph.Storage(envs.leaves, torch.device("cpu")).append(
        ppo_graph.join([step.obs for step in played])
    )
    compare(envs.leaves, space, joined, flat)
    return storage, len(flat)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(all_spaces, st.integers(0, 2**32 - 1))
def test_random_environments(space, seed):
    """Whatever they show and however their episodes end. Some of them are played by a network."""
    rng = np.random.default_rng(seed)
    inner = [Fuzz(space, [seed, i]) for i in range(rng.integers(1, 4))]
    envs = make_envs([lambda env=env: env for env in inner])
    storage, size = check_run(envs, inner, space, int(rng.integers(1, 5)), rng)
    if seed % 8 == 0:
        agent = ppo_graph.Agent(
            envs.leaves, envs.action_space, small_args(norm_obs=True, gnn_layers=1)
        )
        agent.encoder.observe(everything(storage))
        action, log_prob, entropy, value = plain(agent)(storage.gather(np.arange(size))[0])
        for tensor in (action, log_prob, entropy, value):
            assert len(tensor) == size and tensor.isfinite().all()
    envs.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_environments_in_workers(seed):
    """The same from worker processes, where an environment shows up to 500 rows."""
    space = spaces.Dict(
        g=spaces.Graph(vector(3), vector(1)), s=spaces.Sequence(spaces.Discrete(5)), v=vector(2)
    )
    makers = [
        lambda i=i: gym.wrappers.RecordEpisodeStatistics(Fuzz(space, [seed, i])) for i in range(5)
    ]

    def episodes(step):
        return [(i, info["episode"]["r"], info["episode"]["l"]) for i, info in step.infos]

    local, num = make_envs(makers), 0
    with contextlib.closing(make_envs(makers, num_workers=2)) as envs:
        a, b = local.reset(0), envs.reset(0)
        for _ in range(12):
            for x, y in [(a.obs, b.obs), *zip(a.finals, b.finals)]:
                assert all(map(np.array_equal, x.values, y.values)) and list(x.counts) == list(
                    y.counts
                )
                assert all(map(np.array_equal, x.counts.values(), y.counts.values()))
            assert all(map(np.array_equal, a[1:4], b[1:4])) and episodes(a) == episodes(b)
            assert len(a.finals) == len(b.finals)
            num += len(a.infos)
            a, b = local.step([0] * 5), envs.step([0] * 5)
    assert num > 5


def test_nothing_is_left_behind():
    """Environments, their observations and their workers are gone when they were closed, and so are
    their files."""
    space, references = spaces.Dict(g=spaces.Graph(vector(3), None)), []

    def play(num_workers):
        makers = [lambda i=i: Fuzz(space, i) for i in range(4)]
        envs = make_envs(makers, num_workers)
        envs.reset(0)
        for _ in range(20):
            envs.step([0] * 4)
        if num_workers:
            envs.workers[0][0].kill()
            with pytest.raises(ChildProcessError):
                envs.step([0] * 4)
        envs.close()
        references.append(weakref.ref(envs))

    for num_workers in (2, 0):
        play(num_workers)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            play(num_workers)
        gc.collect()
        assert not any(reference() for reference in references)
        assert len(os.listdir("/proc/self/fd")) == before
