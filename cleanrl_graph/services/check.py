"""cleanrl_graph, checks of flags, spaces and what environments return: each is a sentence.

A script knows nothing of them. `make_env` puts wrappers around its environments, and `checked`
makes a class of its `Envs` that looks at the arrays of all environments at once. Only where
something is wrong does it look for the culprit.
"""

import contextlib
import math
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
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
    "aux_coef bc_coef bc_anneal bc_updates norm_vloss adv_floor"
)
RANGES = [
    (POSITIVE, 1, math.inf),
    (NOT_NEGATIVE, 0, math.inf),
    ("gamma gae_lambda clip_coef adv_floor_decay", 0, 1),
    ("ent_coef vf_coef", -math.inf, math.inf),
    ("seed", 0, 2**32 - 1),
]
LARGEST = 3e38  # a bit less than the largest float32, 3.4e38
MOST = 10_000_000  # categories: a network has a row of weights for each
DISCRETE = (spaces.Discrete, spaces.MultiDiscrete)


class UsageError(ValueError):
    """A sentence that says what was wrong, where, and what to do, shown without a traceback."""


# ---- Flags, and the code of others ----
def flags(args: Any) -> None:
    """UsageError for a flag without a meaning."""
    for names, least, most in RANGES:
        for name in names.split():
            for value in np.ravel(getattr(args, name, None)):  # not all scripts have all
                if value is None or least <= value <= most and not math.isinf(value):
                    continue
                if name != "max_grad_norm" or value != math.inf:
                    flag = f"--{name.replace('_', '-')} {value}"
                    raise UsageError(f"{flag}: a number from {least} to {most} is needed")
    if args.gnn in ("gatv2", "transformer") and args.gnn_dim % 4:
        problem = f"the 4 heads of --gnn {args.gnn} need a multiple of 4"
        raise UsageError(f"--gnn-dim {args.gnn_dim}: {problem}")
    if not entries(args) or not all(isinstance(entry, dict) for entry in entries(args)):
        needed = "an object, or a list of at least one, is needed"
        raise UsageError(f"--env-kwargs {args.env_kwargs}: {needed}")
    batch_size = args.num_envs * args.num_steps
    if args.num_minibatches > batch_size:
        problem = f"exceeds the {batch_size} steps of a rollout"
        raise UsageError(f"--num-minibatches {args.num_minibatches} {problem}")
    num_steps = batch_size * int(os.environ.get("WORLD_SIZE", 1))
    if 0 < args.total_timesteps < num_steps:
        problem = f"is less than a rollout of {num_steps} steps"
        raise UsageError(f"--total-timesteps {args.total_timesteps} {problem}")


def entries(args: Any) -> list[dict]:
    """Those of --env-kwargs."""
    return args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]


def guarded(doing: str, function: Callable, *args, **kwargs) -> Any:
    """function(*args, **kwargs). An exception becomes a UsageError: the frames of others' code,
    then `doing` and what it says."""
    try:
        return function(*args, **kwargs)
    except UsageError:
        raise
    except (Exception, SystemExit) as problem:
        raise UsageError(f"{frames(problem)}{doing}: {text_of(problem)}") from None


def text_of(problem: BaseException) -> str:
    """Its kind and what it says, if that can be read."""
    kind = type(problem).__name__
    try:
        return f"{kind}: {problem}"
    except Exception:  # of many kinds
        return kind


def frames(problem: BaseException) -> str:
    """The traceback below the frames of this file, of a script's make_env and of --wrap; none of
    errors that say enough."""
    if isinstance(problem, (gym.error.Error, OSError, ModuleNotFoundError)):
        return ""
    trace = problem.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        is_ours = code.co_filename in (__file__, wrappers.__file__)
        if not is_ours and code.co_name != "make_env":
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(problem), problem, trace))


