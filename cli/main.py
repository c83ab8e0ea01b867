"""`raydix`: parses the command line and runs a subcommand. Exit code 2: the subcommand could not start."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from raydix.cli.flags import add_flags
from raydix.engine.core.errors import StartupError

KEY_BYTES = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except StartupError as error:
        print(f"raydix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The options of `raydix` and of its subcommands."""
    raydix = argparse.ArgumentParser(prog="raydix", description="LLM serving on Ray.")
    raydix.add_argument("--version", action="version", version=f"raydix {version('raydix')}")
    commands = raydix.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser("serve", help="start Ray and Serve on this machine and serve a model")
    serve.add_argument("--model", help="folder, hub id, GGUF file or package:<package>/<file>")
    _add_config(serve, "default: what suits the machine")
    serve.add_argument("--host", help="address to bind (default: the configuration's, 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to bind (default: the configuration's, 8000)")
    add_flags(serve)
    serve.add_argument(
        "--local",
        action="store_true",
        help="all in one process, without Ray's cluster: one worker, no failover",
    )
    serve.add_argument(
        "--restart", action="store_true", help="start again when the server fails, as when Ray's GCS dies"
    )
    serve.add_argument("--quiet", action="store_true", help="no line about the load every ten seconds on a terminal")
    serve.add_argument("--log-requests", action="store_true", help="print a line for each request at its end")
    serve.set_defaults(run=_serve)

    deploy = commands.add_parser("deploy", help="deploy on a Ray cluster that runs, or change the server there")
    _add_config(deploy)
    deploy.add_argument("--model", help="folder, hub id, GGUF file or package:<package>/<file>")
    deploy.add_argument(
        "--address", default="auto", help="Ray cluster, as raydix serve prints it (default: the only one here)"
    )
    deploy.add_argument("--name", default="raydix", help="name of the Serve application (default: %(default)s)")
    deploy.add_argument("--without-tenants", action="store_true", help="deploy a file that has none of the tenants")
    deploy.add_argument("--dry-run", action="store_true", help="print what would change, and change nothing")
    deploy.set_defaults(run=_deploy)

    batch = commands.add_parser("batch", help="answer a file of requests, in this process or with a running server")
    batch.add_argument("source", metavar="in.jsonl", help="requests, in OpenAI's form for batches")
    batch.add_argument("-o", "--output", required=True, metavar="out.jsonl", help="file for the answers")
    batch.add_argument("--model", help="folder, hub id, GGUF file or package:<package>/<file>")
    _add_config(batch, "default: what suits the machine")
    batch.add_argument("--address", help="Ray cluster of a running server to use, as raydix serve prints it, or auto")
    batch.add_argument("--tenant", help="on whose behalf, where the server has tenants")
    batch.add_argument("--concurrency", type=int, help="lines at a time (default: 64, at a running server 32)")
    batch.set_defaults(run=_batch)

    chat = commands.add_parser("chat", help="chat with a running server in the terminal")
    _add_server(chat)
    chat.add_argument("--model", help="the model's name (default: the server's first)")
    chat.add_argument("--system", help="a system message to begin with")
    chat.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    chat.add_argument(
        "--temperature", type=float, default=0.2, help="0: always the likeliest token (default: %(default)s)"
    )
    chat.set_defaults(run=_chat)

    requests = commands.add_parser("requests", help="print a running server's requests, under way and lately ended")
    _add_server(requests)
    requests.add_argument("--json", action="store_true", help="as the server has them")
    requests.set_defaults(run=_requests)

    why = commands.add_parser("why", help="print why a prompt was cached, or was not")
    why.add_argument("id", nargs="?", default="last", help="id of an answer (default: the request that came last)")
    _add_server(why)
    why.add_argument("--json", action="store_true", help="as the server has it")
    why.set_defaults(run=_why)

    doctor = commands.add_parser("doctor", help="print what costs prompts their hits, and what to change")
    _add_server(doctor)
    doctor.add_argument("--json", action="store_true", help="as the server has it")
    doctor.set_defaults(run=_doctor)

    trace = commands.add_parser("trace", help="record what a running server does, for Perfetto")
    trace.add_argument("-o", "--output", required=True, metavar="FILE", help="where the trace is written, as JSON")
    trace.add_argument("--seconds", type=float, default=5.0, help="time to record (default: %(default)s)")
    _add_server(trace)
    trace.set_defaults(run=_trace)

    top = commands.add_parser("top", help="show a running server's requests, live")
    _add_server(top)
    top.set_defaults(run=_top)

    replay = commands.add_parser("replay", help="send the requests of a recording again, and compare the answers")
    replay.add_argument("recording", metavar="FILE", help="a file that logging.recording made; it contains prompts")
    replay.add_argument("--url", help="a running server to ask (default: the model is loaded into this process)")
    replay.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key (OPENAI_API_KEY)")
    replay.add_argument("--model", help="folder, hub id, GGUF file or package:<package>/<file> (default: as recorded)")
    _add_config(replay, "default: one worker, in the size of the machine")
    replay.add_argument(
        "--speed", type=float, default=1.0, help="so many times as fast as the requests came (default: %(default)s)"
    )
    replay.set_defaults(run=_replay)

    models = commands.add_parser("models", help="list the families that run, which sizes fit here, and what is refused")
    models.add_argument("--markdown", action="store_true", help="the tables of the documentation, without the machine")
    models.set_defaults(run=_models)

    key = commands.add_parser("key", help="make an API key for a tenant, and the hash of it for the configuration")
    key.set_defaults(run=_key)
    return raydix


