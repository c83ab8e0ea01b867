"""Drafters whose drafts an identity check compares: each source alone, all, and drafts made to do harm."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from benchmarks.drafting.comparing import Answer
from raydix.engine.core.settings import DraftLimits
from raydix.engine.core.types import DraftSource
from raydix.engine.core.worker.drafts.draft import Draft
from raydix.engine.core.worker.drafts.drafter import Drafter
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.scheduler import Scheduler
from raydix.engine.model.grammars import Grammars

ANY = 1 << 20
"""More than any vocabulary has; ids are brought into the vocabulary at last."""
LIKELY = (0, 1, 2, 198, 216)
"""Ends of sequences, line ends and spaces of the default model: the worst to be wrong about."""
SHARE_DRAFTED = 0.8
"""Requests that get a draft in a step; the others decode beside them without."""

Spoil: TypeAlias = Callable[[Sequence[int], random.Random, int], list[int]]
"""Makes a draft of at most so many tokens of those that are right."""


def adversarial(right: Sequence[int], chance: random.Random, depth: int) -> list[int]:
    """Right up to somewhere, and then almost right: another end, a token left out, said twice, or exchanged."""
    end = chance.randint(0, min(depth, len(right)))
    behind = list(right[end:])
    wrong = chance.choice(
        [
            behind,
            [chance.choice(LIKELY), *behind],
            behind[1:],
            behind[:1] * 2 + behind[1:],
            [*reversed(behind[:2]), *behind[2:]],
            [token_id ^ 1 for token_id in behind],
        ]
    )
    return [*right[:end], *wrong][:depth]


def at_random(right: Sequence[int], chance: random.Random, depth: int) -> list[int]:
    """Any tokens."""
    return [chance.randrange(ANY) for _ in range(chance.randint(1, depth))]


class Told(Drafter):
    """Drafts made of what the answers are known to be, whatever they cost."""

    def __init__(self, limits: DraftLimits, vocab_size: int, answers: Mapping[str, Answer], spoil: Spoil) -> None:
        super().__init__(limits)
        self._vocab_size = vocab_size
        self._depth = limits.depth
        self._answers = answers
        self._spoil = spoil
        self._chance = random.Random(1)

    def propose(self, scheduler: Scheduler) -> list[Draft]:
        running = scheduler.running.values()
        return [self._draft_of(request) for request in running if self._chance.random() < SHARE_DRAFTED]

    def _draft_of(self, request: Request) -> Draft:
        after = self._answers[request.request_id][request.num_output :]
        right = [token_id for token_id, _, _ in after if token_id is not None]
        drafted = self._spoil(right, self._chance, self._depth)
        token_ids = tuple(token_id % self._vocab_size for token_id in drafted)
        return Draft(request.request_id, DraftSource.REQUEST, token_ids, (1.0,) * len(token_ids))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of drafts."""

    name: str
    drafter: Callable[[Grammars], Drafter | None]
    """Makes the drafter of an engine with these grammars."""


def kinds(limits: DraftLimits, vocab_size: int, answers: Mapping[str, Answer]) -> list[Kind]:
    """All kinds: each source alone, a grammar's with its choices (`choices`), all sources, and spoilt drafts.

    `answers`: those to be had.
    """

    def of(sources: Sequence[DraftSource]) -> Callable[[Grammars], Drafter | None]:
        return lambda grammars: Drafter(replace(limits, sources=tuple(sources)), grammars)

    return [
        Kind("off", lambda grammars: None),
        *(Kind(source.value, of([source])) for source in DraftSource),
        Kind("choices", of([DraftSource.GRAMMAR, DraftSource.PAST])),
        Kind("all", of(list(DraftSource))),
        Kind("adversarial", lambda grammars: Told(limits, vocab_size, answers, adversarial)),
        Kind("random", lambda grammars: Told(limits, vocab_size, answers, at_random)),
    ]
