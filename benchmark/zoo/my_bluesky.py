"""The ids of bluesky-gym, which registers them by a function."""

import bluesky_gym

bluesky_gym.register_envs()
