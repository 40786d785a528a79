"""PPO that acts and learns at the same time: ppo_graph.py with a second process that collects the
next rollout.

    python cleanrl_graph/ppo_graph_async.py --env-id envs:JobShop-v0 --gamma 1 --eval-suite la --save-model
    python cleanrl_graph/ppo_graph_async.py --env-id your_module:YourEnv-v0 --max-lag 2 --num-workers 4

`diff ppo_graph.py ppo_graph_async.py` shows the idea: a room "collector", and the advantages. While
update k runs, the collector acts with the weights that it has: rollout k is collected by the
weights after max(0, k - max_lag) updates, however fast either process is, so that runs can be
repeated bit by bit. The policy has moved on when a rollout is learned from, so at the start of an
update log-probabilities and values are computed anew. Their ratio to the collector's, rho, corrects
the advantages and value targets (V-trace) and weighs the policy loss, and the clipped ratio of PPO
is taken to the policy at the update's start (the decoupled objective). With --max-lag 0 rho is 1,
this is ppo_graph.py. torchrun is refused. Environments begin new episodes when a run is resumed.

Papers: V-trace (Espeholt et al. 2018, arXiv:1802.01561), the decoupled objective (Hilton et al.
2022, arXiv:2110.00641), and those of ppo_graph.py.
"""

import contextlib
import importlib.util
import inspect
import json
import math
import multiprocessing as mp
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Callable, Iterable, Iterator, Literal, NamedTuple

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
from torch_geometric import nn as pyg
from tqdm import tqdm

