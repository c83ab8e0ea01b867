"""`raydix requests`, `why`, `doctor`, `trace` and `top`: what a running server does, and why prompts hit or missed.

All of it is read from the HTTP routes of a server, any that the terminal reaches, and is what the key may see.
Nothing is asked of the server once a command has ended.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import aiohttp
from aiohttp.http import HttpProcessingError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raydix.cli.chat import CONNECT_TIMEOUT_S, api_key, one_line, printable
from raydix.engine.core.errors import StartupError

Row: TypeAlias = Mapping[str, Any]
Attempt: TypeAlias = Mapping[str, Any]

LAST = "last"
MAX_EVENT_BYTES = 4 << 20
# Seconds without a byte after which a server counts as gone; into a quiet stream it sends a sign of life each 10 s.
READ_TIMEOUT_S = 60.0
STRIP_BLOCKS = 4  # lines of a strip, at most; a block of a longer prompt shares its character with others
WIDE = 110  # columns of a terminal from which on a table has all of its own
NUM_NARROW = 5
SHOWN_BEFORE, SHOWN_BEHIND = 40, 60  # characters of prompts around the place where they part
# Colours of sources; other tokens were computed.
COLOURS = {
    "local": "green",
    "worker": "blue",
    "store": "blue",
    "disk": "magenta",
    "pending": "bright_magenta",
    "evicted": "red",
    "lost": "red",
    "diverged": "yellow",
    "reasoning_left_out": "yellow",
}
COMPUTED = "dark_orange"


def run_requests(options: argparse.Namespace) -> int:
    """Print the requests under way and lately ended. Raises StartupError where the server does not answer."""
    report = asyncio.run(_server(options).get("/v1/requests"))
    if options.json:
        print(json.dumps(report))
    else:
        _print(_counts(report["counts"]), _table(report["requests"]))
    return 0


def run_why(options: argparse.Namespace) -> int:
    """Print where the blocks of a request's prompt came from. Raises StartupError where the server knows no such
    request."""
    explained = asyncio.run(_explained(_server(options), options.id))
    if options.json:
        print(json.dumps(explained))
        return 0
    _print(*_whole_explanation(explained))
    return 0


def show_why(url: str, key: str | None, name: str) -> None:
    """Print on stderr what `raydix why` prints of a request. Raises StartupError as `run_why`."""
    explained = asyncio.run(_explained(ObservedServer(url, key), name))
    _print(*_whole_explanation(explained), console=Console(stderr=True, highlight=False))


def run_doctor(options: argparse.Namespace) -> int:
    """Print what costs the prompts of the last hour their hits. Raises StartupError where the server does not
    answer."""
    report = asyncio.run(_server(options).get("/v1/cache/doctor"))
    if options.json:
        print(json.dumps(report))
    else:
        _print(*_diagnosis(report))
    return 0


def run_trace(options: argparse.Namespace) -> int:
    """Have the server record a trace, and write it into a file. Raises StartupError where the server does not answer,
    or refuses, and where the file cannot be written."""
    path = Path(options.output)
    try:
        # Before anything is recorded: a wrong path is not to cost the moment. An earlier trace stays until there is
        # another one.
        with path.open("a"):
            pass
        server = _server(options, waits_s=options.seconds)
        trace = asyncio.run(server.post(f"/v1/debug/trace?seconds={options.seconds:g}"))
        path.write_text(json.dumps(trace))
    except OSError as error:
        raise StartupError(f"{options.output} cannot be written: {error.strerror}") from None
    about = trace["otherData"]
    spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
    said = f"{options.output}: {spans} slices since {about['started_at']}; open it at https://ui.perfetto.dev"
    print(said, file=sys.stderr)
    for worker in about["missing"]:
        print(f"{worker} did not answer", file=sys.stderr)
    if about["dropped"]:
        print(f"{about['dropped']} slices were too many", file=sys.stderr)
    return 0


def run_top(options: argparse.Namespace) -> int:
    """Show the requests, live, until Ctrl-C. Raises StartupError where the server does not answer, or without a
    terminal."""
    if not sys.stdout.isatty():
        raise StartupError("raydix top needs a terminal; raydix requests prints the same once")
    asyncio.run(_follow(_server(options)))
    return 0


class ObservedServer:
    """The server that is asked. `key`: its API key, if it has tenants; `read_timeout_s`: without a byte."""

    def __init__(self, url: str, key: str | None, *, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def get(self, path: str) -> Any:
        """The object of a route. Raises StartupError."""
        return await self._ask("GET", path)

    async def post(self, path: str) -> Any:
        """The object of a route that does something. Raises StartupError."""
        return await self._ask("POST", path)

    async def _ask(self, method: str, path: str) -> Any:
        try:
            async with self._session() as session, session.request(method, self._url + path) as reply:
                await self._check(reply)
                return await reply.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._away(error) from None
        except ValueError as error:
            raise self._unreadable(error) from None

    async def requests(self) -> AsyncGenerator[Any]:
        """The data of the server's events about requests. Raises StartupError where the server does not answer, and
        where the stream ends: no raydix ends it while it runs."""
        try:
            async with self._session() as session, session.get(f"{self._url}/v1/requests/events") as reply:
                await self._check(reply)
                async for line in reply.content:
                    if line.startswith(b"data:"):
                        event = json.loads(line.removeprefix(b"data:"))
                        if "error" in event:
                            raise self._refused(event, "an error without a message")
                        yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._away(error) from None
        except (ValueError, HttpProcessingError) as error:  # no JSON, or a line that is longer than the buffer
            raise self._unreadable(error) from None
        raise StartupError(f"{self._url} ended the stream")

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, read_bufsize=MAX_EVENT_BYTES)

    def _away(self, error: Exception) -> StartupError:
        return StartupError(f"{self._url} cannot be reached: {one_line(str(error)) or type(error).__name__}")

    def _unreadable(self, error: Exception) -> StartupError:
        return StartupError(f"{self._url} sent something else than raydix does: {one_line(str(error))}")

    def _refused(self, body: Any, otherwise: str) -> StartupError:
        try:
            message = str(body["error"]["message"])
        except (KeyError, TypeError):
            message = otherwise
        return StartupError(f"{self._url}: {one_line(message)}")

    async def _check(self, reply: aiohttp.ClientResponse) -> None:
        if reply.ok:
            return
        try:
            body = await reply.json()
        except (ValueError, aiohttp.ClientError):
            body = None
        raise self._refused(body, f"{reply.status} {reply.reason}")


def _server(options: argparse.Namespace, *, waits_s: float = 0.0) -> ObservedServer:
    """`waits_s`: time that the server takes to do what it is asked."""
    return ObservedServer(options.url, api_key(options.api_key_env), read_timeout_s=READ_TIMEOUT_S + waits_s)


async def _explained(server: ObservedServer, name: str) -> Any:
    """The explanation of a request, or of the one that came last."""
    if name == LAST:
        rows = (await server.get("/v1/requests"))["requests"]
        if not rows:
            raise StartupError("the server has had no request yet, or not from this key's tenant")
        # The rows under way come first, so the first row need not be the latest request.
        name = max(rows, key=lambda row: row["arrived_at"])["id"]
    return await server.get(f"/v1/requests/{quote(name, safe='')}/explain")


async def _follow(server: ObservedServer) -> None:
    """Redraw the table with each event."""
    rows: dict[int, Row] = {}
    with Live(screen=True, auto_refresh=False) as live:
        async for event in server.requests():
            rows |= {row["number"]: row for row in event["requests"]}
            newest = sorted(rows.values(), key=lambda row: (row["state"] == "ended", -row["number"]))
            num_shown = max(1, live.console.height - 4)
            # Bounded, since events go on for ever; some more than are shown, for rows that move up when others end.
            rows = {row["number"]: row for row in newest[: 2 * num_shown]}
            live.update(Group(_counts(event["counts"]), _table(newest[:num_shown])), refresh=True)


def _print(*parts: RenderableType, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for part in parts:
        console.print(part)


def _counts(counts: Mapping[str, int]) -> Text:
    return _text(" · ".join(f"{number:,} {state}" for state, number in counts.items()))


def _text(text: str, style: str = "") -> Text:
    """A line of the server's words as it is: neither markup of `rich` nor what could command a terminal."""
    return Text(one_line(text), style=style)


