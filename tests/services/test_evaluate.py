"""services/evaluate.py: suites of instances, tables and videos of what a trained agent plays."""

import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import SmallEnv, run
from PIL import Image
from processes import full_disk

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import evaluate


def episode(ret, length=1, **more):
    """The last info of an episode, as a script's `play` returns it."""
    return {"episode": {"r": ret, "l": length}, **more}


class Lottery(gym.Env):
    """The return is minus the action, 0 to 9."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(10)
    eval_suites = {"two": [{"shift": 0}, {"shift": 100, "scale": 3}], "none": []}

    def __init__(self, shift=0, scale=2, report=True):
        self.shift, self.scale, self.report = shift, scale, report

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        info = {"eval": {"cost": np.float64(self.shift + self.scale * action), "rule": np.int64(3)}}
        return self.observation_space.low, -float(action), True, False, info if self.report else {}


def play(makers, greedy):
    """Greedy: action 5. Sampled: 9, 8, 7, ... in turn. The scripts' one needs an environment,
    too."""
    assert makers
    episodes = []
    for i, make in enumerate(makers):
        env = make()
        env.reset()
        _, ret, *_, info = env.step(5 if greedy else 9 - i % 10)
        episodes.append(episode(ret, **info))
    return episodes


def suite_of(suite="two", samples=4, play=play, **kwargs):
    args = SimpleNamespace(eval_suite=suite, eval_samples=samples, env_id="Lottery-v0")
    return list(evaluate.run_suite(play, lambda **more: Lottery(**kwargs | more), args))


def cells(table):
    between = "|" if table.startswith("|") else ","
    lines = [line.strip("|").split(between) for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def column(table, name):
    header, *lines = cells(table)
    return [line[header.index(name)] for line in lines if line[0] != "---"]


class Writer:
    """Holds what was logged as text."""

    def __init__(self):
        self.texts = []

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))


# ---- Suites ----
def test_best_of_samples():
    """The greedy cost and the best of --eval-samples; the cost is info["eval"]["cost"], else minus
    the return."""
    row = {"instance": "0", "greedy": 10, "best of 4": 12, "rule": 3}
    assert suite_of() == [row, row | {"instance": "100 3", "greedy": 115, "best of 4": 118}]
    names = ("greedy", "best of 4")
    assert [[row[name] for name in names] for row in suite_of(report=False)] == [[5, 6], [5, 6]]
    assert suite_of(samples=0)[0] == {"instance": "0", "greedy": 10, "rule": 3}


def test_episodes_that_did_not_end():
    """They count with what they have, are marked and counted; the best of the samples is one that
    ended, if any did."""

    def cut(makers, greedy):
        episodes = play(makers, greedy)
        return [e | {"cut": True} if greedy or i > 1 else e for i, e in enumerate(episodes)]

    rows = suite_of(play=cut)
    expected = [(10, 16, 3), (115, 124, 3)]
    assert [(row["greedy"], row["best of 4"], row["cut"]) for row in rows] == expected
    rows = [rows[0] | {"best_known": 8}, rows[1] | {"best_known": 100, "cut": 1}]
    table = evaluate.eval_table([*rows, {"instance": "c", "greedy": 8.0, "best_known": 8}])
    assert column(table, "greedy gap %") == ["25.0", "15.0", "0.0", "**13.3**"]
    assert column(table, "best of 4 gap %") == ["100.0", "24.0", "", "**62.0**"]
    assert column(table, "cut") == ["3", "1", "", "**4**"]
    all_cut = lambda *args: [e | {"cut": True} for e in play(*args)]
    assert [row["best of 4"] for row in suite_of(play=all_cut)] == [12, 118]


def test_a_policy_that_stands_still(tmp_path, monkeypatch):
    """As many sampled episodes of the same starts stand beside the greedy ones that did not end,
    and an episode has at most ten times the steps of the longest one of the training."""
    played = []

    def play(agent, args, envs, greedy):
        step = envs.reset(args.seed + 10_000)
        played.append((greedy, args.eval_max_steps, step.obs.values[0].tolist()))
        cut = [greedy and i > 0 for i in range(len(envs.envs))]
        return [episode(0.0, args.eval_max_steps, cut=True) if c else episode(1.0, 2) for c in cut]

    monkeypatch.setattr(ppo_graph, "play", play)
    ran = run(tmp_path, env_id="CartPole-v1", total_timesteps=192, eval_episodes=3)
    longest = max(map(int, column((ran.folder / "episodes.csv").read_text(), "length")))
    (greedy, most, starts), sampled = played
    assert greedy and sampled == (False, most, starts)
    assert most == 10 * longest < 1000
    first, second, _ = ran.rows
    expected = {"episode": 0, "length": 2, "return": 1.0}
    assert first == expected | {"sampled length": 2, "sampled return": 1.0}
    assert second["length"] == most and second["cut"] == 1 and "sampled cut" not in second
    line = f"did not end in {most} steps: 2 of 3 greedy episodes, and 0 sampled ones"
    assert line in ran.text.splitlines()
    run(tmp_path / "b", env_id="CartPole-v1", eval_episodes=1, eval_max_steps=3)
    run(tmp_path / "c", env_id="CartPole-v1", eval_episodes=1, total_timesteps=0)
    assert [most for _, most, _ in played[2:]] == [3, 10_000]


def test_suite_that_does_not_exist():
    words = r"--eval-suite three: Lottery-v0 has the suites \['none', 'two'\]"
    with pytest.raises(SystemExit, match=words):
        suite_of("three")
    assert suite_of("none") == []


# ---- Tables ----
def saved(rows, folder):
    """(table, rows of the csv)"""
    writer = Writer()
    evaluate.save_table(rows, str(folder), writer, 7)
    table = (Path(folder) / "eval.md").read_text()
    ((name, text, step),) = writer.texts
    assert (name, text + "\n", step) == ("evaluation", table, 7)
    with open(Path(folder) / "eval.csv", newline="") as file:
        return table.strip(), list(csv.reader(file))


def test_costs(tmp_path, capsys):
    """They become gaps to the best known in percent, where that is, and the mean is that of the
    gaps; the csv has the costs. Of more than 20 rows the means are printed, a line for each column,
    gaps from the smallest."""
    names = ["instance", "greedy", "SPT", "best_known", "lower_bound", "cut"]
    costs = [("a", 110.0, 150, 100, 90, 1), ("b 2", np.float64(52), 75, 50, 50, 0)]
    rows = [dict(zip(names, row)) for row in costs]
    table, read = saved(rows, tmp_path)
    assert table in capsys.readouterr().out
    assert cells(table) == [
        ["instance", "greedy gap %", "SPT gap %", "best_known", "lower_bound", "cut"],
        ["---"] * 6,
        ["a", "10.0", "50.0", "100", "90", "1"],
        ["b 2", "4.0", "50.0", "50", "50", "0"],
        ["**mean**", "**7.0**", "**50.0**", "", "", "**1**"],
    ]
    assert read == [names, *(list(map(str, row)) for row in costs)]
    table, _ = saved([rows[0] | {"SPT": 105}] * 21, tmp_path)
    assert len(cells(table)) == 2 + 21 + 1
    head, _, *lines = cells(capsys.readouterr().out.strip())
    assert head == ["", "mean of 21"]
    assert lines == [["SPT gap %", "5.0"], ["greedy gap %", "10.0"], ["cut", "21"]]


def test_groups_are_in_order():
    """A mean of each before the mean of all, if they are fewer than the rows."""
    rows = [{"episode": k, "group": f"z_{k % 3 * 5}", "return": 1.0 * k} for k in range(6)]
    table = cells(evaluate.eval_table(rows))[2 + len(rows) :]
    assert [line[1:] for line in table] == [
        ["**z_0**", "**1.5**"],
        ["**z_5**", "**2.5**"],
        ["**z_10**", "**3.5**"],
        ["", "**2.5**"],
    ]


def test_table_that_cannot_be_written(tmp_path, capsys):
    """It is printed, and the error is one sentence."""
    with pytest.raises(SystemExit, match="cannot write .*eval.md: .*Errno"):
        evaluate.save_table([{"episode": 0, "return": 1.0}], str(tmp_path / "missing"), Writer(), 0)
    assert "| return |" in capsys.readouterr().out


# ---- Videos ----
class Picture(SmallEnv):
    """Shows the step as a shade of grey; episodes of `length` steps."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space, action_space = spaces.Discrete(1), spaces.Discrete(2)

    def __init__(self, render_mode=None, length=5, frame=None):
        self.render_mode, self.length, self.frame = render_mode, length, frame

    def observe(self):
        return 0

    def render(self):
        if isinstance(self.frame, str):
            raise RuntimeError("no display")
        return np.full((8, 12, 3), self.t % 256, np.uint8)


