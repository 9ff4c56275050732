"""The files of an adapter (LoRA), read once: what is hashed and checked is what is loaded."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from flying_serving.errors import AdapterNotLoaded

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files that may have an adapter's weights. vLLM takes the first one that is there."""
MOST_BYTES = 2**33
"""Most bytes of a file. An adapter of rank 256 of a model of 70 billion parameters has fewer."""
_PIECE_BYTES = 2**24


@dataclass(frozen=True)
class AdapterFiles:
    """A copy of an adapter's files in memory.

    `folder`: has the copies under their own names, while `copied` runs. `weights`: the name of the
    file with the weights. `digest`: of all bytes.
    """

    folder: Path
    weights: str
    digest: str


@contextmanager
def copied(
    adapter: LoRARequest, run_dir: str, stopped: Callable[[], bool] = lambda: False
) -> Iterator[AdapterFiles]:
    """Copy the files of an adapter that vLLM loads into memory. A hub's are fetched before.

    vLLM maps a file of weights, and reads it as it needs it. A file that is written to meanwhile
    would change the weights, and one that becomes shorter would end the process. The copies are of
    this process alone. What is mapped of them stays when they have gone.

    `stopped`: asked between two pieces whether to stop.

    Raises:
        LoRAAdapterNotFoundError: as vLLM does, if the folder has no CONFIG_FILE.
        AdapterNotLoaded: if the folder has no weights, if a file is too large, or if stopped.
        OSError: if a file cannot be read.
    """
    folder = Path(get_adapter_absolute_path(adapter.lora_path))
    if not (folder / CONFIG_FILE).is_file():
        raise LoRAAdapterNotFoundError(adapter.lora_name, adapter.lora_path)
    weights = next((name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if weights is None:
        raise AdapterNotLoaded(
            f"adapter {adapter.lora_name!r}: its folder has none of {', '.join(WEIGHT_FILES)}"
        )
    digest = hashlib.sha256()
    with ExitStack() as held:
        copies = Path(held.enter_context(TemporaryDirectory(prefix="adapter-files-", dir=run_dir)))
        for name in (CONFIG_FILE, weights):
            copy = os.memfd_create(name, os.MFD_CLOEXEC)
            held.callback(os.close, copy)
            digest.update(f"{name}:".encode())
            size_bytes = 0
            for piece in _pieces(folder / name, adapter.lora_name, stopped):
                digest.update(piece)
                _write(copy, piece)
                size_bytes += len(piece)
            digest.update(f"{size_bytes};".encode())
            (copies / name).symlink_to(f"/proc/{os.getpid()}/fd/{copy}")
        yield AdapterFiles(copies, weights, digest.hexdigest())


def _pieces(path: Path, name: str, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the bytes of a file of the adapter `name`. Raises AdapterNotLoaded as `copied`."""
    with path.open("rb", buffering=0) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        if size_bytes > MOST_BYTES:
            raise AdapterNotLoaded(
                f"adapter {name!r}: {path.name} has {size_bytes} bytes: must be at most "
                f"{MOST_BYTES}"
            )
        left_bytes = size_bytes
        # a file that grows is read up to here
        while left_bytes and (piece := opened.read(min(left_bytes, _PIECE_BYTES))):
            if stopped():
                raise AdapterNotLoaded(f"adapter {name!r}: its files were not read in time")
            left_bytes -= len(piece)
            yield piece


def _write(descriptor: int, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(descriptor, left) :]
