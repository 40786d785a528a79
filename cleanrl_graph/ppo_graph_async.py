"""PPO that acts and learns at the same time: ppo_graph.py with a second process that collects the
next rollout.

    python cleanrl_graph/ppo_graph_async.py --env-id envs:JobShop-v0 --gamma 1 --eval-suite la
    python cleanrl_graph/ppo_graph_async.py --max-lag 2 --num-workers 4

`diff ppo_graph.py ppo_graph_async.py` shows the idea: a room "collector", and the advantages. While
update k runs, the collector acts with older weights: rollout k (k = 0, 1, ... from the start or the
resume of a run) is collected by the weights after max(0, k - max_lag) updates, however fast either
process is, so that runs can be repeated bit by bit. The policy has moved on when a rollout is
learned from, so at the start of an update log-probabilities and values are computed anew. rho, the
probability of an action then over that in the collector, corrects advantages and value targets
(V-trace) and weighs the policy loss; PPO's clipped ratio is taken to the policy at the update's
start (the decoupled objective). With --max-lag 0 rho is 1 up to rounding: this is ppo_graph.py.
torchrun is refused. Environments begin new episodes when a run is resumed.

Papers: V-trace (Espeholt et al. 2018, arXiv:1802.01561), the decoupled objective (Hilton et al.
2022, arXiv:2110.00641), and those of ppo_graph.py.
"""

import atexit
import contextlib
import importlib
import inspect
import json
import math
import multiprocessing as mp
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Bernoulli, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

VERSION = "1.1.0.dev0"  # of cleanrl_graph; services of another version are not used

Json = Annotated[dict | list, tyro.conf.arg(constructor=json.loads, metavar="JSON")]


# --load-model reads this class: the network's flags are those below the comment line "# Network",
# up to the next such line. So add no other comment lines of their own inside of it
@dataclass
class Args:
    """Flags of the experiment, then of the environment (from --env-id on), of the network (from
    --hidden-dims on) and of the algorithm (from --total-timesteps on)."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; env i has seed + i"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """uses CUDA when it is available"""
    track: bool = False
    """tracks this experiment with Weights and Biases"""
    wandb_project_name: str = "cleanrl_graph"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """saves three greedy episodes to {run_dir}/{run_name}/episode.gif when training ends"""
    run_dir: str = "runs"
    """folder of the runs' folders: TensorBoard log, model, checkpoints, evaluation"""
    save_model: bool = False
    """saves the model to {run_dir}/{run_name}/model.pt when training ends"""
    load_model: str | None = None
    """model.pt to start from; the flags of network and environment that are not given are taken
    from it"""
    checkpoint_every: int = 100
    """updates between checkpoints in {run_dir}/{run_name}, which keeps the last two; 0: none"""
    checkpoint_minutes: float = 5.0
    """a checkpoint is also written after this many minutes without one; 0: only by updates"""
    resume: str | None = None
    """resumes from this checkpoint, or from the newest one in this folder; `auto`: from the newest
    one of this environment, exp_name and seed, if there is any"""
    eval_suite: str | None = None
    """name of a list of env kwargs in the env's `eval_suites`, each played at the end"""
    eval_episodes: int = 10
    """greedy episodes played when training ends if there is no eval_suite; 0 for none"""
    eval_samples: int = 16
    """sampled episodes per entry of the eval_suite, beside the greedy one; the best is reported"""
    eval_max_steps: int = 10_000
    """steps after which an evaluation's episode is cut off"""

    # Environment
    env_id: str = "envs:JobShop-v0"
    """the environment's id, `module:Name-v0` imports the module first"""
    env_kwargs: Json = field(default_factory=dict)
    """keyword arguments of the environment as JSON, or a list of them: env i gets entry i modulo
    their number"""
    wrap: tuple[str, ...] = ()
    """wrappers, innermost first: `hide:1,3`, `z:skill:4`, `z:uniform:2` (envs/wrappers.py),
    `module:wrapper`"""
    norm_obs: bool = False
    """normalises vectors and the columns of graphs and sets by their running mean and std"""
    num_workers: int = 0
    """worker processes that step the environments; 0 steps them in this process"""
    env_timeout: float = 300.0
    """seconds after which a worker that does not answer has failed; 0 waits forever"""

    # Network
    hidden_dims: tuple[int, ...] = (256, 256)
    """widths of the actor's and of the critic's MLP"""
    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"
    """activation of all MLPs"""
    gnn: Literal["gine", "gin", "gatv2", "transformer", "sage"] = "gine"
    """message passing layer of graph observations. gin is faster, but sums the neighbors of a node
    and its edges apart: it does not know which neighbor is behind which edge"""
    gnn_layers: int = 3
    """number of message passing layers"""
    gnn_dim: int = 64
    """width of node, edge and set-element embeddings"""
    gnn_aggr: Literal["sum", "mean", "max"] = "sum"
    """how a node aggregates its incoming messages; gatv2 and transformer sum them by attention"""
    readout: Literal["sum", "mean", "max", "meanmax"] = "meanmax"
    """how nodes of a graph, or elements of a set, become one vector"""
    action_head: str = "auto"
    """what a Discrete action chooses from: nodes, edges, avail_actions, the name of a set, or
    flat, a fixed list; auto: see `infer_heads`. Of a Sequence: the rows that act"""
    autoregressive: bool = False
    """draws the parts of a composite action in sequence, each given those before it"""
    state_dependent_std: bool = False
    """makes the log-std of Box actions an output of the network instead of a parameter"""

    # Algorithm
    total_timesteps: int = 500000
    """total timesteps"""
    learning_rate: float = 2.5e-4
    """the learning rate of the optimizer"""
    num_envs: int = 4
    """the number of environments (of each rank, with torchrun)"""
    num_steps: int = 128
    """the number of steps of each environment per rollout"""
    anneal_lr: bool = True
    """toggles learning rate annealing"""
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
    stay_solved: float | None = None
    """keeps updates small where a task is solved: norm_adv divides by the advantages' std plus 0.1
    of the largest std of the returns so far, which decays by this factor at each update. If
    above 0, it also makes Adam AMSGrad. None: off"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggles the clipped loss of the value function"""
    norm_vloss: bool = False
    """divides the loss of the value function by 1 + the variance of the returns"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = None
    """the target KL divergence threshold"""

    max_lag: int = 1
    """how many updates the weights that collect are behind those that learn; 0: collecting and
    learning take turns"""
    max_rho: float = 1.0
    """upper bound of the importance weights that correct for the lag, both rho and c of V-trace"""

    batch_size: tyro.conf.Suppress[int] = 0
    """the number of steps of a rollout, on each rank; these three are set at run time"""
    world_size: tyro.conf.Suppress[int] = 1
    """the number of ranks"""
    num_iterations: tyro.conf.Suppress[int] = 0
    """the number of rollouts, each followed by an update"""


class UsageError(ValueError):
    """A sentence that says what was wrong, where, and what to do, shown without a traceback."""


# --- shared: observations ---
# ---- Observations: the leaves of a space, and N observations as flat arrays ----
NOT_INPUT = ("action_mask", "node_ids")  # keys of a Dict observation with a meaning of their own


class Leaf(NamedTuple):
    """One array of an observation. A ragged leaf (`group` is not None) has any number of rows per
    step; all leaves of a group have the same number. `shape` and `dtype` are those of one row
    (ragged) or of one step (dense), and so is `space`, but that of links is the graph's."""

    path: str  # "graph.nodes", "position"
    kind: str  # "vector", "image", "discrete" or "links" (pairs of node indices)
    shape: tuple[int, ...]
    dtype: np.dtype
    space: gym.Space
    getters: tuple[Callable, ...]  # called one after the other: observation -> array
    group: str | None = None
    nodes: str | None = None  # of links and edges: the group whose rows they connect

    @property
    def is_input(self) -> bool:
        return self.path.split(".")[0] not in NOT_INPUT

    def read(self, obs: Any) -> Any:
        """The array in an observation, or None, which means no rows."""
        for get in self.getters:
            obs = get(obs)
        return obs


def leaves_of(space: gym.Space, path: str = "") -> list[Leaf]:
    """The leaves of `space` in a fixed order. UsageError for a space with no rule, naming it."""
    name = path or "obs"  # of a space that is not inside another
    if isinstance(space, spaces.Graph):
        return graph_leaves(space, name)
    if isinstance(space, spaces.Sequence):
        return sequence_leaves(space, name)
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [array_leaf(space, name)]
    leaves = []
    children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
    for k, child in children:
        for leaf in leaves_of(child, f"{path}.{k}".removeprefix(".")):
            leaves.append(leaf._replace(getters=(itemgetter(k), *leaf.getters)))
    return leaves


def graph_leaves(space: spaces.Graph, path: str) -> list[Leaf]:
    """Nodes, edge_links and, if they have features, edges."""
    nodes = f"{path}.nodes"
    links = f"{path}.edge_links"
    get_links = (attrgetter("edge_links"),)
    leaves = [
        array_leaf(space.node_space, nodes, attrgetter("nodes"))._replace(group=nodes),
        Leaf(links, "links", (2,), np.dtype(np.int32), space, get_links, links, nodes),
    ]
    if space.edge_space is not None:
        edges = array_leaf(space.edge_space, f"{path}.edges", attrgetter("edges"))
        leaves.append(edges._replace(group=links, nodes=nodes))
    return leaves


def sequence_leaves(space: spaces.Sequence, path: str) -> list[Leaf]:
    """The leaves of a row, as ragged ones. With `stack` they are arrays of all rows; without it an
    observation is a tuple of rows, and each row is read on its own."""
    leaves = []
    for leaf in leaves_of(space.feature_space, path):
        if leaf.group:
            raise UsageError(
                f"leaf '{path}': {space} is not supported, its rows must have a fixed shape"
            )
        getters = leaf.getters if space.stack else (partial(read_rows, leaf),)
        leaves.append(leaf._replace(group=path, getters=getters))
    return leaves


