// Optional per-head RMS norm of q and k, rotation of both by position, and k, v written to their slots.
// One thread handles whole tokens: every head of a token is (x1 c - x2 s, x2 c + x1 s) on its two halves.
#include <cmath>

#include "narrow.h"
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

// `head` [head_dim] float32, in place.
template <class W>
void norm_head(float* head, const W* weight, int64_t head_dim, float eps) {
  f32x16 squares{};
  for (int64_t i = 0; i < head_dim; i += LANES) {
    const f32x16 v = load(head + i);
    squares = fused(v, v, squares);
  }
  const float factor = 1.0f / std::sqrt(reduce_add(squares) / float(head_dim) + eps);
  for (int64_t i = 0; i < head_dim; i += LANES) store(head + i, load(head + i) * factor * load(weight + i));
}

// head_dim is a multiple of 16, so its half may end in the middle of a vector: the tail overlaps, never strays.
template <class T>
void rotate_head(const float* head, const float* cos_sin, T* to, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t count = half - i < LANES ? half - i : LANES;
    if (count == LANES) {
      const f32x16 first = load(head + i), second = load(head + half + i);
      const f32x16 c = load(cos_sin + i), s = load(cos_sin + half + i);
      store(to + i, first * c - second * s);
      store(to + half + i, second * c + first * s);
    } else {
      const f32x16 first = load_part(head + i, count), second = load_part(head + half + i, count);
      const f32x16 c = load_part(cos_sin + i, count), s = load_part(cos_sin + half + i, count);
      store_part(to + i, first * c - second * s, count);
      store_part(to + half + i, second * c + first * s, count);
    }
  }
}

template <class T, class W>
void one_token(const RotaryStore& a, int64_t token) {
  alignas(64) float head[1024], rotated[1024];
  const int64_t dim = a.head_dim, slot = a.slot_mapping[token];
  const int64_t block = slot / a.block_size, offset = slot % a.block_size;
  const T* row = (const T*)a.qkv + token * a.qkv_stride;
  const float* cos_sin = a.cos_sin + a.positions[token] * dim;
  auto place = [&](int64_t stride, int64_t h) { return block * stride + (h * a.block_size + offset) * a.row_size; };
  for (int64_t h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
    const bool is_key = h >= a.num_heads;
    if (is_key && slot < 0) break;
    for (int64_t i = 0; i < dim; i += LANES) store(head + i, load(row + h * dim + i));
    const W* norm = (const W*)(is_key ? a.k_norm : a.q_norm);
    if (norm) norm_head(head, norm, dim, a.eps);
    if (!is_key) {
      rotate_head(head, cos_sin, (T*)a.query + (token * a.num_heads + h) * dim, dim);
    } else if (const int64_t at = place(a.key_stride, h - a.num_heads); a.is_narrow) {
      rotate_head(head, cos_sin, rotated, dim);
      narrow_row(rotated, (int8_t*)a.key_cache + at, dim);
    } else {
      rotate_head(head, cos_sin, (T*)a.key_cache + at, dim);
    }
  }
  if (slot < 0) return;
  const T* values = row + (a.num_heads + a.num_kv_heads) * dim;
  for (int64_t h = 0; h < a.num_kv_heads; ++h, values += dim) {
    if (const int64_t at = place(a.value_stride, h); a.is_narrow) {
      for (int64_t i = 0; i < dim; i += LANES) store(head + i, load(values + i));
      narrow_row(head, (int8_t*)a.value_cache + at, dim);
    } else {
      std::memcpy((T*)a.value_cache + at, values, size_t(dim) * sizeof(T));
    }
  }
}

template <class T, class W>
void all_tokens(const RotaryStore& a, Crew& crew) {
  crew.share(a.num_tokens, grain(a.qkv_stride), [&](int64_t token) { one_token<T, W>(a, token); });
}

}  // namespace

void rotary_kv_store(const RotaryStore& a, DType dtype, bool float_norms, Crew& crew) {
  if (dtype == DType::f32) return all_tokens<float, float>(a, crew);
  if (dtype == DType::bf16) return float_norms ? all_tokens<bf16, float>(a, crew) : all_tokens<bf16, bf16>(a, crew);
  return float_norms ? all_tokens<fp16, float>(a, crew) : all_tokens<fp16, fp16>(a, crew);
}

}  // namespace raydix
