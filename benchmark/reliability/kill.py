"""Runs that are killed or stopped at random moments, continued with --resume auto, and compared
with whole ones.

    python benchmark/reliability/kill.py --times 40 \
        --out benchmark/results/reliability/tables.md#kill

The runs are small ones of all four scripts, in process and with two workers, on CartPole and
environments of this repository. Each is a process of its own (forked, which saves the imports).
Equal means: every weight, and every entry of the TensorBoard log but SPS, bit by bit. Exit code 1
if one was not, or if a process stayed behind."""

import argparse
import contextlib
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

BENCHMARK, ROOT = Path(__file__).resolve().parents[1:3]
sys.path[:0] = map(str, (BENCHMARK, ROOT, ROOT / "tests"))

import processes  # noqa: E402
import torch  # noqa: E402
from tables import put  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

EVERY = 5  # updates between two checkpoints
SMALL = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=1, num_envs=3, num_steps=8)
SMALL |= dict(num_minibatches=2, update_epochs=2, eval_episodes=0, cuda=False)
SMALL |= dict(checkpoint_every=EVERY, save_model=True)
MEMORY = dict(prev_action=True, prev_reward=True)
LSTM, TRANSFORMER = dict(lstm_dim=8), dict(dim=8, num_heads=2, memory_length=5)
EXPLORE, POISSON = dict(env_id="envs:GraphExplore-v0"), dict(env_id="envs:PoissonGraph-v0")
RUNS = [  # script, flags
    ("ppo_graph", dict(env_id="CartPole-v1")),
    ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1", norm_obs=True, num_workers=2)),
    ("ppo_lstm_sparse", EXPLORE | dict(remember_edges=True, prev_action=True) | LSTM),
    ("ppo_gtrxl", EXPLORE | dict(num_workers=2) | TRANSFORMER),
    ("ppo_graph", POISSON | dict(norm_obs=True, num_workers=2, wrap=("z:skill:3",))),
    ("ppo_framestack", dict(env_id="envs:LastGraphs-v0")),
    ("ppo_lstm_sparse", dict(env_id="CartPole-v1", num_workers=2) | LSTM),
    ("ppo_gtrxl", dict(env_id="envs:StatelessCartPole-v1") | MEMORY | TRANSFORMER),
    ("ppo_graph", dict(env_id="envs:JobShop-v0", env_kwargs={"jobs": 3, "machines": 3})),
    ("ppo_lstm_sparse", dict(env_id="envs:Recall-v0", norm_obs=True) | LSTM),
]


class Outcome(NamedTuple):
    """What became of a run: where it was hit, with which exit code it ended, and whether all else
    is as it should."""

    script: str
    env_id: str
    num_workers: int
    updates: int  # in the newest checkpoint when it ended
    exit_code: int
    equal: bool  # weights and log
    alone: bool  # no worker stayed behind


