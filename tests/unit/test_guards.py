"""Headers of requests that web pages can have a browser send, and of others."""

import pytest

from raydix.engine.api.guards import is_allowed_origin, require_host, require_json, require_trusted_origin
from raydix.engine.core.errors import MediaTypeError, PermissionDeniedError


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken(content_type: str) -> None:
    require_json(content_type)


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded"]
)
def test_what_any_page_may_send_is_refused(content_type: str | None) -> None:
    with pytest.raises(MediaTypeError, match="application/json"):
        require_json(content_type)


@pytest.mark.parametrize(
    "host", [None, "localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", "::1"]
)
def test_the_server_s_own_names_and_every_address_are_hosts(host: str | None) -> None:
    require_host(host, ("localhost",))


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[x]"])
def test_a_name_that_may_be_made_to_point_here_is_no_host(host: str) -> None:
    with pytest.raises(PermissionDeniedError, match="allowed_hosts"):
        require_host(host, ("localhost",))


def test_a_page_of_this_server_and_whoever_is_no_page_may_send() -> None:
    require_trusted_origin(None, "localhost:8000")
    require_trusted_origin("http://localhost:8000", "localhost:8000")


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3000", "null", "", "http://["])
def test_a_page_of_another_site_may_not(origin: str) -> None:
    with pytest.raises(PermissionDeniedError, match="allowed_origins"):
        require_trusted_origin(origin, "localhost:8000", ["http://good.example"])


@pytest.mark.parametrize(("origin", "allowed"), [("http://a:1", ["http://a:1"]), ("http://a", ["*"]), ("null", ["*"])])
def test_a_page_of_an_allowed_origin_may(origin: str, allowed: list[str]) -> None:
    require_trusted_origin(origin, "localhost:8000", allowed)
    assert not is_allowed_origin(None, allowed), "no page"
