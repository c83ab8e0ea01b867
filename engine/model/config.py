"""Description of a decoder: what its configuration says, in the terms of the one decoder that runs every family.

`engine/model/families` reads it from a Hugging Face `config.json`. This module knows nothing of tensors.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from raydix.engine.core.errors import StartupError
from raydix.engine.model.packed_weights import Float8, Packing
from raydix.kernels.routing import Routing

STORED_BITS = "stored_bits"  # key of `ModelConfig.stored_bits` in the `config.json` of a converted file

JsonObject: TypeAlias = Mapping[str, Any]
Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu", "relu2"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, and its stretching beyond the context of training."""

    theta: float
    scaling: JsonObject | None = None
    """Hugging Face's rope dictionary with its `rope_type` (linear, llama3, yarn or longrope); None: not stretched."""
    share: float = 1.0
    """Share of each head's dimensions that is rotated, the first ones; the others pass unchanged."""
    interleaved: bool = False
    """Dimensions 2i and 2i + 1 turn together; otherwise i and i + half of what is rotated."""

    def is_long(self, max_position: int) -> bool:
        """True if the served length decides for another rotation at every position, LongRoPE's long one."""
        scaling = self.scaling or {}
        return scaling.get("rope_type") == "longrope" and max_position > scaling["original_max_position_embeddings"]


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a layer's norms in its weights; None: the layer has no such norm."""

    attention: str | None = "input_layernorm"
    attention_post: str | None = None
    """Norm of the sum that attention adds to the residual stream."""
    mlp: str | None = "post_attention_layernorm"
    mlp_post: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """MLPs of which each token takes a few, and the names of their weights below a layer."""

    num_experts: int
    intermediate_size: int
    """Size of one expert's intermediate state."""
    routing: Routing
    layers: tuple[int, ...]
    """Indices of the layers that have experts; the others have one MLP, of the model's `intermediate_size`."""
    shared_size: int = 0
    """Size of the intermediate state of one more expert, which every token goes through, or of several such side by
    side; 0: there is none."""
    shared: str = "mlp.shared_expert"
    shared_gate: str | None = None
    """Name of the projection whose sigmoid is the share of the experts for every token; None: it is one."""
    router: str = "mlp.gate"
    float_router: bool = False
    """The router's weights are kept, and its logits made, in float32; otherwise both are in the model's dtype."""
    correction: str | None = None
    """Name of a tensor with a number for each expert, which is added to the scores by which experts are chosen; None:
    nothing is added."""
    correction_is_row: bool = False
    """That tensor is stored as [1, num_experts]."""
    beside_mlp: bool = False
    """The layer has its MLP, too. Experts and router read the residual stream, each behind a norm of its own, and what
    they and the MLP make of it is normed before it is added up; shares have a factor for each expert (Gemma 4)."""
    gate: str | None = "mlp.experts.{}.gate_proj"
    """Name of each expert's gate projection, with the expert's number in place of the braces; None: `up` holds the gate
    projection, too, unless MLPs have no gate."""
    up: str = "mlp.experts.{}.up_proj"
    """Without braces all experts are one tensor, [num_experts, rows, columns]."""
    down: str = "mlp.experts.{}.down_proj"
    has_bias: bool = False
    """The router and each projection have one."""
    stored: Literal["plain", "transposed", "mxfp4"] = "plain"
    """Layout of the experts' weights, gpt-oss's unless plain: all experts are one tensor, the rows of gate and up
    alternate, and weights are [num_experts, columns, rows], or in MXFP4 blocks of 32 columns with one scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Heads of a gated delta rule (arXiv 2412.06464)."""

    num_key_heads: int
    """Heads of queries and keys; each serves `num_value_heads / num_key_heads` neighbouring heads of values."""
    num_value_heads: int
    key_dim: int
    """Dimensions of one query or key."""
    value_dim: int
    """Dimensions of one value."""
    is_fused: bool = False
    """The weights store the input projections as two, the rows of each key head together (Qwen 3 Next)."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a layer's memory, heads first."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of all heads, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers that the layer's output projection takes."""
        return self.num_value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Rows of the layer's input projection: what is convolved, gates, and shares and steps of heads."""
        return self.channels + self.values + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Heads of Mamba-2's selective scan (arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of neighbouring heads, each with one input and output matrix (B and C), and a norm of its own."""
    state_size: int
    """Numbers that are kept for each dimension of a head."""
    step_limits: tuple[float, float] = (0.0, math.inf)
    """Least and greatest length of a step."""
    conv_bias: bool = True
    projection_bias: bool = False
    """The input and output projections have a bias."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a layer's memory, heads first."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def channels(self) -> int:
        """Values of all heads, and B and C of all groups, which are convolved."""
        return self.values + 2 * self.num_groups * self.state_size

    @property
    def values(self) -> int:
        """Numbers that the layer's output projection takes."""
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> int:
        """Rows of the layer's input projection: gates, what is convolved, and steps of heads."""
        return self.values + self.channels + self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """Layers that keep a state of one size in the place of keys and values for each position: a short convolution, and
    in most families a memory of each head behind it."""

    layers: tuple[int, ...]
    """Indices of the recurrent layers."""
    kernel_size: int
    """Positions that the convolution spans, its own included."""
    channels: int
    """Channels of the convolution."""
    memory: DeltaConfig | MambaConfig | None = None
    """None: the convolution stands between two gates, which the layer's input projection gives, too (LFM2)."""

    @property
    def memory_size(self) -> int:
        """Numbers of one layer's memory."""
        return 0 if self.memory is None else math.prod(self.memory.shape)

    @property
    def tail_size(self) -> int:
        """Numbers of one layer's state of the convolution: its last inputs, [kernel_size - 1, channels]."""
        return (self.kernel_size - 1) * self.channels

    @property
    def projected(self) -> int:
        """Rows of the layer's input projection; without a memory three times the channels."""
        return 3 * self.channels if self.memory is None else self.memory.projected

    @property
    def mixed(self) -> int:
        """Numbers that the layer's output projection takes."""
        return self.channels if self.memory is None else self.memory.values


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Attention through a latent (MLA, arXiv 2405.04434): keys and values of all heads are made of one vector."""

    rank: int
    """Numbers of the latent."""
    rope_dim: int
    """Dimensions of the one key that is rotated, for all heads, and of the part of each query for it."""
    nope_dim: int
    """Dimensions of a head's query and key that are not rotated."""
    value_dim: int
    """Dimensions of a head's value."""
    query_rank: int | None
    """Numbers that the queries of all heads are made of; None: these are made of the layer's input."""
    norm_eps: float = 1e-6
    """Of the norms of these two vectors."""

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Numbers that are kept of a position."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The keys and values of one layer."""

    num: int
    """Heads of keys, and of values."""
    dim: int
    """Dimensions of a head, queries' too."""
    has_values: bool = True
    """Values are kept beside keys; otherwise keys are values, too (a latent)."""

    @property
    def rows(self) -> int:
        """Rows of `dim` numbers that are kept of a position."""
        return (1 + self.has_values) * self.num


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-like decoder: attention over grouped heads or a recurrence, and an MLP, with norms before or after."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Context length in tokens."""
    rms_norm_eps: float
    """Of layer norms, too."""
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    """Per layer: how many positions a token attends to, itself included; None: all before it."""
    attention_scale: float
    activation: Activation = "silu"
    """The MLP's, of its gate if it has one."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """The q, k and v projections have a bias."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys pass an RMS norm before rotation, each head by itself."""
    qk_norm_spans_heads: bool = False
    """The norm of `qk_norm` is over all heads together (OLMo 2)."""
    qk_norm_by_head: bool = False
    """The norm of `qk_norm` is a layer norm, and each head has weights of its own (Command R+)."""
    query_scaling: tuple[float, int] | None = None
    """(b, n): queries are multiplied by 1 + b log(1 + floor(position / n)) (Ministral 3)."""
    norms: LayerNorms = LayerNorms()
    layer_norm: bool = False
    """The norms of rows are layer norms: the mean is subtracted first."""
    norm_bias: bool = False
    """Each of these norms has a bias."""
    is_parallel: bool = False
    """Attention and MLP stand side by side: both read the residual stream as it is before the layer. Without a norm of
    its own the MLP reads what attention reads."""
    gated_mlp: bool = True
    """The MLP has a gate; otherwise it is two projections, `up_proj` and `down_proj`, with the activation between."""
    head_bias: bool = False
    """The projection that gives logits has a bias."""
    fused_qkv: bool = False
    """The weights store the q, k and v projections as one, `qkv_proj`."""
    qkv_by_head: bool = False
    """The rows of this one projection are each head's query, key and value together (GPT-NeoX)."""
    fused_gate_up: bool = False
    """The weights store the gate and up projections as one, `gate_up_proj`."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores w and multiplies by 1 + w)."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the sums that attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    local_rope: RopeConfig | None = None
    """The rotary embedding of the layers with a window, where it is another one (Gemma 3)."""
    layers_without_rope: tuple[int, ...] = ()
    """Indices of the layers whose queries and keys are not rotated at all (SmolLM 3)."""
    attention_sinks: bool = False
    """Each head has a score of one more key, which every query sees and whose value is zero (gpt-oss)."""
    attention_gate: bool = False
    """The q projection gives each head a gate, too, behind its query: what attention gives is multiplied by the gate's
    sigmoid (Qwen 3.5)."""
    unlimited_heads: KVHeads | None = None
    """Heads of the layers without a window; None: they are those of every layer (Gemma 4 has others)."""
    keys_as_values: bool = False
    """In layers without a window the k projection gives the values, too: they are the keys before norm and rotation."""
    value_norm: bool = False
    """Each head's values pass an RMS norm without weights."""
    num_shared_kv_layers: int = 0
    """The last layers, so many, have no keys and values: each attends to those of the last layer before them that is of
    its kind, with or without a window."""
    shared_kv_scale: int = 1
    """The MLPs of the layers that share keys and values are so many times as wide as `intermediate_size`."""
    layer_input_size: int = 0
    """Numbers of the embedding that each layer has of a token beside the first one, and adds behind its MLP; 0: there
    are none."""
    layer_scalars: bool = False
    """Each layer multiplies the residual stream by a stored number at its end."""
    latent: LatentConfig | None = None
    """None: keys and values are of heads."""
    experts: ExpertsConfig | None = None
    stored_bits: float | None = None
    """Of a weight, in memory and on average, if matrices are kept as a file of few bits has them; None: the model comes
    from no such file."""
    packing: Packing | Float8 | None = None
    """How the weights of the layers are packed, which are in few bits; None: they are not."""
    recurrent: RecurrentConfig | None = None
    layers_of_mlp: tuple[int, ...] = ()
    """Indices of the layers that are an MLP alone, without attention or a recurrence (Nemotron-H)."""
    layers_without_mlp: tuple[int, ...] = ()
    """Indices of the layers that are attention or a recurrence alone."""
    draft_layers: int = 0
    """Layers behind the last one that the weights may have, only for drafting; they are passed over."""
    own_names: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names, whole between dots, that differ from the usual ones: the usual part and the family's."""

    def stored_name(self, name: str) -> str:
        """The name in the weights of a tensor with this usual name."""
        for usual, own in self.own_names:
            name = f".{name}.".replace(f".{usual}.", f".{own}.")[1:-1]
        return name

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values."""
        others = {*self.layers_of_mlp, *(() if self.recurrent is None else self.recurrent.layers)}
        return tuple(index for index in range(self.num_layers - self.num_shared_kv_layers) if index not in others)

    def input_norm(self, index: int) -> str | None:
        """Name of the norm of what a layer reads; None: it has none."""
        return self.norms.mlp if index in self.layers_of_mlp else self.norms.attention

    @property
    def is_uniform(self) -> bool:
        """True if the projections of all layers with attention have the same shapes."""
        return self.unlimited_heads is None and not self.keys_as_values and self.num_shared_kv_layers == 0

    def shares_kv(self, index: int) -> bool:
        """True for a layer that attends to another one's keys and values."""
        return index >= self.num_layers - self.num_shared_kv_layers

    def kv_layer(self, index: int) -> int:
        """The layer whose keys and values a layer with attention attends to: itself, or the one that it shares with."""
        if not self.shares_kv(index):
            return index
        is_windowed = self.layer_windows[index] is not None
        return max(own for own in self.attention_layers if (self.layer_windows[own] is not None) == is_windowed)

    def kv_heads(self, index: int) -> KVHeads:
        """The heads of a layer with attention."""
        if self.unlimited_heads is not None and self.layer_windows[index] is None:
            return self.unlimited_heads
        if self.latent is not None:
            return KVHeads(1, self.latent.row_dim, has_values=False)
        return KVHeads(self.num_kv_heads, self.head_dim)

    def rotated_dim(self, index: int) -> int:
        """Dimensions of the heads that a layer's rotary table is for."""
        return self.kv_heads(index).dim if self.latent is None else self.latent.rope_dim

    def has_values(self, index: int) -> bool:
        """True for a layer with a projection of values beside that of keys."""
        return not (self.keys_as_values and self.layer_windows[index] is None)

    def mlp_size(self, index: int) -> int:
        """Size of the intermediate state of a layer's MLP."""
        return self.intermediate_size * (self.shared_kv_scale if self.shares_kv(index) else 1)

    @property
    def cpu_only(self) -> str | None:
        """What the model has that runs on CPUs only; None: it runs on GPUs, too."""
        # A step on a GPU is a graph of fixed operations; experts are one product for each that has rows.
        parts = {
            "experts": self.experts is not None,
            "recurrent layers": self.recurrent is not None,
            "latents in the place of KV": self.latent is not None,
            "layers of different shapes": not self.is_uniform,
            "layer norms": self.layer_norm,
        }
        return next((name for name, has in parts.items() if has), None)

    def check_takes_adapters(self) -> None:
        """Raise `StartupError` if no adapter can be computed with the model."""
        if self.recurrent is not None:
            raise StartupError(f"{self.architecture} has recurrent layers, which take no adapters")
        if self.latent is not None:
            raise StartupError(f"{self.architecture} has attention through latents, which takes no adapters")
        if not self.is_uniform:
            raise StartupError(f"{self.architecture} has layers of different shapes, which take no adapters")
        if not self.gated_mlp:
            raise StartupError(f"{self.architecture} has MLPs without gates, which take no adapters")

    def experts_of_layer(self, index: int) -> ExpertsConfig | None:
        """The experts of a layer; None: it has one MLP."""
        return self.experts if self.experts is not None and index in self.experts.layers else None

    @property
    def rope_of_layer(self) -> tuple[RopeConfig | None, ...]:
        """Each layer's rotary embedding; None: it has none."""
        local = self.local_rope or self.rope
        ropes = [self.rope if window is None else local for window in self.layer_windows]
        return tuple(None if index in self.layers_without_rope else rope for index, rope in enumerate(ropes))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; raises `StartupError` if it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StartupError(f"{path.parent} is not a model folder: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"cannot read {path}: it is not a JSON object")
    return value


def unsupported(what: str, supported: Iterable[str]) -> StartupError:
    """Refusal of a model that the decoder does not cover."""
    return StartupError(f"{what} is not supported; raydix runs: {', '.join(supported)}")
