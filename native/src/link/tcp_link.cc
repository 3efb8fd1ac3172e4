#include "link/tcp_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace ronde {

TcpLink::TcpLink(uint32_t peer, std::vector<FileDescriptor> sockets, AbortSignal* abort_signal)
    : Link(peer), sockets_(std::move(sockets)), abort_signal_(abort_signal) {}

size_t TcpLink::try_send(const char* data, size_t bytes) {
  size_t moved = 0;
  while (moved < bytes) {
    size_t wanted = std::min<size_t>(bytes - moved, kBlockBytes - sent_ % kBlockBytes);
    ssize_t sent = send(sending_socket(), data + moved, wanted, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0) throw abort_signal_->reason_closed(peer(), errno);
    moved += size_t(sent);
    sent_ += uint64_t(sent);
    if (size_t(sent) < wanted) break;
  }
  return moved;
}

size_t TcpLink::try_receive(char* buffer, size_t bytes) {
  size_t moved = 0;
  while (moved < bytes) {
    size_t wanted = std::min<size_t>(bytes - moved, kBlockBytes - received_ % kBlockBytes);
    ssize_t received = recv(receiving_socket(), buffer + moved, wanted, MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (received <= 0) throw abort_signal_->reason_closed(peer(), received < 0 ? errno : 0);
    moved += size_t(received);
    received_ += uint64_t(received);
    if (size_t(received) < wanted) break;
  }
  return moved;
}

}  // namespace ronde
