"""A training in a process of its own, and what benchmark/gpu.sh wants to know about it.

    python benchmark/gpu/training.py '{"mode": "sps", "result": "FILE", "seconds": 5}' \
        ppo_graph --env-id CartPole-v1 ...

mode "sps" notes when updates end and stops `seconds` after the first one; "waits" notes where the
host waits for the device in `watched` updates after `warmup` others. FILE receives what was noted,
as json. The scripts are not changed: their `Run.end_update` is watched.
"""

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

import torch  # noqa: E402

from cleanrl_graph import services  # noqa: E402
from cleanrl_graph.services.arguments import parse  # noqa: E402


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


def main(arguments: list[str]) -> None:
    settings, name, *flags = arguments
    settings = json.loads(settings)
    mode, result = settings.pop("mode"), Path(settings.pop("result"))
    script = importlib.import_module(f"cleanrl_graph.{name}")
    watch = {"sps": sps, "waits": waits}[mode]
    result.write_text(json.dumps(watch(script, flags, **settings)))


if __name__ == "__main__":
    main(sys.argv[1:])
