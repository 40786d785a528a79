"""cleanrl_graph, masks of actions in the forms that the scripts read: the wrapper that services put
around an environment by themselves, inside of their checks.

    a mask of two parts together   one of the first part, 1 where any of the second is allowed, and
                                   one of the second, given the first (with --autoregressive)
    an entry for each bit          two: it may be 0, and whether it may be 1
    no entries for bits            two ones

What fits as it is, and what fits in no form, stays as it is: the scripts name the latter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from cleanrl_graph.envs.fitting import converted


class Form(NamedTuple):
    """How the entries [rows, width] of a mask become others: entry k is the old one entries[k], or
    1 where that is -1. With `names` they become two masks of the parts of these names, of which the
    first has `num` options."""

    entries: np.ndarray
    names: tuple[str, ...] = ()
    num: int = 0

    def masks(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Name, or "" -> mask int8 [rows, width]"""
        allowed = np.pad(values != 0, ((0, 0), (0, 1)), constant_values=True)
        allowed = allowed[:, self.entries].astype(np.int8)
        if self.names == ():
            return {"": allowed}
        width = len(self.entries) // self.num
        first = allowed.reshape(len(allowed), self.num, width).max(2)
        return dict(zip(self.names, (first, allowed)))


class CanonicalMasks(gym.ObservationWrapper):
    """The environment with masks as `script` reads them. `forms` are those of the leaves that are
    changed, by their paths."""

    def __init__(self, env: gym.Env, script: Any, args: Any):
        super().__init__(env)
        self.forms = {}
        space = env.observation_space
        if not isinstance(space, spaces.Dict) or "action_mask" not in space.keys():
            return
        try:
            leaves = script.leaves_of(space)
            others = []
            for leaf in leaves:
                if is_mask(leaf):  # is for no part; "auto" still sees that it has rows
                    leaf = leaf._replace(path="node_ids")
                others.append(leaf)
            parts = script.parts_of(env.action_space, others, args)
            factors = script.leaves_of(env.action_space, "action")
        except script.UsageError:  # the checks come to it
            return
        bits = {each.path for each in factors if isinstance(each.space, spaces.MultiBinary)}
        for leaf in filter(is_mask, leaves):
            form = form_of(leaf, parts, bits, args.autoregressive)
            if form:
                self.forms[leaf.path] = form
        mask = converted(space["action_mask"], "action_mask", self.space_of)
        self.observation_space = spaces.Dict(list({**space.spaces, "action_mask": mask}.items()))

    def observation(self, obs: Any) -> Any:
        """The observation with other masks. One of another size stays as it is, for the checks to
        name; gym.error.Error where it would become two."""
        if not self.forms or not isinstance(obs, Mapping) or "action_mask" not in obs:
            return obs
        space = self.env.observation_space["action_mask"]
        return {**obs, "action_mask": self.mask_of(space, obs["action_mask"], "action_mask")}

    def space_of(self, space: gym.Space, path: str) -> gym.Space:
        """The space of `mask_of`, which is no Dict or Tuple."""
        is_rows = isinstance(space, spaces.Sequence)
        row = space.feature_space if is_rows else space
        if isinstance(row, (spaces.Dict, spaces.Tuple)):
            return spaces.Sequence(converted(row, path, self.space_of), stack=space.stack)
        if path not in self.forms:
            return space
        ones = np.ones((1, width_of(row)))
        masks = {}
        for name, values in self.forms[path].masks(ones).items():
            masks[name] = spaces.MultiBinary(values.shape[1])
            if is_rows:
                masks[name] = spaces.Sequence(masks[name], stack=True)
        if "" in masks:
            return masks[""]
        return spaces.Dict(masks)

    def mask_of(self, space: gym.Space, mask: Any, path: str, is_stacked: bool = False) -> Any:
        """The mask in its form; `is_stacked`: its arrays have a row for each row of a Sequence."""
        if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
            changed = dict(mask)
            for k, own in space.items():
                if k in mask:
                    changed[k] = self.mask_of(own, mask[k], f"{path}.{k}", is_stacked)
            return changed
        if isinstance(space, spaces.Tuple):
            changed = []
            for k, (own, each) in enumerate(zip(space, mask)):
                changed.append(self.mask_of(own, each, f"{path}.{k}", is_stacked))
            return tuple(changed)
        if isinstance(space, spaces.Sequence):
            row = space.feature_space
            if not isinstance(row, (spaces.Dict, spaces.Tuple)):
                return self.leaf_of(row, mask, path, True)
            if space.stack:
                return self.mask_of(row, mask, path, True)
            return tuple(self.mask_of(row, own, path) for own in mask)
        return self.leaf_of(space, mask, path, is_stacked)

    def leaf_of(self, row: gym.Space, mask: Any, path: str, is_stacked: bool) -> Any:
        """The mask of one leaf, of which `row` is a row's space."""
        if path not in self.forms or isinstance(mask, Mapping):
            return mask
        width = width_of(row)
        values = np.asarray(mask)
        num = 1
        if is_stacked and values.ndim:
            num = len(values)
        if values.size != num * width:
            if self.forms[path].names == ():
                return mask
            raise gym.error.Error(f"'{path}' has the shape {values.shape}, not {row.shape}")
        masks = self.forms[path].masks(values.reshape(num, width))
        if not is_stacked:
            masks = {name: own[0] for name, own in masks.items()}
        return masks.get("", masks)


