"""A CUDA device without a GPU: tensors that are on cuda:0 for PyTorch, with their memory on the
host.

`install()` once per process, in a process of its own, before the first tensor on the device. Then
every operation of PyTorch on the device is computed on the CPU, so that results can be compared
with those of a CPU run, and `log` holds what a GPU would have been told. Devices, `.is_cuda`,
`Module.to`, the refusal of `.numpy()`, autograd's thread per device and the fused Adam are
PyTorch's own.

It finds tensors of two devices in one operation, operations without a CUDA kernel, waits of the
host with their lines, and pinned memory that is written or read while a copy is under way. It
cannot find errors of CUDA's kernels, TF32, atomics, CUDA's random numbers, memory limits, real
time, several streams, NCCL, torch.compile."""

import contextlib
import copy
import ctypes
import hashlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # before anything is patched
import torchgen
from helpers import Writer, accelerated
from minis import execute
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from cleanrl_graph.services import arguments, command

HERE = Path(__file__).parent
SOURCE = HERE / "virtual_cuda.cpp"
BUILD = HERE.parent / ".pytest_cache" / "virtual_cuda"  # which git ignores
PROJECT = re.compile(r"/cleanrl_graph/(services/|envs/)?\w+\.py$|/test_\w+\.py$")
CPU, CUDA = 1, 2  # DLPack's numbers
HOST = torch.device("cpu")
aten = torch.ops.aten
NO_LAUNCH = set("empty empty_strided resize_ set_ _local_scalar_dense _fused_sdp_choice".split())
WAITS = set(  # need a number from the device
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive equal "
    "_assert_scalar bincount histc multinomial".split()
)
INDEXING = set(
    "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split()
)
TAKES_SCALARS = set(  # of no dimension, from the host; so do all elementwise ones
    "fill_ masked_fill masked_fill_ where index_fill index_fill_ index_put_ "
    "_index_put_impl_".split()
)


class Log:
    """What the device was told, each as a Counter: `waits` of the host and `copies` by (kind, lines
    of the script), `bytes` copied to the device likewise, `launches` by operation, `races` by a
    sentence."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.waits, self.copies, self.bytes = Counter(), Counter(), Counter()
        self.launches, self.races = Counter(), Counter()
        # under way: (begin, end, bytes when it began, line, the memory's owner)
        self.to_device = []
        self.to_host = []  # under way: functions that complete them

    def copy(self, kind: str) -> None:
        self.copies[kind, where()] += 1

    def wait(self, kind: str) -> None:
        """The host waits for all that it has launched. What was copied must still be what it
        was."""
        self.waits[kind, where()] += 1
        for begin, end, content, line, _ in self.to_device:
            if ctypes.string_at(begin, end - begin) != content:
                race = "pinned memory was written before its copy was waited for at"
                self.races[f"{line}: {race} {where()}"] += 1
        for complete in self.to_host:
            complete()
        self.to_device, self.to_host = [], []


log = Log()


def where() -> str:
    """The innermost lines of the scripts or of tests, up to three."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        code = frame.f_code
        if PROJECT.search(code.co_filename):
            lines.append(f"{Path(code.co_filename).stem}.py:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(lines) or "autograd"


# ---- Memory ----
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def alias(device: int, t: Tensor) -> Tensor:
    """The same memory as a tensor of the other device: DLPack with another name on it."""
    capsule = torch._C._to_dlpack(t.detach() if t.requires_grad else t)
    place = (ctypes.c_int32 * 2).from_address(pointer(capsule, b"dltensor") + 8)
    place[0], place[1] = device, 0
    return torch._C._from_dlpack(capsule)


on_device = partial(alias, CUDA)


def on_host(t: Tensor) -> Tensor:
    if t.numel():
        return alias(CPU, t)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)  # can be resized


# ---- Operations ----
def tree(function, value):
    """The value, or list of values, with `function` of each tensor and device."""
    if isinstance(value, (Tensor, torch.device)):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([tree(function, v) for v in value])
    return value


@cache
def facts(op) -> tuple[str, bool, bool]:
    """(name, whether numbers may come from the host, whether it is a kernel and not a view)."""
    name = op._schema.name.removeprefix("aten::")
    infos = [r.alias_info for r in op._schema.returns]
    is_view = any(info is not None and not info.is_write for info in infos)
    takes_scalars = torch.Tag.pointwise in op.tags or name in TAKES_SCALARS
    return name, takes_scalars, not is_view and name not in NO_LAUNCH


