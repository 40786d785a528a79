"""PPO with a gated Transformer-XL memory, on any observation of ppo_graph.py.

    python cleanrl_graph/ppo_gtrxl.py --env-id CartPole-v1 --wrap hide:1,3 --memory-length 50
    python cleanrl_graph/ppo_gtrxl.py --env-id your_module:YourEnv-v0 --prev-reward

Read ppo_gtrxl_mini.py first: it is the idea alone. Sections of this file: Args, ranks,
observations, environments, storage, encoder, action heads, memory (GTrXL), agent, run, train.

A leaf is one array of an observation, and every leaf is rows: any number per step for the nodes of
a graph, its edges or the elements of a set, one for everything else. Each row is stored once, and a
minibatch is one selection of rows per leaf. An action may choose a node, an edge or an element, or
each of them may act.

A step attends to itself and to the `memory_length` steps before it in its episode (GTrXL, Parisotto
et al. 2019, arXiv:1910.06764; Transformer-XL, Dai et al. 2019, arXiv:1901.02860). Training runs all
steps of a rollout at once. Of earlier steps the inputs of the layers are kept, from which new keys
and values are made. Actor and critic see the observation, the transformer's output, what its
attention found, and the age of the episode. The defaults: see benchmark/results/memory.md.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), its implementation details (Huang et al. 2022,
ICLR blog track), GAE (Schulman et al. 2015, arXiv:1506.02438), GINE (Hu et al. 2020,
arXiv:1905.12265), Deep Sets (Zaheer et al. 2017, arXiv:1703.06114), pointer networks (Vinyals et
al. 2015, arXiv:1506.03134).
"""

import inspect
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Json = Annotated[dict | list, tyro.conf.arg(constructor=json.loads, metavar="JSON")]


@dataclass
class Args:
    """Flags of the experiment, then of the environment (from --env-id on), of the network (from
    --hidden-dims on), of the memory (from --memory-length on) and of the algorithm (from
    --total-timesteps on)."""

    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; env i has seed + i"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """uses CUDA when it is available, in float32: TF32's rounding would differ between a step and
    a minibatch"""
    run_dir: str = "runs"
    """folder of the runs' folders: TensorBoard log, model"""
    save_model: bool = False
    """saves the model to {run_dir}/{run_name}/model.pt when training ends"""
    eval_episodes: int = 10
    """greedy episodes played when training ends; 0 for none"""
    eval_max_steps: int = 10_000
    """steps after which an episode of the evaluation is cut off"""

    env_id: str = "envs:JobShop-v0"
    """the environment's id, `module:Name-v0` imports the module first"""
    env_kwargs: Json = field(default_factory=dict)
    """keyword arguments of the environment as JSON, or a list of them: env i gets entry i modulo
    their number"""
    norm_obs: bool = True
    """normalises vectors and the columns of graphs and sets by their running mean and std"""

    hidden_dims: tuple[int, ...] = (256, 256)
    """widths of the actor's and of the critic's MLP"""
    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"
    """activation of all MLPs"""
    gnn: Literal["gine", "gin", "gatv2", "transformer", "sage"] = "gine"
    """message passing layer of graph observations. gin is faster, but sums neighbors and edge
    features separately, so it cannot match them; sage ignores edge features"""
    gnn_layers: int = 3
    """number of message passing layers"""
    gnn_dim: int = 64
    """width of node, edge and set-element embeddings"""
    gnn_aggr: Literal["sum", "mean", "max"] = "sum"
    """how a node aggregates its incoming messages; gatv2 and transformer sum them by attention.
    speed/tables.md compares them"""
    set_layers: int = 0
    """layers in which each element of a set sees mean, maximum and number of all, for choices that
    compare elements, as in NearestToMarked-v0"""
    graph_context: bool = False
    """each message passing layer also shows a node mean, maximum and number of its graph's nodes"""
    critic_only: tuple[str, ...] = ()
    """keys of the observation that enter the value alone, as `state` or `goal.position`: a trained
    policy acts without them"""
    action_head: str = "auto"
    """what a Discrete action chooses from: nodes, edges, avail_actions, the name of a set, or
    flat, a fixed list; auto: what the names of a Dict's parts say, else avail_actions, else nodes
    where the mask has rows, else flat. In a Sequence: the rows that act"""
    autoregressive: bool = False
    """draws the parts of a composite action in sequence, each given those before it"""
    state_dependent_std: bool = False
    """makes the log-std of Box actions an output of the network instead of a parameter"""

    memory_length: int = 64
    """previous steps of its episode that a step attends to; 0: none, 1000000: all"""
    num_layers: int = 1
    """number of transformer layers"""
    num_heads: int = 4
    """number of attention heads"""
    dim: int = 64
    """width of the transformer"""
    gate: Literal["gru", "none"] = "gru"
    """what joins a sublayer to the stream: GTrXL's gate or, as in speed/tables.md, a plain sum"""
    prev_action: bool = True
    """the previous action is an input"""
    prev_reward: bool = False
    """the previous reward is an input"""

    total_timesteps: int = 500000
    """total timesteps, of all environments and ranks"""
    learning_rate: float = 1e-3
    """the learning rate of the optimizer"""
    num_envs: int = 16
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
    """the number of mini-batches; each holds whole rollouts of some of the envs"""
    update_epochs: int | None = None
    """the K epochs to update the policy; None: 8 with images, else 4"""
    norm_adv: bool = True
    """toggles advantages normalization"""
    adv_floor: float = 0.1
    """keeps updates small where a task is solved: norm_adv adds this share of the returns' std to
    the advantages' std"""
    adv_floor_decay: float = 0.999
    """if above 0, adv_floor takes the largest std of the returns so far, which decays by this
    factor at each update; 0.999 in the tables of ppo_framestack.py and ppo_gtrxl.py"""
    amsgrad: bool = True
    """makes Adam AMSGrad (Reddi et al. 2018), whose steps stay small after large gradients, as in
    the tables of ppo_framestack.py and ppo_gtrxl.py"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = False
    """toggles the clipped loss of the value function"""
    norm_vloss: float = 1.0
    """if above 0, divides the loss of the value function by this + the variance of the returns"""
    ent_coef: float = 0.0
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = 0.03
    """KL divergence from the policy of the rollout above which an update has no further epoch"""

    num_iterations: tyro.conf.Suppress[int] = 0
    """the number of rollouts, each followed by an update (computed in runtime)"""


# --- shared: ranks ---
# ---- Ranks: the processes of torchrun, each with its own environments ----
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def all_ranks(value: Any) -> list:
    """The value of every rank, on every rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def sum_of_ranks(tensor: Tensor) -> Tensor:
    """The sum over all ranks, which takes the tensor's place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(tensor)
    return tensor


def average_gradients(agent: nn.Module) -> None:
    """Replaces each gradient by its mean over all ranks, in one all-reduce."""
    if WORLD_SIZE > 1:
        params = [param for param in agent.parameters() if param.requires_grad]
        for param in params:
            if param.grad is None:  # a network without rows, on this rank
                param.grad = torch.zeros_like(param)
        grads = [param.grad for param in params]
        total = sum_of_ranks(nn.utils.parameters_to_vector(grads))
        nn.utils.vector_to_parameters(total / WORLD_SIZE, grads)


def seed(args: Args) -> None:
    """Seeds all generators: torch's alike on all ranks, which make the same weights."""
    random.seed(args.seed + RANK)
    np.random.seed((args.seed + RANK) % 2**32)
    torch.manual_seed(args.seed)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which torch draws on this device, unless it is given another one."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def start(args: Args) -> torch.device:
    """The device of this rank. Connects the ranks and sets torch's threads."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and args.cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)  # more are slower on busy cores
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = False
    return device


# --- end shared: ranks ---


def complete(args: Args, leaves: list["Leaf"]) -> None:
    """Sets the flags that are computed in runtime: num_iterations and, where it is None,
    update_epochs."""
    args.num_iterations = args.total_timesteps // (args.num_envs * args.num_steps * WORLD_SIZE)
    if args.update_epochs is None:
        has_images = any(leaf.is_image and leaf.is_input for leaf in leaves)
        args.update_epochs = 8 if has_images else 4


class UsageError(ValueError):
    """A sentence that says what was wrong, where, and what to do."""


# --- shared: observations ---
# ---- Observations: a space is a list of leaves, N observations are rows one after the other ----
NOT_INPUT = ("action_mask", "node_ids")  # no network sees them: what is allowed, which row is whose
STEP = ""  # the group with one row per step; no set can have its name, as no path is empty


class Leaf(NamedTuple):
    """One array of an observation, as rows of `space`. All leaves of a group have the same number
    of rows: one per step in the group STEP, any number in the others, which are named after a set,
    or are the nodes or the edges of a graph. A mask with rows is a group of its own, and so are
    node_ids."""

    path: str  # "graph.nodes", "position"
    space: gym.Space
    group: str
    nodes: str | None = None  # of links and edges: the group of the nodes that they connect

    @property
    def is_input(self) -> bool:
        return self.path.split(".")[0] not in NOT_INPUT

    @property
    def is_ragged(self) -> bool:
        """Whether steps may have any number of its rows."""
        return self.group != STEP

    @property
    def is_links(self) -> bool:
        """Whether its rows are pairs of node indices, source and target."""
        return self.nodes is not None and self.path == self.group

    @property
    def whole(self) -> str:
        """What --critic-only can name for it: its graph's nodes, its set, or the leaf itself."""
        if self.nodes is not None:
            return self.nodes
        return self.group if self.is_ragged else self.path

    @property
    def sides(self) -> tuple[int, ...]:
        """The lengths of an image's three axes, in their order; of HW the first is 1."""
        return (1, *self.space.shape)[-3:]

    @property
    def is_image(self) -> bool:
        """Whether a row has 8 x 8 pixels or more, HWC, CHW or HW."""
        if not isinstance(self.space, spaces.Box) or len(self.space.shape) not in (2, 3):
            return False
        first, middle, last = self.sides
        return min(middle, max(first, last)) >= 8

    @property
    def channel_axis(self) -> int:
        """The axis of an image's channels: -1 (HWC), or -3 (CHW, and HW, which has one). It is the
        side unlike both others or, if that is not clear, the first if it is the smallest."""
        first, middle, last = self.sides
        return -1 if middle != last and (first >= middle or first > last) else -3

    @property
    def dtype(self) -> np.dtype:
        dtype = np.dtype(self.space.dtype).newbyteorder("=")
        if dtype.kind == "f":
            return np.dtype(np.float64 if dtype.itemsize > 4 else np.float32)
        if dtype.kind == "u" and dtype != np.uint8:  # torch knows no larger unsigned numbers
            return np.dtype(np.int64)
        return dtype


def is_below(path: str, name: str) -> bool:
    """Whether `name` is the path or begins it: "goal.position" is below "goal"."""
    return f"{path}.".startswith(f"{name}.")


