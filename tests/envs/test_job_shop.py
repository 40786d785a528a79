"""Job shops, flexible ones too: schedules, legal choices and bounds are those of plain loops and of
brute force, graphs show them, rules have published makespans, and benchmarks are the published."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph.envs import flexible_job_shop as flexible
from cleanrl_graph.envs import job_shop
from cleanrl_graph.envs.flexible_job_shop import FlexibleJobShopEnv
from cleanrl_graph.envs.job_shop import NODE_FEATURES, RULES, JobShopEnv, load_instance, play_rule

COLUMN = {text.split(":")[0]: i for i, text in enumerate(NODE_FEATURES)}
NODE = {text.split(":")[0]: i for i, text in enumerate(flexible.NODE_FEATURES)}
EDGE = {text.split(":")[0].split(",")[0]: i for i, text in enumerate(flexible.EDGE_FEATURES)}
SUITES = FlexibleJobShopEnv.eval_suites
TINY = {"times": [[2, 4, 0], [0, 3, 3], [5, 0, 0]], "operations": [2, 1]}
ALL_NAMES = [kwargs["instance"] for kwargs in JobShopEnv.eval_suites["all"]]


class NaiveShop:
    """Dispatching with plain loops; jobs are lists of dicts machine -> time."""

    def __init__(self, jobs, num_machines, dispatch, one_machine=False):
        self.jobs, self.dispatch, self.one_machine = jobs, dispatch, one_machine
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
        pairs, is_active = self.pairs(), self.dispatch == "active"
        if not pairs or self.dispatch == "all":
            return [pair[:2] for pair in pairs]
        first = min(pairs, key=lambda pair: pair[3 if is_active else 2])
        if self.one_machine:
            pairs = [pair for pair in pairs if pair[1] == first[1]]
        if is_active:
            return [pair[:2] for pair in pairs if pair[2] < first[3] or pair is first]
        return [pair[:2] for pair in pairs if pair[2] == first[2]]

    def play(self, job, machine):
        start, finish = next(pair[2:] for pair in self.pairs() if pair[:2] == (job, machine))
        self.schedule.append((job, self.next[job], machine, start, finish))
        self.next[job] += 1
        self.ready[job] = self.free[machine] = finish

    def makespan(self):
        """That of a whole schedule, in which no two operations of a job or of a machine overlap."""
        for axis in (0, 2):
            for key in {row[axis] for row in self.schedule}:
                rows = sorted(row[3:] for row in self.schedule if row[axis] == key)
                assert all(end <= start for (_, end), (start, _) in zip(rows, rows[1:]))
        every = [(j, k) for j, job in enumerate(self.jobs) for k in range(len(job))]
        assert sorted(row[:2] for row in self.schedule) == every
        for job, step, machine, start, finish in self.schedule:
            assert finish - start == self.jobs[job][step][machine]
        return max(finish for *_, finish in self.schedule)

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

    def bound(self):
        """Returns the largest job or one-machine bound, and the heads of what remains."""
        bounds, heads = [finish for *_, finish in self.schedule], {}
        for j, job in enumerate(self.jobs):
            time = self.ready[j]
            for k in range(self.next[j], len(job)):
                ((machine, duration),) = job[k].items()
                heads[j, k] = max(time, self.free[machine])
                time = heads[j, k] + duration
            bounds.append(time)
        of = lambda ops: sum(sum(self.jobs[j][k].values()) for j, k in ops)
        for machine in range(len(self.free)):
            ops = [(j, k) for j, k in heads if machine in self.jobs[j][k]]
            if ops:
                tail = min(of([(j, i) for i in range(k + 1, len(self.jobs[j]))]) for j, k in ops)
                bounds.append(min(heads[o] for o in ops) + of(ops) + tail)
        return max(bounds), heads


def sample_action(observation, rng):
    return int(rng.choice(np.flatnonzero(observation["action_mask"])))


# ---- Both environments ----
def shop_of(env, dispatch=None):
    """The plain loops on the instance of an environment that was reset."""
    if isinstance(env, JobShopEnv):
        rows = zip(env.times.tolist(), env.machine_of.tolist())
        jobs = [[{m: t} for t, m in zip(*row)] for row in rows]
        return NaiveShop(jobs, env.num_machines, env.dispatch, one_machine=True)
    options = [{m: int(t) for m, t in enumerate(row) if t} for row in env.times]
    ends = np.cumsum(env.operations_of)
    jobs = [options[end - n : end] for n, end in zip(env.operations_of, ends)]
    return NaiveShop(jobs, env.times.shape[1], dispatch or env.dispatch)


def follow(env, shop):
    """Lets the shop dispatch what the environment has dispatched by itself: its only choices."""
    order = env.order
    if isinstance(env, JobShopEnv):
        order = [(op // env.num_machines, 0, env.op_machine[op]) for op in order]
    for job, _, machine, *_ in order[len(shop.schedule) :]:
        assert not env.skip_forced or shop.legal() == [(job, machine)]
        shop.play(job, machine)
    assert [row[0:3:2] for row in shop.schedule] == [(row[0], row[2]) for row in order]


def play_beside(env, seed, look):
    """A random episode of an environment whose rewards are times, beside the plain loops; `look` is
    given each observation and the shop, and returns the pairs (job, machine) to choose from."""
    observation, info = env.reset(seed=seed)
    assert info == {}
    shop, rng, total, terminated = shop_of(env), np.random.default_rng(seed), 0.0, False
    while not terminated:
        follow(env, shop)
        pairs = look(observation, shop)
        assert sorted(pairs) == shop.legal()
        action = sample_action(observation, rng)
        chosen = np.flatnonzero(observation["action_mask"]).tolist().index(action)
        shop.play(*pairs[chosen])
        observation, reward, terminated, _, info = env.step(action)
        assert reward <= 1e-9
        total += reward
    follow(env, shop)
    makespan = shop.makespan()
    assert info["eval"] == {"cost": makespan, "lower_bound": env.first_bound}
    assert total == pytest.approx(env.first_bound - makespan)
    assert len(observation["graph"].nodes) == len(observation["action_mask"]) == 1
    return shop


@pytest.mark.parametrize("make", [JobShopEnv, FlexibleJobShopEnv])
def test_return_is_relative_to_the_first_bound(make):
    env, rng = make(jobs=(3, 8), machines=(3, 6)), np.random.default_rng(0)
    for seed in range(3):
        (observation, _), total, terminated = env.reset(seed=seed), 0.0, False
        while not terminated:
            action = sample_action(observation, rng)
            observation, reward, terminated, _, info = env.step(action)
            total += reward
        cost, bound = info["eval"]["cost"], info["eval"]["lower_bound"]
        assert total == pytest.approx((bound - cost) / bound, abs=1e-9)


@pytest.mark.parametrize(
    "make, module, instance, rule",
    [
        *((JobShopEnv, job_shop, "la01", rule) for rule in RULES[:-1]),
        *((FlexibleJobShopEnv, flexible, "mk02", x) for x in flexible.RULES[:-1]),
    ],
)
def test_policies_play_the_schedules_of_the_rules(make, module, instance, rule):
    env = make(instance=instance)
    observation, _ = env.reset(seed=0)
    policy, terminated = getattr(module, rule.lower().replace("/", "_")), False
    while not terminated:
        observation, _, terminated, _, info = env.step(policy(env, observation, None))
    assert info["eval"]["cost"] == info["eval"][rule]
    assert info["eval"]["best_known"] == {"la01": 666, "mk02": 26}[instance]
    if instance == "la01":  # of L2D and SPN, as published
        assert (info["eval"]["L2D"], info["eval"]["SPN"]) == (710, 692)


# ---- Job shop ----
def check_graph(env, observation):
    """Asserts what the graph of an episode under way shows."""
    graph, mask = observation["graph"], observation["action_mask"]
    num_nodes, num_ops = len(graph.nodes), env.num_left
    assert graph.nodes.min() > -1e-3 and graph.nodes.max() <= job_shop.FEATURE_LIMIT
    assert graph.nodes[:, COLUMN["is_op"]].tolist() == [1] * num_ops + [0] * (num_nodes - num_ops)
    assert mask.any() and not mask[num_ops:].any()
    edges, kinds = graph.edge_links, graph.edges
    assert len({(a, b) for a, b in edges.tolist()}) == len(edges)
    machine_of = env.machine_of.ravel()[env.nodes[:num_ops]]
    job_of = env.nodes[:num_ops] // env.num_machines
    is_next = graph.nodes[:, COLUMN["candidate"]] == 1
    assert (np.diff(env.nodes[:num_ops]) > 0).all()
    for (a, b), kind in zip(edges.tolist(), kinds.tolist()):
        if kind < 2:
            first, second = (a, b) if kind == 0 else (b, a)
            assert job_of[a] == job_of[b] and env.nodes[second] == env.nodes[first] + 1
        elif env.machine_edges == "hub":
            op, hub = (a, b) if kind == 2 else (b, a)
            assert op < num_ops <= hub and env.nodes[hub] - env.times.size == machine_of[op]
        else:
            assert machine_of[a] == machine_of[b] and job_of[a] != job_of[b]
            assert (kind == 2) == (is_next[a] and is_next[b])
    counts, per_machine = np.bincount(kinds, minlength=4), np.bincount(machine_of)
    assert counts[0] == counts[1] == num_ops - len(np.unique(job_of))
    if env.machine_edges == "hub":
        assert num_nodes == num_ops + (per_machine > 0).sum() and counts[2] == counts[3] == num_ops
    else:
        assert num_nodes == num_ops
        assert counts[2] + counts[3] == (per_machine * (per_machine - 1)).sum()


@settings(max_examples=25, deadline=None)
@given(
    jobs=st.integers(1, 7),
    machines=st.integers(1, 6),
    low=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    dispatch=st.sampled_from(["active", "nondelay"]),
    edges=st.sampled_from(["hub", "clique"]),
    skip=st.booleans(),
)
def test_episode_against_plain_loops(jobs, machines, low, seed, dispatch, edges, skip):
    """Choices, bounds, what the graph shows and when operations can start."""
    rules = dict(dispatch=dispatch, machine_edges=edges, skip_forced=skip, reward_unit="time")
    env = JobShopEnv(jobs=jobs, machines=machines, durations=(low, 9), **rules)
    sizes = [np.inf]

    def look(observation, shop):
        bound, heads = shop.bound()
        assert env.bound == env.paid == bound or len(sizes) == 1
        check_graph(env, observation)
        sizes.append(len(observation["graph"].nodes))
        assert sizes[-1] < sizes[-2]
        now = min(heads[j, k] for j, k in enumerate(shop.next) if k < machines)
        own = np.array([heads[divmod(o, machines)] for o in env.nodes[: env.num_left]])
        start = np.minimum((own - now) / env.times.mean(), job_shop.FEATURE_LIMIT)
        found = observation["graph"].nodes[: env.num_left, COLUMN["start"]]
        np.testing.assert_allclose(found, start, atol=1e-4)
        ops = env.nodes[observation["action_mask"] == 1]
        assert all(op % machines == shop.next[op // machines] for op in ops)
        return [(op // machines, env.machine_of.flat[op]) for op in ops]

    shop = play_beside(env, seed, look)
    assert low <= env.times.min() and env.times.max() <= 9
    assert env.first_bound == NaiveShop(shop.jobs, machines, dispatch).bound()[0]


@settings(max_examples=20, deadline=None)
@given(
    jobs=st.integers(1, 6),
    machines=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    lookahead=st.integers(1, 7),
    edges=st.sampled_from(["hub", "clique"]),
)
def test_lookahead_shows_a_part_of_the_graph(jobs, machines, seed, lookahead, edges):
    """The next operations of each job and all machines, with the whole graph's features."""
    whole = JobShopEnv(jobs=jobs, machines=machines, machine_edges=edges)
    part = JobShopEnv(jobs=jobs, machines=machines, machine_edges=edges, lookahead=lookahead)
    (one, _), (other, _) = whole.reset(seed=seed), part.reset(seed=seed)
    rng, terminated = np.random.default_rng(seed), False
    while not terminated:
        is_near = lambda node: node < whole.next_op[node // machines] + lookahead
        shown = [node >= whole.times.size or is_near(node) for node in whole.nodes]
        links, rank = one["graph"].edge_links, np.cumsum(shown) - 1
        both = np.array(shown)[links].all(axis=1)
        assert np.array_equal(other["graph"].nodes, one["graph"].nodes[shown])
        assert np.array_equal(other["graph"].edge_links, rank[links[both]])
        assert np.array_equal(other["graph"].edges, one["graph"].edges[both])
        assert np.array_equal(other["action_mask"], one["action_mask"][shown])
        op = whole.nodes[sample_action(one, rng)]
        one, reward, terminated, _, _ = whole.step(int(np.searchsorted(whole.nodes, op)))
        other, *result = part.step(int(np.searchsorted(part.nodes, op)))
        assert result[:2] == [reward, terminated]


def test_feature_values_by_hand():
    env = JobShopEnv(instance={"times": [[2, 4], [3, 3]], "machines": [[0, 1], [0, 1]]})
    observation, _ = env.reset(seed=0)
    x = observation["graph"].nodes
    # machine 1: earliest head 2, work 7, no tail; machine 0: 0 + 5 + 3; jobs: 6 and 6
    assert env.bound == 2 + 7
    expected = {
        "is_op": [1, 1, 1, 1, 0, 0],
        "is_machine": [0, 0, 0, 0, 1, 1],
        "time": [2 / 3, 4 / 3, 1, 1, 0, 0],
        "start": [0, 2 / 3, 0, 1, 0, 2 / 3],
        "start_rel": [0, 2 / 9, 0, 3 / 9, 0, 2 / 9],
        "gap": [0, 2 / 3, 0, 1, 0, 2 / 3],
        "tail": [4 / 9, 0, 3 / 9, 0, 3 / 9, 0],
        "slack": [1, 1, 1, 1, 1 / 3, 0],
        "slack_rel": [3 / 9, 3 / 9, 3 / 9, 3 / 9, 1 / 9, 0],
        "job_slack": [1, 1, 1, 1, 0, 0],
        "job_work": [1, 4 / 6, 1, 3 / 6, 0, 0],
        "ops_left": [1, 0.5, 1, 0.5, 0, 0],
        "flow": [2 / 8, 6 / 10, 3 / 9, 6 / 9, 0, 0],
        "candidate": [1, 0, 1, 0, 0, 0],
        "legal": [1, 0, 1, 0, 0, 0],
        "conflict": [1, 0, 1, 0, 1, 0],
        "machine_work": [5 / 7, 1, 5 / 7, 1, 5 / 7, 1],
        "machine_work_rel": [5 / 9, 7 / 9, 5 / 9, 7 / 9, 5 / 9, 7 / 9],
        "machine_free": [0] * 6,
        "machine_ops": [1] * 6,
        "machine_slack_rel": [1 / 9, 0, 1 / 9, 0, 1 / 9, 0],
    }
    are_columns(x, COLUMN, expected)


def are_columns(x, columns, expected):
    """The columns of x, by name, have these values."""
    assert list(expected) == list(columns)
    for name, values in expected.items():
        np.testing.assert_allclose(x[:, columns[name]], values, atol=1e-6, err_msg=name)


def test_benchmark_instances():
    """Of all of them: bounds are those of a shop, and no schedule is better than the best known."""
    for name in ALL_NAMES:
        times, machines, best_known, lower_bound = load_instance(name)
        job_shop.check_instance(times, machines)
        if name.startswith("ta"):
            suites = [k for k, v in JobShopEnv.eval_suites.items() if {"instance": name} in v]
            assert sorted(suites) == ["all", "ta{}x{}".format(*times.shape)]
        env = JobShopEnv(instance=name)
        env.reset(seed=0)
        assert env.first_bound <= lower_bound <= best_known
        assert play_rule(times, machines, "FDD/MWKR", "nondelay") >= best_known


def test_taillard_generator():
    times, machines = job_shop.taillard_instance(15, 15, 840612802, 398197754)  # ta01
    assert times[0].tolist() == [94, 66, 10, 53, 26, 15, 65, 82, 10, 27, 93, 92, 96, 70, 83]
    assert (machines[0] + 1).tolist() == [7, 13, 5, 8, 4, 3, 11, 12, 9, 15, 10, 14, 6, 1, 2]
    digest, sizes = hashlib.sha1(), hashlib.sha1()
    for name in ALL_NAMES:
        instance = np.stack(load_instance(name)[:2])
        digest.update(instance.astype("<i8").tobytes())
        sizes.update(repr(instance.shape).encode())
    assert (digest.hexdigest()[:12], sizes.hexdigest()[:12]) == ("cba7033611bf", "27cd10581f6d")


def test_rules_match_published_gaps():
    """Non-delay dispatch on la01-40: published gaps are 21.2, 12.7 and 13.7 % (ties differ)."""
    gaps = {rule: [] for rule in RULES}
    for kwargs in JobShopEnv.eval_suites["la"]:
        best = load_instance(kwargs["instance"])[2]
        for rule, cost in job_shop.rule_makespans(kwargs["instance"], "nondelay").items():
            gaps[rule].append(100 * (cost / best - 1))
    mean = {rule: np.mean(values) for rule, values in gaps.items()}
    assert mean["SPT"] == pytest.approx(21.2, abs=1.5)
    assert mean["MWKR"] == pytest.approx(12.7, abs=0.5)
    assert mean["MOPNR"] == pytest.approx(13.7, abs=0.5)
    assert mean["FDD/MWKR"] < mean["MWKR"] < mean["SPT"] < mean["random"]


def test_pilot():
    """No schedule is longer than that of one of its rules, and some are shorter."""
    rng, better = np.random.default_rng(0), 0
    for _ in range(5):
        instance = rng.integers(1, 100, (5, 4)), rng.random((5, 4)).argsort(axis=1)
        env = JobShopEnv(instance=dict(zip(("times", "machines"), instance)))
        obs, ended = env.reset()[0], False
        while not ended:
            obs, _, ended, _, info = env.step(job_shop.pilot(env, obs, rng))
        rules = [play_rule(*instance, rule, "active") for rule in ("FDD/MWKR", "MWKR")]
        assert info["eval"]["cost"] <= min(rules)
        better += info["eval"]["cost"] < min(rules)
    assert better


def test_machines_are_visited_set_by_set():
    """As many sets as machines are a flow shop; a range is drawn from."""
    env = JobShopEnv(jobs=20, machines=5, machine_sets=2)
    env.reset(seed=0)
    assert (env.machine_of[:, :3] < 3).all()
    assert len(np.unique(env.machine_of[:, :3], axis=0)) == 6  # all orders of three
    env = JobShopEnv(jobs=3, machines=5, machine_sets=(1, 5))
    flows = set()
    for seed in range(50):
        env.reset(seed=seed)
        flows.add(bool((env.machine_of == np.arange(5)).all()))
    assert flows == {True, False}


# ---- Flexible job shop ----
def check_flexible_graph(env, observation):
    """Asserts what the graph of an episode under way shows. The pairs (job, machine) to choose
    from."""
    (x, edge_x, links), mask = observation["graph"], observation["action_mask"]
    assert max(np.abs(x).max(), np.abs(edge_x).max()) <= flexible.FEATURE_LIMIT
    assert len({*map(tuple, links.tolist())}) == len(links) == len(edge_x) == len(mask)
    shown = np.minimum(env.operations_of - env.next, env.window)
    ops = [(j, env.next[j] + i) for j, n in enumerate(shown) for i in range(n)]
    left = [(j, k) for j, n in enumerate(env.operations_of) for k in range(env.next[j], n)]
    is_used = lambda m: any(env.op_times[j, k, m] < 1e9 for j, k in left)
    machines = [m for m in range(env.num_machines) if is_used(m)]
    kinds_of_node = x[:, [NODE["is_op"], NODE["is_machine"]]]
    assert kinds_of_node.tolist() == [[1, 0]] * len(ops) + [[0, 1]] * len(machines)
    kinds = edge_x[:, :4].argmax(axis=1)
    assert (edge_x[:, :4].sum(axis=1) == 1).all()
    for (a, b), kind, legal in zip(links.tolist(), kinds.tolist(), mask.tolist()):
        if kind < 2:
            first, second = (a, b) if kind == 0 else (b, a)
            assert ops[first][0] == ops[second][0] and ops[second][1] == ops[first][1] + 1
        else:
            op, machine = (a, b) if kind == 2 else (b, a)
            assert env.op_times[ops[op]][machines[machine - len(ops)]] < 1e9
            assert not legal or (kind == 2 and ops[op][1] == env.next[ops[op][0]])
    pairs = sum(int((env.op_times[j, k] < 1e9).sum()) for j, k in ops)
    steps = int((shown - 1).clip(0).sum())
    assert np.bincount(kinds, minlength=4).tolist() == [steps, steps, pairs, pairs]
    legal = edge_x[:, EDGE["legal"]]
    assert (legal[mask == 1] == 1).all() and legal.sum() == 2 * mask.sum()
    return [(ops[a][0], machines[b - len(ops)]) for a, b in links[mask == 1].tolist()]


@settings(max_examples=20, deadline=None)
@given(
    jobs=st.integers(1, 6),
    machines=st.integers(1, 5),
    steps=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    dispatch=st.sampled_from(["active", "nondelay"]),
    window=st.integers(1, 5),
    skip=st.booleans(),
)
def test_flexible_episode_against_plain_loops(jobs, machines, steps, seed, dispatch, window, skip):
    size = dict(jobs=jobs, machines=machines, operations=(1, steps), deviation=(0, 1))
    rules = dict(dispatch=dispatch, window=window, skip_forced=skip, reward_unit="time")
    env, bounds = FlexibleJobShopEnv(**size, **rules), []

    def look(observation, shop):
        bounds.append(env.bound)
        return check_flexible_graph(env, observation)

    shop = play_beside(env, seed, look)
    assert env.order == shop.schedule
    assert [env.first_bound, *bounds] == sorted([env.first_bound, *bounds])
    assert max([env.first_bound, *bounds]) <= shop.makespan()


@pytest.mark.parametrize("seed", range(4))
def test_active_choices_reach_the_optimum(seed):
    """By brute force; every bound on the way is a bound of what can be reached."""
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
        follow(env, shop)
        assert env.bound <= shop.best()
    assert info["eval"]["cost"] >= best


def test_flexible_feature_values_by_hand():
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
    are_columns(x, NODE, expected)
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
        "behind": np.array([0, 0, 1, -flexible.FEATURE_LIMIT * mean_time, 3]) / mean_time,
        "slack": np.array([0, -2, 0, 0, 0]) / mean_time,
        "slack_rel": [0, -0.4, 0, 0, 0],
        "legal": [1, 1, 0, 0, 1],
    }
    are_columns(edge_x[:5], EDGE, expected)
    np.testing.assert_array_equal(edge_x[5:10, 4:], edge_x[:5, 4:])
    assert (edge_x[5:10, 3] == 1).all() and edge_x[10].nonzero()[0].tolist() == [0]
    assert edge_x[11].nonzero()[0].tolist() == [1]
    assert observation["action_mask"].tolist() == [1, 1, 0, 0, 1] + [0] * 7


