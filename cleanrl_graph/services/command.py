"""cleanrl_graph, a script from its command line to the table of its evaluation."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym

from cleanrl_graph.envs.fitting import SAID
from cleanrl_graph.services import (
    check,
    demos,
    eval_every,
    evaluate,
    policy,
    process,
    runs,
    vector,
)
from cleanrl_graph.services.arguments import args_of, given_in, parse
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.checkpoint import all_ranks, rank, world_size
from cleanrl_graph.services.workers import WorkerEnvs

VERSION = 2  # of the names that services need of a script
NAMES = (
    "Args UsageError STEP Envs Step Agent Memory Run make_env leaves_of arrays_of parts_of "
    "group_of acting_group seed start train play"
).split()


def main(script: ModuleType, version: int) -> None:
    """Runs the script by the flags of the command line. What is wrong is a sentence; the exit code
    is 1, and 130 or 143 after a signal."""
    missing = [name for name in NAMES if not hasattr(script, name)]
    if missing or version != VERSION:
        sys.exit(
            f"{script.__file__} is for services of version {version}, these have version {VERSION};"
            f" it lacks {' '.join(missing) or 'nothing'}. Install the version of cleanrl_graph "
            "that it comes from, or copy the script into a folder of its own and uninstall it"
        )
    folder = Path(script.__file__).resolve().parent
    if sys.path[0] == str(folder) and (folder / "__init__.py").exists():
        del sys.path[0]  # the package's: its `envs` would hide the user's
    sys.path.append(os.getcwd())  # where --env-id and --wrap find the user's modules
    words = sys.argv[1:]
    args = parse(script, words)
    try:
        run(script, args, args.save_model, given_in(words))
    except (UsageError, gym.error.Error, OSError) as problem:
        sys.exit(str(problem))
    if rank() > 0:  # at once: threads of torch.distributed may abort a process that ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run(
    script: ModuleType, args: Any, save_model: bool = True, given: Iterable[str] = (), **more
) -> list[dict]:
    """Trains, saves model.pt and evaluates by the script's Args, and by `more` flags of the
    services. Returns the rows of the evaluation's table; none on ranks above 0. Flags that are
    `given`, as all of `more` are, are not taken from the file of load_model."""
    args = args_of(script, **vars(args) | more | {"save_model": save_model})
    process.tune()
    SAID.lines.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(check.one_kind(script))
        stack.enter_context(runs.ranks())
        if args.load_model:
            policy.take_flags(args, {*given, *more})
        elif args.load_matching:
            raise UsageError("--load-matching needs a file: give --load-model FILE")
        check.refuse(check.wrong_flags(args))
        check.refuse(eval_every.wrong_flags(args))
        is_vector = vector.is_vector(args)
        if is_vector:
            check.refuse(vector.wrong_flags(script, args))
        make = partial(check.make_env, script)
        Envs = check.checked(script)
        if getattr(args, "record", None):
            demos.record_file(Envs, make, args)
            return []
        if getattr(args, "demos", None):
            with contextlib.closing(Envs([partial(make, args)], args)) as probe:
                demos.check(args.demos, probe)
        if not vector.has_function(args):  # which makes no single environment
            evaluate.check(make, args)  # what cannot be evaluated is an error now
            compare_entries(Envs, make, args)
        if not hasattr(script, "Collector"):  # which forks a process first
            script.start(args)
        run = type("Run", (runs.Services, script.Run), {"script": script})(args, stack)
        script.seed(args)
        envs = stack.enter_context(contextlib.closing(envs_of(script, args)))
        if world_size() > 1 and not is_vector:
            check.refuse(check.unlike(all_ranks(envs.meaning)))
        try:
            agent = script.train(args, run, envs)
        except eval_every.Reached:  # --stop-at
            agent = run.trained[0]
            runs.part()
        if rank() > 0:
            return []
        if args.save_model and args.total_timesteps:
            run.save_model(agent)
        run.bar.close()
        run.signals.append(0)  # as if one had come: the next one ends the process at once

        def play(makers: list, greedy: bool) -> list[dict]:
            return run.play(agent, makers, args, greedy)

        rows = evaluate.evaluate(run, play, make)
        run.tell()
        return rows


def compare_entries(Envs: type, make: Callable, args: Any) -> None:
    """UsageError for unlike entries of --env-kwargs where not all are trained with: all are
    played."""
    num_tasks = len(check.entries(args))
    if num_tasks > args.num_envs * world_size():
        Envs([partial(make, args, k) for k in range(num_tasks)], args).close()


def envs_of(script: ModuleType, args: Any) -> Any:
    """The environments of this rank, in worker processes if --num-workers says so; for a script
    that has one its Collector."""
    first = rank() * args.num_envs
    if vector.is_vector(args):
        return vector.VectorEnvs(script, vector.make(args), args, first)
    plain = SimpleNamespace(**vars(args))  # can be pickled
    makers = [partial(check.make_env, script, plain, first + i) for i in range(args.num_envs)]
    make_envs = partial(check.make_envs, script, plain)
    if args.num_workers:
        make_envs = partial(WorkerEnvs, make_envs, args=plain)
    make_envs = partial(make_envs, makers, first=first)
    if hasattr(script, "Collector"):
        return script.Collector(args, make_envs, process.accelerate)
    return make_envs()
