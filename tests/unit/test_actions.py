"""Edges as actions, one action per row, mixed actions: probabilities, forms, errors, tasks."""

import itertools

import gymnasium as gym
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
    plain,
    run,
    small_args,
    vector,
)

from cleanrl_graph import (
    envs,  # noqa: F401
    ppo_framestack,
    ppo_graph,
    ppo_graph_aux,
    ppo_graph_compile,
    ppo_gtrxl,
    ppo_lstm_sparse,
)
from cleanrl_graph.envs import fitting

ROWS5 = spaces.Sequence(spaces.Box(0, 1, (5,), np.int8), stack=True)
GRAPH = graph_space(vector(2))
MIXED = spaces.Dict(
    amount=spaces.Discrete(3, start=1), edge=spaces.Discrete(50), node=spaces.Discrete(50)
)
CASES = {  # action space, masks, flags
    "edge": (spaces.Dict(edge=spaces.Discrete(50)), MASK, {}),
    "edges_by_flag": (spaces.Discrete(50), MASK, {"action_head": "edges"}),
    "edge_unmasked": (spaces.Dict(edge=spaces.Discrete(50)), None, {}),
    "two_edges": (
        spaces.MultiDiscrete([50, 50]),
        MASK,
        {"action_head": "edges", "autoregressive": True},
    ),
    "mixed": (MIXED, spaces.Dict(amount=spaces.MultiBinary(3), edge=MASK, node=MASK), {}),
    "mixed_chain": (MIXED, spaces.Dict(node=MASK), {"autoregressive": True}),
    "node_and_bits": (
        spaces.Dict(node=spaces.Discrete(9), bits=spaces.MultiBinary(2)),
        MASK,
        {"autoregressive": True},
    ),
    "node_and_options": (
        spaces.Dict(node=spaces.Discrete(50), amount=spaces.Discrete(3)),
        spaces.MultiBinary(3),
        {},
    ),
    "per_node": (spaces.Sequence(spaces.Discrete(5, start=2)), ROWS5, {}),
    "per_node_chain": (
        spaces.Sequence(spaces.MultiDiscrete([2, 3])),
        ROWS5,
        {"autoregressive": True},
    ),
    "per_node_bits": (spaces.Sequence(spaces.MultiBinary(2), stack=True), None, {}),
    "per_edge": (spaces.Sequence(spaces.Discrete(3)), None, {"action_head": "edges"}),
}
SIZES = {
    False: (1, 2, 4),
    True: (0, 1, 3),
}  # numbers of nodes and of edges; a choice needs at least one


def some(rng, *shape):
    """A mask of which each row has an allowed entry."""
    mask = rng.integers(0, 2, shape).astype(np.int8)
    mask.reshape(-1, shape[-1])[:, rng.integers(shape[-1])] = 1
    return mask


def setup(name):
    """(agent with random weights in its head, storage of three observations, Envs)"""
    action_space, masks, flags = CASES[name]
    rng, sequence = np.random.default_rng(0), isinstance(action_space, spaces.Sequence)
    observations = []
    for num in SIZES[sequence]:
        links = rng.integers(max(num, 1), size=(num, 2))
        obs = {
            "x": rng.random(2, np.float32),
            "g": spaces.GraphInstance(
                rng.random((num, 3), np.float32), rng.random((num, 2), np.float32), links
            ),
        }
        of = {
            spaces.Sequence: lambda: some(rng, 1, num)[0],
            spaces.MultiBinary: lambda: some(rng, 3),
        }
        if masks is ROWS5:
            obs["action_mask"] = np.hstack([some(rng, num, 2), some(rng, num, 3)])
        elif isinstance(masks, spaces.Dict):
            obs["action_mask"] = {key: of[type(mask)]() for key, mask in masks.items()}
        elif masks is not None:
            obs["action_mask"] = of[type(masks)]()
        observations.append(obs)
    space = spaces.Dict(x=vector(2), g=GRAPH, **({} if masks is None else {"action_mask": masks}))
    args = small_args(**flags)
    found = make_envs(
        [lambda o=o: ListEnv(space, [o], action_space) for o in observations], **flags
    )
    storage = ppo_graph.Storage(found.leaves, torch.device("cpu"))
    storage.append(found.reset(0).obs)
    agent = ppo_graph.Agent(found.leaves, action_space, args)
    for parameter in agent.head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return agent, storage, found


