"""The tries of tries.py: an environment that can do anything, and what it does.

It imports little, since processes that load copies of environments import it. A try runs in a
folder of its own: FOLDER, in which environments leave notes."""

import contextlib
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

FOLDER = "."
ROOT = Path(__file__).resolve().parents[1]
TRIES = {}


def vector(*shape, low=-1.0, high=1.0, dtype=np.float32):
    return spaces.Box(low, high, shape, dtype)


def text_box(dtype, *shape):
    """All numbers of an integer dtype."""
    most = np.iinfo(dtype)
    return spaces.Box(most.min, most.max, shape or (2,), dtype)


PAIR = vector(2)
THREE = spaces.Discrete(3)


class Try(NamedTuple):
    """What is done, and what should come of it."""

    kind: str
    name: str
    expected: str = "trains"  # or a pattern of the sentence
    flags: str = ""  # "\0" is a space inside of one
    observation: Any = PAIR  # a space, or a function of the environment that returns it
    action: Any = THREE
    show: Any = None  # an observation, or a function of the environment
    hooks: dict = {}  # "init", "reset", "step", "close" or "render" -> function of the environment
    change: Callable | None = None  # the result of a step -> another
    first: Callable | None = None  # the result of a reset -> another
    accept: Callable | None = None  # (environment, action) -> whether it is right
    kwargs: Any = {}
    before: Callable | None = None  # called with `go(flags)`, which runs the script
    after: Callable | None = None  # returns what is wrong
    says: str = ""  # a pattern of what is printed
    script: str = "ppo_graph"
    is_compared: bool = True  # what the policy is shown with what the environment returned
    is_again: bool = True  # in another script, too
    limit: float = 40.0  # seconds


def add(kind: str, name: str, expected: str = "trains", **fields) -> None:
    assert f"{kind}: {name}" not in TRIES, name
    TRIES[f"{kind}: {name}"] = Try(kind, name, expected, **fields)


# ---- Notes ----
def note(name: str, value: Any) -> None:
    data = pickle.dumps(value)
    with open(f"{FOLDER}/{name}.notes", "ab") as file:
        file.write(data)


def read_notes(name: str) -> list:
    found = []
    with contextlib.suppress(FileNotFoundError, EOFError):
        with open(f"{FOLDER}/{name}.notes", "rb") as file:
            while True:
                found.append(pickle.load(file))
    return found


def arrays_in(space: gym.Space, obs: Any, path: str = "") -> dict[str, np.ndarray]:
    """Leaf path -> array, as the conventions say; found without the scripts' code."""
    name = path or "obs"
    if isinstance(space, spaces.Graph):
        edges = np.zeros((0, 2), int) if obs.edge_links is None else np.array(obs.edge_links)
        arrays = {f"{name}.nodes": np.array(obs.nodes), f"{name}.edge_links": edges}
        if space.edge_space is not None:
            empty = np.zeros((0, *space.edge_space.shape))
            arrays[f"{name}.edges"] = empty if obs.edges is None else np.array(obs.edges)
        return arrays
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return arrays_in(space.feature_space, obs, name)
        rows = [arrays_in(space.feature_space, row, name) for row in obs]
        if rows:
            return {k: np.array([row[k] for row in rows]) for k in rows[0]}
        zero = arrays_in(space.feature_space, space.feature_space.sample(), name)
        return {k: np.zeros((0, *array.shape)) for k, array in zero.items()}
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space)
        arrays = {}
        for k, child in children:
            arrays |= arrays_in(child, obs[k], f"{path}.{k}" if path else str(k))
        return arrays
    return {name: np.array(obs)}


