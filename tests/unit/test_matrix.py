"""Scripts x observations x actions: before the first step of an update the probability ratio is
1, actions are legal, every weight learns; and each episode is valued as it is alone. Collection and
training are compared here; test_actions.py adds the actions that only its tasks have."""

import contextlib
import importlib
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Tuple
from helpers import (
    IDS,
    MASK,
    Writer,
    accelerated,
    action_spaces,
    begun,
    collect,
    graph_space,
    observation_spaces,
    sample,
    small_args,
    vector,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleanrl_graph.services import command

PREVIOUS = {"prev_action": True, "prev_reward": True}
VIEWS = {"obs_shifts": "-2:0", "action_shifts": "-3:-1", "reward_shifts": "-2:-1"}
SCRIPTS = {
    "graph": ("ppo_graph", {}),
    "framestack": ("ppo_framestack", VIEWS),
    "lstm": ("ppo_lstm_sparse", {"lstm_dim": 8} | PREVIOUS),
    "lstm_per_node": ("ppo_lstm_sparse", {"lstm_dim": 8} | PREVIOUS),  # with the key node_ids
    "gru": ("ppo_lstm_sparse", {"cell": "gru", "lstm_dim": 8} | PREVIOUS),
    "gtrxl": ("ppo_gtrxl", dict(dim=8, num_heads=2, num_layers=1, memory_length=4) | PREVIOUS),
}
VARIANTS = {
    "async": ("ppo_graph_async", {"max_lag": 0}),
    "aux": ("ppo_graph_aux", {"aux": "reconstruct"}),
    "compile": ("ppo_graph_compile", {}),
    "agents": ("ppo_graph_agents", {}),
}
IMAGE = Box(0, 255, (8, 8, 1), np.uint8)
OBSERVATIONS = {
    "box": vector(3),
    "discrete": Discrete(5, start=-1),
    "multidiscrete": MultiDiscrete([3, 70], start=[0, 2]),
    "multibinary": MultiBinary((2, 2)),
    "image": IMAGE,
    "dict": Dict(a=vector(2), b=Discrete(3), c=MultiBinary(2), d=MultiDiscrete([2, 3])),
    "tuple": Tuple((vector(), Sequence(Discrete(3), stack=False), Discrete(4))),
    "graph_edges": graph_space(vector(2)),
    "graph": graph_space(),
    "sequence": Sequence(vector(3), stack=True),
    "graph_image_vector": Dict(graph=graph_space(vector(2)), image=IMAGE, vector=vector(2)),
}
GRAPHS = dict.fromkeys(("graph_edges", "graph"), lambda obs: obs)
GRAPHS |= {"graph_image_vector": lambda obs: obs["graph"]}
# what an action chooses from; beside the other observations there is a set
ELEMENTS = {name: lambda obs, graph=graph: graph(obs).nodes for name, graph in GRAPHS.items()}
ELEMENTS |= {"sequence": lambda obs: obs, "tuple": lambda obs: obs[1]}
ANY = Discrete(1000)
ACTIONS = {
    "discrete": Discrete(3, start=1),
    "multidiscrete": MultiDiscrete([3, 2], start=[0, -1]),
    "box": Box(-0.5, 1, (2,), np.float32),
    "element": ANY,
    "pair": Tuple([ANY, ANY]),  # a node, then a node
    "avail_actions": ANY,
    "tuple": Tuple((Discrete(3), MultiDiscrete([2, 2]), vector(1), MultiBinary(2))),
    "mask": Discrete(4),
    "info_mask": Tuple((Discrete(3), vector(1), Discrete(2, start=1))),
    "edge": Dict(edge=ANY),
    "mixed": Dict(amount=Discrete(3), edge=ANY, node=Discrete(99), x=vector(1)),
    "per_node": Sequence(MultiDiscrete([2, 3], start=[1, 0])),
    "per_node_box": Sequence(vector(2), stack=True),
}
AUTOREGRESSIVE = ("pair", "tuple", "info_mask", "mixed", "per_node")
EDGES, PER_NODE, NODES = ("edge", "mixed"), ("per_node", "per_node_box"), ("element", "pair")


def rows_of(*shape):
    return Sequence(Box(0, 1, shape, np.int8), stack=True)


MASKS = {
    "element": MASK,
    "pair": rows_of(2),
    "mask": MultiBinary(4),
    "edge": MASK,
    "per_node": rows_of(5),
    "mixed": Dict(node=MASK, amount=MultiBinary(3), edge=rows_of(1)),
}


class AnyEnv(gym.Env):
    """Random observations of a kind, with 0 to 3 nodes, edges and rows. AssertionError for an
    action that is not legal. Episodes of 1 to 5 steps are terminated and truncated in turn."""

    def __init__(self, observation, action, with_ids=False):
        space, extra = OBSERVATIONS[observation], {}
        self.action_space, self.action = ACTIONS[action], action
        self.elements, self.graph = ELEMENTS.get(observation), GRAPHS.get(observation)
        self.counts_rows = with_ids or action in (*NODES, *EDGES, *PER_NODE)
        if action in EDGES and not self.graph:
            extra["graph"], self.elements = graph_space(vector(2)), None
        elif self.counts_rows and not self.elements:
            extra["set"] = Sequence(vector(2), stack=False)
        extra |= {"action_mask": MASKS[action]} if action in MASKS else {}
        if action == "avail_actions":
            extra["avail_actions"] = Sequence(vector(3), stack=True)
        extra |= {"node_ids": IDS} if with_ids else {}
        self.extra = extra
        self.observation_space = Dict(obs=space, **extra) if extra else space
        self.min_rows = int(action in (*NODES, "avail_actions", *EDGES))
        self.episode = -1

    def observe(self):
        """(observation, info)"""
        rng, edges, rows, info = self.np_random, 0, 0, {}
        obs = sample(self.observation_space, rng, lambda rng: rng.integers(self.min_rows, 4))
        inner = obs["obs"] if self.extra else obs
        graph = self.graph(inner) if self.graph else obs["graph"] if "graph" in self.extra else None
        if graph is not None and graph.edge_links is not None:
            edges = len(graph.edge_links)
        if self.counts_rows and self.elements:
            rows = len(self.elements(inner))
        elif self.counts_rows:
            rows = len(obs["set"] if "set" in self.extra else graph.nodes)
        if "node_ids" in self.extra:
            obs["node_ids"] = 2**30 + rng.permutation(6)[:rows]
        self.rows = len(obs["avail_actions"]) if self.action == "avail_actions" else rows
        some = lambda num: (rng.permutation(num) <= rng.integers(num)).astype(np.int8)  # not none
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
            amount, edge, node = self.masks
            obs["action_mask"] = dict(amount=amount, edge=edge[:, None], node=node)
        elif self.action == "per_node":
            obs["action_mask"] = np.array(self.masks, np.int8).reshape(rows, 5)
        elif self.action == "info_mask":
            info["action_mask"] = self.masks[0], None, self.masks[1]
        elif self.action in MASKS:
            obs["action_mask"] = np.stack(self.masks, 1) if self.action == "pair" else self.masks[0]
        return obs, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.left = self.episode + 1, int(self.np_random.integers(1, 6))
        return self.observe()

    def step(self, action):
        assert self.action_space.contains(action), action
        if self.action in PER_NODE:
            assert len(action) == self.rows
            for mask, row in zip(self.masks, action):
                assert mask[row[0] - 1] and mask[2 + row[1]], "masked"
        elif self.action in EDGES:
            for mask, name in zip(self.masks, self.action_space):
                assert mask[action[name]], "masked"
        else:
            info = self.action == "info_mask"
            chosen = [action] if self.action_space.shape == () else [action[0], action[-1] - info]
            assert all(mask[a] for mask, a in zip(self.masks, chosen)), "masked"
            assert self.min_rows == 0 or max(chosen) < self.rows
        self.left -= 1
        truncated = self.left == 0 and self.episode % 2 == 1
        terminated = self.left == 0 and not truncated
        rewards = self.np_random.normal(size=self.rows)  # of each row that acted
        obs, info = self.observe()
        info["rewards"] = rewards
        return obs, float(self.np_random.normal()), terminated, truncated, info


gym.register("Any-v0", entry_point=AnyEnv)


def train(script, **kwargs):
    """(logs of each update, whether each episode was truncated, weights before, weights after) of a
    training with checked environments and the faster layers of the services, which writes
    nothing. Collection and training agree."""
    logged, truncated, agents, before = {}, [], [], {}
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

    small = dict(num_steps=6, total_timesteps=36, update_epochs=1, gnn_layers=1, learning_rate=1e-2)
    args = small_args(script, **small | kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Agent", agent)
        patch.setattr(script.Envs, "step", recorded_step)
        patch.setattr(script, "SummaryWriter", lambda *args, **kwargs: Writer(logged))
        with contextlib.closing(command.envs_of(script, args)) as envs:
            script.train(args, accelerated(script.Run)(args), envs)
    losses = [scalars for scalars in logged.values() if "losses/policy_loss" in scalars]
    assert len(losses) == args.num_iterations
    for scalars in losses:
        assert 0 <= scalars["debug/collection_mismatch"] < 1e-5
    return list(logged.values()), truncated, before, dict(agents[0].named_parameters())


def script_of(name):
    script, flags = (SCRIPTS | VARIANTS)[name]
    return importlib.import_module(f"cleanrl_graph.{script}"), dict(flags)


def any_env(name, observation, action):
    with_ids = name in ("lstm_per_node", "agents")
    kwargs = {"observation": observation, "action": action, "with_ids": with_ids}
    flags = dict(env_id="Any-v0", env_kwargs=kwargs, autoregressive=action in AUTOREGRESSIVE)
    norm_obs = (list(OBSERVATIONS).index(observation) + list(ACTIONS).index(action)) % 2 == 1
    return flags | {"norm_obs": norm_obs}  # every other one


ALL = [(name, kind, action, {}) for action in ACTIONS for name in SCRIPTS for kind in OBSERVATIONS]
MATRIX = [case for case in ALL if case[0] != "lstm_per_node" or case[1] in ELEMENTS]
CASES = [  # nine of the actions for each script and observation, one of them among the fast tests
    pytest.param(*case, marks=[pytest.mark.slow] * (k % 13 > 0))
    for k, case in enumerate(MATRIX)
    if k % 13 < 9
]
CONTEXT = dict(set_layers=2, graph_context=True)
EDGES_KEPT = dict(remember_edges=True)
CASES += [
    ("graph", "sequence", "element", CONTEXT),
    ("lstm_per_node", "sequence", "element", CONTEXT),
    ("gtrxl", "graph_edges", "mixed", CONTEXT),
    ("graph", "box", "box", {"state_dependent_std": True}),
    ("framestack", "box", "discrete", {"action_shifts": "", "reward_shifts": ""}),
    ("framestack", "graph", "discrete", {"obs_shifts": "-2", "action_shifts": "-9,-1"}),
    ("lstm", "dict", "tuple", dict.fromkeys(PREVIOUS, False)),
    ("lstm", "box", "mask", {"cell": "mingru"}),
    ("lstm_per_node", "graph_edges", "element", EDGES_KEPT | {"num_envs": 6}),
    ("lstm_per_node", "graph", "pair", EDGES_KEPT | {"cell": "mingru", "norm_obs": True}),
    ("lstm_per_node", "graph", "element", {"state_per_node": False}),
    ("gtrxl", "dict", "tuple", dict.fromkeys(PREVIOUS, False)),
    ("gtrxl", "box", "discrete", {"memory_length": 0}),
    ("gtrxl", "box", "discrete", {"memory_length": 10**6, "gate": "none"}),
    ("gtrxl", "box", "discrete", {"num_steps": 1, "total_timesteps": 36}),
]
CASES += [  # rollouts that are cut in time, for more minibatches than environments
    (name, "graph", "element", dict(num_envs=n, num_steps=18, num_minibatches=4))
    for name in ("framestack", "lstm_per_node", "gtrxl")
    for n in (1, 2)
]
CASES += [  # every other one is fast
    pytest.param(
        *(name, kind, list(ACTIONS)[(3 * j + k) % len(ACTIONS)], {}),
        marks=[pytest.mark.slow] * ((j + k) % 2),
    )
    for j, name in enumerate(("async", "aux", "compile"))
    for k, kind in enumerate(OBSERVATIONS)
]
CASES += [("aux", "graph_edges", action, {"aux": "predict"}) for action in ("edge", "per_node")]
CASES += [("agents", kind, PER_NODE[k % 2], {}) for k, kind in enumerate(OBSERVATIONS)]


@pytest.mark.parametrize("name, observation, action, more", CASES)
def test_all_fit_together(name, observation, action, more):
    """Before the first gradient step of each update the probability ratio is 1, all actions are
    legal, all losses are finite, and every weight of the network is moved."""
    script, flags = script_of(name)
    flags = any_env(name, observation, action) | flags | more
    logged, truncated, before, after = train(script, **flags)
    assert name == "async" or True in truncated and False in truncated
    assert all(np.isfinite(value) for scalars in logged for value in scalars.values())
    still = [key for key, value in after.items() if torch.equal(value, before[key])]
    # a softmax does not see it
    still = [key for key in still if not re.fullmatch(r"head\.heads\.\d\.score\.bias", key)]
    still = [] if more.get("memory_length") == 0 else still  # nothing to choose from
    assert not still and all(value.isfinite().all() for value in after.values())
    assert any("context" in key for key in after) == ("graph_context" in more)


def of_env(step, leaves, i):
    """The Step of environment i alone."""
    values = []
    for leaf, array in zip(leaves, step.obs.values):
        num = step.obs.counts[leaf.group]
        values.append(np.split(array, num.cumsum())[i])
    counts = {group: num[i : i + 1] for group, num in step.obs.counts.items()}
    flat = step.obs._replace(values=values, counts=counts)
    own = [array[i : i + 1] for array in (step.reward, step.terminated, step.truncated)]
    finals = step.finals[step.truncated[:i].sum() :][: int(step.truncated[i])]
    return type(step)(flat, *own, finals, [])


@pytest.mark.parametrize(
    "name, observation, action, more",
    [
        ("framestack", "graph_image_vector", "tuple", {}),
        ("lstm", "dict", "multidiscrete", {}),
        ("gru", "graph", "pair", {}),
        ("lstm_per_node", "graph_edges", "mixed", {}),
        ("lstm_per_node", "graph_edges", "element", EDGES_KEPT),
        ("gtrxl", "graph_edges", "element", {"memory_length": 0}),
        ("gtrxl", "dict", "tuple", {"memory_length": 4}),
        ("gtrxl", "graph", "mixed", {"memory_length": 50}),
    ],
)
@torch.no_grad()
def test_each_episode_alone(name, observation, action, more, num=5):
    """Log-probabilities and values, those of the last observations of truncated episodes and of the
    ones after the rollout too, are those of each episode alone, in a memory of one environment that
    begins with it; and those of minibatches, which have each step once. A rollout of 3 environments
    is cut in time for `num` minibatches."""
    script, flags = script_of(name)
    flags = any_env(name, observation, action) | flags | more
    flags |= dict(num_steps=10, norm_obs=False, num_minibatches=num)
    kwargs = flags.pop("env_kwargs")
    part = begun(script, [lambda: AnyEnv(**kwargs)] * 3, **flags)
    alone, num_cut = {}, 0
    for _ in range(2):
        collect(part, greedy=True)
        finals = dict(zip(part.cut, part.next_values[3:]))
        steps = [[of_env(step, part.envs.leaves, i) for step in part.seen] for i in range(3)]
        for i, own in enumerate(steps):
            if i in alone:
                alone[i].begin()
            for t, (step, after) in enumerate(zip(own, own[1:])):
                if step.terminated[0] or step.truncated[0]:
                    alone[i] = script.Memory(part.agent, part.envs.leaves, 1, part.args)
                    alone[i].begin()
                _, log_prob, value = alone[i].act(step, greedy=True)
                found, k = torch.cat([log_prob, value]), 3 * t + i
                expected = torch.stack([part.log_probs[k], part.values[k]])
                torch.testing.assert_close(found.to(expected), expected, atol=1e-5, rtol=1e-5)
                alone[i].keep(after)
                if after.truncated[0]:
                    value = alone[i].next_values(after)[1]
                    torch.testing.assert_close(value, finals[k], atol=1e-5, rtol=1e-5)
                    num_cut += 1
            if not (after.terminated[0] or after.truncated[0]):
                value = alone[i].next_values(after)[0]
                torch.testing.assert_close(value, part.next_values[i], atol=1e-5, rtol=1e-5)
        parts = list(part.memory.minibatches(np.random.default_rng(0), num))
        assert len(parts) == num
        assert sorted(np.concatenate([idx for idx, _ in parts])) == list(range(30))
        for idx, inputs in parts:
            _, log_prob, _, value = part.agent(*inputs)
            assert (log_prob - part.log_probs[idx]).abs().max() < 1e-5
            assert (value - part.values[idx]).abs().max() < 1e-5
    assert num_cut > 3


class RandomSpaces(gym.Env):
    """Random in all that it does; AssertionError for an action that is not legal."""

    def __init__(self):
        self.rng = np.random.default_rng(self.seed)

    def reset(self, *, seed=None, options=None):
        return sample(self.observation_space, self.rng), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        ends = self.rng.random(2) < 0.2
        obs = sample(self.observation_space, self.rng)
        return obs, self.rng.random(), bool(ends[0]), bool(ends[1]), {}


gym.register("RandomSpaces-v0", entry_point=RandomSpaces)
FUZZ = dict(deadline=None, derandomize=True, database=None)


@settings(max_examples=4, suppress_health_check=list(HealthCheck), **FUZZ)
@given(observation_spaces, action_spaces, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_random_spaces(observation_space, action_space, autoregressive, state_dependent_std, seed):
    """Two rollouts and updates of each script for whatever spaces there are."""
    RandomSpaces.observation_space, RandomSpaces.action_space = observation_space, action_space
    RandomSpaces.seed = seed
    shape = dict(env_id="RandomSpaces-v0", num_steps=5, num_envs=2, total_timesteps=20)
    shape |= dict(autoregressive=autoregressive, state_dependent_std=state_dependent_std)
    for name in SCRIPTS:
        script, flags = script_of(name)
        train(script, **flags | shape)
