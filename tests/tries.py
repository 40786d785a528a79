"""Hostile environments, faults, files and flags: each of the tries in hostile.py, and its result.

    python tests/tries.py --out benchmark/results/reliability

Each is a process of its own (forked, which saves the imports) that runs a script on a few steps.
`trains`: it ends well, the policy was shown what the environment returned, bit by bit and until the
end, the environment received actions of its space, and what training computes is what collection
computed. `sentence`: it ends with one that says what is wrong. All else is a failure: `silent`,
wrong with exit code 0; `hang`; `traceback`, an exception of our own code; `other`, another sentence
than the expected one. Exit code 1 if there is one."""

import argparse
import contextlib
import copy
import csv
import importlib
import json
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark"), str(Path(__file__).parent)]

import hostile  # noqa: E402
import numpy as np  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from cleanrl_graph import services  # noqa: E402

FORK = mp.get_context("fork")
RESULTS = ("trains", "sentence", "silent", "hang", "traceback", "other")
SMALL = (
    "--env-id hostile:Hostile-v0 --num-envs 2 --num-steps 8 --total-timesteps 48 --hidden-dims 16 "
    "--gnn-dim 8 --gnn-layers 1 --num-minibatches 2 --update-epochs 1 --eval-episodes 1 "
    "--checkpoint-every 0 --no-cuda"
)
SMALLER = {
    "ppo_framestack": "--obs-shifts=-3:0 --action-shifts=-2:-1 --reward-shifts=-2:-1",
    "ppo_lstm_sparse": "--lstm-dim 8 --prev-reward",
    "ppo_gtrxl": "--dim 8 --num-heads 2 --memory-length 5 --prev-reward",
}
AGAIN = ("ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl")  # have every third try of these kinds:
KINDS_AGAIN = ("actions", "observations", "returns", "raises")


class Row(NamedTuple):
    """A line of the table."""

    kind: str
    name: str
    script: str
    expected: str
    result: str
    message: str


# ---- What a script is shown, and what it logs ----
class Witness:
    """Notes what the memory of a script is shown and what its log is."""

    def __init__(self, module):
        self.steps = []  # (Step, a copy of it)
        self.mismatches = []
        self.leaves = None
        act = module.Memory.act
        end_update = module.Run.end_update

        def noted_act(memory, step, greedy=False):
            if not greedy:
                self.leaves = memory.storage.leaves
                self.steps.append((step, copy.deepcopy(step)))
            return act(memory, step, greedy)

        def noted_update(run, global_step, step, scalars, episodes):
            self.mismatches.append(float(scalars["debug/collection_mismatch"]))
            return end_update(run, global_step, step, scalars, episodes)

        module.Memory.act = noted_act
        module.Run.end_update = noted_update

    def problem(self) -> str | None:
        """What the script was not shown as the environments returned it, if anything."""
        if max(self.mismatches, default=0) > 1e-3:
            return f"training and collection differ by {max(self.mismatches)}"
        return unlike_noted(self.leaves, self.steps)


def unlike_noted(leaves: list, steps: list[tuple]) -> str | None:
    """What of (Step, a copy of it) is not what the environments noted, if anything."""
    shown = [hostile.read_notes(f"shown_{i}") for i in range(2)]
    for t, (step, before) in enumerate(steps):
        for i, notes in enumerate(shown):
            problem = differs(leaves, before, i, *notes[t])
            if problem:
                return f"step {t}, env {i}: {problem}"
        for array, earlier in zip(step.obs.values, before.obs.values):
            if not np.array_equal(array, earlier):
                return f"step {t}: what was stored was changed later"
    return None


