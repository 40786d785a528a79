"""Where the host waits for the device in a training, for benchmark/gpu.sh.

    python benchmark/gpu/waits.py FILE WARMUP ppo_graph --env-id CartPole-v1 ...

After WARMUP updates it watches three, and ends. FILE receives, as json: places in the code and how
often the host waited there, the largest difference of collection and training, and the seconds
until the first update had ended.
"""

import importlib
import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch  # noqa: E402

from cleanrl_graph import services  # noqa: E402
from cleanrl_graph.services.arguments import parse  # noqa: E402

WATCHED = 3  # updates


class Enough(SystemExit):
    """The training has shown what is asked for."""


def main(result: str, warmup: str, name: str, *flags: str) -> None:
    script = importlib.import_module(f"cleanrl_graph.{name}")
    noted = {"updates": WATCHED, "mismatch": 0.0, "places": {}}
    times = []
    start = time.perf_counter()
    end_update = script.Run.end_update

    def note(message, category, filename, lineno, file=None, line=None) -> None:
        if "synchronizing CUDA operation" in str(message):
            place = f"{Path(filename).name}:{lineno}"
            noted["places"][place] = noted["places"].get(place, 0) + 1

    def watched(self, global_step: int, step, scalars: dict, episodes: list) -> None:
        end_update(self, global_step, step, scalars, episodes)
        times.append(time.perf_counter() - start)
        noted["mismatch"] = max(noted["mismatch"], float(scalars["debug/collection_mismatch"]))
        if torch.cuda.is_initialized() and len(times) == int(warmup):
            torch.cuda.set_sync_debug_mode("warn")
        if len(times) == int(warmup) + WATCHED:
            raise Enough(0)

    script.Run.end_update = watched
    sys.argv = [script.__file__, *flags]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            services.run(script, parse(script))
        except Enough:
            pass
    Path(result).write_text(json.dumps(noted | {"first": times[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
