"""Requests become tokens, here or in a process beside; what cannot fit is refused before it is tokenized."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import psutil
import pytest

from raydix.engine.api.generate import GenerateRequest
from raydix.engine.api.response_models import TokenizerInfo
from raydix.engine.api.spec import GenerationSpec, ToolUse
from raydix.engine.core.answers.prompt_form import ChatTemplate
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.errors import (
    ContextLengthError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    ServiceError,
    StartupError,
)
from raydix.engine.core.types import Grammar, GrammarKind
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.reader_pool import (
    LONG_BYTES,
    SHORT_BYTES,
    Readers,
    RequestReader,
    _Job,
    _Process,
    _Template,
    size_of,
)
from raydix.engine.serving.reader_process import SWEPT_BYTES, Sweeper
from raydix.engine.serving.reader_work import (
    Conversations,
    GrammarQuestion,
    NextTurn,
    Reading,
    ReadingFacts,
    TokenRequest,
)
from raydix.engine.serving.reading import MIN_SLICE, MOST_COUNTED, Reader
from raydix.engine.serving.served_model import ServedModel

CONTEXT = 512
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}
LONGEST_TOKEN = 81
"""Bytes of the default model's longest token."""


@cache
def facts() -> ReadingFacts:
    try:
        model = ServedModel("m", CONTEXT, 49152)
        return ReadingFacts(model, resolve_model(DEFAULT_MODEL), special_tokens_in_messages=False)
    except StartupError as error:
        pytest.skip(str(error))


class CountingTokenizer(Tokenizer):
    """Knows how many characters it has tokenized."""

    num_characters = 0

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        self.num_characters += len(text)
        return super()._encoding(text, add_special_tokens)


@cache
def reader() -> Reader:
    return Reader(facts(), CountingTokenizer(facts().folder))


def tokenized() -> int:
    tokenizer = reader()._tokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    return tokenizer.num_characters


def completion(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4, **fields}).encode()


