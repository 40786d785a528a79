"""An hour of traffic as a gif: the map's own programs on the left, a trained policy on the right.

    python benchmark/traffic/film.py --model model.pt --out benchmark/results/traffic/grid4x4.gif

Both see the same demand. The mean delays of the whole hour stand in the name of each picture.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[2]))
from cleanrl_graph import load_policy  # noqa: E402
from cleanrl_graph.envs.traffic import TrafficLightsEnv  # noqa: E402


@dataclass
class Args:
    model: str
    """model.pt of ppo_graph_agents.py"""
    out: str
    """gif that is written"""
    map: str = "grid4x4"
    """map, whose hour is the first one of its suite with a demand of 1"""
    first: int = 240
    """decision of the first picture"""
    pictures: int = 40
    """number of pictures"""
    every: int = 2
    """decisions from one picture to the next"""
    size: int = 320
    """pixels of a side"""


def play(args: Args, decide) -> tuple[list[np.ndarray], float]:
    """(pictures, mean delay of the hour)"""
    hour = next(e for e in TrafficLightsEnv.eval_suites[args.map] if e["demand"] == 1.0)
    env = TrafficLightsEnv(**hour, render_mode="rgb_array")
    obs, _ = env.reset()
    pictures = []
    shown = range(args.first, args.first + args.every * args.pictures, args.every)
    truncated = False
    while not truncated:
        if env.num_steps in shown:
            pictures.append(env.render())
        obs, _, _, truncated, info = env.step(decide(obs))
    env.close()
    return pictures, info["eval"]["cost"]


def main(args: Args) -> None:
    policy = load_policy(args.model)
    names = ("fixed time", "trained policy")
    films = []
    for name, decide in zip(names, (lambda obs: None, policy)):
        pictures, delay = play(args, decide)
        films.append((f"{name}: mean delay {delay:.0f} s", pictures))
    frames = []
    for k in range(args.pictures):
        frame = Image.new("RGB", (2 * args.size + 8, args.size + 16), "white")
        for column, (title, pictures) in enumerate(films):
            picture = Image.fromarray(pictures[k]).resize((args.size, args.size), Image.LANCZOS)
            left = column * (args.size + 8)
            frame.paste(picture, (left, 16))
            ImageDraw.Draw(frame).text((left + 4, 2), title, fill="black")
        frames.append(frame.quantize(64))
    frames[0].save(args.out, save_all=True, append_images=frames[1:], duration=150, loop=0)


if __name__ == "__main__":
    main(tyro.cli(Args))
