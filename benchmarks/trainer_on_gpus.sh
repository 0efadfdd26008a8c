#!/usr/bin/env bash
# What the trainer's figures lack of a GPU, in parts of under ten minutes each:
#   benchmarks/trainer_on_gpus.sh kernels [FOLDER]   one GPU: tests, log-probabilities, experts, export
#   benchmarks/trainer_on_gpus.sh step [FOLDER]      one GPU: a step of the cut model, all sides
#   benchmarks/trainer_on_gpus.sh two [FOLDER]       two GPUs: tests over NCCL (one will do), export, push
# Results (JSON) and what was printed go to FOLDER (default: results-gpu). A part that fails does not
# stop the next; the last line counts the failures. Needs the trainer's environment: torch for the
# GPU, megatron-core, transformers; of peers (liger-kernel, cut-cross-entropy) those that are there.
set -u
cd "$(dirname "$0")/.." || exit 2
part=${1:-} out=${2:-results-gpu}
case $part in
kernels | step | two) ;;
*)
    sed -n '2,8p' "$0"
    exit 2
    ;;
esac
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
python=${PYTHON:-python3} failures=0

run() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code after $((SECONDS - began)) s; $out/$name.log"
    if [ "$code" -ne 0 ]; then failures=$((failures + 1)); fi
}

bench() { # NAME SECONDS MODULE OPTIONS...
    local name=$1 limit=$2 module=$3
    shift 3
    run "$name" "$limit" "$python" -m "benchmarks.$module" "$@" --out "$out/$name.json"
}

nvidia-smi --query-gpu=name,driver_version --format=csv >"$out/gpus.txt" 2>&1 || rocm-smi >"$out/gpus.txt" 2>&1
case $part in
kernels)
    run tests 180 "$python" -m pytest -q -m gpu -rs tests/training -k "not several_ranks"
    bench logprob_loss 240 logprob_loss --rounds 10
    bench experts_layer 60 experts_layer
    bench export_torch 60 export_push --layers 4 --rounds 3
    bench export_megatron 60 export_push --layers 4 --rounds 3 --backend megatron
    ;;
step)
    # sides in the order of how much is not known of them; each adds to the same file
    model=$(mktemp -d)
    trap 'rm -rf "$model"' EXIT
    for side in "ours megatron" "ours torch, compiled" "transformers, compiled layers" \
        "ours megatron, recompute" "megatron-core stock local" "transformers"; do
        name="moe_step ${side//[, ]/_}"
        run "$name" 95 "$python" -m benchmarks.moe_step --layers 8 --rounds 3 \
            --scratch "$model" --side "$side" --out "$out/moe_step.json"
    done
    ;;
two)
    run tests_two 240 "$python" -m pytest -q -m gpu -rs tests/training tests/weights \
        -k "several_ranks or nccl"
    bench export_push_torch 120 export_push --ranks 2 --layers 4 --rounds 3
    bench export_push_megatron 120 export_push --ranks 2 --layers 4 --rounds 3 --backend megatron
    ;;
esac
echo "$failures failed"
exit $((failures > 0))
