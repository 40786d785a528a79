"""PPO that remembers each node: ppo_graph_mini.py with an LSTM state for every node that was seen.

    python cleanrl_graph/ppo_lstm_sparse_mini.py
    python cleanrl_graph/ppo_lstm_sparse_mini.py --env-id your_module:YourEnv-v0

An observation is a Dict {"graph": GraphInstance, "action_mask": [n], "node_ids": [n]}, as in
ppo_graph_mini.py. A node_id, an integer from 0 to 2**32 - 1, tells which node is the same at other
steps of the episode. The memory is a dict {key of a node: its state}, sparse and growing: a node
begins with zeros when it is first seen, and keeps its state while it is out of sight. To learn, the
LSTM runs over a whole rollout in one call, from the states that were kept when the rollout began:
each node is a sequence, and all sequences are packed.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), GAE (Schulman et al. 2015, arXiv:1506.02438),
GINE (Hu et al. 2020, arXiv:1905.12265), pointer networks (Vinyals et al. 2015, arXiv:1506.03134),
LSTM (Hochreiter and Schmidhuber 1997), stored states (R2D2, Kapturowski et al. 2019, ICLR).
"""

import copy
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.nn.utils.rnn import PackedSequence
from torch.utils.tensorboard import SummaryWriter
from torch_geometric.data import Batch
from torch_geometric.nn import GINConv, GINEConv
from torch_geometric.utils import scatter, softmax


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; environment i has seed + i"""
    cuda: bool = True
    """if toggled, cuda will be enabled by default"""
    env_id: str = "cleanrl_graph.envs:GraphExplore-v0"
    """the id of the environment; `module:Name-v0` imports the module first"""
    total_timesteps: int = 250000
    """total timesteps of the experiments"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizer"""
    num_envs: int = 16
    """the number of environments"""
    num_steps: int = 128
    """the number of steps to run in each environment per policy rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing for policy and value networks"""
    gamma: float = 0.99
    """the discount factor gamma"""
    gae_lambda: float = 0.95
    """the lambda for the general advantage estimation"""
    num_minibatches: int = 4
    """the number of mini-batches; each holds whole rollouts of some of the environments"""
    update_epochs: int = 4
    """the K epochs to update the policy"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = False
    """toggles whether or not to use a clipped loss for the value function"""
    ent_coef: float = 0.0
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value loss, which is divided by 1 + the variance of the returns"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    gnn_dim: int = 64
    """width of the node embeddings"""
    gnn_layers: int = 3
    """number of message passing layers"""
    lstm_dim: int = 128
    """width of a node's state"""


def features(space: gym.Space, arrays: list[np.ndarray]) -> torch.Tensor:
    """The rows of all arrays, [rows, F]: vectors, or categories as one-hot vectors."""
    rows = torch.from_numpy(np.concatenate([np.zeros((0, *space.shape)), *arrays]))
    if isinstance(space, gym.spaces.Discrete):
        return nn.functional.one_hot(rows.long() - space.start, space.n).float()
    return rows.float()


