"""Crowd-v0: people cross a square, each to an exit of their own. Each is an agent: they come and
go, and each has its own reward (ppo_graph_agents.py).

`reference_scores()` plays the rules of the table in CrowdEnv's docstring.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .graph_explore import draw_lines, draw_squares
from .toy import LinkGraph

SPEED = 0.05  # length of a step; the square's sides have length 1
NEAR = 0.04  # people closer than this bump into each other
SIGHT = 0.2  # people closer than this see each other
PICTURE_SIZE = 400  # pixels
OF_PEOPLE = ("place", "exit", "last_move", "bumped", "ids", "entered")
RENDER_MODES = (None, "rgb_array")
ANGLES = np.arange(8) * np.pi / 4
MOVES = SPEED * np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1)
MOVES = np.concatenate([np.zeros((1, 2)), MOVES])  # the first one stays


class CrowdEnv(gym.Env):
    """People cross a unit square. They enter at a side and leave at a point of the opposite one.

    Observation, with a row for each of the n people who are there; n may be 0.
        "graph": nodes float32 [n, 6]: way to the exit (x, y) and its length, the last move (x, y) /
            0.05, 1 if somebody was bumped into in the last step. Edges in both directions between
            those closer than 0.2: float32 [e, 3], the way from source to target (x, y) and its
            length, all / 0.2. edge_links int64 [e, 2].
        "node_ids": int64 [n], a number for each person, never used again in an episode.
    Action: one of 9 moves for each: 0 stays, k > 0 goes 0.05 at an angle of 45 (k - 1) degrees.
    Nobody leaves the square but at the exit, which is reached within 0.05.

    info["rewards"] float32 [n], of each person who moved: -0.05, -0.5 if another one is within 0.04
    afterwards, and +1 at the exit. The reward of a step is their mean, 0 if nobody was there.
    At first there are `num_people`; then a Poisson number of mean `arrivals` enters at every step.
    The episode is truncated after `episode_length` steps. info["eval"] has then the sum of rewards
    and the bumps of a person, means over all who were there ("reward", "bumps"), the mean time to
    the exit of those who reached it ("steps", 0 if nobody did), and their share ("arrived").

    Means of 100 episodes, from `reference_scores(100)`:

    | rule | reward | bumps | steps |
    | --- | --- | --- | --- |
    | random moves | -6.05 | 6.1 | 44.1 (2% arrive) |
    | straight to the exit | -0.32 | 0.5 | 19.5 (84% arrive) |
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, num_people=8, arrivals=0.25, episode_length=100, render_mode=None):
        if render_mode not in RENDER_MODES:
            raise ValueError(f"render_mode must be one of {RENDER_MODES}, not {render_mode!r}")
        self.num_people = num_people
        self.arrivals = arrivals
        self.episode_length = episode_length
        self.render_mode = render_mode
        node_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)
        edge_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        ids = spaces.Box(0, np.iinfo(np.int64).max, (), np.int64)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space),
                "node_ids": spaces.Sequence(ids, stack=True),
            }
        )
        self.action_space = spaces.Sequence(spaces.Discrete(len(MOVES)), stack=True)

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}."""
        super().reset(seed=seed)
        self.num_steps = 0
        self.num_ids = 0
        self.num_bumps = 0
        self.total = 0.0  # of all rewards
        self.times = []  # of those who reached their exit
        self.place = np.zeros((0, 2))
        self.exit = np.zeros((0, 2))
        self.last_move = np.zeros((0, 2))
        self.bumped = np.zeros(0, bool)
        self.ids = np.zeros(0, np.int64)
        self.entered = np.zeros(0, np.int64)  # at which step
        self.enter(self.num_people)
        self.place = self.np_random.random((self.num_people, 2))  # the first ones are on their way
        return self.observe(), {}

    def enter(self, num):
        """`num` people enter, each at a random point of a random side."""
        rng = self.np_random
        place = rng.random((num, 2))
        goal = rng.random((num, 2))
        axis = rng.integers(2, size=num)  # 0: from the left or right
        side = rng.integers(2, size=num)
        people = np.arange(num)
        place[people, axis] = side
        goal[people, axis] = 1 - side
        last_move = np.zeros((num, 2))
        bumped = np.zeros(num, bool)
        ids = self.num_ids + people
        entered = np.full(num, self.num_steps)
        rows = (place, goal, last_move, bumped, ids, entered)
        for name, new in zip(OF_PEOPLE, rows):
            joined = np.concatenate([getattr(self, name), new])
            setattr(self, name, joined)
        self.num_ids += num

    def step(self, action):
        """Return the observation, mean reward, False, whether the time is over, and info."""
        moves = MOVES[np.asarray(action, np.int64)]
        before = self.place
        self.place = (before + moves).clip(0, 1)
        self.last_move = self.place - before
        self.num_steps += 1
        nearest = self.distances().min(1, initial=np.inf)
        self.bumped = nearest < NEAR
        to_exit = np.linalg.norm(self.exit - self.place, axis=1)
        has_arrived = to_exit < SPEED
        rewards = has_arrived - 0.5 * self.bumped - 0.05
        self.num_bumps += int(self.bumped.sum())
        self.total += float(rewards.sum())
        self.times += (self.num_steps - self.entered[has_arrived]).tolist()
        for name in OF_PEOPLE:
            remaining = getattr(self, name)[~has_arrived]
            setattr(self, name, remaining)
        num = self.np_random.poisson(self.arrivals)
        self.enter(num)
        truncated = self.num_steps >= self.episode_length
        info = {"rewards": rewards.astype(np.float32)}
        if truncated:
            num = max(self.num_ids, 1)
            info["eval"] = {
                "reward": self.total / num,
                "bumps": self.num_bumps / num,
                "steps": float(np.mean(self.times or 0)),
                "arrived": len(self.times) / num,
            }
        return self.observe(), rewards.sum() / max(len(rewards), 1), False, truncated, info

    def distances(self):
        """From each to each [n, n], infinite to oneself."""
        distance = np.linalg.norm(self.place[:, None] - self.place, axis=2)
        np.fill_diagonal(distance, np.inf)
        return distance

    def observe(self):
        to_exit = self.exit - self.place
        far = np.linalg.norm(to_exit, axis=1)
        nodes = [to_exit, far, self.last_move / SPEED, self.bumped]
        distance = self.distances()
        links = np.argwhere(distance < SIGHT)
        source, target = links.T
        way = self.place[target] - self.place[source]
        length = distance[source, target]
        edges = np.column_stack([way, length]) / SIGHT
        nodes = np.column_stack(nodes).astype(np.float32)
        graph = spaces.GraphInstance(nodes, edges.astype(np.float32), links)
        return {"graph": graph, "node_ids": self.ids}

    def render(self):
        """The square, uint8 [400, 400, 3]: people blue, red where they bump into each other, and
        grey lines to their exits. None without render_mode="rgb_array" or before reset()."""
        if self.render_mode != "rgb_array" or not hasattr(self, "place"):
            return None
        image = np.full((PICTURE_SIZE, PICTURE_SIZE, 3), 255, np.uint8)
        place = 8 + self.place * (PICTURE_SIZE - 16)
        goal = 8 + self.exit * (PICTURE_SIZE - 16)
        draw_lines(image, place, goal, 225)
        draw_squares(image, goal, (30, 160, 60), 2)
        draw_squares(image, place[~self.bumped], (60, 110, 230), 4)
        draw_squares(image, place[self.bumped], (220, 30, 30), 4)
        return image


def straight(env):
    """For each the move that leads nearest to the exit."""
    after = env.place[:, None] + MOVES
    return np.linalg.norm(env.exit[:, None] - after, axis=2).argmin(1)


def random(env):
    return env.np_random.integers(len(MOVES), size=len(env.ids))


def reference_scores(num_episodes=100):
    """{rule: (sum of rewards of a person, bumps of a person, steps to the exit)}: the first two are
    means over episodes, the last one over all who reached their exit."""
    scores = {}
    for rule in (random, straight):
        rows = []
        times = []  # of those who reached their exit, in all episodes
        env = CrowdEnv()
        for seed in range(num_episodes):
            env.reset(seed=seed)
            truncated = False
            while not truncated:
                _, _, _, truncated, info = env.step(rule(env))
            rows.append([info["eval"]["reward"], info["eval"]["bumps"]])
            times += env.times
        mean_time = np.mean(times) if times else np.nan
        scores[rule.__name__] = (*np.mean(rows, 0), mean_time)
    return scores