def every_action(agent, obs):
    """All actions [K, rows of one, columns] of an observation without its masks, and which of them
    a mask forbids."""
    head = agent.head
    parts = [part_head.part for part_head in head.heads]
    _, elements = agent.encoder(obs)
    rows = len(elements[head.acting].batch) if head.acting else 1
    options = []
    for part in parts:
        num = len(elements[part.group].batch) if part.group else part.n
        options += [range(num)] * part.k
    actions = list(itertools.product(itertools.product(*options), repeat=rows))
    actions = torch.tensor(actions, dtype=torch.int64).reshape(len(actions), rows, len(options))
    forbidden = torch.zeros(len(actions), dtype=torch.bool)
    for part in parts:
        if not part.mask:
            continue
        mask = obs[part.mask].values[..., None].flatten(1)
        if mask.shape[1] > 1:  # else one number per row is for all parts
            mask = mask[:, part.entries]
        own = actions[:, :, part.columns]
        if part.group:
            forbidden |= mask[own[:, 0, 0], 0] == 0
        else:
            mask = mask.reshape(rows, part.k, part.n)
            taken = mask[torch.arange(rows)[:, None], torch.arange(part.k), own]
            forbidden |= (taken == 0).flatten(1).any(1)
    return actions, forbidden


@pytest.mark.parametrize("name", CASES)
def test_all_actions_are_tried(name):
    """Probabilities of all actions of an observation sum to 1, masked ones are 0, the entropy is
    exact; samples and modes agree with them. An observation without rows has one action, the empty
    one."""
    agent, storage, found = setup(name)
    for i in range(3):
        actions, forbidden = every_action(agent, storage.gather(np.array([i]))[0])
        with torch.no_grad():
            obs = storage.gather(np.full(len(actions), i))[0]
            taken, log_prob, entropy, _ = plain(agent)(obs, actions.flatten(0, 1))
            obs = storage.gather(np.full(3000, i))[0]
            sampled, sample_log_prob, *_ = plain(agent)(obs)
            again = plain(agent)(obs, sampled)[1]
            best = plain(agent)(storage.gather(np.array([i]))[0], greedy=True)[0]
        assert torch.equal(taken, actions.flatten(0, 1)) and log_prob.shape == entropy.shape == (
            len(actions),
        )
        p = log_prob.double().exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-5) and torch.equal(p == 0, forbidden)
        exact = -(p[~forbidden] * log_prob[~forbidden]).sum().item()
        assert (p * entropy).sum().item() == pytest.approx(exact, abs=1e-4)
        torch.testing.assert_close(again, sample_log_prob, atol=1e-5, rtol=1e-5)
        index = {tuple(a): k for k, a in enumerate(actions.flatten(1).tolist())}
        sampled = sampled.view(3000, *actions.shape[1:]).flatten(1)
        count = torch.bincount(
            torch.tensor([index[tuple(a)] for a in sampled.tolist()]), minlength=len(actions)
        )
        assert not count[forbidden].any()
        assert ((count / 3000 - p).abs() <= 6 * (p * (1 - p) / 3000).sqrt() + 1e-3).all()
        if not any(part_head.condition for part_head in agent.head.heads):
            assert index[tuple(best.flatten().tolist())] == p.argmax()


