"""The random numbers that a seeded request has drawn for its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

_SEED = 0
_WORDS_AT_A_TIME = 2**20
_LAST_DRAWS = 4
"""Numbers by which a place in a sequence of random numbers is recognised."""
Draw = Callable[[torch.Generator], object]


def skip_draws(
    generator: torch.Generator, count: int, vocab_size: int, drafts: Sequence[int] = ()
) -> None:
    """Advance the generator of a seeded request to where vLLM's sampler leaves it after `count`
    steps.

    `drafts`: the numbers of draft tokens that these steps checked, of each step that had some.

    In each step the sampler draws one integer on CPU (`TopKTopPSampler.forward_cpu`). On CUDA it
    draws exponential noise for the vocabulary (`random_sample`). A step with drafts draws a number
    for each of them (`generate_uniform_probs`), and noise once (`sample_recovered_tokens`).
    """
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (count,), generator=generator, dtype=torch.long)
        _skip_words(generator, sum(_words_of_step(size, vocab_size) for size in drafts))
        return

    before = generator.get_offset()

    def offset_of(draw: Draw) -> int:
        start = generator.get_offset()
        draw(generator)
        return int(generator.get_offset() - start)

    noise = offset_of(_noise(vocab_size, generator.device))
    chances = {size: offset_of(_chances(size, generator.device)) for size in set(drafts)}
    steps = noise * count + sum(noise + chances[size] for size in drafts)
    generator.set_offset(before + steps)


def _noise(vocab_size: int, device: torch.device) -> Draw:
    return lambda generator: torch.empty(vocab_size, device=device).exponential_(
        generator=generator
    )


def _chances(size: int, device: torch.device) -> Draw:
    return lambda generator: torch.empty(size, dtype=torch.float64, device=device).uniform_(
        generator=generator
    )


@cache
def _words_of_step(size: int, vocab_size: int) -> int:
    """Return how many words of a CPU generator a step takes for `size` drafts."""
    cpu = torch.device("cpu")
    return words_of(_chances(size, cpu), 4 * size) + words_of(
        _noise(vocab_size, cpu), 4 * vocab_size
    )


def words_of(draw: Draw, most: int) -> int:
    """Return how many words of 32 bits of a CPU generator `draw` takes: up to `most`.

    It depends on how torch was built, so it is measured. Raises ValueError if they are more.
    """
    drawn, plain = (torch.Generator().manual_seed(_SEED) for _ in range(2))
    draw(drawn)
    after, all_words = _draw_words(drawn, _LAST_DRAWS), _draw_words(plain, most + _LAST_DRAWS)
    windows = all_words.unfold(0, _LAST_DRAWS, 1)
    found = torch.nonzero((windows == after).all(dim=1)).flatten().tolist()
    if not found:
        raise ValueError(f"a draw takes more than {most} words of its generator")
    return int(found[0])


def _skip_words(generator: torch.Generator, words: int) -> None:
    # a number in float32 takes one word, and a third of an integer's time
    dropped = torch.empty(min(words, _WORDS_AT_A_TIME))
    for done in range(0, words, _WORDS_AT_A_TIME):
        dropped[: words - done].uniform_(generator=generator)


def _draw_words(generator: torch.Generator, count: int) -> torch.Tensor:
    """Draw as many words. For larger integers torch would take two words each."""
    return torch.randint(0, 2**24, (count,), generator=generator, dtype=torch.int32)
