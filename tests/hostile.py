"""The tries of tries.py: an environment that can do anything, what it does, what should come of it.

It imports little, since processes that load copies of environments import it. A try runs in a
folder of its own: FOLDER, in which environments leave notes."""

import contextlib
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
import types
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.spaces import MultiBinary

FOLDER = "."
ROOT = Path(__file__).resolve().parents[1]
TRIES = {}


def vector(*shape, low=-1.0, high=1.0, dtype=np.float32):
    return spaces.Box(low, high, shape, dtype)


def whole(dtype, *shape):
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
    limit: float = 120.0  # seconds


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


def plain(space: gym.Space, name: str = "") -> Any:
    """An observation with nothing wrong: three rows of each kind, two edges, ids that differ."""
    if isinstance(space, spaces.Dict):
        return {k: plain(child, k) for k, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(plain(child) for child in space)
    if isinstance(space, spaces.Graph):
        edges = None if space.edge_space is None else np.stack([plain(space.edge_space)] * 2)
        nodes = np.stack([plain(space.node_space)] * 3)
        return spaces.GraphInstance(nodes, edges, np.array([[0, 1], [2, 0]]))
    if isinstance(space, spaces.Sequence) and not space.stack:
        return (plain(space.feature_space),) * 3
    if isinstance(space, spaces.Sequence):
        row = plain(space.feature_space)
        if isinstance(row, dict):
            return {k: np.stack([value] * 3) for k, value in row.items()}
        return np.arange(3) if name == "node_ids" else np.stack([row] * 3)
    value = 1 if name == "action_mask" else getattr(space, "start", 0)
    return np.zeros(space.shape, space.dtype) + np.asarray(value, space.dtype)


# ---- The environment ----
class Hostile(gym.Env):
    """Episodes of 5 steps, which end and are cut off in turn. What a try does it does in the third
    step of each episode of the second environment."""

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

    def __setstate__(self, state):
        vars(self).update(state, pid=None)  # a copy notes nothing

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
        return self.t == 3 and self.index == 1

    def observe(self):
        show = TRIES[self.name].show
        if isinstance(show, types.FunctionType):
            return show(self)
        if show is None and self.observation_space == PAIR:
            return counted(self)
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
def fine(name, space, show=None, **fields) -> None:
    """`show` is read as it is."""
    add("observations", name, observation=space, show=show, **fields)


def refused(name, space, expected, **fields) -> None:
    """A space without a meaning, which is said before the first step."""
    add("observations", name, expected, observation=space, **fields)


def wrong(name, space, bad, leaf, words, **fields) -> None:
    """An observation, or what a function of the environment returns, that the leaf has wrong."""

    def show(env):
        if not env.is_now():
            return plain(env.observation_space)
        return bad(env) if isinstance(bad, types.FunctionType) else bad

    sentence = f"env 1, leaf '{leaf}', step 3: .*{re.escape(words)}"
    add("observations", name, sentence, observation=space, show=show, **fields)


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


def put(value, at, *shape):
    """Zeros, but for one number."""
    array = np.zeros(shape, np.float32)
    array[at] = value
    return array


def in_buffer(change: Callable) -> Callable:
    """Shows env.buffer, into which it writes at every step; `change` makes an observation of it."""

    def show(env):
        if not hasattr(env, "buffer"):
            env.buffer = np.zeros((3, 2), np.float32)
        env.buffer[:] = env.t + env.num_episodes / 100
        return change(env.buffer)

    return show


def masked(mask) -> Callable:
    return lambda env: {"x": counted(env), "action_mask": mask}


def rows_masked(mask, nodes=3):
    return {"g": graph(nodes, [[0, 0]] * 2), "action_mask": np.array(mask, np.int8)}


def stacked(space):
    return spaces.Sequence(space, stack=True)


def with_mask(mask, **more):
    return spaces.Dict(x=PAIR, action_mask=mask, **more)


def with_ids(space):
    return spaces.Dict(g=GRAPH, node_ids=stacked(space))


GRAPH = spaces.Graph(PAIR, None)
EDGES = spaces.Graph(PAIR, vector(1))
SET = stacked(PAIR)
ROWS = spaces.Sequence(PAIR, stack=False)
BYTES = spaces.Box(0, 255, (2,), np.uint8)
MASK_OF_ROWS = stacked(spaces.Box(0, 1, (), np.int8))
IDS = with_ids(spaces.Box(0, 2**62, (), np.int64))
MASKED = with_mask(MultiBinary(3))
ROWS_MASKED = spaces.Dict(g=GRAPH, action_mask=MASK_OF_ROWS)
two = spaces.Dict(a=PAIR, b=vector(2))
deep = spaces.Dict(a=spaces.Tuple((THREE, PAIR)))


OwnBox = type("OwnBox", (spaces.Box,), {})
OwnDict = type("OwnDict", (spaces.Dict,), {})
OwnDiscrete = type("OwnDiscrete", (spaces.Discrete,), {})
OwnSpace = type("OwnSpace", (gym.Space,), {})


def read_only(env):
    array = counted(env)
    array.flags.writeable = False
    return array


SHARED = np.zeros(2, np.float32)


def of_all(env):
    SHARED[:] = env.index if env.index is not None else -1, env.t
    return SHARED


# Dtypes, orders of bytes, layouts
for kind in (np.float64, np.float16, np.longdouble, ">f4", ">f8"):
    fine(f"as {np.dtype(kind)}", PAIR, lambda env, kind=kind: counted(env).astype(kind))
fine("big-endian integers", whole(np.int64), np.array([2**40, -3], ">i8"))
fine("space of big-endian integers", whole(np.dtype(">i4")), np.array([70000, -3]))
fine("space of float16", vector(2, dtype=np.float16), lambda env: np.float16(counted(env)))
fine("space of bool", spaces.Box(0, 1, (2,), np.bool_), np.array([True, False]))
fine("negative strides", PAIR, lambda env: counted(env)[::-1])
fine("read-only", PAIR, read_only)
fine("list", PAIR, [0.25, 1])
fine("tensor", PAIR, lambda env: tensor([0.5, env.t]))
gradients = lambda env: tensor([0.5, 1], requires_grad=True)
wrong("tensor with gradients", PAIR, gradients, "obs", "requires grad")
wrong("2 in a space of bool", spaces.Box(0, 1, (2,), np.bool_), [2, 0], "obs", "value 2")
wrong("rows of several lengths", vector(2, 2), [[1, 2], [3]], "obs", "cannot be read: ValueError")
for name, bad, kind in [
    ("objects that are floats", np.array([0.5, 1], object), "object"),
    ("complex", np.array([1j, 0]), "complex128"),
    ("bytes", b"ab", "|S2"),
    ("no observation", lambda env: None, "object"),
    ("an integer beyond floats", [2**1100, 0], "object"),
]:
    wrong(name, PAIR, bad, "obs", f"dtype {kind}")

# Values
for bad in (np.nan, np.inf, -np.inf, 1e39, -1e300):
    words = f"value {bad}{' exceeds float32' * bool(np.isfinite(bad))}"
    wrong(f"{bad}", PAIR, np.array([0, bad]), "obs", words)
wrong("1e39 as declared", vector(2, dtype=np.float64), np.array([0, 1e39]), "obs", "value 1e+39 ex")
wrong("nan further in", deep, {"a": (0, np.array([0, np.nan]))}, "a.1", "value nan")
fine("near the largest float", PAIR, np.array([3.3e38, 1], np.float32))
fine("outside of the bounds", PAIR, np.array([-50.0, 50]))
large = np.uint64(2**63)
for dtype, bad in [
    *((np.uint8, 300), (np.int8, -200), (np.int16, 40000), (np.uint16, 65536), (np.int32, 2**31)),
    *((np.uint32, -1), (np.uint64, -1), (np.int64, large), (np.uint64, large)),
]:
    words = f"value {bad}; {dtype.__name__} is declared"
    wrong(f"{bad} as {dtype.__name__}", whole(dtype), np.array([1, bad], type(bad)), "obs", words)
wrong("2^70", whole(np.int64), [2**70, 0], "obs", "dtype object")
wrong("floats where integers are declared", BYTES, np.array([2.0, 1]), "obs", "dtype float64")
wrong("256 as a bit", MultiBinary(2), np.array([256, 0]), "obs", "value 256")
fine("exact integers", whole(np.int64), np.array([2**62 + 1, -(2**62) - 1]))
fine("exact uint32", whole(np.uint32), np.array([2**32 - 1, 1], np.uint32))
two_kinds = lambda env: np.array([2**60 + 1], np.uint64 if env.index else np.int64)
fine("exact in two dtypes", whole(np.int64, 1), two_kinds)
fine("exact rows in two dtypes", stacked(whole(np.int64, 1)), lambda env: two_kinds(env)[None])

# Categories
fine("category as int8", THREE, lambda env: np.int8(env.t % 3))
fine("a huge start", spaces.Discrete(3, start=2**40), lambda env: 2**40 + env.t % 3)
for bad, words in {1.0: "dtype float64", 3: "value 3", -1: "value -1", 2**63: "value 92"}.items():
    wrong(f"category {bad!r} of 3", THREE, bad, "obs", words)
wrong("category 2^64", THREE, 2**64, "obs", "dtype object")
wrong("category further in", deep, {"a": (3, np.zeros(2))}, "a.0", "value 3")
many = spaces.MultiDiscrete([3, 2], start=[5, -1])
wrong("one of many", many, [8, 0], "obs", "value 8; MultiDiscrete([3 2], start=[ 5 -1]) has 5 to 7")
for space in (spaces.Discrete(2**40), spaces.MultiDiscrete([2, 2**40])):
    refused(f"2^40 in {type(space).__name__}", space, "leaf 'obs': .* has over 10000000 values")

# Shapes
turned = "shape (3, 2) where dtype float32"
wrong("matrix transposed", vector(2, 3), np.zeros((3, 2)), "obs", turned)
fine("width 0", vector(0), flags="--norm-obs")
fine("width 0 beside a vector", spaces.Dict(a=PAIR, b=vector(0)), flags="--norm-obs")
fine("an axis of 0", spaces.Dict(a=PAIR, b=vector(3, 0, 2)))
fine("100,000 numbers", vector(100_000))
changing = lambda env: vector(random.SystemRandom().randrange(3, 9999))
refused("space that changes", changing, r"not all entries have the observation space Box\(")

# Names
fine("a/b beside a: {b}", spaces.Dict({"a/b": PAIR, "a": spaces.Dict(b=PAIR)}))
fine("sets of like names", spaces.Dict({"a/b": SET, "a": spaces.Dict(b=SET)}))
fine("names of attributes", spaces.Dict(forward=PAIR, training=PAIR, weight=THREE, rows=PAIR))
alike = {"a.b": PAIR, "a": spaces.Dict(b=PAIR)}
refused("a.b beside a: {b}", spaces.Dict(alike), r"leaves \['a.b', 'a.b'\] need different names")
refused("g.nodes beside g", spaces.Dict({"g.nodes": PAIR, "g": GRAPH}), "different names")
refused("an empty name beside obs", spaces.Dict({"": PAIR, "obs": PAIR}), "different names")

# Containers
fine("an empty Dict inside", spaces.Dict(a=PAIR, b=spaces.Dict({}), c=spaces.Tuple(())))
fine("keys in another order", two, lambda env: OrderedDict(b=np.ones(2), a=counted(env)))
fine("a Tuple as a list", spaces.Tuple((PAIR, THREE)), lambda env: [counted(env), 1])
fine("own classes of spaces", OwnDict(a=OwnBox(-1, 1, (2,)), b=OwnDiscrete(3)))
fine("text space", spaces.Text(4), "ab", is_compared=False)
of_two = ", the space is a Dict with a, b"
wrong("a key is missing", two, {"a": np.ones(2)}, "b", f"KeyError 'b': it is a dict with a{of_two}")
wrong("a graph for a Dict", two, lambda env: graph(), "a", f": it is a GraphInstance{of_two}")
short = spaces.Tuple((PAIR, THREE))
kinds = "it is a tuple with ndarray, the space is a Tuple with Box, Discrete"
wrong("a Tuple too short", short, (np.ones(2),), "1", kinds)
of_mask = spaces.Dict(action_mask=MultiBinary(2))
for name, space in {
    "an empty Dict": spaces.Dict({}),
    "only a mask": of_mask,
    "only ids": spaces.Dict(node_ids=IDS["node_ids"]),
}.items():
    refused(name, space, r"leaves \[.*\] need different names, and one must be an input")
own = OwnSpace((2,), np.float32)
refused("an own space", own, "leaf 'obs': OwnSpace is not supported", show=np.ones(2))
refused("a space that is None", lambda env: None, "is not supported", show=np.ones(2))
one_of = spaces.OneOf([PAIR, THREE])
for name, space, expected in [
    ("OneOf", spaces.Dict(a=PAIR, b=one_of), "leaf 'b': OneOf.* is not supported"),
    ("text in a set", spaces.Sequence(spaces.Text(4)), "leaf 'obs': Text is not supported"),
    ("a set of sets", spaces.Dict(a=stacked(ROWS)), "leaf 'a': a Sequence {} a Sequence$"),
    ("a set of graphs", spaces.Sequence(GRAPH), "leaf 'obs': a Graph {} a Sequence$"),
    ("sets in a set", spaces.Sequence(spaces.Dict(b=ROWS)), "leaf 'b': a Sequence {} a Sequence$"),
]:
    refused(name, space, expected.replace("{}", "is not supported inside"))

# Buffers
fine("one buffer for ever", PAIR, in_buffer(lambda buffer: buffer[0]))
fine("a view of a buffer", vector(2, 3), in_buffer(lambda buffer: buffer.T))
fine("nodes in a buffer", GRAPH, in_buffer(lambda buffer: graph(buffer)))
fine("rows in a buffer", ROWS, in_buffer(lambda buffer: tuple(buffer)))
fine("one buffer of all environments", PAIR, of_all)

# Graphs
empty = np.zeros((0, 2), int)
fine("no node", GRAPH, graph(0, empty))
fine("no node, links None", GRAPH, graph(0, None))
fine("nodes None", GRAPH, spaces.GraphInstance(None, None, None), is_compared=False)
fine("no edge", EDGES, graph(3, None))
in_turn = lambda env: graph(3000 * (env.t % 2), empty)
fine("none and 3,000 nodes in turn", GRAPH, in_turn)
fine("links as uint64", GRAPH, graph(3, np.array([[0, 1]], np.uint64)))
fine("nodes that are matrices", spaces.Graph(vector(2, 3), vector()))
fine("nodes of width 0", spaces.Graph(vector(0), None), flags="--norm-obs")
fine("graph of tensors", GRAPH, lambda env: graph(tensor([[0.5, 1]] * 3), tensor([[0, 2]])))
for gnn in ("gatv2", "transformer", "sage"):
    fine(f"no node, {gnn}", EDGES, graph(0, None), flags=f"--gnn {gnn}")
of = " of a graph with 3 nodes"
turned = "shape (2, 3) where dtype int32, shape ('rows', 2) is declared; transpose: rows are edges"
for name, own, leaf, words in [
    ("an edge to node 3 of 3", graph(3, [[0, 1], [2, 3]]), "edge_links", f"value 3 in row 1{of}"),
    ("an edge to node 2^32", graph(3, [[0, 2**32]]), "edge_links", f"value {2**32} in row 0{of}"),
    ("an edge without nodes", graph(0, [[0, 0]]), "edge_links", "value 0 in row 0 of a graph wi"),
    ("links as floats", graph(3, [[0.0, 1]]), "edge_links", "dtype float64"),
    ("links transposed", graph(3, [[0, 1, 2], [2, 0, 1]]), "edge_links", turned),
    ("two links transposed", graph(2, [[0, 0], [1, 2]]), "edge_links", "nodes; if it is transpos"),
    ("nodes too wide", graph(width=3), "nodes", "shape (3, 3) where dtype float32, shape ('ro"),
    ("a node that is nan", graph(put(np.nan, (2, 1), 3, 2)), "nodes", "value nan in row 2"),
    ("a graph as a dict", dict(nodes=np.ones((2, 2))), "nodes", "cannot be read: AttributeError"),
]:
    wrong(name, GRAPH, own, f"obs.{leaf}", words)
edges_of = "rows where 'obs.edge_links' has 2"
wrong("edges of another number", EDGES, graph(edges=np.zeros((3, 1))), "obs.edges", f"3 {edges_of}")
wrong("links and no edges", EDGES, graph(), "obs.edges", f"0 {edges_of}")
wrong("an edge that is nan", EDGES, graph(edges=put(np.nan, 1, 2, 1)), "obs.edges", "nan in row 1")
coloured = graph(np.array([0, 3]), [[0, 1]])
wrong("a category of a node", spaces.Graph(THREE, None), coloured, "obs.nodes", "value 3 in row 1")

# Sets
fine("a set as a list", SET, [[0.5, 1], [2, 3]])
fine("an empty set", SET, np.zeros((0, 2)))
fine("rows that are none", ROWS, ())
generated = lambda env: (counted(env) for _ in range(3))
fine("rows from a generator", ROWS, generated, is_compared=False)
fine("rows as an array", ROWS, np.ones((3, 2)))
fine("width 0 in a set", stacked(vector(0)), flags="--norm-obs")
fine("a set of pictures", spaces.Sequence(spaces.Box(0, 255, (8, 8, 3), np.uint8)))
zeros = "shape ('rows', 2) is declared; no rows are np.zeros((0, 2), np.float32)"
wrong("an empty set as ()", SET, (), "obs", zeros)
wrong("rows too wide", ROWS, (np.ones(3),) * 2, "obs", "shape (2, 3) where dtype float32, shape")
wrong("rows of several widths", ROWS, (np.ones(2), np.ones(3)), "obs", "cannot be read: ")
wrong("None for rows", ROWS, lambda env: None, "obs", "cannot be read: ")
unequal = {"a": np.zeros((2, 2)), "b": np.zeros((3, 2))}
wrong("keys of a set disagree", stacked(two), unequal, "obs.b", "3 rows where 'obs' has 2")
wrong("a pixel of 256 in a set", stacked(BYTES), [[0, 0], [0, 256]], "obs", "value 256 in row 1")

# node_ids
ids = lambda *values: lambda env: {"g": graph(3), "node_ids": np.array(values)}
fine("ids that are new in each step", IDS, lambda env: ids(*(np.arange(3) + 3 * env.t))(env))
fine("ids of width 1", with_ids(whole(np.int64, 1)), ids([1], [2], [3]), is_again=False)
for name, values in {"near 2^62": (2**62, 2**62 - 1, 0), "below 0": (-5, -6, -(2**62))}.items():
    for script in ("ppo_graph", "ppo_lstm_sparse", "ppo_gtrxl", "ppo_framestack"):
        fine(f"ids {name}, {script}", IDS, ids(*values), script=script)
ends = ids(2**63 - 1, -(2**63), 0)
fine("ids at the ends of int64", IDS, ends)
nobody = {"g": graph(0, empty), "node_ids": np.zeros(0, int)}
some_nodes = lambda env: nobody if env.index else ids(0, 1, 2)(env)
for script in ("ppo_graph", "ppo_lstm_sparse", "ppo_gtrxl", "ppo_framestack"):
    fine(f"nodes of one environment alone, {script}", IDS, some_nodes, script=script)
edged = dict(script="ppo_lstm_sparse", flags="--remember-edges")
fine("ids at the ends, remembered edges", IDS, ends, **edged)
for name, values, words in [
    ("of 2^63", (2**63, 1, 2), "dtype float64"),
    ("that are equal", (4, 5, 4), "the id 4 occurs twice, at index 2 again"),
    ("for two of three nodes", (1, 2), "2 rows where 'g.nodes' has 3"),
]:
    wrong(f"ids {name}", IDS, ids(*values), "node_ids", words)
few = spaces.Dict(x=stacked(vector()), node_ids=stacked(spaces.Box(0, 255, (), np.uint8)))
of_set = lambda *values: {"x": np.zeros(2), "node_ids": np.array(values)}
wrong("ids of a set, equal", few, of_set(5, 5), "node_ids", "the id 5 occurs twice, at index 1")
wrong("an id beyond its dtype", few, of_set(5, 260), "node_ids", "value 260 in row 1; uint8 is")
refused("ids that are float32", with_ids(vector()), "leaf 'node_ids': .* must be integers in a")

# Masks
allowed = lambda *options: dict(accept=lambda env, action: action in options)
small = with_mask(vector(3, low=0, high=1))
fine("mask of bools", MASKED, masked(np.array([True, False, True])), **allowed(0, 2))
fine("mask of nothing", MASKED, masked(np.zeros(3, int)), **allowed(0, 1, 2))
fine("mask of small floats", small, masked([1e-30, 0, 0]), **allowed(0))
fine("mask of vanishing floats", small, masked([1e-60, 0, 0]), **allowed(0, 1, 2))
start = spaces.Discrete(3, start=-4)
fine("mask with a start", MASKED, masked([0, 1, 0]), action=start, **allowed(-3))
matrix = with_mask(MultiBinary((3, 1)))
fine("mask in a matrix", matrix, masked([[0], [1], [0]]), **allowed(1))
to_edges = dict(flags="--action-head edges", **allowed(1))
fine("mask of edges", ROWS_MASKED, rows_masked([0, 1]), **to_edges)
options = spaces.Dict(avail_actions=SET)
fine("one thing to choose", options, {"avail_actions": np.ones((1, 2))}, **allowed(0))
beside = spaces.Tuple((spaces.Discrete(9), vector(1)))
of_nodes = dict(action=beside, accept=lambda env, action: action[0] == 1)
fine("a node beside a number", ROWS_MASKED, rows_masked([0, 1, 0]), **of_nodes)
for name, mask, words in [
    ("entry of 256", [256, 0, 1], "value 256"),
    ("of NaN", [np.nan, 0, 1], "dtype float64"),
    ("too short", [1, 1], "shape (2,)"),
]:
    wrong(f"mask {name}", MASKED, masked(np.array(mask)), "action_mask", words)
wrong("mask of floats that are NaN", small, masked([np.nan, 1, 0]), "action_mask", "value nan")
rows_of = "rows where 'g.nodes' has 3"
edge_mask = f"2 {rows_of}: for a mask of edges give --action-head edges"
wrong("mask as long as the edges", ROWS_MASKED, rows_masked([1, 1]), "action_mask", edge_mask)
for num in (0, 4):
    own = {"g": graph(num, empty), "action_mask": np.ones(num, np.int8)}
    words = f"{num} rows to choose from, the action space has 3: give 1 to 3 rows, none only where"
    wrong(f"{num} nodes for 3 actions", ROWS_MASKED, own, "g.nodes", words)
nothing = {"avail_actions": np.zeros((0, 2))}
wrong("nothing to choose", options, nothing, "avail_actions", "0 rows to choose from")
late = lambda *result: (*result[:4], {"action_mask": np.ones(3)})
add("observations", "the mask comes late", "env 1, step 3: .*the first reset had none", change=late)
for name, space, own in [
    ("too short", MultiBinary(2), THREE),
    ("of one part", MultiBinary(3), spaces.MultiDiscrete([3, 2])),
    ("of rows that are not there", MASK_OF_ROWS, THREE),
    ("of a Box", MASK_OF_ROWS, PAIR),
    ("that is a Dict", spaces.Dict(a=MultiBinary(3)), THREE),
]:
    said = rf"leaf 'action_mask(\.[a0])?': a mask .* does not fit {type(own).__name__}\(.*head auto"
    refused(f"mask space {name}", with_mask(space), said, action=own)


# ---- Actions ----
def action(name, space, expected="trains", **fields) -> None:
    add("actions", name, expected, action=space, **fields)


def by_kwarg(space: gym.Space) -> Callable:
    """A space whose bound is the environment's keyword argument b."""
    return lambda env: space(env.kwargs["b"])


of_kind = lambda env, action: type(action) is np.int64
action("Discrete", THREE, accept=of_kind, after=chance(3))
action("a start below 0", spaces.Discrete(3, start=-7), after=chance(3))
action("a huge start", spaces.Discrete(3, start=2**40), after=chance(3))
action("Discrete of int8", spaces.Discrete(3, start=100, dtype=np.int8), after=chance(3))
action("own classes", spaces.Tuple((OwnDiscrete(3), OwnBox(-1, 1, (2,)))))
action("1,200 bits", MultiBinary(1200))
action("1,000 numbers", vector(1000))
action("1,001 parts", spaces.Tuple([spaces.Discrete(2)] * 1001))
action("1,200 bits, framestack", MultiBinary(1200), script="ppo_framestack")
action("a number", vector())
for kind in (np.float64, np.float16, ">f4"):
    action(f"numbers of {np.dtype(kind)}", vector(2, dtype=np.dtype(kind)))
for low, high in [(-np.inf, np.inf), (0, np.inf), (0.5, 0.5)]:
    action(f"bounds {low} and {high}", vector(2, low=low, high=high))
action("integers in a Box", spaces.Box(0, 3, (2,), np.int32))
action("names that look alike", spaces.Dict({"a.b": THREE, "a": spaces.Dict(b=spaces.Discrete(5))}))
action("a node", spaces.Dict(node=spaces.Discrete(9)), observation=GRAPH, show=graph(3))
action("a node without a graph", spaces.Dict(node=THREE))
per_node = dict(observation=GRAPH, show=lambda env: graph(1 + env.t % 3, None))
none_at_times = dict(observation=SET, show=lambda env: np.ones((int(env.t == 2), 2)))
for stack in (True, False):
    action(f"one per node, stack={stack}", spaces.Sequence(THREE, stack=stack), **per_node)
    action(f"vectors per node, stack={stack}", spaces.Sequence(PAIR, stack=stack), **per_node)
    action(f"mostly no row, stack={stack}", spaces.Sequence(THREE, stack=stack), **none_at_times)
    no_width = spaces.Sequence(vector(0), stack=stack)
    action(f"no width per row, {stack}", no_width, "nothing to choose", **per_node)
action("few rows, framestack", spaces.Sequence(THREE), script="ppo_framestack", **none_at_times)
action("parts per node", spaces.Sequence(spaces.Tuple((THREE, PAIR))), **per_node)
for name, space in {
    "no MultiDiscrete": spaces.MultiDiscrete([]),
    "no number": vector(0),
    "no part": spaces.Tuple(()),
    "no name": spaces.Dict({}),
}.items():
    action(name, space, "action space .* is not supported, there is nothing to choose")
in_dict_of = spaces.Dict(a=THREE, b=spaces.Graph(PAIR, None))
no_rows = "--action-head auto: there are no such rows to act in "
turned = "a Sequence of Dict is not supported with stack=True, with False it is$"
for name, space, said in [
    ("2^40 options", spaces.Discrete(2**40), "over 10000000 options"),
    ("text", spaces.Text(4), "leaf 'action': Text is not supported"),
    ("a graph", GRAPH, "leaf 'action': Graph.* is not supported"),
    ("a graph in a Dict", in_dict_of, r"leaf 'action.b': Graph\(.*\) is not supported \(Box, "),
    ("a Sequence of Sequences", spaces.Sequence(ROWS), "a Sequence is not supported inside a Seq"),
    ("a Sequence without rows", spaces.Sequence(THREE), f"{no_rows}Sequence"),
    ("a Sequence in a Dict", spaces.Dict(a=THREE, b=spaces.Sequence(THREE)), f"{no_rows}Dict"),
    ("stacked Dicts", stacked(spaces.Dict(a=THREE)), f"leaf 'action': {turned}"),
]:
    action(name, space, said)
joint = dict(observation=with_mask(MultiBinary((10, 10))))
said = "head auto: .* or with --autoregressive as many for each value of the part"
action("a mask of pairs", spaces.MultiDiscrete([10, 10]), said, **joint)
of_both = dict(observation=GRAPH, flags="--action-head nodes")
action("a node beside numbers", spaces.Tuple((spaces.Discrete(99), vector(1))), **of_both)
action("numbers that are no nodes", vector(1), "--action-head nodes needs Discrete.*Box", **of_both)
starts = [{"b": 0}, {"b": 7}]
for name, space, kwargs in [
    ("bounds", lambda b: vector(2, low=-b, high=b), [{"b": 0.1}, {"b": 5.0}]),
    ("bounds in a Dict", lambda b: spaces.Dict(a=vector(low=-b, high=b)), [{"b": 0.1}, {"b": 5.0}]),
    ("starts", lambda b: spaces.Discrete(3, start=b), starts),
    ("starts of several", lambda b: spaces.MultiDiscrete([2, 2], start=[b, b]), starts),
    ("kinds", lambda b: THREE if b else PAIR, starts),
    ("names", lambda b: spaces.Dict({f"{b}": THREE}), starts),
]:
    said = "--env-kwargs: not all entries have the action space"
    action(f"own {name}", by_kwarg(space), said, kwargs=kwargs)
own = by_kwarg(lambda b: spaces.Dict(node=spaces.Discrete(9 + b)))
action("own number of nodes", own, kwargs=starts, observation=GRAPH, show=graph(3))
played = lambda env: vector(2 + env.kwargs.get("b", 0))
said = r"--env-kwargs: not all entries have the observation space Box\("
action("an entry that is only played", THREE, said, observation=played, kwargs=[{}, {}, {"b": 1}])


# ---- What step, reset and info return ----
def returns(name, expected="trains", says="", observation=PAIR, **changes) -> None:
    """A step whose obs, reward, terminated, truncated or info is another, or a function's value.
    A sentence is what comes after the step in it."""

    def change(*result):
        values = dict(zip(("obs", "reward", "terminated", "truncated", "info"), result))
        for key, value in changes.items():
            values[key] = value() if isinstance(value, types.FunctionType) else value
        return tuple(values.values())

    if expected != "trains":
        expected = f"env 1,( leaf .*)? step 3: {expected}"
    add("returns", name, expected, says=says, observation=observation, change=change)


def at_end(name, expected="trains", says="", **info) -> None:
    """What `info` says when an episode ends."""
    returns(name, expected, says, terminated=True, info=info)


def result(name, expected="trains", change=None, first=None) -> None:
    """Another form of the result itself."""
    add("returns", name, expected, change=change, first=first, is_compared=expected == "trains")


class OwnFloat:
    def __float__(self):
        return 1.5

    def __repr__(self):
        return "OwnFloat"


Outcome = namedtuple("Outcome", "obs reward terminated truncated info")
for number in (True, np.bool_(1), np.float16(0.5), np.array(2.5), 7, Fraction(1, 2), -0.0):
    returns(f"reward {number!r}", reward=number)
returns("reward tensor", reward=lambda: tensor(2.0))
slope = lambda: tensor(2.0, requires_grad=True)
returns("reward with gradients", "reward is tensor.*requires_grad.* not a finite", reward=slope)
returns("reward None", "reward is None, not a finite number", reward=lambda: None)
numbers = ["1.5", 1j, 10**400, {}, np.nan, np.inf, -np.inf, 3.2e38, 10**39, Decimal(2), OwnFloat()]
for k, bad in enumerate(numbers):
    said = f"reward is {re.escape(repr(bad))}, not a finite number"
    returns(f"reward {k}, {str(bad)[:9]}", said, reward=bad)
for bad in ([1.0, 2.0], np.array([2.0, 1])):
    said = "reward is .*, not .*: --wrap mo_gymnasium.wrappers:LinearReward makes one of several"
    returns(f"reward {bad!r}", said, reward=bad)
returns("terminated array", terminated=lambda: np.array([False]))
for bad in ("no", "False", np.nan, [], np.array([True, False]), np.array(["no"])):
    returns(f"terminated {bad!r}", r"terminated is .*, not a finite number", terminated=bad)
for bad in (2, 0.5):
    returns(f"truncated {bad!r}", f"truncated is {bad}, not True or False", truncated=bad)
returns("truncated None", "truncated is None, not", truncated=lambda: None)
returns("info None", info=lambda: None)
for bad in ([3], "text", 3, UserDict(a=1)):
    returns(f"info {type(bad).__name__}", f"info is {re.escape(repr(bad))}, not a dict", info=bad)
returns("info that cannot be pickled", info={"a": lambda: 0, "b": threading.Lock()})
returns("info with unknown keys", info={1: 2, None: 3, "final_info": [], "rewards": "x"})
for bad in (np.nan, np.inf):
    last = dict(truncated=True, obs=np.array([bad, 0]))
    returns(f"{bad} in a last observation", f"value {bad}", **last)
last = dict(truncated=True, obs=graph(3, [[0, 9]]), observation=GRAPH)
returns("an edge of a last observation", "value 9 in row 0", **last)
at_end("episode None", episode=None)
at_end("episode of arrays", episode={"r": np.array([3.0]), "l": np.array([3])})
for bad in (None, np.nan, np.ones(2), "9"):  # no record of gymnasium's made it
    at_end(f"episode r {bad}", episode={"r": bad})
for group in ("a/b", "../../x", "a|b\nc", "x" * 500, 3, np.str_("z"), (1, 2), b"b", "", True):
    at_end(f"group {str(group)[:9]!r} {type(group).__name__}", group=group)
for name, values in {  # not what this package means by the words
    "group": [["a"], lambda: 0, {}],
    "eval": [None, 3.0, {1: 2}, {"rule": lambda: 0}, "text"],
}.items():
    for k, value in enumerate(values):
        said = rf"info\['{name}'\] is left out: it is no {name} but {type(value).__name__}\n"
        at_end(f"{name} {k} {type(value).__name__}", says=said, **{name: value})
at_end("cost array", eval={"cost": np.array([3.0]), "rule|1": 2})
for bad in (np.nan, "x", slope()):
    said = rf"{re.escape(repr(bad))} in .*'eval'.* is not a finite number"
    at_end(f"cost {str(bad)[:6]}", said, eval={"cost": bad})
for name in ("greedy", "instance", "cut", "best of 16"):
    said = rf"info\['eval'\] has the name '{name}', a column of the evaluation's own"
    at_end(f"eval with {name}", said, eval={name: 3, "cost": 3.0})
result("a namedtuple", change=lambda *values: Outcome(*values))
for name, change in {
    "four values": lambda *values: values[:4],
    "nothing": lambda *values: None,
    "a generator": lambda *values: (value for value in values),
}.items():
    said = (
        "step: return obs, reward, terminated, truncated, {}: 5 values, not [^;\\n]*; .*gym's old"
    )
    result(name, f"env 1, step 3, {said} interface", change)
for name, first in {
    "only an observation": lambda obs: obs,
    "nothing": lambda obs: None,
}.items():
    shown = r"an array, dtype float32, shape \(2,\)|None"
    said = f"env 0, step 0, reset: return obs, {{}}: 2 values, not ({shown}); .*gym's old interface"
    result(f"reset: {name}", said, first=first)
result("reset: info None", first=lambda obs: (obs, None))
mask_info = {"action_mask": np.array([0, 1, 0], np.int8)}
result("mask of reset alone", "cannot be read", first=lambda obs: (obs, mask_info))


# ---- Exceptions of an environment, and faults of its process ----
def process(name, hook, expected="trains", at="step", flags="", **fields) -> None:
    """`hook` is called in the third step of the second environment, or at another moment."""
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


def when_played(hook: Callable) -> Callable:
    """Not before the evaluation."""
    return lambda env: (env.index or 0) >= 100 and hook(env)


def left(*patterns: str) -> Callable:
    """What is wrong with the files of the run: each is there, or begins with `-` and is not."""

    def after():
        for pattern in patterns:
            found = list(Path(FOLDER).glob(f"runs/*/{pattern.removeprefix('-')}"))
            if bool(found) == pattern.startswith("-"):
                return f"{pattern}: {found}"

    return after


together = left("events*", "model.pt", "eval.csv", "*.ckpt")
WORKERS = "--num-workers 2"
SOON = "--num-workers 2 --env-timeout 1"
FAILED = dict(after=left("failed", "-model.pt"))
exits = lambda env: sys.exit(0)
problems = [StopIteration(1), RecursionError("deep"), MemoryError(), OSError(5, "broken")]
problems += [BrokenPipeError(32, "p"), EOFError(), ValueError("x" * 10**6), NoCopy(1, 2), Mute()]
problems += [KeyError("a"), gym.error.InvalidAction("no such door"), ValueError(b"\xff", "\ud800")]
in_frames = r"in hook\n.*env 1, step 3, step\([012],\): "
for problem in problems:
    kind = type(problem).__name__
    text = "" if kind == "Mute" else f": {re.escape(str(problem)[:99])}"
    has_frames = not isinstance(problem, (OSError, gym.error.Error))
    said = f"{in_frames if has_frames else in_frames[9:]}{kind}{text}"
    if f"raises: {kind}" not in TRIES:
        add("raises", kind, said, hooks=dict(step=raises(problem)), **FAILED)
    else:
        add("raises", "what is no text", "env 1, step 3", hooks=dict(step=raises(problem)))
said = "sys.exit.*env 1, step 3, step.*: SystemExit: 0"
add("raises", "SystemExit", said, hooks=dict(step=exits), **FAILED)
lost = raises(KeyError("the licence"))
add("raises", "in its constructor", r"in hook\n.*KeyError: 'the licence'", hooks=dict(init=lost))
said = r"in hook\n.*env 0, step 0, reset.*: KeyError: 'the licence'"
add("raises", "in reset", said, hooks=dict(reset=lost))
for flags in ("", WORKERS):
    where = " in a worker" * bool(flags)
    closed = dict(at="close", flags=f"{flags} --save-model", after=left("model.pt", "eval.csv"))
    process(f"closes stdin{where}", lambda env: os.closerange(0, 1), flags=flags)
    process(f"changes the folder{where}", elsewhere, flags=f"{flags} --save-model", after=together)
    process(f"the folder is gone{where}", folder_gone, flags=flags)
    process(f"forks{where}", forks, flags=flags)
    process(f"prints a lot{where}", lambda env: print("x" * 10**6), flags=flags)
    process(f"close() raises{where}", raises(OSError("stuck")), **closed)
    process(f"close() exits{where}", exits, **closed)
process("numpy raises", lambda env: np.seterr(all="raise"))
process("seeds numpy and random", lambda env: (np.random.seed(0), random.seed(0)))
process("seeds torch", of_torch(lambda torch: torch.manual_seed(0)))
for name, change in {
    "torch makes doubles": lambda torch: torch.set_default_dtype(torch.float64),
    "torch makes no gradients": lambda torch: torch.set_grad_enabled(False),
    "torch makes tensors elsewhere": lambda torch: torch.set_default_device("meta"),
    "torch knows no such kernels": lambda torch: torch.use_deterministic_algorithms(True),
}.items():
    for at in ("init", "reset"):
        process(f"{name} from {at} on", of_torch(change), at=at)


def inference(env):
    env.mode = sys.modules["torch"].inference_mode()
    env.mode.__enter__()


said = r"an environment leaves torch.inference_mode\(\) open"
for at in ("init", "step"):
    process(f"inference mode from {at} on", inference, said, at=at)
process("time stands still", lambda env: setattr(time, "time", lambda: 0.0))
own = lambda env: setattr(env, "np_random", np.random.RandomState(0))
process("a generator of old", own, at="reset")
process("forgets its id", lambda env: gym.registry.pop("Hostile-v0", None), "doesn't exist")
process("stdout is None", patch(sys, "stdout", None))
process("the runs are gone", runs_gone, "No such file .*/runs/")
process("its copies append to a file", lambda env: note("appended", 1))
process("SIGTERM", kill(signal.SIGTERM), "exit code 143.*SIGTERM: stops after")
said = "env 0, step 0, reset.*'the licence'"
saved = dict(at="reset", flags="--save-model", after=left("model.pt"))
process("raises when played", when_played(lost), said, **saved)
suite = lambda env: setattr(env, "eval_suites", {"all": [{}]})
closes = dict(init=suite, close=exits)
with_table = dict(flags="--eval-suite all", after=left("eval.csv"), is_compared=False)
add("process", "close() exits in a suite", hooks=closes, **with_table)
died = "step 3: the worker of envs 1 to 1 died with exit code -9"
process("a worker is killed", kill(signal.SIGKILL), died, flags=WORKERS)
late = "the worker of envs 1 to 1 did not answer within --env-timeout 1 s"
process("a worker is stopped", kill(signal.SIGSTOP), f"step 3: {late}", flags=SOON)
process("a worker sleeps", wait(), f"step 3: {late}", flags=SOON)
slow = lambda env: env.index == 1 and time.sleep(99)
process("reset in a worker sleeps", slow, late, "reset", SOON)


# ---- Files ----
def files(name, expected="trains", before=None, flags="", after=None, **fields) -> None:
    """Of environments whose copies are trusted: no trial of them takes time."""
    hooks = {"init": lambda env: setattr(env, "exact_resume", True)} | fields.pop("hooks", {})
    more = dict(before=before, flags=flags, after=after, hooks=hooks)
    add("files", name, expected, **more, **fields)


def newest(pattern: str) -> Path:
    return max(Path(FOLDER).glob(f"runs/*/{pattern}"))


def after_run(change: Callable | None = None, more: str = "--save-model --checkpoint-every 1"):
    """A whole run, and a change of what it has left."""

    def before(go):
        go(more)
        shutil.copy(newest("model.pt"), f"{FOLDER}/model.pt")
        shutil.copy(newest("*.ckpt"), f"{FOLDER}/checkpoint_1.ckpt")
        if change:
            change()

    return before


def damaged(pattern: str, function: Callable) -> Callable:
    """The bytes of a file, changed by `function`."""

    def change():
        path = newest(pattern) if "/" not in pattern else Path(FOLDER, pattern.strip("/"))
        path.write_bytes(function(path.read_bytes()))

    return change


def rewritten(function: Callable) -> Callable:
    """model.pt, changed by `function`."""

    def change():
        torch = sys.modules["torch"]
        saved = torch.load(f"{FOLDER}/model.pt", weights_only=True)
        torch.save(function(saved), f"{FOLDER}/model.pt")

    return change


def full(size: int) -> Callable:
    """Files may not grow beyond `size`: a full disk."""
    return lambda go: resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))