Json = Annotated[
    dict | list,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: json.loads(args[0]),
        is_instance=lambda value: isinstance(value, (dict, list)),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


@dataclass
class Args:
    """Experiment, environment (from --env-id), network (--hidden-dims), algorithm
    (--total-timesteps)."""

    exp_name: str = os.path.basename(__file__)[: -len(".py")]
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
    """saves a greedy episode to {run_dir}/{run_name}/episode.gif when training ends"""
    run_dir: str = "runs"
    """folder of the runs' folders: TensorBoard log, model, checkpoints, evaluation"""
    save_model: bool = False
    """saves the model to {run_dir}/{run_name}/model.pt when training ends"""
    load_model: str | None = None
    """model.pt to start from, with its flags where not given"""
    torch_threads: int = int((os.getenv("OMP_NUM_THREADS") or "1").split(",")[0])
    """torch's threads; more are slower on busy cores; 0: one per core"""
    checkpoint_every: int = 100
    """updates between checkpoints in {run_dir}/{run_name}, of which two stay; 0: none"""
    resume: str | None = None
    """go on from this checkpoint, or the newest in this folder; `auto`: of this run"""
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
    gnn: Literal["gine", "gatv2", "transformer", "sage"] = "gine"
    """message passing layer of graph observations"""
    gnn_layers: int = 3
    """number of message passing layers"""
    gnn_dim: int = 64
    """width of node, edge and set-element embeddings"""
    gnn_aggr: Literal["sum", "mean", "max"] = "sum"
    """how a node aggregates its incoming messages"""
    readout: Literal["sum", "mean", "max", "meanmax"] = "meanmax"
    """how nodes of a graph, or elements of a set, become one vector"""
    action_head: str = "auto"
    """what actions index, or a Sequence has one for each of: flat (a fixed list), nodes, edges,
    avail_actions, a set"""
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
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = True
    """toggles the clipped loss of the value function"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value function"""
    max_grad_norm: float = 0.5
    """the maximum norm for the gradient clipping"""
    target_kl: float | None = None
    """the target KL divergence threshold"""
    max_lag: int = 1
    """updates that the weights which collect are behind those that learn; 0 acts and learns in
    turns"""
    max_rho: float = 1.0
    """upper bound of the importance weights that correct for the lag, both rho and c of V-trace"""

    batch_size: tyro.conf.Suppress[int] = 0
    """the batch size; these four are set at run time"""
    minibatch_size: tyro.conf.Suppress[int] = 0
    """the mini-batch size"""
    world_size: tyro.conf.Suppress[int] = 1
    """the number of ranks"""
    num_iterations: tyro.conf.Suppress[int] = 0
    """the number of iterations"""


class UsageError(ValueError):
    """A sentence that says what was wrong, where, and what to do, shown without a traceback."""


# --- shared: observations ---
# ---- Observations: the leaves of a space, and N observations as flat arrays ----
NOT_INPUT = ("action_mask", "node_ids")  # keys of a Dict observation with a meaning of their own


class Leaf(NamedTuple):
    """One array of the observation tree. A ragged leaf (`group` is not None) has any number of rows
    per step, as many as others of its group. `shape`, `dtype` and `space` are those of one row
    (ragged) or one step (dense)."""

    path: str  # "graph.nodes", "position"
    kind: str  # "vector", "image", "discrete", "multidiscrete" or "links" (pairs of node indices)
    shape: tuple[int, ...]
    dtype: np.dtype
    group: str | None
    space: gym.Space
    get: Callable[[Any], Any]  # observation -> array, None for no rows
    is_input = property(lambda leaf: leaf.path.split(".")[0] not in NOT_INPUT)


def leaves_of(space: gym.Space, path: str = "", get: Callable = lambda obs: obs) -> list[Leaf]:
    """The leaves of `space` in a fixed order. UsageError for a space with no rule, naming it."""
    name = path or "obs"  # the path of a space that is not inside another
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return [
            leaf
            for k, child in children
            for leaf in leaves_of(
                child, f"{path}.{k}" if path else str(k), lambda obs, k=k: get(obs)[k]
            )
        ]
    if isinstance(space, spaces.Graph):
        nodes, edges = f"{name}.nodes", f"{name}.edge_links"
        leaves = [
            leaf._replace(group=nodes)
            for leaf in leaves_of(space.node_space, nodes, lambda obs: get(obs).nodes)
        ]
        leaves.append(
            Leaf(
                edges,
                "links",
                (2,),
                np.dtype(np.int32),
                edges,
                space,
                lambda obs: get(obs).edge_links,
            )
        )
        if space.edge_space is not None:
            features = leaves_of(space.edge_space, f"{name}.edges", lambda obs: get(obs).edges)
            leaves += [leaf._replace(group=edges) for leaf in features]
        return leaves
    if isinstance(space, spaces.Sequence):
        rows = leaves_of(space.feature_space, name)
        if any(leaf.group for leaf in rows):
            raise UsageError(
                f"leaf '{name}': {space} is not supported, its rows must have a fixed shape"
            )
        if space.stack:
            return [
                leaf._replace(group=name, get=lambda obs, g=leaf.get: g(get(obs))) for leaf in rows
            ]
        return [
            leaf._replace(
                group=name, get=lambda obs, g=leaf.get: [g(row) for row in get(obs)] or None
            )
            for leaf in rows
        ]
    kind, dtype = "vector", np.dtype(np.int64)  # torch knows no larger unsigned numbers
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        kind = "discrete" if isinstance(space, spaces.Discrete) else "multidiscrete"
    elif not isinstance(space, (spaces.Box, spaces.MultiBinary)):
        raise UsageError(
            f"leaf '{name}': {space} is not supported (Box, Discrete, MultiDiscrete, MultiBinary, Graph, "
            "Sequence, Dict and Tuple are)"
        )
    elif space.dtype.kind == "f":
        dtype = np.dtype(np.float32)
    elif space.dtype.kind in "bi" or space.dtype == np.uint8:
        dtype = space.dtype
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        pixels = space.shape[:2] if space.shape[2] < space.shape[0] else space.shape[1:]
        kind = "image" if min(pixels) >= 8 else "vector"
    return [Leaf(name, kind, tuple(space.shape), dtype, None, space, get)]


def num_options(leaf: Leaf) -> np.ndarray:
    """The number of values of each category of a discrete or multidiscrete leaf, int64
    [entries]."""
    return np.ravel(leaf.space.n if leaf.kind == "discrete" else leaf.space.nvec).astype(np.int64)


def element_groups(leaves: list[Leaf]) -> list[str]:
    """The groups whose rows can be chosen or have an id: the nodes of graphs, or the sets where
    there is no graph."""
    groups = dict.fromkeys(leaf.group for leaf in leaves if leaf.group and leaf.is_input)
    return [g for g in groups if g.endswith(".nodes")] or [
        g for g in groups if not g.endswith(".edge_links")
    ]


class Flat(NamedTuple):
    """N observations on the host. Of a ragged leaf's rows counts[leaf.group][i] are those of
    observation i."""

    values: list[np.ndarray]  # per leaf [N, ...] (dense) or the rows of all N one after the other
    counts: dict[str, np.ndarray]  # group of ragged leaves -> int64 [N]


def join(flats: list[Flat], concatenate: Callable = np.concatenate) -> Flat:
    """The observations of all `flats`, copied by `concatenate`."""
    values, counts = zip(*flats)
    return Flat(
        [concatenate(arrays) for arrays in zip(*values)],
        {group: np.concatenate([num[group] for num in counts]) for group in counts[0]},
    )


# --- end shared: observations ---


# --- shared: environments ---
# ---- Environments: made from the flags, stepped one after the other ----
VERSION = "1.0.0.dev0"  # of cleanrl_graph; services of another version are not used


def service(name: str, flag: str | None = None):
    """The module cleanrl_graph.NAME; None, or a UsageError if a flag needs it, where this script
    was copied alone or another version of the package is installed."""
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
    return None


def own_envs() -> str | None:
    """The file of an `envs` that is not this project's; a folder without __init__.py has no ids."""
    spec = importlib.util.find_spec("envs")
    return spec.origin if spec else None


def full_id(env_id: str) -> str:
    """`envs:NAME` is cleanrl_graph's where the current folder has no `envs` of its own."""
    if env_id.startswith("envs:") and own_envs() is None:
        return f"cleanrl_graph.{env_id}"
    return env_id


def guarded(doing: str, function: Callable, *args, **kwargs) -> Any:
    """function(*args, **kwargs); its exception becomes a UsageError: frames of others' code, then a
    sentence."""
    try:
        return function(*args, **kwargs)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        trace, frames = error.__traceback__, []
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        if not isinstance(
            error, (gym.error.Error, OSError, ModuleNotFoundError)
        ):  # which say enough
            frames = traceback.format_exception(type(error), error, trace)
        raise UsageError(
            f"{''.join(frames)}{doing}{args or ''}: {type(error).__name__}: {error}"
        ) from None


def tasks_of(args) -> list[dict]:  # the entries of --env-kwargs
    return args.env_kwargs if isinstance(args.env_kwargs, list) else [args.env_kwargs]


def make_env(args, i: int = 0, more: dict | None = None) -> gym.Env:
    """Environment i, counted over all ranks, with `more` keyword arguments, in its wrappers."""
    kwargs = {"disable_env_checker": True} | tasks_of(args)[i % len(tasks_of(args))] | (more or {})
    env_id = full_id(args.env_id)
    where = "or module:Name-v0"
    if env_id.startswith("envs:"):
        where = f"of {own_envs()}; that of cleanrl_graph is cleanrl_graph.{env_id}"
    env = guarded(f"--env-id {args.env_id} ({where})", partial(gym.make, env_id, **kwargs))
    wrappers = service("envs.wrappers", args.wrap and "--wrap")
    return wrappers.wrap_all(env, args.wrap) if wrappers else env


class Episode(NamedTuple):
    """An episode that ended. Return and length are those of RecordEpisodeStatistics where used."""

    env: int
    ret: float
    length: int
    group: str | None  # info["group"]
    eval: dict  # info["eval"]


class Step(NamedTuple):
    """What N environments returned. Where one is `terminated` or `truncated`, as all are at first,
    a new one begins."""

    obs: Flat
    reward: np.ndarray  # float32 [N]
    terminated: np.ndarray  # bool [N]
    truncated: np.ndarray  # bool [N]
    final: Flat | None  # the last observations of truncated episodes, None if there are none
    episodes: list[Episode]


class Envs:
    """N environments stepped one after the other. Autoreset in the same step: the observation after
    an episode's last step is the first of the next one. UsageError names env, step and action, or
    leaf and value, of what goes wrong."""

    def __init__(
        self, makers: list[Callable[[], gym.Env]], action_head: str = "auto", first_env: int = 0
    ):
        self.envs, self.first_env, N = (
            [guarded("make_env", make) for make in makers],
            first_env,
            len(makers),
        )
        self.action_space, space, self.num_steps = (
            self.envs[0].action_space,
            self.envs[0].observation_space,
            0,
        )
        leaves = leaves_of(space)
        paths = [leaf.path for leaf in leaves]
        if len(set(paths)) < len(paths) or not any(leaf.is_input for leaf in leaves):
            raise UsageError(
                f"{space}: its leaves {paths} need different names, and one must be an input"
            )
        self.parts = [parts_of(env.action_space, leaves, action_head) for env in self.envs]
        kinds = [
            [part._replace(size=0) if part.kind == "choice" else part for part in own]
            for own in self.parts
        ]
        if (
            len(
                {
                    repr((own, to_env_actions(env.action_space, np.zeros((1, 999)))))
                    for own, env in zip(kinds, self.envs)
                }
            )
            > 1
        ):
            raise UsageError(
                f"--env-kwargs: not all entries have the action space {self.action_space}"
            )
        sets = [g for g in element_groups(leaves) if g != "avail_actions"]
        aligned = {part.mask: part.group for part in self.parts[0]} | {
            "node_ids": next(iter(sets), None)
        }
        self.leaves = sorted(
            (leaf._replace(group=aligned.get(leaf.path, leaf.group)) for leaf in leaves),
            key=lambda leaf: not leaf.is_input,
        )
        self.returns, self.lengths = np.zeros(N), np.zeros(N, np.int64)  # of the present episodes
        self.observations: list[list[np.ndarray]] = [[]] * N  # leaf arrays of the last step

    def reset(self, seed: int | None = None) -> Step:
        """Starts new episodes; env i, counted over all ranks, is seeded with seed + i."""
        N = len(self.envs)
        self.reward, self.terminated, self.truncated = (
            np.zeros(N, np.float32),
            np.ones(N, bool),
            np.zeros(N, bool),
        )
        for i in range(N):
            self.begin(i, None if seed is None else seed + self.first_env + i)
        return self.latest()

    def begin(self, i: int, seed: int | None = None) -> None:
        obs, _ = self.call(i, 2, "reset", seed=seed)
        self.returns[i], self.lengths[i], self.observations[i] = 0.0, 0, self.flatten(i, obs)

    def latest(self, final: Flat | None = None, episodes: Iterable[Episode] = ()) -> Step:
        obs = self.collate(self.observations, range(len(self.envs)))
        return Step(obs, self.reward, self.terminated, self.truncated, final, list(episodes))

    def step(self, actions: list) -> Step:
        """Steps env i with actions[i], an element of its action space."""
        self.num_steps += 1
        outcomes, finals, episodes = [], {}, []
        for i, action in enumerate(actions):
            obs, reward, terminated, truncated, info = self.call(i, 5, "step", action)
            info, doing = info or {}, f"env {self.first_env + i}, step {self.num_steps}"
            reward = (
                reward if isinstance(reward, float) else guarded(f"{doing}, reward", float, reward)
            )
            if not abs(reward) < 3e38:
                raise UsageError(f"{doing}: reward {reward} is not finite")
            if "action_mask" in info and not any(part.mask for part in self.parts[i]):
                raise UsageError(f"{doing}: info has an action_mask, the first reset had none")
            self.returns[i] += reward
            self.lengths[i] += 1
            outcomes.append((reward, terminated, truncated and not terminated))
            if not (terminated or truncated):
                self.observations[i] = self.flatten(i, obs)
                continue
            if not terminated:  # copied: the environment may write into it
                finals[i] = [array.copy() for array in self.flatten(i, obs)]
            if (
                whole := info.get("episode", {})
            ) is not None:  # None: the end of a life, not of a game
                whole = {
                    "r": self.returns[i],
                    "l": self.lengths[i],
                    **(whole if isinstance(whole, dict) else {}),
                }
                episodes.append(
                    Episode(
                        self.first_env + i,
                        float(whole["r"]),
                        int(whole["l"]),
                        info.get("group"),
                        info.get("eval", {}),
                    )
                )
            self.begin(i)
        outcomes = np.array(outcomes, np.float64)
        self.reward, self.terminated, self.truncated = (
            outcomes[:, 0].astype(np.float32),
            *(outcomes[:, 1:] > 0).T,
        )
        return self.latest(
            self.collate(list(finals.values()), list(finals)) if finals else None, episodes
        )

    def call(self, i: int, length: int, method: str, *args, **kwargs) -> tuple:
        """The `length` values that a method of env i returns."""
        doing = f"env {self.first_env + i}, step {self.num_steps}, {method}"
        result = guarded(doing, getattr(self.envs[i], method), *args, **kwargs)
        if not isinstance(result, tuple) or len(result) != length:
            raise UsageError(
                f"{doing}: gymnasium's environments return {length} values, not {str(result)[:200]}"
            )
        return result

    def flatten(self, i: int, obs: Any) -> list[np.ndarray]:
        """The leaf arrays of one observation of env i."""
        arrays, num_rows = [], {}
        for leaf in self.leaves:
            ragged = leaf.group is not None
            try:
                array = leaf.get(obs)
                array = (
                    np.zeros((0, *leaf.shape), leaf.dtype)
                    if array is None and ragged
                    else np.asarray(array)
                )
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise self.error(
                    i, leaf, f"cannot be read: {type(error).__name__} {error}"
                ) from None
            if array.dtype != leaf.dtype:
                if array.dtype.kind not in ("biu" if leaf.dtype.kind in "iu" else "biuf"):
                    raise self.error(
                        i,
                        leaf,
                        f"dtype {array.dtype} where {leaf.space.dtype or leaf.dtype} is declared",
                    )
                array = array.astype(leaf.dtype)
            if array.ndim != len(leaf.shape) + ragged or array.shape[ragged:] != leaf.shape:
                raise self.error(
                    i,
                    leaf,
                    f"shape {array.shape} where {('rows',) * ragged + leaf.shape} is declared",
                )
            if ragged and num_rows.setdefault(leaf.group, len(array)) != len(array):
                raise self.error(
                    i, leaf, f"{len(array)} rows where '{leaf.group}' has {num_rows[leaf.group]}"
                )
            if leaf.path == "node_ids" and len(np.unique(array)) < len(array):
                raise self.error(i, leaf, f"an id occurs twice: {array.tolist()}")
            for part in self.parts[i]:
                is_choice = part.kind == "choice"
                if is_choice and part.group == leaf.group and not 0 < len(array) <= part.size:
                    raise self.error(
                        i,
                        leaf,
                        f"{len(array)} rows to choose from, the action space has {part.size}",
                    )
                if part.mask == leaf.path:
                    options = array.reshape(-1, math.prod(leaf.shape))[:, part.entries]
                    if not options.any(0 if is_choice else 1).all():
                        raise self.error(i, leaf, f"all actions are masked: {array.tolist()}")
            arrays.append(array)
        return arrays

    def collate(self, observations: list[list[np.ndarray]], envs: Iterable[int]) -> Flat:
        """The observations of `envs`, copied; UsageError for the first value that is out of
        range."""
        values, counts = [], {}
        for leaf, arrays in zip(self.leaves, zip(*observations)):
            if leaf.group and leaf.group not in counts:
                counts[leaf.group] = np.fromiter(map(len, arrays), np.int64, len(arrays))
            values.append(np.concatenate(arrays) if leaf.group else np.array(arrays))
            if leaf.dtype.kind == "f":
                bad = ~np.isfinite(values[-1])
            elif leaf.kind == "links":
                num_nodes = counts[leaf.path.removesuffix("edge_links") + "nodes"]
                bad = (values[-1] < 0) | (
                    values[-1] >= num_nodes.repeat(counts[leaf.group])[:, None]
                )
            elif leaf.kind in ("discrete", "multidiscrete"):
                option, num = values[-1] - leaf.space.start, num_options(leaf).reshape(leaf.shape)
                bad = (option < 0) | (option >= num)
            else:
                continue
            if bad.any():
                row = int(np.argwhere(bad)[0][0])
                b = (
                    int(np.searchsorted(counts[leaf.group].cumsum(), row, side="right"))
                    if leaf.group
                    else row
                )
                where = f" in row {row - counts[leaf.group][:b].sum()}" if leaf.group else ""
                where += f" of a graph with {num_nodes[b]} nodes" if leaf.kind == "links" else ""
                raise self.error(list(envs)[b], leaf, f"value {values[-1][bad][0]}{where}")
        return Flat(values, counts)

    def error(self, i: int, leaf: Leaf, problem: str) -> UsageError:
        return UsageError(
            f"env {self.first_env + i}, leaf '{leaf.path}', step {self.num_steps}: {problem}"
        )

    def close(self) -> None:
        for env in self.envs:
            env.close()


# --- end shared: environments ---


# --- shared: storage ---
# ---- Storage: every step once, minibatches by index arithmetic ----
class Ragged(NamedTuple):
    """Rows of B observations one after the other; b owns values[ptr[b]:ptr[b + 1]]. Node indices
    ("edge_links") index the rows of the batch, as in PyG's Batch."""

    values: Tensor  # [rows, ...]
    ptr: Tensor  # int64 [B + 1]
    batch: Tensor  # int64 [rows], the observation that a row belongs to
    rows: Tensor | None = None  # int64 [rows], their places in the storage


Obs = dict[str, Tensor | Ragged]  # leaf path -> [B, ...] (dense) or Ragged


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, from pinned memory, without waiting for the copy."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def select_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows]; by numpy on the CPU without gradients, 2 to 5 times faster."""
    if values.requires_grad or values.device.type != "cpu":
        return values.index_select(0, rows)
    return torch.from_numpy(values.numpy().take(rows.numpy(), 0))


class Storage:
    """Observations on `device` in order: with N envs number t * N + i is step t of env i."""

    def __init__(self, leaves: list[Leaf], device: torch.device):
        self.leaves, self.device = leaves, device
        self.clear()

    def clear(self) -> None:
        self.blocks: list[Flat] = []  # what was appended, with tensors as values

    def append(self, flat: Flat) -> Obs:
        """Adds observations, with one copy to the device per leaf, and returns them as a batch."""
        self.blocks.append(
            Flat([to_device(array, self.device) for array in flat.values], flat.counts)
        )
        return self.batch(self.blocks[-1])

    def whole(self) -> Flat:
        """All observations in one block."""
        if len(self.blocks) > 1:
            self.blocks = [join(self.blocks, torch.cat)]
        return self.blocks[0]

    def gather(self, idx: np.ndarray) -> Obs:
        """The observations `idx` (int64 [B], repeats allowed): one selection of rows per leaf."""
        values, counts = self.whole()
        first = [(num.cumsum() - num)[idx] for num in counts.values()]
        return self.batch(
            Flat(values, {group: num[idx] for group, num in counts.items()}), [*first, idx]
        )

    def batch(self, flat: Flat, first: Iterable[np.ndarray] = ()) -> Obs:
        """B observations as the network sees them: of group k counts[group] rows from row first[k]
        on, of dense leaves the rows first[-1]; without `first` all there are. The index arrays
        reach the device in one copy."""
        obs, index, rows, ends = (
            {},
            {},
            {},
            [np.append(0, num.cumsum()) for num in flat.counts.values()],
        )
        arrays = [*ends, *first]
        if arrays:
            arrays = to_device(np.concatenate(arrays), self.device).split(list(map(len, arrays)))
        for k, (group, num) in enumerate(flat.counts.items()):
            batch = torch.repeat_interleave(arrays[k].diff(), output_size=int(num.sum()))
            if first:
                shift = arrays[len(ends) + k] - arrays[k][:-1]
                rows[group] = select_rows(shift, batch) + torch.arange(
                    len(batch), device=self.device
                )
            index[group] = arrays[k], batch, rows.get(group)
        for leaf, values in zip(self.leaves, flat.values):
            if first:
                values = select_rows(values, rows[leaf.group] if leaf.group else arrays[-1])
            if leaf.kind == "links":
                first_node = index[leaf.path.removesuffix("edge_links") + "nodes"][0]
                values = values + select_rows(first_node, index[leaf.group][1])[:, None]
            obs[leaf.path] = Ragged(values, *index[leaf.group]) if leaf.group else values
        return obs

    def stats(self, size: int) -> dict[str, float]:
        """Of the first `size` observations: bytes of each, share that padding would waste, rows per
        group."""
        stats, used, full, counts = {}, 0, 0, self.whole().counts
        for leaf in self.leaves:
            num = counts[leaf.group][:size] if leaf.group else np.ones(size, np.int64)
            row_bytes = leaf.dtype.itemsize * math.prod(leaf.shape)
            used, full = used + int(num.sum()) * row_bytes, full + int(num.max()) * size * row_bytes
            if leaf.group:
                stats[f"charts/rows/{leaf.group}"] = num.mean()
        return stats | {
            "charts/obs_bytes_per_step": used / size,
            "charts/padding_avoided": (full - used) / (full or 1),
        }


# --- end shared: storage ---


# --- shared: encoder ---
# ---- Encoder: one small network per leaf kind, concatenated ----
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(widths: list[int], activation: str) -> nn.Sequential:
    layers = [
        [layer_init(nn.Linear(i, o)), ACTIVATIONS[activation]()] for i, o in zip(widths, widths[1:])
    ]
    return nn.Sequential(*sum(layers, []))


def segment_sum(values: Tensor, ptr: Tensor) -> Tensor:
    """Sums of values[ptr[b]:ptr[b + 1]], [B, ...]; zero for an empty segment."""
    return torch.segment_reduce(values, "sum", offsets=ptr, axis=0, unsafe=True)


def segment_max(values: Tensor, ptr: Tensor) -> Tensor:
    """Maxima of values[ptr[b]:ptr[b + 1]], [B, ...]; -inf for an empty segment."""
    return torch.segment_reduce(values, "max", offsets=ptr, axis=0, unsafe=True)


class Rows(nn.Module):
    """Floats [rows, dim] of a leaf: vectors flat, categories one-hot (embedded where there are more
    than 64). With `norm_obs` Box vectors are normalised by mean and std of all rows that `observe`
    was given, and clipped to 10."""

    def __init__(self, leaf: Leaf, norm_obs: bool = False):
        super().__init__()
        self.axes, self.embedding, self.dim = len(leaf.shape), None, math.prod(leaf.shape)
        self.categorical = leaf.kind in ("discrete", "multidiscrete")
        if self.categorical:
            num = num_options(leaf)
            shift = num.cumsum() - num - np.ravel(leaf.space.start)
            self.register_buffer("shift", torch.as_tensor(shift), persistent=False)
            self.num = self.dim = int(num.sum())
            if self.num > 64:
                self.embedding, self.dim = nn.EmbeddingBag(self.num, 64, mode="sum"), 64
        self.norm_obs = norm_obs and isinstance(leaf.space, spaces.Box)
        if self.norm_obs:
            zeros = torch.zeros(self.dim, dtype=torch.float64)
            for name, value in ("count", zeros[0]), ("mean", zeros), ("var", zeros + 1):
                self.register_buffer(name, value.clone())

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Adds the rows of all ranks to the running mean and variance (Chan et al. 1979, eq.
        2.1)."""
        values = values.reshape(-1, self.dim).double()
        moments = (
            torch.var_mean(values, 0, correction=0)
            if len(values)
            else (0 * self.var, 0 * self.mean)
        )
        for num, moment in all_ranks((len(values), torch.stack(moments))):
            (var, mean), total = moment.to(self.mean), (self.count + num).clamp(min=1)
            delta = mean - self.mean
            spread = self.var * self.count + var * num + delta**2 * self.count * num / total
            self.mean += delta * num / total
            self.var.copy_(torch.where(self.count + num > 0, spread / total, self.var))
            self.count += num

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(1) if self.axes else values[:, None]
        if self.norm_obs:
            return ((values.float() - self.mean.float()) / (self.var + 1e-8).sqrt().float()).clamp(
                -10, 10
            )
        if not self.categorical:
            return values.float()
        if self.embedding is not None:
            return self.embedding(values + self.shift)
        return torch.zeros(len(values), self.num, device=values.device).scatter_(
            1, values + self.shift, 1.0
        )


class CNN(nn.Module):
    """Features [rows, 512] of images CHW or HWC (the channel axis is the shorter one), or of [rows,
    num_frames, ...] as channels; uint8 is scaled to 0..1. The layers of Mnih et al. 2015, two of 3
    x 3 for images below 36 x 36."""

    def __init__(self, leaf: Leaf, num_frames: int = 1):
        super().__init__()
        self.channels_last, self.dim = leaf.shape[2] < leaf.shape[0], 512
        self.scale = 1 / 255 if leaf.dtype == np.uint8 else 1.0
        c, h, w = np.roll(leaf.shape, 1).tolist() if self.channels_last else leaf.shape
        spec = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if min(h, w) >= 36 else [(32, 3, 2), (64, 3, 1)]
        widths = [c * num_frames, *(width for width, _, _ in spec)]
        convs = [layer_init(nn.Conv2d(i, o, k, s)) for i, (o, k, s) in zip(widths, spec)]
        net = nn.Sequential(*sum([[conv, nn.ReLU()] for conv in convs], []), nn.Flatten())
        num = net(torch.zeros(1, widths[0], h, w)).shape[1]
        self.net = net.extend([layer_init(nn.Linear(num, self.dim)), nn.ReLU()])

    def forward(self, images: Tensor) -> Tensor:
        images = images.movedim(-1, -3) if self.channels_last else images
        return self.net(images.flatten(1, -3).float() * self.scale)


def make_conv(kind: str, dim: int, edge_dim: int | None, aggr: str) -> nn.Module:
    """A PyG layer dim -> dim; any with forward(x, edge_index[, edge_attr]) can stand here."""
    if kind == "gine":
        net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        return (
            pyg.GINEConv(net, edge_dim=edge_dim, aggr=aggr)
            if edge_dim
            else pyg.GINConv(net, aggr=aggr)
        )
    if kind == "gatv2":
        return pyg.GATv2Conv(dim, dim // 4, heads=4, edge_dim=edge_dim)
    if kind == "transformer":
        return pyg.TransformerConv(dim, dim // 4, heads=4, edge_dim=edge_dim)
    return pyg.SAGEConv(dim, dim, aggr=aggr)


class GNN(nn.Module):
    """Node embeddings [nodes, dim] of a batch of graphs in PyG's convention: residual layers on
    normalised inputs."""

    def __init__(self, node_dim: int, edge_dim: int | None, args):
        super().__init__()
        self.embed, layers = nn.Linear(node_dim, args.gnn_dim), range(args.gnn_layers)
        self.convs = nn.ModuleList(
            make_conv(args.gnn, args.gnn_dim, edge_dim, args.gnn_aggr) for _ in layers
        )
        self.norms = nn.ModuleList(nn.LayerNorm(args.gnn_dim) for _ in layers)
        self.takes_edge_attr = "edge_attr" in inspect.signature(self.convs[0].forward).parameters

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        h, edge_attrs = self.embed(x), [edge_attr] if self.takes_edge_attr else []
        for conv, norm in zip(self.convs, self.norms):
            h = h + conv(norm(h), edge_index, *edge_attrs).relu()
        return h


class Encoder(nn.Module):
    """Observation -> (features [B, dim], elements {group: [rows, gnn_dim]}, of edges their
    features). Dense leaves enter as they are, images through a CNN, graphs through a GNN, sets
    through an MLP per row; then a readout."""

    def __init__(self, leaves: list[Leaf], args):
        super().__init__()
        leaves = [leaf for leaf in leaves if leaf.is_input]
        rows = {
            leaf.path: CNN(leaf) if leaf.kind == "image" else Rows(leaf, args.norm_obs)
            for leaf in leaves
            if leaf.kind != "links"
        }
        self.rows = nn.ModuleDict({key(path): row for path, row in rows.items()})
        self.dense = [leaf.path for leaf in leaves if leaf.group is None]
        links = [leaf.path.removesuffix("edge_links") for leaf in leaves if leaf.kind == "links"]
        self.links = {f"{path}nodes": f"{path}edge_links" for path in links}
        self.edges = {f"{path}nodes": f"{path}edges" for path in links if f"{path}edges" in rows}
        groups = dict.fromkeys(
            leaf.group for leaf in leaves if leaf.group not in (None, *self.links.values())
        )
        self.groups = {
            group: [leaf.path for leaf in leaves if leaf.group == group] for group in groups
        }
        self.nets = nn.ModuleDict()
        self.element_dims = dict.fromkeys(self.groups, args.gnn_dim)
        for group, paths in self.groups.items():
            dim = sum(rows[path].dim for path in paths)
            edge_dim = rows[self.edges[group]].dim if group in self.edges else None
            if group in self.links:
                self.element_dims[self.links[group]] = 2 * args.gnn_dim + (edge_dim or 0)
            self.nets[key(group)] = (
                GNN(dim, edge_dim, args)
                if group in self.links
                else mlp([dim, args.gnn_dim, args.gnn_dim], args.activation)
            )
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
            if graph:
                elements[self.links[group]] = (
                    graph[1] if graph[1:] else x.new_zeros(graph[0].shape[1], 0)
                )
            elements[group] = self.nets[key(group)](x, *graph)
            features.append(self.pool(elements[group], obs[paths[0]].ptr))
        return torch.cat(features, 1), elements

    def observe(self, obs: Obs) -> None:
        """Adds the rows of the observations to the statistics of --norm-obs."""
        for path, leaf in obs.items():
            if key(path) in self.rows and getattr(self.rows[key(path)], "norm_obs", False):
                self.rows[key(path)].observe(leaf.values if isinstance(leaf, Ragged) else leaf)

    def pool(self, rows: Tensor, ptr: Tensor) -> Tensor:
        """[B, readout_dim]; the last column is log(1 + number of rows)."""
        num = ptr.diff()[:, None].float()
        parts = [num.log1p()]
        if self.readout in ("max", "meanmax"):
            parts.insert(0, torch.where(num > 0, segment_max(rows, ptr), 0.0))
        if self.readout != "max":
            parts.insert(
                0, segment_sum(rows, ptr) / (1 if self.readout == "sum" else num.clamp(min=1))
            )
        return torch.cat(parts, 1)


def key(path: str) -> str:
    """A module name for a leaf path: without dots, and not that of an attribute."""
    return "leaf/" + path.replace(".", "/")


# --- end shared: encoder ---


# --- shared: action heads ---
# ---- Action heads: sample, log-probability and entropy over any action space, [B, columns] ----
class Categorical:
    """One of n options; logits [B, n], mask (nonzero = allowed) [B, n] or None."""

    def __init__(self, logits: Tensor, mask: Tensor | None):
        self.log_probs = (
            logits if mask is None else torch.where(mask != 0, logits, -torch.inf)
        ).log_softmax(-1)

    mode = property(lambda self: self.best(self.log_probs))

    def best(self, score: Tensor) -> Tensor:
        return score.argmax(-1, keepdim=True)

    def sample(self) -> Tensor:  # Gumbel noise
        return self.best(self.log_probs - torch.empty_like(self.log_probs).exponential_().log())

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs.clamp(min=LOWEST)).sum(-1)


class RaggedCategorical(Categorical):
    """One of the rows of each observation; logits [rows], mask (nonzero = allowed) [rows] or
    None."""

    def __init__(self, logits: Tensor, mask: Tensor | None, rows: Ragged):
        self.ptr, self.batch = rows.ptr, rows.batch
        logits = logits if mask is None else torch.where(mask != 0, logits, -torch.inf)
        logits = logits - segment_max(logits.detach(), self.ptr)[self.batch]
        self.log_probs = logits - segment_sum(logits.exp(), self.ptr).log().index_select(
            0, self.batch
        )

    def best(self, score: Tensor) -> Tensor:
        is_best = score == segment_max(score, self.ptr)[self.batch]
        rows = torch.arange(len(score), dtype=torch.double, device=score.device)
        return (segment_max(rows * is_best, self.ptr).long() - self.ptr[:-1])[:, None]

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs[self.ptr[:-1] + action.squeeze(1)]

    def entropy(self) -> Tensor:
        return -segment_sum(self.log_probs.exp() * self.log_probs.clamp(min=LOWEST), self.ptr)


LOWEST = torch.finfo(torch.float32).min  # finite: times 0 it is 0


class Part(NamedTuple):
    """One factor of the action: `kind` is "categorical", "choice" (a row of the observation),
    "bits" or "normal"."""

    kind: str
    size: int  # options, bits or dimensions
    columns: slice  # of the action [B, columns]
    group: str | None  # whose rows a choice is one of, or those of a Sequence belong to
    mask: str | None  # path of the mask's leaf
    entries: slice  # of the mask


def parts_of(space: gym.Space, leaves: list[Leaf], head: str) -> list[Part]:
    """The factors of an action space, or of each row of a Sequence, in order. In a Dict a Discrete
    part that is named node, edge, or as a set, chooses one. UsageError for what has no rule or does
    not fit."""
    parts, column, ends, per_row = [], 0, {}, isinstance(space, spaces.Sequence)
    factors = leaves_of(space.feature_space if per_row else space, "action")
    discrete = [leaf.kind in ("discrete", "multidiscrete") for leaf in factors]
    masks = {leaf.path: leaf for leaf in leaves if leaf.path.split(".")[0] == "action_mask"}
    rows = {leaf.group: [leaf.group] for leaf in leaves if leaf.group and leaf.is_input}
    nodes, edges = (
        element_groups(leaves),
        [group for group in rows if group.endswith(".edge_links")],
    )
    names = (
        {"node": nodes, "edge": edges} | rows
        if head == "auto" and isinstance(space, spaces.Dict)
        else {}
    )
    named = [
        ok and names.get(leaf.path.removeprefix("action.")) for leaf, ok in zip(factors, discrete)
    ]
    if head == "auto":
        head = (
            "nodes"
            if per_row
            else "flat"
            if any(named) or not all(discrete)
            else "avail_actions"
            if "avail_actions" in rows
            else "nodes"
            if any(mask.group for mask in masks.values())
            else "flat"
        )
    rows |= {"nodes": nodes, "edges": edges, "flat": [None]}
    for leaf, indexed, found in zip(factors, discrete, named):
        binary = isinstance(leaf.space, spaces.MultiBinary)
        stacked = getattr(space, "stack", False) and leaf.path != "action"
        if leaf.group or stacked or not (indexed or binary or leaf.dtype.kind == "f"):
            raise UsageError(
                f"action space {space} is not supported (Discrete, MultiDiscrete, MultiBinary, float Box, "
                "Dict, Tuple and Sequence of these are)"
            )
        group, *others = found or rows.get(head) or [None, None]
        if others or (not group if per_row else group and not indexed):
            raise UsageError(
                f"--action-head {head} needs Discrete actions or a Sequence, and one graph or set, not "
                f"{space} and {[*rows]}"
            )
        kind = "categorical" if indexed else "bits" if binary else "normal"
        kind = "choice" if group and not per_row else kind
        mask = masks.get("action_mask") or masks.get(leaf.path.replace("action", "action_mask", 1))
        mask = mask if indexed and mask and bool(mask.group) == bool(group) else None
        for size in num_options(leaf).tolist() if indexed else [math.prod(leaf.shape)]:
            width = 1 if indexed else size
            num = 1 if kind == "choice" else size
            path = mask.path if mask else None
            entry = ends.get(path, 0) if mask and mask.shape else 0
            columns = slice(column, column + width)
            entries = slice(entry, entry + num)
            parts.append(Part(kind, size, columns, group, path, entries))
            column, ends[path] = columns.stop, entries.stop
    for path, mask in masks.items():
        groups = {part.group for part in parts if part.mask == path}
        if ends.get(path) != math.prod(mask.shape) or len(groups) > 1:
            raise UsageError(
                f"leaf '{path}': a mask {mask.space} does not fit {space} with --action-head {head}"
            )
    return parts


def to_env_actions(
    space: gym.Space, actions: np.ndarray | Iterator, counts: np.ndarray | None = None
) -> list:
    """Elements of `space` from actions [B, columns], or from their columns; those of Box are
    clipped. Of a Sequence from those of all rows, counts[b] in element b; without counts all are in
    one."""
    if isinstance(space, spaces.Sequence):
        each, rows = space.feature_space, iter(to_env_actions(space.feature_space, actions))
        rows = [
            tuple(next(rows) for _ in range(n))
            for n in ([len(actions)] if counts is None else counts)
        ]
        return (
            [np.array(row, each.dtype).reshape(-1, *each.shape) for row in rows]
            if space.stack
            else rows
        )
    columns = iter(actions.T) if isinstance(actions, np.ndarray) else actions
    if isinstance(space, spaces.Tuple):
        return list(zip(*[to_env_actions(child, columns) for child in space]))
    if isinstance(space, spaces.Dict):
        children = [to_env_actions(child, columns) for child in space.values()]
        return [dict(zip(space.keys(), row)) for row in zip(*children)]
    if isinstance(space, spaces.Discrete):
        return (next(columns).astype(np.int64) + space.start).tolist()
    rows = np.stack([next(columns) for _ in range(math.prod(space.shape))], 1).reshape(
        -1, *space.shape
    )
    if isinstance(space, spaces.Box):
        rows = rows.clip(space.low, space.high)
    return list(
        rows.astype(space.dtype) + (space.start if isinstance(space, spaces.MultiDiscrete) else 0)
    )


class ActionHead(nn.Module):
    """The policy's distribution over any action space, from the actor's latent [B, dim] and the
    elements' embeddings. A "choice" scores a row of key k = W e and query q = U latent with w .
    tanh(k + q) + k . q / sqrt(d): a pointer network's score and dot-product attention's (Vaswani et
    al. 2017); of an edge k = ReLU(W (ends, features)). With `autoregressive` the latent of a part
    holds those before it, choices first; the entropy is that along the action. Of a Sequence each
    row has a latent; log-probability and entropy are sums over the rows."""

    def __init__(self, space: gym.Space, leaves: list[Leaf], dim: int, dims: dict[str, int], args):
        super().__init__()
        self.parts = parts_of(space, leaves, args.action_head)
        self.per_row = self.parts[0].group if isinstance(space, spaces.Sequence) else None
        self.rows = {leaf.group: leaf.path for leaf in leaves if leaf.group}  # a leaf of each group
        self.ends = {
            g: g.removesuffix("edge_links") + "nodes" for g in dims if g.endswith(".edge_links")
        }  # of edges
        self.dtype = (
            torch.float32 if any(part.kind == "normal" for part in self.parts) else torch.int64
        )
        self.heads, self.choices, self.conditions = (nn.ModuleDict() for _ in range(3))
        self.log_stds = nn.ParameterDict()
        self.order = sorted(range(len(self.parts)), key=lambda k: self.parts[k].kind != "choice")
        for k, (kind, size, _, group, *_) in enumerate(self.parts):
            element_dim = dims.get(self.ends.get(group, group))
            width = {"choice": element_dim, "normal": size * (1 + args.state_dependent_std)}.get(
                kind, size
            )
            if kind == "normal" and not args.state_dependent_std:
                self.log_stds[str(k)] = nn.Parameter(torch.zeros(size))
            self.heads[str(k)] = layer_init(nn.Linear(dim, width), 0.01)  # nearly uniform at first
            if kind == "choice":
                score = layer_init(nn.Linear(element_dim, 1), 0.01)
                self.choices[str(k)] = nn.ModuleList([nn.Linear(dims[group], element_dim), score])
            if args.autoregressive and k != self.order[-1]:
                self.conditions[str(k)] = nn.Linear(dims[group] if kind == "choice" else size, dim)
        self.row = nn.Linear(dims[self.per_row], dim) if self.per_row else None

    def forward(
        self,
        latent: Tensor,
        elements: dict[str, Tensor],
        obs: Obs,
        action: Tensor | None = None,
        greedy: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(action [B, columns], log_prob [B], entropy [B]) of the given action, or of a sample, or
        of the mode."""
        log_prob, entropy, columns = 0.0, 0.0, [None] * len(self.parts)
        if self.per_row:
            _, ptr, batch, _ = obs[self.rows[self.per_row]]
            latent = torch.tanh(
                select_rows(latent, batch) + self.project(self.row, self.per_row, elements, obs)
            )
        for k in self.order:
            part, dist = self.parts[k], self.distribution(k, latent, elements, obs)
            sample = dist.rsample if part.kind == "normal" else dist.sample  # Normal's sample waits
            a = (
                action[:, part.columns]
                if action is not None
                else dist.mode
                if greedy
                else sample().detach()
            )
            a = a.long() if part.kind in ("categorical", "choice") else a.float()
            sums = [x.sum(1) if x.dim() > 1 else x for x in (dist.log_prob(a), dist.entropy())]
            log_prob, entropy = log_prob + sums[0], entropy + sums[1]
            columns[k] = a.to(self.dtype)
            if str(k) in self.conditions:
                latent = torch.tanh(
                    latent + self.conditions[str(k)](self.embed(part, a, elements, obs))
                )
        if self.per_row:
            log_prob, entropy = segment_sum(log_prob.double(), ptr), segment_sum(entropy, ptr)
        return torch.cat(columns, 1), log_prob, entropy

    def distribution(self, k: int, latent: Tensor, elements: dict[str, Tensor], obs: Obs):
        part, mask, out = self.parts[k], obs.get(self.parts[k].mask), self.heads[str(k)](latent)
        if mask is not None:
            mask = mask.values if part.group else mask
            mask = (mask.flatten(1) if mask.dim() > 1 else mask[:, None])[:, part.entries]
        if part.kind == "categorical":
            return Categorical(out, mask)
        if part.kind == "bits":
            return Bernoulli(logits=out, validate_args=False)
        if part.kind == "normal":
            mean, log_std = (
                (out, self.log_stds[str(k)].expand_as(out))
                if str(k) in self.log_stds
                else out.chunk(2, 1)
            )
            return Normal(mean, log_std.exp(), validate_args=False)
        rows, (project, score) = obs[self.rows[part.group]], self.choices[str(k)]
        keys, query = self.project(project, part.group, elements, obs), select_rows(out, rows.batch)
        logits = score(torch.tanh(keys + query)).squeeze(1)
        logits = logits + (keys * query).sum(1) / keys.shape[1] ** 0.5
        return RaggedCategorical(logits, None if mask is None else mask.squeeze(1), rows)

    def project(
        self, linear: nn.Linear, group: str, elements: dict[str, Tensor], obs: Obs
    ) -> Tensor:
        """`linear` of each row; of edges (source, target, features), summed, and a ReLU."""
        if group not in self.ends:
            return linear(elements[group])
        nodes, features = elements[self.ends[group]], elements[group]
        A, B, C = linear.weight.split([nodes.shape[1], nodes.shape[1], features.shape[1]], 1)
        source, target = obs[group].values.unbind(1)
        source, target = select_rows(nodes @ A.t(), source), select_rows(nodes @ B.t(), target)
        return torch.relu(source + target + features @ C.t() + linear.bias)

    def embed(self, part: Part, action: Tensor, elements: dict[str, Tensor], obs: Obs) -> Tensor:
        """What the later parts of an autoregressive action see of this one, [B, ...]."""
        if part.kind == "choice":
            row = obs[self.rows[part.group]].ptr[:-1] + action.long().squeeze(1)
            chosen = elements[part.group][row]
            if part.group in self.ends:
                ends = elements[self.ends[part.group]][obs[part.group].values[row]]
                chosen = torch.cat([ends.flatten(1), chosen], 1)
            return chosen
        if part.kind == "categorical":
            action = nn.functional.one_hot(action.long().squeeze(1), part.size)
        return action.float()

    def seen(self, action: Tensor, elements: dict[str, Tensor], obs: Obs) -> Tensor:
        """What the next steps see of an action: all parts; of a Sequence the mean over the rows."""
        seen = torch.cat(
            [self.embed(part, action[:, part.columns], elements, obs) for part in self.parts], 1
        )
        if self.per_row:
            ptr = obs[self.rows[self.per_row]].ptr
            seen = segment_sum(seen, ptr) / ptr.diff().clamp(min=1)[:, None]
        return seen


# --- end shared: action heads ---


# --- shared: ranks ---
# ---- Ranks: the processes of torchrun, each with its own environments ----
RANK, LOCAL_RANK, WORLD_SIZE = (
    int(os.environ.get(name, default))
    for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
)


def all_ranks(value: Any) -> list:
    """The value of every rank, on every rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def average_gradients(agent: nn.Module) -> None:
    """The mean of the gradients of all ranks, in one all-reduce."""
    if WORLD_SIZE > 1:
        grads = [param.grad for param in agent.parameters() if param.grad is not None]
        dist.all_reduce(flat := torch.cat([grad.flatten() for grad in grads]))
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view_as(grad) / WORLD_SIZE)


# --- end shared: ranks ---


# ---- Agent: the networks ----
class Agent(nn.Module):
    """Actor and critic: one encoder, an MLP each, and the action head."""

    def __init__(self, leaves: list[Leaf], action_space: gym.Space, args):
        super().__init__()
        self.encoder = Encoder(leaves, args)
        widths = [self.encoder.dim, *args.hidden_dims]
        self.actor = mlp(widths, args.activation)
        self.critic = mlp(widths, args.activation).append(layer_init(nn.Linear(widths[-1], 1), 1.0))
        self.head = ActionHead(action_space, leaves, widths[-1], self.encoder.element_dims, args)

    def forward(self, obs: Obs, action: Tensor | None = None, greedy: bool = False):
        """(action [B, columns], log_prob [B], entropy [B], value [B])"""
        features, elements = self.encoder(obs)
        return *self.head(self.actor(features), elements, obs, action, greedy), self.critic(
            features
        ).squeeze(1)

    def value(self, obs: Obs) -> Tensor:
        """V(observation), [B]"""
        return self.critic(self.encoder(obs)[0]).squeeze(1)


@torch.no_grad()
def play(
    agent: Agent, args, device: torch.device, makers: list[Callable[[], gym.Env]], greedy: bool
) -> list[Episode]:
    """The first episode of each environment, as it is after --eval-max-steps if it has not ended by
    then."""
    with contextlib.closing(Envs(makers, args.action_head)) as envs:
        storage, step, found = Storage(envs.leaves, device), envs.reset(args.seed + 10_000), {}
        while len(found) < len(makers) and envs.num_steps < args.eval_max_steps:
            storage.clear()
            action, *_ = agent(storage.append(step.obs), greedy=greedy)
            counts = step.obs.counts.get(agent.head.per_row)
            step = envs.step(to_env_actions(envs.action_space, action.cpu().numpy(), counts))
            for episode in step.episodes:
                found.setdefault(episode.env, episode)
        return [
            found.get(i) or Episode(i, envs.returns[i], int(envs.lengths[i]), None, {})
            for i in range(len(makers))
        ]


# ---- Collector: the process that acts ----
class Rollout(NamedTuple):
    """T steps of N environments in the order of Storage, as they travel."""

    version: int  # the number of updates that made the weights which collected
    obs: Flat  # T * N, then N to which the last actions led, then the last ones of F truncated episodes
    actions: np.ndarray  # [T * N, columns]
    log_probs: np.ndarray  # float32 [T * N]
    rewards: np.ndarray  # float32 [T, N]
    dones: np.ndarray  # float32 [T, N]
    cut: np.ndarray  # int64 [F], the steps that ended the truncated episodes
    episodes: list[
        tuple[int, Episode]
    ]  # those that ended, each with the steps of an environment up to its end


@torch.no_grad()
def collect(
    agent: Agent, envs: Any, step: Step, version: int, args, device: torch.device
) -> tuple[Rollout, Step]:
    """T steps of N environments from their last step on; also the new last step."""
    T, N, storage = args.num_steps, args.num_envs, Storage(envs.leaves, device)
    observations, actions, log_probs, episodes, cut, finals = (
        [],
        [],
        [],
        [],
        [np.zeros(0, np.int64)],
        [],
    )
    rewards, dones = np.zeros((T, N), np.float32), np.zeros((T, N), np.float32)
    for t in range(T):
        storage.clear()
        action, log_prob, *_ = agent(storage.append(step.obs))
        observations.append(step.obs)
        actions.append(action.cpu().numpy())
        log_probs.append(log_prob)
        step = envs.step(
            to_env_actions(envs.action_space, actions[t], step.obs.counts.get(agent.head.per_row))
        )
        rewards[t], dones[t] = step.reward, step.terminated | step.truncated
        episodes += [(t + 1, episode) for episode in step.episodes]
        if step.final:
            finals.append(step.final)
            cut.append(t * N + np.flatnonzero(step.truncated))
    actions, log_probs = np.concatenate(actions), torch.cat(log_probs).cpu().numpy()
    obs = join([*observations, step.obs, *finals])
    return Rollout(
        version, obs, actions, log_probs, rewards, dones, np.concatenate(cut), episodes
    ), step


def act(pipe, parent_end, makers: list[Callable[[], gym.Env]], args, seed: int) -> None:
    """The collector: answers each (version, weights) by a rollout, until None comes or the parent
    is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # what reaches the whole group is the parent's
        signal.signal(number, signal.SIG_IGN)
    parent_end.close()  # the end of the parent can be seen only if nobody else holds it
    torch.set_num_threads(1)  # batches are small, the other cores learn
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(OSError):  # the parent is gone
        try:
            device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
            workers = args.num_workers and service("utils.workers", "--num-workers")
            envs = (
                workers.WorkerEnvs(Envs, makers, args, 0)
                if workers
                else Envs(makers, args.action_head)
            )
            with contextlib.closing(envs):
                agent = Agent(envs.leaves, envs.action_space, args).to(device)
                step = envs.reset(seed)
                requests = listen(pipe, partial(os._exit, 1))
                while request := requests.get():
                    version, weights = request
                    state = agent.state_dict().values()
                    weights = to_device(weights, device).split([values.numel() for values in state])
                    for values, new in zip(state, weights):
                        values.copy_(new.view_as(values))
                    rollout, step = collect(agent, envs, step, version, args, device)
                    send(pipe, rollout)
        except (UsageError, gym.error.Error, OSError) as error:  # sentences
            send(pipe, UsageError(str(error)))
        except Exception:
            send(pipe, RuntimeError(f"in the collector: {traceback.format_exc()}"))


def send(pipe, message: Any) -> None:
    """Sends a message, its arrays beside the pickle and so without a copy."""
    buffers = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    pipe.send((data, len(buffers)))
    for buffer in buffers:
        pipe.send_bytes(buffer.raw())


def listen(pipe, at_end: Callable[[], None]) -> queue.SimpleQueue:
    """The messages of the other end, taken by a thread so that `send` never waits; None where that
    end is gone."""
    messages = queue.SimpleQueue()

    def take() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                data, num = pipe.recv()
                messages.put(
                    pickle.loads(data, buffers=[bytearray(pipe.recv_bytes()) for _ in range(num)])
                )
        at_end()
        messages.put(None)

    threading.Thread(target=take, daemon=True).start()
    return messages


class Collector:
    """The process that steps the environments, as its parent sees it. It must be forked before this
    process uses CUDA or threads of torch. Rollouts come in the order in which they were asked
    for."""

    def __init__(self, makers: list[Callable[[], gym.Env]], args, seed: int):
        with contextlib.closing(Envs(makers[:1], args.action_head)) as probe:
            self.leaves, self.action_space = probe.leaves, probe.action_space
        context = mp.get_context("fork")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=act, args=(child, self.pipe, makers, args, seed))
        self.process.start()
        child.close()
        self.rollouts = listen(self.pipe, lambda: None)

    def ask(self, version: int, agent: Agent) -> None:
        """Asks for a rollout by the weights of the agent."""
        weights = torch.cat(
            [values.flatten() for values in agent.state_dict().values()]
        )  # one copy and wait
        with contextlib.suppress(OSError):  # what happened is seen in the answer
            send(self.pipe, (version, weights.cpu().numpy()))

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
        with contextlib.suppress(OSError):
            send(self.pipe, None)
        self.process.join(timeout=5)
        self.process.kill()
        self.process.join()


