"""Part "kernels" of benchmark/gpu.sh: milliseconds of forward and backward passes by CUDA events:
cuDNN's packed LSTM against the staircase of ppo_lstm_sparse.py, the attention of ppo_gtrxl.py, the
batches of ppo_graph.py against PyG's, and bfloat16 autocast of graph networks against float32 and
TF32."""

import contextlib
import functools
import inspect
import itertools
import sys
import time
from typing import Callable

import kit
import numpy as np
import torch
import torch.nn as nn
from common import long_tailed
from kit import Row
from torch import Tensor

sys.path.insert(0, str(kit.ROOT))

T = 128  # steps of an environment in a minibatch of the LSTM


def device_of(args: kit.Args) -> torch.device:
    return torch.device("cpu" if args.dry else "cuda")


def once(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call, between two CUDA events on the device."""
    if device.type == "cpu":
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


def in_turns(
    systems: dict[str, Callable[[], object]], args: kit.Args, seconds: float = 4.0
) -> dict:
    """Name -> median milliseconds of each, in turns A B C A B C ... after two warm-up turns; or, of
    one that fails, the error. At most 30 turns, and about that many seconds."""
    ms, failed, device = {name: [] for name in systems}, {}, device_of(args)
    end, turns = time.monotonic() + seconds, 1 if args.dry else 30
    for k in range(turns + 2):
        for name in [name for name in systems if name not in failed]:
            try:
                ms[name].append(once(systems[name], device))
            except Exception as error:  # out of memory, a kernel that cannot be compiled
                first = (str(error).strip().splitlines() or [""])[0]
                failed[name] = f"{type(error).__name__}: {first[:80]}"
                torch.cuda.empty_cache()
        if k > 3 and time.monotonic() > end:
            break
    return {name: failed.get(name) or float(np.median(ms[name][2:])) for name in systems}


def backward(output: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    return torch.autograd.grad(output.float().square().mean(), parameters, allow_unused=True)


def with_backward(outputs: dict[str, Callable[[], Tensor]], parameters: list[Tensor]) -> dict:
    """Name -> a call that computes the output and the gradient of the parameters."""
    both = lambda output: backward(output(), parameters)
    return {name: functools.partial(both, output) for name, output in outputs.items()}


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference by the largest number."""
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))


def ratio(a: float | str, b: float | str) -> float | None:
    return a / b if isinstance(a, float) and isinstance(b, float) else None


# ---- LSTM ----
def run_cell_as(is_cuda: bool) -> Callable:
    """run_cell of ppo_lstm_sparse.py that takes the path of the CPU (the staircase) or of CUDA (the
    PackedSequence), whatever the device is."""
    from cleanrl_graph import ppo_lstm_sparse as script

    source = inspect.getsource(script.run_cell)
    if source.count("x.is_cuda") != 1:
        raise RuntimeError(
            "run_cell of ppo_lstm_sparse.py chooses its path in another way than this file knows"
        )
    names = dict(vars(script))
    exec(source.replace("x.is_cuda", str(is_cuda)), names)
    return names["run_cell"]