@pytest.mark.parametrize("name", ["edge", "two_edges", "per_edge"])
def test_an_edge_is_both_ends_and_its_features(name):
    """`Project` is a linear layer and a ReLU of both ends' embeddings and the features; `inputs`
    and `embed` are these."""
    agent, storage, _ = setup(name)
    head, obs = agent.head, storage.gather(np.array([2, 0, 1]))[0]
    _, elements = agent.encoder(obs)
    source, target = obs["g.edge_links"].values.T
    nodes = elements["g.nodes"].values
    rows = torch.cat([nodes[source], nodes[target], obs["g.edges"].values], 1)
    layer = head.row if head.acting else head.heads[0].key
    expected = torch.nn.functional.linear(rows, layer.weight, layer.bias).relu()
    torch.testing.assert_close(layer(elements, obs), expected)
    order = torch.randperm(len(rows))
    assert torch.equal(layer.inputs(order, elements, obs), rows[order])
    if not head.acting:
        seen = head.heads[0].embed(torch.tensor([[1.0], [0.0], [1.0]]), elements, obs)
        assert torch.equal(seen, rows[obs["g.edge_links"].ptr[:-1] + torch.tensor([1, 0, 1])])


@pytest.mark.parametrize("name", ["mixed", "per_node"])
def test_a_row_of_nodes_is_its_embedding(name):
    """Nodes are projected without a ReLU."""
    agent, storage, _ = setup(name)
    head, obs = agent.head, storage.gather(np.array([2, 0, 1]))[0]
    _, elements = agent.encoder(obs)
    nodes = elements["g.nodes"].values
    layer = head.row if head.acting else head.heads[2].key
    expected = torch.nn.functional.linear(nodes, layer.weight, layer.bias)
    assert torch.equal(layer(elements, obs), expected) and (expected < 0).any()
    order = torch.randperm(len(nodes))
    assert torch.equal(layer.inputs(order, elements, obs), nodes[order])


def test_parts_are_drawn_in_the_order_of_the_space():
    """With --autoregressive a part depends on those before it, whatever they are, and on no later
    one: edges on the amount, nodes on both. A Dict has gymnasium's order, a Tuple its own."""
    agent, storage, _ = setup("mixed_chain")
    assert [head.part.path for head in agent.head.heads] == [f"action.{key}" for key in MIXED]
    actions, _ = every_action(agent, storage.gather(np.array([2]))[0])
    with torch.no_grad():
        p = plain(agent)(storage.gather(np.full(len(actions), 2))[0], actions[:, 0])[1].exp()
    p = p.view(3, 4, 4)  # amount, edge, node
    edges = p.sum(2) / p.sum((1, 2))[:, None]  # given the amount
    assert (edges - edges[0]).abs().max() > 1e-3
    nodes = p / p.sum(2, keepdim=True)  # given both
    assert (nodes - nodes[:1]).abs().max() > 1e-3 and (nodes - nodes[:, :1]).abs().max() > 1e-3
    pair = spaces.Tuple((spaces.Discrete(2), vector(1), spaces.Discrete(3)))
    parts = checked_parts(pair, vector(1), autoregressive=True)
    assert [part.path for part in parts] == ["action.0", "action.1", "action.2"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Sequence(spaces.Discrete(3, start=1)),
        spaces.Sequence(spaces.Discrete(3), stack=True),
        spaces.Sequence(vector(2), stack=True),
        spaces.Sequence(vector()),
        spaces.Sequence(spaces.MultiBinary(2), stack=True),
        spaces.Sequence(spaces.Dict(a=spaces.Discrete(2), b=vector(1))),
    ],
)
def test_actions_are_elements_of_a_sequence(space):
    """Each environment gets as many rows as it has, none included, in the form that its space
    has."""
    parts = ppo_graph.parts_of(space, ppo_graph.leaves_of(GRAPH), small_args())
    rows = np.arange(6 * parts[-1].columns.stop).reshape(6, -1) % 2
    actions = ppo_graph.to_env_actions(space, {"rows": rows}, {"rows": np.array([2, 0, 3, 1])})
    assert [len(action) for action in actions] == [2, 0, 3, 1]
    assert all(action in space for action in actions)
    found = [row for action in actions for row in action]
    expected = ppo_graph.to_env_actions(space.feature_space, {"": rows}, {})
    assert len(found) == len(expected) == 6
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))


NAMES = spaces.Dict(g=GRAPH, machines=spaces.Sequence(vector(1)), x=vector(1))


