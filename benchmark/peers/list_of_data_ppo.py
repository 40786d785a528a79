"""PPO on graph observations with a list of torch_geometric Data and Batch.from_data_list: a system
to compare with.

    pip install -r benchmark/peers/requirements-sb3.txt    # in a virtual environment of its own
    python benchmark/peers/list_of_data_ppo.py --env-id envs:PoissonGraph-v0 \
        --total-timesteps 100000

The usual way to train on graphs of any size today: each observation becomes one Data, a rollout is
a list of them, and each step of collection and each minibatch builds its Batch. The network is that
of ppo_graph.py, layer by layer, with PyG's own segment operations. Losses, defaults and annealing
are those of CleanRL's ppo.py, with bootstrapping at time limits. Prints the steps per second of the
whole training and the mean return of the last 100 episodes.
"""

import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv
from torch_geometric.utils import segment, softmax

sys.path.insert(0, str(Path(__file__).parents[2]))  # for cleanrl_graph.envs


@dataclass
class Args:
    env_id: str = "envs:PoissonGraph-v0"
    """an environment with observation {"graph", "action_mask"}, without features of edges, and the
    choice of a node as action"""
    seed: int = 1
    """seed of the networks and of the environments (env i: seed + i)"""
    cuda: bool = True
    """use a GPU if there is one"""
    total_timesteps: int = 100_000
    """environment steps of the whole training"""
    learning_rate: float = 2.5e-4
    """annealed linearly to 0"""
    num_envs: int = 8
    """number of environments"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    num_minibatches: int = 4
    """number of minibatches per epoch"""
    update_epochs: int = 4
    """epochs per rollout"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: float = 0.2
    """clipping of the policy's ratio and of the value"""
    ent_coef: float = 0.01
    """weight of the entropy"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient"""
    gnn_layers: int = 2
    """number of message-passing layers"""
    gnn_dim: int = 64
    """width of the node embeddings"""
    hidden_dims: tuple[int, ...] = (64, 64)
    """widths of the actor's and of the critic's MLP"""


def layer_init(layer, std=2**0.5):
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(widths):
    """Linear layers, each followed by tanh."""
    layers = [[layer_init(nn.Linear(i, o)), nn.Tanh()] for i, o in zip(widths, widths[1:])]
    return nn.Sequential(*sum(layers, []))


class GraphAgent(nn.Module):
    """GIN encoder, a score for each node, and a value of the graph, as in
    ppo_graph.py."""

    def __init__(self, node_dim, args):
        super().__init__()
        dim = args.gnn_dim
        self.embed = nn.Linear(node_dim, dim)
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for _ in range(args.gnn_layers):
            net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
            self.convs.append(GINConv(net))
            self.norms.append(nn.LayerNorm(dim))
        widths = [2 * dim + 1, *args.hidden_dims]
        self.actor = mlp(widths)
        self.critic = mlp(widths).append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        self.query = layer_init(nn.Linear(widths[-1], dim), 1.0)
        self.project = nn.Linear(dim, dim)
        self.score = layer_init(nn.Linear(dim, 1), 0.01)

    def forward(self, x, edge_index, batch, ptr):
        """Scores of the nodes [num_nodes] and values of the graphs [num_graphs]."""
        h = self.embed(x)
        for conv, norm in zip(self.convs, self.norms):
            h = h + conv(norm(h), edge_index).relu()
        num_nodes = (ptr[1:] - ptr[:-1])[:, None].float()
        pooled = torch.cat([segment(h, ptr, "mean"), segment(h, ptr, "max"), num_nodes.log1p()], 1)
        score = self.score(torch.tanh(self.project(h) + self.query(self.actor(pooled))[batch]))
        return score.squeeze(-1), self.critic(pooled).squeeze(-1)


def to_data(observation):
    """The Data of one observation {"graph", "action_mask"}."""
    graph = observation["graph"]
    return Data(
        x=torch.from_numpy(graph.nodes),
        edge_index=torch.from_numpy(graph.edge_links).T,
        allowed=torch.from_numpy(observation["action_mask"]).bool(),
    )


