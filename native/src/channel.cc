#include "channel.h"

#include <algorithm>
#include <cstring>

#include "algorithm/algorithm.h"
#include "choose_algorithm.h"
#include "link/link.h"
#include "link/shared_memory_link.h"
#include "link/tcp_link.h"

namespace ronde {

namespace {

std::vector<FileDescriptor> take_abort_sockets(std::vector<std::vector<FileDescriptor>>& sockets) {
  std::vector<FileDescriptor> first;
  for (auto& row : sockets) {
    first.push_back(row.empty() ? FileDescriptor() : std::move(row.front()));
    if (!row.empty()) row.erase(row.begin());
  }
  return first;
}

std::shared_ptr<char[]> private_bucket(uint64_t bytes) {
  if (bytes == 0) return nullptr;
  constexpr std::align_val_t kPage{4096};
  auto* memory = new (kPage) char[bytes]();
  return {memory, [](char* owned) { operator delete[](owned, kPage); }};
}

void copy_text(char* to, const std::string& text) {
  size_t length = std::min<size_t>(text.size(), RD_TEXT - 1);
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

}  // namespace

Channel::Channel(const rd_layout& layout, std::shared_ptr<SharedSegment> segment,
                 std::vector<std::vector<FileDescriptor>> sockets, std::vector<FileDescriptor> direct)
    : topology_(layout),
      segment_(std::move(segment)),
      own_bucket_(segment_ == nullptr ? private_bucket(layout.bucket_bytes) : nullptr),
      abort_signal_(take_abort_sockets(sockets)),
      barrier_(topology_, segment_.get()),
      meeting_(topology_) {
  links_.resize(topology_.size);
  direct_links_.resize(topology_.size);
  for (uint32_t member = 0; member < topology_.size; ++member) {
    if (member == topology_.member_index) continue;
    if (topology_.hosts[member] == topology_.my_host) {
      if (segment_ == nullptr) throw CallError{RD_BAD_CALL, int(member)};
      links_[member] = std::make_unique<SharedMemoryLink>(topology_, segment_.get(), LinkUse::kCollective, member);
      direct_links_[member] =
          std::make_unique<SharedMemoryLink>(topology_, segment_.get(), LinkUse::kPointToPoint, member);
      continue;
    }
    if (member >= sockets.size() || sockets[member].empty() || sockets[member][0].get() < 0)
      throw CallError{RD_BAD_CALL, int(member)};
    links_[member] = std::make_unique<TcpLink>(member, std::move(sockets[member]), &abort_signal_);
    if (member < direct.size() && direct[member].get() >= 0) {
      std::vector<FileDescriptor> one;
      one.push_back(std::move(direct[member]));
      direct_links_[member] = std::make_unique<TcpLink>(member, std::move(one), &abort_signal_);
    }
  }
  collectives_ = std::make_unique<Order>(*this, &Channel::collective);
}

Channel::~Channel() {
  bool idle = collectives_->queue.idle();
  for (auto& [key, order] : direct_orders_) idle = idle && order->queue.idle();
  if (idle) {
    if (segment_ != nullptr) segment_->mark_left(topology_.local_index);
    abort_signal_.announce_close();
  } else {
    abort(CallError{RD_CLOSED, int(topology_.member_index)});
  }
  collectives_->queue.close();
  for (auto& [key, order] : direct_orders_) order->queue.close();
}

Queue& Channel::queue_of(const Request& request) {
  if (request.kind != RD_SEND && request.kind != RD_RECEIVE) return collectives_->queue;
  std::lock_guard<std::mutex> lock(orders_mutex_);
  auto& order = direct_orders_[{request.peer, request.kind == RD_SEND}];
  if (order == nullptr) order = std::make_unique<Order>(*this, &Channel::direct_message);
  return order->queue;
}

void Channel::abort(const CallError& error) {
  // Others must not mistake "I closed" for their own closing.
  CallError told = error.status == RD_CLOSED ? CallError{RD_PEER_LOST, int(topology_.member_index)} : error;
  if (segment_ != nullptr) segment_->abort(told);
  abort_signal_.trigger(told);
}

char* Channel::bucket() const {
  if (topology_.bucket_bytes == 0) return nullptr;
  return segment_ != nullptr ? segment_->bucket(topology_.local_index) : own_bucket_.get();
}

std::shared_ptr<void> Channel::bucket_owner() const {
  if (segment_ != nullptr) return segment_;
  return own_bucket_;
}

// Runs one call and turns whatever ends it into its result. A failure that is not a plain mistake ends the channel.
void Channel::execute(Request& request, Order& order, Work work) {
  rd_result& result = request.result;
  result.member = -1;
  result.start_ns = result.ready_ns = now_ns();
  request.started_ns.store(result.start_ns);
  try {
    CallWait wait(topology_, segment_.get(), &abort_signal_, request.deadline, &order.waiting_for);
    Team team{topology_, segment_.get(), barrier_, links_, wait, order.flat, order.passing, slot_};
    wait.check();
    (this->*work)(request, team);
    result.status = RD_OK;
  } catch (const CallError& error) {
    result.status = error.status;
    result.member = error.member;
    result.detail = error.detail;
    if (error.status != RD_MISMATCH && error.status != RD_BAD_CALL) abort(error);
  } catch (const std::bad_alloc&) {
    result.status = RD_SYSTEM;
    result.detail = ENOMEM;
    abort(CallError{RD_PEER_LOST, int(topology_.member_index)});
  }
  result.end_ns = now_ns();
}

bool Channel::in_bucket(const Request& request, uint64_t* offset) const {
  const char* start = bucket();
  if (start == nullptr || request.parts.pieces().size() != 1) return false;
  const rd_part& part = request.parts.pieces()[0];
  const char* data = static_cast<const char*>(part.in);
  if (part.in != part.out || data < start || data + request.parts.bytes() > start + topology_.bucket_bytes)
    return false;
  *offset = uint64_t(data - start);
  return true;
}

CallHeader Channel::header_of(const Request& request, rd_algorithm algorithm) const {
  CallHeader header{};
  header.signature = request.signature;
  header.count = request.parts.count();
  header.kind = request.kind;
  header.dtype = request.dtype;
  header.op = request.op;
  header.algorithm = algorithm;
  header.peer = request.peer;
  header.prescale = request.prescale;
  header.postscale = request.postscale;
  header.in_bucket = in_bucket(request, &header.bucket_offset);
  copy_text(header.description, request.text);
  return header;
}

void Channel::require_agreement(Request& request, Verdict verdict) {
  if (verdict != Verdict::kDiffer) return;
  for (const CallHeader& header : meeting_.headers()) {
    rd_asked asked{header.signature, {}};
    copy_text(asked.text, header.description);
    request.asked.push_back(asked);
  }
  throw CallError{RD_MISMATCH};
}

void Channel::collective(Request& request, Team& team) {
  if (request.kind == RD_JOIN) return join(request, team);
  rd_algorithm algorithm =
      choose_algorithm(topology_, request.kind, request.op, request.parts.bytes(), request.algorithm);
  CallHeader header = header_of(request, algorithm);
  header.sequence = ++sequence_;
  Arithmetic arithmetic{request.dtype, request.op, request.prescale, request.postscale, topology_.size};
  Job job{request.kind,   arithmetic,     request.peer,         request.parts,
          request.counts, request.splits, header.bucket_offset, header.in_bucket != 0};
  bool direct = algorithm == RD_DIRECT && segment_ != nullptr;
  if (direct) direct_prepare(team, job);
  meeting_.meet(team, header, request.trusted);
  request.result.ready_ns = now_ns();
  request.result.algorithm = algorithm;
  const CallHeader* asked;
  require_agreement(request, judge(meeting_.headers(), &asked));
  run_algorithm(algorithm, job, team);
}

// The others may ask for any allreduce while I have joined: I learn at the meeting which, and give zeros. They read a
// bucket or a slot as soon as I have arrived, so the zeros lie there before.
void Channel::join(Request& request, Team& team) {
  if (bucket() != nullptr) std::memset(bucket(), 0, topology_.bucket_bytes);
  while (true) {
    if (topology_.single_host() && segment_ != nullptr) direct_prepare_zeros(team);
    CallHeader header = header_of(request, RD_CHOOSE);
    header.sequence = ++sequence_;
    meeting_.meet(team, header, false);
    const CallHeader* asked;
    Verdict verdict = judge(meeting_.headers(), &asked);
    if (verdict == Verdict::kEveryoneJoined) return;
    if (verdict == Verdict::kAgreed) take_part(CallHeader(*asked), team);
    // When the others disagree among themselves, or ask for what cannot be joined, that is their error: I go on.
  }
}

void Channel::take_part(const CallHeader& asked, Team& team) {
  if (asked.kind != RD_ALLREDUCE) return;
  rd_dtype dtype = rd_dtype(asked.dtype);
  uint64_t bytes = asked.count * element_bytes(dtype);
  bool in_bucket = asked.in_bucket != 0;
  std::vector<char> own(in_bucket ? 0 : bytes);
  char* zeros = in_bucket ? bucket() + asked.bucket_offset : own.data();
  rd_part part{zeros, zeros, asked.count};
  Arithmetic arithmetic{dtype, rd_op(asked.op), asked.prescale, asked.postscale, topology_.size};
  Job job{RD_ALLREDUCE, arithmetic, asked.peer,          Parts(&part, 1, element_bytes(dtype)),
          {},           {},         asked.bucket_offset, in_bucket};
  run_algorithm(rd_algorithm(asked.algorithm), job, team);
  if (in_bucket) std::memset(zeros, 0, bytes);
}

void Channel::run_algorithm(rd_algorithm algorithm, const Job& job, Team& team) {
  if (job.kind == RD_BARRIER) return;
  if (topology_.size == 1) return alone(team, job);
  bool adasum = job.arithmetic.op == RD_ADASUM;
  switch (job.kind) {
    case RD_ALLREDUCE:
      if (adasum) return adasum_allreduce(team, job);
      if (algorithm == RD_DIRECT) return direct_allreduce(team, job);
      if (algorithm == RD_DOUBLING) return doubling_allreduce(team, job);
      if (algorithm == RD_TWO_LEVEL) return two_level_allreduce(team, job);
      return ring_allreduce(team, job);
    case RD_BROADCAST:
      return algorithm == RD_DIRECT ? direct_broadcast(team, job) : tree_broadcast(team, job);
    case RD_ALLGATHER:
      return algorithm == RD_DIRECT ? direct_allgather(team, job) : ring_allgather(team, job);
    case RD_REDUCE_SCATTER:
      return algorithm == RD_DIRECT ? direct_reduce_scatter(team, job) : ring_reduce_scatter(team, job);
    default:
      return pairwise_alltoall(team, job);
  }
}

// A message is its header, then its bytes. The receiver compares; the sender is done when its bytes are on their way.
void Channel::direct_message(Request& request, Team& team) {
  Link* link = direct_links_[uint32_t(request.peer)].get();
  if (link == nullptr) throw CallError{RD_BAD_CALL, request.peer};
  uint64_t bytes = request.parts.bytes();
  const rd_part& part = request.parts.pieces()[0];
  if (request.kind == RD_SEND) {
    CallHeader header = header_of(request, RD_CHOOSE);
    send_receive(team.wait, link, &header, sizeof header, nullptr, nullptr, 0);
    request.result.ready_ns = now_ns();
    send_receive(team.wait, link, part.in, bytes, nullptr, nullptr, 0);
    return;
  }
  CallHeader header{};
  send_receive(team.wait, nullptr, nullptr, 0, link, &header, sizeof header);
  request.result.ready_ns = now_ns();
  uint64_t coming = header.count * element_bytes(rd_dtype(header.dtype));
  if (header.signature == request.signature && coming == bytes) {
    return send_receive(team.wait, nullptr, nullptr, 0, link, part.out, bytes);
  }
  for (uint64_t left = coming;
       left > 0;) {  // what was sent must leave the stream, or the next message would start in it
    uint64_t piece = std::min<uint64_t>(left, 1 << 20);
    send_receive(team.wait, nullptr, nullptr, 0, link, team.passing.room(1 << 20), piece);
    left -= piece;
  }
  request.asked.resize(topology_.size);
  request.asked[uint32_t(request.peer)].signature = header.signature;
  copy_text(request.asked[uint32_t(request.peer)].text, header.description);
  request.asked[topology_.member_index].signature = request.signature;
  copy_text(request.asked[topology_.member_index].text, request.text);
  throw CallError{RD_MISMATCH, request.peer};
}

void Channel::look(rd_status_now* now, uint32_t* missing) {
  *now = {};
  now->calls = sequence_.load();
  Order* busy = collectives_.get();
  std::shared_ptr<Request> request = busy->queue.current();
  std::lock_guard<std::mutex> lock(orders_mutex_);
  for (auto& [key, order] : direct_orders_) {
    if (request != nullptr) break;
    request = order->queue.current();
    busy = order.get();
  }
  if (request == nullptr) return;
  now->since_ns = request->started_ns.load();
  now->kind = request->kind;
  copy_text(now->text, request->text);
  std::vector<uint32_t> late;
  if (busy == collectives_.get()) late = barrier_.missing();
  int32_t waiting_for = busy->waiting_for.load();
  if (late.empty() && waiting_for >= 0) late.push_back(uint32_t(waiting_for));
  std::copy(late.begin(), late.end(), missing);
  now->num_missing = int32_t(late.size());
}

}  // namespace ronde
