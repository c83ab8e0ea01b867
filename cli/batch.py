"""`raydix batch`: answers a file of requests, with the model in this process, or with a running server.

A configuration of several workers or ingress replicas gets a cluster of its own.

Exit codes: 0, every line has an answer; 1, some have failed; 2, nothing could begin; 130, interrupted: the next
call goes on.
"""

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raydix.cli.waiting import Waiting
from raydix.client import CONCURRENCY, Client
from raydix.configs.load import merged
from raydix.engine.batches.offline import BatchFiles, BatchSummary, look_at
from raydix.engine.core.batches.batch_run import Progress as LinesDone
from raydix.engine.core.errors import RequestError, StartupError

LOOK_S = 0.25  # pause between two looks for an interruption
OWN_CONCURRENCY = 64  # running lines at a server without other clients
SOME_FAILED, INTERRUPTED = 1, 130


def run(options: argparse.Namespace) -> int:
    """Answer the file; returns the exit code.

    Raises:
        StartupError: the server cannot start, or the files cannot be used.
    """
    if options.concurrency is not None and options.concurrency < 1:
        raise StartupError("--concurrency must be at least 1")
    console = Console(stderr=True, highlight=False)
    summary: BatchSummary | None
    try:
        found = look_at(BatchFiles(Path(options.source), Path(options.output)))
    except (RequestError, OSError) as error:
        raise StartupError(str(error)) from None
    if isinstance(found, BatchSummary):
        summary = found
    else:
        if options.address:
            summary = _with_running_server(options, console)
        elif _is_for_one_process(options):
            summary = _in_this_process(options, console)
        else:
            summary = _with_own_server(options)
    if summary is None:
        console.print("interrupted; the same command goes on")
        return INTERRUPTED
    return _report(options, summary, console)


def _with_running_server(options: argparse.Namespace, console: Console) -> BatchSummary | None:
    """Answer the file with a running server; None if interrupted."""
    from ray.serve.exceptions import RayServeException

    import raydix

    try:
        server = raydix.connect(options.address)
    except (ConnectionError, RayServeException) as error:
        raise StartupError(f"there is no server at {options.address}: {error}") from None
    return _answer(server, options, console, threading.Event())


def _is_for_one_process(options: argparse.Namespace) -> bool:
    """True for a configuration of one mixed worker and one ingress replica. Raises StartupError."""
    content = merged(options.config or ())
    workers = content.get("workers") or {"mixed": None}
    sections = [*workers.values(), content.get("ingress")]
    return list(workers) == ["mixed"] and all((section or {}).get("replicas", 1) == 1 for section in sections)


def _in_this_process(options: argparse.Namespace, console: Console) -> BatchSummary | None:
    """Load the model, and answer the file; None if interrupted. Raises StartupError."""
    from raydix import LLM

    # As in `raydix serve`, both end the command, also one that a script has begun in the background, where shells have
    # SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with Waiting(console, "loading the model"):
            llm = LLM(options.model, config=options.config or ())
        with llm, _progress(console) as show:
            return llm.batch(
                options.source,
                options.output,
                tenant=options.tenant,
                concurrency=options.concurrency or OWN_CONCURRENCY,
                on_progress=show,
            )
    except KeyboardInterrupt:
        return None
    except (RequestError, OSError) as error:
        raise StartupError(str(error)) from None


def _with_own_server(options: argparse.Namespace) -> BatchSummary | None:
    """Start a server, answer the file, stop the server; None if interrupted."""
    from raydix.cli import serve
    from raydix.cli.cluster import APP_NAME

    summaries: list[BatchSummary | None] = []

    def use(running: serve.StartedServer) -> None:
        import raydix

        def work() -> None:
            server = raydix.connect(app_name=APP_NAME)
            summaries.append(_answer(server, options, running.console, running.stop))

        serve.finish(running, running.ray_thread.submit(work))

    serve.run_with(options.config, _overrides(options), use, stopped=INTERRUPTED)
    return summaries[0] if summaries else None


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """A server for one process alone, without batches of others."""
    from raydix.cli.cluster import free_port

    model = {} if options.model is None else {"model": {"source": options.model}}
    return {"http": {"host": "127.0.0.1", "port": free_port()}, "batches": {"gib": 0}, **model}


def _answer(
    server: Client, options: argparse.Namespace, console: Console, stop: threading.Event
) -> BatchSummary | None:
    """Answer the file, showing progress; None after a stop. Raises StartupError."""
    with _progress(console) as show:

        async def until_stopped() -> BatchSummary | None:
            work = asyncio.ensure_future(
                server.batch_async(
                    options.source,
                    options.output,
                    tenant=options.tenant,
                    concurrency=options.concurrency or (CONCURRENCY if options.address else OWN_CONCURRENCY),
                    on_progress=show,
                )
            )
            # A stop comes from another thread, and wakes no event loop.
            while not (await asyncio.wait({work}, timeout=LOOK_S))[0]:
                if stop.is_set():
                    work.cancel()
                    # Until the journal is closed: the next call opens it.
                    await asyncio.wait({work})
                    return None
            summary: BatchSummary = work.result()
            return summary

        try:
            return asyncio.run(until_stopped())
        except KeyboardInterrupt:
            return None
        except (RequestError, OSError) as error:
            raise StartupError(str(error)) from None


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[LinesDone], None]]:
    """A bar of answered lines, moved by the function of this block."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("lines", total=None)

        def show(done: LinesDone) -> None:
            description = f"lines, {done.num_failed} failed" if done.num_failed else "lines"
            bar.update(
                task,
                description=description,
                completed=done.num_completed + done.num_failed,
                total=done.num_lines or None,
            )

        yield show


def _report(options: argparse.Namespace, summary: BatchSummary, console: Console) -> int:
    files = BatchFiles(Path(options.source), Path(options.output))
    console.print(f"{summary.num_completed} of {summary.num_lines} lines answered in {files.output}", soft_wrap=True)
    if not summary.num_failed:
        return 0
    console.print(f"{summary.num_failed} failed, in {files.errors}", soft_wrap=True)
    return SOME_FAILED
