"""ppo_graph_aux.py: demonstrations are read and cloned, the losses of cloning, reconstruction and
prediction are those of loops over single steps, and each of them falls."""

from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    OBSERVATIONS,
    RandomEnv,
    SmallEnv,
    logged,
    run,
    same_weights,
    sample,
    small_args,
    stored,
    vector,
)

from cleanrl_graph import ppo_graph, services
from cleanrl_graph import ppo_graph_aux as script
from cleanrl_graph.services import check, demos

CPU = torch.device("cpu")
SMALL_SHOP = dict(env_id="envs:JobShop-v0", env_kwargs={"jobs": 3, "machines": 3})
CASES = [
    ("vector", "multidiscrete", "mask", {}),
    ("vector", "bits", "flat", {}),
    ("graph_categories", "discrete", "flat", {}),
    ("mixed", "mixed", "flat", {"autoregressive": True}),
    ("graph_edges", "", "nodes", {}),
    ("set", "", "avail_actions", {}),
    ("graph_edges", "", "pair", {"autoregressive": True}),
]
IDS = dict(ids=lambda v: v if isinstance(v, str) else "+".join(v))


def legal(env, obs, rng):
    """A random action that is not masked, in a RandomEnv."""
    allowed = lambda mask: rng.choice(np.flatnonzero(mask))
    if env.head == "mask":
        parts = np.split(obs["action_mask"], np.cumsum(env.num_options)[:-1])
        return np.array([allowed(part) for part in parts])
    if env.head == "nodes":
        return allowed(obs["action_mask"])
    if env.head == "pair":
        return tuple(allowed(column) for column in obs["action_mask"].T)
    if env.head == "avail_actions":
        return rng.integers(len(obs["avail_actions"]))
    return sample(env.action_space, rng)


def demos_of(folder, observation="vector", action="discrete", head="flat", num_episodes=6):
    """(path of the file of a few episodes in a RandomEnv, the flags of that environment)"""
    kwargs = {"observation": observation, "action": action, "head": head}
    flags = dict(env_id="Random-v0", env_kwargs=kwargs)
    path = str(folder / "demos.npz")
    record = dict(record=f"{__name__}:legal", record_episodes=num_episodes, seed=0)
    services.run(script, small_args(script, **flags, **record, demos=path))
    return path, flags


def collected(env, num_steps=8, num_envs=3, **flags):
    """args, an agent, and what it saw and did in copies of `env()`; ends [num_steps, num_envs]."""
    args = small_args(script, num_steps=num_steps, num_envs=num_envs, **flags)
    envs = check.make_envs(script, args, [env] * num_envs)
    probe = check.make_envs(script, args, [env])
    agent = script.Agent(envs.leaves, envs.action_space, args)
    storage, step, actions, dones = script.Storage(envs.leaves, CPU), envs.reset(0), [], []
    for _ in range(num_steps):
        with torch.no_grad():
            actions.append(agent(storage.append(step.obs))[0])
        step = envs.step(agent.head.env_actions(actions[-1], step.obs.counts))
        dones.append(step.terminated | step.truncated)
    actions = torch.cat([action[""] for action in actions])
    found = dict(args=args, agent=agent, probe=probe, storage=storage)
    return SimpleNamespace(actions=actions, dones=np.stack(dones), **found)


def load_demos(path, found):
    """(storage, actions) of a file that fits the environment of `collected`."""
    demos.check(path, found.probe)
    extras = script.Extras(found.agent, found.storage, SimpleNamespace(demos=path))
    return extras.demos, extras.actions


def same(a, b):
    return all(map(torch.equal, a, b)) if isinstance(a, tuple) else torch.equal(a, b)


