"""64 robots on a map that was never trained on, as a gif: shortest paths on the left, a trained
policy on the right.

    python benchmark/pogema/film.py --model model.pt --out benchmark/results/pogema/robots.gif

Both have the same starts and first goals. Goals reached up to then stand above each picture.
"""

from dataclasses import dataclass

import numpy as np
import scores
import torch
import tyro
from PIL import Image, ImageDraw

from cleanrl_graph import load_policy
from cleanrl_graph.envs.pogema import PogemaEnv, shortest


@dataclass
class Args:
    model: str
    """model.pt of ppo_graph_agents.py"""
    out: str
    """gif that is written"""
    suite: str = "random_64"
    """suite of the task"""
    task: int = 0
    """number of the task"""
    steps: int = 60
    """number of pictures"""


def pictures_of(args: Args, decide) -> list[tuple[np.ndarray, int]]:
    """(picture, goals reached) of each step."""
    task = PogemaEnv.eval_suites[args.suite][args.task] | scores.options_of(args.model)
    env = PogemaEnv(**task, render_mode="rgb_array")
    observed, _ = env.reset(seed=0)
    found = [(env.render(), 0)]
    while len(found) < args.steps:
        observed = env.step(decide(env, observed))[0]
        found.append((env.render(), env.num_reached))
    return found


def main(args: Args) -> None:
    torch.manual_seed(0)
    policy = load_policy(args.model, greedy=False)
    films = {
        "shortest paths": pictures_of(args, lambda env, observed: shortest(env)),
        "trained policy": pictures_of(args, lambda env, observed: policy(observed)),
    }
    frames = []
    for k in range(args.steps):
        height, width, _ = films["shortest paths"][k][0].shape
        frame = Image.new("RGB", (2 * width + 8, height + 16), "white")
        for column, (name, film) in enumerate(films.items()):
            picture, num_reached = film[k]
            left = column * (width + 8)
            frame.paste(Image.fromarray(picture), (left, 16))
            title = f"{name}: {num_reached} goals after {k} steps"
            ImageDraw.Draw(frame).text((left + 4, 2), title, fill="black")
        frames.append(frame.quantize(64))
    frames[0].save(args.out, save_all=True, append_images=frames[1:], duration=150, loop=0)


if __name__ == "__main__":
    main(tyro.cli(Args))