@pytest.mark.parametrize(
    "space, observation, head, groups",
    [
        (spaces.Dict(edge=spaces.Discrete(9)), NAMES, "auto", ["g.edge_links"]),
        (spaces.Dict(edge=spaces.Discrete(9)), NAMES, "flat", [""]),
        (spaces.Dict(edge=spaces.Discrete(9)), NAMES, "nodes", ["g.nodes"]),
        (
            spaces.Dict(machines=spaces.Discrete(9), node=spaces.Discrete(9), x=spaces.Discrete(2)),
            NAMES,
            "auto",
            ["machines", "g.nodes", ""],
        ),
        (spaces.Dict(node=vector(1), x=spaces.Discrete(2)), NAMES, "auto", ["", ""]),
        (spaces.Dict(node=spaces.Discrete(9)), spaces.Dict(x=vector(1)), "auto", [""]),
        (
            spaces.Dict(node=spaces.Discrete(9)),
            spaces.Dict(s=spaces.Sequence(vector(1))),
            "auto",
            ["s"],
        ),
        (
            spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
            spaces.Tuple((GRAPH, spaces.Sequence(vector(1)))),
            "auto",
            ["", ""],
        ),
        (spaces.Discrete(9), NAMES, "machines", ["machines"]),
        (spaces.Tuple((spaces.Discrete(9), vector(1))), NAMES, "nodes", ["g.nodes", ""]),
        (spaces.Sequence(vector(1)), NAMES, "auto", ["g.nodes"]),
        (spaces.Sequence(vector(1)), NAMES, "machines", ["machines"]),
    ],
)
def test_what_parts_choose_from(space, observation, head, groups):
    """By name in a Dict, else by --action-head, which says what rows act in a Sequence."""
    parts = checked_parts(space, observation, action_head=head)
    acting = ppo_graph.acting_group(space, ppo_graph.leaves_of(observation), head)
    assert [part.group or acting for part in parts] == groups
    assert (acting != "") == isinstance(space, spaces.Sequence)


TWO = spaces.Dict(a=GRAPH, b=GRAPH)


@pytest.mark.parametrize(
    "space, observation, head, sentence",
    [
        (
            spaces.Dict(node=spaces.Discrete(9)),
            TWO,
            "auto",
            "'node' can mean each of .*'a.nodes', 'b.nodes'.*: give one as --action-head",
        ),
        (
            spaces.Sequence(vector(1)),
            TWO,
            "auto",
            "'nodes' can mean each of .*'a.nodes', 'b.nodes'.*: give one as --action-head",
        ),
        (spaces.Sequence(vector(1)), GRAPH, "flat", r"--action-head flat: .* Sequence\("),
        (spaces.Discrete(9), vector(1), "edges", "--action-head edges needs"),
        (vector(1), GRAPH, "edges", "--action-head edges needs Discrete"),
        (spaces.Discrete(9), GRAPH, "lines", "--action-head lines needs"),
        (
            spaces.Sequence(spaces.Dict(a=vector(1)), stack=True),
            GRAPH,
            "auto",
            "Sequence.* is not supported",
        ),
        (
            spaces.Dict(a=spaces.Sequence(vector(1))),
            GRAPH,
            "auto",
            "--action-head auto: there are no such rows to act in Dict",
        ),
        (
            MIXED,
            spaces.Dict(g=GRAPH, action_mask=spaces.Dict(amount=MASK)),
            "auto",
            "'action_mask.amount': .*not fit Dict",
        ),
        (
            MIXED,
            spaces.Dict(g=GRAPH, action_mask=spaces.Dict(node=spaces.MultiBinary(50))),
            "auto",
            "'action_mask.node'",
        ),
        (
            MIXED,
            spaces.Dict(g=GRAPH, action_mask=spaces.Dict(nodes=MASK)),
            "auto",
            "'action_mask.nodes'",
        ),
        (
            MIXED,
            spaces.Dict(g=GRAPH, action_mask=MASK),
            "auto",
            "'action_mask'",
        ),  # of nodes, or edges?
        (
            spaces.Sequence(spaces.Discrete(3)),
            spaces.Dict(g=GRAPH, action_mask=MASK),
            "auto",
            "'action_mask': .*not fit",
        ),
        (
            spaces.Sequence(spaces.Discrete(3)),
            spaces.Dict(g=GRAPH, action_mask=spaces.MultiBinary(3)),
            "auto",
            "not fit",
        ),
        (
            spaces.Dict(a=spaces.Discrete(9)),
            spaces.Dict(avail_actions=spaces.Sequence(vector(1)), g=GRAPH),
            "auto",
            "Dict.* chooses from no avail_actions: give --action-head avail_actions, or flat",
        ),
    ],
)
def test_spaces_that_do_not_fit(space, observation, head, sentence):
    """A sentence names the flag, the leaf or the space."""
    with pytest.raises(UsageErrors, match=sentence):
        checked_parts(space, observation, action_head=head)


