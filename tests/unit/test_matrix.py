"""Every script x every kind of observation x every kind of action: training fits collection, every
weight learns."""

import contextlib
import importlib
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import MASK, dense_spaces, graph_space, ragged_spaces, sample, small_args, vector
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_framestack, ppo_graph, ppo_gtrxl, ppo_lstm_sparse, services
from cleanrl_graph.services import command, process

PREVIOUS = {"prev_action": True, "prev_reward": True}
SCRIPTS = {
    "graph": (ppo_graph, {}),
    "framestack": (
        ppo_framestack,
        {"obs_shifts": "-2:0", "action_shifts": "-3:-1", "reward_shifts": "-2:-1"},
    ),
    "lstm": (ppo_lstm_sparse, {"lstm_dim": 8} | PREVIOUS),
    "lstm_per_node": (
        ppo_lstm_sparse,
        {"lstm_dim": 8} | PREVIOUS,
    ),  # of observations with the key node_ids
    "gru": (ppo_lstm_sparse, {"cell": "gru", "lstm_dim": 8} | PREVIOUS),
    "gtrxl": (
        ppo_gtrxl,
        {"dim": 8, "num_heads": 2, "num_layers": 1, "memory_length": 4} | PREVIOUS,
    ),
}
IMAGE = spaces.Box(0, 255, (8, 8, 1), np.uint8)
OBSERVATIONS = {
    "box": vector(3),
    "discrete": spaces.Discrete(5, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 70], start=[0, 2]),
    "multibinary": spaces.MultiBinary((2, 2)),
    "image": IMAGE,
    "dict": spaces.Dict(
        a=vector(2), b=spaces.Discrete(3), c=spaces.MultiBinary(2), d=spaces.MultiDiscrete([2, 3])
    ),
    "tuple": spaces.Tuple(
        (vector(), spaces.Sequence(spaces.Discrete(3), stack=False), spaces.Discrete(4))
    ),
    "graph_edges": graph_space(vector(2)),
    "graph": graph_space(),
    "sequence": spaces.Sequence(vector(3), stack=True),
    "graph_image_vector": spaces.Dict(graph=graph_space(vector(2)), image=IMAGE, vector=vector(2)),
}
ELEMENTS = {  # what an action chooses from; beside the other observations there is a set
    "graph_edges": lambda obs: obs.nodes,
    "graph": lambda obs: obs.nodes,
    "sequence": lambda obs: obs,
    "tuple": lambda obs: obs[1],
    "graph_image_vector": lambda obs: obs["graph"].nodes,
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=1),
    "multidiscrete": spaces.MultiDiscrete([3, 2], start=[0, -1]),
    "box": spaces.Box(-0.5, 1, (2,), np.float32),
    "element": spaces.Discrete(1000),
    "pair": spaces.Tuple([spaces.Discrete(1000)] * 2),  # a node, then a node
    "avail_actions": spaces.Discrete(1000),
    "tuple": spaces.Tuple(
        (spaces.Discrete(3), spaces.MultiDiscrete([2, 2]), vector(1), spaces.MultiBinary(2))
    ),
    "mask": spaces.Discrete(4),
    "info_mask": spaces.Tuple((spaces.Discrete(3), vector(1), spaces.Discrete(2, start=1))),
    "edge": spaces.Dict(edge=spaces.Discrete(1000)),
    "mixed": spaces.Dict(
        amount=spaces.Discrete(3), edge=spaces.Discrete(1000), node=spaces.Discrete(99), x=vector(1)
    ),
    "per_node": spaces.Sequence(spaces.MultiDiscrete([2, 3], start=[1, 0])),
    "per_node_box": spaces.Sequence(vector(2), stack=True),
}


def rows_of(*shape):
    return spaces.Sequence(spaces.Box(0, 1, shape, np.int8), stack=True)


AUTOREGRESSIVE = ("pair", "tuple", "info_mask", "mixed", "per_node")
GRAPHS = {
    "graph_edges": lambda obs: obs,
    "graph": lambda obs: obs,
    "graph_image_vector": lambda obs: obs["graph"],
}
EDGES, PER_NODE = ("edge", "mixed"), ("per_node", "per_node_box")
MASKS = {
    "element": MASK,
    "pair": rows_of(2),
    "mask": spaces.MultiBinary(4),
    "edge": MASK,
    "per_node": rows_of(5),
    "mixed": spaces.Dict(node=MASK, amount=spaces.MultiBinary(3), edge=rows_of(1)),
}


