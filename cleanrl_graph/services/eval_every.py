"""cleanrl_graph, --eval-every: how the policy plays while it trains, the best one, and --stop-at.

An evaluation plays episodes to their end, greedily, on environments of its own that always begin
with the same seeds. Its random numbers are its own, too: the training is bit by bit that without
it. Nothing of it is in a checkpoint. A run that was killed while it was evaluated resumes before
the update, and evaluates again after it.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from cleanrl_graph.envs.fitting import say
from cleanrl_graph.services import evaluate, policy
from cleanrl_graph.services.check import UsageError, entries, make_env
from cleanrl_graph.services.checkpoint import random_state, set_random_state
from cleanrl_graph.services.csv_file import CsvFile, read
from cleanrl_graph.services.process import whole

COLUMNS = ("step", "seconds", "took", "return", "length")  # of evaluations.csv, then what there is
TIMES = ("step", "seconds", "took")
MEASURE = ("eval_suite", "eval_episodes", "eval_max_steps")  # flags by which returns compare


class Reached(Exception):
    """--stop-at: the update was the last one."""


def wrong_flags(args: Any) -> Iterator[str]:
    """Flags that need each other."""
    if args.stop_at is not None and not args.eval_every:
        yield f"--stop-at {args.stop_at:g} needs evaluations: give --eval-every N"
    if args.eval_every and not (args.eval_suite or args.eval_episodes):
        yield f"--eval-every {args.eval_every} plays nothing with --eval-episodes 0"


def score(row: dict) -> float:
    """What makes an evaluation the best one: its mean return, or that of sampled episodes if it is
    larger. They are played where a greedy one stood still."""
    return max(row["return"], row.get("sampled return", row["return"]))


@contextlib.contextmanager
def own_randomness(agent: torch.nn.Module) -> Iterator[None]:
    """Puts back the state of the global random generators, from which actions are drawn, too,
    meanwhile: the training may have a generator for them."""
    before = random_state()
    generator = getattr(agent.head, "generator", None)
    agent.head.generator = None
    try:
        yield
    finally:
        agent.head.generator = generator
        set_random_state(before)


class Evaluations:
    """Those of a run, on rank 0, which has evaluations.csv and best.pt."""

    def __init__(self, run: Any, agent: torch.nn.Module):
        self.run = run
        self.args = copy.copy(run.args)
        # The episodes after the training have others, on which no model was chosen
        self.args.seed = (self.args.seed + 10_000) % 2**32
        with own_randomness(agent):
            self.batches = list(self.all_batches())
        self.file = CsvFile(run.folder / "evaluations.csv", COLUMNS)
        self.file.keep(run.global_step)
        self.path = run.folder / "best.pt"
        self.best = self.saved_best()

    def all_batches(self) -> Iterator[list[Callable]]:
        """What makes the environments that are played side by side."""
        make = partial(make_env, self.run.script, self.args)
        if self.args.eval_suite:
            for batch in evaluate.batches(make, evaluate.suite_entries(make, self.args)):
                yield [partial(make, **entry) for entry in batch]
        else:
            for k in range(len(entries(self.args))):
                yield [partial(make, k)] * self.args.eval_episodes

    def saved_best(self) -> dict | None:
        """What best.pt says about itself, if other episodes do not make it another measure."""
        if not self.path.exists():
            return None
        saved = policy.read_model(str(self.path))
        for name in MEASURE:
            now = getattr(self.args, name)
            if saved["args"].get(name) != now:
                flag = f"--{name.replace('_', '-')}"
                say(f"{flag} {now}: best.pt, by {saved['args'].get(name)}, begins anew")
                return None
        return saved["evaluation"]

    def has_ended(self) -> bool:
        """Whether the steps so far have reached --stop-at."""
        if self.args.stop_at is None or self.best is None:
            return False
        is_past = self.best["step"] <= self.run.global_step  # not of a step that comes again
        return is_past and score(self.best) >= self.args.stop_at

    def evaluate(self, agent: torch.nn.Module) -> bool:
        """Plays, logs, and keeps the model if it is the best so far. Returns whether it has reached
        --stop-at."""
        run = self.run
        if not all(param.isfinite().all() for param in agent.parameters()):
            return False  # the next update says so
        began = time.monotonic()
        try:
            with own_randomness(agent):
                run.script.seed(self.args)
                row = self.means(agent)
        except UsageError as problem:
            raise UsageError(f"{problem} (in the evaluation at step {run.global_step})") from None
        for name, value in row.items():
            run.writer.add_scalar(f"eval/{name}", value, run.global_step)
        seconds = run.seconds + run.bar.format_dict["elapsed"]
        took = time.monotonic() - began
        row = {"step": run.global_step, "seconds": round(seconds - took, 2)} | row
        if self.best is None or score(row) > score(self.best):
            self.best = row
            with whole(self.path) as unfinished:
                torch.save(run.model_of(agent) | {"evaluation": row}, unfinished)
        took = time.monotonic() - began
        run.bar.start_t += took  # which is no time of training
        self.file.write([row | {"took": round(took, 2)}])
        has_reached = self.args.stop_at is not None and score(row) >= self.args.stop_at
        if has_reached:
            value = f"{score(row):.5g} at step {run.global_step:,}"
            say(f"--stop-at {self.args.stop_at:g}: the training ends with a return of {value}")
        return has_reached

    def means(self, agent: torch.nn.Module) -> dict[str, float]:
        """Of greedy episodes and, with names of their own, of sampled ones from the same starts if
        one of the greedy ones did not end. An episode has at most ten times the steps of the
        longest one of the training; before one has ended, of the steps so far."""
        run = self.run
        longest = run.longest or run.iteration * run.args.num_steps
        self.args.eval_max_steps = min(run.args.eval_max_steps, 10 * longest)
        row = {}
        for greedy, kind in ((True, ""), (False, "sampled ")):
            infos = []
            for makers in self.batches:
                infos += run.play(agent, makers, self.args, greedy)
            row |= means_of(infos, kind)
            if not any("cut" in info for info in infos):
                break
        self.args.eval_max_steps = run.args.eval_max_steps
        return row

    def tell(self) -> Iterator[str]:
        """The last lines: the best, the last, and the time that all took."""
        rows = [row for row in read(self.file.path) if row["took"]]
        if not rows or self.best is None:
            return
        last = {name: float(value) for name, value in rows[-1].items() if value}
        texts = []
        for row in (self.best, last):
            texts.append(f"{score(row):.5g} at step {row['step']:,.0f}")
        seconds = sum(float(row["took"]) for row in rows)
        share = seconds / max(seconds + last["seconds"], 1e-9)
        yield (
            f"return of the best evaluation of {len(rows)}, best.pt: {texts[0]}; of the last: "
            f"{texts[1]}. They took {seconds:.3g} s, {share:.0%} of the time"
        )


def means_of(infos: list[dict], kind: str = "") -> dict[str, float]:
    """Means over episodes, with names of this kind: return and length; the gap of the cost to
    info["eval"]["best_known"] in percent, where it is known; how many were cut; and each number of
    info["eval"] and info["metrics"]."""
    values = {}
    for info in infos:
        report = info.get("eval", {}) | info.get("metrics", {})
        own = {"return": info["episode"]["r"], "length": info["episode"]["l"]}
        own["gap"] = evaluate.gap(evaluate.cost(info), report.get("best_known"))
        for name, value in report.items():
            if name not in evaluate.NAMES and name not in TIMES:
                own.setdefault(name, value)
        for name, value in own.items():
            if isinstance(value, Real) and np.isfinite(value):
                values.setdefault(name, []).append(float(value))
    row = {f"{kind}{name}": float(np.mean(numbers)) for name, numbers in values.items()}
    num_cut = sum("cut" in info for info in infos)
    return row | ({f"{kind}cut": num_cut} if num_cut else {})
