"""What the scripts do on CUDA, on a machine without a GPU: the device of virtual_cuda.py. Each
check is a case by name; one process of its own runs all cases of the tests that were selected, and
says what is wrong with each.

    PYTHONPATH=.:tests python tests/unit/test_virtual_cuda.py FILE NAME ...

writes a line per case to the file: name and problems, as JSON.
"""

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import virtual_cuda

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL = dict(hidden_dims=(16,), gnn_dim=8, gnn_layers=1, num_envs=3)
PREVIOUS = dict(prev_action=True, prev_reward=True)
SCRIPTS = {
    "ppo_graph": {},
    "ppo_framestack": dict(obs_shifts="-2:0", action_shifts="-3:-1", reward_shifts="-2:-1"),
    "ppo_lstm_sparse": dict(lstm_dim=8) | PREVIOUS,
    "ppo_gtrxl": dict(dim=8, num_heads=2, num_layers=1, memory_length=4) | PREVIOUS,
    "ppo_graph_async": {},
    "ppo_graph_aux": dict(aux="reconstruct"),
}


# ---- Checks: each returns sentences that say what is wrong ----
def same(script, **flags) -> list[str]:
    """Two updates, with episodes of 1 to 5 steps, are those of the CPU: all that is logged is equal
    within 1e-4 of it, or 1e-5 (sums are made in another order). No pinned memory is used while it
    is copied."""
    flags = dict(num_steps=6, total_timesteps=36, num_minibatches=2, update_epochs=1) | flags
    host, device = (virtual_cuda.train(script, **flags, cuda=cuda) for cuda in (False, True))
    found = races(device[1])
    tags_of = lambda logged: {step: [*tags] for step, tags in logged.items()}
    if tags_of(host[0]) != tags_of(device[0]):
        return [*found, "other things are logged"]
    for step, tags in host[0].items():
        for tag, value in tags.items():
            other = device[0][step][tag]
            # what the steps of the optimizer before made of rounding shows most in a norm
            rel_tol = 1e-3 if tag == "losses/grad_norm" else 1e-4
            if tag != "charts/SPS" and not math.isclose(
                value, other, rel_tol=rel_tol, abs_tol=1e-5
            ):
                found.append(f"step {step}, {tag}: {other}, on the CPU {value}")
    return found


def mini_budget(script, **flags) -> list[str]:
    """Without ends of episodes the host waits once per step, for the action, and never in a
    minibatch."""
    rates = virtual_cuda.rates(script, num_envs=4, **flags)
    allowed = {"step": 1, "minibatch": 0}
    waits = {unit: rates[unit]["waits"] for unit in allowed}
    return [
        f"{sum(counts.values()):g} waits per {unit}, {allowed[unit]} allowed: {dict(counts)}"
        for unit, counts in waits.items()
        if sum(counts.values()) > allowed[unit] + 1e-9
    ]


def races(told: dict) -> list[str]:
    return [*told["races"], *(told["collector"] or {"races": ()})["races"]]


def budget(script, **flags) -> list[str]:
    """The host waits for the device once per step of the policy, for the action; never in a
    minibatch; twice per update, for the values and for what is logged, and with --target-kl once
    more per epoch. All copies to the device are from pinned memory.

    ppo_graph_async.py's collector is a process of its own: it waits for each action, and once per
    rollout to hand it over. The learner does not step, and waits once more per update, for the
    weights that it sends."""
    flags = {"num_envs": 4} | flags
    is_async, epochs = hasattr(script, "Collector"), 1
    stops = flags.get("target_kl", script.Args.target_kl) is not None
    rates = virtual_cuda.rates(script, epochs=epochs, **flags)
    allowed = {
        ("step", "waits"): 0 if is_async else 1,
        ("step", "collector waits"): 1,
        ("minibatch", "waits"): 0,
        ("minibatch", "collector waits"): 0,
        ("update", "collector waits"): 1,
        ("update", "waits"): 2 + is_async + epochs * stops,
    }
    found = []
    for unit, kinds in rates.items():
        for kind, counts in kinds.items():
            most, num = allowed.get((unit, kind), math.inf), sum(counts.values())
            if num > most + 1e-9:
                found.append(f"{num:g} {kind} per {unit}, {most} allowed: {dict(counts)}")
            for what, line in counts if kind.endswith("copies") else ():
                if what == "to the device, pageable":
                    number = f"{counts[what, line]:g} copies per {unit}"
                    found.append(f"{number} from pageable memory: {line}")
    return found


# ---- Planted bugs: what the checks must find ----
def after_averaging(script, function):
    average = script.average_gradients

    def average_gradients(agent):
        average(agent)
        function(next(agent.parameters()).grad)

    return mock.patch.object(script, "average_gradients", average_gradients)


def waiting(script):
    """A wait in the loop over minibatches."""
    return after_averaging(script, lambda grad: grad.norm().item())


