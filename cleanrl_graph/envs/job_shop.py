"""Job-shop scheduling by dispatching: choose which operation starts next, minimise the makespan.

An instance has J jobs and M machines; job j visits every machine exactly once, in the order
`machines[j]`, and its k-th operation takes `times[j][k]`. Each decision appends one operation to
the schedule, at the earliest time its job and its machine are both free. Which operations are
offered is the schedule builder (`dispatch`):

- "active": the conflict set of Giffler and Thompson (1960). On the machine that can complete an
  operation first, every operation that could start before that completion. Some sequence of these
  choices is an optimal schedule.
- "nondelay": on the machine that can start an operation first, the operations that can start at
  that time. No machine waits while it has work, so priority rules do better here, but the optimum
  may be out of reach.

"active" is the default because it schedules better once a policy is trained: after 400,000
decisions of ppo_graph.py the mean greedy gap on la01-40 is 5.8% with "active" and 7.0% with
"nondelay" (seed 1, benchmark/results/scheduling.md).

Mean gap to the best known makespan, %, of the rules below (`rule_makespans`; nondelay agrees with
published tables):

| instances | dispatch | SPT | MWKR | MOPNR | FDD/MWKR | random |
| --- | --- | --- | --- | --- | --- | --- |
| la01-40 | active | 58.5 | 19.0 | 19.3 | 15.4 | 37.5 |
| la01-40 | nondelay | 20.0 | 12.6 | 13.9 | 11.5 | 23.0 |
| ta01-10 | active | 58.4 | 26.9 | 26.8 | 25.9 | 48.2 |
| ta01-10 | nondelay | 25.9 | 19.2 | 20.5 | 17.7 | 29.6 |

Benchmark instances come from job_shop_instances.txt (OR-Library, public data); ta01-ta80 are
generated from the seeds that Taillard published (EJOR 64, 1993).
"""

import csv
from functools import lru_cache, partial
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .toy import mask_space, starts_of

NODE_FEATURES = [
    "is_op: 1 for an operation",
    "is_machine: 1 for a machine node",
    "time: processing time / mean time of the instance",
    "start: (earliest start - now) / mean time; machine: of its first operation",
    "start_rel: (earliest start - now) / horizon, where horizon = lower bound - now",
    "gap: (earliest start - max(now, time the machine is free)) / mean time",
    "tail: work of the job after this operation / horizon; machine: least tail of its operations",
    "slack: (lower bound - start - time - tail) / mean time; machine: lower bound - its bound",
    "slack_rel: the same / horizon",
    "job_slack: (lower bound - bound of the job) / mean time",
    "job_work: work of the job from this operation on / largest remaining work of a job",
    "ops_left: operations of the job from this one on / M",
    "flow: w / (w + job work), w = work of the job up to the end of this operation (FDD/MWKR)",
    "candidate: 1 for the next operation of its job",
    "legal: 1 if the operation may be dispatched now",
    "conflict: 1 for the machine of the legal operations, and for its operations",
    "machine_work: remaining work of the machine / largest remaining work of a machine",
    "machine_work_rel: remaining work of the machine / horizon",
    "machine_free: (time the machine is free - now) / mean time, at least 0",
    "machine_ops: remaining operations of the machine / J",
    "machine_slack_rel: (lower bound - machine's bound) / horizon",
]
EDGE_KINDS = ["job successor", "job predecessor", "operation to machine", "machine to operation"]
RULES = ["SPT", "MWKR", "MOPNR", "FDD/MWKR", "random"]
# Features are capped, so that instances far larger than those trained on stay in range.
FEATURE_LIMIT = 10.0
BIG = 1e12  # stands for infinity in times, without the nan of inf - inf
DATA_FILE = Path(__file__).with_name("job_shop_instances.txt")
PUBLISHED_FILE = Path(__file__).with_name("job_shop_published.csv")


def taillard_instance(num_jobs, num_machines, time_seed, machine_seed):
    """Returns times and machines [J, M] of Taillard's generator (EJOR 64, 1993, section 2), from
    its two seeds."""

    def uniform(seed, low, high):
        seed = 16807 * seed % (2**31 - 1)
        return seed, low + int(seed / (2**31 - 1) * (high - low + 1))

    times = np.zeros((num_jobs, num_machines), np.int64)
    machines = np.tile(np.arange(num_machines), (num_jobs, 1))
    for j in range(num_jobs):
        for k in range(num_machines):
            time_seed, times[j, k] = uniform(time_seed, 1, 99)
    for j in range(num_jobs):
        for k in range(num_machines):
            machine_seed, other = uniform(machine_seed, k, num_machines - 1)
            machines[j, [k, other]] = machines[j, [other, k]]
    return times, machines


