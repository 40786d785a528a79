"""Courier-v0: deliver to houses two streets away, by streets that were seen before and are out of
sight now. Remembering nodes is not enough: the edges between them are needed."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .graph_explore import ID_BOUND, star
from .toy import LinkGraph, mask_space

HERE, TARGET, TOUR = range(3)  # columns of the node features


class CourierEnv(gym.Env):
    """First a tour shows each house of a small town with its neighbours. Then parcels arrive, one
    after the other, each for a house two streets away.

    The town, new in every episode: `num_houses` on a ring, and `num_chords` more streets between
    pairs that are drawn at random. In the tour, `num_houses` steps, the courier is driven to each
    house once, in random order, and actions mean nothing. Then there are `num_steps` steps. With
    each parcel the courier is at a house, and the target is one of those two streets away, drawn at
    random. The next parcel arrives where this one was delivered.

    Observation, a dict of k rows: the own house first, then its neighbours, in random order, then
    the target where it is none of these.
        "graph": nodes float32 [k, 3]: 1 for the own house; 1 for the target; 1 during the tour,
            the same in all rows. edge_links int64, the streets of the own house in both directions.
            So the target, when the parcel arrives, has no edge: which neighbour is next to it was
            seen in the tour alone.
        "node_ids": int64 [k], below 100,000: the name of a house, drawn anew in every episode.
        "action_mask": int8 [k], 1 for the neighbours.
    Action: the row of the neighbour to move to. Any other row stays put.

    Reward: 2 / num_steps for each delivery, so the optimum is 1 where `num_steps` is even: two
    steps a parcel. Episode end: terminated after the last step.

    Mean returns of `reference_scores(1000)`: the best policy that remembers the streets 1; a
    policy that remembers nothing, delivers where it sees the target and moves at random elsewhere,
    0.41.

    Args:
        num_houses: at least 6.
        num_chords: at most num_houses - 5, so that no house is next to all others.
        num_steps: steps after the tour.
    Raises ValueError for other numbers.
    """

    def __init__(self, num_houses=10, num_chords=4, num_steps=24):
        if num_houses < 6 or not 0 <= num_chords <= num_houses - 5 or num_steps < 1:
            raise ValueError(
                f"num_houses {num_houses} must be at least 6, num_chords {num_chords} from 0 to "
                f"num_houses - 5, and num_steps {num_steps} at least 1"
            )
        self.num_houses = num_houses
        self.num_chords = num_chords
        self.num_steps = num_steps
        self.observation_space = spaces.Dict(
            graph=LinkGraph(spaces.Box(0, 1, (3,), np.float32), edge_space=None),
            node_ids=spaces.Sequence(spaces.Box(0, ID_BOUND - 1, (), np.int64), stack=True),
            action_mask=mask_space(),
        )
        self.action_space = spaces.Discrete(num_houses)

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        n = self.num_houses
        self.ids = self.np_random.choice(ID_BOUND, n, replace=False)
        self.linked = np.zeros((n, n), bool)
        houses = np.arange(n)
        self.linked[houses, houses - 1] = True
        self.linked |= self.linked.T
        pairs = np.argwhere(np.triu(~self.linked, 1))
        for a, b in self.np_random.permutation(pairs)[: self.num_chords]:
            self.linked[a, b] = self.linked[b, a] = True
        self.tour = self.np_random.permutation(n).tolist()
        self.here = self.tour[0]
        self.target = -1  # none
        self.t = 0
        return self._observation(), {}

    def _observation(self):
        rng = self.np_random
        self.rows = [self.here, *rng.permutation(np.flatnonzero(self.linked[self.here])).tolist()]
        links = star(len(self.rows))
        if self.target not in (-1, *self.rows):
            self.rows.append(self.target)
        nodes = np.zeros((len(self.rows), 3), np.float32)
        nodes[0, HERE] = 1
        nodes[:, TARGET] = np.array(self.rows) == self.target
        nodes[:, TOUR] = self.t < self.num_houses
        return {
            "graph": spaces.GraphInstance(nodes, None, links),
            "node_ids": self.ids[self.rows],
            "action_mask": self.linked[self.here][self.rows].astype(np.int8),
        }

    def step(self, action):
        """Return the next observation, the reward, terminated, False and {}."""
        self.t += 1
        reward = 0.0
        if self.t < self.num_houses:
            self.here = self.tour[self.t]
        else:
            if self.t > self.num_houses and action < len(self.rows):
                house = self.rows[action]
                if self.linked[self.here, house]:
                    self.here = house
            if self.here == self.target:
                reward = 2 / self.num_steps
                self.target = -1
            if self.target == -1:
                near = self.linked[self.here]
                two_away = self.linked[near].any(0) & ~near
                two_away[self.here] = False
                self.target = int(self.np_random.choice(np.flatnonzero(two_away)))
        terminated = self.t == self.num_houses + self.num_steps
        return self._observation(), reward, terminated, False, {}


def play_episode(env, remembers_streets, seed):
    """The return of an episode of a policy that moves to the target where it sees it, else, if it
    remembers the streets, to a neighbour that is next to it, else to any."""
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    streets = {}
    total = 0.0
    done = False
    while not done:
        ids = obs["node_ids"].tolist()
        rows = np.flatnonzero(obs["action_mask"])
        is_target = obs["graph"].nodes[:, TARGET] == 1
        streets[ids[0]] = {ids[row] for row in rows}
        choices = rows[is_target[rows]]
        if not len(choices) and is_target.any() and remembers_streets:
            target = ids[is_target.argmax()]
            choices = [row for row in rows if ids[row] in streets[target]]
        action = rng.choice(choices if len(choices) else rows)
        obs, reward, done, _, _ = env.step(action)
        total += reward
    return total


def reference_scores(num_episodes=200, seed=0, **kwargs):
    """dict policy -> mean return over episodes seeded with seed, seed + 1, ...; kwargs of the
    env."""
    env = CourierEnv(**kwargs)
    seeds = range(seed, seed + num_episodes)
    return {
        "remembers the streets": np.mean([play_episode(env, True, each) for each in seeds]),
        "remembers nothing": np.mean([play_episode(env, False, each) for each in seeds]),
    }