# ---- The environment ----
class Hostile(gym.Env):
    """Episodes of 5 steps, which end and are cut off in turn. What a try does it does in the third
    step of each episode of the first environment."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(self, name, render_mode=None, **kwargs):
        self.name = name
        self.kwargs = kwargs
        self.render_mode = render_mode
        self.index = None
        self.pid = os.getpid()
        self.t = 0
        self.num_episodes = 0
        self.kept = []
        self.do("init")
        for space in ("observation", "action"):
            value = getattr(TRIES[name], space)
            own = value(self) if isinstance(value, types.FunctionType) else value
            setattr(self, f"{space}_space", own)

    def do(self, moment):
        if moment in TRIES[self.name].hooks:
            return TRIES[self.name].hooks[moment](self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.index = seed - 1
        self.t = 0
        self.num_episodes += 1
        self.do("reset")
        obs = self.observe()
        self.note_shown(obs, getattr(self, "outcome", None))
        change = TRIES[self.name].first
        return change(obs) if change else (obs, {})

    def step(self, action):
        self.note_action(action)
        self.t += 1
        if self.is_now():
            self.do("step")
        ends = self.t == 5
        is_cut = self.num_episodes % 2 == 0
        result = self.observe(), float(self.t), ends and not is_cut, ends and is_cut, {}
        change = TRIES[self.name].change
        if change and self.is_now():
            result = change(*result)
        with contextlib.suppress(Exception):  # a wrong result is one of the tries
            obs, reward, terminated, truncated, _ = result
            self.outcome = float(reward), bool(terminated), bool(truncated)
            if not (terminated or truncated):
                self.note_shown(obs, self.outcome)
        return result

    def is_now(self):
        return self.t == 3 and self.index == 0

    def observe(self):
        show = TRIES[self.name].show
        if isinstance(show, types.FunctionType):
            return show(self)
        if show is None and self.observation_space == PAIR:
            return np.array([self.t / 10, self.num_episodes / 100], np.float32)
        return self.observation_space.sample() if show is None else show

    def is_noting(self):
        return self.index is not None and self.index < 100 and self.pid == os.getpid()

    def note_shown(self, obs, outcome):
        if self.is_noting():
            arrays = None
            with contextlib.suppress(Exception):  # a wrong observation is one of the tries
                found = arrays_in(self.observation_space, obs)
                pickle.dumps(found)
                arrays = found
            note(f"shown_{self.index}", (arrays, outcome))

    def note_action(self, action):
        if not self.is_noting():
            return
        self.kept.append((action, pickle.dumps(action)))
        if pickle.dumps(self.kept[0][0]) != self.kept[0][1]:
            note("wrong", "an action was changed after it was given")
        accept = TRIES[self.name].accept
        if not self.action_space.contains(action) or (accept and not accept(self, action)):
            note("wrong", f"env {self.index} received {action!r} of {type(action).__name__}")
        note("actions", action)

    def render(self):
        picture = self.do("render")
        return np.full((8, 8, 3), self.t, np.uint8) if picture is None else picture

    def close(self):
        self.do("close")


gym.register("Hostile-v0", entry_point=Hostile)


def wait(seconds: float = 1000) -> Callable:
    return lambda env: time.sleep(seconds)


def raises(problem: BaseException) -> Callable:
    def hook(env):
        raise problem

    return hook


def chance(options: int) -> Callable:
    """What is wrong if not all first options of a Discrete action were received."""

    def after():
        actions = {int(action) for action in read_notes("actions")}
        return None if len(actions) == options else f"only {sorted(actions)} were received"

    return after


# ---- Observations ----
def observation(name, space, show=None, expected="trains", **fields) -> None:
    add("observations", name, expected, observation=space, show=show, **fields)


def tensor(value, **kwargs):
    import torch

    return torch.tensor(value, **kwargs)


def graph(nodes=3, links=((0, 1), (2, 0)), edges=None, width=2):
    """A GraphInstance whose nodes are numbers, or as they are given."""
    if isinstance(nodes, int):
        nodes = np.arange(nodes * width, dtype=np.float32).reshape(nodes, width) / 10
    links = None if links is None else np.array(links)
    return spaces.GraphInstance(nodes, edges, links)


def counted(env) -> np.ndarray:
    """Numbers that tell steps apart."""
    return np.array([env.t / 10, env.num_episodes / 100], np.float32)


def in_buffer(change: Callable) -> Callable:
    """Shows env.buffer, into which it writes at every step; `change` makes an observation of it."""

    def show(env):
        if not hasattr(env, "buffer"):
            env.buffer = np.zeros((3, 2), np.float32)
        env.buffer[:] = env.t + env.num_episodes / 100
        return change(env.buffer)

    return show


def masked_only(mask, at=lambda env: True):
    return lambda env: {"x": counted(env), "action_mask": mask if at(env) else np.ones(3, np.int8)}


GRAPH = spaces.Graph(PAIR, None)
EDGES = spaces.Graph(PAIR, vector(1))
SET = spaces.Sequence(PAIR, stack=True)
ROWS = spaces.Sequence(PAIR, stack=False)
BYTES = spaces.Box(0, 255, (2,), np.uint8)
MASKED = spaces.Dict(x=PAIR, action_mask=spaces.MultiBinary(3))
MASK_OF_ROWS = spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True)
WITH_IDS = spaces.Dict(g=GRAPH, node_ids=spaces.Sequence(text_box(np.int64, 1), stack=True))
IDS = spaces.Dict(g=GRAPH, node_ids=spaces.Sequence(spaces.Box(0, 2**62, (), np.int64), stack=True))


class OwnBox(spaces.Box):
    pass


class OwnDict(spaces.Dict):
    pass


class OwnDiscrete(spaces.Discrete):
    pass


class OwnSpace(gym.Space):
    pass


class OwnGraph(NamedTuple):
    nodes: Any
    edges: Any
    edge_links: Any
    more: Any


# Dtypes, orders of bytes, layouts
observation("float64", PAIR, lambda env: counted(env).astype(np.float64))
observation("float16", PAIR, lambda env: counted(env).astype(np.float16))
observation("longdouble", PAIR, lambda env: counted(env).astype(np.longdouble))
observation("big-endian floats", PAIR, lambda env: counted(env).astype(">f4"))
observation("big-endian doubles", PAIR, lambda env: counted(env).astype(">f8"))
observation("big-endian integers", text_box(np.int64), np.array([2**40, -3], ">i8"))
observation("big-endian space", vector(2, dtype=np.dtype(">f4")), counted)
observation("space of big-endian integers", text_box(np.dtype(">i4")), np.array([70000, -3]))
observation("space of float16", vector(2, dtype=np.float16), lambda env: np.float16(counted(env)))
observation("space of bool", spaces.Box(0, 1, (2,), np.bool_), np.array([True, False]))
observation("2 in a space of bool", spaces.Box(0, 1, (2,), np.bool_), [2, 0], "value 2")
observation("every other entry", PAIR, lambda env: np.arange(4, dtype=np.float32)[::2] + env.t)
observation("negative strides", PAIR, lambda env: counted(env)[::-1])
observation("Fortran order", vector(3, 2), np.asfortranarray(np.arange(6.0).reshape(3, 2)))
observation("transposed", vector(3, 2), np.arange(6.0).reshape(2, 3).T)
observation("strides of 0", vector(3, 2), np.broadcast_to(np.float32(0.5), (3, 2)))


def read_only(env):
    array = counted(env)
    array.flags.writeable = False
    return array


observation("read-only", PAIR, read_only)
observation("list", PAIR, [0.25, 1])
observation("tuple of scalars", PAIR, (np.float32(0.25), np.float64(1)))
observation("bools where floats are declared", PAIR, np.array([True, False]))
observation("matrix", PAIR, np.asmatrix([0.0, 1]), is_compared=False)
observation("objects that are floats", PAIR, np.array([0.5, 1], object), "dtype object")
observation("objects that are None", PAIR, np.array([None, 1], object), "dtype object")
observation("rows of several lengths", vector(2, 2), [[1, 2], [3]], "cannot be read.*inhomogen")
observation("memoryview", PAIR, lambda env: memoryview(counted(env)))
observation("tensor", PAIR, lambda env: tensor([0.5, env.t]))
grad = dict(requires_grad=True)
observation("tensor with gradients", PAIR, lambda env: tensor([0.5, 1], **grad), "requires grad")
observation("complex", PAIR, np.array([1j, 0]), "dtype complex128")
observation("text", PAIR, np.array(["1", "2"]), "dtype <U1")
observation("bytes", PAIR, b"ab", "dtype .S2")
observation("dates", PAIR, np.array([0, 1], "datetime64[s]"), "dtype datetime64")
observation("structured", PAIR, np.zeros(2, "f4,f4"), "dtype")
observation("generator", PAIR, lambda env: (float(k) for k in range(2)), "dtype object")
observation("dict for an array", PAIR, {"a": 1}, "dtype object")
observation("no observation", PAIR, lambda env: None if env.t else counted(env), "dtype object")
observation("an exception for an observation", PAIR, ValueError("no"), "dtype object")

# Values
for bad in (np.nan, np.inf, -np.inf, 1e39, -1e300):
    observation(f"{bad}", PAIR, np.array([0, bad]), "leaf 'obs', step 0: value")
observation("signalling nan", PAIR, np.array([0x7FA00000, 0], "u4").view("f4"), "value nan")
observation("smallest subnormal", PAIR, np.array([1e-45, -1e-45], np.float32))
observation("minus zero", PAIR, np.array([-0.0, 0.0]))
observation("near the largest float", PAIR, np.array([3.3e38, 1], np.float32))
observation("constant, normalised", PAIR, np.ones(2), flags="--norm-obs")
observation("outside of the bounds", PAIR, np.array([-50.0, 50]))
observation("an integer beyond floats", PAIR, [2**1100, 0], "dtype object")
observation("bounds that are infinite", vector(2, low=-np.inf, high=np.inf), counted)
observation("bounds that are equal", vector(2, low=1, high=1), np.ones(2))
for dtype, bad in [
    (np.uint8, 300),
    (np.int8, -200),
    (np.int16, 40000),
    (np.uint16, 65536),
    (np.int32, 2**31),
    (np.uint32, -1),
    (np.uint64, -1),
]:
    observation(f"{bad} as {dtype.__name__}", text_box(dtype), np.array([1, bad]), f"value {bad}")
large = 2**63 + 5
observation("2^63 + 5", text_box(np.uint64), np.array([large, 0], np.uint64), f"value {large}")
observation("2^63 in int64", text_box(np.int64), np.array([2**63, 0], np.uint64), f"value {2**63}")
observation("2^70", text_box(np.int64), [2**70, 0], "dtype object")
observation("fractions where integers are declared", BYTES, np.array([0.5, 1]), "dtype float64")
observation("whole floats where integers are declared", BYTES, np.array([2.0, 1]), "dtype float64")
observation("256 as a bit", spaces.MultiBinary(2), np.array([256, 0]), "value 256")
observation("exact integers", text_box(np.int64), np.array([2**62 + 1, -(2**62) - 1]))
observation("exact uint32", text_box(np.uint32), np.array([2**32 - 1, 1], np.uint32))

# Categories
observation("category as int8", THREE, lambda env: np.int8(env.t % 3))
observation("category as an array of no axes", THREE, lambda env: np.array(env.t % 3))
observation("category as a bool", THREE, True)
observation("category in a list", THREE, [1], is_compared=False)
observation("category as a float", THREE, 1.0, "dtype float64")
observation("category 3 of 3", THREE, 3, "value 3")
observation("category -1", THREE, -1, "value -1")
observation("category 2^64", THREE, 2**64, "dtype object")
observation("category 2^63", THREE, 2**63, f"value {2**63}")
observation("one category", spaces.Discrete(1), 0)
observation("a start below 0", spaces.Discrete(3, start=-7), lambda env: -7 + env.t % 3)
observation("a huge start", spaces.Discrete(3, start=2**40), lambda env: 2**40 + env.t % 3)
observation("Discrete of int8", spaces.Discrete(100, start=100, dtype=np.int16), 199)
observation("2^40 categories", spaces.Discrete(2**40), 0, "obs.* over 10000000")
observation(
    "categories in a matrix", spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]])
)
observation("bits in a matrix", spaces.MultiBinary((2, 2)), np.array([[True, False]] * 2))

# Shapes
observation("number as an array", vector(), np.ones(1), is_compared=False)
observation("number", vector(), 0.5)
observation("width 0", vector(0), flags="--norm-obs")
observation("width 0 beside a vector", spaces.Dict(a=PAIR, b=vector(0)), flags="--norm-obs")
observation("an axis of 0", spaces.Dict(a=PAIR, b=vector(3, 0, 2)))
observation("100,000 numbers", vector(100_000))
observation("five axes", vector(2, 1, 3, 1, 2))
observation("picture of floats", vector(8, 9, 3))
observation("picture of uint16", spaces.Box(0, 65535, (8, 8, 1), np.uint16))
observation("picture of one row", spaces.Box(0, 255, (1, 1, 3), np.uint8))
observation("wide picture", spaces.Box(0, 255, (8, 200, 3), np.uint8))
observation("shape that changes", PAIR, lambda env: np.ones(2 + (env.t == 3)), r"step 3.*\(3,\)")
observation(
    "space that changes",
    lambda env: vector(random.SystemRandom().randrange(3, 9999)),
    None,
    "not all entries have the observation space",
)

# Names
observation("a/b beside a: {b}", spaces.Dict({"a/b": PAIR, "a": spaces.Dict(b=PAIR)}))
observation(
    "a.b beside a: {b}", spaces.Dict({"a.b": PAIR, "a": spaces.Dict(b=PAIR)}), None, "differ"
)
observation("g.nodes beside g", spaces.Dict({"g.nodes": PAIR, "g": GRAPH}), None, "different names")
observation("an empty name beside obs", spaces.Dict({"": PAIR, "obs": PAIR}), None, "differ")
observation(
    "names of attributes", spaces.Dict(forward=PAIR, training=PAIR, weight=THREE, rows=PAIR)
)
observation("names of letters", spaces.Dict({"ä ö": PAIR, "A": PAIR, "a": vector(3), "1": THREE}))
observation("a name of 10,000 letters", spaces.Dict({"a" * 10_000: PAIR, "b": PAIR}))
observation(
    "two sets of like names", spaces.Dict({"a/b": SET, "a": spaces.Dict(b=SET)}), None, "differ"
)

# Containers
nested = spaces.Dict(a=spaces.Tuple((PAIR, spaces.Dict(b=spaces.Tuple((THREE, SET)), c=GRAPH))))
observation("nested", nested)
observation("an empty Dict inside", spaces.Dict(a=PAIR, b=spaces.Dict({}), c=spaces.Tuple(())))
observation("an empty Dict", spaces.Dict({}), {}, "one must be an input")
observation("an empty Tuple", spaces.Tuple(()), (), "one must be an input")
two = spaces.Dict(a=PAIR, b=vector(2))
observation("keys in another order", two, lambda env: OrderedDict(b=np.ones(2), a=counted(env)))
observation("more keys than declared", two, lambda env: dict(a=counted(env), b=np.ones(2), z=None))
observation("a read-only mapping", two, types.MappingProxyType(dict(a=np.ones(2), b=np.zeros(2))))
observation("a UserDict", two, UserDict(a=np.ones(2), b=np.zeros(2)))
observation("a defaultdict that lacks a key", two, lambda env: defaultdict(lambda: np.ones(2)))
observation(
    "a key is missing", two, dict(a=np.ones(2)), "leaf 'b', step 0: cannot be read: KeyError"
)
observation("a Tuple for a Dict", two, (np.ones(2), np.ones(2)), "leaf 'a', .* cannot be read")
observation("a Tuple as a list", spaces.Tuple((PAIR, THREE)), lambda env: [counted(env), 1])
observation(
    "a Tuple too short", spaces.Tuple((PAIR, THREE)), (np.ones(2),), "leaf '1'.*cannot be read"
)
observation("own classes of spaces", OwnDict(a=OwnBox(-1, 1, (2,)), b=OwnDiscrete(3)))
observation("an own space", OwnSpace((2,), np.float32), np.ones(2), "OwnSpace.* is not supported")
observation("a space that is None", lambda env: None, np.ones(2), "is not supported")
observation("a space that is a list", lambda env: [PAIR], np.ones(2), "is not supported")
observation("text space", spaces.Text(4), "ab", is_compared=False)
observation("OneOf", spaces.Dict(a=PAIR, b=spaces.OneOf([PAIR, THREE])), None, "'b': OneOf")

# Buffers
observation("one buffer for ever", PAIR, in_buffer(lambda buffer: buffer[0]))
observation("a view of a buffer", vector(2, 3), in_buffer(lambda buffer: buffer.T))
observation("a memoryview of a buffer", vector(3, 2), in_buffer(memoryview))
observation("the same dict for ever", two, lambda env: in_dict(env, "same", np.ones(2)))
observation("nodes in a buffer", GRAPH, in_buffer(lambda buffer: graph(buffer)))
observation("rows in a buffer", ROWS, in_buffer(lambda buffer: tuple(buffer)))
observation("a set in a buffer", SET, in_buffer(lambda buffer: buffer))


def in_dict(env, name, array):
    """The same dict at every step; its array is changed in place."""
    if not hasattr(env, name):
        setattr(env, name, {"a": np.zeros(2, np.float32), "b": array})
    getattr(env, name)["a"][:] = counted(env)
    return getattr(env, name)


SHARED = np.zeros(2, np.float32)


def of_all(env):
    SHARED[:] = env.index if env.index is not None else -1, env.t
    return SHARED


observation("one buffer of all environments", PAIR, of_all)

# Graphs
observation("no node", GRAPH, graph(0, np.zeros((0, 2), int)))
observation("no node, links None", GRAPH, graph(0, None))
observation("nodes None", GRAPH, spaces.GraphInstance(None, None, None), is_compared=False)
observation("no edge", EDGES, graph(3, None))
observation("one node with a loop", GRAPH, graph(1, [[0, 0]] * 5))
observation(
    "none and 3,000 nodes in turn",
    GRAPH,
    lambda env: graph(3000 * (env.t % 2), np.zeros((3000 * (env.t % 2), 2), int)),
)
observation("an edge to node 2^32", GRAPH, graph(3, [[0, 2**32]]), f"value {2**32} in row 0")
observation("an edge to node -1", GRAPH, graph(3, [[0, -1]]), "value -1 in row 0")
observation("an edge without nodes", GRAPH, graph(0, [[0, 0]]), "0 nodes")
observation("links as floats", GRAPH, graph(3, [[0.0, 1]]), "dtype float64")
observation("links as uint64", GRAPH, graph(3, np.array([[0, 1]], np.uint64)))
observation("links as bools", GRAPH, graph(3, np.array([[False, True]])))
observation("links transposed by a view", GRAPH, graph(3, np.array([[0, 1, 2], [1, 2, 0]]).T))
observation("links as big-endian integers", GRAPH, graph(3, np.array([[0, 1]], ">i8")))
observation("links of three", GRAPH, graph(4, [[0, 1, 2]] * 2), r"shape \(2, 3\)")
observation("links of another number", EDGES, graph(3, edges=np.zeros((3, 1))), "3 rows where")
observation("links and no edges", EDGES, graph(3), "0 rows where")
observation("edges that are NaN", EDGES, graph(3, edges=np.full((2, 1), np.nan)), "value nan")
observation("nodes too wide", GRAPH, graph(3, width=3), r"shape \(3, 3\)")
observation("nodes without an axis", GRAPH, graph(np.ones(2)), r"shape \(2,\)")
observation(
    "a graph as a dict", GRAPH, dict(nodes=np.ones((2, 2))), "cannot be read: AttributeError"
)
observation("an own class of graph", GRAPH, OwnGraph(np.ones((2, 2)), None, np.array([[0, 1]]), 3))
observation("nodes that are categories", spaces.Graph(spaces.Discrete(3, start=5), THREE))
observation(
    "a category of a node", spaces.Graph(THREE, None), graph(np.array([0, 3])), "value 3 in row 1"
)
observation("nodes that are matrices", spaces.Graph(vector(2, 3), vector()))
observation("nodes of width 0", spaces.Graph(vector(0), None), flags="--norm-obs")
observation("graph of tensors", GRAPH, lambda env: graph(tensor([[0.5, 1]] * 3), tensor([[0, 2]])))
for gnn in ("gatv2", "transformer", "sage"):
    observation(f"no node, {gnn}", EDGES, graph(0, None), flags=f"--gnn {gnn}")

# Sets
observation("a set as a list", SET, [[0.5, 1], [2, 3]])
observation("an empty set", SET, np.zeros((0, 2)))
observation("an empty set as ()", SET, (), r"shape \(0,\)")
observation("rows that are none", ROWS, ())
observation(
    "rows from a generator", ROWS, lambda env: (counted(env) for _ in range(3)), is_compared=False
)
observation("rows as an array", ROWS, np.ones((3, 2)))
observation("rows as a list of lists", ROWS, [[1, 2.5]] * 2)
observation("rows of several widths", ROWS, (np.ones(2), np.ones(3)), "cannot be read")
observation("a number for a set", ROWS, 0.5, "cannot be read")
observation("None for rows", ROWS, lambda env: None, "cannot be read")
observation("rows that are numbers", spaces.Sequence(vector()), lambda env: (0.5,) * env.t)
observation("rows that are dicts", spaces.Sequence(spaces.Dict(a=PAIR, b=THREE)))
observation(
    "rows that are dicts, stacked", spaces.Sequence(spaces.Dict(a=PAIR, b=THREE), stack=True)
)
observation("rows without a leaf", spaces.Sequence(spaces.Tuple(())), (), "one must be an input")
observation("a set of sets", spaces.Sequence(ROWS), None, "not supported inside a Sequence")
observation("a set of graphs", spaces.Sequence(GRAPH), None, "not supported inside a Sequence")
observation(
    "a pixel of 256 in a set", spaces.Sequence(BYTES, stack=True), [[0, 256]], "value 256 in row 0"
)
observation("width 0 in a set", spaces.Sequence(vector(0), stack=True), flags="--norm-obs")
observation("a set of pictures", spaces.Sequence(spaces.Box(0, 255, (8, 8, 3), np.uint8)))

# node_ids
ids = lambda *values: lambda env: {"g": graph(3), "node_ids": np.array(values)}  # noqa: E731
observation("ids near 2^62", IDS, ids(2**62, 2**62 - 1, 0))
observation("ids below 0", IDS, ids(-5, -6, -(2**62)))
observation("ids at the ends of int64", IDS, ids(2**63 - 1, -(2**63), 0))
observation("ids of 2^63", IDS, ids(2**63, 1, 2), "leaf 'node_ids'")
observation("an id twice", IDS, ids(4, 5, 4), "the id 4 occurs twice")
observation("ids as floats", IDS, ids(1.0, 2, 3), "dtype float64")
observation("ids as text", IDS, ids("a", "b", "c"), "dtype <U1")
observation("ids for two of three nodes", IDS, ids(1, 2), "2 rows where 'g.nodes' has 3")
observation("ids that are new in each step", IDS, lambda env: ids(*(np.arange(3) + 3 * env.t))(env))
observation("ids of width 1", WITH_IDS, ids([1], [2], [3]), is_again=False)
float_ids = spaces.Dict(g=GRAPH, node_ids=spaces.Sequence(vector(), stack=True))
observation("ids that are one float32", float_ids, ids(2.0**24, 2.0**24 + 1, 0), "must be integers")
for script in ("ppo_lstm_sparse", "ppo_gtrxl", "ppo_framestack"):
    observation(f"ids near 2^62, {script}", IDS, ids(2**62, 2**62 - 1, 0), script=script)
    observation(f"ids below 0, {script}", IDS, ids(-1, -2, -(2**62)), script=script)
observation(
    "ids at the ends, remembered edges",
    IDS,
    ids(2**63 - 1, -(2**63), 0),
    script="ppo_lstm_sparse",
    flags="--remember-edges",
)

# Masks
allowed = lambda *options: dict(accept=lambda env, action: action in options)  # noqa: E731
observation("mask of bools", MASKED, masked_only(np.array([True, False, True])), **allowed(0, 2))
observation("mask of 2 and -1", MASKED, masked_only(np.array([2, 0, -1])), **allowed(0, 2))
observation("mask as a list", MASKED, masked_only([0, 0, 1]), **allowed(2))
observation("mask entry of 256", MASKED, masked_only(np.array([256, 0, 1])), "value 256")
observation("mask of NaN", MASKED, masked_only(np.array([np.nan, 0, 1])), "dtype float64")
observation("mask of nothing", MASKED, masked_only(np.zeros(3, int)), **allowed(0, 1, 2))
observation("mask too short", MASKED, masked_only(np.ones(2, int)), r"shape \(2,\)")
observation("mask too long", MASKED, masked_only(np.ones(4, int)), r"shape \(4,\)")
observation("mask is None", MASKED, masked_only(None), "dtype object")
small = spaces.Dict(x=PAIR, action_mask=vector(3, low=0, high=1))
observation("mask of small floats", small, masked_only([1e-30, 0, 0]), **allowed(0))
observation("mask of vanishing floats", small, masked_only([1e-60, 0, 0]), **allowed(0, 1, 2))
observation("mask of floats that are NaN", small, masked_only([np.nan, 1, 0]), "value nan")
of_two = spaces.Dict(x=PAIR, action_mask=spaces.MultiBinary(2))
observation("mask space too short", of_two, None, "does not fit Discrete")
observation(
    "mask of a Box", spaces.Dict(x=PAIR, action_mask=MASK_OF_ROWS), None, "fit", action=PAIR
)
observation(
    "mask with a start",
    MASKED,
    masked_only([0, 1, 0]),
    action=spaces.Discrete(3, start=-4),
    **allowed(-3),
)
observation(
    "mask in a matrix",
    spaces.Dict(x=PAIR, action_mask=spaces.MultiBinary((3, 1))),
    masked_only([[0], [1], [0]]),
    **allowed(1),
)
observation(
    "mask as long as the edges",
    spaces.Dict(g=GRAPH, action_mask=MASK_OF_ROWS),
    lambda env: {"g": graph(3), "action_mask": np.ones(2, np.int8)},
    "--action-head edges",
)
observation(
    "mask of edges",
    spaces.Dict(g=GRAPH, action_mask=MASK_OF_ROWS),
    lambda env: {"g": graph(3), "action_mask": np.array([0, 1], np.int8)},
    flags="--action-head edges",
    **allowed(1),
)
observation(
    "more nodes than actions",
    spaces.Dict(g=GRAPH, action_mask=MASK_OF_ROWS),
    lambda env: {"g": graph(4), "action_mask": np.ones(4, np.int8)},
    "4 rows to choose from",
)
choice = spaces.Dict(avail_actions=SET)
observation("nothing to choose", choice, {"avail_actions": np.zeros((0, 2))}, "0 rows to choose")
observation("one thing to choose", choice, {"avail_actions": np.ones((1, 2))}, **allowed(0))
observation(
    "the mask comes late",
    PAIR,
    None,
    "the first reset had none",
    change=lambda *result: (*result[:4], {"action_mask": np.ones(3)}),
)


# ---- Actions ----
def action(name, space, expected="trains", **fields) -> None:
    add("actions", name, expected, action=space, **fields)


def of_type(kind: type) -> Callable:
    return lambda env, action: type(action) is kind


def ends_at(space: gym.Space) -> Callable:
    """A space whose bound is the environment's keyword argument b."""
    return lambda env: space(env.kwargs["b"])


