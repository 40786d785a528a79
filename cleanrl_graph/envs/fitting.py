"""cleanrl_graph, spaces that the scripts do not read as they are: the wrapper that services put
around an environment by themselves, after those of --wrap.

    Text                      a set with a row per word
    integer Box, as an action a choice for each entry, or numbers that are rounded

Observations and actions are converted by functions of their spaces alone.
"""

import os
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

NUM_WORDS = 1024  # numbers of a word, of which it has two: few words have both in common
NUM_PLACES = 64  # in a text; words further behind share the last one
WORD = spaces.MultiDiscrete([NUM_WORDS, NUM_WORDS, NUM_PLACES])
MOST_NAMES = 12  # in a sentence
MOST_OPTIONS = 64  # of an entry of an integer Box that becomes a choice
UNBOUNDED = 2**30  # numbers of an entry that is not scaled
ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Said(threading.local):
    """The lines, or keys, that the run of this thread has printed."""

    def __init__(self):
        self.lines = set()


SAID = Said()


def say(line: str, key: str = "") -> None:
    """Prints a line that is no error, each (each `key`) once in a run, by rank 0."""
    if (key or line) not in SAID.lines and os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    SAID.lines.add(key or line)


def name_of(space: gym.Space) -> str:
    """A space in a sentence: whole if that is short, else its kind."""
    text = str(space)
    if isinstance(space, spaces.Text) or " at 0x" in text:
        return type(space).__name__
    if len(text) <= 100:
        return text
    if isinstance(space, spaces.Dict):
        children = [f"{key!r}: {name_of(child)}" for key, child in space.items()]
        return f"Dict({', '.join(children)})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(name_of, space))})"
    if isinstance(space, spaces.Box):
        return f"Box({space.shape}, {space.dtype})"
    return type(space).__name__


def shown(value: Any) -> str:
    """What an environment returned, or a space, in a sentence: its kind, and its keys, kinds of
    entries, or dtype and shape."""
    if value is None:
        return "None"
    kind = type(value).__name__.removeprefix("nd")
    text = f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
    inside = []
    if isinstance(value, Mapping):
        inside = names_in(value)
    elif type(value) in (tuple, list, spaces.Tuple):
        inside = [type(each).__name__ for each in value]
    elif isinstance(getattr(value, "shape", None), tuple):
        return f"{text}, dtype {value.dtype}, shape {tuple(value.shape)}"
    more = ", ..." * (len(inside) > MOST_NAMES)
    return f"{text} with {', '.join(inside[:MOST_NAMES])}{more}" if inside else text


def names_in(value: Mapping, path: str = "") -> list[str]:
    """The paths of what is in a dict and in those inside of it, as leaves have them."""
    names = []
    for key, child in value.items():
        own = f"{path}.{key}".removeprefix(".")
        names += names_in(child, own) if isinstance(child, Mapping) else [own]
    return names


def keys_of(space: gym.Space) -> list:
    """Those of a Dict, the numbers of the entries of a Tuple, none of another space."""
    if isinstance(space, spaces.Dict):
        return list(space)
    return list(range(len(space))) if isinstance(space, spaces.Tuple) else []


def unread(
    space: gym.Space, path: str = "", outer: str = "", is_action: bool = False
) -> Iterator[str]:
    """What scripts do not read in a space of observations or actions. `outer` is the kind of what
    it is inside of, if that has no place for rows."""
    kind = type(space).__name__
    about = f"leaf '{path or 'obs'}'"
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for k in keys_of(space):
            yield from unread(space[k], f"{path}.{k}".removeprefix("."), outer, is_action)
    elif isinstance(space, (spaces.Sequence, spaces.Graph)) and outer:
        where = f"inside a {outer}{is_action * ' of actions'}"
        yield f"{about}: a {kind} is not supported {where}"
    elif isinstance(space, spaces.Sequence):
        row = type(space.feature_space).__name__
        if is_action and space.stack and row in ("Dict", "Tuple"):
            yield f"{about}: a {kind} of {row} is not supported with stack=True, with False it is"
        yield from unread(space.feature_space, path, kind, is_action)
    elif not isinstance(space, ARRAYS):
        if is_action or not isinstance(space, spaces.Graph):
            known = (
                "Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple and Sequence of these are"
            )
            yield f"{about}: {name_of(space)} is not supported ({known})"


