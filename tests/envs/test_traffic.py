"""TrafficLights-v0: what lights see and show, rewards and delays by counts of their own, trips of a
demand and a shift, seeds, and a process of SUMO that ends with its environment."""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_graph.envs import traffic
from cleanrl_graph.envs.traffic import (
    COLUMN,
    EDGE_FEATURES,
    MAPS,
    RULES,
    TrafficLightsEnv,
    green_phases,
    phase_column,
    play_rule,
    yellow_state,
)

MISSING = [name for name in ("libsumo", "sumo_rl") if importlib.util.find_spec(name) is None]
NEEDED = f"needs {MISSING}: pip install -r benchmark/traffic/requirements.txt"
needs_sumo = pytest.mark.skipif(bool(MISSING), reason=NEEDED)
pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")


@pytest.fixture
def make():
    """Makes environments that are closed after the test."""
    envs = []

    def make_one(**kwargs):
        kwargs = {"map": "cologne3", "seconds": 200, "disable_env_checker": True} | kwargs
        env = gym.make("cleanrl_graph.envs:TrafficLights-v0", **kwargs)
        envs.append(env.unwrapped)
        return env.unwrapped

    yield make_one
    for env in envs:
        env.close()


def flat(observation):
    graph = observation["graph"]
    arrays = (graph.nodes, graph.edges, graph.edge_links, observation["action_mask"])
    return [(a.dtype.str, a.shape, a.tobytes()) for a in arrays]


def steps(env, num_steps, seed=None):
    """What each step of an episode of random actions returns, from a reset on."""
    rng = np.random.default_rng(5)
    observation, _ = env.reset(seed=seed)
    yield flat(observation)
    for _ in range(num_steps):
        observation, reward, _, truncated, info = env.step(traffic.random(observation, rng))
        yield flat(observation), reward, truncated, info["rewards"].tolist(), info.get("eval")


def trace(*args, **kwargs):
    return list(steps(*args, **kwargs))


def num_trips(env, seed=0):
    """How many trips there are in an hour that lets the programs run, by their own count."""
    evaluation = play_rule(env, "fixed_time", seed)
    return evaluation["arrived"] + evaluation["unfinished"]


def departures(env):
    """Of the trips in the route file, in order."""
    _, routes, begin, _ = env.files
    trips = ElementTree.parse(routes).getroot()
    times = [float(trip.get("depart")) for trip in trips if trip.tag in ("trip", "vehicle")]
    return np.sort([t - begin for t in times if t >= begin])


# ---- Without SUMO ----
def test_yellow_and_green():
    """Yellow is shown where green ends, and nowhere else. Green phases are those of a program that
    let somebody go, each once; too many are an error."""
    assert yellow_state("GGgrrs", "GrrGrr") == "Gyyrrs"
    assert yellow_state("GrG", "GrG") == "GrG"
    assert yellow_state("Grs", "ggs") == "Grs"  # nobody must stop
    assert green_phases(["Grr", "yrr", "rrr", "rgG", "ryy", "Grr"], "x") == ["Grr", "rgG"]
    states = [f"{i:04b}".replace("0", "r").replace("1", "G") for i in range(1, 10)]
    with pytest.raises(ValueError, match="Light x has 9 green phases"):
        green_phases(states, "x")


def test_missing_package(monkeypatch):
    """What is missing, and the command that installs it."""
    find_spec = importlib.util.find_spec
    hidden = lambda name: None if name == "libsumo" else find_spec(name)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ModuleNotFoundError, match="pip install -r benchmark/traffic/req"):
        TrafficLightsEnv()


def test_suites():
    """Evaluated hours are others than those of training, and each its own."""
    suites = TrafficLightsEnv.eval_suites
    assert set(suites) == {*MAPS, "all", "resco"} and len(suites["all"]) == 5 * len(MAPS)
    assert [entry["map"] for entry in suites["resco"]] == list(MAPS)
    for entry in [entry for suite in suites.values() for entry in suite]:
        assert set(entry) == {"map", "demand", "shift", "fixed_seed", "seconds"}
    for name in MAPS:
        assert {entry["map"] for entry in suites[name]} == {name}
        assert len({str(entry) for entry in suites[name]}) == 5
        assert all(entry["shift"] > 0 and 0.8 <= entry["demand"] <= 1.2 for entry in suites[name])


