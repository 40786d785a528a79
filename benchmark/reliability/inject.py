"""Runs that are killed, stopped, and fed with faults at random moments, and what became of each.

    python benchmark/reliability/inject.py --times 10 --out benchmark/results/reliability/table.md

The runs are small ones of all four scripts, with and without worker processes. Each is a process of its own (forked,
which saves the imports). "Bitwise equal" compares every weight, and every entry of the TensorBoard log but SPS, with
those of a run that nothing happened to. Exit code 1 if any run ended otherwise than the table says it should."""

import argparse
import contextlib
import importlib
import io
import multiprocessing as mp
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cleanrl_graph"))

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tqdm import tqdm  # noqa: E402

FORK = mp.get_context("fork")
SMALL = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=1, num_envs=3, num_steps=8, num_minibatches=2, update_epochs=2,
             total_timesteps=1440, eval_episodes=0, cuda=False, checkpoint_every=5, save_model=True)
RUNS = [  # script, flags
    ("ppo_graph", dict(env_id="envs:PoissonGraph-v0", norm_obs=True)),
    ("ppo_graph", dict(env_id="envs:PoissonGraph-v0", norm_obs=True, num_workers=2)),
    ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1", norm_obs=True)),
    ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1", num_workers=2)),
    ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", lstm_dim=8, remember_edges=True, prev_action=True)),
    ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", lstm_dim=8, num_workers=2)),
    ("ppo_gtrxl", dict(env_id="envs:StatelessCartPole-v1", dim=8, num_heads=2, prev_action=True, prev_reward=True)),
    ("ppo_gtrxl", dict(env_id="envs:GraphExplore-v0", dim=8, num_heads=2, num_workers=2)),
]