def read_rows(leaf: Leaf, rows: Iterable) -> list | None:
    """The arrays of a leaf, one for each row of a Sequence that is a tuple; None if it is empty."""
    return [leaf.read(row) for row in rows] or None


def array_leaf(space: gym.Space, path: str, *getters: Callable) -> Leaf:
    """The leaf of a space whose elements are arrays or numbers."""
    kind = "vector"
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        kind = "discrete"
    elif not isinstance(space, (spaces.Box, spaces.MultiBinary)):
        raise UsageError(
            f"leaf '{path}': {space} is not supported (Box, Discrete, MultiDiscrete, MultiBinary, "
            "Graph, Sequence, Dict and Tuple are)"
        )
    elif isinstance(space, spaces.Box) and len(space.shape) == 3:
        # (height, width) of HWC or CHW; an image has at least 8 x 8 pixels
        pixels = space.shape[:2] if space.shape[2] < space.shape[0] else space.shape[1:]
        kind = "image" if min(pixels) >= 8 else "vector"
    dtype = space.dtype.newbyteorder("=")
    if dtype.kind == "f":
        dtype = np.dtype(np.float32)
    elif dtype.kind == "u" and dtype != np.uint8:  # torch knows no larger unsigned numbers
        dtype = np.dtype(np.int64)
    return Leaf(path, kind, tuple(space.shape), dtype, space, getters)


def num_options(leaf: Leaf) -> np.ndarray:
    """The number of values of each entry of a discrete leaf, int64 [entries]."""
    num = leaf.space.n if isinstance(leaf.space, spaces.Discrete) else leaf.space.nvec
    return np.ravel(num).astype(np.int64)


class Group(NamedTuple):
    """The paths of the leaves of a graph, or of a set, which has no edges."""

    nodes: list[str]  # leaves with a row per node of the graph, or per element of the set
    edges: list[str]  # leaves with a row per edge; the first, edge_links, names their group


def groups_of(leaves: list[Leaf]) -> dict[str, Group]:
    """The graphs and sets among the inputs, by the name of the group of their nodes or elements."""
    groups = {}
    for leaf in leaves:
        if leaf.group and leaf.is_input:
            group = groups.setdefault(leaf.nodes or leaf.group, Group([], []))
            paths = group.edges if leaf.nodes else group.nodes
            paths.append(leaf.path)
    return groups


def element_groups(leaves: list[Leaf]) -> list[str]:
    """The groups that "nodes" can mean, as an action head or in node_ids: the nodes of all graphs;
    without a graph all sets but avail_actions."""
    groups = groups_of(leaves)
    graphs = [name for name, group in groups.items() if group.edges]
    return graphs or [name for name in groups if name != "avail_actions"]


class Flat(NamedTuple):
    """N observations. Observation i has counts[leaf.group][i] rows of a ragged leaf, one of a dense
    leaf. The values are on the host, in a Storage they are tensors on the device."""

    values: list[np.ndarray]  # per leaf [N, ...] (dense) or the rows of all N one after the other
    counts: dict[str, np.ndarray]  # group of ragged leaves -> int64 [N]

    @property
    def size(self) -> int:
        """N: the length of any count or, if all leaves are dense, of any leaf."""
        return len(next(iter(self.counts.values()), self.values[0]))


def join(flats: list[Flat], concatenate: Callable = np.concatenate) -> Flat:
    """The observations of all `flats`, copied by `concatenate`."""
    values, counts = zip(*flats)
    joined = {group: np.concatenate([num[group] for num in counts]) for group in counts[0]}
    return Flat([concatenate(arrays) for arrays in zip(*values)], joined)


# --- end shared: observations ---


# --- shared: environments ---
# ---- Environments: made from the flags, stepped one after the other ----
@cache
def service(name: str, flag: str | None = None):
    """The module cleanrl_graph.NAME; None if this script was copied alone, or another version of
    the package is installed. `flag`, if set, is a flag that needs it: UsageError, not None."""
    try:
        package = importlib.import_module("cleanrl_graph")
    except ModuleNotFoundError:
        package = None
    if getattr(package, "__version__", None) == VERSION:
        return importlib.import_module(f"cleanrl_graph.{name}")
    if flag:
        raise UsageError(
            f"{flag} needs cleanrl_graph {VERSION}: its folder, or an installed package"
        )


def guarded(doing: str, function: Callable, *args, **kwargs) -> Any:
    """function(*args, **kwargs). With utils/check.py an exception becomes a UsageError that reads
    "{doing}{args}: {exception}". Bind by `partial` what it should not show. If `doing` ends with
    " step" or " reset", the result is checked too."""
    check = service("utils.check")
    if check:
        return check.guarded(UsageError, doing, function, *args, **kwargs)
    return function(*args, **kwargs)


def make_env(args: Any, i: int = 0, /, **more) -> gym.Env:
    """Environment i of all ranks in its wrappers, with `more` keyword arguments. `envs:NAME` is one
    of cleanrl_graph unless the current folder has a module `envs`."""
    tasks = args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]
    kwargs = {"disable_env_checker": True} | tasks[i % len(tasks)] | more
    env_id = args.env_id
    hint = ""  # for the error's sentence; without the package there is none
    wrappers = service("envs.wrappers", args.wrap and "--wrap")
    if wrappers:
        env_id, hint = wrappers.full_id(env_id)
    env = guarded(f"--env-id {args.env_id} ({hint})", partial(gym.make, env_id, **kwargs))
    return wrappers.wrap_all(env, args.wrap) if wrappers else env


def aligned(leaves: list[Leaf], parts: list["Part"]) -> list[Leaf]:
    """The leaves, inputs first, with `group` set where the observation space alone cannot tell it.
    A mask gets that of its part's rows; node_ids that of the nodes or elements that act, or of the
    first ones if none act."""
    groups = {part.mask: part.group for part in parts}
    acting = [part.group for part in parts if part.kind != "choice"]  # None outside a Sequence
    # The group that acts; if none of these acts, max returns the first
    groups["node_ids"] = max(element_groups(leaves), key=acting.count, default=None)
    leaves = [leaf._replace(group=groups.get(leaf.path, leaf.group)) for leaf in leaves]
    return sorted(leaves, key=lambda leaf: not leaf.is_input)


# --- end shared: environments ---


# --- shared: steps ---
class Episode(NamedTuple):
    """An episode that ended, or that `play` cut off."""

    env: int  # counted over all ranks
    ret: float  # sum of the rewards
    length: int  # steps
    group: str | None  # info["group"]
    eval: dict  # info["eval"]


class Step(NamedTuple):
    """What N environments returned. Where one is `terminated` or `truncated`, as all are at first,
    a new episode begins."""

    obs: Flat
    reward: np.ndarray  # float32 [N]
    terminated: np.ndarray  # bool [N]
    truncated: np.ndarray  # bool [N]
    finals: list[Flat]  # the last observation of each truncated episode
    episodes: list[Episode]


class Envs:
    """N environments stepped one after the other. Autoreset in the same step: the observation after
    an episode's last step is the first of the next one. UsageError names env, step and action, or
    leaf and value, of what goes wrong."""

    def __init__(self, makers: list[Callable], action_head: str = "auto", first_env: int = 0):
        self.first_env = first_env
        self.num_steps = 0
        self.check = service("utils.check")
        self.envs = [guarded(f"env {first_env + i}", make) for i, make in enumerate(makers)]
        self.action_space = self.envs[0].action_space
        leaves = leaves_of(self.envs[0].observation_space)
        self.parts = [parts_of(env.action_space, leaves, action_head) for env in self.envs]
        if self.check:
            self.check.spaces_fit(UsageError, self.envs, self.parts, leaves)
        self.leaves = aligned(leaves, self.parts[0])
        self.returns = np.zeros(len(makers))  # of the present episodes
        self.lengths = np.zeros(len(makers), np.int64)
        self.observations = [None] * len(makers)  # leaf arrays of the last step

    def reset(self, seed: int | None = None) -> Step:
        """Starts new episodes; env i, counted over all ranks, is seeded with seed + i."""
        # Rows: reward, terminated (1 or 0), truncated (1 or 0). At first all count as terminated
        self.outcome = np.zeros((3, len(self.envs)), np.float32)
        self.outcome[1] = 1
        for i in range(len(self.envs)):
            self.begin(i, None if seed is None else seed + self.first_env + i)
        return self.latest([], [])

    def begin(self, i: int, seed: int | None = None) -> None:
        """Starts an episode of env i."""
        obs, _ = self.call(i, "reset", seed=seed)
        self.observations[i] = self.read(i, obs)
        self.returns[i] = 0.0
        self.lengths[i] = 0

    def latest(self, finals: list[Flat], episodes: list[Episode]) -> Step:
        """The Step made of the last observations and outcomes."""
        obs = self.collate(self.observations, range(len(self.envs)))
        reward, terminated, truncated = self.outcome
        return Step(obs, reward, terminated > 0, truncated > 0, finals, episodes)

    def step(self, actions: list) -> Step:
        """Steps env i with actions[i], an element of its action space."""
        self.num_steps += 1
        self.outcome = np.zeros(self.outcome.shape, np.float32)
        finals = []
        episodes = []
        for i, action in enumerate(actions):
            obs, reward, terminated, truncated, info = self.call(i, "step", action)
            info = info or {}
            if self.check:
                self.check.outcome(self.error, i, reward, info, self.parts[i])
            self.outcome[0, i] = reward
            self.returns[i] += reward
            self.lengths[i] += 1
            if not terminated:
                self.observations[i] = self.read(i, obs)
            if terminated or truncated:
                self.outcome[1 if terminated else 2, i] = 1  # what is both counts as terminated
                if not terminated:
                    finals.append(self.collate([self.observations[i]], [i]))
                if info.get("episode", {}) is not None:  # None: only a life ended (envs/atari.py)
                    episodes.append(self.episode(i, info))
                self.begin(i)
        return self.latest(finals, episodes)

    def episode(self, i: int, info: dict) -> Episode:
        """The present episode of env i; return and length are those of RecordEpisodeStatistics if
        the environment is wrapped in it."""
        stats = {"r": self.returns[i], "l": self.lengths[i]}
        if isinstance(info.get("episode"), dict):
            stats |= info["episode"]
        ret = float(np.sum(stats["r"]))  # older gymnasium's are arrays of one number
        length = int(np.sum(stats["l"]))
        return Episode(self.first_env + i, ret, length, info.get("group"), info.get("eval", {}))

    def call(self, i: int, method: str, *args, **kwargs) -> tuple:
        """What `reset` or `step` of env i returns."""
        doing = f"env {self.first_env + i}, step {self.num_steps}, {method}"
        return guarded(doing, getattr(self.envs[i], method), *args, **kwargs)

    def read(self, i: int, obs: Any) -> list[np.ndarray]:
        """The arrays of one observation of env i, in the order of `leaves`."""
        arrays = []
        for leaf in self.leaves:
            try:
                array = leaf.read(obs)
                if array is None and leaf.group:
                    array = np.zeros((0, *leaf.shape), leaf.dtype)
                arrays.append(np.array(array))  # a copy: the environment may write into it
            except Exception as error:
                problem = f"cannot be read: {type(error).__name__} {error} in {str(obs)[:100]}"
                raise self.error(i, problem, leaf) from None
        return arrays

    def collate(self, observations: list[list[np.ndarray]], envs: Iterable[int]) -> Flat:
        """A Flat of observations, copied; observations[b] is what `read` returned for envs[b]."""
        if self.check:
            self.check.observations(self.error, self.leaves, self.parts, observations, list(envs))
        values = []
        counts = {}
        for leaf, arrays in zip(self.leaves, zip(*observations)):
            if leaf.group:  # cast one by one: int64 with uint64 would become float64
                counts[leaf.group] = np.fromiter(map(len, arrays), np.int64)
                values.append(np.concatenate(arrays, dtype=leaf.dtype, casting="unsafe"))
            else:
                values.append(np.array(arrays, leaf.dtype))
        return Flat(values, counts)

    def error(self, i: int, problem: str, leaf: Leaf | None = None) -> UsageError:
        of_leaf = f", leaf '{leaf.path}'" if leaf else ""
        return UsageError(f"env {self.first_env + i}{of_leaf}, step {self.num_steps}: {problem}")

    def close(self) -> None:
        for env in self.envs:
            if self.check:
                self.check.close(env)
            else:
                env.close()