# ---- Observations and actions ----
@needs_sumo
@pytest.mark.parametrize("name", MAPS)
def test_maps(make, name):
    """Observations are in the space, roads in both directions, each light has a lane."""
    env = make(map=name, seconds=10)
    observation, info = env.reset(seed=0)
    assert info == {} and env.observation_space.contains(observation)
    graph = observation["graph"]
    num = len(graph.nodes)
    assert num == int("".join(filter(str.isdigit, name.replace("4x4", "16"))))
    assert graph.nodes.shape == (num, 8 * len(COLUMN) + len(traffic.LIGHT_FEATURES))
    assert observation["node_ids"].tolist() == list(range(num))
    mask = observation["action_mask"]
    np.testing.assert_array_equal(mask, phase_column(observation, "exists"))
    assert (mask.sum(1) >= 2).all() and (np.diff(mask, axis=1) <= 0).all()
    assert (phase_column(observation, "lanes_in").max(1) > 0).all()
    half = len(graph.edges) // 2
    np.testing.assert_array_equal(graph.edge_links[:half], graph.edge_links[half:, ::-1])
    assert graph.edges.shape == (2 * half, len(EDGE_FEATURES))
    assert graph.edges[:half, 0].all() and not graph.edges[half:, 0].any()
    np.testing.assert_array_equal(graph.edges[:half, 1:], graph.edges[half:, 1:])
    assert (graph.edges[:, 1:3] > 0).all()
    assert (graph.edge_links[:, 0] != graph.edge_links[:, 1]).all()
    action = traffic.random(observation, np.random.default_rng(0))
    assert env.action_space.contains(action)
    observation, reward, terminated, truncated, info = env.step(action)
    assert env.observation_space.contains(observation) and not terminated and not truncated
    assert info["rewards"].shape == (num,) and "eval" not in info
    assert env.step(action)[3]
    if name == "grid4x4":  # has 24 roads of 300 m or so between its lights, in each direction
        assert len(np.unique(graph.edge_links, axis=0)) == half == 48
        assert np.allclose(graph.edges[:, 1], 0.27, atol=0.03)


@needs_sumo
def test_criteria(make):
    """Each action shows the phase that has most of its criterion, among those of the light; of
    equal ones the current, then the first of the program."""
    env = make(map="cologne8", seconds=400)
    observation, _ = env.reset(seed=1)
    rng = np.random.default_rng(0)
    truncated = False
    chosen = set()
    while not truncated:
        phases = env._phase_features()
        lanes = env.counts["lanes"][0]
        served = (env.lights.lanes_in @ lanes).reshape(env.lights.exists.shape)
        np.testing.assert_allclose(phases[:, :, COLUMN["vehicles_in"]] * 10, served, atol=1e-5)
        assert (phases[:, :, COLUMN["relief"]] <= phases[:, :, COLUMN["delay_in"]]).all()
        for k, name in enumerate(traffic.CRITERIA):
            for i, own in enumerate(env.lights.phases):

                def worth(j):
                    x = dict(zip(COLUMN, phases[i, j].tolist()))
                    x["pressure"] = x["vehicles_in"] - x["halting_out"]
                    return x[name] + traffic.TIE * x["current"]

                best = max(worth(j) for j in range(len(own)))
                j = env.shown[i, k]
                assert np.isclose(worth(j), best)
                chosen.add((k, j))
                for feature in ("vehicles_in", "red", "protected"):
                    seen = phase_column(observation, feature)[i, k]
                    assert seen == phases[i, j, COLUMN[feature]]
        assert observation["action_mask"].all()
        action = traffic.random(observation, rng)
        shown = env.shown[np.arange(len(action)), action]
        observation, _, _, truncated, _ = env.step(action)
        assert (env.current == shown).all()
    assert len(chosen) > 2 * len(traffic.CRITERIA)


