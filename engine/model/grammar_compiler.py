"""Compiles the grammars of one worker's requests beside the engine's thread, and keeps them by digest.

The thread `grammar` loads the tokenizer once, when the engine idles or for the first grammar, and compiles. llguidance
holds the interpreter's lock for 0.3 s or more while it builds its tokenizer, so that streams would stand still for one
client's first grammar. The lock is free while the engine idles (`prepare`). A start would be longer by as much; a
worker that sees no grammar at all spends half a second of processor time in which nobody waits, and 60 MiB.
"""

import queue
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from raydix.engine.core.types import Grammar, NoteWork, note_nothing
from raydix.engine.model.lead_masks import LeadMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 256  # grammars kept compiled; others are compiled again when needed


@dataclass(frozen=True, slots=True)
class GrammarNews:
    """A grammar has been compiled, or cannot be."""

    digest: bytes
    error: str | None = None


class GrammarCompiler:
    """Compiled grammars, and what is known of each. `load` makes the tokenizer, with its end-of-sequence ids, in a
    thread; `num_words`: 32-bit words of a mask."""

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
