"""Action masks from info["action_mask"], in each script that reads them: their formats, times and errors."""

from functools import partial

import gymnasium as gym
import numpy as np
import ppo_graph
import ppo_lstm_sparse
import pytest
import torch
from gymnasium import spaces
from helpers import graph_space, small_args, vector

A, B = np.array([1, 0, 1], np.int8), np.array([0, 1], np.int8)
PAIR = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2, start=4)))
MIXED = spaces.Tuple((spaces.Discrete(3), vector(2), spaces.MultiBinary(2), spaces.Discrete(2)))
NESTED = spaces.Dict(z=spaces.Discrete(3), y=vector(1), x=spaces.Tuple((vector(1), spaces.Discrete(2))))
FORMATS = {  # action space, mask, its entries
    "array": (spaces.Discrete(3), A, [1, 0, 1]),
    "list": (spaces.Discrete(3, start=7), [True, False, True], [1, 0, 1]),
    "parts": (spaces.MultiDiscrete([3, 2]), (A, B), [1, 0, 1, 0, 1]),
    "flat": (spaces.MultiDiscrete([3, 2]), np.concatenate([A, B]), [1, 0, 1, 0, 1]),
    "rows": (spaces.MultiDiscrete([[3, 2], [2, 3]]), ((A, B), (B, A)), [1, 0, 1, 0, 1, 0, 1, 1, 0, 1]),
    "matrix": (spaces.MultiDiscrete([3, 3]), np.stack([A, 1 - A]), [1, 0, 1, 0, 1, 0]),
    "tuple": (PAIR, (A, B), [1, 0, 1, 0, 1]),
    "None allows all": (PAIR, (None, B), [1, 1, 1, 0, 1]),
    "None for all": (PAIR, None, [1, 1, 1, 1, 1]),
    "mixed": (MIXED, (A, None, None, B), [1, 0, 1, 0, 1]),
    "only the discrete parts": (MIXED, (A, B), [1, 0, 1, 0, 1]),
    "dict": (NESTED, {"x": (None, B), "y": None, "z": A}, None),
    "dict without a key": (NESTED, {"x": (None, B), "z": A}, None),
}


