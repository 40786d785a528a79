"""cleanrl_graph, checks of flags, spaces and what environments return: each is a sentence.

A script knows nothing of them. `make_env` puts wrappers around its environments, and `checked`
makes a class of its `Envs` that looks at the arrays of all environments at once. Only where
something is wrong does it look for the culprit.
"""

import contextlib
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

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
KEPT = ("episode", "group", "eval", "rewards")  # of the info at an episode's end
DISCRETE = (spaces.Discrete, spaces.MultiDiscrete)


class UsageError(ValueError):
    """A sentence that says what was wrong, where, and what to do, shown without a traceback."""


# ---- Flags, and the code of others ----
def flags(args: Any) -> None:
    """UsageError for a flag without a meaning."""
    for names, least, most in RANGES:
        for name in names.split():
            for value in np.ravel(getattr(args, name, None)):  # not all scripts have all
                if value is not None and not in_range(name, value, least, most):
                    flag = f"--{name.replace('_', '-')} {value}"
                    raise UsageError(f"{flag}: a number from {least} to {most} is needed")
    if args.gnn in ("gatv2", "transformer") and args.gnn_dim % 4:
        problem = f"the 4 heads of --gnn {args.gnn} need a multiple of 4"
        raise UsageError(f"--gnn-dim {args.gnn_dim}: {problem}")
    if not entries(args) or not all(isinstance(entry, dict) for entry in entries(args)):
        needed = "an object, or a list of at least one, is needed"
        raise UsageError(f"--env-kwargs {args.env_kwargs}: {needed}")
    batch_size = args.num_envs * args.num_steps
    limits = [(batch_size, f"the {batch_size} steps of a rollout")]
    if hasattr(args, "lstm_dim") or hasattr(args, "num_heads"):  # which train on sequences
        limits.append((args.num_envs, f"--num-envs {args.num_envs}, which it shares out"))
    for most, parts in limits:
        if args.num_minibatches > most:
            raise UsageError(f"--num-minibatches {args.num_minibatches} exceeds {parts}")
    num_steps = batch_size * int(os.environ.get("WORLD_SIZE", 1))
    if 0 < args.total_timesteps < num_steps:
        problem = f"is less than a rollout of {num_steps} steps"
        raise UsageError(f"--total-timesteps {args.total_timesteps} {problem}")


def in_range(name: str, value: float, least: float, most: float) -> bool:
    """Whether a flag may have a value; only --max-grad-norm may be infinite."""
    return least <= value <= most and (name == "max_grad_norm" or not math.isinf(value))


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
    """The traceback below the frames of this file, of the script, whose `make_env` it called, and
    of --wrap; none of errors that say enough."""
    if isinstance(problem, (gym.error.Error, OSError, ModuleNotFoundError)):
        return ""
    trace = problem.__traceback__
    ours = (__file__, wrappers.__file__)
    while trace and (
        trace.tb_frame.f_code.co_filename in ours or trace.tb_frame.f_code.co_name == "make_env"
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(problem), problem, trace))


