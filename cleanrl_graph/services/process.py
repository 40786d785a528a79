"""cleanrl_graph, what a person sees of a process: a bar, or lines where stderr is no terminal, and
files that are there whole or not at all. A sweep, which only starts processes, needs this without
torch."""

import atexit
import contextlib
import gc
import inspect
import math
import os
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from tqdm import tqdm


@cache
def tune() -> None:
    """A process that ends is not searched for garbage, which takes long where much was imported,
    and one that trains does not import torch's compiler before it compiles something."""
    import torch

    atexit.register(gc.freeze)
    # torch marks these methods of an optimizer as not to be compiled. The first call imports the
    # compiler, for a second or more, to make what is called from then on, unless that is there
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if "torch._dynamo" not in sys.modules:
            method.__dynamo_disable = method


def step_without_compiler(optimizer: Any) -> None:
    """Has one of torch's optimizers step without the decorator `_use_grad`, which imports the
    compiler, to tell it that it must not compile steps through which gradients flow. Hooks are
    called as before."""
    import torch

    decorated = getattr(type(optimizer).step, "__wrapped__", None)  # inside of what calls hooks
    code = getattr(decorated, "__code__", None)
    if code and code.co_name == "_use_grad" and "torch._dynamo" not in sys.modules:
        step = torch.no_grad()(decorated.__wrapped__)
        optimizer.step = partial(optimizer.profile_hook_step(step), optimizer)


def default_generator(device: Any) -> Any:
    """The generator from which torch draws on this device, unless it is given another one."""
    import torch

    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


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


def bar(**kwargs) -> tqdm:
    """tqdm's, where there is no terminal in lines of a Log; none where there is nothing to do."""
    if not sys.stderr.isatty():
        kwargs["file"] = Log()
    return tqdm(disable=kwargs["total"] == 0, **kwargs)


def accelerate(agent: Any) -> None:
    """Puts faster layers in the place of those of PyG; parameters and results stay the same."""
    if "torch_geometric" in sys.modules:  # else there are none: importing it takes two seconds
        from cleanrl_graph.services import layers

        layers.accelerate(agent)
