"""Whole updates of the four short scripts, from what the environments returned to gradients, are
those of references in float64 that are written from the papers: step after step and node after
node, without batches, packing, masks or tables."""

import copy
from types import SimpleNamespace

import pytest
import torch
from minis import GRAPHS, SCRIPTS, VECTORS, optimizer_steps
from torch.nn.functional import one_hot

T = 6  # steps of a rollout: with `cut` 6 the first environment is truncated at its last one


# ---- Networks: (logits of the options, value, state afterwards) of one step ----
class Graphs:
    """A pointer network on a GIN or GINE. There is no state."""

    def __init__(self, agent, args, rollouts_before):
        self.agent = agent

    def begin(self):
        return {}

    def features(self, rows):
        return torch.as_tensor(rows).double()

    def nodes(self, graph):
        """Embeddings of the nodes, in a list."""
        agent = self.agent
        h = [agent.embed(self.features(x)) for x in graph.nodes]
        links = [] if graph.edge_links is None else graph.edge_links
        edges = [None] * len(links) if graph.edges is None else graph.edges
        for norm, conv in zip(agent.norms, agent.convs):
            normed = [norm(x) for x in h]
            total = [x for x in normed]
            for (first, second), edge in zip(links, edges):
                message = normed[first]
                if edge is not None:
                    if edge.ndim == 0:  # kinds -1, 0, 1
                        edge = one_hot(torch.tensor(int(edge) + 1), 3)
                    message = (message + conv.lin(self.features(edge))).relu()
                total[second] = total[second] + message
            h = [x + conv.nn(y).relu() for x, y in zip(h, total)]
        return h

    def remember(self, h, ids, state):
        return h, state

    def __call__(self, obs, last, state):
        agent = self.agent
        h, state = self.remember(self.nodes(obs["graph"]), obs["node_ids"], state)
        n = len(h)
        if n == 0:
            width = (agent.critic[0].in_features - 1) // 2
            return None, agent.critic(torch.zeros(2 * width + 1).double())[0], state
        h = torch.stack(h)
        size = torch.tensor([n + 1.0]).double().log()
        pooled = torch.cat([h.mean(0), h.max(0).values, size])
        query = agent.actor(pooled)
        logits = []
        for i in range(n):
            if obs["action_mask"][i]:
                key = agent.key(h[i])
                logit = agent.score(torch.tanh(key + query))[0] + key @ query / len(key) ** 0.5
            else:
                logit = torch.tensor(-torch.inf).double()
            logits.append(logit)
        return torch.stack(logits), agent.critic(pooled)[0], state


class SparseLSTM(Graphs):
    """The same with an LSTM per node. The state is {id: (h, c)}."""

    def remember(self, h, ids, state):
        _, _, _, lstm_input, lstm, *_ = self.agent.children()
        cell = lstm.lstm
        state = dict(state)
        out = []
        for x, node in zip(h, ids.tolist()):
            zeros = torch.zeros(cell.hidden_size).double()
            before, c = state.get(node, (zeros, zeros))
            gates = cell.weight_ih_l0 @ lstm_input(x) + cell.bias_ih_l0
            gates = gates + cell.weight_hh_l0 @ before + cell.bias_hh_l0
            i, f, g, o = gates.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            state[node] = (o.sigmoid() * c.tanh(), c)
            out.append(torch.cat([x, state[node][0]]))
        return out, state


class Views:
    """Observations and last actions of the last steps. The state has all those of the episode."""

    def __init__(self, agent, args, rollouts_before):
        self.agent, self.args = agent, args
        self.mean, self.var = torch.zeros(4).double(), torch.ones(4).double()
        if rollouts_before:  # the mean of all rollouts' means and variances
            obs = [
                torch.stack([torch.as_tensor(step.obs).double().flatten() for step in rollout])
                for rollout in rollouts_before
            ]
            self.mean = torch.stack([o.mean(0) for o in obs]).mean(0)
            self.var = torch.stack([o.var(0) for o in obs]).mean(0)

    def begin(self):
        return {"seen": []}

    def inputs(self, obs, last):
        one_of = torch.zeros(3).double()
        if last is not None:
            one_of[last] = 1
        obs = torch.as_tensor(obs).double().flatten()
        obs = ((obs - self.mean) / (self.var + 1e-5).sqrt()).clamp(-10, 10)
        return torch.cat([obs, one_of])

    def __call__(self, obs, last, state):
        seen = [*state["seen"], (obs, last)]  # normalised as it is now, those before, too
        inputs = [self.inputs(*pair) for pair in seen]
        num = self.args["num_views"]
        view = torch.cat([*[torch.zeros_like(inputs[0])] * num, *inputs][-num:])
        return self.agent.actor(view), self.agent.critic(view)[0], {"seen": seen}