def differs(leaves, step, i: int, arrays: dict | None, outcome: tuple | None) -> str | None:
    """How env i of a Step is not what it noted."""
    if arrays is None:
        return "the observation could not be noted"
    for leaf, values in zip(leaves, step.obs.values):
        rows = values
        if leaf.group:
            ends = step.obs.counts[leaf.group].cumsum()
            rows = np.split(values, ends[:-1])
        got = rows[i]
        expected = arrays[leaf.path]
        if leaf.dtype.kind == "f":
            expected = np.asarray(expected, leaf.dtype)
        if got.dtype != leaf.dtype or got.squeeze().tolist() != expected.squeeze().tolist():
            return f"{leaf.path} is {got.tolist()}, the environment returned {expected}"
    if outcome:
        got = step.reward[i], step.terminated[i], step.truncated[i]
        reward, terminated, truncated = outcome
        expected = np.float32(reward), terminated, truncated and not terminated
        if got != expected:
            return f"reward and end are {got}, the environment returned {outcome}"
    return None


# ---- A try ----
def flags_of(each: hostile.Try, script: str, extra: str = "") -> list[str]:
    """The command line. What the try says comes last, and holds."""
    kwargs = each.kwargs if isinstance(each.kwargs, list) else [each.kwargs]
    kwargs = [{"name": f"{each.kind}: {each.name}", **entry} for entry in kwargs]
    flags = f"{SMALL} {SMALLER.get(script, '')} {extra}".split()
    flags += ["--env-kwargs", json.dumps(kwargs if len(kwargs) > 1 else kwargs[0])]
    return flags + [word.replace("\0", " ") for word in each.flags.split()]


def go(script: str, flags: list[str]) -> str | None:
    """Runs a script as its command line does. Returns the sentence that ends it; what is no
    sentence is raised."""
    module = importlib.import_module(f"cleanrl_graph.{script}")
    sys.argv = [module.__file__, *flags]
    try:
        services.main(module, version=2)
    except SystemExit as problem:
        if problem.code in (None, 0):
            return None
        return f"exit code {problem.code}" if isinstance(problem.code, int) else problem.code
    return None


def outcome_of(each: hostile.Try, script: str, flags: list[str], log: Path) -> tuple[str, str]:
    """(result, message) of a try in this process and folder."""
    if each.before:
        own = len(each.flags.split())  # which are for the run that is judged
        before = flags[: len(flags) - own]
        each.before(lambda more="", script=script: go(script, before + more.split()))
    witness = Witness(importlib.import_module(f"cleanrl_graph.{script}"))
    try:
        sentence = go(script, flags)
    except BaseException as problem:  # of all kinds
        return "traceback", f"{type(problem).__name__}: {problem}"
    text = log.read_text(errors="replace")
    if sentence is not None:
        result = judged(each.expected, sentence, text)
        problem = each.after() if each.after and result[0] == "sentence" else None
        return ("silent", problem) if problem else result
    if each.expected != "trains":
        return "silent", f"it should have said: {each.expected}"
    if each.says and not re.search(each.says, text, re.S):
        return "silent", f"it should have printed: {each.says}"
    problems = hostile.read_notes("wrong")
    if each.is_compared:
        problems += filter(None, [witness.problem()])
    if each.after and not problems:
        problems += filter(None, [each.after()])
    if problems:
        return "silent", str(problems[0])
    return "trains", ""


def judged(expected: str, sentence: str, text: str) -> tuple[str, str]:
    """(result, message) of a run that ended with a sentence."""
    if sentence.startswith("exit code"):
        sentence = f"{sentence}: {text}"
    frames = re.findall(r'^ +File "(.*?)"', sentence, re.M)
    if frames and "/cleanrl_graph/" in frames[-1]:
        return "traceback", sentence
    is_expected = expected != "trains" and re.search(expected, sentence, re.S)
    return "sentence" if is_expected else "other", sentence


def target(each: hostile.Try, script: str, flags: list[str], folder: Path) -> None:
    """The process of a try, in a group of its own; what it prints is in the file log."""
    os.setpgid(0, 0)
    os.chdir(folder)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    hostile.FOLDER = str(folder)
    result = outcome_of(each, script, flags, folder / "log")
    (folder / "result").write_text(json.dumps(result))
    os._exit(0)  # threads of environments may never end


