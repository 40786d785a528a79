"""A VectorEnv trains as single environments do, whatever it does at an episode's end."""

import contextlib
import csv
import importlib
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import RandomEnv, run, small_args, train_events, vector, weights
from processes import train_ranks

import cleanrl_graph.envs  # noqa: F401
from cleanrl_graph import load_policy, ppo_graph, services
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.checkpoint import checkpoints_in
from cleanrl_graph.services.vector import InfoMask, VectorEnvs

NAMES = "graph graph_aux graph_compile framestack lstm_sparse gtrxl".split()
MODES = list(AutoresetMode)


class Walk(gym.Env):
    """Episodes of 1 to 6 steps that terminate or are truncated, whatever the actions are. A graph
    makes the observation ragged."""

    def __init__(self, ragged=False):
        parts = {"position": vector(3), "task": spaces.Discrete(4)}
        if ragged:
            parts["graph"] = spaces.Graph(vector(2), None)
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Discrete(2)

    def observe(self):
        rng = self.np_random
        obs = {"position": rng.uniform(-1, 1, 3).astype(np.float32), "task": rng.integers(4)}
        if "graph" in self.observation_space.keys():
            nodes = rng.uniform(-1, 1, (rng.integers(1, 5), 2)).astype(np.float32)
            links = rng.integers(len(nodes), size=(rng.integers(4), 2))
            obs["graph"] = spaces.GraphInstance(nodes, None, links)
        return obs

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.np_random.integers(1, 7)
        return self.observe(), {}

    def step(self, action):
        self.left -= 1
        ends = self.left == 0
        is_cut = bool(self.np_random.integers(2))
        reward = float(self.np_random.normal())
        info = {}
        if ends:
            info = {"group": "cut" if is_cut else "ended", "eval": {"cost": abs(reward)}}
            info |= {"metrics": {"last": reward}, "is_success": not is_cut}
        return self.observe(), reward, ends and not is_cut, ends and is_cut, info


gym.register("VectorWalk-v0", Walk)


def make(num_envs, mode="NextStep", ragged=False, copy=True):
    """A VectorEnv of walks."""
    makers = [partial(Walk, ragged)] * num_envs
    return SyncVectorEnv(makers, copy=copy, autoreset_mode=AutoresetMode(mode))


def script_of(name):
    return importlib.import_module(f"cleanrl_graph.ppo_{name}")


def trained(path, name, mode=None, ragged=True, **flags):
    """The scalars of a run with single environments, or with a VectorEnv of that mode."""
    flags = dict(env_kwargs={"ragged": ragged}, env_id="VectorWalk-v0", anneal_lr=False) | flags
    if mode:
        flags["env_id"] = f"{__name__}:make"
        flags["env_kwargs"] = {"ragged": ragged, "mode": mode.value}
        flags["vectorization_mode"] = "vector_entry_point"
    done = run(path, script_of(name), norm_obs=True, **flags)
    return {k: v for k, v in done.scalars.items() if k != "charts/SPS"}


@pytest.mark.parametrize("name, ragged", [("graph", False), *((name, True) for name in NAMES)])
def test_losses_are_those_of_single_environments(name, ragged, tmp_path):
    single = trained(tmp_path / "single", name, ragged=ragged)
    assert single["losses/value_loss"]
    assert {"charts/last/cut", "charts/eval/cost", "charts/is_success"} <= single.keys()
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        assert trained(tmp_path / mode.value, name, mode, ragged) == single


