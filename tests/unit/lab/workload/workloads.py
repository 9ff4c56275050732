"""Hypothesis strategies for workloads."""

from hypothesis import strategies as st

from flying_lab.workload.model import MAX_HASH_ID, Request, Workload, blocks_of


@st.composite
def workloads(
    draw: st.DrawFn, *, hashed: bool | None = None, most: int = 12, most_tokens: int = 3000
) -> Workload:
    """Return any workload; hashed: whether requests have hash ids (None: some have)."""
    block_tokens = draw(st.integers(1, 700))
    times = sorted(draw(st.lists(st.floats(0, 1e9), min_size=1, max_size=most)))
    indices = sorted(draw(st.sets(st.integers(0, 2**40), min_size=len(times), max_size=len(times))))
    requests = []
    for index, at in zip(indices, times, strict=True):
        tokens = draw(
            st.integers(1, most_tokens if hashed is False else min(most_tokens, 20 * block_tokens))
        )
        ids: tuple[int, ...] = ()
        if hashed or (hashed is None and draw(st.booleans())):
            blocks = blocks_of(tokens, block_tokens)
            one = st.one_of(st.integers(0, 3), st.integers(0, MAX_HASH_ID))
            ids = tuple(draw(st.lists(one, min_size=blocks, max_size=blocks)))
        requests.append(
            Request(
                index,
                at,
                tokens,
                draw(st.integers(1, 10_000)),
                priority=draw(st.integers(-5, 5)),
                phase=draw(st.sampled_from([None, "low", "burst"])),
                hash_ids=ids,
                tp_degree=draw(st.sampled_from([None, 1, 2, 8])),
                deadline_s=draw(st.none() | st.floats(1e-3, 1e6)),
            )
        )
    return Workload(
        draw(st.text(max_size=10)),
        draw(st.integers(0, 2**60)),
        tuple(requests),
        block_tokens,
        "drawn",
    )
