"""Cheap synthetic tasks whose actions have several parts, or any bounds, with a known optimum.

VerbObject-v0   a verb, then an object that the mask allows for this verb
Switches-v0     bits, some of which may not be 1
Assign-v0       each robot chooses a task; a mask says which may take which
Convoy-v0       one speed for all, and something of its own for each robot
Dials-v0        two numbers, whose bounds may be any

A fresh observation is drawn at every step. The episode terminates after `episode_length` = T steps,
and the optimal return is T, of Dials-v0 0.
"""

import numpy as np
from gymnasium import spaces

from .actions import StepsEnv
from .toy import mask_space


class VerbObjectEnv(StepsEnv):
    """Take the wanted verb, and of the objects that are legal for it the one with the highest
    number or, `as_rows`, the largest one. With masks of verbs and objects apart most pairs that a
    policy tries are illegal: give --autoregressive.

    Observation: "wanted": float32 [num_verbs], one-hot; "action_mask": int8 [num_verbs,
    num_objects]. Action: [verb, object]. `as_rows`: "things": float32 [n, 1], the sizes of 2 to
    `num_objects` objects, and masks {"act": int8 [num_verbs], "things": int8 [num_verbs * n]}, verb
    by verb. Action: {"act": verb, "things": index}. Reward 1 if both are right, otherwise 0, and
    `num_illegal` counts the pairs that were not legal.
    """

    def __init__(self, num_verbs=4, num_objects=5, as_rows=False, episode_length=8):
        super().__init__(episode_length)
        self.num_verbs = num_verbs
        self.num_objects = num_objects
        self.as_rows = as_rows
        self.num_illegal = 0
        verb = spaces.Discrete(num_verbs)
        children = {"wanted": spaces.Box(0, 1, (num_verbs,), np.float32)}
        if as_rows:
            size = spaces.Box(0, 1, (1,), np.float32)
            children["things"] = spaces.Sequence(size, stack=True)
            masks = {
                "act": spaces.MultiBinary(num_verbs),
                "things": mask_space(),
            }
            children["action_mask"] = spaces.Dict(masks)
            parts = {
                "act": verb,
                "things": spaces.Discrete(num_objects),
            }
            self.action_space = spaces.Dict(parts)
        else:
            children["action_mask"] = spaces.MultiBinary((num_verbs, num_objects))
            self.action_space = spaces.MultiDiscrete([num_verbs, num_objects])
        self.observation_space = spaces.Dict(children)

    def draw(self):
        rng = self.np_random
        num = self.num_objects
        self.sizes = np.arange(num) / num
        if self.as_rows:
            num = int(rng.integers(2, num + 1))
            self.sizes = rng.random(num)
        is_legal = rng.random((self.num_verbs, num)) < 0.4
        for objects in is_legal:  # at least one
            objects[rng.integers(num)] = True
        self.legal = is_legal.astype(np.int8)
        self.verb = int(rng.integers(self.num_verbs))
        self.object = int(np.argmax(self.sizes + self.legal[self.verb]))

    def observation(self):
        obs = {"wanted": np.eye(self.num_verbs, dtype=np.float32)[self.verb]}
        if not self.as_rows:
            return obs | {"action_mask": self.legal}
        obs["things"] = self.sizes.astype(np.float32)[:, None]
        obs["action_mask"] = {
            "act": np.ones(self.num_verbs, np.int8),
            "things": self.legal.ravel(),
        }
        return obs

    def reward(self, action):
        verb, thing = action
        if self.as_rows:
            verb = action["act"]
            thing = action["things"]
        is_there = thing < len(self.sizes)
        self.num_illegal += not (is_there and self.legal[verb, thing])
        return verb == self.verb and thing == self.object


class SwitchesEnv(StepsEnv):
    """Turn on the switches that want it and may be on, and no others.

    Observation: "wants": float32 [num_bits], 0 or 1; "action_mask": int8 [num_bits], which may be
    on. Action: int8 [num_bits]. `in_rows`: 0 to `num_bits` things with two switches each, "things":
    float32 [n, 2], masks int8 [n, 4], for each switch whether it may be off and on, and an action
    of [n, 2]. What may be on is seen in the mask alone. Reward: the share of switches that are
    right, 1 if there are none, but 0 if the mask was not obeyed.
    """

    def __init__(self, num_bits=6, in_rows=False, episode_length=8):
        super().__init__(episode_length)
        self.num_bits = num_bits
        self.in_rows = in_rows
        if in_rows:
            wants = spaces.Box(0, 1, (2,), np.float32)
            children = {
                "things": spaces.Sequence(wants, stack=True),
                "action_mask": mask_space(4),
            }
            switches = spaces.MultiBinary(2)
            self.action_space = spaces.Sequence(switches, stack=True)
        else:
            children = {
                "wants": spaces.Box(0, 1, (num_bits,), np.float32),
                "action_mask": spaces.MultiBinary(num_bits),
            }
            self.action_space = spaces.MultiBinary(num_bits)
        self.observation_space = spaces.Dict(children)

    def draw(self):
        rng = self.np_random
        shape = self.num_bits
        if self.in_rows:
            num = int(rng.integers(self.num_bits + 1))
            shape = (num, 2)
        self.wants = rng.integers(2, size=shape)
        self.may = rng.integers(2, size=shape)

    def observation(self):
        wants = self.wants.astype(np.float32)
        may = self.may.astype(np.int8)
        if not self.in_rows:
            return {"wants": wants, "action_mask": may}
        mask = np.ones((len(may), 2, 2), np.int8)
        mask[:, :, 1] = may
        mask = mask.reshape(-1, 4)
        return {"things": wants, "action_mask": mask}

    def reward(self, action):
        action = np.asarray(action)
        if (action > self.may).any():
            return 0.0
        right = action == self.wants * self.may
        return right.mean() if right.size else 1.0


