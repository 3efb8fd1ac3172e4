// A link over several TCP sockets to one member. The stream is cut into blocks that use the sockets in turn, so both
// sides know which socket carries the next byte and no block needs a label.
#pragma once

#include <vector>

#include "base/file_descriptor.h"
#include "link/abort.h"
#include "link/link.h"

namespace ronde {

class TcpLink final : public Link {
 public:
  TcpLink(uint32_t peer, std::vector<FileDescriptor> sockets, AbortSignal* abort_signal);
  size_t try_send(const char* data, size_t bytes) override;
  size_t try_receive(char* buffer, size_t bytes) override;
  int sending_socket() const override { return socket_at(sent_); }
  int receiving_socket() const override { return socket_at(received_); }

 private:
  static constexpr uint64_t kBlockBytes = 256 * 1024;
  int socket_at(uint64_t position) const { return sockets_[position / kBlockBytes % sockets_.size()].get(); }

  std::vector<FileDescriptor> sockets_;
  AbortSignal* abort_signal_;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

}  // namespace ronde
