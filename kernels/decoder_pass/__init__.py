"""All layers of a decoder in one call, where this machine has our own bfloat16 product: the same operations and bits as
one by one, without a way back to Python, and without waking the threads, between any two of them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raydix.kernels.cpp import cpu_ops
from raydix.kernels.experts import PackedExperts
from raydix.kernels.linear import Layout, PackedLinear
from raydix.kernels.linear_heads import PackedHeads
from raydix.kernels.silu_and_mul import KINDS

__all__ = [
    "BesideExperts",
    "DecoderPass",
    "DeltaWeights",
    "DenseMLP",
    "LatentWeights",
    "LayerWeights",
    "MambaWeights",
    "Norm",
    "OwnInput",
    "RecurrentWeights",
    "SharedExpert",
]


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of rows."""

    weight: Tensor
    """[hidden] float32, the family's offset in it."""
    bias: Tensor | None = None
    """[hidden] float32."""
    centres: bool = False
    """A layer norm, which subtracts the mean first; otherwise an RMS norm, without a bias."""


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """An MLP that every token goes through."""

    gate_up: PackedLinear
    """The gate and up projections, of an MLP without a gate the latter alone."""
    down: PackedLinear

    def products(self) -> tuple[PackedLinear, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every token of a layer with experts goes through, too."""

    mlp: DenseMLP
    gate: PackedLinear | None
    """[1, hidden]: the share of its result, by a sigmoid; None: all of it."""

    def products(self) -> tuple[PackedLinear, ...]:
        return self.mlp.products() if self.gate is None else (*self.mlp.products(), self.gate)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a gated delta rule between its layer's convolution and output projection, all float32."""

    decay_rate: Tensor
    """[num_value_heads]."""
    step_bias: Tensor
    """[num_value_heads]."""
    norm: Tensor
    """[value_dim]: of each head's result."""


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """The weights of a selective scan between its layer's convolution and output projection, all float32."""

    decay_rate: Tensor
    """[num_heads]."""
    step_bias: Tensor
    """[num_heads]."""
    skip: Tensor
    """[num_heads]: factors on the values that pass the memory by."""
    norm: Tensor
    """[num_heads * head_dim]: of each group's gated result."""


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a recurrent layer between its projections."""

    conv: Tensor
    """[kernel_size, channels] float32."""
    conv_bias: Tensor | None
    """[channels] float32."""
    memory: DeltaWeights | MambaWeights | None
    """None: the convolution stands between two gates."""


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of attention through a latent between its layer's projections."""

    norm: Tensor
    """[rank] float32: of the latent."""
    query_norm: Tensor | None
    """[query_rank] float32; None, like `query`: the layer's input projection gives all heads' queries."""
    query: PackedLinear | None
    """query_rank -> all heads' queries."""
    keys: PackedHeads
    """Of each head: its query's unrotated dimensions -> rank."""
    values: PackedHeads
    """Of each head: rank -> its value."""

    def products(self) -> tuple[PackedLinear, ...]:
        return *(() if self.query is None else (self.query,)), *self.keys.weights, *self.values.weights


@dataclass(frozen=True, slots=True)
class BesideExperts:
    """The experts of a layer that has its MLP, too."""

    experts: PackedExperts
    router_norm: Norm
    """Of what the router reads."""
    input_norm: Norm
    """Of what the experts read."""
    output_norm: Norm
    """Of what the experts give."""
    mlp_norm: Norm
    """Of what the MLP gives, before the two are added up."""

    def products(self) -> tuple[PackedLinear, ...]:
        return self.experts.products()


@dataclass(frozen=True, slots=True)
class OwnInput:
    """The weights with which a layer adds its own embedding of each token."""

    gate: PackedLinear
    """hidden -> numbers of such an embedding."""
    projection: PackedLinear
    """Back to hidden."""
    norm: Norm

    def products(self) -> tuple[PackedLinear, ...]:
        return self.gate, self.projection


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights. Those of norms are float32 and have the family's offset in them."""

    qkv: PackedLinear | None
    """The projections of a layer's input: queries, keys and values, and behind them the gates of the heads if there are
    any; of a recurrent layer what its kind takes: of a delta rule queries, keys, values, gates, and each head's shares
    and steps, of a selective scan gates, values, B, C and steps, or without a memory the two gates and what is
    convolved. None: the layer is an MLP alone."""
    output: PackedLinear | None
    """None: the layer is an MLP alone."""
    mlp: DenseMLP | PackedExperts | None
    """None: the layer ends behind `output`."""
    mlp_norm: Norm | None
    next_norm: Norm | None
    """The norm of the next layer's input, or the final norm, fused with this layer's last residual add."""
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    q_norm: Tensor | None
    """[head_dim], or over all heads [num_heads * head_dim], or of each head [num_heads, head_dim]."""
    k_norm: Tensor | None
    cos_sin: Tensor
    """[max_position, head_dim] float32."""
    window: int | None
    sinks: Tensor | None = None
    """[num_heads] float32: of each head the score of a key whose value is zero."""
    recurrent: RecurrentWeights | None = None
    """None: the layer has attention. A recurrent layer has no use for `q_norm`, `k_norm`, `cos_sin` and `window`."""
    shared: SharedExpert | None = None
    """None: the layer has no such expert beside those of `mlp`."""
    beside: BesideExperts | None = None
    """None: the layer has no experts beside its MLP."""
    v_norm: Tensor | None = None
    """[head_dim] float32: of each head's values."""
    own_input: OwnInput | None = None
    """None: the layer adds no embedding of its own."""
    scalar: Tensor | None = None
    """[1]: factor of the residual stream at the layer's end."""
    latent: LatentWeights | None = None
    """None: the layer keeps keys and values of heads. Of one that has it `qkv` gives what queries are made of, and a
    latent with a key to be rotated; `cos_sin` is as wide as that key."""

    def products(self) -> tuple[PackedLinear, ...]:
        own = tuple(each for each in (self.qkv, self.output) if each is not None)
        parts = (part for part in (self.mlp, self.shared, self.beside, self.own_input, self.latent) if part is not None)
        return own + tuple(product for part in parts for product in part.products())


class DecoderPass:
    """A decoder's weights, ready to be run; see `supports`."""

    def __init__(
        self,
        layers: tuple[LayerWeights, ...],
        first_norm: Norm,
        *,
        num_heads: int,
        eps: float,
        scale: float,
        soft_cap: float | None,
        activation: str,
    ) -> None:
        ops = cpu_ops()
        assert ops is not None
        self._forward = ops.forward
        rows = [_layer(layer) for layer in layers]
        # Checked and converted once here, so that a step passes one handle instead of hundreds of tensors.
        self._decoder = ops.decoder(rows, first_norm.weight, num_heads, eps, scale, soft_cap, KINDS.index(activation))

    @staticmethod
    def supports(layers: tuple[LayerWeights, ...]) -> bool:
        """True if the C++ path computes every product itself, and has an RMS norm before each."""
        # The C++ loop norms before each product; families that norm behind only go layer by layer in Python.
        names = ("recurrent", "shared", "beside", "v_norm", "own_input", "scalar", "latent")
        extras = (getattr(layer, name) for layer in layers for name in names)
        if any(part is not None for part in extras):
            return False
        if any(layer.qkv is None or layer.mlp is None for layer in layers):
            return False
        norms = [norm for layer in layers for norm in (layer.mlp_norm, layer.next_norm)]
        has_norms = all(norm is not None and not norm.centres for norm in norms)
        return has_norms and all(product.layout is Layout.PANELS for layer in layers for product in layer.products())

    def __call__(
        self,
        embedded: Tensor,
        pool: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        out_rows: Tensor,
    ) -> Tensor:
        """Store the KV of the tokens and return the last layer's normed output of `out_rows`, [num_rows, hidden]
        bfloat16.

        `embedded`: [num_tokens, hidden] bfloat16; `pool`: [num_blocks, num_layers, 2, num_kv_heads, block_size,
        head_dim] bfloat16, or with int8 rows of `raydix.kernels.narrow_kv`; the rest as `rotary_kv_store` and
        `paged_attention` take it. Raises `ValueError` on wrong
        shapes and `TypeError` on wrong dtypes.
        """
        hidden: Tensor = self._forward(
            self._decoder,
            embedded,
            pool,
            positions,
            slot_mapping,
            block_tables,
            query_start,
            context_lens,
            out_rows,
        )
        return hidden


def _layer(layer: LayerWeights) -> tuple[Any, ...]:
    assert layer.qkv is not None and layer.output is not None and layer.mlp is not None, "see `supports`"
    gate_up, down, experts = None, None, None
    if isinstance(layer.mlp, DenseMLP):
        gate_up, down = layer.mlp.gate_up.as_tuple(), layer.mlp.down.as_tuple()
    else:
        experts = layer.mlp.handle
    return (
        layer.qkv.as_tuple(),
        layer.output.as_tuple(),
        gate_up,
        down,
        *(
            None if norm is None else norm.weight
            for norm in (layer.mlp_norm, layer.next_norm, layer.attention_post_norm, layer.mlp_post_norm)
        ),
        layer.q_norm,
        layer.k_norm,
        layer.cos_sin,
        layer.window,
        experts,
        layer.sinks,
    )
