#include "endpoint.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/futex.h"
#include "base/python_signals.h"
#include "call.h"

namespace ronde {

namespace {

constexpr int64_t kMaxSleepNs = 50'000'000;  // of a caller, so that Python's signal handlers run
constexpr int kTickMs = 1;                   // how often the thread looks whether callers still move the bytes
constexpr uint32_t kThreadSpins = 200;       // of the thread, before it sleeps
// A spinning caller asks the kernel once in so many spins: for bytes, when a link is a socket; or else for its end.
constexpr uint32_t kSocketInterval = 2;
constexpr uint32_t kWakeupInterval = 500;
constexpr int64_t kMaxThreadSleepMs = 3'600'000;
constexpr int kMaxReadsOfLost = 256;  // of what a lost rank has sent: 256 MB are more than a socket holds
constexpr uint64_t kKickKey = UINT64_MAX;

// Bytes that a message counts for until it was taken: an empty one needs memory, too.
uint64_t message_cost(uint64_t bytes, uint64_t header_bytes) { return bytes + header_bytes + 64; }

const rd_message& checked(const rd_message& params, uint32_t num_ranks) {
  bool is_send = params.kind == RD_SEND, is_receive = params.kind == RD_RECEIVE;
  bool any_source = params.peer == RD_ANY_SOURCE, any_size = (params.flags & RD_ANY_SIZE) != 0;
  bool valid_peer = params.peer >= 0 && uint32_t(params.peer) < num_ranks;
  bool valid = (is_send && valid_peer && !any_size) || (is_receive && (valid_peer || any_source));
  if (!valid || (params.data == nullptr && params.bytes > 0)) throw CallError{RD_BAD_CALL};
  return params;
}

std::string text_of(const rd_message& params) {
  return params.description == nullptr ? std::string() : params.description;
}

void pause(const SpinPolicy& policy, uint32_t spins) {
  spins % policy.yield_every + 1 == policy.yield_every ? void(sched_yield()) : cpu_pause();
}

}  // namespace

Message::Message(const rd_message& params, uint32_t num_ranks, const Deadline& deadline)
    : kind(rd_kind(checked(params, num_ranks).kind)),
      context(params.context),
      peer(params.peer),
      tag(params.tag),
      flags(params.flags),
      signature(params.signature),
      window_bytes(params.window_bytes),
      description(text_of(params)),
      header(params.header == nullptr ? description
                                      : std::string(static_cast<const char*>(params.header), params.header_bytes)),
      data(static_cast<char*>(params.data)),
      bytes(params.bytes),
      deadline(deadline) {
  result.member = -1;
}

uint64_t Message::cost() const { return message_cost(bytes, header.size()); }

Endpoint::Endpoint(uint32_t rank, uint32_t num_ranks, SpinPolicy policy)
    : rank_(rank),
      policy_(policy),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      kick_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(num_ranks) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kKickKey;
  if (epoll_.get() < 0 || kick_.get() < 0 || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, kick_.get(), &event) != 0)
    throw CallError{RD_SYSTEM, -1, errno};
}

Endpoint::~Endpoint() { close(); }

void Endpoint::add_link(uint32_t peer, bool opened_here, FileDescriptor socket, int memory) {
  Lock lock(mutex_);
  if (peer >= peers_.size()) throw CallError{RD_BAD_CALL};
  Peer& other = peers_[peer];
  if (closed_ || other.lost || (opened_here ? other.outgoing != nullptr : other.incoming != nullptr)) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = uint64_t(peer) * 2 + (opened_here ? 1 : 0);
  int descriptor = socket.get();
  ensure_thread();
  if (opened_here) {
    other.outgoing = std::make_unique<OutgoingLink>(std::move(socket), memory);
  } else {
    other.incoming = std::make_unique<IncomingLink>(std::move(socket), memory);
  }
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) {
    int error = errno;
    opened_here ? other.outgoing.reset() : other.incoming.reset();
    throw CallError{RD_SYSTEM, int(peer), error};
  }
  if (memory < 0) ++num_sockets_;
  if (std::find(linked_.begin(), linked_.end(), peer) == linked_.end()) linked_.push_back(peer);
  kick();
}

// --- messages of this rank -------------------------------------------------------------------------------------------

void Endpoint::start(const MessagePtr& message) {
  message->result.start_ns = message->result.ready_ns = now_ns();
  bool is_send = message->kind == RD_SEND;
  if (closed_ || (is_send && leaving_) || contexts_[message->context].ended) return finish(message, RD_CLOSED, -1);
  is_send ? start_send(message) : start_receive(message);
}

