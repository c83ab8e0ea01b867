// Attention of query chunks over paged KV.
//
// The keys of a sequence are cut into tiles of TILE keys at absolute positions 0, TILE, 2 TILE... For each query row
// and tile there is one partial result (maximum, sum, weighted values), computed from nothing but that row and that
// tile in one fixed order; a row's partial results are merged in the order of the tiles. So its bits cannot depend on
// the chunk it came in, on other rows, on how the work was split, or on threads. A key a row may not see gets weight
// zero, and keys no row of the task may see are packed as zeros, whatever the pool holds there.
//
// A task is (sequence, KV heads, run of queries): its rows are the queries times the heads of the group, and each packed
// tile serves all of them. Tiles that several sequences with few queries have in common, being in the same blocks, are
// read and packed once for the rows of all. Where tasks are too few for the threads, runs of tiles become pieces of
// their own. Both leave partial results, which the tasks merge before they go on, by the same code.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "narrow.h"
#include "ops.h"
#include "vec.h"

namespace raydix {
namespace {

constexpr int64_t TILE = 128;                // keys
constexpr int64_t VECTORS = TILE / LANES;    // of scores per row and tile
constexpr int64_t ROWS = 6;                  // handled together in registers
constexpr int64_t MOST_HEAD_DIM = 1024;
constexpr int64_t AHEAD = LANES;             // keys asked of memory before their turn
constexpr int64_t TASK_ROWS = 96;            // about as many share a packed tile
constexpr int64_t FEW_ROWS = 16;             // up to here memory, not arithmetic, sets the pace
constexpr int64_t PACKED_BYTES = 128 * 1024; // of keys and values of all heads of a task: stays in the L2 cache
constexpr int64_t SHARED_BYTES = 256 << 20;  // at most, of partial results of shared tiles
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// Running state of one row: maximum in units of log2, sum of weights. Its weighted values are kept apart.
struct State {
  float maximum = -INFINITE, sum = 0.0f;
};

// Adds the partial results of `count` <= LANES rows to their states; gives the factors for old and new values.
INLINE void merge_states(State* states, const float* maxima, const float* sums, int64_t count, float* keep,
                         float* add) {
  alignas(64) float max[LANES], sum[LANES] = {};
  std::fill(max, max + LANES, -INFINITE);
  for (int64_t r = 0; r < count; ++r) max[r] = states[r].maximum, sum[r] = states[r].sum;
  const f32x16 old_max = load(max), old_sum = load(sum);
  std::copy(maxima, maxima + count, max), std::copy(sums, sums + count, sum);
  const f32x16 new_max = load(max), new_sum = load(sum);
  const f32x16 both = maximum(new_max, old_max);
  const f32x16 origin = select(both == -INFINITE, splat(0.0f), both);
  const f32x16 keep_all = exp2(old_max - origin), add_all = exp2(new_max - origin);
  store(max, both), store(sum, fused(old_sum, keep_all, new_sum * add_all));
  for (int64_t r = 0; r < count; ++r) states[r] = {max[r], sum[r]};
  store_part(keep, keep_all, count), store_part(add, add_all, count);
}

// Sixteen weighted values of one row.
INLINE void merge_values(float* values, f32x16 partial, float keep, float add) {
  store(values, fused(load(values), splat(keep), partial * add));
}

// The vectors of sixteen columns by which a block of `rows` rows keeps the multipliers busy, and whose sums still fit into
// the registers.
constexpr int vectors_at_once(int rows) {
#if defined(__AVX512F__)
  return rows == 1 ? 4 : 2;
#else
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}

// Any element type, on float32 arithmetic: keys packed [TILE / 16][head_dim][16 keys], values [head_dim / 16][TILE][16].
template <class T>
struct Plain {
  using Element = T;
  using Weight = float;

  static size_t packed_bytes(int64_t head_dim) { return size_t(TILE * head_dim) * sizeof(float); }

  // Packs sixteen keys, whose rows start at `rows`, as keys `at`.. of the tile. Asks memory for the rows at `soon` on
  // the way: a burst of such requests would stall, spread out they overlap with the packing.
  static void pack_keys(const T* const* rows, const T* const* soon, int64_t at, int64_t head_dim, void* packed) {
    float* to = (float*)packed + at * head_dim;
    alignas(64) float square[LANES][LANES];
    for (int64_t d = 0; d < head_dim; d += LANES) {
      for (int i = 0; i < LANES; ++i) {
        store(square[i], load(rows[i] + d));
        __builtin_prefetch(soon[i] + d);
      }
      transpose(square, to + d * LANES);
    }
  }

  static void pack_values(const T* const* rows, const T* const* soon, int64_t at, int64_t head_dim, void* packed) {
    for (int i = 0; i < LANES; ++i)
      for (int64_t d = 0; d < head_dim; d += LANES) {
        store((float*)packed + d * TILE + (at + i) * LANES, load(rows[i] + d));
        __builtin_prefetch(soon[i] + d);
      }
  }