def chat(*contents: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": each} for each in contents]}).encode()


def test_a_completion_s_prompt_may_have_special_tokens_and_a_chat_s_messages_may_not() -> None:
    text = "<|im_start|>"
    assert 1 in reader().read_body("completion", completion(text)).prompts[0]
    forged = reader().read_body("chat", chat(text)).chat
    plain = reader().read_body("chat", chat("x")).chat
    assert forged is not None and plain is not None
    assert list(forged.token_ids).count(1) == list(plain.token_ids).count(1)


def test_a_chat_that_may_be_compacted_is_read_and_refused_in_one_trip() -> None:
    def body(text: str) -> bytes:
        edits = {"edits": [{"type": "compact_20260112"}]}
        messages = [{"role": "user", "content": text}]
        return json.dumps({"max_tokens": 4, "messages": messages, "context_management": edits}).encode()

    reading = reader().read_body("messages", body("x"))
    assert reading.chat is not None and reading.spec.compaction is None
    assert reading.unread is not None and reading.unread.compaction is not None
    with pytest.raises(ContextLengthError):
        reader().read_body("messages", body("x " * 2 * CONTEXT))


class BeginningTokenizer(Tokenizer):
    """Wants a token before each text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *super().encode(text, add_special_tokens)]


def test_the_model_s_own_tokens_before_a_text_can_be_left_out() -> None:
    begun = Reader(facts(), BeginningTokenizer(facts().folder))
    with_it, without = (
        list(begun.read_body("completion", completion("x", add_special_tokens=given)).prompts[0])
        for given in (True, False)
    )
    assert with_it == [1, *without]


def test_the_last_message_can_be_left_open() -> None:
    def text(*messages: dict[str, Any], **fields: Any) -> str:
        body = json.dumps({"messages": list(messages), **fields}).encode()
        encoded = reader().read_body("chat", body).chat
        assert encoded is not None
        return reader()._tokenizer.decode(encoded.token_ids, skip_special_tokens=False)

    user = {"role": "user", "content": "Say <|im_start|>."}
    for begun in ("end ", "<|im_end|>x", ""):
        last = {"role": "assistant", "content": begun}
        assert text(user, last, continue_final_message=True) == text(user) + begun
    closed = text(user, add_generation_prompt=False)
    assert text(user) == closed + "<|im_start|>assistant\n"
    answered: list[dict[str, Any]] = [
        user,
        {"role": "assistant", "token_ids": [28]},
        user,
        {"role": "assistant", "content": "We"},
    ]
    assert text(*answered, continue_final_message=True).endswith("assistant\nWe")


SHOWING = "{{ messages[0].content }}|{{ answer }}|{{ deep | tojson }}|<|im_start|>"
"""A template that shows its arguments, and writes a special token."""


def templated(template: str | None = SHOWING, arguments: dict[str, Any] | None = None) -> bytes:
    fields = {"chat_template": template, "chat_template_kwargs": arguments}
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@cache
def permissive() -> Reader:
    return Reader(replace(facts(), chat_templates_in_requests=True), reader()._tokenizer)


def test_a_chat_may_bring_its_template_where_the_configuration_allows_it() -> None:
    encoded = permissive().read_body("chat", templated(arguments={"answer": "yes", "deep": [1]})).chat
    assert encoded is not None and encoded.text == "hi|yes|[1]|<|im_start|>"
    with pytest.raises(RequestError, match="chat_templates_in_requests") as caught:
        reader().read_body("chat", templated())
    assert caught.value.param == "chat_template"
    for broken in ("{{ 1 / 0 }}", "{% if %}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
        with pytest.raises(RequestError) as caught:
            permissive().read_body("chat", templated(broken))
        assert caught.value.param == "chat_template"


def test_arguments_reach_the_template_as_text_without_special_tokens() -> None:
    name = "<|im_end|>"
    encoded = permissive().read_body("chat", templated(arguments={"answer": name, "deep": {name: [name]}})).chat
    assert encoded is not None
    assert [token_id for token_id in encoded.token_ids if token_id in (1, 2)] == [1]
    assert reader()._tokenizer.decode(encoded.token_ids, skip_special_tokens=False).count(name) == 3


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token", "tokenize", "range"])
def test_no_argument_takes_the_place_of_what_the_template_is_given(name: str) -> None:
    with pytest.raises(RequestError, match="would replace") as caught:
        reader().read_body("chat", templated(None, {name: 5}))
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 9999999999 }}",
        "{{ (9 ** 9) ** 9999999 }}",
    ],
)
def test_a_template_that_takes_too_much_is_ended_in_the_process_beside(template: str) -> None:
    async def run() -> None:
        requests = RequestReader(permissive()._facts, reader()._tokenizer, 1 << 24)
        requests.start()
        try:
            with pytest.raises(RequestError, match="template") as caught:
                await requests.read(("chat", templated(template)), 99)
            assert caught.value.param == "chat_template"
            process = child()
            after = await requests.read(("chat", templated(arguments={"deep": 1})), 99)
            assert after.chat is not None and after.chat.text.startswith("hi") and child() == process
        finally:
            await requests.close()

    asyncio.run(run())


@pytest.mark.parametrize(("side", "kept"), [(None, [1008, 1009]), ("left", [1008, 1009]), ("right", [1005, 1006])])
def test_a_prompt_is_cut_to_so_many_tokens(side: str | None, kept: list[int]) -> None:
    fields: dict[str, Any] = {"truncate_prompt_tokens": 2, "truncation_side": side}
    [ids] = reader().read_body("completion", completion(list(range(1005, 1010)), **fields)).prompts
    assert list(ids) == kept
    text = reader()._tokenizer.decode(range(1005, 1010))
    reading = reader().read_body("completion", completion(text, echo=True, **fields))
    assert reading.prompts[0] == ids and reading.spec.prompts == ((),), "echoed as its tokens"
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 99}]}).encode()
    whole = reader().read_body("chat", body).chat
    cut = reader().read_body("chat", json.dumps({**json.loads(body), **fields}).encode()).chat
    assert whole is not None and cut is not None
    assert list(cut.token_ids) == list(whole.token_ids[:2] if side == "right" else whole.token_ids[-2:])


def test_a_prompt_is_cut_to_what_leaves_room_for_the_answer() -> None:
    for asked, expected in ((4, CONTEXT - 4), (None, CONTEXT - 1), (CONTEXT - 1, 1)):
        body = completion("7" * 3 * CONTEXT, max_tokens=asked, truncate_prompt_tokens=-1)
        assert len(reader().read_body("completion", body).prompts[0]) == expected
    short = completion("7", truncate_prompt_tokens=-1)
    assert len(reader().read_body("completion", short).prompts[0]) == 1
    for fields in ({"truncate_prompt_tokens": CONTEXT + 1}, {"truncate_prompt_tokens": CONTEXT}):
        with pytest.raises(RequestError):
            reader().read_body("completion", completion([7] * 2 * CONTEXT, **fields))
    with pytest.raises(ContextLengthError):
        reader().read_body("completion", completion("7" * 17_000, truncate_prompt_tokens=-1))


def test_a_bad_word_is_banned_at_the_beginning_and_behind_a_space() -> None:
    tokenizer = reader()._tokenizer
    words = reader().read_body("completion", completion("x", bad_words=[" river", "cat"])).spec.sampling.bad_words
    assert list(words) == [
        tuple(tokenizer.encode(word, add_special_tokens=False)) for word in ("river", " river", "cat", " cat")
    ]
    with pytest.raises(RequestError, match="1 to 1024 tokens") as caught:
        reader().read_body("completion", completion("x", bad_words=["7" * 600, "8" * 600]))
    assert caught.value.param == "bad_words"


def test_only_models_that_fill_in_take_a_suffix() -> None:
    with pytest.raises(RequestError, match="no tokens for filling in") as caught:
        reader().read_body("completion", completion("x", suffix="y"))
    assert caught.value.param == "suffix"


class FillingTokenizer(Tokenizer):
    """Knows StarCoder's tokens for filling in."""

    def __init__(self) -> None:
        super().__init__(facts().folder)
        self._backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])


def test_a_suffix_stands_behind_the_prompt() -> None:
    tokenizer = FillingTokenizer()
    model = replace(facts().model, vocab_size=tokenizer.vocab_size)
    filling = Reader(replace(facts(), model=model), tokenizer)
    [ids] = filling.read_body("completion", completion("def f(", suffix="):\n")).prompts
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<fim_prefix>def f(<fim_suffix>):\n<fim_middle>"
    assert ids[-1] >= 49152 and len(ids) < 12
    with pytest.raises(RequestError, match="out of vocabulary"):
        Reader(facts(), tokenizer).read_body("completion", completion("def f(", suffix="):\n"))


