"""What is wrong with an environment, its data or a flag is said in one sentence: where, which
value, what to do. A few things that look wrong simply work."""

import copy
import importlib
import importlib.metadata
import os
import re
import sys
import textwrap
import time
from decimal import Decimal
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import shared_blocks
import torch
from gymnasium import spaces
from helpers import MASK, ListEnv, command, graph_space, make_envs, run, run_folder, vector

from cleanrl_graph import ppo_graph, ppo_graph_agents, ppo_gtrxl, ppo_lstm_sparse
from cleanrl_graph.envs import fitting
from cleanrl_graph.services import checkpoint

SCRIPTS = [path.stem for path in shared_blocks.scripts()]
SCRIPTS.remove("ppo_graph_agents")  # its environments have a Sequence of actions
TWO = spaces.Discrete(2)
GRAPH = spaces.Dict(g=graph_space(vector(2)))
ROWS = spaces.Sequence(vector(2), stack=False)


def graph(nodes=3, edges=2, links=((0, 1), (2, 0)), features=3):
    return {
        "g": spaces.GraphInstance(
            np.zeros((nodes, features), np.float32),
            np.zeros((edges, 2), np.float32),
            np.array(links),
        )
    }


def put(value, at, array=None):
    """A copy of `array` (default: zeros [3, 3]) with `value` at `at`."""
    array = np.zeros((3, 3), np.float32) if array is None else np.array(array)
    array[at] = value
    return array


def nodes(array):
    return {"g": graph()["g"]._replace(nodes=array)}


def edges(array):
    return {"g": graph()["g"]._replace(edges=array)}


def masked(mask, space=None):
    return {"x": np.zeros(2, np.float32), "action_mask": np.array(mask, np.int8)}


def ragged_mask(mask):
    return graph() | {"action_mask": np.array(mask, np.int8)}


GRAPH_MASK = spaces.Dict(g=graph_space(vector(2)), action_mask=MASK)
GRAPH_IDS = spaces.Dict(
    g=graph_space(vector(2)), node_ids=spaces.Sequence(spaces.Discrete(99), stack=True)
)
THREE = spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary(3))
DEEP = spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), vector(2))))


# name -> (observation space, action space, good, bad, leaf, words of the error)
def ids_of(space):
    """A set and an id for each of its elements."""
    elements = spaces.Sequence(vector(), stack=True)
    return spaces.Dict(x=elements, node_ids=spaces.Sequence(space, stack=True))


FAULTS = {
    "edge beyond the nodes": (
        GRAPH,
        TWO,
        graph(),
        graph(links=((0, 1), (2, 3))),
        "g.edge_links",
        ["value 3", "row 1", "3 nodes"],
    ),
    "negative edge": (
        GRAPH,
        TWO,
        graph(),
        graph(links=((0, -1), (2, 0))),
        "g.edge_links",
        ["value -1", "row 0"],
    ),
    "edge without nodes": (
        GRAPH,
        TWO,
        graph(),
        graph(nodes=0, edges=1, links=((0, 0),)),
        "g.edge_links",
        ["value 0", "0 nodes"],
    ),
    "edges of another number": (
        GRAPH,
        TWO,
        graph(),
        graph(edges=1),
        "g.edges",
        ["1 rows", "'g.edge_links' has 2"],
    ),
    "links of three": (
        GRAPH,
        TWO,
        graph(),
        graph(links=((0, 1, 2), (2, 0, 1))),
        "g.edge_links",
        ["(2, 3)"],
    ),
    "links as fractions": (
        GRAPH,
        TWO,
        graph(),
        graph(links=((0, 0.5), (1, 1))),
        "g.edge_links",
        ["dtype float64"],
    ),
    "links transposed": (
        GRAPH,
        TWO,
        graph(edges=3, links=((0, 1),) * 3),
        graph(edges=3, links=((0, 1, 2), (2, 0, 1))),
        "g.edge_links",
        ["(2, 3)", "; transpose: rows are edges"],
    ),
    "two links transposed": (
        GRAPH,
        TWO,
        graph(),
        graph(nodes=2, links=((0, 0), (1, 2))),
        "g.edge_links",
        ["value 2 in row 1 of a graph with 2 nodes; if it is transposed: rows are edges"],
    ),
    "too many features": (
        GRAPH,
        TWO,
        graph(),
        graph(features=4),
        "g.nodes",
        ["(3, 4)", "('rows', 3)"],
    ),
    "NaN in nodes": (
        GRAPH,
        TWO,
        graph(),
        nodes(put(np.nan, (2, 1))),
        "g.nodes",
        ["value nan in row 2"],
    ),
    "inf in nodes": (
        GRAPH,
        TWO,
        graph(),
        nodes(put(-np.inf, (0, 2))),
        "g.nodes",
        ["value -inf in row 0"],
    ),
    "NaN in edges": (
        GRAPH,
        TWO,
        graph(),
        edges(put(np.nan, (1, 0), np.zeros((2, 2), np.float32))),
        "g.edges",
        ["value nan in row 1"],
    ),
    "NaN in a box": (
        DEEP,
        TWO,
        {"a": (0, np.zeros(2))},
        {"a": (0, np.array([0, np.nan]))},
        "a.1",
        ["value nan"],
    ),
    "inf in a box": (vector(), TWO, 0.5, np.float32(np.inf), "obs", ["value inf"]),
    "box of another shape": (
        vector(2),
        TWO,
        np.zeros(2),
        np.zeros(3),
        "obs",
        ["shape (3,)", "(2,)"],
    ),
    "box as text": (vector(2), TWO, np.zeros(2), ["0", "1"], "obs", ["dtype"]),
    "category too large": (
        DEEP,
        TWO,
        {"a": (1, np.zeros(2))},
        {"a": (2, np.zeros(2))},
        "a.0",
        ["value 2"],
    ),
    "category below the start": (
        spaces.Discrete(3, start=5),
        TWO,
        5,
        4,
        "obs",
        ["value 4; Discrete(3, start=5) has 5 to 7"],
    ),
    "category that is NaN": (spaces.Discrete(3), TWO, 0, np.nan, "obs", ["dtype float64"]),
    "one of many categories": (
        spaces.MultiDiscrete([3, 2, 4]),
        TWO,
        np.array([2, 1, 3]),
        np.array([2, 2, 3]),
        "obs",
        ["value 2"],
    ),
    "category of a node": (
        spaces.Graph(spaces.Discrete(3), None),
        TWO,
        spaces.GraphInstance(np.array([0, 1]), None, None),
        spaces.GraphInstance(np.array([0, 3]), None, None),
        "obs.nodes",
        ["value 3 in row 1"],
    ),
    "rows of another width": (
        ROWS,
        TWO,
        (np.zeros(2),) * 3,
        (np.zeros(3),) * 2,
        "obs",
        ["(2, 3)", "('rows', 2)"],
    ),
    "rows of several widths": (
        ROWS,
        TWO,
        (np.zeros(2),) * 3,
        (np.zeros(3), np.zeros(2)),
        "obs",
        [],
    ),
    "keys of a set disagree": (
        spaces.Sequence(spaces.Dict(a=vector(1), b=vector(1)), stack=True),
        TWO,
        {"a": np.zeros((2, 1)), "b": np.zeros((2, 1))},
        {"a": np.zeros((2, 1)), "b": np.zeros((3, 1))},
        "obs.b",
        ["3 rows", "has 2"],
    ),
    "key is missing": (
        spaces.Dict(a=vector(1), b=vector(1)),
        TWO,
        {"a": np.zeros(1), "b": np.zeros(1)},
        {"a": np.zeros(1)},
        "b",
        [],
    ),
    "mask of another length": (
        THREE,
        spaces.Discrete(3),
        masked([1, 0, 1]),
        masked([1, 0]),
        "action_mask",
        ["shape (2,)"],
    ),
    "ragged mask too short": (
        GRAPH_MASK,
        spaces.Discrete(9),
        ragged_mask([1, 0, 1]),
        ragged_mask([1, 0]),
        "action_mask",
        ["2 rows", "'g.nodes' has 3"],
    ),
    "mask of edges for nodes": (
        GRAPH_MASK,
        spaces.Discrete(9),
        ragged_mask([1, 0, 1]),
        graph(nodes=3, edges=4, links=((0, 1),) * 4) | {"action_mask": np.ones(4, np.int8)},
        "action_mask",
        ["4 rows where 'g.nodes' has 3: for a mask of edges give --action-head edges"],
    ),
    "an id occurs twice": (
        GRAPH_IDS,
        TWO,
        graph() | {"node_ids": np.array([4, 5, 6])},
        graph() | {"node_ids": np.array([4, 5, 4])},
        "node_ids",
        ["the id 4 occurs twice, at index 2 again"],
    ),
    "an id occurs twice in a set": (
        ids_of(spaces.Box(0, 9, (), np.int64)),
        TWO,
        {"x": np.zeros(2), "node_ids": np.array([4, 5])},
        {"x": np.zeros(2), "node_ids": np.array([5, 5])},
        "node_ids",
        ["the id 5 occurs twice, at index 1 again"],
    ),
    "too large for float32": (
        vector(2),
        TWO,
        np.zeros(2),
        np.array([0, -1e300]),
        "obs",
        ["value -1e+300 exceeds float32"],
    ),
    "too large for a network": (
        spaces.Box(-np.inf, np.inf, (2,), np.float64),
        TWO,
        np.zeros(2),
        np.array([0, 1e39]),
        "obs",
        ["value 1e+39 exceeds float32"],
    ),
    "too large for uint8": (
        spaces.Box(0, 255, (2,), np.uint8),
        TWO,
        np.array([0, 255]),
        np.array([0, 300]),
        "obs",
        ["value 300; uint8 is declared"],
    ),
    "too small for int8": (
        spaces.Box(-128, 127, (2,), np.int8),
        TWO,
        np.array([-128, 127]),
        np.array([-200, 0]),
        "obs",
        ["value -200"],
    ),
    "too large for uint16": (
        spaces.Box(0, 65535, (1,), np.uint16),
        TWO,
        np.array([65535]),
        np.array([65536]),
        "obs",
        ["value 65536"],
    ),
    "negative where there is no sign": (
        spaces.Box(0, 9, (1,), np.uint64),
        TWO,
        np.array([9]),
        np.array([-1]),
        "obs",
        ["value -1"],
    ),
    "too large for torch": (
        spaces.Box(0, 2**64 - 1, (1,), np.uint64),
        TWO,
        np.array([2**63 - 1], np.uint64),
        np.array([2**63 + 5], np.uint64),
        "obs",
        ["value 9223372036854775813"],
    ),
    "bit of 256": (
        spaces.MultiBinary(2),
        TWO,
        np.array([True, False]),
        np.array([1, 256]),
        "obs",
        ["value 256"],
    ),
    "pixel of 256 in a set": (
        spaces.Sequence(spaces.Box(0, 255, (), np.uint8), stack=True),
        TWO,
        np.array([3, 255]),
        np.array([3, 4, 256]),
        "obs",
        ["value 256 in row 2"],
    ),
    "mask entry of 256": (
        THREE,
        spaces.Discrete(3),
        {"x": np.zeros(2), "action_mask": np.array([1, 0, 2])},
        {"x": np.zeros(2), "action_mask": np.array([1, 0, 256])},
        "action_mask",
        ["value 256"],
    ),
    "edge to node 2^32": (
        GRAPH,
        TWO,
        graph(),
        graph(links=((0, 1), (2**32, 0))),
        "g.edge_links",
        ["value 4294967296 in row 1"],
    ),
    "id too large for its space": (
        ids_of(spaces.Box(0, 255, (), np.uint8)),
        TWO,
        {"x": np.zeros(2), "node_ids": np.array([4, 5])},
        {"x": np.zeros(2), "node_ids": np.array([4, 260])},
        "node_ids",
        ["value 260"],
    ),
    "category with a start": (
        spaces.MultiDiscrete([3, 2], start=[5, -1]),
        TWO,
        np.array([7, 0]),
        np.array([8, 0]),
        "obs",
        ["value 8; MultiDiscrete([3 2], start=[ 5 -1]) has 5 to 7"],
    ),
    "number for a set": (spaces.Sequence(vector()), TWO, (0.5,), 0.5, "obs", []),
    "no observation": (vector(2), TWO, np.zeros(2), None, "obs", ["dtype object"]),
    "no row to choose": (
        spaces.Dict(avail_actions=ROWS),
        spaces.Discrete(9),
        {"avail_actions": (np.zeros(2),)},
        {"avail_actions": ()},
        "avail_actions",
        [],
    ),
}


