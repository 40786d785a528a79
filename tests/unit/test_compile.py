"""ppo_graph_compile.py, whose batches are filled up to few sizes, logs and learns what ppo_graph.py
does, with and without the compiler, which makes one graph for all sizes."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, SmallEnv, UsageErrors, logged, mismatch, run, vector, weights
from processes import folder_of, train, train_ranks

from cleanrl_graph import ppo_graph
from cleanrl_graph import ppo_graph_compile as script

NONE = {"compile_mode": "none"}


def task(env_id="Random-v0", env_kwargs=None, **flags):
    return dict(env_id=env_id, env_kwargs=env_kwargs or {}) | flags


TASKS = {  # of every kind of head, with leaves that are empty now and then
    "vector": task("CartPole-v1", clip_coef=0.01, learning_rate=1e-2),
    "nodes": task(env_kwargs={"observation": "graph", "head": "nodes"}, norm_obs=True),
    "pair": task("envs:PairNodes-v0", autoregressive=True, gnn="gatv2"),
    "mixed": task(env_kwargs={"observation": "mixed", "action": "mixed"}, norm_obs=True),
    "context": task("envs:PoissonGraph-v0", gnn_layers=1, graph_context=True),
    "job_shop": task("envs:JobShop-v0", {"jobs": [2, 4], "machines": 3}, num_minibatches=5),
    # spare rows that act have spare entries of the mask for each spare option
    "masked": task("MaskedPairs-v0", num_steps=10, total_timesteps=60),
}


# ---- Buckets ----
def test_bucket():
    """8 sizes per octave, never less than what came in, and spare rows are at most 1/8 of a batch
    with 7 rows or more."""
    sizes = [script.bucket(num) for num in range(5000)]
    assert sizes[:20] == [*range(17), 18, 18, 20]
    assert all(num <= size < num * 1.125 for num, size in enumerate(sizes) if num)
    storage = script.BucketStorage(script.leaves_of(OBSERVATIONS["graph"]), torch.device("cpu"))
    spare = np.array([storage.num_spare("obs.nodes", num) for num in range(5000)])
    assert spare[:7].tolist() == [2, 1, 1, 1, 1, 1, 1]
    assert (spare[7:] >= 1).all() and (spare / (np.arange(5000) + spare))[7:].max() == 1 / 8


# ---- The same results ----
def greedy(monkeypatch):
    """The most probable actions, so that other random numbers make the same rollouts."""
    for kind in (ppo_graph.Categorical, script.Categorical):
        monkeypatch.setattr(kind, "sample", lambda self, _: self.mode)
    for kind in (ppo_graph.Gaussian, script.Gaussian):
        monkeypatch.setattr(kind, "sample", lambda self, _: self.mode)


def assert_same_run(one, two):
    """Two runs logged the same and have the same weights, within float32."""
    for tag, values in one.scalars.items():
        if tag not in ("charts/SPS", "charts/compilations"):
            assert [at for at, _ in values] == [at for at, _ in two.scalars[tag]], tag
            assert logged(two, tag) == pytest.approx(logged(one, tag), abs=2e-4, rel=1e-3), tag
    own, others = weights(one.folder), weights(two.folder)
    assert list(own) == list(others)
    torch.testing.assert_close(own, others, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TASKS)
def test_run_as_ppo_graph(name, tmp_path, monkeypatch):
    """Without the compiler a run logs what ppo_graph.py logs and ends with its weights."""
    if name != "vector":  # where nothing is filled up the random numbers are the same
        greedy(monkeypatch)
    one = run(tmp_path / "one", save_model=True, **TASKS[name])
    two = run(tmp_path / "two", script, save_model=True, **NONE | TASKS[name])
    assert_same_run(one, two)
    assert mismatch(two) < 1e-5 and len(set(logged(two, "charts/compilations"))) == 1
    assert logged(two, "charts/spare_rows")[-1] < 0.15


class Masked(SmallEnv):
    """Each of up to 40 robots chooses one of up to 30 tasks by a mask of all pairs, which allows
    one: that with its number, modulo the number of tasks."""

    observation_space = spaces.Dict(
        robots=spaces.Sequence(vector(2), stack=True),
        tasks=spaces.Sequence(vector(3), stack=True),
        action_mask=spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
    )
    action_space = spaces.Dict(robots=spaces.Sequence(spaces.Dict(tasks=spaces.Discrete(30))))
    sizes = ((4, 4), (40, 30), (0, 1), (1, 2), (17, 3))
    length, terminates = len(sizes), True

    def observe(self):
        num, self.options = self.sizes[self.t % self.length]
        mask = np.eye(self.options, dtype=np.int8)[np.arange(num) % self.options]
        robots, tasks = np.ones((num, 2), np.float32), np.ones((self.options, 3), np.float32)
        return {"robots": robots, "tasks": tasks, "action_mask": mask.ravel()}

    def reward(self, action):
        chosen = [robot["tasks"] for robot in action["robots"]]
        assert chosen == [k % self.options for k in range(len(chosen))]
        return 1.0


gym.register("MaskedPairs-v0", entry_point=Masked)


# ---- Compiled ----
def traced(monkeypatch):
    """torch.compile makes its graphs of forward and backward, which run uncompiled."""
    compile, backend = torch.compile, "aot_eager_decomp_partition"
    other = lambda function, mode, **how: compile(function, backend=backend, **how)
    monkeypatch.setattr(torch, "compile", other)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """An empty folder for what the compiler makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        torch._dynamo.reset()
        yield


