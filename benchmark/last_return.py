"""Prints the mean return of the last 500 episodes of a run's training.

    python benchmark/last_return.py runs/GraphExplore-v0__per_node__1__*
"""

import sys

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

log = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
log.Reload()
print(np.mean([event.value for event in log.Scalars("charts/episodic_return")[-500:]]))
