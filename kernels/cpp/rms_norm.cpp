// RMS normalisation: out = s / sqrt(mean(s^2) + eps) * weight, with s = x or x + residual rounded to x's dtype.
// One thread handles whole rows; the squares of a row are summed in sixteen lanes, then across them. And the gated norm,
// out = g / sqrt(mean of its group(g^2) + eps) * weight, with g = x * gate * sigmoid(gate) in float32.
#include <algorithm>
#include <cmath>

#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

template <class T>
INLINE f32x16 rounded(f32x16 v, T* keep) {
  store(keep, v);
  return load(keep);
}

template <class T, class W>
void norm_row(const T* x, const T* residual, const W* weight, T* out, T* sum, int64_t width, float eps) {
  f32x16 squares{};
  const int64_t whole = width / LANES * LANES, rest = width - whole;
  const T* source = residual ? sum : x;
  for (int64_t i = 0; i < whole; i += LANES) {
    const f32x16 v = residual ? rounded(load(x + i) + load(residual + i), sum + i) : load(x + i);
    squares = fused(v, v, squares);
  }
  if (rest) {
    f32x16 v = load_part(x + whole, rest);
    if (residual) {
      store_part(sum + whole, v + load_part(residual + whole, rest), rest);
      v = load_part(sum + whole, rest);
    }
    squares = fused(v, v, squares);
  }
  const float factor = 1.0f / std::sqrt(reduce_add(squares) / float(width) + eps);
  for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(source + i) * factor * load(weight + i));
  if (rest) store_part(out + whole, load_part(source + whole, rest) * factor * load_part(weight + whole, rest), rest);
}

template <class T, class W>
void norm_rows(const void* x, const void* residual, const void* weight, void* out, void* sum, int64_t rows,
               int64_t width, int64_t stride, float eps, Crew& crew) {
  crew.share(rows, grain(width), [&](int64_t row) {
    const T* other = residual ? (const T*)residual + row * width : nullptr;
    T* kept = residual ? (T*)sum + row * width : nullptr;
    norm_row((const T*)x + row * stride, other, (const W*)weight, (T*)out + row * width, kept, width, eps);
  });
}

// The first `count` lanes, of which all but a row's last ones are whole.
template <class T>
INLINE f32x16 lanes(const T* p, int64_t count) {
  return count == LANES ? load(p) : load_part(p, count);
}

template <class T>
INLINE void keep_lanes(T* p, f32x16 v, int64_t count) {
  count == LANES ? store(p, v) : store_part(p, v, count);
}

template <class T>
void gated_row(const GatedNorm& a, int64_t row) {
  const int64_t size = a.width / a.groups;
  const T *x = (const T*)a.x + row * a.x_stride, *gate = (const T*)a.gate + row * a.gate_stride;
  float* kept = a.scratch + row * a.width;
  for (int64_t start = 0; start < a.width; start += size) {
    f32x16 squares{};
    for (int64_t i = start; i < start + size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, start + size - i);
      const f32x16 g = lanes(gate + i, count);
      const f32x16 v = lanes(x + i, count) * (g / (1.0f + exp(-select(g < -88.0f, splat(-88.0f), g))));
      keep_lanes(kept + i, v, count);
      squares = fused(v, v, squares);
    }
    const float factor = 1.0f / std::sqrt(reduce_add(squares) / float(size) + a.eps);
    for (int64_t i = start; i < start + size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, start + size - i);
      const f32x16 normed = lanes(kept + i, count) * factor * lanes(a.weight + i, count);
      keep_lanes((T*)a.out + row * a.width + i, normed, count);
    }
  }
}

template <class T>
void gated_rows(const GatedNorm& a, Crew& crew) {
  crew.share(a.rows, grain(2 * a.width), [&](int64_t row) { gated_row<T>(a, row); });
}

}  // namespace

void gated_rms_norm(const GatedNorm& a, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return gated_rows<float>(a, crew);
  return dtype == DType::bf16 ? gated_rows<bf16>(a, crew) : gated_rows<fp16>(a, crew);
}

void rms_norm(const void* x, const void* residual, const void* weight, void* out, void* sum, int64_t rows,
              int64_t width, int64_t stride, float eps, DType dtype, bool float_weight, Crew& crew) {
  auto run = [&](auto kernel) { kernel(x, residual, weight, out, sum, rows, width, stride, eps, crew); };
  if (dtype == DType::f32) return run(norm_rows<float, float>);
  if (dtype == DType::bf16) return float_weight ? run(norm_rows<bf16, float>) : run(norm_rows<bf16, bf16>);
  return float_weight ? run(norm_rows<fp16, float>) : run(norm_rows<fp16, fp16>);
}

}  // namespace raydix
