"""cleanrl_graph, demonstrations: what a policy sees and does in an environment, in one npz file.

A policy is any callable `policy(env, obs, rng) -> action`: `env` without its wrappers, so that a
rule can look inside, `obs` an element of the observation space, `rng` a numpy Generator, and the
action an element of the action space. `module:name` imports it; a trained agent is one after a few
lines that call it.

The file (numpy.savez, no pickle; S steps in the order in which they were made):

| key | array |
| --- | --- |
| `format` | the string "cleanrl_graph-demos-1" |
| `env_id`, `env_kwargs` | strings, the latter JSON; for the reader's eye, the spaces are what is checked |
| `values/PATH` | a leaf of the observation: [S, ...], or the rows of all steps one after the other, [rows, ...] |
| `counts/PATH` | int64 [S], the rows of each step; only of a leaf whose number of rows varies |
| `actions` | [S, columns]: int64, or float32 where a part of the action is a Box |
| `rewards` | float32 [S], the reward of each action |
| `terminated`, `truncated` | bool [S], whether the episode ended with the action, and how |

PATH joins the keys of Dict spaces and the places in Tuple spaces with dots, "obs" for a space that
is in neither. A Graph has the leaves PATH.nodes, PATH.edge_links (int32 [edges, 2], node indices
counted within each step) and, with an edge space, PATH.edges; a Sequence has PATH, or PATH.KEY of a
Dict in it. dtypes are those of the space, but int64 for Discrete, MultiDiscrete and unsigned
integers beyond uint8, int8 for MultiBinary and float32 for all floats; categories are as the
environment gives them. The columns of an action follow the space, Dict and Tuple from the first
entry to the last: one of a Discrete, one per entry of MultiDiscrete, MultiBinary and Box, row by
row; options count from 0, whatever `start` is.
"""

import contextlib
import importlib
import json
import os
from types import ModuleType
from typing import Any, Callable, Iterator, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tqdm import tqdm

FORMAT = "cleanrl_graph-demos-1"
Policy = Callable[[gym.Env, Any, np.random.Generator], Any]


class Flat(NamedTuple):
    """S observations as in the scripts' own Flat: per leaf one array, [S, ...] or the rows of all
    steps, of which counts[leaf.group][i] are those of step i."""

    values: list[np.ndarray]
    counts: dict[str, np.ndarray]


def import_module(name: str) -> ModuleType | None:
    """The module; `envs.NAME` is cleanrl_graph's where the current folder has no such module of its
    own. None if there is none."""
    names = [name] if name else []
    if name.startswith("envs."):
        names.append(f"cleanrl_graph.{name}")
    for module in names:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports what is not installed
    return None


def find_policy(name: str) -> Policy:
    """What "module:name" names. SystemExit if there is no such function."""
    module, _, attribute = name.partition(":")
    policy = getattr(import_module(module), attribute, None)
    if not callable(policy):
        raise SystemExit(
            f"policy {name}: there is no such function; module:name is needed, as in "
            "cleanrl_graph.envs.job_shop:mwkr"
        )
    return policy


