"""The sparse recurrent state of ppo_lstm_sparse.py: its dense oracle, its kernel, collection
against training."""

import io
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import RandomEnv, graph_space, run, small_args, vector, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_graph
from cleanrl_graph import ppo_lstm_sparse as script

CPU = torch.device("cpu")


def lstm_args(**kwargs):
    return small_args(script, **{"lstm_dim": 6} | kwargs)


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


class Dense:
    """Zero-padded state [num_keys, H] of one env, its mask, and the edges in the order in which
    they were seen."""

    def __init__(self, memory, num_keys):
        self.memory, H = memory, 4
        self.h, self.c, self.messages = (
            list(torch.zeros(num_keys, H, dtype=torch.double)) for _ in range(3)
        )
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
            messages = [
                memory.message(torch.cat([self.h[u], feature])).relu() for u, feature in senders
            ]
            self.messages[k] = torch.stack(messages).mean(0) if messages else 0 * self.h[k]
        out = [h + messages for h, messages in zip(self.h, self.messages)]
        num = torch.tensor(float(self.mask.sum()), dtype=torch.double)
        total = (torch.stack(out) * torch.from_numpy(self.mask)[:, None]).sum(0)
        readout = total / num.clamp(min=1) if memory.readout == "mean" else total
        return [out[k] for k in ids], torch.cat([readout, num.log1p()[None]])


def random_steps(rng, num_envs, num_steps, num_keys, density, reset):
    """A nested list [env][t] of (x, ids, links, features, start). Keys are spread over all of
    int64."""
    names = np.sort(rng.integers(-(2**62), 2**62, num_keys))
    result = []
    for _ in range(num_envs):
        steps = []
        for _ in range(num_steps):
            ids = rng.permutation(np.flatnonzero(rng.random(num_keys) < density))
            num_edges = int(rng.integers(6)) if len(ids) else 0
            steps.append(
                (
                    torch.from_numpy(rng.standard_normal((len(ids), 3))),
                    ids,
                    rng.integers(max(len(ids), 1), size=(num_edges, 2)),
                    torch.from_numpy(rng.standard_normal((num_edges, 2))),
                    rng.random() < reset,
                )
            )
        result.append(steps)
    return names, result


def memory_inputs(steps, names, edges):
    """Of steps[env][t]: (the inputs x, what a Timeline is told to be seen, features of the edges if
    there are any)."""
    flat = [step for env in steps for step in env]
    ids = [names[ids.astype(int)] for _, ids, *_ in flat]
    seen = {
        "starts": torch.tensor([start for *_, start in flat]),
        "num": torch.tensor([len(keys) for keys in ids]),
        "keys": torch.from_numpy(np.concatenate(ids)),
    }
    features = {}
    if edges:
        links = [links for _, _, links, *_ in flat]
        seen["num_edges"] = torch.tensor([len(pairs) for pairs in links])
        seen["links"] = torch.from_numpy(np.concatenate(links))
        features["edge_attr"] = torch.cat([step[3] for step in flat])
    return torch.cat([step[0] for step in flat]), seen, features


def empty_state(num_envs, width=4):
    """The state of envs that remember nothing, as a Memory begins with it."""
    num = torch.zeros(num_envs, dtype=torch.int64)
    vectors = torch.zeros(0, width, dtype=torch.double)
    state = {"num": num, "h": vectors, "c": vectors, "messages": vectors, "num_edges": num}
    return state | {"action": torch.zeros(num_envs, 2)}


def forget(state, starts):
    """The state as a Memory has it in a step where some envs start an episode."""
    envs = np.where(starts, 0, 1 + np.arange(len(starts)))
    return script.select(script.join_states([empty_state(1), state]), envs)


def through(memory, steps, names, state):
    """(outputs, readouts, Timeline) of steps[env][t] from a state."""
    x, seen, features = memory_inputs(steps, names, memory.message is not None)
    starts = seen["starts"].view(len(steps), -1)[:, 0]
    timeline = script.Timeline(forget(state, starts.numpy()), seen)
    timeline.add(features)
    out, readout = memory(x, timeline)
    timeline.action = torch.ones(len(steps), 2)
    return out, readout, timeline


def make_memory(remember_edges, readout, kind="lstm"):
    """SparseLSTM whose cell sees its input as it is."""
    args = lstm_args(
        cell=kind, lstm_dim=4, gnn_dim=3, remember_edges=remember_edges, state_readout=readout
    )
    memory = script.SparseLSTM(3, 2, True, args).double()
    memory.token = torch.nn.Identity()
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return memory


