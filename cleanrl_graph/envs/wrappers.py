"""cleanrl_graph, wrappers around any environment: those of the scripts' flag --wrap, and the one
for masks in info.

    --wrap hide:1,3                hides entries 1 and 3 of a Box vector
    --wrap z:skill:4               one of 4 skills per episode, as key "z" of the observation
    --wrap z:uniform:2             two numbers between 0 and 1 instead
    --wrap my_module:my_wrapper    your own: my_wrapper(env) returns an environment
    --wrap my_module:my_wrapper:3  my_wrapper(env, "3")

Several of them are put on in the order given, the last one outermost. cloudpickle saves them with
their state.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

KNOWN = "hide:1,3 z:skill:4 z:uniform:2 module:callable module:callable:argument"


def wrap(env: gym.Env, spec: str) -> gym.Env:
    """The environment with one entry of --wrap put on. gym.error.Error with a sentence for an entry
    that cannot be read or does not fit the environment; what one's own module or callable raises is
    not caught."""
    name, _, rest = spec.partition(":")
    if name == "hide":
        return hide(env, spec, rest.split(","))
    return EpisodeZ(env, spec) if name == "z" else call(env, spec)


def wrap_all(env: gym.Env, specs: tuple[str, ...]) -> gym.Env:
    """The environment with all entries of --wrap put on. If the info of its first reset has an
    action_mask, and the observation has none, that is moved into the observation."""
    for spec in specs:
        env = wrap(env, spec)
    in_obs = (
        isinstance(env.observation_space, spaces.Dict)
        and "action_mask" in env.observation_space.keys()
    )
    first = env.reset()
    in_info = (
        isinstance(first, tuple) and isinstance(first[-1], dict) and "action_mask" in first[-1]
    )
    return InfoActionMask(env) if in_info and not in_obs else env


def hide(env: gym.Env, spec: str, entries: list[str]) -> gym.Env:
    """Without these entries of a Box vector, values and bounds alike."""
    space, hidden = (
        env.observation_space,
        [int(entry) for entry in entries if entry.strip().isdecimal()],
    )
    is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1
    if len(hidden) < len(entries) or not is_vector or max(hidden) >= space.shape[0]:
        raise gym.error.Error(
            f"--wrap {spec}: numbers from 0 on are needed, as in hide:1,3, and an observation that "
            f"is a Box vector with these entries; it is {space}"
        )
    seen = np.ones(space.shape, bool)  # a mask, not indices: a vector of another length is an error
    seen[hidden] = False
    visible = spaces.Box(space.low[seen], space.high[seen], dtype=space.dtype)
    return gym.wrappers.TransformObservation(env, lambda obs: np.asarray(obs)[seen], visible)


def call(env: gym.Env, spec: str) -> gym.Env:
    """What a `module:callable:arguments` of one's own makes of the environment. The arguments are
    strings."""
    if not re.fullmatch(r"[^\W\d][\w.]*:\w+(:.*)?", spec):
        raise gym.error.Error(f"--wrap {spec}: there is no such wrapper; the forms are {KNOWN}")
    module, name, *arguments = spec.split(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it was found, and imports what is not installed
        raise gym.error.Error(
            f"--wrap {spec}: there is no module '{error.name}' in the current folder or among the "
            f"installed packages; the forms are {KNOWN}"
        ) from None
    try:
        function = getattr(imported, name)
        inspect.signature(function).bind(env, *arguments)
    except (AttributeError, TypeError, ValueError) as error:
        raise gym.error.Error(
            f"--wrap {spec}: {name!r} of {module} must be a callable that takes the environment and "
            f"{len(arguments)} strings: {error}"
        ) from None
    result = function(env, *arguments)
    if not isinstance(result, gym.Env):
        raise gym.error.Error(
            f"--wrap {spec}: it must return a gymnasium environment, and returned {result!r}"
        )
    return result


def with_space(space: gym.Space, key: str, child: gym.Space) -> spaces.Dict:
    """The space of `with_key`."""
    return spaces.Dict(
        {**(space.spaces if isinstance(space, spaces.Dict) else {"obs": space}), key: child}
    )


def with_key(space: gym.Space, obs: Any, key: str, value: Any) -> Any:
    """An element of `space` with one more key, beside key "obs" or those of a Dict. What should be
    a dict and is not stays as it is: the scripts name it."""
    if not isinstance(space, spaces.Dict):
        return {"obs": obs, key: value}
    return {**obs, key: value} if isinstance(obs, Mapping) else obs


class EpisodeZ(gym.Wrapper):
    """A z for every episode, drawn or taken from `reset(options={"z": z})`: the environment finds
    it in the options of its reset, the policy in the observation as key "z".

    info["group"] at an episode's end is "z_2" for skill 2; for numbers "z_0", "z_1" or "z_2", the
    third of the range in which the first one lies. A group that the environment gave is
    replaced."""

    def __init__(self, env: gym.Env, spec: str):
        super().__init__(env)
        match, space = re.fullmatch(r"z:(skill|uniform):([1-9]\d*)", spec), env.observation_space
        if match is None:
            raise gym.error.Error(
                f"--wrap {spec}: z:skill:K or z:uniform:D with a number of at least 1 is needed"
            )
        if isinstance(space, spaces.Dict) and "z" in space.keys():
            raise gym.error.Error(f"--wrap {spec}: the observation has a key 'z' already: {space}")
        self.num, self.is_skill, self.rng = (
            int(match[2]),
            match[1] == "skill",
            np.random.default_rng(),
        )
        z_space = (
            spaces.Discrete(self.num)
            if self.is_skill
            else spaces.Box(0, 1, (self.num,), np.float32)
        )
        self.observation_space = with_space(space, "z", z_space)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """The first observation and info. A seed fixes the z of all episodes that follow."""
        if seed is not None:
            self.rng = np.random.default_rng([seed, 122])  # not the environment's numbers
        z = (options or {}).get("z")
        if self.is_skill:
            self.z = int(self.rng.integers(self.num) if z is None else z)
        else:
            self.z = (
                self.rng.random(self.num, np.float32) if z is None else np.asarray(z, np.float32)
            )
        obs, info = self.env.reset(seed=seed, options={**(options or {}), "z": self.z})
        return with_key(self.env.observation_space, obs, "z", self.z), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            group = self.z if self.is_skill else min(int(3 * self.z[0]), 2)
            info = {**(info or {}), "group": f"z_{group}"}
        return (
            with_key(self.env.observation_space, obs, "z", self.z),
            reward,
            terminated,
            truncated,
            info,
        )


class InfoActionMask(gym.Wrapper):
    """Moves `info["action_mask"]` into the observation, as key "action_mask" (beside key "obs", or
    those of a Dict). Where info has none the observation lacks the key. gym.error.Error if no part
    of the action has options."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        total = num_options(env.action_space)
        if total == 0:
            raise gym.error.Error(
                f"info['action_mask'] of {env}: {env.action_space} has no Discrete part to be masked"
            )
        self.observation_space = with_space(
            env.observation_space, "action_mask", spaces.MultiBinary(total)
        )

    def with_mask(self, obs: Any, info: dict) -> Any:
        space = self.env.observation_space
        if "action_mask" not in (info or {}):
            return obs if isinstance(space, spaces.Dict) else {"obs": obs}
        return with_key(
            space, obs, "action_mask", flat_mask(self.action_space, info["action_mask"])
        )

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.with_mask(obs, info), info

    def step(self, action):
        obs, *outcome, info = self.env.step(action)
        return self.with_mask(obs, info), *outcome, info


def num_options(space: gym.Space) -> int:
    """How many options the Discrete and MultiDiscrete parts of an action space have altogether."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return sum(map(num_options, space.values() if isinstance(space, spaces.Dict) else space))
    return int(space.n if isinstance(space, spaces.Discrete) else np.sum(getattr(space, "nvec", 0)))


def flat_mask(space: gym.Space, mask: Any) -> np.ndarray:
    """The entries of a mask in the format of `space.sample(mask)` (None allows all), or of one
    without its parts that are not Discrete. One of another size or dtype is not refused here: the
    scripts name it."""
    if mask is None:
        return np.ones(num_options(space), np.int8)
    if isinstance(mask, dict):
        mask = [flat_mask(child, mask.get(k)) for k, child in space.items()]
    elif isinstance(mask, (tuple, list)):
        children = (
            space
            if isinstance(space, spaces.Tuple) and len(space) == len(mask)
            else [space] * len(mask)
        )
        mask = [flat_mask(child, part) for child, part in zip(children, mask)]
    return np.concatenate(mask) if isinstance(mask, list) else np.ravel(mask)