def attempt(each: hostile.Try, script: str, extra: str = "") -> Row:
    """The row of a try."""
    folder = Path(tempfile.mkdtemp(prefix="tries"))
    flags = flags_of(each, script, extra)
    process = FORK.Process(target=target, args=(each, script, flags, folder))
    process.start()
    process.join(each.limit)
    if process.is_alive():
        result = "hang", f"it did not end within {each.limit} s"
    elif (folder / "result").exists():
        result = json.loads((folder / "result").read_text())
    else:
        code = f"exit code {process.exitcode}"
        result = judged(each.expected, code, (folder / "log").read_text(errors="replace"))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
    process.join()
    subprocess.run(["chmod", "-R", "u+rwX", folder], check=False)
    subprocess.run(["rm", "-rf", folder], check=False)
    shown = script + (", 2 workers" if "--num-workers 2" in f"{extra} {each.flags}" else "")
    return Row(each.kind, each.name, shown, each.expected, result[0], short(result[1]))


def short(message: str) -> str:
    """The last of its lines that says something, at most 150 characters."""
    lines = [" ".join(re.findall(r"[!-~]+", line)) for line in message.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    if not lines:
        return ""
    line = f"{lines[0]} {lines[-1]}" if lines[0].startswith("exit code") else lines[-1]
    line = line.replace(f"{ROOT}/", "")
    return re.sub(r"/tmp/\w+", "FOLDER", line)[:150]


# ---- The table ----
def chosen(pattern: str) -> list[tuple[hostile.Try, str, str]]:
    """(try, script, more flags) of those whose kind and name the pattern is in. Environments are
    tried again in a script with memory, a third of these with workers."""
    found = []
    for k, (name, each) in enumerate(hostile.TRIES.items()):
        if re.search(pattern, name):
            found.append((each, each.script, ""))
            if each.kind in KINDS_AGAIN and each.script == "ppo_graph":
                extra = "--num-workers 2" if k // 3 % 3 == 0 else ""
                found.append((each, AGAIN[k % 3], extra))
    return found


def table(rows: list[Row], command: str, seconds: float) -> str:
    """Markdown: how many of each kind have which result, and what failed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    names = {(row.kind, row.name) for row in rows}
    lines = [
        f"    {command}        # commit {commit}",
        "",
        f"{len(names)} tries, {len(rows)} runs, {seconds:.0f} s. [All of them](tries.csv).",
        "",
        "| kind | tries | runs | " + " | ".join(RESULTS) + " |",
        "|---|" + "---|" * (len(RESULTS) + 2),
    ]
    for kind in [*dict.fromkeys(row.kind for row in rows), "all"]:
        own = [row for row in rows if kind in (row.kind, "all")]
        counts = Counter(row.result for row in own)
        tries = len({(row.kind, row.name) for row in own})
        cells = [kind, tries, len(own), *(counts[result] for result in RESULTS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    failed = [row for row in rows if row.result not in ("trains", "sentence")]
    if failed:
        lines += ["", "What failed:", ""]
    for row in failed:
        lines.append(f"- {row.kind}, {row.name}, {row.script}: {row.result}. {row.message}")
    lines += [
        "",
        "`trains`: the policy was shown what the environment returned, the environment received "
        "actions of its space, training computes what collection computed. `sentence`: it ended "
        "with one that says what is wrong. Failures are `silent`, `hang`, `traceback` (of our own "
        "code) and `other` (another sentence than the expected one).",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a pattern of kind and name")
    parser.add_argument("--out", type=Path, help="the folder of tries.csv and tables.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for script in ("ppo_graph", *AGAIN):
        importlib.import_module(f"cleanrl_graph.{script}")
    begin = time.time()
    rows = []
    for each, script, extra in tqdm(chosen(args.only), mininterval=5, unit="try"):
        rows.append(attempt(each, script, extra))
        if rows[-1].result not in ("trains", "sentence"):
            tqdm.write(": ".join(rows[-1]))
    command = f"python tests/tries.py --out {args.out}"
    text = table(rows, command, time.time() - begin)
    print(text)
    if args.out:
        tables.put(f"{args.out}/tables.md#tries", text)
        with open(args.out / "tries.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["kind", "try", "script", "expected", "result", "message"])
            writer.writerows(rows)
    return int(any(row.result not in ("trains", "sentence") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
