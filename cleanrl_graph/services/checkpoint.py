"""cleanrl_graph, exact resume: `--resume auto` goes on from a run's newest checkpoint, bit by bit.

The folder of a run has its newest two, checkpoint_STEP.ckpt, and a lock: no other process may write
there. A checkpoint is what torch.save writes, with pickles of the environments: it is for the user
who wrote it alone. An environment whose copy does not do what it does itself is named on stderr,
and begins a new episode when the run is resumed.
"""

import contextlib
import copy
import glob
import io
import os
import random
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.vector import VectorEnv, VectorWrapper
from torch.utils._pytree import tree_map_only

from cleanrl_graph.envs.fitting import say
from cleanrl_graph.services.arguments import FREE
from cleanrl_graph.services.check import LATEST, close, plain, put_back, settings
from cleanrl_graph.services.process import default_generator
from cleanrl_graph.services.workers import joined

FORMAT = "cleanrl_graph-checkpoint-5"
SAME = set(
    "script env_id env_kwargs wrap num_envs num_workers world_size obs_shifts action_shifts "
    "reward_shifts memory_length amsgrad".split()
)  # the saved environments, memory or optimizer fit no other values
GONE = {
    "readout": "meanmax",
    "image_views": "channels",
    "bf16": False,
    "forget_bias": 5.0,
    "state_readout": "mean",
    "max_rho": 1.0,
}  # flags of before -> the value that the scripts mean today
FIXED = set(
    "envs space action_space leaves first parts acting named meaning flat place num_steps "
    "looks masks settings".split()
)  # of Envs
COMPARED = ("observation", "info['rewards']", "reward", "terminated", "truncated")
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
    """The state that `Folder.save` wrote. ValueError, or what zipfile and unpickling raise, for a
    file that is something else."""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()  # torch.load does not look at the checksums
    state = {} if damaged else torch.load(path, map_location="cpu", weights_only=False)
    if state.get("format") != FORMAT:
        raise ValueError("it is of another version, damaged or something else")
    return state


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

    def _write(self, data: bytes | memoryview) -> None:
        with open(self.unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def save(self, step: int, state: dict) -> None:
        """Writes a checkpoint, whole or not at all, and keeps the newest two. Those of later steps,
        of a future that this run does not have, get the ending ".unused". SystemExit if it cannot
        be written."""
        path = self.folder / f"checkpoint_{step:012d}.ckpt"
        file = io.BytesIO()
        torch.save(state | {"format": FORMAT}, file)
        try:
            self._write(file.getbuffer())
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
def random_state() -> dict:
    """The state of the global random generators, CUDA's only where this process uses CUDA."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict) -> None:
    """Puts back what `random_state` returned, CUDA's only if the number of devices is the same."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.as_tensor(state["torch"]))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


class Compared:
    """An environment with a copy that makes the same calls, to see whether it does the same: the
    next 16, or fewer if an episode ends, with the reset after it. Then `step` and `reset` are those
    of the environment itself.

    The copy lives in the same process: what an environment shares with its copies, a class's or a
    module's numbers or the handle of a simulator, is theirs, too. Its class says so by
    `exact_resume = False`: then it begins new episodes, and no copy is made. With True copies are
    trusted. Neither the copy nor its steps change the global random generators."""

    def __init__(self, env: gym.Env | VectorEnv):
        super().__init__(env)
        exact = getattr(env.unwrapped, "exact_resume", None)
        self._problem = "its exact_resume is False" if exact is False else None
        self._num_left = 16  # calls that are still compared
        if exact is not None:
            return
        data = self._pickled()
        with kept_random_state():
            self._copy = self._tried("load", lambda: cloudpickle.loads(data))
        if not self._problem:
            self.step = partial(self._both, "step")
            self.reset = partial(self._both, "reset")

    def _pickled(self) -> bytes | None:
        """None where it begins a new episode."""
        if self._problem:
            return None
        with kept_random_state():
            try:
                return cloudpickle.dumps(self.env)
            except Exception as error:  # of many kinds
                self._problem = f"no copy can be made of it: {type(error).__name__}: {error}"

    def _tried(self, doing: str, call: Any) -> Any:
        """What the call of a copy returns, None if it fails."""
        if self._problem:
            return None
        try:
            return call()
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            self._problem = f"a copy fails in the next {doing}: {text}"

    def _both(self, method: str, *args, **kwargs) -> tuple:
        """What the environment returns, after its copy has made the same call."""
        its_args, its_kwargs = copy.deepcopy((args, kwargs))  # an environment may write to them
        before = random_state()
        mode = settings()  # an environment may set a device, on which no random state is read
        results = getattr(self.env, method)(*args, **kwargs)
        put_back(mode)
        expected = compared(results)
        latest = LATEST.env
        with kept_random_state():
            set_random_state(before)
            call = lambda: compared(getattr(self._copy, method)(*its_args, **its_kwargs))
            found = self._tried(method, call)
            put_back(mode)
        LATEST.env = latest  # a copy, which makes the same call, is not the one that was called
        if not self._problem:
            differ = [name for name, a, b in zip(COMPARED, found, expected) if a != b]
            if differ:
                names = " and ".join(differ)
                self._problem = f"a copy returns another {names} in the next {method}"
        self._num_left -= 1
        if method == "reset" or self._num_left == 0 or self._problem:
            self._copy = None
            self.step = self.env.step
            self.reset = self.env.reset
        return results

    def _dump(self) -> tuple[str, bytes | None, str | None]:
        """(kind of environment, its pickle, why it begins a new episode in a run that resumes)"""
        kind = getattr(self.env.spec, "id", type(self.unwrapped).__name__)
        data = self._pickled()
        return kind, data, self._problem


class Twin(Compared, gym.Wrapper):
    """That of a single environment."""


class VectorTwin(Compared, VectorWrapper):
    """That of a VectorEnv."""


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Puts back the state of the global random generators."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def compared(results: tuple) -> list:
    """What `reset` or `step` returned, as it is compared, in the order of COMPARED."""
    obs, *outcome, info = results
    return bits([obs, info.get("rewards") if info else None, *outcome])


def bits(value: Any) -> Any:
    """Nested values as what == compares bit by bit: dtypes and shapes count, and NaN is NaN."""
    if isinstance(value, (tuple, list)):
        return [bits(child) for child in value]
    if isinstance(value, dict):
        return {k: bits(child) for k, child in value.items()}
    if hasattr(value, "num_rows"):  # a FlatBatch, whose observations have different sizes
        return bits([value.rows, value.num_rows, value.num_edges])
    array = np.asarray(value)
    if array.dtype.hasobject:
        return repr(array.tolist())
    return array.dtype, array.shape, array.tobytes()


def dump_envs(envs: list[gym.Env]) -> list[tuple]:
    """A Twin's dump of each environment. The first call puts a Twin in its place."""
    for i, env in enumerate(envs):
        if not isinstance(env, Twin):
            envs[i] = Twin(env)
    return [env._dump() for env in envs]


def exact_dumps(dumps: list[tuple]) -> list[bytes | None]:
    """The pickle of each environment. It is None for all environments of a kind if one of them has
    a problem, which stderr says once for each kind."""
    for kind, _, problem in dumps:
        if problem and kind not in inexact:
            inexact.add(kind)
            when = "it begins a new episode when the run is resumed"
            print(f"{kind}: {when}, since {problem}", file=sys.stderr)
    return [None if kind in inexact else data for kind, data, _ in dumps]


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
            envs.envs[i] = cloudpickle.loads(data)
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
    states = envs.ask(repeat(env_state)) if hasattr(envs, "meaning") else []  # no Collector
    dumps = iter(exact_dumps(sum([state["envs"] for state in states], [])))
    for state in states:
        state["envs"] = [next(dumps) for _ in state["envs"]]
    arrays = {k: v for k, v in step._asdict().items() if isinstance(v, np.ndarray)}
    remembered = memory.state() if hasattr(memory, "state") else None
    generator = getattr(memory.agent.head, "generator", None)  # a copy of a script may lack it
    return {
        "envs": states,
        "vector": envs.state() if hasattr(envs, "take_skipped") else None,  # of a VectorEnv
        "generator": generator and generator.get_state(),
        "step": arrays,  # without the observations, which the environments' rows are
        "minibatches": rng.bit_generator.state,
        "random": random_state(),
        # a rank need not have the others' devices
        "memory": tree_map_only(torch.Tensor, torch.Tensor.cpu, remembered),
    }


def save(run: Any, step: tuple, is_kept: bool) -> None:
    """Writes a checkpoint if it is to be kept. The environments are pickled in any case: the first
    call, after the first update, names those of which no copy can be made."""
    agent, optimizer, memory, envs, rng = run.trained
    ranks = all_ranks(state_of(envs, rng, memory, step))
    if is_kept and rank() == 0:
        run.writer.flush()
        state = {
            "script": run.name,
            "args": run.flags,
            "num_envs": run.args.num_envs,  # another one than in args where ranks came or went
            "global_step": run.global_step,
            "num_skipped": run.num_skipped,
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
        restore_generator(agent, None)
        return envs.reset((seed + rank() * run.args.num_envs) % 2**32)
    mine = run.saved["ranks"][rank()]
    vector = mine.get("vector")
    if vector and vector["env"] and hasattr(envs, "take_skipped") and not failures:
        obs = envs.restore(vector)
        step = run.script.Step(obs=obs, finals=[], infos=[], **mine["step"])
    elif not mine["envs"] or not hasattr(envs, "ask"):  # --vectorization-mode was another, too
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
    restore_generator(agent, mine.get("generator"))
    return step


def restore_generator(agent: torch.nn.Module, state: torch.Tensor | None) -> None:
    """Puts back the state of the generator that draws the actions. Before there was one, torch's
    drew them: without a state, or with one of another device, it goes on from torch's."""
    generator = getattr(agent.head, "generator", None)
    if generator is None:
        return
    present = default_generator(generator.device).get_state()
    same = state is not None and state.shape == present.shape
    generator.set_state(state if same else present)
