#include "link/gate.h"

#include "base/futex.h"

namespace ronde {

uint32_t Gate::arrive() {
  uint32_t phase = phase_.load(std::memory_order_relaxed) + 1;
  phase_.store(phase, std::memory_order_relaxed);
  if (segment_ == nullptr) return phase;
  segment_->line(topology_.local_index).phase.store(phase, std::memory_order_relaxed);
  SegmentHead& head = segment_->head();
  if (head.arrived[phase & 1].fetch_add(1, std::memory_order_acq_rel) + 1 < topology_.num_local()) return phase;
  head.arrived[phase & 1].store(0, std::memory_order_relaxed);
  head.open.store(phase);  // sequentially consistent: a sleeper either sees this or is seen by the next line
  if (head.sleepers.load() > 0) futex_wake_all(&head.open);
  return phase;
}

bool Gate::passed(uint32_t phase) const {
  return segment_ == nullptr || int32_t(segment_->head().open.load(std::memory_order_acquire) - phase) >= 0;
}

void Gate::wait(uint32_t phase, Waiter& waiter) {
  if (segment_ == nullptr) return;
  SegmentHead& head = segment_->head();
  auto hopeless = [&] {
    for (uint32_t local = 0; local < topology_.num_local(); ++local) {
      const MemberLine& line = segment_->line(local);
      if (line.departed.load() != 0 && int32_t(line.phase.load() - phase) < 0)
        throw CallError{RD_PEER_LOST, int(topology_.local_members()[local])};
    }
  };
  try {
    waiter.until(&head.open, &head.sleepers, [&] { return passed(phase); }, hopeless);
  } catch (CallError& error) {
    // Those who did not come are to blame for running out of time.
    if (error.status == RD_TIMEOUT && error.member < 0) {
      auto late = missing();
      if (!late.empty()) error.member = int(late[0]);
    }
    throw;
  }
}

std::vector<uint32_t> Gate::missing() const {
  std::vector<uint32_t> late;
  if (segment_ == nullptr) return late;
  uint32_t phase = phase_.load(std::memory_order_relaxed);
  for (uint32_t local = 0; local < topology_.num_local(); ++local)
    if (int32_t(segment_->line(local).phase.load(std::memory_order_relaxed) - phase) < 0)
      late.push_back(topology_.local_members()[local]);
  return late;
}

}  // namespace ronde
