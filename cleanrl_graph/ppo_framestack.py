"""PPO whose memory are views on the last steps: frame stacking that stores every step once, for any observation.

    python cleanrl_graph/ppo_framestack.py --env-id envs:StatelessCartPole-v1 --norm-obs --learning-rate 1e-3
    python cleanrl_graph/ppo_framestack.py --env-id CartPole-v1 --mask-obs 1,3 --obs-shifts -8,-4,-2,-1,0
    python cleanrl_graph/ppo_framestack.py --env-id envs:LastGraphs-v0 --obs-shifts -2:0 --gamma 0.5

Rooms: Args, environments, ragged observations, encoder, memory (views), action heads, agent, loss, PPO, checkpoint,
main. Read first Memory, Agent, Actor, then collect, ppo_loss, update and train: they are the algorithm. The rooms
"environments" and "checkpoint and evaluation" are engineering (workers, faults, files): skip them at first reading.

The policy sees the observations of steps t - 15 to t, the actions and rewards of t - 16 to t - 1 (flags). A step is
stored once and its views are gathered by index, when collecting and when training, also from steps before the rollout.
Graphs and sets are encoded once per step, and their encodings are gathered.

Papers: frame stacking (Mnih et al. 2015, doi:10.1038/nature14236), PPO (Schulman et al. 2017, arXiv:1707.06347), its
implementation details (Huang et al. 2022, ICLR blog track), GAE (Schulman et al. 2015, arXiv:1506.02438), GINE (Hu et
al. 2020, arXiv:1905.12265), Deep Sets (Zaheer et al. 2017, arXiv:1703.06114).
"""

import contextlib
import copy
import ctypes
import glob
import hashlib
import inspect
import io
import itertools
import json
import math
import mmap
import multiprocessing as mp
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Callable, Iterable, Iterator, Literal, NamedTuple, Sequence

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium import spaces
from PIL import Image
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch_geometric import nn as pyg
from tqdm import tqdm

Json = Annotated[dict | list, tyro.constructors.PrimitiveConstructorSpec(
    nargs=1, metavar="JSON", instance_from_str=lambda args: json.loads(args[0]),
    is_instance=lambda value: isinstance(value, (dict, list)), str_from_instance=lambda value: [json.dumps(value)])]


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; env i is seeded with seed + i"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """if toggled, use CUDA when it is available"""
    compile: Literal["no", "default", "reduce-overhead"] = "no"
    """mode of torch.compile for encoder and MLPs; batches are filled up to few sizes, with at most 1/8 more rows"""
    profile: bool = False
    """if toggled, write where the time goes to {run_dir}/{run_name}/profile.md, and a trace of the third update"""
    track: bool = False
    """if toggled, track this experiment with Weights and Biases"""
    wandb_project_name: str = "cleanrl_graph"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """if toggled, save a greedy episode to {run_dir}/{run_name}/episode.gif when training ends"""
    run_dir: str = "runs"
    """folder that receives the TensorBoard log, the model and the evaluation table"""
    save_model: bool = False
    """if toggled, save the model to {run_dir}/{run_name}/model.pt when training ends"""
    load_model: str | None = None
    """start from the weights of this model.pt"""
    checkpoint_every: int = 100
    """updates between two checkpoints in {run_dir}/{run_name}; 0 writes one only where the training stops early"""
    keep_checkpoints: int = 2
    """number of checkpoints that are kept, the newest ones"""
    resume: str | None = None
    """go on from this checkpoint or from the newest one in this folder; `auto`: from the newest run with this env_id,
    exp_name and seed in run_dir, or from the start if there is none"""
    skip_nonfinite_updates: bool = False
    """if toggled, a minibatch whose loss or gradient is NaN or inf is left out and counted, otherwise training stops"""
    eval_suite: str | None = None
    """name of a list of env kwargs in the env's `eval_suites`, each played when training ends"""
    eval_episodes: int = 10
    """greedy episodes played when training ends if there is no eval_suite; 0 turns the evaluation off"""
    eval_samples: int = 16
    """sampled episodes per entry of the eval_suite, beside the greedy one; the best of them is reported"""

    # Environment
    env_id: str = "envs:StatelessCartPole-v1"
    """the id of the environment, `module:Name-v0` imports the module first"""
    env_kwargs: Json = field(default_factory=dict)
    """keyword arguments of the environment as JSON, or a list of them: env i gets entry i modulo their number, returns
    are logged and evaluated per entry, a suite and the video take the first one"""
    agent_z: str = "none"
    """a vector z per episode, shown to the policy as key "z" of the observation and given to the environment as
    `reset(options={"z": z})`: `skill:K` is one of K, `uniform:D` D numbers between 0 and 1. Returns are logged and
    evaluated per skill, or logged per third of the first number"""
    mask_obs: str = ""
    """indices of entries that are hidden from a Box vector observation, such as 1,3"""
    norm_obs: bool = False
    """if toggled, vectors and the columns of graphs and sets are normalised by their running mean and std"""
    num_workers: int = 0
    """worker processes that step the environments; 0 steps them in this process (best for cheap environments)"""
    double_buffer: bool = False
    """if toggled, the policy serves one half of the environments while the workers step the other half"""
    on_env_error: Literal["raise", "restart"] = "raise"
    """what an exception in an environment does, or a worker that died or hangs: stop the training, or truncate the
    episode and make the environment anew"""
    env_timeout: float = 300.0
    """seconds after which a worker that does not answer counts as hanging; 0 waits forever"""

    # Memory
    obs_shifts: str = "-15:0"
    """steps whose observations the policy sees, 0 is the current one: a range (both ends included) or a list -8,-4,0"""
    action_shifts: str = "-16:-1"
    """steps whose actions the policy sees; "" for none"""
    reward_shifts: str = "-16:-1"
    """steps whose rewards the policy sees; "" for none"""
    image_views: Literal["channels", "encodings"] = "channels"
    """how the views of an image enter: side by side as channels of the CNN, or encoded once per step"""

    # Network
    hidden_dims: tuple[int, ...] = (256, 256)
    """widths of the actor's and of the critic's MLP"""
    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"
    """activation of all MLPs"""
    gnn: Literal["gine", "gatv2", "transformer", "sage"] = "gine"
    """message passing layer of graph observations"""
    gnn_layers: int = 3
    """number of message passing layers"""
    gnn_dim: int = 64
    """width of node, edge and set-element embeddings"""
    gnn_aggr: Literal["sum", "mean", "max"] = "sum"
    """how a node aggregates its incoming messages"""
    readout: Literal["sum", "mean", "max", "meanmax"] = "meanmax"
    """how the nodes of a graph, or the elements of a set, become one vector"""
    action_head: Literal["auto", "flat", "nodes", "avail_actions"] = "auto"
    """what a Discrete action indexes: a fixed list, the elements that action_mask is aligned to, or avail_actions"""
    autoregressive: bool = False
    """if toggled, the parts of a composite action are drawn in sequence, each given those before it"""
    state_dependent_std: bool = False
    """if toggled, the log-std of Box actions is an output of the network instead of a parameter"""

    # Algorithm
    total_timesteps: int = 500000
    """total timesteps of the experiments"""
    learning_rate: float = 2.5e-4
    """the learning rate of the optimizer"""
    num_envs: int = 4
    """the number of parallel game environments (of each rank, with torchrun)"""
    num_steps: int = 128
    """the number of steps to run in each environment per policy rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing for policy and value networks"""
    gamma: float = 0.99
    """the discount factor gamma"""
    gae_lambda: float = 0.95
    """the lambda for the general advantage estimation"""
    num_minibatches: int = 4
    """the number of mini-batches"""
    update_epochs: int = 4
    """the K epochs to update the policy"""
    norm_adv: bool = True
    """toggles advantages normalization"""
    norm_adv_global: bool = False
    """if toggled, torchrun's ranks normalise advantages over all their minibatches and not each over its own"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggles whether or not to use a clipped loss for the value function, as per the paper"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = None
    """the target KL divergence threshold"""

    # to be filled in runtime
    batch_size: tyro.conf.Suppress[int] = 0
    """the batch size (computed in runtime)"""
    minibatch_size: tyro.conf.Suppress[int] = 0
    """the mini-batch size (computed in runtime)"""
    world_size: tyro.conf.Suppress[int] = 1
    """the number of torchrun's processes (computed in runtime)"""
    num_iterations: tyro.conf.Suppress[int] = 0
    """the number of iterations (computed in runtime)"""


# --- shared: environments ---
# ---- Environments: the leaves of an observation, stepped in this process or in worker processes ----
class section(contextlib.ContextDecorator):
    """--profile: adds the time inside a block or a function, without that of sections in it, to those of `name`."""

    on, inner, seconds, calls = False, [], {}, {}

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        if section.on:
            range_ = torch.profiler.record_function(self.name)
            range_.__enter__()
            section.inner.append([range_, time.perf_counter(), 0.0])

    def __exit__(self, *exception) -> None:
        if section.inner:
            range_, start, inside = section.inner.pop()
            seconds = time.perf_counter() - start
            section.seconds[self.name] = section.seconds.get(self.name, 0.0) + seconds - inside
            section.calls[self.name] = section.calls.get(self.name, 0) + 1
            if section.inner:
                section.inner[-1][2] += seconds
            range_.__exit__(*exception)


NOT_INPUT = ("action_mask", "node_ids")  # keys of a Dict observation with a meaning of their own


class Leaf(NamedTuple):
    """One array of the observation tree. A ragged leaf (`group` is not None) has any number of rows per step; leaves of
    one group have the same number. `shape`, `dtype` and `space` are those of one row (ragged) or one step (dense)."""

    path: str  # "graph.nodes", "position"
    kind: str  # "vector", "image", "discrete", "multidiscrete" or "links" (pairs of node indices)
    shape: tuple[int, ...]
    dtype: np.dtype
    group: str | None
    space: gym.Space
    get: Callable[[Any], Any]  # observation -> array


def leaves_of(space: gym.Space, path: str = "", get: Callable = lambda obs: obs) -> list[Leaf]:
    """The leaves of `space` in a fixed order. Raises TypeError for a space with no rule, naming it."""
    name = path or "obs"  # the path of a space that is not inside another
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return [leaf for k, child in children for leaf in leaves_of(
            child, f"{path}.{k}" if path else str(k), (lambda obs, k=k: get(obs)[k]) if path else itemgetter(k))]
    if isinstance(space, spaces.Graph):
        nodes, edges = f"{name}.nodes", f"{name}.edge_links"

        def optional(field: str, row_shape: tuple) -> Callable:
            empty = np.zeros((0, *row_shape), np.int64)
            return lambda obs: empty if (value := getattr(get(obs), field)) is None else value

        leaves = [leaf._replace(group=nodes) for leaf in leaves_of(space.node_space, nodes, lambda obs: get(obs).nodes)]
        leaves.append(Leaf(edges, "links", (2,), np.dtype(np.int64), edges, space, optional("edge_links", (2,))))
        if space.edge_space is not None:
            features = leaves_of(space.edge_space, f"{name}.edges", optional("edges", space.edge_space.shape))
            leaves += [leaf._replace(group=edges) for leaf in features]
        return leaves
    if isinstance(space, spaces.Sequence):
        rows = leaves_of(space.feature_space, name)
        if any(leaf.group for leaf in rows):
            raise TypeError(f"leaf '{name}': {space} is not supported, its rows must have a fixed shape")
        if space.stack:
            return [leaf._replace(group=name, get=lambda obs, g=leaf.get: g(get(obs))) for leaf in rows]
        return [leaf._replace(group=name, get=lambda obs, leaf=leaf: np.array(
            [leaf.get(row) for row in get(obs)] or np.zeros((0, *leaf.shape), leaf.dtype))) for leaf in rows]
    if isinstance(space, spaces.Box):
        pixels = space.shape[:2] if len(space.shape) == 3 and space.shape[2] < space.shape[0] else space.shape[1:]
        kind = "image" if len(space.shape) == 3 and min(pixels) >= 8 else "vector"
        small = {"f": np.dtype(np.float32), "u": np.dtype(np.int64)}  # torch knows no larger unsigned numbers
        dtype = space.dtype if space.dtype == np.uint8 else small.get(space.dtype.kind, space.dtype)
        return [Leaf(name, kind, space.shape, dtype, None, space, get)]
    if isinstance(space, spaces.MultiBinary):
        return [Leaf(name, "vector", tuple(space.shape), np.dtype(np.int8), None, space, get)]
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return [Leaf(name, type(space).__name__.lower(), space.shape, np.dtype(np.int64), None, space, get)]
    raise TypeError(f"leaf '{name}': observation space {space} is not supported (Box, Discrete, MultiDiscrete, "
                    "MultiBinary, Graph, Sequence, and Dict or Tuple of these are)")


