"""Acting and learning at the same time: wall time and learning curves of ppo_graph_async.py beside
ppo_graph.py.

    python benchmark/speed/async.py --out benchmark/results/speed/tables.md#async
    # does it run?
    python benchmark/speed/async.py --cases 0.1 --rounds 1 --num-updates 4 --curve-steps 0

1. Wall time of the same number of steps, in turns A B A B ..., where collection and update take
   about as long: PoissonGraph whose steps cost 0.1 or 1 ms more of the CPU, 1 ms asleep (as one
   that waits for a simulator), or 5 ms asleep in 8 worker processes.
2. Learning curves of PoissonGraph without extra cost over steps: no lag, one update, four updates,
   and four updates without correction (advantages without rho, the ratio taken to the policy that
   collected).

A picture of the curves lies beside --out.
"""

import importlib.util
import multiprocessing as mp
import os
import resource
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import ROOT, beside, report, spread

from cleanrl_graph import services
from cleanrl_graph.services.arguments import args_of
from cleanrl_graph.services.plot import Look, Run, around_mean, draw

# milliseconds of a step -> flags with which collection and update take about as long
SIZES = dict(num_envs=8, num_steps=64, gnn_layers=3, gnn_dim=192, hidden_dims=(64,))
ASLEEP = {"asleep": True}
CASES = {
    "0.1": SIZES | dict(env_kwargs={"ms": 0.1}, num_steps=128, gnn_layers=2, gnn_dim=64),
    "1": SIZES | dict(env_kwargs={"ms": 1.0}),
    "1 asleep": SIZES | dict(env_kwargs={"ms": 1.0} | ASLEEP),
    "5 asleep, 8 workers": SIZES
    | dict(env_kwargs={"ms": 5.0} | ASLEEP, num_envs=16, num_steps=32, gnn_dim=160, num_workers=8),
}
CURVES = {
    "ppo_graph.py": ("ppo_graph", {}),
    "max_lag 1": ("ppo_graph_async", dict(max_lag=1)),
    "max_lag 4": ("ppo_graph_async", dict(max_lag=4)),
    "max_lag 4, not corrected": ("uncorrected", dict(max_lag=4)),
}


@dataclass
class Args:
    out: str | None = None
    """file that receives the same markdown, with a png beside it"""
    cases: tuple[str, ...] = tuple(CASES)
    """milliseconds of a step in part 1"""
    num_updates: int = 10
    """updates of each run of part 1"""
    rounds: int = 3
    """runs of each system; --seed is the round"""
    curve_steps: int = 60_000
    """steps of each run of part 2; 0 leaves it out"""
    note: str = ""
    """a sentence on the machine for the report, such as what else ran"""


class Costly(gym.Wrapper):
    """PoissonGraph whose step takes `ms` milliseconds longer, of the CPU or asleep."""

    def __init__(self, ms: float = 1.0, asleep: bool = False, **kwargs):
        name = "cleanrl_graph.envs:PoissonGraph-v0"
        super().__init__(gym.make(name, disable_env_checker=True, **kwargs))
        self.seconds, self.asleep = ms / 1000, asleep

    def step(self, action):
        end = time.thread_time() + self.seconds
        if self.asleep:
            time.sleep(self.seconds)
        while not self.asleep and time.thread_time() < end:
            pass
        return self.env.step(action)


