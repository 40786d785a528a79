"""Records demonstrations: what a policy sees and does in an environment, in one npz file for ppo_graph_aux.py --demos.

    python cleanrl_graph/envs/record.py --env-id envs:JobShop-v0 --policy envs.job_shop:mwkr --out demos.npz

A policy is any callable `policy(env, obs, rng) -> action`: `env` without its wrappers, so that a rule can look inside,
`obs` an element of the observation space, `rng` a numpy Generator, and the action an element of the action space.
`module:name` imports it; a trained agent is one after a few lines that call it.

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

PATH joins the keys of Dict spaces and the places in Tuple spaces with dots, "obs" for a space that is in neither. A
Graph has the leaves PATH.nodes, PATH.edge_links (int64 [edges, 2], node indices counted within each step) and, with an
edge space, PATH.edges; a Sequence has PATH, or PATH.KEY of a Dict in it. dtypes are those of the space, but int64 for
Discrete, MultiDiscrete and unsigned integers beyond uint8, int8 for MultiBinary and float32 for all floats; categories
are as the environment gives them. The columns of an action follow the space, Dict and Tuple from the first entry to the
last: one of a Discrete, one per entry of MultiDiscrete, MultiBinary and Box, row by row; options count from 0, whatever
`start` is.
"""

import importlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder would hide modules of the same names

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces
from ppo_graph import Envs, Json, collate, make_env
from tqdm import tqdm

FORMAT = "cleanrl_graph-demos-1"
Policy = Callable[[gym.Env, Any, np.random.Generator], Any]


@dataclass
class Args:
    policy: str
    """module:name of a callable policy(env, obs, rng) -> action"""
    out: str
    """the npz file"""
    env_id: str = "envs:JobShop-v0"
    """the id of the environment, `module:Name-v0` imports the module first"""
    env_kwargs: Json = field(default_factory=dict)
    """keyword arguments of the environment as JSON"""
    mask_obs: str = ""
    """indices of entries that are hidden from a Box vector observation, such as 1,3"""
    episodes: int = 200
    """number of episodes"""
    seed: int = 1
    """seed of the environment and the policy"""


def action_columns(space: gym.Space, action: Any) -> np.ndarray:
    """[columns] of an element of an action space, the inverse of the scripts' `to_env_actions`."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return np.concatenate([action_columns(child, action[k]) for k, child in children])
    start = space.start if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) else 0
    return np.ravel(np.asarray(action) - start)


def record(env: gym.Env, policy: Policy, num_episodes: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of the file, but for format, env_id and env_kwargs. ValueError for an observation that does not fit
    the space."""
    envs, rng = Envs([lambda: env]), np.random.default_rng(seed)
    observations, actions, outcomes = [], [], []
    for episode in tqdm(range(num_episodes), unit="episode", mininterval=1, leave=False):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        ended = False
        while not ended:
            observations.append([array.copy() for array in envs.flatten(0, obs)])
            envs.check([0], *collate(envs.leaves, observations[-1:]))
            action = policy(env.unwrapped, obs, rng)
            actions.append(action_columns(env.action_space, action))
            obs, reward, terminated, truncated, _ = env.step(action)
            outcomes.append((reward, terminated, truncated))
            envs.num_steps += 1
            ended = terminated or truncated
    parts, counts = collate(envs.leaves, observations)
    data = {f"values/{leaf.path}": values for leaf, (values,) in zip(envs.leaves, parts)}
    data |= {f"counts/{leaf.path}": counts[leaf.group] for leaf in envs.leaves if leaf.group}
    actions, (rewards, terminated, truncated) = np.array(actions), zip(*outcomes)
    dtype = np.float32 if actions.dtype.kind == "f" else np.int64
    return data | {"actions": actions.astype(dtype), "rewards": np.array(rewards, np.float32),
                   "terminated": np.array(terminated, bool), "truncated": np.array(truncated, bool)}


def save(path: str, data: dict[str, np.ndarray], env_id: str = "", env_kwargs: dict | None = None) -> None:
    """Writes the file, whole or not at all."""
    about = {"format": FORMAT, "env_id": env_id, "env_kwargs": json.dumps(env_kwargs or {})}
    with open(path + ".tmp", "wb") as file:
        np.savez_compressed(file, **{name: np.array(text) for name, text in about.items()}, **data)
    os.replace(path + ".tmp", path)


def main(args: Args) -> None:
    module, _, name = args.policy.partition(":")
    policy = getattr(importlib.import_module(module), name or "policy")
    env = make_env(args.env_id, args.env_kwargs, args.mask_obs)
    data = record(env, policy, args.episodes, args.seed)
    env.close()
    save(args.out, data, args.env_id, args.env_kwargs)
    print(f"{args.out}: {args.episodes} episodes, {len(data['actions'])} steps, mean return "
          f"{data['rewards'].sum(dtype=float) / args.episodes:.5g}, {os.path.getsize(args.out) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main(tyro.cli(Args))
