"""Files of adapters: copied once, with a digest of what was copied, and checked for numbers that
are not finite.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest

from flying_lab.tiny_models.adapters import ALPHA, RANK, make_adapter
from flying_serving.vllm_adapter.lora import files as adapter_files
from flying_serving.vllm_adapter.lora.files import (
    CONFIG_FILE,
    WEIGHT_FILES,
    AdapterNotLoaded,
    copied,
)
from flying_serving.vllm_adapter.lora.numbers import why_not_finite

WEIGHTS = WEIGHT_FILES[0]
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", "llama", seed=1)


def request(folder: Path) -> LoRARequest:
    return LoRARequest("later", 3, str(folder))


def digest(folder: Path) -> str:
    with copied(request(folder), str(folder.parent)) as files:
        return files.digest


def never() -> bool:
    return False


def test_copies_stay_as_they_are_when_the_files_change(folder: Path) -> None:
    before = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    with copied(request(folder), str(folder.parent)) as files:
        (folder / WEIGHTS).write_bytes(b"")
        (folder / CONFIG_FILE).unlink()
        copy = load_file(files.folder / files.weights)
        assert json.loads((files.folder / CONFIG_FILE).read_text())["r"] == RANK
    # what is mapped of them stays
    assert all(torch.equal(copy[name], tensor) for name, tensor in before.items())
    assert not files.folder.exists()


def test_copies_leave_nothing_open(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    digest(folder)
    assert set(os.listdir("/proc/self/fd")) == before
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS])
def test_the_digest_is_of_all_that_is_loaded(folder: Path, name: str) -> None:
    before = digest(folder)
    (folder / "README.md").write_text("other files do not count")
    assert digest(folder) == before
    with (folder / name).open("ab") as opened:
        opened.write(b" ")
    assert digest(folder) != before


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_the_weights_are_those_that_vllm_takes(tmp_path: Path, name: str) -> None:
    (tmp_path / CONFIG_FILE).write_text("{}")
    for later in WEIGHT_FILES[WEIGHT_FILES.index(name) :]:
        (tmp_path / later).touch()
    with copied(request(tmp_path), str(tmp_path)) as files:
        assert files.weights == name


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    """Before any other file of it is read."""
    (tmp_path / WEIGHTS).touch()
    with pytest.raises(LoRAAdapterNotFoundError), copied(request(tmp_path), str(tmp_path)):
        pass
    (tmp_path / CONFIG_FILE).touch()
    (tmp_path / WEIGHTS).unlink()
    with (
        pytest.raises(AdapterNotLoaded, match="adapter 'later': its folder has none of adapter_mo"),
        copied(request(tmp_path), str(tmp_path)),
    ):
        pass


def test_a_file_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{}")
    with (tmp_path / WEIGHTS).open("wb") as opened:
        opened.truncate(2**43)
    says = rf"^adapter 'later': {WEIGHTS} has {2**43} bytes: must be at most {2**33}$"
    with pytest.raises(AdapterNotLoaded, match=says), copied(request(tmp_path), str(tmp_path)):
        pass


def test_a_read_stops_at_the_next_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_PIECE_BYTES", 64)
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) == 3

    with (
        pytest.raises(AdapterNotLoaded, match="not read in time"),
        copied(request(folder), str(folder.parent), stopped),
    ):
        pass
    assert len(asked) == 3


# ---- numbers that are not finite


def change(folder: Path, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {NAME: changed(tensors[NAME].clone())}, folder / WEIGHTS)


def why(folder: Path, dtype: torch.dtype = torch.float32) -> str | None:
    with copied(request(folder), str(folder.parent)) as files:
        return why_not_finite(files, dtype, never)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_numbers_are_no_problem(folder: Path, dtype: torch.dtype) -> None:
    assert why(folder, dtype) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_named(folder: Path, value: float) -> None:
    def one(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, 1] = value
        return tensor

    change(folder, one)
    assert why(folder) == (
        f"{WEIGHTS}: {NAME} has {value:g} after scaling by {ALPHA / RANK:g} ({CONFIG_FILE}, "
        "lora_alpha): must be finite in float32"
    )


def test_a_is_not_scaled(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    a = NAME.replace("lora_B", "lora_A")
    save_file(tensors | {a: tensors[a] * float("nan")}, folder / WEIGHTS)
    assert why(folder) == f"{WEIGHTS}: {a} has nan: must be finite in float32"


def test_numbers_count_after_scaling_in_the_engines_type(folder: Path) -> None:
    change(folder, lambda tensor: tensor * 0 + 40_000)
    assert why(folder) is None
    said = why(folder, torch.float16)
    assert said is not None
    assert f"{NAME} has inf after scaling by 2" in said


@pytest.mark.parametrize("alpha", [1e300, float("nan"), float("inf")])
@pytest.mark.parametrize("of", ["lora_alpha", "alpha_pattern"])
def test_a_scale_that_is_not_finite_is_named(folder: Path, alpha: float, of: str) -> None:
    settings = json.loads((folder / CONFIG_FILE).read_text())
    settings |= {of: alpha if of == "lora_alpha" else {"q_proj": alpha}}
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    said = why(folder)
    assert said is not None
    assert f"after scaling by {alpha / RANK:g} ({CONFIG_FILE}, lora_alpha)" in said


def test_files_that_are_wrong_in_another_way_are_left_to_engines(folder: Path) -> None:
    (folder / CONFIG_FILE).write_text("{}")
    assert why(folder) is None
    (folder / WEIGHTS).write_bytes(b"no safetensors")
    assert why(folder) is None
