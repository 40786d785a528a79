"""Conflict sets of flexible job shops: by brute force, they lose no optimum and reach no schedule
twice."""

import numpy as np
import pytest

from cleanrl_graph.envs.flexible_job_shop import FlexibleJobShopEnv


def shortest(times, ops, free, ready, following):
    """Returns the least makespan of the schedules that append operations in any order, each to any
    of its machines. `ops` has the rows of `times` of each job, `following` the next of these."""
    best = np.inf
    for job, rows in enumerate(ops):
        if following[job] == len(rows):
            continue
        for machine in np.flatnonzero(times[rows[following[job]]]):
            end = max(free[machine], ready[job]) + times[rows[following[job]], machine]
            now_free, now_ready, next_op = free.copy(), ready.copy(), following.copy()
            now_free[machine] = now_ready[job] = end
            next_op[job] += 1
            best = min(best, shortest(times, ops, now_free, now_ready, next_op))
    return free.max() if best == np.inf else best


def schedules(instance, dispatch):
    """Returns all schedules that sequences of choices make, each a sorted tuple of (job, step,
    machine, start, finish), and makes sure that each decision has a choice."""
    found = []
    unfinished = [[]]  # sequences of actions
    while unfinished:
        actions = unfinished.pop()
        env = FlexibleJobShopEnv(instance=instance, dispatch=dispatch)
        observation, _ = env.reset()
        for action in actions:
            observation, *_ = env.step(action)
        if env.num_left == 0:
            found.append(tuple(sorted(env.order)))
            continue
        legal = np.flatnonzero(observation["action_mask"])
        assert len(legal) > 1 or env.num_left == 1  # the last operation is not forced
        unfinished += [[*actions, int(action)] for action in legal]
    return found


def random_instance(seed):
    """Returns three jobs of two operations each on two or three machines, times from 1 to 4: many
    ties."""
    env = FlexibleJobShopEnv(jobs=3, machines=(2, 3), operations=2, durations=(1, 4), deviation=1)
    env.reset(seed=seed)
    return {"times": env.times, "operations": env.operations_of}


@pytest.mark.parametrize("seed", range(6))
def test_conflict_sets_reach_the_optimum_and_no_schedule_twice(seed):
    instance = random_instance(seed)
    found = schedules(instance, "conflict")
    assert len(set(found)) == len(found)
    makespans = [max(row[4] for row in schedule) for schedule in found]
    ops = np.split(np.arange(6), 3)
    machines = instance["times"].shape[1]
    free, ready, following = np.zeros(machines), np.zeros(3), np.zeros(3, int)
    assert min(makespans) == shortest(instance["times"], ops, free, ready, following)


def test_conflict_sets_have_fewer_choices_than_active_ones():
    """Those on the machine that can complete an operation first."""
    env = FlexibleJobShopEnv(jobs=8, machines=5, dispatch="conflict")
    observation, _ = env.reset(seed=1)
    rng = np.random.default_rng(1)
    num_active = 0
    num_conflicts = 0
    while env.num_left:
        job, machine = np.nonzero(env.legal)
        active = env.start < env.finish.min()
        assert len(set(machine)) == 1
        assert env.finish[:, machine[0]].min() == env.finish.min()
        assert set(job) == set(np.flatnonzero(active[:, machine[0]]))
        num_active += active.sum()
        num_conflicts += len(job)
        observation, *_ = env.step(int(rng.choice(np.flatnonzero(observation["action_mask"]))))
    assert num_conflicts < num_active / 2


def test_rules_of_all_builders_are_reported():
    """The bare names are the rules of the environment's own builder."""
    env = FlexibleJobShopEnv(instance="mk01", dispatch="conflict")
    env.reset(seed=0)
    result = env._eval()["eval"]
    assert {"MWKR", "active MWKR", "nondelay MWKR"} <= set(result)
    assert "conflict MWKR" not in result
    with pytest.raises(ValueError, match="dispatch must be one of .*'conflict'"):
        FlexibleJobShopEnv(dispatch="anything")
