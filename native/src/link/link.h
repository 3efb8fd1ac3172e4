// A byte stream to and from one other member. There are two kinds, SharedMemoryLink and TcpLink; algorithms see only
// this interface.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

class CallWait;

class Link {
 public:
  explicit Link(uint32_t peer) : peer_(peer) {}
  virtual ~Link() = default;

  // Move what can be moved without waiting and return how many bytes that was. Throw CallError when the peer is lost.
  virtual size_t try_send(const char* data, size_t bytes) = 0;
  virtual size_t try_receive(char* buffer, size_t bytes) = 0;

  // Whether bytes go through sockets; and the socket of the next byte, or -1 when that is not open yet.
  virtual bool uses_sockets() const { return false; }
  virtual int sending_socket() const { return -1; }
  virtual int receiving_socket() const { return -1; }

  // Whether the peer has left and all it sent has been read. A socket reports this by closing.
  virtual bool peer_left() const { return false; }

  uint32_t peer() const { return peer_; }

 private:
  uint32_t peer_;
};

// Sends a whole message and receives another at the same time; returns when both are complete. A null link means that
// there is nothing to send, or to receive.
void send_receive(CallWait& wait, Link* to, const void* data, size_t bytes, Link* from, void* buffer,
                  size_t buffer_bytes);

}  // namespace ronde
