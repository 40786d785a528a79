"""cleanrl_graph, checks of flags, spaces and what environments return: each is a sentence.

A script hands over its leaves, parts and arrays, and what makes its errors. The checks look at the
arrays of all environments at once. Only where something is wrong do they look for the culprit.
"""

import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

POSITIVE = (
    "num_envs num_steps num_minibatches update_epochs gnn_layers gnn_dim eval_max_steps "
    "hidden_dims bc_minibatch_size"
)
NOT_NEGATIVE = (
    "num_workers env_timeout checkpoint_every total_timesteps eval_episodes eval_samples "
    "learning_rate target_kl max_grad_norm torch_threads adv_std_floor pg_coef aux_coef bc_coef "
    "bc_anneal bc_updates max_lag"
)
RANGES = [
    (POSITIVE, 1, math.inf),
    (NOT_NEGATIVE, 0, math.inf),
    ("gamma gae_lambda clip_coef", 0, 1),
    ("ent_coef vf_coef", -math.inf, math.inf),
    ("seed", 0, 2**32 - 1),
]


def flags(error: type, args: Any, max_minibatches: int, world_size: int) -> None:
    """`error` for a flag without a meaning. `max_minibatches` are those that a rollout gives."""
    for names, least, most in RANGES:
        for name in names.split():
            for value in np.ravel(getattr(args, name, None)):  # not all scripts have all
                if value is not None and not in_range(name, value, least, most):
                    flag = f"--{name.replace('_', '-')} {value}"
                    raise error(f"{flag}: a number from {least} to {most} is needed")
    if args.gnn in ("gatv2", "transformer") and args.gnn_dim % 4:
        problem = f"the 4 heads of --gnn {args.gnn} need a multiple of 4"
        raise error(f"--gnn-dim {args.gnn_dim}: {problem}")
    tasks = args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]
    if not tasks or not all(isinstance(task, dict) for task in tasks):
        needed = "an object, or a list of at least one, is needed"
        raise error(f"--env-kwargs {args.env_kwargs}: {needed}")
    if args.num_minibatches > max_minibatches:
        problem = f"a rollout can be shared out among at most {max_minibatches}"
        raise error(f"--num-minibatches {args.num_minibatches}: {problem}")
    batch_size = args.num_envs * args.num_steps
    if 0 < args.total_timesteps < batch_size * world_size:
        problem = f"is less than a rollout of {batch_size} steps"
        raise error(f"--total-timesteps {args.total_timesteps} {problem}")


def in_range(name: str, value: float, least: float, most: float) -> bool:
    """Whether a flag may have a value; only --max-grad-norm may be infinite."""
    return least <= value <= most and (name == "max_grad_norm" or not math.isinf(value))


def guarded(error: type, doing: str, function: Callable, *args, **kwargs) -> Any:
    """function(*args, **kwargs). An exception becomes `error`: the frames of others' code, then a
    sentence. What an environment's step or reset returns must be a tuple of 5 or 2."""
    try:
        result = function(*args, **kwargs)
    except error:
        raise
    except (Exception, SystemExit) as problem:
        frames = ""
        if not isinstance(problem, (gym.error.Error, OSError, ModuleNotFoundError)):  # say enough
            trace = problem.__traceback__.tb_next
            frames = "".join(traceback.format_exception(type(problem), problem, trace))
        sentence = f"{doing}{args or ''}: {type(problem).__name__}: {problem}"
        raise error(frames + sentence) from None
    length = {"step": 5, "reset": 2}.get(doing.rpartition(" ")[2])
    if length and (not isinstance(result, tuple) or len(result) != length):
        needed = f"gymnasium's environments return {length} values, not {str(result)[:200]}"
        raise error(f"{doing}: {needed}")
    return result


def parts(
    error: type, space: Any, factors: list, found: list, masks: dict, heads: list[str]
) -> None:
    """`error` for an action space without a rule, or a mask that does not fit its parts `found`,
    of which there is one or more per entry of `factors` and `heads`."""
    known = "Discrete, MultiDiscrete, MultiBinary, float Box, Dict, Tuple and Sequence of these are"
    for factor, part in ((factor, part) for factor in factors for part in found):
        stacked = getattr(space, "stack", False) and factor.path != "action"
        is_integer = factor.kind in ("vector", "image") and factor.dtype.kind != "f"
        if part.path != factor.path:
            continue
        if factor.group or stacked or (is_integer and part.kind != "bits"):
            raise error(f"action space {space} is not supported ({known})")
    for path, mask in masks.items():
        masked = [part for part in found if part.mask == path]
        num_entries = max((part.entries.stop for part in masked), default=None)
        groups = {part.group for part in masked}
        if num_entries != math.prod(mask.shape) or len(groups) > 1:
            head = " ".join(sorted(set(heads)))
            problem = f"a mask {mask.space} does not fit {space} with --action-head {head}"
            raise error(f"leaf '{path}': {problem}")


