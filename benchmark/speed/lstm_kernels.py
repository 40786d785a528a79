"""The sparse recurrent state and the LSTM kernel of ppo_lstm_sparse.py against the usual layouts,
forward + backward.

    python benchmark/speed/lstm_kernels.py --out benchmark/results/speed/tables.md#lstm_kernels

A picture beside --out shows the cost against density. Layouts take turns (A B
C A B C ...), figures are medians; outputs and gradients of the layouts are compared before they are
timed.

State: 16 envs x 128 steps on 200 possible nodes per env. An env's share of nodes, the density, is
remembered; all of them are seen again at every step (the worst case for the sparse state), episodes
end with probability 1/64 per step. DenseGCM: 16 envs x 128 steps, one new node per step with 32
features and edges from 10% of the nodes before it; nodes and adjacency are dense, [128, 32] and
[128, 128] per env, and one graph convolution over all of them runs per step. Kernel: one LSTM per
env over 128 steps with long-tailed episode ends, x of the LSTM's width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Callable, Literal

import numpy as np
import torch
import torch.nn as nn
import tyro
from common import long_tailed, picture, report, turns
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from cleanrl_graph import ppo_lstm_sparse as script

N, T, NODES, D = 16, 128, 200, 32  # envs, steps, possible nodes, inputs


@dataclass
class Args:
    tables: tuple[Literal["state", "graph", "kernel"], ...] = ("state", "graph", "kernel")
    """what to measure"""
    lstm_dim: int = 64
    """width of the state on 200 nodes"""
    densities: tuple[float, ...] = (0.01, 0.1, 0.5, 1.0)
    """shares of the possible nodes that are remembered"""
    repeats: int = 7
    """turns of each measurement"""
    num_threads: int = 1
    """threads of torch"""
    seed: int = 1
    """seed of all data"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def measure(
    systems: dict[str, Callable[[], Tensor]], parameters: list[Tensor], repeats: int
) -> dict[str, tuple[float, float]]:
    """(median ms of forward + backward, MB that the forward pass saves for the backward pass) of
    each system, whose function returns all its outputs [any]. AssertionError if outputs or
    gradients differ."""
    reference, result, storage = None, {}, lambda t: t.untyped_storage()
    for name, system in systems.items():
        saved = {}
        pack = lambda t: saved.update({storage(t).data_ptr(): storage(t).nbytes()}) or t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = system()
        weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
        grads = torch.autograd.grad((output * weight).mean(), parameters)
        reference = reference or [output.detach(), *grads]
        for a, b in zip(reference, [output.detach(), *grads]):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
        held = {storage(p).data_ptr() for p in parameters}
        result[name] = sum(size for ptr, size in saved.items() if ptr not in held) / 1e6
    call = lambda system: torch.autograd.grad(system().mean(), parameters)
    calls = [partial(call, system) for system in systems.values()]
    medians = np.median(turns(calls, repeats, warm_up=0), 0).tolist()
    return dict(zip(systems, zip(medians, result.values())))


