"""A policy as a program of torch.export: it does what load_policy does, in any sizes, and where
this package is not installed."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import small_args

import cleanrl_graph
from cleanrl_graph.envs.masks import CanonicalMasks
from cleanrl_graph.services import export, exported
from cleanrl_graph.services.policy import load_policy

FOLDER = Path(cleanrl_graph.__file__).parent
GRAPH = {"observation": "graph_edges", "action": "box"}


def saved(path, name, **flags):
    """A model.pt of an agent whose weights and statistics are random."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    args = small_args(script, **{"env_id": "Random-v0", "gnn_layers": 1} | flags)
    env = CanonicalMasks(script.make_env(args), script, args)
    leaves = script.Envs([lambda: env]).leaves
    agent = script.Agent(leaves, env.action_space, args)
    for parameter in agent.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)  # more would amplify rounding
    for buffer in agent.buffers():
        if buffer.dtype == torch.float64:
            buffer += torch.rand(buffer.shape)
    torch.save({"model": agent.state_dict(), "args": vars(args), "script": name}, path)
    return path


def loaded(path, **kwargs):
    """(program, its JSON file) of a model.pt."""
    out = path.with_name("policy.pt2")
    export.export(str(path), str(out), **kwargs)
    program = torch.export.load(out).module()
    return program, json.loads(out.with_suffix(".json").read_text())


def tensors(obs, file):
    """The inputs of one observation, by the function of the program that is written."""
    arrays = exported.inputs_of(obs, file["inputs"])
    for name, form in file["inputs"].items():
        assert arrays[name].dtype == form["dtype"], name
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def batch(observations, file):
    """The inputs of several, in another order of names."""
    inputs = [tensors(obs, file) for obs in observations]
    return {name: torch.cat([one[name] for one in inputs]) for name in reversed(inputs[0])}


def nothing(file, num=1):
    """The memory of `num` observations with which episodes begin."""
    memory = {}
    for name, form in file["memory"].items():
        shape = [num if size == "B" else n for size, n in zip(form["shape"], form["begin"])]
        memory[name] = torch.zeros(shape, dtype=getattr(torch, form["dtype"]))
    return memory


def action_of(space, outputs, b, path="action", rows=None):
    """Element b of the action space; `rows` are those of its Sequence."""
    if isinstance(space, spaces.Sequence):
        elements = [action_of(space.feature_space, outputs, row, path) for row in rows]
        shape = getattr(space.feature_space, "shape", None)
        return np.array(elements).reshape(-1, *shape) if space.stack else tuple(elements)
    if isinstance(space, spaces.Dict):
        return {k: action_of(space[k], outputs, b, f"{path}.{k}", rows) for k in space}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space)
        return tuple(action_of(own, outputs, b, f"{path}.{k}", rows) for k, own in parts)
    return outputs[path][b].detach().numpy()


def close(ours, theirs):
    if isinstance(ours, dict):
        return all(close(ours[k], theirs[k]) for k in ours | theirs)
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return np.shape(ours) == np.shape(theirs) and np.allclose(ours, theirs, atol=2e-4)


def actions_of(policy, outputs, num_rows):
    """The actions of all observations; of a Sequence `num_rows` each."""
    space = policy.envs.action_space
    stops = np.cumsum(num_rows)
    rows = [range(stop - num, stop) for num, stop in zip(num_rows, stops)]
    return [action_of(space, outputs, b, "action", own) for b, own in enumerate(rows)]


def play(path, num_steps=12, N=3, ties="none"):
    """Compares N environments, whose episodes begin and end at different times, with load_policy.
    With `ties`, which rounding decides, not their actions, and the policy's are taken."""
    program, file = loaded(path)
    policy = load_policy(path, num_envs=N)
    act = policy.memory.act
    acted = []  # (action, log_prob, value) of each step
    policy.memory.act = lambda *inputs: acted.append(act(*inputs)) or acted[-1]
    acting = policy.agent.head.acting
    envs = [policy.make_env() for _ in range(N)]
    observations = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    rewards = np.ones(N, np.float32)
    starts = np.ones(N, bool)
    memory = nothing(file, N)
    for _ in range(num_steps):
        if memory:
            memory["starts"] = torch.from_numpy(starts)
            memory["reward"] = torch.from_numpy(rewards)
        inputs = batch(observations, file)
        outputs, memory = program(inputs, memory)
        theirs = policy(observations, rewards, starts)
        num_rows = inputs[f"counts/{acting}"].tolist() if acting else [1] * N
        ours = actions_of(policy, outputs, num_rows)
        _, log_prob, value = acted[-1]
        assert torch.allclose(outputs["log_prob"].float(), log_prob.float(), atol=2e-4)
        assert policy.has_value == ("value" in outputs)
        assert not policy.has_value or torch.allclose(outputs["value"], value, atol=2e-4)
        if ties == "none":
            assert all(map(close, ours, theirs)), (ours, theirs)
        rewards = np.zeros(N, np.float32)
        for i, action in enumerate(theirs):
            observations[i], rewards[i], terminated, truncated, _ = envs[i].step(action)
            starts[i] = terminated or truncated
            if starts[i]:
                observations[i], _ = envs[i].reset()


