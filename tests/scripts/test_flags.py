"""The flags of the whole scripts."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path.stem for path in sorted((ROOT / "cleanrl_graph").glob("ppo_*.py"))]
SCRIPTS = [name for name in SCRIPTS if not name.endswith("_mini")]


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
