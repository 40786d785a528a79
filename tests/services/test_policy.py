"""A trained policy in a program of one's own: it does what `play` does, in every script."""

import copy
import importlib
import json
import pickle
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import shared_blocks
import torch
from helpers import run, run_folder, small_args

from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services import checkpoint
from cleanrl_graph.services.arguments import args_of, given_in
from cleanrl_graph.services.policy import load_policy, take_flags

FOLDER = Path(ppo_graph.__file__).parent
SCRIPTS = [path.stem for path in shared_blocks.scripts(FOLDER)]
SCRIPTS.remove("ppo_graph_agents")  # its environments have a Sequence of actions
MEMORIES = ["ppo_framestack", "ppo_gtrxl", "ppo_lstm_sparse"]
NAMED = {"observation": "graph_edges", "action": "box"}


class Noted(gym.Wrapper):
    """Keeps the actions of its first episode."""

    def __init__(self, env):
        super().__init__(env)
        self.actions, self.open = [], True

    def step(self, action):
        self.actions += [np.copy(action)] * self.open
        result = self.env.step(action)
        self.open &= not (result[2] or result[3])
        return result


def saved(path, name, **flags):
    """A model.pt of an agent whose weights are random, and the actions of its greedy episodes in 4
    environments."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    more = {"prev_reward": True} if hasattr(script.Args, "prev_reward") else {}
    args = small_args(script, num_steps=3, **{"env_id": "Random-v0"} | more | flags)
    envs = [Noted(script.make_env(args)) for _ in range(4)]
    all_envs = script.Envs([lambda env=env: env for env in envs])
    agent = script.Agent(all_envs.leaves, envs[0].action_space, args)
    for parameter in agent.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    torch.save({"model": agent.state_dict(), "args": vars(args), "script": name}, path)
    script.play(agent, args, all_envs, True)
    return [env.actions for env in envs]


def episode(policy, env, **kwargs):
    """The actions of an episode."""
    (obs, _), reward, ended, actions = env.reset(**kwargs), 0.0, False, []
    while not ended:
        actions.append(policy(obs, reward))
        assert env.action_space.contains(actions[-1])
        obs, reward, terminated, truncated, _ = env.step(actions[-1])
        ended = terminated or truncated
    return actions


class Unsafe(dict):
    """What unpickling of others' files must not make."""


CARTPOLE = gym.make("CartPole-v1")


def same(ours, theirs):
    pairs = zip(ours, theirs)
    return len(ours) == len(theirs) and all(np.allclose(a, b, atol=2e-4) for a, b in pairs)


NODES = {"observation": "set", "head": "nodes"}


@pytest.mark.parametrize("name", ["ppo_graph", *MEMORIES])
def test_as_play_does(tmp_path, name):
    """One environment after the other by one policy, which forgets at each episode's start; memory
    or not."""
    played = saved(tmp_path / "model.pt", name, env_kwargs=NODES)
    policy = load_policy(tmp_path / "model.pt")
    for i, actions in enumerate(played):
        policy.reset()
        assert same(episode(policy, policy.make_env(), seed=10_001 + i), actions)


@pytest.mark.parametrize(
    "name, flags",
    [(name, {"env_kwargs": NAMED}) for name in SCRIPTS]
    + [(name, {"env_id": "envs:NeighbourMean-v0"}) for name in ("ppo_graph", "ppo_gtrxl")],
)
def test_many_environments(tmp_path, name, flags):
    """All environments at once; those whose episodes end begin others, as in `play`; with an action
    per node, too."""
    played, N = saved(tmp_path / "model.pt", name, **flags), 4
    policy = load_policy(tmp_path / "model.pt", num_envs=N)
    envs = [Noted(policy.make_env()) for _ in range(N)]
    observations = [env.reset(seed=10_001 + i)[0] for i, env in enumerate(envs)]
    rewards, starts = [0.0] * N, [True] * N
    for _ in range(max(map(len, played))):
        for i, action in enumerate(policy(observations, rewards, starts)):
            observations[i], rewards[i], terminated, truncated, _ = envs[i].step(action)
            starts[i] = terminated or truncated
            if starts[i]:
                observations[i], _ = envs[i].reset()
    assert all(not env.open and same(env.actions, actions) for env, actions in zip(envs, played))
    if policy.has_memory:
        action, *_ = policy(observations, rewards, [True, False, False, False])  # it forgets
        assert same([action], [load_policy(tmp_path / "model.pt")(observations[0])])
        with pytest.raises(ValueError, match="^num_envs=4: give a list of 4 observations$"):
            policy(observations[:2])
    else:
        assert same(policy(observations[:2]), policy(tuple(observations))[:2])
        with pytest.raises(ValueError, match="^num_envs=4: give a list of 4 observations$"):
            policy(observations[0])


