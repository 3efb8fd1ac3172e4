#include "link/abort.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "base/clock.h"

namespace ronde {

AbortSignal::AbortSignal() : wakeup_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wakeup_.get() < 0) throw CallError{RD_SYSTEM, -1, errno};
}

bool AbortSignal::trigger(const CallError& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (triggered_.load()) return false;
    error_ = error;
    triggered_.store(true, std::memory_order_release);
  }
  wake();
  return true;
}

void AbortSignal::wake() {
  uint64_t one = 1;
  (void)!write(wakeup_.get(), &one, sizeof one);
}

void AbortSignal::clear_wakeup() {
  uint64_t count;
  (void)!read(wakeup_.get(), &count, sizeof count);
  if (triggered_.load()) wake();  // it may have been triggered after the last check
}

CallError AbortSignal::reason_closed(uint32_t member, int socket_errno) {
  // A member reports its abort before it closes its sockets. The report comes through its control thread, the
  // coordinator and this rank's control thread, so it may be a moment later, or never.
  constexpr int64_t kReportNs = 300'000'000;
  const int64_t until_ns = now_ns() + kReportNs;
  while (!triggered_.load(std::memory_order_acquire)) {
    int64_t remaining_ms = (until_ns - now_ns()) / 1'000'000;
    if (remaining_ms <= 0) return CallError{RD_PEER_LOST, int(member), socket_errno};
    pollfd wakeup{wakeup_.get(), POLLIN, 0};
    if (::poll(&wakeup, 1, int(remaining_ms)) > 0) clear_wakeup();
  }
  return error_;
}

}  // namespace ronde