void Endpoint::start_send(const MessagePtr& message) {
  auto peer = uint32_t(message->peer);
  Peer& other = peers_[peer];
  if (other.lost) return finish(message, RD_PEER_LOST, message->peer, other.error);
  if (peer != rank_ && other.outgoing == nullptr) return finish(message, RD_BAD_CALL, message->peer);
  if (message->has_flag(RD_EXPECTED)) {
    if (peer == rank_) return deliver_to_self(message);
    other.outgoing->queue.push_back(message);
    write(*other.outgoing);
    return;
  }
  other.flows[message->context].waiting.push_back(message);
  admit(peer, message->context);
}

// Starts the messages of a context that fit into its window.
void Endpoint::admit(uint32_t peer, uint64_t context) {
  Peer& other = peers_[peer];
  Flow& flow = other.flows[context];
  while (!flow.waiting.empty()) {
    MessagePtr message = flow.waiting.front();
    if (flow.outstanding > kCreditBatchBytes && flow.outstanding + message->cost() > message->window_bytes) return;
    flow.waiting.pop_front();
    flow.outstanding += message->cost();
    if (peer == rank_) {
      deliver_to_self(message);
    } else {
      other.outgoing->queue.push_back(message);
      write(*other.outgoing);
    }
  }
}

void Endpoint::deliver_to_self(const MessagePtr& message) {
  auto arrival = std::make_shared<Arrival>();
  arrival->source = rank_;
  arrival->frame = {Frame::kMessage,    message->flags,         message->context, message->tag,
                    message->signature, message->header.size(), message->bytes};
  arrival->header = message->header;
  if (!begin_arrival(arrival)) return finish(message, RD_SYSTEM, message->peer, ENOMEM);
  if (arrival->target != nullptr && message->bytes > 0) std::memcpy(arrival->target, message->data, message->bytes);
  arrival->received = arrival->frame.bytes;
  complete(arrival);
  finish(message, RD_OK, message->peer);
}

void Endpoint::start_receive(const MessagePtr& message) {
  Context& context = contexts_[message->context];
  Tag& tag = context.tags[message->tag];
  auto found = std::find_if(tag.unexpected.begin(), tag.unexpected.end(), [&](const ArrivalPtr& arrival) {
    return message->peer == RD_ANY_SOURCE || arrival->source == uint32_t(message->peer);
  });
  if (found != tag.unexpected.end()) {
    ArrivalPtr arrival = *found;
    tag.unexpected.erase(found);
    arrival->unexpected = false;
    match(arrival, message);
    if (arrival->complete()) complete(arrival);
    return erase_if_empty(context, message->tag);
  }
  if (message->has_flag(RD_REPORT_LOSSES)) {
    if (!context.reports_losses) {
      context.reports_losses = true;
      for (uint32_t peer = 0; peer < peers_.size(); ++peer)
        if (peers_[peer].lost) context.losses.push_back(peer);
    }
    if (!context.losses.empty()) {
      report_loss(context, message);
      return erase_if_empty(context, message->tag);
    }
  }
  if (message->peer != RD_ANY_SOURCE && peers_[uint32_t(message->peer)].lost) {
    finish(message, RD_PEER_LOST, message->peer, peers_[uint32_t(message->peer)].error);
    return erase_if_empty(context, message->tag);
  }
  tag.receives.push_back(message);
}

void Endpoint::report_loss(Context& context, const MessagePtr& receive) {
  uint32_t lost = context.losses.front();
  context.losses.pop_front();
  finish(receive, RD_PEER_LOST, int(lost), peers_[lost].error);
}

void Endpoint::finish(const MessagePtr& message, rd_status status, int member, int detail) {
  message->result.status = status;
  message->result.member = member;
  message->result.detail = detail;
  message->result.end_ns = now_ns();
  if (message->in_deadlines) {
    deadlines_.erase(*message->in_deadlines);
    message->in_deadlines.reset();
  }
  message->finished.store(1);
  if (message->num_sleepers > 0) futex_wake_all(&message->finished);
}

// Ends a message whose caller no longer waits for it.
void Endpoint::withdraw(const MessagePtr& message, rd_status status, int member, int detail) {
  if (message->finished.load() != 0) return;
  message->kind == RD_SEND ? withdraw_send(message) : withdraw_receive(message);
  finish(message, status, member, detail);
}

