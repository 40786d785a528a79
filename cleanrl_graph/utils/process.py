"""cleanrl_graph, the process of a run: what makes it faster and changes no result."""

import atexit
import contextlib
import ctypes
import gc
from functools import cache

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
