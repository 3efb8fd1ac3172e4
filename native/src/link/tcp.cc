#include "link/tcp.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace ronde {

Tcp::Tcp(uint32_t member, std::vector<FileDescriptor> sockets, Alarm* alarm)
    : Link(member), sockets_(std::move(sockets)), alarm_(alarm) {}

size_t Tcp::try_send(const char* data, size_t bytes) {
  size_t moved = 0;
  while (moved < bytes) {
    size_t piece = std::min<size_t>(bytes - moved, kBlockBytes - sent_ % kBlockBytes);
    ssize_t went = send(sending_socket(), data + moved, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (went < 0 && errno == EINTR) continue;
    if (went < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (went < 0) throw alarm_->why_closed(member(), errno);
    moved += size_t(went);
    sent_ += uint64_t(went);
    if (size_t(went) < piece) break;
  }
  return moved;
}

size_t Tcp::try_receive(char* room, size_t bytes) {
  size_t moved = 0;
  while (moved < bytes) {
    size_t piece = std::min<size_t>(bytes - moved, kBlockBytes - received_ % kBlockBytes);
    ssize_t came = recv(receiving_socket(), room + moved, piece, MSG_DONTWAIT);
    if (came < 0 && errno == EINTR) continue;
    if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (came <= 0) throw alarm_->why_closed(member(), came < 0 ? errno : 0);
    moved += size_t(came);
    received_ += uint64_t(came);
    if (size_t(came) < piece) break;
  }
  return moved;
}

}  // namespace ronde