// A receive that ends early has taken nothing: a message that is arriving for it can be received by another one.
void Endpoint::withdraw_receive(const MessagePtr& message) {
  Context& context = contexts_[message->context];
  Tag& tag = context.tags[message->tag];
  auto found = std::find(tag.receives.begin(), tag.receives.end(), message);
  if (found != tag.receives.end()) {
    tag.receives.erase(found);
    return erase_if_empty(context, message->tag);
  }
  for (Peer& peer : peers_) {
    if (peer.incoming == nullptr || peer.incoming->arrival == nullptr) continue;
    ArrivalPtr arrival = peer.incoming->arrival;
    if (arrival->receive != message) continue;
    arrival->receive = nullptr;
    if (!message->has_flag(RD_ANY_SIZE)) {
      char* before = arrival->target;
      if (!allocate_block(*arrival)) {
        peer.incoming->arrival = nullptr;
        peer.incoming->end(ENOMEM);  // or the message would be lost without a word
        return;
      }
      std::memcpy(arrival->target, before, arrival->received);
    }
    arrival->unexpected = true;
    tag.unexpected.push_front(arrival);  // what came after it from the same rank is behind it
    return;
  }
  erase_if_empty(context, message->tag);
}

// A send that has begun must be completed, or the next message would begin in the middle of it: what is left is copied.
void Endpoint::withdraw_send(const MessagePtr& message) {
  Peer& peer = peers_[uint32_t(message->peer)];
  Flow& flow = peer.flows[message->context];
  auto waiting = std::find(flow.waiting.begin(), flow.waiting.end(), message);
  if (waiting != flow.waiting.end()) {
    flow.waiting.erase(waiting);
    return;
  }
  if (peer.outgoing == nullptr) return;
  OutgoingLink& outgoing = *peer.outgoing;
  auto queued = std::find(outgoing.queue.begin(), outgoing.queue.end(), message);
  if (queued == outgoing.queue.end()) return;
  if (queued != outgoing.queue.begin() || outgoing.position == 0) {
    outgoing.queue.erase(queued);
    if (message->has_flag(RD_EXPECTED)) return;
    flow.outstanding -= message->cost();
    return admit(uint32_t(message->peer), message->context);
  }
  rd_message params{};
  params.context = message->context;
  params.kind = RD_SEND;
  params.peer = message->peer;
  params.tag = message->tag;
  params.flags = message->flags;
  params.signature = message->signature;
  params.window_bytes = message->window_bytes;
  params.header = message->header.data();
  params.header_bytes = message->header.size();
  OwnedMemory copy(static_cast<char*>(std::malloc(std::max<uint64_t>(1, message->bytes))));
  if (copy == nullptr) return lose_peer_locked(uint32_t(message->peer), ENOMEM);
  uint64_t ahead = sizeof(Frame) + message->header.size();
  uint64_t sent = outgoing.position > ahead ? outgoing.position - ahead : 0;
  if (message->bytes > sent) std::memcpy(copy.get() + sent, message->data + sent, message->bytes - sent);
  params.data = copy.get();
  params.bytes = message->bytes;
  *queued = std::make_shared<Message>(params, num_ranks(), message->deadline);
  (*queued)->own_data = std::move(copy);
}

// --- waiting ---------------------------------------------------------------------------------------------------------

void Endpoint::run(const MessagePtr& message) {
  Lock lock(mutex_);
  start(message);
  if (message->finished.load() != 0) return;
  try {
    if (!wait_for(message, message->deadline, true, lock)) withdraw(message, RD_TIMEOUT, message->peer);
  } catch (const CallError& error) {
    withdraw(message, error.status, error.member, error.detail);
  }
}

void Endpoint::submit(const MessagePtr& message) {
  Lock lock(mutex_);
  start(message);
  if (message->finished.load() != 0) return;
  try {
    ensure_thread();
  } catch (const CallError& error) {
    return withdraw(message, error.status, error.member, error.detail);
  }
  int64_t remaining_ns = message->deadline.remaining_ns();
  if (remaining_ns != INT64_MAX) message->in_deadlines = deadlines_.emplace(now_ns() + remaining_ns, message);
  kick();  // for the new deadline, or the output of a socket
}

bool Endpoint::wait(const MessagePtr& message, const Deadline& deadline) {
  if (message->finished.load() != 0) return true;
  Lock lock(mutex_);
  return wait_for(message, deadline, false, lock);
}

// The caller moves bytes itself for a while, because that is fastest; then it sleeps and the thread moves them.
bool Endpoint::wait_for(const MessagePtr& message, const Deadline& deadline, bool run_handlers, Lock& lock) {
  ++num_spinning_;
  for (uint32_t spins = 0, rounds = 1; spins < policy_.spins && message->finished.load() == 0; ++rounds) {
    bool moved = progress(rounds % (num_sockets_ > 0 ? kSocketInterval : kWakeupInterval) == 0);
    if (message->finished.load() != 0) break;
    if (moved) {
      spins = 0;
      if (deadline.expired()) break;
    }
    lock.unlock();
    pause(policy_, spins++);
    lock.lock();
  }
  --num_spinning_;
  if (message->finished.load() != 0) return true;
  if (deadline.expired()) return false;
  ensure_thread();
  kick();
  while (message->finished.load() == 0) {
    ++message->num_sleepers;
    lock.unlock();
    int64_t limit_ns = std::min<int64_t>(kMaxSleepNs, deadline.remaining_ns());
    bool woken = limit_ns <= 0 || futex_wait(&message->finished, 0, limit_ns);
    bool interrupted = !woken && run_handlers && run_signal_handlers();
    lock.lock();
    --message->num_sleepers;
    if (message->finished.load() != 0) break;
    if (interrupted) throw CallError{RD_ABORTED, message->peer, EINTR};
    if (deadline.expired()) return false;
  }
  return true;
}