def without_correction(folder: str):
    """ppo_graph_async.py that takes the present policy for the one that collected, and the ratio to
    the latter."""
    path = ROOT / "cleanrl_graph" / "ppo_graph_async.py"
    old = "        rho = importance.clip(max=1).reshape(T, N)  # both rho and c of V-trace\n"
    new = "        rho = np.ones((T, N), np.float32)\n"
    new += "        log_probs = to_device(rollout.log_probs, device)\n"
    if path.read_text().count(old) != 1:
        raise SystemExit(f"{path} has changed: {old!r} must occur in it once")
    changed = Path(folder, "uncorrected.py")
    changed.write_text(path.read_text().replace(old, new))
    spec = importlib.util.spec_from_file_location("uncorrected", changed)
    script = sys.modules["uncorrected"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def watch(script) -> tuple[Counter, list]:
    """({part: seconds}, [(step, seconds since the training began, mean return)]), filled while the
    script trains. An update begins when its rollout is there, or with its first minibatch, and ends
    when it is logged."""
    seconds, curve, at = Counter(), [], {}
    returns = deque(maxlen=100)
    begin_run, begin = script.Run.begin, script.Memory.begin
    end_update = script.Run.end_update

    def begins_run(self, *args):
        at["start"] = time.perf_counter()
        return begin_run(self, *args)

    def ends_update(self, global_step, step, scalars, episodes):
        end_update(self, global_step, step, scalars, episodes)
        now = time.perf_counter()
        seconds["update"] += now - at.pop("update")
        returns.extend(info["episode"]["r"] for _, _, info in episodes)
        mean = np.mean(returns) if returns else np.nan
        curve.append((global_step, now - at["start"], mean))

    def begins(self):
        begin(self)
        at["collect"] = time.perf_counter()

    script.Run.begin, script.Run.end_update = begins_run, ends_update
    script.Memory.begin = begins

    class Storage(script.Storage):
        def gather(self, idx):
            if "update" not in at:
                at["update"] = time.perf_counter()
                seconds["collect"] += at["update"] - at["collect"]
            return super().gather(idx)

    script.Storage = Storage
    if hasattr(script, "Collector"):
        receive = script.Collector.receive

        def timed(self):
            start = time.perf_counter()
            rollout = receive(self)
            at["update"] = time.perf_counter()
            seconds["receive"] += at["update"] - start
            return rollout

        script.Collector.receive = timed
    return seconds, curve


def train(pipe, system: str, flags: dict) -> None:
    """One run in this process; sends (seconds of training, {part: seconds}, CPU seconds of this
    process and of those that it started, [(step, seconds, mean return)])."""
    gym.register("Costly-v0", entry_point=Costly)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if system == "uncorrected":
            script = without_correction(folder)
        else:
            script = importlib.import_module(f"cleanrl_graph.{system}")
        (seconds, curve), before = watch(script), time.process_time()
        flags = dict(run_dir=folder, eval_episodes=0, cuda=False, checkpoint_every=0) | flags
        services.run(script, args_of(script, **flags))
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() - before, usage.ru_utime + usage.ru_stime
    pipe.send((curve[-1][1], dict(seconds), cpu, curve))


def run(system: str, **flags) -> tuple[float, dict, tuple, list]:
    """`train` in a process of its own."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=train, args=(there, system, flags))
    process.start()
    there.close()
    try:
        result = here.recv()
    except EOFError:
        raise SystemExit(f"{system} failed") from None
    process.join()
    print(f"{system}: {result[0]:.1f} s", file=sys.stderr)
    return result


def wall_time(args) -> list[str]:
    """The table of part 1."""
    lines = [
        "## Wall time",
        "",
        "| ms of a step | system | training, s (least to most) | collection, s | update, s | "
        "waiting, s | CPU: this process + others, s | ppo_graph / this | by CPU | bound |",
        "| " + "--- | " * 10,
    ]
    for case in args.cases:
        flags, runs = CASES[case], {"ppo_graph": [], "ppo_graph_async": []}
        steps = args.num_updates * flags["num_envs"] * flags["num_steps"]
        for seed in range(1, args.rounds + 1):
            for system in runs:
                more = dict(env_id="Costly-v0", total_timesteps=steps, seed=seed)
                runs[system].append(run(system, **more, **flags))
        base = runs["ppo_graph"]
        for system, results in runs.items():
            total = [result[0] for result in results]
            cells = [spread(total, ".1f")]
            for name in ("collect", "update", "receive"):
                part = np.median([parts.get(name, np.nan) for _, parts, *_ in results])
                cells.append("" if np.isnan(part) else f"{part:.1f}")
            cpu = np.median([cpu for *_, cpu, _ in results], 0)
            cells.append(" + ".join(f"{value:.1f}" for value in cpu))
            ratio = np.array([a[0] / b[0] for a, b in zip(base, results)])
            bound = [sum(parts.values()) / max(parts.values()) for _, parts, *_ in base]
            by_cpu = [sum(a[2]) / max(b[2]) for a, b in zip(base, results)]
            by_cpu = "" if "asleep" in case else f"{np.median(by_cpu):.2f}"
            gain = ["", "", ""]
            if system != "ppo_graph":
                gain = [spread(ratio, ".2f"), by_cpu, f"{np.median(bound):.2f}"]
            lines.append("| " + " | ".join([case, system, *cells, *gain]) + " |")
    lines += [
        "",
        f"Medians of {args.rounds} rounds, {args.num_updates} updates each, one thread of torch in "
        "each process. The bound is (collection + update) / the larger of both in ppo_graph.py. "
        "CPU seconds are without imports; those of others are of the collector and of workers. By "
        "CPU: the CPU seconds of ppo_graph.py / those of the busier of the two processes, an "
        "estimate for two idle cores.",
    ]
    return lines


def learning_curves(args) -> list[str]:
    """The table of part 2; its picture is drawn beside --out."""
    lines = [
        "",
        "## Learning curves",
        "",
        "| system | mean return of the last 100 episodes, by seed | mean over the whole training |",
        "| --- | --- | --- |",
    ]
    curves = {}
    for seed in range(1, args.rounds + 1):
        for name, (system, flags) in CURVES.items():
            more = dict(num_envs=16, learning_rate=1e-3, gnn_layers=2, seed=seed) | flags
            more |= dict(env_id="envs:PoissonGraph-v0", total_timesteps=args.curve_steps)
            *_, curve = run(system, **more)
            curve = np.array([row for row in curve if np.isfinite(row[2])])
            curves.setdefault(("", name), []).append(Run(Path(), {}, *curve.T))
    for (_, name), runs in curves.items():
        mean = np.mean([own.means.mean() for own in runs])
        ends = " / ".join(f"{own.means[-1]:.2f}" for own in runs)
        lines.append(f"| {name} | {ends} | {mean:.2f} |")
    lines += [
        "",
        f"PoissonGraph-v0, 16 environments x 128 steps, {args.curve_steps} steps, learning rate "
        "1e-3; the optimum is 16. Lines are means over the seeds, bands the standard deviation.",
    ]
    if args.out:
        picture = beside(args.out, ".png")
        look = Look("mean return of 100 episodes", "PoissonGraph-v0, optimum 16")
        draw(picture, curves, around_mean, look)
        lines += ["", f"![learning curves]({picture.name})"]
    return lines


def main(args):
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    lines = wall_time(args)
    if args.curve_steps:
        lines += learning_curves(args)
    heading = [
        "# Acting and learning at the same time",
        "",
        f"Load average of the machine when this began {load:.1f}, when it ended "
        f"{os.getloadavg()[0]:.1f}; this "
        f"benchmark alone makes 1 to 2. {args.note}".strip(),
        "",
    ]
    report("\n".join(heading + lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
