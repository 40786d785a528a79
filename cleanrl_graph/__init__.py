"""Single-file PPO for observations whose size changes: graphs, sets, ..."""

from typing import Any

__version__ = "2.0.0"


def __getattr__(name: str) -> Any:
    """`load_policy`, which is imported when it is asked for: it needs torch."""
    if name != "load_policy":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from cleanrl_graph.services.policy import load_policy

    return load_policy
