"""services/summary.py: how a run says that it understood the spaces."""

import contextlib
import io

import gymnasium as gym
import helpers  # registers Random-v0
import numpy as np
import pytest
from gymnasium import spaces
from helpers import make_envs, run_folder, small_args

from cleanrl_graph import load_policy, ppo_graph, services
from cleanrl_graph.services import summary
from cleanrl_graph.services.check import UsageError

RANDOM = helpers.RandomEnv.__module__ + ":Random-v0"


class Padded(helpers.SmallEnv):
    """Choose the one node that the features mark, of 2 to 5. The mask has 6 entries; `beyond` is
    one that it allows wrongly. Options that are no nodes cost 10."""

    action_space, mask = spaces.Discrete(6), spaces.MultiBinary(6)
    observation_space = spaces.Dict(action_mask=mask, graph=helpers.graph_space(features=2))
    length, terminates = 1, True

    def __init__(self, beyond=None):
        self.beyond = beyond

    def observe(self):
        self.num = self.np_random.integers(2, 6)
        self.marked = self.np_random.integers(self.num)
        nodes = np.ones((self.num, 2), np.float32)
        nodes[self.marked, 0] = -1
        mask = (np.arange(6) < self.num).astype(np.int8)
        if self.beyond is not None:
            mask[self.beyond] = 1
        graph = spaces.GraphInstance(nodes, None, np.zeros((0, 2), np.int32))
        return {"graph": graph, "action_mask": mask}

    def reward(self, action):
        return 1.0 if action == self.marked else -10.0 * (action >= self.num)


gym.register("Padded-v0", entry_point=Padded)
PADDED = f"{__name__}:Padded-v0"


def said(folder, script=ppo_graph, **flags):
    """The lines of a run before its table, of stdout and stderr."""
    folder.mkdir()
    with contextlib.redirect_stderr(io.StringIO()) as err:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            args = small_args(script, run_dir=str(folder), total_timesteps=0, **flags)
            services.run(script, args)
    lines = (err.getvalue() + out.getvalue()).replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip()]


CHOICE = "choice of a row of graph.nodes, masked by action_mask [nodes] int8"
ENVS = [  # id, kwargs, what is told
    ("CartPole-v1", {}, "obs [4] float32", "a fixed list of 2 options"),
    ("envs:JobShop-v0", {}, "graph.edges [edges] Discrete(4)", CHOICE),
    (
        "envs:NodeAmount-v0",
        {},
        "node: choice of a row of graph.nodes, masked by action_mask.node [",
    ),
    ("envs:GraphExplore-v0", {}, "no input: node_ids [rows] int64, by which a memory knows a row"),
    (
        RANDOM,
        {"action": "mixed"},
        "of 3 options; rest.0: 2 numbers from -1 to 1; rest.1: 2 fixed l",
    ),
]


@pytest.mark.parametrize("told", ENVS, ids=lambda told: told[0])
def test_spaces_are_told(told, tmp_path):
    """Inputs, action, parameters, device and folder, in at most eight lines, each said once."""
    env_id, kwargs, *told = told
    lines = said(tmp_path / "a", env_id=env_id, env_kwargs=kwargs)
    text = "\n".join(lines)
    assert len(lines) <= 8 and len(set(lines)) == len(lines)
    for expected in (*told, f"writes to {run_folder(tmp_path / 'a')}"):
        assert expected in text, text
    for start in ("inputs: ", "action: ", "network: "):
        assert sum(line.startswith(start) for line in lines) == 1
    assert " parameters on cpu" in text and "warning" not in text
    if env_id == "CartPole-v1":
        actor, critic = 4 * 16 + 16, 4 * 16 + 16
        num = actor + 16 * 2 + 2 + critic + 16 + 1
        assert f"network: {num} parameters on cpu" in lines


def test_how_parts_are_drawn(tmp_path):
    """With --autoregressive each part knows those before it, as does its mask."""
    flags = dict(env_id="envs:VerbObject-v0", action_head="auto")
    lines = said(tmp_path / "a", autoregressive=True, **flags)
    (line,) = [line for line in lines if line.startswith("action: ")]
    assert line.endswith("; each knows those before it")
    assert line.count(", for each value of the part before") == 1


def told(env, **flags):
    """The lines about spaces and network, without a run."""
    envs = make_envs([lambda: env], **flags)
    args = small_args(**flags)
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    return list(summary.lines(ppo_graph, args, agent, envs))


# ---- What is probably not meant ----
@pytest.mark.parametrize(
    "observation, warning",
    [
        ("graph", "a row of 'obs.nodes', give --action-head nodes;"),
        ("mixed", "a row of 'map.nodes', give --action-head map.nodes;"),
    ],
)
def test_rows_beside_a_fixed_list(observation, warning, tmp_path):
    """The warning names the flag, which is as it says; `flat` silences it."""
    warning = f"warning: the action is one of a fixed list; if it should be {warning} if not, "
    flags = dict(env_id=RANDOM, env_kwargs={"observation": observation})
    lines = said(tmp_path / "a", **flags)
    (line,) = [line for line in lines if line.startswith("warning: ")]
    assert warning in line and "entries" not in line and len(lines) <= 8
    head = line.split("--action-head ")[1].partition(";")[0]
    assert not any("warning" in line for line in said(tmp_path / "b", action_head="flat", **flags))
    (part,) = make_envs([lambda: helpers.RandomEnv(observation)], action_head=head).parts[0]
    assert part.group in line


def test_padded_mask(tmp_path):
    """A mask of 6 entries beside a graph of at most 5 nodes is named. With --action-head nodes what
    is behind the nodes, which must be zero, is cut off, in training, in the evaluation and in a
    program: no option is chosen that is no node."""
    assert "action_mask has 6 entries whatever the number of rows is" in told(Padded())[-1]
    flags = dict(env_id=PADDED, action_head="nodes")
    folder = tmp_path / "a"
    args = small_args(run_dir=str(folder), eval_episodes=10, save_model=True, **flags)
    rows = services.run(ppo_graph, args)
    assert all(row["return"] in (0, 1) for row in rows)
    policy = load_policy(str(run_folder(folder) / "model.pt"), Padded())
    env = policy.make_env()
    for seed in range(9):
        obs, _ = env.reset(seed=seed)
        assert policy(obs) < len(obs["graph"].nodes)
    text = "\n".join(said(tmp_path / "b", **flags))
    assert CHOICE in text and "warning" not in text
    words = "env 0, leaf 'action_mask', step 0: option 5 is allowed, th"
    with pytest.raises(UsageError, match=words):
        make_envs([lambda: Padded(beyond=5)], action_head="nodes").reset(0)