@lru_cache(maxsize=1)
def read_data_file():
    """Returns dict name -> (header numbers, one list of numbers per job) of the data file.

    An instance that is made by Taillard's generator has no lists, but two more header numbers.
    """
    lines = [line for line in DATA_FILE.read_text().splitlines() if not line.startswith("#")]
    data = {}
    i = 0
    while i < len(lines):
        words = lines[i].split()
        header = list(map(int, words[2:]))
        num_rows = header[0] if words[0] == "instance" else 0
        i += 1
        data[words[1]] = header, [list(map(int, row.split())) for row in lines[i : i + num_rows]]
        i += num_rows
    return data


@lru_cache(maxsize=None)
def load_instance(name):
    """Returns times [J, M], machines [J, M], best known makespan and best known lower bound of a
    named benchmark.

    Raises ValueError for an unknown name.
    """
    data = read_data_file()
    if name not in data:
        raise ValueError(
            f"Unknown job-shop instance {name!r}: use one of ft06, ft10, ft20, la01-40, abz5-9, "
            "orb01-10, swv01-20, yn1-4, ta01-80, or a dict with 'times' and 'machines'."
        )
    header, rows = data[name]
    num_jobs, num_machines, lower_bound, best_known = header[:4]
    if rows:
        table = np.array(rows, np.int64).reshape(num_jobs, num_machines, 2)
        times = table[:, :, 1].copy()
        machines = table[:, :, 0].copy()
    else:
        time_seed, machine_seed = header[4:]
        times, machines = taillard_instance(num_jobs, num_machines, time_seed, machine_seed)
    return times, machines, best_known, lower_bound


@lru_cache(maxsize=1)
def published():
    """Returns {instance: row of PUBLISHED_FILE}: makespans of L2D (Zhang et al. 2020) and SPN
    (Corsini et al. 2024), from output/Results.xlsx of AndreaCorsini1/SelfLabelingJobShop."""
    with open(PUBLISHED_FILE, newline="") as file:
        return {row["instance"]: row for row in csv.DictReader(file)}


def check_instance(times, machines):
    """Returns times and machines as int64 [J, M]; raises ValueError unless every job visits every
    machine once."""
    times = np.asarray(times)
    machines = np.asarray(machines)
    if times.ndim != 2 or times.shape != machines.shape or times.size == 0:
        raise ValueError(
            f"A job-shop instance needs times and machines of one shape [jobs, machines], "
            f"got {times.shape} and {machines.shape}."
        )
    if (times != np.floor(times)).any() or (times < 0).any():
        raise ValueError("A job-shop instance needs whole processing times >= 0.")
    num_machines = machines.shape[1]
    wrong = (np.sort(machines, axis=1) != np.arange(num_machines)).any(axis=1)
    if wrong.any():
        job = wrong.argmax()
        raise ValueError(
            f"Job {job} must visit each machine 0..{num_machines - 1} exactly once, "
            f"got {machines[job].tolist()}."
        )
    return times.astype(np.int64), machines.astype(np.int64)


def size_range(name, value):
    """Returns (low, high) of an int or a pair; raises ValueError when it is not 1 <= low <=
    high."""
    low, high = (value, value) if np.isscalar(value) else value
    if not 1 <= low <= high:
        raise ValueError(f"{name} must be a positive int or a pair 1 <= low <= high, got {value}.")
    return int(low), int(high)


