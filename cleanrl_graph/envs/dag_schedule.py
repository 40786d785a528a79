"""Scheduling of data-processing jobs on a cluster: which stage of which job gets executors, and how
many.

The problem is that of Decima (Mao et al. 2019, "Learning scheduling algorithms for data processing
clusters", SIGCOMM, arXiv:1810.01963): jobs are DAGs of stages, a stage is a number of tasks of
about the same duration that need no other stage than its parents, and an executor runs one task at
a time. The simulator follows the public description of Spark there and in `spark-sched-sim`; the
jobs are synthetic, see `random_job`.

Mean job completion times of the rules on the 100 sets of jobs of the suites "batch" and
"continuous", from benchmark/dag_schedule.py: see benchmark/results/dag_schedule/table.md.
"""

import bisect
import heapq
from functools import lru_cache, partial

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .job_shop import check_option, job_colours, terminal_graph
from .toy import mask_space, starts_of

NODE_FEATURES = [
    "is_stage: 1 for a stage",
    "is_job: 1 for the hub of a job; the next four columns are sums over its stages, the three "
    "after them the largest value of a stage",
    "tasks: log(1 + tasks not started) / 5",
    "work: log(1 + seconds of tasks not started) / 8",
    "running: executors that work on the stage / executors of the cluster",
    "coming: executors promised, on their way or waiting for a parent / executors of the cluster",
    "chain: log(1 + work of the longest chain of stages from here on, in seconds) / 8",
    "tail: log(1 + mean task durations along the slowest chain from here on, in seconds) / 5",
    "duration: log(1 + mean task duration in seconds) / 3",
    "schedulable: 1 if the stage may be chosen now",
    "runnable: 1 if all parents are complete",
    "room: executors that it can use beside those it has / those that can be given now, at most 1",
    "job_work: log(1 + work left in the job) / 8",
    "job_share: work left in the job / in all jobs of the system",
    "job_rank: share of the jobs in the system with less work left",
    "job_executors: those on stages with tasks to start or promised to it / those of the cluster",
    "job_free: idle or on the last task of a stage of the job / executors of the cluster",
    "job_idle: the idle ones of these / executors of the cluster",
    "job_age: log(1 + seconds in the system) / 8",
    "job_stages: stages that are not complete / 10",
    "job_scaling: c of the job, how much longer its tasks take when all executors work for it",
    "free: executors that can be given now / executors of the cluster, the same in all rows",
    "idle: of these the idle ones / executors of the cluster, the same in all rows",
    "jobs: log(number of jobs in the system) / 4, the same in all rows",
]
EDGE_KINDS = ["parent to child", "child to parent", "stage to job", "job to stage"]
RULES = ["FIFO", "fair", "weighted fair", "SJF", "SJF-CP", "limited SJF", "critical path", "random"]
SIZES = (2, 5, 10, 20, 50, 80, 100)  # GB of input data, those of the TPC-H runs of the paper
MAX_STAGES = 18
MEAN_WORK = 1000.0  # mean task-seconds of a job of random_job with SIZES
ALPHA = -0.5  # default exponent of "weighted fair": best on 100 sets of jobs, in both suites
COLUMN = {text.split(":")[0]: k for k, text in enumerate(NODE_FEATURES)}
LOG_COLUMNS = [2, 3, 6]  # tasks, work, chain
LOG_SCALES = np.array([1 / 5, 1 / 8, 1 / 8], np.float32)


def random_job(rng, sizes=SIZES):
    """Returns (tasks [n], duration [n], edges [e, 2]) of a job: tasks and mean task duration (s) of
    each stage.

    The shapes and sizes are made like those of TPC-H queries on Spark: 2 to 18 stages (mean 7.3),
    numbered so that parents come first. Stages form an in-tree, whose child is 1, 2, ... places
    further with probability 1/2, 1/4, ..., as joins do (1 to 6 parents), and one in seven has a
    second child. Those without parents read data: their tasks are the GB of the job, uniform over
    `sizes`, times a log-uniform factor from 0.05 to 5; the others have 20 to 100% of the tasks of
    their largest parent, none has more than 500. Durations are lognormal (sigma 0.5) around a mean
    of the job, and a lognormal factor (sigma 0.8) of the job, split between tasks and durations,
    makes some queries heavy. The mean work is about MEAN_WORK; 23% of the jobs have 81% of it (82%
    in the paper).
    """
    num = min(MAX_STAGES, 2 + int(rng.gamma(2.0, 2.9)))
    stage = np.arange(num - 1)  # all but the last one have a child
    child = np.minimum(stage + rng.geometric(0.5, num - 1), num - 1)
    second = np.minimum(child + rng.integers(1, 4, num - 1), num - 1)
    has_second = (rng.random(num - 1) < 1 / 7) & (second > child)
    tree = np.stack([stage, child], 1)
    more = np.stack([stage[has_second], second[has_second]], 1)
    edges = np.concatenate([tree, more])
    heavy = rng.lognormal(0, 0.8) ** 0.5
    factor = rng.uniform(np.log(0.05), np.log(5), num)
    share = rng.uniform(0.2, 1, num)
    size = sizes[rng.integers(len(sizes))]
    tasks = np.ceil(size * np.exp(factor) * heavy)
    for k in np.unique(edges[:, 1]):
        parents = edges[edges[:, 1] == k, 0]
        tasks[k] = min(np.ceil(tasks[parents].max() * share[k]), 500)
    duration = np.minimum(3 * heavy * rng.lognormal(0, 0.5, num), 30)
    return np.minimum(tasks, 500).astype(np.int64), duration, edges


