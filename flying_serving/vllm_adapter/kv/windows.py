"""KV of layers that see a window of tokens only: lanes keep all of it."""

from collections.abc import Mapping

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    replace_as,
)

_LOCAL = (SlidingWindowSpec, ChunkedLocalAttentionSpec)


def all_are_local(specs: Mapping[str, KVCacheSpec]) -> bool:
    """Return whether every layer sees a window of tokens or a chunk only.

    vLLM would then drop KV of running requests. Without its hybrid manager it keeps all KV by
    itself if some layers see everything.
    """
    return bool(specs) and all(isinstance(spec, _LOCAL) for spec in specs.values())


def with_all_kv(specs: Mapping[str, KVCacheSpec], block_tokens: int) -> dict[str, KVCacheSpec]:
    """Return how KV of all tokens is kept, in blocks of `block_tokens` tokens, beside recurrent
    state.

    `specs`: by layer, as the layers ask for them. The layers still attend to their window alone.
    """
    if not any(isinstance(spec, MambaSpec) for spec in specs.values()) and not all_are_local(specs):
        return dict(specs)
    return {
        name: _of_all_tokens(spec, block_tokens) if isinstance(spec, _LOCAL) else spec
        for name, spec in specs.items()
    }


def _of_all_tokens(spec: KVCacheSpec, block_tokens: int) -> KVCacheSpec:
    return replace_as(
        spec, FullAttentionSpec, drop=("extra_retained_tokens",), block_size=block_tokens
    )
