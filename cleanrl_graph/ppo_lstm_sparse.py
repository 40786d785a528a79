"""PPO with an LSTM whose state is sparse and grows: an entry for each node that was ever seen.

    python cleanrl_graph/ppo_lstm_sparse.py --env-id envs:StatelessCartPole-v1
    python cleanrl_graph/ppo_lstm_sparse.py --env-id envs:GraphExplore-v0 --remember-edges
    python cleanrl_graph/ppo_lstm_sparse.py --env-id your_module:YourEnv-v0 --prev-reward

Read ppo_lstm_sparse_mini.py first: it is the idea alone. Sections of this file: Args,
ranks, observations, environments, storage, encoder, action heads, memory (an LSTM), agent, run,
train.

A leaf is one array of an observation, and every leaf is rows: any number per step for the nodes of
a graph, its edges or the elements of a set, one for everything else. Each row is stored once, and a
minibatch is one selection of rows per leaf. An action may choose a node, an edge or an element, or
each of them may act.

If the observation has the key `node_ids`, an integer per node or set element, each id has an LSTM
state of its own: the LSTM runs on the nodes that are seen, and nodes that were never seen have no
state. Otherwise each environment has one: the ordinary LSTM. benchmark/results/memory.md says
why some defaults are not those of ppo_graph.py.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), its implementation details (Huang et al. 2022,
ICLR blog track), GAE (Schulman et al. 2015, arXiv:1506.02438), GINE (Hu et al. 2020,
arXiv:1905.12265), Deep Sets (Zaheer et al. 2017, arXiv:1703.06114), pointer networks (Vinyals et
al. 2015, arXiv:1506.03134).
Memory: LSTM (Hochreiter and Schmidhuber 1997), GRU (Cho et al. 2014), minGRU (Feng et al. 2024,
arXiv:2410.01201), R2D2 (Kapturowski et al. 2019, ICLR).
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
    --hidden-dims on) and of the algorithm (from --total-timesteps on)."""

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

    env_id: str = "CartPole-v1"
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

    state_per_node: bool = True
    """with node_ids, each node has a state of its own; otherwise each env"""
    cell: Literal["lstm", "gru", "mingru"] = "lstm"
    """recurrent cell; a GRU has no c, and 3 gates where an LSTM has 4; a minGRU has one, which sees
    the input alone"""
    lstm_dim: int = 128
    """width of the cell's hidden state"""
    prev_action: bool = True
    """the previous action is an input"""
    prev_reward: bool = False
    """the previous reward is an input"""
    remember_edges: bool = False
    """edges are remembered, with the features they had when first seen (of parallel edges only the
    first); visible nodes get messages of remembered neighbors (node_ids)"""

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
    """the number of mini-batches"""
    update_epochs: int | None = None
    """the K epochs to update the policy; None: 4 with a state per node, else 8"""
    norm_adv: bool = True
    """toggles advantages normalization"""
    adv_floor: float = 0.1
    """keeps updates small where a task is solved: norm_adv adds this share of the returns' std to
    the advantages' std"""
    adv_floor_decay: float = 0.0
    """if above 0, adv_floor takes the largest std of the returns so far, which decays by this
    factor at each update; 0.999 in the tables of ppo_framestack.py and ppo_gtrxl.py"""
    amsgrad: bool = False
    """makes Adam AMSGrad (Reddi et al. 2018), whose steps stay small after large gradients, as in
    the tables of ppo_framestack.py and ppo_gtrxl.py"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = False
    """toggles the clipped loss of the value function"""
    norm_vloss: float = 0.01
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
        has_ids = any(leaf.path == "node_ids" for leaf in leaves)
        args.update_epochs = 4 if args.state_per_node and has_ids else 8


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


# ---- Memory: an LSTM with a state for each node that was seen ----
class Entries(NamedTuple):
    """A sparse array in COO form: what envs know under keys, in any order."""

    env: np.ndarray  # int64 [entries]
    keys: np.ndarray  # int64 [entries], of edges [entries, 2]
    values: Tensor  # [entries, any]

    def select(self, rows: np.ndarray) -> "Entries":
        values = select_rows(self.values, to_device(rows, self.values.device))
        return Entries(self.env[rows], self.keys[rows], values)

    def move(self, place: np.ndarray) -> "Entries":
        """Entries of env i become those of env place[i]; where that is -1, they are dropped."""
        env = place[self.env]
        rows = np.flatnonzero(env >= 0)
        return self.select(rows)._replace(env=env[rows])


class State(NamedTuple):
    """What N envs remember. A node's key is its id, an edge's keys are those of source and target.
    Without ids each env has one entry, with key 0."""

    nodes: Entries  # h and c, [nodes, 2, H], or h alone, [nodes, 1, H]
    edges: Entries  # with --remember-edges: the features that an edge had when first seen
    action: Tensor  # [N, any], the last action, embedded

    def select(self, envs: np.ndarray) -> "State":
        """The state of these envs, int64, in that order."""
        place = np.full(len(self.action), -1)
        place[envs] = np.arange(len(envs))
        action = select_rows(self.action, to_device(envs, self.action.device))
        return State(self.nodes.move(place), self.edges.move(place), action)

    def forget(self, starts: np.ndarray) -> "State":
        """The state without the nodes and edges of envs that start an episode, bool [N]."""
        if not starts.any():
            return self
        place = np.where(starts, -1, np.arange(len(starts)))
        return State(self.nodes.move(place), self.edges.move(place), self.action)


def join_states(states: list[State]) -> State:
    """One state of all their envs, first those of the first one."""
    joined = []
    for parts in list(zip(*states))[:2]:  # nodes, then edges
        first = 0
        moved = []
        for entries, state in zip(parts, states):
            moved.append(entries._replace(env=first + entries.env))
            first += len(state.action)
        env, keys, values = zip(*moved)
        joined.append(Entries(np.concatenate(env), np.concatenate(keys), torch.cat(values)))
    return State(*joined, torch.cat([state.action for state in states]))


class Seen(NamedTuple):
    """What M envs see in T steps each; step t of env m is number m * T + t. An event is a node in a
    step or, without ids, a step. Acting takes one step, learning a rollout or a piece of it."""

    starts: np.ndarray  # bool [M * T], whether an episode begins with the step
    rewards: np.ndarray  # float32 [M * T], of the step before
    step: np.ndarray  # int64 [events], ascending
    keys: np.ndarray  # int64 [events]
    links: np.ndarray  # int64 [edges, 2], with --remember-edges: the events of source and target


class Timeline:
    """Which rows belong to the same entry. Row 0 is zeros, then come the entries of a state, then
    the events. In a new episode entries are new, too. An example: the state has key 7, the env sees
    the nodes (9, 7), then (9), and in the first step of an episode (7):

        row      0  1  2  3  4  5
        key      -  7  9  7  9  7
        step     -  0  0  0  1  2   a state is that before the first step
        entry    0  1  2  1  2  3   sorted by episode and key
        before   0  0  0  1  2  0   the row of the same entry that it follows, or 0
        order    0  1  3  2  4  5   rows sorted by entry, then by time
        last     0  3  4  5         the last row of each entry
    """

    def __init__(self, state: State, seen: Seen):
        steps = np.arange(len(seen.starts))
        self.T = len(steps) // len(state.action)
        begins = np.where(seen.starts | (steps % self.T == 0), steps, 0)
        self.first = np.maximum.accumulate(begins)  # of each step's episode
        self.num_old = 1 + len(state.nodes.keys)  # the first event's row
        self.step = np.concatenate([[0], state.nodes.env * self.T, seen.step])
        self.keys = np.concatenate([[0], state.nodes.keys, seen.keys])
        self.names, name = np.unique(self.keys, return_inverse=True)
        # One number per episode, which its first step names, and key. A state has nothing of envs
        # that begin an episode with step 0, see State.forget
        code = self.first[self.step] * len(self.names) + name
        code[0] = -1  # row 0 is an entry of its own
        self.codes, self.entry = np.unique(code, return_inverse=True)
        self.order = np.argsort(self.entry, kind="stable")
        is_first = np.diff(self.entry[self.order], prepend=-1) > 0
        self.last = self.order[np.roll(is_first, -1)]
        self.before = np.zeros_like(self.order)
        self.before[self.order] = np.where(is_first, 0, np.roll(self.order, 1))

    def sequences(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(events sorted by entry and time; how many each entry has, if any; the row before its
        first one). In the example (1, 0, 2, 3), (1, 2, 1) and (1, 0, 0)."""
        rows = self.order[self.order >= self.num_old]
        before = self.before[rows]
        begins = before < self.num_old
        stops = np.flatnonzero(np.append(begins, True))
        return rows - self.num_old, np.diff(stops), before[begins]

    def edges(self, state: State, seen: Seen) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each edge once: (entries of source and target [E, 2]; the step since which it is known
        [E]; its number among the edges of `state`, then those of `seen`)."""
        env, keys, _ = state.edges
        code = (env * self.T * len(self.names))[:, None] + np.searchsorted(self.names, keys)
        links = self.num_old + seen.links
        ends = np.concatenate([np.searchsorted(self.codes, code), self.entry[links]])
        since = np.append(env * self.T, self.step[links[:, 0]])
        _, rows = np.unique(ends @ [len(self.codes), 1], return_index=True)  # the first of each
        return ends[rows], since[rows], rows

    def messages(
        self, ends: np.ndarray, since: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is sent to the events along the edges that are known by then: (number of the edge;
        newest row of its source; ptr: the messages ptr[e]:ptr[e + 1] are sent to event e)."""
        source, target = ends.T
        step = self.step[self.num_old :]
        # All edges to the entry of each event, then those of them that are known
        num = np.bincount(target, minlength=len(self.codes))
        entry = self.entry[self.num_old :]
        edge = np.argsort(target)[ranges((num.cumsum() - num)[entry], num[entry])]
        event = np.arange(len(entry)).repeat(num[entry])
        is_known = since[edge] <= step[event]
        edge = edge[is_known]
        event = event[is_known]
        # (entry, step) as one number, ascending in `order`: finds the source's last row by then
        num_steps = len(self.first)
        clock = self.entry * num_steps + self.step
        now = source[edge] * num_steps + step[event]
        newest = np.searchsorted(clock[self.order], now, side="right") - 1
        num = np.bincount(event, minlength=len(entry))
        return edge, self.order[newest], np.concatenate([[0], num.cumsum()])


