"""Pages of weights in the memory of the host: given back to the system, and read from the file."""

import mmap

import torch

from flying_serving.weights.lending.pages import Extent, drop_pages
from flying_serving.weights.lending.weight_file import WeightFile


class HostPages:
    """Pages of weights in private memory of the process: `WeightPages`. `file`: keeps them."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, file: WeightFile) -> None:
        self._file = file

    def keep(self, weight: torch.Tensor) -> Extent:
        """See `WeightFile.keep`."""
        return self._file.keep(weight)

    def drop(self, pages: Extent) -> None:
        """See `drop_pages`."""
        drop_pages(pages)

    def fetch(self, pages: Extent) -> None:
        """See `WeightFile.read`. The system backs pages that are written."""
        self._file.read(pages)
