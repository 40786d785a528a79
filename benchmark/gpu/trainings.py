"""Parts "jobshop", "recall" and "minigrid" of benchmark/gpu.sh: whole trainings on the GPU and what
is learned in them.

jobshop: how fast the settings and scripts are, then a training as long as --minutes leaves, by the
fastest script; its model (DIR/jobshop.pt) on Lawrence's 40 and Taillard's 10 instances of 15 x 15,
greedily and the best of 16 samples. recall: ppo_gtrxl.py remembers a cue over a corridor of 1,000
steps. minigrid: PixelMemory-v0 (pixel_memory.py), seeds 1 to 3. A training that is stopped goes on
from its checkpoint in DIR/runs when the same command is given again. Each leaves its learning curve
as DIR/NAME.csv, in the format of benchmark/run.py.
"""

import functools
import importlib.util
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import kit
import numpy as np
from kit import NotHere, Row
from run import csv_text, eval_columns, events_of

SPEED, TRAINING, SUITES = "Speed", "Training", "Evaluation"


class Training(NamedTuple):
    """`flags` are those of the script; --total-timesteps is `steps`, or what `seconds` allow at the
    measured speed."""

    name: str
    scripts: tuple[str, ...]  # the fastest of which trains
    flags: str
    dry: str  # flags that make it tiny
    steps: int = 0
    seconds: float = 0.0
    suites: tuple[str, ...] = ()
    target: float | None = None  # return after which steps are counted


JOBS = """--env-id envs:JobShop-v0 --num-envs 512 --num-steps 64 --num-minibatches 32
    --update-epochs 3 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --gnn-dim 128
    --hidden-dims 256 256 --num-workers WORKERS
    --env-kwargs '{"jobs": [5, 15], "machines": [5, 15]}'"""
RECALL = """--env-id envs:Recall-v0 --env-kwargs '{"length": 1000}' --num-envs 64
    --num-steps 1024 --num-minibatches 16 --learning-rate 1e-3 --no-clip-vloss --gamma 0
    --gae-lambda 0 --gate none --num-layers 1 --hidden-dims 64
    --memory-length 1002 --eval-episodes 200"""
PIXELS = """--env-id pixel_memory:PixelMemory-v0 --num-envs 32 --num-steps 64
    --num-minibatches 8 --learning-rate 1e-3 --activation relu --gae-lambda 1 --ent-coef 0.05
    --vf-coef 1 --no-clip-vloss --eval-episodes 200 --num-layers 1
    --memory-length 32 --gate none"""
TRAININGS = {
    "jobshop": [
        Training(
            "jobshop",
            ("ppo_graph", "ppo_graph_compile"),
            JOBS,
            """--num-envs 4 --num-steps 16 --num-minibatches 2 --gnn-dim 8 --hidden-dims 8
            --num-workers 0 --env-kwargs '{"jobs": 2, "machines": 2}'""",
            seconds=220,
            suites=("la", "ta15x15"),
        )
    ],
    "recall": [
        Training(
            "recall",
            ("ppo_gtrxl",),
            RECALL,
            """--num-envs 4 --num-steps 16 --num-minibatches 2
        --memory-length 8 --env-kwargs '{"length": 4}' --eval-episodes 4""",
            seconds=280,
            target=0.9,
        )
    ],
    "minigrid": [
        Training(
            f"minigrid_seed{seed}",
            ("ppo_gtrxl",),
            f"{PIXELS} --seed {seed}",
            """--num-envs 4
        --num-steps 16 --num-minibatches 2 --memory-length 8 --eval-episodes 2""",
            steps=400_000,
            target=0.9,
        )
        for seed in (1, 2, 3)
    ],
}


def words(training: Training, args: kit.Args) -> list[str]:
    """The flags; the later of two equal ones wins."""
    text = training.flags.replace("WORKERS", str(max(kit.num_cpus() - 2, 0)))
    return [*shlex.split(text), *(["--no-cuda", *shlex.split(training.dry)] if args.dry else [])]


