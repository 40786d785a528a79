"""cleanrl_graph, model.pt: a trained policy in one's own program, observation in, action out; and
--load-model.

    policy = load_policy("model.pt")                    # script, environment, network: the file's
    policy = load_policy("best.pt")                     # of --eval-every
    policy = load_policy("model.pt", env, num_envs=16)  # for 16 environments with env's spaces
    policy = load_policy("runs/CartPole-v1__ppo_graph__1__2")  # a run that is not finished, too

It does what the script's own `play` does, from the same parts: the greedy actions of an episode are
equal to those of the evaluation. The script that saved the file is imported by its name when it is
not given: from this package, or from wherever Python finds modules.
"""

import os
import threading
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from cleanrl_graph.envs import fitting
from cleanrl_graph.envs.masks import CanonicalMasks
from cleanrl_graph.services import checkpoint, import_first, summary, vector
from cleanrl_graph.services.arguments import args_of
from cleanrl_graph.services.check import (
    LATEST,
    MOST,
    UsageError,
    checked,
    close,
    make_env,
    one_kind,
    plain,
)
from cleanrl_graph.services.process import accelerate, default_generator

OTHERS = ("norm_obs", "aux")  # flags beside those of the network that make it, too
FREE = {"memory_length", "env_kwargs", "wrap", "vectorization_mode"}  # may differ from the file's
# Say nothing of a training
OF_A_RUN = checkpoint.FREE - {"vectorization_mode"} | {"seed", "world_size"}


def model_file(path: str) -> str:
    """The file that is meant by a path. In a folder model.pt, else the newest checkpoint, else
    best.pt, else the newest of the first two in the folders below. UsageError if there is none."""
    if not os.path.isdir(path):
        return path
    found = [*Path(path).glob("model.pt"), *checkpoint.checkpoints_in(path)]
    found += Path(path).glob("best.pt")
    below = [*Path(path).rglob("*/model.pt"), *Path(path).rglob("*/checkpoint_*.ckpt")]
    found += sorted(below, key=os.path.getmtime, reverse=True)
    if not found:
        raise UsageError(f"{path}: no model.pt or checkpoint is in this folder or below")
    return str(found[0])


def read_model(path: str, device: Any = "cpu") -> dict:
    """model.pt, or a checkpoint, which only its owner may load: {"model": weights, "args": flags,
    "script": name}. UsageError for another file, or for weights that are not finite."""
    try:
        if str(path).endswith(".ckpt"):
            saved = checkpoint.read(path)
        else:
            saved = torch.load(path, map_location=device, weights_only=True)
        assert {"script", "args", "model"} <= set(saved)
        bad = [name for name, value in saved["model"].items() if not value.isfinite().all()]
    except OSError:
        raise
    except Exception:  # of many kinds
        raise UsageError(f"{path}: not a file that a run wrote") from None
    if bad:
        raise UsageError(f"{path}: the weights {bad[0]} are not finite")
    return saved


def load_policy(
    path: str,
    env: Any = None,
    num_envs: int | None = None,
    greedy: bool = True,
    device: Any = "cpu",
    script: ModuleType | None = None,
) -> "Policy":
    """The policy in a `model.pt`, a checkpoint, or the newest in a folder. `env`, an environment or
    anything with an observation_space and an action_space, has the wrappers that --wrap names, and
    may have those that services put on by themselves; without it the environment of the file's
    flags is made for a moment. `num_envs` makes it one for as many environments at once. Not
    `greedy`: actions are drawn, by `policy.generator`, which begins in the state of torch's and can
    be seeded: `policy.generator.manual_seed(1)`. `script` is needed for a file of a script
    under another name. ImportError if the script is not found, ValueError if file, spaces and
    script do not fit together, OSError if the file cannot be read."""
    path = model_file(path)
    saved = read_model(path, device)
    if script is None:
        name = saved["script"]
        script = import_first(f"cleanrl_graph.{name}", name)  # of this package, or a user's own
    if script is None:
        raise ImportError(
            f"{path}: it was saved by {saved['script']}.py, which Python does not find: add its "
            "folder to sys.path, or give load_policy the module as `script`"
        )
    known = vars(args_of(script))
    flags = checkpoint.of_today(saved["args"], known)
    unknown = sorted(set(flags) - set(known))
    if unknown:
        raise UsageError(
            f"{path}: it has the flags {unknown}, {script.Args.exp_name} does not; it is of "
            f"{saved['script']}, of this or another version"
        )
    args = args_of(script, **flags)
    with one_kind(script):
        policy = Policy(script, args, env, num_envs, greedy, torch.device(device))
    if not policy.has_value:  # the critic saw more and is left out: the policy's stays as it is
        theirs = [pair for pair in saved["model"].items() if not pair[0].startswith("critic")]
        ours = [pair for pair in policy.agent.state_dict().items() if pair[0].startswith("critic")]
        saved["model"] = dict(theirs + ours)
    spaces = f"the observation space {policy.observation_space}, the action space "
    load_weights(policy.agent, saved, f"{path}: {spaces}{policy.envs.action_space}")
    accelerate(policy.agent)
    policy.path = path
    return policy