class LSTM(nn.LSTM):
    """nn.LSTM whose state is one tensor as that of nn.GRU is, [2, B, H]: h and c."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = super().forward(x, tuple(state.split(1)))
        return output, torch.cat(state)


class MinGRU(nn.Linear):
    """A minGRU that is called as nn.GRU is: h = z h + (1 - z) new, where z and new depend on the
    input alone. So h = a h + b, and all a and b are known before the first h."""

    def __init__(self, dim: int, H: int):
        super().__init__(dim, 2 * H)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(x, nn.utils.rnn.PackedSequence):
            x, lengths = nn.utils.rnn.pad_packed_sequence(x)
            h, last = self(x, state)
            return nn.utils.rnn.pack_padded_sequence(h, lengths), last
        new, z = super().forward(x).chunk(2, -1)  # [T, B, H]
        a = z.sigmoid()
        b = new - a * new
        h = Scan.apply(a, b, state) if len(b) > 1 else b + a * state
        return h, h[-1:]


class Scan(torch.autograd.Function):
    """h = a h + b along the steps from a state on, with gradients: those of b are a scan, too,
    backwards in time."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
        h = scan(a, torch.cat([torch.addcmul(b[:1], a[:1], state), b[1:]]))
        ctx.save_for_backward(a, h, state)
        return h

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, h, state = ctx.saved_tensors
        grad_b = scan(a.roll(-1, 0).flip(0), grad.flip(0)).flip(0)
        return grad_b * torch.cat([state, h[:-1]]), grad_b, grad_b[:1] * a[:1]


