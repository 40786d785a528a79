"""Going on from a model: --freeze, --load-matching, and what is said of the file's flags."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import SmallEnv, command, graph_space, run, run_folder, sample, weights
from processes import SCRIPTS as WHOLE
from processes import SMALL, begun_earlier, folder_of, train, train_ranks

from cleanrl_graph import load_policy
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.freeze import freeze, split

SCRIPTS = [*WHOLE, "ppo_graph_async", "ppo_graph_aux", "ppo_graph_compile", "ppo_graph_agents"]
POISSON = dict(env_id="envs:PoissonGraph-v0", save_model=True)


def changed(one, two):
    """The names of the weights that are not bit by bit the same."""
    assert list(one) == list(two)
    return {name for name in one if not torch.equal(one[name], two[name])}


def inside(names, part):
    return {name for name in names if name.startswith(f"{part}.")}


# ---- --freeze ----
@pytest.mark.parametrize("name", SCRIPTS)
def test_only_the_others_are_trained(name, tmp_path, capsys):
    """From a model, with statistics of --norm-obs: the encoder's stay, too."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    env_id = "envs:Crowd-v0" if name == "ppo_graph_agents" else "envs:PoissonGraph-v0"
    flags = dict(env_id=env_id, norm_obs=True, save_model=True, **SMALL.get(name, {}))
    first = run(tmp_path / "a", script, **flags)
    before = weights(first.folder)
    flags |= dict(load_model=str(first.folder / "model.pt"), seed=2)
    more = run(tmp_path / "b", script, freeze=("encoder",), **flags)
    after = weights(more.folder)
    moved = changed(before, after)
    assert not inside(moved, "encoder") and inside(moved, "actor") and inside(moved, "critic")
    assert any(name.endswith(".mean") for name in inside(before, "encoder"))
    free = run(tmp_path / "c", script, **flags)
    moved = inside(changed(before, weights(free.folder)), "encoder")
    assert {name for name in moved if name.endswith((".weight", ".mean"))}


def test_parts_with_dots(tmp_path, capfd):
    """Names of parts in parts, and of single weights, in one word or several."""
    before = weights(run(tmp_path / "a", **POISSON, learning_rate=0.0).folder)  # as they began
    flags = dict(POISSON, freeze=("encoder.nets,critic", "actor.0.bias"))
    train(tmp_path / "b", **flags)
    after = weights(folder_of(tmp_path / "b"))
    moved = changed(before, after)
    frozen = inside(before, "encoder.nets") | inside(before, "critic") | {"actor.0.bias"}
    assert not moved & frozen and "actor.0.weight" in moved
    assert "frozen: encoder.nets, critic, actor.0.bias: " in capfd.readouterr().err


def test_no_gradient_and_no_norm():
    """Neither has what is frozen a gradient, nor does the norm by which gradients are clipped count
    it; parts are in evaluation mode."""
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)})
    net["norm"] = torch.nn.BatchNorm1d(2)
    lines = list(freeze(net, "a,norm"))
    assert lines == ["frozen: a, norm: 10 of 13 parameters"]
    net["b"](net["norm"](net["a"](torch.ones(4, 2)))).sum().backward()
    assert net["a"].weight.grad is None and net["norm"].weight.grad is None
    assert torch.equal(net["norm"].running_mean, torch.zeros(2)) and net["b"].training
    norm = torch.nn.utils.clip_grad_norm_(list(net.parameters()), 1e9)
    own = torch.cat([param.grad.flatten() for param in net["b"].parameters()])
    assert norm == pytest.approx(own.norm().item())


@pytest.mark.parametrize(
    "names, sentence",
    [
        (
            "encode",
            "--freeze encode: there is no such part with weights; "
            "there are encoder, actor, critic, head",
        ),
        (
            "encoder,actor.9",
            "--freeze actor.9: there is no such part with weights; there are actor.0",
        ),
        (
            "encoder.nets.x",
            "--freeze encoder.nets.x: there is no such part with weights; there are "
            "encoder.nets.leaf/graph/nodes",
        ),
        (
            "encoder actor critic head",
            "--freeze encoder actor critic head: these are all weights, nothing is trained",
        ),
    ],
)
def test_parts_that_are_not_there(names, sentence, tmp_path):
    with pytest.raises(UsageError) as error:
        run(tmp_path, freeze=tuple(names.split()), **POISSON)
    assert str(error.value) == sentence


def test_names():
    assert split("encoder, actor.0,") == split(["encoder,actor.0"]) == ["encoder", "actor.0"]
    assert split(()) == []


def test_resumed(tmp_path, monkeypatch):
    """As a run that was not stopped; what is frozen only now has moments in the optimizer, and does
    not move."""
    flags = dict(POISSON, checkpoint_every=2, freeze=("encoder",))
    whole = train(tmp_path / "a", anneal_lr=False, **flags)
    train(tmp_path / "b", anneal_lr=False, **flags | dict(total_timesteps=48))
    begun_earlier(tmp_path / "b")
    folder = train(tmp_path / "b", resume="auto", anneal_lr=False, **flags)
    assert not changed(weights(whole), weights(folder))
    before = weights(train(tmp_path / "c", **POISSON, checkpoint_every=2, total_timesteps=48))
    begun_earlier(tmp_path / "c")
    more = dict(resume=str(folder_of(tmp_path / "c")), **flags)
    moved = changed(before, weights(train(tmp_path / "c", **more)))
    assert moved and not inside(moved, "encoder")