def test_details(tmp_path):
    """Log-probability and value are the network's: what it says of that action."""
    saved(tmp_path / "model.pt", "ppo_gtrxl", env_id="CartPole-v1")
    policy = load_policy(tmp_path / "model.pt", num_envs=3)
    agent = policy.agent
    noted = []
    agent.register_forward_hook(lambda agent, inputs, outputs: noted.append(outputs))
    action, log_prob, value = policy(np.eye(3, 4, dtype=np.float32), details=True)
    _, expected, _, expected_value = noted[0][:4]
    assert len(action) == 3 and log_prob.shape == value.shape == (3,)
    assert (log_prob == expected.numpy()).all() and (value == expected_value.numpy()).all()
    assert len(set(value.tolist())) == 3 and (log_prob < 0).all()


def test_sampled_actions(tmp_path):
    """Not greedy: actions are drawn from the policy's distribution, by its own generator."""
    saved(tmp_path / "model.pt", "ppo_graph", env_kwargs=NAMED)
    policy = load_policy(tmp_path / "model.pt", greedy=False)
    obs = policy.make_env().reset(seed=1)[0]
    draws = [policy(obs) for _ in range(2)]
    assert not same(draws[:1], draws[1:])
    policy.generator.manual_seed(3)
    first = policy(obs)
    policy.generator.manual_seed(3)
    assert same([first], [policy(obs)])
    copies = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    wanted = [policy(obs) for _ in range(9)]
    for other in copies:
        torch.manual_seed(7)
        assert same([other(obs) for _ in range(9)], wanted)


def test_spaces_are_enough(tmp_path):
    """Without an environment, and for a script under another name, which the file names or the
    caller hands over."""
    played = saved(tmp_path / "model.pt", "ppo_graph", env_kwargs=NAMED, env_id="Random-v0")
    env = gym.make("Random-v0", **NAMED)
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    (tmp_path / "my_ppo.py").write_text((FOLDER / "ppo_graph.py").read_text())
    torch.save(model | {"script": "my_ppo"}, tmp_path / "mine.pt")
    torch.save(model | {"args": model["args"] | {"env_id": "gone:Gone-v0"}}, tmp_path / "gone.pt")
    words = "mine.pt: it was saved by my_ppo.py, which Python does not find"
    with pytest.raises(ImportError, match=words):
        load_policy(tmp_path / "mine.pt", env)
    words = r"--env-id gone:Gone-v0 .*No module named 'gone'.* \(or give load_policy an `env`\)$"
    with pytest.raises(ValueError, match=words):
        load_policy(tmp_path / "gone.pt")
    mine = load_policy(tmp_path / "mine.pt", env, script=ppo_graph)
    for policy in (mine, load_policy(tmp_path / "gone.pt", env)):
        assert same(episode(policy, env, seed=10_001), played[0])
    sys.path.append(str(tmp_path))
    try:
        assert same(episode(load_policy(tmp_path / "mine.pt", env), env, seed=10_001), played[0])
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("my_ppo")


