"""A vector environment that hands over flat rows is compared with its copy, and resumes exactly."""

import pytest
from helpers import run, run_folder

FLAGS = dict(vectorization_mode="vector_entry_point", num_envs=5, num_steps=12, eval_episodes=0)


@pytest.mark.parametrize("env_id", ["VertexCover-v0", "PoissonGraph-v0"])
def test_it_resumes_exactly(env_id, tmp_path, capfd):
    flags = FLAGS | dict(env_id=f"envs:{env_id}", checkpoint_every=1, learning_rate=1e-3)
    flags["anneal_lr"] = False
    whole = run(tmp_path / "whole", total_timesteps=240, **flags).scalars
    run(tmp_path / "half", total_timesteps=120, **flags)
    half = str(run_folder(tmp_path / "half"))
    resumed = run(tmp_path / "half", total_timesteps=240, resume=half, **flags).scalars
    assert "it begins a new episode" not in capfd.readouterr().err
    assert len(whole["losses/value_loss"]) == 4
    for name, values in whole.items():
        if name != "charts/SPS":
            assert resumed[name] == values, name
