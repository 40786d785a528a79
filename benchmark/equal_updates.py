"""Do two checkouts compute the same? Losses and gradients of the first minibatches of a training,
side by side.

    git worktree add ../old COMMIT
    python benchmark/equal_updates.py --old ../old --out benchmark/results/rewrite/equal_updates.md
    python benchmark/equal_updates.py --old ../old --scripts ppo_graph --cases cartpole mixed

Both checkouts train with the same seed and draw their weights themselves. So the losses are equal
as long as weights, rollouts and minibatches are. A row is one script on one environment. It covers
two updates and more, so what is carried from one rollout to the next is in it: memory, statistics
of --norm-obs, episodes that go on. Most environments end some episodes by a time limit.

Differences of losses are relative to max(1, |loss|). Gradients are compared by their global norm
and by the sorted norms of the parameters, both relative to the global norm, so that parameters may
change their names and order. Weights are compared by the sorted sums of the parameters.

Sums in another order change last bits, and optimizer and ReLU make some of these larger. Where
gradients differ by more than --tolerance a third training shows how much larger: the old checkout's
with weights that are multiplied by 1 +- 6e-8. The last column is how its gradients differ from
those of the old one.

Cases that compute something else on purpose say so, and where they do. The exit code is 1 if a run
of one of the others failed, its weights differ, or a difference is above --tolerance, of gradients
also above 10 times what rounding does.
"""

import json
import multiprocessing
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import gymnasium  # noqa: F401  imported once here, not in each run
import numpy as np
import torch
import torch.utils.tensorboard  # noqa: F401
import torch_geometric.nn  # noqa: F401
import tyro
from fingerprint import as_now

ROOT = Path(__file__).resolve().parents[1]
ENVS = str(Path(__file__).resolve().parent)  # the folder of equal_updates_envs.py
SCRIPTS = (
    "ppo_graph",
    "ppo_framestack",
    "ppo_lstm_sparse",
    "ppo_gtrxl",
    "ppo_graph_async",
    "ppo_graph_aux",
    "ppo_graph_compile",
)
FOUR = SCRIPTS[:4]  # the others share the rooms of observations and actions with ppo_graph.py
GRAPH = ("ppo_graph",)
AGENTS = ("ppo_graph_agents",)  # for environments with info["rewards"] alone
SCRIPT_FLAGS = {"ppo_graph_compile": "--compile-mode none"}
SMALL = (
    "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --total-timesteps 1024 "
    "--eval-episodes 0 --no-save-model --no-cuda"
)


class Case(NamedTuple):
    """Flags that both checkouts are given, by the names that they have there (`as_now`)."""

    flags: str
    scripts: tuple[str, ...] = SCRIPTS
    before: str = ""  # flags of a run before, such as one that makes a file
    purpose: str = ""  # what is another function than in the old checkout, and why that is right


