// One call's patience: its deadline, its abort, and how a thread waits for memory or sockets without wasting a core.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/clock.h"
#include "base/error.h"
#include "link/alarm.h"
#include "link/segment.h"

namespace ronde {

class Link;

// What one step of a transfer did, and what it waits for when it did nothing.
struct Turn {
  bool done = false;
  bool progress = false;
  Link* sending = nullptr;    // has something to send and no room
  Link* receiving = nullptr;  // wants something that is not there yet
};

// How long to look before sleeping: `looks` times with a pause in between, the core offered to others after every
// `stretch` of them. With a core for every local member a short stretch of looking beats everything else; but the
// scheduler may have put two members on one core, and with more members than cores the one we wait for may need this
// very core, so it is given up often. Sleeping comes last: on a busy machine it costs tens of microseconds to wake up.
struct SpinPolicy {
  uint32_t looks;
  uint32_t stretch;
};

SpinPolicy spin_policy(uint32_t num_local, uint32_t num_cores);

class Waiter {
 public:
  Waiter(const Topology& topology, Segment* segment, Alarm* alarm, const Deadline& deadline,
         std::atomic<int32_t>* waiting_for)
      : topology_(topology),
        segment_(segment),
        alarm_(alarm),
        deadline_(deadline),
        policy_(spin_policy(topology.num_local(), topology.num_cores)),
        waiting_for_(waiting_for) {}

  // Throws CallError when the call must end: aborted, closed, a member gone, or out of time.
  void check() const;

  // Throws CallError when the call was aborted. Two loads: cheap enough for every step, so that a long call ends at
  // once even while all its members go on and it never has to wait.
  void check_abort() const {
    alarm_->check();
    if (segment_ != nullptr) segment_->check();
  }

  // Sleeps until `ready()` is true; the word changes when it may be. `hopeless()` throws when it never will be.
  template <class Ready, class Hopeless>
  void until(std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleepers, Ready ready, Hopeless hopeless) {
    check_abort();
    for (uint32_t i = 0; i < policy_.looks; ++i) {
      if (ready()) return;
      pause(i);
    }
    while (true) {
      uint32_t seen = word->load();
      sleepers->fetch_add(1);  // whoever changes the word looks at this after
      bool over = ready();
      if (!over) sleep_on(word, seen);
      sleepers->fetch_sub(1);
      if (over || ready()) return;
      check();
      hopeless();
    }
  }

  // Something to do while sockets have nothing for us, in small pieces; returns false when it has nothing to do either.
  void set_meanwhile(std::function<bool()> meanwhile) { meanwhile_ = std::move(meanwhile); }

  // Calls step() until it says done. A step moves what it can; when nothing moved, waits until one of the links it
  // named might be ready again.
  template <class Step>
  void drive(Step step) {
    uint32_t idle = 0;
    while (true) {
      Turn turn = step();
      if (turn.done) break;
      if (turn.progress) {
        check_abort();
        idle = 0;
      } else if (wants_sockets(turn)) {
        if (meanwhile_ && meanwhile_()) continue;
        note(turn);
        wait_sockets(turn);
        check();
      } else if (idle < policy_.looks) {
        pause(idle++);
      } else {
        note(turn);
        if (sleep_for_bell(step)) break;
      }
    }
    waiting_for_->store(-1, std::memory_order_relaxed);
  }

 private:
  void pause(uint32_t looks) const;
  static bool wants_sockets(const Turn& turn);
  void check_interrupt() const;
  void sleep_on(std::atomic<uint32_t>* word, uint32_t seen) const;
  void wait_sockets(const Turn& turn);
  void note(const Turn& turn);
  static void check_departed(const Turn& turn);

  // Takes one more step after saying "I sleep", so that no wake-up is missed. True when that finished the work.
  template <class Step>
  bool sleep_for_bell(Step& step) {
    MemberLine& mine = segment_->line(topology_.local_index);
    uint32_t seen = mine.bell.load();
    mine.sleepers.fetch_add(1);
    Turn turn = step();
    if (!turn.done && !turn.progress) sleep_on(&mine.bell, seen);
    mine.sleepers.fetch_sub(1);
    if (!turn.done && !turn.progress) {
      check();
      check_departed(turn);
    }
    return turn.done;
  }

  static constexpr int64_t kSliceNs = 50'000'000;  // an abort that raced with falling asleep is seen after this
  static constexpr int64_t kMixedNs = 200'000;     // sockets and memory cannot be slept on together

  const Topology& topology_;
  Segment* segment_;
  Alarm* alarm_;
  const Deadline& deadline_;
  SpinPolicy policy_;
  std::atomic<int32_t>* waiting_for_;
  std::function<bool()> meanwhile_;
};

}  // namespace ronde
