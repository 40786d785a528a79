"""DagSchedule-v0: executors and tasks are conserved in any episode, times are those of hand-made
jobs, rewards add up to the job-seconds, and rules have the published order."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph.envs import dag_schedule
from cleanrl_graph.envs.dag_schedule import (
    COLUMN,
    MAX_STAGES,
    MEAN_WORK,
    NODE_FEATURES,
    RULES,
    DagScheduleEnv,
    play_rule,
)

CHAIN = ([4, 2], [1.0, 3.0], [(0, 1)])
PLAIN = dict(moving_delay=0.0, warmup=0.0, first_wave=1.0, inflation=(1e-30, 1e-30), noise=0.0)


def sample_action(env, observation, rng):
    node = int(rng.choice(np.flatnonzero(observation["action_mask"])))
    return {"node": node, "executors": int(rng.integers(env.action_space["executors"].n))}


def play(env, seed, rule=None):
    """Plays one episode; returns the sum of rewards and the last info."""
    observation, _ = env.reset(seed=seed)
    rng, total, terminated = np.random.default_rng(seed), 0.0, False
    while not terminated:
        if rule:
            action = dag_schedule.rule_action(env, rule, rng)
        else:
            action = sample_action(env, observation, rng)
        observation, reward, terminated, truncated, info = env.step(action)
        assert not truncated and (reward <= 0 or env.shaped)
        total += reward
    return total, info


class Recorded(DagScheduleEnv):
    """Keeps every task as (stage, start), and checks what must hold when it starts."""

    def _start_episode(self, rng):
        self.tasks = []
        super()._start_episode(rng)

    def _draw_duration(self, stage, job):
        assert self.parents_left[stage] == 0 and self.left[stage] >= 0
        assert sum(self.busy) + sum(self.draining) <= self.num_executors
        self.tasks.append((stage, self.now))
        return super()._draw_duration(stage, job)


def check_state(env):
    """Executors and tasks are conserved, and the counts of stages and jobs agree."""
    moving = sum(env.num_stages <= code < 2 * env.num_stages for _, code in env.heap)
    working = sum(code < env.num_stages for _, code in env.heap)
    assert min(env.idle) >= 0 and sum(env.idle) == env.num_idle
    assert env.num_idle + moving + working + sum(env.waiting) == env.num_executors
    assert working == sum(env.running) == sum(env.busy) + sum(env.draining)
    assert env.num_draining == sum(env.draining) and 0 <= env.num_pending <= env.num_draining
    assert env.num_pending == sum(num for _, num in env.pending)
    assert sum(env.assigned) == sum(env.coming) == moving + sum(env.waiting) + env.num_pending
    assert min(env.left) >= 0 and min(env.assigned) >= 0
    for s in range(env.num_stages):
        parents = env.links[env.links[:, 1] == s, 0].tolist()
        assert env.parents_open[s] == sum(env.left[p] > 0 for p in parents)
        started = env.num_tasks[s] - env.left[s]
        assert not started or not env.alive[parents].any()
        in_system = env.job_of[s] in env.jobs
        may_start = in_system and env.left[s] > env.assigned[s] and not env.parents_open[s]
        assert (s in env.legal) == may_start
        if in_system:
            assert env.alive[s] == (env.left[s] + env.running[s] > 0)


def check_observation(env, observation):
    graph, mask = observation["graph"], observation["action_mask"]
    num_stages, num_jobs = int(env.alive.sum()), len(env.jobs)
    assert graph.nodes.shape == (num_stages + num_jobs, len(NODE_FEATURES))
    assert graph.nodes.dtype == np.float32
    assert np.isfinite(graph.nodes).all() and graph.nodes.min() >= 0 and graph.nodes.max() < 8
    assert mask.dtype == np.int8 and mask.shape == (len(graph.nodes),)
    assert env.nodes[mask == 1].tolist() == sorted(env.legal) and mask.any()
    table = {name: graph.nodes[:, k] for name, k in COLUMN.items()}
    assert table["is_stage"].sum() == num_stages and table["is_job"].sum() == num_jobs
    stages, hubs = slice(num_stages), slice(num_stages, None)
    left = np.array(env.left)[env.alive]
    np.testing.assert_allclose(np.expm1(5 * table["tasks"][stages]), left, rtol=1e-4, atol=1e-4)
    work = dag_schedule.remaining_work(env)[env.jobs]
    np.testing.assert_allclose(np.expm1(8 * table["job_work"][hubs]), work, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.expm1(8 * table["work"][hubs]), work, rtol=1e-3, atol=1e-3)
    room = (left - np.array(env.assigned)[env.alive]) / env.free
    np.testing.assert_allclose(table["room"][stages], np.clip(room, 0, 1), atol=1e-4)
    running = table["running"][hubs].sum() * env.num_executors
    np.testing.assert_allclose(running, sum(env.running), atol=1e-3)
    jobs = np.array(env.jobs)[env.job_row]
    for (a, b), kind in zip(graph.edge_links.tolist(), graph.edges.tolist()):
        if kind < 2:
            a, b = (a, b) if kind == 0 else (b, a)
            assert [env.nodes[a], env.nodes[b]] in env.links.tolist()
        else:
            stage, hub = (a, b) if kind == 2 else (b, a)
            assert stage < num_stages and env.jobs[hub - num_stages] == jobs[stage]
    counts = np.bincount(graph.edges, minlength=4)
    num_links = env.alive[env.links].all(1).sum()
    assert counts.tolist() == [num_links, num_links, num_stages, num_stages]


@settings(max_examples=10, deadline=None)
@given(
    num_jobs=st.integers(1, 6),
    num_executors=st.integers(1, 20),
    load=st.sampled_from([None, 0.5, 2.0]),
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.4]),
    delay=st.sampled_from([0.0, 2.0]),
)
def test_invariants(num_jobs, num_executors, load, seed, noise, delay):
    size = dict(num_jobs=num_jobs, num_executors=num_executors, load=load, sizes=(1, 5))
    env = Recorded(**size, noise=noise, moving_delay=delay, reward_unit=1.0)
    observation, info = env.reset(seed=seed)
    assert info == {} and env.now == 0
    rng, total, terminated = np.random.default_rng(seed), 0.0, False
    while not terminated:
        check_state(env)
        check_observation(env, observation)
        action = sample_action(env, observation, rng)
        stage, now = env.nodes[action["node"]], env.now
        job, limit = env.job_of[stage], env.limits[action["executors"]]
        have = env.busy[job] + env.coming[job]
        given = pickle.loads(pickle.dumps(env))
        given._give(stage, limit)
        assert given.busy[job] + given.coming[job] <= max(limit, have + 1) and given.now == now
        assert given.left[stage] - given.assigned[stage] < env.left[stage] - env.assigned[stage]
        observation, reward, terminated, _, _ = env.step(action)
        total += reward
    num_tasks = np.bincount([s for s, _ in env.tasks], minlength=env.num_stages)
    assert num_tasks.tolist() == env.num_tasks.tolist()
    assert total == pytest.approx(-np.subtract(env.completion, env.arrival).sum())
    assert env.num_idle == env.idle[-1] == num_executors and not env.heap and not env.jobs
    start = np.array([min(t for s, t in env.tasks if s == k) for k in range(env.num_stages)])
    last = np.array([max(t for s, t in env.tasks if s == k) for k in range(env.num_stages)])
    assert (last[env.links[:, 0]] <= start[env.links[:, 1]]).all()
    assert (start >= np.array(env.arrival)[env.job_of_stage]).all()
    assert len(observation["graph"].nodes) == 1


@pytest.mark.parametrize("load", [None, 0.75])
def test_shaped_rewards_differ_by_what_the_jobs_determine(load):
    """The return is minus the job-seconds. Shaped, it differs by the first decision's potential,
    and the jobs move it less."""
    plain, shaped = (DagScheduleEnv(load=load, shaped=on) for on in (False, True))
    returns = []
    for seed in range(6):
        shaped.reset(seed=seed)
        first = dag_schedule.fluid_job_seconds(shaped) / shaped.reward_unit
        returns.append([play(env, seed, "weighted fair")[0] for env in (plain, shaped)])
        times = np.subtract(plain.completion, plain.arrival)
        assert returns[-1][0] == pytest.approx(-times.sum() / plain.reward_unit)
        assert first > 0 and returns[-1][1] - returns[-1][0] == pytest.approx(first)
    assert np.std(returns, 0)[1] < 0.6 * np.std(returns, 0)[0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([None, 1.0]))
def test_fluid_job_seconds(seed, share, load):
    """Small steps of time give the same, from a random decision of an episode on."""
    env = DagScheduleEnv(num_jobs=5, num_executors=10, load=load, sizes=(2, 5))
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    for _ in range(rng.integers(1, 30)):
        observation, _, terminated, _, _ = env.step(sample_action(env, observation, rng))
        if terminated:
            break
    work = dag_schedule.remaining_work(env) * (1 + env.scaling / share)
    left = {j: work[j] for j in range(5) if env.completion[j] is None}
    expected, now, dt = 0.0, env.now, 0.02
    while left:
        inside = sorted((w, j) for j, w in left.items() if env.arrival[j] <= now)
        expected, now = expected + dt * len(inside), now + dt
        for _, j in inside[:share]:
            left[j] -= dt * 10 / share
            if left[j] <= 0:
                del left[j]
    assert dag_schedule.fluid_job_seconds(env, share) == pytest.approx(expected, rel=0.02, abs=1)


def test_times_of_a_chain():
    """4 tasks of 1 s, then 2 of 3 s, on 2 executors: 2 s, then 3 s."""
    env = DagScheduleEnv(jobs=[CHAIN], num_executors=2, reward_unit=1.0, **PLAIN)
    total, info = play(env, 0, "fair")
    assert -total == info["eval"]["cost"] == pytest.approx(5)
    # a second executor that waits for its parent does not start before it is complete
    slow = dict(PLAIN, moving_delay=2.0, warmup=0.5, first_wave=2.0)
    env = DagScheduleEnv(jobs=[CHAIN], num_executors=2, reward_unit=1.0, **slow)
    total, info = play(env, 0, "FIFO")
    # move 2, first tasks 2 + 0.5, second ones 1; then two first tasks of 2 * 3
    assert info["eval"]["cost"] == pytest.approx(2 + 2.5 + 1 + 6)
    # c = 1 with all 2 executors at work: every task takes twice as long
    env = DagScheduleEnv(jobs=[([2], [1.0], [])], num_executors=2, **PLAIN | dict(inflation=(1, 1)))
    assert play(env, 0, "FIFO")[1]["eval"]["cost"] == pytest.approx(2, abs=1.01)
    # an executor goes on in its own job at once, and takes moving_delay to another one
    jobs = [([1, 1], [1.0, 1.0], [(0, 1)]), ([1], [1.0], [])]
    env = DagScheduleEnv(jobs=jobs, num_executors=1, **dict(PLAIN, moving_delay=10.0))
    assert play(env, 0, "FIFO")[1]["eval"]["cost"] == pytest.approx((12 + 23) / 2)


def test_random_jobs_have_the_statistics_of_the_docstring():
    rng = np.random.default_rng(0)
    jobs = [dag_schedule.random_job(rng) for _ in range(4000)]
    sizes = np.array([len(tasks) for tasks, *_ in jobs])
    assert sizes.min() == 2 and sizes.max() == MAX_STAGES and 6.9 < sizes.mean() < 7.5
    work = np.sort([(tasks * duration).sum() for tasks, duration, _ in jobs])[::-1]
    assert work.mean() == pytest.approx(MEAN_WORK, rel=0.15)
    assert 0.77 < work[: int(0.23 * len(work))].sum() / work.sum() < 0.86
    for k, job in enumerate(jobs[:300]):
        tasks, duration, edges = dag_schedule.check_job(job, k)
        assert tasks.max() <= 500 and duration.max() <= 30 and len(edges) == len(job[2])
        sources = np.unique(edges[:, 0])
        assert sources.tolist() == list(range(len(tasks) - 1))  # one last stage
    fan_in = np.concatenate([np.bincount(edges[:, 1]) for *_, edges in jobs])
    assert 5 <= fan_in.max() <= 9


@pytest.mark.parametrize("rule, limits", [*((rule, None) for rule in RULES), ("random", 3)])
def test_rule_action_plays_the_same_schedule(rule, limits):
    """The random rule keeps to the limits of the environment."""
    kwargs = dict(num_jobs=4, num_executors=8, load=1.0, limits=limits, workload=3)
    env = DagScheduleEnv(**kwargs)
    _, info = play(env, 0, rule)
    assert info["eval"].keys() == {"cost", *RULES}
    assert info["eval"][rule] == play_rule(rule, **kwargs)
    env._start_episode(rng := np.random.default_rng(5))  # as play_rule does
    env._observe()
    while env.num_done < env.num_jobs:
        env.step(dag_schedule.rule_action(env, rule, rng))
    assert np.subtract(env.completion, env.arrival).mean() == play_rule(rule, seed=5, **kwargs)


def test_rules_are_in_the_order_of_the_paper():
    """Mean job completion time: weighted fair is best, then fair; FIFO and random are far worse."""
    for load in (None, 0.75):
        mean = lambda rule: np.mean([play_rule(rule, workload=k, load=load) for k in range(3)])
        cost = {rule: mean(rule) for rule in RULES}
        assert cost["weighted fair"] < cost["fair"] < 0.8 * min(cost["random"], cost["FIFO"])


def test_suites():
    """A workload is the same jobs whatever the seed; each suite has its own."""
    env = DagScheduleEnv(num_jobs=4, workload=5)
    first, second = (env.reset(seed=seed)[0]["graph"].nodes for seed in (1, 2))
    assert np.array_equal(first, second)
    suites = DagScheduleEnv.eval_suites
    assert {name: len(suite) for name, suite in suites.items()} == {
        "batch": 100,
        "continuous": 100,
        "long": 10,
    }
    for suite in suites.values():
        assert [kwargs["workload"] for kwargs in suite] == list(range(len(suite)))
        DagScheduleEnv(**suite[0])
