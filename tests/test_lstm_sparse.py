"""The sparse recurrent state of ppo_lstm_sparse.py: its dense oracle, its kernel, collection against training."""

from unittest.mock import patch

import gymnasium as gym
import numpy as np
import ppo_graph
import ppo_lstm_sparse as script
import pytest
import torch
import tyro
from gymnasium import spaces
from helpers import RandomEnv, vector
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo import Corridor

CPU = torch.device("cpu")


def small_args(**kwargs):
    """Args of a network and a run that take milliseconds."""
    small = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=2, num_envs=3, num_steps=8, num_minibatches=2, lstm_dim=6,
                 update_epochs=2, total_timesteps=48, eval_episodes=0, cuda=False)
    return script.Args(**small | kwargs)


# ---- the dense state as oracle ----
def cell(lstm, x, h, c):
    """The LSTM's equations, written out."""
    gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class Dense:
    """Zero-padded state [num_keys, H] of one env, its mask, and the edges in the order in which they were seen."""

    def __init__(self, memory, num_keys):
        self.memory, H = memory, memory.lstm.hidden_size
        self.h, self.c, self.out = (list(torch.zeros(num_keys, H, dtype=torch.double)) for _ in range(3))
        self.mask, self.edges = np.zeros(num_keys, bool), {}

    def step(self, x, ids, links, features):
        """(output of each id, readout) of one observation."""
        memory = self.memory
        for row, k in zip(x, ids):
            self.h[k], self.c[k] = cell(memory.lstm, row, self.h[k], self.c[k])
            self.mask[k] = True
        for (u, v), feature in zip(links, features):
            self.edges.setdefault((ids[u], ids[v]), feature)
        for k in ids:
            self.out[k] = self.h[k]
            if memory.message is not None:
                senders = [(u, feature) for (u, v), feature in self.edges.items() if v == k]
                messages = [memory.message(torch.cat([self.h[u], feature.double()])).relu() for u, feature in senders]
                self.out[k] = self.h[k] + (torch.stack(messages).mean(0) if messages else 0.0)
        num = torch.tensor(float(self.mask.sum()), dtype=torch.double)
        total = (torch.stack(self.out) * torch.from_numpy(self.mask)[:, None]).sum(0)
        readout = total / num.clamp(min=1) if memory.readout == "mean" else total
        return [self.out[k] for k in ids], torch.cat([readout, num.log1p()[None]])


class Identity(torch.nn.Module):
    dim = 2

    def forward(self, values):
        return values


def random_steps(rng, num_envs, num_steps, num_keys, density, reset):
    """A nested list [env][t] of (x, ids, links, features, start). Keys are spread over all of int64."""
    names = np.sort(rng.integers(-2**62, 2**62, num_keys))
    result = []
    for _ in range(num_envs):
        steps = []
        for _ in range(num_steps):
            ids = rng.permutation(np.flatnonzero(rng.random(num_keys) < density))
            num_edges = int(rng.integers(6)) if len(ids) else 0
            steps.append((torch.from_numpy(rng.standard_normal((len(ids), 3))), ids,
                          rng.integers(max(len(ids), 1), size=(num_edges, 2)),
                          torch.from_numpy(rng.standard_normal((num_edges, 2))), rng.random() < reset))
        result.append(steps)
    return names, result


def memory_inputs(steps, names):
    """The arguments of Memory.forward for steps[env][t]."""
    flat = [step for env in steps for step in env]
    counts = np.array([len(ids) for _, ids, *_ in flat])
    shift = counts.cumsum() - counts
    links = np.concatenate([links + s for (_, _, links, *_), s in zip(flat, shift)]).T
    edge_obs = np.arange(len(flat)).repeat([len(step[2]) for step in flat])
    starts = np.array([[start for *_, start in env] for env in steps])
    ids = names[np.concatenate([ids for _, ids, *_ in flat]).astype(int)]
    edges = links, edge_obs, torch.cat([step[3] for step in flat])
    return torch.cat([step[0] for step in flat]), ids, counts, starts, edges


