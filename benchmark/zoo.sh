#!/bin/bash
# Hundreds of environments of public packages, one update each: benchmark/zoo.py says what is done, zoo/packages.csv
# which. Each zoo/requirements-NAME.txt goes into a virtual environment of its own in .venv-zoo, which finds torch and
# what else requirements.txt has in that of $PYTHON. Runs that are in results/zoo/ids.csv are not repeated.
#
#     bash benchmark/zoo.sh [--out DIR] [FLAGS OF zoo.py]     # ZOO: another folder than .venv-zoo
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ZOO=${ZOO:-.venv-zoo}
for file in benchmark/zoo/requirements-*.txt; do
    name=$(basename "${file#*requirements-}" .txt)
    own=$ZOO/$name/bin/python
    if [ ! -f "$ZOO/$name/installed" ]; then
        "$PYTHON" -m venv "$ZOO/$name"
        site=$("$own" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        "$PYTHON" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" > "$site/base.pth"
        grep -E '^(gymnasium|numpy)[=>]' "$file" > "$ZOO/$name/constraints" || true
        while read -r line; do  # one by one: some ask for older versions of others than they need
            "$own" -m pip install -q -c "$ZOO/$name/constraints" "$line"
        done < "$file"
        touch "$ZOO/$name/installed"
    fi
    "$own" benchmark/zoo.py --environment "$name" "$@"
done
