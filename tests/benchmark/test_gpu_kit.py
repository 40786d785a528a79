"""benchmark/gpu.sh: it refuses, resumes and writes what it should, its flags exist, and the whole
of it runs dry on the CPU. And what torchrun does with a GPU per rank, as far as it can be seen
without one."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import parsed, small_args
from processes import SCRIPTS
from torch.distributed import distributed_c10d

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "benchmark" / "gpu")]
import child  # noqa: E402
import kit  # noqa: E402
import part  # noqa: E402
import throughput  # noqa: E402
import trainings  # noqa: E402
import transfers  # noqa: E402

ABOUT = {"dry": True, "gpu": None, "cpu": "C", "cpus": 2, "system": "S", "python": "3"}
ABOUT |= {"torch": "2", "torch-geometric": "2", "gymnasium": "1", "numpy": "2", "commit": "0123"}
MEASURED = ABOUT | {"dry": False, "gpu": "G", "gpus": 1, "driver": "5", "cuda": "13", "cudnn": 9}
LATER = float("inf")
GPU_SH = ROOT / "benchmark" / "gpu.sh"


def results_in(folder, about=ABOUT, **flags):
    args = kit.Args(out=str(folder), dry=about["dry"], **flags)
    return kit.Results(args, "x", "Title", "Notes.", about), args


def rows_of(**measures):
    key = lambda name: {"name": name, "number": 1000}
    return [kit.Row("T", key(name), measure, 1) for name, measure in measures.items()]


def test_what_is_refused(tmp_path, monkeypatch, capsys):
    """A dry run among the tables of what was measured, or in one table with it; figures without a
    device."""
    for folder in ("h200", "h200/again", ""):
        with pytest.raises(SystemExit, match="benchmark/results is for what was measured"):
            kit.check(kit.Args(out=str(ROOT / "benchmark" / "results" / folder), dry=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert part.main(("sps",), kit.Args(out=str(tmp_path / "a"))) == part.REFUSED
    assert "no CUDA device is available here, so nothing is measured" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    for name, first, second in (("measurement", ABOUT, MEASURED), ("dry run", MEASURED, ABOUT)):
        results, _ = results_in(tmp_path / name, first)
        results.add(rows_of(a=dict)[0], {"ms": 1.0})
        with pytest.raises(SystemExit, match=f"is not of a {name}"):
            results_in(tmp_path / name, second)


# ---- What it refuses ----


# ---- Rows ----
def raises(error):
    def measure(deadline):
        raise error

    return measure


def test_rows_are_measured_once(tmp_path, capsys):
    """What failed, could not be run or was stopped is tried again; what was measured is left
    out. Rows can be chosen, and are left when the time is up."""
    results, args = results_in(tmp_path)
    rows = rows_of(
        good=lambda deadline: {"ms": 1234.5, "us": 0.01234, "_raw": [1, 2]},
        bad=raises(ValueError("a\nb|c")),
        absent=raises(kit.NotHere("no such thing")),
        stopped=raises(kit.TimeIsUp()),
    )
    assert kit.measure(results, rows, args, LATER) == kit.FAILED
    text = (tmp_path / "tables.md").read_text()
    assert text.index(f"**{kit.DRY}**") < text.index("# Title") < text.index("Notes.")
    for line in (
        "| name | number | ms | us | note |",
        "| good | 1,000 | 1,234 | 0.0123 |  |",
        "| bad | 1,000 |  |  | failed: ValueError: b/c |",
        "| absent | 1,000 |  |  | not run: no such thing |",
    ):
        assert line in text
    assert "stopped" not in text and "_raw" not in text
    (good, *_) = json.loads((tmp_path / "results.json").read_text())["x"]["rows"]
    assert good["figures"]["_raw"] == [1, 2]
    order, noting = [], lambda name, ms: lambda deadline: order.append(name) or {"ms": ms}
    again = rows_of(
        good=lambda deadline: pytest.fail("it was measured"),
        bad=noting("bad", 2),
        absent=raises(kit.NotHere("still not")),
        stopped=noting("stopped", 3),
    )
    results, args = results_in(tmp_path)
    assert kit.measure(results, again, args, LATER) == 0 and order == ["stopped", "bad"]
    names = [row["key"]["name"] for row in results.content["rows"]]
    assert names == ["good", "bad", "absent", "stopped"]
    assert "| bad | 1,000 | 2 |  |  |" in (tmp_path / "tables.md").read_text()
    assert "x: 1 of 4 rows are there already" in capsys.readouterr().out
    results, args = results_in(tmp_path / "b", only="T . [bc] ")
    rows = rows_of(a=noting("a", 1), b=noting("b", 1), c=noting("c", 1))
    rows[2] = rows[2]._replace(seconds=1000)
    assert kit.measure(results, rows, args, time.monotonic() + 60) == kit.LEFT
    assert order[2:] == ["b"] and "time is up, 1 rows are left" in capsys.readouterr().out


# ---- Processes ----
def test_commands_and_peers(tmp_path):
    """A command has its time. Lines of a peer are timed as they come, and the peer is ended."""
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="exit code 3(.|\n)*no luck"):
        kit.run_command(["sh", "-c", "echo no luck; exit 3"], log, time.monotonic() + 60)
    with pytest.raises(kit.TimeIsUp):
        kit.run_command(["sleep", "60"], log, time.monotonic() + 0.1)

    def run(script, pattern, seconds, patience=LATER):
        command, end = ["sh", "-c", script], time.monotonic() + patience
        return kit.times_of_lines(command, pattern, seconds, end, log, {}, str(tmp_path))

    line = "echo SPS: $k; printf 'bar\\rspeed: 7.5 sps'; sleep 0.05"
    start = time.monotonic()
    times, lines = run(f"for k in 1 2 3 4 5 6 7 8; do {line}; done; sleep 60", "SPS: ", 0.2, 30)
    assert time.monotonic() - start < 20 and lines[:2] == ["SPS: 1", "speed: 7.5 spsSPS: 2"]
    assert 4 <= len(times) <= 8 and 0.2 <= times[-1] - times[0] < 10
    with pytest.raises(RuntimeError, match="exit code 1(.|\n)*no module"):
        run("echo no module; exit 1", "SPS", 1)
    with pytest.raises(kit.TimeIsUp):
        run("exec sleep 60", "SPS", 1, 0.1)


def test_steady_speed_and_first_time_at_a_return():
    """Slow first updates, which compile, do not count: 100 steps per second in the second half."""
    updates = [(100, 50.0), (200, 60.0), (300, 61.0), (400, 62.0), (1300, 71.0), (1400, 72.0)]
    assert kit.steady(updates) == pytest.approx(100)
    assert kit.steady(updates[:2]) == pytest.approx(10)
    episodes = [(10 * k, 1.0 * k, float(k >= 150), 5) for k in range(400)]
    found = trainings.first_time(episodes, 0.9)
    assert list(found.values()) == [2390, 239.0]  # 90 of the last 100 are from episode 150 on
    assert set(trainings.first_time(episodes[:120], 0.9).values()) == {"never"}


def test_a_training_goes_on_as_it_was_planned(tmp_path):
    """By the fastest script, for as long as is asked for; when it goes on nothing changes."""
    (training,), (results, _) = trainings.TRAININGS["jobshop"], results_in(tmp_path, MEASURED)
    args = kit.Args(out=str(tmp_path))
    with pytest.raises(kit.NotHere, match="no speed was measured"):
        trainings.plan(training, results, args)
    every = trainings.all_rows("jobshop", args, results)
    speeds = [row for row in every if row.table == trainings.SPEED]
    for row, sps in zip(speeds, (100.0, 200.0), strict=True):
        results.add(row, {"SPS": sps})
    planned = "ppo_graph_compile", int(200 * training.seconds)
    assert trainings.plan(training, results, args) == planned
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "jobshop.json").write_text('["ppo_graph", 5]')
    assert trainings.plan(training, results, args) == ("ppo_graph", 5)


# ---- The trace ----
def event(name, cat, ts, dur=1.0, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


def test_sums_of_a_trace():
    """Two steps, two minibatches: bytes and waits are those of the phase in which the host asked
    for them, wherever the device was by then; overlapping kernels count once."""
    names = "append step append step append gather optimizer gather optimizer".split()
    events = []
    for k, name in enumerate(names):
        events.append(event(child.MARK + name, "user_annotation", 10 * k + 10))
    events.append(event(child.MARK + "step", "gpu_user_annotation", 21))
    events.append({"ph": "i", "name": "x", "ts": 0})
    copies = [(5, 7), (12, 100), (13, 20), (32, 100), (52, 3), (61, 1000), (82, 2000)]
    for k, (ts, size) in enumerate(copies):
        events.append(event("cudaMemcpyAsync", "cuda_runtime", ts, correlation=k))
        there = 85 + k / 10, 0.05
        name = "Memcpy HtoD (Pinned -> Device)"
        events.append(event(name, "gpu_memcpy", *there, bytes=size, correlation=k))
    name = "Memcpy DtoH (Device -> Pageable)"
    events.append(event("cudaMemcpyAsync", "cuda_runtime", 18, correlation=77))
    events.append(event(name, "gpu_memcpy", 18.5, 0.5, bytes=8, correlation=77))
    for ts in (18, 38, 55, 95):
        events.append(event("cudaStreamSynchronize", "cuda_runtime", ts, 2000.0))
    events.append(event("cudaLaunchKernel", "cuda_runtime", 65, correlation=99))
    events.append(event("a", "kernel", 100, 10, correlation=99))
    events.append(event("b", "kernel", 105, 10))
    sums = child.summary(events)
    of = lambda phase, *keys: [sums["phases"][phase][name] for name in keys]
    assert of("between", "to_device_bytes", "waits") == [7, 1]
    there = ("to_device_bytes", "to_device_copies")
    assert of("collection", *there, "to_host_bytes", "waits") == [220, 3, 8, 2]
    assert of("advantages", "to_device_bytes", "waits", "wait_ms") == [3, 1, 2.0]
    assert of("update", *there, "launches", "waits") == [3000, 2, 1, 0]
    assert (sums["steps"], sums["minibatches"]) == (2, 2)
    assert sums["busy_us"] == pytest.approx(15 + 0.5 + 7 * 0.05)
    noted = dict(updates=1, expected_minibatches=16, plain_seconds=1e-3, plain_steps=8)
    figures = transfers.figures(sums | noted | {"watched_steps": 8})
    expected = {"bytes to the device per step": 110, "bytes to the device per minibatch": 1500}
    expected |= {"SPS": 8000, "waits per step": 1, "other waits per update": 2}
    expected["device busy, %"] = pytest.approx(100 * sums["busy_us"] / 1000)
    assert {name: figures[name] for name in expected} == expected


# ---- Flags ----
def test_flags_of_the_trainings():
    """Every script has the flags of every row, with a minibatch of at least one environment."""
    cases = {(case.task, case.script): case for case in throughput.cases(16)}
    assert set(transfers.CASES) <= cases.keys()
    assert {task for task, _ in cases} == set(throughput.TASKS)
    for case in cases.values():
        args = parsed(case.script, case.flags)
        assert args.env_id == throughput.TASKS[case.task].env_id
        assert (args.num_envs, args.num_workers) == (case.num_envs, case.num_workers)
    for training in [training for several in trainings.TRAININGS.values() for training in several]:
        for dry in (False, True):
            flags = trainings.words(training, kit.Args(out="x", dry=dry))
            for script in training.scripts:
                args = parsed(script, flags)
                assert args.num_envs >= (4 if dry else 32) and args.num_minibatches <= args.num_envs
                assert args.cuda == (not dry)


# ---- gpu.sh ----
def test_the_wrapper(tmp_path):
    """Each part is a process; in a dry run there is one for all. What refuses ends it, what fails
    does not. The interpreter only notes what it is given."""
    python, log = tmp_path / "python", tmp_path / "calls"

    def call(words, codes="0"):
        """(exit code, what was printed, the calls of part.py, which exit with the codes)"""
        python.write_text(
            f"#!/bin/sh\nshift\necho $* >> {log}\nset -- {codes}\n"
            f"shift $(($(wc -l < {log}) - 1)) 2> /dev/null\nexit ${{1:-0}}\n"
        )
        python.chmod(0o755)
        log.write_text("")
        words, env = ["bash", GPU_SH, *words.split()], os.environ | {"PYTHON": str(python)}
        result = subprocess.run(words, cwd=tmp_path, text=True, env=env, capture_output=True)
        return result.returncode, result.stderr, log.read_text().splitlines()

    calls = ["sps --out o --minutes 3", "tests --out o --minutes 3"]
    assert call("--out o sps --minutes 3 tests") == (0, "", calls)
    every = list(part.PARTS)
    assert call("--dry --out o") == (0, "", [" ".join(every) + " --dry --out o"])
    calls = [f"{name} --out o" for name in every]
    assert call("--out o", codes="0 3 1 0 3 0 0 0")[::2] == (1, calls)
    assert call("--out o sps tests", codes="3 0")[0] == 3
    assert call("--out o sps tests", codes="2 0")[::2] == (1, ["sps --out o"])
    code, text, calls = call("--out o nothing")
    assert (code, calls) == (1, [])
    assert "there is no part nothing, the parts are: checks tests" in text
    assert call("--minutes x sps")[0] == 1


@pytest.mark.slow
def test_everything_runs_dry(tmp_path):
    """All parts, in the sizes of a try: no row fails, files are marked, and the second time there
    is nothing left."""

    def run(*parts):
        command = ["bash", GPU_SH, "--out", "out", "--dry", *parts]
        env = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.run(command, cwd=tmp_path, env=env, stdout=pipe, text=True, check=True)

    run()
    kinds, known = set(), json.loads((tmp_path / "out" / "results.json").read_text())
    tables = (tmp_path / "out" / "tables.md").read_text()
    for name in part.PARTS:
        text = tables.split(f'<a id="{name}"></a>')[1].split("<a id=")[0]
        assert text.index(kit.DRY) < text.index("# ")
        assert "| --- |" in text and "failed:" not in text
        assert all(about["dry"] and about["gpu"] is None for about in known[name]["machines"])
        kinds |= {row["note"].split(":")[0] for row in known[name]["rows"]}
    assert kinds == {"", "not run"}
    assert "needs a CUDA device" in (tmp_path / "out" / "tests.txt").read_text()
    said = run("kernels", "recall").stdout
    assert "kernels: 10 of 10 rows" in said and "recall: 2 of 2 rows" in said


@pytest.mark.slow
def test_a_child_as_a_process_of_its_own(tmp_path, monkeypatch):
    """As on a GPU, where nothing is forked: a training that was stopped goes on from its
    checkpoint."""
    flags = f"--env-id CartPole-v1 --no-cuda --num-steps 8 --num-envs 2 --run-dir {tmp_path}/runs "
    flags += "--hidden-dims 8 --eval-episodes 0 --checkpoint-every 1 --resume auto"
    args, log = kit.Args(out=str(tmp_path)), tmp_path / "logs" / "log"
    checkpoints = lambda: sorted(tmp_path.glob("runs/*/checkpoint_*.ckpt"))

    def stop(process, is_alive, deadline):
        while not checkpoints():
            time.sleep(0.05)
        process.terminate()
        process.wait()

    def train(num_steps):
        words = f"{flags} --total-timesteps {num_steps}".split()
        return kit.from_child(args, "train", "ppo_graph", words, log, LATER)

    with monkeypatch.context() as patch, pytest.raises(kit.TimeIsUp):
        patch.setattr(kit, "wait", stop)
        train(10**7)
    steps = 16 + int(checkpoints()[-1].stem.split("_")[1])
    assert train(steps) == {"gpu_gb": 0.0} and not log.parent.exists()
    assert len(list(tmp_path.glob("runs/*"))) == 1
    assert f"{steps:012d}" in checkpoints()[-1].stem


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


def test_rows_of_first():
    """Each line of `gpu.sh first` names a part, and rows that it has."""
    text = GPU_SH.read_text()
    lines = text.split("first=(")[1].split("\n)")[0].split('"')[1::2]
    assert len(lines) > 9
    args = kit.Args(out="nowhere")
    for line in lines:
        minutes, name, only = line.split(" ", 2)
        assert int(minutes) <= 3 and name in part.PARTS
        if name in ("kernels", "profile", "sps"):
            rows = part.module_of(name).all_rows(name, args)
            assert any(kit.re.search(only, row.name) for row in rows), line
