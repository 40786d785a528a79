"""Blocks that several scripts share are byte-identical.

    python tests/shared_blocks.py           lists the blocks that differ from ppo_graph.py, exit code 1 if any does
    python tests/shared_blocks.py --write   copies ppo_graph.py's blocks into the other scripts

A block stands between the lines `# --- shared: NAME ---` and `# --- end shared: NAME ---`.
"""

import re
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "cleanrl_graph"
BLOCK = re.compile(r"^# --- shared: (?P<name>[^\n]+) ---\n.*?^# --- end shared: (?P=name) ---\n", re.S | re.M)


def blocks(text: str) -> dict[str, str]:
    """Name -> text of every shared block, marker lines included. ValueError for a marker without its partner."""
    found = {match["name"]: match[0] for match in BLOCK.finditer(text)}
    markers = re.findall(r"^# --- (?:end )?shared: ", text, re.MULTILINE)
    if len(markers) != 2 * len(found):
        raise ValueError(f"{len(markers)} marker lines for {len(found)} blocks: each needs a start and an end")
    return found


def compare(folder: Path, write: bool = False) -> list[str]:
    """One line per block of a script that differs from ppo_graph.py's; with `write` the block is replaced."""
    source = blocks((folder / "ppo_graph.py").read_text())
    differences = []
    for script in sorted(folder.glob("ppo_*.py")):
        text = script.read_text()
        for name, block in blocks(text).items():
            if name not in source:
                differences.append(f"{script.name}: block '{name}' does not exist in ppo_graph.py")
            elif block != source[name]:
                differences.append(f"{script.name}: block '{name}' differs from ppo_graph.py")
                text = text.replace(block, source[name])
        if write:
            script.write_text(text)
    return differences


if __name__ == "__main__":
    lines = compare(SCRIPTS, write="--write" in sys.argv)
    print("\n".join(lines) or "all shared blocks are identical")
    sys.exit(bool(lines) and "--write" not in sys.argv)
