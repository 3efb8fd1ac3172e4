// The functions of ronde.h: plain types in, status codes out. No exception leaves this file.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <unordered_map>

#include "base/exception_boundary.h"
#include "base/forbid_waiting.h"
#include "base/fork.h"
#include "base/python_signals.h"
#include "channel.h"
#include "optimizer/optimizer.h"
#include "reduce/reduce.h"

#define RD_API extern "C" __attribute__((visibility("default")))

// Whoever uses the channel holds a copy of the pointer meanwhile: rd_close takes the handle's own, and what the channel
// has is freed with the last copy.
struct rd_channel {
  explicit rd_channel(std::shared_ptr<ronde::Channel> opened)
      : num_members(opened->topology().size), channel(std::move(opened)) {}

  const uint32_t generation = ronde::fork_generation.load();
  const uint32_t num_members;
  std::atomic<uint32_t> references{1};
  std::mutex mutex;  // guards the pointer
  std::shared_ptr<ronde::Channel> channel;
};

struct rd_work {
  explicit rd_work(std::shared_ptr<ronde::Call> submitted, std::weak_ptr<ronde::Channel> announced_on = {})
      : call(std::move(submitted)), channel(std::move(announced_on)) {}

  const uint32_t generation = ronde::fork_generation.load();
  std::atomic<uint32_t> references{1};
  const std::shared_ptr<ronde::Call> call;
  const std::weak_ptr<ronde::Channel> channel;  // of an announced call, which the threads that wait for it execute
};

struct rd_works {
  rd_works(std::vector<std::shared_ptr<ronde::Call>> announced, const std::shared_ptr<ronde::Channel>& announced_on)
      : calls(std::move(announced)), channel(announced_on), unreported(calls.size()) {
    for (uint32_t i = 0; i < calls.size(); ++i) unreported[i] = i;
  }

  const uint32_t generation = ronde::fork_generation.load();
  const std::vector<std::shared_ptr<ronde::Call>> calls;  // null if it was not announced
  const std::weak_ptr<ronde::Channel> channel;
  std::mutex mutex;                  // guards the indices below
  std::vector<uint32_t> unreported;  // of calls that nobody has heard of
};

namespace {

using ronde::Call;
using ronde::CallError;
using ronde::Channel;
using ronde::check_may_wait;
using ronde::Deadline;
using ronde::FileDescriptor;
using ronde::guarded;
using ronde::last_mismatch;
using ronde::made_by_parent;

// Owners of the buckets that rd_get_bucket gave out, one entry per call; guarded by fork_mutex().
std::unordered_multimap<void*, std::shared_ptr<void>>& bucket_owners =
    *new std::unordered_multimap<void*, std::shared_ptr<void>>;

rd_status report(const Call& call, rd_result* result) {
  if (result != nullptr) *result = call.result;
  if (call.result.status == RD_MISMATCH) last_mismatch = call.member_calls;
  return rd_status(call.result.status);
}

// Returns the open channel; null in a forked child and after rd_close.
std::shared_ptr<Channel> find_channel(rd_channel* handle) {
  if (made_by_parent(handle->generation)) return nullptr;
  std::lock_guard<std::mutex> lock(handle->mutex);
  return handle->channel;
}

std::shared_ptr<Channel> open_channel(rd_channel* handle) {
  auto channel = find_channel(handle);
  if (channel == nullptr) throw CallError{made_by_parent(handle->generation) ? RD_FORKED : RD_CLOSED};
  return channel;
}

// Waits for a call, which is announced on a channel or queued. Throws CallError when the wait ends and not the call.
void wait_for(const std::shared_ptr<Call>& call, uint32_t generation, const std::weak_ptr<Channel>& announced_on,
              double remaining_s) {
  if (call->finished()) return;
  if (made_by_parent(generation)) throw CallError{RD_FORKED};
  check_may_wait();
  auto channel = announced_on.lock();
  Deadline deadline(remaining_s);
  bool finished = channel != nullptr ? channel->announced().wait(call, deadline) : call->wait(deadline);
  if (!finished) throw CallError{RD_TIMEOUT};
}

// As rd_done.
int describe_end(const Call& call) {
  if (!call.finished()) return 0;
  return call.result.status == RD_WITHDRAWN ? 2 : 1;
}

}  // namespace

