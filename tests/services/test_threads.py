"""Runs and policies in threads of one program, as `n_jobs=2` of Optuna has them."""

import copy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import SmallEnv, graph_space, run_folder, small_args

from cleanrl_graph import load_policy, ppo_graph, ppo_lstm_sparse, services
from cleanrl_graph.envs import fitting
from cleanrl_graph.services.check import UsageError


class Count(SmallEnv):
    """A graph of 1 to 9 nodes, of which the one with the number 1 is right; others have 0. Wrong,
    or none of the graph, is an error: a trained policy plays `length` steps without one."""

    observation_space = spaces.Dict(
        items=graph_space(features=1),
        action_mask=spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
    )
    action_space = spaces.Discrete(9)
    length = 12

    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def observe(self):
        num = self.np_random.integers(1, 10)
        self.right = self.np_random.integers(num)
        mask = (np.arange(num) == self.right).astype(np.int8)
        links = np.arange(num)[:, None].repeat(2, 1)
        graph = spaces.GraphInstance(mask.astype(np.float32)[:, None], None, links)
        return {"items": graph, "action_mask": mask}

    def reward(self, action):
        if self.t == self.fails_at:
            raise RuntimeError("hopeless")
        assert action == self.right, "the choice of another observation"
        time.sleep(0)  # another thread's turn
        return 1.0


gym.register("Count-v0", Count)


@pytest.fixture(autouse=True)
def many_switches():
    """Threads take turns a hundred times as often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval)


def args_of(run_dir, script=ppo_graph, **flags):
    flags = dict(env_id="Count-v0", action_head="nodes", total_timesteps=96) | flags
    return small_args(script, run_dir=str(run_dir), eval_episodes=2, **flags)


def together(*functions):
    """What each returns, or raises, in a thread of its own, all at once."""
    barrier = threading.Barrier(len(functions))

    def call(function):
        barrier.wait()
        try:
            return function()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, functions))


# ---- Runs ----
def test_runs_in_threads(tmp_path):
    """All train and are evaluated, each with its own observations; an error names the environment,
    the step and the folder's mark of the run in which it happens. Nothing in the scripts is another
    than before."""
    before = [dict(vars(script)) for script in (ppo_graph, ppo_lstm_sparse)]

    def run(name, script=ppo_graph, **kwargs):
        args = args_of(tmp_path / name, script, env_kwargs=kwargs)
        return services.run(script, args, checkpoint_every=1)

    runs = lambda: run("a"), lambda: run("b", ppo_lstm_sparse), lambda: run("c", fails_at=7)
    *found, error = together(*runs)
    assert [[row["return"] for row in rows] for rows in found] == [[12.0, 12.0]] * 2
    assert isinstance(error, UsageError) and "env 0, step 8, step(" in str(error)
    assert [(run_folder(tmp_path / name) / "failed").exists() for name in "abc"] == [0, 0, 1]
    assert [dict(vars(script)) for script in (ppo_graph, ppo_lstm_sparse)] == before


def test_runs_that_begin_at_one_moment(tmp_path, monkeypatch):
    """Those of one environment and seed have folders of their own."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    args = args_of(tmp_path, total_timesteps=0)
    together(*[lambda: services.run(ppo_graph, args, save_model=False)] * 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rpartition("__")[2] for name in names] == ["1700000000000", "1700000000001"]


def test_each_run_says_its_lines(capsys):
    """What one run has said the other says, too."""
    together(*[lambda: [fitting.say("a line") for _ in range(3)]] * 2)
    assert capsys.readouterr().err == "a line\n" * 2


# ---- Policies ----
def trained(folder, script=ppo_graph):
    """The file of a policy."""
    args = args_of(folder, script, total_timesteps=24)
    services.run(script, args, eval_episodes=0, save_model=True)
    return run_folder(folder) / "model.pt"


def played(policy, seed, num_episodes=4):
    """The actions of these episodes."""
    env = policy.make_env()
    actions = []
    for k in range(num_episodes):
        obs, _ = env.reset(seed=1000 * seed + k)
        policy.reset()
        ended = False
        while not ended:
            actions.append(policy(obs))
            obs, _, terminated, truncated, _ = env.step(actions[-1])
            ended = terminated or truncated
    return actions


def test_threads_share_a_policy(tmp_path):
    """It answers each of three threads as it answers one, and in different threads it is another's
    turn."""
    policy = load_policy(trained(tmp_path))
    expected = [played(policy, seed) for seed in range(3)]
    plays = [lambda seed=seed: played(policy, seed) for seed in range(3)]
    assert together(*plays) == expected


def test_a_memory_is_of_one_thread(tmp_path):
    """Calls at the same time are refused, and the policy goes on; copies act at once, each as the
    one that was copied."""
    policy = load_policy(trained(tmp_path, ppo_lstm_sparse))
    expected = [played(policy, seed) for seed in range(3)]
    copies = [copy.deepcopy(policy) for _ in range(3)]
    plays = [lambda k=k: played(copies[k], k) for k in range(3)]
    assert together(*plays) == expected
    policy.lock.acquire()
    obs, _ = policy.make_env().reset(seed=0)
    (error,) = together(lambda: policy(obs))
    assert isinstance(error, UsageError) and "copy.deepcopy(policy)" in str(error)
    policy.lock.release()
    assert played(policy, 1) == expected[1]
