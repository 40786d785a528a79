"""One table of tries: an environment that can do anything, what it does, what should come of it.
What only looks wrong trains, and the policy is shown what the environment returned; what is wrong
ends in a sentence that names env, leaf, step and value. tries.py runs them as processes,
scripts/test_hostile.py also in one process.

This file imports little, since processes that load copies of environments import it. A try runs in
a folder of its own: FOLDER, in which environments leave notes."""

import contextlib
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
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
    hooks: dict = {}  # "init", "reset", "step" or "close" -> function of the environment
    change: Callable | None = None  # the result of a step -> another
    first: Callable | None = None  # the result of a reset -> another
    accept: Callable | None = None  # (environment, action) -> whether it is right
    kwargs: Any = {}
    before: Callable | None = None  # called with `go(flags)`, which runs the script
    after: Callable | None = None  # returns what is wrong
    says: str = ""  # a pattern of what is printed
    script: str = "ppo_graph"
    is_compared: bool = True  # what the policy is shown with what the environment returned
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

    def __init__(self, name, **kwargs):
        self.name = name
        self.kwargs = kwargs
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

    def close(self):
        self.do("close")


gym.register("Hostile-v0", entry_point=Hostile)


def wait(seconds: float = 1000) -> Callable:
    return lambda env: time.sleep(seconds)


def raises(problem: BaseException) -> Callable:
    def hook(env):
        raise problem

    return hook


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


SHARED = np.zeros((2, 3), np.float32)


def of_all(env):
    SHARED[:] = [[env.index if env.index is not None else -1], [env.t]]
    return SHARED.T


def stacked(space):
    return spaces.Sequence(space, stack=True)


def with_mask(mask, **more):
    return spaces.Dict(x=PAIR, action_mask=mask, **more)


def masked(mask) -> Callable:
    return lambda env: {"x": counted(env), "action_mask": mask}


def rows_masked(mask, nodes=3):
    return {"g": graph(nodes, [[0, 0]] * 2), "action_mask": np.array(mask, np.int8)}


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

# Numbers
fine("tensor", PAIR, lambda env: tensor([0.5, env.t]))
fine("exact integers", whole(np.int64), np.array([2**62 + 1, -(2**62) - 1]))
wrong("nan further in", deep, {"a": (0, np.array([0, np.nan]))}, "a.1", "value nan")
wrong("300 as uint8", whole(np.uint8), np.array([1, 300]), "obs", "value 300")
wrong("floats where integers are declared", BYTES, np.array([2.0, 1]), "obs", "dtype float64")
wrong("category further in", deep, {"a": (3, np.zeros(2))}, "a.0", "value 3")
wrong("matrix transposed", vector(2, 3), np.zeros((3, 2)), "obs", "shape (3, 2)")

# Names and containers
fine("a/b beside a: {b}", spaces.Dict({"a/b": PAIR, "a": spaces.Dict(b=PAIR)}))
fine("text space", spaces.Text(4), "ab", is_compared=False)
refused("only a mask", spaces.Dict(action_mask=MultiBinary(2)), "one must be an input")
refused("a set of sets", spaces.Dict(a=stacked(ROWS)), r"leaf 'a': Seq.* is not supported")
wrong("a key is missing", two, {"a": np.ones(2)}, "b", "KeyError: 'b'")

# Buffers
fine("a view of one buffer of all environments", vector(3, 2), of_all)

# Graphs and sets
empty = np.zeros((0, 2), int)
fine("no edge", EDGES, graph(3, None))
fine("none and 3,000 nodes in turn", GRAPH, lambda env: graph(3000 * (env.t % 2), empty))
turned = graph(3, [[0, 1, 2], [2, 0, 1]])
wrong(
    "an edge to node 3 of 3", GRAPH, graph(3, [[0, 1], [2, 3]]), "obs.edge_links", "value 3 in ro"
)
wrong("links transposed", GRAPH, turned, "obs.edge_links", "shape (2, 3)")
nodes = np.array([[0, 0], [0, 0], [0, np.nan]])
wrong("a node that is nan", GRAPH, graph(nodes), "obs.nodes", "value nan in row 2")
three = graph(edges=np.zeros((3, 1)))
wrong("edges of another number", EDGES, three, "obs.edges", "3 rows where 'obs.edge_links' has 2")

# node_ids
ids = lambda *values: lambda env: {"g": graph(3), "node_ids": np.array(values)}
nobody = {"g": graph(0, empty), "node_ids": np.zeros(0, int)}
some_nodes = lambda env: nobody if env.index else ids(0, 1, 2)(env)
fine("ids that are new in each step", IDS, lambda env: ids(*(np.arange(3) + 3 * env.t))(env))
fine("nodes of one environment alone", IDS, some_nodes, script="ppo_lstm_sparse")
fixed = spaces.Dict(g=GRAPH, node_ids=whole(np.int64))
refused("ids that are no Sequence", fixed, "'node_ids': .* must be integers in a Sequence")
wrong("ids that are equal", IDS, ids(4, 5, 4), "node_ids", "the id 4 occurs twice")
wrong("ids for two of three nodes", IDS, ids(1, 2), "node_ids", "2 rows where 'g.nodes' has 3")