@needs_sumo
def test_phases_follow_actions(make):
    """It is what the light shows after a decision; yellow is between two; `since` counts."""
    env = make(yellow=2, interval=5, choose="phases")
    observation, _ = env.reset(seed=0)
    num = len(observation["node_ids"])
    for slot, since in ((1, 5), (1, 10), (0, 5), (2, 5), (2, 10)):
        before = env.sumo.call("states")
        action = np.full(num, slot)
        showing = env.current
        yellow, green = env._next_states(action)
        env.states = before.copy()  # as if nothing had been asked
        env.current = showing
        observation = env.step(action)[0]
        states = env.sumo.call("states")
        assert states == [phases[slot] for phases in env.lights.phases] == env.states
        assert (phase_column(observation, "current").argmax(1) == slot).all()
        for i, state in yellow.items():
            assert "y" in state and i in green
            assert state == yellow_state(before[i], states[i])
        if before == states:
            assert not yellow
        first = -len(traffic.LIGHT_FEATURES)
        if env.num_steps > 1:
            assert np.allclose(observation["graph"].nodes[:, first], since / 60)


@needs_sumo
def test_wrong_actions(make):
    """They are sentences, after which no light is taken to show another state."""
    env = make(choose="phases")
    with pytest.raises(ValueError, match="call reset"):
        env.step([0, 0, 0])
    env.reset(seed=0)
    with pytest.raises(ValueError, match="3 numbers from 0 to 7"):
        env.step([0, 0, 8])
    with pytest.raises(ValueError, match="Light 1 has no action 7"):
        env.step([1, 7, 0])
    before = env.sumo.call("states")
    assert list(env.states) == list(before)
    env.step((1, 0, 0))
    assert env.sumo.call("states")[0] != before[0]


# ---- Rewards and delays ----
@needs_sumo
@pytest.mark.parametrize("reward", traffic.REWARDS)
def test_rewards(make, reward):
    """One for each light, from what its own lanes hold; step() returns their mean."""
    env = make(map="grid4x4", reward=reward, seconds=300)
    observation, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    first = -len(traffic.LIGHT_FEATURES)
    total = 0.0
    for _ in range(50):
        observation, mean, _, _, info = env.step(traffic.random(observation, rng))
        rewards = info["rewards"]
        assert rewards.dtype == np.float32 and (rewards <= 0).all()
        assert np.isclose(mean, rewards.mean())
        if reward == "queue":
            halting = observation["graph"].nodes[:, first + 3] * 20
            assert np.allclose(rewards * -10, halting, atol=1e-4)
        if reward == "delay":  # some drive faster than allowed
            vehicles, halting = observation["graph"].nodes[:, first + 2 : first + 4].T * 20
            assert (rewards * -10 <= vehicles + 1e-4).all()
            assert (rewards * -10 >= 0.7 * halting - 1e-4).all()
            assert np.allclose(observation["graph"].nodes[:, first + 5], -rewards)
            served = phase_column(observation, "delay_in")
            assert (served.max(1) <= -rewards + 1e-5).all()
        if reward == "sqrt_delay":
            delay = observation["graph"].nodes[:, first + 5]
            assert np.allclose(rewards, 1 - np.sqrt(1 + delay), atol=1e-5)
        total += mean
    assert total < 0