def to_full_device():
    (newest("checkpoint*").parent / "unfinished.tmp").symlink_to("/dev/full")


def in_place_of(name: str) -> dict:
    """A folder of that name is in the run's folder; the evaluation is not reached."""

    def hook(env):
        Path(max(Path(FOLDER).glob("runs/*")), name).mkdir(exist_ok=True)
        return env.index >= 100 and name == "model.pt" and sys.exit("it was played")

    return dict(step=hook)


MODEL = "--load-model model.pt"
for name, change in {
    "cut off": damaged("/model.pt", lambda data: data[:1000]),
    "weights alone": rewritten(lambda saved: saved["model"]),
    "without weights": rewritten(lambda saved: {"args": saved["args"]}),
    "a checkpoint cut off": damaged("/checkpoint_1.ckpt", lambda data: data[:-1]),
}.items():
    flags = "--load-model checkpoint_1.ckpt" if "checkpoint" in name else MODEL
    said = f"{flags[:12]} .*{flags[13:]}: not a file that a run wrote"
    files(f"a model, {name}", said, after_run(change), flags)
taken = dict(says="from the file: --gnn sage; not taken: --gamma 0.9\n", is_compared=False)
taken["before"] = after_run(more="--save-model --checkpoint-every 1 --gnn sage --gamma 0.9")
files("a model", flags=MODEL, **taken)
files("a checkpoint as a model", flags="--load-model checkpoint_1.ckpt", **taken)
AUTO = "--resume auto --checkpoint-every 1 --total-timesteps 96"

