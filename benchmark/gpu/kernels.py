"""Milliseconds of forward and backward passes for benchmark/gpu.sh: cuDNN's packed LSTM against the
staircase of ppo_lstm_sparse.py, the attention of ppo_gtrxl.py, ways to a maximum and to running
sums, and graph networks in bfloat16 and TF32 against float32."""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from common import long_tailed
from torch import Tensor

from cleanrl_graph import ppo_graph, ppo_gtrxl, ppo_lstm_sparse
from cleanrl_graph.services import layers

T = 128  # steps of an environment in a minibatch of the LSTM


def once(function: Callable[[], object], device: str) -> float:
    """Milliseconds of a call, between two CUDA events on the device."""
    if device == "cpu":
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def in_turns(systems: dict[str, Callable[[], object]], device: str, seconds: float = 4.0) -> dict:
    """Name -> median milliseconds of each, in turns A B C A B C ... after two warm-up turns. At
    most 30 turns, and about that many seconds."""
    rows, end = [], time.monotonic() + seconds
    for k in range(32 if device == "cuda" else 3):
        rows.append([once(function, device) for function in systems.values()])
        if k > 3 and time.monotonic() > end:
            break
    return dict(zip(systems, map(float, np.median(rows[2:], axis=0))))


def with_backward(outputs: dict[str, Callable[[], Tensor]], parameters: list[Tensor]) -> dict:
    """Name -> a call that computes the output and the gradient of the parameters."""

    def both(output: Callable[[], Tensor]) -> None:
        loss = output().float().square().mean()
        torch.autograd.grad(loss, parameters, allow_unused=True)

    return {name: functools.partial(both, output) for name, output in outputs.items()}


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference by the largest number."""
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))


# ---- LSTM ----
def run_cell_as(is_cuda: bool) -> Callable:
    """run_cell of ppo_lstm_sparse.py that takes the path of the CPU (the staircase) or of CUDA (the
    PackedSequence), whatever the device is."""
    source = inspect.getsource(ppo_lstm_sparse.run_cell)
    if source.count("x.is_cuda") != 1:
        raise RuntimeError("run_cell chooses its path in another way than this file knows")
    names = dict(vars(ppo_lstm_sparse))
    exec(source.replace("x.is_cuda", str(is_cuda)), names)
    return names["run_cell"]


def lengths_of(kind: str, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of the sequences of num_envs x T steps: whole rollouts, episodes with a long tail (20
    steps on average), or the visits of nodes (20 nodes are seen at a step, a sequence has 6 events
    on average)."""
    if kind == "whole rollouts":
        return np.full(num_envs, T)
    if kind == "visits of nodes":
        return np.minimum(rng.geometric(1 / 6, num_envs * T * 20 // 6), T)
    starts = long_tailed(num_envs, T, rng)
    return np.diff(np.append(np.flatnonzero(starts), num_envs * T))


def lstm(kind: str, num_envs: int, H: int, device: str) -> dict:
    torch.manual_seed(0)
    lengths = lengths_of(kind, num_envs, np.random.default_rng(0))
    net = ppo_lstm_sparse.LSTM(H, H).to(device)
    x = torch.randn(int(lengths.sum()), H, device=device)
    state = torch.zeros(2, len(lengths), H, device=device)  # h and c
    first = lengths.cumsum() - lengths
    # sequence s, step t -> row of x, or a row of zeros behind it
    steps = np.arange(lengths.max())[:, None]
    padded = torch.from_numpy(np.where(steps < lengths, first + steps, len(x))).to(device)
    rank = np.repeat(np.arange(len(lengths)), lengths)
    back = torch.from_numpy((np.arange(len(x)) - first[rank]) * len(lengths) + rank).to(device)

    def zero_padded() -> Tensor:
        rows = torch.cat([x, x.new_zeros(1, H)])[padded]
        return net(rows, state)[0].flatten(0, 1)[back]

    events, begin = np.arange(len(x)), np.arange(len(lengths))
    of = lambda path: path(net, x, state, events, lengths, begin)[0]
    outputs = {
        "packed, ms": functools.partial(of, run_cell_as(True)),
        "staircase, ms": functools.partial(of, run_cell_as(False)),
        "zero-padded, ms": zero_padded,
    }
    with torch.no_grad():
        packed, *others = (output() for output in outputs.values())
    worst = max(difference(packed, other) for other in others)
    if worst > 1e-2:
        raise RuntimeError(f"the outputs differ by up to {worst:.1e} of the largest")
    ms = in_turns(with_backward(outputs, list(net.parameters())), device)
    quotient = ms["staircase, ms"] / ms["packed, ms"]
    sizes = {"sequences": len(lengths), "events": len(x)}
    return sizes | ms | {"staircase / packed": quotient, "largest difference": worst}


# ---- Attention ----
def attention(W: int, num_steps: int, num_envs: int, dim: int, device: str) -> dict:
    """Through GTrXL, two layers, as Memory.minibatches of ppo_gtrxl.py calls it, with full
    memories."""
    torch.manual_seed(0)
    x = torch.randn(num_steps, num_envs, dim, device=device)
    age = torch.full((num_steps, num_envs), W, device=device)
    inputs = torch.randn(2, W, num_envs, dim, device=device)
    forward = lambda net: net(x, age, net.keys_values(inputs, W))[0]
    sizes = dict(dim=dim, num_layers=2, num_heads=4, memory_length=W)
    net = ppo_gtrxl.GTrXL(ppo_gtrxl.Args(**sizes, gate="none")).to(device)
    outputs = {"sdpa, ms": functools.partial(forward, net)}
    return in_turns(with_backward(outputs, list(net.parameters())), device)


# ---- Ways to the same numbers ----
def readout(num: int, rows: int, dim: int, device: str) -> dict:
    """The maximum of each of `num` sets of `rows` rows on average, forward and backward."""
    counts = np.random.default_rng(0).integers(1, 2 * rows, num)
    ptr = torch.from_numpy(np.append(0, counts.cumsum())).to(device)
    batch = torch.from_numpy(np.arange(num).repeat(counts)).to(device)
    h = torch.randn(len(batch), dim, device=device, requires_grad=True)
    numbers = torch.arange(len(h), device=device)

    def scatter() -> Tensor:
        index = batch[:, None].expand_as(h)
        return h.new_zeros(num, dim).scatter_reduce(0, index, h, "amax", include_self=False)

    bag = functools.partial(nn.functional.embedding_bag, mode="max", include_last_offset=True)
    reduce = functools.partial(torch.segment_reduce, offsets=ptr, axis=0, unsafe=True)
    ways = {
        "embedding_bag, ms": lambda: bag(numbers, h, ptr),
        "segment_reduce, ms": lambda: reduce(h, "max"),
        "scatter_reduce, ms": scatter,
    }
    return in_turns(with_backward(ways, [h]), device)


def running_sum(num: int, dim: int, device: str) -> dict:
    """Of double numbers down the columns, as ppo_lstm_sparse.py sums up its state."""
    x = torch.randn(num, dim, device=device).double()
    ways = {
        "cumsum(0), ms": lambda: x.cumsum(0),
        "t().cumsum(1).t(), ms": lambda: x.t().cumsum(1).t(),
    }
    return in_turns(ways, device)


# ---- Precision of graph networks ----
@functools.cache
def graphs(num: int) -> tuple:
    """(Envs of PoissonGraph, leaf arrays of `num` observations)."""
    env = gym.make("cleanrl_graph.envs:PoissonGraph-v0", disable_env_checker=True)
    observations = [env.reset(seed=0)[0]]
    while len(observations) < num:
        observation, _, terminated, _, _ = env.step(0)
        observations.append(env.reset()[0] if terminated else observation)
    envs = ppo_graph.Envs([lambda: env])
    return envs, [envs.read(observation) for observation in observations]


def precision(layer: str, width: int, size: int, device: str) -> dict:
    """Encoder of ppo_graph.py, forward and backward. The mean is read out: torch has no gradient of
    a maximum in bfloat16."""
    envs, arrays = graphs(size)
    torch.manual_seed(0)
    name, _, plain = layer.partition(", ")
    args = ppo_graph.Args(gnn=name, gnn_dim=width)
    encoder = ppo_graph.Encoder(list(envs.leaves), args).to(device)
    if not plain:
        layers.accelerate(encoder)
    obs = ppo_graph.Storage(list(envs.leaves), torch.device(device)).append(envs.collate(arrays))
    before = torch.get_float32_matmul_precision()

    def forward(matmul: str, bf16: bool) -> Tensor:
        torch.set_float32_matmul_precision(matmul)
        with torch.autocast(device, torch.bfloat16) if bf16 else contextlib.nullcontext():
            return encoder(obs)[1]["graph.nodes"].values  # a maximum has no gradient in bfloat16

    kinds = {"float32": ("highest", False), "TF32": ("high", False)}
    kinds["bf16 autocast"] = ("highest", True)
    outputs = {f"{name}, ms": functools.partial(forward, *kind) for name, kind in kinds.items()}
    try:
        ms = in_turns(with_backward(outputs, list(encoder.parameters())), device)
        with torch.no_grad():
            exact, tf32, bf16 = (forward(*kind).float() for kind in kinds.values())
    finally:
        torch.set_float32_matmul_precision(before)
    nodes, edges = (len(obs[path].values) for path in ("graph.nodes", "graph.edge_links"))
    worst = {"difference, TF32": difference(exact, tf32)}
    worst["difference, bf16 autocast"] = difference(exact, bf16)
    return {"nodes": nodes, "edges": edges} | ms | worst
