"""Masks that depend on earlier parts, masks of bits, a choice for each row, parts for all beside
parts of each row: every joint action of small ragged batches is tried, in float64."""

import importlib
import itertools
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import MASK, ListEnv, UsageErrors, checked_parts, graph_space, make_envs, run, vector

from cleanrl_graph import envs as ours  # noqa: F401
from cleanrl_graph import ppo_graph, ppo_graph_agents
from cleanrl_graph.envs.masks import CanonicalMasks
from cleanrl_graph.services.export import export
from cleanrl_graph.services.policy import load_policy


def rows_of(num):
    """A mask, or features, of rows."""
    return spaces.Sequence(spaces.Box(0, 1, (num,), np.float32), stack=True)


ROBOTS = {"robots": rows_of(2), "tasks": rows_of(3)}
NODES = {"g": graph_space(vector(2))}
D = spaces.Discrete
TASK = spaces.Sequence(spaces.Dict(tasks=D(9)))
PAIR = spaces.Tuple((D(9), D(9)))
CHAIN = {"autoregressive": True}
CHAIN_NODES = CHAIN | {"action_head": "nodes"}
CHAIN_ROBOTS = CHAIN | {"action_head": "robots"}


class Case(NamedTuple):
    """`legal(mask, a)`: whether a mask of one observation allows an action. a["k"] are the numbers
    of part k, of each row that acts those in a["k"][row]."""

    action: spaces.Space
    extra: dict
    masks: object
    flags: dict
    legal: object = lambda mask, a: True


def pairs(mask, a, first, second, num):
    return mask[second][a[first] * num + a[second]]


