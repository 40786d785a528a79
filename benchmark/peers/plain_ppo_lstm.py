"""PPO with an LSTM as one writes it in an afternoon: the bar of common sense for
ppo_lstm_sparse.py.

    python benchmark/peers/plain_ppo_lstm.py --env-id popgym:popgym-RepeatPreviousEasy-v0 \
        --total-timesteps 500000
    python benchmark/run.py --table TABLE --commands "plain=benchmark/peers/plain_ppo_lstm.py" \
        --env-ids ENV_IDS

The input is the flattened observation, the previous action as one-hot vectors and a flag for an
episode's first step; then a linear layer of 128 with ReLU, an LSTM of 128, and a linear layer each
for policy and value. A Python loop runs the LSTM from one step on which any environment's episode
begins to the next, and sets its state to zero there; in training from the state that collection
had. A minibatch holds whole rollouts of some environments. Discrete and MultiDiscrete actions only;
an episode that is truncated counts as terminated.

TensorBoard logs go to --run-dir/RUN, with the names of the other scripts, so that benchmark/run.py
reads them.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    env_id: str = "popgym:popgym-RepeatPreviousEasy-v0"
    """the id of the environment, `module:Name-v0` imports the module first"""
    seed: int = 1
    """seed of the network; env i is seeded with seed + i"""
    total_timesteps: int = 500_000
    """environment steps of all environments together"""
    run_dir: str = "runs"
    """folder that receives a folder per run"""
    num_envs: int = 32
    """parallel environments"""
    num_steps: int = 128
    """steps of each environment per rollout, over which gradients go back"""
    update_epochs: int = 8
    """passes over a rollout"""
    num_minibatches: int = 4
    """minibatches of a pass"""
    learning_rate: float = 5e-4
    """constant learning rate of Adam"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    clip_coef: float = 0.2
    """clipping range of the ratio"""
    ent_coef: float = 0.0
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the (unclipped) value loss"""
    max_grad_norm: float = 0.5
    """clipping of the gradient"""
    dim: int = 128
    """width of the layer and of the LSTM"""


def orthogonal(layer: nn.Module, gain: float = 1.0) -> nn.Module:
    for name, parameter in layer.named_parameters():
        nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter, gain)
    return layer


class Actions:
    """The independent Categoricals of logits [T, N, the sum of `sizes`]; actions are [T, N,
    len(sizes)]."""

    def __init__(self, logits: torch.Tensor, sizes: list[int]):
        self.parts = [Categorical(logits=some) for some in logits.split(sizes, -1)]

    def sample(self):
        return torch.stack([part.sample() for part in self.parts], -1)

    def log_prob(self, actions):
        return sum(part.log_prob(chosen) for part, chosen in zip(self.parts, actions.unbind(-1)))

    def entropy(self):
        return sum(part.entropy() for part in self.parts)


class Agent(nn.Module):
    def __init__(self, input_dim: int, num_actions: int, dim: int):
        super().__init__()
        self.layer = nn.Sequential(orthogonal(nn.Linear(input_dim, dim), 2**0.5), nn.ReLU())
        self.lstm = orthogonal(nn.LSTM(dim, dim))
        self.actor = orthogonal(nn.Linear(dim, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(dim, 1))

    def forward(self, x, first, state):
        """(logits [T, N, actions], values [T, N], state) from x [T, N, input_dim] and first [T,
        N]"""
        x, hidden = self.layer(x), []
        begins = [0, *(first[1:].any(1).nonzero().squeeze(1) + 1).tolist(), len(x)]
        for t, end in zip(begins, begins[1:]):
            keep = 1.0 - first[t][None, :, None]
            out, state = self.lstm(x[t:end], (keep * state[0], keep * state[1]))
            hidden.append(out)
        hidden = torch.cat(hidden)
        return self.actor(hidden), self.critic(hidden).squeeze(-1), state


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    envs = [gym.make(args.env_id, disable_env_checker=True) for _ in range(args.num_envs)]
    space, action_space = envs[0].observation_space, envs[0].action_space
    sizes = getattr(action_space, "nvec", None)
    sizes = [int(action_space.n)] if sizes is None else sizes.tolist()
    T, N, input_dim = args.num_steps, args.num_envs, gym.spaces.flatdim(space) + sum(sizes) + 1
    agent = Agent(input_dim, sum(sizes), args.dim)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    name = f"{args.env_id.split(':')[-1]}__plain_ppo_lstm__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(os.path.join(args.run_dir, name))

    def observe(obs: list, action: np.ndarray, first: np.ndarray) -> torch.Tensor:
        """[1, N, input_dim]; there is no action before the first step"""
        flat = np.stack([np.asarray(gym.spaces.flatten(space, o), np.float32) for o in obs])
        parts = [np.eye(n, dtype=np.float32)[a] for n, a in zip(sizes, action.T)]
        before = np.concatenate(parts, 1)
        before *= 1 - first[:, None]
        return torch.from_numpy(np.concatenate([flat, before, first[:, None]], 1))[None]

    obs = [env.reset(seed=args.seed + i)[0] for i, env in enumerate(envs)]
    action, first = np.zeros((N, len(sizes)), np.int64), np.ones(N, np.float32)
    state = torch.zeros(1, N, args.dim), torch.zeros(1, N, args.dim)
    returns, lengths, step, start_time = np.zeros(N), np.zeros(N, np.int64), 0, time.time()
    for _ in range(args.total_timesteps // (T * N)):
        begin, rollout = state, []
        rewards, dones = (np.zeros((T, N), np.float32) for _ in range(2))
        for t in range(T):
            x, was_first = observe(obs, action, first), torch.from_numpy(first)[None]
            with torch.no_grad():
                logits, value, state = agent(x, was_first, state)
            dist = Actions(logits, sizes)
            chosen = dist.sample()
            rollout.append((x, was_first, chosen, dist.log_prob(chosen), value))
            action, step = chosen[0].numpy(), step + N
            for i, env in enumerate(envs):
                chosen_i = action[i] if len(sizes) > 1 else action[i, 0]
                obs[i], rewards[t, i], terminated, truncated, _ = env.step(chosen_i)
                dones[t, i] = terminated or truncated
                returns[i], lengths[i] = returns[i] + rewards[t, i], lengths[i] + 1
                if dones[t, i]:
                    writer.add_scalar("charts/episodic_return", returns[i], step)
                    writer.add_scalar("charts/episodic_length", lengths[i], step)
                    returns[i], lengths[i], obs[i] = 0, 0, env.reset()[0]
            first = dones[t]
        x, firsts, actions, log_probs, values = map(torch.cat, zip(*rollout))
        with torch.no_grad():
            last_x, last_first = observe(obs, action, first), torch.from_numpy(first)[None]
            next_value = agent(last_x, last_first, state)[1][0].numpy()
        V, advantages, last = values.numpy(), np.zeros_like(rewards), 0.0
        for t in reversed(range(T)):
            delta = rewards[t] + args.gamma * next_value * (1 - dones[t]) - V[t]
            advantages[t] = last = delta + args.gamma * args.gae_lambda * (1 - dones[t]) * last
            next_value = V[t]
        advantages = torch.from_numpy(advantages)
        targets = advantages + values

        for _ in range(args.update_epochs):
            for some in np.array_split(np.random.permutation(N), args.num_minibatches):
                start = begin[0][:, some], begin[1][:, some]
                logits, value, _ = agent(x[:, some], firsts[:, some], start)
                dist, adv = Actions(logits, sizes), advantages[:, some]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                ratio = (dist.log_prob(actions[:, some]) - log_probs[:, some]).exp()
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                v_loss = 0.5 * ((value - targets[:, some]) ** 2).mean()
                loss = torch.max(-adv * ratio, -adv * clipped).mean() + args.vf_coef * v_loss
                loss = loss - args.ent_coef * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        writer.add_scalar("charts/SPS", int(step / (time.time() - start_time)), step)
    writer.close()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # for `cleanrl_graph.envs:Name-v0`
    main(tyro.cli(Args))
