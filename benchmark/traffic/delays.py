"""The table of benchmark/results/traffic: mean delays of the rules (rules.csv) and of trained
policies (runs.csv), a column for each map.

    python benchmark/traffic/delays.py

It writes delays.md. Learning curves: `benchmark/report.py --table traffic`.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import tables  # noqa: E402

FOLDER = tables.RESULTS / "traffic"
NAMES = {
    "fixed_time": "fixed time",
    "max_pressure": "max-pressure (vehicles in - out)",
    "queue_pressure": "max-pressure (halting in - out)",
    "greedy": "greedy (most vehicles in)",
    "relief": "relief (most delay of vehicles that have room to go to)",
    "random": "random",
}
SYSTEMS = {  # names of runs that are not those of maps
    "grid4x4_no_roads": "grid4x4 without roads between the lights",
    "grid4x4_joint": "grid4x4 with one reward for all lights (ppo_graph.py)",
    "all": "one policy for all five maps",
    "unseen": "one policy for four maps: grid4x4, cologne3, cologne8, ingolstadt7",
}
PEER = "sumo-rl, its example's PPO of Stable-Baselines3, 43,200 steps"
MAPS = ("grid4x4", "arterial4x4", "cologne1", "cologne3", "cologne8") + tuple(
    f"ingolstadt{num}" for num in (1, 7, 21)
)
HOURS = {"IDQN": 100, "MPLight": 100, "IPPO": 1400, "FMA2C": 1400}  # of traffic, in the training
PUBLISHED = {  # RESCO, utils/avg_timeLoss.py; a figure for each of MAPS, of another SUMO and timing
    "fixed": (None, None, 56.5, 39.8, 65.1, 39.5, 91.5, 137.6),
    "greedy": (34.2, 911.6, 27.6, 179.2, 21.9, 28.6, 79.2, 69.1),
    "max-pressure": (52.3, 988.1, 135.5, 114.4, 39.6, 23.5, 46.4, 112.8),
    "IDQN": (34.1, 1316.2, 28.9, 95.5, 22.3, 22.2, 35.6, 86.2),
    "MPLight": (47.9, 989.6, 53.2, 713.9, 252.4, None, 83.1, 377.3),
    "IPPO": (45.9, 1457.6, 210.8, 123.3, 22.5, 22.7, 32.5, 397.2),
    "FMA2C": (106.5, 773.3, 32.3, 106.3, 37.5, 31.8, 56.3, 115.9),
}


def rule_delays() -> dict[str, dict[str, float]]:
    """{rule: {map: mean delay of the five hours of its suite}}"""
    found = defaultdict(lambda: defaultdict(list))
    for row in tables.read(FOLDER / "rules.csv"):
        if int(row["seed"]) > 0:  # 0: the hour of the suite "resco"
            found[row["rule"]][row["map"]].append(float(row["delay"]))
    delays = {}
    for rule, maps in found.items():
        delays[rule] = {name: np.mean(values) for name, values in maps.items() if len(values) == 5}
    return delays


def system_of(name: str) -> str:
    """Which row of the table a run belongs to."""
    return SYSTEMS.get(re.split(r"_(?:TrafficLights|s\d)", name)[0], "one policy for each map")


def policy_delays() -> dict[str, dict[str, dict[int, float]]]:
    """{system: {map: {seed: mean delay of its suite}}}"""
    found = defaultdict(lambda: defaultdict(dict))
    for name, run in tables.finished(FOLDER).items():
        system, seed = system_of(name), run["seed"]
        by_map = defaultdict(list)
        for instance, delay in zip(run["eval"]["instance"], run["eval"]["greedy"]):
            by_map[instance.split()[0]].append(float(delay))
        for name, delays in by_map.items():
            found[system][name][seed] = np.mean(delays)
    return found


def peer_delays() -> dict[int, float]:
    """{seed: mean delay of the suite grid4x4} of benchmark/peers/sumo_rl_sb3.py"""
    found = defaultdict(list)
    for row in tables.read(FOLDER / "sumo_rl_sb3.csv"):
        found[int(row["seed"])].append(float(row["delay"]))
    return {seed: np.mean(delays) for seed, delays in found.items()}


def main() -> None:
    rules = rule_delays()
    lines = [
        "    bash benchmark/traffic.sh",
        "",
        "Mean delay of all trips in seconds, over five hours of each map: demands of 0.8 to 1.2,",
        "shifted in time. Greedy decisions of a policy; mean (and each seed). An hour: 720 steps.",
        "",
        "| | number of seeds | " + " | ".join(MAPS) + " | training |",
        "| --- " * (len(MAPS) + 3) + "|",
    ]
    for rule, name in NAMES.items():
        cells = [f"{rules[rule][m]:.1f}" if m in rules.get(rule, {}) else "" for m in MAPS]
        lines.append(f"| {name} | | " + " | ".join(cells) + " | |")
    systems, runs = dict(policy_delays()), defaultdict(list)
    for name, run in tables.finished(FOLDER).items():
        runs[system_of(name)].append(run)
    if peer := peer_delays():
        systems[PEER] = {"grid4x4": peer}
    for system, maps in systems.items():
        cells = [cell(maps.get(name, {})) for name in MAPS]
        seeds = ", ".join(sorted({str(len(delays)) for delays in maps.values()}))
        cells.append(tables.budget(runs[system], "steps"))
        lines.append(f"| {system} | {seeds} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Published by Ault and Sharon (RESCO, NeurIPS 2021, datasets and benchmarks), mean time",
        "loss of the last ten episodes, of another SUMO, another timing and RESCO's own demand;",
        "a policy for each map:",
        "",
        f"| | {' | '.join(MAPS)} | training, hours of traffic |",
        "| --- " * (len(MAPS) + 2) + "|",
    ]
    for method, values in PUBLISHED.items():
        cells = ["" if value is None else str(value) for value in values]
        lines.append(f"| {method} | {' | '.join(cells)} | {HOURS.get(method, '')} |")
    text = "\n".join(lines) + "\n"
    (FOLDER / "delays.md").write_text(text)
    print(text)


def cell(delays: dict[int, float]) -> str:
    if not delays:
        return ""
    seeds = ", ".join(f"{delays[seed]:.1f}" for seed in sorted(delays))
    return f"**{np.mean(list(delays.values())):.1f}** ({seeds})"


if __name__ == "__main__":
    main()
