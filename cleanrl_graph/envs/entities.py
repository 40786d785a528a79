"""EntityGym-v0: an environment of entity-gym, whose observations are lists of entities.

    python cleanrl_graph/ppo_graph.py --env-id envs:EntityGym-v0 --env-kwargs '{"name": "Count"}'

entity-gym and the environment's module are imported when one is made. `benchmark/
requirements-entities.txt` says how to install what is needed.
"""

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .petting_zoo import import_function
from .toy import mask_space

if not hasattr(np, "bool8"):  # here, so that copies in other processes find it, too
    np.bool8 = np.bool_  # entity-gym uses the name that NumPy 2 has no more

MOST = 2**20  # rows to choose from, an upper bound that costs nothing
KEYWORDS = {"node", "nodes", "edge", "edges"}  # names of actions that would mean a choice of a row


class Option(NamedTuple):
    """One of the environment's actions, and how it is said here."""

    name: str
    space: Any  # of entity-gym
    set: str  # the set whose rows are selected, "" of a category
    rows: str  # the set whose rows act, "" where one entity acts, or the whole
    key: str  # in the action space, inside of that of `rows` if it has any


class EntityGymEnv(gym.Env):
    """An environment with entity-gym's interface, as it is.

    Observation, a dict:
        the name of each type of entities: a Sequence with stack=True, float32 [n, features]. A type
            without features has a 1 for each entity.
        "global": the global features, float32, if there are any.
        "hidden": if asked for, a dict of sets, the entities that `visible` hides from the policy:
            --critic-only hidden. They are in no other set.
        "node_ids": int64, a number for each entity that is the same throughout an episode; of the
            set that acts or, if none does, of the only set, if its entities have ids.
        "action_mask": as the action space, a mask for each action.
    Action, a Dict:
        a global or single entity's category: Discrete, under the action's name.
        a category for each of several entities: a Sequence under the name of their set. A row that
            may not act has one option.
        one entity selects another: Discrete under the name of the set from which it chooses.
        several entities select: a Sequence of these.
    Entities of several types that act, or can be chosen, are a set of their own, "actors" or of the
    action's name, beside those of the types: an entry for each type, 1 for the row's own, then all
    features, 0 for those that the row's type lacks. If it is empty it has a row of zeros. Two
    actions that choose from one set have a set each, too.

    Which entities act and can be chosen is seen in one first observation. `actors` and `actees` say
    it where that is not typical.

    Episode end: terminated when the environment says `done`; there is no truncation.
    info["eval"]: its metrics in the last step of an episode. Chance: Python's and NumPy's global
    generators are the environment's own while it is called, fixed by the seed of `reset`.

    Args:
        name: that of one of entity-gym's examples, or "module:Class", or a class.
        kwargs: its keyword arguments.
        hidden: adds "hidden". The policy sees it, too, without --critic-only hidden.
        actors: action -> types of the entities that do it, of which there may be several at once.
        actees: action -> types of the entities that it selects.
    Raises gymnasium.error.Error for names that cannot be imported, and actions of entities that are
    in none of the sets.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, name, kwargs=None, hidden=False, actors=None, actees=None, render_mode=None):
        make = name if callable(name) else class_of(name)
        self.render_mode = render_mode
        self.python_state = random.Random(int(self.np_random.integers(2**31))).getstate()
        self.bits = np.random.MT19937(int(self.np_random.integers(2**31)))
        with self.own_chance():
            self.env = make(**(kwargs or {}))
            first = self.env.reset()
        declared = self.env.obs_space()
        self.types = {key: list(own.features) for key, own in declared.entities.items()}
        self.global_names = list(declared.global_features)
        self.sets = {etype: [etype] for etype in self.types}  # name -> types of its rows
        self.hidden = [etype for etype in self.types if etype in first.visible] if hidden else []
        if hidden and not self.hidden:
            raise gym.error.Error(f"hidden: {name} has no `visible` in its first observation")
        several = self.several(first, actors or {})
        self.acting = ""
        if several:
            types = set().union(*several.values())
            self.acting = self.set_of("actors", [etype for etype in self.types if etype in types])
        self.options = self.make_options(first, several, actees or {})
        self.id_set = self.acting
        if len(self.sets) == 1:
            self.id_set = min(self.sets)
        if self.id_set:
            _, ids = self.rows(first, self.id_set)
            if None in ids or not ids:
                self.id_set = ""
        self.action_space, masks = self.action_spaces()
        self.observation_space = spaces.Dict(self.inputs() + [("action_mask", masks)])

    # ---- What is declared ----
    def several(self, first, actors: dict) -> dict[str, list]:
        """Actions of which several entities do each their own -> types of these."""
        declared = self.env.action_space()
        several = {}
        for action, space in declared.items():
            mask = first.actions.get(action)
            if action in actors:
                several[action] = actors[action]
            elif kind_of(space) != "Global" and mask is not None:
                if len(self.ids_of(first, mask.actor_types, mask.actor_ids)) > 1:
                    several[action] = self.types_of(first, mask.actor_types, mask.actor_ids)
        for action in actors:
            if action not in declared:
                raise gym.error.Error(f"there is no action {action!r}, there are {list(declared)}")
        return several

    def make_options(self, first, several: dict, actees: dict) -> list[Option]:
        """The actions, those of several entities last. Adds the sets that they need."""
        declared = self.env.action_space()
        chosen = set()
        options = []
        for action in sorted(declared, key=several.__contains__):
            space = declared[action]
            option = Option(action, space, "", "", action)
            if action in several:
                option = option._replace(rows=self.acting)
            if kind_of(space) == "Select":
                mask = first.actions.get(action)
                types = list(self.types)
                if action in actees:
                    types = actees[action]
                elif mask is not None:
                    types = self.types_of(first, mask.actee_types, mask.actee_ids)
                group = self.set_of(action, types, chosen)
                chosen.add(group)
                option = option._replace(set=group, key=group)
            options.append(option)
        taken = set(self.sets) | KEYWORDS
        for i, option in enumerate(options):  # a category that would be read as a choice
            if not option.set and option.key in taken:
                options[i] = option._replace(key=free_name(option.key, taken))
        return options

    def set_of(self, name: str, types: list[str], taken: set[str] = frozenset()) -> str:
        """The set whose rows are the entities of these types, made if there is none."""
        if len(types) == 1 and types[0] not in taken:
            return types[0]
        name = free_name(name, set(self.sets) | {"global", "hidden"})
        self.sets[name] = types
        return name

    def columns(self, name: str) -> list[str]:
        """The names of the columns of a set."""
        types = self.sets[name]
        if len(types) == 1:
            return self.types[types[0]] or ["1"]
        features = dict.fromkeys(sum([self.types[etype] for etype in types], []))
        return [f"is {etype}" for etype in types] + list(features)

    def inputs(self) -> list[tuple[str, gym.Space]]:
        """The keys of an observation but the mask. Notes the names of all columns."""
        self.feature_names = {}  # key -> names of its columns, for --wrap relative
        parts = []
        for name in self.sets:
            self.feature_names[name] = self.columns(name)
            parts.append((name, set_space(len(self.columns(name)))))
        if self.global_names:
            self.feature_names["global"] = self.global_names
            shape = (len(self.global_names),)
            parts.append(("global", spaces.Box(-np.inf, np.inf, shape, np.float32)))
        hidden = []
        for etype in self.hidden:
            self.feature_names[f"hidden.{etype}"] = self.columns(etype)
            hidden.append((etype, set_space(len(self.columns(etype)))))
        if hidden:
            parts.append(("hidden", spaces.Dict(hidden)))
        if self.id_set:
            id_space = spaces.Box(0, 2**62, (), np.int64)
            parts.append(("node_ids", spaces.Sequence(id_space, stack=True)))
        return parts

    def action_spaces(self) -> tuple[spaces.Dict, spaces.Dict]:
        """Of actions, and of their masks."""
        actions = {"": [], self.acting: []}  # the set that acts, or "" -> (key, space)
        masks = {"": [], self.acting: []}
        for option in self.options:
            if option.set:
                action, mask = spaces.Discrete(MOST), mask_space(1)
            else:
                num = len(option.space)
                action = spaces.Discrete(num)
                mask = mask_space(num) if option.rows else spaces.MultiBinary(num)
            actions[option.rows].append((option.key, action))
            masks[option.rows].append((option.key, mask))
        if self.acting:
            each = spaces.Sequence(spaces.Dict(actions[self.acting]))
            actions[""].append((self.acting, each))
            masks[""].append((self.acting, spaces.Dict(masks[self.acting])))
        return spaces.Dict(actions[""]), spaces.Dict(masks[""])

    # ---- An episode ----
    @contextlib.contextmanager
    def own_chance(self):
        """Python's and NumPy's global generators are those of this environment."""
        python_state = random.getstate()
        bits = np.random.get_bit_generator()
        random.setstate(self.python_state)
        np.random.set_bit_generator(self.bits)
        try:
            yield
        finally:
            self.python_state = random.getstate()
            random.setstate(python_state)
            np.random.set_bit_generator(bits)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.python_state = random.Random(seed).getstate()
            self.bits = np.random.MT19937(seed)
        with self.own_chance():
            obs = self.env.reset()
        self.numbers = {}  # id -> its number in this episode
        return self.observe(obs), {}

    def step(self, action):
        actions = {}
        for option in self.options:
            rows = [action]
            if option.rows:
                rows = action[option.rows]
            actions[option.name] = self.chosen(option, [int(row[option.key]) for row in rows])
        with self.own_chance():
            obs = self.env.act(actions)
        info = {}
        if obs.done and obs.metrics:
            info["eval"] = dict(obs.metrics)
        return self.observe(obs, obs.done), float(obs.reward), bool(obs.done), False, info

    def chosen(self, option: Option, own: list[int]) -> Any:
        """An action of entity-gym. `own` has a value for each row that may act, or the one."""
        import entity_gym.env as gyms

        if kind_of(option.space) == "Global":
            label = option.space.index_to_label[own[0]]
            return gyms.GlobalCategoricalAction(index=own[0], label=label)
        actors, places, ids = self.acted[option.name]
        values = np.array([own[place] for place in places], np.int64)
        if option.set:
            return gyms.SelectEntityAction(actors, [ids[value] for value in values])
        return gyms.CategoricalAction(actors, values, option.space.index_to_label)

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()

    # ---- Observations ----
    def observe(self, obs, is_last: bool = False) -> dict:
        """The observation; nobody acts in a last one. A first one may say that it is done, and is
        acted on nevertheless. Remembers which entities the actions mean that follow it."""
        result = {}
        ids = {"": [None]}  # set -> id of each row; "" has one
        for name in self.sets:
            result[name], ids[name] = self.rows(obs, name)
        if self.global_names:
            values = np.asarray(obs.global_features, np.float32)
            result["global"] = values.reshape(len(self.global_names))
        if self.hidden:
            result["hidden"] = {key: self.features(obs, key, False)[0] for key in self.hidden}
        if self.id_set:
            if ids[self.id_set].count(None) > 1:
                raise gym.error.Error(f"an entity of the set {self.id_set!r} has no id")
            own = [self.numbers.setdefault(key, len(self.numbers)) for key in ids[self.id_set]]
            result["node_ids"] = np.array(own, np.int64)
        masks = {}
        self.acted = {}  # action -> (ids of those that act, their rows, ids of the rows to select)
        for option in self.options:
            own = obs.actions.get(option.name)
            if is_last:
                own = None
            mask = self.mask(obs, own, option, ids)
            if option.rows:
                masks.setdefault(option.rows, {})[option.key] = mask
            else:
                masks[option.key] = mask
        result["action_mask"] = masks
        return result

    def features(self, obs, etype: str, is_visible: bool = True) -> tuple[np.ndarray, list]:
        """(float32 [n, columns], n ids or None) of the entities of a type that the policy sees, or
        of those that it does not."""
        width = len(self.types[etype])
        values = obs.features.get(etype, ())
        num = len(values)
        values = np.asarray(values, np.float32).reshape(num, width)
        if width == 0:
            values = np.ones((num, 1), np.float32)
        ids = list(obs.ids.get(etype, [None] * num))
        if etype not in obs.visible and is_visible:
            return values, ids
        shown = (np.ravel(obs.visible.get(etype, np.ones(num))) != 0) == is_visible
        return values[shown], [key for key, is_shown in zip(ids, shown) if is_shown]

    def rows(self, obs, name: str) -> tuple[np.ndarray, list]:
        """(float32 [n, columns], n ids or None) of a set."""
        types = self.sets[name]
        if len(types) == 1:
            values, ids = self.features(obs, types[0])
        else:
            columns = self.columns(name)
            blocks = []
            ids = []
            for k, etype in enumerate(types):
                own, own_ids = self.features(obs, etype)
                block = np.zeros((len(own), len(columns)), np.float32)
                block[:, k] = 1
                block[:, [columns.index(key) for key in self.types[etype]]] = own
                blocks.append(block)
                ids += own_ids
            values = np.concatenate(blocks)
        if not len(values) and any(option.set == name for option in self.options):
            return np.zeros((1, values.shape[1]), np.float32), [None]
        return values, ids

    def mask(self, obs, own: Any, option: Option, ids: dict[str, list]) -> np.ndarray:
        """What the action may be, given entity-gym's mask, or None. Notes who acts."""
        if kind_of(option.space) == "Global":
            mask = np.ones(len(option.space), np.int8)
            if own is not None and own.mask is not None:
                mask[:] = np.ravel(own.mask)
            return mask
        actors = []
        options = ids[option.set]
        if not option.set:
            options = option.space.index_to_label
        columns = np.arange(len(options))  # what those who act may choose
        if own is not None:
            actors = list(self.ids_of(obs, own.actor_types, own.actor_ids))
            if option.set:
                actees = self.ids_of(obs, own.actee_types, own.actee_ids)
                columns = self.places(actees, options, option, "actees")
                actors = actors * (len(columns) > 0)
        if option.rows:
            places = self.places(actors, ids[option.rows], option, "actors")
        elif len(actors) > 1:
            raise gym.error.Error(
                f"action {option.name!r}: {len(actors)} entities act where one did at first; give "
                f'"actors": {{"{option.name}": [their types]}}'
            )
        else:
            places = np.arange(len(actors))
        allowed = np.ones((len(actors), len(columns)), np.int8)
        if len(actors) and own.mask is not None and len(own.mask):
            allowed[:] = own.mask
        mask = np.zeros((len(ids[option.rows]), len(options)), np.int8)
        mask[:, :1] = 1  # of those who do not act
        mask[places] = 0
        mask[np.ix_(places, columns)] = allowed
        self.acted[option.name] = actors, places, options
        if option.set:
            return mask.reshape(-1, 1)
        return mask if option.rows else mask[0]

    def places(self, own: list, ids: list, option: Option, kwarg: str) -> np.ndarray:
        """Where these entities are among those of a set, int64 [n]."""
        index = dict(zip(ids, range(len(ids))))
        places = []
        for key in own:
            if key not in index:
                name = {"actees": option.set, "actors": option.rows}[kwarg]
                raise gym.error.Error(
                    f"action {option.name!r}: entity {key!r} is not in the set {name!r} of "
                    f'{self.sets[name]}, or not visible; give "{kwarg}": '
                    f'{{"{option.name}": [its types]}}'
                )
            places.append(index[key])
        return np.array(places, np.int64)

    def ids_of(self, obs, types: list[str] | None, ids: list | None) -> list:
        """The entities that a mask names by ids or by types; all, if by neither."""
        if ids is not None:
            return ids
        found = []
        for etype in self.types if types is None else types:
            found += list(obs.ids.get(etype, ()))
        return found

    def types_of(self, obs, types: list[str] | None, ids: list | None) -> list[str]:
        """The types of these entities, all if there are none."""
        if ids is not None:
            types = [etype for etype in self.types if set(obs.ids.get(etype, ())) & set(ids)]
        return list(types or self.types)


