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
  uint64_t bucket_offset;  // bytes, for a call that works in place in the bucket
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t algorithm;
  int32_t peer;
  uint32_t in_bucket;
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
  Deadline deadline;

  // Of an announced call: its id, when it was announced, and how long it may run.
  int announced_id = -1;
  int64_t announced_ns = 0;
  double timeout_s = 0;

  // Set by the channel before the call runs: whether it works in place in this member's bucket, and at which byte.
  bool in_bucket = false;
  uint64_t bucket_offset = 0;

  // What became of it.
  std::atomic<int64_t> started_ns{0};  // read from other threads while the call runs
  bool finished = false;               // guarded by the CallQueue or AnnouncedCalls; then the two below are valid
  rd_result result{};
  std::vector<rd_member_call> member_calls;  // of all members, after a mismatch
};

}  // namespace ronde
