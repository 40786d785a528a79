"""PettingZoo-v0: a parallel environment of PettingZoo, in which each agent is a row of a set or
graph.

    python cleanrl_graph/ppo_graph.py --env-id envs:PettingZoo-v0 --env-kwargs \
        '{"env": "mpe2.simple_spread_v3", "N": 3, "max_cycles": 25, "graph": "complete"}'

The package of the environment is imported when one is made, and PettingZoo with it. A class with
the methods of PettingZoo's ParallelEnv needs neither.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from .fitting import keys_of, say
from .toy import LinkGraph, mask_space

MASK = "action_mask"
ID_BOUND = 2**62
ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class PettingZooEnv(gym.Env):
    """All agents of a parallel environment at once: one row and one action per living agent.

    Observation, a dict of n rows, one per living agent, in the order of `possible_agents` (of
    `agents` where the environment has no such list).
        "agents": a Sequence with stack=True, what each agent observes. With `graph` it is "graph"
            instead, whose nodes are the agents.
        "node_ids": int64 [n], the agent's index in `possible_agents`. An agent that comes back in
            the episode in which it ended has a new id: its index plus the length of the list, times
            two at the next return, and so on. Without `possible_agents` ids count the agents in the
            order in which they appear in the episode.
        "action_mask": int8 [n, options], where there are masks. PettingZoo's conventions are read:
            a Dict observation with an `action_mask` (beside `observation`, which stands alone
            then), or an `action_mask` in an agent's info, in the first reset already. An agent
            without one may do everything.
    Action: a tuple or array with one action per row. Reward: the mean of the rewards of the agents
    that acted. info["rewards"]: float64 [n], the reward of each row of the observation that was
    acted on.

    Episode end: when no agent is left. It is truncated if agents were truncated (and not
    terminated) in the last step: the last observation has the rows of these, with their ids, so
    that their values can be bootstrapped. It is terminated otherwise, and the last observation has
    no rows. An agent that ends while others go on has no row from then on. If it was truncated,
    info["truncated"] has its id and info["last_observation"] its last row, beside those of the
    others: ppo_graph_agents.py bootstraps its value.

    Agents of several kinds, which are pairs of observation and action space: vectors are padded
    with zeros to the longest, and a one-hot kind follows them. Other observations must have equal
    spaces; then a row is a Dict of `kind` and `observation`. Discrete actions of different numbers
    become those of the largest, and a mask says which an agent has. Other actions must have equal
    spaces.

    The environment is reset once when it is made. This shows masks in infos, the width of edge
    features and, without `possible_agents`, the kinds of agents.

    Args:
        env: "module", whose function `parallel_env` makes the environment, or "module:function", or
            a function.
        graph: None for a set, "complete" for a graph with links between all living agents, both
            ways, or "module:function" for the links of a function, called as function(parallel_env,
            observations) with the observations of the rows (agent -> what it observes, in the order
            of the rows). It returns (edge_links, edges): int [E, 2], pairs of row numbers, and
            float [E, F] or None. F is that of the first reset, and edges is [0, F] where there are
            no links. In a graph other observations than Box and Discrete are flattened, as by
            gymnasium's `flatten`. In a set an agent sees of the others one vector, which pools all.
        render_mode: that of the parallel environment.
        kwargs: others are those of the parallel environment.
    Raises gymnasium.error.Error for names that cannot be imported, unlike spaces, and whatever else
    an environment or `graph` returns that does not fit.
    """

    metadata = {"render_modes": ["human", "rgb_array", "ansi"], "render_fps": 10}

    def __init__(self, env, graph=None, render_mode=None, **kwargs):
        make = (
            env
            if callable(env)
            else import_function("env", env, "module or module:function", "parallel_env")
        )
        self.find_links = None
        if graph == "complete":
            self.find_links = complete
        elif graph is not None:
            self.find_links = import_function("graph", graph, "complete or module:function")
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        self.render_mode = render_mode
        self.parallel_env = make(**kwargs)
        if not is_parallel(self.parallel_env):
            raise gym.error.Error(
                f"env {env!r}: {type(self.parallel_env).__name__} is no parallel environment of "
                "PettingZoo"
            )
        own = getattr(self.parallel_env, "metadata", None) or {}
        self.metadata = {**self.metadata, **own}
        self.kind_of = {}  # agent -> number of its kind

        observations, infos = self.parallel_env.reset()
        agents = list(self.parallel_env.agents)
        possible_agents = getattr(self.parallel_env, "possible_agents", None)
        self.kinds = kinds_of(self.parallel_env, possible_agents or agents)
        self.row_space = common_space(self.kinds)
        self.flattens = graph is not None and not isinstance(
            self.row_space, (spaces.Box, spaces.Discrete)
        )
        self.action_space = spaces.Sequence(common_action(self.kinds))
        self.num_options = self._num_options(infos)
        self.edge_width = None  # of a graph without edge features, too
        if self.find_links and agents:
            shown = {agent: observations[agent] for agent in agents}
            _, edges = read_links(self.find_links(self.parallel_env, shown))
            if edges is not None:
                self.edge_width = edges.shape[1]
        self.observation_space = self._make_space()

    def _num_options(self, infos):
        """The number of entries of a row of the mask, 0 where there are no masks."""
        numbers = {kind.num_options for kind in self.kinds}
        has_mask = len(numbers) > 1
        for kind in self.kinds:
            has_mask |= kind.has_mask
        for info in infos.values():
            has_mask |= MASK in (info or {})
        if not has_mask:
            return 0
        if max(numbers) == 0:
            space = self.kinds[0].action
            raise gym.error.Error(f"{MASK}: actions {space} cannot be masked, Discrete ones can")
        return max(numbers)

    def _make_space(self):
        node_space = self.row_space
        if self.flattens:
            node_space = spaces.flatten_space(node_space)
        id_space = spaces.Box(0, ID_BOUND, (), np.int64)
        parts = {}
        if self.find_links:
            edge_space = None
            if self.edge_width is not None:
                edge_space = spaces.Box(-np.inf, np.inf, (self.edge_width,), np.float32)
            parts["graph"] = LinkGraph(node_space, edge_space)
        else:
            parts["agents"] = spaces.Sequence(node_space, stack=True)
        parts["node_ids"] = spaces.Sequence(id_space, stack=True)
        if self.num_options:
            parts[MASK] = mask_space(self.num_options)
        return spaces.Dict(parts)

    def reset(self, *, seed=None, options=None):
        """The observation of all agents, and {}."""
        super().reset(seed=seed)
        observations, infos = self.parallel_env.reset(seed=seed, options=options)
        possible_agents = getattr(self.parallel_env, "possible_agents", None)
        self.index_of = None  # agent -> its index in possible_agents
        if possible_agents:
            self.index_of = {agent: k for k, agent in enumerate(possible_agents)}
        self.lives = Counter()  # agent -> how often it began in this episode
        self.ids = {}  # agent -> id, of the rows of the last observation, in their order
        agents = self._in_order(self.parallel_env.agents)
        if not agents:
            raise gym.error.Error("reset: the environment has no agents")
        self._number(agents)
        return self._observe(observations, infos), {}

    def step(self, actions):
        """Steps all agents of the last observation: see the class."""
        acted = list(self.ids)
        if len(actions) != len(acted):
            raise gym.error.Error(
                f"{len(actions)} actions where {len(acted)} are needed, one for each of {acted}"
            )
        chosen = {}
        for agent, action in zip(acted, actions):
            chosen[agent] = self._own_action(agent, action)
        outcome = self.parallel_env.step(chosen)
        observations, rewards, terminations, truncations, infos = outcome

        living = []
        for agent in self.parallel_env.agents:
            if not terminations.get(agent) and not truncations.get(agent):
                living.append(agent)
        is_over = not living
        cut = [agent for agent in acted if truncations.get(agent) and not terminations.get(agent)]
        more = {} if is_over else self._last_of(cut, living, observations, infos)
        if is_over:
            rows = cut
        else:
            rows = self._in_order(living)
        self._number(rows)
        observation = self._observe(observations, infos, is_over)
        own = np.array([float(rewards.get(agent, 0.0)) for agent in acted])
        terminated = is_over and not rows
        truncated = is_over and not terminated
        return observation, float(own.mean()), terminated, truncated, {"rewards": own, **more}

    def _last_of(self, cut, living, observations, infos):
        """info of the agents that were truncated alone: their ids, and an observation of them and
        the others that acted and are still there."""
        cut = [agent for agent in cut if agent in observations]
        if not cut:
            return {}
        ids = self.ids
        self.ids = {agent: ids[agent] for agent in ids if agent in cut or agent in living}
        last = self._observe(observations, infos, is_over=True)
        self.ids = ids
        return {"truncated": np.array([ids[agent] for agent in cut]), "last_observation": last}

    def render(self):
        """What the parallel environment renders."""
        return self.parallel_env.render()

    def close(self):
        self.parallel_env.close()

    def _in_order(self, agents):
        if self.index_of is None:
            return list(agents)
        for agent in agents:
            if agent not in self.index_of:
                raise gym.error.Error(f"agent {agent!r} is not in possible_agents")
        return sorted(agents, key=self.index_of.get)

    def _number(self, agents):
        """Makes `agents` the rows: those of the last step keep their ids, others get new ones."""
        ids = {}
        for agent in agents:
            if agent in self.ids:
                ids[agent] = self.ids[agent]
            elif self.index_of is None:
                ids[agent] = self.lives.total()
                self.lives[agent] += 1
            else:
                ids[agent] = self.index_of[agent] + self.lives[agent] * len(self.index_of)
                self.lives[agent] += 1
        self.ids = ids

    def _kind(self, agent):
        """The number of its kind."""
        if agent not in self.kind_of:
            pair = spaces_of(self.parallel_env, agent)
            known = [kind.spaces for kind in self.kinds]
            if pair not in known:
                raise gym.error.Error(f"agent {agent!r}: its spaces {pair} are not among {known}")
            self.kind_of[agent] = known.index(pair)
        return self.kind_of[agent]

    def _own_action(self, agent, action):
        own = self.kinds[self._kind(agent)].action
        start = getattr(own, "start", 0) - getattr(self.action_space.feature_space, "start", 0)
        return action + start if isinstance(own, spaces.Discrete) else action

    def _observe(self, observations, infos, is_over=False):
        """The observation of the present rows."""
        agents = list(self.ids)
        for agent in agents:
            if agent not in observations:
                raise gym.error.Error(f"agent {agent!r}: it has no observation")
        rows = [self._row(agent, observations[agent]) for agent in agents]
        result = {"node_ids": np.array(list(self.ids.values()), np.int64)}
        nodes = self._stack(rows)
        if self.find_links:
            links, edges = self._links(agents, observations)
            result["graph"] = spaces.GraphInstance(nodes, edges, links)
        else:
            result["agents"] = nodes
        if self.num_options:
            mask = np.zeros((len(agents), self.num_options), np.int8)
            for row, agent in zip(mask, agents):
                self._read_mask(row, agent, observations[agent], infos.get(agent) or {})
            if is_over:  # who is truncated may have nothing to choose
                mask[~mask.any(1)] = 1
            result[MASK] = mask
        elif any(MASK in (infos.get(agent) or {}) for agent in agents):
            raise gym.error.Error(f"infos have an {MASK}, those of the first reset had none")
        return result

    def _row(self, agent, obs):
        """An element of the rows' space: what the agent observes, without its mask."""
        number = self._kind(agent)
        kind = self.kinds[number]
        if kind.has_mask:
            obs = unmasked(obs)
        needed = kind.observation.shape
        if needed is not None and np.shape(obs) != needed:
            raise gym.error.Error(
                f"agent {agent!r}: an observation of shape {np.shape(obs)} where {needed} is "
                "declared"
            )
        if len(self.kinds) == 1:
            row = obs
        elif isinstance(self.row_space, spaces.Box):
            row = np.zeros(self.row_space.shape, np.float32)
            row[: len(obs)] = obs
            row[number - len(self.kinds)] = 1.0
        else:
            row = {"kind": number, "observation": obs}
        return spaces.flatten(self.row_space, row) if self.flattens else row

    def _stack(self, rows):
        """The rows one after the other: an array [n, ...], or a dict or tuple of such."""
        space = self.row_space
        if self.flattens:
            space = spaces.flatten_space(space)
        values = create_empty_array(space, len(rows))
        if not rows:
            return values
        try:
            return concatenate(space, rows, values)
        except (KeyError, TypeError, ValueError) as error:  # of many kinds
            problem = f"observations do not fit {self.row_space}: {error}"
            raise gym.error.Error(problem) from error

    def _links(self, agents, observations):
        """(edge_links int64 [E, 2], edges float32 [E, F] or None) among the rows."""
        links = np.zeros((0, 2), np.int64)
        edges = None
        if agents:
            shown = {agent: observations[agent] for agent in agents}
            links, edges = read_links(self.find_links(self.parallel_env, shown))
        width = self.edge_width
        if not len(links):
            edges = None if width is None else np.zeros((0, width), np.float32)
        found = None if edges is None else edges.shape[1]
        if found != width:
            raise gym.error.Error(f"graph: edges have {found} features, the first had {width}")
        return links, edges

    def _read_mask(self, row, agent, obs, info):
        """Writes which options an agent has into its row, int8 [options]."""
        kind = self.kinds[self._kind(agent)]
        mask = np.ones(kind.num_options)
        if kind.has_mask:
            mask = flat_mask(obs[MASK])
        elif info.get(MASK) is not None:
            mask = flat_mask(info[MASK])
        if len(mask) != kind.num_options:
            raise gym.error.Error(
                f"agent {agent!r}: {MASK} has {len(mask)} entries for {kind.action}"
            )
        row[: len(mask)] = mask != 0


