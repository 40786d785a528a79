"""Message passing of services/layers.py against PyG's own layers, which a script alone uses: loss
and gradient of a minibatch, and time and memory of one large graph.

    python benchmark/speed/message_passing.py \
        --out benchmark/results/speed/tables.md#message_passing
    python benchmark/speed/message_passing.py --repeats 2 --size 50              # does it run?

Both have the same weights and observations and take turns A B A B ..., with one thread of torch;
figures are medians. The large graph has ten edges a node; each way is measured in a process of its
own, and its memory is what the peak adds.
"""

import multiprocessing
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from common import report, rollout, turns
from gymnasium import spaces

from cleanrl_graph import ppo_graph
from cleanrl_graph.services.process import accelerate

CASES = {  # steps of a minibatch, flags
    "JobShop-v0": (1024, {"env_kwargs": {"jobs": [3, 10], "machines": [3, 10]}}),
    "PoissonGraph-v0": (2048, {"gnn_layers": 2}),
}


@dataclass
class Args:
    repeats: int = 15
    """measurements of each"""
    size: int = 1000
    """thousands of edges of the large graph"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def minibatch(name: str, gnn: str, repeats: int) -> list[object]:
    """The row of a table."""
    steps, flags = CASES[name]
    args = ppo_graph.Args(env_id=f"cleanrl_graph.envs:{name}", gnn=gnn, num_envs=64, **flags)
    torch.manual_seed(1)
    (ours,), memory, _ = rollout(ppo_graph, args, steps // args.num_envs)
    envs = ppo_graph.Envs([partial(ppo_graph.make_env, args, 0)])
    pyg = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    pyg.load_state_dict(ours.state_dict())
    ((_, (obs, actions)),) = memory.minibatches(np.random.default_rng(1), 1)
    losses = []

    def loss_and_gradient(agent: ppo_graph.Agent) -> None:
        agent.zero_grad()
        _, log_prob, entropy, value = agent(obs, actions)
        loss = log_prob.mean() + 0.01 * entropy.mean() + value.square().mean()
        loss.backward()
        losses.append(loss.item())

    ms = turns([partial(loss_and_gradient, agent) for agent in (pyg, ours)], repeats)
    ratios = np.sort(ms[:, 0] / ms[:, 1])
    spread = f"**{np.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    sizes = [f"{len(obs[f'graph.{part}'].values):,}" for part in ("nodes", "edge_links")]
    medians = [f"{value:.1f}" for value in np.median(ms, 0)]
    return [name, gnn, steps, *sizes, *medians, spread, f"{abs(losses[0] - losses[1]):.1e}"]


def large_graph(size: int, fast: bool) -> tuple[float, float]:
    """MB beyond those of the process before, and seconds, of an encoder's forward and backward."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    num_nodes, num_edges = 100 * size, 1000 * size
    space = spaces.Graph(spaces.Box(-1, 1, (8,)), spaces.Box(-1, 1, (4,)))
    leaves = ppo_graph.leaves_of(space)
    values = {
        "nodes": rng.normal(size=(num_nodes, 8)).astype(np.float32),
        "edge_links": rng.integers(num_nodes, size=(num_edges, 2)).astype(np.int32),
        "edges": rng.normal(size=(num_edges, 4)).astype(np.float32),
    }
    arrays = [values[leaf.path.split(".")[-1]] for leaf in leaves]
    counts = {leaf.group: np.array([len(array)]) for leaf, array in zip(leaves, arrays)}
    encoder = ppo_graph.Encoder(leaves, ppo_graph.Args())
    if fast:
        accelerate(encoder)
    storage = ppo_graph.Storage(leaves, torch.device("cpu"))
    obs = storage.append(ppo_graph.Flat(arrays, counts | {ppo_graph.STEP: np.ones(1, np.int64)}))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = megabytes("VmRSS")
    start = time.perf_counter()
    encoder(obs)[0].sum().backward()
    return megabytes("VmHWM") - before, time.perf_counter() - start


def megabytes(name: str) -> float:
    """MB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if name in line).split()[1]) / 1000


def main(args: Args) -> None:
    torch.set_num_threads(1)
    lines = [
        "| minibatch | layer | steps | nodes | edges | PyG, ms | services, ms "
        "| PyG / services, all turns | difference of losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in CASES:
        for gnn in ("gine", "gin"):
            row = minibatch(name, gnn, args.repeats)
            lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += [
        "",
        f"One graph of {100 * args.size:,} nodes and {1000 * args.size:,} edges with 4 features, "
        "three layers of width 64, forward and backward:",
        "",
        "| | memory, MB | seconds |",
        "| --- | --- | --- |",
    ]
    for name, fast in (("PyG", False), ("services", True)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            added, seconds = pool.apply(large_graph, (args.size, fast))
        lines.append(f"| {name} | {added:,.0f} | {seconds:.1f} |")
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
