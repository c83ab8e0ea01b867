"""The decoder: one forward pass over a batch of chunks, through paged KV.

A layer has attention, or keeps a recurrent state of each sequence, in a pool of states beside the KV, and an MLP behind
it. In some families a layer is one of these alone.

Shape suffixes: T tokens of the batch, S sequences, R rows whose results are wanted, V tokens with logits, E hidden
size, I MLP size, H query heads, K key-value heads, D head dimension.

In the last layer that keeps keys and values or a state, work after storing them is done only for the rows whose results
(logits, or hidden states to be pooled) are wanted: no other result is read. A batch without such rows (the inner chunks
of a long prompt) ends there. Behind it may be layers that attend to other layers' keys and values.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from raydix.engine.core.errors import StartupError
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
from raydix.engine.model.families import read_config
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.latent import latent_queries, latent_values, store_latents
from raydix.engine.model.lora import Lora, LoraLoader, LoraRows, add_loras
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
from raydix.engine.model.state_pool import StatePool
from raydix.engine.model.weights import Checkpoint, TensorSource
from raydix.kernels.decoder_pass import (
    BesideExperts,
    DecoderPass,
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
from raydix.kernels.experts import PackedExperts, experts, pack_experts
from raydix.kernels.gated_delta import gated_delta
from raydix.kernels.gated_rms_norm import gated_rms_norm
from raydix.kernels.layer_norm import layer_norm
from raydix.kernels.linear import (
    GroupedWeight,
    Layout,
    PackedLinear,
    in_one_form,
    keeps_groups,
    linear,
    pack_groups,
    pack_weight,
    stacked,
)
from raydix.kernels.linear_heads import pack_heads
from raydix.kernels.paged_attention import paged_attention
from raydix.kernels.paged_attention.plan import Plans
from raydix.kernels.rms_norm import rms_norm
from raydix.kernels.rotary import rotary_order, rotary_tables
from raydix.kernels.rotary_kv_store import rotary_kv_store
from raydix.kernels.selective_scan import selective_scan
from raydix.kernels.short_conv import short_conv
from raydix.kernels.silu_and_mul import activate, silu_and_mul
from raydix.kernels.states import StateUse


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The chunks of S sequences, one after the other, with where their KV is and goes."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slot_mapping: Tensor
    """[T] int64: block * block_size + offset that receives the token's KV; negative: not stored."""
    block_tables: Tensor
    """[S, max_blocks] int32."""
    query_start: Tensor
    """[S + 1] int32: where each sequence's chunk begins in the batch."""
    context_lens: Tensor
    """[S] int32: KV tokens of each sequence, its chunk included."""
    logits_rows: Tensor
    """[R] int64: tokens of the batch whose logits or hidden states are wanted."""
    plans: Plans | None = None
    """Of attention, for each window of the layers; None on CPUs, and where it may be planned in each layer."""
    loras: tuple[LoraRows, ...] = ()
    """Rows that are computed with adapters, each with one."""
    states: StateUse | None = None
    """Where the sequences' recurrent states are and go; None only for a model without such layers."""


