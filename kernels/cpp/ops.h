// What the kernels take: raw pointers and sizes, checked by bindings.cpp. Strides count elements.
#pragma once

#include <cstdint>

namespace raydix {

enum class DType { f32, bf16, fp16 };

struct Attention {
  const void *query, *key_cache, *value_cache;  // query rows are contiguous
  void* out;
  float* lse;                   // null if not wanted
  const int32_t* block_tables;  // [num_sequences, table_stride]
  const int32_t* query_start;   // [num_sequences + 1]
  const int32_t* context_lens;  // [num_sequences]
  int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  int64_t table_stride, key_stride, value_stride;  // the latter from block to block
  float scale, soft_cap;                           // soft_cap 0: none
  int64_t sliding_window;                          // 0: none
};

struct RotaryStore {
  const void* qkv;
  const int64_t *positions, *slot_mapping;
  const float* cos_sin;
  void *query, *key_cache, *value_cache;
  const void *q_norm, *k_norm;  // null if not wanted
  float eps;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, qkv_stride, key_stride, value_stride;
};

struct Sample {
  const void* logits;
  int64_t batch, vocabulary, stride;
  const float *temperature, *top_p, *min_p, *uniform;
  const int32_t* top_k;
  const float *presence, *frequency, *repetition;  // null without penalties
  const int64_t *penalty_offsets, *penalty_ids;
  const int32_t* output_counts;
  const int64_t *bias_offsets, *bias_ids;  // null without bias
  const float* bias_values;
  const int64_t* num_logprobs;  // null if no row asks; negative: this row does not
  int64_t widest;
  const int64_t* given;  // null: sample; else the tokens to take
  int64_t *token_ids, *top_ids, *ranks;  // ranks: null unless tokens are given
  float *logprobs, *top_logprobs;
};

struct Linear {
  const void *x, *packed;  // bfloat16; the weight in panels, see linear.cpp
  const float* bias;       // null: none; padded to whole panels
  void* out;
  int64_t rows, in_features, out_features, x_stride;
};

void paged_attention(const Attention& a, DType dtype, int threads);
void rotary_kv_store(const RotaryStore& a, DType dtype, bool float_norms, int threads);
// `residual` and `sum` may be null; `weight` is float32 if `float_weight`, else of x's dtype.
void rms_norm(const void* x, const void* residual, const void* weight, void* out, void* sum, int64_t rows,
              int64_t width, int64_t stride, float eps, DType dtype, bool float_weight, int threads);
void silu_and_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t stride, bool silu, DType dtype,
                  int threads);
// Copies blocks of `pool` to `buffer`, or back if `scatter`.
void kv_copy(char* pool, char* buffer, const int64_t* ids, int64_t count, int64_t block_bytes, bool scatter,
             int threads);
bool has_linear();  // whether this build has the one below
void linear(const Linear& a, int threads);
void sample(const Sample& a, DType dtype, int threads);

}  // namespace raydix
