#!/bin/bash
# Requests made up from /openapi.json, valid and not: no 5xx, no status and no body that is not described: judge.sh URL
# Bodies that a schema allows may still be refused (a temperature of 9 is a number), so that this one check is left out.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../environment.sh"
bin=$(environment schemathesis schemathesis==4.32.5)
cd "$JUDGES"  # it leaves its cache where it runs
PYTHONPATH=$here SCHEMATHESIS_HOOKS=hooks "$bin/schemathesis" run "$1/openapi.json" --phases examples,coverage,fuzzing -n 25 --workers 1 --seed 1 \
    --request-timeout 120 --exclude-checks positive_data_acceptance --no-color >"$JUDGES/schemathesis.log" 2>&1 ||
    { cat "$JUDGES/schemathesis.log"; exit 1; }
echo "$(grep -o 'Schemathesis v[0-9.]*' "$JUDGES/schemathesis.log" | head -1): $(grep -o '[0-9]* generated, .*' "$JUDGES/schemathesis.log")"
