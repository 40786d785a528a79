"""Flexible job shop: schedules against a plain re-implementation and brute force, graph invariants,
benchmark data."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph.envs import flexible_job_shop
from cleanrl_graph.envs.flexible_job_shop import (
    EDGE_FEATURES,
    FEATURE_LIMIT,
    NODE_FEATURES,
    RULES,
    FlexibleJobShopEnv,
    load_instance,
    play_rule,
    suite_makespans,
)

NODE = {text.split(":")[0]: i for i, text in enumerate(NODE_FEATURES)}
EDGE = {text.split(":")[0].split(",")[0]: i for i, text in enumerate(EDGE_FEATURES)}
SUITES = FlexibleJobShopEnv.eval_suites
TINY = {"times": [[2, 4, 0], [0, 3, 3], [5, 0, 0]], "operations": [2, 1]}


class NaiveShop:
    """Dispatching with plain loops; jobs are lists of dicts machine -> time."""

    def __init__(self, jobs, num_machines, dispatch):
        self.jobs, self.dispatch = jobs, dispatch
        self.next, self.ready, self.free = [0] * len(jobs), [0] * len(jobs), [0] * num_machines
        self.schedule = []  # (job, step, machine, start, finish)

    def pairs(self):
        """Returns (job, machine, start, finish) of all next operations on all their machines."""
        found = []
        for j, job in enumerate(self.jobs):
            for m, time in sorted(job[self.next[j]].items()) if self.next[j] < len(job) else ():
                start = max(self.ready[j], self.free[m])
                found.append((j, m, start, start + time))
        return found

    def legal(self):
        """Returns the pairs (job, machine) that may be chosen now."""
        pairs = self.pairs()
        if self.dispatch == "active":
            return [pair[:2] for pair in pairs if pair[2] < min(finish for *_, finish in pairs)]
        if self.dispatch == "nondelay":
            return [pair[:2] for pair in pairs if pair[2] == min(start for _, _, start, _ in pairs)]
        return [pair[:2] for pair in pairs]

    def play(self, job, machine):
        start, finish = next(pair[2:] for pair in self.pairs() if pair[:2] == (job, machine))
        self.schedule.append((job, self.next[job], machine, start, finish))
        self.next[job] += 1
        self.ready[job] = self.free[machine] = finish

    def best(self):
        """Returns the least makespan that legal choices reach, by depth-first search."""
        least, seen, stack = np.inf, set(), [(self.next, self.ready, self.free)]
        while stack:
            state = stack.pop()
            self.next, self.ready, self.free = map(list, state)
            if max(self.free) >= least or str(state) in seen:
                continue
            seen.add(str(state))
            if not (legal := self.legal()):
                least = max(self.free)
            for pair in legal:
                self.next, self.ready, self.free = map(list, state)
                self.play(*pair)
                stack.append((self.next, self.ready, self.free))
        return least


def shop_of(env, dispatch=None):
    options = [{m: int(t) for m, t in enumerate(row) if t} for row in env.times]
    ends = np.cumsum(env.operations_of)
    jobs = [options[end - n : end] for n, end in zip(env.operations_of, ends)]
    return NaiveShop(jobs, env.times.shape[1], dispatch or env.dispatch)


def sample_action(observation, rng):
    return int(rng.choice(np.flatnonzero(observation["action_mask"])))


def check_graph(env, observation):
    """Asserts what holds for every observation of an episode under way."""
    (x, edge_x, links), mask = observation["graph"], observation["action_mask"]
    assert x.dtype == edge_x.dtype == np.float32
    assert (links.dtype, mask.dtype) == (np.int64, np.int8)
    assert np.isfinite(x).all() and np.isfinite(edge_x).all()
    assert max(np.abs(x).max(), np.abs(edge_x).max()) <= FEATURE_LIMIT
    assert len(links) == len(edge_x) == len(mask) and mask.any()
    assert len(set(map(tuple, links.tolist()))) == len(links)
    is_op = x[:, NODE["is_op"]] == 1
    num_ops = int(is_op.sum())
    assert is_op[:num_ops].all() and (x[num_ops:, NODE["is_machine"]] == 1).all()
    shown = np.minimum(env.operations_of - env.next, env.window)
    assert num_ops == shown.sum()
    ops = [(j, env.next[j] + i) for j, n in enumerate(shown) for i in range(n)]
    left = [(j, k) for j, n in enumerate(env.operations_of) for k in range(env.next[j], n)]
    is_used = lambda m: any(env.op_times[j, k, m] < 1e9 for j, k in left)
    machines = [m for m in range(env.num_machines) if is_used(m)]
    assert len(x) == num_ops + len(machines)
    kinds = edge_x[:, :4].argmax(axis=1)
    assert (edge_x[:, :4].sum(axis=1) == 1).all()
    for (a, b), kind, legal in zip(links.tolist(), kinds.tolist(), mask.tolist()):
        if kind < 2:
            first, second = (a, b) if kind == 0 else (b, a)
            assert ops[first][0] == ops[second][0] and ops[second][1] == ops[first][1] + 1
        else:
            op, machine = (a, b) if kind == 2 else (b, a)
            assert op < num_ops and env.op_times[ops[op]][machines[machine - num_ops]] < 1e9
            assert not legal or (kind == 2 and ops[op][1] == env.next[ops[op][0]])
    pairs = sum(int((env.op_times[j, k] < 1e9).sum()) for j, k in ops)
    steps = int((shown - 1).clip(0).sum())
    assert np.bincount(kinds, minlength=4).tolist() == [steps, steps, pairs, pairs]
    chosen = [(ops[a][0], machines[b - num_ops]) for a, b in links[mask == 1].tolist()]
    legal = edge_x[:, EDGE["legal"]]
    assert (legal[mask == 1] == 1).all() and legal.sum() == 2 * mask.sum()
    return chosen


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.integers(1, 6),
    machines=st.integers(1, 5),
    steps=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    dispatch=st.sampled_from(["active", "nondelay"]),
    window=st.integers(1, 5),
    skip=st.booleans(),
)
def test_episode_against_plain_loops(jobs, machines, steps, seed, dispatch, window, skip):
    size = dict(jobs=jobs, machines=machines, operations=(1, steps), deviation=(0, 1))
    rules = dict(dispatch=dispatch, window=window, skip_forced=skip, reward_unit="time")
    env = FlexibleJobShopEnv(**size, **rules)
    observation, info = env.reset(seed=seed)
    assert info == {}
    shop = shop_of(env)
    rng, total, terminated, bounds = np.random.default_rng(seed), 0.0, False, [env.first_bound]
    while not terminated:
        for job, _, machine, *_ in env.order[len(shop.schedule) :]:
            assert (job, machine) in shop.legal() and (len(shop.legal()) == 1 or not skip)
            shop.play(job, machine)
        assert sorted(check_graph(env, observation)) == shop.legal()
        bounds.append(env.bound)
        action = sample_action(observation, rng)
        shop.play(*env._choice(action))
        observation, reward, terminated, _, info = env.step(action)
        assert reward <= 1e-9
        total += reward
    for job, _, machine, *_ in env.order[len(shop.schedule) :]:
        shop.play(job, machine)
    assert env.order == shop.schedule
    makespan = max(finish for *_, finish in shop.schedule)
    assert info["eval"] == {"cost": makespan, "lower_bound": bounds[0]}
    assert total == pytest.approx(bounds[0] - makespan)
    assert bounds == sorted(bounds) and bounds[-1] <= makespan
    assert [len(part) for part in observation["graph"]] == [1, 1, 1]
    assert observation["action_mask"].tolist() == [1]
    for axis in (0, 2):  # no two operations of a job or of a machine overlap
        for key in {row[axis] for row in shop.schedule}:
            rows = sorted(row[3:] for row in shop.schedule if row[axis] == key)
            assert all(end <= start for (_, end), (start, _) in zip(rows, rows[1:]))
    steps = [(j, k) for j, n in enumerate(env.operations_of) for k in range(n)]
    assert sorted(row[:2] for row in shop.schedule) == steps
    for job, step, machine, start, finish in shop.schedule:
        assert finish - start == shop.jobs[job][step][machine]


@pytest.mark.parametrize("seed", range(12))
def test_active_choices_reach_the_optimum(seed):
    """Brute force over all schedules of tiny shops; every bound on the way is a bound of what can
    be reached."""
    size = dict(jobs=3, machines=(2, 3), operations=2, durations=(1, 9), deviation=1.0)
    env = FlexibleJobShopEnv(**size, dispatch="active", reward_unit="time", skip_forced=False)
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    best = shop_of(env, "all").best()
    assert env.bound <= best == shop_of(env, "active").best() <= shop_of(env, "nondelay").best()
    terminated = False
    while not terminated:
        observation, _, terminated, _, info = env.step(sample_action(observation, rng))
        shop = shop_of(env, "all")
        for job, _, machine, *_ in env.order:
            shop.play(job, machine)
        assert env.bound <= shop.best()
    assert info["eval"]["cost"] >= best


def test_feature_values_by_hand():
    env = FlexibleJobShopEnv(instance=TINY, dispatch="active", window=2)
    observation, _ = env.reset(seed=0)
    x, edge_x, links = observation["graph"]
    mean_time = (3 + 3 + 5) / 3
    # job 0: 2 + 3; job 1: 5, which only machine 0 can take; mean load: (2 + 3 + 5) / 3
    assert env.bound == 5
    expected = {
        "is_op": [1, 1, 1, 0, 0, 0],
        "is_machine": [0, 0, 0, 1, 1, 1],
        "time": [2 / mean_time, 3 / mean_time, 5 / mean_time, 0, 0, 0],
        "spread": [1 / mean_time, 0, 0, 0, 0, 0],
        "options": [2 / 3, 2 / 3, 1 / 3, 0, 0, 0],
        "single": [0.5, 0.5, 1, 0, 0, 0],
        "start": [0, 2 / mean_time, 0, 0, 0, 2 / mean_time],
        "start_rel": [0, 0.4, 0, 0, 0, 0.4],
        "wait": [0] * 6,
        "tail": [0.6, 0, 0, 0, 0, 0],
        "slack": [0, 0, 0, 0, 5 / mean_time, 3 / mean_time],
        "slack_rel": [0, 0, 0, 0, 1, 0.6],
        "job_work": [1, 0.6, 1, 0, 0, 0],
        "ops_left": [1, 0.5, 0.5, 0, 0, 0],
        "candidate": [1, 0, 1, 0, 0, 0],
        "legal": [1, 0, 1, 1, 1, 0],
        "free": [0] * 6,
        "free_rel": [0] * 6,
        "load": [0, 0, 0, 6 / 5, 3.5 / 5, 1.5 / 5],
        "load_share": [0, 0, 0, 1, 3.5 / 6, 1.5 / 6],
        "forced": [0, 0, 0, 1, 0, 0],
        "machine_ops": [0, 0, 0, 2 / 3, 2 / 3, 1 / 3],
        "queue": [0, 0, 0, 1, 0.5, 0],
        "spare": [1 - 4 / 5] * 6,
        "left": [1] * 6,
    }
    assert list(expected) == list(NODE)
    for name, values in expected.items():
        np.testing.assert_allclose(x[:, NODE[name]], values, atol=1e-6, err_msg=name)
    to_machine = [[0, 3], [0, 4], [1, 4], [1, 5], [2, 3]]
    assert links.tolist() == to_machine + [pair[::-1] for pair in to_machine] + [[0, 1], [1, 0]]
    expected = {
        "job_successor": [0] * 5,
        "job_predecessor": [0] * 5,
        "to_machine": [1] * 5,
        "from_machine": [0] * 5,
        "time": np.array([2, 4, 3, 3, 5]) / mean_time,
        "excess": np.array([0, 2, 0, 0, 0]) / mean_time,
        "excess_rel": [0, 0.5, 0, 0, 0],
        "delay": np.array([0, 0, 2, 2, 0]) / mean_time,
        "wait": [0] * 5,
        "idle": np.array([0, 0, 2, 2, 0]) / mean_time,
        "later": np.array([0, 2, 0, 0, 0]) / mean_time,
        "behind": np.array([0, 0, 1, -FEATURE_LIMIT * mean_time, 3]) / mean_time,
        "slack": np.array([0, -2, 0, 0, 0]) / mean_time,
        "slack_rel": [0, -0.4, 0, 0, 0],
        "legal": [1, 1, 0, 0, 1],
    }
    assert list(expected) == list(EDGE)
    for name, values in expected.items():
        np.testing.assert_allclose(edge_x[:5, EDGE[name]], values, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(edge_x[5:10, 4:], edge_x[:5, 4:])
    assert (edge_x[5:10, 3] == 1).all() and edge_x[10].nonzero()[0].tolist() == [0]
    assert edge_x[11].nonzero()[0].tolist() == [1]
    assert observation["action_mask"].tolist() == [1, 1, 0, 0, 1] + [0] * 7


def test_benchmark_instances():
    names = [kwargs["instance"] for suite in SUITES.values() for kwargs in suite]
    assert len(set(names)) == len(names) == 730
    assert {*names} == {*flexible_job_shop.read_data_file()}
    digest, sizes = hashlib.sha1(), {}
    for name in names:
        times, operations, best_known, lower_bound = load_instance(name)
        flexible_job_shop.check_instance(times, operations)
        for array in (times, operations):
            digest.update(array.astype("<i8").tobytes())
        digest.update(b"%d" % best_known)
        sizes[name] = len(operations), times.shape[1]
        assert lower_bound <= best_known
    assert digest.hexdigest()[:12] == "bd5f70a4bc85"
    assert {sizes[f"sd20x10_{i:03d}"] for i in range(1, 101)} == {(20, 10)}
    assert (sizes["mk01"], sizes["la40_vdata"]) == ((10, 6), (15, 15))
    assert load_instance("mk01")[2:] == (40, 40)
    best = [load_instance(kwargs["instance"])[2] for kwargs in SUITES["sd10x5"]]
    assert sum(best) == 9632  # their mean is 96.32
    for data, published in {"edata": 1.15, "rdata": 2.0}.items():  # eligible machines per operation
        times = [load_instance(kwargs["instance"])[0] for kwargs in SUITES[data]]
        found = np.mean([(t > 0).sum() / len(t) for t in times])
        assert found == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(
    "name", ["mk01", "mk10", "la21_edata", "la38_rdata", "la16_vdata", "la30_vdata", "sd20x5_007"]
)
def test_bounds_and_rules_of_benchmark_instances(name):
    env = FlexibleJobShopEnv(instance=name)
    env.reset(seed=0)
    best_known, lower_bound = load_instance(name)[2:]
    assert env.first_bound <= (lower_bound or best_known)
    assert all(play_rule(*load_instance(name)[:2], rule) >= best_known for rule in RULES)


def test_rules_match_published_makespans():
    """Means on 10x5 by FJSP-DRL (test_results/SD1), whose MWKR, MOPNR and FIFO choose among idle
    machines at random."""
    found = {rule: costs.mean() for rule, costs in suite_makespans("sd10x5").items()}
    for rule, published in {"SPT": 129.8, "FIFO": 119.4, "MOPNR": 115.4, "MWKR": 113.2}.items():
        assert found[rule] == pytest.approx(published, abs=2), rule
    assert found["best_known"] == 96.32
    assert found["MWKR"] < found["MOPNR"] < found["FIFO"] < found["EFT"]


def test_random_instances_are_those_of_sd1():
    """Number of operations, machines, and times as Song et al. draw them: the means are those of
    their test sets."""
    env, drawn = FlexibleJobShopEnv(jobs=10, machines=5), []
    published = [load_instance(kwargs["instance"])[:2] for kwargs in SUITES["sd10x5"]]
    for seed in range(100):
        env.reset(seed=seed)
        drawn.append((env.times, env.operations_of))
    for instances in (drawn, published):
        times = np.concatenate([times for times, _ in instances])
        assert {len(operations) for _, operations in instances} == {10}
        assert {*np.concatenate([operations for _, operations in instances]).tolist()} == {4, 5, 6}
        assert (times > 0).sum(axis=1).mean() == pytest.approx(3, abs=0.06)
        assert times[times > 0].mean() == pytest.approx(10.4, abs=0.25) and times.max() == 20
        ratio = times.max(axis=1) / np.where(times > 0, times, 99).min(axis=1)
        assert ratio.max() <= 2 and 1.1 < ratio.mean() < 1.25


def test_sizes_and_kinds_of_random_instances():
    env = FlexibleJobShopEnv(jobs=(3, 9), machines=(2, 6), flexibility=(0, 1), deviation=0)
    sizes, options = [], []
    for seed in range(200):
        env.reset(seed=seed)
        sizes.append((env.num_jobs, env.num_machines))
        eligible = env.times > 0
        options.append(eligible.sum(axis=1).mean())
        largest = env.times.max(axis=1, keepdims=True)
        assert (np.where(eligible, env.times, largest) == largest).all()  # one time on all machines
    assert np.min(sizes, 0).tolist() == [3, 2] and np.max(sizes, 0).tolist() == [9, 6]
    assert min(options) == 1 and max(options) > 3
