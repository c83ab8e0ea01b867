"""The decoder: one forward pass over a batch of chunks, through paged KV.

A layer has attention, or keeps a recurrent state of each sequence, in a pool of states beside the KV, and an MLP behind
it. In some families a layer is one of these alone.

Shape suffixes: T tokens of the batch, S sequences, R rows whose results are wanted, V tokens with logits, E hidden
size, I MLP size, H query heads, K key-value heads, D head dimension.

In the last layer that keeps keys and values or a state, work after storing them is done only for the rows whose results
(logits, or hidden states to be pooled) are wanted: no other result is read. A batch without such rows (the inner chunks
of a long prompt) ends there. Behind it may be layers that attend to other layers' keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import Quantization
from raydix.engine.model.config import (
    MambaConfig,
    ModelConfig,
)
from raydix.engine.model.families import read_config
from raydix.engine.model.kv_pool import KVPool
from raydix.engine.model.latent import latent_queries, latent_values, store_latents
from raydix.engine.model.layer_loader import LayerLoader, qkv_order
from raydix.engine.model.lora import Lora, LoraLoader, LoraRows, add_loras
from raydix.engine.model.state_pool import StatePool
from raydix.engine.model.weights import Checkpoint, TensorSource
from raydix.kernels.cpp import cpu_ops
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
from raydix.kernels.experts import PackedExperts, experts
from raydix.kernels.gated_delta import gated_delta
from raydix.kernels.gated_rms_norm import gated_rms_norm
from raydix.kernels.layer_norm import layer_norm
from raydix.kernels.linear import (
    Layout,
    PackedLinear,
    linear,
)
from raydix.kernels.paged_attention import paged_attention
from raydix.kernels.paged_attention.plan import Plans
from raydix.kernels.rms_norm import rms_norm
from raydix.kernels.rotary_kv_store import rotary_kv_store
from raydix.kernels.selective_scan import selective_scan
from raydix.kernels.short_conv import short_conv
from raydix.kernels.silu_and_mul import activate, silu_and_mul
from raydix.kernels.states import StateUse

HEAD_STEP, MOST_HEAD_DIM = 16, 1024  # sizes of heads that `raydix.kernels.paged_attention` takes on CPUs


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
        if self.device.type == "cpu" and cpu_ops() is not None:
            _check_heads(config)
        self.max_position = min(max_position or config.max_position, config.max_position)
        loader = LayerLoader(config, weights, dtype, self.device, self.max_position, quantization, deterministic)

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
            qkv_order=lambda index: qkv_order(self.config, index),
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


def _check_heads(config: ModelConfig) -> None:
    """Raises `StartupError` where a layer has heads that the kernels for CPUs do not take."""
    for layer in config.attention_layers:
        head_dim = config.kv_heads(layer).dim
        if head_dim % HEAD_STEP or head_dim > MOST_HEAD_DIM:
            raise StartupError(
                f"{config.architecture} has heads of {head_dim} numbers in layer {layer}; kernels take multiples of "
                f"{HEAD_STEP} up to {MOST_HEAD_DIM}"
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


def _gated(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    """`x` times the gate's sigmoid or SiLU."""
    return silu_and_mul(torch.cat((gate, x), dim=1), kind)


def _query_scale(config: ModelConfig, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The factor on the queries of each position, [max_position]; None: it is one at each that is served."""
    if config.query_scaling is None or max_position <= config.query_scaling[1]:
        return None
    weight, period = config.query_scaling
    steps = torch.arange(max_position, dtype=torch.float32).div(period).floor()
    return (1 + weight * torch.log(1 + steps)).to(device=device, dtype=dtype)