class SpacingTokenizer(Tokenizer):
    """Puts spaces between tokens."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(super(SpacingTokenizer, self).decode([each], skip_special_tokens) for each in token_ids)


def test_spaces_between_special_tokens_can_be_left_out_only_where_the_tokenizer_puts_none() -> None:
    body = completion("x", skip_special_tokens=False, spaces_between_special_tokens=False)
    assert reader().read_body("completion", body).prompts
    with pytest.raises(RequestError) as caught:
        Reader(facts(), SpacingTokenizer(facts().folder)).read_body("completion", body)
    assert caught.value.param == "spaces_between_special_tokens"


def test_texts_that_will_be_echoed_stay() -> None:
    assert reader().read_body("completion", completion(["a", "b"], echo=True)).spec.prompts == ("a", "b")
    reading = reader().read_body("completion", completion(["a", "b"]))
    assert (reading.spec.prompts, reading.spec.num_choices) == (((), ()), 2)


def test_a_text_too_long_for_the_longest_tokens_is_tokenized_at_its_beginning_alone() -> None:
    before = tokenized()
    for body, route in ((completion(" " * CONTEXT * (LONGEST_TOKEN + 1)), "completion"), (chat("x" * 99_999), "chat")):
        with pytest.raises(ContextLengthError, match="512"):
            reader().read_body(route, body)
    assert tokenized() - before <= 2 * MIN_SLICE, "for the estimate in the error"


def test_a_text_of_short_tokens_is_tokenized_up_to_where_it_is_too_long() -> None:
    before = tokenized()
    with pytest.raises(ContextLengthError):
        reader().read_body("completion", completion("7" * CONTEXT * (LONGEST_TOKEN - 1)))
    assert tokenized() - before < CONTEXT * LONGEST_TOKEN / 2


@pytest.mark.parametrize("length", [CONTEXT - 4, CONTEXT - 3])
def test_the_context_is_filled_to_its_last_token(length: int) -> None:
    for prompt in ("7" * length, [7] * length):
        if length + 4 <= CONTEXT:
            assert len(reader().read_body("completion", completion(prompt)).prompts[0]) == length
        else:
            with pytest.raises(ContextLengthError):
                reader().read_body("completion", completion(prompt))


def test_too_many_messages_and_parts_are_refused() -> None:
    with pytest.raises(RequestError, match="'messages' must have at most 8192 elements, got 109000"):
        reader().read_body("chat", chat(*[""] * 109_000))
    parts = [{"type": "text", "text": ""}] * 9000
    with pytest.raises(RequestError, match="must have at most 8192 parts, got 9000"):
        reader().read_body(
            "chat", json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
        )


def with_readers(
    work: Callable[[Readers], Awaitable[None]],
    max_waiting_bytes: int = 1 << 24,
    num_processes: int = 1,
    known: ReadingFacts | None = None,
) -> None:
    """Run `work` with real processes beside."""

    async def run() -> None:
        readers = Readers(known or facts(), num_processes, max_waiting_bytes)
        try:
            await work(readers)
        finally:
            await readers.close()

    asyncio.run(run())


class OwnTemplate(_Template):
    """A template that the test can find."""

    latest: ClassVar[_Template]

    def __init__(self, known: ReadingFacts) -> None:
        super().__init__(known)
        OwnTemplate.latest = self


class SharedTemplate(OwnTemplate):
    """A template that outlasts its pool, for the next test's: starting one takes longer than most tests."""

    kept: ClassVar[list["SharedTemplate"]] = []

    @classmethod
    def of(cls, known: ReadingFacts) -> _Template:
        """The template of a new pool."""
        template = next((each for each in cls.kept if each._facts == known), None)
        if template is None:
            template = cls(known)
            cls.kept.append(template)
        template._turn = asyncio.Lock()  # the one before belongs to another test's loop
        OwnTemplate.latest = template
        return template

    async def close(self) -> None:
        """Leave the template to the next pool."""