def load_weights(agent: torch.nn.Module, saved: dict, about: str, own: str = "") -> None:
    """Loads a file's weights into the agent of the script named `own`. UsageError if they are those
    of another network."""
    try:
        agent.load_state_dict(saved["model"])
    except RuntimeError:
        ours = {name: value.shape for name, value in agent.state_dict().items()}
        theirs = {name: value.shape for name, value in saved["model"].items()}
        differ = [name for name in theirs | ours if theirs.get(name) != ours.get(name)]
        is_other = own not in ("", saved["script"])
        hint = f"start {saved['script']}.py to play it; " * is_other
        way_out = "; --load-matching takes those that fit" * (own != "")
        raise UsageError(
            f"{about}: {hint}it is of {saved['script']}.py and {saved['args'].get('env_id')}, its "
            "weights do not fit this environment, or this script was changed before or since: "
            f"{differ[0]} is one of {len(differ)} that differ{way_out}"
        ) from None


def load_matching(agent: torch.nn.Module, weights: dict, about: str) -> None:
    """Loads the weights that have a place of the same name and shape, and says which have none, on
    either side. UsageError if none has one."""
    ours = agent.state_dict()
    taken = {}
    for name, value in weights.items():
        if name in ours and value.shape == ours[name].shape:
            taken[name] = value
    if not taken:
        raise UsageError(f"{about}: --load-matching: no weight fits in name and shape")
    agent.load_state_dict(taken, strict=False)
    fresh = [name for name in ours if name not in taken]
    left = [name for name in weights if name not in taken and name not in ours]
    text = f"{about}: --load-matching takes {len(taken)} of {len(ours)} weights"
    for names, what in ((fresh, "fresh"), (left, "only in the file")):
        if names:
            text += f"; {what}: {summary.listed(names, ', ')}"
    fitting.say(text)


def without(space: gym.Space, names: Iterable[str], path: str = "") -> gym.Space:
    """The observation space without the keys that --critic-only names."""
    keys = fitting.keys_of(space)
    if not (names and keys):
        return space
    children = {}
    for k in keys:
        own = f"{path}.{k}".removeprefix(".")
        is_graph = isinstance(space[k], gym.spaces.Graph)
        if not {own, f"{own}.nodes" if is_graph else own} & set(names):
            children[k] = without(space[k], names, own)
    return gym.spaces.Dict(list(children.items()))  # a dict would be sorted


def flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"


def network_flags(args: Any) -> list[str]:
    """The names of the flags that make network and memory: those from --hidden-dims on, up to
    --total-timesteps, and OTHERS."""
    names = [field.name for field in fields(args)]
    first = names.index("hidden_dims")
    last = names.index("total_timesteps")
    return names[first:last] + [name for name in OTHERS if name in names]


def about_file(args: Any, saved: dict) -> str:
    """What begins a line about the file of --load-model, which has the flags `saved`."""
    other = f" was trained on {saved['env_id']}, not {args.env_id}"
    return f"--load-model {args.load_model}{other * (saved['env_id'] != args.env_id)}"