# ---- Environments: what they return ----
class Checked(gym.Wrapper):
    """Raises UsageError, with number, step and action, for what goes wrong in the environment, and
    for what is not as gymnasium's return it. At an episode's end the outermost one lets go what no
    script reads in info, and adds "episode" where a wrapper around RecordEpisodeStatistics ended
    it."""

    latest = None  # the one in this process that was called last
    number = 0  # over all ranks; that of the class is the one that is made
    num_steps = 0
    num_acted = None  # rows that acted before the present observation, if its episode goes on
    is_outermost = False
    has_agents = False  # which need info["rewards"]

    def reset(self, **kwargs) -> tuple:
        self.num_acted = None
        obs, info = self.call(2, "reset", **kwargs)
        return obs, info or {}

    def step(self, action: Any) -> tuple:
        self.num_steps += 1
        obs, reward, terminated, truncated, info = self.call(5, "step", action)
        info = info or {}
        if isinstance(self.action_space, spaces.Sequence):
            self.num_acted = None if terminated else len(action)
        if self.is_outermost:
            problem = self.has_agents and wrong_rewards(info, len(action))
            if "action_mask" in info and "action_mask" not in dict_of(self.observation_space):
                problem = "info has an action_mask, the first reset had none"
            if problem:
                raise UsageError(f"{self.place()}: {problem}")
        if terminated or truncated:
            info = self.last_info(info, terminated)
        return obs, reward, terminated, truncated, info

    def call(self, length: int, method: str, *args, **kwargs) -> tuple:
        """What `reset` or `step` returns."""
        Checked.latest = self
        doing = f"{self.place()}, {method}"
        result = guarded(f"{doing}{args or ''}", getattr(self.env, method), *args, **kwargs)
        if not isinstance(result, tuple) or len(result) != length:
            needed = f"gymnasium's environments return {length} values, not {str(result)[:200]}"
            raise UsageError(f"{doing}: {needed}")
        problem = wrong_outcome(*result[1:]) if method == "step" else None
        if problem:
            raise UsageError(f"{self.place()}: {problem}")
        return result

    def last_info(self, info: dict, terminated: bool) -> dict:
        """That of a step which ends an episode. Where only a life of a game ended it has no
        "episode"."""
        is_life = type(self) is Checked and terminated and info.get("lives", 0) > 0
        episode = {}
        if self.has_wrapper_attr("episode_returns") and not is_life:
            episode["r"] = self.get_wrapper_attr("episode_returns")
            episode["l"] = self.get_wrapper_attr("episode_lengths")
        info = dict(info)
        own = info.pop("episode", None)
        if isinstance(own, dict):
            episode |= own
        if "r" in episode and "l" in episode:  # older gymnasium's are arrays of one number
            ret, length = np.ravel([episode["r"], episode["l"]]).tolist()
            info["episode"] = {"r": ret, "l": int(length)}
        if self.is_outermost:
            info = {key: info[key] for key in KEPT if key in info}
        return info

    def place(self) -> str:
        return f"env {self.number}, step {self.num_steps}"


class Recorded(Checked):
    """Stands for the RecordEpisodeStatistics of a script's make_env: that fails where info is None
    or has an "episode" of the environment's own."""

    def call(self, length: int, method: str, *args, **kwargs) -> tuple:
        result = super().call(length, method, *args, **kwargs)
        if method == "reset":
            self.episode_returns = 0.0
            self.episode_lengths = 0
        else:
            self.episode_returns += result[1]
            self.episode_lengths += 1
        return result


def identify(env: gym.Env, number: int, num_steps: int = 0) -> None:
    """Tells each Checked around an environment its number, and how many steps were made."""
    while isinstance(env, gym.Wrapper):
        env.number = number
        env.num_steps = num_steps
        env = env.env


def dict_of(space: gym.Space) -> dict:
    """The children of a Dict space, else {}."""
    return space.spaces if isinstance(space, spaces.Dict) else {}


def make_env(script: ModuleType, args: Any, i: int = 0, /, **more) -> gym.Env:
    """The script's environment i of all ranks, with `more` keyword arguments, in the wrappers of
    --wrap. `envs:NAME` is one of cleanrl_graph unless the current folder has a module `envs`."""
    env_id, hint = wrappers.full_id(args.env_id)
    full = SimpleNamespace(**{**vars(args), "env_id": env_id})
    env = guarded(f"--env-id {args.env_id} ({hint})", script.make_env, full, i, **more)
    if type(env) is gym.wrappers.RecordEpisodeStatistics:
        env = Recorded(env.env)
    return wrappers.wrap_all(env, args.wrap)


def close(env: gym.Env) -> None:
    """Closes it. What goes wrong is only printed, lest what was trained or played is lost."""
    try:
        env.close()
    except (Exception, SystemExit) as problem:  # of many kinds
        print(f"close() of {env}: {text_of(problem)}", file=sys.stderr)