def lengths_of(kind: str, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of the sequences of num_envs x T steps: whole rollouts, episodes with a long tail (20
    steps on average), or the visits of nodes (20 nodes are seen at a step, a sequence has 6 events
    on average)."""
    if kind == "whole rollouts":
        return np.full(num_envs, T)
    if kind == "visits of nodes":
        lengths = np.minimum(rng.geometric(1 / 6, num_envs * T * 20 // 6), T)
        return lengths
    starts = long_tailed(num_envs, T, rng)
    return np.diff(np.append(np.flatnonzero(starts), num_envs * T))


def lstm(kind: str, num_envs: int, H: int, args: kit.Args, deadline: float) -> dict:
    from cleanrl_graph import ppo_lstm_sparse as script

    device, rng = device_of(args), np.random.default_rng(0)
    torch.manual_seed(0)
    lengths = lengths_of(kind, num_envs, rng)
    net, x = script.LSTM(H, H).to(device), torch.randn(int(lengths.sum()), H, device=device)
    state = torch.zeros(2, len(lengths), H, device=device)
    first = lengths.cumsum() - lengths
    # sequence s, step t -> row of x, or a row of zeros behind it
    steps = np.arange(lengths.max())[:, None]
    padded = torch.from_numpy(np.where(steps < lengths, first + steps, len(x))).to(device)
    rank = np.repeat(np.arange(len(lengths)), lengths)
    back = torch.from_numpy((np.arange(len(x)) - first[rank]) * len(lengths) + rank).to(device)

    def zero_padded() -> Tensor:
        rows = torch.cat([x, x.new_zeros(1, H)])[padded]
        return net(rows, state)[0].flatten(0, 1)[back]

    paths = {"packed, ms": run_cell_as(True), "staircase, ms": run_cell_as(False)}
    events, begin = np.arange(len(x)), np.arange(len(lengths))
    of = lambda path: path(net, x, state, events, lengths, begin)[0]
    outputs = {name: functools.partial(of, path) for name, path in paths.items()}
    outputs["zero-padded, ms"] = zero_padded
    expected, worst = None, 0.0
    for output in outputs.values():
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            found = output()
            expected = found if expected is None else expected
            worst = max(worst, difference(expected, found))
    if worst > 1e-2:
        names = ", ".join(outputs)
        raise RuntimeError(f"the outputs of {names} differ by up to {worst:.1e} of the largest")
    ms = in_turns(with_backward(outputs, list(net.parameters())), args)
    quotient = ratio(ms["staircase, ms"], ms["packed, ms"])
    sizes = {"sequences": len(lengths), "events": len(x)}
    return sizes | ms | {"staircase / packed": quotient, "largest difference": worst}


# ---- Attention ----
def attention(
    W: int, num_steps: int, num_envs: int, dim: int, args: kit.Args, deadline: float
) -> dict:
    """Through GTrXL, two layers, as Memory.minibatches of ppo_gtrxl.py calls it, with full
    memories."""
    from cleanrl_graph import ppo_gtrxl

    device, expected = device_of(args), None
    torch.manual_seed(0)
    x = torch.randn(num_steps, num_envs, dim, device=device)
    age = torch.full((num_steps, num_envs), W, device=device)
    inputs = torch.randn(2, W, num_envs, dim, device=device)

    def forward(net: torch.nn.Module) -> torch.Tensor:
        return net(x, age, net.keys_values(inputs, W))[0]

    systems, differences = {}, {}
    for bf16 in (False, True):
        torch.manual_seed(1)
        sizes = dict(dim=dim, num_layers=2, num_heads=4, memory_length=W)
        net = ppo_gtrxl.GTrXL(ppo_gtrxl.Args(**sizes, gate="none", bf16=bf16)).to(device)
        name = f"sdpa{', bf16' if bf16 else ''}"
        outputs = {f"{name}, ms": functools.partial(forward, net)}
        systems |= with_backward(outputs, list(net.parameters()))
        step = systems[f"{name}, ms"]
        try:
            with torch.no_grad():
                output = forward(net)
            expected = output if expected is None else expected
            differences[name] = difference(expected, output)
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # in_turns shows it
            print(f"attention over {W} steps, {name}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
            continue
        if time.monotonic() > deadline:
            raise kit.TimeIsUp
    return in_turns(systems, args) | {"_difference to float32": differences}


# ---- Ways to the same numbers ----
def readout(num: int, rows: int, dim: int, args: kit.Args, deadline: float) -> dict:
    """The maximum of each of `num` sets of `rows` rows on average, forward and backward."""
    device, rng = device_of(args), np.random.default_rng(0)
    counts = rng.integers(1, 2 * rows, num)
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
    return in_turns(with_backward(ways, [h]), args)


def running_sum(num: int, dim: int, args: kit.Args, deadline: float) -> dict:
    """Of double numbers down the columns, as ppo_lstm_sparse.py sums up its state."""
    x = torch.randn(num, dim, device=device_of(args)).double()
    ways = {
        "cumsum(0), ms": lambda: x.cumsum(0),
        "t().cumsum(1).t(), ms": lambda: x.t().cumsum(1).t(),
    }
    return in_turns(ways, args)


# ---- Batches of graphs ----
@functools.cache
def graphs(num: int):
    """(Envs of PoissonGraph, leaf arrays of `num` observations, the same as Data)."""
    import gymnasium as gym
    from layout import to_data

    from cleanrl_graph.ppo_graph import Envs

    env = gym.make("cleanrl_graph.envs:PoissonGraph-v0", disable_env_checker=True)
    observations = [env.reset(seed=0)[0]]
    while len(observations) < num:
        observation, _, terminated, _, _ = env.step(0)
        observations.append(env.reset()[0] if terminated else observation)
    envs = Envs([lambda: env])
    arrays = [envs.read(observation) for observation in observations]
    return envs, arrays, list(map(to_data, observations))


def batches(what: str, size: int, num: int, args: kit.Args, deadline: float) -> dict:
    from torch_geometric.data import Batch

    from cleanrl_graph.ppo_graph import Storage

    (envs, arrays, data), device = graphs(num), device_of(args)
    copied = lambda chosen: Batch.from_data_list(chosen).to(device)
    if what == "collate a step":
        flat, scratch = envs.collate(arrays[:size]), Storage(envs.leaves, device)

        def ours():
            scratch.blocks.clear()
            return scratch.append(flat)

        host = lambda: copied(data[:size])
        systems = {"ours, ms": ours, "PyG on the host, then copied, ms": host}
    else:
        stored, idx = Storage(envs.leaves, device), np.random.default_rng(0).permutation(num)[:size]
        for start in range(0, num, 64):
            stored.append(envs.collate(arrays[start : start + 64]))
        there = [graph.to(device) for graph in data]
        ours = lambda: stored.gather(idx)[0]
        systems = {
            "ours, ms": ours,
            "PyG on the device, ms": lambda: Batch.from_data_list([there[i] for i in idx]),
            "PyG on the host, then copied, ms": lambda: copied([data[i] for i in idx]),
        }
    one, two = ours(), list(systems.values())[-1]()
    nodes, links = (one[f"graph.{name}"].values for name in ("nodes", "edge_links"))
    if not torch.equal(nodes, two.x) or not torch.equal(links.T, two.edge_index):
        raise RuntimeError("the two batches differ")
    ms = in_turns(systems, args)
    best = min(value for name, value in ms.items() if name != "ours, ms")
    return ms | {"best PyG / ours": ratio(best, ms["ours, ms"])}


# ---- Precision of graph networks ----
def precision(layer: str, width: int, size: int, args: kit.Args, deadline: float) -> dict:
    """Encoder of ppo_graph.py, forward and backward. The mean is read out: torch has no gradient of
    a maximum in bfloat16."""
    from cleanrl_graph import ppo_graph
    from cleanrl_graph.services import layers

    (envs, arrays, _), device = graphs(size), device_of(args)
    torch.manual_seed(0)
    leaves = [leaf for leaf in envs.leaves]
    name, _, plain = layer.partition(", ")
    encoder = ppo_graph.Encoder(leaves, ppo_graph.Args(gnn=name, gnn_dim=width, readout="mean"))
    encoder.to(device)
    if not plain:
        for conv in encoder.nets[ppo_graph.key("graph.nodes")].convs:
            layers.accelerate(conv)
    obs = ppo_graph.Storage(leaves, device).append(envs.collate(arrays[:size]))
    parameters, before = list(encoder.parameters()), torch.get_float32_matmul_precision()

    def forward(matmul: str, bf16: bool) -> Tensor:
        torch.set_float32_matmul_precision(matmul)
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            return encoder(obs)[0]

    kinds = {"float32": ("highest", False), "TF32": ("high", False)}
    kinds["bf16 autocast"] = ("highest", True)
    try:
        outputs = {f"{x}, ms": functools.partial(forward, *kind) for x, kind in kinds.items()}
        ms = in_turns(with_backward(outputs, parameters), args)
        ran = [name for name in kinds if isinstance(ms[f"{name}, ms"], float)]
        with torch.no_grad():
            results = {name: forward(*kinds[name]).float() for name in ran}
    finally:
        torch.set_float32_matmul_precision(before)
    nodes, edges = (len(obs[path].values) for path in ("graph.nodes", "graph.edge_links"))
    exact = results.pop("float32", None)
    worst = {f"difference, {name}": difference(exact, value) for name, value in results.items()}
    return {"nodes": nodes, "edges": edges} | ms | worst


def all_rows(part: str, args: kit.Args) -> list[Row]:
    dry, rows = args.dry, []

    def add(table: str, seconds: float, key: dict, measure: Callable, *given) -> None:
        work = functools.partial(measure, *given, args)
        rows.append(Row(table, key, work, min(seconds, 2) if dry else seconds))

    kinds = ("episodes with a long tail", "visits of nodes", "whole rollouts")
    title = "LSTM over 128 steps, forward and backward"
    for H, num in [(8, 2)] if dry else [(128, 16), (128, 128), (256, 128), (256, 512)]:
        for kind in kinds if num <= 128 else (kinds[0], kinds[2]):
            key = {"sequences are": kind, "environments": num, "width": H}
            add(title, 15, key, lstm, kind, num, H)
    for steps, num, dim in [(16, 2, 64)] if dry else [(128, 16, 128), (512, 8, 128)]:
        title = f"Attention, two layers of {dim}, 4 heads, forward and backward"
        for W in (8,) if dry else (32, 128, 512, 1024, 2048, 4096):
            key = {"memory": W, "steps": steps, "environments": num}
            add(title, 30, key, attention, W, steps, num, dim)
    title = "Readout, maximum of rows of 64, forward and backward"
    for num, size in [(4, 3)] if dry else [(256, 10), (2048, 10), (256, 300), (16, 5000)]:
        add(title, 10, {"sets": num, "rows each": size}, readout, num, size, 64)
    for num in (8,) if dry else (512, 4096, 32768):
        add("Running sums of 129 double columns", 10, {"rows": num}, running_sum, num, 129)
    title = "Batches of PoissonGraph (10 nodes on average, up to 200)"
    collate, gather = "collate a step", "gather a minibatch"
    for what, sizes in ((collate, (64, 512, 4096)), (gather, (512, 2048, 8192))):
        for size in (4,) if dry else sizes:
            num = 8 if dry else 4 * size if what == gather else size
            key = {"what": what, "graphs": size, "of": num}
            add(title, 20, key, batches, what, size, num)
    names = ("gine", "gine, PyG's") if dry else ("gine", "gine, PyG's", "gin", "gatv2")
    shapes = ((8,), (4,)) if dry else ((64, 256), (512, 8192))
    for layer, width, size in itertools.product(names, *shapes):
        key = {"layer": layer, "width": width, "graphs": size}
        title = "Graph network, 3 layers, forward and backward"
        add(title, 20, key, precision, layer, width, size)
    return rows


NOTES = """Milliseconds are medians of up to 30 turns in which the systems of a row follow each
other, between two CUDA events around the call with the device idle before it, so that they hold
what the host needs for its launches. Differences are the largest by the largest number."""


def run(part: str, args: kit.Args, deadline: float) -> int:
    results = kit.Results(args, part, "Kernels on the GPU", NOTES, kit.machine(args))
    return kit.measure(results, all_rows(part, args), args, deadline)
