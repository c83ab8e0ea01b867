"""The places of one worker's requests in their grammars: one matcher per request, and the masks of its tokens.

| thread | does |
|---|---|
| engine | asks for grammars, hears of compiled ones, looks at drafts, begins and takes the masks of a step |
| `grammar` | compiles (`GrammarCompiler`) |
| `mask` | moves the matchers on and computes masks while the model runs |
"""

import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from raydix.engine.core.types import Grammar, NoteWork, note_nothing
from raydix.engine.core.worker.drafts.forms import Choose, FormToken
from raydix.engine.core.worker.drafts.rows import DraftedRow, Row, with_drafts
from raydix.engine.model.drafted_places import DraftedPlace, led_place
from raydix.engine.model.lead_masks import LeadMasks
from raydix.engine.model.masks import Mask, Masks, early_stops, num_words, restrict

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from raydix.engine.model.drafted_places import MaskJob
    from raydix.engine.model.matcher import Matcher

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHOICE_SHARE = 0.02  # part of the engine's time that walks may take on average
MAX_WALK_S = 0.5e-3  # processor time of one walk; the mask with which the walk exceeds the time is its last
HARD_S = 5e-3  # processor time of a walk, mostly of one mask, that makes a grammar a hard one
MOST_S = 1e-3  # processor time that may be saved up
MAX_COMPILED = 256  # grammars kept compiled; others are compiled again when needed


@dataclass(frozen=True, slots=True)
class GrammarNews:
    """A grammar has been compiled, or cannot be."""

    digest: bytes
    error: str | None = None