def empty_state(num_envs, width=4):
    ptr, floats = torch.zeros(num_envs + 1, dtype=torch.int64), torch.zeros(0, width, dtype=torch.double)
    return {"ptr": ptr, "keys": ptr[:0], "h": floats, "c": floats, "out": floats, "edge_ptr": ptr,
            "edge_index": ptr.new_zeros(2, 0), "edge_attr": floats.new_zeros(0, 2),
            "action": floats.new_zeros(num_envs, 0)}


def make_memory(remember_edges, readout):
    args = small_args(lstm_dim=4, remember_edges=remember_edges, state_readout=readout)
    memory = script.Memory(3, True, Identity() if remember_edges else None, args).double()
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return memory


def walk(memory, steps, names):
    """(outputs, readouts [num_envs, num_steps, ...], state after, state before the last half) one step at a time."""
    state, results, states = empty_state(len(steps)), [], []
    for t in range(len(steps[0])):
        states.append(state)
        x, ids, counts, starts, edges = memory_inputs([[env[t]] for env in steps], names)
        out, readout, new = memory(x, ids, counts, starts, state, edges if memory.message else None)
        state = new | {"action": state["action"]}
        results.append((out.split(counts.tolist()), readout))
    return results, state, states


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.15, 0.6]),
       st.booleans(), st.sampled_from(["mean", "sum"]), st.integers(0, 5))
