"""The ids of MinAtar, which registers them by a function."""

import minatar.gym

minatar.gym.register_envs()