def no_kernel(script):
    """An operation that CUDA has no kernel for."""
    return after_averaging(script, lambda grad: torch.histogram(grad, 4))


def reused(script):
    """A pinned buffer that is kept and written again for the next copy."""
    buffers = {}

    def to_device(array, device):
        host = torch.from_numpy(array)
        if device.type == "cpu":
            return host
        empty = torch.empty_like(host, pin_memory=True)
        buffer = buffers.setdefault((host.shape, host.dtype), empty)
        return buffer.copy_(host).to(device, non_blocking=True)

    return mock.patch.object(script, "to_device", to_device)


def left_behind(script):
    """A constant that stays on the CPU when the agent moves."""
    forward, scale = script.CNN.forward, torch.ones(512)
    scaled = lambda self, images: forward(self, images) * scale
    return mock.patch.object(script.CNN, "forward", scaled)


# ---- Cases ----
def any_env(observation, action, with_ids=False, **flags):
    """Flags for Any-v0 of test_matrix.py, whose episodes end in both ways."""
    kwargs = {"observation": observation, "action": action, "with_ids": with_ids}
    flags["autoregressive"] = action in ("pair", "tuple", "mixed")
    return dict(env_id="Any-v0", env_kwargs=kwargs) | flags


def explore(**flags):
    return dict(env_id="envs:GraphExplore-v0", remember_edges=True, norm_obs=True) | flags


CARTPOLE = dict(env_id="CartPole-v1", num_layers=2, memory_length=50)
LONG = CARTPOLE | dict(num_steps=24, total_timesteps=3 * 72)
AGENTS = any_env("graph_edges", "per_node", with_ids=True, norm_obs=True)
GRAPH, SET, IMAGES = ("graph_edges", "element"), ("sequence", "element"), ("graph_image_vector",)
KINDS = [(kind, action) for kind in ("box", "image") for action in ("discrete", "box", "tuple")]
KINDS += [
    (kind, action)
    for kind in ("graph_edges", "sequence")
    for action in ("discrete", "element", "box", "pair")
]
MINIS = {  # the short scripts, with flags for small networks
    "ppo_graph_mini": dict(gnn_dim=4, gnn_layers=1),
    "ppo_lstm_sparse_mini": dict(gnn_dim=4, gnn_layers=1, lstm_dim=4),
    "ppo_gtrxl_mini": dict(dim=4, num_heads=2, memory_length=3, hidden_dim=4),
    "ppo_framestack_mini": dict(hidden_dim=4, num_views=3),
}
kind_of = lambda mini: "Vectors" if "hidden_dim" in MINIS[mini] else "Graphs"
FAST, SLOW = True, False
ROWS = [  # check, script, flags, whether it is one of the fast ones
    *(
        (same, script, any_env(*kind, with_ids="lstm" in script and kind[1] == "element"), fast)
        for script in SCRIPTS
        for kind in KINDS
        for fast in [kind == GRAPH and script in ("ppo_graph", "ppo_gtrxl")]
    ),
    *((same, script, any_env("graph_edges", "per_node"), SLOW) for script in SCRIPTS),
    (same, "ppo_graph", any_env(*GRAPH, num_workers=2, norm_obs=True), SLOW),
    (same, "ppo_graph", any_env("graph", "mixed", norm_obs=True), SLOW),
    (same, "ppo_graph", any_env(*SET, set_layers=2), SLOW),
    (same, "ppo_graph", any_env(*IMAGES, "element", critic_only=("obs.image", "obs.vector")), SLOW),
    (same, "ppo_lstm_sparse", explore(), FAST),
    (same, "ppo_lstm_sparse", explore(cell="gru"), SLOW),
    (same, "ppo_lstm_sparse", explore(cell="mingru"), SLOW),
    (same, "ppo_lstm_sparse", any_env("graph_edges", "edge", with_ids=True), SLOW),
    (same, "ppo_gtrxl", LONG, SLOW),
    (same, "ppo_graph_aux", any_env(*GRAPH, aux="predict"), SLOW),
    (same, "ppo_graph_async", any_env(*GRAPH, max_lag=0), SLOW),
    (same, "ppo_graph_agents", AGENTS, SLOW),
    *(
        (same, mini, dict(env_id=f"Mini{kind_of(mini)}-v0", num_envs=2), "graph" not in mini)
        for mini in MINIS
    ),
    *((mini_budget, mini, dict(env_id=f"Mini{kind_of(mini)}-endless-v0"), SLOW) for mini in MINIS),
    *(
        (budget, script, flags, script == "ppo_graph" and "norm_obs" in flags)
        for script in SCRIPTS
        for flags in (any_env("graph_edges", "per_node"), any_env(*GRAPH, norm_obs=True))
    ),
    (budget, "ppo_graph", any_env("graph_edges", "mixed"), SLOW),
    (budget, "ppo_graph", any_env("box", "box", norm_obs=True, target_kl=1e9), SLOW),
    (budget, "ppo_graph", any_env(*GRAPH, gnn="gatv2"), SLOW),
    (budget, "ppo_graph", any_env(*SET, set_layers=2), SLOW),
    (budget, "ppo_graph", any_env(*GRAPH, graph_context=True), SLOW),
    (budget, "ppo_graph", any_env(*IMAGES, "element", critic_only=("obs.image",)), SLOW),
    (budget, "ppo_graph_async", any_env("sequence", "box"), SLOW),
    (budget, "ppo_framestack", any_env("image", "tuple"), SLOW),
    (budget, "ppo_lstm_sparse", any_env("box", "discrete"), SLOW),
    (budget, "ppo_lstm_sparse", explore(), SLOW),
    (budget, "ppo_lstm_sparse", explore(cell="mingru"), SLOW),
    (budget, "ppo_gtrxl", CARTPOLE, SLOW),
    (budget, "ppo_graph_aux", any_env("image", "tuple", aux="predict"), SLOW),
    (budget, "ppo_graph_agents", AGENTS, SLOW),
]
BUGS = {  # planted bug -> (check, observation, what is found)
    waiting: (budget, "box", "1 waits per minibatch, 0 allowed: {('_local_scalar_dense', 'test_v"),
    reused: (same, "box", "is used again while it is copied since test_virtual_cuda.py"),
    left_behind: (same, "image", "RuntimeError: Expected all tensors to be on the same device"),
    no_kernel: (same, "box", "aten.histogram.bin_ct has no CUDA kernel (test_virtual"),
}


