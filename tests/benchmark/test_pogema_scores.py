"""benchmark/pogema: scores are played once, beside the raw data of the benchmark; the protocol."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import small_args

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "pogema"))
import raw_data  # noqa: E402
import scores  # noqa: E402

from cleanrl_graph.envs.pogema import PogemaEnv, map_text  # noqa: E402

SHORT = [{"num_robots": 8, "map_seed": k, "task_seed": 0, "episode_length": 6} for k in range(2)]
SUITES = {"random_8": SHORT, "one_shot_random_8": [task | {"task": "one-shot"} for task in SHORT]}


@pytest.fixture(autouse=True)
def short_suites(monkeypatch):
    monkeypatch.setattr(PogemaEnv, "eval_suites", SUITES)


def saved(path, **flags):
    """A model.pt with random weights."""
    script = importlib.import_module("cleanrl_graph.ppo_graph_agents")
    args = small_args(script, env_id="cleanrl_graph.envs:Pogema-v0", gnn_layers=1, **flags)
    env = script.make_env(args)
    agent = script.Agent(script.Envs([lambda: env]).leaves, env.action_space, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": agent.state_dict(), "args": vars(args), "script": args.exp_name}, path)
    return str(path)


def test_scores_are_played_once(tmp_path, monkeypatch):
    """Rules and the models of two seeds on each suite; of what stands in scores.csv nothing is
    played again; the table has means over seeds, and theirs."""
    for seed in (1, 2):
        saved(tmp_path / "runs" / f"agents_Pogema-v0_s{seed}_0a" / "run" / "model.pt")
    results = tmp_path / "results"
    results.mkdir()
    (results / "theirs.csv").write_text(
        ",".join(raw_data.COLUMNS)
        + "\nQMIX,random_8,128,256,0.57,,\nDCC,one_shot_random_8,128,128,,1,1\n"
    )
    args = scores.Args(tuple(SUITES), 2, (), str(tmp_path / "runs"), str(results))
    scores.main(args)
    rows = scores.read(results / "scores.csv")
    assert len(rows) == 2 * (3 + 2 * 2)
    for row in rows:
        values = json.loads(row["values"])
        one_shot = row["suite"].startswith("one_shot")
        assert len(values) == 2
        assert float(row["success" if one_shot else "throughput"]) == pytest.approx(
            np.mean(values), abs=1e-4
        )
        assert bool(row["arrived"]) == one_shot
    text = (results / "tables.md").read_text()
    lifelong, success, arrived = text.split("| --- | --- |")[1:]
    assert "| QMIX (theirs) | 0.57 |" in lifelong and "| DCC (theirs) | 1.00 |" in success
    sampled = [r for r in rows if r["mode"] == "sampled" and r["suite"] == "random_8"]
    assert [row["seed"] for row in sampled] == ["1", "2"]
    means = [float(row["throughput"]) for row in sampled]
    each = ", ".join(f"{mean:.2f}" for mean in means)
    assert f"ppo_graph_agents.py**, sampled | {np.mean(means):.2f} ({each}) |" in lifelong
    assert "| random |" in arrived

    def fail(*args):
        raise AssertionError("played again")

    monkeypatch.setattr(scores, "score", fail)
    scores.main(args)
    assert scores.read(results / "scores.csv") == rows


def test_ablations_are_played_as_trained(tmp_path, monkeypatch):
    """Links and costs that a training did not have are missing in its tests."""
    blind = {"link_radius": 0, "cost_to_go": False}
    path = saved(tmp_path / "model.pt", env_kwargs=blind)
    made = []

    class Noted(PogemaEnv):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            made.append((self.link_radius, self.cost_to_go))

    monkeypatch.setattr(scores, "PogemaEnv", Noted)
    scores.play_model(path, SHORT, True)
    assert made == [(0, False)] * 2
    file = torch.load(path)
    torch.save(file | {"args": file["args"] | {"env_kwargs": [{"num_robots": 8}, blind]}}, path)
    assert scores.options_of(path) == {}


def test_raw_data(tmp_path, monkeypatch):
    """Means of methods, the length of their episodes, and a planner beside the bounds."""
    data = tmp_path / "data"
    unhindered = [raw_data.unhindered(task) for task in SHORT]
    distances = [raw_data.distances(task) for task in SUITES["one_shot_random_8"]]
    values = {"RHCR": unhindered[::-1], "IQL": [0.5, 3 / 256]}
    names = ["validation-random-seed-001", "validation-random-seed-000"]  # their order is not ours
    for name, folder in raw_data.FOLDERS.items():
        for kind in ("raw_data_LMAPF", "raw_data_MAPF"):
            (data / kind / folder).mkdir(parents=True)
        texts = [map_text(name, k) for k in range(2)]
        maps = data / "raw_data_LMAPF" / folder / "maps.yaml"
        maps.write_text(yaml.safe_dump({f"{k}": text for k, text in enumerate(texts)}))
    lifelong = data / "raw_data_LMAPF" / raw_data.FOLDERS["random"]
    for system, own in values.items():
        rows = [
            {
                "env_grid_search": {"num_agents": 8, "map_name": name},
                "metrics": {"avg_throughput": value},
            }
            for name, value in zip(names, own)
        ]
        (lifelong / f"{system}.json").write_text(json.dumps(rows))
    rows = [
        {
            "env_grid_search": {"num_agents": 8, "map_name": name},
            "metrics": {"CSR": 1.0, "ISR": 0.5, "SoC": cost + 1},
        }
        for name, cost in zip(names, distances[::-1])
    ]
    (data / "raw_data_MAPF" / raw_data.FOLDERS["random"] / "LaCAM.json").write_text(
        json.dumps(rows)
    )
    monkeypatch.setattr(raw_data, "FEWEST", {"random": 8})
    monkeypatch.setattr(raw_data, "older_correlation", lambda args: 0.0)
    raw_data.main(raw_data.Args(str(data), str(tmp_path)))
    found = scores.read(tmp_path / "theirs.csv")
    assert [(row["system"], row["suite"]) for row in found] == [
        ("IQL", "random_8"),
        ("RHCR", "random_8"),
        ("LaCAM", "one_shot_random_8"),
    ]
    assert found[0]["steps"] == "256" and float(found[0]["throughput"]) == 0.2559
    assert found[2]["success"] == "1.0" and found[2]["arrived"] == "0.5"
    text = (tmp_path / "tables.md").read_text()
    assert "2 of 2 of random are equal" in text
    rows = [[cell.strip() for cell in line.split("|")] for line in text.split("\n") if "8," in line]
    assert rows[0][6:8] == ["2", "0"] and rows[1][6:8] == ["0", "0"]
