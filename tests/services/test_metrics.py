"""info["metrics"] and info["is_success"]: an environment's own numbers of an episode in the log, in
episodes.csv and in the evaluation's table."""

import csv
import math
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import SmallEnv, run, small_args, vector
from processes import begun_earlier, train

from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services import evaluate
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.csv_file import CsvFile


class Delivery(SmallEnv):
    """Episode k is the k-th of its environment, from 0 on: the reset that looks for a mask begins
    one, too."""

    observation_space, action_space, terminates = vector(2), spaces.Discrete(2), True
    eval_suites = {"one": [{"factor": 3}]}
    exact_resume = True
    number = -2

    def __init__(self, factor=1, report=None, best_known=None):
        self.factor = factor
        self.report = report
        self.best_known = best_known

    def begin(self):
        self.number += 1

    def observe(self):
        return np.zeros(2, np.float32)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        k = max(self.number, 0)
        if terminated and self.report is None:
            info = {"metrics": {"late": np.float32(self.factor * k), "load": k % 2}}
            info |= {"is_success": np.bool_(k % 2), "group": f"g{k % 2}"}
            if self.best_known:
                info["eval"] = {"cost": 20, "best_known": self.best_known}
        elif terminated:
            info = self.report(k)
        return obs, reward, terminated, truncated, info


gym.register("Delivery-v0", entry_point=Delivery)
FLAGS = dict(env_id="Delivery-v0", num_envs=2, num_steps=10, num_minibatches=2)


def episodes_of(folder):
    with open(folder / "episodes.csv", newline="") as file:
        return list(csv.DictReader(file))


