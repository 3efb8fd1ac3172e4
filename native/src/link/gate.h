// Where the members of one place meet. arrive() says "I am here" without waiting; wait() returns when all are.
//
// A member may be one phase ahead of an unfinished one, never two: it waits for phase p before it arrives at p + 2.
//
//   my last arrival | slowest member's | may I pass wait(p)?        counter in use
//   p               | p - 1            | no                         arrived[p & 1] < members
//   p               | p                | yes, open == p             arrived[p & 1] was set back to 0
//   p + 1           | p                | yes for p, no for p + 1    arrived[(p + 1) & 1] counts apart from p's
//
// `open` never goes backwards: p + 1 opens only after everyone arrived there, and whoever opened p did so before
// arriving at p + 1.
#pragma once

#include "link/segment.h"
#include "link/waiter.h"

namespace ronde {

class Gate {
 public:
  Gate(const Topology& topology, Segment* segment) : topology_(topology), segment_(segment) {}

  // The number of the phase just arrived at.
  uint32_t arrive();
  bool passed(uint32_t phase) const;  // whether wait() would return at once
  void wait(uint32_t phase, Waiter& waiter);
  void meet(Waiter& waiter) { wait(arrive(), waiter); }

  // Local members that have not come to the phase I wait for.
  std::vector<uint32_t> missing() const;

 private:
  const Topology& topology_;
  Segment* segment_;
  std::atomic<uint32_t> phase_{0};  // only my own thread counts it up; the stall watch reads it
};

}  // namespace ronde