def walk(memory, steps, names):
    """([(outputs per env, readouts)] of each step, all states, the last one too) one step at a
    time."""
    states, results = [empty_state(len(steps))], []
    for t in range(len(steps[0])):
        now = [[env[t]] for env in steps]
        out, readout, timeline = through(memory, now, names, states[-1])
        states.append(timeline.newest())
        results.append((out.split([len(env[t][1]) for env in steps]), readout))
    return results, states


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.15, 0.6]),
    st.booleans(),
    st.sampled_from(["mean", "sum"]),
    st.integers(0, 5),
    st.sampled_from(["lstm", "gru", "mingru"]),
)
def test_dense_state_is_the_oracle(seed, density, reset, remember_edges, readout, split, kind):
    """One pass over T steps from any state gives the outputs, readouts and gradients of a dense
    zero-padded state that is stepped in a loop; and so do single steps, whose last state is the
    same."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    memory, num_envs, num_steps = make_memory(remember_edges, readout, kind), 3, 6
    names, steps = random_steps(rng, num_envs, num_steps, 7, density, reset)
    leaves = [x.requires_grad_() for env in steps for x, *_ in env] + list(memory.parameters())

    expected_out, expected_readout, dense = [], [], []
    for env in steps:
        oracle = Dense(memory, 7)
        for t, (x, ids, links, features, start) in enumerate(env):
            if start:
                oracle = Dense(memory, 7)
            if t == split:  # the gradient ends where the rollout begins
                oracle.h, oracle.c, oracle.messages = (
                    [v if v is None else v.detach() for v in values]
                    for values in (oracle.h, oracle.c, oracle.messages)
                )
            out, pooled = oracle.step(x, ids, links, features)
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

    weight = torch.randn_like(expected), torch.randn_like(pooled)
    wanted, grads = (
        torch.autograd.grad(
            (a * weight[0]).sum() + (b * weight[1]).sum() + sum(0 * leaf.sum() for leaf in leaves),
            leaves,
        )
        for a, b in ((expected, torch.stack(expected_readout)), (out, pooled))
    )
    for grad, want in zip(grads, wanted):
        assert_close(grad, want)

    for i, oracle in enumerate(dense):
        state, seen = script.select(states[-1], np.array([i])), np.flatnonzero(oracle.mask)
        assert state["keys"].tolist() == names[seen].tolist() and state["keys"].dtype == torch.int64
        assert state["num"].tolist() == [len(seen)]
        names_of = ["h"] + ["c"] * (kind == "lstm") + ["messages"] * remember_edges
        others = {"h", "c", "messages"} & state.keys() - set(names_of)
        assert not any(len(state[name]) for name in others)  # before anything was seen
        for name in names_of:
            assert len(state[name]) == len(seen)
            if len(seen):
                expected = torch.stack([getattr(oracle, name)[k] for k in seen]).detach()
                assert_close(state[name], expected)
        if remember_edges:
            known = sorted(oracle.edges.items())
            ends = [[names[u], names[v]] for (u, v), _ in known]
            assert state["keys"][state["links"]].tolist() == ends
            assert state["links"].dtype == torch.int64
            assert state["num_edges"].tolist() == [len(known)]
            if known:
                assert_close(state["edge_attr"], torch.stack([feature for _, feature in known]))
    assert torch.equal(states[-1]["action"], torch.ones(num_envs, 2))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_select(seed, envs):
    """The state of some envs, in any order and more than once; those that start an episode have
    forgotten all."""
    rng, envs = np.random.default_rng(seed), np.array(envs)
    names, steps = random_steps(rng, 4, 3, 7, 0.5, 0.1)
    with torch.no_grad():
        state = walk(make_memory(True, "mean"), steps, names)[1][-1] | {"action": torch.randn(4, 2)}
    assert set(script.COUNTS) <= state.keys()
    starts = rng.random(len(envs)) < 0.5
    part = script.select(state, envs)
    after = forget(part, starts)
    assert part.keys() == after.keys() == state.keys()
    for name, values in state.items():
        if name in script.COUNTS:
            rows = values.split(state[script.COUNTS[name]].tolist())
            kept = [rows[i] for i, start in zip(envs, starts) if not start]
            assert torch.equal(part[name], torch.cat([rows[i] for i in envs]))
            assert torch.equal(after[name], torch.cat([values[:0], *kept]))
        else:
            mask = torch.from_numpy(starts).view(-1, *[1] * (values.dim() - 1))
            assert torch.equal(part[name], values[envs])
            assert torch.equal(after[name], values[envs].masked_fill(mask, 0))


# ---- the kernel ----
CELLS = pytest.mark.parametrize("kind", [torch.nn.LSTM, script.GRU, script.MinGRU])


@CELLS
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 25), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_kernel(kind, lengths, seed):
    """Ragged sequences through the staircase equal a PackedSequence through nn.LSTM or nn.GRU and a
    loop over single steps, gradients included."""
    torch.manual_seed(seed)
    lstm, lengths, H = kind(3, 4).double(), np.array(lengths), 4
    x = torch.randn(lengths.sum(), 3, dtype=torch.double, requires_grad=True)
    parts = "hc" if kind is torch.nn.LSTM else "h"
    hx = [torch.randn(len(lengths), H, dtype=torch.double, requires_grad=True) for _ in parts]
    leaves = [x, *hx, *lstm.parameters()]
    events = np.random.default_rng(seed).permutation(len(x))
    sequences, loop = x[events].split(lengths.tolist()), []
    for sequence, h, c in zip(sequences, hx[0], hx[-1]):
        for row in sequence:
            h, c = cell(lstm, row, h, c)
            loop.append(h)
    ours = script.run_cell(lstm, x, hx, events, lengths, np.arange(len(lengths)))[0][events]
    results = [ours, torch.stack(loop)]
    if kind is not script.MinGRU:
        packed = lstm(
            torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False),
            tuple(v[None] for v in hx),
        )[0]
        results.append(torch.cat(torch.nn.utils.rnn.unpack_sequence(packed)))
    weight = torch.randn_like(results[0])
    grads = [
        torch.autograd.grad((value * weight).sum(), leaves, retain_graph=True) for value in results
    ]
    for value, gradients in zip(results[1:], grads[1:]):
        assert_close(results[0], value)
        for a, b in zip(grads[0], gradients):
            assert_close(a, b)


@CELLS
def test_kernel_of_one_step(kind):
    """Where no sequence has two rows, as when acting, the c of an LSTM comes too, in the order of
    the rows; and nothing of nothing."""
    lstm, events = kind(3, 4).double(), np.array([2, 0, 3, 1])
    x, h, c = (torch.randn(4, width, dtype=torch.double) for width in (3, 4, 4))
    state = [h, c] if kind is torch.nn.LSTM else [h]
    result = script.run_cell(lstm, x, state, events, np.ones(4, np.int64), np.arange(4))
    assert len(result) == len(state)
    for values, expected in zip(
        result, zip(*(cell(lstm, x[e], h[k], c[k]) for k, e in enumerate(events)))
    ):
        assert_close(values[events], torch.stack(expected))
    none = np.zeros(0, np.int64)
    result = script.run_cell(lstm, x[:0], state, none, none, none)
    assert [len(values) for values in result] == [0] * len(state)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 37])
def test_scan(num_steps):
    """A minGRU's states in log2 T turns are those of a loop over the steps, gradients included;
    where a is 0 nothing of before is left."""
    torch.manual_seed(num_steps)
    a = torch.rand(num_steps, 5, 4, dtype=torch.double)
    a[torch.rand(num_steps, 5) < 0.3] = 0
    b = torch.randn(num_steps, 5, 4, dtype=torch.double)
    first = torch.randn(1, 5, 4, dtype=torch.double)
    leaves = [own.requires_grad_() for own in (a, b, first)]
    h = first
    loop = []
    for t in range(num_steps):
        h = a[t] * h + b[t]
        loop.append(h)
    results = [script.scan(*leaves), torch.cat(loop)]
    assert_close(*results)
    weight = torch.randn_like(b)
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in results]
    for ours, theirs in zip(*grads):
        assert_close(ours, theirs)


def test_kernel_pads_little():
    """Rounding the lengths adds a sixth to their sum at most, and leaves at most 2 calls per
    octave."""
    calls = []

    class Spy(torch.nn.LSTM):
        def forward(self, x, hx):
            calls.append(x.shape[:2].numel())
            return super().forward(x, hx)

    lengths = np.arange(1, 129)
    x = torch.zeros(lengths.sum(), 2)
    hx = [torch.zeros(128, 2)] * 2
    script.run_cell(Spy(2, 2), x, hx, np.arange(len(x)), lengths, lengths - 1)
    assert len(calls) <= 14 and len(x) <= sum(calls) <= 7 / 6 * len(x)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["lstm", "mingru"])
@pytest.mark.parametrize("num_steps", [1, 6])
def test_memory_on_cuda(num_steps, kind, monkeypatch):
    """cuDNN's packed path, and the scan of a minGRU, give what the staircase on the CPU gives;
    index tensors of the state stay on the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as `start` does
    rng = np.random.default_rng(0)
    memory = make_memory(True, "mean", kind).float()
    names, steps = random_steps(rng, 3, num_steps, 7, 0.5, 0.2)
    x, seen, features = memory_inputs(steps, names, True)
    seen["starts"][::num_steps] = False  # nothing is remembered there anyway
    on_host = ("num", "keys", "num_edges", "links")
    results = []

    def moved(state, device):
        floats = {name: v.float().to(device) for name, v in state.items() if v.is_floating_point()}
        return state | floats

    for device in ("cpu", "cuda"):
        timeline = script.Timeline(moved(empty_state(3), device), seen)
        timeline.add(moved(features, device))
        new = {}
        with torch.no_grad():
            out, readout = memory.to(device)(x.float().to(device), timeline)
            if num_steps == 1:
                timeline.action = timeline.state["action"]
                new = timeline.newest()
                assert all(new[name].device.type == "cpu" for name in on_host)
        results.append([out.cpu(), readout.cpu(), *(new[name].cpu() for name in sorted(new))])
    for a, b in zip(*results):
        assert_close(a, b, 1e-5)


