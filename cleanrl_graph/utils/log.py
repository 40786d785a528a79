"""cleanrl_graph, what the log of a run has beside its losses: flags, groups, sizes, wandb."""

import math
import os
from typing import Any

import numpy as np


def begin(run: Any) -> None:
    """--track: logs the run with Weights and Biases, which reads the TensorBoard log that is opened
    after this."""
    if not run.args.track:
        return
    import wandb

    name = os.path.basename(run.folder)
    wandb.init(
        project=run.args.wandb_project_name,
        entity=run.args.wandb_entity,
        sync_tensorboard=True,
        config=vars(run.args),
        name=name,
        id=name,
        resume="allow",
        save_code=True,
    )


def log(run: Any, iteration: int, episodes: list[tuple], storage: Any) -> dict[str, float]:
    """Scalars of what is stored. Logs the groups of the episodes and, after the first update, the
    flags."""
    if iteration == run.first + 1:
        flags(run, run.first * run.steps)
    groups(run, episodes)
    return sizes(storage.leaves, storage.whole())


def flags(run: Any, global_step: int) -> None:
    """A table of all flags."""
    rows = [f"|{name}|{value}|" for name, value in vars(run.args).items()]
    table = "\n".join(["|param|value|", "|-|-|", *rows])
    run.writer.add_text("hyperparameters", table, global_step)


def groups(run: Any, episodes: list[tuple]) -> None:
    """Returns and lengths of (global step, Episode) under the names of their groups: info["group"]
    and the entry of --env-kwargs."""
    tasks = run.args.env_kwargs
    for global_step, episode in episodes:
        names = [episode.group]
        if isinstance(tasks, list) and len(tasks) > 1:
            names.append(f"task_{episode.env % len(tasks)}")
        for name in names:
            if name is not None:
                run.writer.add_scalar(f"charts/episodic_return/{name}", episode.ret, global_step)
                run.writer.add_scalar(f"charts/episodic_length/{name}", episode.length, global_step)


def sizes(leaves: list, flat: Any) -> dict[str, float]:
    """Of stored observations: bytes of each, the share that padding would waste, rows per group."""
    scalars = {}
    used = 0
    padded = 0
    for leaf in leaves:
        num = flat.counts[leaf.group] if leaf.group else np.ones(flat.size, np.int64)
        row_bytes = leaf.dtype.itemsize * math.prod(leaf.shape)
        used += int(num.sum()) * row_bytes
        padded += int(num.max()) * flat.size * row_bytes
        if leaf.group:
            scalars[f"charts/rows/{leaf.group}"] = num.mean()
    scalars["charts/obs_bytes_per_step"] = used / flat.size
    scalars["charts/padding_avoided"] = (padded - used) / (padded or 1)
    return scalars
