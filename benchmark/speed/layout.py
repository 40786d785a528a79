"""Bytes and time of graph observations: stored flat (this repository), as a list of PyG Data, and
zero-padded.

    python benchmark/speed/layout.py --out benchmark/results/speed/tables.md#layout
    python benchmark/speed/layout.py --tenfold  # with a ten times larger declared maximum

Prints a markdown table. Graphs come from PoissonGraph-v0 (about 10 nodes on average, at most 200; 8
features; 4 edges per node). "collate B" makes one batch of B observations, as at a step of B
environments; "gather" makes a random quarter of 8,192 stored observations one batch, as for a
minibatch. The flat way is that of ppo_graph.py with services, which check what it reads; the others
check nothing. Figures are medians over repeats in which the layouts take turns. Flat and Data
batches are ready for a graph network; a padded batch must lose its padding first (last row).
"""

from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import report, turns
from torch_geometric.data import Batch, Data

from cleanrl_graph import ppo_graph
from cleanrl_graph.ppo_graph import Storage
from cleanrl_graph.services import check

EDGES_PER_NODE = 4


@dataclass
class Args:
    tenfold: bool = False
    """measure again with a declared maximum of 2,000 nodes instead of 200; the graphs stay the
    same"""
    num_stored: int = 8192
    """stored observations; a gather takes a quarter of them"""
    repeats: int = 21
    """repeats of each measurement"""
    seed: int = 1
    """seed of the graphs and of the gathered indices"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def to_data(observation):
    """A PyG Data of the observation's arrays, which it shares."""
    graph = observation["graph"]
    links = torch.from_numpy(graph.edge_links)
    return Data(
        torch.from_numpy(graph.nodes), links.T, mask=torch.from_numpy(observation["action_mask"])
    )


def pyg_from_numpy(observations):
    """Batch of observations, each made a Data first."""
    return Batch.from_data_list([to_data(observation) for observation in observations])


def pad(observations, max_nodes):
    """Zero-padded nodes [B, max, 8], edges [B, 4 max, 2], mask [B, max] and sizes (nodes, edges)
    [B, 2]."""
    num = len(observations)
    nodes = np.zeros((num, max_nodes, observations[0]["graph"].nodes.shape[1]), np.float32)
    edges = np.zeros((num, EDGES_PER_NODE * max_nodes, 2), np.int64)
    mask = np.zeros((num, max_nodes), np.int8)
    sizes = np.zeros((num, 2), np.int64)
    for i, observation in enumerate(observations):
        graph = observation["graph"]
        sizes[i] = num_nodes, num_edges = len(graph.nodes), len(graph.edge_links)
        nodes[i, :num_nodes] = graph.nodes
        edges[i, :num_edges] = graph.edge_links
        mask[i, :num_nodes] = observation["action_mask"]
    return [torch.from_numpy(array) for array in (nodes, edges, mask, sizes)]


def unpad(nodes, edges, mask, sizes):
    """What a graph network needs of a padded batch: nodes, edge_index, mask and batch without
    padding."""
    num_nodes, num_edges = sizes.unbind(1)
    is_node = torch.arange(nodes.shape[1]) < num_nodes[:, None]
    is_edge = torch.arange(edges.shape[1]) < num_edges[:, None]
    offset = torch.repeat_interleave(num_nodes.cumsum(0) - num_nodes, num_edges)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), num_nodes)
    return nodes[is_node], (edges[is_edge] + offset[:, None]).T, mask[is_node], batch


def ours_collate(storage, envs, arrays):
    """One flat batch of observations given by their leaf arrays, whose values are checked."""
    storage.blocks.clear()
    return storage.append(envs.collate(arrays))


def check_equal(ours, pyg):
    """AssertionError unless the flat batch and PyG's hold the same numbers."""
    assert torch.equal(ours["graph.nodes"].values, pyg.x)
    assert torch.equal(ours["graph.edge_links"].values.T, pyg.edge_index)
    assert torch.equal(ours["graph.nodes"].batch, pyg.batch)
    assert torch.equal(ours["action_mask"].values, pyg.mask)


def median_us(functions, repeats, calls=20):
    """Median microseconds of a call of each function, see `turns`."""
    return 1e3 * np.median(turns(functions, repeats, calls), 0)


