#include "link/waiter.h"

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

void Waiter::pause(uint32_t looks) const {
  looks % policy_.stretch + 1 == policy_.stretch ? void(sched_yield()) : cpu_pause();
}

void Waiter::check() const {
  if (!topology_.single_host()) alarm_->listen();  // a wait for memory does not hear the sockets
  alarm_->check();
  if (segment_ != nullptr) segment_->check();
  if (deadline_.expired()) throw CallError{RD_TIMEOUT, waiting_for_->load(std::memory_order_relaxed)};
}

void Waiter::check_interrupt() const {
  if (run_signal_handlers()) throw CallError{RD_ABORTED, int(topology_.member_index), EINTR};
}

void Waiter::sleep_on(std::atomic<uint32_t>* word, uint32_t seen) const {
  int64_t left = std::min<int64_t>(kSliceNs, deadline_.remaining_ns());
  if (left > 0 && !futex_wait(word, seen, left)) check_interrupt();
}

bool Waiter::wants_sockets(const Turn& turn) {
  return (turn.sending != nullptr && turn.sending->sending_socket() >= 0) ||
         (turn.receiving != nullptr && turn.receiving->receiving_socket() >= 0);
}

void Waiter::note(const Turn& turn) {
  Link* link = turn.receiving != nullptr ? turn.receiving : turn.sending;
  waiting_for_->store(link == nullptr ? -1 : int32_t(link->member()), std::memory_order_relaxed);
}

void Waiter::check_departed(const Turn& turn) {
  for (Link* link : {turn.receiving, turn.sending})
    if (link != nullptr && link->departed()) throw CallError{RD_PEER_LOST, int(link->member())};
}

void Waiter::wait_sockets(const Turn& turn) {
  pollfd asked[3] = {{alarm_->descriptor(), POLLIN, 0}, {-1, POLLOUT, 0}, {-1, POLLIN, 0}};
  bool pipes = false;
  if (turn.sending != nullptr) pipes |= (asked[1].fd = turn.sending->sending_socket()) < 0;
  if (turn.receiving != nullptr) pipes |= (asked[2].fd = turn.receiving->receiving_socket()) < 0;
  int64_t left = std::max<int64_t>(0, std::min(pipes ? kMixedNs : kSliceNs, deadline_.remaining_ns()));
  timespec limit{time_t(left / 1000000000), long(left % 1000000000)};
  int ready = ppoll(asked, 3, &limit, nullptr);
  if (ready < 0 || (ready == 0 && !pipes)) check_interrupt();
}

}  // namespace ronde
