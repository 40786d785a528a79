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
    if {step: [*tags] for step, tags in host[0].items()} != {
        step: [*tags] for step, tags in device[0].items()
    }:
        return [*found, "other things are logged"]
    for step, tags in host[0].items():
        for tag, value in tags.items():
            other = device[0][step][tag]
            if tag != "charts/SPS" and not math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-5):
                found.append(f"step {step}, {tag}: {other}, on the CPU {value}")
    return found


def races(told: dict) -> list[str]:
    return [*told["races"], *(told["collector"] or {"races": ()})["races"]]


def budget(script, **flags) -> list[str]:
    """The host waits for the device once per step of the policy, for the action; never in a
    minibatch; twice per update, for the values and for what is logged, and with --target-kl once
    more per epoch. All copies to the device are from pinned memory. With --gnn gatv2 each layer of
    PyG waits when it looks for self-loops: twice per call.

    ppo_graph_async.py's collector is a process of its own: it waits for each action, and once per
    rollout to hand it over. The learner does not step, and waits once more per update, for the
    weights that it sends."""
    flags = {"num_envs": 4} | flags
    is_async, epochs, pyg = hasattr(script, "Collector"), 1, 2 * (flags.get("gnn") == "gatv2")
    stops = flags.get("target_kl", script.Args.target_kl) is not None
    rates = virtual_cuda.rates(script, epochs=epochs, **flags)
    allowed = {
        ("step", "waits"): 0 if is_async else 1 + pyg,
        ("step", "collector waits"): 1,
        ("minibatch", "waits"): pyg,
        ("minibatch", "collector waits"): 0,
        ("update", "collector waits"): 1,
        ("update", "waits"): 2 + is_async + pyg + epochs * stops,
    }
    found = []
    for unit, kinds in rates.items():
        for kind, counts in kinds.items():
            most = allowed.get((unit, kind), math.inf)
            if sum(counts.values()) > most + 1e-9:
                found.append(
                    f"{sum(counts.values()):g} {kind} per {unit}, {most} allowed: {dict(counts)}"
                )
            for what, line in counts if kind.endswith("copies") else ():
                if what == "to the device, pageable":
                    found.append(
                        f"{counts[what, line]:g} copies per {unit} from pageable memory: {line}"
                    )
    return found


# ---- Planted bugs: what the checks must find ----
def waiting(script):
    """A wait in the loop over minibatches."""
    average = script.average_gradients

    def average_gradients(agent):
        average(agent)
        next(agent.parameters()).grad.norm().item()

    return mock.patch.object(script, "average_gradients", average_gradients)


def pageable(script):
    """A copy from pageable memory that is waited for."""
    return mock.patch.object(
        script, "to_device", lambda array, device: torch.from_numpy(array).to(device)
    )


def not_pinned(script):
    """A copy from pageable memory."""
    to_device = lambda array, device: torch.from_numpy(array).to(device, non_blocking=True)
    return mock.patch.object(script, "to_device", to_device)


def reused(script):
    """A pinned buffer that is kept and written again for the next copy."""
    buffers = {}

    def to_device(array, device):
        host = torch.from_numpy(array)
        if device.type == "cpu":
            return host
        buffer = buffers.setdefault(
            (host.shape, host.dtype), torch.empty_like(host, pin_memory=True)
        )
        return buffer.copy_(host).to(device, non_blocking=True)

    return mock.patch.object(script, "to_device", to_device)


def early(script):
    """Results that are read before they are there."""
    return mock.patch.object(torch.Tensor, "cpu", lambda self: self.to("cpu", non_blocking=True))


def left_behind(script):
    """A constant that stays on the CPU when the agent moves."""
    forward, scale = script.CNN.forward, torch.ones(512)
    return mock.patch.object(
        script.CNN, "forward", lambda self, images: forward(self, images) * scale
    )


def no_kernel(script):
    """An operation that CUDA has no kernel for."""
    average = script.average_gradients

    def average_gradients(agent):
        average(agent)
        torch.histogram(next(agent.parameters()).grad, 4)

    return mock.patch.object(script, "average_gradients", average_gradients)


def otherwise(script):
    """Something else is computed on the device than on the CPU."""
    exp = torch.Tensor.exp
    return mock.patch.object(
        torch.Tensor, "exp", lambda self: exp(self) * (1.001 if self.is_cuda else 1)
    )


# ---- Cases ----
def any_env(observation, action, **flags):
    """Flags for Any-v0 of test_matrix.py, whose episodes of 1 to 5 steps are terminated and
    truncated in turn."""
    autoregressive = action in ("pair", "tuple", "mixed")
    kwargs = {
        "observation": observation,
        "action": action,
        "with_ids": flags.pop("with_ids", False),
    }
    return dict(env_id="Any-v0", env_kwargs=kwargs, autoregressive=autoregressive) | flags