def run(op, *args, **kwargs):
    """An operation of which an argument is on the device."""
    if op in cpu_only:
        raise NotImplementedError(f"{op} has no CUDA kernel ({where()})")
    (name, takes_scalars, is_kernel), tensors, strangers = facts(op), {}, []

    def lower(value):
        if not isinstance(value, Tensor):
            return HOST
        if not value.is_cuda:
            if value.dim() > 0 or not takes_scalars:
                strangers.append(value)
            return value
        host = on_host(value)
        tensors[id(host)] = value, host
        return host

    low, low_kwargs = [tree(lower, v) for v in args], {k: tree(lower, v) for k, v in kwargs.items()}
    for i, argument in enumerate(op._schema.arguments[: len(low)]):
        if isinstance(low[i], (int, float)) and argument.type.kind() == "TensorType":
            low[i] = torch.tensor(low[i])  # PyTorch handed over the number of `t % 2` as it is
    if strangers and tensors:
        if name not in INDEXING or not args[0].is_cuda:
            raise RuntimeError(f"Expected all tensors to be on the same device: {op} at {where()}")
        log.wait("index from the host")  # which PyTorch copies, and waits
    with torch._C._AutoDispatchBelowAutograd():
        out = op(*low, **low_kwargs)
    if is_kernel:
        log.launches[str(op)] += 1
    if waits(name, low, low_kwargs):
        log.wait(name)
    for value, host in tensors.values():
        if host.shape != value.shape:  # out=
            value.data = on_device(host)

    upper = lambda value: tensors[id(value)][0] if id(value) in tensors else on_device(value)
    return tree(upper, out)


def waits(name: str, args: list, kwargs: dict) -> bool:
    """Whether the host waits for the device in an operation."""
    if name in INDEXING:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "normal":  # of a tensor of standard deviations, it looks whether all are positive
        return isinstance(args[1], Tensor)
    return name in WAITS or name == "repeat_interleave" and kwargs.get("output_size") is None


def copy_(op, self, src, non_blocking=False):
    """The only operation that takes tensors of two devices."""
    to, source = (on_host(t) if t.is_cuda else t for t in (self, src))
    if self.is_cuda and src.is_cuda:
        log.launches["aten.copy_"] += 1
    elif self.is_cuda and self.numel():
        if src.dtype != self.dtype or not (src.is_contiguous() and self.is_contiguous()):
            log.launches["aten.copy_"] += 1
        kind = "to the device, pinned" if src.is_pinned() else "to the device, pageable"
        log.copy(kind)
        log.bytes[kind, where()] += src.nbytes
        if not non_blocking:
            log.wait("copy to the device")
        elif src.is_pinned():
            under_way(src)
    elif self.numel():
        log.copy("to the host")
        if not non_blocking:
            log.wait("copy to the host")
        else:  # until somebody waits there is something else
            log.to_host.append(partial(to.copy_, source.clone()))
            source = torch.full_like(to, True if to.dtype == torch.bool else 99)
    with torch._C._AutoDispatchBelowAutograd():
        to.copy_(source)
    return self


def under_way(src: Tensor) -> None:
    """Notes a copy from pinned memory to the device that nobody waits for."""
    memory = src.untyped_storage()
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    for other, other_end, _, line, _ in log.to_device:
        if begin < other_end and other < end:
            race = f"{where()}: pinned memory is used again while it is copied since {line}"
            log.races[race] += 1
    log.to_device.append((begin, end, ctypes.string_at(begin, end - begin), where(), memory))


class Recurrent(torch.autograd.Function):
    """An LSTM or GRU of cuDNN: autograd on the CPU inside. `batch_sizes` of a PackedSequence are on
    the CPU, as cuDNN has it."""

    @staticmethod
    def forward(ctx, op, num_states, batch_sizes, rest, *tensors):
        if any(not t.is_cuda for t in tensors) or any(b.is_cuda for b in batch_sizes):
            sentence = "input, state and weights are needed on the device, batch_sizes not"
            raise RuntimeError(f"LSTM or GRU: {sentence}: {where()}")
        log.launches["cudnn_rnn"] += 1
        needs = ctx.needs_input_grad[4:]
        ctx.low = [on_host(t).requires_grad_(need) for t, need in zip(tensors, needs)]
        x, hx, weights = ctx.low[0], ctx.low[1 : 1 + num_states], ctx.low[1 + num_states :]
        state = hx if num_states == 2 else hx[0]
        with torch.enable_grad():
            ctx.out = op(x, *batch_sizes, state, weights, *rest)
        return tuple(on_device(t) for t in ctx.out)

    @staticmethod
    def backward(ctx, *grads):
        log.launches["cudnn_rnn_backward"] += 2  # of the data, of the weights
        needed = [t for t in ctx.low if t.requires_grad]
        pairs = zip(ctx.out, grads)
        out, grads = zip(*[(o, on_host(g)) for o, g in pairs if o.requires_grad and g is not None])
        found = iter(torch.autograd.grad(out, needed, grads, allow_unused=True))
        found = [next(found) if t.requires_grad else None for t in ctx.low]
        return None, None, None, None, *(None if g is None else on_device(g) for g in found)