class Masked(gym.Env):
    """Shows how many steps it made in all its episodes, with masks[that number] in info, which is left out where it is
    "no"; an episode ends with its `length`-th step."""

    def __init__(self, masks, action_space=None, length=100, truncated=True, observation_space=None):
        self.masks, self.length, self.truncated, self.num = masks, length, truncated, -1
        self.action_space = spaces.Discrete(3) if action_space is None else action_space
        self.observation_space = observation_space or vector(1, low=0, high=100)

    def observe(self):
        mask = self.masks[min(self.num, len(self.masks) - 1)]
        return np.array([self.num], np.float32), {} if isinstance(mask, str) else {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        self.num, self.t = self.num + 1, 0
        return self.observe()

    def step(self, action):
        self.num, self.t = self.num + 1, self.t + 1
        obs, info = self.observe()
        end = self.t == self.length
        return obs, 0.0, end and not self.truncated, end and self.truncated, info


def wrapped(*args, **kwargs):
    return ppo_graph.InfoActionMask(Masked(*args, **kwargs))


def leaf_arrays(step, leaves):
    return {leaf.path: parts[0] for leaf, parts in zip(leaves, step.parts)}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """P5: masks as gymnasium's `sample` takes them, of lists or arrays, and without the parts that have none."""
    action_space, mask, entries = FORMATS[name]
    if entries is None:  # in the order of the space, whatever that of the mask is
        entries = [e for key in action_space.keys() for e in {"z": [1, 0, 1], "y": [], "x": [0, 1]}[key]]
    envs = ppo_graph.Envs([lambda: wrapped([mask], action_space)])
    assert leaf_arrays(envs.reset(0), envs.leaves)["action_mask"].tolist() == [entries]
    agent = ppo_graph.Agent(envs.leaves, action_space, small_args())
    actor = ppo_graph.Actor(agent, envs.leaves, 1, small_args(), torch.device("cpu"))
    for _ in range(20):
        columns = actor.act(envs.last_steps[0])[0][0].tolist()
        chosen = [(part, int(columns[part.columns][0])) for part in agent.head.parts if part.kind == "categorical"]
        assert all(entries[part.mask][a] for part, a in chosen)


def test_spaces_of_the_wrapper():
    """P5: its observations are in its space; a Dict keeps its keys, and they keep their meaning."""
    env = wrapped([A])
    assert env.observation_space == spaces.Dict(obs=vector(1, low=0, high=100), action_mask=spaces.MultiBinary(3))
    assert env.observation_space.contains(env.reset()[0]) and env.observation_space.contains(env.step(0)[0])

    class Ids(Masked):
        def observe(self):
            graph = spaces.GraphInstance(np.zeros((2, 3), np.float32), None, None)
            return {"g": graph, "node_ids": np.array([5, 9])}, super().observe()[1]

    ids = spaces.Sequence(spaces.Box(0, 9, (), np.int64), stack=True)
    space = spaces.Dict(g=graph_space(), node_ids=ids)
    envs = ppo_lstm_sparse.Envs([lambda: ppo_lstm_sparse.InfoActionMask(Ids([A], observation_space=space))])
    assert {leaf.path for leaf in envs.leaves} == {"g.nodes", "g.edge_links", "node_ids", "action_mask"}
    assert ppo_lstm_sparse.Agent(envs.leaves, envs.action_space, small_args(ppo_lstm_sparse)).group == "g.nodes"


@pytest.mark.parametrize("workers", [0, 1])
def test_masks_belong_to_their_observations(workers):
    """P5: that of the last observation of a truncated episode stays with it, and the next episode begins with its own;
    an environment may write all of them into one array."""
    table = [np.array([n % 2, n % 3 == 0, 1], np.int8) for n in range(20)]

    class Reuses(Masked):
        mask = np.zeros(3, np.int8)

        def observe(self):
            self.mask[:] = table[self.num]
            return super().observe()[0], {"action_mask": self.mask}

    for truncated in (True, False):
        makers = [lambda: ppo_graph.InfoActionMask(Reuses([""], length=3, truncated=truncated))]
        envs, seen, finals = ppo_graph.make_envs(makers, small_args(num_workers=workers)), [], []
        step = envs.reset(0)
        for _ in range(8):
            arrays = leaf_arrays(step, envs.leaves)
            seen.append((arrays["obs"].item(), arrays["action_mask"][0].tolist()))
            finals += [[a.ravel().tolist() for a in arrays] for _, arrays in step.finals]
            step = envs.step([2])
        envs.close()
        first = seen[0][0]
        expected = [first + n for n in (0, 1, 2, 4, 5, 6, 8, 9)]  # 3 and 7 are last observations
        assert seen == [(n, table[int(n)].tolist()) for n in expected]
        names = [leaf.path for leaf in envs.leaves]
        assert [dict(zip(names, final)) for final in finals] == [
            {"obs": [first + n], "action_mask": table[int(first + n)].tolist()} for n in (3, 7)] * truncated


FAULTS = {  # masks of the first four observations, what the error says of the third one, of step 2
    "all masked": ([A, A, 0 * A, A], spaces.Discrete(3), r"all actions are masked: \[0, 0, 0\]"),
    "all masked in one part": ([(A, B), (A, B), (A, 0 * B)], PAIR, r"all actions are masked: \[1, 0, 1, 0, 0\]"),
    "too long": ([A, A, [1, 0, 1, 1]], spaces.Discrete(3), r"shape \(4,\) where \(3,\) is declared"),
    "too few parts": ([(A, B), (A, B), (A,)], PAIR, r"shape \(3,\) where \(5,\) is declared"),
    "fractions": ([A, A, A / 2], spaces.Discrete(3), "dtype float64 where int8 is declared"),
    "missing": ([A, A, "no"], spaces.Discrete(3), "is missing or cannot be read: KeyError 'action_mask'"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault, workers):
    """P5: env, leaf, step and value, also where failed environments are made anew: this one would fail again."""
    masks, action_space, sentence = FAULTS[fault]
    makers = [partial(wrapped, masks[:1 if i == 0 else None], action_space) for i in range(2)]
    envs = ppo_graph.make_envs(makers, small_args(num_workers=workers, on_env_error="restart"))
    try:
        envs.reset(0)
        envs.step([0, 0])
        kind, start = RuntimeError if workers else ValueError, "env 1, leaf .action_mask., step 2: "
        with pytest.raises(kind, match=start + sentence):
            envs.step([0, 0])
    finally:
        envs.close()


def test_no_mask_is_needed_where_an_episode_is_over():
    """P5: the last observation of a terminated episode is not read, that of a truncated one is."""
    envs = ppo_graph.Envs([lambda: wrapped([A, A, "no", A], length=2, truncated=False)])
    envs.reset(0)
    for _ in range(2):
        step = envs.step([0])
    assert step.terminated.tolist() == [True]
    envs = ppo_graph.Envs([lambda: wrapped([A, A, "no", A], length=2)])
    envs.reset(0)
    envs.step([0])
    with pytest.raises(ValueError, match="env 0, leaf 'action_mask', step 2: is missing"):
        envs.step([0])


gym.register("Masked-v0", entry_point=Masked)


def test_masks_that_come_too_late(tmp_path):
    """P5: masks that the first reset does not have are an error and are not ignored."""
    args = small_args(env_id="Masked-v0", env_kwargs={"masks": ["no", "no", "no", [1, 0, 1]]}, run_dir=str(tmp_path))
    with pytest.raises(ValueError, match="env 0, step 2: an action_mask in info, but that of the first reset had none"):
        ppo_graph.main(args)


def test_masks_for_actions_without_options():
    """P5: there is nothing to mask in a Box."""
    with pytest.raises(ValueError, match=r"info\['action_mask'\].*Masked.*Box.* has no Discrete part"):
        ppo_graph.make_env("Masked-v0", {"masks": [[1, 0]], "action_space": vector(2)})
