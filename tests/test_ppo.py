"""Collection, advantages, updates, worker processes and determinism of ppo_graph.py."""

import multiprocessing as mp
import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import ACTIONS, OBSERVATIONS, RandomEnv, graph_space, small_args, vector

CPU = torch.device("cpu")


class Corridor(gym.Env):
    """Position 0, 1, 2, ... and reward 1 + position; `ends[k]` is (length, truncated) of the k-th episode, and the last
    pair goes on for ever. With `reuse` all observations are one array."""

    observation_space, action_space = vector(1, low=0, high=100), spaces.Discrete(2)

    def __init__(self, ends, reuse=False):
        self.ends, self.episode, self.resets, self.steps = ends, -1, 0, 0
        self.buffer = np.zeros(1, np.float32) if reuse else None

    def observe(self):
        if self.buffer is None:
            return np.array([self.t], np.float32)
        self.buffer[0] = self.t
        return self.buffer

    def reset(self, *, seed=None, options=None):
        self.episode, self.t, self.resets = self.episode + 1, 0, self.resets + 1
        return self.observe(), {}

    def step(self, action):
        assert self.t is not None
        length, truncated = self.ends[min(self.episode, len(self.ends) - 1)]
        self.t, self.steps = self.t + 1, self.steps + 1
        ended = self.t == length
        return self.observe(), 1.0 + self.t, ended and not truncated, ended and truncated, {}


CORRIDORS = [[(3, False), (4, True)], [(2, True), (5, False), (1, True), (1, False), (4, True)], [(100, False)],
             [(6, True), (12, False)]]


def corridor_rollout(num_steps=12, reuse=False, **kwargs):
    """(envs, agent, actor, step, rollout, episodes, args) of one collection in the corridors."""
    args = small_args(num_envs=len(CORRIDORS), num_steps=num_steps, gamma=0.9, gae_lambda=0.8, **kwargs)
    envs = ppo_graph.Envs([lambda ends=ends: Corridor(ends, reuse) for ends in CORRIDORS])
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    actor, episodes = ppo_graph.Actor(agent, envs.leaves, len(CORRIDORS), args, CPU), []
    envs.reset(0)
    rollout = ppo_graph.collect(actor, envs, args, lambda *e: episodes.append(e))
    return envs, agent, actor, envs.last_steps[0], rollout, episodes, args


def reference_advantages(agent, ends, num_steps, gamma, lam):
    """GAE of one corridor in float64, one trajectory at a time: sums of (gamma lambda)^k delta, no recursion."""
    @torch.no_grad()
    def value(position):
        return agent.value({"obs": torch.tensor([[float(position)]])}).double().item()

    advantages, episode, done = [], 0, 0
    while done < num_steps:
        length, truncated = ends[min(episode, len(ends) - 1)]
        num = min(length, num_steps - done)
        terminated = num == length and not truncated
        values = [value(k) for k in range(num)] + [0.0 if terminated else value(num)]
        deltas = [2.0 + k + gamma * values[k + 1] - values[k] for k in range(num)]
        advantages += [sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, num)) for k in range(num)]
        episode, done = episode + 1, done + num
    return advantages


@pytest.mark.parametrize("reuse", [False, True])
def test_advantages_against_reference(reuse):
    """Terminated episodes end with value 0, truncated ones and the rollout's end with V of the last observation, which
    is kept although the environment may write the next one into the same array."""
    _, agent, _, _, rollout, _, args = corridor_rollout(reuse=reuse)
    expected = [reference_advantages(agent, ends, 12, args.gamma, args.gae_lambda) for ends in CORRIDORS]
    torch.testing.assert_close(rollout.advantages.view(12, -1).T.double(), torch.tensor(expected, dtype=torch.double),
                               atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollout.returns, rollout.advantages + rollout.values)


def test_gae_of_random_numbers():
    """The recursion equals the sum over each trajectory, wherever episodes end."""
    rng = np.random.default_rng(0)
    T, N, gamma, lam = 20, 5, 0.97, 0.9
    rewards, values = rng.standard_normal((2, T, N)).astype(np.float32)
    next_value, dones = rng.standard_normal(N).astype(np.float32), rng.random((T, N)) < 0.2
    result = ppo_graph.gae(rewards, values, dones, next_value, gamma, lam)
    for n in range(N):
        following = np.append(values[1:, n], next_value[n]).astype(np.float64) * ~dones[:, n]
        deltas = rewards[:, n] + gamma * following - values[:, n]
        for t in range(T):
            stop = next((k + 1 for k in range(t, T) if dones[k, n]), T)
            expected = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, stop))
            assert result[t, n] == pytest.approx(expected, abs=1e-4)


