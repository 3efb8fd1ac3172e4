// The functions of ronde.h: plain types in, status codes out. No exception leaves this file.
#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>

#include "base/python_signals.h"
#include "channel.h"
#include "reduce/reduce.h"

#define RD_API extern "C" __attribute__((visibility("default")))

struct rd_channel {
  rd_channel(ronde::Topology topology, std::shared_ptr<ronde::SharedSegment> segment,
             std::vector<std::vector<ronde::FileDescriptor>> sockets, std::vector<ronde::FileDescriptor> point_to_point)
      : channel(std::move(topology), std::move(segment), std::move(sockets), std::move(point_to_point)) {}

  std::mutex mutex;  // guards last_work and submitted
  uint64_t last_work = 0;
  std::unordered_map<uint64_t, std::shared_ptr<ronde::Call>> submitted;  // by work
  ronde::Channel channel;
};

namespace {

using ronde::Call;
using ronde::CallError;
using ronde::Deadline;
using ronde::FileDescriptor;

// The calls of all members in this thread's last mismatch.
thread_local std::vector<rd_member_call> last_mismatch;

// Owners of the buckets that rd_get_bucket gave out, one entry per call.
std::mutex bucket_owners_mutex;
std::unordered_multimap<void*, std::shared_ptr<void>> bucket_owners;

rd_status report(const Call& call, rd_result* result) {
  if (result != nullptr) *result = call.result;
  if (call.result.status == RD_MISMATCH) last_mismatch = call.member_calls;
  return rd_status(call.result.status);
}

rd_status report(const CallError& error, rd_result* result) {
  if (result != nullptr) *result = rd_result{error.status, error.member, error.detail, 0, 0, 0, 0, RD_NO_SEQUENCE, 0};
  return error.status;
}

uint64_t add_work(rd_channel* channel, const std::shared_ptr<Call>& call) {
  std::lock_guard<std::mutex> lock(channel->mutex);
  channel->submitted.emplace(++channel->last_work, call);
  return channel->last_work;
}

std::shared_ptr<Call> find_call(rd_channel* channel, uint64_t work) {
  std::lock_guard<std::mutex> lock(channel->mutex);
  auto found = channel->submitted.find(work);
  return found == channel->submitted.end() ? nullptr : found->second;
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
  }
}

RD_API rd_status rd_open(const rd_channel_params* params, int segment, const int* sockets, uint32_t num_sockets,
                         const int* point_to_point, rd_channel** channel) {
  *channel = nullptr;
  // The sockets get their owners first, so that any failure below closes them.
  std::vector<std::vector<FileDescriptor>> owned(params->num_members);
  std::vector<FileDescriptor> owned_point_to_point(params->num_members);
  for (uint32_t member = 0; member < params->num_members; ++member) {
    for (uint32_t i = 0; sockets != nullptr && i < num_sockets; ++i)
      owned[member].emplace_back(sockets[member * num_sockets + i]);
    if (point_to_point != nullptr) owned_point_to_point[member] = FileDescriptor(point_to_point[member]);
  }
  try {
    ronde::Topology topology(*params);
    std::shared_ptr<ronde::SharedSegment> shared;
    if (segment >= 0) shared = std::make_shared<ronde::SharedSegment>(topology, segment);
    *channel =
        new rd_channel(std::move(topology), std::move(shared), std::move(owned), std::move(owned_point_to_point));
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::bad_alloc&) {
    return RD_SYSTEM;
  }
}

RD_API void rd_close(rd_channel* channel) { delete channel; }

RD_API void rd_abort(rd_channel* channel, int32_t member) {
  channel->channel.abort(CallError{member >= 0 ? RD_PEER_LOST : RD_ABORTED, member});
}

