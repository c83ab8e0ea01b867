// Drives the kernels' threads as kernels do, for a build with ThreadSanitizer: several callers, bodies of several phases
// whose results the next phase reads, and numbers of threads that grow and shrink. Exits with 1 on a wrong sum.
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "team.h"

namespace {

constexpr int64_t PIECES = 64;
constexpr int ROUNDS = 200;

// Every piece of the second phase reads all pieces of the first one.
bool add_up(int threads) {
  std::vector<int64_t> numbers(PIECES), sums(PIECES);
  raydix::together(threads, [&](raydix::Crew& crew) {
    crew.share(PIECES, [&](int64_t i) { numbers[size_t(i)] = i; });
    crew.share(PIECES, [&](int64_t i) { sums[size_t(i)] = std::accumulate(numbers.begin(), numbers.end(), int64_t(0)); });
  });
  for (const int64_t sum : sums)
    if (sum != PIECES * (PIECES - 1) / 2) return false;
  return true;
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  std::atomic<bool> right{true};
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < ROUNDS; ++round)
        if (!add_up(1 + round % 4)) right = false;
    });
  for (std::thread& caller : callers) caller.join();
  if (!right) std::puts("a sum is wrong");
  return right ? 0 : 1;
}
