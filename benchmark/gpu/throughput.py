"""Part "sps" of benchmark/gpu.sh: environment steps per second of whole trainings on the GPU, eager
and compiled, with 64, 512 and 4,096 environments, beside CleanRL's ppo.py and ppo_trxl.py and
LeanRL's compiled PPO.

A training begins, makes its first update (with all that is compiled and allocated in it), goes on
for some seconds and is stopped. SPS is that of the second half of this time, for all systems alike.
"""

import functools
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import kit
import torch
from cartpole_vs_cleanrl import CHANGES as CLEANRL_CHANGES
from cartpole_vs_cleanrl import changed
from kit import ROOT, NotHere, Row

NUM_ENVS = (512, 64, 4096)  # in this order: what matters most comes first
NUM_STEPS = {64: 128, 512: 32, 4096: 8}  # of a rollout
SMALL = "--hidden-dims 64 64"  # CleanRL's networks
PPO = "--num-minibatches 4 --update-epochs 4"
MEMORY = "envs:StatelessCartPole-v1"
TRXL = "--num-layers 4 --num-heads 4 --dim 128 --memory-length 32 --hidden-dims 128 --gate none"
LARGE = '--env-kwargs \'{"jobs": [3, 10], "machines": [3, 10]}\' --gamma 1'


class Task(NamedTuple):
    env_id: str
    scripts: dict[str, str]  # script -> its own flags
    peers: tuple[str, ...] = ()
    workers: bool = True  # whether workers step 512 environments and more


def both(flags: str) -> dict[str, str]:
    """Of the script and of the compiled one."""
    return {"ppo_graph": flags, "ppo_graph_compile": flags}


LEANRL = "LeanRL ppo_continuous_action_torchcompile.py"
TASKS = {
    "CartPole-v1": Task("CartPole-v1", both(SMALL), ("CleanRL ppo.py",), False),
    "PoissonGraph-v0": Task("envs:PoissonGraph-v0", both("")),
    "StatelessCartPole-v1": Task(
        MEMORY,
        {"ppo_framestack": SMALL, "ppo_lstm_sparse": f"{SMALL} --prev-action", "ppo_gtrxl": TRXL},
        ("CleanRL ppo_trxl.py",),
        False,
    ),
    "JobShop-v0": Task("envs:JobShop-v0", both(LARGE)),
    "GraphExplore-v0": Task("envs:GraphExplore-v0", {"ppo_lstm_sparse": "", "ppo_graph": ""}),
    "PixelMemory-v0": Task(
        "pixel_memory:PixelMemory-v0",
        {"ppo_gtrxl": "--num-layers 1 --gate none --activation relu"} | both("--activation relu"),
    ),
    "Pendulum-v1": Task("Pendulum-v1", both(SMALL), (LEANRL,), False),
}
# later tensordicts than LeanRL was written for give the copy of the network that acts parameters
# that need gradients
LEANRL_CHANGES = [
    (
        "agent_inference_p.to_module(agent_inference)\n",
        "agent_inference_p.to_module(agent_inference)\n    agent_inference.requires_grad_(False)\n",
    )
]
RANKS = "Two ranks, one per GPU"
DRY = (
    ("CartPole-v1", "ppo_graph", 0, ""),
    ("PoissonGraph-v0", "ppo_graph_compile", 0, "--compile-mode none"),
    ("StatelessCartPole-v1", "ppo_gtrxl", 2, "--num-layers 1 --dim 16"),
)  # of a dry run, 4 environments


def key_of(system: str, num_envs: int, num_steps: int, num_workers: int = 0) -> dict:
    return dict(system=system, environments=num_envs, steps=num_steps, workers=num_workers)


class Case(NamedTuple):
    """A training of one of the scripts."""

    task: str
    script: str
    num_envs: int
    num_steps: int
    num_workers: int
    more: str = ""

    @property
    def flags(self) -> list[str]:
        """Of the script, as words."""
        task = TASKS[self.task]
        return shlex.split(
            f"--env-id {task.env_id} --num-envs {self.num_envs} --num-steps {self.num_steps} {PPO} "
            f"--num-workers {self.num_workers} --total-timesteps {10**9} --checkpoint-every 0 "
            f"--eval-episodes 0 {task.scripts[self.script]} {self.more}"
        )

    @property
    def key(self) -> dict:
        return key_of(f"{self.script}.py", self.num_envs, self.num_steps, self.num_workers)


