"""Pack vLLM's CUDA build for a machine without a network, and unpack it there.

python -m supply.pack pack DIR
python -m supply.pack unpack DIR DEST   there, in this project's folder; then PYTHONPATH=DEST

The machine has x86-64 Linux, Python 3.12, torch 2.11 for CUDA 13 with Triton, and an H100 or H200.
DIR gets archives of 50 MB at most, each of use by itself; `2-moe` only for models with experts. The
wheels are those of pip's configured indexes.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from supply.fatbin import empty_others

VLLM = "vllm==0.32.0"
WHEELS = Path(__file__).with_name("cuda_wheels.txt")
"""Packages that serving needs beside those of such a machine, each with its version."""
GLIBCS = (39, 34, 31, 28, 27, 24, 17)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBCS),
    *("manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64"),
    *("manylinux_2_5_x86_64", "manylinux1_x86_64", "any"),
)
OPS, MOE, PYTHON, OTHERS = "1-ops", "2-moe", "3-python", "4-wheels"
MOST_BYTES = 50_000_000
"""Of an archive: one travels with this project's folder, some 67 MB together."""
HOPPER = 90
"""The architecture of the GPU. Libraries have no code for others left (`supply/fatbin.py`)."""
NOT_NEEDED = ("_vllm_fa2_C", "_flashkda_C", "_flashmla", "_qutlass", "_deepselect")
"""In the names of libraries that are left out: other attention kernels than FA3 and Triton, and
quantized products.
"""
LEFT_OUT = ("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/vllm-rs")
"""Beginnings of names that are left out: products that are not used, attention for another
architecture, and a front end in Rust, which is asked for by a variable.
"""


def archive_of(name: str) -> str | None:
    """Return the archive of a file of vLLM's wheel; None if it is left out."""
    if "_moe_C_stable_libtorch" in name:
        return MOE
    if "_C_stable_libtorch" in name:
        return OPS
    left_out = name.endswith(".so") and any(part in name for part in NOT_NEEDED)
    return None if left_out or name.startswith(LEFT_OUT) else PYTHON


def fetch(folder: Path, pin: str) -> Path:
    """Download the wheel of a pin for the machine. Raises CalledProcessError if there is none."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*command, f"--dest={folder}", pin], check=True)
    (wheel,) = folder.iterdir()
    return wheel


def pack_vllm(wheel: Path, folder: Path) -> None:
    """Write vLLM's three archives from its wheel."""
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as contents:
        contents.extractall(unpacked)
        for library in Path(unpacked).rglob("*.so"):
            code = bytearray(library.read_bytes())
            if empty_others(code, HOPPER):
                library.write_bytes(code)
        names = [name for name in contents.namelist() if not name.endswith("/")]
        for archive in (OPS, MOE, PYTHON):
            chosen = [name for name in names if archive_of(name) == archive]
            write(folder, archive, Path(unpacked), chosen)


def write(folder: Path, archive: str, root: Path, names: Sequence[str]) -> None:
    """Write an archive of files by their names below `root`.

    Raises:
        ValueError: if it is larger than MOST_BYTES.
    """
    path = folder / f"{archive}.tar.xz"
    with tarfile.open(path, "w:xz") as made:
        for name in names:
            made.add(root / name, name)
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{path} has {size / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:g} fit")


def pack(folder: Path) -> Iterator[str]:
    """Write all archives. Yields the pins for which there is no wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pack_vllm(fetch(Path(scratch, "vllm"), VLLM), folder)
        wheels = []
        for number, pin in enumerate(WHEELS.read_text(encoding="utf-8").split()):
            try:
                wheels.append(fetch(Path(scratch, str(number)), pin))
            except subprocess.CalledProcessError:
                yield pin
        names = [str(wheel.relative_to(scratch)) for wheel in wheels]
        write(folder, OTHERS, Path(scratch), names)


def unpack(folder: Path, target: Path) -> None:
    """Unpack the archives that are in the folder; also when others are there already.

    All of it is compiled to bytecode, which each of many processes would do otherwise.
    """
    target.mkdir(parents=True, exist_ok=True)
    for archive in (OPS, MOE, PYTHON):
        if (packed := folder / f"{archive}.tar.xz").exists():
            with tarfile.open(packed) as contents:
                contents.extractall(target, filter="data")
    if (packed := folder / f"{OTHERS}.tar.xz").exists():
        with tempfile.TemporaryDirectory() as scratch, tarfile.open(packed) as contents:
            contents.extractall(scratch, filter="data")
            wheels = sorted(map(str, Path(scratch).rglob("*.whl")))
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            command += ["--no-compile", "--upgrade", f"--target={target}"]
            subprocess.run([*command, *wheels], check=True)
    # some files of packages are templates, or for other versions of Python: these fail
    compiles = [sys.executable, "-m", "compileall", "-qq", "-j", "0", str(target)]
    subprocess.run(compiles, check=False)


def main() -> int:
    """Returns 1 if a wheel is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("pack").add_argument("folder", type=Path)
    there = commands.add_parser("unpack")
    there.add_argument("folder", type=Path)
    there.add_argument("target", type=Path)
    options = parser.parse_args()
    if options.command == "unpack":
        unpack(options.folder, options.target)
        return 0
    missing = list(pack(options.folder))
    for pin in missing:
        print(f"no wheel for {pin}", file=sys.stderr)
    for archive in sorted(options.folder.glob("*.tar.xz")):
        print(f"{archive.stat().st_size / 1e6:7.1f} MB {archive.name}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
