"""cleanrl_graph, checks of flags, spaces and what environments return: each is a sentence.

A script hands over its leaves, parts and arrays, and what makes its errors. The checks look at the
arrays of all environments at once. Only where something is wrong do they look for the culprit.
"""

import inspect
import math
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from cleanrl_graph.envs import wrappers

POSITIVE = (
    "num_envs num_steps num_minibatches update_epochs gnn_layers gnn_dim eval_max_steps "
    "hidden_dims lstm_dim dim num_heads num_layers bc_minibatch_size"
)
NOT_NEGATIVE = (
    "num_workers env_timeout checkpoint_every checkpoint_minutes total_timesteps eval_episodes "
    "eval_samples memory_length learning_rate target_kl max_grad_norm pg_coef "
    "aux_coef bc_coef bc_anneal bc_updates norm_vloss"
)
RANGES = [
    (POSITIVE, 1, math.inf),
    (NOT_NEGATIVE, 0, math.inf),
    ("gamma gae_lambda clip_coef stay_solved", 0, 1),
    ("ent_coef vf_coef", -math.inf, math.inf),
    ("seed", 0, 2**32 - 1),
]
LARGEST = 3e38  # a bit less than the largest float32, 3.4e38
LENGTHS = {"step": 5, "reset": 2}  # of what gymnasium's environments return
MOST = 10_000_000  # categories: a network has a row of weights for each


# ---- Flags, and the code of others ----
def flags(error: type, args: Any, max_minibatches: int, world_size: int) -> None:
    """`error` for a flag without a meaning. Minibatches are made of the steps of a rollout, or of
    all steps of some environments: there are at most `max_minibatches`."""
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
        parts = f"the {max_minibatches} steps of a rollout"
        if max_minibatches == args.num_envs:
            parts = f"--num-envs {args.num_envs}, which it shares out"
        raise error(f"--num-minibatches {args.num_minibatches} exceeds {parts}")
    batch_size = args.num_envs * args.num_steps
    if 0 < args.total_timesteps < batch_size * world_size:
        problem = f"is less than a rollout of {batch_size * world_size} steps"
        raise error(f"--total-timesteps {args.total_timesteps} {problem}")


def in_range(name: str, value: float, least: float, most: float) -> bool:
    """Whether a flag may have a value; only --max-grad-norm may be infinite."""
    return least <= value <= most and (name == "max_grad_norm" or not math.isinf(value))


def guarded(error: type, doing: str, function: Callable, *args, **kwargs) -> Any:
    """function(*args, **kwargs). An exception becomes `error`: the frames of others' code, then a
    sentence. Where `doing` ends with step or reset the result must be what gymnasium's return."""
    try:
        result = function(*args, **kwargs)
    except error:
        raise
    except (Exception, SystemExit) as problem:
        script = inspect.currentframe().f_back.f_code.co_filename
        sentence = f"{doing}{args or ''}: {text_of(problem)}"
        raise error(frames(problem, script) + sentence) from None
    length = LENGTHS.get(doing.rpartition(" ")[2])
    if length and (not isinstance(result, tuple) or len(result) != length):
        needed = f"gymnasium's environments return {length} values, not {str(result)[:200]}"
        raise error(f"{doing}: {needed}")
    problem = length == 5 and wrong_outcome(*result[2:])
    if problem:
        raise error(f"{doing}: {problem}")
    return result


def text_of(problem: BaseException) -> str:
    """Its kind and what it says, if that can be read."""
    kind = type(problem).__name__
    try:
        return f"{kind}: {problem}"
    except Exception:  # of many kinds
        return kind


def frames(problem: BaseException, script: str) -> str:
    """The traceback below the frames of the file `script` and of --wrap; none of errors that say
    enough."""
    if isinstance(problem, (gym.error.Error, OSError, ModuleNotFoundError)):
        return ""
    trace = problem.__traceback__.tb_next  # the first frame is that of `guarded`
    while trace and trace.tb_frame.f_code.co_filename in (script, wrappers.__file__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(problem), problem, trace))


def close(env: gym.Env) -> None:
    """Closes it. What goes wrong is only printed, lest what was trained or played is lost."""
    try:
        env.close()
    except (Exception, SystemExit) as problem:  # of many kinds
        print(f"close() of {env}: {text_of(problem)}", file=sys.stderr)


