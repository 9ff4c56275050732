"""KV groups that share a pool: the blocks of a request, and of its state."""

import pytest

from flying_serving.memory.kv_groups import KVGroup, KVGroups, one_group

STATE = KVGroup(1024, has_state=True)
HYBRID = KVGroups((STATE, KVGroup(96), STATE, STATE))
STATES = KVGroups((STATE,))


@pytest.mark.parametrize(
    ("groups", "tokens", "blocks"),
    [
        (one_group(32), 32, 1),
        (one_group(32), 33, 2),
        (HYBRID, 1, 4),
        (HYBRID, 96, 4),
        (HYBRID, 97, 5),
        (STATES, 1024, 1),
    ],
)
def test_a_request_has_a_block_of_each_state_beside_those_of_its_kv(
    groups: KVGroups, tokens: int, blocks: int
) -> None:
    assert groups.blocks_for(tokens) == blocks


@pytest.mark.parametrize("groups", [one_group(32), HYBRID, STATES])
@pytest.mark.parametrize("longest_tokens", [1, 31, 32, 1024])
def test_the_longest_request_has_at_most_a_block_more_in_each_group(
    groups: KVGroups, longest_tokens: int
) -> None:
    ahead = [group.blocks_for(longest_tokens) + 1 for group in groups.groups]
    assert groups.most_blocks(longest_tokens) == sum(ahead)


@pytest.mark.parametrize(
    ("owned", "missing"),
    [(([], [], [], []), 6), (([7], [8], [9], [10]), 2), (([7], [8, 1, 2, 3], [9], [10]), 0)],
)
def test_blocks_of_one_group_do_not_make_up_for_those_of_another(
    owned: tuple[list[int], ...], missing: int
) -> None:
    assert HYBRID.missing(200, owned) == missing


@pytest.mark.parametrize(
    ("groups", "block_tokens", "fixed_blocks"),
    [(one_group(32), 32, 0), (HYBRID, 96, 3), (STATES, 1024, 0)],
)
def test_blocks_of_kv_are_counted_and_a_state_is_fixed(
    groups: KVGroups, block_tokens: int, fixed_blocks: int
) -> None:
    assert (groups.block_tokens, groups.fixed_blocks) == (block_tokens, fixed_blocks)


def test_made_up_blocks_follow_each_other() -> None:
    assert HYBRID.made_up(100, first=5) == ([5], [6, 7], [8], [9])


def test_a_list_of_blocks_has_the_states_last() -> None:
    flat = HYBRID.in_a_list(([1], [2, 3], [4], [5]))
    assert flat == [2, 3, 1, 4, 5]
    assert HYBRID.of_kv(flat) == [2, 3]
    assert HYBRID.beside_kv(flat) == [1, 4, 5]


def test_a_list_of_blocks_of_several_groups_goes_row_by_row() -> None:
    groups = KVGroups((KVGroup(32), STATE, KVGroup(32)))
    assert groups.in_a_list(([1, 2], [3], [4, 5])) == [1, 4, 2, 5, 3]


@pytest.mark.parametrize(
    ("blocks", "more", "tokens"), [([], 5, 192), ([], 2, 0), ([2, 1, 4, 5], 2, 288)]
)
def test_the_first_blocks_of_a_request_are_those_of_its_states(
    blocks: list[int], more: int, tokens: int
) -> None:
    assert HYBRID.room_tokens(blocks, more) == tokens


@pytest.mark.parametrize(
    ("groups", "offers"),
    [(one_group(32), (True, True)), (HYBRID, (True, False)), (STATES, (False, False))],
)
def test_a_state_is_offered_when_no_step_changes_it_and_with_kv(
    groups: KVGroups, offers: tuple[bool, bool]
) -> None:
    assert (groups.may_offer(runs=False), groups.may_offer(runs=True)) == offers


@pytest.mark.parametrize(
    ("groups", "pulled", "usable"),
    [(one_group(32), 50, 50), (HYBRID, 50, 0), (HYBRID, 100, 100), (HYBRID, 0, 0)],
)
def test_a_prefix_is_of_use_without_the_state_of_more_tokens(
    groups: KVGroups, pulled: int, usable: int
) -> None:
    assert groups.usable_tokens(pulled, offered=100) == usable


@pytest.mark.parametrize(
    ("groups", "blocks", "requests"),
    [(one_group(32), 2, 5), (HYBRID, 20, 5), (HYBRID, 19, 4), (HYBRID, 0, 1)],
)
def test_made_up_requests_share_blocks_of_kv_alone(
    groups: KVGroups, blocks: int, requests: int
) -> None:
    assert groups.made_up_requests(5, blocks) == requests


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (one_group(32), ""),
        (HYBRID, "a request has 3 for its state, and at least one for its KV"),
        (STATES, ""),
    ],
)
def test_blocks_that_a_request_has_at_any_length_are_named(groups: KVGroups, words: str) -> None:
    assert groups.in_words() == words
