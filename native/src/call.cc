#include "call.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/forbid_waiting.h"
#include "base/fork.h"
#include "base/futex.h"
#include "base/python_signals.h"

namespace ronde {

namespace {

constexpr int64_t kMaxSleepNs = 50'000'000;

void require(bool valid) {
  if (!valid) throw CallError{RD_BAD_CALL};
}

// Throws unless all enumerations are in range, so that the constructor may convert them.
const rd_call& checked(const rd_call& params) {
  require(params.kind >= 0 && params.kind < RD_NUM_KINDS && params.dtype >= 0 && params.dtype < RD_NUM_DTYPES &&
          params.op >= 0 && params.op < RD_NUM_OPS && params.algorithm >= RD_AUTO &&
          params.algorithm < RD_NUM_ALGORITHMS && (params.spans != nullptr || params.num_spans == 0));
  return params;
}

std::vector<uint64_t> copied(const uint64_t* numbers, uint32_t size) {
  return numbers == nullptr ? std::vector<uint64_t>() : std::vector<uint64_t>(numbers, numbers + size);
}

uint64_t sum(const std::vector<uint64_t>& numbers) {
  uint64_t total = 0;
  for (uint64_t number : numbers) total += number;
  return total;
}

bool is_valid(const Call& call, const Topology& topology) {
  uint32_t size = topology.size, me = topology.member_index;
  bool one_span = call.spans.size() == 1;
  bool valid_peer = call.peer >= 0 && uint32_t(call.peer) < size;
  switch (call.kind) {
    case RD_ALLREDUCE:
      return supported(call.reduce_params);
    case RD_REDUCE_SCATTER:
      return supported(call.reduce_params) && call.reduce_params.op != RD_ADASUM && one_span &&
             call.counts.size() == size && sum(call.counts) == call.spans.count();
    case RD_ALLGATHER:
      return one_span && call.counts.size() == size && call.counts[me] == call.spans.count();
    case RD_ALLTOALL:
      return one_span && call.counts.size() == size && call.splits.size() == size &&
             call.splits[me] == call.counts[me] && sum(call.splits) <= call.spans.count();
    case RD_BROADCAST:
      return valid_peer;
    case RD_REDUCE:
      return supported(call.reduce_params) && call.reduce_params.op != RD_ADASUM && valid_peer;
    case RD_GATHER:
    case RD_SCATTER:
      return one_span && call.counts.size() == size && call.counts[me] == call.spans.count() && valid_peer;
    case RD_SEND:
    case RD_RECEIVE:
      return false;  // messages go through an endpoint
    default:
      return true;
  }
}

}  // namespace

void copy_description(char* to, const std::string& description) {
  size_t length = std::min<size_t>(description.size(), RD_DESCRIPTION_BYTES - 1);
  std::memcpy(to, description.data(), length);
  to[length] = 0;
}

Call::Call(const rd_call& params, const Topology& topology, const Deadline& deadline)
    : kind(rd_kind(checked(params).kind)),
      reduce_params{rd_dtype(params.dtype), rd_op(params.op), params.prescale, params.postscale, topology.size},
      algorithm(rd_algorithm(params.algorithm)),
      pre_agreed((params.flags & RD_PRE_AGREED) != 0),
      overlapped((params.flags & RD_OVERLAPPED) != 0),
      peer(params.peer),
      signature(params.signature),
      description(params.description == nullptr ? "" : params.description),
      spans(params.spans, params.num_spans, ronde::element_bytes(rd_dtype(params.dtype))),
      counts(copied(params.counts, topology.size)),
      splits(copied(params.splits, topology.size)),
      deadline(deadline) {
  require(is_valid(*this, topology));
}

CallHeader Call::header(rd_algorithm chosen, uint64_t sequence) const {
  CallHeader header{};
  header.sequence = sequence;
  header.signature = signature;
  header.count = spans.count();
  header.bucket_offset = bucket_offset;
  header.kind = kind;
  header.dtype = reduce_params.dtype;
  header.op = reduce_params.op;
  header.algorithm = chosen;
  header.peer = peer;
  header.in_bucket = in_bucket;
  header.bucket_area = bucket_area;
  header.prescale = reduce_params.prescale;
  header.postscale = reduce_params.postscale;
  copy_description(header.description, description);
  return header;
}

bool Call::start() {
  uint32_t queued = kQueued;
  return state_.compare_exchange_strong(queued, kRunning);
}

void Call::finish() {
  {
    std::lock_guard<std::mutex> lock(callbacks_mutex_);  // add_callback() comes before this or sees it
    state_.store(kFinished);
  }
  if (waiters_.load() > 0) futex_wake_all(&state_);
}

bool Call::end_before_start(const CallError& error) {
  if (!start()) return false;
  result = rd_result{error.status, error.member, error.detail, 0, 0, 0, now_ns(), RD_NO_SEQUENCE, 0};
  result.start_ns = result.ready_ns = result.arrived_ns = result.end_ns;
  finish();
  return true;
}

// Sleeps once. Returns false when the limit or a signal ended the sleep.
bool Call::sleep(int64_t limit_ns) {
  waiters_.fetch_add(1);  // before the last test: finish() reads this afterwards
  uint32_t seen = state_.load();
  bool woken = seen == kFinished || futex_wait(&state_, seen, limit_ns);
  waiters_.fetch_sub(1);
  return woken;
}

bool Call::wait(const Deadline& deadline) {
  const uint32_t generation = fork_generation.load();
  while (!finished()) {
    int64_t remaining_ns = deadline.remaining_ns();
    if (remaining_ns <= 0) return false;
    // Another thread may have got a signal that is for the main one, so the sleep is short.
    if (sleep(std::min(kMaxSleepNs, remaining_ns))) continue;
    bool raised = run_signal_handlers();
    if (made_by_parent(generation)) throw CallError{RD_FORKED};  // whoever would finish it is not in this process
    if (raised) throw CallError{RD_ABORTED, -1, EINTR};
  }
  return true;
}

void Call::wait_uninterrupted() {
  while (!finished()) sleep(kMaxSleepNs);
}

bool Call::add_callback(const Callback& callback) {
  std::lock_guard<std::mutex> lock(callbacks_mutex_);
  if (finished()) return false;
  callbacks_.push_back(callback);
  return true;
}

void Call::run_callbacks() {
  std::vector<Callback> callbacks;
  {
    std::lock_guard<std::mutex> lock(callbacks_mutex_);
    callbacks.swap(callbacks_);
  }
  ForbidWaiting forbidden;
  if (result.status == RD_MISMATCH) last_mismatch = member_calls;
  for (const Callback& callback : callbacks) callback.function(callback.context, &result);
}

}  // namespace ronde
