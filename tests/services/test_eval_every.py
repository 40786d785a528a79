"""--eval-every and --stop-at: how the policy plays while it trains, the best model, and what of it
changes the training: nothing."""

import csv
import importlib
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import SmallEnv, run, run_folder, same_weights, small_args, vector, weights
from processes import SMALL, Dies, begun_earlier, newest, start, train, train_ranks

from cleanrl_graph import load_policy, ppo_graph, services
from cleanrl_graph.services import eval_every, export, plot
from cleanrl_graph.services.check import UsageError

SCRIPTS = ["ppo_graph", "ppo_lstm_sparse", "ppo_graph_async", "ppo_graph_agents"]
SLOW = ["ppo_framestack", "ppo_gtrxl", "ppo_graph_aux", "ppo_graph_compile"]


class Draws(SmallEnv):
    """Draws from the global generators of NumPy and torch, when it is made and played. Which of two
    actions earns 1 is seen. An episode reports its cost and the best one."""

    observation_space, action_space, terminates = vector(2), spaces.Discrete(2), True
    eval_suites = {"lengths": [{"length": 3}, {"length": 6}]}
    exact_resume = True

    def __init__(self, length=5):
        self.length = length
        torch.rand(1)

    def begin(self):
        self.total = 0.0

    def observe(self):
        self.right = int(np.random.random() < 0.5)
        return np.array([self.right, torch.rand(()).item()], np.float32)

    def reward(self, action):
        return float(action == self.right)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self.total += reward
        if terminated:
            info = {"eval": {"cost": 10 - self.total, "best_known": 5.0, "rule": 7}}
        return obs, reward, terminated, truncated, info


gym.register("DrawsWhilePlayed-v0", entry_point=Draws)
DRAWS = dict(env_id="DrawsWhilePlayed-v0", eval_episodes=3)
RESUMED = DRAWS | dict(checkpoint_every=2)


def rows_of(folder):
    with open(folder / "evaluations.csv", newline="") as file:
        return list(csv.DictReader(file))


def returns_of(folder):
    return [float(row["return"]) for row in rows_of(folder)]


def best_of(folder):
    """What best.pt says about itself."""
    return torch.load(folder / "best.pt", weights_only=True)["evaluation"]


def without_times(rows):
    return [{k: v for k, v in row.items() if k not in ("seconds", "took")} for row in rows]


def play_by(function):
    """A script's `play` whose episodes have these (return, whether it is cut)."""

    def play(agent, args, envs, greedy):
        infos = []
        for ret, is_cut in function(args, greedy, len(envs.envs)):
            infos.append({"episode": {"r": ret, "l": 9}} | ({"cut": True} if is_cut else {}))
        return infos

    return play


