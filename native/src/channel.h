// A channel: one total order of collectives among its members, plus an order of its own for each pair's sends.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "link/abort.h"
#include "meeting.h"
#include "queue.h"
#include "team.h"

namespace ronde {

class Channel {
 public:
  // `sockets[member]` are the connections to a member at another place: the first is the alarm, the rest carry data.
  // `direct[member]` is the one for send and receive. Throws CallError.
  Channel(const rd_layout& layout, std::shared_ptr<SharedSegment> segment,
          std::vector<std::vector<FileDescriptor>> sockets, std::vector<FileDescriptor> direct);
  ~Channel();

  const Topology& topology() const { return topology_; }
  Queue& queue_of(const Request& request);
  void abort(const CallError& error);
  char* bucket() const;                        // mine; null without one
  std::shared_ptr<void> bucket_owner() const;  // keeps it in memory
  void look(rd_status_now* now, uint32_t* missing);

 private:
  using Work = void (Channel::*)(Request&, Team&);

  // One order of calls: what it needs while one of them runs.
  struct Order {
    Order(Channel& channel, Work work)
        : queue([this, &channel, work](Request& request) { channel.execute(request, *this, work); }) {}
    Scratch flat, passing;
    std::atomic<int32_t> waiting_for{-1};
    Queue queue;  // last, because its thread uses the others
  };

  void execute(Request& request, Order& order, Work work);
  void collective(Request& request, Team& team);
  void join(Request& request, Team& team);
  void take_part(const CallHeader& asked, Team& team);
  void direct_message(Request& request, Team& team);
  void run_algorithm(rd_algorithm algorithm, const Job& job, Team& team);
  CallHeader header_of(const Request& request, rd_algorithm algorithm) const;
  bool in_bucket(const Request& request, uint64_t* offset) const;
  void require_agreement(Request& request, Verdict verdict);

  const Topology topology_;
  const std::shared_ptr<SharedSegment> segment_;
  const std::shared_ptr<char[]> own_bucket_;  // of a member that shares memory with nobody
  AbortSignal abort_signal_;
  HostBarrier barrier_;
  Meeting meeting_;
  std::vector<std::unique_ptr<Link>> links_, direct_links_;
  uint32_t slot_ = 0;
  std::atomic<uint64_t> sequence_{0};  // only the thread that runs a collective counts it up
  std::unique_ptr<Order> collectives_;
  std::mutex orders_mutex_;                                               // guards direct_orders_
  std::map<std::pair<int, bool>, std::unique_ptr<Order>> direct_orders_;  // by (member, sending)
};

}  // namespace ronde
