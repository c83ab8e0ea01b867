// Sampling, one row per task: penalties and bias, log-probabilities, truncation, inverse CDF in id order.
//
// Sums over the vocabulary run over pieces of PIECE tokens, each summed in sixteen lanes, the pieces in double: one
// order, whatever else is in the batch.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

constexpr int64_t PIECE = 1024;
constexpr int64_t BUCKETS = 2048;           // of distance to the largest logit, by temperature,
constexpr float BUCKETS_PER_NAT = 64.0f;  // so that the last holds what is less likely than e^-32 of the best

struct Scratch {
  std::vector<float> logits, likelihoods;
  std::vector<double> pieces;
  std::vector<int32_t> ids;
};

// Calls `body(vector, offset, count)` over `count` elements of `from`, the last vector possibly partial.
template <class T, class Body>
INLINE void over(const T* from, int64_t count, Body body) {
  const int64_t whole = count / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) body(load(from + i), i, LANES);
  if (whole < count) body(load_part(from + whole, count - whole), whole, count - whole);
}

template <class T>
float largest(const T* from, int64_t count) {
  f32x16 best[4] = {splat(-INFINITE), splat(-INFINITE), splat(-INFINITE), splat(-INFINITE)};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) best[j] = maximum(load(from + i + j * LANES), best[j]);
  float rest = -INFINITE;
  for (; i < count; ++i) rest = to_float(from[i]) > rest ? to_float(from[i]) : rest;
  return std::max(rest, reduce_max(maximum(maximum(best[0], best[1]), maximum(best[2], best[3]))));
}

// The first position of `value`; 0 where every logit is -inf.
template <class T>
int64_t position_of(const T* from, int64_t count, float value) {
  constexpr int64_t STEP = 4 * LANES;
  int64_t i = 0;
  for (; i + STEP <= count; i += STEP) {
    i32x16 found{};
    for (int j = 0; j < 4; ++j) found |= load(from + i + j * LANES) == value;
    if (reduce_max(bit_cast<f32x16>(found & 0x3f800000)) > 0.0f) break;
  }
  for (; i < count; ++i)
    if (to_float(from[i]) == value) return i;
  return 0;
}

// The place of `id` among all, from 1: the largest first, ties by id.
int64_t place_of(const float* z, int64_t count, int64_t id) {
  const float value = z[id];
  int32_t before = 0;
  for (int64_t i = 0; i < id; ++i) before += z[i] >= value;
  for (int64_t i = id + 1; i < count; ++i) before += z[i] > value;
  return int64_t(before) + 1;
}

template <class T>
void widen(const T* from, float* to, int64_t count) {
  over(from, count, [&](f32x16 v, int64_t i, int64_t n) { store_part(to + i, v == v ? v : splat(-INFINITE), n); });
}

void penalise(const Sample& a, int64_t row, float* z) {
  if (a.presence)
    for (int64_t e = a.penalty_offsets[row]; e < a.penalty_offsets[row + 1]; ++e) {
      float& x = z[a.penalty_ids[e]];
      const float count = float(a.output_counts[e]);
      x = x > 0 ? x / a.repetition[row] : x * a.repetition[row];
      x = x - a.frequency[row] * count - a.presence[row] * (count > 0 ? 1.0f : 0.0f);
    }
  if (a.bias_offsets)
    for (int64_t e = a.bias_offsets[row]; e < a.bias_offsets[row + 1]; ++e) z[a.bias_ids[e]] += a.bias_values[e];
}

// likelihoods[i] = e^((z[i] - origin) / temperature) over one piece; returns their sum.
INLINE float likelihoods_of(const float* z, float* to, int64_t count, float origin, float temperature) {
  f32x16 total{};
  over(z, count, [&](f32x16 v, int64_t i, int64_t n) {
    const f32x16 p = exp((v - origin) / temperature);
    store_part(to + i, p, n);
    total += n == LANES ? p : load_part(to + i, n);
  });
  return reduce_add(total);
}