EXPLORE = dict(env_id="envs:GraphExplore-v0", remember_edges=True, norm_obs=True)
CARTPOLE = dict(env_id="CartPole-v1", num_layers=2, memory_length=50)
NAMES = {
    "box": "vector",
    "graph_edges": "graph",
    "sequence": "set",
    "image": "image",
    "discrete": "flat",
    "element": "choice",
    "tuple": "autoregressive",
    "pair": "autoregressive",
}
KINDS = [
    (observation, action)
    for observation in ("box", "graph_edges", "sequence", "image")
    for action in (
        "discrete",
        *(
            ("element", "box", "pair")
            if observation in ("graph_edges", "sequence")
            else ("box", "tuple")
        ),
    )
]
CASES = {  # name -> (check, script, flags, planted bug or None)
    f"{script} {NAMES[observation]} {'continuous' if action == 'box' else NAMES[action]}": (
        same,
        script,
        any_env(observation, action, with_ids=script == "ppo_lstm_sparse" and action == "element"),
        None,
    )
    for script in SCRIPTS
    for observation, action in KINDS
}
CASES |= (
    {
        "ppo_graph workers": (
            same,
            "ppo_graph",
            any_env("graph_edges", "element", num_workers=2, norm_obs=True),
            None,
        ),
        "ppo_graph masked": (same, "ppo_graph", any_env("multidiscrete", "mask"), None),
        "ppo_graph avail_actions": (
            same,
            "ppo_graph",
            any_env("graph_image_vector", "avail_actions"),
            None,
        ),
        "ppo_lstm_sparse explores": (same, "ppo_lstm_sparse", EXPLORE, None),
        "ppo_lstm_sparse explores, gru": (
            same,
            "ppo_lstm_sparse",
            EXPLORE | dict(cell="gru"),
            None,
        ),
        "ppo_lstm_sparse explores, mingru": (
            same,
            "ppo_lstm_sparse",
            EXPLORE | dict(cell="mingru"),
            None,
        ),
        "ppo_gtrxl remembers": (
            same,
            "ppo_gtrxl",
            CARTPOLE | dict(num_steps=24, total_timesteps=3 * 72),
            None,
        ),
        "ppo_graph_aux predicts": (
            same,
            "ppo_graph_aux",
            any_env("graph_edges", "element", aux="predict"),
            None,
        ),
        "ppo_graph_async without lag": (
            same,
            "ppo_graph_async",
            any_env("graph_edges", "element", max_lag=0),
            None,
        ),
    }
    | {
        f"{script} per node": (same, script, any_env("graph_edges", "per_node"), None)
        for script in SCRIPTS
    }
    | {
        f"{script} waits per node": (budget, script, any_env("graph_edges", "per_node"), None)
        for script in SCRIPTS
    }
    | {
        "ppo_graph_agents per node": (
            same,
            "ppo_graph_agents",
            any_env("graph_edges", "per_node", with_ids=True, norm_obs=True),
            None,
        ),
        "ppo_graph_agents waits per node": (
            budget,
            "ppo_graph_agents",
            any_env("graph_edges", "per_node", with_ids=True, norm_obs=True),
            None,
        ),
        "ppo_graph mixed": (same, "ppo_graph", any_env("graph", "mixed", norm_obs=True), None),
        "ppo_framestack mixed": (same, "ppo_framestack", any_env("graph_edges", "mixed"), None),
        "ppo_graph waits mixed": (budget, "ppo_graph", any_env("graph_edges", "mixed"), None),
        "ppo_lstm_sparse edge": (
            same,
            "ppo_lstm_sparse",
            any_env("graph_edges", "edge", with_ids=True),
            None,
        ),
        "ppo_lstm_sparse per id": (
            same,
            "ppo_lstm_sparse",
            any_env("graph", "per_node_box", with_ids=True),
            None,
        ),
    }
    | {
        f"{script} waits": (budget, script, any_env("graph_edges", "element", norm_obs=True), None)
        for script in SCRIPTS
    }
    | {
        "ppo_graph waits with target_kl": (
            budget,
            "ppo_graph",
            any_env("box", "box", norm_obs=True, target_kl=1e9),
            None,
        ),
        "ppo_graph waits with gatv2": (
            budget,
            "ppo_graph",
            any_env("graph_edges", "element", gnn="gatv2"),
            None,
        ),
        "ppo_graph waits with gin": (
            budget,
            "ppo_graph",
            any_env("graph_edges", "element", gnn="gin"),
            None,
        ),
        "ppo_graph waits with set layers": (
            budget,
            "ppo_graph",
            any_env("sequence", "element", set_layers=2),
            None,
        ),
        "ppo_graph set layers": (
            same,
            "ppo_graph",
            any_env("sequence", "element", set_layers=2),
            None,
        ),
        "ppo_graph waits with context": (
            budget,
            "ppo_graph",
            any_env("graph_edges", "element", graph_context=True),
            None,
        ),
        "ppo_graph critic only": (
            same,
            "ppo_graph",
            any_env("graph_image_vector", "element", critic_only=("obs.image", "obs.vector")),
            None,
        ),
        "ppo_graph waits with critic only": (
            budget,
            "ppo_graph",
            any_env("graph_image_vector", "element", critic_only=("obs.image",), norm_obs=True),
            None,
        ),
        "ppo_graph gin": (same, "ppo_graph", any_env("graph_edges", "element", gnn="gin"), None),
        "ppo_graph_async waits with a set": (
            budget,
            "ppo_graph_async",
            any_env("sequence", "box"),
            None,
        ),
        "ppo_framestack waits with images": (
            budget,
            "ppo_framestack",
            any_env("image", "tuple"),
            None,
        ),
        "ppo_lstm_sparse waits with a vector": (
            budget,
            "ppo_lstm_sparse",
            any_env("box", "discrete"),
            None,
        ),
        "ppo_lstm_sparse waits where it explores": (budget, "ppo_lstm_sparse", EXPLORE, None),
        "ppo_lstm_sparse waits where it explores, gru": (
            budget,
            "ppo_lstm_sparse",
            EXPLORE | dict(cell="gru"),
            None,
        ),
        "ppo_lstm_sparse waits where it explores, mingru": (
            budget,
            "ppo_lstm_sparse",
            EXPLORE | dict(cell="mingru"),
            None,
        ),
        "ppo_gtrxl waits where it remembers": (budget, "ppo_gtrxl", CARTPOLE, None),
        "ppo_graph_aux waits where it predicts": (
            budget,
            "ppo_graph_aux",
            any_env("image", "tuple", aux="predict"),
            None,
        ),
    }
)
BUGS = {  # planted bug -> (check, observation, action, what is found)
    waiting: (
        budget,
        "box",
        "discrete",
        "1 waits per minibatch, 0 allowed: {('_local_scalar_dense', 'test_virtual",
    ),
    pageable: (
        budget,
        "box",
        "discrete",
        "3 waits per step, 1 allowed: {('copy to the device', 'test_virtual",
    ),
    not_pinned: (
        budget,
        "box",
        "discrete",
        "1 copies per step from pageable memory: test_virtual_cuda.py",
    ),
    reused: (
        same,
        "box",
        "discrete",
        "pinned memory is used again while it is copied since test_virtual_cuda.py",
    ),
    early: (same, "box", "discrete", "AssertionError: 100"),  # of an action
    left_behind: (
        same,
        "image",
        "discrete",
        "RuntimeError: Expected all tensors to be on the same device",
    ),
    no_kernel: (
        same,
        "box",
        "discrete",
        "NotImplementedError: aten.histogram.bin_ct has no CUDA kernel (test_virtual",
    ),
    otherwise: (same, "box", "discrete", "losses/entropy"),
}
CASES |= {
    f"bug: {bug.__name__}": (check, "ppo_graph", any_env(observation, action), bug)
    for bug, (check, observation, action, _) in BUGS.items()
}
FAST = [
    *(f"{script} graph choice" for script in SCRIPTS),
    "ppo_graph vector continuous",
    "ppo_lstm_sparse explores",
    "ppo_graph waits",
    "ppo_graph waits per node",
    "ppo_graph waits with set layers",
    "ppo_graph waits with context",
    "ppo_graph set layers",
    "ppo_graph waits with critic only",
    "ppo_graph_agents per node",
    "ppo_graph_agents waits per node",
    "ppo_framestack waits with images",
    "ppo_lstm_sparse waits where it explores",
    "ppo_gtrxl waits where it remembers",
    "ppo_graph_async waits with a set",
]


