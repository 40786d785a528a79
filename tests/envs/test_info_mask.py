"""Action masks from info and other places: what is found, what they leave, and when."""

import contextlib
import importlib
import re

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import IDS, MASK, UsageErrors, graph_space, make_envs, plain, run, small_args, vector

from cleanrl_graph import ppo_graph
from cleanrl_graph.envs import fitting
from cleanrl_graph.envs.wrappers import InfoActionMask, find_mask, wrap_all
from cleanrl_graph.services import command

A, B = np.array([1, 0, 1], np.int8), np.array([0, 1], np.int8)
D, MD = spaces.Discrete, spaces.MultiDiscrete
BOX = vector(2)
PAIR = spaces.Tuple((D(3), D(2, start=4)))
MIXED = spaces.Tuple((D(3), BOX, spaces.MultiBinary(2), D(2)))
NESTED = spaces.Dict(z=D(3), y=BOX, x=spaces.Tuple((BOX, D(2))))
FORMATS = {  # action space, mask, its entries
    "array": (D(3), A, [1, 0, 1]),
    "list": (D(3, start=7), [True, False, True], [1, 0, 1]),
    "flat": (MD([3, 2]), np.concatenate([A, B]), [1, 0, 1, 0, 1]),
    "rows": (MD([[3, 2], [2, 3]]), ((A, B), (B, A)), [1, 0, 1, 0, 1, 0, 1, 1, 0, 1]),
    "None for all columns": (MD([3, 2]), None, [1] * 5),
    "None allows all": (PAIR, (None, B), [1, 1, 1, 0, 1]),
    "mixed": (MIXED, (A, None, None, B), [1, 0, 1, 0, 1]),
    # in the order of the space
    "dict": (NESTED, {"x": (None, B), "y": None, "z": A}, [1, 0, 1, 0, 1]),
}
NEW_FORMS = {  # which make_envs and wrap_all find
    "may each bit be 1": (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
    "two entries a bit": (spaces.MultiBinary(2), [[1, 0], [1, 1]], [1, 0, 1, 1]),
    "bits beside options": (MIXED, (A, None, [0, 1], B), [1, 0, 1, 0, 1, 0, 1]),
    "pairs": (MD([3, 2]), np.eye(3, 2, dtype=np.int8), [1, 0, 0, 1, 0, 0]),
    "pairs of a Tuple": (PAIR, np.eye(3, 2, dtype=bool), [1, 0, 0, 1, 0, 0]),
}


class Masked(gym.Env):
    """Shows how many steps it made in all its episodes, or `obs`, with masks[that number] in info,
    which is left out where it is "no"; an episode ends with its `length`-th step."""

    def __init__(self, masks, action_space=None, length=100, truncated=True, space=None, obs=None):
        self.masks, self.length, self.truncated, self.num = masks, length, truncated, -1
        self.action_space = D(3) if action_space is None else action_space
        self.observation_space, self.obs = space or vector(1, low=0, high=100), obs

    def observe(self):
        mask = self.masks[min(self.num, len(self.masks) - 1)]
        info = {} if isinstance(mask, str) else {"action_mask": mask}
        return np.array([self.num], np.float32) if self.obs is None else self.obs, info

    def reset(self, *, seed=None, options=None):
        self.num, self.t = self.num + 1, 0
        return self.observe()

    def step(self, action):
        self.num, self.t = self.num + 1, self.t + 1
        obs, info = self.observe()
        end = self.t == self.length
        return obs, 0.0, end and not self.truncated, end and self.truncated, info


def wrapped(*args, **kwargs):
    return InfoActionMask(Masked(*args, **kwargs))


def arrays_of(flat, envs):
    """Leaf path -> values of a Flat."""
    return {leaf.path: values for leaf, values in zip(envs.leaves, flat.values)}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """Masks as gymnasium's `sample` takes them, of lists or arrays, and without the parts that have
    none. The policy draws what they allow."""
    action_space, mask, entries = FORMATS[name]
    env = wrapped([mask], action_space)
    assert env.observation_space["action_mask"] == spaces.MultiBinary(len(entries))
    for obs in (env.reset()[0], env.step(None)[0]):
        assert obs["action_mask"].tolist() == entries and obs in env.observation_space
    if action_space is MIXED:  # the services' masks have two entries a bit
        entries = [*entries[:3], 1, 1, 1, 1, *entries[3:]]
    envs = make_envs([lambda: env])
    flat = envs.reset(0).obs
    assert arrays_of(flat, envs)["action_mask"].tolist() == [entries]
    agent = ppo_graph.Agent(envs.leaves, action_space, small_args())
    storage = ppo_graph.Storage(envs.leaves, torch.device("cpu"))
    actions = plain(agent)(storage.append(ppo_graph.join([flat] * 100)))[0]
    masked = [head.part for head in agent.head.heads if head.part.mask]
    assert sum(part.k * part.n for part in masked) == len(entries)
    for part in masked:
        allowed = np.reshape(entries[part.entries], (part.k, part.n))
        for own, column in zip(allowed, actions[:, part.columns].long().T):
            assert sorted(set(column.tolist())) == np.flatnonzero(own).tolist()


@pytest.mark.parametrize("name", NEW_FORMS)
@pytest.mark.parametrize("truncated", [True, False])
def test_masks_of_bits_and_of_pairs(name, truncated):
    """They have as many entries as the first one; a last observation without one allows all."""
    action_space, mask, entries = NEW_FORMS[name]
    env = find_mask(Masked([mask, mask, "no"], action_space, 2, truncated))
    assert env.observation_space["action_mask"] == spaces.MultiBinary(len(entries))
    obs, _ = env.reset()
    assert obs["action_mask"].tolist() == entries and obs in env.observation_space
    assert env.step(None)[0].keys() == {"obs"}
    assert env.step(None)[0]["action_mask"].tolist() == [1] * len(entries)


@pytest.mark.parametrize(
    "method, note",
    [
        (lambda: A, "the mask of actions is the method legal_moves(), 3 entries"),
        (lambda: A / 2, "the method legal_moves() is [0.5"),
    ],
)
def test_a_method_is_never_ignored(method, note):
    """It is used where it fits, under any name that a mask has; else a note says why not."""
    env = Masked(["no"])
    env.legal_moves = method
    env = find_mask(wrap_all(env, ()))
    assert note in env.mask_note
    assert isinstance(env, InfoActionMask) == note.endswith("3 entries")
    if isinstance(env, InfoActionMask):
        assert env.reset()[0]["action_mask"].tolist() == [1, 0, 1]


def test_masks_of_taxi(tmp_path):
    """Gymnasium's own: no move against a wall, no illegal drop-off. A copy goes on alike."""
    env = InfoActionMask(gym.make("Taxi-v4", max_episode_steps=5))
    env.reset(seed=0)
    copy = cloudpickle.loads(cloudpickle.dumps(env))
    for _ in range(5):
        np.testing.assert_equal(env.step(1), copy.step(1))
    run_ = run(tmp_path, env_id="Taxi-v4", env_kwargs={"max_episode_steps": 10})
    assert min(value for _, value in run_.scalars["charts/episodic_return_min"]) >= -10


@pytest.mark.parametrize("truncated", [True, False])
def test_masks_belong_to_their_observations(truncated):
    """That of the last observation of a truncated episode stays with it, and the next episode
    begins with its own; an environment may write all of them into one array."""
    table = [np.array([n % 2, n % 3 == 0, 1], np.int8) for n in range(20)]

    class Reuses(Masked):
        mask = np.zeros(3, np.int8)

        def observe(self):
            self.mask[:] = table[self.num]
            return super().observe()[0], {"action_mask": self.mask}

    makers = [lambda: InfoActionMask(Reuses([""], length=3, truncated=truncated))]
    envs, seen, finals = make_envs(makers), [], []
    step = envs.reset(0)
    for _ in range(8):
        for shown, flats in ((seen, [step.obs]), (finals, step.finals)):
            for flat in flats:
                arrays = arrays_of(flat, envs)
                shown.append((arrays["obs"].item(), arrays["action_mask"][0].tolist()))
        step = envs.step([2])
    envs.close()
    rows = lambda *numbers: [(n, table[n].tolist()) for n in numbers]
    assert seen == rows(0, 1, 2, 4, 5, 6, 8, 9)  # 3 and 7 are last observations
    assert finals == rows(3, 7) * truncated


class Elsewhere(gym.Env):
    """One of 6 actions, from `start` on, is allowed and earns 1."""

    def __init__(self, place, name, form="array", start=0, late=False):
        self.place, self.name, self.form, self.late = place, name, form, late
        self.action_space = spaces.Discrete(6, start=start)
        self.observation_space = vector(1)
        if place == "obs":
            self.observation_space = spaces.Dict({"x": vector(1), name: vector(6, low=0)})
        if place == "method":
            self.action_masks = lambda: self.mask.astype(bool).tolist()

    def observe(self):
        self.t += 1
        self.allowed = int(self.np_random.integers(6)) + self.action_space.start
        self.mask = np.eye(6, dtype=np.float32)[self.allowed - self.action_space.start]
        shown = {
            "array": self.mask,
            "bools": self.mask.astype(bool),
            "indices": [self.allowed],
            "keys": {self.allowed: None},
            "short": self.mask[:5],
        }[self.form]
        x = np.zeros(1, np.float32)
        obs = {"x": x, self.name: shown} if self.place == "obs" else x
        is_shown = self.place == "info" and self.t > self.late
        return obs, {self.name: shown} if is_shown else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        reward = float(action == self.allowed)
        obs, info = self.observe()
        return obs, reward, False, self.t > 8, info


gym.register("Elsewhere-v0", entry_point=Elsewhere)


@pytest.mark.parametrize(
    "kwargs, note",
    [
        (dict(place="info", name="action_mask"), "info['action_mask']"),
        (dict(place="info", name="mask"), "info['mask']"),
        (dict(place="info", name="action_masks", form="bools", start=3), "info['action_masks']"),
        (dict(place="info", name="legal_actions", form="indices", start=3), "['legal_actions']"),
        (dict(place="info", name="legal_moves", form="keys"), "info['legal_moves']"),
        (dict(place="method", name="action_masks"), "the method action_masks()"),
        (dict(place="obs", name="valid_mask"), "the observation's 'valid_mask'"),
    ],
)
def test_masks_under_other_names(kwargs, note, tmp_path, capfd):
    """They are found, obeyed in every step, and named in one of the first lines."""
    workers = 2 * (kwargs["place"] == "method")
    with contextlib.closing(services_envs(kwargs, workers)) as envs:
        leaves = {leaf.path for leaf in envs.leaves}
        assert leaves == (
            {"x", "action_mask"} if kwargs["place"] == "obs" else {"obs", "action_mask"}
        )
    err = capfd.readouterr().err
    assert err.count("the mask of actions is ") == 1 and f"{note}, 6 entries\n" in err
    if kwargs["name"] in ("action_masks", "legal_actions", "valid_mask"):
        flags = dict(env_id="Elsewhere-v0", env_kwargs=kwargs, num_workers=workers)
        rows, scalars, *_ = run(tmp_path, eval_episodes=3, **flags)
        assert len(rows) == 3 and all(row["return"] == row["length"] for row in rows)
        assert scalars["charts/episodic_return"] == scalars["charts/episodic_length"]


def services_envs(kwargs, workers=0):
    """Three of Elsewhere, as a run makes them."""
    fitting.SAID.lines.clear()
    args = small_args(env_id="Elsewhere-v0", env_kwargs=kwargs, num_workers=workers)
    return command.envs_of(ppo_graph, args)


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        (
            dict(place="info", name="mask", form="short"),
            r"info\['mask'\] has 5 entries, Discrete\(6\) has 6 options",
        ),
        (dict(place="obs", name="visited_mask"), "'visited_mask' is another one by its name"),
        (
            dict(place="info", name="mask", late=True),
            r"info\['mask'\], which the first reset had not",
        ),
    ],
)
def test_masks_that_are_not_used(kwargs, reason, capfd):
    """One line says what was seen and why it is none; nothing is masked."""
    envs = services_envs(kwargs)
    envs.reset(0)
    for _ in range(3):
        envs.step([0, 0, 0])
    assert "action_mask" not in {leaf.path for leaf in envs.leaves}
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and re.match("not used as a mask of actions: .*" + reason, err)