@pytest.fixture(autouse=True)
def _readers_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a reader gets its seconds of processor time late: what ends it here is to be those alone."""
    monkeypatch.setattr("raydix.engine.serving.reader_pool.READ_TIMEOUT_S", 3600.0)


@pytest.fixture(autouse=True)
def _templates_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.serving.reader_pool._Template", SharedTemplate.of)


@pytest.fixture(autouse=True, scope="module")
def _templates_end() -> Iterator[None]:
    yield
    for each in SharedTemplate.kept:
        asyncio.run(_Template.close(each))
    SharedTemplate.kept.clear()


def template() -> psutil.Process:
    process = OwnTemplate.latest._popen
    assert process is not None
    return psutil.Process(process.pid)


def children() -> list[psutil.Process]:
    """The readers that run."""
    return [each for each in template().children() if each.status() != psutil.STATUS_ZOMBIE]


def child() -> psutil.Process:
    [reader] = children()
    return reader


def test_the_process_reads_as_this_one_does() -> None:
    bodies = [
        ("completion", completion(["a" * 300, "b"], echo=True, logprobs=1)),
        ("completion", completion([1, 2, 3])),
        ("chat", chat("hello " * 100, "<|im_end|>")),
    ]
    spec = GenerateRequest(messages=[{"role": "user", "content": "hi"}]).spec()  # type: ignore[list-item]

    async def work(readers: Readers) -> None:
        for route, body in bodies:
            here: Reading = reader().read_body(route, body)
            assert await readers.read((route, body), len(body)) == here
        assert await readers.read(spec, 2) == reader().read(spec)
        with pytest.raises(ModelNotFoundError) as error:
            await readers.read(TokenRequest("tokenize", b'{"prompt": "x", "model": "other"}', ("m",)), 99)
        assert error.value.param == "model"

    with_readers(work)


def test_the_shortest_is_read_first_and_the_largest_refused() -> None:
    order: list[int] = []

    async def work(readers: Readers) -> None:
        async def read(size: int) -> None:
            await readers.read(("completion", completion("x")), size)
            order.append(size)

        outcomes = await asyncio.gather(*map(read, (50, 30, 90, 10)), return_exceptions=True)
        assert [type(each) for each in outcomes] == [type(None), type(None), OverloadedError, type(None)]

    with_readers(work, max_waiting_bytes=100)
    assert order == [10, 30, 50]


async def kill_while_reading(readers: Readers, ready: asyncio.Queue[int]) -> None:
    """Kill the next reader that `stopping` has stopped, once it has a request that it can not have answered."""
    pid = await ready.get()
    while not readers._running:
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)


def stopping(num_readers: int, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Have the first `num_readers` readers stand still before the pool learns that they are ready, so that a request
    sent to them is not answered; returns the queue of their process ids."""
    pids = asyncio.Queue[int]()
    num_left = num_readers
    is_ready = _Process.is_ready

    async def is_ready_and_stopped(process: _Process) -> bool:
        nonlocal num_left
        outcome = await is_ready(process)
        if outcome and num_left:
            num_left -= 1
            reader = child()
            reader.send_signal(signal.SIGSTOP)
            while reader.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0)
            pids.put_nowait(reader.pid)
        return outcome

    monkeypatch.setattr(_Process, "is_ready", is_ready_and_stopped)
    return pids


def test_a_request_whose_process_is_killed_is_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = stopping(1, monkeypatch)

    async def work(readers: Readers) -> None:
        lost = asyncio.create_task(readers.read(("completion", completion("y")), 1))
        kept = asyncio.create_task(readers.read(("completion", completion("z")), 2))
        await kill_while_reading(readers, ready)
        assert (await lost).prompts == reader().read_body("completion", completion("y")).prompts
        assert (await kept).prompts == reader().read_body("completion", completion("z")).prompts

    with_readers(work)


def test_a_request_whose_process_stands_still_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = stopping(1, monkeypatch)

    async def work(readers: Readers) -> None:
        monkeypatch.setattr("raydix.engine.serving.reader_pool.READ_TIMEOUT_S", 0.0)
        lost = asyncio.create_task(readers.read(("completion", completion("y")), 2))
        stopped = await ready.get()
        with pytest.raises(ServiceError, match="could not be read in 0 s"):
            await lost
        monkeypatch.setattr("raydix.engine.serving.reader_pool.READ_TIMEOUT_S", 3600.0)
        assert (await readers.read(("completion", completion("z")), 2)).prompts
        assert child().pid != stopped

    with_readers(work)


def test_a_request_whose_process_is_killed_twice_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = stopping(2, monkeypatch)

    async def work(readers: Readers) -> None:
        lost = asyncio.create_task(readers.read(("completion", completion("y")), 1))
        for _ in range(2):
            await kill_while_reading(readers, ready)
        with pytest.raises(ServiceError, match="has ended"):
            await lost
        assert (await readers.read(("completion", completion("z")), 2)).prompts

    with_readers(work)


def test_requests_outlast_kills_of_all_processes() -> None:
    """Readers and their template are killed at any moment; each request is killed at most once, and answered."""

    async def work(readers: Readers) -> None:
        body = completion("hello " * 400)
        await readers.read(("completion", body), len(body))
        for round_ in range(6):
            jobs = [asyncio.create_task(readers.read(("completion", body), len(body))) for _ in range(8)]
            while not readers._running:
                await asyncio.sleep(0)
            for victim in (*children(), template()) if round_ == 3 else children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            assert all(reading.prompts for reading in await asyncio.gather(*jobs))

    with_readers(work, num_processes=3)


HOSTILE_EBNF = "".join(f"r{index} ::= r{index + 1}\n" for index in range(20_000)) + 'r20000 ::= "a"\nroot ::= r0'
"""A chain of rules, each of which llguidance's converter finds to be a terminal in a pass of its own. On a fast machine
the passes of half as many end within a reader's time, and then the converter overflows its stack."""


