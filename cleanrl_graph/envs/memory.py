"""Cheap tasks that need memory, each with a known optimum and known scores of a policy without
memory.

StatelessCartPole-v1   CartPole-v1 without its velocities: compare with the previous observation
Recall-v0              show a cue, walk a corridor, choose by the cue: one bit kept for any time
MemoryLength-v0        the same with a clock in place of the junction's flag
TMaze-v0               the same in a maze, in which the walk itself is the agent's to do
LastGraphs-v0          which of the last graphs had the largest marked value, asked at every step
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector import VectorObservationWrapper
from gymnasium.vector.utils import batch_space

from .toy import LinkGraph, starts_of

MIN_GAP = 0.1  # between the marked values that LastGraphs compares


class StatelessCartPoleEnv(CartPoleEnv):
    """gymnasium's CartPole-v1 whose observation lacks both velocities; the rest is unchanged.

    Observation: float32 [2], cart position and pole angle (radians); bounds of the space +-4.8 and
    +-0.418. With `velocities` a dict: these are "places", and "velocities" float32 [2] are for
    --critic-only velocities. Action: 0 pushes the cart to the left, 1 to the right. Reward 1 per
    step. Episode end: terminated where the pole leans more than 12 degrees or the cart is beyond
    +-2.4; gym.make() adds a limit of 500 steps (truncated). `gym.make("StatelessCartPole-v1",
    max_episode_steps=-1)` has no limit and `max_episode_steps=1000` another one. Without a limit an
    episode of a good policy does not end, nor does an evaluation that waits for it.

    Args:
        sutton_barto_reward: 0 per step and -1 at the end, as in CartPoleEnv.
        velocities: adds both velocities, under a key of their own.
        render_mode: None, "rgb_array" or "human"; pictures need pygame.

    Reference returns of seeded episodes of at most 500 steps. Mean of 1,000: a random policy 22;
    without memory, "push to the side it leans to" 41. With memory of one observation, 500 in each
    of 50: the sign of `angle + 0.5 * angular velocity + 0.02 * position + 0.06 * velocity`, where a
    velocity is the difference of two observations / 0.02 s.
    """

    def __init__(self, sutton_barto_reward=False, render_mode=None, velocities=False):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f'render_mode is "{render_mode}"; choose None, "rgb_array" or "human"')
        super().__init__(sutton_barto_reward, render_mode)
        high = self.observation_space.high[[0, 2]]
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.velocities = velocities
        if velocities:
            self.observation_space = spaces.Dict(
                places=self.observation_space,
                velocities=spaces.Box(-np.inf, np.inf, (2,), np.float32),
            )

    def seen(self, observation):
        """What is shown of CartPole's observation."""
        places = observation[::2].copy()
        if self.velocities:
            return {"places": places, "velocities": observation[1::2].copy()}
        return places

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows; options as in
        CartPoleEnv."""
        observation, info = super().reset(seed=seed, options=options)
        return self.seen(observation), info

    def step(self, action):
        """Return the observation, reward 1.0, terminated, False and {}."""
        observation, *outcome = super().step(action)
        return self.seen(observation), *outcome


class StatelessCartPoleVectorEnv(VectorObservationWrapper):
    """`num_envs` of them that step together: gymnasium's CartPoleVectorEnv without velocities, with
    its arguments."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(CartPoleVectorEnv(num_envs, **kwargs))
        low, high = self.env.single_observation_space.low, self.env.single_observation_space.high
        self.single_observation_space = spaces.Box(low[::2], high[::2])
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def observations(self, observations):
        """Places without velocities, float32 [num_envs, 2]."""
        return observations[:, ::2].copy()


