"""What stands beside our rows: each published row names its source, and rows say what the training
took."""

import re
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path[:0] = [str(BENCHMARK), str(BENCHMARK / "pogema")]
import flexible_job_shop  # noqa: E402
import job_shop  # noqa: E402
import scores  # noqa: E402
import tables  # noqa: E402


def cells_of(path, title):
    """The rows of the tables of a page whose last column has that title."""
    found, is_inside = [], False
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_inside = line.startswith("|") and (is_inside or cells[-1] == title)
        if is_inside:
            found.append(cells)
    return [cells for cells in found if cells[-1] not in (title, "---")]


def test_budget_of_runs():
    runs = [{"steps": 499_712, "duration": 624}, {"steps": 499_712, "duration": 660}]
    assert tables.budget(runs, "decisions") == "500k decisions, 10 to 11 min, 1 core"
    runs.append({"steps": 1_196_032, "duration": 660})
    assert tables.budget(runs, "steps", 2) == "500k to 1.2M steps, 10 to 11 min, 2 cores"
    assert tables.budget(iter([]), "steps") == ""


@pytest.mark.parametrize(
    "module, table", [(job_shop, "job_shop"), (flexible_job_shop, "flexible_job_shop_suites")]
)
def test_published_rows_have_a_source(module, table):
    """The letter of each row is explained below the table, and no explanation is left over."""
    rows = tables.read(BENCHMARK / "results" / table / "published.csv")
    used = {row["source"] for row in rows}
    used |= {
        source
        for name in getattr(module, "MAKESPANS", {})
        for source in re.findall(r"\[(.)\]", name)
    }
    assert all(len(row) == len(rows[0]) and None not in row for row in rows)
    assert used == set(re.findall(r"\[(\w)\] \w", module.SOURCES.replace("\n", " ")))


@pytest.mark.parametrize(
    "name, ours",
    [
        ("job_shop/table.md", "**ours"),
        ("flexible_job_shop_suites/table.md", "ppo_graph.py greedy"),
        ("vertex_cover/table.md", "ppo_graph.py"),
        ("pogema/tables.md", "ppo_graph_agents.py"),
        ("traffic/delays.md", "one policy"),
    ],
)
def test_our_rows_say_what_the_training_took(name, ours):
    rows = [row for row in cells_of(BENCHMARK / "results" / name, "training") if ours in row[0]]
    assert rows
    for row in rows:
        assert re.fullmatch(r"[\d.]+[kM].* (steps|decisions), .* min, \d cores?", row[-1]), row


def test_trainings_of_the_raw_data():
    """Each method of POGEMA's raw data has a word on its training."""
    rows = tables.read(BENCHMARK / "results" / "pogema" / "theirs.csv")
    assert {row["system"] for row in rows} == set(scores.TRAININGS)