# ---- Environments: what they return ----
class Checked(gym.Wrapper):
    """Raises UsageError, with number, step and action, for what goes wrong in the environment, and
    for what is not as gymnasium's return it. It does what RecordEpisodeStatistics does, unless one
    is inside. At an episode's end the outermost one, which has a number, lets go what no script
    reads in info, and adds "episode" where a wrapper around the record ended it."""

    latest = None  # the outermost one that was called last in this process
    place = ""  # its number and step
    number = None  # over all ranks
    num_steps = 0
    num_acted = None  # rows that acted before the present observation, if its episode goes on
    has_agents = False  # which need info["rewards"]

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.records = not env.has_wrapper_attr("episode_returns")
        self.has_mask = True  # of a wrapper outside

    def reset(self, **kwargs) -> tuple:
        obs, info = self.call(2, "reset", **kwargs)
        self.num_acted = None
        if self.records:
            self.episode_returns = 0.0
            self.episode_lengths = 0
        return obs, info or {}

    def step(self, action: Any) -> tuple:
        self.num_steps += 1
        obs, reward, terminated, truncated, info = self.call(5, "step", action)
        info = info or {}
        problem = wrong_outcome(reward, terminated, truncated, info)
        if "action_mask" in info and not self.has_mask:
            problem = "info has an action_mask, the first reset had none"
        if self.has_agents:
            self.num_acted = None if terminated else len(action)
            problem = problem or wrong_rewards(info, len(action))
        if problem:
            raise UsageError(f"{self.place}: {problem}")
        reward = number_of(reward)
        if self.records:
            self.episode_returns += reward
            self.episode_lengths += 1
        if terminated or truncated:
            info = self.last_info(info, terminated)
        return obs, reward, bool(terminated), bool(truncated), info

    def call(self, length: int, method: str, *args, **kwargs) -> tuple:
        """What `reset` or `step` returns."""
        if self.number is not None:
            Checked.latest = self
            Checked.place = f"env {self.number}, step {self.num_steps}"
        doing = f"{self.place}, {method}{args or ''}"
        result = guarded(doing, getattr(self.env, method), *args, **kwargs)
        if not isinstance(result, tuple) or len(result) != length:
            needed = f"gymnasium's environments return {length} values, not {str(result)[:200]}"
            raise UsageError(f"{doing}: {needed}")
        return result

    def last_info(self, info: dict, terminated: bool) -> dict:
        """That of a step which ends an episode. Where only a life of a game ended it has no
        "episode"."""
        episode = {}
        if self.records or not terminated or info.get("lives", 0) == 0:
            episode["r"] = self.get_wrapper_attr("episode_returns")
            episode["l"] = self.get_wrapper_attr("episode_lengths")
        if isinstance(info.get("episode"), dict):
            episode |= info["episode"]
        if self.number is not None:
            info = {key: info[key] for key in ("group", "eval", "rewards") if key in info}
        if "r" in episode:
            info = info | {"episode": {name: number_of(episode[name]) for name in ("r", "l")}}
        return info


def make_env(script: ModuleType, args: Any, i: int = 0, /, **more) -> gym.Env:
    """The script's environment i of all ranks, with `more` keyword arguments, in the wrappers of
    --wrap. `envs:NAME` is one of cleanrl_graph unless the current folder has a module `envs`."""
    env_id, hint = wrappers.full_id(args.env_id)
    full = SimpleNamespace(**{**vars(args), "env_id": env_id})
    env = guarded(f"--env-id {args.env_id} ({hint})", script.make_env, full, i, **more)
    if type(env) is gym.wrappers.RecordEpisodeStatistics:  # it fails where info is None
        env = Checked(env.env)
    return wrappers.wrap_all(env, args.wrap)


def close(env: gym.Env) -> None:
    """Closes it. What goes wrong is only printed, lest what was trained or played is lost."""
    try:
        env.close()
    except (Exception, SystemExit) as problem:  # of many kinds
        print(f"close() of {env}: {text_of(problem)}", file=sys.stderr)


def wrong_outcome(reward: Any, terminated: Any, truncated: Any, info: Any) -> str | None:
    """What is wrong with what a step returns beside the observation."""
    if not isinstance(info, dict):
        return f"info is {info!r}, not a dict"
    for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
        if number_of(value) is None:
            return f"{name} is {value!r}, not a finite number"
    return wrong_report(info) if terminated or truncated else None


