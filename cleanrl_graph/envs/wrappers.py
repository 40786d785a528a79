"""cleanrl_graph, wrappers around any environment: those of the scripts' flag --wrap, and the one
for masks in info.

    --wrap hide:1,3                hides entries 1 and 3 of a Box vector
    --wrap hide:mission            hides a key of a Dict
    --wrap z:skill:4               one of 4 skills per episode, as key "z" of the observation
    --wrap z:uniform:2             two numbers between 0 and 1 instead
    --wrap my_module:my_wrapper    your own: my_wrapper(env) returns an environment
    --wrap my_module:my_wrapper:3  my_wrapper(env, 3); what is no JSON is text

Several of them are put on in the order given, the last one outermost. cloudpickle saves them with
their state. `wrap_all` adds what the environment needs beside them.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from cleanrl_graph.envs.fitting import fit, name_of
from cleanrl_graph.envs.petting_zoo import with_agents

KNOWN = "hide:1,3 hide:key z:skill:4 z:uniform:2 module:callable module:callable:argument"


def full_id(env_id: str) -> tuple[str, str]:
    """(id for gym.make, hint for its errors). `envs:NAME` is this package's where Python finds no
    other `envs`, such as one in the current folder."""
    if not env_id.startswith("envs:"):
        return env_id, ""
    ours = f"cleanrl_graph.{env_id}"
    own = importlib.util.find_spec("envs")
    if own and own.origin:
        return env_id, f"of {own.origin}; that of cleanrl_graph is {ours}"
    return ours, ""


def advice(env_id: str, problem: BaseException, known: set[str]) -> str:
    """What may help where gym.make failed; `known` are the ids that there were before."""
    quoted = r"'\w+'(?:(?:, |,? and )'\w+')*"
    missing = re.search(rf"__init__\(\) missing .* arguments?: ({quoted})", str(problem))
    if missing:
        kwargs = [f'"{name}": ...' for name in re.findall(r"'(\w+)'", missing[1])]
        return f"give --env-kwargs '{{{', '.join(kwargs)}}}'"
    module, _, name = env_id.rpartition(":")
    if not isinstance(problem, (gym.error.NameNotFound, gym.error.NamespaceNotFound)):
        return "or module:Name-v0"
    if not module:
        found = [f"{top}:{name}" for top in modules_like(name)]
        return f"not imported? --env-id {' or '.join(found)}" if found else "or module:Name-v0"
    of = [
        getattr(spec.entry_point, "__module__", spec.entry_point) for spec in gym.registry.values()
    ]
    is_there = any(f"{path}:".startswith((f"{module}.", f"{module}:")) for path in of)
    if is_there or set(gym.registry) != known:
        return "or module:Name-v0"
    return (
        f"{module} was imported and registered nothing: call its register function in a module of "
        "yours"
    )


def modules_like(name: str) -> list[str]:
    """The installed modules whose name, or that of their package, resembles how an id begins."""
    first = re.split(r"[-/]", name)[0].lower()
    found = []
    for module, packages in importlib.metadata.packages_distributions().items():
        words = set(re.split(r"[-_.]", " ".join([module, *packages]).lower().replace(" ", "-")))
        for word in words - {"gym", "gymnasium", "env", "envs"}:
            if len(word) > 2 and (
                first.startswith(word) or len(first) > 2 and word.startswith(first)
            ):
                found.append(module)
                break
    return sorted(set(found) - {"gymnasium", "cleanrl_graph"})


def wrap(env: gym.Env, spec: str) -> gym.Env:
    """The environment with one entry of --wrap put on. gym.error.Error with a sentence for an entry
    that cannot be read or does not fit the environment; what one's own module or callable raises is
    not caught."""
    name, _, rest = spec.partition(":")
    if name == "hide":
        return hide(env, spec, rest.split(","))
    if name == "z":
        return EpisodeZ(env, spec)
    return call(env, spec)


def wrap_all(env: gym.Env, specs: tuple[str, ...], has_agents: bool = False) -> gym.Env:
    """The environment with all entries of --wrap put on, then, for a script that `has_agents`, with
    those of a Tuple or Dict as a set, and with spaces that the scripts read. If the info of its
    first reset has an action_mask, and the observation has none, that is moved into the
    observation."""
    for spec in specs:
        env = wrap(env, spec)
    if has_agents:
        env = with_agents(env)
    env = fit(env)
    space = env.observation_space
    is_in_obs = isinstance(space, spaces.Dict) and "action_mask" in space.keys()
    outcome = env.reset()
    info = outcome[-1] if isinstance(outcome, tuple) else None
    is_in_info = isinstance(info, dict) and "action_mask" in info
    if is_in_info and not is_in_obs:
        return InfoActionMask(env)
    return env


def hide(env: gym.Env, spec: str, entries: list[str]) -> gym.Env:
    """Without these entries of a Box vector, values and bounds alike, or these keys of a Dict."""
    space = env.observation_space
    if isinstance(space, spaces.Dict) and set(entries) <= set(space.keys()):
        return without_keys(env, entries)
    hidden = [int(entry) for entry in entries if entry.strip().isdecimal()]
    is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1
    if len(hidden) < len(entries) or not is_vector or max(hidden) >= space.shape[0]:
        raise gym.error.Error(
            f"--wrap {spec}: numbers from 0 on are needed, as in hide:1,3, and an observation that "
            "is a Box vector with these entries, or keys of a Dict; "
            f"it is {name_of(space)}"
        )
    seen = np.ones(space.shape, bool)  # a mask, not indices: a vector of another length is an error
    seen[hidden] = False
    visible = spaces.Box(space.low[seen], space.high[seen], dtype=space.dtype)

    def without_hidden(obs):
        return np.asarray(obs)[seen]

    return gym.wrappers.TransformObservation(env, without_hidden, visible)


def without_keys(env: gym.Env, hidden: list[str]) -> gym.Env:
    """Without these keys of a Dict observation."""
    space = env.observation_space
    visible = spaces.Dict({key: space[key] for key in space if key not in hidden})

    def without_hidden(obs):
        if not isinstance(obs, Mapping):  # the scripts name it
            return obs
        return {key: value for key, value in obs.items() if key not in hidden}

    return gym.wrappers.TransformObservation(env, without_hidden, visible)


def call(env: gym.Env, spec: str) -> gym.Env:
    """What a `module:callable:arguments` of one's own makes of the environment."""
    match = re.fullmatch(r"([^\W\d][\w.]*):(\w+)(?::(.*))?", spec)
    if match is None:
        raise gym.error.Error(f"--wrap {spec}: there is no such wrapper; the forms are {KNOWN}")
    module, name, text = match.groups()
    arguments = arguments_of(text)
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
            f"--wrap {spec}: {name!r} of {module} must be a callable that takes the environment "
            f"and {arguments}: {error}"
        ) from None
    result = function(env, *arguments)
    if not isinstance(result, gym.Env):
        raise gym.error.Error(
            f"--wrap {spec}: it must return a gymnasium environment, and returned {result!r}"
        )
    return result


