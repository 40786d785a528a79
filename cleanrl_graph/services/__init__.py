"""What surrounds a training: checks, checkpoints, workers, evaluation tables, wandb. A script hands
itself over in its last lines and knows nothing of them."""

import importlib
from types import ModuleType
from typing import Any

MODULES = {"main": "command", "run": "command", "load_policy": "policy"}


def __getattr__(name: str) -> Any:
    """What this package exports is imported when it is asked for: its modules import each other,
    and `python -m cleanrl_graph.services.sweep` needs few of them."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def import_first(*names: str) -> ModuleType | None:
    """The first of these modules that there is, None for none."""
    for name in filter(None, names):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports what is not installed
    return None