def needed(training: Training, script: str) -> None:
    """NotHere if the training cannot run."""
    if not (kit.SCRIPTS / f"{script}.py").exists():
        raise NotHere(f"there is no cleanrl_graph/{script}.py")
    if "pixel_memory" in training.flags and importlib.util.find_spec("minigrid") is None:
        raise NotHere("minigrid is not installed")


def logs(args: kit.Args, name: str) -> Path:
    return Path(args.out) / "logs" / f"{name}.txt"


def speed(training: Training, script: str, args: kit.Args, deadline: float) -> dict:
    """Steps per second of some updates."""
    needed(training, script)
    with tempfile.TemporaryDirectory() as run_dir:
        flags = [
            *words(training, args),
            "--total-timesteps",
            str(10**9),
            "--checkpoint-every",
            "0",
            "--eval-episodes",
            "0",
            "--run-dir",
            run_dir,
        ]
        noted = kit.from_child(
            args,
            "sps",
            script,
            flags,
            logs(args, f"{training.name}_{script}"),
            deadline,
            seconds=0.0 if args.dry else 20.0 if script == "ppo_graph_compile" else 8.0,
        )
    return {
        "SPS": kit.steady(noted["updates"]),
        "first update, s": noted["updates"][0][1],
        "GPU memory, GB": noted["gpu_gb"],
        "_updates": noted["updates"],
    }


def plan(training: Training, results: kit.Results, args: kit.Args) -> tuple[str, int]:
    """(script, steps) of the training, the same when it goes on. NotHere if no speed was measured
    where one is needed."""
    noted = Path(args.out) / "runs" / f"{training.name}.json"
    if noted.exists():
        return tuple(json.loads(noted.read_text()))
    if args.dry:
        return training.scripts[0], 2 * 4 * 16
    if training.steps:
        return training.scripts[0], training.steps
    speeds = {
        row["key"]["script"]: row["figures"]["SPS"]
        for row in results.content["rows"]
        if row["table"] == SPEED and row["key"]["training"] == training.name and not row["note"]
    }
    if not speeds:
        raise NotHere("no speed was measured")
    script = max(speeds, key=speeds.get)
    return script.removesuffix(".py"), int(speeds[script] * training.seconds)


def train(training: Training, results: kit.Results, args: kit.Args, deadline: float) -> dict:
    """The training, or the rest of it, to its end: DIR/NAME.pt and DIR/NAME.csv, and what its end
    is worth."""
    script, steps = plan(training, results, args)
    needed(training, script)
    out = Path(args.out).resolve()
    run_dir = out / "runs" / training.name
    run_dir.mkdir(parents=True, exist_ok=True)
    kit.write(out / "runs" / f"{training.name}.json", json.dumps([script, steps]))
    flags = [
        *words(training, args),
        "--total-timesteps",
        str(steps),
        "--save-model",
        "--checkpoint-every",
        "10",
        "--resume",
        "auto",
        "--run-dir",
        str(run_dir),
        *(["--eval-episodes", "0"] if training.suites else []),
    ]
    noted = kit.from_child(args, "train", script, flags, logs(args, training.name), deadline)
    episodes, updates = events_of(run_dir)
    kit.write(out / f"{training.name}.csv", csv_text(episodes, updates, 500))
    model = max(run_dir.glob("*/model.pt"), key=lambda path: path.stat().st_mtime)
    shutil.copy(model, out / f"{training.name}.pt")
    returns = np.array([ret for _, _, ret, _ in episodes])
    seconds = episodes[-1][1] if episodes else None
    figures = {
        "steps": updates[-1][0],
        "seconds": seconds,
        "SPS": updates[-1][1],
        "GPU memory, GB": noted["gpu_gb"],
        "episodes": len(returns),
        "mean of the last 100": float(returns[-100:].mean()) if len(returns) else None,
    }
    if training.target is not None:
        figures |= first_time(episodes, training.target)
    played = eval_columns(run_dir)
    if played:
        figures |= {
            "greedy episodes": len(played["return"]),
            "their mean return": float(np.mean(played["return"])),
            "with a return above 0, %": 100 * float((np.array(played["return"]) > 0).mean()),
        }
    shutil.rmtree(run_dir)
    return figures | {"_command": shlex.join([f"{script}.py", *words(training, args)])}


