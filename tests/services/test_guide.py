"""What services/README.md says is so: its programs run, its files exist, its script for Slurm
starts ranks that go on."""

import json
import os
import re
import stat
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import run, run_folder

from cleanrl_graph import services
from cleanrl_graph.services import sweep

TEXT = (Path(services.__file__).parent / "README.md").read_text()


def fences(kind):
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.S)


class Trial:
    """As Optuna's: the lowest values."""

    def suggest_float(self, name, low, high, log=False):
        return low

    def suggest_int(self, name, low, high):
        return low


class Study:
    def optimize(self, objective, n_trials, n_jobs):
        with ThreadPoolExecutor(n_jobs) as pool:
            self.values = list(pool.map(objective, [Trial() for _ in range(n_trials)]))


@pytest.mark.parametrize("program", fences("python"), ids=["loop", "optuna"])
def test_programs(program, tmp_path, monkeypatch):
    """The loop and Optuna's study, with a thousandth of the steps and two trials."""
    study = Study()
    optuna = types.SimpleNamespace(create_study=lambda direction: study)
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    monkeypatch.chdir(tmp_path)
    small = program.replace("30_000", "512").replace("n_trials=20", "n_trials=2")
    assert small != program
    exec(small, {})
    (parent,) = {path.parents[1] for path in tmp_path.rglob("args.json")}
    runs = [json.loads(path.read_text()) for path in parent.glob("*/args.json")]
    assert len(runs) == 2 and {run["total_timesteps"] for run in runs} == {512}
    if "optuna" in program:
        assert len(study.values) == 2 and parent.name == "optuna"
        assert {(run["learning_rate"], run["gnn_layers"]) for run in runs} == {(1e-4, 1)}


def test_files_of_the_table(tmp_path):
    """Each is there after a run, and nothing else is but the lock."""
    patterns = re.findall(r"`([\w.*]+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.M)))
    assert len(patterns) == 9
    flags = dict(checkpoint_every=1, save_model=True, eval_episodes=1, eval_every=1)
    run(tmp_path, env_id="CartPole-v1", **flags)
    folder = run_folder(tmp_path)
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    assert all(list(folder.glob(pattern)) for pattern in patterns)
    assert set(folder.iterdir()) - found == {folder / "lock"}


def test_first_lines(tmp_path, capfd):
    """Those of PoissonGraph-v0, with the default network."""
    (block,) = fences("")[:1]
    args = services.arguments.args_of(services.import_first("cleanrl_graph.ppo_graph"))
    args.env_id = "envs:PoissonGraph-v0"
    args.run_dir = str(tmp_path)
    args.total_timesteps = args.eval_episodes = 0
    services.run(sys.modules["cleanrl_graph.ppo_graph"], args)
    said = capfd.readouterr()
    lines = re.sub(r"[\d,]+ parameters", "N parameters", said.err).splitlines()
    for line in re.sub(r"[\d,]+ parameters", "N parameters", block).splitlines()[:3]:
        assert line in lines, said.err
    assert "writes to " in said.out


def test_commands_have_these_flags():
    """The sweep's jobs are as many as the guide says."""
    (line,) = re.findall(r"services.sweep (ppo_graph .*)", TEXT)
    scripts, given = sweep.words_of(line.split())
    jobs, names = sweep.jobs_of(scripts[0], sweep.OWN | given)
    assert len(jobs) == 6 and names == ["learning-rate"]


SMALL = (
    "--env-id CartPole-v1 --num-envs 2 --num-steps 16 --total-timesteps 512 --hidden-dims 8 "
    "--eval-episodes 0 --checkpoint-every 2 --no-cuda"
)
SRUN = """#!/bin/bash
for k in $(seq $NUM_NODES); do "$@" & done
wait -n && wait
"""


def stand_in(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_script_for_slurm(tmp_path):
    """Two agents of torchrun on this machine, then a second job with one."""
    (script,) = [text for text in fences("bash") if "#SBATCH" in text]
    root = Path(services.__file__).parents[2]
    script = script.replace("--nproc-per-node 4", "--nproc-per-node 1 --local-addr localhost")
    script = script.replace("--env-id mine:Mine-v0", SMALL)
    script = script.replace("cleanrl_graph/ppo_graph.py", f"{root}/cleanrl_graph/ppo_graph.py")
    (tmp_path / "job.sh").write_text(script)
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_in(folder / "scontrol", "#!/bin/bash\necho localhost\n")
    stand_in(folder / "srun", SRUN)
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    stand_in(folder / "torchrun", torchrun)
    for num_nodes, steps in ((2, 512), (1, 1024)):
        env = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "NUM_NODES": str(num_nodes),
            "SLURM_NNODES": str(num_nodes),
            "SLURM_JOB_ID": f"job{num_nodes}",
            "SLURM_JOB_NODELIST": "localhost",
            "OMP_NUM_THREADS": "1",
        }
        text = (tmp_path / "job.sh").read_text().replace("timesteps 512", f"timesteps {steps}")
        (tmp_path / "job.sh").write_text(text)
        job = ["bash", "job.sh"]
        done = subprocess.run(
            job, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        flags = json.loads(next(tmp_path.glob("runs/*/args.json")).read_text())
        assert flags["world_size"] == num_nodes and flags["total_timesteps"] == steps
    assert "environments are 1 x 4, they were 2 x 2" in done.stderr
    assert list(tmp_path.glob("runs/*/checkpoint_000000001024.ckpt"))
