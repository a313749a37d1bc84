#!/bin/bash
# A fetch stream through nginx, which buffers by default: judge.sh URL
set -euo pipefail
here=$(dirname "$0")
. "$here/start.sh"
command -v node >/dev/null || { echo 'skipped: install node (Debian: apt-get install nodejs)'; exit 77; }
folder=$(mktemp -d)
trap 'stop_nginx "$folder"' EXIT
proxy=$(start_nginx "$1" "$folder") || { code=$?; echo "$proxy"; exit $code; }
echo "$(PATH=$PATH:/usr/sbin nginx -v 2>&1 | grep -o 'nginx/[0-9.]*'), node $(node --version): $(node "$here/fetch.mjs" "$proxy")"
