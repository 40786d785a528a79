"""cleanrl_graph, model.pt: a trained policy as a .pt2 file, which runs where torch is installed.

    python -m cleanrl_graph.services.export model.pt policy.pt2

writes the program by torch.export; policy.json, which lists what it takes; and policy.py, a short
program that loads it and acts (exported.py, which shows how it is called):

    python policy.py

It does what the script's own `play` does, with the statistics of --norm-obs. Neither this package
nor PyG is needed to run it, and the numbers of observations, nodes, edges and elements are free at
each call: outputs, memory = program(inputs, memory).

inputs     LEAF           an array of the observation, as "map.nodes": [B, ...], or the rows of all
                          B observations one after the other; edge_links count those of each graph
           counts/GROUP   int64 [B], rows of each observation: its nodes, edges or elements
memory     starts         bool [B], where an episode begins: what was before is forgotten. It comes
                          back as false
           reward         float32 [B], of the step before: for --prev-reward and --reward-shifts
           OTHERS         what the step before returned. In the first one zeros, of "entries" (nodes
                          that were seen) none; "steps" may be fewer than --memory-length
outputs    action         as the environment takes it, [B, ...]; of a Dict or Tuple action.NAME. A
                          choice counts the rows of its observation. In a Sequence [rows, ...], of
                          all B observations one after the other
           log_probs/...  of a choice [rows], of k entries with n options each [B, k, n], -3.4e38
                          if masked; if they have unlike numbers log_probs/action.0 [B, 1, n], ...
           loc/, scale/   mean and standard deviation of a Box, -1 and 1 are its bounds if these
                          are finite
           log_prob       of the action; for ppo_graph_agents.py [rows], of each agent's
           value          of the observation; likewise. There is none with --critic-only

torch._inductor.aoti_compile_and_package(torch.export.load("policy.pt2"), package_path="aoti.pt2")
compiles it for C++ (AOTInductor), and torch._inductor.aoti_load_package runs that in Python: this
is tested with vectors. ONNX has no ragged rows and is not supported.

The action is greedy. To draw one, use the distributions, or export with --no-greedy: then it is
drawn by torch's generator. With --autoregressive only the latter is right, since the distribution
of a part is the one given the parts before it in `action`. Observations, with --wrap, and masks are
those of the environment that `load_policy(...).make_env()` returns. Batches of observations are
joined along the first axis.

Refused are --remember-edges, memories of other scripts, and what torch.export cannot trace.
"""

import json
import math
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium import spaces
from torch import Tensor, nn
from torch.export import Dim

from cleanrl_graph.envs import wrappers
from cleanrl_graph.services.check import entries
from cleanrl_graph.services.policy import Policy, load_policy

Tensors = dict[str, Tensor]


def form(dtype: Any, *shape: int | str, **more) -> dict:
    """Of a tensor, as in the JSON file. Sizes that may change are names."""
    return {"dtype": str(dtype), "shape": list(shape)} | more


# ---- Memories: the forms of what is remembered, and a step that changes it and returns (action,
# log_prob, value). The agents are the scripts' own. Their `Memory` lays out rows with NumPy, which
# torch.export cannot trace, so what is kept between two steps is written once more ----
class Views:
    """ppo_framestack: what views show of each of the last steps, the newest last."""

    def __init__(self, policy: Policy):
        agent = policy.agent
        self.embed_action = policy.script.embed_action
        self.images = {policy.script.module_key(leaf.path): leaf for leaf in agent.images}
        self.places = {}  # table -> places of the steps that are shown, -1 is the newest
        self.forms = {}
        dims = {"obs": agent.encoder.dim, "actions": agent.action_dim, "rewards": 1}
        for name, shifts in agent.shifts.items():
            is_past = name in ("actions", "rewards")  # whose shift -1 is the newest
            self.places[name] = (shifts - (not is_past)).tolist()
            depth = -min(self.places[name], default=-1)
            if name in self.images:
                leaf = self.images[name]
                self.forms[name] = form(leaf.dtype, "B", depth, *leaf.space.shape)
            else:
                self.forms[name] = form("float32", "B", depth, dims[name])

    def step(self, agent: nn.Module, obs: dict, memory: Tensors, greedy: bool) -> tuple:
        shown = {"rewards": memory["reward"][:, None]}
        elements = {}
        if agent.encoder.dim:
            shown["obs"], elements = agent.encoder(obs)
        for name, leaf in self.images.items():
            shown[name] = obs[leaf.path].values
        for name, new in shown.items():
            push(memory, name, new)
        views = []
        for name, places in self.places.items():
            net = agent.cnns[name] if name in agent.cnns else nn.Flatten()
            views.append(net(memory[name][:, places]))
        views = torch.cat(views, 1)
        action, log_prob, _, value = agent(views, elements, obs, greedy=greedy)
        push(memory, "actions", self.embed_action(agent.head, action, elements, obs))
        return action, log_prob, value


