"""Random numbers for requests without a seed: each lane has its own, equal on all of its
members.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from vllm.utils.torch_utils import set_random_seed


def seed_process(seed: int, engine: int, starts: int) -> None:
    """Seed the generators of this process for the lane of one engine, as vLLM seeds replica number
    `engine`. `starts`: earlier starts of the engine.

    vLLM has no replica that is started again. Seeded as at first, it would repeat the numbers that
    it drew before.
    """
    if starts == 0:
        set_random_seed(seed, engine)
    else:
        set_random_seed(seed_of(seed, [engine], [starts]))


def seed_of(seed: int, group: Sequence[int], numbers: Sequence[int]) -> int:
    """Return the seed of a group's generators: a different one for each --seed, size, first engine
    and `numbers`, with which it draws anew.

    numpy fills entropy up to four numbers with zeros, so vLLM's (seed, replica) is one of four
    whose last number is 0. The number of a single engine is not 0 here, and groups have at
    least five numbers.
    """
    return int(np.random.SeedSequence((seed, len(group), group[0], *numbers)).generate_state(1)[0])


class LaneRandomness:
    """The state that one lane has of each generator from which its steps draw. Draws of other lanes
    and of other code of the process do not change it.

    - `device`'s: both of vLLM's model runners sample from it, V1 for each token of a request
      without a seed, V2 where FlashInfer samples. On the CPU it is torch's.
    - numpy's: V2 gives a request without a seed one when it is added.
    - torch's on the CPU: vLLM's model of a diffusion draws seeds for kernels from it.
    - Python's, if `for_users_code`: neither runner draws from it, and to keep it takes 50 us of a
      step. Logits processors of users may draw.
    """

    def __init__(self, device: torch.device, seed: int, *, for_users_code: bool = False) -> None:
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            # exchanged: numpy takes long to copy a state
            (mtrand.get_bit_generator, mtrand.set_bit_generator),
            (torch.get_rng_state, torch.set_rng_state),
        ]
        self._states: list[Any] = [np.random.MT19937(), torch.get_rng_state()]
        if for_users_code:
            self._generators.append((random.getstate, random.setstate))
            self._states.append(random.getstate())
        if device.type != "cpu":
            of_device = torch.get_device_module(device)
            read, write = of_device.get_rng_state, of_device.set_rng_state
            self._generators.append((partial(read, device), partial(write, device=device)))
            self._states.append(read(device))
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew, with numbers that depend on `seed` alone."""
        of_process = random.getstate()  # vLLM seeds Python's too, which may not be the lane's
        with self.used():
            set_random_seed(seed)
        random.setstate(of_process)

    @contextmanager
    def used(self) -> Iterator[None]:
        """While the body runs, draws in this process are the lane's next random numbers."""
        outside = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._states = self._read()
            self._write(outside)

    def _read(self) -> list[Any]:
        return [read() for read, _ in self._generators]

    def _write(self, states: Sequence[Any]) -> None:
        for (_, write), state in zip(self._generators, states, strict=True):
            write(state)
