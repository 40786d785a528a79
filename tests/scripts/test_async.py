"""Acting and learning at the same time (ppo_graph_async.py): its gradients are those of the papers,
without lag it is ppo_graph.py, runs can be repeated, and both processes end together."""

import copy
import os
import random
import signal
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import walks  # noqa: F401  registers Faulty-v0
from helpers import (
    make_envs,
    run,
    run_folder,
    same_weights,
    small_args,
    train_events,
    weights,
)
from processes import children, is_alive, start, wait_for
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cleanrl_graph import ppo_graph, services
from cleanrl_graph import ppo_graph_async as script
from cleanrl_graph.services import check, checkpoint
from cleanrl_graph.services.plot import episodes_of

CPU = torch.device("cpu")
RANDOM = dict(env_id="Random-v0", env_kwargs={"observation": "set"})
POISSON = dict(env_id="envs:PoissonGraph-v0", env_kwargs={"episode_length": 5})
HANGS = dict(env_id="Faulty-v0", env_kwargs={"fault": "hang", "at": 30})


def outcomes(rollout):
    """What a rollout has as arrays: observations T * N in the order of Storage, then N that the
    last actions led to, then the last ones of truncated episodes; rewards, ends of episodes, and
    the numbers of the steps that truncated one."""
    steps = rollout.steps[1:]
    finals = [flat for step in steps for flat in step.finals]
    return SimpleNamespace(
        obs=script.join([*(step.obs for step in rollout.steps), *finals]),
        rewards=np.stack([step.reward for step in steps]),
        dones=np.stack([step.terminated | step.truncated for step in steps]),
        cut=np.flatnonzero(np.stack([step.truncated for step in steps])),
    )


# ---- The correction ----
class Update(NamedTuple):
    """What an update of one minibatch began with, and the gradient that it took."""

    agent: torch.nn.Module
    rollout: script.Rollout
    gradients: list[dict]  # parameter name -> gradient


def recorded(run_dir, **flags):
    """(the updates of a run, its log)"""
    updates, agents, Agent, receive = [], [], script.Agent, script.Collector.receive

    def note_agent(*args):
        agents.append(Agent(*args))
        return agents[-1]

    def note_rollout(collector):
        answer = receive(collector)
        if isinstance(answer, script.Rollout):  # the first answer is made of spaces
            updates.append(Update(copy.deepcopy(agents[0]), copy.deepcopy(answer), []))
        return answer

    def note_gradient(*_):
        named = agents[0].named_parameters()
        updates[-1].gradients.append(
            {name: p.grad.clone() for name, p in named if p.grad is not None}
        )

    hook = register_optimizer_step_pre_hook(note_gradient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Agent", note_agent)
        patch.setattr(script.Collector, "receive", note_rollout)
        log = run(run_dir, script, num_minibatches=1, update_epochs=1, **flags).scalars
    hook.remove()
    return updates, log


def targets(rewards, values, following, goes_on, rho, gamma, lam):
    """V-trace of one environment, [T]: eq. 1 of Espeholt et al. 2018, c = lambda rho."""
    result = values.copy()
    for s in range(len(values)):
        weight = 1.0
        for t in range(s, len(values)):
            result[s] += weight * rho[t] * (rewards[t] + gamma * following[t] - values[t])
            if not goes_on[t]:
                break
            weight *= gamma * lam * rho[t]
    return result


def values_of(agent, storage, num):
    """Of the first observations, each alone."""
    each = [agent.value(storage.gather(np.array([i]))[0]).item() for i in range(num)]
    return np.array(each, np.float64)


@pytest.mark.parametrize(
    "observation, flags",
    [
        ("mixed", {}),
        ("vector", {"max_lag": 2, "gae_lambda": 0.5}),
        ("graph_edges", {"vf_coef": 0.0, "ent_coef": 0.0}),
    ],
)
def test_gradients_of_the_paper(observation, flags, tmp_path):
    """The decoupled objective and the targets of V-trace, by loops; without lag it is PPO."""
    flags = dict(flags, env_id="Random-v0", env_kwargs={"observation": observation}, num_steps=16)
    flags |= dict(total_timesteps=192, learning_rate=0.02, anneal_lr=False, norm_adv=False)
    updates, log = recorded(tmp_path, **flags)
    args, (T, N), ended = small_args(script, **flags), (16, 3), 0
    envs = make_envs([partial(script.make_env, args)], script=script)
    for k, (agent, rollout, (gradients,)) in enumerate(updates):
        storage = script.Storage(envs.leaves, CPU)
        happened = outcomes(rollout)
        storage.append(happened.obs)
        ended += len(happened.cut)
        with torch.no_grad():
            V = values_of(agent, storage, T * N + N + len(happened.cut))
        finals = dict(zip(happened.cut.tolist(), V[T * N + N :]))
        following = V[N : T * N + N].copy()
        for i, done in enumerate(happened.dones.reshape(-1)):
            following[i] = finals.get(i, 0.0) if done else following[i]
        actions = {"": torch.as_tensor(rollout.actions[""])}
        _, log_prob, entropy, value = agent(storage.gather(np.arange(T * N))[0], actions)
        acted = torch.as_tensor(rollout.log_probs).double()
        ratio = (log_prob.detach().double() - acted).exp().numpy()
        assert (abs(ratio - 1).max() < 1e-5) == (k == 0)
        rho = ratio.clip(max=1)
        columns = happened.rewards, V[: T * N], following, ~happened.dones, rho
        each = zip(*(x.reshape(T, N).T for x in columns))
        discounts = args.gamma, args.gae_lambda
        target = np.stack([targets(*column, *discounts) for column in each], 1)
        target, rho = (torch.tensor(x.reshape(-1), dtype=torch.float32) for x in (target, rho))
        advantage = (target - value.detach()) / rho
        policy = -(rho * advantage * (log_prob - log_prob.detach()).exp()).mean()
        error = args.vf_coef * 0.5 * ((value - target) ** 2).mean()
        loss = policy + error - args.ent_coef * entropy.mean()
        expected = {
            "losses/policy_loss": pytest.approx(policy.item(), rel=1e-4, abs=1e-5),
            "debug/rho_mean": pytest.approx(ratio.mean(), rel=1e-5),
            "debug/rho_truncated": pytest.approx((ratio > 1).mean(), abs=0.03),
            "debug/behaviour_kl": pytest.approx((ratio - 1 - np.log(ratio)).mean(), abs=1e-5),
        }
        assert {name: log[name][k][1] for name in expected} == expected
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        for name, p in agent.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)
    assert len(updates) == 4 and ended


