"""A policy that was exported, from the three files NAME.pt2, NAME.json and this one, NAME.py. They
need torch and NumPy, and this file may be changed.

    python policy.py                   # plays ten episodes, with gymnasium and the environment

    from policy import Policy          # in a program, with the files in its folder
    policy = Policy()
    policy.reset()                     # before the first observation of an episode
    action = policy(obs, reward)       # the reward of the step before, for a memory that sees it

Observations are as the policy was trained on them, with --wrap and a mask that was found in `info`:
what load_policy(...).make_env() returns has them.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch


class Policy:
    def __init__(self):
        path = Path(__file__)
        self.program = torch.export.load(path.with_suffix(".pt2")).module()
        self.file = json.loads(path.with_suffix(".json").read_text())
        self.reset()

    def reset(self):
        """An episode begins: what was remembered is forgotten."""
        self.memory = {}
        for name, form in self.file["memory"].items():
            self.memory[name] = torch.zeros(form["begin"], dtype=getattr(torch, form["dtype"]))

    def __call__(self, obs, reward=0.0):
        """The action, an element of the action space."""
        arrays = inputs_of(obs, self.file["inputs"])
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.memory:
            self.memory["reward"] = torch.tensor([reward], dtype=torch.float32)
        with torch.no_grad():
            outputs, self.memory = self.program(inputs, self.memory)
        return action_of(self.file["action"], outputs)


def inputs_of(obs, forms):
    """What the program takes for one observation. Those of several are joined along axis 0."""
    inputs = {}
    rows = {}
    for name, form in forms.items():
        if "keys" in form:
            value = read(obs, form["keys"])
            value = np.array([] if value is None else value).astype(form["dtype"])
            first, *shape = form["shape"]
            rows[first] = 1 if first == "B" else len(value)
            inputs[name] = value.reshape(rows[first], *shape)
        else:
            inputs[name] = np.array([rows[form["rows"]]])
    return inputs


def read(value, keys):
    """What is in an observation behind these keys and attributes."""
    for k in keys:
        if isinstance(k, list):  # the keys in each row of a Sequence that is a tuple
            value = [read(row, k) for row in value]
        else:
            value = getattr(value, k) if hasattr(value, "edge_links") else value[k]
    return value


def action_of(form, outputs, path="action", row=0):
    """The action that the outputs for one observation say. `form` is "dict", "tuple", "sequence" or
    "stacked", a Sequence that is an array, with the forms of what is inside; else it is None."""
    if form is None:
        return outputs[path][row].numpy()
    kind, inside = form
    if kind == "dict":
        return {k: action_of(own, outputs, f"{path}.{k}", row) for k, own in inside.items()}
    if kind == "tuple":
        children = enumerate(inside)
        return tuple(action_of(own, outputs, f"{path}.{k}", row) for k, own in children)
    num = min(len(own) for name, own in outputs.items() if f"{name}.".startswith(f"{path}."))
    rows = tuple(action_of(inside, outputs, path, k) for k in range(num))
    return np.array(rows) if kind == "stacked" else rows


if __name__ == "__main__":
    import gymnasium as gym

    sys.path.append(os.getcwd())  # where the environment's module may be
    policy = Policy()
    env = gym.make(policy.file["env_id"], disable_env_checker=True, **policy.file["env_kwargs"])
    for name in ("observation_space", "action_space"):
        own = str(getattr(env, name))
        if own != policy.file[name]:
            sys.exit(
                f"{name}: the environment has {own}, the policy was trained with "
                f"{policy.file[name]}: wrap the environment as in its training, see above"
            )
    for episode in range(10):
        obs, _ = env.reset(seed=episode)
        policy.reset()
        reward = total = 0.0
        done = False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(policy(obs, reward))
            total += reward
            done = terminated or truncated
        print(f"episode {episode}: return {total:.5g}")
