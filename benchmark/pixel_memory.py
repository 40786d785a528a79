"""MiniGrid's memory environments in pixels: PixelMemory-v0, for the scripts with PYTHONPATH=benchmark.

    PYTHONPATH=benchmark python cleanrl_graph/ppo_gtrxl.py --env-id pixel_memory:PixelMemory-v0

The agent starts in or before a room with an object (key or ball), walks a corridor and goes to the same object at its
end, opposite of which stands the other one. Needs `pip install -r benchmark/requirements-pixel-memory.txt`.

Observation: the agent's 7 x 7 tiles as pixels, uint8 [7 tile_size, 7 tile_size, 3], as RGBImgPartialObsWrapper.
Action: 0 turns left, 1 turns right, 2 moves forward: the first three of MiniGrid's seven, the others do nothing here.
Reward 1 - 0.9 steps / max_steps at the right object, 0 at the wrong one; both terminate. Truncated after max_steps
(5 size^2 if not given), with reward 0.
"""

import gymnasium as gym
from gymnasium import spaces
from minigrid.envs.memory import MemoryEnv
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper

FRAMES = {}  # (tile size, what the agent sees as MiniGrid encodes it) -> its picture: three times the steps per second


class CachedPixels(RGBImgPartialObsWrapper):
    """The pictures of RGBImgPartialObsWrapper, each drawn once."""

    def observation(self, obs):
        key = self.tile_size, obs["image"].tobytes()
        if key not in FRAMES:
            FRAMES[key] = super().observation(obs)["image"]
        return {**obs, "image": FRAMES[key]}


def pixel_memory(size: int = 7, tile_size: int = 6, **kwargs) -> gym.Env:
    """MemoryEnv (size 7: MiniGrid-MemoryS7-v0) in pixels, with the three movements as actions."""
    env = ImgObsWrapper(CachedPixels(MemoryEnv(size=size, **kwargs), tile_size))
    return gym.wrappers.TransformAction(env, lambda action: action, spaces.Discrete(3))


gym.register("PixelMemory-v0", pixel_memory)
