#!/usr/bin/env bash
# Builds, checks and times the minimal kernels, and on Hopper those of ../hopper; needs nvcc and a GPU, nothing else.
#
#   examples/minimal/run.sh [OUTDIR]        (default: build/minimal; OUTDIR/minimal.json holds the figures)
#
# Where flash_attn is installed for PYTHON (default python3), the library's kernels are timed too and added to the JSON.
# ARCH: what nvcc compiles for (default: native). KNOBS: more for nvcc, like "-DRUNG=4 -DHEAD_DIM=128" (rungs.h).
# BUILD_ONLY=1: stop after compiling.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-$here/../../build/minimal}
mkdir -p "$out"

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
read -ra knobs <<<"${KNOBS:-}"
build() { "$nvcc" -std=c++17 -O3 --use_fast_math "$@"; }
build -arch="${ARCH:-native}" "${knobs[@]}" "$here/main.cu" -o "$out/minimal"
build -arch="${ARCH:-native}" "$here/latency.cu" -o "$out/latency"
case "${ARCH:-native}" in
  native | sm_90*) build -gencode=arch=compute_90a,code=sm_90a "$here/../hopper/main.cu" -o "$out/hopper" ;;
esac
"$out/minimal" --budget >"$out/budget.md"
[ "${BUILD_ONLY:-0}" = 1 ] && exit 0
"$out/latency" >"$out/latency.md"
"$out/minimal" "$out/minimal.json"
rm -f "$out/hopper.json"
hopper=()
if [ -x "$out/hopper" ]; then "$out/hopper" "$out/hopper.json"; fi # writes nothing on another GPU
if [ -f "$out/hopper.json" ]; then hopper=(--hopper "$out/hopper.json"); fi
python=${PYTHON:-python3}
if command -v "$python" >/dev/null; then "$python" "$here/table.py" "$out/minimal.json" "${hopper[@]}"; fi
