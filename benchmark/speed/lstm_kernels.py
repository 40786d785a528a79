"""The sparse state of ppo_lstm_sparse.py against the usual layouts, forward + backward.

    python benchmark/speed/lstm_kernels.py --out benchmark/results/speed/tables.md#lstm_kernels

16 envs x 128 steps on 200 possible nodes per env. An env's share of nodes, the density, is
remembered; all of them are seen again at every step (the worst case for the sparse state), episodes
end with probability 1/64 per step. Layouts take turns (A B C A B C ...), figures are medians;
outputs and gradients of the layouts are compared before they are timed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Callable

import numpy as np
import torch
import torch.nn as nn
import tyro
from common import report, turns
from torch import Tensor

from cleanrl_graph import ppo_lstm_sparse as script

N, T, NODES, D = 16, 128, 200, 32  # envs, steps, possible nodes, inputs


@dataclass
class Args:
    lstm_dim: int = 64
    """width of the state on 200 nodes"""
    densities: tuple[float, ...] = (0.01, 0.1, 0.5, 1.0)
    """shares of the possible nodes that are remembered"""
    repeats: int = 7
    """turns of each measurement"""
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


def state_table(args: Args, rng: np.random.Generator) -> list[str]:
    """The markdown."""
    lines = [
        f"State on {NODES} possible nodes, H = {args.lstm_dim}, {N} envs x {T} steps:",
        "",
        "| remembered | seen per step | layout | ms | x ours | state, bytes | x ours | saved for "
        "backward, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for density, seen in [(density, 1.0) for density in args.densities] + [(0.1, 0.25)]:
        systems, parameters, sizes = state_systems(density, seen, args.lstm_dim, rng)
        result = measure(systems, parameters, args.repeats)
        ours = result["sparse (ours)"][0], sizes["sparse (ours)"]
        for name, (ms, saved) in result.items():
            lines.append(
                f"| {density:.0%} | {seen:.0%} of them | {name} | {ms:.1f} | {ms / ours[0]:.1f} | "
                f"{sizes[name]:,} | {sizes[name] / ours[1]:.1f} | {saved:.1f} |"
            )
    return lines


def main(args: Args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    lines = state_table(args, np.random.default_rng(args.seed))
    note = f"Medians of {args.repeats} turns, one thread."
    report("\n".join([*lines, "", note]), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
