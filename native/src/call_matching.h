// How a collective begins: every member shows the header of its call, waits until all have arrived, and compares.
//
// On one host the headers are in shared memory and one phase of the host's barrier suffices. Between hosts the first
// member of each (its leader) exchanges a digest of its host's headers with the other leaders, in log2(hosts) steps.
// Only when they differ, the headers of all members are exchanged, too (Bruck's algorithm). For a call that was agreed
// in advance only the members of one host match.
#pragma once

#include <vector>

#include "call_context.h"

namespace ronde {

class CallMatcher {
 public:
  explicit CallMatcher(const Topology& topology) : topology_(topology) {}

  // Returns the headers when all have arrived: those of all members when they differ or members have joined, otherwise
  // those of this host's members. For a pre-agreed call they are those of this host in any case. They are valid until
  // the next match.
  const std::vector<CallHeader>& match(CallContext& context, const CallHeader& mine, bool pre_agreed);
  const std::vector<CallHeader>& headers() const { return headers_; }  // what match returned last

 private:
  bool headers_differ(CallContext& context);
  void exchange_between_hosts(CallContext& context);

  const Topology& topology_;
  uint64_t num_matches_ = 0;
  std::vector<CallHeader> headers_;
};

enum class MatchResult {
  kMatch,
  kAllJoined,
  kMismatch,
};

// Compares the headers. The result depends on nothing else, so every member gets the same. `requested` receives the
// header of a member that has not joined, or null.
MatchResult match_headers(const std::vector<CallHeader>& headers, const CallHeader** requested);

}  // namespace ronde
