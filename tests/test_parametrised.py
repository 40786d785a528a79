"""S1: environments parametrised per copy (a list of --env-kwargs) and policies given a z per episode (--agent-z)."""

import csv
import importlib
import os
import random
import shutil
import time

import gymnasium as gym
import numpy as np
import ppo_graph
import pytest
import torch
import tyro
from gymnasium import spaces
from helpers import small_args, vector
from test_double_buffer import FLAGS
from test_main import SCRIPTS, run_path, scalars
from test_ranks import launch
from test_reliability import assert_equal, folder_of, log_of, newest, start, train, wait_for, weights


class Family(gym.Env):
    """Shows [number, z[0], step] with the z of its last reset, -1 without; kind "set": in a Dict, beside a set to
    choose from; "info": with an action mask in info. The reward is `number` + z[0]; episodes have 2 + `number` steps
    and are truncated where `number` is odd."""

    metadata, eval_suites = {"render_modes": ["rgb_array"]}, {"two": [{"number": 5}, {"number": 6}]}

    def __init__(self, number=0, actions=3, kind="flat", width=3, low=-9.0, start=0, render_mode=None):
        self.number, self.kind, self.render_mode = number, kind, render_mode
        self.action_space = spaces.Discrete(actions, start=start)
        self.observation_space = vector(width, low=low, high=99.0)
        if kind == "set":
            mask = spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True)
            self.observation_space = spaces.Dict(x=self.observation_space, action_mask=mask,
                                                 s=spaces.Sequence(vector(1), stack=True))

    def observe(self):
        x = np.array([self.number, np.ravel(self.z)[0], self.t], np.float32)
        one = np.ones((2, 1), np.float32)
        return {"x": x, "s": one, "action_mask": np.ones(2, np.int8)} if self.kind == "set" else x

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.z, self.t = (options or {}).get("z", -1), 0
        return self.observe(), self.info()

    def info(self):
        return {"action_mask": np.ones(self.action_space.n, np.int8)} if self.kind == "info" else {}

    def step(self, action):
        self.t += 1
        ends, odd = self.t == 2 + self.number, self.number % 2 == 1
        return self.observe(), self.number + float(np.ravel(self.z)[0]), ends and not odd, ends and odd, self.info()

    def render(self):
        return np.full((4, 4, 3), self.number, np.uint8)


gym.register("Family-v0", entry_point=Family)
NUMBERS = [{"number": 1}, {"number": 2}, {"number": 4}]


def makers_of(args, num_envs, first=0):
    return [ppo_graph.env_maker(args, first + i) for i in range(num_envs)]


def record(num_workers, num_steps, double_buffer=False, **flags):
    """Leaf values [num_steps + 1, N, ...] by path and all episodes, of 4 environments in which action 0 is taken."""
    args = small_args(num_envs=4, num_workers=num_workers, double_buffer=double_buffer, **flags)
    envs, episodes = ppo_graph.make_envs(makers_of(args, 4), args), []
    with ppo_graph.contextlib.closing(envs):
        steps = [envs.reset(7)]
        rows = [[np.concatenate(arrays).copy() for arrays in steps[0].parts]]
        for _ in range(num_steps):
            step = envs.step([0] * 4)
            rows.append([np.concatenate(arrays).copy() for arrays in step.parts])
            episodes.append(sorted(step.episodes))
    return {leaf.path: np.array(column) for leaf, column in zip(envs.leaves, zip(*rows))}, episodes


# ---- A list of --env-kwargs ----
@pytest.mark.parametrize("num_workers, double_buffer", [(0, False), (3, False), (2, True)])
def test_env_i_has_entry_i_modulo_the_number(num_workers, double_buffer):
    """S1: copy i has entry i modulo the length of the list, wherever it is stepped."""
    values, episodes = record(num_workers, 6, double_buffer, env_id="Family-v0", env_kwargs=NUMBERS)
    assert values["obs"][:, :, 0].tolist() == [[1, 2, 4, 1]] * 7
    assert [sorted((i, length) for i, _, length, _ in row) for row in episodes] == [
        [], [], [(0, 3), (3, 3)], [(1, 4)], [], [(0, 3), (2, 6), (3, 3)]]


