// A link over several TCP sockets to one member. The stream is cut into blocks that go round the sockets in turn, so
// both sides know which socket carries the next byte and no block needs a label.
#pragma once

#include <vector>

#include "base/file_descriptor.h"
#include "link/alarm.h"
#include "link/link.h"

namespace ronde {

class Tcp final : public Link {
 public:
  Tcp(uint32_t member, std::vector<FileDescriptor> sockets, Alarm* alarm);
  size_t try_send(const char* data, size_t bytes) override;
  size_t try_receive(char* room, size_t bytes) override;
  int sending_socket() const override { return socket_of(sent_); }
  int receiving_socket() const override { return socket_of(received_); }

 private:
  static constexpr uint64_t kBlockBytes = 256 * 1024;
  int socket_of(uint64_t position) const { return sockets_[position / kBlockBytes % sockets_.size()].get(); }

  std::vector<FileDescriptor> sockets_;
  Alarm* alarm_;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

}  // namespace ronde