class InfoActionMask(gym.Wrapper):
    """Moves `info["action_mask"]` into the observation, as key "action_mask" (beside key "obs", or those of a Dict)."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        num_options, space = parts_of(env.action_space, choice=False)[-1].mask.stop, env.observation_space
        if num_options == 0:
            raise ValueError(f"info['action_mask'] of {env}: {env.action_space} has no Discrete part to be masked")
        self.is_dict = isinstance(space, spaces.Dict)
        mask = {"action_mask": spaces.MultiBinary(num_options)}
        self.observation_space = spaces.Dict((space.spaces if self.is_dict else {"obs": space}) | mask)

    def with_mask(self, obs: Any, info: dict) -> dict:
        mask = {"action_mask": flat_mask(self.action_space, info["action_mask"])} if "action_mask" in info else {}
        return (obs if self.is_dict else {"obs": obs}) | mask

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.with_mask(obs, info), info

    def step(self, action):
        obs, *outcome, info = self.env.step(action)
        return self.with_mask(obs, info), *outcome, info


def flat_mask(space: gym.Space, mask: Any) -> np.ndarray:
    """The entries of a mask in the format of `space.sample(mask)` (None allows all), or of one without its parts that
    are not Discrete."""
    if mask is None:
        return np.ones(parts_of(space, choice=False)[-1].mask.stop, np.int8)
    if isinstance(mask, dict):
        mask = [flat_mask(child, mask.get(k)) for k, child in space.items()]
    elif isinstance(mask, (tuple, list)):
        children = space if isinstance(space, spaces.Tuple) and len(space) == len(mask) else [space] * len(mask)
        mask = [flat_mask(child, part) for child, part in zip(children, mask)]
    return np.concatenate(mask) if isinstance(mask, list) else np.ravel(mask)


def z_space(kind: str) -> gym.Space | None:
    """The space of --agent-z, None for "none". ValueError for what is neither that, skill:K nor uniform:D."""
    match = re.fullmatch(r"none|(skill|uniform):([1-9]\d*)", kind)
    if match is None:
        raise ValueError(f"--agent-z {kind}: none, skill:K or uniform:D with a number of at least 1 is needed")
    if match[1] == "skill":
        return spaces.Discrete(int(match[2]))
    return spaces.Box(0, 1, (int(match[2]),), np.float32) if match[1] else None


class AgentZ(gym.Wrapper):
    """Draws a z for every episode, or takes `always`, gives it to the environment by `reset(options={"z": z})` and adds
    it to the observation, as key "z". At the end of an episode it is in info["eval"]["agent_z"]."""

    def __init__(self, env: gym.Env, kind: str, always: int | None = None):
        super().__init__(env)
        self.space, self.always, self.rng = z_space(kind), always, np.random.default_rng()
        self.is_dict = isinstance(env.observation_space, spaces.Dict)
        children = env.observation_space.spaces if self.is_dict else {"obs": env.observation_space}
        if "z" in children:
            raise ValueError(f"--agent-z {kind}: the observation has a key 'z' already: {env.observation_space}")
        self.observation_space = spaces.Dict({**children, "z": self.space})

    def with_z(self, obs: Any) -> dict:
        return {**(obs if self.is_dict else {"obs": obs}), "z": self.z}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self.rng = np.random.default_rng([seed, 122])  # not the environment's numbers
        if isinstance(self.space, spaces.Discrete):
            self.z = int(self.rng.integers(self.space.n)) if self.always is None else self.always
        else:
            self.z = self.rng.random(self.space.shape, np.float32)
        obs, info = self.env.reset(seed=seed, options={**(options or {}), "z": self.z})
        return self.with_z(obs), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info = {**info, "eval": {**info.get("eval", {}), "agent_z": np.asarray(self.z).tolist()}}
        return self.with_z(obs), reward, terminated, truncated, info


def make_env(env_id: str, env_kwargs: dict, mask_obs: str = "", agent_z: str = "none", z: int | None = None) -> gym.Env:
    """The environment, without gymnasium's checker (every observation is checked below), without the entries `mask_obs`
    of its observation, and with --agent-z, which is always `z` where that is given."""
    env = gym.make(env_id, disable_env_checker=True, **env_kwargs)
    if mask_obs:
        space, entries = env.observation_space, mask_obs.split(",")
        hidden = [int(entry) for entry in entries if entry.strip().isdigit()]
        if len(hidden) < len(entries) or not (
                isinstance(space, spaces.Box) and len(space.shape) == 1 and max(hidden) < space.shape[0]):
            raise ValueError(f"--mask-obs {mask_obs}: {space} is not a Box vector that has these entries")
        low, high = np.delete(space.low, hidden), np.delete(space.high, hidden)
        visible = spaces.Box(low, high, dtype=space.dtype)
        env = gym.wrappers.TransformObservation(env, lambda obs: np.delete(obs, hidden), visible)
    in_obs = isinstance(env.observation_space, spaces.Dict) and "action_mask" in env.observation_space.keys()
    env = InfoActionMask(env) if not in_obs and "action_mask" in env.reset()[1] else env
    return env if z_space(agent_z) is None else AgentZ(env, agent_z, z)


def tasks_of(args) -> list[dict]:
    """The entries of --env-kwargs. ValueError if it is neither an object nor a list of them."""
    tasks = args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]
    if not tasks or not all(isinstance(task, dict) for task in tasks):
        raise ValueError(f"--env-kwargs {args.env_kwargs}: an object, or a list of at least one object, is needed")
    return tasks


def env_maker(args, i: int = 0, z: int | None = None, more: dict | None = None) -> Callable[[], gym.Env]:
    """What makes env i, counted over all ranks, with `more` keyword arguments."""
    tasks = tasks_of(args)
    return partial(make_env, args.env_id, tasks[i % len(tasks)] | (more or {}), args.mask_obs, args.agent_z, z)


def check_tasks(args) -> None:
    """ValueError if one policy cannot play all entries of --env-kwargs: they must have the same leaves and actions. The
    bounds of Box observations may differ, and those of an action that chooses a row."""
    tasks, first = tasks_of(args), None
    for k, task in enumerate(tasks if len(tasks) > 1 else []):
        with contextlib.closing(env_maker(args, k)()) as env:
            leaves, action = leaves_of(env.observation_space), env.action_space
            if choice_group(action, leaves, args.action_head):  # its first element has its parts and their starts
                action = repr(to_env_actions(action, itertools.repeat(np.zeros(1))))
            leaves = [(leaf[:5], leaf.kind in ("discrete", "multidiscrete") and leaf.space) for leaf in leaves]
            found = [("observation", leaves, env.observation_space), ("action", action, env.action_space)]
        first = first or found
        for (name, value, space), (_, expected, other) in zip(found, first):
            if value != expected:
                raise ValueError(f"--env-kwargs, entry {k} {task}: the {name} space is {space}, that of entry 0 is "
                                 f"{other}; one policy needs the same")


class Step(NamedTuple):
    """What N environments returned. The concatenation of `parts[k]` holds the rows of leaf k of all of them in order,
    `counts[group]` how many each has, int64 [N] (ones for None, the dense leaves). Valid until the next step. The
    observation of an env begins an episode where it is `terminated` or `truncated`, as all are after a reset."""

    parts: list[list[np.ndarray]]
    counts: dict[str | None, np.ndarray]
    reward: np.ndarray  # float32 [N]
    terminated: np.ndarray  # bool [N]
    truncated: np.ndarray  # bool [N]
    progress: np.ndarray  # float64 [N, 2], return and length so far of the episode that goes on
    finals: list[tuple[int, list[np.ndarray]]]  # (env, leaf arrays): the last observations of truncated episodes
    episodes: list[tuple[int, float, int, dict]]  # (env, return, length, info["eval"]) of those that ended; return and
    # length are those of info["episode"] (RecordEpisodeStatistics) where it is given, sums of the above otherwise

    def observations(self, leaves: list[Leaf]) -> list[list[np.ndarray]]:
        """Copies of the leaf arrays of each environment."""
        columns = []
        for leaf, arrays in zip(leaves, self.parts):
            rows = np.concatenate(arrays)  # a dense leaf has one row per environment
            columns.append(np.split(rows, self.counts[leaf.group].cumsum()[:-1]) if leaf.group else list(rows))
        return [list(map(np.copy, row)) for row in zip(*columns)]


def join_steps(steps: list[Step]) -> Step:
    """One step of the environments of all `steps`."""
    parts, counts, *arrays, finals, episodes = zip(*steps)
    return Step([sum(column, []) for column in zip(*parts)],
                {group: np.concatenate([num[group] for num in counts]) for group in counts[0]},
                *map(np.concatenate, arrays), sum(finals, []), sum(episodes, []))


@section("collate")
def collate(leaves: list[Leaf], observations: list) -> tuple[list[list[np.ndarray]], dict[str | None, np.ndarray]]:
    """`parts` and `counts` of a Step from one list of leaf arrays per observation."""
    parts, counts = [], {None: np.ones(len(observations), np.int64)}
    for leaf, arrays in zip(leaves, zip(*observations)):
        if leaf.group not in counts:
            counts[leaf.group] = np.fromiter(map(len, arrays), np.int64, len(arrays))
        parts.append([np.concatenate(arrays) if leaf.group else np.array(arrays)])
    return parts, counts


def say(text: str, file=None) -> None:
    """Prints to stderr. Where that is a file on a full disk, or a screen that is gone, the run goes on."""
    with contextlib.suppress(OSError):
        print(text, file=file or sys.stderr, flush=True)


MAX_RESTARTS = 10  # of one environment that ends no episode in between
BEGINS = (0.0, True, False, 0.0, 0)  # reward, terminated, truncated, return and length where an episode begins


class Envs:
    """N environments stepped one after the other in this process.

    Autoreset in the same step: the observation after an episode's last step is the first of the next episode, and the
    last one of a truncated episode is kept in `Step.finals`. ValueError names env, leaf, step and value of what is
    wrong with an observation: shape, NaN or inf, edge to a missing node, category out of range, mask without a one.
    RuntimeError names env, step and action of an exception in an environment; with `restart` that environment is made
    anew instead, and its episode is truncated at the last observation that it returned."""

    def __init__(self, makers: list[Callable[[], gym.Env]], action_head: str = "auto", restart: bool = False,
                 first_env: int = 0):
        self.makers, self.restart, self.first_env, self.num_steps, self.seed = makers, restart, first_env, 0, None
        self.envs = [make() for make in makers]
        self.action_space = self.envs[0].action_space
        leaves = leaves_of(self.envs[0].observation_space)
        group = choice_group(self.action_space, leaves, action_head)
        aligned = {"action_mask": group, "node_ids": id_group(leaves)}  # they share the rows that they are aligned to
        self.leaves = [leaf for leaf in leaves if leaf.path not in NOT_INPUT] + [
            leaf._replace(group=aligned[leaf.path]) for leaf in leaves if leaf.path in NOT_INPUT]
        self.options = [part.mask for part in parts_of(self.action_space, False) if part.kind == "categorical"]
        self.is_masked = any(leaf.path == "action_mask" for leaf in self.leaves)
        self.choice = next((leaf for leaf in self.leaves if group and leaf.group == group), None)
        self.restarts = [0] * len(makers)  # since the environment's last whole episode
        self.last_steps: list[Step] = [None]  # one, as there is one lane

    def reset(self, seed: int | None = None, num_steps: int = 0) -> Step:
        """Starts new episodes; env i is seeded with seed + i."""
        self.seed, self.num_steps = seed, num_steps
        seeds = [None if seed is None else seed + self.first_env + i for i in range(len(self.envs))]
        observations = [self.flatten(i, self.begin(i, seed)) for i, seed in enumerate(seeds)]
        return self.finish(observations, [BEGINS] * len(self.envs))

    def begin(self, i: int, seed: int | None = None) -> Any:
        """The first observation of a new episode of env i."""
        try:
            return self.envs[i].reset(seed=seed)[0]
        except Exception as error:
            return self.remake(i, "reset", error)

    def remake(self, i: int, doing: str, error: Exception) -> Any:
        """The first observation of a new environment in the place of one that failed."""
        message = f"env {self.first_env + i}, step {self.num_steps}, {doing}: {type(error).__name__}: {error}"
        if not self.restart or self.restarts[i] == MAX_RESTARTS:
            raise RuntimeError(message + f" (after {MAX_RESTARTS} restarts)" * self.restart) from error
        say("".join(traceback.format_exception(error)) + message + ": restarted")
        self.restarts[i] += 1
        with contextlib.suppress(Exception):
            self.envs[i].close()
        try:
            self.envs[i] = self.makers[i]()
            return self.envs[i].reset(seed=self.new_seed(i, self.restarts[i]))[0]
        except Exception as again:
            return self.remake(i, "restart", again)

    def new_seed(self, i: int, num: int) -> int | None:
        """A seed for env i when it begins anew in this step for the num-th time."""
        return None if self.seed is None else self.seed + self.first_env + i + 1_000_003 * (self.num_steps + num)

    def step(self, actions: list) -> Step:
        """Steps env i with actions[i], an element of its action space."""
        self.num_steps += 1
        observations, outcomes, finals, episodes = [], [], [], []
        before = self.last_steps[0].observations(self.leaves) if self.restart else None
        progress = self.last_steps[0].progress.tolist()
        for i, (action, (ret, length)) in enumerate(zip(actions, progress)):
            try:
                obs, reward, terminated, truncated, info = self.envs[i].step(action)
                first, failed = None, False
            except Exception as error:
                first, failed = self.remake(i, f"action {action}", error), True
                reward, terminated, truncated, info = 0.0, False, True, {"eval": {"restarted": 1}}
            if "action_mask" in info and not self.is_masked:
                raise ValueError(f"env {self.first_env + i}, step {self.num_steps}: an action_mask in info, but that "
                                 "of the first reset had none: it must be in all of them")
            reward = float(reward)
            if not math.isfinite(reward):
                raise ValueError(f"env {self.first_env + i}, step {self.num_steps}: reward {reward}")
            ret, length = ret + reward, length + (not failed)
            if terminated or truncated:
                if not terminated:
                    finals.append((i, before[i] if failed else [array.copy() for array in self.flatten(i, obs)]))
                if (whole := info.get("episode", {})) is not None:  # None: the end of a life, not of a game
                    whole = {"r": ret, "l": length, **(whole if isinstance(whole, dict) else {})}
                    episodes.append((self.first_env + i, float(whole["r"]), int(whole["l"]), info.get("eval", {})))
                ret, length = 0.0, 0
                self.restarts[i] *= failed
                obs = first if failed else self.begin(i)
            observations.append(self.flatten(i, obs))
            outcomes.append((reward, terminated, truncated and not terminated, ret, length))
        return self.finish(observations, outcomes, finals, episodes)

    def finish(self, observations: list, outcomes: list[tuple], finals: Sequence = (), episodes: Sequence = ()) -> Step:
        """The step of all environments, after a check of its observations; outcomes: see BEGINS."""
        if finals:
            where, arrays = zip(*finals)
            self.check(where, *collate(self.leaves, arrays))
        parts, counts = collate(self.leaves, observations)
        self.check(range(len(observations)), parts, counts)
        outcomes = np.array(outcomes, np.float64)
        finals = [(self.first_env + i, arrays) for i, arrays in finals]
        self.last_steps = [Step(parts, counts, outcomes[:, 0].astype(np.float32), outcomes[:, 1] > 0,
                                outcomes[:, 2] > 0, outcomes[:, 3:], finals, list(episodes))]
        return self.last_steps[0]

    def send(self, actions: list, lane: int = 0) -> None:
        """With `receive` the two halves of a step, as in WorkerEnvs."""
        self.actions = actions

    @section("environments")
    def receive(self, lane: int = 0) -> Step:
        return self.step(self.actions)

    def flatten(self, i: int, obs: Any) -> list[np.ndarray]:
        """The leaf arrays of one observation of env i."""
        arrays, num_rows = [], {}
        for leaf in self.leaves:
            ragged = leaf.group is not None
            try:
                array = np.asarray(leaf.get(obs))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise self.error(i, leaf, f"is missing or cannot be read: {type(error).__name__} {error}") from error
            if array.dtype != leaf.dtype:
                if array.dtype.kind not in ("biu" if leaf.dtype.kind in "iu" else "biuf"):
                    raise self.error(i, leaf, f"dtype {array.dtype} where {leaf.space.dtype} is declared")
                array = array.astype(leaf.dtype)
            if array.ndim != len(leaf.shape) + ragged or array.shape[ragged:] != leaf.shape:
                raise self.error(i, leaf, f"shape {array.shape} where {('rows',) * ragged + leaf.shape} is declared")
            if ragged and num_rows.setdefault(leaf.group, len(array)) != len(array):
                raise self.error(i, leaf, f"{len(array)} rows where '{leaf.group}' has {num_rows[leaf.group]}")
            if leaf.path == "action_mask" and not (array.any(0).all() if ragged else all(
                    array.ravel()[options].any() for options in self.options)):
                raise self.error(i, leaf, f"all actions are masked: {array.tolist()}")
            if leaf.path == "node_ids" and len(np.unique(array)) < len(array):
                raise self.error(i, leaf, f"an id occurs twice: {array.tolist()}")
            if leaf is self.choice and len(array) == 0:
                raise self.error(i, leaf, "there is no row to choose from")
            arrays.append(array)
        return arrays

    @section("check")
    def check(self, envs: Sequence[int], parts: list[list[np.ndarray]], counts: dict[str | None, np.ndarray]) -> None:
        """ValueError for the first value of `parts` that is out of range; row b of `counts` belongs to envs[b]."""
        for leaf, (values,) in zip(self.leaves, parts):
            num_nodes = counts.get(leaf.path.removesuffix("edge_links") + "nodes")
            if leaf.dtype.kind == "f":
                bad = ~np.isfinite(values)
            elif leaf.kind == "links":
                bad = (values < 0) | (values >= num_nodes.repeat(counts[leaf.group])[:, None])
            elif leaf.kind in ("discrete", "multidiscrete"):
                num = leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec
                bad = (values < leaf.space.start) | (values >= leaf.space.start + num)
            else:
                continue
            if bad.any():
                row, *where = first = np.argwhere(bad)[0].tolist()
                ends = counts[leaf.group].cumsum()
                i = int(np.searchsorted(ends, row, side="right"))
                where = [row - int(ends[i] - counts[leaf.group][i])] * (leaf.group is not None) + where
                graph = f" of a graph with {num_nodes[i]} nodes" if leaf.kind == "links" else ""
                raise self.error(envs[i], leaf, f"value {values[tuple(first)]} at index {where}{graph}")

    def error(self, i: int, leaf: Leaf, problem: str) -> ValueError:
        return ValueError(f"env {self.first_env + i}, leaf '{leaf.path}', step {self.num_steps}: {problem}")

    def state(self) -> list[dict]:
        """Per environment what `restore` continues from. "env" is None for one without get_state and set_state, whose
        episode begins anew there."""
        states, step = [], self.last_steps[0]
        for i, (env, observation) in enumerate(zip(self.envs, step.observations(self.leaves))):
            inner, (ret, length) = env.unwrapped, step.progress[i].tolist()
            try:  # some have a set_state with another meaning, but then no get_state
                both = hasattr(inner, "get_state") and hasattr(inner, "set_state")
                pack(saved := inner.get_state() if both else None)
            except Exception as error:
                say(f"env {self.first_env + i}, get_state: {type(error).__name__}: {error}")
                saved = None
            states.append({
                "env": saved, "rng": inner.np_random.bit_generator.state,
                "z": (env.z, env.rng.bit_generator.state) if isinstance(env, AgentZ) else None,
                "elapsed": env.get_wrapper_attr("_elapsed_steps") if env.has_wrapper_attr("_elapsed_steps") else None,
                "observation": observation, "reward": float(step.reward[i]),
                "ends": [bool(step.terminated[i]), bool(step.truncated[i])],
                "return": ret, "length": int(length), "restarts": self.restarts[i]})
        return states

    def restore(self, saved: tuple[int | None, int, list[dict]]) -> Step:
        """Continues from the (seed, num_steps, state()) of a run that stopped."""
        self.seed, self.num_steps, states = saved
        observations, outcomes = [], []
        for i, (env, state) in enumerate(zip(self.envs, states)):
            self.restarts[i] = state.get("restarts", 0)
            if state["env"] is None:
                if state["rng"] is not None:
                    env.unwrapped.np_random.bit_generator.state = state["rng"]
                    if isinstance(env, AgentZ):
                        env.rng.bit_generator.state = state["z"][1]
                observations.append(self.flatten(i, self.begin(i, None if state["rng"] else self.new_seed(i, 1))))
                outcomes.append(BEGINS)
                continue
            self.begin(i, 0)
            env.unwrapped.set_state(state["env"])
            if isinstance(env, AgentZ):
                env.z, env.rng.bit_generator.state = state["z"]
            if state["elapsed"] is not None:  # by gymnasium's TimeLimit
                env.set_wrapper_attr("_elapsed_steps", state["elapsed"])
            observations.append([np.asarray(array, leaf.dtype) for array, leaf in
                                 zip(state["observation"], self.leaves)])
            outcomes.append((state["reward"], *state["ends"], state["return"], state["length"]))
        return self.finish(observations, outcomes)

    def close(self) -> None:
        for i, env in enumerate(self.envs):
            try:
                env.close()
            except Exception as error:  # it must not hide the error that led here
                say(f"env {self.first_env + i}, close: {type(error).__name__}: {error}")


def obey_parent(inherited: list, parent: int) -> None:
    """Makes this child process leave signals to its parent and leave when that is gone, even from within a step of an
    environment; closes the pipes that it inherited from it."""
    # Signals to the whole group arrive here, too, but the parent decides; it needs the children for its last checkpoint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(30))
    if sys.platform == "linux":  # PR_SET_PDEATHSIG works even while an environment holds the interpreter's lock
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for pipe in inherited:
        pipe.close()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work(pipe, inherited: list, parent: int, *args) -> None:
    """A worker process: steps its environments and writes the leaves to shared memory, which doubles on demand: the
    size of a new buffer is in the reply, and its file descriptor follows; it has no name that anybody has to unlink."""
    obey_parent(inherited, parent)
    buffer = np.empty(0, np.uint8)
    try:
        envs = Envs(*args)
        while request := pipe.recv():
            reply = getattr(envs, request[0])(*request[1:])
            if not isinstance(reply, Step):
                pipe.send((0, None, reply))
                continue
            arrays = [values for (values,) in reply.parts]
            offsets = np.cumsum([0] + [-(-values.nbytes // 64) * 64 for values in arrays]).tolist()
            grown = offsets[-1] > len(buffer)
            if grown:
                memory = getattr(os, "memfd_create", None)
                fd = memory("leaves") if memory else os.dup(tempfile.TemporaryFile().fileno())
                os.ftruncate(fd, 2 * offsets[-1])
                buffer = np.frombuffer(mmap.mmap(fd, 2 * offsets[-1]), np.uint8)
            for values, offset in zip(arrays, offsets):
                np.ndarray(values.shape, values.dtype, buffer, offset)[...] = values
            layout = [(values.shape, offset) for values, offset in zip(arrays, offsets)]
            pipe.send((len(buffer) * grown, layout, reply._replace(parts=[])))
            if grown:
                reduction.send_handle(pipe, fd, parent)
                os.close(fd)
        envs.close()
    except (BrokenPipeError, EOFError):
        pass
    except Exception:
        pipe.send((0, traceback.format_exc(), None))


class WorkerLost(RuntimeError):
    """A worker process died or hangs."""


class Worker(NamedTuple):
    process: mp.process.BaseProcess | None  # None before it starts, as its pipe
    pipe: Any
    envs: slice  # those that it steps


class WorkerEnvs:
    """The same N environments spread over worker processes. A worker's error is raised here, with its traceback, as is
    one that died or did not answer within `timeout` seconds (0: any time); with `restart` there is a new worker for
    the latter two, and the episodes of its environments are truncated. Each of `num_lanes` groups of environments can
    be stepped on its own: `send` returns at once, and while its workers step, the others can be served."""

    def __init__(self, makers: list[Callable[[], gym.Env]], num_workers: int, action_head: str = "auto",
                 restart: bool = False, timeout: float = 0.0, num_lanes: int = 1):
        probe = Envs(makers[:1], action_head)
        self.leaves, self.action_space = probe.leaves, probe.action_space
        probe.close()
        self.makers, self.action_head, self.restart, self.timeout = makers, action_head, restart, timeout or None
        self.seed, self.num_steps = None, 0
        self.workers: list[Worker] = []
        self.lanes: list[range] = []  # the workers of each lane
        for lane in np.array_split(np.arange(len(makers)), num_lanes):
            idx = np.array_split(lane, min(num_workers // num_lanes, len(lane)))
            self.lanes.append(range(len(self.workers), len(self.workers) + len(idx)))
            self.workers += [Worker(None, None, slice(int(envs[0]), int(envs[-1]) + 1)) for envs in idx]
        self.buffers = [np.zeros(0, np.uint8)] * len(self.workers)  # the shared memory that each worker writes to
        self.restarts = [0] * len(self.workers)  # of each worker since it answered last
        self.last_steps: list[Step] = [None] * num_lanes  # of each lane
        self.before: list = [None] * len(makers)  # with `restart`, the observation of each env at its last step
        for k in range(len(self.workers)):
            self.start(k)

    def start(self, k: int) -> None:
        """Starts worker k, in the place of the one that was there."""
        fork = "fork" in mp.get_all_start_methods()
        context, envs = mp.get_context("fork" if fork else "spawn"), self.workers[k].envs
        pipe, child = context.Pipe()
        inherited = [pipe, *(worker.pipe for worker in self.workers if worker.pipe)] if fork else []
        args = (child, inherited, os.getpid(), self.makers[envs], self.action_head, self.restart, envs.start)
        process = context.Process(target=work, args=args, daemon=True)
        process.start()
        child.close()
        self.workers[k] = Worker(process, pipe, envs)

    def reset(self, seed: int | None = None) -> Step:
        """Starts new episodes; env i is seeded with seed + i."""
        self.seed, self.num_steps = seed, 0
        for k in range(len(self.workers)):
            self.ask(k, "reset", seed)
        return self.receive_all()

    def step(self, actions: list) -> Step:
        """Steps env i with actions[i], an element of its action space."""
        for lane in range(len(self.lanes)):
            self.send(actions[self.span(lane)], lane)
        return self.receive_all()

    def receive_all(self) -> Step:
        return join_steps([self.receive(lane) for lane in range(len(self.lanes))])

    def span(self, lane: int) -> slice:
        """The environments of a lane."""
        return slice(self.workers[self.lanes[lane][0]].envs.start, self.workers[self.lanes[lane][-1]].envs.stop)

    def send(self, actions: list, lane: int = 0) -> None:
        """Begins a step of the environments of a lane."""
        self.num_steps += lane == 0
        mine = self.span(lane)
        if self.restart:
            self.before[mine] = self.last_steps[lane].observations(self.leaves)
        for k in self.lanes[lane]:
            envs = self.workers[k].envs
            self.ask(k, "step", actions[envs.start - mine.start:envs.stop - mine.start])

    @section("environments")
    def receive(self, lane: int = 0) -> Step:
        """What the environments of a lane returned; the envs in `finals` and `episodes` are counted over all lanes."""
        steps = []
        for k in self.lanes[lane]:
            try:
                steps.append(self.answer(k))
                self.restarts[k] *= not steps[-1].episodes
            except WorkerLost as error:
                steps.append(self.replace(k, error))
        self.last_steps[lane] = join_steps(steps)
        return self.last_steps[lane]

    def replace(self, k: int, error: WorkerLost) -> Step:
        """The first step of a new worker k, which truncates the episodes of its environments."""
        envs, worn_out = self.workers[k].envs, self.restarts[k] == MAX_RESTARTS
        if worn_out or self.before[envs.start] is None:  # None before the first step, too
            raise WorkerLost(f"{error}" + f" (after {MAX_RESTARTS} restarts)" * worn_out) from None
        say(f"{error}: restarted")
        self.restarts[k] += 1
        self.workers[k].pipe.close()
        self.start(k)
        seed = None if self.seed is None else self.seed + 1_000_003 * (self.num_steps + self.restarts[k])
        self.ask(k, "reset", seed, self.num_steps)
        try:
            step = self.answer(k)
        except WorkerLost as again:
            return self.replace(k, again)
        idx, progress = range(envs.start, envs.stop), np.concatenate([old.progress for old in self.last_steps]).tolist()
        return step._replace(
            terminated=~step.terminated, truncated=step.terminated, finals=[(i, self.before[i]) for i in idx],
            episodes=[(i, progress[i][0], int(progress[i][1]), {"restarted": 1}) for i in idx])

    def ask(self, k: int, *request) -> None:
        """Sends (method of Envs, *arguments) to worker k, or nothing for it to end."""
        with contextlib.suppress(OSError):  # what happened is seen in the answer
            self.workers[k].pipe.send(request)

    def answer(self, k: int) -> Any:
        """The reply of worker k, a Step or what else was asked for. RuntimeError where it reports an error,
        WorkerLost where it does not reply."""
        process, pipe, envs = self.workers[k]
        name = f"worker of envs {envs.start} to {envs.stop - 1}"
        try:
            if not pipe.poll(self.timeout):
                process.kill()  # or its answer would be taken for that to a later question
                raise WorkerLost(f"the {name} did not answer within {self.timeout:g} s in step {self.num_steps}")
            grown, layout, reply = pipe.recv()
            if grown:
                fd = reduction.recv_handle(pipe)
                self.buffers[k] = np.frombuffer(mmap.mmap(fd, grown), np.uint8)
                os.close(fd)
        except (EOFError, ConnectionResetError):
            process.join()
            raise WorkerLost(f"the {name} died with exit code {process.exitcode} in step {self.num_steps}") from None
        if reply is None:
            raise RuntimeError(f"in the {name}: {layout}")
        if not isinstance(reply, Step):
            return reply
        return reply._replace(parts=[[np.ndarray(shape, leaf.dtype, self.buffers[k], offset)]
                                     for leaf, (shape, offset) in zip(self.leaves, layout)])

    def state(self) -> list[dict]:
        """As Envs.state. The environments of a worker that is lost have none; the next step deals with it."""
        for k in range(len(self.workers)):
            self.ask(k, "state")
        states = []
        for k, worker in enumerate(self.workers):
            try:
                states += self.answer(k)
            except WorkerLost as error:
                say(error)
                states += [{"env": None, "rng": None} for _ in range(worker.envs.start, worker.envs.stop)]
        return states

    def restore(self, saved: tuple[int | None, int, list[dict]]) -> Step:
        self.seed, self.num_steps, states = saved
        for k, worker in enumerate(self.workers):
            self.ask(k, "restore", (self.seed, self.num_steps, states[worker.envs]))
        return self.receive_all()

    def close(self) -> None:
        for k in range(len(self.workers)):
            self.ask(k)
        for worker in self.workers:
            worker.process.join(timeout=5)
            worker.process.kill()


def element_groups(leaves: list[Leaf]) -> list[str]:
    """The groups whose rows can be chosen or have an id: the nodes of graphs, or the sets where there is no graph."""
    groups = dict.fromkeys(leaf.group for leaf in leaves if leaf.group and leaf.path.split(".")[0] not in NOT_INPUT)
    return [g for g in groups if g.endswith(".nodes")] or [g for g in groups if not g.endswith(".edge_links")]


def id_group(leaves: list[Leaf]) -> str | None:
    """The group whose rows `node_ids` names, None without ids. Raises ValueError if they do not fit the space."""
    ids = [leaf for leaf in leaves if leaf.path.split(".")[0] == "node_ids"]
    groups = [group for group in element_groups(leaves) if group != "avail_actions"]
    fits = [leaf.path == "node_ids" and leaf.group and leaf.shape == () and leaf.dtype.kind == "i" for leaf in ids]
    if ids and not (all(fits) and len(groups) == 1):
        raise ValueError(f"leaf 'node_ids': {ids[0].space} must be a Sequence of integers, one per row of the only "
                         f"graph or set; the graphs and sets are {groups}")
    return groups[0] if ids else None


def make_envs(makers: list[Callable[[], gym.Env]], args) -> Envs | WorkerEnvs:
    """Steps in this process or in --num-workers others. ValueError if --double-buffer has no two equal halves."""
    restart, num_lanes = args.on_env_error == "restart", 2 if args.double_buffer else 1
    if num_lanes == 2 and (args.num_workers < 2 or args.num_envs % 2):
        raise ValueError(f"--double-buffer needs at least 2 --num-workers, not {args.num_workers}, and an even "
                         f"--num-envs, not {args.num_envs}")
    if args.num_workers:
        return WorkerEnvs(makers, args.num_workers, args.action_head, restart, args.env_timeout, num_lanes)
    return Envs(makers, args.action_head, restart)


# --- end shared: environments ---


# --- shared: ragged observations ---
# ---- Ragged observations: flat storage of every step, minibatches by index arithmetic ----
class Ragged(NamedTuple):
    """Rows of B observations one after the other; observation b owns values[ptr[b]:ptr[b + 1]]. Nothing is padded.
    Node indices ("edge_links") are offset already, so that they index the rows of the batch, as in PyG's Batch."""

    values: Tensor  # [rows, ...]
    ptr: Tensor  # int64 [B + 1]
    batch: Tensor  # int64 [rows], the observation that a row belongs to


