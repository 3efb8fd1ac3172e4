#include "link/alarm.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>

namespace ronde {

namespace {

constexpr uint32_t kEvent = UINT32_MAX;

struct News {
  int32_t status;
  int32_t member;
  int32_t detail;
};

void watch(int epoll, int fd, uint32_t tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u32 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) throw CallError{RD_SYSTEM, -1, errno};
}

}  // namespace

Alarm::Alarm(std::vector<FileDescriptor> sockets)
    : sockets_(std::move(sockets)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_.get() < 0 || event_.get() < 0) throw CallError{RD_SYSTEM, -1, errno};
  watch(epoll_.get(), event_.get(), kEvent);
  for (uint32_t member = 0; member < sockets_.size(); ++member)
    if (sockets_[member].get() >= 0) watch(epoll_.get(), sockets_[member].get(), member);
}

void Alarm::raise(const CallError& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (raised_.load()) return;
    error_ = error;
    raised_.store(true, std::memory_order_release);
  }
  uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof one);
  tell(error);
}

void Alarm::depart() { tell(CallError{RD_CLOSED}); }

void Alarm::tell(const CallError& error) {
  News news{int32_t(error.status), int32_t(error.member), int32_t(error.detail)};
  for (const FileDescriptor& socket : sockets_) {
    if (socket.get() < 0) continue;
    (void)!send(socket.get(), &news, sizeof news, MSG_DONTWAIT | MSG_NOSIGNAL);
    shutdown(socket.get(), SHUT_WR);
  }
}

void Alarm::listen() {
  epoll_event found[8];
  int count = epoll_wait(epoll_.get(), found, 8, 0);
  for (int i = 0; i < count; ++i) {
    uint32_t member = found[i].data.u32;
    if (member == kEvent) continue;
    CallError news = read_news(member);
    if (news.status == RD_CLOSED) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, sockets_[member].get(), nullptr);
    } else {
      raise(news);
    }
  }
}

CallError Alarm::read_news(uint32_t member) {
  News news{};
  ssize_t got = recv(sockets_[member].get(), &news, sizeof news, MSG_DONTWAIT);
  if (got != ssize_t(sizeof news)) return CallError{RD_PEER_LOST, int(member), got < 0 ? errno : 0};
  bool known = news.status > RD_MISMATCH && news.status <= RD_CLOSED;
  return CallError{known ? rd_status(news.status) : RD_ABORTED, news.member, news.detail};
}

CallError Alarm::why_closed(uint32_t member, int socket_errno) {
  if (member < sockets_.size() && sockets_[member].get() >= 0) {
    pollfd ask{sockets_[member].get(), POLLIN | POLLRDHUP, 0};
    // Its news left before its data sockets closed, so they are here or never come.
    if (poll(&ask, 1, 100) > 0) {
      CallError news = read_news(member);
      if (news.status != RD_CLOSED) return news;
    }
  }
  return CallError{RD_PEER_LOST, int(member), socket_errno};
}

}  // namespace ronde
