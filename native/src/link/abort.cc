#include "link/abort.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace ronde {

namespace {

constexpr uint32_t kWakeup = UINT32_MAX;  // in place of a member index

struct AbortMessage {
  int32_t status;
  int32_t member;
  int32_t detail;
};

void add_to_epoll(int epoll, int fd, uint32_t tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u32 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) throw CallError{RD_SYSTEM, -1, errno};
}

}  // namespace

AbortSignal::AbortSignal(std::vector<FileDescriptor> sockets)
    : sockets_(std::move(sockets)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wakeup_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_.get() < 0 || wakeup_.get() < 0) throw CallError{RD_SYSTEM, -1, errno};
  add_to_epoll(epoll_.get(), wakeup_.get(), kWakeup);
  for (uint32_t member = 0; member < sockets_.size(); ++member)
    if (sockets_[member].get() >= 0) add_to_epoll(epoll_.get(), sockets_[member].get(), member);
}

void AbortSignal::trigger(const CallError& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (triggered_.load()) return;
    error_ = error;
    triggered_.store(true, std::memory_order_release);
  }
  uint64_t one = 1;
  (void)!write(wakeup_.get(), &one, sizeof one);
  send_to_all(error);
}

void AbortSignal::announce_close() { send_to_all(CallError{RD_CLOSED}); }

void AbortSignal::send_to_all(const CallError& error) {
  AbortMessage message{int32_t(error.status), int32_t(error.member), int32_t(error.detail)};
  for (const FileDescriptor& socket : sockets_) {
    if (socket.get() < 0) continue;
    (void)!send(socket.get(), &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
    shutdown(socket.get(), SHUT_WR);
  }
}

void AbortSignal::poll() {
  epoll_event events[8];
  int count = epoll_wait(epoll_.get(), events, 8, 0);
  for (int i = 0; i < count; ++i) {
    uint32_t member = events[i].data.u32;
    if (member == kWakeup) continue;
    CallError error = receive(member);
    if (error.status == RD_CLOSED) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, sockets_[member].get(), nullptr);
    } else {
      trigger(error);
    }
  }
}

CallError AbortSignal::receive(uint32_t member) {
  AbortMessage message{};
  ssize_t received = recv(sockets_[member].get(), &message, sizeof message, MSG_DONTWAIT);
  if (received != ssize_t(sizeof message)) return CallError{RD_PEER_LOST, int(member), received < 0 ? errno : 0};
  bool known = message.status > RD_MISMATCH && message.status <= RD_CLOSED;
  return CallError{known ? rd_status(message.status) : RD_ABORTED, message.member, message.detail};
}

CallError AbortSignal::reason_closed(uint32_t member, int socket_errno) {
  if (member < sockets_.size() && sockets_[member].get() >= 0) {
    pollfd abort_socket{sockets_[member].get(), POLLIN | POLLRDHUP, 0};
    // A member sends its abort message before it closes its data sockets, so the message arrives soon or never.
    if (::poll(&abort_socket, 1, 100) > 0) {
      CallError error = receive(member);
      if (error.status != RD_CLOSED) return error;
    }
  }
  return CallError{RD_PEER_LOST, int(member), socket_errno};
}

}  // namespace ronde
