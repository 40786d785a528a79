"""Blocks that several scripts share are byte-identical.

    python tests/shared_blocks.py
    python tests/shared_blocks.py --write
    python tests/shared_blocks.py --write ppo_gtrxl.py

The first command lists the blocks that differ from their source, and its exit code is then 1. The
second one copies the source's blocks into the other scripts, the third one into this one alone. The
source of a block is ppo_graph.py or, where it lacks the block, the first script that has it.

A block stands between the lines `# --- shared: NAME ---` and `# --- end shared: NAME ---`. Scripts
without the one that is named observations are left out.
"""

import re
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "cleanrl_graph"
BLOCK = re.compile(
    r"^# --- shared: (?P<name>[^\n]+) ---\n.*?^# --- end shared: (?P=name) ---\n", re.S | re.M
)


def blocks(text: str) -> dict[str, str]:
    """Name -> text of every shared block, marker lines included. ValueError for a marker without
    its partner."""
    found = {match["name"]: match[0] for match in BLOCK.finditer(text)}
    markers = re.findall(r"^# --- (?:end )?shared: ", text, re.MULTILINE)
    if len(markers) != 2 * len(found):
        raise ValueError(
            f"{len(markers)} marker lines for {len(found)} blocks: each needs a start and an end"
        )
    return found


def scripts(folder: Path = SCRIPTS) -> list[Path]:
    """The scripts that have the blocks, ppo_graph.py first, the others in alphabetical order."""
    found = [
        path
        for path in folder.glob("ppo_*.py")
        if "# --- shared: observations ---\n" in path.read_text()
    ]
    return sorted(found, key=lambda path: (path.name != "ppo_graph.py", path.name))


def compare(folder: Path, write: bool = False, names: list[str] = ()) -> list[str]:
    """One line per block of a script (of `names` if there are any) that differs from its source's;
    with `write` the block is replaced."""
    source = {}  # name of a block -> (name of the first script that has it, text)
    differences = []
    for script in scripts(folder):
        text = script.read_text()
        for name, block in blocks(text).items():
            first, expected = source.setdefault(name, (script.name, block))
            if block != expected and (not names or script.name in names):
                differences.append(f"{script.name}: block '{name}' differs from {first}")
                text = text.replace(block, expected)
        if write:
            script.write_text(text)
    return differences


if __name__ == "__main__":
    names = [Path(name).name for name in sys.argv[1:] if name != "--write"]
    if unknown := set(names) - {script.name for script in scripts()}:
        sys.exit(
            f"{', '.join(sorted(unknown))}: no such script in {SCRIPTS}, or it has no block "
            f"'observations'"
        )
    lines = compare(SCRIPTS, "--write" in sys.argv, names)
    print("\n".join(lines) or "all shared blocks are identical")
    sys.exit(bool(lines) and "--write" not in sys.argv)
