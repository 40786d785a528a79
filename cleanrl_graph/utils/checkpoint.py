"""cleanrl_graph, exact resume: checkpoints of a run, the lock of its folder, its environments as
pickles, which trial.py tries once each has made 16 steps. A checkpoint is a line with format and
sha256, then a pickle: it is for the user who wrote it alone."""

import contextlib
import copy
import glob
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from cleanrl_graph.utils import trial
from cleanrl_graph.utils.check import close
from cleanrl_graph.utils.trial import noted, random_state, set_random_state

FORMAT = "cleanrl_graph-checkpoint-3"
SAME = set(
    "script env_id env_kwargs wrap num_envs num_workers world_size obs_shifts action_shifts "
    "reward_shifts memory_length stay_solved".split()
)  # the saved environments, memory or optimizer (stay_solved: AMSGrad or not) fit no other values
FREE = set(
    "run_dir track wandb_project_name wandb_entity capture_video save_model load_model "
    "checkpoint_every checkpoint_minutes resume eval_suite eval_episodes eval_samples "
    "eval_max_steps env_timeout cuda exp_name batch_size "
    "num_iterations".split()
)  # all others shape the training
OF_ENVS = "num_steps observations returns lengths outcome agent_returns agents".split()
load_env = cloudpickle.loads  # of what dump_envs returned
inexact = set()  # kinds of environments whose copies do not go on as they do