def test_autoreset_makes_no_transition_of_its_own():
    """The observation after an episode's end is the first of the next; every stored transition was a step."""
    envs, _, actor, step, _, episodes, _ = corridor_rollout()
    positions = actor.storage.gather(np.arange(actor.storage.size))["obs"].view(12, -1).T.tolist()
    assert positions[0] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert positions[1] == [0, 1, 0, 1, 2, 3, 4, 0, 0, 0, 1, 2]
    assert [env.steps for env in envs.envs] == [12] * 4
    assert [env.resets for env in envs.envs] == [4, 5, 1, 2]
    returns = {length: sum(range(2, length + 2)) for length in range(1, 13)}
    assert all(ret == returns[length] and info == {} for _, _, ret, length, info in episodes)
    ends = {0: [(3, 3), (7, 4), (11, 4)], 1: [(2, 2), (7, 5), (8, 1), (9, 1)], 3: [(6, 6)]}  # env: (time, length)
    assert sorted((i, num_steps, length) for num_steps, i, _, length, _ in episodes) == [
        (i, 4 * t, length) for i, row in ends.items() for t, length in row]
    assert step.parts[0][0].ravel().tolist() == [1, 3, 12, 6]


def test_both_ends_at_once_is_a_termination():
    """An episode that is terminated and truncated in the same step is not bootstrapped."""
    class Both(Corridor):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, True, True, {}

    step = (envs := ppo_graph.Envs([lambda: Both([(9, False)])])).reset(0)
    step = envs.step([0])
    assert step.terminated.tolist() == [True] and step.truncated.tolist() == [False] and step.finals == []


CASES = [(kind, "discrete", "flat", {}) for kind in OBSERVATIONS]
CASES += [("mixed", action, "flat", {}) for action in ACTIONS]
CASES += [("vector", action, "flat", {"autoregressive": True}) for action in ("multidiscrete", "mixed")]
CASES += [("vector", "box", "flat", {"state_dependent_std": True}), ("graph_edges", "discrete", "mask", {}),
          ("vector", "multidiscrete", "mask", {"autoregressive": True}), ("graph_edges", "", "nodes", {}),
          ("set", "", "nodes", {}), ("graph", "", "avail_actions", {}), ("graph_edges", "", "pair", {}),
          ("graph_edges", "", "pair", {"autoregressive": True})]


@pytest.mark.parametrize("observation, action, head, flags", CASES,
                         ids=lambda v: v if isinstance(v, str) else "+".join(v))
