"""benchmark/zoo.py: what it writes of two environments of gymnasium and of two made ones."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = """package,environment,module,yours,pattern,most,kwargs,flags
gymnasium,main,,,CartPole-v1|Blackjack-v1,2,,
torch,main,made_for_zoo,,.*,9,,
numpy,other,numpy,,.*,9,,
"""
MADE = """
import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class TwoRewards(CartPoleEnv):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward, 0.0]), *rest

class Broken(CartPoleEnv):
    def reset(self, **kwargs):
        raise RuntimeError("no data")

gym.register("Made-TwoRewards-v0", TwoRewards)
gym.register("Made-Unfinished-v0", Broken)
"""


def run_zoo(folder):
    command = [sys.executable, str(ROOT / "benchmark" / "zoo.py")]
    command += ["--list", str(folder / "packages.csv"), "--results", str(folder), "--workers", "2"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    with open(folder / "ids.csv", newline="") as file:
        return list(csv.DictReader(file)), done.stdout


@pytest.mark.slow
def test_environments_of_others(tmp_path):
    (tmp_path / "packages.csv").write_text(PACKAGES)
    (tmp_path / "made_for_zoo.py").write_text(MADE)
    rows, _ = run_zoo(tmp_path)
    found = {(row["id"].split(":")[-1], row["script"]): row for row in rows}
    assert {key: row["outcome"] for key, row in found.items()} == {
        ("Blackjack-v1", "ppo_graph.py"): "trains",
        ("CartPole-v1", "ppo_lstm_sparse.py"): "trains",
        ("CartPole-v1", "ppo_graph.py"): "trains",
        ("Made-TwoRewards-v0", "ppo_graph.py"): "trains with a flag",
        ("Made-Unfinished-v0", "ppo_graph.py"): "package fails",
        ("Made-Unfinished-v0", "ppo_gtrxl.py"): "package fails",
    }
    assert float(found["CartPole-v1", "ppo_graph.py"]["collection_mismatch"]) <= 1e-5
    assert found["Made-Unfinished-v0", "ppo_graph.py"]["message"] == "RuntimeError: no data"
    (tmp_path / "ids.csv").write_text((tmp_path / "ids.csv").read_text().replace("no data", "x"))
    rows, said = run_zoo(tmp_path)
    assert len(rows) == 6 and "6 runs, 0 of them are missing" in said
    assert "| **all 2** | | 4 | 2 | 1 |  |  | 1 | 6 |" in (tmp_path / "table.md").read_text()
