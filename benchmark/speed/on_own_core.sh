#!/bin/bash
# Runs a command on the core that has the number of torchrun's local rank.
exec taskset -c "$LOCAL_RANK" "$@"
