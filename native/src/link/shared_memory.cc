#include "link/shared_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/fork.h"
#include "base/futex.h"
#include "reduce/reduce.h"

namespace ronde {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kBeingWritten = UINT32_MAX;  // abort_status while abort_member and abort_detail are written

// Returns the offset of the next area, of `count` pieces of `bytes` each, and moves the end behind it, to a whole page.
// Throws when the memory would be larger than a file can be.
uint64_t append_area(uint64_t* end, uint64_t count, uint64_t bytes) {
  uint64_t start = *end, area;
  bool too_large = __builtin_mul_overflow(count, bytes, &area) || __builtin_add_overflow(area, kPage - 1, &area) ||
                   __builtin_add_overflow(start, area / kPage * kPage, end) || *end > uint64_t(INT64_MAX);
  if (too_large) throw CallError{RD_BAD_CALL};
  return start;
}

}  // namespace

size_t write_fifo(std::atomic<uint64_t>& head, const std::atomic<uint64_t>& tail, char* data, uint64_t capacity,
                  const char* from, size_t bytes) {
  uint64_t start = head.load(std::memory_order_relaxed);
  size_t moved = std::min<uint64_t>(bytes, capacity - (start - tail.load(std::memory_order_acquire)));
  if (moved == 0) return 0;
  size_t at = start % capacity, before_wrap = std::min<size_t>(moved, capacity - at);
  copy_bytes(data + at, from, before_wrap, false);
  copy_bytes(data, from + before_wrap, moved - before_wrap, false);
  head.store(start + moved);
  return moved;
}

size_t read_fifo(const std::atomic<uint64_t>& head, std::atomic<uint64_t>& tail, const char* data, uint64_t capacity,
                 char* to, size_t bytes) {
  uint64_t start = tail.load(std::memory_order_relaxed);
  size_t moved = std::min<uint64_t>(bytes, head.load(std::memory_order_acquire) - start);
  if (moved == 0) return 0;
  size_t at = start % capacity, before_wrap = std::min<size_t>(moved, capacity - at);
  copy_bytes(to, data + at, before_wrap, false);
  copy_bytes(to + before_wrap, data, moved - before_wrap, false);
  tail.store(start + moved);
  return moved;
}

void SharedSegment::compute_offsets(const Topology& topology) {
  num_local_ = topology.num_local();
  slot_bytes_ = topology.slot_bytes;
  bucket_bytes_ = topology.bucket_bytes;
  // The buckets of two members are an odd number of pages apart. At a distance of 256 MiB two streams share one way of
  // the first-level cache (Zen), and reading both side by side took ten times as long.
  uint64_t bytes, pages;
  if (__builtin_mul_overflow(bucket_bytes_, 2, &bytes) || __builtin_add_overflow(bytes, kPage - 1, &pages) ||
      __builtin_mul_overflow(pages / kPage | 1, kPage, &member_bucket_bytes_))
    throw CallError{RD_BAD_CALL};
  end_ = 0;
  append_area(&end_, 1, sizeof(SegmentControl));
  member_states_ = append_area(&end_, num_local_, sizeof(MemberState));
  headers_ = append_area(&end_, topology.size, sizeof(CallHeader));
  slots_ = append_area(&end_, uint64_t(2) * num_local_, slot_bytes_);
  results_ = append_area(&end_, 2, slot_bytes_);
  fifos_ = append_area(&end_, uint64_t(num_local_) * num_local_, sizeof(ByteFifo));
  buckets_ = append_area(&end_, bucket_bytes_ > 0 ? num_local_ : 0, member_bucket_bytes_);
  ready_log_ = append_area(&end_, 1, ReadyLog::bytes(topology));
}

SharedSegment::SharedSegment(const Topology& topology, int descriptor) {
  compute_offsets(topology);
  // Memory that ends too early would kill the process where it is touched.
  struct stat file;
  if (fstat(descriptor, &file) != 0) throw CallError{RD_SYSTEM, -1, errno};
  if (uint64_t(file.st_size) != end_) throw CallError{RD_BAD_CALL};
  void* base = mmap(nullptr, end_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) throw CallError{RD_SYSTEM, -1, errno};
  base_ = static_cast<char*>(base);
  mapped_bytes_ = end_;
  try {
    own_mapping(base, end_, descriptor);
  } catch (...) {
    munmap(base, end_);
    throw;
  }
}

SharedSegment::SharedSegment(const Topology& topology, void* base) {
  compute_offsets(topology);
  base_ = static_cast<char*>(base);
}

SharedSegment::~SharedSegment() {
  if (mapped_bytes_ > 0) unmap(base_, mapped_bytes_);
}

uint64_t SharedSegment::bytes(const Topology& topology) {
  SharedSegment unmapped(topology, nullptr);
  return unmapped.end_;
}

ByteFifo* SharedSegment::fifo(uint32_t from, uint32_t to) const {
  auto* fifos = reinterpret_cast<ByteFifo*>(base_ + fifos_);
  return &fifos[uint64_t(from) * num_local_ + to];
}

bool SharedSegment::abort(const CallError& error) {
  uint32_t none = 0;
  bool is_first = control().abort_status.compare_exchange_strong(none, kBeingWritten);
  if (is_first) {
    control().abort_member.store(error.member);
    control().abort_detail.store(error.detail);
    control().abort_status.store(uint32_t(error.status));
  }
  wake_all();
  return is_first;
}

void SharedSegment::mark_left(uint32_t local) {
  member_state(local).left.store(1);
  wake_all();
}

void SharedSegment::wake_all() {
  futex_wake_all(&control().completed_phase);
  for (uint32_t local = 0; local < num_local_; ++local) {
    member_state(local).wakeup_word.fetch_add(1);
    futex_wake_all(&member_state(local).wakeup_word);
  }
}

void SharedSegment::check() const {
  uint32_t status = control().abort_status.load(std::memory_order_acquire);
  if (status == 0 || status == kBeingWritten) return;
  throw CallError{rd_status(status), control().abort_member.load(), control().abort_detail.load()};
}

}  // namespace ronde
