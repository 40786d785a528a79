"""Random spaces and observations, small environments, and runs of a script, which the tests
share."""

import contextlib
import copy
import importlib
import io
import os
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services import arguments, check, process
from cleanrl_graph.services.workers import WorkerEnvs

# of a script alone, and of its services: a sentence that says what was wrong
UsageErrors = ppo_graph.UsageError, check.UsageError


def vector(*shape, low=-1.0, high=1.0):
    return spaces.Box(low, high, shape, np.float32)


def small_args(script=ppo_graph, **kwargs):
    """The flags of `script` and of its services for a network and a run of two updates that take
    milliseconds, without checkpoints."""
    small = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=2, num_envs=3, num_steps=8)
    small |= dict(num_minibatches=2, update_epochs=2, total_timesteps=48)
    small |= dict(eval_episodes=0, checkpoint_every=0, cuda=False)
    if hasattr(script.Args, "compile_mode"):
        small["compile_mode"] = "none"  # compiling takes long
    return arguments.args_of(script, **small | kwargs)


# what every run of a graph observation logs, beside episodes
LOGGED = """charts/SPS charts/learning_rate charts/obs_bytes_per_step charts/padding_avoided
    charts/rows/graph.nodes charts/rows/graph.edge_links debug/collection_mismatch
    losses/value_loss losses/policy_loss losses/entropy losses/approx_kl losses/old_approx_kl
    losses/clipfrac losses/explained_variance losses/grad_norm""".split()


class Run(NamedTuple):
    """What is left of a run of a script."""

    rows: list  # of the evaluation's table
    scalars: dict[str, list[tuple[int, float]]]  # tag -> (step, value) in order
    folder: Path
    text: str  # what it printed, without the progress bar


def run(run_dir, script=ppo_graph, **kwargs) -> Run:
    """A run of `script` with its services and small_args, quietly, with a run_dir that has no other
    run."""
    text, other = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(other):
        rows = services.run(script, small_args(script, run_dir=str(run_dir), **kwargs))
    return Run(rows, train_events(run_dir), run_folder(run_dir), text.getvalue())


