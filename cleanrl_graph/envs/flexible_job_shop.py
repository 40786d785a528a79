"""Flexible job-shop scheduling by dispatching: choose which operation starts next and on which
machine.

An instance has J jobs and M machines; a job is a chain of operations, and each of them runs on one
of its eligible machines, for a time that depends on the machine. A decision appends one operation
to the schedule of one machine, at the earliest time that its job and the machine are both free; the
makespan is to be small. Which pairs (operation, machine) are offered, of the next operations of the
jobs, is the schedule builder (`dispatch`):

- "nondelay": those that can start at the earliest time. No machine waits while it has work, so the
  optimum may be out of reach, but fewer choices are bad ones.
- "active": all that could start before the earliest completion of any of them. Some sequence of
  these choices is an optimal schedule: if none of them starts next in an optimal one, all that is
  left starts at this completion or later, so what completes first can be moved before it.
- "conflict": of the active ones those on one machine, the one that can complete an operation first,
  as in Giffler and Thompson (1960); `JobShopEnv` calls this "active". Some sequence of these
  choices is an optimal schedule, too: if none of them comes next on this machine in an optimal one,
  what completes first fits in before. With the other builders several sequences can make the same
  schedule, with this one never. An operation that is not chosen may later run on another machine.

"nondelay" is the default. Policies gain by delays where there are few jobs for each machine: on
15x10 instances those trained with "conflict" have a mean gap of 5.8% (three seeds), played with it
or with "active". It is at least 8.7% in all trainings with "nondelay", one of which, on 10 to 30
jobs, is ahead on 20x5 and from 20x10 on (benchmark/results/flexible_job_shop_suites).

Mean gap of the rules below to the best known makespan, %; a job's rule takes the machine that
completes it first:

| instances | dispatch | SPT | MWKR | MOPNR | FIFO | EFT | random |
| --- | --- | --- | --- | --- | --- | --- | --- |
| sd10x5 | nondelay | 35.0 | 16.9 | 19.4 | 22.5 | 35.0 | 35.9 |
| sd10x5 | active | 60.8 | 17.2 | 19.3 | 21.8 | 48.2 | 48.9 |
| mk | nondelay | 49.7 | 25.3 | 24.6 | 26.5 | 49.7 | 55.5 |
| mk | active | 78.6 | 22.2 | 23.1 | 19.3 | 63.7 | 60.7 |
| edata | nondelay | 26.4 | 17.3 | 18.0 | 20.7 | 26.4 | 27.1 |
| edata | active | 51.8 | 21.9 | 21.0 | 20.7 | 38.9 | 33.9 |
| rdata | nondelay | 29.2 | 13.2 | 14.9 | 16.6 | 29.2 | 25.8 |
| rdata | active | 67.6 | 14.1 | 16.2 | 16.6 | 47.8 | 38.8 |
| vdata | nondelay | 17.9 | 3.8 | 6.1 | 6.7 | 17.9 | 16.2 |
| vdata | active | 50.6 | 3.6 | 7.2 | 6.7 | 37.5 | 21.2 |

Random instances are those of Song et al. (IEEE TII 19, 2023), called SD1: on M machines a job has
0.8 M to 1.2 M operations, an operation has 1 to M eligible machines, drawn uniformly, a mean time
in 1..20 and on each machine a time within 20% of it. FILE has their test sets
(github.com/songwenas12/fjsp-drl, Apache-2.0) with the makespans that OR-Tools found in up to 1,800
s (github.com/wrqccc/FJSP-DRL), and the public instances of Brandimarte (1993) and of Hurink,
Jurisch and Thole (1994) with best known values and bounds (github.com/ScheduleOpt/benchmarks, CC
BY-SA 4.0).
"""

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from gymnasium import spaces

from .job_shop import BIG, FEATURE_LIMIT, DispatchEnv, instance_suites, numbered, size_range
from .toy import mask_space