def class_of(name: str) -> Callable:
    """The class of environments of that name. gymnasium.error.Error where it cannot be imported."""
    try:
        from entity_gym.examples import ENV_REGISTRY
    except ModuleNotFoundError as error:
        raise gym.error.DependencyNotInstalled(
            f"EntityGym-v0 needs {error.name}: pip install --no-deps --ignore-requires-python -r "
            "benchmark/requirements-entities.txt"
        ) from error
    if name in ENV_REGISTRY:
        return ENV_REGISTRY[name]
    if ":" not in str(name):
        raise gym.error.Error(f"name is {name!r}; {list(ENV_REGISTRY)} or module:Class is needed")
    return import_function("name", name, "module:Class")


def kind_of(space: Any) -> str:
    """ "Global", "Categorical" or "Select"."""
    name = type(space).__name__
    for kind in ("Global", "Categorical", "Select"):
        if name.startswith(kind):
            return kind
    raise gym.error.Error(f"an action space {name} is not one of entity-gym's")


def set_space(width: int) -> spaces.Sequence:
    return spaces.Sequence(spaces.Box(-np.inf, np.inf, (width,), np.float32), stack=True)


def free_name(name: str, taken: set[str]) -> str:
    """The name, with an underscore for each time that it is taken."""
    while name in taken:
        name += "_"
    return name