def take_flags(args: Any, given: Iterable[str] = ()) -> None:
    """--load-model: the flags of network and memory become those of the file, and so do
    environment, its kwargs and wrappers. Those that are `given`, or have a value that is not the
    default, stay. Prints which are taken, which stay, and which others of the file differ.
    UsageError for a flag that stays and makes another network, but with --load-matching."""
    try:
        # An environment may change the current folder
        args.load_model = model_file(os.path.abspath(args.load_model))
        saved = read_model(args.load_model)["args"]
    except OSError as error:
        raise UsageError(f"--load-model {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--load-model {error}") from None
    defaults = vars(type(args)())
    given = {*given, *(name for name, value in vars(args).items() if value != defaults[name])}
    names = network_flags(args)
    if "env_id" not in given or args.env_id == saved.get("env_id"):
        names += ["env_id", "env_kwargs", "wrap", "vectorization_mode"]
    taken = []
    kept = []
    wrong = []
    left = []
    for name, value in saved.items():
        own = plain(getattr(args, name, value))
        if own == value or name in OF_A_RUN:
            continue
        if name not in names:
            left.append(flag(name, value))
        elif name not in given:
            setattr(args, name, value)
            taken.append(flag(name, value))
        elif name in FREE or args.load_matching:
            kept.append(flag(name, own))
        else:
            wrong.append(f"{flag(name, own)}, it has {value}")
    about = about_file(args, saved)
    if wrong:
        raise UsageError(
            f"{about}: the file is of another network: {'; '.join(wrong)}. "
            "Leave these flags out, they are taken from the file; --load-matching keeps them, and "
            "takes the weights that fit"
        )
    texts = [" ".join(flags) or "none" for flags in (taken, kept, left)]
    stays = f"; as given: {texts[1]}" * bool(kept)
    trains = f"; not taken: {texts[2]}" * (args.total_timesteps > 0)
    fitting.say(f"{about}: taken from the file: {texts[0]}{stays}{trains}")