// --- moving bytes ----------------------------------------------------------------------------------------------------

// Moves what can be moved on all links. Returns whether anything was.
bool Endpoint::progress(bool poll_kernel) {
  bool moved = false;
  for (size_t i = 0; i < linked_.size(); ++i) {
    uint32_t peer = linked_[i];
    Peer& other = peers_[peer];
    if (other.incoming != nullptr) {
      if (other.incoming->link.has_input()) moved |= read(peer);
      if (other.incoming != nullptr && other.incoming->has_output()) moved |= send_credits(*other.incoming);
    }
    if (other.outgoing != nullptr) {
      if (other.outgoing->link.has_input()) moved |= read_credits(peer);
      if (other.outgoing != nullptr && other.outgoing->has_output()) moved |= write(*other.outgoing);
    }
    check_links(peer);
    if (other.incoming == nullptr && other.outgoing == nullptr) linked_.erase(linked_.begin() + ptrdiff_t(i--));
  }
  if (poll_kernel) moved |= poll_sockets();
  return moved;
}

// Handles the sockets that are ready. Returns whether bytes were moved.
bool Endpoint::poll_sockets() {
  epoll_event events[16];
  int count = epoll_wait(epoll_.get(), events, 16, 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kKickKey) continue;
    auto peer = uint32_t(events[i].data.u64 / 2);
    Peer& other = peers_[peer];
    bool is_outgoing = events[i].data.u64 % 2 == 1;
    MessageLink* link = is_outgoing ? (other.outgoing == nullptr ? nullptr : &other.outgoing->link)
                                    : (other.incoming == nullptr ? nullptr : &other.incoming->link);
    if (link == nullptr) continue;  // it ended with an event before this one
    link->clear_wakeups();
    moved |= is_outgoing ? read_credits(peer) : read(peer);
    if (other.outgoing != nullptr && is_outgoing) moved |= write(*other.outgoing);
    if (other.incoming != nullptr && !is_outgoing) moved |= send_credits(*other.incoming);
    check_links(peer);
  }
  return moved;
}

bool Endpoint::write(OutgoingLink& outgoing) {
  uint64_t moved = 0;
  while (!outgoing.queue.empty() && moved < kBudgetBytes) {
    MessagePtr message = outgoing.queue.front();
    if (outgoing.position == 0) {
      outgoing.frame = {Frame::kMessage,    message->flags,         message->context, message->tag,
                        message->signature, message->header.size(), message->bytes};
      message->result.ready_ns = now_ns();
    }
    uint64_t before = outgoing.position;
    iovec pieces[3];
    int num_pieces = 0;
    uint64_t skipped = outgoing.position;
    auto add = [&](const void* data, uint64_t bytes) {
      uint64_t skip = std::min(skipped, bytes);
      skipped -= skip;
      if (bytes > skip) pieces[num_pieces++] = {const_cast<char*>(static_cast<const char*>(data)) + skip, bytes - skip};
    };
    add(&outgoing.frame, sizeof(Frame));
    add(message->header.data(), message->header.size());
    add(message->data, message->bytes);
    uint64_t total = sizeof(Frame) + message->header.size() + message->bytes;
    outgoing.position += outgoing.link.try_send(pieces, num_pieces);
    moved += outgoing.position - before;
    if (outgoing.position < total) return moved > 0;
    outgoing.queue.pop_front();
    outgoing.position = 0;
    finish(message, RD_OK, message->peer);
  }
  if (outgoing.queue.empty() && outgoing.says_goodbye && !outgoing.goodbye_sent) {
    Frame goodbye{};
    goodbye.kind = Frame::kGoodbye;
    iovec piece{reinterpret_cast<char*>(&goodbye) + outgoing.position, sizeof(Frame) - outgoing.position};
    outgoing.position += outgoing.link.try_send(&piece, 1);
    outgoing.goodbye_sent = outgoing.position == sizeof(Frame);
  }
  return moved > 0;
}