def test_no_lag_is_ppo_graph(tmp_path):
    """--max-lag 0 has losses, weights and statistics of ppo_graph.py; rho is 1."""
    flags = dict(env_id="Random-v0", env_kwargs={"observation": "mixed"}, norm_obs=True)
    flags |= dict(total_timesteps=120, save_model=True)
    theirs = run(tmp_path / "a", ppo_graph, **flags)
    ours = run(tmp_path / "b", script, max_lag=0, **flags)
    expected, result = weights(theirs.folder), weights(ours.folder)
    for name in expected:
        torch.testing.assert_close(result[name], expected[name], atol=1e-5, rtol=1e-5)
    assert max(value for _, value in ours.scalars["debug/rho_mismatch"]) < 1e-5
    for name in ("charts/episodic_return", "charts/episodic_length", "charts/obs_bytes_per_step"):
        assert ours.scalars[name] == theirs.scalars[name]
    for name in theirs.scalars:
        if not name.startswith(("losses/", "debug/")) or name == "losses/explained_variance":
            continue
        values = [[value for _, value in log.scalars[name]] for log in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)


# ---- Lag ----


@pytest.mark.parametrize(
    "max_lag, lags", [(0, [0] * 5), (1, [0, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 3])]
)
def test_lag(max_lag, lags, tmp_path):
    """Rollout k is collected with the weights after max(0, k - max_lag) updates."""
    log = run(tmp_path, script, **RANDOM, total_timesteps=120, max_lag=max_lag).scalars
    assert [value for _, value in log["debug/lag"]] == list(lags)
    for lag, (_, mismatch) in zip(lags, log["debug/rho_mismatch"]):
        assert (mismatch < 1e-5) == (lag == 0)
    assert [step for step, _ in log["debug/lag"]] == [24, 48, 72, 96, 120]
    assert max(value for _, value in log["debug/collection_mismatch"]) < 1e-5


def test_runs_can_be_repeated(tmp_path, monkeypatch):
    """The same bits, whichever of the two processes is the slower one, with and without workers."""
    flags = dict(**RANDOM, total_timesteps=144, norm_obs=True, max_lag=2, save_model=True)
    first = run(tmp_path / "a", script, **flags).folder
    ask, rng = script.Collector.ask, random.Random(0)
    late = lambda *args: time.sleep(0.1 * rng.random()) or ask(*args)
    monkeypatch.setattr(script.Collector, "ask", late)
    assert same_weights(first, run(tmp_path / "b", script, **flags, num_workers=2).folder)


# ---- What stops a run ----


