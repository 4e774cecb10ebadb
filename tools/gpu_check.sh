#!/usr/bin/env bash
# Checks the package on a GPU machine that reaches no package registry.
#
#   tools/gpu_check.sh OUTDIR [tests|sanitize|bench|demo ...]        (default: all stages)
#
# Needs Python with torch, pytest, pytest-xdist, einops and setuptools. Installs the package into a temporary folder:
# with FLASH_ATTN_KERNEL_ARCHIVE set only the binding is compiled. Every stage has its own time limit (seconds, by
# INSTALL_LIMIT, TESTS_LIMIT, BENCH_LIMIT, DEMO_LIMIT; the sanitizer's tools, each a separate stage, by
# MEMCHECK_LIMIT, RACECHECK_LIMIT, INITCHECK_LIMIT, SYNCCHECK_LIMIT, else SANITIZE_LIMIT); SANITIZE_TOOLS names the
# tools to run, each as SANITIZE_SHARDS (2) concurrent processes. A failing stage does not stop the next one. The
# last lines are a table of stages; the exit status is the number of stages that did not pass.
set -u

[ $# -ge 1 ] || { sed -n '2,13p' "$0"; exit 64; }
mkdir -p "$1" || exit 64
out=$(cd "$1" && pwd)
shift
stages=${*:-tests sanitize bench demo}
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
summary=$out/summary.txt
printf '%-18s %-8s %7s  %s\n' stage result seconds figures >"$summary"
failed=0

# limited NAME SECONDS LOG COMMAND...: runs the command, appends its output to LOG, sets `status` and `seconds`.
limited() {
    local name=$1 limit=$2 log=$3 begin=$SECONDS
    shift 3
    echo "== $name (limit $limit s)"
    timeout --kill-after=10 "$limit" "$@" >>"$log" 2>&1
    status=$?
    seconds=$((SECONDS - begin))
}

# record NAME FIGURES [LOG]: writes the summary line of the stage that just ran; shows the end of LOG if it failed.
record() {
    local result=passed
    [ "$status" -eq 0 ] || { result="rc $status"; failed=$((failed + 1)); }
    [ "$status" -eq 124 ] && result=timeout
    printf '%-18s %-8s %7s  %s\n' "$1" "$result" "$seconds" "$2" | tee -a "$summary"
    [ "$status" -eq 0 ] || [ -z "${3:-}" ] || tail -n 20 "$3" | cut -c1-300
}

last_lines() { tail -n "$2" "$1" | paste -sd ';' | cut -c1-300; }

stage_install() {
    local log=$out/install.log
    : >"$log"
    limited install "${INSTALL_LIMIT:-80}" "$log" \
        "$python" -m pip install "$root" --no-build-isolation --no-deps --target "$site" --quiet --disable-pip-version-check
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    local built
    built=$(cd / && "$python" -c 'import flash_attn; print(flash_attn.__build__)' 2>>"$log" | tail -n 1)
    case $built in
    *cuda*) ;;
    *) [ "$status" -eq 0 ] && status=1 ;;
    esac
    record install "$built" "$log"
    return "$status"
}

# -P keeps the source tree off Python's path: the installed package is tested.
stage_tests() {
    local log=$out/tests.log
    : >"$log"
    limited tests "${TESTS_LIMIT:-260}" "$log" \
        "$python" -P -m pytest "$root/tests" "$root/benchmarks/lab/tests" --ignore "$root/tests/build/test_build.py" \
        -n "${TEST_WORKERS:-$(nproc)}" --dist worksteal -q -rf \
        --durations 30 --device cuda --junitxml "$out/tests.xml" -p no:cacheprovider
    record tests "$(last_lines "$log" 1)" "$log"
}

find_sanitizer() {
    local candidate
    for candidate in "$(command -v compute-sanitizer)" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
        [ -x "$candidate" ] && { echo "$candidate"; return; }
    done
    return 1
}

# Every tensor gets its own allocation, so that an access beyond it is seen. racecheck and synccheck look at our kernels
# only: they are slow, while initcheck has to follow the writes of all kernels, and does not see those by TMA: it gets
# outputs and gradients that are NaN beforehand (tests/sanitize/sanitize_cases.py). torch probes driver functions that
# may be missing, so memcheck is told not to count refused API calls; our own launches are checked by our code.
stage_sanitize() {
    local tool sanitizer shards=${SANITIZE_SHARDS:-2}
    if ! sanitizer=$(find_sanitizer); then
        status=1 seconds=0
        record sanitize "compute-sanitizer not found"
        return
    fi
    for tool in ${SANITIZE_TOOLS:-memcheck racecheck initcheck synccheck}; do
        local log=$out/$tool.log limit=${tool^^}_LIMIT
        local options=(--tool "$tool" --error-exitcode 3 --print-limit 20) cases=()
        case $tool in
        memcheck) options+=(--report-api-errors no) ;;
        initcheck) cases=(--nan-outputs) ;;
        *) options+=(--kernel-name kernel_substring=flash) ;;
        esac
        : >"$log"
        limited "$tool" "${!limit:-${SANITIZE_LIMIT:-50}}" "$log" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            xargs -a <(seq 0 $((shards - 1))) -P "$shards" -I{} \
            "$sanitizer" "${options[@]}" "$python" "$root/tests/sanitize/sanitize_cases.py" --shard "{}/$shards" "${cases[@]}"
        record "$tool" "$(grep -E 'SUMMARY|wrong results|rror:' "$log" | tail -n 3 | paste -sd ';' | cut -c1-300)" "$log"
    done
}

stage_bench() {
    local log=$out/bench.log
    : >"$log"
    limited bench "${BENCH_LIMIT:-90}" "$log" "$python" "$root/benchmarks/run.py" --out "$out" --name bench
    record bench "$(grep -E '^cells ' "$log" | paste -sd ';')" "$log"
    sed -n '/^| /,$p' "$log"
}

stage_demo() {
    local log=$out/demo.log
    : >"$log"
    limited demo "${DEMO_LIMIT:-40}" "$log" "$python" "$root/examples/demo.py"
    record demo "$(last_lines "$log" 4)" "$log"
}

if stage_install; then
    for stage in $stages; do
        if declare -F "stage_$stage" >/dev/null; then
            "stage_$stage"
        else
            status=64 seconds=0
            record "$stage" "no such stage"
        fi
    done
fi
echo
cat "$summary"
exit "$failed"
