#!/bin/bash
# inference-perf at a constant rate: judge.sh URL
set -euo pipefail
. "$(dirname "$0")/../environment.sh"
JUDGE_PYTHON=$(newer_python)
bin=$(environment inference_perf inference-perf==0.7.0)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sed -e "s#URL#$1#; s#MODEL_DIR#$MODEL_DIR#; s#MODEL#$MODEL#; s#FOLDER#$folder#" "$(dirname "$0")/config.yml" >"$folder/config.yml"
timeout 300 "$bin/inference-perf" -c "$folder/config.yml" >"$JUDGES/inference_perf.log" 2>&1 || { tail -40 "$JUDGES/inference_perf.log"; exit 1; }
"$bin/python" - "$folder/out/summary_lifecycle_metrics.json" <<'P'
import json, sys
from importlib.metadata import version

result = json.load(open(sys.argv[1]))
answered, failed = result["successes"]["count"], result["failures"]["count"]
assert answered > 0 and failed == 0, (answered, failed)
print(f"inference-perf {version('inference-perf')}: {answered} answered, none failed")
P
