#!/bin/bash
# Everything that is measured on a GPU, part by part, each at most 8 minutes: the parts that are named, or all of them.
#
#     bash benchmark/gpu.sh --out DIR [--dry] [--minutes 7] [--only REGEX] [--peers DIR] [--commit NAME] [PART ...]
#
#     first     what settles the most in ten minutes: the checks, then a choice of the measurements, line by line
#     checks    does the machine compile; where each script waits; do collection and training agree
#     tests     all tests that need a CUDA device
#     sps       steps per second of the scripts, eager and compiled, and of the peers
#     profile   bytes copied, waits of the host, how busy the GPU is
#     kernels   LSTM, attention, batches and precision, each against its alternative
#     jobshop   a training and its gaps on la01-40 and ta01-10
#     recall    a cue over 1,000 steps            minigrid   memory in pixels
#
# Each writes DIR/results.json (raw) and DIR/tables.md after every row, and leaves out the rows that are in DIR. No row
# is begun after --minutes. Exit code: 0 all rows are there, 1 a row failed or there is no CUDA device, 3 time was up with
# rows left: the same command goes on. --dry tries everything on the CPU in about a minute. See benchmark/gpu/README.md.
set -uo pipefail
PYTHON=${PYTHON:-python}
all=(checks tests sps profile kernels jobshop recall minigrid)
# Of `first`: minutes, part, rows
first=(
    "1 checks machine" "3 checks Updates" "2 tests test_(cuda|lstm|gtrxl)" "2 tests test_compile"
    "1 kernels Readout|Running" "1 kernels ^Attention.*(128|512|1024) . 128 . 16$"
    "1 kernels ^Graph network.*gine.* 64" "1 kernels ^LSTM.* 16 . 128$"
    "2 profile CartPole.*ppo_graph.py|JobShop.*ppo_graph.py|GraphExplore|Stateless.*gtrxl"
    "2 sps (CartPole|PoissonGraph).*512" "1 sps CartPole.*64"
)
parts=() flags=() minutes=7 dry= is_first=
while [ $# -gt 0 ]; do
    case $1 in
        --dry) dry=1 ;;&
        --minutes) minutes=${2:-} ;;&
        --out | --minutes | --only | --peers | --commit)
            flags+=("$1" "${2:-}")
            shift $(($# > 1))
            ;;
        --*) flags+=("$1") ;;
        *) parts+=("$1") ;;
    esac
    shift
done
[[ $minutes =~ ^[0-9]+$ ]] || { echo "--minutes $minutes: a whole number is needed" >&2; exit 1; }
[ "${parts[*]}" != first ] || { is_first=1 parts=(checks tests kernels profile sps); }
for part in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $part "* ]] || { echo "there is no part $part, the parts are: ${all[*]}" >&2; exit 1; }
done
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
[ -z "$dry" ] || parts=("${parts[*]}")  # in one process, which saves its imports

code=0
run() {  # minutes, part, flags: in a process of its own, since an assert on a GPU spoils all that follows
    timeout -k 20 $((60 * $1 + 60)) "$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/gpu/part.py" $2 "${flags[@]}" "${@:3}"
    ended=$?
    case $ended in
        0) ;;
        2) exit 1 ;;  # it said why it cannot run here
        3 | 124 | 137) [ $code != 0 ] || code=3 ;;
        130) exit 130 ;;
        *) code=1 ;;
    esac
}
if [ -n "$is_first" ] && [ -z "$dry" ]; then
    for line in "${first[@]}"; do
        read -r minutes part only <<<"$line"
        run "$minutes" "$part" --minutes "$minutes" --only "$only"
    done
else
    for part in "${parts[@]}"; do run "$minutes" "$part"; done
fi
exit $code
