"""Each part of an action chooses from what its name, the mask or --action-head says; what fits
nothing is refused by name; numbers become those of a Box; and the tasks that ask for each kind of
action have a known optimum, which is learned."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, GraphInstance, Sequence, Tuple
from gymnasium.spaces import Discrete as D
from gymnasium.spaces import MultiBinary as MB
from gymnasium.spaces import MultiDiscrete as MD
from helpers import (
    MASK,
    ListEnv,
    SmallEnv,
    UsageErrors,
    checked_parts,
    graph_space,
    logged,
    make_envs,
    mean_return,
    mismatch,
    plain,
    run,
    small_args,
    vector,
)

from cleanrl_graph import envs as ours  # noqa: F401
from cleanrl_graph import ppo_graph, ppo_gtrxl
from cleanrl_graph.envs import fitting
from cleanrl_graph.services.policy import load_policy


def rows_of(num):
    """A mask, or features, of rows."""
    return Sequence(Box(0, 1, (num,), np.float32), stack=True)


def head(name):
    return {"action_head": name}


CHAIN = {"autoregressive": True}
SET = Sequence(vector(2), stack=True)
G = graph_space(vector(2))
GRAPH, TWO, AVAILABLE = {"g": G}, {"a": G, "b": G}, {"avail_actions": SET}
NAMES = Dict(g=G, machines=Sequence(vector(1)), x=vector(1))


# ---- What parts choose from ----
@pytest.mark.parametrize(
    "space, observation, name, groups",
    [
        (D(50), GRAPH, "auto", [""]),
        (D(50), GRAPH, "nodes", ["g.nodes"]),
        (D(50), GRAPH | {"action_mask": MASK}, "auto", ["g.nodes"]),
        (D(50), GRAPH | AVAILABLE, "auto", ["avail_actions"]),
        (D(50), {"s": SET, "action_mask": MASK}, "auto", ["s"]),
        (D(5), {"nodes": SET, "tasks": SET, "edges": SET}, "edges", ["edges"]),
        (Dict(edge=D(9)), NAMES, "auto", ["g.edge_links"]),
        (Dict(machines=D(9), node=D(9), x=D(2)), NAMES, "auto", ["machines", "g.nodes", ""]),
        (Dict(node=vector(1), x=D(2)), NAMES, "auto", ["", ""]),
        (Dict(g=D(9), x=D(2)), NAMES, "auto", ["g.nodes", ""]),
        (Sequence(D(3)), TWO, "b", ["b.nodes"]),
        (Sequence(vector(1)), NAMES, "machines", ["machines"]),
    ],
)
def test_what_parts_choose_from(space, observation, name, groups):
    """By name in a Dict, else by --action-head, which says what rows act in a Sequence."""
    observation = Dict(observation) if isinstance(observation, dict) else observation
    parts = checked_parts(space, observation, action_head=name)
    acting = ppo_graph.acting_group(space, ppo_graph.leaves_of(observation), name)
    assert [part.group or acting or "" for part in parts] == groups
    assert (acting is not None) == isinstance(space, Sequence)


# ---- What is refused ----
def masked(mask, **seen):
    return Dict(x=vector(1), action_mask=mask, **seen)


@pytest.mark.parametrize(
    "space, observation, flags, sentence",
    [
        (D(50), {}, head("nodes"), "--action-head nodes"),
        (Dict(a=Sequence(vector(1))), GRAPH, {}, "--action-head auto: there are no such rows"),
        (D(50), TWO, head("nodes"), "'nodes' can mean each of .*'a.nodes', 'b.nodes'"),
        (Dict(node=D(9)), masked(Dict(nodes=MASK), g=G), {}, "'action_mask.nodes'"),
        (MD([4, 5]), masked(MB((4, 5))), {}, "'action_mask': .* with --autoregressive"),
        (Tuple((D(4), vector(1), D(5))), masked(MB((4, 5))), CHAIN, "does not fit"),
        (Dict(a=D(2), b=G), GRAPH, {}, "leaf 'action.b': .*Graph.* is not supported"),
    ],
)
def test_spaces_that_do_not_fit(space, observation, flags, sentence):
    """A sentence names the flag, the leaf or the space, in a script alone, too."""
    if isinstance(observation, dict):
        observation = Dict(x=vector(1), **observation)
    with pytest.raises(UsageErrors, match=sentence):
        checked_parts(space, observation, **flags)
    with pytest.raises(ppo_graph.UsageError):
        ppo_graph.parts_of(space, ppo_graph.leaves_of(observation), ppo_graph.Args(**flags))


GOOD = GraphInstance(np.zeros((2, 3), np.float32), np.zeros((3, 2)), np.zeros((3, 2), np.int64))


@pytest.mark.parametrize(
    "space, mask, kind, taken",
    [  # taken: how many values each column has where nothing is allowed
        (Dict(edge=D(3)), [0, 0, 0], MASK, [3]),
        (D(3), [0, 0, 0], MB(3), [3]),
        (Sequence(MD([2, 3])), [[1] * 5, [1, 1, 0, 0, 0]], rows_of(5), [2, 3, 2, 3]),
        (MD([3, 2]), [0, 1, 0, 0, 0], MB(5), [1, 2]),
    ],
)
def test_a_mask_that_allows_nothing(space, mask, kind, taken, capsys):
    """It counts as one that allows everything, with finite figures; the checks say so, once."""
    obs = {"g": GOOD, "action_mask": np.array(mask, np.int8)}
    good = obs | {"action_mask": np.ones_like(obs["action_mask"])}
    fitting.SAID.lines.clear()
    observation = Dict(g=G, action_mask=kind)
    makers = [lambda o=o: ListEnv(observation, [o] * 2, space) for o in (good, obs, good, obs)]
    found = make_envs(makers)
    flat = found.reset(0).obs
    found.step([None] * 4)
    said = "env 1, leaf 'action_mask', step 0: no action is allowed"
    assert capsys.readouterr().err.count(said) == 1
    agent = ppo_graph.Agent(found.leaves, space, small_args())
    storage = ppo_graph.Storage(found.leaves, torch.device("cpu"))
    batch = storage.append(ppo_graph.join([flat] * 100))
    action = plain(agent)(batch)[0]
    _, log_prob, entropy, value = plain(agent)(batch, action)
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    grads = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
    assert all(each.isfinite().all() for each in (log_prob, entropy, *grads))
    chosen = action.reshape(400, -1)[1::2]
    assert [len(column.unique()) for column in chosen.T] == taken


# ---- Numbers of a Box ----
BOUNDS = {  # (low, high, dtype) of a Box: what the policy's -1, 0, 0.5, 1 and 7 become
    (-1, 1, np.float32): [-1, 0, 0.5, 1, 1],
    (0, 1000, np.float64): [0, 500, 750, 1000, 1000],
    (10, 12, np.float64): [10, 11, 11.5, 12, 12],
    (3, 3, np.float64): [3, 3, 3, 3, 3],
    (0, np.inf, np.float64): [0, 0, 0.5, 1, 7],
    (-np.inf, 0.75, np.float64): [-1, 0, 0.5, 0.75, 0.75],
    (-3.4e38, 3.4e38, np.float64): [-1, 0, 0.5, 1, 7],  # as good as infinite
    (-3, 3, np.int8): [-3, 0, 2, 3, 3],
    (0, 2**63 - 1, np.int64): [0, 2**62, 3 * 2**61, 2**63 - 1, 2**63 - 1],
}


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_box_actions_are_scaled(bounds):
    """-1 and 1 are bounds that are finite, else actions are clipped; integers are the next ones."""
    low, high, dtype = bounds
    space = Box(low, high, (1,), dtype)
    numbers, counts = np.array([[-1], [0], [0.5], [1], [7]], np.float32), np.array([5])
    with np.errstate(all="raise"):
        actions = ppo_graph.to_env_actions(space, {"": numbers}, "", [])
        (rows,) = ppo_graph.to_env_actions(Sequence(space, stack=True), {"a": numbers}, "a", counts)
    assert all(action in space for action in actions)
    np.testing.assert_allclose(np.concatenate(actions), BOUNDS[bounds], rtol=1e-12, atol=1e-9)
    assert np.array_equal(np.stack(actions), rows)
    entries = Box(np.array([low, -np.inf]), np.array([high, 3.0]), dtype=np.float64)
    if dtype == np.float64:  # each entry has its own bounds
        pairs = np.concatenate([numbers, numbers], 1)
        actions = np.stack(ppo_graph.to_env_actions(entries, {"": pairs}, "", []))
        np.testing.assert_allclose(actions.T, [BOUNDS[bounds], [-1, 0, 0.5, 1, 3]], atol=1e-9)


# ---- Tasks ----
TASKS = {  # name -> (environment, its arguments); the optimum is 8
    "verb": ("VerbObject", {}),
    "verb, rows": ("VerbObject", {"as_rows": True}),
    "bits": ("Switches", {}),
    "bits of rows": ("Switches", {"in_rows": True}),
    "pointers": ("Assign", {}),
    "for all": ("Convoy", {}),
    "edge": ("BestEdge", {}),
    "each node": ("Colouring", {}),
    "each node's number": ("NeighbourMean", {}),
    "node, then amount": ("NodeAmount", {}),
}


def best(env, obs):
    """The best action of a task."""
    env = env.unwrapped
    if hasattr(env, "verb"):
        pair = (env.verb, env.object)
        return dict(zip(("act", "things"), pair)) if env.as_rows else np.array(pair)
    if hasattr(env, "may"):
        return (env.wants * env.may).astype(np.int8)
    if hasattr(env, "right"):
        return {"robots": tuple({"tasks": int(own.argmax())} for own in env.right)}
    if hasattr(env, "middle"):
        return (env.middle + env.half * env.wanted).astype(np.float32)
    if hasattr(env, "gears"):
        return {"robots": tuple(env.gears), "speed": 10 * env.wanted}
    if isinstance(env.action_space, Sequence):
        return env.best if env.action_space.stack else tuple(env.colours.tolist())
    if "amount" not in env.action_space.spaces:
        return {"edge": env.best}
    node = np.flatnonzero(obs["action_mask"]["node"])[env.num_steps % 2]
    return {"node": node, "amount": env.wants[node]}


@pytest.mark.parametrize("name", [*TASKS, "bounds"])
def test_tasks(name):
    """The optimum is known, the best action is in the space, and a seed fixes everything."""
    env_id, kwargs = TASKS.get(name, ("Dials", {"low": 10, "high": 12}))
    env_id = f"cleanrl_graph.envs:{env_id}-v0"
    env, other = gym.make(env_id, **kwargs), gym.make(env_id, disable_env_checker=True, **kwargs)
    for episode in range(6):
        (obs, _), (again, _) = (each.reset(seed=episode) for each in (env, other))
        total, ended = 0.0, False
        while not ended:
            assert obs in env.observation_space and repr(obs) == repr(again)
            action = best(env, obs)
            assert action in env.action_space
            (obs, reward, ended, *_), (again, *_) = (each.step(action) for each in (env, other))
            assert reward <= 1
            total += reward
        assert total == pytest.approx(0 if name == "bounds" else 8, abs=1e-5)


def task(name, **flags):
    env_id, kwargs = TASKS[name]
    return dict(env_id=f"envs:{env_id}-v0", env_kwargs=kwargs) | flags


@pytest.mark.parametrize(
    "script, name, flags",
    [
        ("ppo_graph_aux", "for all", {"aux": "predict"}),
        ("ppo_framestack", "pointers", {}),
        ("ppo_gtrxl", "for all", CHAIN),
        ("ppo_lstm_sparse", "pointers", {}),
    ],
)
def test_memories_of_such_actions(script, name, flags, tmp_path):
    """What is remembered of the last action is the same in training: the first ratio is 1."""
    module = importlib.import_module(f"cleanrl_graph.{script}")
    assert mismatch(run(tmp_path, module, **task(name, **flags))) < 1e-5


def test_the_next_step_sees_the_mean_of_the_rows():
    """Of one action per node the memory sees how many nodes took each option, as shares."""
    found = ppo_gtrxl.Envs([lambda: gym.make("cleanrl_graph.envs:Colouring-v0")])
    agent = ppo_gtrxl.Agent(found.leaves, found.action_space, small_args(ppo_gtrxl))
    ptr, batch = torch.tensor([0, 3, 3, 4]), torch.tensor([0, 0, 0, 2])
    elements = {"graph.nodes": ppo_gtrxl.Ragged(torch.zeros(4, 3), ptr, batch)}
    action = {"graph.nodes": torch.tensor([[1], [1], [0], [0]])}
    seen = ppo_gtrxl.embed_action(agent.head, action, elements, {})
    torch.testing.assert_close(seen, torch.tensor([[1 / 3, 2 / 3], [0, 0], [1, 0]]))


# ---- Masks that the services turn ----
class Pair(SmallEnv):
    """A mask of both parts together; an action that it forbids costs 1."""

    observation_space = Dict(x=vector(2), action_mask=MB((2, 3)))
    action_space, terminates = MD([2, 3]), True

    def observe(self):
        self.mask = np.zeros((2, 3), np.int8)
        self.mask.flat[self.np_random.integers(6, size=2)] = 1
        return {"x": self.np_random.random(2, np.float32), "action_mask": self.mask}

    def reward(self, action):
        return float(self.mask[tuple(action)]) - 1


gym.register("MasksPair-v0", Pair)


def test_masks_are_turned_everywhere(tmp_path):
    """No action is drawn that is forbidden, in training, evaluation or by load_policy."""
    flags = dict(env_id="MasksPair-v0", num_workers=1, save_model=True, **CHAIN)
    found = run(tmp_path, eval_episodes=4, **flags)
    returns = [*logged(found, "charts/episodic_return"), *(row["return"] for row in found.rows)]
    assert returns and not any(returns)
    env, policy = Pair(), load_policy(str(found.folder / "model.pt"), greedy=False)
    env.reset(seed=0)
    for _ in range(20):
        assert env.step(policy(env.reset()[0]))[1] == 0


LEARN = dict(num_envs=16, num_steps=32, num_minibatches=4, update_epochs=4, eval_episodes=64)
LEARN |= dict(learning_rate=2.5e-3, ent_coef=0.0, gamma=0.0, gnn_dim=32, hidden_dims=(64,))
TOY = dict(gnn_dim=64, total_timesteps=12288)
FEW = TOY | {"env_kwargs": {"max_edges": 8, "num_colours": 2}}
LEARNED = [(name, "graph", {}, 7.6) for name in list(TASKS)[:6]]
LEARNED += [
    ("pointers", "framestack", {}, 7.6),
    ("pointers", "graph_agents", {}, 7.6),
    ("edge", "graph", FEW, 6),
]
LEARNED += [("each node", "graph", TOY, 7), ("each node's number", "graph", TOY, 5.8)]


@pytest.mark.slow
@pytest.mark.parametrize("name, script, more, least", LEARNED)
def test_tasks_are_learned(name, script, more, least, tmp_path):
    """Greedy returns, of which the optimum is 8; random actions earn less than 4.5."""
    flags = LEARN | dict(autoregressive=name in ("verb", "verb, rows", "for all"))
    flags |= dict(total_timesteps=40_960 if name == "for all" else 24_576) | more
    module = importlib.import_module(f"cleanrl_graph.ppo_{script}")
    assert mean_return(run(tmp_path, module, **task(name, **flags))) >= least
