"""P8: auxiliary losses, recorded demonstrations and their cloning (ppo_graph_aux.py, envs/record.py)."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import ppo_graph
import ppo_graph_aux as script
import pytest
import torch
from envs import job_shop, record
from gymnasium import spaces
from helpers import ACTIONS, OBSERVATIONS, ListEnv, RandomEnv, observation_spaces, sample, small_args, stored, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from test_main import run_path, scalars

CPU = torch.device("cpu")
CASES = [(kind, "discrete", "flat", {}) for kind in OBSERVATIONS]
CASES += [("vector", action, "flat", {}) for action in ACTIONS]
CASES += [("mixed", "mixed", "flat", {"autoregressive": True}), ("vector", "multidiscrete", "mask", {}),
          ("graph_edges", "", "nodes", {}), ("set", "", "avail_actions", {}),
          ("graph_edges", "", "pair", {"autoregressive": True})]
IDS = dict(ids=lambda v: v if isinstance(v, str) else "+".join(v))


def legal(env, obs, rng):
    """A random action that is not masked, in a RandomEnv."""
    if env.head == "mask":
        ends = np.cumsum([0, *env.num_options])
        parts = [rng.choice(np.flatnonzero(obs["action_mask"][a:b])) for a, b in zip(ends, ends[1:])]
        return np.array(parts) if len(parts) > 1 else parts[0] + env.action_space.start
    if env.head == "nodes":
        return rng.choice(np.flatnonzero(obs["action_mask"]))
    if env.head == "pair":
        return tuple(rng.choice(np.flatnonzero(column)) for column in obs["action_mask"].T)
    if env.head == "avail_actions":
        return rng.integers(len(obs["avail_actions"]))
    return sample(env.action_space, rng)


def demos_of(folder, observation="vector", action="discrete", head="flat", num_episodes=6):
    """The file of a few episodes in a RandomEnv."""
    kwargs = {"observation": observation, "action": action, "head": head}
    record.save(path := str(folder / "demos.npz"), record.record(RandomEnv(**kwargs), legal, num_episodes), "R", kwargs)
    return path, dict(env_id="Random-v0", env_kwargs=kwargs)


def set_up(env, num_steps=8, num_envs=3, num_workers=0, **kwargs):
    """(args, actor with an agent, rollout) of one collection in copies of `env()`."""
    args = small_args(script, num_steps=num_steps, num_envs=num_envs, num_workers=num_workers, **kwargs)
    envs = script.make_envs([env] * num_envs, args)
    envs.reset(0)
    agent = script.Agent(envs.leaves, envs.action_space, args)
    actor = script.Actor(agent, envs.leaves, num_envs, args, CPU, len(envs.last_steps))
    rollout = script.collect(actor, envs, args, lambda *episode: None)
    envs.close()
    return args, actor, rollout


def same(a, b):
    return all(map(torch.equal, a, b)) if isinstance(a, tuple) else torch.equal(a, b)


# ---- The file ----
class Episode(ListEnv):
    """A ListEnv whose episode ends with the list."""

    def step(self, action):
        obs, *_ = super().step(action)
        return obs, float(self.t), self.t == len(self.observations) - 1, False, {}


@settings(max_examples=60, deadline=None)
@given(observation_spaces, st.sampled_from(list(ACTIONS.values())), st.integers(0, 2**32 - 1))
def test_file_holds_what_was_seen_and_done(tmp_path_factory, space, action_space, seed):
    """Observations of all spaces, any number of rows included, arrive in the storage as they would from an environment,
    without padding; actions, rewards and ends come back, too."""
    rng = np.random.default_rng(seed)
    observations, given_actions = [sample(space, rng) for _ in range(4)], []

    def policy(env, obs, rng):
        assert obs is observations[env.t]
        given_actions.append(sample(action_space, rng))
        return given_actions[-1]

    data = record.record(Episode(space, observations, action_space), policy, 1)
    path = str(tmp_path_factory.mktemp("demos") / "demos.npz")
    record.save(path, data)
    storage, leaves = stored(space, [[obs] for obs in observations], action_space=action_space)
    head = script.ActionHead(action_space, leaves, 4, 4, small_args(script))
    demos = script.read_demos(path, leaves, head)
    cloned = script.Storage(leaves, CPU)
    cloned.append(demos.parts, demos.counts)
    idx = np.array([2, 0, 1, 1])
    for a, b in zip(cloned.gather(idx).values(), storage.gather(idx).values(), strict=True):
        assert same(a, b)
    for leaf, (values,) in zip(leaves, demos.parts):
        assert len(values) == demos.counts[leaf.group].sum() and values.dtype == leaf.dtype
    again = script.to_env_actions(action_space, iter(demos.actions.T))
    assert [record.action_columns(action_space, a).tolist() for a in again] == demos.actions.tolist()
    for action, expected in zip(again, given_actions, strict=True):
        np.testing.assert_allclose(spaces.flatten(action_space, action), spaces.flatten(action_space, expected))
    with np.load(path, allow_pickle=False) as file:
        assert file["rewards"].tolist() == [1, 2, 3] and file["terminated"].tolist() == [False, False, True]
        assert not file["truncated"].any()


@pytest.mark.parametrize("change, sentence", [
    (lambda d: d.update(format="other"), "its format is other, this script reads cleanrl_graph-demos-1"),
    (lambda d: d.update({"values/more": d["actions"]}), r"it has the leaves \[.*'more'.*\], the environment \['action"),
    (lambda d: d.update({"values/obs.edges": d["values/obs.edges"].astype(float)}),
     r"leaf 'obs.edges': dtype float64, shape \('rows', 2\) where the environment has dtype float32, shape"),
    (lambda d: d.update({"values/obs.nodes": d["values/obs.nodes"][:, :2]}),
     r"leaf 'obs.nodes': dtype float32, shape \('rows', 2\) where the environment has dtype float32, shape \('rows', "),
    (lambda d: d.pop("counts/obs.nodes"), r"leaf 'obs.nodes': dtype float32, shape \(3,\) where"),
    (lambda d: d.update({"counts/obs.nodes": d["counts/obs.nodes"][1:]}), "leaf 'obs.nodes': counts of"),
    (lambda d: d.update({"counts/action_mask": np.roll(d["counts/action_mask"], 1)}),
     "leaf 'action_mask': its counts are not those of the other leaves of 'obs.nodes'"),
    (lambda d: d["values/obs.nodes"].__setitem__((slice(int(d["counts/obs.nodes"][:2].sum()), None), 1), np.nan),
     r"step 2, leaf 'obs.nodes': value nan at index \[0, 1\]"),
    (lambda d: d["values/obs.edge_links"].__setitem__((0, 0), 999),
     r"step .*, leaf 'obs.edge_links': value 999 at index \[0, 0\]"),
    (lambda d: d["actions"].__setitem__((3, 0), 99), r"step 3: part 0 of the action, \[99\], is out of range"),
    (lambda d: d["values/action_mask"].__setitem__(slice(int(d["counts/action_mask"][:5].sum()), None), 0),
     "step 5: part 0 of the action, .*, is masked"),
    (lambda d: d.update(actions=d["actions"][:, :0]), r"actions of shape \(\d+, 0\) where \[steps, 1\] is needed"),
])
def test_bad_files(change, sentence, tmp_path):
    """What does not fit the environment is named, with the file and the step, before the training begins."""
    path, flags = demos_of(tmp_path, "graph_edges", "", "nodes")
    data = dict(np.load(path))
    change(data)
    np.savez(path, **data)
    with pytest.raises(ValueError, match=f"--demos {path}: {sentence}"):
        script.main(small_args(script, **flags, demos=path, run_dir=str(tmp_path / "runs")))


def test_no_file(tmp_path):
    Path(tmp_path / "text.npz").write_text("hello")
    flags = dict(env_id="Random-v0", run_dir=str(tmp_path / "runs"))
    with pytest.raises(ValueError, match="text.npz: not a file of demonstrations"):
        script.main(small_args(script, **flags, demos=str(tmp_path / "text.npz")))
    with pytest.raises(FileNotFoundError, match="missing.npz"):
        script.main(small_args(script, **flags, demos=str(tmp_path / "missing.npz")))
    for flag, value in (("bc_anneal", 1.5), ("aux_coef", -1.0), ("bc_coef", np.inf), ("bc_minibatch_size", 0),
                        ("bc_updates", -1)):
        with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} {value}.* needed"):
            script.main(small_args(script, **flags, **{flag: value}))


def test_masked_part_of_a_composite_action(tmp_path):
    """Masks of a fixed list of options are read part by part."""
    path, flags = demos_of(tmp_path, "vector", "multidiscrete", "mask")
    data = dict(np.load(path))
    data["values/action_mask"][4] = [1, 1, 1, *(np.arange(2) != data["actions"][4, 1])]
    np.savez(path, **data)
    with pytest.raises(ValueError, match=r"step 4: part 1 of the action, \[\d\], is masked"):
        script.main(small_args(script, **flags, demos=path, run_dir=str(tmp_path / "runs")))


def test_recorder_as_a_command(tmp_path):
    """From any folder to a file that a training reads; MWKR's actions are those of the rule."""
    kwargs = {"jobs": [2, 3], "machines": [2, 3]}
    subprocess.run([sys.executable, record.__file__, "--policy", "envs.job_shop:mwkr", "--episodes", "3", "--out",
                    "demos.npz", "--env-kwargs", json.dumps(kwargs), "--seed", "5"], cwd=tmp_path, check=True,
                   capture_output=True)
    data, env, actions = np.load(tmp_path / "demos.npz"), job_shop.JobShopEnv(**kwargs), []
    assert json.loads(str(data["env_kwargs"])) == kwargs and str(data["env_id"]) == "envs:JobShop-v0"
    for episode in range(3):
        env.reset(seed=5 if episode == 0 else None)
        while env.num_left:
            actions.append(job_shop.dispatch_rule(env, "MWKR"))
            env.step(actions[-1])
    assert data["actions"].tolist() == [[a] for a in actions] and data["terminated"].sum() == 3


