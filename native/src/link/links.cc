#include "link/links.h"

#include <algorithm>

#include "link/shared_memory_link.h"

namespace ronde {

Links::Links(const Topology& topology, SharedSegment* segment, AbortSignal* abort_signal, ChannelEvents* events)
    : topology_(topology), abort_signal_(abort_signal), events_(events) {
  for (uint32_t member : topology.local_members()) {
    local_.emplace_back();
    if (member == topology.member_index) continue;
    if (segment == nullptr) throw CallError{RD_BAD_CALL, int(member)};
    local_.back() = std::make_unique<SharedMemoryLink>(topology, segment, member);
  }
}

Link* Links::get(uint32_t member, rd_link_kind kind) {
  if (topology_.hosts[member] != topology_.my_host) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find_remote(member, kind);
  }
  const auto& members = topology_.local_members();
  auto found = std::lower_bound(members.begin(), members.end(), member);
  return local_[size_t(found - members.begin())].get();
}

void Links::open(uint32_t member, rd_link_kind kind, bool opened_here, std::vector<FileDescriptor> sockets) {
  if (member >= topology_.size || topology_.hosts[member] == topology_.my_host)
    throw CallError{RD_BAD_CALL, int(member)};
  std::lock_guard<std::mutex> lock(mutex_);
  find_remote(member, kind)->open(opened_here, std::move(sockets));
}

TcpLink* Links::find_remote(uint32_t member, rd_link_kind kind) {
  std::unique_ptr<TcpLink>& link = remote_[uint64_t(member) * RD_NUM_LINK_KINDS + kind];
  if (link == nullptr) link = std::make_unique<TcpLink>(member, kind, abort_signal_, events_);
  return link.get();
}

}  // namespace ronde
