"""X4: compiled networks on batches that are filled up to few sizes."""

import importlib
import shutil
from pathlib import Path

import numpy as np
import ppo_graph
import pytest
import torch
from helpers import OBSERVATIONS, sample, small_args, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_main import BASE

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


def test_buckets():
    """X4: at most an eighth more rows, 8 sizes an octave, and never less than what came in."""
    sizes = [ppo_graph.bucket(num) for num in range(1, 5000)]
    assert all(num <= size <= num * 1.125 for num, size in zip(range(1, 5000), sizes))
    assert len({size for size in sizes if 1024 < size <= 2048}) == 8


@pytest.mark.parametrize("kind", OBSERVATIONS)
@given(seed=st.integers(0, 2**31), num=st.integers(1, 9))
@settings(max_examples=8, deadline=None)
def test_spare_rows_change_nothing(kind, seed, num):
    """X4: the encoder gives the same numbers for observations with and without spare ones, of all kinds and sizes,
    empty ones included; a bucket holds few shapes."""
    rng = np.random.default_rng(seed)
    storage, leaves = stored(OBSERVATIONS[kind], [[sample(OBSERVATIONS[kind], rng) for _ in range(num)]])
    encoder, obs = ppo_graph.Encoder(leaves, small_args(norm_obs=True)), storage.latest()
    filled = ppo_graph.fill_up(obs, encoder.fill)
    expected, elements = encoder(obs)
    result, rows = encoder(filled)
    torch.testing.assert_close(result[:num], expected, atol=1e-6, rtol=1e-6)
    assert len(result) == ppo_graph.bucket(num + 1) and result.isfinite().all()
    for group, values in elements.items():
        torch.testing.assert_close(rows[group][:len(values)], values, atol=1e-6, rtol=1e-6)
        assert len(rows[group]) == ppo_graph.bucket(len(values) + 1)


def scalars(folder):
    log = EventAccumulator(str(next(Path(folder).iterdir())), size_guidance={"scalars": 0})
    log.Reload()
    return {name: [event.value for event in log.Scalars(name)] for name in log.Tags()["scalars"]}


def trained(script, folder, **kwargs):
    """(weights, scalars) of a short run."""
    script.main(small_args(script, run_dir=str(folder), save_model=True, total_timesteps=96, **kwargs))
    (path,) = Path(folder).glob("*/model.pt")
    return torch.load(path, weights_only=True)["model"], scalars(folder)


@pytest.mark.parametrize("name", BASE)
def test_as_without_compilation(name, tmp_path, monkeypatch):
    """X4: with the compiler replaced by the identity a run with --compile fills up, cuts off, counts, and learns what a
    run without it learns; past the limit of shapes it goes on as it is."""
    script = importlib.import_module(name)
    flags = {"env_id": "Random-v0", "env_kwargs": {"observation": "mixed", "action": "mixed"}}
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    one, first = trained(script, tmp_path / "one", **flags)
    for limit in (64, 3):
        monkeypatch.setattr(script, "MAX_SHAPES", limit)
        two, second = trained(script, tmp_path / str(limit), compile="default", **flags)
        for key in one:
            torch.testing.assert_close(one[key], two[key], atol=1e-4, rtol=1e-4)
        assert max(second["debug/collection_mismatch"]) < 1e-5
        assert 3 <= second["charts/compilations"][-1] <= 3 * limit
    assert "charts/compilations" not in first


@needs_compiler
def test_compiled(tmp_path):
    """X4: compiled by torch, a run on graphs ends with the weights of an eager run within 1e-5; shapes are few, spare
    rows less than 15%."""
    flags = {"env_id": "envs:PoissonGraph-v0", "gnn_layers": 1, "num_envs": 4, "num_steps": 32, "num_minibatches": 1,
             "update_epochs": 1, "hidden_dims": (8,)}
    one, _ = trained(ppo_graph, tmp_path / "one", **flags | {"num_steps": 24})
    two, log = trained(ppo_graph, tmp_path / "two", compile="default", **flags | {"num_steps": 24})
    for key in one:
        torch.testing.assert_close(one[key], two[key], atol=1e-5, rtol=1e-5)
    assert log["charts/spare_rows"][-1] < 0.15 and log["charts/compilations"][-1] < 64


def test_profile(tmp_path, capsys):
    """--profile writes the table of sections and a trace that names them."""
    args = small_args(env_id="envs:BestOfSet-v0", run_dir=str(tmp_path), profile=True, total_timesteps=96)
    ppo_graph.main(args)
    (folder,) = tmp_path.iterdir()
    table = (folder / "profile.md").read_text()
    assert table.strip() in capsys.readouterr().out
    names = ("environments", "policy", "forward", "backward", "optimizer", "gather", "storage", "collate", "check",
             "gae", "logging", "everything else")
    assert all(f"| {name} | " in table for name in names)
    shares = [float(line.split("|")[4].strip(" %")) for line in table.splitlines()[2:]]
    assert sum(shares) == pytest.approx(100, abs=1) and '"backward"' in (folder / "trace.json").read_text()
    assert not ppo_graph.section.on
