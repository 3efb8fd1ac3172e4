// A channel: one total order of collectives among its members.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "announced_calls.h"
#include "base/fork.h"
#include "call_context.h"
#include "call_matching.h"
#include "call_queue.h"
#include "link/abort.h"
#include "link/channel_events.h"
#include "link/links.h"

namespace ronde {

class Channel {
 public:
  // Links to members of other hosts are asked for through `events`, and given to open_link(). Throws CallError.
  Channel(Topology topology, std::shared_ptr<SharedSegment> segment, ChannelEvents events);
  ~Channel() { close(); }

  // Leaves in good order when no call is queued or running; otherwise aborts the channel. Calls that are under way, and
  // later ones, end with RD_CLOSED; those that other threads run, and have not announced, may do so a moment later.
  // Idempotent.
  void close();

  const Topology& topology() const { return topology_; }
  CallQueue& queue();           // throws CallError{RD_BAD_CALL} when the channel is for announced calls
  AnnouncedCalls& announced();  // throws CallError{RD_BAD_CALL} when max_announced is 0
  // Ends all waits of this host's members. With `report`, those of other hosts are to learn of it through the events.
  void abort(const CallError& error, bool report = true);
  // As Links::open.
  void open_link(uint32_t member, rd_link_kind kind, bool opened_here, std::vector<FileDescriptor> sockets);
  char* bucket(uint32_t area = 0) const;       // of this member; null when bucket_bytes is 0
  std::shared_ptr<void> bucket_owner() const;  // keeps the bucket's memory mapped
  void get_current_call(rd_current_call* current, uint32_t* missing);

 private:
  void execute(Call& call);
  void run_collective(Call& call, CallContext& context);
  void run_join(Call& call, CallContext& context);
  void contribute_zeros(const CallHeader& requested, const Deadline& deadline, CallContext& context);
  void run_algorithm(rd_algorithm algorithm, const Call& call, CallContext& context);
  void locate_in_bucket(Call& call) const;

  const uint32_t generation_ = fork_generation.load();
  std::atomic<bool> closed_{false};
  const Topology topology_;
  const std::shared_ptr<SharedSegment> segment_;
  const std::shared_ptr<char> private_bucket_;  // of a member that shares memory with no other
  AbortSignal abort_signal_;
  ChannelEvents events_;
  HostBarrier barrier_;
  CallMatcher matcher_;
  Links links_;
  uint32_t slots_used_ = 0;
  std::atomic<uint64_t> sequence_{0};  // written only by the thread that runs a collective
  ScratchBuffer contiguous_, incoming_, partials_;
  std::atomic<int32_t> waiting_for_{-1};       // the member that the running call waits for
  std::shared_ptr<AnnouncedCalls> announced_;  // null when max_announced is 0; otherwise it runs all collectives
  // The last member, because its thread uses the others.
  CallQueue queue_{[this](Call& call) { execute(call); }, [this](const CallError& error) { abort(error); }};
};

}  // namespace ronde
