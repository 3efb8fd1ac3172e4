// How a call begins: every member shows what it asks for and sees what the others do.
//
// On one host the headers lie in shared memory and the meeting is one gate. Between hosts the first member of each
// collects the headers of its own and trades them with the other hosts (Bruck's pattern, log2(hosts) steps), unless the
// call is trusted; then only the members of one host meet.
#pragma once

#include <vector>

#include "team.h"

namespace ronde {

class Meeting {
 public:
  explicit Meeting(const Topology& topology) : topology_(topology) {}

  // Returns when every member (a trusted call: every member of my place) has arrived.
  void meet(Team& team, const CallHeader& mine, bool trusted);

  // What the last meeting showed: the headers of all members, or of my place's members after a trusted call.
  const std::vector<CallHeader>& headers() const { return headers_; }

 private:
  void trade_between_places(Team& team);

  const Topology& topology_;
  uint64_t count_ = 0;
  std::vector<CallHeader> headers_;
};

enum class Verdict {
  kAgreed,
  kEveryoneJoined,
  kDiffer,
};

// A pure function of the headers, so every member comes to the same verdict. `asked` is the header of a member that
// wants something, when there is one.
Verdict judge(const std::vector<CallHeader>& headers, const CallHeader** asked);

}  // namespace ronde
