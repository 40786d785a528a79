"""envs/fitting.py: text as words and integer Boxes as actions, in wrappers that services put on by
themselves; and envs/pyg.py: observations from PyTorch Geometric's Data and HeteroData."""

import re

import gymnasium as gym
import networkx
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import ListEnv, make_envs, run, stored, vector
from torch_geometric.data import Data, HeteroData

from cleanrl_graph import ppo_graph
from cleanrl_graph.envs import fitting, pyg
from cleanrl_graph.envs.pyg import graph_space, to_graph_instance
from cleanrl_graph.services import runs
from cleanrl_graph.services.policy import load_policy

TEXTS = ["go to the red ball", "", "Go to the RED ball, now!", "the ball red to go"]


@pytest.fixture(autouse=True)
def said(monkeypatch):
    monkeypatch.setattr(fitting.SAID, "lines", set())


class Mission(gym.Env):
    """Right is the side that a text names; both have the same words. Episodes of one step."""

    action_space = spaces.Discrete(2)
    texts = ["left and not right", "right and not left"]

    def __init__(self):
        text = spaces.Dict(mission=spaces.Text(200), size=spaces.Discrete(3))
        self.observation_space = spaces.Dict(deep=spaces.Tuple((text, vector(1))))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        return self.observe(), {}

    def observe(self):
        mission = {"mission": self.texts[self.side], "size": 1}
        return {"deep": (mission, np.zeros(1, np.float32))}

    def step(self, action):
        assert type(action) is np.int64
        return self.observe(), float(action == self.side), True, False, {}


gym.register("Mission-v0", entry_point=Mission)


# ---- Text ----
def test_words():
    """A row per word, the same at every place and in every process, whatever its capitals."""
    env = fitting.fit(ListEnv(spaces.Text(200), TEXTS))
    rows = [env.reset()[0], *[env.step(0)[0] for _ in TEXTS[1:]]]
    for own in rows:
        assert own in env.observation_space
    assert [len(own) for own in rows] == [5, 0, 6, 5] and np.array_equal(rows[0], rows[2][:5])
    assert rows[0][:, 2].tolist() == [0, 1, 2, 3, 4]
    order = [2, 4, 3, 1, 0]
    assert np.array_equal(rows[3][:, :2], rows[0][order, :2])
    assert fitting.word_rows("ball").tolist() == [[91, 146, 0]]
    assert fitting.word_rows("x " * 99)[-1, 2] == fitting.NUM_PLACES - 1


def test_order_of_words_is_learned(tmp_path):
    """A trained policy reads the text that an environment without the wrapper shows, too."""
    flags = dict(num_envs=8, num_steps=16, total_timesteps=5120, learning_rate=4e-3, gnn_dim=16)
    flags |= dict(save_model=True, eval_episodes=20)
    result = run(tmp_path, env_id="Mission-v0", **flags)
    assert np.mean([row["return"] for row in result.rows]) == 1
    assert result.scalars["charts/rows/deep.0.mission"][0][1] == 4
    raw = Mission()
    policies = load_policy(result.folder / "model.pt"), load_policy(result.folder / "model.pt", raw)
    for seed in range(5):
        obs, _ = raw.reset(seed=seed)
        fitted, _ = policies[0].make_env().reset(seed=seed)
        assert policies[0](fitted) == policies[1](obs) == raw.side


def test_what_is_said(capsys):
    """One line for each leaf, once in a process."""
    for _ in range(2):
        make_envs([lambda: fitting.fit(Mission())])
    line = "reads 'deep.0.mission' as words: a set with a row for each"
    assert capsys.readouterr().err.splitlines() == [line]


# ---- Integer Boxes ----
SMALL = spaces.Box(np.array([[-3, 0], [5, 2]]), np.array([[60, 3], [5, 4]]), dtype=np.int16)
LARGE = spaces.Box(0, np.array([1000, 10]), dtype=np.int64)
WILD = spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64)


class Acts(ListEnv):
    """The reward says whether an action is one of its space."""

    def step(self, action):
        self.seen.append(action)
        return self.observations[0], float(action in self.action_space), False, False, {}