# ---- Cloning ----
@pytest.mark.parametrize("observation, action, head, flags", CASES, **IDS)
def test_cloning_loss(observation, action, head, flags, tmp_path):
    """The mean of -log pi of each step alone; what is greedy is counted step by step."""
    path, env = demos_of(tmp_path, observation, action, head)
    found = collected(lambda: RandomEnv(**env["env_kwargs"]), **flags)
    agent, (storage, actions) = found.agent, load_demos(path, found)
    idx = np.random.default_rng(0).integers(len(actions), size=9)
    with torch.no_grad():
        logs = script.behaviour_cloning(agent, storage.gather(idx)[0], {"": actions[idx]})
        each = [(storage.gather(idx[k : k + 1])[0], actions[idx[k : k + 1]]) for k in range(9)]
        expected = [-agent(obs, {"": action})[1].item() for obs, action in each]
        greedy = torch.cat([agent(obs, greedy=True)[0][""] for obs, _ in each])
    assert logs["losses/behaviour_cloning"].item() == pytest.approx(np.mean(expected), abs=1e-4)
    assert np.isfinite(expected).all()
    number = torch.zeros(actions.shape[1], dtype=torch.bool)
    for head in agent.head.heads:
        number[head.part.columns] = head.part.n == 0
    assert ("charts/demo_distance" in logs) == bool(number.any())
    assert ("charts/demo_accuracy" in logs) == bool(not number.all())
    if number.any():
        distance = (greedy - actions[idx])[:, number].abs().mean()
        assert logs["charts/demo_distance"].item() == pytest.approx(distance.item(), abs=1e-4)
    if not number.all():
        accuracy = (greedy == actions[idx])[:, ~number].all(1).float().mean()
        assert logs["charts/demo_accuracy"].item() == pytest.approx(accuracy.item())


ALONE = dict(pg_coef=0.0, vf_coef=0.0, ent_coef=0.0)  # by cloning


def test_clones_a_dispatching_rule(tmp_path):
    """MWKR is cloned from 10 episodes, by cloning alone and within seconds."""
    env = dict(env_id="envs:JobShop-v0", env_kwargs={"jobs": [3, 4], "machines": [3, 3]})
    env["demos"] = str(tmp_path / "demos")
    services.run(script, small_args(script, **env, record="envs.job_shop:mwkr", record_episodes=10))
    flags = dict(num_envs=4, total_timesteps=384, update_epochs=4, learning_rate=2e-2)
    result = run(tmp_path / "runs", script, **env, **flags, **ALONE, bc_anneal=0.0)
    loss = logged(result, "losses/behaviour_cloning")
    assert np.mean(logged(result, "charts/demo_accuracy")[-5:]) > 0.9
    assert np.mean(loss[-5:]) < 0.5 * loss[0]


def totals(monkeypatch):
    """The losses that a run takes the gradient of, in order."""
    losses, backward = [], torch.Tensor.backward
    noted = lambda self: losses.append(self.item()) or backward(self)
    monkeypatch.setattr(torch.Tensor, "backward", noted)
    return losses


def test_weight_falls(tmp_path, monkeypatch):
    """bc_coef falls to 0 within its share, and demonstrations are not read from then on."""
    path, env = demos_of(tmp_path)
    alone = ALONE | dict(num_minibatches=1, update_epochs=1, learning_rate=0.0, bc_coef=2.0)
    alone |= dict(env, demos=path, anneal_lr=False, total_timesteps=96)
    for anneal, coefs in ((0.5, [2.0, 1.0]), (1.0, [2.0, 1.5, 1.0, 0.5]), (0.0, [2.0] * 4)):
        losses = totals(monkeypatch)
        log = run(tmp_path / f"runs{anneal}", script, **alone, bc_anneal=anneal).scalars
        monkeypatch.undo()
        cloning = log["losses/behaviour_cloning"]
        assert [step for step, _ in cloning] == [24 * (k + 1) for k in range(len(coefs))]
        expected = [coef * loss for coef, (_, loss) in zip(coefs, cloning)]
        expected += [0.0] * (4 - len(coefs))
        assert losses == pytest.approx(expected, rel=1e-5)


