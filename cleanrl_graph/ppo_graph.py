"""PPO on observations that are graphs, sets, images, vectors or any Dict/Tuple of these, without padding.

    python cleanrl_graph/ppo_graph.py --env-id envs:PoissonGraph-v0 --total-timesteps 200000
    python cleanrl_graph/ppo_graph.py --env-id envs:JobShop-v0 --gamma 1 --eval-suite la --save-model
    python cleanrl_graph/ppo_graph.py --env-id your_module:YourEnv-v0 --env-kwargs '{"size": 5}' --num-workers 4

Rooms: Args, environments, ragged observations, encoder, (memory: none in this script), action heads, PPO,
checkpoint and evaluation, main. A leaf of the observation tree is dense (one row per step) or ragged (any number of
rows per step); both are stored flat, each row once, and a minibatch is one index_select per leaf.

Papers: PPO (Schulman et al. 2017, arXiv:1707.06347), its implementation details (Huang et al. 2022, ICLR blog track),
GAE (Schulman et al. 2015, arXiv:1506.02438), GINE (Hu et al. 2020, arXiv:1905.12265), Deep Sets (Zaheer et al. 2017,
arXiv:1703.06114), pointer networks (Vinyals et al. 2015, arXiv:1506.03134).
"""

import json
import multiprocessing
import os
import random
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Callable, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium import spaces
from torch import Tensor
from torch_geometric import nn as pyg
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Json = Annotated[dict, tyro.constructors.PrimitiveConstructorSpec(
    nargs=1, metavar="JSON", instance_from_str=lambda args: json.loads(args[0]),
    is_instance=lambda value: isinstance(value, dict), str_from_instance=lambda value: [json.dumps(value)])]


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment; env i is seeded with seed + i"""
    torch_deterministic: bool = True
    """if toggled, use deterministic torch algorithms where they exist"""
    cuda: bool = True
    """if toggled, use CUDA when it is available"""
    track: bool = False
    """if toggled, track this experiment with Weights and Biases"""
    wandb_project_name: str = "cleanrl_graph"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    run_dir: str = "runs"
    """folder that receives the TensorBoard log, the model and the evaluation table"""
    save_model: bool = False
    """if toggled, save the model to {run_dir}/{run_name}/model.pt when training ends"""
    load_model: str | None = None
    """start from the weights of this model.pt"""
    eval_suite: str | None = None
    """name of a list of env kwargs in the env's `eval_suites`, played when training ends; None: eval_episodes episodes"""
    eval_episodes: int = 10
    """greedy episodes played when training ends if there is no eval_suite; 0 turns the evaluation off"""
    eval_samples: int = 16
    """sampled episodes per entry of the eval_suite, beside the greedy one; the best of them is reported"""

    # Environment
    env_id: str = "envs:JobShop-v0"
    """the id of the environment, `module:Name-v0` imports the module first"""
    env_kwargs: Json = field(default_factory=dict)
    """keyword arguments of the environment as JSON"""
    num_workers: int = 0
    """worker processes that step the environments; 0 steps them in this process (best for cheap environments)"""

    # Network
    hidden_dims: tuple[int, ...] = (256, 256)
    """widths of the actor's and of the critic's MLP"""
    activation: Literal["tanh", "relu", "elu", "gelu"] = "tanh"
    """activation of all MLPs"""
    gnn: Literal["gine", "gatv2", "transformer", "gated", "sage"] = "gine"
    """message passing layer of graph observations"""
    gnn_layers: int = 3
    """number of message passing layers"""
    gnn_dim: int = 64
    """width of node, edge and set-element embeddings"""
    gnn_aggr: Literal["sum", "mean", "max"] = "sum"
    """how a node aggregates its incoming messages"""
    readout: Literal["sum", "mean", "max", "meanmax"] = "meanmax"
    """how the nodes of a graph, or the elements of a set, become one vector"""
    cnn: Literal["nature", "impala"] = "nature"
    """convolutional encoder of image observations"""
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
    """the number of parallel game environments"""
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
    num_iterations: tyro.conf.Suppress[int] = 0
    """the number of iterations (computed in runtime)"""


# --- shared: environments ---
# ======================================================================================================================
# Environments: one list of leaves per observation, stepped in this process or in worker processes
# ======================================================================================================================
class Leaf(NamedTuple):
    """One array of the observation tree. Ragged leaves (`group` is not None) have any number of rows per step; leaves
    of one group have the same number of rows. `shape` and `dtype` are those of one row (ragged) or one step (dense)."""

    path: str  # "graph.nodes", "position"
    kind: str  # "vector", "image", "discrete", "multidiscrete" or "links" (rows of node indices)
    shape: tuple[int, ...]
    dtype: np.dtype
    group: str | None
    space: gym.Space  # of one row or one step
    get: Callable[[Any], Any]  # observation -> array


def leaves_of(space: gym.Space, path: str = "", get: Callable = lambda obs: obs) -> list[Leaf]:
    """The leaves of `space` in a fixed order. Raises TypeError for a space with no rule, naming it."""
    name = path or "obs"
    join = (path + ".") if path else ""
    if isinstance(space, spaces.Dict):
        return [leaf for k, s in space.items() for leaf in leaves_of(s, f"{join}{k}", lambda obs, k=k: get(obs)[k])]
    if isinstance(space, spaces.Tuple):
        return [leaf for k, s in enumerate(space) for leaf in leaves_of(s, f"{join}{k}", lambda obs, k=k: get(obs)[k])]
    if isinstance(space, spaces.Graph):
        nodes, edges = f"{name}.nodes", f"{name}.edge_links"
        no_links = np.zeros((0, 2), np.int64)
        leaves = rows_of(space.node_space, nodes, nodes, lambda obs: get(obs).nodes)
        links = lambda obs: no_links if get(obs).edge_links is None else get(obs).edge_links  # noqa: E731
        leaves.append(Leaf(edges, "links", (2,), np.dtype(np.int64), edges, space, links))
        if space.edge_space is not None:
            empty = np.zeros((0, *space.edge_space.shape), space.edge_space.dtype)
            features = lambda obs: empty if get(obs).edges is None else get(obs).edges  # noqa: E731
            leaves += rows_of(space.edge_space, f"{name}.edges", edges, features)
        return leaves
    if isinstance(space, spaces.Sequence):
        leaves = leaves_of(space.feature_space, name)
        if any(leaf.group for leaf in leaves):
            raise TypeError(f"leaf '{name}': {space} nests ragged spaces; only fixed-shape rows are supported")
        if space.stack:
            rows = [lambda obs, g=leaf.get: g(get(obs)) for leaf in leaves]
        else:
            rows = [lambda obs, leaf=leaf: np.array([leaf.get(row) for row in get(obs)], leaf.dtype).reshape(
                -1, *leaf.shape) for leaf in leaves]
        return [leaf._replace(group=name, get=row) for leaf, row in zip(leaves, rows)]
    return rows_of(space, name, None, get)


def rows_of(space: gym.Space, path: str, group: str | None, get: Callable) -> list[Leaf]:
    """The single leaf of a fixed-shape space."""
    if isinstance(space, spaces.Box):
        image = group is None and len(space.shape) == 3 and sorted(space.shape)[1] >= 8
        dtype = np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
        return [Leaf(path, "image" if image else "vector", space.shape, dtype, group, space, get)]
    if isinstance(space, spaces.MultiBinary):
        return [Leaf(path, "vector", tuple(space.shape), np.dtype(np.int8), group, space, get)]
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        kind = "discrete" if isinstance(space, spaces.Discrete) else "multidiscrete"
        return [Leaf(path, kind, space.shape, np.dtype(np.int64), group, space, get)]
    raise TypeError(f"leaf '{path}': observation space {space} is not supported (Box, Discrete, MultiDiscrete, "
                    "MultiBinary, Graph, Sequence, and Dict or Tuple of these are)")