left_out = dict(flags=AUTO, is_compared=False, says="is left out.*goes on from")
flipped = lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
files("a checkpoint with another bit", before=after_run(damaged("*.ckpt", flipped)), **left_out)
said = "the network of the checkpoint is not that of the flags"
other = "--resume checkpoint_1.ckpt --hidden-dims 5"
files("a checkpoint of another network", said, after_run(), other)
files("a full disk", "cannot write .*No space left", after_run(to_full_device), AUTO)
never = dict(hooks=dict(step=raises(KeyError("a step was made"))))
said = "cannot write to the folder of the run"
unmade = dict(hooks=dict(init=raises(KeyError("an environment was made"))))
files("a full disk at the start", said, full(1000), **unmade)
unsaved = dict(hooks=dict(reset=when_played(exits)), after=left("-model.pt", "-*.tmp"))
wide = "--hidden-dims 512 512 --save-model"
files("a full disk at the model", "cannot write .*model.pt", full(70_000), wide, **unsaved)
files("a folder that nobody can write", said, flags="--run-dir /proc/nope", **never)
folder = in_place_of("model.pt")
files("a folder for the model", "cannot write .*model.pt", hooks=folder, flags="--save-model")
files("a folder for the table", "cannot write .*eval.md", hooks=in_place_of("eval.md"))
files("a folder of letters", flags="--run-dir ä\0ö[*]")