def test_names_of_tasks_in_the_log(tmp_path):
    """S1: returns and lengths per entry beside those of all; without a list, or a z, there are only the latter."""
    flags = dict(env_id="Family-v0", num_envs=4, num_steps=6, total_timesteps=24)
    ppo_graph.main(small_args(run_dir=str(tmp_path / "a"), env_kwargs=NUMBERS, **flags))
    log = scalars(tmp_path / "a")
    names = [name for name in log if name.startswith("charts/episodic")]
    assert sorted(names) == sorted(f"charts/episodic_{kind}{task}" for kind in ("return", "length")
                                   for task in ("", "/task_0", "/task_1", "/task_2"))
    assert log["charts/episodic_return/task_0"] == [(12, 0)] * 2 + [(24, 0)] * 2  # 3 steps of 1 + z = -1 + 1
    assert log["charts/episodic_return/task_1"] == [(16, 4)] and log["charts/episodic_return/task_2"] == [(24, 18)]
    assert log["charts/episodic_length/task_2"] == [(24, 6)] and len(log["charts/episodic_return"]) == 6
    ppo_graph.main(small_args(run_dir=str(tmp_path / "b"), env_kwargs={"number": 1}, **flags))
    assert [name for name in scalars(tmp_path / "b") if "episodic_return" in name] == ["charts/episodic_return"]


def test_ranks_cover_the_list(tmp_path):
    """S1, S4: the index counts over all ranks, and rank 0 logs the episodes of all entries, each once."""
    flags = ["--env-id", "Family-v0", "--env-kwargs", '[{"number": 1}, {"number": 2}, {"number": 4}]',
             "--num-envs", "2", "--num-steps", "12", "--num-minibatches", "1", "--total-timesteps", "96",
             "--run-dir", "runs"]
    launch(tmp_path, "ppo_graph", 2, flags, "import test_parametrised")
    log = scalars(tmp_path / "runs")
    lengths = {k: [length for _, length in log[f"charts/episodic_length/task_{k}"]] for k in range(3)}
    assert lengths == {0: [3] * 16, 1: [4] * 6, 2: [6] * 4}  # 24 steps; entry 0 is in env 0 and env 3
    assert len(log["charts/episodic_length"]) == 26 and len(log["losses/value_loss"]) == 2


@pytest.mark.parametrize("tasks, words", [
    ([{}, {}, {"width": 4}], ["entry 2 {'width': 4}", "observation space is Box", "(4,)", "(3,)", "entry 0"]),
    ([{}, {"actions": 4}], ["entry 1 {'actions': 4}", "action space is Discrete(4)", "Discrete(3)"]),
    ([{}, {"kind": "set"}], ["entry 1 {'kind': 'set'}", "observation space is Dict(", "is Box("]),
    ([{"kind": "set"}, {"kind": "set", "start": 1}], ["action space is Discrete(3, start=1)", "Discrete(3)"]),
    ([], ["--env-kwargs []", "at least one object"]),
    ([3], [r"--env-kwargs [3]", "at least one object"]),
])
def test_spaces_that_differ(tasks, words, tmp_path):
    """S1: one policy plays all entries, so one with other spaces is named with both; an empty list is an error."""
    with pytest.raises(ValueError) as error:
        ppo_graph.main(small_args(env_id="Family-v0", env_kwargs=tasks, run_dir=str(tmp_path)))
    assert all(word in str(error.value) for word in words), error.value


def test_spaces_that_fit():
    """S1: the number of rows to choose from is no property of the policy, nor are the bounds of a Box."""
    ppo_graph.check_tasks(small_args(env_id="Family-v0", env_kwargs=[
        {"kind": "set", "actions": 3}, {"kind": "set", "actions": 9, "low": -1.0}]))
    ppo_graph.check_tasks(small_args(env_id="envs:JobShop-v0", env_kwargs=[
        {"jobs": 3, "machines": 3}, {"instance": "la01"}]))


def test_list_on_the_command_line():
    """S6: an object or a list of them."""
    flags = ["--env-kwargs", '[{"number": 1}, {}]', "--agent-z", "skill:3"]
    args = tyro.cli(ppo_graph.Args, args=flags)
    assert args.env_kwargs == [{"number": 1}, {}] and args.agent_z == "skill:3"
    with pytest.raises(ValueError, match="at least one object"):
        ppo_graph.main(tyro.cli(ppo_graph.Args, args=["--env-kwargs", "3"]))