def film(*lengths):
    """A `play` of as many environments that makes these steps in each, with a reset in the same
    step as an episode's end."""

    def play(makers, greedy):
        assert greedy and len(makers) == 3
        for make, length in zip(makers, lengths):
            env = make()
            env.reset(seed=1)
            for _ in range(length):
                if any(env.step(0)[2:4]):
                    env.reset()

    return play


def shades(path):
    """[(shade, milliseconds)] of the pictures."""
    with Image.open(path) as image:
        found = []
        for k in range(image.n_frames):
            image.seek(k)
            found.append((image.convert("RGB").getpixel((3, 3))[0], image.info["duration"]))
        return found


def shown(*episodes, duration=100):
    """What `shades` finds of episodes of so many steps."""
    found = []
    for length in episodes:
        found += [(t, duration) for t in range(length)] + [(length, 3000)]
    return found


@pytest.fixture
def video(tmp_path):
    """What `shades` finds in a video of an environment."""

    def save(env, *lengths, **kwargs):
        path = tmp_path / "episode.gif"
        make = lambda **more: env(**kwargs, **more)
        evaluate.save_video(str(path), film(*lengths), make)
        return shades(path)

    return save


@pytest.mark.parametrize("fps, duration", [(4, 250), (1000, 20)])
def test_video(fps, duration, video):
    """Each frame of the first episodes, the last ones too, and none of the next episodes, as fast
    as the environment, at most 50 pictures a second. Pictures of several sizes get that of the
    first one."""

    class Fast(Picture):
        metadata = Picture.metadata | {"render_fps": fps}

        def render(self):
            return super().render().repeat(1 + self.t, 0)

    assert video(Fast, 3, 6, 9) == shown(3, 5, 5, duration=duration)


def test_long_video_and_full_disk(video, tmp_path):
    """Of an episode without end the last 500 frames are shown. A film that cannot be written is an
    error, and leaves nothing."""
    found = [shade for shade, _ in video(Picture, 600, 1, 2, length=9999)]
    assert found[:500] == [t % 256 for t in range(101, 601)] and len(found) == 505
    (tmp_path / "episode.gif").unlink()
    with full_disk(100), pytest.raises(SystemExit, match="cannot write .*b.gif: .*Errno"):
        make = lambda **more: Picture(**more)
        evaluate.save_video(str(tmp_path / "b.gif"), film(5, 5, 5), make)
    assert list(tmp_path.iterdir()) == []


class Blind(Picture):
    metadata = {"render_modes": ["ansi"]}


@pytest.mark.parametrize(
    "make, sentence",
    [
        (Blind, r"render modes are \['ansi'\]"),
        (partial(Picture, frame="error"), "cannot render: RuntimeError: no display"),
    ],
)
def test_environments_that_cannot_render(make, sentence):
    """An error before the training."""
    with pytest.raises(SystemExit, match=f"--capture-video: .*{sentence}"):
        evaluate.check_video(make)
    assert evaluate.check_video(Picture) is None
