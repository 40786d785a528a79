"""Vector environments that hand over flat rows are N single ones with the same seeds."""

from functools import partial

import numpy as np
import pytest
from helpers import run

from cleanrl_graph import ppo_graph
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.command import args_of
from cleanrl_graph.services.vector import VectorEnvs, make

CASES = [
    ("VertexCover-v0", {}),
    ("VertexCover-v0", {"nodes": [5]}),
    ("VertexCover-v0", {"nodes": [6, 30]}),
    ("VertexCover-v0", {"nodes": [20], "instance": 3}),
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
        assert own["eval"] == info["eval"]


@pytest.mark.parametrize("env_id, kwargs", CASES)
def test_the_steps_are_those_of_single_environments(env_id, kwargs):
    single, several = both(env_id, kwargs, 7)
    rng = np.random.default_rng(3)
    num_episodes = 0
    right, found = single.reset(5), several.reset(5)
    assert_same(found, right)
    for _ in range(150):
        actions = allowed(right, single.leaves, rng)
        right, found = single.step(actions), several.step(actions)
        assert_same(found, right)
        num_episodes += len(right.infos)
    assert num_episodes > 7


@pytest.mark.parametrize("env_id", ["VertexCover-v0"])
def test_losses_are_those_of_single_environments(env_id, tmp_path):
    flags = dict(env_id=f"cleanrl_graph.envs:{env_id}", num_envs=5, num_steps=12)
    flags["total_timesteps"] = 120
    single = run(tmp_path / "single", **flags).scalars
    several = run(tmp_path / "vector", vectorization_mode="vector_entry_point", **flags).scalars
    assert "charts/eval/cost" in single and len(single["losses/value_loss"]) == 2
    for name, values in single.items():
        if name != "charts/SPS":
            assert several[name] == values


def test_a_wrong_action_names_the_environment():
    _, several = both("VertexCover-v0", {"nodes": [5]}, 3)
    several.reset(1)
    with pytest.raises(UsageError, match="Env 1: node 9"):
        several.env.env.edges[:, 1] = 0
        several.step([0, 9, 0])