action("Discrete", THREE, accept=of_type(np.int64), after=chance(3))
action("one option", spaces.Discrete(1))
action("a start below 0", spaces.Discrete(3, start=-7), after=chance(3))
action("a huge start", spaces.Discrete(3, start=2**40), after=chance(3))
action("Discrete of int8", spaces.Discrete(3, start=100, dtype=np.int8), after=chance(3))
action("2^40 options", spaces.Discrete(2**40), "over 10000000 options")
action("own classes", spaces.Tuple((OwnDiscrete(3), OwnBox(-1, 1, (2,)))))
action("MultiDiscrete in a matrix", spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]]))
action("no MultiDiscrete", spaces.MultiDiscrete([]), "nothing to choose")
action("bits in a matrix", spaces.MultiBinary((2, 2)))
action("1,200 bits", spaces.MultiBinary(1200))
action("1,000 numbers", vector(1000))
action("1,001 parts", spaces.Tuple([spaces.Discrete(2)] * 1001))
action("no number", vector(0), "nothing to choose")
action("no part", spaces.Tuple(()), "nothing to choose")
action("no name", spaces.Dict({}), "nothing to choose")
action("a number", vector())
action("numbers in a matrix", vector(2, 3))
action("doubles", vector(2, dtype=np.float64))
action("halves", vector(2, dtype=np.float16))
action("big-endian numbers", vector(2, dtype=np.dtype(">f4")))
action("numbers without bounds", vector(2, low=-np.inf, high=np.inf))
action("one bound", vector(2, low=0, high=np.inf))
action("bounds that are equal", vector(2, low=0.5, high=0.5))
action("std from the network", vector(2), flags="--state-dependent-std")
action("integers in a Box", spaces.Box(0, 3, (2,), np.int32))
action("bytes in a Box", BYTES)
action("text", spaces.Text(4), "is not supported")
action("a graph", GRAPH, "is not supported")
action("an own space", OwnSpace((2,), np.float32), "is not supported")
action("None", lambda env: None, "is not supported")
action("nested", spaces.Dict(a=spaces.Tuple((THREE, PAIR)), b=spaces.Dict(c=spaces.MultiBinary(2))))
action("names that look alike", spaces.Dict({"a.b": THREE, "a": spaces.Dict(b=spaces.Discrete(5))}))
action("in sequence", spaces.Tuple((THREE, PAIR, spaces.MultiBinary(2))), flags="--autoregressive")
action("a node", spaces.Dict(node=spaces.Discrete(9)), observation=GRAPH, show=graph(3))
action("a node without a graph", spaces.Dict(node=THREE))
per_node = dict(observation=GRAPH, show=lambda env: graph(1 + env.t % 3, None))
none_at_times = dict(observation=SET, show=lambda env: np.ones((int(env.t == 2), 2)))
for stack in (True, False):
    action(f"one per node, stack={stack}", spaces.Sequence(THREE, stack=stack), **per_node)
    action(f"vectors per node, stack={stack}", spaces.Sequence(PAIR, stack=stack), **per_node)
    action(f"mostly no row, stack={stack}", spaces.Sequence(THREE, stack=stack), **none_at_times)
    action(
        f"no width per row, {stack}", spaces.Sequence(vector(0), stack=stack), "nothing", **per_node
    )