# ---- Spaces ----
def spaces_fit(error: type, envs: list[gym.Env], parts: list[list], leaves: list) -> None:
    """`error` if the actions of the environments, whose `parts` these are, do not mean the same, if
    two leaves have the same name, or if none is an input."""
    # All but the size must be equal. As text: before Python 3.12 slices cannot be hashed
    if len({str([part[:-1] for part in own]) for own in parts}) > 1:
        found = [env.action_space for env in envs]
        raise error(f"--env-kwargs: not all entries have the action space {found[0]}: {found}")
    paths = [leaf.path.replace("/", ".") for leaf in leaves]
    if len(set(paths)) < len(paths) or not any(leaf.is_input for leaf in leaves):
        raise error(f"leaves {paths} need different names, and one must be an input")


# ---- Actions and rewards ----
def parts(
    error: type,
    space: gym.Space,
    factors: list,
    found: list,
    leaves: list,
    heads: list[str],
    choices: list[list[str]],
) -> None:
    """`error` for an action space without a rule, for an action head or a mask that does not fit.
    For each of the `factors` there are one or more parts in `found`, an action head, and the groups
    of rows that the head can mean."""
    known = "Discrete, MultiDiscrete, MultiBinary, float Box, Dict, Tuple and Sequence of these are"
    for factor in factors:
        is_bits = isinstance(factor.space, spaces.MultiBinary)
        is_known = is_bits or factor.kind == "discrete" or factor.dtype.kind == "f"
        is_stacked = getattr(space, "stack", False) and factor.path != "action"
        if factor.group or is_stacked or not is_known:
            raise error(f"action space {space} is not supported ({known})")
    sizes(error, space, found, leaves)
    head_fits(error, space, factors, leaves, heads, choices)
    masks_fit(error, space, found, leaves, heads)


def sizes(error: type, space: gym.Space, found: list, leaves: list) -> None:
    """`error` for an action without parts or options, for more than MOST categories in an action or
    an input, or for node_ids that are no integers."""
    if min([part.size for part in found], default=0) < 1:
        raise error(f"action space {space} is not supported, there is nothing to choose")
    for leaf in leaves:
        if leaf.kind == "discrete" and leaf.is_input and num_options(leaf.space).sum() > MOST:
            raise error(
                f"leaf '{leaf.path}': {leaf.space} has over {MOST} values; a Box has numbers"
            )
        if leaf.path == "node_ids" and leaf.dtype.kind not in "iu":
            raise error(f"leaf 'node_ids': {leaf.space} must be integers")
    for part in found:
        if part.kind == "categorical" and part.size > MOST:
            raise error(f"action space {space} has over {MOST} options")


def num_options(space: gym.Space) -> np.ndarray:
    """The number of values of each entry of a Discrete or MultiDiscrete space."""
    return np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def head_fits(
    error: type, space: gym.Space, factors: list, leaves: list, heads: list, choices: list
) -> None:
    """`error` for an action head that cannot be, or can be several things."""
    per_row = isinstance(space, spaces.Sequence)
    for factor, head, groups in zip(factors, heads, choices):
        is_flat = head == "flat" and not per_row
        is_choice = len(groups) == 1 and (per_row or factor.kind == "discrete")
        if not is_flat and not is_choice:
            known = sorted({leaf.group for leaf in leaves if leaf.group and leaf.is_input})
            needed = "needs Discrete actions or a Sequence, and one graph or set"
            raise error(f"--action-head {head} {needed}, not {space} and {known}")


def masks_fit(error: type, space: gym.Space, found: list, leaves: list, heads: list) -> None:
    """`error` for a mask that has not one entry for each option of the parts that it masks."""
    for mask in leaves:
        if mask.path.split(".")[0] != "action_mask":
            continue
        masked = [part for part in found if part.mask == mask.path]
        num_entries = max((part.entries.stop for part in masked), default=None)
        groups = {part.group for part in masked}
        if num_entries != math.prod(mask.shape) or len(groups) > 1:
            head = " ".join(sorted(set(heads)))
            problem = f"a mask {mask.space} does not fit {space} with --action-head {head}"
            raise error(f"leaf '{mask.path}': {problem}")


def wrong_outcome(terminated: Any, truncated: Any, info: Any) -> str | None:
    """What is wrong with what a step returns beside observation and reward."""
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        is_bool = isinstance(value, (bool, np.bool_))
        if not is_bool and not (is_number(value) and value in (0, 1)):
            return f"{name} is {value!r}, not True or False"
    if info is not None and not isinstance(info, dict):
        return f"info is {info!r}, not a dict"
    return wrong_report(info) if info and (terminated or truncated) else None