def test_collection_and_training_agree(observation, action, head, flags, tmp_path, monkeypatch):
    """X2: before the first gradient step of each update the probability ratio is 1, for every observation and head; all
    actions are legal; main runs from environment to evaluation."""
    logged = []
    monkeypatch.setattr(ppo_graph.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    kwargs = {"observation": observation, "action": action, "head": head}
    args = small_args(env_id="Random-v0", env_kwargs=kwargs, run_dir=str(tmp_path), eval_episodes=2, **flags)
    returns = ppo_graph.main(args)
    assert len(logged) == 2
    for scalars in logged:
        assert 0 <= scalars["debug/collection_mismatch"] < 1e-5
        assert all(np.isfinite(value) for name, value in scalars.items() if name != "losses/explained_variance")
    assert logged[0]["losses/approx_kl"] != 0  # something was learned
    assert [row["return"] for row in returns] == [row["length"] for row in returns]  # reward 1: legal actions only


def trained(tmp_path, monkeypatch, **kwargs):
    """The weights after main()."""
    agents = []
    original = ppo_graph.Agent
    monkeypatch.setattr(ppo_graph, "Agent", lambda *args: agents.append(original(*args)) or agents[-1])
    ppo_graph.main(small_args(run_dir=str(tmp_path), **{"env_id": "envs:PoissonGraph-v0"} | kwargs))
    monkeypatch.setattr(ppo_graph, "Agent", original)
    return {name: value.clone() for name, value in agents[-1].state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


MIXED = {"env_id": "Random-v0", "env_kwargs": {"observation": "mixed", "action": "mixed"}}


@pytest.mark.parametrize("kwargs", [{}, MIXED], ids=["graph", "mixed"])
def test_same_seed_same_weights(tmp_path, monkeypatch, kwargs):
    """X3: a seed fixes every bit of the weights, with worker processes or without; another seed gives others."""
    first = trained(tmp_path, monkeypatch, **kwargs)
    torch.rand(3), np.random.rand(3)  # what ran before does not matter
    assert same(first, trained(tmp_path, monkeypatch, **kwargs))
    assert same(first, trained(tmp_path, monkeypatch, num_workers=2, **kwargs))
    assert not same(first, trained(tmp_path, monkeypatch, seed=2, **kwargs))


TRAINING = {"learning_rate": 1e-3, "anneal_lr": False, "gamma": 0.5, "gae_lambda": 0.5, "num_minibatches": 4,
            "update_epochs": 1, "norm_adv": False, "clip_coef": 0.001, "clip_vloss": False, "ent_coef": 0.5,
            "vf_coef": 0.1, "max_grad_norm": 0.01, "target_kl": 1e-12,
            "num_envs": 2, "num_steps": 4, "total_timesteps": 24}


@pytest.mark.parametrize("name", TRAINING)
def test_training_flags_change_the_weights(tmp_path, monkeypatch, name):
    """Every hyperparameter of the algorithm changes what is learned."""
    base = {"clip_coef": 0.05, "learning_rate": 0.02}
    changed = base | {name: TRAINING[name]}
    assert not same(trained(tmp_path, monkeypatch, **base), trained(tmp_path, monkeypatch, **changed))


def steps_of(envs, seed, num_steps):
    """Everything that `num_steps` steps returned, copied."""
    rng, result = np.random.default_rng(seed), []
    step = envs.reset(seed)
    for _ in range(num_steps):
        parts = [np.concatenate(arrays) for arrays in step.parts]
        result.append((parts, step.counts, step.reward, step.terminated, step.truncated, step.finals, step.episodes))
        step = envs.step(list(rng.integers(2, 6, size=len(step.reward))))
    return result


def assert_identical(a, b):
    """Nested tuples, lists and dicts of arrays are equal bit by bit, dtypes included."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert_identical(list(a.items()), list(b.items()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_identical(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("num_workers", [1, 3, 9])
@pytest.mark.parametrize("observation", ["mixed", "vector", "graph_edges"])
def test_workers_equal_one_process(num_workers, observation):
    """G1, S4: observations, rewards, ends, final observations and episodes are the same bits from any workers."""
    makers = [partial(RandomEnv, observation)] * 7
    plain, spread = ppo_graph.Envs(makers), ppo_graph.WorkerEnvs(makers, num_workers)
    try:
        results = [steps_of(envs, 5, 40) for envs in (plain, spread)]
    finally:
        spread.close()
    assert_identical(*results)
    assert any(step[5] for step in results[0]) and len(spread.workers) == min(num_workers, 7)
    assert not any(process.is_alive() for process, _, _ in spread.workers)


class Growing(gym.Env):
    """Step t has 4**t elements, all equal to t."""

    observation_space, action_space = spaces.Sequence(vector(2, low=0, high=9), stack=True), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros((0, 2), np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full((4**self.t, 2), self.t, np.float32), 0.0, False, False, {}


def test_shared_memory_grows():
    """G1, G5: observations that outgrow the shared memory arrive whole, and only their bytes are handed over."""
    envs = ppo_graph.WorkerEnvs([Growing] * 3, 2)
    try:
        envs.reset(0)
        for t in range(1, 9):
            step = envs.step([0] * 3)
            assert step.counts["obs"].tolist() == [4**t] * 3
            assert sum(array.nbytes for array in step.parts[0]) == 3 * 4**t * 8
            assert all((array == t).all() for array in step.parts[0])
    finally:
        envs.close()


class OddError(Exception):
    """Cannot be rebuilt from its message alone, which pickle would try."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class Failing(Corridor):
    """Fails in its third step, in the way `fault` says."""

    def __init__(self, fault):
        super().__init__([(100, False)])
        self.fault = fault

    def step(self, action):
        if self.t == 2 and self.fault == "raise":
            raise KeyError("the bridge is out")
        if self.t == 2 and self.fault == "odd":
            raise OddError(7, "the bridge is out")
        if self.t == 2 and self.fault == "exit":
            os._exit(3)
        return super().step(action)


def run_workers(makers, num_workers=2, num_steps=5, between=lambda envs: None):
    envs = ppo_graph.WorkerEnvs(makers, num_workers)
    try:
        envs.reset(0)
        for _ in range(num_steps):
            envs.step([0] * len(makers))
            between(envs)
    finally:
        envs.close()
        for process, _, _ in envs.workers:
            if process.is_alive():
                process.kill()


@pytest.mark.parametrize("fault", ["raise", "odd"])
def test_worker_error_has_its_traceback(fault):
    """S4: an exception in a worker, whatever its type, is raised here and shows the line that raised it."""
    makers = [partial(Corridor, [(9, False)]), partial(Failing, fault)]
    with pytest.raises(RuntimeError, match="env.* 1") as error:
        run_workers(makers)
    assert "the bridge is out" in str(error.value) and "in step" in str(error.value)


def test_error_while_a_worker_starts():
    """S4: an environment that cannot be made in a worker is reported with its traceback, too."""
    here = os.getpid()

    def make():
        if os.getpid() != here:
            raise OSError("no licence left")
        return Corridor([(9, False)])

    with pytest.raises(RuntimeError, match="no licence left"):
        run_workers([make] * 2)


@pytest.mark.skipif("fork" not in mp.get_all_start_methods(), reason="needs fork")
def test_worker_that_dies():
    """S4: a worker that vanishes in a step, or between two, is a RuntimeError that names its environments."""
    with pytest.raises(RuntimeError, match=r"envs 1 to 1.*exit code 3"):
        run_workers([partial(Corridor, [(9, False)]), partial(Failing, "exit")])

    def kill(envs):
        os.kill(envs.workers[1][0].pid, signal.SIGKILL)
        envs.workers[1][0].join()

    with pytest.raises(RuntimeError, match=r"envs 1 to 1.*exit code -9"):
        run_workers([partial(Corridor, [(9, False)])] * 2, between=kill)


def test_seeds_of_environments():
    """X3: environment i is seeded with seed + i, wherever it runs."""
    class Seeded(Corridor):
        def reset(self, *, seed=None, options=None):
            super().reset()
            return np.array([0 if seed is None else seed], np.float32), {}

    for envs in (ppo_graph.Envs([partial(Seeded, [(9, False)])] * 5),
                 ppo_graph.WorkerEnvs([partial(Seeded, [(9, False)])] * 5, 2)):
        assert np.concatenate(envs.reset(30).parts[0]).ravel().tolist() == [30, 31, 32, 33, 34]
        envs.close()


class InfoMask(gym.Env):
    """The mask is in info; only the allowed actions earn 1."""

    observation_space, action_space = vector(1), spaces.MultiDiscrete([3, 2])

    def mask(self):
        allowed = self.np_random.integers(3), self.np_random.integers(2)
        self.allowed = allowed
        return {"action_mask": (np.eye(3, dtype=np.int8)[allowed[0]], np.eye(2, dtype=np.int8)[allowed[1]])}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), self.mask()

    def step(self, action):
        reward = float(tuple(action) == self.allowed)
        return np.zeros(1, np.float32), reward, False, bool(self.np_random.random() < 0.2), self.mask()


gym.register("InfoMask-v0", entry_point=InfoMask)


def test_mask_in_info(tmp_path):
    """P5: a mask in info["action_mask"], one array per part, is obeyed in every step of every episode."""
    rows = ppo_graph.main(small_args(env_id="InfoMask-v0", run_dir=str(tmp_path), eval_episodes=5))
    assert all(row["return"] == row["length"] for row in rows)


def test_mask_in_info_beside_parts_without_one():
    """P5: a mask in info covers the Discrete parts of a Tuple; Box and MultiBinary parts have no entries in it."""
    class Mixed(InfoMask):
        action_space = spaces.Tuple((spaces.Discrete(3), vector(2), spaces.MultiBinary(2), spaces.Discrete(2)))

        def step(self, action):
            assert (action[0], action[3]) == self.allowed
            return super().step(self.allowed)

    envs = ppo_graph.Envs([lambda: ppo_graph.InfoActionMask(Mixed())] * 2)
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, small_args(num_envs=2))
    actor = ppo_graph.Actor(agent, envs.leaves, 2, small_args(), CPU)
    envs.reset(0)
    ppo_graph.collect(actor, envs, small_args(num_envs=2), lambda *episode: None)
    assert actor.storage.gather(np.arange(16))["action_mask"].shape == (16, 5)


