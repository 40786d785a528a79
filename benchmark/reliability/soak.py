"""Memory, open files and threads of a long run of ppo_graph.py on PoissonGraph-v0.

    python benchmark/reliability/soak.py --total-timesteps 2000000 \
        --out benchmark/results/reliability/tables.md#soak

Every update is sampled; the table shows ten of them. Exit code 1 if the resident memory grew by 2%
or more after the warm-up (the first tenth of the run), or if the number of open files or threads
changed."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import torch  # noqa: E402
from tables import put  # noqa: E402

from cleanrl_graph import ppo_graph, services  # noqa: E402


def sample(step: int) -> dict:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "step": step,
        "RSS MiB": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "open files": len(os.listdir("/proc/self/fd")),
        "seconds": time.perf_counter(),
    }


def soak(args) -> list[dict]:
    """One sample per update."""
    samples, add_scalar = [], ppo_graph.SummaryWriter.add_scalar

    def sampled(writer, name, value, step):
        add_scalar(writer, name, value, step)
        if name == "charts/SPS":  # once per update
            samples.append(sample(step))

    ppo_graph.SummaryWriter.add_scalar = sampled
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(env_id="envs:PoissonGraph-v0", num_steps=32, num_minibatches=2)
        flags |= dict(update_epochs=1, gnn_layers=1, gnn_dim=8, hidden_dims=(16,), norm_obs=True)
        flags |= dict(total_timesteps=args.total_timesteps, num_envs=args.num_envs)
        own = ppo_graph.Args(**flags, run_dir=folder, cuda=False, eval_episodes=0)
        services.run(ppo_graph, own, checkpoint_every=20, num_workers=args.num_workers)
    return samples


def table(samples: list[dict], args) -> tuple[str, bool]:
    warm = samples[len(samples) // 10 :]
    shown = [warm[round(k * (len(warm) - 1) / 9)] for k in range(10)]
    rss = [row["RSS MiB"] for row in warm]
    tenth = max(1, len(rss) // 10)
    growth = sum(rss[-tenth:]) / sum(rss[:tenth]) - 1
    constant = all(len({row[name] for row in warm}) == 1 for name in ("threads", "open files"))
    names = ["step", "RSS MiB", "threads", "open files"]
    lines = [
        f"    python benchmark/reliability/soak.py --total-timesteps {args.total_timesteps} "
        f"--num-envs {args.num_envs} --num-workers {args.num_workers}",
        "",
        f"{samples[-1]['step']} steps, {len(samples)} updates with a checkpoint every 20, in "
        f"{samples[-1]['seconds'] - samples[0]['seconds']:.0f} s. After the warm-up, a tenth of "
        f"the run, the resident memory grew by {100 * growth:.2f}%: the mean of the last tenth "
        "against that of the first. Open files and threads were "
        f"{'the same at every update' if constant else 'not constant'}.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
    ]
    for row in shown:
        cells = [f"{row[k]:.1f}" if k == "RSS MiB" else str(row[k]) for k in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n", growth < 0.02 and constant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-timesteps", type=int, default=2_000_000)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, good = table(soak(args), args)
    print(text)
    if args.out:
        put(args.out, text)
    sys.exit(not good)
