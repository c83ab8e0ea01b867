"""`raydix serve --local`: one process, the same application, ended by a signal."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import WAIT_S, Server, random_prompt
from tests.integration.local import Process, require_default_model

ROOT = Path(__file__).parents[2]
TWO = {"prompt": "One, two,", "max_tokens": 8, "temperature": 0}
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def small(folder: Path) -> Path:
    """A configuration for a server whose batches and recordings are in a folder."""
    config = folder / "small.yaml"
    config.write_text(
        "cache: {num_blocks: 200}\nmodel: {max_model_len: 2048}\n"
        f"batches: {{folder: {folder / 'batches'}}}\nlogging: {{recording: {folder}}}\n"
    )
    return config


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    require_default_model()
    config = small(tmp_path_factory.mktemp("local"))
    running = Process("--config", str(config))
    try:
        running.until("ready after")
        yield running
    finally:
        running.end()


@pytest.fixture
def here(local: Process) -> Server:
    return Server("127.0.0.1", local.port)


def test_chats_completions_and_streams(here: Server) -> None:
    status, _, body = here.request("POST", "/v1/chat/completions", {**QUESTION, "max_tokens": 12}, timeout=WAIT_S)
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"]
    prompt = random_prompt(1, 300)
    whole = here.complete(prompt, max_tokens=8)
    *chunks, last = here.stream(prompt, max_tokens=8)
    token_ids = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())]
    assert token_ids == whole["choices"][0]["token_ids"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288


def test_routes_beside_generation(here: Server) -> None:
    for route in ("/health", "/v1/models", "/metrics", "/openapi.json", "/docs", "/v1/cache", "/version", "/load"):
        assert here.request("GET", route)[0] == 200, route
    assert here.request("GET", "/nothing")[0] == 404
    assert here.request("POST", "/v1/chat/completions", b"{")[0] == 400
    status, _, body = here.request("POST", "/v1/completions", {"prompt": "One", "max_tokens": 1})
    name = json.loads(body)["id"]
    status, _, body = here.request("GET", f"/v1/requests/{name}/explain")
    assert status == 200 and json.loads(body)["choices"]
    assert here.request("POST", "/v1/cache/reset", {})[0] == 200


def test_a_grammar_and_a_client_that_leaves(here: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    body = {**QUESTION, "max_tokens": 60, "response_format": form}
    status, _, answer = here.request("POST", "/v1/chat/completions", body, timeout=WAIT_S)
    assert status == 200
    assert isinstance(json.loads(json.loads(answer)["choices"][0]["message"]["content"])["n"], int)
    chunks = here.stream(random_prompt(2, 20), max_tokens=1500)
    next(chunks)
    chunks.close()
    assert here.complete(random_prompt(3, 20), max_tokens=4)["choices"][0]["finish_reason"] == "length"


def test_the_start_says_what_it_is(local: Process) -> None:
    said = "\n".join(local.lines)
    assert f"http://127.0.0.1:{local.port}, all in this process" in said
    assert not [child for child in psutil.Process(local.process.pid).children(True) if "ray" in child.name()]


def test_the_wheel_serves_beside_other_packages_of_the_tree_s_names(local: Process, tmp_path: Path) -> None:
    """Hugging Face's `kernels` has the name of a folder of the tree, and installing it replaces no file of raydix's."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    built = {"build", "dist", "raydix.egg-info"}
    shutil.copytree(ROOT, source, symlinks=True, ignore=lambda folder, names: built | {n for n in names if n[0] == "."})
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source))
    [wheel] = tmp_path.glob("raydix-*.whl")
    pip("install", "--no-deps", "--target", str(installed), str(wheel), "kernels==0.17.2")
    assert {path.parts[0] for path in map(Path, zipfile.ZipFile(wheel).namelist())} == {
        "raydix",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }

    env = os.environ | {"PYTHONPATH": str(installed)}
    program = "import kernels, raydix.kernels.cpp.loader; print(kernels.__file__, raydix.kernels.cpp.loader.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [f"{installed}/kernels/__init__.py", f"{installed}/raydix/kernels/cpp/loader.py"]

    running = Process("--config", str(small(tmp_path)), folder=tmp_path, env=env)
    try:
        running.until("ready after")
        servers = [Server("127.0.0.1", each.port) for each in (running, local)]
        answers = [each.request("POST", "/v1/completions", TWO, timeout=WAIT_S) for each in servers]
        assert [status for status, _, _ in answers] == [200, 200]
        assert len({json.dumps(json.loads(body)["choices"]) for _, _, body in answers}) == 1
    finally:
        running.end()


def test_a_signal_ends_everything(local: Process) -> None:
    """From here on the server answers nothing any more."""
    children = psutil.Process(local.process.pid).children(recursive=True)
    os.kill(local.process.pid, signal.SIGTERM)
    local.until("stopping")
    assert local.process.wait() == 0
    gone, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert not alive and len(gone) == len(children)


def test_the_recording_is_answered_the_same_by_another_process(local: Process) -> None:
    config = local.options[-1]
    [recording] = Path(config).parent.glob("requests-*.jsonl")
    command = [sys.executable, "-m", "raydix.cli.main", "replay", str(recording), "--config", config, "--speed", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search("[1-9][0-9]* answers the same as then", done.stderr), done.stderr
    assert "not compared: the client left" in done.stderr and "different" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--config", "cpu"], "one process has one worker"),
        (["--restart"], "--restart"),
        (["--model", "no_such.gguf"], "no_such.gguf"),
    ],
)
def test_what_cannot_run_in_one_process_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    refused = Process(*options)
    assert said in refused.until("raydix: ")
    assert refused.process.wait() == 2


def stopped_while_loading(process: psutil.Process) -> bool:
    """Stop a server; whether it has its model's weights before it then."""
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        assert process.status() != psutil.STATUS_ZOMBIE, "it has ended"
    return "SmolLM2" in Path(f"/proc/{process.pid}/maps").read_text()


def is_listened_to(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_a_signal_ends_a_server_that_loads_its_model(tmp_path: Path) -> None:
    running = Process("--config", str(small(tmp_path)))
    process = psutil.Process(running.process.pid)
    # It stands still at each look, so that it cannot have loaded its model between the look and the signal, and runs
    # between the looks: without a pause it would hardly be given a turn.
    while not stopped_while_loading(process):
        assert not is_listened_to(running.port), "it has loaded its model unseen"
        process.resume()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.02)
    assert not is_listened_to(running.port)
    children = process.children(recursive=True)
    process.terminate()
    process.resume()
    running.until("stopping")
    assert running.process.wait() == 0
    assert not [line for line in running.lines if "ready after" in line or "Traceback" in line]
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)
