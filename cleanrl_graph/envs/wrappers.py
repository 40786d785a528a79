"""cleanrl_graph, wrappers around any environment: those of the scripts' flag --wrap, and the one
for masks of actions that are elsewhere than the scripts read them.

    --wrap hide:1,3                hides entries 1 and 3 of a Box vector
    --wrap hide:mission            hides a key of a Dict
    --wrap z:skill:4               one of 4 skills per episode, as key "z" of the observation
    --wrap z:uniform:2             two numbers between 0 and 1 instead
    --wrap relative:robot:0,1      positions, columns 0 and 1 of all sets, as the robot sees them
    --wrap relative:robot:x,y:dir  where columns have names; turned by the robot's direction
    --wrap my_module:my_wrapper    your own: my_wrapper(env) returns an environment
    --wrap my_module:my_wrapper:3  my_wrapper(env, 3); what is no JSON is text

    --wrap cleanrl_graph.envs.wrappers:MeanReward  the mean of the rewards of several agents
    --wrap cleanrl_graph.envs.wrappers:PythonInts  actions as Python's int, not NumPy's

Several of them are put on in the order given, the last one outermost. cloudpickle saves them with
their state. `wrap_all` and `find_mask` add what the environment needs beside them.
"""

import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from cleanrl_graph.envs.fitting import fit, keys_of, name_of
from cleanrl_graph.envs.petting_zoo import with_agents
from cleanrl_graph.envs.relative import Relative

KNOWN = (
    "hide:1,3 hide:key z:skill:4 z:uniform:2 relative:set:x,y module:callable "
    "module:callable:argument"
)
MASKS = ("action_mask", "action_masks", "mask", "legal_actions", "legal_moves")  # keys of an info
ABSENT = object()
OTHER_MASKS = ("invalid", "illegal", "forbidden", "visited", "pad")  # in names: 1 is not "allowed"


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


def wrap(env: gym.Env, spec: str) -> gym.Env:
    """The environment with one entry of --wrap put on. gym.error.Error with a sentence for an entry
    that cannot be read or does not fit the environment; what one's own module or callable raises is
    not caught."""
    name, _, rest = spec.partition(":")
    if name == "hide":
        return hide(env, spec, rest.split(","))
    if name == "z":
        return EpisodeZ(env, spec)
    if name == "relative":
        return Relative(env, spec)
    return call(env, spec)


def wrap_all(env: gym.Env, specs: tuple[str, ...], has_agents: bool = False) -> gym.Env:
    """The environment with all entries of --wrap put on, then, for a script that `has_agents`, with
    those of a Tuple or Dict as a set, and with spaces that the scripts read."""
    for spec in specs:
        env = wrap(env, spec)
    if has_agents:
        env = with_agents(env)
    refuse_statistics(env)
    return fit(env)


def find_mask(env: gym.Env) -> gym.Env:
    """The environment, which is reset once, without a seed: if the observation has no
    "action_mask", and the info, the observation or a method has one under a name of MASKS, that is
    moved there. `mask_note` says which is used, or what was seen and is not."""
    outcome = env.reset()
    space = env.observation_space
    if isinstance(space, spaces.Dict) and "action_mask" in space.keys():
        return env
    obs, info = outcome if isinstance(outcome, tuple) and len(outcome) == 2 else (None, None)
    return with_mask(env, obs, info)


