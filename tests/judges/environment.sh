# For judges that live in an environment of their own: `environment NAME REQUIREMENT...` makes it once and prints its bin.
environment() {
    local place=$JUDGES/$1 python=${JUDGE_PYTHON:-python3}
    shift
    if [ "$(cat "$place/.holds" 2>/dev/null)" != "$*" ]; then
        "$python" -m venv --clear "$place" >&2 &&
            "$place/bin/pip" install --quiet --no-input --disable-pip-version-check "$@" >&2 &&
            echo "$*" >"$place/.holds" || return 1
    fi
    echo "$place/bin"
}

# Print the first Python of 3.12 or newer that runs: a name on the path may be only a shim.
newer_python() {
    local each
    for each in python3.12 python3.13 python3.14 ~/.pyenv/versions/3.1[2-9]*/bin/python3; do
        "$each" -c 'import sys, venv; assert sys.version_info >= (3, 12)' 2>/dev/null && echo "$each" && return
    done
    return 1
}
