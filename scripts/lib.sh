# Shared by demo.sh and test.sh (sourced, not run). Needs bash, Python >= 3.11 with venv, and, the
# first time, a package index. Every function may be run again: what is in place is kept.

set -euo pipefail

SCRIPT="$(cd "$(dirname "$0")" && pwd)/$(basename "$0")"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

# -h or --help prints the comment at the top of the calling script, before anything is installed.
show_help() {
    case " $* " in
    *" -h "* | *" --help "*)
        sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$SCRIPT" | grep -v '^shellcheck'
        exit 0
        ;;
    esac
}

fail() {
    echo "error: $*" >&2
    exit 1
}

# step "what" "how long" command...: say what runs and how long it may take, run it, say how long
# it took. The durations named in the scripts were measured on a 2-core machine without a GPU.
step() {
    local what="$1" duration="$2" started=$SECONDS
    shift 2
    echo
    echo "==> $what ($duration)"
    "$@"
    echo "    done in $((SECONDS - started)) s"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python"
}

# The active virtual environment is used as it is; otherwise .venv in the checkout. Sets BIN.
use_environment() {
    local home="${VIRTUAL_ENV:-$ROOT/.venv}"
    if [ ! -x "$home/bin/python" ]; then
        local python
        python="$(find_python)"
        "$python" -m venv "$home"
    fi
    BIN="$home/bin"
    "$BIN/python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
        fail "$home holds a Python older than 3.11; remove it or activate another environment"
    "$BIN/python" -m pip --version >/dev/null 2>&1 || "$BIN/python" -m ensurepip --upgrade >/dev/null
    echo "    $("$BIN/python" --version) in $home"
}

# install EXTRA: this checkout, editable, with one extra. uv because it is much faster than pip here.
install() {
    "$BIN/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.13'
    local flags=()
    [ -n "${SSL_CERT_FILE:-}" ] || flags+=(--system-certs)
    "$BIN/python" -m uv pip install --python "$BIN/python" "${flags[@]}" --editable ".[$1]"
}

# Without cached bytecode every process of every server compiles SGLang anew (36-51 s instead of
# 8-19 s), and uv leaves none behind where PYTHONDONTWRITEBYTECODE is set.
cache_bytecode() {
    local stamp="${BIN%/bin}/.vtoken-bytecode" state
    state="$("$BIN/python" -m uv pip freeze --python "$BIN/python" 2>/dev/null | sha256sum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
        echo "    in place"
        return
    fi
    CUDA_VISIBLE_DEVICES="" PYTHONDONTWRITEBYTECODE="" "$BIN/python" -W ignore -c '
import logging

logging.disable(logging.WARNING)
import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry'
    echo "$state" >"$stamp"
}
