"""cleanrl_graph, spaces that the scripts do not read as they are: the wrapper that services put
around an environment by themselves, after those of --wrap.

    Text                       a set with a row per word
    integer Box, as an action  a choice for each entry if all have few values, else numbers that are
                               rounded

`fit` puts it on, and `say` prints what it does. Observations and actions are converted by functions
of their spaces alone.
"""

import os
import re
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

NUM_WORDS = 1024  # numbers of a word, of which it has two: few words have both in common
NUM_PLACES = 64  # in a text; words further behind share the last one
WORD = spaces.MultiDiscrete([NUM_WORDS, NUM_WORDS, NUM_PLACES])
MOST_OPTIONS = 64  # of an entry of an integer Box that becomes a choice
UNBOUNDED = 2**30  # numbers of an entry that is not scaled


def fit(env: gym.Env) -> gym.Env:
    """The environment, in a wrapper where its spaces need one; what it does is said."""
    observation_space = converted(env.observation_space, "", as_set)
    action_space = converted(env.action_space, "action", as_choice)
    if observation_space is env.observation_space and action_space is env.action_space:
        return env
    return Fitted(env, observation_space, action_space)


class Fitted(gym.Wrapper):
    """The environment with other spaces. An observation that is not as its space says stays as it
    is, for the checks to name."""

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
        try:
            return read(self.env.observation_space, obs)
        except (KeyError, IndexError, TypeError):
            return obs

    def action(self, action: Any) -> Any:
        return played(self.env.action_space, action)


def keys_of(space: gym.Space) -> list:
    """Those of a Dict, the numbers of the entries of a Tuple, none of another space."""
    if isinstance(space, spaces.Dict):
        return list(space)
    return list(range(len(space))) if isinstance(space, spaces.Tuple) else []


def converted(space: gym.Space, path: str, convert: Callable) -> gym.Space:
    """The space with convert(leaf, path) for each leaf; itself where none is another."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return convert(space, path)
    children = {}
    for k in keys_of(space):
        children[k] = converted(space[k], f"{path}.{k}".removeprefix("."), convert)
    if all(child is space[k] for k, child in children.items()):
        return space
    if isinstance(space, spaces.Dict):
        return spaces.Dict(list(children.items()))  # a dict would be sorted
    return spaces.Tuple(children.values())


# ---- Observations ----
def is_text(space: gym.Space) -> bool:
    """Whether its elements are text, as those of Text and of MiniGrid's MissionSpace."""
    return space.dtype is not None and space.dtype.kind == "U"


def as_set(space: gym.Space, path: str) -> gym.Space:
    """A set of words for a text that is not inside a Sequence."""
    if not is_text(space):
        return space
    say(f"reads '{path or 'obs'}' as words: a set with a row for each")
    return spaces.Sequence(WORD, stack=True)


def read(space: gym.Space, obs: Any) -> Any:
    """An observation with the words of each text."""
    if isinstance(space, spaces.Dict):
        return {key: read(child, obs[key]) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(read(child, obs[k]) for k, child in enumerate(space))
    return word_rows(obs) if isinstance(obs, str) and is_text(space) else obs


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


def as_choice(space: gym.Space, path: str) -> gym.Space:
    """For an integer Box a MultiDiscrete if each entry has few values, else numbers; those of an
    entry without bounds are not scaled."""
    if isinstance(space, spaces.Sequence):
        row = converted(space.feature_space, path, as_choice)
        return space if row is space.feature_space else spaces.Sequence(row, stack=space.stack)
    if not is_integer(space):
        return space
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    about = f"acts in '{path}', {name_of(space)}, by"
    if (high - low < MOST_OPTIONS).all():
        say(f"{about} a choice of a whole number for each entry")
        num = (high - low + 1).astype(np.int64)
        return spaces.MultiDiscrete(num, start=space.low.astype(np.int64))
    say(f"{about} numbers, which are rounded")
    is_bounded = high - low < UNBOUNDED
    low = np.where(is_bounded, low, -np.inf)
    return spaces.Box(low, np.where(is_bounded, high, np.inf), dtype=np.float64)


def played(space: gym.Space, action: Any) -> Any:
    """The action as an element of the environment's space: whole numbers within the bounds."""
    if isinstance(space, spaces.Dict):
        return {key: played(child, action[key]) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(played, space, action))
    if isinstance(space, spaces.Sequence):
        row = space.feature_space
        rows = tuple(played(row, own) for own in action)
        return np.array(rows, row.dtype).reshape(-1, *row.shape) if space.stack else rows
    if is_integer(space):
        return np.clip(np.rint(action), space.low, space.high).astype(space.dtype)
    return action


# ---- What a run says, and what sentences call a space ----
class Said(threading.local):
    """The lines, or keys, that the run of this thread has printed."""

    def __init__(self):
        self.lines = set()


SAID = Said()


def say(line: str, key: str = "") -> None:
    """Prints a line that is no error, each (each `key`) once in a run, by rank 0."""
    if (key or line) not in SAID.lines and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{line}\n")  # at once: another thread may write, too
        sys.stderr.flush()
    SAID.lines.add(key or line)


def name_of(space: gym.Space) -> str:
    """A space in a sentence: whole if that is short, else its kind."""
    text = str(space)
    if len(text) <= 100 and " at 0x" not in text:
        return text
    kind = type(space).__name__
    if isinstance(space, spaces.Dict):
        return f"{kind}({', '.join(f'{key!r}: {name_of(child)}' for key, child in space.items())})"
    if isinstance(space, spaces.Tuple):
        return f"{kind}({', '.join(map(name_of, space))})"
    return f"{kind}({space.shape}, {space.dtype})"


def shown(value: Any) -> str:
    """What an environment returned, in a sentence: its kind, and its keys, kinds of entries, or
    dtype and shape."""
    kind = type(value).__name__
    inside = ""
    if isinstance(value, Mapping):
        inside = f" with {', '.join(map(str, value))}"
    elif isinstance(value, (tuple, list)):
        inside = f" with {', '.join(type(each).__name__ for each in value)}"
    elif hasattr(value, "shape"):
        inside = f", dtype {value.dtype}, shape {tuple(value.shape)}"
    return textwrap.shorten(f"{kind}{inside}", 200, placeholder=" ...")
