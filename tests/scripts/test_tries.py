"""tests/tries.py: a handful of its tries, and that it sees what is wrong."""

import hostile
import pytest
import tries


@pytest.mark.parametrize(
    "name, result",
    [
        ("actions: a start below 0", "trains"),
        ("observations: a view of a buffer", "trains"),
        ("observations: 300 as uint8", "sentence"),
        ("returns: info list", "sentence"),
        ("process: SIGTERM", "sentence"),
        ("files: a model", "trains"),
        ("flags: --gamma 1.5", "sentence"),
    ],
)
def test_a_handful(name, result):
    each = hostile.TRIES[name]
    row = tries.attempt(each, each.script)
    assert row.result == result, row


WRONG = {
    "silent": dict(accept=lambda env, action: False),
    "hang": dict(hooks={"step": hostile.wait()}, limit=1),
    "other": dict(hooks={"step": hostile.raises(KeyError("a"))}),
    "traceback": dict(script="ppo_graph", before=lambda go: exec("import torch; del torch.cat")),
}


@pytest.mark.parametrize("result", WRONG)
def test_failures_are_seen(result, monkeypatch):
    """Actions that an environment does not accept, one that never returns, one that raises, and an
    exception of a script."""
    each = hostile.Try("process", result, **WRONG[result])
    monkeypatch.setitem(hostile.TRIES, f"process: {result}", each)
    assert tries.attempt(each, each.script).result == result


def test_table():
    rows = [tries.Row("flags", name, "ppo_graph", "", "sentence", "") for name in "ab"]
    rows.append(tries.Row("files", "c", "ppo_graph", "", "hang", "it did not end"))
    text = tries.table(rows, "command", 1.0)
    assert "| all | 3 | 3 | 0 | 2 | 0 | 1 | 0 | 0 |" in text
    assert "- files, c, ppo_graph: hang. it did not end" in text


def test_there_are_enough():
    """And none is without an expectation."""
    assert len(hostile.TRIES) >= 170 and all(each.expected for each in hostile.TRIES.values())