bool Endpoint::read_credits(uint32_t peer) {
  bool moved = false;
  while (peers_[peer].outgoing != nullptr) {
    OutgoingLink& outgoing = *peers_[peer].outgoing;
    size_t received =
        outgoing.link.try_receive(outgoing.credit + outgoing.credit_bytes, sizeof(Credit) - outgoing.credit_bytes);
    if (received == 0) break;
    moved = true;
    outgoing.credit_bytes += received;
    if (outgoing.credit_bytes < sizeof(Credit)) break;
    Credit credit;
    std::memcpy(&credit, outgoing.credit, sizeof credit);
    outgoing.credit_bytes = 0;
    Flow& flow = peers_[peer].flows[credit.context];
    flow.outstanding -= std::min(flow.outstanding, credit.bytes);
    admit(peer, credit.context);
  }
  return moved;
}

bool Endpoint::read(uint32_t peer) {
  IncomingLink& incoming = *peers_[peer].incoming;
  uint64_t moved = 0;
  while (moved < kBudgetBytes && !incoming.ended) {
    size_t received = 0;
    if (incoming.arrival != nullptr) {
      Arrival& arrival = *incoming.arrival;
      uint64_t wanted = arrival.frame.bytes - arrival.received;
      char dropped[4096];
      received = arrival.target != nullptr
                     ? incoming.link.try_receive(arrival.target + arrival.received, std::min(wanted, kBudgetBytes))
                     : incoming.link.try_receive(dropped, std::min<uint64_t>(wanted, sizeof dropped));
      arrival.received += received;
      if (arrival.complete()) {
        ArrivalPtr ended = std::move(incoming.arrival);
        incoming.arrival = nullptr;
        complete(ended);
        moved += received;
        continue;
      }
    } else if (incoming.frame_bytes < sizeof(Frame)) {
      auto* frame = reinterpret_cast<char*>(&incoming.frame);
      received = incoming.link.try_receive(frame + incoming.frame_bytes, sizeof(Frame) - incoming.frame_bytes);
      incoming.frame_bytes += received;
      if (incoming.frame_bytes == sizeof(Frame)) {
        bool valid = incoming.frame.kind == Frame::kMessage && incoming.frame.header_bytes <= kMaxHeaderBytes &&
                     incoming.frame.bytes <= kMaxBytes;
        if (!valid) {
          incoming.end(incoming.frame.kind == Frame::kGoodbye ? 0 : EPROTO);
          return true;
        }
        incoming.header.resize(incoming.frame.header_bytes);
        incoming.header_bytes = 0;
      }
    } else if (incoming.header_bytes < incoming.header.size()) {
      received = incoming.link.try_receive(incoming.header.data() + incoming.header_bytes,
                                           incoming.header.size() - incoming.header_bytes);
      incoming.header_bytes += received;
    }
    moved += received;
    bool header_read = incoming.frame_bytes == sizeof(Frame) && incoming.header_bytes == incoming.header.size();
    if (incoming.arrival == nullptr && header_read) {
      auto arrival = std::make_shared<Arrival>();
      arrival->source = peer;
      arrival->frame = incoming.frame;
      arrival->header = std::move(incoming.header);
      incoming.header.clear();
      incoming.frame_bytes = incoming.header_bytes = 0;
      if (!begin_arrival(arrival)) {
        incoming.end(ENOMEM);
        return true;
      }
      if (arrival->complete()) {
        complete(arrival);
      } else {
        incoming.arrival = arrival;
      }
      continue;
    }
    if (received == 0) break;
  }
  return moved > 0;
}

bool Endpoint::send_credits(IncomingLink& incoming) {
  if (incoming.credits.empty()) return false;
  iovec piece{incoming.credits.data(), incoming.credits.size()};
  size_t sent = incoming.link.try_send(&piece, 1);
  incoming.credits.erase(0, sent);
  return sent > 0;
}

// Notices when the links of a rank have ended.
void Endpoint::check_links(uint32_t peer) {
  Peer& other = peers_[peer];
  if (other.incoming != nullptr && other.incoming->ended) return lose_peer_locked(peer, other.incoming->error);
  if (other.incoming != nullptr && other.incoming->link.closed() && !other.incoming->link.has_input())
    return lose_peer_locked(peer, other.incoming->link.error());
  if (other.outgoing == nullptr || !other.outgoing->link.closed()) return;
  if (other.outgoing->goodbye_sent) {  // it has read everything
    remove_outgoing(other);
  } else {
    lose_peer_locked(peer, other.outgoing->link.error());
  }
}

void Endpoint::lose_peer(uint32_t peer) {
  Lock lock(mutex_);
  if (peer < peers_.size() && peer != rank_) lose_peer_locked(peer, 0);
}

