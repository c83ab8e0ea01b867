"""Loads a decoder's layers: named tensors converted, put together, and packed for the kernels, one layer at a time."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from raydix.engine.core.settings import Quantization
from raydix.engine.model.config import (
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from raydix.engine.model.packed_weights import mxfp4
from raydix.engine.model.sizes import (
    BLOCKS,
    EXPERT_FACTORS,
    LATENT_MAPS,
    LAYER_EMBEDDING,
    NORMS_BESIDE,
    ROUTER_SCALE,
    SCALES,
)
from raydix.engine.model.weights import TensorSource
from raydix.kernels.decoder_pass import (
    BesideExperts,
    DeltaWeights,
    DenseMLP,
    LatentWeights,
    LayerWeights,
    MambaWeights,
    Norm,
    OwnInput,
    RecurrentWeights,
    SharedExpert,
)
from raydix.kernels.experts import PackedExperts, pack_experts
from raydix.kernels.linear import (
    GroupedWeight,
    PackedLinear,
    in_one_form,
    keeps_groups,
    linear,
    pack_groups,
    pack_weight,
    stacked,
)
from raydix.kernels.linear_heads import pack_heads
from raydix.kernels.rms_norm import rms_norm
from raydix.kernels.rotary import rotary_order, rotary_tables


class LayerInputs:
    """Embeddings of the tokens for every layer: a table's, and the usual embedding projected."""

    def __init__(self, table: Tensor, projection: PackedLinear, norm: Tensor) -> None:
        self._table = table
        self._projection = projection
        self._norm = norm
        # In the model's dtype, as the published implementation rounds it.
        self._table_scale = torch.tensor(math.sqrt(len(norm)), dtype=table.dtype, device=table.device)

    def __call__(self, token_ids: Tensor, embedded_TE: Tensor, eps: float) -> Tensor:
        """[T, layers, size] for the tokens, which `embedded_TE` embeds as the first layer takes them."""
        size = len(self._norm)
        projected = linear(embedded_TE, self._projection) * embedded_TE.shape[1] ** -0.5
        normed = rms_norm(projected.view(-1, size), self._norm, eps)
        own = functional.embedding(token_ids, self._table) * self._table_scale
        return ((normed.view_as(own) + own) * 2**-0.5).view(len(token_ids), -1, size)