Obs = dict[str, Tensor | Ragged]  # leaf path -> [B, ...] (dense) or Ragged


def select_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows]. Where no gradient is needed numpy does it on the CPU, 2 to 5 times faster than index_select."""
    if values.requires_grad or values.device.type != "cpu":
        return values.index_select(0, rows)
    return torch.from_numpy(values.numpy().take(rows.numpy(), 0))


class Storage:
    """Observations of N envs, step by step: per leaf one flat tensor on `device` that doubles when full.

    `append` adds one step (one contiguous copy per leaf), `latest` is that step as a batch of views, `gather` any
    subset of all observations; observation t * N + i is that of step t and env i."""

    def __init__(self, leaves: list[Leaf], device: torch.device):
        self.leaves, self.device = leaves, device
        self.values = [torch.from_numpy(np.zeros((0, *leaf.shape), leaf.dtype)).to(device) for leaf in leaves]
        self.staging = [values.cpu() for values in self.values]  # pinned memory, used on CUDA
        self.num_rows = [0] * len(leaves)
        self.steps: list[dict[str | None, np.ndarray]] = []  # rows per observation, step by step
        self.clear()

    def clear(self, keep: int = 0) -> None:
        """Forgets all but the last `keep` steps. The memory stays allocated."""
        self.steps = self.steps[max(0, len(self.steps) - keep):]
        for k, leaf in enumerate(self.leaves):
            stop, num = self.num_rows[k], sum(int(step[leaf.group].sum()) for step in self.steps)
            self.values[k][:num] = self.values[k][stop - num:stop].clone()
            self.num_rows[k] = num
        self.num_kept, self.size = list(self.num_rows), sum(len(step[None]) for step in self.steps)
        self.index: dict[str | None, tuple] = {}  # of all steps: rows per observation and first row, made when needed

    @section("storage")
    def append(self, parts: list[list[np.ndarray]], counts: dict[str | None, np.ndarray]) -> None:
        """Adds the N observations of one step (see `Step`)."""
        for k, arrays in enumerate(parts):
            start, num = self.num_rows[k], sum(map(len, arrays))
            stop = self.num_rows[k] = start + num
            if stop > len(self.values[k]):
                grown = self.values[k].new_empty((2 * stop, *self.values[k].shape[1:]))
                grown[:start] = self.values[k][:start]
                self.values[k] = grown
            target = host = self.values[k][start:stop]
            if self.device.type == "cuda":
                if num > len(self.staging[k]):
                    self.staging[k] = torch.empty((2 * num, *target.shape[1:]), dtype=target.dtype, pin_memory=True)
                host = self.staging[k][:num]  # free again: the actions of the last step were waited for
            np.concatenate(arrays, out=host.numpy())
            if host is not target:
                target.copy_(host, non_blocking=True)
        self.steps.append(counts)
        self.size += len(counts[None])
        self.index = {}

    def latest(self) -> Obs:
        """The step that was appended last, as views."""
        num = {group: int(counts.sum()) for group, counts in self.steps[-1].items()}
        ends = zip(self.values, self.num_rows, self.leaves)
        return self.assemble([v[stop - num[leaf.group]:stop] for v, stop, leaf in ends], self.steps[-1])

    @section("gather")
    def gather(self, idx: np.ndarray) -> Obs:
        """The observations `idx` (int64 [B], any order, repeats allowed): one selection of rows per leaf."""
        if not self.index:
            for group in self.steps[0]:
                num = np.concatenate([step[group] for step in self.steps])
                self.index[group] = num, num.cumsum() - num
        counts = {group: num[idx] for group, (num, _) in self.index.items()}
        rows = {group: self.rows(first_row[idx], counts[group]) for group, (_, first_row) in self.index.items()}
        return self.assemble([select_rows(v, rows[leaf.group]) for v, leaf in zip(self.values, self.leaves)], counts)

    def rows(self, first_row: np.ndarray, counts: np.ndarray) -> Tensor:
        """The indices first_row[b], first_row[b] + 1, ... (counts[b] of them) for every b, on the device."""
        shift = self.repeat(first_row - (counts.cumsum() - counts), counts)
        return shift + torch.arange(len(shift), device=self.device)

    def assemble(self, values: list[Tensor], counts: dict[str, np.ndarray]) -> Obs:
        """Adds `ptr` and `batch` to the ragged leaves, and to the edges the index of their graph's first node."""
        ptr = {group: np.concatenate([[0], num.cumsum()]) for group, num in counts.items() if group is not None}
        views = {group: (self.to_device(ends), self.repeat(np.arange(len(ends) - 1), counts[group]))
                 for group, ends in ptr.items()}
        obs = {}
        for leaf, rows in zip(self.leaves, values):
            if leaf.kind == "links":
                first_node = ptr[leaf.path.removesuffix("edge_links") + "nodes"][:-1]
                rows = rows + self.repeat(first_node, counts[leaf.group])[:, None]
            obs[leaf.path] = Ragged(rows, *views[leaf.group]) if leaf.group else rows
        return obs

    def repeat(self, values: np.ndarray, counts: np.ndarray) -> Tensor:
        """values[b] counts[b] times, on the device; only [B] numbers are copied there."""
        if self.device.type == "cpu":
            return torch.from_numpy(values.repeat(counts))
        return torch.repeat_interleave(self.to_device(values), self.to_device(counts), output_size=int(counts.sum()))

    def to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    def stats(self) -> dict[str, float]:
        """Bytes per observation, the share that padding to the largest one would have wasted, rows per group."""
        stats, valid, padded = {}, 0, 0
        for leaf, num in zip(self.leaves, self.num_rows):
            row_bytes = leaf.dtype.itemsize * int(np.prod(leaf.shape))
            largest = max(int(step[leaf.group].max()) for step in self.steps)
            valid, padded = valid + num * row_bytes, padded + largest * self.size * row_bytes
            if leaf.group:
                stats[f"charts/rows/{leaf.group}"] = num / self.size
                if leaf.group.endswith(".nodes"):
                    stats.setdefault("charts/nodes_per_graph", num / self.size)
        return stats | {"charts/obs_bytes_per_step": valid / self.size,
                        "charts/padding_avoided": 1 - valid / padded if padded else 0.0}