# ---- Flags ----
def flag(flags: str, expected: str = "trains", **fields) -> None:
    """A sentence comes before the first step."""
    if expected != "trains":
        fields.setdefault("hooks", never["hooks"])
    add("flags", fields.pop("name", flags), expected, flags=flags, **fields)


for numbers, wrong_ones in {
    "a number from 1 to inf": """--num-envs 0, --num-envs -3, --num-steps 0, --num-minibatches 0,
        --update-epochs 0, --eval-max-steps 0, --gnn-dim 0, --gnn-layers 0""",
    "a number from 0 to inf": """--total-timesteps -1, --learning-rate nan, --learning-rate -0.001,
        --max-grad-norm nan, --max-grad-norm -1.0, --norm-vloss -1.0, --target-kl nan,
        --target-kl -1.0, --num-workers -1, --env-timeout -1.0, --env-timeout nan,
        --checkpoint-every -1, --checkpoint-minutes -1.0, --checkpoint-minutes nan,
        --eval-episodes -1, --eval-samples -1""",
    "a number from 0 to 1 ": "--gamma 1.5, --gamma nan, --gae-lambda -0.1, --clip-coef -1.0",
    "a number from -inf to inf": "--ent-coef inf, --ent-coef nan, --vf-coef nan",
    "a number from 0 to 4294967295": "--seed -1, --seed 5000000000",
}.items():
    for each in wrong_ones.split(","):
        flag(each.strip(), f"{each.strip()}: {numbers}")
