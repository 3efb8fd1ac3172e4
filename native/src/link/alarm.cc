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
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) throw Stop{RD_SYSTEM, -1, errno};
}

}  // namespace

Alarm::Alarm(std::vector<Descriptor> sockets)
    : sockets_(std::move(sockets)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_.get() < 0 || event_.get() < 0) throw Stop{RD_SYSTEM, -1, errno};
  watch(epoll_.get(), event_.get(), kEvent);
  for (uint32_t member = 0; member < sockets_.size(); ++member)
    if (sockets_[member].get() >= 0) watch(epoll_.get(), sockets_[member].get(), member);
}

void Alarm::raise(const Stop& stop) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (raised_.load()) return;
    stop_ = stop;
    raised_.store(true, std::memory_order_release);
  }
  uint64_t one = 1;
  (void)!write(event_.get(), &one, sizeof one);
  tell(stop);
}

void Alarm::depart() { tell(Stop{RD_CLOSED}); }

void Alarm::tell(const Stop& stop) {
  News news{int32_t(stop.status), int32_t(stop.member), int32_t(stop.detail)};
  for (const Descriptor& socket : sockets_) {
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
    Stop news = read_news(member);
    if (news.status == RD_CLOSED) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, sockets_[member].get(), nullptr);
    } else {
      raise(news);
    }
  }
}

Stop Alarm::read_news(uint32_t member) {
  News news{};
  ssize_t got = recv(sockets_[member].get(), &news, sizeof news, MSG_DONTWAIT);
  if (got != ssize_t(sizeof news)) return Stop{RD_PEER_LOST, int(member), got < 0 ? errno : 0};
  bool known = news.status > RD_MISMATCH && news.status <= RD_CLOSED;
  return Stop{known ? rd_status(news.status) : RD_ABORTED, news.member, news.detail};
}

Stop Alarm::why_closed(uint32_t member, int error) {
  if (member < sockets_.size() && sockets_[member].get() >= 0) {
    pollfd ask{sockets_[member].get(), POLLIN | POLLRDHUP, 0};
    // Its news left before its data sockets closed, so they are here or never come.
    if (poll(&ask, 1, 100) > 0) {
      Stop news = read_news(member);
      if (news.status != RD_CLOSED) return news;
    }
  }
  return Stop{RD_PEER_LOST, int(member), error};
}

}  // namespace ronde