def scan(a: Tensor, b: Tensor) -> Tensor:
    """h = a h + b after a row of zeros, [T, any], in log2(T) turns: two steps are one step,
    h = a (a' h + b') + b. Half as many of these have each second h, then the others follow from the
    h before them. a[0] has no effect, as the h before it is 0."""
    h = b.clone()
    if len(h) > 1:
        second = a[1::2]
        both = torch.addcmul(b[1::2], second, b[:-1:2])
        h[1::2] = scan(second * a[:-1:2], both)
        h[2::2] += a[2::2] * h[1:-1:2]
    return h


def run_cell(
    cell: LSTM | nn.GRU | MinGRU,
    x: Tensor,
    state: Tensor,
    events: np.ndarray,
    lengths: np.ndarray,
    begin: np.ndarray,
) -> tuple[Tensor, Tensor | None]:
    """Runs the cell over sequences of any lengths: x[events] has them one after the other; number k
    has lengths[k] rows and begins with state[:, begin[k]], [2 (h and c) or 1, any, H]. Returns h
    [events, H] in the order of x and, if each sequence has a single row, the state after it.

    On CUDA cuDNN runs a PackedSequence. On the CPU, where that is slow, each call makes all steps
    until the next sequences end: a stair of a staircase."""
    if not len(x):
        return state[0, :0], state[:, :0]
    if len(lengths) == len(x):  # one row each
        begin = to_device(begin[np.argsort(events)], x.device)
        _, state = cell(x[None], state.index_select(1, begin))
        return state[0], state
    order, num_active, place = by_time(events, lengths)
    begin, place = pack([begin[order], place], x.device)
    state = state.index_select(1, begin)
    x = x.new_zeros(num_active.sum(), x.shape[1]).index_copy(0, place, x)
    if x.is_cuda:
        packed = nn.utils.rnn.PackedSequence(x, torch.from_numpy(num_active))
        h = cell(packed, state)[0].data
    else:
        h = run_stairs(cell, x, num_active, state)
    return select_rows(h, place), None


