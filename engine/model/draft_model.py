"""Guesses of requests' next tokens by a smaller model, over a KV pool of its own.

The model draws each guess as the answer's token will be drawn: with the noise of its position and the request's own
parameters, all but its grammar. So two models that differ little mostly draw the same token, at any temperature.

KV belongs to a request while it runs. Positions up to the first token that differs from the request's stay; others are
written again. Neither other requests nor other processes see anything of it.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.core.worker.drafts.draft_model import ModelCostFit, ModelCosts, Wanted
from engine.core.worker.drafts.rows import DraftedRow, Row
from engine.core.worker.request import Request
from engine.model.decoder import Decoder
from engine.model.kv_pool import KVPool
from engine.model.runner import Span, lay_out
from engine.model.sampler import choose_tokens

logger = logging.getLogger(__name__)

BEGUN_PER_STEP = 256
"""Tokens of prompts computed before one step; the beginning of a longer prompt takes several steps."""


@dataclass(slots=True)
class Held:
    """The KV of one request."""

    request: Request
    blocks: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Tokens with KV in the blocks."""
    num_sure: int = 0
    """Leading ones of these known to be the request's."""
    num_checked: int = 0
    """Tokens of the request found in the model's vocabulary."""

    @property
    def num_missing(self) -> int:
        """Tokens of the request without KV, besides the last one."""
        return len(self.request.token_ids) - 1 - len(self.token_ids)

    def follow(self) -> None:
        """Forget tokens other than the request's, and the one whose next token is to be guessed."""
        known, token_ids = self.num_sure, self.request.token_ids
        most = min(len(self.token_ids), len(token_ids) - 1)
        while known < most and self.token_ids[known] == token_ids[known]:
            known += 1
        self.num_sure = min(known, most)
        del self.token_ids[self.num_sure :]


class _Part(NamedTuple):
    """Tokens of one request in a pass."""

    held: Held
    token_ids: Sequence[int]
    drafted: tuple[int, ...] | None
    """Guesses so far, the last one in `token_ids`; None if nothing is to be guessed in this pass."""


