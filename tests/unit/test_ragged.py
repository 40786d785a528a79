"""Ragged observations: what is stored and gathered equals PyG's batches, and a collation in plain
Python for random environments: sizes from 0 to 500, episodes that end at any step, all dtypes. A
step and a minibatch reach the device in few copies, and what is declared costs nothing."""

from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, GraphInstance, Sequence, Tuple
from helpers import (
    everything,
    graph_space,
    make_envs,
    observation_spaces,
    plain,
    run,
    same_weights,
    sample,
    small_args,
    stored,
    vector,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import runs

CPU = torch.device("cpu")
EDGES = graph_space(vector(2))

# ---- Random environments against plain Python ----
DTYPES = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4".split()
boxes = st.builds(
    lambda dtype, shape: Box(0 if dtype[0] == "u" else -9, 100, shape, np.dtype(dtype)),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (2,), (2, 1), (1, 2, 2)]),
)
ragged_boxes = st.one_of(
    st.builds(lambda box, stack: Sequence(box, stack=stack), boxes, st.booleans()),
    st.builds(spaces.Graph, boxes, st.one_of(st.none(), boxes)),
)
one_of = st.one_of(boxes, ragged_boxes)
dicts = st.dictionaries(st.sampled_from("abcd"), one_of, min_size=1, max_size=3).map(Dict)
all_spaces = st.one_of(observation_spaces, ragged_boxes, dicts)


def size(rng):
    """Mostly a few rows, often none, now and then up to 500."""
    return rng.choice([0, rng.integers(4), rng.integers(501)], p=[0.3, 0.67, 0.03])


def widened(obs, rng):
    """The same observation in other dtypes, as environments return them."""
    if isinstance(obs, dict):
        return {k: widened(v, rng) for k, v in obs.items()}
    if isinstance(obs, GraphInstance):
        return obs._replace(nodes=widened(obs.nodes, rng))
    if isinstance(obs, tuple):
        return tuple(widened(v, rng) for v in obs)
    if isinstance(obs, np.ndarray) and rng.random() < 0.3:
        return obs.astype(np.float64 if obs.dtype.kind == "f" else np.int64)
    return obs


class Fuzz(gym.Env):
    """Random in all that it does; notes everything that it returns in `told`."""

    action_space = Discrete(3)

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
    """Leaf path -> rows of plain numbers, by another way than the scripts go."""
    name, found = path or "obs", {}
    if isinstance(space, (Dict, Tuple)):
        for k, child in space.items() if isinstance(space, Dict) else enumerate(space):
            found |= rows_of(child, obs[k], f"{path}.{k}" if path else str(k))
    elif isinstance(space, spaces.Graph):
        found[f"{name}.nodes"] = numbers(space.node_space, obs.nodes)
        links = [] if obs.edge_links is None else obs.edge_links
        found[f"{name}.edge_links"] = np.asarray(links).tolist()
        if space.edge_space is not None:
            edges = () if obs.edges is None else obs.edges
            found[f"{name}.edges"] = numbers(space.edge_space, edges)
    elif isinstance(space, Sequence) and isinstance(space.feature_space, Dict):
        for k, child in space.feature_space.items():
            column = obs[k] if space.stack else [row[k] for row in obs]
            found[f"{name}.{k}"] = numbers(child, column)
    elif isinstance(space, Sequence):
        found[name] = numbers(space.feature_space, obs)
    else:
        found[name] = [numbers(space, obs)]
    return found


def numbers(space, values):
    """Nested lists, with the precision that the scripts work with."""
    if isinstance(values, (tuple, list)):
        return [numbers(space, value) for value in values]
    kind = np.float64 if space.dtype == np.float64 else np.float32
    return np.asarray(values, kind if space.dtype.kind == "f" else np.int64).tolist()


def expected_steps(envs):
    """Per step and env: (observation, reward, terminated, truncated, last observation if cut)."""
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
    """`batch` holds the `observations`, in order. Returns the numbers of rows of each leaf."""
    expected = [rows_of(space, obs) for obs in observations]
    assert set(batch) == {leaf.path for leaf in leaves} == set(expected[0])
    sizes = {path: [len(rows[path]) for rows in expected] for path in batch}
    for leaf in leaves:
        found, num = batch[leaf.path], sizes[leaf.path]
        ptr = np.cumsum([0, *num]).tolist()
        assert found.ptr.tolist() == ptr
        assert found.batch.tolist() == np.repeat(range(len(num)), num).tolist()
        nodes = sizes.get(leaf.path.removesuffix("edge_links") + "nodes")
        for b, rows in enumerate(expected):
            shown = found.values[ptr[b] : ptr[b + 1]]
            if leaf.is_links:
                shown = shown - sum(nodes[:b])
            assert shown.tolist() == rows[leaf.path], leaf.path
    return sizes