RECURRENT = {
    "lstm.input": lambda x, hx, weights, *rest: Recurrent.apply(
        aten.lstm.input, len(hx), [], rest, x, *hx, *weights
    ),
    "lstm.data": lambda x, batch_sizes, hx, weights, *rest: Recurrent.apply(
        aten.lstm.data, len(hx), [batch_sizes], rest, x, *hx, *weights
    ),
    "gru.input": lambda x, hx, weights, *rest: Recurrent.apply(
        aten.gru.input, 1, [], rest, x, hx, *weights
    ),
    "gru.data": lambda x, batch_sizes, hx, weights, *rest: Recurrent.apply(
        aten.gru.data, 1, [batch_sizes], rest, x, hx, *weights
    ),
}


def kernels() -> tuple[list, set]:
    """(operations with a kernel for CUDA that are composed of others elsewhere, those that CUDA has
    no kernel for), of PyTorch's own list."""
    native = Path(torchgen.__file__).parent / "packaged/ATen/native"
    text, own, lacking = (native / "native_functions.yaml").read_text(), [], set()
    for block in re.split(r"\n(?=- func: )", text):
        head = re.match(r"- func: (\w+)(?:\.(\w+))?\(", block)
        op = head and getattr(getattr(aten, head[1], None), head[2] or "default", None)
        if op is None or head[1] in ("copy_", "record_stream"):
            continue
        if "structured_delegate" in block:  # else it would be two: to make the result, to fill it
            own.append(op)
            continue
        lines = re.findall(r"^    ([\w, ]+): \w+", block, re.M)
        keys = {key.strip() for line in lines for key in line.split(",")}
        composite = any(key.startswith("Composite") for key in keys)
        if "CUDA" in keys and composite:
            own.append(op)
        elif "CPU" in keys and "CUDA" not in keys and not composite:
            lacking.add(op)
    return own, lacking


# ---- Installation ----
libraries, cpu_only = [], set()


def reason_not() -> str | None:
    """Why there cannot be such a device here, None if it can be built."""
    if torch.version.cuda or torch.version.hip or torch.cuda.is_available():
        return "PyTorch was built for GPUs: its own CUDA device would be in the way"
    if not compiler():
        return "there is no C++ compiler"
    try:
        build()
    except subprocess.CalledProcessError as error:
        return f"it does not build with torch {torch.__version__}: {error.stderr.strip()[-300:]}"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build() -> Path:
    """The library of virtual_cuda.cpp, made once for each version of PyTorch."""
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = BUILD / f"{torch.__version__}-{source}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        call = [compiler(), *"-shared -fPIC -std=c++20 -O1".split(), SOURCE, "-o", unfinished]
        call += [f"-I{path}" for path in include_paths()]
        call += [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu"]
        subprocess.run(call, check=True, capture_output=True, text=True)
        unfinished.replace(library)
    return library


def install() -> None:
    """Makes the device."""
    ctypes.CDLL(str(build())).install()
    own, lacking = kernels()
    cpu_only.update(lacking)
    everything, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    libraries.extend([everything, library])
    everything.fallback(run, "CUDA")
    library.impl("copy_", partial(copy_, aten.copy_.default), "CUDA")
    for op in own:
        library.impl(op, partial(run, op), "CUDA")
    # the one that is composed of other operations
    library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "CUDA")
    for name, function in RECURRENT.items():
        library.impl(name, function, "AutogradCUDA")

    # What of PyTorch's Python asks a CUDA build
    cuda, storage = torch.cuda, torch.UntypedStorage
    cuda._lazy_init = lambda: None
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.set_device, cuda.synchronize = lambda *args: None, lambda *args: log.wait("synchronize")
    cuda.default_generators = (torch.default_generator,)
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state_all = lambda states: None
    deepcopy, load, to_cpu = Tensor.__deepcopy__, torch.load, storage.cpu

    def deepcopy_(self, memo):
        if not self.is_cuda:
            return deepcopy(self, memo)
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def storage_to_cpu(self):
        if self.device.type == "cpu":
            return to_cpu(self)
        log.wait("copy to the host")
        num = self.nbytes()
        return torch.UntypedStorage(list(ctypes.string_at(self.data_ptr(), num)) if num else 0)

    def load_(*args, map_location=None, **kwargs):
        def move(value):
            if isinstance(value, dict):
                return type(value)((k, move(v)) for k, v in value.items())
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                return type(value)(map(move, value))
            return value.to(map_location) if isinstance(value, Tensor) else value

        loaded = load(*args, map_location="cpu", **kwargs)
        is_moved = map_location is not None and torch.device(map_location).type == "cuda"
        return move(loaded) if is_moved else loaded

    Tensor.__deepcopy__, torch.load, storage.cpu = deepcopy_, load_, storage_to_cpu