def test_what_does_not_fit(tmp_path):
    path = tmp_path / "model.pt"
    saved(path, "ppo_graph", env_kwargs=NAMED)
    model = torch.load(path, weights_only=True)
    weights = model["model"]
    renamed = {name.replace("actor", "policy"): value for name, value in weights.items()}
    nan = weights | {"critic.0.bias": torch.full_like(weights["critic.0.bias"], np.nan)}
    lstm = {"args": {"exp_name": "", "lstm_dim": 3}, "script": "ppo_lstm_sparse"}
    old = "it is of ppo_graph.py and Random-v0, its weights do not fit .* was changed before .*"
    for saves, sentence, more in [
        ({"a": torch.zeros(1)}, "model.pt: not a file that a run wrote", {}),
        (model, "(?s)observation space Box.*action space Discrete", dict(env=CARTPOLE)),
        (model | lstm, r"flags \['lstm_dim'\], ppo_graph does not", dict(script=ppo_graph)),
        (model | {"model": renamed}, old + "policy.* is one of 4 that differ$", {}),
        (model | {"model": nan}, "model.pt: the weights critic.0.bias are not finite", {}),
        (model | {"model": Unsafe()}, "model.pt: not a file that a run wrote", {}),
    ]:
        torch.save(saves, path)
        with pytest.raises(ValueError, match=sentence):
            load_policy(path, **more)
    torch.save(model, path)
    with pytest.raises(ValueError, match="env 0, leaf 'obs.nodes', step 1: cannot be read"):
        load_policy(path)(np.zeros(3))
    with pytest.raises(OSError):
        load_policy(tmp_path / "none.pt")


def test_files_that_a_folder_means(tmp_path):
    """In the folder of a run its model.pt, else its newest checkpoint, else its best.pt; in one
    above it that of the newest."""

    def bias(path):
        return load_policy(path).agent.critic[0].bias[0].item()

    with pytest.raises(ValueError, match="no model.pt or checkpoint is in this folder or be"):
        load_policy(tmp_path)
    folder = run(tmp_path / "runs", env_id="CartPole-v1", checkpoint_every=1).folder
    newest = max(folder.glob("*.ckpt"))
    written = checkpoint.read(newest)
    model = {"script": "ppo_graph", "args": written["args"], "model": written["model"]}
    expected = model["model"]["critic.0.bias"][0].item()
    for name, value in (("best.pt", 2.0), ("model.pt", 1.0)):
        assert bias(folder) == bias(newest) == expected
        model["model"]["critic.0.bias"][0] = value
        torch.save(model, folder / name)
    assert bias(folder) == bias(str(tmp_path)) == 1
    (folder / "model.pt").unlink()
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ckpt: not a file that a run wrote"):
        load_policy(newest)
    for path in folder.glob("*.ckpt"):
        path.unlink()
    assert bias(folder) == 2


def test_all_entries_of_a_list(tmp_path):
    """Without an environment the policy is one for each entry of --env-kwargs, also for those with
    more rows to choose from than the first."""
    sizes = [{"jobs": 2, "machines": 2}, {"jobs": 5, "machines": 3}]
    saved(tmp_path / "model.pt", "ppo_graph", env_id="envs:JobShop-v0", env_kwargs=sizes)
    policy = load_policy(tmp_path / "model.pt")
    for i in range(2):
        env = policy.make_env(i)
        assert env.action_space.contains(policy(env.reset(seed=1)[0]))


