#include "link/shared_memory_link.h"

#include <algorithm>

#include "base/futex.h"
#include "reduce/reduce.h"

namespace ronde {

SharedMemoryLink::SharedMemoryLink(const Topology& topology, SharedSegment* segment, LinkUse use, uint32_t peer)
    : Link(peer) {
  const auto& members = topology.local_members();
  uint32_t local = topology.local_index;
  uint32_t peer_local = uint32_t(std::find(members.begin(), members.end(), peer) - members.begin());
  out_ = segment->fifo(use, local, peer_local);
  in_ = segment->fifo(use, peer_local, local);
  peer_state_ = &segment->member_state(peer_local);
}

void SharedMemoryLink::notify_peer() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (peer_state_->waiters.load() == 0) return;
  peer_state_->wakeup_word.fetch_add(1);
  futex_wake_all(&peer_state_->wakeup_word);
}

size_t SharedMemoryLink::try_send(const char* data, size_t bytes) {
  uint64_t head = out_->head.load(std::memory_order_relaxed);
  size_t moved = std::min<uint64_t>(bytes, kFifoBytes - (head - out_->tail.load(std::memory_order_acquire)));
  if (moved == 0) return 0;
  size_t at = head % kFifoBytes, before_wrap = std::min<size_t>(moved, kFifoBytes - at);
  copy_bytes(out_->data + at, data, before_wrap, false);
  copy_bytes(out_->data, data + before_wrap, moved - before_wrap, false);
  out_->head.store(head + moved);
  notify_peer();
  return moved;
}

size_t SharedMemoryLink::try_receive(char* buffer, size_t bytes) {
  uint64_t tail = in_->tail.load(std::memory_order_relaxed);
  size_t moved = std::min<uint64_t>(bytes, in_->head.load(std::memory_order_acquire) - tail);
  if (moved == 0) return 0;
  size_t at = tail % kFifoBytes, before_wrap = std::min<size_t>(moved, kFifoBytes - at);
  copy_bytes(buffer, in_->data + at, before_wrap, false);
  copy_bytes(buffer + before_wrap, in_->data, moved - before_wrap, false);
  in_->tail.store(tail + moved);
  notify_peer();
  return moved;
}

}  // namespace ronde