# --- shared: flags ---
def check_args(args) -> None:
    """UsageError for a flag without a meaning; fills in what is computed, or --load-model's."""
    if args.load_model:
        service("utils.policy", "--load-model").take_flags(args)
    positive = "num_envs num_steps num_minibatches update_epochs gnn_layers gnn_dim eval_max_steps hidden_dims"
    others = (
        "num_workers env_timeout checkpoint_every total_timesteps eval_episodes eval_samples learning_rate "
        "target_kl max_grad_norm torch_threads"
    )
    for names, least, most in (
        (positive, 1, math.inf),
        (others, 0, math.inf),
        ("gamma gae_lambda clip_coef", 0, 1),
        ("ent_coef vf_coef", -math.inf, math.inf),
        ("seed", 0, 2**32 - 1),
    ):
        for name in names.split():
            for value in np.ravel(getattr(args, name)):
                if value is not None and (
                    not least <= value <= most or math.isinf(value) and name != "max_grad_norm"
                ):
                    raise UsageError(
                        f"--{name.replace('_', '-')} {value}: a number from {least} to {most} is needed"
                    )
    if args.gnn in ("gatv2", "transformer") and args.gnn_dim % 4:
        raise UsageError(
            f"--gnn-dim {args.gnn_dim}: the 4 heads of --gnn {args.gnn} need a multiple of 4"
        )
    if not tasks_of(args) or not all(isinstance(task, dict) for task in tasks_of(args)):
        raise UsageError(
            f"--env-kwargs {args.env_kwargs}: an object, or a list of at least one, is needed"
        )
    args.world_size, args.batch_size = WORLD_SIZE, args.num_envs * args.num_steps
    args.minibatch_size = args.batch_size // args.num_minibatches
    args.num_iterations = args.total_timesteps // (args.batch_size * WORLD_SIZE)
    if args.total_timesteps > 0 and args.num_iterations == 0:
        raise UsageError(
            f"--total-timesteps {args.total_timesteps} is less than a rollout of {args.batch_size} steps"
        )


