"""Pogema-v0: many robots on a grid map, each with a goal of its own and each an agent
(ppo_graph_agents.py). Maps, starts, goals and moves are those of POGEMA's benchmark.

    python cleanrl_graph/ppo_graph_agents.py --env-id envs:Pogema-v0 --env-kwargs \
        '{"map": "random", "num_robots": [8, 16], "progress": 0.1}'

POGEMA: Skrynnik et al., "POGEMA: A Benchmark Platform for Cooperative Multi-Agent Pathfinding",
ICLR 2025 (Cognitive-AI-Systems/pogema and pogema-benchmark). Nothing of it is needed here: the
tests compare starts, goals and moves with those of pogema 1.4.0 where it is installed.

`reference_scores()` plays the rules of the table in PogemaEnv's docstring.
"""

from functools import lru_cache

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .graph_explore import draw_lines, draw_squares
from .job_shop import check_option
from .toy import LinkGraph, mask_space

RADIUS = 5  # a robot sees 11 x 11 cells
SIDE = 2 * RADIUS + 1
VIEW = SIDE * SIDE
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))  # stay, up, down, left, right: (row, column)
MAPS = ("random", "mazes", "warehouse")
LENGTHS = {"random": 256, "mazes": 128, "warehouse": 256}  # lifelong; one-shot: 128
# Numbers of robots that the benchmark tests
NUMBERS = {
    "random": (8, 16, 24, 32, 48, 64),
    "mazes": (8, 16, 24, 32, 48, 64),
    "warehouse": (32, 64, 96, 128, 160, 192),
}
NUM_TASKS = 128
NUM_TRIES = 20  # tasks that are drawn until there is room for all robots
FIRST_TRAINING_SEED = 128  # maps and tasks of smaller seeds are those of the benchmark
FAR = 32_000  # steps to a goal that cannot be reached
MAX_COSTS = 2**24  # numbers of steps that are kept for a map
PICTURE_SIZE = 320  # pixels of the longer side, or less
RENDER_MODES = (None, "rgb_array")
# Colours that differ between neighbours, uint8 [64, 3]
HUES = np.arange(64)[:, None] * 2.4 + np.array([0, 2.1, 4.2])
PALETTE = (120 + 100 * np.cos(HUES)).astype(np.uint8)
# Columns of a robot: the planes of its view, row by row, then FEATURES
PLANES = (
    "obstacles",
    "other robots",
    "1 if that robot has a lower number than oneself, -1 if a higher one",
    "steps to one's own goal: (from here - from there) / 10, -1 to 1",
    "where that robot wants to go, rows: sum of the moves that are nearer to its goal",
    "the same, columns",
)
FEATURES = (
    "way to the goal, rows / 10",
    "way to the goal, columns / 10",
    "the same as a vector of length 1, rows",
    "the same, columns",
    "steps to the goal / 20",
    "up: 1 nearer to the goal, -1 farther, 0 blocked",
    "down",
    "left",
    "right",
    "moved up in the last step",
    "moved down",
    "moved left",
    "moved right",
    "steps since it moved / 10, at most 1",
    "number / number of robots: of those who want a cell, the lowest gets it",
)
EDGE_FEATURES = (
    "rows from source to target / 5",
    "columns / 5",
    "1 / (rows + columns)",
    "1 if the source has the lower number",
)


# ---- Maps: text of rows; '#' is an obstacle, all else is free ----
@lru_cache(maxsize=256)
def map_text(name, seed):
    """The text of a map of the benchmark: "random" or "mazes" of a seed (its test maps are those
    of 0 to 127), or "warehouse"."""
    if name == "warehouse":
        return warehouse()
    rng = np.random.default_rng(seed)
    width, height = rng.integers(17, 22), rng.integers(17, 22)
    is_wall = (
        random_map(rng, seed, width, height) if name == "random" else maze(rng, seed, width, height)
    )
    return "\n".join("".join(".#"[cell] for cell in row) for row in is_wall)


def random_map(rng, seed, width, height):
    """int [height, width] with 10 to 30% walls, which may cut it in pieces."""
    num_walls = int(width * height * rng.uniform(0.1, 0.3))
    rng = np.random.default_rng(seed)
    is_wall = np.zeros((height, width), np.int64)
    while num_walls:
        column, row = rng.integers(0, width), rng.integers(0, height)
        num_walls -= 1 - is_wall[row, column]
        is_wall[row, column] = 1
    return is_wall


