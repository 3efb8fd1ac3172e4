#include "link/segment.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/futex.h"

namespace ronde {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kBeingWritten = UINT32_MAX;  // what it is about is there before the status is

uint64_t take(uint64_t* end, uint64_t bytes) {
  uint64_t start = *end;
  *end += (bytes + kPage - 1) / kPage * kPage;
  return start;
}

}  // namespace

void Segment::place(const Topology& topology) {
  locals_ = topology.num_local();
  slot_bytes_ = topology.slot_bytes;
  // An odd number of pages apart: at a distance of 256 MiB two streams share one way of the first-level cache (Zen),
  // and reading both side by side took ten times as long.
  bucket_bytes_ = ((topology.bucket_bytes + kPage - 1) / kPage | 1) * kPage;
  end_ = 0;
  take(&end_, sizeof(SegmentHead));
  lines_ = take(&end_, locals_ * sizeof(MemberLine));
  headers_ = take(&end_, topology.size * sizeof(Header));
  slots_ = take(&end_, uint64_t(locals_) * 2 * slot_bytes_);
  results_ = take(&end_, 2 * slot_bytes_);
  pipes_ = take(&end_, uint64_t(2) * locals_ * locals_ * sizeof(PipeRoom));
  buckets_ = take(&end_, topology.bucket_bytes > 0 ? locals_ * bucket_bytes_ : 0);
}

Segment::Segment(const Topology& topology, int descriptor) {
  place(topology);
  void* base = mmap(nullptr, end_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) throw CallError{RD_SYSTEM, -1, errno};
  base_ = static_cast<char*>(base);
  mapped_ = end_;
}

Segment::Segment(const Topology& topology, void* base) {
  place(topology);
  base_ = static_cast<char*>(base);
}

Segment::~Segment() {
  if (mapped_ > 0) munmap(base_, mapped_);
}

uint64_t Segment::bytes(const Topology& topology) {
  Segment measure(topology, nullptr);
  return measure.end_;
}

PipeRoom* Segment::pipe(Traffic traffic, uint32_t from, uint32_t to) const {
  auto* rooms = reinterpret_cast<PipeRoom*>(base_ + pipes_);
  return &rooms[(uint64_t(traffic) * locals_ + from) * locals_ + to];
}

void Segment::abort(const CallError& error) {
  uint32_t well = 0;
  SegmentHead& h = head();
  if (h.abort_status.compare_exchange_strong(well, kBeingWritten)) {
    h.abort_member.store(error.member);
    h.abort_detail.store(error.detail);
    h.abort_status.store(uint32_t(error.status));
  }
  wake_everyone();
}

void Segment::depart(uint32_t local) {
  line(local).departed.store(1);
  wake_everyone();
}

void Segment::wake_everyone() {
  futex_wake_all(&head().open);
  for (uint32_t local = 0; local < locals_; ++local) {
    line(local).bell.fetch_add(1);
    futex_wake_all(&line(local).bell);
  }
}

void Segment::check() const {
  uint32_t status = head().abort_status.load(std::memory_order_acquire);
  if (status == 0 || status == kBeingWritten) return;
  throw CallError{rd_status(status), head().abort_member.load(), head().abort_detail.load()};
}

}  // namespace ronde
