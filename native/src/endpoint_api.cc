// The functions of ronde.h for messages: plain types in, status codes out. No exception leaves this file.
#include <mutex>
#include <unordered_map>

#include "base/error.h"
#include "endpoint.h"

#define RD_API extern "C" __attribute__((visibility("default")))

namespace {

using ronde::CallError;
using ronde::Deadline;
using ronde::Endpoint;
using ronde::FileDescriptor;
using ronde::Message;

// An endpoint and its submitted messages. It lives until the last call that uses it has returned.
struct OpenEndpoint {
  OpenEndpoint(uint32_t rank, uint32_t num_ranks, ronde::SpinPolicy policy) : endpoint(rank, num_ranks, policy) {}
  std::mutex mutex;  // guards last_work and submitted
  uint64_t last_work = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Message>> submitted;  // by work
  Endpoint endpoint;
};

struct OpenEndpoints {
  std::mutex mutex;  // guards the rest
  rd_endpoint last = 0;
  std::unordered_map<rd_endpoint, std::shared_ptr<OpenEndpoint>> by_number;
};

// Never destroyed: at the end of a process, threads may still be inside of an endpoint.
OpenEndpoints& open_endpoints() {
  static auto* all = new OpenEndpoints;
  return *all;
}

std::shared_ptr<OpenEndpoint> find(rd_endpoint number) {
  OpenEndpoints& all = open_endpoints();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_number.find(number);
  return found == all.by_number.end() ? nullptr : found->second;
}

std::shared_ptr<Message> find_message(OpenEndpoint& open, uint64_t work) {
  std::lock_guard<std::mutex> lock(open.mutex);
  auto found = open.submitted.find(work);
  return found == open.submitted.end() ? nullptr : found->second;
}

// The message that ended last in this thread, when it has something to hand over, and the header that was handed over.
thread_local std::shared_ptr<Message> last_received;
thread_local std::string last_header;

rd_status report(const std::shared_ptr<Message>& message, rd_result* result) {
  if (result != nullptr) *result = message->result;
  if (message->block != nullptr || message->result.status == RD_MISMATCH) last_received = message;
  return rd_status(message->result.status);
}

rd_status report(const CallError& error, rd_result* result) {
  if (result != nullptr) *result = rd_result{error.status, error.member, error.detail, 0, 0, 0, 0, 0, 0};
  return error.status;
}

}  // namespace

RD_API rd_status rd_open_endpoint(uint32_t rank, uint32_t num_ranks, uint32_t num_local, uint32_t num_cores,
                                  rd_endpoint* endpoint) {
  *endpoint = 0;
  if (rank >= num_ranks) return RD_BAD_CALL;
  try {
    auto open = std::make_shared<OpenEndpoint>(rank, num_ranks, ronde::spin_policy(num_local, num_cores));
    OpenEndpoints& all = open_endpoints();
    std::lock_guard<std::mutex> lock(all.mutex);
    *endpoint = ++all.last;
    all.by_number.emplace(*endpoint, std::move(open));
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API uint64_t rd_link_bytes(void) { return sizeof(ronde::LinkMemory); }

RD_API rd_status rd_add_link(rd_endpoint endpoint, uint32_t peer, int32_t opened_here, int socket, int memory) {
  FileDescriptor owned(socket);
  auto open = find(endpoint);
  if (open == nullptr) return RD_CLOSED;
  try {
    open->endpoint.add_link(peer, opened_here != 0, std::move(owned), memory);
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API rd_status rd_run_message(rd_endpoint endpoint, const rd_message* params, rd_result* result, double remaining_s) {
  auto open = find(endpoint);
  if (open == nullptr) return report(CallError{RD_CLOSED}, result);
  try {
    auto message = std::make_shared<Message>(*params, open->endpoint.num_ranks(), Deadline(remaining_s));
    open->endpoint.run(message);
    return report(message, result);
  } catch (const CallError& error) {
    return report(error, result);
  } catch (const std::exception&) {
    return report(CallError{RD_SYSTEM}, result);
  }
}

RD_API rd_status rd_submit_message(rd_endpoint endpoint, const rd_message* params, double remaining_s, uint64_t* work) {
  auto open = find(endpoint);
  if (open == nullptr) return RD_CLOSED;
  try {
    auto message = std::make_shared<Message>(*params, open->endpoint.num_ranks(), Deadline(remaining_s));
    {
      std::lock_guard<std::mutex> lock(open->mutex);
      *work = ++open->last_work;
      open->submitted.emplace(*work, message);
    }
    open->endpoint.submit(message);
    return RD_OK;
  } catch (const CallError& error) {
    return error.status;
  } catch (const std::exception&) {
    return RD_SYSTEM;
  }
}

RD_API rd_status rd_wait_message(rd_endpoint endpoint, uint64_t work, rd_result* result, double remaining_s) {
  auto open = find(endpoint);
  if (open == nullptr) return report(CallError{RD_CLOSED}, result);
  auto message = find_message(*open, work);
  if (message == nullptr) return report(CallError{RD_BAD_CALL}, result);
  try {
    if (!open->endpoint.wait(message, Deadline(remaining_s))) return report(CallError{RD_TIMEOUT}, result);
  } catch (const CallError& error) {
    return report(error, result);
  }
  {
    std::lock_guard<std::mutex> lock(open->mutex);
    open->submitted.erase(work);
  }
  return report(message, result);
}

RD_API int rd_message_done(rd_endpoint endpoint, uint64_t work) {
  auto open = find(endpoint);
  auto message = open == nullptr ? nullptr : find_message(*open, work);
  return message == nullptr ? -1 : int(message->finished.load());
}

RD_API rd_status rd_take_received(rd_received* received) {
  *received = {};
  if (last_received == nullptr) return RD_BAD_CALL;
  std::shared_ptr<Message> message = std::move(last_received);
  last_header = std::move(message->received_header);
  received->header = last_header.data();
  received->header_bytes = last_header.size();
  if (message->block == nullptr) return RD_OK;
  received->bytes = message->received_bytes;
  received->data = message->block.get() + Endpoint::block_offset(last_header.size());
  received->block = message->block.release();
  return RD_OK;
}

RD_API void rd_free_received(void* block) { std::free(block); }

RD_API void rd_lose_peer(rd_endpoint endpoint, uint32_t peer) {
  if (auto open = find(endpoint)) open->endpoint.lose_peer(peer);
}

RD_API void rd_end_context(rd_endpoint endpoint, uint64_t context) {
  if (auto open = find(endpoint)) open->endpoint.end_context(context);
}

RD_API rd_status rd_leave_endpoint(rd_endpoint endpoint, double remaining_s) {
  auto open = find(endpoint);
  if (open == nullptr) return RD_CLOSED;
  return open->endpoint.leave(Deadline(remaining_s)) ? RD_OK : RD_TIMEOUT;
}

RD_API void rd_close_endpoint(rd_endpoint endpoint) {
  std::shared_ptr<OpenEndpoint> closed;
  {
    OpenEndpoints& all = open_endpoints();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto found = all.by_number.find(endpoint);
    if (found == all.by_number.end()) return;
    closed = std::move(found->second);
    all.by_number.erase(found);
  }
  closed->endpoint.close();
}

RD_API void rd_get_current_message(rd_endpoint endpoint, uint64_t context, rd_current_call* current, int32_t* missing) {
  *current = {};
  *missing = RD_ANY_SOURCE;
  if (auto open = find(endpoint)) open->endpoint.get_current_message(context, current, missing);
}