# --- end shared: ragged observations ---


# --- shared: encoder ---
# ---- Encoder: one small network per leaf kind, concatenated ----
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(widths: list[int], activation: str) -> nn.Sequential:
    """Linear layers, each followed by the activation."""
    layers = [[layer_init(nn.Linear(i, o)), ACTIVATIONS[activation]()] for i, o in zip(widths, widths[1:])]
    return nn.Sequential(*sum(layers, []))


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sums of values[ptr[b]:ptr[b + 1]], [B, ...]; zero for an empty segment."""
    return torch.segment_reduce(values, "sum", offsets=ptr, axis=0, unsafe=True)


def segment_max(values: Tensor, ptr: Tensor) -> Tensor:
    """Maxima of values[ptr[b]:ptr[b + 1]], [B, ...]; zero for an empty segment."""
    empty = (ptr[1:] == ptr[:-1]).view(-1, *[1] * (values.dim() - 1))
    return torch.segment_reduce(values, "max", offsets=ptr, axis=0, unsafe=True).masked_fill(empty, 0.0)


class Rows(nn.Module):
    """Floats [rows, dim] of a leaf: vectors flat, categories one-hot (embedded where there are more than 64). With
    `norm_obs` Box vectors are normalised by mean and std of all rows that `observe` was given, and clipped to 10."""

    def __init__(self, leaf: Leaf, norm_obs: bool = False):
        super().__init__()
        self.axes, self.embedding, self.dim = len(leaf.shape), None, int(np.prod(leaf.shape))
        self.categorical = leaf.kind in ("discrete", "multidiscrete")
        if self.categorical:
            num = np.ravel(leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec)
            shift = num.cumsum() - num - np.ravel(leaf.space.start)
            self.register_buffer("shift", torch.as_tensor(shift), persistent=False)
            self.num = self.dim = int(num.sum())
            if self.num > 64:
                self.embedding, self.dim = nn.EmbeddingBag(self.num, 64, mode="sum"), 64
        self.norm_obs = norm_obs and isinstance(leaf.space, spaces.Box) and not self.categorical
        if self.norm_obs:
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(self.dim, dtype=torch.float64))
            self.register_buffer("var", torch.ones(self.dim, dtype=torch.float64))

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Adds the rows of all ranks to the running mean and variance (Chan et al. 1979, eq. 2.1)."""
        if not self.norm_obs:
            return
        values = values.reshape(-1, self.dim).double()
        num = values.new_full((1,), len(values))
        var, mean = torch.var_mean(values, 0, correction=0) if len(values) else (0 * self.var, 0 * self.mean)
        for moments in ranks.gather_tensor(torch.cat([num, mean, var])):
            num, (mean, var) = moments[0], moments[1:].view(2, -1)
            delta, total = mean - self.mean, (self.count + num).clamp(min=1)
            spread = self.var * self.count + var * num + delta**2 * self.count * num / total
            self.mean += delta * num / total
            self.var.copy_(torch.where(self.count + num > 0, spread / total, self.var))
            self.count += num

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(1) if self.axes else values[:, None]
        if self.norm_obs:
            return ((values.float() - self.mean.float()) / (self.var + 1e-8).sqrt().float()).clamp(-10, 10)
        if not self.categorical:
            return values.float()
        if self.embedding is not None:
            return self.embedding(values + self.shift)
        return torch.zeros(len(values), self.num, device=values.device).scatter_(1, values + self.shift, 1.0)


class CNN(nn.Module):
    """Features [rows, 512] of images CHW or HWC (the channel axis is the shorter one), or of `num_frames` of them
    [rows, num_frames, ...] as channels; uint8 is scaled to 0..1. The layers of Mnih et al. 2015 for images of at least
    36 x 36, two layers of 3 x 3 for smaller ones."""

    def __init__(self, leaf: Leaf, num_frames: int = 1):
        super().__init__()
        self.channels_last, self.dim = leaf.shape[2] < leaf.shape[0], 512
        self.scale = 1 / 255 if leaf.dtype == np.uint8 else 1.0
        c, h, w = (leaf.shape[2], *leaf.shape[:2]) if self.channels_last else leaf.shape
        c = c * num_frames
        spec = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if min(h, w) >= 36 else [(32, 3, 2), (64, 3, 1)]
        convs = [layer_init(nn.Conv2d(i, o, k, s)) for i, (o, k, s) in zip([c, *(o for o, _, _ in spec)], spec)]
        net = nn.Sequential(*sum([[conv, nn.ReLU()] for conv in convs], []), nn.Flatten())
        self.net = net.extend([layer_init(nn.Linear(net(torch.zeros(1, c, h, w)).shape[1], self.dim)), nn.ReLU()])

    def forward(self, images: Tensor) -> Tensor:
        images = images.movedim(-1, -3) if self.channels_last else images
        return self.net(images.flatten(1, -3).float() * self.scale)


