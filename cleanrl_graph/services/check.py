"""cleanrl_graph, checks: what is wrong with a flag, a space, or what an environment returns is said
in one sentence, "env 1, leaf 'graph.nodes', step 21: value nan in row 3".

`make_env` puts wrappers around a script's environments. `checked` makes a class of its `Envs` whose
environments are `Checked`, and which looks at the arrays of all of them at once. Only where
something is wrong does it look for the culprit.
"""

import contextlib
import hashlib
import math
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from cleanrl_graph.envs import fitting, wrappers
from cleanrl_graph.envs.fitting import SAID, say
from cleanrl_graph.envs.masks import CanonicalMasks
from cleanrl_graph.services import metrics
from cleanrl_graph.services.metrics import LARGEST, number_of

POSITIVE = (
    "num_envs num_steps num_minibatches update_epochs gnn_layers gnn_dim eval_max_steps "
    "hidden_dims lstm_dim dim num_heads num_layers bc_minibatch_size"
)
NOT_NEGATIVE = (
    "num_workers env_timeout checkpoint_every checkpoint_minutes total_timesteps eval_episodes "
    "eval_samples set_layers memory_length learning_rate target_kl max_grad_norm pg_coef "
    "aux_coef bc_coef bc_anneal bc_updates norm_vloss adv_floor eval_every"
)
RANGES = [
    (POSITIVE, 1, math.inf),
    (NOT_NEGATIVE, 0, math.inf),
    ("gamma gae_lambda clip_coef adv_floor_decay", 0, 1),
    ("ent_coef vf_coef stop_at", -math.inf, math.inf),
    ("seed", 0, 2**32 - 1),
]
FLOAT32 = float(np.finfo(np.float32).max)
RETURNED = {"reset": ("obs, {}", 2), "step": ("obs, reward, terminated, truncated, {}", 5)}
OLD = (
    "an environment of gym's old interface needs shimmy, or the wrapper in cleanrl_graph/README.md"
)
MOST = 10_000_000  # categories: a network has a row of weights for each
DISCRETE = (spaces.Discrete, spaces.MultiDiscrete)
OBJECT = "object of a program: "  # begins the text of what a command line cannot give
MASKED = "no action is allowed, which counts as if all were"


# ---- Sentences ----
class UsageError(gym.error.Error, ValueError):
    """A sentence that says what was wrong, where, and what to do, shown without a traceback. It is
    a gymnasium error, too, so a script that catches what environments raise catches it."""


@contextlib.contextmanager
def one_kind(script: ModuleType) -> Iterator[None]:
    """The sentences of a script, which has a UsageError of its own, become ours."""
    try:
        yield
    except script.UsageError as problem:
        raise UsageError(str(problem)) from None


def refuse(problems: Iterator[str]) -> None:
    """UsageError for the first of them."""
    for problem in problems:
        raise UsageError(problem)


def text_of(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def explained(doing: str, problem: BaseException) -> UsageError:
    """An exception of others' code as the last frames of its traceback, what was done, and what it
    says. Sentences, missing files and missing modules say enough without frames."""
    frames = ""
    text = text_of(problem)
    if isinstance(problem, UsageError):
        *lines, text = str(problem).splitlines(keepends=True)
        frames = "".join(lines)
    elif not isinstance(problem, (gym.error.Error, OSError, ModuleNotFoundError)):
        first = problem.__cause__ or problem  # gymnasium raises some again
        frames = "".join(traceback.format_exception(first, limit=-4, chain=False))
    if "unexpected keyword argument 'seed'" in text:
        text += f"; {OLD}"
    return UsageError(f"{frames}{doing}: {text}")


# ---- Flags ----
def wrong_flags(args: Any) -> Iterator[str]:
    """Flags without a meaning."""
    for names, least, most in RANGES:
        for name in names.split():
            for value in np.ravel(getattr(args, name, None)):  # not all scripts have all
                is_fine = value is None or least <= value <= most and not math.isinf(value)
                if not is_fine and (name != "max_grad_norm" or value != math.inf):
                    flag = f"--{name.replace('_', '-')} {value}"
                    yield f"{flag}: a number from {least} to {most} is needed"
    if args.max_grad_norm == 0:
        yield "--max-grad-norm 0: all gradients become 0, nothing is trained; inf means no clipping"
    if not entries(args) or not all(isinstance(entry, dict) for entry in entries(args)):
        yield f"--env-kwargs {args.env_kwargs}: an object, or a list of at least one, is needed"
    rollout = args.num_envs * args.num_steps
    if args.num_minibatches > rollout:
        yield f"--num-minibatches {args.num_minibatches} exceeds the {rollout} steps of a rollout"
    steps = rollout * int(os.environ.get("WORLD_SIZE", 1))
    if 0 < args.total_timesteps < steps:
        yield f"--total-timesteps {args.total_timesteps} is less than a rollout of {steps} steps"


def entries(args: Any) -> list[dict]:
    """Those of --env-kwargs."""
    return args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]