class AnyEnv(gym.Env):
    """Random observations of a kind, with 0 to 3 nodes, edges and rows. AssertionError for an
    action that is not legal. Episodes of 1 to 5 steps are terminated and truncated in turn."""

    def __init__(self, observation, action, with_ids=False):
        space, extra = OBSERVATIONS[observation], {}
        self.action_space, self.action = ACTIONS[action], action
        self.elements, self.graph = ELEMENTS.get(observation), GRAPHS.get(observation)
        if action in EDGES and not self.graph:
            extra["graph"], self.elements = graph_space(vector(2)), None
        elif (action in ("element", "pair", *PER_NODE) or with_ids) and not self.elements:
            extra["set"] = spaces.Sequence(vector(2), stack=False)
        extra |= {"action_mask": MASKS[action]} if action in MASKS else {}
        if action == "avail_actions":
            extra["avail_actions"] = spaces.Sequence(vector(3), stack=True)
        if with_ids:
            extra["node_ids"] = spaces.Sequence(
                spaces.Box(-(2**40), 2**40, (), np.int64), stack=True
            )
        self.observation_space = spaces.Dict(obs=space, **extra) if extra else space
        self.min_rows = 1 if action in ("element", "pair", "avail_actions", *EDGES) else 0
        self.episode = -1

    def observe(self):
        """(observation, info)"""
        rng = self.np_random
        obs = sample(self.observation_space, rng, lambda rng: rng.integers(self.min_rows, 4))
        keys = (
            self.observation_space.keys() if isinstance(self.observation_space, spaces.Dict) else ()
        )
        inner, rows, edges = obs["obs"] if "obs" in keys else obs, 0, 0
        graph = self.graph(inner) if self.graph else obs["graph"] if "graph" in keys else None
        if "node_ids" in keys or self.action in ("element", "pair", *EDGES, *PER_NODE):
            rows = len(
                self.elements(inner)
                if self.elements
                else obs["set"]
                if "set" in keys
                else graph.nodes
            )
        if graph is not None and graph.edge_links is not None:
            edges = len(graph.edge_links)
        if "node_ids" in keys:
            obs["node_ids"] = 2**30 + rng.permutation(6)[:rows]
        self.rows = len(obs["avail_actions"]) if self.action == "avail_actions" else rows
        some = lambda num: (rng.permutation(num) <= rng.integers(num)).astype(
            np.int8
        )  # at least one
        self.masks = {
            "mask": lambda: [some(4)],
            "element": lambda: [some(rows)],
            "info_mask": lambda: [some(3), some(2)],
            "pair": lambda: [some(rows), some(rows)],
            "edge": lambda: [some(edges)],
            "mixed": lambda: [some(3), some(edges), some(rows)],
            "per_node": lambda: [np.append(some(2), some(3)) for _ in range(rows)],
        }.get(self.action, list)()
        if self.action == "mixed":
            obs["action_mask"] = dict(
                amount=self.masks[0], edge=self.masks[1][:, None], node=self.masks[2]
            )
        elif self.action == "per_node":
            obs["action_mask"] = np.array(self.masks, np.int8).reshape(rows, 5)
        elif "action_mask" in keys:
            obs["action_mask"] = np.stack(self.masks, 1) if self.action == "pair" else self.masks[0]
        info = (
            {"action_mask": (self.masks[0], None, self.masks[1])}
            if self.action == "info_mask"
            else {}
        )
        return obs, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.left = self.episode + 1, int(self.np_random.integers(1, 6))
        return self.observe()

    def step(self, action):
        assert self.action_space.contains(action), action
        if self.action in PER_NODE:
            assert len(action) == self.rows
            assert all(
                mask[row[0] - 1] and mask[2 + row[1]] for mask, row in zip(self.masks, action)
            ), "masked"
        elif self.action in EDGES:
            assert all(mask[action[name]] for mask, name in zip(self.masks, self.action_space)), (
                "masked"
            )
        else:
            info = self.action == "info_mask"
            chosen = [action] if self.action_space.shape == () else [action[0], action[-1] - info]
            assert all(mask[a] for mask, a in zip(self.masks, chosen)), "masked"
            assert self.min_rows == 0 or max(chosen) < self.rows
        self.left -= 1
        truncated = self.left == 0 and self.episode % 2 == 1
        rewards = self.np_random.normal(size=self.rows)  # of each row that acted
        obs, info = self.observe()
        info["rewards"] = rewards
        return (
            obs,
            float(self.np_random.normal()),
            self.left == 0 and not truncated,
            truncated,
            info,
        )


gym.register("Any-v0", entry_point=AnyEnv)


class Writer:
    """Stands for TensorBoard's; keeps what is logged of each update."""

    def __init__(self, logged):
        self.logged = logged

    def add_scalar(self, tag, value, step):
        if not tag.startswith("charts/episodic"):
            if not self.logged or self.logged[-1][0] != step:
                self.logged.append((step, {}))
            self.logged[-1][1][tag] = value

    def add_text(self, *args):
        pass

    flush = close = lambda self: None


