"""benchmark/routes.py: the environment that benchmark/gnn_tasks.py trains on."""

import numpy as np
import pytest


def test_routes_is_the_travelling_salesman():
    env = gnn_tasks.Routes(most=6)
    obs, _ = env.reset(seed=3)
    cities, total, done, visited = obs["graph"].nodes[:, :2], 0.0, False, [0]
    while not done:
        visited.append(int(np.flatnonzero(obs["action_mask"])[-1]))
        obs, reward, done, _, _ = env.step(visited[-1])
        total += reward
    assert sorted(visited) == list(range(len(cities)))
    tour = cities[[*visited, 0]]
    assert total == pytest.approx(-np.linalg.norm(np.diff(tour, axis=0), axis=1).sum(), abs=1e-5)
    assert np.isfinite(obs["graph"].edges).all()