# ---- collection and training ----
class IdEnv(RandomEnv):
    """RandomEnv whose nodes (or set elements) have ids: a few large numbers that come back, or
    `small` ones."""

    def __init__(
        self, observation="graph", action="", head="nodes", camera=False, small=False, uint8=False
    ):
        super().__init__(observation, action, head)
        inner = self.observation_space
        self.inner = inner if isinstance(inner, spaces.Dict) else spaces.Dict(obs=inner)
        if camera:
            self.inner = spaces.Dict(
                camera=spaces.Box(0, 255, (8, 8, 1), np.uint8),
                gear=spaces.Discrete(3),
                **self.inner.spaces,
            )
        dtype, self.offset = np.uint8 if uint8 else np.int64, 0 if small else 2**60
        info = np.iinfo(dtype)
        ids = spaces.Sequence(spaces.Box(info.min, info.max, (), dtype), stack=True)
        self.outer = spaces.Dict(node_ids=ids, **self.inner.spaces)
        self.observation_space, self.dtype = self.outer, dtype

    def observe(self):
        self.observation_space = self.inner
        obs = super().observe()
        self.observation_space = self.outer
        num = len(getattr(obs["obs"], "nodes", obs["obs"]))
        ids = self.offset + self.np_random.permutation(max(num, 8))[:num]
        return obs | {"node_ids": ids.astype(self.dtype)}