def test_minibatches_cover_the_rollout(monkeypatch):
    """Each epoch sees every step once."""
    envs, agent, actor, _, rollout, _, args = corridor_rollout(num_minibatches=5)
    seen = []
    original = actor.storage.gather
    monkeypatch.setattr(actor.storage, "gather", lambda idx: seen.append(idx) or original(idx))
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    ppo_graph.update(agent, optimizer, actor, rollout, np.random.default_rng(0), args)
    assert len(seen) == 5 * args.update_epochs
    for epoch in range(args.update_epochs):
        assert sorted(np.concatenate(seen[5 * epoch:5 * epoch + 5])) == list(range(48))


def test_loss_against_the_formulas():
    """The clipped objective, the clipped value loss, KL and clip fraction, from the formulas written out per sample."""
    torch.manual_seed(3)
    envs, agent, actor, _, rollout, _, args = corridor_rollout()
    idx, storage = np.arange(20), actor.storage
    batch = rollout.select(torch.arange(20))
    batch = batch._replace(log_probs=batch.log_probs + 0.5 * torch.randn(20), values=batch.values + torch.randn(20))
    loss, logs = ppo_graph.ppo_loss(agent, (storage.gather(idx),), batch, args)
    with torch.no_grad():
        _, log_prob, entropy, value = agent(storage.gather(idx), batch.actions)
    advantages = batch.advantages.numpy().astype(np.float64)
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    policy = critic = kl = clips = 0.0
    for a, new, old, v, v_old, ret in zip(advantages, log_prob.tolist(), batch.log_probs.tolist(), value.tolist(),
                                          batch.values.tolist(), batch.returns.tolist()):
        ratio = np.exp(new - old)
        policy -= min(ratio * a, np.clip(ratio, 0.8, 1.2) * a) / 20
        critic += 0.5 * max((v - ret) ** 2, (v_old + np.clip(v - v_old, -0.2, 0.2) - ret) ** 2) / 20
        kl += (ratio - 1 - (new - old)) / 20
        clips += (abs(ratio - 1) > 0.2) / 20
    assert logs["losses/policy_loss"].item() == pytest.approx(policy, abs=1e-5)
    assert logs["losses/value_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert logs["losses/approx_kl"].item() == pytest.approx(kl, abs=1e-5)
    assert logs["losses/clipfrac"].item() == pytest.approx(clips, abs=1e-6) and clips > 0
    assert loss.item() == pytest.approx(policy - 0.01 * entropy.mean().item() + 0.5 * critic, rel=1e-4)


def test_truncated_graphs_bootstrap_from_the_final_observation():
    """G7: values of final observations of all sizes, zero nodes included, are those of the observations one by one."""
    args = small_args(num_envs=4)
    envs = ppo_graph.Envs([partial(RandomEnv, "graph_edges")] * 4)
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    step, finals = envs.reset(1), []
    for _ in range(100):
        step = envs.step([2] * 4)
        finals += [arrays for _, arrays in step.finals]
    sizes = [len(arrays[0]) for arrays in finals]
    assert len(finals) > 5 and 0 in sizes and max(sizes) > 20
    storage = ppo_graph.Storage(envs.leaves, CPU)
    storage.append(*ppo_graph.collate(envs.leaves, finals))
    together = agent.value(storage.latest())
    for value, arrays in zip(together, finals):
        one = ppo_graph.Storage(envs.leaves, CPU)
        one.append(*ppo_graph.collate(envs.leaves, [arrays]))
        torch.testing.assert_close(agent.value(one.latest())[0], value, atol=1e-5, rtol=1e-5)


def test_nothing_is_padded_between_processes():
    """G1: what workers hand over is exactly the valid bytes."""
    envs = ppo_graph.WorkerEnvs([partial(RandomEnv, "graph_edges")] * 6, 2)
    step = envs.reset(3)
    handed_over = sum(array.nbytes for arrays in step.parts for array in arrays)
    envs.close()
    space, valid = graph_space(vector(2)), 0
    for i in range(6):
        graph, _ = RandomEnv("graph_edges").reset(seed=3 + i)
        num_edges = 0 if graph.edges is None else len(graph.edges)
        valid += graph.nodes.nbytes + num_edges * (16 + 4 * space.edge_space.shape[0])
    assert handed_over == valid


def run_path(folder):
    """The only run in a run_dir."""
    (path,) = Path(folder).iterdir()
    return path


def test_run_dir_is_used():
    """Logs go to --run-dir and nowhere else."""
    with tempfile.TemporaryDirectory() as folder:
        here = set(os.listdir())
        ppo_graph.main(small_args(env_id="envs:BestOfSet-v0", run_dir=folder))
        assert run_path(folder).name.startswith("BestOfSet-v0__") and set(os.listdir()) == here
