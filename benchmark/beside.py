"""Tables that were made anew, beside the committed ones; `bash benchmark/NAME.sh --out DIR` ends
with it.

    python benchmark/beside.py DIR [COMMITTED]      # COMMITTED: benchmark/results by default

For each table of a markdown file in DIR: its rows, each below the committed row of the same name. A
row's name are its cells before the first number. Rows that only one of the two has stand alone.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import tables

NUMBER = re.compile(r"[*-]*\d")


def tables_of(text: str) -> dict[tuple[str, str], list[list[str]]]:
    """(heading, header line) -> rows of a table, without those of dashes."""
    found, heading, header = {}, "", None
    for line in text.split("\n"):
        if line.startswith("#"):
            heading = line.strip("# ")
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = line.strip()
            found.setdefault((heading, header), [])
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[heading, header].append(cells)
    return found


def named(rows: list[list[str]]) -> dict[tuple, list[str]]:
    """Name of each row, and how many of that name came before it -> the row."""
    found, counts = {}, Counter()
    for row in rows:
        num = next((k for k, cell in enumerate(row) if NUMBER.match(cell)), len(row))
        name = tuple(row[: max(num, 1)])
        found[name, counts[name]] = row
        counts[name] += 1
    return found


def beside(committed: str, own: str) -> list[str]:
    """Lines of both texts' tables, as far as the second has them."""
    lines, theirs = [], tables_of(committed)
    for (heading, header), rows in tables_of(own).items():
        lines += ["", heading, f"| | {header.strip('| ')} |"]
        known, new = named(theirs.get((heading, header), [])), named(rows)
        for key in dict.fromkeys([*known, *new]):
            for who, each in (("committed", known), ("yours", new)):
                if key in each:
                    lines.append(f"| {who} | {' | '.join(each[key])} |")
    return lines


def main(out: str, committed: str = str(tables.COMMITTED)) -> None:
    for path in sorted(Path(out).rglob("*.md")):
        if "runs" in path.relative_to(out).parts:
            continue
        other = Path(committed, path.relative_to(out))
        before = other.read_text() if other.exists() else ""
        lines = beside(before, path.read_text())
        if lines:
            print(f"\n{path}, committed: {other if before else 'nothing'}", *lines, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
