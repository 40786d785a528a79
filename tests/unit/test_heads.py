"""Action heads: probabilities, entropies, samples and modes equal those found by trying every
action."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    MASK,
    ListEnv,
    UsageErrors,
    checked_parts,
    graph_space,
    make_envs,
    options_of,
    plain,
    sample,
    small_args,
    vector,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_graph

NUM = 3  # observations of a case
MASK2 = spaces.Sequence(spaces.Box(0, 1, (2,), np.int8), stack=True)
TWO_NODES = spaces.Tuple([spaces.Discrete(50)] * 2)
GRAPH = {"graph": graph_space()}
NESTED = spaces.Dict(
    a=spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))), b=spaces.MultiBinary(2)
)
# name -> (action space, ragged or masked parts of the observation space, flags)
HEADS = {
    "discrete": (spaces.Discrete(5, start=3), {}, {}),
    "discrete_masked": (spaces.Discrete(5), {"action_mask": spaces.MultiBinary(5)}, {}),
    "multidiscrete": (spaces.MultiDiscrete([3, 2, 4]), {}, {}),
    "multidiscrete_2d": (spaces.MultiDiscrete([[3, 2], [2, 2]]), {}, {}),
    "multidiscrete_masked": (
        spaces.MultiDiscrete([3, 2, 4]),
        {"action_mask": spaces.MultiBinary(9)},
        {},
    ),
    "multidiscrete_masked_2d": (
        spaces.MultiDiscrete([3, 3]),
        {"action_mask": spaces.MultiBinary((2, 3))},
        {},
    ),
    "bits": (spaces.MultiBinary(4), {}, {}),
    "nested": (NESTED, {}, {}),
    "nested_masked": (NESTED, {"action_mask": spaces.MultiBinary(7)}, {}),
    "nodes": (spaces.Discrete(50), GRAPH | {"action_mask": MASK}, {}),
    "nodes_unmasked": (spaces.Discrete(50), GRAPH, {"action_head": "nodes"}),
    "elements": (
        spaces.Discrete(50),
        {"set": spaces.Sequence(vector(2), stack=True), "action_mask": MASK},
        {},
    ),
    "avail_actions": (
        spaces.Discrete(50),
        {"avail_actions": spaces.Sequence(vector(2), stack=False)},
        {},
    ),
    "avail_actions_masked": (
        spaces.Discrete(50),
        GRAPH | {"avail_actions": spaces.Sequence(vector(2), stack=True), "action_mask": MASK},
        {},
    ),
    "two_nodes": (TWO_NODES, GRAPH | {"action_mask": MASK2}, {}),
}
CHAINS = {
    "multidiscrete": HEADS["multidiscrete"],
    "multidiscrete_masked": HEADS["multidiscrete_masked"],
    "nested": HEADS["nested"],
    "nested_masked": HEADS["nested_masked"],
    "two_nodes": HEADS["two_nodes"],
    "two_nodes_unmasked": (TWO_NODES, GRAPH, {"action_head": "nodes"}),
}
ALL = [(name, *case, False) for name, case in HEADS.items()] + [
    (name, *case, True) for name, case in CHAINS.items()
]
IDS = [f"{case[0]}{'_chain' if case[-1] else ''}" for case in ALL]


def setup(space, extra, flags, chain, num=NUM, seed=0):
    """(agent with random weights in its head, storage of `num` observations, envs)"""
    rng = np.random.default_rng(seed)
    observation_space = spaces.Dict({"x": vector(4), **extra})
    observations = []
    for i in range(num):
        obs = sample(observation_space, rng, lambda rng, i=i: 1 if i == 0 else rng.integers(2, 7))
        if "action_mask" in obs and extra["action_mask"] in (MASK, MASK2):
            rows = obs[next(k for k in ("avail_actions", "set", "graph") if k in obs)]
            rows = rows.nodes if isinstance(rows, spaces.GraphInstance) else rows
            mask = rng.integers(
                0, 2, (len(rows), *extra["action_mask"].feature_space.shape)
            ).astype(np.int8)
            mask[rng.integers(len(rows))] = 1
            obs["action_mask"] = mask
        elif "action_mask" in obs:
            mask = [
                np.isin(np.arange(n), rng.permutation(n)[: rng.integers(1, n + 1)])
                for n in options_of(space)
            ]
            obs["action_mask"] = (
                np.concatenate(mask).astype(np.int8).reshape(obs["action_mask"].shape)
            )
        observations.append(obs)
    flags = {"autoregressive": chain} | flags
    args = small_args(**flags)
    makers = [lambda o=o: ListEnv(observation_space, [o], space) for o in observations]
    envs = make_envs(makers, **flags)
    storage = ppo_graph.Storage(envs.leaves, torch.device("cpu"))
    storage.append(envs.reset(0).obs)
    torch.manual_seed(seed)
    agent = ppo_graph.Agent(envs.leaves, space, args)
    for parameter in agent.head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return agent, storage, envs


def repeat(storage, i, num):
    return storage.gather(np.full(num, i))[0]


def parts_of(agent):
    return [head.part for head in agent.head.heads]


def enumerate_actions(agent, storage, i):
    """Every action [K, columns] that observation i could have without its mask."""
    _, elements = agent.encoder(storage.gather(np.array([i]))[0])
    options = []
    for part in parts_of(agent):
        num = len(elements[part.group].batch) if part.group else part.n
        options += [range(num)] * part.k
    return torch.tensor(list(itertools.product(*options)))


def masked(agent, storage, i, actions):
    """bool [K]: actions that the mask of observation i forbids, read from the raw mask."""
    obs = storage.gather(np.array([i]))[0]
    if "action_mask" not in obs:
        return torch.zeros(len(actions), dtype=torch.bool)
    mask = obs["action_mask"].values
    columns = []
    if any(part.group for part in parts_of(agent)):
        values = mask.view(len(mask), -1)
        columns = [values[actions[:, k], k] for k in range(values.shape[1])]
    else:
        flat, first, column = mask.flatten(), 0, 0
        for leaf in ppo_graph.leaves_of(agent.head.space):
            if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
                for k, n in enumerate(ppo_graph.num_options(leaf.space)):
                    columns.append(flat[first + actions[:, column + k]])
                    first += n
            column += int(np.prod(leaf.space.shape))
    return (torch.stack(columns) == 0).any(0)


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_probabilities_and_entropies(case):
    """Probabilities sum to 1, masked actions have probability 0, the entropy is exact."""
    agent, storage, _ = setup(*case[1:])
    for i in range(NUM):
        actions = enumerate_actions(agent, storage, i)
        with torch.no_grad():
            given_actions, log_prob, entropy, _ = plain(agent)(
                repeat(storage, i, len(actions)), actions
            )
        assert torch.equal(given_actions, actions)
        forbidden = masked(agent, storage, i, actions)
        p = log_prob.exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-5)
        assert torch.equal(p == 0, forbidden) and not torch.isnan(log_prob).any()
        assert torch.isfinite(entropy).all()
        exact = -(p[~forbidden] * log_prob[~forbidden]).sum()
        if case[-1]:  # a chain's entropy is that along the action; its expectation is the exact one
            assert (p * entropy).sum().item() == pytest.approx(exact.item(), abs=1e-4)
        else:
            torch.testing.assert_close(entropy, exact.expand(len(actions)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_samples_follow_the_probabilities(case):
    """Frequencies of samples agree with the probabilities; masked actions never appear."""
    agent, storage, _ = setup(*case[1:])
    num = 4000
    obs = storage.gather(np.arange(NUM).repeat(num))[0]
    with torch.no_grad():
        action, log_prob, _, _ = plain(agent)(obs)
        _, again, _, _ = plain(agent)(obs, action)
    torch.testing.assert_close(log_prob, again, atol=1e-5, rtol=1e-5)
    for i in range(NUM):
        actions = enumerate_actions(agent, storage, i)
        with torch.no_grad():
            p = plain(agent)(repeat(storage, i, len(actions)), actions)[1].exp().double()
        index = {tuple(a): k for k, a in enumerate(actions.tolist())}
        drawn = [index[tuple(a)] for a in action[i * num : (i + 1) * num].tolist()]
        count = torch.bincount(torch.tensor(drawn), minlength=len(actions))
        assert not count[masked(agent, storage, i, actions)].any()
        expected = p[p > 0] * num
        chi2, free = ((count[p > 0] - expected) ** 2 / expected).sum(), len(expected) - 1
        noise = (
            2 * free + (1 / expected).sum()
        ).sqrt()  # standard deviation of chi2, rare actions included
        assert chi2 <= free + 6 * noise


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_greedy_is_the_mode(case):
    """The greedy action is the most probable one; in a chain each part is, given those before
    it."""
    agent, storage, _ = setup(*case[1:])
    with torch.no_grad():
        action = plain(agent)(storage.gather(np.arange(NUM))[0], greedy=True)[0]
    for i in range(NUM):
        actions = enumerate_actions(agent, storage, i)
        with torch.no_grad():
            p = plain(agent)(repeat(storage, i, len(actions)), actions)[1].exp()
        if not case[-1]:
            assert torch.equal(action[i], actions[p.argmax()])
            continue
        for part in parts_of(agent):
            values = actions[:, part.columns]
            marginal = [
                (p[(values == value).all(1)].sum().item(), value.tolist())
                for value in values.unique(dim=0)
            ]
            best = max(marginal)[1]
            assert action[i, part.columns].tolist() == best
            keep = (values == torch.tensor(best)).all(1)
            actions, p = actions[keep], p[keep]


def score_of_row(agent, k, latent, row):
    """w . tanh(k + q) + k . q / sqrt(d) with k = W e and q = U latent, the score of one row, in
    numpy and float64."""
    weights = {name: p.detach().double().numpy() for name, p in agent.head.named_parameters()}
    layer = lambda name, x: weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
    key, query = layer(f"heads.{k}.key", row), layer(f"heads.{k}.output", latent)
    return layer(f"heads.{k}.score", np.tanh(key + query))[0] + key @ query / len(key) ** 0.5


CHOICES = [
    "nodes",
    "nodes_unmasked",
    "elements",
    "avail_actions",
    "avail_actions_masked",
    "two_nodes",
]


@pytest.mark.parametrize("name", CHOICES)
def test_score_of_a_choice(name):
    """The probabilities of the rows are the softmax of their scores, computed row by row."""
    agent, storage, _ = setup(*HEADS[name], False)
    for i in range(NUM):
        obs = repeat(storage, i, 1)
        features, elements = agent.encoder(obs)
        latent = agent.actor(features)[0].detach().double().numpy()
        rows = elements[parts_of(agent)[0].group].values.detach().double()
        actions, expected = enumerate_actions(agent, storage, i), 0.0
        for k in range(len(parts_of(agent))):
            p = np.exp([score_of_row(agent, k, latent, row) for row in rows.numpy()])
            if "action_mask" in obs:
                p *= obs["action_mask"].values.view(len(p), -1).numpy()[:, k] > 0
            expected = (
                expected
                + np.log(p / p.sum(), where=p > 0, out=np.full(len(p), -np.inf))[actions[:, k]]
            )
        log_prob = plain(agent)(repeat(storage, i, len(actions)), actions)[1].detach().numpy()
        log_prob[log_prob <= ppo_graph.LOWEST] = -np.inf  # of what is masked
        np.testing.assert_allclose(log_prob, expected, atol=1e-4)


@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_begins_nearly_uniform(name, scale):
    """With fresh weights the entropy is the largest possible one within 1%, features of 30 or
    not."""
    _, storage, envs = setup(*HEADS[name], False, num=50)
    obs = storage.gather(np.arange(50))[0]
    for path in set(obs) & {"graph.nodes", "set", "avail_actions"}:
        obs[path] = obs[path]._replace(values=obs[path].values * scale)
    agent = ppo_graph.Agent(envs.leaves, HEADS[name][0], ppo_graph.Args(**HEADS[name][2]))
    rows, num = agent.encoder(obs)[1][parts_of(agent)[0].group], len(parts_of(agent))
    mask = torch.ones(len(rows.values), num)
    if "action_mask" in obs:
        mask = obs["action_mask"].values.view(-1, num).float()
    largest = ppo_graph.segment(mask, rows.ptr).log().sum(1)
    with torch.no_grad():
        entropy = plain(agent)(obs, plain(agent)(obs)[0])[2]
    assert torch.allclose(entropy, largest, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_gradients_are_finite(case):
    """No NaN or inf in any gradient, masks or not, and every weight of the head has one."""
    agent, storage, _ = setup(*case[1:])
    obs = storage.gather(np.arange(NUM))[0]
    action = plain(agent)(obs)[0]
    _, log_prob, entropy, _ = plain(agent)(obs, action)
    (log_prob.exp() + entropy).sum().backward()
    for name, parameter in agent.head.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_bits_that_are_equally_probable():
    """Logits of 0: the greedy bits are numbers, and so is their log-probability."""
    leaves = ppo_graph.leaves_of(vector(2))
    agent = ppo_graph.Agent(leaves, spaces.MultiBinary(3), small_args())
    obs = {"obs": ppo_graph.Ragged(torch.zeros(2, 2), torch.arange(3), torch.arange(2))}
    action, log_prob, _, _ = plain(agent)(obs, greedy=True)
    assert action.tolist() == [[0, 0, 0]] * 2
    assert torch.allclose(log_prob, torch.full((2,), 3 * np.log(0.5), dtype=log_prob.dtype))


def test_a_set_named_flat_is_no_head():
    """A Discrete action beside it stays one of a fixed list."""
    space = spaces.Dict(flat=spaces.Sequence(vector(2), stack=True), x=vector(1))
    (part,) = ppo_graph.parts_of(spaces.Discrete(3), ppo_graph.leaves_of(space), small_args())
    assert (part.k, part.n, part.group) == (1, 3, "")


@pytest.mark.parametrize("num", [1, 2, 5, 700])
def test_ties(num):
    """Of rows, or options, that are equally probable and no other is more so, the greedy action is
    the first one, masked ones left out, however many observations there are."""
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
    """Log-probability and entropy are those of independent normal variables; the greedy action is
    the mean."""
    agent, storage, _ = setup(vector(2, 3), {}, {"state_dependent_std": dependent}, False)
    obs = storage.gather(np.arange(NUM).repeat(5000))[0]
    with torch.no_grad():
        action, log_prob, _, _ = plain(agent)(obs)
        entropy = plain(agent)(obs, action)[2]
        mean = plain(agent)(obs, greedy=True)[0]
    by_obs = action.view(NUM, 5000, 6)
    std = by_obs.std(1)
    assert ((by_obs.mean(1) - mean[::5000]).abs() < 5 * std / 5000**0.5).all()
    log_std = [p for name, p in agent.head.named_parameters() if "log_std" in name]
    assert len(log_std) == (not dependent)
    spread = (std.log() - std.log().mean(0)).abs().max()
    assert spread > 0.2 if dependent else spread < 0.06
    one = torch.zeros(6)  # the exact standard deviation, from the density at two points
    with torch.no_grad():
        for k in range(6):
            shifted = mean[:1].clone()
            shifted[0, k] += 0.5
            at_mean, off_mean = (
                plain(agent)(storage.gather(np.array([0]))[0], a)[1] for a in (mean[:1], shifted)
            )
            one[k] = (0.125 / (at_mean - off_mean)).sqrt()
    torch.testing.assert_close(one, std[0], rtol=0.06, atol=0.0)
    normal = torch.distributions.Normal(mean[:5000], one)
    torch.testing.assert_close(
        log_prob[:5000], normal.log_prob(action[:5000]).sum(1), atol=1e-2, rtol=1e-3
    )
    torch.testing.assert_close(entropy[:5000], normal.entropy().sum(1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_mixture_with_a_box_integrates_to_one(chain, mask):
    """Over Discrete x Box x MultiBinary the density integrates to 1; entropy is the integral of -p
    log p."""
    space = spaces.Tuple((spaces.Discrete(2), vector(1), spaces.MultiBinary(1)))
    extra = {"action_mask": spaces.MultiBinary(2)} if mask else {}
    agent, storage, _ = setup(space, extra, {}, chain, num=1)
    grid = torch.linspace(-100, 100, 10001)
    actions = torch.cartesian_prod(torch.arange(2.0), grid, torch.arange(2.0))
    with torch.no_grad():
        log_prob, entropy = plain(agent)(repeat(storage, 0, len(actions)), actions)[1:3]
    p = log_prob.exp() * 0.02
    assert p.sum().item() == pytest.approx(1, abs=1e-3)
    exact = -(p * log_prob.clamp(min=-1e4)).sum()
    assert (p * entropy).sum().item() == pytest.approx(exact.item(), abs=1e-3)


def test_chain_depends_on_what_came_before():
    """With --autoregressive the second part's distribution changes with the first choice, else it
    does not."""
    for chain in (False, True):
        agent, storage, _ = setup(spaces.MultiDiscrete([3, 3]), {}, {}, chain)
        actions = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        p = plain(agent)(repeat(storage, 0, 9), actions)[1].exp().view(3, 3)
        conditional = p / p.sum(1, keepdim=True)
        assert ((conditional[0] - conditional[1]).abs().max() > 1e-3) == chain


boxes = st.builds(
    lambda shape, dtype: spaces.Box(-1, 2, tuple(shape), dtype),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([np.float32, np.float64]),
)
flat_actions = st.one_of(
    st.builds(
        lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)
    ),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete),
    st.just(spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[3, -1], [0, 2]])),
    st.sampled_from(
        [spaces.MultiBinary(3), spaces.MultiBinary((2, 2)), vector(2, low=-np.inf, high=np.inf)]
    ),
    boxes,
)
action_spaces = st.recursive(
    flat_actions,
    lambda child: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), child, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(child, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=4,
)


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(action_spaces, st.booleans(), st.booleans())
def test_actions_are_elements_of_the_space(space, chain, greedy):
    """What the environment receives lies in its action space, for any tree of spaces."""
    agent, storage, envs = setup(space, {}, {}, chain, num=4)
    obs = storage.gather(np.arange(4))[0]
    action, log_prob, _, _ = plain(agent)(obs, greedy=greedy)
    entropy = plain(agent)(obs, action)[2]
    actions = ppo_graph.to_env_actions(space, {"": action.detach().numpy()}, {})
    assert len(actions) == 4 and all(space.contains(a) for a in actions), (actions, space)
    assert log_prob.shape == entropy.shape == (4,)


def test_columns_become_actions():
    """Columns are taken in the order of the space, starts are added and boxes clipped."""
    pair = spaces.Tuple((vector(2), spaces.MultiDiscrete([3, 3], start=[5, 0])))
    space = spaces.Dict(a=spaces.Discrete(3, start=-1), b=pair)
    columns = np.array([[0, 0.5, 7, 1, 2], [2, -9, 0, 0, 0]], np.float32)
    first, second = ppo_graph.to_env_actions(space, {"": columns}, {})
    assert first["a"] == -1 and second["a"] == 1
    assert first["b"][0].tolist() == [0.5, 1] and second["b"][0].tolist() == [-1, 0]
    assert first["b"][1].tolist() == [6, 2] and second["b"][1].tolist() == [5, 0]


def test_cost_of_a_choice_is_its_rows():
    """The head of a choice has as many weights whatever n the Discrete space declares."""
    sizes = []
    for n in (50, 5000):
        agent, _, _ = setup(spaces.Discrete(n), GRAPH | {"action_mask": MASK}, {}, False)
        sizes.append(sum(p.numel() for p in agent.head.parameters()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "extra, head, expected",
    [
        ({}, "auto", ""),
        (GRAPH, "auto", ""),
        (GRAPH, "nodes", "graph.nodes"),
        (GRAPH | {"action_mask": MASK}, "auto", "graph.nodes"),
        (GRAPH | {"action_mask": spaces.MultiBinary(50)}, "auto", ""),
        (
            GRAPH | {"avail_actions": spaces.Sequence(vector(2), stack=True)},
            "auto",
            "avail_actions",
        ),
        ({"s": spaces.Sequence(vector(2), stack=True), "action_mask": MASK}, "auto", "s"),
    ],
)
def test_what_an_action_indexes(extra, head, expected):
    """The head is found from the observation space, or named by --action-head."""
    observations = spaces.Dict({"x": vector(4), **extra})
    (part,) = checked_parts(spaces.Discrete(50), observations, action_head=head)
    assert part.group == expected


def test_sets_named_as_nodes_or_edges():
    """The name of a group comes before what "nodes" and "edges" mean elsewhere."""
    names = {"nodes": "nodes", "tasks": "tasks", "edges": "edges"}
    row = spaces.Sequence(vector(2), stack=True)
    observations = spaces.Dict(dict.fromkeys(names, row))
    for name, group in names.items():
        (part,) = checked_parts(spaces.Discrete(5), observations, action_head=name)
        assert part.group == group


def test_a_choice_after_numbers_is_not_conditional():
    """Only a part with one value has a mask for each of its values."""
    mask = spaces.Dict(node=MASK)
    observations = spaces.Dict(GRAPH | {"action_mask": mask})
    for first in (vector(1), spaces.MultiBinary(2)):
        space = spaces.Dict(amount=first, node=spaces.Discrete(9))
        _, part = checked_parts(space, observations, autoregressive=True)
        assert part.group == "graph.nodes" and part.mask and not part.given


@pytest.mark.parametrize(
    "space, extra, head",
    [
        (spaces.Discrete(50), {}, "nodes"),
        (vector(2), GRAPH, "nodes"),
        (spaces.Discrete(50), GRAPH, "avail_actions"),
        (spaces.Discrete(50), {"a": graph_space(), "b": graph_space()}, "nodes"),
        (spaces.Discrete(50), GRAPH | {"action_mask": MASK}, "flat"),
    ],
)
def test_head_that_does_not_fit(space, extra, head):
    """A head that the spaces cannot have is an error that names the flag."""
    sentence = rf"--action-head (graph\.)?{head}|'{head}' can mean each of .* as --action-head"
    with pytest.raises(UsageErrors, match=sentence):
        checked_parts(space, spaces.Dict({"x": vector(4), **extra}), action_head=head)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Tuple((spaces.Text(3),)),
        spaces.Sequence(spaces.Text(3)),
        spaces.Sequence(spaces.Sequence(vector(2))),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Graph(vector(1), None)),
    ],
)
def test_unsupported_action_space_is_named(space):
    """The part of an action space for which there is no rule is an error that names it, and says
    that it is one of actions."""
    sentence = r"leaf 'action[.0b]*': .*(Text|Sequence|Graph.*) is not supported"
    with pytest.raises(UsageErrors, match=sentence):
        checked_parts(space, graph_space())