# --- end shared: steps ---


# --- shared: storage ---
# ---- Storage: every step once, minibatches by index arithmetic ----
class Ragged(NamedTuple):
    """Rows of B observations one after the other; those of b are values[ptr[b]:ptr[b + 1]]. Values
    of "edge_links" are rows of the batch's nodes, as in PyG's Batch."""

    values: Tensor  # [rows, ...]
    ptr: Tensor  # int64 [B + 1]
    batch: Tensor  # int64 [rows], the observation that a row belongs to


Obs = dict[str, Tensor | Ragged]  # leaf path -> [B, ...] (dense) or Ragged


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, from pinned memory, without waiting for the copy."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each k counts[k] numbers from first[k] on: ranges([5, 0], [2, 3]) is [5, 6, 0, 1, 2]."""
    return np.arange(counts.sum()) + (first - (counts.cumsum() - counts)).repeat(counts)


def pack(arrays: list[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Each array on the device, all by one copy."""
    if not arrays:
        return ()
    lengths = [len(array) for array in arrays]
    return to_device(np.concatenate(arrays), device).split(lengths)


def select_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows]; by numpy on the CPU without gradients, 2 to 5 times faster."""
    if values.requires_grad or values.device.type != "cpu":
        return values.index_select(0, rows)
    return torch.from_numpy(values.numpy().take(rows.numpy(), 0))


class Storage:
    """Observations on `device`. With N environments number t * N + i is step t of env i."""

    def __init__(self, leaves: list[Leaf], device: torch.device):
        self.leaves = leaves
        self.device = device
        self.blocks = []  # what was appended, each a Flat with tensors as values

    def copy(self, flat: Flat) -> Flat:
        """The same observations with tensors on the device as values, by one copy per leaf."""
        return Flat([to_device(array, self.device) for array in flat.values], flat.counts)

    def append(self, flat: Flat) -> Obs:
        """Adds observations and returns them as a batch."""
        self.blocks.append(self.copy(flat))
        return self.batch(self.blocks[-1])

    def whole(self) -> Flat:
        """All observations. They are joined once and stay one block."""
        if len(self.blocks) > 1:
            self.blocks = [join(self.blocks, torch.cat)]
        return self.blocks[0]

    def gather(self, idx: np.ndarray) -> Obs:
        """The observations `idx` (int64 [B], repeats allowed): one selection of rows per leaf."""
        values, counts = self.whole()
        groups = [None, *counts]  # None: of dense leaves
        indices = pack([self.places(idx, group) for group in groups], self.device)
        places = dict(zip(groups, indices))  # group -> int64 [rows of the minibatch]
        rows = [select_rows(array, places[leaf.group]) for leaf, array in zip(self.leaves, values)]
        return self.batch(Flat(rows, {group: num[idx] for group, num in counts.items()}))

    def places(self, idx: np.ndarray, group: str | None) -> np.ndarray:
        """The indices in a group's leaves of all rows of the observations `idx`, one observation
        after the other, int64; of dense leaves (None) `idx` itself."""
        if group is None:
            return idx
        num = self.whole().counts[group]
        return ranges((num.cumsum() - num)[idx], num[idx])

    def select(self, actions: Tensor, idx: np.ndarray, group: str | None) -> Tensor:
        """The rows of `actions` that belong to the observations `idx`. `actions` has one row per
        stored observation (`group` None) or, for a Sequence, one per stored row of `group`."""
        return actions[to_device(self.places(idx, group), self.device)]

    def batch(self, flat: Flat) -> Obs:
        """A Flat of tensors as the network sees it. All ptr and batch reach the device in one
        copy."""
        arrays = []  # ptr and batch of the first group, of the second one, ...
        for num in flat.counts.values():
            arrays += [np.append(0, num.cumsum()), np.arange(len(num)).repeat(num)]
        arrays = pack(arrays, self.device)
        index = dict(zip(flat.counts, zip(arrays[::2], arrays[1::2])))  # group -> (ptr, batch)
        obs = {}
        for leaf, rows in zip(self.leaves, flat.values):
            if leaf.kind == "links":  # node indices of each graph become those of the batch
                first_node = select_rows(index[leaf.nodes][0], index[leaf.group][1])
                rows = rows + first_node[:, None]
            obs[leaf.path] = Ragged(rows, *index[leaf.group]) if leaf.group else rows
        return obs


# --- end shared: storage ---


# --- shared: encoder ---
# ---- Encoder: one small network per leaf kind, concatenated ----
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}


def layer_init(layer: nn.Module, std: float = np.sqrt(2)) -> nn.Module:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.zeros_(layer.bias)
    return layer


def mlp(widths: list[int], activation: str) -> nn.Sequential:
    """Linear layers widths[0] -> widths[1] -> ..., an activation after each, also the last."""
    layers = []
    for num_in, num_out in zip(widths, widths[1:]):
        layers += [layer_init(nn.Linear(num_in, num_out)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def segment(values: Tensor, ptr: Tensor, reduce: str = "sum") -> Tensor:
    """Sums, means or maxima ("max") of values[ptr[b]:ptr[b + 1]], [B, ...]. An empty segment has
    the sum and mean 0 and the maximum -inf."""
    initial = None if reduce == "max" else 0
    return torch.segment_reduce(values, reduce, offsets=ptr, axis=0, initial=initial, unsafe=True)


class Rows(nn.Module):
    """A leaf's rows as floats [rows, dim], one row per observation if it is dense. Vectors are
    flattened. Categories are one-hot, or embedded if there are more than 64. Links have dim 0. With
    `norm_obs` a Box is normalised by mean and std of all rows that `observe` was given, and clipped
    to -10..10."""

    def __init__(self, leaf: Leaf, norm_obs: bool):
        super().__init__()
        self.entries = math.prod(leaf.shape)
        self.dim = 0 if leaf.kind == "links" else self.entries
        self.num = 0  # categories of all entries together, 0 if the leaf is not discrete
        if leaf.kind == "discrete":
            num = num_options(leaf)
            # Value v of entry k is category v + shift[k]
            shift = num.cumsum() - num - np.ravel(leaf.space.start)
            self.register_buffer("shift", torch.as_tensor(shift), persistent=False)
            self.num = int(num.sum())
            self.dim = min(self.num, 64)
            if self.num > 64:
                self.embedding = nn.EmbeddingBag(self.num, self.dim, mode="sum")
        self.norm_obs = norm_obs and isinstance(leaf.space, spaces.Box)
        if self.norm_obs:
            zeros = torch.zeros(self.dim, dtype=torch.float64)
            self.register_buffer("count", zeros.sum())
            self.register_buffer("mean", zeros)
            self.register_buffer("var", torch.ones_like(zeros))

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Adds the rows of all ranks to the running mean and variance (Chan et al. 1979, eq.
        2.1)."""
        values = values[..., None].flatten(1).double()
        num_rows = max(len(values), 1)
        mean = values.sum(0) / num_rows
        var = ((values - mean) ** 2).sum(0) / num_rows
        for num, new_mean, new_var in all_ranks((len(values), mean, var)):
            if num > 0:
                share = num / (self.count + num)
                delta = new_mean.to(self.mean) - self.mean
                self.var += share * (new_var.to(delta) - self.var + (1 - share) * delta**2)
                self.mean += share * delta
                self.count += num

    def forward(self, values: Tensor) -> Tensor:
        values = values.reshape(len(values), self.entries)
        if self.norm_obs:
            std = (self.var + 1e-8).sqrt().float()
            return ((values.float() - self.mean.float()) / std).clamp(-10, 10)
        if self.num == 0:
            return values[:, : self.dim].float()  # no columns of links
        if self.num > 64:
            return self.embedding(values + self.shift)
        zeros = torch.zeros(len(values), self.num, device=values.device)
        return zeros.scatter_(1, values + self.shift, 1.0)


class CNN(nn.Module):
    """Features [rows, 512] of images CHW, or HWC if the last side is the smaller one.
    ppo_framestack gives [rows, num_frames, *image], whose frames become channels. uint8 is scaled
    to 0..1. Layers: those of Mnih et al. 2015, or two of 3 x 3 if a side is below 36 pixels."""

    def __init__(self, leaf: Leaf, num_frames: int = 1):
        super().__init__()
        self.dim = 512
        self.norm_obs = False  # read by Encoder.observe; images are not normalised
        self.scale = 1 / 255 if leaf.dtype == np.uint8 else 1.0
        self.channels_last = leaf.shape[2] < leaf.shape[0]
        channels, height, width = np.roll(leaf.shape, self.channels_last).tolist()  # HWC to CHW
        spec = [(32, 3, 2), (64, 3, 1)]  # channels, kernel, stride
        if min(height, width) >= 36:
            spec = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        layers = []
        num_in = channels * num_frames
        for num_out, kernel, stride in spec:
            layers += [layer_init(nn.Conv2d(num_in, num_out, kernel, stride)), nn.ReLU()]
            num_in = num_out
        self.net = nn.Sequential(*layers, nn.Flatten())
        num_features = self.net(torch.zeros(1, channels * num_frames, height, width)).shape[1]
        self.net.append(layer_init(nn.Linear(num_features, self.dim))).append(nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.movedim(-1, -3)
        return self.net(images.flatten(1, -3).float() * self.scale)


def make_conv(kind: str, dim: int, edge_dim: int | None, aggr: str) -> nn.Module:
    """A PyG layer dim -> dim; any with forward(x, edge_index[, edge_attr]) can stand here."""
    from torch_geometric import nn as pyg  # two seconds, for graphs only

    if kind in ("gatv2", "transformer"):
        attention = pyg.GATv2Conv if kind == "gatv2" else pyg.TransformerConv
        return attention(dim, dim // 4, heads=4, edge_dim=edge_dim)
    if kind == "sage":
        return pyg.SAGEConv(dim, dim, aggr=aggr)
    if kind not in ("gine", "gin"):
        raise UsageError(f"--gnn {kind}: make_conv knows no such layer")
    net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
    if not edge_dim:
        return pyg.GINConv(net, aggr=aggr)
    if kind == "gine":
        return pyg.GINEConv(net, edge_dim=edge_dim, aggr=aggr)
    return service("utils.layers", "--gnn gin").GINWithEdges(net, dim, edge_dim, aggr)


class GNN(nn.Module):
    """Node embeddings [nodes, dim] of a batch of graphs in PyG's convention. Residual layers with
    pre-norm: h + relu(conv(norm(h)))."""

    def __init__(self, node_dim: int, edge_dim: int | None, args: Any):
        super().__init__()
        dim = args.gnn_dim
        self.embed = nn.Linear(node_dim, dim)
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for _ in range(args.gnn_layers):
            self.convs.append(make_conv(args.gnn, dim, edge_dim, args.gnn_aggr))
            self.norms.append(nn.LayerNorm(dim))
        inputs = inspect.signature(self.convs[0].forward).parameters
        self.takes_edge_attr = edge_dim and "edge_attr" in inputs
        layers = service("utils.layers")
        self.faster = layers and layers.faster

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = self.embed(x)
        edges = (edge_index, edge_attr) if self.takes_edge_attr else (edge_index,)
        # A function (conv, h) -> conv's output that writes no row per edge, or None
        call = self.faster and self.faster(self.convs[0], edge_index, edge_attr, len(x))
        for conv, norm in zip(self.convs, self.norms):
            messages = call(conv, norm(h)) if call else conv(norm(h), *edges)
            h = h + messages.relu()
        return h


class Elements(NamedTuple):
    """Rows of B observations that an action can choose, or that each have an action: nodes or set
    elements with their embeddings, or edges with their features and both ends."""

    values: Tensor  # [rows, dim]
    ptr: Tensor  # int64 [B + 1]
    batch: Tensor  # int64 [rows]
    ends: Tensor | None = None  # of edges: int64 [edges, 2], rows of `nodes`: source and target
    nodes: Tensor | None = None  # of edges: embeddings [nodes, dim]

    def at(self, rows: Tensor) -> Tensor:
        """Vectors [len(rows), dim] of these rows; of edges source, target and features side by
        side."""
        chosen = self.values[rows]
        if self.ends is None:
            return chosen
        return torch.cat([self.nodes[self.ends[rows]].flatten(1), chosen], 1)


class Encoder(nn.Module):
    """Observation -> (features [B, dim], elements {group: Elements}). Dense leaves enter as they
    are, images through a CNN, graphs through a GNN, sets through an MLP per row; a readout makes
    one vector of each graph or set."""

    def __init__(self, leaves: list[Leaf], args: Any):
        super().__init__()
        self.leaves = [leaf for leaf in leaves if leaf.is_input]
        self.dense = [leaf.path for leaf in self.leaves if leaf.group is None]
        self.groups = groups_of(leaves)
        self.readouts = ["mean", "max"] if args.readout == "meanmax" else [args.readout]
        self.rows = nn.ModuleDict()  # key(path of a leaf) -> Rows or CNN
        for leaf in self.leaves:
            is_image = leaf.kind == "image"
            self.rows[key(leaf.path)] = CNN(leaf) if is_image else Rows(leaf, args.norm_obs)
        dim = args.gnn_dim
        self.nets = nn.ModuleDict()  # key(name of a group) -> GNN or MLP
        self.element_dims = dict.fromkeys(self.groups, dim)  # group -> width of `Elements.at`
        self.dim = self.dim_of(self.dense)  # of the features
        for name, group in self.groups.items():
            node_dim = self.dim_of(group.nodes)
            if group.edges:
                edge_dim = self.dim_of(group.edges)
                self.nets[key(name)] = GNN(node_dim, edge_dim or None, args)
                self.element_dims[group.edges[0]] = 2 * dim + edge_dim
            else:
                self.nets[key(name)] = mlp([node_dim, dim, dim], args.activation)
            self.dim += len(self.readouts) * dim + 1  # as `pool` returns

    def dim_of(self, paths: list[str]) -> int:
        return sum(self.rows[key(path)].dim for path in paths)

    def forward(self, obs: Obs) -> tuple[Tensor, dict[str, Elements]]:
        features = [self.rows[key(path)](obs[path]) for path in self.dense]
        elements = {}
        for name, group in self.groups.items():
            _, ptr, batch = obs[group.nodes[0]]
            x = self.features_of(group.nodes, obs)  # [nodes or elements of the set, any]
            if group.edges:
                links, edge_ptr, edge_batch = obs[group.edges[0]]  # links [edges, 2]
                edge_attr = self.features_of(group.edges, obs)
                x = self.nets[key(name)](x, links.t().contiguous(), edge_attr)
                edges = Elements(edge_attr, edge_ptr, edge_batch, links, x)
                elements[group.edges[0]] = edges
            else:
                x = self.nets[key(name)](x)
            elements[name] = Elements(x, ptr, batch)
            features.append(self.pool(x, ptr, batch))
        return torch.cat(features, 1), elements

    def features_of(self, paths: list[str], obs: Obs) -> Tensor:
        """The leaves of a group side by side, [rows, dim]."""
        return torch.cat([self.rows[key(path)](obs[path].values) for path in paths], 1)

    def observe(self, obs: Obs) -> None:
        """Adds the rows of the observations to the statistics of --norm-obs."""
        for leaf in self.leaves:
            net = self.rows[key(leaf.path)]
            if net.norm_obs:
                rows = obs[leaf.path]
                net.observe(rows.values if leaf.group else rows)

    def pool(self, rows: Tensor, ptr: Tensor, batch: Tensor) -> Tensor:
        """Rows [rows, dim] to [B, len(readouts) * dim + 1]; the last is log(1 + number of rows)."""
        counts = ptr.diff()[:, None]
        sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, batch, rows)
        pooled = {"sum": sums, "mean": sums / counts.clamp(min=1)}
        if "max" in self.readouts:  # zero where there are no rows; faster than `segment`
            numbers = torch.arange(len(rows), device=rows.device)
            pooled["max"] = nn.functional.embedding_bag(
                numbers, rows, ptr, mode="max", include_last_offset=True
            )
        return torch.cat([*map(pooled.get, self.readouts), counts.log1p()], 1)


def key(path: str) -> str:
    """The key of a leaf's path in a ModuleDict, where dots and names such as "keys" are refused."""
    return "leaf/" + path.replace(".", "/")


# --- end shared: encoder ---


# --- shared: action heads ---
# ---- Action heads: sample, log-probability and entropy over any action space, [B, columns] ----
LOWEST = torch.finfo(torch.float32).min  # for -inf in an entropy: 0 * -inf would be nan


class Categorical:
    """One of n options, logits [B, n], -inf for those that are masked. Unlike torch's Categorical
    its actions, log-probabilities and entropies are [B, 1]. `best` and `total` reduce over the
    options; `Choice` has its own."""

    def __init__(self, logits: Tensor):
        self.log_probs = logits.log_softmax(-1)

    @property
    def mode(self) -> Tensor:
        return self.best(self.log_probs)

    def sample(self) -> Tensor:
        noise = torch.empty_like(self.log_probs).exponential_().log()  # minus Gumbel noise
        return self.best(self.log_probs - noise)

    def best(self, score: Tensor) -> Tensor:
        return score.argmax(-1, keepdim=True)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action.long())

    def entropy(self) -> Tensor:
        return self.total(-self.log_probs.exp() * self.log_probs.clamp(min=LOWEST))

    def total(self, terms: Tensor) -> Tensor:
        return terms.sum(-1, keepdim=True)


class Choice(Categorical):
    """One of the rows of each observation; logits [rows], those of what is not allowed -inf."""

    def __init__(self, logits: Tensor, elements: Elements):
        self.ptr = elements.ptr
        self.batch = elements.batch
        logits = logits - segment(logits.detach(), self.ptr, "max")[self.batch]
        log_total = segment(logits.exp(), self.ptr).log()
        self.log_probs = logits - select_rows(log_total, self.batch)

    def best(self, score: Tensor) -> Tensor:
        is_best = score == segment(score, self.ptr, "max")[self.batch]
        # double: float32 cannot tell the numbers of rows above 2**24 apart
        rows = torch.arange(len(score), dtype=torch.double, device=score.device)
        best = segment(rows * is_best, self.ptr, "max").long()  # of equal ones the last
        return (best - self.ptr[:-1])[:, None]  # counted within each observation

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs[self.ptr[:-1, None] + action.long()]

    def total(self, terms: Tensor) -> Tensor:
        return segment(terms, self.ptr)[:, None]


class Part(NamedTuple):
    """One factor of the action: `kind` is "categorical", "choice" (a row of the observation),
    "bits" or "normal"."""

    path: str  # in the action space: "action.amount"
    kind: str
    columns: slice  # the part's own in the action [B, columns]
    group: str | None  # a choice is one of its rows; in a Sequence each of its rows has an action
    mask: str | None  # path of the mask's leaf
    entries: slice  # the part's own in a row of the mask
    space: str  # to compare environments; only `start` of a choice, whose size may differ
    size: int  # number of options, bits or dimensions; of a choice, the most rows allowed


def parts_of(space: gym.Space, leaves: list[Leaf], head: str) -> list[Part]:
    """The factors of an action space, or of each row of a Sequence, in order. UsageError for what
    does not fit."""
    per_row = isinstance(space, spaces.Sequence)
    factors = leaves_of(space.feature_space if per_row else space, "action")
    heads = infer_heads(space, factors, leaves) if head == "auto" else [head] * len(factors)
    choices = [groups_named(head, leaves) for head in heads]  # several groups are refused below
    parts = []
    column = 0  # the first one that belongs to no part yet
    entry = Counter()  # path of a mask -> its first entry that belongs to no part yet
    for factor, groups in zip(factors, choices):
        group = groups[0] if groups else None
        kind, sizes = kind_of(factor, group and not per_row)
        mask = mask_of(factor, group, leaves)
        mask_path = mask.path if mask else None
        text = str(factor.space.start if kind == "choice" else factor.space)
        for size in sizes:
            columns = slice(column, column + (1 if factor.kind == "discrete" else size))
            entries = slice(entry[mask_path], entry[mask_path] + (1 if kind == "choice" else size))
            parts.append(Part(factor.path, kind, columns, group, mask_path, entries, text, size))
            column = columns.stop
            if mask and mask.shape:  # a mask of one number per row is for all parts
                entry[mask_path] = entries.stop
    check = service("utils.check")
    if check:
        check.parts(UsageError, space, factors, parts, leaves, heads, choices)
    return parts


def kind_of(factor: Leaf, is_choice: bool) -> tuple[str, list[int]]:
    """(kind of the parts of a factor, their sizes). Each entry of a MultiDiscrete is a part."""
    if factor.kind == "discrete":
        kind = "choice" if is_choice else "categorical"
        return kind, num_options(factor).tolist()
    kind = "bits" if isinstance(factor.space, spaces.MultiBinary) else "normal"
    return kind, [math.prod(factor.shape)]


def mask_of(factor: Leaf, group: str | None, leaves: list[Leaf]) -> Leaf | None:
    """The mask of a factor: that of the whole action, or of its name."""
    own = factor.path.replace("action", "action_mask", 1)
    for leaf in leaves:
        fits = factor.kind == "discrete" and bool(leaf.group) == bool(group)
        if leaf.path in ("action_mask", own) and fits:
            return leaf


def infer_heads(space: gym.Space, factors: list[Leaf], leaves: list[Leaf]) -> list[str]:
    """What --action-head auto means for each factor. A Sequence has an action for each node. In a
    Dict a Discrete named node, edge, or like a set, chooses one. If all factors are Discrete and
    none is named so, they choose from avail_actions if the observation has these, from the nodes if
    the action_mask has a row for each. All others are flat."""
    if isinstance(space, spaces.Sequence):
        return ["nodes"] * len(factors)
    heads = []
    for factor in factors:
        name = factor.path.removeprefix("action.")
        is_named = isinstance(space, spaces.Dict) and groups_named(name, leaves)
        heads.append(name if is_named and factor.kind == "discrete" else "flat")
    if set(heads) == {"flat"} and all(factor.kind == "discrete" for factor in factors):
        if groups_named("avail_actions", leaves):
            return ["avail_actions"] * len(factors)
        if any(leaf.group and leaf.path.startswith("action_mask") for leaf in leaves):
            return ["nodes"] * len(factors)
    return heads


def groups_named(name: str, leaves: list[Leaf]) -> list[str]:
    """The groups of rows that a name, an --action-head or a key of a Dict of actions, can mean. If
    they are none or several, utils/check.py refuses the name as an action head."""
    if name in ("node", "nodes"):
        return element_groups(leaves)
    if name in ("edge", "edges"):
        return [leaf.path for leaf in leaves if leaf.kind == "links"]
    is_group = name != "flat" and any(leaf.group == name and leaf.is_input for leaf in leaves)
    return [name] if is_group else []


def to_env_actions(space: gym.Space, actions: np.ndarray, counts: np.ndarray | None = None) -> list:
    """B elements of `space` from actions [B, columns]; those of a Box are clipped to it. A Sequence
    has actions [rows, columns]: element b is made of the next counts[b] rows."""
    if isinstance(space, spaces.Sequence):
        each = space.feature_space
        rows = np.split(actions, counts.cumsum()[:-1])
        elements = [tuple(to_env_actions(each, own)) for own in rows]
        if space.stack:
            elements = [np.array(own, each.dtype).reshape(-1, *each.shape) for own in elements]
        return elements
    if isinstance(space, spaces.Dict):
        rows = to_env_actions(spaces.Tuple(space.values()), actions)
        return [dict(zip(space, row)) for row in rows]
    if isinstance(space, spaces.Tuple):
        stops = np.cumsum([num_columns(child) for child in space])  # map drops the empty last piece
        return list(zip(*map(to_env_actions, space, np.split(actions, stops, 1))))
    values = actions.reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        return list(values.clip(space.low, space.high).astype(space.dtype))
    values = values.astype(space.dtype) + getattr(space, "start", 0)
    return values.tolist() if isinstance(space, spaces.Discrete) else list(values)


def num_columns(space: gym.Space) -> int:
    """The number of columns that actions of this space have in [B, columns]."""
    return sum(math.prod(leaf.shape) for leaf in leaves_of(space))


class PartHead(nn.Module):
    """The distribution of one part of an action, given a latent [B, dim] ([rows, dim] in a
    Sequence). `dims` are the encoder's element_dims: group -> width of `Elements.at`."""

    def __init__(self, part: Part, dim: int, query_dim: int, dims: dict[str, int], args: Any):
        super().__init__()
        self.part = part
        self.log_std = None
        num_outputs = part.size
        if part.kind == "choice":
            num_outputs = query_dim
        elif part.kind == "normal" and args.state_dependent_std:
            num_outputs = 2 * part.size
        elif part.kind == "normal":
            self.log_std = nn.Parameter(torch.zeros(part.size))
        self.output = layer_init(nn.Linear(dim, num_outputs), 0.01)  # nearly uniform at first
        if part.kind == "choice":
            self.score = layer_init(nn.Linear(query_dim, 1), 0.01)
            self.key = nn.Linear(dims[part.group], query_dim)
        self.condition = None  # with --autoregressive, how the next latent depends on this part

    def forward(
        self, latent: Tensor, elements: dict[str, Elements], obs: Obs
    ) -> Categorical | Bernoulli | Normal:
        """Its log_prob and entropy are [B, columns of the part]."""
        output = self.output(latent)
        if self.part.kind == "bits":
            return Bernoulli(logits=output, validate_args=False)
        if self.part.kind == "normal":
            log_std = self.log_std
            if log_std is None:
                output, log_std = output.chunk(2, 1)
            return Normal(output, log_std.exp(), validate_args=False)
        if self.part.kind == "categorical":
            return Categorical(self.masked(output, obs))
        options = elements[self.part.group]
        keys = project(self.key, options)
        query = select_rows(output, options.batch)
        logits = self.score(torch.tanh(keys + query)).squeeze(1)
        logits = logits + (keys * query).sum(1) / keys.shape[1] ** 0.5
        return Choice(self.masked(logits, obs), options)

    def masked(self, logits: Tensor, obs: Obs) -> Tensor:
        """-inf where the mask is 0."""
        mask = obs.get(self.part.mask)
        if mask is None:
            return logits
        if self.part.group:
            mask = mask.values
        mask = mask[..., None].flatten(1)[:, self.part.entries]  # [B, or rows, entries]
        return torch.where(mask.reshape(logits.shape) != 0, logits, -torch.inf)


def project(linear: nn.Linear, elements: Elements) -> Tensor:
    """`linear` of each row; of edges relu(linear(source, target, features)). Nodes are multiplied
    before they are selected: that is once per node, not once per edge."""
    if elements.ends is None:
        return linear(elements.values)
    dim = elements.nodes.shape[1]
    *end_weights, edge_weight = linear.weight.tensor_split([dim, 2 * dim], 1)
    projected = nn.functional.linear(elements.values, edge_weight, linear.bias)
    for weight, end in zip(end_weights, elements.ends.unbind(1)):  # source, target
        projected = projected + select_rows(elements.nodes @ weight.t(), end)
    return projected.relu()


# --- end shared: action heads ---


# --- shared: action head ---
class ActionHead(nn.Module):
    """The policy's distribution over any action space, from the actor's latent [B, dim] and the
    elements. A choice scores row e by w . tanh(k + q) + k . q / sqrt(d) with key k = W e and query
    q = U latent: the score of a pointer network plus that of dot-product attention (Vaswani et al.
    2017). Of an edge k = ReLU(W (source, target, features)). With `autoregressive` the parts are
    drawn in sequence, choices first. Each updates the latent of the next; the entropy is the sum of
    theirs, each given the parts drawn before it. In a Sequence each row has its own latent and
    action; log-probability and entropy are sums over the rows."""

    def __init__(self, space: gym.Space, leaves: list[Leaf], dim: int, dims: dict, args: Any):
        super().__init__()
        self.space = space
        self.parts = parts_of(space, leaves, args.action_head)
        # Numbers of the parts, choices first
        self.order = sorted(range(len(self.parts)), key=lambda k: self.parts[k].kind != "choice")
        nodes = {leaf.group: leaf.nodes for leaf in leaves if leaf.nodes}  # edges' group -> nodes'
        self.heads = nn.ModuleList()
        for k, part in enumerate(self.parts):
            # The width of an embedding, for edges that of their nodes; None without a group
            query_dim = dims.get(nodes.get(part.group, part.group))
            head = PartHead(part, dim, query_dim, dims, args)
            if args.autoregressive and k != self.order[-1]:
                head.condition = nn.Linear(seen_dim([part], dims), dim)
            self.heads.append(head)
        self.per_row = None  # of a Sequence: the group whose rows have an action each
        if isinstance(space, spaces.Sequence):
            self.per_row = self.parts[0].group
            self.row = nn.Linear(dims[self.per_row], dim)  # embedding of a row -> its latent

    def forward(
        self,
        latent: Tensor,
        elements: dict[str, Elements],
        obs: Obs,
        action: Tensor | None = None,
        greedy: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(action [B, columns], log_prob [B], entropy [B]) of the given action, else of the mode if
        `greedy`, else of a sample. Entropy is 0 unless the action is given, as in an update. Of a
        Sequence action is [rows, columns]. `obs` has the masks."""
        if self.per_row:
            acting = elements[self.per_row]
            latent = select_rows(latent, acting.batch) + project(self.row, acting)
            latent = torch.tanh(latent)
        log_prob = 0.0
        entropy = latent.new_zeros(len(latent))
        columns = [None] * len(self.parts)
        for k in self.order:
            part = self.parts[k]
            head = self.heads[k]
            probs = head(latent, elements, obs)
            if action is not None:
                columns[k] = action[:, part.columns].float()  # bits may be stored as integers
                entropy = entropy + probs.entropy().sum(1)
            elif greedy:
                columns[k] = probs.mode.nan_to_num()  # bits have nan at 0.5
            else:  # Normal.sample would wait for the device
                columns[k] = probs.rsample() if part.kind == "normal" else probs.sample()
            log_prob = log_prob + probs.log_prob(columns[k]).sum(1)
            if head.condition:
                before = self.embed(part, columns[k], elements)
                latent = torch.tanh(latent + head.condition(before))
        if self.per_row:
            # float32 would lose digits of the ratio in a sum over many rows
            log_prob = segment(log_prob.double(), acting.ptr)
            entropy = segment(entropy, acting.ptr)
        return torch.cat(columns, 1), log_prob, entropy

    def embed(self, part: Part, action: Tensor, elements: dict[str, Elements]) -> Tensor:
        """One part of an action as a network's input, [B, seen_dim([part], dims)]: vector of the
        chosen row, a one-hot vector, or the numbers themselves."""
        if part.kind == "choice":
            options = elements[part.group]
            return options.at(options.ptr[:-1] + action.long().squeeze(1))
        if part.kind == "categorical":
            action = nn.functional.one_hot(action.long().squeeze(1), part.size)
        return action.float()

    def env_actions(self, action: Tensor, counts: dict[str, np.ndarray]) -> list:
        """Elements of the action space for the environments, whose observations have `counts`."""
        return to_env_actions(self.space, action.cpu().numpy(), counts.get(self.per_row))


def seen_dim(parts: list[Part], dims: dict[str, int]) -> int:
    """The width of `ActionHead.embed` of these parts together."""
    return sum(dims[part.group] if part.kind == "choice" else part.size for part in parts)


# --- end shared: action head ---


# ---- Memory: none; the observations and actions of a rollout ----
class Memory:
    """The steps of a rollout of N environments: number t * N + i is step t of env i."""

    def __init__(self, agent: "Agent", leaves: list[Leaf], num_envs: int, args: Any):
        self.agent = agent
        self.storage = Storage(leaves, next(agent.parameters()).device)

    def begin(self) -> None:
        """A rollout begins: what was stored is let go."""
        self.storage.blocks.clear()
        self.actions = []
        self.finals = []  # the last observations of episodes that were truncated

    @torch.no_grad()
    def act(self, step: Step, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(action [N, columns], log_prob [N], value [N]) at the observations of `step`, which are
        stored."""
        obs = self.storage.append(step.obs)
        action, log_prob, _, value = self.agent(obs, greedy=greedy)
        self.actions.append(action)
        return action, log_prob, value

    def keep(self, step: Step) -> None:
        """Keeps what is needed to value the last observations of episodes that `step` truncated."""
        self.finals += step.finals

    @torch.no_grad()
    def next_values(self, step: Step) -> Tensor:
        """V [N + truncations]: of `step.obs`, which the last actions led to, then of `finals`."""
        flat = self.storage.copy(join([step.obs, *self.finals]))
        return self.agent.value(self.storage.batch(flat))

    def minibatches(self, rng: np.random.Generator, num: int) -> Iterator[tuple[np.ndarray, tuple]]:
        """The rollout's steps in `num` random parts. Of each: its numbers int64 [M], as in Storage,
        and the agent's inputs."""
        return self.batches(rng.permutation(self.storage.whole().size), num)

    @torch.no_grad()
    def evaluate(self, num: int) -> tuple[Tensor, Tensor]:
        """(log_prob [T * N], value [T * N]) of the rollout's steps and actions by the present
        weights, computed in `num` batches."""
        log_probs = []
        values = []
        for _, inputs in self.batches(np.arange(self.storage.whole().size), num):
            _, log_prob, _, value = self.agent(*inputs)
            log_probs.append(log_prob)
            values.append(value)
        return torch.cat(log_probs), torch.cat(values)

    def batches(self, steps: np.ndarray, num: int) -> Iterator[tuple[np.ndarray, tuple]]:
        """`steps` (int64, numbers as in Storage) in `num` parts, in the order given. Of each: what
        `minibatches` returns."""
        actions = torch.cat(self.actions)
        for idx in np.array_split(steps, num):
            obs = self.storage.gather(idx)
            yield idx, (obs, self.storage.select(actions, idx, self.agent.head.per_row))

    def rollout(self) -> Obs:
        """All observations of the rollout."""
        return self.storage.batch(self.storage.whole())

    def state(self) -> None:
        """What a checkpoint keeps: nothing."""

    def restore(self, state: None) -> None:
        pass


def max_minibatches(args: Any) -> int:
    """The largest --num-minibatches: one for each step of a rollout."""
    return args.num_envs * args.num_steps


# ---- Agent: the networks ----
class Agent(nn.Module):
    """One encoder, from whose features `actor` makes the action head's latent and `critic` V."""

    def __init__(self, leaves: list[Leaf], action_space: gym.Space, args: Any):
        super().__init__()
        self.encoder = Encoder(leaves, args)
        widths = [self.encoder.dim, *args.hidden_dims]
        self.actor = mlp(widths, args.activation)
        self.critic = mlp(widths, args.activation)
        self.critic.append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        dims = self.encoder.element_dims
        self.head = ActionHead(action_space, leaves, widths[-1], dims, args)

    def forward(self, obs: Obs, action: Tensor | None = None, greedy: bool = False):
        """(action [B, columns], log_prob [B], entropy [B], value [B])"""
        features, elements = self.encoder(obs)
        outputs = self.head(self.actor(features), elements, obs, action, greedy)
        return *outputs, self.critic(features).squeeze(1)

    def value(self, obs: Obs) -> Tensor:
        """V(observation), [B]"""
        features, _ = self.encoder(obs)
        return self.critic(features).squeeze(1)


# --- shared: ranks ---
# ---- Ranks: the processes of torchrun, each with its own environments ----
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def all_ranks(value: Any) -> list:
    """The value of every rank, on every rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def average_gradients(agent: nn.Module) -> None:
    """Replaces each gradient by its mean over all ranks, in one all-reduce."""
    if WORLD_SIZE > 1:
        grads = [param.grad for param in agent.parameters() if param.grad is not None]
        total = nn.utils.parameters_to_vector(grads)  # of this rank, of all after all_reduce
        dist.all_reduce(total)
        nn.utils.vector_to_parameters(total / WORLD_SIZE, grads)


def start(args: Any) -> torch.device:
    """The device of this rank. Connects the ranks, and sets torch's threads and all seeds."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and args.cuda:
        device = torch.device(f"cuda:{LOCAL_RANK}")
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        atexit.register(dist.destroy_process_group)  # its threads may abort a process that ends
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)  # more are slower on busy cores
    process = service("utils.process")
    if process:
        process.tune()
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed + RANK)
    np.random.seed(args.seed + RANK)
    torch.manual_seed(args.seed)  # for the same weights on all ranks
    return device


def make_envs(args: Any) -> Any:
    """The environments of this rank, in worker processes if --num-workers says so."""
    first_env = RANK * args.num_envs
    makers = [partial(make_env, args, first_env + i) for i in range(args.num_envs)]
    if args.num_workers:
        workers = service("utils.workers", "--num-workers")
        return workers.WorkerEnvs(Envs, makers, args, first_env)
    return Envs(makers, args.action_head, first_env)


# --- end shared: ranks ---


# --- shared: run ---
# ---- Run: its folder, log and model ----
class Run(contextlib.ExitStack):
    """The folder of a run, its log and its progress bar. With utils/checkpoint.py it also has a
    lock and checkpoints, from which it resumes, and it ends after an update when a signal came."""

    def __init__(self, args: Any):
        super().__init__()
        self.args = args
        self.flags = dict(vars(args))  # for model.pt, before a memory changes any
        self.script = type(args).exp_name  # the default, which is the name of this file
        self.steps = args.batch_size * WORLD_SIZE  # of all ranks, per update
        self.first = 0  # updates made before the run was resumed
        self.signals = []  # received so far; utils/checkpoint.py puts its own list here
        self.recent = deque(maxlen=100)  # returns of the last episodes
        self.extras = service("utils.log", args.track and "--track")
        self.checkpoints = service("utils.checkpoint", args.resume and "--resume")
        if self.checkpoints:
            self.checkpoints.open_run(self)
        elif RANK == 0:
            env_name = args.env_id.split(":")[-1]
            name = f"{env_name}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
            self.folder = os.path.abspath(os.path.join(args.run_dir, name))
            print(
                f"writes to {self.folder}\nruns alone: without cleanrl_graph {VERSION} there are "
                "no checkpoints, workers or evaluation tables"
            )

    def begin(self, agent, optimizer, memory, envs, rng) -> Step:
        """The Step to begin with. Loads --load-model's weights, gives each rank random numbers of
        its own, puts back what a checkpoint holds and opens the log."""
        args = self.args
        self.trained = (agent, optimizer, memory, envs, rng)
        if args.load_model:
            service("utils.policy", "--load-model").load_weights(agent, args)
        if RANK > 0:  # the weights are made: from here on ranks draw different actions
            torch.manual_seed(args.seed + RANK)
        if self.first:
            step = self.checkpoints.restore(self, *self.trained)
        else:
            step = envs.reset(args.seed)
        if RANK == 0:
            done = self.first * self.steps
            if self.extras:
                self.extras.begin(self)
            self.writer = SummaryWriter(self.folder, purge_step=done + 1)
            self.callback(self.writer.close)
            self.bar = tqdm(total=args.total_timesteps, initial=done, unit_scale=True)
            self.callback(self.bar.close)
        self.start_time = time.time()
        return step

    def log(self, iteration: int, scalars: dict, episodes: list, storage: Storage) -> None:
        """Writes scalars of rank 0 and the episodes of all ranks, each with its global step."""
        episodes = sum(all_ranks(episodes), [])
        if RANK > 0:
            return
        if self.extras:
            scalars |= self.extras.log(self, iteration, episodes, storage)
        num_steps = (iteration - self.first) * self.steps
        scalars["charts/SPS"] = int(num_steps / (time.time() - self.start_time))
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, iteration * self.steps)
        for global_step, episode in episodes:
            self.recent.append(episode.ret)
            self.writer.add_scalar("charts/episodic_return", episode.ret, global_step)
            self.writer.add_scalar("charts/episodic_length", episode.length, global_step)
        mean = f"{np.mean(self.recent):.4g}" if self.recent else "-"
        self.bar.set_postfix(SPS=scalars["charts/SPS"], ret=mean)
        self.bar.update(self.steps)

    def checkpoint(self, iteration: int) -> None:
        """Writes a checkpoint where one is due. SystemExit when a signal came."""
        if self.checkpoints:
            self.checkpoints.after_update(self, iteration, *self.trained)

    def save_model(self, agent: nn.Module) -> None:
        """Writes model.pt: tensors and flags, which anyone can load with weights_only=True."""
        path = os.path.join(self.folder, "model.pt")
        unfinished = os.path.join(self.folder, "unfinished.tmp")
        model = {"script": self.script, "args": self.flags, "model": agent.state_dict()}
        guarded(f"--save-model {path}", partial(torch.save, model, unfinished))
        os.replace(unfinished, path)  # whole or not at all


