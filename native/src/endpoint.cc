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

constexpr int64_t kHandlersNs = 50'000'000;  // how often a caller lets Python run its signal handlers
constexpr int64_t kLongSleepNs = 3600'000'000'000;
constexpr int kTickMs = 1;              // how often the thread looks whether callers still move the bytes
constexpr uint32_t kThreadSpins = 200;  // of a caller in the background, and of the thread if there are sockets
constexpr uint32_t kMemorySpins = 20;   // of the thread without sockets: a caller that waits has spun before
// A spinning caller asks the kernel once in so many spins: for bytes, when a link is a socket; or else for its end.
constexpr uint32_t kSocketInterval = 2;
constexpr uint32_t kWakeupInterval = 500;
constexpr int64_t kMaxThreadSleepMs = 3'600'000;

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

// Counts a caller, while this lives.
struct Counted {
  explicit Counted(std::atomic<uint32_t>& count) : count(count) { ++count; }
  ~Counted() { --count; }
  Counted(const Counted&) = delete;
  std::atomic<uint32_t>& count;
};

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
      has_header(params.header != nullptr),
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

// Copies the data of a message into the memory of its link, if that can be done, without the mutex.
void Endpoint::place(const MessagePtr& message) {
  if (!message->may_be_placed()) return;
  {
    Lock lock(mutex_);
    Peer& peer = peers_[uint32_t(message->peer)];
    if (closed_ || peer.lost || peer.outgoing == nullptr) return;
    message->placed = peer.outgoing->link.place(message->bytes);
  }
  if (message->placed != nullptr) std::memcpy(message->placed->data(), message->data, message->bytes);
}

void Endpoint::start(const MessagePtr& message) {
  int64_t now = now_ns();
  message->result.start_ns = message->result.ready_ns = now;
  expire_deadlines(now);  // while callers are busy, the thread does not come to it
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
                    message->signature, message->header.size(), message->bytes,   0};
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
        if (peers_[peer].declared) context.losses.push_back(peer);
    }
    if (!context.losses.empty()) {
      report_loss(context, message);
      return erase_if_empty(context, message->tag);
    }
  }
  int gone = message->peer;
  if (gone == RD_ANY_SOURCE && !message->has_flag(RD_REPORT_LOSSES)) gone = context.last_source;
  if (gone >= 0 && peers_[uint32_t(gone)].lost) {
    finish(message, RD_PEER_LOST, gone, peers_[uint32_t(gone)].error);
    return erase_if_empty(context, message->tag);
  }
  // Usually at the end. But a receive from any rank may come back to where it was, when its sender is lost.
  auto later = [](int64_t start_ns, const MessagePtr& other) { return start_ns < other->result.start_ns; };
  auto at = std::upper_bound(tag.receives.begin(), tag.receives.end(), message->result.start_ns, later);
  tag.receives.insert(at, message);
}

void Endpoint::report_loss(Context& context, const MessagePtr& receive) {
  uint32_t lost = context.losses.front();
  context.losses.pop_front();
  finish(receive, RD_PEER_LOST, int(lost), peers_[lost].error);
}

void Endpoint::finish(const MessagePtr& message, rd_status status, int member, int detail) {
  if (message->finished.load() != 0) return;
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
  if (message->kind == RD_RECEIVE) {
    withdraw_receive(message);
  } else if (withdraw_send(message) && status == RD_TIMEOUT) {
    detail = ENOBUFS;
  }
  finish(message, status, member, detail);
}

// A receive that ends early has taken nothing: a message that is arriving for it goes to the next receive that it fits.
void Endpoint::withdraw_receive(const MessagePtr& message) {
  Context& context = contexts_[message->context];
  Tag& tag = context.tags[message->tag];
  auto found = std::find(tag.receives.begin(), tag.receives.end(), message);
  if (found != tag.receives.end()) {
    tag.receives.erase(found);
    return erase_if_empty(context, message->tag);
  }
  erase_if_empty(context, message->tag);
  for (Peer& peer : peers_) {
    if (peer.incoming == nullptr || peer.incoming->arrival == nullptr) continue;
    ArrivalPtr arrival = peer.incoming->arrival;
    if (arrival->receive != message) continue;
    arrival->receive = nullptr;
    if (!begin_arrival(arrival)) {
      peer.incoming->arrival = nullptr;
      peer.incoming->end(ENOMEM);  // or the message would be lost without a word
    }
    return;
  }
}