def outcome(error: Callable, i: int, reward: Any, info: dict, parts: list) -> None:
    """`error(i, sentence)` for a reward that is no finite number, or a mask that comes too late."""
    try:
        is_finite = abs(float(reward)) < 3e38
    except (TypeError, ValueError) as problem:
        raise error(i, f"reward {reward!r}: {type(problem).__name__}: {problem}") from None
    if not is_finite:
        raise error(i, f"reward {reward} is not finite")
    if "action_mask" in info and not any(part.mask for part in parts):
        raise error(i, "info has an action_mask, the first reset had none")


def observations(error: Callable, leaves: list, parts: list, arrays: list, envs: list) -> None:
    """`error(i, sentence, leaf)` for the first of `envs` whose leaf arrays, arrays[b] of env
    envs[b], are not what the spaces say. `parts` are those of all environments."""
    parts = [parts[i] for i in envs]
    if next(problems(leaves, parts, arrays), None) is None:
        return
    for b, i in enumerate(envs):
        for leaf, sentence in problems(leaves, parts[b : b + 1], arrays[b : b + 1]):
            raise error(i, sentence, leaf)


def problems(leaves: list, parts: list, arrays: list) -> Iterator[tuple]:
    """(leaf, sentence) for what is wrong in the observations of N environments."""
    counts = {}  # group -> rows of each environment
    flat = {}  # path -> the rows of all environments
    for leaf, rows in zip(leaves, zip(*arrays)):
        shapes = {array.shape[bool(leaf.group) :] for array in rows}
        kinds = {array.dtype.kind for array in rows}
        allowed = "biu" if leaf.dtype.kind in "iu" else "biuf"
        if not kinds <= set(allowed):
            declared = leaf.space.dtype or leaf.dtype
            yield leaf, f"dtype {rows[0].dtype} where {declared} is declared"
            return
        if shapes != {leaf.shape} or leaf.group and any(array.ndim == 0 for array in rows):
            declared = (*(("rows",) if leaf.group else ()), *leaf.shape)
            yield leaf, f"shape {rows[0].shape} where {declared} is declared"
            return
        if leaf.group:
            num = np.fromiter(map(len, rows), np.int64, len(rows))
            expected = counts.setdefault(leaf.group, num)
            if (num != expected).any():
                yield leaf, f"{num[0]} rows where '{leaf.group}' has {expected[0]}"
                return
        flat[leaf.path] = np.concatenate(rows) if leaf.group else np.array(rows)
        yield from choices(leaf, flat[leaf.path], counts.get(leaf.group), parts)
    for leaf in leaves:
        yield from values(leaf, flat[leaf.path], counts)


def choices(leaf: Any, values: np.ndarray, num: np.ndarray | None, parts: list) -> Iterator[tuple]:
    """What is wrong with ids, with the number of rows to choose from, and with masks."""
    if leaf.path == "node_ids":
        batch = np.arange(len(num)).repeat(num)
        pairs = np.unique(np.stack([batch, values], 1), axis=0)
        if len(pairs) < len(values):
            yield leaf, f"an id occurs twice: {values.tolist()}"
    for k, part in enumerate(parts[0]):
        is_choice = part.kind == "choice"
        if is_choice and part.group == leaf.group:
            most = np.array([own[k].size for own in parts])
            if ((num == 0) | (num > most)).any():
                yield leaf, f"{num[0]} rows to choose from, the action space has {most[0]}"
        if part.mask == leaf.path:
            allowed = values.reshape(len(values), math.prod(leaf.shape))[:, part.entries] != 0
            if is_choice:
                ends = np.append(0, allowed[:, 0].cumsum())[num.cumsum()]
                has_option = np.diff(ends, prepend=0) > 0
            else:
                has_option = allowed.any(1)
            if not has_option.all():
                yield leaf, f"all actions are masked: {values.tolist()}"


def values(leaf: Any, values: np.ndarray, counts: dict) -> Iterator[tuple]:
    """What is wrong with the values of a leaf of N environments."""
    bad = out_of_range(leaf, values, counts)
    if not bad.any():
        return
    where = ""
    if leaf.group:
        where = f" in row {np.argwhere(bad)[0][0]}"
    if leaf.kind == "links":
        where += f" of a graph with {counts[leaf.nodes][0]} nodes"
    yield leaf, f"value {values[bad][0]}{where}"


def out_of_range(leaf: Any, values: np.ndarray, counts: dict) -> np.ndarray:
    """Where the values of a leaf are not finite, no node of their graph, or no category."""
    if leaf.dtype.kind == "f":
        return ~np.isfinite(values)
    if leaf.kind == "links":
        num_nodes = counts[leaf.nodes].repeat(counts[leaf.group])
        return (values < 0) | (values >= num_nodes[:, None])
    if leaf.kind in ("discrete", "multidiscrete"):
        num = leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec
        return (values < leaf.space.start) | (values >= leaf.space.start + num)
    return np.zeros(values.shape, bool)