def wrong_report(info: dict) -> str | None:
    """What is wrong with what `info` says about an episode that ends."""
    group = info.get("group")
    report = info.get("eval", {})
    if not isinstance(report, dict):
        return f"info['eval'] is {report!r}, not a dict"
    for name in report:
        if name in ("instance", "greedy") or str(name).startswith("best of "):
            return f"info['eval'] has the name {name!r}, a column of the evaluation's own"
    numbers = [report.get("cost", 0)]
    episode = info.get("episode")
    if isinstance(episode, dict):
        numbers += [episode.get("r", 0), episode.get("l", 0)]
    for value in numbers:
        if not is_number(value):
            return f"{value!r} in info['episode'] or info['eval'] is not a finite number"
    try:
        hash(group)
        pickle.dumps((group, report))
        "".join(report)  # its names
    except Exception as problem:  # of many kinds
        return f"info['group'] {group!r} with info['eval'] {report!r}: {text_of(problem)}"
    return None


def is_number(value: Any) -> bool:
    """Whether it is a finite number, or an array of one."""
    try:
        return math.isfinite(np.ravel(value).item())
    except Exception:  # of many kinds
        return False


def outcome(error: Callable, i: int, reward: Any, info: dict, parts: list) -> None:
    """`error(i, sentence)` for a reward that is no finite number, or a mask that comes too late."""
    if getattr(reward, "requires_grad", False):
        raise error(i, f"reward {reward} requires gradients, which must be detached")
    try:
        is_finite = math.fabs(reward + 0.0) < LARGEST  # + 0.0: Envs adds it to a float
    except Exception:  # of many kinds
        raise error(i, f"reward {reward!r} is not a number") from None
    if not is_finite:
        raise error(i, f"reward {reward} is not finite")
    if "action_mask" in info and not any(part.mask for part in parts):
        raise error(i, "info has an action_mask, the first reset had none")


def rewards(error: Callable, i: int, info: dict, num_agents: int) -> None:
    """`error(i, sentence)` if info["rewards"] has not one finite number for each row that acted."""
    try:
        values = np.array(info["rewards"], np.float64)
    except Exception as problem:  # of many kinds
        needed = f"one number for each of the {num_agents} rows that acted is needed"
        raise error(i, f"info['rewards']: {text_of(problem)}; {needed}") from None
    if values.shape != (num_agents,):
        acted = f"{num_agents} rows acted"
        raise error(i, f"info['rewards'] has the shape {values.shape}, but {acted}")
    bad = ~(np.abs(values) < LARGEST)
    if bad.any():
        raise error(i, f"info['rewards'] is {values[bad][0]} in row {bad.argmax()}")


def agents(
    error: Callable, i: int, leaves: list, arrays: list, group: str, num_agents: int
) -> None:
    """`error(i, sentence)` if rows without ids, whose places tell which is which, are now more or
    fewer than those that acted."""
    own = {leaf.path: array for leaf, array in zip(leaves, arrays) if leaf.group == group}
    num = len(np.atleast_1d(next(iter(own.values()))))  # what is no row at all is found later
    if "node_ids" not in own and num != num_agents:
        needed = "without node_ids an episode keeps their number"
        raise error(i, f"{num} rows of '{group}' where {num_agents} acted; {needed}")


# ---- Observations ----
def observations(error: Callable, leaves: list, parts: list, arrays: list, envs: list) -> None:
    """`error(i, sentence, leaf)` for the first of `envs` whose leaf arrays, arrays[b] of env
    envs[b], are not what the spaces say. `parts` are those of all environments."""
    if first_problem(leaves, [parts[i] for i in envs], arrays) is None:
        return
    for i, own in zip(envs, arrays):
        problem = first_problem(leaves, [parts[i]], [own])
        if problem:
            leaf, sentence = problem
            raise error(i, sentence, leaf)


def first_problem(leaves: list, parts: list, arrays: list) -> tuple | None:
    """(leaf, sentence) of the first thing that is wrong in the observations of N environments, None
    if nothing is. It is meant to be shown if N is 1: else its numbers may be another's."""
    counts = {None: np.ones(len(arrays), np.int64)}  # group -> rows of each environment
    flat = []  # per leaf the rows of all environments
    for leaf, rows in zip(leaves, zip(*arrays)):
        sentence = wrong_form(leaf, rows, counts)
        if sentence:
            return leaf, sentence
        values = np.concatenate(rows) if leaf.group else np.array(rows)
        if leaf.dtype.kind == "f":
            values = values.astype(leaf.dtype, copy=False)  # too large a number becomes inf
        flat.append(values)
        sentence = wrong_choice(leaf, values, counts[leaf.group], parts)
        if sentence:
            return leaf, sentence
    for leaf, values in zip(leaves, flat):
        sentence = wrong_value(leaf, values, counts)
        if sentence:
            return leaf, sentence
    return None


