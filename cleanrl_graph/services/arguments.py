"""cleanrl_graph, the flags of a script and those of its services, in one object."""

import os
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
import tyro

FREE = set(
    "run_dir track wandb_project_name wandb_entity capture_video save_model load_model "
    "load_matching checkpoint_every checkpoint_minutes resume eval_suite eval_episodes "
    "eval_samples eval_max_steps eval_every stop_at env_timeout vectorization_mode cuda "
    "exp_name num_iterations".split()
)  # all others shape the training


@dataclass
class Flags:
    """Of the services: checkpoints, evaluation, wrappers, worker processes, wandb."""

    track: bool = False
    """tracks this experiment with Weights and Biases"""
    wandb_project_name: str = "cleanrl_graph"
    """the wandb's project name"""
    wandb_entity: str | None = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """saves three greedy episodes to {run_dir}/{run_name}/episode.gif when training ends"""
    load_model: str | None = None
    """model.pt, or best.pt, to start from, or a folder of runs, whose newest one is meant; the
    flags of network and environment that are not given are taken from it"""
    load_matching: bool = False
    """takes from load_model the weights that have a place of the same name and shape; the others
    start fresh"""
    freeze: tuple[str, ...] = ()
    """parts of the agent that are not trained, as print(agent) names them: `encoder`,
    `encoder,head`, `encoder.nets`"""
    checkpoint_every: int = 100
    """updates between checkpoints in {run_dir}/{run_name}, which keeps the last two; 0: none"""
    checkpoint_minutes: float = 5.0
    """a checkpoint is also written after this many minutes without one; 0: only by updates"""
    resume: str | None = None
    """resumes from this checkpoint, or from the newest one in this folder; `auto`: from the newest
    one of this environment, exp_name and seed, if there is any"""
    eval_suite: str | None = None
    """name of a list of env kwargs in the env's `eval_suites`, each played at the end instead of
    eval_episodes"""
    eval_every: int = 0
    """updates between evaluations while it trains, by eval_episodes or eval_suite, greedily, with
    seeds of their own: eval/return and others in the log and in evaluations.csv; the best model is
    kept as best.pt; 0: none"""
    stop_at: float | None = None
    """ends the training after an evaluation of eval_every whose mean return is as large"""
    eval_samples: int = 16
    """sampled episodes per entry of the eval_suite, beside the greedy one; the best is reported"""
    wrap: tuple[str, ...] = ()
    """wrappers, innermost first: `hide:1,3`, `z:skill:4`, `z:uniform:2` (envs/wrappers.py),
    `module:wrapper`"""
    num_workers: int = 0
    """worker processes that step the environments; 0 steps them in this process"""
    vectorization_mode: Literal["sync", "vector_entry_point"] = "sync"
    """vector_entry_point: gymnasium.make_vec, or a function `module:make` that --env-id names,
    makes one VectorEnv that steps all environments"""
    env_timeout: float = 300.0
    """seconds after which a worker that does not answer has failed; 0 waits forever"""


@dataclass
class DemoFlags(Flags):
    """Of the services: checkpoints, evaluation, wrappers, worker processes, wandb, and files of
    demonstrations."""

    record: str | None = None
    """`module:policy` that plays the episodes of a new --demos file, instead of training"""
    record_episodes: int = 200
    """the number of episodes that --record plays"""


def flags_of(script: ModuleType) -> type:
    """The services' flags that a script gets."""
    has_demos = "demos" in script.Args.__dataclass_fields__
    return DemoFlags if has_demos else Flags


def args_of(script: ModuleType, **values) -> Any:
    """An object with all flags, which is an Args of the script, too. NumPy's numbers and paths
    become what a command line gives. TypeError for an unknown flag."""
    for name, value in values.items():
        if isinstance(value, np.generic):
            values[name] = value.item()
        elif isinstance(value, os.PathLike):
            values[name] = os.fspath(value)
    return make_dataclass("Args", [], bases=(flags_of(script), script.Args))(**values)


def parse(script: ModuleType, words: list[str] | None = None) -> Any:
    """The flags of a command line, by default this process's, which save the model unless they say
    --no-save-model."""
    own = field(default_factory=partial(script.Args, save_model=True))
    services = field(default_factory=flags_of(script))
    groups = [("script", script.Args, own), ("services", flags_of(script), services)]
    flags = tyro.conf.OmitArgPrefixes[make_dataclass("Args", groups)]
    parsed = tyro.cli(flags, args=words, description=script.__doc__)
    return args_of(script, **vars(parsed.script), **vars(parsed.services))


def given_in(words: list[str]) -> set[str]:
    """The names of the flags in a command line, also of those that are given their default."""
    given = set()
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].lstrip("-").replace("-", "_")
            given.add(name.removeprefix("no_"))
    return given