@pytest.mark.parametrize("dispatch", ["active", "nondelay"])
def test_pilot(dispatch):
    """No schedule of the pilot method is longer than that of one of its rules, and some are shorter."""
    rng, better = np.random.default_rng(0), 0
    for _ in range(5):
        times, machines = rng.integers(1, 100, (5, 4)), rng.random((5, 4)).argsort(axis=1)
        env = job_shop.JobShopEnv(instance={"times": times, "machines": machines}, dispatch=dispatch)
        obs, ended = env.reset()[0], False
        while not ended:
            obs, _, ended, _, info = env.step(job_shop.pilot(env, obs, rng))
        rules = [job_shop.play_rule(times, machines, rule, dispatch) for rule in ("FDD/MWKR", "MWKR")]
        assert info["eval"]["cost"] <= min(rules)
        better += info["eval"]["cost"] < min(rules)
    assert better


# ---- Cloning ----
@pytest.mark.parametrize("observation, action, head, flags", CASES, **IDS)
def test_cloning_loss(observation, action, head, flags, tmp_path):
    """The mean of -log pi of each demonstrated step alone; what is greedy is counted step by step."""
    path, env = demos_of(tmp_path, observation, action, head)
    args, actor, _ = set_up(partial(script.make_env, **env), demos=path, **flags)
    agent, (storage, actions) = actor.agent, actor.demos
    idx = np.random.default_rng(0).integers(storage.size, size=9)
    with torch.no_grad():
        loss, logs = script.behaviour_cloning(agent, storage.gather(idx), actions[idx])
        each = [(storage.gather(idx[k:k + 1]), actions[idx[k:k + 1]]) for k in range(9)]
        expected = [-agent(obs, action)[1].item() for obs, action in each]
        greedy = torch.cat([agent(obs, greedy=True)[0] for obs, _ in each])
    assert loss.item() == pytest.approx(np.mean(expected), abs=1e-4) and np.isfinite(expected).all()
    number = torch.zeros(actions.shape[1], dtype=torch.bool)
    for part in agent.head.parts:
        number[part.columns] = part.kind == "normal"
    if number.any():
        distance = (greedy - actions[idx])[:, number].abs().mean()
        assert logs["charts/demo_distance"].item() == pytest.approx(distance.item(), abs=1e-4)
    if not number.all():
        accuracy = (greedy == actions[idx])[:, ~number].all(1).float().mean()
        assert logs["charts/demo_accuracy"].item() == pytest.approx(accuracy.item())


