"""What the README says is so: its diffs apply to the scripts and its environment trains, what was
trained plays in a program of one's own, and links, flags, files and environments exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from helpers import run, small_args
from torch_geometric import nn as pyg

from cleanrl_graph import load_policy, ppo_graph, ppo_graph_aux, services
from cleanrl_graph.envs import job_shop
from cleanrl_graph.services.arguments import args_of

ROOT = Path(__file__).parents[2]
README, TABLES, GUIDE, ENVS = (
    ROOT / name / "README.md" for name in (".", "benchmark", "cleanrl_graph", "cleanrl_graph/envs")
)
TEXT = README.read_text() + GUIDE.read_text()
PLACEHOLDERS = {"benchmark/NAME.sh"}
OTHERS = "ppo_framestack ppo_lstm_sparse ppo_gtrxl ppo_graph_async ppo_graph_aux".split()


def fences(kind, title):
    """The blocks of a kind below the bold words, up to the next bold words or heading."""
    begin = rf"^(?:\*\*|## ){re.escape(title)}"
    (text,) = re.findall(rf"{begin}(.*?)(?=^\*\*|^## |\Z)", TEXT, re.S | re.M)
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def apply(text, diff):
    """`text` after a diff, each hunk of which must occur exactly once, in whatever line."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def changed(tmp_path, script, title):
    """The script after the README's diff under that title, as a module."""
    text = (ROOT / "cleanrl_graph" / f"{script}.py").read_text()
    diffs = fences("diff", title)
    assert diffs
    for diff in diffs:
        text = apply(text, diff)
    path = tmp_path / f"changed_{script}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(module, run_dir, **flags):
    """What a short training logged: tag -> values."""
    flags = {"state_dependent_std": False, **flags}
    log = run(run_dir, module, **flags).scalars
    scalars = {tag: [value for _, value in values] for tag, values in log.items()}
    assert scalars["debug/collection_mismatch"][0] < 1e-5
    assert all(np.isfinite(values).all() for values in scalars.values())
    return scalars


def test_the_gnn_layer_and_the_action_head(tmp_path):
    module = changed(tmp_path, "ppo_graph", "A message passing layer")
    assert isinstance(module.make_conv("gcn", 8, 3, "sum"), pyg.GCNConv)
    assert isinstance(module.make_conv("sage", 8, 3, "sum"), pyg.SAGEConv)  # as it was
    train(module, tmp_path / "a", env_id="envs:PoissonGraph-v0", gnn="gcn")
    module = changed(tmp_path, "ppo_graph", "An action head")
    train(module, tmp_path / "b", env_id="Pendulum-v1", eval_episodes=1)


@pytest.mark.parametrize("script", OTHERS)
def test_diffs_apply(tmp_path, script):
    """To the other scripts, whose blocks are the same. What ppo_graph_aux.py is about is another
    loss."""
    changed(tmp_path, script, "A message passing layer")
    changed(tmp_path, script, "An action head")
    if script != "ppo_graph_aux":
        changed(tmp_path, script, "A term of the loss")


def test_the_loss(tmp_path, monkeypatch):
    """The term is 0 in the first minibatch; the second one's loss has it, times its flag. It is
    logged under its name."""
    losses, backward = [], torch.Tensor.backward
    noted = lambda loss: (losses.append(loss.item()), backward(loss))
    monkeypatch.setattr(torch.Tensor, "backward", noted)
    modules = changed(tmp_path, "ppo_graph", "A term of the loss"), ppo_graph
    flags = dict(env_id="CartPole-v1", learning_rate=1e-2, num_minibatches=1)
    ours = train(modules[0], tmp_path / "a", kl_coef=2.0, **flags)
    logs = train(modules[1], tmp_path / "b", **flags)
    assert ours["losses/kl_loss"] == ours["losses/approx_kl"] and "losses/kl_loss" not in logs
    half = len(losses) // 2
    first, second, *_ = np.array(losses[:half]) - losses[half:]  # of two epochs
    assert abs(first) < 1e-6 and second > 1e-5
    assert second == pytest.approx(2 * logs["losses/approx_kl"][0], abs=2e-6)


