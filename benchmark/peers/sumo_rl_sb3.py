"""Stable-Baselines3's PPO on the traffic lights of sumo-rl, RESCO's grid4x4: a system to compare
with.

    pip install -r benchmark/traffic/requirements.txt stable-baselines3==2.9.2
    python benchmark/peers/sumo_rl_sb3.py --seed 1 --out benchmark/results/traffic/sumo_rl_sb3.csv

The settings of PPO are those of sumo-rl's experiments/sb3_grid4x4.py (commit 0abd7c4): the lights
share a policy, each sees its own phase and lanes, and its reward is by how much the waiting time
there has fallen. As sumo-rl's PettingZoo class does not work with pettingzoo 1.27, the lights of
SumoEnvironment are the environments of a VecEnv. Training has the hours of benchmark/traffic.sh:
demands of 0.7, 1, 1.15 and 1.3, one after the other, shifted at random. --total-timesteps counts
decisions of lights: 691,200 are 43,200 steps of grid4x4.

Adds a row to --out for each of the five hours of the suite grid4x4, with greedy decisions: seed,
minutes of training, demand, mean delay (s) of all trips as in traffic_sumo.read_trips.
"""

# ruff: noqa: E402 (sumo_rl reads the environment where it is imported)
import csv
import importlib.util
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["LIBSUMO_AS_TRACI"] = "1"
(_folder,) = importlib.util.find_spec("sumo_data").submodule_search_locations
os.environ.setdefault("SUMO_HOME", _folder)
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv
from sumo_rl import SumoEnvironment

from cleanrl_graph.envs import traffic, traffic_sumo

MAP = "grid4x4"
DEMANDS = (0.7, 1.0, 1.15, 1.3)


@dataclass
class Args:
    out: str
    """csv that gets the rows"""
    seed: int = 1
    """seed of the network, of the hours and of SUMO"""
    total_timesteps: int = 691_200
    """decisions of lights"""


class Lights(VecEnv):
    """The lights of an hour of traffic, each an environment. The hours follow each other."""

    def __init__(self, folder, seed):
        self.trips = Path(folder, "trips.xml")
        self.routes = Path(folder, "routes.rou.xml")
        self.net, self.own_routes, self.begin, self.end = traffic.read_config(MAP)
        self.rng = np.random.default_rng(seed)
        self.hours = 0
        quiet = dict(sumo_warnings=False, add_system_info=False, add_per_agent_info=False)
        hour = dict(begin_time=self.begin, num_seconds=self.end - self.begin)
        self.env = SumoEnvironment(self.net, self.own_routes, **hour, **quiet)
        self.names = self.env.ts_ids
        super().__init__(
            len(self.names),
            self.env.observation_spaces(self.names[0]),
            self.env.action_spaces(self.names[0]),
        )

    def start(self, demand, shift, seed):
        """Begins an hour. Returns the observations [lights, ...]."""
        traffic_sumo.write_shifted(self.own_routes, self.routes, self.begin, self.end, shift)
        self.env._route = str(self.routes)
        options = ["--scale", str(demand), "--tripinfo-output", str(self.trips)]
        given = ("--time-to-teleport", "-1", "--no-warnings")  # by SumoEnvironment
        options += [word for word in traffic.SUMO_OPTIONS if word not in given]
        self.env.additional_sumo_cmd = " ".join(options)
        return self.rows(self.env.reset(seed=seed))

    def rows(self, by_name):
        return np.stack([by_name[name] for name in self.names])

    def reset(self):
        demand = DEMANDS[self.hours % len(DEMANDS)]
        self.hours += 1
        shift = round(self.rng.uniform(0, 3600), 2)
        return self.start(demand, shift, int(self.rng.integers(1000, 2**31 - 1)))

    def play(self, actions):
        """(observations, rewards, is it over?) of a step with an action for each light."""
        actions = dict(zip(self.names, np.asarray(actions).tolist()))
        observations, rewards, dones, _ = self.env.step(actions)
        return self.rows(observations), self.rows(rewards), dones["__all__"]

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        observations, rewards, is_over = self.play(self.actions)
        infos = [{} for _ in self.names]
        if is_over:
            for info, row in zip(infos, observations):
                info["terminal_observation"] = row
                info["TimeLimit.truncated"] = True
            observations = self.reset()
        dones = np.full(self.num_envs, is_over)
        return observations, rewards.astype(np.float32), dones, infos

    def close(self):
        self.env.close()

    def get_attr(self, attr_name, indices=None):
        return [getattr(self.env, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name, value, indices=None):
        raise NotImplementedError

    def env_method(self, method_name, *args, indices=None, **kwargs):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


def main():
    args = tyro.cli(Args)
    with tempfile.TemporaryDirectory() as folder:
        lights = Lights(folder, args.seed)
        started = time.perf_counter()
        settings = dict(gamma=0.95, n_steps=256, ent_coef=0.0905168, learning_rate=0.00062211)
        settings |= dict(vf_coef=0.042202, max_grad_norm=0.9, gae_lambda=0.99, n_epochs=5)
        settings |= dict(clip_range=0.3, batch_size=256, seed=args.seed, device="cpu")
        model = PPO("MlpPolicy", lights, **settings)
        model.learn(args.total_timesteps)
        minutes = round((time.perf_counter() - started) / 60, 1)
        rows = []
        for hour in traffic.suites()[MAP]:
            observations = lights.start(hour["demand"], hour["shift"], hour["fixed_seed"])
            is_over = False
            while not is_over:
                actions, _ = model.predict(observations, deterministic=True)
                observations, _, is_over = lights.play(actions)
            lights.close()
            delay = traffic_sumo.read_trips(lights.trips)["cost"]
            rows.append([args.seed, minutes, hour["demand"], round(delay, 4)])
    with open(args.out, "a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(["seed", "minutes", "demand", "delay"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
