"""Single-file PPO for observations that are graphs, sets or anything else that changes its size."""

__version__ = "1.1.0.dev0"
