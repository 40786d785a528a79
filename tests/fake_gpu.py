"""Inductor for a GPU that is not there: it lowers for an H100 (sm_90), and Triton builds the
kernels, on a machine without CUDA. The device is that of virtual_cuda.py; nothing that was lowered
runs.

`install()` once per process, in a process of its own that has SITE on its path. A function by
torch.compile then leaves what it was lowered to in `graphs` and `kernels`, and raises Lowered.

It finds what Inductor or Triton cannot compile, and what CUDA graphs refuse before they capture. It
cannot find wrong results, what a capture itself refuses, or how fast anything is."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import virtual_cuda
from torch import Tensor

# Triton's folder. Among the other packages torch would find it, and do other things on the CPU
SITE = Path(sys.prefix) / "triton"
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132
)  # what Inductor asks


class Graph(NamedTuple):
    """What CUDA graphs would capture."""

    kind: str  # inference, forward or backward
    refusals: list[str]  # why they would not
    on_host: list[str]  # of the inputs on the CPU, dtype and shape
    mutated: list[int]  # numbers of the inputs that are written


graphs: list[Graph] = []
kernels: dict[str, str] = {}  # Triton's source -> name of the kernel


class Lowered(Exception):
    """Comes instead of a run."""


class Driver:
    """What Triton asks a GPU's driver while it builds."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def reason_not() -> str | None:
    """Why nothing can be lowered here, None if it can."""
    if PathFinder.find_spec("triton", [*sys.path, str(SITE)]) is None:
        file = "benchmark/gpu/requirements-lowering.txt"
        return f"needs Triton: pip install --no-deps --target {SITE} -r {file}"
    return virtual_cuda.reason_not()


def install() -> None:
    """Makes the device."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor import async_compile, output_code
    from torch._subclasses import FakeTensorMode
    from triton.backends import Backend, backends

    virtual_cuda.install()
    backends["nvidia"] = Backend(backends["nvidia"].compiler, Driver)
    cuda, C = torch.cuda, torch._C
    cuda._get_device_properties = lambda index: H100
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda._exchange_device = lambda index: 0
    cuda._maybe_exchange_device = lambda index: 0  # a function of its own: dynamo has a table
    torch.version.cuda = "13.0"
    C._cuda_getCurrentRawStream = lambda index: 0
    C._cuda_cudaCachingAllocator_is_enabled = lambda: True
    FakeTensorMode.avoid_device_init = True  # torch.tensor(1.0, device="cuda") would be a real one

    functorch.force_non_lazy_backward_lowering = True  # with the forward
    inductor.compile_threads = 1
    inductor.force_disable_caches = True
    inductor.shape_padding = False  # it would measure which shapes are faster
    inductor.use_static_triton_launcher = False
    async_compile.AsyncCompile.triton = keep_kernel
    output_code.CompiledFxGraph.post_compile = keep_graph
    output_code.CompiledFxGraph.__call__ = stop


def keep_kernel(self, name: str, source: str, device_str: str = "cuda") -> None:
    """Takes the place of the build, which can come later."""
    kernels[source] = name


def keep_graph(self, inputs: list, constants: object, how: dict) -> None:
    """Takes the place of the capture."""
    torch._inductor.output_code.set_tracing_context_output_strides(inputs, self)
    refusals = [self.disabled_cudagraphs_reason] if self.disabled_cudagraphs_reason else []
    if self.cudagraph_info:  # None if no capture was asked for, or none is possible
        refusals += self.cudagraph_info.cudagraph_fail_reasons
    kind = "backward" if how["is_backward"] else "inference" if how["is_inference"] else "forward"
    host = [x for x in inputs if isinstance(x, Tensor) and not x.is_cuda]
    on_host = [f"{x.dtype} {list(x.shape)}" for x in host]
    graphs.append(Graph(kind, refusals, on_host, list(self.mutated_input_idxs)))


def stop(self, inputs: list) -> None:
    raise Lowered


def build(source: str) -> int:
    """Bytes of machine code of a kernel, in the first of its configurations."""
    module = torch._inductor.codecache.PyCodeCache.load(source)
    kernel = getattr(module, kernels[source])
    return len(kernel._precompile_config(kernel.configs[0]).kernel.asm["cubin"])
