// Sampling, one row per task: penalties and bias, log-probabilities, mask, truncation, largest logit plus noise.
//
// Sums over the vocabulary run over pieces of PIECE tokens, each summed in sixteen lanes, the pieces in double: one
// order, whatever else is in the batch.
#include <algorithm>
#include <cmath>
#include <vector>

#include "noise.h"
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

constexpr int64_t PIECE = 1024;
constexpr int64_t BUCKETS = 2048;           // of distance to the largest logit, by temperature,
constexpr float BUCKETS_PER_NAT = 64.0f;  // so that the last holds what is less likely than e^-32 of the best

struct Scratch {
  std::vector<float> logits, likelihoods, groups;
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
    if (any(found)) break;
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
  over(from, count, [&](f32x16 v, int64_t i, int64_t n) { store_part(to + i, select(v == v, v, splat(-INFINITE)), n); });
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

// to[i] = e^((z[i] - origin) / temperature) over one piece; returns their sum.
INLINE float weigh_piece(const float* z, float* to, int64_t count, float origin, float temperature) {
  f32x16 total{};
  over(z, count, [&](f32x16 v, int64_t i, int64_t n) {
    const f32x16 p = exp((v - origin) / temperature);
    store_part(to + i, p, n);
    total += n == LANES ? p : load_part(to + i, n);
  });
  return reduce_add(total);
}

// The same over the vocabulary; inline, for a temperature of 1 needs no division.
INLINE double weigh(const float* z, float* to, int64_t vocabulary, float origin, float temperature) {
  double total = 0;
  for (int64_t at = 0; at < vocabulary; at += PIECE)
    total += weigh_piece(z + at, to + at, std::min(PIECE, vocabulary - at), origin, temperature);
  return total;
}

// z = -inf where the mask has no bit.
void ban(const int32_t* bits, float* z, int64_t vocabulary) {
  for (int64_t first = 0; first < vocabulary; first += 32) {
    const uint32_t word = uint32_t(bits[first / 32]);
    if (word == ~uint32_t(0)) continue;
    const int64_t count = std::min<int64_t>(32, vocabulary - first);
    for (int64_t i = 0; i < count; ++i) z[first + i] = (word >> i) & 1 ? z[first + i] : -INFINITE;
  }
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

// The largest logit of each group, padded with -inf to a multiple of BATCH; returns the largest of all.
template <class T>
float group_logits(const T* z, int64_t vocabulary, std::vector<float>& of) {
  const int64_t whole = vocabulary / SPAN, spans = (vocabulary + SPAN - 1) / SPAN;
  of.assign(size_t((spans * LANES + BATCH - 1) / BATCH * BATCH), -INFINITE);
  f32x16 origin = splat(-INFINITE);
  for (int64_t i = 0; i < whole; ++i) {
    f32x16 best = splat(-INFINITE);
    for (int64_t j = 0; j < SPAN; j += LANES) best = maximum(load(z + i * SPAN + j), best);
    store(of.data() + i * LANES, best);
    origin = maximum(best, origin);
  }
  float largest = reduce_max(origin);
  for (int64_t id = whole * SPAN; id < vocabulary; ++id) {
    float& best = of[whole * LANES + id % LANES];
    best = std::max(best, to_float(z[id]));
    largest = std::max(largest, best);
  }
  return largest;
}

// Finds the largest (z - origin) / temperature + noise, lowest id on ties, where `origin` is the largest logit.
//
// Few tokens need their noise. A group's largest logit and its most noise bound what its members reach, so groups are
// gone through by their bounds, the largest first, until no other reaches the best token found.
template <class T>
class Drawing {
 public:
  // `groups`: the largest logits of groups, as `group_logits` leaves them; overwritten.
  Drawing(const T* z, int64_t vocabulary, float origin, float temperature, const Noise& noise,
          std::vector<float>& groups)
      : z(z), vocabulary(vocabulary), origin(origin), temperature(temperature), noise(noise), reach(groups) {
    const float slope = std::min(1.0f / temperature, std::numeric_limits<float>::max());
    f32x16 most[4];
    for (int64_t first = 0; first < int64_t(reach.size()); first += BATCH) {
      noise.bounds(first, most);
      for (int j = 0; j < 4; ++j) {
        float* at = reach.data() + first + j * LANES;
        store(at, fused(load(at) - origin, splat(slope), most[j]));
      }
    }
  }

  int64_t winner() {
    const int64_t count = int64_t(reach.size());
    for (;;) {
      const float farthest = largest(reach.data(), count);
      if (!(farthest >= best) || farthest == -INFINITE) return chosen;
      const int64_t group = position_of(reach.data(), count, farthest);
      reach[group] = -INFINITE;
      consider(group);
    }
  }

 private:
  const T* z;
  const int64_t vocabulary;
  const float origin, temperature;
  const Noise& noise;
  std::vector<float>& reach;  // at least the best score in each group that was not considered
  float best = -INFINITE;
  int64_t chosen = 0;

  void consider(int64_t group) {
    const Noise::First first = noise.first(group);
    const Words words = noise.words(group * (GROUP / 4), MEMBERS);
    for (int64_t member = 0; member < GROUP; ++member) {
      const int64_t id = group / LANES * SPAN + member * LANES + group % LANES;
      if (id >= vocabulary || !(to_float(z[id]) > -INFINITE)) continue;
      float time = first.time;
      if (member != first.member) time = time + exponential(words.of[member % 4][member / 4], 0x1p-32f);
      const float score = (to_float(z[id]) - origin) / temperature - logarithm(time);
      if (score > best || (score == best && id < chosen)) best = score, chosen = id;
    }
  }
};

bool truncates(const Sample& a, int64_t row) {
  return a.min_p[row] > 0 || (a.top_k[row] > 0 && a.top_k[row] < a.vocabulary) || a.top_p[row] < 1;
}

// The token of a row whose groups' largest logits are in `scratch.groups`, `origin` among them.
template <class T>
int64_t draw(const Sample& a, int64_t row, const T* z, float origin, Scratch& scratch) {
  if (a.temperature[row] == 0 || !std::isfinite(origin)) return position_of(z, a.vocabulary, origin);
  const Noise noise(a.seeds[row], a.positions[row]);
  return Drawing<T>(z, a.vocabulary, origin, a.temperature[row], noise, scratch.groups).winner();
}

template <class T>
void one_row(const Sample& a, int64_t row, Scratch& scratch) {
  const T* logits = (const T*)a.logits + row * a.stride;
  const bool adjusted = (a.presence && a.penalty_offsets[row] < a.penalty_offsets[row + 1]) ||
                        (a.bias_offsets && a.bias_offsets[row] < a.bias_offsets[row + 1]);
  const float temperature = a.temperature[row];
  const int64_t wanted = a.num_logprobs ? a.num_logprobs[row] : -1, vocabulary = a.vocabulary;
  const bool masked = a.mask_rows && a.mask_rows[row] >= 0 && !a.given;
  const bool truncated = temperature > 0 && truncates(a, row) && !a.given;
  if (wanted < 0 && !adjusted && !masked && !truncated && !a.given) {
    const float origin =
        temperature == 0 ? largest(logits, vocabulary) : group_logits(logits, vocabulary, scratch.groups);
    a.token_ids[row] = draw(a, row, logits, origin, scratch);
    return;
  }
  scratch.logits.resize(size_t(vocabulary)), scratch.likelihoods.resize(size_t(vocabulary));
  float *z = scratch.logits.data(), *p = scratch.likelihoods.data();
  widen(logits, z, vocabulary);
  penalise(a, row, z);
  float origin = group_logits(z, vocabulary, scratch.groups);
  const double log_sum = wanted < 0 ? 0 : double(origin) + std::log(weigh(z, p, vocabulary, origin, 1.0f));
  if (wanted >= 0) rank(a, row, z, wanted, log_sum, scratch);
  if (masked) {
    ban(a.mask_bits + a.mask_rows[row] * ((vocabulary + 31) / 32), z, vocabulary);
    origin = group_logits(z, vocabulary, scratch.groups);
  }
  if (truncated && std::isfinite(origin)) {
    if (wanted < 0 || masked || temperature != 1.0f) weigh(z, p, vocabulary, origin, temperature);
    Truncation(a, row, origin, scratch);
    for (int64_t i = 0; i < vocabulary; ++i) z[i] = p[i] > 0 ? z[i] : -INFINITE;
    group_logits(z, vocabulary, scratch.groups);
  }
  a.token_ids[row] = a.given ? a.given[row] : draw(a, row, z, origin, scratch);
  if (a.given) a.ranks[row] = place_of(z, vocabulary, a.given[row]);
  if (wanted >= 0) a.logprobs[row] = float(double(z[a.token_ids[row]]) - log_sum);
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
