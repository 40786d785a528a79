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
PUBLISHED = {  # RESCO, see `main`: time losses, of another SUMO and other timing
    "grid4x4": {"greedy": 34.2, "max-pressure": 52.3, "IDQN": 34.1, "IPPO": 45.9, "MPLight": 47.9},
    "cologne8": {"fixed": 65.1, "greedy": 21.9, "IDQN": 22.3, "IPPO": 22.5},
    "ingolstadt7": {"fixed": 91.5, "max-pressure": 46.4, "IDQN": 35.6, "IPPO": 32.5},
    "ingolstadt21": {"fixed": 137.6, "greedy": 69.1, "max-pressure": 112.8, "IDQN": 86.2},
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


def policy_delays() -> dict[str, dict[str, dict[int, float]]]:
    """{system: {map: {seed: mean delay of its suite}}}"""
    found = defaultdict(lambda: defaultdict(dict))
    for name, run in tables.finished(FOLDER).items():
        system = re.split(r"_(?:TrafficLights|s\d)", name)[0]
        system = SYSTEMS.get(system, "one policy for each map")
        seed = run["seed"]
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
        "shifted in time. Greedy decisions of a policy; mean (and each seed).",
        "",
        "| | number of seeds | " + " | ".join(MAPS) + " |",
        "| --- " * (len(MAPS) + 2) + "|",
    ]
    for rule, name in NAMES.items():
        cells = [f"{rules[rule][m]:.1f}" if m in rules.get(rule, {}) else "" for m in MAPS]
        lines.append(f"| {name} | | " + " | ".join(cells) + " |")
    systems = dict(policy_delays())
    if peer := peer_delays():
        systems[PEER] = {"grid4x4": peer}
    for system, maps in systems.items():
        cells = [cell(maps.get(name, {})) for name in MAPS]
        seeds = ", ".join(sorted({str(len(delays)) for delays in maps.values()}))
        lines.append(f"| {system} | {seeds} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Published by Ault and Sharon (RESCO, NeurIPS 2021, datasets and benchmarks), mean time",
        "loss of the last ten episodes, of another SUMO, another timing and RESCO's own demand:",
        "",
    ]
    for name, values in PUBLISHED.items():
        texts = [f"{method} {value}" for method, value in values.items()]
        lines.append(f"- {name}: {', '.join(texts)}")
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