def unlike(obs: Any, space: gym.Space) -> str:
    """What an observation is, and what it should be, for the end of a sentence."""
    return f"it is {shown(obs)}, the space is {shown(space)}{conversion(obs)}"


def conversion(obs: Any) -> str:
    """What makes an observation of a graph of another package, if one is in it."""
    packages = {kind.__module__.partition(".")[0] for kind in type(obs).__mro__}
    if packages & {"networkx", "torch_geometric"}:
        kind = type(obs).__name__
        return f"; to_graph_instance of cleanrl_graph.envs.pyg makes an observation of a {kind}"
    children = list(obs.values()) if isinstance(obs, Mapping) else obs
    if isinstance(children, (tuple, list)):
        return max(map(conversion, children), default="")
    return ""


class Fitted(gym.Wrapper):
    """The environment with the spaces of `readable` and `playable`."""

    def __init__(self, env: gym.Env, observation_space: gym.Space, action_space: gym.Space):
        super().__init__(env)
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.observation(obs), info

    def step(self, action):
        obs, *outcome = self.env.step(self.action(action))
        return self.observation(obs), *outcome

    def observation(self, obs: Any) -> Any:
        return read(self.env.observation_space, obs)

    def action(self, action: Any) -> Any:
        return played(self.env.action_space, action)


def fit(env: gym.Env) -> gym.Env:
    """The environment, in a wrapper where its spaces need one; what it does is said."""
    notes = []
    observation_space = readable(env.observation_space, "", notes)
    action_space = playable(env.action_space, "action", notes)
    for note in notes:
        say(note)
    return Fitted(env, observation_space, action_space) if notes else env


# ---- Observations ----
def is_text(space: gym.Space) -> bool:
    """Whether its elements are text, as those of Text and of MiniGrid's MissionSpace."""
    dtype = getattr(space, "dtype", None)
    return isinstance(space, gym.Space) and dtype is not None and np.dtype(dtype).kind == "U"


def readable(space: gym.Space, path: str, notes: list[str]) -> gym.Space:
    """An observation space with a set of words for each text that is not inside a Sequence. Adds a
    line about each to the notes."""
    if is_text(space):
        advice = ""
        if path and "." not in path:
            advice = f"; --wrap hide:{path} hides it"
        notes.append(f"reads '{path or 'obs'}' as words: a set with a row for each{advice}")
        return spaces.Sequence(WORD, stack=True)
    return with_children(space, path, notes, readable)


def with_children(space: gym.Space, path: str, notes: list[str], convert: Callable) -> gym.Space:
    """A Dict or Tuple with converted children; the space itself where nothing was noted."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return space
    before = len(notes)
    children = {}
    for k in keys_of(space):
        children[k] = convert(space[k], f"{path}.{k}".removeprefix("."), notes)
    if len(notes) == before:
        return space
    if isinstance(space, spaces.Dict):
        return spaces.Dict(children)
    return spaces.Tuple(children.values())


def read(space: gym.Space, obs: Any) -> Any:
    """An element of the `readable` space. What has another form than `space` stays as it is: the
    services name it."""
    if isinstance(space, spaces.Dict) and isinstance(obs, Mapping):
        converted = dict(obs)
        for key, child in space.items():
            if key in obs:
                converted[key] = read(child, obs[key])
        return converted
    if isinstance(space, spaces.Tuple) and isinstance(obs, (tuple, list)):
        if len(obs) == len(space):
            return tuple(map(read, space, obs))
    if isinstance(obs, str) and is_text(space):
        return word_rows(str(obs))
    return obs


@lru_cache(1024)
def word_rows(text: str) -> np.ndarray:
    """Of each word two numbers, by which it is known, and its place, int64 [words, 3]. The order
    counts: the red ball beside the blue box is not the blue ball beside the red one."""
    rows = []
    for k, word in enumerate(re.findall(r"\w+", text.lower())):
        number = zlib.crc32(word.encode())  # the same in every process
        rows.append([number % NUM_WORDS, number // NUM_WORDS % NUM_WORDS, min(k, NUM_PLACES - 1)])
    return np.array(rows, np.int64).reshape(-1, 3)


# ---- Actions ----
def is_integer(space: gym.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype.kind != "f"


def bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest numbers of an integer Box, float64."""
    return space.low.astype(np.float64), space.high.astype(np.float64)


