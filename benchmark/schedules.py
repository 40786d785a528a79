"""What trained job-shop policies find for benchmark instances, greedily and as the best of samples,
and in which time.

    python benchmark/schedules.py --model model.pt --name quick --seed 1 \
        --suites la ta15x15 --samples 0 128

One instance after the other, one thread: 0 samples is the greedy schedule, others are drawn side by
side, every other one for the reversed instance, whose jobs run backwards: a schedule that is read
from its end is one of the other instance, of the same makespan. -1 is the better of the greedy
schedules of the two. Each row of benchmark/results/job_shop/schedules.csv is written when its
instance ends, and what is in there is not played again, so an interrupted command goes on. `costs`
has the makespan of each sample, so that the best of fewer, or of one direction, can be told as
well. Suites are those of JobShop-v0, the test sets of L2D (Zhang et al. 2020), such as l2d10x10:
100 random instances that their generator draws from the seed 200, and of FAMILIES, such as
flow15x15: 10 random instances.
"""

import itertools
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from tables import RESULTS, added, commit, cpu_name, read
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph.envs import job_shop  # noqa: E402
from cleanrl_graph.services.policy import Policy, load_policy  # noqa: E402

COLUMNS = tuple(
    "name seed suite instance samples temperature cost best_known seconds costs commit cpu".split()
)

FAMILIES = {  # instances that differ in one thing from times of 1 to 99 and routes at random
    "uniform": "times of 1 to 99 and routes at random, as in the training",
    "flow": "each job has the same route",
    "halves": "the first half of the machines, at random, then the other half",
    "slowhalves": "the same halves, times of 1 to 200",
    "narrow": "times of 50 to 100",
    "wide": "times of 1 to 1000",
    "exponential": "exponential times of mean 50",
    "bimodal": "four of five times 1 to 20, the others 80 to 200",
    "perjob": "the times of a job differ by 20 at most",
    "permachine": "those of a machine differ by 20 at most",
}
MADE = re.compile(rf"({'|'.join(FAMILIES)})(\d+)x(\d+)")


@dataclass
class Args:
    model: str
    """model.pt of a policy for JobShop-v0"""
    name: str
    """what the rows call it"""
    seed: int
    """the seed of its training, and of the samples"""
    suites: list[str] = field(default_factory=lambda: ["la"])
    """suites of JobShop-v0 (`eval_suites`), l2d10x10 and others of L2D, flow15x15 and others of
    FAMILIES"""
    samples: list[int] = field(default_factory=lambda: [0])
    """numbers of samples, 0 for the greedy schedule, -1 for the better of the greedy ones of both
    directions"""
    max_instances: int | None = None
    """of each suite the first ones only"""
    temperature: float = 1.0
    """by which the logits of samples are divided"""
    batch: int = 128
    """samples that are drawn side by side"""
    results: str = str(RESULTS / "job_shop")
    """folder of schedules.csv"""


def l2d_instances(suite: str) -> dict[str, dict]:
    """Name -> instance of a test set of L2D, l2dJxM."""
    num_jobs, num_machines = map(int, suite.removeprefix("l2d").split("x"))
    rng, instances = np.random.RandomState(200), {}
    for k in range(100):
        times = rng.randint(1, 99, (num_jobs, num_machines))
        machines = rng.random_sample((num_jobs, num_machines)).argsort(axis=1)
        instances[f"{suite}-{k:02d}"] = {"times": times, "machines": machines}
    return instances


def family_instances(suite: str) -> dict[str, dict]:
    """Name -> instance of one of FAMILIES, with its size."""
    family, *size = MADE.fullmatch(suite).groups()
    shape = num_jobs, num_machines = tuple(map(int, size))
    rng, instances = np.random.default_rng(shape), {}
    for k in range(10):
        times, machines = rng.integers(1, 100, shape), rng.random(shape).argsort(axis=1)
        if family == "flow":
            machines = np.tile(np.arange(num_machines), (num_jobs, 1))
        elif family in ("halves", "slowhalves"):
            half = (num_machines + 1) // 2
            first = rng.random((num_jobs, half)).argsort(axis=1)
            second = rng.random((num_jobs, num_machines - half)).argsort(axis=1)
            machines = np.concatenate([first, half + second], axis=1)
        if family == "slowhalves":
            times = rng.integers(1, 201, shape)
        elif family == "narrow":
            times = rng.integers(50, 101, shape)
        elif family == "wide":
            times = rng.integers(1, 1001, shape)
        elif family == "exponential":
            times = np.ceil(rng.exponential(50, shape)).astype(int)
        elif family == "bimodal":
            short = rng.random(shape) < 0.8
            times = np.where(short, rng.integers(1, 21, shape), rng.integers(80, 201, shape))
        elif family == "perjob":
            times = rng.integers(1, 80, (num_jobs, 1)) + rng.integers(0, 21, shape)
        elif family == "permachine":
            times = rng.integers(1, 80, num_machines)[machines] + rng.integers(0, 21, shape)
        instances[f"{suite}-{k}"] = {"times": times, "machines": machines}
    return instances