def _table(rows: Iterable[Row]) -> Table:
    """The rows, on a narrow terminal without the last columns: a name that is cut off cannot be asked for."""
    names = ("state", "request", "cached", "answer", "first", "prompt", "tok/s", "worker")
    num_columns = len(names) if Console().width >= WIDE else NUM_NARROW
    table = Table(box=None, pad_edge=False)
    for name in names[:num_columns]:
        table.add_column(name, no_wrap=True, justify="left" if name in ("state", "request", "worker") else "right")
    for row in rows:
        table.add_row(*map(_text, _cells(row)[:num_columns]), style="dim" if row["state"] == "ended" else None)
    return table


def _cells(row: Row) -> list[str]:
    first, ended = row["first_token_s"], row["ended_s"]
    # The rate is that behind the first tokens, one for each choice, whose time is another figure.
    lasted = ended - first if ended is not None and first is not None else 0
    return [
        row["outcome"] if row["state"] == "ended" else row["state"],
        row["request"],
        "-" if first is None else _share(row["cached_tokens"], row["prompt_tokens"]),
        f"{row['generated_tokens']:,}/{row['max_tokens']:,}",
        _time(first),
        f"{row['prompt_tokens']:,}",
        f"{(row['generated_tokens'] - row['choices']) / lasted:.0f}" if lasted > 0 else "-",
        " → ".join(dict.fromkeys([*row["prefill_workers"], *row["decode_workers"]])) or "-",
    ]


