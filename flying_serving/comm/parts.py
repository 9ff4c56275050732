"""The equal parts of a tensor that ranks exchange."""

import torch


def byte_parts(x: torch.Tensor, world: int) -> torch.Tensor:
    """Return `x`, of shape (world, ...), as bytes of shape (world, bytes of a part).

    The bytes of each part are contiguous. It is a view if those of `x` are, otherwise a copy.
    Raises ValueError if `x` has not one part for each rank.
    """
    if not x.dim() or x.shape[0] != world:
        raise ValueError(
            f"all_to_all of {tuple(x.shape)}: needs one part for each of {world} ranks"
        )
    whole = x if x[0].is_contiguous() else x.contiguous()
    return whole.unsqueeze(-1).flatten(1).view(torch.uint8)
