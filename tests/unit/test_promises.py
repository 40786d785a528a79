"""What is promised of every script: an idea is short, a script runs alone and imports nothing of
the project, what scripts share is the same in all, and each flag is read, shown and alike."""

import ast
import dataclasses
import importlib
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import shared_blocks
from helpers import MY_ENV, command, run_folder

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import arguments

FOLDER = Path(ppo_graph.__file__).parent
SCRIPTS = [path.stem for path in shared_blocks.scripts(FOLDER)]
MEMORIES = [name for name in ("ppo_framestack", "ppo_gtrxl", "ppo_lstm_sparse") if name in SCRIPTS]
SERVICES = sorted((FOLDER / "services").glob("*.py"))
IDEAS = sorted(path.stem for path in FOLDER.glob("*_mini.py"))

SHARED = {"observations", "environments", "storage", "encoder", "action heads", "ranks", "run"}
SHARED |= {"train", "play"}
TUNED = set(  # flags with other defaults where there is a memory
    "norm_obs learning_rate num_envs update_epochs adv_floor adv_floor_decay amsgrad clip_vloss "
    "ent_coef target_kl norm_vloss".split()
)
RUNTIME = {"num_iterations"}


def source(name):
    return (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize("name", IDEAS)
def test_an_idea_is_short(name):
    """It has at most 380 lines, and shares none of them."""
    text = source(name)
    assert text.count("\n") <= 380 and "# --- shared:" not in text


def is_args(node):
    """Whether an expression is `args`, or `run.args` of anything that keeps them."""
    if isinstance(node, ast.Attribute):
        return node.attr == "args"
    return isinstance(node, ast.Name) and node.id == "args"


@cache
def read_fields(path):
    """The names NAME of all `args.NAME` that are read in a file, outside of the class Args."""
    found = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ClassDef) and statement.name == "Args":
            continue
        for node in ast.walk(statement):
            is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            if is_read and is_args(node.value):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """In the script or, those of the services, there. No flag is both."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    fields = {field.name for field in dataclasses.fields(script.Args)} - RUNTIME
    assert fields - read_fields(FOLDER / f"{name}.py") == set()
    services = {field.name for field in dataclasses.fields(arguments.flags_of(script))}
    assert not services & fields
    texts = "".join(path.read_text() for path in SERVICES)
    named = {flag for flag in services if f'getattr(args, "{flag}"' in texts}
    assert services - set().union(*map(read_fields, SERVICES)) - named == set()


def test_help():
    """It has each flag but those that are filled in at run time."""
    code, text, _ = command("--help", script=ppo_graph)
    flags = vars(arguments.args_of(ppo_graph))
    shown = {flag for flag in flags if f"--{flag.replace('_', '-')}" in text}
    assert code == 0 and shown == set(flags) - RUNTIME


def fields_of(path, name="Args"):
    """[(field, the statement after it)] of a class of flags."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == name]
    pairs = zip(body, [*body[1:], None])
    return [(field.target.id, doc) for field, doc in pairs if isinstance(field, ast.AnnAssign)]


