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
import subprocess
import sys
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from cleanrl_graph.envs.fitting import say
from cleanrl_graph.services import trial
from cleanrl_graph.services.check import close, plain
from cleanrl_graph.services.trial import noted, random_state, set_random_state
from cleanrl_graph.services.workers import joined

FORMAT = "cleanrl_graph-checkpoint-4"
SAME = set(
    "script env_id env_kwargs wrap num_envs num_workers world_size obs_shifts action_shifts "
    "reward_shifts memory_length amsgrad".split()
)  # the saved environments, memory or optimizer fit no other values
FREE = set(
    "run_dir track wandb_project_name wandb_entity capture_video save_model load_model "
    "checkpoint_every checkpoint_minutes resume eval_suite eval_episodes eval_samples "
    "eval_max_steps env_timeout vectorization_mode cuda exp_name num_iterations".split()
)  # all others shape the training
GONE = {
    "readout": "meanmax",
    "image_views": "channels",
    "bf16": False,
    "forget_bias": 5.0,
    "state_readout": "mean",
    "max_rho": 1.0,
}  # flags of before -> the value that the scripts mean today
FIXED = set(
    "envs space action_space leaves first parts acting named meaning flat place num_steps".split()
)  # of Envs
load_env = cloudpickle.loads  # of what dump_envs returned
inexact = set()  # kinds of environments whose copies do not go on as they do


