"""Action heads: the probabilities of every joint action of small ragged batches sum to 1 and are 0
where a mask forbids, the entropy is exact and samples follow them, in float64, for every kind of
action and mask."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Sequence, Space, Tuple
from gymnasium.spaces import Discrete as D
from gymnasium.spaces import MultiBinary as MB
from gymnasium.spaces import MultiDiscrete as MD
from helpers import MASK, ListEnv, graph_space, make_envs, plain, sample, small_args, vector

from cleanrl_graph import ppo_graph, ppo_graph_agents


def rows_of(num):
    """A mask with `num` entries for each row."""
    return Sequence(Box(0, 1, (num,), np.int8), stack=True)


CHAIN = {"autoregressive": True}
NODES = {"g": graph_space(vector(2))}
ROBOTS = {"robots": Sequence(vector(2), stack=True), "tasks": Sequence(vector(3), stack=True)}
AVAILABLE = {"avail_actions": Sequence(vector(2), stack=False)}
NESTED = Dict(a=Tuple((D(2), MD([2, 3]))), b=MB(2))
ANY = D(50)
PAIR = Tuple((ANY, ANY))
TASK = Sequence(Dict(tasks=ANY))
SIZES = [(0, 2), (1, 2), (3, 4)]  # of nodes, robots or elements, and of edges, tasks or actions


class Case(NamedTuple):
    """`make(b, n, m)` is a mask where there are n and m rows: b(num, size) draws `num` blocks of
    options, one of which at least is allowed. `legal(mask, a)`: whether it allows an action, of
    which a["k"] are the numbers of part k, of each row that acts those in a["k"][row], and
    a["columns"] all, [rows, any]."""

    action: Space
    seen: dict = {}  # beside a vector
    flags: dict = {}
    mask: Space | None = None
    make: Callable | None = None
    legal: Callable = lambda mask, a: True


def options(*sizes, rows=False, shape=None):
    """(mask, make, legal) with an entry for each option of the columns, or of those of each row."""
    first = np.cumsum([0, *sizes[:-1]])
    space = rows_of(sum(sizes)) if rows else MB(shape or sum(sizes))

    def make(b, n, m):
        mask = np.hstack([b(n if rows else 1, size) for size in sizes])
        return mask if rows else mask.reshape(space.shape)

    def legal(mask, a):
        columns = a["columns"][:, : len(sizes)]
        return np.take_along_axis(mask.reshape(len(columns), sum(sizes)), first + columns, 1).all()

    return space, make, legal


def choice(columns=1, second=False):
    """(mask, make, legal) with a number for each of n or m rows, or one for each column."""

    def make(b, n, m):
        mask = b(columns, m if second else n).T
        return mask if columns > 1 else mask[:, 0]

    def legal(mask, a):
        mask = mask.reshape(len(mask), -1)
        return all(mask[row, k % columns] for k, row in enumerate(a["columns"][0]))

    return MASK if columns == 1 else rows_of(columns), make, legal


def bits(*values):
    return np.array(values, np.int8)


def size_of(k, n, m):
    return {"n": n, "m": m}.get(k, k)


def each(alone=False, **sizes):
    """(mask, make, legal) of parts, each for itself; or of one part, whose mask is no dict."""
    masks = {name: MASK if size in ("n", "m") else MB(size) for name, size in sizes.items()}

    def make(b, n, m):
        own = {name: b(1, size_of(size, n, m))[0] for name, size in sizes.items()}
        return own[min(own)] if alone else own

    def legal(mask, a):
        mask = {min(sizes): mask} if alone else mask
        return all(mask[name][a[name]] for name in sizes)

    return masks[min(masks)] if alone else Dict(**masks), make, legal


def joint(one, two, mask, first="0", second="1"):
    """(mask, make, legal) with an entry for each two values of two parts."""

    def make(b, n, m):
        one_, two_ = (size_of(k, n, m) for k in (one, two))
        return (b(one_, two_) * b(1, one_).T).reshape(getattr(mask, "shape", None) or (one_, two_))

    return mask, make, lambda mask, a: mask.reshape(-1, two)[a[first], a[second]]


def then(one, two, mask, first="0", second="1"):
    """(mask, make, legal) of two parts, of the second one for each value of the first."""
    is_dict = isinstance(mask, Dict)

    def make(b, n, m):
        one_, two_ = (size_of(k, n, m) for k in (one, two))
        own = b(1, one_)[0], b(one_, two_).ravel() if two in ("n", "m") else b(one_, two_)
        return dict(zip((first, second), own)) if is_dict else own

    def legal(mask, a):
        own, rest = (mask[first], mask[second]) if is_dict else mask
        return own[a[first]] and rest.reshape(len(own), -1)[a[first], a[second]]

    return mask, make, legal


def task_of(mask, tasks):
    """Whether each robot may have its task."""
    return mask.reshape(len(tasks), -1)[range(len(tasks)), tasks].all() if len(tasks) else True


AMOUNT = Dict(amount=D(3, start=1), edge=ANY, node=ANY)
OPTION = Dict(node=ANY, option=D(3))
VERB = Dict(action=D(2), node=ANY)
TWO, TWO_MASKS = Dict(robots=ANY, tasks=ANY), Dict(robots=MASK, tasks=MASK)
SPEED = Dict(robots=Sequence(D(2)), speed=D(3))
HEAD = {head: {"action_head": head} for head in ("nodes", "edges", "robots")}
CASES = {
    "discrete": Case(D(5, start=3)),
    "multidiscrete": Case(MD([3, 2, 4])),
    "multidiscrete masked": Case(MD([3, 2, 4]), {}, {}, *options(3, 2, 4)),
    "multidiscrete masked 2d": Case(MD([3, 3]), {}, {}, *options(3, 3, shape=(2, 3))),
    "multidiscrete chain masked": Case(MD([3, 2, 4]), {}, CHAIN, *options(3, 2, 4)),
    "bits": Case(MB(4)),
    "nested": Case(NESTED),
    "nested chain masked": Case(NESTED, {}, CHAIN, *options(2, 2, 3)),
    "node": Case(ANY, NODES, HEAD["nodes"]),
    "node masked": Case(ANY, NODES, {}, *choice()),
    "avail_actions masked": Case(ANY, NODES | AVAILABLE, {}, *choice(second=True)),
    "two nodes": Case(PAIR, NODES, {}, *choice(2)),
    "two nodes chain": Case(PAIR, NODES, CHAIN, *choice(2)),
    "edge": Case(Dict(edge=ANY), NODES),
    "edge masked": Case(Dict(edge=ANY), NODES, {}, *choice(second=True)),
    "two edges": Case(MD([50, 50]), NODES, CHAIN | HEAD["edges"], *choice(second=True)),
    "mixed": Case(AMOUNT, NODES, {}, *each(amount=3, edge="m", node="n")),
    "mixed chain": Case(AMOUNT, NODES, CHAIN, *each(node="n")),
    "node and bits": Case(Dict(node=D(9), bits=MB(2)), NODES, CHAIN, *each(True, node="n")),
    "node and options": Case(Dict(node=ANY, amount=D(3)), NODES, {}, *each(True, amount=3)),
    "per node": Case(Sequence(D(5, start=2)), NODES, {}, *options(5, rows=True)),
    "per node chain": Case(Sequence(MD([2, 3])), NODES, CHAIN, *options(2, 3, rows=True)),
    "per edge": Case(Sequence(D(3)), NODES, HEAD["edges"]),
    "joint": Case(MD([2, 3]), {}, CHAIN, *joint(2, 3, MB((2, 3)))),
    "verb, then object": Case(
        Dict(a=D(2), b=D(3)), {}, CHAIN, *then(2, 3, Dict(a=MB(2), b=MB((2, 3))), "a", "b")
    ),
    "bits given a verb": Case(
        Tuple((D(2), MB(2))),
        {},
        CHAIN,
        Tuple((MB(2), MB((2, 4)))),
        lambda b, n, m: (b(1, 2)[0], b(4, 2).reshape(2, 4)),
        lambda mask, a: (
            mask[0][a["0"]] and mask[1][a["0"], a["1"][0]] and mask[1][a["0"], 2 + a["1"][1]]
        ),
    ),
    "row, then option": Case(
        OPTION, NODES, CHAIN, *then("n", 3, Dict(node=MASK, option=rows_of(3)), "node", "option")
    ),
    "row and option in one": Case(
        OPTION, NODES, CHAIN, *joint("n", 3, rows_of(3), "node", "option")
    ),
    "option, then row": Case(
        VERB, NODES, CHAIN, *then(2, "n", Dict(action=MB(2), node=MASK), "action", "node")
    ),
    "pair of rows": Case(PAIR, NODES, CHAIN | HEAD["nodes"], *then("n", "n", Tuple((MASK, MASK)))),
    "rows of two sets": Case(TWO, ROBOTS, CHAIN, *then("n", "m", TWO_MASKS, "robots", "tasks")),
    "joint per row": Case(
        Sequence(MD([2, 3])),
        NODES,
        CHAIN,
        rows_of(6),
        lambda b, n, m: b(n, 6),
        lambda mask, a: all(mask[r, 3 * x + y] for r, (x, y) in enumerate(zip(a["0"], a["1"]))),
    ),
    "two entries a bit": Case(
        MB(3), {}, {}, MB((3, 2)), lambda b, n, m: b(3, 2), lambda m, a: m[range(3), a["0"]].all()
    ),
    "bits of each row": Case(
        Sequence(MB(2)),
        NODES,
        {},
        rows_of(4),
        lambda b, n, m: b(2 * n, 2).reshape(n, 4),
        lambda mask, a: all(own[0 + x] and own[2 + y] for own, (x, y) in zip(mask, a["0"])),
    ),
    "a task for each robot": Case(
        TASK,
        ROBOTS,
        HEAD["robots"],
        MASK,
        lambda b, n, m: b(n, m).ravel(),
        lambda mask, a: task_of(mask, a["tasks"]),
    ),
    "task, then speed": Case(
        Dict(robots=Sequence(Dict(speed=D(2), tasks=ANY))),
        ROBOTS,
        CHAIN,
        Dict(robots=Dict(speed=rows_of(2), tasks=MASK)),
        lambda b, n, m: {"robots": {"speed": b(n, 2), "tasks": b(n, m).ravel()}},
        lambda mask, a: (
            task_of(mask["robots"]["tasks"], a["tasks"])
            and all(mask["robots"]["speed"][r, speed] for r, speed in enumerate(a["speed"]))
        ),
    ),
    "another robot": Case(Sequence(Dict(robots=ANY)), ROBOTS, CHAIN | HEAD["robots"]),
    "for each given that for all": Case(
        SPEED,
        ROBOTS,
        CHAIN,
        Dict(robots=rows_of(6), speed=MB(3)),
        lambda b, n, m: {"robots": b(3 * n, 2).reshape(n, 6), "speed": b(1, 3)[0]},
        lambda mask, a: (
            mask["speed"][a["speed"]]
            and all(mask["robots"][r, 2 * a["speed"] + x] for r, x in enumerate(a["robots"]))
        ),
    ),
    "a choice for all, a task for each": Case(
        Tuple((Dict(tasks=ANY), MB(1), TASK)), ROBOTS, CHAIN | HEAD["robots"]
    ),
}


def setup(case, sizes=SIZES, script=ppo_graph):
    """(agent with random weights in its head, storage of all `sizes`, their masks, Envs)"""
    rng = np.random.default_rng(0)

    def blocks(num, size):
        mask = rng.integers(0, 2, (num, size)).astype(np.int8)
        mask[np.arange(num), rng.integers(max(size, 1), size=num) if size else 0] = 1
        return mask

    space = Dict({"x": vector(4), **case.seen, **({"action_mask": case.mask} if case.mask else {})})
    observations = []
    for n, m in sizes:
        n += "Sequence" not in str(case.action)
        nums = {"g": iter([n, m if n else 0]), "robots": iter([n]), "s": iter([n])}
        obs = {"x": sample(vector(4), rng)}
        for name, own in case.seen.items():
            obs[name] = sample(own, rng, lambda rng: next(nums.get(name, iter([m]))))
        if case.mask:
            obs["action_mask"] = case.make(blocks, n, m)
        observations.append(obs)
    makers = [lambda own=own: ListEnv(space, [own] * 3, case.action) for own in observations]
    envs = make_envs(makers, script=script, **case.flags)
    storage = script.Storage(envs.leaves, torch.device("cpu"))
    storage.append(envs.reset(0).obs)
    agent = script.Agent(envs.leaves, case.action, small_args(script, **case.flags))
    for parameter in agent.head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return agent, storage, [obs.get("action_mask") for obs in observations], envs


def repeat(storage, i, num):
    return storage.gather(np.full(num, i))[0]


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
                values = own.values[: len(own.values) // len(latent)].repeat(len(latent), 1)
                elements[group] = own._replace(values=values)
        for group, own in elements.items():
            elements[group] = own._replace(values=own.values.double())
        return agent.head(latent.double(), elements, obs, action, greedy)

    return call


def every_action(agent, obs):
    """(all actions of one observation, one after the other; of each what its parts have; the (part,
    row) that are drawn, and their columns in `flat`)"""
    parts = [head.part for head in agent.head.heads]
    elements = agent.encoder(obs)[1]
    num = len(elements[agent.head.acting].batch) if agent.head.acting else 0
    factors = ppo_graph.leaves_of(agent.head.space, "action")
    bits = {leaf.path for leaf in factors if isinstance(leaf.space, MB)}
    groups = {part.rows: num if part.rows else 1 for part in parts}
    widths = {group: sum(p.k for p in parts if p.rows == group) for group in groups}
    first = dict(zip(groups, np.cumsum([0, *(groups[g] * widths[g] for g in groups)])))
    draws, choices, columns = [], [], []
    for part in parts:
        size = len(elements[part.group].batch) if part.group else part.n
        for row in range(num) if part.rows else [0]:
            draws.append((part, row))
            choices.append(list(itertools.product(range(size), repeat=part.k)))
            begin = first[part.rows] + row * widths[part.rows] + part.columns.start
            columns.append(list(range(begin, begin + part.k)))
    actions, meanings = {group: [] for group in groups}, []
    for chosen in itertools.product(*choices):
        action = {g: np.zeros((groups[g], widths[g]), int) for g in groups}
        meaning = {name_of(part, parts): [] for part in parts}
        for (part, row), own in zip(draws, chosen):
            action[part.rows][row, part.columns] = own
            value = np.array(own if part.path in bits else own[0])
            if part.rows:
                meaning[name_of(part, parts)].append(value)
            else:
                meaning[name_of(part, parts)] = value
        for group, own in action.items():
            actions[group].append(own)
        meanings.append(meaning | {"columns": action[max(groups)]})
    actions = {g: torch.tensor(np.concatenate(own)).float() for g, own in actions.items()}
    return actions, meanings, columns


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
    entropy is exact; samples follow them, each part of a mode is the most probable one given those
    before it, a batch is each of its observations, and all weights have finite gradients."""
    case = CASES[name]
    agent, storage, masks, _ = setup(case)
    head, together, num = double(agent), [], 400
    for i, mask in enumerate(masks):
        one = repeat(storage, i, 1)
        given, meanings, columns = every_action(agent, one)
        legal = torch.tensor([bool(case.legal(mask, a)) for a in meanings])
        K = len(meanings)
        with torch.no_grad():
            taken, log_prob, entropy = head(repeat(storage, i, K), given)
            sampled, sample_log_prob, _ = head(repeat(storage, i, num))
            _, again, _ = head(repeat(storage, i, num), sampled)
            best, _, _ = head(one, greedy=True)
        assert list(taken) == list(given) and log_prob.shape == entropy.shape == (K,)
        assert torch.equal(flat(taken, K), flat(given, K)) and legal.any()
        p = log_prob.exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-12) and torch.equal(p > 0, legal)
        exact = -(p[legal] * log_prob[legal]).sum()
        if "autoregressive" in case.flags:  # along the action; its expectation is the exact one
            entropy = (p * entropy).sum()
        torch.testing.assert_close(entropy, exact.expand_as(entropy), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(again, sample_log_prob)
        actions = flat(given, K)
        index = {tuple(a): k for k, a in enumerate(actions.tolist())}
        drawn = torch.tensor([index[tuple(a)] for a in flat(sampled, num).tolist()])
        counts = torch.bincount(drawn, minlength=K)
        assert not counts[~legal].any()
        expected = p[legal] * num
        chi2 = ((counts[legal] - expected) ** 2 / expected).sum()
        free = len(expected) - 1
        noise = (2 * free + (1 / expected).sum()).sqrt()  # of chi2, rare actions included
        assert chi2 <= free + 6 * noise
        for own in columns:
            values = actions[:, own]
            shares = [(p[(values == v).all(1)].sum(), v) for v in values.unique(dim=0)]
            most = max(shares, key=lambda share: share[0])[1]
            assert torch.equal(flat(best, 1)[0, own], most)
            keep = (values == most).all(1)
            actions, p = actions[keep], p[keep]
        together.append(({g: a[: len(best[g])] for g, a in sampled.items()}, sample_log_prob[0]))
    action, expected = zip(*together)
    action = {group: torch.cat([own[group] for own in action]) for group in action[0]}
    _, log_prob, entropy = double(agent, False)(storage.gather(np.arange(3))[0], action)
    torch.testing.assert_close(log_prob, torch.stack(expected), atol=1e-5, rtol=1e-5)
    (log_prob.exp() + entropy).sum().backward()
    for weight, parameter in agent.head.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), weight