def _whole_explanation(explained: Mapping[str, Any]) -> list[RenderableType]:
    """What `raydix why` prints."""
    lines: list[RenderableType] = []
    for choice in explained["choices"]:
        for attempt in choice["attempts"]:
            lines += _explanation(choice["id"], attempt)
    return lines + _beside(explained)


def _explanation(name: str, attempt: Attempt) -> list[RenderableType]:
    """What `raydix why` prints of an attempt."""
    hits = sum(run["count"] for run in attempt["blocks"] if run["hit"]) * attempt["block_size"]
    adapter = "" if attempt["adapter"] is None else f" with adapter {attempt['adapter']}"
    title = f"{name}, attempt {attempt['attempt'] + 1}{adapter}: {attempt['prompt_tokens']:,} prompt tokens"
    lines: list[RenderableType] = [
        _text(title, style="bold"),
        _strip(attempt),
        _legend(attempt),
    ]
    if attempt["why"] is not None:
        place = attempt["left_cache_at"]
        begin = "not cached: " if place == 0 else f"the cached path ends at token {place:,}: "
        lines.append(_text(begin + attempt["why"]))
    if attempt["note"] is not None:
        lines.append(_text(attempt["note"]))
    said = [
        f"{_share(min(hits, attempt['prompt_tokens']), attempt['prompt_tokens'])} cached",
        f"first token after {_time(attempt['actual_ttft_s'])}, expected {_time(attempt['predicted_ttft_s'])}",
        f"all of it computed: {_time(attempt['uncached_s'])}, as predicted",
        f"prefill at {attempt['prefill_worker']}, decode at {attempt['decode_worker']}",
    ]
    lines.append(_text("; ".join(said)))
    if (session := attempt["session"]) is not None and (branch := session["branch"]) is not None:
        lines.append(_text(f"a branch of {branch['of']}: their first {branch['blocks']:,} blocks are the same"))
    return [*lines, Text("")]


