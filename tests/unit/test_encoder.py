"""The encoder: a batch is encoded as its observations are one by one, with any PyG layer; rows that
see their observation equal a loop in float64; categories, images and names of keys are told
apart."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, everything, graph_space, sample, small_args, stored, vector
from torch_geometric import nn as pyg

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import layers

GNNS = ["gine", "gin", "gatv2", "transformer", "sage"]


def encoder_of(leaves, **kwargs):
    torch.manual_seed(0)
    return ppo_graph.Encoder(leaves, small_args(**kwargs))


def tail(rng):
    """Sizes with many zeros and a tail."""
    return rng.choice([0, 1, 3, 300], p=[0.3, 0.2, 0.4, 0.1])


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


def gps(dim, edge_dim):
    """Local messages beside an attention among all nodes of a graph."""
    net = torch.nn.Sequential(torch.nn.Linear(dim, dim))
    conv = pyg.GINEConv(net, edge_dim=edge_dim) if edge_dim else pyg.GINConv(net)
    return pyg.GPSConv(dim, conv, heads=2, norm="graph_norm")


OTHERS = {"GPS": gps, "GCN": lambda dim, edge_dim: pyg.GCNConv(dim, dim)}


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("layer", [*GNNS, *OTHERS])
def test_any_pyg_layer(monkeypatch, layer, edges):
    """Each --gnn, and others in make_conv's place: equal to the layer run on each graph alone, with
    a gradient for every weight. Those that take them are given `batch` and edge features."""
    if layer in OTHERS:
        make_conv = lambda kind, dim, edge_dim, aggr: OTHERS[layer](dim, edge_dim)
        monkeypatch.setattr(ppo_graph, "make_conv", make_conv)
    space, rng = graph_space(vector(2) if edges else None), np.random.default_rng(0)
    size = (lambda rng: rng.integers(1, 9)) if layer == "GPS" else tail
    storage, leaves = stored(space, [[sample(space, rng, size) for _ in range(10)]])
    encoder = encoder_of(leaves, gnn_layers=1, gnn=layer if layer in GNNS else "gine")
    assert_batch_equals_singles(encoder, storage)
    obs = storage.gather(np.arange(10))[0]
    encoder(obs)[0].sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())

    net = encoder.nets[ppo_graph.module_key("obs.nodes")]
    _, elements = encoder(obs)
    takes_edges = edges and layer not in ("GCN", "sage")
    assert takes_edges <= ("edge_attr" in net.takes) and ("batch" in net.takes) == (layer == "GPS")
    for i in range(10):
        one = storage.gather(np.array([i]))[0]
        links = one["obs.edge_links"].values.t()
        h = net.embed(one["obs.nodes"].values)
        given = {"edge_attr": one["obs.edges"].values} if takes_edges else {}
        if layer == "GPS":
            given["batch"] = torch.zeros(len(h), dtype=torch.long)
        h = h + net.convs[0](net.norms[0](h), links, **given).relu()
        start, stop = obs["obs.nodes"].ptr[i : i + 2]
        found = elements["obs.nodes"].values[start:stop]
        torch.testing.assert_close(found, h, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_faster", [False, True])
@pytest.mark.parametrize("gnn", GNNS)
def test_edges_from_a_node_to_itself(gnn, is_faster):
    """They are seen as others are, with their features (gatv2 weighs edges by these), and by those
    nodes alone."""
    for edge_dim in (3, None):
        conv = ppo_graph.make_conv(gnn, 8, edge_dim, "sum")
        if is_faster:
            layers.accelerate(conv)
        x = torch.randn(4, 8)
        edge_index = torch.tensor([[0, 1, 1, 0, 2, 3, 2], [0, 0, 1, 1, 2, 2, 3]])
        features = torch.randn(7, 3)
        is_loop = edge_index[0] == edge_index[1]
        takes = edge_dim is not None and gnn != "sage"
        see = lambda edges, rows: conv(x, edges, **({"edge_attr": rows} if takes else {}))
        seen = see(edge_index, features)
        changed = [see(edge_index[:, ~is_loop], features[~is_loop])]
        if takes:
            changed.append(see(edge_index, features + is_loop[:, None]))
        for other in changed:
            assert ((seen - other).abs().amax(1) > 1e-3).tolist() == [True, True, True, False]


# ---- Rows that see their observation ----
def pooled(rows):
    """[mean, max, log(1 + n)] of the rows of one observation."""
    if len(rows) == 0:
        return rows.new_zeros(2 * rows.shape[1] + 1)
    num = torch.tensor([len(rows)]).log1p().to(rows)
    return torch.cat([rows.mean(0), rows.amax(0), num])


def set_layer(layer, x):
    """x + W relu(A norm(x) + B pooled) of one observation, row by row."""
    h = layer.norm(x)
    context = layer.context.weight @ pooled(h)
    rows = []
    for row, normed in zip(x, h):
        inner = (layer.row.weight @ normed + layer.row.bias + context).relu()
        rows.append(row + layer.output.weight @ inner + layer.output.bias)
    return torch.stack(rows) if rows else x


def graph_layers(net, x, links):
    """h + relu(messages + B pooled) of one graph."""
    h = net.embed(x)
    for conv, norm, context in zip(net.convs, net.norms, net.contexts):
        normed = norm(h)
        h = h + (conv(normed, links) + context.weight @ pooled(normed)).relu()
    return h


def assert_same_gradients(encoder, found, expected):
    """Values and the gradients of all weights, in float64."""
    weight = torch.randn_like(expected)
    results = []
    for values in (found, expected):
        encoder.zero_grad()
        (values * weight).sum().backward()
        results.append([values, *(param.grad for param in encoder.parameters())])
    for ours, theirs in zip(*results):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


SIZES = [3, 0, 1, 12, 1, 0, 2]


def test_set_layers_against_a_loop():
    """Rows of a set, of none or one too, see the mean, the maximum and the number of all."""
    space = spaces.Sequence(vector(3), stack=True)
    rng = np.random.default_rng(0)
    sets = [rng.standard_normal((num, 3), np.float32) for num in SIZES]
    storage, leaves = stored(space, [sets])
    encoder = encoder_of(leaves, set_layers=2).double()
    obs = everything(storage)
    rows = obs["obs"]
    obs["obs"] = rows._replace(values=rows.values.double())
    encoder.rows[ppo_graph.module_key("obs")].forward = lambda values: values
    _, elements = encoder(obs)
    expected = []
    *mlp, one, two = encoder.nets[ppo_graph.module_key("obs")]
    for own in obs["obs"].values.split(SIZES):
        expected.append(set_layer(two, set_layer(one, torch.nn.Sequential(*mlp)(own))))
    assert_same_gradients(encoder, elements["obs"].values, torch.cat(expected))


def test_graph_context_against_a_loop():
    """Nodes of a graph see the mean, the maximum and the number of all nodes, in each layer."""
    rng = np.random.default_rng(0)
    graphs = []
    for num in SIZES:
        links = rng.integers(max(num, 1), size=(2 * num, 2))
        nodes = rng.standard_normal((num, 3), np.float32)
        graphs.append(spaces.GraphInstance(nodes, None, links))
    storage, leaves = stored(graph_space(), [graphs])
    encoder = encoder_of(leaves, graph_context=True).double()
    encoder.rows[ppo_graph.module_key("obs.nodes")].forward = lambda values: values.double()
    _, elements = encoder(everything(storage))
    net = encoder.nets[ppo_graph.module_key("obs.nodes")]
    expected = []
    for graph in graphs:
        nodes, links = torch.from_numpy(graph.nodes).double(), torch.from_numpy(graph.edge_links)
        expected.append(graph_layers(net, nodes, links.t()))
    assert_same_gradients(encoder, elements["obs.nodes"].values, torch.cat(expected))


def rows_of(space, values):
    storage, leaves = stored(space, [values])
    encoder = encoder_of(leaves)
    return encoder(everything(storage))[0], encoder


def test_categories():
    """Few are one-hot, counted from their start; more than 64 share an embedding of width 64, with
    a row per category and part. A mask does not reach the features."""
    space = spaces.Dict(
        action_mask=spaces.MultiBinary(2),
        a=spaces.Discrete(3, start=-1),
        b=spaces.MultiDiscrete([2, 3], start=[5, -2]),
    )
    rows = [{"action_mask": np.array([1, k % 2], np.int8), "a": k - 1} for k in range(2)]
    rows = [row | {"b": np.array(b)} for row, b in zip(rows, ([5, 0], [6, -2]))]
    features, _ = rows_of(space, rows)
    assert features.tolist() == [[1, 0, 0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1, 0, 0]]
    features, encoder = rows_of(spaces.Discrete(65, start=7), [7, 8, 71])
    assert features.shape == (3, 64) and len(features.unique(dim=0)) == 3
    assert torch.equal(features, next(encoder.parameters())[[0, 1, 64]])
    space = spaces.MultiDiscrete([50, 50], start=[1, 2])
    features, encoder = rows_of(space, [np.array([1, 2]), np.array([50, 51])])
    weight = next(encoder.parameters())
    torch.testing.assert_close(
        features, torch.stack([weight[0] + weight[50], weight[49] + weight[99]])
    )


NAMES = ["type", "values", "training", "a.b", "a/b", "a~b", "a~1b", "a..b"]


def test_any_name_of_a_key():
    """None is reserved, and those that look alike are networks of their own."""
    assert len({ppo_graph.module_key(name) for name in [*NAMES, "a//b", "a~.b"]}) == len(NAMES) + 2
    sets = {name: spaces.Sequence(vector(2), stack=True) for name in NAMES}
    space = spaces.Dict({name: vector(2) for name in NAMES} | {"set": spaces.Dict(sets)})
    storage, leaves = batch_of(space, 3)
    encoder = encoder_of(leaves)
    assert len(encoder.nets) == len(NAMES)
    assert_batch_equals_singles(encoder, storage)
