"""What the scripts do with observed values: --norm-obs has the mean and variance of all rows that
were acted on, each once, without losing digits; node ids are exact and no input; images have their
channels and their scale."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    IDS,
    SmallEnv,
    everything,
    graph_space,
    mean_return,
    run,
    sample,
    small_args,
    stored,
    vector,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cleanrl_graph import ppo_graph


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.floats(-1000, 1000),
    st.floats(1e-2, 1000),
    st.integers(0, 99),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_running_statistics(sizes, mean, scale, seed):
    """Mean and variance after any batches, empty ones too, are those of all rows."""
    (leaf,) = ppo_graph.leaves_of(vector(2, 2, low=-np.inf, high=np.inf))
    rows = ppo_graph.Rows(leaf, norm_obs=True)
    rng = np.random.default_rng(seed)
    batches = [torch.tensor(rng.normal(mean, scale, (num, 2, 2))).float() for num in sizes]
    for batch in batches:
        rows.observe(batch)
    seen = torch.cat(batches).flatten(1).double().numpy()
    assert rows.count == len(seen)
    if len(seen):
        np.testing.assert_allclose(rows.mean, seen.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(rows.var, seen.var(0), rtol=1e-6, atol=1e-9)
        expected = ((seen - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(rows(torch.cat(batches)), expected, atol=1e-5)
    else:  # nothing is changed before the first rows
        assert torch.equal(rows(torch.ones(1, 2, 2)), torch.ones(1, 4))


@pytest.mark.parametrize("dtype", [np.float64, np.uint32])
def test_digits_of_large_numbers(dtype):
    """Times since 1970, 60 s apart, are told apart by normalised values: neither what is stored nor
    the sums of the statistics lose digits, as float32 would, whose steps are 128 s there."""
    times = 1_700_000_000 + 60 * np.arange(24).reshape(6, 4)
    space = spaces.Box(0, 4_000_000_000, (), dtype)
    storage, leaves = stored(space, [[np.array(time, dtype) for time in row] for row in times])
    encoder = ppo_graph.Encoder(leaves, small_args(norm_obs=True))
    for t in range(6):  # a rollout's rows at once, or in parts
        encoder.observe(storage.gather(np.arange(4 * t, 4 * t + 4))[0])
    rows = encoder.rows[ppo_graph.module_key("obs")]
    seen = times.ravel().astype(np.float64)
    assert rows.mean.item() == seen.mean()
    assert rows.var.item() == pytest.approx(seen.var(), rel=1e-9)
    values = rows(everything(storage)["obs"].values)
    assert values.dtype == torch.float32
    expected = (seen - seen.mean()) / seen.std()
    np.testing.assert_allclose(values[:, 0], expected, atol=1e-5)
    assert values.diff(dim=0).min() > 0.1  # 60 s are 0.14 standard deviations


def test_statistics_of_every_leaf():
    """Numbers have statistics per column; categories, bits, images, masks, links none."""
    space = spaces.Dict(
        graph=graph_space(vector(2)),
        position=vector(3),
        gear=spaces.Discrete(3),
        on=spaces.MultiBinary(2),
        camera=spaces.Box(0, 255, (8, 8, 1), np.uint8),
        items=spaces.Sequence(vector(2), stack=True),
        action_mask=spaces.MultiBinary(2),
        ints=spaces.Box(-5, 5, (2,), np.int64),
    )
    rng, size = np.random.default_rng(0), lambda rng: rng.integers(1, 5)
    observations = [[sample(space, rng, size) for _ in range(3)] for _ in range(4)]
    for row in observations:
        for obs in row:
            obs["action_mask"][:] = 1
    storage, leaves = stored(space, observations)
    encoder = ppo_graph.Encoder(leaves, small_args(norm_obs=True))
    encoder.observe(everything(storage))
    seen = {path for path, rows in encoder.rows.items() if getattr(rows, "norm_obs", False)}
    names = ["graph.nodes", "graph.edges", "position", "items", "ints"]
    assert seen == {ppo_graph.module_key(path) for path in names}
    for leaf, values in zip(leaves, storage.whole().values):
        if leaf.path in names:
            rows, values = encoder.rows[ppo_graph.module_key(leaf.path)], values.double()
            assert rows.count == len(values) > 0
            np.testing.assert_allclose(rows.mean, values.mean(0), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(rows.var, values.var(0, correction=0), rtol=1e-6, atol=1e-6)


class Counter(SmallEnv):
    """Shows how many observations it has shown, from 1 on."""

    observation_space, action_space = vector(1, low=0, high=np.inf), spaces.Discrete(2)
    shown = 0

    def observe(self):
        self.shown += 1
        return np.array([self.shown], np.float32)


gym.register("Counter-v0", entry_point=Counter)


@pytest.mark.parametrize("name", ["ppo_graph", "ppo_framestack", "ppo_lstm_sparse"])
def test_a_row_is_counted_once(name, tmp_path):
    """The statistics are those of all that was acted on in all updates; last observations and
    evaluations are left out, and neither the first ones of the next rollout nor what views still
    reach are counted twice."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    flags = dict(num_envs=1, num_steps=12, total_timesteps=36, norm_obs=True, save_model=True)
    flags["eval_episodes"] = 2
    model = weights(run(tmp_path, script, env_id="Counter-v0", **flags).folder)
    # 7, 13, ... are last ones; at 1 a mask is looked for
    acted_on = [n for n in range(2, 100) if n % 6 != 1][:36]
    (prefix,) = [name.removesuffix("count") for name in model if name.endswith("count")]
    assert model[prefix + "count"] == 36
    assert model[prefix + "mean"].item() == pytest.approx(np.mean(acted_on))
    assert model[prefix + "var"].item() == pytest.approx(np.var(acted_on))


