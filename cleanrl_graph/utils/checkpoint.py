"""cleanrl_graph, exact resume: checkpoints of a run, the lock of its folder, its environments as
pickles that were tried. A checkpoint is a line with format and sha256, then a pickle: it is for the
user who wrote it alone."""

import contextlib
import copy
import glob
import hashlib
import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from cleanrl_graph.utils.check import close

FORMAT = "cleanrl_graph-checkpoint-3"
SAME = {
    "script",
    "env_id",
    "env_kwargs",
    "wrap",
    "num_envs",
    "num_workers",
    "world_size",
    "obs_shifts",
    "action_shifts",
    "reward_shifts",
    "memory_length",
}  # what the saved state has the shape of
FREE = {
    "run_dir",
    "track",
    "wandb_project_name",
    "wandb_entity",
    "capture_video",
    "save_model",
    "load_model",
    "checkpoint_every",
    "checkpoint_minutes",
    "resume",
    "eval_suite",
    "eval_episodes",
    "eval_samples",
    "eval_max_steps",
    "env_timeout",
    "cuda",
    "torch_threads",
    "exp_name",
    "batch_size",
    "minibatch_size",
    "num_iterations",
}  # all others shape the training
OF_ENVS = (
    "num_steps",
    "observations",
    "returns",
    "lengths",
    "outcome",
)  # a script's Envs has these
load_env = cloudpickle.loads  # of what dump_envs returned
said = set()  # kinds of environments that do not go on exactly


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
    """SystemExit for flags with which the run in `state` cannot go on; with "auto" none that shapes
    the training may differ but --total-timesteps. Prints the others that differ."""
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


# ---- Random states ----
def random_state() -> dict:
    """The state of the global random generators, CUDA's only where this process uses CUDA."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict) -> None:
    """Puts back what `random_state` returned, CUDA's only if the number of devices is the same."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


# ---- Environments ----
def dump_envs(envs: list[gym.Env]) -> list[bytes | None]:
    """Each environment as bytes for `load_env`, None for one whose copy does not go on exactly. The
    first call puts a Twin in its place. One that shares something with its copies (the handle of a
    simulator) should refuse pickling."""
    for i, env in enumerate(envs):
        if not isinstance(env, Twin):
            envs[i] = Twin(env)
    return [env._dump() for env in envs]


def bits(value: Any) -> Any:
    """Nested values as what == compares bit by bit: dtypes and shapes count, and NaN is NaN."""
    if isinstance(value, (tuple, list)):
        return [bits(child) for child in value]
    if isinstance(value, dict):
        return {k: bits(child) for k, child in value.items()}
    array = np.asarray(value)
    if array.dtype.hasobject:
        return array.tolist()
    return array.dtype, array.shape, array.tobytes()


class Twin(gym.Wrapper):
    """An environment beside a copy loaded from its pickle. The copy makes the same steps, 16 of
    them or to the end of the episode and the reset after it; then it is dropped, and calls reach
    the environment without a detour."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._copy = None
        self._num_left = 16
        self._exact = True
        names = ("observation", "reward", "terminated", "truncated")
        self.step = partial(self._beside, "step", names)
        self.reset = partial(self._beside, "reset", names[:1])

    def _dump(self) -> bytes | None:
        if not self._exact:
            return None
        data = None
        before = random_state()
        try:
            data = cloudpickle.dumps(self.env)
            if self._num_left and self._copy is None:
                self._copy = load_env(data)
        except Exception as error:
            data = None
            self._end(f"no copy can be made of it: {type(error).__name__}: {error}")
        set_random_state(before)
        return data

    def _beside(self, method: str, names: tuple[str, ...], *args, **kwargs) -> tuple:
        """What the environment returns. The copy is first; it leaves the global random states as
        they were."""
        problem = None
        before = random_state()
        try:
            theirs = getattr(self._copy, method)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            theirs = [bits(value) for _, value in zip(names, theirs)]
        except (Exception, SystemExit) as error:
            problem = f"a copy fails in the next {method}: {type(error).__name__}: {error}"
        set_random_state(before)
        results = getattr(self.env, method)(*args, **kwargs)
        if problem is None:
            differ = []
            for name, value, other in zip(names, results, theirs):
                if bits(value) != other:
                    differ.append(name)
            if differ:
                problem = f"a copy returns another {' and '.join(differ)} in the next {method}"
        self._num_left -= 1
        if problem or method == "reset" or self._num_left == 0:
            self._end(problem)
        return results

    def _end(self, problem: str | None) -> None:
        """Drops the copy. One that was made anew is closed; others may share what that takes
        away."""
        with contextlib.suppress(Exception):
            if isinstance(self._copy.unwrapped, gym.utils.EzPickle):
                self._copy.close()
        self._copy = None
        self._num_left = 0
        self._exact = problem is None
        self.step = self.env.step
        self.reset = self.env.reset
        kind = self.env.spec.id if self.env.spec else type(self.unwrapped).__name__
        if problem and kind not in said:
            said.add(kind)
            when = "it begins a new episode when the run is resumed"
            print(f"{kind}: {when}, since {problem}", file=sys.stderr)


def env_state(envs: Any) -> dict:
    """What `restore_env` continues a script's Envs from, in the process that steps them."""
    state = {name: getattr(envs, name) for name in OF_ENVS}
    return {**state, "envs": dump_envs(envs.envs), "random": random_state()}


def restore_env(state: dict, seed: int, failures: int, envs: Any) -> tuple:
    """The last Step of the environments that were saved. One without a pickle begins a new episode,
    and after `failures` exceptions all do, with other seeds, lest the same exception comes
    again."""
    for name in OF_ENVS:
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
    return envs.latest()


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
        if isinstance(error, dist.DistError) or "gloo" in str(error):
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
    run.folder, run.saved = broadcast(found)
    if run.saved:
        run.first = run.saved["iteration"]
    if rank() == 0:
        run.lock = run.enter_context(Folder(run.folder))
    run.signals = run.enter_context(noted_signals())
    run.saved_at = time.monotonic()


def state_of(envs: Any, rng: np.random.Generator, memory: Any) -> dict:
    """What one rank has: its environments, where they can be asked, random states and memory."""
    states = []
    if hasattr(envs, "workers"):
        states = envs.ask([env_state] * len(envs.workers))
    elif hasattr(envs, "envs"):
        states = [env_state(envs)]
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
    After the first update it is only tried whether pickled environments do the same."""
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
            run.lock.save(iteration * run.steps, state)
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
    failures = broadcast(run.lock.failures if rank() == 0 else 0)
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
