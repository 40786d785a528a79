"""What the runs of a table have left, in benchmark/results/TABLE.

    python benchmark/tables.py popgym "lstm_*"      # names the finished runs; exit code 1: none

- runs.csv: a line per run and a column per setting (run.py says which). A value that is no text, or
  a text that could be taken for one, is JSON; an empty cell is a setting that the run has not.
- curves.csv.gz: the rows of all runs, with the run in the first column.

While a table is made, a run that has ended is two files of its own, runs/RUN.json and
runs/RUN.csv. They are read as if they stood in the other two, into which `pack` puts them.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

COMMITTED = Path(__file__).parent / "results"
# setup.sh sets the two for --out DIR
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", COMMITTED))
RUN_DIR = Path(os.environ.get("BENCHMARK_RUNS", COMMITTED.parents[1] / "runs"))
RUNS = "runs.csv"
CURVES = "curves.csv.gz"
csv.field_size_limit(2**31 - 1)  # the evaluation of a run is one cell


def write(path: Path, content: str | bytes) -> None:
    """The file is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def put(where: str | Path, text: str) -> None:
    """Writes text to a file; if `where` is FILE#NAME, as the section NAME of the file."""
    name, _, section = str(where).partition("#")
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if section:
        parts = re.split(
            r'^<a id="(\w+)"></a>\n', path.read_text() if path.exists() else "", flags=re.M
        )
        sections = dict(zip(parts[1::2], parts[2::2])) | {section: f"\n{text.strip(chr(10))}\n\n"}
        text = parts[0] + "".join(f'<a id="{key}"></a>\n{own}' for key, own in sections.items())
    write(path, text)


def place(results: str | Path, name: str) -> Path:
    """Where a file or folder is that `results` may lack, since the making of a table does not make
    it: there or in the committed results."""
    path = Path(results, name)
    return path if path.exists() else COMMITTED / name


def cell(value: object) -> str:
    """The text of a setting in runs.csv."""
    if isinstance(value, str) and value:
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value)


def setting(text: str) -> object:
    """The setting of a cell that is not empty."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@contextlib.contextmanager
def added(path: Path, columns: Iterable[str]) -> Iterator[Callable[[dict], None]]:
    """A function that adds a row to a csv file at once; keys that are no columns are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        if file.tell() == 0:
            writer.writeheader()

        def add(row: dict) -> None:
            writer.writerow(row)
            file.flush()

        yield add


def text_of(rows: list[dict[str, str]]) -> str:
    """A csv file with the columns of all rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def runs_of(folder: Path) -> dict[str, dict]:
    """Name of each run of a table -> its settings, in alphabetical order."""
    found = {}
    for row in read(folder / RUNS):
        name = row.pop("run")
        found[name] = {key: setting(text) for key, text in row.items() if text}
    for path in folder.glob("runs/*.json"):
        found[path.stem] = json.loads(path.read_text())
    return dict(sorted(found.items()))


def finished(folder: Path, pattern: str = "*") -> dict[str, dict]:
    """The runs whose exit code is 0 and whose name is like `pattern`."""
    return {
        name: run
        for name, run in runs_of(folder).items()
        if run["exit_code"] == 0 and fnmatchcase(name, pattern)
    }


def curves_of(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Name of each run of a table -> the rows of its curve."""
    found = {}
    if (folder / CURVES).exists():
        with gzip.open(folder / CURVES, "rt", newline="") as file:
            for row in csv.DictReader(file):
                own = {key: text for key, text in row.items() if text}
                found.setdefault(own.pop("run"), []).append(own)
    for path in folder.glob("runs/*.csv"):
        found[path.stem] = read(path)
    return found


def pack(folder: Path) -> int:
    """Puts the files of the runs that have ended into the two of the table, and returns their
    number. Those are written before any is deleted; an interrupted call is repeated by the next."""
    paths = sorted(folder.glob("runs/*.json"))
    if not paths:
        return 0
    runs, curves = runs_of(folder), curves_of(folder)
    rows = [{"run": name} | row for name in runs for row in curves.get(name, [])]
    if rows:
        file = io.BytesIO()
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
            packed.write(text_of(rows).encode())
        write(folder / CURVES, file.getvalue())
    lines = []
    for name, run in runs.items():
        lines.append({"run": name} | {key: cell(value) for key, value in run.items()})
    write(folder / RUNS, text_of(lines))
    for path in paths:
        path.with_suffix(".csv").unlink(missing_ok=True)
        path.unlink()
    for path in folder.glob("runs/*.tmp"):  # of a runner that was killed
        path.unlink()
    if not any((folder / "runs").iterdir()):
        (folder / "runs").rmdir()
    return len(paths)


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def output(*command: str) -> str:
    """What a command prints in the folder of the repository; "" if it cannot be run."""
    try:
        ran = subprocess.run(command, cwd=COMMITTED.parents[1], capture_output=True, text=True)
    except OSError:
        return ""
    return ran.stdout.strip()


def commit(length: int = 40) -> str:
    """So many digits of the commit's name, with "-dirty" if the scripts were changed since;
    "unknown" without git."""
    name = output("git", "rev-parse", "HEAD")[:length] or "unknown"
    return name + "-dirty" * bool(output("git", "status", "-s", "cleanrl_graph"))


def unique(values: Iterable[str | None]) -> str:
    """The values, each once, but for empty ones."""
    return ", ".join(dict.fromkeys(value for value in values if value))


def about(runs: list[dict], more: str = "") -> str:
    """A sentence on the machines, the days and the minutes of runs."""
    cpu = unique(run.get(name) for name in ("cpu", "gpu") for run in runs)
    torch = unique(run["versions"].get("torch") for run in runs)
    days = sorted(run["started"][:10] for run in runs)
    minutes = sum(run["duration"] for run in runs) / 60
    return (
        f"{cpu}, one core per run or rank, torch {torch}{more}, "
        f"{' to '.join(dict.fromkeys([days[0], days[-1]]))}; {len(runs)} runs, {minutes:.0f} "
        "minutes altogether. Command, commit and versions of each run: [runs.csv](runs.csv)."
    )


def budget(runs: Iterable[dict], unit: str, cores: int = 1) -> str:
    """What a training of these runs took: "500k steps, 10 to 11 min, 1 core"; "" without runs."""
    runs = list(runs)
    if not runs:
        return ""

    def span(values: Iterable[float], text: Callable[[float], str]) -> str:
        values = sorted(values)
        return " to ".join(dict.fromkeys([text(values[0]), text(values[-1])]))

    short = lambda number: f"{number / 1e6:.1f}M" if number >= 0.95e6 else f"{number / 1e3:.0f}k"
    steps = span((run["steps"] for run in runs), short)
    minutes = span((run["duration"] / 60 for run in runs), "{:.0f}".format)
    return f"{steps} {unit}, {minutes} min, {cores} core{'s' * (cores > 1)}"


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def commands(runs: list[dict]) -> list[str]:
    """The last paragraphs of a table."""
    return ["Commands:", "\n".join(f"    {run['command']}" for run in runs)]


def publish(folder: Path, parts: list[str]) -> None:
    """Writes the paragraphs to the table.md of a folder, and prints them."""
    text = "\n\n".join(parts) + "\n"
    write(folder / "table.md", text)
    print(f"{text}\n{folder / 'table.md'}")


def main(table: str, pattern: str = "*") -> int:
    names = list(finished(RESULTS / table, pattern))
    print("\n".join(names))
    return not names


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