def wrong_outcome(reward: Any, terminated: Any, truncated: Any, info: Any) -> str | None:
    """What is wrong with what a step returns beside the observation."""
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        is_bool = isinstance(value, (bool, np.bool_))
        if not is_bool and not (is_number(value) and value in (0, 1)):
            return f"{name} is {value!r}, not True or False"
    if info is not None and not isinstance(info, dict):
        return f"info is {info!r}, not a dict"
    if getattr(reward, "requires_grad", False):
        return f"reward {reward} requires gradients, which must be detached"
    try:
        is_finite = math.fabs(reward + 0.0) < LARGEST  # + 0.0: it is added to a float
    except Exception:  # of many kinds
        return f"reward {reward!r} is not a number"
    if not is_finite:
        return f"reward {reward} is not finite"
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
class Meaning(NamedTuple):
    """What observations and actions of an environment are, as far as it must be the same for all.
    As text: before Python 3.12 slices cannot be hashed."""

    observation: str
    action: str
    spaces: tuple[str, str]


def same_meaning(found: list[Meaning]) -> None:
    """UsageError if the entries of --env-kwargs are not for one network."""
    for k, name in enumerate(("observation", "action")):
        if len({own[k] for own in found}) > 1:
            shown = [own.spaces[k] for own in found]
            raise UsageError(
                f"--env-kwargs: not all entries have the {name} space {shown[0]}: {shown}"
            )


def meaning(script: ModuleType, env: gym.Env, parts: list) -> Meaning:
    """Of a choice the number of rows may be another."""
    observed = []
    for leaf in script.leaves_of(env.observation_space):
        space = leaf.space
        values = None
        if leaf.is_input and isinstance(space, DISCRETE):
            values = num_options(space), space.start
        observed.append((leaf.path, leaf.group, leaf.nodes, leaf.dtype, space.shape, values))
    factors = {leaf.path: leaf.space for leaf in script.leaves_of(env.action_space, "action")}
    done = []
    for part in parts:
        space = factors[part.path]
        done.append((part._replace(n=0), space.start) if part.group else (part, space))
    return Meaning(str(observed), str(done), (str(env.observation_space), str(env.action_space)))


def num_options(space: gym.Space) -> np.ndarray:
    """The number of values of each entry of a Discrete or MultiDiscrete space."""
    return np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def leaves_fit(leaves: list) -> None:
    """UsageError if two leaves have the same name, if none is an input, for more than MOST
    categories in an input, or for node_ids that are no integers."""
    paths = [leaf.path.replace("/", ".") for leaf in leaves]
    if len(set(paths)) < len(paths) or not any(leaf.is_input for leaf in leaves):
        raise UsageError(f"leaves {paths} need different names, and one must be an input")
    for leaf in leaves:
        is_discrete = isinstance(leaf.space, DISCRETE) and not leaf.is_links
        if is_discrete and leaf.is_input and num_options(leaf.space).sum() > MOST:
            problem = f"{leaf.space} has over {MOST} values; a Box has numbers"
            raise UsageError(f"leaf '{leaf.path}': {problem}")
        if leaf.path == "node_ids" and leaf.dtype.kind not in "iu":
            raise UsageError(f"leaf 'node_ids': {leaf.space} must be integers")