gym.register("Ids-v0", entry_point=IdEnv)
MEMORY = {"prev_action": True, "prev_reward": True}
CASES = [(kind, "discrete", "flat", {}) for kind in ("vector", "discrete", "image_hwc", "mixed")]
CASES += [
    ("vector", action, "flat", MEMORY)
    for action in ("discrete", "multidiscrete", "bits", "box", "mixed")
]
CASES += [
    ("vector", "mixed", "flat", MEMORY | {"autoregressive": True}),
    ("vector", "discrete", "mask", MEMORY | {"cell": "mingru"}),
    ("graph", "", "avail_actions", MEMORY),
    ("graph_edges", "", "pair", MEMORY),
    ("set", "", "nodes", {}),
]
IDS = [
    ("graph_edges", "discrete", "flat", {}),
    ("graph", "mixed", "flat", MEMORY | {"state_readout": "sum"}),
    ("set", "", "nodes", MEMORY),
    ("graph_edges", "", "nodes", MEMORY | {"remember_edges": True, "num_envs": 6}),
    ("graph_edges", "", "nodes", MEMORY | {"remember_edges": True, "cell": "mingru"}),
    ("graph_categories", "", "nodes", {"remember_edges": True, "norm_obs": True}),
    ("graph", "", "avail_actions", MEMORY),
    ("graph", "", "nodes", MEMORY | {"state_per_node": False}),
    (
        "graph",
        "",
        "pair",
        MEMORY | {"autoregressive": True, "remember_edges": True, "state_readout": "sum"},
    ),
    ("graph_edges", "", "nodes", MEMORY | {"camera": True}),
]


def lively(agent):
    """The same agent with logits of the size of those that were learned, so that differences
    show."""
    with torch.no_grad():
        for name, parameter in agent.head.named_parameters():
            small = name.endswith((".output.weight", ".score.weight"))  # these begin at 0.01
            parameter.mul_(100 if small else 1)
    return agent


@pytest.mark.parametrize(
    "with_ids, case",
    [(False, case) for case in CASES] + [(True, case) for case in IDS],
    ids=lambda v: (
        "-".join(["+".join(e) if isinstance(e, dict) else e for e in v])
        if isinstance(v, tuple)
        else "ids"
        if v
        else "one"
    ),
)
def test_collection_and_training_agree(with_ids, case, tmp_path, monkeypatch):
    """Before the first gradient step of each update the probability ratio is 1, for all
    observations, heads and inputs of the memory; main runs from environment to evaluation."""
    agent = script.Agent
    monkeypatch.setattr(script, "Agent", lambda *args: lively(agent(*args)))
    observation, action, head, flags = case
    flags, kwargs = dict(flags), {"observation": observation, "action": action, "head": head}
    kwargs |= {"camera": flags.pop("camera", False)} if with_ids else {}
    flags = {"lstm_dim": 6, "total_timesteps": 96} | flags
    result = run(
        tmp_path,
        script,
        env_id="Ids-v0" if with_ids else "Random-v0",
        env_kwargs=kwargs,
        eval_episodes=2,
        **flags,
    )
    mismatch = result.scalars["debug/collection_mismatch"]
    assert len(mismatch) >= 2 and all(0 <= value < 1e-5 for _, value in mismatch)
    assert all(np.isfinite(value) for events in result.scalars.values() for _, value in events)
    assert result.scalars["losses/approx_kl"][0][1] != 0
    assert [row["return"] for row in result.rows] == [row["length"] for row in result.rows]


def begun(makers, agent=None, **kwargs):
    """What a run has before its first step, with lively heads."""
    args = lstm_args(num_envs=len(makers), **kwargs)
    envs = script.Envs(makers)
    agent = agent or lively(script.Agent(envs.leaves, envs.action_space, args))
    memory = script.Memory(agent, envs.leaves, len(makers), args)
    return SimpleNamespace(args=args, envs=envs, agent=agent, memory=memory, step=envs.reset(3))


def collect(part):
    """One rollout, as `train` has it. Adds to `part` the steps that were seen, the actions,
    log_probs and values [T * N], the values of what came after, and where episodes were cut off."""
    part.seen, part.cut, columns, num_envs = [], [], [], len(part.envs.envs)
    part.memory.begin()
    for t in range(part.args.num_steps):
        part.seen.append(part.step)
        columns.append(part.memory.act(part.step))
        actions = part.agent.head.env_actions(columns[-1][0], part.step.obs.counts)
        part.step = part.envs.step(actions)
        part.memory.keep(part.step)
        part.cut += (t * num_envs + np.flatnonzero(part.step.truncated)).tolist()
    actions, *others = zip(*columns)
    part.actions = torch.cat([action[""] for action in actions])
    part.log_probs, part.values = map(torch.cat, others)
    part.seen.append(part.step)
    part.next_values = part.memory.next_values(part.step)
    return part


def ratios(part, envs=None):
    """exp(new - old log_prob) of the steps of some envs, as the first minibatch computes it."""
    order = lambda num: np.arange(num) if envs is None or num == 1 else envs
    chosen = SimpleNamespace(permutation=order)
    ((idx, inputs),) = part.memory.minibatches(chosen, 1)
    _, log_prob, _, value = part.agent(*inputs)
    assert log_prob.requires_grad
    error = (value - part.values[idx]).abs().max().item()
    return (log_prob - part.log_probs[idx]).exp().detach(), error


GRAPHS = [lambda: IdEnv("graph_edges")] * 5
PLAIN = [RandomEnv] * 5
KINDS = pytest.mark.parametrize(
    "makers, flags",
    [(PLAIN, MEMORY), (GRAPHS, MEMORY), (GRAPHS, {"remember_edges": True} | MEMORY)],
    ids=["one", "ids", "edges"],
)


