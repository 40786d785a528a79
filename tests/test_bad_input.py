"""What is wrong with an environment's data is said in one sentence: which environment, leaf, step and value."""

import copy
import importlib
import re

import gymnasium as gym
import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import ListEnv, graph_space, small_args, vector

MASK = spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True)
MASK2 = spaces.Sequence(spaces.Box(0, 1, (2,), np.int8), stack=True)
TWO = spaces.Discrete(2)
PAIR = spaces.Tuple([spaces.Discrete(9)] * 2)
GRAPH = spaces.Dict(g=graph_space(vector(2)))
ROWS = spaces.Sequence(vector(2), stack=False)


def graph(nodes=3, edges=2, links=((0, 1), (2, 0)), features=3):
    return {"g": spaces.GraphInstance(np.zeros((nodes, features), np.float32), np.zeros((edges, 2), np.float32),
                                      np.array(links))}


def put(value, at, array=None):
    """A copy of `array` (default: zeros [3, 3]) with `value` at `at`."""
    array = np.zeros((3, 3), np.float32) if array is None else np.array(array)
    array[at] = value
    return array


def nodes(array):
    return {"g": graph()["g"]._replace(nodes=array)}


def edges(array):
    return {"g": graph()["g"]._replace(edges=array)}


def masked(mask, space=None):
    return {"x": np.zeros(2, np.float32), "action_mask": np.array(mask, np.int8)}


def ragged_mask(mask):
    return graph() | {"action_mask": np.array(mask, np.int8)}


GRAPH_MASK = spaces.Dict(g=graph_space(vector(2)), action_mask=MASK)
GRAPH_MASK2 = spaces.Dict(g=graph_space(vector(2)), action_mask=MASK2)
THREE = spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary(3))
FIVE = spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary(5))
DEEP = spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), vector(2))))