def walk(envs, num_steps=4):
    try:
        envs.reset(0)
        for _ in range(num_steps):
            action = envs.action_space.sample()
            envs.step([copy.deepcopy(action) for _ in range(3)])
    finally:
        envs.close()


def makers_of(space, action_space, good, bad):
    """Three environments, the last of which shows `bad` after its second step."""
    return [
        lambda i=i: ListEnv(space, [good, good, bad if i == 2 else good, good, good], action_space)
        for i in range(3)
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault, workers):
    """Env index, leaf path, step and value of a malformed observation, from worker processes as
    well."""
    space, action_space, good, bad, leaf, words = FAULTS[fault]
    head = "avail_actions" if leaf == "avail_actions" else "auto"
    walk(
        make_envs(makers_of(space, action_space, good, good), action_head=head)
    )  # without the fault all is well
    with pytest.raises(ValueError) as error:
        walk(make_envs(makers_of(space, action_space, good, bad), workers, action_head=head))
    message = str(error.value)
    for word in ["env 2", f"'{leaf}'", "step 2", *words]:
        assert word in message, message


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("bad", [[np.nan, 0], [np.inf, 0]])
def test_final_observation_is_checked(bad, workers):
    """The last observation of a truncated episode goes into the advantages, so it is checked like
    any other."""

    class Ends(ListEnv):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, False, self.t == 2, {}

    zero = np.zeros(2, np.float32)
    envs = make_envs([lambda: Ends(vector(2), [zero, zero, np.array(bad, np.float32)])], workers)
    try:
        envs.reset(0)
        envs.step([0])
        with pytest.raises(ValueError, match=f"env 0, leaf 'obs', step 2: value {bad[0]}"):
            envs.step([0])
    finally:
        envs.close()


def test_final_edges_are_checked():
    """An edge to a missing node in the last observation of a truncated episode."""

    class Ends(ListEnv):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, False, True, {}

    envs = make_envs([lambda: Ends(GRAPH, [graph(), graph(links=((0, 1), (2, 9)))])])
    envs.reset(0)
    with pytest.raises(ValueError, match="env 0, leaf 'g.edge_links', step 1: value 9"):
        envs.step([0])


SHAPES = {  # space, observations in another shape, the values of the first one
    "number for a row": (vector(1), [np.float32(0.5), 0.25], [[0.5]]),
    "row for a number": (vector(), [np.array([0.5]), [0.25]], [0.5]),
    "row of a row": (vector(3), [np.ones((1, 3)), np.ones((3, 1))], [[1, 1, 1]]),
    "rows of a set": (
        spaces.Dict(a=TWO, s=spaces.Sequence(vector(), stack=True)),
        [{"a": 0, "s": np.ones((2, 1))}, {"a": [1], "s": np.ones((0, 1))}],
        [1, 1],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shape_with_other_axes_of_one(case, monkeypatch, capsys):
    """It is read as what is declared, which is said once."""
    monkeypatch.setattr(fitting, "SAID", set())
    space, observations, values = SHAPES[case]
    envs = make_envs([lambda: ListEnv(space, [*observations, *observations])] * 2)
    assert envs.reset(0).obs.values[-1].tolist() == values * 2
    envs.step([0, 0])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines)) and "is read as" in lines[0]
    with pytest.raises(ValueError, match="shape|read"):
        make_envs([lambda: ListEnv(vector(2, 3), [np.zeros((3, 2))])]).reset(0)