# ---- z ----
@pytest.mark.parametrize("kind", ["flat", "set", "info"])
@pytest.mark.parametrize("agent_z", ["skill:3", "uniform:2"])
def test_z_of_an_episode(kind, agent_z):
    """S1: a new z for every episode, the same in all of its steps, handed to the environment by the options of reset;
    other keys of the observation stay, action_mask among them."""
    flags = dict(env_id="Family-v0", env_kwargs=[{"number": 0, "kind": kind}, {"number": 1, "kind": kind}])
    values, episodes = record(0, 120, agent_z=agent_z, **flags)
    plain, _ = record(0, 1, **flags)
    x = "x" if kind == "set" else "obs"
    assert set(values) == {*plain, "z"}
    z = values["z"].reshape(121, 4, -1)
    assert np.array_equal(z[:, :, 0], values[x][:, :, 1])  # the environment's own copy
    begins = values[x][:, :, 2] == 0
    changed = (z[1:] != z[:-1]).any(2)
    assert not changed[~begins[1:]].any()
    drawn = np.concatenate([z[begins[:, i], i] for i in range(4)])
    if agent_z == "skill:3":
        assert set(drawn.ravel()) == {0, 1, 2} and 0.55 < changed[begins[1:]].mean() < 0.8
        assert min(np.bincount(drawn.ravel().astype(int))) > 0.25 * len(drawn)
    else:
        assert changed[begins[1:]].all() and 0 <= drawn.min() < 0.05 and 0.95 < drawn.max() < 1
        assert len(np.unique(drawn[:, 0])) == len(np.unique(drawn[:, 1])) == len(drawn)
    ended = [(i, info["agent_z"]) for row in episodes for i, _, _, info in row]
    before = [np.atleast_1d(z[t, i]).tolist() for t in range(120) for i in range(4) if begins[t + 1, i]]
    assert [np.atleast_1d(value).tolist() for _, value in ended] == before


@pytest.mark.parametrize("agent_z", ["skill:5", "uniform:2"])
def test_z_is_the_same_in_workers(agent_z):
    """S1: env i draws the same z, whatever process steps it, and its own random numbers do not change with it."""
    flags = dict(env_id="Random-v0", env_kwargs={"observation": "vector"})
    values, episodes = record(0, 20, agent_z=agent_z, **flags)
    for num_workers, double_buffer in ((3, False), (2, True)):
        others, other_episodes = record(num_workers, 20, double_buffer, agent_z=agent_z, **flags)
        assert all(np.array_equal(values[path], others[path]) for path in values) and episodes == other_episodes
    assert len({tuple(np.ravel(z)) for z in values["z"][0]}) > 1
    assert np.array_equal(record(0, 20, **flags)[0]["obs"], values["obs"])


def test_truncation_and_rendering_go_through(tmp_path):
    """S1: truncated episodes keep their last observation with its z, --capture-video shows the first entry."""
    args = small_args(env_id="Family-v0", env_kwargs=[{"number": 1}, {"number": 2}], agent_z="skill:3")
    envs = ppo_graph.Envs(makers_of(args, 2))
    z = envs.reset(0).parts[-1][0].copy()
    ends = [envs.step([0, 0]) for _ in range(4)]
    assert [step.truncated.tolist() for step in ends] == [[False] * 2] * 2 + [[True, False], [False] * 2]
    assert [step.terminated.tolist() for step in ends] == [[False] * 2] * 3 + [[False, True]]
    ((i, (obs, last)),) = ends[2].finals
    assert i == 0 and obs.tolist() == [1, z[0], 3] and last == z[0] and envs.leaves[-1].path == "z"
    ppo_graph.main(small_args(env_id="Family-v0", env_kwargs=[{"number": 1}, {"number": 2}], agent_z="uniform:1",
                              capture_video=True, run_dir=str(tmp_path)))
    with ppo_graph.Image.open(run_path(tmp_path) / "episode.gif") as video:
        assert video.convert("RGB").getpixel((0, 0)) == (1, 1, 1)


@pytest.mark.parametrize("agent_z", ["skill", "skill:0", "skill:x", "uniform:-1", "normal:2", ""])
def test_z_of_an_unknown_kind(agent_z, tmp_path):
    with pytest.raises(ValueError, match=f"--agent-z {agent_z}: none, skill:K or uniform:D"):
        ppo_graph.main(small_args(env_id="Family-v0", agent_z=agent_z, run_dir=str(tmp_path)))