NODE_FEATURES = [
    "is_op: 1 for an operation",
    "is_machine: 1 for a machine",
    "time: least processing time / mean time of the instance",
    "spread: (mean processing time of its machines - least) / mean time",
    "options: eligible machines / M",
    "single: 1 / eligible machines",
    "start: (earliest start - now) / mean time; machine: of an operation on it",
    "start_rel: (earliest start - now) / horizon, where horizon = lower bound - now",
    "wait: (earliest completion - earliest start - least time) / mean time",
    "tail: least work of the job after this operation / horizon",
    "slack: (lower bound - earliest finish - tail) / mean time; machine: lower bound - its bound",
    "slack_rel: the same / horizon",
    "job_work: least work of the job from this operation on / largest of a job",
    "ops_left: operations of the job from this one on / largest number of a job of the instance",
    "candidate: 1 for the next operation of its job",
    "legal: 1 if it has an edge that may be chosen now",
    "free: (time the machine is free - now) / mean time, at least 0",
    "free_rel: the same / horizon",
    "load: work of the machine, if each operation is shared evenly by its machines, / horizon",
    "load_share: the same / largest load of a machine",
    "forced: work of the operations that no other machine can take / horizon",
    "machine_ops: operations left that the machine can take / all that are left",
    "queue: next operations of the jobs that the machine can take / J",
    "spare: (lower bound - bound of the mean load) / horizon, the same for all nodes",
    "left: operations that are left / all, the same for all nodes",
]
EDGE_FEATURES = [
    "job_successor: 1 from an operation to the next one of its job",
    "job_predecessor: 1 from an operation to the one before it in its job",
    "to_machine: 1 from an operation to a machine that can take it",
    "from_machine: 1 from a machine to an operation; what follows is the same in both directions",
    "time: processing time / mean time of the instance",
    "excess: (processing time - least time of the operation) / mean time",
    "excess_rel: (processing time - least time of the operation) / processing time",
    "delay: (start - now) / mean time",
    "wait: (start - earliest start of the operation) / mean time",
    "idle: (start - max(now, time the machine is free)) / mean time",
    "later: (completion - earliest completion of the operation) / mean time",
    "behind: (completion - earliest completion of a next operation on the machine) / mean time, "
    "-FEATURE_LIMIT where the machine can take none of them",
    "slack: (lower bound - completion - tail) / mean time",
    "slack_rel: the same / horizon",
    "legal: 1 if this edge may be chosen",
]
RULES = ["SPT", "MWKR", "MOPNR", "FIFO", "EFT", "random"]
FILE = Path(__file__).with_name("flexible_job_shop_instances.npz")
RANDOM_SETS = ["sd10x5", "sd20x5", "sd15x10", "sd20x10", "sd30x10", "sd40x10"]


@lru_cache(maxsize=1)
def read_data_file():
    """Returns dict name -> (times [N, M], operations of each job [J], best known makespan, best
    known lower bound)."""
    with np.load(FILE) as file:
        data = {key: file[key] for key in file.files}
    instances = {}
    job = 0  # where the instance begins in the numbers of operations of all jobs
    entry = 0  # and in all times
    for i, name in enumerate(data["names"].tolist()):
        num_jobs = int(data["num_jobs"][i])
        num_machines = int(data["num_machines"][i])
        operations = data["job_lengths"][job : job + num_jobs].astype(np.int64)
        num_times = int(operations.sum()) * num_machines
        times = data["times"][entry : entry + num_times].astype(np.int64)
        times = times.reshape(-1, num_machines)
        best_known = int(data["best_known"][i])
        lower_bound = int(data["lower_bound"][i])
        instances[name] = (times, operations, best_known, lower_bound)
        job += num_jobs
        entry += num_times
    return instances


def load_instance(name):
    """Returns times [N, M] (0: not eligible), operations of each job [J], best known makespan and
    best known lower bound (0: not known) of a named benchmark. Raises ValueError for an unknown
    name."""
    if name not in read_data_file():
        raise ValueError(
            f"Unknown flexible job-shop instance {name!r}: use one of sd10x5_001 to sd10x5_100, "
            "likewise sd20x5, sd15x10, sd20x10, sd30x10 and sd40x10, mk01-10, la01_edata to "
            "la40_edata, _rdata and _vdata, or a dict with 'times' and 'operations'."
        )
    return read_data_file()[name]


