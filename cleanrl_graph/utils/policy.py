"""cleanrl_graph, model.pt: a trained policy in one's own program, observation in, action out; and
--load-model.

    policy = load_policy("model.pt")                      # network, environment and script as the file says
    policy = load_policy("model.pt", env, num_envs=16)    # for 16 environments with the spaces of `env`

It does what the script's own `play` does, from the same parts: the greedy actions of an episode are
equal to those of the evaluation. The script that saved the file is imported by its name when it is
not given: from this package, or from wherever Python finds modules.
"""

import importlib
import inspect
import sys
from dataclasses import fields
from types import ModuleType
from typing import Any, Iterable

import gymnasium as gym
import numpy as np
import torch

SHAPING = ("norm_obs", "aux")  # flags of other rooms that make another network
HOW = {"memory_length", "attention", "bf16"}  # flags of these rooms that may differ


def read_model(path: str, device: Any = "cpu") -> dict:
    """What --save-model wrote: {"model": weights, "args": flags, "script": name}. ValueError for
    another file."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        known = {"model", "args"} <= set(saved) and "exp_name" in saved["args"]
    except OSError:
        raise
    except Exception:  # of many kinds
        known = False
    if not known:
        raise ValueError(f"{path}: not a file that --save-model wrote")
    return {"script": saved["args"]["exp_name"]} | saved


def find_script(name: str) -> ModuleType | None:
    """The script of this package, or a user's own module of that name; None if there is neither."""
    for module in (f"cleanrl_graph.{name}", name):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the script is there, and imports what is not installed
    return None


def load_policy(
    path: str,
    env: Any = None,
    num_envs: int | None = None,
    greedy: bool = True,
    device: Any = "cpu",
    script: ModuleType | None = None,
) -> "Policy":
    """The policy in a `model.pt`. `env`, an environment or anything with an observation_space and
    an action_space, has the wrappers that --wrap names; without it the environment of the file's
    flags is made for a moment. `num_envs` makes it one for as many environments at once. Not
    `greedy`: actions are drawn, by torch's generator. `script` is needed for a file of a script
    under another name. ImportError if the script is not found, ValueError if file, spaces and
    script do not fit together, OSError if the file cannot be read."""
    saved = read_model(path, device)
    if script is None:
        script = find_script(saved["script"])
    if script is None:
        raise ImportError(
            f"{path}: it was saved by {saved['script']}.py, which Python does not find: add its "
            "folder to sys.path, or give load_policy the module as `script`"
        )
    if unknown := set(saved["args"]) - {field.name for field in fields(script.Args)}:
        raise ValueError(
            f"{path}: it has the flags {sorted(unknown)}, {script.Args.exp_name} does not; it is of "
            f"{saved['script']}, of this or another version"
        )
    policy = Policy(
        script, script.Args(**saved["args"]), env, num_envs, greedy, torch.device(device)
    )
    try:
        policy.agent.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise ValueError(
            f"{path}: the observation space {policy.observation_space}, the action space "
            f"{policy.envs.action_space}: {misfit(saved, error)}"
        ) from None
    return policy


def rooms(args: Any) -> dict[str, str]:
    """Flag -> the comment above its room in the class of `args`, such as "Network"."""
    found, room = {}, ""
    for line in inspect.getsource(type(args)).splitlines():
        if line.startswith("    # "):
            room = line.removeprefix("    # ")
        elif line[:4] == " " * 4 and (name := line[4:].partition(":")[0]).isidentifier():
            found[name] = room
    return found