def train(script, monkeypatch, **kwargs):
    """(logs of each update, whether each episode was truncated, weights before, weights after) of a
    training with checked environments and the faster layers of the services, which writes
    nothing."""
    logged, truncated, agents, before = [], [], [], {}
    make_agent, step = script.Agent, script.Envs.step

    def agent(*args):
        agents.append(make_agent(*args))
        with torch.no_grad():  # so that the policy is not near uniform, where no error would show
            for name, parameter in agents[0].head.named_parameters():
                parameter.mul_(10 if name.endswith("weight") else 1)
        before.update({name: value.clone() for name, value in agents[0].named_parameters()})
        return agents[0]

    def recorded_step(envs, actions):
        result = step(envs, actions)
        truncated.extend(result.truncated[result.terminated | result.truncated].tolist())
        return result

    monkeypatch.setattr(script, "Agent", agent)
    monkeypatch.setattr(script.Envs, "step", recorded_step)
    monkeypatch.setattr(script, "SummaryWriter", lambda *args, **kwargs: Writer(logged))
    small = dict(num_steps=6, total_timesteps=36, update_epochs=1, gnn_layers=1, learning_rate=1e-2)
    args = small_args(script, **small | kwargs)
    with process.patched(script), contextlib.closing(command.envs_of(script, args)) as envs:
        script.train(args, script.Run(args), envs)
    return [scalars for _, scalars in logged], truncated, before, dict(agents[0].named_parameters())


MATRIX = [
    (name, kind, action)
    for action in ACTIONS
    for name in SCRIPTS
    for kind in OBSERVATIONS
    if name != "lstm_per_node" or kind in ELEMENTS
]