def leaves_of_env(env: gym.Env, action_head: str) -> list[Leaf]:
    """The leaves of the env's observations; a ragged action_mask comes last and belongs to the group it is aligned to."""
    leaves = leaves_of(env.observation_space)
    group = choice_group(env.action_space, leaves, action_head)
    masks = [leaf for leaf in leaves if leaf.path == "action_mask"]
    if masks and (masks[0].group is None) != (group is None):
        raise ValueError(f"leaf 'action_mask': {masks[0].space} must be a Sequence if and only if the actions choose a row"
                         f" of the observation (--action-head {action_head} makes them choose from {group})")
    return [leaf for leaf in leaves if leaf.path != "action_mask"] + [leaf._replace(group=group) for leaf in masks]


class InfoActionMask(gym.Wrapper):
    """Moves `info["action_mask"]` into the observation, as key "action_mask"."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        num_entries = int(spaces.flatdim(env.action_space))
        self.observation_space = spaces.Dict(obs=env.observation_space, action_mask=spaces.MultiBinary(num_entries))

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.with_mask(obs, info), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.with_mask(obs, info), reward, terminated, truncated, info

    def with_mask(self, obs, info):
        mask = info["action_mask"]
        return {"obs": obs, "action_mask": np.concatenate([np.ravel(m) for m in mask]) if type(mask) is tuple else mask}


def needs_info_mask(env_id: str, env_kwargs: dict) -> bool:
    """Whether the env gives its action mask in info and not in the observation."""
    env = make_env(env_id, env_kwargs)
    _, info = env.reset()
    in_obs = isinstance(env.observation_space, spaces.Dict) and "action_mask" in env.observation_space.keys()
    env.close()
    return "action_mask" in info and not in_obs


def make_env(env_id: str, env_kwargs: dict, mask_in_info: bool = False) -> gym.Env:
    """The environment, without gymnasium's checker (this script validates every observation itself)."""
    env = gym.make(env_id, disable_env_checker=True, **env_kwargs)
    return InfoActionMask(env) if mask_in_info else env


class Step(NamedTuple):
    """What one step of all environments returned. `parts[k]` is a list of arrays whose concatenation along axis 0 holds
    leaf k of all envs in order; `counts[group]` is int64 [N]. The arrays are valid until the next step."""

    parts: list[list[np.ndarray]]
    counts: dict[str, np.ndarray]
    reward: np.ndarray  # float32 [N]
    terminated: np.ndarray  # bool [N]
    truncated: np.ndarray  # bool [N]
    finals: list[tuple[int, list[np.ndarray]]]  # (env, leaf arrays) of the last observation of truncated episodes
    episodes: list[tuple[int, float, int, dict]]  # (env, return, length, info["eval"]) of episodes that ended


class EnvGroup:
    """Steps environments one after the other, with autoreset in the same step."""

    def __init__(self, makers: list[Callable[[], gym.Env]], action_head: str, first_env: int = 0):
        self.envs = [make() for make in makers]
        self.leaves = leaves_of_env(self.envs[0], action_head)
        self.first_env, self.num_steps = first_env, 0
        self.returns, self.lengths = [0.0] * len(makers), [0] * len(makers)

    def reset(self, seed: int | None) -> Step:
        """Resets all environments; env i of the whole vector with seed + i."""
        seeds = [None if seed is None else seed + self.first_env + i for i in range(len(self.envs))]
        observations = [self.flatten(i, env.reset(seed=seeds[i])[0]) for i, env in enumerate(self.envs)]
        self.returns, self.lengths = [0.0] * len(self.envs), [0] * len(self.envs)
        no = np.zeros(len(self.envs), bool)
        return Step(*self.collate(observations), no.astype(np.float32), no, no, [], [])

    def step(self, actions: list) -> Step:
        observations, rewards, terminations, truncations, finals, episodes = [], [], [], [], [], []
        self.num_steps += 1
        for i, (env, action) in enumerate(zip(self.envs, actions)):
            obs, reward, terminated, truncated, info = env.step(action)
            if reward - reward != 0:
                raise ValueError(f"env {self.first_env + i}, step {self.num_steps}: reward is {reward}")
            self.returns[i] += float(reward)
            self.lengths[i] += 1
            if terminated or truncated:
                if not terminated:
                    finals.append((self.first_env + i, self.flatten(i, obs)))
                episodes.append((self.first_env + i, self.returns[i], self.lengths[i], info.get("eval", {})))
                self.returns[i], self.lengths[i] = 0.0, 0
                obs, _ = env.reset()
            observations.append(self.flatten(i, obs))
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated and not terminated)
        return Step(*self.collate(observations), np.array(rewards, np.float32), np.array(terminations, bool),
                    np.array(truncations, bool), finals, episodes)

    def flatten(self, i: int, obs: Any) -> list[np.ndarray]:
        """The leaf arrays of one observation of env i."""
        arrays, rows = [], {}
        for leaf in self.leaves:
            array = np.asarray(leaf.get(obs), leaf.dtype)
            if leaf.group is None and array.shape != leaf.shape:
                raise self.error(i, leaf, f"shape {array.shape} where {leaf.shape} is declared")
            if leaf.group is not None:
                if array.ndim == 0 or array.shape[1:] != leaf.shape:
                    raise self.error(i, leaf, f"shape {array.shape} where {('rows', *leaf.shape)} is declared")
                if rows.setdefault(leaf.group, len(array)) != len(array):
                    raise self.error(i, leaf, f"{len(array)} rows where '{leaf.group}' has {rows[leaf.group]}")
            arrays.append(array)
        return arrays

    def collate(self, observations: list[list[np.ndarray]]) -> tuple[list[list[np.ndarray]], dict[str, np.ndarray]]:
        """One array per leaf and one int64 [N] of row counts per group, checked for values that are out of range."""
        counts, parts = {}, []
        for leaf, arrays in zip(self.leaves, zip(*observations)):
            if leaf.group is not None and leaf.group not in counts:
                counts[leaf.group] = np.array([len(array) for array in arrays], np.int64)
            values = np.array(arrays) if leaf.group is None else np.concatenate(arrays)
            self.check(leaf, values, counts)
            parts.append([values])
        return parts, counts

    def check(self, leaf: Leaf, values: np.ndarray, counts: dict[str, np.ndarray]) -> None:
        """ValueError that names env, leaf, step and value if `values` holds NaN or inf, an edge to a node that does not
        exist, a category out of range, or a mask that allows nothing."""
        if leaf.path == "action_mask":
            ends = np.arange(1, len(values) + 1) if leaf.group is None else counts[leaf.group].cumsum()
            allowed = values.reshape(len(values), -1) if leaf.group is None else values
            allowed = allowed.any(1) if leaf.group is None else allowed
            total = np.concatenate([np.zeros((1, *allowed.shape[1:]), np.int64), (allowed != 0).cumsum(0)])
            bad = np.diff(total[np.concatenate([[0], ends])], axis=0) == 0
            if bad.any():
                raise self.error(int(np.argwhere(bad)[0][0]), leaf, "all actions are masked")
            return
        if leaf.dtype.kind == "f":
            bad = ~np.isfinite(values)
        elif leaf.kind == "links":
            num_nodes = counts[leaf.path.removesuffix("edge_links") + "nodes"].repeat(counts[leaf.group])
            bad = (values < 0) | (values >= num_nodes[:, None])
        elif leaf.kind in ("discrete", "multidiscrete"):
            num = leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec
            bad = (values < leaf.space.start) | (values >= leaf.space.start + num)
        else:
            return
        if bad.any():
            row, *where = np.argwhere(bad)[0].tolist()
            i = row if leaf.group is None else int(np.searchsorted(counts[leaf.group].cumsum(), row, side="right"))
            where = where if leaf.group is None else [row - int(counts[leaf.group][:i].sum()), *where]
            problem = f"value {values[tuple(np.argwhere(bad)[0])]} at index {where}"
            if leaf.kind == "links":
                problem += f" in a graph of {counts[leaf.path.removesuffix('edge_links') + 'nodes'][i]} nodes"
            raise self.error(i, leaf, problem)

    def error(self, i: int, leaf: Leaf, problem: str) -> ValueError:
        return ValueError(f"env {self.first_env + i}, leaf '{leaf.path}', step {self.num_steps}: {problem}")


