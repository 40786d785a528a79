"""PPO with a gated Transformer-XL: CleanRL's ppo.py with attention to the steps before.

    python cleanrl_graph/ppo_gtrxl_mini.py
    python cleanrl_graph/ppo_gtrxl_mini.py --env-id cleanrl_graph.envs:StatelessCartPole-v1

Observations are vectors, the action is one of a list. A step attends to itself and to the
`memory_length` steps before it in its episode. Acting runs `GTrXL.forward` on one step, learning
runs it on a whole rollout at once. The memory holds what entered each layer at the steps before,
without gradient; keys and values are computed from it anew.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), GAE (Schulman et al. 2015, arXiv:1506.02438),
Transformer-XL (Dai et al. 2019, arXiv:1901.02860), GTrXL (Parisotto et al. 2019, arXiv:1910.06764).
"""

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
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; environment i has seed + i"""
    cuda: bool = True
    """if toggled, cuda will be enabled by default"""
    env_id: str = "cleanrl_graph.envs:Recall-v0"
    """the id of the environment; `module:Name-v0` imports the module first"""
    total_timesteps: int = 200000
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
    """the number of mini-batches; each holds the segments of some of the environments"""
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
    memory_length: int = 64
    """previous steps of its episode that a step attends to"""
    num_layers: int = 1
    """number of transformer layers"""
    num_heads: int = 4
    """number of attention heads"""
    dim: int = 64
    """width of the transformer"""
    hidden_dim: int = 256
    """width of the two hidden layers of actor and critic"""


def to_tensor(observations: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Observations of any shape as vectors, [B, F]."""
    obs = torch.from_numpy(np.stack(observations)).float().flatten(1)
    return obs.to(device, non_blocking=True)


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def positional_encoding(distances: torch.Tensor, dim: int) -> torch.Tensor:
    """Sines and cosines of distances, [any] to [any, dim]."""
    rates = 10000 ** -(torch.arange(0, dim, 2, device=distances.device) / dim)
    angles = distances[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Gate(nn.Module):
    """GTrXL's gate: a GRU whose state is the stream x and whose input is a sublayer's output y. At
    first it lets little of y pass."""

    def __init__(self, dim: int):
        super().__init__()
        self.y = nn.Linear(dim, 3 * dim, bias=False)
        self.x = nn.Linear(dim, 2 * dim, bias=False)
        self.rx = nn.Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.full((dim,), 2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        r_y, z_y, h_y = self.y(y).chunk(3, -1)
        r_x, z_x = self.x(x).chunk(2, -1)
        h = torch.tanh(h_y + self.rx(torch.sigmoid(r_y + r_x) * x))
        z = torch.sigmoid(z_y + z_x - self.bias)
        return (1 - z) * x + z * h


class Layer(nn.Module):
    """Attention and an MLP, each on the normalised stream, with a ReLU and a gate behind it."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.r = nn.Linear(dim, dim, bias=False)  # the keys of distances
        self.out = nn.Linear(dim, dim, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.bias_v = nn.Parameter(torch.zeros(num_heads, dim // num_heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
        )
        self.gate_attention = Gate(dim)
        self.gate_mlp = Gate(dim)

    def forward(self, x, before, distance, seen) -> torch.Tensor:
        """T steps x [T, B, dim] attend to S = W + T steps: those `before` [W, B, dim], and x.
        `distance` [T, S] is how long ago a step was, 0 to W where it is `seen` [B, 1, T, S]."""
        h = self.norm(torch.cat([before, x]))
        T = len(x)
        W = len(before)
        q = self.q(h[W:]).unflatten(2, (self.num_heads, -1))  # [T, B, heads, d]
        k = self.k(h).unflatten(2, (self.num_heads, -1))  # [S, B, heads, d]
        v = self.v(h).unflatten(2, (self.num_heads, -1))
        logits = torch.einsum("tbhd,sbhd->bhts", q + self.bias_u, k)
        # q . r for each distance from 0 to W, then that of each pair of steps
        r = self.r(positional_encoding(torch.arange(W + 1, device=x.device), x.shape[2]))
        r = r.unflatten(1, (self.num_heads, -1))  # [W + 1, heads, d]
        by_distance = torch.einsum("tbhd,whd->bhtw", q + self.bias_v, r)
        place = distance.clamp(0, W).expand(*logits.shape[:2], T, W + T)
        logits = (logits + by_distance.gather(3, place)) / q.shape[3] ** 0.5
        weights = logits.masked_fill(~seen, -torch.inf).softmax(3)
        attended = torch.einsum("bhts,sbhd->tbhd", weights, v).flatten(2)
        x = self.gate_attention(x, self.out(attended).relu())
        return self.gate_mlp(x, self.mlp(x).relu())


class GTrXL(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.layers = nn.ModuleList(Layer(args.dim, args.num_heads) for _ in range(args.num_layers))

    def forward(self, x, memory, age) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs [T, B, dim], new memory) of T steps x [T, B, dim]. A memory [layers, W, B, dim]
        has the layers' inputs at the W steps before; `age` [T, B] says how many steps the episode
        had before each."""
        T = len(x)
        W = memory.shape[1]
        step = torch.arange(W + T, device=x.device)
        distance = step[W:, None] - step  # [T, W + T], below 0 in the future
        seen = (distance >= 0) & (distance <= age.T[:, None, :, None].clamp(max=W))
        inputs = []
        for layer, before in zip(self.layers, memory):
            inputs.append(x)
            x = layer(x, before, distance, seen)
        return x, torch.cat([memory, torch.stack(inputs).detach()], 1)[:, T:]


class Agent(nn.Module):
    """Actor and critic see the observation, the last action, and what the transformer makes of
    these."""

    def __init__(self, num_features: int, num_actions: int, args: Args):
        super().__init__()
        dim = args.hidden_dim
        self.num_actions = num_actions
        self.norm = nn.BatchNorm1d(num_features, affine=False, momentum=None)  # of observations
        self.token = layer_init(nn.Linear(num_features + num_actions, args.dim))
        self.gtrxl = GTrXL(args)
        num_inputs = num_features + num_actions + args.dim
        self.critic = nn.Sequential(
            layer_init(nn.Linear(num_inputs, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(num_inputs, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, dim)),
            nn.Tanh(),
            layer_init(nn.Linear(dim, num_actions), std=0.01),
        )

    def remember(self, obs, last, memory, age) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [T * B, any] of T steps, which see the `last` action [T, B], and the memory."""
        T, B = last.shape
        obs = self.norm(obs.flatten(0, 1)).clamp(-10, 10)
        last = nn.functional.one_hot(last, self.num_actions) * (age > 0)[..., None]
        inputs = torch.cat([obs, last.flatten(0, 1)], 1)
        remembered, memory = self.gtrxl(self.token(inputs).unflatten(0, (T, B)), memory, age)
        return torch.cat([inputs, remembered.flatten(0, 1)], 1), memory

    @torch.no_grad()
    def get_value(self, obs, last, memory, age) -> torch.Tensor:
        features, _ = self.remember(obs, last, memory, age)
        return self.critic(features).squeeze(1)

    def get_action_and_value(self, obs, last, memory, age, action=None, generator=None):
        """Action, log-probability, entropy and value, [T * B] each, and the memory afterwards."""
        features, memory = self.remember(obs, last, memory, age)
        probs = Categorical(logits=self.actor(features), validate_args=False)
        if action is None:  # the largest p / Exp(1) is a draw from p; sample() would wait for a GPU
            noise = torch.empty_like(probs.probs).exponential_(generator=generator)
            action = (probs.probs / noise).argmax(1)
        value = self.critic(features).squeeze(1)
        return action, probs.log_prob(action), probs.entropy(), value, memory


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
    num_features = int(np.prod(envs[0].observation_space.shape))
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    torch.manual_seed(args.seed)  # here, as environments may have drawn from torch's generator
    agent = Agent(num_features, num_actions, args).to(device).eval()
    generator = (torch.cuda.default_generators or [torch.default_generator])[0].clone_state()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(*shape, num_features, device=device)
    last_actions = torch.zeros(shape, dtype=torch.int64, device=device)  # before each obs
    ages = torch.zeros(shape, dtype=torch.int64, device=device)  # steps since the episode began
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(shape, device=device)
    rewards = torch.zeros(shape, device=device)
    dones = torch.zeros(shape, device=device)  # 1 where an episode ended with this step
    values = torch.zeros(shape, device=device)
    global_step = 0
    start_time = time.time()
    returns = deque(maxlen=100)  # of the last episodes
    next_obs = [env.reset(seed=args.seed + i)[0] for i, env in enumerate(envs)]
    last = torch.zeros_like(last_actions[:1])  # [1, num_envs]: one step, as a segment
    age = torch.zeros_like(ages[:1])
    memory = torch.zeros(args.num_layers, args.memory_length, args.num_envs, args.dim).to(device)
    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        memory_at_start = memory
        for step in range(args.num_steps):
            obs[step] = to_tensor(next_obs, device)
            last_actions[step] = last
            ages[step] = age
            with torch.no_grad():
                inputs = obs[step : step + 1], last, memory, age, None, generator
                action, logprob, _, value, memory = agent.get_action_and_value(*inputs)
            actions[step] = action
            logprobs[step] = logprob
            values[step] = value
            last, age = action[None], age + 1
            for i, choice in enumerate(action.cpu().numpy() + first_action):
                next_obs[i], reward, terminated, truncated, info = envs[i].step(choice)
                global_step += 1
                rewards[step, i].fill_(float(reward))  # `[step, i] =` would wait for a GPU
                dones[step, i].fill_(float(terminated or truncated))
                if truncated and not terminated:  # bootstrap: a time limit is no end
                    k = slice(i, i + 1)
                    seen = to_tensor(next_obs[k], device)[None]
                    value = agent.get_value(seen, last[:, k], memory[:, :, k], age[:, k])
                    rewards[step, i] += args.gamma * value[0]
                if terminated or truncated:
                    episode = info["episode"]
                    returns.append(episode["r"])
                    writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                    next_obs[i], _ = envs[i].reset()
                    age[0, i] = 0  # its first step sees nothing of what was before

        # Generalised advantage estimation
        next_value = agent.get_value(to_tensor(next_obs, device)[None], last, memory, age)
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(args.num_steps)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - values[t]
            lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            advantages[t] = lastgaelam
            next_value = values[t]
        flatinds = np.arange(batch_size).reshape(shape)
        b_actions = actions.flatten()
        b_logprobs = logprobs.flatten()
        b_advantages = advantages.flatten()
        b_values = values.flatten()
        b_returns = b_advantages + b_values
        vf_coef = args.vf_coef / (1 + b_returns.var())
        clipfracs = []
        for _ in range(args.update_epochs):
            env_inds = rng.permutation(args.num_envs)
            for mb_envs in np.array_split(env_inds, args.num_minibatches):  # whole segments
                mb_inds = flatinds[:, mb_envs].ravel()
                mb = torch.from_numpy(mb_inds).to(device, non_blocking=True)
                k = torch.from_numpy(mb_envs).to(device, non_blocking=True)
                inputs = obs[:, k], last_actions[:, k], memory_at_start[:, :, k], ages[:, k]
                outputs = agent.get_action_and_value(*inputs, b_actions[mb])
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

        agent.norm.train()(obs.flatten(0, 1))  # running mean and variance
        agent.norm.eval()
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