def arguments_of(text: str | None) -> list:
    """What stands between colons, as JSON where it can be read so, else as text; colons inside of
    JSON are its own. 'a:3:{"b": 1}' is ["a", 3, {"b": 1}]."""
    arguments = []
    while text is not None:
        try:
            value, stop = json.JSONDecoder().raw_decode(text)
            is_json = text[stop : stop + 1] in ("", ":")
        except ValueError:
            is_json = False
        if not is_json:
            value = text.partition(":")[0]
            stop = len(value)
        arguments.append(value)
        text = text[stop + 1 :] if stop < len(text) else None
    return arguments


def with_space(space: gym.Space, key: str, child: gym.Space) -> spaces.Dict:
    """The space of `with_key`."""
    children = {"obs": space}
    if isinstance(space, spaces.Dict):
        children = space.spaces
    return spaces.Dict({**children, key: child})


def with_key(space: gym.Space, obs: Any, key: str, value: Any) -> Any:
    """An element of `space` with one more key, beside key "obs" or those of a Dict. What should be
    a dict and is not stays as it is: the scripts name it."""
    if not isinstance(space, spaces.Dict):
        return {"obs": obs, key: value}
    if isinstance(obs, Mapping):
        return {**obs, key: value}
    return obs


class EpisodeZ(gym.Wrapper):
    """A z for every episode, drawn or taken from `reset(options={"z": z})`: the environment finds
    it in the options of its reset, the policy in the observation as key "z".

    info["group"] at an episode's end is "z_2" for skill 2; for numbers "z_0", "z_1" or "z_2", the
    third of the range in which the first one lies. A group that the environment gave is
    replaced."""

    def __init__(self, env: gym.Env, spec: str):
        super().__init__(env)
        space = env.observation_space
        match = re.fullmatch(r"z:(skill|uniform):([1-9]\d*)", spec)
        if match is None:
            raise gym.error.Error(
                f"--wrap {spec}: z:skill:K or z:uniform:D with a number of at least 1 is needed"
            )
        if isinstance(space, spaces.Dict) and "z" in space.keys():
            raise gym.error.Error(f"--wrap {spec}: the observation has a key 'z' already: {space}")
        self.num = int(match[2])
        self.is_skill = match[1] == "skill"
        self.rng = np.random.default_rng()
        if self.is_skill:
            z_space = spaces.Discrete(self.num)
        else:
            z_space = spaces.Box(0, 1, (self.num,), np.float32)
        self.observation_space = with_space(space, "z", z_space)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """The first observation and info. A seed fixes the z of all episodes that follow."""
        if seed is not None:
            self.rng = np.random.default_rng([seed, 122])  # not the environment's numbers
        options = options or {}
        z = options.get("z")
        if z is None:
            z = self.draw_z()
        self.z = int(z) if self.is_skill else np.asarray(z, np.float32)
        obs, info = self.env.reset(seed=seed, options={**options, "z": self.z})
        return with_key(self.env.observation_space, obs, "z", self.z), info

    def draw_z(self):
        """A random skill, or numbers float32 [num]."""
        if self.is_skill:
            return self.rng.integers(self.num)
        return self.rng.random(self.num, np.float32)

    def step(self, action):
        """As of the environment; the observation has key "z", info at an episode's end "group"."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            group = self.z
            if not self.is_skill:
                group = min(int(3 * self.z[0]), 2)
            info = {**(info or {}), "group": f"z_{group}"}
        obs = with_key(self.env.observation_space, obs, "z", self.z)
        return obs, reward, terminated, truncated, info


class MeanReward(gym.Wrapper):
    """Agents that are rewarded together: the mean of a list or dict of rewards. An episode ends
    when it has for all of them."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(np.mean(of_each(reward))), *map(is_all, (terminated, truncated)), info


