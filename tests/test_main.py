"""The command line, the logs, checkpoints, evaluation and shared blocks of ppo_graph.py."""

import ast
import csv
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import gymnasium as gym
import ppo_graph
import pytest
import shared_blocks
import torch
import tyro
from gymnasium import spaces
from helpers import small_args, vector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(ppo_graph.__file__)
SCRIPTS = sorted(path.stem for path in SCRIPT.parent.glob("ppo_*.py"))
BASE = ["ppo_framestack", "ppo_graph", "ppo_gtrxl", "ppo_lstm_sparse"]  # the others are variants of one of these
FIELDS = [field.name for field in dataclasses.fields(ppo_graph.Args)]
RUNTIME = ["batch_size", "minibatch_size", "world_size", "num_iterations"]


def run_path(folder):
    """The only run in a run_dir."""
    (path,) = Path(folder).iterdir()
    return path


def run_script(flags, environment, folder, name="ppo_graph"):
    """The finished process of the script."""
    command = [sys.executable, SCRIPT.parent / f"{name}.py", *flags]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def scalars(folder):
    """name -> [(step, value)] of the run's TensorBoard log."""
    log = EventAccumulator(str(run_path(folder)), size_guidance={"scalars": 0})
    log.Reload()
    return {name: [(event.step, event.value) for event in log.Scalars(name)] for name in log.Tags()["scalars"]}


def test_names_in_the_log(tmp_path):
    """G4: CleanRL's names, bytes of observations and the mismatch are in the TensorBoard log, one value an update."""
    ppo_graph.main(small_args(env_id="envs:PoissonGraph-v0", run_dir=str(tmp_path), env_kwargs={"episode_length": 5}))
    log = scalars(tmp_path)
    per_update = ["charts/SPS", "charts/learning_rate", "charts/obs_bytes_per_step", "charts/padding_avoided",
                  "charts/nodes_per_graph", "debug/collection_mismatch"]
    per_update += [f"losses/{name}" for name in ("value_loss", "policy_loss", "entropy", "approx_kl", "old_approx_kl",
                                                 "clipfrac", "explained_variance")]
    for name in per_update:
        assert [step for step, _ in log[name]] == [24, 48], name
    assert [value for _, value in log["charts/learning_rate"]] == pytest.approx([2.5e-4, 1.25e-4])
    assert 0 < log["charts/padding_avoided"][0][1] < 1
    ends = [step for step, _ in log["charts/episodic_return"]]
    assert ends == [3 * t for t in (5, 10, 15) for _ in range(3)]  # every episode, at the step at which it ended
    assert [value for _, value in log["charts/episodic_length"]] == [5] * 9


def test_model_goes_through_a_file(tmp_path):
    """--save-model writes the weights and flags; --load-model starts from exactly these."""
    env = {"env_id": "envs:BestOfSet-v0", "run_dir": str(tmp_path / "a")}
    ppo_graph.main(small_args(save_model=True, **env))
    path = run_path(tmp_path / "a") / "model.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["args"]["env_id"] == "envs:BestOfSet-v0" and saved["args"]["hidden_dims"] == (16,)
    env["run_dir"] = str(tmp_path / "b")
    ppo_graph.main(small_args(load_model=str(path), save_model=True, seed=9, **env | {"total_timesteps": 0}))
    again = torch.load(run_path(tmp_path / "b") / "model.pt", weights_only=True)["model"]
    assert list(again) == list(saved["model"]) and all(torch.equal(again[k], saved["model"][k]) for k in again)
    assert not list(tmp_path.glob("*/*/*.tmp"))


