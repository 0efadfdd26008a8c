#!/bin/sh
# The real SGLang 0.5.23 on a machine without a GPU: `sh configs/install_sglang_cpu.sh PYTHON VENV`, called by `make sglang`.
# Makes VENV with PYTHON (3.11) and installs the server into it, 2.7 GB. Its kernels have no build for a plain CPU: modules
# of their names stand in, which raise when one is called; a dense or MoE text model served with the flags of
# configs/engines/sglang-cpu.yaml calls none. For tests and for trying: no grammars, graphs, overlap or tensor parallelism.
set -eu

PYTHON=${1:?usage: sh configs/install_sglang_cpu.sh PYTHON VENV}
VENV=${2:?usage: sh configs/install_sglang_cpu.sh PYTHON VENV}
HERE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT

say() { printf 'sglang: %s\n' "$*"; }
fail() { printf 'sglang: %s\n' "$*" >&2; exit 1; }

# Runs a command quietly; shows what it said only if it fails.
quietly() {
    if ! "$@" >"$LOG" 2>&1; then
        cat "$LOG" >&2
        fail "failed: $*"
    fi
}

found=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "$PYTHON does not run; give another: make sglang PYTHON=/path/to/python3.11"
[ "$found" = 3.11 ] || fail "$PYTHON is Python $found; its packages are pinned for 3.11: make sglang PYTHON=python3.11"
if ! "$VENV/bin/python" -c '' >/dev/null 2>&1; then
    say "making $VENV with Python $found"
    quietly "$PYTHON" -m venv --clear "$VENV"
fi
say "installing SGLang 0.5.23 and torch 2.13.0 (2.7 GB, some minutes)"
# each package is in the list: what SGLang's metadata asks for besides is for GPUs, images and grammars
quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0
quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
    -r "$HERE/sglang_cpu_requirements.txt"
quietly "$VENV/bin/python" "$HERE/sglang_cpu_stand_ins.py"
say "$("$VENV/bin/python" -c 'import sglang; print("done: SGLang", sglang.__version__)'): $VENV/bin/python"