# --- end shared: run ---


# ---- Collector: the process that acts ----
class Rollout(NamedTuple):
    """T steps of N environments, as the collector sends them."""

    version: int  # updates that the collector's weights had had
    steps: list[Step]  # T + 1: actions of step t lead to step t + 1
    actions: np.ndarray  # [T * N, columns]; [rows of all steps, columns] of a Sequence
    log_probs: np.ndarray  # [T * N], by the collector's weights


def collect(memory: Memory, envs: Any, step: Step, version: int, args: Any) -> Rollout:
    """T steps of N environments from their last step on."""
    memory.begin()
    steps = [step]
    actions = []
    log_probs = []
    for _ in range(args.num_steps):
        memory.storage.blocks.clear()  # the learner stores them
        action, log_prob, _ = memory.act(step)
        action = action.cpu()  # the only wait of a step
        step = envs.step(memory.agent.head.env_actions(action, step.obs.counts))
        steps.append(step)
        actions.append(action.numpy())
        log_probs.append(log_prob)
    log_probs = torch.cat(log_probs).cpu().numpy()
    return Rollout(version, steps, np.concatenate(actions), log_probs)


def act(pipe, parent_end, args: Any) -> None:
    """The collector. What goes wrong is sent to the parent."""
    for number in (signal.SIGINT, signal.SIGTERM):  # what reaches the whole group is the parent's
        signal.signal(number, signal.SIG_IGN)
    parent_end.close()  # the end of the parent can be seen only if nobody else holds it
    with contextlib.suppress(OSError):  # the parent is gone
        try:
            answer(pipe, args)
        except (UsageError, gym.error.Error, OSError) as error:  # sentences
            pipe.send(UsageError(str(error)))
        except Exception:
            pipe.send(RuntimeError(f"in the collector: {traceback.format_exc()}"))