def collate(observations: list[dict], episodes: np.ndarray, space: gym.spaces.Graph) -> Batch:
    """B observations as one PyG Batch: the nodes of all graphs one after the other, unpadded.
    `episodes` [B] are the numbers of their episodes, over all environments."""
    graphs = [obs["graph"] for obs in observations]
    num_nodes = np.array([len(graph.nodes) for graph in graphs])
    ptr = np.append(0, num_nodes.cumsum())  # graph b has the nodes ptr[b]:ptr[b + 1]
    links = [np.zeros((0, 2), np.int64)]
    links += [g.edge_links + n for g, n in zip(graphs, ptr) if g.edge_links is not None]
    edges = [graph.edges for graph in graphs if graph.edges is not None]
    masks = [np.ravel(obs["action_mask"]) for obs in observations]
    ids = np.concatenate([np.ravel(obs["node_ids"]) for obs in observations]).astype(np.int64)
    assert np.all((0 <= ids) & (ids < 2**32)), f"node_ids are from 0 to 2**32 - 1, not {ids}"
    return Batch(
        x=features(space.node_space, [graph.nodes for graph in graphs]),
        edge_index=torch.from_numpy(np.concatenate(links)).t().contiguous(),  # [2, edges]
        edge_attr=features(space.edge_space, edges) if space.edge_space else None,
        mask=torch.from_numpy(np.concatenate(masks)).bool(),
        # [nodes]: the same number means the same node. Batch.to leaves a numpy array on the host
        node_keys=(episodes << 32).repeat(num_nodes) + ids,
        ptr=torch.from_numpy(ptr),
        batch=torch.arange(len(graphs)).repeat_interleave(torch.from_numpy(num_nodes)),
    )


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class SparseLSTM(nn.Module):
    """An LSTM whose input rows are steps of many sequences: rows with the same key are one."""

    def __init__(self, input_dim: int, dim: int):
        super().__init__()
        self.lstm = nn.LSTM(input_dim, dim)
        for name, param in self.lstm.named_parameters():
            for gate in param.split(dim):
                nn.init.orthogonal_(gate) if "weight" in name else nn.init.zeros_(gate)
        self.lstm.bias_hh_l0.data[dim : 2 * dim] = torch.linspace(0, 5, dim)  # of the forget gate

    def forward(self, x: torch.Tensor, keys: np.ndarray, memory: dict) -> tuple[torch.Tensor, dict]:
        """(h of each row [rows, dim], {key: state after its last row}). A state is [2, dim], zeros
        where the memory lacks the key. The rows of a key are in the order of time."""
        zeros = x.new_zeros(2, self.lstm.hidden_size)
        if len(keys) == 0:  # the last graph of an episode may have no nodes
            return zeros[:0], {}
        nodes, sequence, lengths = np.unique(keys, return_inverse=True, return_counts=True)
        order = np.argsort(sequence, kind="stable")  # rows, sequence after sequence
        position = np.arange(len(order)) - (lengths.cumsum() - lengths).repeat(lengths)  # 0, 1, ...
        # A PackedSequence has all rows of position 0, then of 1, ...; the longest sequence first
        longest = np.argsort(-lengths, kind="stable")
        rank = np.argsort(longest).repeat(lengths)
        rows = torch.from_numpy(order[np.lexsort((rank, position))]).to(x.device, non_blocking=True)
        packed = PackedSequence(x[rows], torch.from_numpy(np.bincount(position)))
        nodes = nodes[longest].tolist()
        state = torch.stack([memory.get(key, zeros) for key in nodes], 1)  # [2, sequences, dim]
        packed, (h, c) = self.lstm(packed, (state[:1], state[1:]))
        states = dict(zip(nodes, torch.cat([h, c]).unbind(1)))
        return torch.empty_like(packed.data).index_copy(0, rows, packed.data), states


