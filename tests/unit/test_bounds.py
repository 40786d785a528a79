"""Every script is read in one sitting: how much it holds, how packed it is, its flags, the blocks
it shares, and what it does not import."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
import typing
from pathlib import Path

import density
import pytest
import shared_blocks
import tyro

from cleanrl_graph import ppo_graph

FOLDER = Path(ppo_graph.__file__).parent
README = FOLDER.parent / "README.md"
SCRIPTS = [path.stem for path in shared_blocks.scripts(FOLDER)]
MEMORIES = [name for name in ("ppo_framestack", "ppo_gtrxl", "ppo_lstm_sparse") if name in SCRIPTS]
MODULES = sorted([*(FOLDER / "envs").glob("*.py"), *(FOLDER / "utils").glob("*.py")])
# tokens of each script (tests/density.py); the memories are what is longer than ppo_graph.py
TOKENS = {
    "ppo_graph": 11_950,
    "ppo_framestack": 13_950,
    "ppo_gtrxl": 15_100,
    "ppo_lstm_sparse": 15_900,
    "ppo_graph_async": 13_150,
    "ppo_graph_aux": 14_000,
    "ppo_graph_compile": 13_000,
    "ppo_graph_agents": 12_800,
}
TOKENS_WITH_SERVICES = 26_400  # of ppo_graph.py and utils/: what moves there is not gone
MAX_FLAGS = 52
SHARED = {
    "observations",
    "environments",
    "storage",
    "encoder",
    "action heads",
    "ranks",
    "run",
    "train",
}
TUNED = {  # flags with other defaults where there is a memory
    "norm_obs",
    "learning_rate",
    "num_envs",
    "update_epochs",
    "clip_vloss",
    "ent_coef",
    "target_kl",
    "norm_vloss",
    "stay_solved",
}
RUNTIME = {"batch_size", "world_size", "num_iterations"}


def source(name):
    return (FOLDER / f"{name}.py").read_text()


def is_suppressed(script, field):
    hint = typing.get_type_hints(script.Args, include_extras=True)[field.name]
    return tyro.conf.Suppress[int] == hint


def density_of(name):
    return density.measure(source(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_size(name):
    """A script is read in one sitting."""
    assert density_of(name).tokens <= TOKENS[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_density(name):
    """A script is short because it does little, not because much is packed into a line."""
    figures = density_of(name)
    assert figures.tokens_per_line <= 10.5
    assert figures.packed_per_thousand <= 10


def longer(figures, limit):
    """The functions with more tokens than the limit."""
    return {function: num for function, num in figures.functions.items() if num > limit}


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions(name):
    """A function has one job; `train` is the algorithm, from the first line to the last."""
    figures = density_of(name)
    (train,) = [function for function in figures.functions if function.startswith("train:")]
    assert figures.functions.pop(train) <= 1_400
    assert longer(figures, 350) == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_environments_and_services(path):
    """They are written like the scripts."""
    figures = density.measure(path.read_text())
    assert figures.tokens_per_line <= 11
    assert figures.packed_per_thousand <= 12
    assert longer(figures, 400) == {}


def test_size_with_services():
    """What a run needs beside ppo_graph.py is small, too. No run needs the export."""
    export = FOLDER / "utils/export.py"
    assert density.measure(export.read_text()).tokens <= 3_300
    paths = {FOLDER / "ppo_graph.py", *(FOLDER / "utils").glob("*.py")} - {export}
    assert sum(density.measure(path.read_text()).tokens for path in paths) <= TOKENS_WITH_SERVICES


def test_everything_is_formatted():
    """By ruff, with the line length of pyproject.toml."""
    ruff = [sys.executable, "-m", "ruff", "format", "--check", FOLDER.parent]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


SMALL = """import re


class Words(list):
    \"\"\"Not counted.\"\"\"

    size: int = 0
    \"\"\"Neither is this.\"\"\"

    def longest(
        self, least: dict[str, int], *names: str
    ) -> dict[str, int]:  # nor are annotations
        a, b = 1, 2
        c = d = [x for x in self if x]
        return max(*c, key=lambda word: f"{word} {a + b}")