# ---- --load-model: flags of the file ----
def test_evaluation_alone_takes_the_flags_of_the_file(tmp_path, capsys):
    """Only --load-model: the same network, memory and environment play the same episodes; others of
    its kwargs may be given."""
    script = importlib.import_module("cleanrl_graph.ppo_gtrxl")
    flags = dict(env_id="envs:JobShop-v0", env_kwargs={"jobs": 2, "machines": 2}, norm_obs=False)
    flags |= dict(dim=16, num_layers=2, prev_reward=True)
    first = run(tmp_path / "a", script, save_model=True, eval_episodes=2, **flags)
    more = dict(total_timesteps=0, eval_episodes=2, cuda=False, save_model=True)
    alone = args_of(script, **more, load_model=str(first.folder / "model.pt"))
    played = lambda folder, **more: services.run(script, alone, run_dir=str(folder), **more)
    flags_of = lambda folder: json.loads((run_folder(folder) / "args.json").read_text())
    assert played(tmp_path / "b") == first.rows
    said = capsys.readouterr().err
    assert "it/s" not in said  # no bar of no steps
    assert "taken from the file" in said and "not taken" not in said
    assert flags.items() <= flags_of(tmp_path / "b").items()
    larger = {"jobs": 4, "machines": 2}
    assert played(tmp_path / "c", env_kwargs=larger) != first.rows
    assert flags_of(tmp_path / "c")["env_kwargs"] == larger
    assert list(tmp_path.rglob("model.pt")) == [first.folder / "model.pt"]  # the newest, still


def test_flags_that_make_another_network(tmp_path, monkeypatch, capsys):
    """A flag that is given, in a program or on the command line, and differs from the file's is
    named. What does not change the weights is free, and so is everything about the training."""
    path = tmp_path / "model.pt"
    saved(path, "ppo_gtrxl", env_kwargs=NAMED, gnn_dim=8)
    # Words of another program, as an Optuna study's, are none of its business
    monkeypatch.setattr(sys, "argv", ["study.py", "--gnn-dim", "64", "--env-id", "Any-v0"])
    script = importlib.import_module("cleanrl_graph.ppo_gtrxl")

    def taken(*words, **flags):
        args = args_of(script, load_model=str(path), **flags)
        take_flags(args, given_in(words))
        return [args.memory_length, args.gnn_dim, args.env_id, args.env_kwargs]

    words = "model.pt: the file is of another network: --gnn-dim 16, it has 8; --dim 32"
    with pytest.raises(ValueError, match=words):
        taken(gnn_dim=16, dim=32)
    found = taken(memory_length=7, learning_rate=1.0, env_id="CartPole-v1")
    line = "model.pt was trained on Random-v0, not CartPole-v1: taken from the file: "
    assert line in capsys.readouterr().err
    assert found == [7, 8, "CartPole-v1", {}] and taken() == [64, 8, "Random-v0", NAMED]
    taken("--exp-name", "gnn_dim")  # a value is no flag
    for flag in ("--gnn-dim=64", "--no-prev-reward"):  # as the defaults are
        words = flag.partition("=")[0].replace("no-", "")
        with pytest.raises(ValueError, match=words):
            taken(flag)


# ---- Processes and threads ----
@pytest.mark.parametrize(
    "name, gnn", [("ppo_graph", "gatv2"), *[(name, "gin") for name in MEMORIES]]
)
def test_policy_for_another_process(tmp_path, name, gnn):
    """Plain pickle takes it along, with faster layers and in the middle of an episode: the copies
    go on as it does, each for itself."""
    saved(tmp_path / "model.pt", name, env_kwargs=NAMED, gnn=gnn)
    policy = load_policy(tmp_path / "model.pt")
    env = policy.make_env()
    (obs, _), reward = env.reset(seed=1), 0.0
    for _ in range(5):  # a rollout has 3 steps
        obs, reward, *_ = env.step(policy(obs, reward))
    copies = [pickle.loads(pickle.dumps(policy)) for _ in range(2)]
    for _ in range(4):
        expected = policy(obs, reward)
        assert all(np.array_equal(copy(obs, reward), expected) for copy in copies)
        obs, reward, *_ = env.step(expected)


def test_flags_that_are_gone(tmp_path):
    """A file with a flag of before plays where it has the value that scripts still mean."""
    saved(tmp_path / "model.pt", "ppo_gtrxl", dim=8)
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    model["args"] |= {"bf16": False, "readout": "meanmax"}
    torch.save(model, tmp_path / "model.pt")
    load_policy(tmp_path / "model.pt")
    model["args"] |= {"readout": "sum"}
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"it has the flags \['readout'\]"):
        load_policy(tmp_path / "model.pt")
