#!/usr/bin/env bash
# Sets up .venv if needed, then runs the tests. Arguments go to pytest, for example:
#   bash scripts/test.sh tests/kvcache        bash scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_WAIT_POLICY=PASSIVE # tests share the cores with actors
exec .venv/bin/python -m pytest "$@"
