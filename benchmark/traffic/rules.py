"""The rules of TrafficLights-v0 on its suites: delays, and what an hour of traffic costs.

    pip install -r benchmark/traffic/requirements.txt
    python benchmark/traffic/rules.py

It writes benchmark/results/traffic/rules.csv, a row for each hour of traffic: map, rule, demand,
shift (s), seed, delay (mean of all trips, s), arrived and unfinished (trips), cpu_seconds (of both
processes). Rows that stand there are not played again. It takes about 25 minutes of one core.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

sys.path[:0] = map(str, Path(__file__).parents[1:3])
from tables import RESULTS, added, read  # noqa: E402

from cleanrl_graph.envs.traffic import MAPS, RULES, TrafficLightsEnv, play_rule  # noqa: E402

COLUMNS = "map rule demand shift seed delay arrived unfinished cpu_seconds".split()
FILE = RESULTS / "traffic" / "rules.csv"


@dataclass
class Args:
    maps: tuple[str, ...] = MAPS
    """maps to play"""
    rules: tuple[str, ...] = tuple(RULES)
    """rules to play"""
    suites: bool = True
    """the five hours of each map's suite beside the one of the suite "resco" """
    file: str = str(FILE)
    """table that is written"""


def entries_of(name: str, suites: bool) -> list[dict]:
    """Keyword arguments of the hours of a map: that of "resco" first."""
    own = [entry for entry in TrafficLightsEnv.eval_suites["resco"] if entry["map"] == name]
    if suites:
        own += TrafficLightsEnv.eval_suites[name]
    return own


def cpu_seconds() -> float:
    """Of this process and those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def play(entry: dict, rule: str) -> dict:
    """The row of an hour of traffic."""
    before = cpu_seconds()
    env = TrafficLightsEnv(**entry, choose="phases")
    evaluation = play_rule(env, rule, seed=0)
    env.close()
    row = {"map": entry["map"], "rule": rule}
    row["demand"] = entry["demand"]
    row["shift"] = entry["shift"]
    row["seed"] = entry["fixed_seed"]
    row["delay"] = round(evaluation["cost"], 2)
    row["arrived"] = evaluation["arrived"]
    row["unfinished"] = evaluation["unfinished"]
    row["cpu_seconds"] = round(cpu_seconds() - before, 1)
    return row


def main(args: Args) -> None:
    path = Path(args.file)
    # the seed tells the hours of a map apart
    done = {(row["map"], row["rule"], int(row["seed"])) for row in read(path)}
    left = []
    for name in args.maps:
        for entry in entries_of(name, args.suites):
            for rule in args.rules:
                if (name, rule, entry["fixed_seed"]) not in done:
                    left.append((entry, rule))
    slow = "ingolstadt21"
    left.sort(key=lambda item: (item[0]["map"] == slow, item[0]["fixed_seed"]))
    with added(path, COLUMNS) as add:
        for entry, rule in tqdm(left, unit="hour"):
            add(play(entry, rule))


if __name__ == "__main__":
    main(tyro.cli(Args))