def state_systems(density: float, seen: float, H: int, rng: np.random.Generator):
    """(systems, parameters, bytes of the state {system: bytes}) for the state on 200 nodes."""
    num = round(density * NODES)
    # Remembered by each env
    keys = np.stack([np.sort(rng.permutation(NODES)[:num]) for _ in range(N)])
    is_seen, starts = rng.random((N, T, num)) < seen, rng.random((N, T)) < 1 / 64
    starts[:, 0] = False  # an env whose episode begins there remembers nothing
    ids = np.broadcast_to(keys[:, None], is_seen.shape)[is_seen]
    counts, x = is_seen.sum(2).ravel(), torch.randn(len(ids), D)
    sparse = script.SparseLSTM(D, 0, True, script.Args(lstm_dim=H, gnn_dim=D))
    sparse.token = nn.Identity()  # the LSTM sees x
    hidden = {"h": torch.randn(N * num, H).tanh(), "c": torch.randn(N * num, H)}
    values = torch.stack(list(hidden.values()), 1)
    nodes = script.Entries(np.arange(N).repeat(num), keys.ravel(), values)
    none = np.zeros((0, 2), np.int64)
    edges = script.Entries(none[:, 0], none, torch.zeros(0, 0))
    state = script.State(nodes, edges, torch.zeros(N, 0))
    weights = sparse.cell._flat_weights
    env, step, slot = np.nonzero(is_seen)
    rewards = np.zeros(N * T, np.float32)
    seen = script.Seen(starts.ravel(), rewards, np.arange(N * T).repeat(counts), ids, none)

    def ours():
        output, readout, *_ = sparse(x, None, state, seen)
        return torch.cat([output.flatten(), readout[:, :H].flatten()])

    dense_x, mask = torch.zeros(T, N, NODES, D), torch.zeros(T, N, NODES, 1, dtype=torch.bool)
    where = torch.from_numpy(step), torch.from_numpy(env), torch.from_numpy(ids)
    dense_x[where], mask[where] = x, True
    dense = {name: torch.zeros(N, NODES, H) for name in "hc"}
    dense["known"] = torch.zeros(N, NODES, 1, dtype=torch.bool)
    rows = torch.arange(N)[:, None], torch.from_numpy(keys)
    for name in "hc":
        dense[name][rows] = hidden[name].view(N, num, H)
    dense["known"][rows] = True
    keep = torch.from_numpy(~starts).T[:, :, None, None]

    def zero_padded():
        h, c, known = dense["h"], dense["c"], dense["known"]
        outputs, readouts = [], []
        for t in range(T):
            h, c, known = h * keep[t], c * keep[t], known & keep[t]
            before = h.flatten(0, 1), c.flatten(0, 1)
            new = torch.lstm_cell(dense_x[t].flatten(0, 1), before, *weights)
            h, c = (torch.where(mask[t], a.view(N, NODES, H), b) for a, b in zip(new, (h, c)))
            known = known | mask[t]
            outputs.append(h)
            readouts.append((h * known).sum(1) / known.sum(1).clamp(min=1))
        found = torch.stack(outputs)[where], torch.stack(readouts, 1)
        return torch.cat([values.flatten() for values in found])

    by_step = np.lexsort((env, step))  # events in the order (step, env)
    nums = np.bincount(step, minlength=T).tolist()
    xs = x[torch.from_numpy(by_step)].split(nums)
    slots = torch.from_numpy((env * num + slot)[by_step]).split(nums)
    back, owner = torch.from_numpy(np.argsort(by_step)), torch.arange(N).repeat_interleave(num)

    def gather_scatter():
        h, c, known = hidden["h"], hidden["c"], torch.ones(N * num, 1)
        outputs, readouts = [], []
        for t in range(T):
            alive = keep[t, :, 0][owner]
            h, c, known, at = h * alive, c * alive, known * alive, slots[t]
            new = torch.lstm_cell(xs[t], (h[at], c[at]), *weights)
            h, c = h.index_copy(0, at, new[0]), c.index_copy(0, at, new[1])
            known = known.index_fill(0, at, 1.0)
            total = torch.zeros(N, H + 1).index_add(0, owner, torch.cat([h, known], 1) * known)
            outputs.append(new[0])
            readouts.append(total[:, :H] / total[:, H:].clamp(min=1))
        return torch.cat([torch.cat(outputs)[back].flatten(), torch.stack(readouts, 1).flatten()])

    size = lambda values: sum(v.nbytes for v in values.values())
    size_of_ours = sum(part.nbytes for part in nodes)
    systems = {"sparse (ours)": ours, "loop, gather and scatter": gather_scatter}
    systems["zero-padded"] = zero_padded
    sizes = [size_of_ours, size(hidden) + N * num, size(dense)]
    return systems, list(sparse.cell.parameters()), dict(zip(systems, sizes))


def graph_systems(rng: np.random.Generator):
    """(systems, parameters, bytes kept of graphs) for one graph convolution on a graph that grows
    by a node a step."""
    edges = np.triu(rng.random((N, T, T)) < 0.1, 1)  # [env, source, target]
    x = torch.randn(N, T, D)
    own, other = nn.Linear(D, D), nn.Linear(D, D, bias=False)
    # The log: sorted by the step in which it was written
    env, target, source = np.nonzero(edges.transpose(0, 2, 1))
    counts = np.bincount(env * T + target, minlength=N * T)
    source = torch.from_numpy(env * T + source)
    ptr = torch.from_numpy(np.append(0, counts.cumsum()))
    adjacency = torch.from_numpy(edges.transpose(0, 2, 1)).float()

    def log():
        rows = x.flatten(0, 1)
        total = script.segment(rows.index_select(0, source), ptr)
        return (own(rows) + other(total / (ptr.diff()[:, None].clamp(min=1)))).relu()

    kept = {"one pass over the log (ours)": x.nbytes + source.nbytes + ptr.nbytes, "DenseGCM": 0}

    def dense():
        nodes, adj, outputs = torch.zeros(N, T, D), torch.zeros(N, T, T), []
        kept["DenseGCM"] = 0
        for t in range(T):
            nodes, adj = nodes.clone(), adj.clone()  # the state of each step is kept for training
            nodes[:, t], adj[:, t] = x[:, t], adjacency[:, t]
            kept["DenseGCM"] += nodes.nbytes + adj.nbytes
            mean = adj @ nodes / adj.sum(2, keepdim=True).clamp(min=1)
            outputs.append((own(nodes) + other(mean)).relu()[:, t])
        return torch.stack(outputs, 1).flatten(0, 1)

    systems = {"one pass over the log (ours)": log, "DenseGCM": dense}
    return systems, [*own.parameters(), *other.parameters()], kept


