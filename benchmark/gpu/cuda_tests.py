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
        self.results, self.args, self.deadline, self.parts, self.left = (
            results,
            args,
            deadline,
            {},
            0,
        )

    def pytest_collection_modifyitems(self, config, items):
        chosen = [
            item
            for item in items
            if item.get_closest_marker("cuda")
            and kit.re.search(self.args.only, row_of(item.nodeid).name)
        ]
        chosen = [item for item in chosen if not self.results.has(row_of(item.nodeid))]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.left = len(items)

    def pytest_runtest_logreport(self, report):
        parts = self.parts.setdefault(report.nodeid, [])
        parts.append(report)
        if report.when == "teardown":
            outcomes = [part.outcome for part in parts]
            outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
            reason = " ".join(
                part.longrepr[2] for part in parts if isinstance(part.longrepr, tuple)
            )
            note = {
                "passed": "",
                "skipped": f"not run: {reason}",
                "failed": "failed, see tests.txt",
            }[outcome]
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
    with open(results.path.with_suffix(".txt"), "a") as file:
        with (
            contextlib.redirect_stdout(Tee(sys.stdout, file)),
            contextlib.redirect_stderr(Tee(sys.stderr, file)),
        ):
            code = pytest.main(
                [
                    "-m",
                    "cuda",
                    "-rs",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "--rootdir",
                    str(ROOT),
                    "--color",
                    "no",
                    *files(),
                ],
                plugins=[notes],
            )
    none_left = code == pytest.ExitCode.NO_TESTS_COLLECTED
    rows = [row["figures"]["outcome"] for row in results.content["rows"]]
    results.notes = (
        ", ".join(f"{rows.count(name)} {name}" for name in ("passed", "failed", "skipped")) + "."
    )
    results.save()
    return (
        kit.FAILED
        if code not in (0, 2) and not none_left or "failed" in rows
        else kit.LEFT
        if notes.left
        else 0
    )