def test_dense_state_is_the_oracle(seed, density, reset, remember_edges, readout, split):
    """R1, R2, R3, R5, R6: one pass over T steps from any state gives the outputs, readouts and gradients of a dense
    zero-padded state that is stepped in a loop; and so do single steps, whose last state is the same."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    memory, num_envs, num_steps = make_memory(remember_edges, readout), 3, 6
    names, steps = random_steps(rng, num_envs, num_steps, 7, density, reset)
    for env in steps:
        for x, *_ in env:
            x.requires_grad_()
    leaves = [x for env in steps for x, *_ in env] + list(memory.parameters())

    expected_out, expected_readout, dense = [], [], []
    for env in steps:
        oracle = Dense(memory, 7)
        for t, (x, ids, links, features, start) in enumerate(env):
            if start:
                oracle = Dense(memory, 7)
            if t == split:  # the gradient ends where the rollout begins
                oracle.h, oracle.c, oracle.out = ([v.detach() for v in values]
                                                  for values in (oracle.h, oracle.c, oracle.out))
            out, pooled = oracle.step(x, ids, links, features)
            if t >= split:
                expected_out += out
                expected_readout.append(pooled)
        dense.append(oracle)

    with torch.no_grad():
        results, state, states = walk(memory, steps, names)
    x, ids, counts, starts, edges = memory_inputs([env[split:] for env in steps], names)
    out, pooled, _ = memory(x, ids, counts, starts, states[split], edges if remember_edges else None)
    expected = torch.stack(expected_out) if expected_out else out.new_zeros(0, 4)
    stepped = [results[t][0][i] for i in range(num_envs) for t in range(split, num_steps)]
    assert_close = lambda a, b: torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert_close(out, expected)
    assert_close(torch.cat(stepped), expected.detach())
    assert_close(pooled, torch.stack(expected_readout))
    stepped = torch.stack([results[t][1] for t in range(split, num_steps)], 1).flatten(0, 1)
    assert_close(stepped, pooled.detach())

    weight = torch.randn_like(expected), torch.randn_like(pooled)
    wanted, grads = (torch.autograd.grad((a * weight[0]).sum() + (b * weight[1]).sum() + sum(
        0 * leaf.sum() for leaf in leaves), leaves) for a, b in (
            (expected, torch.stack(expected_readout)), (out, pooled)))
    for grad, want in zip(grads, wanted):
        assert_close(grad, want)

    for i, oracle in enumerate(dense):
        rows = slice(*state["ptr"][i:i + 2].tolist())
        seen = np.flatnonzero(oracle.mask)
        assert state["keys"][rows].tolist() == names[seen].tolist() and state["keys"].dtype == torch.int64
        for name in ("h", "c"):
            if len(seen):
                assert_close(state[name][rows], torch.stack([getattr(oracle, name)[k] for k in seen]).detach())
        if remember_edges:
            rows = slice(*state["edge_ptr"][i:i + 2].tolist())
            known = sorted(oracle.edges.items())
            assert state["edge_index"][:, rows].T.tolist() == [[names[u], names[v]] for (u, v), _ in known]
            assert state["edge_index"].dtype == torch.int64
            if known:
                assert_close(state["edge_attr"][rows], torch.stack([feature for _, feature in known]))


# ---- the kernel ----
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 25), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_kernel(lengths, seed):
    """R3: ragged sequences through the staircase equal a PackedSequence through nn.LSTM and a loop over single steps,
    gradients included."""
    torch.manual_seed(seed)
    lstm, lengths, H = torch.nn.LSTM(3, 4).double(), np.array(lengths), 4
    x = torch.randn(lengths.sum(), 3, dtype=torch.double, requires_grad=True)
    hx = [torch.randn(len(lengths), H, dtype=torch.double, requires_grad=True) for _ in "hc"]
    leaves = [x, *hx, *lstm.parameters()]
    events = np.random.default_rng(seed).permutation(len(x))
    sequences, loop = x[events].split(lengths.tolist()), []
    packed = lstm(torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False), tuple(v[None] for v in hx))[0]
    for sequence, h, c in zip(sequences, *hx):
        for row in sequence:
            h, c = cell(lstm, row, h, c)
            loop.append(h)
    packed = torch.cat(torch.nn.utils.rnn.unpack_sequence(packed))
    with patch.object(script, "CACHED", 100):
        cut = script.run_lstm(lstm, x, events, lengths, hx)[events]
    results = [script.run_lstm(lstm, x, events, lengths, hx)[events], cut,
               script.run_lstm(lstm, x, events, lengths, hx, detail=9)[events], packed, torch.stack(loop)]
    weight = torch.randn_like(results[0])
    grads = [torch.autograd.grad((value * weight).sum(), leaves, retain_graph=True) for value in results]
    for value, gradients in zip(results[1:], grads[1:]):
        torch.testing.assert_close(results[0], value, atol=1e-9, rtol=1e-9)
        for a, b in zip(grads[0], gradients):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_kernel_pads_little():
    """R3: rounding the lengths adds a sixth to their sum at most, and leaves at most 2 calls per octave."""
    calls = []

    class Spy(torch.nn.LSTM):
        def forward(self, x, hx):
            calls.append(x.shape[:2].numel())
            return super().forward(x, hx)

    lengths = np.arange(1, 129)
    x = torch.zeros(lengths.sum(), 2)
    script.run_lstm(Spy(2, 2), x, np.arange(len(x)), lengths, [torch.zeros(128, 2)] * 2)
    assert len(calls) <= 14 and len(x) <= sum(calls) <= 7 / 6 * len(x)


# ---- collection and training ----
class IdEnv(RandomEnv):
    """RandomEnv whose nodes (or set elements) have ids: a few numbers that come back, spread over int64."""

    def __init__(self, observation, action="discrete", head="flat", camera=False):
        super().__init__(observation, action, head)
        inner = self.observation_space
        self.inner = inner if isinstance(inner, spaces.Dict) else spaces.Dict(obs=inner)
        if camera:
            self.inner = spaces.Dict(camera=spaces.Box(0, 255, (8, 8, 1), np.uint8), gear=spaces.Discrete(3),
                                     **self.inner.spaces)
        ids = spaces.Sequence(spaces.Box(-2**63, 2**63 - 1, (), np.int64), stack=True)
        self.outer = spaces.Dict(node_ids=ids, **self.inner.spaces)
        self.observation_space = self.outer

    def observe(self):
        self.observation_space = self.inner
        obs = super().observe()
        self.observation_space = self.outer
        num = len(getattr(obs["obs"], "nodes", obs["obs"]))
        return obs | {"node_ids": 2**60 + self.np_random.permutation(max(num, 8))[:num]}


gym.register("Ids-v0", entry_point=IdEnv)
MEMORY = {"prev_action": True, "prev_reward": True}
CASES = [(kind, "discrete", "flat", {}) for kind in ("vector", "discrete", "image_hwc", "mixed")]
CASES += [("vector", action, "flat", MEMORY) for action in ("discrete", "multidiscrete", "bits", "box", "mixed")]
CASES += [("vector", "mixed", "flat", MEMORY | {"autoregressive": True}), ("vector", "discrete", "mask", MEMORY),
          ("graph", "", "avail_actions", MEMORY), ("graph_edges", "", "pair", MEMORY), ("set", "", "nodes", {})]
IDS = [("graph_edges", "discrete", "flat", {}), ("graph", "mixed", "flat", MEMORY | {"state_readout": "sum"}),
       ("set", "", "nodes", MEMORY), ("graph_edges", "", "nodes", MEMORY | {"remember_edges": True, "num_envs": 6}),
       ("graph_categories", "", "nodes", {"remember_edges": True, "norm_obs": True}),
       ("graph", "", "avail_actions", MEMORY), ("graph", "", "nodes", MEMORY | {"state_per_node": False}),
       ("graph", "", "pair", MEMORY | {"autoregressive": True, "remember_edges": True, "state_readout": "sum"}),
       ("graph_edges", "", "nodes", MEMORY | {"camera": True})]


def lively(agent):
    """The same agent with logits of the size of those that were learned, so that differences show."""
    with torch.no_grad():
        for name, parameter in agent.head.named_parameters():
            parameter.mul_(100 if name.endswith("weight") and not name.startswith("conditions") else 1)
    return agent


@pytest.mark.parametrize("with_ids, case", [(False, case) for case in CASES] + [(True, case) for case in IDS],
                         ids=lambda v: "-".join(["+".join(e) if isinstance(e, dict) else e for e in v]) if isinstance(
                             v, tuple) else "ids" if v else "one")
def test_collection_and_training_agree(with_ids, case, tmp_path, monkeypatch):
    """X2, R2, T2: before the first gradient step of each update the probability ratio is 1, for all observations, heads
    and inputs of the memory; main runs from environment to evaluation."""
    observation, action, head, flags = case
    logged, agent = [], script.Agent
    monkeypatch.setattr(script.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    monkeypatch.setattr(script, "Agent", lambda *args: lively(agent(*args)))
    flags = dict(flags)
    kwargs = {"observation": observation, "action": action, "head": head}
    kwargs |= {"camera": flags.pop("camera", False)} if with_ids else {}
    args = small_args(env_id="Ids-v0" if with_ids else "Random-v0", env_kwargs=kwargs, run_dir=str(tmp_path),
                      eval_episodes=2, **{"total_timesteps": 96} | flags)
    rows = script.main(args)
    assert len(logged) >= 2
    for scalars in logged:
        assert 0 <= scalars["debug/collection_mismatch"] < 1e-5
        assert all(np.isfinite(value) for name, value in scalars.items() if name != "losses/explained_variance")
    assert logged[0]["losses/approx_kl"] != 0 and [r["return"] for r in rows] == [r["length"] for r in rows]


def rollout_of(makers, seed=0, steps=None, agent=None, **kwargs):
    """(agent, actor, last step, rollout, args) of the second rollout in these envs."""
    args = small_args(num_envs=len(makers), **kwargs)
    envs = script.Envs(makers, args.action_head)
    torch.manual_seed(seed)
    agent = lively(script.Agent(envs.leaves, envs.action_space, args)) if agent is None else agent
    actor = script.Actor(agent, envs.leaves, len(makers), args, CPU)
    envs.reset(3)
    for _ in range(2):
        rollout = script.collect(actor, envs, args, lambda *episode: None)
    return agent, actor, envs.last_steps[0], rollout, args


def mismatch(agent, actor, rollout, args):
    """Largest |ratio - 1| that the first minibatch of an update without learning shows."""
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0, fused=True)
    args.num_minibatches = args.update_epochs = 1
    logs = script.update(agent, optimizer, actor, rollout, np.random.default_rng(0), args)
    return logs["debug/collection_mismatch"]


GRAPHS = [lambda: IdEnv("graph_edges", "", "nodes")] * 5
PLAIN = [RandomEnv] * 5


@pytest.mark.parametrize("makers, flags", [(PLAIN, MEMORY), (GRAPHS, MEMORY), (GRAPHS, {"remember_edges": True})],
                         ids=["one", "ids", "edges"])
def test_errors_that_the_ratio_finds(makers, flags, monkeypatch):
    """X2: memory that leaks over an episode's end while collecting, and a state that was stored one step late, show as
    a ratio that is not 1."""
    agent, actor, _, rollout, args = rollout_of(makers, **flags)
    assert rollout.inputs["starts"].any() and not rollout.inputs["starts"].all()
    assert mismatch(agent, actor, rollout, args) < 1e-5

    one_step = actor.storage.gather(np.arange(args.num_envs))
    first = [column[:args.num_envs] for column in (*rollout.inputs.values(), rollout.actions)]
    with torch.no_grad():
        actor.first_memory = agent(one_step, actor.first_memory, *first)[-1]
    assert mismatch(agent, actor, rollout, args) > 1e-3

    class Leaking(script.Agent):
        def forward(self, obs, state, starts, *rest, **kwargs):
            starts = starts if torch.is_grad_enabled() else torch.zeros_like(starts)
            return super().forward(obs, state, starts, *rest, **kwargs)

    monkeypatch.setattr(script, "Agent", Leaking)
    agent, actor, _, rollout, args = rollout_of(makers, **flags)
    assert mismatch(agent, actor, rollout, args) > 1e-3


def corridor_advantages(**kwargs):
    """(advantages of collect [N, T], and those from the values of each episode alone) in corridors with known ends."""
    T, rng = 12, np.random.default_rng(0)
    ends = [[(int(rng.integers(1, 8)), bool(rng.integers(2))) for _ in range(40)] for _ in range(4)]
    makers = [lambda ends=ends: Corridor(ends) for ends in ends]
    agent, _, _, rollout, args = rollout_of(makers, num_steps=T, gamma=0.9, gae_lambda=0.8, prev_reward=True, **kwargs)
    expected = []
    for episodes in ends:
        advantages, done = [], 0
        for length, truncated in episodes:
            num = min(length, 2 * T - done)
            obs = {"obs": torch.arange(num + 1.0)[:, None]}
            starts, rewards = torch.arange(num + 1) == 0, torch.arange(num + 1.0) + 1
            with torch.no_grad():
                values = agent(obs, agent.first_state(1), starts, rewards, torch.zeros(num + 1, 1).long())[3].tolist()
            if num == length and not truncated:
                values[-1] = 0.0
            deltas = [2.0 + k + args.gamma * values[k + 1] - values[k] for k in range(num)]
            bounds = [k for k in range(num) if done + k < T] and min(num, T - done)  # rollouts cut the sum
            for k in range(num):
                stop = bounds if bounds and k < bounds else num
                advantages.append(sum((args.gamma * args.gae_lambda) ** (j - k) * deltas[j] for j in range(k, stop)))
            done += num
            if done == 2 * T:
                break
        expected.append(advantages[T:])
    return rollout.advantages.view(T, -1).T, torch.tensor(expected)


def test_values_of_cut_off_episodes(monkeypatch):
    """X2: V of the final observation of a truncated episode, and of the one after the rollout, comes from the memory of
    their own episode; memory that leaks into the next episode while collecting and training alike shows here."""
    torch.testing.assert_close(*corridor_advantages(), atol=1e-4, rtol=1e-4)
    honest, never = script.Actor.act, np.zeros(4, bool)
    monkeypatch.setattr(script.Actor, "act", lambda self, step, **kwargs: honest(
        self, step._replace(terminated=never, truncated=never)))
    result, expected = corridor_advantages()
    assert (result - expected).abs().max() > 1e-3


@pytest.mark.parametrize("makers", [PLAIN, GRAPHS], ids=["one", "ids"])
def test_actor_equals_collection(makers):
    """T2: an Actor that only plays takes the steps that collection takes, and remembers the same."""
    agent, collected, last, rollout, args = rollout_of(makers, num_steps=10, **MEMORY)
    envs = script.Envs(makers)
    actor, step, actions = script.Actor(agent, envs.leaves, len(makers), args, CPU), envs.reset(3), []
    torch.manual_seed(0)
    lively(script.Agent(envs.leaves, envs.action_space, args))  # draws the random numbers that rollout_of drew
    with torch.no_grad():
        for _ in range(20):
            actions.append(actor.act(step)[0])
            step = envs.step(script.to_env_actions(envs.action_space, iter(actions[-1].numpy().T)))
    assert torch.equal(torch.cat(actions[10:]), rollout.actions) and (step.reward == last.reward).all()
    for name, value in collected.memory[0].items():
        assert value.dtype == actor.memory[0][name].dtype
        torch.testing.assert_close(value, actor.memory[0][name])


def test_state_keeps_its_types(tmp_path):
    """R1, R4: the state grows from nothing, forgets at an episode's end, and survives a checkpoint bit by bit: integers
    beyond 2**53 stay what they are, edge features keep their dtype."""
    makers = [lambda: IdEnv("graph_categories", "discrete")] * 5
    agent, actor, _, _, _ = rollout_of(makers, remember_edges=True, **MEMORY)
    (state,) = actor.memory
    empty = agent.first_state(5)
    assert {name: value.dtype for name, value in state.items()} == {name: value.dtype for name, value in empty.items()}
    for name in ("ptr", "keys", "edge_ptr", "edge_index", "edge_attr"):
        assert state[name].dtype == torch.int64
    assert len(empty["keys"]) == 0 < len(state["keys"]) and (state["keys"] >= 2**60).all()
    assert state["edge_index"].shape == (2, len(state["edge_attr"])) and (state["edge_index"] >= 2**60).all()
    script.save_checkpoint(str(tmp_path / "state.ckpt"), {"state": state})
    loaded = script.load_checkpoint(str(tmp_path / "state.ckpt"))["state"]
    assert all(torch.equal(value, loaded[name]) and value.dtype == loaded[name].dtype for name, value in state.items())
    part = script.select(state, np.array([3, 0]))
    owned = [slice(*state["ptr"][i:i + 2].tolist()) for i in (3, 0)]
    assert torch.equal(part["keys"], torch.cat([state["keys"][rows] for rows in owned]))
    owned = [slice(*state["edge_ptr"][i:i + 2].tolist()) for i in (3, 0)]
    assert torch.equal(part["edge_index"], torch.cat([state["edge_index"][:, rows] for rows in owned], 1))


def test_inputs_of_the_memory():
    """T2: the previous action and reward change the policy if their flag is set, except in an episode's first step."""
    for name, flag in (("action", "prev_action"), ("reward", "prev_reward")):
        for on in (False, True):
            agent, actor, _, _, _ = rollout_of(PLAIN, **{flag: on})
            (state,) = actor.memory
            obs, rewards = {"obs": torch.randn(5, 4)}, torch.ones(5)
            changed = state | {"action": state["action"] + 1} if name == "action" else state
            starts = torch.tensor([False] * 4 + [True])
            with torch.no_grad():
                a = agent.value(obs, state, starts, rewards)
                b = agent.value(obs, changed, starts, rewards + 1)
            assert (a != b).tolist() == [on] * 4 + [False]