def children_of(space: gym.Space) -> list[tuple]:
    """(key, space) of the children of a Dict or Tuple."""
    return list(space.items() if isinstance(space, spaces.Dict) else enumerate(space))


def leaves_of(space: gym.Space, path: str = "", group: str = STEP) -> list[Leaf]:
    """The leaves of `space` in a fixed order. UsageError names a space that is not supported.

    Those of Dict(goal=Box(-1, 1, (3,)), graph=Graph(Box(0, 1, (8,)), None)) are "goal" in the group
    STEP, and "graph.nodes" and "graph.edge_links", each in a group of its own name."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        leaves = []
        for k, child in children_of(space):
            leaves += leaves_of(child, f"{path}.{k}".removeprefix("."), group)
        return leaves
    path = path or "obs"  # of a space that is not inside another
    if isinstance(space, spaces.Sequence) and group == STEP:
        return leaves_of(space.feature_space, path, path)
    if isinstance(space, spaces.Graph) and group == STEP:
        nodes = f"{path}.nodes"
        links = f"{path}.edge_links"
        pair = spaces.MultiDiscrete([2**31 - 1] * 2, np.int32)
        leaves = leaves_of(space.node_space, nodes, nodes)
        leaves.append(Leaf(links, pair, links, nodes))
        if space.edge_space is not None:
            leaves.append(Leaf(f"{path}.edges", space.edge_space, links, nodes))
        return leaves
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return [Leaf(path, space, group)]
    raise UsageError(
        f"leaf '{path}': {space} is not supported (Box, Discrete, MultiDiscrete, MultiBinary, Dict "
        "and Tuple are; Graph and Sequence, too, but not inside a Sequence)"
    )


def num_leaves(row: gym.Space) -> int:
    """The number of leaves in the rows of a set."""
    if not isinstance(row, (spaces.Dict, spaces.Tuple)):
        return 1
    return sum(num_leaves(child) for _, child in children_of(row))


def arrays_of(space: gym.Space, obs: Any) -> list:
    """The arrays in an observation, in the order of `leaves_of`; None means no rows."""
    if isinstance(space, spaces.Graph):
        return [obs.nodes, obs.edge_links, obs.edges][: 2 if space.edge_space is None else 3]
    if isinstance(space, spaces.Sequence):
        row = space.feature_space
        if space.stack:
            return arrays_of(row, obs)
        columns = list(zip(*[arrays_of(row, each) for each in obs]))  # of a tuple of rows
        return columns or [None] * num_leaves(row)
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [obs]
    arrays = []
    for k, child in children_of(space):
        arrays += arrays_of(child, obs[k])
    return arrays


def num_options(space: gym.Space) -> list[int]:
    """The number of values of each entry of a space of categories; of a Box none."""
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return np.ravel(getattr(space, "nvec", getattr(space, "n", []))).tolist()


class Flat(NamedTuple):
    """N observations: per leaf the rows of all N one after the other. Arrays of an environment
    become a Flat by `Envs.read` and `collate`, a Flat of tensors in a Storage, and there by `batch`
    the Obs that the network sees."""

    values: list  # of each leaf an array, in a Storage a tensor
    counts: dict[str, np.ndarray]  # group -> rows of each observation, int64 [N]

    @property
    def size(self) -> int:
        """The number of observations."""
        return len(self.counts[STEP])


def join(flats: list[Flat], concatenate: Callable = np.concatenate) -> Flat:
    """The observations of all `flats`, copied by `concatenate`."""
    values, counts = zip(*flats)
    joined = {group: np.concatenate([num[group] for num in counts]) for group in counts[0]}
    return Flat([concatenate(arrays) for arrays in zip(*values)], joined)


# --- end shared: observations ---


# --- shared: environments ---
# ---- Environments: made from the flags, stepped one after the other ----
def record_of(env: gym.Env) -> gym.wrappers.RecordEpisodeStatistics | None:
    """The wrapper that sums the rewards of an episode, None if there is none: other wrappers, and
    the environment itself, may have an `episode_returns` that means something else."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.RecordEpisodeStatistics):
            return env
        env = env.env
    return None


def make_env(args: Args, i: int = 0, /, **more) -> gym.Env:
    """Environment i of all ranks, with `more` keyword arguments."""
    tasks = args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]
    kwargs = {"disable_env_checker": True} | tasks[i % len(tasks)] | more
    env = gym.make(args.env_id, **kwargs)
    return env if record_of(env) else gym.wrappers.RecordEpisodeStatistics(env)


# --- end shared: environments ---


# --- shared: steps ---
class Step(NamedTuple):
    """What N environments returned. Where one is `terminated` or `truncated`, a new episode begins.
    After reset() all are terminated: that is how a memory learns that an episode begins."""

    obs: Flat
    reward: np.ndarray  # float32 [N]
    terminated: np.ndarray  # bool [N]
    truncated: np.ndarray  # bool [N]
    finals: list[Flat]  # the last observation of each truncated episode
    infos: list[tuple[int, dict]]  # environment and last info of each episode that ended
    is_step: Any = True  # bool [N] where some will ignore the next action: nothing learns from it


class Envs:
    """N environments stepped one after the other. Autoreset in the same step: the observation after
    an episode's last step is the first of the next one."""

    def __init__(self, makers: list[Callable]):
        self.envs = [make() for make in makers]
        self.space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self.leaves = leaves_of(self.space)

    def reset(self, seed: int) -> Step:
        """Starts new episodes; env i is seeded with seed + i."""
        N = len(self.envs)
        self.rows = [self.read(env.reset(seed=seed + i)[0]) for i, env in enumerate(self.envs)]
        begins = np.ones(N, bool)
        return Step(self.collate(self.rows), np.zeros(N, np.float32), begins, ~begins, [], [])

    def step(self, actions: list) -> Step:
        """Steps env i with actions[i], an element of its action space."""
        N = len(actions)
        reward = np.zeros(N, np.float32)
        terminated = np.zeros(N, bool)
        truncated = np.zeros(N, bool)
        finals = []
        infos = []
        for i, env in enumerate(self.envs):
            obs, reward[i], terminated[i], truncated[i], info = env.step(actions[i])
            if terminated[i] or truncated[i]:
                if not terminated[i]:
                    finals.append(self.collate([self.read(obs)]))
                if "episode" in info:  # not where only a life of a game ended
                    infos.append((i, info))
                obs, _ = env.reset()
            self.rows[i] = self.read(obs)
        truncated &= ~terminated  # what is both counts as terminated
        return Step(self.collate(self.rows), reward, terminated, truncated, finals, infos)

    def read(self, obs: Any) -> list[np.ndarray]:
        """The rows of each leaf, copied: the environment may write into its arrays."""
        rows = []
        for leaf, array in zip(self.leaves, arrays_of(self.space, obs)):
            if not leaf.is_ragged:
                array = [array]
            elif array is None:
                array = np.zeros((0, *leaf.space.shape), leaf.dtype)
            rows.append(np.array(array))
        return rows

    def collate(self, observations: list[list[np.ndarray]]) -> Flat:
        """A Flat of what `read` returned."""
        values = []
        counts = {STEP: np.ones(len(observations), np.int64)}
        for leaf, rows in zip(self.leaves, zip(*observations)):
            counts.setdefault(leaf.group, np.fromiter(map(len, rows), np.int64))
            values.append(np.concatenate(rows, dtype=leaf.dtype, casting="unsafe"))
        return Flat(values, counts)

    def close(self) -> None:
        for env in self.envs:
            env.close()


# --- end shared: steps ---


# --- shared: storage ---
# ---- Storage: every step once, minibatches by index arithmetic ----
class Ragged(NamedTuple):
    """Rows of B observations one after the other; those of b are values[ptr[b]:ptr[b + 1]]. Values
    of "edge_links" are indices of nodes in the whole batch, as in PyG's Batch."""

    values: Tensor  # [rows, ...]
    ptr: Tensor  # int64 [B + 1]
    batch: Tensor  # int64 [rows], the observation that a row belongs to


Obs = dict[str, Ragged]  # leaf path -> its rows; in the group STEP row b is that of observation b


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, from pinned memory, without waiting for the copy."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each k counts[k] numbers from first[k] on: ranges([5, 0], [2, 3]) is [5, 6, 0, 1, 2]."""
    return np.arange(counts.sum()) + (first - (counts.cumsum() - counts)).repeat(counts)