def instances_of(suite: str) -> dict[str, object]:
    """Name -> the environment's argument `instance`."""
    if suite.startswith("l2d"):
        return l2d_instances(suite)
    if MADE.fullmatch(suite):
        return family_instances(suite)
    names = [kwargs["instance"] for kwargs in job_shop.JobShopEnv.eval_suites[suite]]
    return dict(zip(names, names))


def reverse(instance: str | dict) -> dict:
    """The instance with each job's operations from the last to the first."""
    if isinstance(instance, dict):
        times, machines = instance["times"], instance["machines"]
    else:
        times, machines, *_ = job_shop.load_instance(instance)
    return {"times": times[:, ::-1], "machines": machines[:, ::-1]}


def play(policy: Policy, envs: list[gym.Env]) -> list[float]:
    """The makespan of an episode of each environment, side by side."""
    costs, running = [0.0] * len(envs), list(range(len(envs)))
    observations = [env.reset()[0] for env in envs]
    while running:
        actions, left = policy([observations[i] for i in running]), []
        for i, action in zip(running, actions):
            observations[i], _, terminated, truncated, info = envs[i].step(action)
            if terminated or truncated:
                costs[i] = info["eval"]["cost"]
            else:
                left.append(i)
        running = left
    return costs


def cool(policy: Policy, temperature: float) -> None:
    """From now on the policy divides its log-probabilities by the temperature, and does not
    normalise them again: a sample, which takes the largest after Gumbel noise, needs them up to a
    constant."""

    def cooled(head, inputs, dist):
        dist.log_probs = dist.log_probs / temperature

    for head in policy.agent.head.heads:
        head.register_forward_hook(cooled)


def key_of(row: dict) -> tuple:
    numbers = int(row["samples"]), float(row["temperature"] or 1)
    return row["name"], int(row["seed"]), row["suite"], row["instance"], *numbers


def main(args: Args) -> None:
    known = job_shop.JobShopEnv.eval_suites
    is_made = lambda suite: suite.startswith("l2d") or MADE.fullmatch(suite)
    if unknown := [suite for suite in args.suites if suite not in known and not is_made(suite)]:
        raise SystemExit(
            f"--suites {' '.join(unknown)}: JobShop-v0 has {', '.join(known)}; "
            f"{', '.join(FAMILIES)} are families of instances, named with a size, such as flow15x15"
        )
    if not args.temperature > 0:
        sentence = f"--temperature must be above 0, got {args.temperature}; --samples 0 is greedy"
        raise SystemExit(sentence)
    torch.set_num_threads(int(os.getenv("OMP_NUM_THREADS", "1")))
    largest = job_shop.JobShopEnv(jobs=100, machines=20)  # actions are nodes of any graph
    policies = {}
    for greedy in {num <= 0 for num in args.samples}:
        num_envs = 2 if greedy else args.batch
        policies[greedy] = load_policy(args.model, largest, num_envs, greedy)
    if False in policies:
        cool(policies[False], args.temperature)
    path = Path(args.results) / "schedules.csv"
    done = {key_of(row) for row in read(path)}
    todo = []
    for num, suite in itertools.product(args.samples, args.suites):
        temperature = args.temperature if num > 0 else 1.0
        for name, instance in list(instances_of(suite).items())[: args.max_instances]:
            if (args.name, args.seed, suite, name, num, temperature) not in done:
                todo.append((suite, name, instance, num))
    about = {"name": args.name, "seed": args.seed, "cpu": cpu_name(), "commit": commit(7)}
    with added(path, COLUMNS) as add:
        for suite, name, instance, num in tqdm(todo, unit="instance"):
            policy, began, costs = policies[num <= 0], time.perf_counter(), []
            policy.generator.manual_seed(args.seed)  # whatever was played before
            count = {0: 1, -1: 2}.get(num, num)
            drawn = [reverse(instance) if k % 2 else instance for k in range(count)]
            for k in range(0, len(drawn), args.batch):
                some = drawn[k : k + args.batch]
                costs += play(policy, [policy.make_env(instance=each) for each in some])
            row = about | {"suite": suite, "instance": name, "samples": num}
            row["cost"], row["costs"] = int(min(costs)), " ".join(str(int(x)) for x in costs)
            row["seconds"] = round(time.perf_counter() - began, 2)
            row["temperature"] = args.temperature if num > 0 else ""
            is_named = isinstance(instance, str)
            row["best_known"] = job_shop.load_instance(name)[2] if is_named else ""
            add(row)


if __name__ == "__main__":
    main(tyro.cli(Args))