# None by default: as the observations ask for
OTHER_TYPE = [("ppo_lstm_sparse", "update_epochs"), ("ppo_gtrxl", "update_epochs")]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "ppo_graph"])
def test_flags_of_all_scripts_are_alike(name):
    """Same types, defaults and docstrings, but for the environment and what memories need to learn;
    a docstring may go on after that of ppo_graph.py."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    theirs = {field.name: (field.type, field.default) for field in dataclasses.fields(script.Args)}
    ours = {field.name: (field.type, field.default) for field in dataclasses.fields(ppo_graph.Args)}
    our_docs, docs = docs_of("ppo_graph"), docs_of(name)
    for field in set(ours) & set(theirs) - {"exp_name", "env_id", "env_kwargs"}:
        if (name, field) not in OTHER_TYPE:
            assert theirs[field][0] == ours[field][0], field
        tuned = name in MEMORIES and field in TUNED
        tuned |= (name, field) == ("ppo_graph_agents", "learning_rate")
        assert tuned or str(theirs[field][1]) == str(ours[field][1]), field
        assert docs[field].startswith(our_docs[field]), field
    assert name not in MEMORIES or set(ours) <= set(theirs)


def test_table_of_other_defaults():
    """The guide's table has each default in which a script differs from ppo_graph.py, as it is."""
    guide = (FOLDER / "README.md").read_text()
    section = guide.partition("\n## Other defaults\n")[2].partition("\n## ")[0]
    (_, *names), _, *rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")
    ]
    names = [name.strip("`") for name in names]
    table = {row[0].strip("`-").replace("-", "_"): dict(zip(names, row[1:])) for row in rows}
    defaults = {}
    for name in SCRIPTS:
        defaults[name] = vars(importlib.import_module(f"cleanrl_graph.{name}").Args())
    words = {True: "yes", False: "no", None: "none"}
    differ = set()
    for name, own in defaults.items():
        for flag, value in own.items():
            base = defaults["ppo_graph"].get(flag, value)
            if value != base and flag not in ("exp_name", "env_id"):
                differ.add(flag)
                assert name in names, name
    assert set(table) == differ
    for flag, cells in table.items():
        for name, cell in cells.items():
            value = defaults[name][flag]
            is_word = value is None or isinstance(value, bool)
            text = words[value] if is_word else f"{value:g}"
            is_filled_in = flag == "update_epochs" and value is None
            assert cell == ("(1)" if is_filled_in else text), (flag, name)


@cache
def docs_of(name):
    """Flag -> docstring, in one line."""
    fields = fields_of(FOLDER / f"{name}.py")
    return {field: " ".join(doc.value.value.split()) for field, doc in fields}


@pytest.mark.parametrize("name", [*SCRIPTS, "ppo_graph_mini"])
def test_runs_alone(name, tmp_path, monkeypatch):
    """Copied into an empty folder, where there is no package, a script trains, plays and leaves its
    log. It finds environments of the folder where it is started."""
    monkeypatch.setitem(sys.modules, "cleanrl_graph", None)  # cannot be imported
    copy = tmp_path / "algorithms" / "mine.py"
    copy.parent.mkdir()
    copy.write_text(source(name))
    with pytest.raises(ModuleNotFoundError, match="cleanrl_graph"):
        importlib.import_module("cleanrl_graph")
    env = "Each" if name == "ppo_graph_agents" else "Mine"
    flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 64 --no-cuda".split()
    flags += ["--env-id", f"alone_envs:{env}-v0"]
    if name not in IDEAS:
        flags += ["--eval-episodes", 1, "--run-dir", tmp_path / "runs", "--save-model"]
    if name == "ppo_graph_compile":
        flags += ["--compile-mode", "none"]
    (tmp_path / "alone_envs.py").write_text(ALONE_ENVS)
    code, out, err = command(*flags, script=SimpleNamespace(__file__=str(copy)), cwd=tmp_path)
    assert code == 0, err
    folder = run_folder(tmp_path / "runs")
    assert folder.name.startswith(f"{env}-v0__mine__1__") and list(folder.glob("events*"))
    if name not in IDEAS:
        assert "returns of greedy episodes: " in out and (folder / "model.pt").exists()


ALONE_ENVS = f"""{MY_ENV}

class Each(Env):
    observation_space = gym.spaces.Sequence(gym.spaces.Box(-1, 1, (2,)), stack=True)
    action_space = gym.spaces.Sequence(gym.spaces.Discrete(2))

    def observe(self):
        return np.ones((3, 2), np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), 0.0, False, self.t == 5, dict(rewards=np.array(action, float))

gym.register("Each-v0", entry_point=Each)
"""


def test_shared_blocks_are_identical():
    """The blocks that scripts share are the same bytes, those of ppo_graph.py in its order."""
    assert shared_blocks.compare(FOLDER) == []
    names = list(shared_blocks.blocks(source("ppo_graph")))
    assert SHARED <= set(names)
    for script in SCRIPTS:
        theirs = [name for name in shared_blocks.blocks(source(script)) if name in names]
        assert theirs == [name for name in names if name in theirs]
        assert script not in MEMORIES or SHARED <= set(theirs)
