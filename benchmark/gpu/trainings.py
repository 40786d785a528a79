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
DRY = "--num-envs 4 --num-steps 16 --num-minibatches 2"
DRY_JOBS = f"""{DRY} --gnn-dim 8 --hidden-dims 8 --num-workers 0
    --env-kwargs '{{"jobs": 2, "machines": 2}}'"""
DRY_RECALL = f"""{DRY} --memory-length 8 --env-kwargs '{{"length": 4}}' --eval-episodes 4"""
DRY_PIXELS = f"{DRY} --memory-length 8 --eval-episodes 2"
BOTH, MEMORY = ("ppo_graph", "ppo_graph_compile"), ("ppo_gtrxl",)
TRAININGS = {
    "jobshop": [Training("jobshop", BOTH, JOBS, DRY_JOBS, seconds=220, suites=("la", "ta15x15"))],
    "recall": [Training("recall", MEMORY, RECALL, DRY_RECALL, seconds=280, target=0.9)],
    "minigrid": [
        Training(name, MEMORY, f"{PIXELS} --seed {seed}", DRY_PIXELS, steps=400_000, target=0.9)
        for seed, name in ((seed, f"minigrid_seed{seed}") for seed in (1, 2, 3))
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
        more = f"--total-timesteps {10**9} --checkpoint-every 0 --eval-episodes 0 --run-dir"
        flags = [*words(training, args), *more.split(), run_dir]
        seconds = 0.0 if args.dry else 20.0 if script == "ppo_graph_compile" else 8.0
        log = logs(args, f"{training.name}_{script}")
        noted = kit.from_child(args, "sps", script, flags, log, deadline, seconds=seconds)
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
    more = f"--total-timesteps {steps} --save-model --checkpoint-every 10 --resume auto"
    flags = [*words(training, args), *more.split(), "--run-dir", str(run_dir)]
    flags += ["--eval-episodes", "0"] if training.suites else []
    noted = kit.from_child(args, "train", script, flags, logs(args, training.name), deadline)
    episodes, updates = events_of(run_dir)
    kit.write(out / f"{training.name}.csv", csv_text(episodes, updates, 500))
    model = max(run_dir.glob("*/model.pt"), key=lambda path: path.stat().st_mtime)
    shutil.copy(model, out / f"{training.name}.pt")
    returns = np.array([ret for _, _, ret, _ in episodes])
    seconds = episodes[-1][1] if episodes else None
    figures = {"steps": updates[-1][0], "seconds": seconds, "SPS": updates[-1][1]}
    figures |= {
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
    returns = np.array([ret for _, _, ret, _ in episodes])
    step = seconds = "never"
    if len(returns) >= num:
        means = np.convolve(returns, np.full(num, 1 / num), "valid")
        reached = np.flatnonzero(means >= target)
        if len(reached):
            step, seconds, *_ = episodes[reached[0] + num - 1]
    name = f"to a mean of {target:g}"
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
        more = f"--eval-suite {suite} --eval-samples {1 if args.dry else 16} --total-timesteps 0 "
        more += "--num-envs 1 --num-minibatches 1 --num-workers 0"
        flags = [*words(training, args), *more.split(), "--load-model", str(model)]
        flags += ["--run-dir", run_dir]
        log, num = logs(args, f"{training.name}_{suite}"), 1 if args.dry else None
        kit.from_child(args, "train", script, flags, log, deadline, num_instances=num)
        played = eval_columns(Path(run_dir))
    best, costs = np.array(played["best_known"], float), {}
    for name in ("greedy", next(name for name in played if name.startswith("best of"))):
        gaps = 100 * (np.array(played[name], float) / best - 1)
        costs[f"{name}, mean gap %"] = float(gaps.mean())
    return {"instances": len(best)} | costs | {"_played": played}


def all_rows(part: str, args: kit.Args, results: kit.Results) -> list[Row]:
    rows = []

    def add(table: str, key: dict, seconds: float, measure, *given) -> None:
        work = functools.partial(measure, training, *given)
        rows.append(Row(table, {"training": training.name} | key, work, 5 if args.dry else seconds))

    for training in TRAININGS[part][: 1 if args.dry else None]:
        for script in training.scripts[: 1 if args.dry else None] if training.seconds else ():
            add(SPEED, {"script": f"{script}.py"}, 60, speed, script, args)
        add(TRAINING, {}, 30, train, results, args)
        for suite in training.suites:
            add(SUITES, {"suite": suite}, 60, evaluate, suite, args, results)
    return rows


TITLES = {
    "jobshop": "Job shops, trained on the GPU",
    "recall": "Recall over 1,000 steps",
    "minigrid": "MiniGrid's memory task in pixels",
}


def run(part: str, args: kit.Args, deadline: float) -> int:
    texts = [f"- {each.name}: `{' '.join(each.flags.split())}`" for each in TRAININGS[part]]
    notes = "Flags, --total-timesteps aside:\n\n" + "\n".join(texts)
    results = kit.Results(args, part, TITLES[part], notes, kit.machine(args))
    return kit.measure(results, all_rows(part, args, results), args, deadline)
