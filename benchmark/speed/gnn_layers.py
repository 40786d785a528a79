"""Message passing layers compared on JobShop-v0: what they learn in 120,000 steps, and what a
minibatch costs.

    python benchmark/speed/gnn_layers.py --out benchmark/results/speed/tables.md#gnn_layers

Every run trains ppo_graph.py with the flags of benchmark/job_shop.sh and plays la01-40 greedily;
what it found is kept in benchmark/results/speed/gnn_layers.csv, and what is there is not repeated.
The cost is that of loss and gradient on one minibatch of 512 steps, measured in turns.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from common import report, rollout, tables, turns

from cleanrl_graph import ppo_graph, services

TABLE = tables.RESULTS / "speed" / "gnn_layers.csv"
ENV = dict(
    env_id="cleanrl_graph.envs:JobShop-v0", env_kwargs={"jobs": [3, 10], "machines": [3, 10]}
)
PPO = dict(num_envs=64, num_steps=64, num_minibatches=8, update_epochs=3, learning_rate=1e-3)
PPO |= dict(gamma=1.0, gae_lambda=0.98, total_timesteps=120_000, cuda=False)
JOB_SHOP = ppo_graph.Args(**ENV, **PPO)


@dataclass
class Args:
    layers: tuple[str, ...] = tuple(
        "gine-sum gin-sum gine-mean gatv2-sum transformer-sum sage-mean".split()
    )
    """layer and aggregation"""
    seeds: tuple[int, ...] = (1,)
    """seeds to train; those of other seeds that are in the table are shown too"""
    repeats: int = 15
    """repeats of the time measurement"""
    num_threads: int = 1
    """threads of torch"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def gaps() -> dict[str, dict[str, float]]:
    """Layer -> seed -> mean gap of the greedy makespans to the best known ones, in percent."""
    found = {}
    for row in tables.read(TABLE):
        value = 100 * (float(row["greedy"]) / float(row["best_known"]) - 1)
        found.setdefault(row["layer"], {}).setdefault(row["seed"], []).append(value)
    mean = lambda seeds: {seed: float(np.mean(values)) for seed, values in seeds.items()}
    return {layer: mean(seeds) for layer, seeds in found.items()}


def train(layer: str, args: ppo_graph.Args) -> None:
    """Adds a run to the table."""
    with tempfile.TemporaryDirectory() as folder:
        services.run(ppo_graph, replace(args, run_dir=folder), eval_suite="la", eval_samples=0)
        played = tables.read(next(Path(folder).glob("*/eval.csv")))
    own = {"layer": layer, "seed": str(args.seed)}
    names = ("instance", "greedy", "best_known")
    rows = [own | {name: row[name] for name in names} for row in played]
    tables.write(TABLE, tables.text_of(tables.read(TABLE) + rows))


def minibatch_ms(layers: list[ppo_graph.Args], repeats: int) -> np.ndarray:
    """Median milliseconds of loss and gradient on the same 512 steps [len(layers)]."""
    first, *others = layers
    agents, memory, _ = rollout(ppo_graph, first, 512 // first.num_envs, others)
    ((_, (obs, actions)),) = memory.minibatches(np.random.default_rng(1), 1)

    def loss_and_gradient(agent: ppo_graph.Agent) -> None:
        agent.zero_grad()
        _, log_prob, entropy, value = agent(obs, actions)
        (value.square().mean() - log_prob.mean() - entropy.mean()).backward()

    return np.median(turns([partial(loss_and_gradient, agent) for agent in agents], repeats), 0)


def main(args: Args) -> None:
    torch.set_num_threads(args.num_threads)
    names = [name.split("-") for name in args.layers]
    configs = [replace(JOB_SHOP, gnn=layer, gnn_aggr=aggr) for layer, aggr in names]
    for name, config in zip(args.layers, configs):
        for seed in args.seeds:
            if str(seed) not in gaps().get(name, {}):
                train(name, replace(config, seed=seed))
    lines = [
        "| layer | gap on la01-40, one number per seed, % | minibatch of 512, ms |",
        "| --- | --- | --- |",
    ]
    for name, ms in zip(args.layers, minibatch_ms(configs, args.repeats)):
        of_seeds = [f"{gap:.1f}" for _, gap in sorted(gaps()[name].items())]
        lines.append(f"| {name} | {', '.join(of_seeds)} | {ms:.1f} |")
    lines += [
        "",
        "GINE is the default: it ends within one point of the best, costs less than the attention "
        "layers, and, unlike SAGE, it sees the edge features.",
    ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
