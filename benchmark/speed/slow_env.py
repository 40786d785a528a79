"""Slow-v0: PoissonGraph-v0 whose steps cost a given time, as simulators do. With this folder on
PYTHONPATH: --env-id slow_env:Slow-v0 --env-kwargs '{"milliseconds": 1, "sleep": false}'."""

import sys
import time
from pathlib import Path

import gymnasium as gym

sys.path.append(str(Path(__file__).parents[2]))

from cleanrl_graph.envs.toy import PoissonGraphEnv  # noqa: E402


class SlowEnv(PoissonGraphEnv):
    """`sleep`: wait, as for a simulator on another machine, else keep the core busy."""

    def __init__(self, milliseconds=1.0, sleep=False, **kwargs):
        super().__init__(**kwargs)
        self.seconds, self.sleep = milliseconds / 1000, sleep

    def step(self, action):
        end = time.perf_counter() + self.seconds
        result = super().step(action)
        if self.sleep:
            time.sleep(max(0.0, end - time.perf_counter()))
        while time.perf_counter() < end:
            pass
        return result


gym.register("Slow-v0", entry_point=SlowEnv)