def test_cloning_loss_by_hand(tmp_path):
    """A masked Discrete action, from the weights."""
    path, env = demos_of(tmp_path, "vector", "discrete", "mask")
    _, actor, _ = set_up(partial(script.make_env, **env), demos=path)
    data, agent = np.load(path), actor.agent
    with torch.no_grad():
        latent = agent.actor(torch.as_tensor(data["values/obs"]))
        logits = agent.head.heads["0"](latent).double().numpy()
        loss, _ = script.behaviour_cloning(agent, actor.demos[0].gather(np.arange(len(latent))), actor.demos[1])
    weights = np.exp(logits) * data["values/action_mask"]
    chosen = weights[np.arange(len(latent)), data["actions"][:, 0]]
    assert loss.item() == pytest.approx(-np.log(chosen / weights.sum(1)).mean(), rel=1e-5)


def test_clones_a_dispatching_rule(tmp_path):
    """MWKR is cloned from 40 episodes, by cloning alone and within a second of training."""
    kwargs = {"jobs": [3, 4], "machines": [3, 3]}
    record.save(path := str(tmp_path / "demos.npz"), record.record(job_shop.JobShopEnv(**kwargs), job_shop.mwkr, 40))
    script.main(small_args(
        script, env_id="envs:JobShop-v0", env_kwargs=kwargs, demos=path, num_envs=4, num_steps=8, total_timesteps=640,
        update_epochs=4, num_minibatches=2, learning_rate=1e-2, bc_anneal=0.0, pg_coef=0.0, vf_coef=0.0, ent_coef=0.0,
        run_dir=str(tmp_path / "runs")))
    log = scalars(tmp_path / "runs")
    accuracy, loss = (np.array(log[name])[:, 1] for name in ("charts/demo_accuracy", "losses/behaviour_cloning"))
    assert accuracy[-5:].mean() > 0.9 and loss[-5:].mean() < 0.5 * loss[0]