// The loss of a rank is noticed here, by the end of a link, or by the caller of lose_peer.
void Endpoint::lose_peer_locked(uint32_t peer, int error) {
  Peer& other = peers_[peer];
  if (other.lost) return;
  other.lost = true;
  other.error = error;
  for (int i = 0; i < kMaxReadsOfLost && other.incoming != nullptr && read(peer); ++i) {
  }
  if (other.incoming != nullptr && other.incoming->arrival != nullptr) {
    ArrivalPtr arrival = std::move(other.incoming->arrival);
    other.incoming->arrival = nullptr;
    MessagePtr receive = std::move(arrival->receive);
    if (arrival->unexpected) {
      remove_unexpected(arrival);
    } else if (receive != nullptr && receive->peer == RD_ANY_SOURCE) {
      // A message of another rank will do. It was started before those that wait.
      contexts_[receive->context].tags[receive->tag].receives.push_front(receive);
    } else if (receive != nullptr) {
      finish(receive, RD_PEER_LOST, int(peer), error);
    }
  }
  for (auto& [number, context] : contexts_) {
    if (context.reports_losses && !context.ended) context.losses.push_back(peer);
    for (auto at = context.tags.begin(); at != context.tags.end();) {
      std::deque<MessagePtr> kept;
      for (const MessagePtr& receive : at->second.receives) {
        if (receive->peer == int(peer)) {
          finish(receive, RD_PEER_LOST, int(peer), error);
        } else if (receive->has_flag(RD_REPORT_LOSSES) && !context.losses.empty()) {
          report_loss(context, receive);
        } else {
          kept.push_back(receive);
        }
      }
      at->second.receives = std::move(kept);
      at = at->second.receives.empty() && at->second.unexpected.empty() ? context.tags.erase(at) : std::next(at);
    }
  }
  for (auto& [number, flow] : other.flows)
    for (const MessagePtr& send : flow.waiting) finish(send, RD_PEER_LOST, int(peer), error);
  other.flows.clear();
  other.unreported.clear();
  if (other.outgoing != nullptr)
    for (const MessagePtr& send : other.outgoing->queue) finish(send, RD_PEER_LOST, int(peer), error);
  remove_outgoing(other);
  remove_incoming(other);
}

// A closed descriptor leaves the epoll set by itself only when no child process has a copy of it.
void Endpoint::remove_outgoing(Peer& peer) {
  if (peer.outgoing == nullptr) return;
  MessageLink& link = peer.outgoing->link;
  if (!link.is_shared_memory()) --num_sockets_;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket(), nullptr);
  peer.outgoing.reset();
}

void Endpoint::remove_incoming(Peer& peer) {
  if (peer.incoming == nullptr) return;
  MessageLink& link = peer.incoming->link;
  if (!link.is_shared_memory()) --num_sockets_;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket(), nullptr);
  peer.incoming.reset();
}

// --- messages that arrive --------------------------------------------------------------------------------------------

// Decides where the data of a message goes: to the first receive that it fits, or into memory of the endpoint. Returns
// false when there is no memory for it.
bool Endpoint::begin_arrival(const ArrivalPtr& arrival) {
  Context& context = contexts_[arrival->frame.context];
  if (context.ended) return true;
  Tag& tag = context.tags[arrival->frame.tag];
  auto found = std::find_if(tag.receives.begin(), tag.receives.end(), [&](const MessagePtr& receive) {
    return receive->peer == RD_ANY_SOURCE || receive->peer == int(arrival->source);
  });
  bool has_memory = true;
  if (found != tag.receives.end()) {
    MessagePtr receive = *found;
    tag.receives.erase(found);
    has_memory = match(arrival, receive);
  } else if ((arrival->frame.flags & RD_EXPECTED) == 0) {
    has_memory = allocate_block(*arrival);
    if (has_memory) {
      arrival->unexpected = true;
      tag.unexpected.push_back(arrival);
    }
  }
  erase_if_empty(context, arrival->frame.tag);
  return has_memory;
}

bool Endpoint::allocate_block(Arrival& arrival) {
  uint64_t bytes = block_offset(arrival.frame.header_bytes) + block_offset(arrival.frame.bytes) + 64;
  arrival.block.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
  if (arrival.block == nullptr) return false;
  std::memcpy(arrival.block.get(), arrival.header.data(), arrival.header.size());
  arrival.target = arrival.block_data();
  return true;
}

// Gives a message to a receive. Returns false when there is no memory for it.
bool Endpoint::match(const ArrivalPtr& arrival, const MessagePtr& receive) {
  receive->result.ready_ns = now_ns();
  if (receive->has_flag(RD_ANY_SIZE)) {
    if (arrival->block == nullptr && !allocate_block(*arrival)) {
      finish(receive, RD_SYSTEM, int(arrival->source), ENOMEM);
      return false;
    }
  } else if (receive->signature != arrival->frame.signature || receive->bytes != arrival->frame.bytes) {
    arrival->target = nullptr;
    arrival->block = nullptr;
    receive->received_header = arrival->header;
    finish(receive, RD_MISMATCH, int(arrival->source));
    return true;
  } else {
    if (arrival->block != nullptr && arrival->received > 0)
      std::memcpy(receive->data, arrival->target, arrival->received);
    arrival->target = receive->data;
    arrival->block = nullptr;
  }
  arrival->receive = receive;
  return true;
}

