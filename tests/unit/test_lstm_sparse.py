"""The sparse recurrent state of ppo_lstm_sparse.py equals a dense one that is stepped in a loop, in
float64 with gradients; its kernel equals a loop and a PackedSequence; it holds what was seen and no
more; each node has its own memory."""

import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
from gymnasium.spaces import Dict, Discrete, Sequence
from helpers import (
    IDS,
    MASK,
    ListEnv,
    RandomEnv,
    SmallEnv,
    collect,
    graph_space,
    mean_return,
    run,
    small_args,
    vector,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from cleanrl_graph import ppo_lstm_sparse as script


def lstm_args(**kwargs):
    return small_args(script, **{"lstm_dim": 6} | kwargs)


def begun(makers, **flags):
    return helpers.begun(script, makers, **{"lstm_dim": 6} | flags)


def assert_close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# ---- the dense state as oracle ----
def cell(lstm, x, h, c):
    """The equations of the LSTM, or of the GRU or minGRU, which have no c, written out."""
    if isinstance(lstm, script.MinGRU):
        new, z = (lstm.weight @ x + lstm.bias).chunk(2)
        return z.sigmoid() * h + (1 - z.sigmoid()) * new, None
    if isinstance(lstm, torch.nn.GRU):
        r, z, n = (lstm.weight_ih_l0 @ x + lstm.bias_ih_l0).chunk(3)
        r_h, z_h, n_h = (lstm.weight_hh_l0 @ h + lstm.bias_hh_l0).chunk(3)
        r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
        return (1 - z) * (n + r * n_h).tanh() + z * h, None
    gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class DenseState:
    """Zero-padded state [num_keys, H] of one env, its mask, the edges as they were seen."""

    def __init__(self, memory, num_keys):
        self.memory = memory
        zeros = torch.zeros(num_keys, 4, dtype=torch.double)
        self.h, self.c, self.messages = (list(zeros) for _ in range(3))
        self.mask, self.edges = np.zeros(num_keys, bool), {}

    def step(self, x, ids, links, features):
        """(output of each id, readout) of one observation."""
        memory = self.memory
        for row, k in zip(x, ids):
            self.h[k], self.c[k] = cell(memory.cell, row, self.h[k], self.c[k])
            self.mask[k] = True
        for (u, v), feature in zip(links, features):
            if memory.message is not None:
                self.edges.setdefault((ids[u], ids[v]), feature)
        for k in ids:
            senders = [(u, feature) for (u, v), feature in self.edges.items() if v == k]
            messages = [memory.message(torch.cat([self.h[u], f])).relu() for u, f in senders]
            self.messages[k] = torch.stack(messages).mean(0) if messages else 0 * self.h[k]
        out = [h + messages for h, messages in zip(self.h, self.messages)]
        num = torch.tensor(float(self.mask.sum()), dtype=torch.double)
        total = (torch.stack(self.h) * torch.from_numpy(self.mask)[:, None]).sum(0)
        return [out[k] for k in ids], torch.cat([total / num.clamp(min=1), num.log1p()[None]])

    def detach(self):
        for values in (self.h, self.c, self.messages):
            values[:] = [v if v is None else v.detach() for v in values]


def random_steps(rng, num_envs, num_steps, num_keys, density, reset):
    """(names of the keys; a nested list [env][t] of (x, ids, links, features, start))"""
    names = np.sort(rng.integers(-(2**62), 2**62, num_keys))

    def step():
        ids = rng.permutation(np.flatnonzero(rng.random(num_keys) < density))
        num_edges = int(rng.integers(6)) if len(ids) else 0
        normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape))
        x, features = normal(len(ids), 3), normal(num_edges, 2)
        links = rng.integers(max(len(ids), 1), size=(num_edges, 2))
        return x, ids, links, features, rng.random() < reset

    return names, [[step() for _ in range(num_steps)] for _ in range(num_envs)]


def memory_inputs(steps, names):
    """(x, features of edges, Seen) of steps[env][t]."""
    flat = [step for env in steps for step in env]
    num = np.array([len(ids) for _, ids, *_ in flat])
    firsts = num.cumsum() - num
    seen = script.Seen(
        starts=np.array([start for *_, start in flat]),
        rewards=np.zeros(len(flat), np.float32),
        step=np.arange(len(flat)).repeat(num),
        keys=names[np.concatenate([ids for _, ids, *_ in flat]).astype(int)],
        links=np.concatenate([first + step[2] for first, step in zip(firsts, flat)]),
    )
    return torch.cat([step[0] for step in flat]), torch.cat([step[3] for step in flat]), seen


def empty_state(num_envs, parts):
    """The state of envs that remember nothing, as a Memory begins with it."""
    none = np.zeros(0, np.int64)
    nodes = script.Entries(none, none, torch.zeros(0, parts, 4, dtype=torch.double))
    edges = script.Entries(none, np.zeros((0, 2), np.int64), torch.zeros(0, 2, dtype=torch.double))
    return script.State(nodes, edges, torch.zeros(num_envs, 2))


