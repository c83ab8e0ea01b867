// What the kernels take: raw pointers and sizes, checked by bindings.cpp. Strides count elements.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "team.h"

namespace raydix {

enum class DType { f32, bf16, fp16 };

// In the order of `KINDS` in raydix/kernels/silu_and_mul.
enum class Activation { silu, gelu_tanh, clamped_swiglu, sigmoid, gelu, relu2 };

constexpr int64_t FACTOR_BYTES = 4;  // behind the numbers of a row of keys or values in 8 bits, see narrow.h

struct Attention {
  const void *query, *key_cache, *value_cache;  // query rows are contiguous
  bool is_narrow;               // the caches are in 8 bits, see narrow.h
  void* out;
  float* lse;                   // null if not wanted
  const float* sinks;           // null: none; of each head the score of a key whose value is zero
  const int32_t* block_tables;  // [num_sequences, table_stride]
  const int32_t* query_start;   // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  int64_t row_size;                                // elements of a head's row in the caches
  int64_t table_stride, key_stride, value_stride;  // the latter from block to block
  float scale, soft_cap;                           // soft_cap 0: none
  int64_t sliding_window;                          // 0: none
};

// How a call of `paged_attention` is cut into pieces; the same for every layer with the same window.
class AttentionPlan {
 public:
  // Partial results of one task's rows for consecutive tiles: per head and row maximum, sum, values. Strides in floats.
  struct Partials {
    const float* at;
    int64_t tiles, tile_stride, head_stride;
  };
  // Queries [first, last) of a sequence, counted within its chunk.
  struct Queries {
    int64_t sequence, first, last;
  };
  // Some queries and KV heads [head, head_end), over tiles [tile, tile_end) of keys. Few queries take several heads, for
  // their keys lie side by side in memory.
  struct Task {
    std::vector<Queries> queries;  // more than one: their sequences have the tiles in the same blocks, and see all of them
    int64_t head, head_end, tile, tile_end;
    std::vector<Partials> before;  // of the tiles before `tile`, in order
    float* partials = nullptr;     // of a piece: where its results go
  };
  std::vector<Task> tasks;
  std::vector<Task> pieces;  // computed before the tasks: tiles that several share, and tasks cut for more threads
  std::unique_ptr<float[]> partials;

  AttentionPlan(const Attention& a, DType dtype, int threads);
};

struct RotaryStore {
  const void* qkv;
  const int64_t *positions, *slot_mapping;
  const float* cos_sin;
  void *query, *key_cache, *value_cache;
  bool is_narrow;  // the caches are in 8 bits, see narrow.h
  const void *q_norm, *k_norm;  // null if not wanted
  float eps;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, qkv_stride, key_stride, value_stride;
  int64_t row_size;  // elements of a head's row in the caches
};

// The states of a batch's sequences, see raydix/kernels/states.py.
struct StateUse {
  const int32_t* query_start;  // [num_sequences + 1]
  const int64_t *sources, *write_rows, *write_slots;  // a negative source: zeros; write_rows ascend
  int64_t num_sequences, num_writes;
};

struct ShortConv {
  const void* x;
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels]; null: none
  float* tails;         // of a slot [taps - 1, channels]
  void* out;
  int64_t rows, channels, taps, x_stride, slot_stride;
  bool silu;
  StateUse use;
};

struct GatedDelta {
  const void *mixed, *beta, *step;
  const float *decay_rate, *step_bias;
  float* states;  // of a slot [num_heads, key_dim, value_dim]
  void* out;
  float *queries, *keys;  // [rows, num_key_heads, key_dim], between the phases
  float *stays, *shares;  // [rows, num_heads]
  int64_t rows, num_key_heads, num_heads, key_dim, value_dim, mixed_stride, beta_stride, step_stride, slot_stride;
  StateUse use;
};

