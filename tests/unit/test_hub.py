"""A model on the hub is judged by its small files: what cannot run costs no download. The hub is a server here."""

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raydix.cli.cluster import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL_BYTES = 1 << 20
"""Most that a refusal may fetch."""
WEIGHTS_BYTES = 3 << 20
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
MAMBA = {**LLAMA, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}
HUGE = {**LLAMA, "hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 80}


TOKENIZER = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
).encode()


class Hub:
    """The part of the hub's protocol that its client speaks for one repository, `org/model`; counts what it sends."""

    def __init__(self, config: dict[str, Any] | None, **files: bytes | None) -> None:
        if config is not None:
            files["config.json"] = json.dumps(config).encode()
        shipped = {"model.safetensors": bytes(WEIGHTS_BYTES), "tokenizer.json": TOKENIZER}
        self.files = {name: data for name, data in {**shipped, **files}.items() if data is not None}
        self.sent: Counter[str] = Counter()
        self.lost = ""
        """Name of a file of which only the beginning can be fetched."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                status, headers, body = hub.answer(self.path)
                asked = re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range", ""))
                if self.command == "GET" and asked is None and hub.lost and self.path.endswith(hub.lost):
                    status, headers, body = hub.answer("/org/model/resolve/main/lost")
                if status == 200 and asked is not None:
                    total, body = len(body), body[: int(asked[1]) + 1]
                    status, headers = 206, {**headers, "Content-Range": f"bytes 0-{len(body) - 1}/{total}"}
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    hub.sent[self.path] += len(body)
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        commit = "c" * 40
        if path.startswith("/api/models/org/model"):
            listed: list[dict[str, Any]] = [{"rfilename": name} for name in self.files]
            if "/tree/" in path:
                listed = [{"type": "file", "path": name, "oid": "0", "size": 1} for name in self.files]
                return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()
            described: dict[str, Any] = {"id": "org/model", "sha": commit, "siblings": listed}
            return 200, {"Content-Type": "application/json"}, json.dumps(described).encode()
        found = re.fullmatch(r"/org/model/resolve/[^/]+/(.+)", path)
        if found is None or found[1] not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound" if found else "RepoNotFound", "X-Repo-Commit": commit}, b""
        return 200, {"ETag": f'"{found[1]}"', "X-Repo-Commit": commit}, self.files[found[1]]


@pytest.fixture
def hubs() -> Iterator[list[Hub]]:
    made: list[Hub] = []
    yield made
    for hub in made:
        hub.server.shutdown()
        hub.server.server_close()


def serve(hub: Hub, tmp_path: Path, *arguments: str, model: str = "org/model") -> subprocess.CompletedProcess[str]:
    """Run `raydix serve` on the hub's model, up to where Ray would start; neither Ray nor torch may be imported."""
    for package in ("ray", "torch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("import os\nos._exit(99)\n")
    return subprocess.run(
        [sys.executable, "-m", "raydix.cli.main", "serve", "--model", model, "--port", str(free_port()), *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_address[1]}",
            "HF_HOME": str(tmp_path / "hub"),
        },
        timeout=120,
        check=False,
    )