def take_flags(args: Any) -> None:
    """--load-model: the flags of network and memory become those of the file, and so do
    environment, its kwargs and wrappers, unless they are given. SystemExit for a flag that is given
    and makes another network."""
    try:
        saved = read_model(args.load_model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--load-model {error}") from None
    typed = {
        part.partition("=")[0].lstrip("-").replace("-", "_").removeprefix("no_")
        for part in sys.argv[1:]
    }
    given = {
        name
        for name, value in vars(type(args)()).items()
        if name in typed or getattr(args, name) != value
    }
    names = [
        name
        for name, room in rooms(args).items()
        if room in ("Network", "Memory") or name in SHAPING
    ]
    wrong = [
        f"--{name.replace('_', '-')} {getattr(args, name)}, it has {saved['args'][name]}"
        for name in names
        if name in saved["args"]
        and name in given - HOW
        and getattr(args, name) != saved["args"][name]
    ]
    if wrong:
        raise SystemExit(
            f"--load-model {args.load_model}: the file is of another network: {'; '.join(wrong)}. Leave "
            "these flags out, they are taken from the file"
        )
    if "env_id" not in given or args.env_id == saved["args"].get("env_id"):
        names += ["env_id", "env_kwargs", "wrap"]
    taken = {
        name: saved["args"][name]
        for name in names
        if name in set(saved["args"]) - given and getattr(args, name) != saved["args"][name]
    }
    for name, value in taken.items():
        setattr(args, name, value)
    if taken:
        print(
            f"--load-model {args.load_model}:",
            *(f"--{name.replace('_', '-')} {value}" for name, value in taken.items()),
            file=sys.stderr,
        )


def load_weights(agent: torch.nn.Module, args: Any) -> None:
    """--load-model: the weights of the file. SystemExit if they are those of another network."""
    saved = read_model(args.load_model, next(agent.parameters()).device)
    try:
        agent.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise SystemExit(f"--load-model {args.load_model}: {misfit(saved, error)}") from None


def misfit(saved: dict, error: RuntimeError) -> str:
    """What is wrong with weights that an agent does not take."""
    lines = str(error).splitlines()
    return (
        f"it is of {saved['script']}.py and {saved['args'].get('env_id')}, its weights do not fit this script and "
        "environment:\n"
        + "\n".join(lines[1:4] + [f"\tand {len(lines) - 4} more"] * (len(lines) > 4))
    )


class Spaces(gym.Env):
    """What a policy must know of its environment."""

    def __init__(self, env: Any):
        self.observation_space, self.action_space = env.observation_space, env.action_space


class Policy:
    """`policy(observation, reward) -> action`, an element of the action space. The reward is that
    of the step which led to the observation; a policy without memory, or one that does not look at
    rewards, does not need it. `reset()` comes before the first observation of an episode.

    With `num_envs` observations and actions are lists, one entry per environment, rewards
    [num_envs], and `starts` names the environments in which an episode begins: bool [num_envs].
    Without memory there may be fewer of them."""

    def __init__(
        self,
        script: ModuleType,
        args: Any,
        env: Any,
        num_envs: int | None,
        greedy: bool,
        device: torch.device,
    ):
        self.script, self.args, self.num_envs, self.greedy, self.size = (
            script,
            args,
            num_envs,
            greedy,
            num_envs or 1,
        )
        if env is None:
            env = self.make_env()
            env.close()
        self.observation_space, spaces = env.observation_space, Spaces(env)
        self.envs = script.Envs(
            [lambda: spaces] * self.size, args.action_head
        )  # which checks and flattens
        self.agent = script.Agent(self.envs.leaves, spaces.action_space, args).to(device).eval()
        self.storage, self.memory, self.past = (
            script.Storage(self.envs.leaves, device),
            None,
            np.zeros(self.size, bool),
        )
        if hasattr(script, "Memory"):
            parts = {
                "agent": self.agent,
                "leaves": self.envs.leaves,
                "storage": self.storage,
                "args": args,
                "num_envs": self.size,
                "device": device,
            }
            self.memory = script.Memory(
                **{name: parts[name] for name in inspect.signature(script.Memory).parameters}
            )
            self.takes_obs = "obs" in inspect.signature(self.memory.act).parameters
        self.num_acts = 0
        self.reset()

    def make_env(self, i: int = 0, **kwargs) -> gym.Env:
        """The environment of the file's flags in its wrappers, entry i of --env-kwargs, with more
        keyword arguments."""
        return self.script.make_env(self.args, i, kwargs)

    def reset(self) -> None:
        """Begins an episode, in all environments: what was remembered is forgotten."""
        self.starts = ~self.past

    @torch.no_grad()
    def __call__(
        self, observation: Any, reward: Any = 0.0, starts: Iterable[bool] | None = None
    ) -> Any:
        observations = [observation] if self.num_envs is None else observation
        num = len(observations)
        if num > self.size or num < self.size and self.memory:
            raise ValueError(f"{num} observations for a policy with num_envs={self.num_envs}")
        self.envs.num_steps += 1
        flat = self.envs.collate(
            [self.envs.flatten(i, obs) for i, obs in enumerate(observations)], range(num)
        )
        self.storage.clear()
        if self.memory is None:
            action = self.agent(self.storage.append(flat), greedy=self.greedy)[0]
        else:
            starts = self.starts if starts is None else self.starts | np.asarray(starts, bool)
            rewards = np.array(np.broadcast_to(reward, self.size), np.float32)
            step = self.script.Step(flat, rewards, starts, self.past, None, [])
            if self.num_acts % self.args.num_steps == 0:
                self.memory.begin()
            self.num_acts += 1
            obs = [self.storage.append(flat)] if self.takes_obs else []
            action, self.starts = self.memory.act(*obs, step, self.greedy)[0], self.past
        counts = flat.counts.get(self.agent.head.per_row)
        actions = self.script.to_env_actions(self.envs.action_space, action.cpu().numpy(), counts)
        return actions[0] if self.num_envs is None else actions
