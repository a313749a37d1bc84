#!/bin/bash
# guidellm, streams at a fixed concurrency: judge.sh URL
set -euo pipefail
. "$(dirname "$0")/../environment.sh"
bin=$(WITH_TORCH=1 environment guidellm guidellm==0.8.1)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
timeout 300 "$bin/guidellm" run --backend "kind=openai_http,target=$1,model=$MODEL" --profile kind=concurrent,streams=4 \
    --constraint kind=max_requests,count=12 --tokenizer "kind=hf_auto,model=$MODEL_DIR" \
    --data kind=synthetic_text,prompt_tokens=32,output_tokens=12 --output "kind=json,path=$folder/out.json" \
    --disable-console-interactive >"$JUDGES/guidellm.log" 2>&1 || { tail -40 "$JUDGES/guidellm.log"; exit 1; }
"$bin/python" - "$folder/out.json" <<'P'
import json, sys
from importlib.metadata import version

totals = json.load(open(sys.argv[1]))["benchmarks"][0]["metrics"]["request_totals"]
assert totals["successful"] > 0 and totals["errored"] == 0, totals
print(f"guidellm {version('guidellm')}: {totals['successful']} of {totals['total']} answered, none failed")
P
