"""What the compiler of a GPU makes of ppo_graph_compile.py, on a machine without a GPU
(fake_gpu.py). Each case is lowered for sm_90 in a process of its own:

    PYTHONPATH=.:tests:.venv/triton python tests/unit/test_lowering.py NAME FILE

writes to the file what it was lowered to, as JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import fake_gpu
import pytest
import torch
import virtual_cuda

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UPDATE = dict(num_envs=4, num_steps=3, num_minibatches=2, update_epochs=1, total_timesteps=12)
TASKS = {
    "PoissonGraph": dict(env_id="envs:PoissonGraph-v0"),
    "JobShop": dict(env_id="envs:JobShop-v0"),
    "PairNodes": dict(env_id="envs:PairNodes-v0", autoregressive=True),
    "NodeAmount": dict(env_id="envs:NodeAmount-v0"),
    "CartPole": dict(env_id="CartPole-v1"),
}


# ---- In the process of a case ----
def lower_update(name: str) -> None:
    """Lowers what a training compiles, and goes on without: several sizes come by."""
    script = importlib.import_module("cleanrl_graph.ppo_graph_compile")
    compiled = script.compiled

    def lowered(function, *how):
        fast = compiled(function, *how)

        def call(*inputs):
            with pytest.raises(fake_gpu.Lowered):
                fast(*inputs)
            return function(*inputs)

        return call

    with mock.patch.object(script, "compiled", lowered):
        virtual_cuda.train(script, cuda=True, **UPDATE | TASKS[name])


def lower(name: str) -> dict:
    """What a case was lowered to, and seconds that it took."""
    begin = time.perf_counter()
    lower_update(name)
    middle = time.perf_counter()
    sizes = [fake_gpu.build(source) for source in fake_gpu.kernels]
    seconds = {"lowered": middle - begin, "built": time.perf_counter() - middle}
    return {"graphs": fake_gpu.graphs, "sizes": sizes, "seconds": seconds}


# ---- Tests ----
def lowered(name: str, folder: Path) -> tuple[list[fake_gpu.Graph], int]:
    """(graphs, number of kernels, all of which were built) of a case."""
    if reason := fake_gpu.reason_not():
        pytest.skip(reason)
    file = folder / "lowered.json"
    paths = [ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", ""), fake_gpu.SITE]
    changed = {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path != ""),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    how = dict(env=os.environ | changed, capture_output=True, text=True, timeout=300)
    done = subprocess.run([sys.executable, __file__, name, file], **how)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    print(f"{name}: {len(found['sizes'])} kernels; seconds: {found['seconds']}")
    assert all(found["sizes"])
    return [fake_gpu.Graph(*graph) for graph in found["graphs"]], len(found["sizes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_policy_and_loss(name, tmp_path):
    """Policy, loss and gradients are a graph each for all sizes, that CUDA graphs do not refuse. No
    input is on the CPU, as flags would be, in float64; none is written. All kernels can be
    built."""
    graphs, num_kernels = lowered(name, tmp_path)
    kinds = ("inference", "forward", "backward")
    assert graphs == [fake_gpu.Graph(kind, [], [], []) for kind in kinds]
    assert num_kernels >= (10 if name == "CartPole" else 50)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    fake_gpu.install()
    name, file = sys.argv[1:]
    Path(file).write_text(json.dumps(lower(name)))
    os._exit(0)  # PyTorch's own end asks CUDA
