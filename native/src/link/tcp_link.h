// A link to one member of another host. Each direction has its own TCP sockets, which the sender opens: the first send
// asks for them, and until they are there nothing is sent. A receiver waits for them as it waits for bytes.
//
// The stream is cut into blocks that use the sockets in turn, so both sides know which socket carries the next byte and
// no block needs a label.
#pragma once

#include <atomic>
#include <vector>

#include "link/abort.h"
#include "link/channel_events.h"
#include "link/link.h"

namespace ronde {

class TcpLink final : public Link {
 public:
  TcpLink(uint32_t peer, rd_link_kind kind, AbortSignal* abort_signal, ChannelEvents* events);
  ~TcpLink() override;

  // Opens the direction to the peer (opened_here), or that from it. A direction that is open stays as it is. For any
  // thread, but one at a time.
  void open(bool opened_here, std::vector<FileDescriptor> sockets);

  size_t try_send(const char* data, size_t bytes) override;
  size_t try_receive(char* buffer, size_t bytes) override;
  bool uses_sockets() const override { return true; }
  int sending_socket() const override { return to_peer_.socket(); }
  int receiving_socket() const override { return from_peer_.socket(); }

 private:
  static constexpr uint64_t kBlockBytes = 256 * 1024;

  struct Direction {
    std::vector<FileDescriptor> sockets;  // set before is_open
    std::atomic<bool> is_open{false};
    uint64_t moved = 0;

    // That of the next byte; -1 before it is open.
    int socket() const {
      if (!is_open.load(std::memory_order_acquire)) return -1;
      return sockets[moved / kBlockBytes % sockets.size()].get();
    }
  };

  const rd_link_kind kind_;
  AbortSignal* abort_signal_;
  ChannelEvents* events_;
  bool wanted_ = false;
  Direction to_peer_, from_peer_;
};

}  // namespace ronde
