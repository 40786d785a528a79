"""A training in a process of its own, and what benchmark/gpu.sh wants to know about it.

    python benchmark/gpu/training.py '{"mode": "sps", "result": "FILE", "seconds": 5}' \
        ppo_graph --env-id CartPole-v1 ...

mode "sps" notes when updates end and stops `seconds` after the first one; "waits" notes where the
host waits for the device in `watched` updates after `warmup` others; "profile" makes `warmup`
updates, times `plain` ones and has torch.profiler watch `watched` ones. FILE receives what was
noted, as json. The scripts are not changed: their `Run.end_update` is watched,
and for a profile the calls of Envs.step, Storage.append, Storage.gather and Adam.step get names.
"""

import functools
import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from cleanrl_graph import services  # noqa: E402
from cleanrl_graph.services import workers  # noqa: E402
from cleanrl_graph.services.arguments import parse  # noqa: E402

MARK = "gpu.sh: "  # of the names that are put around calls
WAITS = """cudaStreamSynchronize cudaDeviceSynchronize cudaEventSynchronize cudaMemcpy
    cuStreamSynchronize cuCtxSynchronize cuEventSynchronize""".split()
LAUNCHES = """cudaLaunchKernel cudaLaunchKernelExC cuLaunchKernel cuLaunchKernelEx
    cudaGraphLaunch""".split()
PHASES = ("collection", "advantages", "update", "between")
SUMS = "to_device_bytes to_device_copies waits wait_ms launches".split()


class Enough(SystemExit):
    """The training has shown what is asked for."""


def run_script(script, flags: list[str], after: Callable) -> None:
    """As `python script.py flags` does; after each update `after` gets the steps so far and the
    logged scalars. The training ends where it raises Enough."""
    end_update = script.Run.end_update

    def watched(self, global_step: int, step, scalars: dict, episodes: list) -> None:
        end_update(self, global_step, step, scalars, episodes)
        after(global_step, scalars)

    script.Run.end_update = watched
    sys.argv = [script.__file__, *flags]
    try:
        services.run(script, parse(script))
    except Enough:
        pass


def sps(script, flags: list[str], seconds: float) -> dict:
    """When updates ended."""
    updates, start = [], time.perf_counter()

    def after(step: int, scalars: dict) -> None:
        updates.append((step, time.perf_counter() - start))
        if len(updates) > 3 and updates[-1][1] - updates[0][1] >= seconds:
            raise Enough(0)

    run_script(script, flags, after)
    gb = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0
    return {"updates": updates, "gpu_gb": gb}


def waits(script, flags: list[str], warmup: int, watched: int) -> dict:
    """Where the host waits for the device, and the largest difference of collection and
    training."""
    noted = {"updates": watched, "mismatch": 0.0, "places": {}}
    times, start = [], time.perf_counter()

    def note(message, category, filename, lineno, file=None, line=None) -> None:
        if "synchronizing CUDA operation" in str(message):
            place = f"{Path(filename).name}:{lineno}"
            noted["places"][place] = noted["places"].get(place, 0) + 1

    def after(step: int, scalars: dict) -> None:
        times.append(time.perf_counter() - start)
        noted["mismatch"] = max(noted["mismatch"], float(scalars["debug/collection_mismatch"]))
        if torch.cuda.is_initialized() and len(times) == warmup:
            torch.cuda.set_sync_debug_mode("warn")
        if len(times) == warmup + watched:
            raise Enough(0)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        run_script(script, flags, after)
    return noted | {"first": times[0]}


