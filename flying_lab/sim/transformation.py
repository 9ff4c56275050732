"""The work to change the degree of running engines: of their KV cache, of their weights, and
through host memory.

Derived, not measured: bytes that each way has to copy, at known rates, and calls of the driver. All
devices of a group do the same. docs/lab/results/gyges.md has the ways side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from flying_lab.sim.hardware import Hardware
from flying_lab.sim.memory import Lent, lent_bytes
from flying_lab.sim.models import Model, Piece

REMAP_S = 34e-6 + 2e-6 + 38e-6
"""Seconds of cuMemUnmap, cuMemMap and cuMemSetAccess of one physical allocation: vAttention (arXiv
2405.04437), table 3.
"""
HOST_BYTES_PER_S = 64e9
"""PCIe 5.0 x16, one direction: data sheets of H20, H100 and H200."""
CHUNK_BYTES = 32 * 2**20
"""KV that is under way at once when it is transformed in place."""
MLP_TENSORS = 3
"""Tensors of a feed-forward layer: gate, up and down."""
STEP_SHARE = 0.01
"""The share by which a staggered transformation may make a step longer."""


@dataclass(frozen=True)
class Work:
    """The work of one device.

    Args:
        remaps: physical allocations that change hands.
        rounds: messages among the group, one after the other.
        received_bytes: from the other devices, each of which receives the same number.
        copied_bytes: within the device's memory, by `copies` kernels.
        host_bytes: from and to host memory.
    """

    remaps: float = 0.0
    rounds: float = 0.0
    received_bytes: float = 0.0
    copied_bytes: float = 0.0
    copies: float = 0.0
    host_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return the sum of both works."""
        return Work(
            self.remaps + other.remaps,
            self.rounds + other.rounds,
            self.received_bytes + other.received_bytes,
            self.copied_bytes + other.copied_bytes,
            self.copies + other.copies,
            self.host_bytes + other.host_bytes,
        )


@dataclass(frozen=True)
class Pause:
    """The schedule of a transformation: engines do nothing beside it for `stall_s`, and step for
    `delay_s` until it is over.
    """

    stall_s: float
    delay_s: float = 0.0


@dataclass(frozen=True)
class Transformation:
    """Engines of `engine` devices become a group of `degree` devices, or such a group parts."""

    model: Model
    hardware: Hardware
    engine: int
    degree: int

    @property
    def _others(self) -> float:
        """Return the share of an engine's units that other engines of the group keep."""
        return 1.0 - self.engine / self.degree

    def kv_bytes(self, tokens: float) -> float:
        """Return the bytes of KV of these tokens on each device of one engine."""
        return tokens * self.model.kv_bytes_per_token(self.engine)

    def kv(self, tokens: float) -> Work:
        """Return the work by which KV of `tokens` tokens in each engine goes to the devices that
        keep its heads, in place, chunk by chunk.
        """
        received = self._others * self.kv_bytes(tokens)
        return Work(rounds=max(self.model.layers, received / CHUNK_BYTES), received_bytes=received)

    def kv_trimmed(self, tokens: float) -> Work:
        """Return the work of the same by Gyges' basic way: a device receives everything beside its
        own KV, then closes the gaps.
        """
        left = self.kv_bytes(tokens) - self._others * self.kv_bytes(tokens)
        layers = self.model.layers
        return self.kv(tokens) + Work(
            rounds=layers - self.kv(tokens).rounds, copied_bytes=left, copies=layers
        )

    def lend(self) -> Work:
        """Return the work to lend feed-forward weights to the KV cache: units, one physical
        allocation each, change hands.
        """
        return Work(remaps=MLP_TENSORS * self.model.layers * (self.degree / self.engine - 1))

    def lend_swapped(self, fragment_bytes: float) -> Work:
        """Return the work of the same by Gyges' partial swap: before, a fragment of each tensor is
        copied to where pages are whole.
        """
        tensors = MLP_TENSORS * self.model.layers
        return self.lend() + Work(copied_bytes=tensors * fragment_bytes, copies=tensors)

    def give_back(self, lent: Lent) -> Work:
        """Return the work by which weights return: memory changes hands again, and the bytes are
        read from the devices that kept them.
        """
        received = lent_bytes(self.model, self.engine, self.degree, lent)
        return self.lend() + Work(rounds=self.model.layers, received_bytes=received)

    def piece_s(self, piece: Piece, received_bytes: float) -> float:
        """Return the seconds in which a piece of weights goes, or comes back with bytes from the
        devices that kept them.
        """
        remaps = piece.tensors * (self.degree / self.engine - 1)
        return self.apart_s(
            Work(remaps, rounds=bool(received_bytes), received_bytes=received_bytes)
        )

    def through_host(self, tokens: float, degree: int) -> Work:
        """Return the work of Seesaw: KV goes to host memory and back in another form; weights of
        the new `degree` are read from there.
        """
        return Work(host_bytes=self.model.weight_bytes(degree) + 2 * self.kv_bytes(tokens))

    def apart_s(self, work: Work) -> float:
        """Return the seconds of work without any steps beside it."""
        line, spec = self.hardware.all_reduce[self.degree].large, self.hardware.spec
        link_s = work.rounds * line.latency_s.value
        link_s += work.received_bytes / (spec.link_bandwidth.value * line.efficiency.value)
        copies_s = (
            work.copies * self.hardware.coefficients.gemm_overhead_s.value
            + 2 * work.copied_bytes * self._byte_s
        )
        return work.remaps * REMAP_S + link_s + copies_s + work.host_bytes / HOST_BYTES_PER_S

    def taken_s(self, work: Work) -> float:
        """Return the seconds that steps get longer if all work is done beside them: memory
        bandwidth that they lack.
        """
        return 2 * (work.received_bytes + work.copied_bytes) * self._byte_s

    def beside_s(self, work: Work, steps_s: float) -> float:
        """Return the seconds that steps of `steps_s` in all get longer: the work that does not fit
        beside them, and `taken_s`.
        """
        return max(0.0, self.apart_s(work) - steps_s) + self.taken_s(work)

    def staggered(self, work: Work) -> Pause:
        """Return the pause of work over enough steps that none gets longer by more than
        STEP_SHARE.
        """
        taken_s = self.taken_s(work)
        return Pause(taken_s, max(self.apart_s(work), taken_s / STEP_SHARE))

    @property
    def _byte_s(self) -> float:
        """Return the seconds to read or write a byte of the device's memory."""
        fitted = self.hardware.coefficients.memory_efficiency.value
        return 1.0 / (self.hardware.spec.memory_bandwidth.value * fitted)
