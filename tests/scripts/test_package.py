"""Where a script and the package are found: a script that is copied alone or changed, modules of
one's own that have the names of ours, and an installed package."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import shared_blocks
from gymnasium.envs.registration import EnvSpec
from helpers import MY_ENV, command, run_folder
from packaging.requirements import Requirement

import cleanrl_graph
from cleanrl_graph import ppo_graph

ROOT = Path(cleanrl_graph.__file__).parents[1]
SCRIPTS = {path.stem: path for path in shared_blocks.scripts()}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"
SHORT = ["--total-timesteps", "256", "--num-envs", "4", "--num-steps", "32"]
SHORT += ["--num-minibatches", "2", "--save-model", "--eval-episodes", "2", "--no-cuda"]


def python(*arguments, cwd, path=()) -> subprocess.CompletedProcess:
    """The finished process of this interpreter in a folder, with these folders on PYTHONPATH."""
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT | more, capture_output=True, text=True)


# ---- A script that is copied alone ----


def test_alone_each_task_is_played(tmp_path, monkeypatch):
    """Greedy episodes are of the entries of --env-kwargs in turn."""
    played = []
    play = ppo_graph.play
    noted = lambda *args, **kwargs: played.append(play(*args, **kwargs)) or played[-1]
    monkeypatch.setattr(ppo_graph, "play", noted)
    flags = dict(env_id="cleanrl_graph.envs:Recall-v0", env_kwargs=[{"length": 3}, {"length": 6}])
    flags |= dict(total_timesteps=256, num_steps=64, eval_episodes=4, cuda=False)
    flags |= dict(hidden_dims=(8,), update_epochs=1)
    ppo_graph.main(ppo_graph.Args(run_dir=str(tmp_path), **flags))
    (infos,) = played
    lengths = [info["episode"]["l"] for info in infos]
    assert lengths[0] < lengths[1] and lengths == lengths[:2] * 2


# ---- A script that is copied and changed, and the services ----
def test_copied_and_changed(tmp_path, monkeypatch):
    """Where the package is installed a copy, here with other rewards, has all services; a program
    finds it beside itself."""
    old = "rewards[t] = step.reward\n"
    text = SCRIPTS["ppo_graph"].read_text()
    assert text.count(old) == 1
    (tmp_path / "my_ppo.py").write_text(text.replace(old, "rewards[t] = 2 * step.reward\n"))
    (tmp_path / "my_env.py").write_text(MY_ENV)
    flags = ["--env-id", "my_env:Mine-v0", "--wrap", "z:uniform:2", *SHORT]
    flags += ["--num-workers", "2", "--checkpoint-every", "1"]
    copy = SimpleNamespace(__file__=str(tmp_path / "my_ppo.py"))
    code, out, err = command(*flags, script=copy, cwd=tmp_path)
    assert code == 0, err
    folder = run_folder(tmp_path / "runs")
    assert "| **mean** |" in out and "__my_ppo__" in folder.name
    assert max(folder.glob("*.ckpt")).stem == "checkpoint_000000000256"
    call = f"cleanrl_graph.load_policy('{folder / 'model.pt'}', script=my_ppo)"
    assert out.endswith(f"in a program: {call}\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = {"cleanrl_graph": cleanrl_graph, "my_ppo": importlib.import_module("my_ppo")}
    policy = eval(call, names)
    obs, _ = policy.make_env().reset()
    assert policy.script is names["my_ppo"] and 0 <= policy(obs) < 6
    for name in ("my_ppo", "my_env"):
        sys.modules.pop(name, None)
    gym.registry.pop("Mine-v0", None)


# ---- Modules of one's own ----
OWN_ENVS = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

gym.register("JobShop-v0", entry_point=CartPoleEnv, max_episode_steps=20)
"""
OWN_WRAPPER = """
import gymnasium as gym
import envs
import services


def check(env):
    words = ["wrapped", type(env.unwrapped).__name__, envs.__file__]
    words += [services.__file__, services.mine]
    print(" ".join(words) + "\\n", end="")  # in one piece: processes print at the same time
    return env
"""