def problems(name: str) -> list[str]:
    """What is wrong in a case."""
    check, script_name, flags, bug = CASES[name]
    script = importlib.import_module(f"cleanrl_graph.{script_name}")
    try:
        with bug(script) if bug else contextlib.nullcontext():
            return check(script, **SMALL | SCRIPTS.get(script_name, {}) | flags)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[-600:]]


# ---- Tests ----
@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Case -> problems, of the cases of all tests that were selected."""
    if reason := virtual_cuda.reason_not():
        pytest.skip(reason)
    items = (item for item in request.session.items if item.path.samefile(__file__))
    params = [item.callspec.params for item in items if "results" in item.fixturenames]
    names = [
        param["name"] if "name" in param else f"bug: {param['bug'].__name__}" for param in params
    ]
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name, case in CASES.items()
        if not case[3]
    ],
)
def test_on_the_device(name, results):
    """As on the CPU, within the budget of waits."""
    assert results[name] == []


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=[] if bug in (waiting, reused, no_kernel) else pytest.mark.slow)
        for bug in BUGS
    ],
    ids=lambda bug: bug.__name__,
)
def test_planted_bugs_are_found(bug, results):
    found = results[f"bug: {bug.__name__}"]
    assert any(BUGS[bug][3] in problem for problem in found), found


@pytest.mark.slow
def test_tests_for_cuda(tmp_path):
    """Those that are marked `cuda` hold on the device."""
    if reason := virtual_cuda.reason_not():
        pytest.skip(reason)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda",
        "--virtual-cuda",
        "--basetemp",
        tmp_path / "tests",
        "-p",
        "no:cacheprovider",
        HERE / "test_cuda.py",
        HERE / "test_lstm_sparse.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "skipped" not in done.stdout, (
        done.stdout[-3000:] + done.stderr[-1000:]
    )


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