def name_of(row):
    """The check, the script and all flags."""
    check, script, flags, _ = row
    said = " ".join(map(str, flags.get("env_kwargs", {}).values()))
    more = {k: v for k, v in flags.items() if k not in ("env_id", "env_kwargs", "autoregressive")}
    return f"{check.__name__} {script} {flags['env_id']} {said} {more}"


CASES = {name_of(row): (*row[:3], None) for row in ROWS}
CASES |= {
    bug.__name__: (check, "ppo_graph", any_env(observation, "discrete"), bug)
    for bug, (check, observation, _) in BUGS.items()
}
assert len(CASES) == len(ROWS) + len(BUGS)


def problems(name: str) -> list[str]:
    """What is wrong in a case."""
    check, script_name, flags, bug = CASES[name]
    script = importlib.import_module(f"cleanrl_graph.{script_name}")
    try:
        with bug(script) if bug else contextlib.nullcontext():
            small = MINIS.get(script_name) or SMALL | SCRIPTS.get(script_name, {})
            return check(script, **small | flags)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[-600:]]


# ---- Tests ----
@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Case -> problems, of the cases of all tests that were selected."""
    if reason := virtual_cuda.reason_not():
        pytest.skip(reason)
    items = (item for item in request.session.items if item.path.samefile(__file__))
    names = [item.callspec.params["name"] for item in items if "results" in item.fixturenames]
    file = tmp_path_factory.mktemp("virtual_cuda") / "results"
    done = subprocess.run(
        [sys.executable, __file__, file, *names],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = dict(map(json.loads, file.read_text().splitlines()))
    died = [f"the process ended with {done.returncode}: {done.stderr[-1000:]}"]
    return {name: found.get(name, died) for name in names}


def case(name, is_fast):
    return pytest.param(name, marks=[] if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("name", [case(name_of(row), row[3]) for row in ROWS])
def test_on_the_device(name, results):
    """As on the CPU, within the budget of waits."""
    assert results[name] == []


@pytest.mark.parametrize("name", [bug.__name__ for bug in BUGS])
def test_planted_bugs_are_found(name, results):
    """Else a check could not fail."""
    _, _, expected = next(BUGS[bug] for bug in BUGS if bug.__name__ == name)
    assert any(expected in problem for problem in results[name]), results[name]


@pytest.mark.slow
def test_tests_for_cuda(tmp_path):
    """Those that are marked `cuda` hold on the device."""
    if reason := virtual_cuda.reason_not():
        pytest.skip(reason)
    pytest_of = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "--virtual-cuda"]
    pytest_of += ["--basetemp", tmp_path / "tests", "-p", "no:cacheprovider"]
    files = [HERE / "test_cuda.py", HERE / "test_lstm_sparse.py"]
    done = subprocess.run([*pytest_of, *files], capture_output=True, text=True, timeout=600)
    output = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 0 and "skipped" not in done.stdout, output


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    importlib.import_module("test_matrix")  # which registers Any-v0
    virtual_cuda.install()
    file, *names = sys.argv[1:]
    with open(file, "w", buffering=1) as file:
        for name in names:
            print(json.dumps([name, problems(name)]), file=file)
    sys.stdout.flush()
    os._exit(0)  # PyTorch's own end asks CUDA
