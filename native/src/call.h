// One call of one member, from rd_run or rd_submit to its result, and the header that describes it to the others.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "base/clock.h"
#include "reduce/reduce.h"
#include "ronde.h"
#include "spans.h"
#include "topology.h"

namespace ronde {

// What one member asks for. The header travels ahead of the data.
struct CallHeader {
  uint64_t sequence;
  uint64_t signature;
  uint64_t count;          // elements of all spans together
  uint64_t bucket_offset;  // bytes from the start of the area, for a call that works in place in a bucket area
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t algorithm;
  int32_t peer;
  uint32_t in_bucket;
  uint32_t bucket_area;  // which of its two areas this member uses; members may differ
  double prescale;
  double postscale;
  char description[RD_DESCRIPTION_BYTES];
};

// Cuts the description to RD_DESCRIPTION_BYTES.
void copy_description(char* to, const std::string& description);

struct Call {
  // Copies the caller's rd_call. Throws CallError{RD_BAD_CALL} when it makes no sense among these members.
  Call(const rd_call& params, const Topology& topology, const Deadline& deadline);

  CallHeader header(rd_algorithm chosen, uint64_t sequence) const;
  uint64_t element_bytes() const { return spans.element_bytes(); }

  // What the caller asked for, as in rd_call.
  const rd_kind kind;
  const ReduceParams reduce_params;
  const rd_algorithm algorithm;
  const bool pre_agreed;
  const int peer;
  const uint64_t signature;
  const std::string description;
  const SpanList spans;
  const std::vector<uint64_t> counts, splits;
  const Deadline deadline;

  // Set by the channel before the call runs: whether it works in place in one of this member's bucket areas, in which,
  // and at which byte of it.
  bool in_bucket = false;
  uint32_t bucket_area = 0;
  uint64_t bucket_offset = 0;

  // What became of it.
  std::atomic<int64_t> started_ns{0};  // read from other threads while the call runs
  bool finished = false;               // guarded by the CallQueue; the two below are valid when it is true
  rd_result result{};
  std::vector<rd_member_call> member_calls;  // of all members, after a mismatch
};

}  // namespace ronde
