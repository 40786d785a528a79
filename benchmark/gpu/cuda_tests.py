"""Part "tests" of benchmark/gpu.sh: the tests that need a CUDA device, one row each; the output is
in tests.txt.

In a dry run they are collected and skip themselves."""

import contextlib
import sys
import time
from pathlib import Path

import kit
import pytest
from kit import ROOT, Row


class Tee:
    """A text file and the terminal."""

    def __init__(self, *files):
        self.files = files

    def write(self, text: str) -> int:
        for file in self.files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        for file in self.files:
            file.flush()

    def isatty(self) -> bool:
        return False


class Notes:
    """A pytest plugin: leaves out what has passed, notes each outcome at once, and stops when time
    is up."""

    def __init__(self, results: kit.Results, args: kit.Args, deadline: float):
        self.results, self.args, self.deadline = results, args, deadline
        self.parts, self.left = {}, 0

    def pytest_collection_modifyitems(self, config, items):
        def is_left(item):
            row = row_of(item.nodeid)
            is_chosen = item.get_closest_marker("cuda") and kit.re.search(self.args.only, row.name)
            return is_chosen and not self.results.has(row)

        chosen = [item for item in items if is_left(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.left = len(items)

    def pytest_runtest_logreport(self, report):
        parts = self.parts.setdefault(report.nodeid, [])
        parts.append(report)
        if report.when == "teardown":
            outcomes = [part.outcome for part in parts]
            outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
            reasons = [part.longrepr[2] for part in parts if isinstance(part.longrepr, tuple)]
            notes = {"passed": "", "failed": "failed, see tests.txt"}
            note = notes.get(outcome, f"not run: {' '.join(reasons)}")
            seconds = sum(part.duration for part in parts)
            self.results.add(row_of(report.nodeid), {"outcome": outcome, "seconds": seconds}, note)
            self.left -= 1

    def pytest_runtest_logfinish(self, nodeid, location):
        if time.monotonic() > self.deadline:
            self.session.shouldstop = "time is up"

    def pytest_sessionstart(self, session):
        self.session = session


def row_of(nodeid: str) -> Row:
    file, _, test = nodeid.partition("::")
    return Row(Path(file).name, {"test": test}, dict)


def files() -> list[str]:
    """The test files that hold a test for a CUDA device."""
    return [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.cuda" in path.read_text() and path.name != "test_gpu_kit.py"
    ]


def run(part: str, args: kit.Args, deadline: float) -> int:
    results = kit.Results(args, part, "Tests on a CUDA device", "", kit.machine(args))
    notes = Notes(results, args, deadline)
    flags = f"-m cuda -rs -q -p no:cacheprovider --color no --rootdir {ROOT}".split()
    with open(results.folder / "tests.txt", "a") as file:
        out, err = Tee(sys.stdout, file), Tee(sys.stderr, file)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = pytest.main([*flags, *files()], plugins=[notes])
    rows = [row["figures"]["outcome"] for row in results.content["rows"]]
    counts = [f"{rows.count(name)} {name}" for name in ("passed", "failed", "skipped")]
    results.notes = ", ".join(counts) + "."
    results.save()
    if code not in (0, 2, pytest.ExitCode.NO_TESTS_COLLECTED) or "failed" in rows:
        return kit.FAILED
    return kit.LEFT if notes.left else 0