def groups_of(rows, name, of):
    """Step of the end of a rollout -> mean of a column over its episodes with `of(row)`."""
    means = {}
    for row in rows:
        if of(row):
            means.setdefault(-(-int(row["step"]) // 20) * 20, []).append(float(row[name]))
    return [(step, np.mean(values)) for step, values in sorted(means.items())]


# ---- Where they stand ----
def test_log_and_episodes(tmp_path):
    """Means over the episodes of a rollout, of each group and task, too; a column each; and what
    --eval-every has of them. In worker processes, too."""
    flags = dict(total_timesteps=80, num_workers=2, env_kwargs=[{}, {"factor": 10}])
    result = run(tmp_path, eval_every=4, eval_episodes=2, **FLAGS | flags)
    assert result.scalars["eval/late"] == result.scalars["eval/is_success"] == [(80, 0.0)]
    rows = episodes_of(result.folder)
    names = "step seconds return length group task is_success late load".split()
    assert list(rows[0]) == names and len(rows) == 16
    for row in rows:
        assert float(row["is_success"]) == float(row["load"]) == int(row["group"] == "g1")
    for name in ("is_success", "late", "load"):
        assert result.scalars[f"charts/{name}"] == groups_of(rows, name, lambda row: True)
        for group in ("g0", "g1", "task_0", "task_1"):
            means = groups_of(rows, name, lambda row: group in (row["group"], row["task"]))
            assert result.scalars[f"charts/{name}/{group}"] == means
    late = {row["task"]: [] for row in rows}
    for row in rows:
        late[row["task"]].append(float(row["late"]))
    assert late["task_1"] == [10 * value for value in late["task_0"]]


def test_table_of_the_evaluation(tmp_path):
    """They are columns that are no costs, and so have no gap."""
    flags = dict(env_kwargs={"best_known": 10}, eval_episodes=2, total_timesteps=0)
    result = run(tmp_path / "a", **FLAGS | flags)
    header, _, first, _, mean = (result.folder / "eval.md").read_text().splitlines()
    assert header == (
        "| episode | group | length | return | cost gap % | best_known | is_success | late | load |"
    )
    assert first == "| 0 | g0 | 5 | 0 | 100.0 | 10 | 0 | 0 | 0 |"
    assert mean == "| **mean** |  | **5** | **0** | **100.0** |  | **0** | **0** | **0** |"
    assert result.rows[0]["metrics"] == {"is_success": 0, "late": 0, "load": 0}
    with open(result.folder / "eval.csv", newline="") as file:
        (row, _) = csv.DictReader(file)
    assert (row["late"], row["cost"]) == ("0.0", "20")
    result = run(tmp_path / "b", **FLAGS | flags | dict(eval_suite="one", eval_samples=3))
    header = (result.folder / "eval.md").read_text().splitlines()[0]
    assert header.endswith("| best_known | is_success | late | load |")


def test_sampled_episodes_and_means():
    """They have columns of their own, but for the best known cost; NaN does not count."""
    episode = {"episode": {"r": 1.0, "l": 2}, "eval": {"cost": 3, "best_known": 2}}
    infos = [episode | {"metrics": {"late": late}} for late in (2.0, math.nan)]
    rows = [evaluate.outcome(info) | evaluate.outcome(info, "sampled ") for info in infos]
    lines = evaluate.eval_table(rows).splitlines()
    assert lines[0].endswith("| sampled cost gap % | late | sampled late |")
    assert lines[-1].endswith("| **50.0** | **2** | **2** |") and "sampled best" not in lines[0]


def test_after_a_resume(tmp_path):
    """The columns stay, and the names are those of before."""
    flags = dict(FLAGS, checkpoint_every=2, num_envs=2)
    folder = train(tmp_path, total_timesteps=40, **flags)
    begun_earlier(tmp_path)
    train(tmp_path, resume=str(folder), total_timesteps=80, **flags)
    rows = episodes_of(folder)
    assert [row["late"] for row in rows][::2] == [f"{k}.0" for k in range(8)]


def test_part_of_a_row(tmp_path):
    """Which a run that was killed has left is dropped, and so are later rows."""
    path = tmp_path / "rows.csv"
    path.write_text("step,return,late\n8,1.0,2\n16,2.0,3\n8,1.")
    file = CsvFile(path, ("step", "return"))
    assert file.keep(8) == [{"step": "8", "return": "1.0", "late": "2"}]
    file.write([{"step": 12, "load": 5}])
    file.write([{"step": 16, "return": 3.0}])
    file.close()
    assert path.read_text() == "step,return,late,load\n8,1.0,2,\n12,,,5\n16,3.0,,\n"


# ---- What is wrong with them ----
@pytest.mark.parametrize(
    "report, sentence",
    [
        (lambda k: {"metrics": {"late": "soon"}}, "'late': 'soon': no finite number, nor NaN"),
        (lambda k: {"metrics": {"return": 1}}, "the name 'return', which is taken"),
        (lambda k: {"is_success": "yes"}, "is 'yes', not True, False or NaN"),
    ],
)
def test_sentences(report, sentence, tmp_path):
    words = rf"^env [01], step \d+: info\['(metrics|is_success)'\] (has )?{re.escape(sentence)}"
    with pytest.raises(UsageError, match=words):
        run(tmp_path, env_kwargs={"report": report}, total_timesteps=80, **FLAGS)


def test_nan_is_no_value(tmp_path, capsys):
    """It stands in episodes.csv and is left out of the means. What is no dict, since others mean
    something else by it, is left out, which is said."""
    args = small_args(run_dir=str(tmp_path), total_timesteps=80, **FLAGS)
    metrics = lambda k: {"late": k if k % 2 else math.nan}
    args.env_kwargs = [{"report": lambda k: {"metrics": metrics(k)}}]
    args.env_kwargs.append({"report": lambda k: {"metrics": [1, 2]}})
    services.run(ppo_graph, args)
    err = capsys.readouterr().err
    assert "info['metrics'] is left out: it is no metrics but list" in err
    (folder,) = tmp_path.iterdir()
    rows = episodes_of(folder)
    assert [row["late"] for row in rows][::2] == "nan 1.0 nan 3.0 nan 5.0 nan 7.0".split()
    assert {row["late"] for row in rows[1::2]} == {""}
