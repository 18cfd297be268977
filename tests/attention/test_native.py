"""The C++ kernels' build: cached, safe side by side, done without, clean under the sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from attention import AttentionMetadata, PackedAttention
from attention.native import BuildFailed, build, load_library
from attention.native.backend import NativeAttention
from attention.native.kernels import SIMD, SOURCES

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def source(folder: Path, text: str) -> Path:
    path = folder / "kernel.cpp"
    path.write_text(text)
    return path


def test_a_library_is_compiled_once_and_again_when_anything_changes(tmp_path):
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    cache = tmp_path / "cache"
    assert load_library("x", [path], cache=cache).answer() == 42
    made = {file: file.stat().st_mtime_ns for file in cache.glob("*.so")}
    assert len(made) == 1
    load_library("x", [path], cache=cache)
    assert {file: file.stat().st_mtime_ns for file in cache.glob("*.so")} == made
    load_library("x", [path], flags=["-O1"], cache=cache)
    header = tmp_path / "some.h"
    header.write_text("")
    load_library("x", [path], [header], cache=cache)
    path.write_text('extern "C" int answer() { return 43; }')
    assert load_library("x", [path], cache=cache).answer() == 43
    assert len(list(cache.glob("*.so"))) == 4
    assert not [p for p in cache.iterdir() if p.suffix not in (".so", ".lock")]


def test_what_goes_wrong_is_said(tmp_path, monkeypatch):
    with pytest.raises(BuildFailed, match=r"kernel\.cpp"):
        load_library("x", [source(tmp_path, "this is not C++")], cache=tmp_path)
    fine = source(tmp_path, 'extern "C" int answer() { return 42; }')
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildFailed, match="cannot be written"):
        load_library("x", [fine], cache=blocked)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler found"):
        load_library("x", [fine], cache=tmp_path)


def test_several_processes_may_build_at_once(tmp_path):
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    code = (
        "import sys; from pathlib import Path; from attention.native import load_library; "
        f"sys.exit(load_library('x', [Path({str(path)!r})], cache=Path({str(tmp_path)!r}))"
        ".answer() != 42)"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_one_openmp_runtime():
    """A second one would have a second team of threads, and `set_num_threads` would miss it."""
    NativeAttention()
    runtime = build.openmp_runtime()
    if runtime is None:
        pytest.skip("torch has no OpenMP runtime here that the kernels could share")
    maps = Path("/proc/self/maps").read_text()
    files = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "iomp" in line}
    assert files == {str(runtime)}


WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(format="LOGGED %(message)s")
from rollout import RolloutEngine
from tests.models import tiny_model
from trainer_bridge import score
model = tiny_model()
engine = RolloutEngine(model, max_batch_size=4)
rollouts = engine.run_batch([[3, 4, 5]], n=3, max_tokens=9, return_details=True)
print(model.operators.name, engine.backend_name)
for r, s in zip(rollouts, score(model, rollouts), strict=True):
    assert r.logprobs == s.tolist()
"""


def test_without_a_compiler_the_portable_road_is_taken(tmp_path):
    """One log line, and log-probs that are the trainer's all the same."""
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["portable", "tiled"]
    assert done.stderr.count("LOGGED") == 1
    assert "no native kernels" in done.stderr and "compiler" in done.stderr


def test_what_it_does_not_serve_is_refused():
    metadata = AttentionMetadata.packed([3])
    q = torch.randn(3, 2, 40)
    with pytest.raises(ValueError, match=r"multiple of 16.*tiled"):
        PackedAttention(metadata, NativeAttention(), 1, CPU).attend(0, q, q, q)
    q = torch.randn(3, 2, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="fp32"):
        PackedAttention(metadata, NativeAttention(), 1, CPU).attend(0, q, q, q)


def test_slots_shared_without_a_shared_beginning_have_no_gradient():
    """Two threads would add to the same gradient; no pack of rollouts is like that."""
    table = np.array([[0, 1], [2, 1]])
    metadata = AttentionMetadata(np.array([0, 2, 3]), np.array([2, 2]), table, 1)
    q = torch.randn(3, 1, 16, requires_grad=True)
    out = PackedAttention(metadata, NativeAttention(), 1, CPU).attend(0, q, q, q)
    with pytest.raises(ValueError, match="share their first slot"):
        out.sum().backward()


@pytest.mark.parametrize("flags", [["-mavx2", "-mfma"], []], ids=["avx2", "scalar"])
def test_every_instruction_set_gives_the_same_bits(flags, tmp_path, monkeypatch):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("the other builds are for x86")
    q, k, v = torch.randn(70, 6, 48), torch.randn(70, 2, 48), torch.randn(70, 2, 48)
    metadata = AttentionMetadata.packed([1, 33, 36])

    def attended() -> torch.Tensor:
        return PackedAttention(metadata, NativeAttention(), 3, CPU).attend(0, q, k, v)

    native = attended()
    try:
        other = load_library("attention", SOURCES, flags=flags, cache=tmp_path)
    except BuildFailed as error:
        pytest.skip(f"this compiler does not make it: {error}")
    original = build_functions(other)
    monkeypatch.setattr("attention.native.backend.library", lambda: original)
    assert torch.equal(attended(), native)


def build_functions(library):
    """Another build, with the argument types of the one in use."""
    from attention.native.kernels import library as in_use

    for name in ("attend", "store_step", "attend_backward"):
        getattr(library, name).argtypes = getattr(in_use(), name).argtypes
        getattr(library, name).restype = None
    return library


@pytest.mark.slow
def test_the_sanitizers_find_nothing(tmp_path):
    """Every kernel, built with AddressSanitizer and UndefinedBehaviorSanitizer, on odd shapes."""
    compiler = build.find_compiler()
    preload = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(preload).is_absolute():
        pytest.skip(f"{compiler} has no AddressSanitizer")
    kernels = sorted((ROOT / "rollout/model/native").glob("*.cpp"))
    for number, sources in enumerate((SOURCES, kernels)):
        subprocess.run(
            [
                compiler, "-g", "-O1", "-std=c++17", "-fPIC", "-shared", "-w", "-march=native",
                "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                *map(str, sources), "-o", str(tmp_path / f"{number}.so"),
            ],
            check=True,
        )  # fmt: skip
    assert SIMD.exists()
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/attention/drive_kernels.py"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
