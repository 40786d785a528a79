"""cleanrl_graph, --vectorization-mode vector_entry_point: one object that steps N environments.

`VectorEnvs` has the methods of a script's `Envs` and takes a `gymnasium.vector.VectorEnv`. Arrays
of its batched observations are taken as they are; what gymnasium batches to a tuple (Graph,
Sequence) is read environment by environment. All arrays are copied: it may write into them.

What happens at an episode's end is the environment's to say, by its autoreset_mode. SAME_STEP: the
observation begins the next episode, the last one is in info["final_obs"]. DISABLED: it is reset by
a reset_mask. NEXT_STEP: the observation is the last one, the next call ignores the action and
returns the first one of the next episode: `Step.is_step` is False for this row.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from cleanrl_graph.envs import wrappers
from cleanrl_graph.envs.fitting import say
from cleanrl_graph.services import check, checkpoint, metrics
from cleanrl_graph.services.check import FLOAT32, UsageError, explained, text_of

FLAG = "--vectorization-mode vector_entry_point"
RECORDED = ("episode_returns", "episode_lengths", "prev_dones")  # of a RecordEpisodeStatistics


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
    if has_function(args):
        for name in ("eval_suite", "capture_video", "demos", "record"):
            if getattr(args, name, None):
                flag = f"--{name.replace('_', '-')}"
                yield f"{FLAG}: {flag} needs single environments, of which {args.env_id} makes none"
    name = Path(script.__file__).name
    if hasattr(script, "Collector"):
        yield f"{FLAG}: {name} steps single environments in processes of their own"
    elif "is_step" not in script.Step._fields:
        yield f"{FLAG}: in {name} each agent has a reward, a VectorEnv has one per environment"


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


def has_function(args: Any) -> bool:
    """Whether --env-id names a function that makes a VectorEnv."""
    return is_vector(args) and function_of(args.env_id) is not None


def make(args: Any, num_envs: int = 0) -> VectorEnv:
    """The vector environment of the flags, of --num-envs environments or of so many. UsageError for
    what is none, or of another size."""
    size = num_envs or args.num_envs
    env_id, _ = wrappers.full_id(args.env_id)
    function = function_of(env_id)
    try:
        if function:
            env = function(num_envs=size, **args.env_kwargs)
        else:
            mode = args.vectorization_mode
            env = gym.make_vec(env_id, size, mode, **args.env_kwargs)
    except (Exception, SystemExit) as problem:
        raise explained(f"--env-id {args.env_id}, {FLAG}", problem) from None
    name = f"--env-id {args.env_id}"
    if not isinstance(env, VectorEnv):
        raise UsageError(f"{name} makes {type(env).__name__}, not a gymnasium.vector.VectorEnv")
    with closed_if_refused(env):
        if env.num_envs != size:
            asked = f"{size} were asked for" if num_envs else f"--num-envs is {size}"
            raise UsageError(f"{name}: num_envs is {env.num_envs}, {asked}")
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            kinds = ", ".join(f"AutoresetMode.{kind.name}" for kind in AutoresetMode)
            raise UsageError(f"{name}: metadata['autoreset_mode'] is {mode!r}; say one of {kinds}")
    return env


@contextlib.contextmanager
def closed_if_refused(env: VectorEnv) -> Iterator[None]:
    """A VectorEnv may have processes or a simulator, which end with it."""
    try:
        yield
    except Exception:
        check.close(env)
        raise


def one_of(script: ModuleType, args: Any) -> gym.Env:
    """What has the spaces of one environment of the VectorEnv that a function makes."""
    env = gym.Env()
    with contextlib.closing(VectorEnvs(script, make(args, 1), args)) as envs:
        env.observation_space, env.action_space = envs.space, envs.action_space
    return env


def info_of(info: dict, i: int, num_envs: int) -> dict:
    """What the infos of N environments say of environment i. gymnasium has an array for each name
    and beside it, with an underscore, which environments have it; without that all have."""
    own = {}
    for name, values in info.items():
        have = info.get(f"_{name}")
        if name.startswith("_") or have is not None and not have[i]:
            continue
        if isinstance(values, dict):
            own[name] = info_of(values, i, num_envs)
        elif getattr(values, "shape", ())[:1] == (num_envs,):
            own[name] = values[i]
    return own


class InfoMask(VectorWrapper):
    """Moves info[name], masks of actions [N, options], into the observation, as key "action_mask"
    (beside key "obs", or those of a Dict). A last observation gets ones: only its value is
    needed."""

    def __init__(self, env: VectorEnv, name: str):
        super().__init__(env)
        self.name = name
        space = env.single_observation_space
        size = wrappers.num_options(env.single_action_space)
        masks = spaces.MultiBinary(size)
        self.single_observation_space = wrappers.with_space(space, "action_mask", masks)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.masks = np.ones((self.num_envs, size), np.int8)

    def with_masks(self, obs: Any, info: dict, is_new: np.ndarray, is_last: np.ndarray) -> Any:
        """The observations with masks. Those of the new ones are in info, but for last ones."""
        found = np.asarray(info.get(self.name, self.masks))
        has_mask = info.get(f"_{self.name}", np.full(self.num_envs, self.name in info))
        if found.shape != self.masks.shape:
            found, needed = found.shape, self.masks.shape
            raise gym.error.Error(f"info['{self.name}'] has the shape {found}, not {needed}")
        if not (has_mask | is_last | ~is_new).all():
            i = int(np.argmin(has_mask | is_last | ~is_new))
            raise gym.error.Error(f"env {i} of this VectorEnv: info lacks {self.name}")
        masks = np.where(is_last[:, None], 1, self.masks)
        self.masks = np.where((is_new & has_mask)[:, None], found, masks)
        return wrappers.with_key(self.env.single_observation_space, obs, "action_mask", self.masks)

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        every = np.ones(self.num_envs, bool)
        is_new = (options or {}).get("reset_mask", every)
        obs, info = self.env.reset(seed=seed, options=options)
        return self.with_masks(obs, info, is_new, ~every), info

    def step(self, actions: Any) -> tuple:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        ends = np.asarray(terminated) | np.asarray(truncated)
        every = np.ones(self.num_envs, bool)
        if self.env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            ends = ~every  # all observations are first ones or in the middle
        if "final_obs" in info:
            info = info | {"final_obs": self.with_ones(info["final_obs"])}
        return self.with_masks(obs, info, every, ends), reward, terminated, truncated, info

    def with_ones(self, finals: Any) -> Any:
        """Last observations, one by one."""
        space = self.env.single_observation_space
        rows = np.empty(self.num_envs, object)
        for i, mask in enumerate(np.ones_like(self.masks)):
            obs = element(space, finals, i)
            if obs is not None:
                rows[i] = wrappers.with_key(space, obs, "action_mask", mask)
        return rows


def name_of_mask(env: VectorEnv, info: dict) -> str | None:
    """The name of the masks of actions in the first infos, if there are any that fit. What is
    called action_mask and does not fit is found later."""
    size = wrappers.num_options(env.single_action_space)
    for name in filter(info.__contains__, wrappers.MASKS if size else ()):
        if name == "action_mask" or np.shape(info[name]) == (env.num_envs, size):
            return name
    return None


class Record(gym.wrappers.RecordEpisodeStatistics):
    """The return so far of the episode of environment i, for a script's `play`."""

    def __init__(self, env: RecordEpisodeStatistics, i: int):
        self.vector = env
        self.i = i

    @property
    def episode_returns(self) -> float:
        return self.vector.episode_returns[self.i].item()