def rows_of(envs, num_steps):
    """Per environment what it returned for each step that is one: observation, reward, ends."""
    step = envs.reset(7)
    N = len(step.reward)
    found = [[] for _ in range(N)]
    lengths = []
    for _ in range(num_steps):
        is_step = np.broadcast_to(step.is_step, N)
        before = step
        step = envs.step([0] * N)
        assert step.terminated[~is_step].all()  # so that a memory begins anew
        ends = iter(step.finals)
        for i in range(N):
            last = [x.tolist() for x in next(ends).values] if step.truncated[i] else None
            if is_step[i]:
                num = {k: v[: i + 1] for k, v in before.obs.counts.items()}
                own = []
                for leaf, values in zip(envs.leaves, before.obs.values):
                    end = num[leaf.group].sum()
                    own.append(values[end - num[leaf.group][-1] : end].tolist())
                outcome = step.reward[i].item(), bool(step.terminated[i]), bool(step.truncated[i])
                found[i].append((own, *outcome, last))
        lengths += [(i, info["episode"]["l"]) for i, info in step.infos]
    envs.close()
    return found, [[int(n) for k, n in lengths if k == i] for i in range(N)]


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_steps_are_those_of_single_environments(mode, copy):
    args = small_args(env_id="VectorWalk-v0", env_kwargs={"ragged": True})
    makers = [partial(ppo_graph.make_env, args, i) for i in range(3)]
    expected, expected_lengths = rows_of(ppo_graph.Envs(makers), 60)
    env = make(3, mode.value, ragged=True, copy=copy)
    found, lengths = rows_of(VectorEnvs(ppo_graph, env, args), 60)
    for own, own_lengths, right, right_lengths in zip(found, lengths, expected, expected_lengths):
        assert 30 < len(own) <= 60 and own == right[: len(own)]
        assert own_lengths == right_lengths[: len(own_lengths)] and own_lengths
        if mode is not AutoresetMode.NEXT_STEP:
            assert len(own) == 60


def by_hand(steps, values, last, gamma, lam):
    """Advantages and V of the steps that are some, in float64, environment by environment.
    steps[t + 1] is what the actions at steps[t] led to; `last` is what next_values returned."""
    T, N = len(values), len(values[0])
    cuts = [(t, i) for t in range(T) for i in range(N) if steps[t + 1].truncated[i]]
    final = dict(zip(cuts, last[N:]))
    pairs = []
    for i in range(N):
        advantage = 0.0
        after = last[i]
        for t in reversed(range(T)):
            if not np.broadcast_to(steps[t].is_step, N)[i]:
                advantage = after = None  # must not be read
                continue
            step = steps[t + 1]
            reward = float(step.reward[i])
            if step.terminated[i]:
                advantage = reward - values[t][i]
            elif step.truncated[i]:
                advantage = reward + gamma * final[t, i] - values[t][i]
            else:
                delta = reward + gamma * after - values[t][i]
                advantage = delta + gamma * lam * advantage
            after = values[t][i]
            pairs.append((advantage, values[t][i]))
    return np.array(pairs).T


@pytest.mark.parametrize("name", NAMES)
def test_next_step_has_no_fake_rows(name, tmp_path, monkeypatch):
    script = script_of(name)
    steps, values, lasts, counts = [], [], [], []

    class Noted(script.Memory):
        def act(self, step, greedy=False):
            steps.append(step)
            result = super().act(step, greedy)
            values.append(result[2].double().tolist())
            return result

        def next_values(self, step):
            steps.append(step)
            lasts.append(super().next_values(step).double().tolist())
            return result_of(lasts)

        def rollout(self):
            obs = super().rollout()
            counts.append(len(obs["position"].values))
            return obs

    def result_of(kept):
        return script.torch.tensor(kept[-1], dtype=script.torch.float32)

    monkeypatch.setattr(script, "Memory", Noted)
    flags = dict(num_minibatches=1, update_epochs=1, clip_vloss=False, num_steps=16)
    scalars = trained(tmp_path, name, AutoresetMode.NEXT_STEP, total_timesteps=48, **flags)
    advantages, V = by_hand(steps, values, lasts[0], 0.99, 0.95)
    assert 24 < len(V) < 45 and counts == [len(V)]
    [(_, loss)] = scalars["losses/value_loss"]
    assert loss == pytest.approx(0.5 * np.mean(advantages**2), rel=1e-4)
    [(_, explained)] = scalars["losses/explained_variance"]
    right = 1 - np.var(advantages) / np.var(advantages + V)
    assert explained == pytest.approx(right, rel=1e-3, abs=1e-4)
    [(_, mismatch)] = scalars["debug/collection_mismatch"]
    assert mismatch < 1e-5