def log_uniform(rng, limits):
    """Returns a random int from limits[0] to limits[1], small ones more frequently."""
    low, high = limits
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def check_option(name, value, options):
    """Raises ValueError unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name} must be one of {options}, got {value!r}.")


def numbered(pattern, first, last):
    """Returns the names that `pattern` makes of the numbers from `first` to `last`."""
    return [pattern.format(number) for number in range(first, last + 1)]


def instance_suites(families):
    """Returns dict suite name -> list of keyword arguments, one per benchmark instance, from dict
    suite name -> names of instances."""
    return {suite: [{"instance": name} for name in names] for suite, names in families.items()}


def suites():
    """Returns dict suite name -> list of JobShopEnv keyword arguments, one per benchmark
    instance."""
    families = {
        "ft": ["ft06", "ft10", "ft20"],
        "abz": numbered("abz{}", 5, 9),
        "yn": numbered("yn{}", 1, 4),
        "la": numbered("la{:02d}", 1, 40),
        "orb": numbered("orb{:02d}", 1, 10),
        "swv": numbered("swv{:02d}", 1, 20),
    }
    sizes = ["15x15", "20x15", "20x20", "30x15", "30x20", "50x15", "50x20", "100x20"]
    for i, size in enumerate(sizes):
        families["ta" + size] = numbered("ta{:02d}", 10 * i + 1, 10 * i + 10)
    families["all"] = [name for names in families.values() for name in names]
    return instance_suites(families)


@lru_cache(maxsize=256)
def edge_layout(num_jobs, num_machines, hub):
    """Returns the edges of all operations, grouped by operation, before the machines are filled in.

    edges [E, 2] and kinds [E]; edge_end, where operation o's edges are edge_end[o]:edge_end[o + 1];
    op_rows and hub_rows, the rows of kinds 2 and 3 in order of operations. Without `hub` only kinds
    0 and 1.
    """
    ops = np.arange(num_jobs * num_machines)
    pairs = [(ops, ops + 1), (ops + 1, ops)]
    if hub:
        pairs += [(ops, ops), (ops, ops)]
    edges = np.array(pairs).transpose(2, 0, 1)  # [ops, kinds, 2]
    keep = np.ones(edges.shape[:2], bool)
    is_last = ops % num_machines == num_machines - 1
    keep[is_last, :2] = False
    kinds = np.broadcast_to(np.arange(len(pairs)), keep.shape)[keep]
    edge_end = starts_of(keep.sum(axis=1)).tolist()
    op_rows = np.flatnonzero(kinds == 2)
    hub_rows = np.flatnonzero(kinds == 3)
    return edges[keep], kinds, edge_end, op_rows, hub_rows


class DispatchEnv(gym.Env):
    """Scheduling by dispatching one operation after the other, rewarded by minus the growth of a
    lower bound.

    What JobShopEnv and FlexibleJobShopEnv share. A class has `builders`, the values of `dispatch`;
    `fields`, the names of an instance's two arrays; `load_instance` and `check_instance`;
    `_random_instance`, `_set_schedule`, `_find_legal`, `_forced_choice` (the one choice that there
    is, or None), `_choice` (that of an action), `_dispatch` (of a choice), `_lower_bound`,
    `_observe`, `_rules` (makespans of the rules) and `_bars` (of the Gantt chart).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self, jobs, machines, durations, instance, dispatch, skip_forced, reward_unit, render_mode
    ):
        check_option("dispatch", dispatch, self.builders)
        check_option("reward_unit", reward_unit, ["bound", "time"])
        check_option("render_mode", render_mode, [None, "rgb_array"])
        self.dispatch = dispatch
        self.skip_forced = skip_forced
        self.reward_unit = reward_unit
        self.render_mode = render_mode
        self.jobs = size_range("jobs", jobs)
        self.machines = size_range("machines", machines)
        self.durations = size_range("durations", durations)
        self.instance = instance
        self.name = None  # of a benchmark instance
        self.fixed = None  # the two arrays of a given instance
        if isinstance(instance, str):
            self.name = instance
            self.fixed = self.load_instance(instance)[:2]
        elif instance is not None:
            self.fixed = self._given_instance(instance)
        self.times = None

    def _given_instance(self, instance):
        """Returns the two arrays of a dict; raises ValueError for what is no instance."""
        first, second = self.fields
        if not isinstance(instance, dict) or set(instance) != {first, second}:
            raise ValueError(
                f"instance must be a benchmark name or a dict with exactly {first!r} and "
                f"{second!r}."
            )
        return self.check_instance(instance[first], instance[second])

    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self._start_episode(*(self.fixed or self._random_instance()))
        return self._observe(), {}

    def step(self, action):
        """Returns the next observation, the reward, terminated (all operations are dispatched),
        False and info: {} before the end, then "eval" with the makespan ("cost"), the initial
        bound ("lower_bound"), and for a named benchmark "best_known" and the makespans of rules.
        Raises ValueError for an action that is not legal."""
        if self.times is None or self.num_left == 0:
            raise ValueError("step() needs an episode under way: call reset() first.")
        if not 0 <= action < len(self.mask) or not self.mask[action]:
            raise ValueError(
                f"Action {action} is not legal now: the entries of action_mask that are 1 are "
                f"{np.flatnonzero(self.mask).tolist()}."
            )
        self._dispatch(*self._choice(action))
        self._find_legal()
        if self.skip_forced:
            self._skip_forced(0)
        observation = self._observe()
        reward = (self.paid - self.bound) / self.unit
        self.paid = self.bound
        terminated = self.num_left == 0
        info = self._eval() if terminated else {}
        return observation, reward, terminated, False, info

    def _random_sizes(self):
        """Returns the number of jobs and of machines of a random instance."""
        num_jobs = log_uniform(self.np_random, self.jobs)
        num_machines = log_uniform(self.np_random, self.machines)
        return num_jobs, num_machines

    def _start_episode(self, *instance):
        """Sets up the arrays of an instance and dispatches the first forced operations."""
        self._set_schedule(*instance)
        self._find_legal()
        self._lower_bound()
        self.first_bound = self.bound
        self.paid = self.bound  # the bound that the rewards so far add up to
        self.unit = max(self.bound, 1.0) if self.reward_unit == "bound" else 1.0
        if self.skip_forced:
            self._skip_forced(1)

    def _skip_forced(self, keep):
        """Dispatches while there is no choice and more than `keep` operations are left."""
        while self.num_left > keep:
            choice = self._forced_choice()
            if choice is None:
                break
            self._dispatch(*choice)
            self._find_legal()

    def _eval(self):
        """Returns the info of a finished episode; rules and best known makespan for a named
        benchmark only."""
        result = {"cost": self.bound, "lower_bound": self.first_bound}
        if self.name is not None:
            result["best_known"] = float(self.load_instance(self.name)[2])
            result |= self._rules(self.dispatch)
            # The best rule may be one of another schedule builder.
            for other in ("active", "nondelay"):
                if other != self.dispatch:
                    for rule, cost in self._rules(other).items():
                        result[f"{other} {rule}"] = cost
        return {"eval": result}

    def render(self):
        """Returns the Gantt chart so far, uint8 [H, W, 3]: a row per machine, a colour per job,
        time to the right."""
        if self.render_mode != "rgb_array" or self.times is None:
            return None
        return gantt(self._bars(), self.num_machines, self.num_jobs, self.bound)