def command(*flags, script=ppo_graph, cwd=None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the script's `__main__` in this process, as if python had been
    given the flags in the folder `cwd`."""
    before = [list(sys.path), sys.argv, os.getcwd()]
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [script.__file__, *map(str, flags)]
    os.chdir(cwd or before[2])
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script.__file__, run_name="__main__")
    except SystemExit as error:  # a text is printed, and the code is 1
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        err.write(f"{error.code}\n" if isinstance(error.code, str) else "")
    except BaseException:
        code = 1
        err.write(traceback.format_exc())
    finally:
        sys.path[:], sys.argv = before[:2]
        os.chdir(before[2])
    return code, out.getvalue(), err.getvalue()


def parsed(name, flags):
    """What the command line of the script of that name means, with its services."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script.__file__, *flags])
        return arguments.parse(script)


def run_folder(run_dir) -> Path:
    """The only run in a run_dir."""
    (folder,) = Path(run_dir).iterdir()
    return folder


def train_events(run_dir) -> dict[str, list[tuple[int, float]]]:
    """Tag -> [(step, value)] of all that the only run in a run_dir logged, in the order in which it
    was logged."""
    log = EventAccumulator(str(run_folder(run_dir)), size_guidance={"scalars": 0})
    log.Reload()
    return {
        tag: [(event.step, event.value) for event in log.Scalars(tag)]
        for tag in log.Tags()["scalars"]
    }


def weights(folder) -> dict[str, torch.Tensor]:
    """The weights in the model.pt of a run that was told to `save_model`."""
    return torch.load(Path(folder) / "model.pt", weights_only=True)["model"]


def logged(result: Run, tag: str) -> list[float]:
    """What a run logged under a tag, in order."""
    return [value for _, value in result.scalars[tag]]


def mismatch(result: Run) -> float:
    """The largest difference of the first probability ratios from 1, which are there and finite."""
    return max(map(abs, logged(result, "debug/collection_mismatch")))


def mean_return(result: Run) -> float:
    """Of the episodes of the evaluation."""
    return np.mean([row["return"] for row in result.rows])


def same_weights(one: Path, two: Path) -> bool:
    """Whether two runs saved the same model, bit by bit."""
    one, two = weights(one), weights(two)
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def rows_of(space, rng, num):
    """`num` samples stacked along a new first axis, which may be empty."""
    if isinstance(space, spaces.Dict):
        return {k: rows_of(child, rng, num) for k, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(rows_of(child, rng, num) for child in space)
    shape = (num, *space.shape)
    if isinstance(space, spaces.Box):
        low, high = space.low.clip(-2.0), space.high
        high = high.clip(max=2.0) if space.dtype.kind == "f" else high
        return (low + rng.random(shape) * (high - low)).astype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, shape).astype(np.int8)
    num_options = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return (space.start + (rng.random(shape) * num_options).astype(np.int64)).astype(space.dtype)


def sample(space, rng, size=lambda rng: rng.integers(5)):
    """An element of `space`; `size` draws the numbers of nodes, edges and rows."""
    if isinstance(space, spaces.Dict):
        return {k: sample(child, rng, size) for k, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sample(child, rng, size) for child in space)
    if isinstance(space, spaces.Graph):
        num_nodes = int(size(rng))
        num_edges = int(size(rng)) if num_nodes else 0
        edges = rows_of(space.edge_space, rng, num_edges) if space.edge_space is not None else None
        links = rng.integers(max(num_nodes, 1), size=(num_edges, 2))
        if num_edges == 0 and rng.random() < 0.5:
            edges = links = None
        return spaces.GraphInstance(rows_of(space.node_space, rng, num_nodes), edges, links)
    if isinstance(space, spaces.Sequence):
        num = int(size(rng))
        if space.stack:
            return rows_of(space.feature_space, rng, num)
        return tuple(sample(space.feature_space, rng) for _ in range(num))
    return rows_of(space, rng, 1)[0]


def discretes(most):
    """Discretes of 1 to `most` options."""
    build = lambda n, start: spaces.Discrete(n, start=start)
    return st.builds(build, st.integers(1, most), st.integers(-3, 3))


def lists(elements, most=3):
    return st.lists(elements, min_size=1, max_size=most)


def nested(leaves, names, max_leaves):
    """Leaves, and Dicts and Tuples of them at any depth."""
    dicts = lambda child: st.dictionaries(st.sampled_from(names), child, min_size=1, max_size=3)
    both = lambda child: st.one_of(dicts(child).map(spaces.Dict), lists(child).map(spaces.Tuple))
    return st.recursive(leaves, both, max_leaves=max_leaves)


shapes = st.lists(st.integers(1, 3), max_size=2)
bits = st.sampled_from([spaces.MultiBinary(3), spaces.MultiBinary((2, 2))])
dense_spaces = st.one_of(
    shapes.map(lambda shape: vector(*shape)),
    st.sampled_from([spaces.Box(0, 255, (2, 2), np.uint8), spaces.Box(-5, 5, (3,), np.int64)]),
    st.just(vector(8, 9, 1)),
    discretes(70),
    lists(st.integers(1, 5)).map(spaces.MultiDiscrete),
    st.just(spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]])),
    bits,
)
row_spaces = st.sampled_from([vector(3), vector(), spaces.Discrete(4), spaces.Discrete(3, start=2)])
rows_of_set = st.sampled_from([spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(2)])
rows_of_set |= st.just(spaces.Dict(a=vector(2), b=spaces.Discrete(3))) | row_spaces
ragged_spaces = st.one_of(
    st.builds(spaces.Graph, row_spaces, st.one_of(st.none(), row_spaces)),
    st.builds(lambda row, stack: spaces.Sequence(row, stack=stack), rows_of_set, st.booleans()),
)
observation_spaces = nested(st.one_of(dense_spaces, ragged_spaces), "abcd", 5)

boxes = st.builds(
    lambda shape, dtype: spaces.Box(-1, 2, tuple(shape), dtype),
    shapes,
    st.sampled_from([np.float32, np.float64]),
)
action_leaves = st.one_of(
    discretes(5),
    lists(st.integers(1, 4)).map(spaces.MultiDiscrete),
    st.just(spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[3, -1], [0, 2]])),
    bits,
    st.just(vector(2, low=-np.inf, high=np.inf)),
    boxes,
)
action_spaces = nested(action_leaves, "zyx", 4)