# ---- Finding a checkpoint ----
def checkpoints_in(folder: str) -> list[str]:
    """The checkpoints of a run, the newest first."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "checkpoint_*.ckpt")), reverse=True)


def find(args: Any, script: str, prefix: str) -> tuple[str, dict] | None:
    """(folder, state) of the newest whole checkpoint that `args.resume` names; None for "auto" if
    there is none. What cannot be read is said and left out for the one before it. SystemExit if
    there is none, or for flags that do not fit."""
    paths = candidates(args, prefix)
    if paths is None:
        absent = f"no checkpoint of {prefix}* in {args.run_dir}"
        print(f"--resume auto: {absent}, starting anew", file=sys.stderr)
        return None
    for path in paths:
        try:
            state = read(path)
        except Exception as error:  # of many kinds
            print(f"--resume: {path} is left out: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            compare(args, script, path, state)
            print(f"--resume {args.resume}: goes on from {path}")
            return os.path.dirname(path) or ".", state
    raise SystemExit(f"--resume {args.resume}: there is no checkpoint that can be read")


def candidates(args: Any, prefix: str) -> list[str] | None:
    """What `args.resume` names, the newest first: a file and those before it, or the checkpoints of
    a folder; "auto": of the folder `prefix*` in `args.run_dir` that was written last, None if there
    is none. SystemExit for anything else."""
    if args.resume == "auto":
        folders = glob.escape(os.path.join(args.run_dir, prefix)) + "*"
        found = glob.glob(os.path.join(folders, "checkpoint_*.ckpt"))
        if not found:
            return None
        return checkpoints_in(os.path.dirname(max(found, key=os.path.getmtime)))
    folder, name = os.path.split(args.resume)
    if name.startswith("checkpoint_") and os.path.isfile(args.resume):
        others = checkpoints_in(folder)
        return [args.resume] + [path for path in others if os.path.basename(path) < name]
    paths = checkpoints_in(args.resume)
    if not paths:
        needed = "auto, a folder with checkpoints or a checkpoint_*.ckpt is needed"
        raise SystemExit(f"--resume {args.resume}: {needed}")
    return paths


def read(path: str) -> dict:
    """The state that `Folder.save` wrote. ValueError, or what unpickling raises, for a file that is
    something else."""
    with open(path, "rb") as file:
        header = file.readline(200).decode(errors="replace").split()
        data = file.read()
    if header != [FORMAT, hashlib.sha256(data).hexdigest()]:
        raise ValueError(
            f"it does not begin with {FORMAT} and its checksum: it is of another version, damaged "
            "or something else"
        )
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def compare(args: Any, script: str, path: str, state: dict) -> None:
    """Compares the flags with those of the run in `state`. SystemExit if one of SAME differs or,
    with --resume auto, any that is not in FREE, but for --total-timesteps. Prints the others that
    differ."""
    now = {**vars(args), "script": script}
    then = {**state["args"], "script": state["script"]}
    changed = {}
    for name in now | then:
        if name not in FREE and now.get(name) != then.get(name):
            flag = f"--{name.replace('_', '-')}"
            changed[name] = f"{flag} {now.get(name)}, it was {then.get(name)}"
    refused = [name for name in changed if name in SAME]
    advice = "Give the same, or another --exp-name to start anew"
    if args.resume == "auto":
        if not refused:
            advice += f", or --resume {os.path.dirname(path)} to go on with these"
        refused = [name for name in changed if name != "total_timesteps"]
    if refused:
        texts = "; ".join(changed[name] for name in refused)
        raise SystemExit(
            f"--resume {args.resume}: {path} is of a run with other flags: {texts}. {advice}"
        )
    for text in changed.values():
        print(f"--resume: {text}", file=sys.stderr)


# ---- The folder of a run ----
class Folder(contextlib.AbstractContextManager):
    """`with Folder(path) as folder`: the folder of a run, which no other process writes to
    meanwhile. SystemExit if it cannot be made or written to, or if another process has it. An
    exception that ends the block leaves a line in the file "failed", which the next checkpoint
    removes; `failures` is the number of lines that were there at the start."""

    def __init__(self, folder: str):
        self.folder = folder
        self.mark = Path(folder, "failed")
        self.unfinished = Path(folder, "unfinished.tmp")
        try:
            os.makedirs(folder, exist_ok=True)
            self.file = open(os.path.join(folder, "lock"), "wb")
            self._lock()
            self._write(bytes(2**16))
            self.unfinished.unlink()
            self.failures = self.mark.read_text().count("\n") if self.mark.exists() else 0
        except OSError as error:
            problem = f"cannot write to the folder of the run (see --run-dir): {error}"
            raise SystemExit(problem) from None

    def _lock(self) -> None:
        with contextlib.suppress(ImportError, OSError):  # Windows, or a file system without locks
            import fcntl

            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(
                    f"another process writes to {self.folder}; let it end, or give another "
                    "--exp-name or --run-dir"
                ) from None
            # workers must not hold it when this process dies
            os.register_at_fork(after_in_child=self.file.close)

    def _write(self, *chunks: bytes | memoryview) -> None:
        with open(self.unfinished, "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())

    def save(self, step: int, state: dict) -> None:
        """Writes a checkpoint, whole or not at all, and keeps the newest two. Those of later steps,
        of a future that this run does not have, get the ending ".unused". SystemExit if it cannot
        be written."""
        path = os.path.join(self.folder, f"checkpoint_{step:012d}.ckpt")
        file = io.BytesIO()
        torch.save(state, file)
        data = file.getbuffer()
        header = f"{FORMAT} {hashlib.sha256(data).hexdigest()}\n"
        try:
            self._write(header.encode(), data)
            for other in checkpoints_in(self.folder):
                if other > path:
                    os.replace(other, other + ".unused")
            os.replace(self.unfinished, path)
            for old in checkpoints_in(self.folder)[2:]:
                os.remove(old)
            self.mark.unlink(missing_ok=True)
        except OSError as error:
            raise SystemExit(f"cannot write {path}: {error}") from None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        with contextlib.suppress(OSError):  # nothing may hide the error
            self.unfinished.unlink(missing_ok=True)
            if isinstance(error, Exception):
                lines = f"{type(error).__name__}: {error}".splitlines()
                with open(self.mark, "a") as file:
                    file.write(lines[-1] + "\n")
        self.file.close()


# ---- Environments ----
class Dump(NamedTuple):
    """What is kept of an environment."""

    kind: str
    data: bytes | None  # for `load_env`
    problem: str | None  # why it begins a new episode when the run is resumed
    trial: tuple | None  # for trial.py, when it can be made


def dump_envs(envs: list[gym.Env]) -> list[Dump]:
    """A Dump of each environment. The first call puts a Twin in its place. One that shares
    something with its copies (the handle of a simulator) should refuse pickling."""
    for i, env in enumerate(envs):
        if not isinstance(env, Twin):
            envs[i] = Twin(env)
    return [env._dump() for env in envs]


class Twin(gym.Wrapper):
    """An environment that notes its first calls after the first dump, for trial.py to repeat on a
    copy. It notes 16 of them, or fewer if an episode ends: the reset after it is the last. Then
    `step` and `reset` are those of the environment itself. A class that has `exact_resume` is not
    tried. If it is True its copies are trusted; if False it begins new episodes."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._exact = getattr(env.unwrapped, "exact_resume", None)
        self._data = None  # of the last dump before the first call
        self._calls = []
        self._num_left = 16  # calls that are still to be noted
        if self._exact is None:
            self.step = partial(self._note, "step")
            self.reset = partial(self._note, "reset")

    def _dump(self) -> Dump:
        kind = self.env.spec.id if self.env.spec else type(self.unwrapped).__name__
        if self._exact is False:
            return Dump(kind, None, "its exact_resume is False", None)
        data = None
        problem = None
        before = random_state()
        try:
            data = cloudpickle.dumps(self.env)
        except Exception as error:  # of many kinds
            problem = f"no copy can be made of it: {type(error).__name__}: {error}"
        set_random_state(before)
        trial = None
        if self._num_left == 16:
            self._data = data
        elif self._num_left == 0 and self._data:
            trial = self._data, self._calls
            self._data = None
            self._calls = []
        return Dump(kind, data, problem, trial)

    def _note(self, method: str, *args, **kwargs) -> tuple:
        """What the environment returns, which is noted."""
        call = copy.deepcopy((method, args, kwargs))
        state = random_state() | {"cuda": []}
        results = getattr(self.env, method)(*args, **kwargs)
        self._calls.append((*call, state, noted(results)))
        self._num_left -= 1
        if method == "reset" or self._num_left == 0:
            self._num_left = 0
            self.step = self.env.step
            self.reset = self.env.reset
        return results


