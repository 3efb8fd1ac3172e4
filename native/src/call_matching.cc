#include "call_matching.h"

#include <algorithm>
#include <cstring>

namespace ronde {

namespace {

// What the leader of a host tells the others of the headers of its members.
struct HostSummary {
  uint64_t digest[2];  // of the first member's header
  uint64_t differs;    // whether headers differ, as far as this leader knows; or a member has joined
};

bool counts_may_differ(const CallHeader& header) {
  return header.kind == RD_ALLGATHER || header.kind == RD_ALLTOALL || header.kind == RD_GATHER ||
         header.kind == RD_SCATTER;
}

bool equal(const CallHeader& a, const CallHeader& b) {
  return a.sequence == b.sequence && a.signature == b.signature && a.kind == b.kind && a.dtype == b.dtype &&
         a.op == b.op && a.peer == b.peer && a.algorithm == b.algorithm && a.in_bucket == b.in_bucket &&
         a.bucket_offset == b.bucket_offset && a.prescale == b.prescale && a.postscale == b.postscale &&
         (counts_may_differ(a) || a.count == b.count);
}

// Two independent hashes of all that equal() compares.
void make_digest(const CallHeader& header, uint64_t digest[2]) {
  uint64_t scales[2];
  std::memcpy(&scales[0], &header.prescale, sizeof header.prescale);
  std::memcpy(&scales[1], &header.postscale, sizeof header.postscale);
  const uint64_t words[] = {header.sequence,
                            header.signature,
                            counts_may_differ(header) ? 0 : header.count,
                            header.bucket_offset,
                            uint64_t(uint32_t(header.kind)) << 32 | uint32_t(header.dtype),
                            uint64_t(uint32_t(header.op)) << 32 | uint32_t(header.algorithm),
                            uint64_t(uint32_t(header.peer)) << 32 | header.in_bucket,
                            scales[0],
                            scales[1]};
  digest[0] = 0x9E3779B97F4A7C15u;
  digest[1] = 0xD1B54A32D192ED03u;
  for (uint64_t word : words) {
    for (int i = 0; i < 2; ++i) {
      uint64_t mixed = (digest[i] ^ word) * (i == 0 ? 0xBF58476D1CE4E5B9u : 0x94D049BB133111EBu);
      digest[i] = (mixed ^ (mixed >> 29)) * 0xFF51AFD7ED558CCDu;
      digest[i] ^= digest[i] >> 32;
    }
  }
}

}  // namespace

const std::vector<CallHeader>& CallMatcher::match(CallContext& context, const CallHeader& mine, bool pre_agreed) {
  uint32_t which = num_matches_++ & 1;  // two headers per member: a fast member may already write its next one
  headers_.clear();
  if (context.segment == nullptr) {
    headers_.push_back(mine);
  } else {
    context.segment->member_state(topology_.local_index).header[which] = mine;
    context.barrier.arrive_and_wait(context.wait);
    for (uint32_t local = 0; local < topology_.num_local(); ++local)
      headers_.push_back(context.segment->member_state(local).header[which]);
  }
  if (topology_.single_host() || pre_agreed) return headers_;
  bool differ = topology_.is_leader() && headers_differ(context);
  if (context.segment != nullptr) {
    // Read by all before they arrive at their next barrier, which the leader awaits before it writes again.
    std::atomic<uint32_t>& shared_differ = context.segment->control().headers_differ;
    if (topology_.is_leader()) shared_differ.store(differ, std::memory_order_relaxed);
    context.barrier.arrive_and_wait(context.wait);
    differ = shared_differ.load(std::memory_order_relaxed) != 0;
  }
  if (!differ) return headers_;
  if (topology_.is_leader()) exchange_between_hosts(context);
  if (context.segment == nullptr) return headers_;
  CallHeader* shared = context.segment->all_headers();
  if (topology_.is_leader()) std::copy(headers_.begin(), headers_.end(), shared);
  context.barrier.arrive_and_wait(context.wait);
  headers_.assign(shared, shared + topology_.size);
  return headers_;
}

bool CallMatcher::headers_differ(CallContext& context) {
  HostSummary mine{};
  make_digest(headers_[0], mine.digest);
  for (const CallHeader& header : headers_) mine.differs |= header.kind == RD_JOIN || !equal(headers_[0], header);
  // In step s every leader hears from the one s hosts ahead what that one knows of s hosts. Compared with this leader's
  // digest in every step, a difference anywhere is known to all in the end: what reaches a leader is a tree of
  // comparisons that includes every host.
  uint32_t hosts = topology_.num_hosts(), host = topology_.my_host;
  for (uint32_t step = 1; step < hosts; step *= 2) {
    HostSummary theirs{};
    Link* behind = context.link(topology_.host_leader((host + hosts - step) % hosts));
    Link* ahead = context.link(topology_.host_leader((host + step) % hosts));
    send_receive(context.wait, behind, &mine, sizeof mine, ahead, &theirs, sizeof theirs);
    mine.differs |= theirs.differs || std::memcmp(mine.digest, theirs.digest, sizeof mine.digest) != 0;
  }
  return mine.differs != 0;
}

void CallMatcher::exchange_between_hosts(CallContext& context) {
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
    send_receive(context.wait, context.link(topology_.host_leader(behind)), gathered.data(),
                 num_sent * sizeof(CallHeader), context.link(topology_.host_leader(ahead)), gathered.data() + before,
                 num_received * sizeof(CallHeader));
    held += num;
  }
  headers_.resize(topology_.size);
  size_t next = 0;
  for (uint32_t i = 0; i < hosts; ++i)
    for (uint32_t member : topology_.members_by_host[(mine + i) % hosts]) headers_[member] = gathered[next++];
}

namespace {

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
