// RMS normalisation: out = s / sqrt(mean(s^2) + eps) * weight, with s = x or x + residual rounded to x's dtype.
// One thread handles whole rows; the squares of a row are summed in sixteen lanes, then across them.
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

}  // namespace

void rms_norm(const void* x, const void* residual, const void* weight, void* out, void* sum, int64_t rows,
              int64_t width, int64_t stride, float eps, DType dtype, bool float_weight, Crew& crew) {
  auto run = [&](auto kernel) { kernel(x, residual, weight, out, sum, rows, width, stride, eps, crew); };
  if (dtype == DType::f32) return run(norm_rows<float, float>);
  if (dtype == DType::bf16) return float_weight ? run(norm_rows<bf16, float>) : run(norm_rows<bf16, bf16>);
  return float_weight ? run(norm_rows<fp16, float>) : run(norm_rows<fp16, fp16>);
}

}  // namespace raydix
