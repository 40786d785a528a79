"""PPO that chooses a node of a graph: CleanRL's ppo.py for graphs of any size.

    python cleanrl_graph/ppo_graph_mini.py
    python cleanrl_graph/ppo_graph_mini.py --env-id your_module:YourEnv-v0 --gae-lambda 0.95

An observation is {"graph": GraphInstance, "action_mask": [n]}; other keys are not seen. Each node
has a vector or category, each edge may have one; the action is the number of a node with mask 1.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), GAE (Schulman et al. 2015, arXiv:1506.02438),
GINE (Hu et al. 2020, arXiv:1905.12265), pointer networks (Vinyals et al. 2015, arXiv:1506.03134).
"""

import copy
import os
import random
import sys
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from torch_geometric.data import Batch
from torch_geometric.nn import GINConv, GINEConv
from torch_geometric.utils import scatter, softmax, to_dense_batch


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
    num_minibatches: int = 4
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
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    gnn_dim: int = 64
    """width of the node embeddings"""
    gnn_layers: int = 3
    """number of message passing layers"""


def features(space: gym.Space, arrays: list[np.ndarray]) -> torch.Tensor:
    """The rows of all arrays, [rows, F]: vectors, or categories as one-hot vectors."""
    rows = torch.from_numpy(np.concatenate([np.zeros((0, *space.shape)), *arrays]))
    if isinstance(space, gym.spaces.Discrete):
        return nn.functional.one_hot(rows.long() - space.start, space.n).float()
    return rows.float()


def collate(observations: list[dict], space: gym.spaces.Graph) -> Batch:
    """B observations as one PyG Batch: the nodes of all graphs one after the other, unpadded."""
    graphs = [obs["graph"] for obs in observations]
    masks = [obs["action_mask"] for obs in observations]
    nodes = [graph.nodes for graph in graphs]
    edges = [graph.edges for graph in graphs if graph.edges is not None]
    num_nodes = np.array([len(rows) for rows in nodes])
    ptr = np.append(0, num_nodes.cumsum())  # [B + 1]: graph b has the nodes ptr[b]:ptr[b + 1]
    links = [np.zeros((0, 2), np.int64)]
    for graph, first_node in zip(graphs, ptr):
        if graph.edge_links is not None:  # None: there are no edges
            links.append(graph.edge_links + first_node)
    batch = np.arange(len(graphs)).repeat(num_nodes)  # [nodes]: the graph of each node
    return Batch(
        x=features(space.node_space, nodes),
        edge_index=torch.from_numpy(np.concatenate(links)).long().t().contiguous(),  # [2, edges]
        edge_attr=features(space.edge_space, edges) if space.edge_space else None,
        mask=torch.from_numpy(np.concatenate(masks)).bool().flatten(),  # [nodes]
        ptr=torch.from_numpy(ptr),
        batch=torch.from_numpy(batch),
    )


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
        B = graphs.num_graphs  # the last graph of an episode may have no nodes
        mean = scatter(h, graphs.batch, dim_size=B, reduce="mean")
        largest = scatter(h, graphs.batch, dim_size=B, reduce="max")
        size = graphs.ptr.diff().log1p()[:, None]  # neither mean nor maximum shows it
        return h, torch.cat([mean, largest, size], 1)

    @torch.no_grad()
    def get_value(self, graphs: Batch) -> torch.Tensor:
        _, pooled = self.encode(graphs)
        return self.critic(pooled).squeeze(1)

    def get_action_and_value(self, graphs: Batch, action: torch.Tensor | None = None):
        """Action (counted within its graph), log-probability, entropy and value, [B] each."""
        h, pooled = self.encode(graphs)
        key = self.key(h)  # [nodes, dim]
        query = self.actor(pooled)[graphs.batch]  # [nodes, dim]: that of the node's graph
        logits = self.score(torch.tanh(key + query)).squeeze(1)  # as in additive attention, and
        logits = logits + (key * query).sum(1) / key.shape[1] ** 0.5  # as in scaled dot products
        logits = logits.masked_fill(~graphs.mask, -1e9)
        probs = softmax(logits, ptr=graphs.ptr)  # [nodes]: they sum to 1 in each graph
        logprobs = probs.clamp(min=1e-20).log()  # in the entropy 0 * -inf would be nan
        if action is None:
            padded, _ = to_dense_batch(probs, graphs.batch)  # [B, nodes of the largest graph]
            action = padded.multinomial(1).squeeze(1)
        logprob = logprobs[graphs.ptr[:-1] + action]
        entropy = scatter(-probs * logprobs, graphs.batch)
        value = self.critic(pooled).squeeze(1)
        return action, logprob, entropy, value


