"""Environments with faults. A process that loads copies imports this file, which imports little."""

import os
import signal
import sys
import threading
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Faulty(gym.Env):
    """Episodes of `length` steps, or of one more after a seed that is odd. A `fault` happens in
    step `at` of the env whose first seed was `victim`, counted over its episodes; `seeds` is a file
    that notes the seeds of resets."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 1000, (2,))

    def __init__(self, fault="", at=5, victim=2, length=7, seeds=""):
        self.fault, self.at, self.victim, self.length, self.seeds = fault, at, victim, length, seeds
        self.t, self.first_seed, self.left, self.seed = 0, None, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.first_seed, self.seed = seed if self.first_seed is None else self.first_seed, seed
            if self.seeds:
                with open(self.seeds, "a") as file:
                    file.write(f"{seed}\n")
        self.strike("reset")
        self.left = self.length
        return self.observe(), {}

    def observe(self):
        return np.array(
            [self.t, np.nan if self.t == self.at and self.is_victim("nan observation") else 1],
            np.float32,
        )

    def is_victim(self, fault):
        return self.fault == fault and self.first_seed == self.victim

    def strike(self, fault):
        if self.is_victim(fault) and self.t >= self.at:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                time.sleep(1000)
            if fault == "exit":
                sys.exit(0)
            raise KeyError("the engine is on fire")

    def step(self, action):
        self.t, self.left = self.t + 1, self.left - 1
        for fault in ("step", "kill", "hang", "exit"):
            self.strike(fault)
        reward = np.nan if self.t == self.at and self.is_victim("nan reward") else 1.0
        return self.observe(), reward, False, self.left == 0, {}


class Lossy(Faulty, gym.utils.EzPickle):
    """Its pickle is its arguments."""

    def __init__(self, **kwargs):
        gym.utils.EzPickle.__init__(self, **kwargs)
        super().__init__(**kwargs)


class NoPickle(Faulty):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lock = threading.Lock()


class OnClass(Faulty):
    """Shows how often environments of its class began an episode."""

    num_resets = 0

    def reset(self, **kwargs):
        OnClass.num_resets += 1
        return super().reset(**kwargs)

    def observe(self):
        return np.array([self.t, OnClass.num_resets], np.float32)
