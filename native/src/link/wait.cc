#include "link/wait.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>

#include "base/futex.h"
#include "base/python_signals.h"
#include "link/link.h"

namespace ronde {

SpinPolicy spin_policy(uint32_t num_local, uint32_t num_cores) {
  return num_local <= num_cores ? SpinPolicy{5000, 50} : SpinPolicy{600, 5};
}

void CallWait::pause(uint32_t spins) const {
  spins % policy_.yield_every + 1 == policy_.yield_every ? void(sched_yield()) : cpu_pause();
}

void CallWait::check() const {
  check_abort();
  if (deadline_.expired()) throw CallError{RD_TIMEOUT, waiting_for_->load(std::memory_order_relaxed)};
}

void CallWait::check_signals() const {
  bool raised = run_signal_handlers();
  if (made_by_parent(generation_)) throw CallError{RD_FORKED};  // a handler has forked, and this is the child
  if (raised) throw CallError{RD_ABORTED, int(topology_.member_index), EINTR};
}

void CallWait::sleep_on(std::atomic<uint32_t>* word, uint32_t seen) const {
  int64_t limit_ns = std::min<int64_t>(kMaxSleepNs, deadline_.remaining_ns());
  if (limit_ns > 0 && !futex_wait(word, seen, limit_ns)) check_signals();
}

bool CallWait::waits_for_socket(const StepResult& result) {
  return (result.sending != nullptr && result.sending->uses_sockets()) ||
         (result.receiving != nullptr && result.receiving->uses_sockets());
}

void CallWait::record_peer(const StepResult& result) {
  Link* link = result.receiving != nullptr ? result.receiving : result.sending;
  // A member that is late can still be connected to: if a link is not open, its other end is to blame.
  if (result.sending != nullptr && result.sending->uses_sockets() && result.sending->sending_socket() < 0)
    link = result.sending;
  waiting_for_->store(link == nullptr ? -1 : int32_t(link->peer()), std::memory_order_relaxed);
}

void CallWait::check_peer_left(const StepResult& result) {
  for (Link* link : {result.receiving, result.sending})
    if (link != nullptr && link->peer_left()) throw CallError{RD_PEER_LOST, int(link->peer())};
}

void CallWait::poll_sockets(const StepResult& result) {
  pollfd sockets[3] = {{abort_signal_->descriptor(), POLLIN, 0}, {-1, POLLOUT, 0}, {-1, POLLIN, 0}};
  bool shared_memory = false;
  // A link that is not open has no socket: the abort signal wakes this thread when it is.
  if (result.sending != nullptr) {
    sockets[1].fd = result.sending->sending_socket();
    shared_memory |= !result.sending->uses_sockets();
  }
  if (result.receiving != nullptr) {
    sockets[2].fd = result.receiving->receiving_socket();
    shared_memory |= !result.receiving->uses_sockets();
  }
  // A peer that has closed the direction to it, and has not opened the other one, has left the channel. What it sent
  // before may be on its way in a link that this member is about to get, so it has some time for that.
  bool is_half_open = result.receiving != nullptr && sockets[2].fd < 0 && result.receiving->sending_socket() >= 0;
  if (is_half_open && closed_link_ != result.receiving) {
    sockets[2] = {result.receiving->sending_socket(), POLLRDHUP, 0};
  } else if (is_half_open && now_ns() - closed_ns_ > kPeerClosedNs) {
    throw abort_signal_->reason_closed(result.receiving->peer(), 0);
  }
  int64_t max_ns = shared_memory ? kMixedSleepNs : kMaxSleepNs;
  int64_t limit_ns = std::max<int64_t>(0, std::min(max_ns, deadline_.remaining_ns()));
  timespec limit{time_t(limit_ns / 1000000000), long(limit_ns % 1000000000)};
  int ready = ppoll(sockets, 3, &limit, nullptr);
  if (ready > 0 && sockets[0].revents != 0) abort_signal_->clear_wakeup();
  if (ready > 0 && is_half_open && sockets[2].revents != 0) closed_link_ = result.receiving, closed_ns_ = now_ns();
  if (ready < 0 || (ready == 0 && !shared_memory)) check_signals();
}

}  // namespace ronde