def check_job(job, k):
    """Returns the job as arrays; raises ValueError unless it is (tasks [n], duration [n], edges [e,
    2]), a DAG."""
    try:
        tasks, duration, edges = job
        tasks = np.asarray(tasks)
        duration = np.asarray(duration, float)
        edges = np.asarray(edges, np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise ValueError(
            f"Job {k} must be (tasks [n], duration [n], edges [e, 2]), got {job!r}."
        ) from None
    if tasks.ndim != 1 or len(tasks) == 0 or tasks.shape != duration.shape:
        raise ValueError(
            f"Job {k} needs as many tasks as durations, at least one, got shapes {tasks.shape} and "
            f"{duration.shape}."
        )
    is_whole = (tasks >= 1).all() and (tasks == np.floor(tasks)).all()
    if not is_whole or not ((duration > 0) & (duration < np.inf)).all():
        raise ValueError(f"Job {k} needs whole numbers of tasks >= 1 and finite durations > 0.")
    parent = edges[:, 0]
    child = edges[:, 1]
    if (parent < 0).any() or (child >= len(tasks)).any() or (parent >= child).any():
        raise ValueError(
            f"Job {k}: each edge must go from a stage to one with a larger number below "
            f"{len(tasks)}."
        )
    return tasks.astype(np.int64), duration, np.unique(edges, axis=0)


def check_whole(name, value):
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}.")


def check_positive(name, value):
    """Raises ValueError unless `value` is a finite number above 0."""
    if not 0 < value < np.inf:
        raise ValueError(f"{name} must be a number > 0, got {value!r}.")


def check_not_negative(name, value):
    """Raises ValueError unless `value` is a finite number of at least 0."""
    if not 0 <= value < np.inf:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}.")


def parallelism_limits(num_executors, most):
    """Returns at most `most` numbers from 1 to num_executors in about equal ratios, or all numbers
    if `most` is None."""
    if most is None:
        return list(range(1, num_executors + 1))
    ratios = np.geomspace(1, num_executors, most)
    return np.unique(ratios.round().astype(int)).tolist()


def workloads(num, **kwargs):
    """Returns a list of keyword arguments, one for each of `num` fixed sets of jobs."""
    return [kwargs | {"workload": k} for k in range(num)]


def suites():
    """Returns dict suite name -> list of DagScheduleEnv keyword arguments, one per fixed set of
    jobs."""
    return {
        "batch": workloads(100, num_jobs=20),
        "continuous": workloads(100, num_jobs=50, load=0.75),
        "long": workloads(10, num_jobs=200, load=0.75),
    }


