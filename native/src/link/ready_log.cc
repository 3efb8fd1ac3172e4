#include "link/ready_log.h"

#include "base/futex.h"

namespace ronde {

namespace {

uint32_t capacity_for(uint32_t num_ids) {
  uint32_t capacity = 64;  // whole cache lines for every array
  while (capacity < num_ids) capacity *= 2;
  return capacity;
}

uint64_t tagged(uint32_t position, uint32_t value) { return uint64_t(position + 1) << 32 | value; }

bool has_tag(uint64_t entry, uint32_t position) { return uint32_t(entry >> 32) == position + 1; }

}  // namespace

uint64_t ReadyLog::bytes(const Topology& topology) {
  if (topology.max_announced == 0) return 0;
  uint64_t per_id = 2 * sizeof(uint64_t) + sizeof(uint32_t) + topology.num_local();
  return sizeof(Control) + topology.num_local() * sizeof(Executor) + capacity_for(topology.max_announced) * per_id;
}

ReadyLog::ReadyLog(const Topology& topology, char* memory)
    : topology_(topology), num_ids_(topology.max_announced), capacity_(capacity_for(num_ids_)) {
  auto next = [&](auto*& area, uint64_t number) {
    area = reinterpret_cast<std::decay_t<decltype(area)>>(memory);
    memory += number * sizeof *area;
  };
  next(control_, 1);
  next(executors_, topology.num_local());
  next(log_, capacity_);
  next(seals_, capacity_);
  next(arrived_, capacity_);
  next(announced_, uint64_t(capacity_) * topology.num_local());
}

bool ReadyLog::arrive(uint32_t id) {
  announced(topology_.local_index, id).store(1, std::memory_order_relaxed);
  if (arrived_[id].fetch_add(1, std::memory_order_acq_rel) + 1 < topology_.num_local()) return false;
  arrived_[id].store(0, std::memory_order_relaxed);
  return true;
}

void ReadyLog::publish(const uint32_t* ids, uint32_t num_ids) {
  uint32_t position = control_->end.fetch_add(num_ids, std::memory_order_relaxed);
  // Backwards, because readers wait for the first. Sequentially consistent: a waiter either sees the entries or is seen
  // by the loads that follow.
  for (uint32_t i = num_ids; i-- > 0;) entry(log_, position + i).store(tagged(position + i, ids[i]));
  control_->num_changes.fetch_add(1);
  if (control_->waiters.load() > 0) futex_wake_all(&control_->num_changes);
  for (uint32_t local = 0; local < topology_.num_local(); ++local)
    if (executors_[local].wanted.load() != 0) wake_executor(local);
}

void ReadyLog::wake_executor(uint32_t local) {
  executors_[local].num_wakeups.fetch_add(1);
  futex_wake_all(&executors_[local].num_wakeups);
}

bool ReadyLog::withdraw(uint32_t id) {
  uint32_t arrived = arrived_[id].load(std::memory_order_relaxed);
  do {
    if (arrived == 0 || arrived == topology_.num_local()) return false;
  } while (!arrived_[id].compare_exchange_weak(arrived, arrived - 1, std::memory_order_relaxed));
  announced(topology_.local_index, id).store(0, std::memory_order_relaxed);
  return true;
}

std::vector<uint32_t> ReadyLog::missing(uint32_t id) const {
  std::vector<uint32_t> members;
  for (uint32_t local = 0; local < topology_.num_local(); ++local)
    if (announced(local, id).load(std::memory_order_relaxed) == 0) members.push_back(topology_.local_members()[local]);
  return members;
}

uint32_t ReadyLog::batch_size(uint32_t position) const {
  uint64_t seal = entry(seals_, position).load(std::memory_order_acquire);
  return has_tag(seal, position) ? uint32_t(seal) : 0;
}

uint32_t ReadyLog::seal_batch(uint32_t position, uint32_t proposed) {
  std::atomic<uint64_t>& seal = entry(seals_, position);
  uint64_t seen = seal.load(std::memory_order_acquire);
  while (!has_tag(seen, position))
    if (seal.compare_exchange_weak(seen, tagged(position, proposed), std::memory_order_acq_rel)) return proposed;
  return uint32_t(seen);
}

void ReadyLog::wake() {
  control_->num_changes.fetch_add(1);
  futex_wake_all(&control_->num_changes);
  for (uint32_t local = 0; local < topology_.num_local(); ++local) wake_executor(local);
}

}  // namespace ronde