# ---- The training is the same ----
@pytest.mark.parametrize(
    "name", [*SCRIPTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_training_stays_the_same(name, tmp_path):
    """Losses, episodes and weights are bit by bit those without evaluations."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    env_id = "envs:PoissonGraph-v0"
    if name == "ppo_graph_agents":
        env_id = "envs:Crowd-v0"
    elif name in ("ppo_graph", "ppo_framestack"):
        env_id = DRAWS["env_id"]  # evaluations draw from the same generators
    flags = dict(env_id=env_id, total_timesteps=96, save_model=True, **SMALL.get(name, {}))
    flags |= dict(eval_episodes=2, eval_max_steps=20)
    plain = run(tmp_path / "a", script, **flags)
    result = run(tmp_path / "b", script, eval_every=2, **flags)
    assert same_weights(plain.folder, result.folder)
    scalars = dict(result.scalars)
    evaluated = [tag for tag in scalars if tag.startswith("eval/")]
    assert [step for step, _ in scalars["eval/return"]] == [48, 96]
    for tag in ("charts/SPS", *evaluated):
        del scalars[tag]
    del plain.scalars["charts/SPS"]
    assert scalars == plain.scalars
    assert (result.folder / "best.pt").exists()
    assert not {"best.pt", "evaluations.csv"} & {path.name for path in plain.folder.iterdir()}


def test_its_time_is_not_that_of_the_training(tmp_path, monkeypatch):
    play = ppo_graph.play

    def slow(*args):
        time.sleep(0.3)
        return play(*args)

    monkeypatch.setattr(ppo_graph, "play", slow)
    began = time.monotonic()
    result = run(tmp_path, eval_every=1, total_timesteps=72, **DRAWS | {"eval_episodes": 1})
    most = time.monotonic() - began - 4 * 0.3  # with the evaluation at the end
    rows = rows_of(result.folder)
    assert all(float(row["took"]) >= 0.3 for row in rows) and len(rows) == 3
    with open(result.folder / "episodes.csv", newline="") as file:
        trained = max(float(row["seconds"]) for row in csv.DictReader(file))
    assert max(trained, float(rows[-1]["seconds"])) < most


# ---- What is measured ----
def test_curves_rows_and_the_best(tmp_path):
    """Curves and rows are alike: after every second update, and the last one. A gap is that of the
    cost to the best known."""
    result = run(tmp_path, eval_every=2, total_timesteps=120, **DRAWS)
    rows = rows_of(result.folder)
    assert [int(row["step"]) for row in rows] == [48, 96, 120]
    for name in ("return", "length", "gap", "cost", "rule"):
        curve = [value for _, value in result.scalars[f"eval/{name}"]]
        assert curve == pytest.approx([float(row[name]) for row in rows])
    for row in rows:
        cost = 10 - float(row["return"])
        assert float(row["gap"]) == pytest.approx(100 * (cost - 5) / 5)
        assert float(row["length"]) == 5 and float(row["rule"]) == 7
        assert "best_known" not in row and "cut" not in row
    returns = returns_of(result.folder)
    best = returns.index(max(returns))
    (line,) = [line for line in result.text.splitlines() if "best.pt:" in line]
    first = f"return of the best evaluation of 3, best.pt: {returns[best]:.5g} at step "
    assert line.startswith(first + rows[best]["step"])
    assert f"; of the last: {returns[-1]:.5g} at step 120. They took " in line
    saved = best_of(result.folder)
    assert (saved["step"], saved["return"]) == (int(rows[best]["step"]), returns[best])


def test_episodes_are_always_the_same(tmp_path, monkeypatch):
    """Each evaluation begins with the same seeds, and those after the training are others. The
    model of the best one, here the second, is kept."""
    seeds = []

    def outcomes(args, greedy, num):
        seeds.append(args.seed)
        return [([1.0, 3.0, 3.0, 2.0, 9.0][len(seeds) - 1], False)] * num

    monkeypatch.setattr(ppo_graph, "play", play_by(outcomes))
    flags = dict(env_id="CartPole-v1", seed=3, anneal_lr=False, eval_episodes=3)
    result = run(tmp_path / "a", total_timesteps=96, eval_every=1, **flags)
    assert seeds == [10_003] * 4 + [3]
    assert returns_of(result.folder) == [1, 3, 3, 2]
    seeds.clear()
    two_updates = run(tmp_path / "b", total_timesteps=48, **flags)
    best = torch.load(result.folder / "best.pt", weights_only=True)
    model = torch.load(two_updates.folder / "model.pt", weights_only=True)["model"]
    assert best["evaluation"]["step"] == 48
    assert all(torch.equal(value, best["model"][name]) for name, value in model.items())


def test_suite(tmp_path):
    """Its instances, once each."""
    result = run(tmp_path, eval_every=1, eval_suite="lengths", eval_samples=0, **DRAWS)
    assert {float(row["length"]) for row in rows_of(result.folder)} == {4.5}


def test_tasks(tmp_path):
    """Episodes of each entry of --env-kwargs."""
    tasks = [{"length": 3}, {"length": 6}, {"length": 6}]
    result = run(tmp_path, eval_every=1, env_kwargs=tasks, **DRAWS)
    assert {float(row["length"]) for row in rows_of(result.folder)} == {5}


def test_before_an_episode_has_ended(tmp_path, monkeypatch):
    """Ten times the steps of each environment so far."""
    limits = []

    def outcomes(args, greedy, num):
        limits.append(args.eval_max_steps)
        return [(0.0, False)] * num

    monkeypatch.setattr(ppo_graph, "play", play_by(outcomes))
    flags = DRAWS | dict(env_kwargs={"length": 1000})
    run(tmp_path, eval_every=1, eval_max_steps=120, **flags)
    assert limits == [80, 120, 120]


# ---- --stop-at ----
def test_stop_at(tmp_path, capsys):
    """Met at once: the training ends after the first evaluation, as at any end, with a checkpoint,
    model.pt and the last evaluation. Resumed, nothing is left to do; with a value that is never
    reached it goes on."""
    flags = dict(eval_every=2, **RESUMED | dict(eval_episodes=1))
    folder = train(tmp_path, stop_at=-1.0, **flags)
    assert "--stop-at -1: the training ends with a return of" in capsys.readouterr().err
    assert newest(tmp_path) == 48 and len(rows_of(folder)) == 1
    assert {"model.pt", "best.pt", "eval.csv"} <= {path.name for path in folder.iterdir()}
    before = weights(folder)
    begun_earlier(tmp_path)
    train(tmp_path, stop_at=-1.0, resume="auto", **flags)
    assert "--stop-at -1 has been reached" in capsys.readouterr().err
    assert newest(tmp_path) == 48 and len(rows_of(folder)) == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(folder).items())
    begun_earlier(tmp_path)
    train(tmp_path, stop_at=99.0, resume="auto", **flags)
    assert newest(tmp_path) == 144 and len(rows_of(folder)) == 3


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (dict(stop_at=1.0), "--stop-at 1 needs evaluations: give --eval-every N"),
        (dict(eval_every=2, eval_episodes=0), "--eval-every 2 plays nothing with --eval-episodes"),
    ],
)
def test_flags_without_a_meaning(flags, sentence, tmp_path):
    with pytest.raises(UsageError) as error:
        run(tmp_path, **DRAWS | flags)
    assert str(error.value).startswith(sentence)


# ---- Resumed ----
def test_killed_in_an_evaluation(tmp_path):
    """The third, after the checkpoint of the second update: the resumed run makes it
    again, and goes on with its best, as if nothing had happened."""
    flags = dict(eval_every=1, **RESUMED)
    whole = train(tmp_path / "a", **flags)
    process = start(tmp_path / "b", patch=Dies(eval_every, "means_of", 3), **flags)
    process.join(60)
    assert process.exitcode == -9 and newest(tmp_path / "b") == 48
    begun_earlier(tmp_path / "b")
    folder = train(tmp_path / "b", resume="auto", **flags)
    assert same_weights(whole, folder)
    assert without_times(rows_of(whole)) == without_times(rows_of(folder))
    assert without_times([best_of(whole)]) == without_times([best_of(folder)])


def test_killed_after_the_best(tmp_path):
    """Before the checkpoint: best.pt is of a step that comes again, so --stop-at does not end the
    resumed run before it."""
    flags = dict(eval_every=3, stop_at=-1.0, **RESUMED)
    process = start(tmp_path, patch=Dies(eval_every, "say", 1), **flags)
    process.join(60)
    assert process.exitcode == -9 and newest(tmp_path) == 48
    begun_earlier(tmp_path)
    train(tmp_path, resume="auto", **flags)
    assert newest(tmp_path) == 72


# ---- Ranks ----
def test_ranks_wait(tmp_path):
    """Two ranks end together where rank 0 has reached --stop-at, and train as without it."""
    flags = dict(env_id="CartPole-v1", eval_episodes=2, eval_max_steps=30)
    assert train_ranks(tmp_path / "a", eval_every=1, stop_at=1.0, **flags) == [0, 0]
    assert newest(tmp_path / "a") == 48 and len(rows_of(run_folder(tmp_path / "a"))) == 1
    assert train_ranks(tmp_path / "b", eval_every=1, **flags) == [0, 0]
    assert train_ranks(tmp_path / "c", **flags) == [0, 0]
    assert len(rows_of(run_folder(tmp_path / "b"))) == 3
    assert same_weights(run_folder(tmp_path / "b"), run_folder(tmp_path / "c"))


# ---- best.pt ----
def test_what_takes_the_best(tmp_path):
    """load_policy, --load-model and export; of a folder where nothing else is, too."""
    flags = small_args(eval_every=1, run_dir=str(tmp_path / "a"), **DRAWS)
    services.run(ppo_graph, flags, save_model=False)
    path = run_folder(tmp_path / "a") / "best.pt"
    policy = load_policy(str(path))
    assert policy(np.array([1, 0.5], np.float32)) in (0, 1)
    assert load_policy(str(path.parent)).path == str(path)
    saved = torch.load(path, weights_only=True)["model"]
    assert all(torch.equal(saved[k], value) for k, value in policy.agent.state_dict().items())
    again = run(tmp_path / "b", load_model=str(path), total_timesteps=0, save_model=True, **DRAWS)
    assert len(again.rows) == 3 and not (again.folder / "evaluations.csv").exists()
    export.export(str(path), str(tmp_path / "policy.pt2"))
    assert (tmp_path / "policy.json").exists()


# ---- Curves ----
def test_plot(tmp_path, capsys):
    """The curve is what was measured; a run without is left out, which is said."""
    flags = dict(eval_every=1, total_timesteps=96, **DRAWS)
    first = run(tmp_path / "runs" / "a", **flags)
    second = run(tmp_path / "runs" / "b", seed=2, **flags)
    run(tmp_path / "runs" / "c", **flags | {"eval_every": 0})
    capsys.readouterr()
    plot.main(plot.Args((str(tmp_path / "runs"),), evaluations="gap", out=str(tmp_path / "out")))
    said = capsys.readouterr()
    ends = [float(rows_of(result.folder)[-1]["gap"]) for result in (first, second)]
    text = (tmp_path / "out" / "table.md").read_text()
    assert "gap of the last evaluation" in text and "| 2 | 96 | " in text
    assert f"| {np.mean(ends):.5g} ± {np.std(ends, ddof=1):.2g} |" in text
    assert "no evaluation with 'gap' has ended" in said.err
    with pytest.raises(SystemExit, match="there is no run with an evaluation with 'none' in"):
        plot.find([str(tmp_path / "runs")], 1, "none")
