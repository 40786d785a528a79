"""On a CUDA device everything is as on the CPU."""

import importlib

import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, sample, small_args, stored

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def exact():
    """No TF32, whose 10 bits would hide errors behind rounding."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def observations(kind, num_steps=6, num_envs=4):
    rng = np.random.default_rng(0)
    size = lambda rng: rng.choice([0, 1, 4, 60])
    return [[sample(OBSERVATIONS[kind], rng, size) for _ in range(num_envs)] for _ in range(num_steps)]


def on_cpu(obs):
    return {path: ppo_graph.Ragged(*(part.cpu() for part in leaf)) if isinstance(leaf, ppo_graph.Ragged) else leaf.cpu()
            for path, leaf in obs.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for path in a:
        for x, y in zip(a[path], b[path]):
            assert x.dtype == y.dtype and torch.equal(x, y), path


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_storage_and_agent(kind):
    """G4: the same batches through the pinned buffer; actions, log-probabilities and values agree within 1e-4."""
    data = observations(kind)
    (host, leaves), (device, _) = (stored(OBSERVATIONS[kind], data, name) for name in ("cpu", "cuda"))
    idx = np.random.default_rng(1).integers(host.size, size=30)
    assert_equal(host.latest(), on_cpu(device.latest()))
    assert_equal(host.gather(idx), on_cpu(device.gather(idx)))
    assert all(values.is_cuda for values in device.values) and host.stats() == device.stats()

    agent = ppo_graph.Agent(leaves, spaces.MultiDiscrete([3, 4]), small_args(autoregressive=True))
    action, *expected = agent(host.gather(idx), greedy=True)
    agent.to("cuda")
    _, *result = agent(device.gather(idx), action.cuda())
    for x, y in zip(expected, result):
        torch.testing.assert_close(x, y.cpu(), atol=1e-4, rtol=1e-4)


def test_a_staging_buffer_is_not_overwritten():
    """G4: steps that follow each other at once do not disturb the copies that are still under way."""
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 1, (256, 256), np.float32)
    data = [[rng.random((256, 256), np.float32) for _ in range(4)] for _ in range(30)]
    storage, _ = stored(space, data, "cuda")
    for t, row in enumerate(data):
        values = storage.gather(np.arange(4 * t, 4 * t + 4))["obs"].cpu().numpy()
        assert np.array_equal(values, np.stack(row))


@pytest.mark.parametrize("flags", [
    {"env_id": "envs:PoissonGraph-v0"},
    {"env_id": "envs:PoissonGraph-v0", "num_workers": 2},
    {"env_id": "envs:PairNodes-v0", "autoregressive": True},
    {"env_id": "envs:BestOfSet-v0", "env_kwargs": {"key": "avail_actions"}},
    {"env_id": "envs:JobShop-v0", "env_kwargs": {"jobs": 3, "machines": 3}},
    {"env_id": "Random-v0", "env_kwargs": {"observation": "mixed", "action": "mixed"}},
], ids=lambda flags: "-".join(str(value) for value in flags.values() if not isinstance(value, dict)))
def test_main_on_cuda(tmp_path, monkeypatch, flags):
    """X2: two updates and the evaluation run on the device, where collection and training agree within 1e-4."""
    logged = []
    monkeypatch.setattr(ppo_graph.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    ppo_graph.main(small_args(run_dir=str(tmp_path), cuda=True, eval_episodes=2, save_model=True, **flags))
    assert len(logged) == 2 and all(scalars["debug/collection_mismatch"] < 1e-4 for scalars in logged)
    assert all(np.isfinite(value) for scalars in logged for name, value in scalars.items() if "explained" not in name)
    (path,) = tmp_path.glob("*/model.pt")
    weights = torch.load(path, weights_only=True, map_location="cpu")["model"]
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_a_model_moves_between_devices(tmp_path):
    """A model saved on the device is loaded on the CPU."""
    env = {"env_id": "envs:BestOfSet-v0"}
    ppo_graph.main(small_args(run_dir=str(tmp_path / "a"), cuda=True, save_model=True, **env))
    (path,) = tmp_path.glob("a/*/model.pt")
    again = small_args(run_dir=str(tmp_path / "b"), load_model=str(path), save_model=True, total_timesteps=0, **env)
    ppo_graph.main(again)
    (again,) = tmp_path.glob("b/*/model.pt")
    first, second = (torch.load(p, weights_only=True, map_location="cpu")["model"] for p in (path, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("flags", [
    {"compile": "default"}, {"compile": "reduce-overhead"}, {"num_workers": 2, "double_buffer": True, "num_envs": 4},
], ids=str)
@pytest.mark.parametrize("name", ["ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl"])
def test_other_ways_on_cuda(tmp_path, monkeypatch, name, flags):
    """X4, S2: compiled, captured and in halves, collection and training agree within 1e-4 on the device."""
    script, logged = importlib.import_module(name), []
    monkeypatch.setattr(script.Logger, "update", lambda self, num, scalars: logged.append(scalars))
    flags = {"env_id": "Random-v0", "env_kwargs": {"observation": "graph_edges"}, "total_timesteps": 96} | flags
    script.main(small_args(script, run_dir=str(tmp_path), cuda=True, **flags))
    assert len(logged) >= 3 and all(scalars["debug/collection_mismatch"] < 1e-4 for scalars in logged)


@pytest.mark.parametrize("name", ["ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl"])
def test_resume_on_cuda(tmp_path, name):
    """X3: a checkpoint of a run on the device is gone on from there: memory, optimiser and random state are on it, and
    the weights end close to those of a run without the stop (sums on the device have no fixed order)."""
    script, weights = importlib.import_module(name), []
    flags = {"env_id": "envs:Recall-v0", "env_kwargs": {"length": 4}, "checkpoint_every": 2, "anneal_lr": False,
             "cuda": True, "save_model": True}
    for folder, totals in (("whole", [96]), ("parts", [48, 96])):
        for total in totals:
            script.main(small_args(script, run_dir=str(tmp_path / folder), total_timesteps=total,
                                   resume="auto" if total != totals[0] else None, **flags))
        (path,) = (tmp_path / folder).glob("*/model.pt")
        weights.append(torch.load(path, weights_only=True, map_location="cpu")["model"])
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], atol=1e-3, rtol=1e-3)