def test_weight_falls(tmp_path):
    """bc_coef falls to 0 within its share of the training, and demonstrations are not read from then on."""
    path, env = demos_of(tmp_path)
    args, actor, rollout = set_up(partial(script.make_env, **env), demos=path, bc_coef=2.0, bc_anneal=0.5)
    rng, optimizer = np.random.default_rng(0), torch.optim.Adam(actor.agent.parameters())
    for progress, coef in ((0.0, 2.0), (0.25, 1.0), (0.5, 0.0), (0.75, 0.0)):
        script.anneal(optimizer, actor, progress, args)
        assert actor.bc_coef == coef
        for (_, more), _ in actor.minibatches(rollout, rng, args):
            assert (more.demo_obs is None) == (coef == 0) and more.bc_coef == coef
    script.anneal(optimizer, actor, 0.9, small_args(script, bc_coef=2.0, bc_anneal=0.0))
    assert actor.bc_coef == 2.0


def test_warm_start(tmp_path):
    """--bc-updates gradient steps on the demonstrations come before the first rollout, and only there."""
    path, env = demos_of(tmp_path)
    args, actor, _ = set_up(partial(script.make_env, **env), demos=path, bc_updates=100,
                          learning_rate=1e-2)
    optimizer = torch.optim.Adam(actor.agent.parameters())
    cloning = lambda: script.behaviour_cloning(actor.agent, actor.demos[0].latest(), actor.demos[1])[0].item()
    losses = [cloning()]
    for progress in (0.5, 0.0):
        script.anneal(optimizer, actor, progress, args)
        losses.append(cloning())
    assert losses[1] == losses[0] and losses[2] < 0.9 * losses[0]


@pytest.mark.parametrize("aux", ["none", "reconstruct", "predict"])
def test_coefficients(aux, tmp_path):
    """The loss is the sum of what is logged, each with its coefficient."""
    path, env = demos_of(tmp_path, "mixed")
    args, actor, rollout = set_up(partial(script.make_env, **env), demos=path, aux=aux, aux_coef=0.3, bc_coef=0.7,
                                  pg_coef=0.5)
    inputs, batch = next(actor.minibatches(rollout, np.random.default_rng(0), args))
    loss, logs = script.ppo_loss(actor.agent, inputs, batch, args)
    coefs = {"policy_loss": 0.5, "value_loss": args.vf_coef, "entropy": -args.ent_coef, "behaviour_cloning": 0.7,
             aux: 0.3}
    expected = sum(coef * logs[f"losses/{name}"].item() for name, coef in coefs.items() if name != "none")
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert all(not value.requires_grad for value in logs.values())