def only(flat, leaves, i):
    """Observation i of a Flat."""
    values = []
    for leaf, array in zip(leaves, flat.values):
        num = flat.counts[leaf.group]
        first = num[:i].sum()
        values.append(array[first : first + num[i]])
    return script.Flat(values, {group: num[i : i + 1] for group, num in flat.counts.items()})


@KINDS
@torch.no_grad()
def test_each_episode_alone(makers, flags):
    """Log-probabilities and values, those of the final observations of truncated episodes and of
    the ones after the rollout too, are those of each episode alone, in a memory of one env that
    begins with it. What leaks over an episode's end or from one env to another would show."""
    part = begun(makers, num_steps=20, **flags)
    rollouts = [
        (part.seen, part.cut, part.actions, part.log_probs, part.values, part.next_values)
        for part in (collect(part) for _ in range(2))
    ]
    num_envs, num_cut, alone = len(makers), 0, None

    def step_alone(flat, starts, reward, action=None):
        """(log_prob, value) of one observation in the memory of one env, which remembers it if
        there is an action."""
        obs = alone.storage.append(flat)
        timeline = script.Timeline(alone.now, alone.look(flat, starts, reward))
        _, log_prob, _, value = part.agent(obs, timeline, action, greedy=True)
        if action is not None:
            features, elements = part.agent.encoder(obs)
            elements[""] = script.Ragged(features, None, None)
            timeline.action = script.embed_action(part.agent.head, action, elements, obs)
            alone.now = timeline.newest()
        return log_prob[0], value[0]

    goes_on = np.zeros(1, bool)
    for i in range(num_envs):
        for seen, cut, actions, log_probs, values, next_values in rollouts:
            final = iter(next_values[num_envs:])
            finals = {place: next(final) for place in cut}
            for t, step in enumerate(seen):
                starts = (step.terminated | step.truncated)[i : i + 1]
                reward = step.reward[i : i + 1]
                if t and step.truncated[i]:
                    final_obs = step.finals[int(step.truncated[:i].sum())]
                    _, value = step_alone(final_obs, goes_on, reward)
                    assert_close(finals[(t - 1) * num_envs + i], value, 1e-5)
                    num_cut += 1
                obs = only(step.obs, part.envs.leaves, i)
                if t == len(seen) - 1:  # the next rollout sees it again
                    if not starts[0]:
                        _, value = step_alone(obs, goes_on, reward)
                        assert_close(next_values[i], value, 1e-5)
                    break
                if starts[0]:
                    alone = script.Memory(part.agent, part.envs.leaves, 1, part.args)
                    alone.begin()
                k = t * num_envs + i
                log_prob, value = step_alone(obs, starts, reward, {"": actions[k : k + 1]})
                assert_close(log_prob, log_probs[k], 1e-5)
                assert_close(value, values[k], 1e-5)
    assert num_cut > 5


@KINDS
def test_errors_that_the_ratio_finds(makers, flags, monkeypatch):
    """A state, or a previous action and reward, that leak over an episode's end while collecting,
    and a state that was stored one step late, show as a ratio that is not 1."""
    part = collect(collect(begun(makers, **flags)))
    starts = np.stack([step.terminated | step.truncated for step in part.seen])
    assert starts[1:-1].any() and not starts.all()
    for envs in (None, [3, 0], [4]):
        ratio, error = ratios(part, envs)
        assert (ratio - 1).abs().max() < 1e-5 and error < 1e-5

    stored, num_envs = part.memory.stored, len(makers)
    part.memory.stored = {0: script.select(part.memory.now, np.arange(num_envs))}
    assert (ratios(part)[0] - 1).abs().max() > 1e-3
    part.memory.stored = stored

    select, Timeline = script.select, script.Timeline

    def remembering(state, envs):
        """`select` where the envs that start an episode are to begin with nothing, and do not."""
        if len(state["num"]) == num_envs + 1:
            envs = np.where(envs == 0, 1 + np.arange(num_envs), envs)
        return select(state, envs)

    def unaware(state, seen):
        return Timeline(state, seen | {"starts": torch.zeros_like(seen["starts"])})

    for name, leaking in (("select", remembering), ("Timeline", unaware)):
        with monkeypatch.context() as patch:
            patch.setattr(script, name, leaking)
            collect(part)
        assert (ratios(part)[0] - 1).abs().max() > 1e-3
        assert (ratios(collect(part))[0] - 1).abs().max() < 1e-5


def rolled_out(part, steps, envs):
    """(log_probs, values) [envs * steps] of a loop over these steps of some envs, which begins with
    the state that collection had there."""
    N = len(part.envs.envs)
    state = script.select(part.memory.stored[steps[0]], envs)
    results = []
    for t in steps:
        starts = (part.seen[t].terminated | part.seen[t].truncated)[envs]
        nothing = script.select(part.memory.nothing, np.zeros(1, np.int64))
        kept = np.where(starts, 0, 1 + np.arange(len(envs)))
        state = script.select(script.join_states([nothing, state]), kept)
        obs, _ = part.memory.storage.gather(t * N + envs)
        timeline = script.Timeline(state, script.select(part.memory.seen[t], envs))
        action = {"": part.actions[t * N + envs]}
        _, log_prob, _, value = part.agent(obs, timeline, action)
        features, elements = part.agent.encoder(obs)
        elements[""] = script.Ragged(features, None, None)
        timeline.action = script.embed_action(part.agent.head, action, elements, obs)
        state = timeline.newest()
        results.append((log_prob, value))
    return [torch.stack(own, 1).flatten() for own in zip(*results)]


