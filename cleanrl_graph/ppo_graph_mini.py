"""PPO that chooses a node of a graph: CleanRL's ppo.py for graphs of any size.

    python cleanrl_graph/ppo_graph_mini.py
    python cleanrl_graph/ppo_graph_mini.py --env-id your_module:YourEnv-v0 --gae-lambda 0.95

An observation is a Dict {"graph": GraphInstance, "action_mask": [n]} for n nodes. Each node has a
vector or category, each edge may have one, and sends messages from its first to its second node.
The action is the index of a node with mask 1. Nothing is padded: the rows of all graphs stand one
after the other, and a minibatch is a selection of these rows.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), GAE (Schulman et al. 2015, arXiv:1506.02438),
GINE (Hu et al. 2020, arXiv:1905.12265), pointer networks (Vinyals et al. 2015, arXiv:1506.03134).
"""

import copy
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
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
    env_id: str = "cleanrl_graph.envs:PoissonGraph-v0"
    """the id of the environment; `module:Name-v0` imports the module first"""
    total_timesteps: int = 30000
    """total timesteps of the experiments"""
    learning_rate: float = 2e-3
    """the learning rate of the optimizer"""
    num_envs: int = 8
    """the number of environments"""
    num_steps: int = 128
    """the number of steps to run in each environment per policy rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing for policy and value networks"""
    gamma: float = 0.99
    """the discount factor gamma"""
    gae_lambda: float = 0.5
    """the lambda for the general advantage estimation; 0.95 if rewards come late, not at once"""
    num_minibatches: int = 8
    """the number of mini-batches"""
    update_epochs: int = 4
    """the K epochs to update the policy"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggles whether or not to use a clipped loss for the value function"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value loss, which is divided by 1 + the variance of the returns"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    gnn_dim: int = 64
    """width of the node embeddings"""
    gnn_layers: int = 3
    """number of message passing layers"""


class Ragged(NamedTuple):
    """Any number of rows per observation, without padding: those of all, one after the other."""

    rows: torch.Tensor  # [rows of all, ...]
    num: np.ndarray  # [B]: how many of them each observation has


def ragged(arrays: list[np.ndarray]) -> Ragged:
    return Ragged(torch.from_numpy(np.concatenate(arrays)), np.array([len(a) for a in arrays]))


def select(all_rows: Ragged, idx: np.ndarray) -> Ragged:
    """The rows of the observations idx, in their order: where num is [3, 1, 2], those of [2, 0] are
    [4, 5, 0, 1, 2]."""
    num = all_rows.num[idx]
    first = (all_rows.num.cumsum() - all_rows.num)[idx]  # row of each of them
    within = np.arange(num.sum()) - (num.cumsum() - num).repeat(num)  # 0, 1, ... in each
    return Ragged(all_rows.rows[first.repeat(num) + within], num)


def collate(observations: list[dict], space: gym.spaces.Graph) -> dict[str, Ragged]:
    """B observations. Links are local to their graph, so any graphs can be selected."""
    graphs = [obs["graph"] for obs in observations]
    no_links = np.zeros((0, 2), np.int64)
    batch = {
        "nodes": ragged([graph.nodes for graph in graphs]),
        "mask": ragged([np.ravel(obs["action_mask"]) for obs in observations]),
        "links": ragged([no_links if g.edge_links is None else g.edge_links for g in graphs]),
    }
    if space.edge_space is not None:
        no_edges = np.zeros((0, *space.edge_space.shape), space.edge_space.dtype)
        batch["edges"] = ragged([no_edges if g.edges is None else g.edges for g in graphs])
    return batch


def features(space: gym.Space, rows: torch.Tensor) -> torch.Tensor:
    """Vectors as they are, categories as one-hot vectors: [rows, F]."""
    if isinstance(space, gym.spaces.Discrete):
        return nn.functional.one_hot(rows.long() - space.start, space.n).float()
    return rows.float()


def to_batch(obs: dict[str, Ragged], space: gym.spaces.Graph, device: torch.device) -> Batch:
    """As PyG's layers take them: links count the nodes of the whole batch."""
    num_nodes = torch.from_numpy(obs["nodes"].num)
    ptr = nn.functional.pad(num_nodes.cumsum(0), (1, 0))  # graph b has the nodes ptr[b]:ptr[b + 1]
    first_node = ptr[:-1].repeat_interleave(torch.from_numpy(obs["links"].num))  # [edges]
    edges = features(space.edge_space, obs["edges"].rows) if "edges" in obs else None
    return Batch(
        x=features(space.node_space, obs["nodes"].rows),
        edge_index=(obs["links"].rows + first_node[:, None]).t().contiguous(),  # [2, edges]
        edge_attr=edges,
        mask=obs["mask"].rows.bool(),
        ptr=ptr,
        batch=torch.arange(len(num_nodes)).repeat_interleave(num_nodes),  # [nodes]: its graph
    ).to(device, non_blocking=True)


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


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
        self.critic = nn.Sequential(
            layer_init(nn.Linear(2 * dim + 1, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(2 * dim + 1, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, dim), std=0.01),
        )
        self.key = nn.Linear(dim, dim)
        self.score = layer_init(nn.Linear(dim, 1), std=0.01)

    def encode(self, graphs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the nodes [nodes, dim] and of the graphs [B, 2 * dim + 1]."""
        edges = [graphs.edge_index]
        if graphs.edge_attr is not None:
            edges.append(graphs.edge_attr)
        h = self.embed(graphs.x)
        for norm, conv in zip(self.norms, self.convs):
            h = h + conv(norm(h), *edges).relu()
        B = graphs.num_graphs  # a graph without nodes, as a last one may be, is not in batch
        mean = scatter(h, graphs.batch, dim_size=B, reduce="mean")
        largest = scatter(h, graphs.batch, dim_size=B, reduce="max")
        size = graphs.ptr.diff().log1p()[:, None]  # neither mean nor maximum shows it
        return h, torch.cat([mean, largest, size], 1)

    @torch.no_grad()
    def get_value(self, graphs: Batch) -> torch.Tensor:
        _, pooled = self.encode(graphs)
        return self.critic(pooled).squeeze(1)

    def get_action_and_value(self, graphs: Batch, action=None, generator=None):
        """Action (an index within its graph), log-probability, entropy and value, [B] each."""
        h, pooled = self.encode(graphs)
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
        return action, logprob, entropy, self.critic(pooled).squeeze(1)


if __name__ == "__main__":
    args = tyro.cli(Args)
    batch_size = args.num_envs * args.num_steps
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
    unseen = set(envs[0].observation_space) - {"graph", "action_mask"}
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
    global_step = 0
    start_time = time.time()
    returns = deque(maxlen=100)  # of the last episodes
    next_obs = [env.reset(seed=args.seed + i)[0] for i, env in enumerate(envs)]
    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        obs = []  # step t of environment i is obs[t * num_envs + i]
        for step in range(args.num_steps):
            for o in next_obs:  # else any node would be chosen
                assert np.any(o["action_mask"]), f"step {step} of a rollout allows no node: {o}"
            obs += copy.deepcopy(next_obs)  # an environment may overwrite its arrays
            with torch.no_grad():
                graphs = to_batch(collate(next_obs, space), space, device)
                action, logprob, _, value = agent.get_action_and_value(graphs, generator=generator)
            actions[step] = action
            logprobs[step] = logprob
            values[step] = value
            for i, choice in enumerate(action.cpu().numpy()):
                next_obs[i], reward, terminated, truncated, info = envs[i].step(choice)
                global_step += 1
                rewards[step, i].fill_(float(reward))  # `[step, i] =` would wait for a GPU
                dones[step, i].fill_(float(terminated or truncated))
                if truncated and not terminated:  # bootstrap: a time limit is no end
                    graphs = to_batch(collate([next_obs[i]], space), space, device)
                    rewards[step, i] += args.gamma * agent.get_value(graphs)[0]
                if terminated or truncated:
                    episode = info["episode"]
                    returns.append(episode["r"])
                    writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                    next_obs[i], _ = envs[i].reset()

        # Generalised advantage estimation
        next_value = agent.get_value(to_batch(collate(next_obs, space), space, device))
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(args.num_steps)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - values[t]
            lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            advantages[t] = lastgaelam
            next_value = values[t]

        b_obs = collate(obs, space)
        b_actions = actions.flatten()
        b_logprobs = logprobs.flatten()
        b_advantages = advantages.flatten()
        b_values = values.flatten()
        b_returns = b_advantages + b_values
        vf_coef = args.vf_coef / (1 + b_returns.var())
        clipfracs = []
        for _ in range(args.update_epochs):
            b_inds = rng.permutation(batch_size)
            for mb_inds in np.array_split(b_inds, args.num_minibatches):
                mb = torch.from_numpy(mb_inds).to(device, non_blocking=True)
                mb_obs = {name: select(rows, mb_inds) for name, rows in b_obs.items()}
                graphs = to_batch(mb_obs, space, device)
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(graphs, b_actions[mb])
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
