"""The POPGym table from the runs of popgym.sh: MMER, final training return, greedy evaluation, and the published MMER.

    python benchmark/popgym_table.py --out benchmark/results/popgym/table

MMER is the paper's figure, the best mean episodic return of one training iteration of 65,536 steps (there over 15
million steps and three trials). A maximum over the training is higher than what a policy keeps, so the last fifth of
the training and 100 greedy episodes stand beside it. Published figures: Morad et al., ICLR 2023 (appendix), with a GRU
for RepeatPreviousEasy; read second-hand.
"""

import argparse
import csv
import glob
from pathlib import Path

import numpy as np
from curves import load
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PUBLISHED = {  # task: {script: best mean of an iteration at 15 million steps}
    "PositionOnlyCartPoleEasy": {"lstm": 1.000, "no_memory": 0.722},
    "PositionOnlyCartPoleMedium": {"lstm": 1.000, "no_memory": 0.398},
    "PositionOnlyCartPoleHard": {"lstm": 1.000, "no_memory": 0.265},
    "RepeatPreviousEasy": {"lstm": 0.999},
}
ITERATION = 65_536


def row_of(path: str) -> tuple[float, float, float, int]:
    """(MMER, mean of the last fifth, greedy evaluation, steps) of a run."""
    log = EventAccumulator(path, size_guidance={"scalars": 0})
    log.Reload()
    episodes = log.Scalars("charts/episodic_return")
    steps, returns = np.array([e.step for e in episodes]), np.array([e.value for e in episodes])
    iteration = (steps - 1) // ITERATION
    num, total = np.bincount(iteration), np.bincount(iteration, returns)
    with open(Path(path) / "eval.csv") as file:
        greedy = np.mean([float(row["return"]) for row in csv.DictReader(file)])
    return (total[num > 0] / num[num > 0]).max(), returns[steps > 0.8 * steps[-1]].mean(), greedy, int(steps[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="path without ending")
    args = parser.parse_args()
    lines = ["    bash benchmark/popgym.sh", "", "One seed.", "",
             "| task | memory | steps | MMER | last fifth of training | greedy | published MMER (15M steps) |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    with open(f"{args.out}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["task", "memory", "step", "wall", "return", "length", "SPS"])
        writer.writeheader()
        for path in sorted(glob.glob("runs/popgym-*/")):
            if not (Path(path) / "eval.csv").exists():
                continue
            task, memory, _, _ = Path(path).name.split("__")
            task = task.removeprefix("popgym-").removesuffix("-v0")
            mmer, last, greedy, steps = row_of(path)
            published = PUBLISHED.get(task, {}).get(memory)
            lines.append(f"| {task} | {memory} | {steps:,} | {mmer:.3f} | {last:.3f} | {greedy:.3f} | "
                         f"{'' if published is None else f'{published:.3f}'} |")
            writer.writerows({"task": task, "memory": memory} | row for row in load(path))
    Path(f"{args.out}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