class LayerLoader:
    """Turns named tensors into layers: converts, fuses q, k, v and gate, up, and packs, one layer at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
        quantization: Quantization | None,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._weights: TensorSource = _OwnNames(config, weights) if config.own_names else weights
        self._dtype = dtype
        self._device = device
        self._max_position = max_position
        self._int8 = quantization == "int8"
        self._keeps_groups = quantization == "stored"
        self._deterministic = deterministic
        self._tables: list[tuple[RopeConfig | None, Tensor]] = []

    def tensor(self, name: str) -> Tensor:
        """Load a tensor in the model's dtype, on its device."""
        return self._weights.tensor(name).to(device=self._device, dtype=self._dtype)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Load a product's weight in packed form."""
        return pack_weight(weight, bias, int8=self._int8, deterministic=self._deterministic)

    def head(self, embedding: Tensor, vocab_size: int) -> PackedLinear:
        """The product that gives logits, of the first tokens; its weight may be that of the embedding."""
        is_tied = self._config.tie_word_embeddings
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        if not self._config.head_bias and (kept := self._kept([name])) is not None:
            return pack_groups(kept.rows(slice(vocab_size)))
        bias = self.tensor("lm_head.bias")[:vocab_size] if self._config.head_bias else None
        return self.pack((embedding if is_tied else self.tensor(name))[:vocab_size], bias)

    def _kept(self, names: Sequence[str]) -> GroupedWeight | None:
        """Weights one below the other as their file stores them in few bits; None: they are widened."""
        if not self._keeps_groups:
            return None
        weights = [weight for name in names if (weight := self._weights.grouped(name)) is not None]
        if len(weights) < len(names) or not all(map(keeps_groups, weights)):
            return None
        alike = in_one_form(weights)
        return None if alike is None else stacked(alike)

    def norm(self, name: str) -> Tensor:
        """A norm's weight in float32, the family's offset added; a copy, so that no weight file stays in use."""
        weight = self._weights.tensor(f"{name}.weight").to(device=self._device, dtype=torch.float32)
        return weight + self._config.norm_offset

    def layer(self, index: int) -> LayerWeights:
        """Load the weights of one layer, with the norm that follows it."""
        config, prefix, norms = self._config, f"model.layers.{index}.", self._config.norms
        rope, head_dim = config.rope_of_layer[index], config.rotated_dim(index)
        is_last, stores = index == config.num_layers - 1, not config.shares_kv(index)
        recurrent, latent, qkv, output = None, None, None, None
        if config.recurrent is not None and index in config.recurrent.layers:
            recurrent, qkv, output = self._recurrent(prefix, config.recurrent)
        elif index not in config.layers_of_mlp:
            if config.latent is None:
                qkv = self._qkv(f"{prefix}self_attn.", index)
            else:
                latent, qkv = self._latent(f"{prefix}self_attn.", config.latent)
            output = self._packed([f"{prefix}self_attn.o_proj"], bias=config.attention_output_bias)
        has_head_norms = config.qk_norm and recurrent is None and qkv is not None
        mlp: DenseMLP | PackedExperts | None = None
        of = config.experts_of_layer(index)
        if of is not None and not of.beside_mlp:
            mlp = self._experts(prefix, of)
        elif index not in config.layers_without_mlp:
            mlp = self._mlp(f"{prefix}mlp", bias=config.mlp_bias)
        # A layer that is one part alone has that part's norms only.
        has_both = output is not None and mlp is not None
        return LayerWeights(
            qkv=qkv,
            output=output,
            mlp=mlp,
            mlp_norm=self.optional_norm(prefix, norms.mlp) if has_both else None,
            next_norm=(
                self._row_norm("model.norm")
                if is_last
                else self.optional_norm(f"model.layers.{index + 1}.", config.input_norm(index + 1))
            ),
            attention_post_norm=None if output is None else self.optional_norm(prefix, norms.attention_post),
            mlp_post_norm=None if mlp is None else self.optional_norm(prefix, norms.mlp_post),
            q_norm=self._head_norm(f"{prefix}self_attn.q_norm", head_dim, rope) if has_head_norms else None,
            k_norm=self._head_norm(f"{prefix}self_attn.k_norm", head_dim, rope) if has_head_norms and stores else None,
            cos_sin=self._cos_sin(head_dim, rope),
            window=config.layer_windows[index],
            sinks=self._weights.tensor(f"{prefix}self_attn.sinks").float() if config.attention_sinks else None,
            recurrent=recurrent,
            shared=None if of is None or not of.shared_size else self._shared(prefix, of),
            beside=self._beside(prefix, of) if of is not None and of.beside_mlp else None,
            v_norm=torch.ones(head_dim, device=self._device) if config.value_norm and stores else None,
            own_input=self._own_input(prefix) if config.layer_input_size else None,
            scalar=self.tensor(f"{prefix}layer_scalar").clone() if config.layer_scalars else None,
            latent=latent,
        )

    def layer_inputs(self) -> LayerInputs | None:
        """The embeddings of all layers; None: the model has none."""
        if not self._config.layer_input_size:
            return None
        return LayerInputs(
            self.tensor(LAYER_EMBEDDING).clone(),
            self._packed(["model.per_layer_model_projection"], bias=False),
            self.norm("model.per_layer_projection_norm"),
        )

    def _beside(self, prefix: str, of: ExpertsConfig) -> BesideExperts:
        scale = self._weights.tensor(f"{prefix}{ROUTER_SCALE}").to(self._device, torch.float32)
        input_norm, output_norm, mlp_norm = (self._row_norm(f"{prefix}{name}") for name in NORMS_BESIDE)
        # The router's input is normed without weights, and multiplied by one number for each dimension.
        router_norm = Norm(scale * self._config.hidden_size**-0.5)
        return BesideExperts(self._experts(prefix, of), router_norm, input_norm, output_norm, mlp_norm)

    def _own_input(self, prefix: str) -> OwnInput:
        gate, projection = (
            self._packed([f"{prefix}{name}"], bias=False) for name in ("per_layer_input_gate", "per_layer_projection")
        )
        return OwnInput(gate, projection, self._row_norm(f"{prefix}post_per_layer_input_norm"))

    def _recurrent(
        self, prefix: str, recurrent: RecurrentConfig
    ) -> tuple[RecurrentWeights, PackedLinear, PackedLinear]:
        """A recurrent layer's weights between its projections, and its input and output projections."""
        described = recurrent.memory
        if described is None:
            place, conv, names = f"{prefix}conv.", "conv", ["in_proj"]
        elif isinstance(described, MambaConfig):
            place, conv, names = f"{prefix}mamba.", "conv1d", ["in_proj"]
        else:
            place, conv = f"{prefix}linear_attn.", "conv1d"
            names = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        taps = self._floats(f"{place}{conv}.weight").view(recurrent.channels, recurrent.kernel_size)

        conv_bias, has_bias = None, False
        memory: DeltaWeights | MambaWeights | None = None
        if isinstance(described, MambaConfig):
            memory, has_bias = self._mamba(place), described.projection_bias
            conv_bias = self._floats(f"{place}{conv}.bias") if described.conv_bias else None
        elif described is not None:
            memory = self._delta(place)
        # One product of all that reads the input.
        if isinstance(described, DeltaConfig) and described.is_fused:
            inputs = self.pack(self._by_part(place, described))
        else:
            inputs = self._packed([f"{place}{name}" for name in names], bias=has_bias)
        weights = RecurrentWeights(taps.T.contiguous(), conv_bias, memory)
        return weights, inputs, self._packed([f"{place}out_proj"], bias=has_bias)

    def _floats(self, name: str) -> Tensor:
        """A tensor in float32; a copy, so that no weight file stays in use."""
        return self._weights.tensor(name).to(device=self._device, dtype=torch.float32, copy=True)

    def _mamba(self, prefix: str) -> MambaWeights:
        """The weights of a selective scan. The norm there is stored as it multiplies."""
        return MambaWeights(
            decay_rate=self._floats(f"{prefix}A_log").exp(),
            step_bias=self._floats(f"{prefix}dt_bias"),
            skip=self._floats(f"{prefix}D"),
            norm=self._floats(f"{prefix}norm.weight"),
        )

    def _by_part(self, prefix: str, delta: DeltaConfig) -> Tensor:
        """The rows of fused input projections as those of all queries, keys, values, gates, shares and steps."""
        each, values = delta.num_value_heads // delta.num_key_heads, delta.values // delta.num_key_heads
        rows: list[Tensor] = []
        parts = {"qkvz": [delta.key_dim, delta.key_dim, values, values], "ba": [each, each]}
        for name, sizes in parts.items():
            weight = self.tensor(f"{prefix}in_proj_{name}.weight")
            by_head = weight.view(delta.num_key_heads, sum(sizes), weight.shape[1])
            rows += [part.flatten(0, 1) for part in torch.split(by_head, sizes, dim=1)]
        return torch.cat(rows)

    def _delta(self, prefix: str) -> DeltaWeights:
        """The weights of a delta rule. The norm there is stored as it multiplies."""
        rate, bias, norm = (self._floats(f"{prefix}{name}") for name in ("A_log", "dt_bias", "norm.weight"))
        return DeltaWeights(decay_rate=rate.exp(), step_bias=bias, norm=norm)

    def optional_norm(self, prefix: str, name: str | None) -> Norm | None:
        """A norm of rows; None without a name."""
        return None if name is None else self._row_norm(f"{prefix}{name}")

    def _row_norm(self, name: str) -> Norm:
        bias = self._weights.tensor(f"{name}.bias").float().clone() if self._config.norm_bias else None
        return Norm(self.norm(name), bias, centres=self._config.layer_norm)

    def _mlp(self, name: str, *, bias: bool) -> DenseMLP:
        # One product of both halves: the input is read once for twice as many rows of the weight.
        parts = ["gate_up"] if self._config.fused_gate_up else ["gate", "up"]
        if not self._config.gated_mlp:
            parts = ["up"]
        return DenseMLP(
            self._packed([f"{name}.{part}_proj" for part in parts], bias=bias),
            self._packed([f"{name}.down_proj"], bias=bias),
        )

    def _shared(self, prefix: str, of: ExpertsConfig) -> SharedExpert:
        """The expert that every token goes through. Its gate keeps its bits, as a router does."""
        gate = None
        if of.shared_gate is not None:
            gate = pack_weight(self.tensor(f"{prefix}{of.shared_gate}.weight"), deterministic=self._deterministic)
        return SharedExpert(self._mlp(f"{prefix}{of.shared}", bias=False), gate)

    def _experts(self, prefix: str, of: ExpertsConfig) -> PackedExperts:
        """The experts of a layer. The router keeps its bits: it is small, and decides for all that follows."""
        names = [of.up] if of.gate is None else [of.gate, of.up]
        if self._keeps_groups and all("{}" in name for name in names):
            return self._experts_one_by_one(prefix, of, names)
        first_biases, second_biases = (self._biases(f"{prefix}{name}", of) for name in (of.up, of.down))
        weights = zip(*(self._of_each(f"{prefix}{name}", of) for name in names), strict=True)
        return self._put_together(
            prefix,
            of,
            [self._first(parts, bias, of) for parts, bias in zip(weights, first_biases, strict=True)],
            [
                self._pack_either(weight, bias)
                for weight, bias in zip(self._of_each(f"{prefix}{of.down}", of), second_biases, strict=True)
            ],
        )

    def _first(self, parts: Sequence[Tensor | GroupedWeight], bias: Tensor | None, of: ExpertsConfig) -> PackedLinear:
        """The gate and up projections of an expert as one product."""
        if of.stored == "plain":
            return self.pack(torch.cat([part for part in parts if isinstance(part, Tensor)]), bias)
        # Rows of gate and up alternate in the one tensor of both; those of gate go first here.
        (weight,) = parts
        rows = torch.arange(weight.shape[0])
        rows = torch.cat((rows[0::2], rows[1::2]))
        weight = weight.rows(rows) if isinstance(weight, GroupedWeight) else weight[rows]
        return self._pack_either(weight, None if bias is None else bias[rows])

    def _pack_either(self, weight: Tensor | GroupedWeight, bias: Tensor | None) -> PackedLinear:
        """Load a product's weight in packed form, one of few bits as it is stored if it shall be and can be kept so."""
        if isinstance(weight, Tensor):
            return self.pack(weight, bias)
        if self._keeps_groups and keeps_groups(weight):
            return pack_groups(weight, bias)
        return self.pack(weight.widened().to(device=self._device, dtype=self._dtype), bias)

    def _experts_one_by_one(self, prefix: str, of: ExpertsConfig, names: Sequence[str]) -> PackedExperts:
        """The experts of a layer that are tensors of their own, as they are stored where that is in few bits."""
        numbers = range(of.num_experts)
        first = [self._packed([f"{prefix}{name.format(number)}" for name in names], bias=False) for number in numbers]
        second = [self._packed([f"{prefix}{of.down.format(number)}"], bias=False) for number in numbers]
        return self._put_together(prefix, of, first, second)

    def _put_together(
        self, prefix: str, of: ExpertsConfig, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]
    ) -> PackedExperts:
        """A layer's experts, with what chooses among them."""
        name, correction = f"{prefix}{of.router}", None
        router: PackedLinear | Tensor
        if of.float_router:
            router = self._weights.tensor(f"{name}.weight").to(self._device, torch.float32).clone()
        else:
            bias = self.tensor(f"{name}.bias") if of.has_bias else None
            router = pack_weight(self.tensor(f"{name}.weight"), bias, deterministic=self._deterministic)
        if of.correction is not None:
            correction = self._weights.tensor(f"{prefix}{of.correction}").to(self._device, torch.float32)
            correction = correction.flatten().clone()
        factors = None
        if of.beside_mlp:
            factors = self._weights.tensor(f"{prefix}{EXPERT_FACTORS}").to(self._device, torch.float32).clone()
        return pack_experts(
            router,
            gate_up,
            down,
            of.routing,
            correction=correction,
            factors=factors,
            activation=self._config.activation,
            has_gate=self._config.gated_mlp,
        )

    def _of_each(self, name: str, of: ExpertsConfig) -> Iterable[Tensor | GroupedWeight]:
        """A weight of each expert, [rows, columns], one after the other, from a tensor each or from one of all."""
        if of.stored == "mxfp4":
            blocks, scales = self._weights.tensor(f"{name}{BLOCKS}"), self._weights.tensor(f"{name}{SCALES}")
            return (mxfp4(*pair, name) for pair in zip(blocks, scales, strict=True))
        if of.stored == "transposed":
            return (weight.T.contiguous() for weight in self.tensor(name))
        if "{}" not in name:
            return self.tensor(f"{name}.weight")
        return (self.tensor(f"{name.format(expert)}.weight") for expert in range(of.num_experts))

    def _biases(self, name: str, of: ExpertsConfig) -> Sequence[Tensor | None]:
        """The bias of each expert, or nothing for each."""
        return list(self.tensor(f"{name}_bias")) if of.has_bias else [None] * of.num_experts

    def _qkv(self, prefix: str, index: int) -> PackedLinear:
        """The q, k and v projections that a layer has as one; the rows of each q and k head in the order that the
        kernels rotate."""
        config = self._config
        parts = "q" if config.shares_kv(index) else "qkv" if config.has_values(index) else "qk"
        names = [f"{prefix}qkv_proj"] if config.fused_qkv else [f"{prefix}{part}_proj" for part in parts]
        # The rows are put in the kernels' order once here, instead of shuffling each query and key in each step.
        return self._packed(names, bias=config.attention_bias, order=qkv_order(config, index))

    def _latent(self, prefix: str, of: LatentConfig) -> tuple[LatentWeights, PackedLinear]:
        """The weights of attention through a latent, and its layer's input projection: of queries, or what they are
        made of, and of latents."""
        num_heads = self._config.num_heads
        order = rotary_order(of.rope_dim, interleaved=self._config.rope.interleaved)
        # Rotated dimensions stand behind the others, in each query and in a row of the pool.
        of_head = torch.cat((torch.arange(of.nope_dim), of.nope_dim + order))
        queries = (torch.arange(num_heads)[:, None] * of.query_dim + of_head).flatten()
        row = torch.cat((torch.arange(of.rank), of.rank + order))

        name = "q_proj" if of.query_rank is None else "q_a_proj"
        first = queries if of.query_rank is None else torch.arange(of.query_rank)
        inputs = self._packed(
            [f"{prefix}{name}", f"{prefix}kv_a_proj_with_mqa"],
            bias=self._config.attention_bias,
            order=torch.cat((first, len(first) + row)),
        )
        query, query_norm = None, None
        if of.query_rank is not None:
            query_norm = self.norm(f"{prefix}q_a_layernorm")
            query = self._packed([f"{prefix}q_b_proj"], bias=False, order=queries)

        # [H, N + value_dim, L]; they keep their bits, for a part of them is transposed.
        maps = self.tensor(f"{prefix}{LATENT_MAPS}.weight")
        maps = maps.view(num_heads, -1, maps.shape[1])
        keys, values = torch.split(maps, [of.nope_dim, of.value_dim], dim=1)
        weights = LatentWeights(
            norm=self.norm(f"{prefix}kv_a_layernorm"),
            query_norm=query_norm,
            query=query,
            keys=pack_heads([pack_weight(head.T.contiguous(), deterministic=self._deterministic) for head in keys]),
            values=pack_heads([pack_weight(head.contiguous(), deterministic=self._deterministic) for head in values]),
        )
        return weights, inputs

    def _head_norm(self, name: str, head_dim: int, rope: RopeConfig | None) -> Tensor:
        """A norm of q or k heads, of each or over all, in the order of the heads' rows."""
        weight, order = self.norm(name), _head_order(head_dim, rope)
        return weight if order is None else weight.view(-1, head_dim)[:, order.to(self._device)].view(weight.shape)

    def _packed(self, names: list[str], *, bias: bool, order: Tensor | None = None) -> PackedLinear:
        """Some projections as one, one below the other, or their rows in another order."""
        rows = slice(None) if order is None else order.to(self._device)
        biases = torch.cat([self.tensor(f"{name}.bias") for name in names])[rows] if bias else None
        if (kept := self._kept([f"{name}.weight" for name in names])) is not None:
            return pack_groups(kept if order is None else kept.rows(rows), biases)
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        return self.pack(weight if order is None else weight[rows], biases)

    def _cos_sin(self, head_dim: int, rope: RopeConfig | None) -> Tensor:
        """Rotary table, shared between layers with the same rotation."""
        for known, table in self._tables:
            if known == rope and table.shape[1] == head_dim:
                return table
        # A layer without rotation has a table that turns nothing, so that the kernels know one kind of layer only.
        described = rope or RopeConfig(1.0, share=0.0)
        scaling = None if described.scaling is None else dict(described.scaling)
        table = rotary_tables(head_dim, self._max_position, described.theta, scaling, share=described.share)
        table = table.to(self._device)
        self._tables.append((rope, table))
        return table


