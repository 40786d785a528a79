"""--critic-only: in every script these keys of the observation enter the value and no probability,
and a trained policy acts without them."""

import importlib
import json
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import IDS, graph_space, logged, mismatch, record, run, sample, small_args, vector
from processes import SMALL

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import export
from cleanrl_graph.services.policy import load_policy

SCRIPTS = SMALL | {"ppo_graph_aux": {"aux": "reconstruct"}}
SCRIPTS |= {"ppo_graph": {}, "ppo_graph_agents": {}}  # async and compile have ppo_graph's agent
GRAPH = graph_space(vector(2))
HIDDEN = {
    "state": vector(2),
    "gear": spaces.Discrete(3),
    "camera": spaces.Box(0, 255, (8, 8, 1), np.uint8),
    "world": GRAPH,
    "crowd": spaces.Sequence(spaces.Dict(place=vector(2), kind=spaces.Discrete(2))),
}
NAMES = ("goal.state", "gear", "camera", "world", "goal.crowd")


class Hidden(gym.Env):
    """Random observations, of which those below HIDDEN are drawn by numbers of their own. An action
    chooses a node, or each node acts. Every other episode of 5 steps is truncated."""

    def __init__(self, noise=0, act="choose", keys=True):
        shown = {"graph": GRAPH, "goal": spaces.Dict(x=vector(1))}
        self.keys = keys
        if keys:
            goal = {"x": vector(1), "state": HIDDEN["state"], "crowd": HIDDEN["crowd"]}
            own = {name: HIDDEN[name] for name in ("gear", "camera", "world")}
            shown |= {"goal": spaces.Dict(goal)} | own
        self.observation_space = spaces.Dict(shown)
        self.action_space = spaces.Dict(graph=spaces.Discrete(99), x=vector(1))
        self.is_each = act == "each"
        if self.is_each:
            self.action_space = spaces.Sequence(spaces.Discrete(2))
        self.noise, self.num_episodes, self.taken = noise, 0, []

    def observe(self):
        goal = {"x": sample(vector(1), self.np_random)}
        size = lambda rng: 4 if self.is_each else rng.integers(1, 6)
        graph = sample(GRAPH, self.np_random, size)
        self.num_nodes = len(graph.nodes)
        obs = {"graph": graph, "goal": goal}
        if self.keys:
            own = {name: sample(space, self.other) for name, space in HIDDEN.items()}
            goal |= {name: own.pop(name) for name in ("state", "crowd")}
            obs |= own
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None or not self.num_episodes:
            self.other = np.random.default_rng([seed or 0, self.noise])
        self.t, self.num_episodes = 0, self.num_episodes + 1
        return self.observe(), {}

    def step(self, action):
        self.taken.append(action)
        self.t += 1
        info = {"rewards": np.ones(self.num_nodes)}
        done = self.t == 5
        ended = done and self.num_episodes % 2 == 0
        return self.observe(), 1.0, ended, done and not ended, info


gym.register("Hidden-v0", Hidden)


def flags_of(name, noise=0, **flags):
    act = "each" if name == "ppo_graph_agents" else "choose"
    own = dict(env_id="Hidden-v0", env_kwargs={"noise": noise, "act": act}, critic_only=NAMES)
    return own | dict(gnn_layers=1) | SCRIPTS[name] | flags


def trained(folder, name, noise=0, **flags):
    script = importlib.import_module(f"cleanrl_graph.{name}")
    return run(folder, script, save_model=True, **flags_of(name, noise, **flags))


@pytest.mark.parametrize("name", SCRIPTS)
def test_changes_no_probability(name, tmp_path):
    """With other values of these keys only V differs; collection and update agree; load_policy does
    the same with other values of the keys, or without them."""
    flags = dict(learning_rate=1e-30, norm_obs=True)
    one, two = (trained(tmp_path / str(k), name, noise=k, **flags) for k in range(2))
    for tag in ("losses/entropy", "charts/rows/graph.nodes"):
        assert logged(one, tag) == logged(two, tag)
    assert logged(one, "losses/value_loss") != logged(two, "losses/value_loss")
    assert max(mismatch(one), mismatch(two)) < 1e-5
    path, act = one.folder / "model.pt", "each" if name == "ppo_graph_agents" else "choose"
    taken = []
    for noise, keys in ((0, True), (1, True), (0, False)):
        env = Hidden(noise, act, keys)
        policy = load_policy(path, None if keys else env)
        obs, _ = env.reset(seed=3)
        actions = []
        for _ in range(6):
            action = policy(obs, 1.0)
            actions.append(json.dumps(action, default=lambda value: np.asarray(value).tolist()))
            obs, *_ = env.step(action)
        taken.append(actions)
    assert taken[0] == taken[1] == taken[2]


@pytest.mark.parametrize("name", ["goal", "world.nodes"])
def test_what_is_named(name):
    """A key, or a key inside of one; a graph or a set is hidden whole."""
    agent = agent_of(name)
    paths = {leaf.path for leaf in agent.critic_encoder.leaves}
    parts = ("goal.crowd.kind", "goal.crowd.place", "goal.state", "goal.x")
    assert paths == set(
        parts if name == "goal" else ("world.edge_links", "world.edges", "world.nodes")
    )
    assert not paths & {leaf.path for leaf in agent.encoder.leaves}


@pytest.mark.parametrize("name", ["goal.crowd.kind", "action_mask", "nope"])
def test_what_cannot_be_named(name):
    """A part of a set, or a mask. The sentence has the keys that there are."""
    with pytest.raises(ppo_graph.UsageError, match=f"--critic-only {name}: .*'goal.state'"):
        agent_of(name)


def agent_of(name):
    masks = {"action_mask": spaces.MultiBinary(2), "node_ids": IDS}
    leaves = ppo_graph.leaves_of(spaces.Dict(Hidden().observation_space.spaces | masks))
    return ppo_graph.Agent(leaves, spaces.Discrete(2), small_args(critic_only=(name,)))


@pytest.mark.parametrize("name", ["ppo_graph", "ppo_graph_aux", "ppo_gtrxl"])
def test_only_the_value_has_gradients(name, tmp_path):
    """These networks learn from the loss of the value and from no other."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    for vf_coef in (0.0, 0.5):
        flags = flags_of(name, vf_coef=vf_coef, total_timesteps=24)
        found = record(tmp_path / str(vf_coef), script, **flags)
        sizes = Counter()
        for gradients in found.gradients:
            for key, gradient in gradients.items():
                sizes[key.split(".")[0]] += gradient.abs().sum().item()
        own = {key for key, _ in found.agent.named_parameters() if key.startswith("critic_encoder")}
        assert len(own) > 10 and own <= set(found.gradients[0])
        assert sizes["encoder"] > 0 and (sizes["critic_encoder"] > 0) == (vf_coef > 0)


@pytest.mark.slow
def test_an_exported_policy(tmp_path):
    """It takes no such key, and returns no value."""
    path = trained(tmp_path, "ppo_graph").folder / "model.pt"
    out = tmp_path / "policy.pt2"
    export.export(str(path), str(out))
    file = json.loads(out.with_suffix(".json").read_text())
    leaves = {name for name in file["inputs"] if not name.startswith("counts")}
    assert leaves == {"graph.nodes", "graph.edge_links", "graph.edges", "goal.x"}
