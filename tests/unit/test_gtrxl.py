"""The memory of ppo_gtrxl.py: a segment gives what its steps gave one by one, both are the papers'
formulas written out, in float64, and attention is that of a dense mask."""

from types import SimpleNamespace
from unittest import mock

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import vector
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_gtrxl

Memory = ppo_gtrxl.Memory
SMALL = dict(dim=8, num_heads=2, num_layers=2, memory_length=5)


def small_args(**kwargs):
    """Args of a network and a run that take milliseconds."""
    return helpers.small_args(ppo_gtrxl, **SMALL | kwargs)


def run(run_dir, **kwargs):
    return helpers.run(run_dir, ppo_gtrxl, **SMALL | {"total_timesteps": 72} | kwargs)


def encodings(steps, dim):
    """Sines and cosines of numbers of steps [any], in float64 (Dai et al. 2019, section 3.3)."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = steps[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


def exact(r, inputs):
    """Before W_k,R is multiplied: the encodings of the distances W, ..., 0, in float64."""
    found = inputs[0].double()
    expected = encodings(torch.arange(len(found) - 1, -1, -1), found.shape[1])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    return expected


def transformer(args, dtype):
    """A GTrXL, in float64 with exact encodings of the distances."""
    gtrxl = ppo_gtrxl.GTrXL(args).to(dtype)
    if dtype == torch.float64:
        for layer in gtrxl.layers:
            layer.r.register_forward_pre_hook(exact)
    return gtrxl


class Bare(torch.nn.Module):
    """The transformer alone as an agent: observations are tokens, all outputs what comes out."""

    action_dim = 0
    head = SimpleNamespace(groups=[""])
    critic = torch.nn.Identity()
    critic_encoder = SimpleNamespace(beside=lambda features, obs: features)

    def __init__(self, seed=0, dtype=torch.float64, **kwargs):
        super().__init__()
        self.args = small_args(**{"prev_action": False} | kwargs)
        torch.manual_seed(seed)
        self.gtrxl = transformer(self.args, dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.gtrxl.parameters():  # the biases included
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)

    def encode(self, obs, age, previous, kv):
        outputs, inputs, kv = self.gtrxl(obs["obs"].values.unflatten(0, age.shape), age, kv)
        return outputs.flatten(0, 1), {}, inputs, kv

    def forward(self, features, elements, obs, action=None, greedy=False, learned=None):
        return {"": features}, features, features, features


class Order:
    """Instead of a random generator: the environments in this order, and one piece of time."""

    def __init__(self, envs):
        self.envs = np.asarray(envs)

    def permutation(self, num):
        return self.envs if num > 1 else np.arange(1)


def memory_of(agent, num_envs, width=8):
    return Memory(agent, ppo_gtrxl.leaves_of(vector(width)), num_envs, agent.args)


def flat_of(x):
    """Tokens x [B, D] as observations."""
    return ppo_gtrxl.Flat([x.cpu().numpy()], {"": np.ones(len(x), np.int64)})


def step_of(x, starts):
    """What Envs return with tokens x [B, D] where the episodes `starts` begin."""
    num = len(starts)
    no = np.zeros(num, bool)
    return ppo_gtrxl.Step(flat_of(x), np.zeros(num, np.float32), np.array(starts), no, [], [])


def walk(agent, x, starts, num_before=0, finals=None):
    """The steps x [T, B, D] one after the other. The last T - num_before of them are the rollout:
    its outputs and the memory after it. `finals` are the tokens (t, i) -> [D] that follow step t of
    env i if it is truncated there."""
    memory = memory_of(agent, x.shape[1])
    finals = finals or {}
    outputs = []
    for t in range(len(x)):
        if t in (0, num_before):
            memory.begin()
        outputs.append(memory.act(step_of(x[t], starts[t]))[2])
        cut = [(t, i) in finals for i in range(x.shape[1])]
        last = [flat_of(finals[t, i][None]) for i in np.flatnonzero(cut)]
        step = step_of(x[t], starts[t])  # its observations do not count here
        memory.keep(step._replace(truncated=np.array(cut), finals=last))
    if num_before == len(x):
        memory.begin()
    return torch.stack(outputs)[num_before:], memory


def look_back(memory, envs=None):
    """The agent's inputs for the rollout of some envs, by default all."""
    envs = np.arange(len(memory.age)) if envs is None else envs
    ((idx, inputs),) = memory.minibatches(Order(envs), 1)
    assert np.array_equal(idx.reshape(-1, len(envs)) % len(memory.age), [envs] * len(memory.ages))
    return inputs