INDEX = json.dumps({"weight_map": {"model.embed_tokens.weight": "a", "model.layers.0.experts.weight": "a"}}).encode()


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        (
            MAMBA,
            {},
            "the model architecture MambaForCausalLM is not supported: raydix lacks the recurrent state of Mamba 1",
        ),
        ({**LLAMA, "quantization_config": {"quant_method": "quark"}}, {}, "the model's weights are quantised (quark)"),
        (HUGE, {}, "the model does not fit: a "),
        (
            LLAMA,
            {"model.safetensors.index.json": INDEX},
            "the weights in org/model on the Hugging Face hub lack ",
        ),
        (None, {}, "org/model on the Hugging Face hub has no config.json"),
        (LLAMA, {"tokenizer.json": None}, "org/model on the Hugging Face hub has no tokenizer (tokenizer.json)"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_fetched(
    config: dict[str, Any] | None, files: dict[str, bytes | None], says: str, hubs: list[Hub], tmp_path: Path
) -> None:
    hubs.append(hub := Hub(config, **files))
    done = serve(hub, tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("raydix: ")]
    assert line.startswith(f"raydix: {says}"), line
    assert sum(hub.sent.values()) < SMALL_BYTES
    assert not any(path.endswith("model.safetensors") for path in hub.sent)


def test_weights_in_another_format_are_refused(hubs: list[Hub], tmp_path: Path) -> None:
    hubs.append(hub := Hub(LLAMA))
    hub.files = {"config.json": hub.files["config.json"], "pytorch_model.bin": bytes(WEIGHTS_BYTES)}
    done = serve(hub, tmp_path)
    assert done.returncode == 2 and "has no model weights (*.safetensors); its weights are in PyTorch's" in done.stderr
    assert sum(hub.sent.values()) < SMALL_BYTES


def test_what_fits_is_fetched_after_its_sizes_were_told(hubs: list[Hub], tmp_path: Path) -> None:
    """The weights cannot be fetched, and the sizes were told all the same."""
    hubs.append(hub := Hub(LLAMA))
    hub.lost = "model.safetensors"
    done = serve(hub, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "requests of up to 4,096 tokens" in done.stderr
    assert any("model.safetensors" in path for path in hub.sent)


def gguf(tmp_path: Path, architecture: str = "llama", **settings: int) -> bytes:
    """A GGUF file whose tokenizer alone is larger than what a refusal may fetch, with weights behind it."""
    import numpy as np
    from gguf import GGUFWriter

    file = tmp_path / "made.gguf"
    writer = GGUFWriter(file, architecture)
    shape = {"context_length": 4096, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64} | settings
    for name, number in (shape | {"attention.head_count": 2, "attention.head_count_kv": 2}).items():
        writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list([f"token {index}" * 4 for index in range(30_000)])
    writer.add_tensor("token_embd.weight", np.zeros((30_000, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


@pytest.mark.parametrize(
    ("architecture", "settings", "says"),
    [
        ("mamba", {}, "the GGUF architecture 'mamba' of m.gguf is not supported; raydix runs: "),
        (
            "llama",
            {"embedding_length": 65_536, "feed_forward_length": 262_144, "block_count": 80},
            "the model does not fit: a ",
        ),
    ],
)
def test_a_gguf_file_is_judged_by_its_first_bytes(
    architecture: str, settings: dict[str, int], says: str, hubs: list[Hub], tmp_path: Path
) -> None:
    hubs.append(hub := Hub(None))
    hub.files["m.gguf"] = gguf(tmp_path, architecture, **settings)
    assert len(hub.files["m.gguf"]) > 3 * SMALL_BYTES
    done = serve(hub, tmp_path, model="org/model/m.gguf")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("raydix: ")]
    assert line.startswith(f"raydix: {says}"), line
    assert 0 < sum(hub.sent.values()) < SMALL_BYTES


def test_a_gguf_file_that_fits_is_fetched_after_its_sizes_were_told(hubs: list[Hub], tmp_path: Path) -> None:
    hubs.append(hub := Hub(None))
    hub.files["m.gguf"] = gguf(tmp_path)
    hub.lost = "m.gguf"
    done = serve(hub, tmp_path, model="org/model/m.gguf")
    assert done.returncode == 2, done.stderr
    assert "requests of up to 4,096 tokens" in done.stderr
    assert 0 < sum(hub.sent.values()) < SMALL_BYTES


def test_a_gguf_file_that_is_not_there_is_named(hubs: list[Hub], tmp_path: Path) -> None:
    hubs.append(hub := Hub(None))
    done = serve(hub, tmp_path, model="org/model/none.gguf")
    assert done.returncode == 2 and "there is no file org/model/none.gguf here" in done.stderr, done.stderr
    assert "it has no such file" in done.stderr


RESOLVE = "import sys; from raydix.engine.model.sources import resolve_model; print(resolve_model(sys.argv[1]))"


def test_a_damaged_tokenizer_is_refused_before_the_weights_are_fetched(hubs: list[Hub], tmp_path: Path) -> None:
    hubs.append(hub := Hub(LLAMA, **{"tokenizer.json": TOKENIZER[:-9]}))
    for tokenizer, is_whole in ((TOKENIZER[:-9], False), (TOKENIZER, True)):
        hub.files["tokenizer.json"] = tokenizer
        home = tmp_path / str(is_whole)
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, "org/model"],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_address[1]}",
                "HF_HOME": str(home),
                "PYTHONPATH": str(REPOSITORY),
            },
            timeout=120,
        )
        assert (done.returncode == 0) == is_whole, done.stderr
        assert is_whole or "the tokenizer.json of org/model on the Hugging Face hub cannot be read" in done.stderr
        assert any("model.safetensors" in path for path in hub.sent) == is_whole