def wrong_report(info: dict) -> str | None:
    """What is wrong with what `info` says about an episode that ends."""
    group = info.get("group")
    report = info.get("eval", {})
    episode = info.get("episode")
    try:
        hash(group)
        pickle.dumps((group, report))
        numbers = [report.get("cost", 0)]
        for name in report:
            if name in ("instance", "greedy") or name.startswith("best of "):
                return f"info['eval'] has the name {name!r}, a column of the evaluation's own"
    except Exception as problem:  # of many kinds
        return f"info['group'] {group!r} with info['eval'] {report!r}: {text_of(problem)}"
    if isinstance(episode, dict):
        numbers += [episode.get("r", 0), episode.get("l", 0)]
    for value in numbers:
        if number_of(value) is None:
            return f"{value!r} in info['episode'] or info['eval'] is not a finite number"
    return None


def number_of(value: Any) -> float | None:
    """A finite number, or an array of one, of any kind; None for anything else."""
    try:
        if not isinstance(value, (bool, int, float)):
            value = np.ravel(value).item()
        return value if math.fabs(value + 0.0) < LARGEST else None
    except Exception:  # of many kinds
        return None


def wrong_rewards(info: dict, num_agents: int) -> str | None:
    """What is wrong with info["rewards"], a finite number for each row that acted."""
    try:
        values = np.array(info["rewards"], np.float64)
    except Exception as problem:  # of many kinds
        needed = f"one number for each of the {num_agents} rows that acted is needed"
        return f"info['rewards']: {text_of(problem)}; {needed}"
    if values.shape != (num_agents,):
        return f"info['rewards'] has the shape {values.shape}, but {num_agents} rows acted"
    bad = ~(np.abs(values) < LARGEST)
    return f"info['rewards'] is {values[bad][0]} in row {bad.argmax()}" if bad.any() else None


# ---- Spaces ----
def leaves_fit(leaves: list) -> None:
    """UsageError if two leaves have the same name, if none is an input, for more than MOST
    categories in an input, or for node_ids that are no integers."""
    paths = [leaf.path.replace("/", ".") for leaf in leaves]
    if len(set(paths)) < len(paths) or not any(leaf.is_input for leaf in leaves):
        raise UsageError(f"leaves {paths} need different names, and one must be an input")
    for leaf in leaves:
        is_discrete = isinstance(leaf.space, DISCRETE) and leaf.is_input and not leaf.is_links
        if is_discrete and num_options(leaf.space).sum() > MOST:
            problem = f"{leaf.space} has over {MOST} values; a Box has numbers"
            raise UsageError(f"leaf '{leaf.path}': {problem}")
        if leaf.path == "node_ids" and leaf.dtype.kind not in "iu":
            raise UsageError(f"leaf 'node_ids': {leaf.space} must be integers")


def num_options(space: gym.Space) -> np.ndarray:
    """The number of values of each entry of a Discrete or MultiDiscrete space."""
    return np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def parts_of(script: ModuleType, space: gym.Space, leaves: list, args: Any) -> list:
    """The script's parts of an action space. UsageError for one without a rule, for an action head
    or a mask that does not fit, for nothing to choose, or for more than MOST options."""
    acting = isinstance(space, spaces.Sequence)
    for factor in script.leaves_of(space, "action"):
        is_integer = isinstance(factor.space, spaces.Box) and factor.dtype.kind != "f"
        is_stacked = acting and space.stack and factor.path != "action"
        if is_integer or is_stacked or factor.group != ("action" if acting else ""):
            known = "Discrete, MultiDiscrete, MultiBinary, float Box, Dict, Tuple and Sequence"
            raise UsageError(f"action space {space} is not supported ({known} of these are)")
    parts = script.parts_of(space, leaves, args)
    if min([part.k for part in parts], default=0) < 1:
        raise UsageError(f"action space {space} is not supported, there is nothing to choose")
    groups = sorted({leaf.group for leaf in leaves if leaf.group and leaf.is_input})
    chosen = {part.group for part in parts}
    if sum(part.k * part.n for part in parts if part.group == "") > MOST:
        raise UsageError(f"action space {space} has over {MOST} options")
    if args.action_head not in ("auto", "flat") and "" in chosen and not acting:
        needed = "needs Discrete actions or a Sequence, and one graph or set"
        raise UsageError(f"--action-head {args.action_head} {needed}, not {space} and {groups}")
    if "avail_actions" in set(groups) - chosen and args.action_head == "auto" and not acting:
        needed = "none of these is chosen: give --action-head avail_actions, or flat"
        raise UsageError(
            f"avail_actions in the observation, and the action space {space}: {needed}"
        )
    masks_fit(space, parts, script.acting_group(space, leaves, args.action_head), leaves)
    return parts