def segment(agent, x, starts, num_before, envs=None):
    """(outputs of the rollout's steps, of all envs; outputs of the same steps at once)"""
    outputs, memory = walk(agent, x, starts, num_before)
    at_once = agent(*look_back(memory, envs))[3].unflatten(0, (len(x) - num_before, -1))
    return outputs, at_once


def history(seed, num_before, num_steps, num_envs, end_probability, dim=8):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((num_before + num_steps, num_envs, dim)))
    starts = rng.random(x.shape[:2]) < end_probability
    starts[0] = True
    return x, starts


# ---- The transformer ----
@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(0, 40),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, 5, 16, 17, 40, 1000]),
    st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
)
def test_segment_equals_steps(
    seed, num_before, num_steps, num_envs, num_layers, memory_length, end_probability
):
    """In float64 a segment gives what its steps gave one by one, whatever came before and wherever
    episodes end, for memories shorter and longer than the segment, for any of the envs in any
    order."""
    agent = Bare(seed, num_layers=num_layers, memory_length=memory_length)
    x, starts = history(seed, num_before, num_steps, num_envs, end_probability)
    envs = np.random.default_rng(seed).permutation(num_envs)[: max(1, num_envs - seed % 2)]
    outputs, at_once = segment(agent, x, starts, num_before, envs)
    torch.testing.assert_close(at_once, outputs[:, envs], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "gate, num_layers, memory_length",
    [("gru", 3, 9), ("none", 2, 100), ("gru", 2, 0)],
)
def test_against_the_formulas(gate, num_layers, memory_length):
    """Steps and segment agree with a GTrXL written out for one token, head and distance."""
    agent = Bare(3, gate=gate, num_layers=num_layers, memory_length=memory_length)
    x, starts = history(4, 12, 24, 2, 0.1)
    with torch.no_grad():
        outputs, at_once = segment(agent, x, starts, 12)
    for i in range(2):
        expected = reference(agent.gtrxl, x[:, i], starts[:, i], memory_length)[12:]
        torch.testing.assert_close(outputs[:, i], expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(at_once[:, i], expected, atol=1e-10, rtol=1e-10)


def reference(gtrxl, x, starts, memory_length):
    """The outputs [T, 2 D] of one env's tokens x [T, D]. Equations of Dai et al. 2019, section 3.3,
    and Parisotto et al. 2019, sections 3.1 and 3.2; the decay is that of Press et al. 2022."""
    dim = x.shape[1]
    streams = [list(x)] + [[] for _ in gtrxl.layers]  # inputs of each layer, outputs of the last
    found = []  # by the attention of the last layer
    for t in range(len(x)):
        begin = max(s for s in range(t + 1) if starts[s])
        for number, net in enumerate(gtrxl.layers):
            w = {name: value.detach() for name, value in net.named_parameters()}
            num_heads, stream = net.num_heads, streams[number]
            d = dim // num_heads
            tokens = {
                s: norm(stream[s], w["norm_attention.weight"], w["norm_attention.bias"])
                for s in range(max(begin, t - memory_length), t + 1)
            }
            heads = []
            for n in range(num_heads):
                rows = slice(n * d, n * d + d)
                w_key, w_value = w["kv.weight"][:dim][rows], w["kv.weight"][dim:][rows]
                query = w["q.weight"][rows] @ tokens[t]
                logits = []
                for s, token in tokens.items():
                    encoding = encodings(torch.tensor([t - s]), dim)[0]
                    by_content = (query + w["bias_key"][n]) @ (w_key @ token)
                    by_distance = (query + w["bias_distance"][n]) @ (w["r.weight"][rows] @ encoding)
                    logit = (by_content + by_distance) / d**0.5
                    logits.append(logit - (t - s) * w["decay"][n])
                share = torch.stack(logits).exp() / torch.stack(logits).exp().sum()
                values = [w_value @ token for token in tokens.values()]
                heads.append(sum(weight * value for weight, value in zip(share, values)))
            y = w["out.weight"] @ torch.cat(heads)
            if net is gtrxl.layers[-1]:
                found.append(y)
            h = gated(net.gate_attention, stream[t], y.clamp(min=0))
            y = norm(h, w["mlp.0.weight"], w["mlp.0.bias"])
            y = w["mlp.1.weight"] @ y + w["mlp.1.bias"]
            y = w["mlp.3.weight"] @ y.clamp(min=0) + w["mlp.3.bias"]
            streams[number + 1].append(gated(net.gate_mlp, h, y.clamp(min=0)))
    return torch.cat([torch.stack(streams[-1]), torch.stack(found)], 1)


def norm(x, weight, bias):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * weight + bias


def gated(gate, x, y):
    if not isinstance(gate, ppo_gtrxl.GRUGate):
        return x + y
    (w_r, w_z, w_g), (u_r, u_z) = gate.y.weight.detach().chunk(3), gate.x.weight.detach().chunk(2)
    sigmoid = lambda value: 1 / (1 + (-value).exp())
    r = sigmoid(w_r @ y + u_r @ x)
    z = sigmoid(w_z @ y + u_z @ x - gate.bias.detach())
    h = torch.tanh(w_g @ y + gate.rx.weight.detach() @ (r * x))
    return (1 - z) * x + z * h


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.integers(1, 90), st.integers(1, 3), st.integers(0, 50))
def test_attention_against_a_dense_mask(seed, T, B, W):
    """Chunks, with gradients, are attention with masked [T, W + T] logits."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v, bias = (
        torch.randn(B, 2, num, columns, generator=rng, dtype=torch.float64, requires_grad=True)
        for num, columns in ((T, 4), (W + T, 4), (W + T, 4), (T, W + 1))
    )
    age = torch.randint(W + 3, (T, B), generator=rng)
    far = torch.arange(W, -1, -1) > age.t()[:, None, :, None]
    near = bias.masked_fill(far, -torch.inf)
    distance = W + torch.arange(T)[:, None] - torch.arange(W + T)  # [T, W + T]
    columns = (W - distance).clamp(0, W).expand(B, 2, T, W + T)
    mask = near.gather(3, columns).masked_fill((distance < 0) | (distance > W), -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    grads = torch.autograd.grad(expected.square().sum(), (q, k, v, bias), retain_graph=True)
    found = ppo_gtrxl.attend(q, k, v, near)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    for a, b in zip(torch.autograd.grad(found.square().sum(), (q, k, v, bias)), grads):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_no_gradient_into_the_past():
    """What was remembered is a constant; the weights of its keys and values are not."""
    agent = Bare(memory_length=6)
    x, starts = history(0, 6, 1, 2, 0.0)
    _, memory = walk(agent, x, starts, 6)
    assert not memory.inputs[0].requires_grad and memory.inputs[0].abs().min() > 0
    agent(*look_back(memory))[3][:, 0].sum().backward()
    assert agent.gtrxl.layers[0].kv.weight.grad.abs().min() > 0


def test_gates_begin_near_the_identity():
    """The bias of 2 lets 12% of a sublayer through at first; --gate none has no gates."""
    for gate in ("gru", "none"):
        gates = [each for each in Bare(gate=gate).modules() if isinstance(each, ppo_gtrxl.GRUGate)]
        assert len(gates) == 4 * (gate == "gru")
    gate, x = ppo_gtrxl.GRUGate(8).double(), torch.randn(5, 8, dtype=torch.float64)
    for weight in (gate.x.weight, gate.y.weight, gate.rx.weight):
        weight.data.zero_()
    torch.testing.assert_close(gate(x, x), x * (1 - 1 / (1 + np.exp(2))))


# ---- What is remembered ----
def test_stored_entries():
    """One entry per step and layer: those of the rollout, and at most memory_length before it,
    whatever the length of the episodes; each is what the layer was given at that step. Keys and
    values are those that the next step can find."""
    agent = Bare(memory_length=10, num_layers=3)
    memory = memory_of(agent, 4)
    x = torch.randn(90, 4, 8, dtype=torch.float64)
    for t in range(90):
        if t % 60 == 0:
            memory.begin()
            before = min(10, t)
        memory.act(step_of(x[t], [t == 0] * 4))
        assert torch.cat(memory.inputs, 1).shape == (3, before + t % 60 + 1, 4, 8)
        assert [kv.shape for kv in memory.kv] == [(2, 4, 2, min(10, t) + 1, 4)] * 3
    assert torch.equal(torch.cat(memory.inputs, 1)[0], x[-40:])
    assert memory.state()["inputs"].untyped_storage().nbytes() == 3 * 10 * 4 * 8 * 8


# ---- Whole runs ----
@pytest.mark.parametrize(
    "observation, shown, epochs",
    [("mixed", False, 8), ("graph_edges", True, 4)],
)
def test_what_images_ask_for(observation, shown, epochs, tmp_path, monkeypatch):
    """The last inputs of actor and critic are sines and cosines of the age, but where the
    observation has an image. Updates have 8 epochs there, else 4."""
    seen = []
    forward = ppo_gtrxl.Agent.forward

    def record(self, features, *rest, **greedy):
        seen.append(features)
        return forward(self, features, *rest, **greedy)

    monkeypatch.setattr(ppo_gtrxl.Agent, "forward", record)
    flags = dict(update_epochs=None, target_kl=None, num_steps=4, num_minibatches=1)
    flags |= dict(env_id="Random-v0", env_kwargs={"observation": observation}, total_timesteps=12)
    run(tmp_path, **flags)
    first = seen[0][:, -SMALL["dim"] :]  # of three environments at age 0: sin 0 and cos 0
    assert torch.equal(first, torch.tensor([0.0] * 4 + [1.0] * 4).expand(3, -1)) == shown
    assert [len(features) for features in seen].count(12) == epochs  # one minibatch each


def window(memory, envs=None):
    """How many steps the rollout of some envs looks back."""
    with mock.patch.object(memory.agent, "encode", wraps=memory.agent.encode) as encode:
        look_back(memory, envs)
    kv = encode.call_args.args[3]
    return kv[0].shape[3]


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(0, 20),
    st.integers(1, 20),
    st.sampled_from([0, 1, 5, 17, 1000]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_values_equal_a_loop(seed, num_before, num_steps, memory_length, end_probability):
    """What is valued in one batch when a rollout has ended, after its last actions and after any
    others, is what another memory says that made the env's steps up to there and then that one."""
    agent, num_envs, rng = Bare(seed, memory_length=memory_length), 3, np.random.default_rng(seed)
    x, starts = history(seed, num_before, num_steps, num_envs, end_probability)
    cut = np.sort(rng.permutation(num_steps * num_envs)[: int(rng.integers(6))])
    tokens = torch.from_numpy(rng.standard_normal((num_envs + len(cut), 8)))
    finals = {}
    for k, token in zip(cut, tokens[num_envs:]):
        t, i = divmod(int(k), num_envs)
        finals[num_before + t, i] = token
    _, memory = walk(agent, x, starts, num_before, finals)
    values = memory.next_values(step_of(tokens[:num_envs], [False] * num_envs))
    places = [(num_steps - 1, i) for i in range(num_envs)] + [divmod(int(k), num_envs) for k in cut]
    assert len(values) == len(places)
    for value, token, (t, i) in zip(values, tokens, places):
        stop = num_before + t + 1
        again = torch.cat([x[:stop, i : i + 1], token.view(1, 1, -1)])
        outputs, _ = walk(agent, again, [*starts[:stop, i : i + 1], [False]])
        torch.testing.assert_close(value, outputs[-1, 0], atol=1e-10, rtol=1e-10)