def make_conv(kind: str, dim: int, edge_dim: int | None, aggr: str) -> nn.Module:
    """A PyG layer dim -> dim; any with forward(x, edge_index) or forward(x, edge_index, edge_attr) can stand here."""
    if kind == "gine":
        net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        return pyg.GINEConv(net, edge_dim=edge_dim, aggr=aggr) if edge_dim else pyg.GINConv(net, aggr=aggr)
    if kind == "gatv2":
        return pyg.GATv2Conv(dim, dim // 4, heads=4, edge_dim=edge_dim)
    if kind == "transformer":
        return pyg.TransformerConv(dim, dim // 4, heads=4, edge_dim=edge_dim)
    return pyg.SAGEConv(dim, dim, aggr=aggr)


class GNN(nn.Module):
    """Node embeddings [nodes, dim] of a batch of graphs in PyG's convention: residual layers on normalised inputs."""

    def __init__(self, node_dim: int, edge_dim: int | None, args):
        super().__init__()
        self.embed, layers = nn.Linear(node_dim, args.gnn_dim), range(args.gnn_layers)
        self.convs = nn.ModuleList(make_conv(args.gnn, args.gnn_dim, edge_dim, args.gnn_aggr) for _ in layers)
        self.norms = nn.ModuleList(nn.LayerNorm(args.gnn_dim) for _ in layers)
        self.takes_edge_attr = ["edge_attr" in inspect.signature(conv.forward).parameters for conv in self.convs]

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        for conv, norm, takes_edge_attr in zip(self.convs, self.norms, self.takes_edge_attr):
            edges = (edge_index, edge_attr) if takes_edge_attr else (edge_index,)
            h = h + conv(norm(h), *edges).relu()
        return h


class Encoder(nn.Module):
    """Observation -> (features [B, dim], elements {group: [rows, gnn_dim]}).

    Dense leaves enter `features` as they are (images through a CNN); graphs go through a GNN and sets through an MLP
    per row, followed by a readout. `action_mask` and `node_ids` are not inputs."""

    def __init__(self, leaves: list[Leaf], args):
        super().__init__()
        leaves = [leaf for leaf in leaves if leaf.path not in NOT_INPUT]
        rows = {leaf.path: CNN(leaf) if leaf.kind == "image" else Rows(leaf, args.norm_obs) for leaf in leaves
                if leaf.kind != "links"}
        self.rows = nn.ModuleDict({key(path): row for path, row in rows.items()})
        self.fill = {leaf.path: getattr(leaf.space, "start", 0) for leaf in leaves}  # a value that each leaf can have
        self.dense = [leaf.path for leaf in leaves if leaf.group is None]
        links = [leaf.path for leaf in leaves if leaf.kind == "links"]
        self.links = {path.removesuffix("edge_links") + "nodes": path for path in links}
        self.edges = {nodes: path for nodes in self.links if (path := nodes.removesuffix("nodes") + "edges") in rows}
        self.groups = {}  # nodes of a graph, or a set -> its leaves
        for leaf in leaves:
            if leaf.group is not None and leaf.group not in self.links.values():
                self.groups.setdefault(leaf.group, []).append(leaf.path)
        self.nets = nn.ModuleDict()
        for group, paths in self.groups.items():
            dim = sum(rows[path].dim for path in paths)
            edge_dim = rows[self.edges[group]].dim if group in self.edges else None
            self.nets[key(group)] = (GNN(dim, edge_dim, args) if group in self.links else
                                     mlp([dim, args.gnn_dim, args.gnn_dim], args.activation))
        self.readout, self.element_dim = args.readout, args.gnn_dim
        readout_dim = args.gnn_dim * (2 if args.readout == "meanmax" else 1) + 1
        self.dim = sum(rows[path].dim for path in self.dense) + readout_dim * len(self.groups)

    def forward(self, obs: Obs) -> tuple[Tensor, dict[str, Tensor]]:
        features, elements = [self.rows[key(path)](obs[path]) for path in self.dense], {}
        for group, paths in self.groups.items():
            x = torch.cat([self.rows[key(path)](obs[path].values) for path in paths], 1)
            graph = [obs[self.links[group]].values.t().contiguous()] if group in self.links else []
            if group in self.edges:
                graph.append(self.rows[key(self.edges[group])](obs[self.edges[group]].values))
            elements[group] = self.nets[key(group)](x, *graph)
            features.append(self.pool(elements[group], obs[paths[0]].ptr))
        return torch.cat(features, 1), elements

    def observe(self, storage: Storage) -> None:
        """Adds the rows that came to `storage` since it was cleared to the statistics of --norm-obs."""
        for leaf, values, start, stop in zip(storage.leaves, storage.values, storage.num_kept, storage.num_rows):
            if key(leaf.path) in self.rows and leaf.kind != "image":
                self.rows[key(leaf.path)].observe(values[start:stop])

    def pool(self, rows: Tensor, ptr: Tensor) -> Tensor:
        """[B, readout_dim]; the last column is log(1 + number of rows)."""
        num = (ptr[1:] - ptr[:-1])[:, None].float()
        parts = [num.log1p()]
        if self.readout in ("max", "meanmax"):
            parts.insert(0, segment_max(rows, ptr))
        if self.readout != "max":
            parts.insert(0, segment_sum(rows, ptr) / (1 if self.readout == "sum" else num.clamp(min=1)))
        return torch.cat(parts, 1)


MAX_SHAPES = 64  # that a network is compiled for; batches of other shapes run as they are


def bucket(num: int) -> int:
    """`num` rounded up to a multiple of 1/8 of the power of two below it."""
    step = 1 << max(0, num.bit_length() - 4)
    return -(-num // step) * step


def num_rows(leaf: Tensor | Ragged) -> int:
    return len(leaf.values if isinstance(leaf, Ragged) else leaf)


def num_observations(obs: Obs) -> int:
    leaf = next(iter(obs.values()))
    return len(leaf.ptr) - 1 if isinstance(leaf, Ragged) else len(leaf)


def fill_up(obs: Obs, fill: dict[str, Any]) -> Obs:
    """The leaves `fill` of the observations with as many more as make their number, and the rows of each leaf, fill a
    bucket. The first of these observations owns all spare rows, which hold fill[path]; spare edges join its first node
    to itself."""
    num, filled = num_observations(obs), {}
    more = bucket(num + 1) - num
    for path, value in fill.items():
        leaf, ragged = obs[path], isinstance(obs[path], Ragged)
        if path.endswith("edge_links"):
            value = num_rows(obs[path.removesuffix("edge_links") + "nodes"])
        values = leaf.values if ragged else leaf
        spare = bucket(len(values) + 1) - len(values) if ragged else more
        row = torch.as_tensor(value, dtype=values.dtype, device=values.device).expand(spare, *values.shape[1:])
        filled[path] = values = torch.cat([values, row])
        if ragged:
            ends, owner = leaf.ptr.new_full((more,), len(values)), leaf.batch.new_full((spare,), num)
            filled[path] = Ragged(values, torch.cat([leaf.ptr, ends]), torch.cat([leaf.batch, owner]))
    return filled


class Compiled:
    """Stands for the forward of an encoder, or of a network of rows [B, dim], and compiles it for few sizes."""

    def __init__(self, module: nn.Module, mode: str):
        torch._dynamo.config.recompile_limit = 4 * MAX_SHAPES
        self.module, self.eager = module, module.forward
        self.compiled = torch.compile(self.eager, dynamic=False, mode=None if mode == "default" else mode)
        self.shapes, self.valid, self.filled = set(), 0, 0  # seen; rows that came in, and with the spare ones

    def __call__(self, inputs: Obs | Tensor):
        if isinstance(self.module, Encoder):
            filled = fill_up(inputs, self.module.fill)
            before, after = [num_rows(inputs[path]) for path in filled], [num_rows(leaf) for leaf in filled.values()]
        else:
            filled = F.pad(inputs, (0, 0, 0, bucket(len(inputs)) - len(inputs)))
            before, after = [len(inputs)], [len(filled)]
        shape = (*after, torch.is_grad_enabled())
        if shape not in self.shapes and len(self.shapes) == MAX_SHAPES:
            return self.eager(inputs)
        self.shapes.add(shape)
        self.valid, self.filled = self.valid + sum(before), self.filled + sum(after)
        result = self.compiled(filled)  # copied below: the memory of a captured graph is used again
        if not isinstance(self.module, Encoder):
            return result[:len(inputs)].clone()
        features, elements = result
        return features[:num_observations(inputs)].clone(), {
            group: rows[:num_rows(inputs[self.module.groups[group][0]])].clone() for group, rows in elements.items()}


def compile_networks(agent: nn.Module, mode: str) -> list[Compiled]:
    """Compiles encoder, actor and critic in place."""
    networks = [agent.encoder, agent.actor, agent.critic] if mode != "no" else []
    networks = [module for module in networks if any(True for _ in module.parameters())]
    for module in networks:
        module.forward = Compiled(module, mode)
    return [module.forward for module in networks]


def compile_stats(networks: list[Compiled]) -> dict[str, float]:
    """What is logged of networks that were compiled."""
    if not networks:
        return {}
    spare = 1 - sum(network.valid for network in networks) / sum(network.filled for network in networks)
    return {"charts/compilations": sum(len(network.shapes) for network in networks), "charts/spare_rows": spare}


def key(path: str) -> str:
    """A module name for a leaf path (module names must hold no dots and not be those of module attributes)."""
    return "leaf/" + path.replace(".", "/")


# --- end shared: encoder ---


# ---- Memory: views on past steps, each stored once ----
def parse_shifts(text: str, newest: int, flag: str) -> np.ndarray:
    """"-3:0" -> [-3, -2, -1, 0], "-8,-4,0" -> [-8, -4, 0], "" -> []. ValueError for shifts beyond `newest`."""
    bounds = text.split(":")
    try:
        shifts = (range(int(bounds[0]), int(bounds[1]) + 1) if len(bounds) == 2 else
                  [int(shift) for shift in text.split(",") if text])
    except ValueError:
        raise ValueError(f"{flag} '{text}': a range such as -15:0 or a list such as -8,-4,0 is needed") from None
    shifts = np.array(sorted(set(shifts)), np.int64)
    if (shifts > newest).any() or (text and not len(shifts)):
        raise ValueError(f"{flag} '{text}' must not be empty, and none may be larger than {newest}")
    return shifts


def pop_step(storage: Storage) -> None:
    """Forgets the step that was appended last."""
    counts = storage.steps.pop()
    storage.num_rows = [num - int(counts[leaf.group].sum()) for num, leaf in zip(storage.num_rows, storage.leaves)]
    storage.size, storage.index = storage.size - len(counts[None]), {}


def last_steps(storage: Storage, num: int) -> list[tuple[list[list[np.ndarray]], dict[str | None, np.ndarray]]]:
    """(parts, counts) of the last `num` steps or of all that there are, as `Storage.append` takes them."""
    steps, stops = [], storage.num_rows
    for counts in storage.steps[::-1][:num]:
        starts = [stop - int(counts[leaf.group].sum()) for stop, leaf in zip(stops, storage.leaves)]
        steps.insert(0, ([[v[a:b].cpu().numpy()] for v, a, b in zip(storage.values, starts, stops)], counts))
        stops = starts
    return steps


class Memory:
    """The steps of N envs, each stored once. Step t of env i has index t * N + i; a lane of envs is appended at a time.

    View s of step t reads step t + s of the same episode, zeros if there is none. `tables` hold what views read, row
    1 + index: the encoded observation, the embedded action, the reward; row 0 is zero. As many steps as the views
    reach back are kept when a rollout begins; they are encoded again by the new weights."""

    def __init__(self, agent: nn.Module, leaves: list[Leaf], num_envs: int, args, device: torch.device, num_lanes: int):
        self.agent, self.num_envs, self.num_lanes = agent, num_envs, num_lanes
        self.storage = Storage(leaves, device)
        self.lane_size, self.newest = num_envs // self.num_lanes, [slice(0, 0)] * self.num_lanes  # steps of each lane
        self.depth = max(-int(shifts.min(initial=0)) for shifts in agent.shifts.values())
        self.capacity = (self.depth + args.num_steps) * num_envs
        self.age = np.zeros(self.capacity, np.int64)  # steps since the first one of the episode
        self.actions = torch.zeros(self.capacity, agent.num_columns, dtype=agent.head.dtype, device=device)
        dims = agent.view_dims.items()
        self.tables = {name: torch.zeros(1 + self.capacity, dim, device=device) for name, dim in dims}

    def begin(self) -> None:
        """Forgets what no view reaches any more and encodes the rest by the current weights."""
        old = self.storage.size
        self.storage.clear(keep=self.depth * self.num_lanes)
        size = self.storage.size
        starts = [size - self.num_envs + lane * self.lane_size for lane in range(self.num_lanes)]
        self.newest = [slice(max(0, start), max(0, start + self.lane_size)) for start in starts]
        if size:
            self.age[:size] = self.age[old - size:old].copy()
            for values in (self.actions, self.tables["rewards"][1:]):
                values[:size] = values[old - size:old].clone()
            obs = self.storage.gather(np.arange(size))
            self.tables["obs"][1:1 + size], elements = self.agent.encode(obs)
            self.tables["actions"][1:1 + size] = self.agent.embed(self.actions[:size], elements, obs)

    def append(self, step: Step, lane: int = 0) -> None:
        """Adds the newest observations of a lane, and the rewards of the actions that led to them."""
        old, new, last = self.storage.size, self.storage.size + self.lane_size, self.newest[lane]
        self.reward(step, lane)
        before = self.age[last] if last.stop else np.full(self.lane_size, -1)
        self.age[old:new] = np.where(step.terminated | step.truncated, 0, before + 1)
        self.newest[lane] = slice(old, new)
        self.storage.append(step.parts, step.counts)
        self.obs = self.storage.latest()
        self.tables["obs"][1 + old:1 + new], self.elements = self.agent.encode(self.obs)

    def reward(self, step: Step, lane: int) -> None:
        """Notes what the newest actions earned."""
        if self.newest[lane].stop:
            self.tables["rewards"][1:][self.newest[lane], 0] = self.storage.to_device(step.reward)

    def latest(self, lane: int = 0) -> Tensor:
        """The views of the newest steps of a lane, [N, dim]."""
        idx = np.arange(self.newest[lane].start, self.newest[lane].stop)
        return self.views(rows := self.rows(idx, self.age[idx]), self.tables, rows["obs"])

    def act(self, greedy: bool = False, lane: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(action [N, columns], log_prob [N], value [N]) for the observations that were appended last."""
        action, log_prob, _, value = self.agent(self.latest(lane), self.elements, self.obs, None, greedy)
        newest = self.newest[lane]
        self.actions[newest] = action
        self.tables["actions"][1:][newest] = self.agent.embed(action, self.elements, self.obs)
        return action, log_prob, value

    def value(self, step: Step, parts: list, counts: dict, envs: np.ndarray, lane: int) -> Tensor:
        """V [B] of the observations that the newest actions of `envs` led to, which are not kept."""
        self.reward(step, lane)
        size, idx = self.storage.size, self.newest[lane].start + envs
        self.storage.append(parts, counts)
        features, _ = self.agent.encode(self.storage.latest())
        rows = self.rows(idx + self.num_envs, self.age[idx] + 1)
        rows["obs"][:, self.agent.shifts["obs"] == 0] = 1 + size + np.arange(len(idx))[:, None]
        tables = self.tables | {"obs": torch.cat([self.tables["obs"][:1 + size], features])}
        inputs = self.views(rows, tables, rows["obs"])
        pop_step(self.storage)
        return self.agent.critic(inputs).squeeze(1)

    def minibatch(self, idx: np.ndarray) -> tuple[Tensor, dict[str, Tensor], Obs]:
        """(views [B, dim], elements, observations) of the steps `idx`. An encoder that learns encodes every step that
        a view reads once, however many views read it."""
        rows, obs, elements = self.rows(idx, self.age[idx]), self.storage.gather(idx), {}
        tables, frames = dict(self.tables), rows["obs"]
        if self.agent.encoder_learns:
            choice = self.agent.head.group is not None  # then actions are embedded by the encoder, too
            read = np.zeros(1 + self.storage.size, bool)
            for name in ("obs", "actions") if choice else ("obs",):
                read[rows[name]] = True
            read[1 + idx] |= choice
            read[0] = False
            where, steps = read.cumsum() * read, read.nonzero()[0] - 1  # row of the old table -> row of the new one
            encoded = self.storage.gather(steps)
            features, all_elements = self.agent.encode(encoded)
            tables["obs"], rows["obs"] = F.pad(features, (0, 0, 1, 0)), where[rows["obs"]]
            if choice:
                actions = self.agent.embed(self.actions[self.storage.to_device(steps)], all_elements, encoded)
                tables["actions"], rows["actions"] = F.pad(actions, (0, 0, 1, 0)), where[rows["actions"]]
                num = self.storage.index[self.agent.head.group][0][steps]
                of_batch = where[1 + idx] - 1
                chosen_from = self.storage.rows((num.cumsum() - num)[of_batch], num[of_batch])
                elements = {self.agent.head.group: all_elements[self.agent.head.group].index_select(0, chosen_from)}
        return self.views(rows, tables, frames), elements, obs

    def state(self) -> dict:
        """What the views of the next steps will read."""
        stop = self.storage.size
        kept = slice(max(0, stop - self.depth * self.num_envs), stop)
        return {"steps": last_steps(self.storage, self.depth * self.num_lanes), "age": self.age[kept],
                "actions": self.actions[kept], "rewards": self.tables["rewards"][1:][kept]}

    def restore(self, state: dict) -> None:
        for parts, counts in state["steps"]:
            self.storage.append(parts, counts)
        size = self.storage.size
        self.age[:size] = state["age"]
        self.actions[:size], self.tables["rewards"][1:1 + size] = state["actions"], state["rewards"]

    def rows(self, idx: np.ndarray, age: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of the tables that the views of the steps `idx` read, [B, shifts]; 0 before the episode."""
        return {name: np.where(age[:, None] >= -shifts, idx[:, None] + shifts * self.num_envs + 1, 0)
                for name, shifts in self.agent.shifts.items()}

    def views(self, rows: dict[str, np.ndarray], tables: dict[str, Tensor], frames: np.ndarray) -> Tensor:
        """All views side by side, [B, dim]; `frames` [B, shifts] are the rows of images that enter as channels."""
        views = [select_rows(tables[name], self.storage.to_device(r.ravel())).view(len(r), -1)
                 for name, r in rows.items()]
        for k, leaf in enumerate(self.storage.leaves):
            if key(leaf.path) in self.agent.cnns:
                views.append(self.agent.cnns[key(leaf.path)](self.images(k, frames)))
        return torch.cat(views, 1)

    def images(self, k: int, frames: np.ndarray) -> Tensor:
        """The views of leaf k, [B, shifts, ...], from the one copy of each image."""
        images = select_rows(self.storage.values[k], self.storage.to_device(np.maximum(frames.ravel() - 1, 0)))
        missing = np.flatnonzero(frames == 0)
        if images.device.type == "cpu":
            images.numpy()[missing] = 0  # index_fill_ is 50 times slower there
        else:
            images.index_fill_(0, self.storage.to_device(missing), 0)
        return images.view(*frames.shape, *images.shape[1:])


# --- shared: action heads ---
# ---- Action heads: sample, log-probability and entropy over any action space, [B, columns] ----
class Categorical:
    """One of n options; logits [B, n], mask (nonzero = allowed) [B, n] or None."""

    def __init__(self, logits: Tensor, mask: Tensor | None):
        self.log_probs = (logits if mask is None else logits.masked_fill(mask == 0, -torch.inf)).log_softmax(-1)

    def sample(self, greedy: bool) -> Tensor:
        return (self.log_probs if greedy else self.log_probs + gumbel_like(self.log_probs)).argmax(-1, keepdim=True)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs.clamp(min=LOWEST)).sum(-1)


class RaggedCategorical:
    """One of the rows of each observation; logits [rows], mask (nonzero = allowed) [rows] or None."""

    def __init__(self, logits: Tensor, mask: Tensor | None, rows: Ragged):
        self.ptr, self.batch = rows.ptr, rows.batch
        logits = logits if mask is None else logits.masked_fill(mask == 0, -torch.inf)
        logits = logits - segment_max(logits.detach(), self.ptr)[self.batch]
        self.log_probs = logits - segment_sum(logits.exp(), self.ptr).log()[self.batch]

    def sample(self, greedy: bool) -> Tensor:
        score = self.log_probs if greedy else self.log_probs + gumbel_like(self.log_probs)
        best = score == segment_max(score, self.ptr)[self.batch]
        local = torch.arange(len(score), device=score.device) - self.ptr[self.batch]
        return segment_max(torch.where(best, local, 0).double(), self.ptr).long()[:, None]

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs[self.ptr[:-1] + action.squeeze(1)]

    def entropy(self) -> Tensor:
        return -segment_sum(self.log_probs.exp() * self.log_probs.clamp(min=LOWEST), self.ptr)


class Independent:
    """Independent variables of one torch distribution, [B, n]."""

    def __init__(self, dist: torch.distributions.Distribution):
        self.dist = dist

    def sample(self, greedy: bool) -> Tensor:
        mode = self.dist.mean.round() if self.dist.support.is_discrete else self.dist.mean
        return mode if greedy else self.dist.sample()

    def log_prob(self, action: Tensor) -> Tensor:
        return self.dist.log_prob(action.float()).sum(-1)

    def entropy(self) -> Tensor:
        return self.dist.entropy().sum(-1)


LOWEST = torch.finfo(torch.float32).min  # finite, so that a masked entry adds exactly 0 to an entropy


def gumbel_like(log_probs: Tensor) -> Tensor:
    """Gumbel noise: the argmax of log_probs + noise is a sample."""
    return -torch.empty_like(log_probs).exponential_().log()


class Part(NamedTuple):
    """One factor of the action: `kind` is "categorical", "choice" (a row of the observation), "bits" or "normal"."""

    kind: str
    size: int  # options, bits or dimensions
    columns: slice  # of the action [B, columns]
    mask: slice  # of a dense action_mask [B, entries]


def parts_of(space: gym.Space, choice: bool) -> list[Part]:
    """The factors of an action space, in order. Raises TypeError for a space with no rule, naming it."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        kinds = [part[:2] for child in (space.values() if isinstance(space, spaces.Dict) else space)
                 for part in parts_of(child, choice)]
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = [space.n] if isinstance(space, spaces.Discrete) else space.nvec.ravel()
        kinds = [("choice" if choice else "categorical", int(n)) for n in sizes]
    elif isinstance(space, spaces.MultiBinary) or isinstance(space, spaces.Box) and space.dtype.kind == "f":
        kinds = [("normal" if isinstance(space, spaces.Box) else "bits", int(np.prod(space.shape)))]
    else:
        raise TypeError(f"action space {space} is not supported (Discrete, MultiDiscrete, MultiBinary, float Box, and "
                        "Dict or Tuple of these are)")
    parts, column, entry = [], 0, 0
    for kind, size in kinds:
        width = size if kind in ("bits", "normal") else 1
        entries = size if kind == "categorical" else 0
        parts.append(Part(kind, size, slice(column, column + width), slice(entry, entry + entries)))
        column, entry = column + width, entry + entries
    return parts


def to_env_actions(space: gym.Space, columns: Iterator[np.ndarray]) -> list:
    """Elements of `space` from the columns of actions, each [B]; Box actions are clipped to the bounds."""
    if isinstance(space, spaces.Tuple):
        return list(zip(*[to_env_actions(child, columns) for child in space]))
    if isinstance(space, spaces.Dict):
        children = [to_env_actions(child, columns) for child in space.values()]
        return [dict(zip(space.keys(), row)) for row in zip(*children)]
    if isinstance(space, spaces.Discrete):
        return (next(columns).astype(np.int64) + space.start).tolist()
    rows = np.stack([next(columns) for _ in range(int(np.prod(space.shape)))], 1).reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        rows = rows.clip(space.low, space.high)
    return list(rows.astype(space.dtype) + (space.start if isinstance(space, spaces.MultiDiscrete) else 0))


def choice_group(space: gym.Space, leaves: list[Leaf], head: str) -> str | None:
    """The group whose rows the actions choose from, or None where they index a fixed list of options. Raises ValueError
    if the action head or the action mask does not fit the spaces."""
    parts, masks = parts_of(space, choice=False), [leaf for leaf in leaves if leaf.path.split(".")[0] == "action_mask"]
    groups = list(dict.fromkeys(leaf.group for leaf in leaves if leaf.group and leaf not in masks))
    discrete = all(part.kind == "categorical" for part in parts)
    if head == "auto":
        head = ("flat" if not discrete else "avail_actions" if "avail_actions" in groups else
                "nodes" if masks and masks[0].group else "flat")
    avail = [group for group in groups if group == "avail_actions"]
    found = {"flat": [None], "nodes": element_groups(leaves), "avail_actions": avail}[head]
    if len(found) != 1 or (head != "flat" and not discrete):
        raise ValueError(f"--action-head {head} needs Discrete actions and exactly one graph or set to choose from; "
                         f"the action space is {space}, the ragged leaves are {groups}")
    for mask in masks:
        num_options, dense = parts[-1].mask.stop, int(np.prod(mask.shape))
        fits = dense == num_options if head == "flat" else mask.shape in ((), (len(parts),))
        if mask.path != "action_mask" or (mask.group is None) != (head == "flat") or not fits:
            wanted = (f"of {num_options} options" if head == "flat" else
                      f"that is a Sequence with one row, of shape () or ({len(parts)},), per row of '{found[0]}'")
            raise ValueError(f"leaf 'action_mask': {mask.space} where --action-head {head} needs a mask {wanted}")
    return found[0]


class ActionHead(nn.Module):
    """The policy's distribution over any action space, from the actor's latent [B, dim] and the elements' embeddings.

    A "choice" scores element e with w . tanh(W e + U latent), so the cost is one row per element. With `autoregressive`
    the latent of a part holds the embeddings of the parts before it, p(a) = p(a_1) p(a_2 | a_1) ..., and the entropy is
    the sum of the conditional entropies along the given action (its expectation is the entropy of p)."""

    def __init__(self, space: gym.Space, leaves: list[Leaf], dim: int, element_dim: int, args):
        super().__init__()
        self.group = choice_group(space, leaves, args.action_head)
        self.rows = next((leaf.path for leaf in leaves if leaf.group and leaf.group == self.group), None)
        self.parts = parts_of(space, choice=self.group is not None)
        self.dtype = torch.float32 if any(part.kind == "normal" for part in self.parts) else torch.int64
        self.heads, self.choices, self.conditions = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.log_stds = nn.ParameterDict()
        for k, (kind, size, _, _) in enumerate(self.parts):
            width = element_dim if kind == "choice" else size
            if kind == "normal" and not args.state_dependent_std:
                self.log_stds[str(k)] = nn.Parameter(torch.zeros(size))
            elif kind == "normal":
                width *= 2
            self.heads[str(k)] = layer_init(nn.Linear(dim, width), 1.0 if kind == "choice" else 0.01)
            if kind == "choice":
                score = layer_init(nn.Linear(element_dim, 1), 0.01)
                self.choices[str(k)] = nn.ModuleList([nn.Linear(element_dim, element_dim), score])
            if args.autoregressive and k + 1 < len(self.parts):
                self.conditions[str(k)] = nn.Linear(element_dim if kind == "choice" else size, dim)

    def forward(self, latent: Tensor, elements: dict[str, Tensor], obs: Obs, action: Tensor | None = None,
                greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(action [B, columns], log_prob [B], entropy [B]) of the given action, or of a sample, or of the mode."""
        log_prob, entropy, columns = 0.0, 0.0, []
        for k, part in enumerate(self.parts):
            dist = self.distribution(k, latent, elements, obs)
            a = dist.sample(greedy) if action is None else action[:, part.columns]
            a = a if part.kind == "normal" else a.long()
            log_prob, entropy = log_prob + dist.log_prob(a), entropy + dist.entropy()
            columns.append(a.to(self.dtype))
            if str(k) in self.conditions:
                latent = torch.tanh(latent + self.conditions[str(k)](self.embed(part, a, elements, obs)))
        return torch.cat(columns, 1), log_prob, entropy

    def distribution(self, k: int, latent: Tensor, elements: dict[str, Tensor], obs: Obs):
        part, mask, out = self.parts[k], obs.get("action_mask"), self.heads[str(k)](latent)
        if part.kind == "categorical":
            return Categorical(out, None if mask is None else mask.flatten(1)[:, part.mask])
        if part.kind == "bits":
            return Independent(torch.distributions.Bernoulli(logits=out, validate_args=False))
        if part.kind == "normal":
            mean, log_std = (out, self.log_stds[str(k)].expand_as(out)) if str(k) in self.log_stds else out.chunk(2, 1)
            return Independent(torch.distributions.Normal(mean, log_std.exp(), validate_args=False))
        rows, (project, score) = obs[self.rows], self.choices[str(k)]
        logits = score(torch.tanh(project(elements[self.group]) + out[rows.batch])).squeeze(1)
        mask = mask if mask is None or mask.values.dim() == 1 else mask._replace(values=mask.values[:, k])
        return RaggedCategorical(logits, None if mask is None else mask.values, rows)

    def embed(self, part: Part, action: Tensor, elements: dict[str, Tensor], obs: Obs) -> Tensor:
        """What the later parts of an autoregressive action see of this one, [B, ...]."""
        if part.kind == "choice":
            return elements[self.group][obs[self.rows].ptr[:-1] + action.squeeze(1)]
        return F.one_hot(action.squeeze(1), part.size).float() if part.kind == "categorical" else action.float()


# --- end shared: action heads ---


# ---- Agent: the networks, and what plays with them ----
class Agent(nn.Module):
    """Actor and critic: an MLP each on the views of encoded steps, and the action head."""

    def __init__(self, leaves: list[Leaf], action_space: gym.Space, args):
        super().__init__()
        self.shifts = {"obs": parse_shifts(args.obs_shifts, 0, "--obs-shifts"),
                       "actions": parse_shifts(args.action_shifts, -1, "--action-shifts"),
                       "rewards": parse_shifts(args.reward_shifts, -1, "--reward-shifts")}
        num_frames = len(self.shifts["obs"])
        if not any(map(len, self.shifts.values())):
            raise ValueError("--obs-shifts, --action-shifts and --reward-shifts are all empty: the policy sees nothing")
        images = [leaf for leaf in leaves if leaf.kind == "image" and not leaf.group and args.image_views == "channels"]
        self.cnns = nn.ModuleDict({key(leaf.path): CNN(leaf, num_frames) for leaf in images if num_frames})
        self.encoder = Encoder([leaf for leaf in leaves if leaf not in images], args)
        parts = parts_of(action_space, choice_group(action_space, leaves, args.action_head) is not None)
        action_dim = sum(args.gnn_dim if part.kind == "choice" else part.size for part in parts)
        self.view_dims = {"obs": self.encoder.dim, "actions": action_dim, "rewards": 1}
        self.num_columns = parts[-1].columns.stop
        dim = sum(len(shifts) * self.view_dims[name] for name, shifts in self.shifts.items())
        widths = [dim + sum(cnn.dim for cnn in self.cnns.values()), *args.hidden_dims]
        self.actor = mlp(widths, args.activation)
        self.critic = mlp(widths, args.activation).append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        self.head = ActionHead(action_space, leaves, widths[-1], self.encoder.element_dim, args)
        self.encoder_learns = any(True for _ in self.encoder.parameters())

    def encode(self, obs: Obs) -> tuple[Tensor, dict[str, Tensor]]:
        """What views read of each observation, [B, dim], and the elements of graphs and sets."""
        if self.encoder.dim:
            return self.encoder(obs)
        values = next(iter(obs.values()))  # only images, and these enter as channels
        return torch.zeros(len(values), 0, device=values.device), {}

    def embed(self, action: Tensor, elements: dict[str, Tensor], obs: Obs) -> Tensor:
        """What views read of each action, [B, dim]: one-hot, numbers as they are, or the element that was chosen."""
        columns = [action[:, part.columns] for part in self.head.parts]
        return torch.cat([self.head.embed(part, column if part.kind == "normal" else column.long(), elements, obs)
                          for part, column in zip(self.head.parts, columns)], 1)

    def forward(self, views: Tensor, elements: dict[str, Tensor], obs: Obs, action: Tensor | None = None,
                greedy: bool = False):
        """(action [B, columns], log_prob [B], entropy [B], value [B])"""
        action, log_prob, entropy = self.head(self.actor(views), elements, obs, action, greedy)
        return action, log_prob, entropy, self.critic(views).squeeze(1)


class Actor:
    """The agent in N envs: the memory, and the actor's and critic's part in it.

    `begin` starts a rollout, `act` and `value` collect it, `minibatches` yields what `ppo_loss` reads of it; `state`
    and `restore` are for checkpoints."""

    def __init__(self, agent: Agent, leaves: list[Leaf], num_envs: int, args, device: torch.device, num_lanes: int = 1):
        self.memory = Memory(agent, leaves, num_envs, args, device, num_lanes)
        self.storage, self.begin = self.memory.storage, self.memory.begin
        self.state, self.restore = self.memory.state, self.memory.restore

    def act(self, step: Step, greedy: bool = False, lane: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """(action [N, columns], log_prob [N], value [N], what else the loss needs) for the observations of `step`, of
        all environments or of those of one lane."""
        self.memory.append(step, lane)
        return *self.memory.act(greedy, lane), {}

    def value(self, step: Step, parts: list, counts: dict, envs: np.ndarray, lane: int = 0) -> Tensor:
        """V [B] of the observations (`parts`, `counts`) to which the last actions of `envs` of the lane led."""
        return self.memory.value(step, parts, counts, envs, lane)

    def minibatches(self, rollout: "Rollout", rng: np.random.Generator, args) -> Iterator[tuple[tuple, "Rollout"]]:
        """(arguments of the agent before the action, rows of the rollout) of random steps, each step once."""
        start = self.storage.size - args.batch_size  # index of the rollout's first step
        for idx in np.array_split(rng.permutation(args.batch_size), args.num_minibatches):
            yield self.memory.minibatch(start + idx), rollout.select(self.storage.to_device(idx))


def check_flags(args) -> None:
    """ValueError for flags that do not go together."""
    if args.num_minibatches > args.batch_size:
        raise ValueError(f"--num-minibatches {args.num_minibatches} exceeds the {args.batch_size} steps of a rollout")


# --- shared: loss ---
# ---- Loss, and what changes while the training goes on ----
@section("forward")
def ppo_loss(agent: Agent, inputs: tuple, batch: "Rollout", args) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9) and what is logged of it."""
    _, log_prob, entropy, value, *_ = agent(*inputs, action=batch.actions)
    logratio = log_prob - batch.log_probs
    ratio = logratio.exp()
    advantages = batch.advantages
    if args.norm_adv and len(advantages) > 1:
        mean, std = advantages.mean(), advantages.std()
        if args.norm_adv_global:
            num = len(advantages) * ranks.size
            mean = ranks.mean(mean)
            std = (ranks.mean(((advantages - mean) ** 2).mean()) * num / (num - 1)).sqrt()
        advantages = (advantages - mean) / (std + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()
    value_error = (value - batch.returns) ** 2
    if args.clip_vloss:
        clipped = batch.values + (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.max(value_error, (clipped - batch.returns) ** 2)
    value_loss = 0.5 * value_error.mean()
    entropy_loss = entropy.mean()
    loss = policy_loss - args.ent_coef * entropy_loss + args.vf_coef * value_loss
    with torch.no_grad():
        logs = {"losses/value_loss": value_loss, "losses/policy_loss": policy_loss, "losses/entropy": entropy_loss,
                "losses/old_approx_kl": (-logratio).mean(), "losses/approx_kl": ((ratio - 1) - logratio).mean(),
                "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
                "debug/collection_mismatch": (ratio - 1).abs().max()}
    return loss, {name: value.detach() for name, value in logs.items()}


def anneal(optimizer, actor: Actor, progress: float, args) -> None:
    """Called before each rollout: sets what depends on `progress`, the share of the training that is over."""
    if args.anneal_lr:
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - progress)


# --- end shared: loss ---


# --- shared: ranks ---
# ---- Ranks: the processes of torchrun ----
class Ranks:
    """The processes that torchrun started, each with its own environments; without torchrun one that is alone."""

    rank, local, size = (int(os.environ.get(name, default)) for name, default in
                         (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))

    def start(self, cuda: bool) -> torch.device:
        """Joins the others. The device of this rank."""
        device = torch.device("cuda", self.local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        return device

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def average_gradients(self, params: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """One all-reduce of all gradients; the mean of the losses, so that one that is not finite is known to all."""
        if self.size == 1:
            return loss
        params = list(params)
        grads = [(torch.zeros_like(param) if param.grad is None else param.grad).view(-1) for param in params]
        *grads, loss = self.mean(torch.cat([*grads, loss.view(1)])).split([*map(len, grads), 1])
        for param, grad in zip(params, grads):
            param.grad = grad.view_as(param)
        return loss

    def mean(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values := values.clone())
            values /= self.size
        return values

    def gather_tensor(self, values: Tensor) -> list[Tensor]:
        """The values of all ranks, on all ranks."""
        if self.size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values)
        return gathered

    def gather(self, value: Any) -> list:
        """The values of all ranks, on rank 0; a list of None on the others."""
        gathered = [None if self.rank else value] * self.size
        if self.size > 1:
            dist.gather_object(value, gathered if self.rank == 0 else None)
        return gathered

    def share(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]


ranks = Ranks()


# --- end shared: ranks ---


# --- shared: PPO ---
# ---- PPO: rollout, GAE, update ----
class Rollout(NamedTuple):
    """What the loss reads, on the training device; [T * N, ...] in the order of Storage."""

    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    inputs: dict[str, Tensor]  # what else the agent saw

    def select(self, rows: Tensor) -> "Rollout":
        inputs = {name: values.index_select(0, rows) for name, values in self.inputs.items()}
        return Rollout(*(values.index_select(0, rows) for values in self[:-1]), inputs)


@torch.no_grad()
def collect(actor: Actor, envs: Envs, args, on_episode: Callable) -> Rollout:
    """Steps the envs num_steps times from their last steps, lane by lane: while the policy serves one lane, workers can
    step the other one."""
    T, N, num_lanes, start = args.num_steps, args.num_envs, len(envs.last_steps), envs.num_steps
    rewards, dones, M = np.zeros((T, N), np.float32), np.zeros((T, N), bool), N // num_lanes
    records, cut, last_values = [], [], []  # values stay on the device until the last step
    actor.begin()
    for t in range(T + 1):
        ends = t == T or (signals.received and ranks.size == 1)  # several ranks stop together, after an update
        for lane in range(num_lanes):
            mine = slice(lane * M, lane * M + M)
            if t > 0:
                step = envs.receive(lane)
                rewards[t - 1, mine], dones[t - 1, mine] = step.reward, step.terminated | step.truncated
                for episode in step.episodes:
                    on_episode((start + t) * N * ranks.size, *episode)
                if step.finals:  # an episode that was cut off goes on in expectation: r + gamma V(final observation)
                    where, observations = zip(*step.finals)
                    final = collate(envs.leaves, observations)
                    cut.append((t - 1, where, actor.value(step, *final, np.array(where) - mine.start, lane)))
            if ends:
                step = envs.last_steps[lane]
                last_values.append(actor.value(step, step.parts, step.counts, np.arange(M), lane))
            else:
                with section("policy"):
                    action, log_prob, value, inputs = actor.act(envs.last_steps[lane], lane=lane)
                    actions = to_env_actions(envs.action_space, iter(action.cpu().numpy().T))
                records.append((action, log_prob, value, *inputs.values()))
                envs.send(actions, lane)
        if ends:
            break
    if t < T:
        signals.check()
    for t, where, value in cut:
        rewards[t, where] += args.gamma * value.cpu().numpy()
    actions, log_probs, values, *others = (torch.cat(column) for column in zip(*records))
    next_value = torch.cat(last_values).cpu().numpy()
    advantages = gae(rewards, values.view(T, N).cpu().numpy(), dones, next_value, args.gamma, args.gae_lambda)
    advantages = actor.storage.to_device(advantages.reshape(-1))
    return Rollout(actions, log_probs, values, advantages, advantages + values, dict(zip(inputs, others)))


@section("gae")
def gae(rewards, values, dones, next_value, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages float32 [T, N] (Schulman et al. 2015, eq. 16), cut where an episode ends; `rewards` of truncated steps
    hold the bootstrapped value already."""
    advantages, last = np.zeros_like(rewards), np.zeros_like(next_value)
    alive = 1.0 - dones.astype(np.float32)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value * alive[t] - values[t]
        last = advantages[t] = delta + gamma * gae_lambda * alive[t] * last
        next_value = values[t]
    return advantages


def update(agent: Agent, optimizer, actor: Actor, rollout: Rollout, rng: np.random.Generator, args) -> dict:
    """One PPO update. Returns the logs of the last minibatch; collection_mismatch is that of the first, before the
    first gradient step, where collection and training must agree. A minibatch whose loss or gradient is not finite
    changes nothing; FloatingPointError names the first one, unless they are to be skipped."""
    params = dict(agent.named_parameters())
    finite, terms, clipfracs, first = [], [], [], None
    for _ in range(args.update_epochs):
        for inputs, batch in actor.minibatches(rollout, rng, args):
            loss, logs = ppo_loss(agent, inputs, batch, args)
            optimizer.zero_grad()
            with section("backward"):
                loss.backward()
            with section("all-reduce"):
                loss = ranks.average_gradients(params.values(), loss.detach())
            with section("optimizer"):
                names = [name for name, param in params.items() if param.grad is not None]
                norms = torch.stack(torch._foreach_norm([params[name].grad for name in names]))
                nn.utils.clip_grads_with_norm_(params.values(), args.max_grad_norm, norms.norm(), foreach=True)
                is_finite = torch.cat([loss.view(1), norms]).isfinite()
                finite.append(is_finite.all())
                terms.append((names, is_finite))
                optimizer.found_inf = 1.0 - finite[-1].float()  # a fused optimizer reads it on the device
                optimizer.step()
            first = logs["debug/collection_mismatch"] if first is None else first
            clipfracs.append(logs["losses/clipfrac"])
        if args.target_kl is not None and ranks.mean(logs["losses/approx_kl"]) > args.target_kl:
            break
    finite = torch.stack(finite).cpu().numpy()
    if not finite.all() and not args.skip_nonfinite_updates:
        raise FloatingPointError(blame(int(finite.argmin()), terms, rollout, args))
    explained = 1 - (rollout.returns - rollout.values).var() / rollout.returns.var()
    logs |= {"debug/collection_mismatch": first, "losses/clipfrac": torch.stack(clipfracs).mean(),
             "losses/explained_variance": explained}
    return {name: value.item() for name, value in logs.items()} | {
        "charts/skipped_minibatches": float((~finite).sum())}


def blame(minibatch: int, terms: list[tuple[list[str], Tensor]], rollout: Rollout, args) -> str:
    """A sentence on the first tensor that is not finite: a column of the rollout, else a term of the minibatch."""
    for name, values in zip(rollout._fields, rollout[:-1]):
        bad = (~values.isfinite()).flatten(1).any(1) if values.dim() > 1 else ~values.isfinite()
        if bad.any():
            t, i = divmod(int(bad.nonzero()[0]), args.num_envs)
            return f"{name} of env {i} in step {t} of the rollout: {values[t * args.num_envs + i].tolist()}"
    names, is_finite = terms[minibatch]
    names = ["loss", *(f"gradient of {name}" for name in names)]
    return f"{names[int((~is_finite).nonzero()[0])]} of minibatch {minibatch} is NaN or inf"


# --- end shared: PPO ---


# --- shared: checkpoint and evaluation ---
# ---- Checkpoint, evaluation, logging ----
def save_model(path: str, agent: nn.Module, args) -> None:
    """Writes weights and Args; `load_model` reads them."""
    buffer = io.BytesIO()
    torch.save({"model": agent.state_dict(), "args": vars(args)}, buffer)
    write_file(path, buffer.getvalue())


def write_file(path: str, data: bytes) -> None:
    """Writes a file whole or not at all, also where the machine stops in between."""
    temporary = os.path.join(os.path.dirname(path), "unfinished.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def load_model(path: str, agent: nn.Module, device: torch.device) -> None:
    try:
        weights = torch.load(path, map_location=device, weights_only=True)["model"]
    except OSError:
        raise
    except Exception as error:  # of many kinds
        raise ValueError(f"--load-model {path} is not a model.pt of --save-model: {error}") from None
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"--load-model {path}: its network is not the one that the flags describe: {error}") from None


class Stopped(SystemExit):
    """SIGINT or SIGTERM was received; the exit code is 128 and its number."""


class Signals:
    """Within `with signals` SIGINT and SIGTERM are noted, for the loops to stop after the present step; the second one
    leaves at once."""

    received: int | None = None

    def __enter__(self) -> None:
        self.received, self.handlers = None, {}
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *error) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def note(self, number: int, frame) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        text = f"\n{signal.Signals(number).name}: stopping after this step; once more leaves at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # print could be in the middle of another print

    def check(self) -> None:
        if self.received:
            raise Stopped(128 + self.received)

    def agree(self) -> None:
        """Stops all ranks if one of them was told to."""
        self.received = max(ranks.gather_tensor(torch.tensor(self.received or 0))).item() or None
        self.check()


signals = Signals()
CHECKPOINT = "cleanrl_graph-checkpoint-1"  # the first word of the file, with the version of its format


def pack(value: Any) -> Any:
    """Nested values as torch.load(weights_only=True) reads them: arrays and tuples become tagged tuples."""
    if isinstance(value, dict):
        return {k: pack(v) for k, v in value.items()}
    if isinstance(value, (list, deque)):
        return [pack(v) for v in value]
    if isinstance(value, tuple):
        return ("tuple", *map(pack, value))
    if isinstance(value, np.ndarray):
        return "array", torch.from_numpy(np.array(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"has a {type(value).__name__}, which cannot be saved in a checkpoint: {value!r}")


def unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: unpack(v) for k, v in value.items()}
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if isinstance(value, tuple):
        return value[1].numpy() if value[0] == "array" else tuple(map(unpack, value[1:]))
    return value


def save_checkpoint(path: str, state: dict) -> None:
    """Writes nested dicts, lists, tuples, tensors, arrays and plain values, whole or not at all."""
    buffer = io.BytesIO()
    torch.save(pack(state), buffer)
    header = f"{CHECKPOINT} {hashlib.sha256(buffer.getvalue()).hexdigest()}\n".encode()
    write_file(path, header + buffer.getvalue())


def load_checkpoint(path: str) -> dict:
    """What save_checkpoint wrote. ValueError for a file that is something else or damaged."""
    with open(path, "rb") as file:
        header, data = file.readline(200).split(), file.read()
    if len(header) != 2 or not header[0].startswith(CHECKPOINT[:-1].encode()):
        raise ValueError(f"{path} is not a checkpoint")
    if header[0] != CHECKPOINT.encode():
        raise ValueError(f"{path} has the format {header[0].decode()}, this script reads {CHECKPOINT}")
    if hashlib.sha256(data).hexdigest().encode() != header[1]:
        raise ValueError(f"{path} is damaged: its checksum does not fit")
    return unpack(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def checkpoints_in(folder: str) -> list[str]:
    """The checkpoints of a run, the newest first."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "checkpoint_*.ckpt")), reverse=True)


def find_checkpoint(args) -> tuple[str, dict] | None:
    """(folder of the run, state) of the newest whole checkpoint that --resume names; None to start from scratch.
    ValueError if it cannot be gone on from."""
    if args.resume is None:
        return None
    paths = checkpoints_in(args.resume)
    if args.resume == "auto":
        prefix = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__"
        folders = glob.glob(glob.escape(os.path.join(args.run_dir, prefix)) + "*")
        folders = sorted(filter(checkpoints_in, folders), key=os.path.getmtime)
        if not folders:
            say(f"--resume auto: no checkpoint of {prefix}* in {args.run_dir}, starting anew")
            return None
        paths = checkpoints_in(folders[-1])
    elif os.path.isdir(args.resume) and not paths:
        raise ValueError(f"--resume {args.resume}: there is no checkpoint in this folder")
    elif not paths:
        older = checkpoints_in(os.path.dirname(args.resume) or ".")
        paths = [args.resume, *(path for path in older if os.path.basename(path) < os.path.basename(args.resume))]
    for path in paths:
        try:
            state = load_checkpoint(path)
        except (OSError, ValueError) as error:
            say(f"--resume: {error}")
            continue
        compare_flags(path, state["args"], args)
        for newer in checkpoints_in(os.path.dirname(path)):
            if os.path.basename(newer) > os.path.basename(path):  # of a future that this run will not have
                say(f"--resume: {newer} is not used and gets the name {os.path.basename(newer)}.unused")
                with contextlib.suppress(OSError):
                    os.replace(newer, newer + ".unused")
        return os.path.dirname(path), state
    raise ValueError(f"--resume {args.resume}: there is no checkpoint that can be read")


def compare_flags(path: str, saved: dict, args) -> None:
    """Prints the flags that are not those of the checkpoint; ValueError where it cannot be gone on from with them."""
    runtime = ("resume", "batch_size", "minibatch_size", "num_iterations")
    changed = {name: f"--{name.replace('_', '-')} {value}" for name, value in vars(args).items()
               if saved.get(name) != value and name not in runtime}
    for name, flag in changed.items():
        say(f"--resume: {flag}, it was {saved.get(name)}")
    for name in ("env_id", "env_kwargs", "agent_z", "mask_obs", "num_envs", "double_buffer", "world_size", "obs_shifts",
                 "action_shifts", "reward_shifts", "memory_length"):
        if name in changed and name in saved:
            raise ValueError(f"--resume {path}: {changed[name]} where the checkpoint has {saved[name]}")


def random_state(rng: np.random.Generator) -> dict:
    """The state of all random generators outside the environments."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(), "minibatches": rng.bit_generator.state}


def set_random_state(state: dict, rng: np.random.Generator) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    rng.bit_generator.state = state["minibatches"]


@torch.no_grad()
def play(agent: nn.Module, makers: list[Callable[[], gym.Env]], greedy: bool, args, device) -> list[tuple]:
    """(return, length, info["eval"]) of each environment's first episode."""
    envs = Envs(makers, args.action_head)
    actor, step, results = Actor(agent, envs.leaves, len(makers), args, device), envs.reset(args.seed + 10_000), {}
    while len(results) < len(makers):
        if envs.num_steps % args.num_steps == 0:
            actor.begin()
        action = actor.act(step, greedy)[0]
        step = envs.step(to_env_actions(envs.action_space, iter(action.cpu().numpy().T)))
        for i, *episode in step.episodes:
            results.setdefault(i, tuple(episode))
        signals.check()
    envs.close()
    return [results[i] for i in range(len(makers))]


def save_video(path: str, agent: nn.Module, args, device: torch.device) -> None:
    """One greedy episode as an animated GIF."""
    env = env_maker(args, more={"render_mode": "rgb_array"})()
    env = gym.wrappers.RenderCollection(env, pop_frames=False, reset_clean=False)
    play(agent, [lambda: env], True, args, device)
    frames = [Image.fromarray(frame) for frame in env.frame_list[:-1]]  # the last one shows the next episode
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[100] * (len(frames) - 1) + [3000], loop=0)


def eval_entries(args) -> list[dict]:
    """The env kwargs of --eval-suite. Raises ValueError if the env has no suite of that name."""
    if args.eval_suite is None:
        return []
    env = env_maker(args)()
    suites = getattr(env.unwrapped, "eval_suites", {})
    env.close()
    if args.eval_suite not in suites:
        raise ValueError(f"--eval-suite {args.eval_suite}: {args.env_id} has the suites {sorted(suites)}")
    return suites[args.eval_suite]


def evaluate(agent: nn.Module, args, device: torch.device) -> list[dict]:
    """Without --eval-suite one row per greedy episode of each entry of --env-kwargs. With it one row per entry: the
    cost (info["eval"]["cost"], else minus the return) of a greedy episode, the best of `eval_samples` sampled ones, and
    the env's other info["eval"]. All of it for each skill of --agent-z."""
    rows, space = [], z_space(args.agent_z)
    skills = range(space.n) if isinstance(space, spaces.Discrete) else [None]
    if args.eval_suite is None:
        for k, z in itertools.product(range(len(tasks_of(args))), skills if args.eval_episodes else []):
            episodes = play(agent, [env_maker(args, k, z)] * args.eval_episodes, True, args, device)
            for i, (ret, length, info) in enumerate(episodes):
                row = {"episode": i, "task": k} if isinstance(args.env_kwargs, list) else {"episode": i}
                if space is not None:
                    row["z"] = " ".join(f"{v:.3g}" for v in info["agent_z"]) if z is None else z
                rows.append(row | {"length": length, "return": ret})
        return rows
    cases = list(itertools.product(eval_entries(args), skills))
    for kwargs, z in tqdm(cases, desc="evaluation", unit="entry", leave=False, mininterval=1):
        row, references = {"instance": " ".join(map(str, kwargs.values()))}, {}
        row, maker = row if z is None else row | {"z": z}, env_maker(args, 0, z, kwargs)
        for name, num in (("greedy", 1), (f"best of {args.eval_samples}", args.eval_samples)):
            if num:
                episodes = play(agent, [maker] * num, name == "greedy", args, device)
                row[name] = min(info.get("cost", -ret) for ret, _, info in episodes)
                references = {k: v for k, v in episodes[0][2].items() if k not in ("cost", "agent_z")}
        rows.append(row | references)
    return rows


def eval_table(rows: list[dict]) -> str:
    """A markdown table of `evaluate`'s rows, with means, also those of each task and skill. Where the env reports
    "best_known", all other costs are given as gaps to it in percent."""
    fixed = ("instance", "episode", "task", "z", "best_known", "lower_bound")
    names, is_gap = list(rows[0]), lambda k: "best_known" in rows[0] and k not in fixed
    gaps = [{k: 100 * (v / row["best_known"] - 1) if is_gap(k) else v for k, v in row.items()} for row in rows]
    show = lambda k, v: f"{v:.1f}" if is_gap(k) else f"{v:.5g}" if isinstance(v, float) else str(v)
    cells = [[show(k, row[k]) for k in names] for row in gaps]
    parts = {}
    for row in gaps:
        parts.setdefault(tuple((k, row[k]) for k in ("task", "z") if isinstance(row.get(k), int)), []).append(row)
    for which, part in [*(parts.items() if 1 < len(parts) < len(rows) else ()), ((), gaps)]:
        mean = {k: float(np.mean([row[k] for row in part])) for k in names if k not in fixed}
        mean |= {names[0]: "mean", **dict(which)}
        cells.append([f"**{show(k, mean[k])}**" if k in mean else "" for k in names])
    header = [f"{k} gap %" if is_gap(k) else k for k in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(names), *cells])


class Logger:
    """TensorBoard always, wandb with --track; a progress bar with step, SPS and the recent mean return. Files that
    cannot be written (a full disk) are reported once and tried again every second; training goes on."""

    def __init__(self, args, path: str, step: int = 0, state: dict | None = None):
        self.path, self.writer, self.failing, self.silent = path, None, False, ranks.rank > 0
        self.pending: list[tuple] = []  # entries of the log that are not in its file yet
        self.files: list[Callable[[], None]] = []  # what writes files that are not written yet
        self.flushed = -1 if state is None else step  # what a log file holds beyond this step is not valid
        state = state or {"recent": [], "restarts": 0, "seconds": 0.0}
        self.recent, self.restarts = deque(state["recent"], maxlen=100), state["restarts"]
        self.num_tasks = len(args.env_kwargs) if isinstance(args.env_kwargs, list) else 0
        self.first_env = ranks.rank * args.num_envs
        if args.track and not self.silent:
            import wandb

            run_name = os.path.basename(path)
            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, sync_tensorboard=True,
                       config=vars(args), name=run_name, save_code=True, resume="allow",
                       id=re.sub("[^A-Za-z0-9_-]", "-", run_name)[-64:])
        table = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
        self.pending.append(("add_text", "hyperparameters", f"|param|value|\n|-|-|\n{table}", step))
        self.write()
        self.bar = tqdm(total=args.total_timesteps, initial=step, unit="step", unit_scale=True, dynamic_ncols=True,
                        disable=self.silent)
        self.start = time.time() - state["seconds"]

    def episode(self, step: int, env: int, episodic_return: float, length: int, info: dict) -> None:
        self.recent.append(episodic_return)
        self.restarts += info.get("restarted", 0)
        names, z = [""], info.get("agent_z")
        if self.num_tasks:
            names.append(f"/task_{(self.first_env + env) % self.num_tasks}")
        if z is not None:
            names.append(f"/z_{z if isinstance(z, int) else int(3 * z[0])}")
        for name in names:
            self.pending.append(("add_scalar", "charts/episodic_return" + name, episodic_return, step))
            self.pending.append(("add_scalar", "charts/episodic_length" + name, length, step))

    @section("logging")
    def update(self, step: int, scalars: dict[str, float]) -> None:
        scalars["charts/SPS"], scalars["charts/env_restarts"] = int(step / (time.time() - self.start)), self.restarts
        if self.num_tasks and ranks.size > 1:  # rank 0 has not all the tasks
            self.pending = sum(filter(None, ranks.gather(self.pending)), [])
        self.pending += [("add_scalar", name, value, step) for name, value in scalars.items() if not self.silent]
        if time.time() - self.written > 1:
            self.write()
        with contextlib.suppress(OSError):
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix(SPS=scalars["charts/SPS"], ret=f"{np.mean(self.recent):.4g}" if self.recent else "-")

    def write(self, *files: Callable[[], None]) -> bool:
        """Writes what is pending to the log, and calls `files`, which write files. False if that failed; it is tried
        again at the next call. Only rank 0 writes."""
        self.written = time.time()
        if self.silent:
            self.pending.clear()
            return True
        self.files += files
        try:
            self.writer = self.writer or self.open()
            for method, *values in self.pending:
                getattr(self.writer, method)(*values)
            self.writer.flush()
            self.flushed = self.pending[-1][-1] if self.pending else self.flushed
            self.pending.clear()
            while self.files:
                self.files[0]()
                self.files.pop(0)
            self.failing = False
        except OSError as error:
            if not self.failing:
                say(f"\ncannot write to {self.path}: {error}; training goes on, and the files will be tried again")
            self.failing, writer, self.writer = True, self.writer, None  # the file may hold some of what is pending
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.close()
        return not self.failing

    def open(self) -> SummaryWriter:
        """A new file of the log, which takes back what the others hold beyond `flushed`. It must sort after them, by
        the second in its name."""
        if self.failing:  # a trial, so that failures do not leave files behind
            os.makedirs(self.path, exist_ok=True)
            write_file(trial := os.path.join(self.path, "trial"), bytes(2**16))
            os.remove(trial)
        pattern = os.path.join(glob.escape(self.path), "events.out.tfevents.{:010d}.*")
        while glob.glob(pattern.format(int(time.time()))):
            time.sleep(0.05)
        return SummaryWriter(self.path, max_queue=1000, purge_step=self.flushed + 1)

    def checkpoint(self, step: int, state: dict, keep: int) -> bool:
        """Saves `state` as the newest of `keep` checkpoints. False if that failed; then it is not tried again."""
        state["logger"] = {"recent": list(self.recent), "restarts": self.restarts, "seconds": time.time() - self.start}
        path = os.path.join(self.path, f"checkpoint_{step:012d}.ckpt")

        def replace_oldest() -> None:
            save_checkpoint(path, state)
            for old in checkpoints_in(self.path)[keep:]:
                os.remove(old)

        saved = self.write(replace_oldest)
        if not saved:
            self.files.pop()
        return saved

    def save_table(self, rows: list[dict], step: int) -> None:
        """Prints and logs the evaluation's table; eval.md holds it too, eval.csv the costs themselves."""
        table, lines = eval_table(rows), [rows[0], *(row.values() for row in rows)]
        say(table, sys.stdout)
        self.pending.append(("add_text", "evaluation", table, step))

        def files() -> None:
            Path(self.path, "eval.md").write_text(table + "\n")
            Path(self.path, "eval.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))

        self.write(files)

    @contextlib.contextmanager
    def profile(self) -> Iterator[Callable[[], None]]:
        """--profile: prints the seconds of each section within, profile.md holds them too, and trace.json a trace of
        the third update. What it yields is to be called after each update."""
        section.on, section.seconds, section.calls, start = True, {}, {}, time.time()
        path = os.path.join(self.path, "trace.json")
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
        try:
            with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda trace: self.write(
                    partial(trace.export_chrome_trace, path))) as trace:
                yield trace.step
        finally:
            section.on = False
        total = time.time() - start
        rows = sorted(section.seconds.items(), key=itemgetter(1), reverse=True)
        rows.append(("everything else", total - sum(section.seconds.values())))
        table = ["| section | calls | seconds | share |", "| --- | --- | --- | --- |"]
        table += [f"| {k} | {section.calls.get(k, '')} | {v:.2f} | {v / total:.1%} |" for k, v in rows]
        self.end_bar()
        say("\n".join(table), sys.stdout)
        self.write(lambda: Path(self.path, "profile.md").write_text("\n".join(table) + "\n"))

    def end_bar(self) -> None:
        with contextlib.suppress(OSError):
            self.bar.close()

    def close(self) -> None:
        self.end_bar()
        if self.write():
            if self.writer is not None:
                self.writer.close()
        else:
            say(f"{self.path}: {len(self.pending)} entries of the log and {len(self.files)} files are lost")


