"""Costly-v0: PoissonGraph-v0 whose step takes `ms` milliseconds longer, of the CPU or asleep."""

import time

import gymnasium as gym


class Costly(gym.Wrapper):
    def __init__(self, ms: float, asleep: bool = False):
        super().__init__(gym.make("cleanrl_graph.envs:PoissonGraph-v0", disable_env_checker=True))
        self.seconds = ms / 1000
        self.asleep = asleep

    def step(self, action):
        end = time.thread_time() + self.seconds
        if self.asleep:
            time.sleep(self.seconds)
        while not self.asleep and time.thread_time() < end:
            pass
        return self.env.step(action)


gym.register("Costly-v0", Costly)
