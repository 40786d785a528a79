"""The memory of ppo_gtrxl.py: one step at a time, a whole segment, and the formulas of the papers written out."""

import gymnasium as gym
import numpy as np
import ppo_gtrxl
import pytest
import torch
from gymnasium import spaces
from helpers import ACTIONS, vector
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")


def small_args(**kwargs):
    """Args of a network and a run that take milliseconds."""
    small = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=2, num_envs=3, num_steps=8, num_minibatches=2,
                 update_epochs=2, total_timesteps=72, eval_episodes=0, cuda=False, dim=8, num_heads=2, num_layers=2,
                 memory_length=5)
    return ppo_gtrxl.Args(**small | kwargs)


def network(seed=0, dtype=torch.float64, **kwargs):
    """A GTrXL all of whose parameters, the biases included, are random."""
    gtrxl = ppo_gtrxl.GTrXL(small_args(**kwargs)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in gtrxl.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return gtrxl


def walk(gtrxl, x, starts, memory_length, num_before):
    """The steps x [T, B, D] one after the other; a new rollout begins at step `num_before`. Returns the outputs of the
    rollout, its ages, and the past that it begins with."""
    memory, outputs, ages, past, window = ppo_gtrxl.Memory(gtrxl, x.shape[1], memory_length), [], [], None, 0
    for t in range(len(x)):
        if t == num_before:
            memory.rebuild()
            past = memory.past(memory.age)
        age = memory.begin(starts[t])
        with torch.no_grad():
            outputs.append(gtrxl(x[t:t + 1], age, memory))
        ages.append(age)
        window = max(window, memory.window) if t >= num_before else 0
    return torch.cat(outputs)[num_before:], torch.cat(ages)[num_before:], past._replace(window=window)


def history(seed, num_before, num_steps, num_envs, end_probability, dim=8):
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((num_before + num_steps, num_envs, dim)))
    starts = rng.random(x.shape[:2]) < end_probability
    starts[0] = True
    return x, starts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(0, 70), st.integers(1, 70), st.integers(1, 3), st.integers(1, 3),
       st.sampled_from([0, 1, 2, 5, 16, 17, 40, 1000]), st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]))
