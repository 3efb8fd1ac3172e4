// Wakes every wait of this channel: by a local abort, or when another member's alarm socket brings bad news.
//
// Each pair of members at different places keeps one socket that carries nothing but the end: a CallError from a
// member that gives up or leaves in good order, or a bare close from one that died. All of them sit in one epoll set,
// so a wait on data sockets adds a single descriptor and hears of the death of any member, not only of its neighbours.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/file_descriptor.h"

namespace ronde {

class Alarm {
 public:
  // Takes over sockets[member]; -1 where there is none. Throws CallError{RD_SYSTEM}.
  explicit Alarm(std::vector<FileDescriptor> sockets);

  // The first one stays. Tells the others, wakes the waits of this process.
  void raise(const CallError& error);

  // Tells the others that I leave in good order: they notice only when they need me again.
  void depart();

  // Throws the CallError that was raised or heard of.
  void check() const {
    if (raised_.load(std::memory_order_acquire)) throw error_;
  }

  int descriptor() const { return epoll_.get(); }

  // Call when descriptor() is readable: reads the news and raises it.
  void listen();

  // A data socket of this member closed, with this errno or 0: its alarm socket knows whether it gave up because of
  // somebody else.
  CallError why_closed(uint32_t member, int socket_errno);

 private:
  CallError read_news(uint32_t member);
  void tell(const CallError& error);

  std::vector<FileDescriptor> sockets_;
  FileDescriptor epoll_;
  FileDescriptor event_;
  std::mutex mutex_;  // guards error_ until raised_
  std::atomic<bool> raised_{false};
  CallError error_{RD_OK};
};

}  // namespace ronde
