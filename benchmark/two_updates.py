"""Runs a script and ends it after two updates; its log has their losses (fingerprint.py).

    python benchmark/two_updates.py SCRIPT FLAGS

It imports nothing of cleanrl_graph: the package is the one that the script finds.
"""

import collections
import os
import runpy
import sys
from pathlib import Path
from typing import Any

LOSSES = ("policy_loss", "value_loss", "entropy")  # of the last minibatch of an update
UPDATES = 2


def main() -> None:
    from torch.utils.tensorboard import SummaryWriter

    add_scalar, counts = SummaryWriter.add_scalar, collections.Counter()

    def count(self: Any, tag: str, *args: Any, **kwargs: Any) -> None:
        add_scalar(self, tag, *args, **kwargs)
        counts[tag] += 1
        if all(counts[f"losses/{name}"] == UPDATES for name in LOSSES):
            self.flush()
            os._exit(0)

    SummaryWriter.add_scalar = count
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
