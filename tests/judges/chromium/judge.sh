#!/bin/bash
# A page in Chromium that reads a stream with fetch, through nginx with default buffering: judge.sh URL
set -euo pipefail
here=$(dirname "$0")
. "$here/../nginx/start.sh"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
    { echo 'skipped: install chromium (Debian: apt-get install chromium)'; exit 77; }
folder=$(mktemp -d)
trap 'stop_nginx "$folder"' EXIT
cp "$here/page.html" "$folder/page.html"
proxy=$(start_nginx "$1" "$folder") || { code=$?; echo "$proxy"; exit $code; }
python3 "$here/drive.py" "$chromium" "$proxy/page.html"
