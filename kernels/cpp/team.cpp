#include "team.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>

namespace raydix {
namespace {

constexpr int SPINS = 4000;     // while idle, before going to sleep: some 50 microseconds
constexpr int PATIENCE = 2000;  // while another thread is at the last piece of a phase

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Sleeping threads are woken by the caller; `session` tells them that there is something to do, and they announce
// themselves in `inside` before they look again whether that still holds. So the caller never waits for a thread that
// has not begun, and ends no session that one is in.
class Team {
 public:
  bool try_run(int threads, void (*body)(void*, Crew&), void* context) {
    std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
    if (!lock) return false;
    while (int(started) < threads - 1) std::thread(&Team::help, this, started++).detach();
    this->body = body, this->context = context, this->threads = threads;
    Crew crew(phases.data(), threads);
    session.store(++number);
    if (asleep.load()) wake.fetch_add(1), wake.notify_all();
    body(context, crew);
    session.store(0);
    await_empty();
    const int64_t used = crew.position(phases.data());
    for (int64_t i = 0; i < used; ++i) phases[size_t(i)].next.store(0), phases[size_t(i)].done.store(0);
    return true;
  }

 private:
  std::mutex busy;
  std::vector<Phase> phases{size_t(MAX_PHASES)};
  void (*body)(void*, Crew&) = nullptr;
  void* context = nullptr;
  std::atomic<int> threads{1};
  int started = 0;
  uint64_t number = 0;
  alignas(64) std::atomic<uint64_t> session{0};  // 0: none
  alignas(64) std::atomic<int> inside{0};
  alignas(64) std::atomic<int> asleep{0};
  std::atomic<int> wake{0};

  void help(int index) {
    pthread_setname_np(pthread_self(), "raydix kernels");  // as profilers and benchmarks.hostile find it
    uint64_t last = 0;
    for (;;) {
      const uint64_t now = await_session(last);
      inside.fetch_add(1);
      if (session.load() == now && index < threads - 1) {
        Crew crew(phases.data(), threads);
        body(context, crew);
      }
      if (inside.fetch_sub(1) == 1) inside.notify_all();
      last = now;
    }
  }

  // A thread that lost its core on its way out gets this one's, if this one sleeps.
  void await_empty() {
    for (int spin = 0; spin < PATIENCE; ++spin) {
      if (!inside.load()) return;
      pause();
    }
    for (int left; (left = inside.load());) inside.wait(left);
  }

  uint64_t await_session(uint64_t last) {
    for (;;) {
      for (int spin = 0; spin < SPINS; ++spin) {
        const uint64_t now = session.load(std::memory_order_relaxed);
        if (now && now != last) return now;
        pause();
      }
      asleep.fetch_add(1);
      const int seen = wake.load();
      const uint64_t now = session.load();
      if (!now || now == last) wake.wait(seen);
      asleep.fetch_sub(1);
    }
  }
};

// A forked child has none of the threads, so it gets a team of its own. Never destroyed: its threads may outlive main.
Team* team = new Team;

}  // namespace

void Crew::await(const Phase& phase, int count) {
  for (int spin = 0; spin < PATIENCE; ++spin) {
    if (phase.done.load(std::memory_order_acquire) == count) return;
    pause();
  }
  // A thread has lost its core in the middle of a piece. It gets this one's, if this one sleeps.
  for (int done; (done = phase.done.load(std::memory_order_acquire)) < count;) phase.done.wait(done);
}

void together(int threads, void (*body)(void*, Crew&), void* context) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { team = new Team; });
  (void)registered;
  if (threads > 1 && team->try_run(threads, body, context)) return;
  Crew alone(nullptr, 1);
  body(context, alone);
}

}  // namespace raydix
