"""cleanrl_graph, the wrapper of --wrap relative:SET:X,Y:DIRECTION: positions as one element sees
them."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

NOT_INPUT = ("action_mask", "node_ids")  # keys that are no positions


class Relative(gym.ObservationWrapper):
    """Positions as the first row of a set sees them, the reference. Its position is subtracted from
    those of all other rows of sets and of graphs' nodes; then they are turned by minus its
    `direction`, an angle in radians, so that the first coordinate points where it looks. Its own
    row stays, and everything where it has none. The reference may also be a Box vector.

    Columns are numbers, for all sets and graphs the same ones. Where the environment has
    `feature_names`, key -> the names of its columns, they are names, and vectors that have both
    change, too. gym.error.Error for what cannot be read, and where there is nothing to change."""

    def __init__(self, env: gym.Env, spec: str):
        super().__init__(env)
        match = re.fullmatch(r"relative:([^:]+):([^:,]+),([^:,]+)(?::([^:]+))?", spec)
        if match is None:
            raise gym.error.Error(
                f"--wrap {spec}: relative:SET:X,Y or relative:SET:X,Y:DIRECTION is needed, with "
                "columns of that set"
            )
        self.key, *position, direction = match.groups()
        self.names = {}
        if env.has_wrapper_attr("feature_names"):
            self.names = env.get_wrapper_attr("feature_names")
        columns = {}  # key -> the names of its columns
        for key, space in leaves_in(env.observation_space):
            if row_space(space) is not None and key.split(".")[0] not in NOT_INPUT:
                columns[key] = self.columns(key, space)
        needed = position + [direction] * (direction is not None)
        own = columns.get(self.key, [])
        self.at = {}  # key -> the numbers of the columns of the position
        for key, names in columns.items():
            if set(position) <= set(names):
                self.at[key] = [names.index(name) for name in position]
        if not set(needed) <= set(own):
            raise gym.error.Error(
                f"--wrap {spec}: {needed} must be columns of the set, graph or vector "
                f"'{self.key}'; there are {columns}"
            )
        self.direction = own.index(direction) if direction else None
        self.observation_space = map_space(env.observation_space, self.changed)
        leaves = dict(leaves_in(env.observation_space))
        if len(self.at) == 1 and row_space(leaves[self.key]) is leaves[self.key]:
            raise gym.error.Error(f"--wrap {spec}: nothing else has these columns: {columns}")

    def columns(self, key: str, space: gym.Space) -> list[str]:
        """The names of a leaf's columns; none of a vector that is not meant."""
        row = row_space(space)
        if key in self.names:
            return list(self.names[key])
        is_meant = row is not space or key == self.key
        return list(map(str, range(row.shape[0]))) if is_meant else []

    def changed(self, key: str, space: gym.Space) -> gym.Space:
        """The space of a leaf of `observation`."""
        row = row_space(space)
        if key not in self.at or key == self.key and row is space:
            return space
        dtype = np.result_type(row.dtype, np.float32)
        low = row.low.astype(dtype)
        high = row.high.astype(dtype)
        low[self.at[key]] = -np.inf
        high[self.at[key]] = np.inf
        row = spaces.Box(low, high, dtype=dtype.type)
        if isinstance(space, spaces.Graph):
            return type(space)(row, space.edge_space)
        return (
            spaces.Sequence(row, stack=space.stack) if isinstance(space, spaces.Sequence) else row
        )

    def observation(self, obs: Any) -> Any:
        space = self.env.observation_space
        found = {}
        map_obs(space, obs, lambda key, leaf, own: found.setdefault(key, rows_of(leaf, own)))
        reference = found.get(self.key)
        if reference is None or not len(reference):
            return obs
        reference = reference[0].astype(np.float64)
        return map_obs(space, obs, lambda *leaf: self.moved(*leaf, reference))

    def moved(self, key: str, space: gym.Space, obs: Any, reference: np.ndarray) -> Any:
        """A leaf with other positions."""
        at = self.at.get(key)
        rows = rows_of(space, obs)
        if at is None or rows is None or key == self.key and row_space(space) is space:
            return obs
        rows = rows.astype(np.result_type(row_space(space).dtype, np.float32))
        first = int(key == self.key)  # the reference stays
        delta = rows[first:, at].astype(np.float64) - reference[self.at[self.key]]
        if self.direction is not None:
            angle = reference[self.direction]
            cos, sin = np.cos(angle), np.sin(angle)
            delta = delta @ np.array([[cos, -sin], [sin, cos]])
        rows[first:, at] = delta
        if isinstance(space, spaces.Graph):
            return obs._replace(nodes=rows)
        if isinstance(space, spaces.Box):
            return rows[0]
        return rows if space.stack else tuple(rows)


def leaves_in(space: gym.Space, key: str = "") -> Iterator[tuple[str, gym.Space]]:
    """(`a.b` in a Dict in a Dict, "obs" without one; the space) of all that is no Dict."""
    if isinstance(space, spaces.Dict):
        for k, own in space.items():
            yield from leaves_in(own, f"{key}.{k}".strip("."))
    else:
        yield key or "obs", space


def map_space(space: gym.Space, change: Callable, key: str = "") -> gym.Space:
    """The space with each leaf replaced by change(key, leaf)."""
    if not isinstance(space, spaces.Dict):
        return change(key or "obs", space)
    children = [(k, map_space(own, change, f"{key}.{k}".strip("."))) for k, own in space.items()]
    return spaces.Dict(children)


def map_obs(space: gym.Space, obs: Any, change: Callable, key: str = "") -> Any:
    """The observation with each leaf replaced by change(key, space, leaf). What should be a dict
    and is not stays as it is: the scripts name it."""
    if not isinstance(space, spaces.Dict):
        return change(key or "obs", space, obs)
    if not isinstance(obs, Mapping):
        return obs
    own = {}
    for k, child in space.items():
        if k in obs:
            own[k] = map_obs(child, obs[k], change, f"{key}.{k}".strip("."))
    return {**obs, **own}


def row_space(space: gym.Space) -> spaces.Box | None:
    """That of a row of a set or of a graph's nodes, or a vector itself; None for what has no
    columns."""
    row = getattr(space, "node_space", getattr(space, "feature_space", space))
    return row if isinstance(row, spaces.Box) and len(row.shape) == 1 else None


def rows_of(space: gym.Space, obs: Any) -> np.ndarray | None:
    """[n, columns], a copy; None of what has another shape."""
    row = row_space(space)
    if row is None:
        return None
    rows = np.array(getattr(obs, "nodes", obs))
    if isinstance(space, spaces.Box):
        rows = rows[None]
    if rows.size == 0:
        rows = rows.reshape(0, *row.shape)
    return rows if rows.shape[1:] == row.shape else None
