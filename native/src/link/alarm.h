// Wakes every wait of this channel: by a local abort, or when another member's alarm socket brings bad news.
//
// Each pair of members at different places keeps one socket that carries nothing but the end: a Stop from a
// member that gives up or leaves in good order, or a bare close from one that died. All of them sit in one epoll set,
// so a wait on data sockets adds a single descriptor and hears of the death of any member, not only of its neighbours.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/descriptor.h"
#include "base/stop.h"

namespace ronde {

class Alarm {
 public:
  // Takes over sockets[member]; -1 where there is none. Throws Stop{RD_SYSTEM}.
  explicit Alarm(std::vector<Descriptor> sockets);

  // The first one stays. Tells the others, wakes the waits of this process.
  void raise(const Stop& stop);

  // Tells the others that I leave in good order: they notice only when they need me again.
  void depart();

  // Throws the Stop that was raised or heard of.
  void check() const {
    if (raised_.load(std::memory_order_acquire)) throw stop_;
  }

  int descriptor() const { return epoll_.get(); }

  // Call when descriptor() is readable: reads the news and raises it.
  void listen();

  // A data socket of this member closed, with this errno or 0: its alarm socket knows whether it gave up because of
  // somebody else.
  Stop why_closed(uint32_t member, int error);

 private:
  Stop read_news(uint32_t member);
  void tell(const Stop& stop);

  std::vector<Descriptor> sockets_;
  Descriptor epoll_;
  Descriptor event_;
  std::mutex mutex_;  // guards stop_ until raised_
  std::atomic<bool> raised_{false};
  Stop stop_{RD_OK};
};

}  // namespace ronde