for flags, said in {
    "--hidden-dims 16 0": "--hidden-dims 0: a number from 1 to inf",
    "--num-minibatches 1000": "--num-minibatches 1000 exceeds the 16 steps of a rollout",
    "--total-timesteps 10": "--total-timesteps 10 is less than a rollout of 16 steps",
    "--max-grad-norm 0": "--max-grad-norm 0: .*nothing is trained; inf means no clipping",
    "--gnn-dim 62 --gnn gatv2": "--gnn-dim 62: the 4 heads of --gnn gatv2 need a multiple of 4",
    "--gnn-dim 62 --gnn transformer": "--gnn-dim 62: the 4 heads of --gnn transformer need",
    "--gnn nope": "exit code 2.*--gnn",
    "--gamma text": "exit code 2.*gamma",
    "--nope 3": "exit code 2.*nope",
    "--action-head nodes": "--action-head nodes needs",
    "--action-head avail_actions": "--action-head avail_actions needs",
    "--action-head nope": "--action-head nope needs",
    "--eval-suite nope": r"--eval-suite nope: hostile:Hostile-v0 has the suites \[\]",
    "--wrap nope": "--wrap nope: there is no such wrapper",
    "--wrap hide:9": "--wrap hide:9: numbers from 0",
    "--wrap z:skill:0": "a number of at least 1",
    "--wrap math:sqrt": "wrap|TypeError|sqrt",
    "--env-id Nope-v0": r"--env-id Nope-v0 \(or module:Name-v0\): .*`Nope` doesn't exist",
    "--env-id envs:Nope-v0": "Environment `Nope` doesn't exist",
    "--env-id nowhere:Nope-v0": "--env-id nowhere:Nope-v0 .*No module named 'nowhere'",
    "--env-id a:b:c": "--env-id a:b:c",
    "--env-id not\0an\0id": "--env-id not an id",
    "--env-kwargs []": r"--env-kwargs \[\]: an object, or a list of at least one",
    "--env-kwargs [3]": r"--env-kwargs \[3\]: an object, or a list",
    "--env-kwargs 3": "an object|exit code 2",
    "--env-kwargs {": "exit code 2",
    "--load-model nowhere.pt": "--load-model .*nowhere.pt",
    "--load-model .": "--load-model ",
}.items():
    flag(flags, said)