class RecallEnv(gym.Env):
    """See a cue, walk a corridor that shows nothing, and choose at the junction the action that
    matches the cue.

    Observation: float32 [num_cues + 1]: the cue as a one-hot vector, zeros after the first step;
    last a flag that is 1 at the junction. The `length` observations between cue and junction are
    all zeros, so nothing counts the steps. With `clock` last is the share of the steps that are
    left, from 1 to 0, as in bsuite's memory_len (Osband et al. 2020, arXiv:1908.03568). Action: the
    index of a cue; it matters at the junction only. Reward: at the junction 1 for the action that
    equals the cue and -1 for any other; 0 elsewhere. Episode end: terminated after the choice at
    the junction, that is after `length + 2` steps.

    Args:
        length: steps between the cue and the junction.
        num_cues: number of cues and actions.
        clock: shows the time that is left in place of the flag.
    Raises ValueError if length is negative or num_cues is below 2.

    Reference returns, exact: the optimum is 1. Whatever does not remember the cue, a random policy
    too, has the mean 2 / num_cues - 1, which is 0 with 2 cues. The rate of success is (1 + return)
    / 2. Actions in the corridor are free, so a policy that is shown its last action can carry the
    cue in its actions.
    """

    def __init__(self, length=10, num_cues=2, clock=False):
        if length < 0 or num_cues < 2:
            raise ValueError(
                f"length {length} must be at least 0 and num_cues {num_cues} at least 2"
            )
        self.length = length
        self.num_cues = num_cues
        self.clock = clock
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)

    def _observation(self):
        observation = np.zeros(self.num_cues + 1, np.float32)
        if self.num_steps == 0:
            observation[self.cue] = 1
        if self.clock:
            observation[-1] = max(0, 1 - self.num_steps / (self.length + 1))
        elif self.num_steps == self.length + 1:
            observation[-1] = 1
        return observation

    def reset(self, *, seed=None, options=None):
        """Return the first observation, which shows the cue, and {}. A seed fixes everything that
        follows."""
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(self.num_cues))
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action):
        """Return the next observation, reward -1.0, 0.0 or 1.0, terminated, False and {}."""
        self.num_steps += 1
        terminated = self.num_steps == self.length + 2
        reward = 0.0
        if terminated:
            reward = 1.0 if action == self.cue else -1.0
        return self._observation(), reward, terminated, False, {}


class TMazeEnv(gym.Env):
    """The passive T-maze: see at the start which of two goals is the right one, walk to the end of
    a corridor, and turn to it (Bakker 2001; the rewards are those of Ni et al. 2023,
    arXiv:2307.03864).

    Observation: float32 [4], one-hot: the goal is above, the goal is below, a place of the corridor
    (also the start, when one comes back to it), the junction. Action: 0 goes on, 1 goes back, 2
    turns to the goal above, 3 to that below. Reward: for each of the first `length` steps after
    which one is not as far as one could be -1 / length, at the last step 1 for the right turn at
    the junction, else 0. Episode end: terminated after `length + 1` steps, so that there is no time
    to lose.

    Args:
        length: steps from the start to the junction.
    Raises ValueError if length is below 1.

    Reference returns, exact: the optimum is 1; whoever always goes on and does not remember the
    goal has the mean 0.5, one who stands still -1.
    """

    observation_space = spaces.Box(0, 1, (4,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, length=10):
        if length < 1:
            raise ValueError(f"length {length} must be at least 1")
        self.length = length

    def _observation(self):
        seen = 3 if self.place == self.length else 2
        if self.num_steps == 0:
            seen = self.goal
        return np.eye(4, dtype=np.float32)[seen]

    def reset(self, *, seed=None, options=None):
        """Return the first observation, which shows the goal, and {}. A seed fixes everything that
        follows."""
        super().reset(seed=seed)
        self.goal = int(self.np_random.integers(2))
        self.place = self.num_steps = 0
        return self._observation(), {}

    def step(self, action):
        """Return the next observation, the reward, terminated, False and {}."""
        self.num_steps += 1
        terminated = self.num_steps == self.length + 1
        if terminated:
            reward = float(self.place == self.length and action == 2 + self.goal)
        else:
            if action < 2:
                self.place = min(max(self.place + (1, -1)[action], 0), self.length)
            reward = 0.0 if self.place == self.num_steps else -1 / self.length
        return self._observation(), reward, terminated, False, {}


class LastGraphsEnv(gym.Env):
    """Say which of the last `window` graphs has the largest marked value, at every step.

    One node of each graph is marked. The values of all nodes are uniform in [0, 1], but those of
    marked nodes are drawn again until they differ by at least 0.1 from the marked values of the
    `window` - 1 graphs before it in the episode.

    Observation: graph of nodes float32 [n, 2], (is marked, value), and edge_links int64
    [edges_per_node * n, 2], drawn at random and without meaning. n is drawn as in PoissonGraph-v0,
    from a mixture of Poisson distributions clipped to [1, max_nodes]. Action: 0 for the present
    graph, 1 for the one before it, and so on up to window - 1. Reward 1 for the graph with the
    largest marked value among those of this episode, otherwise 0: a graph from before the first
    step is always wrong. Episode end: terminated after `episode_length` steps.

    Args:
        window: number of graphs that are compared, 2 to 5.
        mean_nodes, weights: means and probabilities of the mixture of sizes.
        max_nodes: the largest graph that is drawn.
    Raises ValueError if window is not 2 to 5, episode_length is below 1, or the weights do not sum
    to 1.

    Reference returns with the default 16 steps:

    | window | random = 16 / window | best without memory | optimum |
    | --- | --- | --- | --- |
    | 2 | 8.00 | 12.55 | 16 |
    | 3 | 5.33 | 9.19 | 16 |
    | 4 | 4.00 | 7.48 | 16 |
    | 5 | 3.20 | 6.47 | 16 |

    Best without memory: the best function from the present marked value to an action (the step
    number is not observed), found from how often each answer is right in each of 100 bins of the
    value in 200,000 simulated episodes (`best_memoryless`). It answers 0 above a threshold (0.57
    for window 3) and 1 below it.
    """

    def __init__(
        self,
        window=3,
        episode_length=16,
        mean_nodes=(7, 25, 120),
        weights=(0.9, 0.09, 0.01),
        max_nodes=200,
        edges_per_node=2,
    ):
        if not 2 <= window <= 5 or episode_length < 1:
            raise ValueError(
                f"window {window} must be 2 to 5 and episode_length {episode_length} at least 1"
            )
        if len(mean_nodes) != len(weights) or not np.isclose(sum(weights), 1):
            raise ValueError(
                f"weights {weights} must be as many as mean_nodes {mean_nodes} and sum to 1"
            )
        self.window = window
        self.episode_length = episode_length
        self.mean_nodes = np.asarray(mean_nodes, float)
        self.weights = np.asarray(weights, float)
        self.max_nodes = max_nodes
        self.edges_per_node = edges_per_node
        node_space = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space = LinkGraph(node_space, edge_space=None)
        self.action_space = spaces.Discrete(window)

    def _draw_episode(self):
        """All graphs of an episode, and one more to be seen after its last step."""
        rng = self.np_random
        num_graphs = self.episode_length + 1
        component = rng.choice(len(self.weights), num_graphs, p=self.weights)
        sizes = rng.poisson(self.mean_nodes[component]).clip(1, self.max_nodes)
        starts = starts_of(sizes)
        marked_value = draw_values(rng, num_graphs, self.window)
        marked = starts[:-1] + rng.integers(sizes)
        self.nodes = np.zeros((starts[-1], 2), np.float32)
        self.nodes[:, 1] = rng.random(starts[-1], np.float32)
        self.nodes[marked, 0] = 1
        self.nodes[marked, 1] = marked_value
        graph_size = np.repeat(sizes, sizes * self.edges_per_node)  # of each edge's graph
        uniform = rng.random((len(graph_size), 2))
        self.links = (uniform * graph_size[:, None]).astype(np.int64)
        answers = answers_of(marked_value[None], self.window)
        self.answers = answers[0].tolist()
        self.starts = starts.tolist()  # Python integers slice faster

    def _observation(self):
        start = self.starts[self.num_steps]
        end = self.starts[self.num_steps + 1]
        links = self.links[start * self.edges_per_node : end * self.edges_per_node]
        return spaces.GraphInstance(self.nodes[start:end], None, links)

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self._draw_episode()
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action):
        """Return the next observation, reward 0.0 or 1.0, terminated, False and {}."""
        reward = float(action == self.answers[self.num_steps])
        self.num_steps += 1
        terminated = self.num_steps >= self.episode_length
        return self._observation(), reward, terminated, False, {}

    def best_action(self):
        """The action that earns 1 now."""
        return self.answers[self.num_steps]