@pytest.mark.parametrize("cell", ["lstm", "mingru"])
@pytest.mark.parametrize("num_envs", [1, 2])
@KINDS
def test_few_environments(makers, flags, num_envs, cell):
    """With fewer environments than minibatches these are pieces of the rollout in time. Each begins
    with the state that collection had there: ratios are 1, and gradients those of a loop."""
    flags = flags | dict(cell=cell, num_steps=18, num_minibatches=4)
    part = collect(collect(begun(makers[:num_envs], **flags)))
    parts = list(part.memory.minibatches(np.random.default_rng(0), 4))
    assert sorted(np.concatenate([idx for idx, _ in parts])) == list(range(18 * num_envs))
    assert sorted(len(idx) for idx, _ in parts) == ([4, 4, 5, 5] if num_envs == 1 else [9] * 4)
    parameters = list(part.agent.parameters())
    for idx, inputs in parts:
        _, log_prob, _, value = part.agent(*inputs)
        assert (log_prob - part.log_probs[idx]).abs().max() < 1e-5
        assert (value - part.values[idx]).abs().max() < 1e-5
        envs = np.unique(idx % num_envs)
        steps = idx[: len(idx) // len(envs)] // num_envs
        assert np.array_equal(steps, steps[0] + np.arange(len(steps)))
        loop = rolled_out(part, steps, envs)
        weight = torch.randn(len(idx))
        grads = [
            torch.autograd.grad((p * weight + v).sum(), parameters, allow_unused=True)
            for p, v in ((log_prob, value), loop)
        ]
        for ours, theirs in zip(*grads):
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    before = part.memory.stored[0]
    part.memory.stored = dict.fromkeys(part.memory.stored, before)  # not that of the piece
    worst = 0
    for idx, inputs in part.memory.minibatches(np.random.default_rng(0), 4):
        worst = max(worst, (part.agent(*inputs)[1] - part.log_probs[idx]).abs().max())
    assert worst > 1e-3


@KINDS
def test_play_equals_collection(makers, flags):
    """What only plays, one step per rollout, takes the steps that collection takes, and remembers
    the same."""
    part = begun(makers, num_steps=10, **flags)
    torch.manual_seed(1)
    for _ in range(2):
        collect(part)
    other, actions = begun(makers, part.agent, num_steps=1, **flags), []
    torch.manual_seed(1)
    for _ in range(20):
        other.memory.begin()
        action = other.memory.act(other.step)[0]
        actions.append(action[""])
        env_actions = other.agent.head.env_actions(action, other.step.obs.counts)
        other.step = other.envs.step(env_actions)
    assert (
        torch.equal(torch.cat(actions[10:]), part.actions)
        and (other.step.reward == part.step.reward).all()
    )
    for name, values in part.memory.state().items():
        assert values.dtype == other.memory.state()[name].dtype
        torch.testing.assert_close(values, other.memory.state()[name])


@torch.no_grad()
def test_state_keeps_its_types():
    """The state grows from nothing, and survives a checkpoint bit by bit: integers beyond 2**53
    stay what they are, and what follows is the same."""
    part = begun(
        [lambda: IdEnv("graph_categories", "discrete", "flat")] * 5, remember_edges=True, **MEMORY
    )
    empty = part.memory.state()
    state = collect(part).memory.state()
    assert empty.keys() | {"keys", "links", "edge_attr"} == state.keys()
    assert all(values.dtype == state[name].dtype for name, values in empty.items())
    integers = ("num", "keys", "num_edges", "links")
    for name, values in state.items():
        assert values.dtype == (torch.int64 if name in integers else torch.float32)
    assert len(empty["h"]) == 0 < len(state["keys"]) and (state["keys"] >= 2**60).all()
    assert state["links"].shape == (len(state["edge_attr"]), 2) and len(state["links"]) > 0
    num = state["num"].repeat_interleave(state["num_edges"])  # entries of each edge's env
    assert (0 <= state["links"]).all() and (state["links"] < num[:, None]).all()
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    other = script.Memory(part.agent, part.envs.leaves, 5, part.args)
    other.restore(torch.load(file))
    assert other.state().keys() == state.keys()
    assert all(torch.equal(values, other.state()[name]) for name, values in state.items())
    results = []
    for memory in (part.memory, other):
        memory.begin()
        torch.manual_seed(0)
        action, *others = memory.act(part.step)
        state = [values for _, values in sorted(memory.state().items())]
        results.append([action[""], *others, *state])
    assert all(torch.equal(a, b) for a, b in zip(*results))


class Streets(gym.Env):
    """Of `num_nodes` nodes three are seen per step, never more than `num_seen` different ones;
    episodes never end."""

    def __init__(self, num_nodes=400, num_seen=40):
        ids = spaces.Sequence(spaces.Discrete(num_nodes), stack=True)
        self.observation_space = spaces.Dict(
            node_ids=ids, things=spaces.Sequence(vector(2), stack=True)
        )
        self.action_space, self.num_nodes, self.num_seen = spaces.Discrete(2), num_nodes, num_seen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.known = self.np_random.permutation(self.num_nodes)[: self.num_seen]
        return self.step(0)[0], {}

    def step(self, action):
        ids = self.np_random.permutation(self.known)[:3]
        things = self.np_random.random((3, 2), np.float32)
        return {"node_ids": ids, "things": things}, 0.0, False, False, {}


def test_state_is_sparse():
    """The state holds what was seen and no more, about a tenth of a dense one at a density of a
    tenth."""
    part = begun([Streets] * 4, num_steps=120, lstm_dim=32)
    sizes = []
    for _ in range(2):
        collect(part)
        sizes.append(sum(values.nbytes for values in part.memory.state().values()))
    state = part.memory.state()
    assert state["num"].tolist() == [40] * 4 and sizes[0] <= sizes[1]
    for env, keys in zip(part.envs.envs, state["keys"].split(40)):
        assert keys.tolist() == sorted(env.known)
    dense = 4 * 400 * 2 * 32 * 4
    assert 0.1 * dense < sizes[1] < 0.11 * dense
    stored = sum(values.untyped_storage().nbytes() for values in state.values())
    assert stored < 0.11 * dense  # no views of more


@torch.no_grad()
def test_inputs_of_the_memory():
    """The previous action and reward change the policy if their flag is set, except in an episode's
    first step."""
    for name, flag in (("action", "prev_action"), ("reward", "prev_reward")):
        for on in (False, True):
            part = collect(begun(PLAIN, **{flag: on}))
            state, starts = part.memory.state(), np.array([False] * 4 + [True])
            changed = state | {"action": state["action"] + 1} if name == "action" else state
            obs = part.memory.storage.append(part.step.obs)
            values = []
            for reward, before in ((1, state), (2, changed)):
                rewards = np.full(5, reward, np.float32)
                seen = part.memory.look(part.step.obs, starts, rewards)
                timeline = script.Timeline(before, seen)
                values.append(part.agent(obs, timeline, greedy=True)[3])
            a, b = values
            assert (a != b).tolist() == [on] * 4 + [False]


def test_ids_of_any_integers(tmp_path):
    """Ids of uint8 are the same ids as those of int64."""
    kwargs = dict(env_id="Ids-v0", lstm_dim=6, save_model=True, remember_edges=True)
    results = [
        run(tmp_path / str(uint8), script, env_kwargs={"small": True, "uint8": uint8}, **kwargs)
        for uint8 in (False, True)
    ]
    first, second = (weights(result.folder) for result in results)
    assert all(torch.equal(values, second[name]) for name, values in first.items())


class Named(gym.Env):
    """A space with node_ids that do not fit."""

    def __init__(self, ids, other=None):
        ids = {
            "float": spaces.Sequence(vector(), stack=True),
            "pairs": spaces.Sequence(spaces.MultiDiscrete([3, 3]), stack=True),
            "dense": spaces.MultiDiscrete([9, 9]),
            "dict": spaces.Sequence(spaces.Dict(a=spaces.Discrete(3)), stack=True),
            "good": spaces.Sequence(spaces.Discrete(9), stack=True),
        }[ids]
        others = {"graphs": {"g": graph_space(), "h": graph_space()}, "vector": {"v": vector(3)}}
        self.observation_space = spaces.Dict(
            node_ids=ids, **others.get(other, {"g": graph_space()})
        )
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return None, {}


gym.register("Named-v0", entry_point=Named)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"ids": "float"},
        {"ids": "pairs"},
        {"ids": "dense"},
        {"ids": "dict"},
        {"ids": "good", "other": "graphs"},
        {"ids": "good", "other": "vector"},
    ],
    ids=lambda kwargs: "-".join(kwargs.values()),
)
def test_ids_that_do_not_fit(kwargs, tmp_path):
    """node_ids that are no integers, or could name rows of two graphs or of none, are refused
    before the first step."""
    with pytest.raises(
        ValueError,
        match="leaf 'node_ids(.a)?': .* must be (integers|a Sequence of integers, one per row of)",
    ):
        run(tmp_path, script, env_id="Named-v0", env_kwargs=kwargs)


