"""Curves of finished runs, from their TensorBoard logs: one csv per run and one picture.

    python benchmark/curves.py --out benchmark/results/job_shop/curve runs/JobShop-v0__ppo_graph__1__*

writes curve.csv (step, wall time in seconds, return, length, SPS; one row per update) and curve.png (return against
steps and against minutes, one line per run)."""

import argparse
import csv
from pathlib import Path

import matplotlib
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def load(run: str) -> list[dict]:
    """One row per update: the mean return and length of the episodes that ended since the update before."""
    log = EventAccumulator(run, size_guidance={"scalars": 0})
    log.Reload()
    sps, returns, lengths = (log.Scalars(f"charts/{name}") for name in ("SPS", "episodic_return", "episodic_length"))
    start, rows, k = returns[0].wall_time if returns else sps[0].wall_time, [], 0
    for update in sps:
        ended = []
        while k < len(returns) and returns[k].step <= update.step:
            ended.append((returns[k].value, lengths[k].value))
            k += 1
        ret, length = np.mean(ended, 0) if ended else (np.nan, np.nan)
        wall = update.step / update.value if update.value else update.wall_time - start
        rows.append({"step": update.step, "wall": round(wall, 2), "return": ret, "length": length, "SPS": update.value})
    return rows


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Running mean over the last `width` finite values."""
    return np.array([np.nanmean(values[max(0, i - width + 1):i + 1]) for i in range(len(values))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", required=True, help="path without ending")
    parser.add_argument("--labels", nargs="*", help="one per run, equal ones share a colour; default: the folder")
    parser.add_argument("--reference", type=float, help="a horizontal line, for example the optimum")
    parser.add_argument("--reference-label", default="optimum")
    parser.add_argument("--steps-only", action="store_true", help="no axis of minutes")
    parser.add_argument("--ylabel", default="episodic return")
    args = parser.parse_args()
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    num = 1 if args.steps_only else 2
    size = 3 + 3.5 * num, 3.6
    figure, (axes,) = plt.subplots(1, num, figsize=size, sharey=True, squeeze=False, constrained_layout=True)
    with open(f"{args.out}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "folder", "step", "wall", "return", "length", "SPS"])
        writer.writeheader()
        colours = {}
        for k, run in enumerate(args.runs):
            label, rows = args.labels[k] if args.labels else Path(run).name, load(run)
            writer.writerows({"run": label, "folder": Path(run).name} | row for row in rows)
            last = np.nanmean([row["return"] for row in rows[-10:]])
            print(f"{label}: mean return of the last 10 updates {last:.4g}, {rows[-1]['wall'] / 60:.1f} minutes")
            curve = smooth(np.array([row["return"] for row in rows]), max(1, len(rows) // 40))
            known = label in colours
            colour = colours.setdefault(label, f"C{len(colours)}")
            steps, minutes = [row["step"] / 1000 for row in rows], [row["wall"] / 60 for row in rows]
            axes[0].plot(steps, curve, color=colour, label=None if known else label, lw=1.4)
            if num == 2:
                axes[1].plot(minutes, curve, color=colour, lw=1.4)
    axes[0].set(xlabel="environment steps (thousands)", ylabel=args.ylabel)
    if num == 2:
        axes[1].set(xlabel="minutes")
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        if args.reference is not None:
            ax.axhline(args.reference, color="black", lw=1, ls="--", label=args.reference_label)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(f"{args.out}.png", dpi=130)


if __name__ == "__main__":
    main()