void rank(const Sample& a, int64_t row, const float* z, int64_t count, double log_sum, Scratch& scratch) {
  int64_t* ids = a.top_ids + row * a.widest;
  auto before = [z](int32_t x, int32_t y) { return z[x] > z[y] || (z[x] == z[y] && x < y); };
  std::vector<int32_t>& best = scratch.ids;
  best.clear();
  // Keeps `count` ids in order, going through z in blocks that mostly hold nothing better than the worst kept.
  for (int64_t i = 0; i < a.vocabulary; i += 64) {
    const int64_t end = std::min(i + 64, a.vocabulary);
    if (count == 0 || (int64_t(best.size()) == count && !(largest(z + i, end - i) > z[best.back()]))) continue;
    for (int64_t id = i; id < end; ++id) {
      if (int64_t(best.size()) == count) {
        if (!(z[id] > z[best.back()])) continue;
        best.pop_back();
      }
      best.insert(std::upper_bound(best.begin(), best.end(), int32_t(id), before), int32_t(id));
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = best[i];
    a.top_logprobs[row * a.widest + i] = float(double(z[best[i]]) - log_sum);
  }
}

// Zeroes the likelihood of every token outside min-p, top-k and top-p.
class Truncation {
 public:
  Truncation(const Sample& a, int64_t row, float origin, Scratch& scratch)
      : vocabulary(a.vocabulary), temperature(a.temperature[row]), origin(origin), scratch(scratch) {
    z = scratch.logits.data(), p = scratch.likelihoods.data();
    const float floor = a.min_p[row];
    if (floor > 0)
      for (int64_t i = 0; i < vocabulary; ++i) p[i] = p[i] >= floor || z[i] == origin ? p[i] : 0.0f;
    const int64_t k = a.top_k[row];
    if (k > 0 && k < vocabulary) keep_best(k);
    if (a.top_p[row] < 1) keep_share(a.top_p[row]);
  }

 private:
  const int64_t vocabulary;
  const float temperature, origin;
  Scratch& scratch;
  const float* z;
  float* p;

  bool before(int32_t x, int32_t y) const { return z[x] > z[y] || (z[x] == z[y] && x < y); }

  // Monotonic in z: the best token is in bucket 0.
  int32_t bucket(int64_t i) const {
    const float distance = (origin - z[i]) / temperature * BUCKETS_PER_NAT;
    return distance < float(BUCKETS - 1) ? int32_t(distance) : int32_t(BUCKETS - 1);
  }

  // Ids with some likelihood left in one bucket.
  std::vector<int32_t>& members(int32_t wanted) {
    scratch.ids.clear();
    for (int64_t i = 0; i < vocabulary; ++i)
      if (p[i] > 0 && bucket(i) == wanted) scratch.ids.push_back(int32_t(i));
    return scratch.ids;
  }

  // Nothing ranked after `last` stays.
  void cut_after(int32_t last) {
    for (int64_t i = 0; i < vocabulary; ++i) p[i] = z[i] > z[last] || (z[i] == z[last] && i <= last) ? p[i] : 0.0f;
  }

  void keep_best(int64_t k) {
    std::vector<int64_t> counts(BUCKETS);
    for (int64_t i = 0; i < vocabulary; ++i)
      if (p[i] > 0) ++counts[bucket(i)];
    int64_t kept = 0;
    for (int32_t b = 0; b < BUCKETS; ++b) {
      if (kept + counts[b] < k) {
        kept += counts[b];
        continue;
      }
      std::vector<int32_t>& ids = members(b);
      const auto last = ids.begin() + (k - kept - 1);
      std::nth_element(ids.begin(), last, ids.end(), [this](int32_t x, int32_t y) { return before(x, y); });
      return cut_after(*last);
    }
  }

  void keep_share(float share) {
    std::vector<double> masses(BUCKETS);
    for (int64_t i = 0; i < vocabulary; ++i)
      if (p[i] > 0) masses[bucket(i)] += double(p[i]);
    double total = 0;
    for (double mass : masses) total += mass;
    const double wanted = double(share) * total;
    double kept = 0;
    for (int32_t b = 0; b < BUCKETS; ++b) {
      if (kept + masses[b] < wanted && b + 1 < BUCKETS) {
        kept += masses[b];
        continue;
      }
      std::vector<int32_t>& ids = members(b);
      if (ids.empty()) return;
      std::sort(ids.begin(), ids.end(), [this](int32_t x, int32_t y) { return before(x, y); });
      size_t last = 0;
      for (kept += double(p[ids[0]]); last + 1 < ids.size() && kept < wanted; kept += double(p[ids[last]])) ++last;
      return cut_after(ids[last]);
    }
  }
};

// The first token in id order at which the cumulative likelihood exceeds `uniform` of the whole.
int64_t draw(const float* p, int64_t vocabulary, const std::vector<double>& pieces, float uniform) {
  double total = 0, passed = 0;
  for (double piece : pieces) total += piece;
  const double target = double(uniform) * total;
  size_t chosen = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i] <= 0) continue;
    chosen = i;
    if (passed + pieces[i] > target) break;
    passed += pieces[i];
  }
  // Where rounding carries the scan past the end, the last possible token of the last piece is meant.
  const int64_t begin = int64_t(chosen) * PIECE, end = std::min(begin + PIECE, vocabulary);
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (p[i] <= 0) continue;
    last = i, passed += double(p[i]);
    if (passed > target) break;
  }
  return last;
}