def plain(value: Any) -> Any:
    """A value of a flag as JSON and a file for torch.load(weights_only=True) can have it: numbers
    of NumPy are Python's, other objects are texts, by which they can be compared."""
    if isinstance(value, dict) and {type(k) for k in value} <= {str, int}:
        return {k: plain(child) for k, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    text = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # the same in the next process
    if hasattr(value, "tolist"):  # an array, whose text may leave numbers out
        text += f" {hashlib.sha1(str(value.tolist()).encode()).hexdigest()[:8]}"
    return OBJECT + text


# ---- An environment ----
def make_env(script: ModuleType, args: Any, i: int = 0, /, **more) -> gym.Env:
    """The script's environment i of all ranks, with `more` keyword arguments, in the wrappers of
    --wrap. `envs:NAME` is one of cleanrl_graph unless the current folder has a module `envs`."""
    env_id, hint = wrappers.full_id(args.env_id)
    hint = hint or "an id, or module:Name-v0 of the module that registers it, and its --env-kwargs"
    if OBJECT in str(args.env_kwargs):
        raise UsageError(
            f"env_kwargs {args.env_kwargs}: a file has only the text of an object that a program "
            "gave; give env_kwargs again"
        )
    before = settings()
    try:
        env = script.make_env(SimpleNamespace(**{**vars(args), "env_id": env_id}), i, **more)
    except (Exception, SystemExit) as problem:
        raise explained(f"--env-id {args.env_id} ({hint})", problem) from None
    if type(env) is gym.wrappers.RecordEpisodeStatistics:  # it fails where info is None
        env = Record(env.env)
    env = wrappers.wrap_all(env, args.wrap, "rewards" in script.Step._fields)
    try:
        env = wrappers.find_mask(env)
    except (Exception, SystemExit) as problem:
        raise explained("the first reset, which looks for a mask", problem) from None
    put_back(before)
    return env


def made(make: Callable, number: int, script: ModuleType, args: Any) -> "Checked":
    """The environment, with masks as the script reads them; its number is that over all ranks."""
    try:
        env = make()
    except (Exception, SystemExit) as problem:
        raise explained(f"env {number}, step 0", problem) from None
    note = env.get_wrapper_attr("mask_note") if env.has_wrapper_attr("mask_note") else ""
    if note:
        say(note, "mask_note")
    masked = CanonicalMasks(env, script, args)
    if masked.forms:
        env = masked
    env = Checked(env, number)
    env.observation_space = with_row_mask(script, env, args.action_head)
    env.has_mask = "action_mask" in getattr(env.observation_space, "spaces", ())
    env.may_mask = not (env.has_mask or note) and wrappers.num_options(env.action_space) > 0
    env.has_agents = "rewards" in script.Step._fields
    LATEST.env = env
    return env


def close(env: gym.Env) -> None:
    """Closes it. What goes wrong is only printed, lest what was trained or played is lost."""
    try:
        env.close()
    except (Exception, SystemExit) as problem:  # of many kinds
        say(f"close() of {env}: {text_of(problem)}")


class Record(gym.wrappers.RecordEpisodeStatistics):
    """Return and length of an episode as they are inside of --wrap. Rewards that are no numbers are
    passed on: a wrapper around this one may make one of several."""

    has_sum = True  # the rewards are numbers

    def reset(self, **kwargs) -> tuple:
        obs, info = returned("reset", self.env.reset(**kwargs))
        self.episode_returns = 0.0
        self.episode_lengths = 0
        return obs, info or {}

    def step(self, action: Any) -> tuple:
        obs, reward, *outcome, info = returned("step", self.env.step(action))
        number = number_of(reward)
        if number is None:
            self.has_sum = False
        else:
            self.episode_returns += number
            self.episode_lengths += 1
        return obs, reward, *outcome, {} if info is None else info


def returned(method: str, result: Any) -> tuple:
    """What `reset` or `step` returned. UsageError for what is not as gymnasium's return it."""
    needed, length = RETURNED[method]
    if not isinstance(result, tuple) or len(result) != length:
        raise UsageError(f"return {needed}: {length} values, not {fitting.shown(result)}; {OLD}")
    return result


class Latest(threading.local):
    """The Checked that was called last in this thread."""

    env = None


LATEST = Latest()


class Checked(gym.wrappers.RecordEpisodeStatistics):
    """Raises UsageError, with number, step and action, for what goes wrong in the environment, and
    for what is not as gymnasium's return it. Return and length of an episode are those of a
    RecordEpisodeStatistics inside, if there is one. At an episode's end info has "episode", and
    nothing that no script reads."""

    num_steps = 0
    has_ended = False  # the episode, with the latest observation
    num_acted = None  # rows that acted before the present observation, if its episode goes on
    has_agents = False  # which need info["rewards"]
    has_mask = True
    may_mask = False  # there are options and neither a mask nor a word about one

    def __init__(self, env: gym.Env, number: int):
        super().__init__(env.env if type(env) is Record else env)
        self.number = number  # over all ranks
        inside = self.env
        while isinstance(inside, gym.Wrapper):
            if isinstance(inside, gym.wrappers.RecordEpisodeStatistics):
                break
            inside = inside.env
        self.inside = inside if inside is not self.unwrapped else None

    @property
    def place(self) -> str:
        """What begins an error."""
        return f"env {self.number}, step {self.num_steps}"

    def reset(self, **kwargs) -> tuple:
        obs, info = self.call("reset", **kwargs)
        self.num_acted = None
        self.has_ended = False
        self.episode_returns = 0.0
        self.episode_lengths = 0
        return obs, info or {}

    def step(self, action: Any) -> tuple:
        self.num_steps += 1
        obs, reward, terminated, truncated, info = self.call("step", action)
        is_usual = isinstance(reward, float) and -LARGEST < reward < LARGEST
        if not (is_usual and terminated is truncated is False and type(info) is dict):
            info = info or {}
            refuse(self.wrong_outcome(reward, terminated, truncated, info))
            reward, terminated, truncated = map(number_of, (reward, terminated, truncated))
        if info:
            self.look_for_masks(info)
        if self.has_agents:
            num = num_acting(self.action_space, action)
            refuse(f"{self.place}: {problem}" for problem in wrong_rewards(info, num))
            self.num_acted = num
        self.episode_returns += reward
        self.episode_lengths += 1
        if self.inside and getattr(self.inside, "has_sum", True):
            self.episode_returns = self.inside.episode_returns
            self.episode_lengths = self.inside.episode_lengths
        self.has_ended = bool(terminated or truncated)
        if self.has_ended:
            info = self.last_info(info, terminated)
        return obs, reward, terminated, truncated, info

    def call(self, method: str, *args, **kwargs) -> tuple:
        """What `reset` or `step` returns. An environment may have others inside, or the policy of
        an opponent, which has its own: afterwards LATEST is this one."""
        try:
            return returned(method, getattr(self.env, method)(*args, **kwargs))
        except (Exception, SystemExit) as problem:
            raise explained(f"{self.place}, {method}{args or ''}", problem) from None
        finally:
            LATEST.env = self

    def wrong_outcome(
        self, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> Iterator[str]:
        """What is wrong with what a step returns beside the observation."""
        if number_of(reward) is None:
            yield (
                f"{self.place}: reward is {reward!r}, not a finite number. If it is one for each "
                "agent ppo_graph_agents.py takes them, and --wrap "
                "cleanrl_graph.envs.wrappers:MeanReward makes one of them; --wrap "
                "mo_gymnasium.wrappers:LinearReward makes one of several objectives"
            )
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if number_of(value) not in (0, 1):
                yield f"{self.place}: {name} is {value!r}, not True or False"
        if not isinstance(info, dict):
            yield f"{self.place}: info is {info!r}, not a dict"

    def look_for_masks(self, info: dict) -> None:
        """UsageError, or a line, for one that the first reset had not."""
        if "action_mask" in info and not self.has_mask:
            raise UsageError(f"{self.place}: info has an action_mask, the first reset had none")
        if self.may_mask:
            for name in set(wrappers.MASKS) & set(info):
                where = f"info['{name}'], which the first reset had not"
                say(f"not used as a mask of actions: {where}")

    def last_info(self, info: dict, terminated: bool) -> dict:
        """That of a step which ends an episode. Where only a life of a game ended, so that a record
        inside goes on, it has no "episode"."""
        rewards = {"rewards": info["rewards"]} if "rewards" in info else {}
        goes_on = self.inside and terminated and "episode" not in info
        if goes_on and info.get("lives", 0) > 0:
            return rewards
        said = metrics.said_in(info)
        refuse(f"{self.place}: {problem}" for problem in metrics.wrong(said))
        episode = {"r": float(self.episode_returns), "l": int(self.episode_lengths)}
        return metrics.report_of(said) | rewards | {"episode": episode}


def num_acting(space: gym.Space, action: Any) -> int:
    """How many rows have acted."""
    if isinstance(space, spaces.Sequence):
        return len(action)
    return sum(num_acting(space[k], action[k]) for k in fitting.keys_of(space))


def wrong_rewards(info: dict, num_agents: int) -> Iterator[str]:
    """What is wrong with info["rewards"], a finite number for each row that acted."""
    try:
        values = np.array(info["rewards"], np.float64)
    except Exception as problem:  # of many kinds
        needed = f"one number for each of the {num_agents} rows that acted is needed"
        yield f"info['rewards']: {text_of(problem)}; {needed}"
    if values.shape != (num_agents,):
        yield f"info['rewards'] has the shape {values.shape}, but {num_agents} rows acted"
    bad = ~(np.abs(values) < LARGEST)
    if bad.any():
        yield f"info['rewards'] is {values[bad][0]} in row {bad.argmax()}"


def settings() -> tuple:
    """What an environment may set for itself in torch, and what others must not find changed."""
    device = torch.empty(0).device  # torch.get_default_device() takes longer than all of this
    return torch.get_default_dtype(), device, torch.is_grad_enabled()


def put_back(before: tuple) -> None:
    """Puts back those `settings`."""
    if settings() == before:
        return
    dtype, device, has_grad = before
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device.type == "cpu" else device)
    torch.set_grad_enabled(has_grad)


# ---- The environments of a script ----
def checked(script: ModuleType) -> type:
    """The script's Envs, which check."""
    return type("Envs", (Checks, script.Envs), {"script": script})


def make_envs(script: ModuleType, args: Any, makers: list[Callable], first: int = 0) -> Any:
    """The script's Envs, which check."""
    return checked(script)(makers, args, first)


OWN = set(  # names of Checks, which a script's Envs may not use
    "acting ask cut_mask first flat is_padded looks masks meaning named pairs parts place problems "
    "script settings tell_masked".split()
)


class Look(NamedTuple):
    """What is looked at in the rows of a leaf, and what is not, since it cannot be wrong."""

    leaf: Any
    dtype: np.dtype
    shape: tuple[int, ...]  # of a row
    is_counted: bool  # another leaf of its group comes first
    is_choice: bool  # an action chooses from its group
    is_float32: bool  # may be infinite or NaN
    is_number: bool  # has no wrong values where the dtypes are the same


def looks_at(leaves: list, parts: list) -> Iterator[Look]:
    groups = set()
    for leaf in leaves:
        dtype = leaf.dtype
        is_number = dtype == leaf.space.dtype and dtype.kind != "f" and leaf.path != "node_ids"
        yield Look(
            leaf,
            dtype,
            leaf.space.shape,
            is_counted=leaf.is_ragged and leaf.group in groups,
            is_choice=any(part.group == leaf.group for part in parts),
            is_float32=dtype == np.float32,
            is_number=is_number and not leaf.is_links and not isinstance(leaf.space, DISCRETE),
        )
        groups.add(leaf.group)


class Checks:
    """What a script's Envs get, which is the class after this one."""

    script: ModuleType

    def __init__(self, makers: list[Callable], args: Any, first: int = 0):
        """`first` is the number of the first environment over all ranks."""
        script = self.script
        before = settings()
        super().__init__(
            [partial(made, make, first + i, script, args) for i, make in enumerate(makers)]
        )
        taken = sorted(name for name in OWN if name in vars(self) or hasattr(script.Envs, name))
        if taken:
            names = ", ".join(taken)
            raise UsageError(f"Envs has {names}, which services need for themselves: rename it")
        self.settings = before
        self.first = first
        leaves = for_policy(self.leaves, args)
        refuse(wrong_leaves(self.leaves))
        refuse(wrong_leaves(leaves))
        self.parts = []
        meanings = []
        for env in self.envs:
            refuse(wrong_actions(script, env.action_space, leaves, args))
            self.parts.append(script.parts_of(env.action_space, leaves, args))
            meanings.append(meaning(script, env, self.parts[-1]))
        refuse(unlike(meanings))
        self.meaning = meanings[0]
        self.acting = script.acting_group(self.action_space, leaves, args.action_head)
        self.masks = [part for part in self.parts[0] if part.mask is not None]
        self.named, self.pairs = numbers_of_rows(script, leaves, self.parts[0], self.acting)
        self.is_padded = self.space is not self.envs[0].env.observation_space  # the mask
        self.looks = list(looks_at(self.leaves, self.parts[0]))

    def reset(self, seed: int) -> tuple:
        try:
            return super().reset(seed)
        finally:
            put_back(self.settings)

    def step(self, actions: list) -> tuple:
        try:
            return super().step(actions)
        finally:
            put_back(self.settings)

    def read(self, obs: Any) -> list[np.ndarray]:
        try:
            rows = super().read(obs)
        except Exception as problem:  # of many kinds
            nothing = (self.leaves[0].path, text_of(problem))
            path, text = next(unreadable(self.script, self.space, obs), nothing)
            raise UsageError(
                f"{self.place(LATEST.env.number, path)}: cannot be read: {text}"
            ) from None
        if self.is_padded:
            self.cut_mask(rows)
        acted = LATEST.env.num_acted
        if acted is not None and self.named.get("node_ids") != self.acting:
            allowed = (0, acted) if LATEST.env.has_ended else (acted,)
            for leaf, own in zip(self.leaves, rows):
                if leaf.group == self.acting and own.ndim and len(own) not in allowed:
                    raise UsageError(
                        f"{LATEST.env.place}: {len(own)} rows of '{leaf.group}' where {acted} "
                        "acted; without node_ids an episode keeps their number"
                    )
        return rows

    def cut_mask(self, rows: list[np.ndarray]) -> None:
        """Makes a padded mask as long as the rows it masks. UsageError if it allows more."""
        k = [leaf.path for leaf in self.leaves].index("action_mask")
        groups = [leaf.group for leaf in self.leaves]
        num = len(rows[groups.index(self.named["action_mask"])])
        if rows[k][num:].any():
            more = num + int(rows[k][num:].argmax())
            problem = f"option {more} is allowed, there are {num} rows to choose from"
            raise UsageError(f"{self.place(LATEST.env.number, 'action_mask')}: {problem}")
        rows[k] = rows[k][:num]

    def collate(self, observations: list[list[np.ndarray]]) -> Any:
        if next(self.problems(observations, self.parts), None):
            first = self.first if len(observations) > 1 else LATEST.env.number
            for number, own in enumerate(observations, first):
                parts = self.parts[(number - self.first) % len(self.parts)]
                for path, problem in self.problems([own], [parts]):
                    raise UsageError(f"{self.place(number, path)}: {problem}")
        if self.masks and not LATEST.env.has_ended and MASKED not in SAID.lines:
            self.tell_masked()
        return self.flat

    def tell_masked(self) -> None:
        """Says once that an observation allows nothing, which is no end of a training."""
        first = self.first if self.flat.size > 1 else LATEST.env.number
        for part in self.masks:
            k = [leaf.path for leaf in self.leaves].index(part.mask)
            leaf = self.leaves[k]
            for i in all_masked(self.flat.values[k], self.flat.counts, leaf.group, part)[:1]:
                say(f"{self.place(first + i, part.mask)}: {MASKED}. This is said once", MASKED)

    def problems(self, observations: list, parts: list[list]) -> Iterator[tuple[str, str]]:
        """(path of a leaf, what is wrong with it). Its numbers are right for one observation; where
        there are several they may be another's. Sets `flat` when dtypes and shapes are right."""
        columns = list(zip(*observations))
        others = set()  # numbers of the leaves with rows of other dtypes than theirs
        for k, (look, rows) in enumerate(zip(self.looks, columns)):
            for array in rows:
                if array.dtype != look.dtype or array.shape[1:] != look.shape or not array.ndim:
                    yield from wrong_form(look.leaf, array)
                    others.add(k)
        self.flat = super().collate(observations)
        arrays = list(self.flat.values)
        for k in others:
            arrays[k] = np.concatenate(columns[k])  # as they were before they got the leaf's dtype
        counts = self.flat.counts
        for look, rows in zip(self.looks, columns):
            if look.is_counted:  # by the first leaf of its group
                num = np.fromiter(map(len, rows), np.int64, len(rows))
                yield from unlike_rows(look.leaf.path, num, look.leaf.group, counts)
        is_last = np.array(LATEST.env.has_ended)
        yield from wrong_rows(self, arrays, counts, parts, is_last)

    def place(self, number: int, path: str) -> str:
        """What begins an error."""
        return f"env {number}, leaf '{path}', step {LATEST.env.num_steps}"

    def ask(self, requests: Iterable[Callable]) -> list:
        """What the first request returns, given these environments."""
        return [next(iter(requests))(self)]

    def close(self) -> None:
        for env in self.envs:
            close(env)


def numbers_of_rows(
    script: ModuleType, leaves: list, parts: list, acting: str | None
) -> tuple[dict, dict]:
    """({path of a ragged mask, or node_ids: the group that it has as many rows as}, {path of a mask
    of pairs: see rows_of_masks})."""
    named, pairs = rows_of_masks(parts)
    with contextlib.suppress(script.UsageError):  # there are several graphs
        named["node_ids"] = id_group(script, leaves, acting)
    ragged = [leaf.path for leaf in leaves if leaf.path == leaf.group]
    return {path: named[path] for path in ragged if named.get(path)}, pairs


def wrong_rows(
    envs: Any, arrays: list[np.ndarray], counts: dict, parts: list[list], is_last: np.ndarray
) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) with the rows of each leaf, of observations that stand one after the
    other, as far as it can be told without the others; `is_last`, bool [N] or one, of an episode.
    `envs` has looks, named and pairs."""
    for path, group in envs.named.items():
        yield from unlike_rows(path, counts[path], group, counts)
    yield from wrong_pairs(counts, envs.pairs)
    for look, values in zip(envs.looks, arrays):
        leaf = look.leaf
        is_fine = look.is_number or look.is_float32 and np.isfinite(values).all()
        if not is_fine or values.dtype != look.dtype:
            for problem in wrong_values(leaf, values, counts):
                yield leaf.path, problem
        if look.is_choice:
            for problem in wrong_numbers(leaf, counts, parts, is_last):
                yield leaf.path, problem


def id_group(script: ModuleType, leaves: list, acting: str | None) -> str | None:
    """The group whose rows node_ids tell apart: that of which a memory keeps states; agents; else
    nodes, or elements of a set, also where edges act."""
    if hasattr(script, "id_group"):
        return script.id_group(leaves)
    are_agents = "rewards" in script.Step._fields
    links = [leaf.path for leaf in leaves if leaf.is_links]
    if acting is None or acting in links and not are_agents:
        return script.group_of("nodes", leaves)
    return acting


# ---- Spaces ----
def for_policy(leaves: list, args: Any) -> list:
    """The leaves without those of --critic-only."""
    names = tuple(f"{name}." for name in getattr(args, "critic_only", ()))
    return [leaf for leaf in leaves if not (leaf.is_input and f"{leaf.whole}.".startswith(names))]


def wrong_leaves(leaves: list) -> Iterator[str]:
    """What is wrong with those of an observation space."""
    paths = [leaf.path for leaf in leaves]
    if len(set(paths)) < len(paths) or not any(leaf.is_input for leaf in leaves):
        yield f"leaves {paths} need different names, and one must be an input"
    for leaf in leaves:
        is_discrete = isinstance(leaf.space, DISCRETE) and leaf.is_input and not leaf.is_links
        if is_discrete and num_options(leaf.space).sum() > MOST:
            name = fitting.name_of(leaf.space)
            yield f"leaf '{leaf.path}': {name} has over {MOST} values; a Box has numbers"
        is_sequence = leaf.path == leaf.group and leaf.dtype.kind in "iu"
        if leaf.path == "node_ids" and not (is_sequence and any(map(has_ids, leaves))):
            needed = "must be integers in a Sequence, one per node or element of a set"
            yield f"leaf 'node_ids': {fitting.name_of(leaf.space)} {needed}"


def has_ids(leaf: Any) -> bool:
    """Whether node_ids can tell its rows apart."""
    return leaf.is_ragged and leaf.is_input and leaf.group != "avail_actions"


def wrong_actions(script: ModuleType, space: gym.Space, leaves: list, args: Any) -> Iterator[str]:
    """What is wrong with an action space, its heads or its masks."""
    yield from unplayed(space, "action")
    name = fitting.name_of(space)
    parts = script.parts_of(space, leaves, args)
    if min([part.k for part in parts], default=0) < 1:
        yield f"action space {name} is not supported, there is nothing to choose"
    if sum(part.k * part.n for part in parts if part.group is None) > MOST:
        yield f"action space {name} has over {MOST} options"
    rows = {}  # path of a mask -> the groups of the first part that it is for
    for part in parts:
        own = {part.group, part.rows} - {None, script.STEP}
        if part.mask and rows.setdefault(part.mask, own) != own:
            parts_of_it = f"{name}, whose parts choose from other rows"
            yield f"leaf '{part.mask}': a mask does not fit {parts_of_it}"
    unused = {leaf.group for leaf in leaves} - {part.group for part in parts}
    acts = any(part.is_per_row for part in parts)
    if args.action_head == "auto" and "avail_actions" in unused and not acts:
        yield f"{name} chooses from no avail_actions: give --action-head avail_actions, or flat"


def unplayed(space: gym.Space, path: str) -> Iterator[str]:
    """What scripts do not play, although they read it in an observation."""
    for k in fitting.keys_of(space):
        yield from unplayed(space[k], f"{path}.{k}")
    is_stack = isinstance(space, spaces.Sequence) and space.stack
    if isinstance(space, spaces.Graph) or is_stack and fitting.keys_of(space.feature_space):
        advice = "; with stack=False it is" * is_stack
        yield f"leaf '{path}': {fitting.name_of(space)} is not supported in actions{advice}"


def num_options(space: gym.Space) -> np.ndarray:
    """The number of values of each entry of a Discrete or MultiDiscrete space."""
    return np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)


def meaning(script: ModuleType, env: gym.Env, parts: list) -> tuple[str, ...]:
    """What must be the same for all environments, of observations and of actions, and both spaces:
    all but the bounds of what is observed, and the number of rows to choose from."""
    inputs = []
    for leaf in script.leaves_of(env.observation_space):
        if leaf.is_input:
            inputs.append((leaf.path, leaf.group, re.sub(r"Box\([^(]*", "", str(leaf.space))))
    done = [part if part.group is None else part._replace(n=0) for part in parts]
    action = str(env.action_space)
    if any(part.group is not None for part in parts):
        action = re.sub(r"Discrete\([^,)]*", "", action)
    shown = fitting.name_of(env.observation_space), fitting.name_of(env.action_space)
    return f"{inputs}", f"{done} {action}", *shown


def unlike(found: list[tuple[str, ...]]) -> Iterator[str]:
    """Which entries of --env-kwargs are not for one network, by their meanings."""
    texts = list(zip(*found))
    for name, meanings, shown in zip(("observation", "action"), texts, texts[2:]):
        if len(set(meanings)) > 1:
            yield f"--env-kwargs: not all entries have the {name} space {shown[0]}: {list(shown)}"


# ---- Observations ----
def unreadable(
    script: ModuleType, space: gym.Space, obs: Any, path: str = ""
) -> Iterator[tuple[str, str]]:
    """(path of a leaf that cannot be read, what its observation is)."""
    keys = fitting.keys_of(space)
    for k in keys:
        name = f"{path}.{k}".removeprefix(".")
        try:
            child = obs[k]
        except Exception as problem:  # of many kinds
            yield name, f"{text_of(problem)}; {fitting.shown(obs)} where {list(keys)} is declared"
            return
        yield from unreadable(script, space[k], child, name)
    try:
        arrays = [] if keys else script.arrays_of(space, obs)
        for array in arrays:
            np.array(array)
    except Exception as problem:  # of many kinds
        text = (
            f"{text_of(problem)}; {fitting.shown(obs)} where {fitting.name_of(space)} is declared"
        )
        if isinstance(space, spaces.Graph):
            text += "; to_graph_instance of cleanrl_graph.envs.pyg makes one of PyG's or networkx's"
        yield script.leaves_of(space, path)[0].path, text


def wrong_form(leaf: Any, rows: np.ndarray) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) with dtype and shape of an array, which are not those of the leaf."""
    kinds = "biu" if leaf.dtype.kind in "biu" else "biuf"
    if rows.ndim == 0 or rows.shape[1:] != leaf.space.shape or rows.dtype.kind not in kinds:
        found = form(rows.dtype, rows.shape, leaf)
        needed = form(leaf.space.dtype, ("rows", *leaf.space.shape), leaf)
        yield leaf.path, f"{found} where {needed} is declared"


