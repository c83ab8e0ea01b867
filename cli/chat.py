"""`raydix chat`: a conversation in the terminal with any server that speaks OpenAI's chat completions.

Answers go to stdout, all else to stderr, a model's reasoning too, so that a pipe carries answers alone; then each line
of stdin is a question. At a terminal a question is what was typed or pasted before Enter, of however many lines. A
question joins the conversation together with its answer: whole, or as far as it came before Ctrl-C or before the
connection ended. A question that the server refuses, or fails to answer, leaves no trace. An answer whose connection
breaks goes on at the next try where the server gives events ids (`raydix.engine.api.reconnecting`). Each question has
its own connection: the server would often have closed an open one before the next question is typed, and closing a
connection is the way to tell the server to stop.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
from rich.cells import cell_len

from raydix.engine.api.reconnecting import AWAY, Reconnecting
from raydix.engine.core.errors import StartupError

Message: TypeAlias = dict[str, str]

CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20  # longest line of a stream; a server may put many tokens, with their data, into one event

COMMAND = re.compile(r"/\w*")
COMMANDS = "/help lists the commands"
HELP = """\
/new            a new conversation, with the same system message
/system TEXT    a new conversation with this system message; without TEXT, with none
/why            why the last answer's prompt was found in the cache, or was not
/save FILE      write the conversation to a new file, as the body of a request
/quit           end
//              begins a question with /"""

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
TAB = 8
BREAKS = " \t"


class Wrapper:
    """Puts line breaks into text that arrives in pieces.

    Each piece is shown at once. A word that reaches the edge is taken back from the line and begun anew in the next
    one; a word that is longer than a line is broken at the edge. The last column stays empty: terminals differ in the
    cursor's place after filling it.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # last word as far as it stands on the line; the next piece may continue it

    def push(self, text: str, width: int) -> str:
        """Return the characters to write to a terminal of `width` columns for the next piece."""
        return "".join(self._put(character, max(width - 1, 1)) for character in text)

    def _put(self, character: str, width: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        if character in BREAKS:
            return self._space(TAB - self._column % TAB if character == "\t" else 1, width)
        size = cell_len(character)
        if self._column + size <= width:
            self._column += size
            self._word += character
            return character
        return self._next_line(character, width)

    def _space(self, size: int, width: int) -> str:
        """Leave out a space at the beginning of a line."""
        self._word = ""
        if self._column + size > width:
            self._column = 0
            return "\n"
        self._column += size
        return " " * size

    def _next_line(self, character: str, width: int) -> str:
        """Continue in the next line, with the beginning of the word unless the word is too long for a line."""
        taken_back, size = "", cell_len(self._word)
        if 0 < size < self._column and size + cell_len(character) <= width:
            taken_back = f"\x1b[{size}D\x1b[K"
        else:
            self._word = ""
        self._word += character
        self._column = cell_len(self._word)
        return f"{taken_back}\n{self._word}"


class AnswerError(Exception):
    """Failure of an answer; the message is one line for the user."""


class LostAnswerError(AnswerError):
    """End of the connection before the end of the stream: what came of the answer is right."""


class CommandError(Exception):
    """A command that cannot be carried out; the message is one line for the user."""


class BrokenStreamError(Exception):
    """End of a connection before the end of its answer; the message is one line for the user."""


def run(options: argparse.Namespace) -> int:
    """Chat until `/quit`, the end of stdin, or Ctrl-C at the prompt.

    Returns the exit code: 0, or 1 if stdin is not a terminal and a question failed, or if nobody reads stdout.

    Raises:
        StartupError: the server cannot be reached or has no model, or the variable with the API key is not there.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    server = ChatServer(options.url, api_key(options.api_key_env))
    model = asyncio.run(server.model(options.model))
    chat = ChatScreen(
        server=server,
        model=model,
        system=options.system,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
    )
    try:
        return chat.run()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer must go somewhere
        return 1


