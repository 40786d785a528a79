"""Speed of ppo_gtrxl.py: training time against memory length, and steps per second of whole
trainings.

    python benchmark/speed/attention.py --out benchmark/results/speed/tables.md#attention
    python benchmark/speed/attention.py --parts sps --peer-script PATH/ppo_trxl.py \
        --out benchmark/results/speed/tables.md#trxl

1. Forward and backward through the memory of one minibatch, per step of it: the segment of
   ppo_gtrxl.py against one window of cached layer inputs per step, whose keys and values every
   sample projects again (the way of most attention PPOs; here with the same layers, weights and
   results, checked before the clock starts).
2. Whole trainings on CartPole without velocities, 16 envs x 256 steps, 4 layers of 128 with 4
   heads, memory 32, 8 minibatches, 4 epochs, episodes of at most 500 and 100 steps; with gates and
   without (CleanRL's ppo_trxl.py has none). Beside it CleanRL's own script, if --peer-script is
   given; see benchmark/peers/cleanrl_trxl.py.
"""

import json
import sys
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from common import ROOT, in_turns, picture, report, spread, trxl_command, turns
from torch import Tensor

from cleanrl_graph import ppo_gtrxl

PEER = "CleanRL ppo_trxl.py"
NUM_ENVS, NUM_LAYERS, DIM = 2, 2, 64  # of part 1


@dataclass
class Args:
    out: str | None = None
    """file that receives the same markdown, with the picture of part 1 beside it"""
    parts: tuple[str, ...] = ("memory", "sps")
    """which of the two parts to run"""
    memory_lengths: tuple[int, ...] = (16, 64, 256, 1024)
    """memory lengths of part 1"""
    num_steps: int = 256
    """steps of an env in a minibatch of part 1"""
    repeats: int = 5
    """timings of part 1, of which the median counts"""
    total_timesteps: int = 32_768
    """steps of each training of part 2"""
    rounds: int = 3
    """trainings of each system in part 2"""
    peer_python: str = str(ROOT / ".venv-peers/bin/python")
    """the Python that runs CleanRL's script"""
    peer_script: str | None = None
    """path of CleanRL's cleanrl/ppo_trxl/ppo_trxl.py"""


def forward_windows(
    gtrxl: ppo_gtrxl.GTrXL, x: Tensor, windows: list[Tensor], age: Tensor
) -> Tensor:
    """The outputs [S, 2 D] of S samples x [S, D], each with windows [S, W, D] of layer inputs of
    its own, as stored."""
    W = windows[0].shape[1]
    distances = torch.arange(W, -1, -1)
    far = distances > age[:, None]
    encodings = ppo_gtrxl.encode_steps(distances, x.shape[1])
    for net, window in zip(gtrxl.layers, windows):
        h = net.norm_attention(torch.cat([window, x[:, None]], 1))
        k, v = (y.unflatten(-1, (net.num_heads, -1)) for y in net.kv(h).chunk(2, -1))
        q = net.q(h[:, -1]).unflatten(-1, (net.num_heads, -1))
        r = net.r(encodings).unflatten(-1, (net.num_heads, -1))
        logits = torch.einsum("shd,swhd->shw", q + net.bias_key, k)
        logits = logits + torch.einsum("shd,whd->shw", q + net.bias_distance, r)
        logits = logits / q.shape[-1] ** 0.5 - net.decay[:, None] * distances
        weights = logits.masked_fill(far[:, None], -torch.inf).softmax(-1)
        y = torch.einsum("shw,swhd->shd", weights, v).flatten(1)
        found = net.out(y)
        x = net.gate_attention(x, found.relu())
        x = net.gate_mlp(x, net.mlp(x).relu())
    return torch.cat([x, found], 1)


