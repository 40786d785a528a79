"""Going on from a model: --freeze, --load-matching, and what is said of the file's flags."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import SmallEnv, command, graph_space, run, run_folder, sample, weights
from processes import begun_earlier, folder_of, train, train_ranks

from cleanrl_graph import load_policy
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.freeze import freeze

# Those that do not have the same `train`
SCRIPTS = "ppo_graph ppo_graph_async ppo_graph_aux ppo_graph_compile ppo_graph_agents".split()
POISSON = dict(env_id="envs:PoissonGraph-v0", save_model=True)


def changed(one, two):
    """The names of the weights that are not bit by bit the same."""
    assert list(one) == list(two)
    return {name for name in one if not torch.equal(one[name], two[name])}


def inside(names, part):
    return {name for name in names if name.startswith(f"{part}.")}


# ---- --freeze ----
@pytest.mark.parametrize("name", SCRIPTS)
def test_only_the_others_are_trained(name, tmp_path):
    """From a model, with statistics of --norm-obs: the encoder's stay, too."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    env_id = "envs:Crowd-v0" if name == "ppo_graph_agents" else "envs:PoissonGraph-v0"
    flags = dict(env_id=env_id, norm_obs=True, save_model=True)
    first = run(tmp_path / "a", script, **flags)
    before = weights(first.folder)
    flags |= dict(load_model=str(first.folder / "model.pt"), seed=2)
    more = run(tmp_path / "b", script, freeze=("encoder",), **flags)
    moved = changed(before, weights(more.folder))
    assert not inside(moved, "encoder") and inside(moved, "actor") and inside(moved, "critic")
    assert any(name.endswith(".mean") for name in inside(before, "encoder"))
    if name == "ppo_graph":
        free = run(tmp_path / "c", script, **flags)
        moved = inside(changed(before, weights(free.folder)), "encoder")
        assert {name.rpartition(".")[2] for name in moved} >= {"weight", "mean"}


def test_parts_with_dots(tmp_path):
    """Names of parts in parts, and of single weights, in one word or several."""
    before = weights(run(tmp_path / "a", **POISSON, learning_rate=0.0).folder)  # as they began
    names = ("encoder.nets,critic", "actor.0.bias")
    after = weights(run(tmp_path / "b", **POISSON, freeze=names).folder)
    frozen = inside(before, "encoder.nets") | inside(before, "critic") | {"actor.0.bias"}
    moved = changed(before, after)
    assert not moved & frozen and "actor.0.weight" in moved


def test_no_gradient_and_no_norm():
    """Neither has what is frozen a gradient, nor does the norm by which gradients are clipped count
    it; parts are in evaluation mode."""
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)})
    net["norm"] = torch.nn.BatchNorm1d(2)
    lines = list(freeze(net, "a, norm,"))
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
        ("encoder,actor.9", "actor.9: there is no such part with weights; there are actor.0$"),
        ("encoder actor critic head", "encoder actor critic head: these are all weights, nothing"),
    ],
)
def test_parts_that_are_not_there(names, sentence, tmp_path):
    with pytest.raises(UsageError, match=f"^--freeze {sentence}"):
        run(tmp_path, freeze=tuple(names.split()), **POISSON)


def test_resumed(tmp_path):
    """What is frozen only now has moments in the optimizer, and does not move."""
    flags = dict(POISSON, checkpoint_every=2, freeze=("encoder",))
    before = weights(train(tmp_path / "c", **POISSON, checkpoint_every=2, total_timesteps=48))
    begun_earlier(tmp_path / "c")
    more = dict(resume=str(folder_of(tmp_path / "c")), **flags)
    moved = changed(before, weights(train(tmp_path / "c", **more)))
    assert moved and not inside(moved, "encoder")


def test_ranks(tmp_path):
    """Gradients that do not exist are not averaged."""
    flags = dict(POISSON, freeze=("encoder",))
    assert train_ranks(tmp_path / "a", **flags) == [0, 0]
    alone = weights(train(tmp_path / "b", **flags))
    moved = changed(alone, weights(run_folder(tmp_path / "a")))
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


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """The folder of a run."""
    return train(tmp_path_factory.mktemp("tagged"), **TAGGED)


def test_weights_that_fit(tagged, tmp_path, capsys):
    """Those that have a place of the same name and shape are taken, the others start fresh. Without
    the flag the error names it."""
    flags = dict(TAGGED, load_model=str(tagged / "model.pt"), env_kwargs={"num_actions": 6})
    with pytest.raises(UsageError, match=r"is one of \d+ that differ; --load-matching takes those"):
        run(tmp_path / "b", **flags)
    flags |= dict(load_matching=True, learning_rate=0.0)  # they stay as they begin
    capsys.readouterr()
    after = weights(train(tmp_path / "c", **flags))
    fresh = weights(train(tmp_path / "d", **flags | dict(load_model=None, load_matching=False)))
    before = weights(tagged)
    other = {name for name in before if before[name].shape != after[name].shape}
    assert other == {"head.heads.0.output.weight", "head.heads.0.output.bias"}
    for name, value in after.items():
        assert torch.equal(value, (fresh if name in other else before)[name])
    said = capsys.readouterr().err
    line = f"--load-matching takes {len(before) - len(other)} of {len(before)} weights; fresh: "
    assert line + ", ".join(name for name in after if name in other) + "\n" in said
    assert "; as given: --env-kwargs {'num_actions': 6}" in said


def test_another_network(tagged, tmp_path, capsys):
    """A flag of the network that is given stays; without --load-matching the error names it."""
    flags = dict(TAGGED, load_model=str(tagged), hidden_dims=(16, 8))
    with pytest.raises(UsageError, match="--load-matching keeps them, and takes the weights that"):
        run(tmp_path / "b", **flags)
    after = weights(train(tmp_path / "c", **flags | dict(load_matching=True, learning_rate=0.0)))
    assert after["actor.2.weight"].shape == (8, 16)
    assert torch.equal(after["actor.0.weight"], weights(tagged)["actor.0.weight"])
    assert "as given: --hidden-dims (16, 8)" in capsys.readouterr().err


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
