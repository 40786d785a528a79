"""Message passing without an array of a row per edge: the results of PyG's GIN and GINE, faster.

PyG writes the messages of all edges, [edges, dim], to memory, then what the ReLU leaves of them,
and the gradients of both. On a CPU core that takes most of the time of a training. Here edges are
sorted by target and by source, once per batch for all layers. A node's sum is one call that reads
its rows and adds them. Messages that have a ReLU are made in chunks that stay in the cache, and
once more for the gradient, so nothing of the size edges x dim is kept.

`accelerate` puts these layers in the place of PyG's, with the same parameters.
"""

import threading
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.index import index2ptr
from torch_geometric.utils import scatter

# Under autocast their inputs become float32: the backward pass makes the messages once more
forward_in_float32 = torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
backward_in_float32 = torch.amp.custom_bwd(device_type="cuda")

CHUNK = 2048  # edges, whose messages of 64 numbers fit into the cache of a core
LATEST = threading.local()  # .edges of this thread's layers before, which often have the same


class SortedEdges(NamedTuple):
    """The edges of a batch of graphs in the order of one of their ends."""

    ptr: Tensor  # int64 [nodes + 1]; those of node v are the ones from ptr[v] to ptr[v + 1]
    edges: Tensor  # int64 [edges], their numbers in the observation
    here: Tensor  # int64 [edges], the end by which they are sorted
    there: Tensor  # int64 [edges], the other end

    def neighbor_sum(self, values: Tensor) -> Tensor:
        """For each node the sum of the rows of `values` [nodes, dim] at its edges' other ends."""
        return segment_sum(values, self.there, self.ptr)

    def edge_sum(self, values: Tensor) -> Tensor:
        """For each node the sum of its edges' rows; those are in the order of these edges."""
        return segment_sum(values, torch.arange(len(values), device=values.device), self.ptr)

    def chunks(self) -> Iterator["SortedEdges"]:
        """The edges of some nodes, about CHUNK, then those of the next ones. On CUDA all at once:
        to read ptr would be to wait."""
        num = len(self.edges)
        if num <= CHUNK or self.ptr.device.type != "cpu":
            yield self
            return
        ptr = self.ptr.numpy()
        nodes = np.searchsorted(ptr, range(0, num, CHUNK))
        nodes = np.unique(np.append(nodes, len(ptr) - 1))
        for first, stop in zip(nodes, nodes[1:]):
            own_ptr = self.ptr[first : stop + 1] - self.ptr[first]
            rows = slice(ptr[first], ptr[stop])
            yield SortedEdges(own_ptr, self.edges[rows], self.here[rows], self.there[rows])


class Edges:
    """A batch's edge_index [2, edges], sorted when it is first asked for."""

    def __init__(self, edge_index: Tensor, num_nodes: int):
        self.edge_index = edge_index
        self.source, self.target = edge_index
        self.num_nodes = num_nodes

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int) -> "Edges":
        edges = getattr(LATEST, "edges", None)
        if edges is None or edges.edge_index is not edge_index or edges.num_nodes != num_nodes:
            edges = LATEST.edges = cls(edge_index, num_nodes)
        return edges

    @cached_property
    def incoming(self) -> SortedEdges:
        """By target."""
        return self.sorted_by(self.target, self.source)

    @cached_property
    def outgoing(self) -> SortedEdges:
        """By source; only gradients need it."""
        return self.sorted_by(self.source, self.target)

    def sorted_by(self, here: Tensor, there: Tensor) -> SortedEdges:
        here, edges = here.sort(stable=True)
        ptr = index2ptr(here, self.num_nodes)
        return SortedEdges(ptr, edges, here, there.index_select(0, edges))


def segment_sum(values: Tensor, rows: Tensor, ptr: Tensor) -> Tensor:
    """Sums of values[rows[ptr[b]:ptr[b + 1]]], [B, dim], which are read and added in one kernel."""
    return nn.functional.embedding_bag(rows, values, ptr, mode="sum", include_last_offset=True)


class NeighborSum(torch.autograd.Function):
    """The sum of x[source] over the incoming edges of each node, [nodes, dim]."""

    @staticmethod
    @forward_in_float32
    def forward(ctx, x: Tensor, edges: Edges) -> Tensor:
        ctx.edges = edges
        return edges.incoming.neighbor_sum(x)

    @staticmethod
    @backward_in_float32
    def backward(ctx, grad: Tensor) -> tuple:
        return ctx.edges.outgoing.neighbor_sum(grad), None


class MessageSum(torch.autograd.Function):
    """The sum of relu(x[source] + linear(edge_attr)) over the incoming edges of each node, [nodes,
    dim], from x [nodes, dim] and edge_attr [edges, any]."""

    @staticmethod
    @forward_in_float32
    def forward(ctx, x: Tensor, edge_attr: Tensor, weight: Tensor, bias: Tensor, edges: Edges):
        ctx.save_for_backward(x, edge_attr, weight, bias)
        ctx.edges = edges
        sums = []
        for part in edges.incoming.chunks():
            attr = edge_attr.index_select(0, part.edges)
            messages = torch.addmm(bias, attr, weight.t()).add_(x.index_select(0, part.there))
            sums.append(part.edge_sum(messages.relu_()))
        return joined(sums)

    @staticmethod
    @backward_in_float32
    def backward(ctx, grad: Tensor) -> tuple:
        x, edge_attr, weight, bias = ctx.saved_tensors
        grads_x = []
        grad_attr = torch.empty_like(edge_attr) if ctx.needs_input_grad[1] else None
        grad_weight = weight.new_zeros(weight.shape[::-1])  # transposed: a faster product
        grad_bias = torch.zeros_like(bias)
        for part in ctx.edges.outgoing.chunks():
            attr = edge_attr.index_select(0, part.edges)
            messages = torch.addmm(bias, attr, weight.t()).add_(x.index_select(0, part.here))
            is_positive = messages.gt_(0)  # as floats: faster than through bool
            grads = grad.index_select(0, part.there).mul_(is_positive)
            grads_x.append(part.edge_sum(grads))
            grad_weight.addmm_(attr.t(), grads)
            grad_bias += grads.sum(0)
            if grad_attr is not None:
                grad_attr[part.edges] = grads @ weight
        return joined(grads_x), grad_attr, grad_weight.t(), grad_bias, None


def joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ---- Layers ----
def is_for_rows(edge_index: Tensor) -> bool:
    """Whether a row for each edge is as good: torch.compile merges the operations, and on CUDA it
    has fewer launches, which is what counts while there are few edges (results/h200/tables.md)."""
    if torch.compiler.is_compiling():
        return True
    return edge_index.is_cuda and edge_index.shape[1] < 100_000


class Layer(nn.Module):
    """One that takes the place of a PyG layer, with its parameters under the same names."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.register_buffer("eps", conv.eps)  # 0: it is only there for the state_dict
        self.nn = conv.nn
        self.training = conv.training

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        if is_for_rows(edge_index):
            messages = self.messages(x.index_select(0, edge_index[0]), edge_attr)
            sums = scatter(messages, edge_index[1], dim_size=len(x), reduce="sum")
        else:
            sums = self.sums(x, edge_attr, Edges.of(edge_index, len(x)))
        return self.nn(x + sums)


class GIN(Layer):
    """GINConv: a node gets the embeddings of its neighbors."""

    def messages(self, senders: Tensor, edge_attr: None) -> Tensor:
        """One for each edge, [edges, dim], from the embeddings of its source."""
        return senders

    def sums(self, x: Tensor, edge_attr: None, edges: Edges) -> Tensor:
        """Of the messages that each node gets, [nodes, dim]."""
        return NeighborSum.apply(x, edges)


class GINE(Layer):
    """GINEConv: messages relu(x + lin(edge_attr))."""

    def __init__(self, conv: nn.Module):
        super().__init__(conv)
        self.lin = conv.lin

    def messages(self, senders: Tensor, edge_attr: Tensor) -> Tensor:
        return (senders + self.lin(edge_attr)).relu()

    def sums(self, x: Tensor, edge_attr: Tensor, edges: Edges) -> Tensor:
        return MessageSum.apply(x, edge_attr, self.lin.weight, self.lin.bias, edges)


class LinearGINE(GINE):
    """Messages x + lin(edge_attr), without a ReLU: a linear layer of a sum of features."""

    def messages(self, senders: Tensor, edge_attr: Tensor) -> Tensor:
        return senders + self.lin(edge_attr)

    def sums(self, x: Tensor, edge_attr: Tensor, edges: Edges) -> Tensor:
        incoming = edges.incoming
        attr = segment_sum(edge_attr, incoming.edges, incoming.ptr)
        biases = incoming.ptr.diff()[:, None] * self.lin.bias
        return NeighborSum.apply(x, edges) + nn.functional.linear(attr, self.lin.weight) + biases


def accelerate(agent: nn.Module) -> None:
    """Puts a faster layer in the place of each GIN and GINE of PyG, wherever it is in the agent.
    Parameters stay the same objects, which an optimizer may have already, and so do their names in
    the state_dict."""
    faster = {}  # a layer -> the one in its place; the agent may have it at several places
    for path, module in list(agent.named_modules(remove_duplicate=False)):
        if module not in faster:
            kind = faster_kind(module)
            faster[module] = kind(module) if kind else None
        if path and faster[module]:
            agent.set_submodule(path, faster[module])


def faster_kind(conv: nn.Module) -> type[Layer] | None:
    """The class that computes what a layer computes, None if there is none: for other options, and
    for classes of a user, which may compute anything."""
    if not isinstance(conv, (pyg.GINConv, pyg.GINEConv)):
        return None
    has_eps = isinstance(conv.eps, nn.Parameter) or conv.eps.any()
    is_sum = conv.aggr in ("sum", "add") and conv.flow == "source_to_target"
    if has_eps or not is_sum or has_hooks(conv):
        return None
    if type(conv) is pyg.GINConv:
        return GIN
    lin = getattr(conv, "lin", None)
    if type(lin) not in (nn.Linear, pyg.Linear) or lin.bias is None or has_hooks(lin):
        return None
    if type(conv) is pyg.GINEConv:
        return GINE
    return LinearGINE if is_linear(conv) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see what it computes, or changes it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def is_linear(conv: nn.Module) -> bool:
    """Whether it is a GINEConv whose messages alone are others: the embedding of the source plus
    lin(edge_attr), as those of the scripts' --gnn gin are."""
    for name in ("forward", "aggregate", "update", "message_and_aggregate", "__call__"):
        if getattr(type(conv), name) is not getattr(pyg.GINEConv, name, None):
            return False
    weight = conv.lin.weight
    senders = torch.linspace(-2, 2, 5 * len(weight)).reshape(5, -1).to(weight)
    edge_attr = torch.linspace(-3, 2, 5 * weight.shape[1]).reshape(5, -1).to(weight)
    with torch.no_grad():
        try:
            messages = conv.message(senders, edge_attr)
        except Exception:  # of many kinds: they take something else
            return False
        return torch.equal(messages, senders + conv.lin(edge_attr))
