# Read by the scripts of this folder before all else: `--out DIR` makes a table anew, all of it, in DIR, and at the end the
# committed one stands beside it. Without --out the runs that benchmark/results lacks are made, and its table is written.
# The same command goes on where it was stopped. RESULTS and RUNS are the folders of tables and of runs.
called_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results RUNS=runs
others=()
while [ $# -gt 0 ]; do
    case $1 in
        --out | --out=*)
            [ "$1" != --out ] || { [ $# -gt 1 ] || { echo "--out DIR: a folder is needed" >&2; exit 2; }; shift; }
            RESULTS=$(cd "$called_in" && mkdir -p "${1#--out=}" && cd "${1#--out=}" && pwd)
            [[ $RESULTS != *[[:space:]]* ]] || { echo "--out $RESULTS: a path without spaces is needed" >&2; exit 2; }
            RUNS=$RESULTS/runs
            export BENCHMARK_RESULTS=$RESULTS BENCHMARK_RUNS=$RUNS  # of the Python files
            trap '"$PYTHON" benchmark/beside.py "$BENCHMARK_RESULTS"' EXIT
            ;;
        *) others+=("$1") ;;
    esac
    shift
done
set -- "${others[@]}"

environment() {  # FOLDER REQUIREMENTS -> path of its python, made if missing
    [ -x "$1/bin/python" ] || { "$PYTHON" -m venv "$1" && "$1/bin/python" -m pip install -q -r "$2"; } >&2
    echo "$PWD/$1/bin/python"
}