def cases(num_cpus: int) -> list[Case]:
    """All trainings of the scripts."""
    found = []
    for num_envs in NUM_ENVS:
        for name, task in TASKS.items():
            num_workers = max(num_cpus - 2, 0) if task.workers and num_envs > 64 else 0
            sizes = num_envs, NUM_STEPS[num_envs]
            found += [Case(name, script, *sizes, num_workers) for script in task.scripts]
            if name == "CartPole-v1" and num_envs > 64 and num_cpus > 2:
                # what workers are worth where steps are cheap
                found.append(Case(name, "ppo_graph", *sizes, num_cpus - 2))
    return found


def needed(case: Case) -> None:
    """NotHere if the case cannot run."""
    if not (kit.SCRIPTS / f"{case.script}.py").exists():
        raise NotHere(f"there is no cleanrl_graph/{case.script}.py")
    module = case.flags[1].split(":")[0]
    if module == "pixel_memory" and importlib.util.find_spec("minigrid") is None:
        raise NotHere("minigrid is not installed")


def figures(updates: list, memory: float | None) -> dict:
    return {
        "SPS": kit.steady(updates),
        "first update, s": updates[0][1],
        "updates": len(updates),
        "GPU memory, GB": memory,
        "_updates": updates,
    }


def train(case: Case, args: kit.Args, seconds: float, deadline: float) -> dict:
    needed(case)
    name = "_".join(map(str, case[:5]))
    with tempfile.TemporaryDirectory() as run_dir:
        flags = [*case.flags, "--run-dir", run_dir, *(["--no-cuda"] if args.dry else [])]
        log = Path(args.out) / "logs" / f"sps_{name}.txt"
        noted = kit.from_child(args, "sps", case.script, flags, log, deadline, seconds=seconds)
    return figures(noted["updates"], noted["gpu_gb"])


# ---- Peers: they are no part of this repository, --peers names a folder with their files ----
def peer_file(args: kit.Args, name: str) -> Path:
    if args.peers is None:
        raise NotHere("no --peers, the folder with its file")
    path = Path(args.peers).resolve() / name
    if not path.exists():
        raise NotHere(f"--peers {args.peers} has no {name}")
    return path


def peer_environment(args: kit.Args, folder: Path) -> dict[str, str]:
    """Their own packages, where --peers has a folder `site`, come before the installed ones."""
    site, paths = Path(args.peers).resolve() / "site", []
    if site.exists():
        paths.append(str(site))
    if importlib.util.find_spec("wandb") is None and not (site / "wandb").exists():
        stubs = folder / "stubs"  # LeanRL logs nowhere else
        stubs.mkdir()
        (stubs / "wandb.py").write_text("def init(*args, **kwargs): pass\n\n\nlog = init\n")
        paths.append(str(stubs))
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "disabled"}


def sizes(num_envs: int, num_steps: int) -> str:
    return f"--num-envs {num_envs} --num-steps {num_steps} --total-timesteps {10**9}"


def no_cuda(args: kit.Args) -> list[str]:
    return ["--no-cuda"] * args.dry


def cleanrl_ppo(args: kit.Args, num_envs: int, num_steps: int, folder: Path) -> tuple:
    """(command, pattern of a line per update, environment) of ppo.py with the changes of
    cartpole_vs_cleanrl.py."""
    script = changed(peer_file(args, "ppo.py"), CLEANRL_CHANGES, folder)
    flags = f"--env-id CartPole-v1 {sizes(num_envs, num_steps)}".split() + no_cuda(args)
    return [sys.executable, script, *flags], r"^SPS:", {}


def cleanrl_trxl(args: kit.Args, num_envs: int, num_steps: int, folder: Path) -> tuple:
    """ppo_trxl.py on CartPole without velocities, in the setting of
    benchmark/peers/cleanrl_trxl.py."""
    script = peer_file(args, "ppo_trxl.py")
    peer_file(args, "pom_env.py")
    peer = str(ROOT / "benchmark/peers/cleanrl_trxl.py")
    flags = ["--script", str(script), "--out", str(folder / "trxl.csv")]
    flags += (
        f"--max-steps {10**9} --target 1e9 --num-envs={num_envs} --num-steps={num_steps}".split()
    )
    flags += ["--num-minibatches=4", "--update-epochs=4", *no_cuda(args)]
    return [sys.executable, peer, *flags], r"SPS", peer_environment(args, folder)


