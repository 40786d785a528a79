"""cleanrl_graph, demonstrations: what a policy sees and does in an environment, in one npz file.

A policy is any callable `policy(env, obs, rng) -> action`: `env` without its wrappers, so that a
rule can look inside, `obs` an element of the observation space, `rng` a numpy Generator, and the
action an element of the action space. `module:name` imports it; a trained agent is one after a few
lines that call it.

The file (numpy.savez, no pickle; S steps in the order in which they were made):

| key | array |
| --- | --- |
| `format` | the string "cleanrl_graph-demos-1" |
| `env_id`, `env_kwargs` | strings, the latter JSON, for the reader's eye: the spaces are checked |
| `values/PATH` | a leaf of the observation: [S, ...], or [rows, ...], those of all steps |
| `counts/PATH` | int64 [S], the rows of each step; only of a leaf whose number of rows varies |
| `actions` | [S, columns]: int64, or float32 where a part of the action is a Box |
| `rewards` | float32 [S], the reward of each action |
| `terminated`, `truncated` | bool [S], whether the episode ended with the action, and how |

PATH joins the keys of Dict spaces and the places in Tuple spaces with dots, "obs" for a space that
is in neither. A Graph has the leaves PATH.nodes, PATH.edge_links (int32 [edges, 2], node indices
counted within each step) and, with an edge space, PATH.edges; a Sequence has PATH, or PATH.KEY of a
Dict in it. dtypes are those of the space, but int64 for unsigned integers beyond uint8 and
float32 for all floats; in older files also int64 for edge_links and categories. Categories in an
observation are as the environment gives them, from `start` on; those of an action count from 0,
whatever `start` is. The columns of an action follow the space, Dict and Tuple from the first entry
to the last: one of a Discrete, one per entry of MultiDiscrete, MultiBinary and Box, row by row.
"""

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tqdm import tqdm

from cleanrl_graph.services import import_first
from cleanrl_graph.services.check import out_of_range

FORMAT = "cleanrl_graph-demos-1"
Policy = Callable[[gym.Env, Any, np.random.Generator], Any]


def find_policy(name: str) -> Policy:
    """What "module:name" names; `envs.NAME` is cleanrl_graph's where the current folder has no such
    module of its own. SystemExit if there is no such function."""
    module, _, attribute = name.partition(":")
    packaged = f"cleanrl_graph.{module}" if module.startswith("envs.") else ""
    policy = getattr(import_first(module, packaged), attribute, None)
    if not callable(policy):
        raise SystemExit(
            f"policy {name}: there is no such function; module:name is needed, as in "
            "cleanrl_graph.envs.job_shop:mwkr"
        )
    return policy


def action_columns(space: gym.Space, action: Any) -> np.ndarray:
    """An element of an action space as numbers [columns]: the inverse of a script's
    `to_env_actions`. SystemExit for a Sequence."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        keys = space if isinstance(space, spaces.Dict) else range(len(space))
        return np.concatenate([action_columns(space[k], action[k]) for k in keys])
    if isinstance(space, spaces.Sequence):
        raise SystemExit(
            f"demonstrations of actions in {space}, whose number varies, cannot be recorded"
        )
    start = getattr(space, "start", 0)  # of categories
    return np.ravel(np.asarray(action) - start)


def record(envs: Any, policy: Policy, num_episodes: int, seed: int) -> dict[str, np.ndarray]:
    """The arrays of the file, but for format, env_id and env_kwargs, of a policy in the only
    environment of the script's `envs`, which checks each observation."""
    if num_episodes < 1:
        raise SystemExit(f"{num_episodes} episodes of demonstrations: at least 1 is needed")
    env = envs.envs[0]
    rng = np.random.default_rng(seed)
    flats = []  # the observation of each step
    actions = []
    outcomes = []
    seeds = [seed] + [None] * (num_episodes - 1)
    for seed in tqdm(seeds, unit="episode", mininterval=1, leave=False):
        obs, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            flats.append(envs.collate([envs.read(0, obs)], [0]))
            action = policy(env.unwrapped, obs, rng)
            actions.append(action_columns(env.action_space, action))
            obs, reward, terminated, truncated, _ = env.step(action)
            outcomes.append(np.hstack([reward, terminated, truncated]))  # each may be [1]
            ended = terminated or truncated
            envs.num_steps += 1  # what the next error says
    data = {}
    for k, leaf in enumerate(envs.leaves):
        data[f"values/{leaf.path}"] = np.concatenate([flat.values[k] for flat in flats])
        if leaf.group:
            counts = np.concatenate([flat.counts[leaf.group] for flat in flats])
            data[f"counts/{leaf.path}"] = counts
    actions = np.array(actions)
    data["actions"] = actions.astype(np.float32 if actions.dtype.kind == "f" else np.int64)
    rewards, terminated, truncated = np.array(outcomes, np.float32).T
    return data | {"terminated": terminated > 0, "truncated": truncated > 0, "rewards": rewards}