def test_ranks(tmp_path):
    """Gradients that do not exist are not averaged. What is frozen after a resume stays, though the
    optimizer has moments of it."""
    flags = dict(POISSON, checkpoint_every=1)
    assert train_ranks(tmp_path / "a", total_timesteps=48, **flags) == [0, 0]
    before = weights(run_folder(tmp_path / "a"))
    begun_earlier(tmp_path / "a")
    flags |= dict(freeze=("encoder",), resume=str(run_folder(tmp_path / "a")))
    assert train_ranks(tmp_path / "a", total_timesteps=144, **flags) == [0, 0]
    moved = changed(before, weights(run_folder(tmp_path / "a")))
    assert inside(moved, "actor") and not inside(moved, "encoder")


# ---- --load-matching ----
class Tagged(SmallEnv):
    """A graph and a choice of a list."""

    observation_space = graph_space()

    def __init__(self, num_actions=4):
        self.action_space = spaces.Discrete(num_actions)
        self.rng = np.random.default_rng(0)

    def observe(self):
        return sample(self.observation_space, self.rng, lambda rng: rng.integers(2, 5))


gym.register("Tagged-v0", entry_point=Tagged)
TAGGED = dict(env_id="Tagged-v0", save_model=True, action_head="flat")


def test_weights_that_fit(tmp_path, capsys):
    """Those that have a place of the same name and shape are taken, the others start fresh. Without
    the flag the error names it."""
    folder = train(tmp_path / "a", **TAGGED)
    flags = dict(TAGGED, load_model=str(folder / "model.pt"), env_kwargs={"num_actions": 6})
    with pytest.raises(UsageError, match=r"is one of \d+ that differ; --load-matching takes those"):
        run(tmp_path / "b", **flags)
    flags |= dict(load_matching=True, learning_rate=0.0)  # they stay as they begin
    capsys.readouterr()
    after = weights(train(tmp_path / "c", **flags))
    fresh = weights(train(tmp_path / "d", **flags | dict(load_model=None, load_matching=False)))
    before = weights(folder)
    other = {name for name in before if before[name].shape != after[name].shape}
    assert other == {"head.heads.0.output.weight", "head.heads.0.output.bias"}
    for name, value in after.items():
        assert torch.equal(value, (fresh if name in other else before)[name])
    said = capsys.readouterr().err
    line = f"--load-matching takes {len(before) - len(other)} of {len(before)} weights; fresh: "
    assert line + ", ".join(name for name in after if name in other) + "\n" in said
    assert "; as given: --env-kwargs {'num_actions': 6}" in said


def test_another_network(tmp_path, capsys):
    """A flag of the network that is given stays; without --load-matching the error names it."""
    folder = train(tmp_path / "a", **TAGGED)
    flags = dict(TAGGED, load_model=str(folder), hidden_dims=(16, 8))
    with pytest.raises(UsageError, match="--load-matching keeps them, and takes the weights that"):
        run(tmp_path / "b", **flags)
    after = weights(train(tmp_path / "c", **flags | dict(load_matching=True, learning_rate=0.0)))
    assert after["actor.2.weight"].shape == (8, 16)
    assert torch.equal(after["actor.0.weight"], weights(folder)["actor.0.weight"])
    assert "as given: --hidden-dims (16, 8)" in capsys.readouterr().err


def test_nothing_fits(tmp_path):
    folder = train(tmp_path / "a", env_id="CartPole-v1")
    saved = torch.load(folder / "model.pt", weights_only=True)
    saved["model"] = {"other": torch.zeros(1)}
    torch.save(saved, folder / "model.pt")
    flags = dict(env_id="CartPole-v1", load_model=str(folder / "model.pt"), load_matching=True)
    with pytest.raises(UsageError, match="--load-matching: no weight fits in name and shape"):
        run(tmp_path / "b", **flags)
    with pytest.raises(UsageError, match="--load-matching needs a file: give --load-model FILE"):
        run(tmp_path / "c", env_id="CartPole-v1", load_matching=True)


# ---- Fine-tuning ----
def test_example_of_fine_tuning(tmp_path):
    """Trained on graphs of 5 nodes, then on larger ones with the encoder frozen; one line says what
    comes from the file."""
    small = "--num-envs 2 --num-steps 16 --hidden-dims 16 --gnn-dim 8 --no-cuda --eval-episodes 2"
    words = f"--env-id envs:VertexCover-v0 --total-timesteps 64 --run-dir {tmp_path}/small {small}"
    code, _, err = command(*words.split(), "--env-kwargs", '{"nodes": [5]}')
    assert code == 0, err
    model = run_folder(tmp_path / "small") / "model.pt"
    small = "--num-envs 2 --num-steps 16 --no-cuda --eval-episodes 2"
    words = (
        f"--load-model {model} --freeze encoder --learning-rate 1e-4 --total-timesteps 64 {small}"
    )
    words = [*words.split(), "--run-dir", tmp_path / "large", "--env-kwargs", '{"nodes": [12]}']
    code, out, err = command(*words)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("--load-model")]
    assert "taken from the file: " in line and "--env-id envs:VertexCover-v0" in line
    assert "--gnn-dim 8" in line and "; as given: --env-kwargs {'nodes': [12]}; not taken: " in line
    assert "frozen: encoder: " in err
    folder = run_folder(tmp_path / "large")
    moved = changed(weights(model.parent), weights(folder))
    assert moved and not inside(moved, "encoder")
    policy = load_policy(str(folder))
    obs, _ = policy.make_env().reset(seed=0)
    assert len(obs["graph"].nodes) == 12 and policy(obs) in range(12)