# ---- torch.profiler ----
def named(function: Callable, name: str) -> Callable:
    """`function`, which the trace shows under this name."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with record_function(MARK + name):
            return function(*args, **kwargs)

    return call


def profiled(script, flags: list[str], warmup: int, plain: int, watched: int) -> dict:
    """`summary` of the watched updates, and the seconds and steps of the plain ones."""
    for owner, method, name in (
        (script.Envs, "step", "step"),
        (workers.WorkerEnvs, "step", "step"),
        (script.Storage, "append", "append"),
        (script.Storage, "gather", "gather"),
        (torch.optim.Adam, "step", "optimizer"),
    ):
        setattr(owner, method, named(getattr(owner, method), name))
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler, times = profile(activities=[ProfilerActivity.CPU, *cuda]), []

    def after(step: int, scalars: dict) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((step, time.perf_counter()))
        if len(times) == warmup + plain:
            profiler.start()
        if len(times) == warmup + plain + watched:
            profiler.stop()
            raise Enough(0)

    run_script(script, flags, after)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(path := os.path.join(folder, "trace.json"))
        noted = summary(json.loads(Path(path).read_text())["traceEvents"])
    first, second, last = times[warmup - 1], times[warmup + plain - 1], times[-1]
    return noted | {
        "updates": watched,
        "plain_seconds": second[1] - first[1],
        "plain_steps": second[0] - first[0],
        "watched_steps": last[0] - second[0],
    }


def union(intervals: list[tuple[float, float]]) -> float:
    """The length of what intervals (begin, end) cover."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def phase_at(marks: list[tuple[float, str]]) -> Callable[[float], str]:
    """The phase of a time on the host, told by the named calls that began before and after it."""
    times, names = [begin for begin, _ in marks], [name for _, name in marks]

    def phase(time: float) -> str:
        k = bisect_right(times, time)
        before, after = names[k - 1] if k else None, names[k] if k < len(names) else None
        # Values and advantages come after the last observations were appended
        if after in ("gather", "optimizer"):
            return "advantages" if before in ("append", "step") else "update"
        if after == "step" or after == "append" and before in ("append", "step"):
            return "collection"
        return "between"  # the last minibatch's end, logs, checkpoint, what begins a rollout

    return phase


def summary(events: list[dict]) -> dict:
    """Sums of a chrome trace of torch.profiler, by phase: bytes and copies to the device, waits of
    the host and their milliseconds, launches; and the numbers of steps and minibatches, the
    microseconds in which the device was busy, and those of the whole."""
    events = [event for event in events if event.get("ph") == "X"]
    # a user's annotation appears once for the host, and where there is a device once more for it
    marks = sorted(
        (e["ts"], e["name"].removeprefix(MARK))
        for e in events
        if e["name"].startswith(MARK) and e.get("cat") in ("user_annotation", "cpu_op")
    )
    phase, launched = phase_at(marks), {}
    phases = {name: dict.fromkeys(SUMS, 0) for name in PHASES}
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        sums = phases[phase(event["ts"])]
        launched[event.get("args", {}).get("correlation")] = event["ts"]
        sums["launches"] += event["name"] in LAUNCHES
        if event["name"] in WAITS:
            sums["waits"] += 1
            sums["wait_ms"] += event.get("dur", 0) / 1000
    busy = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        busy.append((event["ts"], event["ts"] + event.get("dur", 0)))
        if event["cat"] == "gpu_memcpy" and "HtoD" in event["name"]:
            details = event.get("args", {})  # its phase is that in which the host asked for it
            sums = phases[phase(launched.get(details.get("correlation"), event["ts"]))]
            sums["to_device_copies"] += 1
            sums["to_device_bytes"] += int(details.get("bytes", 0))
    spans = [(e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("cat") != "Trace"]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    names = [name for _, name in marks]
    return {
        "phases": phases,
        "steps": names.count("step"),
        "minibatches": names.count("optimizer"),
        "busy_us": union(busy),
        "device_events": len(busy),
        "trace_us": whole,
    }


def main(arguments: list[str]) -> None:
    settings, name, *flags = arguments
    settings = json.loads(settings)
    mode, result = settings.pop("mode"), Path(settings.pop("result"))
    script = importlib.import_module(f"cleanrl_graph.{name}")
    watch = {"sps": sps, "waits": waits, "profile": profiled}[mode]
    result.write_text(json.dumps(watch(script, flags, **settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
