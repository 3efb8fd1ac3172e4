// A byte stream to and from one other member. Two kinds: Pipe (shared memory) and Tcp. Algorithms see only this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ronde {

class Link {
 public:
  explicit Link(uint32_t member) : member_(member) {}
  virtual ~Link() = default;

  // Move what can be moved at once, without waiting; 0 when nothing can. Throw CallError when the member is gone.
  virtual size_t try_send(const char* data, size_t bytes) = 0;
  virtual size_t try_receive(char* room, size_t bytes) = 0;

  // The socket the next byte leaves or comes through; -1 for shared memory.
  virtual int sending_socket() const { return -1; }
  virtual int receiving_socket() const { return -1; }

  // Whether the member has left and nothing it sent is still to be read. A socket says so by closing.
  virtual bool departed() const { return false; }

  uint32_t member() const { return member_; }

 private:
  uint32_t member_;
};

}  // namespace ronde