action("few rows, framestack", spaces.Sequence(THREE), script="ppo_framestack", **none_at_times)
action("parts per node", spaces.Sequence(spaces.Tuple((THREE, PAIR))), **per_node)
action("a Sequence of Sequences", spaces.Sequence(spaces.Sequence(THREE)), "not supp", **per_node)
action("a Sequence without rows", spaces.Sequence(THREE), "there are no such rows to act")
differ = "not all entries have the action space"
two_bounds = [{"b": 0.1}, {"b": 5.0}]
action("own bounds", ends_at(lambda b: vector(2, low=-b, high=b)), differ, kwargs=two_bounds)
action(
    "own bounds in a Dict",
    ends_at(lambda b: spaces.Dict(a=vector(2, low=-b, high=b))),
    differ,
    kwargs=two_bounds,
)
starts = [{"b": 0}, {"b": 7}]
action("own starts", ends_at(lambda b: spaces.Discrete(3, start=b)), differ, kwargs=starts)
action(
    "own starts of several",
    ends_at(lambda b: spaces.MultiDiscrete([2, 2], start=[b, b])),
    differ,
    kwargs=starts,
)
action("own numbers of options", ends_at(lambda b: spaces.Discrete(3 + b)), differ, kwargs=starts)
action("own shapes", ends_at(lambda b: vector(2 + b)), differ, kwargs=starts)
action("own kinds", ends_at(lambda b: THREE if b else PAIR), differ, kwargs=starts)
action("own names", ends_at(lambda b: spaces.Dict({f"{b}": THREE})), differ, kwargs=starts)
action(
    "own number of nodes",
    ends_at(lambda b: spaces.Dict(node=spaces.Discrete(9 + b))),
    kwargs=starts,
    observation=GRAPH,
    show=graph(3),
)


