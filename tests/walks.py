"""Environments whose copies go on exactly, others, and those with faults."""

import os
import random
import signal
import threading
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """A random walk of 25 steps; `draw` returns its numbers."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.draw()
        return self.observe(), {}

    def observe(self):
        return np.array([self.t, self.x], np.float32)

    def draw(self):
        return self.np_random.random()

    def step(self, action):
        self.t, self.x = self.t + 1, self.x + action * self.draw()
        return self.observe(), float(self.x), self.x > 9, self.t == 25, {}


class OwnGenerators(Walk):
    """Its `np_random` is its own, as old environments have it."""

    def __init__(self):
        self.np_random = np.random.RandomState(3)
        self.random, self.rng = random.Random(5), np.random.default_rng(7)

    def reset(self, *, seed=None, options=None):
        self.t, self.x = 0, self.draw()
        return self.observe(), {}

    def draw(self):
        return self.np_random.rand() + self.random.random() + self.rng.random()


class WithLambda(Walk):
    def __init__(self):
        self.double = lambda x: 2 * x

    def draw(self):
        return self.double(super().draw())


class Nested(Walk):
    """Observations of all kinds, in one array that is written again, with NaN, without edges."""

    def observe(self):
        graph = spaces.GraphInstance(np.full((2, 1), self.x), None, np.zeros((0, 2), np.int64))
        self.array = getattr(self, "array", np.zeros(2))
        self.array[:] = self.x, np.nan
        rows = ({"a": self.array, "b": 1},) * (self.t % 3)
        return {"graph": graph, "set": rows, "name": "x", "none": None}


class Odd(Walk):
    """Its copies are not like it, each in another way."""

    def __init__(self, how, at=1):
        self.how, self.num_left, self.is_copy = how, at, False

    def __getstate__(self):
        if self.how == "pickle":
            raise TypeError("I hold a simulator")
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state, is_copy=True)
        if self.how == "load":
            raise KeyError("what is missing")

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.num_left -= self.is_copy
        if self.is_copy and self.num_left == 0:
            obs = obs + (self.how == "observation")
            reward += self.how == "reward"
        return obs, reward, terminated, truncated, info


class Lossy(Walk, gym.utils.EzPickle):
    """An EzPickle: its copies are made anew and have not begun an episode."""

    def __init__(self):
        gym.utils.EzPickle.__init__(self)


class Trusted(Odd):
    exact_resume = True


class LeftOut(Walk):
    exact_resume = False

    def __getstate__(self):
        raise AssertionError("it is pickled")


# ---- With faults ----
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
        self.left = self.length
        return self.observe(), {}

    def observe(self):
        return np.array([self.t, 1], np.float32)

    def step(self, action):
        self.t, self.left = self.t + 1, self.left - 1
        if self.fault and self.first_seed == self.victim and self.t >= self.at:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(1000)
            raise KeyError("the engine is on fire")
        return self.observe(), 1.0, False, self.left == 0, {}


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


for name in ("Faulty", "NoPickle", "OnClass"):
    gym.register(f"{name}-v0", entry_point=f"walks:{name}")
