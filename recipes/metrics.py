"""Metrics of a run: metrics.jsonl always, wandb beside it. Logging never ends a run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import wandb


class MetricsLog:
    """Writes one line per call to `<folder>/metrics.jsonl` and the same to wandb.

    Steps never go back: a smaller step than the last one is logged under the last one. A value
    that is not finite becomes null in the file. A sink that fails is reported once on
    stderr and dropped; `history` in memory keeps every record for the report. Close it, or use it
    as a context manager.

    keep: for a folder that holds a run already, how many of its records to keep; those after them
    are dropped, since they will be logged again. None = a new run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wandb_mode: Literal["offline", "online", "disabled"] = "offline",
        project: str = "lockstep",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        keep: int | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.history: list[dict[str, float]] = []
        self._last_step = 0
        self._warn = warn or warn_on_stderr
        self._path = folder / "metrics.jsonl"
        if keep is None:
            self._file = self._guard(f"cannot write {self._path}", self._append)
        else:
            self._guard(f"cannot read {self._path}", lambda: self._read(keep))
            self._file = self._guard(f"cannot write {self._path}", self._rewrite)
        self._run: Any = None
        self._sent_step = -1  # to wandb
        if wandb_mode != "disabled":
            self._run = self._guard(
                "wandb does not start",
                lambda: _start_wandb(folder, wandb_mode, project, run_name, dict(config or {})),
            )
        for record in self.history:
            self._send(record)

    def rewind(self, keep: int) -> None:
        """Forget all but the first `keep` records: the rest will come again. Never raises.

        wandb cannot forget; there the repeated steps, which are equal, are not sent twice.
        """
        del self.history[keep:]
        self._last_step = int(self.history[-1]["step"]) if self.history else 0
        if self._file is not None:
            self._guard(f"cannot close {self._path}", self._file.close)
            self._file = self._guard(f"cannot write {self._path}", self._rewrite)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers (anything `float()` takes) under `step`. Never raises."""
        self._last_step = max(self._last_step, step)
        record = {"step": float(self._last_step)}
        for name, value in values.items():
            number = self._guard(f"metric {name!r} is not a number", partial(float, value))
            if number is not None:
                record[name] = number
        self.history.append(record)
        self._write(record)
        self._send(record)

    def log_table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Send a table to wandb, if that is on and not past `step` already. Never raises."""
        if self._run is None:
            return
        table = self._guard(
            f"{name!r} is no table",
            lambda: wandb.Table(
                columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True
            ),
        )
        if table is not None:
            self._send({"step": step, name: table})

    def series(self, name: str) -> list[tuple[int, float]]:
        """`(step, value)` of every finite record of one metric, in order."""
        return [
            (int(record["step"]), record[name])
            for record in self.history
            if name in record and math.isfinite(record[name])
        ]

    def close(self, exit_code: int = 0) -> None:
        """Flush and close both sinks. Never raises; a second call does nothing."""
        if self._file is not None:
            self._guard("cannot close metrics.jsonl", self._file.close)
            self._file = None
        if self._run is not None:
            run, self._run = self._run, None
            self._guard("wandb does not finish", lambda: run.finish(exit_code=exit_code))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(exit_code=0 if error[0] is None else 1)

    def _read(self, keep: int) -> None:
        """The first records of the run in this folder."""
        for line in self._path.read_text(encoding="utf-8").splitlines()[:keep]:
            record = json.loads(line)
            self.history.append({k: math.nan if v is None else v for k, v in record.items()})
            self._last_step = int(record["step"])

    def _append(self) -> Any:
        return self._path.open("a", encoding="utf-8")

    def _rewrite(self) -> Any:
        """The file with what `history` holds, replaced as a whole."""
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(map(_line, self.history)), encoding="utf-8")
        partial.rename(self._path)
        return self._append()

    def _send(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        if self._run is None or step < self._sent_step:
            return
        self._sent_step = step
        values = {name: value for name, value in record.items() if name != "step"}
        sent = self._guard("wandb stopped logging", lambda: (self._run.log(values, step=step), 1))
        if sent is None:
            self._run = None

    def _write(self, record: Mapping[str, float]) -> None:
        if self._file is None:
            return
        file = self._file
        written = self._guard(
            f"cannot write {file.name}; later metrics go to the report only",
            lambda: (file.write(_line(record)), file.flush(), True),
        )
        if written is None:
            self._file = None

    def _guard(self, what: str, action: Callable[[], Any]) -> Any:
        """The action's result, or None after one warning: a logger's failure stays its own."""
        try:
            return action()
        except Exception as error:
            self._warn(f"{what} ({type(error).__name__}: {error}); the run goes on")
            return None


def _line(record: Mapping[str, float]) -> str:
    clean = {name: value if math.isfinite(value) else None for name, value in record.items()}
    return json.dumps({**clean, "step": int(record["step"])}) + "\n"


def _start_wandb(
    folder: Path, mode: str, project: str, run_name: str | None, config: dict[str, Any]
) -> Any:
    return wandb.init(
        mode=mode,  # type: ignore[arg-type]
        project=project,
        name=run_name,
        dir=str(folder),
        config=config,
        settings=wandb.Settings(silent=True),
    )


def warn_on_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
