"""An answer's place in its grammar."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from raydix.engine.core.answers.lead import Before, Behind, Inside, Lead
from raydix.engine.core.worker.drafts.forms import CERTAIN, Choose, FormToken
from raydix.engine.model.grammar_source import MAX_FORCED_BYTES, GrammarError, first_words

# Most tokens of which one is chosen. Between two texts more are allowed: every token that begins one of them.
FEW = 256
PLACE_BYTES = 16


class Led(NamedTuple):
    """A token consumed while there was, or could be, a lead, and what was true before it."""

    token_id: int
    place: Before | Inside
    is_bound: bool
    num_matched: int


class Matcher:
    """The place that some tokens lead to: a function of the grammar and of these tokens, and of nothing else.

    So the place is found again by consuming the tokens, wherever a request goes on. Drafts are consumed, checked and
    rolled back in the same way. The grammar begins behind the answer's lead; while tokens may be the beginning of
    either, they are taken for both.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        lead: Lead | None = None,
        table: Sequence[bytes] = (),
        *,
        may_force_long_text: bool = True,
    ) -> None:
        """Begin at the beginning of a compiled grammar, which stays unchanged. `table`: the bytes of each token, where
        there may be a lead. `may_force_long_text`: False where the grammar's source is known to be too short for it."""
        self.state = compiled.deep_copy()
        self.num_consumed = 0
        self.is_hard = False
        """True if nothing is to be chosen: the masks take too long."""
        self.forces_long_texts = False
        """True if no forced text is looked for: one was longer than `MAX_FORCED_BYTES`."""
        self._may_force_long_text = may_force_long_text
        self.lead = lead
        self._table = table
        self._begin()

    def _begin(self) -> None:
        self.place: Before | Inside | None = None if self.lead is None else self.lead.start
        """Place in the lead; None behind it."""
        self.is_bound = not isinstance(self.place, Inside)
        """True if the next token may go on in the grammar."""
        self._leading: list[Led] = []  # tokens consumed while there was, or could be, a lead
        self._num_matched = 0  # tokens of these that the grammar has consumed, too

    def follow(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Consume the new tokens of an answer, which is `token_ids` from `start` on.

        Raises GrammarError if the grammar forbids one of them, or cannot tell.
        """
        new = token_ids[start + self.num_consumed :]
        if new and self.consume(new) < len(new):
            if self.state.is_error():
                raise GrammarError(self.reason())
            raise GrammarError("the grammar does not allow the tokens generated so far")

    def consume(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the first that the grammar forbids; returns how many were consumed."""
        count = 0
        while self.place is not None and count < len(token_ids) and self._consume_leading(token_ids[count]):
            count += 1
        if self.place is None:
            count += self.state.try_consume_tokens(list(token_ids[count:]))
        self.num_consumed += count
        return count

    def _consume_leading(self, token_id: int) -> bool:
        """Consume a token where there may be a lead; False, and nothing is consumed, if the token is forbidden."""
        assert self.lead is not None and self.place is not None
        before = Led(token_id, self.place, self.is_bound, self._num_matched)
        place = self.lead.after(self.place, self._table[token_id])
        if isinstance(place, Inside | Behind):
            self._roll_back_state(self._num_matched)
            self._num_matched = 0
            self.is_bound = isinstance(place, Behind)
        else:
            is_matched = self.is_bound and self.state.try_consume_tokens([token_id]) == 1
            if place is None and not is_matched:
                return False
            self._num_matched += is_matched
            self.is_bound = is_matched
        self.place = None if isinstance(place, Behind) else place
        self._leading.append(before)
        return True

    def roll_back(self, count: int) -> None:
        """Forget the last `count` consumed tokens."""
        assert 0 <= count <= self.num_consumed
        num_kept = self.num_consumed - count
        if num_kept >= len(self._leading):
            self._roll_back_state(count)
        elif self._num_matched or self._leading[num_kept].num_matched:  # the state has consumed tokens of both
            self._begin_again([led.token_id for led in self._leading[:num_kept]])
        else:
            self._roll_back_state(self.num_consumed - len(self._leading))
            self.place, self.is_bound = self._leading[num_kept].place, self._leading[num_kept].is_bound
            del self._leading[num_kept:]
        self.num_consumed = num_kept

    def _begin_again(self, token_ids: Sequence[int]) -> None:
        self.state.reset()
        self._begin()
        self.num_consumed = 0
        self.consume(token_ids)

    def _roll_back_state(self, count: int) -> None:
        if count and not self.state.rollback(count):
            raise GrammarError(self.reason())

    def forced(self) -> list[int]:
        """Return the next tokens that are the only allowed ones in their places, if any. Where the grammar forces a
        text, the text is allowed in the tokenizer's own tokens only. A text of more than `MAX_FORCED_BYTES` is not cut
        into tokens, and none is looked for after it: llguidance would hold the interpreter's lock all the time."""
        if self.place is not None or self.forces_long_texts:
            return []
        if self._may_force_long_text:
            # The mask of the place finds the text, too, and without the lock; then its length is known at once.
            self.state.compute_bitmask()
            self.forces_long_texts = len(self.state.compute_ff_bytes()) > MAX_FORCED_BYTES
            if self.forces_long_texts:
                return []
        token_ids: list[int] = self.state.compute_ff_tokens()
        return token_ids

    def walk(self, count: int, least: float, choose: Choose) -> list[FormToken]:
        """Return at most `count` next tokens, forced ones and chosen ones of at most `FEW`, and stay in place. The walk
        ends where its chance would fall below `least`."""
        begin, found, chance = self.num_consumed, list[FormToken](), CERTAIN
        while len(found) < count:
            further = [FormToken(token_id, chance) for token_id in self.forced()[: count - len(found)]]
            if not further and self.place is None and not self.state.is_stopped():
                further = self._chosen(chance, least, choose)
            found += further
            token_ids = [each.token_id for each in further if each.token_id is not None]
            if not token_ids or self.consume(token_ids) < len(token_ids):
                break
            chance = found[-1].chance
        self.roll_back(self.num_consumed - begin)
        return found

    def _chosen(self, chance: float, least: float, choose: Choose) -> list[FormToken]:
        """Return the guess of the next token, behind others that are right with this chance; nothing where more than
        `FEW` are allowed, or only the end."""
        mask: bytes = self.state.compute_bitmask()
        words = np.frombuffer(mask, np.uint32)
        if not 1 < np.bitwise_count(words).sum() <= FEW:
            return []
        place = blake2b(mask, digest_size=PLACE_BYTES).digest()
        choice = choose(place)
        if choice is None or chance * choice.chance < least:
            return [FormToken(None, 0.0, place)]
        return [FormToken(choice.token_id, chance * choice.chance, place)]

    def reason(self, *, is_restricted: bool = False) -> str:
        """Return the reason why nothing can follow; `is_restricted`: the request allows some tokens only."""
        if self.state.is_error():
            return first_words(self.state.get_error())
        further = "none of 'allowed_token_ids'" if is_restricted else "no further token"
        return f"the grammar allows {further}"