@pytest.mark.slow
def test_modules_of_ones_own(tmp_path):
    """`envs` and `services` in the current folder are what these names import."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text(OWN_ENVS)
    (tmp_path / "services.py").write_text("mine = 'yes'")
    (tmp_path / "my_wrapper.py").write_text(OWN_WRAPPER)
    flags = ["--env-id", "envs:JobShop-v0", "--wrap", "my_wrapper:check", "hide:1", *SHORT]
    flags += ["--num-workers", "2"]
    done = python(SCRIPTS["ppo_graph"], *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("wrapped")]
    own = f"wrapped CartPoleEnv {tmp_path}/envs/__init__.py {tmp_path}/services.py yes"
    assert said and set(said) == {own}
    assert list(tmp_path.glob("runs/*/*.ckpt"))


def test_ids_of_others_stay_theirs(monkeypatch):
    """The package takes no id away that was registered before it was imported."""
    theirs = EnvSpec("JobShop-v0", entry_point="somebody:Else")
    monkeypatch.setitem(gym.registry, "JobShop-v0", theirs)
    monkeypatch.delitem(gym.registry, "Recall-v0")
    importlib.reload(cleanrl_graph.envs)
    assert gym.registry["JobShop-v0"] is theirs
    assert gym.registry["Recall-v0"].entry_point == "cleanrl_graph.envs.memory:RecallEnv"


# ---- Installed ----
def project() -> dict:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_ranges_hold_the_pinned_versions():
    """requirements.txt pins dependencies in versions that are allowed."""
    extras = project()["project"]["optional-dependencies"]
    allowed = [*project()["project"]["dependencies"], *extras["track"], *extras["test"]]
    ranges = {Requirement(line).name: Requirement(line).specifier for line in allowed}
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    assert set(ranges) == set(pins)
    for name, version in pins.items():
        assert ranges[name].contains(version), name
    lines = (ROOT / "benchmark" / "requirements.txt").read_text().splitlines()
    names = {line.split("==")[0] for line in lines if not line.startswith("#")}
    assert set(extras["benchmark"]) == names


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is packed, so that nothing is built in the checkout."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "runs")
    shutil.copytree(ROOT / "cleanrl_graph", folder / "cleanrl_graph", ignore=ignored)
    return folder


def pip(*arguments, cwd):
    """Runs pip without network."""
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = python("-m", "pip", *arguments, *offline, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


PROGRAM = """
import sys
from cleanrl_graph import __file__ as file
from cleanrl_graph import load_policy

policy = load_policy(sys.argv[1])
env = policy.make_env()
print(file, env.action_space.contains(policy(env.reset(seed=1)[0])))
"""


@pytest.mark.slow
def test_wheel(source, tmp_path):
    """A wheel that is built and installed trains and plays outside of the checkout."""
    pip("wheel", source, "--wheel-dir", tmp_path / "wheels", cwd=tmp_path)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith(f"cleanrl_graph-{cleanrl_graph.__version__}-py3")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    files = {path for path in (source / "cleanrl_graph").rglob("*") if path.is_file()}
    assert packed == {str(path.relative_to(source)) for path in files}
    folder, site = tmp_path / "elsewhere", [tmp_path / "site"]
    folder.mkdir()
    pip("install", wheel, "--target", *site, cwd=tmp_path)
    flags = ["--env-id", "envs:JobShop-v0", "--env-kwargs", '{"jobs": 3, "machines": 3}', *SHORT]
    flags += ["--eval-suite", "ft", "--eval-samples", "0"]
    done = python("-m", "cleanrl_graph.ppo_graph", *flags, cwd=folder, path=site)
    assert done.returncode == 0 and "ft06" in done.stdout, done.stderr
    model = run_folder(folder / "runs") / "model.pt"
    done = python("-c", PROGRAM, model, cwd=folder, path=site)
    file, is_legal = done.stdout.split()
    assert Path(file).is_relative_to(*site) and is_legal == "True", done.stderr


@pytest.mark.slow
def test_editable(source, tmp_path):
    """After `pip install -e .` the checkout's own files are what is imported, also in the folder
    above it, where Python sees a folder of the package's name."""
    checkout = shutil.copytree(source, tmp_path / "cleanrl_graph")
    pip("install", "--editable", checkout, "--target", tmp_path / "site", cwd=tmp_path)
    # reads the .pth files of a folder, as Python does with those of its own
    program = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    program += "from cleanrl_graph import load_policy, ppo_graph\nprint(ppo_graph.__file__)"
    for folder in (tmp_path, tmp_path / "site"):
        done = python("-c", program, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).is_relative_to(checkout)
