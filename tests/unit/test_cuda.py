"""On a CUDA device everything is as on the CPU."""

import importlib
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    mismatch,
    run,
    stored,
    weights,
)
from processes import SCRIPTS, SMALL, begun_earlier, folder_of, train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact():
    """No TF32, whose 10 bits would hide errors behind rounding."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    "flags",
    [
        {"env_id": "envs:PairNodes-v0", "autoregressive": True},
        {"env_id": "Random-v0", "env_kwargs": {"observation": "mixed", "action": "mixed"}},
        {"env_id": "envs:GraphExplore-v0", "num_workers": 2, "norm_obs": True},
    ],
    ids=lambda flags: flags["env_id"],
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_main_on_cuda(name, flags, tmp_path):
    """Two updates and the evaluation: collection and training agree within 1e-4."""
    flags = SMALL.get(name, {}) | flags | dict(cuda=True, eval_episodes=2, save_model=True)
    result = run(tmp_path, importlib.import_module(f"cleanrl_graph.{name}"), **flags)
    assert len(result.scalars["debug/collection_mismatch"]) == 2 and mismatch(result) < 1e-4
    for tag, values in result.scalars.items():
        assert all(np.isfinite(value) for _, value in values), tag
    assert all(value.isfinite().all() for value in weights(result.folder).values())


@pytest.mark.parametrize("resumed_on", ["cuda", "cpu"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_resume_on_cuda(name, resumed_on, tmp_path):
    """A checkpoint of a run on the device is gone on from there, or on the CPU: memory, optimiser
    and random state are on it, and on the device the weights end close to those of a run without
    the stop (sums have no fixed order)."""
    flags = dict(env_id="envs:Recall-v0", env_kwargs={"length": 4}, total_timesteps=96)
    flags |= dict(norm_obs=True)
    whole = train(tmp_path / "a", name, cuda=True, **flags)
    train(tmp_path / "b", name, cuda=True, **flags)
    for path in (*tmp_path.glob("b/*/model.pt"), *tmp_path.glob("b/*/checkpoint_*96.ckpt")):
        path.unlink()
    begun_earlier(tmp_path / "b")
    train(tmp_path / "b", name, resume="auto", cuda=resumed_on == "cuda", **flags)
    load = partial(torch.load, map_location="cpu", weights_only=True)
    folders = whole, folder_of(tmp_path / "b")
    one, two = (load(folder / "model.pt")["model"] for folder in folders)
    assert list(one) == list(two)
    for name, value in one.items():
        assert two[name].isfinite().all()
        assert resumed_on == "cpu" or torch.allclose(value, two[name], atol=1e-3, rtol=1e-3), name


def test_pinned_memory_is_not_overwritten():
    """Steps that follow each other at once do not disturb the copies that are still under way."""
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 1, (256, 256), np.float32)
    data = [[rng.random((256, 256), np.float32) for _ in range(4)] for _ in range(30)]
    storage, _ = stored(space, data, "cuda")
    for t, row in enumerate(data):
        values = storage.gather(np.arange(4 * t, 4 * t + 4))[0]["obs"].values.cpu().numpy()
        assert np.array_equal(values, np.stack(row))


def test_a_model_moves_between_devices(tmp_path):
    """A model saved on the device is loaded on the CPU."""
    env = {"env_id": "envs:BestOfSet-v0"}
    first = run(tmp_path / "a", cuda=True, save_model=True, **env).folder
    more = dict(load_model=str(first / "model.pt"), save_model=True, learning_rate=0.0)
    second = run(tmp_path / "b", **env | more).folder
    saved = torch.load(first / "model.pt", weights_only=True, map_location="cpu")["model"]
    assert all(torch.equal(saved[name], value) for name, value in weights(second).items())
