// Layer normalisation: out = (s - m) / sqrt(mean((s - m)^2) + eps) * weight + bias, with m = mean(s), and s = x or
// x + residual rounded to x's dtype. One thread handles whole rows; each sum over a row is taken in sixteen lanes, then
// across them.
#include <cmath>

#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

// The vectors of a row in their order: `visit(offset, load, store)`, where the last vector may be a part of one.
template <class Visit>
INLINE void each_vector(int64_t width, Visit visit) {
  const int64_t whole = width / LANES * LANES;
  const auto load_all = [](const auto* p) { return load(p); };
  const auto store_all = [](auto* p, f32x16 v) { store(p, v); };
  for (int64_t i = 0; i < whole; i += LANES) visit(i, load_all, store_all);
  const int64_t rest = width - whole;
  if (!rest) return;
  visit(whole, [=](const auto* p) { return load_part(p, rest); }, [=](auto* p, f32x16 v) { store_part(p, v, rest); });
}

template <class T>
void norm_row(const T* x, const T* residual, const float* weight, const float* bias, T* out, T* sum, int64_t width,
              float eps) {
  f32x16 total{};
  each_vector(width, [&](int64_t i, auto read, auto write) {
    if (!residual) {
      total = total + read(x + i);
      return;
    }
    write(sum + i, read(x + i) + read(residual + i));
    total = total + read(sum + i);
  });
  const T* source = residual ? sum : x;
  alignas(64) float mean[LANES];
  store(mean, splat(reduce_add(total) / float(width)));

  f32x16 squares{};
  each_vector(width, [&](int64_t i, auto read, auto) {
    const f32x16 v = read(source + i) - read(mean);  // lanes behind the row's end are zero in both
    squares = fused(v, v, squares);
  });
  const float factor = 1.0f / std::sqrt(reduce_add(squares) / float(width) + eps);
  each_vector(width, [&](int64_t i, auto read, auto write) {
    const f32x16 v = (read(source + i) - read(mean)) * factor * read(weight + i);
    write(out + i, bias ? v + read(bias + i) : v);
  });
}

template <class T>
void norm_rows(const LayerNorm& a, Crew& crew) {
  crew.share(a.rows, grain(a.width), [&](int64_t row) {
    const T* other = a.residual ? (const T*)a.residual + row * a.width : nullptr;
    T* kept = a.residual ? (T*)a.sum + row * a.width : nullptr;
    const float* weight = a.weight + row % a.groups * a.width;
    norm_row((const T*)a.x + row * a.stride, other, weight, a.bias, (T*)a.out + row * a.width, kept, a.width, a.eps);
  });
}

}  // namespace

void layer_norm(const LayerNorm& a, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return norm_rows<float>(a, crew);
  return dtype == DType::bf16 ? norm_rows<bf16>(a, crew) : norm_rows<fp16>(a, crew);
}

}  // namespace raydix
