"""EntityGym-v0: entities become sets, masks and actions reach the entities that they are of, and
the scripts train. On an environment written here, with a stand-in for entity-gym's classes, and
where entity-gym is installed on all of its examples."""

import importlib.util
import random
import sys
import types

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import mismatch, run

from cleanrl_graph import load_policy, ppo_graph, ppo_gtrxl, ppo_lstm_sparse
from cleanrl_graph.envs.entities import EntityGymEnv

HAS_PACKAGE = importlib.util.find_spec("entity_gym") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs entity-gym")


def record(name, *fields):
    """A class with these fields, None where they are not given."""

    def init(self, *values, **named):
        self.__dict__ = dict.fromkeys(fields) | dict(zip(fields, values)) | named

    return type(name, (), {"__init__": init, "__len__": lambda self: len(self.index_to_label)})


Global = record("GlobalCategoricalActionSpace", "index_to_label")
Category = record("CategoricalActionSpace", "index_to_label")
Select = record("SelectEntityActionSpace")
Mask = record("Mask", "actor_ids", "actor_types", "mask", "actee_ids", "actee_types")
CLASSES = [
    record("GlobalCategoricalAction", "index", "label"),
    record("CategoricalAction", "actors", "indices", "index_to_label"),
    record("SelectEntityAction", "actors", "actees"),
]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A package with entity-gym's classes of actions, where there is none."""
    if HAS_PACKAGE:
        return
    package = types.ModuleType("entity_gym")
    package.env = types.ModuleType("entity_gym.env")
    package.examples = types.ModuleType("entity_gym.examples")
    package.examples.ENV_REGISTRY = {"Village": Village}
    for own in CLASSES:
        setattr(package.env, own.__name__, own)
    for module in (package, package.env, package.examples):
        monkeypatch.setitem(sys.modules, module.__name__, module)


class Village:
    """Guards [x, y] and workers [x] move, each on its own; guards strike at guards; the chief, who
    has no features, picks a worker or a tree [height], and calls. Chance moves what is there."""

    def __init__(self, guards=2, trees=2, visible=None, masks=(), picks=None, length=3):
        self.guards, self.trees, self.visible, self.masks = guards, trees, visible, dict(masks)
        self.picks, self.length, self.acts = picks, length, []

    def obs_space(self):
        features = {"Guard": ["x", "y"], "Worker": ["x"], "Chief": [], "Tree": ["height"]}
        entities = {name: record("Entity", "features")(own) for name, own in features.items()}
        return record("ObsSpace", "global_features", "entities")(["time"], entities)

    def action_space(self):
        return {
            "move": Category(["stay", "left", "right"]),
            "strike": Select(),
            "pick": Select(),
            "call": Global(["no", "yes"]),
        }

    def reset(self):
        self.t = 0
        return self.observe()

    def observe(self):
        done = self.t == self.length
        workers = [] if done else [[random.random()], [np.random.random()]]
        ids = {
            "Guard": [f"g{k}" for k in range(self.guards)],
            "Worker": [f"w{k}" for k in range(len(workers))],
            "Chief": ["c"],
        }
        picks = self.picks
        if picks is None:
            picks = {"actor_ids": ["c"], "actee_types": ["Worker"]}
        return types.SimpleNamespace(
            global_features=[self.t],
            features={
                "Guard": [[k, self.t] for k in range(self.guards)],
                "Worker": workers,
                "Chief": np.zeros((1, 0), np.float32),
                "Tree": np.arange(self.trees, dtype=np.float32)[:, None],
            },
            ids=ids,
            actions={
                "move": Mask(actor_types=["Guard", "Worker"], mask=self.masks.get("move")),
                "strike": Mask(actor_types=["Guard"], actee_types=["Guard"]),
                "pick": Mask(**picks),
                "call": Mask(mask=self.masks.get("call")),
            },
            reward=1.0,
            done=done,
            visible=self.visible or {},
            metrics={"wood": 2.0 * self.t},
        )

    def act(self, actions):
        self.t += 1
        self.acts.append(actions)
        return self.observe()


def make(name=Village, **kwargs):
    own = {key: kwargs.pop(key) for key in ("hidden", "actors", "actees") if key in kwargs}
    return EntityGymEnv(name, kwargs, **own)


def first(env, seed=1):
    """The first observation, which is in its space."""
    obs, info = env.reset(seed=seed)
    assert obs in env.observation_space and info == {}
    return obs


def row(move, strike):
    return {"move": move, "Guard": strike}


