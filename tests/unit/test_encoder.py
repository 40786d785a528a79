"""The encoder: a batch is encoded as its observations are one by one, with any PyG layer."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, everything, graph_space, sample, small_args, stored, vector
from torch_geometric import nn as pyg

from cleanrl_graph import ppo_graph

MAX = partial(ppo_graph.segment, reduce="max")
READOUTS = ["sum", "mean", "max", "meanmax"]


def encoder_of(leaves, **kwargs):
    torch.manual_seed(0)
    return ppo_graph.Encoder(leaves, small_args(**kwargs))


def tail(rng):
    """Sizes with many zeros and a tail."""
    return rng.choice([0, 1, 3, 30], p=[0.3, 0.2, 0.4, 0.1])


def batch_of(space, num, seed=0):
    """(storage of `num` random observations, leaves)"""
    rng = np.random.default_rng(seed)
    return stored(space, [[sample(space, rng, tail) for _ in range(num)]])


def assert_batch_equals_singles(encoder, storage):
    features, elements = encoder(everything(storage))
    singles = [encoder(storage.gather(np.array([i]))[0]) for i in range(len(features))]
    assert features.shape == (len(features), encoder.dim) and torch.isfinite(features).all()
    torch.testing.assert_close(features, torch.cat([f for f, _ in singles]), atol=1e-5, rtol=1e-5)
    for group, rows in elements.items():
        expected = torch.cat([e[group].values for _, e in singles])
        torch.testing.assert_close(rows.values, expected, atol=1e-5, rtol=1e-5)
        sizes = [len(e[group].batch) for _, e in singles]
        assert rows.ptr.diff().tolist() == sizes
        assert rows.batch.tolist() == np.arange(len(sizes)).repeat(sizes).tolist()


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_batch_equals_singles(kind):
    """Every kind of observation, empty graphs and sets included."""
    storage, leaves = batch_of(OBSERVATIONS[kind], 12)
    assert_batch_equals_singles(encoder_of(leaves), storage)


@pytest.mark.parametrize("readout", READOUTS)
def test_readouts(readout):
    """Every readout of the elements equals a loop over the observations; its last column is log(1 +
    rows)."""
    storage, leaves = batch_of(OBSERVATIONS["set"], 12)
    encoder = encoder_of(leaves, readout=readout)
    assert_batch_equals_singles(encoder, storage)
    obs = storage.gather(np.arange(12))[0]
    features, elements = encoder(obs)
    ptr = obs["obs"].ptr.tolist()
    for row, start, stop in zip(features, ptr, ptr[1:]):
        rows = elements["obs"].values[start:stop]
        if stop == start:
            rows = torch.zeros(1, encoder.element_dims["obs"])
        parts = {
            "sum": [rows.sum(0)],
            "mean": [rows.mean(0)],
            "max": [rows.max(0)[0]],
            "meanmax": [rows.mean(0), rows.max(0)[0]],
        }[readout]
        expected = torch.cat([*parts, torch.tensor([stop - start + 1.0]).log()])
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gnn", ["gine", "gin", "gatv2", "transformer", "sage"])
@pytest.mark.parametrize("kind", ["graph", "graph_edges", "graph_categories"])
def test_layers_of_the_flag(gnn, kind):
    """Every --gnn encodes graphs with and without edge features, and has a gradient for every
    weight."""
    storage, leaves = batch_of(OBSERVATIONS[kind], 8)
    encoder = encoder_of(leaves, gnn=gnn)
    assert_batch_equals_singles(encoder, storage)
    encoder(storage.gather(np.arange(8))[0])[0].square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_gnn_flags_change_the_network():
    """gnn, gnn_layers, gnn_dim, gnn_aggr, readout and activation each change what is computed."""
    storage, leaves = batch_of(OBSERVATIONS["graph_edges"], 8)
    obs = storage.gather(np.arange(8))[0]
    seen = set()
    for flags in (
        {},
        {"gnn": "gin"},
        {"gnn": "gatv2"},
        {"gnn": "transformer"},
        {"gnn": "sage"},
        {"gnn_layers": 1},
        {"gnn_dim": 16},
        {"gnn_aggr": "max"},
        {"gnn_aggr": "mean"},
        *({"readout": name} for name in READOUTS[:3]),
    ):
        seen.add(encoder_of(leaves, **flags)(obs)[0].sum().item())
    assert len(seen) == 12
    storage, leaves = batch_of(OBSERVATIONS["set"], 8)
    obs = storage.gather(np.arange(8))[0]
    names = ("tanh", "relu", "elu", "gelu")
    assert len({encoder_of(leaves, activation=name)(obs)[0].sum().item() for name in names}) == 4


LAYERS = {
    "GCN": lambda dim, edge_dim: pyg.GCNConv(dim, dim),
    "Graph": lambda dim, edge_dim: pyg.GraphConv(dim, dim),
    "GATv2": lambda dim, edge_dim: pyg.GATv2Conv(dim, dim, edge_dim=edge_dim),
    "Transformer": lambda dim, edge_dim: pyg.TransformerConv(dim, dim, edge_dim=edge_dim),
    "ResGated": lambda dim, edge_dim: pyg.ResGatedGraphConv(dim, dim, edge_dim=edge_dim),
    "SAGE": lambda dim, edge_dim: pyg.SAGEConv(dim, dim),
}


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_any_pyg_layer_drops_in(monkeypatch, layer, edges):
    """Any PyG layer in make_conv's place; equal to the layer run on each graph alone, with
    gradients."""
    monkeypatch.setattr(
        ppo_graph, "make_conv", lambda kind, dim, edge_dim, aggr: LAYERS[layer](dim, edge_dim)
    )
    space = graph_space(vector(2) if edges else None)
    storage, leaves = batch_of(space, 10)
    encoder = encoder_of(leaves, gnn_layers=1)
    assert_batch_equals_singles(encoder, storage)
    obs = storage.gather(np.arange(10))[0]
    encoder(obs)[0].sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())

    net = encoder.nets[ppo_graph.key("obs.nodes")]
    _, elements = encoder(obs)
    takes_edges = edges and layer in ("GATv2", "Transformer", "ResGated")
    for i in range(10):
        one = storage.gather(np.array([i]))[0]
        links = one["obs.edge_links"].values.t()
        h = net.embed(one["obs.nodes"].values)
        attr = {"edge_attr": one["obs.edges"].values} if takes_edges else {}
        h = h + net.convs[0](net.norms[0](h), links, **attr).relu()
        start, stop = obs["obs.nodes"].ptr[i : i + 2]
        found = elements["obs.nodes"].values[start:stop]
        torch.testing.assert_close(found, h, atol=1e-5, rtol=1e-5)


def test_messages_follow_the_edges():
    """An edge (source, target) carries the source's features to the target and not the other
    way."""

    def out(first):
        nodes = np.array([[first, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
        graph = spaces.GraphInstance(nodes, None, np.array([[0, 1]]))
        storage, leaves = stored(graph_space(), [[graph]])
        return encoder_of(leaves, gnn_layers=1)(everything(storage))[1]["obs.nodes"].values

    changed = (out(1.0) - out(2.0)).abs().sum(1) > 1e-6
    assert changed.tolist() == [True, True, False]


def test_permutation():
    """Reordered nodes (with their edges) or elements give the same features and reordered
    elements."""
    rng = np.random.default_rng(0)
    order = rng.permutation(6)
    nodes, edges = rng.standard_normal((6, 3), np.float32), rng.standard_normal((9, 2), np.float32)
    links = rng.integers(6, size=(9, 2))
    graph = spaces.GraphInstance(nodes, edges, links)
    shuffled = spaces.GraphInstance(
        nodes[order], edges[::-1].copy(), np.argsort(order)[links][::-1].copy()
    )
    storage, leaves = stored(graph_space(vector(2)), [[graph, shuffled]])
    features, elements = encoder_of(leaves)(everything(storage))
    torch.testing.assert_close(features[0], features[1], atol=1e-5, rtol=1e-5)
    nodes = elements["obs.nodes"].values
    torch.testing.assert_close(nodes[:6][order], nodes[6:], atol=1e-5, rtol=1e-5)


def test_company_in_the_batch_changes_nothing():
    """An observation is encoded alike alone, beside small ones and beside one that is far
    larger."""
    space = OBSERVATIONS["mixed"]
    rng = np.random.default_rng(0)
    one, small = sample(space, rng), sample(space, rng)
    huge = sample(space, rng, lambda rng: 700)
    results = []
    for company in ([], [small], [huge, small]):
        storage, leaves = stored(space, [[one, *company]])
        results.append(encoder_of(leaves)(everything(storage))[0][0])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0], results[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [(), (3,)])
def test_segments_against_loops(dim):
    """Sums and maxima with their gradients; an empty segment has the sum 0 and the maximum -inf."""
    sizes = [2, 0, 5, 1, 0, 0, 300, 0]
    ptr = torch.tensor([0, *np.cumsum(sizes)])
    values = torch.randn(sum(sizes), *dim, dtype=torch.float64, requires_grad=True)
    for segment, loop, empty in (
        (ppo_graph.segment, lambda rows: rows.sum(0), 0.0),
        (MAX, lambda rows: rows.max(0)[0], -torch.inf),
    ):
        expected = torch.stack(
            [
                loop(values[a:b]) if b > a else torch.full(dim, empty, dtype=torch.float64)
                for a, b in zip(ptr, ptr[1:])
            ]
        )
        result = segment(values, ptr)
        torch.testing.assert_close(result, expected)
        weight = torch.randn_like(expected)
        grads = [torch.autograd.grad((out * weight).sum(), values)[0] for out in (result, expected)]
        torch.testing.assert_close(*grads)
    assert MAX(torch.zeros(0, *dim), torch.zeros(3, dtype=torch.long)).shape == (
        2,
        *dim,
    )


def rows_of(space, values):
    storage, leaves = stored(space, [values])
    encoder = encoder_of(leaves)
    return encoder(everything(storage))[0], encoder


def test_one_hot_of_categories():
    """Discrete and MultiDiscrete become one-hot, counted from their start."""
    features, _ = rows_of(spaces.Discrete(3, start=-1), [-1, 0, 1])
    assert torch.equal(features, torch.eye(3))
    features, _ = rows_of(
        spaces.MultiDiscrete([2, 3], start=[5, -2]), [np.array([5, 0]), np.array([6, -2])]
    )
    assert features.tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
    features, _ = rows_of(spaces.MultiBinary(3), [np.array([1, 0, 1], np.int8)])
    assert features.tolist() == [[1, 0, 1]]


def test_many_categories_are_embedded():
    """More than 64 categories share an embedding of width 64, one row per category and part."""
    features, encoder = rows_of(spaces.Discrete(65, start=7), [7, 8, 71])
    assert features.shape == (3, 64) and len(features.unique(dim=0)) == 3
    weight = next(encoder.parameters())
    assert torch.equal(features, weight[[0, 1, 64]])
    features, encoder = rows_of(
        spaces.MultiDiscrete([50, 50], start=[1, 2]), [np.array([1, 2]), np.array([50, 51])]
    )
    weight = next(encoder.parameters())
    torch.testing.assert_close(
        features, torch.stack([weight[0] + weight[50], weight[49] + weight[99]])
    )
    features, encoder = rows_of(spaces.Discrete(64), [3])
    assert features.shape == (1, 64) and not list(encoder.parameters())


def test_images_are_seen_alike_in_both_layouts():
    """HWC and CHW copies of one image, uint8 or float in 0..1, give the same features."""
    image = np.random.default_rng(0).integers(256, size=(3, 12, 10)).astype(np.uint8)
    results = []
    for values, dtype, high in (
        (image, np.uint8, 255),
        (image.transpose(1, 2, 0), np.uint8, 255),
        (image / np.float32(255), np.float32, 1),
    ):
        results.append(rows_of(spaces.Box(0, high, values.shape, dtype), [values])[0])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0], results[2], atol=1e-5, rtol=1e-5)
    assert results[0].shape == (1, 512)


@pytest.mark.parametrize(
    "shape", [(8, 8, 3), (3, 8, 8), (9, 1, 9), (8, 2, 9), (40, 3, 40), (2, 8, 100), (4, 4, 9)]
)
def test_any_shape_of_three_axes(shape):
    """Whatever a Box of three axes means, it is encoded."""
    storage, leaves = batch_of(spaces.Box(0, 1, shape, np.float32), 3)
    assert_batch_equals_singles(encoder_of(leaves), storage)


@pytest.mark.parametrize("name", ["type", "values", "items", "half", "training", "a.b"])
def test_any_name_of_a_key(name):
    """No key of a Dict is reserved, whatever attributes torch's modules have."""
    space = spaces.Dict(
        {name: vector(2), "set": spaces.Dict({name: spaces.Sequence(vector(2), stack=True)})}
    )
    storage, leaves = batch_of(space, 3)
    assert_batch_equals_singles(encoder_of(leaves), storage)


def test_action_mask_is_not_an_input():
    """The mask does not reach the features."""
    mask = spaces.Dict(action_mask=spaces.MultiBinary(2), x=vector(2))
    x = np.ones(2, np.float32)
    storage, leaves = stored(
        mask, [[{"x": x, "action_mask": np.array(m, np.int8)} for m in ([1, 0], [1, 1])]]
    )
    features = encoder_of(leaves)(everything(storage))[0]
    assert features.tolist() == [[1, 1], [1, 1]]
