"""Courier-v0: what the tour shows, where parcels go, and what its policies earn."""

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_graph.envs.courier import HERE, TARGET, TOUR, reference_scores


def episode(seed, **kwargs):
    """(observations, rewards, environment) of an episode of random moves to neighbours."""
    env = gym.make("cleanrl_graph.envs:Courier-v0", disable_env_checker=True, **kwargs).unwrapped
    rng, (obs, _) = np.random.default_rng(seed), env.reset(seed=seed)
    observations, rewards, done = [obs], [], False
    while not done:
        obs, reward, done, truncated, _ = env.step(rng.choice(np.flatnonzero(obs["action_mask"])))
        assert obs in env.observation_space and not truncated
        observations.append(obs)
        rewards.append(reward)
    return observations, rewards, env


@pytest.mark.parametrize("seed", range(5))
def test_an_episode(seed):
    """The tour shows each house with all its streets; then there is a target, two streets away
    when a parcel arrives, and a delivery is a step to it."""
    observations, rewards, env = episode(seed, num_houses=8, num_chords=3, num_steps=40)
    house = {name: k for k, name in enumerate(env.ids.tolist())}
    seen, before = np.zeros((8, 8), bool), None
    assert len(rewards) == 48 and not any(rewards[:8])
    for t, obs in enumerate(observations):
        nodes, ids = obs["graph"].nodes, [house[name] for name in obs["node_ids"].tolist()]
        links = np.array(ids)[obs["graph"].edge_links]
        assert env.linked[links[:, 0], links[:, 1]].all() and set(links.ravel()) <= set(ids)
        assert nodes[:, HERE].tolist() == [1] + [0] * (len(ids) - 1)
        assert obs["action_mask"].tolist() == env.linked[ids[0], ids].tolist()
        assert (nodes[:, TOUR] == (t < 8)).all() and nodes[:, TARGET].sum() == (t >= 8)
        if t < 8:
            seen[links[:, 0], links[:, 1]] = True
            continue
        target = ids[nodes[:, TARGET].argmax()]
        if t == 8 or rewards[t - 1]:  # a new one
            assert not env.linked[ids[0], target] and target != ids[0]
            assert (env.linked[ids[0]] & env.linked[target]).any()
            assert target == ids[-1] and len(ids) - 1 not in obs["graph"].edge_links
        if t > 8:
            assert rewards[t - 1] == (2 / 40 if ids[0] == before else 0)
        before = target
    assert np.array_equal(seen, env.linked) and 0 < sum(rewards) < 1


def test_reference_scores():
    """Who remembers the streets delivers a parcel every other step."""
    scores = reference_scores(50)
    assert scores["remembers the streets"] == pytest.approx(1)
    assert 0.3 < scores["remembers nothing"] < 0.5
