"""cleanrl_graph, a script's Run with services: a locked folder, checkpoints from which it resumes,
an end after the update in which a signal comes, and a log with flags, groups and sizes, for
Weights and Biases, too."""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from numbers import Real
from operator import itemgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tqdm import tqdm

from cleanrl_graph.envs.fitting import say
from cleanrl_graph.services import check, checkpoint, policy, summary, vector
from cleanrl_graph.services.check import UsageError, entries, plain
from cleanrl_graph.services.checkpoint import all_ranks, broadcast, rank, world_size
from cleanrl_graph.services.csv_file import CsvFile
from cleanrl_graph.services.eval_every import Evaluations, Reached
from cleanrl_graph.services.freeze import freeze
from cleanrl_graph.services.process import accelerate, bar, step_without_compiler, whole

EPISODES = ("step", "seconds", "return", "length", "group", "task")  # columns of episodes.csv
PACKAGES = "cleanrl_graph torch torch-geometric gymnasium numpy".split()  # in args.json
LEFT = set(".pt .md .csv .gif .json .ckpt".split())  # endings of what a run leaves for people


def run_name(args: Any) -> str:
    """What the names of run folders begin with; the environment's kwargs and wrappers enter as a
    digest."""
    name = args.env_id.split(":")[-1].replace("/", "-")
    if args.env_kwargs or args.wrap:
        variant = json.dumps([plain(args.env_kwargs), args.wrap])
        name += "-" + hashlib.sha1(variant.encode()).hexdigest()[:6]
    return f"{name}__{args.exp_name}__{args.seed}__"