def test_a_list_of_actions_that_is_none():
    """It is named, with env and step."""
    envs = services_envs(dict(place="info", name="legal_actions", form="indices"))
    envs.reset(0)
    envs.envs[1].unwrapped.observe = lambda: (np.zeros(1, np.float32), {"legal_actions": [2, 6]})
    with pytest.raises(UsageErrors, match="env 1, step 1, .*6 is listed as a legal action of Disc"):
        envs.step([0, 0, 0])


class Stuck(gym.Env):
    """Every other step allows nothing. Episodes of 4 steps are truncated; their last observation
    has no rows, or info no mask. `kind`: choose a node, one of `avail_actions`, of a list with a
    mask in info, or act on all nodes."""

    def __init__(self, kind="nodes"):
        self.kind = kind
        self.action_space = spaces.Sequence(D(2)) if kind == "agents" else D(4)
        children = {"graph": graph_space(), "action_mask": MASK}
        if kind == "avail_actions":
            rows = spaces.Sequence(vector(3), stack=True)
            children = {"obs": BOX, "avail_actions": rows, "action_mask": MASK}
        if kind == "agents":
            pairs = spaces.Sequence(spaces.MultiBinary(2), stack=True)
            children |= {"action_mask": pairs, "node_ids": IDS}
        self.observation_space = vector(2) if kind == "info" else spaces.Dict(children)

    def observe(self):
        is_last = self.t == 4
        num = 0 if is_last else int(self.np_random.integers(1, 5))
        nodes = self.np_random.random((num, 3)).astype(np.float32)
        allowed = np.full(4 if self.kind == "info" else num, self.t % 2, np.int8)
        pair = np.ones(2, np.float32)
        if self.kind == "info":
            return pair, {} if is_last else {"action_mask": allowed}
        if self.kind == "avail_actions":
            return {"obs": pair, "avail_actions": nodes, "action_mask": allowed}, {}
        links = np.zeros((num, 2), np.int64)
        obs = {"graph": spaces.GraphInstance(nodes, None, links), "action_mask": allowed}
        if self.kind == "agents":
            obs |= {"action_mask": np.stack([allowed] * 2, 1), "node_ids": np.arange(num)}
        return obs, {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        self.t += 1
        obs, info = self.observe()
        if self.kind == "agents":
            info = {"rewards": [1.0] * len(action)}
        return obs, 1.0, False, self.t == 4, info


gym.register("NoOption-v0", entry_point=Stuck)
KINDS = [(name, "nodes") for name in ("framestack", "gtrxl", "lstm_sparse", "graph_async")]
KINDS += [("graph", "avail_actions"), ("graph", "info")]


@pytest.mark.parametrize("name, kind", [*KINDS, ("graph_agents", "agents")])
def test_steps_without_an_action(name, kind, tmp_path):
    """They do not end a training, nor do last observations without masks or without rows."""
    script = importlib.import_module(f"cleanrl_graph.ppo_{name}")
    ran = run(tmp_path, script, env_id="NoOption-v0", env_kwargs={"kind": kind}, eval_episodes=2)
    assert [row["length"] for row in ran.rows] == [4, 4]
    if name != "graph_async":
        assert max(value for _, value in ran.scalars["debug/collection_mismatch"]) < 1e-5
