"""MiniGrid's memory environment in pixels: PixelMemory-v0, for the scripts with
PYTHONPATH=benchmark.

    PYTHONPATH=benchmark python cleanrl_graph/ppo_gtrxl.py --env-id pixel_memory:PixelMemory-v0

An object (key or ball) lies in the corner of a room. The agent starts somewhere in the middle row,
may look at it, leaves the room and chooses at a junction between a key and a ball: the same object
is right. Needs `pip install -r benchmark/requirements-minigrid.txt`.

Observation: what the agent sees as pixels, uint8 [tiles tile_size, tiles tile_size, 3], as
RGBImgPartialObsWrapper. Action: 0 turns left, 1 turns right, 2 moves forward: the first three of
MiniGrid's seven, the others do nothing here. Reward 1 - 0.9 steps / max_steps at the right object,
0 at the wrong one; both terminate. Truncated after max_steps (5 size^2 if not given), with reward
0.

The agent sees 3 x 3 tiles by default. With MiniGrid's 7 x 7 it sees the first object from the
junction too up to size 9 (MiniGrid-MemoryS7-v0, S9), so a policy without memory can be right. With
3 x 3 tiles no place shows both, and the first object is not seen beyond the room: without memory no
policy is right in more than half of the episodes.
"""

import gymnasium as gym
from gymnasium import spaces
from minigrid.envs.memory import MemoryEnv
from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper

# (tile size, what the agent sees as MiniGrid encodes it) -> its picture: three times the steps per
# second
FRAMES = {}


class CachedPixels(RGBImgPartialObsWrapper):
    """The pictures of RGBImgPartialObsWrapper, each drawn once."""

    def observation(self, obs):
        key = self.tile_size, obs["image"].tobytes()
        if key not in FRAMES:
            FRAMES[key] = super().observation(obs)["image"]
        return {**obs, "image": FRAMES[key]}


def pixel_memory(size: int = 7, agent_view_size: int = 3, tile_size: int = 4, **kwargs) -> gym.Env:
    """MemoryEnv in pixels, with the three movements as actions; size is odd and at least 7."""
    env = MemoryEnv(size=size, agent_view_size=agent_view_size, **kwargs)
    env = ImgObsWrapper(CachedPixels(env, tile_size))
    return gym.wrappers.TransformAction(env, lambda action: action, spaces.Discrete(3))


gym.register("PixelMemory-v0", pixel_memory)
