"""cleanrl_graph, exact resume: random states, and a process in which copies of environments repeat
steps of their originals. It has nothing of the run: not what environments keep in their classes or
modules.

checkpoint.py starts it. It reads two pickles from stdin, sys.path and trials, and writes to stdout
why copies are not like their originals, in JSON, a line for each. It does not import torch, which
takes longer than the trials.
"""

import faulthandler
import json
import os
import pickle
import random
import sys
from typing import Any

import cloudpickle
import numpy as np

NAMES = ("observation", "info['rewards']", "reward", "terminated", "truncated")  # are compared
LIMIT = 300  # seconds for a trial


def random_state() -> dict:
    """The state of the global random generators, CUDA's only where this process uses CUDA."""
    torch = sys.modules["torch"]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict) -> None:
    """Puts back what `random_state` returned: torch's only where this process has imported it,
    CUDA's only if the number of devices is the same."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch = sys.modules.get("torch")
    if torch:
        torch.set_rng_state(torch.as_tensor(state["torch"]))
        if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])


def bits(value: Any) -> Any:
    """Nested values as what == compares bit by bit: dtypes and shapes count, and NaN is NaN."""
    if isinstance(value, (tuple, list)):
        return [bits(child) for child in value]
    if isinstance(value, dict):
        return {k: bits(child) for k, child in value.items()}
    array = np.asarray(value)
    if array.dtype.hasobject:
        return repr(array.tolist())
    return array.dtype, array.shape, array.tobytes()


def noted(results: tuple) -> list:
    """What `reset` or `step` returned, as it is compared, in the order of NAMES."""
    info = results[-1]
    rewards = info.get("rewards") if info else None
    return bits([results[0], rewards] + list(results[1:-1]))


def attempt(data: bytes, calls: list[tuple]) -> str | None:
    """Why an environment loaded from `data` does not do what its original did, None if it does. A
    call is (method, args, kwargs, random state before it, what is noted of its results)."""
    doing = "load"
    try:
        env = cloudpickle.loads(data)
        for doing, args, kwargs, state, expected in calls:
            set_random_state(state)
            results = noted(getattr(env, doing)(*args, **kwargs))
            differ = [name for name, a, b in zip(NAMES, results, expected) if a != b]
            if differ:
                return f"a copy returns another {' and '.join(differ)} in the next {doing}"
    except (Exception, SystemExit) as error:
        return f"a copy fails in the next {doing}: {type(error).__name__}: {error}"
    return None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", 1)
    os.dup2(2, 1)  # what environments print is no answer
    sys.path[:] = pickle.load(sys.stdin.buffer)
    for data, calls in pickle.load(sys.stdin.buffer):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        answers.write(json.dumps(attempt(data, calls)) + "\n")


if __name__ == "__main__":
    main()