def _add_server(command: argparse.ArgumentParser) -> None:
    """The options of commands that ask a running server over HTTP."""
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    command.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key (OPENAI_API_KEY)")


def _add_config(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """The option `--config`, which means the same to every command. Without a default it must be given."""
    means = "name or path of a configuration; given again: more of them, each merged over those before it"
    command.add_argument(
        "--config",
        action="append",
        required=default is None,
        help=f"{means} ({default})" if default else means,
    )


def _serve(options: argparse.Namespace) -> int:
    if options.local:
        if options.restart:
            raise StartupError("--restart starts Ray again; with --local there is none")
        from raydix.cli import local

        return local.run(options)
    if options.restart:
        from raydix.cli import restart

        return restart.run(options)
    from raydix.cli import serve  # Ray is slow to import, and its switches must be in the environment before

    return serve.run(options)


def _deploy(options: argparse.Namespace) -> int:
    from raydix.cli import deploy

    return deploy.run(options)


def _batch(options: argparse.Namespace) -> int:
    from raydix.cli import batch

    return batch.run(options)


def _chat(options: argparse.Namespace) -> int:
    from raydix.cli import chat

    return chat.run(options)


def _requests(options: argparse.Namespace) -> int:
    from raydix.cli import observe

    return observe.run_requests(options)


def _why(options: argparse.Namespace) -> int:
    from raydix.cli import observe

    return observe.run_why(options)


def _doctor(options: argparse.Namespace) -> int:
    from raydix.cli import observe

    return observe.run_doctor(options)


def _trace(options: argparse.Namespace) -> int:
    from raydix.cli import observe

    return observe.run_trace(options)


def _top(options: argparse.Namespace) -> int:
    from raydix.cli import observe

    return observe.run_top(options)


def _replay(options: argparse.Namespace) -> int:
    from raydix.cli import replay

    return replay.run(options)


def _models(options: argparse.Namespace) -> int:
    from raydix.cli import models

    return models.run(markdown=options.markdown)


def _key(_: argparse.Namespace) -> int:
    """A new API key for a client, and its hash for the configuration's `tenants`; neither is kept."""
    import secrets

    from raydix.engine.core.tenants import key_hash

    key = f"rdx-{secrets.token_urlsafe(KEY_BYTES)}"
    print(f"key   {key}\nhash  {key_hash(key)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