def start(run_dir: Path, script: str, flags: dict) -> mp.Process:
    """The process of a run, in a group of its own; what it prints is in the file `run_dir`.err."""

    def quiet(module):
        torch.set_num_threads(1)
        log = os.open(f"{run_dir}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(log, number)
        sys.stderr, sys.stdout = os.fdopen(2, "w", closefd=False), os.fdopen(1, "w", closefd=False)

    return processes.start(run_dir, script, quiet, **SMALL | flags)


def result(run_dir: Path) -> tuple[dict, dict]:
    """(weights, log) of the run in a folder that has its model."""
    (model,) = run_dir.glob("*/model.pt")
    log = EventAccumulator(str(model.parent), size_guidance={"scalars": 0})
    log.Reload()
    scalars = {
        name: [(event.step, event.value) for event in log.Scalars(name)]
        for name in log.Tags()["scalars"]
        if name != "charts/SPS"
    }
    return torch.load(model, weights_only=True)["model"], scalars


def same(a: tuple, b: tuple) -> bool:
    (ours, log), (theirs, their_log) = a, b
    is_equal = list(ours) == list(theirs) and all(torch.equal(ours[k], theirs[k]) for k in ours)
    return is_equal and log == their_log


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether all processes leave within that time."""
    end = time.time() + seconds
    while any(map(processes.is_alive, pids)) and time.time() < end:
        time.sleep(0.02)
    return not any(map(processes.is_alive, pids))


def wait_for_the_next_second() -> None:
    """The logs of one run are read in the order of their names, which hold the second in which each
    began."""
    time.sleep(1.01 - time.time() % 1)


def hit(
    run_dir: Path, script: str, flags: dict, number: int, updates: int, delay: float
) -> tuple[int, bool]:
    """(exit code, whether all workers left) of a run that is sent a signal `delay` seconds after it
    had its log, and a checkpoint of that many updates."""
    process = start(run_dir, script, flags)
    is_reached = lambda: list(run_dir.glob("*/events*")) and updates_of(run_dir) >= updates
    while process.is_alive() and not is_reached():
        time.sleep(0.002)
    time.sleep(delay)
    workers = processes.children(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number) if number != signal.SIGKILL else process.kill()
    process.join()
    return process.exitcode, gone(workers)


def updates_of(run_dir: Path) -> int:
    """Those in the newest checkpoint."""
    return processes.newest(run_dir) // (SMALL["num_envs"] * SMALL["num_steps"])


def damage(run_dir: Path, rng: random.Random) -> None:
    """Cuts the newest checkpoint off, or flips one of its bits."""
    for path in sorted(run_dir.glob("*/checkpoint_*.ckpt"))[-1:]:
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data[:place] if rng.random() < 0.5 else data)
        if len(list(path.parent.glob("*.ckpt"))) == 1:
            path.unlink()  # there is none to fall back to: the run begins anew


def kill_runs(
    times: int,
    folder: Path,
    seed: int | None = 1,
    total_timesteps: int = 1440,
    kind: str = "kill -9",
    runs: list = RUNS,
) -> list[Outcome]:
    """One Outcome for each of `times` runs of `runs` in turn, hit at a random moment, continued and
    compared. `folder` is empty, or has the whole runs of an earlier call."""
    number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(kind, signal.SIGKILL)
    rng, outcomes = random.Random(seed), []
    for k in range(times):
        script, flags = runs[k % len(runs)]
        flags = flags | dict(total_timesteps=total_timesteps)
        whole = folder / f"whole_{k % len(runs)}"
        if not whole.exists():
            begin = time.time()
            start(whole, script, flags).join()
            (folder / f"{whole.name}.seconds").write_text(str(time.time() - begin))
        num_updates = total_timesteps // (SMALL["num_envs"] * SMALL["num_steps"])
        whole_seconds = float((folder / f"{whole.name}.seconds").read_text())
        seconds = whole_seconds * EVERY / num_updates  # of one checkpoint
        exit_code, attempt = 0, 0
        while exit_code == 0:  # at first, and where it ended before it was hit
            run_dir, attempt = folder / f"{kind.split()[0]}_{k}_{attempt}", attempt + 1
            after = rng.randrange(num_updates // EVERY)
            moment = EVERY * after, rng.random() * seconds
            exit_code, alone = hit(run_dir, script, flags, number, *moment)
        updates = updates_of(run_dir)
        if kind == "damaged checkpoint":
            damage(run_dir, rng)
        wait_for_the_next_second()
        start(run_dir, script, flags | dict(resume="auto")).join()
        try:
            equal = same(result(run_dir), result(whole))
        except ValueError as error:  # there is no model, or more than one
            print(f"{run_dir}: {error}", file=sys.stderr)
            equal = False
        about = script, flags["env_id"].split(":")[-1], flags.get("num_workers", 0)
        outcomes.append(Outcome(*about, updates, exit_code, equal, alone))
        print(f"{kind} {k + 1}: {outcomes[-1]}", file=sys.stderr, flush=True)
    return outcomes


# How often, for --times 40
KINDS = {"kill -9": 40, "SIGTERM": 10, "SIGINT": 10, "damaged checkpoint": 10}


def main(args) -> bool:
    begin, rows, found, good = time.time(), [], {}, True
    with tempfile.TemporaryDirectory() as folder:
        for kind, share in KINDS.items():
            times = max(1, args.times * share // 40)
            found[kind] = kill_runs(times, Path(folder), args.seed, args.total_timesteps, kind)
    for kind, outcomes in found.items():
        code = {"SIGTERM": 143, "SIGINT": 130}.get(kind, -9)
        good_of = [(each.equal, each.exit_code == code, each.alone) for each in outcomes]
        cells = [len(outcomes), *map(sum, zip(*good_of))]
        rows.append(f"| {kind} | " + " | ".join(map(str, cells)) + " |")
        good &= len(set(cells)) == 1
    kills = found["kill -9"]
    workers = lambda each: ", 2 workers" if each.num_workers else ""
    names = sorted({f"{each.script}.py, {each.env_id}{workers(each)}" for each in kills})
    text = "\n".join(
        [
            f"    python benchmark/reliability/kill.py --times {args.times} --seed {args.seed} "
            f"--total-timesteps {args.total_timesteps}",
            "",
            f"Runs of {args.total_timesteps // 24} updates with a checkpoint after every fifth "
            "one, hit at a random moment, continued with `--resume auto`, and compared with a "
            f"whole run: **{sum(o.equal for o in kills)} of {len(kills)} killed ones ended bitwise "
            "equal**, in every weight and every entry of the log but SPS. "
            f"{sum(o.updates == 0 for o in kills)} of them had no checkpoint yet and began anew.",
            "",
            "| what happened | times | bitwise equal | right exit code (-9, 143, 130) | no process "
            "stayed behind |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "A damaged checkpoint: after a kill -9 the newest one is cut off, or one of its bits "
            "is flipped. The runs: " + "; ".join(names) + ".",
            "",
            f"{time.time() - begin:.0f} s, {os.cpu_count()} cores, torch {torch.__version__}",
            "",
        ]
    )
    print(text)
    if args.out:
        put(args.out, text)
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=1440)
    parser.add_argument("--out")
    torch.set_num_threads(1)
    sys.exit(not main(parser.parse_args()))