def action_columns(space: gym.Space, action: Any) -> np.ndarray:
    """[columns] of an element of an action space, the inverse of what the scripts do with the
    actions of a policy."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return np.concatenate([action_columns(child, action[k]) for k, child in children])
    if isinstance(space, spaces.Sequence):
        raise SystemExit(
            f"demonstrations of actions in {space}, whose number varies, cannot be recorded"
        )
    start = space.start if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) else 0
    return np.ravel(np.asarray(action) - start)


def record(envs: Any, policy: Policy, num_episodes: int, seed: int) -> dict[str, np.ndarray]:
    """The arrays of the file, but for format, env_id and env_kwargs, of a policy in the only
    environment of the script's `envs`, which checks each observation."""
    env, rng, observations, actions, outcomes = (
        envs.envs[0],
        np.random.default_rng(seed),
        [],
        [],
        [],
    )
    if num_episodes < 1:
        raise SystemExit(f"{num_episodes} episodes of demonstrations: at least 1 is needed")
    for episode in tqdm(range(num_episodes), unit="episode", mininterval=1, leave=False):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        ended = False
        while not ended:
            observations.append([np.copy(array) for array in envs.flatten(0, obs)])
            envs.collate(observations[-1:], [0])
            action = policy(env.unwrapped, obs, rng)
            actions.append(action_columns(env.action_space, action))
            obs, reward, terminated, truncated, _ = env.step(action)
            outcomes.append((reward, terminated, truncated))
            ended = terminated or truncated
            envs.num_steps += 1  # what the next error says
    flat = envs.collate(observations, [0] * len(observations))
    data = {f"values/{leaf.path}": values for leaf, values in zip(envs.leaves, flat.values)}
    data |= {f"counts/{leaf.path}": flat.counts[leaf.group] for leaf in envs.leaves if leaf.group}
    actions, (rewards, terminated, truncated) = np.array(actions), zip(*outcomes)
    dtype = np.float32 if actions.dtype.kind == "f" else np.int64
    return data | {
        "actions": actions.astype(dtype),
        "rewards": np.array(rewards, np.float32),
        "terminated": np.array(terminated, bool),
        "truncated": np.array(truncated, bool),
    }