class SmallEnv(gym.Env):
    """Episodes of `length` steps, which are truncated unless it `terminates`. Others have
    `observe()`, `reward(action)`, and `begin()`, which is called before an episode's first
    observation; `t` counts the steps."""

    length, terminates = 5, False

    def begin(self):
        pass

    def reward(self, action):
        return 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return self.observe(), {}

    def step(self, action):
        reward = float(self.reward(action))
        self.t += 1
        ended = self.t == self.length
        return self.observe(), reward, ended and self.terminates, ended and not self.terminates, {}


class ListEnv(gym.Env):
    """Returns the observations of a list one after the other. Actions change nothing; no episode
    ends."""

    def __init__(self, observation_space, observations, action_space=None):
        self.observation_space, self.observations = observation_space, observations
        self.action_space = spaces.Discrete(2) if action_space is None else action_space

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observations[0], {}

    def step(self, action):
        self.t += 1
        return self.observations[self.t], 0.0, False, False, {}


def make_envs(makers, num_workers=0, script=ppo_graph, **flags):
    """The Envs of a script as its services have them, which check; WorkerEnvs with that number of
    workers."""
    args = small_args(script, num_envs=len(makers), num_workers=num_workers, **flags)
    plain = SimpleNamespace(**vars(args))  # can be pickled
    make = partial(check.make_envs, script, plain)
    return WorkerEnvs(make, makers, plain, 0) if num_workers else make(makers)


def checked_parts(action_space, observation_space, **flags):
    """The parts of an action space, if the services refuse nothing."""
    make = lambda: ListEnv(observation_space, [], action_space)
    return make_envs([make], **flags).parts[0]


def stored(observation_space, observations, device="cpu"):
    """(Storage, leaves) that hold observations[t][i] of step t and environment i, sent through
    ppo_graph.py's own Envs."""
    makers = [
        lambda i=i: ListEnv(observation_space, [row[i] for row in observations])
        for i in range(len(observations[0]))
    ]
    envs = ppo_graph.Envs(makers)
    storage = ppo_graph.Storage(envs.leaves, torch.device(device))
    storage.append(envs.reset(0).obs)
    for _ in observations[1:]:
        storage.append(envs.step([0] * len(envs.envs)).obs)
    return storage, envs.leaves


def plain(agent):
    """The agent, or a head, of an action space all of whose parts are drawn once, or all by rows:
    actions are one tensor."""
    head = getattr(agent, "head", agent)

    def call(*inputs, **flags):
        *inputs, action = inputs if isinstance(inputs[-1], torch.Tensor) else (*inputs, None)
        if action is not None:
            flags["action"] = {head.acting: action}
        outputs = agent(*inputs, **flags)
        return outputs[0][head.acting], *outputs[1:]

    return call


def everything(storage) -> ppo_graph.Obs:
    """All that a Storage holds, as one batch."""
    return storage.batch(storage.whole())


def graph_space(edge_space=None, features=3):
    return spaces.Graph(vector(features), edge_space)