def check_instance(times, operations):
    """Returns times [N, M] and the operations of each job [J] as int64; raises ValueError for what
    is no instance."""
    times = np.asarray(times)
    operations = np.asarray(operations)
    has_shape = times.ndim == 2 and operations.ndim == 1 and times.size > 0
    if not has_shape or (operations < 1).any() or operations.sum() != len(times):
        raise ValueError(
            "A flexible job-shop instance needs times [operations, machines] and the number of "
            f"operations of each job, at least 1, got {times.shape} and {operations.tolist()}."
        )
    if (times != np.floor(times)).any() or (times < 0).any():
        raise ValueError(
            "A flexible job-shop instance needs whole processing times, 0 where a machine cannot."
        )
    stuck = (times == 0).all(axis=1)
    if stuck.any():
        raise ValueError(f"Operation {stuck.argmax()} has no machine that can take it.")
    return times.astype(np.int64), operations.astype(np.int64)


def suites():
    """Returns dict suite name -> list of FlexibleJobShopEnv keyword arguments, one per benchmark
    instance."""
    families = {}
    for name in RANDOM_SETS:
        families[name] = numbered(name + "_{:03d}", 1, 100)
    families["mk"] = numbered("mk{:02d}", 1, 10)
    for data in ("edata", "rdata", "vdata"):
        families[data] = numbered("la{:02d}_" + data, 1, 40)
    return instance_suites(families)


