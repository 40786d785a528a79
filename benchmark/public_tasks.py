"""What needs no learning in the tasks of benchmark/public_tasks.sh: random actions, rules, and the
optimum where it is known.

    python benchmark/public_tasks.py --out benchmark/results/public_tasks/rules.csv

It writes a csv with the columns panel, label, return: a mean over --episodes episodes.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro

GRAPH = {"n_nodes": 10, "n_edges": 15, "n_choices": 5, "parenting": 0}


@dataclass
class Args:
    out: str = ""
    """the csv; empty: printed only"""
    episodes: int = 500
    """episodes of each mean"""


def density(links: set[tuple[int, int]], nodes: tuple[int, ...]) -> float:
    """Edges among the nodes by the number of nodes; `links` are ordered pairs, each edge twice."""
    return sum(pair in links for pair in combinations(nodes, 2)) / len(nodes)


def densest(links: set[tuple[int, int]], num_nodes: int, most: int) -> float:
    """The highest density of at most `most` nodes, of all subsets."""
    subsets = [combinations(range(num_nodes), size) for size in range(1, most + 1)]
    return max(density(links, nodes) for some in subsets for nodes in some)


def degrees(links: set[tuple[int, int]], num_nodes: int) -> np.ndarray:
    """Edges of each node, int64 [num_nodes]."""
    return np.bincount([source for source, _ in links], minlength=num_nodes)


def by_degree(links: set[tuple[int, int]], num_nodes: int, most: int) -> float:
    """The density of the nodes with the most edges."""
    order = np.argsort(-degrees(links, num_nodes), kind="stable")
    return density(links, tuple(sorted(order[:most].tolist())))


def by_new_edges(links: set[tuple[int, int]], num_nodes: int, most: int) -> float:
    """The density of a set to which the node with the most edges into it is added each time; where
    several have as many, the one with the most edges."""
    degree = degrees(links, num_nodes)
    taken = []
    for _ in range(most):
        left = [node for node in range(num_nodes) if node not in taken]
        new = [sum((node, other) in links for other in taken) for node in left]
        taken.append(left[max(range(len(left)), key=lambda k: (new[k], degree[left[k]]))])
    return density(links, tuple(sorted(taken)))


RULES = {"most edges": by_degree, "most new edges": by_new_edges, "optimum": densest}


def random_return(env: gym.Env, rng: np.random.Generator, seed: int) -> float:
    """The return of an episode of random actions, allowed ones where info has a mask."""
    total, done = 0.0, False
    _, info = env.reset(seed=seed)
    while not done:
        mask = info.get("mask", np.ones(env.action_space.n))
        _, reward, terminated, truncated, info = env.step(int(rng.choice(np.flatnonzero(mask))))
        total += float(reward)
        done = terminated or truncated
    return total


def mean_of(play: Callable[[int], float], args: Args) -> float:
    """The mean of `play(seed)` over the episodes."""
    return float(np.mean([play(seed) for seed in range(args.episodes)]))


def main(args: Args) -> None:
    rng = np.random.default_rng(0)
    graphs = gym.make("graph_envs:DensestSubgraph-v0", **GRAPH)
    rooms = gym.make("minigrid:MiniGrid-GoToDoor-5x5-v0")

    def of_rule(rule: Callable, seed: int) -> float:
        graphs.reset(seed=seed)
        links = set(map(tuple, graphs.unwrapped.graph.edge_links.tolist()))
        return rule(links, GRAPH["n_nodes"] - 1, GRAPH["n_choices"])  # the last one is no node

    rows = [("panel", "label", "return")]
    for panel, env in (("DensestSubgraph", graphs), ("GoToDoor-5x5", rooms)):
        mean = mean_of(lambda seed: random_return(env, rng, seed), args)
        rows.append((panel, "random actions", f"{mean:.3f}"))
    for name, rule in RULES.items():
        mean = mean_of(lambda seed: of_rule(rule, seed), args)
        rows.append(("DensestSubgraph", name, f"{mean:.3f}"))
    for row in rows:
        print(*row, sep=", ")
    if args.out:
        with Path(args.out).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
