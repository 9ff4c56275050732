"""The numbers of an adapter (LoRA), as an engine would compute with them: all must be finite."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from safetensors import safe_open
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from flying_serving.vllm_adapter.lora.files import CONFIG_FILE, AdapterFiles

_UNSCALED = 1.0


def why_not_finite(
    files: AdapterFiles, dtype: torch.dtype, stopped: Callable[[], bool]
) -> str | None:
    """Return which file and which tensor of an adapter has a number that is not finite in `dtype`
    after scaling, and the number. None if all are finite, or if stopped between two tensors.

    vLLM multiplies B by the scale (`lora_alpha` and the rank). A number that is not finite would be
    in the KV of the adapter's requests. On the CPU vLLM computes with what earlier requests have
    left in a block: other requests would get wrong tokens.

    Files that are wrong in another way, or pickled, are left to the engines: see
    `why_loaded_not_finite`.
    """
    path = files.folder / files.weights
    with suppress(Exception):
        scales = PEFTHelper.from_local_dir(str(files.folder), None)
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if stopped():
                    return None
                scale = _scale(scales, name)
                numbers = opened.get_tensor(name).to(dtype)
                value = _first_not_finite(numbers if scale == _UNSCALED else numbers * scale)
                if value is not None:
                    scaled = f" after scaling by {scale:g} ({CONFIG_FILE}, lora_alpha)"
                    return (
                        f"{path.name}: {name} has {value:g}{scaled if scale != _UNSCALED else ''}: "
                        f"must be finite in {str(dtype).removeprefix('torch.')}"
                    )
    return None


def why_loaded_not_finite(adapter: Any, file: str) -> str | None:
    """Return which layer of a loaded adapter (vLLM's LoRAModel, scaled) has a number that is not
    finite, and the number. None if all are finite.

    `file`: the name of its file of weights.
    """
    for name, layer in adapter.loras.items():
        for part, of_layer in (("A", layer.lora_a), ("B", layer.lora_b)):
            for tensor in of_layer if isinstance(of_layer, list) else [of_layer]:
                value = None if tensor is None else _first_not_finite(tensor)
                if value is not None:
                    return (
                        f"{file}: {part} of {name} has {value:g} after scaling: "
                        f"must be finite in {str(tensor.dtype).removeprefix('torch.')}"
                    )
    return None


def _scale(scales: PEFTHelper, name: str) -> float:
    """Return the factor by which vLLM multiplies a tensor."""
    module, is_a = parse_fine_tuned_lora_name(name)
    if is_a or module in (scales.modules_to_save or ()):
        return _UNSCALED
    return float(scales.get_rank_and_scaling(module)[1])


def _first_not_finite(numbers: torch.Tensor) -> float | None:
    wrong = numbers[~numbers.isfinite()]
    return float(wrong[0]) if wrong.numel() else None