# ---- Runs of a script ----


def train(script, **flags) -> tuple[dict[int, dict[str, float]], dict]:
    """(step -> tag -> value of all that the script's training logs, what the device was told
    meanwhile). Environments are checked, layers are the faster ones; there are no checkpoints.
    "collector" is what ppo_graph_async.py's second process told its device, None without one. A
    script without a function `train`, one of the short ones, runs as a command."""
    log.clear()
    logged, told = {}, None
    if not hasattr(script, "train"):
        run_as_command(script, logged, **flags)
        return logged, copy.deepcopy(vars(log)) | {"collector": None}
    args = arguments.args_of(script, **flags)
    changed = {"SummaryWriter": lambda *args, **kwargs: Writer(logged)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if hasattr(script, "Collector"):
            collect = script.run_collector

            def collecting(*args):
                log.clear()
                collect(*args)
                Path(folder, "log").write_bytes(pickle.dumps(vars(log)))

            changed["run_collector"] = collecting
        for name, value in changed.items():
            stack.enter_context(mock.patch.object(script, name, value))
        for stream in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(stream(io.StringIO()))
        with contextlib.closing(command.envs_of(script, args)) as envs:
            script.train(args, accelerated(script.Run)(args), envs)
        if "run_collector" in changed:
            told = pickle.loads(Path(folder, "log").read_bytes())
    return logged, copy.deepcopy(vars(log)) | {"collector": told}


def run_as_command(script, logged: dict, **flags) -> None:
    def writer(folder):
        os.makedirs(folder)  # where the weights go
        return Writer(logged)

    patch = mock.patch("torch.utils.tensorboard.SummaryWriter", writer)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), patch:
        execute(script, **flags)


def rates(
    script, steps=(5, 8), minibatches=(1, 2), updates=(2, 3), epochs=1, **flags
) -> dict[str, dict]:
    """What the device is told per "step" of the policy, per "minibatch" and otherwise per "update":
    "waits", "copies" and "launches", each a Counter. By differences: of runs that are longer by
    some steps of a rollout, by some minibatches of an epoch, by some updates. "collector waits" ...
    are those of ppo_graph_async.py's second process."""

    def told(num_steps, num_minibatches, num_updates):
        size = {"num_steps": num_steps, "num_minibatches": num_minibatches, "update_epochs": epochs}
        total = flags["num_envs"] * num_steps * num_updates
        device = train(script, **flags | size | {"total_timesteps": total}, cuda=True)[1]
        found = {kind: device[kind] for kind in ("waits", "copies", "launches")}
        if device["collector"]:
            found |= {f"collector {kind}": device["collector"][kind] for kind in found}
        return found

    sizes = [steps, minibatches, updates]
    first = [size[0] for size in sizes]
    base = told(*first)
    longer = [told(*first[:k], sizes[k][1], *first[k + 1 :]) for k in range(3)]
    num_minibatches = updates[0] * epochs * (minibatches[1] - minibatches[0])
    units = updates[0] * (steps[1] - steps[0]), num_minibatches, updates[1] - updates[0]
    found = {"step": {}, "minibatch": {}, "update": {}}
    for kind, counts in base.items():
        for rate, more, num in zip(found.values(), longer, units):
            keys = counts | more[kind]
            rate[kind] = Counter({key: (more[kind][key] - counts[key]) / num for key in keys})
        step, minibatch, update = (rate[kind] for rate in found.values())
        for key in update:  # of one more update all but its steps and minibatches
            update[key] -= steps[0] * step[key] + epochs * minibatches[0] * minibatch[key]
        for rate in found.values():
            rate[kind] = Counter({key: n for key, n in rate[kind].items() if abs(n) > 1e-9})
    return found