def answer(pipe, args: Any) -> None:
    """Takes the seed of the environments, then answers each (version, weights) by a rollout, until
    None comes or the parent is gone."""
    requests = listen(pipe, partial(os._exit, 1))
    args.seed = requests.get()
    if args.seed is None:
        return
    device = start(args)
    torch.set_num_threads(1)  # batches are small, the other cores learn
    with contextlib.closing(make_envs(args)) as envs:
        agent = Agent(envs.leaves, envs.action_space, args).to(device)
        memory = Memory(agent, envs.leaves, args.num_envs, args)
        step = envs.reset(args.seed)
        for version, weights in iter(requests.get, None):
            state = agent.state_dict().values()
            sizes = [values.numel() for values in state]
            for values, new in zip(state, to_device(weights, device).split(sizes)):
                values.copy_(new.view_as(values))
            rollout = collect(memory, envs, step, version, args)
            step = rollout.steps[-1]
            pipe.send(rollout)


def listen(pipe, at_end: Callable[[], None]) -> queue.SimpleQueue:
    """The messages of the other end, taken by a thread so that sending them never waits; None where
    that end is gone."""
    messages = queue.SimpleQueue()

    def take() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(pipe.recv())
        at_end()
        messages.put(None)

    threading.Thread(target=take, daemon=True).start()
    return messages