def masks_fit(space: gym.Space, parts: list, acting: str, leaves: list) -> None:
    """UsageError for a mask that has not one entry for each option of the parts that it masks."""
    for mask in leaves:
        if mask.path.split(".")[0] != "action_mask":
            continue
        masked = [part for part in parts if part.mask == mask.path]
        groups = {part.group for part in masked}
        num_entries = max((part.entries.stop for part in masked), default=0)
        width = math.prod(mask.space.shape)
        if width == 1 and groups != {""}:  # one number per row is for all choices
            num_entries = min(num_entries, 1)
        if num_entries != width or len(groups) > 1:
            head = " ".join(sorted({part.group or acting or "flat" for part in parts}))
            problem = f"a mask {mask.space} does not fit {space} with --action-head {head}"
            raise UsageError(f"leaf '{mask.path}': {problem}")


def meaning(script: ModuleType, env: gym.Env, parts: list) -> tuple[str, ...]:
    """What must be the same for all environments, of observations and of actions, and both spaces:
    all but the bounds of what is observed, and the number of rows to choose from."""
    inputs = []
    for leaf in script.leaves_of(env.observation_space):
        if leaf.is_input:
            inputs.append((leaf.path, leaf.group, re.sub(r"Box\([^(]*", "", str(leaf.space))))
    done = [part._replace(n=0) if part.group else part for part in parts]
    action = str(env.action_space)
    if {part.group for part in parts} != {""}:
        action = re.sub(r"Discrete\([^,)]*", "", action)
    return f"{inputs}", f"{done} {action}", str(env.observation_space), str(env.action_space)


def same_meaning(found: list[tuple[str, ...]]) -> None:
    """UsageError if the entries of --env-kwargs are not for one network."""
    texts = list(zip(*found))
    for name, meanings, shown in zip(("observation", "action"), texts, texts[2:]):
        if len(set(meanings)) > 1:
            problem = f"not all entries have the {name} space {shown[0]}: {list(shown)}"
            raise UsageError(f"--env-kwargs: {problem}")


# ---- Observations ----
def checked(script: ModuleType) -> type:
    """The script's Envs, which check."""

    class Envs(script.Envs):
        def __init__(self, makers: list[Callable], args: Any, first: int = 0):
            """`first` is the number of the first environment over all ranks."""
            super().__init__([partial(made, make, first + i) for i, make in enumerate(makers)])
            self.first = first
            leaves_fit(self.leaves)
            self.parts = [
                parts_of(script, env.action_space, self.leaves, args) for env in self.envs
            ]
            meanings = [meaning(script, *pair) for pair in zip(self.envs, self.parts)]
            same_meaning(meanings)
            self.meaning = meanings[0]
            self.acting = script.acting_group(self.action_space, self.leaves, args.action_head)
            self.named = named_groups(script, self.parts[0], self.acting, self.leaves)
            for env in self.envs:
                env.has_agents = "rewards" in script.Step._fields

        def read(self, obs: Any) -> list[np.ndarray]:
            latest = Checked.latest
            try:
                rows = super().read(obs)
            except Exception as problem:  # of many kinds
                path = unreadable(script, self.space, lambda: obs)
                text = f"cannot be read: {type(problem).__name__} {problem} in {str(obs)[:100]}"
                raise UsageError(f"{self.place(latest.number, path)}: {text}") from None
            if latest.num_acted is not None:
                same_agents(self, rows, latest)
            return rows

        def collate(self, observations: list[list[np.ndarray]]) -> Any:
            problem = wrong_form(self, observations)
            if not problem:
                flat = super().collate(observations)
                problem = wrong_values(self, flat, observations, self.parts)
                if not problem:
                    return flat
            first = self.first if len(observations) > 1 else Checked.latest.number
            for number, own in enumerate(observations, first):
                parts = self.parts[(number - self.first) % len(self.parts)]
                problem = wrong_form(self, [own])
                problem = problem or wrong_values(self, super().collate([own]), [own], [parts])
                if problem:
                    path, sentence = problem
                    raise UsageError(f"{self.place(number, path)}: {sentence}")

        def place(self, number: int, path: str) -> str:
            """What begins an error."""
            return f"env {number}, leaf '{path}', step {Checked.latest.num_steps}"

        def close(self) -> None:
            for env in self.envs:
                close(env)

    return Envs


