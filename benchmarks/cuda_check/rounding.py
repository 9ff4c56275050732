"""Whether a lane in bfloat16 is right: by the rounding error of the type, measured in the same run.

Stock vLLM at the lane's degree would need as many GPUs, so a lane is compared with stock at degree
1. Both compute in bfloat16 with the same weights, and differ by the order of sums alone. Each order
rounds to the same type, so the error of each is no more than what stock in bfloat16 differs by from
stock in float32. That has the rounding of the weights besides. The difference of two
errors, independent of each other, has at most sqrt(2) times the root mean square of one. A lane
that is bound wrongly has other logits altogether.

Tokens are forced on all servers, so that logprobs of all positions can be compared.
"""

from collections.abc import Sequence
from math import sqrt

MOST = sqrt(2)


def root_mean_square(left: Sequence[float], right: Sequence[float]) -> float:
    """Return that of the differences of two sequences of one length."""
    return sqrt(sum((a - b) ** 2 for a, b in zip(left, right, strict=True)) / len(left))


def evaluate(
    ours: Sequence[float], stock: Sequence[float], exact: Sequence[float]
) -> tuple[bool, str]:
    """Return whether a lane's logprobs may be those of its type, and the figure.

    `stock` has stock's logprobs in the lane's type, `exact` those of stock in float32.
    """
    apart, error = root_mean_square(ours, stock), root_mean_square(stock, exact)
    same = sum(a == b for a, b in zip(ours, stock, strict=True))
    figure = (
        f"{same} of {len(ours)} logprobs are stock's; root mean square {apart:.1e}, "
        f"the type's error is {error:.1e}"
    )
    return apart <= MOST * error, figure
