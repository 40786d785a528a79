"""Single-file PPO on graphs, sets and memory: scripts, environments and services."""

__version__ = "1.0.0.dev0"