def save(path: str, data: dict[str, np.ndarray], env_id: str, env_kwargs: Any) -> None:
    """Writes the file, whole or not at all. SystemExit if it cannot be written."""
    kwargs = json.dumps(env_kwargs)
    unfinished = path + ".tmp"
    try:
        with open(unfinished, "wb") as file:
            np.savez_compressed(file, format=FORMAT, env_id=env_id, env_kwargs=kwargs, **data)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise SystemExit(f"cannot write {path}: {error}") from None


def record_file(Envs: type, make_env: Callable, args: Any) -> None:
    """The file of --demos: --record-episodes episodes of the policy --record in one environment of
    a script's Envs."""
    if not args.demos:
        raise SystemExit(f"--record {args.record} needs --demos FILE, the file that it writes")
    num = args.record_episodes
    with contextlib.closing(Envs([partial(make_env, args)], args.action_head)) as envs:
        data = record(envs, find_policy(args.record), num, args.seed)
    save(args.demos, data, args.env_id, args.env_kwargs)
    rewards = data["rewards"]
    mean = rewards.sum(dtype=float) / num
    size = os.path.getsize(args.demos) / 2**20
    print(
        f"{args.demos}: {num} episodes, {len(rewards)} steps, mean return {mean:.5g}, "
        f"{size:.2f} MiB"
    )


class Misfit(Exception):
    """What of a file does not fit the environment."""