def maze(rng, seed, width, height):
    """int [about height, about width]: walls grow from random posts, by 2 cells at a time."""
    density = rng.uniform(0.0, 1.0)
    wall_length = rng.integers(1, 9)
    straight = rng.uniform(0.75, 0.85)
    rng = np.random.default_rng(seed)
    height, width = height // 2 * 2 + 3, width // 2 * 2 + 3
    is_wall = np.zeros((height, width), np.int64)
    is_wall[[0, -1]] = 1
    is_wall[:, [0, -1]] = 1
    for _ in range(int(height * width * density // wall_length)):
        column, row = rng.integers(0, width // 2) * 2, rng.integers(0, height // 2) * 2
        is_wall[row, column] = 1
        last = (0, 0)
        for _ in range(wall_length):
            ways = []
            if column > 1:
                ways.append((0, -2))
            if column < width - 2:
                ways.append((0, 2))
            if row > 1:
                ways.append((-2, 0))
            if row < height - 2:
                ways.append((2, 0))
            weights = [straight if way == last else 1 - straight for way in ways]
            total = sum(weights)
            steps = np.cumsum([weight / total for weight in weights])
            last = ways[(steps / steps[-1]).searchsorted(rng.random(), side="right")]
            down, right = last
            if is_wall[row + down, column + right] == 0:
                is_wall[row + down, column + right] = 1
                is_wall[row + down // 2, column + right // 2] = 1
                row, column = row + down, column + right
    return is_wall[1:-1, 1:-1]


def warehouse():
    """33 x 46 cells: robots start at '@' on both sides, goals '$' are beside the shelves, and '!'
    is free."""
    side = "!@@!@@!"
    shelf = side + "!".join(["#" * 10] * 3) + side
    front = side + "!".join(["$" * 10] * 3) + side
    gap = "!" * len(front)
    return "\n".join([gap] + [front, shelf, front, gap] * 8)


# ---- Ways ----
class GridMap:
    """A map with a border of width 5, so that every view lies within. Cells are numbers, row by
    row.

    width: cells of a row, with the border. is_free bool [cells]. wall float32 [cells]: 1 for
    obstacles, and for the ring of cells around the map. steps int64 [5]: what a move adds to a
    cell. starts, goals: cells where robots may start, and have goals, or None: all free ones.
    component int64 [cells]: equal for cells that are linked. members: {component: its cells}.
    """

    def __init__(self, text):
        self.text = text
        letters = letters_of(text)
        self.height, width = letters.shape
        self.width = width + 2 * RADIUS
        wall = np.zeros((self.height + 2 * RADIUS, self.width), np.float32)
        ring = slice(RADIUS - 1, 1 - RADIUS)
        inside = slice(RADIUS, -RADIUS)
        wall[ring, ring] = 1
        wall[inside, inside] = letters == "#"
        is_free = np.zeros(wall.shape, bool)
        is_free[inside, inside] = letters != "#"
        self.wall = wall.ravel()
        self.is_free = is_free.ravel()
        self.steps = np.array([down * self.width + right for down, right in MOVES])
        self.starts = self.goals = None
        if np.isin(letters, ["@", "$", "!"]).any():
            self.starts = self.cells_of(np.isin(letters, [".", "@"]))
            self.goals = self.cells_of(np.isin(letters, [".", "$"]))
        self.component = components(self.is_free, self.width)
        used = [] if self.goals is None else [*self.starts, *self.goals]
        if len(set(self.component[used])) > 1:
            raise ValueError("map: there must be a way from each start '@' to each goal '$'")
        free = np.flatnonzero(self.is_free)
        self.members = {
            label: free[self.component[free] == label] for label in np.unique(self.component[free])
        }
        self.row_of = np.full(self.is_free.size, -1)
        self.costs = np.zeros((0, self.is_free.size), np.int16)

    def cells_of(self, is_chosen):
        row, column = np.nonzero(is_chosen)
        return (row + RADIUS) * self.width + column + RADIUS

    def rows(self, goals):
        """Numbers of the rows of `costs`, int16 [rows, cells]: steps from each cell to the goal. On
        a small map all possible goals are computed together, else the new ones."""
        found = self.row_of[goals]
        if found.min(initial=0) >= 0:
            return found
        possible = np.flatnonzero(self.is_free) if self.goals is None else self.goals
        if len(possible) * self.is_free.size > MAX_COSTS // 4:
            possible = np.empty(0, np.int64)
        new = np.union1d(goals, possible)
        if (len(self.costs) + len(new)) * self.is_free.size > MAX_COSTS:
            self.row_of[:] = -1
            self.costs = self.costs[:0]
        new = new[self.row_of[new] < 0]
        self.row_of[new] = len(self.costs) + np.arange(len(new))
        self.costs = np.concatenate([self.costs, cost_to_go(self.is_free, self.width, new)])
        return self.row_of[goals]

    def __reduce__(self):
        return grid_map, (self.text,)


def letters_of(text):
    """str [height, width]"""
    rows = [list(row) for row in text.split()]
    if not rows or len({len(row) for row in rows}) > 1:
        raise ValueError("map: rows of '#' and '.' with the same length are needed")
    return np.array(rows)


@lru_cache(maxsize=64)
def grid_map(text):
    return GridMap(text)


def components(is_free, width):
    """int64 [cells]: the lowest cell that is linked to each free one; obstacles have the number of
    cells."""
    label = np.where(is_free, np.arange(is_free.size), is_free.size)
    while True:
        lowest = label.copy()
        for step in (1, width):
            np.minimum(lowest[step:], label[:-step], out=lowest[step:])
            np.minimum(lowest[:-step], label[step:], out=lowest[:-step])
        lowest[~is_free] = is_free.size
        if (lowest == label).all():
            return label
        label = lowest


def cost_to_go(is_free, width, goals):
    """Steps from each cell to each goal, int16 [goals, cells], FAR where there is no way: breadth
    first from all goals at once.

    is_free bool [cells]: cells row by row, `width` in a row; those at the border are not free.
    """
    seen = np.zeros((is_free.size, len(goals)), bool)
    seen[goals, np.arange(len(goals))] = True
    newest = seen
    blocked = ~is_free[:, None]
    cost = np.zeros(seen.shape, np.int16)
    while newest.any():
        cost += ~seen
        reached = np.zeros_like(seen)
        for step in (1, width):
            reached[step:] |= newest[:-step]
            reached[:-step] |= newest[step:]
        newest = reached & ~(seen | blocked)
        seen = seen | newest
    cost[~seen] = FAR
    return np.ascontiguousarray(cost.T)


def place_robots(grid, seed, num):
    """(starts, goals), each int64 [num], on a map without cells for them: cells in random order,
    the next one of the same component is the goal of a start. Fewer of them, with as many goals or
    fewer, if there is no room."""
    order = np.flatnonzero(grid.is_free)
    np.random.default_rng(seed).shuffle(order)
    room = {label: len(cells) for label, cells in grid.members.items()}
    waiting = {label: [] for label in room}  # robots without a goal
    starts = []
    goals = {}
    for cell in order:
        label = grid.component[cell]
        if waiting[label]:
            goals[waiting[label].pop()] = cell
        elif len(starts) < num and room[label] >= 2:
            room[label] -= 2
            waiting[label].append(len(starts))
            starts.append(cell)
        if len(goals) == num:
            break
    ordered = [goals[robot] for robot in sorted(goals)]
    return np.array(starts, np.int64), np.array(ordered, np.int64)


def settle(place, want, occupant, is_free):
    """bool [robots], who moves: POGEMA's "soft" collisions.

    Nobody moves into an obstacle, and no two change places. Of those who want a cell the one with
    the lowest number gets it, if the robot that is there leaves; so rows of robots, and rings, move
    as one.
    place, want: int64 [robots], cells. occupant int64 [cells]: the robot there, or -1.
    """
    numbers = np.arange(len(place))
    want = np.where(is_free[want], want, place)
    moves = want != place
    first = np.empty_like(occupant)
    movers = numbers[moves][::-1]
    first[want[movers]] = movers  # the last one written stays
    ahead = occupant[want]
    has_ahead = ahead >= 0
    moves[moves] = first[want[moves]] == numbers[moves]
    moves &= ~(has_ahead & (want[ahead] == place))
    while True:
        is_stuck = moves & has_ahead & ~moves[ahead]
        if not is_stuck.any():
            return moves
        moves &= ~is_stuck


@lru_cache(maxsize=None)
def window(width):
    """int64 [121]: what to add to a cell for those of its view."""
    offsets = np.arange(-RADIUS, RADIUS + 1)
    return (offsets[:, None] * width + offsets).ravel()


# ---- The environment ----
def suites():
    """{name: keyword arguments of 128 tasks}: random_32, one_shot_random_32, and so on."""
    found = {}
    for name, numbers in NUMBERS.items():
        for num in numbers:
            own = {"map": name, "num_robots": num}
            seed = "task_seed" if name == "warehouse" else "map_seed"
            tasks = [own | {"map_seed": 0, "task_seed": 0, seed: k} for k in range(NUM_TASKS)]
            found[f"{name}_{num}"] = tasks
            found[f"one_shot_{name}_{num}"] = [task | {"task": "one-shot"} for task in tasks]
    return found


class PogemaEnv(gym.Env):
    """Robots on a grid map, each on its way to a goal. All move at once, by one cell or not at all.

    task "lifelong": who reaches a goal gets another one. The episode is truncated after
        `episode_length` steps; info["eval"] has then "throughput", goals reached per step by all
        robots together, and "cost", minus that.
    task "one-shot": robots stay where they are, also at their goal, and may be pushed to leave it.
        The episode is terminated when all are at their goals, and truncated after `episode_length`
        steps. info["eval"] has "success" (0 or 1), "arrived" (share of robots at their goal at the
        end), "length" (steps), "sum_of_costs" (steps of all robots until they stay at the goal) and
        "cost", the length.

    Observation, with a row for each of the n robots.
        "graph": nodes float32 [n, 741]: PLANES of the 11 x 11 cells around it, row by row, then
            FEATURES. Edges in both directions between robots at most `link_radius` rows and columns
            apart: float32 [e, 4], EDGE_FEATURES, and edge_links int64 [e, 2].
        "node_ids": int64 [n], 0 to n - 1.
        "action_mask": int8 [n, 5], 0 where an obstacle is.
    Action: one of 5 moves for each: 0 stays, then up, down, left, right. `settle` tells who moves.

    info["rewards"] float32 [n]: 1 for reaching a goal (one-shot: -1 for leaving it), and `progress`
    for each step that led nearer to the goal, -`progress` for one away from it. The reward of a
    step is their mean.

    Tasks: a map of the benchmark has a seed, and so have starts and goals. Seeds 0 to 127 are those
    of the benchmark's tests; where a seed is None it is drawn in each episode, at least 128.

    Args:
        map: "random" (17 to 21 cells a side, 10 to 30% obstacles), "mazes" (as large), "warehouse"
            (33 x 46), a list of these, one of which is drawn in each episode, or the text of a map:
            rows of '.' and '#', and for starts and goals '@', '$', '!' as in POGEMA.
        num_robots: a number, or a range (low, high), uniform in each episode.
        task: "lifelong" or "one-shot".
        episode_length: steps; None for the benchmark's: lifelong 256, in mazes 128; one-shot 128.
        progress: reward of a step towards the goal.
        link_radius: rows and columns; 0 for no links. By default those in view are linked.
        cost_to_go: False: steps to a goal, and which moves are nearer to one, are zeros.
        map_seed, task_seed: None, or a number.
        render_mode: None or "rgb_array".
    Raises ValueError for values that make no sense, and for a seed whose map has too little room.

    Throughput of the rules below on the 128 tasks of a suite (benchmark/results/pogema):

    | rule | random_32 | random_64 | mazes_32 | mazes_64 |
    | --- | --- | --- | --- | --- |
    | random | 0.09 | 0.16 | 0.02 | 0.04 |
    | shortest | 0.31 | 0.39 | 0.14 | 0.10 |
    | dodge | 0.86 | 0.80 | 0.45 | 0.41 |
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    eval_suites = suites()

    def __init__(
        self,
        map="random",
        num_robots=32,
        task="lifelong",
        episode_length=None,
        progress=0.1,
        link_radius=RADIUS,
        cost_to_go=True,
        map_seed=None,
        task_seed=None,
        render_mode=None,
    ):
        check_option("task", task, ("lifelong", "one-shot"))
        check_option("render_mode", render_mode, RENDER_MODES)
        self.maps = [map] if isinstance(map, str) else list(map)
        for name in self.maps:
            if "\n" not in name:
                check_option("map", name, MAPS)
        limits = [num_robots] * 2 if np.isscalar(num_robots) else list(num_robots)
        if len(limits) != 2 or not 1 <= limits[0] <= limits[1]:
            raise ValueError(
                f"num_robots must be a number above 0 or a pair low <= high, not {num_robots!r}"
            )
        self.num_robots = limits
        self.is_lifelong = task == "lifelong"
        self.episode_length = episode_length
        self.progress = progress
        self.link_radius = link_radius
        self.cost_to_go = cost_to_go
        self.map_seed = map_seed
        self.task_seed = task_seed
        self.render_mode = render_mode
        node_space = spaces.Box(-np.inf, np.inf, (len(PLANES) * VIEW + len(FEATURES),), np.float32)
        edge_space = spaces.Box(-np.inf, np.inf, (len(EDGE_FEATURES),), np.float32)
        ids = spaces.Box(0, np.iinfo(np.int64).max, (), np.int64)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space),
                "node_ids": spaces.Sequence(ids, stack=True),
                "action_mask": mask_space(len(MOVES)),
            }
        )
        self.action_space = spaces.Sequence(spaces.Discrete(len(MOVES)), stack=True)

    # ---- The episode ----
    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A task without room for all robots is drawn
        again."""
        super().reset(seed=seed)
        rng = self.np_random
        for _ in range(NUM_TRIES):
            name = self.maps[rng.integers(len(self.maps))]
            num = int(rng.integers(self.num_robots[0], self.num_robots[1] + 1))
            map_seed, task_seed = rng.integers(FIRST_TRAINING_SEED, 2**31 - 1, 2)
            map_seed = int(map_seed if self.map_seed is None else self.map_seed)
            task_seed = int(task_seed if self.task_seed is None else self.task_seed)
            text = name if "\n" in name else map_text(name, 0 if name == "warehouse" else map_seed)
            self.grid = grid_map(text)
            place, goal = self.draw_task(task_seed, num)
            if len(goal) == num:
                break
        else:
            raise ValueError(
                f"map {name!r}, map_seed {map_seed}: there is no room for {num} robots"
            )
        self.place, self.goal = place, goal
        self.length = self.episode_length
        if self.length is None:
            self.length = LENGTHS.get(name, 256) if self.is_lifelong else 128
        self.occupant = np.full(self.grid.is_free.size, -1)
        self.occupant[place] = np.arange(num)
        self.last_move = np.zeros(num, np.int64)
        self.num_still = np.zeros(num, np.int64)
        self.arrived_at = np.full(num, -1)  # one-shot: the step since which it is at its goal
        self.num_steps = 0
        self.num_reached = 0
        self.to_go = self.steps_to_goals()
        return self.observe(), {}

    def draw_task(self, seed, num):
        """(starts, goals) of a seed, each int64 [num], or fewer goals if there is no room. It makes
        `rngs`, one for each robot, and `goal_cells`, for later goals."""
        grid = self.grid
        self.goal_cells = grid.goals
        if grid.starts is not None:
            rng = np.random.default_rng(seed)
            starts, goals = grid.starts.copy(), grid.goals.copy()
            rng.shuffle(starts)
            rng.shuffle(goals)
            self.goal_cells = goals.copy()
            starts, goals = starts[:num], goals[: min(num, len(starts))]
        else:
            starts, goals = place_robots(grid, seed, num)
        seeds = np.random.default_rng(seed).integers(np.iinfo(np.int32).max, size=num)
        self.rngs = [np.random.default_rng(own) for own in seeds] if self.is_lifelong else []
        return starts, goals

    def next_goal(self, robot):
        """Another goal for a robot that has reached its own: any cell to which it can go. Where the
        map has cells for goals, POGEMA compares a goal without the border's width and a place with
        it, so that a goal may come again and another one may not."""
        rng = self.rngs[robot]
        place = self.place[robot]
        if self.goal_cells is not None:
            cells = self.goal_cells
            place = place + RADIUS * (self.grid.width + 1)
        else:
            cells = self.grid.members[self.grid.component[place]]
        goal = place
        while goal == place:
            goal = cells[rng.integers(0, len(cells))]
        return goal

    def steps_to_goals(self):
        """int16 [robots, 5]: from where each move would lead."""
        rows = self.grid.rows(self.goal)
        return self.grid.costs[rows[:, None], self.place[:, None] + self.grid.steps]

    def step(self, action):
        """Return the observation, mean reward, whether all are at their goal (one-shot), whether
        the time is over, and info."""
        grid, place = self.grid, self.place
        action = np.asarray(action, np.int64)
        moves = settle(place, place + grid.steps[action], self.occupant, grid.is_free)
        action = action * moves
        self.occupant[place] = -1
        was_there = place == self.goal
        self.place = place = place + grid.steps[action]
        self.occupant[place] = np.arange(len(place))
        self.last_move = action
        self.num_still = (self.num_still + 1) * ~moves
        self.num_steps += 1
        is_there = place == self.goal
        before = self.to_go[:, 0]
        after = self.to_go[np.arange(len(place)), action]
        rewards = is_there + self.progress * (before - after)
        truncated = self.num_steps >= self.length
        terminated = False
        if self.is_lifelong:
            self.num_reached += int(is_there.sum())
            for robot in np.flatnonzero(is_there):
                self.goal[robot] = self.next_goal(robot)
        else:
            rewards = rewards - was_there
            self.arrived_at[is_there & (self.arrived_at < 0)] = self.num_steps
            self.arrived_at[~is_there] = -1
            terminated = bool(is_there.all())
        info = {"rewards": rewards.astype(np.float32)}
        if terminated or truncated:
            info["eval"] = self.evaluation(is_there)
        self.to_go = self.steps_to_goals()
        return self.observe(), float(rewards.mean()), terminated, truncated, info

    def evaluation(self, is_there):
        if self.is_lifelong:
            throughput = self.num_reached / self.num_steps
            return {"cost": -throughput, "throughput": throughput}
        until = np.where(is_there, self.arrived_at, self.num_steps)
        return {
            "cost": self.num_steps,
            "success": int(is_there.all()),
            "arrived": float(is_there.mean()),
            "length": self.num_steps,
            "sum_of_costs": int(until.sum()),
        }

    # ---- What robots see ----
    def observe(self):
        grid, place = self.grid, self.place
        num = len(place)
        nodes = np.zeros((num, len(PLANES) * VIEW + len(FEATURES)), np.float32)
        is_open = grid.is_free[place[:, None] + grid.steps]
        planes = nodes[:, : len(PLANES) * VIEW].reshape(num, len(PLANES), VIEW)
        self.draw_planes(planes, is_open)
        row, column = np.divmod(place, grid.width)
        goal_row, goal_column = np.divmod(self.goal, grid.width)
        way = np.stack([goal_row - row, goal_column - column], 1)
        own = nodes[:, len(PLANES) * VIEW :]
        own[:, :2] = way / 10
        own[:, 2:4] = way / np.maximum(np.sqrt((way * way).sum(1, keepdims=True)), 1)
        if self.cost_to_go:
            own[:, 4] = self.to_go[:, 0] / 20
            own[:, 5:9] = (self.to_go[:, :1] - self.to_go[:, 1:]) * is_open[:, 1:]
        own[:, 9:13] = self.last_move[:, None] == np.arange(1, len(MOVES))
        own[:, 13] = np.minimum(self.num_still / 10, 1)
        own[:, 14] = np.arange(num) / num
        graph = spaces.GraphInstance(nodes, *self.links(row, column))
        return {
            "graph": graph,
            "node_ids": np.arange(num),
            "action_mask": is_open.astype(np.int8),
        }

    def draw_planes(self, planes, is_open):
        """Fills `planes`, float32 [robots, len(PLANES), 121], zeros."""
        grid = self.grid
        cells = self.place[:, None] + window(grid.width)
        planes[:, 0] = grid.wall[cells]
        other = self.occupant[cells]
        other[:, VIEW // 2] = -1  # oneself
        is_robot = other >= 0
        planes[:, 1] = is_robot
        planes[:, 2] = np.sign(np.arange(len(cells))[:, None] - other) * is_robot
        if self.cost_to_go:
            costs = grid.costs[grid.rows(self.goal)[:, None], cells]
            planes[:, 3] = ((self.to_go[:, :1] - costs) / 10).clip(-1, 1)
            is_nearer = (self.to_go[:, 1:] < self.to_go[:, :1]) & is_open[:, 1:]
            wanted = is_nearer @ np.array(MOVES[1:])  # [robots, 2]
            planes[:, 4:] = (wanted[other] * is_robot[:, :, None]).transpose(0, 2, 1)

    def links(self, row, column):
        """(edges float32 [e, 4], edge_links int64 [e, 2])"""
        down = row - row[:, None]
        right = column - column[:, None]
        is_near = np.maximum(np.abs(down), np.abs(right)) <= self.link_radius
        np.fill_diagonal(is_near, False)
        source, target = np.nonzero(is_near)
        down, right = down[source, target], right[source, target]
        edges = np.empty((len(source), len(EDGE_FEATURES)), np.float32)
        edges[:, 0] = down / RADIUS
        edges[:, 1] = right / RADIUS
        edges[:, 2] = 1 / (np.abs(down) + np.abs(right))
        edges[:, 3] = source < target
        return edges, np.stack([source, target], 1)

    def render(self):
        """The map, uint8 [height, width, 3], at most 320 pixels a side: obstacles grey, robots
        squares, and lines of their colour to the dots that are their goals. None without
        render_mode="rgb_array" or before reset()."""
        if self.render_mode != "rgb_array" or not hasattr(self, "place"):
            return None
        grid = self.grid
        size = max(4, PICTURE_SIZE // (max(grid.height, grid.width - 2 * RADIUS) + 2))
        cells = grid.wall.reshape(-1, grid.width)[RADIUS - 1 : 1 - RADIUS, RADIUS - 1 : 1 - RADIUS]
        picture = np.where(cells, 120, 255).astype(np.uint8)
        picture = np.repeat(picture.repeat(size, 0).repeat(size, 1)[:, :, None], 3, 2)
        where = []  # pixels (x, y)
        for cell in (self.place, self.goal):
            row, column = np.divmod(cell, grid.width)
            corner = np.stack([column, row], 1) - (RADIUS - 1)
            where.append((corner + 0.5) * size)
        for robot, (here, there) in enumerate(zip(*where)):
            colour = PALETTE[robot % len(PALETTE)]
            draw_lines(picture, here[None], there[None], colour // 2 + 120)
            draw_squares(picture, there[None], colour, max(1, size // 8))
        for robot, here in enumerate(where[0]):
            draw_squares(picture, here[None], PALETTE[robot % len(PALETTE)], max(1, size // 3))
        return picture


# ---- Rules ----
def random(env):
    """Any move for each that no obstacle is in the way of."""
    return any_of(env, env.steps_to_goals() < FAR)


def shortest(env):
    """A random one of the moves that lead nearer to the goal; at the goal (one-shot) none."""
    cost = env.steps_to_goals()
    return any_of(env, cost == cost.min(1, keepdims=True))


def dodge(env):
    """As `shortest`; who did not move in the last step makes a random move with probability 1/2."""
    stuck = (
        (env.num_still > 0) & (env.to_go[:, 0] > 0) & (env.np_random.random(len(env.place)) < 0.5)
    )
    return np.where(stuck, random(env), shortest(env))


RULES = {"random": random, "shortest": shortest, "dodge": dodge}


def any_of(env, is_allowed):
    """A random one of the allowed moves, bool [robots, 5], of each robot."""
    return (env.np_random.random(is_allowed.shape) * is_allowed).argmax(1)


def play(env, rule, seed=0):
    """info["eval"] of an episode."""
    env.reset(seed=seed)
    is_over = False
    while not is_over:
        _, _, terminated, truncated, info = env.step(rule(env))
        is_over = terminated or truncated
    return info["eval"]


def reference_scores(suite="random_32", num_tasks=NUM_TASKS):
    """{rule: mean throughput} of the tasks of a suite."""
    scores = {}
    for name, rule in RULES.items():
        tasks = PogemaEnv.eval_suites[suite][:num_tasks]
        scores[name] = np.mean([play(PogemaEnv(**task), rule)["throughput"] for task in tasks])
    return scores
