// A link through shared memory: two one-way rings of bytes, each with one writer and one reader.
//
//   writer sees written - read == room  -> full, waits for its bell
//   reader sees written == read         -> empty, waits for its bell
//   each rings the other's bell after moving its own counter; the counters are the only things both touch
#pragma once

#include "link/link.h"
#include "link/segment.h"

namespace ronde {

class Pipe final : public Link {
 public:
  Pipe(const Topology& topology, Segment* segment, Traffic traffic, uint32_t member);
  size_t try_send(const char* data, size_t bytes) override;
  size_t try_receive(char* room, size_t bytes) override;
  bool departed() const override { return other_->departed.load() != 0 && in_->written.load() == in_->read.load(); }

 private:
  void ring_bell();

  PipeRoom* out_;
  PipeRoom* in_;
  MemberLine* other_;
};

}  // namespace ronde