def load(
    path: str, leaves: list, parts: list
) -> tuple[list[np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """(values, counts, actions [S, columns]) of the file, the former as in a script's Flat, for an
    environment with these leaves and parts of an action. SystemExit names file, leaf and step of
    what does not fit: names, shapes and dtypes of leaves, values out of range, actions that do not
    exist or are masked."""
    try:
        for part in parts:
            if part.group and part.kind != "choice":
                raise Misfit(
                    "demonstrations of a Sequence of actions, whose number varies, cannot be read"
                )
        data = read(path)
        values, counts = read_observations(data, leaves)
        check_values(leaves, values, counts)
        check_actions(data["actions"], parts, values, counts)
    except Misfit as problem:
        raise SystemExit(f"--demos {path}: {problem}") from None
    del counts[None]
    kinds = [part.kind for part in parts]
    dtype = np.float32 if "normal" in kinds else np.int64
    return list(values.values()), counts, data["actions"].astype(dtype)


def read(path: str) -> dict[str, np.ndarray]:
    """The arrays of a file. Misfit if it is something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = dict(file)
    except Exception as error:  # of many kinds
        raise Misfit(f"not a file of demonstrations: {error}") from None
    if str(data.get("format")) != FORMAT or "actions" not in data:
        raise Misfit(f"its format is {data.get('format')}, this script reads {FORMAT}")
    return data


def read_observations(data: dict[str, np.ndarray], leaves: list) -> tuple[dict, dict]:
    """{path: values} and {group or None: counts} of a file. Misfit if names, dtypes, shapes or
    counts are not those of the environment's leaves."""
    ours = sorted(leaf.path for leaf in leaves)
    theirs = sorted(name.removeprefix("values/") for name in data if name.startswith("values/"))
    if theirs != ours:
        raise Misfit(f"it has the leaves {theirs}, the environment {ours}")
    steps = np.ones(len(data["actions"]), np.int64)
    counts = {None: steps}  # of dense leaves
    values = {}
    for leaf in leaves:
        about = f"leaf '{leaf.path}'"
        rows = data[f"values/{leaf.path}"]
        num = data.get(f"counts/{leaf.path}")
        if leaf.kind in ("links", "discrete") and rows.dtype == np.int64:  # of older files
            rows = rows.astype(leaf.dtype)
        found = layout(rows.dtype, rows.shape[1:], num is not None)
        needed = layout(leaf.dtype, leaf.shape, leaf.group is not None)
        if found != needed:
            raise Misfit(f"{about}: {found} where the environment has {needed}")
        num = steps if num is None else num.astype(np.int64)
        if len(num) != len(steps) or num.min(initial=0) < 0 or num.sum() != len(rows):
            raise Misfit(
                f"{about}: counts of {len(num)} steps and {num.sum()} rows where there are "
                f"{len(steps)} steps and {len(rows)} rows"
            )
        if (num != counts.setdefault(leaf.group, num)).any():
            raise Misfit(f"{about}: its counts are not those of the other leaves of '{leaf.group}'")
        values[leaf.path] = rows
    return values, counts


def layout(dtype: np.dtype, shape: tuple, is_ragged: bool) -> str:
    """In words; `shape` is that of a row or step."""
    rows = ("rows",) if is_ragged else ()
    return f"dtype {dtype}, shape {rows + tuple(shape)}"


def check_values(leaves: list, values: dict, counts: dict) -> None:
    """Misfit names the first value that is out of range, and its step."""
    for leaf in leaves:
        array = values[leaf.path]
        bad = out_of_range(leaf, array, counts)
        if bad.any():
            row = np.argwhere(bad)[0][0]
            step = np.searchsorted(counts[leaf.group].cumsum(), row, side="right")
            value = array[bad][0]
            raise Misfit(f"step {step}, leaf '{leaf.path}': value {value} is out of range")


def check_actions(actions: np.ndarray, parts: list, values: dict, counts: dict) -> None:
    """Misfit if actions have another shape, do not exist or are masked."""
    num = parts[-1].columns.stop
    if actions.ndim != 2 or actions.shape[1] != num or not len(actions):
        raise Misfit(f"actions of shape {actions.shape} where [steps, {num}] is needed")
    for k, part in enumerate(parts):
        chosen = actions[:, part.columns]
        rows = counts[part.group]
        bad = ~exists(part, chosen, rows).all(1)
        problem = "is out of range"
        if part.mask and not bad.any():
            bad = is_masked(part, chosen[:, 0].astype(np.int64), rows, values[part.mask])
            problem = "is masked"
        if bad.any():
            step = bad.argmax()
            action = chosen[step].tolist()
            raise Misfit(f"step {step}: part {k} of the action, {action}, {problem}")


def exists(part: Any, chosen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether a part of the action can be `chosen` [S, columns]; a choice is one of `rows` [S]."""
    if part.kind == "normal":
        return np.isfinite(chosen)
    num = 2 if part.kind == "bits" else part.size
    if part.kind == "choice":
        num = rows[:, None]
    return (chosen >= 0) & (chosen < num) & (chosen == np.floor(chosen))


def is_masked(part: Any, chosen: np.ndarray, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Whether a mask forbids what is `chosen` [S]; it has `rows` [S] of each step."""
    mask = mask.reshape(len(mask), -1)[:, part.entries]
    first = rows.cumsum() - rows
    if part.kind == "choice":
        return mask[first + chosen, 0] == 0
    return mask[first, chosen] == 0