MASK = spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True)
IDS = spaces.Sequence(spaces.Box(-(2**63), 2**63 - 1, (), np.int64), stack=True)
OBSERVATIONS = {
    "vector": vector(4),
    "discrete": spaces.Discrete(5, start=-2),
    "embedded": spaces.MultiDiscrete([50, 50], start=[1, 2]),
    "bits": spaces.MultiBinary((2, 3)),
    "image_hwc": spaces.Box(0, 255, (12, 10, 3), np.uint8),
    "image_chw": spaces.Box(0, 255, (3, 40, 36), np.uint8),
    "graph": graph_space(),
    "graph_edges": graph_space(vector(2)),
    "graph_categories": spaces.Graph(spaces.Discrete(6, start=1), spaces.Discrete(4)),
    "set": spaces.Sequence(vector(3), stack=True),
    "set_of_dict": spaces.Sequence(spaces.Dict(a=vector(2), b=spaces.Discrete(70)), stack=False),
    "mixed": spaces.Dict(
        camera=spaces.Box(0, 255, (8, 8, 1), np.uint8),
        speed=vector(),
        gear=spaces.Discrete(3),
        map=graph_space(vector(2)),
        inside=spaces.Tuple((spaces.Sequence(spaces.Discrete(3), stack=False), graph_space())),
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(4, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
    "box": vector(2),
    # not named as a leaf of observation_spaces: a part that has the name of a set is a choice of
    # its elements
    "mixed": spaces.Dict(
        move=spaces.Discrete(3), rest=spaces.Tuple((vector(2), spaces.MultiBinary(2)))
    ),
}


def options_of(action_space):
    """The number of options of each entry that a mask of one row has, in order."""
    factors = [leaf.space for leaf in ppo_graph.leaves_of(action_space)]
    kinds = (spaces.Discrete, spaces.MultiDiscrete)
    return [
        n for space in factors if isinstance(space, kinds) for n in ppo_graph.num_options(space)
    ]


class RandomEnv(gym.Env):
    """Random observations of a named space with a long tail of sizes. Reward 1 for an action of the
    action space; episodes of 2 to 6 steps, of which every other is truncated. `head`: "flat";
    "mask", a dense mask; "nodes", "pair" of nodes with a ragged mask; "avail_actions"."""

    def __init__(self, observation="vector", action="discrete", head="flat"):
        self.head, space = head, OBSERVATIONS[observation]
        self.action_space = {
            "nodes": spaces.Discrete(1000),
            "avail_actions": spaces.Discrete(1000),
            "pair": spaces.Tuple([spaces.Discrete(1000)] * 2),
        }.get(head, ACTIONS.get(action))
        if head == "mask":
            self.num_options = options_of(self.action_space)
            space = spaces.Dict(obs=space, action_mask=spaces.MultiBinary(sum(self.num_options)))
        if head in ("nodes", "pair"):
            shape = (2,) if head == "pair" else ()
            mask = spaces.Sequence(spaces.Box(0, 1, shape, np.int8), stack=True)
            space = spaces.Dict(obs=space, action_mask=mask)
        if head == "avail_actions":
            space = spaces.Dict(obs=space, avail_actions=spaces.Sequence(vector(3), stack=True))
        self.observation_space = space

    def size(self, rng):
        """Mostly a few, sometimes none, now and then many."""
        smallest = 1 if self.head in ("nodes", "pair", "avail_actions") else 0
        return max(smallest, rng.poisson(40 if rng.random() < 0.05 else 3))

    def observe(self):
        rng = self.np_random
        obs = sample(self.observation_space, rng, self.size)
        if self.head == "mask":
            mask = [rng.permutation(np.arange(n) <= rng.integers(n)) for n in self.num_options]
            obs["action_mask"] = np.concatenate(mask).astype(np.int8)
        elif self.head in ("nodes", "pair"):
            inner = obs["obs"]
            num = len(inner.nodes if isinstance(inner, spaces.GraphInstance) else inner)
            mask = rng.integers(0, 2, (num, 2) if self.head == "pair" else num).astype(np.int8)
            mask[rng.integers(num)] = 1
            obs["action_mask"] = mask
        self.mask = obs.get("action_mask") if isinstance(obs, dict) else None
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 7))
        self.truncates = self.np_random.random() < 0.5
        return self.observe(), {}

    def step(self, action):
        legal = self.head in ("avail_actions",) or self.action_space.contains(action)
        if self.head == "mask" and isinstance(self.action_space, spaces.Discrete):
            legal &= bool(self.mask[action - self.action_space.start])
        if self.head == "nodes":
            legal &= bool(self.mask[action])
        if self.head == "pair":
            legal &= bool(self.mask[action[0], 0] and self.mask[action[1], 1])
        self.left -= 1
        ended = self.left == 0
        outcome = ended and not self.truncates, ended and self.truncates
        return self.observe(), float(legal), *outcome, {}


gym.register("Random-v0", entry_point=RandomEnv)

MY_ENV = '''
import gymnasium as gym, numpy as np

class Env(gym.Env):
    """Choose the node with the largest number."""

    observation_space = gym.spaces.Dict(
        graph=gym.spaces.Graph(gym.spaces.Box(0, 1, (1,), np.float32), None),
        action_mask=gym.spaces.Sequence(gym.spaces.Box(0, 1, (), np.int8), stack=True))
    action_space = gym.spaces.Discrete(6)

    def observe(self):
        self.x = self.np_random.random((self.np_random.integers(1, 7), 1), np.float32)
        mask = np.ones(len(self.x), np.int8)
        return {"graph": gym.spaces.GraphInstance(self.x, None, None), "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.t = float(action == self.x.argmax()), self.t + 1
        return self.observe(), reward, False, self.t == 5, {}

gym.register("Mine-v0", entry_point=Env)
'''