class Collector:
    """The process that steps the environments, as its parent sees it. It must be forked before this
    process uses CUDA or threads of torch. Rollouts come in the order in which they were asked
    for."""

    def __init__(self, args: Any):
        with contextlib.closing(Envs([partial(make_env, args)], args.action_head)) as probe:
            self.leaves = probe.leaves
            self.action_space = probe.action_space
        context = mp.get_context("fork")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=act, args=(child, self.pipe, args))
        self.process.start()
        child.close()
        self.rollouts = listen(self.pipe, lambda: None)

    def tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # what happened is seen in the answer
            self.pipe.send(message)

    def reset(self, seed: int) -> None:
        """Begins the first episodes."""
        self.tell(seed)

    def ask(self, version: int, agent: Agent) -> None:
        """Asks for a rollout by the weights of the agent."""
        weights = [values.flatten() for values in agent.state_dict().values()]
        self.tell((version, torch.cat(weights).cpu().numpy()))  # one copy, one wait

    def receive(self) -> Rollout:
        """The next rollout. UsageError if the collector died; what it raised is raised here."""
        rollout = self.rollouts.get()
        if isinstance(rollout, Exception):
            raise rollout
        if rollout is None:
            self.process.join()
            raise UsageError(f"the collector died with exit code {self.process.exitcode}")
        return rollout

    def close(self) -> None:
        """Ends the process, after the rollout that it collects if that takes less than 5
        seconds."""
        self.tell(None)
        self.process.join(timeout=5)
        self.process.kill()
        self.process.join()


