"""Ragged observations: what is stored and gathered equals PyG's batches and a plain per-observation
reference."""

from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    everything,
    graph_space,
    list_envs,
    observation_spaces,
    run,
    sample,
    small_args,
    stored,
    vector,
    weights,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import runs

SIZES = [
    (5, 8),
    (0, 0),
    (1, 0),
    (1, 3),
    (7, 0),
    (4, 2),
    (500, 900),
    (0, 0),
    (6, 10),
]  # nodes, edges


def graphs(rng, features=3, edge_features=2):
    """One GraphInstance per entry of SIZES."""
    return [
        spaces.GraphInstance(
            rng.standard_normal((n, features)).astype(np.float32),
            rng.standard_normal((e, edge_features)).astype(np.float32),
            rng.integers(max(n, 1), size=(e, 2)),
        )
        for n, e in SIZES
    ]


def pyg_batch(instances):
    return Batch.from_data_list(
        [
            Data(
                x=torch.from_numpy(g.nodes),
                edge_index=torch.from_numpy(g.edge_links.T),
                edge_attr=torch.from_numpy(g.edges),
            )
            for g in instances
        ]
    )


def assert_is_pyg(obs, batch):
    assert torch.equal(obs["obs.nodes"].values, batch.x)
    assert torch.equal(obs["obs.edge_links"].values.t(), batch.edge_index)
    assert torch.equal(obs["obs.edges"].values, batch.edge_attr)
    assert torch.equal(obs["obs.nodes"].batch, batch.batch)
    assert torch.equal(obs["obs.nodes"].ptr, batch.ptr)


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_those_of_pyg(seed):
    """Empty, edgeless, single-node and huge graphs in one batch; of a step, and gathered with
    repeats."""
    rng = np.random.default_rng(seed)
    steps = [graphs(rng) for _ in range(3)]
    storage, _ = stored(
        graph_space(vector(2)),
        [[steps[t][i] for i in rng.permutation(len(SIZES))] for t in range(3)],
    )
    order = np.random.default_rng(seed)  # the same permutations again
    graphs(order), graphs(order), graphs(order)
    flat = [steps[t][i] for t in range(3) for i in order.permutation(len(SIZES))]
    assert_is_pyg(storage.batch(storage.blocks[-1]), pyg_batch(flat[-len(SIZES) :]))
    assert_is_pyg(storage.gather(np.arange(len(flat)))[0], pyg_batch(flat))
    assert_is_pyg(everything(storage), pyg_batch(flat))
    idx = rng.integers(len(flat), size=40)
    assert_is_pyg(storage.gather(idx)[0], pyg_batch([flat[i] for i in idx]))


def test_missing_edges_are_zero_edges():
    """A Graph whose edges and edge_links are None has none, beside graphs that have some."""
    rng = np.random.default_rng(0)
    full = graphs(rng)[0]
    none = spaces.GraphInstance(full.nodes, None, None)
    storage, _ = stored(graph_space(vector(2)), [[none, full, none]])
    obs = storage.gather(np.array([0, 1, 2, 0]))[0]
    assert obs["obs.edge_links"].ptr.tolist() == [0, 0, 8, 8, 8] == obs["obs.edges"].ptr.tolist()
    assert torch.equal(obs["obs.edge_links"].values, torch.from_numpy(full.edge_links + 5))


def reference(space, obs, path="obs"):
    """[(path, rows, group, name of the nodes that the rows index)] of one observation; in the group
    "" there is one row."""
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
            columns = {
                k: obs[k]
                if space.stack
                else np.array([row[k] for row in obs]).reshape(-1, *inner[k].shape)
                for k in inner
            }
            return [(f"{path}.{k}", column, path, None) for k, column in columns.items()]
        return [(path, obs if space.stack else np.array(obs).reshape(-1, *inner.shape), path, None)]
    return [(path, np.asarray(obs)[None], "", None)]