def test_warm_start(tmp_path, monkeypatch):
    """--bc-updates gradient steps come before the first rollout, and not when resumed."""
    path, env = demos_of(tmp_path)
    flags = dict(env, demos=path, bc_updates=50, learning_rate=1e-2, num_minibatches=1)
    flags |= dict(update_epochs=1, checkpoint_every=1)
    losses = totals(monkeypatch)
    result = run(tmp_path / "runs", script, **flags)
    assert len(losses) == 52 and np.mean(losses[40:50]) < 0.95 * np.mean(losses[:10])
    args = small_args(script, **flags | {"total_timesteps": 72})
    services.run(script, args, resume=str(result.folder))
    assert len(losses) == 53


def test_warm_start_normalises(tmp_path):
    """With --norm-obs the statistics begin with those of the demonstrations."""
    path, env = demos_of(tmp_path)
    args = small_args(script, **env, demos=path, norm_obs=True, bc_updates=3)
    envs = script.Envs([partial(script.make_env, args)])
    agent = script.Agent(envs.leaves, envs.action_space, args)
    extras = script.Extras(agent, script.Storage(envs.leaves, CPU), args)
    extras.clone(torch.optim.Adam(agent.parameters()))
    (rows,) = agent.encoder.rows.values()
    seen = extras.demos.whole().values[0].double()
    assert rows.count == len(seen)
    torch.testing.assert_close(rows.mean, seen.mean(0))
    torch.testing.assert_close(rows.var, seen.var(0, unbiased=False))


# ---- Reconstruction and prediction ----
def plain_standardised(values):
    """numpy, column by column."""
    values = np.asarray(values, np.float64)
    mean, std = values.mean(0), values.std(0)
    return np.where(std > 1e-5 * np.abs(mean), (values - mean) / np.where(std > 0, std, 1), 0)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_reconstruction_loss(observation):
    """Errors of every leaf against loops; means of rows, observations and leaves."""
    found = collected(lambda: RandomEnv(observation), aux="reconstruct")
    agent, obs = found.agent, found.storage.gather(np.arange(24)[::-1])[0]
    with torch.no_grad():
        latent = agent(obs)[4]
        torch.manual_seed(5)
        loss = agent.aux(agent, obs, latent).item()
        torch.manual_seed(5)
        moved, places = agent.aux.move(obs, None)
        features, elements = agent.encoder(moved)
        context, total = agent.actor(features), []
        told = [leaf for leaf in found.probe.leaves if leaf.is_input and not leaf.is_links]
        for leaf, decoder in zip(told, agent.aux.decoders, strict=True):
            values = obs[leaf.path].values
            rows = places[leaf.group].tolist() if leaf.group else range(24)
            owner = obs[leaf.path].batch.tolist() if leaf.group else range(24)
            rows_of, outs, wanted = {}, [], []
            for k, row in enumerate(rows):
                parts = [(context if leaf.group else latent)[owner[row]]]
                if leaf.path.endswith(".edges"):
                    nodes = leaf.path.removesuffix("edges") + "nodes"
                    parts += [elements[nodes].values[end] for end in obs[leaf.group].values[row]]
                elif leaf.group:
                    parts += [elements[leaf.group].values[row]]
                out, value = decoder(torch.cat(parts)[None])[0], values[row]
                if leaf.is_image:
                    value = value.movedim(leaf.channel_axis, 0)
                    out = out[:, : value.shape[1], : value.shape[2]]
                rows_of.setdefault(owner[row], []).append(k)
                outs.append(out.flatten().double().numpy())
                wanted.append(value.flatten().double().numpy())
            if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
                num, errors = np.array(script.num_options(leaf.space)), []
                for out, value in zip(outs, wanted):
                    local = (value - np.ravel(leaf.space.start)).astype(int)
                    factors = zip(np.split(out, num.cumsum()[:-1]), local)
                    error = [np.log(np.exp(logits).sum()) - logits[v] for logits, v in factors]
                    errors.append(np.mean(error))
            elif rows:
                shape = (-1, 1) if leaf.is_image else (len(wanted), -1)
                target = plain_standardised(np.reshape(wanted, shape)).reshape(len(wanted), -1)
                errors = ((np.array(outs) - target) ** 2).mean(1)
            means = [np.mean([errors[k] for k in ks]) for ks in rows_of.values()]
            total.append(np.mean(means) if rows else 0.0)
    assert loss == pytest.approx(np.mean(total), rel=1e-4, abs=1e-5)