class FlexibleJobShopEnv(DispatchEnv):
    """Flexible job-shop scheduling as a graph of operations and machines, whose edges are the
    actions.

    Nodes: the next `window` operations of each job, job by job, then the machines that can still
    get work; columns in NODE_FEATURES. Edges: from each operation to the machines that can take it,
    the same back, and between the neighbours of a job, both ways; columns in EDGE_FEATURES.
    Features are capped at FEATURE_LIMIT on both sides. A terminal observation is one zero node with
    an edge to itself, so that no graph is ever empty.

    Action: index of an edge whose `action_mask` is 1: it goes from the next operation of a job to a
    machine. Reward: minus the growth of a lower bound on the makespan, which ends as the makespan
    itself, so the return is (initial bound - makespan) / unit. The bound is the largest of those of
    the jobs (least times), of the machines (head, work and tail of what only this machine can take)
    and of the mean load (least work, shared evenly by all machines). With `reward_unit="bound"` the
    unit is the initial bound, with "time" it is 1.

    Random instances draw J and M log-uniformly from `jobs` and `machines`, and the operations of
    each job from `operations`, or from 0.8 M to 1.2 M. An operation is eligible on at most the
    share `flexibility` of the machines. Its mean time is a uniform integer in `durations`; its time
    on each machine is within the share `deviation` of that mean, and in `durations`. If
    `flexibility` or `deviation` is a pair, each instance draws a number between the two. `instance`
    fixes a benchmark name or {"times": [N, M], 0 where not eligible; "operations": of each job
    [J]}. With `skip_forced` the env dispatches by itself while only one pair is legal.
    """

    eval_suites = suites()
    builders = "nondelay", "active", "conflict"
    fields = "times", "operations"
    load_instance = staticmethod(load_instance)
    check_instance = staticmethod(check_instance)

    def __init__(
        self,
        jobs=(5, 20),
        machines=(5, 10),
        operations=None,
        durations=(1, 20),
        deviation=0.2,
        flexibility=1.0,
        instance=None,
        dispatch="nondelay",
        window=1,
        skip_forced=True,
        reward_unit="bound",
        render_mode=None,
    ):
        super().__init__(
            jobs, machines, durations, instance, dispatch, skip_forced, reward_unit, render_mode
        )
        if window != int(window) or window < 1:
            raise ValueError(f"window must be a positive int, got {window}.")
        self.window = int(window)
        self.operations = None if operations is None else size_range("operations", operations)
        self.deviation = share_range("deviation", deviation)
        self.flexibility = share_range("flexibility", flexibility)
        num_jobs = self.jobs[1]
        num_machines = self.machines[1]
        if self.fixed:
            times, operations_of = self.fixed
            num_jobs = len(operations_of)
            num_machines = times.shape[1]
        num_ops = num_jobs * self.window
        self.action_space = spaces.Discrete(2 * num_ops * num_machines + 2 * num_ops)
        graph = spaces.Graph(
            spaces.Box(-FEATURE_LIMIT, FEATURE_LIMIT, (len(NODE_FEATURES),), np.float32),
            spaces.Box(-FEATURE_LIMIT, FEATURE_LIMIT, (len(EDGE_FEATURES),), np.float32),
        )
        self.observation_space = spaces.Dict({"graph": graph, "action_mask": mask_space()})

    def _random_instance(self):
        """Returns times [N, M] and the operations of each job [J] of a random instance."""
        rng = self.np_random
        num_jobs, num_machines = self._random_sizes()
        deviation = random_share(rng, self.deviation)
        flexibility = random_share(rng, self.flexibility)
        fewest = max(1, int(0.8 * num_machines))
        most = max(1, int(1.2 * num_machines))
        if self.operations:
            fewest, most = self.operations
        operations = rng.integers(fewest, most + 1, num_jobs)
        num_ops = int(operations.sum())
        shape = (num_ops, num_machines)
        most_options = max(1, round(flexibility * num_machines))
        num_options = rng.integers(1, most_options + 1, (num_ops, 1))
        eligible = rng.random(shape).argsort(axis=1) < num_options
        shortest, longest = self.durations
        mean = rng.integers(shortest, longest + 1, (num_ops, 1))
        low = np.rint(mean * (1 - deviation)).astype(int)
        high = np.rint(mean * (1 + deviation)).astype(int)
        times = rng.integers(np.maximum(low, shortest), np.minimum(high, longest) + 1, shape)
        return times * eligible, operations

    def _set_schedule(self, times, operations):
        """The state of the schedule builder. K is the largest number of operations of a job; step k
        of job j is operation j * K + k of the flat arrays."""
        self.times = times
        self.operations_of = operations
        self.num_ops, self.num_machines = times.shape
        self.num_jobs = len(operations)
        self.max_operations = int(operations.max())
        self.num_left = self.num_ops
        self.order = []  # (job, step, machine, start, finish) of what is dispatched
        self.free = np.zeros(self.num_machines)  # time each machine is free
        self.ready = np.zeros(self.num_jobs)  # time each job's next operation is ready
        self.next = np.zeros(self.num_jobs, np.int64)  # next step of each job
        self._set_times()
        self._set_loads()
        self._set_forced()
        self._set_pairs()

    def _set_times(self):
        """Processing times [J, K, M], BIG on machines that are not eligible, and work along jobs
        [J, K]."""
        self.real = np.arange(self.max_operations) < self.operations_of[:, None]
        self.op_times = np.full((*self.real.shape, self.num_machines), BIG)
        self.op_times[self.real] = np.where(self.times > 0, self.times, BIG)
        self.next_times = self.op_times[:, 0].copy()
        self.eligible = self.op_times < BIG
        self.num_options = np.maximum(self.eligible.sum(axis=2), 1)
        work = np.where(self.eligible, self.op_times, 0)
        self.share = work / self.num_options[:, :, None]
        self.mean_times = work.sum(axis=2) / self.num_options
        self.mean_time = float(self.mean_times[self.real].mean())
        self.least = np.where(self.real, self.op_times.min(axis=2), 0)  # least processing times
        self.work_to = self.least.cumsum(axis=1)
        self.tail = self.work_to[:, -1:] - self.work_to
        self.mean_left = self.mean_times[:, ::-1].cumsum(axis=1)[:, ::-1]  # of MWKR

    def _set_loads(self):
        """What is left to do, of all machines and of each, and the heads."""
        self.open = self.eligible.copy()  # [J, K, M], False once dispatched
        # Takes an operation out of the maxima of the bounds once dispatched [J, K].
        self.past = np.where(self.real, 0, -3 * BIG)
        self.load = self.share.sum(axis=(0, 1))
        self.machine_ops = self.eligible.sum(axis=(0, 1)).astype(float)
        self.work_left = float(self.least.sum())
        self.head = np.full(self.real.size + 1, BIG)  # the last one stands for no operation

    def _set_forced(self):
        """The operations that only one machine can take, and their work on each machine."""
        is_single = (self.num_options == 1) & self.real
        self.single_machine = np.where(is_single, self.eligible.argmax(axis=2), -1)
        single_machine = self.single_machine.ravel()
        lists = [np.flatnonzero(single_machine == m) for m in range(self.num_machines)]
        longest = max(1, max(map(len, lists)))
        self.forced_ops = np.full((self.num_machines, longest), self.real.size)
        self.forced_work = np.zeros(self.num_machines)
        for machine, ops in enumerate(lists):
            self.forced_ops[machine, : len(ops)] = ops
            self.forced_work[machine] = self.least.ravel()[ops].sum()
        self.forced_tail = np.append(self.tail, BIG)  # BIG once dispatched

    def _set_pairs(self):
        """The eligible pairs (operation, machine), and the features that do not change."""
        eligible = self.eligible.reshape(-1, self.num_machines)
        self.pair_op, self.pair_machine = eligible.nonzero()
        self.pair_job = self.pair_op // self.max_operations
        self.pair_time = self.op_times.reshape(-1, self.num_machines)[eligible]
        least = self.least.ravel()
        excess = self.pair_time - least[self.pair_op]
        self.pair_fixed = np.stack(
            [
                self.pair_time / self.mean_time,  # time
                excess / self.mean_time,  # excess
                excess / self.pair_time,  # excess_rel
            ]
        )
        num_options = self.num_options.ravel()
        self.op_fixed = np.stack(
            [
                np.ones(len(least)),  # is_op
                np.zeros(len(least)),  # is_machine
                least / self.mean_time,  # time
                (self.mean_times.ravel() - least) / self.mean_time,  # spread
                num_options / self.num_machines,  # options
                1 / num_options,  # single
            ]
        )

    def _dispatch(self, job, machine):
        """Appends the next operation of `job` to the schedule of `machine`."""
        step = self.next[job]
        start = max(self.ready[job], self.free[machine])
        finish = start + self.op_times[job, step, machine]
        self.order.append((int(job), int(step), int(machine), float(start), float(finish)))
        self.num_left -= 1
        self.free[machine] = finish
        self.ready[job] = finish
        self.load -= self.share[job, step]
        self.machine_ops -= self.open[job, step]
        self.open[job, step] = False
        self.past[job, step] = -3 * BIG
        self.work_left -= self.least[job, step]
        if self.single_machine[job, step] >= 0:
            self.forced_work[machine] -= self.least[job, step]
            self.forced_tail[job * self.max_operations + step] = BIG
        self.next[job] = step + 1
        if step + 1 < self.operations_of[job]:
            self.next_times[job] = self.op_times[job, step + 1]
        else:
            self.next_times[job] = BIG

    def _find_legal(self):
        """Sets `start` and `finish` of the pairs (next operation of job, machine) [J, M], and which
        are `legal`."""
        self.start = np.maximum(self.ready[:, None], self.free)
        self.finish = self.start + self.next_times
        self.start[self.next_times == BIG] = BIG
        if self.dispatch == "active":
            self.legal = self.start < self.finish.min()
        elif self.dispatch == "conflict":
            job, machine = divmod(int(self.finish.argmin()), self.num_machines)
            self.legal = np.zeros(self.start.shape, bool)
            self.legal[:, machine] = self.start[:, machine] < self.finish[job, machine]
        else:
            self.legal = self.start <= self.start.min()
        self.legal &= self.start < BIG

    def _forced_choice(self):
        if np.count_nonzero(self.legal) > 1:
            return None
        return divmod(int(self.legal.argmax()), self.num_machines)

    def _lower_bound(self):
        """Sets earliest completions [J, K] and starts `head` [J * K + 1], the bounds of the
        machines, and `bound`."""
        self.live = (self.next < self.operations_of).nonzero()[0]
        if len(self.live):
            self._bound_jobs()
            self._bound_machines()
            machine_bound = self.machine_bound[self.able].max()
            job_bound = self.job_bound.max()
            self.bound = float(max(job_bound, machine_bound, self.mean_bound, self.free.max()))
        else:
            self.bound = float(self.free.max())

    def _bound_jobs(self):
        """Sets earliest completions and starts.

        Along a job, completion[k] = work_to[k] + max over i <= k of (completion of i by itself -
        work_to[i]).
        """
        live = self.live
        steps = self.next[live]
        alone = np.where(self.open, self.op_times + self.free, BIG).min(axis=2)
        alone[live, steps] = self.finish[live].min(axis=1)
        alone += self.past
        alone -= self.work_to
        chain = np.maximum.accumulate(alone, axis=1, out=alone)
        chain += self.work_to
        self.completion = chain
        head = self._job_heads()
        head[:, 1:] = chain[:, :-1]
        head[live, steps] = self.ready[live]
        self.job_bound = chain[live, -1]

    def _job_heads(self):
        """Returns the heads [J, K]. Never kept: pickle makes a copy of a view."""
        return self.head[:-1].reshape(self.num_jobs, self.max_operations)

    def _bound_machines(self):
        """Sets the earliest start on each machine, its bound, and that of the mean load."""
        head = np.where(self.open, self._job_heads()[:, :, None], BIG).min(axis=(0, 1))
        self.machine_head = np.maximum(head, self.free)
        self.able = (self.machine_ops > 0).nonzero()[0]
        work = float(self.machine_head[self.able].sum() + self.work_left)
        self.mean_bound = work / len(self.able)
        tails = self.forced_tail.take(self.forced_ops)
        heads = np.where(tails < BIG, self.head.take(self.forced_ops), BIG).min(axis=1)
        forced = np.maximum(heads, self.free) + self.forced_work + tails.min(axis=1)
        self.machine_bound = np.where(heads < BIG, forced, self.machine_head)

    def _choice(self, action):
        """Returns (job, machine) of an edge from an operation to a machine."""
        pair = self.pairs[action]
        return int(self.pair_job[pair]), int(self.pair_machine[pair])

    def _observe(self):
        """Updates the bound and returns the observation; keeps its pairs and mask for the next
        action."""
        self._lower_bound()
        if self.num_left == 0:
            return self._terminal()
        now = float(self.start.min())
        next_ops = self.live * self.max_operations + self.next[self.live]
        job_ends = self.live * self.max_operations + self.operations_of[self.live]
        window = next_ops[:, None] + np.arange(self.window)  # [jobs, window]
        inside = window < job_ends[:, None]
        ops = window[inside]
        followers = window[:, 1:][inside[:, 1:]]  # all but the next one of each job
        rank = np.full(self.real.size, -1)  # of an operation among the nodes, -1: none of them
        rank[ops] = np.arange(len(ops))
        is_next = np.zeros(self.real.size, bool)
        is_next[next_ops] = True

        pairs = (rank[self.pair_op] >= 0).nonzero()[0]
        self.pairs = pairs
        legal = self.legal[self.pair_job[pairs], self.pair_machine[pairs]]
        legal &= is_next[self.pair_op[pairs]]
        edges = self._edges(rank, len(ops), followers)
        self.mask = np.zeros(len(edges), np.int8)
        self.mask[: len(pairs)] = legal
        nodes = self._node_features(ops, is_next[ops], now)
        features = self._edge_features(len(followers), legal, now)
        return {"graph": spaces.GraphInstance(nodes, features, edges), "action_mask": self.mask}

    def _terminal(self):
        """Returns the observation after the last operation: one zero node with an edge to
        itself."""
        self.pairs = np.zeros(0, np.int64)
        self.mask = np.ones(1, np.int8)
        graph = spaces.GraphInstance(
            np.zeros((1, len(NODE_FEATURES)), np.float32),
            np.zeros((1, len(EDGE_FEATURES)), np.float32),
            np.zeros((1, 2), np.int64),
        )
        return {"graph": graph, "action_mask": self.mask}

    def _edges(self, rank, num_ops, followers):
        """Returns int64 [edges, 2]: the pairs, the pairs backwards, and the links along jobs, both
        ways."""
        place = np.zeros(self.num_machines, np.int64)
        place[self.able] = np.arange(num_ops, num_ops + len(self.able))
        op = rank[self.pair_op[self.pairs]]
        machine = place[self.pair_machine[self.pairs]]
        second = rank[followers]
        first = second - 1
        ends = np.concatenate([op, machine, first, second])
        other = np.concatenate([machine, op, second, first])
        return np.stack([ends, other], 1)

    def _node_features(self, ops, is_next, now):
        """Returns float32 [nodes, features] of operations `ops` and of the machines that can still
        get work."""
        per_time = 1 / self.mean_time
        per_horizon = 1 / max(self.bound - now, 1e-9)
        num_ops = len(ops)
        x = np.zeros((len(NODE_FEATURES), num_ops + len(self.able)), np.float32)
        x[23] = (self.bound - self.mean_bound) * per_horizon  # spare
        x[24] = self.num_left / self.num_ops  # left
        self._write_operations(x[:, :num_ops], ops, is_next, now, per_time, per_horizon)
        self._write_machines(x[:, num_ops:], now, per_time, per_horizon)
        return capped(x)

    def _write_operations(self, x, ops, is_next, now, per_time, per_horizon):
        """Writes the features of operations `ops` into x [features, operations]."""
        job, step = np.divmod(ops, self.max_operations)
        start = self.head[ops]
        completion = self.completion.ravel()[ops]
        tail = self.tail.ravel()[ops]
        least = self.least.ravel()[ops]
        until_start = start - now
        slack = self.bound - completion - tail
        work = least + tail
        x[:6] = self.op_fixed[:, ops]  # is_op, is_machine, time, spread, options, single
        x[6] = until_start * per_time  # start
        x[7] = until_start * per_horizon  # start_rel
        x[8] = (completion - start - least) * per_time  # wait
        x[9] = tail * per_horizon  # tail
        x[10] = slack * per_time  # slack
        x[11] = slack * per_horizon  # slack_rel
        x[12] = work / work.max()  # job_work
        x[13] = (self.operations_of[job] - step) / self.max_operations  # ops_left
        x[14] = is_next  # candidate
        x[15] = is_next & self.legal.any(axis=1)[job]  # legal

    def _write_machines(self, x, now, per_time, per_horizon):
        """Writes the features of the machines that can still get work into x [features,
        machines]."""
        able = self.able
        until_start = self.machine_head[able] - now
        slack = self.bound - self.machine_bound[able]
        until_free = np.maximum(self.free[able] - now, 0)
        load = self.load[able]
        x[1] = 1  # is_machine
        x[6] = until_start * per_time  # start
        x[7] = until_start * per_horizon  # start_rel
        x[10] = slack * per_time  # slack
        x[11] = slack * per_horizon  # slack_rel
        x[15] = self.legal.any(axis=0)[able]  # legal
        x[16] = until_free * per_time  # free
        x[17] = until_free * per_horizon  # free_rel
        x[18] = load * per_horizon  # load
        x[19] = load / load.max()  # load_share
        x[20] = self.forced_work[able] * per_horizon  # forced
        x[21] = self.machine_ops[able] / self.num_left  # machine_ops
        x[22] = (self.next_times[:, able] < BIG).sum(axis=0) / self.num_jobs  # queue

    def _edge_features(self, num_links, legal, now):
        """Returns float32 [edges, features] of the edges in the order of `_edges`."""
        pairs = self.pairs
        num_pairs = len(pairs)
        per_time = 1 / self.mean_time
        op = self.pair_op[pairs]
        machine = self.pair_machine[pairs]
        ready = self.head[op]
        free = self.free[machine]
        start = np.maximum(ready, free)
        finish = start + self.pair_time[pairs]
        slack = self.bound - finish - self.tail.ravel()[op]
        x = np.zeros((len(EDGE_FEATURES), 2 * (num_pairs + num_links)), np.float32)
        pair = x[:, :num_pairs]
        back = x[:, num_pairs : 2 * num_pairs]
        links = x[:, 2 * num_pairs :]
        links[0, :num_links] = 1  # job_successor
        links[1, num_links:] = 1  # job_predecessor
        pair[2] = 1  # to_machine
        back[3] = 1  # from_machine
        pair[4:7] = self.pair_fixed[:, pairs]  # time, excess, excess_rel
        pair[7] = (start - now) * per_time  # delay
        pair[8] = (start - ready) * per_time  # wait
        pair[9] = (start - np.maximum(free, now)) * per_time  # idle
        pair[10] = (finish - self.completion.ravel()[op]) * per_time  # later
        pair[11] = (finish - self.finish.min(axis=0)[machine]) * per_time  # behind
        pair[12] = slack * per_time  # slack
        pair[13] = slack / max(self.bound - now, 1e-9)  # slack_rel
        pair[14] = legal  # legal
        back[4:] = pair[4:]
        return capped(x)

    def _rules(self, dispatch):
        return rule_makespans(self.name, dispatch)

    def _bars(self):
        return [(machine, job, start, finish) for job, _, machine, start, finish in self.order]