@needs_sumo
def test_delay(make):
    """The cost is the mean delay, by a count of its own that asks for each vehicle at each second.
    The lights of the count follow the programs of the map."""
    env = make(map="cologne1", seconds=600)
    evaluation = play_rule(env, "fixed_time", 0)
    script = [sys.executable, "-c", COUNT, *map(str, env.files[:3]), str(env.last_seed)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    delay, arrived, unfinished = done.stdout.split()[-3:]
    assert (int(arrived), int(unfinished)) == (evaluation["arrived"], evaluation["unfinished"])
    assert evaluation["cost"] == pytest.approx(float(delay), abs=0.05)


COUNT = """
import sys
import libsumo
net, routes, begin, seed = sys.argv[1:]
libsumo.start(["sumo", "-n", net, "-r", routes, "-b", begin, "--seed", seed,
               "--time-to-teleport", "-1", "--no-warnings", "--no-step-log"])
loss, before, arrived = {}, {}, set()
for second in range(600):
    libsumo.simulationStep()
    for name in libsumo.simulation.getPendingVehicles():
        before[name] = libsumo.vehicle.getDepartDelay(name)
    for name in libsumo.vehicle.getIDList():
        loss[name] = libsumo.vehicle.getTimeLoss(name)
        before[name] = libsumo.vehicle.getDepartDelay(name)
    arrived |= set(libsumo.simulation.getArrivedIDList())
names = loss.keys() | before.keys()
total = sum(loss.values()) + sum(before.values())
print(total / len(names), len(arrived), len(names - arrived))
"""


# ---- Seeds and traffic ----
@needs_sumo
def test_seeds(make):
    """A seed fixes all that follows, in any environment; another one is another hour. With
    fixed_seed all episodes are the same hour."""
    kwargs = {"demand": (0.8, 1.2), "shift": (0, 3600)}
    one = make(**kwargs)
    two = make(**kwargs)
    first = trace(one, 40, seed=7)
    second = trace(one, 40)
    assert first != second
    assert trace(two, 40, seed=7) == first and trace(two, 40) == second
    assert trace(two, 40, seed=8) != first
    env = make(fixed_seed=3, demand=(0.5, 1.5))
    assert trace(env, 40, seed=0) == trace(env, 40)
    assert trace(make(fixed_seed=4, demand=(0.5, 1.5)), 40) != trace(env, 40)


@needs_sumo
def test_demand(make):
    """It scales the number of trips, and a range is drawn from."""
    of = lambda demand: make(map="grid4x4", seconds=600, demand=demand)
    few, usual, many = (num_trips(of(demand)) for demand in (0.5, 1.0, 1.7))
    assert abs(few - 0.5 * usual) <= 2 and abs(many - 1.7 * usual) <= 2
    env = of((0.5, 1.7))
    drawn = {num_trips(env, seed) for seed in range(3)}
    assert len(drawn) == 3 and few <= min(drawn) and max(drawn) <= many


@needs_sumo
def test_shift(make):
    """It turns the hour: the same trips at other times."""
    for shift in (900, -300.5, 3600):
        env = make(map="grid4x4", seconds=400, shift=shift)
        times = departures(env)
        shifted = (times[times < 3600] + shift) % 3600
        assert num_trips(env) == (shifted <= 400).sum()


# ---- Processes ----
def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def closed(env):
    """It ends the process, and twice is no error."""
    pid = env.sumo.process.pid
    assert is_running(pid)
    env.close()
    env.close()
    assert not is_running(pid)
    with pytest.raises(ValueError, match="call reset"):
        env.step([0, 0, 0])


def died(env):
    """It is a sentence."""
    os.kill(env.sumo.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="The process of SUMO ended in step with exit code -9"):
        env.step([0, 0, 0])
    with pytest.raises(RuntimeError, match="reset.. begins another one"):
        env.step([0, 0, 0])
    assert not os.path.exists(env.sumo.folder)


@needs_sumo
@pytest.mark.parametrize("ended", [closed, died])
def test_process_that_ended(ended, make):
    """reset() begins another one."""
    env = make()
    env.close()
    expected = trace(env, 3, seed=0)
    ended(env)
    assert trace(env, 3, seed=0) == expected


@needs_sumo
def test_pickle(make):
    """An environment whose simulation runs says that it cannot be pickled; others can be."""
    env = make()
    copy = pickle.loads(pickle.dumps(env))
    env.reset(seed=0)
    with pytest.raises(TypeError, match="cannot be pickled or copied while SUMO runs"):
        pickle.dumps(env)
    assert trace(copy, 3, seed=0) == trace(env, 3, seed=0)
    copy.close()
    assert env.exact_resume is False


# ---- Pictures and rules ----
@needs_sumo
def test_render(make):
    """The map with its lanes, before a step, after the last one, and of the same size."""
    env = make(render_mode="rgb_array", seconds=100)
    assert env.render() is None
    observation, _ = env.reset(seed=0)
    first = env.render()
    assert first.dtype == np.uint8 and first.ndim == 3 and max(first.shape) == traffic.MAP_SIZE
    truncated = False
    while not truncated:
        action = RULES["greedy"](observation, None)
        observation, _, _, truncated, _ = env.step(action)
    last = env.render()
    assert last.shape == first.shape and (last != first).any()
    for name in ("empty", "green", "light"):
        assert (last == traffic.COLOURS[name]).all(2).any()
    assert make().render() is None