GOOD = spaces.GraphInstance(
    np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), np.zeros((3, 2), np.int64)
)
NO_EDGES = GOOD._replace(edges=None, edge_links=None)
EDGE = spaces.Dict(edge=spaces.Discrete(3))


@pytest.mark.parametrize(
    "space, graph, mask, kind, sentence",
    [
        (EDGE, GOOD, [1, 1], MASK, "leaf 'action_mask', step 0: 2 rows where 'g.edge_links' has 3"),
        (
            EDGE,
            NO_EDGES,
            [],
            MASK,
            "leaf 'g.edge_links', step 0: 0 rows to choose from, the action space has 3",
        ),
        (
            spaces.Dict(edge=spaces.Discrete(2)),
            GOOD,
            [1, 1, 1],
            MASK,
            "3 rows to choose from, the action space has 2",
        ),
        (
            spaces.Sequence(spaces.Discrete(5)),
            GOOD,
            np.ones((3, 5)),
            ROWS5,
            "3 rows where 'g.nodes' has 2",
        ),
    ],
)
def test_observations_that_do_not_fit(space, graph, mask, kind, sentence):
    """The number of rows of a mask is that of edges or nodes, and there is something to choose."""
    observation = spaces.Dict(g=GRAPH, action_mask=kind)
    obs = {"g": graph, "action_mask": np.array(mask, np.int8)}
    with pytest.raises(UsageErrors, match=sentence):
        make_envs([lambda: ListEnv(observation, [obs], space)]).reset(0)


@pytest.mark.parametrize(
    "space, mask, kind",
    [
        (EDGE, [0, 0, 0], MASK),
        (spaces.Sequence(spaces.Discrete(5)), [[1] * 5, [0] * 5], ROWS5),
        (spaces.Sequence(spaces.MultiDiscrete([2, 3])), [[1] * 5, [1, 1, 0, 0, 0]], ROWS5),
        (spaces.Discrete(3), [0, 0, 0], spaces.MultiBinary(3)),
        (spaces.MultiDiscrete([3, 2]), [0, 1, 0, 0, 0], spaces.MultiBinary(5)),
        (spaces.MultiDiscrete([2, 2]), [0, 0, 1, 0], spaces.MultiBinary(4)),
    ],
)
def test_a_mask_that_allows_nothing(space, mask, kind, capsys):
    """It counts as one that allows everything, with equal probabilities, finite figures and
    gradients, in a script alone, too; where the checks see one they say so, once."""
    observation = spaces.Dict(g=GRAPH, action_mask=kind)
    obs = {"g": GOOD, "action_mask": np.array(mask, np.int8)}
    good = obs | {"action_mask": np.ones_like(obs["action_mask"])}
    fitting.SAID.clear()
    makers = [
        lambda own=own: ListEnv(observation, [own] * 4, space) for own in (good, obs, good, obs)
    ]
    found = make_envs(makers)
    flat = found.reset(0).obs
    for _ in range(2):
        found.step([None] * 4)
    assert capsys.readouterr().err == (
        "env 1, leaf 'action_mask', step 0: no action is allowed, which counts as if all were. "
        "This is said once\n"
    )
    agent = ppo_graph.Agent(found.leaves, space, small_args())
    batch = ppo_graph.Storage(found.leaves, torch.device("cpu")).append(
        ppo_graph.join([flat] * 100)
    )
    action = plain(agent)(batch)[0]
    _, log_prob, entropy, value = plain(agent)(batch, action)
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    for parameter in agent.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert log_prob.isfinite().all() and entropy.isfinite().all()
    chosen = action.reshape(400, -1)[1::2]  # where nothing is allowed
    entries = np.reshape(mask, (len(mask), -1))
    if kind is MASK or isinstance(space, spaces.Discrete):
        assert sorted(set(chosen[:, 0].tolist())) == [0, 1, 2]
        torch.testing.assert_close(
            log_prob[1::2], torch.full((200,), 1 / 3).log().double(), check_dtype=False
        )
    elif kind is ROWS5:  # of the second node, its last entry
        assert len(set(chosen[:, -1].tolist())) == 5 if entries[1].sum() == 0 else 3
    else:
        assert len(set(chosen[:, -1].tolist())) == (2 if sum(mask[2:]) == 0 else 1)
        assert len(set(chosen[:, 0].tolist())) in (1, 2)