def test_a_request_that_uses_up_its_time_is_refused_and_not_tried_again() -> None:
    async def work(readers: Readers) -> None:
        await readers.read(("completion", completion("x")), 1)
        first = child().pid
        question = GrammarQuestion(Grammar(GrammarKind.EBNF, HOSTILE_EBNF), "ebnf")
        with pytest.raises(RequestError, match="3 s of processor time") as caught:
            await readers.read(question, len(HOSTILE_EBNF))
        assert caught.value.param == "ebnf" and caught.value.status == 400
        assert (await readers.read(("completion", completion("x")), 1)).prompts
        second = child().pid
        assert second != first
        with pytest.raises(RequestError, match="3 s of processor time"):
            await readers.read(question, len(HOSTILE_EBNF))
        assert child().pid == second

    with_readers(work)


def test_a_long_request_does_not_shut_out_others() -> None:
    async def work(readers: Readers) -> None:
        question = GrammarQuestion(Grammar(GrammarKind.EBNF, HOSTILE_EBNF), "ebnf")
        other = GrammarQuestion(Grammar(GrammarKind.EBNF, HOSTILE_EBNF + "\n"), "ebnf")
        hostile = [asyncio.create_task(readers.read(each, len(HOSTILE_EBNF))) for each in (question, other)]
        honest = [readers.read(("completion", completion("word " * 100)), 6500) for _ in range(4)]
        assert all(reading.prompts for reading in await asyncio.gather(*honest))
        assert not any(task.done() for task in hostile)
        assert [type(each) for each in await asyncio.gather(*hostile, return_exceptions=True)] == [RequestError] * 2

    with_readers(work, num_processes=2)


