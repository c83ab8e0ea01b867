// Whole blocks between a pool and one contiguous buffer, in pieces that keep every core copying.
#include <algorithm>
#include <cstring>

#include "ops.h"

namespace raydix {

void kv_copy(char* pool, char* buffer, const int64_t* ids, int64_t count, int64_t block_bytes, bool scatter,
             Crew& crew) {
  constexpr int64_t PIECE = 256 * 1024;
  const int64_t pieces = (block_bytes + PIECE - 1) / PIECE;
  crew.share(count * pieces, [&](int64_t task) {
    const int64_t index = task / pieces, begin = task % pieces * PIECE;
    char* block = pool + ids[index] * block_bytes + begin;
    char* packed = buffer + index * block_bytes + begin;
    const size_t size = size_t(std::min(PIECE, block_bytes - begin));
    scatter ? std::memcpy(block, packed, size) : std::memcpy(packed, block, size);
  });
}

}  // namespace raydix