def test_whole_history():
    """A huge memory length costs what the longest episode so far needs, and equals its length."""
    x, starts = history(0, 50, 60, 2, 0.0)
    starts[[30, 45], [0, 1]] = True
    outputs, memory = walk(Bare(memory_length=10**9), x, starts, 50)
    assert memory.inputs[0].shape[1] == 20 and len(memory.inputs) == 1 + 60
    assert window(memory) == 79 and window(memory, [1]) == 64
    torch.testing.assert_close(outputs, walk(Bare(memory_length=79), x, starts, 50)[0])
    assert not torch.allclose(outputs, walk(Bare(memory_length=70), x, starts, 50)[0])


@torch.no_grad()
def test_what_actor_and_critic_see():
    """The encoded observation, the stream, what attention found, and the age."""
    args = small_args(env_id="Random-v0", memory_length=0)
    envs = ppo_gtrxl.Envs([lambda: ppo_gtrxl.make_env(args)])
    agent = ppo_gtrxl.Agent(envs.leaves, envs.action_space, args)
    obs = Memory(agent, envs.leaves, 1, args).storage.append(envs.reset(0).obs)
    kv = [torch.zeros(2, 1, args.num_heads, 0, args.dim // args.num_heads)] * args.num_layers
    previous = torch.zeros(1, agent.action_dim)
    a, b = (agent.encode(obs, torch.tensor([[age]]), previous, kv)[0] for age in (3, 9))
    for age, seen in ((3, a), (9, b)):
        expected = encodings(torch.tensor([age]), args.dim).float()
        torch.testing.assert_close(seen[:, -args.dim :], expected)
    assert torch.equal(a[:, : agent.encoder.dim], agent.encoder(obs)[0])
    assert torch.equal(a[:, : -args.dim], b[:, : -args.dim]) and not torch.equal(a, b)
    found = a[:, -2 * args.dim : -args.dim]
    assert a.shape[1] == agent.encoder.dim + 3 * args.dim and found.abs().max() > 0
