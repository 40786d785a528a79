"""Services beside the training; a script imports one where a flag asks for it, and none of them
imports a script."""

import importlib
from types import ModuleType


def import_first(*names: str) -> ModuleType | None:
    """The first of these modules that there is, None for none."""
    for name in filter(None, names):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports what is not installed
    return None