@pytest.fixture
def cover(tmp_path, monkeypatch):
    """The README's environment, as the module `cover`."""
    (code,) = fences("python", "Your own environment")
    (tmp_path / "cover.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("cover")
    sys.modules.pop("cover", None)
    gym.registry.pop("Cover-v0", None)


def test_the_environment(tmp_path, cover):
    train(ppo_graph, tmp_path / "runs", env_id="cover:Cover-v0", env_kwargs={"size": 6})


def lightest(weights, links):
    """The weight of the best cover, by branching on an edge: one of its ends is in the cover."""
    if len(links) == 0:
        return 0.0
    costs = []
    for node in links[0]:
        left = links[(links != node).all(1)]
        costs.append(weights[node] + lightest(weights, left))
    return min(costs)


@pytest.mark.slow
def test_the_environment_is_learned(tmp_path, cover, monkeypatch):
    """Covers within 2% of the best, and lighter ones than a rule's of large graphs."""
    (commands,) = fences("bash", "Your own environment")
    monkeypatch.chdir(tmp_path)
    words = commands.splitlines()[0].split()
    assert words[:2] == ["python", "cleanrl_graph/ppo_graph.py"]
    services.run(ppo_graph, tyro.cli(ppo_graph.Args, args=words[2:]), cuda=False, save_model=True)
    for size, most in ((15, 1.02), (200, 0.97)):
        env = gym.make("cover:Cover-v0", disable_env_checker=True, size=size)
        policy, ours, theirs = load_policy("runs", env), 0.0, 0.0
        for seed in range(30):
            obs, _ = env.reset(seed=seed)
            weights, links = obs["graph"].nodes[:, 0].astype(float), obs["graph"].edge_links
            if size == 15:
                theirs += lightest(weights, links)
            while size > 15 and len(links):  # the rule
                node = (np.bincount(links[:, 0], minlength=len(weights)) / weights).argmax()
                theirs += weights[node]
                links = links[(links != node).all(1)]
            policy.reset()
            done = False
            while not done:
                obs, reward, done, _, _ = env.step(policy(obs))
                ours -= reward
        assert ours <= most * theirs


def test_what_was_trained_plays(tmp_path, monkeypatch):
    """The README's lines play the script's own greedy episode of the same seed."""
    flags = dict(env_id="envs:JobShop-v0", env_kwargs={"jobs": 3, "machines": 3}, norm_obs=True)
    played = run(tmp_path / "runs", save_model=True, eval_episodes=1, **flags)
    monkeypatch.chdir(tmp_path)
    (code,), rewards = fences("python", "Use what was trained"), []
    step = job_shop.JobShopEnv.step
    noted = lambda *args: [result := step(*args), rewards.append(result[1])][0]
    monkeypatch.setattr(job_shop.JobShopEnv, "step", noted)
    exec(code.replace("seed=1)", f"seed={small_args().seed + 10_000})"), {})
    assert sum(rewards) == pytest.approx(played.rows[0]["return"])
    assert len(rewards) == played.rows[0]["length"]


PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "benchmark").glob("*.md"),
    *(ROOT / "cleanrl_graph").rglob("*.md"),
    *(ROOT / "benchmark" / "gpu").glob("*.md"),
    *(ROOT / "benchmark" / "results").rglob("*.md"),
]


def is_there(path, link):
    """Whether a page can link to a file, or to a section of one that has its name. Links to lines
    are checked by doc_lines.py."""
    name, _, section = re.sub(r"#L\d+$", "", link).partition("#")
    file = path.parent / name
    return file.exists() and (not section or f'<a id="{section}">' in file.read_text())


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links(path):
    """Every file and heading that is linked to exists, and every file that a command names."""
    text = path.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    titles = re.findall(r"^#+ (.*)", text, re.M)
    headings = ["#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    named = set(re.findall(r"(?:cleanrl_graph|benchmark|tests)/[\w/]+\.(?:py|sh)", text))
    assert not [link for link in links if link not in headings and not is_there(path, link)]
    assert not [name for name in named - PLACEHOLDERS if not (ROOT / name).exists()]
    assert path not in (README, TABLES, GUIDE, ENVS) or links and (named or path == ENVS)


def test_flags():
    """Every flag of the scripts that the README names exists."""
    known = set("dist nproc-per-node nnodes node-rank master-addr standalone".split())
    known |= {"max-restarts", "logdir", "help"}
    for script in (ppo_graph, ppo_graph_aux):
        known |= {name.replace("_", "-") for name in vars(args_of(script))}
    assert not set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", TEXT)) - known


def test_the_first_script():
    """What is to be read first stands first: the ideas, with their lines."""
    text = README.read_text()
    (ideas,) = re.findall(r"^\| idea \| file \| lines \|(.*?)\n\n", text, re.S | re.M)
    (whole,) = re.findall(r"^\| script \| for \|(.*?)\n\n", text, re.S | re.M)
    assert text.index(ideas) < text.index(whole)
    lines = dict(re.findall(r"\(cleanrl_graph/(\w+_mini)\.py\) \| (\d+) \|", ideas))
    names = [*lines, *re.findall(r"\(cleanrl_graph/(\w+)\.py\)", whole)]
    paths = {path.stem: path for path in (ROOT / "cleanrl_graph").glob("ppo_*.py")}
    assert sorted(names) == sorted(paths) and names[0] == "ppo_graph_mini"
    for name, num in lines.items():
        assert len(paths[name].read_text().splitlines()) == int(num)


def test_environments():
    """All that are registered have a line, and all that are named exist."""
    text = ENVS.read_text()
    own = {name for name, spec in gym.registry.items() if "cleanrl_graph" in str(spec.entry_point)}
    cells = " ".join(re.findall(r"^\| (.*?) \|", text, re.M))
    assert own == set(re.findall(r"`([A-Z]\w+-v\d)`", cells))
    names = set(re.findall(r"\b[A-Z]\w+-v\d", TEXT + text)) - {"YourEnv-v0", "Cover-v0", "Taxi-v4"}
    assert names >= own
    more = {"Atari-v0", "TrafficLights-v0", "PettingZoo-v0", "EntityGym-v0"}  # need more packages
    for name in names - more:
        gym.make(f"cleanrl_graph.envs:{name}", disable_env_checker=True).close()


def test_ci_takes_the_command_of_the_readme():
    """.ci/run and the workflow take the test command from the README as it stands."""
    files = (".ci/run", ".github/workflows/tests.yml")
    ours, theirs = (re.findall(r"\$\((sed .*)\)", (ROOT / name).read_text()) for name in files)
    assert len(ours) == 1 and ours == theirs
    done = subprocess.run(["bash", "-c", *ours], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() in README.read_text() and "pytest" in done.stdout
    assert done.stdout.strip().endswith('-m "not slow"')