def num_compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_compiled(result, num_before):
    """Policy step and loss were compiled once each, and collection and training agree."""
    assert set(logged(result, "charts/compilations")) == {num_before + 2}
    assert mismatch(result) < 1e-5


@pytest.mark.slow
def test_compiled(tmp_path, cache):
    """The compiler of the CPU changes nothing, random numbers and names of weights included."""
    flags = TASKS["nodes"] | dict(save_model=True, gnn_layers=1, norm_obs=False)
    before = num_compilations()
    one = run(tmp_path / "one", script, **NONE | flags)
    two = run(tmp_path / "two", script, **flags | {"compile_mode": "auto"})
    assert_same_run(one, two)
    assert_compiled(two, before)
    assert not [name for name in weights(two.folder) if "_orig_mod" in name]


@pytest.mark.slow
def test_one_graph_for_all_sizes(tmp_path, monkeypatch):
    """Policy step and loss are traced without a break, once for all sizes."""
    traced(monkeypatch)
    greedy(monkeypatch)
    flags = TASKS["mixed"] | dict(save_model=True, gnn_layers=1, autoregressive=True)
    before = num_compilations()
    one = run(tmp_path / "one", **flags)
    two = run(tmp_path / "two", script, **flags | {"compile_mode": "auto"})
    assert_same_run(one, two)
    assert_compiled(two, before)


@pytest.mark.slow
def test_no_silent_fallback(tmp_path, monkeypatch):
    """What cannot be compiled ends the run with a sentence."""
    head = script.ActionHead.forward
    breaks = lambda *args: print() or head(*args)
    monkeypatch.setattr(script.ActionHead, "forward", breaks)
    sentence = "(?s)print.*--compile-mode default: this cannot be compiled; --comp"
    with pytest.raises(UsageErrors, match=sentence):
        run(tmp_path, script, env_id="CartPole-v1", compile_mode="default")


@pytest.mark.parametrize(
    "env_id, mode, sentence",
    [
        ("envs:Assign-v0", "default", "cannot be compiled; --compile-mode none runs it"),
        ("CartPole-v1", "reduce-overhead", "--compile-mode reduce-overhead .* on the CPU"),
    ],
)
def test_what_is_refused(env_id, mode, sentence, tmp_path):
    """Before anything is compiled: pairs of a pointer per row, a mode of another device."""
    with pytest.raises(UsageErrors, match=sentence):
        run(tmp_path, script, env_id=env_id, compile_mode=mode)


# ---- On CUDA ----
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["vector", "nodes", "mixed"])
def test_captured(name, tmp_path, monkeypatch, cache):
    """Policy step and loss are CUDA graphs, one per size; a run logs what it logs without."""
    from torch._inductor.cudagraph_trees import get_container

    greedy(monkeypatch)
    flags = dict(save_model=True, cuda=True, num_steps=16, total_timesteps=192) | TASKS[name]
    before = num_compilations()
    one = run(tmp_path / "one", script, **NONE | flags)
    two = run(tmp_path / "two", script, **flags | {"compile_mode": "auto"})
    num_graphs = get_container(0).tree_manager.new_graph_id().id
    assert num_graphs >= 3 and torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert set(logged(two, "charts/compilations")) == {before + 2} and mismatch(two) < 1e-4
    for tag in ("losses/value_loss", "losses/entropy", "charts/episodic_return"):
        assert logged(two, tag) == pytest.approx(logged(one, tag), abs=1e-2, rel=1e-2), tag
    torch.testing.assert_close(weights(two.folder), weights(one.folder), atol=5e-3, rtol=5e-3)


@pytest.mark.slow
def test_ranks(tmp_path, monkeypatch):
    """Each rank compiles for itself; two ranks x 3 environments learn as one with all 6."""
    traced(monkeypatch)
    greedy(monkeypatch)
    flags = task(env_kwargs={"observation": "set"}, compile_mode="auto", total_timesteps=96)
    flags |= dict(num_steps=16, num_minibatches=1, update_epochs=1, norm_adv=False)
    one = weights(train(tmp_path / "1", "ppo_graph_compile", num_envs=6, **flags))
    assert train_ranks(tmp_path / "2", "ppo_graph_compile", num_envs=3, **flags) == [0, 0]
    two = weights(folder_of(tmp_path / "2"))
    torch.testing.assert_close(two, one, atol=1e-6, rtol=1e-6)