@pytest.mark.parametrize(
    "name, observation, action",
    [  # every third is a fast one
        pytest.param(*case, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, case in enumerate(MATRIX)
    ],
)
def test_all_fit_together(name, observation, action, monkeypatch):
    """Before the first gradient step of each update the probability ratio is 1, all actions are
    legal, all losses are finite, and every weight of the network is moved."""
    script, flags = SCRIPTS[name]
    norm_obs = (
        list(OBSERVATIONS).index(observation) + list(ACTIONS).index(action)
    ) % 2 == 1  # every other one
    logged, truncated, before, after = train(
        script,
        monkeypatch,
        env_id="Any-v0",
        norm_obs=norm_obs,
        autoregressive=action in AUTOREGRESSIVE,
        env_kwargs={
            "observation": observation,
            "action": action,
            "with_ids": name == "lstm_per_node",
        },
        **flags,
    )
    assert len(logged) == 2 and True in truncated and False in truncated
    for scalars in logged:
        assert 0 <= scalars["debug/collection_mismatch"] < 1e-5
        assert all(np.isfinite(value) for value in scalars.values())
    still = [key for key, value in after.items() if torch.equal(value, before[key])]
    still = [
        key for key in still if not re.fullmatch(r"head\.heads\.\d\.score\.bias", key)
    ]  # a softmax does not see it
    assert not still and all(value.isfinite().all() for value in after.values())


SEEN = [  # observation, action
    ("sequence", "element"),
    ("tuple", "avail_actions"),
    ("graph_edges", "mixed"),
    ("graph", "per_node"),
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_see_their_observation(name, monkeypatch):
    """The same with --set-layers and --graph-context."""
    script, flags = SCRIPTS[name]
    observation, action = SEEN[list(SCRIPTS).index(name) % 3]
    logged, _, before, after = train(
        script,
        monkeypatch,
        env_id="Any-v0",
        env_kwargs={
            "observation": observation,
            "action": action,
            "with_ids": name == "lstm_per_node",
        },
        autoregressive=action in AUTOREGRESSIVE,
        set_layers=2,
        graph_context=True,
        **flags,
    )
    assert all(0 <= scalars["debug/collection_mismatch"] < 1e-5 for scalars in logged)
    still = [key for key, value in after.items() if torch.equal(value, before[key])]
    assert [key for key in still if key.startswith("encoder")] == []
    assert any("context" in key for key in after)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_elements_to_choose_from(name, tmp_path):
    """A head that chooses is a sentence where an observation has nothing ragged, or no
    avail_actions."""
    script, flags = SCRIPTS[name]
    for observation in OBSERVATIONS:
        for head in ("nodes", "avail_actions"):
            if head == "avail_actions" or observation not in ELEMENTS:
                args = small_args(
                    script,
                    env_id="Any-v0",
                    run_dir=str(tmp_path),
                    action_head=head,
                    **flags,
                    env_kwargs={"observation": observation, "action": "discrete"},
                )
                with pytest.raises(
                    ValueError, match=f"--action-head {head} needs Discrete actions"
                ):
                    services.run(script, args)


@pytest.mark.parametrize("name", SCRIPTS)
def test_continuous_actions_choose_nothing(name, tmp_path):
    """Neither do actions that are no indices choose, whatever the observation is."""
    script, flags = SCRIPTS[name]
    for head in ("nodes", "avail_actions"):
        with pytest.raises(
            ValueError, match=rf"(?s)--action-head {head} needs Discrete actions.*Box"
        ):
            services.run(
                script,
                small_args(
                    script,
                    env_id="Any-v0",
                    run_dir=str(tmp_path),
                    action_head=head,
                    **flags,
                    env_kwargs={"observation": "graph", "action": "box"},
                ),
            )


# ---- random spaces ----
flat_actions = st.one_of(
    st.builds(
        lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)
    ),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.sampled_from(
        [
            spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]]),
            spaces.MultiBinary(3),
            spaces.MultiBinary((2, 2)),
            vector(),
            vector(2, 2),
            spaces.Box(-9, 9, (1,), np.float64),
        ]
    ),
)
action_spaces = st.recursive(
    flat_actions,
    lambda child: st.one_of(
        st.dictionaries(st.sampled_from("zyx"), child, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(child, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=4,
)
any_observations = st.recursive(
    st.one_of(dense_spaces, ragged_spaces),
    lambda child: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), child, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(child, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=4,
)


class RandomSpaces(gym.Env):
    """Random in all that it does; AssertionError for an action that is not one of its action
    space."""

    def __init__(self):
        self.rng = np.random.default_rng(self.seed)

    def reset(self, *, seed=None, options=None):
        return sample(self.observation_space, self.rng), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        ends = self.rng.random(2) < 0.2
        return (
            sample(self.observation_space, self.rng),
            self.rng.random(),
            bool(ends[0]),
            bool(ends[1]),
            {},
        )


gym.register("RandomSpaces-v0", entry_point=RandomSpaces)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(any_observations, action_spaces, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_random_spaces(observation_space, action_space, autoregressive, state_dependent_std, seed):
    """Two rollouts and updates of each script for whatever spaces there are."""
    RandomSpaces.observation_space, RandomSpaces.action_space, RandomSpaces.seed = (
        observation_space,
        action_space,
        seed,
    )
    for script, flags in SCRIPTS.values():
        with pytest.MonkeyPatch.context() as monkeypatch:
            logged, *_ = train(
                script,
                monkeypatch,
                env_id="RandomSpaces-v0",
                num_steps=5,
                num_envs=2,
                total_timesteps=20,
                autoregressive=autoregressive,
                state_dependent_std=state_dependent_std,
                **flags,
            )
        assert len(logged) == 2 and all(
            0 <= scalars["debug/collection_mismatch"] < 1e-5 for scalars in logged
        )


VARIANTS = [  # script, observation, action
    (script, observation, list(ACTIONS)[k % len(ACTIONS)])
    for script in ("ppo_graph_async", "ppo_graph_aux")
    for k, observation in enumerate(OBSERVATIONS)
] + [
    (script, "graph_edges", action)
    for script in ("ppo_graph_async", "ppo_graph_aux", "ppo_graph_compile")
    for action in (*EDGES, *PER_NODE)
]
VARIANTS += [
    ("ppo_graph_agents", observation, action) for observation in OBSERVATIONS for action in PER_NODE
]


CONTEXT = dict(set_layers=1, graph_context=True)
CASES = [(*case, {}) for case in VARIANTS] + [
    ("ppo_graph_async", "sequence", "element", CONTEXT),
    ("ppo_graph_aux", "sequence", "element", CONTEXT),
    ("ppo_graph_compile", "tuple", "avail_actions", CONTEXT),
    ("ppo_graph_compile", "graph_edges", "element", CONTEXT),
    ("ppo_graph_agents", "graph", "per_node", CONTEXT),
]


@pytest.mark.parametrize("script, observation, action, more", CASES)
def test_variants(script, observation, action, more, monkeypatch):
    """A sample of the matrix for the variants, with their auxiliary losses on."""
    script = importlib.import_module(f"cleanrl_graph.{script}")
    flags = {"max_lag": 0} if hasattr(script.Args, "max_lag") else {}
    if hasattr(script.Args, "aux"):
        flags = {"aux": "predict" if action in PER_NODE else "reconstruct"}
    logged, *_ = train(
        script,
        monkeypatch,
        env_id="Any-v0",
        env_kwargs={
            "observation": observation,
            "action": action,
            "with_ids": script.__name__.endswith("agents"),
        },
        autoregressive=action in AUTOREGRESSIVE,
        **flags,
        **more,
    )
    assert len(logged) == 2 and all(
        0 <= scalars["debug/collection_mismatch"] < 1e-5 for scalars in logged
    )