"""


def test_what_is_counted():
    """Tokens, lines and packed constructs of a small file, counted by hand."""
    figures = density.measure(SMALL)
    words = (
        "import re class Words ( list ) : size : int = 0 def longest ( self , least , * names ) :"
    )
    words += " a , b = 1 , 2 c = d = [ x for x in self if x ]"
    words += " return max ( * c , key = lambda word : f-string )"
    assert figures.tokens == len(words.split())
    assert figures.lines == 15 and figures.code_lines == 9
    assert figures.packed == 5  # the pair, the chain, the comprehension, the star, the lambda
    assert figures.functions == {"Words.longest:10": figures.tokens - 13}


def test_readme_length():
    """The README is read in one sitting, too."""
    assert len(README.read_text().splitlines()) <= 250


def test_number_of_flags():
    """They are few; those filled in at run time are no flags."""
    fields = dataclasses.fields(ppo_graph.Args)
    suppressed = {field.name for field in fields if is_suppressed(ppo_graph, field)}
    assert suppressed == RUNTIME and len(fields) - len(suppressed) <= MAX_FLAGS


def is_args(node):
    """Whether an expression is `args`, or `run.args` of anything that keeps them."""
    if isinstance(node, ast.Attribute):
        return node.attr == "args"
    return isinstance(node, ast.Name) and node.id == "args"


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
    """No dead flags: every Args field is read in the script, or in a service that is handed
    `args`."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    read = set().union(*map(read_fields, [FOLDER / f"{name}.py", *(FOLDER / "utils").glob("*.py")]))
    fields = {
        field.name for field in dataclasses.fields(script.Args) if not is_suppressed(script, field)
    }
    assert fields - read == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_every_flag(name, capsys):
    """Every Args field but those filled in at run time is in --help, with a docstring of its
    own."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    with pytest.raises(SystemExit):
        tyro.cli(script.Args, args=["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    body = next(
        node.body
        for node in ast.parse(source(name)).body
        if isinstance(node, ast.ClassDef) and node.name == "Args"
    )
    flags = [
        (field.target.id, doc)
        for field, doc in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign)
    ]
    assert {flag for flag, _ in flags} == {field.name for field in dataclasses.fields(script.Args)}
    for flag, doc in flags:
        assert isinstance(doc, ast.Expr) and len(doc.value.value) > 10, f"{flag} has no docstring"
        assert (f"--{flag.replace('_', '-')}" in text) == (flag not in RUNTIME), flag


OTHER_TYPE = [
    ("ppo_lstm_sparse", "norm_vloss"),  # a number, which a toggle's 1 is elsewhere
    # None by default: as the observations ask for
    ("ppo_lstm_sparse", "update_epochs"),
    ("ppo_gtrxl", "update_epochs"),
    ("ppo_gtrxl", "ent_coef"),
]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "ppo_graph"])
def test_flags_of_all_scripts_are_alike(name):
    """A flag of ppo_graph.py that a script has, too, has the same type and default there, but for
    the environment and for what memories need to learn (benchmark/results/memory_defaults)."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    theirs = {field.name: (field.type, field.default) for field in dataclasses.fields(script.Args)}
    ours = {field.name: (field.type, field.default) for field in dataclasses.fields(ppo_graph.Args)}
    for field in set(ours) & set(theirs) - {"exp_name", "env_id", "env_kwargs"}:
        if (name, field) not in OTHER_TYPE:
            assert theirs[field][0] == ours[field][0], field
        tuned = name in MEMORIES and field in TUNED
        tuned |= (name, field) == ("ppo_graph_agents", "learning_rate")
        assert tuned or str(theirs[field][1]) == str(ours[field][1]), field
    assert name not in MEMORIES or set(ours) <= set(theirs)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_imports_another(name):
    """A script that is copied alone works: on top it imports nothing of the project."""
    local = {path.stem for path in FOLDER.iterdir()} | {"benchmark", "tests"}
    for node in ast.walk(ast.parse(source(name))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, ast.unparse(node)
            names.append(node.module)
        assert not {name.split(".")[0] for name in names} & local, names


@pytest.mark.parametrize(
    "path", sorted((FOLDER / "utils").glob("*.py")), ids=lambda path: path.stem
)
def test_services_import_no_script(path):
    """What is beside the scripts is handed their parts."""
    imported = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not {name.split(".")[0] for name in imported} & {
        path.stem for path in FOLDER.glob("ppo_*.py")
    }


def test_shared_blocks_are_identical():
    """The blocks that scripts share are the same bytes, those of ppo_graph.py in its order."""
    assert shared_blocks.compare(FOLDER) == []
    names = list(shared_blocks.blocks(source("ppo_graph")))
    assert SHARED <= set(names)
    for script in SCRIPTS:
        theirs = [name for name in shared_blocks.blocks(source(script)) if name in names]
        assert theirs == [name for name in names if name in theirs]
        assert script not in MEMORIES or SHARED <= set(theirs)


def test_shared_blocks_tool(tmp_path):
    """A script whose block was changed is reported and repaired; the rest of it stays."""
    text = source("ppo_graph")
    (tmp_path / "ppo_graph.py").write_text(text)
    own = "\n# what a script does not share\n"
    doctored = text.replace("class Rows(nn.Module)", "class Lines(nn.Module)") + own
    assert doctored.count("class Lines(") == 1
    for name in ("ppo_one.py", "ppo_two.py"):
        (tmp_path / name).write_text(doctored)
    report = [
        f"{name}: block 'encoder' differs from ppo_graph.py"
        for name in ("ppo_one.py", "ppo_two.py")
    ]
    assert shared_blocks.compare(tmp_path) == report
    assert shared_blocks.compare(tmp_path, True, ["ppo_two.py"]) == report[1:]
    assert shared_blocks.compare(tmp_path, True) == report[:1]
    for name in ("ppo_one.py", "ppo_two.py"):
        assert (tmp_path / name).read_text() == text + own
    assert (tmp_path / "ppo_graph.py").read_text() == text and shared_blocks.compare(tmp_path) == []
    (tmp_path / "ppo_one.py").write_text(
        "# --- shared: encoder ---\nof a script without the others\n"
    )
    assert shared_blocks.compare(tmp_path) == []
    block = "# --- shared: memory ---\n{}\n# --- end shared: memory ---\n"
    observations = shared_blocks.blocks(text)["observations"]
    for name in ("one", "two"):  # a block that ppo_graph.py lacks: the first script is its source
        both = observations + block.format(name)
        (tmp_path / f"ppo_{name}.py").write_text(both)
    assert shared_blocks.compare(tmp_path, True) == [
        "ppo_two.py: block 'memory' differs from ppo_one.py"
    ]
    assert (tmp_path / "ppo_two.py").read_text() == (tmp_path / "ppo_one.py").read_text()
    (tmp_path / "ppo_odd.py").write_text("\n# --- shared: observations ---\nno end\n")
    with pytest.raises(ValueError, match="1 marker lines for 0 blocks"):
        shared_blocks.compare(tmp_path)


def test_shared_blocks_command(tmp_path):
    """The command lists differences with exit code 1; --write repairs them and exits with 0."""
    folder = tmp_path / "cleanrl_graph"
    folder.mkdir(), (tmp_path / "tests").mkdir()
    tool = tmp_path / "tests" / "shared_blocks.py"
    tool.write_text(Path(shared_blocks.__file__).read_text())
    text = source("ppo_graph")
    (folder / "ppo_graph.py").write_text(text)
    (folder / "ppo_other.py").write_text(text.replace("class Rows(", "class Lines("))

    def run(*flags):
        return subprocess.run([sys.executable, tool, *flags], capture_output=True, text=True)

    assert run().returncode == 1 and "ppo_other.py: block 'encoder' differs" in run().stdout
    assert run("--write", "ppo_graph.py").returncode == 0 and run().returncode == 1
    assert run("--write", "cleanrl_graph/ppo_other.py").returncode == 0
    assert (folder / "ppo_other.py").read_text() == text and "identical" in run().stdout
    assert (
        run("ppo_none.py").returncode == 1
        and "ppo_none.py: no such script" in run("ppo_none.py").stderr
    )