def test_requests_are_read_when_all_processes_leave_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a lowered limit each of two processes finds one too many, itself."""
    is_ready = _Process.is_ready
    seen: list[_Process] = []
    both_have_read, may_go_on = asyncio.Event(), asyncio.Event()

    async def together(process: _Process) -> bool:
        outcome = await is_ready(process)
        seen.append(process)
        if seen.count(process) == 2 and not may_go_on.is_set():
            if len(seen) == 4:
                both_have_read.set()
            await may_go_on.wait()
        return outcome

    async def work(readers: Readers) -> None:
        await asyncio.gather(*(readers.read(("completion", completion(text)), 1) for text in "xy"))
        await both_have_read.wait()
        readers.limit(1 << 20, 1)
        last = asyncio.create_task(readers.read(("completion", completion("z")), 1))
        while not readers.num_waiting:
            await asyncio.sleep(0)
        may_go_on.set()
        assert (await last).prompts

    monkeypatch.setattr(_Process, "is_ready", together)
    with_readers(work, num_processes=2)


def test_a_higher_limit_lets_a_long_request_that_waits_begin() -> None:
    async def work(readers: Readers) -> None:
        await asyncio.gather(*(readers.read(("completion", completion(text)), 1) for text in "xyz"))
        readers._running += [_Job(False, 1, "", 0, ("completion", b""), asyncio.Future())]  # one of two processes reads
        long = asyncio.create_task(readers.read(("completion", completion("z")), LONG_BYTES + 1))
        while len(children()) < 2 or not readers.num_waiting:
            await asyncio.sleep(0.001)
        await readers.read(("completion", completion("x")), 1)
        await asyncio.sleep(0)
        assert readers.num_waiting, "the last free process is for short requests"
        readers.limit(1 << 20, 3)
        assert (await long).prompts

    with_readers(work, num_processes=2)


def test_a_request_that_crashes_its_process_is_refused_and_not_tried_again() -> None:
    """llguidance looks into nested rules by recursion, and overflows its stack."""
    rules = "".join(f'r{index}: "a" r{index + 1} | "b"\n' for index in range(5000)) + 'r5000: "a"\nstart: r0'

    async def work(readers: Readers) -> None:
        question = GrammarQuestion(Grammar(GrammarKind.LARK, rules), "grammar")
        for _ in range(2):
            with pytest.raises(RequestError, match="ends the process") as caught:
                await readers.read(question, len(rules))
            assert caught.value.param == "grammar"
        assert (await readers.read(("completion", completion("x")), 1)).prompts

    with_readers(work)


def test_processes_are_shared_by_tenants() -> None:
    order: list[str] = []

    async def work(readers: Readers) -> None:
        async def read(name: str, size: int, tenant: str) -> None:
            await readers.read(("completion", completion("x")), size, tenant)
            order.append(name)

        readers._running += [_Job(False, 1, "a", 0, ("completion", b""), asyncio.Future())]  # one process reads for a
        await asyncio.gather(read("a short", 1, "a"), read("b long", 5000, "b"), read("b longer", 6000, "b"))

    with_readers(work)
    assert order == ["b long", "b longer", "a short"]


def test_the_tenant_with_the_most_bytes_is_refused_first() -> None:
    async def work(readers: Readers) -> None:
        jobs = [("a", 40), ("a", 40), ("b", 50), ("a", 30)]
        outcomes = await asyncio.gather(
            *(readers.read(("completion", completion("x")), size, tenant) for tenant, size in jobs),
            return_exceptions=True,
        )
        assert [isinstance(each, OverloadedError) for each in outcomes] == [False, True, False, False]

    with_readers(work, max_waiting_bytes=125)


NESTED = "{%- set ns = namespace(a=[1], b=[1]) -%}{%- for i in range(28) -%}{%- set ns.a = [ns.a, ns.a] -%}"
NESTED += "{%- set ns.b = [ns.b, ns.b] -%}{%- endfor -%}{{ ns.a == ns.b }}"
"""A template that compares lists of 2 ** 28 elements in a single instruction."""


def test_a_template_that_cannot_be_interrupted_ends_with_its_process() -> None:
    async def work(readers: Readers) -> None:
        with pytest.raises(RequestError) as caught:
            await readers.read(("chat", templated(NESTED)), 100)
        assert caught.value.param == "chat_template"
        turn = NextTurn((USER,), EncodedText("", (), ()), ANSWER, template=ChatTemplate(NESTED))
        with pytest.raises(RequestError) as caught:
            await readers.read(turn, 100)
        assert caught.value.param == "chat_template"
        assert (await readers.read(("completion", completion("x")), 1)).prompts

    with_readers(work, known=permissive()._facts)


def test_clients_templates_run_in_processes_alone() -> None:
    turn = NextTurn((USER,), EncodedText("", (), ()), ANSWER, template=ChatTemplate(SHOWING))
    assert permissive().runs_program(turn)
    assert permissive().runs_program(permissive().parse(("chat", templated())))


def test_processes_end_with_the_ingress_and_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(readers: Readers) -> None:
        await readers.read(("completion", completion("x")), 1)
        started.extend((child(), template()))

    started = list[psutil.Process]()
    monkeypatch.setattr("raydix.engine.serving.reader_pool._Template", OwnTemplate)
    with_readers(work)
    assert not any(each.is_running() for each in started)


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = subprocess.Popen
    failures = [OSError(errno.ENOMEM, "no memory"), RuntimeError("a prompt")]

    def fail_at_first(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return start(*args, **kwargs)

    async def work(readers: Readers) -> None:
        assert (await readers.read(("completion", completion("x")), 1)).prompts

    monkeypatch.setattr("raydix.engine.serving.reader_pool._Template", OwnTemplate)
    monkeypatch.setattr("raydix.engine.serving.reader_pool.subprocess.Popen", fail_at_first)
    monkeypatch.setattr("raydix.engine.serving.reader_pool.PAUSE_S", 0.01)
    with_readers(work)
    assert not failures
    assert "no memory" in caplog.text and "RuntimeError" in caplog.text and "a prompt" not in caplog.text


def test_a_request_that_cannot_be_passed_on_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(readers: Readers) -> None:
        with pytest.raises(ServiceError):
            await readers.read(("completion", lambda: b""), 1)  # type: ignore[arg-type]
        assert (await readers.read(("completion", completion("x")), 1)).prompts

    monkeypatch.setattr("raydix.engine.serving.reader_pool.PAUSE_S", 0.01)
    with_readers(work)


def test_a_client_that_leaves_while_another_comes_does_not_fail_the_other() -> None:
    async def work(readers: Readers) -> None:
        left = asyncio.create_task(readers.read(("completion", completion("x")), 90))
        await asyncio.sleep(0)
        other = asyncio.create_task(readers.read(("completion", completion("x")), 80))
        left.cancel()
        assert (await other).prompts
        assert left.cancelled() or await asyncio.wait([left])

    with_readers(work, max_waiting_bytes=100)


def test_an_unexpected_error_is_the_request_s_alone_and_does_not_quote_it(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(readers: Readers) -> None:
        await readers.read(("completion", completion("x")), 1)
        first = child()
        with pytest.raises(ServiceError, match="ValueError"):
            await readers.read(("secret", "prompt", "too many"), 1)  # type: ignore[arg-type]
        assert (await readers.read(("completion", completion("x")), 1)).prompts
        assert child().pid == first.pid

    with_readers(work)
    assert not capfd.readouterr().err


def test_a_process_that_ends_unasked_is_replaced() -> None:
    async def work(readers: Readers) -> None:
        await readers.read(("completion", completion("x")), 1)
        first = child()
        first.kill()
        assert (await readers.read(("completion", completion("x")), 1)).prompts
        assert child().pid != first.pid

    with_readers(work)


def test_next_turns_give_way_to_clients() -> None:
    order: list[str] = []
    chat_of_one = reader().read_body("chat", chat("x")).chat
    assert chat_of_one is not None
    turn = NextTurn(({"role": "user", "content": "x"},), chat_of_one, ANSWER)

    async def work(readers: Readers) -> None:
        async def read(name: str, request: Any, size: int) -> None:
            await readers.read(request, size)
            order.append(name)

        body = ("completion", completion("x"))
        jobs = [read("turn", turn, 10), read("client", body, 50), read("refused turn", turn, 20)]
        outcomes = await asyncio.gather(*jobs, read("other client", body, 40), return_exceptions=True)
        assert [type(each) for each in outcomes] == [type(None), type(None), OverloadedError, type(None)]

    with_readers(work, max_waiting_bytes=100)
    assert order == ["other client", "client", "turn"]


def test_long_next_turns_are_left_out_while_anybody_waits() -> None:
    long = "word " * 300
    wide = replace(facts(), model=ServedModel("m", 4096, 49152))
    prompt = Reader(wide, reader()._tokenizer).read_body("chat", chat(long)).chat
    assert prompt is not None
    turn = NextTurn(({"role": "user", "content": long},), prompt, ANSWER)

    async def run() -> None:
        requests = RequestReader(facts(), reader()._tokenizer, 1 << 24)
        requests.start()
        try:
            client = asyncio.create_task(requests.read(("completion", completion("x")), SHORT_BYTES + 1))
            await asyncio.sleep(0)
            assert await requests.next_turn(turn, SHORT_BYTES + 1) == ()
            await client
            assert len(await requests.next_turn(turn, SHORT_BYTES + 1)) > len(prompt.token_ids)
        finally:
            await requests.close()

    asyncio.run(run())


def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[RequestReader, list[tuple[object, int]]]:
    """A reader that has started, and what it will hand to its processes, with sizes."""
    requests = RequestReader(facts(), reader()._tokenizer, 1 << 24)
    requests.start()
    asked: list[tuple[object, int]] = []
    read = requests._readers.read

    async def note(request: Any, size: int, tenant: str = "") -> Any:
        asked.append((request, size))
        return await read(request, size, tenant)

    monkeypatch.setattr(requests._readers, "read", note)
    return requests, asked


def test_short_bodies_of_long_prompts_are_read_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        requests, asked = watched(monkeypatch)
        try:
            for count in (2, 40):
                scored = {"query": "x " * 100, "items": ["a"] * count, "label_token_ids": [1]}
                body = json.dumps(scored).encode()
                assert len(body) < SHORT_BYTES
                await requests.read(("score", body), len(body))
            assert [size for _, size in asked] == [40 * 201]
        finally:
            await requests.close()

    asyncio.run(run())


def test_grammars_are_checked_in_the_process_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.engine.serving.reader_pool.MAX_VALID_GRAMMARS", 1)

    async def run() -> None:
        requests, asked = watched(monkeypatch)
        try:
            for regex, num_asked in (("a", 1), ("a", 1), ("b", 2), ("a", 3)):
                reading = await requests.read(("completion", completion("x", regex=regex)), 99)
                assert reading.spec.grammar_param == "regex" and len(asked) == num_asked
            with pytest.raises(RequestError, match="unclosed group") as error:
                await requests.read(("completion", completion("x", regex="(")), 99)
            assert error.value.param == "regex" and isinstance(asked[-1][0], GrammarQuestion)
        finally:
            await requests.close()

    asyncio.run(run())


def test_the_grammar_of_required_calls_is_checked_too() -> None:
    def calling(schema: dict[str, Any]) -> bytes:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        return json.dumps({"messages": [USER], "tools": tools, "tool_choice": "required"}).encode()

    async def run() -> None:
        requests = RequestReader(facts(), reader()._tokenizer, 1 << 24)
        requests.start()
        try:
            reading = await requests.read(("chat", calling({"properties": {"x": {"type": "string"}}})), 99)
            assert reading.spec.sampling.grammar is not None and reading.spec.grammar_param is not None
            with pytest.raises(RequestError, match="cannot be compiled") as error:
                await requests.read(("chat", calling({"properties": {"x": {"not": {}}}})), 99)
            assert error.value.param == "tools[0].function.parameters"
        finally:
            await requests.close()

    asyncio.run(run())


def test_messages_count_by_their_number_and_all_their_values() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "x" * 9000}}
    empty = GenerationSpec(kind="chat", messages=({"role": "user", "content": ""},) * 1000)
    calling = GenerationSpec(kind="chat", messages=({"role": "assistant", "content": None, "tool_calls": [call]},))
    assert size_of(empty) > 10 * SHORT_BYTES and size_of(calling) > 9000
    assert size_of(GenerationSpec(kind="completion", prompts=("abc", (1, 2)))) == 5
    tools = ToolUse(({"type": "function", "function": {"name": "f", "description": "x" * 9000}},))
    assert size_of(replace(empty, messages=(), tools=tools)) > 9000


def test_each_conversation_is_read_as_a_chat() -> None:
    def read(conversations: Any) -> list[Reading]:
        found = reader().answer(Conversations(json.dumps({"messages": conversations, "max_tokens": 3}).encode()))
        assert isinstance(found, list)
        return found

    other = {"role": "user", "content": "other"}
    bodies = [json.dumps({"messages": [each], "max_tokens": 3}).encode() for each in (USER, other)]
    alone = [reader().read_body("chat", body) for body in bodies]
    assert read([[USER], [other]]) == alone
    with pytest.raises(ContextLengthError) as caught:
        read([[USER], [{"role": "user", "content": "word " * 9000}]])
    assert caught.value.param == "messages[1]" and "'messages[1]'" in caught.value.message


def test_the_tokenizer_is_described() -> None:
    found = reader()._tokenizer.describe()
    added = found["added_tokens_decoder"]
    assert isinstance(added, dict) and found["eos_token"] in found["additional_special_tokens"]  # type: ignore[operator]
    assert found["tokenizer_class"] and found["vocab_size"] == reader()._tokenizer.vocab_size
    assert found["chat_template"] == reader()._tokenizer.chat_template != ""
    info = TokenizerInfo.model_validate({**found, "model_max_length": 8192})
    assert info.added_tokens_decoder["2"].content == "<|im_end|>" and info.added_tokens_decoder["2"].special


def test_a_low_effort_that_nothing_can_act_on_is_refused_if_the_model_reasons() -> None:
    """The default model's tokenizer has no tokens for the tags, so that no limit can be enforced."""

    def read(by: Reader, **fields: str) -> Reading:
        return by.read(GenerateRequest.model_validate({"messages": [USER], **fields}).spec())

    plain = read(reader())
    for effort in ("none", "low", "high"):
        assert read(reader(), reasoning_effort=effort).chat == plain.chat, "the model does not reason"
    reasoning = Reader(replace(facts(), has_reasoning=True, effort_tokens={"low": 9}), reader()._tokenizer)
    assert read(reasoning, reasoning_effort="none").chat == plain.chat
    for effort in ("none", "high"):
        assert read(reasoning, reasoning_effort=effort).spec.ignored == ("reasoning_effort",)
    with pytest.raises(RequestError) as caught:
        read(reasoning, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


class Loop:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_after_so_many_bytes_of_requests_of_any_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.disable()
    try:
        sweeper = Sweeper()
        garbage = weakref.ref(Loop())
        assert not sweeper.keeps_too_much(SWEPT_BYTES - 1) and garbage() is not None
        assert not sweeper.keeps_too_much(1) and garbage() is None
        monkeypatch.setattr("raydix.engine.serving.reader_process.KEPT_BYTES", -(1 << 40))
        assert sweeper.keeps_too_much(SWEPT_BYTES)
    finally:
        gc.enable()


def test_what_reading_took_is_given_back() -> None:
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "metadata": [[]] * 1_000_000}).encode()

    async def work(readers: Readers) -> None:
        await readers.read(("completion", completion("x")), 1)
        before = child().memory_info().rss
        for _ in range(2):
            await readers.read(("completion", body), len(body))
        await readers.read(("completion", completion("x")), 1)
        assert child().memory_info().rss < 1.2 * before + (16 << 20)

    with_readers(work)


