// The shared memory of the members of one host, the segment: control words of the barrier and of aborts, the state and
// the call header of each member, staging slots, byte FIFOs and buckets.
//
//   control | state of each local member | headers of all members | slots [local][2] | results [2] |
//   fifos [from][to] | buckets [local][2] | ready log
//
// The file is sparse: memory that is never touched costs nothing.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "call.h"
#include "link/ready_log.h"
#include "topology.h"

namespace ronde {

struct alignas(64) SegmentControl {
  std::atomic<uint32_t> abort_status;  // rd_status of the first abort, 0 while there is none
  std::atomic<int32_t> abort_member;
  std::atomic<int32_t> abort_detail;
  alignas(64) std::atomic<uint32_t> arrived[2];       // members at the even and at the odd phase of the barrier
  alignas(64) std::atomic<uint32_t> completed_phase;  // the last phase that all members have arrived at; futex word
  std::atomic<uint32_t> waiters;                      // threads that sleep on completed_phase
  std::atomic<uint32_t> headers_differ;               // whether the headers of all hosts are needed; set by the leader
};

struct alignas(64) MemberState {
  std::atomic<uint32_t> phase;                    // the last phase of the barrier that this member arrived at
  std::atomic<uint32_t> left;                     // 1 after the member closed its channel in good order
  alignas(64) std::atomic<uint32_t> wakeup_word;  // futex word: peers change it after they moved bytes in a FIFO
  std::atomic<uint32_t> waiters;                  // threads of this member that sleep on wakeup_word
  alignas(64) CallHeader header[2];
};

constexpr uint64_t kFifoBytes = 128 * 1024;  // a power of two

// Move what fits or what is there, and return how many bytes that was. `capacity` is that of `data`, a power of two.
size_t write_fifo(std::atomic<uint64_t>& head, const std::atomic<uint64_t>& tail, char* data, uint64_t capacity,
                  const char* from, size_t bytes);
size_t read_fifo(const std::atomic<uint64_t>& head, std::atomic<uint64_t>& tail, const char* data, uint64_t capacity,
                 char* to, size_t bytes);

// The bytes under way from one member to another: one writer, one reader. head and tail count all bytes ever.
struct alignas(64) ByteFifo {
  std::atomic<uint64_t> head;              // written by the sender
  alignas(64) std::atomic<uint64_t> tail;  // written by the receiver
  alignas(64) char data[kFifoBytes];

  // Move what fits or what is there, and return how many bytes that was.
  size_t write(const char* from, size_t bytes) { return write_fifo(head, tail, data, kFifoBytes, from, bytes); }
  size_t read(char* to, size_t bytes) { return read_fifo(head, tail, data, kFifoBytes, to, bytes); }
};

class SharedSegment {
 public:
  // Maps the descriptor; in a forked child the memory becomes private. Throws CallError: RD_BAD_CALL when its size is
  // not bytes(topology).
  SharedSegment(const Topology& topology, int descriptor);
  // Uses memory that the caller mapped. Tests run members as threads that share one mapping, so that a sanitizer sees
  // them touch the same memory.
  SharedSegment(const Topology& topology, void* base);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;

  // Throws CallError{RD_BAD_CALL} when that is more than a file can have.
  static uint64_t bytes(const Topology& topology);

  SegmentControl& control() const { return *reinterpret_cast<SegmentControl*>(base_); }
  MemberState& member_state(uint32_t local) const {
    return reinterpret_cast<MemberState*>(base_ + member_states_)[local];
  }
  CallHeader* all_headers() const { return reinterpret_cast<CallHeader*>(base_ + headers_); }
  char* slot(uint32_t local, uint32_t which) const {
    return base_ + slots_ + (uint64_t(local) * 2 + which) * slot_bytes_;
  }
  char* result(uint32_t which) const { return base_ + results_ + which * slot_bytes_; }
  ByteFifo* fifo(uint32_t from, uint32_t to) const;
  char* bucket(uint32_t local, uint32_t area) const {
    return base_ + buckets_ + local * member_bucket_bytes_ + area * bucket_bytes_;
  }
  ReadyLog ready_log(const Topology& topology) const { return {topology, base_ + ready_log_}; }

  // Records the error unless another abort came first, and wakes all waiters. Returns whether it was the first.
  bool abort(const CallError& error);
  // Records that a member has closed in good order. Only members that still need it fail.
  void mark_left(uint32_t local);
  // Throws the error of the abort, if there was one.
  void check() const;

 private:
  void compute_offsets(const Topology& topology);
  void wake_all();

  char* base_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  uint32_t num_local_ = 0;
  uint64_t slot_bytes_ = 0, bucket_bytes_ = 0, member_bucket_bytes_ = 0;
  uint64_t member_states_ = 0, headers_ = 0, slots_ = 0, results_ = 0, fifos_ = 0, buckets_ = 0, ready_log_ = 0,
           end_ = 0;  // offsets
};

}  // namespace ronde