def exact_dumps(dumps: list[Dump]) -> list[bytes | None]:
    """The pickle of each environment, for `restore_env`. It is None for all environments of a kind
    if one of them cannot be pickled, or its copy did not do in a fresh process what its original
    did. stderr says so once for each kind."""
    trials = [dump.trial for dump in dumps if dump.trial]
    answers = iter(try_copies(trials) if trials else [])
    for dump in dumps:
        answer = next(answers) if dump.trial else None
        problem = dump.problem or answer
        if problem and dump.kind not in inexact:
            inexact.add(dump.kind)
            when = "it begins a new episode when the run is resumed"
            print(f"{dump.kind}: {when}, since {problem}", file=sys.stderr)
    return [None if dump.kind in inexact else dump.data for dump in dumps]


def try_copies(trials: list[tuple]) -> list[str | None]:
    """What trial.py says to each of them."""
    if rank() == 0:
        print(
            "checkpoints: copies of the environments repeat up to 16 steps in another process, to "
            "see whether they resume exactly; not where a class has exact_resume = True, or False"
        )
    done = subprocess.run(
        [sys.executable, "-P", trial.__file__],
        input=pickle.dumps(sys.path) + cloudpickle.dumps(trials),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to the group are not for it
    )
    lost = f"the process of a copy ended with exit code {done.returncode}"
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return answers + [lost] * (len(trials) - len(answers))


def env_state(envs: Any) -> dict:
    """What `restore_env` continues a script's Envs from, in the process that steps them."""
    state = {name: getattr(envs, name) for name in OF_ENVS if hasattr(envs, name)}
    return {**state, "envs": dump_envs(envs.envs), "random": random_state()}


def restore_env(state: dict, seed: int, failures: int, envs: Any) -> tuple:
    """The last Step of the environments that were saved. One without a pickle begins a new episode,
    and after `failures` exceptions all do, with other seeds, lest the same exception comes
    again."""
    for name in OF_ENVS:  # not all scripts have all
        if name in state:
            setattr(envs, name, state[name])
    for i, data in enumerate(state["envs"]):
        if data is not None and not failures:
            close(envs.envs[i])
            envs.envs[i] = load_env(data)
        else:
            shift = 1_000_003 * (envs.num_steps + failures + 1)
            envs.begin(i, (seed + envs.first_env + i + shift) % 2**32)
            envs.outcome[:, i] = 0, 1, 0  # reward, terminated, truncated
    set_random_state(state["random"])
    return envs.latest([], [])


# ---- Ranks ----
def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks(value: Any) -> list:
    """The value of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


@contextlib.contextmanager
def lost_ranks() -> Iterator[None]:
    """What gloo or nccl raises where another rank has ended becomes a sentence."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) or "NCCL" in str(error):
            problem = f"another rank has ended and says why, or cannot be reached: {error}"
            raise SystemExit(f"rank {rank()}: {problem}") from None
        raise


# ---- A run ----
def run_name(args: Any) -> str:
    """What the names of run folders begin with; the environment's kwargs and wrappers enter as a
    digest."""
    name = args.env_id.split(":")[-1].replace("/", "-")
    if args.env_kwargs or args.wrap:
        variant = json.dumps([args.env_kwargs, args.wrap])
        name += "-" + hashlib.sha1(variant.encode()).hexdigest()[:6]
    return f"{name}__{args.exp_name}__{args.seed}__"


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