class _OwnNames:
    """Tensors under the usual names, of a model whose family has names of its own."""

    def __init__(self, config: ModelConfig, weights: TensorSource) -> None:
        self._config = config
        self._weights = weights

    def tensor(self, name: str) -> Tensor:
        return self._weights.tensor(self._config.stored_name(name))

    def grouped(self, name: str) -> GroupedWeight | None:
        return self._weights.grouped(self._config.stored_name(name))


def qkv_order(config: ModelConfig, index: int) -> Tensor | None:
    """The rows of a layer's q, k and v projections, one below the other, as the kernels take them; None: it is the
    same."""
    heads = config.kv_heads(index)
    order = _head_order(heads.dim, config.rope_of_layer[index])
    if order is None and not config.attention_gate and not config.qkv_by_head:
        return None
    num_keys = 0 if config.shares_kv(index) else heads.num
    num_values = num_keys if config.has_values(index) else 0
    num_rows = ((1 + config.attention_gate) * config.num_heads + num_keys + num_values) * heads.dim
    rows = torch.arange(num_rows)
    if config.qkv_by_head:
        rows = rows.view(config.num_heads, 3, heads.dim).transpose(0, 1).flatten()
    if config.attention_gate:
        # The gate of each head stands behind its query; all gates go behind queries, keys and values.
        num_first = 2 * config.num_heads * heads.dim
        query, gate = rows[:num_first].view(config.num_heads, 2, heads.dim).unbind(1)
        rows = torch.cat((query.flatten(), rows[num_first:], gate.flatten()))
    if order is not None:
        starts = torch.arange(config.num_heads + num_keys)[:, None] * heads.dim
        rotated = (starts + order).flatten()
        rows = torch.cat((rows[rotated], rows[len(rotated) :]))
    return rows


def _head_order(head_dim: int, rope: RopeConfig | None) -> Tensor | None:
    """The rows of a q or k head in the order that the kernels rotate, as the family counts them; None: it is the same.

    Scores are sums over a head's dimensions, so queries and keys in one common order give the same scores.
    """
    if rope is None or (rope.share == 1.0 and not rope.interleaved):
        return None
    return rotary_order(head_dim, rope.share, interleaved=rope.interleaved)