def tokens_of(**fields: Any) -> Any:
    return json.loads(reader().tokenize(json.dumps(fields).encode(), ("m",)))


def text_of(token_ids: list[int]) -> str:
    return str(json.loads(reader().detokenize(json.dumps({"tokens": token_ids}).encode(), ("m",)))["prompt"])


def test_a_text_s_tokens_are_those_of_its_completion_and_lead_back_to_it() -> None:
    text = "Grüße, <|im_start|> and 多 bytes."
    found = tokens_of(prompt=text, return_token_strs=True)
    assert found["tokens"] == list(reader().read_body("completion", completion(text)).prompts[0])
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), CONTEXT)
    assert "<|im_start|>" in found["token_strs"]
    assert text_of(found["tokens"]) == text
    shown = reader().detokenize(json.dumps({"tokens": found["tokens"], "skip_special_tokens": True}).encode(), ("m",))
    assert json.loads(shown)["prompt"] == text.replace("<|im_start|>", "")


def test_a_chat_s_tokens_are_those_of_its_prompt() -> None:
    body = chat("Say <|im_end|>.")
    reading = reader().read_body("chat", body)
    assert reading.chat is not None
    assert tokens_of(**json.loads(body))["tokens"] == list(reading.chat.token_ids)
    assert tokens_of(**json.loads(body), add_special_tokens=True)["tokens"] == list(reading.chat.token_ids)


