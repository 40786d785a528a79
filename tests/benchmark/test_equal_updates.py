"""benchmark/equal_updates.py tells what is equal, what is not, and what is so on purpose."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
import equal_updates  # noqa: E402
from equal_updates import Case, Recording  # noqa: E402


@pytest.mark.parametrize(
    "loss, gradient, rounded, purpose, code",
    [
        (1.0, 1.0, 1.0, "", 0),
        (1 + 2e-5, 1.0, 1.0, "", 1),
        (1 + 2e-5, 1.0, 1.0, "It weighs more.", 0),
        (1.0, 1 + 5e-5, 1.0, "", 1),
        (1.0, 1 + 5e-5, 1 + 1e-5, "", 0),  # as large as what rounding makes
        (1.0, 1 + 5e-3, 1 + 1e-5, "", 1),
    ],
)
def test_rows_and_exit_code(monkeypatch, capsys, tmp_path, loss, gradient, rounded, purpose, code):
    def record(checkout, script, case, num, is_rounded=False):
        own = loss if checkout == "new" else 1.0
        norm = gradient if checkout == "new" else 1.0
        if is_rounded:
            norm = rounded
        return Recording([[1, 0.5]], [own], [[norm]], [1e-3])

    monkeypatch.setattr(equal_updates, "record", record)
    monkeypatch.setattr(equal_updates, "CASES", {"a": Case("", ("ppo_graph",), purpose=purpose)})
    out = tmp_path / "table.md"
    args = equal_updates.Args("old", "new", ("ppo_graph", "ppo_gtrxl"), ("a",), out=str(out))
    assert equal_updates.main(args) == code
    text = out.read_text()
    assert f"1 rows, {code} of them failed or above 1e-05." in text
    assert text.count("(another function)") == bool(purpose)
    assert (f"- a: {purpose}" in text) == bool(purpose)


def test_each_case_says_what_it_runs():
    for name, case in equal_updates.CASES.items():
        assert set(case.scripts) <= {*equal_updates.SCRIPTS, *equal_updates.AGENTS}, name
        assert case.flags.startswith("--env-id "), name