def test_a_quarter_of_the_rows_moves():
    """Rows of a group move together; links, masks and dense leaves stay."""
    env = lambda: RandomEnv("set_of_dict", head="nodes")
    found = collected(env, aux="reconstruct", num_steps=40)
    obs = found.storage.gather(np.arange(120))[0]
    moved, places = found.agent.aux.move(obs, None)
    (rows,) = places.values()
    a, b = (f"obs.{name}" for name in "ab")
    assert len(rows.unique()) == len(rows) == -(-len(obs[a].values) // 4)
    where = torch.cat([(obs[a].values == row).all(1).nonzero()[:1, 0] for row in moved[a].values])
    assert (where != torch.arange(len(where))).nonzero()[:, 0].tolist() == sorted(rows.tolist())
    assert sorted(where.tolist()) == list(range(len(where)))
    assert torch.equal(moved[b].values, obs[b].values[where])
    assert moved["action_mask"] is obs["action_mask"] and same(obs[a][1:], moved[a][1:])
    few = {name: obs[name]._replace(values=obs[name].values[:4]) for name in (a, b)}
    moved, places = found.agent.aux.move(few, None)  # one row of 4, onto itself
    assert len(places["obs"]) == 1 and torch.equal(moved[a].values, few[a].values)


def test_no_row_is_copied():
    """A row is told from the others of its observation, not from its own input: rows that are one
    number for all are, those that are drawn for each are not."""
    rng, space, errors = np.random.default_rng(0), spaces.Sequence(vector(1), stack=True), []
    for num in (1, 8):
        drawn = lambda: rng.uniform(-1, 1, (num, 1)).astype(np.float32).repeat(8 // num, 0)
        storage, leaves = stored(space, [[drawn()] for _ in range(240)])
        args = small_args(script, aux="reconstruct", gnn_dim=16)
        agent, losses = script.Agent(leaves, spaces.Discrete(2), args), []
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
        for _ in range(120):
            obs = storage.gather(rng.permutation(240)[:120])[0]
            loss = agent.aux(agent, obs, agent(obs)[4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        errors.append(np.mean(losses[-10:]))
    assert errors[0] < 0.5 and errors[1] > 0.8, errors


class Clock(SmallEnv):
    """Shows a number of the episode, and the step, as a set of one row and as a vector."""

    observation_space = spaces.Dict(a=vector(2, high=9), b=spaces.Sequence(vector(2, high=9)))
    action_space, length = spaces.Discrete(2), 3

    def begin(self):
        self.number = self.np_random.random()
        self.terminates = self.number < 0.5

    def observe(self):
        now = np.array([self.number, self.t], np.float32)
        return {"a": now, "b": (now,)}


gym.register("AuxClock-v0", entry_point=Clock)


def test_what_follows(tmp_path, monkeypatch):
    """Each step is paired with the next one unless its episode or the rollout ends there."""
    seen, losses, batches = set(), [], []
    minibatches, predict = script.Memory.minibatches, script.predict

    def note_batch(self, rng, num):
        for idx, (obs, actions) in minibatches(self, rng, num):
            batches.append(obs)
            yield idx, (obs, actions)

    def note(agent, seen_now, rows, next_obs):
        now, after = batches[-1]["a"].values[rows], next_obs["a"].values
        assert torch.equal(after - now, torch.tensor([0.0, 1.0]).expand_as(now))
        assert torch.equal(next_obs["b"].values, after)
        seen.update(map(tuple, now.tolist()))
        losses.append((len(rows), predict(agent, seen_now, rows, next_obs)))
        return losses[-1][1]

    monkeypatch.setattr(script, "predict", note)
    monkeypatch.setattr(script.Memory, "minibatches", note_batch)
    flags = dict(num_steps=8, num_envs=4, num_minibatches=16, total_timesteps=32, seed=0)
    run(tmp_path, script, env_id="AuxClock-v0", aux="predict", **flags)
    # two of each whole episode, one of the third
    assert len(seen) == 4 * (2 + 2 + 1) and {step for _, step in seen} == {0, 1}
    assert any(num == 0 for num, _ in losses) and all(loss == 0 for num, loss in losses if num == 0)


@pytest.mark.parametrize("observation, action, head, flags", CASES, **IDS)
def test_prediction_loss(observation, action, head, flags):
    """The squared error against the encoding of each next observation alone."""
    found = collected(lambda: RandomEnv(observation, action, head), aux="predict", **flags)
    agent, storage, idx = found.agent, found.storage, np.random.default_rng(1).permutation(24)[:12]
    actions, dones, rng = found.actions, found.dones, np.random.default_rng(0)
    followed = [k for k in idx.tolist() if k < 21 and not dones.flat[k]]
    assert len(followed) < (idx < 21).sum() < 12
    found.args.aux_coef = 0.3
    with torch.no_grad():
        inputs = storage.gather(idx)[0], {"": actions[idx]}
        *_, latent, elements = agent(*inputs)
        extras = script.Extras(agent, storage, found.args)
        total, logs = extras.losses(1, rng, idx, inputs, dones, latent, elements)
        loss = logs["losses/predict"]
        assert total.item() == pytest.approx(0.3 * loss.item()) and len(logs) == 1
        predicted, target = [], []
        for k in followed:
            features, elements = agent.encoder(storage.gather(np.array([k]))[0])
            parts = [agent.actor(features)[0]]
            for part in (head.part for head in agent.head.heads):
                value = actions[k, part.columns]
                if part.group:
                    parts.append(elements[part.group].values[int(value)])
                elif part.n:
                    parts += [torch.eye(part.n)[int(entry)] for entry in value]
                else:
                    parts.append(value)
            predicted.append(agent.aux(torch.cat(parts)).double().numpy())
            after, _ = agent.encoder(storage.gather(np.array([k + 3]))[0])
            target.append(after[0].double().numpy())
    expected = ((np.array(predicted) - plain_standardised(target)) ** 2).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-3)


# ---- Whole runs ----
CARTPOLE = dict(env_id="CartPole-v1")


@pytest.mark.parametrize("env", [CARTPOLE, pytest.param(SMALL_SHOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("aux", ["reconstruct", "predict"])
def test_losses_fall(aux, env, tmp_path, monkeypatch):
    """While PPO trains, on vectors and on graphs. The loss is the sum of what is logged, each with
    its coefficient."""
    flags = dict(env, aux=aux, aux_coef=1.0, num_envs=8, num_steps=16, total_timesteps=2560)
    losses = totals(monkeypatch)
    log = run(tmp_path, script, **flags, update_epochs=4, learning_rate=3e-3, pg_coef=0.5).scalars
    values = [value for _, value in log[f"losses/{aux}"]]
    assert np.mean(values[-4:]) < 0.8 * values[0], values
    coefs = {"policy_loss": 0.5, "value_loss": 0.5, "entropy": -0.01, aux: 1.0}
    expected = sum(coef * log[f"losses/{name}"][-1][1] for name, coef in coefs.items())
    assert losses[-1] == pytest.approx(expected, rel=1e-5)


def test_without_auxiliary_losses_it_is_ppo_graph(tmp_path):
    """--aux none without --demos ends with bitwise the weights and the log of ppo_graph.py."""
    env = dict(env_id="Random-v0", env_kwargs={"observation": "mixed", "head": "mask"})
    flags = dict(env, norm_obs=True, total_timesteps=120, save_model=True)
    (a, b) = (run(tmp_path / module.__name__, module, **flags) for module in (ppo_graph, script))
    assert a.scalars.pop("charts/SPS") and b.scalars.pop("charts/SPS") and a.scalars == b.scalars
    assert same_weights(a.folder, b.folder)