class HasZ(Family):
    """A key z of its own."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict(z=vector(1))


gym.register("HasZ-v0", entry_point=HasZ)


def test_z_that_is_there_already(tmp_path):
    """S1: the environment's own z is not covered."""
    with pytest.raises(ValueError, match="--agent-z skill:2: the observation has a key 'z' already"):
        ppo_graph.main(small_args(env_id="HasZ-v0", agent_z="skill:2", run_dir=str(tmp_path)))


def test_names_of_z_in_the_log(tmp_path):
    """S1: returns and lengths per skill; for numbers per third of the first one."""
    flags = dict(env_id="Family-v0", num_steps=100, total_timesteps=300, num_minibatches=1)
    ppo_graph.main(small_args(run_dir=str(tmp_path / "a"), agent_z="skill:3", **flags))
    log = scalars(tmp_path / "a")
    for z in range(3):  # two steps of reward z
        assert {value for _, value in log[f"charts/episodic_return/z_{z}"]} == {2.0 * z}
        assert {value for _, value in log[f"charts/episodic_length/z_{z}"]} == {2}
    assert sum(len(log[f"charts/episodic_return/z_{z}"]) for z in range(3)) == len(log["charts/episodic_return"]) == 150
    ppo_graph.main(small_args(run_dir=str(tmp_path / "b"), agent_z="uniform:2", **flags))
    log = scalars(tmp_path / "b")
    for z in range(3):
        values = [value / 2 for _, value in log[f"charts/episodic_return/z_{z}"]]
        assert z / 3 <= min(values) and max(values) <= (z + 1) / 3 and len(values) > 30
    assert not [name for name in log if "z_3" in name]