def appended(leaves, flat):
    return ppo_graph.Storage(leaves, CPU).append(flat)


def check_run(envs, inner, space, num_steps, rng):
    """Compares all steps, last observations, a minibatch with repeats, and the bytes."""
    storage, played = ppo_graph.Storage(envs.leaves, CPU), []
    step = envs.reset(0)
    for t in range(num_steps + 1):
        shown = storage.append(step.obs)
        played.append(step)
        step = envs.step([0] * len(inner)) if t < num_steps else step
    table = expected_steps(inner)[-num_steps - 1 :]
    for step, row in zip(played, table):
        _, rewards, terminated, truncated, last = zip(*row)
        assert step.terminated.tolist() == list(terminated)
        assert step.truncated.tolist() == list(truncated)
        assert step.reward.tolist() == np.array(rewards, np.float32).tolist()
        last = [obs for obs in last if obs is not None]
        assert len(step.finals) == len(last)
        if last:
            compare(envs.leaves, space, appended(envs.leaves, ppo_graph.join(step.finals)), last)
    flat = [entry[0] for row in table for entry in row]
    compare(envs.leaves, space, shown, flat[-len(inner) :])
    idx = rng.integers(len(flat), size=len(flat) // 2 + 1)
    compare(envs.leaves, space, storage.gather(idx)[0], [flat[i] for i in idx])
    joined = ppo_graph.join([step.obs for step in played])
    compare(envs.leaves, space, appended(envs.leaves, joined), flat)
    for k, values in enumerate(joined.values):
        assert not any(np.shares_memory(values, step.obs.values[k]) for step in played)
    sizes = compare(envs.leaves, space, everything(storage), flat)
    valid = padded = 0
    for leaf in envs.leaves:
        row, num = leaf.dtype.itemsize * int(np.prod(leaf.space.shape)), sizes[leaf.path]
        valid, padded = valid + row * sum(num), padded + row * max(num) * len(num)
    assert sum(values.nbytes for values in storage.whole().values) == valid
    groups = {leaf.group: np.mean(sizes[leaf.path]) for leaf in envs.leaves if leaf.group}
    stats = {f"charts/rows/{group}": mean for group, mean in groups.items()}
    stats["charts/obs_bytes_per_step"] = valid / len(flat)
    stats["charts/padding_avoided"] = 1 - valid / padded if padded else 0
    assert runs.sizes(storage) == pytest.approx(stats)
    assert storage.whole().counts[""].tolist() == [1] * storage.whole().size == [1] * len(flat)
    return storage, len(flat)


FUZZ = dict(deadline=None, derandomize=True, database=None)


@settings(max_examples=50, suppress_health_check=list(HealthCheck), **FUZZ)
@given(all_spaces, st.integers(0, 2**32 - 1))
def test_random_environments(space, seed):
    """Whatever they show and however their episodes end. Some of them are played by a network."""
    rng = np.random.default_rng(seed)
    inner = [Fuzz(space, [seed, i]) for i in range(rng.integers(1, 4))]
    envs = make_envs([lambda env=env: env for env in inner])
    storage, size = check_run(envs, inner, space, int(rng.integers(1, 5)), rng)
    if seed % 8 == 0:
        args = small_args(norm_obs=True, gnn_layers=1)
        agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
        agent.encoder.observe(everything(storage))
        for tensor in plain(agent)(storage.gather(np.arange(size))[0]):
            assert len(tensor) == size and tensor.isfinite().all()
    envs.close()


# ---- Against PyG ----
SIZES = [(5, 8), (0, 0), (1, 0), (1, 3), (7, 0), (4, 2), (500, 900), (0, 0), (6, 10)]


def graphs(rng, sizes=SIZES):
    """A graph for each of the sizes, numbers of nodes and edges."""
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    links = lambda n, e: rng.integers(max(n, 1), size=(e, 2))
    return [GraphInstance(draw(n, 3), draw(e, 2), links(n, e)) for n, e in sizes]


def assert_is_pyg(obs, instances):
    data = []
    for x, edge_attr, links in instances:
        x, edge_attr, links = map(torch.from_numpy, (x, edge_attr, links))
        data.append(Data(x=x, edge_index=links.T, edge_attr=edge_attr))
    batch = Batch.from_data_list(data)
    assert torch.equal(obs["obs.nodes"].values, batch.x)
    assert torch.equal(obs["obs.edge_links"].values.t(), batch.edge_index)
    assert torch.equal(obs["obs.edges"].values, batch.edge_attr)
    assert torch.equal(obs["obs.nodes"].batch, batch.batch)
    assert torch.equal(obs["obs.nodes"].ptr, batch.ptr)


def test_batches_are_those_of_pyg():
    """Empty, edgeless, single-node and huge graphs, of a step and gathered with repeats."""
    rng = np.random.default_rng(0)
    steps = [graphs(rng, rng.permutation(SIZES).tolist()) for _ in range(3)]
    storage, _ = stored(EDGES, steps)
    flat = sum(steps, [])
    assert_is_pyg(storage.batch(storage.blocks[-1]), steps[-1])
    assert_is_pyg(storage.gather(np.arange(len(flat)))[0], flat)
    assert_is_pyg(everything(storage), flat)
    idx = rng.integers(len(flat), size=40)
    assert_is_pyg(storage.gather(idx)[0], [flat[i] for i in idx])


# ---- What is stored and copied ----
class Elsewhere:
    """A device that is no CPU; what is copied to it stays on the host."""

    type = "elsewhere"


def assert_same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        for x, y in zip(a[path], b[path]):
            assert x.dtype == y.dtype and torch.equal(x, y), path


def test_one_copy(monkeypatch):
    """A step reaches the device with one copy of its leaves' bytes; of a minibatch only how many
    rows observations have, with one copy, and where these are stored, with another one."""
    copied = []
    copy = lambda array, _: copied.append(array) or torch.from_numpy(array)
    monkeypatch.setattr(ppo_graph, "to_device", copy)
    storage, leaves = stored(EDGES, [graphs(np.random.default_rng(0))])
    batch, minibatch = everything(storage), storage.gather(idx := np.array([3, 0, 6]))[0]
    assert not copied
    num_nodes, num_edges = map(sum, zip(*SIZES))
    index_bytes = lambda num: 8 * 3 * (num + 2)  # of single rows, of nodes and of edges
    values, counts = storage.whole()
    storage = ppo_graph.Storage(leaves, Elsewhere())
    storage.append(ppo_graph.Flat([rows.numpy() for rows in values], counts))
    steps = 12 * num_nodes + 8 - 12 * num_nodes % 8 + 2 * 8 * (num_edges + 1)
    assert [len(array) for array in copied] == [steps, index_bytes(len(SIZES))]
    assert_same(everything(storage), batch)
    copied.clear()
    assert_same(storage.gather(idx)[0], minibatch)
    places = 8 * 3 * (len(idx) + 1)
    assert sorted(len(array) for array in copied) == [places, index_bytes(len(idx))]


def test_declared_maximum_costs_nothing(tmp_path):
    """Raised tenfold, the same bytes are stored and computed, bit by bit."""
    flags = dict(env_id="envs:PoissonGraph-v0", num_steps=16, total_timesteps=96, save_model=True)
    of = lambda num: run(tmp_path / str(num), env_kwargs={"declared_max": num}, **flags)
    small, large = of(200), of(2000)
    assert small.scalars.keys() == large.scalars.keys()
    for name in small.scalars.keys() - {"charts/SPS"}:
        assert small.scalars[name] == large.scalars[name], name
    assert same_weights(small.folder, large.folder)
    assert small.scalars["charts/padding_avoided"][0][1] > 0.3  # there was something to pad


@given(st.lists(st.tuples(st.sampled_from("? B e f d h i q".split()), st.integers(0, 5))))
def test_pack(kinds):
    """Arrays of any types and sizes, empty ones too, come back as they were."""
    of = lambda k, num: np.random.default_rng(k).integers(0, 2, (num, k % 3))
    arrays = [of(k, num).astype(kind) for k, (kind, num) in enumerate(kinds)]
    with mock.patch.object(ppo_graph, "to_device", lambda array, _: torch.from_numpy(array)):
        copies = ppo_graph.pack(arrays, Elsewhere())
    for array, own in zip(arrays, copies, strict=True):
        host = torch.from_numpy(array)
        assert own.dtype == host.dtype and own.shape == host.shape and torch.equal(own, host)