class GrammarCompiler:
    """Compiles the grammars of one worker's requests beside the engine's thread, and keeps them by digest.

    The thread `grammar` loads the tokenizer once, when the engine idles or for the first grammar, and compiles.
    llguidance holds the interpreter's lock for 0.3 s or more while it builds its tokenizer, so that streams would stand
    still for one client's first grammar. The lock is free while the engine idles (`prepare`). A start would be longer
    by as much; a worker that sees no grammar at all spends half a second of processor time in which nobody waits, and
    60 MiB.

    `load` makes the tokenizer, with its end-of-sequence ids, in a thread; `num_words`: 32-bit words of a mask.
    """

    def __init__(self, load: "Callable[[], LLTokenizer]", num_words: int) -> None:
        self._load = load
        self._num_words = num_words
        self.tokenizer: LLTokenizer | None = None
        """None until it is loaded."""
        self.table: Sequence[bytes] | None = None
        """The bytes of each token; None until a grammar has a lead."""
        self.leads: LeadMasks | None = None
        self._loading = Lock()  # held while the tokenizer, or the table of its tokens, is made
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        # Held around `_compiled`, which the engine's thread, the compiling one and the one of masks use.
        self._lock = Lock()
        self.hard: set[bytes] = set()
        """Grammars in which nothing is chosen: a walk took too long, or broke its matcher."""
        self.long: set[bytes] = set()
        """Grammars whose forced texts are not looked for: one was too long."""
        self._pending: set[bytes] = set()
        self._news: queue.SimpleQueue[GrammarNews] = queue.SimpleQueue()
        self._thread: ThreadPoolExecutor | None = None
        self.wake: Callable[[], None] = lambda: None
        """Called in a thread when there is news."""
        self.note_work: NoteWork = note_nothing

    def compiled(self, grammar: Grammar, *, is_used: bool = False) -> "LLMatcher | None":
        """Return a grammar as it was compiled; None if it is not. `is_used`: others are forgotten before it."""
        with self._lock:
            matcher = self._compiled.get(grammar.digest)
            # A grammar that is compiled can still lack the table of tokens, which only those with a lead need.
            if matcher is None or (grammar.lead is not None and self.leads is None):
                return None
            if is_used:
                self._compiled.move_to_end(grammar.digest)
            return matcher

    def prepare(self) -> None:
        """Have the tokenizer loaded, in a thread, while nothing else is to be done."""
        self._compiling_thread().submit(self._load_once)

    def _compiling_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        return self._thread

    def _load_once(self) -> "LLTokenizer":
        with self._loading:
            if self.tokenizer is None:
                self.tokenizer = self._load()
            return self.tokenizer

    def require(self, grammar: Grammar, request_id: str = "") -> bool:
        """Return True if the grammar is compiled; otherwise there will be news of it. `request_id`: who wants it."""
        digest = grammar.digest
        if self.compiled(grammar, is_used=True) is not None:
            return True
        if digest not in self._pending:
            # One compilation for all who wait: a hundred requests of one schema compile it once.
            self._pending.add(digest)
            self._compiling_thread().submit(self._compile_and_tell, grammar, digest, request_id)
        return False

    def news(self) -> list[GrammarNews]:
        """Return the news since the last call."""
        news = []
        while not self._news.empty():
            news.append(self._news.get())
        self._pending.difference_update(each.digest for each in news)
        return news

    @property
    def num_pending(self) -> int:
        """Grammars that are being compiled, or wait for it; any thread may ask."""
        return len(self._pending)

    def settle(self) -> None:
        """Return when everything asked for so far is compiled; for tests and measurements."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    def _compile_and_tell(self, grammar: Grammar, digest: bytes, request_id: str) -> None:
        error = None
        # Were this process to die now, its last words would name the request whose grammar did it.
        self.note_work((request_id,))
        try:
            self.compile(grammar)
        except BaseException as caught:  # of any kind, also a panic of Rust's: its requests must not wait for ever
            error = str(caught)
        self.note_work(())
        # The news before the wake: the engine's thread finds it when it looks.
        self._news.put(GrammarNews(digest, error))
        self.wake()

    def compile(self, grammar: Grammar) -> "LLMatcher":
        """Compile a grammar in canonical form, in any thread; llguidance does so without the interpreter's lock. Raises
        GrammarError if it cannot be compiled."""
        from llguidance import LLMatcher

        from raydix.engine.model.grammar_source import GrammarError, first_words, limits, native_source

        tokenizer = self._load_once()
        with self._loading:
            if grammar.lead is not None and self.leads is None:
                self.table = [tokenizer.decode_bytes([each]) for each in range(tokenizer.vocab_size)]
                self.leads = LeadMasks(self.table, tokenizer.eos_tokens, self._num_words)
        matcher = LLMatcher(tokenizer, native_source(grammar), log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(first_words(matcher.get_error()))

        with self._lock:
            self._compiled[grammar.digest] = matcher
            if len(self._compiled) > MAX_COMPILED:
                # Matchers under way keep their own copy; the marks of a forgotten grammar would grow for ever.
                oldest, _ = self._compiled.popitem(last=False)
                self.hard.discard(oldest)
                self.long.discard(oldest)
        return matcher


class TimeShare:
    """Processor time of a thread for work that nobody waits for: a share of the time that passes. Work that takes more
    than is left is paid back by waiting."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._left_s = MOST_S
        self._since_s = time.monotonic()

    def has_time(self) -> bool:
        """True if the work may be done now."""
        now = time.monotonic()
        self._left_s = min(MOST_S, self._left_s + self._share * (now - self._since_s))
        self._since_s = now
        return self._left_s > 0

    @contextmanager
    def taken(self) -> Iterator["Stopwatch"]:
        """Take the processor time of the block, and tell it in the block."""
        stopwatch = Stopwatch()
        try:
            yield stopwatch
        finally:
            self._left_s -= stopwatch.so_far_s()


class Stopwatch:
    """Processor time of this thread since the beginning."""

    def __init__(self) -> None:
        self._begun_s = time.thread_time()

    def so_far_s(self) -> float:
        return time.thread_time() - self._begun_s


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Tokens that the rows of a step may choose."""

    rows: list[int]
    """Place of each row in `bits`, or -1 if the row chooses freely."""
    bits: Masks
    """[num_masks, num_words]"""
    dead_ends: dict[int, str]
    """Rows of requests that can choose nothing, each with the reason."""
    end_ids: frozenset[int]
    """Tokens behind which the grammar allows nothing: the ends of a sequence."""
    ended: frozenset[int] = frozenset()
    """Rows of drafts that are no rows of the answer: the grammar forbids a token before, or allows nothing behind. A
    dead end gets its reason in the step in which the row is the request's own."""


