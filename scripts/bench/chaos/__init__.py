"""The fault harness; `python -m scripts.bench.chaos`."""