def leanrl(args: kit.Args, num_envs: int, num_steps: int, folder: Path) -> tuple:
    """LeanRL's compiled PPO with CUDA graphs on Pendulum-v1; it has none for discrete actions and
    vectors."""
    file = peer_file(args, "ppo_continuous_action_torchcompile.py")
    command = [sys.executable, changed(file, LEANRL_CHANGES, folder)]
    command += f"--env-id Pendulum-v1 {sizes(num_envs, num_steps)} {PPO}".split()
    command += no_cuda(args) or ["--compile", "--cudagraphs"]
    return command, r"speed: *([\d.]+) sps", peer_environment(args, folder)


PEERS = {
    "CleanRL ppo.py": cleanrl_ppo,
    "CleanRL ppo_trxl.py": cleanrl_trxl,
    LEANRL: leanrl,
}


def train_peer(
    name: str, num_envs: int, num_steps: int, args: kit.Args, seconds: float, deadline: float
) -> dict:
    log = Path(args.out).resolve() / "logs" / f"sps_{name.split()[1]}_{num_envs}.txt"
    with tempfile.TemporaryDirectory() as folder:
        command, pattern, environment = PEERS[name](args, num_envs, num_steps, Path(folder))
        times, lines = kit.times_of_lines(
            command, pattern, seconds, deadline, log, environment, folder
        )
    if name.startswith("LeanRL"):  # it measures itself from the third update on
        return {"SPS": float(re.search(pattern, lines[-1])[1])}
    updates = [((k + 1) * num_envs * num_steps, time - times[0]) for k, time in enumerate(times)]
    return {"SPS": kit.steady(updates), "updates": len(updates), "_updates": updates}


def ranks(args: kit.Args, deadline: float) -> dict:
    """Two ranks of torchrun, a GPU each, with nccl."""
    if args.dry or torch.cuda.device_count() < 2:
        raise NotHere("one rank per GPU, and there are not two GPUs")
    total = f"--total-timesteps {40 * 2 * 512 * 32}"
    flags = Case("PoissonGraph-v0", "ppo_graph", 512, 32, 0, total).flags
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "noted")
        settings = json.dumps({"mode": "sps", "result": str(result), "seconds": 1e9})
        launch = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
        child = [str(Path(__file__).with_name("child.py")), settings, "ppo_graph", *flags]
        command = [sys.executable, *launch, *child, "--run-dir", folder]
        log = Path(args.out) / "logs" / "sps_ranks.txt"
        kit.run_command(command, log, deadline)
        noted = json.loads(result.read_text())
    return figures(noted["updates"], noted["gpu_gb"])


def all_rows(part: str, args: kit.Args) -> list[Row]:
    seconds = 0.0 if args.dry else 5.0
    rows, tries = [], [Case(task, script, 4, 16, *rest) for task, script, *rest in DRY]
    for case in tries if args.dry else cases(kit.num_cpus()):
        compiled = case.script == "ppo_graph_compile"  # a CUDA graph per size takes a while
        measure = functools.partial(train, case, args, seconds * (3 if compiled else 1))
        least = 5 if args.dry else 75 if compiled else 60 if case.num_envs > 1000 else 25
        rows.append(Row(case.task, case.key, measure, least))
    for num_envs in (4,) if args.dry else NUM_ENVS:
        num_steps = 16 if args.dry else NUM_STEPS[num_envs]
        for name, task in TASKS.items():
            for peer in task.peers:
                measure = functools.partial(train_peer, peer, num_envs, num_steps, args, seconds)
                rows.append(Row(name, key_of(peer, num_envs, num_steps), measure, 30))
    key = key_of("ppo_graph.py", 1024, 32)
    rows.append(Row(RANKS, key, functools.partial(ranks, args), 60))
    order, tasks = [*NUM_ENVS, 1024, 4], [*TASKS, RANKS]
    place = lambda row: (order.index(row.key["environments"]), tasks.index(row.table))
    return sorted(rows, key=place)


NOTES = """SPS: environment steps per second in the second half of the time between the end of the
first update and the end of the run, some seconds later. Rollouts of 128, 32 and 8 steps with 64,
512 and 4,096 environments, 4 minibatches, 4 epochs. Workers are processes that step the
environments; the peers have none. CleanRL's ppo.py has the two changes of
benchmark/speed/cartpole_vs_cleanrl.py, ppo_trxl.py is as it is, and LeanRL's network that acts has
no gradients, as was so with the tensordict it was written for. LeanRL has no compiled PPO for
vectors and discrete actions, so Pendulum-v1 is there for it; its figure is the one that it prints
itself, from its third update on."""


def run(part: str, args: kit.Args, deadline: float) -> int:
    results = kit.Results(args, part, "Steps per second on the GPU", NOTES, kit.machine(args))
    return kit.measure(results, all_rows(part, args), args, deadline)
