"""GGUF files: their description and their tensors in Hugging Face's terms.

A GGUF file names tensors and settings as llama.cpp does, stores the weights quantised, and for Llama and its next of
kin has the rows of the q and k projections interleaved for llama.cpp's way of rotating. `GgufModel` undoes all three.
The tokenizer is left to transformers, which builds one from the file's metadata (`write_tokenizer`).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from raydix.engine.core.errors import StartupError
from raydix.engine.model import gguf_gpt_oss
from raydix.engine.model.config import STORED_BITS, unsupported
from raydix.engine.model.families import FAMILIES
from raydix.engine.model.families.mistral import MIXTRAL
from raydix.engine.model.families.olmo import OLMO3
from raydix.engine.model.gguf_settings import ArrayOf, read_settings

if TYPE_CHECKING:
    import torch  # nobody waits for it who only reads a description

_LOG = logging.getLogger(__name__)

# By the first family of a name: others of the same name are told apart by the file's settings (`_recognize`).
_FAMILIES = {family.gguf_name: family for family in reversed(FAMILIES.values()) if family.gguf_name is not None}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_LAYER_TENSORS = {
    **_LAYER_TENSORS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The experts' tensors are one of all, and become one for each expert, whose number takes the place of the braces.
_EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_TENSORS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT_TENSORS = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Tensors of a layer by the file's architecture, where they are others than most models'.
_TENSORS_BY_KIND = {
    "gemma2": _SANDWICH_LAYER_TENSORS,
    "gemma3": _SANDWICH_LAYER_TENSORS,
    "olmo2": {
        **_LAYER_TENSORS,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {**_LAYER_TENSORS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen2moe": _LAYER_TENSORS | _EXPERT_TENSORS | _SHARED_EXPERT_TENSORS,
    "qwen3moe": _LAYER_TENSORS | _EXPERT_TENSORS,
    "olmoe": _LAYER_TENSORS | _EXPERT_TENSORS,
    "mixtral": _LAYER_TENSORS | _MIXTRAL_TENSORS,
    "gpt-oss": {
        **_LAYER_TENSORS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# Architectures whose queries and keys have the rows of each head interleaved.
_INTERLEAVED = frozenset(("llama", "smollm3", "granite"))
# Bits of a weight by its block's kind, scales included. Numbers of three bits take four, of five and six bits eight.
MEMORY_BITS = {
    "Q4_0": 4.75,
    "Q4_1": 5.5,
    "Q5_0": 8.75,
    "Q5_1": 9.5,
    "Q8_0": 8.75,
    "Q4_K": 4.63,
    "Q5_K": 8.63,
    "Q6_K": 8.57,
    "Q3_K": 4.57,
    "IQ4_NL": 4.75,
    "IQ4_XS": 4.32,
    "MXFP4": 4.25,
}
# About the same by a file's `general.file_type`: a few of its matrices are of another kind than most.
FILE_BITS = {2: 4.9, 3: 5.6, 7: 8.8, 8: 8.8, 9: 9.5, 11: 4.9, 12: 5.2, 13: 5.6, 14: 5.3, 15: 6.3, 16: 8.7, 17: 8.7}
FILE_BITS |= {18: 8.7, 25: 5.2, 30: 4.9, 38: 4.6}
_MXFP4_FILE = 38  # `general.file_type` of experts in MXFP4
_ROPE_FACTORS = "rope_freqs.weight"
# Factors of LongRoPE: of texts up to the length of training, and of longer ones.
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_NO_WEIGHTS = (_ROPE_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
_SINGLE_DIGIT_VOCABULARIES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
# Architectures of which only files with a known way of splitting text are read: the others' files all have one.
_CHECKED_VOCABULARIES = frozenset(("smollm3", "granite", "olmo2", "olmoe", "phi3", "qwen2moe", "gpt-oss"))
# Vocabularies that split words as GPT-2 does.
_GPT2_VOCABULARIES = ("default", "gpt-2", "olmo", "mpt", "phi-2", "jais", "trillion")
_SHARD_BYTES = 2 << 30


class GgufModel:
    """One open GGUF file.

    Raises `StartupError` on opening if the file is unreadable, incomplete or not of a supported architecture.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path

        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ValueError("it does not begin with the GGUF magic")
            self._reader = GGUFReader(path)
        except Exception as error:  # of any kind: the reader does not check for damaged files
            raise StartupError(f"cannot read {path} as GGUF, download it again: {error}") from error

        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._recognize()
        if "token_embd.weight" not in self._tensors:
            raise StartupError(f"{path} holds no model weights (it has no token_embd.weight)")

    def config(self) -> dict[str, Any]:
        """The file's settings as a Hugging Face `config.json`."""
        heads = int(self._setting("attention.head_count"))
        hidden_size = int(self._setting("embedding_length"))
        head_dim = int(self._setting("attention.key_length", hidden_size // heads))
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": int(self._setting("feed_forward_length")),
            "num_hidden_layers": int(self._setting("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._setting("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": int(self._setting("context_length")),
            "rms_norm_eps": float(self._setting("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_parameters": self._rope(head_dim),
            "torch_dtype": "bfloat16",
        }
        if (bits := self._stored_bits()) is not None:
            config[STORED_BITS] = bits
        for key in ("bos_token_id", "eos_token_id"):
            if (token_id := self._field(f"tokenizer.ggml.{key}")) is not None:
                config[key] = int(token_id)

        if self.kind in ("llama", "smollm3", "granite"):
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        if self.kind.startswith("gemma"):
            config |= self._gemma(config)
        if self.kind == "granite":
            config |= {
                "embedding_multiplier": float(self._setting("embedding_scale", 1.0)),
                "attention_multiplier": float(self._setting("attention.scale", head_dim**-0.5)),
                "residual_multiplier": float(self._setting("residual_scale", 1.0)),
                "logits_scaling": float(self._setting("logit_scale", 1.0)),
            }
        if self.kind in ("phi3", "olmo2"):
            # Zero: none.
            config["sliding_window"] = int(self._setting("attention.sliding_window", 0)) or None
        if self.kind == "phi3":
            original = self._setting("rope.scaling.original_context_length", config["max_position_embeddings"])
            config["original_max_position_embeddings"] = int(original)
        if self._num_experts():
            config |= self._experts()
        if self.kind == "gpt-oss":
            rope, is_packed = config["rope_parameters"], self._has_packed_experts()
            config |= gguf_gpt_oss.settings(self._setting, rope, is_packed=is_packed)

        return config

    def _num_experts(self) -> int:
        return int(self._field(f"{self.kind}.expert_count") or 0)

    def _experts(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "num_experts": self._num_experts(),
            "num_experts_per_tok": int(self._setting("expert_used_count")),
            # As every published model of the architecture; the file does not say.
            "norm_topk_prob": self.kind not in ("qwen2moe", "olmoe"),
        }
        if size := self._setting("expert_feed_forward_length", 0):
            found["moe_intermediate_size"] = int(size)
        if size := self._setting("expert_shared_feed_forward_length", 0):
            found["shared_expert_intermediate_size"] = int(size)
        return found

    def generation_config(self) -> dict[str, Any]:
        """The ids that end a generation: the end of the text and, where the file has one, the end of a turn."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = (self._field(f"tokenizer.ggml.{key}") for key in keys)
        return {"eos_token_id": sorted({int(token_id) for token_id in found if token_id is not None})}

    def hf_names(self) -> dict[str, str]:
        """Map the name of each tensor in the file to Hugging Face's name; with braces, in whose place the number of an
        expert goes, where the tensor is one of all experts."""
        names = [name for name in self._tensors if name not in _NO_WEIGHTS]
        # Two of gpt-oss' tensors become one, or one becomes two.
        joined = self.kind == "gpt-oss"
        return {name: name if joined and gguf_gpt_oss.is_of_experts(name) else self._hf_name(name) for name in names}

    def num_bytes(self, name: str, *, keeps: bool) -> int:
        """Size of the named tensor of the file once it is converted."""
        source = self._tensors[name]
        return int(source.n_bytes if keeps and self._kind(name) else 2 * source.n_elements)

    def tensor(self, name: str) -> "torch.Tensor":
        """Return the named tensor of the file, dequantised and in Hugging Face's layout.

        Matrices are bfloat16. Vectors (norms and biases) stay float32: they are small, and Gemma's norm weights have
        had one added to them, which bfloat16 could not take back exactly.
        """
        import torch
        from gguf.quants import dequantize

        source = self._tensors[name]

        try:
            values = np.asarray(dequantize(source.data, source.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise StartupError(
                f"{self.path} stores {name} as {source.tensor_type.name}, which cannot be read"
            ) from error

        values = self._in_order(name, values)
        # llama.cpp adds the one that Gemma's layers add themselves.
        if self.kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values - np.float32(1.0)

        tensor = torch.tensor(values)  # a copy: what was float32 in the file is a view of it
        return tensor.to(torch.bfloat16) if tensor.dim() > 1 else tensor

    def blocks(self, name: str) -> "torch.Tensor":
        """Return the named matrix of the file as it is, in Hugging Face's order of rows: uint8 [..., bytes of a
        row]."""
        import torch

        return torch.from_numpy(self._in_order(name, np.array(self._tensors[name].data)))

    def hf_tensors(self, name: str, *, keeps: bool = False) -> dict[str, "torch.Tensor"]:
        """Return what the named tensor of the file holds, by Hugging Face's names, as `tensor` does; or, if `keeps`, in
        its blocks where it has any (`raydix.engine.model.gguf_blocks`)."""
        if self.kind == "gpt-oss" and gguf_gpt_oss.is_of_experts(name):
            return self._published_experts(name)
        hf_name, kind = self._hf_name(name), self._kind(name) if keeps else None
        tensor = self.tensor(name) if kind is None else self.blocks(name)
        hf_name = hf_name if kind is None else f"{hf_name}.{kind}"
        # The experts of a layer are one tensor in the file, and one each here.
        if "{}" not in hf_name:
            return {hf_name: tensor}
        return {hf_name.format(expert): weight.clone() for expert, weight in enumerate(tensor)}

    def _published_experts(self, name: str) -> dict[str, "torch.Tensor"]:
        """Return a tensor of all of gpt-oss' experts in the published layout, in MXFP4 if the file has them so."""
        import torch

        is_packed = self._has_packed_experts()

        def blocks(name: str) -> np.ndarray[Any, Any] | None:
            if (self._tensors[name].tensor_type.name == "MXFP4") != is_packed:
                raise StartupError(f"{self.path} has experts of several kinds, which is not supported: {name}")
            return np.array(self._tensors[name].data) if is_packed else None

        found = gguf_gpt_oss.published(name, blocks, lambda name: self.tensor(name).float().numpy())
        made = {hf_name: torch.from_numpy(np.ascontiguousarray(values)) for hf_name, values in found.items()}
        return {hf_name: each if each.dtype is torch.uint8 else each.bfloat16() for hf_name, each in made.items()}

    def _has_packed_experts(self) -> bool:
        """True if the experts are in MXFP4."""
        return bool(self._tensors["blk.0.ffn_down_exps.weight"].tensor_type.name == "MXFP4")

    def _in_order(self, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a tensor in Hugging Face's order, which is another one for Llama's queries and keys."""
        if self.kind in _INTERLEAVED and name.split(".")[2:3] in (["attn_q"], ["attn_k"]):
            heads = "attention.head_count" if ".attn_q." in name else "attention.head_count_kv"
            return _unpermute(values, int(self._setting(heads)))
        # The one row of this gate is a vector in the file.
        return values.reshape(1, -1) if ".ffn_gate_inp_shexp." in name else values

    def _kind(self, name: str) -> str | None:
        """The kind of the blocks in which a matrix of the file can be kept; None: it has to be widened."""
        source = self._tensors[name]
        kind = str(source.tensor_type.name)
        return kind if kind in MEMORY_BITS and len(source.shape) > 1 else None

    def _stored_bits(self) -> float | None:
        """Mean bits of a weight in memory if matrices are kept in their blocks; None: none can be."""
        matrices = [(name, int(tensor.n_elements)) for name, tensor in self._tensors.items() if len(tensor.shape) > 1]
        kinds = [self._kind(name) for name, _ in matrices]
        if not any(kinds):
            return None
        # Matrices of other kinds are widened to bfloat16.
        bits = [16.0 if kind is None else MEMORY_BITS[kind] for kind in kinds]
        total = sum(size * of_each for (_, size), of_each in zip(matrices, bits, strict=True))
        return round(total / sum(size for _, size in matrices), 2)

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TENSORS:
            return f"{_TENSORS[stem]}.{suffix}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        parts = _TENSORS_BY_KIND.get("mixtral" if self._is_mixtral else self.kind, _LAYER_TENSORS)
        if block != "blk" or part not in parts:
            raise StartupError(f"{self.path} has a tensor that no supported model has: {name}")
        if part == "attn_sinks":
            return f"model.layers.{layer}.{parts[part]}"
        return f"model.layers.{layer}.{parts[part]}.{suffix}"

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = float(self._setting("rope.freq_base", 10_000.0))
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        kind = self._setting("rope.scaling.type", "none")
        if _ROPE_FACTORS in self._tensors:
            factors = np.asarray(self._tensors[_ROPE_FACTORS].data, dtype=np.float32)
            rope |= _llama3_scaling(factors, theta, head_dim, self.path)
        elif _LONG_FACTORS in self._tensors:
            rope["rope_type"] = "longrope"
            for key, name in (("short_factor", _SHORT_FACTORS), ("long_factor", _LONG_FACTORS)):
                rope[key] = np.asarray(self._tensors[name].data, dtype=np.float32).tolist()
        elif kind != "none":
            rope |= {"rope_type": kind, "factor": float(self._setting("rope.scaling.factor"))}
            if original := self._setting("rope.scaling.original_context_length", 0):
                rope["original_max_position_embeddings"] = int(original)
            if self.kind == "olmo2" and (factor := self._setting("rope.scaling.attn_factor", 0.0)):
                rope["attention_factor"] = float(factor)
        if self.kind == "phi3" and (rotated := int(self._setting("rope.dimension_count", head_dim))) != head_dim:
            rope["partial_rotary_factor"] = rotated / head_dim
        if self.kind != "gemma3":
            return rope
        local = float(self._setting("rope.freq_base_swa", 10_000.0))
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}

    def _gemma(self, config: Mapping[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
        if self.kind == "gemma":
            return extra

        # The file does not say by what the scores are divided: it is the head dimension, but for the 27B models,
        # which are told by their depth (46 layers in Gemma 2, 62 in Gemma 3).
        is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[self.kind]
        per_head = config["hidden_size"] // config["num_attention_heads"]
        extra["query_pre_attn_scalar"] = per_head if is_27b else config["head_dim"]
        extra["sliding_window"] = int(self._setting("attention.sliding_window"))

        if self.kind == "gemma2":
            extra["attn_logit_softcapping"] = float(self._setting("attn_logit_softcapping", 50.0))
            extra["final_logit_softcapping"] = float(self._setting("final_logit_softcapping", 30.0))
        else:
            # Of six layers the last one has no window, in every published Gemma 3; the file does not say.
            pattern = range(1, int(config["num_hidden_layers"]) + 1)
            extra["layer_types"] = ["full_attention" if layer % 6 == 0 else "sliding_attention" for layer in pattern]

        return extra

    def _recognize(self) -> None:
        """Find the model's family, and refuse what is not supported."""
        kind = self._field("general.architecture")
        if kind not in _FAMILIES:
            raise unsupported(f"the GGUF architecture {kind!r} of {self.path.name}", _FAMILIES)
        family, has_experts = _FAMILIES[kind], (self._field(f"{kind}.expert_count") or 0) > 0
        self._is_mixtral = kind == "llama" and has_experts
        if has_experts and not (family.has_experts or self._is_mixtral):
            raise StartupError(f"{self.path.name} is a {kind} with experts, which raydix reads from safetensors only")
        if (self._field("split.count") or 1) > 1:
            raise StartupError(f"{self.path} is one part of a split GGUF: merge it first with llama-gguf-split --merge")
        self.kind = str(kind)
        self.model_type = _MODEL_TYPES.get(self.kind, self.kind)
        # Two architectures have each the files of two families.
        if self._is_mixtral:
            family, self.model_type = MIXTRAL, "mixtral"
        elif kind == "olmo2" and self._field("olmo2.attention.sliding_window"):
            family, self.model_type = OLMO3, "olmo3"
        self.architecture = family.architecture

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _setting_of_tokenizer(self, key: str, default: str) -> Any:
        value = self._field(f"tokenizer.ggml.{key}")
        return default if value is None else value

    def _setting(self, key: str, default: Any = None) -> Any:
        value = self._field(f"{self.kind}.{key}")
        if value is None:
            value = default
        if value is None:
            raise StartupError(f"{self.path} lacks the setting {self.kind}.{key}")
        if isinstance(value, list):
            # A value for each layer is fine where all are equal; layers that differ are in no configuration here.
            if len(set(value)) != 1:
                raise StartupError(f"{self.path} sets {self.kind}.{key} for each layer, which is not supported")
            value = value[0]
        return value


class GgufBeginning(GgufModel):
    """The first bytes of a GGUF file, for its description alone. The table of embeddings is taken to have a row for
    each token and to be the head, too, as the names of tensors come behind the tokenizer.

    Raises `StartupError` on opening if the bytes are not GGUF, or of an architecture that is not supported.
    """

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        try:
            self._fields = read_settings(data)
        except ValueError as error:
            raise StartupError(f"cannot read {path} as GGUF: {error}") from error
        self._recognize()
        tokens = self._fields.get("tokenizer.ggml.tokens")
        num_tokens = tokens.length if isinstance(tokens, ArrayOf) else self._setting("vocab_size")
        shape = (int(self._setting("embedding_length")), int(num_tokens))
        self._tensors = {"token_embd.weight": SimpleNamespace(shape=shape)}

    def _stored_bits(self) -> float | None:
        """As the file says of its matrices in general: the kind of each one comes behind the tokenizer."""
        return FILE_BITS.get(self._field("general.file_type"))

    def _has_packed_experts(self) -> bool:
        return bool(self._field("general.file_type") == _MXFP4_FILE)

    def _field(self, key: str) -> Any:
        return self._fields.get(key)


def write_model_folder(path: Path, folder: Path, progress: Callable[[str], None], *, keeps: bool = False) -> None:
    """Write the GGUF file at `path` as a Hugging Face model folder: config, weights, tokenizer.

    `keeps`: matrices of few bits are kept as they are, under names of their own.
    Not atomic; the caller gives an empty folder and moves it into place. Raises `StartupError` as `GgufModel` does.
    """
    model = GgufModel(path)
    _write_json(folder / "config.json", model.config())
    _write_json(folder / "generation_config.json", model.generation_config())
    _write_weights(model, folder, progress, keeps=keeps)
    progress("building the tokenizer")
    write_tokenizer(
        path, folder, architecture=model.kind, pre_tokenizer=str(model._setting_of_tokenizer("pre", "default"))
    )


def write_tokenizer(path: Path, folder: Path, *, architecture: str, pre_tokenizer: str) -> None:
    """Write the tokenizer and chat template that a GGUF file of an `architecture` describes. `pre_tokenizer` names the
    way in which its text is split."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    from raydix.engine.model.tokenizer import quiet_transformers

    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_SINGLE_DIGIT_VOCABULARIES, *_GPT2_VOCABULARIES}
    if architecture in _CHECKED_VOCABULARIES and pre_tokenizer not in known:
        raise StartupError(f"{path} splits text in the way {pre_tokenizer!r}, which is not supported")
    with quiet_transformers():
        try:
            # Of architectures that it does not know transformers builds the tokenizer all the same, as any other one.
            is_known = architecture in GGUF_SUPPORTED_ARCHITECTURES or _MODEL_TYPES.get(architecture) is not None
            kind = AutoTokenizer if is_known else PreTrainedTokenizerFast
            tokenizer = kind.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:  # transformers' many ways of not knowing a tokenizer
            raise StartupError(f"cannot build a tokenizer from {path}: {error}") from error
        if pre_tokenizer in _SINGLE_DIGIT_VOCABULARIES:
            # These vocabularies were trained with every digit on its own, which transformers does not restore.
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        tokenizer.save_pretrained(folder)


def _write_weights(model: GgufModel, folder: Path, progress: Callable[[str], None], *, keeps: bool = False) -> None:
    """Write one safetensors file, or several of about `_SHARD_BYTES` with an index, so that memory holds one at a
    time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = [[]]
    filled_bytes = 0

    for name in model.hf_names():
        num_bytes = model.num_bytes(name, keeps=keeps)
        # A tensor that is larger than a shard gets one of its own.
        if shards[-1] and filled_bytes + num_bytes > _SHARD_BYTES:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += num_bytes

    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        progress(f"{'copying' if keeps else 'dequantising'} weights, part {index} of {len(shards)}")
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in shard:
            tensors |= model.hf_tensors(name, keeps=keeps)
        save_file(tensors, folder / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)

    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's interleaving of the two halves of each head's rows (or of a bias's entries)."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _llama3_scaling(factors: np.ndarray[Any, Any], theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """Return the Llama 3 rope settings that give these per-frequency factors; the file holds only the factors.

    Published models use a low and a high frequency factor of 1 and 4 and trained on 8,192 positions.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise StartupError(f"{path} stretches its rotary embedding by factors of its own, which is not supported")

    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