# ---- Finding a checkpoint ----
def checkpoints_in(folder: str | Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    return sorted(Path(folder).glob("checkpoint_*.ckpt"), reverse=True)


def find(args: Any, script: str, prefix: str) -> tuple[str, dict] | None:
    """(folder, state) of the newest whole checkpoint that `args.resume` names; None for "auto" if
    there is none. What cannot be read is said and left out for the one before it. SystemExit if
    there is none, or for flags that do not fit."""
    paths = candidates(args, prefix)
    if paths is None:
        absent = f"no checkpoint of {prefix}* in {args.run_dir}"
        say(f"--resume auto: {absent}, starting anew")
        return None
    for path in paths:
        try:
            state = read(path)
        except Exception as error:  # of many kinds
            say(f"--resume: {path} is left out: {type(error).__name__}: {error}")
        else:
            compare(args, script, path, state)
            num_envs = state.get("num_envs", state["args"]["num_envs"])
            share(args, len(state["ranks"]), num_envs)
            print(f"--resume {args.resume}: goes on from {path}")
            return str(path.parent), state
    raise SystemExit(f"--resume {args.resume}: there is no checkpoint that can be read")


def candidates(args: Any, prefix: str) -> list[Path] | None:
    """What `args.resume` names, the newest first: a file and those before it, or the checkpoints of
    a folder; "auto": of the folder `prefix*` in `args.run_dir` that was written last, None if there
    is none. SystemExit for anything else."""
    if args.resume == "auto":
        found = Path(args.run_dir).glob(f"{glob.escape(prefix)}*/checkpoint_*.ckpt")
        newest = max(found, key=os.path.getmtime, default=None)
        return newest and checkpoints_in(newest.parent)
    path = Path(args.resume)
    paths = checkpoints_in(path)
    if path.is_file() and path.match("checkpoint_*"):
        paths = [other for other in checkpoints_in(path.parent) if other <= path]
    if not paths:
        needed = "auto, a folder with checkpoints or a checkpoint_*.ckpt is needed"
        raise SystemExit(f"--resume {path}: {needed}")
    return paths


def read(path: str | Path) -> dict:
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


def compare(args: Any, script: str, path: Path, state: dict) -> None:
    """Compares the flags with those of the run in `state`. SystemExit if one of SAME differs or,
    with --resume auto, any that is not in FREE, but for --total-timesteps. Prints the others that
    differ."""
    saved = of_today(state["args"], vars(args))
    then = {**saved, "script": state["script"], "world_size": len(state["ranks"])}
    now = {**plain(vars(args)), "script": script, "world_size": world_size()}
    free = FREE
    if now["world_size"] != then["world_size"]:
        free = FREE | set("world_size num_envs num_workers".split())
    changed = {}
    for name in now | then:
        if name not in free and now.get(name) != then.get(name):
            flag = f"--{name.replace('_', '-')}"
            changed[name] = f"{flag} {now.get(name)}, it was {then.get(name)}"
    refused = changed.keys() & SAME
    advice = "Give the same, or another --exp-name to start anew"
    if args.resume == "auto":
        if not refused:
            advice += f", or --resume {path.parent} to go on with these"
        refused = changed.keys() - {"total_timesteps"}
    if refused:
        texts = "; ".join(text for name, text in changed.items() if name in refused)
        raise SystemExit(
            f"--resume {args.resume}: {path} is of a run with other flags: {texts}. {advice}"
        )
    for text in changed.values():
        say(f"--resume: {text}")


def of_today(flags: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The flags of a file without those that its script does not have any more, if they have the
    value that it means today; `known` are those of the script."""
    kept = {}
    for name, value in flags.items():
        if name in known or (name, value) not in GONE.items():
            kept[name] = value
    return kept


def share(args: Any, num_ranks: int, num_envs: int) -> None:
    """Shares out the environments that `num_ranks` had, each `num_envs`, and says so where there
    are others."""
    before = num_ranks * num_envs
    if before % world_size() == 0:
        args.num_envs = before // world_size()
    if num_ranks != world_size():
        now = f"ranks x environments are {world_size()} x {args.num_envs}"
        then = f"they were {num_ranks} x {num_envs}"
        say(f"--resume: {now}, {then}; all begin new episodes")


# ---- The folder of a run ----
class Folder(contextlib.AbstractContextManager):
    """`with Folder(path) as folder`: the folder of a run, which no other process writes to
    meanwhile. SystemExit if it cannot be made or written to, or if another process has it. An
    exception that ends the block leaves a line in the file "failed", which the next checkpoint
    removes; `failures` is the number of lines that were there at the start."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.mark = self.folder / "failed"
        self.unfinished = self.folder / "unfinished.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.folder / "lock", "wb")
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
        path = self.folder / f"checkpoint_{step:012d}.ckpt"
        file = io.BytesIO()
        torch.save(state, file)
        data = file.getbuffer()
        header = f"{FORMAT} {hashlib.sha256(data).hexdigest()}\n"
        try:
            self._write(header.encode(), data)
            for other in checkpoints_in(self.folder):
                if other > path:
                    other.rename(f"{other}.unused")
            os.replace(self.unfinished, path)
            for old in checkpoints_in(self.folder)[2:]:
                old.unlink()
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
    """What `restore_envs` continues a script's Envs from, in the process that steps them."""
    own = {name: value for name, value in vars(envs).items() if name not in FIXED}
    num_steps = envs.envs[0].get_wrapper_attr("num_steps")
    dumps = dump_envs(envs.envs)
    return {"own": own, "num_steps": num_steps, "envs": dumps, "random": random_state()}


def restore_envs(state: dict, seed: int, envs: Any) -> tuple[tuple, np.ndarray]:
    """(the Flat of the environments that were saved, bool [N] where an episode begins). One without
    a pickle begins a new one."""
    vars(envs).update(state["own"])
    begins = np.zeros(len(envs.envs), bool)
    for i, data in enumerate(state["envs"]):
        if data is not None:
            close(envs.envs[i])
            envs.envs[i] = load_env(data)
        else:
            envs.envs[i].num_steps = state["num_steps"]
            obs, _ = envs.envs[i].reset(seed=(seed + envs.first + i) % 2**32)
            envs.rows[i] = envs.read(obs)
            if hasattr(envs, "returns"):  # of agents
                envs.returns[i].clear()
            begins[i] = True
    set_random_state(state["random"])
    return envs.collate(envs.rows), begins


# ---- Ranks ----
def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def all_ranks(value: Any) -> list:
    """The value of every rank, on every rank."""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


# ---- The state of a run ----
def state_of(envs: Any, rng: np.random.Generator, memory: Any, step: tuple) -> dict:
    """What one rank has: its environments, where they can be asked, and what they returned last,
    random states and memory."""
    is_collector = not hasattr(envs, "meaning")  # which cannot be asked
    states = [] if is_collector else envs.ask(repeat(env_state))
    dumps = iter(exact_dumps(sum([state["envs"] for state in states], [])))
    for state in states:
        state["envs"] = [next(dumps) for _ in state["envs"]]
    arrays = {k: v for k, v in step._asdict().items() if isinstance(v, np.ndarray)}
    remembered = memory.state() if hasattr(memory, "state") else None
    return {
        "envs": states,
        "step": arrays,  # without the observations, which the environments' rows are
        "minibatches": rng.bit_generator.state,
        "random": random_state(),
        # a rank need not have the others' devices
        "memory": tree_map_only(torch.Tensor, torch.Tensor.cpu, remembered),
    }


def save(run: Any, step: tuple, is_kept: bool) -> None:
    """Writes a checkpoint if it is to be kept. The environments are pickled in any case: when the
    next one is due, trial.py tries these copies."""
    agent, optimizer, memory, envs, rng = run.trained
    ranks = all_ranks(state_of(envs, rng, memory, step))
    if is_kept and rank() == 0:
        run.writer.flush()
        state = {
            "script": run.name,
            "args": run.flags,
            "num_envs": run.args.num_envs,  # another one than in args where ranks came or went
            "global_step": run.global_step,
            "std_floor": run.std_floor,
            "model": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ranks": ranks,
        }
        run.locked_folder.save(run.global_step, state)


def restore(run: Any, failures: int) -> tuple:
    """The last Step of a rank; what `save` wrote is put back. After `failures` exceptions all
    environments begin new episodes, with other seeds, lest the same exception comes again.
    SystemExit if the network is another."""
    agent, optimizer, memory, envs, rng = run.trained
    try:
        agent.load_state_dict(run.saved["model"])
        optimizer.load_state_dict(run.saved["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise SystemExit(
            f"--resume: the network of the checkpoint is not that of the flags: {error}"
        ) from None
    for group in optimizer.param_groups:
        group["lr"] = run.args.learning_rate  # another one may have been given
    run.std_floor = run.saved["std_floor"]
    seed = run.args.seed + 1_000_003 * (run.first + failures + 1)
    if len(run.saved["ranks"]) != world_size():
        torch.manual_seed(seed + rank())
        return envs.reset((seed + rank() * run.args.num_envs) % 2**32)
    mine = run.saved["ranks"][rank()]
    if not mine["envs"] or not hasattr(envs, "ask"):  # a VectorEnv begins anew
        say("--resume: the environments begin new episodes")
        step = envs.reset(seed % 2**32)
    else:
        if failures:
            for state in mine["envs"]:
                state["envs"] = [None] * len(state["envs"])
        envs.num_steps = mine["envs"][0]["num_steps"]
        restores = [partial(restore_envs, state, seed) for state in mine["envs"]]
        flats, begins = zip(*envs.ask(restores))
        begins = np.concatenate(begins)
        arrays = mine["step"]
        arrays["reward"][begins] = 0
        arrays["terminated"][begins] = True
        arrays["truncated"][begins] = False
        step = run.script.Step(obs=joined(flats), finals=[], infos=[], **arrays)
    if mine["memory"] is not None:
        memory.restore(mine["memory"])
    rng.bit_generator.state = mine["minibatches"]
    set_random_state(mine["random"])
    return step
