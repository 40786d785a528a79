"""PPO that sees the last steps: CleanRL's ppo.py with frame stacking that stores each step once.

    python cleanrl_graph/ppo_framestack_mini.py
    python cleanrl_graph/ppo_framestack_mini.py --env-id your_module:YourEnv-v0 --num-views 4

Observations are vectors, the action is one of a list. The policy sees the last `num_views` steps:
their observations and the actions before them. Each step is stored once, in a table; views are rows
of it that are read by index when they are needed, zeros for what was before the episode. The table
begins with the last steps of the rollout before.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), GAE (Schulman et al. 2015, arXiv:1506.02438),
frame stacking (Mnih et al. 2015, doi:10.1038/nature14236).
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
    env_id: str = "cleanrl_graph.envs:StatelessCartPole-v1"
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
    """the number of mini-batches"""
    update_epochs: int = 8
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
    hidden_dim: int = 256
    """width of the two hidden layers of actor and critic"""
    num_views: int = 16
    """steps that the policy sees, the present one and those before it"""


def to_tensor(observations: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """Observations of any shape as vectors, [B, F]."""
    obs = torch.from_numpy(np.stack(observations)).float().flatten(1)
    return obs.to(device, non_blocking=True)


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """CleanRL's actor and critic, on views of the last steps [B, num_inputs]."""

    def __init__(self, num_features: int, num_actions: int, args: Args):
        super().__init__()
        dim = args.hidden_dim
        num_inputs = args.num_views * (num_features + num_actions)
        self.norm = nn.BatchNorm1d(num_features, affine=False, momentum=None)  # of observations
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

    @torch.no_grad()
    def get_value(self, views: torch.Tensor) -> torch.Tensor:
        return self.critic(views).squeeze(1)

    def get_action_and_value(self, views: torch.Tensor, action=None, generator=None):
        probs = Categorical(logits=self.actor(views), validate_args=False)
        if action is None:  # the largest p / Exp(1) is a draw from p; sample() would wait for a GPU
            noise = torch.empty_like(probs.probs).exponential_(generator=generator)
            action = (probs.probs / noise).argmax(1)
        return action, probs.log_prob(action), probs.entropy(), self.critic(views).squeeze(1)


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
    num_features = int(np.prod(envs[0].observation_space.shape))
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    torch.manual_seed(args.seed)  # here, as environments may have drawn from torch's generator
    agent = Agent(num_features, num_actions, args).to(device).eval()
    generator = (torch.cuda.default_generators or [torch.default_generator])[0].clone_state()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # The table: row K + t is step t of the rollout, the K rows before are steps of the last one
    K = args.num_views - 1
    shifts = torch.arange(-K, 1, device=device)  # of views, 0 is the present step
    table_size = (K + args.num_steps + 1, args.num_envs)
    obs = torch.zeros(*table_size, num_features, device=device)
    last_actions = torch.zeros(table_size, dtype=torch.int64, device=device)  # before each obs

    def views(step: int | torch.Tensor, env: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        """What is seen at steps [B] of environments [B] that were `age` [B] steps into their
        episodes, [B, num_views * (num_features + num_actions)]."""
        rows = K + (step + torch.zeros_like(env))[:, None] + shifts  # [B, num_views]
        age_there = (age[:, None] + shifts)[..., None]  # below 0 before the episode
        seen = agent.norm(obs[rows, env[:, None]].transpose(1, 2)).transpose(1, 2).clamp(-10, 10)
        last = nn.functional.one_hot(last_actions[rows, env[:, None]], num_actions)
        return torch.cat([seen * (age_there >= 0), last * (age_there > 0)], 2).flatten(1)

    shape = (args.num_steps, args.num_envs)
    all_envs = torch.arange(args.num_envs, device=device)
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
    next_age = torch.zeros_like(all_envs)
    for iteration in range(1, num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        obs[: K + 1] = obs[args.num_steps :].clone()  # what views still reach
        last_actions[: K + 1] = last_actions[args.num_steps :].clone()
        for step in range(args.num_steps):
            obs[K + step] = to_tensor(next_obs, device)
            ages[step] = next_age
            with torch.no_grad():
                seen = views(step, all_envs, next_age)
                action, logprob, _, value = agent.get_action_and_value(seen, generator=generator)
            actions[step] = action
            logprobs[step] = logprob
            values[step] = value
            last_actions[K + step + 1] = action
            next_age = next_age + 1
            for i, choice in enumerate(action.cpu().numpy() + first_action):
                next_obs[i], reward, terminated, truncated, info = envs[i].step(choice)
                global_step += 1
                rewards[step, i].fill_(float(reward))  # `[step, i] =` would wait for a GPU
                dones[step, i].fill_(float(terminated or truncated))
                if truncated and not terminated:  # bootstrap: a time limit is no end
                    # in the place of the next step, until the environment was reset
                    obs[K + step + 1, i] = to_tensor(next_obs[i : i + 1], device)[0]
                    k = all_envs[i : i + 1]
                    seen = views(step + 1, k, next_age[k])
                    rewards[step, i] += args.gamma * agent.get_value(seen)[0]
                if terminated or truncated:
                    episode = info["episode"]
                    returns.append(episode["r"])
                    writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                    writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                    next_obs[i], _ = envs[i].reset()
                    next_age[i] = 0

        # Generalised advantage estimation
        obs[K + args.num_steps] = to_tensor(next_obs, device)
        next_value = agent.get_value(views(args.num_steps, all_envs, next_age))
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(args.num_steps)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - values[t]
            lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            advantages[t] = lastgaelam
            next_value = values[t]
        b_ages = ages.flatten()
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
                seen = views(mb // args.num_envs, mb % args.num_envs, b_ages[mb])
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(seen, b_actions[mb])
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

        agent.norm.train()(obs[K:-1].flatten(0, 1))  # running mean and variance
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
