// Ends every wait of this channel: after a local abort, or when another host's member sends an abort message or dies.
//
// Each pair of members on different hosts keeps one socket for this alone. A member that aborts or closes in good order
// sends an AbortMessage; the socket of a member that died just closes. All these sockets are in one epoll set, so a
// wait on data sockets polls a single additional descriptor and learns of the death of any member, not only of its
// neighbours.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/file_descriptor.h"

namespace ronde {

class AbortSignal {
 public:
  // Takes over sockets[member], -1 for a member without one. Throws CallError{RD_SYSTEM}.
  explicit AbortSignal(std::vector<FileDescriptor> sockets);

  // Ends the waits of this process and tells the members on other hosts. Only the first error counts.
  void trigger(const CallError& error);

  // Tells the members on other hosts that this one closes in good order. They fail only when they need it again.
  void announce_close();

  // Throws the error that was triggered here or by another member, if any.
  void check() const {
    if (triggered_.load(std::memory_order_acquire)) throw error_;
  }

  int descriptor() const { return epoll_.get(); }

  // Reads the abort messages that have arrived and triggers their errors. Called when descriptor() is readable.
  void poll();

  // Returns why a data socket to this member closed, with this errno or 0: the member's abort message when it sent one
  // (it may have aborted because of a third member), otherwise that this member is lost.
  CallError reason_closed(uint32_t member, int socket_errno);

 private:
  CallError receive(uint32_t member);
  void send_to_all(const CallError& error);

  std::vector<FileDescriptor> sockets_;
  FileDescriptor epoll_;
  FileDescriptor wakeup_;
  std::mutex mutex_;  // guards error_ until triggered_ is set
  std::atomic<bool> triggered_{false};
  CallError error_{RD_OK};
};

}  // namespace ronde