def make_envs(script: ModuleType, args: Any, makers: list[Callable], first: int = 0) -> Any:
    """The script's Envs, which check."""
    return checked(script)(makers, args, first)


def made(make: Callable, number: int) -> Checked:
    """The environment, the number of which is that over all ranks."""
    Checked.place = f"env {number}, step 0"
    env = guarded(f"env {number}", make)
    if not isinstance(env, Checked):
        env = Checked(env)
    env.number = number
    Checked.latest = env
    env.has_mask = "action_mask" in getattr(env.observation_space, "spaces", ())
    return env


def named_groups(script: ModuleType, parts: list, acting: str, leaves: list) -> dict[str, str]:
    """Path of a ragged mask, or node_ids -> the group that it has as many rows as."""
    groups = {part.mask: part.group or acting for part in parts}
    with contextlib.suppress(script.UsageError):  # there are several graphs
        groups["node_ids"] = acting or script.group_of("nodes", leaves)
    own = [leaf.path for leaf in leaves if leaf.group == leaf.path]
    return {path: groups[path] for path in own if groups.get(path)}


def unreadable(script: ModuleType, space: gym.Space, get: Callable, path: str = "") -> str | None:
    """The first leaf of what `get` returns that cannot be read."""
    try:
        for array in script.arrays_of(space, get()):
            np.array(array)
        return None
    except Exception:  # of many kinds
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            for k, child in script.children_of(space):
                name = f"{path}.{k}".removeprefix(".")
                found = unreadable(script, child, lambda k=k: get()[k], name)
                if found:
                    return found
        return script.leaves_of(space, path)[0].path


def same_agents(envs: Any, rows: list[np.ndarray], env: Checked) -> None:
    """UsageError if rows without ids, whose places tell which is which, are now more or fewer than
    those that acted."""
    num = {leaf.group: np.size(own, 0) for leaf, own in zip(envs.leaves, rows) if own.ndim}
    num = num.get(envs.acting, env.num_acted)  # what is no row at all is found later
    if num != env.num_acted and envs.named.get("node_ids") != envs.acting:
        acted = f"where {env.num_acted} acted; without node_ids an episode keeps their number"
        raise UsageError(f"{env.place}: {num} rows of '{envs.acting}' {acted}")


Problem = tuple[str, str] | None  # path of a leaf, and what is wrong with it. Its numbers are right
# for one observation; where there are several they may be another's


def wrong_form(envs: Any, observations: list[list[np.ndarray]]) -> Problem:
    """Of dtypes, shapes and the numbers of rows, which all leaves of a group share."""
    counts = {}  # group -> rows of each observation
    for leaf, rows in zip(envs.leaves, zip(*observations)):
        allowed = "biu" if leaf.dtype.kind in "biu" else "biuf"
        shape = leaf.space.shape
        for array in rows:
            is_whole = array.ndim == 1 + len(shape) and array.shape[1:] == shape
            if not is_whole or array.dtype.kind not in allowed:
                found = form(array.dtype, array.shape, leaf)
                needed = form(leaf.space.dtype, ("rows", *shape), leaf)
                return leaf.path, f"{found} where {needed} is declared"
        num = np.fromiter(map(len, rows), np.int64, len(rows))
        expected = counts.setdefault(leaf.group, num)
        if (num != expected).any():
            return leaf.path, f"{num[0]} rows where '{leaf.group}' has {expected[0]}"
    for path, group in envs.named.items():
        num = counts[path]
        if (num != counts[group]).any():
            problem = f"{num[0]} rows where '{group}' has {counts[group][0]}"
            links = [leaf.group for leaf in envs.leaves if leaf.is_links]
            if path == "action_mask" and num[0] in [counts[edges][0] for edges in links]:
                problem += ": for a mask of edges give --action-head edges"
            return path, problem
    return None