def capped(features):
    """Returns the features [F, rows] as rows [rows, F], capped at FEATURE_LIMIT on both sides."""
    return np.ascontiguousarray(np.clip(features, -FEATURE_LIMIT, FEATURE_LIMIT, out=features).T)


def share_range(name, value):
    """Returns (low, high) of a number or a pair; raises ValueError when it is not 0 <= low <= high
    <= 1."""
    low, high = (value, value) if np.isscalar(value) else value
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f"{name} must be a number from 0 to 1 or a pair 0 <= low <= high <= 1, got {value}."
        )
    return float(low), float(high)


def random_share(rng, limits):
    """Returns a random number between two limits; nothing is drawn where they are equal."""
    low, high = limits
    return rng.uniform(low, high) if low < high else low


def rule_pair(env, rule, rng):
    """Returns the legal (job, machine) that a rule of RULES chooses: SPT the shortest time, EFT the
    earliest completion; the others a job, MWKR the most work left (mean times), MOPNR the most
    operations left, FIFO the one that is ready first, and its machine that completes it first."""
    job, machine = env.legal.nonzero()
    finish = env.finish[job, machine]
    if rule == "random":
        best = rng.integers(len(job))
    elif rule == "SPT":
        best = np.lexsort((finish, env.next_times[job, machine]))[0]
    elif rule == "EFT":
        best = finish.argmin()
    else:
        best = np.lexsort((finish, job, job_score(env, rule, job)))[0]
    return int(job[best]), int(machine[best])


