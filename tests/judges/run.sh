#!/bin/bash
# Serves the demo model on a free port and lets the judges judge it: run.sh PDSERVE FOLDER [JUDGE...]
# FOLDER holds a virtual environment for each judge that needs one. A judge that ends with 77 was skipped, and says why.
set -euo pipefail
pdserve=$1 environments=$2 here=$(dirname "$0") folder=$(mktemp -d) server=''
shift 2
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$folder"' EXIT
# What is judged is on this machine, and no proxy of yours is asked for it.
export no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost" NO_PROXY="${NO_PROXY:+$NO_PROXY,}127.0.0.1,localhost"
export JUDGES=$environments SERVER_PYTHON MODEL_DIR
SERVER_PYTHON=$(cd "$(dirname "$pdserve")" && pwd)/python
MODEL_DIR=$("$pdserve" models fetch)
# A busy machine is waited for: it is not judged. Threads that wait for each other do not spin, for others need the cores,
# and a first token that is estimated far away is not refused.
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0
"$pdserve" serve --port 0 --max-ttft-s 3600 >"$folder/log" 2>&1 & server=$!
for _ in $(seq 600); do
    url=$(grep -o 'http://127.0.0.1:[0-9]*' "$folder/log" | head -1 || true)
    [ -n "$url" ] && curl -sf "$url/ready" >/dev/null && break
    kill -0 "$server" || { cat "$folder/log"; exit 1; }
    sleep 0.5
done
curl -sf "$url/ready" >/dev/null || { echo 'not ready in time:' >&2; cat "$folder/log" >&2; exit 1; }
export MODEL
MODEL=$(curl -sf "$url/v1/models" | sed 's/.*"id":"\([^"]*\)".*/\1/')
[ $# -gt 0 ] || set -- clients node frameworks nginx chromium schemathesis aiperf guidellm inference_perf bench_serve lm_eval
failed=() passed=() skipped=()
for judge in "$@"; do
    code=0 began=$SECONDS
    timeout --kill-after=10 1800 "$here/$judge/judge.sh" "$url" >"$folder/$judge" 2>&1 || code=$?
    case $code in
        0) passed+=("$judge"); sed "s/^/$judge | /" <(grep -Ev '^(WARNING|$)' "$folder/$judge" | tail -5) ;;
        77) skipped+=("$judge"); sed "s/^/$judge | /" <(tail -1 "$folder/$judge") ;;
        *) failed+=("$judge"); sed "s/^/$judge | /" "$folder/$judge"; echo "$judge | FAILED with $code" ;;
    esac
    echo "$judge | $((SECONDS - began)) s"
done
python3 "$here/conservation.py" "$url" || failed+=(conservation)
kill -0 "$server" || failed+=(server)
echo "passed: ${passed[*]-}${failed[*]+; FAILED: ${failed[*]}}${skipped[*]+; not judged: ${skipped[*]}}"
[ ${#failed[@]} -eq 0 ]