CASES = {
    "joint": Case(
        spaces.MultiDiscrete([2, 3]),
        {},
        spaces.MultiBinary((2, 3)),
        CHAIN,
        lambda mask, a: mask[a["0"], a["1"]],
    ),
    "joint of a Tuple": Case(
        spaces.Tuple((D(3), D(2))),
        {},
        spaces.MultiBinary(6),
        CHAIN,
        lambda mask, a: mask[2 * a["0"] + a["1"]],
    ),
    "joint of three": Case(
        spaces.Tuple((D(2), D(3), D(2))),
        {},
        spaces.Tuple((spaces.MultiBinary(2), spaces.MultiBinary((2, 3)), spaces.MultiBinary(6))),
        CHAIN,
        lambda mask, a: (
            mask[0][a["0"]] and mask[1][a["0"], a["1"]] and mask[2][2 * a["1"] + a["2"]]
        ),
    ),
    "verb, then object": Case(
        spaces.Dict(a=D(2), b=D(3)),
        {},
        spaces.Dict(a=spaces.MultiBinary(2), b=spaces.MultiBinary((2, 3))),
        CHAIN,
        lambda mask, a: mask["a"][a["a"]] and mask["b"][a["a"], a["b"]],
    ),
    "bits given a verb": Case(
        spaces.Tuple((D(2), spaces.MultiBinary(2))),
        {},
        spaces.Tuple((spaces.MultiBinary(2), spaces.MultiBinary((2, 4)))),
        CHAIN,
        lambda mask, a: (
            mask[0][a["0"]] and mask[1][a["0"], a["1"][0]] and mask[1][a["0"], 2 + a["1"][1]]
        ),
    ),
    "row, then option": Case(
        spaces.Dict(node=D(9), option=D(3)),
        NODES,
        spaces.Dict(node=MASK, option=rows_of(3)),
        CHAIN,
        lambda mask, a: mask["node"][a["node"]] and mask["option"][a["node"], a["option"]],
    ),
    "row and option in one": Case(
        spaces.Dict(node=D(9), option=D(3)),
        NODES,
        rows_of(3),
        CHAIN,
        lambda mask, a: mask[a["node"], a["option"]],
    ),
    "option, then row": Case(
        spaces.Dict(action=D(2), node=D(9)),
        NODES,
        spaces.Dict(action=spaces.MultiBinary(2), node=MASK),
        CHAIN,
        lambda mask, a: (
            mask["action"][a["action"]] and pairs(mask, a, "action", "node", len(mask["node"]) // 2)
        ),
    ),
    "option, then any row": Case(
        spaces.Dict(action=D(2), node=D(9)),
        NODES,
        spaces.Dict(node=MASK),
        CHAIN,
        lambda mask, a: mask["node"][a["node"]],
    ),
    "pair of rows": Case(
        PAIR,
        NODES,
        spaces.Tuple((MASK, MASK)),
        CHAIN_NODES,
        lambda mask, a: mask[0][a["0"]] and mask[1][a["0"] * len(mask[0]) + a["1"]],
    ),
    "rows of two sets": Case(
        spaces.Dict(robots=D(9), tasks=D(9)),
        ROBOTS,
        spaces.Dict(robots=MASK, tasks=MASK),
        CHAIN,
        lambda mask, a: (
            mask["robots"][a["robots"]]
            and pairs(mask, a, "robots", "tasks", len(mask["tasks"]) // len(mask["robots"]))
        ),
    ),
    "joint per row": Case(
        spaces.Sequence(spaces.MultiDiscrete([2, 3])),
        NODES,
        rows_of(6),
        CHAIN,
        lambda mask, a: all(mask[r, 3 * x + y] for r, (x, y) in enumerate(zip(a["0"], a["1"]))),
    ),
    "two entries a bit": Case(
        spaces.MultiBinary(3),
        {},
        spaces.MultiBinary((3, 2)),
        {},
        lambda mask, a: all(mask[k, bit] for k, bit in enumerate(a["0"])),
    ),
    "one entry a bit": Case(
        spaces.MultiBinary(3),
        {},
        spaces.MultiBinary(3),
        {},
        lambda mask, a: all(mask[k] or not bit for k, bit in enumerate(a["0"])),
    ),
    "one bit": Case(
        spaces.MultiBinary(1),
        {},
        spaces.MultiBinary(1),
        {},
        lambda mask, a: mask[0] or not a["0"][0],
    ),
    "bits beside options": Case(
        spaces.Tuple((D(2), spaces.MultiBinary(2))),
        {},
        spaces.MultiBinary(4),
        {},
        lambda mask, a: mask[a["0"]] and all(m or not bit for m, bit in zip(mask[2:], a["1"])),
    ),
    "bits of each row": Case(
        spaces.Sequence(spaces.MultiBinary(2)),
        NODES,
        rows_of(4),
        {},
        lambda mask, a: all(own[0 + x] and own[2 + y] for own, (x, y) in zip(mask, a["0"])),
    ),
    "one entry a bit of each row": Case(
        spaces.Sequence(spaces.MultiBinary(2)),
        NODES,
        rows_of(2),
        {},
        lambda mask, a: all((own >= bits).all() for own, bits in zip(mask, a["0"])),
    ),
    "a task for each robot": Case(
        TASK,
        ROBOTS,
        MASK,
        {"action_head": "robots"},
        lambda mask, a: all(
            mask[r * (len(mask) // len(a["tasks"])) + task] for r, task in enumerate(a["tasks"])
        ),
    ),
    "any task for each robot": Case(TASK, ROBOTS, None, {"action_head": "robots"}),
    "task, then speed": Case(
        spaces.Dict(robots=spaces.Sequence(spaces.Dict(speed=D(2), tasks=D(9)))),
        ROBOTS,
        spaces.Dict(robots=spaces.Dict(speed=rows_of(2), tasks=MASK)),
        CHAIN,
        lambda mask, a: all(
            mask["robots"]["tasks"][r * (len(mask["robots"]["tasks"]) // len(a["tasks"])) + task]
            and mask["robots"]["speed"][r, speed]
            for r, (task, speed) in enumerate(zip(a["tasks"], a["speed"]))
        ),
    ),
    "another robot": Case(spaces.Sequence(spaces.Dict(robots=D(9))), ROBOTS, None, CHAIN_ROBOTS),
    "for all and for each": Case(
        spaces.Dict(robots=spaces.Sequence(D(2)), speed=D(3)),
        ROBOTS,
        spaces.Dict(robots=rows_of(2), speed=spaces.MultiBinary(3)),
        {},
        lambda mask, a: (
            mask["speed"][a["speed"]]
            and all(mask["robots"][r, x] for r, x in enumerate(a["robots"]))
        ),
    ),
    "for each given that for all": Case(
        spaces.Dict(robots=spaces.Sequence(D(2)), speed=D(3)),
        ROBOTS,
        spaces.Dict(robots=rows_of(6), speed=spaces.MultiBinary(3)),
        CHAIN,
        lambda mask, a: (
            mask["speed"][a["speed"]]
            and all(mask["robots"][r, 2 * a["speed"] + x] for r, x in enumerate(a["robots"]))
        ),
    ),
    "a choice for all, a task for each": Case(
        spaces.Tuple((spaces.Dict(tasks=D(9)), spaces.MultiBinary(1), TASK)),
        ROBOTS,
        None,
        CHAIN_ROBOTS,
    ),
}
SIZES = [(0, 2), (1, 2), (2, 3)]  # of robots or nodes, and of tasks or edges


def mask_of(name, space, rng, n, m):
    """A mask for `n` rows that are first, `m` second ones; each block of options has one that is
    allowed."""

    def blocks(num, size):
        mask = rng.integers(0, 2, (num, size)).astype(np.int8)
        mask[np.arange(num), rng.integers(max(size, 1), size=num) if size else 0] = 1
        return mask

    kinds = {
        "joint": lambda: blocks(2, 3),
        "joint of a Tuple": lambda: blocks(3, 2).ravel(),
        "joint of three": lambda: (blocks(1, 2)[0], blocks(2, 3), blocks(3, 2).ravel()),
        "verb, then object": lambda: {"a": blocks(1, 2)[0], "b": blocks(2, 3)},
        "bits given a verb": lambda: (blocks(1, 2)[0], blocks(4, 2).reshape(2, 4)),
        "row, then option": lambda: {"node": blocks(1, n)[0], "option": blocks(n, 3)},
        "row and option in one": lambda: blocks(n, 3) * blocks(1, n).T,
        "option, then row": lambda: {"action": blocks(1, 2)[0], "node": blocks(2, n).ravel()},
        "option, then any row": lambda: {"node": blocks(1, n)[0]},
        "pair of rows": lambda: (blocks(1, n)[0], blocks(n, n).ravel()),
        "rows of two sets": lambda: {"robots": blocks(1, n)[0], "tasks": blocks(n, m).ravel()},
        "joint per row": lambda: blocks(n, 6),
        "two entries a bit": lambda: blocks(3, 2),
        "one entry a bit": lambda: rng.integers(0, 2, 3),
        "one bit": lambda: rng.integers(0, 2, 1),
        "bits beside options": lambda: np.append(blocks(1, 2)[0], rng.integers(0, 2, 2)),
        "bits of each row": lambda: blocks(2 * n, 2).reshape(n, 4),
        "one entry a bit of each row": lambda: rng.integers(0, 2, (n, 2)),
        "a task for each robot": lambda: blocks(n, m).ravel(),
        "task, then speed": lambda: {
            "robots": {"speed": blocks(n, 2), "tasks": blocks(n, m).ravel()}
        },
        "for all and for each": lambda: {"robots": blocks(n, 2), "speed": blocks(1, 3)[0]},
        "for each given that for all": lambda: {
            "robots": blocks(3 * n, 2).reshape(n, 6),
            "speed": blocks(1, 3)[0],
        },
    }
    return kinds[name]()


def setup(name, script=ppo_graph):
    """(agent with random weights in its head, storage of three observations, their masks, Envs)"""
    case = CASES[name]
    rng = np.random.default_rng(0)
    observations = []
    acts = "Sequence" in str(case.action)
    for n, m in SIZES:
        n = n if acts else n + 1
        obs = {"x": rng.random(2, np.float32)}
        if case.extra is ROBOTS:
            obs["robots"] = rng.random((n, 2), np.float32)
            obs["tasks"] = rng.random((m, 3), np.float32)
        elif case.extra is NODES:
            links = rng.integers(max(n, 1), size=(n and m, 2))
            edges = rng.random((n and m, 2), np.float32)
            obs["g"] = spaces.GraphInstance(rng.random((n, 3), np.float32), edges, links)
        if case.masks is not None:
            obs["action_mask"] = mask_of(name, case.masks, rng, n, m)
        observations.append(obs)
    space = {"x": vector(2), **case.extra}
    if case.masks is not None:
        space["action_mask"] = case.masks
    space = spaces.Dict(space)
    makers = [lambda own=own: ListEnv(space, [own] * 3, case.action) for own in observations]
    envs = make_envs(makers, script=script, **case.flags)
    storage = script.Storage(envs.leaves, torch.device("cpu"))
    storage.append(envs.reset(0).obs)
    agent = script.Agent(envs.leaves, case.action, script.Args(**case.flags))
    for parameter in agent.head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return agent, storage, [obs.get("action_mask") for obs in observations], envs


def double(agent, same=True):
    """The head's outputs in float64, for a batch of the same observation again and again."""
    agent.head.double()
    for part_head in agent.head.heads:
        if part_head.condition:
            part_head.condition.register_forward_pre_hook(lambda layer, x: (x[0].double(),))

    def call(obs, action=None, greedy=False):
        features, elements = agent.encoder(obs)
        latent = agent.actor(features)
        if same:  # float32 rounds the same observation in other ways at other places
            latent = latent[:1].expand_as(latent)
            for group, own in elements.items():
                num = len(own.values) // len(latent)
                values = own.values[:num].repeat(len(latent), 1)
                elements[group] = own._replace(values=values)
        for group, own in elements.items():
            elements[group] = own._replace(values=own.values.double())
        return agent.head(latent.double(), elements, obs, action, greedy)

    return call


def every_action(agent, obs):
    """(all actions [K, rows of one, columns] of one observation; of each what its parts have)"""
    parts = [head.part for head in agent.head.heads]
    _, elements = agent.encoder(obs)
    num = len(elements[agent.head.acting].batch) if agent.head.acting else 0
    draws = []  # (part, row)
    options = []
    for part in parts:
        size = len(elements[part.group].batch) if part.group else part.n
        for row in range(num) if part.rows else [0]:
            draws.append((part, row))
            options.append(list(itertools.product(range(size), repeat=part.k)))
    factors = ppo_graph.leaves_of(agent.head.space, "action")
    bits = {leaf.path for leaf in factors if isinstance(leaf.space, spaces.MultiBinary)}
    groups = {part.rows: num if part.rows else 1 for part in parts}
    actions = {group: [] for group in groups}
    meanings = []
    for chosen in itertools.product(*options):
        action = {}
        for group, size in groups.items():
            width = sum(part.k for part in parts if part.rows == group)
            action[group] = np.zeros((size, width), np.float32)
            actions[group].append(action[group])
        meaning = {name_of(part, parts): [] for part in parts}
        for (part, row), own in zip(draws, chosen):
            action[part.rows][row, part.columns] = own
            value = own if part.path in bits else own[0]
            if part.rows:
                meaning[name_of(part, parts)].append(np.array(value))
            else:
                meaning[name_of(part, parts)] = value
        meanings.append(meaning)
    return {group: torch.tensor(np.array(own)) for group, own in actions.items()}, meanings


def flat(actions, num):
    """[num, any], what one observation's rows have, for `num` observations alike."""
    return torch.cat([own.reshape(num, -1) for own in actions.values()], 1)


def name_of(part, parts):
    """The last key of a path."""
    if part.path == "action":
        return "0"
    last = part.path.rpartition(".")[2]
    paths = {other.path for other in parts if other.path.endswith(f".{last}")}
    return last if len(paths) == 1 else part.path


@pytest.mark.parametrize("name", CASES)
def test_all_joint_actions_are_tried(name):
    """Probabilities sum to 1, they are 0 where the masks forbid an action and nowhere else, and the
    entropy is exact; samples and modes agree with them, and a batch with each of its parts."""
    case = CASES[name]
    agent, storage, masks, _ = setup(name)
    head = double(agent)
    together = []
    for i, mask in enumerate(masks):
        actions, meanings = every_action(agent, storage.gather(np.array([i]))[0])
        legal = torch.tensor([bool(case.legal(mask, a)) for a in meanings])
        assert legal.any()
        K = len(meanings)
        given = {group: own.flatten(0, 1) for group, own in actions.items()}
        with torch.no_grad():
            obs = storage.gather(np.full(K, i))[0]
            taken, log_prob, entropy = head(obs, given)
            sampled, sample_log_prob, _ = head(storage.gather(np.full(300, i))[0])
            _, again, _ = head(storage.gather(np.full(300, i))[0], sampled)
            best, best_log_prob, _ = head(storage.gather(np.array([i]))[0], greedy=True)
        assert list(taken) == list(given) and log_prob.shape == (K,)
        assert torch.equal(flat(taken, K), flat(given, K))
        p = log_prob.exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-12)
        assert torch.equal(p > 0, legal)
        exact = -(p[legal] * log_prob[legal]).sum().item()
        assert (p * entropy).sum().item() == pytest.approx(exact, abs=1e-12)
        torch.testing.assert_close(again, sample_log_prob)
        index = {tuple(a): k for k, a in enumerate(flat(given, K).tolist())}
        counts = torch.bincount(
            torch.tensor([index[tuple(a)] for a in flat(sampled, 300).tolist()]), minlength=K
        )
        assert not counts[~legal].any()
        assert ((counts / 300 - p).abs() < 6 * (p * (1 - p) / 300).sqrt() + 0.01).all()
        if not case.flags.get("autoregressive"):
            assert index[tuple(flat(best, 1)[0].tolist())] == p.argmax()
        first = {group: own[: len(best[group])] for group, own in sampled.items()}
        together.append((first, sample_log_prob[0]))
    with torch.no_grad():
        action, expected = zip(*together)
        action = {group: torch.cat([own[group] for own in action]) for group in action[0]}
        _, log_prob, _ = double(agent, False)(storage.gather(np.arange(3))[0], action)
    torch.testing.assert_close(log_prob, torch.stack(expected), atol=1e-5, rtol=1e-5)


# ---- Tasks ----
def best(env):
    """The best action of a task."""
    env = env.unwrapped
    if hasattr(env, "verb"):
        pair = (env.verb, env.object)
        return dict(zip(("act", "things"), pair)) if env.as_rows else np.array(pair)
    if hasattr(env, "wants"):
        return (env.wants * env.may).astype(np.int8)
    if hasattr(env, "right"):
        return {"robots": tuple({"tasks": int(own.argmax())} for own in env.right)}
    if hasattr(env, "middle"):
        return (env.middle + env.half * env.wanted).astype(np.float32)
    return {"robots": tuple(env.gears), "speed": 10 * env.wanted}


TASKS = {
    "verb": ("VerbObject", {}),
    "verb, rows": ("VerbObject", {"as_rows": True}),
    "bits": ("Switches", {}),
    "bits of rows": ("Switches", {"in_rows": True}),
    "pointers": ("Assign", {}),
    "for all": ("Convoy", {}),
}
OPTIMA = dict.fromkeys(TASKS, 8) | {"bounds": 0}


@pytest.mark.parametrize("name", OPTIMA)
def test_tasks(name):
    """The optimum is known, the best action is in the space, and a seed fixes everything."""
    env_id, kwargs = TASKS.get(name, ("Dials", {"low": 10, "high": 12}))
    env, other = (gym.make(f"cleanrl_graph.envs:{env_id}-v0", **kwargs) for _ in range(2))
    for episode in range(10):
        (obs, _), (again, _) = (each.reset(seed=episode) for each in (env, other))
        total = 0.0
        ended = False
        while not ended:
            assert obs in env.observation_space and repr(obs) == repr(again)
            action = best(env)
            assert action in env.action_space
            (obs, reward, ended, *_), (again, *_) = (each.step(action) for each in (env, other))
            total += reward
        assert total == pytest.approx(OPTIMA[name], abs=1e-5)


@pytest.mark.parametrize(
    "script, name, flags",
    [
        ("ppo_graph", "verb, rows", CHAIN),
        ("ppo_graph", "bits of rows", {}),
        ("ppo_graph", "pointers", {}),
        ("ppo_graph", "for all", CHAIN),
        ("ppo_graph_agents", "pointers", {}),
        ("ppo_graph_async", "for all", {}),
        ("ppo_graph_aux", "for all", {"aux": "predict"}),
        ("ppo_graph_compile", "for all", {"compile_mode": "none"}),
        ("ppo_framestack", "for all", {}),
        ("ppo_framestack", "pointers", {}),
        ("ppo_gtrxl", "for all", CHAIN),
        ("ppo_gtrxl", "verb, rows", CHAIN),
        ("ppo_lstm_sparse", "for all", CHAIN),
        ("ppo_lstm_sparse", "pointers", {}),
        ("ppo_lstm_sparse", "verb", CHAIN),
    ],
)
def test_collection_and_training_agree(script, name, flags, tmp_path):
    """The first ratio of a minibatch is 1."""
    env_id, kwargs = TASKS[name]
    module = importlib.import_module(f"cleanrl_graph.{script}")
    shape = dict(num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=96)
    found = run(tmp_path, module, env_id=f"envs:{env_id}-v0", env_kwargs=kwargs, **shape, **flags)
    mismatch = found.scalars["debug/collection_mismatch"]
    assert len(mismatch) == 3 and max(value for _, value in mismatch) < 1e-5


def test_each_agent_chooses_a_row():
    """In ppo_graph_agents.py log-probability and entropy are each robot's own: those of
    ppo_graph.py are their sums."""
    agent, storage, _, _ = setup("task, then speed")
    other, _, _, _ = setup("task, then speed", ppo_graph_agents)
    other.encoder.load_state_dict(agent.encoder.state_dict())
    other.actor.load_state_dict(agent.actor.state_dict())
    other.head.load_state_dict(agent.head.state_dict())
    obs = storage.gather(np.arange(3))[0]
    with torch.no_grad():
        action, log_prob, _, _ = agent(obs)
        _, _, entropy, _ = agent(obs, action)
        again, own_log_prob, own_entropy, _ = other(obs, action["robots"])
    ptr = obs["robots"].ptr
    assert torch.equal(action["robots"], again) and len(own_log_prob) == ptr[-1] == 3
    for total, own in ((log_prob, own_log_prob), (entropy, own_entropy)):
        sums = [part.sum().item() for part in own.split(ptr.diff().tolist())]
        assert total.tolist() == pytest.approx(sums, abs=1e-6)


def test_agents_have_no_part_for_all():
    with pytest.raises(ValueError, match="action space Dict.*: a Sequence is needed"):
        setup("for all and for each", ppo_graph_agents)


PAIR_MASK = spaces.Dict(x=vector(1), action_mask=spaces.MultiBinary((4, 5)))


@pytest.mark.parametrize(
    "action, observation, flags, sentence",
    [
        (
            spaces.MultiDiscrete([4, 5]),
            PAIR_MASK,
            {},
            r"'action_mask': a mask MultiBinary\(\(4, 5\)\) does not fit .* with --autoregressive",
        ),
        (spaces.MultiDiscrete([4, 6]), PAIR_MASK, CHAIN, "does not fit"),
        (  # the keys of a plain dict are sorted
            spaces.Dict({"verb": D(4), "object": D(5)}),
            spaces.Dict(x=vector(1), action_mask=spaces.Dict(object=spaces.MultiBinary((4, 5)))),
            CHAIN,
            r"in this order: \['action.object', 'action.verb'\]; Dict\(a=..., b=...\) keeps",
        ),
        (D(20), PAIR_MASK, {"action_head": "flat"}, None),
        (D(5), PAIR_MASK, CHAIN, "does not fit"),  # there is no part before
        (vector(2), PAIR_MASK, CHAIN, "does not fit"),
        (
            spaces.Tuple((D(4), vector(1), D(5))),
            PAIR_MASK,
            CHAIN,
            "does not fit",
        ),  # another part is between them
        (
            spaces.Dict(robots=spaces.Sequence(D(2)), tasks=spaces.Sequence(D(2))),
            spaces.Dict(**ROBOTS),
            {},
            "no such rows to act",
        ),
        (
            spaces.Dict(robbots=spaces.Sequence(D(2)), x=D(2)),
            spaces.Dict(**ROBOTS),
            {},
            "no such rows to act",
        ),
    ],
)
def test_what_does_not_fit_alone(action, observation, flags, sentence):
    """A script without services names the mask, or the flag."""
    leaves = ppo_graph.leaves_of(observation)
    args = ppo_graph.Args(**flags)
    if sentence is None:
        ppo_graph.parts_of(action, leaves, args)
        return
    with pytest.raises(ppo_graph.UsageError, match=sentence):
        ppo_graph.parts_of(action, leaves, args)


@pytest.mark.parametrize("head", ["lines", "edges", "robbots"])
def test_a_mistyped_head_alone(head):
    """It is an error in a script without services, too."""
    leaves = ppo_graph.leaves_of(spaces.Dict(**ROBOTS))
    for action in (D(3), spaces.MultiDiscrete([3, 3]), spaces.Sequence(D(2))):
        with pytest.raises(ppo_graph.UsageError, match=f"--action-head {head}"):
            ppo_graph.parts_of(action, leaves, ppo_graph.Args(action_head=head))


def test_pairs_that_do_not_fit():
    """The number of entries is that of the pairs, in each observation."""
    for name, sentence in (
        ("a task for each robot", r"'action_mask', .*5 rows where robots x tasks has 6"),
        (
            "pair of rows",
            r"'action_mask.1', .*5 rows where g.nodes or g.nodes x g.nodes has 3 or 9",
        ),
        (
            "option, then row",
            r"'action_mask.node', .*5 rows where g.nodes or 2 x g.nodes has 3 or 6",
        ),
    ):
        _, _, _, envs = setup(name)
        last = envs.envs[2].unwrapped.observations[1]
        mask = last["action_mask"]
        short = np.ones(5, np.int8)
        if isinstance(mask, tuple):
            mask = (mask[0], short)
        else:
            mask = mask | {"node": short} if isinstance(mask, dict) else short
        envs.envs[2].unwrapped.observations[1] = last | {"action_mask": mask}
        with pytest.raises(UsageErrors, match=sentence):
            envs.step([None] * 3)


def test_the_order_of_parts():
    """It is that of the space: of a Tuple, of keyword arguments, and gymnasium's of a plain dict,
    which it sorts. Parts for all come before those of rows."""
    x = spaces.Dict(**ROBOTS)
    for action, paths in (
        (spaces.Dict(on=D(2), act=D(3)), ["on", "act"]),
        (spaces.Dict({"on": D(2), "act": D(3)}), ["act", "on"]),
        (spaces.Dict(on=D(2), robots=D(3)), ["on", "robots"]),
        (spaces.Dict(robots=spaces.Sequence(D(3)), speed=vector(1)), ["speed", "robots"]),
    ):
        for flags in ({}, CHAIN):
            parts = checked_parts(action, x, **flags)
            assert [part.path for part in parts] == [f"action.{path}" for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_graph", "ppo_framestack", "ppo_graph_agents"])
@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_learned(name, script, tmp_path):
    """Greedy returns are at least .95 of the optimum, 8."""
    if script == "ppo_graph_agents" and name != "pointers":
        pytest.skip("rewards of each row are needed")
    env_id, kwargs = TASKS[name]
    found = run(
        tmp_path,
        importlib.import_module(f"cleanrl_graph.{script}"),
        env_id=f"envs:{env_id}-v0",
        env_kwargs=kwargs,
        autoregressive=name in ("verb", "verb, rows", "for all"),
        num_envs=16,
        num_steps=32,
        num_minibatches=4,
        update_epochs=4,
        gamma=0.0,
        learning_rate=2.5e-3,
        ent_coef=0.0,
        gnn_dim=32,
        hidden_dims=(64,),
        total_timesteps=40_960 if name == "for all" else 24_576,
        eval_episodes=64,
    )
    assert np.mean([row["return"] for row in found.rows]) >= 0.95 * 8


ONE = spaces.Sequence(spaces.Box(0, 1, (1,), np.int8), stack=True)
ACTS = spaces.Dict({"act": D(3), "on": D(4)})
OPTION = spaces.Dict({"node": D(9), "option": D(4)})
LINES = [  # action space, mask, what is observed, flags, how many parts it is for, how many given
    (D(5), spaces.MultiBinary(5), {}, {}, 1, 0),
    (spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(5), {}, {}, 2, 0),
    (spaces.MultiBinary(4), spaces.MultiBinary((4, 2)), {}, {}, 1, 0),
    (D(9), ONE, NODES, {}, 1, 0),
    (spaces.Dict({"edge": D(9)}), ONE, NODES, {}, 1, 0),
    (spaces.Dict({"tasks": D(9)}), ONE, ROBOTS, {}, 1, 0),
    (D(9), ONE, {"avail_actions": rows_of(2)}, {}, 1, 0),
    (PAIR, rows_of(2), NODES, {"action_head": "nodes"}, 2, 0),
    (spaces.Sequence(D(3)), rows_of(3), NODES, {}, 1, 0),
    (spaces.MultiDiscrete([3, 4]), spaces.MultiBinary((3, 4)), {}, CHAIN, 2, 1),
    (ACTS, spaces.Dict(act=spaces.MultiBinary(3), on=spaces.MultiBinary((3, 4))), {}, CHAIN, 2, 1),
    (OPTION, spaces.Dict(node=ONE, option=rows_of(4)), NODES, CHAIN, 2, 1),
    (OPTION, rows_of(4), NODES, CHAIN, 2, 1),
    (PAIR, spaces.Tuple((ONE, ONE)), NODES, CHAIN_NODES, 2, 1),
    (spaces.MultiDiscrete([2, 2]), spaces.MultiBinary((2, 2)), {}, CHAIN, 2, 0),  # 2 + 2
]


@pytest.mark.parametrize("k", range(len(LINES)))
def test_lines_of_the_guide(k):
    """What the guide's tables declare is read as they say."""
    action, mask, observed, flags, num_masked, num_given = LINES[k]
    parts = checked_parts(action, spaces.Dict(x=vector(1), action_mask=mask, **observed), **flags)
    assert sum(part.mask != "" for part in parts) == num_masked
    assert sum(part.given for part in parts) == num_given


class Pair(gym.Env):
    """A mask of both parts together; an action that it forbids costs 1."""

    observation_space = spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary((2, 3)))
    action_space = spaces.MultiDiscrete([2, 3])

    def observe(self):
        self.mask = np.zeros((2, 3), np.int8)
        self.mask.flat[self.np_random.integers(6, size=2)] = 1
        return {"x": self.np_random.random(2, np.float32), "action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        reward = float(self.mask[tuple(action)]) - 1
        self.t += 1
        return self.observe(), reward, self.t == 5, False, {}


class Lamps(Pair):
    """Bits with one entry each: may it be 1."""

    observation_space = spaces.Dict(x=vector(2), action_mask=spaces.MultiBinary(3))
    action_space = spaces.MultiBinary(3)

    def observe(self):
        self.mask = self.np_random.integers(2, size=3).astype(np.int8)
        return {"x": self.np_random.random(2, np.float32), "action_mask": self.mask}

    def step(self, action):
        reward = -float((action > self.mask).any())
        self.t += 1
        return self.observe(), reward, self.t == 5, False, {}


gym.register("MasksPair-v0", Pair)
gym.register("MasksLamps-v0", Lamps)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Pair, Lamps])
def test_masks_are_turned_everywhere(kind, num_workers, tmp_path):
    """In training, evaluation, worker processes, demonstrations, load_policy and its export no
    action is drawn that is forbidden; observations that are given by hand have either form."""
    env_id = f"Masks{kind.__name__}-v0"
    flags = CHAIN if kind is Pair else {}
    found = run(
        tmp_path / "run",
        env_id=env_id,
        num_workers=num_workers,
        save_model=True,
        eval_episodes=4,
        **flags,
    )
    assert max(value for _, value in found.scalars["debug/collection_mismatch"]) < 1e-5
    returns = found.scalars["charts/episodic_return"] + [(0, row["return"]) for row in found.rows]
    assert returns and all(value == 0 for _, value in returns)
    if num_workers:
        return
    file = str(found.folder / "model.pt")
    env = kind()
    turned = CanonicalMasks(kind(), ppo_graph, ppo_graph.Args(**flags))
    assert turned.forms
    for policy in (load_policy(file, greedy=False), load_policy(file, env, greedy=False)):
        obs, _ = env.reset(seed=0)
        for _ in range(20):
            action = policy(obs)
            assert action in env.action_space and env.step(action)[1] == 0
            assert env.step(policy(turned.observation(env.reset()[0])))[1] == 0
            obs, _ = env.reset()
    export(file, str(tmp_path / "policy.pt2"), greedy=False)
    program = torch.export.load(tmp_path / "policy.pt2").module()
    observations = [env.reset()[0] for _ in range(20)]
    inputs = {}
    for leaf, *rows in zip(
        policy.envs.leaves, *map(policy.envs.read, map(turned.observation, observations))
    ):
        inputs[leaf.path] = torch.as_tensor(np.concatenate(rows))
    outputs, _ = program(inputs, {})
    for obs, action in zip(observations, outputs["action"].numpy()):
        env.mask = obs["action_mask"]
        assert env.step(action)[1] == 0


def test_a_turned_mask_of_another_shape():
    """It is named."""
    env = CanonicalMasks(Pair(), ppo_graph, ppo_graph.Args(**CHAIN))
    with pytest.raises(gym.error.Error, match=r"'action_mask' has the shape \(5,\), not \(2, 3\)"):
        env.observation({"x": np.zeros(2, np.float32), "action_mask": np.ones(5, np.int8)})
