"""Message passing without an array of a row per edge: the results of PyG's GIN and GINE, faster.

PyG writes the messages of all edges, [edges, dim], to memory, then what the ReLU leaves of them,
and the gradients of both. On a CPU core that takes most of the time of a training. Here edges are
sorted by target and by source, once per batch for all layers. A node's sum is one call that reads
its rows and adds them. Messages that have a ReLU are made in chunks that stay in the cache, and
once more for the gradient, so nothing of the size edges x dim is kept.

The layers and their parameters stay those of PyG: `faster` says how to call them.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.index import index2ptr
from torch_geometric.utils import scatter

CHUNK = 2048  # edges, whose messages of 64 numbers fit into the cache of a core


class SortedEdges(NamedTuple):
    """The edges of a batch of graphs in the order of one of their ends."""

    ptr: Tensor  # int64 [nodes + 1]; those of node v are the ones from ptr[v] to ptr[v + 1]
    edges: Tensor  # int64 [edges], their numbers in the observation
    here: Tensor  # int64 [edges], the end by which they are sorted
    there: Tensor  # int64 [edges], the other end
    places: Tensor  # int64 [edges], 0, 1, 2, ...

    def neighbor_sum(self, values: Tensor) -> Tensor:
        """For each node the sum of the rows of `values` [nodes, dim] at its edges' other ends."""
        return segment_sum(values, self.there, self.ptr)

    def edge_sum(self, values: Tensor) -> Tensor:
        """For each node the sum of its edges' rows; those are in the order of these edges."""
        return segment_sum(values, self.places, self.ptr)

    def chunks(self) -> Iterator["SortedEdges"]:
        """The edges of some nodes, about CHUNK, then those of the next ones. On CUDA all at once:
        to read ptr would be to wait."""
        if len(self.edges) <= CHUNK or self.ptr.device.type != "cpu":
            yield self
            return
        ptr = self.ptr.numpy()
        first_nodes = np.searchsorted(ptr, range(0, len(self.edges), CHUNK))
        nodes = np.unique([0, *first_nodes, len(ptr) - 1])
        for first, stop in zip(nodes, nodes[1:]):
            own_ptr = self.ptr[first : stop + 1] - self.ptr[first]
            rows = slice(ptr[first], ptr[stop])
            places = self.places[: ptr[stop] - ptr[first]]
            yield SortedEdges(own_ptr, self.edges[rows], self.here[rows], self.there[rows], places)


class Edges:
    """A batch's edge_index [2, edges], sorted when it is first asked for."""

    def __init__(self, edge_index: Tensor, num_nodes: int):
        self.source, self.target = edge_index
        self.num_nodes = num_nodes

    @cached_property
    def places(self) -> Tensor:
        return torch.arange(len(self.source), device=self.source.device)

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
        return SortedEdges(ptr, edges, here, there.index_select(0, edges), self.places)


def segment_sum(values: Tensor, rows: Tensor, ptr: Tensor) -> Tensor:
    """Sums of values[rows[ptr[b]:ptr[b + 1]]], [B, dim], which are read and added in one kernel."""
    return nn.functional.embedding_bag(rows, values, ptr, mode="sum", include_last_offset=True)


class NeighborSum(torch.autograd.Function):
    """The sum of x[source] over the incoming edges of each node, [nodes, dim]."""

    @staticmethod
    def forward(ctx, x: Tensor, edges: Edges) -> Tensor:
        ctx.edges = edges
        return edges.incoming.neighbor_sum(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return ctx.edges.outgoing.neighbor_sum(grad), None


class MessageSum(torch.autograd.Function):
    """The sum of relu(x[source] + linear(edge_attr)) over the incoming edges of each node, [nodes,
    dim], from x [nodes, dim] and edge_attr [edges, any]."""

    @staticmethod
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


class GINWithEdges(nn.Module):
    """PyG's GINConv (Xu et al. 2019, arXiv:1810.00826), where each node also gets a linear layer of
    the sum of its incoming edges' features."""

    def __init__(self, net: nn.Module, dim: int, edge_dim: int, aggr: str):
        super().__init__()
        self.nn = net
        self.lin = nn.Linear(edge_dim, dim)
        self.aggr = aggr

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        neighbors = scatter(x.index_select(0, source), target, 0, len(x), self.aggr)
        return self.nn(self.own(x, target, edge_attr) + neighbors)

    def own(self, x: Tensor, target: Tensor, edge_attr: Tensor) -> Tensor:
        """All but the sum of the neighbors."""
        sums = edge_attr.new_zeros(len(x), edge_attr.shape[1])
        return x + self.lin(sums.index_add(0, target, edge_attr))


def is_usual(conv: nn.Module) -> bool:
    """Whether a GINConv or GINEConv has the options that make_conv of ppo_graph.py gives it. A user
    may have written another there, with an epsilon for instance: `faster` has no such sum."""
    has_eps = conv.initial_eps != 0 or isinstance(conv.eps, nn.Parameter)
    has_lin = type(conv) is pyg.GINConv or conv.lin is not None
    return has_lin and not has_eps and conv.flow == "source_to_target"


def faster(
    conv: nn.Module, edge_index: Tensor, edge_attr: Tensor, num_nodes: int
) -> Callable[[nn.Module, Tensor], Tensor] | None:
    """A function of (layer, x) that returns what layers like `conv` return for these edges; None if
    there is no faster one. torch.compile merges PyG's operations itself."""
    if torch.compiler.is_compiling() or getattr(conv, "aggr", None) not in ("sum", "add"):
        return None
    if type(conv) in (pyg.GINConv, pyg.GINEConv) and not is_usual(conv):
        return None
    edges = Edges(edge_index, num_nodes)
    if type(conv) is pyg.GINEConv:
        return lambda conv, x: conv.nn(
            x + MessageSum.apply(x, edge_attr, conv.lin.weight, conv.lin.bias, edges)
        )
    if type(conv) is pyg.GINConv:
        return lambda conv, x: conv.nn(x + NeighborSum.apply(x, edges))
    if type(conv) is GINWithEdges:
        return lambda conv, x: conv.nn(
            conv.own(x, edges.target, edge_attr) + NeighborSum.apply(x, edges)
        )
    return None
