#!/bin/bash
# Requests as `vllm bench serve` sends them, answers read as it reads them: judge.sh URL
set -euo pipefail
python3 "$(dirname "$0")/check.py" "$1" "$MODEL"
