#include "link/shared_memory_link.h"

#include <algorithm>

#include "base/futex.h"

namespace ronde {

SharedMemoryLink::SharedMemoryLink(const Topology& topology, SharedSegment* segment, uint32_t peer) : Link(peer) {
  const auto& members = topology.local_members();
  uint32_t local = topology.local_index;
  uint32_t peer_local = uint32_t(std::find(members.begin(), members.end(), peer) - members.begin());
  out_ = segment->fifo(local, peer_local);
  in_ = segment->fifo(peer_local, local);
  peer_state_ = &segment->member_state(peer_local);
}

void SharedMemoryLink::notify_peer() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (peer_state_->waiters.load() == 0) return;
  peer_state_->wakeup_word.fetch_add(1);
  futex_wake_all(&peer_state_->wakeup_word);
}

size_t SharedMemoryLink::try_send(const char* data, size_t bytes) {
  size_t moved = out_->write(data, bytes);
  if (moved > 0) notify_peer();
  return moved;
}

size_t SharedMemoryLink::try_receive(char* buffer, size_t bytes) {
  size_t moved = in_->read(buffer, bytes);
  if (moved > 0) notify_peer();
  return moved;
}

}  // namespace ronde