class GTrXL(Views):
    """The state has the inputs of each layer at all steps of the episode."""

    def begin(self):
        return {"layers": [[] for _ in self.agent.gtrxl.layers]}

    def gate(self, gate, x, y):
        """Section 3.2 of the paper, equations 8 and 9 of its GRU."""
        dim = len(x)
        w_r, w_z, w_g = gate.y.weight.split(dim)
        u_r, u_z = gate.x.weight.split(dim)
        r = (w_r @ y + u_r @ x).sigmoid()
        z = (w_z @ y + u_z @ x - gate.bias).sigmoid()
        return (1 - z) * x + z * (w_g @ y + gate.rx.weight @ (r * x)).tanh()

    def distance(self, d, dim):
        angles = torch.tensor([d / 10000 ** (i / dim) for i in range(0, dim, 2)]).double()
        return torch.cat([angles.sin(), angles.cos()])

    def __call__(self, obs, last, state):
        agent = self.agent
        inputs = self.inputs(obs, last)
        x = agent.token(inputs)
        after = []
        for layer, before in zip(agent.gtrxl.layers, state["layers"]):
            after.append([*before, x])
            steps = after[-1][-self.args["memory_length"] - 1 :]
            heads = layer.num_heads
            bias_u, bias_v = layer.parameters(recurse=False)
            q = layer.q(layer.norm(x)).view(heads, -1)
            logits, found = [], []
            for j, other in enumerate(steps):
                h = layer.norm(other)
                r = layer.r(self.distance(len(steps) - 1 - j, len(x))).view(heads, -1)
                k = layer.k(h).view(heads, -1)
                of_pair = (q + bias_u) * k + (q + bias_v) * r
                logits.append(of_pair.sum(1) / q.shape[1] ** 0.5)
                found.append(layer.v(h).view(heads, -1))
            weights = torch.stack(logits).softmax(0)[..., None]  # [steps, heads, 1]
            y = layer.out((weights * torch.stack(found)).sum(0).flatten()).relu()
            x = self.gate(layer.gate_attention, x, y)
            x = self.gate(layer.gate_mlp, x, layer.mlp(x).relu())
        features = torch.cat([inputs, x])
        return agent.actor(features), agent.critic(features)[0], {"layers": after}


NETWORKS = {
    "ppo_graph_mini": Graphs,
    "ppo_lstm_sparse_mini": SparseLSTM,
    "ppo_gtrxl_mini": GTrXL,
    "ppo_framestack_mini": Views,
}


# ---- PPO ----
def detached(state):
    if torch.is_tensor(state):
        return state.detach()
    if isinstance(state, dict):
        return {key: detached(value) for key, value in state.items()}
    return type(state)(map(detached, state)) if isinstance(state, (list, tuple)) else state


def unrolled(net, state, steps):
    """What a network says of an environment's steps of one rollout, from the state that was kept
    when it began: lists with an element per step, and the state afterwards."""
    found = SimpleNamespace(logprobs=[], entropies=[], values=[], next_values=[])
    last = None if steps[0].begins else state["last"]
    state = None if steps[0].begins else state["memory"]
    for step in steps:
        if step.begins:
            last, state = None, net.begin()
        logits, value, state = net(step.obs, last, state)
        last = step.action
        logprobs = logits - logits.exp().sum().log()
        allowed = logprobs.isfinite()
        found.logprobs.append(logprobs[step.action])
        found.entropies.append(-(logprobs[allowed].exp() * logprobs[allowed]).sum())
        found.values.append(value)
        _, next_value, _ = net(step.next_obs, last, state)  # of the same episode
        found.next_values.append(next_value)
    return found, {"memory": detached(state), "last": last}