class Together:
    """The parallel environment of PettingZoo that a gymnasium environment is whose observation and
    action are Tuples or Dicts with an entry for each agent. Rewards and ends may be one for all, or
    a list or dict. Where a Dict observation lacks an agent it has gone; an agent that has ended in
    a Tuple repeats its last action."""

    def __init__(self, env: gym.Env):
        self.env = env
        self.metadata = env.metadata
        self.possible_agents = keys_of(env.action_space)
        self.is_dict = isinstance(env.action_space, spaces.Dict)

    def observation_space(self, agent):
        return self.env.observation_space[agent]

    def action_space(self, agent):
        return self.env.action_space[agent]

    def reset(self, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        self.actions = {}
        observations = self.each(observation)
        self.agents = [agent for agent in self.possible_agents if agent in observations]
        return observations, self.infos(info)

    def step(self, actions):
        self.actions |= actions
        chosen = actions
        if not self.is_dict:
            chosen = tuple(self.actions[agent] for agent in self.possible_agents)
        observation, *outcome, info = self.env.step(chosen)
        observations = self.each(observation)
        rewards, terminations, truncations = map(self.each, outcome)
        living = []
        for agent in self.possible_agents if self.is_dict else self.agents:
            has_ended = terminations.get(agent) or truncations.get(agent)
            if agent in observations and not has_ended:
                living.append(agent)
        self.agents = living
        return observations, rewards, terminations, truncations, self.infos(info)

    def each(self, value):
        """agent -> its entry. A dict may have an entry for `__all__`, as RLlib's have."""
        if isinstance(value, dict):
            is_over = value.get("__all__")
            return dict.fromkeys(self.possible_agents, True) if is_over else value
        if np.ndim(value) == 0 and not isinstance(value, (tuple, list)):
            return dict.fromkeys(self.possible_agents, value)
        return dict(zip(self.possible_agents, value))

    def infos(self, info):
        """agent -> its info, where info is a dict of dicts."""
        own = {}
        for agent in self.possible_agents:
            entry = info.get(agent) if isinstance(info, dict) else None
            own[agent] = entry if isinstance(entry, dict) else {}
        return own

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()


def with_agents(env: gym.Env) -> gym.Env:
    """A set of agents, if both spaces are Tuples or Dicts with the same keys, which is said."""
    agents = keys_of(env.action_space)
    if not agents or agents != keys_of(env.observation_space):
        return env
    say(f"makes the {len(agents)} agents of observation and action a set, one row each")
    return PettingZooEnv(lambda: Together(env))


class Kind(NamedTuple):
    """Agents with the same spaces."""

    spaces: tuple[gym.Space, gym.Space]  # observation and action space, as declared
    agent: Any  # the first one
    observation: gym.Space  # without the mask
    action: gym.Space
    has_mask: bool  # in its observation
    num_options: int  # of discrete actions, 0 of others


def import_function(key: str, name: Any, needed: str, default: str = "") -> Callable:
    """The function that "module:function", or "module" if there is a default, names.
    gymnasium.error.Error says what is wrong with the keyword argument `key`, and what is needed."""
    module_name, _, function_name = str(name).partition(":")
    function_name = function_name or default
    is_name = function_name.isidentifier()
    for part in module_name.split("."):
        is_name &= part.isidentifier()
    if not is_name:
        raise gym.error.Error(f"{key} is {name!r}; {needed} is needed")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        package = missing.partition(".")[0]
        problem = f"there is no module {missing}"
        if missing == package:
            problem += f"; if its package is not installed, pip install {package}"
        raise gym.error.DependencyNotInstalled(f"{key} {name!r}: {problem}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise gym.error.Error(f"{key} {name!r}: {module_name} has no function {function_name}")
    return function


def is_parallel(env: Any) -> bool:
    """Whether it has the methods of PettingZoo's parallel environments, and is no AECEnv, in which
    agents take turns."""
    for name in ("reset", "step", "observation_space", "action_space"):
        if not callable(getattr(env, name, None)):
            return False
    return not hasattr(env, "agent_iter")


def spaces_of(env: Any, agent: Any) -> tuple[gym.Space, gym.Space]:
    """(observation space, action space) of an agent."""
    return env.observation_space(agent), env.action_space(agent)


def kinds_of(env: Any, agents: list) -> list[Kind]:
    """The kinds of the agents, in the order of the first agent of each."""
    kinds = []
    known = []
    for agent in agents:
        pair = spaces_of(env, agent)
        if pair in known:
            continue
        observation, action = pair
        has_mask = isinstance(observation, spaces.Dict) and MASK in observation.keys()
        if has_mask:
            observation = unmasked_space(observation)
        if not is_stackable(observation):
            raise gym.error.Error(
                f"agent {agent!r}: observations {observation} are not supported (Box, Discrete, "
                "MultiDiscrete, MultiBinary, Dict and Tuple of these are)"
            )
        known.append(pair)
        kinds.append(Kind(pair, agent, observation, action, has_mask, num_options(action)))
    if not kinds:
        raise gym.error.Error("the environment has no agents, neither possible ones nor living")
    return kinds


def num_options(space: gym.Space) -> int:
    """How many entries a mask of the actions has."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return 0


def is_stackable(space: gym.Space) -> bool:
    """Whether rows of the space can stand in arrays."""
    if isinstance(space, spaces.Dict):
        return all(map(is_stackable, space.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(is_stackable, space))
    return isinstance(space, ARRAYS)


def unmasked(obs: dict) -> Any:
    """An observation without its mask. What stands alone as `observation` needs no dict."""
    rest = {key: value for key, value in obs.items() if key != MASK}
    return rest["observation"] if list(rest) == ["observation"] else rest


def unmasked_space(space: spaces.Dict) -> gym.Space:
    """The space of `unmasked` observations."""
    rest = unmasked(dict(space.items()))
    return spaces.Dict(rest) if isinstance(rest, dict) else rest


def flat_mask(mask: Any) -> np.ndarray:
    """[entries] of a mask, or of a tuple of masks."""
    if isinstance(mask, (tuple, list)):
        return np.concatenate([np.ravel(part) for part in mask])
    return np.ravel(mask)


def is_vector(space: gym.Space) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 1


def described(kinds: list[Kind], name: str) -> str:
    """The first agent of each kind and its space."""
    return ", ".join(f"{kind.agent!r} has {getattr(kind, name)}" for kind in kinds)


def common_space(kinds: list[Kind]) -> gym.Space:
    """The space of a row, for agents of all kinds."""
    first = kinds[0].observation
    if len(kinds) == 1:
        return first
    if all(is_vector(kind.observation) for kind in kinds):
        longest = max(kind.observation.shape[0] for kind in kinds)
        return spaces.Box(-np.inf, np.inf, (longest + len(kinds),), np.float32)
    if any(kind.observation != first for kind in kinds):
        raise gym.error.Error(
            "agents with different observation spaces must have vectors (Box with one axis): "
            + described(kinds, "observation")
        )
    return spaces.Dict({"kind": spaces.Discrete(len(kinds)), "observation": first})


def common_action(kinds: list[Kind]) -> gym.Space:
    """The space of the action of a row, for agents of all kinds."""
    first = kinds[0].action
    if all(kind.action == first for kind in kinds):
        return first
    if not all(isinstance(kind.action, spaces.Discrete) for kind in kinds):
        raise gym.error.Error(
            "agents with different action spaces must have Discrete ones: "
            + described(kinds, "action")
        )
    return spaces.Discrete(max(kind.num_options for kind in kinds))


def complete(parallel_env: Any, observations: dict) -> tuple[np.ndarray, None]:
    """Links between all agents, both ways, without features."""
    return np.argwhere(~np.eye(len(observations), dtype=bool)), None


def read_links(result: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """(edge_links int64 [E, 2], edges float32 [E, F] or None) from what a function returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise gym.error.Error(f"graph: (edge_links, edges or None) is needed, not {result!r}")
    links, edges = map(np.asarray, result)
    if links.size == 0:
        links = np.zeros((0, 2), np.int64)
    if links.ndim != 2 or links.shape[1] != 2 or links.dtype.kind not in "iu":
        raise gym.error.Error(
            f"graph: edge_links have shape {links.shape} and dtype {links.dtype}, integers [E, 2] "
            "are needed"
        )
    links = links.astype(np.int64)
    if result[1] is None:
        return links, None
    if edges.ndim != 2 or len(edges) != len(links):
        raise gym.error.Error(
            f"graph: edges have shape {edges.shape}, [{len(links)}, F] is needed, a row per link"
        )
    return links, edges.astype(np.float32)