def of_each(value: Any) -> list:
    """The values of a list or dict, or the one value."""
    return list(value.values()) if isinstance(value, dict) else np.ravel(value).tolist()


def is_all(value: Any) -> bool:
    return all(of_each(value))


class InfoActionMask(gym.Wrapper):
    """Moves `info["action_mask"]` into the observation, as key "action_mask" (beside key "obs", or
    those of a Dict). Where info has none the observation lacks the key. gym.error.Error if no part
    of the action has options."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        total = num_options(env.action_space)
        if total == 0:
            raise gym.error.Error(
                f"info['action_mask'] of {env}: {env.action_space} has no Discrete part "
                "to be masked"
            )
        mask_space = spaces.MultiBinary(total)
        self.observation_space = with_space(env.observation_space, "action_mask", mask_space)

    def with_mask(self, obs: Any, info: dict) -> Any:
        """The observation with the mask that is in info, if one is."""
        space = self.env.observation_space
        if "action_mask" in (info or {}):
            mask = flat_mask(self.action_space, info["action_mask"])
            return with_key(space, obs, "action_mask", mask)
        if isinstance(space, spaces.Dict):
            return obs
        return {"obs": obs}

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.with_mask(obs, info), info

    def step(self, action):
        obs, *outcome, info = self.env.step(action)
        return self.with_mask(obs, info), *outcome, info


def num_options(space: gym.Space) -> int:
    """How many options the Discrete and MultiDiscrete parts of an action space have altogether."""
    if isinstance(space, spaces.Dict):
        return sum(map(num_options, space.values()))
    if isinstance(space, spaces.Tuple):
        return sum(map(num_options, space))
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return int(np.sum(getattr(space, "nvec", 0)))


def flat_mask(space: gym.Space, mask: Any) -> np.ndarray:
    """The entries of a mask in the format of `space.sample(mask)` (None allows all), or of one
    without its parts that are not Discrete. One of another size or dtype is not refused here: the
    scripts name it."""
    if mask is None:
        return np.ones(num_options(space), np.int8)
    if isinstance(mask, dict):
        parts = [flat_mask(child, mask.get(key)) for key, child in space.items()]
        return np.concatenate(parts)
    if isinstance(mask, (tuple, list)):
        children = [space] * len(mask)
        if isinstance(space, spaces.Tuple) and len(space) == len(mask):
            children = space
        parts = [flat_mask(child, part) for child, part in zip(children, mask)]
        return np.concatenate(parts)
    return np.ravel(mask)