def kernel_systems(H: int, num_envs: int, rng: np.random.Generator):
    """(systems, parameters, lengths of the fragments) for one LSTM per env with resets."""
    starts = long_tailed(num_envs, T, rng)
    lengths = np.diff(np.append(np.flatnonzero(starts), num_envs * T))
    lstm, x = script.LSTM(H, H), torch.randn(num_envs * T, H)
    state = torch.zeros(2, len(lengths), H)
    keep = torch.from_numpy(~starts).T[..., None]
    by_time = x.view(num_envs, T, H).transpose(0, 1).contiguous()

    def loop():
        h = c = torch.zeros(num_envs, H)
        outputs = []
        for t in range(T):
            h, c = torch.lstm_cell(by_time[t], (h * keep[t], c * keep[t]), *lstm._flat_weights)
            outputs.append(h)
        return torch.stack(outputs, 1).flatten(0, 1)

    def packed():
        output = lstm(pack_sequence(x.split(lengths.tolist()), enforce_sorted=False), state)[0]
        return torch.cat(nn.utils.rnn.unpack_sequence(output))

    valid = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    numbers = np.arange(len(x)), lengths, np.arange(len(lengths))
    padded = lambda: lstm(pad_sequence(x.split(lengths.tolist())), state)[0].transpose(0, 1)[valid]
    staircase = lambda: script.run_cell(lstm, x, state, *numbers)[0]
    systems = {"loop over steps": loop, "PackedSequence": packed}
    systems |= {"zero-padded": padded, "staircase (ours)": staircase}
    return systems, list(lstm.parameters()), lengths


def state_tables(args: Args, rng: np.random.Generator) -> tuple[list[str], list[dict]]:
    """(markdown, points of the picture) of the state on many nodes."""
    lines = [
        f"State on {NODES} possible nodes, H = {args.lstm_dim}, {N} envs x {T} steps:",
        "",
        "| remembered | seen per step | layout | ms | x ours | state, bytes | x ours | saved for "
        "backward, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = []
    for density, seen in [(density, 1.0) for density in args.densities] + [(0.1, 0.25)]:
        systems, parameters, sizes = state_systems(density, seen, args.lstm_dim, rng)
        result = measure(systems, parameters, args.repeats)
        ours = result["sparse (ours)"][0], sizes["sparse (ours)"]
        for name, (ms, saved) in result.items():
            lines.append(
                f"| {density:.0%} | {seen:.0%} of them | {name} | {ms:.1f} | {ms / ours[0]:.1f} | "
                f"{sizes[name]:,} | {sizes[name] / ours[1]:.1f} | {saved:.1f} |"
            )
            if seen == 1:
                row = {"density": density, "layout": name, "ms": ms, "state_bytes": sizes[name]}
                rows.append(row)
    return lines, rows


def graph_table(args: Args, rng: np.random.Generator) -> list[str]:
    systems, parameters, kept = graph_systems(rng)
    result = measure(systems, parameters, args.repeats)
    ours = [values["one pass over the log (ours)"] for values in (result, kept)]
    return [
        f"Graph that grows by one node a step, {N} envs x {T} steps:",
        "",
        "| layout | ms | x ours | graphs kept for training, bytes | x ours |",
        "| --- | --- | --- | --- | --- |",
        *[
            f"| {name} | {ms:.2f} | {ms / ours[0][0]:.0f} | {kept[name]:,} | "
            f"{kept[name] / ours[1]:.0f} |"
            for name, (ms, _) in result.items()
        ],
    ]


def kernel_table(args: Args, rng: np.random.Generator) -> list[str]:
    columns = {}
    for H in (128, 256):
        for num_envs in (16, 64):
            systems, parameters, lengths = kernel_systems(H, num_envs, rng)
            columns[f"H {H}, {num_envs} envs"] = measure(systems, parameters, args.repeats)
    return [
        f"One LSTM per env over {T} steps with long-tailed episode ends, ms / MB saved for "
        "backward:",
        "",
        "| kernel | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
        *[
            f"| {name} | "
            + " | ".join(f"{c[name][0]:.1f} / {c[name][1]:.0f}" for c in columns.values())
            + " |"
            for name in systems
        ],
        "",
        f"Fragments of the last column: {lengths.mean():.1f} steps on average, the longest "
        f"{lengths.max()}.",
    ]


def main(args: Args) -> None:
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    lines = []
    if "state" in args.tables:
        table, rows = state_tables(args, rng)
        lines += [*table, ""]
    if "graph" in args.tables:
        lines += [*graph_table(args, rng), ""]
    if "kernel" in args.tables:
        lines += [*kernel_table(args, rng), ""]
    report(
        "\n".join([*lines, f"Medians of {args.repeats} turns, {args.num_threads} thread(s)."]),
        args.out,
    )
    if args.out and "state" in args.tables:
        panels = {"forward + backward, ms": "ms", "state, bytes": "state_bytes"}
        for label, column in panels.items():
            panels[label] = {}
            for row in rows:
                point = 100 * row["density"], row[column]
                panels[label].setdefault(row["layout"], []).append(point)
        note = f"{NODES} possible nodes, H = {args.lstm_dim}, {N} environments x {T} steps"
        note += f"; medians of {args.repeats} turns"
        picture(args.out, note, "remembered nodes, % of the possible ones", panels)


if __name__ == "__main__":
    main(tyro.cli(Args))
