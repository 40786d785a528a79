"""Steps and seconds until the mean return of the last 100 episodes reaches a target: table, csv and picture.

    python benchmark/time_to_target.py --target 475 --out benchmark/results/stateless_cartpole/table \
        "16 frames=runs/StatelessCartPole-v1__frames_16__*" "RLlib, 16 frames=runs/peers/rllib_framestack_*.csv"

Each argument is NAME=PATTERN of the run folders of one of the scripts (TensorBoard logs), or of csv files of a peer
with the columns step, wall_seconds and mean_return_100. Seconds count from the start of the training, without imports
and without the evaluation. Writes OUT.md, OUT.csv (the curves) and OUT.png.
"""

import argparse
import csv
import glob
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

EPISODES = 100  # that a mean is taken over


class Run(NamedTuple):
    """The curve of one run: after `steps` and `seconds` the mean of the last 100 returns; greedy evaluation or NaN."""

    name: str
    steps: np.ndarray
    seconds: np.ndarray
    means: np.ndarray
    evaluation: float


def load(path: str) -> Run:
    if path.endswith(".csv"):
        with open(path) as file:
            rows = np.array([[float(row[k]) for k in ("step", "wall_seconds", "mean_return_100")]
                             for row in csv.DictReader(file)])
        return Run(Path(path).stem, *rows.T, np.nan)
    log = EventAccumulator(path, size_guidance={"scalars": 0, "tensors": 0})
    log.Reload()
    start = log.Tensors("hyperparameters/text_summary")[0].wall_time  # written when training starts
    episodes = log.Scalars("charts/episodic_return")
    returns, steps, times = np.array([[e.value, e.step, e.wall_time - start] for e in episodes]).T
    window = min(EPISODES, len(returns))
    means = np.convolve(returns, np.ones(window) / window, "valid")
    table = Path(path) / "eval.csv"
    evaluation = np.nan
    if table.exists():
        with open(table) as file:
            evaluation = np.mean([float(row["return"]) for row in csv.DictReader(file)])
    return Run(Path(path).name, steps[window - 1:], times[window - 1:], means, evaluation)


def seed_of(run: Run) -> str:
    """The seed in the name of a run folder (ENV__EXP__SEED__TIME) or of a csv file (..._SEED)."""
    parts = run.name.split("__")
    return parts[2] if len(parts) == 4 else re.sub(r".*_", "", run.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", metavar="NAME=PATTERN")
    parser.add_argument("--out", required=True, help="path without ending")
    parser.add_argument("--target", type=float, default=475)
    parser.add_argument("--log-seconds", action="store_true", help="logarithmic axis of seconds")
    args = parser.parse_args()
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    systems = {}
    for system in args.systems:
        name, pattern = system.split("=", 1)
        paths = sorted(path for part in pattern.split(",") for path in glob.glob(part))
        if not paths:
            parser.error(f"nothing matches {pattern}")
        systems[name] = [load(path) for path in paths]

    lines = [f"| system | seed | steps to {args.target:g} | seconds to {args.target:g} | steps per second | "
             f"best mean of {EPISODES} episodes | last mean | greedy evaluation |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    with open(f"{args.out}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["system", "seed", "step", "seconds", "mean_return_100"])
        for k, (name, runs) in enumerate(systems.items()):
            medians = []
            for run in runs:
                hit = np.flatnonzero(run.means >= args.target)
                reached = (f"{run.steps[hit[0]]:,.0f}", f"{run.seconds[hit[0]]:.1f}") if len(hit) else (
                    f"not in {run.steps[-1]:,.0f}", f"not in {run.seconds[-1]:.0f}")
                medians.append(run.seconds[hit[0]] if len(hit) else np.inf)
                evaluation = "" if np.isnan(run.evaluation) else f"{run.evaluation:.1f}"
                lines.append(f"| {name} | {seed_of(run)} | {reached[0]} | {reached[1]} | "
                             f"{run.steps[-1] / run.seconds[-1]:,.0f} | {run.means.max():.1f} | {run.means[-1]:.1f} | "
                             f"{evaluation} |")
                keep = np.unique(np.linspace(0, len(run.means) - 1, 300).astype(int))
                for i in keep:
                    numbers = f"{run.steps[i]:.0f}", f"{run.seconds[i]:.2f}", f"{run.means[i]:.2f}"
                    writer.writerow([name, seed_of(run), *numbers])
                label = name if run is runs[0] else None
                axes[0].plot(run.steps[keep] / 1000, run.means[keep], color=f"C{k}", lw=1.3, label=label)
                axes[1].plot(run.seconds[keep], run.means[keep], color=f"C{k}", lw=1.3)
            median = np.median(medians)
            lines.append(f"| **{name}** | **median** | | **{median:.1f}** | | | | |" if np.isfinite(median) else
                         f"| **{name}** | **median** | | **not reached** | | | | |")
    axes[0].set(xlabel="environment steps (thousands)", ylabel=f"return, mean of {EPISODES} episodes")
    axes[1].set(xlabel="seconds of training", xscale="log" if args.log_seconds else "linear")
    for ax in axes:
        ax.axhline(args.target, color="black", lw=1, ls="--")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(f"{args.out}.png", dpi=130)
    Path(f"{args.out}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