# ---- Evaluation ----
def table_of(folder):
    """(header, rows) of eval.md, and the rows of eval.csv."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")]
             for line in (run_path(folder) / "eval.md").read_text().splitlines()]
    with open(run_path(folder) / "eval.csv") as file:
        return lines[0], lines[2:], list(csv.DictReader(file))


def test_evaluation_of_tasks_and_skills(tmp_path):
    """S1: eval_episodes of each entry and of each skill, with their means in the table."""
    flags = dict(env_id="Family-v0", env_kwargs=NUMBERS, total_timesteps=0, eval_episodes=2)
    rows = ppo_graph.main(small_args(run_dir=str(tmp_path / "a"), agent_z="skill:2", **flags))
    expected = [(i, task, z, 2 + n, (2 + n) * (n + z)) for task, n in enumerate((1, 2, 4)) for z in (0, 1)
                for i in (0, 1)]
    assert [tuple(row.values()) for row in rows] == expected
    header, cells, read = table_of(tmp_path / "a")
    assert header == ["episode", "task", "z", "length", "return"] == list(read[0]) and len(read) == 12
    means = cells[12:]
    assert means[3] == ["**mean**", "**1**", "**1**", "**4**", "**12**"] and len(means) == 7
    assert means[-1][:3] == ["**mean**", "", ""]
    rows = ppo_graph.main(small_args(run_dir=str(tmp_path / "b"), agent_z="uniform:2", **flags))
    header, cells, _ = table_of(tmp_path / "b")
    for row in rows:
        z, length = float(row["z"].split()[0]), row["length"]
        assert row["return"] == pytest.approx(length * (length - 2 + z), abs=0.05)
    assert len({row["z"] for row in rows}) == 2 and len(cells) == 6 + 3 + 1  # the same two in each task
    rows = ppo_graph.main(small_args(run_dir=str(tmp_path / "c"), **flags))
    assert [(row["task"], row["return"]) for row in rows][::2] == [(0, 0), (1, 4), (2, 18)] and "z" not in rows[0]


def test_suites_with_a_list_and_skills(tmp_path):
    """S1: --eval-suite takes the first entry, and plays each of its own with each skill."""
    rows = ppo_graph.main(small_args(env_id="Family-v0", env_kwargs=[{"low": -8.0}, {}], agent_z="skill:2",
                                     eval_suite="two", eval_samples=2, total_timesteps=0, run_dir=str(tmp_path)))
    assert rows == [{"instance": str(n), "z": z, "greedy": -(2 + n) * (n + z), "best of 2": -(2 + n) * (n + z)}
                    for n in (5, 6) for z in (0, 1)]
    assert table_of(tmp_path)[0] == ["instance", "z", "greedy", "best of 2"]


# ---- All scripts ----
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script(name, tmp_path):
    """S1: z is one more leaf of every encoder and memory, and entries of a list are played side by side: collection and
    training compute the same policy, and the evaluation has a row for each of both."""
    script, logged = importlib.import_module(name), []
    original = script.Logger.update
    script.Logger.update = lambda self, step, logs: logged.append(logs["debug/collection_mismatch"]) or original(
        self, step, logs)
    tasks = [{"jobs": 2, "machines": 2}, {"jobs": [2, 4], "machines": 3}]
    try:
        for flags in (dict(env_id="envs:JobShop-v0", env_kwargs=tasks, agent_z="uniform:2"),
                      dict(env_id="Random-v0", env_kwargs={"observation": "mixed"}, agent_z="skill:3"),
                      dict(env_id="envs:GraphExplore-v0", env_kwargs={"episode_length": 5}, agent_z="uniform:1"),
                      dict(env_id="envs:SkillGraph-v0", env_kwargs=[{}, {"max_nodes": 5}], agent_z="skill:4")):
            rows = script.main(small_args(script, run_dir=str(tmp_path / flags["env_id"][-8:]), eval_episodes=1,
                                          num_workers=2, **flags | FLAGS.get(name, {})))
            num_skills = int(flags["agent_z"][-1]) if "skill" in flags["agent_z"] else 1
            assert len(rows) == num_skills * (len(flags["env_kwargs"]) if isinstance(flags["env_kwargs"], list) else 1)
            assert any("/z_" in name for name in scalars(tmp_path / flags["env_id"][-8:]))
    finally:
        script.Logger.update = original
    assert len(logged) == 8 and max(logged) < 1e-5


def test_z_changes_what_the_policy_does():
    """S1: the features, and the probabilities, of the same observation are others with another z."""
    args = small_args(env_id="envs:SkillGraph-v0", agent_z="skill:4")
    makers = [ppo_graph.env_maker(args, 0, z) for z in (0, 1)]
    envs = ppo_graph.Envs(makers)
    step = envs.reset(3)
    (one, two), storage = step.observations(envs.leaves), ppo_graph.Storage(envs.leaves, torch.device("cpu"))
    two[:-1] = one[:-1]  # but for z, the last leaf
    assert [leaf.path for leaf in envs.leaves if leaf.group is None] == ["z"]
    where = [leaf.path for leaf in envs.leaves].index("z")
    pair = [[*one], [*one[:where], np.int64(1), *one[where + 1:]]]
    storage.append(*ppo_graph.collate(envs.leaves, pair))
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    with torch.no_grad():
        values = agent.value(storage.latest())
    assert values[0] != values[1]


# ---- Checkpoints ----
RESUMED = {
    "skills": ("ppo_graph", dict(env_id="envs:SkillGraph-v0", agent_z="skill:4", env_kwargs=[
        {"episode_length": 5}, {"episode_length": 3, "max_nodes": 6}])),
    "numbers, workers": ("ppo_gtrxl", dict(env_id="envs:PoissonGraph-v0", agent_z="uniform:2", num_workers=2,
                                           memory_length=5, dim=8, num_heads=2, env_kwargs={"episode_length": 5})),
    "skills, LSTM": ("ppo_lstm_sparse", dict(env_id="envs:Recall-v0", lstm_dim=8, agent_z="skill:3", env_kwargs=[
        {"length": 2}, {"length": 5}])),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_with_z_is_bitwise_the_same(name, tmp_path):
    """S1, X3: the z of unfinished episodes and all that come later, weights and log, also per task and z."""
    script, flags = RESUMED[name]
    whole = train(tmp_path / "a", script, **flags)
    folder = tmp_path / "b" / whole.name
    shutil.copytree(whole, folder)
    for path in ppo_graph.checkpoints_in(str(folder))[:4]:
        os.remove(path)
    train(tmp_path / "b", script, resume="auto", **flags)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole) and any("/z_" in name for name in log_of(whole))


def test_killed_with_z(tmp_path):
    """S1, X3: kill -9 in the middle of a run with skills and two tasks in workers, and it ends as one that was not."""
    flags = RESUMED["skills"][1] | dict(total_timesteps=720, num_workers=2)
    whole = train(tmp_path / "a", **flags)
    process = start(tmp_path / "b", resume="auto", **flags)
    wait_for(lambda: newest(tmp_path / "b") >= 24 * 8)
    time.sleep(random.random() * 0.03)
    process.kill()
    process.join()
    assert 0 < newest(tmp_path / "b") < 720, "it ended before it was killed"
    folder = train(tmp_path / "b", resume="auto", **flags)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)


def test_resume_where_the_state_is_lost():
    """S1: an environment without get_state begins a new episode with the next z of its own stream."""
    args = small_args(env_id="Family-v0", env_kwargs={"number": 3}, agent_z="uniform:1")
    envs = ppo_graph.Envs(makers_of(args, 2))
    envs.reset(5)
    envs.step([0, 0])
    saved = envs.state()
    assert [state["env"] for state in saved] == [None, None]
    expected = [np.random.default_rng([5 + i, 122]).random(2, np.float32)[1] for i in range(2)]
    for seed in (5, 6):
        again = ppo_graph.Envs(makers_of(args, 2))
        step = again.restore((seed, 1, envs.state()))
        assert step.parts[-1][0].ravel().tolist() == pytest.approx(expected, abs=0)


@pytest.mark.parametrize("change", [{"agent_z": "skill:5"}, {"env_kwargs": [{"number": 1}]}])
def test_flags_that_cannot_change(change, tmp_path):
    """S1: a checkpoint goes on with its own list and z."""
    flags = dict(env_id="Family-v0", env_kwargs=NUMBERS, agent_z="skill:4")
    folder = train(tmp_path, **flags)
    with pytest.raises(ValueError, match=f"--{next(iter(change)).replace('_', '-')} .* where the checkpoint has"):
        train(tmp_path, resume=str(folder), **flags | change)
    assert folder_of(tmp_path) == folder


# ---- The worked example ----
def test_skill_graph_optimum_and_bound():
    """S1: from the observation and z alone every task can be solved; the right nodes of a graph are different, so that
    a blind policy earns T / K on average over the tasks, whichever it plays."""
    env, totals = gym.make("envs:SkillGraph-v0", disable_env_checker=True).unwrapped, np.zeros((2, 4))
    for z in range(4):
        obs, _ = env.reset(seed=3, options={"z": z})
        for episode in range(50):
            for _ in range(env.episode_length):
                assert len(set(env.right)) == 4
                graph = obs["graph"]
                target = {mark: graph.edge_links[graph.nodes[:, mark].argmax(), 1] for mark in (z, 2)}
                mark = (z, 2)[episode % 2]
                obs, reward, terminated, _, _ = env.step(target[mark])
                totals[episode % 2, z] += reward
            assert terminated
            obs, _ = env.reset(options={"z": z})
    assert totals.tolist() == [[25 * 8] * 4, [0, 0, 25 * 8, 0]]
    assert totals[1].mean() / 25 == env.best_blind_return == 2
    for wrong in (4, -1, np.float32([0.2, 0.3])):
        with pytest.raises(ValueError, match="from 0 to 3"):
            env.reset(options={"z": wrong})
    with pytest.raises(ValueError, match="num_skills 5"):
        gym.make("envs:SkillGraph-v0", num_skills=5, max_nodes=4)


@pytest.mark.parametrize("agent_z", ["skill:4", "none"])
def test_one_policy_learns_all_skills(agent_z, tmp_path):
    """S1: with z the policy reaches at least 90% of the optimum of every skill; without it, with a list of the tasks,
    it stays below the bound of the env's docstring: the evaluation plays all tasks on the same graphs."""
    tasks = {"max_nodes": 5} if agent_z != "none" else [{"max_nodes": 5, "skill": k} for k in range(4)]
    args = dict(total_timesteps=12_000 if agent_z != "none" else 4_000, num_envs=16, num_steps=32, learning_rate=3e-3,
                hidden_dims=(32,), gnn_dim=32, gnn_layers=1, gamma=0.0, anneal_lr=False, eval_episodes=20, cuda=False)
    rows = ppo_graph.main(ppo_graph.Args(env_id="envs:SkillGraph-v0", env_kwargs=tasks, agent_z=agent_z,
                                         run_dir=str(tmp_path), **args))
    returns = np.reshape([row["return"] for row in rows], (4, 20)).mean(1)
    if agent_z == "none":
        assert returns.mean() <= 2 + 1e-9
    else:
        assert returns.min() >= 0.9 * 8
