"""The file of tenants: complete or refused, and watched by ingress replicas and hosts."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve

from raydix.actors import changes
from raydix.cli.cluster import who_may_use
from raydix.configs import Config
from raydix.configs.load import read_yaml
from raydix.configs.sections import INGRESS, parts
from raydix.configs.tenants import TenantsFile
from raydix.engine.core.errors import StartupError
from raydix.engine.core.tenants import key_hash
from tests.unit.ingress import Replica, Served, body_of, call
from tests.unit.served_app import app
from tests.unit.waits import WAIT_S, until

HASH = key_hash("rdx-alice")


def config_with(file: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {"workers": {"mixed": {}}, "batches": {"gib": 0}, "tenants_file": str(file), **sections}
    )


def write(file: Path, *names: str, **fields: Any) -> None:
    tenants = [{"name": name, "key_hashes": [key_hash(f"rdx-{name}")], **fields} for name in names]
    draft = file.with_suffix(".new")
    draft.write_text(yaml.safe_dump({"tenants": tenants}))
    draft.replace(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("tenants: []", "at least 1 item"),
        ("{}", "tenants: Field required"),
        ("", "expected a mapping"),
        ("tenants: [", "config "),
        ("tenants: [{name: a}, {name: a}]", "tenants: name 'a' is given twice"),
        ("tenants: [{name: a, keys: []}]", "unknown key 'tenants.0.keys', did you mean 'key_hashes'"),
        ("{tenants: [{name: a}], cache: {}}", "unknown key 'cache'"),
        ("tenants: [{name: a, cache_min: 0.5}]", "cache.prefix_caching is false"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "tenants.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match=words):
        TenantsFile().resolved(config_with(file, cache={"prefix_caching": False}))


def test_a_change_is_noticed_once(tmp_path: Path) -> None:
    file, watched = tmp_path / "tenants.yaml", TenantsFile()
    assert not watched.has_changed(), "there is no file"
    write(file, "alice")
    config = watched.resolved(config_with(file))
    assert [tenant.name for tenant in config.tenants] == ["alice"] and config.tenants_file is None
    assert not watched.has_changed()
    file.unlink()
    assert watched.has_changed()
    with pytest.raises(StartupError):
        watched.resolved(config_with(file))
    assert not watched.has_changed(), "still absent"
    write(file, "bob")
    assert watched.has_changed()


def test_a_changed_file_is_parsed_where_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop only takes what a thread has parsed."""
    parsed: list[str] = []

    def read(path: Path) -> dict[str, Any]:
        parsed.append(threading.current_thread().name)
        return read_yaml(path)

    monkeypatch.setattr("raydix.configs.tenants.read_yaml", read)
    file, watched = tmp_path / "tenants.yaml", TenantsFile()
    write(file, "alice")
    watched.tenants(str(file))
    for names in (["bob"], [], ["bob", "carol"]):
        write(file, *names)
        with ThreadPoolExecutor(1, "beside") as beside:
            assert beside.submit(watched.has_changed).result()
        with contextlib.suppress(StartupError):
            assert [tenant.name for tenant in watched.tenants(str(file))] == names
    assert parsed == ["MainThread", *["beside_0"] * 3]


def test_keys_stand_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of them must go"):
        config_with(tmp_path / "t", tenants=[{"name": "a"}])


def test_an_ingress_replica_follows_the_file(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tenants.yaml"
    write(file, "alice")
    monkeypatch.setattr(changes, "LOOK_S", 0.005)

    async def status(name: str) -> int:
        headers = {"authorization": f"Bearer rdx-{name}"}
        return (await call(app, "POST", "/v1/completions", body_of("completion"), headers=headers)).status

    async def becomes(name: str, wanted: int) -> None:
        async def has_become() -> bool:
            return await status(name) == wanted

        await until(has_become)

    async def work() -> list[int]:
        await becomes("alice", 200)
        write(file, "bob")
        await becomes("bob", 200)
        await becomes("alice", 401)
        file.write_text("tenants: []")
        await until(lambda: "at least 1 item" in caplog.text)
        # Another change meanwhile finds the same file, and is refused with it.
        ingress: Any = serve.get_replica_context().servable_object
        await ingress.reconfigure(parts(config_with(file, ingress={"max_queued_requests": 3}))[INGRESS].live)
        return [await status("bob"), await status("nobody")]

    assert served(Replica(), work, tenants_file=str(file)) == [200, 401]


def test_the_start_line_names_the_file(tmp_path: Path) -> None:
    assert who_may_use(config_with(tmp_path / "t.yaml")) == f"open to the tenants in {tmp_path}/t.yaml, by key"


def test_a_change_that_cannot_be_taken_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.actors.changes.LOOK_S", 0.001)

    class Changing(TenantsFile):
        def has_changed(self) -> bool:
            return True

    async def play() -> None:
        taken = asyncio.Event()
        num_read = 0

        async def read_again() -> None:
            nonlocal num_read
            num_read += 1
            if num_read == 1:
                raise RuntimeError("unforeseen")
            taken.set()

        watch = asyncio.create_task(changes.when_changed(Changing(), read_again))
        await asyncio.wait_for(taken.wait(), WAIT_S)
        watch.cancel()

    asyncio.run(play())