def test_errors():
    """Wrong flags are sentences that say what to do."""
    with pytest.raises(ValueError, match="--num-minibatches 4 exceeds --num-envs 3"):
        script.main(small_args(num_minibatches=4))
    with pytest.raises(ValueError, match="--remember-edges needs a graph and the key 'node_ids'"):
        script.main(small_args(env_id="Random-v0", env_kwargs={"observation": "graph"}, remember_edges=True))


def trained(tmp_path, monkeypatch, argv):
    """(weights after main() with these words on the command line, its rows)"""
    agents, original = [], script.Agent
    monkeypatch.setattr(script, "Agent", lambda *args: agents.append(original(*args)) or agents[-1])
    rows = script.main(tyro.cli(script.Args, args=[*argv, "--run-dir", str(tmp_path), "--no-cuda"]))
    monkeypatch.setattr(script, "Agent", original)
    return {name: value.clone() for name, value in agents[-1].state_dict().items()}, rows


def test_command_line(tmp_path, monkeypatch):
    """R6, T2, X3: from the command line to the evaluation; worker processes change no bit of the weights, each flag of
    the memory changes them, and a saved model plays as it did."""
    argv = ["--env-id", "Ids-v0", "--env-kwargs", '{"observation": "graph_edges", "action": "", "head": "nodes"}',
            "--total-timesteps", "128", "--num-steps", "16", "--hidden-dims", "8", "--gnn-dim", "8",
            "--gnn-layers", "1", "--eval-episodes", "3", "--lstm-dim", "8"]
    first, rows = trained(tmp_path, monkeypatch, [*argv, "--save-model"])
    assert len(rows) == 3 and all(row["return"] == row["length"] for row in rows)
    again, same_rows = trained(tmp_path, monkeypatch, [*argv, "--num-workers", "2"])
    assert all(torch.equal(value, again[name]) for name, value in first.items()) and rows == same_rows
    (model,) = tmp_path.glob("*/model.pt")
    monkeypatch.setattr(script.Logger, "save_table", lambda *args: None)
    play = ["--total-timesteps", "0", "--load-model", str(model)]
    assert trained(tmp_path, monkeypatch, [*argv[:4], *argv[6:], *play])[1] == rows
    for flag in (["--prev-action"], ["--prev-reward"], ["--state-readout", "sum"], ["--remember-edges"],
                 ["--no-state-per-node"]):
        changed, _ = trained(tmp_path, monkeypatch, [*argv, *flag])
        assert any(name not in first or value.shape != first[name].shape or not torch.equal(value, first[name])
                   for name, value in changed.items())


