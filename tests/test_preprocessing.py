"""Running observation statistics, hidden entries and node ids: what the shared blocks do with observed values."""

import gymnasium as gym
import numpy as np
import ppo_framestack
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import OBSERVATIONS, graph_space, rows_of, sample, small_args, stored, vector
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.floats(-1000, 1000), st.floats(1e-2, 1000),
       st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_running_statistics(sizes, mean, scale, seed):
    """P3: mean and variance after any number of batches, empty ones too, are those of all rows together."""
    (leaf,) = ppo_graph.leaves_of(vector(2, 2, low=-np.inf, high=np.inf))
    rows = ppo_graph.Rows(leaf, norm_obs=True)
    rng = np.random.default_rng(seed)
    batches = [torch.as_tensor(rng.normal(mean, scale, (num, 2, 2)), dtype=torch.float32) for num in sizes]
    for batch in batches:
        rows.observe(batch)
    seen = torch.cat(batches).flatten(1).double().numpy()
    assert rows.count == len(seen)
    if len(seen):
        np.testing.assert_allclose(rows.mean, seen.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(rows.var, seen.var(0), rtol=1e-6, atol=1e-9)
        expected = ((seen - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(rows(torch.cat(batches)), expected, atol=1e-2)
    else:
        assert torch.equal(rows(torch.ones(1, 2, 2)), torch.ones(1, 4))  # nothing is changed before the first rows


def test_statistics_of_every_leaf():
    """P3: dense vectors, node features, edge features and set rows have statistics per column; categories, bits,
    images, masks and links have none."""
    space = spaces.Dict(graph=graph_space(vector(2)), position=vector(3), gear=spaces.Discrete(3),
                        on=spaces.MultiBinary(2), camera=spaces.Box(0, 255, (8, 8, 1), np.uint8),
                        items=spaces.Sequence(vector(2), stack=True),
                        ints=spaces.Box(-5, 5, (2,), np.int64))
    rng = np.random.default_rng(0)
    observations = [[{k: sample_of(child, rng) for k, child in space.items()} for _ in range(3)] for _ in range(4)]
    storage, leaves = stored(space, observations)
    encoder = ppo_graph.Encoder(leaves, small_args(norm_obs=True))
    encoder.observe(storage)
    with_statistics = {path for path, rows in encoder.rows.items() if getattr(rows, "norm_obs", False)}
    names = ["graph.nodes", "graph.edges", "position", "items", "ints"]
    assert with_statistics == {ppo_graph.key(path) for path in names}
    for leaf, values, num in zip(leaves, storage.values, storage.num_rows):
        if leaf.path in names:
            rows = encoder.rows[ppo_graph.key(leaf.path)]
            assert rows.count == num and num > 0
            np.testing.assert_allclose(rows.mean, values[:num].double().mean(0), rtol=1e-6, atol=1e-6)


def sample_of(space, rng):


    return sample(space, rng, lambda rng: rng.integers(1, 5))


def test_a_row_is_counted_once():
    """P3: the steps that a storage keeps for the next rollout are not counted again."""
    (leaf,) = leaves = ppo_graph.leaves_of(vector(1))
    storage, encoder = ppo_graph.Storage(leaves, CPU), ppo_graph.Encoder(leaves, small_args(norm_obs=True))
    for t in range(9):
        storage.append(*ppo_graph.collate(leaves, [[np.array([t], np.float32)]]))
        if t % 3 == 2:
            encoder.observe(storage)
            storage.clear(keep=2)
    rows = encoder.rows[ppo_graph.key(leaf.path)]
    assert rows.count == 9 and rows.mean.item() == 4.0
    assert storage.gather(np.arange(2))["obs"].ravel().tolist() == [7, 8]


@pytest.mark.parametrize("script", [ppo_graph, ppo_framestack])
def test_statistics_are_saved_and_frozen_in_evaluation(script, tmp_path, monkeypatch):
    """P3: the statistics travel with the model; evaluation uses and does not change them."""
    counts, original = [], script.Rows.observe
    monkeypatch.setattr(script.Rows, "observe", lambda self, rows: counts.append(len(rows)) or original(self, rows))
    flags = dict(env_id="Random-v0", env_kwargs={"observation": "vector"}, norm_obs=True, eval_episodes=3)
    script.main(small_args(script, save_model=True, run_dir=str(tmp_path / "a"), **flags))
    assert sum(counts) in (2 * 24, 2 * 24 + 3)  # 2 rollouts of 3 envs x 8 steps (and the newest step of a memory)
    path = next((tmp_path / "a").glob("*/model.pt"))
    model = torch.load(path, weights_only=True)["model"]
    (count,) = [value for name, value in model.items() if name.endswith("count")]
    assert count == sum(counts)
    agents, make = [], script.Agent
    monkeypatch.setattr(script, "Agent", lambda *args: agents.append(make(*args)) or agents[-1])
    script.main(small_args(script, load_model=str(path), run_dir=str(tmp_path / "b"), **flags | {"total_timesteps": 0}))
    assert all(torch.equal(agents[0].state_dict()[name], value) for name, value in model.items())


def test_normalisation_helps_where_units_differ(tmp_path):
    """P3: with observations far from zero a policy learns with --norm-obs and not without."""
    class Offset(gym.Env):
        observation_space, action_space = vector(1, low=0, high=1e5), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t, self.bit = 0, int(self.np_random.integers(2))
            return np.array([5000 + self.bit], np.float32), {}

        def step(self, action):
            reward, self.t = float(action == self.bit), self.t + 1
            self.bit = int(self.np_random.integers(2))
            return np.array([5000 + self.bit], np.float32), reward, False, self.t == 10, {}

    gym.register("Offset-v0", entry_point=Offset)
    flags = dict(env_id="Offset-v0", num_envs=8, num_steps=16, total_timesteps=6000, learning_rate=3e-3, gamma=0.5,
                 eval_episodes=20, run_dir=str(tmp_path))
    returns = [np.mean([row["return"] for row in ppo_graph.main(small_args(**flags, norm_obs=norm))])
               for norm in (True, False)]
    assert returns[0] > 9.5 and returns[1] < 7.5


def test_hidden_entries():
    """T4: --mask-obs removes entries of a vector, values and bounds alike."""
    env = ppo_graph.make_env("CartPole-v1", {}, "1,3")
    full = gym.make("CartPole-v1")
    obs, whole = env.reset(seed=3)[0], full.reset(seed=3)[0]
    assert env.observation_space.shape == (2,) and obs.tolist() == whole[[0, 2]].tolist()
    assert env.observation_space.high.tolist() == full.observation_space.high[[0, 2]].tolist()
    obs, whole = env.step(1)[0], full.step(1)[0]
    assert obs.tolist() == whole[[0, 2]].tolist() and env.observation_space.contains(obs)
    assert ppo_graph.Envs([lambda: env]).leaves[0].shape == (2,)


@pytest.mark.parametrize("env_id, kwargs, entries", [
    ("CartPole-v1", {}, "4"), ("CartPole-v1", {}, "0,-1"), ("Random-v0", {"observation": "mixed"}, "0"),
    ("Random-v0", {"observation": "discrete"}, "0")])
def test_entries_that_cannot_be_hidden(env_id, kwargs, entries):
    """A space that is no vector, or has no such entry, is named."""
    with pytest.raises(ValueError, match=f"--mask-obs {entries}: .* is not a Box vector that has these entries"):
        ppo_graph.make_env(env_id, kwargs, entries)


class Ids(gym.Env):
    """A graph whose nodes have ids."""

    action_space = spaces.Discrete(2)

    def __init__(self, ids_space=None, node_ids=(5, 3, 8), inner=None):
        ids_space = ids_space or spaces.Sequence(spaces.Box(0, 99, (), np.int64), stack=True)
        self.observation_space = spaces.Dict(node_ids=ids_space, **(inner or {"graph": graph_space()}))
        self.node_ids = np.array(node_ids, np.int64)

    def reset(self, *, seed=None, options=None):
        nodes = rows_of(vector(3), np.random.default_rng(0), 3)
        return {"graph": spaces.GraphInstance(nodes, None, None), "node_ids": self.node_ids}, {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def test_node_ids_are_aligned_and_no_input():
    """R1: `node_ids` shares the rows of the nodes, keeps its integers and is no input of the encoder."""
    envs = ppo_graph.Envs([Ids])
    storage, step = ppo_graph.Storage(envs.leaves, CPU), envs.reset()
    storage.append(step.parts, step.counts)
    obs = storage.latest()
    assert obs["node_ids"].values.tolist() == [5, 3, 8] and obs["node_ids"].values.dtype == torch.int64
    assert obs["node_ids"].ptr.tolist() == obs["graph.nodes"].ptr.tolist()
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, small_args())
    assert not any("node_ids" in name for name in agent.state_dict())
    other = dict(obs, node_ids=obs["node_ids"]._replace(values=torch.tensor([1, 2, 4])))
    assert torch.equal(agent.value(obs), agent.value(other))


@pytest.mark.parametrize("kwargs, message", [
    ({"node_ids": (5, 5, 8)}, r"env 0, leaf 'node_ids', step 0: an id occurs twice: \[5, 5, 8\]"),
    ({"node_ids": (5, 8)}, "2 rows where|3 rows where"),
    ({"ids_space": spaces.Sequence(vector(), stack=True)}, "leaf 'node_ids': .* must be a Sequence of integers"),
    ({"ids_space": spaces.Box(0, 9, (3,), np.int64)}, "leaf 'node_ids': .* must be a Sequence of integers"),
    ({"inner": {"a": vector(1)}}, r"must be .* the graphs and sets are \[\]"),
    ({"inner": {"a": graph_space(), "b": graph_space()}}, r"the graphs and sets are \['a.nodes', 'b.nodes'\]")])
def test_wrong_node_ids(kwargs, message):
    """Ids that repeat, are too few, are no integers or name the rows of nothing are errors that say so."""
    with pytest.raises(ValueError, match=message):
        ppo_graph.Envs([lambda: Ids(**kwargs)]).reset()


@pytest.mark.parametrize("kind", ["image_hwc", "image_chw"])
def test_images_side_by_side_as_channels(kind):
    """T5: frames of either layout enter the network in the order of their steps."""
    (leaf,) = ppo_graph.leaves_of(OBSERVATIONS[kind])
    net, one = ppo_graph.CNN(leaf, num_frames=3), ppo_graph.CNN(leaf)
    images = torch.randint(0, 256, (2, 3, *leaf.shape), dtype=torch.uint8)
    chw = images.permute(0, 1, 4, 2, 3) if kind == "image_hwc" else images
    expected = net.net(chw.reshape(2, -1, *chw.shape[3:]).float() / 255)
    torch.testing.assert_close(net(images), expected)
    assert one(images[:, 0]).shape == (2, 512)


