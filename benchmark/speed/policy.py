"""Decisions per second of a trained policy in a program of one's own (services/policy.py), on
JobShop-v0 with 6 jobs and 6 machines.

    python benchmark/speed/policy.py --out benchmark/results/speed/tables.md#policy
    python benchmark/speed/policy.py --num-steps 20 --rounds 1                        # does it run?

A policy with the default flags of each script (weights do not matter here) plays --num-steps steps;
then it decides again for the same observations, one at a time and in batches. What is timed is the
call of the policy: checks of the observation, batch, network, and the action as the environment
takes it; not the environment. A second of the CPU is the process's own, whatever else the machine
does.
"""

import importlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from common import report, spread


@dataclass
class Args:
    scripts: tuple[str, ...] = ("ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl")
    """whose policies"""
    batches: tuple[int, ...] = (0, 1, 16, 64)
    """observations at a time; 0 is one that is no list"""
    num_steps: int = 100
    """calls in a row"""
    rounds: int = 5
    """how often they are timed"""
    jobs: int = 6
    """jobs, and machines, of an instance"""
    torch_threads: int = 1
    """threads of torch"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def history(policy, num: int, num_steps: int) -> list[tuple]:
    """(observations, rewards, starts) of each step of `num` environments that the policy plays."""
    envs, calls = [policy.make_env() for _ in range(num)], []
    now = [(env.reset(seed=i)[0], 0.0, True) for i, env in enumerate(envs)]
    for _ in range(num_steps):
        calls.append(tuple(map(list, zip(*now))))
        obs, rewards, _ = calls[-1]
        actions = policy(*calls[-1]) if policy.num_envs else [policy(obs[0], rewards[0])]
        for i, (env, action) in enumerate(zip(envs, actions)):
            obs, reward, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
            now[i] = env.reset()[0] if ended else obs, reward, ended
    return calls


def measure(path: str, batch: int, args: Args) -> np.ndarray:
    """Decisions per second, and per second of the CPU, of each round, [rounds, 2]."""
    from cleanrl_graph import load_policy

    policy, rates = load_policy(path, num_envs=batch or None), []
    now = lambda: np.array([time.perf_counter(), time.process_time()])
    calls = history(policy, max(batch, 1), args.num_steps)
    for _ in range(args.rounds):
        before = now()
        for observations, rewards, starts in calls:
            if batch:
                policy(observations, rewards, starts)
                continue
            if starts[0]:
                policy.reset()
            policy(observations[0], rewards[0])
        rates.append(len(calls) * max(batch, 1) / (now() - before))
    return np.array(rates)


def main(args: Args) -> None:
    torch.set_num_threads(args.torch_threads)
    lines = [
        f"# Decisions per second of a trained policy, JobShop-v0 {args.jobs}x{args.jobs}",
        "",
        "| script | at a time | decisions/s (least to most) | per CPU second |",
        "| --- | --- | --- | --- |",
    ]
    for name in args.scripts:
        script = importlib.import_module(f"cleanrl_graph.{name}")
        size = {"jobs": args.jobs, "machines": args.jobs}
        flags = script.Args(env_id="cleanrl_graph.envs:JobShop-v0", env_kwargs=size)
        env = script.make_env(flags)
        agent = script.Agent(script.Envs([lambda env=env: env]).leaves, env.action_space, flags)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt")
            torch.save({"script": name, "args": vars(flags), "model": agent.state_dict()}, path)
            for batch in args.batches:
                wall, cpu = measure(path, batch, args).T
                cells = f"{name}.py | {batch or 'one observation'} | {spread(wall)}"
                lines.append(f"| {cells} | {np.median(cpu):,.0f} |")
                print(lines[-1], file=sys.stderr)
    lines += [
        "",
        f"Medians of {args.rounds} rounds of {args.num_steps} calls, {args.torch_threads} "
        "thread(s). Processes that wanted to run on the machine in the last minute: "
        f"{os.getloadavg()[0]:.1f}.",
    ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
