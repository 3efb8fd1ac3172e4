// A link through shared memory: two byte FIFOs, one for each direction, each with one writer and one reader.
//
//   writer sees head - tail == kFifoBytes  -> full, it waits for its wakeup word
//   reader sees head == tail               -> empty, it waits for its wakeup word
//   each side notifies its peer after moving its own counter; head and tail are all that both sides touch
#pragma once

#include "link/link.h"
#include "link/shared_memory.h"

namespace ronde {

class SharedMemoryLink final : public Link {
 public:
  SharedMemoryLink(const Topology& topology, SharedSegment* segment, uint32_t peer);
  size_t try_send(const char* data, size_t bytes) override;
  size_t try_receive(char* buffer, size_t bytes) override;
  bool peer_left() const override { return peer_state_->left.load() != 0 && in_->head.load() == in_->tail.load(); }

 private:
  void notify_peer();

  ByteFifo* out_;
  ByteFifo* in_;
  MemberState* peer_state_;
};

}  // namespace ronde
