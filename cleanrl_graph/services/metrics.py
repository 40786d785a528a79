"""cleanrl_graph, an environment's own numbers of an episode: info["metrics"], a dict of name and
number, and info["is_success"], at its last step."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from cleanrl_graph.envs.fitting import say

# Columns of a run's files and tables, and what else is logged as charts/NAME
TAKEN = re.compile(
    "(step|seconds|return|length|group|task|episode|instance|best_known|lower_bound|cut|gap|took|"
    "greedy|SPS|learning_rate|obs_bytes_per_step|padding_avoided|)$|"
    "(best of |sampled |episodic_|eval/|rows/)"
)


def number_of(value: Any) -> float | None:
    """A finite number, or NaN, of any kind, or an array of one; None for anything else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(np.ravel(value).item())
    except Exception:  # of many kinds
        return None
    return None if np.isinf(number) else number


def own_metrics(info: dict) -> dict:
    """An info without "metrics" if that is no dict of names, which is said: an environment means
    something else by it."""
    metrics = info.get("metrics", {})
    if isinstance(metrics, dict) and all(isinstance(name, str) for name in metrics):
        return info
    say(f"info['metrics'] is left out: it is no metrics but {type(metrics).__name__}")
    return {name: value for name, value in info.items() if name != "metrics"}


def wrong_metrics(info: dict, before: set[str] | None) -> Iterator[str]:
    """What is wrong with them; `before` are the names in an episode before, None if there was
    none."""
    metrics = info.get("metrics", {})
    for name, value in metrics.items():
        if TAKEN.match(name) or name in info.get("eval", {}):
            yield f"info['metrics'] has the name {name!r}, which is taken: choose another"
        if number_of(value) is None:
            yield f"info['metrics'] has {name!r}: {value!r}, which is no finite number"
    if before is not None and before != set(metrics):
        names = f"the names {sorted(metrics)}, in an episode before {sorted(before)}"
        advice = "give all at the end of each episode, math.nan where there is no value"
        yield f"info['metrics'] has {names}: {advice}"
    success = info.get("is_success")
    if success is not None and number_of(success) is None:
        yield f"info['is_success'] is {success!r}, not True or False"


def metrics_of(info: dict) -> dict[str, float]:
    """Both as numbers; NaN where there is no value."""
    metrics = {name: number_of(value) for name, value in info.get("metrics", {}).items()}
    if info.get("is_success") is not None:
        metrics = {"is_success": number_of(info["is_success"])} | metrics
    return metrics