def draw_values(rng, num_graphs, window):
    """Marked values, float [num_graphs]: uniform, each at least MIN_GAP from the window - 1 values
    before it."""
    values = []
    for _ in range(num_graphs):
        recent = values[1 - window :]
        value = rng.random()
        while any(abs(value - other) < MIN_GAP for other in recent):
            value = rng.random()
        values.append(value)
    return np.array(values)


def answers_of(values, window):
    """The right actions, int [episodes, T], for marked values [episodes, T]."""
    num_episodes, num_steps = values.shape
    shifted = np.full((window, num_episodes, num_steps), -1.0)
    for i in range(window):
        shifted[i, :, i:] = values[:, : num_steps - i]  # [:, t] is the value i steps before t
    return shifted.argmax(0)


def best_memoryless(window=3, episode_length=16, num_episodes=200_000, num_bins=100, seed=0):
    """(return, actions int [num_bins]) of the best policy that sees the present marked value only,
    by simulation.

    The actions belong to equal intervals of the value; the return is a mean over the same
    episodes."""
    rng = np.random.default_rng(seed)
    values = np.full((num_episodes, episode_length), np.nan)
    for t in range(episode_length):
        todo = np.arange(num_episodes)
        first = max(0, t + 1 - window)
        while len(todo):
            new = rng.random(len(todo))
            values[todo, t] = new
            gap = np.abs(new[:, None] - values[todo, first:t])
            todo = todo[(gap < MIN_GAP).any(1)]
    bins = (values * num_bins).astype(int)
    answers = answers_of(values, window)
    count = np.zeros((num_bins, window), int)  # how often an answer is right
    np.add.at(count, (bins.ravel(), answers.ravel()), 1)
    mean_return = count.max(1).sum() / num_episodes
    return mean_return, count.argmax(1)
