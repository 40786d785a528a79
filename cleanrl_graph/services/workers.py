"""cleanrl_graph, --num-workers: environments that are stepped by other processes.

`WorkerEnvs` has the methods of a script's `Envs`, and each of its processes runs such an `Envs` on
a share of the environments. Observations travel as they are, flat and without padding; a worker
does nothing but answer requests.
"""

import contextlib
import copyreg
import ctypes
import importlib
import multiprocessing as mp
import os
import random
import signal
import socket
import struct
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

from cleanrl_graph.services.check import entries

# where processes are spawned a script is handed over by its name
copyreg.pickle(ModuleType, lambda module: (importlib.import_module, (module.__name__,)))


def obey(parent: int) -> None:
    """Signals to the whole group are the parent's, which needs its workers for the last checkpoint:
    after SIGTERM they have 10 minutes. When the parent dies Linux sends SIGUSR1, so that a worker
    leaves whose environment hangs, too."""

    def leave_later(number: int, frame: Any) -> None:
        signal.alarm(600)

    def leave_without_parent(number: int, frame: Any) -> None:
        if os.getppid() != parent:  # a thread of the parent may have ended
            signal.alarm(5)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave_later)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # elsewhere than on Linux
        signal.signal(signal.SIGUSR1, leave_without_parent)
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)


def forget(pipe) -> None:
    """For a process that an environment forks: it is ended by signals as any other, and does not
    hold the worker's end of the pipe, by which the parent sees that a worker is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    pipe.close()


def work(pipe, inherited: list, seed: int, make_envs: Callable) -> None:
    """A worker process: answers each request by request(envs), until None comes or the parent is
    gone. Then reading raises EOFError, but only if no worker holds a parent's end of a pipe: those
    that it inherited by fork are closed first."""
    for other in inherited:
        other.close()
    obey(mp.parent_process().pid)
    mp.current_process().daemon = False  # a daemon must not start processes, as a simulator may
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=partial(forget, pipe))
    random.seed(seed)  # environments may draw from the global generators
    np.random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(OSError, EOFError):
        try:
            with contextlib.closing(make_envs()) as envs:
                request = pipe.recv()
                while request is not None:
                    pipe.send(request(envs))
                    request = pipe.recv()
        except Exception as error:
            pipe.send(error)


def set_timeout(pipe: Any, seconds: float) -> None:
    """Makes writing to this end of a pipe, and reading from it, raise BlockingIOError where the
    other end has not moved for so long."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, timeval)


class Worker(NamedTuple):
    process: mp.Process
    pipe: Any
    span: slice  # its environments


class WorkerEnvs:
    """N environments spread over --num-workers processes. What a worker raises is raised here;
    ChildProcessError for one that died or did not answer within --env-timeout."""

    def __init__(self, make_envs: Callable, makers: list[Callable], args: Any, first: int):
        """`make_envs(makers, first=number)` makes the Envs of a worker. `first` is the number of
        the first environment over all ranks."""
        each = makers[: len(entries(args))]  # do the entries of --env-kwargs fit together?
        with contextlib.closing(make_envs(each, first=first)) as probe:
            self.leaves = probe.leaves
            self.action_space = probe.action_space
            self.meaning = probe.meaning
        self.num_steps = 0
        self.first = first
        self.timeout = args.env_timeout or None
        self.workers: list[Worker] = []
        num_workers = min(args.num_workers, len(makers))
        for idx in np.array_split(np.arange(len(makers)), num_workers):
            span = slice(int(idx[0]), int(idx[-1]) + 1)
            number = first + span.start
            seed = (args.seed + number) % 2**32
            self.start(span, seed, partial(make_envs, makers[span], first=number))

    def start(self, span: slice, seed: int, make_envs: Callable) -> None:
        """Starts a worker for the environments `span`."""
        method = "fork" if "fork" in mp.get_all_start_methods() else "spawn"
        context = mp.get_context(method)
        pipe, child = context.Pipe()
        if self.timeout and os.name == "posix":
            set_timeout(pipe, self.timeout)
        inherited = [pipe] + [worker.pipe for worker in self.workers]
        arguments = (child, inherited if method == "fork" else [], seed, make_envs)
        process = context.Process(target=work, daemon=True, args=arguments)
        process.start()
        child.close()
        self.workers.append(Worker(process, pipe, span))

    def ask(self, requests: list[Callable]) -> list:
        """What request k(envs) returns in worker k, in the order of the environments."""
        for worker, request in zip(self.workers, requests):
            with contextlib.suppress(OSError):  # what happened is seen in the answer
                worker.pipe.send(request)
        return [self.answer(worker) for worker in self.workers]

    def answer(self, worker: Worker) -> Any:
        """What a worker sends, unless it is an error."""
        process, pipe, span = worker
        envs = f"envs {self.first + span.start} to {self.first + span.stop - 1}"
        name = f"step {self.num_steps}: the worker of {envs}"
        try:
            if not pipe.poll(self.timeout):
                raise BlockingIOError
            answer = pipe.recv()
        except BlockingIOError:  # nothing came, or half an answer
            process.kill()
            timeout = f"--env-timeout {self.timeout:g} s"
            raise ChildProcessError(f"{name} did not answer within {timeout}") from None
        except (EOFError, ConnectionResetError):
            process.join()
            raise ChildProcessError(f"{name} died with exit code {process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def reset(self, seed: int) -> tuple:
        return self.joined([methodcaller("reset", seed + own.span.start) for own in self.workers])

    def step(self, actions: list) -> tuple:
        self.num_steps += 1
        return self.joined([methodcaller("step", actions[own.span]) for own in self.workers])

    def joined(self, requests: list[Callable]) -> tuple:
        """The script's Step of all environments, from those that the requests return."""
        steps = self.ask(requests)
        finals = []
        numbered = {name: [] for name in ("infos", "cuts") if name in steps[0]._fields}
        for worker, step in zip(self.workers, steps):
            finals += step.finals
            for name, rows in numbered.items():
                rows += [(worker.span.start + i, *rest) for i, *rest in getattr(step, name)]
        nothing = {name: [] for name in numbered}
        step = joined([step._replace(finals=[], **nothing) for step in steps])
        return step._replace(finals=finals, **numbered)

    def close(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for process, pipe, _ in self.workers:
            process.join(timeout=5)
            process.kill()
            process.join()
            pipe.close()


def joined(trees: list) -> Any:
    """Arrays one after the other, in Flats, or in Steps whose lists are empty. What is no array is
    the same in all of them."""

    def join(first: Any, *others) -> Any:
        is_array = isinstance(first, np.ndarray)
        return np.concatenate([first, *others]) if is_array else first

    return tree_map(join, *trees)