# ---- What step, reset and info return ----
def returns(name, expected="trains", observation=PAIR, **changes) -> None:
    """A step whose reward, terminated, truncated or info is another, or a function's value."""

    def change(*result):
        values = dict(zip(("obs", "reward", "terminated", "truncated", "info"), result))
        for key, value in changes.items():
            values[key] = value() if isinstance(value, types.FunctionType) else value
        return tuple(values.values())

    add("returns", name, expected, change=change)


def at_end(name, expected="trains", **info) -> None:
    """What `info` says when an episode ends."""
    returns(name, expected, terminated=True, info=info)


def result(name, expected="trains", change=None, first=None) -> None:
    """Another form of the result itself."""
    add("returns", name, expected, change=change, first=first, is_compared=expected == "trains")


class OwnFloat:
    def __float__(self):
        return 1.5

    def __repr__(self):
        return "OwnFloat"


Outcome = namedtuple("Outcome", "obs reward terminated truncated info")
for number in (True, np.bool_(1), np.float16(0.5), np.array(2.5), 7, Fraction(1, 2)):
    returns(f"reward {number!r}", reward=number)
returns("reward Decimal", "not a finite number", reward=Decimal(2))
returns("reward OwnFloat", "not a finite number", reward=OwnFloat())
returns("reward tensor", reward=lambda: tensor(2.0))
returns("reward with gradients", "requires_grad", reward=lambda: tensor(2.0, **grad))
returns("reward minus zero", reward=-0.0)
for bad in (np.nan, np.inf, -np.inf, 3.2e38, 10**39):
    returns(f"reward {bad}", "env 0, step 3: reward is .* not a finite number", reward=bad)
