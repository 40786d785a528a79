"""Every kind of observation, every kind of action and every script learn a task of which the
optimum is known."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import MASK, graph_space, vector

from cleanrl_graph import ppo_framestack, ppo_graph, ppo_gtrxl, ppo_lstm_sparse, services
from cleanrl_graph.services import arguments
from cleanrl_graph.services.plot import episodes_of

COLOURS = np.eye(4, dtype=np.float32)
SET = spaces.Sequence(vector(), stack=True)
IMAGE = spaces.Box(0, 255, (8, 8, 1), np.uint8)
MANY = {"graph": graph_space(vector(1), features=2), "vector": vector(2), "image": IMAGE}


class Show(gym.Env):
    """Shows a new random number 0..3 in each of 4 steps. The number shown `delay` steps before is
    to be expressed by the action, for a reward of at most 1, so the best return is 4 - delay;
    without memory of that step an answer is right by chance, one time in four."""

    observations = {
        "box": vector(4),
        "discrete": spaces.Discrete(4, start=-1),
        "multidiscrete": spaces.MultiDiscrete([2, 2]),
        "multibinary": spaces.MultiBinary(2),
        "image": IMAGE,
        "dict": spaces.Dict(high=spaces.Discrete(2), low=vector(1)),
        "tuple": spaces.Tuple((spaces.MultiBinary(1), SET)),
        "graph": graph_space(features=4),
        "graph_edges": graph_space(vector(4), features=4),
        "sequence": spaces.Sequence(vector(5), stack=True),
        "graph_image_vector": spaces.Dict(MANY),
    }
    actions = {
        "discrete": spaces.Discrete(4, start=1),
        "mask": spaces.Discrete(4),
        "info_mask": spaces.Discrete(4),
        "multidiscrete": spaces.MultiDiscrete([2, 2]),
        "bits": spaces.MultiBinary(2),
        "box": vector(2),
        "mixed": spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple((vector(1),))),
        "element": spaces.Discrete(4),
        "avail_actions": spaces.Discrete(4),
        "tuple": spaces.Tuple([spaces.Discrete(4)] * 2),
    }

    def __init__(self, observation, action, delay=0):
        self.observation, self.action, self.delay = observation, action, delay
        space, self.action_space = self.observations[observation], self.actions[action]
        extra = {
            "element": {"action_mask": MASK},
            "mask": {"action_mask": spaces.MultiBinary(4)},
            "avail_actions": {"avail_actions": spaces.Sequence(vector(4), stack=False)},
        }.get(action)
        self.observation_space = spaces.Dict(obs=space, **extra) if extra else space

    def picture(self, bits):
        """A bright spot in one of the quadrants of a noisy image."""
        image = self.np_random.integers(0, 60, (8, 8, 1), dtype=np.uint8)
        image[4 * bits[0] : 4 * bits[0] + 4, 4 * bits[1] : 4 * bits[1] + 4] += 150
        return image

    def graph(self, number):
        """The four colours in random order; there are edges from that of `number` to all others."""
        order = self.np_random.permutation(4)
        sender = int(np.flatnonzero(order == number)[0])
        links = np.array([[sender, i] for i in range(4) if i != sender])
        return spaces.GraphInstance(COLOURS[order], None, links), order

    def show(self, number):
        """(observation, the colours of its elements)"""
        rng, bits = self.np_random, [number // 2, number % 2]
        sign = lambda bit: np.float32((2 * bit - 1) * rng.uniform(0.2, 1))
        noise = lambda *shape: rng.uniform(-0.3, 0.3, shape).astype(np.float32)
        if self.observation == "box":
            return COLOURS[number] * 0.7 + noise(4), None
        if self.observation == "discrete":
            return number - 1, None
        if self.observation in ("multidiscrete", "multibinary"):
            return np.array(bits, self.observations[self.observation].dtype), None
        if self.observation == "image":
            return self.picture(bits), None
        if self.observation == "dict":
            return {"high": bits[0], "low": np.array([sign(bits[1])])}, None
        if self.observation == "tuple":  # the low bit is the sign of all numbers of a set
            numbers = rng.uniform(0.5, 1, rng.integers(1, 4)).astype(np.float32)
            return (np.array(bits[:1], np.int8), sign(bits[1]) * numbers), None
        if self.observation == "graph":
            return self.graph(number)
        if self.observation == "graph_edges":  # of the colour of the edges
            num = int(rng.integers(1, 5))
            links = rng.integers(num, size=(rng.integers(1, 6), 2))
            nodes, edges = COLOURS[rng.integers(4, size=num)], COLOURS[[number] * len(links)]
            return spaces.GraphInstance(nodes, edges, links), None
        if self.observation == "sequence":  # the four colours, one of which has a flag
            order = rng.permutation(4)
            return np.column_stack([COLOURS[order], order == number]).astype(np.float32), order
        # the sign of the edge's feature; the side of the bright spot, or where there is none a sign
        # in the vector
        edges, links = np.array([[sign(bits[1])]]), np.array([[0, 1]])
        graph = spaces.GraphInstance(noise(int(rng.integers(2, 4)), 2), edges, links)
        image, side = self.picture([bits[0], int(rng.integers(2))]), np.zeros(2, np.float32)
        if rng.random() < 0.5:
            image[:], side[0] = rng.integers(0, 60, image.shape), sign(bits[0])
        return {"graph": graph, "vector": side, "image": image}, None

    def observe(self):
        self.numbers.append(int(self.np_random.integers(4)))
        obs, self.order = self.show(self.numbers[-1])
        self.target = self.numbers[-1 - self.delay] if len(self.numbers) > self.delay else None
        mask = (self.np_random.random(4) < 0.5).astype(np.int8)
        mask[0 if self.target is None else self.target] = 1
        self.mask = mask if self.action in ("mask", "info_mask") else np.ones(4, np.int8)
        if self.action in ("element", "mask"):
            obs = {"obs": obs, "action_mask": self.mask}
        if self.action == "avail_actions":
            self.order = self.np_random.permutation(4)
            obs = {"obs": obs, "avail_actions": tuple(COLOURS[self.order])}
        return obs, {"action_mask": self.mask} if self.action == "info_mask" else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.numbers = []
        return self.observe()

    def reward(self, action):
        high, low = self.target // 2, self.target % 2
        if self.action in ("multidiscrete", "bits"):
            return (int(action[0] == high) + int(action[1] == low)) / 2
        if self.action == "box":
            return 1 - float(((action - [high - 0.5, low - 0.5]) ** 2).sum())
        if self.action == "mixed":
            return (int(action["a"] == high) + 1 - float((action["b"][0][0] - low + 0.5) ** 2)) / 2
        if self.action == "tuple":  # the second part says how much more than the first it is
            return float((action[0] + action[1]) % 4 == self.target)
        if self.action in ("element", "avail_actions"):
            return float(self.order[action] == self.target)
        return float(action - self.action_space.start == self.target)

    def step(self, action):
        is_masked = self.action in ("mask", "info_mask") and not self.mask[action]
        assert not is_masked, "a masked action was taken"
        reward = 0.0 if self.target is None else self.reward(action)
        end, truncated = len(self.numbers) == 4, bool(self.np_random.random() < 0.5)
        obs, info = self.observe()
        return obs, reward, end and not truncated, end and truncated, info


class Agree(gym.Env):
    """Both parts of the action must agree, and must not be what they were one step before, which is
    not observed: a chain of a uniform first part and its copy earns 3/4 a step; independent parts
    earn 1/4."""

    observation_space, action_space = vector(1), spaces.Tuple([spaces.Discrete(4)] * 2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, -1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward = float(action[0] == action[1] and action[0] != self.last)
        self.t, self.last = self.t + 1, action[0]
        return np.zeros(1, np.float32), reward, self.t == 16, False, {}


class Delay(gym.Env):
    """A graph in which the first choice of a node is paid in the last of 4 steps only."""

    observation_space = spaces.Dict(graph=graph_space(features=2), action_mask=MASK)
    action_space = spaces.Discrete(5)

    def observe(self):
        num = int(self.np_random.integers(2, 6))
        nodes = np.zeros((num, 2), np.float32)
        self.good = int(self.np_random.integers(num))
        nodes[self.good, 0] = 1
        nodes[:, 1] = self.t / 4
        graph = spaces.GraphInstance(nodes, None, None)
        return {"graph": graph, "action_mask": np.ones(num, np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.hits = 0, 0
        return self.observe(), {}

    def step(self, action):
        self.hits += action == self.good
        self.t += 1
        end = self.t == 4
        return self.observe(), float(self.hits) if end else 0.0, end, False, {}


for env in (Show, Agree, Delay):
    gym.register(f"{env.__name__}-v0", entry_point=env)

SCRIPTS = {
    "graph": (ppo_graph, {}),
    "framestack": (ppo_framestack, dict(obs_shifts="-1:0", action_shifts="", reward_shifts="")),
    "lstm": (ppo_lstm_sparse, dict(lstm_dim=32)),
    "gtrxl": (ppo_gtrxl, dict(dim=32, num_heads=2, num_layers=1, memory_length=3, gate="none")),
}
CASES = [  # script, observation, action, flags
    ("graph", "graph", "element", {"total_timesteps": 4096}),
    ("graph", "image", "discrete", {"total_timesteps": 6144}),
    ("graph", "graph_edges", "discrete", {"total_timesteps": 6144}),
    ("graph", "multibinary", "tuple", {"autoregressive": True}),
    ("graph", "box", "bits", {}),
    ("graph", "dict", "mixed", {}),
    ("graph", "discrete", "box", {"state_dependent_std": True}),
    ("framestack", "discrete", "multidiscrete", {"total_timesteps": 4096}),
    ("framestack", "graph_image_vector", "discrete", {"total_timesteps": 6144}),
    ("framestack", "tuple", "tuple", {"autoregressive": True}),
    ("lstm", "box", "info_mask", {}),
    ("lstm", "multidiscrete", "box", {}),
    ("lstm", "discrete", "avail_actions", {}),
    ("gtrxl", "dict", "mask", {"total_timesteps": 6144}),
    ("gtrxl", "sequence", "discrete", {"total_timesteps": 12288, "learning_rate": 2e-3}),
]


def learn(run_dir, env_id, env_kwargs, script=ppo_graph, **flags):
    """(mean return of the last 200 episodes of training, mean return of the greedy episodes)"""
    args = dict(num_envs=16, num_steps=32, total_timesteps=20_000, learning_rate=3e-3, gamma=0.0)
    args |= dict(hidden_dims=(32,), gnn_dim=16, gnn_layers=1, eval_episodes=50, cuda=False)
    args |= dict(env_id=env_id, env_kwargs=env_kwargs, run_dir=str(run_dir), checkpoint_every=0)
    rows = services.run(script, arguments.args_of(script, **args | flags))
    returns = [ret for _, _, ret, _ in episodes_of(run_dir)]
    return np.mean(returns[-200:]), np.mean([row["return"] for row in rows] or 0.0)


def share_of_the_best(name, observation, action, delay, flags, run_dir):
    """The mean return of 64 greedy episodes after a short training, 1 for the best there is."""
    script, memory = SCRIPTS[name]
    small = dict(num_envs=32, num_steps=8, total_timesteps=8192, learning_rate=5e-3, ent_coef=0.0)
    kwargs = {"observation": observation, "action": action, "delay": delay}
    small |= memory | dict(eval_episodes=64) | flags
    return learn(run_dir, "Show-v0", kwargs, script, **small)[1] / (4 - delay)


@pytest.mark.slow
@pytest.mark.parametrize("name, observation, action, flags", CASES)
def test_optimum_is_reached(name, observation, action, flags, tmp_path):
    """At least 95% of the best return; scripts with a memory see what counts too early."""
    delay = int(name != "graph")
    assert 0.95 <= share_of_the_best(name, observation, action, delay, flags, tmp_path) <= 1


def test_memory_is_needed(tmp_path):
    """The script without one guesses each of the two parts, right one time in two."""
    few = {"total_timesteps": 2048}
    assert share_of_the_best("graph", "discrete", "multidiscrete", 1, few, tmp_path) < 0.65


def test_every_kind_is_learned():
    """The cases have every script, and every kind of observation and of action."""
    kinds = [set(column) for column in list(zip(*CASES))[:3]]
    assert kinds == [set(SCRIPTS), set(Show.observations), set(Show.actions)]


@pytest.mark.parametrize(
    "steps, least", [(8192, 8), pytest.param(20_000, 12, marks=pytest.mark.slow)]
)
def test_choice_of_a_node(tmp_path, steps, least):
    """The node with most flagged in-neighbours; the optimum is 16, and chance earns 4.4."""
    flags = {"num_features": 2}, ppo_graph
    sampled, greedy = learn(tmp_path, "envs:PoissonGraph-v0", *flags, total_timesteps=steps)
    assert sampled > least - 2 and greedy > least


@pytest.mark.slow
@pytest.mark.parametrize("key, stack", [("set", True), ("avail_actions", False)])
def test_choice_of_an_element(tmp_path, key, stack):
    """The one with the largest product with a query; the optimum is 1."""
    kwargs, more = {"key": key, "stack": stack, "max_size": 16}, {"eval_episodes": 200}
    assert learn(tmp_path, "envs:BestOfSet-v0", kwargs, total_timesteps=60_000, **more)[1] > 0.85


@pytest.mark.slow
def test_delayed_reward(tmp_path):
    """Credit reaches the first of four choices through GAE; the optimum is 4."""
    assert learn(tmp_path, "Delay-v0", {}, gamma=1.0)[1] > 3.6


@pytest.mark.slow
def test_autoregressive_parts(tmp_path):
    """Parts that agree at random earn up to 12.25 as a chain, 4.27 if independent."""
    flags = {"total_timesteps": 40_000, "gamma": 0.9, "ent_coef": 0.02, "eval_episodes": 0}
    bound = 16**2 / (4 * 15)
    assert learn(tmp_path / "chain", "Agree-v0", {}, autoregressive=True, **flags)[0] > 2 * bound
    assert learn(tmp_path / "independent", "Agree-v0", {}, **flags)[0] < 1.3 * bound


@pytest.mark.slow
def test_autoregressive_nodes(tmp_path):
    """Choose a node, then the node that matches it, which independent heads cannot."""
    kwargs = {"num_pairs": 4, "num_colours": 4, "mean_grey": 1}
    bound = gym.make("cleanrl_graph.envs:PairNodes-v0", **kwargs).unwrapped.best_independent_return
    flags = {"total_timesteps": 50_000, "gamma": 0.9, "ent_coef": 0.02, "eval_episodes": 0}
    assert (
        learn(tmp_path, "envs:PairNodes-v0", kwargs, autoregressive=True, **flags)[0] > 1.5 * bound
    )
