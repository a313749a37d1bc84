#!/bin/bash
# The official JavaScript client: judge.sh URL
set -euo pipefail
command -v npm >/dev/null || { echo 'skipped: node and npm are not installed'; exit 77; }
mkdir -p "$JUDGES/node"
cp "$(dirname "$0")"/{package.json,check.mjs} "$JUDGES/node/"
cd "$JUDGES/node"
npm install --no-audit --no-fund --loglevel error >&2 || { echo "skipped: npm cannot install openai"; exit 77; }
node check.mjs "$1"
