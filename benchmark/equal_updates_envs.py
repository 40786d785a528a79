"""Environments that equal_updates.py trains on beside those of the repository."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class RandomSteps(gym.Env):
    """Random observations, episodes of random lengths. The reward is `paid(action)` and noise."""

    def reset(self, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(2, 12))
        return self.observation(), {}

    def step(self, action):
        self.steps_left -= 1
        reward = self.paid(action) + 0.1 * float(self.np_random.normal())
        return self.observation(), reward, self.steps_left == 0, False, {}


class Pixels(RandomSteps):
    """Random pixels; the second of three actions pays."""

    action_space = spaces.Discrete(3)

    def __init__(self, shape=(12, 12, 1), high: int = 255, dtype: str = "uint8"):
        self.observation_space = spaces.Box(0, high, tuple(shape), np.dtype(dtype).type)

    def observation(self) -> np.ndarray:
        space = self.observation_space
        return self.np_random.integers(0, int(space.high.max()) + 1, space.shape).astype(
            space.dtype
        )

    def paid(self, action: int) -> float:
        return float(action == 1)


class Mixed(RandomSteps):
    """Each kind of observation and each kind of action at once, or without bits."""

    max_nodes = 9
    observation_space = spaces.Dict(
        {
            "graph": spaces.Graph(
                spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 1, (2,), np.float32)
            ),
            "cards": spaces.Sequence(spaces.MultiDiscrete([4, 13]), stack=True),
            "position": spaces.Box(-1, 1, (2,), np.float64),
            "place": spaces.Discrete(5, start=3),
            "many": spaces.MultiDiscrete([40, 50]),
            "switches": spaces.MultiBinary(4),
            "action_mask": spaces.Dict(
                {
                    "node": spaces.Sequence(spaces.Discrete(2), stack=True),
                    "mode": spaces.MultiBinary(3),
                }
            ),
        }
    )
    action_space = spaces.Dict(
        {
            "force": spaces.Box(-1, 1, (2,), np.float32),
            "mode": spaces.Discrete(3, start=1),
            "node": spaces.Discrete(max_nodes),
            "lamps": spaces.MultiBinary(2),
            "gears": spaces.MultiDiscrete([2, 3]),
        }
    )

    def __init__(self, bits: bool = True, gears=(2, 3)):
        own = {**self.action_space, "gears": spaces.MultiDiscrete(gears)}
        if not bits:
            del own["lamps"]
        self.action_space = spaces.Dict(own)

    def observation(self) -> dict:
        rng = self.np_random
        num_nodes = int(rng.integers(1, self.max_nodes + 1))
        num_edges = int(rng.integers(0, 12))
        num_cards = int(rng.integers(0, 5))  # none, too
        graph = spaces.GraphInstance(
            rng.uniform(-1, 1, (num_nodes, 3)).astype(np.float32),
            rng.uniform(0, 1, (num_edges, 2)).astype(np.float32),
            rng.integers(num_nodes, size=(num_edges, 2)),
        )
        node_mask = rng.integers(0, 2, num_nodes)
        node_mask[rng.integers(num_nodes)] = 1
        mode_mask = rng.integers(0, 2, 3).astype(np.int8)
        mode_mask[rng.integers(3)] = 1
        return {
            "graph": graph,
            "cards": rng.integers([4, 13], size=(num_cards, 2)),
            "position": rng.uniform(-1, 1, 2),
            "place": int(rng.integers(3, 8)),
            "many": rng.integers([40, 50]),
            "switches": rng.integers(0, 2, 4).astype(np.int8),
            "action_mask": {"node": node_mask, "mode": mode_mask},
        }

    def paid(self, action: dict) -> float:
        right = int(action["mode"] == 2) + int(action["node"] == 0)  # np.bool + np.bool is an "or"
        right += int(action.get("lamps", [0])[0])
        return float(right + action["gears"].sum() - np.square(action["force"]).sum())


class Roads(RandomSteps):
    """Some of 9 places and the roads between them, which have features; the third of three actions
    pays."""

    num_places = 9
    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict(
        {
            "graph": spaces.Graph(
                spaces.Box(-1, 1, (2,), np.float32), spaces.Box(0, 1, (2,), np.float32)
            ),
            "node_ids": spaces.Sequence(spaces.Discrete(num_places), stack=True),
        }
    )

    def observation(self) -> dict:
        rng = self.np_random
        num_nodes = int(rng.integers(1, 6))
        num_edges = int(rng.integers(0, 8))
        graph = spaces.GraphInstance(
            rng.uniform(-1, 1, (num_nodes, 2)).astype(np.float32),
            rng.uniform(0, 1, (num_edges, 2)).astype(np.float32),
            rng.integers(num_nodes, size=(num_edges, 2)),
        )
        return {"graph": graph, "node_ids": rng.choice(self.num_places, num_nodes, replace=False)}

    def paid(self, action: int) -> float:
        return float(action == 2)


def random_policy(env: gym.Env, observation: dict, rng: np.random.Generator) -> int:
    """A demonstrator: an allowed row, with equal probabilities."""
    return int(rng.choice(np.flatnonzero(observation["action_mask"])))


gym.register("Pixels-v0", entry_point=Pixels, max_episode_steps=7)
gym.register("Mixed-v0", entry_point=Mixed, max_episode_steps=7)
gym.register("Roads-v0", entry_point=Roads, max_episode_steps=7)