def test_errors(tmp_path):
    """Wrong flags are sentences that say what to do."""
    with pytest.raises(ValueError, match="--lstm-dim 0: a number from 1"):
        run(tmp_path / "b", script, env_id="CartPole-v1", lstm_dim=0)
    for name, kwargs in (
        ("c", {"env_id": "Random-v0", "env_kwargs": {"observation": "graph"}}),
        ("d", {"env_id": "Ids-v0", "env_kwargs": {"observation": "set"}}),
        ("e", {"env_id": "Ids-v0", "state_per_node": False}),
    ):
        with pytest.raises(
            ValueError, match="--remember-edges needs --state-per-node, a graph and"
        ):
            run(tmp_path / name, script, remember_edges=True, **kwargs)


def test_flags(tmp_path):
    """Worker processes change no bit of the weights, each flag of the memory changes them, and a
    saved model plays as it did."""
    base = dict(
        env_id="Ids-v0",
        env_kwargs={"observation": "graph_edges"},
        total_timesteps=96,
        num_steps=16,
        hidden_dims=(8,),
        gnn_layers=1,
        eval_episodes=3,
        lstm_dim=8,
        save_model=True,
    )
    first = run(tmp_path / "first", script, **base)
    expected = weights(first.folder)
    assert len(first.rows) == 3 and all(row["return"] == row["length"] for row in first.rows)
    again = run(tmp_path / "workers", script, **base, num_workers=2)
    assert all(
        torch.equal(values, weights(again.folder)[name]) for name, values in expected.items()
    )
    assert first.rows == again.rows
    played = run(
        tmp_path / "play",
        script,
        **base | {"total_timesteps": 0, "save_model": False},
        load_model=str(first.folder / "model.pt"),
    )
    assert played.rows == first.rows
    for flags in (
        {"prev_action": False},
        {"prev_reward": True},
        {"state_readout": "sum"},
        {"remember_edges": True},
        {"state_per_node": False},
        {"forget_bias": 0.0},
        {"cell": "mingru"},
    ):
        changed = weights(
            run(tmp_path / "_".join(flags), script, **base | flags | {"eval_episodes": 0}).folder
        )
        assert any(
            name not in expected
            or values.shape != expected[name].shape
            or not torch.equal(values, expected[name])
            for name, values in changed.items()
        )