# ---- Train: collect, advantages, update, log ----
LOGGED = (
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/grad_norm",
    "debug/collection_mismatch",
)


def train(args: Any, run: Run) -> Agent:
    """The trained agent."""
    T = args.num_steps
    N = args.num_envs
    rng = np.random.default_rng(args.seed + RANK)  # of the minibatches
    collector = Collector(args)
    run.callback(collector.close)
    device = start(args)  # not before the fork
    agent = Agent(collector.leaves, collector.action_space, args).to(device)
    memory = Memory(agent, collector.leaves, N, args)
    params = list(agent.parameters())
    optimizer = torch.optim.Adam(
        params, lr=args.learning_rate, eps=1e-5, amsgrad=bool(args.stay_solved), fused=True
    )
    run.begin(agent, optimizer, memory, collector, rng)
    # lr, and our std_floor, so that checkpoints keep it. Read after run.begin: resuming replaces it
    settings = optimizer.param_groups[0]
    for _ in range(min(args.max_lag + 1, args.num_iterations - run.first)):
        collector.ask(run.first, agent)
    check = service("utils.check")

    for iteration in range(run.first + 1, args.num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / args.num_iterations
            settings["lr"] = frac * args.learning_rate

        # Collect: what the other process did with the weights after rollout.version updates
        rollout = collector.receive()
        memory.begin()
        memory.storage.append(join([step.obs for step in rollout.steps[:-1]]))
        memory.actions.append(to_device(rollout.actions, device))
        rewards = np.zeros((T, N), np.float32)
        dones = np.zeros((T, N), np.float32)
        truncated = np.zeros((T, N), bool)
        episodes = []
        for t in range(T):
            step = rollout.steps[t + 1]
            memory.keep(step)
            rewards[t] = step.reward
            dones[t] = step.terminated | step.truncated
            truncated[t] = step.truncated
            global_step = ((iteration - 1) * T + t + 1) * N * WORLD_SIZE
            episodes += [(global_step, episode) for episode in step.episodes]

        # The policy has moved on meanwhile: log-probabilities and values of the present weights
        log_probs, values = memory.evaluate(args.num_minibatches)  # [T * N]
        # These [T * N] each, then V of the N observations after the last step and of the final
        # observation of each truncated episode, in one array: one wait for the device
        joined = torch.cat([log_probs, values, memory.next_values(step)]).cpu().numpy()
        present, V, next_value, final_values = np.split(joined, [T * N, 2 * T * N, 2 * T * N + N])
        logrho = present - rollout.log_probs
        whole_rho = np.exp(logrho)
        rho = whole_rho.clip(max=args.max_rho).reshape(T, N)

        # Advantages: A[t] = delta[t] + gamma lambda rho[t + 1] A[t + 1], cut as in ppo_graph.py:
        # GAE with the next A times its rho. V + rho A are the targets of V-trace (Espeholt et al.
        # 2018, eq. 1, remark 2) with one bound for rho and c. Without lag rho = 1: it is GAE
        V = V.reshape(T, N)
        rewards[truncated] += args.gamma * final_values  # both in the order of steps, then envs
        advantages = np.zeros_like(rewards)
        lastgaelam = 0.0
        for t in reversed(range(T)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - V[t]
            advantages[t] = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            lastgaelam = rho[t] * advantages[t]  # V-trace's target minus V
            next_value = V[t]
        returns = V + rho * advantages
        returns_std = np.std(returns)
        explained_var = 1 - np.var(returns - V) / max(returns_std**2, 1e-12)
        vf_coef = args.vf_coef
        if args.norm_vloss:
            vf_coef /= args.norm_vloss + returns_std**2  # True counts as 1
        std_floor = 0.0
        if args.stay_solved is not None:
            std_floor = max(0.1 * returns_std, args.stay_solved * settings.get("std_floor", 0.0))
            settings["std_floor"] = std_floor
        advantages = to_device(advantages.reshape(-1), device)
        returns = to_device(returns.reshape(-1), device)
        rho = to_device(rho.reshape(-1), device)

        # Update: the clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9), decoupled
        # (Hilton et al. 2022)
        torch.set_grad_enabled(True)  # whatever an environment has set
        logs = []
        for _ in range(args.update_epochs):
            for idx, inputs in memory.minibatches(rng, args.num_minibatches):
                mb = to_device(idx, device)
                _, new_log_prob, entropy, new_value = agent(*inputs)
                logratio = new_log_prob - log_probs[mb]
                ratio = logratio.exp()
                mb_advantages = advantages[mb]
                if args.norm_adv and len(idx) > 1:
                    std = mb_advantages.std() + std_floor + 1e-8
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / std
                pg_loss1 = -mb_advantages * ratio
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss2 = -mb_advantages * clipped
                pg_loss = (rho[mb] * torch.max(pg_loss1, pg_loss2)).mean()
                mb_returns = returns[mb]
                v_loss = (new_value - mb_returns) ** 2
                if args.clip_vloss:
                    mb_values = values[mb]
                    change = (new_value - mb_values).clamp(-args.clip_coef, args.clip_coef)
                    v_loss = torch.max(v_loss, (mb_values + change - mb_returns) ** 2)
                v_loss = 0.5 * v_loss.mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                average_gradients(agent)
                grad_norm = nn.utils.clip_grad_norm_(params, args.max_grad_norm)
                optimizer.step()
                with torch.no_grad():
                    approx_kl = (ratio - 1 - logratio).mean()
                    distance = (ratio - 1).abs()
                    clipfrac = (distance > args.clip_coef).float().mean()
                    row = [v_loss, pg_loss, entropy_loss, -logratio.mean(), approx_kl, clipfrac]
                    logs.append(torch.stack([*row, grad_norm, distance.max()]))  # as in LOGGED
            if args.target_kl is not None and np.mean(all_ranks(approx_kl.item())) > args.target_kl:
                break
        if args.norm_obs:  # after the update, whose inputs must be normalised as in collection
            agent.encoder.observe(memory.rollout())
        if iteration + args.max_lag < args.num_iterations:
            collector.ask(iteration, agent)

        logs = torch.stack(logs).cpu().numpy()
        if check:
            check.losses(UsageError, iteration, LOGGED, logs)
        scalars = dict(zip(LOGGED, logs[-1]))
        scalars["losses/clipfrac"] = logs[:, LOGGED.index("losses/clipfrac")].mean()
        # max |ratio - 1| before the first step of the optimizer: 0 but for rounding
        scalars["debug/collection_mismatch"] = logs[0, -1]
        scalars["losses/explained_variance"] = explained_var
        scalars["charts/learning_rate"] = settings["lr"]
        scalars["debug/lag"] = iteration - 1 - rollout.version
        scalars["debug/behaviour_kl"] = (whole_rho - 1 - logrho).mean()
        scalars["debug/rho_mean"] = whole_rho.mean()
        scalars["debug/rho_mismatch"] = abs(whole_rho - 1).max()  # 0 without lag
        scalars["debug/rho_truncated"] = (whole_rho > args.max_rho).mean()
        run.log(iteration, scalars, episodes, memory.storage)
        run.checkpoint(iteration)
    return agent


@torch.no_grad()
def play(agent: Agent, args: Any, makers: list[Callable], greedy: bool) -> list[Episode]:
    """The first episode of each environment. One that has not ended after --eval-max-steps is
    returned as it is then, without a cost."""
    N = len(makers)
    found = {}
    with contextlib.closing(Envs(makers, args.action_head)) as envs:
        memory = Memory(agent, envs.leaves, N, args)
        step = envs.reset(args.seed + 10_000)
        while len(found) < N and envs.num_steps < args.eval_max_steps:
            if envs.num_steps % args.num_steps == 0:
                memory.begin()
            action, _, _ = memory.act(step, greedy)
            step = envs.step(agent.head.env_actions(action, step.obs.counts))
            for episode in step.episodes:
                found.setdefault(episode.env, episode)
        return [found.get(i) or envs.episode(i, {"eval": {"cost": None}}) for i in range(N)]


def main(args: Any) -> list:
    """Trains, saves and evaluates. Returns the rows of the evaluation's table; without the package
    the greedy Episodes, of the entries of --env-kwargs in turn; nothing on ranks above 0."""
    if args.load_model:
        service("utils.policy", "--load-model").take_flags(args)
    check = service("utils.check")
    if check:
        check.flags(UsageError, args, max_minibatches(args), WORLD_SIZE)
    if WORLD_SIZE > 1:
        raise UsageError(
            f"{WORLD_SIZE} ranks: this script runs without torchrun, ppo_graph.py runs with it"
        )
    if args.max_lag < 0 or not args.max_rho > 0:
        raise UsageError(
            f"--max-lag {args.max_lag} --max-rho {args.max_rho}: at least 0, and more than 0, are "
            "needed"
        )
    args.world_size = WORLD_SIZE
    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = args.total_timesteps // (args.batch_size * WORLD_SIZE)
    evaluation = service("utils.evaluate", args.eval_suite and "--eval-suite")
    service("utils.evaluate", args.capture_video and "--capture-video")  # an error without it
    if evaluation:
        evaluation.check(make_env, args)  # what cannot be evaluated is an error now
    with Run(args) as run:
        agent = train(args, run)
        if RANK > 0:
            return []
        if args.save_model:
            run.save_model(agent)
        run.bar.close()
        run.signals.append(0)  # as if one had come: the next one ends the process at once
        playing = partial(play, agent, args)
        if evaluation:
            return evaluation.evaluate(run, playing, make_env)
        if args.eval_episodes == 0:
            return []
        episodes = playing([partial(make_env, args, i) for i in range(args.eval_episodes)], True)
        print("returns of greedy episodes:", *[episode.ret for episode in episodes])
        return episodes


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    if (folder / "__init__.py").exists() and sys.path[0] == str(folder):
        sys.path[0] = str(folder.parent)  # so that our `envs` and `utils` do not hide the user's
    sys.path.append(os.getcwd())  # where --env-id and --wrap find the user's modules
    try:
        main(tyro.cli(Args))
        if RANK > 0:  # at once: threads of torch.distributed may abort a process that ends
            os._exit(0)
    except (UsageError, gym.error.Error, OSError) as problem:
        sys.exit(str(problem))
