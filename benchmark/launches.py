"""What the scripts would ask of a GPU: waits of the host, copies, launches. It needs no GPU, but
PyTorch's build for the CPU and a C++ compiler.

    python benchmark/launches.py --out benchmark/results/speed/tables.md#launches

Counted on the device of tests/virtual_cuda.py, per step of the policy (4 environments at once, with
the storage of their observations) and per minibatch (gather, forward, backward, optimizer). Numbers
are differences between runs of 16 and 24 steps per rollout, and of 2 and 4 minibatches per epoch. A
launch is an operation of PyTorch that computes something on the device, views are none; a library
may launch several kernels for one. Bytes are those that one more epoch copies to the device, for
each observation.
"""

import contextlib
import importlib
import itertools
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark" / "speed"), str(ROOT / "tests")]
import virtual_cuda  # noqa: E402
from common import report  # noqa: E402

NETWORK = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=2, num_envs=4)
CARTPOLE = dict(env_id="CartPole-v1", prev_action=False)
EXPLORE = dict(env_id="envs:GraphExplore-v0", remember_edges=True, prev_action=False)
ROWS = {  # name: (script, flags)
    "graph, CartPole": ("ppo_graph", dict(env_id="CartPole-v1")),
    "graph, JobShop": ("ppo_graph", dict(env_id="envs:JobShop-v0")),
    "framestack, StatelessCartPole": ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1")),
    "lstm, CartPole": ("ppo_lstm_sparse", CARTPOLE),
    "lstm, GraphExplore with edges": ("ppo_lstm_sparse", EXPLORE),
    "gtrxl, CartPole, memory 50": ("ppo_gtrxl", CARTPOLE | dict(memory_length=50, num_layers=2)),
}
COLUMNS = list(itertools.product(("step", "minibatch"), ("waits", "copies", "launches")))


@dataclass
class Args:
    out: str | None = None
    """file for the table"""


def bytes_per_observation(script, **flags) -> float:
    """Copied to the device by one more epoch, in one minibatch of 256 observations."""
    size = dict(num_steps=64, total_timesteps=256, num_minibatches=1)
    totals = []
    for num_epochs in (1, 2):
        _, told = virtual_cuda.train(script, **flags, **size, update_epochs=num_epochs, cuda=True)
        totals.append(sum(told["bytes"].values()))
    return (totals[1] - totals[0]) / 256


def count(name: str) -> list[float]:
    """The figures of a row."""
    script, flags = ROWS[name]
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        module = importlib.import_module(f"cleanrl_graph.{script}")
        sizes = dict(steps=(16, 24), minibatches=(2, 4), epochs=2)
        rates = virtual_cuda.rates(module, **sizes, **NETWORK, **flags)
        num_bytes = bytes_per_observation(module, **NETWORK, **flags)
    return [*(sum(rates[unit][kind].values()) for unit, kind in COLUMNS), num_bytes]


def main(args: Args) -> None:
    if reason := virtual_cuda.reason_not():
        sys.exit(reason)
    warnings.filterwarnings("ignore")
    virtual_cuda.install()
    titles = [f"{kind} per {unit}" for unit, kind in COLUMNS]
    titles.append("bytes per observation and epoch")
    lines = ["| script, environment | " + " | ".join(titles) + " |"]
    lines.append("| --- |" + " --- |" * len(titles))
    for name in ROWS:
        cells = [f"{value:.1f}".removesuffix(".0").replace("-0", "0") for value in count(name)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    report("\n".join(lines), args.out)
    sys.stdout.flush()
    os._exit(0)  # PyTorch's own end asks CUDA


if __name__ == "__main__":
    main(tyro.cli(Args))