def assert_is_reference(batch, space, observations):
    """`batch` holds the observations, one after the other."""
    columns = list(zip(*[reference(space, obs) for obs in observations]))
    assert set(batch) == {column[0][0] for column in columns}
    sizes = {column[0][0]: [len(array) for _, array, _, _ in column] for column in columns}
    for column in columns:
        path, _, _, nodes = column[0]
        arrays = [array for _, array, _, _ in column]
        first = (
            np.concatenate([[0], np.cumsum(sizes[nodes])])
            if nodes
            else np.zeros(len(arrays) + 1, int)
        )
        assert np.array_equal(
            batch[path].values.numpy(), np.concatenate([a + b for a, b in zip(arrays, first)])
        )
        assert batch[path].ptr.tolist() == [0, *np.cumsum(sizes[path])]
        assert batch[path].batch.tolist() == [
            i for i, a in enumerate(arrays) for _ in range(len(a))
        ]


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(observation_spaces, st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_gather_equals_reference(space, seed, num_steps, num_envs):
    """Any tree of spaces; any subset with repeats; the bytes stored are the valid ones and no
    other."""
    rng = np.random.default_rng(seed)
    observations = [[sample(space, rng) for _ in range(num_envs)] for _ in range(num_steps)]
    storage, leaves = stored(space, observations)
    flat = [obs for row in observations for obs in row]
    assert_is_reference(storage.batch(storage.blocks[-1]), space, observations[-1])
    assert_is_reference(everything(storage), space, flat)
    assert_is_reference(storage.gather(np.arange(len(flat)))[0], space, flat)
    idx = rng.integers(len(flat), size=rng.integers(1, 8))
    assert_is_reference(storage.gather(idx)[0], space, [flat[i] for i in idx])

    valid = padded = 0
    columns = zip(*[sorted(reference(space, obs), key=lambda leaf: leaf[0]) for obs in flat])
    for leaf, column in zip(sorted(leaves, key=lambda leaf: leaf.path), columns):
        row = leaf.dtype.itemsize * int(np.prod(leaf.space.shape))
        sizes = [len(array) for _, array, _, _ in column]
        assert {leaf.group} == {group for _, _, group, _ in column}
        valid, padded = valid + row * sum(sizes), padded + row * max(sizes) * len(flat)
    assert sum(values.nbytes for values in storage.whole().values) == valid
    stats = runs.sizes(storage)
    assert stats["charts/obs_bytes_per_step"] == pytest.approx(valid / len(flat))
    if padded:
        assert stats["charts/padding_avoided"] == pytest.approx(1 - valid / padded)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    observation_spaces, st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=3)
)
def test_joined_observations(space, seed, sizes):
    """Observations of any numbers of environments are joined in order; the copy shares no memory
    with them."""
    rng = np.random.default_rng(seed)
    parts = [[sample(space, rng) for _ in range(num)] for num in sizes]
    storages = [stored(space, [part])[0] for part in parts]
    flats = [
        ppo_graph.Flat(
            [values.numpy() for values in storage.whole().values], storage.whole().counts
        )
        for storage in storages
    ]
    joined = ppo_graph.join(flats)
    fresh = ppo_graph.Storage(storages[0].leaves, torch.device("cpu"))
    assert_is_reference(fresh.append(joined), space, sum(parts, []))
    for k, values in enumerate(joined.values):
        assert not any(np.shares_memory(values, flat.values[k]) for flat in flats)


def test_stats_of_known_sizes():
    """Two graphs of 1 and 3 nodes and 0 and 4 edges: 48 + 32 bytes of which padding would store
    136."""
    zeros = [
        spaces.GraphInstance(np.zeros((n, 3), np.float32), None, np.zeros((e, 2), np.int64))
        for n, e in [(1, 0), (3, 4)]
    ]
    storage, _ = stored(graph_space(), [zeros])
    valid, padded = 4 * 12 + 4 * 8, 6 * 12 + 8 * 8
    assert runs.sizes(storage) == pytest.approx(
        {
            "charts/obs_bytes_per_step": valid / 2,
            "charts/padding_avoided": 1 - valid / padded,
            "charts/rows/obs.nodes": 2,
            "charts/rows/obs.edge_links": 2,
        }
    )


def test_stats_of_nothing():
    """Where there are no bytes no padding is avoided."""
    empty = spaces.GraphInstance(np.zeros((0, 3), np.float32), None, None)
    storage, _ = stored(graph_space(), [[empty, empty]])
    assert set(runs.sizes(storage).values()) == {0}


class Elsewhere:
    """A device that is no CPU; what is copied to it stays on the host."""

    type = "elsewhere"


