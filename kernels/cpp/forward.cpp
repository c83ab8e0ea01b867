// All layers of a decoder over one batch, on one crew: between two of its operations the threads wait for each other
// once, and nothing goes back to Python. Every operation is the one that can also be called by itself, so the bits are
// the same.
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

struct Pass {
  const Forward& a;
  Crew& crew;

  void product(const void* x, const Weight& weight, void* out, int64_t rows, const Weight* after) {
    linear({&weight, x, out, rows, weight.in_features, after ? after->packed : nullptr}, crew);
  }

  void norm(const void* x, const void* residual, const float* weight, void* out, void* sum, int64_t rows) {
    rms_norm(x, residual, weight, out, sum, rows, a.hidden, a.hidden, a.eps, DType::bf16, true, crew);
  }

  // Rows of `from` named by `a.out_rows`.
  void gather(const bf16* from, bf16* to, int64_t width) {
    crew.share(a.num_out, grain(width), [&](int64_t row) {
      std::memcpy(to + row * width, from + a.out_rows[row] * width, size_t(width) * sizeof(bf16));
    });
  }

  void run() {
    Buffers b = a.buffers;
    int64_t rows = a.rotary.num_tokens;
    norm(b.residual, nullptr, a.first_norm, b.x, nullptr, rows);
    for (size_t index = 0; index < a.layers.size(); ++index) {
      const Layer& layer = a.layers[index];
      const bool last = index + 1 == a.layers.size();
      const int64_t at = int64_t(index) * a.layer_stride;
      product(b.x, layer.qkv, b.wide, rows, &layer.output);
      RotaryStore rotary = a.rotary;
      rotary.qkv = b.wide, rotary.query = b.query, rotary.cos_sin = layer.cos_sin;
      rotary.key_cache = (char*)a.pool + at, rotary.value_cache = (char*)a.pool + at + a.layer_stride / 2;
      rotary.q_norm = layer.q_norm, rotary.k_norm = layer.k_norm;
      rotary_kv_store(rotary, DType::bf16, true, crew);
      if (last && a.num_out == 0) return;
      Attention attention = a.attention;
      attention.query = b.query, attention.out = b.attended, attention.sliding_window = layer.window;
      attention.sinks = layer.sinks;
      attention.key_cache = rotary.key_cache, attention.value_cache = rotary.value_cache;
      paged_attention(attention, *a.plans[layer.plan], DType::bf16, crew);
      if (last) {
        gather((bf16*)b.attended, (bf16*)b.query, layer.output.in_features);
        gather((bf16*)b.residual, (bf16*)b.sum, a.hidden);
        std::swap(b.attended, b.query), std::swap(b.residual, b.sum);
        rows = a.num_out;
      }
      product(b.attended, layer.output, b.y, rows, layer.experts ? &layer.experts->router : &layer.gate_up);
      if (layer.attention_post_norm) {
        norm(b.y, nullptr, layer.attention_post_norm, b.x, nullptr, rows);
        std::swap(b.x, b.y);
      }
      norm(b.y, b.residual, layer.mlp_norm, b.x, b.sum, rows);
      std::swap(b.residual, b.sum);
      if (layer.experts) {
        experts(*layer.experts, b.x, b.x, b.y, rows, a.activation, *a.expert_buffers, index, crew);
      } else {
        product(b.x, layer.gate_up, b.wide, rows, &layer.down);
        const int64_t width = layer.down.in_features;
        silu_and_mul(b.wide, b.activated, rows, width, 2 * width, a.activation, DType::bf16, crew);
        product(b.activated, layer.down, b.y, rows, last ? nullptr : &a.layers[index + 1].qkv);
      }
      if (layer.mlp_post_norm) {
        norm(b.y, nullptr, layer.mlp_post_norm, b.x, nullptr, rows);
        std::swap(b.x, b.y);
      }
      norm(b.y, b.residual, layer.next_norm, last ? a.out : b.x, b.sum, rows);
      std::swap(b.residual, b.sum);
    }
  }
};

}  // namespace

void forward(const Forward& a, Crew& crew) { Pass{a, crew}.run(); }

}  // namespace raydix