def parts_of(script: ModuleType, space: gym.Space, leaves: list, args: Any) -> list:
    """The script's parts of an action space. UsageError for one without a rule, for an action head
    or a mask that does not fit, for nothing to choose, or for more than MOST options."""
    known = "Discrete, MultiDiscrete, MultiBinary, float Box, Dict, Tuple and Sequence of these are"
    is_sequence = isinstance(space, spaces.Sequence)
    for factor in script.leaves_of(space, "action"):
        is_known = factor.group == ("action" if is_sequence else "")
        if isinstance(factor.space, spaces.Box):
            is_known = is_known and factor.dtype.kind == "f"
        if getattr(space, "stack", False):
            is_known = is_known and factor.path == "action"
        if not is_known:
            raise UsageError(f"action space {space} is not supported ({known})")
    parts = script.parts_of(space, leaves, args)
    if min([part.k for part in parts], default=0) < 1:
        raise UsageError(f"action space {space} is not supported, there is nothing to choose")
    head = args.action_head
    for part in parts:
        if part.group == "" and part.k * part.n > MOST:
            raise UsageError(f"action space {space} has over {MOST} options")
        if head not in ("auto", "flat") and not is_sequence and part.group == "":
            groups = sorted({leaf.group for leaf in leaves if leaf.group and leaf.is_input})
            needed = "needs Discrete actions or a Sequence, and one graph or set"
            raise UsageError(f"--action-head {head} {needed}, not {space} and {groups}")
    masks_fit(space, parts, script.acting_group(space, leaves, head), leaves)
    return parts


def masks_fit(space: gym.Space, parts: list, acting: str, leaves: list) -> None:
    """UsageError for a mask that has not one entry for each option of the parts that it masks."""
    for mask in leaves:
        if mask.path.split(".")[0] != "action_mask":
            continue
        masked = [part for part in parts if part.mask == mask.path]
        num_entries = max((part.entries.stop for part in masked), default=0)
        groups = {part.group for part in masked}
        width = math.prod(mask.space.shape)
        if width == 1 and groups != {""}:  # one number per row is for all choices
            num_entries = min(num_entries, 1)
        if num_entries != width or len(groups) > 1:
            head = " ".join(sorted({part.group or acting or "flat" for part in parts}))
            problem = f"a mask {mask.space} does not fit {space} with --action-head {head}"
            raise UsageError(f"leaf '{mask.path}': {problem}")


def named_groups(script: ModuleType, parts: list, acting: str, leaves: list) -> dict[str, str]:
    """Path of a ragged mask, or node_ids -> the group that it has as many rows as."""
    groups = {part.mask: part.group or acting for part in parts}
    with contextlib.suppress(script.UsageError):  # there are several graphs
        groups["node_ids"] = acting or script.group_of("nodes", leaves)
    return {leaf.path: groups.get(leaf.path, "") for leaf in leaves if leaf.group == leaf.path}


# ---- Observations ----
def checked(script: ModuleType) -> type:
    """The script's Envs, which check."""

    class Envs(script.Envs):
        def __init__(self, makers: list[Callable], args: Any, first: int = 0):
            """`first` is the number of the first environment over all ranks."""
            self.first = first
            super().__init__([partial(made, make, first + i) for i, make in enumerate(makers)])
            leaves_fit(self.leaves)
            self.parts = [
                parts_of(script, env.action_space, self.leaves, args) for env in self.envs
            ]
            found = [meaning(script, *pair) for pair in zip(self.envs, self.parts)]
            same_meaning(found)
            self.meaning = found[0]
            self.acting = script.acting_group(self.action_space, self.leaves, args.action_head)
            self.named = named_groups(script, self.parts[0], self.acting, self.leaves)
            for env in self.envs:
                env.has_agents = "rewards" in script.Step._fields

        def read(self, obs: Any) -> list[np.ndarray]:
            try:
                rows = super().read(obs)
            except Exception as problem:  # of many kinds
                path = unreadable(script, self.space, lambda: obs) or "obs"
                text = f"cannot be read: {type(problem).__name__} {problem} in {str(obs)[:100]}"
                raise wrong(Checked.latest, path, text) from None
            if Checked.latest.has_agents:
                same_agents(self, rows)
            return rows

        def collate(self, observations: list[list[np.ndarray]]) -> Any:
            problem = wrong_form(self, observations)
            if not problem:
                flat = super().collate(observations)
                problem = wrong_values(self, flat, observations, self.parts)
                if not problem:
                    return flat
            envs = self.envs if len(observations) > 1 else [Checked.latest]
            for env, own in zip(envs, observations):
                problem = wrong_form(self, [own])
                if not problem:
                    parts = self.parts[env.get_wrapper_attr("number") - self.first]
                    problem = wrong_values(self, super().collate([own]), [own], [parts])
                if problem:
                    raise wrong(env, *problem)

        def close(self) -> None:
            for env in self.envs:
                close(env)

    return Envs


