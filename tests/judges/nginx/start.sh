# `start_nginx URL FOLDER` proxies URL as a distribution would, and prints its own address; PAGE in FOLDER is served too.
start_nginx() {
    local url=$1 folder=$2 port nginx
    nginx=$(command -v nginx || ls /usr/sbin/nginx 2>/dev/null) || { echo 'skipped: install nginx (Debian: apt-get install nginx)'; return 77; }
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    chmod 755 "$folder" # its workers may be another user
    sed -e "s#FOLDER#$folder#; s#PORT#$port#; s#URL#$url#" "$(dirname "${BASH_SOURCE[0]}")/nginx.conf" >"$folder/nginx.conf"
    "$nginx" -c "$folder/nginx.conf" -g 'daemon on;' 2>>"$folder/error.log"
    for _ in $(seq 100); do
        [ -s "$folder/pid" ] && break
        sleep 0.1
    done
    echo "http://127.0.0.1:$port"
}

# `stop_nginx FOLDER` ends it and leaves nothing.
stop_nginx() {
    [ ! -s "$1/pid" ] || kill "$(cat "$1/pid")" 2>/dev/null || true
    rm -rf "$1"
}