def form(dtype: np.dtype, shape: tuple, leaf: Any) -> str:
    """Of the rows of a leaf, in words; where it is not ragged there is one."""
    return f"dtype {dtype}, shape {shape if leaf.is_ragged else shape[1:]}"


def unlike_rows(path: str, num: np.ndarray, group: str, counts: dict) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) where a leaf has not as many rows as its group."""
    if (num != counts[group]).any():
        advice = "; --action-head says which rows are chosen from" * (path == "action_mask")
        yield path, f"{num[0]} rows where '{group}' has {counts[group][0]}{advice}"


def wrong_pairs(counts: dict, pairs: dict) -> Iterator[tuple[str, str]]:
    """(path, what is wrong) with the numbers of rows of masks that have one for each pair."""
    for path, ways in pairs.items():
        products = [math.prod(counts.get(factor, factor) for factor in way) for way in ways]
        if not any((counts[path] == product).all() for product in products):
            names = " or ".join(" x ".join(map(str, way)) for way in ways)
            needed = " or ".join(str(product[0]) for product in products)
            yield path, f"{counts[path][0]} rows where {names} has {needed}"


def wrong_values(leaf: Any, values: np.ndarray, counts: dict) -> Iterator[str]:
    """What is wrong with values and ids."""
    bad = out_of_range(leaf, values, counts)
    if bad.any():
        where = f" in row {np.argwhere(bad)[0][0]}" if leaf.is_ragged else ""
        yield f"value {values[bad][0]}{where}{allowed(leaf, values, bad, counts)}"
    if leaf.path == "node_ids":
        num = counts[leaf.group]
        for own in np.split(values, num.cumsum()[:-1]):
            ids, times = np.unique(own, return_counts=True)
            if (times > 1).any():
                value = ids[times > 1][0]
                again = np.flatnonzero(own == value)[1]
                yield f"the id {value} occurs twice, at index {again} again"


def wrong_numbers(leaf: Any, counts: dict, parts: list[list], is_last: np.ndarray) -> Iterator[str]:
    """What is wrong with the numbers of rows to choose from: an episode's last observation, of
    which only the value is needed, may have none."""
    num = counts[leaf.group]
    for k, part in enumerate(parts[0]):
        if part.group != leaf.group:
            continue
        most = np.array([own[k].n for own in parts])[: len(num)]
        acts = counts[part.rows] > 0
        if (((num == 0) & acts & ~is_last) | (num > most)).any():
            needed = f"give 1 to {most[0]} rows, none only where this step ends the episode"
            yield f"{num[0]} rows to choose from, the action space has {most[0]}: {needed}"


def out_of_range(leaf: Any, values: np.ndarray, counts: dict) -> np.ndarray:
    """Where the values of a leaf are not finite, no node of their graph, no category, or not of its
    dtype, in which they would become others."""
    if leaf.dtype.kind == "f":
        return ~(np.abs(values) <= FLOAT32)
    if leaf.is_links:
        num = counts[leaf.nodes].repeat(counts[leaf.group])[:, None]
        return (values < 0) | (values >= num)
    if isinstance(leaf.space, DISCRETE):
        low = leaf.space.start
        return (values < low) | (values >= low + num_options(leaf.space))
    cast = values.astype(leaf.space.dtype)  # uint16 is kept as int64
    return (cast != values) | (values.astype(leaf.dtype) != values)


def allowed(leaf: Any, values: np.ndarray, bad: np.ndarray, counts: dict) -> str:
    """What may stand where the first bad value does, for the end of a sentence."""
    if leaf.dtype.kind == "f":
        return " exceeds float32" * bool(np.isfinite(values[bad][0]))
    if leaf.is_links:
        return f" of a graph with {counts[leaf.nodes][0]} nodes"
    if isinstance(leaf.space, DISCRETE):
        low = np.broadcast_to(leaf.space.start, values.shape)[bad][0]
        num = np.broadcast_to(num_options(leaf.space), values.shape)[bad][0]
        return f"; {fitting.name_of(leaf.space)} has {low} to {low + num - 1}"
    return f"; {leaf.space.dtype} is declared"


# ---- Masks ----
def with_row_mask(script: ModuleType, env: gym.Env, head: str) -> gym.Space:
    """The observation space. Where --action-head makes a Discrete action the choice of a row, a
    mask of as many entries as there are options is one of rows, padded."""
    space = env.observation_space
    mask = space.get("action_mask") if isinstance(space, spaces.Dict) else None
    is_wide = isinstance(mask, (spaces.Box, spaces.MultiBinary)) and head not in ("auto", "flat")
    if not is_wide or not isinstance(env.action_space, spaces.Discrete):
        return space
    if mask.shape != (env.action_space.n,) or not script.group_of(head, script.leaves_of(space)):
        return space
    row = spaces.Box(0, 1, (), mask.dtype)
    spaces_now = {**space, "action_mask": spaces.Sequence(row, stack=True)}
    return spaces.Dict(list(spaces_now.items()))  # a dict would be sorted


def rows_of_masks(parts: list) -> tuple[dict, dict]:
    """({path of a mask: the group with as many rows, if there is one}, {path of another one: lists
    of groups or numbers, of one of which its number of rows is the product})."""
    named = {}
    pairs = {}
    for before, part in zip([None, *parts], parts):
        if part.mask is None:
            continue
        if part.group is not None and part.is_per_row:
            pairs[part.mask] = [[part.rows, part.group]]
        elif part.group is not None and part.given:
            pairs[part.mask] = [[part.group], [before.group or before.n, part.group]]
        elif part.is_per_row:
            named[part.mask] = part.rows
        elif part.given:
            named[part.mask] = before.group
        else:
            named[part.mask] = part.group
    return named, pairs


def all_masked(mask: np.ndarray, counts: dict, group: str, part: Any) -> np.ndarray:
    """The numbers of the observations that allow no option of an entry, or of a row that acts, as
    far as no other part decides; `group` is that of the mask."""
    nothing = np.array([], np.int64)
    if part.given:
        return nothing
    allowed = mask.reshape(len(mask), math.prod(mask.shape[1:]))[:, part.entries] != 0
    if part.group is None:
        num = counts[group]
        env = np.arange(len(num)).repeat(num)  # of each row
        return env[~allowed.reshape(len(mask), part.k, part.n).any(2).all(1)]
    acting = counts[part.rows]
    env_of_draw = np.arange(len(acting)).repeat(acting)
    options = counts[part.group][env_of_draw]
    draw = np.arange(len(options)).repeat(options)  # of each row of the mask
    if len(draw) != len(allowed):  # pairs
        return nothing
    return env_of_draw[np.bincount(draw, allowed.any(1), len(options)) == 0]
