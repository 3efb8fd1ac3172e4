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
  if (!topology_.single_host()) abort_signal_->poll();  // a wait for shared memory does not poll sockets itself
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
  return (result.sending != nullptr && result.sending->sending_socket() >= 0) ||
         (result.receiving != nullptr && result.receiving->receiving_socket() >= 0);
}

void CallWait::record_peer(const StepResult& result) {
  Link* link = result.receiving != nullptr ? result.receiving : result.sending;
  waiting_for_->store(link == nullptr ? -1 : int32_t(link->peer()), std::memory_order_relaxed);
}

void CallWait::check_peer_left(const StepResult& result) {
  for (Link* link : {result.receiving, result.sending})
    if (link != nullptr && link->peer_left()) throw CallError{RD_PEER_LOST, int(link->peer())};
}

void CallWait::poll_sockets(const StepResult& result) {
  pollfd sockets[3] = {{abort_signal_->descriptor(), POLLIN, 0}, {-1, POLLOUT, 0}, {-1, POLLIN, 0}};
  bool shared_memory = false;
  if (result.sending != nullptr) shared_memory |= (sockets[1].fd = result.sending->sending_socket()) < 0;
  if (result.receiving != nullptr) shared_memory |= (sockets[2].fd = result.receiving->receiving_socket()) < 0;
  int64_t max_ns = shared_memory ? kMixedSleepNs : kMaxSleepNs;
  int64_t limit_ns = std::max<int64_t>(0, std::min(max_ns, deadline_.remaining_ns()));
  timespec limit{time_t(limit_ns / 1000000000), long(limit_ns % 1000000000)};
  int ready = ppoll(sockets, 3, &limit, nullptr);
  if (ready < 0 || (ready == 0 && !shared_memory)) check_signals();
}

}  // namespace ronde