class Grammars:
    """Matchers of a worker's requests in their grammars, over `vocab_size` tokens.

    `load` makes the tokenizer, with its end-of-sequence ids, in a thread.
    """

    def __init__(self, load: "Callable[[], LLTokenizer]", vocab_size: int) -> None:
        self._num_words = num_words(vocab_size)
        self.compiler = GrammarCompiler(load, self._num_words)
        self._matchers: dict[str, tuple[int, Matcher]] = {}  # matchers by request id, each with its attempt
        self._masker: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._walking = TimeShare(CHOICE_SHARE)
        self.note_work: NoteWork = note_nothing

    # Drafts

    def num_allowed(self, request: Row, token_ids: Sequence[int]) -> int:
        """Return the number of these next tokens, from the first, that the request's grammar allows; 0 where the
        request has no place in the grammar, for which its masks will have the reason, or the grammar is not compiled
        any more, which its masks will do."""
        return self._guessed(request, lambda matcher: _num_consumed(matcher, token_ids), 0)

    def forced(self, request: Row) -> Sequence[int]:
        """Return the next tokens that the request's grammar leaves no choice about; none where `num_allowed` is 0."""
        return self._guessed(request, lambda matcher: self._forced(request, matcher), ())

    def _forced(self, request: Row, matcher: "Matcher") -> Sequence[int]:
        """Return the forced tokens, unless such a text of this grammar was once too long."""
        token_ids = matcher.forced()
        self._note_long(request, matcher)
        return token_ids

    def _note_long(self, request: Row, matcher: "Matcher") -> None:
        """Have no forced text looked for in other answers, too, where a request's matcher has met one too long."""
        grammar = request.assignment.sampling.grammar
        if matcher.forces_long_texts and grammar is not None:
            self.compiler.long.add(grammar.digest)

    def walk(self, request: Row, count: int, least: float, choose: Choose) -> Sequence[FormToken]:
        """Return at most `count` next tokens, forced by the request's grammar or chosen where a few are allowed; none
        where the request has no place in a compiled grammar. All choices together may take `CHOICE_SHARE` of the time:
        without time left there are forced tokens only."""

        def walk(matcher: "Matcher") -> Sequence[FormToken]:
            if matcher.is_hard or matcher.forces_long_texts or not self._walking.has_time():
                return [FormToken(token_id) for token_id in self._forced(request, matcher)[:count]]
            # Time is taken from a budget of the engine's whole time, so that grammars with expensive masks cannot slow
            # every stream down.
            with self._walking.taken() as taken:
                try:
                    return matcher.walk(
                        count, least, lambda place: choose(place) if taken.so_far_s() < MAX_WALK_S else None
                    )
                finally:
                    self._note_long(request, matcher)
                    if matcher.state.is_error() or taken.so_far_s() > HARD_S:
                        self._call_hard(request, matcher)

        return self._guessed(request, walk, ())

    def _call_hard(self, request: Row, matcher: "Matcher") -> None:
        """Have nothing chosen any more in a request's grammar."""
        grammar = request.assignment.sampling.grammar
        assert grammar is not None
        matcher.is_hard = True
        self.compiler.hard.add(grammar.digest)

    def _guessed(self, request: Row, look: "Callable[[Matcher], T]", nothing: T) -> T:
        """Return the result of a look at a request's matcher that leaves the matcher as it was; `nothing` where there
        is none yet and its grammar would have to be compiled, which is not for the engine's thread. A look that breaks
        the matcher costs the matcher: the next masks get another one."""
        # Compiling would hold up the engine's thread, with all streams, for a guess that need not be made.
        grammar = request.assignment.sampling.grammar
        if not self._has_matcher(request) and (grammar is None or self.compiler.compiled(grammar) is None):
            return nothing
        self.note_work((request.request_id,))
        try:
            matcher = self._followed(request)
            found = look(matcher)
            is_broken = matcher.state.is_error()
        except Exception:  # of any kind: a guess must not end its request
            is_broken = True
        self.note_work(())
        if is_broken:
            self.forget(request.request_id)
            return nothing
        return found

    # Masks

    def begin(self, requests: Sequence[Row]) -> "Future[StepMasks] | None":
        """Begin to compute the masks of a step's rows; None if no row has a grammar.

        The requests must stay as they are until the result is there.
        """
        if not any(request.assignment.sampling.grammar is not None for request in requests):
            return None
        if self._masker is None:
            # One thread: the matchers are moved on in the order of the steps, and by nobody else meanwhile.
            self._masker = ThreadPoolExecutor(1, "mask")
        return self._masker.submit(self._masks, tuple(requests))

    def forget(self, request_id: str) -> None:
        """Drop the matcher of a request that has ended."""
        self._matchers.pop(request_id, None)

    @property
    def num_matchers(self) -> int:
        """Requests whose place in a grammar is kept."""
        return len(self._matchers)

    def _masks(self, requests: Sequence[Row]) -> StepMasks:
        places, dead_ends = list[DraftedPlace](), dict[int, str]()
        row = num_masks = 0
        for request, draft in with_drafts(requests):
            if request.assignment.sampling.grammar is not None:
                try:
                    # A place has one mask for its own row and one behind each token of its draft.
                    places.append(DraftedPlace(row, num_masks, self._followed_or_renewed(request), draft))
                    num_masks += 1 + len(draft)
                except Exception as error:  # of any kind: the row's request is to end alone
                    dead_ends[row] = str(error)
            row += 1 + len(draft)

        try:
            bits = self._fill(places)
        except Exception:  # of any kind: some matchers may have consumed tokens of drafts
            for place in places:
                self.forget(requests[place.row].request_id)
            # Without drafts the same would happen again: the error is the step's.
            if not any(place.draft for place in places):
                raise
            logger.exception("masks of drafts not computed")
            bits = self._fill_without_drafts(places, requests)
        for place in places:
            if self._matcher(requests[place.row]).state.is_error():
                self._fill_again(place, requests[place.row], bits)

        assert self.compiler.tokenizer is not None or not places
        end_ids = frozenset(self.compiler.tokenizer.eos_tokens if self.compiler.tokenizer is not None else ())
        rows = [-1] * len(requests)
        for place in places:
            for behind in range(1 + len(place.draft)):
                rows[place.row + behind] = at = place.at + behind
                forbid(bits[at], requests[place.row + behind], end_ids)
        return self._usable(requests, rows, bits, dead_ends, end_ids)

    def _followed(self, request: Row) -> "Matcher":
        """Return the matcher of a request, moved on to the request's last token. Raises GrammarError."""
        matcher = self._matcher(request)
        matcher.follow(request.token_ids, request.assignment.num_prompt_tokens)
        return matcher

    def _followed_or_renewed(self, request: Row) -> "Matcher":
        """Return the matcher of a request, moved on, or a new one if the old one fails. Raises GrammarError."""
        from raydix.engine.model.grammar_source import GrammarError

        try:
            return self._followed(request)
        except GrammarError as error:
            if _is_of_the_place(str(error)):
                raise
            self._renew(request)
            return self._followed(request)

    def _renew(self, request: Row) -> None:
        """Give a request a matcher of its grammar compiled again. What all copies of a compiled grammar compute counts
        against one limit, so drafts, walks and other answers may have reached the limit. Raises GrammarError."""
        self.forget(request.request_id)
        grammar = request.assignment.sampling.grammar
        assert grammar is not None
        self._begin_matcher(request, grammar, self.compiler.compile(grammar))

    def _fill(self, places: Sequence[DraftedPlace]) -> Masks:
        """Compute the masks of places and of the drafts behind, as far as the drafts are allowed; others stay empty."""
        if not places:
            return np.zeros((0, self._num_words), np.int32)
        assert self.compiler.tokenizer is not None
        size = num_words(self.compiler.tokenizer.vocab_size)
        bits = np.zeros((sum(1 + len(place.draft) for place in places), size), np.int32)

        led = [led_place(place, self.compiler.leads) for place in places]
        self._compute([job for each in led if (job := each.job) is not None], bits)
        # The tokenizer may have more tokens than the model has logits; words for those are cut off.
        bits = np.ascontiguousarray(bits[:, : self._num_words])
        for place, lead in zip(places, led, strict=True):
            for behind, mask in enumerate(lead.masks):
                # Either the lead goes on or the answer begins: a token is allowed if one of them allows it.
                bits[place.at + behind] |= mask
            place.matcher.roll_back(lead.num_consumed)
        return bits

    def _compute(self, jobs: "Sequence[MaskJob]", bits: Masks) -> None:
        if self._executor is None and jobs:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        memory = bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits)
        if drafted := [job for job in jobs if job[2]]:
            assert self._executor is not None
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)
        if alone := [(state, at) for state, at, draft in jobs if not draft]:
            assert self._executor is not None
            self._executor.unsafe_compute_mask_ptr(alone, *memory)

    def _fill_without_drafts(self, places: Sequence[DraftedPlace], requests: Sequence[Row]) -> Masks:
        """Compute the first mask of each place, by new matchers; those of the drafts stay empty."""
        try:
            alone = [
                DraftedPlace(place.row, index, self._followed(requests[place.row]), ())
                for index, place in enumerate(places)
            ]
            own = self._fill(alone)
        except Exception:
            for place in places:
                self.forget(requests[place.row].request_id)
            raise
        bits = np.zeros((sum(1 + len(place.draft) for place in places), self._num_words), np.int32)
        bits[[place.at for place in places]] = own
        return bits

    def _fill_again(self, place: DraftedPlace, request: Row, bits: Masks) -> None:
        """Compute the first mask of a place alone, by a new matcher, or by one of the grammar compiled again: neither a
        draft nor other answers may end the request."""
        bits[place.at : place.at + 1 + len(place.draft)] = 0
        if _is_of_the_place(self._matcher(request).state.get_error()):
            return
        lost: Exception | None = None
        for begin_again in (partial(self.forget, request.request_id), partial(self._renew, request)):
            try:
                begin_again()
                matcher = self._followed(request)
                bits[place.at] = self._fill([DraftedPlace(place.row, 0, matcher, ())])[0]
            except Exception as error:  # of any kind: the request is to end alone
                lost = error
            else:
                if not matcher.state.is_error():
                    return
        logger.error("the place of %s in its grammar is lost", request.request_id, exc_info=lost)

    def _usable(
        self,
        requests: Sequence[Row],
        rows: list[int],
        bits: Masks,
        dead_ends: dict[int, str],
        end_ids: frozenset[int],
    ) -> StepMasks:
        """Return the masks, without the rows that can choose nothing."""
        is_open = (bits != 0).any(axis=1).tolist()
        ended = set[int]()
        for row, request in enumerate(requests):
            if isinstance(request, DraftedRow):
                # A row behind a token that was not allowed is no row of the answer, and neither is any behind it.
                if row - 1 in ended or row - 1 in dead_ends or (rows[row] >= 0 and not is_open[rows[row]]):
                    ended.add(row)
            elif rows[row] >= 0:
                matcher, sampling = self._matcher(request), request.assignment.sampling
                if matcher.state.is_error() or not is_open[rows[row]]:
                    dead_ends[row] = matcher.reason(is_restricted=sampling.allowed_token_ids is not None)
        rows = [-1 if row in ended or row in dead_ends else at for row, at in enumerate(rows)]
        return StepMasks(rows, bits, dead_ends, end_ids, ended=frozenset(ended))

    def _has_matcher(self, request: Row) -> bool:
        """True if this attempt of a request has a matcher."""
        return self._matchers.get(request.request_id, (None, None))[0] == request.assignment.attempt

    def _matcher(self, request: Row) -> "Matcher":
        """Return the matcher of a request, made anew for a new attempt."""
        attempt, matcher = self._matchers.get(request.request_id, (None, None))
        if matcher is None or attempt != request.assignment.attempt:
            grammar = request.assignment.sampling.grammar
            assert grammar is not None
            compiled = self.compiler.compiled(grammar)
            if compiled is None:
                compiled = self.compiler.compile(grammar)
            # Of a new attempt as well: the worker may have had an earlier one, whose matcher is at another place.
            matcher = self._begin_matcher(request, grammar, compiled)
        return matcher

    def _begin_matcher(self, request: Row, grammar: Grammar, compiled: "LLMatcher") -> "Matcher":
        from raydix.engine.model.grammar_source import may_force_long_text
        from raydix.engine.model.matcher import Matcher

        matcher = Matcher(
            compiled, grammar.lead, self.compiler.table or (), may_force_long_text=may_force_long_text(grammar)
        )
        matcher.is_hard = grammar.digest in self.compiler.hard
        matcher.forces_long_texts = grammar.digest in self.compiler.long
        self._matchers[request.request_id] = request.assignment.attempt, matcher
        return matcher


def _is_of_the_place(error: str) -> bool:
    """True for an error that a matcher of the same grammar compiled again would have at this place, too: the place has
    more ways to go on than llguidance allows. Compiling such a grammar takes a second in which all streams wait."""
    return " items; max is " in error


def _num_consumed(matcher: "Matcher", token_ids: Sequence[int]) -> int:
    """Return the number of these next tokens that are allowed, and leave the matcher where it was."""
    count = matcher.consume(token_ids)
    matcher.roll_back(count)
    return count


def forbid(mask: Mask, request: Row, end_ids: frozenset[int]) -> None:
    """Take tokens out of the mask of a request's grammar that are excluded or would end the answer too early.

    Too early are all stop tokens before `min_tokens`, and with `ignore_eos` the ends of a sequence. The grammar wins
    where nothing else is allowed.
    """
    restrict(mask, request, end_ids.difference(request.assignment.sampling.stop_token_ids).union(early_stops(request)))
