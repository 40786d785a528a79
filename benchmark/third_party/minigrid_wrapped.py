"""MiniGrid without its text, for --env-id: its own wrappers, as its users put them on.

    PYTHONPATH=benchmark/third_party python cleanrl_graph/ppo_lstm_sparse.py \
        --env-id minigrid_wrapped:MiniGridImage-v0

MiniGrid's observation is a Dict of direction, image and mission, and the mission is a Text, which
no script reads. --env-kwargs '{"env_id": "MiniGrid-DoorKey-5x5-v0"}' takes another of its
environments.
"""

from functools import partial

import gymnasium as gym
import minigrid  # noqa: F401  registers its environments
from minigrid.wrappers import FlatObsWrapper, ImgObsWrapper

WRAPPERS = {
    # uint8 [7, 7, 3]: object, colour and state of the tiles that it sees
    "MiniGridImage-v0": ImgObsWrapper,
    # uint8 [2835]: the same and the letters of the mission, one-hot
    "MiniGridFlat-v0": FlatObsWrapper,
    "MiniGridDict-v0": partial(gym.wrappers.FilterObservation, filter_keys=["direction", "image"]),
}


def make(wrapper, env_id="MiniGrid-Empty-5x5-v0", **kwargs):
    return wrapper(gym.make(env_id, **kwargs))


for name, wrapper in WRAPPERS.items():
    gym.register(name, partial(make, wrapper))
