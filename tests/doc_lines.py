"""Links of the pages in cleanrl_graph/docs/ to lines of scripts lead to the code that they show.

    python tests/doc_lines.py
    python tests/doc_lines.py --write

The text of such a link is code, as [`def pool(`](../ppo_graph.py#L738): exactly one line of the
file has it, and the number is that of this line. The first command lists the links whose number is
another one, or whose code stands in no line, or in several; its exit code is then 1. The second one
writes the right numbers. Code that is gone needs another link, by hand.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "cleanrl_graph" / "docs"
LINK = re.compile(r"\[`(?P<code>[^`\n]+)`\]\((?P<file>[^()\s#]+\.py)#L(?P<line>\d+)\)")


def lines_with(code: str, text: str) -> list[int]:
    """The numbers, from 1 on, of the lines that have this code."""
    return [i for i, line in enumerate(text.splitlines(), 1) if code in line]


def compare(folder: Path = DOCS, write: bool = False) -> list[str]:
    """One line per link that is wrong; with `write` the numbers of these links are replaced."""
    problems = []
    for page in sorted(folder.glob("*.md")):

        def mend(link: re.Match) -> str:
            place = f"{page.name}: `{link['code']}` in {link['file']}"
            found = lines_with(link["code"], (page.parent / link["file"]).read_text())
            if len(found) != 1:
                problems.append(f"{place}: {len(found)} lines have it, not one")
                return link[0]
            if found[0] == int(link["line"]):
                return link[0]
            problems.append(f"{place}: line {link['line']} should be {found[0]}")
            return f"[`{link['code']}`]({link['file']}#L{found[0]})"

        text = LINK.sub(mend, page.read_text())
        if write:
            page.write_text(text)
    return problems


if __name__ == "__main__":
    before = compare(write="--write" in sys.argv)
    print("\n".join(before) or "all links lead to their lines")
    left = compare() if "--write" in sys.argv else before
    sys.exit(bool(left))
