"""Folders of scripted models.

python -m tests.model.scripted FOLDER < LINES   # the folder must be there
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from raydix.engine.model.scripted import SCRIPT
from raydix.engine.model.sources import DEFAULT_MODEL, resolve_model
from raydix.engine.model.tokenizer import Tokenizer

CONTEXT = 131_072
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""So small that the KV of a longest request takes some megabytes."""


def scripted_folder(folder: Path, lines: Sequence[Mapping[str, object]]) -> Path:
    """Write a scripted model with the default model's tokenizer and a context of `CONTEXT` tokens into a folder."""
    known = Tokenizer(resolve_model(DEFAULT_MODEL))
    (folder / "tokenizer.json").write_text(known.to_json())
    end = known.names([known.eos_token_ids[0]])[0]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": known.chat_template, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {**CONFIG, "vocab_size": known.vocab_size, "eos_token_id": known.eos_token_ids[0]}
    (folder / "config.json").write_text(json.dumps(config))
    write_script(folder, lines)
    return folder


def write_script(folder: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Write the script of a scripted model."""
    (folder / SCRIPT).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    scripted_folder(Path(sys.argv[1]), [json.loads(line) for line in sys.stdin])
