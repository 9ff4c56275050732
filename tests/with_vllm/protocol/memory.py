"""What engines of the model have in place of vLLM's block pool and model runner: whose token is in
which block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tests.with_vllm.engine.schedulers import BLOCK, FakeScheduler
from tests.with_vllm.protocol.client import request_of


@dataclass
class ListPool:
    """What is asked of vLLM's BlockPool, with nothing cached and no state but who uses which
    blocks.
    """

    num_gpu_blocks: int
    free: list[int] = field(default_factory=list)
    users: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_gpu_blocks))

    @property
    def blocks(self) -> list[Any]:
        """Return a view of each block."""
        return [
            SimpleNamespace(block_id=block, ref_cnt=self.users.get(block, 0), is_null=block == 0)
            for block in range(self.num_gpu_blocks)
        ]

    @property
    def null_block(self) -> Any:
        """Return the block that stands for none."""
        return SimpleNamespace(block_id=0, ref_cnt=1, is_null=True)

    def get_num_free_blocks(self) -> int:
        """Return how many are free."""
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Any]:
        """Take free blocks, least recently used first."""
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        self.users |= dict.fromkeys(taken, 1)
        blocks = self.blocks
        return [blocks[block] for block in taken]

    def touch(self, blocks: Iterable[Any]) -> None:
        """Let blocks have one more user."""
        for block in blocks:
            if block.block_id not in self.users:
                self.free.remove(block.block_id)
            self.users[block.block_id] = self.users.get(block.block_id, 0) + 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        """Let blocks have one user less; they are free when they have none."""
        for block in blocks:
            number = block.block_id
            assert number in self.users, f"block {number} is free already"
            self.users[number] -= 1
            if not self.users[number]:
                del self.users[number]
                self.free.append(number)

    def evict_blocks(self, blocks: set[int]) -> None:
        """Do nothing: nothing is cached."""

    def rename(self, new: Mapping[int, int]) -> None:
        """Give blocks other numbers."""
        self.free = [new[block] for block in self.free]
        self.users = {new[block]: count for block, count in self.users.items()}


class EndlessScheduler(FakeScheduler):
    """Has work without end, or none ever, and needs no blocks."""

    def __init__(self, blocks: int, *, pool: Any = None, busy: bool) -> None:
        super().__init__(blocks, pool=pool)
        self.busy = busy

    def has_requests(self) -> bool:
        """Return whether there is work."""
        return self.busy

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests there would be."""
        return int(self.busy)

    def schedule(self) -> SchedulerOutput:
        """Plan a step that says nothing."""
        plan = SchedulerOutput.make_empty()
        plan.total_num_scheduled_tokens = 1
        return plan


class Memory:
    """What an engine's model runner keeps: tables of blocks, and slot by slot whose token was
    written there last.

    Args:
        blocks: how many there are.
        mobile: requests whose KV comes from elsewhere, or goes elsewhere, when they have no table
            here.
    """

    def __init__(self, blocks: int, mobile: Container[str] = ()) -> None:
        self.blocks = blocks
        self.mobile = mobile
        self.content: dict[tuple[int, int], tuple[str, int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.touched: set[int] = set()
        """Blocks that have pages."""
        self.others: dict[str, int] = {}
        """The place of a token of a request that was sampled here, and is not the leader's."""

    def write(self, plan: SchedulerOutput, *, other: bool = False) -> None:
        """Do what a model runner does with a plan: keep tables, check what was written before,
        write what is new. `other`: it samples other tokens than the other members.
        """
        done: dict[str, int] = {}
        for gone in plan.finished_req_ids:
            self.tables.pop(gone, None)  # it may never have been in a step
            self.others.pop(gone, None)
        for new in plan.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            done[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for name, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:  # the leader sends all its tokens
                self.tables[name] = []
                self.others.pop(name, None)
            self.tables[name] += added[0] if added else []
            done[name] = computed
        for name, tokens in plan.num_scheduled_tokens.items():
            self._check(name, done[name])
            run = range(done[name], done[name] + tokens)
            self.take(self.tables[name], run, [self._computed(name, place) for place in run])
            if other:
                self.others.setdefault(name, run.stop)

    def _computed(self, name: str, place: int) -> tuple[str, int]:
        is_other = self.others.get(name) == place
        return (f"another token of {name}" if is_other else request_of(name), place)

    def _check(self, name: str, tokens: int) -> None:
        """Check that the first tokens of a request are where they are meant to be."""
        for place in range(tokens):
            found = self.content.get((self.tables[name][place // BLOCK], place % BLOCK))
            assert found == (request_of(name), place), f"for token {place} of {name}: {found}"

    def take(self, blocks: list[int], run: range, tokens: Iterable[tuple[str, int] | None]) -> None:
        """Write tokens of a request, or whatever is to be written for them."""
        for place, token in zip(run, tokens, strict=True):
            block = blocks[place // BLOCK]
            assert 0 < block < self.blocks
            self.touched.add(block)
            self.content.pop((block, place % BLOCK), None)
            if token is not None:
                self.content[block, place % BLOCK] = token

    def copy(self, copies: Mapping[int, int]) -> None:
        """Copy blocks to others, new ones by old, and let requests have these."""
        for old, new in copies.items():
            for slot in range(BLOCK):
                self.content.pop((new, slot), None)
                if (old, slot) in self.content:
                    self.content[new, slot] = self.content[old, slot]
        self.touched.update(copies.values())
        self.tables = {
            name: [copies.get(b, b) for b in blocks] for name, blocks in self.tables.items()
        }

    def release(self, blocks: range) -> None:
        """Give pages back: what is in these blocks is lost."""
        self.touched.difference_update(blocks)
        self.content = {
            place: token for place, token in self.content.items() if place[0] not in blocks
        }

    def row(self, block: int) -> tuple[tuple[str, int] | None, ...]:
        """Return the tokens in a block that others may want."""
        found = [self.content.get((block, slot)) for slot in range(BLOCK)]
        return tuple(
            token if token is not None and token[0] in self.mobile else None for token in found
        )

    def rename(self, new: Mapping[int, int], free: Container[int]) -> None:
        """Give blocks other numbers, and forget what nobody can read any more; `free`: new
        numbers.
        """
        self.tables = {
            name: [new[block] for block in blocks] for name, blocks in self.tables.items()
        }
        used = {
            (request_of(name), block) for name, blocks in self.tables.items() for block in blocks
        }
        self.content = {
            (new[block], slot): token
            for (block, slot), token in self.content.items()
            if (token[0], new[block]) in used
            or (token[0] in self.mobile and new[block] not in free)
        }