template <class T>
void one_row(const Sample& a, int64_t row, Scratch& scratch) {
  const T* logits = (const T*)a.logits + row * a.stride;
  const bool adjusted = (a.presence && a.penalty_offsets[row] < a.penalty_offsets[row + 1]) ||
                        (a.bias_offsets && a.bias_offsets[row] < a.bias_offsets[row + 1]);
  const float temperature = a.temperature[row];
  const int64_t wanted = a.num_logprobs ? a.num_logprobs[row] : -1, vocabulary = a.vocabulary;
  if (temperature == 0 && wanted < 0 && !adjusted && !a.given) {
    a.token_ids[row] = position_of(logits, vocabulary, largest(logits, vocabulary));
    return;
  }
  scratch.logits.resize(size_t(vocabulary)), scratch.likelihoods.resize(size_t(vocabulary));
  scratch.pieces.resize(size_t((vocabulary + PIECE - 1) / PIECE));
  float *z = scratch.logits.data(), *p = scratch.likelihoods.data();
  widen(logits, z, vocabulary);
  penalise(a, row, z);
  const float origin = largest(z, vocabulary);
  auto weigh = [&](float by) {
    double total = 0;
    for (size_t i = 0; i < scratch.pieces.size(); ++i) {
      const int64_t at = int64_t(i) * PIECE, count = std::min(PIECE, vocabulary - at);
      scratch.pieces[i] = likelihoods_of(z + at, p + at, count, origin, by);
      total += scratch.pieces[i];
    }
    return total;
  };
  const double log_sum = wanted < 0 ? 0 : double(origin) + std::log(weigh(1.0f));
  if (a.given) {
    a.token_ids[row] = a.given[row];
    a.ranks[row] = place_of(z, vocabulary, a.given[row]);
  } else if (temperature == 0 || !std::isfinite(origin)) {
    a.token_ids[row] = position_of(z, vocabulary, origin);
  } else {
    if (wanted < 0 || temperature != 1.0f) weigh(temperature);
    if (a.min_p[row] > 0 || (a.top_k[row] > 0 && a.top_k[row] < vocabulary) || a.top_p[row] < 1) {
      Truncation(a, row, origin, scratch);
      for (size_t i = 0; i < scratch.pieces.size(); ++i) {
        f32x16 total{};
        const int64_t at = int64_t(i) * PIECE;
        over(p + at, std::min(PIECE, vocabulary - at), [&](f32x16 v, int64_t, int64_t) { total += v; });
        scratch.pieces[i] = reduce_add(total);
      }
    }
    a.token_ids[row] = draw(p, vocabulary, scratch.pieces, a.uniform[row]);
  }
  if (wanted < 0) return;
  a.logprobs[row] = float(double(z[a.token_ids[row]]) - log_sum);
  rank(a, row, z, wanted, log_sum, scratch);
}

template <class T>
void all_rows(const Sample& a, Crew& crew) {
  crew.share(a.batch, [&](int64_t row) {
    thread_local Scratch scratch;
    one_row<T>(a, row, scratch);
  });
}

}  // namespace

void sample(const Sample& a, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return all_rows<float>(a, crew);
  return dtype == DType::bf16 ? all_rows<bf16>(a, crew) : all_rows<fp16>(a, crew);
}

}  // namespace raydix
