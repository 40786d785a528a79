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
| `actions` | [S, columns]: int64, or float64 where a part of the action is a Box |
| `rewards` | float32 [S], the reward of each action |
| `terminated`, `truncated` | bool [S], whether the episode ended with the action, and how |

PATH joins the keys of Dict spaces and the places in Tuple spaces with dots, "obs" for a space that
is in neither. A Graph has the leaves PATH.nodes, PATH.edge_links (int32 [edges, 2], node indices
counted within each step) and, with an edge space, PATH.edges; a Sequence has PATH, or PATH.KEY of a
Dict in it. dtypes are those of the space, but int64 for unsigned integers beyond uint8, and float32
for smaller floats; other sizes are read as well. Categories in an
observation are as the environment gives them, from `start` on; those of an action count from 0,
whatever `start` is. The columns of an action follow the space, Dict and Tuple from the first entry
to the last: one of a Discrete, one per entry of MultiDiscrete, MultiBinary and Box, row by row. Of
a Box of integers with more than 64 values an entry is a number from -1 to 1, as scripts choose it.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tqdm import tqdm

from cleanrl_graph.envs.fitting import keys_of
from cleanrl_graph.services import import_first
from cleanrl_graph.services.check import entries, plain
from cleanrl_graph.services.process import whole

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


def action_columns(space: gym.Space, action: Any) -> list[float]:
    """An element of an action space as numbers [columns]: the inverse of a script's
    `to_env_actions`. SystemExit for a Sequence."""
    if isinstance(space, spaces.Sequence):
        raise SystemExit(
            f"demonstrations of actions in {space}, whose number varies, cannot be recorded"
        )
    keys = keys_of(space)
    if not keys:
        return np.ravel(np.asarray(action) - getattr(space, "start", 0)).tolist()
    return sum([action_columns(space[k], action[k]) for k in keys], [])


def record(envs: Any, policy: Policy, num_episodes: int, seed: int) -> dict[str, np.ndarray]:
    """The arrays of the file, but for format, env_id and env_kwargs, of a policy in the script's
    `envs`, which check each observation: an episode in each of them in turn."""
    if num_episodes < 1:
        raise SystemExit(f"{num_episodes} episodes of demonstrations: at least 1 is needed")
    num_envs = len(envs.envs)
    rng = np.random.default_rng(seed)
    flats = []  # the observation of each step
    actions = []
    outcomes = []
    for k in tqdm(range(num_episodes), unit="episode", mininterval=1, leave=False):
        env = envs.envs[k % num_envs]
        obs, _ = env.reset(seed=seed + k if k < num_envs else None)
        ended = False
        while not ended:
            flats.append(envs.collate([envs.read(obs)]))
            action = policy(env.unwrapped, obs, rng)
            actions.append(action_columns(env.action_space, action))
            obs, reward, terminated, truncated, _ = env.step(action)
            outcomes.append([reward, terminated, truncated])
            ended = terminated or truncated
    data = {}
    for k, leaf in enumerate(envs.leaves):
        data[f"values/{leaf.path}"] = np.concatenate([flat.values[k] for flat in flats])
        if leaf.is_ragged:
            counts = np.concatenate([flat.counts[leaf.group] for flat in flats])
            data[f"counts/{leaf.path}"] = counts
    actions = np.array(actions)  # float64 or int64
    data["actions"] = actions if actions.dtype.kind == "f" else actions.astype(np.int64)
    rewards, terminated, truncated = np.array(outcomes, np.float32).T
    return data | {"terminated": terminated > 0, "truncated": truncated > 0, "rewards": rewards}


def record_file(Envs: type, make_env: Callable, args: Any) -> None:
    """The file of --demos, whole or not at all: --record-episodes episodes of the policy --record,
    in each entry of --env-kwargs in turn. SystemExit if it cannot be written."""
    path = args.demos
    if not path:
        raise SystemExit(f"--record {args.record} needs --demos FILE, the file that it writes")
    num = args.record_episodes
    makers = [partial(make_env, args, k) for k in range(len(entries(args)))]
    with contextlib.closing(Envs(makers, args)) as envs:
        data = record(envs, find_policy(args.record), num, args.seed)
    kwargs = json.dumps(plain(args.env_kwargs))
    with whole(path) as unfinished, open(unfinished, "wb") as file:
        np.savez_compressed(file, format=FORMAT, env_id=args.env_id, env_kwargs=kwargs, **data)
    rewards = data["rewards"]
    mean = rewards.sum(dtype=float) / num
    size = os.path.getsize(path) / 2**20
    print(f"{path}: {num} episodes, {len(rewards)} steps, mean return {mean:.5g}, {size:.2f} MiB")


