"""The kernels compute the same bits on every instruction set, ARM's included.

Slow: compiles all forward kernels once for each. ARM needs `aarch64-linux-gnu-g++` and
`qemu-aarch64` (Debian: g++-aarch64-linux-gnu, qemu-user) and is skipped without them.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import attention.native
import rollout.model.native
from attention.native.build import FLAGS, find_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the other builds are for x86"),
]

HERE = Path(__file__).parent
DECODER, ATTENTION = (Path(m.__path__[0]) for m in (rollout.model.native, attention.native))
SOURCES = [
    HERE / "bits.cpp",
    ATTENTION / "forward.cpp",
    *(DECODER / f"{name}.cpp" for name in ("linear", "rows", "vocabulary")),
]
ARM_COMPILER, ARM_MACHINE = "aarch64-linux-gnu-g++", "qemu-aarch64"


def checksums(folder: Path, compiler: str, flags: list[str], runner: tuple[str, ...] = ()) -> str:
    program = folder / "bits"
    command = [compiler, *FLAGS, *flags, f"-I{HERE.parents[1]}", *map(str, SOURCES)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=300)
    done = subprocess.run(
        [*runner, str(program)], check=True, timeout=300, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def scalar(tmp_path_factory) -> str:
    """From plain C++, one float after the other."""
    return checksums(tmp_path_factory.mktemp("scalar"), find_compiler(), ["-mfma"])


def test_this_machine(scalar, tmp_path):
    flags = ["-march=native", "-mprefer-vector-width=512"]
    assert checksums(tmp_path, find_compiler(), flags) == scalar


def test_avx2(scalar, tmp_path):
    assert checksums(tmp_path, find_compiler(), ["-mavx2", "-mfma"]) == scalar


def test_arm(scalar, tmp_path):
    for needed in (ARM_COMPILER, ARM_MACHINE):
        if shutil.which(needed) is None:
            pytest.skip(f"no {needed} here")
    flags = ["-mcpu=neoverse-n1", "-static"]
    assert checksums(tmp_path, ARM_COMPILER, flags, (ARM_MACHINE,)) == scalar


def test_another_order_of_sums_shows(scalar, tmp_path):
    """The control: contraction of products and sums changes bits, and is seen."""
    flags = ["-march=native", "-ffp-contract=fast"]
    assert checksums(tmp_path, find_compiler(), flags) != scalar
