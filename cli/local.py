"""`raydix serve --local`: the whole server in this process, without Ray's cluster, until a signal ends it.

The HTTP application is the one that Serve runs, behind uvicorn in the place of HAProxy.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from raydix.cli.cluster import named_local, who_may_use
from raydix.cli.log_lines import EventHandler, events_of
from raydix.cli.serve import ONE_WORKER, example, overrides_of, prepared, show_line, url_of
from raydix.cli.waiting import Waiting, age_s
from raydix.configs import Config
from raydix.configs.load import merged
from raydix.engine.core.errors import StartupError
from raydix.engine.model.sources import resolve_model

if TYPE_CHECKING:
    import uvicorn

STREAMS_S = 2  # time that running answers have after a signal; a second signal does not wait for them
LOOK_S = 0.02  # interval between two looks whether the server listens
# Loggers of the events that the terminal can show.
EVENT_LOGGERS = ("raydix.engine.serving.accounting", "raydix.engine.serving.load_log")
MAX_HEAD = 32 << 10  # bytes of a request's line and headers; HAProxy takes as many


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises:
        StartupError: configuration, model, or port cannot be used.
    """
    console = Console(stderr=True, highlight=False)
    if options.role is None and not merged(options.config or ()).get("workers"):
        options.role = ONE_WORKER  # also where the machine has room for two
    config = named_local(prepared(options.config or (), overrides_of(options), options, console, has_store=False))
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    _show_events(events_of(options, is_terminal=console.is_terminal), console)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, console))
    return 0


def _show_events(events: frozenset[str], console: Console) -> None:
    """Have the log's records of these events printed."""
    if not events:
        return
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)  # these print records of lower levels, too, once a logger lets them pass
    handler = EventHandler(events, lambda line: show_line(console, line))
    for name in EVENT_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(handler)


async def _serve(config: Config, console: Console) -> None:
    from raydix.actors.one_process import OneProcess

    server = OneProcess(config)
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    stopping = asyncio.create_task(told.wait())

    with Waiting(console, "loading the model"):
        starting = asyncio.create_task(server.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        await _listen(server.application(), config, console, stopping)
    else:
        starting.cancel()
    console.print("stopping")
    await server.stop()


async def _listen(application: object, config: Config, console: Console, stopping: "asyncio.Task[bool]") -> None:
    """Answer requests until told to stop. Raises StartupError if the port was taken meanwhile."""
    folder = resolve_model(config.model.source, quantization=config.model.quantization)
    async with listening(application, config) as serving:
        console.print(
            f"ready after {age_s():.1f} s: {url_of(config)}, all in this process: nothing takes over from it\n"
            f"{who_may_use(config)}\n\n{example(config, folder)}\n",
            soft_wrap=True,
        )
        await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def listening(application: object, config: Config) -> AsyncGenerator["asyncio.Task[None]"]:
    """Answer requests while the block runs, by the task that it gets. Raises StartupError if the port was taken."""
    web = _uvicorn(application, config)
    serving = asyncio.create_task(_answering(web, config))
    while not web.started and not serving.done():
        await asyncio.sleep(LOOK_S)
    if serving.done():
        serving.result()
    try:
        yield serving
    finally:
        web.should_exit = True
        await serving


async def _answering(web: "uvicorn.Server", config: Config) -> None:
    """Answer requests until the server is told to exit. Raises StartupError if the port is taken."""
    try:
        await web._serve()  # `serve` would take the signals' handlers
    except SystemExit:  # uvicorn would end the process, without a word about what to do
        raise StartupError(f"nothing can listen on {config.http.host}:{config.http.port} any more") from None


def _uvicorn(application: object, config: Config) -> "uvicorn.Server":
    import uvicorn

    settings = uvicorn.Config(
        application,  # type: ignore[arg-type]
        host=config.http.host,
        port=config.http.port,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=STREAMS_S,
        h11_max_incomplete_event_size=MAX_HEAD,
    )
    return uvicorn.Server(settings)