@pytest.mark.parametrize(
    "space",
    [
        WILD,
        spaces.Box(0, 3, (), np.uint8),
        spaces.Dict(a=SMALL, b=spaces.Tuple((LARGE, spaces.Discrete(2)))),
        spaces.Sequence(spaces.Tuple((LARGE, SMALL)), stack=False),
    ],
    ids=str,
)
def test_integer_actions(space, tmp_path):
    """Every action of a run, and of a trained policy, is an element of the environment's space."""
    seen = []

    def make():
        env = Acts(spaces.Sequence(vector(2), stack=True), [np.ones((3, 2), np.float32)], space)
        env.seen = seen
        return env

    gym.register("Acts-v0", entry_point=make, max_episode_steps=5)
    result = run(tmp_path, env_id="Acts-v0", save_model=True)
    assert [value for _, value in result.scalars["charts/episodic_return"]] == [5.0] * 2
    seen.clear()
    policy = load_policy(result.folder / "model.pt", make(), greedy=False)
    assert all(policy(np.ones((3, 2), np.float32)) in space for _ in range(9))
    del gym.registry["Acts-v0"]


def test_few_values_are_options():
    """Each entry has its own; their masks fit."""
    (part, *_), env = parts_of(SMALL)
    assert env.action_space.nvec.tolist() == [[64, 4], [1, 3]] and part.n == 64
    assert env.action_space.start.tolist() == [[-3, 0], [5, 2]]
    assert env.action(np.array([[-3, 1], [5, 4]])).tolist() == [[-3, 1], [5, 4]]


def test_many_values_are_rounded(capsys):
    """Within bounds, to which scripts scale what a policy says; without bounds they do not."""
    (part,), env = parts_of(LARGE)
    assert "by numbers, which are rounded\n" in capsys.readouterr().err
    assert part.n == 0 and env.action_space == spaces.Box(0, np.array([1000.0, 10]), (2,), float)
    assert env.action(np.array([-1.0, 9.6])).tolist() == [0, 10]
    assert env.action(np.array([500.4, 5.6])).tolist() == [500, 6]
    _, env = parts_of(WILD)
    assert not env.action_space.is_bounded("below") and not env.action_space.is_bounded("above")
    assert env.action(np.array([-2.4, 7.6])).tolist() == [-2, 8]


def parts_of(space):
    envs = make_envs([lambda: fitting.fit(ListEnv(vector(1), [], space))])
    return envs.parts[0], envs.envs[0].env


# ---- pyg.py ----
def machines(rng, jobs=3):
    """Jobs with 2 features, machines with 1 in a ring, who can do what with a duration."""
    data = HeteroData()
    data["machine"].x, data["job"].x = torch.randn(4, 1), torch.randn(jobs, 2)
    pairs = np.argwhere(rng.random((jobs, 4)) < 0.5)
    data["job", "runs_on", "machine"].edge_index = torch.from_numpy(pairs.T)
    data["job", "runs_on", "machine"].edge_attr = torch.rand(len(pairs))
    data["machine", "next", "machine"].edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    return data


def test_graph_of_networkx():
    """Attributes side by side; edges both ways if they have no direction."""
    graph = networkx.Graph()
    graph.add_node("b", size=2.0, at=[0.5, 1.5])
    graph.add_node("a", at=np.array([3, 4]), size=5)
    graph.add_edge("a", "b", cost=7)
    found = to_graph_instance(graph)
    assert found.nodes.tolist() == [[0.5, 1.5, 2], [3, 4, 5]]
    assert sorted(found.edge_links.tolist()) == [[0, 1], [1, 0]]
    assert found.edges.tolist() == [[7], [7]] and found in graph_space(graph)
    arrow = networkx.MultiDiGraph([(0, 1), (0, 1)])
    found = to_graph_instance(arrow)
    assert found.nodes.shape == (2, 0) and found.edge_links.tolist() == [[0, 1]] * 2
    assert found.edges is None and to_graph_instance(networkx.Graph()).nodes is None


def test_unlike_attributes_of_networkx():
    """A column has one meaning: what lacks an attribute is named."""
    graph = networkx.Graph()
    graph.add_node("depot", supply=9.0)
    graph.add_node("customer", demand=2.0)
    words = "node 'depot' has no attribute 'demand', node 'customer'"
    with pytest.raises(ValueError, match=words):
        to_graph_instance(graph)