def work(pipe, makers: list[Callable[[], gym.Env]], action_head: str, first_env: int) -> None:
    """A worker process: steps its environments and writes the leaves to shared memory, which doubles on demand (the new
    buffer travels with the reply)."""
    buffer = torch.empty(0, dtype=torch.uint8)
    try:
        group = EnvGroup(makers, action_head, first_env)
        while True:
            command, argument = pipe.recv()
            if command == "close":
                return
            step = group.reset(argument) if command == "reset" else group.step(argument)
            arrays = [values for (values,) in step.parts]
            offsets = np.cumsum([0] + [-(-values.nbytes // 64) * 64 for values in arrays]).tolist()
            grown = offsets[-1] > len(buffer) or None
            if grown:
                buffer = torch.empty(2 * offsets[-1], dtype=torch.uint8).share_memory_()
            for values, offset in zip(arrays, offsets):
                np.ndarray(values.shape, values.dtype, buffer.numpy(), offset)[...] = values
            layout = [(values.shape, offset) for values, offset in zip(arrays, offsets)]
            pipe.send((grown and buffer, layout, step._replace(parts=[])))
    except (KeyboardInterrupt, EOFError):
        pass
    except Exception as error:
        pipe.send((None, None, f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"))


class VecEnv:
    """N environments, in this process (num_workers = 0) or spread over worker processes.

    `makers` builds one environment each. Same-step autoreset: the observation after an episode's end is the first of
    the next episode, and the last one of a truncated episode is kept in `Step.finals`. Errors of a worker's
    environments are raised here with the worker's traceback."""

    def __init__(self, makers: list[Callable[[], gym.Env]], num_workers: int = 0, action_head: str = "auto"):
        self.num_envs, self.workers = len(makers), []
        if num_workers == 0:
            self.group = EnvGroup(makers, action_head)
            self.leaves, self.action_space = self.group.leaves, self.group.envs[0].action_space
            return
        probe = makers[0]()
        self.leaves, self.action_space = leaves_of_env(probe, action_head), probe.action_space
        probe.close()
        context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
        for envs in np.array_split(np.arange(self.num_envs), min(num_workers, self.num_envs)):
            pipe, child = context.Pipe()
            args = (child, [makers[i] for i in envs], action_head, int(envs[0]))
            process = context.Process(target=work, args=args, daemon=True)
            process.start()
            child.close()
            self.workers.append([process, pipe, slice(int(envs[0]), int(envs[-1]) + 1), None])

    def reset(self, seed: int | None = None) -> Step:
        if not self.workers:
            return self.group.reset(seed)
        return self.ask("reset", [seed] * len(self.workers))

    def step(self, actions: list) -> Step:
        """Steps env i with actions[i], an element of its action space."""
        if not self.workers:
            return self.group.step(actions)
        return self.ask("step", [actions[envs] for _, _, envs, _ in self.workers])

    def ask(self, command: str, arguments: list) -> Step:
        for (_, pipe, _, _), argument in zip(self.workers, arguments):
            pipe.send((command, argument))
        steps = []
        for worker in self.workers:
            process, pipe, envs, _ = worker
            try:
                buffer, layout, step = pipe.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                raise RuntimeError(f"the worker of envs {envs.start} to {envs.stop - 1} died with exit code "
                                   f"{process.exitcode}") from None
            if layout is None:
                raise RuntimeError(f"in the worker of envs {envs.start} to {envs.stop - 1}: {step}")
            if buffer is not None:
                worker[3] = buffer.numpy()
            parts = [np.ndarray(shape, leaf.dtype, worker[3], offset) for (shape, offset), leaf in
                     zip(layout, self.leaves)]
            steps.append(step._replace(parts=parts))
        return Step(parts=list(zip(*[step.parts for step in steps])),
                    counts={k: np.concatenate([step.counts[k] for step in steps]) for k in steps[0].counts},
                    reward=np.concatenate([step.reward for step in steps]),
                    terminated=np.concatenate([step.terminated for step in steps]),
                    truncated=np.concatenate([step.truncated for step in steps]),
                    finals=sum([step.finals for step in steps], []),
                    episodes=sum([step.episodes for step in steps], []))

    def close(self) -> None:
        if not self.workers:
            for env in self.group.envs:
                env.close()
        for _, pipe, _, _ in self.workers:
            try:
                pipe.send(("close", None))
            except (BrokenPipeError, OSError):
                pass
        for process, _, _, _ in self.workers:
            process.join(timeout=5)
        self.workers = []


# --- end shared: environments ---


# --- shared: ragged observations ---
# ======================================================================================================================
# Ragged observations: flat storage of every step, minibatches by index arithmetic
# ======================================================================================================================
class Ragged(NamedTuple):
    """Rows of B observations one after the other; observation b owns values[ptr[b]:ptr[b + 1]]. Nothing is padded.
    Node indices ("edge_links") are offset already, so that they index the rows of the batch, as in PyG's Batch."""

    values: Tensor  # [rows, ...]
    ptr: Tensor  # int64 [B + 1]
    batch: Tensor  # int64 [rows], the observation that a row belongs to


Obs = dict[str, Tensor | Ragged]  # leaf path -> [B, ...] (dense) or Ragged


class Storage:
    """Observations of N envs, step by step: per leaf one flat tensor on `device` that doubles when full.

    `append` adds one step (N observations, one contiguous copy per leaf), `latest` is that step as a batch of views,
    `gather` any subset of all observations, in index order t * N + env."""

    def __init__(self, leaves: list[Leaf], device: torch.device):
        self.leaves, self.device = leaves, device
        self.groups = list(dict.fromkeys(leaf.group for leaf in leaves if leaf.group))
        dtypes = [torch.from_numpy(np.zeros(0, leaf.dtype)).dtype for leaf in leaves]
        self.values = [torch.empty((0, *leaf.shape), dtype=dtype, device=device) for leaf, dtype in zip(leaves, dtypes)]
        self.staging = [values.cpu() for values in self.values]  # pinned on CUDA, unused on CPU
        self.clear()

    def clear(self) -> None:
        """Forgets the observations and keeps the memory."""
        self.size, self.num_latest = 0, 0
        self.num_rows = [0] * len(self.leaves)
        self.counts = {group: np.zeros(0, np.int64) for group in self.groups}  # rows per observation

    def append(self, parts: list[list[np.ndarray]], counts: dict[str, np.ndarray]) -> None:
        """Adds the observations of one step (see `Step`)."""
        for k, arrays in enumerate(parts):
            start, num = self.num_rows[k], sum(map(len, arrays))
            stop = self.num_rows[k] = start + num
            if stop > len(self.values[k]):
                grown = self.values[k].new_empty((max(2 * stop, 16), *self.values[k].shape[1:]))
                grown[:start] = self.values[k][:start]
                self.values[k] = grown
            target = self.values[k][start:stop]
            if self.device.type == "cpu":
                np.concatenate(arrays, out=target.numpy())
                continue
            if num > len(self.staging[k]):
                self.staging[k] = torch.empty((2 * num, *target.shape[1:]), dtype=target.dtype, pin_memory=True)
            # the staging buffer is free again: the actions of the last step were waited for
            np.concatenate(arrays, out=self.staging[k][:num].numpy())
            target.copy_(self.staging[k][:num], non_blocking=True)
        self.num_latest = len(counts[self.groups[0]]) if self.groups else sum(map(len, parts[0]))
        self.counts = {group: np.concatenate([self.counts[group], counts[group]]) for group in self.groups}
        self.size += self.num_latest

    def latest(self) -> Obs:
        """The step that was appended last, as views."""
        counts = {group: self.counts[group][self.size - self.num_latest:] for group in self.groups}
        values = [self.values[k][self.num_rows[k] - (int(counts[leaf.group].sum()) if leaf.group else self.num_latest):
                                 self.num_rows[k]] for k, leaf in enumerate(self.leaves)]
        return self.assemble(values, counts)

    def gather(self, idx: np.ndarray) -> Obs:
        """The observations `idx` (int64 [B], any order, repeats allowed): one index_select per leaf."""
        counts = {group: self.counts[group][idx] for group in self.groups}
        rows = {None: self.to_device(idx)}
        for group in self.groups:
            ends = self.counts[group].cumsum()
            shift = (ends - self.counts[group])[idx] - (counts[group].cumsum() - counts[group])
            total = int(counts[group].sum())
            rows[group] = torch.arange(total, device=self.device) + torch.repeat_interleave(
                self.to_device(shift), self.to_device(counts[group]), output_size=total)
        values = [self.values[k].index_select(0, rows[leaf.group]) for k, leaf in enumerate(self.leaves)]
        return self.assemble(values, counts)

    def assemble(self, values: list[Tensor], counts: dict[str, np.ndarray]) -> Obs:
        """Adds `ptr` and `batch` to the ragged leaves and the node offsets to the edges."""
        ptrs, batches = {}, {}
        for group, num in counts.items():
            host = np.zeros(len(num) + 1, np.int64)
            num.cumsum(out=host[1:])
            ptrs[group] = self.to_device(host)
            batches[group] = torch.repeat_interleave(
                torch.arange(len(num), device=self.device), self.to_device(num), output_size=int(host[-1]))
        obs = {}
        for leaf, rows in zip(self.leaves, values):
            if leaf.kind == "links":
                nodes = ptrs[leaf.path.removesuffix("edge_links") + "nodes"]
                rows = rows + nodes[batches[leaf.group]][:, None]
            obs[leaf.path] = Ragged(rows, ptrs[leaf.group], batches[leaf.group]) if leaf.group else rows
        return obs

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def stats(self) -> dict[str, float]:
        """Bytes per observation, the share that padding to the largest observation would have wasted, and mean rows per
        observation of each group."""
        row_bytes = [leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in self.leaves]
        valid = sum(num * size for num, size in zip(self.num_rows, row_bytes))
        padded = sum(size * self.size * (self.counts[leaf.group].max(initial=0) if leaf.group else 1)
                     for leaf, size in zip(self.leaves, row_bytes))
        stats = {"charts/obs_bytes_per_step": valid / self.size, "charts/padding_avoided": 1 - valid / max(padded, 1)}
        for group in self.groups:
            name = "nodes_per_graph" if group.endswith("nodes") else f"rows/{group}"
            stats[f"charts/{name}"] = float(self.counts[group].mean())
        return stats


# --- end shared: ragged observations ---


# --- shared: encoder ---
# ======================================================================================================================
# Encoder: one small network per leaf kind, concatenated
# ======================================================================================================================
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers, each followed by the activation."""
    return nn.Sequential(*[module for i, o in zip(widths, widths[1:])
                           for module in (layer_init(nn.Linear(i, o)), activation())])


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sums of values[ptr[b]:ptr[b + 1]], [B, ...]; zero for an empty segment."""
    return torch.segment_reduce(values, "sum", offsets=ptr, axis=0, unsafe=True)


def segment_max(values: Tensor, ptr: Tensor) -> Tensor:
    """Maxima of values[ptr[b]:ptr[b + 1]], [B, ...]; zero for an empty segment."""
    empty = (ptr[1:] == ptr[:-1]).view(-1, *[1] * (values.dim() - 1))
    return torch.segment_reduce(values, "max", offsets=ptr, axis=0, unsafe=True).masked_fill(empty, 0.0)


class Rows(nn.Module):
    """Floats [rows, dim] from a leaf's values: vectors flat, categories one-hot (embedded above 64 categories)."""

    def __init__(self, leaf: Leaf):
        super().__init__()
        self.kind, self.num_axes, self.embedding = leaf.kind, len(leaf.shape), None
        self.dim = int(np.prod(leaf.shape))
        if leaf.kind in ("discrete", "multidiscrete"):
            num = np.ravel(leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec)
            offsets = np.concatenate([[0], num.cumsum()[:-1]]) - np.ravel(leaf.space.start)
            self.register_buffer("offsets", torch.as_tensor(offsets), persistent=False)
            self.total = self.dim = int(num.sum())
            if self.total > 64:
                self.embedding = nn.Embedding(self.total, 64)
                self.dim = 64

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(values.dim() - self.num_axes) if self.num_axes else values[:, None]
        if self.kind == "vector":
            return values.float()
        if self.embedding is not None:
            return self.embedding(values + self.offsets).sum(1)
        one_hot = torch.zeros(len(values), self.total, device=values.device)
        return one_hot.scatter_(1, values + self.offsets, 1.0)


class CNN(nn.Module):
    """Features of images [B, C, H, W] or [B, H, W, C] (the channel axis is the shorter one); uint8 is scaled to 0..1.
    "nature": Mnih et al. 2015; "impala": the residual network of Espeholt et al. 2018, arXiv:1802.01561."""

    def __init__(self, leaf: Leaf, kind: str):
        super().__init__()
        self.channels_last = leaf.shape[2] < leaf.shape[0]
        self.scale = 1 / 255 if leaf.dtype == np.uint8 else 1.0
        c, h, w = leaf.shape[::-1] if self.channels_last else leaf.shape
        layers, blocks = [], [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if min(h, w) >= 36 else [(32, 3, 2), (64, 3, 1)]
        if kind == "nature":
            for width, kernel, stride in blocks:
                layers += [layer_init(nn.Conv2d(c, width, kernel, stride)), nn.ReLU()]
                c = width
        else:
            for width in (16, 32, 32):
                layers += [layer_init(nn.Conv2d(c, width, 3, padding=1)), nn.MaxPool2d(3, 2, 1), Residual(width),
                           Residual(width)]
                c = width
            layers.append(nn.ReLU())
        self.net = nn.Sequential(*layers, nn.Flatten())
        flat = self.net(torch.zeros(1, *(leaf.shape[2:] + leaf.shape[:2] if self.channels_last else leaf.shape))).shape[1]
        self.dim = 512 if kind == "nature" else 256
        self.net.extend([layer_init(nn.Linear(flat, self.dim)), nn.ReLU()])

    def forward(self, images: Tensor) -> Tensor:
        images = images.permute(0, 3, 1, 2) if self.channels_last else images
        return self.net(images.float() * self.scale)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        convs = [layer_init(nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        self.net = nn.Sequential(nn.ReLU(), convs[0], nn.ReLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


def make_conv(kind: str, dim: int, edge_dim: int, aggr: str) -> nn.Module:
    """A PyG message passing layer dim -> dim; any layer with forward(x, edge_index[, edge_attr]) can stand here."""
    if kind == "gine":
        net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        return pyg.GINEConv(net, edge_dim=edge_dim, aggr=aggr) if edge_dim else pyg.GINConv(net, aggr=aggr)
    if kind == "gatv2":
        return pyg.GATv2Conv(dim, dim // 4, heads=4, edge_dim=edge_dim or None)
    if kind == "transformer":
        return pyg.TransformerConv(dim, dim // 4, heads=4, edge_dim=edge_dim or None)
    if kind == "gated":
        return pyg.ResGatedGraphConv(dim, dim, edge_dim=edge_dim or None, aggr=aggr)
    return pyg.SAGEConv(dim, dim, aggr=aggr)


class GNN(nn.Module):
    """Node embeddings [nodes, dim] of a batch of graphs in PyG's convention; residual layers with normalised input."""

    def __init__(self, node_dim: int, edge_dim: int, args):
        super().__init__()
        self.edge_dim = edge_dim
        self.embed = nn.Linear(node_dim, args.gnn_dim)
        self.convs = nn.ModuleList(
            make_conv(args.gnn, args.gnn_dim, edge_dim, args.gnn_aggr) for _ in range(args.gnn_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(args.gnn_dim) for _ in range(args.gnn_layers))
        self.takes_edge_attr = edge_dim > 0 and args.gnn != "sage"

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor, ptr: Tensor) -> Tensor:
        h = self.embed(x)
        for conv, norm in zip(self.convs, self.norms):
            message_args = (edge_index, edge_attr) if self.takes_edge_attr else (edge_index,)
            h = h + conv(norm(h), *message_args).relu()
        return h


class Encoder(nn.Module):
    """Observation -> (features [B, dim], elements {group: [rows, gnn_dim]}).

    Vectors and one-hot leaves enter `features` as they are, images through a CNN, graphs through a GNN and sets through
    an MLP per row, both followed by a readout over the rows. `action_mask` is not an input."""

    def __init__(self, leaves: list[Leaf], args):
        super().__init__()
        leaves = [leaf for leaf in leaves if leaf.path != "action_mask"]
        self.readout, self.element_dim = args.readout, args.gnn_dim
        self.rows = nn.ModuleDict({key(leaf.path): Rows(leaf) for leaf in leaves if leaf.kind not in ("image", "links")})
        self.cnns = nn.ModuleDict({key(leaf.path): CNN(leaf, args.cnn) for leaf in leaves if leaf.kind == "image"})
        self.vectors = [leaf.path for leaf in leaves if leaf.group is None and leaf.kind != "image"]
        self.images = [leaf.path for leaf in leaves if leaf.kind == "image"]
        self.graphs = [leaf.path.removesuffix(".edge_links") for leaf in leaves if leaf.kind == "links"]
        self.has_edges = {leaf.path.removesuffix(".edges") for leaf in leaves if leaf.path.endswith(".edges")}
        self.sets: dict[str, list[str]] = {}
        for leaf in leaves:
            if leaf.group and leaf.group not in [f"{g}.{part}" for g in self.graphs for part in ("nodes", "edge_links")]:
                self.sets.setdefault(leaf.group, []).append(leaf.path)
        dim_of = lambda path: self.rows[key(path)].dim  # noqa: E731
        activation = ACTIVATIONS[args.activation]
        self.gnns = nn.ModuleDict({key(g): GNN(
            dim_of(f"{g}.nodes"), dim_of(f"{g}.edges") if g in self.has_edges else 0, args) for g in self.graphs})
        self.set_mlps = nn.ModuleDict({key(g): mlp(
            [sum(map(dim_of, paths)), args.gnn_dim, args.gnn_dim], activation) for g, paths in self.sets.items()})
        readout_dim = args.gnn_dim * (2 if args.readout == "meanmax" else 1) + 1
        self.dim = (sum(map(dim_of, self.vectors)) + sum(cnn.dim for cnn in self.cnns.values())
                    + readout_dim * (len(self.graphs) + len(self.sets)))

    def forward(self, obs: Obs) -> tuple[Tensor, dict[str, Tensor]]:
        row = lambda path, values: self.rows[key(path)](values)  # noqa: E731
        features = [row(path, obs[path]) for path in self.vectors]
        features += [self.cnns[key(path)](obs[path]) for path in self.images]
        elements = {}
        for g in self.graphs:
            nodes, links = obs[f"{g}.nodes"], obs[f"{g}.edge_links"]
            edge_attr = row(f"{g}.edges", obs[f"{g}.edges"].values) if g in self.has_edges else None
            x = row(f"{g}.nodes", nodes.values)
            elements[nodes_of(g)] = self.gnns[key(g)](x, links.values.t().contiguous(), edge_attr, nodes.batch, nodes.ptr)
            features.append(self.pool(elements[nodes_of(g)], nodes.ptr))
        for g, paths in self.sets.items():
            elements[g] = self.set_mlps[key(g)](torch.cat([row(path, obs[path].values) for path in paths], 1))
            features.append(self.pool(elements[g], obs[paths[0]].ptr))
        return torch.cat(features, 1), elements

    def pool(self, rows: Tensor, ptr: Tensor) -> Tensor:
        """[B, readout_dim]; the last column is the logarithm of one plus the number of rows."""
        num = (ptr[1:] - ptr[:-1])[:, None].float()
        parts = [num.log1p()]
        if self.readout in ("max", "meanmax"):
            parts.insert(0, segment_max(rows, ptr))
        if self.readout != "max":
            total = segment_sum(rows, ptr)
            parts.insert(0, total if self.readout == "sum" else total / num.clamp(min=1))
        return torch.cat(parts, 1)


def key(path: str) -> str:
    """A module name for a leaf path (names must not hold dots)."""
    return path.replace(".", "/")


def nodes_of(graph: str) -> str:
    return f"{graph}.nodes"


# --- end shared: encoder ---


# --- shared: action heads ---
# ======================================================================================================================
# Action heads: sample, log-probability and entropy over any action space, [B, columns]
# ======================================================================================================================
class Categorical:
    """One of n fixed options. `mask` (nonzero = allowed) is bool or int [B, n]."""

    def __init__(self, logits: Tensor, mask: Tensor | None):
        self.mask = None if mask is None else mask == 0
        self.log_probs = (logits if mask is None else logits.masked_fill(self.mask, -torch.inf)).log_softmax(-1)

    def sample(self, greedy: Tensor | bool) -> Tensor:
        return (self.log_probs + gumbel_like(self.log_probs, greedy)).argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action[:, None]).squeeze(-1)

    def entropy(self) -> Tensor:
        log_probs = self.log_probs if self.mask is None else self.log_probs.masked_fill(self.mask, 0.0)
        return -(self.log_probs.exp() * log_probs).sum(-1)


class RaggedCategorical:
    """One of the rows of each observation; logits [rows], `mask` (nonzero = allowed) [rows]."""

    def __init__(self, logits: Tensor, mask: Tensor | None, ptr: Tensor, batch: Tensor):
        self.ptr, self.batch = ptr, batch
        self.mask = torch.zeros_like(logits, dtype=torch.bool) if mask is None else mask == 0
        logits = logits.masked_fill(self.mask, -torch.inf)
        shifted = logits - segment_max(logits.detach(), ptr)[batch]
        self.log_probs = shifted - segment_sum(shifted.exp(), ptr).log()[batch]

    def sample(self, greedy: Tensor | bool) -> Tensor:
        if torch.is_tensor(greedy):
            greedy = greedy[self.batch]
        score = self.log_probs + gumbel_like(self.log_probs, greedy)
        score = score.masked_fill(self.mask, -torch.inf)
        local = torch.arange(len(score), device=score.device) - self.ptr[self.batch]
        best = score == segment_max(score, self.ptr)[self.batch]
        return segment_max(torch.where(best, local, 0).double(), self.ptr).long()

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs[self.ptr[:-1] + action]

    def entropy(self) -> Tensor:
        return -segment_sum(self.log_probs.exp() * self.log_probs.masked_fill(self.mask, 0.0), self.ptr)


class Bernoulli:
    """Independent bits, logits [B, n]."""

    def __init__(self, logits: Tensor):
        self.logits = logits

    def sample(self, greedy: Tensor | bool) -> Tensor:
        draw = torch.bernoulli(self.logits.sigmoid())
        greedy = greedy[:, None] if torch.is_tensor(greedy) else torch.tensor(greedy, device=draw.device)
        return torch.where(greedy, (self.logits > 0).to(draw), draw)

    def log_prob(self, action: Tensor) -> Tensor:
        return -F.softplus(torch.where(action > 0, -self.logits, self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        return (F.softplus(self.logits) - self.logits * self.logits.sigmoid()).sum(-1)


class DiagNormal:
    """Independent normal variables, mean and log_std [B, n]."""

    def __init__(self, mean: Tensor, log_std: Tensor):
        self.mean, self.log_std = mean, log_std

    def sample(self, greedy: Tensor | bool) -> Tensor:
        greedy = greedy[:, None] if torch.is_tensor(greedy) else torch.tensor(greedy, device=self.mean.device)
        return self.mean + torch.randn_like(self.mean) * self.log_std.exp() * ~greedy

    def log_prob(self, action: Tensor) -> Tensor:
        return (-0.5 * ((action - self.mean) / self.log_std.exp()) ** 2 - self.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)

    def entropy(self) -> Tensor:
        return (0.5 + 0.5 * np.log(2 * np.pi) + self.log_std).sum(-1)


def gumbel_like(log_probs: Tensor, greedy: Tensor | bool) -> Tensor:
    """Gumbel noise (the argmax of log_probs + noise is a sample), zero where greedy."""
    if greedy is True:
        return torch.zeros_like(log_probs)
    noise = -torch.empty_like(log_probs).exponential_().log()
    if torch.is_tensor(greedy):
        noise = noise.masked_fill(greedy.view(-1, *[1] * (noise.dim() - 1)), 0.0)
    return noise


class Part(NamedTuple):
    """One factor of the action: `kind` is "categorical", "choice" (a row of the observation), "bits" or "normal"."""

    kind: str
    size: int  # options, bits or dimensions
    columns: slice  # of the action [B, columns]
    mask: slice  # of a dense action_mask [B, entries]


def parts_of(space: gym.Space, choice: bool) -> list[Part]:
    """The factors of an action space, in order. Raises TypeError for a space with no rule, naming it."""
    parts: list[Part] = []

    def add(kind: str, size: int, num_columns: int, num_entries: int) -> None:
        column, entry = (parts[-1].columns.stop, parts[-1].mask.stop) if parts else (0, 0)
        parts.append(Part(kind, size, slice(column, column + num_columns), slice(entry, entry + num_entries)))

    def visit(space: gym.Space) -> None:
        if isinstance(space, spaces.Discrete):
            add("choice" if choice else "categorical", int(space.n), 1, int(space.n))
        elif isinstance(space, spaces.MultiDiscrete):
            for n in space.nvec.ravel():
                add("choice" if choice else "categorical", int(n), 1, int(n))
        elif isinstance(space, spaces.MultiBinary):
            add("bits", int(np.prod(space.shape)), int(np.prod(space.shape)), 0)
        elif isinstance(space, spaces.Box) and space.dtype.kind == "f":
            add("normal", int(np.prod(space.shape)), int(np.prod(space.shape)), 0)
        elif isinstance(space, (spaces.Tuple, spaces.Dict)):
            for child in space.values() if isinstance(space, spaces.Dict) else space:
                visit(child)
        else:
            raise TypeError(f"action space {space} is not supported (Discrete, MultiDiscrete, MultiBinary, float Box, and"
                            " Dict or Tuple of these are)")

    visit(space)
    return parts


def to_env_actions(space: gym.Space, actions: np.ndarray) -> list:
    """Rows of [B, columns] as elements of `space`; Box actions are clipped to its bounds."""
    if isinstance(space, spaces.Discrete):
        return (actions[:, 0].astype(np.int64) + int(space.start)).tolist()
    if isinstance(space, spaces.MultiDiscrete):
        return list(actions.astype(np.int64).reshape(-1, *space.shape) + space.start)
    if isinstance(space, spaces.MultiBinary):
        return list(actions.astype(np.int8).reshape(-1, *space.shape))
    if isinstance(space, spaces.Box):
        return list(np.clip(actions.reshape(-1, *space.shape), space.low, space.high).astype(space.dtype))
    columns, children = 0, []
    for child in space.values() if isinstance(space, spaces.Dict) else space:
        width = sum(part.columns.stop - part.columns.start for part in parts_of(child, False))
        children.append(to_env_actions(child, actions[:, columns:columns + width]))
        columns += width
    if isinstance(space, spaces.Dict):
        return [dict(zip(space.keys(), row)) for row in zip(*children)]
    return list(zip(*children))


class ActionHead(nn.Module):
    """The policy's distribution over any action space, from the actor's latent [B, dim] and the elements' embeddings.

    A "choice" scores every element e with w . tanh(W e + U latent): additive attention, so the cost is one row each.
    With `autoregressive`, the latent of a part also holds the embedding of the parts drawn before it:
    p(a) = p(a_1) p(a_2 | a_1) ..., and the entropy is the sum of the conditional entropies along the given action."""

    def __init__(self, space: gym.Space, leaves: list[Leaf], dim: int, element_dim: int, args):
        super().__init__()
        self.group = choice_group(space, leaves, args.action_head)
        self.masked = "action_mask" in [leaf.path for leaf in leaves]
        self.parts = parts_of(space, choice=self.group is not None)
        self.dtype = torch.float32 if any(part.kind == "normal" for part in self.parts) else torch.int64
        num_entries = self.parts[-1].mask.stop
        for leaf in leaves:
            if leaf.path == "action_mask" and leaf.group is None and int(np.prod(leaf.shape)) != num_entries:
                raise ValueError(f"leaf 'action_mask' has {int(np.prod(leaf.shape))} entries, the action space "
                                 f"{space} has {num_entries}")
        std_dim = 2 if args.state_dependent_std else 1
        widths = {"categorical": 1, "bits": 1, "normal": std_dim}
        self.heads, self.keys, self.condition = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.log_std = nn.ParameterList()
        for part in self.parts:
            choice = part.kind == "choice"
            self.heads.append(layer_init(nn.Linear(dim, dim if choice else part.size * widths[part.kind]),
                                         1.0 if choice else 0.01))
            self.keys.append(nn.ModuleList([nn.Linear(element_dim, dim), layer_init(nn.Linear(dim, 1), 0.01)])
                             if choice else nn.Identity())
            fixed_std = part.kind == "normal" and not args.state_dependent_std
            self.log_std.append(nn.Parameter(torch.zeros(part.size if fixed_std else 0)))
        if args.autoregressive:
            for part in self.parts[:-1]:
                self.condition.append(nn.Linear(element_dim if part.kind == "choice" else part.size, dim))

    def forward(self, latent: Tensor, elements: dict[str, Tensor], obs: Obs, action: Tensor | None = None,
                greedy: Tensor | bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(action [B, columns], log_prob [B], entropy [B]) of the given action, or of a sampled one; greedy (bool, or
        bool [B]) takes the mode."""
        log_prob, entropy, drawn = 0.0, 0.0, []
        for k, part in enumerate(self.parts):
            dist = self.distribution(k, latent, elements, obs)
            if action is None:
                a = dist.sample(greedy)
            else:
                a = action[:, part.columns] if part.kind in ("bits", "normal") else action[:, part.columns.start].long()
            log_prob, entropy = log_prob + dist.log_prob(a), entropy + dist.entropy()
            if k < len(self.condition):
                latent = latent + self.condition[k](self.embed(part, a, elements, obs))
            drawn.append(a if a.dim() == 2 else a[:, None])
        return torch.cat([a.to(self.dtype) for a in drawn], 1) if action is None else action, log_prob, entropy

    def distribution(self, k: int, latent: Tensor, elements: dict[str, Tensor], obs: Obs):
        part, mask, out = self.parts[k], obs.get("action_mask"), self.heads[k](latent)
        if part.kind == "categorical":
            return Categorical(out, None if mask is None else mask.flatten(1)[:, part.mask])
        if part.kind == "bits":
            return Bernoulli(out)
        if part.kind == "normal":
            mean, log_std = out.chunk(2, 1) if len(self.log_std[k]) == 0 else (out, self.log_std[k].expand_as(out))
            return DiagNormal(mean, log_std)
        rows = next(obs[path] for path in obs if path == self.group or path.startswith(self.group + "."))
        if mask is not None:
            mask = mask.values if mask.values.dim() == 1 else mask.values[:, k]
        embed, score = self.keys[k]
        logits = score(torch.tanh(embed(elements[self.group]) + out[rows.batch])).squeeze(1)
        return RaggedCategorical(logits, mask, rows.ptr, rows.batch)

    def embed(self, part: Part, action: Tensor, elements: dict[str, Tensor], obs: Obs) -> Tensor:
        """What the later parts of an autoregressive action see of this one, [B, ...]."""
        if part.kind == "choice":
            rows = next(obs[path] for path in obs if path == self.group or path.startswith(self.group + "."))
            return elements[self.group][rows.ptr[:-1] + action]
        return F.one_hot(action, part.size).float() if part.kind == "categorical" else action.float()


def choice_group(space: gym.Space, leaves: list[Leaf], head: str) -> str | None:
    """The ragged group whose rows the actions choose from, or None for a fixed list of options."""
    discrete = all(part.kind == "categorical" for part in parts_of(space, choice=False))
    groups = list(dict.fromkeys(leaf.group for leaf in leaves if leaf.group and leaf.path != "action_mask"))
    ragged_mask = any(leaf.path == "action_mask" and leaf.group for leaf in leaves)
    candidates = [g for g in groups if g == "avail_actions"] if head != "nodes" else []
    if head == "nodes" or (head == "auto" and not candidates and ragged_mask):
        candidates = [g for g in groups if g.endswith(".nodes")] or [g for g in groups if not g.endswith(".edge_links")]
    if head == "flat" or (head == "auto" and not candidates) or not discrete:
        if head in ("nodes", "avail_actions"):
            raise ValueError(f"--action-head {head} needs Discrete actions (or a Tuple of them), not {space}")
        return None
    if len(candidates) != 1:
        raise ValueError(f"--action-head {head}: the observation must have one graph or set to choose from, found "
                         f"{candidates} among the ragged leaves {groups}")
    return candidates[0]


# --- end shared: action heads ---


# ======================================================================================================================
# Agent, rollout, GAE, PPO loss
# ======================================================================================================================
class Agent(nn.Module):
    def __init__(self, leaves: list[Leaf], action_space: gym.Space, args):
        super().__init__()
        self.encoder = Encoder(leaves, args)
        widths = [self.encoder.dim, *args.hidden_dims]
        self.actor = mlp(widths, ACTIVATIONS[args.activation])
        self.critic = mlp(widths, ACTIVATIONS[args.activation]).append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        self.head = ActionHead(action_space, leaves, widths[-1], self.encoder.element_dim, args)

    def forward(self, obs: Obs, action: Tensor | None = None, greedy: Tensor | bool = False):
        """(action [B, columns], log_prob [B], entropy [B], value [B])"""
        features, elements = self.encoder(obs)
        action, log_prob, entropy = self.head(self.actor(features), elements, obs, action, greedy)
        return action, log_prob, entropy, self.critic(features).squeeze(1)

    def value(self, obs: Obs) -> Tensor:
        """V(observation), [B]"""
        return self.critic(self.encoder(obs)[0]).squeeze(1)


class Rollout(NamedTuple):
    """What the loss reads, on the training device; [T * N, ...] in the order of Storage."""

    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def collect(agent: Agent, envs: VecEnv, step: Step, storage: Storage, args, on_episode: Callable) -> tuple[Step, Rollout]:
    """Steps the envs num_steps times from `step`. Returns the last step and the rollout; observations go to storage."""
    T, N = args.num_steps, args.num_envs
    rewards, dones = np.zeros((T, N), np.float32), np.zeros((T, N), bool)
    records, finals = [], []
    storage.clear()
    for t in range(T):
        storage.append(step.parts, step.counts)
        action, log_prob, _, value = agent(storage.latest())
        records.append((action, log_prob, value))
        step = envs.step(to_env_actions(envs.action_space, action.cpu().numpy()))
        rewards[t], dones[t] = step.reward, step.terminated | step.truncated
        finals += [(t, i, arrays) for i, arrays in step.finals]
        for episode in step.episodes:
            on_episode(*episode)
    actions, log_probs, values = (torch.cat(column) for column in zip(*records))
    last = Storage(storage.leaves, storage.device)
    last.append(step.parts, step.counts)
    next_value = agent.value(last.latest()).cpu().numpy()
    if finals:  # an episode that was cut off goes on in expectation: r + gamma V(final observation)
        final_values = agent.value(batch_of([arrays for _, _, arrays in finals], storage)).cpu().numpy()
        for (t, i, _), final_value in zip(finals, final_values):
            rewards[t, i] += args.gamma * final_value
    advantages = gae(rewards, values.view(T, N).cpu().numpy(), dones, next_value, args.gamma, args.gae_lambda)
    advantages = storage.to_device(advantages.reshape(-1))
    return step, Rollout(actions, log_probs, values, advantages, advantages + values)


def batch_of(observations: list[list[np.ndarray]], storage: Storage) -> Obs:
    """A batch from the leaf arrays of single observations."""
    one = Storage(storage.leaves, storage.device)
    counts = {}
    for k, leaf in enumerate(storage.leaves):
        if leaf.group:
            counts[leaf.group] = np.array([len(arrays[k]) for arrays in observations], np.int64)
    one.append([[arrays[k] if leaf.group else arrays[k][None] for arrays in observations]
                for k, leaf in enumerate(storage.leaves)], counts)
    return one.latest()


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


def ppo_loss(agent: Agent, obs: Obs, batch: Rollout, args) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9) and what is logged of it."""
    _, log_prob, entropy, value = agent(obs, batch.actions)
    logratio = log_prob - batch.log_probs
    ratio = logratio.exp()
    advantages = batch.advantages
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
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


def update(agent: Agent, optimizer, storage: Storage, rollout: Rollout, rng: np.random.Generator, args) -> dict:
    """One PPO update. Returns the logs of the last minibatch; collection_mismatch is that of the first, before the
    first gradient step, where collection and training must agree."""
    clipfracs = []
    first = None
    for _ in range(args.update_epochs):
        for idx in np.array_split(rng.permutation(storage.size), args.num_minibatches):
            on_device = storage.to_device(idx)
            batch = Rollout(*(column.index_select(0, on_device) for column in rollout))
            loss, logs = ppo_loss(agent, storage.gather(idx), batch, args)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm, foreach=True)
            optimizer.step()
            first = logs["debug/collection_mismatch"] if first is None else first
            clipfracs.append(logs["losses/clipfrac"])
        if args.target_kl is not None and logs["losses/approx_kl"] > args.target_kl:
            break
    explained = 1 - (rollout.returns - rollout.values).var() / rollout.returns.var()
    logs |= {"debug/collection_mismatch": first, "losses/clipfrac": torch.stack(clipfracs).mean(),
             "losses/explained_variance": explained}
    return {name: value.item() for name, value in logs.items()}


# --- shared: checkpoint and evaluation ---
# ======================================================================================================================
# Checkpoint, evaluation, logging
# ======================================================================================================================
def save_model(path: str, agent: nn.Module, args) -> None:
    """Writes weights and Args; `load_model` reads them."""
    torch.save({"model": agent.state_dict(), "args": vars(args)}, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_model(path: str, agent: nn.Module, device: torch.device) -> None:
    try:
        agent.load_state_dict(torch.load(path, map_location=device, weights_only=True)["model"])
    except RuntimeError as error:
        raise ValueError(f"--load-model {path}: its network differs from the one that the flags describe: {error}") from None


@torch.no_grad()
def play(policy: Callable, makers: list[Callable[[], gym.Env]], seed: int, args, device) -> list[tuple[float, int, dict]]:
    """(return, length, info["eval"]) of each env's first episode; `policy` maps Obs to actions [N, columns]."""
    envs = VecEnv(makers, 0, args.action_head)
    storage, step, results = Storage(envs.leaves, device), envs.reset(seed), {}
    while len(results) < len(makers):
        storage.clear()
        storage.append(step.parts, step.counts)
        step = envs.step(to_env_actions(envs.action_space, policy(storage.latest()).cpu().numpy()))
        for i, *episode in step.episodes:
            results.setdefault(i, tuple(episode))
    envs.close()
    return [results[i] for i in range(len(makers))]


def evaluate(agent: nn.Module, args, device: torch.device) -> list[dict]:
    """One row per entry of the env's suite: a greedy episode and the best of `eval_samples` sampled ones, beside the
    references that the env reports in info["eval"]; without a suite, one row per greedy episode."""
    if args.eval_suite is None:
        makers = [partial(make_env, args.env_id, args.env_kwargs)] * args.eval_episodes
        greedy = lambda obs: agent(obs, greedy=True)[0]  # noqa: E731
        results = play(greedy, makers, args.seed + 10_000, args, device) if makers else []
        return [{"episode": i, "return": ret, "length": length} for i, (ret, length, _) in enumerate(results)]
    env = make_env(args.env_id, args.env_kwargs)
    suites = getattr(env.unwrapped, "eval_suites", {})
    if args.eval_suite not in suites:
        raise ValueError(f"--eval-suite {args.eval_suite}: {args.env_id} has the suites {sorted(suites)}")
    rows, is_greedy = [], torch.arange(1 + args.eval_samples, device=device) == 0
    for kwargs in tqdm(suites[args.eval_suite], desc="evaluation", unit="instance", leave=False):
        makers = [partial(make_env, args.env_id, args.env_kwargs | kwargs)] * (1 + args.eval_samples)
        results = play(lambda obs: agent(obs, greedy=is_greedy)[0], makers, args.seed + 10_000, args, device)
        references = dict(results[0][2])
        costs = [info.get("cost", -ret) for ret, _, info in results]
        references.pop("cost", None)
        row = {"instance": " ".join(map(str, kwargs.values())), "greedy": costs[0]}
        if args.eval_samples:
            row[f"best of {args.eval_samples}"] = min(costs[1:])
        rows.append(row | references)
    return rows


def eval_table(rows: list[dict]) -> str:
    """A markdown table of `evaluate`'s rows; with a "best_known" column every cost gets its gap to it in percent, and
    the last row is the mean of the gaps."""
    if not rows:
        return ""
    costs = [name for name in rows[0] if name not in ("instance", "best_known", "lower_bound", "episode", "length")]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    gaps = {name: [] for name in costs}
    for row in rows:
        cells = []
        for name, value in row.items():
            cell = f"{value:g}" if isinstance(value, (int, float)) else str(value)
            if "best_known" in row and name in costs:
                gaps[name].append(100 * (value / row["best_known"] - 1))
                cell += f" ({gaps[name][-1]:.1f}%)"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    means = {name: f"**{np.mean(gaps[name]):.1f}%**" if gaps[name] else f"**{np.mean([r[name] for r in rows]):g}**"
             for name in costs}
    lines.append("| **mean** | " + " | ".join(means.get(name, "") for name in list(rows[0])[1:]) + " |")
    return "\n".join(lines)


class Logger:
    """TensorBoard always, wandb with --track; a progress bar with step, SPS and the recent mean return."""

    def __init__(self, args, run_name: str):
        self.path = os.path.join(args.run_dir, run_name)
        if args.track:
            import wandb

            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, sync_tensorboard=True,
                       config=vars(args), name=run_name, save_code=True)
        self.writer = SummaryWriter(self.path)
        table = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        self.bar = tqdm(total=args.total_timesteps, unit="step", unit_scale=True, dynamic_ncols=True)
        self.recent, self.step, self.start = deque(maxlen=100), 0, time.time()

    def episode(self, env: int, episodic_return: float, length: int, info: dict) -> None:
        self.recent.append(episodic_return)
        self.writer.add_scalar("charts/episodic_return", episodic_return, self.step)
        self.writer.add_scalar("charts/episodic_length", length, self.step)

    def update(self, num_steps: int, scalars: dict[str, float]) -> None:
        self.step += num_steps
        scalars["charts/SPS"] = int(self.step / (time.time() - self.start))
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, self.step)
        self.bar.update(num_steps)
        self.bar.set_postfix(SPS=scalars["charts/SPS"], ret=f"{np.mean(self.recent):.4g}" if self.recent else "-")

    def close(self) -> None:
        self.bar.close()
        self.writer.close()


# --- end shared: checkpoint and evaluation ---


def main(args: Args) -> list[dict]:
    args.batch_size = args.num_envs * args.num_steps
    args.minibatch_size = args.batch_size // args.num_minibatches
    args.num_iterations = args.total_timesteps // args.batch_size
    run_name = f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__{int(time.time())}"

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    # env setup
    mask_in_info = needs_info_mask(args.env_id, args.env_kwargs)
    makers = [partial(make_env, args.env_id, args.env_kwargs, mask_in_info) for _ in range(args.num_envs)]
    envs = VecEnv(makers, args.num_workers, args.action_head)
    agent = Agent(envs.leaves, envs.action_space, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    if args.load_model:
        load_model(args.load_model, agent, device)
    storage = Storage(envs.leaves, device)
    logger = Logger(args, run_name)

    step = envs.reset(args.seed)
    for iteration in range(1, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - (iteration - 1.0) / args.num_iterations)
        step, rollout = collect(agent, envs, step, storage, args, logger.episode)
        logs = update(agent, optimizer, storage, rollout, rng, args)
        logs["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        logger.update(args.batch_size, logs | storage.stats())
    envs.close()
    logger.close()

    if args.save_model:
        save_model(os.path.join(logger.path, "model.pt"), agent, args)
    rows = evaluate(agent, args, device)
    if rows:
        print(eval_table(rows))
        with open(os.path.join(logger.path, "eval.md"), "w") as file:
            file.write(eval_table(rows) + "\n")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args))