def make_envs(script: ModuleType, args: Any, makers: list[Callable], first: int = 0) -> Any:
    """The script's Envs, which check."""
    return checked(script)(makers, args, first)


def made(make: Callable, number: int) -> Checked:
    """The environment, the number of which is that over all ranks."""
    Checked.number = number
    env = guarded(f"env {number}", make)
    if not isinstance(env, Checked):
        env = Checked(env)
    env.is_outermost = True
    identify(env, number)
    return env


def wrong(env: gym.Env, path: str, sentence: str) -> UsageError:
    place = env.get_wrapper_attr("place")()
    return UsageError(place.replace(",", f", leaf '{path}',", 1) + f": {sentence}")


def unreadable(script: ModuleType, space: gym.Space, get: Callable, path: str = "") -> str | None:
    """The first leaf of what `get` returns that cannot be read."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for k, child in script.children_of(space):
            own = f"{path}.{k}".removeprefix(".")
            found = unreadable(script, child, lambda k=k: get()[k], own)
            if found:
                return found
        return None
    try:
        for array in script.arrays_of(space, get()):
            np.array(array)
    except Exception:  # of many kinds
        return script.leaves_of(space, path)[0].path
    return None


def same_agents(envs: Any, rows: list[np.ndarray]) -> None:
    """UsageError if rows without ids, whose places tell which is which, are now more or fewer than
    those that acted."""
    env = Checked.latest
    num = {leaf.group: len(np.atleast_1d(own)) for leaf, own in zip(envs.leaves, rows)}
    num = num[envs.acting]  # what is no row at all is found later
    has_ids = envs.named.get("node_ids") == envs.acting
    if env.num_acted not in (None, num) and not has_ids:
        needed = "without node_ids an episode keeps their number"
        problem = f"{num} rows of '{envs.acting}' where {env.num_acted} acted; {needed}"
        raise UsageError(f"{env.place()}: {problem}")


Problem = tuple[str, str] | None  # path of a leaf, and what is wrong with it: its numbers are right
# for one observation, with several they may be another's


def wrong_form(envs: Any, observations: list[list[np.ndarray]]) -> Problem:
    """Of dtypes, shapes and the numbers of rows, which all leaves of a group share."""
    counts = {}  # group -> rows of each observation
    for leaf, rows in zip(envs.leaves, zip(*observations)):
        allowed = "biu" if leaf.dtype.kind in "iu" else "biuf"
        shape = leaf.space.shape
        for array in rows:
            if array.dtype.kind not in allowed:
                return leaf.path, f"dtype {array.dtype} where {leaf.space.dtype} is declared"
            if array.ndim != 1 + len(shape) or array.shape[1:] != shape:
                found = array.shape
                if leaf.group == "":
                    found = found[1:]
                else:
                    shape = ("rows", *shape)
                return leaf.path, f"shape {found} where {shape} is declared"
        num = np.fromiter(map(len, rows), np.int64, len(rows))
        expected = counts.setdefault(leaf.group, num)
        if (num != expected).any():
            return leaf.path, f"{num[0]} rows where '{leaf.group}' has {expected[0]}"
    for path, group in envs.named.items():
        num = counts[path]
        if group and (num != counts[group]).any():
            problem = f"{num[0]} rows where '{group}' has {counts[group][0]}"
            edges = [leaf.group for leaf in envs.leaves if leaf.is_links]
            if path == "action_mask" and num[0] in [counts[links][0] for links in edges]:
                problem += ": for a mask of edges give --action-head edges"
            return path, problem
    return None


def wrong_values(envs: Any, flat: Any, observations: list, parts: list[list]) -> Problem:
    """Of values, ids, masks, and the numbers of rows to choose from."""
    for leaf, values, rows in zip(envs.leaves, flat.values, zip(*observations)):
        if leaf.dtype.kind in "biu" and any(array.dtype != leaf.dtype for array in rows):
            values = np.concatenate(rows)  # as they were before they got the leaf's dtype
        bad = out_of_range(leaf, values, flat.counts)
        if bad.any():
            where = "" if leaf.group == "" else f" in row {np.argwhere(bad)[0][0]}"
            if leaf.is_links:
                where += f" of a graph with {flat.counts[leaf.nodes][0]} nodes"
            return leaf.path, f"value {values[bad][0]}{where}"
        sentence = wrong_choice(leaf, values, flat.counts[leaf.group], parts)
        if sentence:
            return leaf.path, sentence
    return None


def out_of_range(leaf: Any, values: np.ndarray, counts: dict) -> np.ndarray:
    """Where the values of a leaf are not finite, no node of their graph, no category, or not of its
    dtype, in which they would become others."""
    if leaf.dtype.kind == "f":
        return ~np.isfinite(values)
    if leaf.is_links:
        num_nodes = counts[leaf.nodes].repeat(counts[leaf.group])
        return (values < 0) | (values >= num_nodes[:, None])
    if isinstance(leaf.space, DISCRETE):
        num = num_options(leaf.space)
        return (values < leaf.space.start) | (values >= leaf.space.start + num)
    bad = np.zeros(values.shape, bool)
    for dtype in (leaf.dtype, leaf.space.dtype):  # uint16 is kept as int64
        if values.dtype != dtype:
            bad |= values.astype(dtype) != values
    return bad


def wrong_choice(leaf: Any, values: np.ndarray, num: np.ndarray, parts: list) -> str | None:
    """What is wrong with ids, with the number of rows to choose from, or with a mask."""
    if leaf.path == "node_ids" and occurs_twice(leaf, values, num):
        _, first = np.unique(values, return_index=True)
        again = np.delete(np.arange(values.size), first)
        return f"the id {values.flat[again[0]]} occurs twice, at index {again[0]} again"
    for k, part in enumerate(parts[0]):
        if part.group and part.group == leaf.group:
            most = np.array([own[k].n for own in parts])
            if ((num == 0) | (num > most)).any():
                return f"{num[0]} rows to choose from, the action space has {most[0]}"
        if part.mask == leaf.path and is_all_masked(values, num, part):
            shown = values if leaf.group else values[0]
            return f"all actions are masked: {shown.tolist()}"
    return None


def occurs_twice(leaf: Any, ids: np.ndarray, num: np.ndarray) -> bool:
    """Whether an id does so in one of the observations."""
    ids = ids.ravel()
    env = np.arange(len(num)).repeat(num * math.prod(leaf.space.shape))
    order = np.lexsort([ids, env])
    is_same = (np.diff(ids[order]) == 0) & (np.diff(env[order]) == 0)
    return is_same.any()


def is_all_masked(mask: np.ndarray, num: np.ndarray, part: Any) -> bool:
    """Whether an observation, or a row that acts, allows no option of an entry."""
    allowed = mask.reshape(len(mask), math.prod(mask.shape[1:])) != 0
    if allowed.shape[1] > 1:  # else one number per row is for all parts
        allowed = allowed[:, part.entries]
    if part.group == "":
        return not allowed.reshape(len(mask), part.k, part.n).any(2).all()
    num_allowed = np.append(0, allowed[:, 0].cumsum())  # in the rows so far
    ends = num.cumsum()
    return (num_allowed[ends] == num_allowed[ends - num]).any()
