"""Does the code of today compute what it computed when a table was made?

    python benchmark/run.py --check                                     # all tables
    python benchmark/run.py --check --table popgym --python PYTHON      # one, with its packages

A fingerprint is three losses of the first two updates of a run. run.py reads them from the run's
own log and keeps them in runs.csv. The check starts each command again, with its flags and its
seed, ends it after two updates and compares. It prints the commands that compute something else
now, and nothing where there are none; progress and what was not checked go to stderr. Runs of the
same command at the same commit are checked by the one with the smallest seed. Left out are scripts
that are not in cleanrl_graph/. Not checked are commands that need a package, or a file in runs/,
that is missing. Evaluation, videos and saved models are in no fingerprint.

A loss has changed if it differs by more than TOLERANCE * max(1, |loss|). Sums in another order
change the last bits, and each step of the optimizer makes that larger: with AVX2 in place of
AVX-512 the losses of five commands differed by up to 2e-6 after the first update and, most of them
by 2e-7, by up to 4e-4 after the second. A change of what is computed is larger: an update itself
changes losses and entropy by 1e-2 or so. But rounding may also draw another action. So where a loss
has changed, the code of the run's commit computes it again on this machine, if git has that commit,
and the command is only printed if today's code differs from that.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tables
from tqdm import tqdm
from two_updates import LOSSES, UPDATES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from cleanrl_graph.services import sweep  # noqa: E402
from cleanrl_graph.services.plot import scalars  # noqa: E402

TOLERANCE = (2e-5, 1e-3)  # after the first update, after the second
MODULES = ("", "multi_agent", "third_party", "traffic")  # folders with environments of the tables
NO_FILE = "there is no file"
MISSING = rf"No module named|pip install|{NO_FILE}"  # in the sentence about what is missing


def read(folder: Path) -> dict[str, list[float]] | None:
    """The losses of the first updates in the event files below `folder`, by name; None if nothing
    was trained. A resumed run has several files, the first ones in the oldest."""
    found = {f"losses/{name}": {} for name in LOSSES}  # tag -> step -> value
    for tag, step, _, value in scalars(folder, *found):
        found[tag][step] = float(f"{value:.6g}")
        if all(len(values) > UPDATES for values in found.values()):
            break  # the log of a long run is not read to its end
    losses = [[values[step] for step in sorted(values)[:UPDATES]] for values in found.values()]
    return dict(zip(LOSSES, losses)) if all(losses) else None


def differences(old: dict[str, list[float]], new: dict[str, list[float]]) -> list[str]:
    """A sentence for each loss that has changed."""
    found = []
    for name in LOSSES:
        if len(old[name]) != len(new[name]):
            return [f"{len(old[name])} updates then, {len(new[name])} now"]
        for i, (then, now) in enumerate(zip(old[name], new[name])):
            if not abs(then - now) <= TOLERANCE[i] * max(1, abs(then)):  # also where one is nan
                found.append(f"{name} of update {i + 1}: {then:g} then, {now:g} now")
    return found


def script_of(command: list[str]) -> int | None:
    """Where in `command` the script is; None if it is none of cleanrl_graph/."""
    places = [i for i, word in enumerate(command) if re.fullmatch(r"cleanrl_graph/\w+\.py", word)]
    return places[0] if places else None


def as_now(words: list[str], script: Path) -> list[str]:
    """Flags of a command, by the names that they have in a script. A run keeps the command that it
    was started with; those before 1.1 had --stay-solved X, and --norm-vloss without a number."""
    if "adv_floor" not in script.read_text():
        return words
    flags = []
    for word, after in zip(words, [*words[1:], "--"]):
        if word == "--norm-vloss" and after.startswith("--"):
            flags += [word, "1"]
        elif word == "--no-norm-vloss":
            flags += ["--norm-vloss", "0"]
        elif word == "--stay-solved":
            amsgrad = "--amsgrad" if float(after) > 0 else "--no-amsgrad"
            flags += [amsgrad, "--adv-floor", "0.1", "--adv-floor-decay"]
        else:
            flags.append(word)
    return flags


def make(command: list[str], python: str, root: Path = ROOT) -> dict[str, list[float]] | str:
    """The fingerprint of a command, without its "python", with the code in `root`; if there is
    none, a sentence that says why."""
    at = script_of(command)
    for word in command:
        if word.startswith("runs/") or word == command[at]:
            if not (root / word).exists():
                return f"{NO_FILE} {word}"
    own = str(Path(__file__).with_name("two_updates.py").resolve())
    script = root / command[at]
    is_mini = sweep.mini_of(command) is not None
    flags = as_now(command[at + 1 :], script)
    command = [python, *command[:at], own, str(script), *flags]
    # The package is that of `root`, even if another one is installed
    paths = [str(root), *(str(root / "benchmark" / name) for name in MODULES)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said.txt")
        with open(said, "wb") as file:
            process = subprocess.Popen(
                command if is_mini else [*command, "--run-dir", folder],
                cwd=folder if is_mini else root,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        try:
            process.wait()
        finally:  # nothing that it started goes on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        end = said.read_text(errors="replace")[-500:]
        words = re.sub(r"[^ -~]+", " ", end).split()  # without the frames that tyro draws
        return read(Path(folder)) or " ".join(words) or "nothing was trained"


@contextlib.contextmanager
def code_of(commit: str, root: Path) -> Iterator[Path]:
    """A folder with the code of a commit of the repository `root`; empty if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "code")
        place.mkdir()
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--detach", str(place), commit], capture_output=True)
        yield place
        subprocess.run([*git, "remove", "--force", str(place)], capture_output=True)


def check(args: Any, root: Path = ROOT) -> int:
    """Prints the commands in the tables of run.py's `args` that compute something else with the
    code in `root`. Returns their number."""
    runs = {}  # (table, command without its seed, commit) -> runs
    for folder in sorted(Path(args.results).glob(args.table or "*")):
        for run in tables.finished(folder).values():
            command = shlex.split(run.get("command", ""))[1:]
            if script_of(command) is not None:
                at = command.index("--seed")
                rest = shlex.join(command[:at] + command[at + 2 :])
                runs.setdefault((folder.name, rest, run["commit"]), []).append(run)
    changed = 0
    for (table, _, commit), same in tqdm(runs.items(), unit="command"):
        same = [run for run in same if run.get("fingerprint", True)]  # null: nothing was trained
        with_one = [run for run in same if "fingerprint" in run]
        if not same:
            continue
        run = min(with_one or same, key=lambda run: run["seed"])
        title = f"{table}, {commit[:7]}: {run['command']}"
        if not with_one:
            print(f"not checked, no fingerprint: {title}", file=sys.stderr)
            continue
        command = shlex.split(run["command"])[1:]
        now = make(command, args.python, root)
        if isinstance(now, str) and re.search(MISSING, now):
            print(f"not checked: {title}\n    {now}", file=sys.stderr)
            continue
        found = [f"now: {now}"] if isinstance(now, str) else differences(run["fingerprint"], now)
        if found and not isinstance(now, str):
            with code_of(commit, root) as older:
                then = make(command, args.python, older)
            if not isinstance(then, str):
                found = differences(then, now)
        if found:
            changed += 1
            print(title, *found, sep="\n    ", flush=True)
    return changed
