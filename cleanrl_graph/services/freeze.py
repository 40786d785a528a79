"""cleanrl_graph, --freeze: parts of the agent that a training leaves as they are. Their weights get
no gradient, so the optimizer skips them, and they are in evaluation mode: statistics of --norm-obs
or of batch norm stay, and there is no dropout."""

from collections.abc import Iterable, Iterator

import torch

from cleanrl_graph.services.check import UsageError


def split(names: Iterable[str] | str) -> list[str]:
    """The names in "encoder,actor", or in a list of such texts."""
    texts = [names] if isinstance(names, str) else names
    found = [name.strip() for text in texts for name in text.split(",")]
    return [name for name in found if name]


def freeze(agent: torch.nn.Module, names: Iterable[str] | str) -> Iterator[str]:
    """Freezes the parts with these names, as print(agent) shows them, a path with dots; a weight is
    one, too. Yields a line that says how much. UsageError for one that does not exist, or if
    nothing is left to train."""
    names = split(names)
    if not names:
        return
    params = dict(agent.named_parameters())
    modules = dict(agent.named_modules())
    for name in names:
        inside = [path for path in params if f"{path}.".startswith(f"{name}.")]
        if not inside:
            raise UsageError(f"--freeze {name}: {missing(name, list(params))}")
        for path in inside:
            params[path].requires_grad_(False)
        if name in modules:
            modules[name].eval()
    num = sum(param.numel() for param in params.values())
    frozen = sum(param.numel() for param in params.values() if not param.requires_grad)
    if frozen == num:
        raise UsageError(f"--freeze {' '.join(names)}: these are all weights, nothing is trained")
    yield f"frozen: {', '.join(names)}: {frozen:,} of {num:,} parameters"


def missing(name: str, paths: list[str]) -> str:
    """Which parts there are instead, as far as the name is right."""
    owner, _, _ = name.rpartition(".")
    first = f"{owner}." * bool(owner)
    inside = [path for path in paths if path.startswith(first)]
    if not inside:
        return missing(owner, paths)
    parts = dict.fromkeys(first + path.removeprefix(first).split(".")[0] for path in inside)
    return f"there is no such part with weights; there are {', '.join(parts)}"
