// The functions of ronde.h for messages: plain types in, status codes out. No exception leaves this file.
#include <mutex>
#include <unordered_map>

#include "base/exception_boundary.h"
#include "base/forbid_waiting.h"
#include "base/fork.h"
#include "endpoint.h"

#define RD_API extern "C" __attribute__((visibility("default")))

namespace {

using ronde::CallError;
using ronde::check_may_wait;
using ronde::Deadline;
using ronde::Endpoint;
using ronde::FileDescriptor;
using ronde::guarded;
using ronde::Message;

// An endpoint and its submitted messages. It lives until the last call that uses it has returned.
struct OpenEndpoint {
  OpenEndpoint(uint32_t rank, uint32_t num_ranks, ronde::SpinPolicy policy) : endpoint(rank, num_ranks, policy) {}
  std::mutex mutex;  // guards last_work and submitted
  uint64_t last_work = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Message>> submitted;  // by work
  Endpoint endpoint;
};

// Guarded by the fork mutex, so that a forked child can look up what belongs to its parent.
struct OpenEndpoints {
  rd_endpoint last = 0;
  std::unordered_map<rd_endpoint, std::shared_ptr<OpenEndpoint>> by_number;
};

// Never destroyed: at the end of a process, threads may still be inside of an endpoint.
OpenEndpoints& open_endpoints() {
  static auto* all = new OpenEndpoints;
  return *all;
}

// Returns the open endpoint; null in a forked child and after rd_close_endpoint.
std::shared_ptr<OpenEndpoint> find(rd_endpoint number) {
  std::lock_guard<std::mutex> lock(ronde::fork_mutex());
  auto found = open_endpoints().by_number.find(number);
  bool is_own = found != open_endpoints().by_number.end() && !found->second->endpoint.is_of_parent();
  return is_own ? found->second : nullptr;
}

std::shared_ptr<OpenEndpoint> find_open(rd_endpoint number) {
  if (auto open = find(number)) return open;
  std::lock_guard<std::mutex> lock(ronde::fork_mutex());
  throw CallError{open_endpoints().by_number.count(number) > 0 ? RD_FORKED : RD_CLOSED};
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

}  // namespace

RD_API rd_status rd_open_endpoint(uint32_t rank, uint32_t num_ranks, uint32_t num_local, uint32_t num_cores,
                                  rd_endpoint* endpoint) {
  *endpoint = 0;
  return guarded(nullptr, [&] {
    if (rank >= num_ranks) throw CallError{RD_BAD_CALL};
    auto open = std::make_shared<OpenEndpoint>(rank, num_ranks, ronde::spin_policy(num_local, num_cores));
    std::lock_guard<std::mutex> lock(ronde::fork_mutex());
    OpenEndpoints& all = open_endpoints();
    *endpoint = ++all.last;
    all.by_number.emplace(*endpoint, std::move(open));
    return RD_OK;
  });
}

RD_API uint64_t rd_link_bytes(void) { return sizeof(ronde::LinkMemory); }

RD_API rd_status rd_add_link(rd_endpoint endpoint, uint32_t peer, int32_t opened_here, int socket, int memory) {
  FileDescriptor owned(socket);
  return guarded(nullptr, [&] {
    find_open(endpoint)->endpoint.add_link(peer, opened_here != 0, std::move(owned), memory);
    return RD_OK;
  });
}

RD_API rd_status rd_run_message(rd_endpoint endpoint, const rd_message* params, rd_result* result, double remaining_s) {
  return guarded(result, [&] {
    auto open = find_open(endpoint);
    check_may_wait();
    auto message = std::make_shared<Message>(*params, open->endpoint.num_ranks(), Deadline(remaining_s));
    open->endpoint.run(message);
    return report(message, result);
  });
}

RD_API rd_status rd_submit_message(rd_endpoint endpoint, const rd_message* params, double remaining_s, uint64_t* work) {
  return guarded(nullptr, [&] {
    auto open = find_open(endpoint);
    auto message = std::make_shared<Message>(*params, open->endpoint.num_ranks(), Deadline(remaining_s));
    {
      std::lock_guard<std::mutex> lock(open->mutex);
      *work = ++open->last_work;
      open->submitted.emplace(*work, message);
    }
    open->endpoint.submit(message);
    return RD_OK;
  });
}

RD_API rd_status rd_wait_message(rd_endpoint endpoint, uint64_t work, rd_result* result, double remaining_s) {
  return guarded(result, [&] {
    auto open = find_open(endpoint);
    auto message = find_message(*open, work);
    if (message == nullptr) throw CallError{RD_BAD_CALL};
    if (message->finished.load() == 0) check_may_wait();
    if (!open->endpoint.wait(message, Deadline(remaining_s))) throw CallError{RD_TIMEOUT};
    std::lock_guard<std::mutex> lock(open->mutex);
    open->submitted.erase(work);
    return report(message, result);
  });
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
  received->data = message->received_data;
  received->block = message->block.release();
  return RD_OK;
}

RD_API void rd_free_received(void* block) { ronde::free_message_memory(block); }

RD_API void* rd_allocate_memory(uint64_t bytes) { return ronde::allocate_message_memory(bytes); }

RD_API void rd_lose_peer(rd_endpoint endpoint, uint32_t peer) {
  if (auto open = find(endpoint)) open->endpoint.lose_peer(peer);
}

RD_API void rd_end_any_source(rd_endpoint endpoint, uint64_t context, uint32_t last) {
  if (auto open = find(endpoint)) open->endpoint.end_any_source(context, last);
}

RD_API void rd_end_context(rd_endpoint endpoint, uint64_t context) {
  if (auto open = find(endpoint)) open->endpoint.end_context(context);
}

RD_API rd_status rd_leave_endpoint(rd_endpoint endpoint, double remaining_s) {
  return guarded(nullptr,
                 [&] { return find_open(endpoint)->endpoint.leave(Deadline(remaining_s)) ? RD_OK : RD_TIMEOUT; });
}

RD_API void rd_close_endpoint(rd_endpoint endpoint) {
  std::shared_ptr<OpenEndpoint> closed;
  {
    std::lock_guard<std::mutex> lock(ronde::fork_mutex());
    OpenEndpoints& all = open_endpoints();
    auto found = all.by_number.find(endpoint);
    if (found == all.by_number.end() || found->second->endpoint.is_of_parent()) return;
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
