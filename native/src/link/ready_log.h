// Which announced calls are ready, and in which order they run: agreed by the members of one host in their shared
// memory, without a coordinator.
//
// A call that may come in any order on any member has an id, the same on all members. A member *arrives* for an id. The
// last one to arrive *publishes* the id: it appends it to the log. The log is the order in which every member executes,
// in batches: the first member that comes to the begin of a batch decides how many entries it has (its *seal*), and the
// others follow.
//
//   arrived [id]                 how many members have arrived
//   log [position % capacity]    (position + 1) << 32 | id, when the entry is published
//   seals [position % capacity]  (position + 1) << 32 | entries of the batch that begins here
//   announced [member][id]       whether the member has arrived, for errors and reports; arrived[id] decides
//   executors [member]           where the thread sleeps that executes what nobody waits for, and whether to wake it
//
// A member arrives for an id again only after it has executed it. From this follows all that is needed:
//
//   claim                                             because
//   every arrival is counted for the right run        the last member sets arrived[id] to 0 before it publishes the
//                                                     entry; the next arrival comes after an execution, hence after
//                                                     the entry was read
//   an id is in the log once for all who have         for a second entry every member has to arrive again, also the
//   arrived once                                      one that has not executed the first
//   entries that some member has not executed: at     they have different ids (the line above), and there are
//   most capacity                                     `capacity` ids
//   no entry is overwritten before all have read it,  position p + capacity is given out only when all positions up
//   nor the seal of its batch                         to p are executed by all, by the line above
//   all members execute the same batches              a seal is written once, by compare-and-swap, and whoever reads
//                                                     it sees the entries that its writer saw
//   withdraw() takes back an arrival, or the call     while this member has not executed the id, nobody can have
//   runs: never both                                  arrived for its next run; so arrived[id] is 1 to members - 1 if
//                                                     somebody is missing, and else `members` or 0. One
//                                                     compare-and-swap tells and takes back
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "topology.h"

namespace ronde {

class ReadyLog {
 public:
  // Bytes of shared memory, filled with zeros at the begin, for the members of one host.
  static uint64_t bytes(const Topology& topology);
  ReadyLog(const Topology& topology, char* memory);

  uint32_t num_ids() const { return num_ids_; }

  // This member is ready for the id. Returns true if all the others are, too: then the caller publishes it.
  bool arrive(uint32_t id);
  // Publishes entries for these ids, one after the other. Who sees the first sees all of them.
  void publish(const uint32_t* ids, uint32_t num_ids);
  // Takes back an arrival. Returns false if all members have arrived: then the call runs.
  bool withdraw(uint32_t id);
  // Members that have not arrived.
  std::vector<uint32_t> missing(uint32_t id) const;

  bool is_published(uint32_t position) const {
    return int32_t(uint32_t(entry(log_, position).load() >> 32) - (position + 1)) >= 0;
  }
  // The id of a published entry that this member has not executed.
  uint32_t id_at(uint32_t position) const { return uint32_t(entry(log_, position).load(std::memory_order_acquire)); }

  // Returns the number of entries of the batch that begins here, or 0 if no member has decided it yet.
  uint32_t batch_size(uint32_t position) const;
  // Decides it, unless another member did so first; returns the decision. All `proposed` entries are published.
  uint32_t seal_batch(uint32_t position, uint32_t proposed);
  // This member executes the id now: it has not arrived for its next run.
  void mark_executed(uint32_t id) { announced(topology_.local_index, id).store(0, std::memory_order_relaxed); }

  // What a thread sleeps on until an entry is published.
  std::atomic<uint32_t>* word() const { return &control_->num_changes; }
  std::atomic<uint32_t>* waiters() const { return &control_->waiters; }

  // What this member's executing thread sleeps on, and whether who publishes an entry has to wake it. Who wants it has
  // to look for entries afterwards: it sees what was published before, or who publishes sees that it is wanted.
  std::atomic<uint32_t>* executor_word() const { return &executors_[topology_.local_index].num_wakeups; }
  void want_executor(bool wanted) { executors_[topology_.local_index].wanted.store(wanted); }
  void wake_executor() { wake_executor(topology_.local_index); }

  // Wakes the threads of all members without an entry.
  void wake();

 private:
  struct Control {
    alignas(64) std::atomic<uint32_t> end;          // the next position
    alignas(64) std::atomic<uint32_t> num_changes;  // futex word
    std::atomic<uint32_t> waiters;                  // threads that sleep on it
  };

  struct alignas(64) Executor {
    std::atomic<uint32_t> num_wakeups;  // futex word
    std::atomic<uint32_t> wanted;
  };

  void wake_executor(uint32_t local);
  std::atomic<uint64_t>& entry(std::atomic<uint64_t>* entries, uint32_t position) const {
    return entries[position & (capacity_ - 1)];
  }
  std::atomic<uint8_t>& announced(uint32_t member, uint32_t id) const {
    return announced_[uint64_t(member) * capacity_ + id];
  }

  const Topology& topology_;
  const uint32_t num_ids_;
  const uint32_t capacity_;  // num_ids_, or the next power of two
  Control* control_;
  Executor* executors_;
  std::atomic<uint64_t>* log_;
  std::atomic<uint64_t>* seals_;
  std::atomic<uint32_t>* arrived_;
  std::atomic<uint8_t>* announced_;
};

}  // namespace ronde