struct SelectiveScan {
  const void *mixed, *step;
  const float *decay_rate, *step_bias, *skip;  // [num_heads]
  float* states;                               // of a slot [num_heads, state_size, head_dim]
  void* out;
  float *keys, *queries;   // [rows, num_groups, state_size], between the phases
  float *stays, *shares;   // [rows, num_heads]
  float least, most;       // of a step
  int64_t rows, num_groups, num_heads, state_size, head_dim, mixed_stride, step_stride, slot_stride;
  StateUse use;
};

struct LayerNorm {
  const void *x, *residual;   // residual and sum: null if not wanted
  const float *weight, *bias;  // weight [groups, width], a row r has that of group r % groups; bias [width] or null
  void *out, *sum;
  int64_t rows, width, groups, stride;
  float eps;
};

struct Sample {
  const void* logits;
  int64_t batch, vocabulary, stride;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seeds, *positions;  // of the noise
  const float *presence, *frequency, *repetition;  // null without penalties
  const int64_t *penalty_offsets, *penalty_ids;
  const int32_t* output_counts;
  const int64_t *bias_offsets, *bias_ids;  // null without bias
  const float* bias_values;
  const int32_t *mask_rows, *mask_bits;  // null without masks; a row's mask, negative: none; bit t % 32 of word t / 32
  const int64_t* num_logprobs;  // null if no row asks; negative: this row does not
  int64_t widest;
  const int64_t* given;  // null: sample; else the tokens to take
  int64_t *token_ids, *top_ids, *ranks;  // ranks: null unless tokens are given
  float *logprobs, *top_logprobs;
};

// What the numbers of a weight of few bits are: whole, of four or eight bits; of four bits, each standing for one of
// sixteen values; or floating-point numbers of eight bits (E4M3).
enum class Numbers { whole4, whole8, table4, float8 };

// The scale of a group, in the order of `Scales` in raydix/kernels/linear: a float16 for `super` features times an int8
// for the group; 2 ^ (a byte - 128); or a float32, which numbers in E4M3 have.
enum class Scales { products, exponents, floats };

// How a weight of few bits is stored: numbers, and what makes them weights. In groups of `size` input features,
// w = scale * (number - zero) - least, with least the product of a float16 for `super` features and a whole number for
// the group. See linear_groups.h.
struct Groups {
  int64_t bits, size, super;  // bits 0: the weight is not stored so; 4 or 8
  float zero;
  bool has_least;
  Scales scales;
  Numbers numbers;
  int8_t values[16];  // of table4
};

// Bytes of the scales of one column for `super` input features, without factors.
constexpr int64_t scale_bytes(const Groups& g) {
  if (g.scales == Scales::products) return g.has_least ? 4 : 2;
  return g.scales == Scales::exponents ? 1 : 4;
}

// Bytes of the factors of one column for one group.
constexpr int64_t factor_bytes(const Groups& g) { return g.scales != Scales::products ? 0 : g.has_least ? 2 : 1; }

// Bytes of one column for `super` input features.
constexpr int64_t column_bytes(const Groups& g) {
  return scale_bytes(g) + g.super / g.size * factor_bytes(g) + g.super / 2 * (g.bits / 4);
}

// A weight in panels of columns, see linear.cpp: bfloat16, int8 if it has scales, or groups. Scales and bias are padded
// to whole panels.
struct Weight {
  const void* packed;
  const float *scales, *bias;  // null: none
  int64_t in_features, out_features;
  Groups groups;
};

struct Linear {
  const Weight* weight;
  const void* x;  // bfloat16
  void* out;
  int64_t rows, x_stride;
  const void* after;  // the weight that is read next, if known: memory is asked for it in time
};

// The experts of one layer, chosen as raydix/kernels/routing.py says.
struct Experts {
  Weight router;  // hidden -> one logit for each expert, rounded; of a float router the sizes alone
  const float* float_router;  // [experts, hidden]; null: none
  const float* factors;       // [experts], each on its expert's share; null: none
  const float* correction;    // [experts], added to the scores by which experts are chosen; null: none
  std::vector<Weight> gate_up, down;  // without a gate the first is the up projection
  int64_t per_token;
  bool normalised, sigmoid;
  bool has_gate;
  int64_t num_groups, top_groups, group_best;
  float scale, sum_offset;
};