# ---- Spaces: found before the first step ----
IDS = spaces.Sequence(spaces.Box(0, 9, (), np.uint8), stack=True)
SPACES = {  # observation space, action space, what is said
    "text in a set": (spaces.Sequence(spaces.Text(4)), TWO, "leaf 'obs': Text is not supported"),
    "one of": (
        spaces.Dict(a=vector(2), b=spaces.OneOf([TWO, vector(1)])),
        TWO,
        "leaf 'b': OneOf.* is not supported",
    ),
    "set of sets": (
        spaces.Dict(many=spaces.Sequence(ROWS)),
        TWO,
        "leaf 'many': a Sequence is not supported inside a Sequence$",
    ),
    "one name for two leaves": (
        spaces.Dict({"a.b": vector(1), "a": spaces.Dict(b=vector(1))}),
        TWO,
        r"leaves \['a.b', 'a.b'\] need different names",
    ),
    "a name like that of nodes": (
        spaces.Dict({"g": graph_space(), "g.nodes": vector(1)}),
        TWO,
        "different names",
    ),
    "nothing": (spaces.Dict({}), TWO, r"leaves \[\] .* one must be an input"),
    "only a mask": (spaces.Dict(action_mask=spaces.MultiBinary(2)), TWO, "one must be an input"),
    "only ids": (spaces.Dict(node_ids=IDS), TWO, "one must be an input"),
    "action that is text": (vector(2), spaces.Text(4), "leaf 'action': Text is not supported"),
    "set of dicts of sets": (
        spaces.Dict(many=spaces.Sequence(spaces.Dict(a=TWO, b=ROWS))),
        TWO,
        "leaf 'many.b': a Sequence is not supported inside a Sequence$",
    ),
    "set of actions in a dict": (
        vector(2),
        spaces.Dict(a=TWO, b=spaces.Sequence(TWO)),
        "--action-head auto: there are no such rows to act in Dict",
    ),
    "stacked dicts of actions": (
        vector(2),
        spaces.Sequence(spaces.Dict(a=TWO), stack=True),
        "leaf 'action': a Sequence of Dict is not supported with stack=True, with False it is$",
    ),
    "joint mask": (
        spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary((10, 10))),
        spaces.MultiDiscrete([10, 10]),
        "with --action-head auto: .* or with --autoregressive as many for each value of the part",
    ),
    "action per row of none": (
        vector(2),
        spaces.Sequence(TWO),
        "--action-head auto: there are no such rows to act in Sequence",
    ),
    "action that is a graph": (
        vector(2),
        spaces.Dict(a=TWO, b=spaces.Graph(vector(1), None)),
        r"leaf 'action.b': Graph\(.*\) is not supported \(Box, ",
    ),
    "mask too long": (
        spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary(4)),
        spaces.Discrete(3),
        r"'action_mask': a mask MultiBinary\(4\) does not fit Discrete\(3\) with --action-head "
        r"auto",
    ),
    "mask of one part": (
        spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary(3)),
        spaces.MultiDiscrete([3, 2]),
        "'action_mask': .* does not fit MultiDiscrete",
    ),
    "mask of rows that are not there": (
        spaces.Dict(x=vector(2), action_mask=MASK),
        spaces.Discrete(3),
        "'action_mask': .* does not fit Discrete",
    ),
    "mask of a box": (
        spaces.Dict(x=vector(2), action_mask=MASK),
        vector(2),
        "'action_mask': .* does not fit Box",
    ),
    "mask that is a Dict": (
        spaces.Dict(g=graph_space(), action_mask=spaces.Dict(a=spaces.MultiBinary(3))),
        spaces.Discrete(3),
        "'action_mask.[a0]': .* does not fit",
    ),
    "mask that is a Tuple": (
        spaces.Dict(g=graph_space(), action_mask=spaces.Tuple([spaces.MultiBinary(3)])),
        spaces.Discrete(3),
        "'action_mask.[a0]': .* does not fit",
    ),
    "mask of three columns": (
        spaces.Dict(
            g=graph_space(),
            action_mask=spaces.Sequence(spaces.Box(0, 1, (3,), np.int8), stack=True),
        ),
        spaces.Discrete(3),
        "does not fit .* with --action-head auto",
    ),
}


@pytest.mark.parametrize("case", SPACES)
def test_space_without_a_meaning(case):
    """The leaf or the flag, and what there is."""
    space, action_space, sentence = SPACES[case]
    with pytest.raises(ValueError, match=sentence):
        make_envs([lambda: ListEnv(space, [None], action_space)])


def test_choice_of_a_node_beside_a_number():
    """A Discrete chooses a node where the mask says so; a Box beside it has numbers. The flag does
    not apply to a Box, which is said."""
    action_space = spaces.Tuple((spaces.Discrete(9), vector(1)))
    envs = make_envs([lambda: ListEnv(GRAPH_MASK, [None], action_space)])
    assert [(part.group, part.n) for part in envs.parts[0]] == [("g.nodes", 9), ("", 0)]
    with pytest.raises(ValueError, match="--action-head nodes needs Discrete.*Box"):
        make_envs([lambda: ListEnv(GRAPH, [None], action_space)], action_head="nodes")


@pytest.mark.parametrize(
    "bad, rows", [(graph(nodes=4), 4), (graph(nodes=0, edges=0, links=np.zeros((0, 2), int)), 0)]
)
def test_more_nodes_than_actions(bad, rows):
    """The environment would receive an action outside of its space; both numbers are named."""
    space = spaces.Dict(g=graph_space(vector(2)), action_mask=MASK)
    good, bad = (g | {"action_mask": np.ones(len(g["g"].nodes), np.int8)} for g in (graph(), bad))
    sentence = (
        rf"env 2, leaf '(g.nodes|action_mask)', step 2: {rows} rows to choose from, the "
        rf"action space has 3"
    )
    with pytest.raises(ValueError, match=sentence):
        walk(make_envs(makers_of(space, spaces.Discrete(3), good, bad)))