# ---- Scripts ----
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Colouring", "NodeAmount"])
def test_workers_step_the_same(name, tmp_path):
    """Two processes return what this one returns, whatever the actions are."""
    flags = dict(env_id=f"envs:{name}-v0", num_envs=4, autoregressive=True)
    here, there = (run(tmp_path / str(num), num_workers=num, **flags).scalars for num in (0, 2))
    assert all(here[tag] == there[tag] for tag in here if tag != "charts/SPS")


@pytest.mark.slow
def test_compiled(tmp_path):
    """Compiled code collects and learns with the same policy, and plays, empty graphs included."""
    found = run(
        tmp_path,
        ppo_graph_compile,
        env_id="envs:NeighbourMean-v0",
        compile_mode="default",
        eval_episodes=2,
    )
    assert (
        max(value for _, value in found.scalars["debug/collection_mismatch"]) < 1e-5
        and len(found.rows) == 2
    )


def zeros(env, obs, rng):
    """A policy that colours all nodes alike."""
    return (0,) * len(obs["graph"].nodes)


def test_demonstrations_of_a_sequence(tmp_path):
    """--record and --demos say that they cannot."""
    flags = dict(
        script=ppo_graph_aux, env_id="envs:Colouring-v0", demos=str(tmp_path / "demos.npz")
    )
    for more in ({"record": f"{__name__}:zeros"}, {}):
        with pytest.raises(
            SystemExit, match="(demonstrations|those) of .*Sequence.* whose number varies"
        ):
            run(tmp_path / "runs", **flags, **more)


@pytest.mark.parametrize(
    "script, flags",
    [
        (ppo_lstm_sparse, {"lstm_dim": 8}),
        (ppo_gtrxl, {"dim": 8, "num_heads": 2}),
        (ppo_framestack, {}),
    ],
)
def test_the_next_step_sees_the_mean_of_the_rows(script, flags):
    """Of one action per node the memory sees how many nodes took each option, as shares."""
    found = script.Envs([lambda: gym.make("cleanrl_graph.envs:Colouring-v0")])
    head = script.Agent(found.leaves, found.action_space, small_args(script, **flags)).head
    ptr, batch = torch.tensor([0, 3, 3, 4]), torch.tensor([0, 0, 0, 2])
    elements = {"graph.nodes": script.Ragged(torch.zeros(4, 3), ptr, batch)}
    seen = script.embed_action(
        head, {"graph.nodes": torch.tensor([[1], [1], [0], [0]])}, elements, {}
    )
    torch.testing.assert_close(seen, torch.tensor([[1 / 3, 2 / 3], [0, 0], [1, 0]]))


