#!/usr/bin/env bash
# Does a card what the tests expect, and how fast? One command, under 8 minutes, no download:
#   bench/gpu.sh              tests/gpu, then our engine on 2,000 requests of three workloads, then vLLM if it is there
#   bench/gpu.sh --rehearse   the same on the CPU with a tiny model and 8 requests
# PYTHON=...     the Python with our packages (default: .venv, else python3); VLLM_PYTHON=... the one with vLLM
# SECONDS_IN_ALL=470, CONFIG='{"attention": "flash"}' (more fields of EngineConfig), OUT=a folder for the logs
set -uo pipefail
cd "$(dirname "$0")/.."
IN_ALL=${SECONDS_IN_ALL:-470}
OUT=${OUT:-.longhaul/gpu}
CONFIG=${CONFIG:-'{"prefill_chunk_tokens": 4096}'}
default=python3
[ -x .venv/bin/python ] && default=.venv/bin/python
PYTHON=${PYTHON:-$default}
VLLM_PYTHON=${VLLM_PYTHON:-$PYTHON}
MORE=()
TESTS=(-m gpu)
export PYTHONPATH=. HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ "${1:-}" = --rehearse ]; then
    MORE=(--tiny --n 8 --max-running 4)
    TESTS+=(-k "qwen3 or flash or draws")
    export LONGHAUL_GPU_REHEARSAL=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
elif [ $# -gt 0 ]; then
    echo "usage: bench/gpu.sh [--rehearse]" >&2
    exit 2
fi
mkdir -p "$OUT"
LINES=$OUT/figures.jsonl
: >"$LINES"
failed=0

left() { echo $((IN_ALL - SECONDS)); }

# stage NAME LEAST MOST COMMAND...: run it for at most MOST seconds; leave it out with less than LEAST left.
stage() {
    local name=$1 least=$2 most=$3 limit rc
    shift 3
    limit=$(left)
    if [ "$limit" -lt "$least" ]; then
        echo "{\"figure\": \"skipped\", \"stage\": \"$name\", \"seconds_left\": $limit}" | tee -a "$LINES"
        return
    fi
    [ "$limit" -gt "$most" ] && limit=$most
    echo "== $name (at most ${limit} s; $SECONDS s have passed)"
    timeout --kill-after=10 "$limit" "$@" 2>"$OUT/$name.err" | tee "$OUT/$name.log"
    rc=${PIPESTATUS[0]}
    grep '^{' "$OUT/$name.log" >>"$LINES"
    if [ "$rc" -ne 0 ]; then
        failed=1
        tail -n 15 "$OUT/$name.err"
        echo "{\"figure\": \"failed\", \"stage\": \"$name\", \"exit\": $rc}" | tee -a "$LINES"
    fi
}

# A figure is worth nothing while tests fail, but it is measured: minutes on a card are few.
stage versions 5 60 "$PYTHON" -m bench.gpu versions
"$PYTHON" -c 'import flash_attn' 2>/dev/null || echo '{"figure": "note", "text": "no flash-attn: our engine runs dense attention"}' | tee -a "$LINES"
stage tests 30 240 "$PYTHON" -m pytest -q --no-header --tb=short -p no:cacheprovider -o timeout=100 -W default "${TESTS[@]}" \
    tests/gpu tests/unit/engine/test_cuda_device.py
stage longhaul 40 200 "$PYTHON" -m bench.gpu run longhaul --seconds 30 --config "$CONFIG" "${MORE[@]}"
if "$VLLM_PYTHON" -c 'import vllm' 2>/dev/null; then
    stage vllm 90 200 "$VLLM_PYTHON" -m bench.gpu run vllm "${MORE[@]}"
else
    echo '{"figure": "skipped", "stage": "vllm", "reason": "not installed"}' | tee -a "$LINES"
fi
"$PYTHON" -m bench.gpu summary "$LINES"
echo "$SECONDS s; lines in $LINES, logs in $OUT"
exit $failed