def test_segment_equals_steps(seed, num_before, num_steps, num_envs, num_layers, memory_length, end_probability):
    """T3, S5: in float64 a segment gives what its steps gave one by one, whatever came before and wherever episodes
    end, for memories shorter and longer than the segment."""
    gtrxl = network(seed, num_layers=num_layers)
    x, starts = history(seed, num_before, num_steps, num_envs, end_probability)
    outputs, ages, past = walk(gtrxl, x, starts, memory_length, num_before)
    torch.testing.assert_close(gtrxl(x[num_before:], ages, past), outputs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("attend", ["sdpa", "flex"])
@pytest.mark.parametrize("gate, num_layers, memory_length", [
    ("gru", 1, 3), ("gru", 3, 9), ("none", 2, 100), ("gru", 2, 0)])
def test_against_the_formulas(attend, gate, num_layers, memory_length):
    """T3: steps and segment agree with a GTrXL that is written out for one token at a time: every window by itself,
    head by head, distance by distance."""
    gtrxl = network(3, gate=gate, num_layers=num_layers)
    x, starts = history(4, 12, 40, 2, 0.1)
    outputs, ages, past = walk(gtrxl, x, starts, memory_length, 12)
    gtrxl.attention = attend
    with torch.no_grad():
        segment = gtrxl(x[12:], ages, past)
    for i in range(2):
        expected = reference(gtrxl, x[:, i], starts[:, i], memory_length)[12:]
        torch.testing.assert_close(outputs[:, i], expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(segment[:, i], expected, atol=1e-10, rtol=1e-10)


def reference(gtrxl, x, starts, memory_length):
    """The outputs of one env's tokens x [T, D]. Equations of Dai et al. 2019, section 3.3, and Parisotto et al. 2019,
    sections 3.1 and 3.2."""
    streams = [list(x)] + [[] for _ in gtrxl.layers]  # inputs of each layer, outputs of the last
    for t in range(len(x)):
        begin = max(s for s in range(t + 1) if starts[s])
        for number, net in enumerate(gtrxl.layers):
            w = {name: value.detach() for name, value in net.named_parameters()}
            dim, num_heads, stream = net.dim, net.num_heads, streams[number]
            d = dim // num_heads
            tokens = {s: norm(stream[s], w["norm_attention.weight"], w["norm_attention.bias"])
                      for s in range(max(begin, t - memory_length), t + 1)}
            heads = []
            for n in range(num_heads):
                rows = slice(n * d, n * d + d)
                w_key, w_value = w["kv.weight"][:dim][rows], w["kv.weight"][dim:][rows]
                query = w["q.weight"][rows] @ tokens[t]
                logits = []
                for s, token in tokens.items():
                    angles = [(t - s) / 10000 ** (2 * k / dim) for k in range(dim // 2)]
                    encoding = torch.tensor([*np.sin(angles), *np.cos(angles)], dtype=x.dtype)
                    by_content = (query + w["bias_key"][n]) @ (w_key @ token)
                    by_distance = (query + w["bias_distance"][n]) @ (w["r.weight"][rows] @ encoding)
                    logits.append((by_content + by_distance) / d**0.5)
                weights = torch.stack(logits).exp() / torch.stack(logits).exp().sum()
                heads.append(sum(weight * (w_value @ token) for weight, token in zip(weights, tokens.values())))
            h = gated(net.gate_attention, stream[t], (w["out.weight"] @ torch.cat(heads)).clamp(min=0))
            y = w["mlp.0.weight"] @ norm(h, w["norm_mlp.weight"], w["norm_mlp.bias"]) + w["mlp.0.bias"]
            y = w["mlp.2.weight"] @ y.clamp(min=0) + w["mlp.2.bias"]
            streams[number + 1].append(gated(net.gate_mlp, h, y.clamp(min=0)))
    return torch.stack(streams[-1])


def norm(x, weight, bias):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * weight + bias


def gated(gate, x, y):
    if isinstance(gate, ppo_gtrxl.Sum):
        return x + y
    (w_r, w_z, w_g), (u_r, u_z) = gate.y.weight.detach().chunk(3), gate.x.weight.detach().chunk(2)
    sigmoid = lambda value: 1 / (1 + (-value).exp())
    r = sigmoid(w_r @ y + u_r @ x)
    z = sigmoid(w_z @ y + u_z @ x - gate.bias.detach())
    h = torch.tanh(w_g @ y + gate.rx.weight.detach() @ (r * x))
    return (1 - z) * x + z * h


def mismatch(memory_length=6, seed=0, change=lambda ages, past: (ages, past)):
    """The largest difference between steps and a segment whose ages and past were changed."""
    gtrxl = network(seed)
    x, starts = history(seed, 10, 40, 3, 0.1)
    outputs, ages, past = walk(gtrxl, x, starts, memory_length, 10)
    ages, past = change(ages, past)
    with torch.no_grad():
        return (gtrxl(x[10:], ages, past) - outputs).abs().max().item()


MUTATIONS = {
    "episodes not cut": lambda ages, past: (ages * 0 + 1000, past),
    "every tenth boundary not cut": lambda ages, past: (torch.where(ages == 0, 1, ages), past),
    "window one longer": lambda ages, past: (ages, past._replace(window=past.window + 1)),
    "window one shorter": lambda ages, past: (ages, past._replace(window=past.window - 1)),
    "past one step late": lambda ages, past: (ages, past._replace(inputs=past.inputs.roll(1, 1))),
    "past of another env": lambda ages, past: (ages, past._replace(inputs=past.inputs.roll(1, 2))),
    "past of another layer": lambda ages, past: (ages, past._replace(inputs=past.inputs.roll(1, 0))),
    "no past": lambda ages, past: (ages, past._replace(inputs=past.inputs * 0)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_seen(name):
    """The equality of steps and segment breaks if the segment attends to anything else."""
    assert mismatch() < 1e-10 < 1e-4 < mismatch(change=MUTATIONS[name])


@pytest.mark.parametrize("memory_length", [2, 100])
def test_gradients(memory_length):
    """The gradient of the segment, through several chunks and with a past, with respect to tokens and parameters."""
    gtrxl = network(dim=4, num_heads=2, num_layers=2)
    x, starts = history(1, 5, 33 if memory_length == 2 else 7, 2, 0.15, dim=4)
    _, ages, past = walk(gtrxl, x, starts, memory_length, 5)
    names = ["layers.0.q.weight", "layers.1.kv.weight", "layers.0.bias_distance", "layers.1.bias_key",
             "layers.0.r.weight", "layers.1.gate_attention.rx.weight", "layers.0.gate_mlp.bias",
             "layers.0.norm_attention.weight"]
    parameters = [dict(gtrxl.named_parameters())[name] for name in names]

    def segment(tokens, *values):
        return torch.func.functional_call(gtrxl, dict(zip(names, values)), (tokens, ages, past))

    inputs = (x[5:].clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters))
    assert torch.autograd.gradcheck(segment, inputs, fast_mode=True)


@pytest.mark.parametrize("memory_length", [3, 70])
def test_gradients_of_flex_attention(monkeypatch, memory_length):
    """Both kernels have the same gradient. FlexAttention refuses to make one on the CPU; its plain formula, which runs
    there, can if the refusal is taken away."""
    monkeypatch.setattr(ppo_gtrxl.flex.flex_attention.__globals__["_validate_device"], "__code__",
                        (lambda query, key, value: None).__code__)
    gtrxl = network(1)
    x, starts = history(1, 10, 50, 2, 0.05)
    _, ages, past = walk(gtrxl, x, starts, memory_length, 10)
    weight, grads = torch.randn(50, 2, 8, dtype=torch.float64), {}
    for gtrxl.attention in ("sdpa", "flex"):
        loss = (gtrxl(x[10:], ages, past) * weight).sum()
        grads[gtrxl.attention] = torch.autograd.grad(loss, list(gtrxl.parameters()))
    for a, b in zip(*grads.values()):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_no_gradient_into_the_past():
    """T3: what was remembered at collection is a constant; the weights that make keys and values of it are not."""
    gtrxl = network()
    x, starts = history(0, 6, 1, 2, 0.0)
    _, ages, past = walk(gtrxl, x, starts, 6, 6)
    assert not past.inputs.requires_grad and past.inputs.abs().min() > 0
    gtrxl(x[6:], ages, past)[..., 0].sum().backward()
    assert gtrxl.layers[0].kv.weight.grad.abs().min() > 0


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("gate", ["gru", "none"])
def test_bfloat16(attention, gate):
    """--bf16, here on the CPU: steps and segment agree within the rounding of bfloat16, and with float32 also."""
    gtrxl = network(dtype=torch.float32, gate=gate)
    x, starts = history(2, 20, 40, 2, 0.05)
    expected, *_ = walk(gtrxl, x.float(), starts, 10, 20)
    gtrxl.bf16, gtrxl.attention = True, attention
    outputs, ages, past = walk(gtrxl, x.float(), starts, 10, 20)
    with torch.no_grad():
        segment = gtrxl(x[20:].float(), ages, past)
    assert segment.dtype == torch.float32 and not torch.equal(outputs, expected)
    for result in (outputs, segment):
        assert (result - expected).norm() < 0.02 * expected.norm()
    if attention == "sdpa":
        gtrxl(x[20:].float(), ages, past).sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in gtrxl.parameters())


def test_gates_begin_near_the_identity():
    """The bias of 2 lets 12% of a sublayer through at first; --gate none is the plain sum, and lets all through."""
    x, starts = history(0, 0, 20, 2, 0.1)
    change = {}
    for gate in ("gru", "none"):
        torch.manual_seed(0)
        gtrxl = ppo_gtrxl.GTrXL(small_args(gate=gate, dim=8, num_layers=1)).double()
        outputs, *_ = walk(gtrxl, x, starts, 5, 0)
        change[gate] = ((outputs - x).norm() / x.norm()).item()
        assert all((g.bias == 2).all() for g in gtrxl.modules() if isinstance(g, ppo_gtrxl.GRUGate))
    gate = ppo_gtrxl.GRUGate(8).double()
    for weight in (gate.x.weight, gate.y.weight, gate.rx.weight):
        weight.data.zero_()
    torch.testing.assert_close(gate(x, x), x * (1 - 1 / (1 + np.exp(2))))
    assert change["gru"] < 0.35 and change["none"] > 0.1
    assert sum(isinstance(module, ppo_gtrxl.Sum) for module in gtrxl.modules()) == 2


def test_memory_zero_is_memoryless():
    """S5: with --memory-length 0 the output depends on the present token alone; with 1 and one layer on two tokens."""
    x, starts = history(0, 0, 30, 2, 0.0)
    other = x.clone()
    other[:20] += 1
    gtrxl = network(num_layers=1)
    for memory_length, last_change in ((0, 19), (1, 20), (4, 23), (1000, 29)):
        first, second = (walk(gtrxl, tokens, starts, memory_length, 0)[0] for tokens in (x, other))
        assert np.nonzero((first != second).any(2).any(1).numpy())[0].max() == last_change


def test_whole_history():
    """S5: a huge memory length costs what the longest episode so far needs, and equals its length."""
    gtrxl = network()
    x, starts = history(0, 50, 60, 2, 0.0)
    starts[[30, 45], [0, 1]] = True
    outputs, ages, past = walk(gtrxl, x, starts, 10**9, 50)
    assert past.inputs.shape[1] == 20 and past.window == 79
    torch.testing.assert_close(outputs, walk(gtrxl, x, starts, 79, 50)[0])
    assert not torch.allclose(outputs, walk(gtrxl, x, starts, 70, 50)[0])


def test_stored_entries(monkeypatch):
    """T3: one entry per step and layer in the memory, at most 2 x memory_length + 32 steps of them, whatever the length
    of the episodes; what training holds of the time before the rollout is a view of the same numbers."""
    args = small_args(memory_length=10, num_layers=3, num_steps=200, num_envs=4)
    gtrxl = ppo_gtrxl.GTrXL(args)
    memory, seen = ppo_gtrxl.Memory(gtrxl, 4, 10), []
    x = torch.randn(500, 4, 8)
    with torch.no_grad():
        for t in range(500):
            gtrxl(x[t:t + 1], memory.begin(np.zeros(4, bool)), memory)
            assert memory.inputs.shape[0] == 3 and memory.inputs.shape[1] <= 52
            assert memory.keys.shape == memory.values.shape == memory.inputs.shape
            seen.append(memory.inputs[0, memory.stop - 1])
    past = memory.past(memory.age)
    assert past.inputs.shape == (3, 10, 4, 8)
    assert past.inputs.untyped_storage().data_ptr() == memory.inputs.untyped_storage().data_ptr()
    assert torch.equal(past.inputs[0], x[-10:])


# ---- Whole runs ----
CASES = [(kind, "discrete", "flat", {}) for kind in ("vector", "image_hwc", "graph_edges", "set", "mixed")]
CASES += [("vector", action, "flat", {}) for action in ACTIONS]
CASES += [("vector", "mixed", "flat", {"autoregressive": True}), ("vector", "discrete", "mask", {}),
          ("graph_edges", "", "nodes", {}), ("set", "", "nodes", {}), ("graph", "", "avail_actions", {}),
          ("graph_edges", "", "pair", {"autoregressive": True}), ("vector", "discrete", "flat", {"memory_length": 0}),
          ("vector", "discrete", "flat", {"memory_length": 10**6}), ("vector", "discrete", "flat", {"gate": "none"}),
          ("graph", "discrete", "flat", {"norm_obs": True}), ("vector", "discrete", "flat", {"num_workers": 2})]


def run(tmp_path, monkeypatch, **kwargs):
    """(the logs of each update, the rows of the evaluation) of main()."""
    logged = []
    monkeypatch.setattr(ppo_gtrxl.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    rows = ppo_gtrxl.main(small_args(run_dir=str(tmp_path), **kwargs))
    return logged, rows


@pytest.mark.parametrize("prev", [False, True], ids=["", "prev"])
@pytest.mark.parametrize("observation, action, head, flags", CASES,
                         ids=lambda v: v if isinstance(v, str) else "+".join(v))
def test_collection_and_training_agree(observation, action, head, flags, prev, tmp_path, monkeypatch):
    """X2: before the first gradient step of each update the probability ratio is 1 within 1e-5, for every observation
    and head, with and without previous action and reward; main runs from environment to evaluation."""
    kwargs = {"observation": observation, "action": action, "head": head}
    logged, rows = run(tmp_path, monkeypatch, env_id="Random-v0", env_kwargs=kwargs, eval_episodes=2, prev_action=prev,
                       prev_reward=prev, learning_rate=3e-3, **flags)
    assert len(logged) == 3
    for scalars in logged:
        assert 0 <= scalars["debug/collection_mismatch"] < 1e-5
        assert all(np.isfinite(value) for name, value in scalars.items() if name != "losses/explained_variance")
    assert logged[0]["losses/approx_kl"] != 0
    assert [row["return"] for row in rows] == [row["length"] for row in rows]  # reward 1: legal actions only


class Counter(gym.Env):
    """Observes noise, which nothing but the seed changes. Episodes of `length` steps, truncated if `truncated`."""

    observation_space, action_space = vector(3), spaces.Discrete(3)

    def __init__(self, length=5, truncated=True):
        self.length, self.truncated = length, truncated

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(3).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.length
        obs = self.np_random.random(3).astype(np.float32)
        return obs, float(obs[0]), end and not self.truncated, end and self.truncated, {}


def counter_rollouts(num_rollouts=3, lengths=(5, 13, 3), **kwargs):
    """(agent, actor, rollout, args, calls of Actor.value: (step of the rollout, envs, obs, previous, values))."""
    args = small_args(num_steps=16, prev_action=True, prev_reward=True, **kwargs)
    envs = ppo_gtrxl.Envs([lambda n=n: Counter(n) for n in lengths])
    agent = ppo_gtrxl.Agent(envs.leaves, envs.action_space, args)
    for parameter in agent.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    actor, calls = ppo_gtrxl.Actor(agent, envs.leaves, 3, args, CPU), []
    original = actor.value

    def value(step, parts, counts, which, lane):
        result, obs = original(step, parts, counts, which), torch.from_numpy(np.concatenate(parts[0]))
        calls.append((len(actor.storage.steps), list(which), obs, actor.previous(step.reward, 0)[which], result))
        return result

    actor.value = value
    envs.reset(0)
    for _ in range(num_rollouts):
        calls.clear()
        rollout = ppo_gtrxl.collect(actor, envs, args, lambda *episode: None)
    return agent, actor, rollout, args, calls


@pytest.mark.parametrize("memory_length", [0, 4, 50])
def test_bootstrap_remembers_the_episode(memory_length):
    """V of a truncated episode's last observation, and of the one after the rollout, has the memory of its episode: it
    is the value that a segment with one more token gives, and no step's memory changes by asking for it."""
    agent, actor, rollout, args, calls = counter_rollouts(memory_length=memory_length)
    obs = actor.storage.gather(np.arange(actor.storage.size))["obs"].view(16, 3, -1)
    previous, ages = rollout.inputs["previous"].view(16, 3, -1), rollout.inputs["age"].view(16, 3)
    assert len(calls) > 4
    for t, envs, final, inputs, values in calls:
        for row, i in enumerate(envs):
            tokens = torch.cat([obs[:t, i], final[row, None]]), torch.cat([previous[:t, i], inputs[row, None]])
            age = torch.cat([ages[:t, i], ages[t - 1, i, None] + 1])[:, None]
            past = ppo_gtrxl.Past(actor.past.inputs[:, :, i:i + 1], min(args.memory_length, int(age.max())))
            with torch.no_grad():
                expected = agent.value({"obs": tokens[0]}, tokens[1], age, past)[-1]
            torch.testing.assert_close(values[row], expected, atol=1e-5, rtol=1e-5)
    assert {1, 3} <= {len(envs) for _, envs, *_ in calls}


def test_previous_action_and_reward():
    """The inputs beside the observation: one-hot action and reward of the step before, zeros at an episode's start."""
    _, _, rollout, _, _ = counter_rollouts()
    previous, age = rollout.inputs["previous"].view(16, 3, 4), rollout.inputs["age"].view(16, 3)
    actions = rollout.actions.view(16, 3)
    assert (previous[age == 0] == 0).all()
    for t, i in zip(*np.nonzero(age[1:].numpy())):
        assert previous[t + 1, i, :3].argmax() == actions[t, i] and previous[t + 1, i, :3].sum() == 1
        assert 0 < previous[t + 1, i, 3] < 1


def test_ages_of_a_rollout():
    """The age of a token is its step in the episode, which the rollout's start does not cut."""
    _, _, rollout, _, _ = counter_rollouts(num_rollouts=2, lengths=(5, 13, 100))
    times = np.arange(16, 32)
    assert rollout.inputs["age"].view(16, 3).T.tolist() == [(times % n).tolist() for n in (5, 13, 100)]


def test_minibatches_are_envs(monkeypatch):
    """Each epoch sees the whole rollout of each env once, and the columns of a minibatch belong together."""
    agent, actor, rollout, args, _ = counter_rollouts(num_minibatches=2)
    seen, original = [], actor.storage.gather
    monkeypatch.setattr(actor.storage, "gather", lambda idx: seen.append(idx) or original(idx))
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    ppo_gtrxl.update(agent, optimizer, actor, rollout, np.random.default_rng(0), args)
    assert [len(idx) for idx in seen] == [32, 16] * args.update_epochs
    for k in range(0, len(seen), 2):
        assert sorted(np.concatenate(seen[k:k + 2])) == list(range(48))
    args.num_minibatches = 1
    ((obs, previous, age, past), batch), = actor.minibatches(rollout, np.random.default_rng(0), args)
    order = np.random.default_rng(0).permutation(3)
    assert torch.equal(batch.values.view(16, 3), rollout.values.view(16, 3)[:, order])
    assert torch.equal(age, rollout.inputs["age"].view(16, 3)[:, order]) and previous is batch.inputs["previous"]
    assert torch.equal(past.inputs, actor.past.inputs[:, :, order])


@pytest.mark.parametrize("flags, message", [
    ({"num_minibatches": 4}, "--num-minibatches 4 exceeds --num-envs 3"), ({"dim": 10, "num_heads": 4}, "--dim 10"),
    ({"memory_length": -1}, "--memory-length -1"), ({"bf16": True}, "--bf16"), ({"attention": "flex"}, "CUDA")])
def test_flags_that_do_not_fit(flags, message):
    with pytest.raises(ValueError, match=message):
        ppo_gtrxl.main(small_args(env_id="CartPole-v1", **flags))


def test_evaluation_remembers_and_a_model_is_loaded(tmp_path, monkeypatch):
    """A policy that was trained to say the cue after a corridor says it in the evaluation, after loading, too."""
    flags = dict(env_id="envs:Recall-v0", env_kwargs={"length": 3}, total_timesteps=0, eval_episodes=10)
    _, rows = run(tmp_path / "a", monkeypatch, **flags | {
        "total_timesteps": 16384, "save_model": True, "dim": 32, "num_envs": 16, "num_steps": 32, "num_minibatches": 4,
        "update_epochs": 4, "memory_length": 8, "num_layers": 1, "learning_rate": 3e-3, "hidden_dims": (32,)})
    assert [row["return"] for row in rows] == [1.0] * 10
    (path,) = (tmp_path / "a").glob("*/model.pt")
    same = {"dim": 32, "num_layers": 1, "memory_length": 8, "hidden_dims": (32,)}
    assert run(tmp_path / "b", monkeypatch, load_model=str(path), **flags | same)[1] == rows
    forgetful = run(tmp_path / "c", monkeypatch, load_model=str(path), **flags | same | {"memory_length": 2})[1]
    assert forgetful != rows


def test_learns_masked_cartpole(tmp_path, monkeypatch):
    """T4: a short run balances the pole without seeing velocities, longer than any policy without memory does."""
    _, rows = run(tmp_path, monkeypatch, env_id="CartPole-v1", mask_obs="1,3", norm_obs=True, num_envs=16, num_steps=32,
                  total_timesteps=20480, num_minibatches=4, update_epochs=4, dim=32, num_heads=4, num_layers=1,
                  hidden_dims=(32,), memory_length=8, learning_rate=3e-3, eval_episodes=10, ent_coef=0.0, gamma=0.98,
                  gae_lambda=0.8, clip_vloss=False)
    assert np.mean([row["return"] for row in rows]) > 80


# ---- On a CUDA device ----
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("memory_length", [5, 40, 200])
def test_compiled_flex_attention(memory_length):
    """The compiled kernel gives the outputs and the gradients of attention in chunks, within float32."""
    gtrxl = network(dtype=torch.float32, dim=64, num_heads=4).cuda()
    x, starts = history(1, 150, 256, 3, 0.02, dim=64)
    x = x.float().cuda()
    _, ages, past = walk(gtrxl, x, starts, memory_length, 150)
    weight, results = torch.randn(256, 3, 64, device="cuda"), {}
    for gtrxl.attention in ("sdpa", "flex"):
        out = gtrxl(x[150:], ages, past)
        results[gtrxl.attention] = out, *torch.autograd.grad((out * weight).sum(), list(gtrxl.parameters()))
    for a, b in zip(*results.values()):
        torch.testing.assert_close(a, b, atol=1e-3 * max(1.0, a.abs().max().item()), rtol=1e-3)


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("attention", ["auto", "flex", "sdpa"])
@pytest.mark.parametrize("bf16, bound", [(False, 1e-4), (True, 0.05)])
def test_main_on_cuda(tmp_path, monkeypatch, attention, bf16, bound):
    """X2: collection and training agree on the device; with --bf16 within 0.05."""
    logged, rows = run(tmp_path, monkeypatch, cuda=True, env_id="Random-v0", env_kwargs={"observation": "mixed"},
                       dim=64, num_heads=4, attention=attention, bf16=bf16, prev_action=True, prev_reward=True,
                       eval_episodes=2)
    assert len(logged) == 3 and all(scalars["debug/collection_mismatch"] < bound for scalars in logged)
    assert len(rows) == 2
