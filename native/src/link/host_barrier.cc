#include "link/host_barrier.h"

#include "base/futex.h"

namespace ronde {

uint32_t HostBarrier::arrive() {
  uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
  phase_.store(phase, std::memory_order_relaxed);
  if (segment_ == nullptr) return phase;
  segment_->member_state(topology_.local_index).phase.store(phase, std::memory_order_relaxed);
  SegmentControl& control = segment_->control();
  if (control.arrived[phase & 1].fetch_add(1, std::memory_order_acq_rel) + 1 < topology_.num_local()) return phase;
  control.arrived[phase & 1].store(0, std::memory_order_relaxed);
  // Sequentially consistent: a waiter either sees this store or is counted by the load that follows.
  control.completed_phase.store(phase);
  if (control.waiters.load() > 0) futex_wake_all(&control.completed_phase);
  return phase;
}

bool HostBarrier::is_complete(uint32_t phase) const {
  return segment_ == nullptr ||
         int32_t(segment_->control().completed_phase.load(std::memory_order_acquire) - phase) >= 0;
}

void HostBarrier::wait(uint32_t phase, CallWait& wait) {
  if (segment_ == nullptr) return;
  SegmentControl& control = segment_->control();
  auto check_possible = [&] {
    for (uint32_t local = 0; local < topology_.num_local(); ++local) {
      const MemberState& member = segment_->member_state(local);
      if (member.left.load() != 0 && int32_t(member.phase.load() - phase) < 0)
        throw CallError{RD_PEER_LOST, int(topology_.local_members()[local])};
    }
  };
  try {
    wait.until(&control.completed_phase, &control.waiters, [&] { return is_complete(phase); }, check_possible);
  } catch (CallError& error) {
    // A timeout names a member that has not arrived.
    if (error.status == RD_TIMEOUT && error.member < 0) {
      auto not_arrived = missing();
      if (!not_arrived.empty()) error.member = int(not_arrived[0]);
    }
    throw;
  }
}

std::vector<uint32_t> HostBarrier::missing() const {
  std::vector<uint32_t> members;
  if (segment_ == nullptr) return members;
  uint32_t phase = phase_.load(std::memory_order_relaxed);
  for (uint32_t local = 0; local < topology_.num_local(); ++local)
    if (int32_t(segment_->member_state(local).phase.load(std::memory_order_relaxed) - phase) < 0)
      members.push_back(topology_.local_members()[local]);
  return members;
}

}  // namespace ronde
