"""cleanrl_graph, how a run understood the spaces: a few lines before its bar, and a warning where
that is probably not what was meant."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from cleanrl_graph.envs import fitting
from cleanrl_graph.services.check import DISCRETE, for_policy
from cleanrl_graph.services.checkpoint import world_size

MOST = 12  # inputs, or parts of an action, that are named
# Options of one of several fixed lists, or of a row's; where there are more they are probably rows
LONG = 50
ROWS = {"nodes": "nodes", "edge_links": "edges"}  # what the rows of a group are, by its last word


def lines(script: ModuleType, args: Any, agent: torch.nn.Module, envs: Any) -> Iterator[str]:
    """What enters, what acts, and the network; then a warning."""
    leaves = envs.leaves
    seen = for_policy(leaves, args)
    parts = script.parts_of(envs.action_space, seen, args)
    inputs = [text_of(leaf, leaf.group) for leaf in leaves if leaf.is_input]
    yield f"inputs: {listed(inputs, ', ')}"
    for leaf in leaves:
        if leaf.path == "node_ids":
            yield f"no input: {text_of(leaf, leaf.group)}, by which a memory knows a row again"
    spaces = {leaf.path: leaf.space for leaf in script.leaves_of(envs.action_space, "action")}
    texts = list(factors(parts, spaces, leaves))
    action = listed(texts, "; ")
    if len(parts) > 1:
        how = "each knows those before it" if args.autoregressive else "drawn independently"
        action = f"{action}; {how}"
    yield f"action: {action}"
    num = sum(param.numel() for param in agent.parameters())
    ranks = f", {world_size()} ranks" * (world_size() > 1)
    yield f"network: {num:,} parameters on {next(agent.parameters()).device}{ranks}"
    if args.action_head == "auto":
        yield from doubts(parts, leaves)


def listed(texts: list[str], between: str) -> str:
    more = f"{between}and {len(texts) - MOST} more" * (len(texts) > MOST)
    return between.join(texts[:MOST]) + more


def text_of(leaf: Any, group: str) -> str:
    """A leaf with its shape and dtype, "graph.nodes [nodes, 3] float32", or its categories. It has
    a row for each of a `group`."""
    shape = list(map(str, leaf.space.shape))
    if group:
        shape.insert(0, ROWS.get(group.split(".")[-1], "rows"))
    kind = leaf.space.dtype
    if isinstance(leaf.space, DISCRETE) and not leaf.is_links:
        kind = fitting.name_of(leaf.space)
    text = f"{leaf.path} [{', '.join(shape)}] {kind}"
    return text.replace(" []", "") + " (image)" * leaf.is_image


def range_of(space: Any) -> str:
    """What the numbers of a Box may be."""
    if not np.isfinite([space.low, space.high]).all():
        return ", not scaled where a bound is infinite"
    low, high = np.unique(space.low), np.unique(space.high)
    if len(low) == len(high) == 1:
        return f" from {low[0]:.4g} to {high[0]:.4g}"
    return " between their bounds"


def factors(parts: list, spaces: dict[str, Any], leaves: list) -> Iterator[str]:
    """What each factor of an action, which has one of the paths in `spaces`, is."""
    by_path = {}
    for part in parts:  # of a MultiDiscrete each has the number of its entry behind the path
        path = part.path if part.path in spaces else part.path.rpartition(".")[0]
        by_path.setdefault(path, []).append(part)
    for path, own in by_path.items():
        part = own[0]
        sizes = [str(each.n) for each in own] * part.k
        if part.group is not None:
            text = f"choice of a row of {part.group}" + f", {len(own)} times" * (len(own) > 1)
        elif part.n == 0:
            text = f"{part.k} number{'s' * (part.k > 1)}{range_of(spaces[path])}"
        elif len(sizes) == 1:
            text = f"a fixed list of {part.n} options"
        else:
            text = f"{len(sizes)} fixed lists, of "
            if len(set(sizes)) == 1:
                sizes = sizes[:1]
            text += f"{listed(sizes, ', ')} options"
        masks = {each.mask: each.given for each in own}
        for leaf in leaves:
            if leaf.path in masks:
                rows = leaf.is_ragged and (part.group or part.rows or leaf.group)
                text += f", masked by {text_of(leaf, rows)}"
                if masks[leaf.path]:
                    text += ", for each value of the part before"
        each = f"for each row of {part.rows} " * part.is_per_row
        name = path.removeprefix("action").removeprefix(".")
        yield f"{name}: {each}{text}".removeprefix(": ")


def doubts(parts: list, leaves: list) -> Iterator[str]:
    """A warning for a fixed list of options beside rows of which none is chosen. A mask of the
    list's own name says that it is meant, and so does any mask of a list that each row has. Several
    short lists, as of a MultiDiscrete, are usual."""
    groups = []
    for leaf in leaves:
        if leaf.is_input and leaf.is_ragged and not leaf.is_links and leaf.space != fitting.WORD:
            groups.append(leaf.group)
    mask = ""  # what is said about it
    lists = []
    for part in parts:
        has_mask = part.mask is not None
        if part.group is not None or has_mask and part.mask.startswith("action_mask."):
            return
        if part.is_per_row and has_mask:
            continue
        if (part.is_per_row or len(parts) > 1) and part.n <= LONG:
            continue
        if part.k == 1 and part.n > 0:
            lists.append(part)
        if has_mask and len(parts) == 1:
            mask = f", and {part.mask} has {part.n} entries whatever the number of rows is"
    if not groups or not lists:
        return
    acting = lists[0].rows
    others = [group for group in groups if group != acting] or groups
    first = others[0]
    name = "entry " * first[0].isdecimal() + first  # of a Tuple
    if not lists[0].is_per_row:
        head = "nodes" * (len(set(groups)) == 1) or first
        yield (
            f"warning: the action is one of a fixed list{mask}; if it should be a row of '{name}', "
            f"give --action-head {head}; if not, --action-head flat says so"
        )
    else:
        yield (
            f"warning: each row of {acting} chooses from a fixed list of {lists[0].n} options; if "
            f"it should choose a row of '{name}', call that part of the action "
            f"'{first.removesuffix('.nodes')}'; if not, --action-head {acting} says so"
        )
