"""cleanrl_graph, what an environment says of an episode in the info of its last step: the name of
its "group", its costs in "eval", its own numbers in "metrics", and "is_success"."""

import re
from collections.abc import Hashable, Iterator
from typing import Any

from cleanrl_graph.envs.fitting import say

NAMES = ("group", "eval", "metrics", "is_success")
LARGEST = 3e38  # a bit less than the largest float32, 3.4e38
# Columns of a run's files and tables, and what else is logged as charts/NAME
TAKEN = re.compile(
    "(step|seconds|return|length|group|task|episode|instance|best_known|lower_bound|cut|gap|took|"
    "greedy|SPS|learning_rate|obs_bytes_per_step|padding_avoided|)$|"
    "(best of |sampled |episodic_|eval/|rows/)"
)
COLUMNS = re.compile("(instance|greedy|cut)$|best of ")  # of an evaluation, beside costs


def number_of(value: Any, nan: bool = False) -> float | None:
    """A finite number, or an array of one, of any kind, or with `nan` NaN; None for anything
    else."""
    try:
        number = value.item() if hasattr(value, "item") else value
        is_number = isinstance(number, (bool, int, float)) and abs(number) < LARGEST
        return number if is_number or nan and number != number else None
    except (ValueError, RuntimeError):  # of several
        return None


def said_in(info: dict) -> dict:
    """What an info has of NAMES. What an environment means otherwise by these words is left out,
    which is said."""
    found = {name: info[name] for name in NAMES if info.get(name) is not None}
    for name, value in list(found.items()):
        is_ours = True
        if name == "group":
            is_ours = isinstance(value, Hashable) and not callable(value)
        elif name != "is_success":
            is_ours = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if not is_ours:
            say(f"info['{name}'] is left out: it is no {name} but {type(value).__name__}")
            del found[name]
    return found


def wrong(said: dict) -> Iterator[str]:
    """What is wrong with what is said."""
    costs = said.get("eval", {})
    for name in filter(COLUMNS.match, costs):
        yield f"info['eval'] has the name {name!r}, a column of the evaluation's own"
    if number_of(costs.get("cost", 0)) is None:
        yield f"{costs['cost']!r} in info['eval'] is not a finite number"
    metrics = said.get("metrics", {})
    for name, value in metrics.items():
        if TAKEN.match(name) or name in costs:
            yield f"info['metrics'] has the name {name!r}, which is taken: choose another"
        if number_of(value, nan=True) is None:
            yield f"info['metrics'] has {name!r}: {value!r}: no finite number, nor NaN"
    if number_of(said.get("is_success", 0), nan=True) is None:
        yield f"info['is_success'] is {said['is_success']!r}, not True, False or NaN"


def report_of(said: dict) -> dict:
    """Group and costs; all numbers, with is_success, under "metrics"; NaN where there is none."""
    report = {name: said[name] for name in ("group", "eval") if name in said}
    numbers = {name: said[name] for name in ("is_success",) if name in said}
    numbers |= said.get("metrics", {})
    if numbers:
        report["metrics"] = {name: float(number_of(x, nan=True)) for name, x in numbers.items()}
    return report
