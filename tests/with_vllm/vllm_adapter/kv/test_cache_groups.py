"""KV groups as vLLM's configuration has them."""

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from flying_serving.memory.kv_groups import KVGroup, KVGroups
from flying_serving.vllm_adapter.kv.cache import allocate_or_share, groups_of, shared_kv_buffer
from tests.with_vllm.vllm_adapter.kv_configs import laid_out

BLOCKS = 7


def test_groups_have_the_same_pages() -> None:
    """A block is one of KV or of a state, in the same bytes."""
    layout = KVCacheLayout.LBNHC
    paged = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    page = paged.page_size_bytes
    state = MambaSpec(
        block_size=512, shapes=((8, 4),), dtypes=(torch.float32,), page_size_padded=page
    )
    groups = [KVCacheGroupSpec(["attention"], paged), KVCacheGroupSpec(["recurrent"], state)]
    config = laid_out(layout, groups, page * BLOCKS)
    memory = torch.zeros(page * BLOCKS, dtype=torch.int8)
    with shared_kv_buffer(memory):
        found = allocate_or_share(allocate_kv_cache, config, torch.device("cpu"), layout)
    assert found["attention"][3].data_ptr() == found["recurrent"][3].data_ptr()
    assert groups_of(config) == KVGroups((KVGroup(16), KVGroup(512, has_state=True)))
