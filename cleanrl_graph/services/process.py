"""cleanrl_graph, the process of a run: what makes it faster and changes no result."""

import atexit
import contextlib
import ctypes
import gc
import math
import os
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

from cleanrl_graph.services.check import UsageError

M_TRIM_THRESHOLD = -1  # numbers of mallopt's parameters in glibc's malloc.h
M_MMAP_THRESHOLD = -3


@cache
def tune() -> None:
    """Keeps the memory of large tensors for the next ones, since new pages of the system are slow;
    and a process that ends is not searched for garbage."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # where there is no glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
    atexit.register(gc.freeze)


@contextlib.contextmanager
def whole(path: Any) -> Iterator[str]:
    """Where to write a file that takes its place at the end, whole or not at all. SystemExit if it
    cannot be written."""
    unfinished = f"{path}.tmp"
    try:
        yield unfinished
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: of torch
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise SystemExit(f"cannot write {path}: {error}") from None


class Log:
    """stderr where it is no terminal: of a bar a line at most every ten seconds, and the last."""

    written = -math.inf
    text = ""

    def write(self, text: str) -> None:
        is_last = text == "\n"
        self.text = text.strip() or self.text
        if self.text and (is_last or time.monotonic() - self.written >= 10):
            print(self.text, file=sys.stderr, flush=True)
            self.written = time.monotonic()
            self.text = ""

    def flush(self) -> None:
        """The line is out."""


def bar(kind: type, **kwargs) -> Any:
    """A bar of a `kind` such as tqdm, or lines of a Log; none where there is nothing to do."""
    if not sys.stderr.isatty():
        kwargs["file"] = Log()
    return kind(disable=kwargs["total"] == 0, **kwargs)


@contextlib.contextmanager
def patched(script: ModuleType) -> Iterator[None]:
    """Meanwhile the script's make_conv makes faster layers, where there are any, its tqdm is `bar`,
    and its UsageError is that of the services: it catches theirs, too."""
    before = {name: vars(script).get(name) for name in ("make_conv", "UsageError", "tqdm")}

    def make_faster(*args) -> Any:
        conv = before["make_conv"](*args)
        from cleanrl_graph.services import layers  # imports PyG: two seconds, for graphs only

        layers.accelerate(conv)
        return conv

    own = {"make_conv": make_faster, "tqdm": partial(bar, before["tqdm"])}
    vars(script).update(own, UsageError=UsageError)
    try:
        yield
    finally:
        vars(script).update(before)