# name -> (observation space, action space, good, bad, leaf, words of the error)
FAULTS = {
    "edge beyond the nodes": (GRAPH, TWO, graph(), graph(links=((0, 1), (2, 3))), "g.edge_links",
                              ["value 3", "index [1, 1]", "3 nodes"]),
    "negative edge": (GRAPH, TWO, graph(), graph(links=((0, -1), (2, 0))), "g.edge_links",
                      ["value -1", "index [0, 1]"]),
    "edge without nodes": (GRAPH, TWO, graph(), graph(nodes=0, edges=1, links=((0, 0),)), "g.edge_links",
                           ["value 0", "0 nodes"]),
    "edges of another number": (GRAPH, TWO, graph(), graph(edges=1), "g.edges", ["1 rows", "'g.edge_links' has 2"]),
    "links of three": (GRAPH, TWO, graph(), graph(links=((0, 1, 2), (2, 0, 1))), "g.edge_links", ["(2, 3)"]),
    "links as fractions": (GRAPH, TWO, graph(), graph(links=((0, 0.5), (1, 1))), "g.edge_links", ["dtype float64"]),
    "links transposed": (GRAPH, TWO, graph(edges=3, links=((0, 1),) * 3), graph(edges=3, links=((0, 1, 2), (2, 0, 1))),
                         "g.edge_links", ["(2, 3)"]),
    "too many features": (GRAPH, TWO, graph(), graph(features=4), "g.nodes", ["(3, 4)", "('rows', 3)"]),
    "NaN in nodes": (GRAPH, TWO, graph(), nodes(put(np.nan, (2, 1))), "g.nodes", ["value nan", "index [2, 1]"]),
    "inf in nodes": (GRAPH, TWO, graph(), nodes(put(-np.inf, (0, 2))), "g.nodes", ["value -inf", "index [0, 2]"]),
    "NaN in edges": (GRAPH, TWO, graph(), edges(put(np.nan, (1, 0), np.zeros((2, 2), np.float32))), "g.edges",
                     ["value nan", "index [1, 0]"]),
    "NaN in a box": (DEEP, TWO, {"a": (0, np.zeros(2))}, {"a": (0, np.array([0, np.nan]))}, "a.1",
                     ["value nan", "index [1]"]),
    "inf in a box": (vector(), TWO, 0.5, np.float32(np.inf), "obs", ["value inf"]),
    "box of another shape": (vector(2), TWO, np.zeros(2), np.zeros(3), "obs", ["shape (3,)", "(2,)"]),
    "box as text": (vector(2), TWO, np.zeros(2), ["0", "1"], "obs", ["dtype"]),
    "category too large": (DEEP, TWO, {"a": (1, np.zeros(2))}, {"a": (2, np.zeros(2))}, "a.0", ["value 2"]),
    "category below the start": (spaces.Discrete(3, start=5), TWO, 5, 4, "obs", ["value 4"]),
    "category that is NaN": (spaces.Discrete(3), TWO, 0, np.nan, "obs", ["dtype float64"]),
    "one of many categories": (spaces.MultiDiscrete([3, 2, 4]), TWO, np.array([2, 1, 3]), np.array([2, 2, 3]), "obs",
                               ["value 2", "index [1]"]),
    "category of a node": (spaces.Graph(spaces.Discrete(3), None), TWO,
                           spaces.GraphInstance(np.array([0, 1]), None, None),
                           spaces.GraphInstance(np.array([0, 3]), None, None), "obs.nodes", ["value 3", "index [1]"]),
    "rows of another width": (ROWS, TWO, (np.zeros(2),) * 3, (np.zeros(3),) * 2, "obs", ["(2, 3)", "('rows', 2)"]),
    "rows of several widths": (ROWS, TWO, (np.zeros(2),) * 3, (np.zeros(3), np.zeros(2)), "obs", []),
    "keys of a set disagree": (spaces.Sequence(spaces.Dict(a=vector(1), b=vector(1)), stack=True), TWO,
                               {"a": np.zeros((2, 1)), "b": np.zeros((2, 1))},
                               {"a": np.zeros((2, 1)), "b": np.zeros((3, 1))},
                               "obs.b", ["3 rows", "has 2"]),
    "key is missing": (spaces.Dict(a=vector(1), b=vector(1)), TWO, {"a": np.zeros(1), "b": np.zeros(1)},
                       {"a": np.zeros(1)}, "b", []),
    "mask of another length": (THREE, spaces.Discrete(3), masked([1, 0, 1]), masked([1, 0]), "action_mask",
                               ["shape (2,)"]),
    "all masked": (THREE, spaces.Discrete(3), masked([1, 0, 1]), masked([0, 0, 0]), "action_mask", ["all", "masked"]),
    "one part all masked": (FIVE, spaces.MultiDiscrete([3, 2]), masked([1, 0, 0, 0, 1]), masked([1, 1, 1, 0, 0]),
                            "action_mask", ["all", "masked"]),
    "ragged mask too short": (GRAPH_MASK, spaces.Discrete(9), ragged_mask([1, 0, 1]), ragged_mask([1, 0]),
                              "action_mask", ["2 rows", "'g.nodes' has 3"]),
    "all nodes masked": (GRAPH_MASK, spaces.Discrete(9), ragged_mask([1, 0, 1]), ragged_mask([0, 0, 0]), "action_mask",
                         ["all", "masked"]),
    "no second node": (GRAPH_MASK2, PAIR, ragged_mask([[1, 0], [0, 1], [0, 0]]), ragged_mask([[1, 0], [1, 0], [1, 0]]),
                       "action_mask", ["all", "masked"]),
    "no row to choose": (spaces.Dict(avail_actions=ROWS), spaces.Discrete(9), {"avail_actions": (np.zeros(2),)},
                         {"avail_actions": ()}, "avail_actions", []),
}


def play(envs, num_steps=4):
    try:
        envs.reset(0)
        for _ in range(num_steps):
            action = envs.action_space.sample()
            envs.step([copy.deepcopy(action) for _ in range(3)])
    finally:
        envs.close()