for bad in ("1.5", 1j, 10**400, [1.0, 2.0], {}, np.array([2.0, 1])):
    returns(
        f"reward {str(bad)[:20]}", "env 0, step 3: reward is .* not a finite number", reward=bad
    )
returns("reward None", "reward is None, not a finite number", reward=lambda: None)
returns("reward date", "not a finite number", reward=np.datetime64(3, "s"))
returns("terminated array", terminated=lambda: np.array([False]))
returns("terminated int64", terminated=np.int64(0))
returns("terminated tensor", terminated=lambda: tensor(True))
returns("terminated and truncated", terminated=True, truncated=True)
for bad in ("no", 2, np.nan, [], "False"):
    returns(f"terminated {bad!r}", "terminated is .*, not", terminated=bad)
returns("truncated None", "truncated is None, not", truncated=lambda: None)
returns("info None", info=lambda: None)
returns("info OrderedDict", info=OrderedDict(a=1))
for bad in ([3], "text", 3, UserDict(a=1)):
    returns(f"info {type(bad).__name__}", "info is .* not a dict", info=bad)
returns("info that cannot be pickled", info={"a": lambda: 0, "b": threading.Lock()})
returns("info with unknown keys", info={1: 2, None: 3, "final_info": [], "rewards": "x"})
at_end("episode None", episode=None)
at_end("episode of arrays", episode={"r": np.array([3.0]), "l": np.array([3])})
for bad in (None, np.nan, np.ones(2), "9"):
    at_end(f"episode r {bad}", "is not a finite number", episode={"r": bad})
for group in ("a/b", "../../x", "a|b\nc", "x" * 500, 3, np.str_("z"), (1, 2), b"b", "", True):
    at_end(f"group {str(group)[:9]!r} {type(group).__name__}", group=group)
at_end("group list", group=["a"])
at_end("group that cannot be pickled", group=lambda: 0)
at_end("eval None", eval=None)
at_end("eval number", eval=3.0)
at_end("cost nan", "is not a finite number", eval={"cost": np.nan})
at_end("cost text", "is not a finite number", eval={"cost": "x"})
at_end("cost array", eval={"cost": np.array([3.0]), "rule|1": 2})
at_end("a column of the evaluation", "a column of the evaluation's own", eval={"instance": 3})
at_end("name that is a number", eval={1: 2})
result("a namedtuple", change=lambda *values: Outcome(*values))
result("four values", "5 values", lambda *values: values[:4])
result("six values", "5 values", lambda *values: (*values, 1))
result("a list", "5 values", lambda *values: list(values))
result("nothing", "5 values", lambda *values: None)
result("a generator", "5 values", lambda *values: (value for value in values))
result("reset: only an observation", "2 values", first=lambda obs: obs)
result("reset: nothing", "2 values", first=lambda obs: None)
result("reset: three values", "2 values", first=lambda obs: (obs, {}, 1))
result("reset: info None", first=lambda obs: (obs, None))
result("reset: info text", first=lambda obs: (obs, "text"))
mask_info = {"action_mask": np.array([0, 1, 0], np.int8)}
result("mask of reset alone", "cannot be read", first=lambda obs: (obs, mask_info))


# ---- Faults of the process ----
def process(name, hook, expected="trains", at="step", flags="", **fields) -> None:
    """`hook` is called in the third step of the first environment, or at another moment."""
    flags += " --checkpoint-every 1"
    add("process", name, expected, hooks={at: hook}, flags=flags, **fields)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class NoCopy(Exception):
    def __init__(self, a, b):
        super().__init__("two arguments")


def of_torch(doing: Callable) -> Callable:
    return lambda env: doing(sys.modules["torch"])


def kill(number: int) -> Callable:
    return lambda env: os.kill(os.getpid(), number)


def patch(module, name, value) -> Callable:
    return lambda env: setattr(module, name, value)


def forks(env):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)


def elsewhere(env):
    os.makedirs(f"{FOLDER}/elsewhere", exist_ok=True)
    os.chdir(f"{FOLDER}/elsewhere")


def folder_gone(env):
    elsewhere(env)
    os.rmdir(f"{FOLDER}/elsewhere")


def runs_gone(env):
    shutil.rmtree(f"{FOLDER}/runs", ignore_errors=True)


WORKERS = "--num-workers 2"
SOON = "--num-workers 2 --env-timeout 1"
for flags in ("", WORKERS):
    where = " in a worker" * bool(flags)
    last = "env 0, step 3, step"
    process(f"raises KeyError{where}", raises(KeyError("a")), f"{last}.*KeyError: 'a'", flags=flags)
    process(f"raises StopIteration{where}", raises(StopIteration(1)), last, flags=flags)
    process(f"raises RecursionError{where}", raises(RecursionError("deep")), last, flags=flags)
    process(f"raises MemoryError{where}", raises(MemoryError()), last, flags=flags)
    process(f"raises OSError{where}", raises(OSError(5, "broken")), last, flags=flags)
    process(f"raises BrokenPipeError{where}", raises(BrokenPipeError(32, "p")), last, flags=flags)
    process(f"raises EOFError{where}", raises(EOFError()), last, flags=flags)
    process(f"raises a long text{where}", raises(ValueError("x" * 10**6)), last, flags=flags)
    process(
        f"raises what is no text{where}", raises(ValueError(b"\xff", "\ud800")), last, flags=flags
    )
    process(f"raises what cannot be copied{where}", raises(NoCopy(1, 2)), last, flags=flags)
    process(f"exits with 0{where}", lambda env: sys.exit(0), f"{last}.*SystemExit: 0", flags=flags)
    process(f"closes stdin{where}", lambda env: os.closerange(0, 1), flags=flags)
    process(f"changes the folder{where}", elsewhere, flags=flags)
    process(f"the folder is gone{where}", folder_gone, flags=flags)
    process(f"forks{where}", forks, flags=flags)
    process(f"prints a lot{where}", lambda env: print("x" * 10**6), flags=flags)
    process(f"close() raises{where}", raises(OSError("stuck")), at="close", flags=flags)
    process(f"close() exits{where}", lambda env: sys.exit(0), at="close", flags=flags)
