"""What raydix adds to the configuration that Serve writes for HAProxy."""

from pathlib import Path

import pytest

from raydix.cli.haproxy import CONNECTIONS, DEFAULTS, ERRORS, HEADER_TIMEOUT, amended, write_errors

SERVE = """global
    maxconn 4096
defaults
    mode http
    timeout client 3600s
    errorfile 502 /tmp/500.http
frontend prometheus
    bind :9101
    no log
frontend http_frontend
    bind {host}:8000
    use_backend app
backend app
    server replica 10.0.0.1:3000 check
listen stats
  bind *:8404
  stats enable
"""


def lines(config: str) -> list[str]:
    return [line.strip() for line in config.splitlines()]


def test_limits_and_errors_are_added_where_they_count(tmp_path: Path) -> None:
    config = amended(SERVE.format(host="127.0.0.1"), {HEADER_TIMEOUT: "7", CONNECTIONS: "9"}, tmp_path)
    found = lines(config)
    assert found.index("defaults") < found.index("timeout http-request 7s") < found.index("frontend prometheus")
    reject = "tcp-request connection reject if { sc0_conn_cur gt 9 }"
    for line in (reject, "maxconn 2730"):
        assert found.index("frontend http_frontend") < found.index(line) < found.index("backend app")
    assert [line for line in found if line.startswith("errorfile")] == [
        f"errorfile {status} {tmp_path}/raydix-{status}.http" for status in ERRORS
    ]
    kept = set(lines(SERVE.format(host="127.0.0.1"))) - {"bind :9101", "bind *:8404", "errorfile 502 /tmp/500.http"}
    assert kept <= set(found)


@pytest.mark.parametrize(
    ("host", "metrics"), [("127.0.0.1", "127.0.0.1:9101"), ("localhost", "127.0.0.1:9101"), ("*", ":9101")]
)
def test_metrics_follow_the_front_to_loopback(tmp_path: Path, host: str, metrics: str) -> None:
    found = lines(amended(SERVE.format(host=host), DEFAULTS, tmp_path))
    assert f"bind {metrics}" in found
    assert ("bind 127.0.0.1:8404" in found) == (host != "*")


NO_PATH = """backend default_backend
    http-request return status 404 content-type text/plain string "not found"
"""


def test_paths_are_not_found_where_there_is_an_application(tmp_path: Path) -> None:
    """Before, they are a 503."""
    with_app = SERVE.format(host="127.0.0.1").replace("\nbackend app\n", f"\n{NO_PATH}backend app\n")
    assert set(lines(NO_PATH)) <= set(lines(amended(with_app, DEFAULTS, tmp_path)))
    without = with_app.replace("\nbackend app\n", "\nother app\n")
    found = lines(amended(without, DEFAULTS, tmp_path))
    assert found[found.index("backend default_backend") + 1] == (
        f"http-request return status 503 errorfile {tmp_path}/raydix-503.http"
    )
    assert lines(NO_PATH)[1] not in found


@pytest.mark.parametrize(
    "config", [SERVE, SERVE.replace("\nbackend app\n", f"\n{NO_PATH}")], ids=["application", "none"]
)
def test_amending_twice_changes_nothing(tmp_path: Path, config: str) -> None:
    once = amended(config.format(host="127.0.0.1"), DEFAULTS, tmp_path)
    assert amended(once, DEFAULTS, tmp_path) == once


def test_error_files_are_whole_answers(tmp_path: Path) -> None:
    write_errors(tmp_path)
    for status in ERRORS:
        head, _, body = (tmp_path / f"raydix-{status}.http").read_bytes().partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert b'"code": "' in body