def memory_part(args: Args) -> list[tuple]:
    """(memory length, microseconds per step of forward and backward by the segment, by windows,
    gigabytes that the windows save)."""
    rows, T, B = [], args.num_steps, NUM_ENVS
    for W in args.memory_lengths:
        torch.manual_seed(0)
        sizes = dict(dim=DIM, num_layers=NUM_LAYERS, memory_length=W)
        gtrxl = ppo_gtrxl.GTrXL(ppo_gtrxl.Args(**sizes))
        samples, age = torch.randn(T, B, DIM), torch.full((T, B), W)  # all memories are full
        inputs = torch.randn(NUM_LAYERS, W, B, DIM)  # of the layers, before the segment

        def forward() -> tuple[Tensor, list[Tensor]]:
            """The segment's outputs and layer inputs, as in the script's training."""
            outputs, layer_inputs, _ = gtrxl(samples, age, gtrxl.keys_values(inputs, W))
            return outputs, layer_inputs

        with torch.no_grad():
            expected, layer_inputs = forward()
        before = [torch.cat(pair) for pair in zip(inputs, layer_inputs)]  # [W + T, B, D] each

        def segment() -> None:
            gtrxl.zero_grad()
            forward()[0].square().mean().backward()

        views = [layer[:-1].unfold(0, W, 1).transpose(2, 3) for layer in before]
        windows = [view.flatten(0, 1).contiguous() for view in views]
        flat, ages = samples.flatten(0, 1), age.flatten()
        with torch.no_grad():
            outputs = forward_windows(gtrxl, flat, windows, ages)
        torch.testing.assert_close(outputs, expected.flatten(0, 1), atol=1e-4, rtol=1e-4)

        def window() -> None:
            gtrxl.zero_grad()
            forward_windows(gtrxl, flat, windows, ages).square().mean().backward()

        # saved for the backward pass, per layer and window entry: window, normalised window, keys
        # and values
        gigabytes = 4 * T * B * W * NUM_LAYERS * (5 * DIM) / 1e9
        ours, theirs = 1000 * np.median(turns([segment, window], args.repeats), 0) / (T * B)
        rows.append((W, ours, theirs, gigabytes))
        print(rows[-1], file=sys.stderr)
    return rows


def memory_table(rows: list[tuple], args: Args) -> list[str]:
    lines = [
        f"## Forward and backward of {NUM_ENVS} envs x {args.num_steps} steps, "
        f"{NUM_LAYERS} layers of {DIM}, one thread",
        "",
        "| memory | segment, us per step | windows, us per step | windows / segment | memory of "
        "the windows, GB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for W, ours, theirs, gigabytes in rows:
        cells = f"{W} | {ours:.1f} | {theirs:.0f} | {theirs / ours:.0f} | {gigabytes:.2f}"
        lines.append(f"| {cells} |")
    return lines


def sps_part(args: Args) -> list[str]:
    lines = [
        "## Whole trainings on CartPole-v1 without velocities",
        "",
        "16 envs x 256 steps, 4 layers of 128, 4 heads, memory 32, 8 minibatches, 4 epochs; "
        f"{args.total_timesteps} steps, one thread, {args.rounds} runs each: "
        "median (range)",
        "",
        "| system | episodes up to | SPS | peak memory, MB | SPS / CleanRL's |",
        "| --- | --- | --- | --- | --- |",
    ]
    flags = (
        "--env-id CartPole-v1 --wrap hide:1,3 --num-envs 16 --num-steps 256 --num-layers 4 "
        "--num-heads 4 --dim 128 --memory-length 32 --num-minibatches 8 --update-epochs 4 "
        "--no-prev-action --hidden-dims 128 --eval-episodes 0 "
        f"--no-cuda --total-timesteps {args.total_timesteps}"
    )
    for steps in (500, 100):
        ours = [sys.executable, str(ROOT / "cleanrl_graph/ppo_gtrxl.py"), *flags.split()]
        ours += ["--env-kwargs", json.dumps({"max_episode_steps": steps})]
        systems = {"ppo_gtrxl.py": ours, "ppo_gtrxl.py --gate none": [*ours, "--gate", "none"]}
        if args.peer_script:
            more = f"--task cartpole --episode-steps {steps} --max-steps {args.total_timesteps}"
            systems[PEER] = trxl_command(args.peer_python, args.peer_script) + more.split()
        runs = in_turns(systems, args.rounds)
        for name, column in runs.items():
            sps, peer = ([run.sps for run in some] for some in (column, runs.get(PEER, [])))
            ratio = f"{np.median(sps) / np.median(peer):.1f}" if peer else "not run"
            peak_mb = np.median([run.peak_mb for run in column])
            lines.append(f"| {name} | {steps} | {spread(sps)} | {peak_mb:,.0f} | {ratio} |")
    return lines


def main(args: Args) -> None:
    torch.set_num_threads(1)
    lines = ["# Attention memory"]
    if "sps" in args.parts:  # first: a process has the peak memory of the one that started it
        lines += ["", *sps_part(args)]
    if "memory" in args.parts:
        rows = memory_part(args)
        lines += ["", *memory_table(rows, args)]
        if args.out:
            labels = {
                "one window per step": [(W, theirs) for W, _, theirs, _ in rows],
                "segment (ours)": [(W, ours) for W, ours, *_ in rows],
            }
            note = f"{NUM_ENVS} environments x {args.num_steps} steps, {NUM_LAYERS} layers "
            note += f"of {DIM}, one thread; medians of {args.repeats} turns"
            y = "training, microseconds per step"
            picture(args.out, note, "memory length", y, labels)
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