def finish(agent: nn.Module, logger: Logger, step: int, args, device: torch.device) -> list[dict]:
    """Saves the model, evaluates it, saves the video, as the flags say. The rows of the evaluation's table."""
    logger.end_bar()
    if args.save_model:
        logger.write(lambda: save_model(os.path.join(logger.path, "model.pt"), agent, args))
    rows = evaluate(agent, args, device)
    if rows:
        logger.save_table(rows, step)
    if args.capture_video:
        logger.write(lambda: save_video(os.path.join(logger.path, "episode.gif"), agent, args, device))
    return rows


# --- end shared: checkpoint and evaluation ---


# --- shared: flags ---
def check_numbers(args) -> None:
    """ValueError for a number that makes no sense in any script."""
    counts = "num_envs num_steps num_minibatches update_epochs keep_checkpoints gnn_layers gnn_dim"
    not_negative = ("num_workers env_timeout checkpoint_every total_timesteps eval_episodes eval_samples learning_rate "
                    "clip_coef max_grad_norm")
    for names, least, most, limits in (
            (counts, 1, math.inf, ", at least 1"), (not_negative, 0, math.inf, ", at least 0"),
            ("gamma gae_lambda", 0, 1, ", at least 0 and at most 1"), ("ent_coef vf_coef", -math.inf, math.inf, "")):
        for name in names.split():
            value = getattr(args, name)
            if not least <= value <= most or math.isinf(value) and name != "max_grad_norm":
                raise ValueError(f"--{name.replace('_', '-')} {value}: a finite number is needed{limits}")
    if min(args.hidden_dims, default=1) < 1:
        raise ValueError(f"--hidden-dims {args.hidden_dims}: widths of at least 1 are needed")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed}: it must be at least 0")