LEARN = dict(env_id="CartPole-v1", mask_obs="1,3", norm_obs=True, num_envs=16, num_steps=64, hidden_dims=(64,),
             learning_rate=3e-3, ent_coef=0.002, vf_coef=0.002, eval_episodes=0, cuda=False)


def last_returns(module, tmp_path, monkeypatch, **kwargs):
    """Mean return of the last 50 episodes of training."""
    returns = []
    monkeypatch.setattr(module.Logger, "episode", lambda self, num_steps, env, ret, *rest: returns.append(ret))
    module.main(module.Args(run_dir=str(tmp_path), **LEARN | kwargs))
    return np.mean(returns[-50:])


def test_learns_without_velocities(tmp_path, monkeypatch):
    """T4: CartPole whose velocities are hidden is learned with memory and not without."""
    memory = dict(lstm_dim=64, prev_action=True)
    assert last_returns(script, tmp_path, monkeypatch, total_timesteps=40_000, **memory) > 150
    assert last_returns(ppo_graph, tmp_path, monkeypatch, total_timesteps=40_000) < 80


class Recall(gym.Env):
    """Six elements are shown and one of them is red; then twice any three of them, all of one colour; in the last step
    all six again, and reward is 1 for choosing the one that was red. Ids and orders are random."""

    observation_space = spaces.Dict(
        node_ids=spaces.Sequence(spaces.Box(-2**63, 2**63 - 1, (), np.int64), stack=True),
        things=spaces.Sequence(vector(2), stack=True),
        action_mask=spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True))
    action_space = spaces.Discrete(6)

    def observe(self):
        self.order = self.np_random.permutation(6)[:6 if self.t in (0, 3) else 3]
        features = np.zeros((len(self.order), 2), np.float32)
        features[:, 0], features[:, 1] = self.t == 0, (self.order == self.red) & (self.t == 0)
        return {"node_ids": self.names[self.order], "things": features, "action_mask": np.ones(len(features), np.int8)}

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


def test_each_node_has_its_own_memory(tmp_path):
    """R1, R2: what was seen of an element is remembered under its id; chance earns 1/6."""
    rows = script.main(script.Args(
        env_id="RecallElements-v0", total_timesteps=12_000, num_envs=16, num_steps=16, learning_rate=5e-3,
        hidden_dims=(16,), gnn_dim=16, lstm_dim=16, eval_episodes=100, cuda=False, run_dir=str(tmp_path)))
    assert np.mean([row["return"] for row in rows]) > 0.9