class OneOfMany(gym.Env):
    """Shows each of 3 nodes a bit in the first step, in another order in the second one, when each
    is to tell it."""

    observation_space = spaces.Dict(
        things=spaces.Sequence(vector(2), stack=True),
        node_ids=spaces.Sequence(spaces.Box(0, 9, (), np.int64), stack=True),
    )
    action_space = spaces.Sequence(spaces.Discrete(2))

    def observe(self):
        self.order, shown = self.np_random.permutation(3), np.zeros((3, 2), np.float32)
        if self.t == 0:
            shown[np.arange(3), self.bits[self.order]] = 1
        return {"things": shown, "node_ids": self.order}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.bits = 0, self.np_random.integers(2, size=3)
        return self.observe(), {}

    def step(self, action):
        reward = float((np.array(action) == self.bits[self.order]).mean()) * self.t
        self.t += 1
        return self.observe(), reward, self.t == 2, False, {}


gym.register("OneOfMany-v0", entry_point=OneOfMany)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [False, True])
def test_each_node_remembers(per_node, tmp_path):
    """With a state per id each node tells its own bit; without, its row is told apart by
    nothing."""
    rows = run(
        tmp_path,
        ppo_lstm_sparse,
        env_id="OneOfMany-v0",
        num_envs=16,
        num_steps=16,
        total_timesteps=8192,
        learning_rate=5e-3,
        lstm_dim=16,
        gnn_dim=16,
        state_per_node=per_node,
        eval_episodes=64,
    ).rows
    assert (np.mean([row["return"] for row in rows]) > 0.95) == per_node


# ---- Tasks ----
def best(env, obs):
    """The best action of the toy tasks."""
    env = env.unwrapped
    if isinstance(env.action_space, spaces.Sequence):
        return env.best if env.action_space.stack else tuple(env.colours.tolist())
    if "amount" not in env.action_space.spaces:
        return {"edge": env.best}
    node = np.flatnonzero(obs["action_mask"]["node"])[env.num_steps % 2]
    return {"node": node, "amount": env.wants[node]}


@pytest.mark.parametrize("name", ["BestEdge", "Colouring", "NeighbourMean", "NodeAmount"])
def test_toy_tasks(name):
    """The optimum is what the docstrings say, actions are elements of the space, seeds fix all."""
    env, other = (
        gym.make(f"cleanrl_graph.envs:{name}-v0"),
        gym.make(f"cleanrl_graph.envs:{name}-v0", disable_env_checker=True),
    )
    for episode in range(20):
        (obs, _), (again, _) = (e.reset(seed=episode) for e in (env, other))
        total, ended = 0.0, False
        while not ended:
            assert obs in env.observation_space and repr(obs) == repr(again)
            action = best(env, obs)
            assert action in env.action_space
            (obs, reward, ended, *_), (again, *_) = (e.step(action) for e in (env, other))
            assert reward <= 1
            total += reward
        assert total == pytest.approx(8, abs=1e-5)


def test_any_amount_can_be_taken():
    """Each action of the space can be taken, one with a node that is not there earns nothing."""
    env = gym.make("cleanrl_graph.envs:NodeAmount-v0").unwrapped
    env.reset(seed=0)
    env.action_space.seed(0)
    rewards = []
    for _ in range(50):
        action = env.action_space.sample()
        is_there = action["node"] < len(env.wants)
        _, reward, ended, *_ = env.step(action)
        rewards.append((is_there, reward))
        if ended:
            env.reset()
    assert all(reward == 0 for is_there, reward in rewards if not is_there)
    assert {is_there for is_there, _ in rewards} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, least, kwargs",
    [
        ("BestEdge", 6, {"max_edges": 8, "num_colours": 2}),
        ("Colouring", 7, {}),
        ("NeighbourMean", 5.8, {}),
    ],
)
def test_toy_tasks_are_learned(name, least, kwargs, tmp_path):
    """Random actions earn less than 4.5 of 8."""
    rows = run(
        tmp_path,
        env_id=f"envs:{name}-v0",
        env_kwargs=kwargs,
        num_envs=16,
        num_steps=32,
        learning_rate=2.5e-3,
        gamma=0.0,
        ent_coef=0.0,
        gnn_dim=64,
        hidden_dims=(64,),
        total_timesteps=12288,
        num_minibatches=4,
        update_epochs=4,
        eval_episodes=64,
    ).rows
    assert np.mean([row["return"] for row in rows]) > least