def test_each_agent_chooses_a_row():
    """In ppo_graph_agents.py figures are each robot's own; there is no part for all."""
    case = CASES["task, then speed"]
    agent, storage, _, _ = setup(case)
    other, _, _, _ = setup(case, script=ppo_graph_agents)
    for name in ("encoder", "actor", "head"):
        getattr(other, name).load_state_dict(getattr(agent, name).state_dict())
    obs = storage.gather(np.arange(3))[0]
    with torch.no_grad():
        action, log_prob, _, _ = agent(obs)
        _, _, entropy, _ = agent(obs, action)
        again, own_log_prob, own_entropy, _ = other(obs, action["robots"])
    ptr = obs["robots"].ptr
    assert torch.equal(action["robots"], again) and len(own_log_prob) == ptr[-1] == 4
    for total, own in ((log_prob, own_log_prob), (entropy, own_entropy)):
        sums = [part.sum().item() for part in own.split(ptr.diff().tolist())]
        assert total.tolist() == pytest.approx(sums, abs=1e-6)
    with pytest.raises(ValueError, match="action space Dict.*: a Sequence is needed"):
        setup(CASES["for each given that for all"], script=ppo_graph_agents)


def score_of_row(agent, k, latent, row):
    """w . tanh(k + q) + k . q / sqrt(d) with k = W e and q = U latent, in float64."""
    weights = {name: p.detach().double().numpy() for name, p in agent.head.named_parameters()}
    layer = lambda name, x: weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
    key, query = layer(f"heads.{k}.key", row), layer(f"heads.{k}.output", latent)
    return layer(f"heads.{k}.score", np.tanh(key + query))[0] + key @ query / len(key) ** 0.5


