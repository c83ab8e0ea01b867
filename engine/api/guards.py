"""Checks of a request's headers before its body is read, against requests that a web page makes a browser send to a
server meant for its machine's user alone.

A page of another site may send any POST whose content type a form could have, and a page whose name is made to resolve
to this machine's address (DNS rebinding) may send anything and read the answer.
"""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from raydix.engine.core.errors import ContentEncodingError, MediaTypeError, PermissionDeniedError

JSON = "application/json"
IDENTITY = "identity"  # name of no encoding


def require_json(content_type: str | None) -> None:
    """Raise MediaTypeError unless a content type is JSON's; no page can send that to another site unasked."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != JSON:
        shown = f"'{kind[:100]}'" if kind else "missing"
        raise MediaTypeError(f"The Content-Type must be {JSON}, and it is {shown}.")


def require_unencoded(content_encoding: str | None) -> None:
    """Raise ContentEncodingError for a body that is declared to be compressed, whatever the body really is: the size of
    what would come out of it is unknown."""
    encoding = (content_encoding or "").strip().lower()
    if encoding not in ("", IDENTITY):
        raise ContentEncodingError(
            f"The Content-Encoding '{encoding[:100]}' is not supported: send the body without compression."
        )


def require_trusted_origin(origin: str | None, host: str | None, allowed: Collection[str] = ()) -> None:
    """Raise PermissionDeniedError if a browser says that a page of another host sends the request, and that page's
    origin is not `allowed`.

    `origin` and `host` are the headers of these names; clients other than browsers send no origin.
    """
    if origin is None or _host_of(origin) == (host or "").lower() or is_allowed_origin(origin, allowed):
        return
    raise PermissionDeniedError(
        f"Pages of '{origin[:100]}' may not send requests to this server; http.allowed_origins in its configuration "
        "names those that may."
    )


def is_allowed_origin(origin: str | None, allowed: Collection[str]) -> bool:
    """True for the origin of a page that the configuration lets send requests; `*` stands for all origins."""
    return origin is not None and ("*" in allowed or origin in allowed)


def require_host(host: str | None, allowed: Collection[str]) -> None:
    """Raise PermissionDeniedError unless the Host header is an address, an allowed name, or missing: no name server
    redirects an address, and no browser leaves the header out."""
    if host is None:
        return
    name = _name(host)
    if name not in allowed and not _is_address(name):
        raise PermissionDeniedError(
            f"This server does not answer to the host '{name[:100]}'; http.allowed_hosts in its configuration names "
            "those it does."
        )


def _host_of(origin: str) -> str | None:
    """The host and port of an origin, in lower case; None if the origin is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _name(host: str) -> str:
    """Without a port and an IPv6 address's brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
