"""Ragged observations: what is stored and gathered equals PyG's batches and a plain per-observation reference."""

import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import graph_space, observation_spaces, sample, small_args, stored, vector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

SIZES = [(5, 8), (0, 0), (1, 0), (1, 3), (7, 0), (4, 2), (500, 900), (0, 0), (6, 10)]  # nodes, edges


def graphs(rng, features=3, edge_features=2):
    """One GraphInstance per entry of SIZES."""
    return [spaces.GraphInstance(rng.standard_normal((n, features)).astype(np.float32),
                                 rng.standard_normal((e, edge_features)).astype(np.float32),
                                 rng.integers(max(n, 1), size=(e, 2))) for n, e in SIZES]


def pyg_batch(instances):
    return Batch.from_data_list([Data(x=torch.from_numpy(g.nodes), edge_index=torch.from_numpy(g.edge_links.T),
                                      edge_attr=torch.from_numpy(g.edges)) for g in instances])


def assert_is_pyg(obs, batch):
    assert torch.equal(obs["obs.nodes"].values, batch.x)
    assert torch.equal(obs["obs.edge_links"].values.t(), batch.edge_index)
    assert torch.equal(obs["obs.edges"].values, batch.edge_attr)
    assert torch.equal(obs["obs.nodes"].batch, batch.batch)
    assert torch.equal(obs["obs.nodes"].ptr, batch.ptr)


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_those_of_pyg(seed):
    """G1, G3, G7: empty, edgeless, single-node and huge graphs in one batch; latest and gather, with repeats."""
    rng = np.random.default_rng(seed)
    steps = [graphs(rng) for _ in range(3)]
    storage, _ = stored(graph_space(vector(2)), [[steps[t][i] for i in rng.permutation(len(SIZES))] for t in range(3)])
    order = np.random.default_rng(seed)  # the same permutations again
    graphs(order), graphs(order), graphs(order)
    flat = [steps[t][i] for t in range(3) for i in order.permutation(len(SIZES))]
    assert_is_pyg(storage.latest(), pyg_batch(flat[-len(SIZES):]))
    assert_is_pyg(storage.gather(np.arange(len(flat))), pyg_batch(flat))
    idx = rng.integers(len(flat), size=40)
    assert_is_pyg(storage.gather(idx), pyg_batch([flat[i] for i in idx]))


def test_missing_edges_are_zero_edges():
    """G7: a Graph whose edges and edge_links are None has none, beside graphs that have some."""
    rng = np.random.default_rng(0)
    full = graphs(rng)[0]
    none = spaces.GraphInstance(full.nodes, None, None)
    storage, _ = stored(graph_space(vector(2)), [[none, full, none]])
    obs = storage.gather(np.array([0, 1, 2, 0]))
    assert obs["obs.edge_links"].ptr.tolist() == [0, 0, 8, 8, 8] == obs["obs.edges"].ptr.tolist()
    assert torch.equal(obs["obs.edge_links"].values, torch.from_numpy(full.edge_links + 5))