# Masks
allowed = lambda *options: dict(accept=lambda env, action: action in options)
fine("mask of bools", MASKED, masked(np.array([True, False, True])), **allowed(0, 2))
edge = dict(flags="--action-head edges", **allowed(1))
fine("mask of edges", ROWS_MASKED, rows_masked([0, 1]), **edge)
wrong("mask too short", MASKED, masked(np.array([1, 1])), "action_mask", "shape (2,)")
own = {"g": graph(4, empty), "action_mask": np.ones(4, np.int8)}
wrong("4 nodes for 3 actions", ROWS_MASKED, own, "g.nodes", "4 rows to choose from")
none = {"g": graph(0, empty), "action_mask": np.zeros(0, np.int8)}
wrong("no node for an action", ROWS_MASKED, none, "g.nodes", "0 rows to choose from")


# ---- Actions ----
def action(name, space, expected="trains", **fields) -> None:
    add("actions", name, expected, action=space, **fields)


def by_kwarg(space: gym.Space) -> Callable:
    """A space whose bound is the environment's keyword argument b."""
    return lambda env: space(env.kwargs["b"])


per_node = dict(observation=GRAPH, show=lambda env: graph(1 + env.t % 3, None))
none_at_times = dict(observation=SET, show=lambda env: np.ones((int(env.t == 2), 2)))
action("parts per node", spaces.Sequence(spaces.Tuple((THREE, PAIR))), **per_node)
action("mostly no row", spaces.Sequence(THREE), script="ppo_framestack", **none_at_times)
two_groups = spaces.Dict(g=spaces.Discrete(9), s=spaces.Discrete(9))
beside = dict(observation=spaces.Dict(g=GRAPH, s=SET, action_mask=MASK_OF_ROWS))
action("a mask of two groups", two_groups, "'action_mask': a mask does not fit", **beside)
action("a Sequence without rows", spaces.Sequence(THREE), "no such rows to act in Sequence")
pairs = dict(observation=with_mask(MultiBinary((9, 9))))
action(
    "a mask of pairs", spaces.MultiDiscrete([9, 9]), "'action_mask': .*--autoregressive", **pairs
)
limits = dict(action=by_kwarg(spaces.Discrete), kwargs=[{"b": 9}, {"b": 3}])
wrong("4 nodes where 3 are this one's", ROWS_MASKED, own, "g.nodes", "4 rows to choose", **limits)
said = "--env-kwargs: not all entries have the action space"
bounds = by_kwarg(lambda b: vector(2, low=-b, high=b))
action("own bounds", bounds, said, kwargs=[{"b": 0.1}, {"b": 5.0}])
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


def result(name, expected="trains", change=None, first=None) -> None:
    """Another form of the result itself."""
    add("returns", name, expected, change=change, first=first, is_compared=expected == "trains")


returns("reward tensor", reward=lambda: tensor(2.0))
returns("reward nan", "reward is nan, not a finite number", reward=np.nan)
returns("reward None", "reward is None, not a finite number", reward=lambda: None)
returns("reward of several", "reward is .*LinearReward", reward=[1.0, 2.0])
last = dict(truncated=True, obs=graph(3, [[0, 9]]), observation=GRAPH)
returns("an edge of a last observation", "value 9 in row 0", **last)
left_out = r"info\['group'\] is left out: it is no group but list\n"
returns("group list", says=left_out, terminated=True, info={"group": ["a"]})
returns("cost nan", "nan in .*'eval'.*", terminated=True, info={"eval": {"cost": np.nan}})
old = ".*gym's old interface"
result("four values", f"env 1, step 3, step.*: {old}", lambda *values: values[:4])
result("reset: nothing", f"env 0, step 0.*{old}", first=lambda obs: None)
mask_info = {"action_mask": np.array([0, 1, 0], np.int8)}
result("mask of reset alone", "cannot be read", first=lambda obs: (obs, mask_info))


# ---- Exceptions of an environment, and faults of its process ----
def process(name, hook, expected="trains", at="step", flags="", **fields) -> None:
    """`hook` is called in the third step of the second environment, or at another moment."""
    flags += " --checkpoint-every 1"
    add("process", name, expected, hooks={at: hook}, flags=flags, **fields)


class NoCopy(Exception):
    """Its pickle cannot be loaded."""

    def __init__(self, a, b):
        super().__init__("two arguments")


