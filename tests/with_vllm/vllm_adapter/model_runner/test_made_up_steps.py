"""The made-up requests of the self-check: valid steps that read their own KV, spread over the
vocabulary.
"""

import pytest

from flying_serving.memory.kv_groups import KVGroup, KVGroups, one_group
from flying_serving.vllm_adapter.model_runner.made_up_steps import CHECK_TOKENS, check_steps


@pytest.mark.parametrize(("requests", "vocabulary"), [(1, 512), (8, 512), (8, 151936), (3, 7)])
def test_check_steps_are_two_chunks_of_each_prompt(requests: int, vocabulary: int) -> None:
    first, second, end = check_steps(requests, vocabulary, one_group(32))
    names = {new.req_id for new in first.scheduled_new_reqs}
    assert (
        len(names)
        == requests
        == len(set(map(str, (new.block_ids for new in first.scheduled_new_reqs))))
    )
    assert (
        set(first.num_scheduled_tokens)
        == set(second.num_scheduled_tokens)
        == names
        == end.finished_req_ids
    )
    for new in first.scheduled_new_reqs:
        chunks = first.num_scheduled_tokens[new.req_id], second.num_scheduled_tokens[new.req_id]
        assert sum(chunks) == len(new.prompt_token_ids)
        assert max(chunks) == CHECK_TOKENS
        assert all(0 <= token < vocabulary for token in new.prompt_token_ids)
    cached = second.scheduled_cached_reqs
    assert cached.num_computed_tokens == [
        first.num_scheduled_tokens[name] for name in cached.req_ids
    ]


def test_every_rank_of_eight_has_tokens_of_its_vocabulary() -> None:
    first = next(check_steps(8, 512, one_group(32)))
    tokens = {token for new in first.scheduled_new_reqs for token in new.prompt_token_ids}
    assert {token // 64 for token in tokens} == set(range(8))


def test_no_two_made_up_requests_have_a_block_in_common_in_any_group() -> None:
    first = next(check_steps(3, 512, KVGroups((KVGroup(1024, has_state=True), KVGroup(32)))))
    blocks = [new.block_ids for new in first.scheduled_new_reqs]
    assert blocks == [([1], [2]), ([3], [4]), ([5], [6])]