def test_flexible_benchmark_instances():
    """Of all of them: bounds are those of a shop, and no schedule is better than the best known."""
    names = [kwargs["instance"] for suite in SUITES.values() for kwargs in suite]
    assert len(set(names)) == len(names) == 730
    assert {*names} == {*flexible.read_data_file()}
    digest = hashlib.sha1()
    for k, name in enumerate(names):
        times, operations, best_known, lower_bound = flexible.load_instance(name)
        flexible.check_instance(times, operations)
        for array in (times, operations):
            digest.update(array.astype("<i8").tobytes())
        digest.update(b"%d" % best_known)
        assert lower_bound <= best_known
        if k % 60 == 0:
            env = FlexibleJobShopEnv(instance=name)
            env.reset(seed=0)
            assert env.first_bound <= (lower_bound or best_known)
            rules = [flexible.play_rule(times, operations, rule) for rule in flexible.RULES]
            assert min(rules) >= best_known
    assert digest.hexdigest()[:12] == "bd5f70a4bc85"
    for data, published in {"edata": 1.15, "rdata": 2.0}.items():  # eligible machines per operation
        times = [flexible.load_instance(kwargs["instance"])[0] for kwargs in SUITES[data]]
        found = np.mean([(t > 0).sum() / len(t) for t in times])
        assert found == pytest.approx(published, abs=0.05)


def test_rules_match_published_makespans():
    """Means on 10x5 by FJSP-DRL, whose rules choose among idle machines at random."""
    found = {rule: costs.mean() for rule, costs in flexible.suite_makespans("sd10x5").items()}
    for rule, published in {"SPT": 129.8, "FIFO": 119.4, "MOPNR": 115.4, "MWKR": 113.2}.items():
        assert found[rule] == pytest.approx(published, abs=2), rule
    assert found["best_known"] == 96.32
    assert found["MWKR"] < found["MOPNR"] < found["FIFO"] < found["EFT"]


def test_random_instances_are_those_of_sd1():
    """Numbers and times as Song et al. draw them: the means are those of their test sets."""
    env, drawn = FlexibleJobShopEnv(jobs=10, machines=5), []
    published = [flexible.load_instance(kwargs["instance"])[:2] for kwargs in SUITES["sd10x5"]]
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