# ---- Reconstruction and prediction ----
def plain_standardised(values):
    """numpy, column by column."""
    values = np.asarray(values, np.float64)
    std = values.std(0)
    return np.where(std > 1e-5 * np.abs(values.mean(0)), (values - values.mean(0)) / np.where(std > 0, std, 1), 0)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_reconstruction_loss(observation):
    """Errors of every leaf, row by row and observation by observation, against loops; the mean over leaves of the mean
    over observations of the mean over rows."""
    _, actor, _ = set_up(lambda: RandomEnv(observation), aux="reconstruct")
    agent, obs = actor.agent, actor.storage.gather(np.arange(24)[::-1])
    with torch.no_grad():
        latent = agent(obs)[4]
        torch.manual_seed(5)
        loss = agent.aux(agent, obs, latent).item()
        torch.manual_seed(5)
        moved, places = agent.aux.move(obs)
        features, elements = agent.encoder(moved)
        context, total = agent.actor(features), []
        for leaf in agent.aux.leaves:
            decoder = agent.aux.decoders[script.key(leaf.path)]
            values = obs[leaf.path].values if leaf.group else obs[leaf.path]
            rows = places[leaf.group].tolist() if leaf.group else range(24)
            owner = obs[leaf.path].batch.tolist() if leaf.group else range(24)
            rows_of, outs, wanted = {}, [], []
            for k, row in enumerate(rows):
                parts = [(context if leaf.group else latent)[owner[row]]]
                if leaf.path.endswith(".edges"):
                    nodes = leaf.path.removesuffix("edges") + "nodes"
                    parts += [elements[nodes][end] for end in obs[leaf.group].values[row]]
                elif leaf.group:
                    parts += [elements[leaf.group][row]]
                out, value = decoder.net(torch.cat(parts)[None])[0], values[row]
                if leaf.kind == "image":
                    value = value.movedim(-1, 0) if value.shape[2] < value.shape[0] else value
                    out = out[:, :value.shape[1], :value.shape[2]]
                rows_of.setdefault(owner[row], []).append(k)
                outs.append(out.flatten().double().numpy())
                wanted.append(value.flatten().double().numpy())
            if leaf.kind in ("discrete", "multidiscrete"):
                num = np.ravel(leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec)
                errors = []
                for out, value in zip(outs, wanted):
                    local = (value - np.ravel(leaf.space.start)).astype(int)
                    factors = zip(np.split(out, num.cumsum()[:-1]), local)
                    errors.append(np.mean([np.log(np.exp(logits).sum()) - logits[v] for logits, v in factors]))
            elif rows:
                shape = (-1, 1) if leaf.kind == "image" else (len(wanted), -1)
                target = plain_standardised(np.reshape(wanted, shape)).reshape(len(wanted), -1)
                errors = ((np.array(outs) - target) ** 2).mean(1)
            total.append(np.mean([np.mean([errors[k] for k in ks]) for ks in rows_of.values()]) if rows else 0.0)
    assert loss == pytest.approx(np.mean(total), rel=1e-4, abs=1e-5)


