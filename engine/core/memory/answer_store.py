"""Beginnings of answers, by the name of the place where each began: what may follow there again.

Holds token ids, never text, and may forget any answer. A name stands for a whole prompt under one salt
(`BlockChain.answer_name`), so nobody finds answers of another salt.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raydix.engine.core.answers.continuations import MAX_BYTES, TOKEN_BYTES

MAX_VARIANTS = 4  # different answers kept under one name
# Memory of a name beside its answers: key, list and place in the dictionary, some 200 bytes in CPython.
NAME_BYTES = 240
VARIANT_BYTES = 160  # memory of an answer beside its token ids, some 150 bytes in CPython


@dataclass(slots=True)
class _Variant:
    token_ids: bytes
    count: int
    """Answers that began so."""
    used: int
    """Number of the last answer that did, in the order of all answers."""

    def is_like(self, token_ids: bytes) -> bool:
        """True if one is the beginning of the other."""
        return self.token_ids.startswith(token_ids) or token_ids.startswith(self.token_ids)


class AnswerStore:
    """Answers by name; the least recently used names go first when `budget_bytes` are exceeded."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        # The least recently used first, the likeliest answer of each last.
        self._answers: OrderedDict[bytes, list[_Variant]] = OrderedDict()
        self._num_kept = 0
        self.num_bytes = 0
        """Memory of all answers."""

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, name: bytes, token_ids: bytes) -> None:
        """Count an answer of which these are the packed first token ids. Of too many different ones under a name the
        least likely goes."""
        token_ids = token_ids[:MAX_BYTES]
        variants = self._answers.pop(name, [])
        # Taken out and put back by `_put`, which makes the name the most recent one, too.
        self.num_bytes -= _cost(variants)
        self._num_kept += 1
        # From the likeliest on: of answers that begin alike one is kept, with the longest beginning that was seen.
        known = next((variant for variant in reversed(variants) if variant.is_like(token_ids)), None)
        if known is not None:
            known.token_ids = max(known.token_ids, token_ids, key=len)
            known.count += 1
            known.used = self._num_kept
        elif token_ids:
            variants = [*variants[1 - MAX_VARIANTS :], _Variant(token_ids, 1, self._num_kept)]
        if variants:
            self._put(name, variants)

    def continuations(self, name: bytes) -> tuple[bytes, ...]:
        """The answers under a name, the likeliest last, together at most `MAX_BYTES`. Each gets bytes in proportion to
        the answer's count; the likeliest gets the remaining bytes, too."""
        variants = self._answers.get(name, [])
        if not variants:
            return ()
        self._answers.move_to_end(name)
        total, found, left = sum(variant.count for variant in variants), list[bytes](), MAX_BYTES
        for variant in variants[:-1]:
            # Rounded down to whole tokens, so the rest for the likeliest answer is never negative.
            share = MAX_BYTES // TOKEN_BYTES * variant.count // total * TOKEN_BYTES
            found.append(variant.token_ids[:share])
            left -= len(found[-1])
        return (*filter(None, found), variants[-1].token_ids[:left])

    def entries(self) -> list[tuple[bytes, list[tuple[bytes, int]]]]:
        """All names with the first token ids and the counts of their answers, the least recently used name and the
        least likely answer first."""
        return [(name, [(each.token_ids, each.count) for each in kept]) for name, kept in self._answers.items()]

    def restore(self, entries: Iterable[tuple[bytes, Sequence[tuple[bytes, int]]]]) -> None:
        """Take over the entries of an earlier store, of names that are unknown here."""
        for name, variants in entries:
            if name not in self._answers:
                self._num_kept += 1
                self._put(name, [_Variant(token_ids, count, self._num_kept) for token_ids, count in variants])

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()
        self.num_bytes = 0

    def check_integrity(self) -> None:
        """Assert that the memory is the answers' and within the budget, and that none are alike or empty."""
        assert self.num_bytes == sum(map(_cost, self._answers.values()))
        assert self.num_bytes <= self._budget_bytes
        for variants in self._answers.values():
            assert 0 < len(variants) <= MAX_VARIANTS and all(variant.token_ids for variant in variants)
            ranks = [(variant.count, variant.used) for variant in variants]
            assert ranks == sorted(ranks)

    def _put(self, name: bytes, variants: list[_Variant]) -> None:
        """Make these the answers under a name that is used now, and keep within the budget."""
        self._answers[name] = sorted(variants, key=lambda variant: (variant.count, variant.used))
        self.num_bytes += _cost(variants)
        while self.num_bytes > self._budget_bytes:
            self.num_bytes -= _cost(self._answers.popitem(last=False)[1])


def _cost(variants: list[_Variant]) -> int:
    num_bytes = sum(VARIANT_BYTES + len(variant.token_ids) for variant in variants)
    return NAME_BYTES + num_bytes if variants else 0