class VectorEnvs:
    """The Envs of a script for a VectorEnv. What goes wrong in it, and arrays that do not fit its
    spaces, are a UsageError."""

    def __init__(self, script: ModuleType, env: VectorEnv, args: Any, first: int = 0):
        """`first` is the number of the first environment over all ranks."""
        self.script = script
        self.mode = env.metadata["autoreset_mode"]
        self.settings = check.settings()
        self.num_envs = env.num_envs
        self.first = first
        self.num_steps = 0
        self.num_skipped = 0  # rows that were no steps
        with closed_if_refused(env):
            self.take(env, args)

    def take(self, env: VectorEnv, args: Any) -> None:
        """Sets the VectorEnv in its wrappers, and what its spaces mean. UsageError for those that
        the script cannot read."""
        script = self.script
        # Of two rows of an environment one is a step; each minibatch needs one, on each rank
        least = args.num_envs * (args.num_steps // 2)
        if self.mode is AutoresetMode.NEXT_STEP and args.num_minibatches > least:
            raise UsageError(
                f"--num-minibatches {args.num_minibatches}: a rollout of {args.num_envs} x "
                f"{args.num_steps} rows may have as few as {least} steps, as the row after an "
                "episode's end is none with AutoresetMode.NEXT_STEP"
            )
        space = env.single_observation_space
        if not (isinstance(space, spaces.Dict) and "action_mask" in space.keys()):
            _, info = self.call(env.reset)
            name = name_of_mask(env, info)
            env = InfoMask(env, name) if name else env
        self.env = RecordEpisodeStatistics(env)
        self.envs = [Record(self.env, i) for i in range(self.num_envs)]
        self.space = env.single_observation_space
        self.action_space = env.single_action_space
        self.leaves = script.leaves_of(self.space)
        seen = check.for_policy(self.leaves, args)
        for own in (self.leaves, seen):
            check.refuse(check.wrong_leaves(own))
        check.refuse(check.wrong_actions(script, self.action_space, seen, args))
        parts = script.parts_of(self.action_space, seen, args)
        self.parts = [parts]  # the same for all
        acting = script.acting_group(self.action_space, seen, args.action_head)
        self.named, self.pairs = check.numbers_of_rows(script, seen, parts, acting)
        self.looks = list(check.looks_at(self.leaves, parts))
        self.has_mask = any(part.mask for part in parts)

    def reset(self, seed: int) -> tuple:
        """Starts new episodes; gymnasium spreads the seeds from `seed` on."""
        obs, _ = self.call(self.env.reset, seed=seed)
        begins = np.ones(self.num_envs, bool)
        self.ended = ~begins
        zeros = np.zeros(self.num_envs, np.float32)
        self.latest = self.flat(obs)
        return self.script.Step(self.latest, zeros, begins, ~begins, [], [], begins)

    def step(self, actions: list) -> tuple:
        """Steps env i with actions[i], an element of the single action space."""
        self.num_steps += 1
        batch = create_empty_array(self.action_space, self.num_envs)
        batch = concatenate(self.action_space, actions, batch)
        obs, reward, terminated, truncated, info = self.call(self.env.step, batch)
        if "action_mask" in info and not self.has_mask:
            raise UsageError(f"{self.place()}: info has an action_mask, the first reset had none")
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
            again = ends & self.ended
            if again.any():
                i = int(again.argmax())
                raise UsageError(f"{self.place(i)}: an episode ends with its first observation")
            # A memory begins anew after the row that was no step
            terminated = terminated | self.ended
            self.num_skipped += int(self.ended.sum())
            self.ended = ends
        elif self.mode is AutoresetMode.DISABLED and ends.any():
            obs = self.reset_some(ends)
        self.latest = self.flat(obs)
        step = self.latest, reward, terminated, truncated, finals, infos, is_step
        return self.script.Step(*step)

    def take_skipped(self) -> int:
        """How many rows were no steps since the last call."""
        num_skipped, self.num_skipped = self.num_skipped, 0
        return num_skipped

    def report_of(self, info: dict, i: int, episode: dict) -> dict:
        """The info of an episode that ends, with what it says for the log."""
        names = {name for known in metrics.NAMES for name in (known, f"_{known}")}
        said = {name: info[name] for name in names & set(info)}
        said = metrics.said_in(info_of(said, i, self.num_envs))
        check.refuse(f"{self.place(i)}: {problem}" for problem in metrics.wrong(said))
        return metrics.report_of(said) | {"episode": episode}

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
            with np.errstate():  # an environment may change it
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
        arrays = []  # of each leaf, as they are
        for path, space, batch in self.pieces(self.space, obs):
            leaves = self.script.leaves_of(space, path)
            if hasattr(batch, "num_rows"):  # a FlatBatch
                arrays += self.read_flat(space, leaves, batch, counts)
            elif isinstance(space, (spaces.Graph, spaces.Sequence)):
                if len(batch) != self.num_envs:
                    found = f"{len(batch)} observations, not {self.num_envs}"
                    raise UsageError(f"{self.place(path=path)}: {found}")
                own = [self.read(space, leaves, one, i) for i, one in enumerate(batch)]
                for leaf, rows in zip(leaves, zip(*own)):
                    counts.setdefault(leaf.group, np.fromiter(map(len, rows), np.int64))
                    arrays.append(np.concatenate(rows))
            else:
                arrays.append(np.asarray(batch))
                self.compare(leaves[0], arrays[-1], self.num_envs)
        if next(check.wrong_rows(self, arrays, counts, self.parts, self.ended), None):
            for i in range(self.num_envs):
                self.refuse_wrong(i, arrays, counts, self.ended[i])
        values = [rows.astype(leaf.dtype) for leaf, rows in zip(self.leaves, arrays)]  # copies
        return self.script.Flat(values, counts)

    def refuse_wrong(self, i: int, arrays: list, counts: dict, is_last: np.ndarray) -> None:
        """UsageError for what is wrong with the rows of observation i of several, or of one."""
        at = min(i, len(counts[self.script.STEP]) - 1)
        own = []
        for leaf, rows in zip(self.leaves, arrays):
            stop = int(counts[leaf.group][: at + 1].sum())
            own.append(rows[stop - int(counts[leaf.group][at]) : stop])
        counts = {group: num[at : at + 1] for group, num in counts.items()}
        for path, problem in check.wrong_rows(self, own, counts, self.parts, is_last):
            raise UsageError(f"{self.place(i, path)}: {problem}")

    def read_flat(self, space: gym.Space, leaves: list, batch: Any, counts: dict) -> list:
        """The rows of each leaf of N observations that stand one after the other, see
        envs/flat.py. Adds the numbers of rows to `counts`."""
        try:
            arrays = list(map(np.asarray, self.script.arrays_of(space, batch.rows)))
        except Exception as problem:  # of many kinds
            at = self.place(path=leaves[0].path)
            raise UsageError(f"{at}: cannot be read: {text_of(problem)}") from None
        for leaf in leaves:
            num = np.asarray(batch.num_edges if leaf.nodes else batch.num_rows)
            if num.shape != (self.num_envs,) or num.dtype.kind not in "iu" or num.min() < 0:
                found = f"dtype {num.dtype}, shape {num.shape}"
                needed = f"counts of rows, whole numbers of shape ({self.num_envs},)"
                raise UsageError(f"{self.place(path=leaf.path)}: {found} where {needed} are needed")
            counts[leaf.group] = num.astype(np.int64)  # a copy
        for leaf, rows in zip(leaves, arrays):
            self.compare(leaf, rows, int(counts[leaf.group].sum()))
        return arrays

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
        num = {}
        for leaf, own in zip(leaves, rows):
            self.compare(leaf, own, len(own), i)
            if len(own) != num.setdefault(leaf.group, len(own)):
                problem = f"{len(own)} rows where '{leaf.group}' has {num[leaf.group]}"
                raise UsageError(f"{self.place(i, leaf.path)}: {problem}")
        return rows

    def read_one(self, obs: Any, i: int) -> tuple:
        """A Flat of one observation, the last one of an episode of env i."""
        reader = SimpleNamespace(leaves=self.leaves)
        rows = self.read(self.space, self.leaves, obs, i)
        flat = self.script.Envs.collate(reader, [rows])
        self.refuse_wrong(i, rows, flat.counts, np.array(True))
        return flat

    def compare(self, leaf: Any, rows: np.ndarray, num: int, i: int | None = None) -> None:
        """UsageError for rows, of env i or of all, of another dtype or shape, or not so many."""
        allowed = "biu" if leaf.dtype.kind in "biu" else "biuf"
        shape = (num, *leaf.space.shape)
        if rows.shape != shape or rows.dtype.kind not in allowed:
            found = f"dtype {rows.dtype}, shape {rows.shape}"
            needed = f"dtype {leaf.space.dtype}, shape {shape}"
            raise UsageError(f"{self.place(i, leaf.path)}: {found} where {needed} is declared")

    def state(self) -> dict:
        """What `restore` goes on from; to be pickled at once. "env" is None where no copy of it
        does the same: then it cannot go on."""
        if not isinstance(self.env.env, checkpoint.VectorTwin):
            self.env.env = checkpoint.VectorTwin(self.env.env)
        record = {name: vars(self.env)[name] for name in RECORDED}
        own = {name: vars(self)[name] for name in ("num_steps", "ended")}
        [data] = checkpoint.exact_dumps([self.env.env._dump()])
        obs = list(self.latest.values), dict(self.latest.counts)
        return {"env": data, "record": record, "own": own, "obs": obs}

    def restore(self, state: dict) -> tuple:
        """The last observations of the VectorEnv that was saved, which takes this one's place."""
        check.close(self.env.env)
        self.env.env = cloudpickle.loads(state["env"])
        vars(self.env).update(state["record"])
        vars(self).update(state["own"])
        self.latest = self.script.Flat(*state["obs"])
        return self.latest

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