@pytest.mark.parametrize("name", ["node", "avail_actions masked", "two nodes"])
def test_score_of_a_choice(name):
    """The probabilities of the rows are the softmax of their scores, computed row by row."""
    agent, storage, masks, _ = setup(CASES[name])
    for i, mask in enumerate(masks):
        obs = repeat(storage, i, 1)
        features, elements = agent.encoder(obs)
        latent = agent.actor(features)[0].detach().double().numpy()
        rows = elements[agent.head.heads[0].part.group].values.detach().double().numpy()
        actions = every_action(agent, obs)[0][""].long()
        expected = np.zeros(len(actions))
        for k in range(actions.shape[1]):
            p = np.exp([score_of_row(agent, k, latent, row) for row in rows])
            p *= 1 if mask is None else mask.reshape(len(p), -1)[:, k]
            with np.errstate(divide="ignore"):
                expected += np.log(p / p.sum())[actions[:, k]]
        with torch.no_grad():
            log_prob = plain(agent)(repeat(storage, i, len(actions)), actions)[1].numpy()
        log_prob[log_prob <= ppo_graph.LOWEST] = -np.inf  # of what is masked
        np.testing.assert_allclose(log_prob, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["edge", "per edge", "mixed", "per node"])
def test_what_a_row_is(name):
    """`Project` is a linear layer of a node's embedding, or a linear layer and a ReLU of both ends'
    embeddings and the features of an edge; `inputs` and `embed` are these."""
    agent, storage, _, _ = setup(CASES[name])
    head, obs = agent.head, storage.gather(np.array([2, 0, 1]))[0]
    elements = agent.encoder(obs)[1]
    rows = elements["g.nodes"].values
    layer = head.row if head.acting else head.heads[-1].key
    if "edge" in name:
        source, target = obs["g.edge_links"].values.T
        rows = torch.cat([rows[source], rows[target], obs["g.edges"].values], 1)
    expected = torch.nn.functional.linear(rows, layer.weight, layer.bias)
    expected = expected.relu() if "edge" in name else expected
    torch.testing.assert_close(layer(elements, obs), expected)
    assert (expected < 0).any() == ("edge" not in name)
    order = torch.randperm(len(rows))
    assert torch.equal(layer.inputs(order, elements, obs), rows[order])
    if name == "edge":
        seen = head.heads[0].embed(torch.tensor([[1.0], [0.0], [1.0]]), elements, obs)
        assert torch.equal(seen, rows[obs["g.edge_links"].ptr[:-1] + torch.tensor([1, 0, 1])])