def width_of(row: gym.Space) -> int:
    """The number of a row's entries."""
    return int(np.prod(row.shape))


def is_mask(leaf: Any) -> bool:
    return leaf.path.split(".")[0] == "action_mask"


def form_of(leaf: Any, parts: list, bits: set[str], in_sequence: bool) -> Form | None:
    """The form of a mask for the action's `parts`, of which those with the paths `bits` are bits;
    None if scripts read it as it is."""
    path = leaf.path.replace("action_mask", "action", 1)
    named = []  # the parts that the mask is for
    own = []  # and that have as many rows, or none
    for part in parts:
        if part.n and f"{part.path}.".startswith(f"{path}."):
            named.append(part)
            if (part.is_per_row or part.group is not None) == leaf.is_ragged:
                own.append(part)
    width = width_of(leaf.space)
    if own == [] or width == 1 and own[0].group is not None:
        return None
    for per_bit in (2, 1, 0):
        entries = entries_of(own, bits, per_bit)
        if entries.max() + 1 == width:
            return None if per_bit == 2 else Form(entries)
    if in_sequence and len(named) == 2 and named[0] in own:
        return joint_form(path, width, parts, named)
    return None


def entries_of(own: list, bits: set[str], per_bit: int) -> np.ndarray:
    """Those of a Form for a mask of the parts `own` that has so many entries for each bit."""
    entries = []
    stop = 0
    for part in own:
        num = part.k * part.n
        if part.group is not None:
            num = 1
        numbers = np.arange(stop, stop + num)
        if part.path in bits and per_bit < 2:
            num = part.k * per_bit
            numbers = np.full((part.k, 2), -1)  # it may be 0
            if per_bit == 1:
                numbers[:, 1] = np.arange(stop, stop + num)
        stop += num
        entries.append(numbers.ravel())
    return np.concatenate(entries)


def joint_form(path: str, width: int, parts: list, named: list) -> Form | None:
    """The form of a mask of two parts together, None if it is no such mask."""
    before, part = named
    num = before.n if before.group is None else 1
    is_next = parts.index(part) == parts.index(before) + 1
    if not is_next or part.group is not None or before.k > 1 or width != num * part.k * part.n:
        return None
    names = [each.path.removeprefix(f"{path}.") for each in named]
    return Form(np.arange(width), tuple(names), num)
