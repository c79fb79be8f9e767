# Sourced by scripts/run and scripts/test: leaves `corespan` installed, editable, in the active virtual environment, or in
# .venv of this checkout where none is active. Does nothing when what decides the installation has not changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# corespan_install EXTRAS: EXTRAS is "" or like "[dev]".
corespan_install() {
    local extras=$1 python stamp digest
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        [ -x "$root/.venv/bin/pip" ] || corespan_create_venv
        export VIRTUAL_ENV="$root/.venv"
    fi
    export PATH="$VIRTUAL_ENV/bin:$PATH"
    python="$VIRTUAL_ENV/bin/python"
    stamp="$VIRTUAL_ENV/.corespan-installed${extras//[\[\]]/-}"
    digest=$(corespan_digest)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then
        return
    fi
    echo "Installing corespan$extras into $VIRTUAL_ENV ..." >&2
    # Without the byte code of 18,000 modules: Python makes that of those it uses, when it first does.
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check --editable "$root$extras" >&2
    # An installation with extras is one without them too.
    echo "$digest" | tee "$stamp" >"$VIRTUAL_ENV/.corespan-installed"
}

corespan_create_venv() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "Creating $root/.venv with $("$candidate" --version) ..." >&2
            "$candidate" -m venv "$root/.venv"
            return
        fi
    done
    echo "corespan needs Python 3.11 or newer on PATH, with the venv module" >&2
    return 1
}

# What decides the installation: where it lies, how it is described, and the native sources.
corespan_digest() {
    {
        echo "$root"
        cat "$root/pyproject.toml" "$root/setup.py"
        find "$root/core/kernels" \( -name '*.cpp' -o -name '*.h' \) -print0 | sort -z | xargs -0 -r cat
    } | cksum
}
