// What an algorithm works with while it runs a call: the members, their links and shared memory, and the call's wait.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "call.h"
#include "link/host_barrier.h"
#include "link/links.h"
#include "link/shared_memory.h"
#include "link/wait.h"
#include "topology.h"

namespace ronde {

// Memory that is kept from call to call and grows when needed.
class ScratchBuffer {
 public:
  // Returns at least this many bytes; what was in them before is lost.
  char* get(uint64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[bytes]);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  uint64_t size_ = 0;
};

struct CallContext {
  const Topology& topology;
  SharedSegment* segment;  // null for the only member of a host
  HostBarrier& barrier;
  Links& links;
  CallWait& wait;
  ScratchBuffer& contiguous;  // the spans of a call in one piece
  ScratchBuffer& incoming;    // what was received and is not yet reduced
  ScratchBuffer& partials;    // partial results that do not fit where the result will be
  uint32_t& slots_used;       // staging slots used so far, equal on every member; its parity selects the slot
  const std::vector<CallHeader>& headers;  // of the running call, as CallMatcher::match returned them

  // Where a local member's data of a call lies that works in place in the buckets.
  char* bucket(uint32_t local, const Call& call) const {
    bool of_all_members = headers.size() == topology.size;
    const CallHeader& header = headers[of_all_members ? topology.local_members()[local] : local];
    return segment->bucket(local, header.bucket_area) + call.bucket_offset;
  }

  Link* link(uint32_t member) const { return links.get(member, RD_LINK_SINGLE); }
  Link* ring_link(uint32_t member) const { return links.get(member, RD_LINK_RING); }

  std::vector<uint32_t> all_members() const {
    std::vector<uint32_t> members(topology.size);
    std::iota(members.begin(), members.end(), 0);
    return members;
  }
};

}  // namespace ronde
