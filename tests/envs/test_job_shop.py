"""Job-shop environment: schedules and bounds against a plain re-implementation, graph invariants,
benchmark data; and what it shares with the flexible one."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph.envs import flexible_job_shop, job_shop
from cleanrl_graph.envs.flexible_job_shop import FlexibleJobShopEnv
from cleanrl_graph.envs.job_shop import NODE_FEATURES, RULES, JobShopEnv, load_instance, play_rule

COLUMN = {text.split(":")[0]: i for i, text in enumerate(NODE_FEATURES)}
ALL_NAMES = [kwargs["instance"] for kwargs in JobShopEnv.eval_suites["all"]]


class NaiveShop:
    """Dispatching with plain loops: the conflict set, the schedule and the lower bound of any
    partial schedule."""

    def __init__(self, times, machines, dispatch):
        self.times, self.machines, self.dispatch = times.tolist(), machines.tolist(), dispatch
        self.num_jobs, self.num_machines = times.shape
        self.next, self.ready = [0] * self.num_jobs, [0] * self.num_jobs
        self.free = [0] * self.num_machines
        self.schedule = []  # (job, step, machine, start, end)

    def legal(self):
        """Returns the operations (job, step) that may be dispatched now."""
        options = []
        for j, k in enumerate(self.next):
            if k < self.num_machines:
                start = max(self.ready[j], self.free[self.machines[j][k]])
                options.append((j, k, self.machines[j][k], start, start + self.times[j][k]))
        if self.dispatch == "active":
            first = min(options, key=lambda o: o[4])
            return [o[:2] for o in options if o[2] == first[2] and (o[3] < first[4] or o is first)]
        first = min(options, key=lambda o: o[3])
        return [o[:2] for o in options if o[2] == first[2] and o[3] == first[3]]

    def play(self, job):
        k = self.next[job]
        machine = self.machines[job][k]
        start = max(self.ready[job], self.free[machine])
        end = start + self.times[job][k]
        self.ready[job] = self.free[machine] = end
        self.next[job] += 1
        self.schedule.append((job, k, machine, start, end))

    def bound(self):
        """Returns the largest job or one-machine bound, and the heads of the remaining
        operations."""
        bounds, heads = [end for *_, end in self.schedule], {}
        for j in range(self.num_jobs):
            time = self.ready[j]
            for k in range(self.next[j], self.num_machines):
                heads[j, k] = max(time, self.free[self.machines[j][k]])
                time = heads[j, k] + self.times[j][k]
            bounds.append(time)
        for machine in range(self.num_machines):
            ops = [(j, k) for j, k in heads if self.machines[j][k] == machine]
            if ops:
                work = sum(self.times[j][k] for j, k in ops)
                tail = min(sum(self.times[j][k + 1 :]) for j, k in ops)
                bounds.append(min(heads[o] for o in ops) + work + tail)
        return max(bounds), heads


def sample_action(observation, rng):
    return int(rng.choice(np.flatnonzero(observation["action_mask"])))


def play_random(env, seed):
    """Plays one episode; returns the sum of rewards and the last info."""
    observation, _ = env.reset(seed=seed)
    rng, total, terminated = np.random.default_rng(seed), 0.0, False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(sample_action(observation, rng))
        assert not truncated and reward <= 1e-12
        total += reward
    return total, info


# ---- Both environments ----
BOTH = pytest.mark.parametrize("make", [JobShopEnv, FlexibleJobShopEnv])


@pytest.mark.parametrize("dispatch", ["active", "nondelay"])
@BOTH
def test_return_is_relative_to_the_first_bound(make, dispatch):
    env = make(jobs=(3, 8), machines=(3, 6), dispatch=dispatch)
    for seed in range(5):
        total, info = play_random(env, seed)
        cost, bound = info["eval"]["cost"], info["eval"]["lower_bound"]
        assert total == pytest.approx((bound - cost) / bound, abs=1e-9)


@pytest.mark.parametrize(
    "make, module, instance, rule",
    [
        *((JobShopEnv, job_shop, "la01", rule) for rule in RULES[:-1]),
        *((FlexibleJobShopEnv, flexible_job_shop, "mk02", x) for x in flexible_job_shop.RULES[:-1]),
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


@BOTH
def test_wrong_actions(make):
    env = make(jobs=4, machines=4)
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)
    observation, _ = env.reset(seed=0)
    masked = int(np.flatnonzero(observation["action_mask"] == 0)[0])
    for action in (masked, -1, len(observation["action_mask"])):
        with pytest.raises(ValueError, match=f"Action {action} is not legal"):
            env.step(action)
    play_random(env, 0)
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)
    env.reset(seed=0)
    module = job_shop if make is JobShopEnv else flexible_job_shop
    with pytest.raises(ValueError, match="Unknown dispatching rule"):
        module.dispatch_rule(env, "LIFO")


# ---- Job shop ----
def check_graph(env, observation):
    """Asserts what holds for every observation of an episode under way."""
    graph, mask = observation["graph"], observation["action_mask"]
    num_nodes, num_ops = len(graph.nodes), int(graph.nodes[:, COLUMN["is_op"]].sum())
    assert graph.nodes.shape == (num_nodes, len(NODE_FEATURES)) and graph.nodes.dtype == np.float32
    assert np.isfinite(graph.nodes).all()
    assert graph.nodes.min() > -1e-3 and graph.nodes.max() <= job_shop.FEATURE_LIMIT
    assert mask.shape == (num_nodes,) and mask.dtype == np.int8 and mask.any()
    assert not mask[num_ops:].any() and num_ops == env.num_left
    edges, kinds = graph.edge_links, graph.edges
    assert edges.shape == (len(kinds), 2) and edges.dtype == kinds.dtype == np.int64
    assert len({(a, b) for a, b in edges.tolist()}) == len(edges)
    machine_of = env.machine_of.ravel()[env.nodes[:num_ops]]
    job_of = env.nodes[:num_ops] // env.num_machines
    is_next = graph.nodes[:, COLUMN["candidate"]] == 1
    assert (np.diff(env.nodes[:num_ops]) > 0).all()
    for (a, b), kind in zip(edges.tolist(), kinds.tolist()):
        if kind == 0:
            assert job_of[a] == job_of[b] and env.nodes[b] == env.nodes[a] + 1
        elif kind == 1:
            assert job_of[a] == job_of[b] and env.nodes[a] == env.nodes[b] + 1
        elif env.machine_edges == "hub":
            op, hub = (a, b) if kind == 2 else (b, a)
            assert op < num_ops <= hub and env.nodes[hub] - env.times.size == machine_of[op]
        else:
            assert machine_of[a] == machine_of[b] and job_of[a] != job_of[b]
            assert (kind == 2) == (is_next[a] and is_next[b])
    counts = np.bincount(kinds, minlength=4)
    num_jobs_left = len(np.unique(job_of))
    assert counts[0] == counts[1] == num_ops - num_jobs_left
    per_machine = np.bincount(machine_of)
    if env.machine_edges == "hub":
        assert num_nodes == num_ops + (per_machine > 0).sum() and counts[2] == counts[3] == num_ops
    else:
        assert num_nodes == num_ops
        assert counts[2] + counts[3] == (per_machine * (per_machine - 1)).sum()


@settings(max_examples=40, deadline=None)
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
    rules = dict(dispatch=dispatch, machine_edges=edges, skip_forced=skip, reward_unit="time")
    env = JobShopEnv(jobs=jobs, machines=machines, durations=(low, 9), **rules)
    observation, info = env.reset(seed=seed)
    assert info == {}
    shop = NaiveShop(env.times, env.machine_of, dispatch)
    first_bound = shop.bound()[0]
    rng, total, terminated, size = np.random.default_rng(seed), 0.0, False, np.inf
    while not terminated:
        for op in env.order[len(shop.schedule) :]:
            assert len(shop.legal()) == 1 or not skip
            assert (op // machines, op % machines) in shop.legal()
            shop.play(op // machines)
        legal = [j * machines + k for j, k in shop.legal()]
        assert env.nodes[observation["action_mask"] == 1].tolist() == legal
        bound, heads = shop.bound()
        assert env.bound == bound
        # The first reward also pays for what reset dispatched
        assert bound == first_bound - total or size == np.inf
        check_graph(env, observation)
        assert len(observation["graph"].nodes) < size
        size = len(observation["graph"].nodes)
        now = min(heads[j, k] for j, k in enumerate(shop.next) if k < machines)
        own = np.array([heads[divmod(o, machines)] for o in env.nodes[: env.num_left]])
        start = (own - now) / env.times.mean()
        found = observation["graph"].nodes[: env.num_left, COLUMN["start"]]
        np.testing.assert_allclose(found, np.minimum(start, job_shop.FEATURE_LIMIT), atol=1e-4)
        action = sample_action(observation, rng)
        shop.play(env.nodes[action] // machines)
        observation, reward, terminated, _, info = env.step(action)
        assert reward <= 0
        total += reward
    for op in env.order[len(shop.schedule) :]:
        shop.play(op // machines)
    makespan = max(end for *_, end in shop.schedule)
    assert info["eval"] == {"cost": makespan, "lower_bound": first_bound}
    assert total == first_bound - makespan
    assert len(observation["graph"].nodes) == len(observation["action_mask"]) == 1
    for axis in (0, 2):  # no two operations of a job or of a machine overlap
        for key in {row[axis] for row in shop.schedule}:
            rows = sorted(row[3:] for row in shop.schedule if row[axis] == key)
            assert all(end <= start for (_, end), (start, _) in zip(rows, rows[1:]))
    every = [(j, k) for j in range(jobs) for k in range(machines)]
    assert sorted(row[:2] for row in shop.schedule) == every


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.integers(1, 6),
    machines=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    lookahead=st.integers(1, 7),
    edges=st.sampled_from(["hub", "clique"]),
)
def test_lookahead_shows_a_part_of_the_graph(jobs, machines, seed, lookahead, edges):
    """The next operations of each job, their edges and all machines, with the features of the whole
    graph."""
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
    by_name = {name: x[:, column].tolist() for name, column in COLUMN.items()}
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
    assert list(expected) == list(COLUMN)
    for name, values in expected.items():
        np.testing.assert_allclose(by_name[name], values, atol=1e-6, err_msg=name)


def test_ft06_optimum_is_within_reach():
    env, costs = JobShopEnv(instance="ft06"), []
    for seed in range(200):
        _, info = play_random(env, seed)
        costs.append(info["eval"]["cost"])
    assert 55 <= min(costs) <= 60
    assert info["eval"]["best_known"] == 55
    assert {*RULES, "nondelay SPT", "cost", "lower_bound"} <= set(info["eval"])


def test_published_policies():
    """An evaluation on la or ta shows greedy makespans of L2D and SPN beside the rules', none of
    which is below the best known one."""
    _, info = play_random(JobShopEnv(instance="la01"), 1)
    assert (info["eval"]["L2D"], info["eval"]["SPN"]) == (710, 692)
    _, info = play_random(JobShopEnv(instance="ft06"), 1)
    assert not {"L2D", "SPN"} & set(info["eval"])
    rows = job_shop.published()
    assert {f"la{i:02}" for i in range(1, 41)} <= set(rows)
    for name, row in rows.items():
        costs = [float(value) for method, value in row.items() if method != "instance" and value]
        assert min(costs) >= load_instance(name)[2]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_benchmark_instances(name):
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


def test_suites():
    suites = JobShopEnv.eval_suites
    counts = {"ft": 3, "abz": 5, "yn": 4, "la": 40, "orb": 10, "swv": 20, "all": 162}
    counts |= {"ta15x15": 10, "ta100x20": 10}
    assert {name: len(suites[name]) for name in counts} == counts
    assert suites["ta20x15"][0] == {"instance": "ta11"} and len(set(ALL_NAMES)) == 162


def test_rules_match_published_gaps():
    """Non-delay dispatch on la01-40: published mean gaps SPT 21.2, MWKR 12.7, MOPNR 13.7 % (ties
    differ)."""
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


def test_sizes_are_long_tailed():
    env, sizes = JobShopEnv(), []
    for seed in range(300):
        env.reset(seed=seed)
        sizes.append(env.times.shape)
    jobs, machines = np.array(sizes).T
    assert jobs.min() == 3 and jobs.max() == 20 and machines.min() == 3 and machines.max() == 15
    assert np.median(jobs * machines) < 0.25 * (jobs * machines).max()
    assert (jobs * machines).max() >= 10 * (jobs * machines).min()
    assert env.times.min() >= 1 and env.times.max() <= 99


def test_machines_are_visited_set_by_set():
    env = JobShopEnv(jobs=20, machines=5, machine_sets=2)
    env.reset(seed=0)
    assert (env.machine_of[:, :3] < 3).all()
    assert len(np.unique(env.machine_of[:, :3], axis=0)) == 6  # all orders of three
    env = JobShopEnv(jobs=3, machines=5, machine_sets=5)
    env.reset(seed=0)
    assert (env.machine_of == np.arange(5)).all()  # a flow shop
    env = JobShopEnv(jobs=20, machines=4, machine_sets=(1, 2))
    env.reset(seed=0)
    kinds = set()
    for _ in range(50):
        env.reset()
        kinds.add(bool((env.machine_of[:, :2] < 2).all()))
    assert kinds == {True, False}


def test_operations_without_duration():
    times, machines = load_instance("orb07")[:2]
    assert (times == 0).any()
    play_random(JobShopEnv(instance="orb07"), 0)
    nothing = {"times": [[0, 0], [0, 0]], "machines": [[0, 1], [1, 0]]}
    total, info = play_random(JobShopEnv(instance=nothing), 0)
    assert total == 0 and info["eval"]["cost"] == 0