// Called when all data of a message has arrived, and when a message whose data was there is taken.
void Endpoint::complete(const ArrivalPtr& arrival) {
  if (arrival->unexpected) return;
  give_credit(*arrival);
  MessagePtr receive = std::move(arrival->receive);
  if (receive == nullptr) return;
  receive->received_bytes = arrival->frame.bytes;
  if (receive->has_flag(RD_ANY_SIZE)) {
    receive->received_header = std::move(arrival->header);
    receive->block = std::move(arrival->block);
  }
  finish(receive, RD_OK, int(arrival->source));
}

void Endpoint::remove_unexpected(const ArrivalPtr& arrival) {
  Context& context = contexts_[arrival->frame.context];
  auto& unexpected = context.tags[arrival->frame.tag].unexpected;
  unexpected.erase(std::remove(unexpected.begin(), unexpected.end(), arrival), unexpected.end());
  erase_if_empty(context, arrival->frame.tag);
}

void Endpoint::give_credit(const Arrival& arrival) {
  if ((arrival.frame.flags & RD_EXPECTED) != 0) return;
  Peer& other = peers_[arrival.source];
  uint64_t cost = message_cost(arrival.frame.bytes, arrival.frame.header_bytes), context = arrival.frame.context;
  if (arrival.source == rank_) {
    other.flows[context].outstanding -= cost;
    return admit(rank_, context);
  }
  if (other.incoming == nullptr) return;
  uint64_t& unreported = other.unreported[context];
  unreported += cost;
  if (unreported < kCreditBatchBytes) return;
  Credit credit{context, unreported};
  unreported = 0;
  other.incoming->credits.append(reinterpret_cast<const char*>(&credit), sizeof credit);
  send_credits(*other.incoming);
}

void Endpoint::erase_if_empty(Context& context, uint64_t number) {
  auto tag = context.tags.find(number);
  if (tag != context.tags.end() && tag->second.receives.empty() && tag->second.unexpected.empty())
    context.tags.erase(tag);
}

// --- the end ---------------------------------------------------------------------------------------------------------

void Endpoint::for_each_message(const std::function<void(const MessagePtr&)>& visit) {
  std::vector<MessagePtr> messages;
  for (auto& [number, context] : contexts_)
    for (auto& [tag_number, tag] : context.tags)
      messages.insert(messages.end(), tag.receives.begin(), tag.receives.end());
  for (Peer& peer : peers_) {
    for (auto& [number, flow] : peer.flows) messages.insert(messages.end(), flow.waiting.begin(), flow.waiting.end());
    if (peer.outgoing != nullptr)
      messages.insert(messages.end(), peer.outgoing->queue.begin(), peer.outgoing->queue.end());
    if (peer.incoming != nullptr && peer.incoming->arrival != nullptr && peer.incoming->arrival->receive != nullptr)
      messages.push_back(peer.incoming->arrival->receive);
  }
  for (const MessagePtr& message : messages) visit(message);
}

void Endpoint::end_context(uint64_t number) {
  Lock lock(mutex_);
  for_each_message([&](const MessagePtr& message) {
    if (message->context == number && message->own_data == nullptr) withdraw(message, RD_CLOSED, -1);
  });
  Context& context = contexts_[number];
  context.ended = true;
  auto tags = std::move(context.tags);
  context.tags.clear();
  for (auto& [tag_number, tag] : tags) {
    for (const ArrivalPtr& arrival : tag.unexpected) {
      arrival->unexpected = false;
      arrival->target = nullptr;
      arrival->block = nullptr;
      if (arrival->complete()) give_credit(*arrival);
    }
  }
}

bool Endpoint::leave(const Deadline& deadline) {
  Lock lock(mutex_);
  leaving_ = true;
  for (Peer& peer : peers_) {
    if (peer.outgoing == nullptr) continue;
    peer.outgoing->says_goodbye = true;
    write(*peer.outgoing);
  }
  kick();
  auto all_left = [&] {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.outgoing == nullptr; });
  };
  while (!closed_ && !all_left()) {
    if (!progress(true)) {
      if (deadline.expired()) return false;
      lock.unlock();
      usleep(100);
      lock.lock();
    }
  }
  return true;
}