process("raises an exception without a text", raises(Mute()), "env 0, step 3")
process("raises in its constructor", raises(KeyError("licence")), "licence", at="init")
process("raises in reset", raises(KeyError("bridge")), "reset.*bridge", at="reset")
process("numpy raises", lambda env: np.seterr(all="raise"))
process("seeds numpy and random", lambda env: (np.random.seed(0), random.seed(0)))
process("seeds torch", of_torch(lambda torch: torch.manual_seed(0)))
process("torch makes doubles", of_torch(lambda torch: torch.set_default_dtype(torch.float64)))
process("torch makes no gradients", of_torch(lambda torch: torch.set_grad_enabled(False)))
process("time stands still", lambda env: setattr(time, "time", lambda: 0.0))
process("forgets its id", lambda env: gym.registry.pop("Hostile-v0", None), "doesn't exist")
process("stdout is None", patch(sys, "stdout", None))
process("umask of all", lambda env: os.umask(0o777))
process(
    "a thread without an end", lambda env: threading.Thread(target=time.sleep, args=(99,)).start()
)
process(
    "starts a program", lambda env: subprocess.run(["cat"], check=True, stdin=subprocess.DEVNULL)
)
process("the runs are gone", runs_gone, "No such file .*/runs/")
process(
    "its copies append to a file", lambda env: note("appended", 1), says="repeat up to 16 steps"
)
process("SIGTERM", kill(signal.SIGTERM), "exit code 143.*SIGTERM: stops after")
process("SIGINT", kill(signal.SIGINT), "exit code 130.*SIGINT: stops after")
twice = lambda env: (kill(signal.SIGTERM)(env), kill(signal.SIGTERM)(env))  # noqa: E731
process("SIGTERM twice", twice, "exit code 143")
process("a worker is killed", kill(signal.SIGKILL), "died with exit code -9", flags=WORKERS)
process("a worker leaves", lambda env: os._exit(0), "died with exit code 0", flags=WORKERS)
process("a worker has a fault", kill(signal.SIGSEGV), "died with exit code -11", flags=WORKERS)
process("a worker is stopped", kill(signal.SIGSTOP), "did not answer within", flags=SOON)
process("a worker sleeps", wait(), "did not answer within", flags=SOON)
process(
    "reset in a worker sleeps",
    lambda env: env.index == 0 and time.sleep(99),
    "not answer",
    at="reset",
    flags=SOON,
)
process(
    "a worker is stopped before large actions",
    kill(signal.SIGSTOP),
    "did not answer",
    flags=SOON,
    action=vector(200_000),
    limit=60,
)


def half_an_answer(env):
    """The worker stops while it writes a large answer."""
    signal.signal(signal.SIGALRM, lambda *args: os.kill(os.getpid(), signal.SIGSTOP))
    signal.setitimer(signal.ITIMER_REAL, 0.05)


process(
    "a worker stops in a large answer",
    half_an_answer,
    "did not answer within",
    flags=SOON,
    observation=vector(2_000_000),
    limit=60,
)


# ---- Files ----
def files(name, expected="trains", before=None, flags="", after=None, **fields) -> None:
    add("files", name, expected, before=before, flags=flags, after=after, **fields)


def newest(pattern: str) -> Path:
    return max(Path(FOLDER).glob(f"runs/*/{pattern}"))


def after_run(change: Callable | None = None, more: str = "--save-model --checkpoint-every 1"):
    """A whole run, and a change of what it has left."""

    def before(go):
        go(more)
        model = newest("model.pt") if "--save-model" in more else None
        if model:
            shutil.copy(model, f"{FOLDER}/model.pt")
        if change:
            change()

    return before


def damage(pattern: str, offset: int) -> Callable:
    def change():
        path = newest(pattern) if "/" not in pattern else Path(FOLDER, pattern.strip("/"))
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return change


def cut(pattern: str) -> Callable:
    def change():
        path = newest(pattern) if "/" not in pattern else Path(FOLDER, pattern.strip("/"))
        path.write_bytes(path.read_bytes()[:1000])

    return change


def rewritten(function: Callable) -> Callable:
    """model.pt, changed by `function`."""

    def change():
        torch = sys.modules["torch"]
        saved = torch.load(f"{FOLDER}/model.pt", weights_only=True)
        torch.save(function(saved), f"{FOLDER}/model.pt")

    return change


def no_number(saved):
    next(iter(saved["model"].values())).fill_(np.nan)
    return saved


def limit(size: int) -> Callable:
    """Files may not grow beyond `size`: a full disk."""
    import resource

    return lambda env: resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))


def to_full_device():
    (newest("checkpoint*").parent / "unfinished.tmp").symlink_to("/dev/full")


def in_place_of(name: str) -> Callable:
    """A folder of that name is in the run's folder."""
    return lambda env: Path(max(Path(FOLDER).glob("runs/*")), name).mkdir(exist_ok=True)


MODEL = "--load-model model.pt"
for name, change in {
    "cut off": cut("/model.pt"),
    "text": lambda: Path(FOLDER, "model.pt").write_text("text"),
    "empty": lambda: Path(FOLDER, "model.pt").write_bytes(b""),
    "a list": rewritten(lambda saved: [saved]),
    "without weights": rewritten(lambda saved: {"args": saved["args"]}),
}.items():
    files(f"a model, {name}", "not a file that a run wrote", after_run(change), MODEL)
files("a model", before=after_run(), flags=MODEL, says="taken from the file: ", is_compared=False)
files("a model of NaN", "not finite", after_run(rewritten(no_number)), MODEL)
files("a model of another width", "is of another network", after_run(), f"{MODEL} --hidden-dims 5")
files("no model", "nowhere.pt", flags="--load-model nowhere.pt")
files(
    "a checkpoint for a model",
    "load-model .*ckpt|not a file",
    after_run(lambda: shutil.copy(newest("*.ckpt"), f"{FOLDER}/model.pt")),
    MODEL,
)
AUTO = "--resume auto --checkpoint-every 1 --total-timesteps 96"
resumed = dict(flags=AUTO, says="goes on from", is_compared=False)
files("a checkpoint", before=after_run(), **resumed)
files(
    "a checkpoint that is cut off",
    before=after_run(cut("*.ckpt")),
    **resumed | {"says": "is left out.*goes on"},
)
files(
    "a checkpoint with another bit",
    before=after_run(damage("*.ckpt", -100)),
    **resumed | {"says": "is left out.*goes on"},
)
files("nothing to resume", flags=AUTO, says="starting anew")
files(
    "other flags", "--learning-rate 0.1, it was", after_run(), "--resume auto --learning-rate 0.1"
)
files("a model to resume from", r"checkpoint_\*.ckpt is needed", after_run(), "--resume model.pt")
files("no folder to resume from", "nowhere: auto", flags="--resume nowhere")
files("a full disk", "cannot write .*No space left", after_run(to_full_device), AUTO)
files(
    "a full disk at the start",
    "cannot write to the folder of the run",
    lambda go: limit(1000)(None),
)
files(
    "a full disk at the first checkpoint",
    "cannot write .*checkpoint",
    lambda go: limit(70_000)(None),
    "--hidden-dims 512 --checkpoint-every 1",
)
files(
    "a full disk at the model",
    "model.pt|too large",
    lambda go: limit(70_000)(None),
    "--hidden-dims 512 512 --save-model",
)
files(
    "a file for the folder of runs",
    "cannot write to the folder",
    lambda go: Path(FOLDER, "runs").touch(),
)
files("a folder that nobody can write", "cannot write to the folder", flags="--run-dir /proc/nope")
files(
    "a folder for the model",
    "model.pt",
    hooks=dict(step=in_place_of("model.pt")),
    flags="--save-model",
)
files("a folder for the table", "cannot write .*eval.md", hooks=dict(step=in_place_of("eval.md")))
files("a folder of letters", flags="--run-dir ä\0ö[*]")


class Counts:
    """What an environment keeps beside itself: how often one began an episode."""

    resets = 0


