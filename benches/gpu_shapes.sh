#!/usr/bin/env bash
# Attention layers of current models on one Hopper GPU: first right, then fast. One command, within ten minutes.
#
#     benches/gpu_shapes.sh [FOLDER]          FOLDER: FlashAttention-3, as `gpu_attention.py --fa3` takes it
#
# 1. tests/gpu over the forms of the Hopper kernels that attention/rule.py does not call proven: whatever fails stops it.
# 2. forward and backward ms of each layer by the Hopper kernels (`gluon`), by the portable ones and by the keys gathered
#    for each path. `gpu_attention.py` times nothing that is wrong.
#
# RIGHT=0 or FAST=0 leaves one of the two out; GPU_PYTHON is a Python that has torch for the GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${GPU_PYTHON:-python3}
fa3=(${1:+--fa3 "$1"})
gathered=gathered${1:+_fa3}

if [ "${RIGHT:-1}" != 0 ]; then
    logs=$(mktemp -d)
    test_gpu() { # a name, arguments of pytest; side by side, as most of the time is compilation on the CPU
        TREEPACK_UNPROVEN=1 timeout 400 "$python" -m pytest -q "${@:2}" >"$logs/$1" 2>&1 &
        pids[$!]=$1
    }
    declare -A pids=()
    test_gpu hopper tests/gpu/test_gpu_hopper.py
    test_gpu last_rows tests/gpu/test_gpu_last_rows.py
    test_gpu features tests/gpu/test_gpu_right.py -k "features or head_sizes"
    test_gpu others tests/gpu/test_gpu_right.py -k "not features and not head_sizes and not float32"
    failed=0
    for pid in "${!pids[@]}"; do
        wait "$pid" || failed=1
        echo "${pids[$pid]}"
        grep -E "^(FAILED|ERROR|E  )|passed|failed" "$logs/${pids[$pid]}" | tail -n 15 || tail -n 15 "$logs/${pids[$pid]}"
    done
    [ "$failed" = 0 ] || exit 1
fi
if [ "${FAST:-1}" != 0 ]; then
    bench() { # implementation, shapes
        "$python" benches/gpu_attention.py --tree chain16k agent9k multiturn --impl "$1" triton_plain "$gathered" \
            "${fa3[@]}" --warmup 20 --rep 60 --shape "${@:2}"
    }
    bench gluon 256:16/2 64:64/8:window=128:sinks 64:64/8:sinks 192/128:32/32 96:32/8 128:32/8
fi
