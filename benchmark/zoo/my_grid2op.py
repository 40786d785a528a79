"""Grid2Op's five substations, which it has for tests, as gymnasium's spaces. The package has no
ids."""

import grid2op
import gymnasium as gym
from grid2op.gym_compat import GymEnv


def make(name: str = "rte_case5_example") -> gym.Env:
    return GymEnv(grid2op.make(name, test=True))


gym.register("Grid2Op-v0", make)