def new_folder(args: Any) -> str:
    """A folder that no other run has, not even one that began in the same millisecond."""
    number = int(1000 * time.time())
    while True:
        folder = Path(args.run_dir, f"{run_name(args)}{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError:  # which `checkpoint.Folder` says
            pass
        return str(folder)


def versions() -> dict[str, str]:
    """Python's version, and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit_of(path: str) -> str | None:
    """The commit of the git repository in which a file lies, with "-dirty" where the repository has
    changes that are not committed; None where there is no repository or no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(path).parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The numbers of the SIGINT and SIGTERM received within, for the loop to stop after its update;
    the second one leaves at once."""
    received = []

    def note(number: int, frame: Any) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: stops after this update; once more leaves at once\n".encode())

    handlers = {}  # as they were
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """What gloo or nccl raises where another rank has ended becomes a sentence. At the end the
    ranks part: threads of torch.distributed may abort a process that ends."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) or "NCCL" in str(error):
            problem = f"another rank has ended and says why, or cannot be reached: {error}"
            raise SystemExit(f"rank {rank()}: {problem}") from None
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def part() -> None:
    """The ranks part together, as at the end of a training: NCCL needs all of them for it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Services:
    """What a script's Run gets, which is the class after this one."""

    script: ModuleType
    evaluations: Evaluations | None = None  # of --eval-every, on rank 0

    def __init__(self, args: Any, stack: contextlib.ExitStack):
        """Finds the folder and the checkpoint to resume from, locks the folder, and notes signals
        from now on. At the end `stack` is closed."""
        super().__init__(args)
        self.name = Path(self.script.__file__).stem  # of the script
        self.flags = plain(vars(args))  # as they were given
        self.stack = stack
        self.saved = None
        folder = None
        if rank() == 0:
            found = args.resume and checkpoint.find(args, self.name, run_name(args))
            folder, self.saved = found or (new_folder(args), None)
        folder, self.saved, args.num_envs = broadcast((folder, self.saved, args.num_envs))
        self.folder = Path(folder).absolute()  # an environment may change the current one
        if rank() == 0:
            self.locked_folder = stack.enter_context(checkpoint.Folder(str(self.folder)))
        self.steps = args.num_envs * args.num_steps * world_size()  # of all ranks, per update
        saved = self.saved or {"global_step": 0}
        self.begins_at = self.global_step = saved["global_step"]
        # Rows of all ranks in which a VectorEnv began an episode: no steps
        self.num_skipped = saved.get("num_skipped", 0)
        # --num-steps may be another now: `more` steps are no whole updates
        self.first, more = divmod(self.global_step + self.num_skipped, self.steps)
        self.offset = more - self.num_skipped  # from a script's global_step, which counts rows
        self.iteration = self.first
        self.signals = stack.enter_context(noted_signals())
        self.saved_at = time.monotonic()

    def begin(self, agent: torch.nn.Module, optimizer, memory, envs, rng) -> tuple:
        """The Step to begin with. Loads --load-model's weights, or what a checkpoint holds, and
        puts faster layers into the agent."""
        args = self.args
        self.trained = (agent, optimizer, memory, envs, rng)
        if args.load_model:
            saved = policy.read_model(args.load_model, next(agent.parameters()).device)
            about = policy.about_file(args, saved["args"])
            if args.load_matching:
                policy.load_matching(agent, saved["model"], about)
            else:
                policy.load_weights(agent, saved, about, self.name)
        if args.track and rank() == 0:
            self.track()
        if self.saved:
            rows = self.global_step + self.num_skipped
            num_left = max(args.total_timesteps - rows, 0) // self.steps
            args.num_iterations = self.first + num_left
            if num_left == 0:
                say(f"--resume: all {self.global_step:,} steps have been trained")
            failures = broadcast(self.locked_folder.failures if rank() == 0 else 0)
            envs = SimpleNamespace(reset=lambda seed: checkpoint.restore(self, failures))
            self.say_rate()
        if args.eval_every and args.total_timesteps:
            self.begin_evaluations()
        for line in summary.lines(self.script, args, agent, self.trained[3]):
            say(line)
        for line in freeze(agent, args.freeze):
            say(line)
        num_steps = self.num_steps()
        if args.total_timesteps > num_steps:
            of = f"{args.num_iterations:,} updates of {self.steps:,} steps"
            say(f"training: {of}: {num_steps:,} of the {args.total_timesteps:,} steps")
        step = super().begin(agent, optimizer, memory, envs, rng)
        accelerate(agent)
        step_without_compiler(optimizer)
        if rank() == 0:
            self.stack.callback(self.close)
            if self.saved:  # what was logged after the checkpoint does not count
                start = SessionLog(status=SessionLog.START)
                event = Event(step=self.global_step + 1, session_log=start)
                self.writer.file_writer.add_event(event)
            self.note_flags()
            self.episodes = CsvFile(self.folder / "episodes.csv", EPISODES)
            kept = self.episodes.keep(self.global_step)
            self.stack.callback(self.episodes.close)
            self.seconds = max((float(row["seconds"]) for row in kept), default=0.0)
            self.longest = max((int(row["length"]) for row in kept), default=0)
        return step

    def begin_evaluations(self) -> None:
        """--eval-every, on rank 0. Nothing is left to train where --stop-at was reached before."""
        has_ended = False
        if rank() == 0:
            self.evaluations = Evaluations(self, self.trained[0])
            self.stack.callback(self.evaluations.file.close)
            has_ended = self.evaluations.has_ended()
        if broadcast(has_ended):
            self.args.num_iterations = self.first
            say(f"--stop-at {self.args.stop_at:g} has been reached")

    def play(self, agent: torch.nn.Module, makers: list, args: Any, greedy: bool) -> list[dict]:
        """The last info of an episode of each environment. A function that makes a VectorEnv makes
        one for them."""
        if vector.has_function(args):
            own = vector.make(args, len(makers))
            envs = vector.VectorEnvs(self.script, own, args)
        else:
            envs = check.checked(self.script)(makers, args)
        with contextlib.closing(envs):
            return self.script.play(agent, args, envs, greedy)

    def num_steps(self) -> int:
        """The steps at the end of the training, whole updates."""
        return max(self.args.num_iterations * self.steps + self.offset, self.global_step)

    def make_bar(self) -> tqdm:
        """From the steps made before to those of the last update; lines in a file."""
        return bar(initial=self.global_step, total=self.num_steps(), unit_scale=True)

    def note_flags(self) -> None:
        """The flags as they were given in args.json, with versions and commit, and all of them in
        the log."""
        flags = {"script": self.name, "world_size": world_size(), **self.flags}
        flags |= {"versions": versions(), "commit": commit_of(self.script.__file__)}
        with whole(self.folder / "args.json") as unfinished:
            Path(unfinished).write_text(json.dumps(flags, indent=1) + "\n")
        rows = [f"|{name}|{value}|" for name, value in vars(self.args).items()]
        table = "\n".join(["|param|value|", "|-|-|", *rows])
        self.writer.add_text("hyperparameters", table, self.global_step)

    def say_rate(self) -> None:
        """Prints what the learning rate jumps to, where there are more steps than before."""
        args = self.args
        rate = args.learning_rate * (1 - self.first / max(args.num_iterations, 1))
        before = self.saved["optimizer"]["param_groups"][0]["lr"]
        if args.anneal_lr and rate > before:
            more = f"which falls to 0 at --total-timesteps {args.total_timesteps}"
            rates = f"goes on at {rate:.3g}, {more}; its last one was {before:.3g}"
            say(f"--resume: the learning rate {rates}")

    def track(self) -> None:
        """--track: Weights and Biases reads the TensorBoard log that is opened after this."""
        import wandb

        wandb.init(
            project=self.args.wandb_project_name,
            entity=self.args.wandb_entity,
            sync_tensorboard=True,
            config=vars(self.args),
            name=self.folder.name,
            id=self.folder.name,
            resume="allow",
            save_code=True,
        )

    def end_update(self, global_step: int, step: tuple, scalars: dict, episodes: list) -> None:
        """As the script's, with the groups of episodes and the sizes of observations; then a
        checkpoint where one is due. UsageError for a loss that is not finite, SystemExit if a rank
        got a signal. A metric that is not finite, such as one that a copy of the script added, is
        logged as it is, which is said once."""
        self.iteration = iteration = global_step // self.steps
        for name, value in scalars.items():
            if not math.isfinite(value):
                if not name.startswith(("losses/", "debug/")):
                    say(f"update {iteration}: {name} is {value}, and is logged as it is", name)
                    continue
                raise UsageError(
                    f"update {iteration}: {name} is {value}; rewards and observations are finite, "
                    "so look at their size, the network and --learning-rate"
                )
        self.warn(scalars["debug/collection_mismatch"])
        self.warn_of_large_returns()
        _, _, memory, envs, _ = self.trained
        if vector.is_vector(self.args):
            num_skipped = sum(all_ranks(envs.take_skipped()))
            self.num_skipped += num_skipped
            self.offset -= num_skipped
            if rank() == 0:
                self.bar.total = self.num_steps()
        # An episode ends after the last update, wherever rows were skipped
        least = self.global_step + 1
        self.global_step = global_step + self.offset
        episodes = [(max(at + self.offset, least), i, info) for at, i, info in episodes]
        super().end_update(self.global_step, step, scalars | sizes(memory.storage), episodes)
        self.note_episodes(episodes)
        has_reached = self.evaluate_if_due(iteration)
        self.save_if_due(iteration, step, has_reached)
        if has_reached:
            raise Reached

    def evaluate_if_due(self, iteration: int) -> bool:
        """--eval-every, and after the last update. The other ranks wait. Returns whether --stop-at
        is reached."""
        every = self.args.eval_every
        if not every or iteration % every and iteration < self.args.num_iterations:
            return False
        return broadcast(rank() == 0 and self.evaluations.evaluate(self.trained[0]))

    def note_episodes(self, episodes: list) -> None:
        """Writes the episodes of all ranks to episodes.csv, and means over them to the log: returns
        and lengths of each group and task, what is in info["eval"] and, of all and of each group
        and task, what is in info["metrics"]."""
        num_tasks = len(entries(self.args))
        rows = []
        reports = []
        for step, i, info in episodes:
            reports.append((info.get("eval", {}), info.get("metrics", {})))
            task = None
            if num_tasks > 1:
                task = f"task_{(rank() * self.args.num_envs + i) % num_tasks}"
            ret, length = info["episode"]["r"], info["episode"]["l"]
            rows.append((step, ret, length, info.get("group"), task))
        rows = sum(all_ranks(rows), [])
        reports = sum(all_ranks(reports), [])
        if rank() > 0:
            return
        values = {}  # name in the log -> numbers
        for (_, ret, length, *names), (report, metrics) in zip(rows, reports):
            self.longest = max(self.longest, length)
            for name in names:
                if name is not None:
                    values.setdefault(f"charts/episodic_return/{name}", []).append(ret)
                    values.setdefault(f"charts/episodic_length/{name}", []).append(length)
            for name, value in report.items():
                values.setdefault(f"charts/eval/{name}", []).append(value)
            for name, value in metrics.items():
                for group in ("", *(f"/{group}" for group in names if group is not None)):
                    values.setdefault(f"charts/{name}{group}", []).append(value)
        for name, found in values.items():
            numbers = [value for value in found if isinstance(value, Real) and value == value]
            if numbers:
                mean = sum(numbers) / len(numbers)
                self.writer.add_scalar(name, mean, self.global_step)
        seconds = f"{self.seconds + self.bar.format_dict['elapsed']:.2f}"
        lines = []
        for (step, *row), (_, metrics) in zip(rows, reports):
            lines.append(dict(zip(EPISODES, (step, seconds, *row))) | metrics)
        self.episodes.write(sorted(lines, key=itemgetter("step")))

    def warn(self, mismatch: float) -> None:
        """Says once that collection and update do not compute the same policy."""
        if mismatch <= 1e-4:
            return
        say(
            f"debug/collection_mismatch is {mismatch:.2g}: before the first step of the optimizer "
            "the update's probabilities are not those of collection. Likely a layer that was put "
            "in mixes the observations of a batch (batch norm; norms or attention over nodes whose "
            "forward does not take `batch`), or is random (dropout)",
            "collection_mismatch",
        )

    def warn_of_large_returns(self) -> None:
        """Says once that V cannot learn such returns: with --clip-vloss it moves by --clip-coef in
        an update; without it, its loss hides the policy's."""
        args = self.args
        # With --clip-vloss the loss has no gradient where V is already clip_coef nearer to the
        # return than in the rollout, so that V moves by about clip_coef in an update, and by `most`
        # in all of them. If the returns' deviation is k times as much, V from 0 explains at most
        # 1 - (1 - 1 / k)^2 of their variance: 0.19 at k = 10. Less than 100 updates are a trial
        most = args.clip_coef * max(args.num_iterations, 100)
        if self.std_floor > 10 * most and (args.clip_vloss or args.norm_vloss == 0):
            say(
                f"the returns' deviation is {self.std_floor:.3g}, too much for V: it moves by "
                f"--clip-coef {args.clip_coef} an update, or its loss is too large: scale rewards "
                "by --wrap gymnasium.wrappers:NormalizeReward, or give --no-clip-vloss "
                "--norm-vloss 1",
                "large returns",
            )

    def save_if_due(self, iteration: int, step: tuple, is_last: bool) -> None:
        """Writes a checkpoint where one is due, by rank 0's clock, or the training ends. SystemExit
        if a rank got a signal."""
        args = self.args
        minutes = (time.monotonic() - self.saved_at) / 60
        is_late = 0 < args.checkpoint_minutes <= minutes
        found = all_ranks((max(self.signals, default=0), is_late))
        stop, _ = max(found)
        _, is_late = found[0]
        is_due = is_late or iteration % max(args.checkpoint_every, 1) == 0
        is_due = is_due or stop > 0 or iteration == args.num_iterations or is_last
        if args.checkpoint_every and (is_due or iteration == self.first + 1):
            checkpoint.save(self, step, is_due)
            if is_due:
                self.saved_at = time.monotonic()
        if stop:
            if args.checkpoint_every:
                say(f"--resume {self.folder} goes on from here")
            raise SystemExit(128 + stop)

    def model_of(self, agent: torch.nn.Module) -> dict:
        """What model.pt has: tensors and flags, which anyone can load with weights_only=True."""
        return {"script": self.name, "args": self.flags, "model": agent.state_dict()}

    def save_model(self, agent: torch.nn.Module) -> None:
        with whole(self.folder / "model.pt") as unfinished:
            torch.save(self.model_of(agent), unfinished)

    def tell(self) -> None:
        """The last lines: what lies where, and how the agent plays."""
        num_rows = len((self.folder / "episodes.csv").read_text().splitlines()) - 1
        if num_rows == 0 and self.global_step > self.begins_at:
            num_steps = self.args.num_steps * self.iteration
            print(f"no episode has ended in {num_steps:,} steps")
        for line in self.evaluations.tell() if self.evaluations else ():
            print(line)
        names = sorted(path.name for path in self.folder.iterdir() if path.suffix in LEFT)
        print(f"in {self.folder}: {', '.join(names)}, TensorBoard's log")
        path = self.folder / "model.pt"
        if path.exists():
            script = self.script.__file__
            is_copy = Path(script).resolve().parent != Path(__file__).resolve().parents[1]
            more = f", script={self.name}" * is_copy
            print(f"to play: python {script} --load-model {path} --total-timesteps 0")
            print(f"in a program: cleanrl_graph.load_policy('{path}'{more})")


def sizes(storage: Any) -> dict[str, float]:
    """Of stored observations: bytes of each, the share that padding would waste, rows per group."""
    flat = storage.whole()
    num_steps = flat.size
    scalars = {}
    used = 0
    padded = 0
    for leaf in storage.leaves:
        num = flat.counts[leaf.group]
        row_bytes = leaf.dtype.itemsize * math.prod(leaf.space.shape)
        used += int(num.sum()) * row_bytes
        padded += int(num.max()) * num_steps * row_bytes
        if leaf.is_ragged and leaf.is_input:
            scalars[f"charts/rows/{leaf.group}"] = num.mean()
    scalars["charts/obs_bytes_per_step"] = used / num_steps
    scalars["charts/padding_avoided"] = (padded - used) / (padded or 1)
    return scalars