  // Calls `done(m, n, sum)` with the sums of left[m][i] * right[n][i], sixteen columns each, for M rows and N vectors.
  // The chain of an element goes from first to last, in blocks of every shape.
  template <int M, int N, class Done>
  static INLINE void block(const float* left, int64_t stride, const float* right, int64_t panel, int64_t depth,
                           Done done) {
    f32x16 total[M][N]{};
    for (int64_t i = 0; i < depth; ++i, right += LANES) {
      f32x16 column[N];
      for (int n = 0; n < N; ++n) column[n] = load(right + n * panel);
      for (int m = 0; m < M; ++m) {
        const f32x16 x = splat(left[m * stride + i]);
        for (int n = 0; n < N; ++n) total[m][n] = fused(x, column[n], total[m][n]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) done(m, n, total[m][n]);
  }

  // The same for all vectors, `panel` floats from one to the next. A function of its own: inlined into a larger one, its
  // sums share the registers with what that one keeps, and those of six rows leave none over.
  template <int M, class Done>
  static NO_INLINE void some_rows(const float* left, int64_t stride, const float* right, int64_t panel, int64_t depth,
                        int64_t vectors, Done done) {
    constexpr int N = vectors_at_once(M);
    int64_t v = 0;
    auto after = [&](int m, int n, f32x16 sum) { done(m, v + n, sum); };
    for (; v + N <= vectors; v += N) block<M, N>(left, stride, right + v * panel, panel, depth, after);
    for (; v < vectors; ++v) block<M, 1>(left, stride, right + v * panel, panel, depth, after);
  }

  template <class Done>
  static INLINE void multiply(int64_t rows, const float* left, int64_t stride, const float* right, int64_t panel,
                              int64_t depth, int64_t vectors, Done done) {
    switch (rows) {
      case 1: return some_rows<1>(left, stride, right, panel, depth, vectors, done);
      case 2: return some_rows<2>(left, stride, right, panel, depth, vectors, done);
      case 3: return some_rows<3>(left, stride, right, panel, depth, vectors, done);
      case 4: return some_rows<4>(left, stride, right, panel, depth, vectors, done);
      case 5: return some_rows<5>(left, stride, right, panel, depth, vectors, done);
      default: return some_rows<6>(left, stride, right, panel, depth, vectors, done);
    }
  }

  static void scores(const T* const* queries, int64_t count, int64_t vectors, const void* packed, int64_t head_dim,
                     float* to) {
    alignas(64) float wide[ROWS * MOST_HEAD_DIM];
    for (int64_t r = 0; r < count; ++r)
      for (int64_t d = 0; d < head_dim; d += LANES) store(wide + r * head_dim + d, load(queries[r] + d));
    multiply(count, wide, head_dim, (const float*)packed, head_dim * LANES, head_dim, vectors,
             [to](int64_t r, int64_t v, f32x16 sum) { store(to + r * TILE + v * LANES, sum); });
  }

  static INLINE void store_weights(Weight* to, f32x16 w) { store(to, w); }

  static void weigh_values(const Weight* weights, int64_t count, int64_t keys, const void* packed, int64_t head_dim,
                           const float* keep, const float* add, float* values) {
    multiply(count, weights, TILE, (const float*)packed, TILE * LANES, keys, head_dim / LANES,
             [=](int64_t r, int64_t v, f32x16 sum) {
               merge_values(values + r * head_dim + v * LANES, sum, keep[r], add[r]);
             });
  }
};

#if defined(__AVX512BF16__)

// bfloat16 on vdpbf16ps, which multiplies pairs: keys packed [TILE / 16][head_dim / 2][16 keys] of pairs along
// head_dim, values [TILE / 2][head_dim] of pairs along keys.
struct Pairs {
  using Element = bf16;
  using Weight = bf16;

  static size_t packed_bytes(int64_t head_dim) { return size_t(TILE * head_dim) * sizeof(bf16); }

  static INLINE void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8)
      for (int j = 0; j < 4; ++j) {
        t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
        t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
      }
    for (int j = 0; j < 8; ++j) {
      r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
      r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
  }

  static void pack_keys(const bf16* const* rows, const bf16* const* soon, int64_t at, int64_t head_dim, void* packed) {
    const int64_t pairs = head_dim / 2;
    uint32_t* to = (uint32_t*)packed + at * pairs;
    for (int64_t j = 0; j < pairs; j += LANES) {
      const int count = int(std::min<int64_t>(LANES, pairs - j));
      const __mmask16 mask = __mmask16((1u << count) - 1u);
      __m512i r[16];
      for (int i = 0; i < 16; ++i) {
        r[i] = _mm512_maskz_loadu_epi32(mask, (const uint32_t*)rows[i] + j);
        __builtin_prefetch((const uint32_t*)soon[i] + j);
      }
      transpose(r);
      for (int i = 0; i < count; ++i) _mm512_storeu_si512(to + (j + i) * LANES, r[i]);
    }
  }

  static void pack_values(const bf16* const* rows, const bf16* const* soon, int64_t at, int64_t head_dim, void* packed) {
    uint32_t* to = (uint32_t*)packed + at / 2 * head_dim;
    for (int i = 0; i < LANES; i += 2, to += head_dim)
      for (int64_t d = 0; d < head_dim; d += LANES) {
        const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(rows[i] + d)));
        const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(rows[i + 1] + d)));
        _mm512_storeu_si512(to + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        __builtin_prefetch(soon[i + d / LANES % 2] + d);
      }
  }