CASES = {
    "cartpole": Case("--env-id CartPole-v1 --no-norm-obs"),
    "hidden": Case("--env-id CartPole-v1 --wrap hide:1,3 z:uniform:2 --num-workers 2", FOUR),
    "pendulum": Case(
        """--env-id Pendulum-v1 --norm-obs --env-kwargs '{"max_episode_steps": 20}'"""
    ),
    "taxi": Case("""--env-id Taxi-v4 --env-kwargs '{"max_episode_steps": 20}'""", FOUR),
    "poisson": Case(
        """--env-id envs:PoissonGraph-v0 --norm-obs --env-kwargs '[{}, {"max_episode_steps": 3}]'"""
    ),
    "jobshop": Case(
        "--env-id envs:JobShop-v0 --gamma 1 "
        """--env-kwargs '[{"jobs": 3, "machines": 3}, {"max_episode_steps": 20}]'"""
    ),
    "flexible": Case("--env-id envs:FlexibleJobShop-v0 --gamma 1 --action-head edges", GRAPH),
    "dag": Case("--env-id envs:DagSchedule-v0 --norm-obs", GRAPH),
    "best_edge": Case("--env-id envs:BestEdge-v0"),
    "stateless": Case(
        "--env-id envs:StatelessCartPole-v1 --wrap z:skill:4 "
        """--env-kwargs '{"max_episode_steps": 12}'"""
    ),
    "recall": Case("""--env-id envs:Recall-v0 --env-kwargs '{"length": 5}'"""),
    "last_graphs": Case("--env-id envs:LastGraphs-v0 --norm-obs", FOUR),
    "explore": Case(
        """--env-id envs:GraphExplore-v0 --norm-obs --env-kwargs '{"max_episode_steps": 40}'"""
    ),
    "best_of_set": Case("--env-id envs:BestOfSet-v0", FOUR),
    "workers": Case("--env-id envs:MatchGoal-v0 --num-workers 2"),
    "pairs": Case("--env-id envs:PairNodes-v0 --autoregressive", GRAPH),
    "skills": Case("--env-id envs:SkillGraph-v0 --target-kl 0.01 --activation relu", GRAPH),
    "pixels": Case("--env-id equal_updates_envs:Pixels-v0"),
    "pixels_chw": Case(
        """--env-id equal_updates_envs:Pixels-v0 --env-kwargs '{"shape": [3, 16, 12]}'""", FOUR
    ),
    "mixed": Case(
        "--env-id equal_updates_envs:Mixed-v0 --autoregressive --norm-obs "
        """--env-kwargs '{"bits": false}'"""
    ),
    "mixed_at_once": Case(
        """--env-id equal_updates_envs:Mixed-v0 --env-kwargs '{"bits": false}'""", FOUR
    ),
    "node_amount": Case("--env-id envs:NodeAmount-v0 --autoregressive", FOUR),
    "colouring": Case("--env-id envs:Colouring-v0 --gnn gatv2 --readout max", FOUR),
    "transformer": Case("--env-id envs:Colouring-v0 --gnn transformer --readout mean", GRAPH),
    "gin": Case("--env-id envs:Colouring-v0 --gnn gin --gnn-aggr max", GRAPH),
    "neighbours": Case(
        "--env-id envs:NeighbourMean-v0 --gnn sage --readout sum --state-dependent-std "
        """--env-kwargs '{"max_episode_steps": 5}'"""
    ),
    "views": Case(
        "--env-id equal_updates_envs:Pixels-v0 --obs-shifts -5,-1,0 --image-views encodings",
        ("ppo_framestack",),
    ),
    "remember_edges": Case(
        "--env-id envs:GraphExplore-v0 --remember-edges --state-readout sum --no-norm-obs "
        """--env-kwargs '{"max_episode_steps": 40}'""",
        ("ppo_lstm_sparse",),
    ),
    "remember_norm": Case(
        "--env-id envs:GraphExplore-v0 --remember-edges --norm-obs", ("ppo_lstm_sparse",)
    ),
    "remember_roads": Case(
        "--env-id equal_updates_envs:Roads-v0 --remember-edges --no-norm-obs", ("ppo_lstm_sparse",)
    ),
    "one_state": Case(
        "--env-id envs:GraphExplore-v0 --no-state-per-node --prev-reward "
        """--env-kwargs '{"max_episode_steps": 9}'""",
        ("ppo_lstm_sparse",),
    ),
    "gru": Case(
        "--env-id envs:GraphExplore-v0 --cell gru --forget-bias 0 --no-prev-action",
        ("ppo_lstm_sparse",),
    ),
    "layers": Case(
        "--env-id envs:StatelessCartPole-v1 --num-layers 2 --memory-length 5 --prev-reward "
        """--env-kwargs '{"max_episode_steps": 12}'""",
        ("ppo_gtrxl",),
    ),
    "no_gate": Case("--env-id envs:LastGraphs-v0 --gate none --num-heads 2", ("ppo_gtrxl",)),
    "floor": Case(
        "--env-id Pendulum-v1 --norm-vloss --stay-solved 0.9 "
        """--env-kwargs '{"max_episode_steps": 20}'""",
        ("ppo_graph", "ppo_graph_async", "ppo_graph_aux", "ppo_graph_compile"),
    ),
    "no_lag": Case(
        """--env-id Pendulum-v1 --max-lag 0 --env-kwargs '{"max_episode_steps": 20}'""",
        ("ppo_graph_async",),
    ),
    "reconstruct": Case(
        "--env-id equal_updates_envs:Mixed-v0 --aux reconstruct "
        """--env-kwargs '{"bits": false}'""",
        ("ppo_graph_aux",),
    ),
    "predict": Case("--env-id envs:GraphExplore-v0 --aux predict", ("ppo_graph_aux",)),
    "demos": Case(
        "--env-id envs:GraphExplore-v0 --demos demos.npz --bc-updates 2",
        ("ppo_graph_aux",),
        "--env-id envs:GraphExplore-v0 --demos demos.npz --record-episodes 5 "
        "--record equal_updates_envs:random_policy",
    ),
    "crowd": Case(
        """--env-id envs:Crowd-v0 --norm-obs --env-kwargs '{"episode_length": 20}'""", AGENTS
    ),
    "crowd_workers": Case(
        """--env-id envs:Crowd-v0 --num-workers 2 --env-kwargs '{"episode_length": 20}'""", AGENTS
    ),
    # pip install -r benchmark/traffic/requirements.txt
    "traffic": Case(
        """--env-id envs:TrafficLights-v0 --env-kwargs '{"seconds": 200, "map": "grid4x4"}'""",
        AGENTS,
    ),
    # pip install -r benchmark/requirements-multi-agent.txt
    "spread": Case(
        """--env-id envs:PettingZoo-v0 --env-kwargs '{"env": "mpe2.simple_spread_v3"}'""", AGENTS
    ),
    "bits": Case(
        "--env-id equal_updates_envs:Mixed-v0 --autoregressive --norm-obs",
        GRAPH,
        purpose="A MultiBinary action is one part with a category for each bit, where bits were "
        "Bernoulli variables: other weights, other random numbers.",
    ),
    "equal_entries": Case(
        """--env-id equal_updates_envs:Mixed-v0 --env-kwargs '{"bits": false, "gears": [3, 3]}'""",
        GRAPH,
        purpose="A MultiDiscrete action whose entries have equally many options is one part; each "
        "entry was one with a layer of its own, so weights are drawn in another order.",
    ),
    "gin_edges": Case(
        "--env-id equal_updates_envs:Mixed-v0 --gnn gin "
        """--env-kwargs '{"bits": false}'""",
        GRAPH,
        purpose="`--gnn gin` with edge features is PyG's GINEConv without its ReLU: weights are "
        "drawn as it draws them, and each edge adds the bias of its layer; it was added per node.",
    ),
    "pixels_float": Case(
        "--env-id equal_updates_envs:Pixels-v0 "
        """--env-kwargs '{"high": 1000, "dtype": "float32"}'""",
        GRAPH,
        purpose="An image is divided by the largest value of its space, where uint8 was divided by "
        "255 and nothing else was.",
    ),
    "pixels_16": Case(
        """--env-id equal_updates_envs:Pixels-v0 --env-kwargs '{"high": 15}'""",
        GRAPH,
        purpose="As above: uint8 up to 15 is divided by 15.",
    ),
    "remember_features": Case(
        "--env-id equal_updates_envs:Roads-v0 --remember-edges --norm-obs",
        ("ppo_lstm_sparse",),
        purpose="A remembered edge keeps its features as --norm-obs made them when it was seen; "
        "they were normalised anew in each minibatch.",
    ),
    "reconstruct_pixels": Case(
        "--env-id equal_updates_envs:Pixels-v0 --aux reconstruct",
        ("ppo_graph_aux",),
        purpose="Images are told by a sub-pixel convolution, where it was three transposed ones.",
    ),
}


