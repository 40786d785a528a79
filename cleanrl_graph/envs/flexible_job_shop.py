"""Flexible job-shop scheduling by dispatching: choose which operation starts next and on which
machine.

An instance has J jobs and M machines; a job is a chain of operations, and each of them runs on one
of its eligible machines, for a time that depends on the machine. A decision appends one operation
to the schedule of one machine, at the earliest time that its job and the machine are both free; the
makespan is to be small. Which pairs (operation, machine) are offered, of the next operations of the
jobs, is the schedule builder (`dispatch`):

- "nondelay": those that can start at the earliest time. No machine waits while it has work, so the
  optimum may be out
  of reach, but fewer choices are bad ones.
- "active": all that could start before the earliest completion of any of them. Some sequence of
  these choices is an
  optimal schedule: where an optimal one starts all that is left later, what could complete first can be moved there.

"nondelay" is the default; what policies reach with it is in
benchmark/results/flexible_job_shop_suites.

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

from .job_shop import BIG, FEATURE_LIMIT, DispatchEnv, size_range

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
    "slack: (lower bound - earliest completion - tail) / mean time; machine: lower bound - machine's bound",
    "slack_rel: the same / horizon",
    "job_work: least work of the job from this operation on / largest of a job",
    "ops_left: operations of the job from this one on / largest number of a job of the instance",
    "candidate: 1 for the next operation of its job",
    "legal: 1 if it has an edge that may be chosen now",
    "free: (time the machine is free - now) / mean time, at least 0",
    "free_rel: the same / horizon",
    "load: work of the machine, where each operation left is shared evenly by its machines, / horizon",
    "load_share: the same / largest load of a machine",
    "forced: work of the operations that no other machine can take / horizon",
    "machine_ops: operations left that the machine can take / all that are left",
    "queue: next operations of the jobs that the machine can take / J",
    "spare: (lower bound - bound of the mean load) / horizon, the same for all nodes",
    "left: operations that are left / all, the same for all nodes",
]
EDGE_FEATURES = [
    "job_successor, 1 for this kind of edge",
    "job_predecessor, 1 for this kind of edge",
    "to_machine: 1 from an operation to a machine that can take it",
    "from_machine: 1 from a machine to an operation; what follows is the same in both directions",
    "time: processing time / mean time of the instance",
    "excess: (processing time - least time of the operation) / mean time",
    "excess_rel: (processing time - least time of the operation) / processing time",
    "delay: (start - now) / mean time",
    "wait: (start - earliest start of the operation) / mean time",
    "idle: (start - max(now, time the machine is free)) / mean time",
    "later: (completion - earliest completion of the operation) / mean time",
    "behind: (completion - earliest completion on the machine of all next operations) / mean time",
    "slack: (lower bound - completion - tail) / mean time",
    "slack_rel: the same / horizon",
    "legal: 1 if this edge may be chosen",
]
RULES = ["SPT", "MWKR", "MOPNR", "FIFO", "EFT", "random"]
FILE = Path(__file__).with_name("flexible_job_shop_instances.npz")
SETS = {f"sd{size}": 100 for size in ("10x5", "20x5", "15x10", "20x10", "30x10", "40x10")} | {
    "mk": 10
}


@lru_cache(maxsize=1)
def read_data_file():
    """Returns dict name -> (times [N, M], operations of each job [J], best known makespan, best
    known lower bound)."""
    with np.load(FILE) as file:
        data = {key: file[key] for key in file.files}
    instances, job, entry = {}, 0, 0
    for i, name in enumerate(data["names"].tolist()):
        lengths = data["job_lengths"][job : job + int(data["num_jobs"][i])].astype(np.int64)
        shape = int(lengths.sum()), int(data["num_machines"][i])
        times = data["times"][entry : entry + shape[0] * shape[1]].astype(np.int64).reshape(shape)
        instances[name] = times, lengths, int(data["best_known"][i]), int(data["lower_bound"][i])
        job, entry = job + len(lengths), entry + times.size
    return instances


def load_instance(name):
    """Returns times [N, M] (0: not eligible), operations of each job [J], best known makespan and
    best known lower bound (0: not known) of a named benchmark. Raises ValueError for an unknown
    name."""
    if name not in read_data_file():
        raise ValueError(
            f"Unknown flexible job-shop instance {name!r}: use one of sd10x5_001 to sd10x5_100, likewise "
            "sd20x5, sd15x10, sd20x10, sd30x10 and sd40x10, mk01-10, la01_edata to la40_edata, _rdata "
            "and _vdata, or a dict with 'times' and 'operations'."
        )
    return read_data_file()[name]


def check_instance(times, operations):
    """Returns times [N, M] and the operations of each job [J] as int64; raises ValueError for what
    is no instance."""
    times, operations = np.asarray(times), np.asarray(operations)
    if (
        times.ndim != 2
        or operations.ndim != 1
        or times.size == 0
        or (operations < 1).any()
        or operations.sum() != len(times)
    ):
        raise ValueError(
            f"A flexible job-shop instance needs times [operations, machines] and the number of operations"
            f" of each job, at least 1, got {times.shape} and {operations.tolist()}."
        )
    if (times != np.floor(times)).any() or (times < 0).any():
        raise ValueError(
            "A flexible job-shop instance needs whole processing times, 0 where a machine cannot."
        )
    if (times == 0).all(axis=1).any():
        raise ValueError(
            f"Operation {(times == 0).all(axis=1).argmax()} has no machine that can take it."
        )
    return times.astype(np.int64), operations.astype(np.int64)


def suites():
    """Returns dict suite name -> list of FlexibleJobShopEnv keyword arguments, one per benchmark
    instance."""
    names = {
        f"{prefix}": [f"{prefix}_{i:03d}" for i in range(1, 101)]
        for prefix in SETS
        if prefix != "mk"
    }
    names["mk"] = [f"mk{i:02d}" for i in range(1, 11)]
    names |= {
        data: [f"la{i:02d}_{data}" for i in range(1, 41)] for data in ("edata", "rdata", "vdata")
    }
    return {suite: [{"instance": name} for name in members] for suite, members in names.items()}


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
    each job from `operations`, or from 0.8 M to 1.2 M. `flexibility` is the largest share of the
    machines that an operation can have, `deviation` that of the times around their mean; of a pair
    of numbers, each instance draws its own between them. `instance` fixes a benchmark name or
    {"times": [N, M], 0 where not eligible; "operations": of each job [J]}. With `skip_forced` the
    env dispatches by itself while only one pair is legal.
    """

    eval_suites = suites()
    fields = "times", "operations"
    load_instance, check_instance = staticmethod(load_instance), staticmethod(check_instance)

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
        num_jobs, num_machines = (
            (len(self.fixed[1]), self.fixed[0].shape[1])
            if self.fixed
            else (self.jobs[1], self.machines[1])
        )
        self.action_space = spaces.Discrete(
            2 * num_jobs * self.window * num_machines + 2 * num_jobs * self.window
        )
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(
                    spaces.Box(-FEATURE_LIMIT, FEATURE_LIMIT, (len(NODE_FEATURES),), np.float32),
                    spaces.Box(-FEATURE_LIMIT, FEATURE_LIMIT, (len(EDGE_FEATURES),), np.float32),
                ),
                "action_mask": spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
            }
        )

    def _random_instance(self):
        """Returns times [N, M] and the operations of each job [J] of a random instance."""
        rng, (num_jobs, num_machines) = self.np_random, self._random_sizes()
        deviation, flexibility = (
            rng.uniform(low, high) if low < high else low
            for low, high in (self.deviation, self.flexibility)
        )
        low, high = self.operations or (
            max(1, int(0.8 * num_machines)),
            max(1, int(1.2 * num_machines)),
        )
        operations = rng.integers(low, high + 1, num_jobs)
        shape = int(operations.sum()), num_machines
        options = rng.integers(1, max(1, round(flexibility * num_machines)) + 1, (shape[0], 1))
        eligible = rng.random(shape).argsort(axis=1) < options
        shortest, longest = self.durations
        mean = rng.integers(shortest, longest + 1, (shape[0], 1))
        low, high = (np.rint(mean * (1 + sign * deviation)).astype(int) for sign in (-1, 1))
        times = rng.integers(np.maximum(low, shortest), np.minimum(high, longest) + 1, shape)
        return times * eligible, operations

    def _set_schedule(self, times, operations):
        """The state of the schedule builder. K is the largest number of operations of a job; step k
        of job j is operation j * K + k of the flat arrays. Times are BIG on machines that are not
        eligible."""
        num_ops, num_machines = times.shape
        num_jobs, num_steps = len(operations), int(operations.max())
        self.times, self.operations_of = times, operations
        self.num_jobs, self.num_machines, self.num_steps = num_jobs, num_machines, num_steps
        self.num_ops = self.num_left = num_ops
        self.order = []  # (job, step, machine, start, finish) of what is dispatched

        real = np.arange(num_steps) < operations[:, None]
        self.op_times = np.full((num_jobs, num_steps, num_machines), BIG)
        self.op_times[real] = np.where(times > 0, times, BIG)
        eligible = self.op_times < BIG
        count = np.maximum(eligible.sum(axis=2), 1)
        self.least = np.where(real, self.op_times.min(axis=2), 0)  # least processing times [J, K]
        work = np.where(eligible, self.op_times, 0)
        self.mean_times = work.sum(axis=2) / count
        self.mean_time = float(self.mean_times[real].mean())
        self.work_to = self.least.cumsum(axis=1)
        self.tail = self.work_to[:, -1:] - self.work_to
        self.mean_left = self.mean_times[:, ::-1].cumsum(axis=1)[:, ::-1]  # of MWKR

        self.free = np.zeros(num_machines)  # time each machine is free
        self.ready = np.zeros(num_jobs)  # time each job's next operation is ready
        self.next = np.zeros(num_jobs, np.int64)  # next step of each job
        self.next_times = self.op_times[:, 0].copy()
        self.open = eligible.copy()  # [J, K, M], False once dispatched
        self.past = np.where(
            real, 0, -3 * BIG
        )  # [J, K], takes an operation out of the maxima of the bounds
        self.share = work / count[:, :, None]
        self.load = self.share.sum(axis=(0, 1))
        self.machine_ops = eligible.sum(axis=(0, 1)).astype(float)
        self.work_left = float(self.least.sum())
        single = (count == 1) & real
        self.single_machine = np.where(single, eligible.argmax(axis=2), -1)
        lists = [np.flatnonzero(self.single_machine.ravel() == m) for m in range(num_machines)]
        longest = max(1, *map(len, lists))
        self.forced_ops = np.array(
            [[*ops, *[real.size] * (longest - len(ops))] for ops in lists]
        )  # [M, longest]
        self.forced_work = np.array([self.least.ravel()[ops].sum() for ops in lists])
        self.forced_tail = np.append(self.tail, BIG)  # BIG once dispatched
        self.head = np.full(real.size + 1, BIG)  # the last one stands for no operation

        pair_op, self.pair_machine = eligible.reshape(real.size, num_machines).nonzero()
        self.pair_op, self.pair_job = pair_op, pair_op // num_steps
        pair_time, least = (
            self.op_times.reshape(-1, num_machines)[eligible.reshape(real.size, -1)],
            self.least.ravel(),
        )
        excess = pair_time - least[pair_op]
        self.pair_time = pair_time
        self.pair_fixed = np.stack(
            [pair_time / self.mean_time, excess / self.mean_time, excess / pair_time]
        )
        zero = np.zeros(real.size)
        self.op_fixed = np.stack(
            [
                zero + 1,
                zero,
                least / self.mean_time,
                (self.mean_times.ravel() - least) / self.mean_time,
                count.ravel() / num_machines,
                1 / count.ravel(),
            ]
        )

    def _dispatch(self, job, machine):
        """Appends the next operation of `job` to the schedule of `machine`."""
        step = self.next[job]
        start = max(self.ready[job], self.free[machine])
        finish = start + self.op_times[job, step, machine]
        self.order.append((int(job), int(step), int(machine), float(start), float(finish)))
        self.num_left -= 1
        self.free[machine] = self.ready[job] = finish
        self.load -= self.share[job, step]
        self.machine_ops -= self.open[job, step]
        self.open[job, step] = False
        self.past[job, step] = -3 * BIG
        self.work_left -= self.least[job, step]
        if self.single_machine[job, step] >= 0:
            self.forced_work[machine] -= self.least[job, step]
            self.forced_tail[job * self.num_steps + step] = BIG
        self.next[job] += 1
        self.next_times[job] = (
            self.op_times[job, step + 1] if step + 1 < self.operations_of[job] else BIG
        )

    def _find_legal(self):
        """Sets `start` and `finish` of the pairs (next operation of job, machine) [J, M], and which
        are `legal`."""
        self.start = np.maximum(self.ready[:, None], self.free)
        self.finish = self.start + self.next_times
        self.start[self.next_times == BIG] = BIG
        if self.dispatch == "active":
            self.legal = self.start < self.finish.min()
        else:
            self.legal = self.start <= self.start.min()
        self.legal &= self.start < BIG

    def _forced_choice(self):
        return (
            divmod(int(self.legal.argmax()), self.num_machines)
            if np.count_nonzero(self.legal) == 1
            else None
        )

    def _lower_bound(self):
        """Sets earliest completions [J, K] and starts `head` [J * K + 1], the bounds of the
        machines, and `bound`.

        Along a job, completion[k] = work_to[k] + max over i <= k of (completion of i by itself -
        work_to[i]).
        """
        live = (self.next < self.operations_of).nonzero()[0]
        self.live, steps = live, self.next[live]
        if not len(live):
            self.bound = float(self.free.max())
            return
        alone = np.where(self.open, self.op_times + self.free, BIG).min(axis=2)
        alone[live, steps] = self.finish[live].min(axis=1)
        alone += self.past
        alone -= self.work_to
        chain = np.maximum.accumulate(alone, axis=1, out=alone)
        chain += self.work_to
        self.completion = chain
        head = self.head[:-1].reshape(self.num_jobs, self.num_steps)
        head[:, 1:] = chain[:, :-1]
        head[live, steps] = self.ready[live]
        self.job_bound = chain[live, -1]

        self.machine_head = np.where(self.open, head[:, :, None], BIG).min(axis=(0, 1))
        able = (self.machine_ops > 0).nonzero()[0]
        self.able, self.machine_head = able, np.maximum(self.machine_head, self.free)
        self.mean_bound = float(self.machine_head[able].sum() + self.work_left) / len(able)
        tails = self.forced_tail.take(self.forced_ops)
        heads = np.where(tails < BIG, self.head.take(self.forced_ops), BIG).min(axis=1)
        forced = np.maximum(heads, self.free) + self.forced_work + tails.min(axis=1)
        self.machine_bound = np.where(heads < BIG, forced, self.machine_head)
        self.bound = float(
            max(
                self.job_bound.max(),
                self.machine_bound[able].max(),
                self.mean_bound,
                self.free.max(),
            )
        )

    def _choice(self, action):
        """Returns (job, machine) of an edge from an operation to a machine."""
        pair = self.pairs[action]
        return int(self.pair_job[pair]), int(self.pair_machine[pair])

    def _observe(self):
        """Updates the bound and returns the observation; keeps its pairs and mask for the next
        action."""
        self._lower_bound()
        if self.num_left == 0:
            self.pairs, self.mask = np.zeros(0, np.int64), np.ones(1, np.int8)
            graph = spaces.GraphInstance(
                np.zeros((1, len(NODE_FEATURES)), np.float32),
                np.zeros((1, len(EDGE_FEATURES)), np.float32),
                np.zeros((1, 2), np.int64),
            )
            return {"graph": graph, "action_mask": self.mask}
        steps = self.next[self.live, None] + np.arange(self.window)
        inside = steps < self.operations_of[self.live, None]
        ops = (self.live[:, None] * self.num_steps + steps)[inside]
        candidate = np.zeros(self.num_jobs * self.num_steps, bool)
        candidate[self.live * self.num_steps + self.next[self.live]] = True
        rank = np.full(len(candidate), -1)
        rank[ops] = np.arange(len(ops))
        pairs = self.pairs = (rank[self.pair_op] >= 0).nonzero()[0]
        pair_op, machine = self.pair_op[pairs], self.pair_machine[pairs]
        legal = self.legal[self.pair_job[pairs], machine] & candidate[pair_op]

        follows = (inside[:, 1:]).nonzero()
        second = rank[
            (self.live * self.num_steps + self.next[self.live])[follows[0]] + follows[1] + 1
        ]
        place = np.zeros(self.num_machines, np.int64)
        place[self.able] = np.arange(len(ops), len(ops) + len(self.able))
        ends = np.concatenate([rank[pair_op], place[machine], second - 1, second])
        other = np.concatenate([place[machine], rank[pair_op], second, second - 1])
        edges = np.stack([ends, other], 1)
        self.mask = np.zeros(len(edges), np.int8)
        self.mask[: len(pairs)] = legal
        now = float(self.start.min())
        nodes = self._node_features(ops, candidate[ops], now)
        features = self._edge_features(pairs, len(second), legal, now)
        return {"graph": spaces.GraphInstance(nodes, features, edges), "action_mask": self.mask}

    def _node_features(self, ops, candidate, now):
        """Returns float32 [nodes, features] of operations `ops` and of the machines that can still
        get work."""
        able, time, horizon = self.able, 1 / self.mean_time, 1 / max(self.bound - now, 1e-9)
        x = np.zeros((len(NODE_FEATURES), len(ops) + len(able)), np.float32)
        x[23] = (self.bound - self.mean_bound) * horizon
        x[24] = self.num_left / self.num_ops
        op, machine = x[:, : len(ops)], x[:, len(ops) :]

        job, step = np.divmod(ops, self.num_steps)
        start, completion, tail = (
            self.head[ops],
            self.completion.ravel()[ops],
            self.tail.ravel()[ops],
        )
        least = self.least.ravel()[ops]
        slack = self.bound - completion - tail
        work = least + tail
        op[:6] = self.op_fixed[:, ops]
        op[6], op[7] = (start - now) * time, (start - now) * horizon
        op[8] = (completion - start - least) * time
        op[9] = tail * horizon
        op[10], op[11] = slack * time, slack * horizon
        op[12] = work / work.max()
        op[13] = (self.operations_of[job] - step) / self.num_steps
        op[14] = candidate
        op[15] = candidate & self.legal.any(axis=1)[job]

        start, slack = self.machine_head[able] - now, self.bound - self.machine_bound[able]
        free, load = np.maximum(self.free[able] - now, 0), self.load[able]
        machine[1] = 1
        machine[6], machine[7] = start * time, start * horizon
        machine[10], machine[11] = slack * time, slack * horizon
        machine[15] = self.legal.any(axis=0)[able]
        machine[16], machine[17] = free * time, free * horizon
        machine[18], machine[19] = load * horizon, load / load.max()
        machine[20] = self.forced_work[able] * horizon
        machine[21] = self.machine_ops[able] / self.num_left
        machine[22] = (self.next_times[:, able] < BIG).sum(axis=0) / self.num_jobs
        return capped(x)

    def _edge_features(self, pairs, num_links, legal, now):
        """Returns float32 [edges, features]: the pairs, the pairs backwards, and the links along
        jobs, both ways."""
        num_pairs, time = len(pairs), 1 / self.mean_time
        op, machine = self.pair_op[pairs], self.pair_machine[pairs]
        ready, free = self.head[op], self.free[machine]
        start = np.maximum(ready, free)
        finish = start + self.pair_time[pairs]
        slack = self.bound - finish - self.tail.ravel()[op]
        x = np.zeros((len(EDGE_FEATURES), 2 * (num_pairs + num_links)), np.float32)
        pair = x[:, :num_pairs]
        pair[4:7] = self.pair_fixed[:, pairs]
        pair[7] = (start - now) * time
        pair[8] = (start - ready) * time
        pair[9] = (start - np.maximum(free, now)) * time
        pair[10] = (finish - self.completion.ravel()[op]) * time
        pair[11] = (finish - self.finish.min(axis=0)[machine]) * time
        pair[12], pair[13] = slack * time, slack / max(self.bound - now, 1e-9)
        pair[14] = legal
        x[4:, num_pairs : 2 * num_pairs] = pair[4:]
        x[0, 2 * num_pairs : 2 * num_pairs + num_links] = x[1, 2 * num_pairs + num_links :] = 1
        x[2, :num_pairs] = x[3, num_pairs : 2 * num_pairs] = 1
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
    elif rule in RULES:
        score = {
            "MWKR": -env.mean_left[job, env.next[job]],
            "MOPNR": env.next[job] - env.operations_of[job],
            "FIFO": env.ready[job],
        }[rule]
        best = np.lexsort((finish, job, score))[0]
    else:
        raise ValueError(f"Unknown dispatching rule {rule!r}: use one of {RULES}.")
    return int(job[best]), int(machine[best])


def dispatch_rule(env, name):
    """Returns the action that a rule of RULES takes in the env's present state ("random":
    env.np_random)."""
    env = env.unwrapped
    job, machine = rule_pair(env, name, env.np_random)
    edges = env.mask.nonzero()[0]
    pairs = env.pairs[edges]
    return int(
        edges[((env.pair_job[pairs] == job) & (env.pair_machine[pairs] == machine)).argmax()]
    )


# Policies for utils/demos.py: policy(env, obs, rng) -> action
def rule_policy(rule, env, obs, rng):
    return dispatch_rule(env, rule)


spt, mwkr, mopnr, fifo, eft = (partial(rule_policy, rule) for rule in RULES[:5])


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
    names = [kwargs["instance"] for kwargs in FlexibleJobShopEnv.eval_suites[suite]]
    rows = [
        rule_makespans(name, dispatch) | {"best_known": load_instance(name)[2]} for name in names
    ]
    return {column: np.array([row[column] for row in rows], float) for column in rows[0]}