class Wrong(SyncVectorEnv):
    """Walks that return what is not declared."""

    def __init__(self, num_envs, what):
        super().__init__([Walk] * num_envs)
        self.what = what
        if what == "mode":
            self.metadata = {}

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs, info | ({"action_mask": np.ones((3, 5))} if self.what == "mask" else {})

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        if self.what == "shape":
            obs["position"] = obs["position"][:, :2]
        if self.what == "nan":
            obs["position"][1, 0] = np.nan
        if self.what == "dtype":
            obs["task"] = obs["task"] + 0.5
        if self.what == "reward":
            reward[2] = np.inf
        if self.what == "late mask":
            rest[-1]["action_mask"] = np.ones((3, 2))
        return obs, reward, *rest


def no_vector(num_envs):
    return Walk()


WRONG = {
    "shape": r"the VectorEnv, leaf 'position', step 1: .* shape \(3, 2\) where .* \(3, 3\)",
    "nan": "env 1, leaf 'position', step 1: value nan",
    "dtype": "leaf 'task', step 1: dtype float64",
    "mask": r"the VectorEnv, step 0, reset: .* \(3, 5\), not \(3, 2\)",
    "late mask": "step 1: info has an action_mask, the first reset had none",
    "reward": "env 2, step 1: reward is inf",
    "mode": r"metadata\['autoreset_mode'\] is None",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_declared_is_a_sentence(what, tmp_path):
    flags = dict(env_id=f"{__name__}:Wrong", env_kwargs={"what": what})
    with pytest.raises(UsageError, match=WRONG[what]):
        run(tmp_path, vectorization_mode="vector_entry_point", **flags)


@pytest.mark.parametrize(
    "name, flags, problem",
    [
        ("graph", dict(env_id=f"{__name__}:no_vector"), "makes Walk, not a gymnasium.vector"),
        ("graph", dict(env_id="VectorWalk-v0"), "vector entry point"),
        ("graph", dict(num_steps=2, num_minibatches=4), "as few as 3 steps"),
        ("graph", dict(eval_suite="all"), "--eval-suite needs single environments"),
        ("graph_async", {}, "ppo_graph_async.py steps single environments"),
        ("graph_agents", {}, "in ppo_graph_agents.py each agent has a reward"),
    ],
)
def test_what_cannot_be_is_a_sentence(name, flags, problem, tmp_path):
    flags = {"env_id": f"{__name__}:make", "vectorization_mode": "vector_entry_point"} | flags
    with pytest.raises(UsageError, match=problem), contextlib.chdir(tmp_path):
        run(tmp_path, script_of(name), **flags)


def test_an_id_with_a_vector_entry_point_is_evaluated_by_single_environments(tmp_path):
    flags = dict(env_id="CartPole-v1", vectorization_mode="vector_entry_point", eval_episodes=2)
    assert len(run(tmp_path, **flags).rows) >= 2


def test_cart_poles_without_velocities_are_those_with_them():
    kwargs = dict(num_envs=3, vectorization_mode="vector_entry_point")
    env, full = (gym.make_vec(f"{name}CartPole-v1", **kwargs) for name in ("Stateless", ""))
    (obs, _), (expected, _) = env.reset(seed=0), full.reset(seed=0)
    actions = np.array([1, 0, 1])
    for _ in range(60):
        assert obs in env.observation_space and np.array_equal(obs, expected[:, ::2])
        (obs, *outcome, _), (expected, *others, _) = env.step(actions), full.step(actions)
        assert np.array_equal(outcome, others)
    single = gym.make("StatelessCartPole-v1")
    assert env.single_observation_space == single.observation_space
    assert env.spec.max_episode_steps == single.spec.max_episode_steps == 500


def test_envpool(tmp_path):
    pytest.importorskip("envpool", reason="benchmark/requirements-envpool.txt")
    flags = dict(env_id="envpool:make_gymnasium", vectorization_mode="vector_entry_point")
    flags |= dict(env_kwargs={"task_id": "CartPole-v1", "seed": 3}, total_timesteps=480)
    done = run(tmp_path, num_steps=80, eval_episodes=2, **flags)
    lengths = [length for _, length in done.scalars["charts/episodic_length"]]
    assert len(done.rows) == 2 and min(lengths) >= 8
    num_steps = max(step for step, _ in done.scalars["losses/value_loss"])
    assert 480 - len(steps_of(done.folder)) <= num_steps < 480


class LongMask(RandomEnv):
    """Its mask has a row too many."""

    def observe(self):
        obs = super().observe()
        return obs | {"action_mask": np.append(obs["action_mask"], np.int8(1))}


def make_choices(num_envs, env=RandomEnv):
    return SyncVectorEnv([partial(env, "graph", head="nodes")] * num_envs)


def test_masks_of_ragged_rows_hold(tmp_path):
    """Each legal action of RandomEnv earns 1."""
    flags = dict(env_id=f"{__name__}:make_choices", vectorization_mode="vector_entry_point")
    scalars = run(tmp_path / "right", **flags).scalars
    assert scalars["charts/episodic_return"] == scalars["charts/episodic_length"]
    with pytest.raises(UsageError, match="leaf 'action_mask', step 0: .* rows where 'obs.nodes'"):
        run(tmp_path / "wrong", env_kwargs={"env": LongMask}, **flags)


class Legal(Walk):
    """Says in `info` which of three actions are allowed, and checks it."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Discrete(3)

    def info(self):
        self.mask = np.eye(3, dtype=np.int8)[self.np_random.integers(3)]
        self.mask |= self.np_random.integers(2, size=3).astype(np.int8)
        return {"action_mask": self.mask}

    def reset(self, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, self.info()

    def step(self, action):
        assert self.mask[action] == 1
        obs, *outcome, info = super().step(action)
        return obs, *outcome, info | self.info()


gym.register("VectorLegal-v0", Legal)


def make_legal(num_envs, mode):
    return SyncVectorEnv([Legal] * num_envs, autoreset_mode=AutoresetMode(mode))


def test_masks_in_info_are_those_of_single_environments(tmp_path):
    single = run(tmp_path / "single", env_id="VectorLegal-v0").scalars
    for mode in MODES:
        kwargs = {"env_id": f"{__name__}:make_legal", "env_kwargs": {"mode": mode.value}}
        vectors = run(tmp_path / mode.value, vectorization_mode="vector_entry_point", **kwargs)
        if mode is not AutoresetMode.NEXT_STEP:
            assert logged_losses(vectors.scalars) == logged_losses(single)


def test_load_policy_of_what_a_function_makes(tmp_path):
    kwargs = {"env_id": f"{__name__}:make_legal", "env_kwargs": {"mode": "SameStep"}}
    done = run(tmp_path, vectorization_mode="vector_entry_point", save_model=True, **kwargs)
    path, env = str(done.folder / "model.pt"), Legal()
    given = InfoMask(make_legal(2, "SameStep"), "action_mask")
    policies = load_policy(path), load_policy(path, env=given)
    with pytest.raises(UsageError, match="makes a VectorEnv, no single environment"):
        policies[0].make_env()
    played = run(tmp_path / "again", load_model=path, total_timesteps=0, eval_episodes=2)
    assert len(played.rows) == 2
    obs, info = env.reset(seed=1)
    for _ in range(3):
        obs = {"action_mask": info["action_mask"]} | obs
        first, second = (policy(obs) for policy in policies)
        assert first == second and info["action_mask"][first] == 1
        obs, *_, info = env.step(first)


def logged_losses(scalars):
    return {name: values for name, values in scalars.items() if name.startswith("losses/")}


def steps_of(folder):
    with open(folder / "episodes.csv") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("mode", MODES)
def test_global_step_counts_steps(mode, tmp_path):
    scalars = trained(tmp_path, "graph", mode, num_steps=16, total_timesteps=144)
    [folder] = tmp_path.iterdir()
    ends = steps_of(folder)
    num_steps = max(step for step, _ in scalars["losses/value_loss"])
    num_ends = len(ends)
    assert num_ends > 20 and ends == sorted(ends) and max(ends) <= num_steps
    if mode is AutoresetMode.NEXT_STEP:  # an end in the last row is followed by no row yet
        assert 144 - num_ends <= num_steps <= 144 - num_ends + 3
    else:
        assert num_steps == 144


@pytest.mark.slow
def test_global_step_counts_the_steps_of_all_ranks(tmp_path):
    flags = dict(env_id=f"{__name__}:make", vectorization_mode="vector_entry_point")
    assert train_ranks(tmp_path, num_steps=16, total_timesteps=192, **flags) == [0, 0]
    [folder] = tmp_path.iterdir()
    ends = steps_of(folder)
    num_steps = max(step for step, _ in train_events(tmp_path)["losses/value_loss"])
    assert 192 - len(ends) <= num_steps <= 192 - len(ends) + 6 and max(ends) <= num_steps


@pytest.mark.parametrize(
    "name, mode",
    [*(("graph", mode) for mode in MODES)]
    + [(name, AutoresetMode.NEXT_STEP) for name in ("lstm_sparse", "gtrxl")],
)
def test_a_vector_env_goes_on_bit_by_bit(name, mode, tmp_path):
    flags = dict(checkpoint_every=1, save_model=True)
    trained(tmp_path / "whole", name, mode, total_timesteps=96, **flags)
    trained(tmp_path / "half", name, mode, total_timesteps=48, **flags)
    [whole] = (tmp_path / "whole").iterdir()
    [half] = (tmp_path / "half").iterdir()
    trained(tmp_path / "half", name, mode, total_timesteps=96, resume=str(half), **flags)
    assert steps_of(half) == steps_of(whole)
    own, other = weights(half), weights(whole)
    assert all(torch.equal(own[key], other[key]) for key in other)


class Unlike(SyncVectorEnv):
    """Walks of which no copy can be made."""

    def __init__(self, num_envs):
        super().__init__([Walk] * num_envs)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "first, then, env_id",
    [
        ("sync", "vector_entry_point", "CartPole-v1"),
        ("vector_entry_point", "sync", "CartPole-v1"),
        ("vector_entry_point", "vector_entry_point", f"{__name__}:Unlike"),
    ],
)
def test_what_cannot_go_on_begins_anew(first, then, env_id, tmp_path, capsys):
    flags = dict(env_id=env_id, checkpoint_every=1, total_timesteps=24)
    run(tmp_path, vectorization_mode=first, **flags)
    [folder] = tmp_path.iterdir()
    args = small_args(**flags | {"total_timesteps": 72, "run_dir": str(tmp_path)})
    args.vectorization_mode = then
    args.resume = str(folder)
    services.run(ppo_graph, args)
    assert "the environments begin new episodes" in capsys.readouterr().err
    assert checkpoints_in(folder)[0] > folder / "checkpoint_000000000024.ckpt"


def test_a_function_is_evaluated_by_a_vector_env_of_its_own(tmp_path):
    flags = dict(total_timesteps=24, eval_episodes=5)
    single = run(tmp_path / "single", env_id="VectorWalk-v0", **flags)
    for mode in MODES:
        kwargs = {"env_id": f"{__name__}:make", "env_kwargs": {"mode": mode.value}}
        kwargs |= {"vectorization_mode": "vector_entry_point", "eval_every": 1}
        vectors = run(tmp_path / mode.value, **flags, **kwargs)
        assert len(vectors.rows) == 5 and (vectors.folder / "best.pt").exists()
        if mode is not AutoresetMode.NEXT_STEP:
            assert vectors.rows == single.rows
    cut = run(tmp_path / "cut", eval_max_steps=1, **flags, **kwargs)
    assert any(row.get("cut") and row["return"] for row in cut.rows)