RD_API void* rd_get_bucket(rd_channel* channel) {
  void* bucket = channel->channel.bucket();
  if (bucket == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(bucket_owners_mutex);
  bucket_owners.emplace(bucket, channel->channel.bucket_owner());
  return bucket;
}

RD_API void rd_release_bucket(void* bucket) {
  std::lock_guard<std::mutex> lock(bucket_owners_mutex);
  auto found = bucket_owners.find(bucket);
  if (found != bucket_owners.end()) bucket_owners.erase(found);
}

RD_API rd_status rd_run(rd_channel* channel, const rd_call* call, rd_result* result, double remaining_s) {
  try {
    auto running = std::make_shared<Call>(*call, channel->channel.topology(), Deadline(remaining_s));
    channel->channel.queue_for(*running).run(running);
    return report(*running, result);
  } catch (const CallError& error) {
    return report(error, result);
  } catch (const std::exception&) {
    return report(CallError{RD_SYSTEM}, result);
  }
}

RD_API rd_status rd_submit(rd_channel* channel, const rd_call* call, double remaining_s, uint64_t* work) {
  try {
    auto submitted = std::make_shared<Call>(*call, channel->channel.topology(), Deadline(remaining_s));
    *work = add_work(channel, submitted);
    channel->channel.queue_for(*submitted).submit(submitted);
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API rd_status rd_agree(rd_channel* channel, uint32_t id, uint64_t signature) {
  try {
    channel->channel.announced().agree(id, signature);
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API int rd_revoke(rd_channel* channel, uint32_t id) {
  return channel->channel.topology().max_announced > 0 && channel->channel.announced().revoke(id) ? 1 : 0;
}

RD_API rd_status rd_announce(rd_channel* channel, uint32_t id, const rd_call* call, double timeout_s, uint64_t* work) {
  try {
    auto announced = std::make_shared<Call>(*call, channel->channel.topology(), Deadline(timeout_s));
    announced->timeout_s = timeout_s;
    channel->channel.announced().announce(id, announced, false);
    *work = add_work(channel, announced);
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API rd_status rd_run_announced(rd_channel* channel, uint32_t id, const rd_call* call, double timeout_s,
                                  double remaining_s, rd_result* result, uint64_t* work) {
  try {
    auto announced = std::make_shared<Call>(*call, channel->channel.topology(), Deadline(timeout_s));
    announced->timeout_s = timeout_s;
    channel->channel.announced().announce(id, announced, true);
    if (channel->channel.announced().wait(announced, Deadline(remaining_s))) return report(*announced, result);
    *work = add_work(channel, announced);
    return report(CallError{RD_TIMEOUT}, result);
  } catch (const CallError& error) {
    return report(error, result);
  } catch (const std::exception&) {
    return report(CallError{RD_SYSTEM}, result);
  }
}

RD_API uint32_t rd_get_not_announced(rd_channel* channel, uint32_t id, uint32_t* missing) {
  if (id >= channel->channel.topology().max_announced) return 0;
  std::vector<uint32_t> members = channel->channel.announced().missing(id);
  std::copy(members.begin(), members.end(), missing);
  return uint32_t(members.size());
}

RD_API rd_status rd_wait(rd_channel* channel, uint64_t work, rd_result* result, double remaining_s) {
  std::shared_ptr<Call> call = find_call(channel, work);
  if (call == nullptr) return report(CallError{RD_BAD_CALL}, result);
  Deadline deadline(remaining_s);
  bool finished = call->announced_id >= 0 ? channel->channel.announced().wait(call, deadline)
                                          : channel->channel.queue_for(*call).wait(call, deadline);
  if (!finished) return report(CallError{RD_TIMEOUT}, result);
  std::lock_guard<std::mutex> lock(channel->mutex);
  channel->submitted.erase(work);
  return report(*call, result);
}

RD_API int rd_done(rd_channel* channel, uint64_t work) {
  std::shared_ptr<Call> call = find_call(channel, work);
  if (call == nullptr) return -1;
  return call->announced_id >= 0 ? channel->channel.announced().done(call)
                                 : channel->channel.queue_for(*call).done(call);
}

RD_API rd_status rd_get_mismatch(rd_channel* channel, rd_member_call* calls) {
  if (last_mismatch.size() != channel->channel.topology().size) return RD_BAD_CALL;
  std::memcpy(calls, last_mismatch.data(), last_mismatch.size() * sizeof(rd_member_call));
  return RD_OK;
}

RD_API void rd_get_current_call(rd_channel* channel, rd_current_call* current, uint32_t* missing) {
  channel->channel.get_current_call(current, missing);
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