# --- end shared: flags ---


# --- shared: main ---
def main(args: Args) -> list[dict]:
    """Trains, evaluates, and returns the rows of the evaluation's table. A checkpoint is saved before an error is
    raised, and before the SystemExit (130 or 143) that follows SIGINT or SIGTERM."""
    check_numbers(args)
    args.world_size = ranks.size
    args.batch_size = args.num_envs * args.num_steps
    args.minibatch_size = args.batch_size // args.num_minibatches
    args.num_iterations = args.total_timesteps // (args.batch_size * args.world_size)
    if args.total_timesteps > 0 and args.num_iterations == 0:
        raise ValueError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {args.num_envs} envs x "
                         f"{args.num_steps} steps; 0 only evaluates")
    check_flags(args)
    check_tasks(args)
    eval_entries(args)  # a wrong name is an error now and not after the training
    device = ranks.start(torch.cuda.is_available() and args.cuda)
    run_name = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
    folder, saved = ranks.share(find_checkpoint(args) if ranks.rank == 0 else None) or (
        ranks.share(os.path.join(args.run_dir, run_name)), None)

    random.seed(args.seed + ranks.rank)
    np.random.seed(args.seed + ranks.rank)
    torch.manual_seed(args.seed)  # for the same weights on all ranks
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng(args.seed + ranks.rank)

    first = ranks.rank * args.num_envs
    envs = make_envs([env_maker(args, first + i) for i in range(args.num_envs)], args)
    with contextlib.closing(envs), signals:
        return train(envs, folder, saved, rng, device, args)


