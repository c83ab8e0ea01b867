"""The page at `/`: its files, their headers, and the switch that turns it off."""

import re
from collections.abc import Awaitable, Callable

import pytest

from raydix.actors.ingress.routes.page import FILES, FOLDER, TYPES
from raydix.engine.core.tenants import Tenant, Tenants, key_hash
from tests.unit.ingress import Replica, Reply, Served, call
from tests.unit.served_app import app

MAX_BYTES = 150_000
SCRIPTS = {name: file.content.decode() for name, file in FILES.items() if name.endswith(".js")}


def ask(path: str, **headers: str) -> Callable[[], Awaitable[Reply]]:
    return lambda: call(app, "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_the_page_and_its_files_have_their_types(served: Served) -> None:
    index = served(Replica(), ask("/"))
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for name, file in FILES.items():
        reply = served(Replica(), ask(f"/page/{name}"))
        assert (reply.status, reply.body) == (200, file.content)
        assert reply.headers["content-type"] == TYPES[name[name.rindex(".") :]]


def test_the_page_is_small() -> None:
    assert sum(len(file.content) for file in FILES.values()) < MAX_BYTES
    assert {path.name for path in FOLDER.iterdir()} == {*FILES}


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_nothing_comes_from_elsewhere_and_nobody_frames_the_page(served: Served, path: str) -> None:
    headers = served(Replica(), ask(path)).headers
    policy = dict(directive.partition(" ")[::2] for directive in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_a_known_file_is_not_sent_again(served: Served) -> None:
    etag = served(Replica(), ask("/page/app.js")).headers["etag"]
    again = served(Replica(), ask("/page/app.js", if_none_match=etag))
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    assert served(Replica(), ask("/page/chat.js", if_none_match=etag)).status == 200


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_the_page_can_be_turned_off(served: Served, path: str) -> None:
    reply = served(Replica(), ask(path), http={"page": False})
    assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("name", ["none.js", "..%2Fapp.py", "%2Fetc%2Fpasswd", "app.js%00"])
def test_only_files_of_the_page_are_served(served: Served, name: str) -> None:
    assert served(Replica(), ask(f"/page/{name}")).status == 404


def test_the_page_needs_no_key_and_what_it_shows_does(served: Served) -> None:
    tenants = Tenants([Tenant("a")], {key_hash("k"): "a"})
    assert served(Replica(tenants=tenants), ask("/")).status == 200
    assert served(Replica(tenants=tenants), ask("/page/chat.js")).status == 200
    assert served(Replica(tenants=tenants), ask("/v1/requests")).status == 401
    assert served(Replica(tenants=tenants), ask("/v1/requests", authorization="Bearer k")).status == 200


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import_each_other_alone_and_never_make_markup_of_text(name: str) -> None:
    script = SCRIPTS[name]
    imported = re.findall(r'^import (?:.* from )?"([^"]+)";$|\bimport\("([^"]+)"', script, re.M)
    assert {path.removeprefix("./") for paths in imported for path in paths} <= {*SCRIPTS, ""}
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script) == []
    assert re.findall(r"https?://(?!www\.w3\.org/)", script) == []
