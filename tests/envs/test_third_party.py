"""Environments that nobody of this project wrote: a life of Atari is an episode and the log has the
game's score, and returns are those of gymnasium's own record."""

import sys

import gymnasium as gym
import helpers
import numpy as np
import pytest
from gymnasium import spaces
from helpers import run

from cleanrl_graph import ppo_framestack, ppo_graph
from cleanrl_graph.envs import atari


# ---- Atari-v0 on a fake game ----
class FakeGame(gym.Env):
    """A game of 3 lives, one is lost in every 4th step; a step earns 5; frame t is full of t."""

    action_space = spaces.Discrete(4)

    def __init__(self, meanings=("NOOP", "FIRE", "LEFT", "RIGHT"), lives=3, limit=1000):
        self.meanings, self.first_lives, self.limit = list(meanings), lives, limit
        self.ale, self.pressed, self.num_games = self, [], 0

    def get_action_meanings(self):
        return self.meanings

    def lives(self):
        return self.left

    def frame(self):
        return np.full((84, 84, 1), self.t, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.left, self.num_games = 0, self.first_lives, self.num_games + 1
        return self.frame(), {}

    def step(self, action):
        self.t += 1
        self.pressed.append(action)
        self.left -= self.t % 4 == 0
        return self.frame(), 5.0, self.left == 0, self.t == self.limit, {}


@pytest.fixture
def fake(monkeypatch):
    """Makes Atari-v0 of a fake game; the last one that was made is its `game`."""

    def use(**kwargs):
        monkeypatch.setattr(atari, "make_game", lambda *_: FakeGame(**kwargs))

    use()
    return use


def test_missing_package_is_named(monkeypatch, tmp_path):
    """The run says what to install, and everything else can be imported."""
    monkeypatch.setitem(sys.modules, "ale_py", None)
    words = "module ale_py.* pip install ale-py opencv-python-headless"
    with pytest.raises(Exception, match=words):
        run(tmp_path, env_id="envs:Atari-v0")


def test_a_life_is_an_episode(fake):
    """A lost life ends an episode but not the game, which goes on after a no-op and FIRE."""
    env = atari.AtariEnv()
    game, ends = env.game, []
    first, _ = env.reset(seed=0)
    assert game.pressed == [1, 2] and game.num_games == 1 and first.max() == 2
    for _ in range(12):
        obs, reward, terminated, truncated, info = env.step(3)
        assert reward == 1.0 and not truncated
        assert obs.shape == (84, 84, 1) and obs.dtype == np.uint8
        if terminated:
            ends.append((game.t, info))
            env.reset()
    assert ends[:2] == [(4, {"lives": 2}), (8, {"lives": 1})]
    t, info = ends[2]
    assert t == 12 and info["lives"] == 0
    assert info["episode"]["r"] == 60.0 and info["episode"]["l"] == 12
    assert game.num_games == 4 and game.pressed[4:7] == [0, 1, 2]
    env.reset(seed=1)
    assert game.num_games == 5  # a seed begins a new game in the middle of one


def test_whole_games_and_rewards_as_they_are(fake):
    """An episode can be a game and the reward its score; without FIRE nothing is pressed."""
    fake(meanings=["NOOP", "LEFT", "RIGHT", "UP"])
    env = atari.AtariEnv(episodic_life=False, clip_reward=False)
    env.reset(seed=0)
    outcomes = [env.step(1)[1:] for _ in range(12)]
    assert env.game.pressed == [1] * 12
    assert [terminated for _, terminated, _, _ in outcomes] == [False] * 11 + [True]
    assert sum(reward for reward, *_ in outcomes) == outcomes[-1][-1]["episode"]["r"] == 60
    env.reset()
    env.step(1)
    env.reset()  # after a time limit, for instance
    assert env.game.num_games == 3 and env.game.t == 0


def test_frames(fake):
    """The last frames, newest last, at first copies of the first one; a limit truncates."""
    fake(limit=5)
    env = atari.AtariEnv(frames=3)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (84, 84, 3)
    assert obs[0, 0].tolist() == [2, 2, 2]
    assert env.step(0)[0][0, 0].tolist() == [2, 2, 3]
    assert env.step(0)[3:] == (False, {"lives": 2}) and env.game.t == 4
    # Its no-op met the limit
    assert env.reset()[0][0, 0].tolist() == [2, 2, 2] and env.game.num_games == 2
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_log_has_the_score_of_whole_games(fake, tmp_path):
    """What is logged is the raw return and length of whole games, not of clipped lives."""
    flags = dict(env_id="envs:Atari-v0", num_envs=2, num_steps=16, total_timesteps=64)
    flags |= dict(obs_shifts="-1:0", action_shifts="", reward_shifts="")
    flags |= dict(num_workers=2, eval_episodes=2)
    rows, log, *_ = run(tmp_path, ppo_framestack, **flags)
    assert [(row["return"], row["length"]) for row in rows] == [(60.0, 12)] * 2
    assert {value for _, value in log["charts/episodic_return"]} == {60.0}
    assert {value for _, value in log["charts/episodic_length"]} == {12.0}
    assert max(value for _, value in log["debug/collection_mismatch"]) < 1e-5


# ---- Raw returns of any environment ----
@pytest.mark.parametrize("envs_of", [ppo_graph.Envs, helpers.make_envs])
def test_returns_of_record_episode_statistics(envs_of):
    """Gymnasium's RecordEpisodeStatistics inside other wrappers gives the logged return."""

    def make():
        env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
        return gym.wrappers.TransformReward(env, lambda reward: 100 * reward)

    envs, infos = envs_of([make]), []
    envs.reset(seed=0)
    for _ in range(60):
        step = envs.step([0])
        assert step.reward[0] == 100
        infos += step.infos
    assert infos
    for _, info in infos:
        assert info["episode"]["r"] == info["episode"]["l"] < 20
