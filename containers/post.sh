#!/bin/sh
# What every image does after its base: `sh post.sh PYTHON GPU [REQUIREMENT…]`, in %post.
# Puts this project's wheel, beside the requirements, into PYTHON without moving anything that the
# base was built around, and compiles it: the image is read-only when it runs.
set -eu
PYTHON=${1:?usage: sh post.sh PYTHON GPU [REQUIREMENT…]}
GPU=${2:?usage: sh post.sh PYTHON GPU [REQUIREMENT…]}
shift 2
CONTEXT=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

# A resolver that may move torch takes another vendor's build of it.
held=$(mktemp)
"$PYTHON" -m pip list --format=freeze 2>/dev/null |
    grep -iE '^(torch|torchvision|torchaudio|triton|pytorch-triton.*|numpy|transformers|tokenizers|sglang|sgl-kernel|sglang-kernel|flashinfer.*|aiter|amdsmi)==' \
        >"$held" || :
if [ "$GPU" = none ]; then
    offline="--no-index --find-links $CONTEXT/wheels"
else
    offline="--find-links $CONTEXT/wheels"
fi
# shellcheck disable=SC2086  # two or three words
"$PYTHON" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
    --no-cache-dir --no-compile -c "$held" $offline agentrl-slurm "$@"
# On all cores, where pip takes one. Packages hold files that are no Python of today: passed over.
"$PYTHON" -m compileall -qq -j 0 \
    "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || :
"$PYTHON" -m pip check || echo "post.sh: pip's complaints above are of the base's own packages" >&2
rm -rf "$CONTEXT" "$held" /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
"$PYTHON" -c 'import launch.role, agentrl.config, slurm.task'