def test_sets():
    """One for each type, also without features, one for types that act together, ids that are
    theirs, and masks named as the actions."""
    env = make()
    obs = first(env)
    names = "Guard Worker Chief Tree actors global node_ids action_mask"
    assert list(env.observation_space) == names.split()
    assert env.feature_names["actors"] == ["is Guard", "is Worker", "x", "y"]
    assert obs["Guard"].tolist() == [[0, 0], [1, 0]] and obs["Chief"].tolist() == [[1]]
    assert obs["actors"][:2].tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]
    assert obs["actors"][2:, [0, 1, 3]].tolist() == [[0, 1, 0], [0, 1, 0]]
    assert obs["actors"][2:, 2:3].tolist() == obs["Worker"].tolist()
    assert obs["node_ids"].tolist() == [0, 1, 2, 3] and obs["global"].tolist() == [0]
    assert list(env.action_space) == ["Worker", "call", "actors"]
    each = env.action_space["actors"]
    assert isinstance(each, spaces.Sequence) and list(each.feature_space) == ["move", "Guard"]
    assert each.feature_space["move"].n == 3 and env.action_space["call"].n == 2


def test_masks():
    """What who may do: a row that cannot act has one option."""
    move = [[0, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0]]
    obs = first(make(masks={"move": move, "call": [True, False]}))["action_mask"]
    assert obs["actors"]["move"].tolist() == move and obs["call"].tolist() == [1, 0]
    strike = obs["actors"]["Guard"].reshape(4, 2)  # of each row that acts at each guard
    assert strike.tolist() == [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert obs["Worker"].ravel().tolist() == [1, 1]
    nobody = first(make(picks={"actor_ids": [], "actee_types": ["Worker"]}))["action_mask"]
    assert nobody["Worker"].ravel().tolist() == [1, 0]
    one = first(make(picks={"actor_ids": ["c"], "actee_ids": ["w1"]}))["action_mask"]
    assert one["Worker"].ravel().tolist() == [0, 1]


def test_actions_reach_their_entities():
    env = make()
    first(env)
    each = [row(2, 1), row(1, 0), row(0, 0), row(2, 0)]
    action = {"Worker": 1, "call": 1, "actors": tuple(each)}
    assert action in env.action_space
    obs, reward, terminated, truncated, info = env.step(action)
    assert obs in env.observation_space and (reward, terminated, truncated) == (1, False, False)
    (acts,) = env.env.acts
    assert acts["move"].actors == ["g0", "g1", "w0", "w1"]
    assert acts["move"].indices.tolist() == [2, 1, 0, 2]
    assert acts["strike"].actors == ["g0", "g1"] and acts["strike"].actees == ["g1", "g0"]
    assert acts["pick"].actors == ["c"] and acts["pick"].actees == ["w1"]
    assert (acts["call"].index, acts["call"].label) == (1, "yes") and info == {}


def test_choice_among_types():
    """Rows of several types, or of one from which another action chooses, are a set of the action's
    name. Where it is empty nobody chooses."""
    picks = {"actor_ids": ["c"], "actee_types": ["Worker", "Chief"]}
    env = make(picks=picks)
    obs = first(env)
    assert env.feature_names["pick"] == ["is Worker", "is Chief", "x"]
    assert obs["pick"][:, :2].tolist() == [[1, 0], [1, 0], [0, 1]]
    env.step({"pick": 2, "call": 0, "actors": (row(0, 0),) * 4})
    assert env.env.acts[0]["pick"].actees == ["c"]
    env = make(actees={"pick": ["Tree"]}, picks={"actor_ids": ["c"], "actee_ids": []}, trees=0)
    obs = first(env)
    assert obs["Tree"].tolist() == [[0]] and obs["action_mask"]["Tree"].tolist() == [[1]]
    env.step({"Tree": 0, "call": 0, "actors": (row(0, 0),) * 4})
    assert env.env.acts[0]["pick"].actors == [] and env.env.acts[0]["pick"].actees == []
    env = make(picks={"actor_ids": ["c"], "actee_types": ["Guard"]})
    obs = first(env)
    assert list(env.action_space) == ["Guard", "call", "actors"]
    assert list(env.action_space["actors"].feature_space) == ["move", "strike"]
    assert obs["strike"].tolist() == obs["Guard"].tolist()


def test_hidden():
    """The policy does not see what is not visible; who asks for it has it as "hidden"."""
    visible = {"Tree": [True, False]}
    assert first(make(visible=visible))["Tree"].tolist() == [[0]]
    env = make(visible=visible, hidden=True)
    obs = first(env)
    assert obs["Tree"].tolist() == [[0]] and obs["hidden"]["Tree"].tolist() == [[1]]
    assert list(obs["hidden"]) == ["Tree"]
    with pytest.raises(gym.error.Error, match="^hidden: .* has no `visible`"):
        make(hidden=True)


def test_episode():
    """It ends as the environment says; its metrics are info["eval"]; the last observation fits."""
    env = make(length=1)
    first(env)
    outcome = env.step({"Worker": 1, "call": 1, "actors": (row(0, 0),) * 4})
    obs, _, terminated, truncated, info = outcome
    assert obs in env.observation_space and terminated and not truncated
    assert info == {"eval": {"wood": 2.0}}


def test_chance():
    """A seed fixes all and leaves the global generators as they are; a copy goes on alike."""
    ours = random.getstate(), np.random.get_state()[1].tolist()
    envs = [make(), make()]
    for env in envs:
        env.reset(seed=3)
    action = {"Worker": 1, "call": 1, "actors": (row(0, 0),) * 4}
    envs.append(cloudpickle.loads(cloudpickle.dumps(envs[0])))
    seen = [env.step(action)[0]["Worker"].tolist() for env in envs for _ in range(2)]
    assert seen[:2] == seen[2:4] == seen[4:] and seen[0] != seen[1]
    assert ours == (random.getstate(), np.random.get_state()[1].tolist())
    one, two, other = (env.reset(seed=seed)[0]["Worker"] for env, seed in zip(envs, (3, 3, 4)))
    assert (one == two).all() and (one != other).all()


@pytest.mark.parametrize(
    "kwargs, problem",
    [
        ({"name": "Villag"}, r"name is 'Villag'; \[.*\] or module:Class is needed"),
        ({"name": "villages:Village"}, "there is no module villages"),
        ({"actees": {"pick": ["Tree"]}}, "action 'pick': entity 'w0' is not in the set 'Tree'"),
    ],
)
def test_errors(kwargs, problem):
    with pytest.raises(gym.error.Error, match=problem):
        first(make(**kwargs))


@pytest.mark.parametrize(
    "script", [ppo_graph, ppo_lstm_sparse, ppo_gtrxl], ids=lambda s: s.__name__
)
def test_trains(script, tmp_path):
    """All of it at once, with what the critic alone sees."""
    own = {"visible": {"Tree": [True, False]}}
    kwargs = {"name": f"{__name__}:Village", "kwargs": own, "hidden": True}
    flags = dict(env_id="envs:EntityGym-v0", env_kwargs=kwargs, critic_only=("hidden",))
    if script is ppo_lstm_sparse:  # a state for each entity needs that there is one set
        flags["state_per_node"] = False
    ran = run(tmp_path, script, eval_episodes=2, **flags)
    assert [row["return"] for row in ran.rows] == [3, 3]
    assert ran.scalars["debug/collection_mismatch"][0][1] < 1e-5
    assert "warning" not in ran.text


# ---- Where entity-gym is installed ----
EXAMPLES = "MoveToOrigin CherryPick PickMatchingBalls Minefield MultiSnake MultiArmedBandit".split()
EXAMPLES += "NotHotdog Xor Count FloorIsLava MineSweeper RockPaperScissors TreasureHunt".split()
CANNON = {"orbital_cannon": True, "cooldown_period": 0}


@needs_package
@pytest.mark.parametrize("name", [*EXAMPLES, "orbital cannon"])
def test_examples(name, tmp_path):
    """Each trains and plays as it is, also MineSweeper with an entity that selects among two types
    beside robots that act; collection and training agree."""
    kwargs = {"name": name}
    if name == "orbital cannon":
        kwargs = {"name": "MineSweeper", "kwargs": CANNON}
    flags = dict(env_id="envs:EntityGym-v0", eval_episodes=1, eval_max_steps=40)
    ran = run(tmp_path, env_kwargs=kwargs, **flags)
    assert len(ran.rows) == 1 and mismatch(ran) < 1e-5
    assert "warning" not in ran.text


@needs_package
def test_what_a_critic_alone_sees(tmp_path):
    """With the opponent hidden from the policy alone the value is right, and the policy is not
    better than chance allows; it plays without the opponent."""
    kwargs = {"name": "RockPaperScissors", "hidden": True}
    flags = dict(env_id="envs:EntityGym-v0", env_kwargs=kwargs, critic_only=("hidden",))
    flags |= dict(learning_rate=1e-2, num_envs=8, num_steps=16, total_timesteps=3072)
    ran = run(tmp_path, save_model=True, update_epochs=4, clip_vloss=False, **flags)
    assert ran.scalars["losses/explained_variance"][-1][1] > 0.8
    policy = load_policy(str(ran.folder / "model.pt"), make("RockPaperScissors"))
    policy.reset()
    assert policy(first(make("RockPaperScissors"))) == {"throw": 1}  # paper