def advantages_of(steps, values, next_values, gamma, gae_lambda):
    """Equation 16 of GAE: the sum of (gamma lambda)^l delta, to the end of the episode."""
    deltas = []
    for step, value, next_value in zip(steps, values, next_values):
        follows = 0.0 if step.terminated else next_value
        deltas.append(step.reward + gamma * follows - value)
    found = []
    for t in range(len(steps)):
        total, factor = 0.0, 1.0
        for k in range(t, len(steps)):
            total = total + factor * deltas[k]
            if steps[k].terminated or steps[k].truncated:
                break
            factor *= gamma * gae_lambda
        found.append(total)
    return found


def flat(lists):
    """Lists per environment as one tensor: that of step t and environment i is [t * N + i]."""
    return torch.stack([x for row in zip(*lists) for x in row])


def close(found, expected, what, atol=2e-5):
    message = lambda text: f"{what}: {text}"
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=atol, msg=message)


def check(name, updates, **flags):
    """Compares each step of the optimizer; returns all steps of the environments."""
    flags |= {"total_timesteps": updates * T * flags["num_envs"], "num_steps": T}
    args = vars(SCRIPTS[name].Args()) | flags
    seen, steps = optimizer_steps(SCRIPTS[name], **flags)
    per_update = args["num_minibatches"] * args["update_epochs"]
    assert len(seen) == updates * per_update
    assert {len(each) for each in steps} == {updates * T}
    states = [None] * len(steps)
    rollouts = []
    for update in range(updates):
        now = [each[update * T : (update + 1) * T] for each in steps]
        of_update = seen[update * per_update : (update + 1) * per_update]
        indices = torch.cat([snap.mb for snap in of_update])
        assert torch.equal(
            indices.sort().values,
            torch.arange(T * len(steps)).repeat_interleave(args["update_epochs"]),
        )
        for k, snap in enumerate(of_update):
            agent = copy.deepcopy(snap.agent).double()
            net = NETWORKS[name](agent, args, rollouts)
            pairs = [unrolled(net, state, each) for state, each in zip(states, now)]
            found = [pair[0] for pair in pairs]
            new = SimpleNamespace(
                logprobs=flat([each.logprobs for each in found]),
                values=flat([each.values for each in found]),
                entropies=flat([each.entropies for each in found]),
            )
            if k == 0:  # with the weights of the rollout
                states_after = [pair[1] for pair in pairs]
                old = SimpleNamespace(logprobs=new.logprobs.detach(), values=new.values.detach())
                advantages = flat(
                    [
                        advantages_of(
                            each,
                            detached(f.values),
                            detached(f.next_values),
                            args["gamma"],
                            args["gae_lambda"],
                        )
                        for each, f in zip(now, found)
                    ]
                )
                returns = advantages + old.values
                close(snap.logprobs.flatten(), old.logprobs, "logprobs")
                close(snap.values.flatten(), old.values, "values")
                close(snap.advantages.flatten(), advantages, "advantages", atol=1e-4)
                assert snap.mismatch <= 1e-5
            losses(snap, agent, new, old, advantages, returns, args)
            fraction = 1 - update / updates
            assert snap.lr == pytest.approx(fraction * args["learning_rate"])
        states = states_after
        rollouts.append([step for each in now for step in each])
    return steps, seen


