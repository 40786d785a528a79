"""The recurrent cells of ppo_lstm_sparse.py: minGRU against LSTM and GRU.

    python benchmark/speed/cells.py --out benchmark/results/speed/tables.md#cells

Cell: forward and backward over 128 steps of each environment, inputs of width 64, as `run_cell` has
them. In the first rows the environments' sequences are as long as the rollout, in the others
episodes end after 20 steps on average, with a long tail. Milliseconds are the CPU's, of one thread:
others that share the core matter less. Trainings: whole processes with default
flags, in turns A B C A B C ...; all figures are medians.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from common import ROOT, in_turns, long_tailed, report, table_of, turns

from cleanrl_graph import ppo_lstm_sparse as script

T = 128  # steps
DIM = 64  # width of the inputs
CELLS = {"mingru": script.MinGRU, "lstm": script.LSTM, "gru": torch.nn.GRU}
TASKS = {
    "CartPole without velocities": "--env-id envs:StatelessCartPole-v1",
    "GraphExplore, a state per node": "--env-id envs:GraphExplore-v0",
}


@dataclass
class Args:
    repeats: int = 31
    """measurements of each cell"""
    sizes: tuple[str, ...] = ("128x16", "256x16", "128x64")
    """width of the state x environments"""
    total_timesteps: int = 32_768
    """environment steps of each training"""
    rounds: int = 3
    """trainings of each cell and task; 0 for none"""
    seed: int = 1
    """seed of the cells' inputs"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def lengths_of(num_envs: int, ends: bool, rng: np.random.Generator) -> np.ndarray:
    """Those of the sequences of some environments."""
    if not ends:
        return np.full(num_envs, T)
    starts = long_tailed(num_envs, T, rng)
    return np.diff(np.append(np.flatnonzero(starts), num_envs * T))


def forward_and_backward(cell: torch.nn.Module, lengths: np.ndarray, H: int) -> Callable:
    x = torch.randn(lengths.sum(), DIM, requires_grad=True)  # as it comes from layers that learn
    state = torch.randn(2 if isinstance(cell, script.LSTM) else 1, len(lengths), H)
    events, begin = np.arange(len(x)), np.arange(len(lengths))

    def call() -> None:
        x.grad = None
        h, _ = script.run_cell(cell, x, state, events, lengths, begin)
        h.square().mean().backward()

    return call


def cell_table(args: Args) -> list[str]:
    """Markdown of forward and backward."""
    lines = [
        "| sequences | width | environments | minGRU, ms | LSTM, ms | GRU, ms | LSTM / minGRU "
        "| GRU / minGRU |",
        "| --- " * 8 + "|",
    ]
    for ends in (False, True):
        for size in args.sizes:
            H, num_envs = map(int, size.split("x"))
            lengths = lengths_of(num_envs, ends, np.random.default_rng(args.seed))
            cells = [kind(DIM, H) for kind in CELLS.values()]
            calls = [forward_and_backward(cell, lengths, H) for cell in cells]
            ms = turns(calls, args.repeats, clock=time.process_time, warm_up=0)
            mingru, lstm, gru = np.median(ms, 0)
            lstm_ratio, gru_ratio = np.median(ms[:, 1:] / ms[:, :1], 0)
            kind = "episodes" if ends else "whole rollouts"
            lines.append(
                f"| {kind} | {H} | {num_envs} | {mingru:.1f} | {lstm:.1f} | {gru:.1f} "
                f"| {lstm_ratio:.2f} | {gru_ratio:.2f} |"
            )
    return lines


def main(args: Args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    lines = [f"# Cells: forward and backward of {T} steps, {args.repeats} measurements", ""]
    lines += cell_table(args)
    path = str(ROOT / "cleanrl_graph" / "ppo_lstm_sparse.py")
    for task, flags in TASKS.items() if args.rounds else ():
        flags += f" --total-timesteps {args.total_timesteps} --eval-episodes 0 --no-cuda"
        systems = {
            f"--cell {cell}": [sys.executable, path, *flags.split(), "--cell", cell]
            for cell in CELLS
        }
        runs = in_turns(systems, args.rounds, 1)
        lines += ["", f"## {task}, whole trainings", "", *table_of(runs, "--cell mingru")]
        lines += ["", f"Medians of {args.rounds} rounds, one thread; `{flags}`."]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