def test_more_tokens_are_counted_than_fit_into_the_context_and_not_all_that_fit_into_a_body() -> None:
    assert tokens_of(prompt="1 " * CONTEXT * 4)["count"] > 2 * CONTEXT
    before = tokenized()
    with pytest.raises(ContextLengthError, match="131072 tokens"):
        tokens_of(prompt="1 " * 10 * MOST_COUNTED)
    assert tokenized() - before <= 4 * MOST_COUNTED


def test_tokens_are_read_beside_when_there_are_many() -> None:
    async def ask() -> bytes:
        requests = RequestReader(facts(), reader()._tokenizer, 1 << 20)
        requests.start()
        try:
            return await requests.tokens(
                TokenRequest("tokenize", json.dumps({"prompt": "word " * 4000}).encode(), ("m",))
            )
        finally:
            await requests.close()

    before = tokenized()
    assert json.loads(asyncio.run(ask()))["count"] > 4000
    assert tokenized() == before, "the process has a tokenizer of its own"


def test_a_prediction_is_tokenized_where_drafts_are_made_of_it() -> None:
    def predicted(text: str, reads: Reader, **fields: Any) -> list[int]:
        body = json.loads(chat("x")) | {"prediction": {"type": "content", "content": text}, **fields}
        return list(reads.read_body("chat", json.dumps(body).encode()).prediction)

    drafting = Reader(replace(facts(), uses_predictions=True), reader()._tokenizer)
    ids = drafting._tokenizer.encode("a = 1\nb = 2\n", add_special_tokens=False)
    assert predicted("a = 1\nb = 2\n", drafting) == ids
    assert predicted("a = 1\nb = 2\n", drafting, n=2) == ids
    assert predicted("a = 1\n", drafting, speculation=False) == [] == predicted("", drafting)
    assert len(predicted("a b " * 100_000, drafting)) == CONTEXT, "as far as an answer can be long"
    before = tokenized()
    assert predicted("a" * 10_000, reader()) == []
    assert tokenized() - before < 1_000, "where no drafts are made nothing is done for it"
