"""Acting and learning at the same time: V-trace, rollouts that travel, the lag, errors, signals and resuming."""

import os
import random
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import ppo_graph
import ppo_graph_async as script
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, small_args, vector
from test_main import run_path, scalars
from test_reliability import FORK, children, is_alive, wait_for

RANDOM = dict(env_id="Random-v0", env_kwargs={"observation": "mixed"})


def numbers(**kwargs):
    """Args with what main computes at run time."""
    args = small_args(script, **kwargs)
    args.batch_size = args.num_envs * args.num_steps
    args.minibatch_size, args.num_iterations = args.batch_size // args.num_minibatches, args.total_timesteps
    return args


def makers_of(args):
    return [partial(script.make_env, args.env_id, args.env_kwargs)] * args.num_envs


def weights(folder, module=script, **kwargs):
    """The model at the end of a short run."""
    module.main(small_args(module, run_dir=str(folder), save_model=True, **kwargs))
    return torch.load(run_path(folder) / "model.pt", weights_only=True)["model"]


def assert_same(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---- The correction ----
@pytest.mark.parametrize("seed", range(3))
def test_vtrace_of_the_paper(seed):
    """V + rho A is eq. 1 of Espeholt et al. 2018, summed term by term in float64, with c = lambda rho."""
    rng, (T, N), gamma, lam = np.random.default_rng(seed), (12, 4), 0.9, 0.8
    rewards, values, next_value = rng.normal(size=(T, N)), rng.normal(size=(T, N)), rng.normal(size=N)
    dones, rho = rng.random((T, N)) < 0.2, rng.lognormal(size=(T, N)).clip(max=1.0)
    float32 = (array.astype(np.float32) for array in (rewards, values, rho))
    advantages = script.vtrace(*float32, dones, next_value.astype(np.float32), gamma, lam)
    following = np.concatenate([values[1:], next_value[None]])
    for i in range(N):
        for s in range(T):
            target, discount, trace = values[s, i], 1.0, 1.0
            for t in range(s, T):
                v = 0.0 if dones[t, i] else following[t, i]
                target += discount * trace * rho[t, i] * (rewards[t, i] + gamma * v - values[t, i])
                if dones[t, i]:
                    break
                discount, trace = discount * gamma, trace * lam * rho[t, i]
            assert values[s, i] + rho[s, i] * advantages[s, i] == pytest.approx(target, abs=1e-5)


def test_vtrace_without_lag_is_gae():
    """rho = 1 gives the advantages of ppo_graph.py."""
    rng, (T, N) = np.random.default_rng(0), (40, 5)
    rewards, values, next_value = (rng.normal(size=shape).astype(np.float32) for shape in ((T, N), (T, N), N))
    dones = rng.random((T, N)) < 0.1
    expected = ppo_graph.gae(rewards, values, dones, next_value, 0.97, 0.9)
    result = script.vtrace(rewards, values, np.ones_like(values), dones, next_value, 0.97, 0.9)
    np.testing.assert_allclose(result, expected, atol=1e-5)


def value_of(agent, leaves, arrays):
    """V of one observation."""
    storage = script.Storage(leaves, torch.device("cpu"))
    storage.append(*script.collate(leaves, [arrays]))
    with torch.no_grad():
        return agent.value(storage.latest()).item()


@pytest.mark.parametrize("max_rho", [1.0, 2.0])
@pytest.mark.parametrize("observation", ["mixed", "vector"])
def test_corrected_rollout(observation, max_rho):
    """Values, rho, advantages and targets of a rollout of other weights, with episodes that terminate and that are
    truncated, against a loop over the steps that encodes every observation alone."""
    args = numbers(env_id="Random-v0", env_kwargs={"observation": observation}, num_steps=20, max_rho=max_rho)
    envs = script.Envs(makers_of(args))
    envs.reset(3)
    behaviour, agent = (script.Agent(envs.leaves, envs.action_space, args) for _ in range(2))
    with torch.no_grad():
        for networks in (behaviour, agent):
            for values in networks.parameters():
                values += 0.1 * torch.randn_like(values)
    seen, steps, receive = [envs.last_steps[0].observations(envs.leaves)], [], envs.receive

    def note(lane=0):
        step = receive(lane)
        seen.append(step.observations(envs.leaves))
        steps.append(step._replace(finals=[(i, [array.copy() for array in arrays]) for i, arrays in step.finals]))
        return step

    envs.receive = note
    actor = script.Actor(behaviour, envs.leaves, args.num_envs, args, torch.device("cpu"))
    trajectory, episodes = script.collect(actor, envs, args, lambda: False)
    rollout, logs = script.correct(agent, actor, trajectory, args)
    assert sum(step.terminated.sum() for step in steps) and sum(len(step.finals) for step in steps)
    assert len(episodes) == sum(len(step.episodes) for step in steps)
    with torch.no_grad():
        _, log_probs, _, values = agent(actor.storage.gather(np.arange(60)), rollout.actions)
        _, old, _, _ = behaviour(actor.storage.gather(np.arange(60)), rollout.actions)
    rho = (log_probs - old).exp().double().clamp(max=max_rho).view(20, 3).numpy()
    assert rho.std() > 0.01 and (rho == max_rho).any() == (max_rho == 1)
    np.testing.assert_allclose(rollout.rho.view(20, 3), rho, rtol=1e-5)
    assert logs["debug/rho_mean"] == pytest.approx((log_probs - old).exp().mean().item(), rel=1e-5)
    for i in range(3):
        last = 0.0
        for t in reversed(range(20)):
            step, value = steps[t], value_of(agent, envs.leaves, seen[t][i])
            final = dict(step.finals).get(i, seen[t + 1][i])
            after = 0.0 if step.terminated[i] else value_of(agent, envs.leaves, final)
            delta = float(step.reward[i]) + args.gamma * after - value
            alive = not (step.terminated[i] or step.truncated[i])
            advantage = delta + args.gamma * args.gae_lambda * alive * last
            last, row = rho[t, i] * advantage, t * 3 + i
            assert rollout.values[row] == pytest.approx(value, abs=1e-5)
            assert rollout.advantages[row] == pytest.approx(advantage, abs=1e-4)
            assert rollout.returns[row] == pytest.approx(value + rho[t, i] * advantage, abs=1e-4)


def test_loss_weighs_by_rho():
    """The decoupled objective: the policy's term of every step counts rho times, those of value and entropy once."""
    args = numbers(**RANDOM, norm_adv=False, ent_coef=0.0)
    envs = script.Envs(makers_of(args))
    envs.reset(0)
    agent = script.Agent(envs.leaves, envs.action_space, args)
    actor = script.Actor(agent, envs.leaves, 3, args, torch.device("cpu"))
    rollout, _ = script.correct(agent, actor, script.collect(actor, envs, args, lambda: False)[0], args)
    rho, inputs = torch.rand(24), (actor.storage.gather(np.arange(24)),)
    _, logs = script.ppo_loss(agent, inputs, rollout._replace(rho=rho), args)
    _, plain = script.ppo_loss(agent, inputs, rollout._replace(advantages=rollout.advantages * rho), args)
    assert logs["losses/policy_loss"].item() == pytest.approx(plain["losses/policy_loss"].item(), rel=1e-5)
    assert logs["losses/value_loss"] == plain["losses/value_loss"]


@pytest.mark.parametrize("observation", ["mixed", "vector", "graph_edges"])
def test_no_lag_is_ppo_graph(observation, tmp_path):
    """--max-lag 0 ends with the weights of ppo_graph.py, and statistics of observations too, within rounding."""
    flags = dict(env_id="Random-v0", env_kwargs={"observation": observation}, norm_obs=True, total_timesteps=120)
    expected = weights(tmp_path / "a", ppo_graph, **flags)
    result = weights(tmp_path / "b", max_lag=0, **flags)
    for name in expected:
        torch.testing.assert_close(result[name], expected[name], atol=1e-5, rtol=1e-5)
    log = scalars(tmp_path / "b")
    assert max(value for _, value in log["debug/rho_mismatch"]) < 1e-5
    theirs = scalars(tmp_path / "a")
    for name in ("charts/episodic_return", "charts/episodic_length", "charts/obs_bytes_per_step"):
        assert log[name] == theirs[name]


# ---- What travels, and when ----
@pytest.mark.parametrize("observation, num_workers", [*((name, 0) for name in OBSERVATIONS), ("mixed", 2)])
def test_rollouts_arrive_bit_by_bit(observation, num_workers):
    """What the other process collected is what this one collects from the same seed with the same weights, for all
    kinds of observations, while buffers are used again; minibatches of it are the same, too."""
    args = numbers(env_id="Random-v0", env_kwargs={"observation": observation}, num_workers=num_workers)
    collector = script.Collector(makers_of(args), args)
    try:
        torch.manual_seed(args.seed)
        envs = script.Envs(makers_of(args))
        envs.reset(args.seed)
        agent = script.Agent(envs.leaves, envs.action_space, args)
        here, there = (script.Actor(agent, envs.leaves, 3, args, torch.device("cpu")) for _ in range(2))
        collector.request(0, agent)
        for k in range(4):
            expected, episodes = script.collect(here, envs, args, lambda: False)
            version, theirs, trajectory = collector.receive(there)
            assert version == max(0, k - 1) and [e[:4] for e in theirs] == [e[:4] for e in episodes]
            ours, other = ([*t, *script.storage_arrays(actor.storage), *script.storage_arrays(actor.extra)]
                           for t, actor in ((expected, here), (trajectory, there)))
            for a, b in zip(ours, other, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            idx = np.random.default_rng(k).permutation(24)
            for a, b in zip(here.storage.gather(idx).values(), there.storage.gather(idx).values()):
                assert all(map(torch.equal, a, b)) if isinstance(a, script.Ragged) else torch.equal(a, b)
            assert here.storage.stats() == there.storage.stats()
            collector.request(k + 1, agent)
    finally:
        collector.close()


def echo(pipe, num_slots):
    mail = script.Mail(pipe, num_slots)
    while (received := mail.receive()) is not None:
        mail.send(*received)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_mail(num_slots):
    """Arrays of any type and size come back bit by bit, empty ones too; the last `num_slots` stay valid."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=echo, args=(there, num_slots), daemon=True)
    process.start()
    mail, rng, kept = script.Mail(here, num_slots), np.random.default_rng(0), []
    for k in range(12):
        shapes = [(0,), (), (rng.integers(5), 3), (rng.integers(3000), 0), (2 ** k,)]
        arrays = [rng.integers(0, 100, shape).astype(dtype) for shape, dtype in zip(shapes, "f8 i8 u1 f4 ?".split())]
        mail.send({"k": k}, [array.copy() for array in arrays])
        kept.append((*mail.receive(), arrays))
        for message, received, sent in kept[-num_slots:]:
            assert message["k"] == sent[-1].size.bit_length() - 1
            for a, b in zip(received, sent, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    here.send(None)
    process.join(10)
    assert process.exitcode == 0


@pytest.mark.parametrize("max_lag, lags", [(0, [0] * 5), (1, [0, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 3])])
def test_lag(max_lag, lags, tmp_path):
    """Rollout k is collected with the weights after max(0, k - max_lag) updates; without a lag rho is 1."""
    script.main(small_args(script, **RANDOM, total_timesteps=120, max_lag=max_lag, run_dir=str(tmp_path)))
    log = scalars(tmp_path)
    assert [value for _, value in log["debug/lag"]] == lags
    for lag, (_, mismatch) in zip(lags, log["debug/rho_mismatch"]):
        assert (mismatch < 1e-5) == (lag == 0)
    assert [step for step, _ in log["debug/lag"]] == [24, 48, 72, 96, 120]


@pytest.mark.parametrize("max_lag", [1, 2])
def test_runs_can_be_repeated(max_lag, tmp_path, monkeypatch):
    """The same bits, whichever of the two processes is the slower one, with and without workers."""
    flags = dict(**RANDOM, total_timesteps=144, norm_obs=True, max_lag=max_lag)
    first = weights(tmp_path / "a", **flags)
    assert_same(first, weights(tmp_path / "b", **flags, num_workers=2))
    update, rng = script.update, random.Random(0)
    monkeypatch.setattr(script, "update", lambda *args: time.sleep(0.1 * rng.random()) or update(*args))
    assert_same(first, weights(tmp_path / "c", **flags))


# ---- What stops a run ----
class Fails(gym.Env):
    """Its step 30 raises, hangs, or kills the process that it runs in."""

    observation_space, action_space = vector(2), spaces.Discrete(2)

    def __init__(self, how="raise"):
        self.how, self.num_steps = how, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == 30 and self.how == "raise":
            raise KeyError("the bridge is out")
        if self.num_steps == 30 and self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_steps == 30 and self.how == "hang":
            time.sleep(1000)
        return np.zeros(2, np.float32), 0.0, False, False, {}


gym.register("Fails-v0", entry_point=Fails)


@pytest.mark.parametrize("how, num_workers, text", [
    ("raise", 0, "in the collector: (?s:.*)Traceback(?s:.*)the bridge is out(?s:.*)env 0, step 30"),
    ("raise", 2, "in the worker of envs 0 to 1"), ("die", 0, "the collector died with exit code -9"),
    ("die", 2, "the worker of envs 0 to 1 died with exit code -9 in step 30")])
def test_errors_arrive(how, num_workers, text, tmp_path):
    """What goes wrong in the collector is raised here, with its traceback; nothing is left over."""
    before = children(os.getpid())
    with pytest.raises(RuntimeError, match=text):
        script.main(small_args(script, env_id="Fails-v0", env_kwargs={"how": how}, total_timesteps=240,
                               num_workers=num_workers, run_dir=str(tmp_path)))
    assert children(os.getpid()) == before
    (checkpoint,) = script.checkpoints_in(run_path(tmp_path))
    assert script.load_checkpoint(checkpoint)["iteration"] in (1, 2, 3)  # it is seen when that rollout is needed


def test_environments_restart(tmp_path):
    """--on-env-error restart acts in the collector."""
    script.main(small_args(script, env_id="Fails-v0", total_timesteps=120, on_env_error="restart",
                           run_dir=str(tmp_path)))
    assert scalars(tmp_path)["charts/env_restarts"][-1][1] == 3


def start(run_dir, **flags):
    """A process that trains for a long time, in a process group of its own."""
    args = small_args(script, run_dir=str(run_dir), **{"checkpoint_every": 1, "total_timesteps": 10**7} | flags)

    def target():
        os.setpgid(0, 0)
        script.main(args)

    process = FORK.Process(target=target)
    process.start()
    return process


@pytest.mark.parametrize("number, group, env_id, how", [
    (signal.SIGTERM, False, "envs:PoissonGraph-v0", {}), (signal.SIGINT, True, "envs:PoissonGraph-v0", {}),
    (signal.SIGTERM, True, "Fails-v0", {"how": "hang"}), (signal.SIGKILL, False, "envs:PoissonGraph-v0", {})])
def test_signals_stop_both(number, group, env_id, how, tmp_path):
    """SIGINT and SIGTERM, to one process or to all, even while an environment hangs, leave a checkpoint; collector and
    workers are gone, also after kill -9."""
    process = start(tmp_path, env_id=env_id, env_kwargs=how, num_workers=0 if how else 2)
    try:
        wait_for(lambda: script.checkpoints_in(str(run_path(tmp_path))) if list(tmp_path.iterdir()) else False)
        (collector,) = children(process.pid)
        wait_for(lambda: how or len(children(collector)) == 2)
        others = [collector, *children(collector)]
        if how:
            time.sleep(1)
        (os.killpg if group else os.kill)(process.pid, number)
        process.join(30)
        assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: not any(map(is_alive, others)), 10)
        assert script.load_checkpoint(script.checkpoints_in(str(run_path(tmp_path)))[0])["iteration"] >= 1
    finally:
        process.kill()
        process.join()


def test_resume(tmp_path, capsys):
    """A run goes on from its last update with weights, optimizer and steps; environments begin anew, in two runs with
    the same bits."""
    flags = dict(**RANDOM, checkpoint_every=2, anneal_lr=False, run_dir=str(tmp_path))
    for name in "ab":
        args = flags | {"run_dir": str(tmp_path / name)}
        script.main(small_args(script, total_timesteps=96, **args))
        script.main(small_args(script, total_timesteps=168, resume="auto", save_model=True, **args))
    log = scalars(tmp_path / "a")
    assert [step for step, _ in log["debug/lag"]] == [24 * k for k in range(1, 8)]
    assert [value for _, value in log["debug/lag"]] == [0, 1, 1, 1, 0, 1, 1]
    assert "3 of 3 environments begin a new episode" in capsys.readouterr().err
    assert_same(*(torch.load(run_path(tmp_path / name) / "model.pt", weights_only=True)["model"] for name in "ab"))
    newest = script.load_checkpoint(script.checkpoints_in(str(run_path(tmp_path / "a")))[0])
    assert newest["iteration"] == 7 and newest["num_steps"] == 56


def test_refused_flags(tmp_path, monkeypatch):
    for wrong, text in (({"double_buffer": True}, "--double-buffer"), ({"max_lag": -1}, "--max-lag -1"),
                        ({"max_rho": 0.0}, "--max-rho 0.0")):
        with pytest.raises(ValueError, match=text):
            script.main(small_args(script, **RANDOM, **wrong, run_dir=str(tmp_path)))
    monkeypatch.setattr(script.ranks, "size", 2)
    with pytest.raises(ValueError, match="without torchrun"):
        script.check_flags(numbers(**RANDOM))


# ---- Whole runs ----
def test_profile(tmp_path, capsys):
    """--profile tells the time of both processes."""
    script.main(small_args(script, **RANDOM, run_dir=str(tmp_path), profile=True, total_timesteps=96))
    folder = run_path(tmp_path)
    learner, collector = ((folder / name).read_text() for name in ("profile.md", "profile_collector.md"))
    names = ("wait for the collector", "forward", "backward", "optimizer", "correct", "vtrace",
             "everything else")
    assert all(f"| {name} | " in learner for name in names)
    assert all(f"| {name} | " in collector for name in ("environments", "policy", "storage"))
    assert collector.strip() in capsys.readouterr().out and (folder / "trace.json").exists()


def test_learns(tmp_path):
    """CartPole is balanced with a lag of two updates."""
    script.main(small_args(script, env_id="CartPole-v1", total_timesteps=30720, num_envs=8, num_steps=64, max_lag=2,
                           learning_rate=3e-3, hidden_dims=(64,), update_epochs=4, num_minibatches=4,
                           run_dir=str(tmp_path)))
    log = scalars(tmp_path)
    assert np.mean([value for _, value in log["charts/episodic_return"]][-20:]) > 100
    assert 0 < np.mean([value for _, value in log["debug/behaviour_kl"]]) < 0.1