def wrong_form(leaf: Any, rows: tuple, counts: dict) -> str | None:
    """What is wrong with dtypes, shapes, or the numbers of rows. The first leaf of a group adds its
    numbers of rows [N] to `counts`; those of the others must be equal."""
    allowed = "biu" if leaf.dtype.kind in "iu" else "biuf"
    ragged = ("rows",) if leaf.group else ()
    num_axes = len(ragged) + len(leaf.shape)
    for array in rows:
        if array.dtype.kind not in allowed:
            declared = leaf.space.dtype or leaf.dtype
            return f"dtype {array.dtype} where {declared} is declared"
        if array.ndim != num_axes or array.shape[len(ragged) :] != leaf.shape:
            return f"shape {array.shape} where {ragged + leaf.shape} is declared"
    if leaf.group:
        num = np.fromiter(map(len, rows), np.int64, len(rows))
        expected = counts.setdefault(leaf.group, num)
        if (num != expected).any():
            problem = f"{num[0]} rows where '{leaf.group}' has {expected[0]}"
            edges = [rows[0] for group, rows in counts.items() if str(group).endswith("edge_links")]
            if leaf.path == "action_mask" and num[0] in edges:
                problem += ": for a mask of edges give --action-head edges"
            return problem
    return None


def wrong_choice(leaf: Any, values: np.ndarray, num: np.ndarray, parts: list) -> str | None:
    """What is wrong with ids, with the number of rows to choose from, or with a mask."""
    shown = values if leaf.group else values[0]
    if leaf.path == "node_ids" and occurs_twice(leaf, values, num):
        _, first = np.unique(values, return_index=True)
        again = np.delete(np.arange(values.size), first)
        return f"the id {values.flat[again[0]]} occurs twice, at index {again[0]} again"
    for k, part in enumerate(parts[0]):
        if part.kind == "choice" and part.group == leaf.group:
            most = np.array([own[k].size for own in parts])
            if ((num == 0) | (num > most)).any():
                return f"{num[0]} rows to choose from, the action space has {most[0]}"
        if part.mask == leaf.path and is_all_masked(leaf, values, num, part):
            return f"all actions are masked: {shown.tolist()}"
    return None


def occurs_twice(leaf: Any, ids: np.ndarray, num: np.ndarray) -> bool:
    """Whether an id does so in the observation of an environment."""
    ids = ids.ravel()
    env = np.arange(len(num)).repeat(num * math.prod(leaf.shape))
    order = np.lexsort([ids, env])
    is_same = (np.diff(ids[order]) == 0) & (np.diff(env[order]) == 0)
    return is_same.any()


def is_all_masked(leaf: Any, mask: np.ndarray, num: np.ndarray, part: Any) -> bool:
    """Whether an observation, or a row that acts, allows no option."""
    allowed = mask.reshape(len(mask), math.prod(leaf.shape))[:, part.entries] != 0
    if part.kind != "choice":
        return not allowed.any(1).all()
    num_allowed = np.append(0, allowed[:, 0].cumsum())  # in the rows so far
    ends = num.cumsum()
    return (num_allowed[ends] == num_allowed[ends - num]).any()


def wrong_value(leaf: Any, values: np.ndarray, counts: dict) -> str | None:
    bad = out_of_range(leaf, values, counts)
    if not bad.any():
        return None
    where = ""
    if leaf.group:
        where = f" in row {np.argwhere(bad)[0][0]}"
    if leaf.kind == "links":
        where += f" of a graph with {counts[leaf.nodes][0]} nodes"
    return f"value {values[bad][0]}{where}"


def out_of_range(leaf: Any, values: np.ndarray, counts: dict) -> np.ndarray:
    """Where the values of a leaf are not finite, no node of their graph, no category, or not of its
    dtype, in which they would become others."""
    if leaf.dtype.kind == "f":
        return ~np.isfinite(values)
    if leaf.kind == "links":
        num_nodes = counts[leaf.nodes].repeat(counts[leaf.group])
        return (values < 0) | (values >= num_nodes[:, None])
    if leaf.kind == "discrete":
        num = num_options(leaf.space)
        return (values < leaf.space.start) | (values >= leaf.space.start + num)
    bad = np.zeros(values.shape, bool)
    for dtype in (leaf.dtype, leaf.space.dtype):  # uint16 is kept as int64
        if values.dtype != dtype:
            bad |= values.astype(dtype) != values
    return bad


def losses(error: type, iteration: int, names: tuple, logs: np.ndarray) -> None:
    """`error` for the first value that is not finite in what an update logged, [minibatches,
    names]."""
    bad = np.argwhere(~np.isfinite(logs))
    if len(bad):
        k, column = bad[0]
        raise error(
            f"update {iteration}, minibatch {k}: {names[column]} is {logs[k, column]}; rewards and "
            "observations are finite, so look at their size, the network and --learning-rate"
        )