# ---- Rollouts, without a run ----
def begun(script, makers, agent=None, **flags):
    """What a run has before its first step, with logits of the size of those that were learned, so
    that differences show."""
    args = small_args(script, num_envs=len(makers), **flags)
    envs = make_envs(makers, script=script, **flags)
    if agent is None:
        agent = script.Agent(envs.leaves, envs.action_space, args)
        for name, parameter in agent.head.named_parameters():
            if name.endswith((".output.weight", ".score.weight")):  # these begin at 0.01
                parameter.data *= 100
    memory = script.Memory(agent, envs.leaves, len(makers), args)
    return SimpleNamespace(args=args, envs=envs, agent=agent, memory=memory, step=envs.reset(3))


def collect(part, greedy=False):
    """One rollout, as `train` has it. Adds to `part` the steps that were seen, the actions,
    log_probs and values [T * N], the values of what came after, and where episodes were cut off."""
    part.seen, part.cut, columns, num_envs = [], [], [], len(part.envs.envs)
    part.memory.begin()
    for t in range(part.args.num_steps):
        part.seen.append(part.step)
        columns.append(part.memory.act(part.step, greedy))
        actions = part.agent.head.env_actions(columns[-1][0], part.step.obs.counts)
        part.step = part.envs.step(actions)
        part.memory.keep(part.step)
        part.cut += (t * num_envs + np.flatnonzero(part.step.truncated)).tolist()
    actions, *others = zip(*columns)
    part.actions = torch.cat([action[""] for action in actions])
    part.log_probs, part.values = map(torch.cat, others)
    part.seen.append(part.step)
    part.next_values = part.memory.next_values(part.step)
    return part


# ---- A run of a script, and what it saw ----
def accelerated(base):
    """A script's Run that puts faster layers in, and does nothing else of what services do."""

    class Run(base):
        def begin(self, agent, *others):
            step = super().begin(agent, *others)
            process.accelerate(agent)
            return step

    return Run


class Writer:
    """Stands for TensorBoard's: step -> tag -> value of what is logged of each update."""

    def __init__(self, logged: dict):
        self.logged = logged

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.logged.setdefault(step, {})[tag] = float(value)

    add_text = flush = close = lambda self, *args: None


class Record(NamedTuple):
    """A run of a script with its services, without evaluation."""

    agent: torch.nn.Module  # a copy from before the first step
    leaves: list  # None where another process steps the environments
    steps: list  # what the environments returned, the first observations too
    actions: list  # what they were given
    minibatches: list[np.ndarray]  # indices, in order
    gradients: list[dict]  # parameter name -> gradient that the optimizer was given
    scalars: dict
    weights: dict  # at the end


def record(run_dir, script=ppo_graph, **flags) -> Record:
    """A run of `script`, and what it saw."""
    steps, actions, minibatches, gradients, agents = [], [], [], [], []
    Envs, Storage, Agent = script.Envs, script.Storage, script.Agent
    leaves = []
    reset, step, gather = Envs.reset, Envs.step, Storage.gather

    def recorded_reset(envs, *args):
        leaves.append(envs.leaves)
        steps.append(reset(envs, *args))
        return steps[-1]

    def recorded_step(envs, acts):
        actions.append(acts)
        steps.append(step(envs, acts))
        return steps[-1]

    def recorded_gather(storage, idx):
        minibatches.append(idx.copy())
        return gather(storage, idx)

    def make_agent(*args):
        agents.append(Agent(*args))
        agents.append(copy.deepcopy(agents[0]))
        return agents[0]

    def before_step(optimizer, *_):
        gradients.append(
            {name: p.grad.clone() for name, p in agents[0].named_parameters() if p.grad is not None}
        )

    hook = register_optimizer_step_pre_hook(before_step)
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(hook.remove)
        patch.setattr(Envs, "reset", recorded_reset)
        patch.setattr(Envs, "step", recorded_step)
        patch.setattr(Storage, "gather", recorded_gather)
        patch.setattr(script, "Agent", make_agent)
        result = run(run_dir, script, save_model=True, **flags)
    seen = next(iter(leaves), None), steps, actions, minibatches, gradients
    return Record(agents[1], *seen, result.scalars, weights(result.folder))