@pytest.mark.parametrize("wrong", [networkx.Graph(), HeteroData()])
def test_graph_that_was_not_converted(wrong):
    """The sentence names what takes it."""
    space = spaces.Dict(a=spaces.Discrete(2), g=graph_space(networkx.path_graph(2)))
    wrong = {"a": 0, "g": wrong}
    envs = make_envs([lambda: ListEnv(space, [wrong])])
    sentence = "'g.nodes', step 0: cannot be read: .*; to_graph_instance of cleanrl_graph.envs.pyg"
    with pytest.raises(ValueError, match=sentence):
        envs.reset(0)


def test_data():
    """x, edge_index and edge_attr as they are."""
    rng, num = np.random.default_rng(1), 5
    links = torch.from_numpy(rng.integers(num, size=(2, 8)))
    for edge_attr in (torch.randn(8, 2), None):
        data = Data(x=torch.randn(num, 3), edge_index=links, edge_attr=edge_attr)
        found = to_graph_instance(data)
        assert found in graph_space(data) and np.array_equal(found.nodes, data.x)
        assert np.array_equal(found.edge_links.T, links)
        assert found.edges is edge_attr or np.array_equal(found.edges, edge_attr)


def test_types_and_relations():
    """One graph: one-hot kinds, each type's features in columns of its own, links of its rows."""
    data = machines(np.random.default_rng(1))
    nodes, edges, links = to_graph_instance(data)
    job, machine, runs = data["job"].x, data["machine"].x, data["job", "runs_on", "machine"]
    assert nodes[:3].tolist() == [[1, 0, *own, 0] for own in job.tolist()]
    assert nodes[3:].tolist() == [[0, 1, 0, 0, *own] for own in machine.tolist()]
    assert np.array_equal(links[:-4], runs.edge_index.T.numpy() + [0, 3])
    assert np.array_equal(links[-4:], [[3, 4], [4, 5], [5, 6], [6, 3]])
    assert edges[:-4].tolist() == [[1, 0, own] for own in runs.edge_attr.tolist()]
    assert np.array_equal(edges[-4:], [[0, 1, 0]] * 4)
    assert graph_space(data).contains(spaces.GraphInstance(nodes, edges, links))
    # like PyG's own homogeneous graph, up to the order of types and edges
    theirs = data.to_homogeneous(add_node_type=False)
    assert len(nodes) == theirs.num_nodes and len(links) == theirs.num_edges


def test_no_rows():
    """No jobs, no edges, no features, one column, integers."""
    data = machines(np.random.default_rng(1), jobs=0)
    nodes, edges, links = to_graph_instance(data)
    assert nodes.shape == (4, 5) and edges.shape == (4, 3)
    assert links.tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    data["job"].x = torch.zeros(2, 0)
    assert to_graph_instance(data).nodes.shape == (6, 3)
    lonely = HeteroData()
    lonely["a"].x = torch.arange(3)
    assert to_graph_instance(lonely).nodes.tolist() == [[1, 0], [1, 1], [1, 2]]
    assert to_graph_instance(lonely).edges is None and graph_space(lonely).edge_space is None
    alone = to_graph_instance(Data(x=torch.arange(3)))
    assert alone.nodes.shape == (3, 1) and alone.edges is None and alone.edge_links.shape == (0, 2)
    with pytest.raises(ValueError, match="nodes: features `x` are needed"):
        to_graph_instance(Data(edge_index=torch.zeros(2, 0)))


def test_the_example_and_its_bytes():
    """The docstring's environment works, and what it says about bytes is what is logged."""
    lines = [line[4:] for line in pyg.__doc__.splitlines() if line.startswith("    ")]
    edges, bytes_said = torch.randint(100, (2, 400)), 6400
    program = {"gym": gym, "spaces": spaces, "graph_space": graph_space}
    program["to_graph_instance"] = to_graph_instance
    program["make_data"] = lambda: Data(x=torch.rand(100, 8), edge_index=edges)
    exec("\n".join(lines), program)
    env = program["Grid"]()
    storage, _ = stored(env.observation_space, [[env.reset()[0]] for _ in range(3)])
    assert runs.sizes(storage)["charts/obs_bytes_per_step"] == bytes_said
    said = re.sub(r"\s+", " ", pyg.__doc__)
    assert "takes 6,400 bytes per step, of which links are 3,200: 52 MB" in said
    assert round(bytes_said * 64 * 128 / 1e6) == 52 and ppo_graph.Args.num_steps == 128
