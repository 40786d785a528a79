"""The rules of TrafficLights-v0 on its suites: delays, and what an hour of traffic costs.

    pip install -r benchmark/traffic/requirements.txt
    python benchmark/traffic/rules.py

It writes benchmark/results/traffic/rules.csv, a row for each hour of traffic: map, rule, demand,
shift (s), seed, delay (mean of all trips, s), arrived and unfinished (trips), cpu_seconds (of both
processes). Rows that stand there are not played again. It takes about 25 minutes of one core.
"""

import os
import sys
from pathlib import Path

from tqdm import tqdm

sys.path[:0] = map(str, Path(__file__).parents[1:3])
from tables import RESULTS, added, read  # noqa: E402

from cleanrl_graph.envs.traffic import MAPS, RULES, TrafficLightsEnv, play_rule  # noqa: E402

COLUMNS = "map rule demand shift seed delay arrived unfinished cpu_seconds".split()
FILE = RESULTS / "traffic" / "rules.csv"


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
    row = {name: entry[name] for name in ("map", "demand", "shift")}
    row |= {name: evaluation[name] for name in ("arrived", "unfinished")}
    row |= {"rule": rule, "seed": entry["fixed_seed"], "delay": round(evaluation["cost"], 2)}
    return row | {"cpu_seconds": round(cpu_seconds() - before, 1)}


def main() -> None:
    # the seed tells the hours of a map apart; that of "resco" is the first
    done = {(row["map"], row["rule"], int(row["seed"])) for row in read(FILE)}
    suites, left = TrafficLightsEnv.eval_suites, []
    for name in MAPS:
        for entry in [*(e for e in suites["resco"] if e["map"] == name), *suites[name]]:
            for rule in RULES:
                if (name, rule, entry["fixed_seed"]) not in done:
                    left.append((entry, rule))
    slow = "ingolstadt21"
    left.sort(key=lambda item: (item[0]["map"] == slow, item[0]["fixed_seed"]))
    with added(FILE, COLUMNS) as add:
        for entry, rule in tqdm(left, unit="hour"):
            add(play(entry, rule))


if __name__ == "__main__":
    main()