class Policy:
    """`policy(observation, reward) -> action`, an element of the action space. The reward is that
    of the step which led to the observation; a policy without memory, or one that does not look at
    rewards, does not need it. `reset()` comes before the first observation of an episode.

    With `num_envs` observations and actions are lists, one entry per environment, rewards
    [num_envs], and `starts` names the environments in which an episode begins: bool [num_envs].
    Without memory there may be any number of them. With `details` a call returns (action, log_prob,
    value): arrays [num_envs], of ppo_graph_agents.py one entry for each agent of all environments.
    value is None with --critic-only, whose critic is not in a policy. pickle takes it to other
    processes, in the middle of an episode, too. `path` is the file that it was loaded from.

    Threads can share a policy without memory: one waits for the other. With a memory each needs a
    copy.deepcopy of its own, with episodes of its own."""

    path = ""

    def __init__(
        self,
        script: ModuleType,
        args: Any,
        env: Any,
        num_envs: int | None,
        greedy: bool,
        device: torch.device,
    ):
        self.script = script
        names = getattr(args, "critic_only", ())
        if names:  # a policy needs no critic
            args = replace(args, critic_only=())
        self.has_value = not names
        self.args = args
        self.num_envs = num_envs
        self.greedy = greedy
        self.lock = threading.Lock()
        self.num_steps = 0
        most = 0
        if env is None:
            try:
                has_function = vector.has_function(args)
                env = vector.one_of(script, args) if has_function else make_env(script, args)
            except UsageError as problem:
                raise UsageError(f"{problem} (or give load_policy an `env`)") from None
            own = Spaces(env)  # some environments have none after they are closed
            close(env)
            most = MOST  # rows to choose from: other entries of --env-kwargs may have more
        else:
            own = Spaces(env)
        own.observation_space = without(own.observation_space, names)
        self.env = env = fitting.fit(own)
        self.observation_space = env.observation_space
        self.masks = CanonicalMasks(env, script, args)
        size = num_envs or 1
        self.envs = checked(script)([partial(Spaces, env)] * size, args)  # reads and checks
        for parts in self.envs.parts:
            parts[:] = [
                part if part.group is None else part._replace(n=max(part.n, most)) for part in parts
            ]
        self.agent = script.Agent(self.envs.leaves, env.action_space, args).to(device).eval()
        self.generator = default_generator(next(self.agent.parameters()).device).clone_state()
        self.agent.head.generator = self.generator
        self.memory = script.Memory(self.agent, self.envs.leaves, size, args)
        self.has_memory = hasattr(self.memory, "state")
        self.reset()

    def __repr__(self) -> str:
        name = self.script.__name__.rpartition(".")[2]
        return f"<policy of {self.args.env_id}, {name}, {self.path}>"

    def __getstate__(self) -> dict:
        """What pickle takes. Networks are made anew, as some of their classes are made in runtime,
        and a new rollout begins."""
        made = (self.script, vars(self.args), self.env.unwrapped, self.num_envs, self.greedy)
        names = ("has_value", "num_steps", "begins", "path", "generator")
        own = {name: vars(self)[name] for name in names}
        weights = self.agent.state_dict()
        memory = self.memory.state() if self.has_memory else None
        return dict(made=made, weights=weights, parts=self.envs.parts, memory=memory, own=own)

    def __setstate__(self, state: dict) -> None:
        script, flags, *others = state["made"]
        device = next(iter(state["weights"].values())).device
        self.__init__(script, args_of(script, **flags), *others, device)
        self.agent.load_state_dict(state["weights"])
        accelerate(self.agent)
        self.envs.parts = state["parts"]
        if self.has_memory:
            self.memory.restore(state["memory"])
        self.memory.begin()
        vars(self).update(state["own"])
        self.agent.head.generator = self.generator

    def make_env(self, i: int = 0, **kwargs) -> gym.Env:
        """The environment of the file's flags in its wrappers, entry i of --env-kwargs, with more
        keyword arguments. Its masks are as the script reads them."""
        if vector.has_function(self.args):
            name = self.args.env_id
            raise UsageError(f"{name} makes a VectorEnv, no single environment: call it yourself")
        env = make_env(self.script, self.args, i, **kwargs)
        masked = CanonicalMasks(env, self.script, self.args)
        return masked if masked.forms else env

    def reset(self) -> None:
        """Begins an episode, in all environments: what was remembered is forgotten."""
        self.begins = True

    def __call__(
        self,
        observation: Any,
        reward: Any = 0.0,
        starts: bool | Iterable[bool] = False,
        details: bool = False,
    ) -> Any:
        if not self.lock.acquire(blocking=not self.has_memory):
            raise UsageError(
                "another thread is within a call of this policy, whose memory is of one episode "
                "in each environment: give each thread its own, copy.deepcopy(policy)"
            )
        try:
            action, *more = self.act(observation, reward, starts)
            return (action, *more) if details else action
        finally:
            self.lock.release()

    def act(self, observation: Any, reward: Any, starts: bool | Iterable[bool]) -> tuple:
        """(action, log_prob [N], value [N]), see the class."""
        observations = [observation] if self.num_envs is None else observation
        size = len(self.envs.envs)
        is_list = type(observations) in (list, tuple, np.ndarray)
        N = len(observations) if is_list else 0
        if N == 0 or N != size and self.has_memory:
            raise UsageError(f"num_envs={size}: give a list of {size} observations")
        if self.num_steps % self.args.num_steps == 0:
            self.memory.begin()
        self.num_steps += 1
        rows = []
        for env, obs in zip(cycle(self.envs.envs), observations):
            env.num_steps = self.num_steps
            LATEST.env = env
            rows.append(self.envs.read(self.masks.observation(self.env.observation(obs))))
        flat = self.envs.collate(rows)
        begins = np.full(N, starts, bool) | self.begins
        self.begins = False
        rewards = np.full(N, reward, np.float32)
        step = self.script.Step(flat, rewards, begins, np.zeros(N, bool), [], [])
        action, log_prob, value = self.memory.act(step, self.greedy)
        actions = self.agent.head.env_actions(action, flat.counts)
        actions = list(map(self.env.action, actions))
        value = value.cpu().numpy() if self.has_value else None
        action = actions[0] if self.num_envs is None else actions
        return action, log_prob.cpu().numpy(), value


class Spaces(gym.Env):
    """Has the spaces of something that need not be an environment, of a VectorEnv those of one."""

    def __init__(self, env: Any):
        one = "single_" * isinstance(env, gym.vector.VectorEnv)
        self.observation_space = getattr(env, f"{one}observation_space")
        self.action_space = getattr(env, f"{one}action_space")

    def observation(self, obs: Any) -> Any:
        return obs

    def action(self, action: Any) -> Any:
        return action