class Agent(nn.Module):
    """A node with key k has the logit w . tanh(k + q) + k . q / sqrt(d) for the graph's query q."""

    def __init__(self, space: gym.spaces.Graph, args: Args):
        super().__init__()
        dim = args.gnn_dim
        self.embed = nn.Linear(gym.spaces.flatdim(space.node_space), dim)
        self.norms = nn.ModuleList()
        self.convs = nn.ModuleList()
        for _ in range(args.gnn_layers):
            self.norms.append(nn.LayerNorm(dim))
            net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
            if space.edge_space is None:
                self.convs.append(GINConv(net))
            else:
                self.convs.append(GINEConv(net, edge_dim=gym.spaces.flatdim(space.edge_space)))
        self.lstm_input = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU())
        self.lstm = SparseLSTM(dim, args.lstm_dim)
        width = dim + args.lstm_dim  # of a node: what is seen of it, and what is remembered
        self.critic = nn.Sequential(
            layer_init(nn.Linear(2 * width + 1, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(2 * width + 1, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, dim), std=0.01),
        )
        self.key = nn.Linear(width, dim)
        self.score = layer_init(nn.Linear(dim, 1), std=0.01)

    def encode(self, graphs: Batch, memory: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Embeddings of the nodes [nodes, width] and of the graphs [B, 2 * width + 1], and the
        states of these nodes."""
        edges = [graphs.edge_index]
        if graphs.edge_attr is not None:
            edges.append(graphs.edge_attr)
        h = self.embed(graphs.x)
        for norm, conv in zip(self.norms, self.convs):
            h = h + conv(norm(h), *edges).relu()
        remembered, states = self.lstm(self.lstm_input(h), graphs.node_keys, memory)
        h = torch.cat([h, remembered], 1)
        B = graphs.num_graphs  # a graph without nodes, as a last one may be, is not in batch
        mean = scatter(h, graphs.batch, dim_size=B, reduce="mean")
        largest = scatter(h, graphs.batch, dim_size=B, reduce="max")
        size = graphs.ptr.diff().log1p()[:, None]  # neither mean nor maximum shows it
        return h, torch.cat([mean, largest, size], 1), states

    @torch.no_grad()
    def get_value(self, graphs: Batch, memory: dict) -> torch.Tensor:
        _, pooled, _ = self.encode(graphs, memory)
        return self.critic(pooled).squeeze(1)

    def get_action_and_value(self, graphs: Batch, memory: dict, action=None, generator=None):
        """Action (an index within its graph), log-probability, entropy and value, [B] each, and the
        states of the nodes that were seen."""
        h, pooled, states = self.encode(graphs, memory)
        B = graphs.num_graphs
        key = self.key(h)  # [nodes, dim]
        query = self.actor(pooled)[graphs.batch]  # [nodes, dim]: that of the node's graph
        # additive attention + scaled dot product
        logits = self.score(torch.tanh(key + query)).squeeze(1)
        logits = logits + (key * query).sum(1) / key.shape[1] ** 0.5
        logits = logits.masked_fill(~graphs.mask, -1e9)
        probs = softmax(logits, graphs.batch, num_nodes=B)  # [nodes]: they sum to 1 in each graph
        logprobs = probs.clamp(min=1e-20).log()  # in the entropy 0 * -inf would be nan
        if action is None:  # the largest p / Exp(1) of a graph is a draw from p (Gumbel-max trick)
            noisy = probs / torch.empty_like(probs).exponential_(generator=generator)
            wins = noisy == scatter(noisy, graphs.batch, dim_size=B, reduce="max")[graphs.batch]
            index = torch.arange(len(h), device=h.device) - graphs.ptr[graphs.batch]
            action = scatter(index * wins, graphs.batch, dim_size=B, reduce="max")
        logprob = logprobs[graphs.ptr[:-1] + action]
        entropy = scatter(-probs * logprobs, graphs.batch, dim_size=B)
        return action, logprob, entropy, self.critic(pooled).squeeze(1), states


if __name__ == "__main__":
    args = tyro.cli(Args)
    batch_size = args.num_envs * args.num_steps
    assert args.num_minibatches <= args.num_envs
    num_iterations = max(1, args.total_timesteps // batch_size)
    run_name = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    writer.add_text("hyperparameters", str(vars(args)))
    random.seed(args.seed)
    np.random.seed(args.seed)
    rng = np.random.RandomState(args.seed)  # of the minibatches
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    # env_id's module may be in the current folder, beside this script, or in this script's package
    folder = sys.path[0]
    sys.path[0] = os.getcwd()
    sys.path += [folder, os.path.dirname(folder)]
    envs = [gym.make(args.env_id, disable_env_checker=True) for _ in range(args.num_envs)]
    envs = [gym.wrappers.RecordEpisodeStatistics(env) for env in envs]
    unseen = set(envs[0].observation_space) - {"graph", "action_mask", "node_ids"}
    if unseen:
        print("keys of the observation that the agent does not see:", *sorted(unseen))
    space = envs[0].observation_space["graph"]
    torch.manual_seed(args.seed)  # here, as environments may have drawn from torch's generator
    agent = Agent(space, args).to(device)
    generator = (torch.cuda.default_generators or [torch.default_generator])[0].clone_state()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(shape, device=device)
    rewards = torch.zeros(shape, device=device)
    dones = torch.zeros(shape, device=device)  # 1 where an episode ended with this step
    values = torch.zeros(shape, device=device)
    episodes = np.zeros(shape, np.int64)  # the number of each step's episode, over all environments
    global_step = 0
    start_time = time.time()
    returns = deque(maxlen=100)  # of the last episodes
    next_obs = [env.reset(seed=args.seed + i)[0] for i, env in enumerate(envs)]
    next_episode = np.arange(args.num_envs)
    memory = {}  # key of a node that was seen in a present episode -> its state, [2, lstm_dim]
    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        memory_at_start = dict(memory)
        obs = []  # step t of environment i is obs[t * num_envs + i]
        for step in range(args.num_steps):
            for o in next_obs:  # else any node would be chosen, and two could share a state
                assert np.any(o["action_mask"]), f"step {step} of a rollout allows no node: {o}"
                assert len(np.unique(o["node_ids"])) == len(o["node_ids"]), f"ids occur twice: {o}"
            obs += copy.deepcopy(next_obs)  # an environment may overwrite its arrays
            episodes[step] = next_episode
            with torch.no_grad():
                graphs = collate(next_obs, next_episode, space).to(device, non_blocking=True)
                outputs = agent.get_action_and_value(graphs, memory, generator=generator)
                action, logprob, _, value, states = outputs
            memory |= states
            actions[step] = action
            logprobs[step] = logprob
            values[step] = value
            for i, choice in enumerate(action.cpu().numpy()):
                next_obs[i], reward, terminated, truncated, info = envs[i].step(choice)
                global_step += 1
                rewards[step, i].fill_(float(reward))  # `[step, i] =` would wait for a GPU
                dones[step, i].fill_(float(terminated or truncated))
                if truncated and not terminated:  # bootstrap: a time limit is no end
                    graphs = collate([next_obs[i]], next_episode[i : i + 1], space).to(device)
                    rewards[step, i] += args.gamma * agent.get_value(graphs, memory)[0]
                if terminated or truncated:
                    episode = info["episode"]
                    returns.append(episode["r"])
                    writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                    next_obs[i], _ = envs[i].reset()
                    next_episode[i] = next_episode.max() + 1

        # Generalised advantage estimation
        next_value = agent.get_value(collate(next_obs, next_episode, space).to(device), memory)
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(args.num_steps)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - values[t]
            lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            advantages[t] = lastgaelam
            next_value = values[t]

        flatinds = np.arange(batch_size).reshape(shape)
        b_episodes = episodes.flatten()
        b_actions = actions.flatten()
        b_logprobs = logprobs.flatten()
        b_advantages = advantages.flatten()
        b_values = values.flatten()
        b_returns = b_advantages + b_values
        vf_coef = args.vf_coef / (1 + b_returns.var())
        clipfracs = []
        for _ in range(args.update_epochs):
            for mb_envs in np.array_split(rng.permutation(args.num_envs), args.num_minibatches):
                mb_inds = flatinds[:, mb_envs].ravel()  # step after step, as sequences need it
                mb = torch.from_numpy(mb_inds).to(device, non_blocking=True)
                graphs = collate([obs[k] for k in mb_inds], b_episodes[mb_inds], space)
                graphs = graphs.to(device, non_blocking=True)
                outputs = agent.get_action_and_value(graphs, memory_at_start, b_actions[mb])
                _, newlogprob, entropy, newvalue, _ = outputs
                logratio = newlogprob - b_logprobs[mb]
                ratio = logratio.exp()
                if not clipfracs:  # no update yet: 0 up to rounding, or acting saw other inputs
                    mismatch = (ratio - 1).abs().max()
                clipfracs.append(((ratio - 1).abs() > args.clip_coef).float().mean())
                mb_advantages = b_advantages[mb]
                mb_advantages = mb_advantages - mb_advantages.mean()
                if len(mb) > 1:
                    mb_advantages = mb_advantages / (mb_advantages.std() + 1e-8)
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                v_loss = (newvalue - b_returns[mb]) ** 2
                if args.clip_vloss:
                    change = (newvalue - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss, (b_values[mb] + change - b_returns[mb]) ** 2)
                v_loss = 0.5 * v_loss.mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        sps = int(global_step / (time.time() - start_time))
        approx_kl = (ratio - 1 - logratio).mean()
        clipfrac = torch.stack(clipfracs).mean()
        explained_var = 1 - b_advantages.var() / b_returns.var()
        writer.add_scalar("charts/SPS", sps, global_step)
        # What ended is forgotten. A copy, as a state is a view of all those that were new with it
        present = set(next_episode.tolist())
        memory = {key: state.clone() for key, state in memory.items() if (key >> 32) in present}
        writer.add_scalar("charts/nodes_remembered", len(memory), global_step)
        writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
        writer.add_scalar("losses/policy_loss", pg_loss.item(), global_step)
        writer.add_scalar("losses/entropy", entropy_loss.item(), global_step)
        writer.add_scalar("losses/approx_kl", approx_kl.item(), global_step)
        writer.add_scalar("losses/clipfrac", clipfrac.item(), global_step)
        writer.add_scalar("losses/explained_variance", explained_var.item(), global_step)
        writer.add_scalar("debug/collection_mismatch", mismatch.item(), global_step)
        mean = np.mean(returns) if returns else float("nan")
        print(f"global_step={global_step}, mean of {len(returns)} returns={mean:.3f}, SPS={sps}")

    torch.save(agent.state_dict(), f"runs/{run_name}/weights.pt")
    writer.close()
