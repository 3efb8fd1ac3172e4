#include "channel.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "algorithm/algorithm.h"
#include "choose_algorithm.h"

namespace ronde {

namespace {

// Returns zeros that cost nothing until they are touched.
std::shared_ptr<char> make_private_bucket(uint64_t bytes) {
  if (bytes == 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw CallError{RD_SYSTEM, -1, errno};
  return {static_cast<char*>(memory), [bytes](char* owned) { munmap(owned, bytes); }};
}

}  // namespace

Channel::Channel(Topology topology, std::shared_ptr<SharedSegment> segment, ChannelEvents events)
    : topology_(std::move(topology)),
      segment_(std::move(segment)),
      private_bucket_(segment_ == nullptr ? make_private_bucket(2 * topology_.bucket_bytes) : nullptr),
      events_(std::move(events)),
      barrier_(topology_, segment_.get()),
      matcher_(topology_),
      links_(topology_, segment_.get(), &abort_signal_, &events_) {
  if (topology_.max_announced > 0)
    announced_ = std::make_shared<AnnouncedCalls>(topology_, segment_.get(), &abort_signal_,
                                                  [this](Call& call) { execute(call); });
}

void Channel::close() {
  if (made_by_parent(generation_)) return;
  if (closed_.exchange(true)) return;
  bool idle = queue_.refuse_calls();
  if (announced_ != nullptr) idle = announced_->leave() && idle;
  if (idle) {
    if (segment_ != nullptr) segment_->mark_left(topology_.local_index);
    if (announced_ != nullptr) announced_->wake();
  } else {
    abort(CallError{RD_CLOSED, int(topology_.member_index)});
  }
  if (announced_ != nullptr) announced_->close();
  queue_.close();
}

CallQueue& Channel::queue() {
  if (announced_ != nullptr) throw CallError{RD_BAD_CALL};  // they have another order
  return queue_;
}

AnnouncedCalls& Channel::announced() {
  if (announced_ == nullptr) throw CallError{RD_BAD_CALL};
  return *announced_;
}

void Channel::abort(const CallError& error, bool report) {
  if (made_by_parent(generation_)) return;
  // The other members' channels are not closed: for them this member is lost.
  CallError sent = error.status == RD_CLOSED ? CallError{RD_PEER_LOST, int(topology_.member_index)} : error;
  bool is_first = segment_ == nullptr || segment_->abort(sent);
  is_first = abort_signal_.trigger(sent) && is_first;
  if (report && is_first && !topology_.single_host()) events_.report_abort(sent);
  if (announced_ != nullptr) announced_->wake();
}

void Channel::open_link(uint32_t member, rd_link_kind kind, bool opened_here, std::vector<FileDescriptor> sockets) {
  links_.open(member, kind, opened_here, std::move(sockets));
}

char* Channel::bucket(uint32_t area) const {
  if (topology_.bucket_bytes == 0) return nullptr;
  if (segment_ != nullptr) return segment_->bucket(topology_.local_index, area);
  return private_bucket_.get() + area * topology_.bucket_bytes;
}

std::shared_ptr<void> Channel::bucket_owner() const {
  if (segment_ != nullptr) return segment_;
  return private_bucket_;
}

// Runs one call and stores what became of it in its result. Every error but a mistake of the callers aborts the
// channel.
void Channel::execute(Call& call) {
  rd_result& result = call.result;
  result.member = -1;
  result.start_ns = result.ready_ns = result.arrived_ns = now_ns();
  result.sequence = RD_NO_SEQUENCE;
  call.started_ns.store(result.start_ns);
  try {
    CallWait wait(topology_, segment_.get(), &abort_signal_, call.deadline, call.overlapped, &waiting_for_);
    events_.set_deadline(call.deadline.at_ns());
    CallContext context{topology_,   segment_.get(), barrier_,  links_,      wait,
                        contiguous_, incoming_,      partials_, slots_used_, matcher_.headers()};
    wait.check();
    locate_in_bucket(call);
    if (call.kind == RD_JOIN) {
      run_join(call, context);
    } else {
      run_collective(call, context);
    }
    result.status = RD_OK;
  } catch (const CallError& error) {
    result.status = error.status;
    result.member = error.member;
    result.detail = error.detail;
    if (error.status != RD_MISMATCH && error.status != RD_BAD_CALL) {
      bool handler_raised = error.status == RD_ABORTED && error.detail == EINTR;
      if (closed_.load() && !handler_raised) result.status = RD_CLOSED, result.member = -1, result.detail = 0;
      abort(error);
    }
  } catch (const std::bad_alloc&) {
    result.status = RD_SYSTEM;
    result.detail = ENOMEM;
    abort(CallError{RD_PEER_LOST, int(topology_.member_index)});
  }
  result.end_ns = now_ns();
}

// A call works in place in the bucket when all its data is there and every element of its input has the place of its
// output: of a reduce-scatter this member's share is the output, of an allgather its share is the input.
void Channel::locate_in_bucket(Call& call) const {
  const char* start = bucket();
  if (start == nullptr || call.spans.size() != 1) return;
  const char* input = static_cast<const char*>(call.spans[0].input);
  const char* output = static_cast<const char*>(call.spans[0].output);
  const char* data = call.kind == RD_ALLGATHER ? output : input;
  const char* share = call.kind == RD_ALLGATHER ? input : output;
  uint64_t bytes = call.spans.bytes(), share_begin = 0;
  if (call.kind == RD_ALLGATHER || call.kind == RD_REDUCE_SCATTER) {
    std::vector<uint64_t> starts = starts_of(call.counts, call.element_bytes());
    bytes = starts.back();
    share_begin = starts[topology_.member_index];
  } else if (call.kind != RD_ALLREDUCE && call.kind != RD_BROADCAST) {
    return;
  }
  uint64_t area_bytes = topology_.bucket_bytes;
  if (data < start || data >= start + 2 * area_bytes || share != data + share_begin) return;
  uint64_t area = uint64_t(data - start) / area_bytes, offset = uint64_t(data - start) % area_bytes;
  if (offset + bytes > area_bytes) return;
  call.in_bucket = true;
  call.bucket_area = uint32_t(area);
  call.bucket_offset = offset;
}

void Channel::run_collective(Call& call, CallContext& context) {
  rd_algorithm algorithm =
      choose_algorithm(topology_, call.kind, call.reduce_params, call.spans.count(), call.algorithm);
  CallHeader header = call.header(algorithm, ++sequence_);
  call.result.sequence = header.sequence;
  if (algorithm == RD_DIRECT && segment_ != nullptr) direct_prepare(context, call);
  const auto& headers = matcher_.match(context, header, call.pre_agreed);
  call.result.ready_ns = now_ns();
  call.result.algorithm = algorithm;
  const CallHeader* requested;
  if (match_headers(headers, &requested) == MatchResult::kMismatch) {
    for (const CallHeader& shown : headers) {
      rd_member_call& member_call = call.member_calls.emplace_back();
      member_call.signature = shown.signature;
      member_call.kind = shown.kind;
      copy_description(member_call.description, shown.description);
    }
    throw CallError{RD_MISMATCH};
  }
  run_algorithm(algorithm, call, context);
}

// Takes part in the others' allreduces until every member has joined. A joined member learns from the headers which
// allreduce it is. The others read its bucket or slot as soon as the headers match, so the zeros are written before:
// into its second bucket area, because in the first there may be results that its caller still uses.
void Channel::run_join(Call& call, CallContext& context) {
  call.bucket_area = 1;
  if (bucket() != nullptr) std::memset(bucket(1), 0, topology_.bucket_bytes);
  while (true) {
    if (topology_.single_host() && segment_ != nullptr) direct_prepare_zeros(context);
    const auto& headers = matcher_.match(context, call.header(RD_AUTO, ++sequence_), false);
    const CallHeader* requested;
    MatchResult result = match_headers(headers, &requested);
    if (result == MatchResult::kAllJoined) return;
    if (result == MatchResult::kMatch) contribute_zeros(*requested, call.deadline, context);
    // A mismatch among the others, or an operation that cannot be joined, is an error for them but not for this member.
  }
}

void Channel::contribute_zeros(const CallHeader& requested, const Deadline& deadline, CallContext& context) {
  if (requested.kind != RD_ALLREDUCE) return;
  bool in_bucket = requested.in_bucket != 0;
  uint64_t bytes = requested.count * element_bytes(rd_dtype(requested.dtype));
  std::vector<char> own(in_bucket ? 0 : bytes);
  char* zeros = in_bucket ? bucket(1) + requested.bucket_offset : own.data();
  rd_span span{zeros, zeros, requested.count};
  rd_call params{};
  params.kind = requested.kind;
  params.dtype = requested.dtype;
  params.op = requested.op;
  params.prescale = requested.prescale;
  params.postscale = requested.postscale;
  params.spans = &span;
  params.num_spans = 1;
  Call call(params, topology_, deadline);
  call.in_bucket = in_bucket;
  call.bucket_area = 1;
  call.bucket_offset = requested.bucket_offset;
  run_algorithm(rd_algorithm(requested.algorithm), call, context);
  if (in_bucket) std::memset(zeros, 0, bytes);  // the result is there now
}

void Channel::run_algorithm(rd_algorithm algorithm, const Call& call, CallContext& context) {
  if (call.kind == RD_BARRIER) return;
  if (topology_.size == 1) return single_member(context, call);
  switch (call.kind) {
    case RD_ALLREDUCE:
      if (call.reduce_params.op == RD_ADASUM) return adasum_allreduce(context, call);
      if (algorithm == RD_DIRECT) return direct_allreduce(context, call);
      if (algorithm == RD_DOUBLING) return recursive_doubling_allreduce(context, call);
      if (algorithm == RD_HALVING) return halving_doubling_allreduce(context, call);
      if (algorithm == RD_TWO_LEVEL) return two_level_allreduce(context, call);
      if (algorithm == RD_PAIRWISE) return pairwise_exchange_allreduce(context, call);
      return ring_allreduce(context, call);
    case RD_BROADCAST:
      return algorithm == RD_DIRECT ? direct_broadcast(context, call) : binomial_tree_broadcast(context, call);
    case RD_ALLGATHER:
      return algorithm == RD_DIRECT ? direct_allgather(context, call) : ring_allgather(context, call);
    case RD_REDUCE_SCATTER:
      if (algorithm == RD_DIRECT) return direct_reduce_scatter(context, call);
      if (algorithm == RD_PAIRWISE) return pairwise_exchange_reduce_scatter(context, call);
      return ring_reduce_scatter(context, call);
    case RD_REDUCE:
      return algorithm == RD_DIRECT ? direct_reduce(context, call) : binomial_tree_reduce(context, call);
    case RD_GATHER:
      return algorithm == RD_DIRECT ? direct_gather(context, call) : binomial_tree_gather(context, call);
    case RD_SCATTER:
      return algorithm == RD_DIRECT ? direct_scatter(context, call) : binomial_tree_scatter(context, call);
    default:
      return pairwise_exchange_alltoall(context, call);
  }
}

void Channel::get_current_call(rd_current_call* current, uint32_t* missing) {
  *current = {};
  current->sequence = sequence_.load();
  std::shared_ptr<Call> call = announced_ != nullptr ? announced_->current() : queue_.current();
  if (call == nullptr) return;
  current->start_ns = call->started_ns.load();
  current->kind = call->kind;
  copy_description(current->description, call->description);
  std::vector<uint32_t> members = barrier_.missing();
  int32_t waiting_for = waiting_for_.load();
  if (members.empty() && waiting_for >= 0) members.push_back(uint32_t(waiting_for));
  std::copy(members.begin(), members.end(), missing);
  current->num_missing = int32_t(members.size());
}

}  // namespace ronde
