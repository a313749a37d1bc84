#!/bin/bash
# lm_eval on the running system and on transformers: judge.sh URL
set -euo pipefail
here=$(dirname "$0")
. "$here/../environment.sh"
# shellcheck disable=SC2046  # one requirement a word
bin=$(WITH_TORCH=1 environment lm_eval $(grep -v '^#' "$here/../requirements.txt"))
"$bin/python" "$here/compare.py" "$1" "$MODEL_DIR"