RD_API uint32_t rd_abi(void) { return RD_ABI; }

RD_API const char* rd_version(void) { return RONDE_VERSION; }

RD_API const char* rd_cpu(void) { return ronde::cpu_name(); }

RD_API uint64_t rd_segment_bytes(const rd_channel_params* params) {
  try {
    return ronde::SharedSegment::bytes(ronde::Topology(*params));
  } catch (const CallError&) {
    return 0;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

RD_API rd_status rd_open(const rd_channel_params* params, int segment, int events, uint64_t number,
                         rd_channel** channel) {
  *channel = nullptr;
  rd_result result{};
  rd_status status = guarded(&result, [&] {
    ronde::Topology topology(*params);
    std::shared_ptr<ronde::SharedSegment> shared;
    if (segment >= 0) shared = std::make_shared<ronde::SharedSegment>(topology, segment);
    FileDescriptor socket(events < 0 ? -1 : fcntl(events, F_DUPFD_CLOEXEC, 0));
    if (events >= 0 && socket.get() < 0) throw CallError{RD_SYSTEM, -1, errno};
    ronde::ChannelEvents told(std::move(socket), number);
    *channel = new rd_channel(std::make_shared<Channel>(std::move(topology), std::move(shared), std::move(told)));
    return RD_OK;
  });
  errno = result.detail;
  return status;
}

RD_API void rd_retain(rd_channel* channel) { channel->references.fetch_add(1); }

RD_API void rd_release(rd_channel* channel) {
  if (made_by_parent(channel->generation) || channel->references.fetch_sub(1) > 1) return;
  rd_close(channel);
  delete channel;
}

RD_API void rd_close(rd_channel* channel) {
  if (made_by_parent(channel->generation)) return;
  std::shared_ptr<Channel> closed;
  {
    std::lock_guard<std::mutex> lock(channel->mutex);
    closed.swap(channel->channel);
  }
  if (closed != nullptr) closed->close();
}

RD_API rd_status rd_open_link(rd_channel* channel, uint32_t member, int32_t kind, int opened_here, const int* sockets,
                              uint32_t num_sockets) {
  std::vector<FileDescriptor> owned;  // first, so that any failure below closes them
  for (uint32_t i = 0; i < num_sockets; ++i) owned.emplace_back(sockets[i]);
  return guarded(nullptr, [&] {
    if (kind < 0 || kind >= RD_NUM_LINK_KINDS || owned.empty()) throw CallError{RD_BAD_CALL};
    open_channel(channel)->open_link(member, rd_link_kind(kind), opened_here != 0, std::move(owned));
    return RD_OK;
  });
}

RD_API void rd_abort(rd_channel* channel, int32_t status, int32_t member, int32_t detail) {
  auto found = find_channel(channel);
  bool known = status > RD_MISMATCH && status <= RD_CLOSED;
  if (found != nullptr) found->abort(CallError{known ? rd_status(status) : RD_ABORTED, member, detail}, false);
}

RD_API void* rd_get_bucket(rd_channel* channel) {
  auto found = find_channel(channel);
  void* bucket = found == nullptr ? nullptr : found->bucket();
  if (bucket == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(ronde::fork_mutex());
  bucket_owners.emplace(bucket, found->bucket_owner());
  return bucket;
}

RD_API void rd_release_bucket(void* bucket) {
  std::shared_ptr<void> owner;  // freed after the lock
  std::lock_guard<std::mutex> lock(ronde::fork_mutex());
  auto found = bucket_owners.find(bucket);
  if (found == bucket_owners.end()) return;
  owner = std::move(found->second);
  bucket_owners.erase(found);
}

RD_API rd_status rd_run(rd_channel* channel, const rd_call* call, rd_result* result, double remaining_s) {
  return guarded(result, [&] {
    auto open = open_channel(channel);
    check_may_wait();
    auto running = std::make_shared<Call>(*call, open->topology(), Deadline(remaining_s));
    open->queue().run(running);
    return report(*running, result);
  });
}

RD_API rd_status rd_submit(rd_channel* channel, const rd_call* call, double remaining_s, rd_callback callback,
                           void* context, rd_work** work, rd_result* result) {
  if (work != nullptr) *work = nullptr;
  return guarded(result, [&] {
    auto open = open_channel(channel);
    auto submitted = std::make_shared<Call>(*call, open->topology(), Deadline(remaining_s));
    auto handle = std::make_unique<rd_work>(submitted);
    if (callback != nullptr) submitted->add_callback({callback, context});
    open->queue().submit(submitted);
    if (work != nullptr) *work = handle.release();
    return RD_OK;
  });
}

RD_API void rd_retain_work(rd_work* work) { work->references.fetch_add(1); }

RD_API void rd_release_work(rd_work* work) {
  if (work->references.fetch_sub(1) == 1) delete work;
}

RD_API rd_status rd_wait(rd_work* work, rd_result* result, double remaining_s) {
  return guarded(result, [&] {
    wait_for(work->call, work->generation, work->channel, remaining_s);
    return report(*work->call, result);
  });
}

RD_API int rd_done(rd_work* work) { return describe_end(*work->call); }

RD_API int rd_add_callback(rd_work* work, rd_callback callback, void* context) {
  return !made_by_parent(work->generation) && work->call->add_callback({callback, context}) ? 1 : 0;
}

RD_API int rd_cancel(rd_work* work) {
  if (made_by_parent(work->generation)) return 0;
  auto channel = work->channel.lock();
  if (channel != nullptr) return channel->announced().cancel(work->call) ? 1 : 0;
  return work->call->end_before_start(CallError{RD_CANCELLED}) ? 1 : 0;
}

RD_API rd_status rd_agree(rd_channel* channel, uint32_t id, const char* name, const rd_call* call) {
  return guarded(nullptr, [&] {
    auto open = open_channel(channel);
    open->announced().agree(id, name, Call(*call, open->topology(), Deadline(0)));
    return RD_OK;
  });
}

RD_API int rd_revoke(rd_channel* channel, uint32_t id) {
  auto found = find_channel(channel);
  return found != nullptr && found->topology().max_announced > 0 && found->announced().revoke(id) ? 1 : 0;
}

RD_API rd_status rd_announce_named(rd_channel* channel, const char* name, const rd_call* call, double timeout_s,
                                   rd_callback callback, void* context, rd_work** work, rd_result* result) {
  if (work != nullptr) *work = nullptr;
  return guarded(result, [&] {
    auto open = open_channel(channel);
    std::shared_ptr<const ronde::AgreedCall> agreed;
    uint32_t id = open->announced().find_id(name, *call, &agreed);
    auto announced = agreed->make_call(call->spans, call->num_spans, open->topology(), timeout_s);
    auto handle = std::make_unique<rd_work>(announced, open);
    if (callback != nullptr) announced->add_callback({callback, context});
    open->announced().announce(id, announced, false);
    if (work != nullptr) *work = handle.release();
    return RD_OK;
  });
}

RD_API rd_status rd_announce_many(rd_channel* channel, const rd_announcement* announcements, uint32_t num_announcements,
                                  const rd_span* spans, double timeout_s, int will_wait, uint8_t* is_announced,
                                  rd_works** works, rd_result* result) {
  *works = nullptr;
  return guarded(result, [&] {
    auto open = open_channel(channel);
    auto calls = open->announced().announce_many(announcements, num_announcements, spans, timeout_s, will_wait != 0);
    for (uint32_t i = 0; i < num_announcements; ++i) is_announced[i] = calls[i] != nullptr;
    *works = new rd_works(std::move(calls), open);
    return RD_OK;
  });
}

RD_API void rd_release_works(rd_works* works) { delete works; }

RD_API rd_work* rd_get_work(rd_works* works, uint32_t index) {
  if (index >= works->calls.size() || works->calls[index] == nullptr) return nullptr;
  return new (std::nothrow) rd_work(works->calls[index], works->channel);
}

RD_API int rd_done_one(rd_works* works, uint32_t index) { return describe_end(*works->calls[index]); }

RD_API rd_status rd_wait_one(rd_works* works, uint32_t index, double remaining_s, rd_result* result,
                             uint32_t* num_ended, uint32_t* ended, rd_result* ended_results, uint32_t max_ended) {
  *num_ended = 0;
  return guarded(result, [&] {
    bool waits = index < works->calls.size();
    if (waits) wait_for(works->calls[index], works->generation, works->channel, remaining_s);
    std::lock_guard<std::mutex> lock(works->mutex);
    auto report_other = [&](uint32_t other) {
      const Call* call = works->calls[other].get();
      if (call == nullptr || other == index) return true;
      if (*num_ended == max_ended || !call->finished()) return false;
      if (call->result.status != RD_OK) return true;  // for who waits for it
      ended[*num_ended] = other;
      ended_results[(*num_ended)++] = call->result;
      return true;
    };
    auto& left = works->unreported;
    left.erase(std::remove_if(left.begin(), left.end(), report_other), left.end());
    return waits ? report(*works->calls[index], result) : RD_OK;
  });
}

RD_API rd_status rd_run_announced(rd_channel* channel, uint32_t id, const rd_call* call, double timeout_s,
                                  double remaining_s, rd_result* result, rd_work** work) {
  *work = nullptr;
  return guarded(result, [&] {
    auto open = open_channel(channel);
    check_may_wait();
    auto announced = std::make_shared<Call>(*call, open->topology(), Deadline(timeout_s));
    announced->timeout_s = timeout_s;
    open->announced().announce(id, announced, true);
    CallError ended{RD_TIMEOUT};
    try {
      if (open->announced().wait(announced, Deadline(remaining_s))) return report(*announced, result);
    } catch (const CallError& interrupted) {
      if (interrupted.status == RD_FORKED) throw;  // the handle would belong to the child
      ended = interrupted;
    }
    *work = new rd_work(announced, open);
    return report(ended, result);
  });
}

RD_API uint32_t rd_get_announced(rd_channel* channel, int64_t until_ns, rd_announced* calls, uint32_t max_calls) {
  auto found = find_channel(channel);
  if (found == nullptr || found->topology().max_announced == 0) return 0;
  std::vector<rd_announced> announced = found->announced().announced_until(until_ns, max_calls);
  std::copy(announced.begin(), announced.end(), calls);
  return uint32_t(announced.size());
}

RD_API uint32_t rd_get_not_announced(rd_channel* channel, uint32_t id, uint32_t* missing) {
  auto found = find_channel(channel);
  if (found == nullptr || id >= found->topology().max_announced) return 0;
  std::vector<uint32_t> members = found->announced().missing(id);
  std::copy(members.begin(), members.end(), missing);
  return uint32_t(members.size());
}

RD_API rd_status rd_get_mismatch(rd_channel* channel, rd_member_call* calls) {
  if (last_mismatch.size() != channel->num_members) return RD_BAD_CALL;
  std::memcpy(calls, last_mismatch.data(), last_mismatch.size() * sizeof(rd_member_call));
  return RD_OK;
}

RD_API void rd_get_current_call(rd_channel* channel, rd_current_call* current, uint32_t* missing) {
  *current = {};
  auto found = find_channel(channel);
  if (found != nullptr) found->get_current_call(current, missing);
}

RD_API void rd_set_interpreter(const rd_interpreter* interpreter) { ronde::set_interpreter(interpreter); }

RD_API int rd_fetch_exception(void* exception[3]) { return ronde::fetch_exception(exception) ? 1 : 0; }

RD_API rd_status rd_reduce(int32_t dtype, int32_t op, double prescale, double postscale, const void* const* inputs,
                           uint64_t num_inputs, void* const* outputs, uint64_t num_outputs, uint64_t count) {
  if (dtype < 0 || dtype >= RD_NUM_DTYPES || op < 0 || op >= RD_NUM_OPS || op == RD_ADASUM) return RD_BAD_CALL;
  ronde::ReduceParams params{rd_dtype(dtype), rd_op(op), prescale, postscale, num_inputs};
  if (!ronde::supported(params)) return RD_BAD_CALL;
  ronde::reduce_many(params, inputs, num_inputs, outputs, num_outputs, count, false);
  return RD_OK;
}

RD_API rd_status rd_optimizer_update(const rd_optimizer_step* step) {
  return ronde::optimizer_update(*step) ? RD_OK : RD_BAD_CALL;
}