def first_time(episodes: list[tuple], target: float, num: int = 100) -> dict:
    """Steps and seconds until the mean return of `num` episodes is the target."""
    name = f"to a mean of {target:g}"
    returns = np.array([ret for _, _, ret, _ in episodes])
    if len(returns) < num:
        return {f"steps {name}": "never", f"seconds {name}": "never"}
    means = np.convolve(returns, np.full(num, 1 / num), "valid")
    reached = np.flatnonzero(means >= target)
    if not len(reached):
        return {f"steps {name}": "never", f"seconds {name}": "never"}
    step, seconds, *_ = episodes[reached[0] + num - 1]
    return {f"steps {name}": step, f"seconds {name}": seconds}


def evaluate(
    training: Training, suite: str, args: kit.Args, results: kit.Results, deadline: float
) -> dict:
    """Mean gaps to the best known makespans, through --eval-suite."""
    model = Path(args.out).resolve() / f"{training.name}.pt"
    if not model.exists():
        raise NotHere(f"there is no {model.name}, the training's model")
    script, _ = plan(training, results, args)
    with tempfile.TemporaryDirectory() as run_dir:
        flags = [
            *words(training, args),
            "--load-model",
            str(model),
            "--total-timesteps",
            "0",
            "--eval-suite",
            suite,
            "--eval-samples",
            "1" if args.dry else "16",
            "--num-envs",
            "1",
            "--num-minibatches",
            "1",
            "--num-workers",
            "0",
            "--run-dir",
            run_dir,
        ]
        kit.from_child(
            args,
            "train",
            script,
            flags,
            logs(args, f"{training.name}_{suite}"),
            deadline,
            num_instances=1 if args.dry else None,
        )
        played = eval_columns(Path(run_dir))
    best, costs = np.array(played["best_known"], float), {}
    for name in ("greedy", next(name for name in played if name.startswith("best of"))):
        costs[f"{name}, mean gap %"] = float(
            np.mean(100 * (np.array(played[name], float) / best - 1))
        )
    return {"instances": len(best)} | costs | {"_played": played}


def all_rows(part: str, args: kit.Args, results: kit.Results) -> list[Row]:
    rows = []
    for training in TRAININGS[part][: 1 if args.dry else None]:
        if training.seconds:
            rows += [
                Row(
                    SPEED,
                    {"training": training.name, "script": f"{script}.py"},
                    functools.partial(speed, training, script, args),
                    5 if args.dry else 60,
                )
                for script in training.scripts[: 1 if args.dry else None]
            ]
        rows.append(
            Row(
                TRAINING,
                {"training": training.name},
                functools.partial(train, training, results, args),
                5 if args.dry else 30,
            )
        )
        rows += [
            Row(
                SUITES,
                {"training": training.name, "suite": suite},
                functools.partial(evaluate, training, suite, args, results),
                5 if args.dry else 60,
            )
            for suite in training.suites
        ]
    return rows


TITLES = {
    "jobshop": "Job shops, trained on the GPU",
    "recall": "Recall over 1,000 steps",
    "minigrid": "MiniGrid's memory task in pixels",
}


def run(part: str, args: kit.Args, deadline: float) -> int:
    texts = [
        f"{training.name}: `{' '.join(training.flags.split())}`" for training in TRAININGS[part]
    ]
    notes = "Flags, --total-timesteps aside:\n\n" + "\n".join(f"- {text}" for text in texts)
    results = kit.Results(args, part, TITLES[part], notes, kit.machine(args))
    return kit.measure(results, all_rows(part, args, results), args, deadline)
