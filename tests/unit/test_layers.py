"""The faster layers of the services have the results and gradients of PyG's, whatever the graphs,
and keep no array of a row per edge; layers that they do not know stay as they are."""

import copy

import numpy as np
import pytest
import torch
from helpers import small_args
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import segment

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import layers

DIM = 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of so few edges that all tests have several, and nodes that do not fit into one."""
    monkeypatch.setattr(layers, "CHUNK", 3)


@pytest.fixture
def calls(monkeypatch):
    """A list that grows with each call of a layer that is faster."""
    of, found = layers.Edges.of, []
    monkeypatch.setattr(layers.Edges, "of", lambda *args: found.append(0) or of(*args))
    return found


@st.composite
def batches(draw):
    """(number of nodes, edge_index): ragged, with parallel edges, self loops, hubs, or no edges."""
    num_nodes = draw(st.integers(0, 9))
    node = st.integers(0, max(num_nodes - 1, 0))
    most = 20 if num_nodes else 0
    edges = draw(st.lists(st.tuples(node, node), max_size=most))
    if edges and draw(st.booleans()):
        edges += [(0, edges[0][1])] * 8  # a hub
    edges = draw(st.permutations(edges))
    return num_nodes, torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t().contiguous()


def conv_of(kind: str, edge_dim: int = 3) -> nn.Module:
    return ppo_graph.make_conv(kind.split()[0], DIM, None if kind == "gin" else edge_dim, "sum")


def accelerated(conv: nn.Module) -> nn.Module:
    """What the services put in the place of a copy."""
    agent = nn.Sequential(copy.deepcopy(conv))
    layers.accelerate(agent)
    return agent[0]


def results(conv, x, edge_index, edge_attr, weight) -> list[torch.Tensor]:
    """The output, then the gradients of nodes, edges and parameters."""
    conv.zero_grad()
    x = x.clone().requires_grad_()
    edge_attr = edge_attr.clone().requires_grad_()
    takes_edges = isinstance(conv, (pyg.GINEConv, layers.GINE))
    out = conv(x, edge_index, *[edge_attr][:takes_edges])
    (out * weight).sum().backward()
    return [out, x.grad, edge_attr.grad, *(param.grad for param in conv.parameters())]


@pytest.mark.parametrize("kind", ["gine", "gin", "gin with edge features"])
@given(batch=batches(), chunk=st.sampled_from([1, 3, 7, 2048]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_equals_pyg(kind, batch, chunk, seed):
    """Outputs and all gradients are PyG's, however many edges a chunk has."""
    num_nodes, edge_index = batch
    layers.CHUNK = chunk  # small_chunks puts it back
    torch.manual_seed(seed)
    dtype = torch.float64
    conv = conv_of(kind).to(dtype)
    x = torch.randn(num_nodes, DIM, dtype=dtype)
    edge_attr = torch.randn(edge_index.shape[1], 3, dtype=dtype)
    weight = torch.randn(num_nodes, DIM, dtype=dtype)

    fast = accelerated(conv)
    assert isinstance(fast, layers.Layer) and isinstance(conv, pyg.MessagePassing)
    expected = results(conv, x, edge_index, edge_attr, weight)
    found = results(fast, x, edge_index, edge_attr, weight)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("gnn", ["gine", "gin"])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_only_sums_are_faster(gnn, aggr, monkeypatch, calls):
    """Means and maxima are PyG's, and so is what torch.compile sees."""
    conv = ppo_graph.make_conv(gnn, 8, 3, aggr)
    fast = accelerated(conv)
    edge_index = torch.tensor([[0, 1, 1], [1, 0, 1]])
    x, edge_attr = torch.randn(2, 8), torch.randn(3, 3)
    messages = x[edge_index[0]] + conv.lin(edge_attr)
    if gnn == "gine":
        messages = messages.relu()
    got = [messages[1:2], messages[[0, 2]]]  # by each node
    reduce = {"sum": lambda m: m.sum(0), "mean": lambda m: m.mean(0), "max": lambda m: m.amax(0)}
    expected = conv.nn(x + torch.stack([reduce[aggr](own) for own in got]))
    torch.testing.assert_close(conv(x, edge_index, edge_attr), expected)
    assert not calls
    torch.testing.assert_close(fast(x, edge_index, edge_attr), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(fast(x, edge_index, edge_attr), expected)
    assert len(calls) == (aggr == "sum")


def test_layers_that_stay_as_they_are(calls):
    """Those with messages, options, hooks or networks of their own."""

    class Mine(pyg.GINEConv):
        def message(self, x_j, edge_attr):
            return x_j - self.lin(edge_attr)

    class Weighted(type(conv_of("gin with edge features"))):
        def aggregate(self, inputs, *args, **kwargs):
            return super().aggregate(2 * inputs, *args, **kwargs)

    hooked, other = conv_of("gin"), conv_of("gine")
    hooked.register_forward_hook(lambda *_: None)
    other.lin = nn.Sequential(other.lin, nn.ReLU())
    own = [Mine(nn.Linear(DIM, DIM)), Weighted(nn.Linear(DIM, DIM), edge_dim=3), hooked, other]
    agent = nn.Sequential(*own, conv_of("gin"))
    layers.accelerate(agent)
    assert list(agent)[:-1] == own and type(agent[-1]) is layers.GIN
    edge_index, edge_attr = torch.tensor([[0, 1, 1], [1, 0, 1]]), torch.randn(3, DIM)
    x = torch.randn(2, DIM)
    for options in ({"eps": 0.5}, {"train_eps": True}, {"flow": "target_to_source"}):
        conv = pyg.GINEConv(nn.Sequential(nn.Linear(DIM, DIM)), edge_dim=DIM, **options)
        found, expected = (each(x, edge_index, edge_attr) for each in (accelerated(conv), conv))
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert not calls


@pytest.mark.parametrize("kind", ["gine", "gin", "gin with edge features"])
def test_in_the_place_of_the_layer(kind):
    """Weights are the same objects, in the same order, under the same names, so an optimizer and a
    model.pt go on with them; wherever a layer is, and at each place if it is at several."""
    conv, shared = conv_of(kind), conv_of(kind)
    agent = nn.ModuleDict({"a/b": nn.ModuleList([conv, nn.Linear(2, 2), shared]), "c": shared})
    agent.eval()
    names, params = zip(*agent.named_parameters(remove_duplicate=False))
    state = list(agent.state_dict())
    layers.accelerate(agent)
    found = agent["a/b"]
    assert isinstance(found[0], layers.Layer) and found[2] is agent["c"] is not found[0]
    assert type(found[1]) is nn.Linear and not any(each.training for each in agent.modules())
    again, same = zip(*agent.named_parameters(remove_duplicate=False))
    assert again == names and all(map(lambda a, b: a is b, params, same))
    assert list(agent.state_dict()) == state


@pytest.mark.parametrize("gnn, edge_dim", [("gine", 3), ("gin", 3), ("gin", 0)])
def test_nothing_is_kept_per_edge(gnn, edge_dim):
    """No tensor of the size edges x dim waits for the gradient; PyG's layers keep several."""
    num_nodes, num_edges, dim = 50, 5_000, 64
    net = ppo_graph.GNN(4, edge_dim, small_args(gnn=gnn, gnn_dim=dim, gnn_layers=2))
    edge_index = torch.randint(num_nodes, (2, num_edges))
    x, edge_attr = torch.randn(num_nodes, 4), torch.randn(num_edges, edge_dim)
    most = []
    for is_faster in (False, True):
        if is_faster:
            layers.accelerate(net)
        sizes = []

        def keep(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            net(x, edge_index, edge_attr, None, None)
        most.append(max(sizes))
    assert most[1] < num_edges * dim // 4 and most[0] >= num_edges * dim


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(deadline=None, max_examples=20)
def test_pool(sizes):
    """The readout equals PyG's reduction of each segment, and so does its gradient."""
    rows = torch.randn(sum(sizes), 6, requires_grad=True)
    ptr = torch.tensor([0, *np.cumsum(sizes)])
    found, num = ppo_graph.pool(rows, ptr).split([12, 1], 1)
    expected = torch.cat([segment(rows, ptr, kind) for kind in ("mean", "max")], 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(num[:, 0], torch.tensor(sizes).float().log1p())
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * weight).sum(), rows)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)
