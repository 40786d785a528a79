"""Random environments: sizes from 0 to 500, episodes that end at any step, all dtypes. Nothing crashes, leaks, or
differs from a collation in plain Python."""

import gc
import os
import weakref

import gymnasium as gym
import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import observation_spaces, sample, small_args, vector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32]
boxes = st.builds(lambda dtype, shape: spaces.Box(0 if np.dtype(dtype).kind == "u" else -9, 100, shape, dtype),
                  st.sampled_from(DTYPES), st.sampled_from([(), (2,), (2, 1), (1, 2, 2)]))
ragged_boxes = st.one_of(st.builds(lambda box, stack: spaces.Sequence(box, stack=stack), boxes, st.booleans()),
                         st.builds(lambda a, b: spaces.Graph(a, b), boxes, st.one_of(st.none(), boxes)))
all_spaces = st.one_of(observation_spaces, ragged_boxes, st.dictionaries(
    st.sampled_from("abcd"), st.one_of(boxes, ragged_boxes), min_size=1, max_size=3).map(spaces.Dict))


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
    """Leaf path -> a list of rows (ragged) or a value, of plain numbers, by another way than the scripts go."""
    name = path or "obs"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return {k: v for i, child in children
                for k, v in rows_of(child, obs[i], f"{path}.{i}" if path else str(i)).items()}
    if isinstance(space, spaces.Graph):
        found = {f"{name}.nodes": numbers(space.node_space, obs.nodes), f"{name}.edge_links":
                 [] if obs.edge_links is None else np.asarray(obs.edge_links).tolist()}
        if space.edge_space is not None:
            found[f"{name}.edges"] = [] if obs.edges is None else numbers(space.edge_space, obs.edges)
        return found
    if isinstance(space, spaces.Sequence):
        inner = space.feature_space
        if isinstance(inner, spaces.Dict):
            return {f"{name}.{k}": numbers(inner[k], obs[k] if space.stack else [row[k] for row in obs]) for k in inner}
        return {name: numbers(inner, obs)}
    return {name: numbers(space, obs)}


def numbers(space, values):
    """Nested lists, with the precision that the scripts work with."""
    if isinstance(values, (tuple, list)):
        return [numbers(space, value) for value in values]
    return np.asarray(values, np.float32 if space.dtype.kind == "f" else np.int64).tolist()


def expected_steps(envs):
    """Per step and env: (observation, reward, terminated, truncated, last observation if the episode was cut off)."""
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
        if leaf.group is None:
            assert found.tolist() == [rows[leaf.path] for rows in expected], leaf.path
            continue
        ptr = np.cumsum([0] + [len(rows[leaf.path]) for rows in expected]).tolist()
        assert found.ptr.tolist() == ptr
        assert found.batch.tolist() == [b for b in range(len(expected)) for _ in range(ptr[b], ptr[b + 1])]
        nodes = leaf.path.removesuffix("edge_links") + "nodes"
        first = 0
        for b, rows in enumerate(expected):
            shown = found.values[ptr[b]:ptr[b + 1]] - (first if leaf.kind == "links" else 0)
            assert shown.tolist() == rows[leaf.path], leaf.path
            first += len(rows[nodes]) if leaf.kind == "links" else 0


def check_run(envs, inner, space, num_steps, rng):
    """Plays and compares every step, the last observations, the episodes' sums, and a shuffled minibatch."""
    storage, played = ppo_graph.Storage(envs.leaves, torch.device("cpu")), []
    step = envs.reset(None)
    for t in range(num_steps + 1):
        storage.append(step.parts, step.counts)
        played.append((step.reward.tolist(), step.terminated.tolist(), step.truncated.tolist(), step.finals))
        step = envs.step([0] * len(inner)) if t < num_steps else step
    table = expected_steps(inner)[-num_steps - 1:]
    for (rewards, terminated, truncated, finals), row in zip(played, table):
        assert (terminated, truncated) == ([r[2] for r in row], [r[3] for r in row])
        assert rewards == np.array([r[1] for r in row], np.float32).tolist()
        assert [i for i, _ in finals] == [i for i, r in enumerate(row) if r[4] is not None]
        for i, arrays in finals:
            batch = ppo_graph.Storage(envs.leaves, torch.device("cpu"))
            batch.append(*ppo_graph.collate(envs.leaves, [arrays]))
            compare(envs.leaves, space, batch.latest(), [row[i][4]])
    flat = [entry[0] for row in table for entry in row]
    idx = rng.integers(len(flat), size=len(flat) // 2 + 1)
    compare(envs.leaves, space, storage.gather(idx), [flat[i] for i in idx])
    compare(envs.leaves, space, storage.latest(), flat[-len(inner):])
    keep = int(rng.integers(1, num_steps + 1))
    storage.clear(keep)
    compare(envs.leaves, space, storage.gather(np.arange(storage.size)), flat[-keep * len(inner):])
    return storage


@settings(max_examples=2000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(all_spaces, st.integers(0, 2**32 - 1))
def test_random_environments(space, seed):
    """P1, P2, S6: whatever they show and however their episodes end. Some of them are played by a network."""
    rng = np.random.default_rng(seed)
    inner = [Fuzz(space, [seed, i]) for i in range(rng.integers(1, 4))]
    envs = ppo_graph.Envs([lambda env=env: env for env in inner], restart=bool(seed % 2))
    storage = check_run(envs, inner, space, int(rng.integers(1, 5)), rng)
    if seed % 8 == 0:
        agent = ppo_graph.Agent(envs.leaves, envs.action_space, small_args(norm_obs=True, gnn_layers=1))
        agent.encoder.observe(storage)
        action, log_prob, entropy, value = agent(storage.gather(np.arange(storage.size)))
        for tensor in (action, log_prob, entropy, value):
            assert len(tensor) == storage.size and tensor.isfinite().all()
    envs.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_environments_in_workers(seed):
    """S6: the same through shared memory, which grows while they are played."""
    space = spaces.Dict(g=spaces.Graph(vector(3), vector(1)), s=spaces.Sequence(spaces.Discrete(5)), v=vector(2))
    inner = [Fuzz(space, [seed, i]) for i in range(5)]
    local = ppo_graph.Envs([lambda env=env: env for env in inner])
    makers = [lambda i=i: Fuzz(space, [seed, i]) for i in range(5)]
    envs = ppo_graph.WorkerEnvs(makers, 2)
    try:
        pairs = [(local.reset(None), envs.reset(None))]
        for _ in range(12):
            a, b = pairs[-1]
            assert all(np.array_equal(np.concatenate(p), np.concatenate(q)) for p, q in zip(a.parts, b.parts))
            assert all(np.array_equal(a.counts[k], b.counts[k]) for k in a.counts)
            assert all(np.array_equal(p, q) for p, q in zip(a[2:5], b[2:5])) and a.episodes == b.episodes
            assert [i for i, _ in a.finals] == [i for i, _ in b.finals]
            pairs = [(local.step([0] * 5), envs.step([0] * 5))]
    finally:
        envs.close()


def test_nothing_is_left_behind():
    """X3: environments, their observations and their workers are gone when they were closed, and so are their files."""
    space, references = spaces.Dict(g=spaces.Graph(vector(3), None)), []

    def play(num_workers):
        makers = [lambda i=i: Fuzz(space, i) for i in range(4)]
        envs = ppo_graph.make_envs(makers, small_args(num_workers=num_workers, on_env_error="restart"))
        envs.reset(0)
        for t in range(30):
            if num_workers and t % 10 == 5:
                envs.workers[0][0].kill()
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
