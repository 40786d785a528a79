"""What a minibatch costs in two checkouts of this repository, in turns A B A B: seconds, and memory
for a graph of 100,000 nodes.

    git worktree add ../old f06383d
    python benchmark/speed/message_passing.py --old ../old --new . \
        --out benchmark/results/speed/tables.md#message_passing
    # a try
    python benchmark/speed/message_passing.py --old ../old --new . --turns 3 --size 50

Each side is a process of its own with one thread of torch, which waits while another one has its
turn. All have the same weights and the same observations, and their losses are compared. A turn is
the whole minibatch: observations gathered, loss, gradient and Adam's step; or one step of acting.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

LAYERS = ("gine", "gin")  # to compare in the new checkout
CASES = {  # name: (steps of a minibatch, flags)
    "JobShop-v0": (1024, {"env_kwargs": {"jobs": [3, 10], "machines": [3, 10]}}),
    "PoissonGraph-v0": (2048, {"gnn_layers": 2}),
}


@dataclass
class Args:
    old: Path
    """folder of the first checkout"""
    new: Path = Path(".")
    """folder of the second checkout"""
    turns: int = 15
    """turns of each side"""
    size: int = 1000
    """thousands of edges of the large graph, which has a tenth as many nodes"""
    core: int | None = 0
    """CPU core that all sides run on; none: any"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