def pack(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Each array on the device, all by one copy of their bytes."""
    hosts = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return hosts
    # 1 to 8 spare bytes each: all begin at a multiple of 8, which view(dtype) needs, none is empty
    sizes = [array.nbytes + 8 - array.nbytes % 8 for array in arrays]
    buffer = np.empty(sum(sizes), np.uint8)
    for part, array in zip(np.split(buffer, np.cumsum(sizes)), arrays):
        part[: array.nbytes] = array.reshape(-1).view(np.uint8)
    copies = to_device(buffer, device).split(sizes)
    return [
        copy[: host.nbytes].view(host.dtype).view(host.shape) for copy, host in zip(copies, hosts)
    ]


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
        """The same observations with tensors on the device as values."""
        return Flat(pack(flat.values, self.device), flat.counts)

    def append(self, flat: Flat) -> Obs:
        """Adds observations and returns them as a batch."""
        self.blocks.append(self.copy(flat))
        return self.batch(self.blocks[-1])

    def whole(self) -> Flat:
        """All observations. They are joined once and stay one block."""
        if len(self.blocks) > 1:
            self.blocks = [join(self.blocks, torch.cat)]
        return self.blocks[0]

    def gather(self, idx: np.ndarray) -> tuple[Obs, dict[str, Tensor]]:
        """The observations `idx` (int64 [B], repeats allowed), one selection of rows per leaf; and
        for each group where its rows are stored, int64. In the group STEP that is `idx` itself."""
        values, counts = self.whole()
        first = [(num.cumsum() - num)[idx] for num in counts.values()]
        counts = {group: num[idx] for group, num in counts.items()}
        index = self.index(counts)
        places = {}
        for group, start in zip(counts, pack(first, self.device)):
            ptr, batch = index[group]
            if group == STEP:
                places[group] = start
            elif self.device.type == "cpu":
                places[group] = torch.from_numpy(ranges(start.numpy(), counts[group]))
            else:
                row = torch.arange(len(batch), device=batch.device)
                places[group] = row + (start - ptr[:-1])[batch]
        rows = [select_rows(array, places[leaf.group]) for leaf, array in zip(self.leaves, values)]
        return self.batch(Flat(rows, counts), index), places

    def index(self, counts: dict[str, np.ndarray]) -> dict[str, tuple[Tensor, Tensor]]:
        """ptr and batch of each group. A GPU makes them itself: only the counts are copied to it,
        nothing as long as the rows."""
        index = {}
        if self.device.type == "cpu":
            for group, num in counts.items():
                ptr = np.zeros(len(num) + 1, np.int64)
                num.cumsum(out=ptr[1:])
                batch = ptr[:-1] if group == STEP else np.arange(len(num)).repeat(num)
                index[group] = torch.from_numpy(ptr), torch.from_numpy(batch)
        else:
            padded = [np.concatenate([[0], num]) for num in counts.values()]
            for (group, num), copy in zip(counts.items(), pack(padded, self.device)):
                batch = torch.repeat_interleave(copy[1:], output_size=int(num.sum()))
                index[group] = copy.cumsum(0), batch
        return index

    def batch(self, flat: Flat, index: dict | None = None) -> Obs:
        """A Flat of tensors as the network sees it."""
        index = index or self.index(flat.counts)
        obs = {}
        for leaf, rows in zip(self.leaves, flat.values):
            ptr, batch = index[leaf.group]
            if leaf.is_links:  # node indices of each graph become those of the batch
                first_node, _ = index[leaf.nodes]
                rows = rows + select_rows(first_node, batch)[:, None]
            obs[leaf.path] = Ragged(rows, ptr, batch)
        return obs


# --- end shared: storage ---


# --- shared: encoder ---
# ---- Encoder: one small network per leaf, concatenated ----
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


class Rows(nn.Module):
    """A leaf's rows as floats [rows, dim]. Numbers are flattened. Categories are one-hot, or
    embedded if there are more than 64. With `norm_obs` a Box is normalised by mean and std of all
    rows that `observe` was given, and clipped to -10..10."""

    def __init__(self, leaf: Leaf, norm_obs: bool):
        super().__init__()
        self.num_categories = 0  # of all entries together
        self.norm_obs = norm_obs and isinstance(leaf.space, spaces.Box)
        if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
            num = np.array(num_options(leaf.space))
            # Value v of entry k is category v + shift[k]
            shift = num.cumsum() - num - np.ravel(leaf.space.start)
            self.register_buffer("shift", torch.as_tensor(shift), persistent=False)
            self.num_categories = int(num.sum())
            self.dim = min(self.num_categories, 64)
            if self.num_categories > 64:
                self.embedding = nn.EmbeddingBag(self.num_categories, self.dim, mode="sum")
        else:
            self.dim = math.prod(leaf.space.shape)
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
        num = sum(all_ranks(len(values)))
        if num == 0:
            return
        mean = sum_of_ranks(values.sum(0)) / num
        var = sum_of_ranks(((values - mean) ** 2).sum(0)) / num
        share = num / (self.count + num)
        delta = mean - self.mean
        self.var += share * (var - self.var + (1 - share) * delta**2)
        self.mean += share * delta
        self.count += num

    def forward(self, values: Tensor) -> Tensor:
        values = values[..., None].flatten(1)
        if self.norm_obs:  # float32 would lose the digits of a small change to a large number
            values = F.batch_norm(values.double(), self.mean, self.var, eps=1e-8)
            return values.float().clamp_(-10, 10)
        if self.num_categories == 0:
            return values.float()
        if self.num_categories > 64:
            return self.embedding(values + self.shift)
        zeros = torch.zeros(len(values), self.num_categories, device=values.device)
        return zeros.scatter_(1, values + self.shift, 1.0)


class CNN(nn.Module):
    """Features [rows, 512] of images. ppo_framestack gives [rows, num_frames, *image], whose frames
    become channels. They are divided by the largest value of their space, if that is below 1e6.
    Layers: those of Mnih et al. 2015, or two of 3 x 3 if a side is below 36 pixels."""

    def __init__(self, leaf: Leaf, num_frames: int = 1):
        super().__init__()
        self.dim = 512
        high = float(leaf.space.high.max())
        self.scale = 1 / high if 0 < high < 1e6 else 1.0
        self.channel_axis = leaf.channel_axis
        sides = list(leaf.sides)
        num_in = sides.pop(self.channel_axis) * num_frames
        self.shape = (num_in, *sides)
        spec = [(32, 3, 2), (64, 3, 1)]  # channels, kernel, stride
        if min(sides) >= 36:
            spec = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        layers = []
        for num_out, kernel, stride in spec:
            layers += [layer_init(nn.Conv2d(num_in, num_out, kernel, stride)), nn.ReLU()]
            num_in = num_out
        self.net = nn.Sequential(*layers, nn.Flatten())
        num_features = self.net(torch.zeros(1, *self.shape)).shape[1]
        self.net.append(layer_init(nn.Linear(num_features, self.dim))).append(nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        images = images.movedim(self.channel_axis, -3).reshape(-1, *self.shape)
        return self.net(images.float() * self.scale)


def make_conv(kind: str, dim: int, edge_dim: int | None, aggr: str) -> nn.Module:
    """A PyG layer dim -> dim; any with forward(x, edge_index) can stand here. It is given batch and
    ptr, too, where its forward has these names, and the features of edges, where there are any and
    it has edge_attr or **kwargs."""
    from torch_geometric import nn as pyg  # two seconds, for graphs only

    if kind in ("gatv2", "transformer"):
        if dim % 4:
            raise UsageError(f"--gnn-dim {dim}: the 4 heads of --gnn {kind} need a multiple of 4")
        if kind == "transformer":
            return pyg.TransformerConv(dim, dim // 4, heads=4, edge_dim=edge_dim)
        # With loops of its own PyG would drop those of the graph, with their features
        return pyg.GATv2Conv(dim, dim // 4, heads=4, edge_dim=edge_dim, add_self_loops=False)
    if kind == "sage":
        return pyg.SAGEConv(dim, dim, aggr=aggr)
    if kind not in ("gine", "gin"):
        raise UsageError(f"--gnn {kind}: make_conv knows no such layer")
    net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
    if edge_dim is None:
        return pyg.GINConv(net, aggr=aggr)
    layer = pyg.GINEConv if kind == "gine" else gin_with_edges()
    return layer(net, edge_dim=edge_dim, aggr=aggr)


@cache
def gin_with_edges() -> type:
    """GIN (Xu et al. 2019, arXiv:1810.00826) on nodes and edges: GINE without its ReLU."""
    from torch_geometric import nn as pyg

    class GINWithEdges(pyg.GINEConv):
        def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            return x_j + self.lin(edge_attr)

    return GINWithEdges


def pool(h: Tensor, ptr: Tensor) -> Tensor:
    """Mean, maximum and log(1 + number) of the rows of each observation, [rows, dim] to [B, 2 * dim
    + 1]. All are 0 where there are no rows."""
    numbers = torch.arange(len(h), device=h.device)
    mean = F.embedding_bag(numbers, h, ptr, mode="mean", include_last_offset=True)
    maximum = F.embedding_bag(numbers, h, ptr, mode="max", include_last_offset=True)
    return torch.cat([mean, maximum, ptr.diff()[:, None].log1p()], 1)


class Context(nn.Linear):
    """What each row sees of all rows of its observation: a linear map of their mean, maximum and
    log(1 + n), [rows, dim]."""

    def __init__(self, dim: int):
        super().__init__(2 * dim + 1, dim, bias=False)

    def forward(self, h: Tensor, ptr: Tensor, batch: Tensor) -> Tensor:
        return select_rows(super().forward(pool(h, ptr)), batch)


class SetLayer(nn.Module):
    """x + W relu(A h + context of h), h = norm(x): an equivariant layer (Zaheer et al. 2017)."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.row = nn.Linear(dim, dim)
        self.context = Context(dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, ptr: Tensor, batch: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.output((self.row(h) + self.context(h, ptr, batch)).relu())


class GNN(nn.Module):
    """Node embeddings [nodes, dim] of a batch of graphs in PyG's convention. Residual layers with
    pre-norm: h + relu(conv(norm(h))), with --graph-context h + relu(conv(norm(h)) + context)."""

    def __init__(self, node_dim: int, edge_dim: int, args: Args):
        super().__init__()
        dim = args.gnn_dim
        self.embed = nn.Linear(node_dim, dim)
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        self.contexts = nn.ModuleList()
        for _ in range(args.gnn_layers):
            self.convs.append(make_conv(args.gnn, dim, edge_dim or None, args.gnn_aggr))
            self.norms.append(nn.LayerNorm(dim))
            if args.graph_context:
                self.contexts.append(Context(dim))
        params = set(inspect.signature(self.convs[0].forward).parameters)
        self.takes = sorted(params & {"batch", "ptr"})  # beside x and edge_index
        if edge_dim and params & {"edge_attr", "kwargs"}:
            self.takes.append("edge_attr")

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, ptr: Tensor, batch: Tensor
    ) -> Tensor:
        known = {"edge_attr": edge_attr, "batch": batch, "ptr": ptr}
        more = {name: known[name] for name in self.takes}
        h = self.embed(x)
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = norm(h)
            update = conv(x, edge_index, **more)
            if self.contexts:
                update = update + self.contexts[k](x, ptr, batch)
            h = h + update.relu()
        return h


class Encoder(nn.Module):
    """Observation -> (features [B, dim], elements {group: Ragged}). Leaves of the group STEP enter
    as they are, images through a CNN, graphs through a GNN, sets through an MLP per row, then set
    layers; a readout makes one vector of each graph or set. Elements are embedded nodes, embedded
    rows of a set, and the features of edges."""

    def __init__(self, leaves: list[Leaf], args: Args):
        super().__init__()
        self.leaves = [leaf for leaf in leaves if leaf.is_input]
        self.links = {leaf.nodes: leaf.path for leaf in self.leaves if leaf.is_links}
        self.rows = nn.ModuleDict()  # module_key(path of a leaf) -> Rows or CNN
        widths = Counter()  # group -> columns of its leaves side by side
        for leaf in self.leaves:
            if leaf.is_links:
                continue
            net = CNN(leaf) if leaf.is_image else Rows(leaf, args.norm_obs)
            self.rows[module_key(leaf.path)] = net
            widths[leaf.group] += net.dim
        dim = args.gnn_dim
        self.nets = nn.ModuleDict()  # module_key(group of nodes, or of a set) -> GNN or MLP
        self.dim = widths.pop(STEP, 0)  # of the features
        # group -> width of what describes a row: an embedding, or ends and features of an edge
        self.element_dims = {}
        edge_dims = {nodes: widths.pop(links, 0) for nodes, links in self.links.items()}
        for group, width in widths.items():
            self.element_dims[group] = dim
            self.dim += 2 * dim + 1  # as `pool` returns
            if group in edge_dims:
                self.nets[module_key(group)] = GNN(width, edge_dims[group], args)
                self.element_dims[self.links[group]] = 2 * dim + edge_dims[group]
            else:
                net = mlp([width, dim, dim], args.activation)
                net.extend(SetLayer(dim) for _ in range(args.set_layers))
                self.nets[module_key(group)] = net

    def forward(self, obs: Obs) -> tuple[Tensor, dict[str, Ragged]]:
        rows = {}  # group -> its leaves side by side, [rows, width]
        for leaf in self.leaves:
            if leaf.is_links:
                continue
            values, ptr, batch = obs[leaf.path]
            columns = self.rows[module_key(leaf.path)](values)
            if leaf.group in rows:
                columns = torch.cat([rows[leaf.group].values, columns], 1)
            rows[leaf.group] = Ragged(columns, ptr, batch)
        features = [rows.pop(STEP).values] if STEP in rows else []
        elements = {}
        for nodes, links in self.links.items():
            if links in rows:
                elements[links] = rows.pop(links)
            else:  # edges without features
                none = rows[nodes].values.new_empty(len(obs[links].values), 0)
                elements[links] = obs[links]._replace(values=none)
        for group, (x, ptr, batch) in rows.items():
            net = self.nets[module_key(group)]
            if group in self.links:
                links = self.links[group]
                edge_index = obs[links].values.t().contiguous()
                x = net(x, edge_index, elements[links].values, ptr, batch)
            else:
                for layer in net:
                    x = layer(x, ptr, batch) if isinstance(layer, SetLayer) else layer(x)
            elements[group] = Ragged(x, ptr, batch)
            features.append(pool(x, ptr))
        return torch.cat(features, 1), elements

    def beside(self, features: Tensor, obs: Obs) -> Tensor:
        """The features [B, any] with those of these leaves beside them."""
        return torch.cat([features, self(obs)[0]], 1) if self.leaves else features

    def observe(self, obs: Obs) -> None:
        """Adds the rows of the observations to the statistics of --norm-obs, unless they are in
        evaluation mode."""
        for leaf in self.leaves:
            if leaf.is_links:
                continue
            net = self.rows[module_key(leaf.path)]
            if isinstance(net, Rows) and net.norm_obs and net.training:
                net.observe(obs[leaf.path].values)


def critic_leaves(leaves: list[Leaf], names: tuple[str, ...]) -> list[Leaf]:
    """Those that --critic-only names: the policy does not see them. UsageError for a name that is
    no key, or that of a mask or of ids."""
    hidden = []
    for name in names:
        named = [leaf for leaf in leaves if leaf.is_input and is_below(leaf.whole, name)]
        if not named:
            inputs = {leaf.whole for leaf in leaves if leaf.is_input}
            raise UsageError(f"--critic-only {name}: the inputs are {sorted(inputs)}")
        hidden += [leaf for leaf in named if leaf not in hidden]
    return hidden


def policy_leaves(leaves: list[Leaf], names: tuple[str, ...]) -> list[Leaf]:
    """The leaves without those that --critic-only names."""
    hidden = critic_leaves(leaves, names)
    return [leaf for leaf in leaves if leaf not in hidden]


def module_key(path: str) -> str:
    """The key of a leaf's path in a ModuleDict, where dots and names such as "keys" are refused."""
    path = path.replace("~", "~0").replace("/", "~1")  # "a/b" is not "a.b"
    return "leaf/" + path.replace(".", "/")


# --- end shared: encoder ---


# --- shared: action heads ---
# ---- Action heads: sample, log-probability and entropy over any action space ----
LOWEST = torch.finfo(torch.float32).min  # for -inf: in an entropy 0 * -inf would be nan


def segment(values: Tensor, ptr: Tensor, reduce: str = "sum") -> Tensor:
    """Sums, means or maxima ("max") of values[ptr[b]:ptr[b + 1]], [B, ...]. An empty segment has
    the sum and mean 0 and the maximum -inf."""
    initial = None if reduce == "max" else 0
    return torch.segment_reduce(values, reduce, offsets=ptr, axis=0, initial=initial, unsafe=True)


class Categorical:
    """One of n options for each of k entries, logits [B, k, n], LOWEST for those that are masked.
    Actions, log-probabilities and entropies are [B, k]. Unlike torch's Categorical it samples
    without waiting for the device."""

    def __init__(self, logits: Tensor):
        self.log_probs = logits.log_softmax(-1)

    @property
    def mode(self) -> Tensor:
        return self.best(self.log_probs)

    def sample(self, generator: torch.Generator | None) -> Tensor:
        noise = torch.empty_like(self.log_probs).exponential_(generator=generator)
        return self.best(self.log_probs - noise.log())  # minus its log is Gumbel noise

    def best(self, score: Tensor) -> Tensor:
        return score.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action.long()[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return self.total(-self.log_probs.exp() * self.log_probs)

    def total(self, terms: Tensor) -> Tensor:
        return terms.sum(-1)


class Choice(Categorical):
    """One of the rows of each observation, or of each row that acts: `options` are theirs, logits
    [options]. Actions and the rest are [B, 1]."""

    def __init__(self, logits: Tensor, options: Ragged):
        self.ptr = options.ptr
        logits = logits - segment(logits.detach(), self.ptr, "max")[options.batch]
        log_total = segment(logits.exp(), self.ptr).log()
        self.log_probs = logits - select_rows(log_total, options.batch)

    def best(self, score: Tensor) -> Tensor:
        rows = torch.arange(len(score), device=score.device)
        # With mode 2, the maximum, the last output is the number of the largest row
        *_, best = torch.embedding_bag(
            score[:, None], rows, self.ptr, mode=2, include_last_offset=True
        )
        return best - self.ptr[:-1, None]  # counted within each observation

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs[self.ptr[:-1, None] + action.long()]

    def total(self, terms: Tensor) -> Tensor:
        return segment(terms, self.ptr)[:, None]


class Gaussian(Normal):
    """torch's Normal, but its samples are drawn from a generator, and without waiting for the
    device."""

    def sample(self, generator: torch.Generator | None) -> Tensor:
        return self.loc + torch.empty_like(self.loc).normal_(generator=generator) * self.scale


class Part(NamedTuple):
    """One factor of the action, which each row of the group `rows` draws for itself: a choice of a
    row of `group`; or, without a group, k entries with n options each; or, if n is 0, k numbers."""

    path: str  # in the action space: "action.amount"
    rows: str  # STEP: it is drawn once
    columns: slice  # the part's own in the action of its rows, [rows, columns]
    group: str | None
    k: int
    n: int  # of a choice: the most rows allowed
    mask: str | None = None  # path of the mask's leaf
    entries: slice | None = None  # the part's own in a row of the mask
    given: bool = False  # the mask has entries for each value of the part before: 2 x 3, not 3

    @property
    def is_per_row(self) -> bool:
        """Whether each row of a ragged group draws its own."""
        return self.rows != STEP


def group_of(name: str, leaves: list[Leaf]) -> str | None:
    """The group of rows that a name means, --action-head or a key of a Dict of actions: "nodes" of
    the graph, or elements of the set; "edges"; the name of a group, or of a graph for its nodes;
    None for others. "auto" means avail_actions or, if the mask has rows, nodes. UsageError for a
    name that can mean several."""
    if name == "flat":
        return None
    groups = {leaf.group for leaf in leaves if leaf.is_ragged and leaf.is_input}
    links = {leaf.path: leaf.nodes for leaf in leaves if leaf.is_links}
    if name == "auto" and "avail_actions" in groups:
        name = "avail_actions"
    elif name == "auto" and any(leaf.group.startswith("action_mask") for leaf in leaves):
        name = "nodes"
    found = groups & {name, f"{name}.nodes"}
    if name in ("node", "nodes"):
        found = found or set(links.values()) or groups - {"avail_actions"}
    elif name in ("edge", "edges"):
        found = found or set(links)
    if len(found) > 1:
        raise UsageError(f"'{name}' can mean each of {sorted(found)}: give one as --action-head")
    return min(found, default=None)


def acting_group(space: gym.Space, leaves: list[Leaf], head: str) -> str | None:
    """The group whose rows act, each on its own: what --action-head or, with auto, the name of the
    Sequence in the action space says, else nodes; None without a Sequence."""
    names = {factor.group for factor in leaves_of(space, "action") if factor.is_ragged}
    if not names:
        return None
    name = min(names).removeprefix("action")[1:] or "nodes"
    group = group_of(name if head == "auto" else head, leaves)
    if group is None or len(names) > 1:
        raise UsageError(f"--action-head {head}: there are no such rows to act in {space}")
    return group


def parts_of(space: gym.Space, leaves: list[Leaf], args: Args) -> list[Part]:
    """The factors of an action space in its order, those that rows draw last. What a Discrete one
    chooses from, its name says in a Dict with --action-head auto, and wherever there is a Sequence;
    elsewhere --action-head says it. UsageError for a flag or a mask that fits nothing."""
    head = args.action_head
    acting = acting_group(space, leaves, head)
    has_names = acting or head == "auto" and isinstance(space, spaces.Dict)
    parts = []
    columns = Counter()  # group of the rows -> the first column that belongs to no part yet
    for factor in sorted(leaves_of(space, "action"), key=lambda factor: factor.is_ragged):
        rows = acting if factor.is_ragged else STEP
        name = head
        if has_names:
            name = factor.path.removeprefix(factor.group if factor.is_ragged else "action")[1:]
        options = num_options(factor.space) or [0]  # a Box has none
        is_discrete = isinstance(factor.space, (spaces.Discrete, spaces.MultiDiscrete))
        group = group_of(name, leaves) if is_discrete else None
        if group is not None or args.autoregressive and is_discrete or len(set(options)) > 1:
            sizes = [(1, n) for n in options]  # (k, n) of the factor's parts: each entry is one
        else:
            sizes = [(math.prod(factor.space.shape), options[0])]
        for i, (k, n) in enumerate(sizes):
            path = factor.path if len(sizes) == 1 else f"{factor.path}.{i}"
            span = slice(columns[rows], columns[rows] + k)
            parts.append(Part(path, rows, span, group, k, n))
            columns[rows] = span.stop
    chooses = any(part.group is not None for part in parts)
    if acting is None and head not in ("auto", "flat") and not chooses:
        raise UsageError(f"--action-head {head} needs Discrete actions, and such rows: {space}")
    return with_masks(parts, space, leaves, args)


def with_masks(parts: list[Part], space: gym.Space, leaves: list[Leaf], args: Args) -> list[Part]:
    """The parts of `space` with their masks: a leaf "action_mask" for all, or one of a part's name,
    with k * n entries for each or, for choices, one per row, of all or of each in order. If they
    are drawn in sequence, one of a part's own name may have these for each value of the part
    before: one after the other, or in the row which that chose. UsageError for a mask that fits
    nothing."""
    for leaf in leaves:
        width = math.prod(leaf.space.shape)
        used = 0  # entries that belong to parts
        for i, (before, part) in enumerate(zip([None, *parts], parts)):
            name = part.path.replace("action", "action_mask", 1)
            if part.n == 0 or not is_below(name, leaf.path):
                continue
            can_depend = args.autoregressive and leaf.path == name and before is not None
            can_depend = can_depend and before.n > 0 and before.k == 1  # else it has no one value
            fit = fit_of(leaf, part, before if can_depend else None)
            if fit is None:
                continue
            size, given = fit
            if width == 1:  # one number per row is for all parts
                used = 0
            entries = slice(used, used + size)
            used += size
            parts[i] = part._replace(mask=leaf.path, entries=entries, given=given)
        if used != width and leaf.path.split(".")[0] == "action_mask":
            order = [part.path for part in parts[:9]]
            raise UsageError(
                f"leaf '{leaf.path}': a mask {leaf.space} does not fit {space} with --action-head "
                f"{args.action_head}: an entry per option is needed, one per row for a choice, or "
                "with --autoregressive as many for each value of the part before, in this order: "
                f"{order}; Dict(a=..., b=...) keeps the order of its keys, Dict({{...}}) sorts them"
            )
    return parts


def fit_of(leaf: Leaf, part: Part, before: Part | None) -> tuple[int, bool] | None:
    """How a mask fits a part: (number of entries in a row of it, whether they are there once for
    each value of the part `before`); None if it does not. `before` is None if the mask cannot
    depend on it."""
    if part.group is not None:  # an entry per row to choose from, but not for each value and row
        given = before is not None and not part.is_per_row
        return (1, given) if leaf.is_ragged else None
    size = part.k * part.n
    has_its_rows = leaf.is_ragged == part.is_per_row
    if before is None:
        return (size, False) if has_its_rows else None
    if has_its_rows and size == math.prod(leaf.space.shape):  # it fits as it is
        return size, False
    if before.group is None:  # the values' entries are side by side
        return (size * before.n, True) if has_its_rows else None
    return (size, True) if leaf.is_ragged else None  # a row for each value


def scale_of(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """What 0 means, and how much 1 adds to it, float64: a policy's -1 and 1 are the bounds of a Box
    where both are finite and differ. Without bounds (below 1e30) its numbers stay as they are."""
    low = space.low.astype(np.float64)
    half = (space.high - low) / 2
    scale = np.where((half > 0) & (half < 1e30), half, 1.0)
    return np.where(half < 1e30, low + scale, 0.0), scale


def nearest(space: spaces.Box, values: np.ndarray) -> np.ndarray:
    """The elements of the Box next to these numbers, float64 [rows, ...]."""
    if space.dtype.kind == "f":
        return values.clip(space.low, space.high).astype(space.dtype)
    values = values.round()
    # Bounds such as 2**63 - 1 are no float64: what is not inside becomes them as integers
    inside = (values > space.low) & (values < space.high)
    bound = np.where(values < space.high, space.low, space.high)
    return np.where(inside, np.where(inside, values, 0).astype(space.dtype), bound)


def to_env_actions(
    space: gym.Space, actions: dict[str, np.ndarray], acting: str, counts: np.ndarray
) -> list:
    """Elements of `space` from `actions`, an Action as arrays, which are used up: each factor takes
    its columns, the first ones, out of the dict's array. Those of a Box are scaled, and the element
    next to them is taken. Each row makes one element, but what is a Sequence in element b is made
    of the next counts[b] rows of the group `acting`."""
    if isinstance(space, spaces.Sequence):
        each = space.feature_space
        rows = iter(to_env_actions(each, {STEP: actions[acting]}, STEP, counts))
        elements = [tuple(islice(rows, num)) for num in counts]
        if space.stack:
            elements = [np.array(some, each.dtype).reshape(-1, *each.shape) for some in elements]
        return elements
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        columns = []
        for _, child in children_of(space):
            columns.append(to_env_actions(child, actions, acting, counts))
        rows = list(zip(*columns))
        return rows if isinstance(space, spaces.Tuple) else [dict(zip(space, row)) for row in rows]
    num = math.prod(space.shape)
    values = actions[STEP][:, :num].reshape(-1, *space.shape)
    actions[STEP] = actions[STEP][:, num:]
    if isinstance(space, spaces.Box):
        middle, scale = scale_of(space)
        return list(nearest(space, middle + scale * values))
    return list(values.astype(space.dtype) + getattr(space, "start", 0))


Action = dict[str, Tensor]  # group of the rows that draw -> the columns of its parts


class Project(nn.Linear):
    """A linear layer of each row of a group; of edges, which connect rows of the group `nodes`,
    relu(linear(source, target, features))."""

    def __init__(self, group: str, nodes: str | None, dims: dict[str, int], dim: int):
        super().__init__(dims[group], dim)
        self.group = group
        self.nodes = nodes

    def forward(self, elements: dict[str, Ragged], obs: Obs) -> Tensor:
        rows = elements[self.group].values
        if self.nodes is None:
            return super().forward(rows)
        # Nodes are multiplied before they are selected: once per node, not once per edge
        h = elements[self.nodes].values
        source, target, features = self.weight.tensor_split([h.shape[1], 2 * h.shape[1]], 1)
        senders, receivers = obs[self.group].values.unbind(1)
        projected = F.linear(rows, features, self.bias)
        projected = projected + select_rows(h @ source.t(), senders)
        projected = projected + select_rows(h @ target.t(), receivers)
        return projected.relu()

    def inputs(self, rows: Tensor, elements: dict[str, Ragged], obs: Obs) -> Tensor:
        """What the layer sees of these rows, [len(rows), dims[group]]: of edges source, target and
        features side by side."""
        chosen = elements[self.group].values[rows]
        if self.nodes is None:
            return chosen
        ends = obs[self.group].values[rows]
        return torch.cat([elements[self.nodes].values[ends].flatten(1), chosen], 1)


def pairs_of(acting: Ragged, options: Ragged, total: int | None) -> Ragged:
    """The options of each row that acts, all rows of its observation: their numbers in `options`,
    `total` altogether."""
    num = options.ptr.diff()[acting.batch]
    row = torch.repeat_interleave(num, output_size=total)  # int64 [pairs]
    ptr = F.pad(num.cumsum(0), (1, 0))
    first = options.ptr[acting.batch] - ptr[:-1]
    return Ragged(torch.arange(len(row), device=row.device) + first[row], ptr, row)


def seen_dim(parts: list[Part], dims: dict[str, int]) -> int:
    """The width of `PartHead.embed` of these parts together."""
    total = 0
    for part in parts:
        total += part.k * max(part.n, 1) if part.group is None else dims[part.group]
    return total


class PartHead(nn.Module):
    """The distribution of one part of an action, given a latent [rows, dim] of the rows that draw
    it. `dims` are the encoder's element_dims; for a choice of an edge `nodes` is the group of its
    ends. With --autoregressive the next part's latent depends on it, if there `is_next` one."""

    def __init__(
        self, part: Part, nodes: str | None, dim: int, dims: dict, args: Args, is_next: bool
    ):
        super().__init__()
        self.part = part
        self.log_std = None
        # Of a choice the width of an embedding
        num_outputs = seen_dim([part], dims) if nodes is None else dims[nodes]
        if part.n == 0 and args.state_dependent_std:
            num_outputs *= 2
        elif part.n == 0:
            self.log_std = nn.Parameter(torch.zeros(part.k))
        self.output = layer_init(nn.Linear(dim, num_outputs), 0.01)  # nearly uniform at first
        if part.group is not None:
            self.score = layer_init(nn.Linear(num_outputs, 1), 0.01)
            self.key = Project(part.group, nodes, dims, num_outputs)
        self.condition = None
        if is_next and args.autoregressive:
            self.condition = nn.Linear(seen_dim([part], dims), dim)

    def forward(
        self, latent: Tensor, elements: dict[str, Ragged], obs: Obs, before: Tensor | None
    ) -> Categorical | Gaussian:
        """Its log_prob and entropy are [rows, columns of the part]. `before` [rows, any] is the
        action of the part before, None for the first."""
        part = self.part
        output = self.output(latent)
        if part.group is not None:
            options = elements[part.group]
            keys = self.key(elements, obs)
            if part.is_per_row:
                # A mask has an entry for each pair; without one this waits for the device
                total = None if part.mask is None else len(obs[part.mask].values)
                options = pairs_of(elements[part.rows], options, total)
                keys = select_rows(keys, options.values)
            query = select_rows(output, options.batch)
            logits = self.score(torch.tanh(keys + query)).squeeze(1)
            logits = logits + (keys * query).sum(1) / keys.shape[1] ** 0.5
            return Choice(self.masked(logits, obs, before, options), options)
        if part.n:
            logits = output.unflatten(1, (part.k, -1))
            return Categorical(self.masked(logits, obs, before))
        log_std = self.log_std
        if log_std is None:
            output, log_std = output.chunk(2, 1)
        return Gaussian(output, log_std.exp(), validate_args=False)

    def masked(
        self, logits: Tensor, obs: Obs, before: Tensor | None, options: Ragged | None = None
    ) -> Tensor:
        """LOWEST where the mask is 0: where all is masked, all is equally likely."""
        part = self.part
        if part.mask is None:
            return logits
        values, ptr, _ = obs[part.mask]
        mask = values[..., None].flatten(1) != 0  # [B, or rows, entries]
        if not part.given:
            mask = mask[:, part.entries]
        elif part.group is not None:
            # An entry per value of the part before and option. If there is one per option alone, it
            # holds for each value: then the minimum is ptr[:-1]
            num = options.ptr.diff()
            first = torch.minimum(ptr[:-1] + before[:, 0].long() * num, ptr[1:] - num)
            first = first - options.ptr[:-1]
            mask = mask[first[options.batch] + torch.arange(len(logits), device=ptr.device)]
        else:  # the entries of each value of the part before are side by side, or rows
            first = ptr[:-1]
            if part.is_per_row:
                first = torch.arange(len(mask), device=ptr.device)
            num = part.k * part.n
            mask = mask.reshape(-1, num)[first * (mask.shape[1] // num) + before[:, 0].long()]
        return torch.where(mask.reshape(logits.shape), logits, LOWEST)

    def embed(self, action: Tensor, elements: dict[str, Ragged], obs: Obs) -> Tensor:
        """The part's action as a network's input, [B, seen_dim([part], dims)]: vector of the chosen
        row, one-hot vectors, or the numbers themselves."""
        part = self.part
        if part.group is not None:
            first = elements[part.group].ptr[:-1]
            if part.is_per_row:
                first = first[elements[part.rows].batch]
            return self.key.inputs(first + action.long().squeeze(1), elements, obs)
        if part.n:
            action = F.one_hot(action.long(), part.n).flatten(1)
        return action.float()


# --- end shared: action heads ---


# --- shared: action head ---
class ActionHead(nn.Module):
    """The policy's distribution over any action space, from the actor's latent [B, dim] and the
    elements. A choice scores row e by w . tanh(k + q) + k . q / sqrt(d) with key k = W e and query
    q = U latent: the score of a pointer network plus that of dot-product attention (Vaswani et al.
    2017). For an edge k = ReLU(W (source, target, features)). With `autoregressive` the parts are
    drawn in sequence. Each updates the latent of the next; the entropy is the sum of theirs, each
    given the parts drawn before it. In a Sequence each row of the group `acting`, which is STEP
    without one, has its own latent and action; log-probability and entropy are sums over the
    rows."""

    def __init__(self, space: gym.Space, leaves: list[Leaf], dim: int, dims: dict, args: Args):
        super().__init__()
        self.space = space
        self.generator = None  # draws the actions, see Run.begin; None is torch's own
        parts = parts_of(space, leaves, args)
        nodes = {leaf.group: leaf.nodes for leaf in leaves}
        self.heads = nn.ModuleList()
        for part in parts:
            is_next = part is not parts[-1]
            head = PartHead(part, nodes.get(part.group), dim, dims, args, is_next)
            self.heads.append(head)
        self.acting = parts[-1].rows
        if self.acting != STEP:
            # A row's embedding -> its latent
            self.row = Project(self.acting, nodes[self.acting], dims, dim)

    def forward(
        self,
        latent: Tensor,
        elements: dict[str, Ragged],
        obs: Obs,
        action: Action | None = None,
        greedy: bool = False,
    ) -> tuple[Action, Tensor, Tensor]:
        """(action, log_prob [B], entropy [B]) of the given action, else of the mode if `greedy`,
        else of a sample. Entropy is 0 unless the action is given, as in an update. `obs` has masks
        and links."""
        taken = {}
        total = 0.0  # of log_prob and entropy
        rows = STEP
        before = None  # the action of the part before
        # A program that is compiled or exported cannot be given a generator
        generator = None if torch.compiler.is_compiling() else self.generator
        for head in self.heads:
            part = head.part
            if part.rows != rows:  # from here on each row draws
                rows = part.rows
                _, ptr, batch = elements[rows]
                latent = torch.tanh(select_rows(latent, batch) + self.row(elements, obs))
                if before is not None:
                    before = before[batch]
            probs = head(latent, elements, obs, before)
            if action is not None:
                choice = action[rows][:, part.columns]
            elif greedy:
                choice = probs.mode
            else:
                choice = probs.sample(generator)
            log_prob = probs.log_prob(choice).sum(1)
            entropy = torch.zeros_like(log_prob) if action is None else probs.entropy().sum(1)
            terms = torch.stack([log_prob, entropy], 1)
            if rows != STEP:  # float32 would lose digits of the ratio in a sum over many rows
                terms = segment(terms.double(), ptr)
            total = total + terms
            taken.setdefault(rows, []).append(choice.float())
            before = choice
            if head.condition:
                latent = torch.tanh(latent + head.condition(head.embed(choice, elements, obs)))
        return {rows: torch.cat(choices, 1) for rows, choices in taken.items()}, *total.unbind(1)

    def env_actions(self, action: Action, counts: dict[str, np.ndarray]) -> list:
        """Elements of the action space for the environments, whose observations have `counts`."""
        arrays = {rows: values.cpu().numpy() for rows, values in action.items()}
        return to_env_actions(self.space, arrays, self.acting, counts[self.acting])


def join_actions(actions: list[Action]) -> Action:
    """The actions of all steps, one after the other."""
    return {rows: torch.cat([action[rows] for action in actions]) for rows in actions[0]}


def select_action(action: Action, places: dict[str, Tensor]) -> Action:
    """The rows of an action at these places of each group, as `Storage.gather` returns them."""
    return {rows: values[places[rows]] for rows, values in action.items()}


# --- end shared: action head ---


# --- shared: embed action ---
def embed_action(head: ActionHead, action: Action, elements: dict[str, Ragged], obs: Obs) -> Tensor:
    """What the next steps see of an action: all parts, the mean of those that each row has."""
    embedded = []
    for each in head.heads:
        rows = each.part.rows
        vectors = each.embed(action[rows][:, each.part.columns], elements, obs)
        if rows != STEP:
            vectors = segment(vectors, elements[rows].ptr, "mean")
        embedded.append(vectors)
    return torch.cat(embedded, 1)


# --- end shared: embed action ---


# --- shared: pieces ---
def cut(num_steps: int, num_envs: int, num_minibatches: int) -> np.ndarray:
    """The bounds [0, ..., num_steps] of the pieces in which a rollout is cut: one, or where there
    are fewer environments than minibatches ceil(minibatches / environments)."""
    num = -(-num_minibatches // num_envs)
    return np.arange(num + 1) * num_steps // num


def random_parts(
    rng: np.random.Generator, num_steps: int, num_envs: int, num: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(steps, environments) of `num` random parts of a rollout: all steps of a piece of some
    environments."""
    cuts = cut(num_steps, num_envs, num)
    shares = np.bincount(np.arange(num) * (len(cuts) - 1) // num)  # parts of each piece
    for k in rng.permutation(len(shares)):
        steps = np.arange(cuts[k], cuts[k + 1])
        for envs in np.array_split(rng.permutation(num_envs), shares[k]):
            yield steps, envs


# --- end shared: pieces ---


# ---- Memory: gated Transformer-XL; T steps of B envs look at W steps before them; D = H * d ----
class GRUGate(nn.Module):
    """Joins a sublayer's output y, little of it at first, to the stream x (Parisotto et al.)."""

    def __init__(self, dim: int):
        super().__init__()
        self.y = nn.Linear(dim, 3 * dim, bias=False)  # W_r, W_z and W_g of the paper
        self.x = nn.Linear(dim, 2 * dim, bias=False)  # U_r and U_z
        self.rx = nn.Linear(dim, dim, bias=False)  # U_g
        self.bias = nn.Parameter(torch.full((dim,), 2.0))  # b_g

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        dim = len(self.bias)
        rz_y, h_y = self.y(y).split([2 * dim, dim], -1)
        r, z = (rz_y + self.x(x)).chunk(2, -1)
        h = torch.tanh(h_y + self.rx(r.sigmoid() * x))
        return torch.addcmul(x, torch.sigmoid(z - self.bias), h - x)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """What queries q [B, H, T, d] find in keys k and values v [B, H, W + T, d] at the distances W,
    ..., 0, whose logits have a bias [B, H, T, W + 1]. Chunks of C >= W queries, or of all T if
    T < W, find W + C keys: the cost is O(T W), as long as T has a divisor that fits."""
    T = q.shape[2]
    if T == 1:  # in few operations: it is called at each step
        logits = q @ k.mT / math.sqrt(q.shape[3]) + bias
        return logits.softmax(3) @ v
    W = k.shape[2] - T
    num = max(1, T // max(W, 16))
    while T % num:
        num -= 1
    C = T // num
    q = q.unflatten(2, (num, C))  # [B, H, num, C, d]
    k = k.unfold(2, W + C, C).mT  # [B, H, num, W + C, d]
    v = v.unfold(2, W + C, C).mT
    # Row i of a chunk finds distance W - m at key i + m: it lies one further to the right than the
    # row before, as it does where rows are one longer than there are keys. The rest is -inf. With
    # W = 1 and C = 2 (a b - -)(c d - -) becomes (a b -)(- c d)
    bias = bias.unflatten(2, (num, C))  # [B, H, num, C, W + 1]
    bias = F.pad(bias, (0, C), value=-torch.inf).flatten(3)
    bias = bias[..., : C * (W + C)].unflatten(3, (C, W + C))
    return F.scaled_dot_product_attention(q, k, v, bias).flatten(2, 3)


def feed_forward(dim: int) -> nn.Sequential:
    """The MLP of a transformer, with the norm of its input."""
    layers = [nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)]
    return nn.Sequential(*layers)


def encode_steps(steps: Tensor, dim: int) -> Tensor:
    """Sines and cosines of numbers of steps, [any] to [any, dim] (Dai et al. 2019, section 3.3)."""
    # 10,000 ** -(k / dim) for k = 0, 2, ... below dim
    rates = torch.logspace(0, 8 / dim - 4, dim // 2, dtype=torch.double, device=steps.device)
    angles = steps[:, None] * rates.float()
    return torch.cat([angles.sin(), angles.cos()], 1)


class GTrXLLayer(nn.Module):
    """Attention and MLP, each on the normalised stream, with a ReLU on its output and a gate. Heads
    begin with windows of about 1, 4, 16, ... and, the last one, all steps: the logits fall linearly
    with the distance, at learned rates (Press et al. 2022, arXiv:2108.12409)."""

    def __init__(self, dim: int, num_heads: int, gate: str):
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.r = nn.Linear(dim, dim, bias=False)  # W_k,R of Dai et al.
        self.out = nn.Linear(dim, dim, bias=False)
        self.bias_key = nn.Parameter(torch.zeros(num_heads, dim // num_heads))  # u of Dai et al.
        self.bias_distance = nn.Parameter(torch.zeros(num_heads, dim // num_heads))  # v
        decay = 4.0 ** -torch.arange(num_heads)
        decay[-1] = 0
        self.decay = nn.Parameter(decay)
        self.mlp = feed_forward(dim)
        self.gate_attention = GRUGate(dim) if gate == "gru" else torch.add
        self.gate_mlp = GRUGate(dim) if gate == "gru" else torch.add

    def keys_values(self, h: Tensor) -> Tensor:
        """Of normalised inputs [steps, B, D], [2, B, H, steps, d]."""
        kv = self.kv(h).unflatten(2, (2, self.num_heads, -1))
        return kv.permute(2, 1, 3, 0, 4)

    def forward(
        self, x: Tensor, kv: Tensor, distances: Tensor, encodings: Tensor, before: Tensor
    ) -> tuple[Tensor, ...]:
        """(outputs [T, B, D], what attention found [T, B, D], keys and values [2, B, H, W + T, d])
        of inputs x [T, B, D], after W steps with keys and values kv. `encodings` [W + 1, D] are
        those of the distances W, ..., 0; which of these are `before` the episode, [B, 1, T, W +
        1]."""
        h = self.norm_attention(x)
        q = self.q(h).unflatten(2, (self.num_heads, -1))  # [T, B, H, d]
        r = self.r(encodings).unflatten(1, (self.num_heads, -1))  # [W + 1, H, d]
        r = r / math.sqrt(q.shape[3])  # here, since attention scales only q . k
        bias = torch.einsum("tbhd,whd->bhtw", q + self.bias_distance, r)
        bias = bias - self.decay[:, None, None] * distances
        bias = torch.where(before, -torch.inf, bias)
        new = self.keys_values(h)
        kv = torch.cat([kv, new], 3)
        q = (q + self.bias_key).permute(1, 2, 0, 3)
        y = attend(q, kv[0], kv[1], bias)  # [B, H, T, d]
        found = self.out(y.permute(2, 0, 1, 3).flatten(2))
        x = self.gate_attention(x, found.relu())
        x = self.gate_mlp(x, self.mlp(x).relu())
        return x, found, kv


class GTrXL(nn.Module):
    """The gated Transformer-XL. UsageError for a width that its heads cannot share."""

    def __init__(self, args: Args):
        super().__init__()
        if args.dim % (2 * args.num_heads):
            raise UsageError(f"--dim {args.dim}: a multiple of 2 x --num-heads is needed")
        self.args = args
        self.layers = nn.ModuleList()
        for _ in range(args.num_layers):
            self.layers.append(GTrXLLayer(args.dim, args.num_heads, args.gate))

    def forward(self, x: Tensor, age: Tensor, kv: list) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(outputs [T, B, 2 D] of tokens x [T, B, D], the second half is what the last layer's
        attention found; the layers' inputs [layers, T, B, D]; and of each layer keys and values
        [2, B, H, W + T, d])"""
        distances = torch.arange(kv[0].shape[3], -1, -1, device=x.device)  # W, ..., 0
        encodings = encode_steps(distances, self.args.dim)
        before = distances > age.T[:, None, :, None]
        inputs = []
        keys_values = []
        for layer, old in zip(self.layers, kv):
            inputs.append(x)
            x, found, added = layer(x, old, distances, encodings, before)
            keys_values.append(added)
        return torch.cat([x, found], 2), torch.stack(inputs), keys_values

    def keys_values(self, inputs: Tensor, W: int) -> list[Tensor]:
        """Of each layer [2, B, H, W, d], of the last W of its inputs [layers, steps, B, D]."""
        missing = W - inputs.shape[1]  # zeros, which are out of reach; below 0 F.pad cuts
        kv = [layer.keys_values(layer.norm_attention(x)) for layer, x in zip(self.layers, inputs)]
        return [F.pad(x, (0, 0, missing, 0)) for x in kv]


class Memory:
    """The steps of a rollout of N environments: number t * N + i is step t of env i. `inputs` has
    the layers' inputs at the K steps before the rollout that are still in reach, and at its own. A
    batch looks back W steps: the largest age in it, but at most `memory_length`; a younger step
    sees no further than its own age. Keys and values are made anew for each rollout."""

    def __init__(self, agent: "Agent", leaves: list[Leaf], num_envs: int, args: Args):
        self.agent = agent
        self.args = args
        weight = next(agent.parameters())
        self.device = weight.device
        self.storage = Storage(leaves, self.device)
        # First at the K steps before the rollout, [layers, K, N, D], then at each step with K = 1
        self.inputs = [weight.new_zeros(args.num_layers, 0, num_envs, args.dim)]
        # What the next step sees of the last action
        self.seen_action = weight.new_zeros(num_envs, agent.action_dim)
        self.age = np.zeros(num_envs, np.int64)  # that of the next step, if its episode goes on

    @torch.no_grad()
    def begin(self) -> None:
        """A rollout begins: what was stored is let go, and what is out of reach."""
        self.storage.blocks.clear()
        self.inputs = [self.state()["inputs"]]
        # Of each layer [2, N, H, K, d], by the present weights; `act` adds those of its step
        self.kv = self.agent.gtrxl.keys_values(self.inputs[0], self.reach(self.age))
        self.actions = []
        self.is_step = []  # as in Step, of each
        self.ages = []
        self.previous = []
        self.finals = []  # V of the last observations of episodes that were truncated

    @torch.no_grad()
    def act(self, step: Step, greedy: bool = False) -> tuple[Action, Tensor, Tensor]:
        """(action, log_prob [N], value [N]) at the observations of `step`, which are stored."""
        obs = self.storage.append(step.obs)
        age = np.where(step.terminated | step.truncated, 0, self.age)
        ages, previous, kv = self.past(step, age)
        features, elements, inputs, self.kv = self.agent.encode(obs, ages, previous, kv)
        action, log_prob, _, value = self.agent(features, elements, obs, greedy=greedy)
        if self.args.prev_action:
            self.seen_action = embed_action(self.agent.head, action, elements, obs)
        self.inputs.append(inputs)
        self.previous.append(previous)
        self.actions.append(action)
        self.is_step.append(np.full(step.reward.shape, step.is_step))
        self.ages.append(age)
        self.age = age + 1
        return action, log_prob, value

    @torch.no_grad()
    def keep(self, step: Step) -> None:
        """Keeps what is needed to value the last observations of episodes that `step` truncated."""
        if step.finals:
            cut = to_device(np.flatnonzero(step.truncated), self.device)
            age, previous, kv = self.past(step, self.age)  # as if the episodes had gone on
            past = age[:, cut], previous[cut], [x[:, cut] for x in kv]
            self.finals.append(self.value(join(step.finals), *past))

    @torch.no_grad()
    def next_values(self, step: Step) -> Tensor:
        """V [N + truncations]: of `step.obs`, which the last actions led to, then of `finals`."""
        age = np.where(step.terminated | step.truncated, 0, self.age)
        return torch.cat([self.value(step.obs, *self.past(step, age)), *self.finals])

    def value(self, flat: Flat, *past) -> Tensor:
        """V of observations that are no steps of the rollout, [B]."""
        obs = self.storage.batch(self.storage.copy(flat))
        features, *_ = self.agent.encode(obs, *past)
        seen = self.agent.critic_encoder.beside(features, obs)
        return self.agent.critic(seen).squeeze(1)

    def past(self, step: Step, age: np.ndarray) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What the step at these ages [N] knows of those before it, as `Agent.encode` takes it."""
        seen = [self.seen_action]
        if self.args.prev_reward:
            seen.append(to_device(step.reward, self.device)[:, None])
        W = self.reach(age)
        kv = [x[..., x.shape[3] - W :, :] for x in self.kv]  # the last W; `-W :` fails for W = 0
        return to_device(age[None], self.device), torch.cat(seen, 1), kv

    def reach(self, age: np.ndarray) -> int:
        """The largest distance at which steps of these ages see something."""
        return min(int(age.max()), self.args.memory_length)

    def minibatches(self, rng: np.random.Generator, num: int) -> Iterator[tuple[Tensor, tuple]]:
        """`num` random parts of the rollout: the indices of its steps and the agent's inputs."""
        ages = np.stack(self.ages)  # [T, N]
        numbers = np.arange(ages.size).reshape(ages.shape)
        actions = join_actions(self.actions)
        is_step = np.concatenate(self.is_step)
        previous = torch.cat(self.previous)
        for steps, envs in random_parts(rng, *ages.shape, num):
            idx = numbers[steps][:, envs].ravel()
            age = ages[steps][:, envs]
            W = self.reach(age)
            # One step more than W, as W may be 0; keys_values cuts what is too much
            inputs = torch.cat(self.inputs[max(0, steps[0] - W) : steps[0] + 1], 1)
            kv = self.agent.gtrxl.keys_values(inputs[:, :, to_device(envs, self.device)], W)
            obs, places = self.storage.gather(idx)
            past = to_device(age, self.device), previous[places[STEP]], kv
            features, elements, *_ = self.agent.encode(obs, *past)
            mb, learned = places[STEP], None
            if not is_step[idx].all():
                learned = to_device(np.flatnonzero(is_step[idx]), self.device)
                mb = mb[learned]
            action = select_action(actions, places)
            yield mb, (features, elements, obs, action, False, learned)

    def rollout(self) -> Obs:
        """The observations of the rollout's steps."""
        obs, _ = self.storage.gather(np.flatnonzero(np.concatenate(self.is_step)))
        return obs

    def state(self) -> dict:
        """What a checkpoint keeps: what the next step attends to, and sees of the last action."""
        inputs = torch.cat(self.inputs, 1)
        first = inputs.shape[1] - self.reach(self.age)
        inputs = inputs[:, first:].clone()
        return {"inputs": inputs, "age": self.age, "action": self.seen_action}

    def restore(self, state: dict) -> None:
        self.inputs = [state["inputs"].to(self.device)]
        self.age = state["age"]
        self.seen_action = state["action"].to(self.device)


# ---- Agent: the networks ----
class Agent(nn.Module):
    """Actor and critic: one encoder, one transformer, an MLP each, and the action head."""

    def __init__(self, leaves: list[Leaf], action_space: gym.Space, args: Args):
        super().__init__()
        self.critic_encoder = Encoder(critic_leaves(leaves, args.critic_only), args)
        leaves = policy_leaves(leaves, args.critic_only)
        self.encoder = Encoder(leaves, args)
        self.gtrxl = GTrXL(args)
        # Beside images actor and critic do not see the age: else the policy is sure of what it does
        # by the clock before it has learned to see
        self.shows_age = not any(leaf.is_image for leaf in self.encoder.leaves)
        # They see the observation, the stream, what attention found (D each) and the age's encoding
        widths = [self.encoder.dim + (2 + self.shows_age) * args.dim, *args.hidden_dims]
        self.actor = mlp(widths, args.activation)
        latent_dim = widths[-1]
        widths[0] += self.critic_encoder.dim
        self.critic = mlp(widths, args.activation)
        self.critic.append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        dims = self.encoder.element_dims
        self.head = ActionHead(action_space, leaves, latent_dim, dims, args)
        parts = [head.part for head in self.head.heads]
        self.action_dim = seen_dim(parts, dims) if args.prev_action else 0
        num_inputs = self.encoder.dim + self.action_dim + args.prev_reward
        # With its bias the size of an input survives the LayerNorms, which would divide it out.
        # Previous actions are mostly noise: their weights begin small
        self.token = nn.Linear(num_inputs, args.dim)
        self.token.weight.data[:, self.encoder.dim :] *= 0.1
        # An MLP before attention, so that keys and values know an action together with its outcome
        self.token_mlp = feed_forward(args.dim)

    def encode(self, obs: Obs, age: Tensor, previous: Tensor, kv: list[Tensor]) -> tuple:
        """(features [T * B, any], elements, and what GTrXL returns besides) of T steps of B envs.
        An episode had age [T, B] steps before them. Unless that is 0 a step sees `previous` [T * B,
        any] of the one before. kv are those of the W steps before the first, [2, B, H, W, d]."""
        features, elements = self.encoder(obs)
        ages = age.flatten()
        previous = previous * (ages > 0)[:, None]
        tokens = self.token(torch.cat([features, previous], 1))
        tokens = tokens + self.token_mlp(tokens)
        outputs, inputs, kv = self.gtrxl(tokens.unflatten(0, age.shape), age, kv)
        seen = [features, outputs.flatten(0, 1)]
        if self.shows_age:
            seen.append(encode_steps(ages, outputs.shape[2] // 2))
        return torch.cat(seen, 1), elements, inputs, kv

    def forward(
        self, features: Tensor, elements: dict, obs: Obs, action=None, greedy=False, learned=None
    ):
        """(action, log_prob [B], entropy [B], value [B]) given features [B, dim]; all but the
        action only of the steps `learned` (int64; None: all)."""
        action, *outputs = self.head(self.actor(features), elements, obs, action, greedy)
        outputs.append(self.critic(self.critic_encoder.beside(features, obs)).squeeze(1))
        return action, *(outputs if learned is None else [x[learned] for x in outputs])


# --- shared: run ---
# ---- Run: its agent, its folder and its log ----
def make_agent(args: Any, envs: Any) -> "Agent":
    """An agent whose weights are the same on all ranks."""
    seed(args)  # environments may have drawn from the generators
    agent = Agent(envs.leaves, envs.action_space, args)
    agent.load_state_dict(all_ranks(agent.state_dict())[0])
    return agent


class Run:
    """The folder of a run, its log and its progress bar. Services have a Run of their own, made of
    this one, which writes checkpoints and goes on from them: `begin` and `end_update` are given all
    that it needs."""

    first = 0  # updates made before, if the run was resumed
    std_floor = 0.0  # the largest std of the returns so far, see --adv-floor

    def __init__(self, args: Any):
        self.args = args
        env_name = args.env_id.split(":")[-1].replace("/", "-")
        name = f"{env_name}__{args.exp_name}__{args.seed}__{int(1000 * time.time())}"
        self.folder = Path(args.run_dir, name).absolute()

    def begin(self, agent: nn.Module, optimizer, memory, envs, rng) -> Step:
        """The Step to begin with. Gives each rank random numbers of its own and opens the log."""
        if RANK > 0:
            torch.manual_seed(self.args.seed + RANK)
        # What is drawn stays the same if environments draw from torch's generator, or seed it
        device = next(agent.parameters()).device
        agent.head.generator = default_generator(device).clone_state()
        if RANK == 0:
            print(f"writes to {self.folder}")
            self.writer = SummaryWriter(self.folder)
            self.bar = self.make_bar()
        return envs.reset(self.args.seed + RANK * self.args.num_envs)

    def make_bar(self) -> tqdm:
        return tqdm(total=self.args.total_timesteps, unit_scale=True)

    def end_update(self, global_step: int, step: Step, scalars: dict, episodes: list) -> None:
        """Logs the scalars of rank 0, and mean, minimum and maximum over the episodes of all ranks
        that ended in the rollout, (global step, env, last info) each. The next update begins with
        `step`."""
        episodes = sum(all_ranks(episodes), [])
        if RANK > 0:
            return
        for name, key in (("charts/episodic_return", "r"), ("charts/episodic_length", "l")):
            numbers = [info["episode"][key] for _, _, info in episodes]
            if numbers:
                scalars[name] = np.mean(numbers)
            if len(numbers) > 1:
                scalars |= {f"{name}_min": min(numbers), f"{name}_max": max(numbers)}
        self.bar.update(global_step - self.bar.n)
        num_steps = global_step - self.bar.initial
        scalars["charts/SPS"] = int(num_steps / self.bar.format_dict["elapsed"])
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        if episodes:
            self.bar.set_postfix(ret=f"{scalars['charts/episodic_return']:.4g}")

    def close(self) -> None:
        self.bar.close()
        self.writer.close()


# --- end shared: run ---


# --- shared: train ---
# ---- Train: collect, advantages, update, log ----
def train(args: Any, run: Run, envs: Envs) -> Agent:
    """Trains by PPO: collects, computes advantages, updates, logs. Returns the agent."""
    complete(args, envs.leaves)
    T = args.num_steps
    N = args.num_envs
    device = start(args)
    rng = np.random.default_rng(args.seed + RANK)  # of the minibatches
    agent = make_agent(args, envs).to(device)
    memory = Memory(agent, envs.leaves, N, args)
    params = list(agent.parameters())
    optimizer = torch.optim.Adam(
        params, lr=args.learning_rate, eps=1e-5, amsgrad=args.amsgrad, fused=True
    )
    step = run.begin(agent, optimizer, memory, envs, rng)  # of envs.reset, or of a checkpoint

    for iteration in range(run.first + 1, args.num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / args.num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate

        # Collect: T steps of N environments
        memory.begin()
        rewards = np.zeros((T, N), np.float32)
        dones = np.zeros((T, N), np.float32)
        truncated = np.zeros((T, N), bool)
        is_step = np.zeros((T, N), bool)
        log_probs = []
        values = []
        episodes = []
        for t in range(T):
            is_step[t] = step.is_step
            action, log_prob, value = memory.act(step)
            step = envs.step(agent.head.env_actions(action, step.obs.counts))
            memory.keep(step)
            log_probs.append(log_prob)
            values.append(value)
            rewards[t] = step.reward
            dones[t] = step.terminated | step.truncated
            truncated[t] = step.truncated
            global_step = ((iteration - 1) * T + t + 1) * N * WORLD_SIZE
            episodes += [(global_step, i, info) for i, info in step.infos]
        log_probs = torch.cat(log_probs)  # [T * N]
        values = torch.cat(values)

        # Advantages: GAE (Schulman et al. 2015, eq. 16), cut where an episode ends. If it was
        # truncated, gamma V(final observation) stands for the rewards that would have followed.
        # V of the T * N steps, of the N observations after the last one and of the final
        # observation of each truncated episode, in one array: one wait for the device
        all_values = torch.cat([values, memory.next_values(step)]).cpu().numpy()
        V, next_value, final_values = np.split(all_values, [T * N, T * N + N])
        V = V.reshape(T, N)
        rewards[truncated] += args.gamma * final_values  # both in the order of steps, then envs
        advantages = np.zeros_like(rewards)
        lastgaelam = 0.0
        for t in reversed(range(T)):
            nonterminal = 1.0 - dones[t]
            delta = rewards[t] + args.gamma * next_value * nonterminal - V[t]
            lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            advantages[t] = lastgaelam
            next_value = V[t]
        # The returns are advantages + V, so advantages are the errors of V
        errors = advantages[is_step]
        returns = errors + V[is_step]
        explained_var = 1 - np.var(errors) / max(np.var(returns), 1e-12)
        returns_std = np.std(np.concatenate(all_ranks(returns)))
        # For --adv-floor; it is the run's, so that checkpoints keep it
        run.std_floor = max(returns_std, args.adv_floor_decay * run.std_floor)
        vf_coef = args.vf_coef
        if args.norm_vloss:
            vf_coef /= args.norm_vloss + returns_std**2
        advantages = to_device(advantages.reshape(-1), device)
        returns = advantages + values

        # Update: the clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9)
        logs = []
        for _ in range(args.update_epochs):
            for mb, inputs in memory.minibatches(rng, args.num_minibatches):
                _, new_log_prob, entropy, new_value = agent(*inputs)
                logratio = new_log_prob - log_probs[mb]
                ratio = logratio.exp()
                mb_advantages = advantages[mb]
                if args.norm_adv and len(mb) > 1:
                    std = mb_advantages.std() + args.adv_floor * run.std_floor + 1e-8
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / std
                pg_loss1 = -mb_advantages * ratio
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss2 = -mb_advantages * clipped
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
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
                    row = {
                        "losses/value_loss": v_loss,
                        "losses/policy_loss": pg_loss,
                        "losses/entropy": entropy_loss,
                        "losses/old_approx_kl": -logratio.mean(),
                        "losses/approx_kl": approx_kl,
                        "losses/clipfrac": clipfrac,
                        "losses/grad_norm": grad_norm,
                        "debug/collection_mismatch": distance.max(),
                    }
                    logs.append(torch.stack(list(row.values())))
            if args.target_kl is not None and np.mean(all_ranks(approx_kl.item())) > args.target_kl:
                break
        if args.norm_obs:  # after the update, whose inputs must be normalised as in collection
            obs = memory.rollout()
            agent.encoder.observe(obs)
            agent.critic_encoder.observe(obs)

        logs = dict(zip(row, torch.stack(logs).cpu().numpy().T))  # name -> one of each minibatch
        scalars = {name: values[-1] for name, values in logs.items()}
        scalars["losses/clipfrac"] = logs["losses/clipfrac"].mean()
        # max |ratio - 1| before the first step of the optimizer: 0 but for rounding
        scalars["debug/collection_mismatch"] = logs["debug/collection_mismatch"][0]
        scalars["losses/explained_variance"] = explained_var
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        run.end_update(global_step, step, scalars, episodes)
    if WORLD_SIZE > 1:  # together: NCCL needs all ranks for it
        dist.barrier()
        dist.destroy_process_group()
    return agent


# --- end shared: train ---


# --- shared: play ---
@torch.no_grad()
def play(agent: Agent, args: Any, envs: Envs, greedy: bool) -> list[dict]:
    """The last info of the first episode of each environment. One that has not ended after
    --eval-max-steps is cut off, which its info says by "cut"."""
    N = len(envs.envs)
    memory = Memory(agent, envs.leaves, N, args)
    step = envs.reset(args.seed + 10_000)
    infos = {}
    for t in range(args.eval_max_steps):
        if t % args.num_steps == 0:
            memory.begin()
        action, _, _ = memory.act(step, greedy)
        step = envs.step(agent.head.env_actions(action, step.obs.counts))
        infos = dict(step.infos) | infos
        if len(infos) == N:
            break
    for i in set(range(N)) - set(infos):
        ret = record_of(envs.envs[i]).episode_returns
        infos[i] = {"episode": {"r": ret, "l": args.eval_max_steps}, "cut": True}
    return [infos[i] for i in range(N)]


# --- end shared: play ---


# --- shared: main ---
def main(args: Any) -> None:
    """Trains, saves and plays."""
    seed(args)
    run = Run(args)
    first = RANK * args.num_envs
    envs = Envs([partial(make_env, args, first + i) for i in range(args.num_envs)])
    agent = train(args, run, envs)
    envs.close()
    if RANK > 0:
        return
    run.close()
    if args.save_model:
        model = {"script": Path(__file__).stem, "args": vars(args), "model": agent.state_dict()}
        torch.save(model, run.folder / "model.pt")
    if args.eval_episodes:
        envs = Envs([partial(make_env, args, i) for i in range(args.eval_episodes)])
        infos = play(agent, args, envs, greedy=True)
        envs.close()
        print("returns of greedy episodes:", *[float(info["episode"]["r"]) for info in infos])


# --- end shared: main ---


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    if (folder / "__init__.py").exists():  # the package is found beside it; its `envs` is not yours
        sys.path[0] = str(folder.parent)
    if find_spec("cleanrl_graph"):  # checks, checkpoints, evaluation tables, workers, their flags
        from cleanrl_graph import services

        services.main(sys.modules[__name__], version=2)
    else:
        sys.path.append(os.getcwd())  # --env-id finds your module
        main(tyro.cli(Args))
