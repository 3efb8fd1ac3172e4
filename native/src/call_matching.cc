#include "call_matching.h"

#include <algorithm>

namespace ronde {

const std::vector<CallHeader>& CallMatcher::match(Group& group, const CallHeader& mine, bool pre_agreed) {
  uint32_t which = num_matches_++ & 1;  // two headers per member: a fast member may already write its next one
  headers_.clear();
  if (group.segment == nullptr) {
    headers_.push_back(mine);
  } else {
    group.segment->member_state(topology_.local_index).header[which] = mine;
    group.barrier.arrive_and_wait(group.wait);
    for (uint32_t local = 0; local < topology_.num_local(); ++local)
      headers_.push_back(group.segment->member_state(local).header[which]);
  }
  if (topology_.single_host() || pre_agreed) return headers_;
  if (topology_.is_leader()) exchange_between_hosts(group);
  if (group.segment == nullptr) return headers_;
  CallHeader* shared = group.segment->all_headers();
  if (topology_.is_leader()) std::copy(headers_.begin(), headers_.end(), shared);
  group.barrier.arrive_and_wait(group.wait);
  headers_.assign(shared, shared + topology_.size);
  return headers_;
}

void CallMatcher::exchange_between_hosts(Group& group) {
  uint32_t hosts = topology_.num_hosts(), mine = topology_.my_host;
  // Members of `num` hosts from `first` on; after the last host comes the first.
  auto num_members = [&](uint32_t first, uint32_t num) {
    size_t members = 0;
    for (uint32_t i = 0; i < num; ++i) members += topology_.members_by_host[(first + i) % hosts].size();
    return members;
  };
  // This leader has the headers of hosts mine, mine + 1, …, mine + held - 1; each step about doubles `held`.
  std::vector<CallHeader> gathered = headers_;
  for (uint32_t held = 1; held < hosts;) {
    uint32_t num = std::min(held, hosts - held);
    uint32_t ahead = (mine + held) % hosts, behind = (mine + hosts - held) % hosts;
    size_t num_sent = num_members(mine, num), num_received = num_members(ahead, num), before = gathered.size();
    gathered.resize(before + num_received);
    send_receive(group.wait, group.link(topology_.host_leader(behind)), gathered.data(), num_sent * sizeof(CallHeader),
                 group.link(topology_.host_leader(ahead)), gathered.data() + before, num_received * sizeof(CallHeader));
    held += num;
  }
  headers_.resize(topology_.size);
  size_t next = 0;
  for (uint32_t i = 0; i < hosts; ++i)
    for (uint32_t member : topology_.members_by_host[(mine + i) % hosts]) headers_[member] = gathered[next++];
}

namespace {

bool equal(const CallHeader& a, const CallHeader& b) {
  bool counts_may_differ =
      a.kind == RD_ALLGATHER || a.kind == RD_ALLTOALL || a.kind == RD_GATHER || a.kind == RD_SCATTER;
  return a.sequence == b.sequence && a.signature == b.signature && a.kind == b.kind && a.dtype == b.dtype &&
         a.op == b.op && a.peer == b.peer && a.algorithm == b.algorithm && a.in_bucket == b.in_bucket &&
         a.bucket_offset == b.bucket_offset && a.prescale == b.prescale && a.postscale == b.postscale &&
         (counts_may_differ || a.count == b.count);
}

bool is_unsigned(int32_t dtype) {
  return dtype == RD_UINT8 || dtype == RD_UINT16 || dtype == RD_UINT32 || dtype == RD_UINT64 || dtype == RD_BOOL;
}

// Whether members that have joined can take part: their zeros must not change what the others get. (A mean is divided
// by the number of all members.)
bool works_with_zeros(const CallHeader& requested) {
  bool zero_is_neutral = requested.op == RD_SUM || requested.op == RD_MEAN || requested.op == RD_BIT_OR ||
                         requested.op == RD_BIT_XOR || (requested.op == RD_MAX && is_unsigned(requested.dtype));
  return requested.kind == RD_BARRIER || (requested.kind == RD_ALLREDUCE && zero_is_neutral);
}

}  // namespace

MatchResult match_headers(const std::vector<CallHeader>& headers, const CallHeader** requested) {
  *requested = nullptr;
  bool any_joined = false;
  for (const CallHeader& header : headers) {
    if (header.kind == RD_JOIN) {
      any_joined = true;
    } else if (*requested == nullptr) {
      *requested = &header;
    } else if (!equal(**requested, header)) {
      return MatchResult::kMismatch;
    }
  }
  if (*requested == nullptr) return MatchResult::kAllJoined;
  return any_joined && !works_with_zeros(**requested) ? MatchResult::kMismatch : MatchResult::kMatch;
}

}  // namespace ronde
