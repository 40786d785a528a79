"""What the tests of the four short scripts `ppo_*_mini.py` share: environments that note what they
return, and what a script has at each step of its optimizer."""

import contextlib
import copy
import importlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import IDS, MASK, vector
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cleanrl_graph.envs.toy import LinkGraph

GRAPHS = ["ppo_graph_mini", "ppo_lstm_sparse_mini"]
VECTORS = ["ppo_gtrxl_mini", "ppo_framestack_mini"]
NAMES = GRAPHS + VECTORS
SCRIPTS = {name: importlib.import_module(f"cleanrl_graph.{name}") for name in NAMES}
EDGES = {"none": None, "vectors": vector(2), "kinds": spaces.Discrete(3, start=-1)}


class Step(SimpleNamespace):
    """A step of an environment: `obs`, `begins` (an episode), `action`, `reward`, `terminated`,
    `truncated` and `next_obs`, that of the same episode."""


class Noted(gym.Env):
    """Episodes of 1 to 6 steps, of which half are truncated. The first environment is truncated at
    each `cut`-th step as well. With `endless` no episode ends. `made` has all environments, `steps`
    the steps of one."""

    made = []

    def __init__(self, cut=0, endless=False):
        self.steps = []
        self.endless = endless
        self.cut = cut if not self.made else 0
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.np_random.integers(1, 7)
        self.truncates = self.np_random.random() < 0.5
        self.begins = True
        self.obs = self.observe(False)
        return self.obs, {}

    def step(self, action):
        reward = self.reward(action)
        self.left -= 1
        is_cut = bool(self.cut) and (len(self.steps) + 1) % self.cut == 0
        ended = self.left == 0 and not is_cut and not self.endless
        flags = ended and not self.truncates, is_cut or ended and self.truncates
        before = copy.deepcopy(self.obs)
        self.obs = self.observe(flags[1])
        self.steps.append(
            Step(
                obs=before,
                begins=self.begins,
                action=int(action - self.action_space.start),
                reward=reward,
                terminated=flags[0],
                truncated=flags[1],
                next_obs=copy.deepcopy(self.obs),
            )
        )
        self.begins = False
        return self.obs, reward, *flags, {}


class Graphs(Noted):
    """A graph of 1 to 6 nodes at every step, now and then without edges; the last one before a time
    limit may have no nodes. An episode has 9 nodes, whose ids come back. The reward is the first
    feature of the chosen node. Nodes are views of one array, which is written anew at every
    step. With `column` the mask is [nodes, 1]."""

    def __init__(self, edges="none", cut=0, endless=False, column=False, ids=True):
        super().__init__(cut, endless)
        graph = LinkGraph(vector(3), EDGES[edges])
        leaves = {"graph": graph, "action_mask": MASK} | ({"node_ids": IDS} if ids else {})
        self.observation_space = spaces.Dict(leaves)
        self.action_space = spaces.Discrete(6)
        self.nodes = np.zeros((6, 3), np.float32)
        self.column = column
        self.all_ids = np.array([0, 1, 2, 3, 4, 5, 6, 7, 2**32 - 1])

    def reset(self, *, seed=None, options=None):
        space = self.observation_space["graph"].edge_space
        if seed is not None and space is not None:
            space.seed(seed)
        return super().reset(seed=seed, options=options)

    def observe(self, at_limit):
        rng = self.np_random
        n = int(rng.integers(1, 7))
        if at_limit and rng.random() < 0.5:
            n = 0
        self.nodes[:n] = rng.normal(size=(n, 3))
        self.mask = rng.random(n) < 0.7
        if n:
            self.mask[rng.integers(n)] = True
        links = edges = None
        if n and rng.random() < 0.8:
            links = rng.integers(0, n, (2 * n, 2))
            space = self.observation_space["graph"].edge_space
            edges = None if space is None else np.array([space.sample() for _ in links])
        mask = self.mask.astype(np.int8)
        obs = {
            "graph": spaces.GraphInstance(self.nodes[:n], edges, links),
            "action_mask": mask[:, None] if self.column else mask,
        }
        if "node_ids" in self.observation_space.spaces:
            obs["node_ids"] = rng.permutation(self.all_ids)[:n]
        return obs

    def reward(self, action):
        assert self.mask[action] and isinstance(action, np.int64)
        return float(self.nodes[action, 0])


class Vectors(Noted):
    """Two by two numbers and three actions, whose rewards depend on the numbers. The array is
    written anew at every step."""

    observation_space = vector(2, 2)
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, cut=0, endless=False):
        super().__init__(cut, endless)
        self.numbers = np.zeros((2, 2), np.float32)

    def observe(self, at_limit):
        self.numbers[:] = 2 + 3 * self.np_random.normal(size=(2, 2))
        return self.numbers

    def reward(self, action):
        assert isinstance(action, np.int64) and action in self.action_space
        return float(self.numbers[0, action % 2]) * int(action)


for edges in EDGES:
    kwargs = {"edges": edges, "cut": 6}
    gym.register(f"MiniGraphs-{edges}-v0", entry_point=Graphs, kwargs=kwargs)
for name, kwargs in {"": {"edges": "vectors"}, "-column": {"column": True}}.items():
    gym.register(f"MiniGraphs{name}-v0", entry_point=Graphs, kwargs=kwargs)
for entry_point in (Graphs, Vectors):
    name = f"Mini{entry_point.__name__}-endless-v0"
    gym.register(name, entry_point=entry_point, kwargs={"endless": True})
gym.register("MiniVectors-v0", entry_point=Vectors)
gym.register("MiniVectors-cut-v0", entry_point=Vectors, kwargs={"cut": 6})


def command_line(flags: dict) -> list[str]:
    """`--no-x` for x=False, `--x` for True, `--x=value` for others."""
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={value}")
    return words


def execute(script, **flags) -> dict:
    """The global names of a script that ran as a command in the current folder, which is left as it
    was. Nothing is printed."""
    path = script.__file__
    names = {"__name__": "__main__", "__file__": path}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", [path, *command_line(flags)])
        patch.setattr(sys, "path", [str(Path(path).parent), *sys.path])
        exec(compile(Path(path).read_text(), path, "exec"), names)
    return names


KEPT = """mb newlogprob entropy newvalue pg_loss v_loss entropy_loss loss logprobs values advantages
    actions iteration mismatch""".split()


def optimizer_steps(script, **flags) -> tuple[list[SimpleNamespace], list[list[Step]]]:
    """(what the script has just before each step of its optimizer: the names of KEPT, a copy of its
    agent, `grads` by parameter and `lr`; the steps of each environment)."""
    seen = []

    def before_step(optimizer, *_):
        frame = sys._getframe()
        while frame.f_code.co_filename != script.__file__:
            frame = frame.f_back
        names = frame.f_globals
        kept = {name: names[name] for name in KEPT}
        kept = {k: v.detach().clone() if torch.is_tensor(v) else v for k, v in kept.items()}
        kept["grads"] = {
            name: param.grad.clone()
            for name, param in names["agent"].named_parameters()
            if param.grad is not None
        }
        kept |= {"agent": copy.deepcopy(names["agent"]), "lr": optimizer.param_groups[0]["lr"]}
        seen.append(SimpleNamespace(**kept))

    Noted.made.clear()
    hook = register_optimizer_step_pre_hook(before_step)
    try:
        execute(script, cuda=False, **flags)
    finally:
        hook.remove()
    return seen, [env.steps for env in Noted.made]
