// One call of one member, from rd_run or rd_submit to its result, and the header that describes it to the others.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
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

// The calls of all members in the last mismatch that this thread was told of, for rd_get_mismatch.
inline thread_local std::vector<rd_member_call> last_mismatch;

struct Callback {
  rd_callback function;
  void* context;
};

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
  const bool overlapped;  // with what this member computes
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

  // Set by the channel before the call runs: whether it works in place in one of this member's bucket areas, in which,
  // and at which byte of it.
  bool in_bucket = false;
  uint32_t bucket_area = 0;
  uint64_t bucket_offset = 0;

  // What became of it; valid when it is finished.
  rd_result result{};
  std::vector<rd_member_call> member_calls;  // of all members, after a mismatch
  std::atomic<int64_t> started_ns{0};        // read from other threads while the call runs

  // --- its state: queued, running, finished. Whoever starts it may touch its memory and must finish it.

  // Returns false when somebody else has started it: another thread runs it, or has ended it before.
  bool start();
  // The result is complete: ends all waits.
  void finish();
  // Ends a call that has not started, so that its memory is never touched. Returns false when it has started.
  bool end_before_start(const CallError& error);
  bool finished() const { return state_.load(std::memory_order_acquire) == kFinished; }

  // Waits until the call has finished; false when the deadline expires first. The main thread lets Python run its
  // signal handlers meanwhile. Throws CallError{RD_ABORTED, -1, EINTR} when one of them raised an exception, and
  // CallError{RD_FORKED} in a child that one of them has forked.
  bool wait(const Deadline& deadline);
  void wait_uninterrupted();

  // Returns false when the call has finished: then the callback is not kept.
  bool add_callback(const Callback& callback);
  // Called once by the thread that finished the call, which waits for no other call meanwhile.
  void run_callbacks();
  bool has_callbacks() const { return !callbacks_.empty(); }  // for that thread

 private:
  enum State : uint32_t { kQueued, kRunning, kFinished };

  bool sleep(int64_t limit_ns);

  std::atomic<uint32_t> state_{kQueued};  // futex word
  std::atomic<uint32_t> waiters_{0};      // threads that sleep on it
  std::mutex callbacks_mutex_;            // guards callbacks_
  std::vector<Callback> callbacks_;
};

}  // namespace ronde