class Side:
    """A process that measures one checkout when it is asked to."""

    def __init__(self, checkout: Path, case: dict, core: int | None):
        pin = [] if core is None else ["taskset", "-c", str(core)]
        self.process = subprocess.Popen(
            [*pin, sys.executable, __file__, "side", str(checkout.resolve()), json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.read()

    def read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("a side has ended")

    def turn(self) -> dict:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main(args: Args) -> None:
    from common import commit_of, report

    lines = [
        f"Old is {commit_of(args.old)}, new is {commit_of(args.new)}.",
        "",
        "| minibatch | layer | steps | nodes | edges | old, ms | new, ms | old / new, all turns "
        "| acting, old / new | difference of losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (steps, flags) in CASES.items():
        flags = flags | {"env_id": f"cleanrl_graph.envs:{name}", "num_envs": 64, "steps": steps}
        sides = {"old": Side(args.old, flags, args.core)}
        for layer in LAYERS:
            sides[layer] = Side(args.new, flags | {"gnn": layer}, args.core)
        results = {side: [] for side in sides}
        for turn in range(args.turns + 1):
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                results[side].append(sides[side].turn())
        for side in sides.values():
            side.close()
        first = {side: turns[0] for side, turns in results.items()}
        update, act = {}, {}
        for side, turns in results.items():
            update[side] = 1000 * np.array([turn["update"] for turn in turns[1:]])
            act[side] = 1000 * np.array([turn["act"] for turn in turns[1:]])
        for layer in LAYERS:
            ratios = np.sort(update["old"] / update[layer])
            acting = np.median(act["old"] / act[layer])
            differs = abs(first["old"]["loss"] - first[layer]["loss"])
            cells = [name, layer, steps, *(f"{first[layer][x]:,}" for x in ("nodes", "edges"))]
            cells += [f"{np.median(update[side]):.1f}" for side in ("old", layer)]
            cells.append(f"**{np.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})")
            cells += [f"{acting:.2f}", "another network" if layer == "gin" else f"{differs:.1e}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        f"One graph of {100 * args.size:,} nodes and {1000 * args.size:,} edges with 4 features, "
        "three layers of width 64, loss and gradient:",
        "",
        "| | memory beyond that of the process before, MB | of old | seconds |",
        "| --- | --- | --- | --- |",
    ]
    base = None
    for name, checkout in (("old", args.old), ("new", args.new)):
        side = Side(checkout, {"large": args.size}, args.core)
        result = side.turn()
        side.close()
        base = base or result["megabytes"]
        lines.append(
            f"| {name} | {result['megabytes']:,.0f} | {result['megabytes'] / base:.2f} | "
            f"{result['seconds']:.1f} |"
        )
    report("\n".join(lines), args.out)


def side(checkout: str, case: dict) -> None:
    """Measures whenever a line comes."""
    sys.path[0] = checkout
    import torch

    from cleanrl_graph import ppo_graph

    torch.set_num_threads(1)
    torch.manual_seed(1)
    turn = large_graph(ppo_graph, case["large"]) if "large" in case else minibatch(ppo_graph, case)
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), flush=True)


def layers_of(ppo_graph):
    """A context in which the script makes the layers of a training: the faster ones of the
    services. Older checkouts make them anyway."""
    try:
        from cleanrl_graph.services.process import patched
    except ModuleNotFoundError:
        return contextlib.nullcontext()
    return patched(ppo_graph)


def minibatch(ppo_graph, case: dict):
    import torch

    steps = case.pop("steps")
    args = ppo_graph.Args(**case, num_steps=steps // case["num_envs"])
    makers = [lambda i=i: ppo_graph.make_env(args, i) for i in range(args.num_envs)]
    envs = ppo_graph.Envs(makers)
    with layers_of(ppo_graph):
        agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    storage = ppo_graph.Storage(envs.leaves, torch.device("cpu"))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-6, fused=True)
    step = envs.reset(1)
    actions = []
    rng = np.random.default_rng(1)
    for _ in range(args.num_steps):
        obs = storage.append(step.obs)
        if "action_mask" in obs:
            mask = obs["action_mask"]  # the same actions in all checkouts
            allowed = [np.flatnonzero(own) for own in np.split(mask.values.numpy(), mask.ptr[1:-1])]
            action = torch.tensor([[rng.choice(rows)] for rows in allowed]).float()
        else:
            action = torch.from_numpy(rng.integers(envs.action_space.n, size=(args.num_envs, 1)))
        actions.append(action)
        step = envs.step(action.long().flatten().tolist())
    actions = torch.cat(actions)
    idx = rng.permutation(steps)
    last = step.obs

    def turn() -> dict:
        start = time.perf_counter()
        obs = storage.gather(idx)[0]
        _, log_prob, entropy, value = agent(obs, {"": actions[torch.from_numpy(idx)]})
        loss = (log_prob.mean() + 0.01 * entropy.mean() + value.square().mean()).float()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updated = time.perf_counter()
        with torch.no_grad():
            agent(storage.batch(last_tensors))
        acted = time.perf_counter()
        sizes = {x: len(obs[f"graph.{x}"].values) for x in ("nodes", "edge_links")}
        sizes["edges"] = sizes.pop("edge_links")
        return {"update": updated - start, "act": acted - updated, "loss": loss.item()} | sizes

    last_tensors = ppo_graph.Flat([torch.from_numpy(array) for array in last.values], last.counts)
    return turn


def large_graph(ppo_graph, size: int):
    import torch
    from gymnasium import spaces

    rng = np.random.default_rng(1)
    num_nodes, num_edges = 100 * size, 1000 * size
    space = spaces.Graph(spaces.Box(-1, 1, (8,)), spaces.Box(-1, 1, (4,)))
    values = {
        "nodes": rng.normal(size=(num_nodes, 8)).astype(np.float32),
        "edge_links": rng.integers(num_nodes, size=(num_edges, 2)).astype(np.int32),
        "edges": rng.normal(size=(num_edges, 4)).astype(np.float32),
    }
    leaves = ppo_graph.leaves_of(space)
    with layers_of(ppo_graph):
        encoder = ppo_graph.Encoder(leaves, ppo_graph.Args())
    storage = ppo_graph.Storage(leaves, torch.device("cpu"))
    counts, arrays = {"": np.ones(1, np.int64)}, []
    for leaf in leaves:
        arrays.append(values[leaf.path.split(".")[-1]])
        counts[leaf.group] = np.array([len(arrays[-1])])
    obs = storage.append(ppo_graph.Flat(arrays, counts))

    def turn() -> dict:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        start = time.perf_counter()
        features = encoder(obs)[0]
        features.sum().backward()
        seconds = time.perf_counter() - start
        return {"megabytes": (memory("VmHWM") - before) / 1000, "seconds": seconds}

    return turn


def memory(name: str) -> int:
    """kB of this process."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if name in row)
    return int(line.split()[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(tyro.cli(Args))