def test_one_copy(monkeypatch):
    """A step reaches the device with one copy of its leaves' bytes; the indices of a batch, where
    observations begin and which one a row belongs to, with one; where the rows of a minibatch are
    stored with another one."""
    copied = []
    monkeypatch.setattr(
        ppo_graph, "to_device", lambda array, _: copied.append(array) or torch.from_numpy(array)
    )
    instances = graphs(np.random.default_rng(0))
    storage, leaves = stored(graph_space(vector(2)), [instances])
    batch, minibatch = everything(storage), storage.gather(idx := np.array([3, 0, 6]))[0]
    assert not copied
    num_nodes, num_edges = map(sum, zip(*SIZES))

    def index_bytes(num, num_rows):
        """Of ptr and batch of single rows, of nodes and of edges."""
        return 8 * (3 * (num + 1) + num + num_rows + 6)

    values, counts = storage.whole()
    storage = ppo_graph.Storage(leaves, Elsewhere())
    storage.append(ppo_graph.Flat([rows.numpy() for rows in values], counts))
    steps = 12 * num_nodes + 8 - 12 * num_nodes % 8 + 2 * 8 * (num_edges + 1)
    indices = index_bytes(len(SIZES), num_nodes + num_edges)
    assert [len(array) for array in copied] == [steps, indices]
    assert_same(everything(storage), batch)
    copied.clear()
    assert_same(storage.gather(idx)[0], minibatch)
    num_rows = sum(sum(SIZES[i]) for i in idx)
    places = 8 * (num_rows + len(idx) + 3)
    indices = index_bytes(len(idx), num_rows)
    assert [len(array) for array in copied] == [places, indices]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        for x, y in zip(a[path], b[path]):
            assert x.dtype == y.dtype and torch.equal(x, y), path


@given(st.lists(st.tuples(st.sampled_from("? B e f d h i q".split()), st.integers(0, 5))))
def test_pack(kinds):
    """Arrays of any types and sizes, empty ones too, come back as they were."""
    arrays = [
        np.random.default_rng(k).integers(0, 2, (num, k % 3)).astype(kind)
        for k, (kind, num) in enumerate(kinds)
    ]
    copy = lambda array, _: torch.from_numpy(array)
    with mock.patch.object(ppo_graph, "to_device", copy):
        copies = ppo_graph.pack(arrays, Elsewhere())
    for array, own in zip(arrays, copies, strict=True):
        host = torch.from_numpy(array)
        assert own.dtype == host.dtype and own.shape == host.shape and torch.equal(own, host)


def test_links_without_features():
    """Leaves of a group share the number of rows of its first one: a link without the features that
    its space declares is not forgotten."""
    graph = spaces.GraphInstance(np.zeros((2, 3), np.float32), None, np.array([[0, 1]]))
    envs = list_envs(graph_space(vector(2)), [[graph]])
    flat = envs.collate([envs.read(graph)])
    assert [counts.tolist() for counts in flat.counts.values()] == [[1], [2], [1]]


def test_what_was_let_go_is_gone():
    """A cleared storage that is filled again gives the new observations only."""
    rng = np.random.default_rng(0)
    space = graph_space(vector(2))
    storage, _ = stored(space, [graphs(rng)])
    other = graphs(rng)
    fresh, _ = stored(space, [other])
    storage.blocks.clear()
    storage.append(
        ppo_graph.Flat([values.numpy() for values in fresh.whole().values], fresh.whole().counts)
    )
    assert_is_pyg(storage.gather(np.arange(len(SIZES)))[0], pyg_batch(other))


def test_declared_maximum_costs_nothing(tmp_path):
    """With the declared maximum raised tenfold the same bytes are stored and the same is computed,
    bit by bit, on sizes with a long tail."""
    flags = {
        "env_id": "envs:PoissonGraph-v0",
        "num_steps": 32,
        "total_timesteps": 192,
        "save_model": True,
    }
    small, large = (
        run(tmp_path / str(num), env_kwargs={"declared_max": num}, **flags) for num in (200, 2000)
    )
    assert small.scalars.keys() == large.scalars.keys()
    for name in small.scalars.keys() - {"charts/SPS"}:
        assert small.scalars[name] == large.scalars[name], name
    ours, theirs = weights(small.folder), weights(large.folder)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    assert small.scalars["charts/padding_avoided"][0][1] > 0.3  # there was something to pad


