// How the thread that runs a call waits for shared memory or sockets without wasting a core, and how such a wait ends:
// by the call's deadline, an abort, or a lost member.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "link/abort.h"
#include "link/shared_memory.h"

namespace ronde {

class Link;

// What one step of a transfer did, and which links it waits for when it moved nothing.
struct StepResult {
  bool done = false;
  bool progress = false;
  Link* sending = nullptr;    // the link that has no space for what is to be sent
  Link* receiving = nullptr;  // the link that has not brought what is to be received
};

// How long a wait spins before it sleeps: it tests its condition `spins` times with a pause in between, and yields the
// core after every `yield_every` tests. With a core for every local member a short spin is the fastest. But the
// scheduler may have put two members on one core, and with more members than cores the awaited one may need this very
// core, so it is yielded often. Sleep comes last: on a busy machine a wakeup costs tens of microseconds.
struct SpinPolicy {
  uint32_t spins;
  uint32_t yield_every;
};

SpinPolicy spin_policy(uint32_t num_local, uint32_t num_cores);

class CallWait {
 public:
  // `overlapped`: this process computes while it waits, so there are more busy threads than members.
  // `waiting_for` receives the member that a transfer waits for, or -1; other threads read it.
  CallWait(const Topology& topology, SharedSegment* segment, AbortSignal* abort_signal, const Deadline& deadline,
           bool overlapped, std::atomic<int32_t>* waiting_for)
      : topology_(topology),
        segment_(segment),
        abort_signal_(abort_signal),
        deadline_(deadline),
        policy_(spin_policy(topology.num_local() * (overlapped ? 2 : 1), topology.num_cores)),
        waiting_for_(waiting_for) {}

  // Throws CallError when the call must end: aborted, closed, a member lost, or the deadline expired.
  void check() const;

  // Throws CallError when the call was aborted. It costs two loads, so every step can afford it, and a long call ends
  // at once even when it never has to wait.
  void check_abort() const {
    abort_signal_->check();
    if (segment_ != nullptr) segment_->check();
  }

  // Returns when ready() is true. Whoever makes it true changes `word` and then wakes its sleepers if `waiters` is not
  // zero. check_possible() is called after every sleep and throws when ready() can never become true.
  template <class Ready, class CheckPossible>
  void until(std::atomic<uint32_t>* word, std::atomic<uint32_t>* waiters, Ready ready, CheckPossible check_possible) {
    check_abort();
    for (uint32_t i = 0; i < policy_.spins; ++i) {
      if (ready()) return;
      pause(i);
    }
    while (true) {
      uint32_t seen = word->load();
      waiters->fetch_add(1);  // before the last test: whoever changes the word reads this afterwards
      bool is_ready = ready();
      if (!is_ready) sleep_on(word, seen);
      waiters->fetch_sub(1);
      if (is_ready || ready()) return;
      check();
      check_possible();
    }
  }

  // Sets the work that run_steps does while its sockets are not ready, a small piece per call. The function returns
  // false when it has nothing to do at the moment.
  void while_idle(std::function<bool()> work) { idle_work_ = std::move(work); }

  // Calls step() until it reports done. A step moves what it can; when it moved nothing, the next one comes when one of
  // the links that it named may be ready.
  template <class Step>
  void run_steps(Step step) {
    uint32_t spins = 0;
    while (true) {
      StepResult result = step();
      if (result.done) break;
      if (result.progress) {
        check_abort();
        spins = 0;
      } else if (waits_for_socket(result)) {
        if (idle_work_ && idle_work_()) continue;
        record_peer(result);
        poll_sockets(result);
        check();
      } else if (spins < policy_.spins) {
        pause(spins++);
      } else {
        record_peer(result);
        if (sleep_until_wakeup(step)) break;
      }
    }
    waiting_for_->store(-1, std::memory_order_relaxed);
  }

 private:
  void pause(uint32_t spins) const;
  static bool waits_for_socket(const StepResult& result);
  void check_signals() const;
  void sleep_on(std::atomic<uint32_t>* word, uint32_t seen) const;
  void poll_sockets(const StepResult& result);
  void record_peer(const StepResult& result);
  static void check_peer_left(const StepResult& result);

  // Runs one more step after this thread is counted as a waiter, so that no wakeup is missed. Returns true when that
  // step reported done.
  template <class Step>
  bool sleep_until_wakeup(Step& step) {
    MemberState& mine = segment_->member_state(topology_.local_index);
    uint32_t seen = mine.wakeup_word.load();
    mine.waiters.fetch_add(1);
    StepResult result = step();
    if (!result.done && !result.progress) sleep_on(&mine.wakeup_word, seen);
    mine.waiters.fetch_sub(1);
    if (!result.done && !result.progress) {
      check();
      check_peer_left(result);
    }
    return result.done;
  }

  static constexpr int64_t kMaxSleepNs = 50'000'000;  // after this, an abort that raced with the sleep is seen
  static constexpr int64_t kMixedSleepNs =
      200'000;  // for a socket and shared memory, which no call can wait for at once
  static constexpr int64_t kPeerClosedNs = 5'000'000'000;  // for the link of a peer that has closed the one to it

  const uint32_t generation_ = fork_generation.load();
  const Topology& topology_;
  SharedSegment* segment_;
  AbortSignal* abort_signal_;
  const Deadline& deadline_;
  SpinPolicy policy_;
  std::atomic<int32_t>* waiting_for_;
  std::function<bool()> idle_work_;
  const Link* closed_link_ = nullptr;  // the last one whose peer has closed the direction to it, and since when
  int64_t closed_ns_ = 0;
};

}  // namespace ronde