def open_run(run: Any) -> None:
    """Finds the folder of a script's Run and the checkpoint to resume from, locks the folder, and
    notes signals from now on."""
    args = run.args
    run.enter_context(lost_ranks())  # first: what is entered later sees the error itself
    found = None
    if rank() == 0:
        name = run_name(args)
        if args.resume:
            found = find(args, run.script, name)
        if found is None:
            found = os.path.join(args.run_dir, f"{name}{int(1000 * time.time())}"), None
    folder, run.saved = broadcast(found)
    run.folder = os.path.abspath(folder)  # an environment may change the current one
    if run.saved:
        run.first = run.saved["iteration"]
    if rank() == 0:
        run.locked_folder = run.enter_context(Folder(run.folder))
        print(f"writes to {run.folder}")
    run.signals = run.enter_context(noted_signals())
    run.saved_at = time.monotonic()


def state_of(envs: Any, rng: np.random.Generator, memory: Any) -> dict:
    """What one rank has: its environments, where they can be asked, random states and memory."""
    states = []
    if hasattr(envs, "workers"):
        states = envs.ask([env_state] * len(envs.workers))
    elif hasattr(envs, "envs"):
        states = [env_state(envs)]
    dumps = exact_dumps(sum([state["envs"] for state in states], []))
    for state in states:
        num = len(state["envs"])
        state["envs"], dumps = dumps[:num], dumps[num:]
    return {
        "envs": states,
        "minibatches": rng.bit_generator.state,
        "random": random_state(),
        # a rank need not have the others' devices
        "memory": tree_map_only(torch.Tensor, torch.Tensor.cpu, memory.state()),
    }


def after_update(
    run: Any,
    iteration: int,
    agent: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    memory: Any,
    envs: Any,
    rng: np.random.Generator,
) -> None:
    """Writes a checkpoint where one is due, by rank 0's clock. SystemExit if a rank got a signal.
    After the first update environments are pickled in any case: when the next checkpoint is due,
    trial.py tries these copies."""
    args = run.args
    minutes = (time.monotonic() - run.saved_at) / 60
    is_late = 0 < args.checkpoint_minutes <= minutes
    found = all_ranks((max(run.signals, default=0), is_late))
    stop, _ = max(found)
    _, is_late = found[0]
    is_due = is_late or iteration % max(args.checkpoint_every, 1) == 0
    is_due = is_due or stop > 0 or iteration == args.num_iterations
    if args.checkpoint_every and (is_due or iteration == run.first + 1):
        ranks = all_ranks(state_of(envs, rng, memory))
        if is_due:
            run.saved_at = time.monotonic()
        if is_due and rank() == 0:
            run.writer.flush()
            state = {
                "script": run.script,
                "args": run.flags,
                "iteration": iteration,
                "model": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ranks": ranks,
            }
            run.locked_folder.save(iteration * run.steps, state)
    if stop:
        raise SystemExit(128 + stop)


def restore(
    run: Any,
    agent: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    memory: Any,
    envs: Any,
    rng: np.random.Generator,
) -> tuple:
    """The last Step of a rank; agent, optimizer, memory, rng and the random states are put back.
    SystemExit if the network is another."""
    try:
        agent.load_state_dict(run.saved["model"])
        optimizer.load_state_dict(run.saved["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise SystemExit(
            f"--resume: the network of the checkpoint is not that of the flags: {error}"
        ) from None
    for group in optimizer.param_groups:
        group["lr"] = run.args.learning_rate  # another one may have been given
    failures = broadcast(run.locked_folder.failures if rank() == 0 else 0)
    mine = run.saved["ranks"][rank()]
    seed = run.args.seed
    if hasattr(envs, "workers"):
        envs.num_steps = mine["envs"][0]["num_steps"]
        restores = [partial(restore_env, state, seed, failures) for state in mine["envs"]]
        step = envs.joined(restores)
    elif not mine["envs"]:
        print("--resume: the environments begin new episodes", file=sys.stderr)
        step = envs.reset((seed + 1_000_003 * (run.first + failures)) % 2**32)
    else:
        step = restore_env(mine["envs"][0], seed, failures, envs)
    memory.restore(mine["memory"])
    rng.bit_generator.state = mine["minibatches"]
    set_random_state(mine["random"])
    return step
