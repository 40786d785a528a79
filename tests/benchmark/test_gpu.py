"""benchmark/gpu.sh: what is measured once, its flags, and all of it dry on the CPU. And what
torchrun does with a GPU per rank, as far as it can be seen without one."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import parsed, small_args
from processes import SCRIPTS
from torch.distributed import distributed_c10d

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmark" / name) for name in ("", "gpu", "speed")]
import measure  # noqa: E402


def rows_of(**measures):
    return [
        measure.Row("sps", "T", {"name": name, "number": 1000}, function)
        for name, function in measures.items()
    ]


def raises(error):
    def function():
        raise error

    return function


def test_rows_are_measured_once(tmp_path, capsys, monkeypatch):
    """What failed, or could not be run, is tried again; what was measured is left out. Rows can be
    chosen. Tries and measurements do not mix; without a device nothing is measured."""
    args = measure.Args(out=str(tmp_path), dry=True)
    rows = rows_of(
        good=lambda: {"ms": 1234.5, "us": 0.01234, "_raw": [1, 2]},
        bad=raises(ValueError("a\nb|c")),
        absent=raises(measure.NotHere("no such thing")),
    )
    assert measure.measure(measure.Results(args), rows, args) == measure.FAILED
    text = (tmp_path / "tables.md").read_text()
    assert text.index(f"**{measure.DRY}**") < text.index("# Steps per second")
    for line in (
        "| name | number | ms | us | note |",
        "| good | 1,000 | 1,234 | 0.0123 |  |",
        "| bad | 1,000 |  |  | failed: ValueError: b/c |",
        "| absent | 1,000 |  |  | not run: no such thing |",
    ):
        assert line in text
    (good, *_) = json.loads((tmp_path / "results.json").read_text())["rows"].values()
    assert good["figures"]["_raw"] == [1, 2] and "_raw" not in text
    again = rows_of(
        good=lambda: pytest.fail("it was measured"),
        bad=lambda: {"ms": 2},
        absent=raises(measure.NotHere("still not")),
    )
    assert measure.measure(measure.Results(args), again, args) == 0
    assert "| bad | 1,000 | 2 |  |  |" in (tmp_path / "tables.md").read_text()
    assert "1 of 3 rows are there" in capsys.readouterr().out
    args = measure.Args(out=str(tmp_path / "b"), dry=True, only="T . [bc] ")
    assert measure.measure(measure.Results(args), rows_of(a=dict, b=dict, c=dict), args) == 0
    assert "0 of 2 rows are there" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure.main(measure.Args(out=str(tmp_path / "c"))) == measure.FAILED
    assert "no CUDA device is available here" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="do not go into one table"):
        monkeypatch.setattr(measure, "machine", lambda args: {"dry": False})
        measure.Results(measure.Args(out=str(tmp_path)))


def test_committed_rows_can_be_measured_again():
    """The keys of results/h200 are those of today's rows, so the same command fills what is
    missing; what was measured with FlexAttention is another row's figures."""
    known = json.loads((ROOT / "benchmark/results/h200/results.json").read_text())
    rows = measure.all_rows(measure.Args(out=""))
    names = {(row.part, row.table, json.dumps(row.key)) for row in rows}
    for part, content in known.items():
        for row in content["rows"] if part in ("checks", "sps") else ():
            key = row["key"]
            if key.get("workers"):
                key |= {"workers": measure.num_workers()}
            assert (part, row["table"], json.dumps(key)) in names


def test_steady_speed():
    """Slow first updates, which compile, do not count: 100 steps per second in the second half."""
    updates = [(100, 50.0), (200, 60.0), (300, 61.0), (400, 62.0), (1300, 71.0), (1400, 72.0)]
    assert measure.steady(updates) == pytest.approx(100)
    assert measure.steady(updates[:2]) == pytest.approx(10)


def test_flags_of_the_trainings():
    """Every script has the flags of every row."""
    for script, tasks in measure.CHECKS.items():
        for task in tasks:
            assert parsed(script, ["--env-id", *task.split()]).env_id == task.split()[0]
    for task, (env_id, scripts) in measure.TASKS.items():
        for script in scripts:
            args = parsed(script, shlex.split(measure.flags_of(task, script, 512, 32, 3)))
            assert (args.env_id, args.num_envs, args.num_workers) == (env_id, 512, 3)
            args = parsed(script, shlex.split(f"--env-id {env_id} {measure.VECTOR}"))
            assert args.vectorization_mode == "vector_entry_point"


@pytest.mark.slow
def test_everything_runs_dry(tmp_path):
    """All parts, in the sizes of a try: no row fails, and files are marked."""
    command = ["bash", ROOT / "benchmark" / "gpu.sh", "--out", "out", "--dry", "first"]
    env = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    known = json.loads((tmp_path / "out" / "results.json").read_text())
    text = (tmp_path / "out" / "tables.md").read_text()
    rows = known["rows"].values()
    assert {row["part"] for row in rows} == set(measure.PARTS)
    for name in measure.PARTS:
        own = text.split(f'<a id="{name}"></a>')[1].split("<a id=")[0]
        assert own.index(measure.DRY) < own.index("| --- |") and "failed:" not in own
    assert {row["note"] for row in rows if row["part"] == "sps"} == {""}
    (tests,) = [row["figures"] for row in rows if row["part"] == "tests"]
    assert tests["skipped"] > 0


# ---- torchrun with a GPU per rank ----
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_rank_takes_its_own_gpu(name, monkeypatch):
    """LOCAL_RANK chooses the device, which is the current one before nccl is set up; objects go
    through gloo; cuDNN computes in float32."""
    script, calls = importlib.import_module(f"cleanrl_graph.{name}"), []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(script, "WORLD_SIZE", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    device = torch.device("cuda:3")
    assert script.start(small_args(script, cuda=True)) == device
    assert calls == [device, "cpu:gloo,cuda:nccl"] and not torch.backends.cudnn.allow_tf32


def test_objects_of_ranks_need_no_gpu(tmp_path):
    """Where a group has a backend for each device, as that of the scripts has, objects go through
    the CPU's, so that no rank needs a copy on a device (gloo stands for nccl here)."""
    store = dict(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.init_process_group("cpu:gloo,cuda:gloo", **store)
    try:
        assert distributed_c10d._get_object_coll_device() == "cpu"
        values = [None]
        dist.all_gather_object(values, {"a": [1]})
        assert values == [{"a": [1]}]
    finally:
        dist.destroy_process_group()
