"""cleanrl_graph, --vectorization-mode vector_entry_point: one object that steps N environments.

`VectorEnvs` has the methods of a script's `Envs` and takes a `gymnasium.vector.VectorEnv`. Arrays
of its batched observations are taken as they are; what gymnasium batches to a tuple (Graph,
Sequence) is read environment by environment. All arrays are copied: it may write into them.

What happens at an episode's end is the environment's to say, by its autoreset_mode. SAME_STEP: the
observation begins the next episode, the last one is in info["final_obs"]. DISABLED: it is reset by
a reset_mask. NEXT_STEP: the observation is the last one, the next call ignores the action and
returns the first one of the next episode: `Step.is_step` says that this row is none.
"""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from cleanrl_graph.envs import wrappers
from cleanrl_graph.envs.fitting import say
from cleanrl_graph.services import check, metrics
from cleanrl_graph.services.check import FLOAT32, UsageError, explained, text_of

FLAG = "--vectorization-mode vector_entry_point"
REPORTED = ("group", "eval", "metrics", "is_success")  # what an info says for the log


def is_vector(args: Any) -> bool:
    return args.vectorization_mode == "vector_entry_point"


def wrong_flags(script: ModuleType, args: Any) -> Iterator[str]:
    """What cannot be beside a vector environment."""
    if isinstance(args.env_kwargs, list):
        yield f"{FLAG}: one VectorEnv has one --env-kwargs, not a list of them"
    if args.num_workers:
        yield f"{FLAG}: the VectorEnv steps its environments itself, leave out --num-workers"
    if args.wrap:
        yield f"{FLAG}: --wrap wraps single environments; a function can wrap the VectorEnv"
    if hasattr(script, "Collector") or "is_step" not in script.Step._fields:
        name = script.__name__.rpartition(".")[2]
        yield f"{FLAG}: {name} does not take a VectorEnv, ppo_graph does"


def function_of(env_id: str) -> Callable | None:
    """The function that `module:function` names; None for an id."""
    module, _, name = env_id.rpartition(":")
    try:
        function = getattr(importlib.import_module(module), name, None) if module else None
    except ModuleNotFoundError:  # gymnasium says more
        return None
    except (Exception, SystemExit) as problem:
        raise explained(f"--env-id {env_id}", problem) from None
    return function if callable(function) else None


def make(args: Any) -> VectorEnv:
    """The vector environment of the flags. UsageError for what is none, or of another size."""
    env_id, _ = wrappers.full_id(args.env_id)
    function = function_of(env_id)
    try:
        if function:
            env = function(num_envs=args.num_envs, **args.env_kwargs)
        else:
            mode = args.vectorization_mode
            env = gym.make_vec(env_id, args.num_envs, mode, **args.env_kwargs)
    except (Exception, SystemExit) as problem:
        raise explained(f"--env-id {args.env_id}, {FLAG}", problem) from None
    name = f"--env-id {args.env_id}"
    if not isinstance(env, VectorEnv):
        raise UsageError(f"{name} makes {type(env).__name__}, not a gymnasium.vector.VectorEnv")
    if env.num_envs != args.num_envs:
        raise UsageError(f"{name}: num_envs is {env.num_envs}, --num-envs is {args.num_envs}")
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        kinds = ", ".join(f"AutoresetMode.{kind.name}" for kind in AutoresetMode)
        raise UsageError(f"{name}: metadata['autoreset_mode'] is {mode!r}; say one of {kinds}")
    return env


def info_of(info: dict, i: int) -> dict:
    """What the infos of N environments say of environment i. gymnasium has an array for each name
    and beside it, with an underscore, which environments have it."""
    own = {}
    for name, values in info.items():
        if f"_{name}" in info and info[f"_{name}"][i]:
            own[name] = info_of(values, i) if isinstance(values, dict) else values[i]
    return own