def kill(number: int) -> Callable:
    return lambda env: os.kill(os.getpid(), number)


def elsewhere(env):
    os.makedirs(f"{FOLDER}/elsewhere", exist_ok=True)
    os.chdir(f"{FOLDER}/elsewhere")


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


WORKERS = "--num-workers 2"
SOON = "--num-workers 2 --env-timeout 1"
FAILED = dict(after=left("failed", "-model.pt"))
exits = lambda env: sys.exit(0)
for problem in (OSError(5, "broken"), NoCopy(1, 2)):
    said = f"env 1, step 3, step.*: {type(problem).__name__}"
    add("raises", type(problem).__name__, said, hooks=dict(step=raises(problem)), **FAILED)
add("raises", "SystemExit", "env 1, step 3, step.*: SystemExit", hooks=dict(step=exits), **FAILED)
lost = raises(KeyError("the licence"))
add("raises", "in its constructor", "in hook\n.*KeyError: 'the licence'", hooks=dict(init=lost))
said = "in hook\n.*env 0, step 0.*: KeyError: 'the licence'"
add("raises", "in reset", said, hooks=dict(reset=lost))
together = left("events*", "model.pt", "eval.csv", "*.ckpt")
process("changes the folder", elsewhere, flags="--save-model", after=together)
closed = dict(at="close", flags="--save-model", after=left("model.pt", "eval.csv"))
process("close() raises", raises(OSError("stuck")), **closed)
process("SIGTERM", kill(signal.SIGTERM), "exit code 143.*SIGTERM: stops after")
said = "env 0, step 0, reset.*'the licence'"
saved = dict(at="reset", flags="--save-model", after=left("model.pt"))
process("raises when played", when_played(lost), said, **saved)
died = "step 3: the worker of envs 1 to 1 died with exit code -9"
process("a worker is killed", kill(signal.SIGKILL), died, flags=WORKERS)
late = "the worker of envs 1 to 1 did not answer within --env-timeout 1 s"
process("a worker sleeps", wait(), f"step 3: {late}", flags=SOON)


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


def full(size: int) -> Callable:
    """Files may not grow beyond `size`: a full disk."""
    return lambda go: resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))


never = dict(hooks=dict(step=raises(KeyError("a step was made"))))
AUTO = "--resume auto --checkpoint-every 1 --total-timesteps 96"
cut = after_run(damaged("/model.pt", lambda data: data[:1000]))
files("a model, cut off", "model.pt: not a file that a run wrote", cut, "--load-model model.pt")
taken = after_run(more="--save-model --checkpoint-every 1 --gnn sage --gamma 0.9")
said = "from the file: --gnn sage; not taken: --gamma 0.9\n"
for name in ("model.pt", "checkpoint_1.ckpt"):
    files(name, before=taken, flags=f"--load-model {name}", says=said, is_compared=False)
flipped = lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
left_out = dict(flags=AUTO, is_compared=False, says="is left out.*goes on from")
files("a checkpoint with another bit", before=after_run(damaged("*.ckpt", flipped)), **left_out)
said = "the network of the checkpoint is not that of the flags"
other = "--resume checkpoint_1.ckpt --hidden-dims 5"
files("a checkpoint of another network", said, after_run(), other)
said = "cannot write to the folder of the run"
files("a full disk at the start", said, full(1000), **never)


# ---- Flags ----
def flag(flags: str, expected: str = "trains", **fields) -> None:
    """A sentence comes before the first step."""
    if expected != "trains":
        fields.setdefault("hooks", never["hooks"])
    add("flags", flags, expected, flags=flags, **fields)


for flags, said in {
    "--gamma 1.5": "--gamma 1.5: a number from 0 to 1",
    "--num-minibatches 1000": "--num-minibatches 1000 exceeds the 16 steps of a rollout",
    "--env-id Nope-v0": r"^[^\n]*--env-id Nope-v0 .*`Nope` doesn't exist",
    "--env-id nowhere:Nope-v0": "--env-id nowhere:Nope-v0 .*No module named 'nowhere'",
    "--env-kwargs [3]": r"--env-kwargs \[3\]: an object, or a list",
    "--load-model nowhere.pt": "--load-model .*nowhere.pt",
}.items():
    flag(flags, said)
diverges = r"update 1: losses/\w+ is (nan|inf|-inf).*--learning-rate"
flag("--learning-rate 1e30", diverges, hooks={}, **FAILED)
for script, flags in {
    "ppo_framestack": "--obs-shifts=abc",
    "ppo_gtrxl": "--memory-length -1",
    "ppo_graph_aux": "--aux-coef nan",
    "ppo_graph_async": "--max-lag -1",
}.items():
    flag(flags, flags.replace("=", " ").split()[0], script=script)
flag("--num-steps 1 --num-minibatches 1")
