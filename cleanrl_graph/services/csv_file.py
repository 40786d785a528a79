"""cleanrl_graph, a csv of a run, which grows by rows, and by columns where a row has new ones."""

import csv
from collections.abc import Iterable
from pathlib import Path

from cleanrl_graph.services.process import whole


class CsvFile:
    """`CsvFile(path, columns)`, then `keep(step)`, then `write(rows)`. A row need not have all
    columns."""

    def __init__(self, path: Path, columns: Iterable[str]):
        self.path = path
        self.columns = list(columns)

    def keep(self, step: int) -> list[dict]:
        """Begins the file with the rows until `step`, a column of all, that are there. Returns
        them."""
        kept = []
        for row in read(self.path):
            # A run that was killed may have left a part of a row
            is_whole = None not in {*row, *row.values()} and row.get("step", "").isdigit()
            if is_whole and int(row["step"]) <= step:
                kept.append(row)
        self.begin(kept)
        return kept

    def begin(self, rows: list[dict]) -> None:
        """Writes the file anew, with the columns of these rows, too."""
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with whole(self.path) as unfinished, open(unfinished, "w", newline="") as file:
            lines = csv.DictWriter(file, self.columns, lineterminator="\n")
            lines.writeheader()
            lines.writerows(rows)
        self.file = open(self.path, "a", newline="")

    def write(self, rows: list[dict]) -> None:
        if {name for row in rows for name in row} <= set(self.columns):
            csv.DictWriter(self.file, self.columns, lineterminator="\n").writerows(rows)
            self.file.flush()
        else:
            self.file.close()
            self.begin([*read(self.path), *rows])

    def close(self) -> None:
        self.file.close()


def read(path: Path) -> list[dict]:
    """The rows of a csv, as text; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
