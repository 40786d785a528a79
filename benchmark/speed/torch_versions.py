"""What PyG's reductions over edges cost on the CPU with several versions of torch, in turns.

    python -m venv .venv-212 && .venv-212/bin/pip install -q torch==2.12.1 torch-geometric numpy
    python benchmark/speed/torch_versions.py --pythons .venv/bin/python .venv-212/bin/python \
        --out benchmark/results/speed/torch_versions.md

pytorch#183812 reports a slower scatter_reduce on the CPU in nightly builds of 2.13. Each call is a
process with one thread; figures are medians over the rounds of medians, forward and backward.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

CODE = """
import json, time, torch
from torch_geometric import nn as pyg
from torch_geometric.utils import scatter, softmax
torch.set_num_threads(1)
torch.manual_seed(0)
nodes, edges, dim = 30_000, 88_000, 64
source, target = torch.randint(nodes, (2, edges))
sorted_target = target.sort()[0]
x = torch.randn(nodes, dim, requires_grad=True)
rows = torch.randn(edges, dim, requires_grad=True)
scores = torch.randn(edges, 4, requires_grad=True)
attr = torch.randn(edges, 4)
index = torch.stack([source, target])
gatv2 = pyg.GATv2Conv(dim, 16, heads=4, edge_dim=4)
transformer = pyg.TransformerConv(dim, 16, heads=4, edge_dim=4)
sage = pyg.SAGEConv(dim, dim, aggr="max")
calls = {
    "scatter sum": lambda: scatter(rows, target, 0, nodes, "sum"),
    "scatter max": lambda: scatter(rows, target, 0, nodes, "max"),
    "scatter max, sorted": lambda: scatter(rows, sorted_target, 0, nodes, "max"),
    "softmax over edges": lambda: softmax(scores, target, num_nodes=nodes),
    "GATv2Conv": lambda: gatv2(x, index, attr),
    "TransformerConv": lambda: transformer(x, index, attr),
    "SAGEConv, max": lambda: sage(x, index),
}
found = {"version": torch.__version__}
for name, call in calls.items():
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        call().sum().backward()
        seconds.append(time.perf_counter() - start)
    found[name] = 1000 * sorted(seconds[1:])[2]
print(json.dumps(found))
"""


@dataclass
class Args:
    pythons: tuple[str, ...]
    """interpreters, each with its torch"""
    rounds: int = 5
    """turns of each"""
    core: int = 0
    """CPU core that all run on"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def main(args: Args) -> None:
    import numpy as np
    from common import report

    found = {python: [] for python in args.pythons}
    for _ in range(args.rounds):
        for python in args.pythons:
            command = ["taskset", "-c", str(args.core), python, "-c", CODE]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            found[python].append(json.loads(done.stdout.splitlines()[-1]))
    versions = [rows[0].pop("version") for rows in found.values()]
    lines = [
        f"| 30,000 nodes, 88,000 edges, width 64 | {' | '.join(f'{v}, ms' for v in versions)} |",
        "| --- |" + " --- |" * len(versions),
    ]
    for name in next(iter(found.values()))[0]:
        medians = [np.median([row[name] for row in rows]) for rows in found.values()]
        lines.append(f"| {name} | {' | '.join(f'{ms:.1f}' for ms in medians)} |")
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Args)))
