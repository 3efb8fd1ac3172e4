// The links of a member to all others. A link to a member of another host is made when it is first asked for or opened
// by that member: a ring has two neighbours, recursive doubling log2(hosts), a tree log2(members).
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "link/abort.h"
#include "link/channel_events.h"
#include "link/shared_memory.h"
#include "link/tcp_link.h"
#include "topology.h"

namespace ronde {

class Links {
 public:
  // Throws CallError{RD_BAD_CALL} when members of this host have no shared memory.
  Links(const Topology& topology, SharedSegment* segment, AbortSignal* abort_signal, ChannelEvents* events);

  // The link for this use; inside a host it is the same for all. The same link for as long as this lives.
  Link* get(uint32_t member, rd_link_kind kind);

  // Opens one direction of a link to a member of another host, as TcpLink::open. For any thread. Throws
  // CallError{RD_BAD_CALL}.
  void open(uint32_t member, rd_link_kind kind, bool opened_here, std::vector<FileDescriptor> sockets);

 private:
  TcpLink* find_remote(uint32_t member, rd_link_kind kind);

  const Topology& topology_;
  AbortSignal* abort_signal_;
  ChannelEvents* events_;
  std::vector<std::unique_ptr<Link>> local_;  // by position among the members of this host; null for this one
  std::mutex mutex_;                          // guards the next one
  std::unordered_map<uint64_t, std::unique_ptr<TcpLink>> remote_;  // by member and kind
};

}  // namespace ronde