@pytest.mark.parametrize("chain", [False, True])
def test_a_part_depends_on_those_before(chain):
    """With --autoregressive edges depend on the amount, nodes on both; else on none."""
    case = CASES["mixed chain"]
    agent, storage, _, _ = setup(case._replace(flags={"autoregressive": chain}, mask=None))
    assert [head.part.path for head in agent.head.heads] == [f"action.{k}" for k in case.action]
    actions = every_action(agent, repeat(storage, 2, 1))[0][""]
    with torch.no_grad():
        p = plain(agent)(repeat(storage, 2, len(actions)), actions)[1].exp()
    p = p.view(3, 4, 4)  # amount, edge, node
    edges, nodes = p.sum(2) / p.sum((1, 2))[:, None], p / p.sum(2, keepdim=True)
    changes = edges - edges[0], nodes - nodes[:1], nodes - nodes[:, :1]
    assert all((change.nan_to_num().abs().max() > 1e-3) == chain for change in changes)


@pytest.mark.parametrize("num", [2, 700])
def test_ties(num):
    """Of equally probable rows or options the greedy one is the first, masked ones left out."""
    ptr = torch.tensor([0, 3, 3 + num, 7 + num])
    batch = torch.arange(3).repeat_interleave(ptr.diff())
    rows = ppo_graph.Ragged(torch.zeros(7 + num), ptr, batch)
    logits = torch.full((7 + num,), 0.3)
    assert ppo_graph.Choice(logits, rows).mode.tolist() == [[0], [0], [0]]
    logits[[0, 3 + num, 4 + num]] = -torch.inf
    logits[1] = 0.2
    assert ppo_graph.Choice(logits, rows).mode.tolist() == [[2], [0], [2]]
    logits = torch.tensor([[[0.1, 0.1, -0.2], [-torch.inf, 0.0, 0.0]]]).expand(num, 2, 3)
    assert ppo_graph.Categorical(logits).mode.tolist() == [[0, 1]] * num