if __name__ == "__main__":
    args = tyro.cli(Args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    run_name = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    writer.add_text("hyperparameters", str(vars(args)))
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    # env_id's module may be in the current folder; the script's, whose `envs` hides yours, is last
    folder = sys.path[0]
    sys.path[0] = os.getcwd()
    sys.path += [folder, os.path.dirname(folder)]
    envs = []
    for _ in range(args.num_envs):
        env = gym.make(args.env_id, disable_env_checker=True)
        envs.append(gym.wrappers.RecordEpisodeStatistics(env))
    space = envs[0].observation_space["graph"]
    agent = Agent(space, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(shape, device=device)
    rewards = torch.zeros(shape, device=device)
    dones = torch.zeros(shape, device=device)  # 1 where an episode ended with this step
    values = torch.zeros(shape, device=device)
    global_step = 0
    start_time = time.time()
    next_obs = [env.reset(seed=args.seed + i)[0] for i, env in enumerate(envs)]
    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        obs = []  # step t of environment i is obs[t * num_envs + i]
        for step in range(args.num_steps):
            obs += copy.deepcopy(next_obs)  # an environment may overwrite its arrays
            with torch.no_grad():
                graphs = collate(next_obs, space).to(device)
                action, logprob, _, value = agent.get_action_and_value(graphs)
            actions[step] = action
            logprobs[step] = logprob
            values[step] = value
            for i, choice in enumerate(action.cpu().numpy()):
                next_obs[i], reward, terminated, truncated, info = envs[i].step(choice)
                global_step += 1
                rewards[step, i] = float(reward)
                dones[step, i] = float(terminated or truncated)
                if truncated and not terminated:  # V stands for the rewards that would follow
                    graphs = collate([next_obs[i]], space).to(device)
                    rewards[step, i] += args.gamma * agent.get_value(graphs)[0]
                if terminated or truncated:
                    episode = info["episode"]
                    print(f"global_step={global_step}, episodic_return={episode['r']}")
                    writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                    next_obs[i], _ = envs[i].reset()

        # Generalised advantage estimation
        next_value = agent.get_value(collate(next_obs, space).to(device))
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(args.num_steps)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - values[t]
            lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            advantages[t] = lastgaelam
            next_value = values[t]

        b_actions = actions.flatten()
        b_logprobs = logprobs.flatten()
        b_advantages = advantages.flatten()
        b_values = values.flatten()
        b_returns = b_advantages + b_values
        clipfracs = []
        for _ in range(args.update_epochs):
            b_inds = np.random.permutation(batch_size)
            for mb in np.array_split(b_inds, args.num_minibatches):
                graphs = collate([obs[k] for k in mb], space).to(device)
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(graphs, b_actions[mb])
                logratio = newlogprob - b_logprobs[mb]
                ratio = logratio.exp()
                clipfracs.append(((ratio - 1).abs() > args.clip_coef).float().mean())
                mb_advantages = b_advantages[mb]
                mb_advantages = mb_advantages - mb_advantages.mean()
                if len(mb) > 1:
                    mb_advantages = mb_advantages / (mb_advantages.std() + 1e-8)
                pg_loss1 = -mb_advantages * ratio
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss2 = -mb_advantages * clipped
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                v_loss = (newvalue - b_returns[mb]) ** 2
                if args.clip_vloss:
                    change = (newvalue - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                    v_loss_clipped = (b_values[mb] + change - b_returns[mb]) ** 2
                    v_loss = torch.max(v_loss, v_loss_clipped)
                v_loss = 0.5 * v_loss.mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
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
        print("SPS:", sps)

    torch.save(agent.state_dict(), f"runs/{run_name}/weights.pt")
    writer.close()