def measure(declared_max, args):
    """Rows (layout, bytes per observation, us of collate 64, of collate 512, of gather or None),
    and a note."""
    kwargs = dict(disable_env_checker=True, declared_max=declared_max)
    make = partial(gym.make, "cleanrl_graph.envs:PoissonGraph-v0", **kwargs)
    envs = check.checked(ppo_graph)([make], ppo_graph.Args())
    (env,) = envs.envs
    observations = [env.reset(seed=args.seed)[0]]
    while len(observations) < args.num_stored:
        observation, _, terminated, _, _ = env.step(0)
        observations.append(env.reset()[0] if terminated else observation)
    sizes = [len(observation["action_mask"]) for observation in observations]

    scratch, stored = (Storage(envs.leaves, torch.device("cpu")) for _ in range(2))
    arrays = [envs.read(observation) for observation in observations]
    for start in range(0, args.num_stored, 64):
        stored.append(envs.collate(arrays[start : start + 64]))
    data = [to_data(observation) for observation in observations]
    padded = pad(observations, declared_max)
    batch = Batch.from_data_list(data[:64])
    check_equal(ours_collate(scratch, envs, arrays[:64]), batch)
    unpadded = unpad(*(array[:64] for array in padded))
    assert all(map(torch.equal, unpadded, (batch.x, batch.edge_index, batch.mask, batch.batch)))

    read = lambda num: [envs.read(obs) for obs in observations[:num]]
    ways = [
        lambda num: ours_collate(scratch, envs, arrays[:num]),
        lambda num: ours_collate(scratch, envs, read(num)),
        lambda num: Batch.from_data_list(data[:num]),
        lambda num: pyg_from_numpy(observations[:num]),
        lambda num: pad(observations[:num], declared_max),
        lambda num: unpad(*pad(observations[:num], declared_max)),
    ]
    collate_us = [median_us([partial(way, num) for way in ways], args.repeats) for num in (64, 512)]

    idx = np.random.default_rng(args.seed).permutation(args.num_stored)[: args.num_stored // 4]
    idx_tensor = torch.from_numpy(idx)
    check_equal(stored.gather(idx)[0], Batch.from_data_list([data[i] for i in idx]))
    of_padded = lambda: [array.index_select(0, idx_tensor) for array in padded]
    of_data = lambda: Batch.from_data_list([data[i] for i in idx])
    ways = [lambda: stored.gather(idx)[0], of_data, of_padded, lambda: unpad(*of_padded())]
    gather = median_us(ways, args.repeats)

    values, counts = stored.whole()
    flat_bytes, count_bytes = (
        sum(array.nbytes for array in arrays) for arrays in (values, counts.values())
    )
    data_bytes = sum(tensor.nbytes for graph in data for _, tensor in graph)
    padded_bytes = sum(array.nbytes for array in padded)
    names = ["flat, from leaf arrays", "flat, from observations"]
    names += ["list of Data, prebuilt", "list of Data, from observations"]
    names += ["zero-padded, edges 4 x nodes", "zero-padded, then unpadded"]
    num_bytes = np.repeat([flat_bytes, data_bytes, padded_bytes], 2) / args.num_stored
    gather = [gather[0], None, gather[1], None, *gather[2:]]
    ratios = [micro[2:4] / micro[:2] for micro in collate_us] + [gather[2] / gather[0]]
    sizes_note = f"Graphs of {np.mean(sizes):.1f} nodes on average, the largest of {max(sizes)}."
    note = (
        f"List of Data / flat: collate 64 {ratios[0][0]:.1f} (prebuilt), {ratios[0][1]:.1f} (from "
        f"observations); collate 512 {ratios[1][0]:.1f}, {ratios[1][1]:.1f}; gather "
        f"{ratios[2]:.1f}. {sizes_note} Bytes are those of the tensors; flat storage adds "
        f"{count_bytes / args.num_stored:.0f} bytes of row counts each."
    )
    return list(zip(names, num_bytes, *collate_us, gather)), note


def main(args):
    torch.set_num_threads(1)
    header = (
        "| layout | declared maximum | bytes per observation | collate 64, us | collate 512, us | "
        f"gather {args.num_stored // 4:,} of {args.num_stored:,}, us |"
    )
    lines = [header, "| --- | --- | --- | --- | --- | --- |"]
    notes = []
    for declared_max in (200, 2000) if args.tenfold else (200,):
        rows, note = measure(declared_max, args)
        for name, num_bytes, *times in rows:
            cells = [f"{num_bytes:,.0f}"] + ["" if t is None else f"{t:,.0f}" for t in times]
            lines.append(f"| {name} | {declared_max:,} | " + " | ".join(cells) + " |")
        notes += ["", f"Declared maximum {declared_max:,}: {note}"]
    lines += [
        *notes,
        "",
        f"Medians of {args.repeats} turns of 20 calls in a row, one thread.",
    ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
