// The barrier of the members of one host, in phases. arrive() does not wait; wait() returns when all have arrived.
//
// A member may be one phase ahead of the slowest one, never two: it waits for phase p before it arrives at p + 2.
//
//   own arrival     | slowest member's | does wait(p) return?       counter in use
//   p               | p - 1            | no                         arrived[p & 1] < members
//   p               | p                | yes, completed_phase == p  arrived[p & 1] was set back to 0
//   p + 1           | p                | yes for p, no for p + 1    arrived[(p + 1) & 1], apart from the one of p
//
// completed_phase never goes backwards: p + 1 completes only after all have arrived there, and the member that
// completed p did so before it arrived at p + 1.
#pragma once

#include "link/shared_memory.h"
#include "link/wait.h"

namespace ronde {

class HostBarrier {
 public:
  // Without a segment this member is the only one of its host, and every phase is complete at once.
  HostBarrier(const Topology& topology, SharedSegment* segment) : topology_(topology), segment_(segment) {}

  // Returns the phase that this member has arrived at.
  uint32_t arrive();
  bool is_complete(uint32_t phase) const;  // whether wait() would return at once
  void wait(uint32_t phase, CallWait& wait);
  void arrive_and_wait(CallWait& call_wait) { wait(arrive(), call_wait); }

  // Members of this host that have not arrived at the latest phase of this member. Called from any thread.
  std::vector<uint32_t> missing() const;

 private:
  const Topology& topology_;
  SharedSegment* segment_;
  std::atomic<uint32_t> phase_{0};  // written only by the thread that runs a collective
};

}  // namespace ronde
