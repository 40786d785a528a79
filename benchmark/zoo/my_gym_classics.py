"""The ids of gym-classics, which registers them by a function."""

import gym_classics

gym_classics.register("gymnasium")
