"""Part "checks" of benchmark/gpu.sh: what has to be right before anything is measured. Does the
machine have what torch.compile needs; and of each script, where the host waits for the device in an
update, and whether collection and training agree. The scripts run beside each other."""

import functools
import os
import shutil
import sysconfig
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import kit
import torch
from kit import Row

FLAGS = (
    "--num-envs 16 --num-steps 32 --total-timesteps 1000000 --checkpoint-every 0 --eval-episodes 0"
)
MEMORY = "--prev-action --prev-reward"
TASKS = {
    "ppo_graph": ("CartPole-v1", "envs:JobShop-v0", "envs:PairNodes-v0 --autoregressive"),
    "ppo_framestack": ("envs:StatelessCartPole-v1",),
    "ppo_lstm_sparse": ("envs:StatelessCartPole-v1", f"envs:GraphExplore-v0 {MEMORY}"),
    "ppo_gtrxl": (f"envs:StatelessCartPole-v1 {MEMORY}",),
    "ppo_graph_async": ("envs:PoissonGraph-v0",),
    "ppo_graph_aux": ("envs:PoissonGraph-v0 --aux reconstruct",),
    "ppo_graph_agents": ("envs:Crowd-v0",),
    "ppo_graph_compile": ("CartPole-v1", "envs:PoissonGraph-v0", "envs:JobShop-v0"),
}
DRY = {
    "ppo_graph": ("envs:PoissonGraph-v0",),
    "ppo_graph_compile": ("CartPole-v1 --compile-mode none",),
}


def machine(args: kit.Args, deadline: float) -> dict:
    """What torch.compile needs on this machine, and whether it makes x + 1."""
    device = "cpu" if args.dry else "cuda"
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    version = kit.output_of(compiler, "--version") if compiler else ""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    start = time.perf_counter()
    x = torch.arange(5, device=device)
    right = args.dry or torch.equal(torch.compile(lambda x: x + 1)(x), x + 1)
    if not right:
        raise RuntimeError("the compiled x + 1 is another number")
    return {
        "C compiler": version or "none",
        "Python.h": "yes" if header.exists() else "no",
        "x + 1 compiled, s": time.perf_counter() - start,
    }


def updates(script: str, task: str, args: kit.Args, deadline: float) -> dict:
    """Updates 3 to 5 of a training; of ppo_graph_compile.py later ones, which capture less."""
    log = Path(args.out) / "logs" / f"checks_{script}_{task.split()[0].split(':')[-1]}.txt"
    with tempfile.TemporaryDirectory() as run_dir:
        flags = f"--env-id {task} {FLAGS} --run-dir {run_dir} {'--no-cuda' if args.dry else ''}"
        warmup = 2 if args.dry or script != "ppo_graph_compile" else 10
        noted = kit.from_child(
            args, "waits", script, flags.split(), log, deadline, warmup=warmup, watched=3
        )
    return figures(noted)


def figures(noted: dict) -> dict:
    return {
        "waits per update": sum(noted["places"].values()) / noted["updates"],
        "largest |ratio - 1|": noted["mismatch"],
        "first update, s": noted["first"],
        "where": ", ".join(f"{place} {num}" for place, num in noted["places"].items()),
    }


def run(part: str, args: kit.Args, deadline: float) -> int:
    results = kit.Results(args, part, "Checks on the GPU", NOTES, kit.machine(args))
    rows = [Row("The machine", {"what": "machine"}, functools.partial(machine, args), 1)]
    with ThreadPoolExecutor(max(1, kit.num_cpus() // 2)) as pool:
        for script, tasks in (DRY if args.dry else TASKS).items():
            for task in tasks:
                work = functools.partial(updates, script, task, args)
                row = Row("Updates", {"script": f"{script}.py", "environment": task}, work, 1)
                if not args.dry and not results.has(row) and kit.re.search(args.only, row.name):
                    begun = pool.submit(work, deadline)
                    row = row._replace(measure=functools.partial(ended, begun))
                rows.append(row)
        return kit.measure(results, rows, args, deadline)


def ended(begun: Future, deadline: float) -> dict:
    return begun.result()


NOTES = """Waits are what torch.cuda.set_sync_debug_mode warns of, in three updates of 32 steps;
where: the file and line that waited, and how often. As meant are one per step, for the actions, one
per update for the values, one for what is logged, and with --target-kl one per epoch.
ppo_graph_async.py steps in a process of its own, which is not watched."""
