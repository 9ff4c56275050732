"""Prints the rows of a V2 runner's block tables before and after blocks are replaced, as JSON.

A test calls `main` in a process of its own, with the variables of `harness.triton_cpu`.
"""

import json
from types import SimpleNamespace

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401 vLLM's changes of torch for this runner on a CPU
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.states import RequestState

from flying_serving.vllm_adapter.model_runner.versions import V2

BLOCKS = {"a": [3, 5, 7], "b": [2]}
COPIES = {5: 9, 2: 8}
COLUMNS = 4


def main() -> None:
    """Give blocks to two requests, and replace some."""
    cpu = torch.device("cpu")
    states = RequestState(
        max_num_reqs=3,
        max_model_len=16,
        max_num_batched_tokens=16,
        num_speculative_steps=0,
        vocab_size=32,
        device=cpu,
    )
    tables = BlockTables([4], 3, 16, [COLUMNS], cpu)
    for name, blocks in BLOCKS.items():
        states.add_request(name, 1, [1], 0, 1)
        tables.append_block_ids(states.req_id_to_index[name], (blocks,), overwrite=True)
    tables.apply_staged_writes()

    def rows() -> dict[str, list[int]]:
        table = tables.block_tables[0].gpu
        return {name: table[row].tolist() for name, row in states.req_id_to_index.items()}

    adapter = V2(SimpleNamespace(req_states=states, block_tables=tables))
    before = rows()
    adapter.replace_blocks(COPIES)
    print(  # noqa: T201
        json.dumps({"ids": sorted(adapter.request_ids()), "before": before, "after": rows()})
    )