# ---- Without memory ----
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(path of a model, its program, file)."""
    path = tmp_path_factory.mktemp("run") / "model.pt"
    flags = dict(env_id="Random-v0", env_kwargs=GRAPH, norm_obs=True, gnn_layers=1)
    return path, *loaded(saved(path, "ppo_graph", **flags))


def test_sizes(trained):
    """Batches of any size, graphs without nodes or edges; distributions, values and
    log-probabilities are those of the agent, with its statistics."""
    path, program, file = trained
    policy = load_policy(path, num_envs=6)
    rng = np.random.default_rng(0)
    none = spaces.GraphInstance(np.zeros((0, 3), np.float32), None, None)
    no_rows = np.zeros((0, 2), np.float32)
    lonely = spaces.GraphInstance(np.ones((1, 3), np.float32), no_rows, no_rows.astype(np.int32))
    graphs = [none, lonely]
    for num in (1, 2, 30, 7):
        nodes = rng.uniform(-1, 1, (num, 3)).astype(np.float32)
        links = rng.integers(num, size=(2 * num - 1, 2), dtype=np.int32)
        edges = rng.uniform(-1, 1, (2 * num - 1, 2)).astype(np.float32)
        graphs.append(spaces.GraphInstance(nodes, edges, links))
    for chosen in (graphs, graphs[:1], graphs[1:2], graphs[2:3], graphs[:2], graphs[4:]):
        outputs, memory = program(batch(chosen, file), {})
        actions = policy(chosen)
        assert close(tuple(outputs["action"].detach().numpy()), tuple(actions)) and memory == {}
        flat = policy.envs.collate([policy.envs.read(obs) for obs in chosen])
        obs = policy.memory.storage.append(flat)
        action, log_prob, _, value = policy.agent(obs, greedy=True)
        assert torch.allclose(outputs["loc/action"], action[""], atol=1e-5)
        assert torch.allclose(outputs["log_prob"], log_prob, atol=1e-5)
        assert torch.allclose(outputs["value"], value, atol=1e-5)
        assert torch.allclose(outputs["scale/action"], policy.agent.head.heads[0].log_std.exp())
    assert policy.agent.encoder.rows["leaf/obs/nodes"].mean.abs().min() > 0


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_for_cpp(tmp_path):
    """AOTInductor takes the program, and a batch of any size gives what the program gives."""
    path = saved(tmp_path / "model.pt", "ppo_graph", env_id="CartPole-v1")
    program, file = loaded(path)
    exported = torch.export.load(path.with_name("policy.pt2"))
    package = str(tmp_path / "aoti.pt2")
    compiled = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(exported, package_path=package)
    )
    for num in (1, 5):
        inputs = batch(list(np.random.default_rng(0).random((num, 4), np.float32)), file)
        expected, _ = program(inputs, {})
        outputs, _ = compiled(inputs, {})
        assert set(outputs) == set(expected)
        for name, value in expected.items():
            assert torch.allclose(outputs[name], value, atol=1e-5), name


@pytest.mark.slow
def test_command(tmp_path):
    """As the documentation says, and then in another process, which has torch alone. What is wrong
    is a sentence."""
    path = saved(tmp_path / "model.pt", "ppo_graph", env_id="envs:PoissonGraph-v0")
    command = [sys.executable, "-m", "cleanrl_graph.services.export", "model.pt", "p.pt2"]
    where = dict(cwd=tmp_path, capture_output=True, text=True)
    env = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    subprocess.run(command, check=True, env=env, **where)
    file = json.loads((tmp_path / "p.json").read_text())
    assert file["script"] == "cleanrl_graph.ppo_graph"
    policy = load_policy(path)
    obs, _ = policy.make_env().reset(seed=1)
    torch.save(tensors(obs, file), tmp_path / "inputs.pt")
    code = """import sys
for name in ('cleanrl_graph', 'torch_geometric', 'gymnasium', 'tyro'):
    sys.modules[name] = None  # cannot be imported
