"""cleanrl_graph, --num-workers: environments that are stepped by other processes.

`WorkerEnvs` has the methods of a script's `Envs`, and each of its processes runs such an `Envs` on
a share of the environments. Observations travel as they are, flat and without padding; a worker
does nothing but answer requests.
"""

import contextlib
import ctypes
import multiprocessing as mp
import os
import random
import signal
from typing import Any, Callable, Iterable

import numpy as np
import torch


def obey(parent: int) -> None:
    """Signals to the whole group are the parent's, which needs its workers for the last checkpoint:
    after SIGTERM they have 10 minutes. When the parent dies Linux sends SIGUSR1, so that a worker
    leaves whose environment hangs, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(600))
    with contextlib.suppress(AttributeError, OSError, TypeError):
        signal.signal(signal.SIGUSR1, lambda *_: os.getppid() == parent or signal.alarm(5))
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)


def work(
    pipe,
    inherited: list,
    seed: int,
    Envs: type,
    makers: list[Callable],
    action_head: str,
    first: int,
) -> None:
    """A worker process: answers (function or name of a method of Envs, *arguments) until None comes
    or the parent is gone. That can be seen only if nobody holds the parent's ends of the pipes."""
    for other in inherited:
        other.close()
    obey(mp.parent_process().pid)
    for generator in (
        random.seed,
        np.random.seed,
        torch.manual_seed,
    ):  # environments may draw from the global ones
        generator(seed)
    with contextlib.suppress(OSError, EOFError):
        try:
            with contextlib.closing(Envs(makers, action_head, first)) as envs:
                while request := pipe.recv():
                    method, *args = request
                    pipe.send(
                        getattr(envs, method)(*args)
                        if isinstance(method, str)
                        else method(envs, *args)
                    )
        except Exception as error:
            pipe.send(error)


class WorkerEnvs:
    """N environments spread over --num-workers processes. What a worker raises is raised here;
    ChildProcessError for one that died or did not answer within --env-timeout."""

    def __init__(self, Envs: type, makers: list[Callable], args: Any, first_env: int):
        tasks = len(args.env_kwargs) if isinstance(args.env_kwargs, list) else 1
        with contextlib.closing(Envs(makers[:tasks], args.action_head, first_env)) as probe:
            probe.reset()  # one of each entry of --env-kwargs: do they fit together?
            self.leaves, self.action_space = probe.leaves, probe.action_space
        fork = "fork" in mp.get_all_start_methods()
        context, self.num_steps, self.workers = mp.get_context("fork" if fork else "spawn"), 0, []
        self.timeout = args.env_timeout or None
        for idx in np.array_split(np.arange(len(makers)), min(args.num_workers, len(makers))):
            span, (pipe, child) = slice(int(idx[0]), int(idx[-1]) + 1), context.Pipe()
            inherited = [pipe, *(other for _, other, _ in self.workers)] if fork else []
            process = context.Process(
                target=work,
                daemon=True,
                args=(
                    child,
                    inherited,
                    (args.seed + first_env + span.start) % 2**32,
                    Envs,
                    makers[span],
                    args.action_head,
                    first_env + span.start,
                ),
            )
            process.start()
            child.close()
            self.workers.append((process, pipe, span))

    def ask(self, requests: Iterable[tuple]) -> list:
        """The answers to one request per worker, in the order of the environments."""
        answers = []
        for (_, pipe, _), request in zip(self.workers, requests):
            with contextlib.suppress(OSError):  # what happened is seen in the answer
                pipe.send(request)
        for process, pipe, span in self.workers:
            name = f"step {self.num_steps}: the worker of envs {span.start} to {span.stop - 1}"
            if not pipe.poll(self.timeout):
                process.kill()
                raise ChildProcessError(
                    f"{name} did not answer within --env-timeout {self.timeout:g} s"
                )
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionResetError):
                process.join()
                raise ChildProcessError(f"{name} died with exit code {process.exitcode}") from None
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
        return answers

    def reset(self, seed: int | None = None) -> tuple:
        return self.joined(("reset", seed) for _ in self.workers)

    def step(self, actions: list) -> tuple:
        self.num_steps += 1
        return self.joined(("step", actions[span]) for _, _, span in self.workers)

    def joined(self, requests: Iterable[tuple]) -> tuple:
        """The script's Step of all environments."""
        steps = self.ask(requests)
        obs, reward, terminated, truncated, final, episodes = zip(*steps)
        final = [flat for flat in final if flat is not None]
        return type(steps[0])(
            join(obs),
            *map(np.concatenate, (reward, terminated, truncated)),
            join(final) if final else None,
            sum(episodes, []),
        )

    def close(self) -> None:
        for _, pipe, _ in self.workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, pipe, _ in self.workers:
            process.join(timeout=5)
            process.kill()
            process.join()
            pipe.close()


def join(flats: list[tuple]) -> tuple:
    """The script's Flat of all observations of `flats`."""
    values, counts = zip(*flats)
    return type(flats[0])(
        [np.concatenate(arrays) for arrays in zip(*values)],
        {group: np.concatenate([num[group] for num in counts]) for group in counts[0]},
    )
