#!/usr/bin/env bash
# Sets up .venv if needed, then trains the embedded policy: 1 trainer and 2 rollout actors.
# Arguments are passed on to the recipe, for example: bash scripts/quickstart.sh --seed 1
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec .venv/bin/python -m recipes.grpo --config recipes/configs/grpo_embedded.yaml "$@"
