"""Block hashes: the same everywhere, and different wherever the KV is."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core.hashing import DIGEST_BYTES, hash_block, hash_blocks, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_known_vectors() -> None:
    """These values are on the wire between processes of different versions: they must not change unnoticed."""
    root = root_hash("model/bfloat16/16")
    assert root.hex() == "020c31d6f07ec39cedc4efb3d55d45ad"
    assert root_hash("model/bfloat16/16", b"tenant").hex() == "491a3563be4452f0572a2429efb36f2d"
    assert [h.hex() for h in hash_blocks(root, [1, 2, 3, 4, 5, 2**32 - 1], 2)] == [
        "62248df411f9f9795b1e357cef2f073d",
        "66c90db4ce897172263a273db492e0a8",
        "d082edad1b73f39e5aa101ca21fea91d",
    ]


@given(token_ids=TOKENS, block_size=st.integers(1, 8))
def test_chain_is_the_fold_of_single_blocks(token_ids: list[int], block_size: int) -> None:
    parent = root_hash("m")
    hashes = hash_blocks(parent, token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    for index, block_hash in enumerate(hashes):
        parent = hash_block(parent, token_ids[index * block_size : (index + 1) * block_size])
        assert block_hash == parent
        assert len(block_hash) == DIGEST_BYTES


@given(token_ids=TOKENS, block_size=st.integers(1, 8), split=st.integers(0, 5))
def test_chain_can_be_continued(token_ids: list[int], block_size: int, split: int) -> None:
    whole = hash_blocks(root_hash("m"), token_ids, block_size)
    split = min(split, len(whole))
    parent = whole[split - 1] if split else root_hash("m")
    assert hash_blocks(parent, token_ids[split * block_size :], block_size) == whole[split:]


@given(token_ids=st.lists(st.integers(0, 9), min_size=8, max_size=8), at=st.integers(0, 7))
def test_a_changed_token_changes_its_block_and_all_after_it(token_ids: list[int], at: int) -> None:
    other = token_ids.copy()
    other[at] += 10
    before, after = (hash_blocks(root_hash("m"), ids, 2) for ids in (token_ids, other))
    assert [a == b for a, b in zip(before, after, strict=True)] == [block < at // 2 for block in range(4)]


def test_model_and_tenant_are_told_apart() -> None:
    roots = [root_hash("m"), root_hash("n"), root_hash("m", b"a"), root_hash("m", b"b"), root_hash("ma"), root_hash("")]
    roots += [root_hash("", b"m"), root_hash("m", b"a\0"), root_hash("m", b"\0")]
    assert len(set(roots)) == len(roots)
    assert len({hash_block(root, [1, 2]) for root in roots}) == len(roots)


def test_a_partial_block_is_told_from_a_full_one() -> None:
    root = root_hash("m")
    assert len({hash_block(root, ids) for ids in ([], [0], [0, 0], [0, 0, 0])}) == 4


def test_any_sequence_of_tokens_is_taken() -> None:
    root = root_hash("m")
    assert hash_blocks(root, (1, 2, 3, 4), 2) == hash_blocks(root, [1, 2, 3, 4], 2) == hash_blocks(root, range(1, 5), 2)