def test_a_quarter_of_the_rows_moves():
    """The rows of a group move together and keep their values; links, masks and dense leaves stay."""
    _, actor, _ = set_up(lambda: RandomEnv("set_of_dict", head="nodes"), aux="reconstruct", num_steps=40)
    obs = actor.storage.gather(np.arange(120))
    moved, places = actor.agent.aux.move(obs)
    (rows,) = places.values()
    a, b = (f"obs.{name}" for name in "ab")
    assert len(rows.unique()) == len(rows) == -(-len(obs[a].values) // 4)
    where = torch.cat([(obs[a].values == row).all(1).nonzero()[:1, 0] for row in moved[a].values])
    assert (where != torch.arange(len(where))).nonzero()[:, 0].tolist() == sorted(rows.tolist())
    assert sorted(where.tolist()) == list(range(len(where)))
    assert torch.equal(moved[b].values, obs[b].values[where])
    assert moved["action_mask"] is obs["action_mask"] and same(obs[a][1:], moved[a][1:])


class Sets(gym.Env):
    """Rows of a set are one number, drawn per observation (`alike`) or per row."""

    observation_space, action_space = spaces.Sequence(vector(1), stack=True), spaces.Discrete(2)

    def __init__(self, alike):
        self.alike = alike

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.step(0)[0], {}

    def step(self, action):
        rows = self.np_random.uniform(-1, 1, (1 if self.alike else 8, 1)).astype(np.float32)
        return rows.repeat(8 if self.alike else 1, 0), 0.0, False, False, {}


def test_no_row_is_copied():
    """A row is told from the others of its observation (rows that are alike), not from its own input (rows that have
    nothing to do with each other stay unknown: an error of 1)."""
    errors = []
    for alike in (True, False):
        torch.manual_seed(0)
        _, actor, _ = set_up(lambda: Sets(alike), aux="reconstruct", num_steps=60, num_envs=4, gnn_dim=16)
        agent, rng, losses = actor.agent, np.random.default_rng(0), []
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
        for _ in range(120):
            obs = actor.storage.gather(rng.permutation(240)[:120])
            loss = agent.aux(agent, obs, agent(obs)[4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        errors.append(np.mean(losses[-10:]))
    assert errors[0] < 0.5 and errors[1] > 0.8, errors


class Clock(gym.Env):
    """(env, episode, time) as a set of one row and as a vector; episodes of 3 or 5 steps, every other truncated."""

    observation_space = spaces.Dict(a=vector(3, high=1e6), b=spaces.Sequence(vector(3, high=1e6), stack=True))
    action_space, number = spaces.Discrete(2), 0

    def observe(self):
        now = np.array([self.number, self.episode, self.t], np.float32)
        return {"a": now, "b": now[None]}

    def reset(self, *, seed=None, options=None):
        self.number = self.number if seed is None else seed
        self.episode, self.t = getattr(self, "episode", -1) + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        ended = self.t == 3 + 2 * (self.number % 2)
        return self.observe(), 0.0, ended and self.episode % 2 == 0, ended and self.episode % 2 == 1, {}


@pytest.mark.parametrize("flags", [{}, {"num_workers": 2, "double_buffer": True}], ids=["one lane", "two lanes"])
def test_what_follows(flags):
    """Each step is paired with the next one of its environment unless its episode or the rollout ends there."""
    args, actor, rollout = set_up(Clock, aux="predict", num_steps=9, num_envs=4, **flags)
    seen = set()
    for (obs, more), _ in actor.minibatches(rollout, np.random.default_rng(0), args):
        now, after = obs["a"][more.rows], more.next_obs["a"]
        assert torch.equal(after - now, torch.tensor([0.0, 0.0, 1.0]).expand_as(now)) and len(now)
        assert torch.equal(more.next_obs["b"].values, after)
        seen |= {tuple(row) for row in now.int().tolist()}
    expected = set()
    for env in range(4):
        length = 3 + 2 * (env % 2)
        expected |= {(env, t // length, t % length) for t in range(8) if t % length < length - 1}
    assert seen == expected


@pytest.mark.parametrize("observation, action, head, flags", CASES, **IDS)
def test_prediction_loss(observation, action, head, flags):
    """The squared error against the encoding of each next observation alone, from the latent and the action alone."""
    args, actor, rollout = set_up(lambda: RandomEnv(observation, action, head), aux="predict", **flags)
    (obs, more), batch = next(actor.minibatches(rollout, np.random.default_rng(1), args))
    agent, idx = actor.agent, np.random.default_rng(1).permutation(24)[:12]
    with torch.no_grad():
        _, logs = script.ppo_loss(agent, (obs, more), batch, args)
        predicted, target = [], []
        for k in more.rows.tolist():
            alone, a = actor.storage.gather(idx[k:k + 1]), rollout.actions[idx[k]]
            features, elements = agent.encoder(alone)
            parts = [agent.actor(features)[0]]
            for part in agent.head.parts:
                value = a[part.columns]
                if part.kind == "choice":
                    parts.append(elements[agent.head.group][int(value)])
                elif part.kind == "categorical":
                    parts.append(torch.eye(part.size)[int(value)])
                else:
                    parts.append(value.float())
            predicted.append(agent.aux.net(torch.cat(parts)).double().numpy())
            target.append(agent.encoder(actor.storage.gather(idx[k:k + 1] + 3))[0][0].double().numpy())
    expected = ((np.array(predicted) - plain_standardised(target)) ** 2).mean()
    assert logs["losses/predict"].item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("aux", ["reconstruct", "predict", "demos"])
def test_encoder_learns(aux, tmp_path):
    """Every weight of CNN, GNN, set encoder and the actor's MLP has a gradient of each auxiliary loss, and the
    critic's none."""
    path, env = demos_of(tmp_path, "mixed")
    flags = {"demos": path} if aux == "demos" else {"aux": aux}
    args, actor, rollout = set_up(partial(script.make_env, **env), num_steps=16, pg_coef=0.0, ent_coef=0.0, vf_coef=0.0,
                                  **flags)
    agent = actor.agent
    inputs, batch = next(actor.minibatches(rollout, np.random.default_rng(0), args))
    script.ppo_loss(agent, inputs, batch, args)[0].backward()
    for name, weight in [*agent.encoder.named_parameters(), *agent.actor.named_parameters()]:
        assert weight.grad.abs().sum() > 0, name
    assert all(weight.grad is None or not weight.grad.any() for weight in agent.critic.parameters())


# ---- Whole runs ----
@pytest.mark.parametrize("env_id, kwargs", [("CartPole-v1", {}), ("envs:JobShop-v0", {"jobs": 3, "machines": 3})])
@pytest.mark.parametrize("aux", ["reconstruct", "predict"])
def test_losses_fall(aux, env_id, kwargs, tmp_path):
    """While PPO trains, on vectors and on graphs."""
    script.main(small_args(script, env_id=env_id, env_kwargs=kwargs, aux=aux, num_envs=8, num_steps=16, aux_coef=1.0,
                           total_timesteps=2560, num_minibatches=2, update_epochs=4, learning_rate=3e-3,
                           run_dir=str(tmp_path)))
    losses = [value for _, value in scalars(tmp_path)[f"losses/{aux}"]]
    assert np.mean(losses[-4:]) < 0.8 * losses[0], losses


def test_without_auxiliary_losses_it_is_ppo_graph(tmp_path):
    """--aux none without --demos ends with bitwise the weights and the log of ppo_graph.py."""
    flags = dict(env_id="Random-v0", env_kwargs={"observation": "mixed", "head": "mask"}, norm_obs=True,
                 total_timesteps=120, save_model=True)
    models, logs = [], []
    for module in (ppo_graph, script):
        module.main(small_args(module, **flags, run_dir=str(tmp_path / module.__name__)))
        path = run_path(tmp_path / module.__name__)
        models.append(torch.load(path / "model.pt", weights_only=True)["model"])
        logs.append(scalars(tmp_path / module.__name__))
        logs[-1].pop("charts/SPS")
    assert list(models[0]) == list(models[1]) and logs[0] == logs[1]
    assert all(map(torch.equal, models[0].values(), models[1].values()))


@pytest.mark.parametrize("aux", ["reconstruct", "predict"])
@pytest.mark.parametrize("observation, action, head, flags", CASES, **IDS)
def test_collection_and_training_agree(aux, observation, action, head, flags, tmp_path):
    """X2 with all auxiliary losses: the ratio is 1 before the first gradient step; every loss is a number."""
    path, env = demos_of(tmp_path, observation, action, head)
    script.main(small_args(script, **env, **flags, aux=aux, demos=path, bc_anneal=0.0, run_dir=str(tmp_path / "runs")))
    log = scalars(tmp_path / "runs")
    assert max(value for _, value in log["debug/collection_mismatch"]) < 1e-5
    for name in (f"losses/{aux}", "losses/behaviour_cloning"):
        assert len(log[name]) == 2 and np.isfinite([value for _, value in log[name]]).all()


@pytest.mark.parametrize("aux", ["reconstruct", "predict"])
def test_resume(aux, tmp_path):
    """A run that goes on from its second update ends with bitwise the same weights, the falling weight included."""
    env = dict(env_id="envs:JobShop-v0", env_kwargs={"jobs": 3, "machines": 3})
    demos = record.record(job_shop.JobShopEnv(**env["env_kwargs"]), job_shop.mwkr, 5)
    record.save(path := str(tmp_path / "demos.npz"), demos)
    flags = dict(**env, aux=aux, demos=path, bc_anneal=1.0, total_timesteps=120, checkpoint_every=1, keep_checkpoints=9,
                 save_model=True, run_dir=str(tmp_path / "runs"))
    script.main(small_args(script, **flags))
    folder = run_path(tmp_path / "runs")
    expected = torch.load(folder / "model.pt", weights_only=True)["model"]
    script.main(small_args(script, **flags | {"resume": str(folder / "checkpoint_000000000048.ckpt")}))
    result = torch.load(folder / "model.pt", weights_only=True)["model"]
    assert len(list(folder.glob("*.unused"))) == 3 and list(result) == list(expected)
    assert all(torch.equal(result[name], expected[name]) for name in expected)
