"""The weights that a worker has. A wide group lends weights that it does not need to the KV cache,
a layer at a time.
"""

import tempfile
from collections.abc import Mapping, Sequence
from enum import IntEnum

from torch.nn import Module, ModuleList
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flying_serving.config import Deployment
from flying_serving.errors import IntegrityError, Unsupported
from flying_serving.weights.lending.heap import give_back_freed
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.units import Units


class Kind(IntEnum):
    """The part of a model that a layer belongs to, in the order in which weights are dropped."""

    MLP = 0
    ATTENTION = 1
    VOCABULARY = 2


class WorkerWeights:
    """The weights of one worker of `engine`, and which of them are dropped.

    `pieces`: units that may be dropped at once, each with the name of its layer, in the order of
    their dropping.
    """

    def __init__(self, pieces: Sequence[tuple[str, Units]], engine: int) -> None:
        self._pieces = tuple(pieces)
        self._engine = engine
        self._degree = 1
        self._dropped: list[tuple[str, Units]] = []

    def piece_bytes(self, degree: int) -> list[int]:
        """Return the bytes of each piece that a group of `degree` engines does not need, in the
        order of their dropping.
        """
        sizes = [units.lendable(self._engine % degree, degree) for _, units in self._pieces]
        return [size for size in sizes if size]

    def drop_next(self, degree: int) -> None:
        """Drop the units of the next layer that a group of `degree` engines does not need. Do
        nothing if no piece is left.

        Groups of another size must not step from now on, until all pieces are back.

        Raises:
            IntegrityError: if weights are dropped for a group of another size.
        """
        if self._dropped and degree != self._degree:
            raise IntegrityError(
                f"weights are dropped for groups of {self._degree} engines, not of {degree}"
            )
        rank = self._engine % degree
        waiting = (
            piece
            for piece in self._pieces
            if piece not in self._dropped and piece[1].lendable(rank, degree)
        )
        piece = next(waiting, None)
        if piece is None:
            return
        self._degree = degree
        self._dropped.append(piece)
        piece[1].drop(rank, degree)
        give_back_freed()

    def fetch_next(self) -> None:
        """Fetch back the piece that was dropped last and is not back yet. Do nothing if no piece is
        dropped.

        Raises:
            WeightFileError: if it cannot be read. It is dropped as before then.
        """
        if not self._dropped:
            return
        self._dropped[-1][1].fetch()
        self._dropped.pop()
        give_back_freed()  # the matrices that were read to be packed


def weight_file_of(deployment: Deployment, engine: int, device: int) -> WeightFile | None:
    """Make the file for weights that may be dropped. None: no weight may, or no group could lend
    any.

    Raises:
        Unsupported: if no group has all engines.
        WeightFileError: if no file can be made in the temporary directory.
    """
    if not deployment.lends:
        return None
    # a group could read KV of another one that is about to give it away
    if deployment.widest < deployment.engines:
        raise Unsupported(
            f"--lend-weights: needs a group of all {deployment.engines} engines (--group-sizes)"
        )
    return WeightFile(tempfile.gettempdir(), deployment.run_dir, device, writes=engine == 0)


def in_order(model: Module, units: Mapping[str, Sequence[Units]]) -> list[tuple[str, Units]]:
    """Return the pieces of a model: MLPs before attention before the vocabulary, and of each the
    last layer first.

    `units`: by the name of their layer.
    """
    index_of = {name: index for index, name in enumerate(dict(model.named_modules()))}
    names = sorted(units, key=lambda name: (kind_of(model, name), -index_of[name]))
    return [(name, piece) for name in names for piece in units[name]]


def kind_of(model: Module, name: str) -> Kind:
    """Return the part of a model to which the layer of this name belongs.

    A decoder layer is the innermost entry of a list of layers that has attention in it. A layer
    inside one of its modules that has attention in it too is attention's, and so is a layer beside
    attention itself. All other layers are MLP.
    """
    if isinstance(model.get_submodule(name), VocabParallelEmbedding):
        return Kind.VOCABULARY
    outer, around = model, list[Module]()
    for part in name.split(".")[:-1]:
        module = outer.get_submodule(part)
        if isinstance(outer, ModuleList) and _has_attention(module):
            around = [module]
        elif around:
            around.append(module)
        outer = module
    if len(around) == 1:
        attention = any(
            isinstance(part, AttentionLayerBase) for part in (around[0], *around[0].children())
        )
    else:
        attention = any(map(_has_attention, around[1:]))
    return Kind.ATTENTION if attention else Kind.MLP


def _has_attention(module: Module) -> bool:
    return any(isinstance(part, AttentionLayerBase) for part in module.modules())