  static INLINE __m512bh pair(const bf16* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }

  template <int M, int N>
  static INLINE void score_block(const bf16* const* queries, const uint32_t* keys, int64_t pairs, float* to) {
    __m512 total[M][N];
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = _mm512_setzero_ps();
    for (int64_t j = 0; j < pairs; ++j) {
      __m512bh k[N];
      for (int n = 0; n < N; ++n) k[n] = (__m512bh)_mm512_loadu_si512(keys + (n * pairs + j) * LANES);
      for (int m = 0; m < M; ++m) {
        const __m512bh q = pair(queries[m] + 2 * j);
        for (int n = 0; n < N; ++n) total[m][n] = _mm512_dpbf16_ps(total[m][n], q, k[n]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) _mm512_storeu_ps(to + m * TILE + n * LANES, total[m][n]);
  }

  template <int M>
  static void score_rows(const bf16* const* queries, int64_t vectors, const uint32_t* keys, int64_t pairs, float* to) {
    int64_t v = 0;
    if (M < 3)
      for (; v + 8 <= vectors; v += 8) score_block<M, 8>(queries, keys + v * LANES * pairs, pairs, to + v * LANES);
    for (; v + 4 <= vectors; v += 4) score_block<M, 4>(queries, keys + v * LANES * pairs, pairs, to + v * LANES);
    for (; v < vectors; v += 2) score_block<M, 2>(queries, keys + v * LANES * pairs, pairs, to + v * LANES);
  }

  static void scores(const bf16* const* queries, int64_t count, int64_t vectors, const void* packed, int64_t head_dim,
                     float* to) {
    const uint32_t* keys = (const uint32_t*)packed;
    switch (count) {
      case 1: return score_rows<1>(queries, vectors, keys, head_dim / 2, to);
      case 2: return score_rows<2>(queries, vectors, keys, head_dim / 2, to);
      case 3: return score_rows<3>(queries, vectors, keys, head_dim / 2, to);
      case 4: return score_rows<4>(queries, vectors, keys, head_dim / 2, to);
      case 5: return score_rows<5>(queries, vectors, keys, head_dim / 2, to);
      default: return score_rows<6>(queries, vectors, keys, head_dim / 2, to);
    }
  }

  static INLINE void store_weights(Weight* to, f32x16 w) { store(to, w); }

  template <int M, int N>
  static INLINE void value_block(const bf16* weights, int64_t pairs, const uint32_t* packed, int64_t head_dim,
                                 const float* keep, const float* add, float* values) {
    __m512 total[M][N];
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) total[m][n] = _mm512_setzero_ps();
    for (int64_t j = 0; j < pairs; ++j, packed += head_dim) {
      __m512bh v[N];
      for (int n = 0; n < N; ++n) v[n] = (__m512bh)_mm512_loadu_si512(packed + n * LANES);
      for (int m = 0; m < M; ++m) {
        const __m512bh w = pair(weights + m * TILE + 2 * j);
        for (int n = 0; n < N; ++n) total[m][n] = _mm512_dpbf16_ps(total[m][n], w, v[n]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n)
        merge_values(values + m * head_dim + n * LANES, (f32x16)total[m][n], keep[m], add[m]);
  }

  template <int M>
  static void value_rows(const bf16* weights, int64_t pairs, const uint32_t* packed, int64_t head_dim,
                         const float* keep, const float* add, float* values) {
    int64_t d = 0;
    for (; d + 64 <= head_dim; d += 64)
      value_block<M, 4>(weights, pairs, packed + d, head_dim, keep, add, values + d);
    for (; d < head_dim; d += LANES)
      value_block<M, 1>(weights, pairs, packed + d, head_dim, keep, add, values + d);
  }

  static void weigh_values(const bf16* weights, int64_t count, int64_t keys, const void* packed, int64_t head_dim,
                           const float* keep, const float* add, float* values) {
    const uint32_t* from = (const uint32_t*)packed;
    switch (count) {
      case 1: return value_rows<1>(weights, keys / 2, from, head_dim, keep, add, values);
      case 2: return value_rows<2>(weights, keys / 2, from, head_dim, keep, add, values);
      case 3: return value_rows<3>(weights, keys / 2, from, head_dim, keep, add, values);
      case 4: return value_rows<4>(weights, keys / 2, from, head_dim, keep, add, values);
      case 5: return value_rows<5>(weights, keys / 2, from, head_dim, keep, add, values);
      default: return value_rows<6>(weights, keys / 2, from, head_dim, keep, add, values);
    }
  }
};

#endif

using Task = AttentionPlan::Task;
using Queries = AttentionPlan::Queries;

// Grows and never shrinks: a fresh page costs more than the arithmetic it holds.
template <class E>
E* scratch(std::vector<E>& buffer, size_t count) {
  if (buffer.size() < count + 64 / sizeof(E)) buffer.resize(count + 64 / sizeof(E));
  const uintptr_t at = (reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t(63);
  return reinterpret_cast<E*>(at);
}

// Where sixteen keys and their values lie for the first head of a task, and how far it is from one head to the next.
// `S`: what the caches have.
template <class S>
struct Rows {
  const S *keys[LANES], *values[LANES];
  int64_t step[LANES];

  void next_head() {
    for (int i = 0; i < LANES; ++i) keys[i] += step[i], values[i] += step[i];
  }
};

// Of a sequence's first query.
int64_t first_position(const Attention& a, int64_t sequence) {
  return a.context_lens[sequence] - (a.query_start[sequence + 1] - a.query_start[sequence]);
}

// The keys that some row of a task may see.
struct Span {
  int64_t begin, end;

  Span(const Attention& a, const Task& task) {
    const Queries& queries = task.queries[0];
    const int64_t start = first_position(a, queries.sequence);
    begin = a.sliding_window ? std::max<int64_t>(0, start + queries.first - a.sliding_window + 1) : 0;
    end = start + queries.last;
  }
};

// Sixteen keys from `first` on; those that do not count are zeros.
template <class S>
Rows<S> locate(const Attention& a, const Task& task, const Span& span, int64_t first) {
  static const S zeros[MOST_HEAD_DIM + FACTOR_BYTES] = {};
  Rows<S> rows;
  const int32_t* table = a.block_tables + task.queries[0].sequence * a.table_stride;
  int64_t index = first / a.block_size, offset = first % a.block_size;
  const int64_t head_size = a.block_size * a.row_size;
  for (int64_t i = 0; i < LANES; ++i, ++offset) {
    if (offset == a.block_size) offset = 0, ++index;
    const bool counts = first + i >= span.begin && first + i < span.end;
    const int64_t block = counts ? table[index] : 0, inner = task.head * head_size + offset * a.row_size;
    rows.keys[i] = counts ? (const S*)a.key_cache + block * a.key_stride + inner : zeros;
    rows.values[i] = counts ? (const S*)a.value_cache + block * a.value_stride + inner : zeros;
    rows.step[i] = counts ? head_size : 0;
  }
  return rows;
}

// Rows of each KV head.
int64_t rows_of(const Task& task, int64_t group) {
  int64_t rows = 0;
  for (const Queries& q : task.queries) rows += (q.last - q.first) * group;
  return rows;
}

template <class Engine, class S>
class Worker {
  using T = typename Engine::Element;
  using W = typename Engine::Weight;

 public:
  Worker(const Attention& a, const Task& task, const Task* next = nullptr) : a(a), task(task), next(next), span(a, task) {
    thread_local std::vector<float> memory;
    group = a.num_heads / a.num_kv_heads;
    heads = task.head_end - task.head;
    rows = rows_of(task, group);
    const size_t packed = Engine::packed_bytes(a.head_dim) / sizeof(float) * size_t(heads);
    const size_t block = size_t(ROWS * TILE), all_rows = size_t(heads * rows), sixteen = size_t(LANES * a.head_dim);
    float* at = scratch(memory, 2 * packed + sixteen + 2 * block + all_rows * size_t(a.head_dim + 2) + 4 * size_t(rows));
    keys = at, at += packed;
    packed_values = at, at += packed;
    wide = (T*)at, at += sixteen;
    scores = at, at += block;
    weights = (W*)at, at += block;
    values = at, at += all_rows * size_t(a.head_dim);
    states = (State*)at, at += 2 * all_rows;
    tokens = (int64_t*)at, positions = tokens + rows;
    int64_t row = 0;
    for (const auto& [s, first, last] : task.queries)
      for (int64_t query = first; query < last; ++query)
        for (int64_t i = 0; i < group; ++i, ++row) {
          tokens[row] = a.query_start[s] + query, positions[row] = first_position(a, s) + query;
        }
  }

  void run() {
    const int64_t size = heads * rows * (a.head_dim + 2);
    reset();
    for (const auto& partials : task.before)
      for (int64_t tile = 0; tile < partials.tiles; ++tile)
        for (int64_t h = 0; h < heads; ++h)
          merge(partials.at + tile * partials.tile_stride + h * partials.head_stride, h);
    for (int64_t tile = task.tile; tile < task.tile_end; ++tile) {
      if (task.partials && tile > task.tile) reset();
      pack(tile);
      for (int64_t h = 0; h < heads; ++h) one_tile(tile, h);
      if (task.partials) save(task.partials + (tile - task.tile) * size);
    }
    if (!task.partials) finish();
  }

 private:
  const Attention& a;
  const Task& task;
  const Task* next;
  const Span span;
  int64_t group, heads, rows;  // rows per KV head
  int64_t *tokens, *positions;  // of each row of a head
  void *keys, *packed_values;
  T* wide;  // sixteen rows of caches in 8 bits
  float *scores, *values;
  W* weights;
  State* states;

  // The first key the row may see.
  int64_t window_begin(int64_t row) const {
    return a.sliding_window ? std::max<int64_t>(0, positions[row] - a.sliding_window + 1) : 0;
  }

  int64_t element(int64_t head, int64_t row) const {
    return (tokens[row] * a.num_heads + (task.head + head) * group + row % group) * a.head_dim;
  }

  void reset() {
    std::fill(values, values + heads * rows * a.head_dim, 0.0f);
    std::fill(states, states + heads * rows, State{});
  }

  // Keys that are packed AHEAD of those from `first` on: of this task, or of the next one of this thread.
  Rows<S> locate_ahead(int64_t first) const {
    const int64_t key = first + AHEAD, stop = (std::min(span.end, task.tile_end * TILE) + LANES - 1) / LANES * LANES;
    if (key < stop || !next) return locate<S>(a, task, span, key);
    return locate<S>(a, *next, Span(a, *next), next->tile * TILE + key - stop);
  }

  void pack(int64_t tile) {
    const size_t size = Engine::packed_bytes(a.head_dim);
    const int64_t vectors = vectors_for(rows - 1, tile);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t first = tile * TILE + v * LANES;
      Rows<S> now = locate<S>(a, task, span, first), soon = locate_ahead(first);
      for (int64_t h = 0; h < heads; ++h) {
        as_wide(now.keys, soon.keys, [&](const T* const* rows, const T* const* soon) {
          Engine::pack_keys(rows, soon, v * LANES, a.head_dim, (char*)keys + h * size);
        });
        as_wide(now.values, soon.values, [&](const T* const* rows, const T* const* soon) {
          Engine::pack_values(rows, soon, v * LANES, a.head_dim, (char*)packed_values + h * size);
        });
        now.next_head(), soon.next_head();
      }
    }
  }

  // Calls `take` with sixteen rows in the engine's own type, and those that it is to ask memory for.
  template <class Take>
  void as_wide(const S* const* rows, const S* const* soon, Take take) const {
    if constexpr (std::is_same_v<S, T>) {
      take(rows, soon);
    } else {
      const T* widened[LANES];
      for (int i = 0; i < LANES; ++i) {
        for (int64_t d = 0; d < a.row_size; d += 64) __builtin_prefetch(soon[i] + d);
        widen_row(rows[i], wide + i * a.head_dim, a.head_dim);
        widened[i] = wide + i * a.head_dim;
      }
      take(widened, widened);
    }
  }

  // Vectors of scores that rows up to `row` need, even because the kernels take two at a time.
  int64_t vectors_for(int64_t row, int64_t tile) const {
    const int64_t visible = std::min(TILE, positions[row] + 1 - tile * TILE);
    return visible <= 0 ? 0 : (visible + 2 * LANES - 1) / (2 * LANES) * 2;
  }

  void one_tile(int64_t tile, int64_t head) {
    const size_t size = Engine::packed_bytes(a.head_dim) * size_t(head);
    for (int64_t row = 0; row < rows; row += ROWS) {
      const int64_t count = std::min(ROWS, rows - row), vectors = vectors_for(row + count - 1, tile);
      if (vectors == 0 || window_begin(row) >= (tile + 1) * TILE) continue;
      const T* queries[ROWS];
      for (int64_t r = 0; r < count; ++r) queries[r] = (const T*)a.query + element(head, row + r);
      Engine::scores(queries, count, vectors, (char*)keys + size, a.head_dim, scores);
      float maxima[ROWS], sums[ROWS], keep[ROWS], add[ROWS];
      for (int64_t r = 0; r < count; ++r)
        weigh(row + r, tile, vectors, scores + r * TILE, weights + r * TILE, maxima + r, sums + r);
      merge_states(states + head * rows + row, maxima, sums, count, keep, add);
      Engine::weigh_values(weights, count, vectors * LANES, (char*)packed_values + size, a.head_dim, keep, add,
                           values + (head * rows + row) * a.head_dim);
    }
  }

  // One row of scores to weights 2^(score - maximum), with their sum.
  INLINE void weigh(int64_t row, int64_t tile, int64_t vectors, float* s, W* w, float* max, float* sum) const {
    const int64_t low = window_begin(row) - tile * TILE, high = positions[row] + 1 - tile * TILE;
    const bool masked = low > 0 || high < vectors * LANES;
    const f32x16 lane = lane_numbers<f32x16>();
    f32x16 best = splat(-INFINITE);
    for (int64_t v = 0; v < vectors; ++v) {
      f32x16 x = load(s + v * LANES);
      x = a.soft_cap ? tanh(x * (a.scale / a.soft_cap)) * (a.soft_cap * LOG2_E) : x * (a.scale * LOG2_E);
      if (masked) {
        const f32x16 key = lane + float(v * LANES);
        x = select((key >= float(low)) & (key < float(high)), x, splat(-INFINITE));
      }
      best = maximum(x, best);
      store(s + v * LANES, x);
    }
    *max = reduce_max(best);
    const float origin = *max == -INFINITE ? 0.0f : *max;
    f32x16 total{};
    for (int64_t v = 0; v < vectors; ++v) {
      const f32x16 weight = exp2(load(s + v * LANES) - origin);
      total += weight;
      Engine::store_weights(w + v * LANES, weight);
    }
    *sum = reduce_add(total);
  }

  // Adds the partial results of one tile, as `save` left them, to one head's states and values.
  void merge(const float* partial, int64_t head) {
    const int64_t width = a.head_dim + 2;
    for (int64_t row = 0; row < rows; row += LANES) {
      const int64_t count = std::min<int64_t>(LANES, rows - row), first = head * rows + row;
      float maxima[LANES], sums[LANES], keep[LANES], add[LANES];
      for (int64_t r = 0; r < count; ++r) maxima[r] = partial[r * width], sums[r] = partial[r * width + 1];
      merge_states(states + first, maxima, sums, count, keep, add);
      for (int64_t r = 0; r < count; ++r, partial += width)
        for (int64_t d = 0; d < a.head_dim; d += LANES)
          merge_values(values + (first + r) * a.head_dim + d, load(partial + 2 + d), keep[r], add[r]);
    }
  }

  void save(float* to) const {
    for (int64_t r = 0; r < heads * rows; ++r, to += a.head_dim + 2) {
      to[0] = states[r].maximum, to[1] = states[r].sum;
      std::copy(values + r * a.head_dim, values + (r + 1) * a.head_dim, to + 2);
    }
  }

  void finish() const {
    for (int64_t r = 0; r < heads * rows; ++r) {
      const int64_t at = element(r / rows, r % rows);
      float maximum = states[r].maximum, sum = states[r].sum, keep = 1.0f;
      if (a.sinks) {  // one more key, whose value is zero
        const float sink = a.sinks[at / a.head_dim % a.num_heads] * LOG2_E, both = std::max(maximum, sink);
        keep = std::exp2(maximum - both), sum = sum * keep + std::exp2(sink - both), maximum = both;
      }
      const float scale = keep / sum;
      for (int64_t d = 0; d < a.head_dim; d += LANES)
        store((T*)a.out + at + d, load(values + r * a.head_dim + d) * scale);
      if (a.lse) a.lse[at / a.head_dim] = maximum * LN_2 + std::log(sum);
    }
  }
};

// Tiles [begin, end) that several sequences have in the same blocks.
struct SharedTiles {
  std::vector<int64_t> sequences;
  int64_t begin, end;
};

// The tiles that a sequence's queries see whole: no row of them is masked there, at its window or at its own position.
struct WholeTiles {
  int64_t begin, end;

  WholeTiles(const Attention& a, int64_t sequence) {
    const int64_t left = a.sliding_window ? std::max<int64_t>(0, a.context_lens[sequence] - a.sliding_window) : 0;
    begin = (left + TILE - 1) / TILE, end = first_position(a, sequence) / TILE;
  }
};

// Finds who shares what, by the block tables alone. Sequences are sorted by the blocks of their first whole tile; one
// that has these blocks alone is looked at no more, and tables are compared further only as far as they agree.
class Sharing {
 public:
  std::vector<SharedTiles> found;  // a run of all of a group, then the runs of those that go on together

  Sharing(const Attention& a, int64_t most_queries) : a(a) {
    std::vector<int64_t> sequences;
    for (int64_t s = 0; s < a.num_sequences; ++s) {
      const int64_t chunk = a.query_start[s + 1] - a.query_start[s];
      // More queries than that fill a task, and make use of a packed tile alone.
      if (chunk > 0 && chunk <= most_queries) sequences.push_back(s);
    }
    // Behind windows that begin at different tiles there are groups of their own.
    auto begin = [&](int64_t s) { return WholeTiles(a, s).begin; };
    split(std::move(sequences), [&](int64_t s, int64_t t) { return begin(s) - begin(t); },
          [&](std::vector<int64_t> group) { follow(group, begin(group[0])); });
  }

 private:
  const Attention& a;

  // Calls `take` with each two or more of `sequences` that are equal by `compare`, in their order.
  template <class Compare, class Take>
  static void split(std::vector<int64_t> sequences, Compare compare, Take take) {
    std::stable_sort(sequences.begin(), sequences.end(), [&](int64_t s, int64_t t) { return compare(s, t) < 0; });
    for (auto from = sequences.begin(), to = from; from != sequences.end(); from = to) {
      to = std::find_if(from, sequences.end(), [&](int64_t s) { return compare(*from, s) != 0; });
      if (to - from > 1) take({from, to});
    }
  }

  // By the blocks that hold the keys of a tile.
  int compare(int64_t one, int64_t other, int64_t tile) const {
    const int64_t from = tile * TILE / a.block_size, to = ((tile + 1) * TILE + a.block_size - 1) / a.block_size;
    const int32_t *table = a.block_tables + one * a.table_stride, *same = a.block_tables + other * a.table_stride;
    return std::memcmp(table + from, same + from, size_t(to - from) * sizeof(int32_t));
  }

  // Appends what `sequences` share from tile `first` on.
  void follow(std::vector<int64_t> sequences, int64_t first) {
    int64_t tile = first;
    auto has = [&](int64_t s) { return tile < WholeTiles(a, s).end; };
    auto agrees = [&](int64_t s) { return has(s) && compare(sequences[0], s, tile) == 0; };
    while (std::all_of(sequences.begin(), sequences.end(), agrees)) ++tile;
    if (tile > first) found.push_back({sequences, first, tile});

    std::erase_if(sequences, [&](int64_t s) { return !has(s); });
    split(std::move(sequences), [&](int64_t s, int64_t t) { return compare(s, t, tile); },
          [&](std::vector<int64_t> group) { follow(std::move(group), tile); });
  }
};

// Runs of tiles with at least two sequences, whose rows are about as many as a task has.
std::vector<SharedTiles> shared_tiles(const Attention& a, int64_t most_queries) {
  std::vector<SharedTiles> shared;
  if (most_queries == 1 || a.num_sequences == 1) return shared;
  for (const SharedTiles& run : Sharing(a, most_queries).found) {
    auto chunk = [&](int64_t s) { return a.query_start[s + 1] - a.query_start[s]; };
    int64_t queries = 0, before = 0, last_part = -1;
    for (int64_t s : run.sequences) queries += chunk(s);
    const int64_t parts = (queries + most_queries - 1) / most_queries;
    for (int64_t s : run.sequences) {
      const int64_t part = before * parts / queries;
      if (part != last_part) shared.push_back({{}, run.begin, run.end});
      shared.back().sequences.push_back(s), last_part = part, before += chunk(s);
    }
  }
  return shared;
}

// The whole tasks of a call, most work first within a sequence, so that threads finish together. Sequences of which
// `shares` is true are cut into the same heads.
std::vector<Task> whole_tasks(const Attention& a, int64_t packed_bytes, const std::vector<bool>& shares) {
  std::vector<Task> tasks;
  const int64_t group = a.num_heads / a.num_kv_heads, queries = std::max<int64_t>(1, TASK_ROWS / group);
  const int64_t most_heads = std::max<int64_t>(1, PACKED_BYTES / packed_bytes);
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const int64_t chunk = a.query_start[s + 1] - a.query_start[s], start = a.context_lens[s] - chunk;
    const bool few = chunk * group <= FEW_ROWS || shares[size_t(s)];
    const int64_t heads = few ? std::min(most_heads, a.num_kv_heads) : 1;
    for (int64_t last = chunk; last > 0; last -= queries) {
      const int64_t first = std::max<int64_t>(0, last - queries);
      const int64_t begin = a.sliding_window ? std::max<int64_t>(0, start + first - a.sliding_window + 1) : 0;
      const int64_t tile = begin / TILE, tile_end = (start + last + TILE - 1) / TILE;
      for (int64_t h = 0; h < a.num_kv_heads; h += heads)
        tasks.push_back({{{s, first, last}}, h, std::min(h + heads, a.num_kv_heads), tile, tile_end, {}});
    }
  }
  return tasks;
}

template <class Engine, class S>
void attend_to(const Attention& a, const AttentionPlan& plan, Crew& crew) {
  auto run = [&](const std::vector<Task>& tasks) {
    const int64_t count = int64_t(tasks.size());
    crew.share(count, [&](int64_t i) {
      const bool more = i + crew.threads < count;  // most likely the next one of this thread
      Worker<Engine, S>(a, tasks[size_t(i)], more ? &tasks[size_t(i + crew.threads)] : nullptr).run();
    });
  };
  if (!plan.pieces.empty()) run(plan.pieces);
  run(plan.tasks);
}

template <class Engine>
void attend(const Attention& a, const AttentionPlan& plan, Crew& crew) {
  if (a.is_narrow) return attend_to<Engine, int8_t>(a, plan, crew);
  attend_to<Engine, typename Engine::Element>(a, plan, crew);
}

int64_t packed_bytes([[maybe_unused]] DType dtype, int64_t head_dim) {
#if defined(__AVX512BF16__)
  if (dtype == DType::bf16) return int64_t(Pairs::packed_bytes(head_dim));
#endif
  return int64_t(Plain<float>::packed_bytes(head_dim));
}

}  // namespace

AttentionPlan::AttentionPlan(const Attention& a, DType dtype, int threads) {
  struct Source {
    Task task;
    std::vector<size_t> users;  // tasks that merge its results, one for each of its sequences
  };
  std::vector<Source> sources;
  const int64_t group = a.num_heads / a.num_kv_heads, row_floats = a.head_dim + 2;
  auto tile_floats = [&](const Task& t) { return (t.head_end - t.head) * rows_of(t, group) * row_floats; };

  const std::vector<SharedTiles> shared = shared_tiles(a, std::max<int64_t>(1, TASK_ROWS / group));
  std::vector<bool> shares(size_t(a.num_sequences));
  for (const SharedTiles& run : shared)
    for (int64_t s : run.sequences) shares[size_t(s)] = true;
  tasks = whole_tasks(a, 2 * packed_bytes(dtype, a.head_dim), shares);

  std::vector<size_t> first_task(size_t(a.num_sequences));  // of each sequence; others that share have as many
  for (size_t i = tasks.size(); i-- > 0;) first_task[size_t(tasks[i].queries[0].sequence)] = i;
  int64_t left = SHARED_BYTES / int64_t(sizeof(float));
  for (const SharedTiles& run : shared) {
    int64_t floats = 0;
    for (int64_t s : run.sequences)
      floats += (a.query_start[s + 1] - a.query_start[s]) * a.num_heads * row_floats;
    // Without memory for partial results the rest is read by each task, as what is not shared.
    const int64_t tiles = std::min(run.end - run.begin, left / floats), end = run.begin + tiles;
    if (tiles == 0) break;
    left -= tiles * floats;

    const int64_t leader = run.sequences[0];
    const size_t first = first_task[size_t(leader)];
    for (size_t k = 0; first + k < tasks.size() && tasks[first + k].queries[0].sequence == leader; ++k) {
      Source source{tasks[first + k], {}};
      source.task.queries.clear(), source.task.tile = run.begin, source.task.tile_end = end;
      for (int64_t s : run.sequences) {
        const size_t user = first_task[size_t(s)] + k;
        Task& task = tasks[user];
        // A window begins within a tile: that one comes before, and belongs to the sequence alone.
        if (task.tile < run.begin) {
          sources.push_back({task, {user}});
          sources.back().task.tile_end = run.begin;
        }
        task.tile = end;
        source.task.queries.push_back(task.queries[0]), source.users.push_back(user);
      }
      sources.push_back(std::move(source));
    }
    if (end < run.end) break;
  }

  const int64_t count = int64_t(tasks.size());
  int64_t tiles = 0;
  for (const Task& t : tasks) tiles += t.tile_end - t.tile;
  if (threads > 1 && count < 4 * threads && tiles > count)
    for (size_t i = 0; i < tasks.size(); ++i) {
      sources.push_back({tasks[i], {i}});
      tasks[i].tile = tasks[i].tile_end;
    }
  if (sources.empty()) return;

  tiles = 0;
  int64_t needed = 0;
  for (const Source& s : sources) {
    const int64_t own = s.task.tile_end - s.task.tile;
    tiles += own, needed += own * tile_floats(s.task);
  }
  partials.reset(new float[size_t(needed)]);  // not filled: each is written before it is read
  float* to = partials.get();
  const int64_t run = std::max<int64_t>(1, tiles / (4 * threads));
  for (const Source& source : sources) {
    const Task& whole = source.task;
    const int64_t floats = tile_floats(whole), head_floats = rows_of(whole, group) * row_floats;
    float* at = to;
    for (size_t i = 0; i < source.users.size(); ++i) {
      const Queries& own = whole.queries[i];
      tasks[source.users[i]].before.push_back({at, whole.tile_end - whole.tile, floats, head_floats});
      at += (own.last - own.first) * group * row_floats;
    }
    for (Task piece = whole; piece.tile < whole.tile_end; piece.tile = piece.tile_end) {
      piece.tile_end = std::min(piece.tile + run, whole.tile_end), piece.partials = to;
      pieces.push_back(piece);
      to += (piece.tile_end - piece.tile) * floats;
    }
  }
}

void paged_attention(const Attention& a, const AttentionPlan& plan, DType dtype, Crew& crew) {
  if (dtype == DType::f32) return attend<Plain<float>>(a, plan, crew);
  if (dtype == DType::fp16) return attend<Plain<fp16>>(a, plan, crew);
#if defined(__AVX512BF16__)
  return attend<Pairs>(a, plan, crew);
#else
  return attend<Plain<bf16>>(a, plan, crew);
#endif
}

}  // namespace raydix