@pytest.mark.parametrize("cell", ["lstm", "mingru"])
def test_resume(cell, tmp_path):
    """A run that was stopped between two updates, with a state that holds nodes and edges, goes on
    bit by bit."""
    base = dict(
        env_id="Ids-v0",
        env_kwargs={"observation": "graph_edges"},
        lstm_dim=6,
        cell=cell,
        remember_edges=True,
        **MEMORY,
    )
    whole = run(
        tmp_path / "whole", script, **base, total_timesteps=96, save_model=True, anneal_lr=False
    )
    half = base | {"anneal_lr": False, "checkpoint_every": 1}
    run(tmp_path / "parts", script, **half, total_timesteps=48)
    parts = run(
        tmp_path / "parts", script, **half, total_timesteps=96, save_model=True, resume="auto"
    )
    rest = weights(parts.folder)
    assert all(torch.equal(values, rest[name]) for name, values in weights(whole.folder).items())


@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_initialisation(kind):
    """The recurrent weights of each gate are orthogonal and forget biases spread; what the LSTM
    sees has the same small size, and no sign, whatever the size of the observation, which still
    shows."""
    space = vector(3, low=-np.inf, high=np.inf)
    args = lstm_args(cell=kind, lstm_dim=6, forget_bias=5.0)
    agent = script.Agent(script.leaves_of(space), spaces.Discrete(2), args)
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
@pytest.mark.slow
def test_learns_without_velocities(tmp_path):
    """CartPole whose velocities are hidden is learned with memory and not without."""
    base = dict(
        env_id="CartPole-v1",
        wrap=("hide:1,3",),
        norm_obs=True,
        num_envs=16,
        num_steps=64,
        hidden_dims=(64,),
        learning_rate=3e-3,
        ent_coef=0.002,
        total_timesteps=60_000,
        num_minibatches=4,
        update_epochs=8,
    )

    def last_returns(name, module, **flags):
        result = run(tmp_path / name, module, **base | flags)
        return np.mean([value for _, value in result.scalars["charts/episodic_return"]][-50:])

    assert last_returns("memory", script, lstm_dim=64, prev_action=True) > 150
    assert last_returns("none", ppo_graph) < 80


@pytest.mark.slow
def test_learns_in_one_environment(tmp_path):
    """A cue is remembered for five steps where a single environment's rollouts are cut in time."""
    result = run(
        tmp_path,
        script,
        env_id="envs:Recall-v0",
        env_kwargs={"length": 5},
        total_timesteps=25_600,
        num_envs=1,
        num_steps=256,
        num_minibatches=4,
        update_epochs=4,
        learning_rate=3e-3,
        lstm_dim=16,
        eval_episodes=50,
    )
    assert np.mean([row["return"] for row in result.rows]) > 0.9


class Recall(gym.Env):
    """Six elements are shown and one of them is red; then twice any three of them, all of one
    colour; in the last step all six again, and reward is 1 for choosing the one that was red. Ids
    and orders are random."""

    observation_space = spaces.Dict(
        node_ids=spaces.Sequence(spaces.Box(-(2**63), 2**63 - 1, (), np.int64), stack=True),
        things=spaces.Sequence(vector(2), stack=True),
        action_mask=spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
    )
    action_space = spaces.Discrete(6)

    def observe(self):
        self.order = self.np_random.permutation(6)[: 6 if self.t in (0, 3) else 3]
        features = np.zeros((len(self.order), 2), np.float32)
        features[:, 0], features[:, 1] = self.t == 0, (self.order == self.red) & (self.t == 0)
        return {
            "node_ids": self.names[self.order],
            "things": features,
            "action_mask": np.ones(len(features), np.int8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.red = 0, int(self.np_random.integers(6))
        self.names = self.np_random.integers(0, 2**62, 6)
        return self.observe(), {}

    def step(self, action):
        reward = float(self.t == 3 and self.order[action] == self.red)
        self.t += 1
        return self.observe(), reward, self.t == 4, False, {}


gym.register("RecallElements-v0", entry_point=Recall)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru", "mingru"])
def test_each_node_has_its_own_memory(cell, tmp_path):
    """What was seen of an element is remembered under its id; chance earns 1/6."""
    result = run(
        tmp_path,
        script,
        env_id="RecallElements-v0",
        total_timesteps=12_000,
        num_envs=16,
        num_steps=16,
        num_minibatches=4,
        update_epochs=4,
        learning_rate=5e-3,
        gnn_dim=16,
        gnn_layers=3,
        cell=cell,
        lstm_dim=16,
        eval_episodes=100,
    )
    assert np.mean([row["return"] for row in result.rows]) > 0.9