@pytest.mark.slow
def test_normalisation_helps_where_units_differ(tmp_path):
    """With observations far from zero a policy learns with --norm-obs and not without."""

    class Offset(SmallEnv):
        observation_space, action_space = vector(1, low=0, high=1e5), spaces.Discrete(2)
        length = 10

        def observe(self):
            self.bit = int(self.np_random.integers(2))
            return np.array([5000 + self.bit], np.float32)

        def reward(self, action):
            return action == self.bit

    gym.register("Offset-v0", entry_point=Offset)
    flags = dict(env_id="Offset-v0", num_envs=8, num_steps=16, total_timesteps=6000)
    flags |= dict(learning_rate=3e-3, gamma=0.5, eval_episodes=20)
    one, two = (run(tmp_path / str(norm), norm_obs=norm, **flags) for norm in (True, False))
    assert mean_return(one) > 9.5 and mean_return(two) < 7.5


def test_node_ids_are_no_input():
    """They are as many as nodes, keep their integers and do not reach the encoder."""
    nodes = np.random.default_rng(0).random((3, 3), np.float32)
    graph = spaces.GraphInstance(nodes, None, None)
    row = [{"graph": graph, "node_ids": np.array([5, 3, 8])}]
    storage, leaves = stored(spaces.Dict(node_ids=IDS, graph=graph_space()), [row])
    obs = everything(storage)
    assert obs["node_ids"].values.tolist() == [5, 3, 8]
    assert obs["node_ids"].values.dtype == torch.int64
    assert obs["node_ids"].ptr.tolist() == obs["graph.nodes"].ptr.tolist()
    agent = ppo_graph.Agent(leaves, spaces.Discrete(2), small_args())
    assert not any("node_ids" in name for name in agent.state_dict())
    other = dict(obs, node_ids=obs["node_ids"]._replace(values=torch.tensor([1, 2, 4])))
    assert torch.equal(agent.value(obs), agent.value(other))


@pytest.mark.parametrize(
    "shape, chw",
    [
        ((12, 10, 3), (3, 12, 10)),
        ((21, 8, 8), (21, 8, 8)),
        ((40, 12, 3), (3, 40, 12)),
        ((8, 8, 8), (8, 8, 8)),
        ((8, 9), (1, 8, 9)),
        ((7, 9), None),
        ((3, 40, 3), None),
        ((8, 8, 3, 1), None),
    ],
)
def test_which_side_is_channels(shape, chw):
    """The one that is unlike the others; two sides are an image with one channel."""
    leaf = ppo_graph.Leaf("obs", spaces.Box(0, 1, shape), "")
    assert leaf.is_image == (chw is not None)
    if chw:
        images = torch.rand(2, 2, *shape)  # two frames
        net, one = ppo_graph.CNN(leaf, num_frames=2), ppo_graph.CNN(leaf)
        assert one.shape == chw
        frames = [images[:, k, None] if len(shape) == 2 else images[:, k] for k in range(2)]
        if chw != (1, *shape)[-3:]:
            frames = [frame.permute(0, 3, 1, 2) for frame in frames]
        torch.testing.assert_close(net(images), net.net(torch.cat(frames, 1)))
        torch.testing.assert_close(one(images[:, 0]), one.net(frames[0]))
        assert one(images[:0, 0]).shape == (0, 512)


@pytest.mark.parametrize("high, dtype", [(255, np.uint8), (1, np.uint8), (np.inf, np.float32)])
def test_images_are_scaled_by_their_bounds(high, dtype):
    """Planes of a board stay 0 and 1, whatever their dtype."""
    net = ppo_graph.CNN(ppo_graph.Leaf("obs", spaces.Box(0, high, (8, 8, 3), dtype), ""))
    images = torch.randint(0, 2, (4, 8, 8, 3))
    expected = net.net(images.permute(0, 3, 1, 2).float() / (high if high < np.inf else 1))
    torch.testing.assert_close(net(images.to(torch.int64)), expected)