// A send that has begun must be completed, or the next message would begin in the middle of it: what is left is copied.
// Returns whether it was waiting for its window.
bool Endpoint::withdraw_send(const MessagePtr& message) {
  Peer& peer = peers_[uint32_t(message->peer)];
  Flow& flow = peer.flows[message->context];
  auto start_next = [&] {
    if (!contexts_[message->context].ended) admit(uint32_t(message->peer), message->context);
  };
  auto waiting = std::find(flow.waiting.begin(), flow.waiting.end(), message);
  if (waiting != flow.waiting.end()) {
    flow.waiting.erase(waiting);
    start_next();  // it may be smaller
    return true;
  }
  if (peer.outgoing == nullptr) return false;
  OutgoingLink& outgoing = *peer.outgoing;
  auto queued = std::find(outgoing.queue.begin(), outgoing.queue.end(), message);
  if (queued == outgoing.queue.end()) return false;
  if (queued != outgoing.queue.begin() || outgoing.position == 0) {
    outgoing.queue.erase(queued);
    if (message->has_flag(RD_EXPECTED)) return false;
    flow.outstanding -= message->cost();
    start_next();
    return false;
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
  bool is_placed = message->placed != nullptr;
  MessageMemory copy(allocate_message_memory(is_placed ? 0 : message->bytes));
  if (copy == nullptr) {
    lose_peer_locked(uint32_t(message->peer), ENOMEM);
    return false;
  }
  uint64_t ahead = sizeof(Frame) + message->header.size();
  uint64_t sent = outgoing.position > ahead ? outgoing.position - ahead : 0;
  if (!is_placed && message->bytes > sent) std::memcpy(copy.get() + sent, message->data + sent, message->bytes - sent);
  params.data = copy.get();
  params.bytes = message->bytes;
  *queued = std::make_shared<Message>(params, num_ranks(), message->deadline);
  (*queued)->own_data = std::move(copy);
  (*queued)->placed = std::move(message->placed);
  return false;
}

// --- waiting ---------------------------------------------------------------------------------------------------------

void Endpoint::run(const MessagePtr& message) {
  place(message);
  Lock lock(mutex_);
  start(message);
  if (message->finished.load() != 0) return;
  try {
    if (!wait_for(message, message->deadline, true, lock)) withdraw(message, RD_TIMEOUT, message->peer);
  } catch (const CallError& error) {
    if (error.status == RD_FORKED) throw;  // nothing here is this process's
    withdraw(message, error.status, error.member, error.detail);
    // It may have ended meanwhile, by a signal handler that closed the endpoint; what the handler raised counts.
    message->result.status = error.status;
    message->result.detail = error.detail;
  }
}

void Endpoint::submit(const MessagePtr& message) {
  place(message);
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
  bool is_under_way = true;
  while (is_under_way && spin(message, deadline, lock)) {
    expire_deadlines(now_ns());
    if (run_handlers) run_handlers_unlocked(*message, lock);
    is_under_way = message->result.ready_ns != message->result.start_ns;  // or all bytes were those of other messages
  }
  if (message->finished.load() != 0) return true;
  if (deadline.expired()) return false;
  ensure_thread();
  Counted asleep(num_asleep_);
  kick();
  while (message->finished.load() == 0 && !deadline.expired()) {
    ++message->num_sleepers;
    lock.unlock();
    int64_t limit_ns = std::min<int64_t>(run_handlers ? kHandlersNs : kLongSleepNs, deadline.remaining_ns());
    bool woken = limit_ns <= 0 || futex_wait(&message->finished, 0, limit_ns);
    lock.lock();
    --message->num_sleepers;
    if (!woken && run_handlers) run_handlers_unlocked(*message, lock);
  }
  return message->finished.load() != 0;
}

// Moves bytes until the message has finished, the deadline has expired, or nothing has moved for a while. Returns true
// when bytes still move after kHandlersNs. While signal handlers run, the thread has to move the bytes: not in here.
bool Endpoint::spin(const MessagePtr& message, const Deadline& deadline, Lock& lock) {
  uint32_t max_spins = message->has_flag(RD_BACKGROUND) ? kThreadSpins : policy_.spins;
  Counted spinning(num_spinning_);
  ++num_waits_;
  int64_t limit_ns = 0;
  for (uint32_t spins = 0, rounds = 1; spins < max_spins && message->finished.load() == 0; ++rounds) {
    bool moved = progress(rounds % (num_sockets_ > 0 ? kSocketInterval : kWakeupInterval) == 0);
    if (message->finished.load() != 0) break;
    if (moved) {
      spins = 0;
      int64_t now = now_ns();
      if (now >= deadline.at_ns()) break;
      if (limit_ns == 0) limit_ns = now + kHandlersNs;
      if (now >= limit_ns) return true;
    }
    lock.unlock();
    pause(policy_, spins++);
    lock.lock();
  }
  return false;
}

// Lets Python run its signal handlers. One of them may close the endpoint, or fork: in the child the mutex may be held
// by a thread that does not exist there. Throws CallError when the wait must end; with RD_FORKED the mutex is not held.
void Endpoint::run_handlers_unlocked(const Message& message, Lock& lock) {
  lock.unlock();
  bool raised = run_signal_handlers();
  if (is_of_parent()) throw CallError{RD_FORKED};
  lock.lock();
  if (raised) throw CallError{RD_ABORTED, message.peer, EINTR};
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
  Context& context = contexts_[number];
  context.ended = true;
  for_each_message([&](const MessagePtr& message) {
    if (message->context == number && message->own_data == nullptr) withdraw(message, RD_CLOSED, -1);
  });
  auto tags = std::move(context.tags);
  context.tags.clear();
  for (auto& [tag_number, tag] : tags) {
    for (const ArrivalPtr& arrival : tag.unexpected) {
      arrival->unexpected = false;
      arrival->drop_data();
      if (arrival->complete()) give_credit(*arrival);
    }
  }
}

bool Endpoint::leave(const Deadline& deadline) {
  Lock lock(mutex_);
  leaving_ = true;
  while (!closed_) {
    bool all_left = true;
    for (Peer& peer : peers_) {
      if (peer.outgoing == nullptr) continue;
      all_left = false;
      if (peer.outgoing->says_goodbye || peer.has_waiting()) continue;
      peer.outgoing->says_goodbye = true;
      write(*peer.outgoing);
    }
    if (all_left) break;
    bool moved = progress(true);
    if (deadline.expired()) return false;
    lock.unlock();
    if (!moved) usleep(100);
    lock.lock();
  }
  return true;
}

void Endpoint::close() {
  {
    Lock lock(mutex_);
    closing_.store(true);
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

// While callers move the bytes themselves, the thread leaves the mutex to them: it would only make them wait.
bool Endpoint::callers_are_active(uint32_t* last_num_waits) const {
  uint32_t num_waits = num_waits_.load();
  bool was_active = num_waits != *last_num_waits;
  *last_num_waits = num_waits;
  return num_spinning_.load() > 0 || (was_active && num_asleep_.load() == 0);
}

void Endpoint::thread_loop() {
  Lock lock(mutex_);
  uint32_t spins = 0, last_num_waits = 0;
  while (!closed_) {
    if (callers_are_active(&last_num_waits)) {
      thread_sleeps_ = true;
      lock.unlock();
      do {
        pollfd kicked{kick_.get(), POLLIN, 0};
        ::poll(&kicked, 1, kTickMs);
        clear_kicks();
      } while (callers_are_active(&last_num_waits) && !closing_.load());
      lock.lock();
      thread_sleeps_ = false;
      spins = 0;
      continue;
    }
    bool has_sockets = num_sockets_ > 0;
    bool moved = progress(has_sockets || spins == 0);  // the kernel also has the bytes that have woken this side
    int64_t next_deadline_ns = expire_deadlines(now_ns());
    if (moved) spins = 0;
    if (moved || spins++ < (has_sockets ? kThreadSpins : kMemorySpins) || !prepare_sleep()) {
      lock.unlock();
      moved ? void(sched_yield()) : pause(policy_, spins);
      lock.lock();
      continue;
    }
    thread_sleeps_ = true;
    thread_polls_ = true;
    lock.unlock();
    epoll_event event;
    int64_t limit_ms = std::min<int64_t>(next_deadline_ns / 1'000'000 + 1, kMaxThreadSleepMs);
    epoll_wait(epoll_.get(), &event, 1, int(limit_ms));
    clear_kicks();
    lock.lock();
    thread_sleeps_ = thread_polls_ = false;
    spins = 0;
    for (uint32_t peer : linked_) {
      if (peers_[peer].outgoing != nullptr) peers_[peer].outgoing->link.end_sleep();
      if (peers_[peer].incoming != nullptr) peers_[peer].incoming->link.end_sleep();
    }
  }
}

void Endpoint::clear_kicks() {
  uint64_t kicks;
  (void)!::read(kick_.get(), &kicks, sizeof kicks);
}

// Wakes the thread, if it sleeps.
void Endpoint::kick() {
  if (!thread_sleeps_) return;
  uint64_t one = 1;
  (void)!::write(kick_.get(), &one, sizeof one);
}

// Wakes the thread when it would sleep on although there is something to do: a caller has left something on a link, of
// which only this process knows, or has taken the byte that was to wake the thread. The kernel wakes a sleeper for a
// byte, but lets it sleep on if the byte is gone; and no rank sends a second one to a side that it has woken.
void Endpoint::hand_over() {
  if (!thread_polls_) return;
  thread_polls_ = false;  // once is enough
  kick();
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
int64_t Endpoint::expire_deadlines(int64_t now) {
  while (!deadlines_.empty()) {
    int64_t remaining_ns = deadlines_.begin()->first - now;
    if (remaining_ns > 0) return remaining_ns;
    MessagePtr message = deadlines_.begin()->second;
    withdraw(message, RD_TIMEOUT, message->peer);
  }
  return INT64_MAX;
}

}  // namespace ronde