class Faulty(gym.Env):
    """An ordinary environment that has one fault, in step `at` of the environment whose seed is `victim`; with `flag`
    only as long as there is no such file."""

    observation_space = gym.spaces.Box(0, 2000, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault: str, at: int, victim: int, flag: str = ""):
        self.fault, self.at, self.victim, self.flag, self.t, self.first_seed = fault, at, victim, flag, 0, None

    def strikes(self, fault: str) -> bool:
        if fault != self.fault or self.t < self.at or self.first_seed != self.victim or (
                self.flag and os.path.exists(self.flag)):
            return False
        if self.flag:
            Path(self.flag).touch()
        return True

    def reset(self, *, seed=None, options=None):
        self.first_seed = seed if self.first_seed is None else self.first_seed
        if self.strikes("exception in reset"):
            raise KeyError("the engine is on fire")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.strikes("exception in step"):
            raise KeyError("the engine is on fire")
        if self.strikes("worker killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.strikes("worker hangs"):
            time.sleep(1000)
        value = np.nan if self.strikes("NaN observation") else self.t
        reward = np.nan if self.strikes("NaN reward") else 1.0
        return np.array([value, 1], np.float32), reward, False, self.t % 9 == 0, {}


gym.register("Faulty-v0", entry_point=Faulty)


def start(folder: Path, script: str, flags: dict, before=lambda module: None) -> tuple:
    """(process, file of its stderr) of a run. `before` is called in that process."""
    module = importlib.import_module(script)
    log = folder.parent / f"{folder.name}.{time.time_ns()}.err"

    def target():
        torch.set_num_threads(1)
        tqdm.set_lock(threading.RLock())  # that of this process must not be held by one that is killed
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr, sys.stdout = os.fdopen(2, "w", closefd=False), os.fdopen(1, "w", closefd=False)
        before(module)
        module.main(module.Args(**SMALL | dict(run_dir=str(folder)) | flags))

    process = FORK.Process(target=target)
    process.start()
    return process, log


def finish(folder: Path, script: str, flags: dict, before=lambda module: None) -> tuple[int, str]:
    """(exit code, stderr) of a run that ends by itself."""
    process, log = start(folder, script, flags, before)
    process.join()
    return process.exitcode, log.read_text()


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/checkpoint_*.ckpt"), reverse=True)


def result(folder: Path) -> tuple[dict, dict]:
    """(weights, log) of the only run in a folder."""
    (run,) = folder.iterdir()
    log = EventAccumulator(str(run), size_guidance={"scalars": 0})
    log.Reload()
    scalars = {name: [(event.step, event.value) for event in log.Scalars(name)]
               for name in log.Tags()["scalars"] if name != "charts/SPS"}
    return torch.load(run / "model.pt", weights_only=True)["model"], scalars


def same(a: tuple, b: tuple) -> bool:
    return list(a[0]) == list(b[0]) and all(torch.equal(a[0][k], b[0][k]) for k in a[0]) and a[1] == b[1]


def descendants(pid: int) -> list[int]:
    """The processes that are children of `pid` and alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def gone(pids: list[int], seconds: float) -> bool:
    """Whether all processes leave within that time."""
    end = time.time() + seconds
    while time.time() < end:
        if not any(os.path.exists(f"/proc/{pid}/stat") and " Z " not in Path(f"/proc/{pid}/stat").read_text()
                   for pid in pids):
            return True
        time.sleep(0.05)
    return False


class Case:
    """One injection: a folder, a run (the k-th of RUNS in turn), and its reference."""

    def __init__(self, k: int, folder: Path, references: dict, rng: random.Random):
        self.script, self.flags = RUNS[k % len(RUNS)]
        self.workers, self.folder, self.rng = self.flags.get("num_workers", 0), folder, rng
        key = k % len(RUNS)
        if key not in references:
            begin = time.time()
            finish(folder / "reference", self.script, self.flags)
            references[key] = result(folder / "reference"), time.time() - begin
        self.reference, self.seconds = references[key]
        self.run = folder / "run"

    def stop(self, number: int) -> tuple[int, str, bool]:
        """(exit code, stderr, whether all workers left) of a run that is sent a signal at a random moment: some time
        after a random checkpoint, or after its log appeared."""
        newest = int(checkpoints(self.run)[0].stem[11:]) if checkpoints(self.run) else 0
        checkpoint = 120 * self.rng.randrange(newest // 120, 6 + 3 * (newest > 0))
        process, log = start(self.run, self.script, self.flags)
        while process.is_alive() and not any(
                int(path.stem[11:]) >= checkpoint for path in checkpoints(self.run)) and not (
                checkpoint == 0 and list(self.run.glob("*/events*"))):
            time.sleep(0.002)
        time.sleep(self.rng.uniform(0, 0.1) * self.seconds)
        workers = descendants(process.pid)
        os.kill(process.pid, number)
        process.join()
        return process.exitcode, log.read_text(), gone(workers, 5)

    def resumed(self, **flags) -> str:
        """What became of the run that --resume auto continues."""
        code, _ = finish(self.run, self.script, self.flags | dict(resume="auto") | flags)
        runs = [path for path in self.run.iterdir() if (path / "model.pt").exists()]
        if code or not runs:
            return f"failed with exit code {code}"
        for path in set(self.run.iterdir()) - set(runs):  # one that was killed before its first checkpoint
            os.rename(path, self.folder / path.name)
        return "bitwise equal" if same(result(self.run), self.reference) else "finished, other weights"

    def faulty(self, fault: str, mode: str) -> tuple[int, str, Path]:
        """(exit code, stderr, folder) of a run in whose environment something happens."""
        workers = 3 if fault.startswith("worker") else self.workers
        kwargs = {"fault": fault, "at": self.rng.randrange(5, 460), "victim": self.rng.randrange(1, 4)}
        if mode == "restart":
            kwargs["flag"] = str(self.folder / "happened")
        flags = {name: value for name, value in self.flags.items() if name != "remember_edges"} | dict(
            env_id="Faulty-v0", env_kwargs=kwargs, num_workers=workers, on_env_error=mode, env_timeout=1.0)
        self.at, self.victim = kwargs["at"], kwargs["victim"] - 1
        if fault == "exception in reset":
            self.at = -(-self.at // 9) * 9  # the episode's end
        return *finish(self.run, self.script, flags), self.run


def kill_run(case: Case) -> str:
    for _ in range(2):
        code, _, left = case.stop(signal.SIGKILL)
        case.flags = case.flags | dict(resume="auto")
        if not left:
            return "workers stayed"
    return case.resumed()


def stop_run(number: int, case: Case) -> str:
    code, error, left = case.stop(number)
    if code != 128 + number or not left or not checkpoints(case.run):
        return f"exit code {code}, workers left: {left}, checkpoints: {len(checkpoints(case.run))}"
    module = importlib.import_module(case.script)
    state = module.load_checkpoint(str(checkpoints(case.run)[0]))
    outcome = case.resumed()
    updates = [step for step, _ in result(case.run)[1]["losses/value_loss"]]
    steps = updates == [24 * (k + 1) + (3 * state["num_steps"] - 24 * state["iteration"]) * (k >= state["iteration"])
                        for k in range(60)]
    return "saved, exit code, continued" if steps and "fail" not in outcome else f"{outcome}, {updates}"


def raised(fault: str, sentence: str, case: Case) -> str:
    """The run must stop with the sentence, and leave a checkpoint with the weights of before the update."""
    code, error, folder = case.faulty(fault, "raise")
    sentence = sentence.format(env=case.victim, step=case.at)
    module = importlib.import_module(case.script)
    states = [module.load_checkpoint(str(path)) for path in checkpoints(folder)]
    complete = states and states[0]["iteration"] == (case.at - 1) // 8 and all(
        value.isfinite().all() for value in states[0]["model"].values())
    return "stopped, message, checkpoint" if code == 1 and sentence in error and complete else (
        f"exit code {code}, checkpoint {bool(complete)}, {error[-200:]!r}")


def restarted(fault: str, case: Case) -> str:
    code, error, folder = case.faulty(fault, "restart")
    if code:
        return f"exit code {code}: {error[-200:]!r}"
    log = result(folder)[1]
    count, updates = log["charts/env_restarts"][-1][1], len(log["losses/value_loss"])
    expected = 0 if fault == "exception in reset" else 1
    return "continued, counted" if ": restarted" in error and count == expected and updates == 60 else (
        f"{count} restarts, {updates} updates")


def nan_loss(case: Case) -> str:
    at = case.rng.randrange(4, 240)

    def poison(module):
        original, calls = module.ppo_loss, []

        def loss(agent, inputs, batch, args):
            calls.append(0)
            if len(calls) % 4 == 1:
                torch.save(agent.state_dict(), case.folder / "before.pt")
            value, logs = original(agent, inputs, batch, args)
            return (value * np.nan if len(calls) - 1 == at else value), logs

        module.ppo_loss = loss

    code, error = finish(case.run, case.script, case.flags | dict(update_epochs=2), poison)
    state = importlib.import_module(case.script).load_checkpoint(str(checkpoints(case.run)[0]))
    before = torch.load(case.folder / "before.pt", weights_only=True)
    equal = all(torch.equal(before[k], v) for k, v in state["model"].items())
    sentence = f"update {at // 4 + 1}, after {8 * (at // 4 + 1)} steps of 3 envs: loss of minibatch {at % 4} is NaN"
    if not (code == 1 and sentence in error and equal and state["iteration"] == at // 4):
        return f"exit code {code}: {error[-200:]!r}"
    return "stopped, message, checkpoint" if not case.resumed().startswith("failed") else "cannot be resumed"


def nan_loss_skipped(case: Case) -> str:
    at = case.rng.randrange(4, 240)

    def poison(module):
        original, calls = module.ppo_loss, []

        def loss(*args):
            calls.append(0)
            value, logs = original(*args)
            return (value * np.nan if len(calls) - 1 == at else value), logs

        module.ppo_loss = loss

    code, error = finish(case.run, case.script, case.flags | dict(skip_nonfinite_updates=True), poison)
    weights, log = result(case.run)
    skipped = [value for _, value in log["charts/skipped_minibatches"]]
    good = code == 0 and sum(skipped) == skipped[at // 4] == 1 and all(v.isfinite().all() for v in weights.values())
    return "continued, counted" if good else f"exit code {code}, {sum(skipped)} skipped"


def damage(case: Case) -> str:
    case.stop(signal.SIGKILL)
    paths = checkpoints(case.run)
    if paths:
        data = bytearray(paths[0].read_bytes())
        kind = case.rng.randrange(3)
        if kind == 0:
            data = data[:case.rng.randrange(len(data))]
        else:
            place = case.rng.randrange(len(data))
            data[place] ^= 1 << case.rng.randrange(8) if kind == 1 else 255
        paths[0].write_bytes(bytes(data))
    if len(paths) == 1:  # killed before the second one: there is none to fall back to
        paths[0].unlink()
    return case.resumed()


def full_disk(case: Case) -> str:
    first, last, limit = case.rng.randrange(2, 30), case.rng.randrange(31, 58), case.rng.choice([10, 3000, 20_000])

    def fill(module):
        original, calls = module.update, []

        def update(*args):
            calls.append(0)
            if len(calls) in (first, last):
                soft = limit if len(calls) == first else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
            return original(*args)

        module.update = update

    code, _ = finish(case.run, case.script, case.flags, fill)
    left = list(case.run.glob("*/unfinished*"))
    good = code == 0 and not left and same(result(case.run), case.reference)
    return "nothing lost, bitwise equal" if good else f"exit code {code}, {left}"


KINDS = {  # kind -> (what it does, the only outcome that is right)
    "kill -9 of the run, twice": (kill_run, "bitwise equal"),
    "SIGTERM": (lambda case: stop_run(signal.SIGTERM, case), "saved, exit code, continued"),
    "SIGINT": (lambda case: stop_run(signal.SIGINT, case), "saved, exit code, continued"),
    "damaged checkpoint after a kill -9": (damage, "bitwise equal"),
    "full disk for a while": (full_disk, "nothing lost, bitwise equal"),
    "NaN loss": (nan_loss, "stopped, message, checkpoint"),
    "NaN loss, --skip-nonfinite-updates": (nan_loss_skipped, "continued, counted"),
}
for name, text in {"worker killed": "worker of envs {env} to {env} died with exit code -9 in step {step}",
                   "worker hangs": "worker of envs {env} to {env} did not answer within 1 s in step {step}",
                   "exception in step": "env {env}, step {step}, action",
                   "exception in reset": "env {env}, step {step}, reset: KeyError: 'the engine is on fire'",
                   "NaN observation": "env {env}, leaf 'obs', step {step}: value nan at index [0]",
                   "NaN reward": "env {env}, step {step}: reward nan"}.items():
    KINDS[name] = (lambda case, name=name, text=text: raised(name, text, case)), "stopped, message, checkpoint"
    if not name.startswith("NaN"):
        KINDS[f"{name}, --on-env-error restart"] = (
            (lambda case, name=name: restarted(name, case)), "continued, counted")


def main(args) -> bool:
    memory, references, rng = set(os.listdir("/dev/shm")), {}, random.Random(args.seed)
    rows, begin = [], time.time()
    for kind, (inject, expected) in KINDS.items():
        if args.only not in kind:
            continue
        outcomes = []
        for k in range(args.times):
            with tempfile.TemporaryDirectory() as folder:
                outcomes.append(inject(Case(k, Path(folder), references, rng)))
            if outcomes[-1] != expected:
                print(f"{kind}, run {k % len(RUNS)}: {outcomes[-1]}", file=sys.stderr)
        rows.append((kind, len(outcomes), expected, sum(outcome == expected for outcome in outcomes)))
        print(f"{time.time() - begin:.0f} s: {rows[-1]}", file=sys.stderr, flush=True)
    leftover = set(os.listdir("/dev/shm")) - memory
    total, right = sum(row[1] for row in rows), sum(row[3] for row in rows)
    text = io.StringIO()
    print(f"    python benchmark/reliability/inject.py --times {args.times} --seed {args.seed}\n\n"
          f"{total} faults at random moments in runs of the four scripts, in turn in process and with 2 worker "
          f"processes; {right} ended as they should. Shared memory that was left behind: {len(leftover)} segments.\n\n"
          "| what happened | times | outcome | so it was |\n|---|---|---|---|", file=text)
    for kind, times, expected, good in rows:
        print(f"| {kind} | {times} | {expected} | {good} |", file=text)
    print(f"""
- bitwise equal: continued with `--resume auto`, the weights and the log are those of a run that nothing happened to
- saved, exit code, continued: a checkpoint after the present step, 143 or 130, no worker left; continued with
  `--resume auto`, the log has each update once
- stopped, message, checkpoint: exit code 1, the message names environment, step and value (NaN loss: update and
  minibatch), and the newest checkpoint has the weights of before the update
- continued, counted: the run trained all its updates, and the log counts what happened ("charts/env_restarts",
  "charts/skipped_minibatches"; an exception in reset cuts no episode off, so nothing is counted)

{time.time() - begin:.0f} s, {os.cpu_count()} cores, torch {torch.__version__}""", file=text)
    print(text.getvalue())
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text.getvalue())
    return right == total and not leftover


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only kinds whose name contains this")
    parser.add_argument("--out", type=Path)
    torch.set_num_threads(1)
    sys.exit(not main(parser.parse_args()))
