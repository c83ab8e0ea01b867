// The threads that kernels run on: a few, of this process, that do one thing together.
//
// All of them call the same function and go through its phases in the same order. A phase's work is cut into small
// pieces, of which each thread takes the next one that nobody has; which thread computes a piece never changes its
// bits. A thread that is late, because something else has its core, finds nothing left to do and catches up: the others
// wait for no more than the piece it was at.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace raydix {

struct alignas(64) Phase {
  std::atomic<int64_t> next{0};
  std::atomic<int> done{0};
};

// One thread's place among the phases.
class Crew {
 public:
  Crew(Phase* phases, int threads) : threads(threads), phase(phases) {}

  // Calls work(i) for each i of [0, count), and returns when all have been called, here or on other threads.
  template <class Work>
  void share(int64_t count, const Work& work) {
    if (threads == 1) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    Phase& here = *phase++;
    int mine = 0;
    for (int64_t i; (i = here.next.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) work(i);
    if (mine && here.done.fetch_add(mine, std::memory_order_acq_rel) + mine == int(count)) return here.done.notify_all();
    await(here, int(count));
  }

  // As `share`, `grain` at a time: for work of a few nanoseconds each.
  template <class Work>
  void share(int64_t count, int64_t grain, const Work& work) {
    share((count + grain - 1) / grain, [&](int64_t piece) {
      for (int64_t i = piece * grain; i < std::min(count, (piece + 1) * grain); ++i) work(i);
    });
  }

  const int threads;

  // Phases gone through since `first`.
  int64_t position(const Phase* first) const { return phase - first; }

 private:
  Phase* phase;

  static void await(const Phase& phase, int count);
};

// Rows of `width` elements that are worth a piece of their own.
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, width)); }

constexpr int64_t MAX_PHASES = 8192;

// Runs `body` on up to `threads` threads, the caller's among them; returns when none is in it any more. While another
// caller has the team, this one works alone.
void together(int threads, void (*body)(void* context, Crew& crew), void* context);

template <class Body>
void together(int threads, Body&& body) {
  using Function = std::remove_reference_t<Body>;
  together(threads, [](void* context, Crew& crew) { (*static_cast<Function*>(context))(crew); }, (void*)&body);
}

}  // namespace raydix