def through(memory, steps, names, state):
    """(outputs, readouts, new state if there is a single step) of steps[env][t] from a state."""
    x, features, seen = memory_inputs(steps, names)
    starts = seen.starts.reshape(len(steps), -1)[:, 0]
    out, readout, *new = memory(x, features, state.forget(starts), seen)
    return out, readout, script.State(*new, torch.ones(len(steps), 2))


def make_memory(remember_edges, kind="lstm"):
    """SparseLSTM whose cell sees its input as it is."""
    flags = dict(cell=kind, lstm_dim=4, gnn_dim=3, remember_edges=remember_edges)
    memory = script.SparseLSTM(3, 2, True, lstm_args(**flags))
    memory.token = torch.nn.Identity()
    for parameter in memory.double().parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return memory


def walk(memory, steps, names):
    """([(outputs per env, readouts)] of each step, all states) one step at a time."""
    states, results = [empty_state(len(steps), memory.parts)], []
    for t in range(len(steps[0])):
        now = [[env[t]] for env in steps]
        out, readout, state = through(memory, now, names, states[-1])
        states.append(state)
        results.append((out.split([len(env[t][1]) for env in steps]), readout))
    return results, states


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.15, 0.6]),
    st.booleans(),
    st.integers(0, 5),
    st.sampled_from(["lstm", "gru", "mingru"]),
)
def test_dense_state_is_the_oracle(seed, density, reset, remember_edges, split, kind):
    """One pass over T steps from any state gives the outputs, readouts and gradients of a dense
    zero-padded state that is stepped in a loop; and so do single steps, whose last state is the
    same."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    memory, num_envs, num_steps = make_memory(remember_edges, kind), 3, 6
    names, steps = random_steps(rng, num_envs, num_steps, 7, density, reset)
    leaves = [x.requires_grad_() for env in steps for x, *_ in env] + list(memory.parameters())

    expected_out, expected_readout, dense = [], [], []
    for env in steps:
        oracle = DenseState(memory, 7)
        for t, (*observed, start) in enumerate(env):
            if start:
                oracle = DenseState(memory, 7)
            if t == split:  # the gradient ends where the rollout begins
                oracle.detach()
            out, pooled = oracle.step(*observed)
            if t >= split:
                expected_out += out
                expected_readout.append(pooled)
        dense.append(oracle)

    with torch.no_grad():
        results, states = walk(memory, steps, names)
    out, pooled, _ = through(memory, [env[split:] for env in steps], names, states[split])
    expected = torch.stack(expected_out) if expected_out else out.new_zeros(0, 4)
    stepped = [results[t][0][i] for i in range(num_envs) for t in range(split, num_steps)]
    assert_close(out, expected)
    assert_close(torch.cat(stepped), expected.detach())
    assert_close(pooled, torch.stack(expected_readout))
    stepped = torch.stack([results[t][1] for t in range(split, num_steps)], 1).flatten(0, 1)
    assert_close(stepped, pooled.detach())

    weight, other = torch.randn_like(expected), torch.randn_like(pooled)
    grads = []
    for a, b in ((expected, torch.stack(expected_readout)), (out, pooled)):
        zero = sum(0 * leaf.sum() for leaf in leaves)
        grads.append(torch.autograd.grad((a * weight).sum() + (b * other).sum() + zero, leaves))
    assert_close(grads[1], grads[0])

    parts = ["h", "c"][: memory.parts]
    for i, oracle in enumerate(dense):
        nodes, edges, action = states[-1].select(np.array([i]))
        known = np.flatnonzero(oracle.mask)
        assert nodes.keys.tolist() == names[known].tolist() and nodes.keys.dtype == np.int64
        assert not nodes.env.any() and len(nodes.values) == len(known)
        for k, vectors in zip(known, nodes.values):
            assert_close(
                vectors, torch.stack([getattr(oracle, name)[k] for name in parts]).detach()
            )
        known = sorted(oracle.edges.items())
        assert edges.keys.tolist() == [[names[u], names[v]] for (u, v), _ in known]
        assert edges.keys.dtype == np.int64 and not edges.env.any()
        if known:
            assert_close(edges.values, torch.stack([feature for _, feature in known]))
        assert torch.equal(action, torch.ones(1, 2))
    joined = script.join_states([states[-1].select(np.array([i])) for i in range(num_envs)])
    for a, b in zip((*joined.nodes, *joined.edges), (*states[-1].nodes, *states[-1].edges)):
        np.testing.assert_array_equal(a, b)


# ---- the kernel ----
@pytest.mark.parametrize("kind", [script.LSTM, torch.nn.GRU, script.MinGRU])
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 25), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_kernel(kind, lengths, seed):
    """The staircase equals the cell on a PackedSequence and a loop, gradients included."""
    torch.manual_seed(seed)
    net, lengths, H = kind(3, 4).double(), np.array(lengths), 4
    x = torch.randn(lengths.sum(), 3, dtype=torch.double, requires_grad=True)
    shape = (1 + (kind is script.LSTM), len(lengths), H)
    state = torch.randn(shape, dtype=torch.double, requires_grad=True)
    leaves = [x, state, *net.parameters()]
    events = np.random.default_rng(seed).permutation(len(x))
    sequences, loop = x[events].split(lengths.tolist()), []
    for sequence, h, c in zip(sequences, state[0], state[-1]):
        for row in sequence:
            h, c = cell(net, row, h, c)
            loop.append(h)
    h, after = script.run_cell(net, x, state, events, lengths, np.arange(len(lengths)))
    assert (after is None) == (len(x) > len(lengths))
    ours, rnn = h[events], torch.nn.utils.rnn
    order = np.argsort(-lengths, kind="stable")
    packed = rnn.pack_sequence([sequences[k] for k in order])
    unpacked = rnn.unpack_sequence(net(packed, state[:, order])[0])
    packed = torch.cat([unpacked[k] for k in np.argsort(order)])
    weight = torch.randn_like(ours)
    results = [ours, torch.stack(loop), packed]
    grads = [torch.autograd.grad((v * weight).sum(), leaves, retain_graph=True) for v in results]
    for value, gradients in zip(results[1:], grads[1:]):
        assert_close(ours, value)
        assert_close(grads[0], gradients)


# ---- collection and training ----
class IdEnv(RandomEnv):
    """RandomEnv whose rows have ids: a few large numbers that come back."""

    def __init__(self, observation="graph"):
        super().__init__(observation, head="nodes")
        self.inner = self.observation_space
        self.observation_space = self.outer = Dict(node_ids=IDS, **self.inner.spaces)

    def observe(self):
        self.observation_space = self.inner
        obs = super().observe()
        self.observation_space = self.outer
        num = len(getattr(obs["obs"], "nodes", obs["obs"]))
        return obs | {"node_ids": 2**60 + self.np_random.permutation(max(num, 8))[:num]}


class Streets(SmallEnv):
    """Of 400 nodes three are seen per step, never more than 40 different ones."""

    action_space, length = Discrete(2), None
    ids = Sequence(Discrete(400), stack=True)
    observation_space = Dict(node_ids=ids, things=Sequence(vector(2), stack=True))

    def begin(self):
        self.known = self.np_random.permutation(400)[:40]

    def observe(self):
        ids = self.np_random.permutation(self.known)[:3]
        return {"node_ids": ids, "things": self.np_random.random((3, 2), np.float32)}


def test_state_is_sparse():
    """It holds what was seen and no more, a tenth of a dense one at a density of a tenth."""
    part = begun([Streets] * 4, num_steps=80, lstm_dim=32)
    collect(collect(part))
    nodes = part.memory.state()["nodes"]
    assert nodes["env"].tolist() == np.arange(4).repeat(40).tolist()
    for env, keys in zip(part.envs.envs, nodes["keys"].reshape(4, 40)):
        assert keys.tolist() == sorted(env.unwrapped.known)
    dense = 4 * 400 * 2 * 32 * 4
    size = sum(values.nbytes for values in tree_leaves(part.memory.state()))
    assert 0.1 * dense < size < 0.11 * dense
    assert nodes["values"].untyped_storage().nbytes() < 0.11 * dense  # no view of more


@torch.no_grad()
def test_actor_and_critic_see_what_is_remembered_of_visible_nodes():
    """Mean and maximum of it, for each observation."""
    part = collect(begun([IdEnv] * 4))
    obs = part.memory.storage.append(part.step.obs)
    seen = part.agent.look(obs, np.zeros(4, bool), part.step.reward)
    features, _, elements, *_ = part.agent.encode(obs, part.memory.now, seen)
    rows, ptr, _ = elements[part.agent.group]
    for b, found in enumerate(features[:, -13:]):
        own = rows[ptr[b] : ptr[b + 1], -6:]
        assert own.abs().max() > 0
        assert_close(found[:12], torch.cat([own.mean(0), own.amax(0)]), 1e-6)
    assert part.agent.actor[0].in_features == features.shape[1]


@pytest.mark.parametrize(
    "space, flags, sentence",
    [
        (Dict(node_ids=IDS, g=graph_space(), h=graph_space()), {}, "one per row of"),
        (Dict(node_ids=IDS, v=vector(3)), {}, "one per node"),
        (Dict(node_ids=IDS, s=Sequence(vector())), {"remember_edges": True}, "needs .* a graph"),
    ],
)
def test_ids_that_do_not_fit(space, flags, sentence):
    """They are no integers, or could name rows of two graphs or of none; or there are no edges."""
    with pytest.raises(ValueError, match=sentence):
        begun([lambda: ListEnv(space, [None])], **flags)


@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_initialisation(kind):
    """The recurrent weights of each gate are orthogonal and forget biases spread; what the LSTM
    sees has the same small size, and no sign, whatever the size of the observation, which still
    shows."""
    space = vector(3, low=-np.inf, high=np.inf)
    args = lstm_args(cell=kind)
    agent = script.Agent(script.leaves_of(space), Discrete(2), args)
    lstm = agent.memory.cell
    biases = [values for values in lstm.parameters() if values.dim() == 1]
    for weight in lstm.parameters():
        if weight.dim() == 2:
            for gate in weight.split(6):
                gate = gate if len(gate) <= gate.shape[1] else gate.T
                assert_close(gate @ gate.T, torch.eye(len(gate)), 1e-5)
    assert_close(biases[0][6:12], torch.linspace(0, 5, 6))
    assert not biases[0][:6].any() and not biases[0][12:].any() and not biases[-1][:6].any()
    assert len(biases) == 1 or not biases[1].any()
    x = torch.randn(1, 3 + 2) * torch.tensor([0.01, 1.0, 100.0])[:, None]
    tokens = agent.memory.token(x)
    assert tokens.min() == 0
    assert_close(agent.memory.token[:2](x).std(1, correction=0), torch.full((3,), 0.5), 5e-3)
    assert (tokens[0] - tokens[1]).abs().max() > 0.1 and (tokens[1] - tokens[2]).abs().max() > 0.1


# ---- learning ----
class Recall(SmallEnv):
    """Six elements are shown, one of them red; then twice any three, all of one colour; then all
    six, and reward is 1 for choosing the one that was red. Ids and orders are random."""

    things = Sequence(vector(2), stack=True)
    observation_space = Dict(node_ids=IDS, things=things, action_mask=MASK)
    action_space, length, terminates = Discrete(6), 4, True

    def begin(self):
        self.red, self.names = self.np_random.integers(6), self.np_random.integers(0, 2**62, 6)

    def observe(self):
        self.order = self.np_random.permutation(6)[: 6 if self.t in (0, 3) else 3]
        things = np.zeros((len(self.order), 2), np.float32)
        things[:, 0], things[:, 1] = self.t == 0, (self.order == self.red) & (self.t == 0)
        mask = np.ones(len(things), np.int8)
        return {"node_ids": self.names[self.order], "things": things, "action_mask": mask}

    def reward(self, action):
        return self.t == 3 and self.order[action] == self.red


gym.register("RecallElements-v0", entry_point=Recall)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru", "mingru"])
def test_each_node_has_its_own_memory(cell, tmp_path):
    """What was seen of an element is remembered under its id; chance earns 1/6."""
    flags = dict(num_envs=16, num_steps=16, num_minibatches=4, update_epochs=4, lstm_dim=16)
    flags |= dict(learning_rate=5e-3, total_timesteps=12_000, eval_episodes=100, gnn_dim=16)
    flags |= dict(env_id="RecallElements-v0", gnn_layers=3, cell=cell)
    assert mean_return(run(tmp_path, script, **flags)) > 0.9


@torch.no_grad()
@pytest.mark.parametrize("name", ["action", "reward"])
@pytest.mark.parametrize("on", [False, True])
def test_inputs_of_the_memory(name, on):
    """Previous action and reward matter with their flags, but not in a first step."""
    part = collect(begun([RandomEnv] * 5, **{f"prev_{name}": on}))
    starts, state = np.array([False] * 4 + [True]), part.memory.now
    changed = state._replace(action=state.action + 1) if name == "action" else state
    obs, values = part.memory.storage.append(part.step.obs), []
    for reward, before in ((1, state), (2, changed)):
        seen = part.agent.look(obs, starts, np.full(5, reward, np.float32))
        values.append(part.agent.act(obs, before, seen, greedy=True)[2])
    assert (values[0] != values[1]).tolist() == [on] * 4 + [False]


def test_first_observations_are_valued_without_a_memory():
    """After a rollout, too, where the episode before has just ended."""
    part = begun([lambda: RandomEnv("vector")] * 6, num_steps=5)
    num = 0
    for _ in range(4):
        collect(part)
        ended = np.flatnonzero(part.step.terminated | part.step.truncated)
        fresh = script.Memory(part.agent, part.envs.leaves, 6, part.args)
        fresh.begin()
        every = part.step._replace(terminated=np.ones(6, bool), truncated=np.zeros(6, bool))
        assert_close(part.next_values[:6][ended], fresh.act(every)[2][ended], 1e-6)
        num += len(ended)
    assert num > 2
