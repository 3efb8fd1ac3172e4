#include "link/shared_memory.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/fork.h"
#include "base/futex.h"

namespace ronde {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kBeingWritten = UINT32_MAX;  // abort_status while abort_member and abort_detail are written

// Returns the offset of the next area of this many bytes and moves the end behind it, to a whole page.
uint64_t append_area(uint64_t* end, uint64_t bytes) {
  uint64_t start = *end;
  *end += (bytes + kPage - 1) / kPage * kPage;
  return start;
}

}  // namespace

void SharedSegment::compute_offsets(const Topology& topology) {
  num_local_ = topology.num_local();
  slot_bytes_ = topology.slot_bytes;
  // Buckets are an odd number of pages apart. At a distance of 256 MiB two streams share one way of the first-level
  // cache (Zen), and reading both side by side took ten times as long.
  bucket_bytes_ = ((topology.bucket_bytes + kPage - 1) / kPage | 1) * kPage;
  end_ = 0;
  append_area(&end_, sizeof(SegmentControl));
  member_states_ = append_area(&end_, num_local_ * sizeof(MemberState));
  headers_ = append_area(&end_, topology.size * sizeof(CallHeader));
  slots_ = append_area(&end_, uint64_t(num_local_) * 2 * slot_bytes_);
  results_ = append_area(&end_, 2 * slot_bytes_);
  fifos_ = append_area(&end_, uint64_t(2) * num_local_ * num_local_ * sizeof(ByteFifo));
  buckets_ = append_area(&end_, topology.bucket_bytes > 0 ? num_local_ * bucket_bytes_ : 0);
  ready_log_ = append_area(&end_, ReadyLog::bytes(topology));
}

SharedSegment::SharedSegment(const Topology& topology, int descriptor) {
  compute_offsets(topology);
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

ByteFifo* SharedSegment::fifo(LinkUse use, uint32_t from, uint32_t to) const {
  auto* fifos = reinterpret_cast<ByteFifo*>(base_ + fifos_);
  return &fifos[(uint64_t(use) * num_local_ + from) * num_local_ + to];
}

void SharedSegment::abort(const CallError& error) {
  uint32_t none = 0;
  if (control().abort_status.compare_exchange_strong(none, kBeingWritten)) {
    control().abort_member.store(error.member);
    control().abort_detail.store(error.detail);
    control().abort_status.store(uint32_t(error.status));
  }
  wake_all();
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