def train(envs: Envs | WorkerEnvs, folder: str, saved: dict | None, rng: np.random.Generator, device, args) -> list:
    """Training and evaluation, from the start or from what was `saved`."""
    agent = Agent(envs.leaves, envs.action_space, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    if args.load_model:
        load_model(args.load_model, agent, device)
    compiled = compile_networks(agent, args.compile)
    if ranks.rank > 0:
        torch.manual_seed(args.seed + ranks.rank)
    actor, iteration = Actor(agent, envs.leaves, args.num_envs, args, device, len(envs.last_steps)), 0
    if saved is None:
        envs.reset(args.seed + ranks.rank * args.num_envs)
    else:
        iteration = restore(saved, agent, optimizer, actor, envs, rng, args)
    global_step = lambda: envs.num_steps * args.num_envs * ranks.size
    logger = Logger(args, folder, global_step(), saved and saved["logger"])

    def checkpoint(before: tuple | None = None, whole: bool = True) -> bool:
        number, model, optim = before or (iteration, agent.state_dict(), optimizer.state_dict())
        mine = {"envs": envs.state(), "actor": actor.state(), "random": random_state(rng)} if whole else None
        return logger.checkpoint(global_step(), {
            "args": vars(args), "iteration": number, "num_steps": envs.num_steps, "model": model, "optimizer": optim,
            "ranks": ranks.gather(mine) if whole else None}, args.keep_checkpoints)

    due, before = False, None
    try:
        with logger.profile() if args.profile else contextlib.nullcontext(lambda: None) as end_of_update:
            while iteration < args.num_iterations:
                anneal(optimizer, actor, iteration / args.num_iterations, args)
                before = iteration, *copy.deepcopy((agent.state_dict(), optimizer.state_dict()))
                rollout = collect(actor, envs, args, logger.episode)
                logs = update(agent, optimizer, actor, rollout, rng, args)
                agent.encoder.observe(actor.storage)  # after the update: it must see what collection saw
                iteration += 1
                logs["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                logger.update(global_step(), logs | actor.storage.stats() | compile_stats(compiled))
                if args.checkpoint_every > 0:
                    due |= iteration % args.checkpoint_every == 0 or iteration == args.num_iterations
                due = due and not ranks.share(checkpoint())  # one that could not be written stays due
                end_of_update()
                signals.agree()
        return finish(agent, logger, global_step(), args, device) if ranks.rank == 0 else []
    except Stopped:
        if iteration < args.num_iterations:
            checkpoint()
        raise
    except FloatingPointError as error:
        checkpoint(before)  # from before the bad update
        raise FloatingPointError(f"update {iteration + 1}, after {envs.num_steps} steps of {args.num_envs} envs: "
                                 f"{error}; the checkpoint in {folder} is from before it") from None
    except Exception:
        if iteration < args.num_iterations:
            checkpoint(before, whole=False)  # the environments begin anew
        if signals.received:  # it reached the workers, too
            raise SystemExit(128 + signals.received) from None
        raise
    finally:
        logger.close()
        ranks.stop()


def restore(saved: dict, agent: Agent, optimizer, actor: Actor, envs: Envs, rng: np.random.Generator, args) -> int:
    """Puts everything back to where a checkpoint was written. Returns the number of updates that were made."""
    try:
        agent.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["lr"] = args.learning_rate
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"--resume {args.resume}: its network is not that of the flags: {error}") from None
    mine = saved["ranks"] and saved["ranks"][ranks.rank]
    lost = sum(state["env"] is None for state in mine["envs"]) if mine else args.num_envs
    if lost:
        say(f"--resume: {lost} of {args.num_envs} environments cannot restore their state and begin a new episode")
    if mine:
        envs.restore((args.seed + ranks.rank * args.num_envs, saved["num_steps"], mine["envs"]))
        actor.restore(mine["actor"])
        set_random_state(mine["random"], rng)
    else:
        envs.reset(args.seed + ranks.rank * args.num_envs + 1_000_003 * (saved["num_steps"] + 1))
        envs.num_steps = saved["num_steps"]
    return saved["iteration"]


# --- end shared: main ---


if __name__ == "__main__":
    main(tyro.cli(Args))