class Decoder:
    """A loaded model. Stateless between calls: all lasting state is in the pools given to each call.

    `max_position` bounds the positions that can be served (and so the rotary tables); None: the model's context.
    `vocab_size`: tokens that have logits, the first of the model's; None: all. A table of embeddings is often longer
    than its tokenizer, and what has no logit is never sampled, drafted, or listed among log-probabilities.
    `quantization` is of all matrix products; tokens are embedded in `dtype`, also where the table is the output's.
    `deterministic` makes a row's bits on a GPU depend on its tokens alone, whatever the batch; in bfloat16 on CPU they
    always do.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: TensorSource,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_position: int | None = None,
        quantization: Quantization | None = None,
        *,
        deterministic: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        self.dtype = dtype
        self.deterministic = deterministic
        self.device = torch.device(device)
        if config.cpu_only is not None and self.device.type == "cuda":
            raise StartupError(
                f"{config.architecture} has {config.cpu_only}, which run on CPUs only: set workers.*.device to cpu"
            )
        self.max_position = min(max_position or config.max_position, config.max_position)
        loader = _Loader(config, weights, dtype, self.device, self.max_position, quantization, deterministic)

        with torch.inference_mode():
            # A copy, so that no weight file stays in use.
            self._embedding = loader.tensor("model.embed_tokens.weight").clone()
            # Only ids of the tokenizer have logits, so that no padding of the table is ever sampled.
            self._lm_head = loader.head(self._embedding, self.vocab_size)

            # In the model's dtype, as the published implementation rounds it.
            scale = torch.tensor(config.embedding_scale, dtype=dtype, device=self.device)
            self._embedding_scale = scale if config.embedding_scale != 1.0 else None
            self._layer_inputs = loader.layer_inputs()
            self._first_norm = loader.optional_norm("model.layers.0.", config.input_norm(0))
            self._query_scale = _query_scale(config, self.max_position, dtype, self.device)
            self._layers = tuple(loader.layer(index) for index in range(config.num_layers))
        recurrent = () if config.recurrent is None else config.recurrent.layers
        # Of each layer the place among those of its kind, in the pool of KV or in that of states.
        kinds = (config.attention_layers, recurrent)
        self._places = {index: place for layers in kinds for place, index in enumerate(layers)}
        # Layers behind the last one that keeps something of each token are computed for wanted rows only.
        self._last_keeping = max(self._places)

        self._pass = self._make_pass()

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_position: int | None = None,
        quantization: Quantization | None = None,
        *,
        deterministic: bool = False,
        vocab_size: int | None = None,
        on_tensor: Callable[[], None] = lambda: None,
    ) -> "Decoder":
        """Load the model in a Hugging Face folder; raises `StartupError` if it cannot be used, and what `on_tensor`
        raises, which is called before each tensor."""
        checkpoint = Checkpoint(folder, read_config(folder), on_tensor)
        return cls(
            checkpoint.config,
            checkpoint,
            dtype,
            device,
            max_position,
            quantization,
            deterministic=deterministic,
            vocab_size=vocab_size,
        )

    @property
    def runs_in_one_call(self) -> bool:
        """True if a batch goes through all layers in one call of the kernels, see `raydix.kernels.decoder_pass`."""
        return self._pass is not None

    @property
    def has_independent_rows(self) -> bool:
        """True if a row's bits depend on its tokens alone, whatever the number of rows."""
        layouts = {Layout.PANELS, Layout.INVARIANT}
        return self._lm_head.layout in layouts and all(
            product.layout in layouts for layer in self._layers for product in layer.products()
        )

    def forward(self, batch: ForwardBatch, pool: KVPool, states: StatePool | None = None) -> Tensor:
        """Store the KV of the batch's tokens; return the logits of its `logits_rows`, [R, V] in the model's dtype."""
        return self.logits(self.hidden(batch, pool, states))

    @torch.inference_mode()
    def logits(self, x_RE: Tensor) -> Tensor:
        """The logits of some of the rows that `hidden` returned, [R, V] in the model's dtype."""
        logits_RV = linear(x_RE, self._lm_head)
        if self.config.logit_scale != 1.0:
            logits_RV = logits_RV * self.config.logit_scale
        soft_cap = self.config.logit_soft_cap
        return logits_RV if soft_cap is None else torch.tanh(logits_RV / soft_cap) * soft_cap

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, pool: KVPool, states: StatePool | None = None) -> Tensor:
        """Store the KV of the batch's tokens, and the states that the batch asks for; return the hidden states of
        `logits_rows` behind the last norm, [R, E]: logits are computed from these. A model with recurrent layers needs
        `states`."""
        residual_TE = functional.embedding(batch.token_ids, self._embedding)
        if self._embedding_scale is not None:
            residual_TE *= self._embedding_scale
        # A step without adapters takes no notice of them; one with them has the same bits in its other rows.
        if self._pass is None or batch.loras:
            return self._layer_by_layer(residual_TE, batch, pool, states)

        return self._pass(
            residual_TE,
            pool.data,
            batch.positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.query_start,
            batch.context_lens,
            batch.logits_rows,
        )

    def load_lora(self, folder: Path) -> Lora:
        """Load the adapter in a folder, for rows of `ForwardBatch.loras`. Changes nothing, so any thread may do it.
        Raises `StartupError` as `read_adapter`, for numbers that are none, and for a model with recurrent layers."""
        self.config.check_takes_adapters()
        loader = LoraLoader(
            self.config,
            self.dtype,
            self.device,
            deterministic=self.deterministic,
            qkv_order=lambda index: _qkv_order(self.config, index),
        )
        return loader.load(folder)

    def _make_pass(self) -> DecoderPass | None:
        """Run all layers in one call, where the machine and the dtype allow it."""
        config = self.config
        # The one call knows the common layer only; what few families have stays in Python, layer by layer.
        is_plain = config.residual_scale == 1.0 and not config.qk_norm_spans_heads and self._query_scale is None
        is_plain = is_plain and not config.attention_gate and config.is_uniform and config.gated_mlp
        if self._first_norm is None or not is_plain or not DecoderPass.supports(self._layers):
            return None
        return DecoderPass(
            self._layers,
            self._first_norm,
            num_heads=config.num_heads,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            activation=config.activation,
        )

    def _layer_by_layer(
        self, residual_TE: Tensor, batch: ForwardBatch, pool: KVPool, states: StatePool | None
    ) -> Tensor:
        config = self.config
        eps, last = config.rms_norm_eps, self._last_keeping

        x_TE = residual_TE if self._first_norm is None else _norm(residual_TE, self._first_norm, eps)
        inputs_TLP = None
        if self._layer_inputs is not None:
            inputs_TLP = self._layer_inputs(batch.token_ids, residual_TE, eps)

        for index, layer in enumerate(self._layers):
            wants_nothing = index == last and batch.logits_rows.numel() == 0
            mixed_TE = self._mixed(x_TE, index, batch, pool, states, wants_nothing=wants_nothing)
            if wants_nothing:
                return residual_TE.new_empty((0, config.hidden_size))
            if index == last:  # from here on T is R
                x_TE = x_TE.index_select(0, batch.logits_rows)
                mixed_TE = mixed_TE.index_select(0, batch.logits_rows)
                residual_TE = residual_TE.index_select(0, batch.logits_rows)
                if inputs_TLP is not None:
                    inputs_TLP = inputs_TLP.index_select(0, batch.logits_rows)
                if index < config.num_layers - 1:
                    batch = _wanted(batch)

            if layer.output is None:  # the layer is an MLP alone
                x_TE = mixed_TE
            else:
                y_TE = linear(mixed_TE, layer.output)
                add_loras(y_TE, mixed_TE, batch.loras, index, "output", wanted=index == last)
                if layer.attention_post_norm is not None:
                    y_TE = _norm(y_TE, layer.attention_post_norm, eps)
                if config.is_parallel and layer.mlp is not None:
                    if layer.mlp_norm is not None:
                        x_TE = _norm(residual_TE, layer.mlp_norm, eps)
                    y_TE = y_TE + self._mlp(x_TE, index, layer.mlp, batch.loras)
                    x_TE, residual_TE = self._add(y_TE, residual_TE, layer.next_norm)
                    continue
                norm = layer.next_norm if layer.mlp is None else layer.mlp_norm
                x_TE, residual_TE = self._add(y_TE, residual_TE, norm)

            if layer.mlp is None:
                continue
            y_TE = self._mlp(x_TE, index, layer.mlp, batch.loras)
            if layer.beside is not None:
                y_TE = _norm(y_TE, layer.beside.mlp_norm, eps) + self._beside(residual_TE, layer.beside)
            if layer.mlp_post_norm is not None:
                y_TE = _norm(y_TE, layer.mlp_post_norm, eps)

            if inputs_TLP is None and layer.scalar is None:
                x_TE, residual_TE = self._add(y_TE, residual_TE, layer.next_norm)
                continue
            _, residual_TE = self._add(y_TE, residual_TE, None)
            if inputs_TLP is not None and layer.own_input is not None:
                residual_TE = residual_TE + self._own_input(residual_TE, inputs_TLP[:, index], layer.own_input)
            if layer.scalar is not None:
                residual_TE = residual_TE * layer.scalar
            x_TE = residual_TE if layer.next_norm is None else _norm(residual_TE, layer.next_norm, eps)

        return x_TE

    def _beside(self, residual_TE: Tensor, beside: BesideExperts) -> Tensor:
        """What the experts beside an MLP make of the residual stream."""
        eps = self.config.rms_norm_eps
        read, routed = (_norm(residual_TE, norm, eps) for norm in (beside.input_norm, beside.router_norm))
        return _norm(experts(read, beside.experts, routed), beside.output_norm, eps)

    def _own_input(self, x_TE: Tensor, input_TP: Tensor, weights: OwnInput) -> Tensor:
        """What a layer adds for its own embeddings of the tokens, behind a gate that the residual stream opens."""
        gated = silu_and_mul(torch.cat((linear(x_TE, weights.gate), input_TP), dim=1), self.config.activation)
        return _norm(linear(gated, weights.projection), weights.norm, self.config.rms_norm_eps)

    def _mixed(
        self,
        x_TE: Tensor,
        index: int,
        batch: ForwardBatch,
        pool: KVPool,
        states: StatePool | None,
        *,
        wants_nothing: bool,
    ) -> Tensor:
        """What a layer's output projection reads, of its attention or recurrence; of a layer that is an MLP alone its
        input. `wants_nothing`: no row's result is read, only KV and states are written."""
        layer = self._layers[index]
        if layer.qkv is None:
            return x_TE
        if layer.latent is not None:
            projected = linear(x_TE, layer.qkv)
            return self._latent_attention(projected, layer.latent, index, batch, pool, wants_nothing=wants_nothing)
        if layer.recurrent is None:
            return self._attention(x_TE, layer.qkv, index, batch, pool, wants_nothing=wants_nothing)
        assert states is not None and batch.states is not None, "recurrent layers need a pool of states"
        projected = linear(x_TE, layer.qkv)
        return self._recurrence(projected, layer.recurrent, self._places[index], batch, batch.states, states)

    def _mlp(self, x_TE: Tensor, index: int, mlp: DenseMLP | PackedExperts, loras: Sequence[LoraRows]) -> Tensor:
        layer, is_last = self._layers[index], index == self.config.num_layers - 1
        if isinstance(mlp, PackedExperts):
            y_TE = experts(x_TE, mlp)
            return y_TE if layer.shared is None else y_TE + self._shared_expert(x_TE, layer.shared)
        gate_up = linear(x_TE, mlp.gate_up)
        add_loras(gate_up, x_TE, loras, index, "gate_up", wanted=is_last)
        inner = self._activated(gate_up)
        y_TE = linear(inner, mlp.down)
        add_loras(y_TE, inner, loras, index, "down", wanted=is_last)
        return y_TE

    def _activated(self, x: Tensor) -> Tensor:
        """What an MLP's second product reads of what the first one gives."""
        act = silu_and_mul if self.config.gated_mlp else activate
        return act(x, self.config.activation)

    def _shared_expert(self, x_TE: Tensor, shared: SharedExpert) -> Tensor:
        """What the expert of every token adds to those that the router chose."""
        inner = self._activated(linear(x_TE, shared.mlp.gate_up))
        y_TE = linear(inner, shared.mlp.down)
        if shared.gate is None:
            return y_TE
        return _gated(y_TE, linear(x_TE, shared.gate).expand_as(y_TE), "sigmoid")

    def _add(self, y_TE: Tensor, residual_TE: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Add to the residual stream; returns what the next product reads, and the stream."""
        if self.config.residual_scale != 1.0:
            y_TE = y_TE * self.config.residual_scale
        if norm is None:
            total_TE = y_TE + residual_TE
            return total_TE, total_TE
        if norm.centres:
            return layer_norm(y_TE, norm.weight, norm.bias, self.config.rms_norm_eps, residual_TE)
        return rms_norm(y_TE, norm.weight, self.config.rms_norm_eps, residual_TE)

    def _attention(
        self,
        x_TE: Tensor,
        projections: PackedLinear,
        index: int,
        batch: ForwardBatch,
        pool: KVPool,
        *,
        wants_nothing: bool,
    ) -> Tensor:
        """Write a layer's keys and values of the batch's tokens; returns what its output projection reads, [T, H * D].
        `wants_nothing`: no row's result is read, so none is computed."""
        config, layer = self.config, self._layers[index]
        qkv = linear(x_TE, projections)
        add_loras(qkv, x_TE, batch.loras, index, "qkv", wanted=False)
        gate_TE = None
        if config.attention_gate:
            heads = config.num_heads * config.head_dim
            qkv, gate_TE = qkv[:, :-heads], qkv[:, -heads:]
        keys, values = pool.layers[self._places[config.kv_layer(index)]]
        query_THD = self._store_kv(qkv, index, keys, values, batch)
        if wants_nothing:
            return x_TE
        attended_TE = self._attend(query_THD, layer, keys, values, batch).flatten(1)
        return attended_TE if gate_TE is None else _gated(attended_TE, gate_TE, "sigmoid")

    def _latent_attention(
        self,
        projected: Tensor,
        weights: LatentWeights,
        index: int,
        batch: ForwardBatch,
        pool: KVPool,
        *,
        wants_nothing: bool,
    ) -> Tensor:
        """As `_attention`, through latents. `projected`: what the layer's input projection gives."""
        of, layer = self.config.latent, self._layers[index]
        assert of is not None
        latents, _ = pool.layers[self._places[index]]
        query, row_TD = torch.split(projected, [projected.shape[1] - of.row_dim, of.row_dim], dim=1)
        cos_sin = layer.cos_sin[batch.positions]
        store_latents(row_TD, weights, of, cos_sin, latents, batch.slot_mapping)
        if wants_nothing:
            return projected
        attended_THD = self._attend(latent_queries(query, weights, of, cos_sin), layer, latents, latents, batch)
        return latent_values(attended_THD, weights, of)

    def _recurrence(
        self,
        projected: Tensor,
        weights: RecurrentWeights,
        place: int,
        batch: ForwardBatch,
        use: StateUse,
        states: StatePool,
    ) -> Tensor:
        """Take the states of the recurrent layer at `place` among such layers over the batch's tokens; returns what its
        output projection reads. `projected`: what its input projection gives."""
        recurrent = self.config.recurrent
        assert recurrent is not None
        start, eps, described = batch.query_start, self.config.rms_norm_eps, recurrent.memory

        def convolved(x: Tensor, *, silu: bool) -> Tensor:
            return short_conv(x, weights.conv, states.tails[place], start, use, silu=silu, bias=weights.conv_bias)

        if isinstance(described, MambaConfig):
            assert isinstance(weights.memory, MambaWeights)
            of_scan, memory = weights.memory, states.memories[place]
            gate, mixed, step = torch.split(
                projected, [described.values, described.channels, described.num_heads], dim=1
            )
            y = selective_scan(
                convolved(mixed, silu=True),
                step,
                of_scan.decay_rate,
                of_scan.step_bias,
                of_scan.skip,
                memory,
                start,
                use,
                step_limits=described.step_limits,
            )
            return gated_rms_norm(y, gate, of_scan.norm, eps, groups=described.num_groups)

        if described is None:
            # One gate before the convolution, and one behind it.
            before, behind, x = projected.chunk(3, dim=1)
            return behind * convolved(before * x, silu=False)

        assert isinstance(weights.memory, DeltaWeights)
        of_rule, memory = weights.memory, states.memories[place]
        sizes = [described.channels, described.values, described.num_value_heads, described.num_value_heads]
        qkv, gate, beta, step = torch.split(projected, sizes, dim=1)
        y = gated_delta(
            convolved(qkv, silu=True), beta, step, of_rule.decay_rate, of_rule.step_bias, memory, start, use
        )
        # Each head's result has a norm of its own, before the gate.
        normed = rms_norm(y.view(-1, described.value_dim), of_rule.norm, eps).view_as(y)
        return _gated(normed, gate, "silu")

    def _store_kv(self, qkv: Tensor, index: int, keys: Tensor, values: Tensor, batch: ForwardBatch) -> Tensor:
        """Write a layer's keys and values of the batch's tokens; returns their queries, [T, H, D]."""
        config, layer = self.config, self._layers[index]
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if (config.qk_norm_spans_heads or config.qk_norm_by_head) and q_norm is not None and k_norm is not None:
            # The kernel that rotates and stores has one norm for every head.
            query, key, value = torch.split(qkv, [q_norm.numel(), k_norm.numel(), k_norm.numel()], dim=1)
            query, key = (_over_heads(*pair, config.rms_norm_eps) for pair in ((query, q_norm), (key, k_norm)))
            qkv, q_norm, k_norm = torch.cat((query, key, value), dim=1), None, None
        if config.shares_kv(index):  # the caches without heads: there is nothing to store
            keys, values = keys[:, :0], values[:, :0]
        elif layer.v_norm is not None:
            heads = config.kv_heads(index)
            query_and_key = qkv[:, : (config.num_heads + heads.num) * heads.dim]
            value = qkv[:, -heads.num * heads.dim :]  # where there is no projection of values, those of keys
            normed = rms_norm(value.reshape(-1, heads.dim), layer.v_norm, config.rms_norm_eps)
            qkv = torch.cat((query_and_key, normed.view_as(value)), dim=1)

        query_THD = rotary_kv_store(
            qkv,
            batch.positions,
            layer.cos_sin,
            keys,
            values,
            batch.slot_mapping,
            config.num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.rms_norm_eps,
        )
        return query_THD if self._query_scale is None else query_THD * self._query_scale[batch.positions][:, None, None]

    def _attend(
        self, query_THD: Tensor, layer: LayerWeights, keys: Tensor, values: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Attention of the batch's queries over a layer's KV, [T, H, D]."""
        return paged_attention(
            query_THD,
            keys,
            values,
            batch.block_tables,
            batch.query_start,
            batch.context_lens,
            scale=self.config.attention_scale,
            sliding_window=layer.window,
            soft_cap=self.config.attention_soft_cap,
            deterministic=self.deterministic,
            sinks=layer.sinks,
            plan=None if batch.plans is None else batch.plans[layer.window],
        )


def _norm(x_TE: Tensor, norm: Norm, eps: float) -> Tensor:
    if norm.centres:
        return layer_norm(x_TE, norm.weight, norm.bias, eps)
    return rms_norm(x_TE, norm.weight, eps)


def _over_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of rows over all heads, or with weights for each head, [heads, head_dim], the layer norm of each."""
    if weight.dim() == 1:
        return rms_norm(x.contiguous(), weight, eps)
    return layer_norm(x.reshape(-1, weight.shape[1]), weight, None, eps).view(x.shape)


def _wanted(batch: ForwardBatch) -> ForwardBatch:
    """The rows of a batch whose results are wanted, each a sequence of its own. Nothing is stored for them."""
    rows = batch.logits_rows
    sequences = torch.searchsorted(batch.query_start[1:].long(), rows, right=True)
    positions = batch.positions[rows]
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=positions,
        slot_mapping=torch.full_like(rows, -1),
        block_tables=batch.block_tables[sequences],
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
        context_lens=(positions + 1).int(),
        plans=None,
    )


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


def _gated(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    """`x` times the gate's sigmoid or SiLU."""
    return silu_and_mul(torch.cat((gate, x), dim=1), kind)


class _OwnNames:
    """Tensors under the usual names, of a model whose family has names of its own."""

    def __init__(self, config: ModelConfig, weights: TensorSource) -> None:
        self._config = config
        self._weights = weights

    def tensor(self, name: str) -> Tensor:
        return self._weights.tensor(self._config.stored_name(name))

    def grouped(self, name: str) -> GroupedWeight | None:
        return self._weights.grouped(self._config.stored_name(name))


class _Loader:
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
        return self._packed(names, bias=config.attention_bias, order=_qkv_order(config, index))

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


def _query_scale(config: ModelConfig, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The factor on the queries of each position, [max_position]; None: it is one at each that is served."""
    if config.query_scaling is None or max_position <= config.query_scaling[1]:
        return None
    weight, period = config.query_scaling
    steps = torch.arange(max_position, dtype=torch.float32).div(period).floor()
    return (1 + weight * torch.log(1 + steps)).to(device=device, dtype=dtype)


def _qkv_order(config: ModelConfig, index: int) -> Tensor | None:
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