def save(path: str, data: dict[str, np.ndarray], env_id: str, env_kwargs: Any) -> None:
    """Writes the file, whole or not at all. SystemExit if it cannot be written."""
    about = {"format": FORMAT, "env_id": env_id, "env_kwargs": json.dumps(env_kwargs)}
    try:
        with open(path + ".tmp", "wb") as file:
            np.savez_compressed(
                file, **{name: np.array(text) for name, text in about.items()}, **data
            )
        os.replace(path + ".tmp", path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise SystemExit(f"cannot write {path}: {error}") from None


def record_file(envs: Any, args: Any) -> None:
    """The file of --demos: --record-episodes episodes of the policy --record in the only
    environment of `envs`."""
    if not args.demos:
        raise SystemExit(f"--record {args.record} needs --demos FILE, the file that it writes")
    data = record(envs, find_policy(args.record), args.record_episodes, args.seed)
    save(args.demos, data, args.env_id, args.env_kwargs)
    mean, size = (
        data["rewards"].sum(dtype=float) / args.record_episodes,
        os.path.getsize(args.demos) / 2**20,
    )
    print(
        f"{args.demos}: {args.record_episodes} episodes, {len(data['actions'])} steps, mean return {mean:.5g}, "
        f"{size:.2f} MiB"
    )


def load(path: str, leaves: list, parts: list) -> tuple[Flat, np.ndarray]:
    """Observations and actions [S, columns] of the file, for an environment with these leaves and
    parts of an action. SystemExit names file, leaf and step of what does not fit: names, shapes and
    dtypes of leaves, values out of range, actions that do not exist or are masked."""
    wrong = lambda problem: SystemExit(f"--demos {path}: {problem}")
    if any(part.group and part.kind != "choice" for part in parts):
        raise wrong("demonstrations of a Sequence of actions, whose number varies, cannot be read")
    try:
        with np.load(path, allow_pickle=False) as file:
            data = dict(file)
    except Exception as error:  # of many kinds
        raise wrong(f"not a file of demonstrations: {error}") from None
    if str(data.get("format")) != FORMAT or "actions" not in data:
        raise wrong(f"its format is {data.get('format')}, this script reads {FORMAT}")
    actions, ours = data["actions"], sorted(leaf.path for leaf in leaves)
    theirs = sorted(name.removeprefix("values/") for name in data if name.startswith("values/"))
    if theirs != ours:
        raise wrong(f"it has the leaves {theirs}, the environment {ours}")
    values, counts = (
        [data[f"values/{leaf.path}"] for leaf in leaves],
        {None: np.ones(len(actions), np.int64)},
    )
    # older files have links of int64
    values = [
        array.astype(leaf.dtype) if leaf.kind == "links" and array.dtype == np.int64 else array
        for leaf, array in zip(leaves, values)
    ]
    for leaf, array in zip(leaves, values):
        num = data.get(f"counts/{leaf.path}")
        found, needed = (
            f"dtype {dtype}, shape {('rows',) * ragged + tuple(shape)}"
            for dtype, shape, ragged in (
                (array.dtype, array.shape[1:], num is not None),
                (leaf.dtype, leaf.shape, leaf.group is not None),
            )
        )
        if found != needed:
            raise wrong(f"leaf '{leaf.path}': {found} where the environment has {needed}")
        num = counts[None] if num is None else num.astype(np.int64)
        if len(num) != len(actions) or num.min(initial=0) < 0 or num.sum() != len(array):
            raise wrong(
                f"leaf '{leaf.path}': counts of {len(num)} steps and {num.sum()} rows where there are "
                f"{len(actions)} steps and {len(array)} rows"
            )
        if (num != counts.setdefault(leaf.group, num)).any():
            raise wrong(
                f"leaf '{leaf.path}': its counts are not those of the other leaves of '{leaf.group}'"
            )
    for leaf, array in zip(leaves, values):
        bad = out_of_range(leaf, array, counts)
        if bad.any():
            first = tuple(np.argwhere(bad)[0])
            step = np.searchsorted(counts[leaf.group].cumsum(), first[0], side="right")
            raise wrong(f"step {step}, leaf '{leaf.path}': value {array[first]} is out of range")
    if actions.ndim != 2 or actions.shape[1] != parts[-1].columns.stop or not len(actions):
        raise wrong(
            f"actions of shape {actions.shape} where [steps, {parts[-1].columns.stop}] is needed"
        )
    for k, part in enumerate(parts):
        for bad, problem in bad_actions(part, actions, leaves, values, counts[part.group]):
            if bad.any():
                step = np.argwhere(bad)[0][0]
                raise wrong(
                    f"step {step}: part {k} of the action, {actions[step, part.columns].tolist()}, {problem}"
                )
    flat = Flat(values, {group: num for group, num in counts.items() if group})
    return flat, actions.astype(
        np.float32 if any(part.kind == "normal" for part in parts) else np.int64
    )


def out_of_range(leaf: Any, values: np.ndarray, counts: dict) -> np.ndarray:
    """Where the values of a leaf are not finite, no node of their graph, or no category."""
    if leaf.dtype.kind == "f":
        return ~np.isfinite(values)
    if leaf.kind == "links":
        num_nodes = counts[leaf.path.removesuffix("edge_links") + "nodes"].repeat(
            counts[leaf.group]
        )
        return (values < 0) | (values >= num_nodes[:, None])
    if leaf.kind == "discrete":
        num = leaf.space.n if isinstance(leaf.space, gym.spaces.Discrete) else leaf.space.nvec
        return (values < leaf.space.start) | (values >= leaf.space.start + num)
    return np.zeros(values.shape, bool)


def bad_actions(
    part: Any, actions: np.ndarray, leaves: list, values: list[np.ndarray], rows: np.ndarray
) -> Iterator[tuple[np.ndarray, str]]:
    """Which steps have a wrong part of the action, and how: one that does not exist, then one that
    is masked. A choice is one of `rows` [S]."""
    a = actions[:, part.columns]
    num = {"bits": 2, "categorical": part.size, "choice": rows[:, None]}.get(part.kind)
    yield (
        ~np.isfinite(a) if num is None else ~((a >= 0) & (a < num) & (a == np.floor(a))),
        "is out of range",
    )
    for mask in (mask for leaf, mask in zip(leaves, values) if leaf.path == part.mask):
        mask, a = mask.reshape(len(mask), -1)[:, part.entries], a[:, 0].astype(np.int64)
        at = (rows.cumsum() - rows + a, 0) if part.kind == "choice" else (np.arange(len(a)), a)
        yield mask[at] == 0, "is masked"
