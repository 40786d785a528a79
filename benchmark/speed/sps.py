"""Environment steps per second of whole trainings on PoissonGraph-v0: this repository and two
systems of today.

    python benchmark/speed/sps.py --out benchmark/results/speed/tables.md#sps
    python benchmark/speed/sps.py --total-timesteps 4096 --rounds 1 --num-envs 8  # does it run?

ppo_graph.py, list_of_data_ppo.py (torch_geometric's Batch.from_data_list) and sb3_padded_ppo.py
(Stable-Baselines3's MaskablePPO on padded graphs) train the same network with the same settings of
PPO, in turns A B C A B C ..., each as a process of its own. Steps per second are those that each
script prints, without imports and set-up; a ratio compares the runs of one round, the table has
medians over the rounds. Stable-Baselines3 needs its own virtual environment: pip install -r
benchmark/peers/requirements-sb3.txt, and its python in --peer-python.
"""

import itertools
import os
import shutil
import sys
from dataclasses import dataclass

import tyro
from common import PPO_GRAPH, ROOT, in_turns, report, table_of


@dataclass
class Args:
    total_timesteps: int = 32_768
    """environment steps of each run"""
    rounds: int = 3
    """runs of each system"""
    num_envs: tuple[int, ...] = (8, 64)
    """numbers of environments, one table each"""
    gnn_dim: tuple[int, ...] = (16, 64)
    """widths of the graph network, one table each"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    peer_python: str = str(ROOT / ".venv-peers/bin/python")
    """the Python that has stable-baselines3; it runs both peers"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def main(args):
    peer_python = shutil.which(args.peer_python)
    if peer_python is None:
        raise SystemExit(
            f"--peer-python {args.peer_python} is missing; make it: python -m venv .venv-peers && "
            ".venv-peers/bin/pip install -r benchmark/peers/requirements-sb3.txt"
        )
    peer_python = os.path.abspath(peer_python)
    lines = ["# Steps per second of a whole training on PoissonGraph-v0"]
    for gnn_dim, num_envs in itertools.product(args.gnn_dim, args.num_envs):
        flags = (
            f"--env-id envs:PoissonGraph-v0 --total-timesteps {args.total_timesteps} --num-envs "
            f"{num_envs} --num-steps {args.num_steps} --gnn-layers 2 --gnn-dim {gnn_dim} "
            "--hidden-dims 64 64 --no-cuda"
        )
        peers = ROOT / "benchmark" / "peers"
        of_peer = lambda name: [peer_python, str(peers / name), *flags.split()]
        systems = {
            "ppo_graph.py": [sys.executable, PPO_GRAPH, *flags.split(), "--eval-episodes", "0"],
            "list of PyG Data": of_peer("list_of_data_ppo.py"),
            "Stable-Baselines3, padded": of_peer("sb3_padded_ppo.py"),
        }
        runs = in_turns(systems, args.rounds)
        lines += [
            "",
            f"## {num_envs} environments x {args.num_steps} steps, width {gnn_dim}",
            "",
            *table_of(runs, "ppo_graph.py"),
            "",
            f"Medians of {args.rounds} round(s), one thread; `{flags}`.",
        ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