def losses(snap, agent, new, old, advantages, returns, args):
    """Equations 7 and 9 of PPO for a minibatch, and their gradients."""
    mb = snap.mb
    close(snap.newlogprob, new.logprobs[mb].detach(), "newlogprob")
    close(snap.newvalue, new.values[mb].detach(), "newvalue")
    close(snap.entropy, new.entropies[mb].detach(), "entropy")
    chosen = advantages[mb]
    if len(mb) > 1:
        chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
    clip = args["clip_coef"]
    policy, value = [], []
    for k, at in enumerate(mb):
        ratio = (new.logprobs[at] - old.logprobs[at]).exp()
        policy.append(-torch.min(ratio * chosen[k], ratio.clamp(1 - clip, 1 + clip) * chosen[k]))
        error = (new.values[at] - returns[at]) ** 2
        if args["clip_vloss"]:
            clipped = old.values[at] + (new.values[at] - old.values[at]).clamp(-clip, clip)
            error = torch.max(error, (clipped - returns[at]) ** 2)
        value.append(0.5 * error)
    pg_loss, v_loss = torch.stack(policy).mean(), torch.stack(value).mean()
    entropy = new.entropies[mb].mean()
    v_coef = args["vf_coef"] / (1 + returns.var())
    loss = pg_loss - args["ent_coef"] * entropy + v_coef * v_loss
    for name, expected in dict(
        pg_loss=pg_loss, v_loss=v_loss, entropy_loss=entropy, loss=loss
    ).items():
        close(getattr(snap, name), expected.detach(), name, atol=1e-4)
    names, params = zip(*agent.named_parameters())
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    assert {n for n, g in zip(names, grads) if g is not None} == set(snap.grads)
    norm = torch.stack([(g**2).sum() for g in grads if g is not None]).sum().sqrt()
    scale = (args["max_grad_norm"] / (norm + 1e-6)).clamp(max=1)
    for name, grad in zip(names, grads):
        if grad is not None:
            close(snap.grads[name], grad * scale, f"gradient of {name}", atol=1e-4)


SMALL = {
    "ppo_graph_mini": {"gnn_dim": 4, "gnn_layers": 2},
    "ppo_lstm_sparse_mini": {"gnn_dim": 4, "gnn_layers": 2, "lstm_dim": 3},
    "ppo_gtrxl_mini": {"dim": 4, "num_heads": 2, "num_layers": 2, "memory_length": 3},
    "ppo_framestack_mini": {"hidden_dim": 5, "num_views": 4},
}
SMALL["ppo_gtrxl_mini"]["hidden_dim"] = 5
COMMON = {"learning_rate": 0.02, "gamma": 0.9, "gae_lambda": 0.8, "ent_coef": 0.01}
CASES = {
    "two minibatches": {"num_envs": 4, "num_minibatches": 2, "update_epochs": 1},
    "clipped": {"num_envs": 2, "num_minibatches": 1, "update_epochs": 2, "clip_coef": 0.01}
    | {"clip_vloss": True, "learning_rate": 0.1, "max_grad_norm": 0.2},
    "one environment": {"num_envs": 1, "num_minibatches": 1, "update_epochs": 1},
}


def compare(name, env_id, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = COMMON | SMALL[name] | {"env_id": env_id, "max_grad_norm": 1e9} | CASES[case]
    steps, seen = check(name, 3 if case == "two minibatches" else 2, **flags)
    everything = [step for each in steps for step in each]
    if case == "clipped":
        mb = seen[1].mb
        ratio = (seen[1].newlogprob - seen[1].logprobs.flatten()[mb]).exp()
        change = (seen[1].newvalue - seen[1].values.flatten()[mb]).abs()
        assert ((ratio - 1).abs() > 0.01).any() and (change > 0.01).any()
    assert any(step.terminated for step in everything)
    assert steps[0][T - 1].truncated and steps[0][2 * T - 1].truncated  # a rollout's last step
    if case == "two minibatches":  # the rollout's border is in the middle of an episode
        assert any(not each[k].begins for each in steps for k in (T, 2 * T))
    return everything


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name, case, tmp_path, monkeypatch):
    """Episodes that are longer and shorter than what is seen, over the rollout's border."""
    compare(name, "MiniVectors-cut-v0", case, tmp_path, monkeypatch)


@pytest.mark.parametrize("edges", ["none", "kinds"])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name, edges, tmp_path, monkeypatch):
    """Graphs without edges, and without nodes at a time limit; nodes that come back."""
    env_id = f"MiniGraphs-{edges}-v0"
    steps = compare(name, env_id, "two minibatches", tmp_path, monkeypatch)
    limits = [step for step in steps if step.truncated]
    assert any(len(step.next_obs["graph"].nodes) == 0 for step in limits)
    assert any(step.obs["graph"].edge_links is None for step in steps)
    assert any((step.obs["node_ids"] == 2**32 - 1).any() for step in steps)


@pytest.mark.parametrize("case", ["clipped", "one environment"])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_otherwise(name, case, tmp_path, monkeypatch):
    """The losses are clipped, and so are gradients; there is one environment."""
    compare(name, "MiniGraphs-vectors-v0", case, tmp_path, monkeypatch)
