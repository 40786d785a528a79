"""The memory of ppo_lstm_sparse_mini.py while it grows over a graph, as a gif.

    python cleanrl_graph/ppo_lstm_sparse_mini.py
    python benchmark/memory_film.py --weights runs/GraphExplore-v0__*/weights.pt \
        --out benchmark/results/ppo_lstm_sparse/memory.gif

An episode of GraphExplore-v0, moves sampled. Light grey: the graph, of which the agent sees its
own node (red) and the neighbours. Discs: the nodes that have a state, yellow if the LSTM has just
changed it, darker the longer ago that was.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph import ppo_lstm_sparse_mini  # noqa: E402

SIZE = 420  # pixels of the map
ZOOM = 2  # drawn so many times as large, then made smaller: smooth edges
OLD = np.array([60, 70, 140])
NEW = np.array([250, 200, 40])


@dataclass
class Args:
    weights: str
    """weights.pt of ppo_lstm_sparse_mini.py, trained with its default flags"""
    out: str
    """gif that is written"""
    seed: int = 4
    """of the episode"""


def picture(env: gym.Env, times: dict[int, int], now: int) -> Image.Image:
    """`times`: node -> the step in which it was last seen, of all that have a state."""
    image = Image.new("RGB", (SIZE * ZOOM, (SIZE + 20) * ZOOM), "white")
    draw = ImageDraw.Draw(image)
    margin = 10 * ZOOM
    points = margin + env.points * (SIZE * ZOOM - 2 * margin) + [0, 20 * ZOOM]
    for source, target in env.map_links:
        known = source in times and target in times
        ends = [*points[source], *points[target]]
        draw.line(ends, fill=(120, 120, 120) if known else (225, 225, 225), width=ZOOM)

    def disc(node: int, radius: float, colour) -> None:
        x, y = points[node]
        r = radius * ZOOM
        draw.ellipse([x - r, y - r, x + r, y + r], fill=colour)

    for node in range(len(points)):
        disc(node, 2, (205, 205, 205))
    for node, time in times.items():
        share = 0.85 ** (now - time)
        disc(node, 6, tuple((OLD + share * (NEW - OLD)).astype(int)))
    disc(env.current, 4, (220, 30, 30))
    text = (
        f"step {now}: {len(times)} of {len(points)} nodes have a state, {len(env.visited)} visited"
    )
    image = image.resize((SIZE, SIZE + 20), Image.LANCZOS)
    ImageDraw.Draw(image).text((6, 4), text, fill="black")
    return image.quantize(64)


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    env = gym.make("cleanrl_graph.envs:GraphExplore-v0", num_nodes=(100, 100))
    space = env.observation_space["graph"]
    agent = ppo_lstm_sparse_mini.Agent(space, ppo_lstm_sparse_mini.Args())
    agent.load_state_dict(torch.load(args.weights, weights_only=True))
    obs, _ = env.reset(seed=args.seed)
    names = env.unwrapped.node_ids[env.unwrapped.first_row[:-1]]  # of each node
    node_of = {name: node for node, name in enumerate(names.tolist())}
    memory = {}
    times = {}
    frames = []
    done = False
    while not done:
        with torch.no_grad():
            graphs = ppo_lstm_sparse_mini.collate([obs], np.zeros(1, np.int64), space)
            action, _, _, _, states = agent.get_action_and_value(graphs, memory)
        memory |= states
        times |= {node_of[key]: len(frames) for key in states}
        frames.append(picture(env.unwrapped, times, len(frames)))
        assert {node_of[key] for key in memory} == set(times)
        obs, _, terminated, truncated, _ = env.step(action.item())
        done = terminated or truncated
    frames += [frames[-1]] * 8
    frames[0].save(args.out, save_all=True, append_images=frames[1:], duration=180, loop=0)
    print(f"{args.out}: {len(env.unwrapped.visited)} nodes visited, {len(memory)} with a state")


if __name__ == "__main__":
    main(tyro.cli(Args))
