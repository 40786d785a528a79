"""Parts of benchmark/gpu.sh, which starts each with a time limit, and in a dry run all of them in
one process.

    python benchmark/gpu/part.py sps --out DIR [--dry] [--minutes 7] [--only REGEX] \
        [--peers DIR] [--commit NAME]

Exit code: 0 all rows are there, 1 a row failed, 2 it cannot run here, 3 time was up with rows left.
"""

import importlib
import sys
import time
import traceback
from typing import Annotated, Literal

import kit
import tyro

PARTS = ("checks", "tests", "sps", "profile", "kernels", "jobshop", "recall", "minigrid")
MODULES = {"checks": "checks", "tests": "cuda_tests", "sps": "throughput"}
MODULES |= {"profile": "transfers", "kernels": "kernel_times"}
REFUSED = 2


def module_of(part: str):
    """The module whose run(part, args, deadline) measures what DIR does not hold yet, and returns
    the exit code."""
    return importlib.import_module(MODULES.get(part, "trainings"))


def main(
    parts: Annotated[tuple[Literal[PARTS], ...], tyro.conf.Positional],
    args: Annotated[kit.Args, tyro.conf.arg(name="")],
) -> int:
    """Measures what DIR does not hold yet."""
    try:
        kit.check(args)
    except SystemExit as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    codes = []
    if args.dry:
        kit.torch.set_num_threads(1)
    for part in parts:
        start = time.monotonic()
        try:
            codes.append(module_of(part).run(part, args, start + 60 * args.minutes))
        except SystemExit as refusal:  # what is in DIR does not fit
            print(refusal, file=sys.stderr)
            codes.append(kit.FAILED)
        except Exception:
            traceback.print_exc()
            codes.append(kit.FAILED)
        print(f"{part}: exit code {codes[-1]} after {time.monotonic() - start:.0f} s", flush=True)
    return kit.FAILED if kit.FAILED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