@dataclass
class Args:
    old: str
    """the checkout that is compared with"""
    new: str = str(ROOT)
    """this one"""
    scripts: tuple[str, ...] = (*SCRIPTS, *AGENTS)
    """names of scripts"""
    cases: tuple[str, ...] = tuple(CASES)
    """names of cases"""
    minibatches: int = 8
    """minibatches that are compared; an update has 4"""
    tolerance: float = 1e-5
    """largest difference that is not an error"""
    out: str | None = None
    """file for the table"""


class Recording(NamedTuple):
    """What one training did."""

    weights: list[list[float]]  # (number of elements, sum) of each parameter at first, sorted
    losses: list[float]  # of each minibatch
    norms: list[list[float]]  # of each minibatch, the gradients of the parameters, sorted
    learning_rates: list[float]  # of each minibatch, annealed, so another one in each update


class Recorder:
    """Takes notes of a training: of the optimizer's parameters, of each loss and its gradients. The
    training ends after `num` minibatches, which are then in the file `out`."""

    def __init__(self, num: int, out: Path, is_rounded: bool = False):
        self.num = num
        self.out = out
        self.is_rounded = is_rounded  # the first weights are changed as rounding would
        self.recording = Recording([], [], [], [])
        self.params = []

    def install(self) -> None:
        """Puts the recorder's functions in front of PyTorch's own."""
        adam_init = torch.optim.Adam.__init__
        adam_step = torch.optim.Adam.step
        backward = torch.Tensor.backward

        def recorded_init(optimizer, *args, **kwargs):
            adam_init(optimizer, *args, **kwargs)
            self.note_weights(optimizer)

        def recorded_backward(loss, *args, **kwargs):
            backward(loss, *args, **kwargs)
            self.note_gradients(loss)

        def recorded_step(optimizer, *args, **kwargs):
            self.recording.learning_rates.append(float(optimizer.param_groups[0]["lr"]))
            if len(self.recording.losses) == self.num:
                self.out.write_text(json.dumps(self.recording))
                raise SystemExit(0)
            return adam_step(optimizer, *args, **kwargs)

        torch.optim.Adam.__init__ = recorded_init
        torch.optim.Adam.step = recorded_step
        torch.Tensor.backward = recorded_backward

    def note_weights(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self.params.extend(group["params"])
        if self.is_rounded:
            self.round_weights()
        for param in self.params:
            self.recording.weights.append([param.numel(), param.detach().double().sum().item()])
        self.recording.weights.sort()

    def round_weights(self) -> None:
        """Multiplies each weight by 1 + 6e-8 or 1 - 6e-8, half the distance of two floats at 1."""
        generator = torch.Generator().manual_seed(0)  # the training's own draws stay the same
        for param in self.params:
            signs = torch.randint(2, param.shape, generator=generator) * 2 - 1
            param.data = (param.double() * (1 + signs * 2.0**-24)).float()

    def note_gradients(self, loss: torch.Tensor) -> None:
        norms = []
        for param in self.params:
            if param.grad is not None:
                norms.append(param.grad.double().norm().item())
        self.recording.losses.append(loss.item())
        self.recording.norms.append(sorted(norms))


def run_script(path: Path, flags: str, log: Path, recorder: Recorder | None) -> None:
    """Runs a script as `python path flags` does, in this process, which is one of its own."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(log.parent)
    if recorder:
        recorder.install()
    checkout = path.parents[1]
    # Python puts the script's folder first. The checkout is for scripts that import from a package
    sys.path[:1] = [str(path.parent), str(checkout)]
    sys.path.append(ENVS)
    sys.argv = [str(path), *as_now(shlex.split(flags), path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit:
        check_origins(checkout)
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def check_origins(checkout: Path) -> None:
    """SystemExit if a module of the project was imported from somewhere else."""
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        is_ours = name.partition(".")[0] in ("cleanrl_graph", "envs", "utils")
        if is_ours and origin and not Path(origin).is_relative_to(checkout):
            raise SystemExit(f"{name} is {origin}, not in {checkout}")


def run(path: Path, flags: str, folder: Path, recorder: Recorder | None = None) -> None:
    """Runs a script in a process of its own. RuntimeError with all that it wrote if it fails."""
    log = folder / "log.txt"
    context = multiprocessing.get_context("fork")  # torch is imported there
    process = context.Process(target=run_script, args=(path, flags, log, recorder))
    process.start()
    process.join(timeout=600)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"exit code {process.exitcode}\n{log.read_text()}")


def record(checkout: str, script: str, case: Case, num: int, is_rounded: bool = False) -> Recording:
    """What the first `num` minibatches of a training are. RuntimeError if it fails."""
    path = Path(checkout).resolve() / "cleanrl_graph" / f"{script}.py"
    if not path.exists():
        raise RuntimeError(f"there is no {path}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.before:
            run(path, case.before, folder)
        recorder = Recorder(num, folder / "recording.json", is_rounded)
        run(path, f"{SMALL} {SCRIPT_FLAGS.get(script, '')} {case.flags}", folder, recorder)
        if not recorder.out.exists():
            raise RuntimeError(f"less than {num} minibatches")
        return Recording(*json.loads(recorder.out.read_text()))


def loss_difference(old: Recording, new: Recording) -> float:
    """The largest one, relative to max(1, |loss|)."""
    expected = np.array(old.losses)
    return float(np.max(np.abs(expected - new.losses) / np.maximum(1.0, np.abs(expected))))


def gradient_difference(old: Recording, new: Recording) -> float:
    """The largest one of global norms and of sorted norms, relative to the global norm. Infinity if
    the numbers of parameters differ."""
    largest = 0.0
    for expected, found in zip(old.norms, new.norms):
        if len(expected) != len(found):
            return np.inf
        total = np.linalg.norm(expected)
        difference = np.abs(np.subtract(expected, found)).max()
        difference = max(difference, abs(total - np.linalg.norm(found)))
        largest = (
            np.fmax(largest, difference / total) if total > 0 else np.fmax(largest, difference)
        )
    return float(largest)


def compare(
    old: Recording, new: Recording, rounded: Callable[[], Recording], tolerance: float
) -> tuple[str, bool]:
    """The columns of a row, and whether both are equal. `rounded` makes the old one, rounded."""
    loss = loss_difference(old, new)
    gradient = gradient_difference(old, new)
    same_weights = old.weights == new.weights
    rounding = 0.0
    if gradient > tolerance:
        rounding = gradient_difference(old, rounded())
    num_updates = len(set(old.learning_rates))
    cells = [
        f"{len(old.losses)} of {num_updates}",
        "equal" if same_weights else "differ",
        f"{np.abs(old.losses).max():.3g}",
        f"{loss:.1g}",
        f"{gradient:.1g}",
        f"{rounding:.1g}" if rounding else "",
    ]
    is_equal = same_weights and loss <= tolerance and gradient <= max(tolerance, 10 * rounding)
    return " | ".join(cells), is_equal


def last_words(text: str) -> str:
    """The last line that has letters in it, as a cell of a table."""
    words = ""
    for line in text.splitlines():
        if any(letter.isalpha() for letter in line):
            words = line.strip(" │").replace("|", "/")
    return words


def compare_script(args: Args, script: str, case: Case) -> tuple[str, bool]:
    """The columns of a row, or what failed, and whether both checkouts are equal."""

    def make(name: str, checkout: str, is_rounded: bool = False) -> Recording:
        try:
            return record(checkout, script, case, args.minibatches, is_rounded)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            raise RuntimeError(f"failed: {name}: {last_words(str(error))}") from None

    try:
        old = make("old", args.old)
        new = make("new", args.new)
        return compare(old, new, partial(make, "rounded", args.old, True), args.tolerance)
    except RuntimeError as error:
        return f"{error} | | | | |", False


def commit_of(checkout: str) -> str:
    command = ["git", "-C", checkout, "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main(args: Args) -> int:
    """Prints and writes the table. Returns the exit code."""
    lines = [
        "| script | case | minibatches of updates | first weights | largest loss "
        "| difference of losses | of gradients | that rounding makes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    num_rows = 0
    num_different = 0
    purposes = {}  # name -> purpose, of the cases that ran
    for script in args.scripts:
        for name in args.cases:
            case = CASES[name]
            if script not in case.scripts:
                continue
            cells, is_equal = compare_script(args, script, case)
            title = name
            if case.purpose:
                title += " (another function)"
                purposes[name] = case.purpose
            lines.append(f"| {script}.py | {title} | {cells} |")
            print(lines[-1], flush=True)
            num_rows += 1
            num_different += not (is_equal or case.purpose)
    lines += ["", f"{num_rows} rows, {num_different} of them failed or above {args.tolerance:g}."]
    if purposes:
        lines[-1] += " Another function on purpose:"
        lines += ["", *(f"- {name}: {purpose}" for name, purpose in purposes.items())]
    print("\n".join(lines[num_rows + 2 :]))
    if args.out:
        command = shlex.join(["python", "benchmark/equal_updates.py", *sys.argv[1:]])
        commits = f"Old: commit {commit_of(args.old)}; new: {commit_of(args.new)}."
        Path(args.out).write_text("\n".join([f"`{command}`", "", commits, "", *lines]) + "\n")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
