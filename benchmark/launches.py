"""What the scripts would ask of a GPU: waits of the host, copies, launches. It needs no GPU, but
PyTorch's build for the CPU and a C++ compiler.

    python benchmark/launches.py --before ../old --out benchmark/results/launches.md

Counted on the device of tests/virtual_cuda.py, per step of the policy (4 environments at once, with
the storage of their observations) and per minibatch (gather, forward, backward, optimizer). Numbers
are differences between runs of 16 and 24 steps per rollout, and of 2 and 4 minibatches per epoch. A
launch is an operation of PyTorch that computes something on the device, views are none; a library
may launch several kernels for one. With --before every figure comes twice, of another checkout's
scripts and of these.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmark" / "speed"), str(ROOT / "tests")]
import virtual_cuda  # noqa: E402
from common import commit_of, report  # noqa: E402

NETWORK = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=2, num_envs=4)
ROWS = {  # name: (script, flags)
    "graph, CartPole": ("ppo_graph", dict(env_id="CartPole-v1")),
    "graph, JobShop": ("ppo_graph", dict(env_id="envs:JobShop-v0")),
    "framestack, StatelessCartPole": ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1")),
    "lstm, CartPole": ("ppo_lstm_sparse", dict(env_id="CartPole-v1", prev_action=False)),
    "lstm, GraphExplore with edges": (
        "ppo_lstm_sparse",
        dict(env_id="envs:GraphExplore-v0", remember_edges=True, prev_action=False),
    ),
    "gtrxl, CartPole, memory 50": (
        "ppo_gtrxl",
        dict(env_id="CartPole-v1", memory_length=50, num_layers=2, prev_action=False),
    ),
}
COLUMNS = [
    (unit, kind) for unit in ("step", "minibatch") for kind in ("waits", "copies", "launches")
]


@dataclass
class Args:
    before: str | None = None
    """another checkout to compare with"""
    out: str | None = None
    """file for the table"""
    details: str | None = None
    """show what the row that begins so consists of, instead of the table"""
    only: str | None = None
    """count the scripts of this checkout, and print JSON (what this command starts itself)"""


def count(checkout: Path, details: str | None) -> None:
    """Prints, as JSON, the figures of each row for the scripts of a checkout."""
    warnings.filterwarnings("ignore")
    is_package = (checkout / "cleanrl_graph" / "__init__.py").exists()  # older ones are a folder
    sys.path.insert(0, str(checkout if is_package else checkout / "cleanrl_graph"))
    for name in [name for name in sys.modules if name.split(".")[0] == "cleanrl_graph"]:
        del sys.modules[name]  # of this checkout
    virtual_cuda.install()
    found = {}
    for name, (script, flags) in ROWS.items():
        if details and not name.startswith(details):
            continue
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            rates = virtual_cuda.rates(
                importlib.import_module(f"cleanrl_graph.{script}" if is_package else script),
                steps=(16, 24),
                minibatches=(2, 4),
                epochs=2,
                **NETWORK,
                **flags,
            )
        found[name] = [sum(rates[unit][kind].values()) for unit, kind in COLUMNS]
        for unit, kind in COLUMNS if details else ():
            print(f"{name}: {kind} per {unit}")
            for what, num in rates[unit][kind].most_common():
                print(f"{num:9.2f} {what}")
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # PyTorch's own end asks CUDA


def main(args: Args) -> None:
    if reason := virtual_cuda.reason_not():
        sys.exit(reason)
    if args.only or args.details:
        count(Path(args.only or ROOT).resolve(), args.details)
    checkouts = [*map(Path, filter(None, [args.before])), ROOT]
    tables = []
    for checkout in checkouts:
        command = [sys.executable, __file__, "--only", checkout]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        tables.append(json.loads(done.stdout.splitlines()[-1]))
    figure = lambda value: f"{value:.1f}".removesuffix(".0").replace("-0", "0")
    lines = [
        "| script, environment | "
        + " | ".join(f"{kind} per {unit}" for unit, kind in COLUMNS)
        + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    for name in ROWS:
        columns = zip(*[table[name] for table in tables])
        lines.append(
            f"| {name} | "
            + " | ".join(" → ".join(map(figure, values)) for values in columns)
            + " |"
        )
    commits = f"Commits {' → '.join(map(commit_of, checkouts))}.\n\n" if args.before else ""
    report(commits + "\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
