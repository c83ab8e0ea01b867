"""Block hashes: the same everywhere, and different wherever the KV is."""

from hypothesis import given
from hypothesis import strategies as st

from raydix.engine.core.hashing import DIGEST_BYTES, BlockChain, hash_block, hash_blocks, root_hash
from raydix.engine.core.tenants import salt_of
from raydix.engine.core.types import Adapter, Salt

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_known_vectors() -> None:
    """These values are on the wire between processes of different versions: they must not change unnoticed."""
    root = root_hash("model/bfloat16/16")
    assert root.hex() == "a6898138464e1511651d37c1e27a69a2"
    assert [h.hex() for h in hash_blocks(root, [1, 2, 3, 4, 5, 2**32 - 1], 2)] == [
        "75c87fa8df8b4cf611ffcb40f659dc1b",
        "0876d86fbf77a5ab7b944ee7c550bcf5",
        "0c5ab65d74d4c7baeca9ef459f76659f",
    ]
    assert [h.hex() for h in BlockChain(root, salt_of("tenant", "salt"), 2).hashes([1, 2, 3, 4])] == [
        "2504954e5832164fc1698785dc8b044b",
        "d639e914d278c4a71b37eb75d775157b",
    ]
    assert [h.hex() for h in BlockChain(root, salt_of("tenant", None, 3), 2).hashes([1, 2, 3, 4])] == [
        "75c87fa8df8b4cf611ffcb40f659dc1b",
        "b6a380a87b223cb96dd10207a689838b",
    ]


def test_an_adapter_names_every_block_public_ones_too() -> None:
    """By the digest of its weights, and nothing else: the same private salt does not bring two of them together."""
    root, tokens = root_hash("m"), list(range(8))
    digests = (b"", b"a" * DIGEST_BYTES, b"b" * DIGEST_BYTES)
    for num_public in (0, 3, 8):
        chains = [BlockChain(root, Salt(b"salt", num_public, adapter), 2).hashes(tokens) for adapter in digests]
        assert len({name for chain in chains for name in chain}) == 12

    salts = [salt_of("tenant", salt, adapter=adapter) for salt in (None, "a") for adapter in digests]
    assert len({salt.answers for salt in salts}) == len(salts), "of past answers"


def test_an_adapter_that_is_invoked_late_shares_the_blocks_before() -> None:
    root, tokens, digest = root_hash("m"), list(range(12)), b"a" * DIGEST_BYTES
    for num_public in (0, 5, 12):
        plain = BlockChain(root, Salt(b"salt", num_public), 2).hashes(tokens)
        chains = {
            num_plain: BlockChain(root, Salt(b"salt", num_public, digest, num_plain), 2).hashes(tokens)
            for num_plain in (0, 1, 4, 5, 11)
        }
        for num_plain, names in chains.items():
            shared = [mine == others for mine, others in zip(names, plain, strict=True)]
            assert shared == [index < num_plain // 2 for index in range(6)]
        behind = [name for num_plain, names in chains.items() for name in names[num_plain // 2 :]]
        assert len(set(behind)) == len(behind), "two places in one block are two names"


@given(token_ids=TOKENS, num_plain=st.integers(0, 9), num_public=st.integers(0, 9), split=st.integers(0, 5))
def test_a_chain_with_an_adapter_can_be_continued(
    token_ids: list[int], num_plain: int, num_public: int, split: int
) -> None:
    chain = BlockChain(root_hash("m"), Salt(b"salt", num_public, b"a" * DIGEST_BYTES, num_plain), 2)
    whole = chain.hashes(token_ids)
    hashes = whole[:split]
    chain.extend(hashes, token_ids)
    assert hashes == whole
    for index, name in enumerate(whole):
        assert chain.partial(whole[:index], index, token_ids[2 * index : 2 * index + 2]) == name


@given(
    prompt=st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=12),
    wanted=st.lists(st.sampled_from([0, 1, 256]), min_size=1, max_size=3),
)
def test_an_invocation_is_found_at_its_last_place(prompt: list[int], wanted: list[int]) -> None:
    places = [at for at in range(len(prompt)) if prompt[at : at + len(wanted)] == wanted]
    adapter = Adapter("a", "/a", b"a", tuple(wanted))
    assert adapter.begins_at(tuple(prompt)) == (places[-1] if places else None)
    assert Adapter("a", "/a", b"a").begins_at(tuple(prompt)) == 0


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


def test_models_are_told_apart() -> None:
    roots = [root_hash("m"), root_hash("n"), root_hash("ma"), root_hash("")]
    assert len({hash_block(root, [1, 2]) for root in roots}) == len(roots)


@given(
    token_ids=st.lists(st.integers(0, 1), max_size=12),
    block_size=st.integers(1, 4),
    num_public=st.integers(0, 12),
    cut=st.integers(0, 12),
)
def test_the_salt_enters_after_the_blocks_wholly_in_the_public_prefix(
    token_ids: list[int], block_size: int, num_public: int, cut: int
) -> None:
    root = root_hash("m")
    one, two = (BlockChain(root, Salt(private, num_public), block_size) for private in (b"one", b"two"))
    hashes = one.hashes(token_ids)
    num_shared = min(num_public // block_size, len(token_ids) // block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert hashes[:num_shared] == hash_blocks(root, token_ids[: num_shared * block_size], block_size)
    assert not {*hashes[num_shared:]} & {*two.hashes(token_ids)}
    for other in (Salt(b"one"), Salt(b"two"), Salt(), Salt(b"two", num_public + block_size)):
        private = {*hashes[num_public // block_size :]}
        same = other.private == b"one" and num_public < block_size
        assert same or not private & {*BlockChain(root, other, block_size).hashes(token_ids)}
    continued = hashes[:cut]
    one.extend(continued, token_ids)
    assert continued == hashes
    for index, block_hash in enumerate(hashes):
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        assert block_hash == hash_block(one.parent(hashes, index), tokens)


def test_a_partial_block_is_told_from_a_full_one() -> None:
    root = root_hash("m")
    assert len({hash_block(root, ids) for ids in ([], [0], [0, 0], [0, 0, 0])}) == 4


def test_any_sequence_of_tokens_is_taken() -> None:
    root = root_hash("m")
    assert hash_blocks(root, (1, 2, 3, 4), 2) == hash_blocks(root, [1, 2, 3, 4], 2) == hash_blocks(root, range(1, 5), 2)