def push(memory: Tensors, name: str, new: Tensor) -> None:
    """Adds a step to [B, steps, ...], which lets the oldest one go."""
    memory[name] = torch.cat([memory[name][:, 1:], new[:, None]], 1)


class Transformer:
    """ppo_gtrxl: keys and values of the last steps, the newest last."""

    def __init__(self, policy: Policy):
        args = self.args = policy.args
        agent = policy.agent
        self.script = policy.script
        heads = (args.num_heads, "steps", args.dim // args.num_heads)
        self.forms = {
            "age": form("int64", "B"),
            "action": form("float32", "B", agent.action_dim),
            "keys_values": form("float32", "B", args.num_layers, 2, *heads),
        }

    def step(self, agent: nn.Module, obs: dict, memory: Tensors, greedy: bool) -> tuple:
        age = memory["age"]
        previous = memory["action"]
        if self.args.prev_reward:
            previous = torch.cat([previous, memory["reward"][:, None]], 1)
        kv = memory["keys_values"].movedim(0, 2)  # [layers, 2, B, H, W, d]
        features, elements, _, kv = agent.encode(obs, age[None], previous, list(kv))
        action, log_prob, _, value = agent(features, elements, obs, greedy=greedy)
        if self.args.prev_action:
            memory["action"] = self.script.embed_action(agent.head, action, elements, obs)
        kv = torch.stack(kv)[..., 1:, :]
        memory["keys_values"] = kv.movedim(2, 0)
        memory["age"] = age + 1
        return action, log_prob, value


class LSTM:
    """ppo_lstm_sparse: a state per observation or, with node_ids, per node that was seen: an entry.
    The agent acts as it does in the script, with two parts in tensors instead of NumPy."""

    def __init__(self, policy: Policy):
        agent = policy.agent
        if policy.args.remember_edges:
            raise ValueError("--remember-edges cannot be exported")
        self.script = policy.script
        self.columns = agent.columns
        num = "entries" if agent.group else "B"
        state = form("float32", num, agent.memory.parts, policy.args.lstm_dim)
        self.forms = {"action": form("float32", "B", agent.action_dim), "state": state}
        if agent.group:
            self.forms["env"] = form("int64", num)  # the observation that an entry belongs to
            self.forms["node_id"] = form("int64", num)
        agent.memory = Entries(agent.memory)
        agent.past = self.past

    def past(self, state: Any, seen: Any, *action) -> Tensor:
        """Action, reward or both of the step before, [B, any]."""
        return torch.cat([state.action, seen.rewards[:, None]], 1)[:, self.columns]

    def step(self, agent: nn.Module, obs: dict, memory: Tensors, greedy: bool) -> tuple:
        seen = self.script.Seen(memory["starts"], memory["reward"], None, None, None)
        if agent.group:
            ids, _, batch = obs["node_ids"]
            seen = seen._replace(step=batch, keys=ids.long())
        names = ("env", "node_id", "state")
        nodes = self.script.Entries(*map(memory.get, names))
        state = self.script.State(nodes, None, memory["action"])
        action, log_prob, value, state = agent.act(obs, state, seen, greedy)
        new = dict(zip(names, state.nodes), action=state.action)
        memory |= {name: new[name] for name in self.forms}
        return action, log_prob, value


class Entries(nn.Module):
    """A SparseLSTM on a step of B observations, whose entries and nodes are compared each with
    each."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, features: Any, state: Any, seen: Any) -> tuple:
        """As a SparseLSTM's. The nodes that are seen become the last entries."""
        env, node_id, before = state.nodes  # [entries, 2 (h and c) or 1, H]
        if not self.net.per_node:
            new = self.cell(x, before)
            return new[:, 0], new[:, 0], state.nodes._replace(values=new), None
        is_kept = ~seen.starts[env]  # bool [entries]: their episode goes on
        is_same = (env[:, None] == seen.step) & (node_id[:, None] == seen.keys)  # [entries, nodes]
        is_same = is_same & is_kept[:, None]
        numbers = torch.arange(1, len(is_kept) + 1, device=x.device)
        rows = (is_same * numbers[:, None]).sum(0)  # 0 for a node without an entry
        new = self.cell(x, F.pad(before, (0, 0, 0, 0, 1, 0))[rows])
        others = is_kept & ~is_same.any(1)  # of nodes that are not seen now
        others = others.nonzero().squeeze(1)
        env = torch.cat([env[others], seen.step])
        node_id = torch.cat([node_id[others], seen.keys])
        values = torch.cat([before[others], new])
        h = F.pad(values[:, 0], (0, 1), value=1.0)  # the last column counts
        sums = h.new_zeros(len(seen.starts), h.shape[1]).index_add(0, env, h)
        sums, num = sums.tensor_split([-1], 1)
        readout = torch.cat([sums / num.clamp(min=1), num.log1p()], 1)
        return new[:, 0], readout, state.nodes._replace(env=env, keys=node_id, values=values), None

    def cell(self, x: Tensor, state: Tensor) -> Tensor:
        """The states [rows, 2 or 1, H] after inputs x [rows, any]."""
        _, new = self.net.cell(self.net.token(x)[None], state.transpose(0, 1))
        return new.transpose(0, 1)


MEMORIES = {"shifts": Views, "gtrxl": Transformer, "memory": LSTM}  # by an attribute of the agent


def memory_of(policy: Policy) -> Any:
    """None without a memory. ValueError for that of another script."""
    if not hasattr(policy.memory, "state"):
        return None
    for name, memory in MEMORIES.items():
        if hasattr(policy.agent, name):
            return memory(policy)
    raise ValueError(f"the memory of {policy.script.__name__} cannot be exported")


# ---- Program ----
class Program(nn.Module):
    """What is exported: a step of a policy. `forms` are those of its inputs."""

    def __init__(self, policy: Policy, greedy: bool):
        super().__init__()
        self.agent = policy.agent
        self.greedy = greedy
        self.has_value = policy.has_value
        self.ragged = policy.script.Ragged
        self.step_group = policy.script.STEP
        self.memory = memory_of(policy)
        self.memory_forms = {}
        if self.memory:
            self.memory_forms = {"starts": form("bool", "B"), "reward": form("float32", "B")}
            self.memory_forms |= self.memory.forms
        used = {head.part.mask for head in self.agent.head.heads}
        if "node_id" in self.memory_forms:
            used.add("node_ids")
        self.leaves = []  # (leaf, the group whose rows it has)
        self.forms = {}
        for leaf, keys in zip(policy.envs.leaves, keys_of(policy.envs.space)):
            if not leaf.is_input and leaf.path not in used:
                continue
            group = policy.envs.named.get(leaf.path, leaf.group)
            self.leaves.append((leaf, group))
            rows = f"rows of {group}" if group else "B"
            self.forms[leaf.path] = form(leaf.dtype, rows, *leaf.space.shape, keys=keys)
            if group:
                self.forms[f"counts/{group}"] = form("int64", "B", rows=rows)
        self.factors = factors_of(policy)
        self.found = []  # (part, its distribution), in the order of the head
        for head in self.agent.head.heads:
            head.register_forward_hook(self.find)

    def find(self, head: nn.Module, inputs: tuple, probs: Any) -> None:
        """Notes a distribution, when its head returns it."""
        self.found.append((head.part, probs))

    def forward(self, inputs: Tensors, memory: Tensors) -> tuple[Tensors, Tensors]:
        obs = self.observations(inputs)
        memory = dict(memory)
        if self.memory:
            for name, values in memory.items():
                if name != "starts" and self.memory_forms[name]["shape"][0] == "B":
                    starts = memory["starts"].view(-1, *[1] * (values.ndim - 1))
                    memory[name] = values.masked_fill(starts, 0)
            action, log_prob, value = self.memory.step(self.agent, obs, memory, self.greedy)
            memory["starts"] = torch.zeros_like(memory["starts"])
        else:
            action, log_prob, _, value, *_ = self.agent(obs, greedy=self.greedy)
        outputs = {"log_prob": log_prob}
        if self.has_value:
            outputs["value"] = value
        if isinstance(action, Tensor):  # of ppo_graph_agents.py
            action = {self.agent.head.acting: action}
        once = action.get(self.step_group)
        acting = action.get(self.agent.head.acting)
        rows = [once, acting]  # of the factors drawn once, of those in a Sequence
        for path, is_row, shape, box, start in self.factors:
            own, rows[is_row] = rows[is_row].tensor_split([math.prod(shape)], 1)
            own = own.reshape(len(own), *shape)
            if box is not None:
                middle, scale, low, high = box
                own = middle + scale * own
                own = own.clamp(low, high)
            own = own.to(start.dtype)
            outputs[path] = own + start
        return outputs | self.distributions(), memory

    def observations(self, inputs: Tensors) -> dict:
        """What the script's Storage.batch makes of them."""
        index = {}  # group -> (ptr, batch)
        for leaf, group in self.leaves:
            numbers = torch.arange(len(inputs[leaf.path]) + 1)
            index.setdefault(group, (numbers, numbers[:-1]))
            if group:
                stops = inputs[f"counts/{group}"].cumsum(0)
                batch = torch.bucketize(numbers[:-1], stops, right=True)
                index[group] = F.pad(stops, (1, 0)), batch
        obs = {}
        for leaf, group in self.leaves:
            rows = inputs[leaf.path]
            ptr, batch = index[group]
            if leaf.is_links:
                first_node, _ = index[leaf.nodes]
                rows = rows + first_node[batch][:, None]
            obs[leaf.path] = self.ragged(rows, ptr, batch)
        return obs

    def distributions(self) -> Tensors:
        """What describes the distributions of the parts."""
        outputs = {}
        for part, probs in self.found:
            for name in getattr(probs, "arg_constraints", ["log_probs"]):
                outputs[f"{name}/{part.path}"] = getattr(probs, name)
        self.found.clear()
        return outputs


def keys_of(space: gym.Space) -> list[list]:
    """For each leaf the keys and attributes by which it is found in an observation; those in each
    row of a Sequence that is a tuple are a list."""
    if isinstance(space, spaces.Graph):
        names = ["nodes", "edge_links", "edges"]
        return [[name] for name in names[: 2 if space.edge_space is None else 3]]
    if isinstance(space, spaces.Sequence):
        keys = keys_of(space.feature_space)
        return keys if space.stack else [[own] for own in keys]
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [[]]
    children = space if isinstance(space, spaces.Dict) else range(len(space))
    return [[k, *own] for k in children for own in keys_of(space[k])]


def action_form(space: gym.Space) -> list | None:
    """What a Dict, Tuple or Sequence of actions is made of, as `exported.action_of` reads it."""
    if isinstance(space, spaces.Dict):
        return ["dict", {k: action_form(child) for k, child in space.items()}]
    if isinstance(space, spaces.Tuple):
        return ["tuple", list(map(action_form, space))]
    if isinstance(space, spaces.Sequence):
        return ["stacked" if space.stack else "sequence", action_form(space.feature_space)]
    return None


def factors_of(policy: Policy) -> list[tuple]:
    """(path, whether it is in a Sequence, shape, middle, scale, low and high of a Box or None,
    start, which has the dtype) of each factor of the action."""
    factors = []
    for leaf in policy.script.leaves_of(policy.envs.action_space, "action"):
        box = None
        if isinstance(leaf.space, spaces.Box):
            middle, scale = policy.script.scale_of(leaf.space)
            box = np.stack([middle, scale, leaf.space.low, leaf.space.high])
            box = torch.as_tensor(box, dtype=torch.float64)
        dtype = getattr(torch, str(leaf.dtype))
        start = torch.as_tensor(getattr(leaf.space, "start", 0), dtype=dtype)
        factors.append((leaf.path, leaf.is_ragged, leaf.space.shape, box, start))
    return factors


def example(forms: dict[str, dict], dims: dict[str, Dim]) -> tuple[Tensors, dict]:
    """(zeros of these forms, their dimensions that may change) as torch.export takes them."""
    tensors = {}
    dynamic = {}
    for name, own in forms.items():
        shape = []
        for size in own["shape"]:
            if isinstance(size, str):  # different ones have different sizes, none is 0 or 1
                dims.setdefault(size, Dim(f"size_{len(dims)}"))
                size = 11 + 2 * list(dims).index(size)
            shape.append(size)
        tensors[name] = torch.zeros(shape, dtype=getattr(torch, own["dtype"]))
        dynamic[name] = {k: dims[size] for k, size in enumerate(own["shape"]) if size in dims}
    return tensors, dynamic


def export(model_path: str, out_path: str, env: Any = None, greedy: bool = True, **kwargs) -> None:
    """Writes the policy of a model.pt, a JSON file and a program beside it. `env` and `kwargs` are
    those of `load_policy`, and so are the errors. ValueError for what cannot be exported."""
    policy = load_policy(model_path, env, **kwargs)
    program = Program(policy, greedy)
    dims = {}  # by their names in the forms
    inputs, of_inputs = example(program.forms, dims)
    memory, of_memory = example(program.memory_forms, dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `found` is changed
        try:
            exported = torch.export.export(
                program, (inputs, memory), dynamic_shapes=(of_inputs, of_memory), strict=True
            )
        except Exception as error:  # of many kinds
            raise ValueError(f"{model_path}: torch.export cannot trace it: {error}") from error
    torch.export.save(exported, out_path)
    begin = {"B": 1, "entries": 0, "steps": getattr(policy.args, "memory_length", 0)}
    for own in program.memory_forms.values():
        own["begin"] = [begin.get(size, size) for size in own["shape"]]
    file = {
        "script": policy.script.__name__,
        "env_id": wrappers.full_id(policy.args.env_id)[0],
        "env_kwargs": entries(policy.args)[0],
        "observation_space": str(policy.envs.space),
        "action_space": str(policy.envs.action_space),
        "action": action_form(policy.envs.action_space),
        "inputs": program.forms,
        "memory": program.memory_forms,
    }
    Path(out_path).with_suffix(".json").write_text(json.dumps(file, indent=1))
    shutil.copyfile(Path(__file__).with_name("exported.py"), Path(out_path).with_suffix(".py"))


@dataclass
class Args:
    """Writes a trained policy as a program of torch.export."""

    model_path: tyro.conf.Positional[str]
    """model.pt, which --save-model wrote"""
    out_path: tyro.conf.Positional[str]
    """policy.pt2; policy.json, which lists what it takes, and policy.py, which plays, lie beside"""
    greedy: bool = True
    """the program takes the most probable action; if not, it draws one"""


if __name__ == "__main__":
    try:
        args = tyro.cli(Args)
        export(**vars(args))
        program = Path(args.out_path).with_suffix(".py")
        print(f"wrote {args.out_path}; what it takes, as .json; python {program} plays it")
    except (ImportError, OSError, ValueError) as problem:
        sys.exit(str(problem))
