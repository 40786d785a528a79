#!/bin/bash
# What is measured on a GPU, in ten minutes; benchmark/gpu/README.md says what that is and what it needs.
#
#     bash benchmark/gpu.sh --out DIR [--peers DIR] [--only REGEX] [--dry] [first | checks sps tests]
set -euo pipefail
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/gpu/measure.py" "$@"