def get_action_and_value(agent, batch, action=None):
    """Actions (node index within its graph; drawn if None), log-probabilities, entropies and
    values, each [B]."""
    score, value = agent(batch.x, batch.edge_index, batch.batch, batch.ptr)
    prob = softmax(score.masked_fill(~batch.allowed, -torch.inf), batch.batch, batch.ptr)
    log_prob = prob.clamp(min=1e-20).log()
    start = batch.ptr[:-1]
    if action is None:
        # Exponential race: the largest of a graph wins
        noise = prob / -torch.rand_like(prob).clamp(1e-20).log()
        best = segment(noise, batch.ptr, "max")
        winner = (noise == best[batch.batch]).nonzero().squeeze(-1)
        action = torch.empty_like(start)
        action[batch.batch[winner]] = winner - start[batch.batch[winner]]
    entropy = segment(-prob * log_prob, batch.ptr, "sum")
    return action, log_prob[start + action], entropy, value


def full_id(env_id: str) -> str:
    """`envs:NAME` is cleanrl_graph's, as in the scripts."""
    return f"cleanrl_graph.{env_id}" if env_id.startswith("envs:") else env_id


def main(args):
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")

    envs = [gym.make(full_id(args.env_id), disable_env_checker=True) for _ in range(args.num_envs)]
    space = envs[0].observation_space["graph"]
    agent = GraphAgent(space.node_space.shape[0], args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    log_probs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(4))
    returns_of_episodes = deque(maxlen=100)
    episode_return = np.zeros(args.num_envs)
    next_data = [to_data(env.reset(seed=args.seed + i)[0]) for i, env in enumerate(envs)]
    next_done = torch.zeros(args.num_envs, device=device)
    start_time = time.perf_counter()

    for iteration in range(num_iterations):
        optimizer.param_groups[0]["lr"] = (1 - iteration / num_iterations) * args.learning_rate
        stored = []  # Data of step t, env i at t * num_envs + i
        for step in range(args.num_steps):
            stored += next_data
            dones[step] = next_done
            with torch.no_grad():
                batch = Batch.from_data_list(next_data).to(device)
                actions[step], log_probs[step], _, values[step] = get_action_and_value(agent, batch)
            reward, done = np.zeros(args.num_envs, np.float32), np.zeros(args.num_envs, np.float32)
            for i, (env, action) in enumerate(zip(envs, actions[step].tolist())):
                observation, reward[i], terminated, truncated, _ = env.step(action)
                episode_return[i] += reward[i]
                if terminated or truncated:
                    done[i] = 1
                    returns_of_episodes.append(episode_return[i])
                    episode_return[i] = 0
                    if not terminated:
                        with torch.no_grad():
                            last = Batch.from_data_list([to_data(observation)]).to(device)
                            reward[i] += args.gamma * get_action_and_value(agent, last)[3].item()
                    observation, _ = env.reset()
                next_data[i] = to_data(observation)
            rewards[step] = torch.from_numpy(reward)
            next_done = torch.from_numpy(done).to(device)

        with torch.no_grad():
            next_value = get_action_and_value(agent, Batch.from_data_list(next_data).to(device))[3]
            advantages = torch.zeros_like(rewards)
            last_gae = 0
            for t in reversed(range(args.num_steps)):
                following = next_done if t == args.num_steps - 1 else dones[t + 1]
                value_after = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * value_after * (1 - following) - values[t]
                last_gae = delta + args.gamma * args.gae_lambda * (1 - following) * last_gae
                advantages[t] = last_gae
            targets = advantages + values

        b_actions, b_log_probs, b_values = actions.flatten(), log_probs.flatten(), values.flatten()
        b_advantages, b_targets = advantages.flatten(), targets.flatten()
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size)
            for idx in order.split(minibatch_size):
                batch = Batch.from_data_list([stored[i] for i in idx.tolist()]).to(device)
                idx = idx.to(device)
                _, log_prob, entropy, value = get_action_and_value(agent, batch, b_actions[idx])
                ratio = (log_prob - b_log_probs[idx]).exp()
                advantage = b_advantages[idx]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()
                change = (value - b_values[idx]).clamp(-args.clip_coef, args.clip_coef)
                near = b_values[idx] + change
                target = b_targets[idx]
                value_loss = 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
                loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start_time
    print(f"SPS {num_iterations * batch_size / seconds:.0f}")
    returns = returns_of_episodes
    print(f"mean return {np.mean(returns):.3f} (last {len(returns)} episodes)")


if __name__ == "__main__":
    main(tyro.cli(Args))
