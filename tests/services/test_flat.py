"""Vector environments that hand over flat rows are N single ones with the same seeds."""

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from helpers import small_args, vector

from cleanrl_graph import ppo_graph
from cleanrl_graph.envs.flat import FlatBatch
from cleanrl_graph.envs.toy import LinkGraph
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.command import args_of
from cleanrl_graph.services.vector import VectorEnvs, make

CASES = [
    ("VertexCover-v0", {}),
    ("VertexCover-v0", {"nodes": [5]}),
    ("VertexCover-v0", {"nodes": [6, 30]}),
    ("VertexCover-v0", {"nodes": [20], "instance": 3}),
    ("PoissonGraph-v0", {}),
    ("PoissonGraph-v0", {"episode_length": 5, "hops": 2, "edges_per_node": 2}),
]


def both(env_id, kwargs, num_envs):
    """(N single environments, the vector environment) as Envs."""
    flags = dict(env_id=f"envs:{env_id}", env_kwargs=kwargs, num_envs=num_envs)
    flags["vectorization_mode"] = "vector_entry_point"
    args = args_of(ppo_graph, **flags)
    single = args_of(ppo_graph, **flags | {"env_id": f"cleanrl_graph.envs:{env_id}"})
    makers = [partial(ppo_graph.make_env, single, i) for i in range(num_envs)]
    return ppo_graph.Envs(makers), VectorEnvs(ppo_graph, make(args), args)


def allowed(step, leaves, rng):
    """A node of each graph whose mask is 1."""
    k = [leaf.path for leaf in leaves].index("action_mask")
    masks = np.split(step.obs.values[k], step.obs.counts["action_mask"].cumsum()[:-1])
    return [rng.choice(np.flatnonzero(mask)) for mask in masks]


def assert_same(found, right):
    for group, num in right.obs.counts.items():
        assert np.array_equal(found.obs.counts[group], num)
    for own, values in zip(found.obs.values, right.obs.values, strict=True):
        assert own.dtype == values.dtype and np.array_equal(own, values)
    for name in ("reward", "terminated", "truncated"):
        assert np.array_equal(getattr(found, name), getattr(right, name))
    assert [i for i, _ in found.infos] == [i for i, _ in right.infos]
    for (_, own), (_, info) in zip(found.infos, right.infos):
        assert own["episode"]["l"] == info["episode"]["l"]
        assert own["episode"]["r"] == pytest.approx(info["episode"]["r"], abs=1e-12)
        assert own.get("eval") == info.get("eval")


@pytest.mark.parametrize("env_id, kwargs", CASES)
def test_the_steps_are_those_of_single_environments(env_id, kwargs):
    single, several = both(env_id, kwargs, 7)
    rng = np.random.default_rng(3)
    num_episodes = 0
    right, found = single.reset(5), several.reset(5)
    assert_same(found, right)
    for _ in range(300):
        actions = allowed(right, single.leaves, rng)
        right, found = single.step(actions), several.step(actions)
        assert_same(found, right)
        num_episodes += len(right.infos)
    assert num_episodes > 7


def test_a_wrong_action_names_the_environment():
    _, several = both("VertexCover-v0", {"nodes": [5]}, 3)
    several.reset(1)
    with pytest.raises(UsageError, match="Env 1: node 9"):
        several.env.env.edges[:, 1] = 0
        several.step([0, 9, 0])


def graphs(num_nodes=(2, 0, 3), num_edges=(1, 0, 2)):
    """A FlatBatch of three graphs."""
    nodes = np.arange(5, dtype=np.float32)[:, None]
    links = np.array([[0, 1], [2, 0], [1, 1]], np.int32)
    rows = spaces.GraphInstance(nodes, None, links)
    return FlatBatch(rows, np.array(num_nodes), np.array(num_edges))


def test_a_flat_batch_is_a_sequence_of_observations():
    first, second, last = graphs()
    assert first.nodes.tolist() == [[0], [1]] and first.edge_links.tolist() == [[0, 1]]
    assert len(second.nodes) == len(second.edge_links) == 0 and second.edges is None
    assert last.nodes.tolist() == [[2], [3], [4]] and last.edge_links.tolist() == [[2, 0], [1, 1]]
    assert graphs()[-1].nodes.tolist() == last.nodes.tolist()
    rows = {"a": np.arange(4), "b": (np.arange(8).reshape(4, 2),)}
    one = FlatBatch(rows, np.array([3, 1]))[1]
    assert one["a"].tolist() == [3] and one["b"][0].tolist() == [[6, 7]]


class Fixed(VectorEnv):
    """Three graphs that are truncated at the second step, or what is wrong with them."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Dict({"graph": LinkGraph(vector(1, high=9), None)})
    single_action_space = spaces.Discrete(3)

    def __init__(self, num_envs, **wrong):
        self.num_envs = num_envs
        self.batch = graphs(**wrong)

    def reset(self, seed=None, options=None):
        return {"graph": self.batch}, {}

    def step(self, actions):
        ends = np.array([False, False, True])
        return {"graph": self.batch}, np.zeros(3), np.zeros(3, bool), ends, {}


def test_the_last_observation_of_a_flat_batch_is_read():
    envs = VectorEnvs(ppo_graph, Fixed(3), small_args())
    obs = envs.reset(1).obs
    obs.values[0][:] = 7  # a copy
    assert envs.env.env.batch.rows.nodes[0] == 0
    [final] = envs.step([0, 0, 0]).finals
    assert final.values[0].tolist() == [[2], [3], [4]] and final.counts["graph.edge_links"] == [2]


@pytest.mark.parametrize(
    "wrong, problem",
    [
        ({"num_nodes": (2, 1, 1)}, r"leaf 'graph.nodes', .* shape \(5, 1\) where .* \(4, 1\)"),
        ({"num_nodes": (6, -4, 3)}, "counts of rows"),
        ({"num_edges": (0, 1, 2)}, r"env 1, leaf 'graph.edge_links', .* a graph with 0 nodes"),
    ],
)
def test_wrong_rows_are_a_sentence(wrong, problem):
    envs = VectorEnvs(ppo_graph, Fixed(3, **wrong), small_args())
    with pytest.raises(UsageError, match=problem):
        envs.reset(1)