def check(path: str, envs: Any) -> None:
    """SystemExit names file, step and leaf of what a script's Envs could not have returned, and
    actions that do not exist there or are masked."""
    try:
        if envs.acting is not None:
            raise ValueError("those of a Sequence of actions, whose number varies, cannot be read")
        observations, actions = read(path, envs.leaves)
        envs.place = "step {}, leaf '{}'".format
        # There may be more rows to choose from than in this environment
        parts = [
            part if part.group is None else part._replace(n=math.inf) for part in envs.parts[0]
        ]
        envs.parts = [parts]
        flat = envs.collate(observations)
        check_actions(actions, parts, flat, [leaf.path for leaf in envs.leaves])
    except Exception as problem:  # of many kinds
        raise SystemExit(f"--demos {path}: {problem}") from None


def read(path: str, leaves: list) -> tuple[list, np.ndarray]:
    """(what a script's Envs.read returns for each step, actions [S, columns]). ValueError for a
    file of something else, or of other leaves."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = dict(file)
    except Exception as problem:  # of many kinds
        raise ValueError(f"not a file of demonstrations: {problem}") from None
    if str(data.get("format")) != FORMAT:
        raise ValueError(f"its format is {data.get('format')}, this script reads {FORMAT}")
    ours = sorted(leaf.path for leaf in leaves)
    theirs = sorted(name.removeprefix("values/") for name in data if name.startswith("values/"))
    if theirs != ours:
        raise ValueError(f"it has the leaves {theirs}, the environment {ours}")
    actions = data.get("actions", ())
    num_steps = len(actions)
    if num_steps == 0:
        raise ValueError("it has no actions")
    values = []  # of each leaf the arrays of all steps
    for leaf in leaves:
        rows = data[f"values/{leaf.path}"]
        num = data.get(f"counts/{leaf.path}", np.array([])).astype(np.int64)
        if not leaf.is_ragged:
            num = np.ones(num_steps, np.int64)
        if len(num) != num_steps or num.sum() != len(rows):
            raise ValueError(
                f"leaf '{leaf.path}': counts of {len(num)} steps and {num.sum()} rows where there "
                f"are {num_steps} steps and {len(rows)} rows"
            )
        values.append(np.split(rows, num.cumsum()[:-1]))
    return list(zip(*values)), actions


def check_actions(actions: np.ndarray, parts: list, flat: Any, paths: list[str]) -> None:
    """ValueError if actions [S, columns] have another shape, do not exist or are masked; `paths`
    are those of the leaves of the S observations."""
    num = parts[-1].columns.stop
    if actions.ndim != 2 or actions.shape[1] != num:
        raise ValueError(f"actions of shape {actions.shape} where [steps, {num}] is needed")
    for k, part in enumerate(parts):
        chosen = actions[:, part.columns]
        rows = flat.counts.get(part.group)
        problem = "is out of range"
        if part.n == 0:
            bad = ~np.isfinite(chosen)
        else:
            stop = part.n if rows is None else rows[:, None]
            bad = (chosen < 0) | (chosen >= stop) | (chosen != np.floor(chosen))
        if part.mask is not None and not bad.any():
            problem = "is masked"
            mask = flat.values[paths.index(part.mask)]
            mask = mask.reshape(len(mask), math.prod(mask.shape[1:])) != 0
            num = flat.counts.get(part.mask, np.ones(flat.size, np.int64))
            masks = np.split(mask, num.cumsum()[:-1])
            nums = [None] * flat.size if rows is None else rows
            steps = zip(chosen.astype(int), masks, nums, actions[:, part.columns.start - 1])
            bad = np.array([[is_masked(part, *step)] for step in steps])
        if bad.any():
            step = bad.any(1).argmax()
            action = chosen[step].tolist()
            raise ValueError(f"step {step}: part {k} of the action, {action}, {problem}")


def is_masked(
    part: Any, chosen: np.ndarray, mask: np.ndarray, num: int | None, before: float
) -> bool:
    """Whether a step's mask [rows, any] forbids what is `chosen` [columns], given what the part
    before has chosen; a choice is one of `num` rows, None for others. A mask without any option
    allows all."""
    if part.group is None and part.given:
        mask = mask.reshape(-1, part.k * part.n)[int(before)]
    elif part.group is None or len(mask) == num:
        mask = mask[:, part.entries]
    else:  # an entry for each pair of rows
        mask = mask[int(before) * num :][:num]
    allowed = mask.any(1)[None] if part.group is not None else mask.reshape(part.k, part.n)
    is_chosen = np.take_along_axis(allowed, chosen[:, None], 1)[:, 0]
    return bool((allowed.any(1) & ~is_chosen).any())
