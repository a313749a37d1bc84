#!/bin/bash
# aiperf with every second request cancelled: judge.sh URL
set -euo pipefail
. "$(dirname "$0")/../environment.sh"
bin=$(environment aiperf aiperf==0.13.0)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# It takes tokenizers from Hugging Face's cache only.
cached=$folder/hub/models--pdserve--demo
mkdir -p "$cached/refs" "$cached/snapshots/demo"
printf demo >"$cached/refs/main"
ln -s "$MODEL_DIR"/* "$cached/snapshots/demo/"
HF_HOME=$folder HF_HUB_OFFLINE=1 timeout 300 "$bin/aiperf" profile --model "$MODEL" --url "$1" --endpoint-type chat --streaming \
    --tokenizer pdserve/demo --request-count 40 --concurrency 8 --isl 32 --isl-stddev 0 --osl 16 --osl-stddev 0 --random-seed 1 \
    --ui none --request-cancellation-rate 50 --request-cancellation-delay 0.3 --artifact-dir "$folder/out" >"$JUDGES/aiperf.log" 2>&1 ||
    { tail -40 "$JUDGES/aiperf.log"; exit 1; }
"$bin/python" - "$folder/out" <<'P'
import json, pathlib, sys
from importlib.metadata import version

(path,) = pathlib.Path(sys.argv[1]).rglob("profile_export_aiperf.json")
result = json.loads(path.read_text())
answered = int(result["request_count"]["avg"])
errors = {each["error_details"]["type"]: each["count"] for each in result.get("error_summary") or []}
assert answered > 0 and sum(errors.values()) > 0, (answered, errors)
assert all("Cancel" in kind for kind in errors), errors
print(f"aiperf {version('aiperf')}: {answered} answered, {sum(errors.values())} cancelled")
P
