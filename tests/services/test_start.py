"""What a training does not import: torch's compiler and layers for graphs take a second each."""

import json
import subprocess
import sys

import pytest
from helpers import small_args

PROGRAM = """
import json, sys
from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services.arguments import args_of

services.run(ppo_graph, args_of(ppo_graph, **json.loads(sys.argv[1])))
print("imported:", *sorted({"torch._dynamo", "sympy", "torch_geometric"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_torchs_compiler_is_not_imported(tmp_path):
    flags = vars(small_args(env_id="CartPole-v1", run_dir=str(tmp_path), checkpoint_every=1))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(flags)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "imported:"