class DagScheduleEnv(gym.Env):
    """A cluster of executors that run the stages of jobs; job completion times are to be short.

    Events. A stage may be chosen when all tasks of its parents have started and it can use more
    executors; it runs when its parents are complete, until then its executors wait. An executor
    that works on a stage goes on until no task of it is left to start. Then it can be given away,
    already while it finishes its last task: executors are "free" when they are idle or finish the
    last task of a stage. A decision is due when an executor is idle and a stage may be chosen, and
    all events of the moment are over, unless there is one executor to give and one stage to take
    it.

    Action: {"node": a row of the graph whose `action_mask` is 1, a stage; "executors": index of
    `limits`, the parallelism limit of its job}. The job gets free executors for this stage until
    its executors reach the limit: those promised to it and those at work on stages that have tasks
    to start. It gets at least one, but no more than are free, or than the stage has tasks. Idle
    ones come first (of the same job, then of none, then of others); the others come when they
    finish, each to its own job if that waits.

    Time, in seconds. A task takes its stage's mean duration times lognormal noise of mean 1 (sigma
    `noise`) times 1 + c (n - 1) / (num_executors - 1) while n executors work for its job: the more
    there are, the more they share, and jobs do not scale equally well: c is log-uniform over the
    two numbers of `inflation`. The first task of an executor on a stage takes `first_wave` times as
    long. An executor that was not at the job before takes `moving_delay` to come, and its first
    task takes `warmup` more, unless it waited for a parent.

    Reward: minus the job-seconds since the last decision / reward_unit: the return is minus the sum
    over jobs of the time from arrival to completion. With `shaped` it is that plus the change of a
    potential, minus the job-seconds that `fluid_job_seconds` still expects: which policy is best
    stays the same, as the sum over an episode differs by what the jobs alone determine, but much
    less of the reward's variance is that of the jobs (the idea of Mao et al. 2019, "Variance
    reduction for reinforcement learning in input-driven environments", ICLR, arXiv:1807.02264; the
    shaping of Ng et al. 1999, ICML; both for gamma = 1, with 0.99 it is learned best).

    The episode ends when all jobs are complete; info["eval"] then has the mean job completion time
    in seconds ("cost"), and with a fixed `workload` those of RULES on the same jobs.

    Observation: {"graph": the stages that are not complete of the jobs in the system, by job in
    order of arrival, then a hub for each job; "action_mask"}. Node features: NODE_FEATURES, all >=
    0. Edge features: EDGE_KINDS. A terminal observation is one zero node.

    Args:
        num_jobs: jobs of an episode.
        load: None, all jobs are there at the beginning (batched arrivals). Otherwise they arrive in
            a Poisson process (continuous arrivals), the first at 0, with a mean of MEAN_WORK /
            (num_executors load) seconds between them: the work that arrives per second and
            executor. First waves and inflation come on top: at 0.75 the executors are at work 84%
            of the time with "weighted fair" (8 episodes of 200 jobs).
        num_executors: of the cluster.
        limits: at most so many parallelism limits are there to choose from, 1 to num_executors in
            about equal ratios; None: every number.
        sizes: GB of input data that random jobs draw from, see `random_job`.
        moving_delay, warmup, first_wave, inflation, noise: see above.
        reward_unit: job-seconds that cost 1.
        shaped: see Reward.
        workload: None, or the seed of the jobs and arrivals, which are then the same in every
            episode.
        jobs: None, or a list of (tasks [n], duration [n], edges [e, 2]) that are played instead of
            random ones.
        render_mode: None or "rgb_array", the executors of each job over time.
    Raises ValueError for values that make no sense, and step() for actions that are not allowed.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    eval_suites = suites()

    def __init__(
        self,
        num_jobs=20,
        load=None,
        num_executors=50,
        limits=12,
        sizes=SIZES,
        moving_delay=2.0,
        warmup=1.0,
        first_wave=1.3,
        inflation=(0.1, 2.0),
        noise=0.4,
        reward_unit=1000.0,
        shaped=False,
        workload=None,
        jobs=None,
        render_mode=None,
    ):
        self.fixed = None
        if jobs is not None:
            self.fixed = [check_job(job, k) for k, job in enumerate(jobs)]
            num_jobs = len(self.fixed)
        check_whole("num_jobs", num_jobs)
        check_whole("num_executors", num_executors)
        if limits is not None:
            check_whole("limits", limits)
        if load is not None:
            check_positive("load", load)
        check_not_negative("moving_delay", moving_delay)
        check_not_negative("warmup", warmup)
        check_positive("first_wave", first_wave)
        check_not_negative("noise", noise)
        check_positive("reward_unit", reward_unit)
        if len(inflation) != 2 or not 0 < inflation[0] <= inflation[1] < np.inf:
            raise ValueError(
                f"inflation must be two numbers > 0, the smaller one first, got {inflation!r}."
            )
        if not len(sizes) or min(sizes) <= 0:
            raise ValueError(f"sizes must be numbers > 0, got {sizes!r}.")
        check_option("render_mode", render_mode, [None, "rgb_array"])
        if workload is not None and (not isinstance(workload, (int, np.integer)) or workload < 0):
            raise ValueError(f"workload must be None or a whole number >= 0, got {workload!r}.")
        self.num_jobs = num_jobs
        self.load = load
        self.num_executors = num_executors
        self.num_limits = limits  # at most, None: no bound
        self.limits = parallelism_limits(num_executors, limits)
        self.sizes = tuple(sizes)
        self.moving_delay = moving_delay
        self.warmup = warmup
        self.first_wave = first_wave
        self.inflation = tuple(inflation)
        self.noise = noise
        self.reward_unit = reward_unit
        self.shaped = shaped
        self.workload = workload
        self.render_mode = render_mode
        self._set_spaces()
        self.heap = None

    def _set_spaces(self):
        """The spaces of observations and actions: no graph has more than `most` stages."""
        most = MAX_STAGES * self.num_jobs
        if self.fixed is not None:
            most = sum(len(tasks) for tasks, _, _ in self.fixed)
        self.action_space = spaces.Dict(  # drawn in this order; a dict would be sorted
            [
                ("node", spaces.Discrete(most + self.num_jobs)),
                ("executors", spaces.Discrete(len(self.limits))),
            ]
        )
        features = spaces.Box(0, np.inf, (len(NODE_FEATURES),), np.float32)
        graph = spaces.Graph(features, spaces.Discrete(len(EDGE_KINDS)))
        self.observation_space = spaces.Dict({"graph": graph, "action_mask": mask_space()})

    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self._start_episode(self.np_random)
        return self._observe(), {}

    def step(self, action):
        """Returns the next observation, the reward, terminated, False, and info, which is {} before
        the end."""
        if self.heap is None or self.num_done == self.num_jobs:
            raise ValueError("step() needs an episode under way: call reset() first.")
        node = int(action["node"])
        limit = int(action["executors"])
        if not 0 <= node < len(self.mask) or not self.mask[node]:
            raise ValueError(
                f"Node {node} is not legal now: choose one whose action_mask is 1, one of "
                f"{np.flatnonzero(self.mask).tolist()}."
            )
        if not 0 <= limit < len(self.limits):
            raise ValueError(
                f"executors {limit} must be an index of the {len(self.limits)} limits "
                f"{self.limits}."
            )
        paid = self.job_seconds
        expected = self.expected
        self._give(int(self.nodes[node]), self.limits[limit])
        self._advance()
        self.expected = fluid_job_seconds(self) if self.shaped else 0.0
        cost = paid - self.job_seconds + expected - self.expected
        observation = self._observe()
        terminated = self.num_done == self.num_jobs
        info = self._eval() if terminated else {}
        return observation, cost / self.reward_unit, terminated, False, info

    # ---- The episode ----
    def _start_episode(self, rng):
        """Draws jobs, arrivals and the seed of the noise, and goes to the first decision."""
        self.rng = np.random.default_rng(rng.integers(2**63))  # of the noise
        if self.workload is not None:
            rng = np.random.default_rng(self.workload)
        num_jobs = self.num_jobs
        jobs = self.fixed or [random_job(rng, self.sizes) for _ in range(num_jobs)]
        self._set_stages(jobs)
        self._set_chains()
        self.arrival = [0.0] * num_jobs
        if self.load is not None:
            interval = MEAN_WORK / (self.num_executors * self.load)
            later = rng.exponential(interval, num_jobs - 1).cumsum()
            self.arrival = np.append(0, later).tolist()
        least, most = np.log(self.inflation)
        self.scaling = np.exp(rng.uniform(least, most, num_jobs))  # c of each job
        self.per_executor = (self.scaling / max(self.num_executors - 1, 1)).tolist()
        self._set_cluster()
        self._advance(skip_forced=False)
        self.expected = fluid_job_seconds(self) if self.shaped else 0.0

    def _set_stages(self, jobs):
        """The state of the stages. Lists are indexed by stage: all of the episode, job by job."""
        sizes = [len(tasks) for tasks, _, _ in jobs]
        self.first = starts_of(sizes)
        num = int(self.first[-1])
        self.num_stages = num
        self.job_of_stage = np.repeat(np.arange(len(jobs)), sizes)
        self.job_of = self.job_of_stage.tolist()
        links = [edges + start for (_, _, edges), start in zip(jobs, self.first)]
        self.links = np.concatenate(links)  # [E, 2]
        self.num_tasks = np.concatenate([tasks for tasks, _, _ in jobs])
        self.mean_duration = np.concatenate([duration for _, duration, _ in jobs])
        self.duration = self.mean_duration.tolist()
        self.left = self.num_tasks.tolist()  # tasks to start
        self.children = [[] for _ in range(num)]
        for parent, child in self.links.tolist():
            self.children[parent].append(child)
        self.parents_left = np.bincount(self.links[:, 1], minlength=num).tolist()  # not complete
        self.parents_open = self.parents_left.copy()  # with tasks to start
        # Executors of a stage.
        self.running = [0] * num  # those that run a task
        self.assigned = [0] * num  # promised, on the way or waiting
        self.waiting = [0] * num  # those of the assigned ones that wait
        self.alive = np.zeros(num, bool)  # in the system and not complete
        self.stages_left = sizes  # of each job

    def _set_chains(self):
        """The longest chains of the stages after each one, and the features that do not change."""
        num = self.num_stages
        after_work = [0.0] * num
        after_time = [0.0] * num
        for s in range(num - 1, -1, -1):
            for child in self.children[s]:
                work = self.left[child] * self.duration[child] + after_work[child]
                after_work[s] = max(after_work[s], work)
                after_time[s] = max(after_time[s], self.duration[child] + after_time[child])
        self.after_work = after_work
        self.static = np.zeros((num, len(NODE_FEATURES)), np.float32)
        self.static[:, COLUMN["is_stage"]] = 1
        self.static[:, COLUMN["chain"]] = after_work
        self.static[:, COLUMN["tail"]] = np.log1p(self.mean_duration + after_time) / 5
        self.static[:, COLUMN["duration"]] = np.log1p(self.mean_duration) / 3

    def _set_cluster(self):
        """The state of jobs, executors and events before the first one."""
        num_jobs = self.num_jobs
        self.now = 0.0
        self.counted = 0.0  # time up to which job_seconds are counted
        self.job_seconds = 0.0
        self.completion = [None] * num_jobs
        self.num_done = 0
        self.jobs = []  # in the system
        # Executors of a job.
        self.busy = [0] * num_jobs  # at work on stages with tasks to start
        self.draining = [0] * num_jobs  # on others
        self.coming = [0] * num_jobs  # assigned
        self.idle = [0] * num_jobs + [self.num_executors]  # idle[-1]: at no job
        self.num_idle = self.num_executors
        self.num_draining = 0
        self.pending = []  # promises [stage, executors] of executors that are not yet free
        self.num_pending = 0
        # Events are (time, code): the end of a task of stage code, else an arrival of an executor
        # at stage code - num_stages, else the arrival of job code - 2 num_stages.
        self.heap = [(time, 2 * self.num_stages + job) for job, time in enumerate(self.arrival)]
        self.ready = {}  # stages with tasks to start, of whose parents all tasks have started
        self.legal = []
        self.noises = []
        self.history = []
        self.changed = True  # stages in the observation

    def _advance(self, skip_forced=True):
        """Goes to the next decision, or to the end; sets `legal`, the stages that may be chosen."""
        heap = self.heap
        left = self.left
        num_stages = self.num_stages
        while True:
            # A decision may be due when all events of the moment are over.
            if self.num_idle and (not heap or heap[0][0] > self.now) and self._find_legal():
                if not skip_forced or not self._is_forced():
                    break
                self._give(self.legal[0], 1)
            if not heap:
                break
            time, code = heap[0]
            self.now = time
            if code < num_stages and left[code]:
                # The usual case: the executor goes on with the next task of its stage.
                duration = self._draw_duration(code, self.job_of[code])
                heapq.heapreplace(heap, (time + duration, code))
                left[code] -= 1
                if not left[code]:
                    self._all_started(code)
                continue
            heapq.heappop(heap)
            if code < num_stages:
                self._task_ends(code)
            elif code < 2 * num_stages:
                self._arrive(code - num_stages, True)
            else:
                self._job_arrives(code - 2 * num_stages)
        self._count()

    def _is_forced(self):
        """Whether there is one executor to give and one stage to take it."""
        if len(self.legal) > 1:
            return False
        stage = self.legal[0]
        return min(self.free, self.left[stage] - self.assigned[stage]) <= 1

    @property
    def free(self):
        """Executors that can be given now: idle ones, and those on their last task that are not
        promised."""
        return self.num_idle + self.num_draining - self.num_pending

    def _find_legal(self):
        left = self.left
        assigned = self.assigned
        self.legal = [s for s in self.ready if left[s] > assigned[s]]
        return self.legal

    def _draw_duration(self, stage, job):
        """Returns the duration of a task, as it is for an executor that goes on with its stage."""
        if not self.noises:
            self.noises = self.rng.lognormal(-(self.noise**2) / 2, self.noise, 1024).tolist()
        slow = 1 + self.per_executor[job] * (self.busy[job] + self.draining[job] - 1)
        return self.duration[stage] * slow * self.noises.pop()

    def _count(self):
        """Adds the job-seconds up to now."""
        self.job_seconds += len(self.jobs) * (self.now - self.counted)
        self.counted = self.now

    def _job_arrives(self, job):
        self._count()
        self.jobs.append(job)
        first, end = self.first[job : job + 2].tolist()
        self.alive[first:end] = True
        self.changed = True
        for s in range(first, end):
            if not self.parents_open[s]:
                self.ready[s] = True

    def _give(self, stage, limit):
        """Gives a stage executors until its job has `limit` of them, at least one."""
        job = self.job_of[stage]
        num = max(limit - self.busy[job] - self.coming[job], 1)
        num = min(num, self.free, self.left[stage] - self.assigned[stage])
        self.assigned[stage] += num
        self.coming[job] += num
        idle = self.idle
        while num and self.num_idle:
            source = self._idle_source(job)
            taken = min(num, idle[source])
            idle[source] -= taken
            self.num_idle -= taken
            num -= taken
            for _ in range(taken):
                self._send(source, stage)
        if num:
            self.pending.append([stage, num])
            self.num_pending += num

    def _idle_source(self, job):
        """Returns where an idle executor for a job is taken: there, at no job (-1), or where most
        are."""
        if self.idle[job]:
            return job
        if self.idle[-1]:
            return -1
        return max(self.jobs, key=self.idle.__getitem__)

    def _send(self, source, stage):
        if source == self.job_of[stage]:
            self._arrive(stage, False)
        else:
            heapq.heappush(self.heap, (self.now + self.moving_delay, self.num_stages + stage))

    def _arrive(self, stage, moved):
        """An executor is at a stage: it starts a task, waits for the parents, or is free if no task
        is left."""
        if self.parents_left[stage]:
            self.waiting[stage] += 1
            return
        job = self.job_of[stage]
        self.assigned[stage] -= 1
        self.coming[job] -= 1
        if not self.left[stage]:
            self._release(job)
            return
        self.busy[job] += 1
        self.running[stage] += 1
        self.left[stage] -= 1
        duration = self.first_wave * self._draw_duration(stage, job) + self.warmup * moved
        heapq.heappush(self.heap, (self.now + duration, stage))
        if self.render_mode:
            self.history.append((self.now, job, 1))
        if not self.left[stage]:
            self._all_started(stage)

    def _all_started(self, stage):
        """The last task of a stage has started: its executors are free when they finish, its
        children may be chosen."""
        job = self.job_of[stage]
        num = self.running[stage]
        self.busy[job] -= num
        self.draining[job] += num
        self.num_draining += num
        del self.ready[stage]
        for child in self.children[stage]:
            self.parents_open[child] -= 1
            if not self.parents_open[child]:
                self.ready[child] = True
        for promise in self.pending.copy():
            if promise[0] == stage:  # it is not needed any more
                self.pending.remove(promise)
                self.assigned[stage] -= promise[1]
                self.coming[job] -= promise[1]
                self.num_pending -= promise[1]

    def _task_ends(self, stage):
        """An executor has finished its last task of a stage."""
        job = self.job_of[stage]
        self.running[stage] -= 1
        self.draining[job] -= 1
        self.num_draining -= 1
        if self.render_mode:
            self.history.append((self.now, job, -1))
        if not self.running[stage]:
            self._complete(stage)
        self._release(job)

    def _complete(self, stage):
        job = self.job_of[stage]
        self.alive[stage] = False
        self.changed = True
        self.stages_left[job] -= 1
        for child in self.children[stage]:
            self.parents_left[child] -= 1
            if not self.parents_left[child]:
                num = self.waiting[child]
                self.waiting[child] = 0
                for _ in range(num):
                    self._arrive(child, False)
        if not self.stages_left[job]:
            self._count()
            self.jobs.remove(job)
            self.completion[job] = self.now
            self.num_done += 1
            self.idle[-1] += self.idle[job]
            self.idle[job] = 0

    def _release(self, job):
        """An executor at a job is free: it keeps a promise, to its own job if there is one, or is
        idle."""
        if not self.pending:
            place = job if self.stages_left[job] else -1
            self.idle[place] += 1
            self.num_idle += 1
            return
        promise = self._promise_to(job)
        promise[1] -= 1
        self.num_pending -= 1
        if not promise[1]:
            self.pending.remove(promise)
        self._send(job, promise[0])

    def _promise_to(self, job):
        """Returns the first promise to a job, or the first of all."""
        for promise in self.pending:
            if self.job_of[promise[0]] == job:
                return promise
        return self.pending[0]

    # ---- What is seen ----
    def _observe(self):
        """Returns the observation; keeps its nodes (stages, then -1 for each job) and mask for the
        next action."""
        if self.num_done == self.num_jobs:
            self.mask = np.ones(1, np.int8)
            return {"graph": terminal_graph(len(NODE_FEATURES)), "action_mask": self.mask}
        if self.changed:
            self._set_nodes()
        features = self._node_features()
        self.mask = features[:, COLUMN["schedulable"]].astype(np.int8)
        graph = spaces.GraphInstance(features, self.edge_kinds.copy(), self.edges.copy())
        return {"graph": graph, "action_mask": self.mask.copy()}

    def _set_nodes(self):
        """The stages in the system, and the edges between them and the hubs of their jobs."""
        self.stages = self.alive.nonzero()[0]
        jobs = np.array(self.jobs)
        num = len(self.stages)
        rank = self.alive.cumsum() - 1
        order = np.zeros(self.num_jobs, np.int64)
        order[jobs] = np.arange(len(jobs))
        # The place of each stage's job among those in the system.
        self.job_row = order[self.job_of_stage[self.stages]]
        links = rank[self.links[self.alive[self.links[:, 0]]]]
        to_hub = np.stack([np.arange(num), num + self.job_row], 1)
        self.edges = np.concatenate([links, links[:, ::-1], to_hub, to_hub[:, ::-1]])
        self.edge_kinds = np.repeat(np.arange(4), [len(links), len(links), num, num])
        self.nodes = np.concatenate([self.stages, np.full(len(jobs), -1)])
        self.job_start = np.flatnonzero(np.diff(self.job_row, prepend=-1))
        self.changed = False

    def _job_work(self):
        """Returns the work not started of each stage and of each job in the system, in
        task-seconds."""
        left = self.left
        work = np.array([left[s] for s in self.stages.tolist()]) * self.mean_duration[self.stages]
        return work, np.add.reduceat(work, self.job_start)

    def _node_features(self):
        """Returns float32 [N, F] of the stages, then of the hubs of their jobs."""
        num = len(self.stages)
        num_jobs = len(self.jobs)
        work, job_work = self._job_work()
        x = np.zeros((num + num_jobs, len(NODE_FEATURES)), np.float32)
        stages = x[:num]
        hubs = x[num:]
        self._write_stages(stages, work)
        hubs[:, 1] = 1  # is_job
        hubs[:, 2:6] = np.add.reduceat(stages[:, 2:6], self.job_start)  # tasks to coming
        hubs[:, 6:9] = np.maximum.reduceat(stages[:, 6:9], self.job_start)  # chain to duration
        x[:, LOG_COLUMNS] = np.log1p(x[:, LOG_COLUMNS]) * LOG_SCALES
        job = hubs[:, 12:21]  # job_work to job_scaling
        self._write_jobs(job, job_work)
        stages[:, 12:21] = job[self.job_row]
        x[:, 21] = self.free / self.num_executors  # free
        x[:, 22] = self.num_idle / self.num_executors  # idle
        x[:, 23] = np.log(num_jobs) / 4  # jobs
        return x

    def _write_stages(self, x, work):
        """Writes the features of the stages themselves into x [stages, F]."""
        left = self.left
        running = self.running
        assigned = self.assigned
        parents = self.parents_left
        rows = [[left[s], running[s], assigned[s], not parents[s]] for s in self.stages.tolist()]
        state = np.array(rows, np.float32)
        self.static.take(self.stages, 0, x)
        x[:, 2] = state[:, 0]  # tasks
        x[:, 3] = work  # work
        x[:, 4:6] = state[:, 1:3] / self.num_executors  # running, coming
        x[:, 6] += work  # chain
        x[self.stages.searchsorted(self.legal), 9] = 1  # schedulable
        x[:, 10] = state[:, 3]  # runnable
        x[:, 11] = np.clip((state[:, 0] - state[:, 2]) / self.free, 0, 1)  # room

    def _write_jobs(self, x, job_work):
        """Writes the features of the jobs in the system into x [jobs, 9]."""
        rows = []
        for job in self.jobs:
            idle = self.idle[job]
            executors = self.busy[job] + self.coming[job]
            age = self.now - self.arrival[job]
            rows.append((executors, idle + self.draining[job], idle, age, self.stages_left[job]))
        table = np.array(rows)
        x[:, 0] = np.log1p(job_work) / 8  # job_work
        x[:, 1] = job_work / max(job_work.sum(), 1e-9)  # job_share
        x[:, 2] = np.searchsorted(np.sort(job_work), job_work) / len(job_work)  # job_rank
        x[:, 3:6] = table[:, :3] / self.num_executors  # job_executors, job_free, job_idle
        x[:, 6] = np.log1p(table[:, 3]) / 8  # job_age
        x[:, 7] = table[:, 4] / 10  # job_stages
        x[:, 8] = self.scaling[self.jobs]  # job_scaling

    def _eval(self):
        """Returns the info of a finished episode; rules for a fixed workload only."""
        result = {"cost": float(np.subtract(self.completion, self.arrival).mean())}
        if self.workload is not None and self.fixed is None:
            settings = (
                "num_jobs",
                "load",
                "num_executors",
                "sizes",
                "moving_delay",
                "warmup",
                "first_wave",
                "inflation",
                "noise",
                "workload",
            )
            values = {name: getattr(self, name) for name in settings}
            result |= rule_costs(limits=self.num_limits, **values)
        return {"eval": result}

    def render(self):
        """Returns the executors at work for each job so far, uint8 [H, W, 3]: time to the right, a
        colour per job."""
        if self.render_mode != "rgb_array" or self.heap is None:
            return None
        height = 300
        width = 800
        counts = [0] * self.num_jobs
        image = np.full((height, width, 3), 255, np.uint8)
        colour = job_colours(self.num_jobs)
        # The executor of each row of the image, from the bottom to the top.
        executor = np.minimum(
            np.arange(height) * self.num_executors // height, self.num_executors - 1
        )
        column = 0
        scale = width / max(self.now, 1e-9)
        for time, job, change in [*self.history, (self.now, 0, 0)]:
            end = int(time * scale)
            if end > column:
                job_of = np.repeat(np.arange(self.num_jobs), counts)  # of each executor at work
                rows = np.flatnonzero(executor < len(job_of))
                image[height - 1 - rows, column:end] = colour[job_of[executor[rows]]][:, None]
                column = end
            counts[job] += change
        return image


# ---- Rules ----
def rule_choice(env, rule, rng, alpha=ALPHA):
    """Returns (stage, limit) that a rule of RULES takes in the env's present state.

    Within a job all but "random" take the stage with the longest chain of work (its critical path).

    - "FIFO": the job that came first takes all it can use, then the next.
    - "fair": an equal share of the executors for each job, Spark's fair scheduler; executors stay
      at their job while it has less than its share, else they go to the job that lacks most. What
      no job below its share can use goes to the job that is least above it, one by one.
    - "weighted fair": the same with shares proportional to (work of the whole job)^alpha, Decima's
      best heuristic.
    - "SJF": the job with the least work left takes all it can use.
    - "SJF-CP": the same by the work of the whole job, as in Decima's paper.
    - "limited SJF": SJF with at most a fifth of the executors per job (tuned); then the job that
      has fewest.
    - "critical path": the stage with the longest chain of work of all.
    - "random": uniform over stages and over env.limits.
    """
    if rule == "random":
        return env.legal[rng.integers(len(env.legal))], env.limits[rng.integers(len(env.limits))]
    chain = {s: env.left[s] * env.duration[s] + env.after_work[s] for s in env.legal}
    if rule == "critical path":
        return max(env.legal, key=chain.__getitem__), env.num_executors
    jobs = list(dict.fromkeys(env.job_of[s] for s in env.legal))
    limit = env.num_executors
    if rule == "FIFO":
        job = min(jobs)
    elif rule == "SJF":
        job = min(jobs, key=remaining_work(env).__getitem__)
    elif rule == "SJF-CP":
        job = min(jobs, key=env_work(env).__getitem__)
    elif rule == "limited SJF":
        job, limit = limited_job(env, jobs)
    elif rule == "fair":
        job, limit = fair_job(env, jobs, dict.fromkeys(env.jobs, 1.0))
    elif rule == "weighted fair":
        total = env_work(env)
        job, limit = fair_job(env, jobs, {j: total[j] ** alpha for j in env.jobs})
    else:
        raise ValueError(f"Unknown rule {rule!r}: use one of {RULES}.")
    stages = [s for s in env.legal if env.job_of[s] == job]
    return max(stages, key=chain.__getitem__), limit


def limited_job(env, jobs):
    """Returns the one of `jobs` that "limited SJF" chooses, and its limit."""
    limit = max(env.num_executors // 5, 1)
    have = {j: env.busy[j] + env.coming[j] for j in jobs}
    below = [j for j in jobs if have[j] < limit]
    if below:
        return min(below, key=remaining_work(env).__getitem__), limit
    job = min(jobs, key=have.__getitem__)
    return job, have[job] + 1


def fair_job(env, jobs, weight):
    """Returns the one of `jobs` that lacks most of its share, and its limit; shares are
    proportional to `weight` of the jobs in the system."""
    scale = env.num_executors / sum(weight.values())
    lack = {j: weight[j] * scale - env.busy[j] - env.coming[j] for j in jobs}
    local = [j for j in jobs if env.idle[j] and lack[j] > 0]
    job = max(local or jobs, key=lack.__getitem__)
    limit = max(int(np.ceil(weight[job] * scale)), env.busy[job] + env.coming[job] + 1)
    return job, limit


def env_work(env):
    """Returns the task-seconds of each job of the episode, done or not, [num_jobs]."""
    return np.add.reduceat(env.num_tasks * env.mean_duration, env.first[:-1])


def remaining_work(env):
    """Returns the task-seconds that are not started of each job of the episode, [num_jobs]."""
    return np.add.reduceat(np.array(env.left) * env.mean_duration, env.first[:-1])


def fluid_job_seconds(env, share=3):
    """Returns the job-seconds from now on, to the end of the episode, if the `share` jobs with the
    least work left had an equal part of the executors each, all of the time, and the others none;
    those that will arrive are known. Of the shares tried, 2 explained the most of the costs'
    variance with batched arrivals and 5 with continuous ones."""
    slow = 1 + env.scaling / share
    work = (remaining_work(env) * slow * share / env.num_executors).tolist()  # seconds of a part
    present = sorted(work[j] for j in env.jobs)
    future = [(time, work[j]) for j, time in enumerate(env.arrival) if time > env.now]
    now = env.now
    total = 0.0
    for time, arriving in [*future, (np.inf, 0.0)]:
        while present:
            passed = min(present[0], time - now)
            total += len(present) * passed
            now += passed
            present[:share] = [left - passed for left in present[:share]]
            if present[0] > 0:
                break
            del present[0]
        now = time
        bisect.insort(present, arriving)
    return total


def rule_action(env, rule, rng=None, alpha=ALPHA):
    """Returns the action that a rule takes in the env's present state; a limit that env.limits lack
    is rounded up."""
    env = env.unwrapped
    stage, limit = rule_choice(env, rule, rng or env.np_random, alpha)
    index = min(int(np.searchsorted(env.limits, limit)), len(env.limits) - 1)
    return {"node": int(env.stages.searchsorted(stage)), "executors": index}


# Policies for services/demos.py: policy(env, obs, rng) -> action
def rule_policy(rule, env, obs, rng):
    return rule_action(env, rule, rng)


fifo = partial(rule_policy, "FIFO")
fair = partial(rule_policy, "fair")
weighted_fair = partial(rule_policy, "weighted fair")
sjf = partial(rule_policy, "SJF")
limited_sjf = partial(rule_policy, "limited SJF")


def play_rule(rule, alpha=ALPHA, seed=0, **kwargs):
    """Returns the mean job completion time (s) of a rule of RULES in one episode of
    DagScheduleEnv(**kwargs)."""
    env = DagScheduleEnv(**kwargs)
    rng = np.random.default_rng(seed)
    env._start_episode(rng)
    while env.num_done < env.num_jobs:
        env._give(*rule_choice(env, rule, rng, alpha))
        env._advance()
    return float(np.subtract(env.completion, env.arrival).mean())


@lru_cache(maxsize=None)
def _rule_costs(items):
    return {rule: play_rule(rule, **dict(items)) for rule in RULES}


def rule_costs(**kwargs):
    """Returns dict rule -> mean job completion time (s) of one episode of DagScheduleEnv(**kwargs);
    computed once."""
    return dict(_rule_costs(tuple(kwargs.items())))
