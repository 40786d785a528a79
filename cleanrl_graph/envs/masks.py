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
        if not self.names:
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
            # As if no mask were for a part; "auto" still sees that one has rows
            others = [each._replace(path="node_ids") if is_mask(each) else each for each in leaves]
            parts = script.parts_of(env.action_space, others, args)
            factors = script.leaves_of(env.action_space, "action")
        except script.UsageError:  # the checks come to it
            return
        bits = {each.path for each in factors if isinstance(each.space, spaces.MultiBinary)}
        for leaf in filter(is_mask, leaves):
            form = form_of(leaf, parts, bits, args.autoregressive)
            if form:
                self.forms[leaf.path] = form
        mask = self.space_of(space["action_mask"], "action_mask")
        self.observation_space = spaces.Dict({**space.spaces, "action_mask": mask})

    def observation(self, obs: Any) -> Any:
        """The observation with other masks. One that has another size stays as it is."""
        if not self.forms or not isinstance(obs, Mapping) or "action_mask" not in obs:
            return obs
        space = self.env.observation_space["action_mask"]
        return {**obs, "action_mask": self.mask_of(space, obs["action_mask"], "action_mask")}

    def space_of(self, space: gym.Space, path: str) -> gym.Space:
        """The space of `mask_of`."""
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            children = {k: self.space_of(own, f"{path}.{k}") for k, own in children_of(space)}
            if isinstance(space, spaces.Dict):
                return spaces.Dict(children)
            return spaces.Tuple(children.values())
        is_rows = isinstance(space, spaces.Sequence)
        if is_rows and isinstance(space.feature_space, (spaces.Dict, spaces.Tuple)):
            return spaces.Sequence(self.space_of(space.feature_space, path), stack=space.stack)
        if path not in self.forms:
            return space
        row = space.feature_space if is_rows else space
        ones = np.ones((1, np.prod(row.shape, dtype=int)))
        masks = {}
        for name, values in self.forms[path].masks(ones).items():
            own = spaces.MultiBinary(values.shape[1])
            masks[name] = spaces.Sequence(own, stack=True) if is_rows else own
        return masks[""] if "" in masks else spaces.Dict(masks)

    def mask_of(self, space: gym.Space, mask: Any, path: str, is_stacked: bool = False) -> Any:
        """The mask in its form; `is_stacked`: its arrays have a row for each row of a Sequence."""
        if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
            changed = dict(mask)
            for k, own in space.items():
                if k in mask:
                    changed[k] = self.mask_of(own, mask[k], f"{path}.{k}", is_stacked)
            return changed
        if isinstance(space, spaces.Tuple) and len(mask) == len(space):
            paths = [f"{path}.{k}" for k in range(len(space))]
            return tuple(map(self.mask_of, space, mask, paths, [is_stacked] * len(space)))
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
        width = int(np.prod(row.shape))
        values = np.asarray(mask)
        num = len(values) if is_stacked and values.ndim else 1
        if values.size != num * width:
            if self.forms[path].names:
                raise gym.error.Error(f"'{path}' has the shape {values.shape}, not {row.shape}")
            return mask
        masks = self.forms[path].masks(values.reshape(num, width))
        if not is_stacked:
            masks = {name: own[0] for name, own in masks.items()}
        return masks.get("", masks)


def children_of(space: gym.Space) -> list[tuple]:
    """(key, space) of the children of a Dict or Tuple."""
    return list(space.items() if isinstance(space, spaces.Dict) else enumerate(space))


def is_mask(leaf: Any) -> bool:
    return leaf.path.split(".")[0] == "action_mask"


def form_of(leaf: Any, parts: list, bits: set[str], in_sequence: bool) -> Form | None:
    """The form of a mask for the action's `parts`, of which those with the paths `bits` are bits;
    None if scripts read it as it is."""
    width = int(np.prod(leaf.space.shape))
    path = leaf.path.replace("action_mask", "action", 1)
    named = [part for part in parts if part.n and f"{part.path}.".startswith(f"{path}.")]
    own = [part for part in named if (part.group + part.rows != "") == (leaf.group != "")]
    for per_bit in (2, 1, 0):
        entries = []
        stop = 0
        for part in own:
            num = 1 if part.group else part.k * (per_bit if part.path in bits else part.n)
            numbers = np.arange(stop, stop + num)
            stop += num
            if part.path in bits and per_bit < 2:  # it may be 0
                new = np.full((part.k, 2), -1)
                new[:, 1:] = numbers.reshape(-1, per_bit) if per_bit else -1
                numbers = new.ravel()
            entries.append(numbers)
        if own and (stop == width or width == 1 and own[0].group):
            return None if per_bit == 2 else Form(np.concatenate(entries))
    if not in_sequence or len(named) != 2 or named[0] not in own:
        return None
    before, part = named
    is_next = parts.index(part) == parts.index(before) + 1
    num = part.k * part.n * (1 if before.group else before.n)
    if not is_next or part.group or before.k > 1 or width != num:
        return None
    names = tuple(each.path.removeprefix(f"{path}.") for each in named)
    return Form(np.arange(width), names, 1 if before.group else before.n)
