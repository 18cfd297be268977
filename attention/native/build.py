"""Compiles C++ sources of this repository into a shared library, once per machine, and loads it.

A library is cached by everything its bits depend on: sources, headers, compiler, flags, CPU. It
needs a C++17 compiler and nothing else: no torch headers, so building takes seconds and pulls no
package. Loops run on the OpenMP runtime that torch has loaded: the library is linked to that very
file, so the process has one team of threads and `torch.set_num_threads` holds for both.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch  # loads the OpenMP runtime that the library is linked to

logger = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w")
TIMEOUT_S = 120


class BuildFailed(RuntimeError):
    """No library could be made; the message says why. The portable operations do without it."""


def load_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    *,
    flags: Sequence[str] | None = None,
    cache: Path | None = None,
) -> ctypes.CDLL:
    """The library of these sources, compiled if no cached one fits.

    flags: in place of those for this machine's CPU (`native_flags()`). cache: folder, default
    `default_cache()`. Raises `BuildFailed`. Safe to call from several processes at once.
    """
    compiler = find_compiler()
    options = [*FLAGS, *(native_flags() if flags is None else flags)]
    runtime = openmp_runtime()
    if runtime is not None:
        options.append("-fopenmp")
    key = _key(compiler, options, runtime, [*sources, *headers])
    folder = default_cache() if cache is None else cache
    path = folder / f"{name}-{key}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for it
            if not path.exists():
                _compile(compiler, options, runtime, sources, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"{path} cannot be written or loaded: {error}") from error


def find_compiler() -> str:
    """`$CXX` or the first C++ compiler of the machine; `BuildFailed` if there is none."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildFailed(f"no C++ compiler found ({', '.join(COMPILERS)}; $CXX names another)")


def native_flags() -> list[str]:
    """What makes the compiler use this CPU's vector instructions."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"] if machine in ("aarch64", "arm64") else []


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/lockstep` or `~/.cache/lockstep`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lockstep"


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded into this process; None where it has none.

    Only those that understand GCC's entry points are of use: libgomp itself and libiomp5.
    """
    if not torch.backends.openmp.is_available():
        return None
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5)[^/\s]*\.so[^/\s]*)$", maps, re.M)))
    torch_folder = str(Path(torch.__file__).parent.parent)
    found.sort(key=lambda path: not path.startswith(torch_folder))
    return Path(found[0]) if found else None


def _key(compiler: str, options: list[str], runtime: Path | None, files: Sequence[Path]) -> str:
    hasher = hashlib.sha256()
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    for text in (version.stdout, *options, str(runtime), _cpu()):
        hasher.update(text.encode() + b"\0")
    for file in files:
        hasher.update(file.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def _cpu() -> str:
    """Model and instruction sets: `native` means something else on every CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(
    compiler: str,
    options: list[str],
    runtime: Path | None,
    sources: Sequence[Path],
    path: Path,
) -> None:
    """Compile the sources, all at once, and link them; `path` appears complete or not at all."""
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.mkdir()
    try:
        objects = [scratch / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *options, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        _run(commands)
        # Without -fopenmp at the link: it would add the compiler's own runtime, a second one.
        libraries = [] if runtime is None else [str(runtime)]
        made = scratch / path.name
        _run([[compiler, "-shared", *map(str, objects), *libraries, "-o", str(made)]])
        made.replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("compiled %s", path)


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; `BuildFailed` with the first one's complaint."""
    running = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for command in commands
    ]
    failed = []
    for process, command in zip(running, commands, strict=True):
        try:
            _, complaint = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            complaint = f"no result within {TIMEOUT_S} s"
            process.communicate()
        if process.returncode:
            failed.append(f"{' '.join(command)}: {complaint.strip()[-2000:]}")
    if failed:
        raise BuildFailed(failed[0])