@pytest.mark.parametrize(
    "space, leaf, name",
    [
        (spaces.Text(5), "obs", "Text"),
        (spaces.OneOf([spaces.Discrete(2), vector(2)]), "obs", "OneOf"),
        (spaces.Dict(a=spaces.Tuple((vector(2), spaces.Text(5)))), "a.1", "Text"),
        (spaces.Sequence(spaces.Text(5)), "obs", "Text"),
        (spaces.Dict(many=spaces.Sequence(graph_space())), "many", "Graph"),
        (
            spaces.Dict(many=spaces.Sequence(spaces.Sequence(vector(2)), stack=False)),
            "many",
            "Sequence",
        ),
        (spaces.Sequence(spaces.Dict(a=vector(2), b=graph_space())), "obs.b", "Graph"),
        (spaces.Graph(spaces.Text(3), None), "obs.nodes", "Text"),
    ],
)
def test_unsupported_space_is_named(space, leaf, name):
    """A space without a rule is an error with the space's name and the leaf's path."""
    with pytest.raises(ppo_graph.UsageError, match="is not supported") as error:
        ppo_graph.leaves_of(space)
    assert str(error.value).startswith(f"leaf '{leaf}': {name}(")


def test_subclasses_of_spaces():
    """Spaces that an environment derives from Discrete and MultiDiscrete are what they derive
    from."""

    class Flat(spaces.Discrete):
        pass

    class Levels(spaces.MultiDiscrete):
        pass

    leaves = ppo_graph.leaves_of(spaces.Tuple((Flat(3), Levels([2, 4]))))
    assert [ppo_graph.num_options(leaf.space) for leaf in leaves] == [[3], [2, 4]]
    assert [ppo_graph.Rows(leaf, False).dim for leaf in leaves] == [3, 6]
    args = small_args()
    assert [part.n for part in ppo_graph.parts_of(Flat(3), leaves, args)] == [3]
    args = small_args(action_head="flat")
    assert [part.n for part in ppo_graph.parts_of(Levels([2, 4]), leaves, args)] == [2, 4]
    (action,) = ppo_graph.to_env_actions(Flat(3), {"": np.array([[2]])}, {})
    assert action == 2 and type(action) is np.int64  # as gymnasium's `sample` has them


@pytest.mark.parametrize("space", [vector(2), graph_space(), spaces.Sequence(vector(2))])
def test_single_rows(space):
    """The group "" is always there, with one row per observation: it says how many these are, also
    where all else is empty, and where nothing is in it."""
    rng = np.random.default_rng(0)
    empty = [[sample(space, rng, lambda rng: 0) for _ in range(4)] for _ in range(3)]
    storage, leaves = stored(space, empty)
    assert storage.whole().size == 12 and storage.whole().counts[""].tolist() == [1] * 12
    assert list(storage.whole().counts) == [
        "",
        *dict.fromkeys(leaf.group for leaf in leaves if leaf.group),
    ]
    obs = storage.gather(np.array([7, 2, 2]))[0]
    for leaf in leaves:
        num = int(leaf.group == "")
        assert obs[leaf.path].ptr.tolist() == (num * np.arange(4)).tolist()
        assert obs[leaf.path].batch.tolist() == list(range(3 * num))
        assert obs[leaf.path].values.shape == (3 * num, *leaf.space.shape)


def test_groups_of_leaves():
    """Leaves with equally many rows share a group: all that is not ragged the one without a name,
    columns of a set its path, links and edges theirs; masks and ids are of their own."""
    ids = spaces.Sequence(spaces.Box(0, 9, (), np.int64), stack=True)
    space = spaces.Dict(
        action_mask=spaces.Dict(node=ids, x=spaces.MultiBinary(2)),
        graph=graph_space(vector(2)),
        node_ids=ids,
        rows=spaces.Sequence(spaces.Dict(a=vector(2), b=spaces.Tuple((vector(), vector())))),
        x=spaces.Tuple((vector(1), spaces.Discrete(2))),
    )
    assert {leaf.path: (leaf.group, leaf.nodes) for leaf in ppo_graph.leaves_of(space)} == {
        "action_mask.node": ("action_mask.node", ""),
        "action_mask.x": ("", ""),
        "graph.nodes": ("graph.nodes", ""),
        "graph.edge_links": ("graph.edge_links", "graph.nodes"),
        "graph.edges": ("graph.edge_links", "graph.nodes"),
        "node_ids": ("node_ids", ""),
        "rows.a": ("rows", ""),
        "rows.b.0": ("rows", ""),
        "rows.b.1": ("rows", ""),
        "x.0": ("", ""),
        "x.1": ("", ""),
    }