@pytest.mark.parametrize(
    "fault, num_workers, text",
    [
        ("step", 0, "(?s)Traceback.*walks.py.*the engine is on fire.*env 1, step 30"),
        ("kill", 0, "the collector died with exit code -9"),
        ("kill", 2, "step 30: the worker of envs 0 to 1 died with exit code -9"),
    ],
)
def test_errors_arrive(fault, num_workers, text, tmp_path):
    """A sentence with the environment's frames, when that rollout is needed; nothing is left."""
    before = children(os.getpid())
    begin = time.time()
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": fault, "at": 30}, num_workers=num_workers)
    flags |= dict(env_timeout=0.5, total_timesteps=240, checkpoint_every=1)
    with pytest.raises(check.UsageError, match=text):
        run(tmp_path, script, **flags)
    assert time.time() - begin < 35
    wait_for(lambda: children(os.getpid()) == before, 10)
    saved = checkpoint.read(checkpoint.checkpoints_in(str(run_folder(tmp_path)))[0])
    assert saved["global_step"] == 3 * 24 and (run_folder(tmp_path) / "failed").exists()


def saved_in(run_dir):
    return checkpoint.checkpoints_in(str(run_folder(run_dir))) if any(run_dir.iterdir()) else []


@pytest.mark.parametrize(
    "number, group, env, workers",
    [
        (signal.SIGINT, True, POISSON, 2),
        (signal.SIGKILL, False, HANGS, 0),
        (signal.SIGTERM, True, HANGS, 0),
    ],
)
def test_signals_stop_both(number, group, env, workers, tmp_path):
    """They leave a checkpoint, the second one at once; nothing is left, also after kill -9."""
    flags, hangs = dict(num_workers=workers, checkpoint_every=1), env is HANGS
    process = start(tmp_path, "ppo_graph_async", total_timesteps=10**7, **flags, **env)
    try:
        wait_for(lambda: saved_in(tmp_path))
        (collector,) = children(process.pid)
        wait_for(lambda: len(children(collector)) == workers)
        others = [collector, *children(collector)]
        time.sleep(hangs)
        (os.killpg if group else os.kill)(process.pid, number)
        if hangs and number != signal.SIGKILL:
            time.sleep(0.3)
            assert process.is_alive()
            os.killpg(process.pid, number)
        process.join(30)
        assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: not any(map(is_alive, others)), 10)
        assert checkpoint.read(saved_in(tmp_path)[0])["global_step"] >= 24
    finally:
        process.kill()
        process.join()


def test_resume(tmp_path, capfd):
    """It goes on from the last update; environments begin anew, with other seeds after a mark."""
    flags = dict(**RANDOM, checkpoint_every=2, anneal_lr=False, save_model=True)
    folders = []
    for name in "abc":
        folders.append(run(tmp_path / name, script, total_timesteps=96, **flags).folder)
        if name == "c":
            (folders[-1] / "failed").write_text("UsageError: once\n")
        capfd.readouterr()
        args = small_args(script, **flags, run_dir=str(tmp_path / name), total_timesteps=168)
        services.run(script, args, resume="auto")
        assert capfd.readouterr().err.count("the environments begin new episodes") == 1
    lags = train_events(tmp_path / "a")["debug/lag"]
    assert lags == [(24 * (k + 1), lag) for k, lag in enumerate([0, 1, 1, 1, 0, 1, 1])]
    assert same_weights(*folders[:2]) and not same_weights(*folders[1:])
    newest = checkpoint.read(saved_in(tmp_path / "a")[0])
    assert newest["global_step"] == 7 * 24 and newest["optimizer"]["state"][0]["step"] == 7 * 4


def test_what_is_refused(tmp_path, monkeypatch):
    """Each in a sentence."""
    with pytest.raises(check.UsageError, match="--max-lag -1: a number from 0 is needed"):
        run(tmp_path, script, **RANDOM, max_lag=-1)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(check.UsageError, match="without torchrun"):
        run(tmp_path, script, **RANDOM, total_timesteps=96)


# ---- Whole runs ----
@pytest.mark.slow
def test_learns(tmp_path):
    """CartPole is balanced with a lag of two updates."""
    flags = dict(env_id="CartPole-v1", total_timesteps=30720, num_envs=8, num_steps=64, max_lag=2)
    flags |= dict(learning_rate=3e-3, hidden_dims=(64,), update_epochs=4, num_minibatches=4)
    _, log, folder, _ = run(tmp_path, script, **flags)
    assert np.mean([ret for _, _, ret, _ in episodes_of(folder)][-20:]) > 100
    assert 0 < np.mean([value for _, value in log["debug/behaviour_kl"]]) < 0.1