flag("--exp-name " + "x" * 300, "cannot write to the folder of the run", name="--exp-name too long")
for flags in ("--learning-rate 1e30", "--vf-coef 1e38 --max-grad-norm inf"):
    flag(flags, r"update 1: losses/\w+ is (nan|inf|-inf).*--learning-rate", hooks={}, **FAILED)
for flags in (
    "--learning-rate 0",
    "--max-grad-norm inf",
    "--clip-coef 0 --target-kl 0 --gamma 0 --gae-lambda 0",
    "--num-steps 1 --num-minibatches 1",
    "--num-workers 5",  # more than environments
    "--total-timesteps 0",
    "--hidden-dims",
    "--exp-name a/../../b",
    "--exp-name [*]",
):
    flag(flags)
flag(f"--seed {2**32 - 1}", is_compared=False)  # environments note their steps by small seeds
flag("--gnn-dim 62 --gnn gine", observation=GRAPH)
timed = "--checkpoint-minutes 0.0001 --checkpoint-every 100"
flag(timed, name="checkpoints by minutes", after=left("*.ckpt"))
for script, flags in {
    "ppo_framestack": "--obs-shifts=abc",
    "ppo_gtrxl": "--memory-length -1",
    "ppo_lstm_sparse": "--lstm-dim 0",
}.items():
    flag(flags, flags.replace("=", " ").split()[0], script=script)
for flags in "bc-anneal -0.5,aux-coef nan,bc-coef inf,pg-coef -1.0,bc-minibatch-size 0".split(","):
    flag(f"--{flags}", f"--{flags}: a number from . to inf is needed", script="ppo_graph_aux")
flag("--max-lag -1", "--max-lag -1: a number from 0 is needed", script="ppo_graph_async")
flag("--num-heads 3", "num-heads|heads", script="ppo_gtrxl")