def run_stairs(cell: nn.Module, x: Tensor, num_active: np.ndarray, state: Tensor) -> Tensor:
    """h where x has the order of a PackedSequence, num_active[t] sequences at step t."""
    widths, num_steps = np.unique(-num_active, return_counts=True)
    widths = -widths  # numbers of sequences, the largest first
    stairs = x.split((widths * num_steps).tolist())
    outputs = []
    for stair, width in zip(stairs, widths.tolist()):
        output, state = cell(stair.unflatten(0, (-1, width)), state[:, :width])
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)


def by_time(events: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A PackedSequence, sorted by step, then the longest sequence first: (order of the sequences;
    their number at each step; place of each event). The number falls when 50 places would stay
    empty, rows of zeros whose outputs nobody reads: another call of the cell costs as much."""
    order = np.argsort(-lengths, kind="stable")
    num_active = np.searchsorted(-lengths[order], -np.arange(lengths.max()))
    num_empty = 0
    for t in range(1, len(num_active)):
        num_empty += num_active[t - 1] - num_active[t]
        if num_empty < 50:
            num_active[t] = num_active[t - 1]
        else:
            num_empty = 0
    step = ranges(0 * lengths, lengths)
    rank = np.argsort(order).repeat(lengths)
    place = np.empty_like(events)
    first_place = num_active.cumsum() - num_active  # of each step
    place[events] = first_place[step] + rank
    return order, num_active, place


class SparseLSTM(nn.Module):
    """An LSTM with a sequence per entry and, with ids, a readout of all that is remembered."""

    def __init__(self, input_dim: int, edge_dim: int, per_node: bool, args: Any):
        super().__init__()
        H = args.lstm_dim
        self.per_node = per_node
        self.dim = H + per_node  # of the readout, whose last column per node is log(1 + number)
        layer = nn.Linear(input_dim, args.gnn_dim)  # its bias keeps the input's scale visible
        norm = nn.LayerNorm(args.gnn_dim)
        # Small: gates that are less saturated learn to count sooner
        nn.init.constant_(norm.weight, 0.5)
        self.token = nn.Sequential(layer, norm, nn.ReLU())
        self.parts = 2 if args.cell == "lstm" else 1  # of the state: h and c, or h
        cells = {"lstm": LSTM, "gru": nn.GRU, "mingru": MinGRU}
        self.cell = cells[args.cell](args.gnn_dim, H)
        for parameter in self.cell.parameters():
            init = nn.init.orthogonal_ if parameter.dim() > 1 else nn.init.zeros_
            for gate in parameter.split(H):
                init(gate)
        bias = next(weights for weights in self.cell.parameters() if weights.dim() == 1)
        # Forget gates, of a GRU update gates, begin between short and long memories
        bias.data[H : 2 * H] = torch.linspace(0, 5, H)
        self.message = nn.Linear(H + edge_dim, H) if args.remember_edges else None

    def forward(
        self, x: Tensor, features: Tensor, state: State, seen: Seen
    ) -> tuple[Tensor, Tensor, Entries | None, Entries | None]:
        """From the inputs x [events, any] and the edges' features [edges, any]: (what is remembered
        of the nodes that are seen, [events, H]; the readout of each step [M * T, dim]; if T is 1,
        the nodes and edges of the new state)."""
        timeline = Timeline(state, seen)
        old = F.pad(state.nodes.values, (0, 0, 0, 0, 1, 0))  # row 0 is zeros
        h, new = run_cell(self.cell, self.token(x), old.transpose(0, 1), *timeline.sequences())
        rows = torch.cat([old[:, 0], h])  # [rows, H]
        edges = state.edges
        out = h
        if self.message:
            ends, since, once = timeline.edges(state, seen)
            all_features = torch.cat([state.edges.values, features])
            features = select_rows(all_features, to_device(once, x.device))
            edges = Entries(since, timeline.keys[timeline.last[ends]], features)
            edge, sender, ptr = pack(timeline.messages(ends, since), x.device)
            sent = torch.cat([select_rows(rows, sender), select_rows(features, edge)], 1)
            out = h + segment(self.message(sent).relu(), ptr, "mean")
        readout = self.sum_up(rows, timeline) if self.per_node else out
        if timeline.T > 1:
            return out, readout, None, None
        last = timeline.last[1:]  # with T = 1 the number of a step is its env
        nodes = Entries(timeline.step, timeline.keys, torch.cat([old, new.transpose(0, 1)]))
        return out, readout, nodes.select(last), edges

    def sum_up(self, rows: Tensor, timeline: Timeline) -> Tensor:
        """[M * T, H + 1]: mean of the newest rows of all entries at each step, log(1 + their
        number). It is a running sum of what each row changes."""
        arrays = [timeline.before[1:], timeline.step[1:], timeline.first]
        before, step, first = pack(arrays, rows.device)
        changes = rows[1:] - select_rows(rows, before)
        # double, as what earlier episodes added is subtracted again; the last column counts
        changes = torch.cat([changes, before[:, None] == 0], 1).double()
        added = changes.new_zeros(len(first), self.dim).index_add(0, step, changes)  # by each step
        sums = added.t().cumsum(1).t()  # along the rows of a matrix: faster on CUDA
        sums = sums - select_rows(sums - added, first)  # what was there before the episode
        sums, num = sums.tensor_split([-1], 1)
        return torch.cat([sums / num.clamp(min=1), num.log1p()], 1).to(rows.dtype)


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


class Memory:
    """The steps of a rollout of N environments: number t * N + i is step t of env i."""

    def __init__(self, agent: "Agent", leaves: list[Leaf], num_envs: int, args: Args):
        self.agent = agent
        self.storage = Storage(leaves, next(agent.parameters()).device)
        # What tells which node is which is needed on the host, too
        self.host = Storage(
            [leaf for leaf in leaves if leaf.path in agent.names], torch.device("cpu")
        )
        zeros = partial(torch.zeros, device=self.storage.device)
        none = np.zeros(0, np.int64)
        nodes = Entries(none, none, zeros(0, agent.memory.parts, args.lstm_dim))
        edges = Entries(none, np.zeros((0, 2), np.int64), zeros(0, agent.edge_dim))
        self.now = State(nodes, edges, zeros(num_envs, agent.action_dim))
        self.cuts = cut(args.num_steps, num_envs, args.num_minibatches)

    def begin(self) -> None:
        """A rollout begins: what was stored is let go, what is remembered stays."""
        self.storage.blocks.clear()
        self.host.blocks.clear()
        self.stored = {}  # a step with which a piece of the rollout begins -> the state before it
        self.starts = []
        self.rewards = []
        self.actions = []
        self.is_step = []  # as in Step, of each
        self.finals = []  # per step that truncates episodes: what next_values needs of them

    def on_host(self, flat: Flat) -> Flat:
        """Ids and links of the observations."""
        pairs = zip(self.storage.leaves, flat.values)
        return flat._replace(values=[rows for leaf, rows in pairs if leaf in self.host.leaves])

    @torch.no_grad()
    def act(self, step: Step, greedy: bool = False) -> tuple[Action, Tensor, Tensor]:
        """(action, log_prob [N], value [N]) at the observations of `step`, which are stored
        and remembered."""
        obs = self.storage.append(step.obs)
        starts = step.terminated | step.truncated
        self.now = self.now.forget(starts)
        if len(self.actions) in self.cuts:
            self.stored[len(self.actions)] = self.now
        seen = self.agent.look(self.host.append(self.on_host(step.obs)), starts, step.reward)
        action, log_prob, value, self.now = self.agent.act(obs, self.now, seen, greedy)
        self.starts.append(starts)
        self.rewards.append(step.reward)
        self.actions.append(action)
        self.is_step.append(np.full(step.reward.shape, step.is_step))
        return action, log_prob, value

    def keep(self, step: Step) -> None:
        """Keeps what is needed to value the last observations of episodes that `step` truncated."""
        if step.finals:
            envs = np.flatnonzero(step.truncated)
            starts = np.zeros(len(envs), bool)
            state = self.now.select(envs)
            self.finals.append((state, join(step.finals), starts, step.reward[envs]))

    @torch.no_grad()
    def next_values(self, step: Step) -> Tensor:
        """V [N + truncations]: of `step.obs`, which the last actions led to, then of `finals`."""
        starts = step.terminated | step.truncated
        last = self.now.forget(starts), step.obs, starts, step.reward
        states, flats, *arrays = zip(last, *self.finals)
        flat = join(flats)
        obs = self.storage.batch(self.storage.copy(flat))
        host = self.host.batch(self.host.copy(self.on_host(flat)))
        seen = self.agent.look(host, *map(np.concatenate, arrays))
        features, *_ = self.agent.encode(obs, join_states(states), seen)
        return self.agent.value(features, obs)

    def minibatches(self, rng: np.random.Generator, num: int) -> Iterator[tuple[Tensor, tuple]]:
        """`num` random parts of the rollout. Of each: the indices of its steps, int64 [M * T], as
        in Storage but env after env, and the agent's inputs. They begin with the state that was
        remembered then (R2D2's "stored state"), which gets no gradients."""
        actions = join_actions(self.actions)
        starts = np.concatenate(self.starts)
        rewards = np.concatenate(self.rewards)
        is_step = np.concatenate(self.is_step)
        T = len(self.starts)
        N = len(self.starts[0])
        for steps, envs in random_parts(rng, T, N, num):
            idx = (envs[:, None] + N * steps).ravel()
            obs, places = self.storage.gather(idx)
            host, _ = self.host.gather(idx)
            seen = self.agent.look(host, starts[idx], rewards[idx])
            state = self.stored[steps[0]].select(envs)
            action = select_action(actions, places)
            mb, learned = places[STEP], None
            if not is_step[idx].all():
                learned = to_device(np.flatnonzero(is_step[idx]), mb.device)
                mb = mb[learned]
            yield mb, (obs, state, seen, action, learned)

    def rollout(self) -> Obs:
        """The observations of the rollout's steps."""
        obs, _ = self.storage.gather(np.flatnonzero(np.concatenate(self.is_step)))
        return obs

    def state(self) -> dict:
        """What a checkpoint keeps."""
        nodes, edges, action = self.now
        return {"nodes": nodes._asdict(), "edges": edges._asdict(), "action": action}

    def restore(self, state: dict) -> None:
        nodes, edges = [
            Entries(part["env"], part["keys"], part["values"].to(self.storage.device))
            for part in (state["nodes"], state["edges"])
        ]
        self.now = State(nodes, edges, state["action"].to(self.storage.device))


# ---- Agent: the networks ----
def id_group(leaves: list[Leaf]) -> str | None:
    """The group whose rows `node_ids` names, None without ids. UsageError if they do not fit."""
    for leaf in leaves:
        if leaf.path.split(".")[0] == "node_ids":
            try:
                group = group_of("nodes", leaves)
            except UsageError:  # there are several
                group = None
            is_integer = leaf.space.shape == () and leaf.dtype.kind in "iu"
            if not (is_integer and group and leaf.path == leaf.group == "node_ids"):
                raise UsageError(
                    f"leaf '{leaf.path}': {leaf.space} must be a Sequence of integers, one per row "
                    "of the only graph or set: Sequence(Discrete(n), stack=True)"
                )
            return group
    return None


class Agent(nn.Module):
    """Actor and critic: one encoder, the memory, an MLP each, and the action head."""

    def __init__(self, leaves: list[Leaf], action_space: gym.Space, args: Args):
        super().__init__()
        self.critic_encoder = Encoder(critic_leaves(leaves, args.critic_only), args)
        leaves = policy_leaves(leaves, args.critic_only)
        self.encoder = Encoder(leaves, args)
        dims = dict(self.encoder.element_dims)
        # The one whose rows have states; None: each environment has one
        self.group = id_group(leaves) if args.state_per_node else None
        self.names = ["node_ids"] if self.group else []  # paths of leaves that the host sees
        self.links = self.encoder.links.get(self.group)  # path of the edges between these rows
        self.edge_dim = 0  # of the features of edges that are remembered
        if args.remember_edges:
            if not self.links:
                raise UsageError(
                    "--remember-edges needs --state-per-node, a graph and the observation "
                    "'node_ids'"
                )
            self.names.append(self.links)
            self.edge_dim = dims[self.links] - 2 * dims[self.group]
        self.action_dim = seen_dim(parts_of(action_space, leaves, args), dims)
        first = 0 if args.prev_action else self.action_dim
        self.columns = slice(first, self.action_dim + args.prev_reward)  # of (action, reward)
        dim = dims[self.group] if self.group else self.encoder.dim
        dim += self.columns.stop - first
        self.memory = SparseLSTM(dim, self.edge_dim, self.group is not None, args)
        dim = self.encoder.dim + self.memory.dim
        if self.group:  # actor and critic see what is remembered of the visible elements, too
            dim += 2 * args.lstm_dim + 1
        widths = [dim, *args.hidden_dims]
        self.actor = mlp(widths, args.activation)
        latent_dim = widths[-1]
        widths[0] += self.critic_encoder.dim
        self.critic = mlp(widths, args.activation)
        self.critic.append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        if self.group:  # the head sees what is remembered of each element
            dims[self.group] += args.lstm_dim
        if self.links:  # and of both ends of each edge
            dims[self.links] += 2 * args.lstm_dim
        self.head = ActionHead(action_space, leaves, latent_dim, dims, args)

    def look(self, obs: Obs, starts: np.ndarray, rewards: np.ndarray) -> Seen:
        """What is seen of B observations, whose `names` are on the host; starts and rewards [B]."""
        step = np.arange(len(starts))
        keys = np.zeros_like(step)
        links = np.zeros((0, 2), np.int64)
        if self.group:
            keys, _, step = [rows.numpy() for rows in obs["node_ids"]]
        if len(self.names) > 1:
            links = obs[self.links].values.numpy()
        return Seen(starts, rewards, step, keys.astype(np.int64), links)

    def encode(self, obs: Obs, state: State, seen: Seen, action: Action | None = None) -> tuple:
        """(features [B, any], elements, elements with what is remembered of them, nodes and edges
        of the new state) of B = M * T steps, in which `action` was taken."""
        features, elements = self.encoder(obs)
        past = self.past(state, seen, action, elements, obs)
        edges = elements[self.links].values if self.links else None
        if not self.group:
            x = torch.cat([features, past], 1)
            _, readout, *new = self.memory(x, edges, state, seen)
            return torch.cat([features, readout], 1), elements, elements, *new
        rows = elements[self.group]
        x = torch.cat([rows.values, select_rows(past, rows.batch)], 1)
        out, readout, *new = self.memory(x, edges, state, seen)
        visible = pool(out, rows.ptr)
        features = torch.cat([features, readout, visible], 1)
        rows = rows._replace(values=torch.cat([rows.values, out], 1))
        return features, elements, elements | {self.group: rows}, *new

    def past(
        self, state: State, seen: Seen, action: Action | None, elements: dict, obs: Obs
    ) -> Tensor:
        """Action, reward or both of the step before, zeros where an episode begins, [B, any]."""
        actions = state.action[:, None]  # [M, 1, any], before the first step
        if action is not None:
            chosen = embed_action(self.head, action, elements, obs).unflatten(0, (len(actions), -1))
            actions = torch.cat([actions, chosen[:, :-1]], 1)
        starts, rewards = pack([seen.starts, seen.rewards], actions.device)
        past = torch.cat([actions.flatten(0, 1), rewards[:, None]], 1)
        return past[:, self.columns] * ~starts[:, None]

    def value(self, features: Tensor, obs: Obs) -> Tensor:
        return self.critic(self.critic_encoder.beside(features, obs)).squeeze(1)

    def act(
        self, obs: Obs, state: State, seen: Seen, greedy: bool = False
    ) -> tuple[Action, Tensor, Tensor, State]:
        """(action, log_prob [N], value [N], new state) of a step of N envs."""
        features, elements, remembered, *new = self.encode(obs, state, seen)
        action, log_prob, _ = self.head(self.actor(features), remembered, obs, None, greedy)
        state = State(*new, embed_action(self.head, action, elements, obs))
        return action, log_prob, self.value(features, obs), state

    def forward(
        self, obs: Obs, state: State, seen: Seen, action: Action, learned: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(action, log_prob [B], entropy [B], value [B]) of actions that were taken; all but the
        action only of the steps `learned` (int64; None: all)."""
        features, _, remembered, *_ = self.encode(obs, state, seen, action)
        action, *outputs = self.head(self.actor(features), remembered, obs, action)
        outputs.append(self.value(features, obs))
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