def count(env):
    Counts.resets += 1


def another_weight(saved):
    saved["model"]["more"] = next(iter(saved["model"].values()))
    return saved


def output_of(*command: str, folder: str = "", **variables: str) -> str:
    """What a command prints, in a folder below FOLDER."""
    done = subprocess.run(
        command,
        cwd=Path(FOLDER, folder),
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


def wrong_diffs():
    """What git says of the diffs of the README."""
    shutil.copytree(ROOT / "cleanrl_graph", f"{FOLDER}/copy/cleanrl_graph")
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert diffs
    for k, diff in enumerate(diffs):
        Path(FOLDER, f"{k}.diff").write_text(diff)
        text = output_of("git", "apply", "--check", f"../{k}.diff", folder="copy")
        if text:
            return f"diff {k}: {text}"


def wrong_flag_alone():
    """What a script that was copied alone says of a flag of the services."""
    os.mkdir(f"{FOLDER}/alone")
    shutil.copy(ROOT / "cleanrl_graph" / "ppo_graph.py", f"{FOLDER}/alone")
    hidden = "import sys\nsys.modules['cleanrl_graph'] = None  # as if it were not installed\n"
    Path(FOLDER, "alone", "sitecustomize.py").write_text(hidden)
    command = (sys.executable, "ppo_graph.py", "--capture-video")
    text = output_of(*command, folder="alone", PYTHONPATH=f"{FOLDER}/alone")
    return None if re.search("Unrecognized .*--capture-video", text, re.S) else text


def wrong_layer():
    """What make_conv does with a name that it does not know."""
    from cleanrl_graph import ppo_graph

    with contextlib.suppress(ppo_graph.UsageError):
        return str(ppo_graph.make_conv("gcn", 8, None, "sum"))


def wrong_ranks():
    """Whether ranks beside one that fails say so, and the library below them is not heard."""
    kwargs = json.dumps({"name": "process: raises KeyError"})
    script = str(ROOT / "cleanrl_graph" / "ppo_graph.py")
    flags = (
        f"--env-id hostile:Hostile-v0 --no-cuda --num-envs 2 --num-steps 8 --env-kwargs {kwargs!r}"
    )
    text = output_of(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(script, *shlex.split(flags)),
        PYTHONPATH=str(ROOT / "tests"),
    )
    if "another rank has ended" not in text or "KeyError: 'a'" not in text:
        return text
    return "frames of gloo" if "distributed_c10d.py" in text else None


def wrong_video():
    """Whether the episodes are shown at the environment's frames per second."""
    from PIL import Image

    with Image.open(newest("episode.gif")) as film:
        is_right = film.info["duration"] == 20 and film.n_frames == 18
        return None if is_right else f"{film.n_frames} pictures, {film.info}"


files(
    "a checkpoint of what is kept on a class",
    before=after_run(),
    observation=vector(2, low=0, high=10**6),
    show=lambda env: [env.t, Counts.resets],
    hooks=dict(reset=count),
    **resumed | {"says": "begins a new episode when the run is resumed.*goes on from"},
)
files(
    "a model of a changed script",
    "changed before or since",
    after_run(rewritten(another_weight)),
    MODEL,
)
files("the diffs of the README", after=wrong_diffs)
files("a script alone", after=wrong_flag_alone)
process("a rank fails", lambda env: None, after=wrong_ranks, limit=120)


# ---- Flags ----
def flag(flags: str, expected: str = "trains", **fields) -> None:
    add("flags", fields.pop("name", flags), expected, flags=flags, **fields)


for wrong in (
    "--num-envs 0", "--num-envs -3", "--num-steps 0", "--num-minibatches 0", "--update-epochs 0",
    "--gamma 1.5", "--gamma nan", "--gae-lambda -0.1", "--clip-coef -1", "--ent-coef inf",
    "--vf-coef nan", "--max-grad-norm nan", "--max-grad-norm -1", "--target-kl -1",
    "--learning-rate nan", "--learning-rate -1", "--num-workers -1", "--env-timeout nan",
    "--checkpoint-every -1", "--checkpoint-minutes nan", "--eval-episodes -1",
    "--eval-max-steps 0", "--gnn-dim 0", "--gnn-layers 0", "--hidden-dims 16 0", "--seed -1",
    "--seed 5000000000", "--total-timesteps -1",
):  # fmt: skip
    flag(wrong, f"{wrong.split()[0]} .*a number from")
flag("--num-minibatches 1000", "exceeds the 16 steps")
flag("--total-timesteps 10", "is less than a rollout of 16 steps")
flag("--gnn-dim 62 --gnn gatv2", "need a multiple of 4")
flag("--gnn nope", "exit code 2.*--gnn")
flag("--gnn sage", name="a layer that make_conv does not know", after=wrong_layer)
flag("--gamma text", "exit code 2.*gamma")
flag("--nope 3", "exit code 2.*nope")
flag("--learning-rate 1e30", "update .* is (nan|inf)")
flag("--learning-rate 0")
flag("--max-grad-norm inf")
flag("--clip-coef 0 --target-kl 0 --gamma 0 --gae-lambda 0")
flag("--num-steps 1 --num-minibatches 1", name="--num-steps 1")
flag("--num-workers 5", name="more workers than environments")
flag("--total-timesteps 0", name="no training")
flag(
    "--checkpoint-minutes 0.0001 --checkpoint-every 100",
    name="checkpoints by minutes",
    after=lambda: None if list(Path(FOLDER).glob("runs/*/*.ckpt")) else "there is no checkpoint",
)
flag("--action-head nodes", "--action-head nodes needs")
flag("--action-head nope", "--action-head nope needs")
flag("--eval-suite nope", "--eval-suite nope: .* has the suites")
flag("--capture-video", after=wrong_video)
flag("--wrap nope", "there is no such wrapper")
flag("--wrap hide:9", "--wrap hide:9: numbers from 0")
flag("--wrap z:skill:0", "a number of at least 1")
flag("--wrap math:sqrt", "wrap|TypeError|sqrt")
flag("--env-id Nope-v0", "doesn't exist")
flag("--env-id nowhere:Nope-v0", "No module named")
flag("--env-id a:b:c", "a:b:c")
flag("--env-kwargs []", "an object, or a list of at least one")
flag("--env-kwargs 3", "an object|exit code 2")
flag("--env-kwargs {", "exit code 2")
flag("--exp-name " + "x" * 300, "cannot write to the folder of the run", name="--exp-name too long")
flag("--exp-name a/../../b", name="--exp-name with a path")
flag("--exp-name [*]", name="--exp-name of a pattern")
for script, wrong in {
    "ppo_framestack": "--obs-shifts=abc",
    "ppo_gtrxl": "--memory-length -1",
    "ppo_lstm_sparse": "--lstm-dim 0",
}.items():
    flag(wrong, f"{wrong.split('=')[0].split()[0]}", script=script)
flag("--num-heads 3", "num-heads|heads", script="ppo_gtrxl")
picture = dict(flags="--capture-video", kwargs={})
for name, frame in {
    "floats": np.zeros((8, 8, 3)),
    "no axis": np.zeros(8, np.uint8),
    "text": "picture",
    "five channels": np.zeros((8, 8, 5), np.uint8),
    "numbers up to 300": np.full((8, 8, 3), 300),
}.items():
    add(
        "flags",
        f"frames: {name}",
        "cannot render",
        hooks=dict(render=lambda env, f=frame: f),
        **picture,
    )
