"""Part "profile" of benchmark/gpu.sh: what a training copies to the device, how often the host
waits for it, and how much of the time it is busy, from torch.profiler, for the scripts on several
environments."""

import functools
import tempfile
from pathlib import Path

import kit
import throughput
from kit import NotHere, Row
from throughput import TASKS, Case

CASES = [
    ("CartPole-v1", "ppo_graph"),
    ("PoissonGraph-v0", "ppo_graph"),
    ("PoissonGraph-v0", "ppo_graph_compile"),
    ("JobShop-v0", "ppo_graph"),
    ("StatelessCartPole-v1", "ppo_framestack"),
    ("StatelessCartPole-v1", "ppo_lstm_sparse"),
    ("StatelessCartPole-v1", "ppo_gtrxl"),
    ("GraphExplore-v0", "ppo_lstm_sparse"),
    ("PixelMemory-v0", "ppo_gtrxl"),
    ("CartPole-v1", "ppo_graph_compile"),
    ("JobShop-v0", "ppo_graph_compile"),
]
DRY = [("PoissonGraph-v0", "ppo_graph"), ("GraphExplore-v0", "ppo_lstm_sparse")]
UPDATES = dict(warmup=3, plain=3, watched=1)


def figures(noted: dict) -> dict:
    """What the table shows of the sums that child.py notes."""
    phases, steps = noted["phases"], noted["steps"]
    minibatches = noted["minibatches"] or noted["expected_minibatches"]
    collection, update = phases["collection"], phases["update"]
    total = lambda name: sum(sums[name] for sums in phases.values())
    # us of the watched updates, had they not been watched
    plain = 1e6 * noted["plain_seconds"] / noted["plain_steps"] * noted["watched_steps"]
    rest = sum(phases[name]["waits"] for name in ("advantages", "between")) / noted["updates"]
    return {
        "bytes to the device per step": collection["to_device_bytes"] / steps,
        "copies per step": collection["to_device_copies"] / steps,
        "waits per step": collection["waits"] / steps,
        "launches per step": collection["launches"] / steps,
        "bytes to the device per minibatch": update["to_device_bytes"] / minibatches,
        "copies per minibatch": update["to_device_copies"] / minibatches,
        "waits per minibatch": update["waits"] / minibatches,
        "launches per minibatch": update["launches"] / minibatches,
        "other waits per update": rest,
        "waiting, % of the time": 100 * total("wait_ms") / (noted["trace_us"] / 1000),
        "device busy, % (profiled)": 100 * noted["busy_us"] / noted["trace_us"],
        "device busy, %": 100 * noted["busy_us"] / plain,
        "SPS": noted["plain_steps"] / noted["plain_seconds"],
        "_noted": noted,
    }


def profile(case: Case, args: kit.Args, deadline: float) -> dict:
    throughput.needed(case)
    log = Path(args.out) / "logs" / f"profile_{case.task}_{case.script}.txt"
    with tempfile.TemporaryDirectory() as run_dir:
        flags = [*case.flags, "--run-dir", run_dir, *(["--no-cuda"] if args.dry else [])]
        updates = UPDATES | (dict(warmup=1, plain=1) if args.dry else {})
        if case.script == "ppo_graph_compile":  # a CUDA graph per size of batches
            updates |= dict(warmup=20)
        noted = kit.from_child(args, "profile", case.script, flags, log, deadline, **updates)
    if not args.dry and not noted["device_events"]:
        raise NotHere("torch.profiler's trace has nothing of the device (is CUPTI there?)")
    noted |= {"updates": updates["watched"], "expected_minibatches": updates["watched"] * 16}
    return figures(noted)


def all_rows(part: str, args: kit.Args) -> list[Row]:
    rows = []
    for task, script in DRY if args.dry else CASES:
        num_envs, num_steps = (4, 16) if args.dry else (256, 32)
        num_workers = 0 if args.dry or not TASKS[task].workers else max(kit.num_cpus() - 2, 0)
        case = Case(task, script, num_envs, num_steps, num_workers)
        key = {"environment": task, "script": f"{script}.py", "workers": num_workers}
        title = f"{num_envs} environments, rollouts of {num_steps} steps, 4 epochs of 4 minibatches"
        measure = functools.partial(profile, case, args)
        rows.append(Row(title, key, measure, 5 if args.dry else 45))
    return rows


NOTES = """A step is one of all environments: the observations go to the device, the actions come
back. Bytes, copies, waits (cudaStreamSynchronize, cudaDeviceSynchronize, cudaEventSynchronize,
cudaMemcpy) and launches (a CUDA graph is one) are those of torch.profiler's trace of one update.
The profiler slows the host, so the device is busy for a smaller share of that time than of an
update without it: "device busy, %" is the device's time in the trace by the time that updates took
before the profiler was started."""


def run(part: str, args: kit.Args, deadline: float) -> int:
    results = kit.Results(
        args, part, "Copies, waits, and how busy the GPU is", NOTES, kit.machine(args)
    )
    return kit.measure(results, all_rows(part, args), args, deadline)
