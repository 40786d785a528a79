"""The same episode twice, side by side as a gif: a rule on the left, a trained policy on the right.

    python benchmark/film.py --model model.pt --suite random_64 \
        --out benchmark/results/pogema/robots.gif
    python benchmark/film.py --model model.pt --suite grid4x4 --first 240 --pictures 40 --every 2 \
        --size 320 --out benchmark/results/traffic/grid4x4.gif

A suite of Pogema-v0: shortest paths and a policy whose moves are sampled; goals reached up to then
stand above each picture. A map of TrafficLights-v0: the map's own programs and a greedy policy, in
the first hour of its suite with a demand of 1; the mean delays of the whole hour stand above.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import torch
import tyro
from PIL import Image, ImageDraw

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "pogema")]
import scores  # noqa: E402

from cleanrl_graph import load_policy  # noqa: E402
from cleanrl_graph.envs import pogema, traffic  # noqa: E402


@dataclass
class Args:
    model: str
    """model.pt of ppo_graph_agents.py"""
    out: str
    """gif that is written"""
    suite: str = "random_64"
    """suite of Pogema-v0, whose first task is played, or map of TrafficLights-v0"""
    first: int = 0
    """step of the first picture"""
    pictures: int = 60
    """number of pictures"""
    every: int = 1
    """steps from one picture to the next"""
    size: int | None = None
    """pixels of a side; as they are drawn by default"""


def episode(env: gym.Env, decide: Callable, args: Args) -> tuple[list, list[int], dict]:
    """Pictures, the goals reached in each (of robots), and the last info."""
    obs, _ = env.reset(seed=0)
    pictures, reached, info, step, ended = [], [], {}, 0, False
    shown = range(args.first, args.first + args.every * args.pictures, args.every)
    while not ended:
        if step in shown:
            picture = Image.fromarray(env.render())
            size = (args.size, args.size) if args.size else picture.size
            pictures.append(picture.resize(size, Image.LANCZOS))
            reached.append(getattr(env, "num_reached", 0))
        obs, _, terminated, ended, info = env.step(decide(env, obs))
        ended = ended or terminated
        step += 1
    env.close()
    return pictures, reached, info


def main(args: Args) -> None:
    torch.manual_seed(0)
    if are_robots := args.suite in pogema.PogemaEnv.eval_suites:
        task = pogema.PogemaEnv.eval_suites[args.suite][0] | scores.options_of(args.model)
        make, rule, name = pogema.PogemaEnv, lambda env, obs: pogema.shortest(env), "shortest paths"
    else:
        hours = traffic.TrafficLightsEnv.eval_suites[args.suite]
        task = next(hour for hour in hours if hour["demand"] == 1.0)
        make, rule, name = traffic.TrafficLightsEnv, lambda env, obs: None, "fixed time"
    policy = load_policy(args.model, greedy=not are_robots)
    films = []
    for who, decide in ((name, rule), ("trained policy", lambda env, obs: policy(obs))):
        pictures, reached, info = episode(make(**task, render_mode="rgb_array"), decide, args)
        titles = [
            f"{who}: {num} goals after {args.first + k * args.every} steps"
            for k, num in enumerate(reached)
        ]
        if not are_robots:
            titles = [f"{who}: mean delay {info['eval']['cost']:.0f} s"] * len(pictures)
        films.append(list(zip(pictures, titles)))
    frames = []
    for pair in zip(*films):
        width, height = pair[0][0].size
        frame = Image.new("RGB", (2 * width + 8, height + 16), "white")
        for left, (picture, title) in zip((0, width + 8), pair):
            frame.paste(picture, (left, 16))
            ImageDraw.Draw(frame).text((left + 4, 2), title, fill="black")
        frames.append(frame.quantize(64))
    frames[0].save(args.out, save_all=True, append_images=frames[1:], duration=150, loop=0)


if __name__ == "__main__":
    main(tyro.cli(Args))
