// The C border: plain types in, status codes out, no exception beyond this file.
#include <sys/socket.h>

#include <cstring>
#include <new>
#include <unordered_map>

#include "base/python_signals.h"
#include "channel.h"
#include "reduce/reduce.h"

#define RD_API extern "C" __attribute__((visibility("default")))

struct rd_channel {
  rd_channel(const rd_layout& layout, std::shared_ptr<ronde::SharedSegment> segment,
             std::vector<std::vector<ronde::FileDescriptor>> sockets, std::vector<ronde::FileDescriptor> direct)
      : channel(layout, std::move(segment), std::move(sockets), std::move(direct)) {}

  std::mutex mutex;  // guards the tickets
  uint64_t last_ticket = 0;
  std::unordered_map<uint64_t, std::shared_ptr<ronde::Request>> tickets;
  ronde::Channel channel;
};

namespace {

using ronde::CallError;
using ronde::FileDescriptor;

thread_local std::vector<rd_asked> last_asked;

// Bucket memory that callers look into, one entry per rd_bucket.
std::mutex lent_mutex;
std::unordered_multimap<void*, std::shared_ptr<void>> lent;

rd_status report(const std::shared_ptr<ronde::Request>& request, rd_result* result) {
  if (result != nullptr) *result = request->result;
  if (request->result.status == RD_MISMATCH) last_asked = request->asked;
  return rd_status(request->result.status);
}

rd_status refuse(const CallError& error, rd_result* result) {
  if (result != nullptr) *result = rd_result{error.status, error.member, error.detail, 0, 0, 0, 0};
  return error.status;
}

std::shared_ptr<ronde::Request> find(rd_channel* channel, uint64_t ticket) {
  std::lock_guard<std::mutex> lock(channel->mutex);
  auto found = channel->tickets.find(ticket);
  return found == channel->tickets.end() ? nullptr : found->second;
}

}  // namespace

RD_API uint32_t rd_abi(void) { return RD_ABI; }

RD_API const char* rd_version(void) { return RONDE_VERSION; }

RD_API const char* rd_cpu(void) { return ronde::cpu_name(); }

RD_API uint64_t rd_segment_bytes(const rd_layout* layout) {
  try {
    return ronde::SharedSegment::bytes(ronde::Topology(*layout));
  } catch (const CallError&) {
    return 0;
  }
}

RD_API rd_status rd_open(const rd_layout* layout, int segment, const int* sockets, uint32_t num_sockets,
                         const int* direct, rd_channel** channel) {
  *channel = nullptr;
  // Owned first: whatever fails, they are closed.
  std::vector<std::vector<FileDescriptor>> owned(layout->num_members);
  std::vector<FileDescriptor> owned_direct(layout->num_members);
  for (uint32_t member = 0; member < layout->num_members; ++member) {
    for (uint32_t i = 0; sockets != nullptr && i < num_sockets; ++i)
      owned[member].emplace_back(sockets[member * num_sockets + i]);
    if (direct != nullptr) owned_direct[member] = FileDescriptor(direct[member]);
  }
  try {
    ronde::Topology topology(*layout);
    std::shared_ptr<ronde::SharedSegment> shared;
    if (segment >= 0) shared = std::make_shared<ronde::SharedSegment>(topology, segment);
    *channel = new rd_channel(*layout, std::move(shared), std::move(owned), std::move(owned_direct));
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

RD_API void* rd_bucket(rd_channel* channel) {
  void* bucket = channel->channel.bucket();
  if (bucket == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(lent_mutex);
  lent.emplace(bucket, channel->channel.bucket_owner());
  return bucket;
}

RD_API void rd_release(void* bucket) {
  std::lock_guard<std::mutex> lock(lent_mutex);
  auto found = lent.find(bucket);
  if (found != lent.end()) lent.erase(found);
}

RD_API rd_status rd_run(rd_channel* channel, const rd_call* call, rd_result* result, double remaining_s) {
  try {
    auto request = std::make_shared<ronde::Request>(*call, channel->channel.topology(), remaining_s);
    channel->channel.queue_of(*request).run(request);
    return report(request, result);
  } catch (const CallError& error) {
    return refuse(error, result);
  } catch (const std::exception&) {
    return refuse(CallError{RD_SYSTEM}, result);
  }
}

RD_API rd_status rd_submit(rd_channel* channel, const rd_call* call, double remaining_s, uint64_t* ticket) {
  try {
    auto request = std::make_shared<ronde::Request>(*call, channel->channel.topology(), remaining_s);
    {
      std::lock_guard<std::mutex> lock(channel->mutex);
      *ticket = ++channel->last_ticket;
      channel->tickets.emplace(*ticket, request);
    }
    channel->channel.queue_of(*request).submit(request);
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API rd_status rd_wait(rd_channel* channel, uint64_t ticket, rd_result* result, double remaining_s) {
  std::shared_ptr<ronde::Request> request = find(channel, ticket);
  if (request == nullptr) return refuse(CallError{RD_BAD_CALL}, result);
  if (!channel->channel.queue_of(*request).wait(request, ronde::Deadline(remaining_s)))
    return refuse(CallError{RD_TIMEOUT}, result);
  std::lock_guard<std::mutex> lock(channel->mutex);
  channel->tickets.erase(ticket);
  return report(request, result);
}

RD_API int rd_done(rd_channel* channel, uint64_t ticket) {
  std::shared_ptr<ronde::Request> request = find(channel, ticket);
  return request == nullptr ? -1 : int(channel->channel.queue_of(*request).done(request));
}

RD_API rd_status rd_asked_by(rd_channel* channel, rd_asked* asked) {
  if (last_asked.size() != channel->channel.topology().size) return RD_BAD_CALL;
  std::memcpy(asked, last_asked.data(), last_asked.size() * sizeof(rd_asked));
  return RD_OK;
}

RD_API void rd_look(rd_channel* channel, rd_status_now* now, uint32_t* missing) { channel->channel.look(now, missing); }

RD_API void rd_set_interpreter(const rd_interpreter* interpreter) { ronde::set_interpreter(interpreter); }

RD_API int rd_take_raised(void* exception[3]) { return ronde::fetch_exception(exception) ? 1 : 0; }

RD_API rd_status rd_reduce(int32_t dtype, int32_t op, double prescale, double postscale, const void* const* ins,
                           uint64_t num_ins, void* const* outs, uint64_t num_outs, uint64_t count) {
  if (dtype < 0 || dtype >= RD_NUM_DTYPES || op < 0 || op >= RD_NUM_OPS || op == RD_ADASUM) return RD_BAD_CALL;
  ronde::Arithmetic arithmetic{rd_dtype(dtype), rd_op(op), prescale, postscale, num_ins};
  if (!ronde::supported(arithmetic)) return RD_BAD_CALL;
  ronde::reduce_many(arithmetic, ins, num_ins, outs, num_outs, count, false);
  return RD_OK;
}