class PagedDraftModel:
    """`engine.core.worker.drafts.draft_model.DraftModel`: a decoder over `kv_pool`, all of which belongs to it."""

    def __init__(self, decoder: Decoder, kv_pool: KVPool, vocab_size: int) -> None:
        """`vocab_size`: of the model whose answers are guessed, which may be padded differently."""
        self._decoder = decoder
        self._pool = kv_pool
        self._vocab_size = vocab_size
        self._free = list(range(kv_pool.num_blocks))
        self._held: dict[str, Held] = {}
        self._fit = ModelCostFit()
        self._seconds = 0.0
        self._is_broken = False

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def costs(self) -> ModelCosts:
        """The costs of passes as measured so far."""
        return self._fit.costs()

    def rest(self) -> None:
        """Note a step without guesses."""
        self._fit.rest()

    def take_seconds(self) -> float:
        """Seconds spent since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def keep(self, requests: Collection[Request]) -> None:
        """Give back the blocks of all other requests."""
        kept = {id(request) for request in requests}
        for request_id, held in list(self._held.items()):
            if id(held.request) not in kept:
                self._free += held.blocks
                del self._held[request_id]

    def num_missing(self, request: Request, num_tokens: int) -> int | None:
        """Tokens to compute before the first guess, besides the request's last one; None where there is no room, or
        where the model does not have a token of the request."""
        held = self._held.get(request.request_id) or Held(request)
        if self._is_broken or not self._takes(held):
            return None
        num_positions = len(request.token_ids) + num_tokens
        num_blocks = self._blocks_for(num_positions) - len(held.blocks)
        if num_positions > self._decoder.max_position or num_blocks > len(self._free):
            return None
        held.follow()
        return held.num_missing

    def guesses(self, wanted: Sequence[Wanted]) -> Mapping[str, Sequence[int]]:
        """The next tokens of requests. Of a prompt at most `BEGUN_PER_STEP` tokens are computed at a time, and its
        request is guessed on when all are. A model that fails makes no more guesses, and harms no request."""
        started = time.perf_counter()
        try:
            return self._guesses(wanted)
        except Exception:  # of any kind, of a device's too: no answer needs a guess
            logger.exception("the draft model fails: there are no more drafts of it")
            self._is_broken = True
            self._held.clear()
            return {}
        finally:
            self._seconds += time.perf_counter() - started

    def check_integrity(self) -> None:
        """Assert that each block is free or held once."""
        blocks = [*self._free, *(block for held in self._held.values() for block in held.blocks)]
        assert self._is_broken or sorted(blocks) == list(range(self._pool.num_blocks))

    def _guesses(self, wanted: Sequence[Wanted]) -> dict[str, tuple[int, ...]]:
        counts = {request.request_id: count for request, count in wanted}
        parts = self._begin([held for each in wanted if (held := self._holding(*each)) is not None])
        found = dict[str, tuple[int, ...]]()
        while parts:
            guessed = self._pass(parts)
            for part, guess in guessed:
                found[part.held.request.request_id] = (*(part.drafted or ()), guess)
            parts = [
                _Part(part.held, [guess], found[part.held.request.request_id])
                for part, guess in guessed
                if len(found[part.held.request.request_id]) < counts[part.held.request.request_id]
            ]
        return found

    def _begin(self, holding: Sequence[Held]) -> list[_Part]:
        """The parts of the first pass: the shortest first, so that no long prompt delays requests under way."""
        parts, left = list[_Part](), BEGUN_PER_STEP
        for held in sorted(holding, key=lambda held: held.num_missing):
            missing = held.request.token_ids[len(held.token_ids) :]
            begun = missing if held.num_missing <= left else missing[:left]
            left -= min(left, held.num_missing)
            if begun:
                parts.append(_Part(held, begun, () if len(begun) == len(missing) else None))
        return parts

    def _holding(self, request: Request, num_tokens: int) -> Held | None:
        """The KV of a request, with room for so many guesses; None if others have taken the room meanwhile."""
        held = self._held.setdefault(request.request_id, Held(request))
        num_blocks = self._blocks_for(len(request.token_ids) + num_tokens) - len(held.blocks)
        if num_blocks > len(self._free):
            return None
        held.blocks += [self._free.pop() for _ in range(num_blocks)]
        held.follow()
        return held

    @torch.inference_mode()
    def _pass(self, parts: Sequence[_Part]) -> list[tuple[_Part, int]]:
        """Compute tokens; returns a guess for each part that wants one."""
        started = time.perf_counter()
        spans = [Span(part.token_ids, len(part.held.token_ids), part.held.blocks) for part in parts]
        ends = torch.tensor([len(span.token_ids) for span in spans]).cumsum(0).tolist()
        guessing = [(part, end - 1) for part, end in zip(parts, ends, strict=True) if part.drafted is not None]
        batch = lay_out(spans, [row for _, row in guessing], self._pool.block_size, self._pool.device)
        hidden = self._decoder.hidden(batch, self._pool)

        guesses = list[int]()
        if guessing:
            guesses = choose_tokens(self._fitted(self._decoder.logits(hidden)), [_row(part) for part, _ in guessing])
        elif self._pool.device.type == "cuda":  # the time of a pass is the device's
            torch.cuda.synchronize(self._pool.device)
        for part in parts:
            part.held.token_ids += part.token_ids
            if not part.drafted:
                part.held.num_sure = len(part.held.token_ids)
        self._fit.add(len(guessing), ends[-1] - len(guessing), time.perf_counter() - started)
        return [(part, guess) for (part, _), guess in zip(guessing, guesses, strict=True)]

    def _fitted(self, logits: Tensor) -> Tensor:
        """The logits of as many tokens as the other model has."""
        num_more = self._vocab_size - logits.shape[1]
        if num_more <= 0:
            return logits[:, : self._vocab_size].contiguous()
        return functional.pad(logits, (0, num_more), value=-torch.inf)

    def _takes(self, held: Held) -> bool:
        """True if the model has all tokens of a request."""
        new = held.request.token_ids[held.num_checked :]
        if new and max(new) >= self._decoder.config.vocab_size:
            return False
        held.num_checked += len(new)
        return True

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self._pool.block_size)


def _row(part: _Part) -> Row:
    """The request behind the guesses so far."""
    return DraftedRow(part.held.request, part.drafted) if part.drafted else part.held.request