def test_wandb_without_a_network(tmp_path, monkeypatch):
    """--track writes a wandb run with project, flags and the scalars; offline it needs no account."""
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1",
                                "WANDB_SILENT": "true"}
    flags = ["--env-id", "envs:BestOfSet-v0", "--track", "--total-timesteps", "16", "--num-envs", "2",
             "--num-steps", "8", "--eval-episodes", "0", "--run-dir", str(tmp_path / "runs"),
             "--hidden-dims", "8", "--no-cuda"]
    result = run_script(flags, environment, tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    data = b"".join(file.read_bytes() for file in folder.rglob("*.wandb"))
    assert b"cleanrl_graph" in data and b"losses/value_loss" in data and b"BestOfSet" in data


def test_command_line():
    """S6: any environment and its keyword arguments by flags; tuples, choices and booleans as tyro writes them."""
    flags = ["--env-id", "envs:BestOfSet-v0", "--env-kwargs", '{"max_size": 3, "stack": false}', "--hidden-dims", "8",
             "9", "--no-anneal-lr", "--gnn", "sage", "--target-kl", "0.1"]
    args = tyro.cli(ppo_graph.Args, args=flags)
    assert args.env_kwargs == {"max_size": 3, "stack": False} and args.hidden_dims == (8, 9)
    assert args.anneal_lr is False and args.gnn == "sage" and args.target_kl == 0.1
    assert ppo_graph.make_env(args.env_id, args.env_kwargs).unwrapped.max_size == 3
    assert tyro.cli(ppo_graph.Args, args=[]).env_kwargs == {}
    for wrong in (["--env-kwargs", "{max_size: 3}"], ["--gnn", "nope"], ["--batch-size", "3"]):
        with pytest.raises(SystemExit):
            tyro.cli(ppo_graph.Args, args=wrong)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_every_flag(name, capsys):
    """Every Args field but those filled at run time is in --help, with a docstring of its own."""
    script = importlib.import_module(name)
    with pytest.raises(SystemExit):
        tyro.cli(script.Args, args=["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    body = next(node.body for node in ast.parse(Path(script.__file__).read_text()).body
                if isinstance(node, ast.ClassDef) and node.name == "Args")
    for field, doc in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign):
            name = field.target.id
            assert isinstance(doc, ast.Expr) and len(doc.value.value) > 10, f"{name} has no docstring"
            assert (f"--{name.replace('_', '-')}" in text) == (name not in RUNTIME), name
    assert len(FIELDS) > 40


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """No dead flags: every Args field is read somewhere in the script."""
    script = importlib.import_module(name)
    read = {node.attr for node in ast.walk(ast.parse(Path(script.__file__).read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            and isinstance(node.value, ast.Name) and node.value.id == "args"}
    assert {field.name for field in dataclasses.fields(script.Args)} - read - {"minibatch_size"} == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_of_all_scripts_are_alike(name):
    """A flag of ppo_graph.py has the same type, default and docstring in every script, but for the environment."""
    script = importlib.import_module(name)
    theirs = {field.name: (field.type, field.default) for field in dataclasses.fields(script.Args)}
    ours = {field.name: (field.type, field.default) for field in dataclasses.fields(ppo_graph.Args)}
    for field in set(ours) - {"exp_name", "env_id", "env_kwargs"}:
        assert str(theirs[field]) == str(ours[field]), field


def test_every_choice_is_a_choice():
    """No dead values: every --gnn builds another layer."""
    options = typing.get_args(typing.get_type_hints(ppo_graph.Args)["gnn"])
    layers = {type(ppo_graph.make_conv(kind, 8, 4, "sum")).__name__ for kind in options}
    assert len(layers) == len(options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_as_a_script(name, tmp_path):
    """S6: from any folder, `python ppo_graph.py` with worker processes and a module:id that has to be imported."""
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Env(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def __init__(self, size=1): self.size = size\n"
        "    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}\n"
        "    def step(self, a): return np.zeros(2, np.float32), float(self.size), True, False, {}\n"
        "gym.register('Mine-v0', entry_point=Env)\n")
    flags = ["--env-id", "my_envs:Mine-v0", "--env-kwargs", '{"size": 7}', "--total-timesteps", "16", "--num-envs", "2",
             "--num-steps", "8", "--num-workers", "2", "--num-minibatches", "2", "--eval-episodes", "3", "--no-cuda"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = run_script(flags, environment, tmp_path, name)
    assert result.returncode == 0, result.stderr
    assert "return" in result.stdout and "| 2 | 1 | 7 |" in result.stdout
    assert (run_path(tmp_path / "runs") / "eval.md").read_text().strip() in result.stdout


def test_job_shop_table(tmp_path, capsys):
    """X5: the evaluation table of a suite has the instance, the best known cost, gaps, and the dispatching rules."""
    args = small_args(env_id="envs:JobShop-v0", eval_suite="ft", eval_samples=2, run_dir=str(tmp_path),
                      total_timesteps=0)
    rows = ppo_graph.main(args)
    assert [row["instance"] for row in rows] == ["ft06", "ft10", "ft20"]
    assert [row["best_known"] for row in rows] == [55, 930, 1165]
    for row in rows:
        assert {"greedy", "best of 2", "SPT", "MWKR", "MOPNR", "random"} <= set(row) and "cost" not in row
        assert all(row[name] >= row["best_known"] for name in ("greedy", "best of 2", "SPT", "MWKR", "MOPNR", "random"))
    table = (run_path(tmp_path) / "eval.md").read_text()
    assert table.strip() in capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    header, cells, mean = lines[0], dict(zip(lines[0], lines[2])), dict(zip(lines[0], lines[-1]))
    assert len(lines) == 6 and header[0] == "instance" and "best_known" in header
    for name in ("greedy", "SPT", "random"):
        gaps = [100 * (row[name] / row["best_known"] - 1) for row in rows]
        assert float(cells[f"{name} gap %"]) == pytest.approx(gaps[0], abs=0.051)
        assert float(mean[f"{name} gap %"].strip("*")) == pytest.approx(sum(gaps) / 3, abs=0.051)
    (costs,) = run_path(tmp_path).glob("eval.csv")
    read = list(csv.DictReader(costs.open()))
    assert [float(row["greedy"]) for row in read] == [row["greedy"] for row in rows]


class Lottery(gym.Env):
    """The return is minus the action, 0 to 9; action 5 is the mode of every policy that `Fixed` plays."""

    observation_space, action_space = vector(1, low=0), spaces.Discrete(10)
    eval_suites = {"two": [{"shift": 0}, {"shift": 100}], "none": []}

    def __init__(self, shift=0, report=True):
        self.shift, self.report = shift, report

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        info = {"eval": {"cost": self.shift + 2.0 * action, "rule": 3.0}} if self.report else {}
        return self.observation_space.low, -float(action), True, False, info


class Fixed(torch.nn.Module):
    """Greedy: action 5. Sampled: 9, 8, 7, ... in turn."""

    def forward(self, obs, greedy):
        num = len(obs["obs"])
        return (torch.full((num, 1), 5) if greedy else 9 - torch.arange(num)[:, None] % 10), None, None, None


gym.register("Lottery-v0", entry_point=Lottery)


@pytest.mark.parametrize("samples, best", [(1, 9), (4, 6), (0, None)])
@pytest.mark.parametrize("report", [False, True])
def test_best_of_samples(samples, best, report):
    """The greedy cost and the best of --eval-samples; the cost is info["eval"]["cost"], else minus the return."""
    args = small_args(env_id="Lottery-v0", env_kwargs={"report": report}, eval_suite="two", eval_samples=samples)
    rows = ppo_graph.evaluate(Fixed(), args, torch.device("cpu"))
    for row, shift in zip(rows, (0, 100)):
        cost = (lambda a: shift + 2.0 * a) if report else float
        expected = {"instance": str(shift), "greedy": cost(5)}
        if samples:
            expected[f"best of {samples}"] = cost(best)
        assert row == expected | ({"rule": 3.0} if report else {})
    assert len(rows) == 2 and ppo_graph.eval_table(rows).count("\n") == 4


def test_evaluation_episodes(tmp_path):
    """Without a suite: --eval-episodes greedy episodes; 0 plays none and writes no table."""
    env = {"env_id": "Lottery-v0"}
    rows = ppo_graph.evaluate(Fixed(), small_args(eval_episodes=3, **env), torch.device("cpu"))
    assert [(row["return"], row["length"]) for row in rows] == [(-5, 1)] * 3
    assert ppo_graph.main(small_args(eval_episodes=0, run_dir=str(tmp_path), **env)) == []
    assert not (run_path(tmp_path) / "eval.md").exists()
    suite = small_args(eval_suite="none", run_dir=str(tmp_path / "empty"), **env)
    assert ppo_graph.main(suite) == []


def test_shared_blocks_are_identical():
    """X6: the blocks that scripts share are the same bytes; a variant may have its own loss, PPO and main."""
    assert shared_blocks.compare(SCRIPT.parent) == []
    for name in SCRIPTS:
        names = list(shared_blocks.blocks((SCRIPT.parent / f"{name}.py").read_text()))
        blocks = ["environments", "ragged observations", "encoder", "action heads", "loss", "ranks", "PPO",
                  "checkpoint and evaluation", "flags", "main"]
        may_differ = () if name in BASE else ("loss", "PPO", "main")
        assert names == [block for block in blocks if block in names or block not in may_differ]


def test_shared_blocks_tool(tmp_path):
    """X6: a script whose block was changed is reported and repaired; the rest of it stays."""
    text = SCRIPT.read_text()
    (tmp_path / "ppo_graph.py").write_text(text)
    doctored = text.replace("class Rows(nn.Module)", "class Lines(nn.Module)").replace("def check_flags(", "def mine(")
    assert doctored.count("class Lines(") == 1
    (tmp_path / "ppo_other.py").write_text(doctored)
    assert shared_blocks.compare(tmp_path) == ["ppo_other.py: block 'encoder' differs from ppo_graph.py"]
    assert len(shared_blocks.compare(tmp_path, write=True)) == 1
    assert (tmp_path / "ppo_other.py").read_text() == text.replace("def check_flags(", "def mine(")
    assert (tmp_path / "ppo_graph.py").read_text() == text and shared_blocks.compare(tmp_path) == []
    (tmp_path / "ppo_odd.py").write_text("# --- shared: encoder ---\nno end\n")
    with pytest.raises(ValueError, match="1 marker lines for 0 blocks"):
        shared_blocks.compare(tmp_path)


def test_write_flag(tmp_path):
    """X6: the command lists differences with exit code 1; --write repairs them and exits with 0."""
    folder = tmp_path / "cleanrl_graph"
    folder.mkdir(), (tmp_path / "tests").mkdir()
    tool = tmp_path / "tests" / "shared_blocks.py"
    tool.write_text(Path(shared_blocks.__file__).read_text())
    text = SCRIPT.read_text()
    (folder / "ppo_graph.py").write_text(text)
    (folder / "ppo_other.py").write_text(text.replace("def segment_sum(", "def segment_total("))

    def run(*flags):
        return subprocess.run([sys.executable, tool, *flags], capture_output=True, text=True)

    assert run().returncode == 1 and "ppo_other.py: block 'encoder' differs" in run().stdout
    assert run("--write").returncode == 0 and (folder / "ppo_other.py").read_text() == text
    assert run().returncode == 0 and "identical" in run().stdout


def test_no_script_imports_another():
    """X6: a script that is copied alone works: it imports nothing of the project."""
    local = {path.stem for path in SCRIPT.parent.iterdir()} | {"envs", "benchmark", "tests"}
    for script in SCRIPT.parent.glob("ppo_*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, (script.name, ast.unparse(node))
                names.append(node.module)
            assert not {name.split(".")[0] for name in names} & local, (script.name, names)


def test_hyperparameters_are_logged(tmp_path):
    """Every flag and its value is in the log."""
    ppo_graph.main(small_args(env_id="envs:BestOfSet-v0", run_dir=str(tmp_path), env_kwargs={"max_size": 5}))
    log = EventAccumulator(str(run_path(tmp_path)))
    log.Reload()
    (event,) = log.Tensors("hyperparameters/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert all(f"|{name}|" in text for name in FIELDS) and json.dumps({"max_size": 5}).replace('"', "'") in text
