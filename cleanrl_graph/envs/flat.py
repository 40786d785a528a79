"""Observations of N environments that step together, without a Python object for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces


@dataclass(frozen=True)
class FlatBatch(Sequence):
    """N graphs, or N sets, whose rows stand one after the other.

    It takes the place of the tuple of N observations into which gymnasium batches the spaces Graph
    and Sequence(stack=True), and is a sequence of these, but none is made unless it is asked for.

    rows: what an observation is, with the rows of all N: a GraphInstance, or the stacked arrays of
        a set. edge_links count the nodes of their own graph, from 0.
    num_rows: nodes of each graph, or elements of each set, int64 [N].
    num_edges: edges of each graph, int64 [N]; None for sets.
    """

    rows: Any
    num_rows: np.ndarray
    num_edges: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.num_rows)

    def __getitem__(self, i: int) -> Any:
        """Observation i, whose arrays are views."""
        i = range(len(self))[i]
        own = span(self.num_rows, i)
        if self.num_edges is None:
            return cut(self.rows, own)
        nodes, edges, links = self.rows
        own_edges = span(self.num_edges, i)
        edges = None if edges is None else edges[own_edges]
        return spaces.GraphInstance(cut(nodes, own), edges, links[own_edges])


def span(counts: np.ndarray, i: int) -> slice:
    """Where the rows of observation i stand."""
    first = int(counts[:i].sum())
    return slice(first, first + int(counts[i]))


def cut(arrays: Any, rows: slice) -> Any:
    """These rows of an array, or of all arrays in a dict or tuple."""
    if isinstance(arrays, dict):
        return {name: cut(own, rows) for name, own in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(cut(own, rows) for own in arrays)
    return arrays[rows]


def flat_links(source: np.ndarray, target: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Edges of graphs, `counts` of each, in both directions, int32 [2 * edges, 2]: those of a graph
    are its edges and then the same ones turned round."""
    num = counts.repeat(counts)  # of each edge: those of its graph
    at = np.arange(len(source)) + (counts.cumsum() - counts).repeat(counts)
    links = np.empty((2 * len(source), 2), np.int32)
    links[at, 0] = source
    links[at, 1] = target
    links[at + num, 0] = target
    links[at + num, 1] = source
    return links
