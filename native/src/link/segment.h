// The shared memory of one place: who has arrived, what each member asks for, staging slots, pipes, buckets.
//
//   head | one line per local member | headers of all members | slots [local][2] | results [2] | pipes [2][from][to] |
//   buckets [local]
//
// The file is sparse: room that is never touched costs nothing.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "topology.h"

namespace ronde {

// What one member asks for; travels ahead of the data.
struct Header {
  uint64_t sequence;
  uint64_t signature;
  uint64_t count;   // elements, all parts together
  uint64_t offset;  // in the bucket, for a call that works in place there
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t algorithm;
  int32_t peer;
  uint32_t in_bucket;
  double prescale;
  double postscale;
  char text[RD_TEXT];
};

struct alignas(64) SegmentHead {
  std::atomic<uint32_t> abort_status;  // rd_status, 0 while all is well; the first one stays
  std::atomic<int32_t> abort_member;
  std::atomic<int32_t> abort_detail;
  alignas(64) std::atomic<uint32_t> arrived[2];  // at the even and the odd phase
  alignas(64) std::atomic<uint32_t> open;        // the last phase everybody has reached
  std::atomic<uint32_t> sleepers;
};

struct alignas(64) MemberLine {
  std::atomic<uint32_t> phase;     // arrivals so far: who is missing can be read off
  std::atomic<uint32_t> departed;  // closed its channel in good order: it will not come any more
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;  // threads of this member that wait for its bell
  alignas(64) Header header[2];
};

constexpr uint64_t kPipeBytes = 128 * 1024;  // a power of two

// Bytes in flight from one member to another; one writer, one reader.
struct alignas(64) PipeRoom {
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char data[kPipeBytes];
};

// Collectives and send/receive never share a pipe: they have their own orders.
enum class Traffic { kCollective = 0, kDirect = 1 };

class Segment {
 public:
  // Maps the descriptor. Throws CallError{RD_SYSTEM}.
  Segment(const Topology& topology, int descriptor);
  // For tests: ranks as threads share one mapping, so that a sanitizer sees them touch the same memory.
  Segment(const Topology& topology, void* base);
  ~Segment();
  Segment(const Segment&) = delete;

  static uint64_t bytes(const Topology& topology);

  SegmentHead& head() const { return *reinterpret_cast<SegmentHead*>(base_); }
  MemberLine& line(uint32_t local) const { return reinterpret_cast<MemberLine*>(base_ + lines_)[local]; }
  Header* everyones_headers() const { return reinterpret_cast<Header*>(base_ + headers_); }
  char* slot(uint32_t local, uint32_t which) const {
    return base_ + slots_ + (uint64_t(local) * 2 + which) * slot_bytes_;
  }
  char* result(uint32_t which) const { return base_ + results_ + which * slot_bytes_; }
  PipeRoom* pipe(Traffic traffic, uint32_t from, uint32_t to) const;
  char* bucket(uint32_t local) const { return base_ + buckets_ + local * bucket_bytes_; }

  // The first abort of anybody stays; everyone who waits wakes up.
  void abort(const CallError& error);
  // Says that a member has left in good order: only those who still need it are concerned.
  void depart(uint32_t local);
  void check() const;  // throws CallError when aborted

 private:
  void place(const Topology& topology);
  void wake_everyone();

  char* base_ = nullptr;
  uint64_t mapped_ = 0;
  uint32_t locals_ = 0;
  uint64_t slot_bytes_ = 0, bucket_bytes_ = 0;
  uint64_t lines_ = 0, headers_ = 0, slots_ = 0, results_ = 0, pipes_ = 0, buckets_ = 0, end_ = 0;
};

}  // namespace ronde