# --- end shared: flags ---


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


def main(args: Args) -> list:
    """Trains, saves and evaluates. Returns the rows of the evaluation's table."""
    with contextlib.ExitStack() as stack:  # what is closed at the end
        return train(args, stack)


def train(args: Args, stack: contextlib.ExitStack) -> list:
    check_args(args)
    if WORLD_SIZE > 1:
        raise UsageError(
            f"{WORLD_SIZE} ranks: this script runs without torchrun, ppo_graph.py runs with it"
        )
    if args.max_lag < 0 or not args.max_rho > 0:
        raise UsageError(
            f"--max-lag {args.max_lag} --max-rho {args.max_rho}: at least 0, and more than 0, are needed"
        )
    T, N, tasks = args.num_steps, args.num_envs, tasks_of(args)
    if args.num_minibatches > T * N:
        raise UsageError(
            f"--num-minibatches {args.num_minibatches} exceeds the {T * N} steps of a rollout"
        )
    checkpoint = service("utils.checkpoint", args.resume and "--resume")
    if not checkpoint:
        print(
            f"runs alone: without cleanrl_graph {VERSION} there are no checkpoints, workers or "
            "evaluation tables"
        )
    evaluate = service(
        "utils.evaluate",
        (args.eval_suite or args.capture_video) and "--eval-suite, --capture-video",
    )
    if evaluate:
        evaluate.check(make_env, args)  # what cannot be evaluated is an error now

    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    random.seed(args.seed + RANK)
    np.random.seed(args.seed + RANK)
    torch.manual_seed(args.seed)  # for the same weights on all ranks
    torch.backends.cudnn.deterministic = args.torch_deterministic
    rng = np.random.default_rng(args.seed + RANK)
    name = (
        checkpoint.run_name(args)
        if checkpoint
        else f"{args.env_id.split(':')[-1]}__{args.exp_name}__{args.seed}__"
    )
    found = checkpoint.find(args, name) if args.resume and RANK == 0 else None
    found = found or (os.path.join(args.run_dir, f"{name}{int(1000 * time.time())}"), None, None)
    folder, _, saved = all_ranks(found)[0]
    run = stack.enter_context(checkpoint.Run(folder)) if checkpoint and RANK == 0 else None
    signals = stack.enter_context(checkpoint.noted_signals()) if checkpoint else []
    makers = [partial(make_env, args, i) for i in range(N)]
    first = saved["iteration"] if saved else 0
    seed = (
        args.seed + 1_000_003 * (first + (run.failures if run else 0))
    ) % 2**32  # a resumed run has other episodes
    collector = stack.enter_context(contextlib.closing(Collector(makers, args, seed)))
    device = torch.device(
        "cuda" if torch.cuda.is_available() and args.cuda else "cpu"
    )  # not before the fork
    agent = Agent(collector.leaves, collector.action_space, args).to(device)
    optimizer = torch.optim.Adam(
        params := list(agent.parameters()), lr=args.learning_rate, eps=1e-5, fused=True
    )
    storage, per_row = Storage(collector.leaves, device), agent.head.per_row
    if args.load_model:
        service("utils.policy", "--load-model").load_weights(agent, args)
    if saved:
        try:
            agent.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"--resume: the network of the checkpoint is not that of the flags: {error}"
            ) from None
        rng.bit_generator.state = saved["ranks"][0]["minibatches"]
        print("--resume: the environments begin new episodes", file=sys.stderr)
    global_step, start_time, recent = first * args.batch_size * WORLD_SIZE, time.time(), []
    if args.track and RANK == 0:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            save_code=True,
            config=vars(args),
            name=os.path.basename(folder),
            id=os.path.basename(folder),
            resume="allow",
        )
    if RANK == 0:
        writer = stack.enter_context(
            contextlib.closing(SummaryWriter(folder, purge_step=global_step + 1))
        )
        table = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}", global_step)
    bar = stack.enter_context(
        tqdm(total=args.total_timesteps, initial=global_step, unit_scale=True, disable=RANK > 0)
    )

    for _ in range(min(args.max_lag + 1, args.num_iterations - first)):
        collector.ask(first, agent)
    for iteration in range(first + 1, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (
                1.0 - (iteration - 1.0) / args.num_iterations
            ) * args.learning_rate
        # Collect: what the other process did with the weights after `version` updates
        storage.clear()
        version, obs, actions, behaviour, rewards, dones, cut, episodes = collector.receive()
        storage.append(obs)
        actions = to_device(actions, device)
        episodes = [(global_step + t * N, episode) for t, episode in episodes]

        # The policy has moved on meanwhile: log-probabilities and values of the present weights
        with torch.no_grad():
            columns, last = [], T * N + np.arange(N + len(cut))
            for idx in np.array_split(np.arange(T * N), args.num_minibatches):
                obs, some = storage.gather(idx), actions[idx[0] : idx[-1] + 1]
                some = actions[obs[agent.head.rows[per_row]].rows] if per_row else some
                _, log_prob, _, value = agent(obs, some)
                columns.append((log_prob, value))
            log_probs, values = map(torch.cat, zip(*columns))
            chunks = np.array_split(last, -(-len(last) // args.minibatch_size))
            next_values = torch.cat([agent.value(storage.gather(idx)) for idx in chunks])
        host = torch.cat([values, log_probs, next_values]).cpu().numpy()
        V, log_probs_now, next_value, final_values = np.split(
            host, [T * N, 2 * T * N, 2 * T * N + N]
        )
        logrho = log_probs_now - behaviour
        whole_rho = np.exp(logrho)
        rho = whole_rho.clip(max=args.max_rho).reshape(T, N)

        # Advantages A: the recursion of GAE, in which a later A counts rho times. V + rho A are the
        # targets of V-trace (Espeholt et al. 2018, eq. 1, remark 2) where rho and c have the same
        # bound. Without lag rho = 1: it is GAE
        rewards.reshape(-1)[cut] += args.gamma * final_values
        V, advantages, lastgaelam = V.reshape(T, N), np.zeros_like(rewards), 0.0
        for t in reversed(range(T)):
            delta = rewards[t] + args.gamma * next_value * (1.0 - dones[t]) - V[t]
            advantages[t] = delta + args.gamma * args.gae_lambda * (1.0 - dones[t]) * lastgaelam
            lastgaelam = rho[t] * advantages[t]
            next_value = V[t]
        returns = V + rho * advantages
        explained_var = 1 - np.var(returns - V) / max(np.var(returns), 1e-12)
        advantages, returns, rho = (
            to_device(x.reshape(-1), device) for x in (advantages, returns, rho)
        )

        # Update: the clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9), decoupled
        # (Hilton et al. 2022)
        logs = []
        for _ in range(args.update_epochs):
            for idx in np.array_split(rng.permutation(args.batch_size), args.num_minibatches):
                mb = to_device(idx, device)
                obs = storage.gather(idx)
                mb_actions = actions[obs[agent.head.rows[per_row]].rows] if per_row else actions[mb]
                _, new_log_prob, entropy, new_value = agent(obs, mb_actions)
                logratio = new_log_prob - log_probs[mb]
                ratio = logratio.exp()
                mb_advantages = advantages[mb]
                if args.norm_adv and len(idx) > 1:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (
                        mb_advantages.std() + 1e-8
                    )
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(
                    ratio, 1 - args.clip_coef, 1 + args.clip_coef
                )
                pg_loss = (rho[mb] * torch.max(pg_loss1, pg_loss2)).mean()
                v_loss = (new_value - returns[mb]) ** 2
                if args.clip_vloss:
                    v_clipped = values[mb] + torch.clamp(
                        new_value - values[mb], -args.clip_coef, args.clip_coef
                    )
                    v_loss = torch.max(v_loss, (v_clipped - returns[mb]) ** 2)
                v_loss = 0.5 * v_loss.mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                average_gradients(agent)
                grad_norm = nn.utils.clip_grad_norm_(params, args.max_grad_norm)
                optimizer.step()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
                    logs.append(
                        torch.stack(
                            [
                                v_loss,
                                pg_loss,
                                entropy_loss,
                                -logratio.mean(),
                                approx_kl,
                                clipfrac,
                                grad_norm,
                                (ratio - 1).abs().max(),
                            ]
                        )
                    )
            if args.target_kl is not None and np.mean(all_ranks(approx_kl.item())) > args.target_kl:
                break
        if args.norm_obs:  # after the update, which must see what collection saw
            agent.encoder.observe(storage.gather(np.arange(args.batch_size)))
        if iteration + args.max_lag < args.num_iterations:
            collector.ask(iteration, agent)

        # Log: the only wait for the device since the values were copied
        logs = torch.stack(logs).cpu().numpy()
        for k, name in zip(*np.nonzero(~np.isfinite(logs))):
            raise UsageError(
                f"update {iteration}, minibatch {k}: {LOGGED[name]} is {logs[k, name]}; rewards and "
                "observations are finite, so look at their size, the network and --learning-rate"
            )
        global_step = iteration * args.batch_size * WORLD_SIZE
        scalars = (
            dict(zip(LOGGED, logs[-1]))
            | storage.stats(args.batch_size)
            | {
                "losses/clipfrac": logs[:, LOGGED.index("losses/clipfrac")].mean(),
                "debug/collection_mismatch": logs[0, LOGGED.index("debug/collection_mismatch")],
                "losses/explained_variance": explained_var,
                "debug/lag": iteration - 1 - version,
                "debug/behaviour_kl": (whole_rho - 1 - logrho).mean(),
                "debug/rho_mean": whole_rho.mean(),
                "debug/rho_mismatch": abs(
                    whole_rho - 1
                ).max(),  # 0 without lag: collection and training agree
                "debug/rho_truncated": (whole_rho > args.max_rho).mean(),
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/SPS": int(
                    (iteration - first) * T * N * WORLD_SIZE / (time.time() - start_time)
                ),
            }
        )
        episodes = sum(all_ranks(episodes), [])
        if RANK == 0:
            for at, episode in episodes:
                groups = [
                    episode.group,
                    f"task_{episode.env % len(tasks)}" if len(tasks) > 1 else None,
                ]
                for suffix in ["", *(f"/{group}" for group in groups if group is not None)]:
                    writer.add_scalar(f"charts/episodic_return{suffix}", episode.ret, at)
                    writer.add_scalar(f"charts/episodic_length{suffix}", episode.length, at)
            for name, value in scalars.items():
                writer.add_scalar(name, value, global_step)
            recent = [*recent, *(episode.ret for _, episode in episodes)][-100:]
            bar.set_postfix(
                SPS=scalars["charts/SPS"], ret=f"{np.mean(recent):.4g}" if recent else "-"
            )
            bar.update(global_step - bar.n)

        # Checkpoint
        stop = max(all_ranks(max(signals, default=0)))
        due = (
            stop
            or iteration % max(args.checkpoint_every, 1) == 0
            or iteration == args.num_iterations
        )
        if checkpoint and args.checkpoint_every and due:
            writer.flush()
            ranks = [{"minibatches": rng.bit_generator.state}]
            run.save(global_step, checkpoint.state(args, iteration, agent, optimizer, ranks))
        if stop:
            raise SystemExit(128 + stop)

    bar.close()
    if RANK > 0:
        return []
    if args.save_model:
        path = os.path.join(folder, "model.pt")
        model = {"script": Args.exp_name, "args": vars(args), "model": agent.state_dict()}
        guarded(f"--save-model {path}", partial(torch.save, model, path))
    signals.append(0)  # from now on one signal is enough
    playing = partial(play, agent, args, device)
    if evaluate:
        return evaluate.evaluate(playing, make_env, args, folder, writer, global_step)
    episodes = playing(makers[:1] * args.eval_episodes, True) if args.eval_episodes else []
    print("returns of greedy episodes:", *(episode.ret for episode in episodes))
    return episodes


if __name__ == "__main__":
    folder = os.path.dirname(os.path.realpath(__file__))
    if os.path.exists(os.path.join(folder, "__init__.py")) and sys.path[0] == folder:
        sys.path[0] = os.path.dirname(folder)  # modules of the package shadow nobody's own
    sys.path.append(os.getcwd())  # where a module of one's own is looked for
    try:
        main(tyro.cli(Args))
    except (UsageError, gym.error.Error, OSError) as problem:
        sys.exit(str(problem))
