"""Atari-v0: a game of the Arcade Learning Environment, prepared as by CleanRL's ppo_atari.py.

    python cleanrl_graph/ppo_framestack.py --env-id envs:Atari-v0 --env-kwargs '{"game": "Pong"}' \
        --obs-shifts -3:0 --action-shifts "" --reward-shifts "" --hidden-dims --num-envs 8 \
        --clip-coef 0.1

Needs two packages beside requirements.txt, which are imported when an environment is made:
`pip install ale-py opencv-python-headless`.

Bellemare et al. 2013 (arXiv:1207.4708), Mnih et al. 2015 (doi:10.1038/nature14236), Machado et al.
2018 (arXiv:1709.06009).
"""

from collections import deque

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def make_game(game, repeat_action_probability, render_mode):
    """The game behind gymnasium's AtariPreprocessing. ImportError names the packages that are
    missing."""
    try:
        import ale_py
        import cv2  # noqa: F401  AtariPreprocessing needs it
    except ImportError as error:
        raise ImportError(
            f"Atari-v0 needs the package of the module {error.name}, which is not installed: "
            "pip install ale-py opencv-python-headless"
        ) from error
    gym.register_envs(ale_py)
    env = gym.make(
        f"ALE/{game}-v5",
        frameskip=1,
        repeat_action_probability=repeat_action_probability,
        render_mode=render_mode,
        disable_env_checker=True,
    )
    return gym.wrappers.AtariPreprocessing(env, grayscale_newaxis=True)


class AtariEnv(gym.Wrapper):
    """A game with 84 x 84 pixels in grey, four frames to a step, a life to an episode, and rewards
    of -1, 0 and 1.

    The steps of CleanRL's ppo_atari.py, in this order: 1 to 30 no-ops after a reset; an action
    lasts 4 frames, and the brighter pixels of the last 2 are seen; a lost life ends the episode,
    and the next one goes on with the game; FIRE and the action after it are pressed where an
    episode begins, if the game knows FIRE; the sign of the reward; 84 x 84 pixels; grey; the last
    frames. No-ops, frames and pixels are gymnasium's AtariPreprocessing, which takes grey before
    maximum and size.

    Observation: uint8 [84, 84, frames], the newest frame last; an episode begins with copies of its
    first one. Action: the buttons that the game uses. Reward: its sign, or as it is without
    `clip_reward`. Episode end: terminated where the game or (with `episodic_life`) a life ends;
    truncated after 108,000 frames. info["lives"]: the lives that are left. info["episode"]: where
    the game ends, what gymnasium's RecordEpisodeStatistics says of all its lives with rewards as
    they are; not where only a life does. This is what the scripts log.

    Args:
        game: the name in ale-py, such as "Breakout", "Pong" or "SpaceInvaders".
        frames: frames in an observation. 1 is right for scripts with a memory: ppo_framestack.py
            --obs-shifts -3:0 sees four frames and stores each once; 4 is for ppo_graph.py, which
            stores each four times.
        episodic_life, clip_reward: see above; without both the return that is learned from is the
            score.
        repeat_action_probability: of "sticky actions"; 0 as in CleanRL, 0.25 recommended by Machado
            et al. 2018.
        render_mode: None, "rgb_array" or "human".
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 15}

    def __init__(
        self,
        game="Breakout",
        frames=1,
        episodic_life=True,
        clip_reward=True,
        repeat_action_probability=0.0,
        render_mode=None,
    ):
        if frames < 1:
            raise ValueError(f"frames {frames} must be at least 1")
        game = make_game(game, repeat_action_probability, render_mode)
        super().__init__(gym.wrappers.RecordEpisodeStatistics(game))
        self.game = self.unwrapped
        self.episodic_life = episodic_life
        self.clip_reward = clip_reward
        self.frames = deque(maxlen=frames)
        self.observation_space = spaces.Box(0, 255, (84, 84, frames), np.uint8)
        self.first_actions = []
        if "FIRE" in self.game.get_action_meanings():
            self.first_actions = [1, 2]
        self.sticky = repeat_action_probability > 0
        self.over = True  # the game, and not just a life

    def reset(self, *, seed=None, options=None):
        """Return the first observation and info. A new game begins after the end of a game, with a
        seed, and without `episodic_life`; otherwise the present game goes on."""
        if self.episodic_life and seed is None and not self.over:
            frame, info = self._press(0)
        else:
            frame, info = self._new_game(seed)
        for action in self.first_actions:
            frame, info = self._press(action)
        self.frames.extend([frame] * self.frames.maxlen)
        return self._observation(), info

    def step(self, action):
        """Return the observation, the reward, terminated, truncated and info."""
        lives = self.lives
        frame, reward, terminated, truncated, info = self._play(action)
        self.frames.append(frame)
        info["lives"] = self.lives
        if not self.over and self.episodic_life and 0 < self.lives < lives:
            terminated = True
        if self.clip_reward:
            reward = float(np.sign(reward))
        return self._observation(), reward, terminated, truncated, info

    def _new_game(self, seed=None):
        frame, info = self.env.reset(seed=seed)
        self.over = False
        self.lives = self.game.ale.lives()
        return frame, info

    def _press(self, action):
        """One of the first actions of an episode; a new game where it ends the game."""
        frame, _, _, _, info = self._play(action)
        if self.over:
            return self._new_game()
        return frame, info

    def _play(self, action):
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.over = terminated or truncated
        self.lives = self.game.ale.lives()
        return frame, reward, terminated, truncated, info

    def _observation(self):
        return np.concatenate(self.frames, -1)

    def __getstate__(self):
        """What pickle saves: the emulator pickles without its state, which therefore goes beside
        it. TypeError where actions are sticky: the last one, which may be repeated, is not in that
        state."""
        if self.sticky:
            raise TypeError(
                "an Atari game with repeat_action_probability above 0 "
                "cannot be pickled in the middle"
            )
        emulator_state = self.game.ale.cloneState(include_rng=True)
        return {**self.__dict__, "emulator": (emulator_state, self.game.np_random)}

    def __setstate__(self, state):
        ale_state, rng = state.pop("emulator")
        self.__dict__.update(state)
        self.game.ale.restoreState(ale_state)
        self.game.np_random = rng
