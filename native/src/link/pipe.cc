#include "link/pipe.h"

#include <algorithm>

#include "base/futex.h"
#include "reduce/reduce.h"

namespace ronde {

namespace {

uint32_t local_index(const Topology& topology, uint32_t member) {
  const auto& locals = topology.local_members();
  return uint32_t(std::find(locals.begin(), locals.end(), member) - locals.begin());
}

}  // namespace

Pipe::Pipe(const Topology& topology, Segment* segment, Traffic traffic, uint32_t member) : Link(member) {
  uint32_t other = local_index(topology, member);
  out_ = segment->pipe(traffic, topology.local_index, other);
  in_ = segment->pipe(traffic, other, topology.local_index);
  other_ = &segment->line(other);
}

void Pipe::ring_bell() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (other_->sleepers.load() == 0) return;
  other_->bell.fetch_add(1);
  futex_wake_all(&other_->bell);
}

size_t Pipe::try_send(const char* data, size_t bytes) {
  uint64_t written = out_->written.load(std::memory_order_relaxed);
  size_t moved = std::min<uint64_t>(bytes, kPipeBytes - (written - out_->read.load(std::memory_order_acquire)));
  if (moved == 0) return 0;
  size_t at = written % kPipeBytes, first = std::min<size_t>(moved, kPipeBytes - at);
  copy_bytes(out_->data + at, data, first, false);
  copy_bytes(out_->data, data + first, moved - first, false);
  out_->written.store(written + moved);
  ring_bell();
  return moved;
}

size_t Pipe::try_receive(char* room, size_t bytes) {
  uint64_t read = in_->read.load(std::memory_order_relaxed);
  size_t moved = std::min<uint64_t>(bytes, in_->written.load(std::memory_order_acquire) - read);
  if (moved == 0) return 0;
  size_t at = read % kPipeBytes, first = std::min<size_t>(moved, kPipeBytes - at);
  copy_bytes(room, in_->data + at, first, false);
  copy_bytes(room + first, in_->data, moved - first, false);
  in_->read.store(read + moved);
  ring_bell();
  return moved;
}

}  // namespace ronde