// The products of those experts of one layer that have rows.
struct ExpertProducts {
  std::vector<Linear> first, second;
};

// What the phases of `experts` hand to each other. Of one logit for each row and expert, or for each row and rank. Logits
// are float32 of a float router, else bfloat16.
struct ExpertBuffers {
  void *logits, *gathered, *wide, *activated, *outputs;
  int32_t* ids;
  float* shares;
  int64_t* places;
  // By layer of the call. A thread that is late reads the products of a layer that the others have left, so each layer
  // has its own, which nothing changes later in the call.
  std::vector<ExpertProducts> products;
};

struct Layer {
  Weight qkv, output, gate_up, down;  // without the last two where it has experts
  const Experts* experts;             // null: none
  const float *mlp_norm, *next_norm, *attention_post_norm, *mlp_post_norm, *q_norm, *k_norm, *cos_sin;
  int64_t window;  // 0: none
  const float* sinks;  // null: none
  size_t plan;         // of the attention, among those of the call
};

// What the operations of a pass hand to each other, each as large as the batch needs.
struct Buffers {
  void *residual, *sum, *x, *y, *wide, *query, *attended, *activated;
};

// One call of the whole decoder, bfloat16. `rotary` and `attention` hold what is the same for all layers.
struct Forward {
  const std::vector<Layer>& layers;
  const float* first_norm;
  RotaryStore rotary;
  Attention attention;
  std::vector<std::unique_ptr<AttentionPlan>> plans;
  Buffers buffers;
  ExpertBuffers* expert_buffers;  // empty where no layer has experts
  const int64_t* out_rows;
  int64_t num_out, hidden;
  void *pool, *out;
  int64_t layer_stride;  // bytes from one layer of a block to the next: keys, then values
  float eps;
  Activation activation;
};

// One phase or more of a crew's work each.
void forward(const Forward& a, Crew& crew);
void paged_attention(const Attention& a, const AttentionPlan& plan, DType dtype, Crew& crew);
void rotary_kv_store(const RotaryStore& a, DType dtype, bool float_norms, Crew& crew);
// `residual` and `sum` may be null; `weight` is float32 if `float_weight`, else of x's dtype.
// The norm of each group of a row, of x * gate * sigmoid(gate). `scratch`: [rows, width].
struct GatedNorm {
  const void *x, *gate;
  const float* weight;  // [width]
  void* out;
  float* scratch;
  int64_t rows, width, groups, x_stride, gate_stride;
  float eps;
};
void gated_rms_norm(const GatedNorm& a, DType dtype, Crew& crew);
void rms_norm(const void* x, const void* residual, const void* weight, void* out, void* sum, int64_t rows,
              int64_t width, int64_t stride, float eps, DType dtype, bool float_weight, Crew& crew);
void silu_and_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation activation,
                  DType dtype, Crew& crew);
void activate(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, Activation activation,
              DType dtype, Crew& crew);
void layer_norm(const LayerNorm& a, DType dtype, Crew& crew);
void short_conv(const ShortConv& a, DType dtype, Crew& crew);
void gated_delta(const GatedDelta& a, DType dtype, Crew& crew);
void selective_scan(const SelectiveScan& a, DType dtype, Crew& crew);
// Copies blocks of `pool` to `buffer`, or back if `scatter`.
void kv_copy(char* pool, char* buffer, const int64_t* ids, int64_t count, int64_t block_bytes, bool scatter,
             Crew& crew);
bool has_linear();  // whether this build has the one below
void linear(const Linear& a, Crew& crew);
void linears(const std::vector<Linear>& all, Crew& crew);  // as one phase
// out = for each row the sum of what its experts make of it, [rows, hidden] bfloat16.
// `routed`: the rows that the router reads. `layer`: index among those of the call.
void experts(const Experts& e, const void* x, const void* routed, void* out, int64_t rows, Activation activation, ExpertBuffers& b,
             size_t layer, Crew& crew);
void sample(const Sample& a, DType dtype, Crew& crew);

}  // namespace raydix