def form(dtype: np.dtype, shape: tuple, leaf: Any) -> str:
    """Of the rows of a leaf, in words; in the group "" there is one."""
    return f"dtype {dtype}, shape {shape if leaf.group else shape[1:]}"


def wrong_values(envs: Any, flat: Any, observations: list, parts: list[list]) -> Problem:
    """Of values, ids, masks, and the numbers of rows to choose from."""
    for leaf, values, rows in zip(envs.leaves, flat.values, zip(*observations)):
        if leaf.dtype.kind != "f" and any(array.dtype != leaf.dtype for array in rows):
            values = np.concatenate(rows)  # as they were before they got the leaf's dtype
        bad = out_of_range(leaf, values, flat.counts)
        if bad.any():
            where = f" in row {np.argwhere(bad)[0][0]}" if leaf.group else ""
            if leaf.is_links:
                where += f" of a graph with {flat.counts[leaf.nodes][0]} nodes"
            return leaf.path, f"value {values[bad][0]}{where}"
        num = flat.counts[leaf.group]
        env = np.arange(len(num)).repeat(num)  # of each row
        if leaf.path == "node_ids":
            sentence = wrong_ids(values, env)
            if sentence:
                return leaf.path, sentence
        for k, part in enumerate(parts[0]):
            most = np.array([own[k].n for own in parts])
            if part.group and part.group == leaf.group and ((num == 0) | (num > most)).any():
                return leaf.path, f"{num[0]} rows to choose from, the action space has {most[0]}"
            if part.mask == leaf.path and is_all_masked(values, env, len(num), part):
                shown = values if leaf.group else values[0]
                return leaf.path, f"all actions are masked: {shown.tolist()}"
    return None


def out_of_range(leaf: Any, values: np.ndarray, counts: dict) -> np.ndarray:
    """Where the values of a leaf are not finite, no node of their graph, no category, or not of its
    dtype, in which they would become others."""
    if leaf.dtype.kind == "f":
        return ~np.isfinite(values)
    low = 0
    if leaf.is_links:
        high = counts[leaf.nodes].repeat(counts[leaf.group])[:, None]
    elif isinstance(leaf.space, DISCRETE):
        low = leaf.space.start
        high = low + num_options(leaf.space)
    else:
        bad = np.zeros(values.shape, bool)
        for dtype in (leaf.dtype, leaf.space.dtype):  # uint16 is kept as int64
            if values.dtype != dtype:
                bad |= values.astype(dtype) != values
        return bad
    return (values < low) | (values >= high)


def wrong_ids(ids: np.ndarray, env: np.ndarray) -> str | None:
    """Whether an id occurs twice in an observation; `env` are the numbers of the rows'."""
    _, numbers = np.unique(ids, return_inverse=True)
    numbers = numbers.reshape(len(ids), math.prod(ids.shape[1:]))
    keys = (numbers + numbers.size * env[:, None]).ravel()
    again = np.delete(np.arange(len(keys)), np.unique(keys, return_index=True)[1])
    if len(again):
        return f"the id {ids.flat[again[0]]} occurs twice, at index {again[0]} again"
    return None


def is_all_masked(mask: np.ndarray, env: np.ndarray, num_envs: int, part: Any) -> bool:
    """Whether an observation, or a row that acts, allows no option of an entry."""
    allowed = mask.reshape(len(mask), math.prod(mask.shape[1:])) != 0
    if allowed.shape[1] > 1:  # else one number per row is for all parts
        allowed = allowed[:, part.entries]
    if part.group == "":
        return not allowed.reshape(len(mask), part.k, part.n).any(2).all()
    return (np.bincount(env, allowed[:, 0], num_envs) == 0).any()