def job_score(env, rule, job):
    """Returns a number for each of the jobs, of which a rule takes the smallest."""
    if rule == "MWKR":
        return -env.mean_left[job, env.next[job]]
    if rule == "MOPNR":
        return env.next[job] - env.operations_of[job]
    if rule == "FIFO":
        return env.ready[job]
    raise ValueError(f"Unknown dispatching rule {rule!r}: use one of {RULES}.")


def dispatch_rule(env, name):
    """Returns the action that a rule of RULES takes in the env's present state ("random":
    env.np_random)."""
    env = env.unwrapped
    job, machine = rule_pair(env, name, env.np_random)
    edges = env.mask.nonzero()[0]
    pairs = env.pairs[edges]
    is_chosen = (env.pair_job[pairs] == job) & (env.pair_machine[pairs] == machine)
    return int(edges[is_chosen.argmax()])


# Policies for services/demos.py: policy(env, obs, rng) -> action
def rule_policy(rule, env, obs, rng):
    return dispatch_rule(env, rule)


spt = partial(rule_policy, "SPT")
mwkr = partial(rule_policy, "MWKR")
mopnr = partial(rule_policy, "MOPNR")
fifo = partial(rule_policy, "FIFO")
eft = partial(rule_policy, "EFT")


def play_rule(times, operations, rule, dispatch="nondelay", seed=0):
    """Returns the makespan of a rule of RULES on one instance (times [N, M], operations of each job
    [J])."""
    env = FlexibleJobShopEnv(instance={"times": times, "operations": operations}, dispatch=dispatch)
    env._set_schedule(*env.fixed)
    rng = np.random.default_rng(seed)
    while env.num_left:
        env._find_legal()
        env._dispatch(*rule_pair(env, rule, rng))
    return float(env.free.max())


@lru_cache(maxsize=None)
def _rule_makespans(name, dispatch):
    return {rule: play_rule(*load_instance(name)[:2], rule, dispatch) for rule in RULES}


def rule_makespans(name, dispatch="nondelay"):
    """Returns dict rule -> makespan on a named benchmark ("random": one seeded run); computed
    once."""
    return dict(_rule_makespans(name, dispatch))


def suite_makespans(suite, dispatch="nondelay"):
    """Returns dict rule -> makespans of the instances of a suite, float64 [instances], and
    "best_known" likewise."""
    costs = {}
    for kwargs in FlexibleJobShopEnv.eval_suites[suite]:
        name = kwargs["instance"]
        row = rule_makespans(name, dispatch) | {"best_known": load_instance(name)[2]}
        for column, value in row.items():
            costs.setdefault(column, []).append(value)
    return {column: np.array(values, float) for column, values in costs.items()}