def makers_of(space, action_space, good, bad):
    """Three environments, the last of which shows `bad` after its second step."""
    return [lambda i=i: ListEnv(space, [good, good, bad if i == 2 else good, good, good], action_space)
            for i in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault, workers):
    """P5, S6: env index, leaf path, step and value of a malformed observation, from worker processes as well."""
    space, action_space, good, bad, leaf, words = FAULTS[fault]
    head = "avail_actions" if leaf == "avail_actions" else "auto"
    play(ppo_graph.Envs(makers_of(space, action_space, good, good), head))  # without the fault all is well
    with pytest.raises(RuntimeError if workers else ValueError) as error:
        args = small_args(num_workers=workers, action_head=head)
        play(ppo_graph.make_envs(makers_of(space, action_space, good, bad), args))
    message = str(error.value)
    for word in ["env 2", f"'{leaf}'", "step 2", *words]:
        assert word in message, message


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_reward_that_is_not_finite(reward):
    """P5: a reward of NaN or inf names the environment, the step and the value."""
    class Bad(ListEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, reward if self.t == 2 else 1.0, *rest

    zero = np.zeros(2, np.float32)
    envs = ppo_graph.Envs([lambda: ListEnv(vector(2), [zero] * 5), lambda: Bad(vector(2), [zero] * 5)])
    envs.reset(0)
    envs.step([0, 0])
    with pytest.raises(ValueError, match=rf"env 1, step 2: reward {reward}"):
        envs.step([0, 0])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("bad", [[np.nan, 0], [np.inf, 0]])
def test_final_observation_is_checked(bad, workers):
    """P5: the last observation of a truncated episode goes into the advantages, so it is checked like any other."""
    class Ends(ListEnv):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, False, self.t == 2, {}

    zero = np.zeros(2, np.float32)
    makers = [lambda: Ends(vector(2), [zero, zero, np.array(bad, np.float32)])]
    envs = ppo_graph.make_envs(makers, small_args(num_workers=workers))
    try:
        envs.reset(0)
        envs.step([0])
        sentence = rf"env 0, leaf 'obs', step 2: value {bad[0]} at index \[0\]"
        with pytest.raises((ValueError, RuntimeError), match=sentence):
            envs.step([0])
    finally:
        envs.close()


def test_final_edges_are_checked():
    """P5: an edge to a missing node in the last observation of a truncated episode."""
    class Ends(ListEnv):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, False, True, {}

    envs = ppo_graph.Envs([lambda: Ends(GRAPH, [graph(), graph(links=((0, 1), (2, 9)))])])
    envs.reset(0)
    with pytest.raises(ValueError, match="env 0, leaf 'g.edge_links', step 1: value 9"):
        envs.step([0])


@pytest.mark.parametrize("space", [spaces.Text(4), spaces.Dict(a=vector(2), b=spaces.OneOf([TWO, vector(1)]))])
def test_unsupported_observation_space(space):
    """P1: found before the first step, with the leaf's path and the space."""
    leaf = "b" if isinstance(space, spaces.Dict) else "obs"
    with pytest.raises(TypeError, match=f"leaf '{leaf}': observation space (Text|OneOf).*not supported"):
        ppo_graph.Envs([lambda: ListEnv(space, [None])])


@pytest.mark.parametrize("space", [spaces.Text(4), spaces.Box(0, 3, (2,), np.int32), spaces.Sequence(TWO),
                                   spaces.Dict(a=TWO, b=spaces.Graph(vector(1), None))])
def test_unsupported_action_space(space):
    """P4: found before the first step."""
    with pytest.raises(TypeError, match="action space .* is not supported"):
        ppo_graph.Envs([lambda: ListEnv(vector(2), [np.zeros(2)], space)])


@pytest.mark.parametrize("mask, action_space", [
    (spaces.MultiBinary(4), spaces.Discrete(3)),
    (spaces.MultiBinary(3), spaces.MultiDiscrete([3, 2])),
    (MASK, spaces.Discrete(3)),  # ragged, but there is nothing to choose from
    (MASK, vector(2)),
])
def test_mask_that_does_not_fit(mask, action_space):
    """P5: a mask that cannot belong to the action space is found before the first step."""
    def make():
        space = spaces.Dict(x=vector(2), action_mask=mask)
        return ListEnv(space, [{"x": np.zeros(2), "action_mask": np.ones(4, np.int8)}], action_space)

    with pytest.raises(ValueError, match="action_mask|--action-head"):
        envs = ppo_graph.Envs([make])
        ppo_graph.Agent(envs.leaves, envs.action_space, small_args())


@pytest.mark.parametrize("mask", [spaces.Dict(a=spaces.MultiBinary(3)), spaces.Tuple([spaces.MultiBinary(3)]),
                                  spaces.Sequence(spaces.Box(0, 1, (3,), np.int8), stack=True)])
def test_mask_of_a_shape_that_has_no_meaning(mask):
    """P5: a nested mask, or one with more columns than the action has parts, is an error and is not ignored."""
    space = spaces.Dict(g=graph_space(), action_mask=mask)
    with pytest.raises((ValueError, TypeError), match="action_mask"):
        envs = ppo_graph.Envs([lambda: ListEnv(space, [None], spaces.Discrete(3))])
        ppo_graph.Agent(envs.leaves, envs.action_space, small_args())


def test_one_sentence_for_the_whole_run(tmp_path):
    """P5: main() ends with the sentence, whatever it was doing."""
    gym.register("Broken-v0", entry_point=lambda: ListEnv(vector(2), [np.zeros(2)] * 3 + [np.full(2, np.nan)]))
    for workers in (0, 2):
        with pytest.raises((ValueError, RuntimeError), match="env 0, leaf 'obs', step 3: value nan at index"):
            ppo_graph.main(small_args(env_id="Broken-v0", run_dir=str(tmp_path), num_workers=workers))
    del gym.registry["Broken-v0"]


def test_unknown_eval_suite(tmp_path):
    """An unknown suite names the suites that there are."""
    args = small_args(env_id="envs:JobShop-v0", eval_suite="nope", run_dir=str(tmp_path), total_timesteps=0)
    with pytest.raises(ValueError, match="--eval-suite nope: .*'abz'.*'ft'"):
        ppo_graph.main(args)


def test_unknown_eval_suite_is_found_before_training(tmp_path, monkeypatch):
    """A typo in --eval-suite does not cost a training."""
    monkeypatch.setattr(ppo_graph, "collect", lambda *args: pytest.fail("training began"))
    with pytest.raises(ValueError, match="--eval-suite nope"):
        ppo_graph.main(small_args(env_id="envs:JobShop-v0", eval_suite="nope", run_dir=str(tmp_path)))


def test_model_of_another_network(tmp_path):
    """--load-model of other shapes names the file and the flag."""
    leaves, path = ppo_graph.leaves_of(vector(3)), str(tmp_path / "model.pt")
    agent = ppo_graph.Agent(leaves, TWO, small_args())
    ppo_graph.save_model(path, agent, small_args())
    ppo_graph.load_model(path, agent, torch.device("cpu"))
    other = ppo_graph.Agent(leaves, TWO, small_args(hidden_dims=(5,)))
    with pytest.raises(ValueError, match="--load-model .*model.pt"):
        ppo_graph.load_model(path, other, torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        ppo_graph.load_model(str(tmp_path / "nowhere.pt"), agent, torch.device("cpu"))


# name of the flag -> values that no script takes, and what is said about them
FLAGS = {
    "num_envs": [(0, "--num-envs 0: .* at least 1"), (-3, "--num-envs -3: .* at least 1")],
    "num_steps": [(0, "--num-steps 0: .* at least 1")],
    "num_minibatches": [(0, "--num-minibatches 0: .* at least 1"), (10**6, "--num-minibatches 1000000 exceeds")],
    "update_epochs": [(0, "--update-epochs 0: .* at least 1")],
    "total_timesteps": [(10, "--total-timesteps 10 is less than one rollout of 3 envs x 8 steps"),
                        (-1, "--total-timesteps -1: .* at least 0")],
    "learning_rate": [(float("nan"), "--learning-rate nan: a finite number"), (-1e-3, "--learning-rate -0.001: .* 0")],
    "gamma": [(1.5, "--gamma 1.5: .* at most 1"), (float("nan"), "--gamma nan")],
    "gae_lambda": [(-0.1, "--gae-lambda -0.1: .* at least 0")],
    "clip_coef": [(-1.0, "--clip-coef -1.0: .* at least 0")],
    "ent_coef": [(float("inf"), "--ent-coef inf: a finite number")],
    "vf_coef": [(float("nan"), "--vf-coef nan: a finite number")],
    "max_grad_norm": [(float("nan"), "--max-grad-norm nan"), (-1.0, "--max-grad-norm -1.0: .* at least 0")],
    "num_workers": [(-1, "--num-workers -1: .* at least 0")],
    "env_timeout": [(-1.0, "--env-timeout -1.0: .* at least 0"), (float("nan"), "--env-timeout nan")],
    "checkpoint_every": [(-1, "--checkpoint-every -1: .* at least 0")],
    "keep_checkpoints": [(0, "--keep-checkpoints 0: .* at least 1")],
    "eval_episodes": [(-1, "--eval-episodes -1: .* at least 0")],
    "eval_samples": [(-1, "--eval-samples -1: .* at least 0")],
    "gnn_dim": [(0, "--gnn-dim 0: .* at least 1")],
    "gnn_layers": [(0, "--gnn-layers 0: .* at least 1")],
    "hidden_dims": [((16, 0), r"--hidden-dims \(16, 0\): widths of at least 1")],
    "seed": [(-1, "--seed -1: it must be at least 0")],
    "env_id": [("Nope-v0", "Environment `Nope` doesn't exist"), ("envs:Nope-v0", "Environment `Nope` doesn't exist"),
               ("nowhere:Nope-v0", "No module named 'nowhere'")],
    "env_kwargs": [({"nope": 1}, "unexpected keyword argument 'nope'"), ({"key": 3}, "key")],
    "mask_obs": [("a", "--mask-obs a: .* is not a Box vector that has these entries"),
                 ("0", "--mask-obs 0: .* is not a Box vector that has these entries")],
    "action_head": [("avail_actions", "--action-head avail_actions")],
    "eval_suite": [("nope", "--eval-suite nope: envs:BestOfSet-v0 has the suites")],
    "load_model": [("nowhere.pt", "nowhere.pt"), ("{text}", "--load-model .*text is not a model.pt of --save-model"),
                   ("{empty}", "--load-model .*empty is not a model.pt"), ("{folder}", "folder")],
    "resume": [("nowhere", "--resume nowhere: there is no checkpoint that can be read"),
               ("{folder}", "--resume .*folder: there is no checkpoint in this folder"),
               ("{text}", "--resume .*text: there is no checkpoint that can be read"),
               ("{empty}", "--resume .*empty: there is no checkpoint that can be read")],
}
OWN_FLAGS = {
    "ppo_framestack": {"obs_shifts": [("1", "--obs-shifts '1'"), ("a:b", "--obs-shifts 'a:b': a range")],
                       "action_shifts": [("0", "--action-shifts '0'"), ("3:1", "--action-shifts '3:1'")]},
    "ppo_lstm_sparse": {"lstm_dim": [(0, "--lstm-dim 0")], "num_minibatches": [(4, "--num-minibatches 4 exceeds")],
                        "remember_edges": [(True, "--remember-edges")]},
    "ppo_gtrxl": {"dim": [(12, "--dim 12"), (0, "--dim 0")], "num_heads": [(0, "--num-heads 0")],
                  "num_layers": [(0, "--num-layers 0")], "memory_length": [(-1, "--memory-length -1")],
                  "bf16": [(True, "--bf16")], "attention": [("flex", "--attention flex")],
                  "num_minibatches": [(4, "--num-minibatches 4 exceeds")]},
}
CASES = [(script, flag, value, sentence)
         for script in ("ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl")
         for flag, values in list(FLAGS.items() if script == "ppo_graph" else []) + list(
             OWN_FLAGS.get(script, {}).items()) for value, sentence in values]


@pytest.mark.parametrize("script, flag, value, sentence", CASES)
def test_bad_flag(script, flag, value, sentence, tmp_path, monkeypatch):
    """P5, S6: a flag that makes no sense is an error with its name before anything is trained or written. What is in
    shared blocks is tested once."""
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "collect", lambda *args: pytest.fail("training began"))
    (tmp_path / "text").write_text("some text"), (tmp_path / "empty").touch(), (tmp_path / "folder").mkdir()
    if isinstance(value, str) and value.startswith("{"):
        value = str(tmp_path / value[1:-1])
    args = small_args(module, **{"env_id": "envs:BestOfSet-v0", "run_dir": str(tmp_path / "runs"), flag: value})
    with pytest.raises((ValueError, TypeError, OSError, ModuleNotFoundError, gym.error.Error)) as error:
        module.main(args)
    assert re.search(sentence, str(error.value)), error.value
    assert not (tmp_path / "runs").exists()


# what differs -> (flags of the first run, of the second, sentence)
OTHERS = {
    "env_id": ({}, {"env_id": "envs:PoissonGraph-v0"}, "--env-id envs:PoissonGraph-v0 where .* envs:BestOfSet-v0"),
    "env_kwargs": ({}, {"env_kwargs": {"max_size": 4}}, "--env-kwargs {'max_size': 4} where the checkpoint has {}"),
    "num_envs": ({}, {"num_envs": 2}, "--num-envs 2 where the checkpoint has 3"),
    "network": ({}, {"hidden_dims": (5,)}, "its network is not that of the flags"),
    "script": ({}, {"script": "ppo_lstm_sparse"}, "its network is not that of the flags"),
    "shifts": ({"script": "ppo_framestack", "obs_shifts": "-1:0"}, {"script": "ppo_framestack", "obs_shifts": "-9,0"},
               "--obs-shifts -9,0 where the checkpoint has -1:0"),
    "memory": ({"script": "ppo_gtrxl"}, {"script": "ppo_gtrxl", "memory_length": 99},
               "--memory-length 99 where the checkpoint has 32"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_resume_of_another_run(case, tmp_path):
    """X3: what does not fit the checkpoint is named."""
    first, second, sentence = OTHERS[case]
    same = dict(env_id="envs:BestOfSet-v0", run_dir=str(tmp_path), checkpoint_every=1)

    def main(script="ppo_graph", **flags):
        module = importlib.import_module(script)
        module.main(small_args(module, **same | flags))

    main(**first)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match=sentence):
        main(resume=str(folder), **second)


def test_model_is_no_checkpoint(tmp_path, capsys):
    """X3: model.pt for --resume and a checkpoint for --load-model are told from each other."""
    same = dict(env_id="envs:BestOfSet-v0", run_dir=str(tmp_path / "runs"))
    ppo_graph.main(small_args(save_model=True, checkpoint_every=1, **same))
    (folder,) = (tmp_path / "runs").iterdir()
    (tmp_path / "model.pt").write_bytes((folder / "model.pt").read_bytes())
    with pytest.raises(ValueError, match="--resume .*model.pt: there is no checkpoint that can be read"):
        ppo_graph.main(small_args(resume=str(tmp_path / "model.pt"), **same))
    assert "model.pt is not a checkpoint" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--load-model .*ckpt is not a model.pt"):
        ppo_graph.main(small_args(load_model=ppo_graph.checkpoints_in(str(folder))[0], **same))


def test_there_are_enough_cases():
    """P5: at least 60 kinds of bad input are in the tables alone."""
    assert len(FAULTS) + len(CASES) + len(OTHERS) >= 90
