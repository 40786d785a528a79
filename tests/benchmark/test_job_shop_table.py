"""Samples of benchmark/schedules.py, and the test sets of L2D in the tables of job_shop.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
import job_shop  # noqa: E402
import schedules  # noqa: E402
import tables  # noqa: E402


def rows_of(seed, samples, costs, number=100):
    """Rows of l2d10x10 whose samples cost the same in each instance."""
    row = {"name": "quick", "seed": seed, "samples": samples, "temperature": ""}
    row |= {"suite": "l2d10x10", "cost": min(costs), "costs": " ".join(map(str, costs))}
    return [row | {"instance": f"l2d10x10-{k:02d}"} for k in range(number)]


def test_sets_of_l2d_have_the_best_of_samples():
    """Mean makespans by method over the seeds that have all hundred instances."""
    rows = rows_of(1, 0, [900]) + rows_of(2, 0, [880]) + rows_of(3, 0, [500], 99)
    rows += rows_of(1, 16, [*range(850, 865), 845])
    table = job_shop.l2d_table(job_shop.our_costs(rows), {"quick": "20 min"})
    lines = {line[0]: line[1:] for line in table}
    column = lines["mean makespan"].index("10x10")
    ours = {name: cells for name, cells in lines.items() if "ours" in name}
    assert {name: cells[column] for name, cells in ours.items()} == {
        "**ours, quick, greedy, mean of 2 seeds**": "890.0",
        "**ours, quick, best of 16, mean of 1 seed**": "845.0",
    }
    assert all(cells[-1] == "20 min" and cells.count("") == 4 for cells in ours.values())
    assert lines["Poppy, one policy, best of 16 [p]"][column] == "866.0"


def test_samples_are_those_of_the_seed(tmp_path):
    """Whether or not other instances were sampled before."""
    model = str(Path(job_shop.__file__).parent / "results" / "job_shop" / "quick_s1.pt")

    def costs_of(suites, seed):
        folder = tmp_path / f"{len(suites)}_{seed}"
        schedules.main(
            schedules.Args(model, "m", seed, suites, [4], max_instances=1, results=str(folder))
        )
        return tables.read(folder / "schedules.csv")[-1]["costs"]

    costs = costs_of(["l2d6x6", "orb"], 1)
    assert costs == costs_of(["orb"], 1) != costs_of(["orb"], 2)