import torch
program = torch.export.load('p.pt2').module()
print(program(torch.load('inputs.pt'), {})[0]['action'].item())"""
    found = subprocess.run([sys.executable, "-c", code], check=True, **where)
    assert int(found.stdout) == policy(obs) and "Traceback" not in found.stderr
    path.write_text("text")
    wrong = subprocess.run(command, env=env, **where)
    assert wrong.returncode == 1 and wrong.stderr.startswith("model.pt: not a file that a run wr")


def kind(observation, action=None, head=None, **flags):
    """Flags of Random-v0 with these spaces."""
    names = {"observation": observation, "action": action, "head": head}
    return {"env_kwargs": {key: name for key, name in names.items() if name}} | flags


KINDS = {
    "choice": kind("graph_edges", head="nodes"),
    "pair": kind("graph_categories", head="pair", autoregressive=True, gnn="sage", gnn_aggr="max"),
    "edges": dict(env_id="envs:BestEdge-v0"),
    "colours": dict(env_id="envs:Colouring-v0", gnn="transformer"),
    "verb, rows": dict(env_id="envs:VerbObject-v0", env_kwargs={"as_rows": True})
    | dict(autoregressive=True),
    "switches of rows": dict(env_id="envs:Switches-v0", env_kwargs={"in_rows": True}),
    "pointers": dict(env_id="envs:Assign-v0"),
    "for all": dict(env_id="envs:Convoy-v0", autoregressive=True),
    "amount": dict(env_id="envs:NodeAmount-v0", autoregressive=True),
    "composite": kind("mixed", "mixed", graph_context=True),
    "masked": kind("vector", "multidiscrete", "mask"),
    "job_shop": dict(env_id="envs:JobShop-v0", gnn="gin"),
    "image": kind("image_chw"),
    "vector": kind("vector", "box", state_dependent_std=True, norm_obs=True),
    "set_layers": kind("set_of_dict", head="avail_actions", set_layers=2),
}


@pytest.mark.slow
def test_sampled_actions(tmp_path):
    """--no-greedy: actions are drawn from the distribution, by torch's generator."""
    path = saved(tmp_path / "model.pt", "ppo_graph", **kind("vector", "mixed"))
    program, file = loaded(path, greedy=False)
    obs = load_policy(path).make_env().reset(seed=1)[0]
    inputs = batch([obs] * 4000, file)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs, _ = program(inputs, {})
        drawn.append(outputs)
    assert torch.equal(drawn[0]["action.move"], drawn[1]["action.move"])
    log_probs = outputs["log_probs/action.move"]
    shares = outputs["action.move"].bincount(minlength=log_probs.shape[2]) / 4000
    assert torch.allclose(shares, log_probs[0, 0].exp(), atol=0.04)
    bits = outputs["action.rest.1"].float().mean(0)
    assert torch.allclose(bits, outputs["log_probs/action.rest.1"][0, :, 1].exp(), atol=0.04)


# ---- Memories ----
NODES = {"observation": "set", "head": "nodes"}
EXPLORE = dict(env_id="envs:GraphExplore-v0", env_kwargs={"episode_length": 7})
RESCALE = ("gymnasium.wrappers:RescaleAction:10:1000",)  # actions are scaled to these bounds
MEMORIES = {
    "framestack": ("ppo_framestack", dict(env_kwargs=GRAPH)),
    "frames": ("ppo_framestack", kind("image_hwc", obs_shifts="-2:0", reward_shifts="-1")),
    "lstm": ("ppo_lstm_sparse", dict(env_kwargs=GRAPH, prev_reward=True)),
    "gru": ("ppo_lstm_sparse", dict(env_kwargs=NODES, cell="gru", prev_action=False)),
    "mingru": ("ppo_lstm_sparse", dict(env_kwargs=GRAPH, cell="mingru")),
    "per_node": ("ppo_lstm_sparse", EXPLORE | dict(prev_reward=True)),
    "scaled": ("ppo_lstm_sparse", kind("vector", "box", prev_reward=True, wrap=RESCALE)),
    "gtrxl": ("ppo_gtrxl", dict(env_kwargs=GRAPH, dim=16, num_layers=2, prev_reward=True)),
    "window": ("ppo_gtrxl", dict(env_kwargs=NODES, dim=16, memory_length=2, prev_action=False)),
    "rows": ("ppo_gtrxl", dict(env_id="envs:NeighbourMean-v0", dim=16)),
}
PLAYED = {name: ("ppo_graph", flags) for name, flags in KINDS.items()} | MEMORIES
PLAYED["agents"] = "ppo_graph_agents", dict(env_id="envs:Crowd-v0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAYED)
def test_kinds(tmp_path, kind):
    """Every kind of observation, action, mask and layer, every variant, and every memory: episodes
    begin at different times, what was before is forgotten."""
    name, flags = PLAYED[kind]
    ties = "nodes that look alike" if kind.startswith("per_node") else "none"
    play(saved(tmp_path / "model.pt", name, **flags), num_steps=20, ties=ties)


# ---- What cannot be exported ----
def test_refused(tmp_path, monkeypatch):
    """A sentence names the flag, or the script."""
    path = tmp_path / "model.pt"
    saved(path, "ppo_lstm_sparse", env_id="envs:GraphExplore-v0", remember_edges=True)
    with pytest.raises(ValueError, match="--remember-edges cannot be exported"):
        export.export(str(path), str(tmp_path / "policy.pt2"))
    monkeypatch.setattr(export, "MEMORIES", {})
    with pytest.raises(ValueError, match="memory of cleanrl_graph.ppo_lstm_sparse cannot be"):
        export.export(str(path), str(tmp_path / "policy.pt2"))
    with pytest.raises(OSError):
        export.export(str(tmp_path / "none.pt"), str(tmp_path / "policy.pt2"))
    assert not (tmp_path / "policy.pt2").exists()
