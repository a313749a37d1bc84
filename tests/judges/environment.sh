# For judges that live in an environment of their own: `environment NAME REQUIREMENT...` makes it once and prints its bin.
# uv makes it, in seconds where pip takes minutes. What cannot be installed ends the judge with 77, and it says why.
environment() {
    local place=$JUDGES/$1 log=$JUDGES/$1.install
    if [ "$(cat "$place/.holds" 2>/dev/null)" != "$*" ]; then
        if ! _make_environment "$place" "${@:2}" >"$log" 2>&1; then
            cat "$log" >&2
            echo "skipped: $1 cannot be installed: $(grep -v '^ *$' "$log" | tail -2 | tr -s ' \n' ' ')" >&2
            return 77
        fi
        echo "$*" >"$place/.holds"
    fi
    echo "$place/bin"
}

_make_environment() {
    local place=$1 python=${JUDGE_PYTHON:-$SERVER_PYTHON} uv=$JUDGES/uv/bin/uv without=()
    shift
    [ -x "$uv" ] || { "$SERVER_PYTHON" -m venv --clear "$JUDGES/uv" &&
        "$JUDGES/uv/bin/pip" install --quiet --no-input --disable-pip-version-check uv==0.13.9; } || return 1
    "$uv" venv --quiet --clear --python "$python" "$place" || return 1
    if [ -n "${WITH_TORCH-}" ]; then
        # Torch is large, and the index may have it with CUDA only: it is taken from where pdserve runs.
        echo torch >"$place/without" && without=(--excludes "$place/without")
        _packages "$SERVER_PYTHON" >"$(_packages "$place/bin/python")/torch_of_pdserve.pth"
    fi
    "$uv" pip install --quiet --python "$place/bin/python" "${without[@]}" "$@"
}

_packages() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Print the first Python of 3.12 or newer that runs, for a name on the path may be only a shim; else what uv is to look for.
newer_python() {
    local each
    for each in python3.12 python3.13 python3.14 ~/.pyenv/versions/3.1[2-9]*/bin/python3; do
        "$each" -c 'import sys; assert sys.version_info >= (3, 12)' 2>/dev/null && echo "$each" && return
    done
    echo 3.12
}