@pytest.mark.slow
def test_the_amount_follows_the_node(tmp_path):
    """Sampled returns above the most that independent heads can earn, 2.29; a chain can earn
    6.25."""
    logged = run(
        tmp_path,
        env_id="envs:NodeAmount-v0",
        autoregressive=True,
        num_envs=16,
        num_steps=32,
        gamma=0.0,
        learning_rate=2.5e-3,
        gnn_dim=32,
        hidden_dims=(64,),
        total_timesteps=24576,
        num_minibatches=4,
        update_epochs=4,
    ).scalars["charts/episodic_return"]
    assert np.mean([value for _, value in logged[-200:]]) > 3


BOUNDS = {  # of a Box: what the policy's -1, 0, 0.5, 1 and 7 become
    (-1, 1): [-1, 0, 0.5, 1, 1],
    (0, 1000): [0, 500, 750, 1000, 1000],
    (10, 12): [10, 11, 11.5, 12, 12],
    (-0.01, 0.01): [-0.01, 0, 0.005, 0.01, 0.01],
    (3, 3): [3, 3, 3, 3, 3],
    (0, np.inf): [0, 0, 0.5, 1, 7],
    (-np.inf, 0.75): [-1, 0, 0.5, 0.75, 0.75],
    (-np.inf, np.inf): [-1, 0, 0.5, 1, 7],
    (-3.4e38, 3.4e38): [-1, 0, 0.5, 1, 7],  # as good as infinite
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_box_actions_are_scaled(bounds, dtype, capsys):
    """-1 and 1 are the bounds where both are finite, in each row of a Sequence, too; else actions
    are clipped. Nothing is said."""
    space = spaces.Box(*bounds, (1,), dtype)
    numbers = np.array([[-1], [0], [0.5], [1], [7]], np.float32)
    with np.errstate(all="raise"):
        actions = ppo_graph.to_env_actions(space, {"": numbers}, {})
        (rows,) = ppo_graph.to_env_actions(
            spaces.Sequence(space, stack=True), {"a": numbers}, {"a": np.array([5])}
        )
    assert all(action in space for action in actions)
    np.testing.assert_allclose(np.concatenate(actions), BOUNDS[bounds], atol=1e-9)
    assert np.array_equal(np.stack(actions), rows)
    fitting.SAID.clear()
    make_envs([lambda: ListEnv(vector(1), [], space)])
    assert capsys.readouterr().err == ""


def test_bounds_of_one_are_the_numbers_themselves():
    """Bit for bit."""
    numbers = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    actions = ppo_graph.to_env_actions(vector(3), {"": numbers}, {})
    assert np.array_equal(np.stack(actions), numbers.clip(-1, 1))


def test_each_bound_is_its_own():
    """Entries have bounds of their own, and are scaled only where both of theirs are finite."""
    space = spaces.Box(np.array([0, -np.inf, 2]), np.array([10, 3, 4]), dtype=np.float64)
    (action,) = ppo_graph.to_env_actions(space, {"": np.array([[0.5, 0.5, -0.5]], np.float32)}, {})
    assert action.tolist() == [7.5, 0.5, 2.5]


def test_training_does_not_depend_on_bounds(tmp_path):
    """What five bounds learn differs by rounding alone."""
    returns = []
    for low, high in ((-1, 1), (0, 1000), (10, 12), (-0.01, 0.01), (-1, 3)):
        found = run(
            tmp_path / f"{low} {high}",
            env_id="envs:Dials-v0",
            env_kwargs={"low": low, "high": high},
            num_envs=4,
            num_steps=32,
            num_minibatches=2,
            gamma=0.0,
            learning_rate=3e-3,
            total_timesteps=512,
            eval_episodes=8,
        )
        returns.append(np.mean([row["return"] for row in found.rows]) / 8)
    assert max(returns) - min(returns) < 0.03
