"""Answers as a server gives them."""

from zoo.compare import Answers


def answers(
    shift: float = 0.0, requests: tuple[str, ...] = ("one", "two"), tokens: int = 12
) -> Answers:
    """Answers of many tokens, every logprob moved by `shift`."""
    return {
        name: {
            "tokens": [place * tokens + step for step in range(tokens)],
            "logprobs": [-1.0 + shift] * tokens,
            "top": [
                [[place * tokens + step, -1.0 + shift], [400, -2.0 + shift], [401, -3.0]]
                for step in range(tokens)
            ],
        }
        for place, name in enumerate(requests)
    }