def is_choice(space: spaces.Box) -> bool:
    """Whether each entry has few values."""
    low, high = bounds(space)
    return bool((high - low < MOST_OPTIONS).all())


def scale_of(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """(middle, half of the width) of each entry; 0, or what is next to it, and 1 of one that is as
    good as unbounded; 1 as the half of no width."""
    low, high = bounds(space)
    is_bounded = high - low < UNBOUNDED
    middle = np.where(is_bounded, (low + high) / 2, np.clip(0, low, high))
    return middle, np.where(is_bounded & (high > low), (high - low) / 2, 1)


def playable(space: gym.Space, path: str, notes: list[str]) -> gym.Space:
    """An action space with other parts for integer Boxes: a MultiDiscrete where each entry has few
    values, else numbers from -1 to 1. Adds a line about each to the notes."""
    if is_integer(space):
        about = f"acts in '{path}', {name_of(space)}, by"
        low, high = bounds(space)
        if is_choice(space):
            notes.append(f"{about} a choice of a whole number for each entry")
            num = (high - low + 1).astype(np.int64)
            return spaces.MultiDiscrete(num, start=low.astype(np.int64))
        is_bounded = high - low < UNBOUNDED
        scaled = ", and scaled where it has bounds" * bool(is_bounded.any())
        notes.append(f"{about} numbers, which are rounded{scaled}")
        most = np.where(is_bounded, 1, np.inf).astype(np.float32)
        return spaces.Box(-most, most, dtype=np.float32)
    if isinstance(space, spaces.Sequence):
        row = playable(space.feature_space, path, notes)
        return spaces.Sequence(row, stack=space.stack)
    return with_children(space, path, notes, playable)


def nearest(space: spaces.Box, values: np.ndarray) -> np.ndarray:
    """The element of an integer Box next to these numbers, float64."""
    values = np.rint(values)
    # Bounds such as 2**63 - 1 are no float64: what is not inside becomes them as integers
    inside = (values > space.low) & (values < space.high)
    bound = np.where(values < space.high, space.low, space.high)
    return np.where(inside, np.where(inside, values, 0).astype(space.dtype), bound)


def unplayed(space: gym.Space, action: Any) -> Any:
    """The element of the `playable` space that means an element of `space`."""
    if is_integer(space):
        values = np.asarray(action)
        if is_choice(space):
            return values
        middle, half = scale_of(space)
        return (values.astype(np.float64) - middle) / half
    if isinstance(space, spaces.Dict):
        return {key: unplayed(child, action[key]) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(unplayed, space, action))
    return action


def played(space: gym.Space, action: Any) -> Any:
    """The element of an action space that one of its `playable` space means."""
    if is_integer(space):
        values = np.asarray(action)
        if not is_choice(space):
            middle, half = scale_of(space)
            return nearest(space, middle + half * values.astype(np.float64))
        return values.astype(space.dtype)
    if isinstance(space, spaces.Dict):
        return {key: played(child, action[key]) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(played, space, action))
    if isinstance(space, spaces.Sequence):
        row = space.feature_space
        rows = [played(row, own) for own in action]
        if not space.stack:
            return tuple(rows)
        return np.array(rows, row.dtype).reshape(-1, *row.shape)
    return action