@pytest.mark.parametrize("dependent", [False, True])
def test_box_is_a_diagonal_normal(dependent):
    """Independent normal variables; the greedy action is the mean."""
    agent, storage, _, _ = setup(Case(vector(2, 3), {}, {"state_dependent_std": dependent}))
    obs = storage.gather(np.arange(3).repeat(5000))[0]
    with torch.no_grad():
        action, log_prob, _, _ = plain(agent)(obs)
        entropy = plain(agent)(obs, action)[2]
        mean = plain(agent)(obs, greedy=True)[0]
    by_obs = action.view(3, 5000, 6)
    std = by_obs.std(1)
    assert ((by_obs.mean(1) - mean[::5000]).abs() < 5 * std / 5000**0.5).all()
    log_std = [p for name, p in agent.head.named_parameters() if "log_std" in name]
    assert len(log_std) == (not dependent)
    spread = (std.log() - std.log().mean(0)).abs().max()
    assert spread > 0.2 if dependent else spread < 0.06
    # the exact standard deviations, from the density at the mean and beside it
    off = torch.cat([torch.zeros(1, 6), 0.5 * torch.eye(6)])
    with torch.no_grad():
        density = plain(agent)(repeat(storage, 0, 7), mean[:1] + off)[1]
    one = (0.125 / (density[0] - density[1:])).sqrt()
    torch.testing.assert_close(one, std[0], rtol=0.06, atol=0.0)
    normal = torch.distributions.Normal(mean[:5000], one)
    expected = normal.log_prob(action[:5000]).sum(1)
    torch.testing.assert_close(log_prob[:5000], expected, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(entropy[:5000], normal.entropy().sum(1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chain", [False, True])
def test_mixture_with_a_box_integrates_to_one(chain):
    """The density integrates to 1, the entropy is the integral of -p log p."""
    space = Tuple((D(2), vector(1), MB(1)))
    case = Case(space, {}, {"autoregressive": chain}, MB(2), lambda b, n, m: b(1, 2)[0])
    agent, storage, _, _ = setup(case)
    grid = torch.linspace(-100, 100, 5001)
    actions = torch.cartesian_prod(torch.arange(2.0), grid, torch.arange(2.0))
    with torch.no_grad():
        log_prob, entropy = plain(agent)(repeat(storage, 0, len(actions)), actions)[1:3]
    p = log_prob.exp() * 0.04
    assert p.sum().item() == pytest.approx(1, abs=1e-3)
    exact = -(p * log_prob.clamp(min=-1e4)).sum()
    assert (p * entropy).sum().item() == pytest.approx(exact.item(), abs=1e-3)


def test_columns_become_actions():
    """Columns are taken in the order of the space, starts are added and boxes clipped."""
    space = Dict(a=D(3, start=-1), b=Tuple((vector(2), MD([3, 3], start=[5, 0]))))
    columns = np.array([[0, 0.5, 7, 1, 2], [2, -9, 0, 0, 0]], np.float32)
    actions = ppo_graph.to_env_actions(space, {"": columns}, "", [])
    found = [(x["a"], *(own.tolist() for own in x["b"])) for x in actions]
    assert found == [(-1, [0.5, 1], [6, 2]), (1, [-1, 0], [5, 0])]


def test_a_choice_begins_nearly_uniform():
    """With fresh weights the entropy is the largest possible one within 1%, however large the
    numbers are."""
    case = CASES["node masked"]
    _, storage, _, envs = setup(case, np.random.default_rng(0).integers(1, 7, (50, 2)))
    obs = storage.gather(np.arange(50))[0]
    obs["g.nodes"] = obs["g.nodes"]._replace(values=obs["g.nodes"].values * 30)
    agent = ppo_graph.Agent(envs.leaves, case.action, ppo_graph.Args(**case.flags))
    largest = ppo_graph.segment(obs["action_mask"].values.float(), obs["g.nodes"].ptr).log()
    with torch.no_grad():
        entropy = plain(agent)(obs, plain(agent)(obs)[0])[2]
    assert torch.allclose(entropy, largest, rtol=0.01, atol=1e-4)
