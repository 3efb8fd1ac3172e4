#include "link/tcp_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace ronde {

TcpLink::TcpLink(uint32_t peer, rd_link_kind kind, AbortSignal* abort_signal, ChannelEvents* events)
    : Link(peer), kind_(kind), abort_signal_(abort_signal), events_(events) {}

// A child that was forked before this link owned its sockets has copies of them: closing them here would not tell the
// peer.
TcpLink::~TcpLink() {
  for (const Direction* direction : {&to_peer_, &from_peer_})
    for (const FileDescriptor& socket : direction->sockets) shutdown(socket.get(), SHUT_RDWR);
}

void TcpLink::open(bool opened_here, std::vector<FileDescriptor> sockets) {
  Direction& direction = opened_here ? to_peer_ : from_peer_;
  if (sockets.empty() || direction.is_open.load()) return;
  direction.sockets = std::move(sockets);
  direction.is_open.store(true, std::memory_order_release);
  abort_signal_->wake();
}

size_t TcpLink::try_send(const char* data, size_t bytes) {
  if (bytes == 0) return 0;
  if (!to_peer_.is_open.load(std::memory_order_acquire)) {
    wanted_ = wanted_ || events_->want_link(peer(), kind_);
    return 0;
  }
  size_t moved = 0;
  while (moved < bytes) {
    size_t wanted = std::min<size_t>(bytes - moved, kBlockBytes - to_peer_.moved % kBlockBytes);
    ssize_t sent = send(to_peer_.socket(), data + moved, wanted, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0) throw abort_signal_->reason_closed(peer(), errno);
    moved += size_t(sent);
    to_peer_.moved += uint64_t(sent);
    if (size_t(sent) < wanted) break;
  }
  return moved;
}

size_t TcpLink::try_receive(char* buffer, size_t bytes) {
  if (!from_peer_.is_open.load(std::memory_order_acquire)) return 0;
  size_t moved = 0;
  while (moved < bytes) {
    size_t wanted = std::min<size_t>(bytes - moved, kBlockBytes - from_peer_.moved % kBlockBytes);
    ssize_t received = recv(from_peer_.socket(), buffer + moved, wanted, MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (received <= 0) throw abort_signal_->reason_closed(peer(), received < 0 ? errno : 0);
    moved += size_t(received);
    from_peer_.moved += uint64_t(received);
    if (size_t(received) < wanted) break;
  }
  return moved;
}

}  // namespace ronde