def _beside(explained: Mapping[str, Any]) -> list[RenderableType]:
    """What `raydix why` prints of a chat as a whole: where it left the prompt before, and its hints."""
    lines: list[RenderableType] = []
    prefix, ignored, applied = (explained.get(name) for name in ("prefix", "ignored", "applied"))
    if prefix and prefix["reason"] is not None:
        place = f" in {prefix['part']}" if prefix["part"] is not None else ""
        if prefix["token_index"] is not None:
            place += f" at token {prefix['token_index']:,}"
        lost = f"; {prefix['lost_tokens']:,} tokens behind it were lost" if prefix["lost_tokens"] else ""
        lines.append(_text(f"left the prompt before{place}: {prefix['reason']}{lost}"))
    if ignored:
        lines.append(_text(f"fields without effect: {', '.join(ignored)}"))
    if applied:
        lines.append(_text(f"hints that became something else: {', '.join(applied)}"))
    return lines


def _prompts(number: int) -> str:
    return "1 prompt" if number == 1 else f"{number:,} prompts"


def _diagnosis(report: Mapping[str, Any]) -> list[RenderableType]:
    """What `raydix doctor` prints."""
    cached = "" if report["cached_tokens"] is None else f", {_share(report['cached_tokens'], report['prompt_tokens'])}"
    looked_at = f"{_prompts(report['prompts'])} of {report['prompt_tokens']:,} tokens{cached and cached + ' cached'}"
    lines: list[RenderableType] = [
        _text(f"{looked_at}, in the last {max(1, round(report['observed_s'] / 60))} min", style="bold")
    ]
    if not report["findings"]:
        lines.append(_text("no prompt has lost what an earlier one had" if report["prompts"] else "no chats yet"))
    for number, finding in enumerate(report["findings"], 1):
        lines += [Text(""), *_finding(number, finding)]
    return lines


def _finding(number: int, finding: Mapping[str, Any]) -> list[RenderableType]:
    example = finding["example"]
    place = "" if finding["part"] is None else f" in {example['part']}"
    a_day = f"{finding['lost_tokens_per_day']:,} tokens"
    if finding["lost_s_per_day"] is not None:
        a_day += f", {finding['lost_s_per_day']:,.0f} s"
    lines: list[RenderableType] = [
        _text(f"{number}. {finding['reason']}{place}: {_prompts(finding['prompts'])}, {a_day} a day", style="yellow"),
        _indented(finding["advice"]),
    ]
    if finding["more_blocks"] is not None:
        lines.append(_indented(f"{finding['more_blocks']:,} more blocks of room would have kept them."))
    # The texts of the pair that lost most, one above the other; the line that differs is the one to look at.
    if example["previous_text"] or example["text"]:
        for name, is_, text in ((example["previous"], "was", "previous_text"), (example["id"], "is", "text")):
            around = f"…{example['text_before'][-SHOWN_BEFORE:]}│{example[text][:SHOWN_BEHIND]}…"
            lines.append(_indented(f"{name} {is_}:").append_text(Text(f"  {_with_white_space(around)}")))
    return lines


def _with_white_space(text: str) -> str:
    """A text in one line, with its spaces as they are: they may be what differs."""
    return printable(text.replace("\n", "⏎").replace("\t", "⇥"))


def _indented(text: str) -> Text:
    return Text("   ").append_text(_text(text))


def _strip(attempt: Attempt) -> Text:
    """A character for each block, or for several of a long prompt."""
    sources = [run["source"] for run in attempt["blocks"] for _ in range(run["count"])]
    width = Console().width * STRIP_BLOCKS
    step = max(1, -(-len(sources) // width))
    strip = Text()
    for source in sources[::step]:
        strip.append("█" if source in COLOURS else "▒", style=COLOURS.get(source, COMPUTED))
    return strip


def _legend(attempt: Attempt) -> Text:
    counts: dict[str, int] = {}
    for run in attempt["blocks"]:
        counts[run["source"]] = counts.get(run["source"], 0) + run["count"]
    legend = Text()
    for source, count in counts.items():
        legend.append("█ " if source in COLOURS else "▒ ", style=COLOURS.get(source, COMPUTED))
        legend.append(f"{one_line(source)} {count:,}   ")
    if attempt["unhashed_tokens"]:
        legend.append(f"and {attempt['unhashed_tokens']} tokens, shorter than a block")
    return legend


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