class ChatScreen:
    """One conversation, its prompt and its screen."""

    def __init__(
        self, server: "ChatServer", model: str, system: str | None, max_tokens: int, temperature: float
    ) -> None:
        self._server = server
        self._model = model
        self._beginning: list[Message] = [{"role": "system", "content": system}] if system else []
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._messages = list(self._beginning)
        self._answer_id = ""  # id of the last answer, by which the server explains it; empty before the first one
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._has_failed = False

    def run(self) -> int:
        """Ask for questions and answer them until told to end; returns the exit code."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # input() uses it once it is imported

                # Terminals mark what is pasted, and readline takes its line ends for text; Python turns that off.
                readline.parse_and_bind("set enable-bracketed-paste on")
            _note(f"{self._model} at {self._server.url}; {COMMANDS}, Ctrl-C stops an answer")

        try:
            while (question := self._question()) != "/quit":
                if COMMAND.fullmatch(question.partition(" ")[0]):
                    self._obey(question)
                elif question:
                    self._ask(question.replace("/", "", 1) if question.startswith("//") else question)
        except (EOFError, KeyboardInterrupt):
            if self._is_terminal:
                print()

        return int(self._has_failed and not self._is_terminal)

    def _obey(self, line: str) -> None:
        """Carry out a command other than `/quit`."""
        try:
            match line.split(maxsplit=1):
                case ["/help"]:
                    _note(HELP)
                case ["/new"]:
                    self._begin_anew()
                case ["/system", *text]:
                    self._beginning = [{"role": "system", "content": content} for content in text]
                    self._begin_anew()
                case ["/why"]:
                    self._explain()
                case ["/save", path]:
                    self._save(path)
                case _:
                    raise CommandError(f"no such command: {line[:40]}; {COMMANDS}, // begins a question with /")
        except CommandError as error:
            self._has_failed = True
            _note(str(error))

    def _begin_anew(self) -> None:
        self._messages = list(self._beginning)
        _note("a new conversation")

    def _explain(self) -> None:
        """Show what `raydix why` prints of the last answer."""
        if not self._answer_id:
            raise CommandError("error: there is no answer yet")
        from raydix.cli.observe import show_why  # rich, which no answer needs

        try:
            show_why(self._server.url, self._server.key, self._answer_id)
        except StartupError as error:
            raise CommandError(f"error: {error}") from None

    def _save(self, path: str) -> None:
        """Write the conversation. A file that exists is left alone: it may be another conversation."""
        conversation = {"model": self._model, "messages": self._messages}
        try:
            with Path(path).expanduser().open("x", encoding="utf-8", errors="replace") as file:
                json.dump(conversation, file, ensure_ascii=False, indent=2)
        except (OSError, ValueError, RuntimeError) as error:  # a null byte in the path; `~` of a user that is none
            raise CommandError(f"error: {one_line(str(error))}") from None
        _note(f"saved: {len(self._messages)} messages")

    def _question(self) -> str:
        return input("> " if self._is_terminal else "").strip()

    def _ask(self, question: str) -> None:
        """Show the answer to `question` as it comes, then its figures."""
        messages = [*self._messages, {"role": "user", "content": question}]
        answer = StreamedAnswer()
        ending = ""
        is_kept = True

        try:
            asyncio.run(self._stream(messages, answer))
        except KeyboardInterrupt:
            ending = "stopped"
        except AnswerError as error:
            is_kept = answer.finish_reason is not None or isinstance(error, LostAnswerError)
            ending = self._failure(error, answer, is_kept=is_kept)

        self._answer_id = answer.id or self._answer_id
        if answer.text:
            print(flush=True)
        if answer.text and is_kept:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]

        _note("; ".join(part for part in (ending, answer.summary()) if part))

    def _failure(self, error: AnswerError, answer: "StreamedAnswer", *, is_kept: bool) -> str:
        """The error in words, with what becomes of the answer. A whole answer is no failure."""
        if answer.finish_reason is not None:
            return f"the answer is complete, but the end of the stream is missing: {error}"
        self._has_failed = True
        return f"error: {error}" + ("; what came of the answer is kept" if answer.text and is_kept else "")

    async def _stream(self, messages: list[Message], answer: "StreamedAnswer") -> None:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = time.monotonic()
        screen = _Screen(is_terminal=self._is_terminal)

        try:
            async with contextlib.aclosing(self._server.events(body)) as events:
                async for event in events:
                    answer.add(event, time.monotonic() - asked)
                    screen.show_reasoning(event.reasoning)
                    screen.show(event.text)
        finally:
            screen.end_reasoning()


class _Screen:
    """Shows one answer as it comes: reasoning on stderr, dim where the terminal can, then the answer on stdout."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._wrapper = Wrapper()
        self._is_reasoning = False

    def show(self, text: str) -> None:
        """Show the next piece of the answer."""
        if text:
            self.end_reasoning()
            print(self._wrapped(text), end="", flush=True)

    def show_reasoning(self, text: str) -> None:
        """Show the next piece of reasoning."""
        if text:
            self._is_reasoning = True
            print(_dim(self._wrapped(text)), end="", file=sys.stderr, flush=True)

    def end_reasoning(self) -> None:
        """End the last line of reasoning, if there was any since the last call."""
        if self._is_reasoning:
            self._is_reasoning, self._wrapper = False, Wrapper()
            print(file=sys.stderr, flush=True)

    def _wrapped(self, text: str) -> str:
        text = printable(text)
        return self._wrapper.push(text, shutil.get_terminal_size().columns) if self._is_terminal else text


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one question; `num_cached` of its prompt came from the cache, None if the server does not say."""

    num_prompt: int
    num_completion: int
    num_cached: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """Contents of one event of a stream."""

    text: str = ""
    finish_reason: str | None = None
    usage: TokenCounts | None = None
    reasoning: str = ""
    id: str = ""
    """Id of the answer; empty if the server gives none."""


@dataclass(slots=True)
class StreamedAnswer:
    """An answer as far as it has come. Times are seconds since the question."""

    text: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    finish_reason: str | None = None
    usage: TokenCounts | None = None
    id: str = ""

    def add(self, event: Event, now_s: float) -> None:
        if event.text or event.reasoning:
            self.text += event.text
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        self.finish_reason = event.finish_reason or self.finish_reason
        self.usage = event.usage or self.usage
        self.id = event.id or self.id

    def summary(self) -> str:
        """Figures of the answer, as far as known: a phrase for each."""
        parts = []
        usage = self.usage
        if self.first_s is not None:
            first = f"{self.first_s * 1000:.0f} ms" if self.first_s < 1 else f"{self.first_s:.2f} s"
            parts.append(f"{first} to first token")
            if usage is not None and usage.num_completion > 1 and self.last_s > self.first_s:
                parts.append(f"{(usage.num_completion - 1) / (self.last_s - self.first_s):.1f} tokens/s")
        if usage is not None:
            parts.append(f"{usage.num_prompt} prompt tokens")
            if usage.num_cached is not None:
                parts[-1] += f" ({usage.num_cached} from the cache)"
        if self.finish_reason == "length":
            parts.append("cut off by the token limit")
        return ", ".join(parts)


class ChatServer:
    """An OpenAI-compatible server.

    `url` may lack `http://` and may end with `/v1`, as OpenAI's clients want it.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        url = url if "://" in url else f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")

    async def model(self, name: str | None) -> str:
        """The model to talk to: `name`, or else the first that the server lists.

        Raises:
            StartupError: nobody answers, or no model is named and none listed.
        """
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.get(f"{self.url}/v1/models") as reply,
            ):
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise StartupError(f"cannot reach {self.url}: {_reason(error)}") from None

        if name is not None:
            return name
        if reply.status != 200:
            advice = "" if reply.status in (401, 403) else "; try --model"  # chats would be refused as well
            raise StartupError(f"{self.url} does not list its models: {_http_error(reply, body)}{advice}")

        try:
            return str(json.loads(body)["data"][0]["id"])
        except (LookupError, TypeError, ValueError):
            raise StartupError(f"{self.url} lists no model; is it an OpenAI-compatible server?") from None

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[Event, None]:
        """Yield the events of one chat completion, until it is complete. After a broken connection the stream goes on
        behind the last event, where the server gives events ids.

        Raises:
            LostAnswerError: the connection ended before the answer did, or cannot be made.
            AnswerError: the server refuses, fails, or sends something unreadable.
        """
        place = Reconnecting()
        while True:
            try:
                async with contextlib.aclosing(self._attempt(body, place)) as events:
                    async for event in events:
                        yield event
                return
            except BrokenStreamError as error:
                pause_s = place.pause_s(time.monotonic())
                if pause_s is None:
                    raise LostAnswerError(str(error)) from None
            await asyncio.sleep(pause_s)

    async def _attempt(self, body: dict[str, Any], place: Reconnecting) -> AsyncGenerator[Event, None]:
        """Yield events from `place` on; errors as `events`, and BrokenStreamError where another attempt may go on."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        headers = self._headers | place.headers
        is_finished = False

        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout, read_bufsize=MAX_LINE_BYTES) as session,
                session.post(f"{self.url}/v1/chat/completions", json=body) as reply,
            ):
                if reply.status != 200:
                    kind = BrokenStreamError if reply.status in AWAY else AnswerError
                    raise kind(_http_error(reply, await reply.read()))
                async for line in reply.content:
                    data = place.take_line(line)
                    if data is None:
                        continue
                    if data == b"[DONE]":
                        return
                    event = read_event(data)
                    is_finished = is_finished or event.finish_reason is not None
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BrokenStreamError(f"no answer from {self.url}: {_reason(error)}") from None
        except ValueError as error:
            raise AnswerError(f"no answer from {self.url}: {_reason(error)}") from None

        if place.can_go_on or not is_finished:
            raise BrokenStreamError(f"{self.url} ended the stream before the answer was complete")


def api_key(variable: str | None) -> str | None:
    """Read the key from an environment variable: an argument would be readable by everyone on the machine."""
    if variable is not None and not os.environ.get(variable):
        raise StartupError(f"--api-key-env {variable}: no such variable in the environment")
    return os.environ.get(variable or "OPENAI_API_KEY")


def read_event(data: bytes) -> Event:
    """Parse the data of one event.

    Raises:
        AnswerError: it tells an error of the server, or is not an event of a chat completion.
    """
    try:
        content = json.loads(data)
        if content.get("error"):
            raise AnswerError(_error_message(content))
        choice: dict[str, Any] = next(iter(content.get("choices") or ()), {})
        delta = choice.get("delta") or {}
        usage = content.get("usage")
        return Event(
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",  # servers have either name
            finish_reason=choice.get("finish_reason"),
            usage=_read_usage(usage) if usage else None,
            id=str(content.get("id") or ""),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        start = one_line(data[:80].decode(errors="replace"))
        raise AnswerError(f"the server sent what is no event of a chat completion: {start}") from None


def _read_usage(usage: dict[str, Any]) -> TokenCounts:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return TokenCounts(
        int(usage["prompt_tokens"]), int(usage.get("completion_tokens", 0)), None if cached is None else int(cached)
    )


def _http_error(reply: aiohttp.ClientResponse, body: bytes) -> str:
    try:
        return f"HTTP {reply.status}: {_error_message(json.loads(body))}"
    except (AttributeError, ValueError):
        return f"HTTP {reply.status} {reply.reason or ''}".rstrip()


def _error_message(content: dict[str, Any]) -> str:
    """The message of an error object: OpenAI's, or one of the shapes others give it."""
    error = content.get("error", content)
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return one_line(str(message or error))


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:.0f} s"
    if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
        return "that is no HTTP URL"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number) if number > 0 else error.os_error.strerror or str(error)  # name look-up counts down
    return one_line(str(error)) or type(error).__name__


def _note(text: str) -> None:
    """Write a line about the conversation, dim where the terminal can."""
    if text:
        print(_dim(text), file=sys.stderr, flush=True)


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text


def one_line(text: str) -> str:
    """The text in one line, without characters that could command a terminal."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Remove from `text` all characters that could command a terminal."""
    return text.translate(_CONTROLS)