def refuse_statistics(env: gym.Env) -> None:
    """gym.error.Error where NormalizeObservation learns. Each copy of the environment would have
    another mean and deviation, the evaluation would begin anew, and model.pt would have none."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.NormalizeObservation) and env.update_running_mean:
            raise gym.error.Error(
                "wrapper NormalizeObservation learns: each environment has statistics of its own, "
                "and model.pt has none of them: give --norm-obs instead, whose statistics are all "
                "environments' and the model's"
            )
        env = env.env


# ---- Wrappers of --wrap ----
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
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(env, *arguments)
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as problem:
        raise gym.error.Error(f"--wrap {spec}: {problem}; the forms are {KNOWN}") from None
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
        over = all(of_each(terminated)), all(of_each(truncated))
        return obs, float(np.mean(of_each(reward))), *over, info


def of_each(value: Any) -> list:
    """The values of a list or dict, or the one value."""
    return list(value.values()) if isinstance(value, dict) else np.ravel(value).tolist()


class PythonInts(gym.ActionWrapper):
    """Discrete actions as Python's int, for an environment that refuses NumPy's."""

    def action(self, action):
        return int(action)


# ---- Masks of actions that are elsewhere ----
def with_mask(env: gym.Env, obs: Any, info: Any) -> gym.Env:
    """The environment with the first mask that fits in its observation; `obs` and `info` are what a
    reset returned. One in info["action_mask"] is always used: the checks name what does not fit."""
    unused = []
    for place, name in mask_places(env, info):
        try:
            is_list, size = form_of(env.action_space, name, mask_at(env, place, name, obs, info))
        except Exception as problem:  # of many kinds
            if (place, name) == ("info", "action_mask"):
                return InfoActionMask(env)
            unused.append(f"{called(place, name)} {problem}")
        else:
            return InfoActionMask(env, place, name, is_list, size)
    if unused and mask_sizes(env.action_space):
        env.mask_note = (
            f"not used as a mask of actions: {'; '.join(unused)}. An action_mask in the "
            "observation or in info is used"
        )
    return env


def mask_places(env: gym.Env, info: Any) -> list[tuple[str, str]]:
    """(place, name) of all that may be a mask of actions, best first."""
    space = env.observation_space
    infos = info if isinstance(info, dict) else {}
    keys = [str(key) for key in space.keys()] if isinstance(space, spaces.Dict) else []
    places = [("info", name) for name in MASKS if name in infos]
    for name in MASKS:
        if env.has_wrapper_attr(name) and callable(env.get_wrapper_attr(name)):
            places.append(("method", name))
    return places + [("obs", key) for key in keys if "mask" in key.lower() or key in MASKS]


def called(place: str, name: str) -> str:
    texts = {"info": "info['{}']", "method": "the method {}()", "obs": "the observation's '{}'"}
    return texts[place].format(name)


def mask_at(env: gym.Env, place: str, name: str, obs: Any, info: Any) -> Any:
    """The mask as the environment has it, ABSENT if it has none."""
    if place == "method":
        return env.get_wrapper_attr(name)()
    source = obs if place == "obs" else info
    return source.get(name, ABSENT) if isinstance(source, Mapping) else ABSENT


def form_of(space: gym.Space, name: str, mask: Any) -> tuple[bool, int]:
    """(whether it lists what is allowed, its number of entries). ValueError says why it is no mask
    of actions in `space`."""
    if any(word in name.lower() for word in OTHER_MASKS):
        raise ValueError("is another one by its name")
    if isinstance(space, spaces.Discrete) and name.startswith("legal") and is_list(space, mask):
        return True, int(space.n)
    values = flat_mask(space, mask)
    total = num_options(space)
    if values.size not in mask_sizes(space):
        raise ValueError(f"has {values.size} entries, {space} has {total} options")
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"is {str(mask)[:60]}, not 0 or 1 for each of the {total} options")
    return False, values.size


def is_list(space: spaces.Discrete, mask: Any) -> bool:
    """Whether a mask lists actions: whole numbers, none of them twice."""
    try:
        flat_indices(space, mask)
    except gym.error.Error:
        return False
    found = np.array(list(mask))
    return found.size == 0 or found.dtype.kind in "iu"


class InfoActionMask(gym.Wrapper):
    """Moves a mask of actions into the observation, as key "action_mask" (beside key "obs", or
    those of a Dict): `info[name]`, what the method `name` returns, or the observation's own key,
    which is then gone. `is_list`: it lists what is allowed. Where info has none the observation
    lacks the key, but a last one gets ones: only its value is needed. gym.error.Error if no part of
    the action has options."""

    def __init__(
        self,
        env: gym.Env,
        place: str = "info",
        name: str = "action_mask",
        is_list: bool = False,
        size: int = 0,
    ):
        super().__init__(env)
        self.place = place
        self.name = name
        self.is_list = is_list
        self.size = size or num_options(env.action_space)
        if self.size == 0:
            raise gym.error.Error(
                f"{called(place, name)} of {env}: {env.action_space} has no part to be masked"
            )
        self.mask_note = f"the mask of actions is {called(place, name)}, {self.size} entries"
        mask = spaces.MultiBinary(self.size)
        children = with_space(env.observation_space, "action_mask", mask)
        self.observation_space = spaces.Dict(self.without_own(children.spaces))

    def without_own(self, children: Mapping) -> dict:
        """All but the key from which the mask is moved."""
        own = self.name if self.place == "obs" else None
        return {key: child for key, child in children.items() if key != own}

    def with_mask(self, obs: Any, info: dict, is_last: bool = False) -> Any:
        """The observation with the mask, if there is one."""
        space = self.env.observation_space
        mask = mask_at(self.env, self.place, self.name, obs, info)
        if mask is ABSENT and not is_last:
            return obs if isinstance(space, spaces.Dict) else {"obs": obs}
        if mask is ABSENT or mask is None:
            mask = np.ones(self.size, np.int8)
        elif self.is_list:
            mask = flat_indices(self.action_space, mask)
        mask = flat_mask(self.action_space, mask)
        if mask.dtype.kind == "f" and np.isin(mask, (0, 1)).all():
            mask = mask.astype(np.int8)
        obs = with_key(space, obs, "action_mask", mask)
        return self.without_own(obs) if isinstance(obs, dict) else obs

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.with_mask(obs, info), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs = self.with_mask(obs, info, bool(terminated or truncated))
        return obs, reward, terminated, truncated, info


def flat_indices(space: spaces.Discrete, legal: Any) -> np.ndarray:
    """The mask of a Discrete action, int8 [n], of which the allowed ones are listed."""
    legal = list(legal)
    wrong = [action for action in legal if not space.start <= action < space.start + space.n]
    if wrong:
        raise gym.error.Error(f"{wrong[0]} is listed as a legal action of {space}")
    if len(set(legal)) < len(legal):
        raise gym.error.Error(
            f"{legal} lists legal actions of {space}, and one of them twice: a mask of 0 and 1 is "
            "named action_mask"
        )
    mask = np.zeros(space.n, np.int8)
    mask[np.array(legal, np.int64) - space.start] = 1
    return mask


def leaves_of(space: gym.Space) -> list[gym.Space]:
    """What is no Dict or Tuple in an action space."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [leaf for k in keys_of(space) for leaf in leaves_of(space[k])]
    return [space]


def options_of(space: gym.Space) -> list[int]:
    """The numbers of options of the entries of the Discrete and MultiDiscrete parts."""
    options = []
    for leaf in leaves_of(space):
        if isinstance(leaf, spaces.Discrete):
            options.append(int(leaf.n))
        elif isinstance(leaf, spaces.MultiDiscrete):
            options += leaf.nvec.ravel().tolist()
    return options


def num_options(space: gym.Space) -> int:
    """How many options the Discrete and MultiDiscrete parts of an action space have altogether."""
    return sum(options_of(space))


def mask_sizes(space: gym.Space) -> set[int]:
    """The numbers of entries that a mask of actions may have: one for each option; for each bit
    none, one or two; for a pair of choices one for each pair."""
    options = options_of(space)
    bits = 0
    for leaf in leaves_of(space):
        if isinstance(leaf, spaces.MultiBinary):
            bits += int(np.prod(leaf.shape))
    sizes = {sum(options), sum(options) + bits, sum(options) + 2 * bits}
    if len(options) == 2:
        sizes.add(options[0] * options[1])
    return sizes - {0}


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