# ---- What environments return, and how they end ----
class Simple(gym.Env):
    """Two numbers; episodes of 5 steps. `fault` says what it does in the third step of its `at`-th
    episode."""

    observation_space, action_space = vector(2), TWO
    np_random = np.random.RandomState(0)  # of its own, as some old environments have
    metadata = {"render_modes": ["human"]}

    def __init__(self, fault=None, at=1, made=True):
        assert made, "no licence left"
        self.fault, self.at, self.episode = (
            fault,
            at,
            -1,
        )  # the reset that looks for a mask is not counted

    def reset(self, *, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        if self.fault == "old reset":
            return np.zeros(2, np.float32)
        if self.fault == "reset" and self.episode == self.at:
            self.explode()
        return np.zeros(2, np.float32), None if self.fault == "no info" else {}

    def step(self, action):
        self.t += 1
        obs, now = np.array([self.t / 10, 0], np.float32), self.t == 3 and self.episode == self.at
        if self.fault == "old step":
            return obs, 0.0, False, {}
        if now and self.fault == "exit":
            sys.exit(0)
        if now and self.fault == "step":
            self.explode()
        if now and self.fault == "gym error":
            raise gym.error.InvalidAction("no such door")
        if now and self.fault == "sleep":
            time.sleep(3)
        if now and isinstance(self.fault, str) and self.fault in RETURNS:
            _, changes = RETURNS[self.fault]
            return obs, *(
                {"reward": 1.0, "terminated": True, "truncated": False, "info": {}} | changes
            ).values()
        reward = self.fault[1] if now and isinstance(self.fault, (list, tuple)) else 1.0
        end = self.t >= 5 and self.fault != "no end"
        return obs, reward, end, False, None if self.fault == "no info" else {}

    def explode(self):
        raise KeyError("the bridge is out")


class NoSeed(Simple):
    """Of the days before gymnasium."""

    def reset(self):
        return super().reset()


gym.register("Simple-v0", entry_point=Simple)
gym.register("NoSeed-v0", entry_point=NoSeed)


def fails(sentence, folder, **flags):
    """main ends with an error of those that the command line prints alone, and it holds the
    sentence."""
    with pytest.raises((ValueError, gym.error.Error, OSError, SystemExit)) as error:
        run(flags.pop("run_dir", folder), **{"env_id": "Simple-v0"} | flags)
    text = str(error.value)
    assert re.search(sentence, text), text
    assert os.path.basename(ppo_graph.__file__) not in text, text  # none of our own frames


ENVIRONMENTS = {  # fault -> what is said
    "old reset": r"env 0, step 0, reset.* 2 values.* not \[0. 0.\]",
    "old step": r"env 0, step 1, step.* 5 values.* not \(array",
    "exit": r"env 0, step 3, step\((0|1),\): SystemExit: 0",
    "step": r"(?s)in explode\n.*env 0, step 3, step\((0|1),\): KeyError: 'the bridge is out'",
    "gym error": r"env 0, step 3, step\((0|1),\): InvalidAction: no such door",
    "reset": r"(?s)in explode\n.*env 0, step 0, reset.*: KeyError: 'the bridge is out'",
    **{
        f"reward {value}": rf"env 0, step 3: reward is {value}, not a finite number"
        for value in ("nan", "inf", "-inf")
    },
    "reward None": "env 0, step 3.* reward.*(None|nan)",
    "reward text": "env 0, step 3.* reward.*text",
    "reward row": r"env 0, step 3.* reward.*\[1.0, 2.0\]",
}
GRADIENT = torch.ones((), requires_grad=True)
RETURNS = {  # what is said, and what is other than it should be in the result of a step
    "info that is a list": (r"info is \[3\], not a dict", {"info": [3]}),
    "info that is text": ("info is 'text', not a dict", {"info": "text"}),
    "terminated as text": ("terminated is 'no', not", {"terminated": "no"}),
    "terminated that is None": ("terminated is None, not", {"terminated": None}),
    "terminated that is 2": ("terminated is 2, not True or False", {"terminated": 2}),
    "truncated that is a half": ("truncated is 0.5, not True or False", {"truncated": 0.5}),
    "terminated for two": (
        r"terminated is array\(.*, not",
        {"terminated": np.array([True, False])},
    ),
    "truncated that is nan": ("truncated is nan, not", {"truncated": np.nan}),
    "truncated as an array of text": (
        r"truncated is array\(.*, not",
        {"truncated": np.array(["no"])},
    ),
    "reward with gradients": ("reward is tensor.*requires_grad", {"reward": GRADIENT}),
    "return that is None": (
        "None in .*'episode'.* is not a finite",
        {"info": {"episode": {"r": None}}},
    ),
    "return that is nan": (
        "nan in .*'episode'.* is not a finite",
        {"info": {"episode": {"r": np.nan}}},
    ),
    "length that is nan": (
        "nan in .*'episode'.* is not a finite",
        {"info": {"episode": {"r": 1, "l": np.nan}}},
    ),
    "returns of two": (
        r"array\(.* in .*'episode'.* is not",
        {"info": {"episode": {"r": np.ones(2)}}},
    ),
    "return as text": ("'9' in .*'episode'.* is not a finite", {"info": {"episode": {"r": "9"}}}),
    "report with gradients": (
        "tensor.* is not a finite number",
        {"info": {"eval": {"cost": GRADIENT}}},
    ),
    "cost as text": (
        "'cheap' in .*'eval'.* is not a finite",
        {"info": {"eval": {"cost": "cheap"}}},
    ),
    "cost that is nan": ("nan in .*'eval'.* is not a finite", {"info": {"eval": {"cost": np.nan}}}),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", RETURNS)
def test_result_of_a_step(fault, workers, tmp_path):
    """What a step returns in a wrong form is named with env and step when it comes."""
    sentence, _ = RETURNS[fault]
    fails(
        f"env 0, step 3(, step)?: .*{sentence}",
        tmp_path,
        num_workers=workers,
        env_kwargs={"fault": fault},
    )


OTHERS = {  # meanings of "group" and "eval" that are not this package's
    "group": [["a"], lambda: 0, {}],
    "eval": [3.0, None, {1: 2}, {"rule": lambda: 0}, "text"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_words_with_another_meaning(name, monkeypatch, capsys):
    """What an environment means otherwise by "group" or "eval" is left out and said once."""
    for value in OTHERS[name]:
        monkeypatch.setattr(fitting, "SAID", set())

        class Reports(ListEnv):
            def step(self, action, value=value):
                return np.zeros(2), 1.0, True, False, {name: value}

        envs = make_envs([lambda: Reports(vector(2), [np.zeros(2)] * 2)])
        envs.reset(0)
        for _ in range(2):
            assert envs.step([0]).infos == [(0, {"episode": {"r": 1.0, "l": 1}})]
        kind = type(value).__name__
        assert (
            capsys.readouterr().err == f"info['{name}'] is left out: it is no {name} but {kind}\n"
        )


# ---- Rewards of agents, and of objectives ----
class Team(gym.Env):
    """Each agent is shown which of its two actions is right, and rewarded. `of` is the kind of
    observation, action, rewards and ends: tuple or dict. Agent 1 ends after 2 steps, all after
    3."""

    def __init__(self, of="tuple", lists_ends=True):
        agents = range(3) if of == "tuple" else ["a", "b", "c"]
        self.names, self.of, self.lists_ends = list(agents), of, lists_ends
        kind = spaces.Tuple if of == "tuple" else spaces.Dict
        self.observation_space = kind(self.pack([vector(2)] * 3))
        self.action_space = kind(self.pack([spaces.Discrete(2)] * 3))

    def pack(self, values):
        return tuple(values) if self.of == "tuple" else dict(zip(self.names, values))

    def observe(self):
        self.right = self.np_random.integers(2, size=3)
        return self.pack(list(np.eye(2, dtype=np.float32)[self.right]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        chosen = [action.get(name) if self.of == "dict" else action[name] for name in self.names]
        rewards = self.pack([float(a == b) for a, b in zip(chosen, self.right)])
        ends = [self.t >= 3, self.t >= 2, self.t >= 3]
        over = self.pack(ends) if self.lists_ends else all(ends)
        return self.observe(), list(rewards) if self.of == "tuple" else rewards, over, False, {}


class Objectives(Simple):
    """A reward for each objective."""

    def step(self, action):
        obs, reward, *outcome = super().step(action)
        return obs, np.array([reward, 2 * reward]), *outcome


class Linear(gym.Wrapper):
    def step(self, action):
        obs, reward, *outcome = super().step(action)
        return obs, float(reward.sum()), *outcome


@pytest.fixture
def teams():
    gym.register("Team-v0", entry_point=Team)
    gym.register("Objectives-v0", entry_point=Objectives)
    yield
    del gym.registry["Team-v0"], gym.registry["Objectives-v0"]


@pytest.mark.parametrize("workers", [0, 2])
def test_rewards_of_agents(workers, teams, tmp_path):
    """The script of agents and the mean are named, and work."""
    sentence = (
        r"reward is \[.*\], not a finite number: in ppo_graph_agents.py each agent has its own; "
    )
    sentence += "--wrap cleanrl_graph.envs.wrappers:MeanReward takes the mean"
    flags = dict(env_id="Team-v0", num_workers=workers, eval_episodes=2)
    fails(sentence, tmp_path / "a", **flags)
    flags["wrap"] = ("cleanrl_graph.envs.wrappers:MeanReward",)
    rows = run(tmp_path / "b", **flags).rows
    assert all(row["length"] == 3 and 0 <= row["return"] <= 3 for row in rows)


@pytest.mark.parametrize("of, lists_ends", [("tuple", True), ("dict", True), ("dict", False)])
def test_agents_become_a_set(of, lists_ends, teams, tmp_path):
    """In the script of agents, by itself: they learn, and one that has ended is gone."""
    kwargs = {"of": of, "lists_ends": lists_ends}
    flags = dict(env_id="Team-v0", env_kwargs=kwargs, total_timesteps=1536, learning_rate=2e-2)
    flags |= dict(num_envs=8, num_steps=16, eval_episodes=20)
    result = run(tmp_path, ppo_graph_agents, **flags)
    assert np.mean([row["return"] for row in result.rows]) > 2.9
    rows = result.scalars["charts/rows/agents"][-1][1]
    assert rows == pytest.approx(8 / 3 if lists_ends else 3, abs=0.05)


def test_rewards_of_objectives(teams, tmp_path):
    """A wrapper of --wrap makes them one number, whose sum is what is logged."""
    sentence = (
        r"reward is array\(\[1., 2.\]\), .*: --wrap mo_gymnasium.wrappers:LinearReward makes one"
    )
    fails(sentence, tmp_path / "a", env_id="Objectives-v0")
    wrap = (f"{__name__}:Linear",)
    result = run(tmp_path / "b", env_id="Objectives-v0", wrap=wrap, eval_episodes=2)
    assert [(row["return"], row["length"]) for row in result.rows] == [(15.0, 5)] * 2
    assert {value for _, value in result.scalars["charts/episodic_return"]} == {15.0}


def test_result_in_an_odd_form():
    """Arrays of one bool, numbers 0 and 1, and text or numbers for groups are simply read."""

    class Odd(ListEnv):
        def step(self, action):
            self.t += 1
            info = {"group": self.t, "eval": {"cost": np.array([3.0]), "rule": None, "text": "x"}}
            return np.zeros(2), 1.0, np.array([self.t == 2]), np.int64(self.t == 3), info

    envs = make_envs([lambda: Odd(vector(2), [np.zeros(2)] * 5)])
    envs.reset(0)
    ends = [envs.step([0]) for _ in range(2)]
    assert [bool(step.terminated[0]) for step in ends] == [False, True]
    ((_, info),) = ends[1].infos
    assert info["group"] == 2 and info["eval"]["cost"].tolist() == [3]


def test_integers_are_exact():
    """Where one environment returns int64 and another uint64, too."""
    values = [np.array([2**60 + 1]), np.array([2**60 + 3], np.uint64)]
    space = spaces.Box(0, 2**62, (1,), np.int64)
    for many in (space, spaces.Sequence(space, stack=True)):
        makers = [
            lambda i=i: ListEnv(many, [values[i][None] if many != space else values[i]])
            for i in range(2)
        ]
        obs = make_envs(makers).reset(0).obs
        assert obs.values[0].ravel().tolist() == [2**60 + 1, 2**60 + 3]


def test_returns_in_arrays():
    """As older vectors of gymnasium write them."""

    class Counts(ListEnv):
        def step(self, action):
            return (
                np.zeros(2),
                1.0,
                True,
                False,
                {"episode": {"r": np.array([7.5]), "l": np.array([3])}},
            )

    envs = make_envs([lambda: Counts(vector(2), [np.zeros(2)] * 2)])
    envs.reset(0)
    ((_, info),) = envs.step([0]).infos
    assert info["episode"] == {"r": 7.5, "l": 3}


class Stuck(Simple):
    def close(self):
        raise OSError("the door is stuck")


@pytest.mark.parametrize("workers", [0, 2])
def test_close_that_raises(workers, tmp_path, capfd):
    """What was trained and evaluated is there, and what went wrong is said."""
    gym.register("Stuck-v0", entry_point=Stuck)
    result = run(tmp_path, env_id="Stuck-v0", num_workers=workers, save_model=True, eval_episodes=2)
    assert len(result.rows) == 2 and (result.folder / "eval.csv").exists()
    assert (result.folder / "model.pt").exists()
    del gym.registry["Stuck-v0"]


def test_close_that_exits(tmp_path):
    """Before the training an environment is closed, too; the run does not end there as if all were
    well."""

    class Exits(Simple):
        eval_suites = {"all": [{}]}

        def close(self):
            sys.exit(0)

    gym.register("Exits-v0", entry_point=Exits)
    result = run(tmp_path, env_id="Exits-v0", eval_suite="all", eval_samples=0)
    assert [row["greedy"] for row in result.rows] == [-5]
    del gym.registry["Exits-v0"]


REWARDS = {"None": None, "text": "text", "row": [1.0, 2.0]}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ENVIRONMENTS)
def test_fault_of_an_environment(fault, workers, tmp_path):
    """Env, step and action, below the environment's own frames; from worker processes as well."""
    kind, value = fault, fault.removeprefix("reward ")
    if value != fault:
        kind = ["reward", REWARDS[value] if value in REWARDS else float(value)]
    fails(ENVIRONMENTS[fault], tmp_path, num_workers=workers, env_kwargs={"fault": kind})


@pytest.mark.parametrize("reward", ["1.5", np.ones(2), 1j, 10**400, None, Decimal(2)])
def test_reward_that_is_no_number(reward):
    """Although numpy or Python would make one of some of them."""

    class Odd(ListEnv):
        def step(self, action):
            obs, _, *outcome = super().step(action)
            return obs, reward, *outcome

    envs = make_envs([lambda: Odd(vector(2), [np.zeros(2)] * 2)])
    envs.reset(0)
    with pytest.raises(ValueError, match="env 0, step 1: reward is .*, not a finite number"):
        envs.step([0])


def test_reset_without_a_seed(tmp_path):
    """An environment for gym, not for gymnasium."""
    sentence = r"reset.* \(an environment of gym's old interface needs .*argument 'seed'"
    fails(sentence, tmp_path / "a", env_id="NoSeed-v0")
    fails("2 values, not .*gym's old interface", tmp_path / "b", env_kwargs={"fault": "old reset"})
    text = (Path(__file__).parents[2] / "cleanrl_graph" / "README.md").read_text()
    code = text.partition("gym's old interface")[2].partition("```python")[2].partition("```")[0]
    names = {}
    exec(f"import gymnasium as gym\n{textwrap.dedent(code)}", names)

    class Old(NoSeed):
        def step(self, action):
            obs, reward, ended, _, info = super().step(action)
            return obs, reward, ended, info

        def reset(self):
            return super().reset()[0]

    gym.register("Old-v0", entry_point=lambda: names["NewInterface"](Old()))
    assert run(tmp_path / "c", env_id="Old-v0", eval_episodes=1).rows[0]["return"] == 5
    del gym.registry["Old-v0"]


class Needy(Simple):
    def __init__(self, n_nodes, *, size):
        assert n_nodes > 0, "too few"
        super().__init__()


def test_constructor_that_needs_arguments(tmp_path):
    gym.register("Needy-v0", entry_point=Needy)
    sentence = r"""\(give --env-kwargs '{"n_nodes": ...}'\)"""
    fails(sentence, tmp_path / "a", env_id="Needy-v0", env_kwargs={"size": 1})
    fails('"size": ', tmp_path / "b", env_id="Needy-v0", env_kwargs={"n_nodes": 1})
    gym.register("Needy-v1", entry_point=lambda n_nodes: Simple())
    fails(sentence, tmp_path / "d", env_id="Needy-v1")
    del gym.registry["Needy-v1"]
    kwargs = {"n_nodes": -1, "size": 1}  # which it has, and refuses
    sentence = r"Needy-v0 \(its arguments are --env-kwargs\): AssertionError: too few"
    fails(sentence, tmp_path / "c", env_id="Needy-v0", env_kwargs=kwargs)
    del gym.registry["Needy-v0"]


class Strict(Simple):
    def step(self, action):
        if type(action) is not int:
            raise AssertionError(f"action must be an integer: {action} is invalid")
        return super().step(action)


def test_actions_as_pythons_int(tmp_path):
    """An environment that refuses NumPy's integers is told by a sentence that names a wrapper."""
    gym.register("Strict-v0", entry_point=Strict)
    wrap = "cleanrl_graph.envs.wrappers:PythonInts"
    fails(rf"\(where Python's int is needed: --wrap {wrap}\)", tmp_path / "a", env_id="Strict-v0")
    run(tmp_path / "b", env_id="Strict-v0", wrap=(wrap,))
    del gym.registry["Strict-v0"]


def test_ids_that_a_function_registers(tmp_path, monkeypatch):
    """A function without arguments that the module has for that is called."""
    (tmp_path / "shy_module.py").write_text(
        "import gymnasium\n"
        "def register(needed): pass\n"
        "def register_envs():\n"
        "    gymnasium.register('Shy-v0', lambda: gymnasium.make('CartPole-v1'))"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run(tmp_path / "a", env_id="shy_module:Shy-v0")
    assert "called shy_module.register_envs(), which registers ids" in fitting.SAID
    (tmp_path / "old_module.py").write_text("def register_envs(): raise RuntimeError('old')")
    fails(r"\(or module:Name-v0\): RuntimeError: old", tmp_path / "c", env_id="old_module:Old-v0")
    del gym.registry["Shy-v0"]


def test_ids_of_modules_that_were_not_imported(tmp_path, monkeypatch):
    """The module that resembles an unknown id is named; so is one that registers nothing."""
    (tmp_path / "quiet_module.py").write_text("def register(): pass")
    (tmp_path / "loud_module.py").write_text(
        "import gymnasium\ngymnasium.register('Loud-v0', entry_point='elsewhere:Loud')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    quiet = r"\(quiet_module was imported and registered nothing: call its register function"
    for k in "ab":  # imported now or before
        fails(quiet, tmp_path / k, env_id="quiet_module:Quiet-v0")
    fails(r"\(or module:Name-v0\)", tmp_path / "c", env_id="loud_module:Lood-v0")
    fails(r"\(or module:Name-v0\)", tmp_path / "d", env_id="helpers:Nope-v0")
    del gym.registry["Loud-v0"]
    packages = {"minigrid": ["Minigrid"], "ale_py": ["ale-py"], "mo_gymnasium": ["mo-gymnasium"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: packages)
    for env_id in ("minigrid:MiniGridder-Empty-v0", "ale_py:ALE/Nothing-v5"):
        sentence = rf"\(not imported\? --env-id {env_id}\)"
        fails(sentence, tmp_path / env_id[:3], env_id=env_id.partition(":")[2])
    fails(r"\(or module:Name-v0\)", tmp_path / "e", env_id="Gymnasium-v0")
    files = {
        "grids/levels.py": "register(id='Toddler-Walk-v0')",
        "grids-1.0.dist-info/METADATA": "Name: grids\nVersion: 1.0\nRequires-Dist: gymnasium>=1",
        "grids-1.0.dist-info/RECORD": "grids/levels.py,,",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sentence = r"\(not imported\? --env-id grids:Toddler-Walk-v0\)"
    fails(sentence, tmp_path / "f", env_id="Toddler-Walk-v0")
    fails(r"\(or module:Name-v0\)", tmp_path / "g", env_id="Toddler-Run-v0")


@pytest.mark.parametrize(
    "kwargs, sentence",
    [
        ({"nope": 1}, "unexpected keyword argument 'nope'"),
        ({"made": False}, r"(?s)in __init__\n.*no licence left"),
        ({"fault": "reset", "at": 0}, "(?s)in explode\n.*the bridge is out"),
    ],
)
def test_environment_that_cannot_be_made(kwargs, sentence, tmp_path):
    """An exception in its constructor, or in the reset that looks for a mask, is the
    environment's."""
    fails(sentence, tmp_path, env_kwargs=kwargs)


def test_environments_of_other_spaces(tmp_path):
    """The entries of --env-kwargs must have one action space and one observation space."""

    def make(size=2, actions=2):
        return ListEnv(vector(size), [np.zeros(size, np.float32)] * 99, spaces.Discrete(actions))

    gym.register("Sized-v0", entry_point=make)
    fails(
        "--env-kwargs: not all entries have the action space Discrete",
        tmp_path / "a",
        env_id="Sized-v0",
        env_kwargs=[{}, {"actions": 3}],
    )
    fails(
        r"--env-kwargs: not all entries have the observation space Box.*\(3,\)",
        tmp_path / "b",
        env_id="Sized-v0",
        env_kwargs=[{}, {"size": 3}],
    )
    del gym.registry["Sized-v0"]


def test_entries_that_are_only_played(tmp_path, monkeypatch):
    """An entry of --env-kwargs that no environment of the training has, too, before the first
    step."""

    def make(size=2):
        return ListEnv(vector(size), [np.zeros(size, np.float32)] * 99)

    monkeypatch.setattr(torch.optim.Adam, "step", lambda *args: pytest.fail("training began"))
    gym.register("Sized-v0", entry_point=make)
    flags = dict(env_id="Sized-v0", env_kwargs=[{}, {}, {"size": 3}])
    fails("not all entries have the observation space Box", tmp_path, num_envs=2, **flags)
    del gym.registry["Sized-v0"]


@pytest.mark.parametrize("script", [ppo_gtrxl, ppo_lstm_sparse], ids=lambda s: s.__name__)
def test_more_minibatches_than_environments(script, tmp_path):
    """They are pieces of the rollout in time; up to one for each step."""
    for num in (4, 24):
        result = run(tmp_path / str(num), script, env_id="Simple-v0", num_minibatches=num)
        mismatch = result.scalars["debug/collection_mismatch"]
        assert mismatch and all(0 <= value < 1e-5 for _, value in mismatch)


def test_environment_that_hangs(tmp_path):
    """A worker that does not answer is named with its environments, and the process ends."""
    fails(
        r"step 3: the worker of envs [02] to [12] did not answer within --env-timeout 1 s",
        tmp_path,
        num_workers=2,
        env_timeout=1.0,
        env_kwargs={"fault": "sleep"},
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_info_that_is_none(workers, tmp_path):
    """Simply works, as does an np_random of the environment's own, with checkpoints."""
    run_ = run(
        tmp_path,
        env_id="Simple-v0",
        env_kwargs={"fault": "no info"},
        num_workers=workers,
        checkpoint_every=1,
        eval_episodes=2,
    )
    assert [row["return"] for row in run_.rows] == [5, 5] and len(
        list(run_.folder.glob("*.ckpt"))
    ) == 2


def test_episode_that_never_ends(tmp_path):
    """The evaluation cuts it off; so it does in training's log, where it is no episode."""
    run_ = run(
        tmp_path,
        env_id="Simple-v0",
        env_kwargs={"fault": "no end"},
        eval_episodes=2,
        eval_max_steps=70,
    )
    cut = {"length": 70, "return": 70.0, "cut": 1}
    beside = {f"sampled {name}": value for name, value in cut.items()}
    assert run_.rows == [{"episode": i, **cut, **beside} for i in range(2)]
    assert "charts/episodic_return" not in run_.scalars


def test_schedule_that_does_not_end(tmp_path):
    """It counts with what was scheduled so far, and is marked."""
    flags = dict(env_id="envs:JobShop-v0", eval_suite="ft", eval_samples=2, eval_max_steps=40)
    rows = run(tmp_path, total_timesteps=0, **flags).rows
    for column in ("greedy", "best of 2"):  # ft06 has 36 operations, the others have 100
        assert [row[column] > 0 for row in rows] == [True] * 3
    assert [row.get("cut") for row in rows] == [None, 3, 3]


@pytest.mark.parametrize("name", ["greedy", "instance", "cut", "best of 16"])
def test_names_of_the_evaluation_itself(name):
    """A rule that has one would be lost."""

    class Reports(ListEnv):
        def step(self, action):
            return np.zeros(2), 1.0, True, False, {"eval": {"cost": 3.0, name: 4.0}}

    envs = make_envs([lambda: Reports(vector(2), [np.zeros(2)] * 2)])
    envs.reset(0)
    with pytest.raises(ValueError, match=f"has the name '{name}', a column of the evaluation's"):
        envs.step([0])


def test_exception_in_the_evaluation(tmp_path):
    """The model is saved before it is tried; the environment is named."""

    class Flaky(Simple):
        def reset(self, *, seed=None, options=None):
            self.seeds = getattr(self, "seeds", []) + [seed]
            return super().reset()

        def step(self, action):
            if any(seed is not None and seed >= 10_000 for seed in self.seeds):
                self.explode()
            return super().step(action)

    gym.register("Flaky-v0", entry_point=Flaky)
    fails(
        r"(?s)in explode\n.*env 0, step 1, step\(.,\): KeyError: 'the bridge is out'",
        tmp_path,
        env_id="Flaky-v0",
        save_model=True,
        eval_episodes=2,
    )
    assert (run_folder(tmp_path) / "model.pt").exists()


# ---- Flags ----
# name of the flag -> values that no script takes, and what is said about them
FLAGS = {
    "num_envs": [(0, "--num-envs 0: a number from 1"), (-3, "--num-envs -3: a number from 1")],
    "num_steps": [(0, "--num-steps 0: a number from 1")],
    "num_minibatches": [
        (0, "--num-minibatches 0: a number from 1"),
        (10**6, "--num-minibatches 1000000 exceeds the 24 steps of a rollout"),
    ],
    "update_epochs": [(0, "--update-epochs 0: a number from 1")],
    "total_timesteps": [
        (10, "--total-timesteps 10 is less than a rollout of 24 steps"),
        (-1, "--total-timesteps -1: a number from 0"),
    ],
    "learning_rate": [
        (float("nan"), "--learning-rate nan: a number"),
        (-1e-3, "--learning-rate -0.001: a number"),
    ],
    "gamma": [(1.5, "--gamma 1.5: a number from 0 to 1"), (float("nan"), "--gamma nan")],
    "gae_lambda": [(-0.1, "--gae-lambda -0.1: a number from 0 to 1")],
    "clip_coef": [(-1.0, "--clip-coef -1.0: a number from 0")],
    "ent_coef": [(float("inf"), "--ent-coef inf: a number"), (float("nan"), "--ent-coef nan")],
    "vf_coef": [(float("nan"), "--vf-coef nan: a number")],
    "max_grad_norm": [
        (float("nan"), "--max-grad-norm nan"),
        (-1.0, "--max-grad-norm -1.0: a number from 0"),
    ],
    "norm_vloss": [(-1.0, "--norm-vloss -1.0: a number from 0")],
    "target_kl": [(float("nan"), "--target-kl nan: a number from 0"), (-1.0, "--target-kl -1.0")],
    "num_workers": [(-1, "--num-workers -1: a number from 0")],
    "env_timeout": [
        (-1.0, "--env-timeout -1.0: a number from 0"),
        (float("nan"), "--env-timeout nan"),
    ],
    "checkpoint_every": [(-1, "--checkpoint-every -1: a number from 0")],
    "checkpoint_minutes": [
        (-1.0, "--checkpoint-minutes -1.0: a number from 0"),
        (float("nan"), "--checkpoint-minutes nan"),
    ],
    "eval_episodes": [(-1, "--eval-episodes -1: a number from 0")],
    "eval_samples": [(-1, "--eval-samples -1: a number from 0")],
    "eval_max_steps": [(0, "--eval-max-steps 0: a number from 1")],
    "gnn_dim": [(0, "--gnn-dim 0: a number from 1")],
    "gnn_layers": [(0, "--gnn-layers 0: a number from 1")],
    "hidden_dims": [((16, 0), "--hidden-dims 0: a number from 1")],
    "seed": [
        (-1, "--seed -1: a number from 0 to 4294967295"),
        (5_000_000_000, "--seed 5000000000: a number from 0"),
    ],
    "env_kwargs": [
        ([], r"--env-kwargs \[\]: an object, or a list of at least one"),
        ([3], r"--env-kwargs \[3\]"),
    ],
    "wrap": [
        (("hide:9",), "--wrap hide:9: "),
        (("nope",), "--wrap nope: there is no such wrapper"),
    ],
    "action_head": [
        ("nodes", "--action-head nodes"),
        ("avail_actions", "--action-head avail_actions"),
    ],
    "eval_suite": [("nope", r"--eval-suite nope: Simple-v0 has the suites \[\]")],
    "capture_video": [(True, "--capture-video: the environment cannot render")],
    "env_id": [
        ("Nope-v0", "Environment `Nope` doesn't exist"),
        ("envs:Nope-v0", "Environment `Nope` doesn't exist"),
        ("nowhere:Nope-v0", "No module named 'nowhere'"),
        ("a:b:c", "a:b:c"),
        ("not an id", "not an id"),
    ],
    "load_model": [
        ("nowhere.pt", "nowhere.pt"),
        ("{folder}", "folder"),
        ("{text}", "--load-model .*text"),
        ("{empty}", "--load-model .*empty"),
        ("{network}", "--load-model .*network"),
        ("{other}", "--load-model .*other"),
    ],
    "resume": [
        ("nowhere", "--resume nowhere: auto, a folder .* is needed"),
        ("{folder}", "--resume .*folder"),
        ("{text}", "--resume .*text: "),
        ("{network}", "--resume .*network: "),
    ],
    "run_dir": [
        ("{text}", "cannot write to the folder of the run .*--run-dir"),
        ("/proc/nope", "cannot write"),
    ],
}
BAD_FLAGS = {
    f"{flag} {value}": (flag, value, sentence)
    for flag, values in FLAGS.items()
    for value, sentence in values
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flag(case, tmp_path, monkeypatch):
    """A flag that makes no sense is an error with its name, before the first update."""
    flag, value, sentence = BAD_FLAGS[case]
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *args: pytest.fail("training began"))
    (
        (tmp_path / "text").write_text("some text"),
        (tmp_path / "empty").touch(),
        (tmp_path / "folder").mkdir(),
    )
    agent = torch.nn.Linear(2, 2)
    torch.save({"model": agent.state_dict(), "args": {}}, tmp_path / "network")
    torch.save(agent.state_dict(), tmp_path / "other")
    if isinstance(value, str) and value.startswith("{"):
        value = str(tmp_path / value[1:-1])
    fails(
        sentence,
        tmp_path / "runs",
        **{flag: value} | ({"num_workers": 0} if flag != "num_workers" else {}),
    )


@pytest.mark.parametrize("gnn", ["gatv2", "transformer"])
def test_width_of_attention(gnn, tmp_path):
    """Heads share the width."""
    fails(
        f"--gnn-dim 62: the 4 heads of --gnn {gnn} need a multiple of 4",
        tmp_path,
        gnn=gnn,
        gnn_dim=62,
    )
    run(tmp_path, env_id="envs:PoissonGraph-v0", gnn="gine", gnn_dim=62)


def test_flags_that_look_wrong(tmp_path):
    """Simply work: no hidden layer, the largest seed, discount 0, a gradient norm without end, more
    workers than environments, no clipping of the policy."""
    run(
        tmp_path,
        env_id="Simple-v0",
        hidden_dims=(),
        seed=2**32 - 1,
        gamma=0.0,
        max_grad_norm=float("inf"),
        num_workers=5,
        clip_coef=0.0,
        target_kl=0.0,
        eval_episodes=1,
    )


def test_run_folder_is_found_first(tmp_path, monkeypatch):
    """No step is made for a run that could not be written."""
    monkeypatch.setattr(Simple, "step", lambda *args: pytest.fail("a step was made"))
    (tmp_path / "file").touch()
    fails("cannot write to the folder of the run", tmp_path / "file")


def test_model_that_cannot_be_written(tmp_path, monkeypatch):
    """A sentence with the path; the evaluation is not reached."""
    monkeypatch.setattr(ppo_graph, "play", lambda *args: pytest.fail("the evaluation began"))
    monkeypatch.setattr(
        checkpoint.Folder, "__enter__", lambda self: os.mkdir(f"{self.folder}/model.pt") or self
    )
    fails("model.pt", tmp_path, save_model=True, eval_episodes=1)


def test_model_is_whole_or_not_at_all(tmp_path, monkeypatch):
    """The disk gets full while it is written."""
    monkeypatch.setattr(ppo_graph, "play", lambda *args: pytest.fail("the evaluation began"))

    def save(model, path):
        with open(path, "wb") as file:
            file.write(b"half of a mod")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    fails("cannot write .*model.pt.*No space left", tmp_path, save_model=True, eval_episodes=1)
    assert not list(tmp_path.glob("*/model.pt")) and not list(tmp_path.glob("*/*.tmp"))


# ---- Checkpoints ----
def test_two_runs_at_once(tmp_path):
    """--resume auto does not write into the folder of a run that is going on."""
    first = run(tmp_path, env_id="Simple-v0", checkpoint_every=1)
    with checkpoint.Folder(str(first.folder)):
        fails(
            f"another process writes to {first.folder}", tmp_path, checkpoint_every=1, resume="auto"
        )


def test_other_flags_for_the_same_run(tmp_path):
    """--resume auto does not go on, or end at once, with flags that the checkpoint was not made
    with; what is in the folder stays."""
    first = run(tmp_path, env_id="Simple-v0", checkpoint_every=1)
    before = sorted(path.name for path in first.folder.glob("checkpoint*"))
    fails(r"--learning-rate 0.1, it was 0.00025", tmp_path, resume="auto", learning_rate=0.1)
    fails(r"--num-envs 2, it was 3", tmp_path, resume=str(first.folder), num_envs=2)
    fails(
        r"the network of the checkpoint is not that of the flags",
        tmp_path,
        resume=str(first.folder),
        hidden_dims=(5,),
    )
    assert (
        sorted(path.name for path in first.folder.glob("checkpoint*")) == before
        and len(before) == 2
    )


@pytest.mark.parametrize(
    "name",
    [
        name if name == "ppo_gtrxl" else pytest.param(name, marks=pytest.mark.slow)
        for name in SCRIPTS
        if name != "ppo_graph"
    ],
)
def test_checkpoint_of_another_script(name, tmp_path):
    """And its model, where the network differs."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    other = run(tmp_path / "other", script, env_id="Simple-v0", checkpoint_every=1)
    fails(f"--script ppo_graph, it was {name}", tmp_path / "runs", resume=str(other.folder))


def test_model_is_no_checkpoint(tmp_path, capsys):
    """model.pt for --resume."""
    first = run(tmp_path / "a", env_id="Simple-v0", save_model=True)
    fails(
        r"--resume .*model.pt: .*checkpoint_\*.ckpt is needed",
        tmp_path / "b",
        resume=str(first.folder / "model.pt"),
    )


def test_checkpoint_is_a_model_too(tmp_path):
    """A checkpoint for --load-model, and one that is cut off."""
    first = run(tmp_path / "a", env_id="Simple-v0", checkpoint_every=1)
    path = next(first.folder.glob("*.ckpt"))
    run(tmp_path / "b", load_model=str(path), total_timesteps=0)
    path.write_bytes(path.read_bytes()[:-1])
    fails("--load-model .*ckpt: not a file that a run", tmp_path / "c", load_model=str(path))


# ---- The command line ----
SMALL = [
    "--total-timesteps",
    32,
    "--num-envs",
    2,
    "--num-steps",
    8,
    "--num-minibatches",
    2,
    "--hidden-dims",
    8,
    "--eval-episodes",
    1,
    "--no-cuda",
]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ["--gnn", "gatv2", "--gnn-dim", 62],
            "--gnn-dim 62: the 4 heads of --gnn gatv2 need a multiple of 4",
        ),
        (
            ["--env-id", "Nope-v0"],
            r"--env-id Nope-v0 \(or module:Name-v0\): .*Environment `Nope` doesn't exist.*",
        ),
        (["--env-id", "nowhere:Nope-v0"], "--env-id nowhere:Nope-v0 .*No module named 'nowhere'.*"),
        (["--resume", "nowhere"], "--resume nowhere: auto, a folder .*"),
        (["--load-model", "nowhere.pt"], "--load-model .*nowhere.pt.*"),
        (["--wrap", "nope"], "--wrap nope: there is no such wrapper.*"),
    ],
)
def test_a_sentence_alone(flags, sentence, tmp_path):
    """A wrong flag ends with exit code 1 and the sentence: no traceback."""
    code, out, err = command(*SMALL, "--run-dir", tmp_path, *flags)
    text = re.sub(r"^\s*\d+%\|.*\n", "", err.split("\r")[-1], flags=re.M)  # without the bar
    assert code == 1 and re.fullmatch(f"(.*: )?{sentence}\n", text), err


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["exit", "step"])
def test_frames_of_the_environment_alone(fault, workers, tmp_path):
    """sys.exit(0) in an environment does not end training as if all were well; its frames are
    shown, ours are not."""
    code, out, err = command(
        *SMALL,
        "--run-dir",
        tmp_path,
        "--env-id",
        "Simple-v0",
        "--env-kwargs",
        f'{{"fault": "{fault}"}}',
        "--num-workers",
        workers,
        "--save-model",
    )
    assert (
        code == 1 and "test_bad_input.py" in err and os.path.basename(ppo_graph.__file__) not in err
    ), err
    assert err.strip().splitlines()[-1].startswith("env 0, step 3, step(")
    assert (run_folder(tmp_path) / "failed").exists() and not (
        run_folder(tmp_path) / "model.pt"
    ).exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_module_in_the_current_folder(workers, tmp_path):
    """The environment and the wrapper of one's own are looked for there. What is reported is the
    environment's own return, before wrappers."""
    name = f"my_envs_{workers}"
    (tmp_path / f"{name}.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Env(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def __init__(self, size=1): self.size = size\n"
        "    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}\n"
        "    def step(self, a): return np.zeros(2, np.float32), float(self.size), True, False, {}\n"
        "def twice(env): return gym.wrappers.TransformReward(env, lambda r: 2 * r)\n"
        f"gym.register('Mine{workers}-v0', entry_point=Env)\n"
    )
    code, out, err = command(
        *SMALL,
        "--env-id",
        f"{name}:Mine{workers}-v0",
        "--env-kwargs",
        '{"size": 7}',
        "--wrap",
        f"{name}:twice",
        "--num-workers",
        workers,
        cwd=tmp_path,
    )
    assert code == 0 and "| 0 | 1 | 7 |" in out, err
    assert run_folder(tmp_path / "runs").name.startswith(
        f"Mine{workers}-v0-"
    )  # and what tells other kwargs apart


def test_there_are_enough_cases():
    """At least 100 kinds of bad input are in the tables alone."""
    assert len(FAULTS) + len(SPACES) + len(ENVIRONMENTS) + len(BAD_FLAGS) >= 100