def reference(space, obs, path="obs"):
    """[(path, array, group, name of the nodes that the rows index)] of one observation; group None: dense."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        items = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        prefix = "" if path == "obs" else path + "."
        return [leaf for k, child in items for leaf in reference(child, obs[k], f"{prefix}{k}")]
    if isinstance(space, spaces.Graph):
        nodes, links = path + ".nodes", path + ".edge_links"
        edge_links = np.zeros((0, 2), np.int64) if obs.edge_links is None else obs.edge_links
        leaves = [(nodes, obs.nodes, nodes, None), (links, edge_links, links, nodes)]
        if space.edge_space is not None:
            edges = np.zeros((0, *space.edge_space.shape)) if obs.edges is None else obs.edges
            leaves.append((path + ".edges", edges, links, None))
        return leaves
    if isinstance(space, spaces.Sequence):
        inner = space.feature_space
        if isinstance(inner, spaces.Dict):
            columns = {k: obs[k] if space.stack else np.array([row[k] for row in obs]).reshape(-1, *inner[k].shape)
                       for k in inner}
            return [(f"{path}.{k}", column, path, None) for k, column in columns.items()]
        return [(path, obs if space.stack else np.array(obs).reshape(-1, *inner.shape), path, None)]
    return [(path, np.asarray(obs), None, None)]


def assert_is_reference(batch, space, observations):
    """`batch` holds the observations, one after the other."""
    columns = list(zip(*[reference(space, obs) for obs in observations]))
    assert set(batch) == {column[0][0] for column in columns}
    sizes = {column[0][0]: [len(array) for _, array, _, _ in column] for column in columns if column[0][2]}
    for column in columns:
        path, _, group, nodes = column[0]
        arrays = [array for _, array, _, _ in column]
        if group is None:
            assert np.array_equal(batch[path].numpy(), np.stack(arrays))
            continue
        first = np.concatenate([[0], np.cumsum(sizes[nodes])]) if nodes else np.zeros(len(arrays) + 1, int)
        assert np.array_equal(batch[path].values.numpy(), np.concatenate([a + b for a, b in zip(arrays, first)]))
        assert batch[path].ptr.tolist() == [0, *np.cumsum(sizes[path])]
        assert batch[path].batch.tolist() == [i for i, a in enumerate(arrays) for _ in range(len(a))]


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(observation_spaces, st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_gather_equals_reference(space, seed, num_steps, num_envs):
    """G1, G2, G4, P1: any tree of spaces; any subset with repeats; the bytes stored are the valid ones and no other."""
    rng = np.random.default_rng(seed)
    observations = [[sample(space, rng) for _ in range(num_envs)] for _ in range(num_steps)]
    storage, leaves = stored(space, observations)
    flat = [obs for row in observations for obs in row]
    assert storage.size == len(flat)
    assert_is_reference(storage.latest(), space, observations[-1])
    everything = storage.gather(np.arange(len(flat)))
    assert_is_reference(everything, space, flat)
    idx = rng.integers(len(flat), size=rng.integers(1, 8))
    assert_is_reference(storage.gather(idx), space, [flat[i] for i in idx])

    valid = padded = 0
    columns = zip(*[sorted(reference(space, obs), key=lambda leaf: leaf[0]) for obs in flat])
    for leaf, column in zip(sorted(leaves, key=lambda leaf: leaf.path), columns):
        row = leaf.dtype.itemsize * int(np.prod(leaf.shape))
        sizes = [len(array) if group else 1 for _, array, group, _ in column]
        valid, padded = valid + row * sum(sizes), padded + row * max(sizes) * len(flat)
    held = [leaf.values if isinstance(leaf, ppo_graph.Ragged) else leaf for leaf in everything.values()]
    assert sum(values.numel() * values.element_size() for values in held) == valid
    assert storage.stats()["charts/obs_bytes_per_step"] == pytest.approx(valid / len(flat))
    assert storage.stats()["charts/padding_avoided"] == pytest.approx(1 - valid / padded if padded else 0.0)


def test_stats_of_known_sizes():
    """G4: two graphs of 1 and 3 nodes and 0 and 4 edges: 16 + 128 bytes of which padding would store 224."""
    zeros = [spaces.GraphInstance(np.zeros((n, 3), np.float32), None, np.zeros((e, 2), np.int64))
             for n, e in [(1, 0), (3, 4)]]
    stats = stored(graph_space(), [zeros])[0].stats()
    valid, padded = 4 * 12 + 4 * 16, 6 * 12 + 8 * 16
    assert stats["charts/obs_bytes_per_step"] == valid / 2
    assert stats["charts/padding_avoided"] == pytest.approx(1 - valid / padded)
    assert stats["charts/nodes_per_graph"] == 2


def test_clear_keeps_nothing_but_memory():
    """G4: a cleared storage that is filled again gives the new observations only, without a new allocation."""
    rng = np.random.default_rng(0)
    space = graph_space(vector(2))
    storage, _ = stored(space, [graphs(rng)])
    memory = [values.data_ptr() for values in storage.values]
    other = graphs(rng)
    fresh, _ = stored(space, [other])
    storage.clear()
    storage.append([[values[:num].numpy()] for values, num in zip(fresh.values, fresh.num_rows)], fresh.steps[0])
    assert_is_pyg(storage.gather(np.arange(len(SIZES))), pyg_batch(other))
    assert [values.data_ptr() for values in storage.values] == memory


def test_declared_maximum_costs_nothing():
    """G5: with the declared maximum raised tenfold the same bytes are stored and computed on, on sizes with a tail."""
    def rollout(declared_max):
        args = small_args(env_id="envs:PoissonGraph-v0", env_kwargs={"declared_max": declared_max}, num_steps=32)
        makers = [lambda: ppo_graph.make_env(args.env_id, args.env_kwargs)] * args.num_envs
        envs = ppo_graph.make_envs(makers, args)
        torch.manual_seed(1)
        agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
        actor = ppo_graph.Actor(agent, envs.leaves, args.num_envs, args, torch.device("cpu"))
        storage = actor.storage
        envs.reset(1)
        rollout = ppo_graph.collect(actor, envs, args, lambda *episode: None)
        return storage, rollout, sum(p.numel() for p in agent.parameters())

    (small, small_rollout, num), (large, large_rollout, num_large) = rollout(200), rollout(2000)
    assert num == num_large and small.num_rows == large.num_rows and small.stats() == large.stats()
    assert [v.shape for v in small.values] == [v.shape for v in large.values]
    idx = np.arange(small.size)
    for a, b in zip(small.gather(idx).values(), large.gather(idx).values()):
        assert torch.equal(a.values, b.values)
    assert all(torch.equal(a, b) for a, b in zip(small_rollout[:-1], large_rollout[:-1]))
    nodes = np.concatenate([step["graph.nodes"] for step in small.steps])
    assert nodes.max() > 2 * nodes.mean()  # there was something to pad
    assert small.stats()["charts/padding_avoided"] > 0.3


@pytest.mark.parametrize("space, leaf", [
    (spaces.Text(5), "obs"),
    (spaces.OneOf([spaces.Discrete(2), vector(2)]), "obs"),
    (spaces.Dict(a=spaces.Tuple((vector(2), spaces.Text(5)))), "a.1"),
    (spaces.Sequence(spaces.Text(5)), "obs"),
    (spaces.Dict(many=spaces.Sequence(graph_space())), "many"),
    (spaces.Dict(many=spaces.Sequence(spaces.Sequence(vector(2)), stack=False)), "many"),
])
def test_unsupported_space_is_named(space, leaf):
    """P1: a space without a rule is a TypeError with the space's name and the leaf's path."""
    with pytest.raises(TypeError, match="is not supported") as error:
        ppo_graph.leaves_of(space)
    assert f"'{leaf}'" in str(error.value)
    assert type(space).__name__ in ("Dict",) or type(space).__name__ in str(error.value)
    assert any(name in str(error.value) for name in ("Text", "OneOf", "Sequence(Graph", "Sequence(Sequence"))