class AssignEnv(StepsEnv):
    """Give each robot a task of its colour that it may take; several may take the same one.

    Observation: "robots": float32 [n, num_colours], one-hot, n from 0 to `max_robots`; "tasks":
    float32 [m, num_colours], m from 1 to `max_tasks`; "action_mask": {"robots": {"tasks": int8 [n *
    m]}}, robot by robot. A task of another colour may be allowed, one of its own is forbidden at
    times, but each robot has one that fits. Action: {"robots": ({"tasks": index}, ...)}. Reward:
    the share of robots that are right, 1 without robots; info["rewards"] has each robot's own.
    """

    def __init__(self, max_robots=4, max_tasks=6, num_colours=3, episode_length=8):
        super().__init__(episode_length)
        self.max_robots = max_robots
        self.max_tasks = max_tasks
        self.num_colours = num_colours
        colour = spaces.Box(0, 1, (num_colours,), np.float32)
        rows = spaces.Sequence(colour, stack=True)
        mask = spaces.Dict({"tasks": mask_space()})
        children = {
            "robots": rows,
            "tasks": rows,
            "action_mask": spaces.Dict({"robots": mask}),
        }
        self.observation_space = spaces.Dict(children)
        task = spaces.Dict({"tasks": spaces.Discrete(max_tasks)})
        robots = spaces.Sequence(task)
        self.action_space = spaces.Dict({"robots": robots})

    def draw(self):
        rng = self.np_random
        if self.num_steps == 0:  # an episode keeps the number of robots
            self.num_robots = int(rng.integers(self.max_robots + 1))
        num_tasks = int(rng.integers(1, self.max_tasks + 1))
        self.tasks = rng.integers(self.num_colours, size=num_tasks)
        self.robots = rng.choice(self.tasks, self.num_robots)
        self.right = self.robots[:, None] == self.tasks
        self.legal = rng.random(self.right.shape) < 0.5
        for legal, right in zip(self.legal, self.right):  # a task of its colour is allowed
            tasks = np.flatnonzero(right)
            legal[rng.choice(tasks)] = True
        self.right &= self.legal

    def observation(self):
        colours = np.eye(self.num_colours, dtype=np.float32)
        mask = self.legal.astype(np.int8).ravel()
        return {
            "robots": colours[self.robots],
            "tasks": colours[self.tasks],
            "action_mask": {"robots": {"tasks": mask}},
        }

    def step(self, action):
        chosen = [own["tasks"] for own in action["robots"]]
        rewards = self.right[np.arange(len(chosen)), chosen].astype(np.float32)
        obs, reward, terminated, truncated, info = super().step(rewards)
        return obs, reward, terminated, truncated, info | {"rewards": rewards}

    def reward(self, action):
        return action.mean() if len(action) else 1.0


class ConvoyEnv(StepsEnv):
    """Drive at the speed that is wanted, and each robot in the gear of its kind.

    Observation: "wanted": float32 [1] in 0..1; "robots": float32 [n, num_gears], one-hot, n from 0
    to `max_robots`. Action: {"robots": (gear, ...), "speed": float32 [1] in 0..10}. Reward: the
    mean of 1 - |speed - 10 wanted| / 5, at least 0, and the share of robots that are right, 1
    without robots.
    """

    def __init__(self, max_robots=4, num_gears=3, episode_length=8):
        super().__init__(episode_length)
        self.max_robots = max_robots
        self.num_gears = num_gears
        kind = spaces.Box(0, 1, (num_gears,), np.float32)
        robots = spaces.Sequence(kind, stack=True)
        wanted = spaces.Box(0, 1, (1,), np.float32)
        children = {
            "robots": robots,
            "wanted": wanted,
        }
        self.observation_space = spaces.Dict(children)
        gear = spaces.Discrete(num_gears)
        parts = {
            "robots": spaces.Sequence(gear),
            "speed": spaces.Box(0, 10, (1,), np.float32),
        }
        self.action_space = spaces.Dict(parts)

    def draw(self):
        rng = self.np_random
        num = int(rng.integers(self.max_robots + 1))
        self.gears = rng.integers(self.num_gears, size=num)
        self.wanted = rng.random(1, np.float32)

    def observation(self):
        kinds = np.eye(self.num_gears, dtype=np.float32)
        return {"robots": kinds[self.gears], "wanted": self.wanted}

    def reward(self, action):
        speed = float(action["speed"][0])
        wanted = 10 * float(self.wanted[0])
        good = max(0.0, 1 - abs(speed - wanted) / 5)
        right = np.array(action["robots"]) == self.gears
        share = right.mean() if len(right) else 1.0
        return (good + share) / 2


class DialsEnv(StepsEnv):
    """Turn two dials to where the observation says.

    Observation: float32 [2] in -1..1, where -1 means `low` and 1 means `high`. Action: float32 [2]
    in `low`..`high`. Reward: minus the mean squared error, in the observation's units.
    """

    def __init__(self, low=-1.0, high=1.0, episode_length=8):
        super().__init__(episode_length)
        self.middle = (low + high) / 2
        self.half = (high - low) / 2
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Box(low, high, (2,), np.float32)

    def draw(self):
        self.wanted = self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def observation(self):
        return self.wanted

    def reward(self, action):
        places = (action.astype(np.float64) - self.middle) / self.half
        return -((places - self.wanted) ** 2).mean()
