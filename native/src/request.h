// A call as the library keeps it: the caller's rd_call, checked and copied, and what became of it.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "base/clock.h"
#include "link/shared_memory.h"
#include "parts.h"
#include "ronde.h"

namespace ronde {

struct Request {
  Request(const rd_call& call, const Topology& topology, double remaining_s);  // throws CallError{RD_BAD_CALL}

  rd_kind kind;
  rd_dtype dtype;
  rd_op op;
  rd_algorithm algorithm;
  bool trusted;
  int peer;
  double prescale, postscale;
  uint64_t signature;
  std::string text;
  Parts parts;
  std::vector<uint64_t> counts, splits;
  Deadline deadline;

  bool finished = false;               // guarded by the queue
  std::atomic<int64_t> started_ns{0};  // for the stall watch, from another thread
  rd_result result{};
  std::vector<rd_asked> asked;  // filled by a mismatch
};

}  // namespace ronde
