"""cleanrl_graph, PyTorch Geometric's Data and HeteroData, and networkx' graphs, as observations.

    class Grid(gym.Env):
        def __init__(self):
            self.data = make_data()  # Data(x=..., edge_index=..., edge_attr=...)
            self.observation_space, self.action_space = graph_space(self.data), spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return to_graph_instance(self.data), {}

`x` [nodes, F] or [nodes] becomes `nodes`, `edge_attr` [edges, E] or [edges] becomes `edges` where
there is one, and `edge_index` [2, edges] becomes `edge_links` [edges, 2]; the script's network gets
x, edge_index, edge_attr and batch back in PyG's convention. Numbers of nodes and edges may differ
from step to step. In a Dict the graph stands beside masks and vectors:
`spaces.Dict(graph=graph_space(data), action_mask=...)`.

A HeteroData becomes ONE graph: the nodes of all types one after the other, types sorted by name.
The first columns of a node are its type, one-hot; then each type has columns of its own for its
features, which are zero in nodes of other types. Edges are likewise: one-hot relation, then the
edge_attr of each relation. The network's first layer is then a linear map per type; messages pass
along all relations with the same weights, and gine, gatv2 and transformer see the relation as an
edge feature (sage does not). A mask has a row per node of all types: where only nodes of one type
may be chosen, the others have 0. Each type and relation must be there in every step, with 0 rows if
need be. Types that no edge reaches may as well be a Sequence each, beside the graph: an MLP reads
their rows.

A graph of networkx has the attributes of nodes and of edges as features, side by side, sorted by
name; its nodes are in its own order, and an edge that has no direction goes both ways. All nodes
need the same attributes, and so do all edges: where depots have a supply and customers a demand,
give each both, and a number that tells them apart. The graph that makes the space needs nodes and,
if edges have attributes, an edge.

What is stored: each step with its links (two int32 per edge), also where the graph stays and only
features change. A graph of 100 nodes with 8 features and 400 edges
takes 6,400 bytes per step, of which links are 3,200: 52 MB for a rollout of 64 environments x 128
steps (`charts/obs_bytes_per_step`); one gradient step of the network needs more
(benchmark/results/speed.md). Edge features that never change may stay out of the
observation.
"""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from .toy import LinkGraph


def graph_space(data: Any) -> spaces.Graph:
    """The space of observations like this Data, HeteroData or networkx graph, without bounds."""
    nodes, edges, _ = to_graph_instance(data)
    edge_space = None
    if edges is not None:
        edge_space = spaces.Box(-np.inf, np.inf, edges.shape[1:], np.float32)
    node_space = spaces.Box(-np.inf, np.inf, nodes.shape[1:], np.float32)
    return LinkGraph(node_space, edge_space)


def to_graph_instance(data: Any) -> spaces.GraphInstance:
    """The observation: nodes float32 [N, F], edges float32 [M, E] or None, edge_links int64 [M, 2].
    ValueError for node types without `x`."""
    if hasattr(data, "node_types"):
        return from_hetero_data(data)
    if hasattr(data, "number_of_nodes"):
        return from_networkx(data)
    nodes = rows_of("nodes", data.x)
    edges = None
    if data.edge_index is not None and data.edge_attr is not None:
        edges = rows_of("edges", data.edge_attr)
    return spaces.GraphInstance(nodes, edges, links_of(data.edge_index))


def from_hetero_data(data: Any) -> spaces.GraphInstance:
    """One graph of the nodes of all types and the edges of all relations, both sorted by name."""
    node_parts = []
    first_node = {}  # type: number of its first node
    num_nodes = 0
    for name in sorted(data.node_types):
        nodes = rows_of(name, data[name].get("x"))
        node_parts.append(nodes)
        first_node[name] = num_nodes
        num_nodes += len(nodes)
    edge_parts = []
    links = [np.zeros((0, 2), np.int64)]  # there may be no relation
    for relation in sorted(data.edge_types):
        source, _, target = relation
        local_links = links_of(data[relation].edge_index)
        links.append(local_links + [first_node[source], first_node[target]])
        edges = np.zeros((len(local_links), 0), np.float32)
        attributes = data[relation].get("edge_attr")
        if attributes is not None:
            edges = rows_of(relation, attributes)
        edge_parts.append(edges)
    all_edges = with_kinds(edge_parts) if edge_parts else None
    return spaces.GraphInstance(with_kinds(node_parts), all_edges, np.concatenate(links))


def from_networkx(graph: Any) -> spaces.GraphInstance:
    """Of a graph of networkx. Where there are no nodes, or no edges with attributes, these are
    None. ValueError where nodes, or edges, have unlike attributes."""
    graph = graph.to_directed()
    number = {node: k for k, node in enumerate(graph)}
    links = []
    edge_dicts = []
    for source, target, own in graph.edges(data=True):
        links.append([number[source], number[target]])
        edge_dicts.append((f"edge {source!r} to {target!r}", own))
    nodes = attributes([(f"node {node!r}", own) for node, own in graph.nodes(data=True)])
    edges = attributes(edge_dicts)
    if edges is not None and edges.shape[1] == 0:
        edges = None
    return spaces.GraphInstance(nodes, edges, np.array(links, np.int64).reshape(-1, 2))


def attributes(named: list[tuple[str, dict]]) -> np.ndarray | None:
    """float32 [rows, columns] of dicts with numbers or arrays of them, each with the name of its
    node or edge, None of no dicts. ValueError names what has other attributes than the first
    one: a column would mean several things."""
    if not named:
        return None
    first_name, first = named[0]
    rows = []
    for name, own in named:
        for key in sorted(first.keys() ^ own.keys()):
            has, lacks = (first_name, name) if key in first else (name, first_name)
            raise ValueError(
                f"{lacks} has no attribute '{key}', {has} has: all need the same ones, "
                "0 where an attribute has no meaning, and a number for each kind"
            )
        columns = [np.zeros(0)]
        for key in sorted(own):
            size = np.size(own[key])
            needed = np.size(first[key])
            if size != needed:
                raise ValueError(f"'{key}' of {name}: {size} numbers, of {first_name} {needed}")
            columns.append(np.ravel(own[key]))
        rows.append(np.concatenate(columns))
    return np.array(rows, np.float32)


def rows_of(name: Any, values: Any) -> np.ndarray:
    """float32 [rows, columns]"""
    if values is None:
        raise ValueError(
            f"{name}: features `x` are needed; "
            "where nodes have none, torch.zeros(num_nodes, 0) will do"
        )
    rows = values.detach().cpu().numpy().astype(np.float32)
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def links_of(edge_index: Any) -> np.ndarray:
    """int64 [edges, 2]"""
    if edge_index is None:
        return np.zeros((0, 2), np.int64)
    return edge_index.cpu().numpy().T.astype(np.int64)


def with_kinds(parts: list[np.ndarray]) -> np.ndarray:
    """The rows of all parts one after the other: one-hot part, then the columns of each part, zero
    in others."""
    num_rows = sum(len(part) for part in parts)
    num_columns = len(parts) + sum(part.shape[1] for part in parts)
    rows = np.zeros((num_rows, num_columns), np.float32)
    first_row = 0
    first_column = len(parts)
    for kind, part in enumerate(parts):
        block = rows[first_row : first_row + len(part)]
        block[:, kind] = 1.0
        block[:, first_column : first_column + part.shape[1]] = part
        first_row += len(part)
        first_column += part.shape[1]
    return rows