class JobShopEnv(DispatchEnv):
    """Job-shop scheduling as a graph of the operations that are not dispatched yet.

    Nodes: the remaining operations in job-major order, then one node per machine that still has
    operations (not with `machine_edges="clique"`); columns in NODE_FEATURES, all >= 0 and capped at
    FEATURE_LIMIT. Edge kinds: EDGE_KINDS. In clique mode kind 2 joins two operations of one machine
    that are both next in their jobs, 3 any other two of one machine (both directions). A terminal
    observation is one zero node, so that no graph is ever empty.

    Action: index of a node whose `action_mask` is 1. Reward: minus the growth of a lower bound on
    the makespan (the larger of the job bounds and the one-machine bounds head + work + tail, given
    all that is dispatched), which ends as the makespan itself: the return is (initial bound -
    makespan) / unit. With `reward_unit="bound"` the unit is the initial bound, with "time" it is 1.

    Random instances draw J and M log-uniformly from `jobs` and `machines`, so small ones are
    frequent and large ones rare; times are uniform integers in `durations`. Jobs visit machines at
    random, or one set after the other with `machine_sets` 2 (the "2SETS" of Storer, Wu and Vaccari
    1992; as many sets as machines: a flow shop), a number or a range (low, high), uniform in each
    episode. `instance` fixes a benchmark name or {"times", "machines"}. With `skip_forced` the env
    dispatches by itself while only one operation is legal. With a `lookahead` only the next so many
    operations of each job are nodes, at most J * lookahead + M in all; the features still count the
    others.
    """

    eval_suites = suites()
    builders = "active", "nondelay"
    fields = "times", "machines"
    load_instance = staticmethod(load_instance)
    check_instance = staticmethod(check_instance)

    def __init__(
        self,
        jobs=(3, 20),
        machines=(3, 15),
        durations=(1, 99),
        instance=None,
        dispatch="active",
        skip_forced=True,
        reward_unit="bound",
        machine_edges="hub",
        lookahead=None,
        machine_sets=1,
        render_mode=None,
    ):
        super().__init__(
            jobs, machines, durations, instance, dispatch, skip_forced, reward_unit, render_mode
        )
        check_option("machine_edges", machine_edges, ["hub", "clique"])
        if lookahead is not None and lookahead < 1:
            raise ValueError(f"lookahead must be None or a positive int, got {lookahead!r}.")
        self.machine_edges = machine_edges
        self.lookahead = lookahead
        self.machine_sets = size_range("machine_sets", machine_sets)
        max_jobs = self.jobs[1]
        max_machines = self.machines[1]
        if self.fixed:
            max_jobs, max_machines = self.fixed[0].shape
        self.action_space = spaces.Discrete(max_jobs * max_machines + max_machines)
        features = spaces.Box(-np.inf, np.inf, (len(NODE_FEATURES),), np.float32)
        graph = spaces.Graph(features, spaces.Discrete(len(EDGE_KINDS)))
        self.observation_space = spaces.Dict({"graph": graph, "action_mask": mask_space()})

    def _random_instance(self):
        """Returns times and machines [J, M] of a random instance."""
        shape = self._random_sizes()
        shortest, longest = self.durations
        times = self.np_random.integers(shortest, longest + 1, shape)
        place = self.np_random.random(shape)
        if self.machine_sets != (1, 1):
            fewest, most = self.machine_sets
            num_sets = self.np_random.integers(fewest, most + 1)
            place += np.arange(shape[1]) * num_sets // shape[1]  # which set comes first
        return times, place.argsort(axis=1)

    def _set_schedule(self, times, machines):
        """The state of the schedule builder. Operation o = j * M + k; flat arrays are indexed by o,
        j or m."""
        num_jobs, num_machines = times.shape
        self.times = times
        self.machine_of = machines
        self.num_jobs = num_jobs
        self.num_machines = num_machines
        self.num_left = times.size
        self.op_time = times.ravel().tolist()
        self.op_machine = machines.ravel().tolist()
        self.order = []  # dispatched operations
        self.op_start = np.full(times.size, -1.0)
        self.free = np.zeros(num_machines)  # time each machine is free
        self.ready = np.zeros(num_jobs)  # time each job's next operation is ready, BIG: none left
        self.next_op = np.arange(0, times.size, num_machines)
        self.next_machine = machines[:, 0].copy()
        self.next_time = times[:, 0].astype(float)
        self.start = np.zeros(num_jobs)  # of the next operations
        self.finish = np.zeros(num_jobs)
        self._set_bounds()
        self._set_nodes()
        self._set_features()
        self._set_edges()

    def _set_bounds(self):
        """What the bounds are computed from.

        cum and tail are the work of the job before and after an operation. cum, -minus_cum and the
        tail in head_tail are BIG once it is dispatched, which takes it out of every minimum and
        maximum in `_lower_bound`.
        """
        times = self.times
        self.total = times.sum(axis=1).astype(float)
        work_to = times.cumsum(axis=1).astype(float)
        self.cum_end = work_to.ravel().tolist()
        self.cum = work_to - times
        self.minus_cum = -self.cum
        self.tail = self.total[:, None] - work_to
        self.shift = np.zeros((self.num_jobs, 1))  # ready time - work done, of each job
        self.job_left = self.total.copy()
        # Operations of each machine [M, J]: column j is job j's.
        self.machine_ops = self.machine_of.argsort(axis=1).T + self.next_op
        machine_times = times.ravel()[self.machine_ops]
        self.machine_left = machine_times.sum(axis=1).astype(float)  # -4 BIG when none is left
        self.machine_count = np.full(self.num_machines, float(self.num_jobs))
        # Head and tail of each machine's operations [2, M, J].
        self.head_tail = np.empty((2, self.num_machines, self.num_jobs))
        self.head_tail[1] = self.tail.ravel()[self.machine_ops]
        self.head = np.empty(times.shape)
        self.chain = np.empty(times.shape)

    def _set_nodes(self):
        """Which nodes are shown; the machines come after the operations."""
        num_ops = self.times.size
        machines = np.arange(self.num_machines if self.machine_edges == "hub" else 0)
        self.node_machine = np.concatenate([self.machine_of.ravel(), machines])
        self.window = self.lookahead or self.num_machines  # operations of each job that are shown
        self.shown = np.ones(len(self.node_machine), bool)
        self.shown[:num_ops] = np.arange(num_ops) % self.num_machines < self.window
        self.legal = np.zeros(len(self.node_machine), np.int8)

    def _set_features(self):
        """The features that do not change, and space for the others."""
        num_machines = self.num_machines
        num_features = len(NODE_FEATURES)
        self.mean_time = max(float(self.times.mean()), 1e-9)
        self.work_from = self.times + self.tail  # work of the job from each operation on
        self.features = np.zeros((len(self.shown), num_features), np.float32)
        self.machine_features = np.zeros((num_machines, 6), np.float32)
        self.scale = np.ones(num_features, np.float32)
        self.offset = np.zeros(num_features, np.float32)

        ops, hubs = self._feature_views()
        work_through = self.cum + self.times
        ops[:, :, 0] = 1  # is_op
        hubs[:, 1] = 1  # is_machine
        ops[:, :, 2] = self.times / self.mean_time  # time
        ops[:, :, 6] = self.tail  # tail
        ops[:, :, 10] = self.work_from  # job_work
        ops[:, :, 11] = np.arange(num_machines, 0, -1) / num_machines  # ops_left
        ops[:, :, 12] = work_through / np.maximum(work_through + self.work_from, 1e-9)  # flow
        ops[:, 0, 13] = 1  # candidate

    def _set_edges(self):
        """The edges of the whole graph: with hubs grouped by the operation that they go with."""
        is_hub = self.machine_edges == "hub"
        num_jobs, num_machines = self.times.shape
        edges, kinds, edge_end, op_rows, hub_rows = edge_layout(num_jobs, num_machines, is_hub)
        if is_hub:
            hub_of_op = self.times.size + self.machine_of.ravel()
            self.edges = edges.copy()
            self.edges[op_rows, 1] = hub_of_op
            self.edges[hub_rows, 0] = hub_of_op
            self.kinds = kinds
            self.edge_end = edge_end
            self.edge_shown = self.shown[self.edges].all(axis=1)
            return
        one = self.machine_ops[:, :, None]
        other = self.machine_ops[:, None, :]
        pairs = np.stack(np.broadcast_arrays(one, other), -1)  # [M, J, J, 2]
        pairs = pairs[:, ~np.eye(num_jobs, dtype=bool)].reshape(-1, 2)
        self.edges = np.concatenate([edges, pairs])
        self.kinds = np.concatenate([kinds, np.full(len(pairs), 3)])

    def _feature_views(self):
        """Returns the rows of the operations [J, M, F] and of the hubs. Never kept: pickle makes a
        copy of a view."""
        num_ops = self.times.size
        ops = self.features[:num_ops].reshape(self.num_jobs, self.num_machines, -1)
        return ops, self.features[num_ops:]

    def _dispatch(self, op):
        """Appends operation `op`, the next of its job, to the schedule."""
        job, step = divmod(op, self.num_machines)
        machine = self.op_machine[op]
        time = self.op_time[op]
        start = self.start[job]
        finish = start + time
        self.op_start[op] = start
        self.order.append(op)
        self.num_left -= 1
        self.free[machine] = finish
        self.job_left[job] -= time
        self.shift[job] = finish - self.cum_end[op]
        self.cum[job, step] = BIG
        self.minus_cum[job, step] = -BIG
        self.head_tail[1, machine, job] = BIG
        self.machine_left[machine] -= time
        self.machine_count[machine] -= 1
        if self.machine_count[machine] == 0:
            self.machine_left[machine] = -4 * BIG
        self._update_shown(op, step, machine)
        if step + 1 == self.num_machines:
            self.ready[job] = BIG
            return
        self.ready[job] = finish
        self.next_op[job] = op + 1
        self.next_machine[job] = self.op_machine[op + 1]
        self.next_time[job] = self.op_time[op + 1]
        self.features[op + 1, 13] = 1  # candidate

    def _update_shown(self, op, step, machine):
        """Hides an operation that is dispatched, and shows the one that the lookahead reaches."""
        is_hub = self.machine_edges == "hub"
        self.shown[op] = False
        if is_hub:
            self.edge_shown[self.edge_end[op] : self.edge_end[op + 1]] = False
            if self.machine_count[machine] == 0:
                self.shown[self.times.size + machine] = False
        if step + self.window >= self.num_machines:
            return
        new = op + self.window
        self.shown[new] = True
        if is_hub:
            first = self.edge_end[new]
            end = self.edge_end[new + 1]
            # Edges with the operation before it, unless that is the dispatched one.
            self.edge_shown[self.edge_end[new - 1] : first] = self.window > 1
            self.edge_shown[end - 2 : end] = True  # with its machine

    def _find_legal(self):
        """Sets `conflict_machine` and `legal_jobs`, the jobs whose next operation may be dispatched
        now."""
        start, finish = self.start, self.finish
        np.maximum(self.free[self.next_machine], self.ready, out=start)
        if self.dispatch == "active":
            np.add(start, self.next_time, out=finish)
            first = finish.argmin()
            legal = start < finish[first]
            # An operation that takes no time does not start before it completes.
            legal[first] = True
        else:
            first = start.argmin()
            legal = start <= start[first]
        self.conflict_machine = self.next_machine[first]
        legal &= self.next_machine == self.conflict_machine
        self.legal_jobs = legal.nonzero()[0]

    def _forced_choice(self):
        if len(self.legal_jobs) > 1:
            return None
        return (int(self.next_op[self.legal_jobs[0]]),)

    def _choice(self, action):
        return (int(self.nodes[action]),)

    def _lower_bound(self):
        """Sets heads (earliest starts) [J, M], the bounds of jobs and machines, and `bound`, the
        largest of them.

        Along a job, head[k] = cum[k] + max(ready - done, max over i <= k of free[machine i] -
        cum[i]).
        """
        chain, head = self.chain, self.head
        np.add(self.free[self.machine_of], self.minus_cum, out=chain)
        np.maximum.accumulate(chain, axis=1, out=chain)
        np.maximum(chain, self.shift, out=chain)
        np.add(chain, self.cum, out=head)
        self.job_bound = chain[:, -1] + self.total  # a finished job's is its completion time
        np.take(head, self.machine_ops, out=self.head_tail[0], mode="clip")
        self.machine_head, self.machine_tail = np.minimum.reduce(self.head_tail, axis=2)
        self.machine_bound = self.machine_head + self.machine_left + self.machine_tail
        self.bound = float(max(self.job_bound.max(), self.machine_bound.max()))

    def _observe(self):
        """Updates the bound and returns the observation; keeps its nodes and mask for the next
        action."""
        self._lower_bound()
        if self.num_left == 0:
            self.nodes = np.zeros(0, np.int64)
            self.mask = np.ones(1, np.int8)
            return {"graph": terminal_graph(len(NODE_FEATURES)), "action_mask": self.mask}
        self.legal[:] = 0
        self.legal[self.next_op[self.legal_jobs]] = 1
        self.nodes = self.shown.nonzero()[0]
        self.mask = self.legal[self.nodes]
        edges, kinds = self._edges()
        graph = spaces.GraphInstance(self._node_features(), kinds, edges)
        return {"graph": graph, "action_mask": self.mask}

    def _edges(self):
        """Returns edges [E, 2] between the remaining nodes, numbered as in the observation, and
        their kinds [E]."""
        rank = self.shown.cumsum() - 1
        if self.machine_edges == "hub":
            keep = self.edge_shown.nonzero()[0]
            return rank.take(self.edges.take(keep, axis=0)), self.kinds.take(keep)
        keep = self.shown[self.edges].all(axis=1).nonzero()[0]
        edges = self.edges[keep]
        kinds = self.kinds[keep]
        is_candidate = self.features[:, 13] == 1
        both_next = is_candidate[edges].all(axis=1)
        return rank[edges], kinds - (both_next & (kinds == 3))

    def _node_features(self):
        """Returns float32 [N, F]: raw values are written for the whole instance, then gathered,
        scaled and shifted."""
        now = float(self.start.min())
        self._write_times()
        self._write_machines(now)
        self._set_scales(now)
        x = self.features.take(self.nodes, axis=0)
        x *= self.scale
        x += self.offset
        np.subtract(x[:, 3], x[:, 18], out=x[:, 5])  # gap = start - machine_free
        x[:, 14] = self.mask  # legal
        if self.machine_edges == "hub":
            num_hubs = np.count_nonzero(self.machine_count)
            x[-num_hubs:, 9] = 0  # job_slack
        return np.minimum(x, FEATURE_LIMIT, out=x)

    def _write_times(self):
        """Writes the raw features that the bounds give."""
        ops, hubs = self._feature_views()
        completion = self.head + self.work_from
        ops[:, :, 3] = self.head  # start
        ops[:, :, 4] = self.head  # start_rel
        ops[:, :, 7] = completion  # slack
        ops[:, :, 8] = completion  # slack_rel
        ops[:, :, 9] = self.job_bound[:, None]  # job_slack
        if len(hubs):
            hubs[:, 3] = self.machine_head  # start
            hubs[:, 4] = self.machine_head  # start_rel
            hubs[:, 6] = self.machine_tail  # tail
            hubs[:, 7] = self.machine_bound  # slack
            hubs[:, 8] = self.machine_bound  # slack_rel

    def _write_machines(self, now):
        """Writes the raw features of the machines, which their operations have as well."""
        table = self.machine_features
        table[:, 0] = 0
        table[self.conflict_machine, 0] = 1  # conflict
        table[:, 1] = self.machine_left  # machine_work
        table[:, 2] = self.machine_left  # machine_work_rel
        np.maximum(self.free, now, out=table[:, 3], casting="same_kind")  # machine_free
        table[:, 4] = self.machine_count  # machine_ops
        table[:, 5] = self.machine_bound  # machine_slack_rel
        self.features[:, 15:] = table.take(self.node_machine, axis=0)

    def _set_scales(self, now):
        """Sets by what the raw features are multiplied (`scale`) and what is added then (`offset`).

        Times count from now on, completions become what is left to the bound; without an entry
        here a feature stays as it is.
        """
        scale = self.scale
        offset = self.offset
        per_time = 1 / self.mean_time
        per_horizon = 1 / max(self.bound - now, 1e-9)
        now_in_times = now * per_time
        now_in_horizons = now * per_horizon
        bound_in_times = self.bound * per_time
        bound_in_horizons = self.bound * per_horizon

        scale[3] = per_time  # start
        offset[3] = -now_in_times
        scale[4] = per_horizon  # start_rel
        offset[4] = -now_in_horizons
        scale[6] = per_horizon  # tail
        scale[7] = -per_time  # slack
        offset[7] = bound_in_times
        scale[8] = -per_horizon  # slack_rel
        offset[8] = bound_in_horizons
        scale[9] = -per_time  # job_slack
        offset[9] = bound_in_times
        scale[10] = 1 / max(float(self.job_left.max()), 1e-9)  # job_work
        scale[16] = 1 / max(float(self.machine_left.max()), 1e-9)  # machine_work
        scale[17] = per_horizon  # machine_work_rel
        scale[18] = per_time  # machine_free
        offset[18] = -now_in_times
        scale[19] = 1 / self.num_jobs  # machine_ops
        scale[20] = -per_horizon  # machine_slack_rel
        offset[20] = bound_in_horizons

    def _rules(self, dispatch):
        return rule_makespans(self.name, dispatch)

    def _eval(self):
        """Has greedy makespans of published policies, too, where there are any."""
        info = super()._eval()
        for method, cost in published().get(self.name, {}).items():
            if method.endswith(" greedy") and cost:
                info["eval"][method.removesuffix(" greedy")] = float(cost)
        return info

    def _bars(self):
        bars = []
        for op in self.order:
            start = self.op_start[op]
            finish = start + self.op_time[op]
            bars.append((self.op_machine[op], op // self.num_machines, start, finish))
        return bars


def terminal_graph(num_features):
    """Returns the graph of a terminal observation: one zero node, no edges."""
    nodes = np.zeros((1, num_features), np.float32)
    return spaces.GraphInstance(nodes, np.zeros(0, np.int64), np.zeros((0, 2), np.int64))


def job_colours(num_jobs):
    """Returns a colour for each job, uint8 [num_jobs, 3]: hues that are far apart."""
    hue = (np.arange(num_jobs)[:, None] * 0.618034 + np.array([0, 1 / 3, 2 / 3])) % 1
    return (255 * np.clip(np.abs(6 * hue - 3) - 1, 0, 1) * 0.8 + 30).astype(np.uint8)


def gantt(bars, num_machines, num_jobs, end):
    """Returns a Gantt chart, uint8 [H, W, 3], of bars (machine, job, start, finish); `end` is its
    last time."""
    row = 24
    width = 800
    image = np.full((row * num_machines + 4, width + 8, 3), 255, np.uint8)
    colour = job_colours(num_jobs)
    image[2:-2:row, 4:-4] = 200
    for machine, job, start, finish in bars:
        left = 4 + int(start * width / end)
        right = 4 + int(finish * width / end)
        top = 4 + row * machine
        image[top : top + row - 4, left:right] = 0
        image[top + 1 : top + row - 5, left + 1 : right] = colour[job]
    return image


def rule_job(env, rule, rng):
    """Returns the job, among env.legal_jobs, that a priority rule of RULES dispatches; ties go to
    the first job."""
    jobs = env.legal_jobs
    if rule == "random":
        return jobs[rng.integers(len(jobs))]
    ops = env.next_op[jobs]
    left = env.job_left[jobs]
    if rule == "SPT":
        score = env.next_time[jobs]
    elif rule == "MWKR":
        score = -left
    elif rule == "MOPNR":
        score = ops % env.num_machines
    elif rule == "FDD/MWKR":
        score = (env.cum.ravel()[ops] + env.next_time[jobs]) / np.maximum(left, 1e-9)
    else:
        raise ValueError(f"Unknown dispatching rule {rule!r}: use one of {RULES}.")
    return jobs[score.argmin()]


def dispatch_rule(env, name):
    """Returns the action that a priority rule of RULES takes in the env's present state ("random":
    env.np_random)."""
    env = env.unwrapped
    job = rule_job(env, name, env.np_random)
    return int(np.searchsorted(env.nodes, env.next_op[job]))


# Policies for services/demos.py: policy(env, obs, rng) -> action
def rule_policy(rule, env, obs, rng):
    return dispatch_rule(env, rule)


spt = partial(rule_policy, "SPT")
mwkr = partial(rule_policy, "MWKR")
mopnr = partial(rule_policy, "MOPNR")
fdd_mwkr = partial(rule_policy, "FDD/MWKR")


def pilot(env, obs, rng):
    """Tries every legal operation, finishes the schedule by FDD/MWKR and by MWKR, and takes the one
    after which the better of the two is best (the pilot method, Duin and Voss, Networks 34,
    1999)."""
    env = env.unwrapped
    trial = JobShopEnv(
        instance={"times": env.times, "machines": env.machine_of},
        dispatch=env.dispatch,
        skip_forced=False,
    )
    makespans = []
    for op in env.next_op[env.legal_jobs].tolist():
        for rule in ("FDD/MWKR", "MWKR"):
            trial._start_episode(*trial.fixed)
            for dispatched in [*env.order, op]:
                trial._dispatch(dispatched)
                trial._find_legal()
            makespans.append(finish(trial, rule, rng))
    best = env.legal_jobs[np.argmin(makespans) // 2]  # two makespans for each operation
    return int(np.searchsorted(env.nodes, env.next_op[best]))


def play_rule(times, machines, rule, dispatch="active", seed=0):
    """Returns the makespan of a priority rule of RULES on one instance (times and machines [J,
    M])."""
    env = JobShopEnv(instance={"times": times, "machines": machines}, dispatch=dispatch)
    env._start_episode(*env.fixed)
    return finish(env, rule, np.random.default_rng(seed))


def finish(env, rule, rng):
    """Dispatches all operations that are left by a priority rule of RULES; returns the makespan."""
    while env.num_left:
        job = rule_job(env, rule, rng)
        env._dispatch(int(env.next_op[job]))
        env._find_legal()
    return float((env.op_start + env.op_time).max())


@lru_cache(maxsize=None)
def _rule_makespans(name, dispatch):
    times, machines = load_instance(name)[:2]
    result = {rule: play_rule(times, machines, rule, dispatch) for rule in RULES[:-1]}
    runs = [play_rule(times, machines, "random", dispatch, seed) for seed in range(10)]
    return result | {"random": float(np.mean(runs))}


def rule_makespans(name, dispatch="active"):
    """Returns dict rule -> makespan on a named benchmark ("random": mean of 10 seeded runs);
    computed once."""
    return dict(_rule_makespans(name, dispatch))