class VectorEnvs:
    """The Envs of a script for a VectorEnv. What goes wrong in it, and arrays that do not fit its
    spaces, are a UsageError."""

    def __init__(self, script: ModuleType, env: VectorEnv, args: Any, first: int = 0):
        """`first` is the number of the first environment over all ranks."""
        self.script = script
        self.mode = env.metadata["autoreset_mode"]
        self.env = RecordEpisodeStatistics(env)
        self.num_envs = env.num_envs
        self.first = first
        self.settings = check.settings()
        self.num_steps = 0
        self.metric_names = None  # of the last episode
        self.space = env.single_observation_space
        self.action_space = env.single_action_space
        self.leaves = script.leaves_of(self.space)
        seen = check.for_policy(self.leaves, args)
        for own in (self.leaves, seen):
            check.refuse(check.wrong_leaves(own))
        check.refuse(check.wrong_actions(script, self.action_space, seen, args))
        parts = script.parts_of(self.action_space, seen, args)
        named, _ = check.rows_of_masks(parts)
        # Path of a mask with rows -> the group that it has as many rows as
        self.named = {path: group for path, group in named.items() if group}
        self.has_mask = any(part.mask for part in parts)

    def reset(self, seed: int) -> tuple:
        """Starts new episodes; gymnasium spreads the seeds from `seed` on."""
        obs, info = self.call(self.env.reset, seed=seed)
        if "action_mask" in info and not self.has_mask:
            raise UsageError(
                f"{self.place()}: info has an action_mask, which is not read: put it into the "
                "observation, as 'action_mask' of a Dict"
            )
        begins = np.ones(self.num_envs, bool)
        self.ended = ~begins
        zeros = np.zeros(self.num_envs, np.float32)
        return self.script.Step(self.flat(obs), zeros, begins, ~begins, [], [], begins)

    def step(self, actions: list) -> tuple:
        """Steps env i with actions[i], an element of the single action space."""
        self.num_steps += 1
        batch = create_empty_array(self.action_space, self.num_envs)
        batch = concatenate(self.action_space, actions, batch)
        obs, reward, terminated, truncated, info = self.call(self.env.step, batch)
        reward = self.numbers("reward", reward).astype(np.float32)
        terminated = self.numbers("terminated", terminated).astype(bool)
        truncated = self.numbers("truncated", truncated).astype(bool) & ~terminated
        ends = terminated | truncated
        infos = []
        for i in np.flatnonzero(ends):
            episode = {k: info["episode"][k][i].item() for k in "rl"}
            infos.append((int(i), self.report_of(info.get("final_info", info), i, episode)))
        finals = []
        if truncated.any():
            last = obs
            if self.mode is AutoresetMode.SAME_STEP:
                if "final_obs" not in info:
                    raise UsageError(f"{self.place()}: info lacks final_obs, as SAME_STEP needs it")
                last = info["final_obs"]
            for i in np.flatnonzero(truncated):
                finals.append(self.read_one(element(self.space, last, i), i))
        is_step = np.ones(self.num_envs, bool)
        if self.mode is AutoresetMode.NEXT_STEP:
            is_step = ~ends
            # A memory begins anew after the row that was no step
            terminated = terminated | self.ended
            self.ended = ends
        elif self.mode is AutoresetMode.DISABLED and ends.any():
            obs = self.reset_some(ends)
        step = self.flat(obs), reward, terminated, truncated, finals, infos, is_step
        return self.script.Step(*step)

    def report_of(self, info: dict, i: int, episode: dict) -> dict:
        """The info of an episode that ends, with what it says for the log."""
        names = {name for known in REPORTED for name in (known, f"_{known}")}
        said = info_of({name: info[name] for name in names & set(info)}, i)
        said = metrics.own_metrics(check.own_report(said))
        problems = [
            *check.wrong_report(said.get("eval", {})),
            *metrics.wrong_metrics(said, self.metric_names),
        ]
        check.refuse(f"{self.place(i)}: {problem}" for problem in problems)
        self.metric_names = set(said.get("metrics", {}))
        report = {name: said[name] for name in ("group", "eval") if name in said}
        numbers = metrics.metrics_of(said)
        return report | ({"metrics": numbers} if numbers else {}) | {"episode": episode}

    def reset_some(self, ended: np.ndarray) -> Any:
        """Resets these environments and their records. The observations of all. gymnasium's record
        would forget all episodes where an environment takes the mask out of the options."""
        obs, _ = self.call(self.env.env.reset, options={"reset_mask": ended})
        for array in (self.env.episode_returns, self.env.episode_lengths, self.env.prev_dones):
            array[ended] = 0
        return obs

    def call(self, method: Callable, *args, **kwargs) -> tuple:
        """What `reset` or `step` returns."""
        try:
            with np.errstate():
                return method(*args, **kwargs)
        except (Exception, SystemExit) as problem:
            raise explained(f"{self.place()}, {method.__name__}", problem) from None
        finally:
            check.put_back(self.settings)

    def place(self, i: int | None = None, path: str = "") -> str:
        """What begins an error."""
        name = "the VectorEnv" if i is None else f"env {self.first + i}"
        return f"{name}{path and f', leaf {path!r}'}, step {self.num_steps}"

    def numbers(self, name: str, values: Any) -> np.ndarray:
        """A finite number of each environment, [N]."""
        values = np.asarray(values)
        if values.shape != (self.num_envs,) or values.dtype.kind not in "biuf":
            found = f"dtype {values.dtype}, shape {values.shape}"
            raise UsageError(f"{self.place()}: {name} has {found}, not ({self.num_envs},)")
        bad = ~(np.abs(values) <= FLOAT32) if values.dtype.kind == "f" else np.zeros(1, bool)
        if bad.any():
            i = int(bad.argmax())
            raise UsageError(f"{self.place(i)}: {name} is {values[i]}, not a finite number")
        return values

    def flat(self, obs: Any) -> tuple:
        """A Flat of batched observations, whose arrays are copied."""
        counts = {self.script.STEP: np.ones(self.num_envs, np.int64)}
        values = []
        for path, space, batch in self.pieces(self.space, obs):
            leaves = self.script.leaves_of(space, path)
            if isinstance(space, (spaces.Graph, spaces.Sequence)):
                if len(batch) != self.num_envs:
                    found = f"{len(batch)} observations, not {self.num_envs}"
                    raise UsageError(f"{self.place(path=path)}: {found}")
                own = [self.read(space, leaves, one, i) for i, one in enumerate(batch)]
                for leaf, rows in zip(leaves, zip(*own)):
                    counts.setdefault(leaf.group, np.fromiter(map(len, rows), np.int64))
                    values.append(np.concatenate(rows, dtype=leaf.dtype, casting="unsafe"))
            else:
                rows = np.asarray(batch)
                self.compare(leaves[0], rows, (self.num_envs, *space.shape))
                values.append(rows.astype(leaves[0].dtype))  # a copy
        for path, group in self.named.items():
            differ = np.flatnonzero(counts[path] != counts[group])
            if len(differ):
                i = int(differ[0])
                problem = f"{counts[path][i]} rows where '{group}' has {counts[group][i]}"
                raise UsageError(f"{self.place(i, path)}: {problem}")
        return self.script.Flat(values, counts)

    def pieces(self, space: gym.Space, obs: Any, path: str = "") -> Iterator[tuple]:
        """(path, space, batch) of what is no Dict or Tuple, in the order of the leaves."""
        if not isinstance(space, (spaces.Dict, spaces.Tuple)):
            yield path, space, obs
            return
        for k, child in self.script.children_of(space):
            name = f"{path}.{k}".removeprefix(".")
            try:
                own = obs[k]
            except (KeyError, IndexError, TypeError) as problem:
                raise UsageError(f"{self.place(path=name)}: {text_of(problem)}") from None
            yield from self.pieces(child, own, name)

    def read(self, space: gym.Space, leaves: list, obs: Any, i: int) -> list[np.ndarray]:
        """The rows of each leaf of one observation, of env i."""
        reader = SimpleNamespace(space=space, leaves=leaves)
        try:
            rows = self.script.Envs.read(reader, obs)
        except Exception as problem:  # of many kinds
            at = self.place(i, leaves[0].path)
            raise UsageError(f"{at}: cannot be read: {text_of(problem)}") from None
        for leaf, own in zip(leaves, rows):
            self.compare(leaf, own, (len(own), *leaf.space.shape), i)
        num = {}
        for leaf, own in zip(leaves, rows):
            if len(own) != num.setdefault(leaf.group, len(own)):
                problem = f"{len(own)} rows where '{leaf.group}' has {num[leaf.group]}"
                raise UsageError(f"{self.place(i, leaf.path)}: {problem}")
        counts = {group: np.array([n]) for group, n in num.items()}
        for leaf, own in zip(leaves, rows):
            for problem in check.wrong_values(leaf, own, counts) if leaf.is_links else ():
                raise UsageError(f"{self.place(i, leaf.path)}: {problem}")
        return rows

    def read_one(self, obs: Any, i: int) -> tuple:
        """A Flat of one observation, of env i."""
        reader = SimpleNamespace(leaves=self.leaves)
        return self.script.Envs.collate(reader, [self.read(self.space, self.leaves, obs, i)])

    def compare(self, leaf: Any, rows: np.ndarray, shape: tuple, i: int | None = None) -> None:
        """UsageError for rows of another dtype or shape, and for values that are no numbers of the
        leaf's space."""
        allowed = "biu" if leaf.dtype.kind in "biu" else "biuf"
        if rows.shape != shape or rows.dtype.kind not in allowed:
            found = f"dtype {rows.dtype}, shape {rows.shape}"
            needed = f"dtype {leaf.space.dtype}, shape {shape}"
            raise UsageError(f"{self.place(i, leaf.path)}: {found} where {needed} is declared")
        if leaf.is_links:
            return
        bad = check.out_of_range(leaf, rows, {})
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            at = self.place(row if i is None else i, leaf.path)
            raise UsageError(f"{at}: value {rows[bad][0]}{check.allowed(leaf, rows, bad, {})}")

    def close(self) -> None:
        try:
            self.env.close()
        except (Exception, SystemExit) as problem:  # what was trained must not be lost
            say(f"close() of {self.env}: {text_of(problem)}")


def element(space: gym.Space, batch: Any, i: int) -> Any:
    """Observation i of a batch. That of final_obs may be an array of observations."""
    is_array = isinstance(batch, np.ndarray)
    if is_array and batch.dtype == object:
        return batch[i]
    if isinstance(space, spaces.Dict):
        return {k: element(child, batch[k], i) for k, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(element(child, own, i) for child, own in zip(space, batch))
    return batch[i]
