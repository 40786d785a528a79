"""Which flags the whole scripts have."""

import ast
import csv
import re
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path.stem for path in sorted((ROOT / "cleanrl_graph").glob("ppo_*.py"))]
SCRIPTS = [name for name in SCRIPTS if not name.endswith("_mini")]
CLEANRL = set(
    "exp_name seed torch_deterministic cuda save_model env_id total_timesteps learning_rate "
    "num_envs num_steps anneal_lr gamma gae_lambda num_minibatches update_epochs norm_adv "
    "clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl num_iterations".split()
)
# The only way to something that the scripts promise
PROMISED = {"state_dependent_std": "both kinds of log-std", "aux_coef": "a weight of the loss"}


def texts():
    """Benchmarks, the commands that made the tables, and the pages but for the changelog."""
    csv.field_size_limit(sys.maxsize)
    for pattern in ("benchmark/**/*.sh", "benchmark/**/*.py", "**/*.md"):
        for path in ROOT.glob(pattern):
            if path.name != "CHANGELOG.md" and ".venv" not in path.parts:
                yield path.read_text()
    for path in ROOT.glob("benchmark/results/*/runs.csv"):
        with open(path, newline="") as file:
            yield "\n".join(row["command"] for row in csv.DictReader(file))


@pytest.fixture(scope="module")
def used():
    """The flags in these texts and in the first lines of the scripts, and keyword arguments."""
    found = set()
    heads = [import_module(f"cleanrl_graph.{name}").__doc__ for name in SCRIPTS]
    for text in [*texts(), *heads]:
        for flag, argument in re.findall(r"--(?:no-)?([a-z][\w-]+)|\b([a-z]\w*)=", text):
            found.add(flag.replace("-", "_") or argument)
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_flag_without_a_use(name, used):
    """Each has CleanRL's name, a row of a table, a command of a page, or is promised."""
    names = {field.name for field in fields(import_module(f"cleanrl_graph.{name}").Args)}
    assert names - CLEANRL - used - set(PROMISED) == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    """The script, not only its Args, has the name of each flag."""
    text = (ROOT / "cleanrl_graph" / f"{name}.py").read_text()
    (args,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "Args"
    ]
    read = set(re.findall(r"\bargs\.(\w+)", text))
    names = {node.target.id for node in args.body if isinstance(node, ast.AnnAssign)}
    assert names <= read