void Endpoint::close() {
  {
    Lock lock(mutex_);
    if (!closed_) for_each_message([&](const MessagePtr& message) { finish(message, RD_CLOSED, -1); });
    closed_ = true;
    contexts_.clear();
    for (Peer& peer : peers_) {
      remove_outgoing(peer);
      remove_incoming(peer);
      peer.flows.clear();
    }
    kick();
  }
  if (thread_.joinable()) thread_.join();
}

void Endpoint::get_current_message(uint64_t context, rd_current_call* current, int32_t* missing) {
  *current = {};
  *missing = -1;
  Lock lock(mutex_);
  MessagePtr oldest;
  for_each_message([&](const MessagePtr& message) {
    bool shown = message->context == context && !message->has_flag(RD_BACKGROUND) && message->own_data == nullptr;
    if (shown && (oldest == nullptr || message->result.start_ns < oldest->result.start_ns)) oldest = message;
  });
  if (oldest == nullptr) return;
  current->start_ns = oldest->result.start_ns;
  current->kind = oldest->kind;
  copy_description(current->description, oldest->description);
  *missing = oldest->peer;
}

// --- the thread ------------------------------------------------------------------------------------------------------

void Endpoint::ensure_thread() {
  if (thread_.joinable()) return;
  // The thread blocks all signals: they are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  try {
    thread_ = std::thread([this] { thread_loop(); });
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) throw CallError{RD_SYSTEM, -1, error};
  pthread_setname_np(thread_.native_handle(), "ronde-messages");
}

void Endpoint::thread_loop() {
  Lock lock(mutex_);
  for (uint32_t spins = 0; !closed_;) {
    bool moved = progress(true);
    int64_t next_deadline_ns = expire_deadlines();
    bool idle = false;
    if (moved) {
      spins = 0;
    } else if (num_spinning_ == 0) {
      idle = spins++ >= kThreadSpins && prepare_sleep();
    }
    if (!idle && num_spinning_ == 0) {
      lock.unlock();
      moved ? void(sched_yield()) : pause(policy_, spins);
      lock.lock();
      continue;
    }
    // While callers move the bytes, only their end matters, which needs no notice.
    thread_sleeps_ = true;
    lock.unlock();
    if (idle) {
      epoll_event event;
      int64_t limit_ms = std::min<int64_t>(next_deadline_ns / 1'000'000 + 1, kMaxThreadSleepMs);
      epoll_wait(epoll_.get(), &event, 1, int(limit_ms));
    } else {
      pollfd kicked{kick_.get(), POLLIN, 0};
      ::poll(&kicked, 1, kTickMs);
    }
    uint64_t kicks;
    (void)!::read(kick_.get(), &kicks, sizeof kicks);
    lock.lock();
    thread_sleeps_ = false;
    spins = 0;
    for (uint32_t peer : linked_) {
      if (peers_[peer].outgoing != nullptr) peers_[peer].outgoing->link.end_sleep();
      if (peers_[peer].incoming != nullptr) peers_[peer].incoming->link.end_sleep();
    }
  }
}

// Wakes the thread, if it sleeps.
void Endpoint::kick() {
  if (!thread_sleeps_) return;
  uint64_t one = 1;
  (void)!::write(kick_.get(), &one, sizeof one);
}

// Returns false when something can be done at once.
bool Endpoint::prepare_sleep() {
  bool idle = true;
  for (uint32_t peer : linked_) {
    Peer& other = peers_[peer];
    if (other.outgoing != nullptr) {
      OutgoingLink& outgoing = *other.outgoing;
      idle &= outgoing.link.prepare_sleep(outgoing.has_output());
      watch_output(outgoing.link, outgoing.has_output(), &outgoing.watched_for_output, uint64_t(peer) * 2 + 1);
    }
    if (other.incoming != nullptr) {
      IncomingLink& incoming = *other.incoming;
      idle &= incoming.link.prepare_sleep(incoming.has_output());
      watch_output(incoming.link, incoming.has_output(), &incoming.watched_for_output, uint64_t(peer) * 2);
    }
  }
  return idle;
}

// Asks the kernel to wake the thread when a socket has space for output.
void Endpoint::watch_output(MessageLink& link, bool wanted, bool* watched, uint64_t key) {
  if (link.is_shared_memory() || wanted == *watched) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (wanted ? uint32_t(EPOLLOUT) : 0);
  event.data.u64 = key;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.socket(), &event);
  *watched = wanted;
}

// Ends the submitted messages whose time is over. Returns the time until the next deadline.
int64_t Endpoint::expire_deadlines() {
  while (!deadlines_.empty()) {
    int64_t remaining_ns = deadlines_.begin()->first - now_ns();
    if (remaining_ns > 0) return remaining_ns;
    MessagePtr message = deadlines_.begin()->second;
    withdraw(message, RD_TIMEOUT, message->peer);
  }
  return INT64_MAX;
}

}  // namespace ronde
