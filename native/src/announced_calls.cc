#include "announced_calls.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "base/channel_thread.h"
#include "base/futex.h"
#include "base/python_signals.h"

namespace ronde {

namespace {

constexpr int64_t kMaxSleepNs = 50'000'000;  // after this, an abort or a signal that raced with the sleep is seen
constexpr int64_t kMaxIdleNs = 3'600'000'000'000;
// How much of the time that a call may take a thread must have left to execute it.
constexpr double kMinTimeLeft = 0.9;

// Whether calls may be fused into one: the same kind of reduction, on other memory.
bool can_fuse(const Call& a, const Call& b) {
  const ReduceParams &p = a.reduce_params, &q = b.reduce_params;
  return a.kind == RD_ALLREDUCE && b.kind == RD_ALLREDUCE && p.op != RD_ADASUM && p.dtype == q.dtype && p.op == q.op &&
         p.prescale == q.prescale && p.postscale == q.postscale && a.algorithm == b.algorithm;
}

// One call for the spans of all. Its signature depends on all of theirs, in this order.
std::shared_ptr<Call> fuse(const std::vector<std::shared_ptr<Call>>& batch, const Topology& topology) {
  const Call& first = *batch[0];
  std::vector<rd_span> spans;
  uint64_t signature = 0;
  for (const auto& call : batch) {
    spans.insert(spans.end(), call->spans.begin(), call->spans.end());
    signature = (signature ^ call->signature) * 0x9E3779B97F4A7C15;
  }
  std::string description = first.description + " and " + std::to_string(batch.size() - 1) + " more";
  rd_call params{};
  params.kind = first.kind;
  params.dtype = first.reduce_params.dtype;
  params.op = first.reduce_params.op;
  params.algorithm = first.algorithm;
  params.peer = first.peer;
  params.prescale = first.reduce_params.prescale;
  params.postscale = first.reduce_params.postscale;
  params.signature = signature;
  params.description = description.c_str();
  params.spans = spans.data();
  params.num_spans = spans.size();
  return std::make_shared<Call>(params, topology, first.deadline);
}

}  // namespace

AnnouncedCalls::AnnouncedCalls(const Topology& topology, SharedSegment* segment, AbortSignal* abort_signal,
                               std::function<void(Call&)> run_call)
    : topology_(topology),
      segment_(segment),
      abort_signal_(abort_signal),
      run_call_(std::move(run_call)),
      log_(segment->ready_log(topology)),
      spin_policy_(spin_policy(topology.num_local(), topology.num_cores)) {}

// --- announcing
// --------------------------------------------------------------------------------------------------------

AgreedCall::AgreedCall(const std::string& name, const Call& call)
    : name_(name),
      description_(call.description),
      counts_(call.counts),
      splits_(call.splits),
      num_spans_(call.spans.size()),
      count_(call.spans.count()) {
  params_.kind = call.kind;
  params_.dtype = call.reduce_params.dtype;
  params_.op = call.reduce_params.op;
  params_.algorithm = call.algorithm;
  params_.flags = call.pre_agreed ? RD_PRE_AGREED : 0;
  params_.peer = call.peer;
  params_.prescale = call.reduce_params.prescale;
  params_.postscale = call.reduce_params.postscale;
  params_.signature = call.signature;
  params_.description = description_.c_str();
  params_.counts = counts_.empty() ? nullptr : counts_.data();
  params_.splits = splits_.empty() ? nullptr : splits_.data();
}

std::shared_ptr<Call> AgreedCall::make_call(const rd_span* spans, uint64_t num_spans, const Topology& topology,
                                            double timeout_s) const {
  rd_call params = params_;
  params.spans = spans;
  params.num_spans = num_spans;
  auto call = std::make_shared<Call>(params, topology, Deadline(timeout_s));
  if (num_spans != num_spans_ || call->spans.count() != count_) throw CallError{RD_BAD_CALL};
  call->timeout_s = timeout_s;
  return call;
}

bool AgreedCall::is_asked_for(const rd_call& params) const {
  constexpr int kKinds[] = {RD_BARRIER, RD_ALLREDUCE, RD_BROADCAST, RD_REDUCE_SCATTER};
  uint64_t asked_count = 0;
  for (uint64_t i = 0; i < params.num_spans; ++i) asked_count += params.spans[i].count;
  return std::find(std::begin(kKinds), std::end(kKinds), params_.kind) != std::end(kKinds) &&
         params.kind == params_.kind && params.dtype == params_.dtype && params.op == params_.op &&
         params.peer == params_.peer && params.prescale == params_.prescale && params.postscale == params_.postscale &&
         params.num_spans == num_spans_ && asked_count == count_;
}

void AnnouncedCalls::agree(uint32_t id, const std::string& name, const Call& call) {
  Lock lock(mutex_);
  if (id >= log_.num_ids()) throw CallError{RD_BAD_CALL};
  if (id >= calls_.size()) {
    size_t size = std::min<size_t>(log_.num_ids(), 2 * size_t(id) + 64);
    agreed_.resize(size);
    calls_.resize(size);
  }
  forget(id);
  agreed_[id] = std::make_shared<AgreedCall>(name, call);
  ids_[name] = id;
}

// The id stands for nothing any more, nor does its name stand for the id.
void AnnouncedCalls::forget(uint32_t id) {
  if (agreed_[id] == nullptr) return;
  auto found = ids_.find(agreed_[id]->name());
  if (found != ids_.end() && found->second == id) ids_.erase(found);
  agreed_[id].reset();
}

uint32_t AnnouncedCalls::find_id(const std::string& name, const rd_call& params,
                                 std::shared_ptr<const AgreedCall>* agreed) {
  Lock lock(mutex_);
  auto found = ids_.find(name);
  if (found == ids_.end()) throw CallError{RD_NOT_AGREED};
  *agreed = agreed_[found->second];
  if (*agreed == nullptr || !(*agreed)->is_asked_for(params)) throw CallError{RD_NOT_AGREED};
  return found->second;
}

std::vector<rd_announced> AnnouncedCalls::announced_until(int64_t until_ns, size_t max_calls) {
  Lock lock(mutex_);
  std::vector<rd_announced> found;
  for (uint32_t id = 0; id < calls_.size() && found.size() < max_calls; ++id)
    if (calls_[id] != nullptr && calls_[id]->announced_ns <= until_ns) found.push_back({id, calls_[id]->announced_ns});
  return found;
}

bool AnnouncedCalls::revoke(uint32_t id) {
  Lock lock(mutex_);
  if (id >= calls_.size()) return false;
  forget(id);
  Calls ended;
  bool withdrawn = withdraw(id, CallError{RD_WITHDRAWN}, &ended);
  run_callbacks(lock, ended);
  return withdrawn;
}

void AnnouncedCalls::announce(uint32_t id, const std::shared_ptr<Call>& call, bool will_wait) {
  Lock lock(mutex_);
  if (closing_) throw CallError{RD_CLOSED};
  if (id >= calls_.size() || agreed_[id] == nullptr || agreed_[id]->signature() != call->signature)
    throw CallError{RD_NOT_AGREED};
  if (calls_[id] != nullptr) throw CallError{RD_BAD_CALL};
  if (!will_wait && num_waiting_ == 0) want_thread();  // before the arrival: who publishes it sees this
  if (add(id, call)) log_.publish(&id, 1);
}

AnnouncedCalls::Calls AnnouncedCalls::announce_many(const rd_announcement* announcements, uint32_t num_announcements,
                                                    const rd_span* spans, double timeout_s, bool will_wait) {
  Calls calls(num_announcements);
  std::vector<uint32_t> ready;
  ready.reserve(num_announcements);
  Lock lock(mutex_);
  if (closing_) throw CallError{RD_CLOSED};
  for (uint32_t i = 0; i < num_announcements; ++i) {
    const rd_announcement& each = announcements[i];
    const AgreedCall* agreed = each.id < agreed_.size() ? agreed_[each.id].get() : nullptr;
    if (agreed != nullptr && agreed->signature() == each.signature && calls_[each.id] == nullptr)
      calls[i] = agreed->make_call(spans, each.num_spans, topology_, timeout_s);
    spans += each.num_spans;
  }
  if (!will_wait && num_waiting_ == 0 && (num_announced_ > 0 || num_announcements > 0)) want_thread();
  for (uint32_t i = 0; i < num_announcements; ++i) {  // nothing fails from here on
    if (calls[i] == nullptr || calls_[announcements[i].id] != nullptr) {
      calls[i] = nullptr;  // not agreed on, or here twice
    } else if (add(announcements[i].id, calls[i])) {
      ready.push_back(announcements[i].id);
    }
  }
  if (!ready.empty()) log_.publish(ready.data(), uint32_t(ready.size()));
  return calls;
}

// Returns true if all members have announced it now: then the caller publishes it.
bool AnnouncedCalls::add(uint32_t id, const std::shared_ptr<Call>& call) {
  call->announced_id = int(id);
  call->announced_ns = now_ns();
  calls_[id] = call;  // before the arrival: another member may publish it at once
  ++num_announced_;
  return log_.arrive(id);
}

bool AnnouncedCalls::cancel(const std::shared_ptr<Call>& call) {
  Lock lock(mutex_);
  if (calls_[size_t(call->announced_id)] != call) return false;
  Calls ended;
  bool withdrawn = withdraw(uint32_t(call->announced_id), CallError{RD_CANCELLED}, &ended);
  run_callbacks(lock, ended);
  return withdrawn;
}

std::shared_ptr<Call> AnnouncedCalls::current() {
  Lock lock(mutex_);
  return current_;
}

// --- waiting
// -----------------------------------------------------------------------------------------------------------

bool AnnouncedCalls::wait(const std::shared_ptr<Call>& call, const Deadline& deadline) {
  if (call->finished()) return true;
  Lock lock(mutex_);
  if (num_waiting_++ == 0) log_.want_executor(false);
  CallError raised{RD_OK};
  try {
    wait_and_execute(lock, *call, deadline);
  } catch (const CallError& error) {
    raised = error;
  }
  if (raised.status == RD_FORKED) throw raised;  // without the mutex: who held it may not be in this process
  if (!lock.owns_lock()) lock.lock();
  if (--num_waiting_ == 0 && num_announced_ > 0 && !closing_) want_thread_or_fail(lock);
  lock.unlock();
  if (raised.status != RD_OK) throw raised;  // also if the call has ended meanwhile: the next wait returns its result
  return call->wait(deadline);               // until others have executed it
}

// Returns when the call has finished, the deadline has expired, or this thread has not enough time to execute the next
// batch.
void AnnouncedCalls::wait_and_execute(Lock& lock, const Call& call, const Deadline& deadline) {
  while (!call.finished()) {
    int64_t remaining_ns = deadline.remaining_ns();
    if (remaining_ns <= 0) return;
    if (current_ != nullptr) {
      wait_for_end_of_batch(lock, deadline);
    } else if (log_.is_published(position_)) {
      if (!has_time_for_next(remaining_ns)) return;
      execute_next(lock);
    } else if (!wait_for_entry(lock, deadline)) {
      end_impossible(lock);
    }
  }
}

// The end of a wait must not end what other members take part in. So whoever executes may be held up until the deadline
// of what it executes, which counts from the start, and a thread with less time lets others do it.
bool AnnouncedCalls::has_time_for_next(int64_t remaining_ns) const {
  uint32_t id = log_.id_at(position_);
  const Call* next = id < calls_.size() ? calls_[id].get() : nullptr;
  if (next == nullptr || remaining_ns == INT64_MAX) return true;
  return double(remaining_ns) >= kMinTimeLeft * 1e9 * next->timeout_s;
}

// Not called any more when closing_ is set, from when on close() uses thread_ without the mutex. Throws
// CallError{RD_SYSTEM}.
void AnnouncedCalls::start_thread() {
  if (thread_.joinable()) return;
  thread_ = start_channel_thread([self = shared_from_this()] { self->thread_loop(); });
}

// From now on the thread executes what becomes ready, and what is, and ends what can never become ready. Throws
// CallError{RD_SYSTEM}.
void AnnouncedCalls::want_thread() {
  start_thread();
  log_.want_executor(true);
  if (!thread_is_idle_ && !log_.is_published(position_)) return;
  thread_is_idle_ = false;
  log_.wake_executor();
}

// The other members would wait for what nobody executes here.
void AnnouncedCalls::want_thread_or_fail(Lock& lock) {
  try {
    want_thread();
  } catch (const CallError& error) {
    abort_for_others();
    end_all(lock, error);
  }
}

void AnnouncedCalls::thread_loop() {
  Lock lock(mutex_);
  bool woken = true;  // from its last sleep
  while (!closing_) {
    uint32_t seen = log_.executor_word()->load();
    bool wanted = num_announced_ > 0 && num_waiting_ == 0 && current_ == nullptr;
    log_.want_executor(wanted);
    if (wanted && log_.is_published(position_)) {
      log_.want_executor(false);
      execute_next(lock);
      woken = true;
      continue;
    }
    // It becomes idle only after a sleep that nobody has ended: to wake it for each of many calls would cost more.
    thread_is_idle_ = !wanted && !woken;
    int64_t limit_ns = thread_is_idle_ ? kMaxIdleNs : kMaxSleepNs;
    lock.unlock();
    woken = futex_wait(log_.executor_word(), seen, limit_ns);
    lock.lock();
    thread_is_idle_ = false;
    if (num_announced_ > 0 && num_waiting_ == 0 && !log_.is_published(position_)) end_impossible(lock);
  }
}

// Waits until there is an entry to execute or calls have ended, or for a moment; returns false if neither has happened.
bool AnnouncedCalls::wait_for_entry(Lock& lock, const Deadline& deadline) {
  uint32_t position = position_, changes = num_changes_.load();
  auto is_over = [&] { return log_.is_published(position) || num_changes_.load() != changes; };
  lock.unlock();
  bool over = is_over();
  for (uint32_t i = 1; !over && i < spin_policy_.spins; ++i) {
    i % spin_policy_.yield_every == 0 ? void(sched_yield()) : cpu_pause();
    over = is_over();
  }
  if (!over && !find_abort()) {
    uint32_t seen = log_.word()->load();
    log_.waiters()->fetch_add(1);  // before the last test: whoever publishes reads this afterwards
    int64_t limit_ns = std::min(kMaxSleepNs, deadline.remaining_ns());
    bool woken = is_over() || limit_ns <= 0 || futex_wait(log_.word(), seen, limit_ns);
    log_.waiters()->fetch_sub(1);
    if (!woken) check_signals();
    over = is_over();
  }
  lock.lock();
  return over;
}

// Waits until another thread has executed its batch, or for a moment.
void AnnouncedCalls::wait_for_end_of_batch(Lock& lock, const Deadline& deadline) {
  if (!sleep_until_change(lock, deadline)) check_signals();
  lock.lock();
}

// Unlocks, and sleeps until calls have ended or for a moment. Returns false when a signal or the limit ended the sleep.
bool AnnouncedCalls::sleep_until_change(Lock& lock, const Deadline& deadline) {
  uint32_t seen = num_changes_.load();
  waiters_.fetch_add(1);
  lock.unlock();
  int64_t limit_ns = std::min(kMaxSleepNs, deadline.remaining_ns());
  bool woken = limit_ns <= 0 || futex_wait(&num_changes_, seen, limit_ns);
  waiters_.fetch_sub(1);
  return woken;
}

// Another thread may have got a signal that is for the main one, so this is called after every sleep.
void AnnouncedCalls::check_signals() const {
  bool raised = run_signal_handlers();
  if (made_by_parent(generation_)) throw CallError{RD_FORKED};  // a handler has forked, and this is the child
  if (raised) throw CallError{RD_ABORTED, -1, EINTR};
}

void AnnouncedCalls::notify() {
  num_changes_.fetch_add(1);
  if (waiters_.load() > 0) futex_wake_all(&num_changes_);
}

// --- executing
// ---------------------------------------------------------------------------------------------------------

// Executes the next batch of the log. Nobody else executes.
void AnnouncedCalls::execute_next(Lock& lock) {
  Calls batch;
  try {
    if (auto aborted = find_abort()) return end_all(lock, *aborted);
    batch = next_batch();
    current_ = batch.size() == 1 ? batch[0] : fuse(batch, topology_);
  } catch (const std::exception&) {  // no memory; or somebody has written to ours
    abort_for_others();
    return end_all(lock, CallError{RD_SYSTEM, -1, ENOMEM});
  }
  executor_ = std::this_thread::get_id();
  int64_t arrived_ns = last_end_ns_;
  for (const auto& call : batch) {
    call->start();
    remove(*call);
    log_.mark_executed(uint32_t(call->announced_id));
    arrived_ns = std::max(arrived_ns, call->announced_ns);
  }
  position_ += uint32_t(batch.size());
  lock.unlock();
  run_call_(*current_);
  if (made_by_parent(generation_)) throw CallError{RD_FORKED};  // a handler has forked, and this is the child
  lock.lock();
  current_->result.arrived_ns = arrived_ns;
  last_end_ns_ = current_->result.end_ns;
  for (const auto& call : batch) {
    if (call != current_) {
      call->result = current_->result;
      call->member_calls = current_->member_calls;
      if (call != batch.back()) call->result.sequence = RD_NO_SEQUENCE;
    }
    call->finish();
  }
  current_ = nullptr;
  notify();
  run_callbacks(lock, batch);
}

// Takes nothing yet, so that an exception leaves all as it is.
AnnouncedCalls::Calls AnnouncedCalls::next_batch() {
  uint32_t size = log_.batch_size(position_);
  if (size == 0) size = log_.seal_batch(position_, propose_batch_size());
  Calls batch(size);
  for (uint32_t i = 0; i < size; ++i) {
    batch[i] = calls_.at(log_.id_at(position_ + i));
    if (batch[i] == nullptr) throw std::out_of_range("not announced");
    batch[i]->deadline = Deadline(batch[i]->timeout_s);
  }
  return batch;
}

// As many published entries as can be fused into one call.
uint32_t AnnouncedCalls::propose_batch_size() const {
  auto call_at = [&](uint32_t position) { return calls_.at(log_.id_at(position)).get(); };
  const Call* first = call_at(position_);
  uint64_t bytes = first == nullptr ? 0 : first->spans.bytes();
  uint32_t size = 1;
  for (; first != nullptr && size < log_.num_ids() && log_.is_published(position_ + size); ++size) {
    const Call* next = call_at(position_ + size);
    if (next == nullptr || !can_fuse(*first, *next)) break;
    bytes += next->spans.bytes();
    if (bytes > topology_.fusion_bytes) break;
  }
  return size;
}

void AnnouncedCalls::run_callbacks(Lock& lock, const Calls& ended) {
  if (std::none_of(ended.begin(), ended.end(), [](const auto& call) { return call->has_callbacks(); })) return;
  lock.unlock();
  for (const auto& call : ended) call->run_callbacks();
  lock.lock();
}

// --- ending without executing
// ------------------------------------------------------------------------------------------

// Nothing can be executed here any more: the other members lose this one.
void AnnouncedCalls::abort_for_others() {
  segment_->abort(CallError{RD_PEER_LOST, int(topology_.member_index)});
  log_.wake();
}

// Ends calls that can never become ready: the channel was aborted, or a member has left that had not announced them.
void AnnouncedCalls::end_impossible(Lock& lock) {
  if (auto aborted = find_abort()) return end_all(lock, *aborted);
  Calls ended;
  for (uint32_t local = 0; local < topology_.num_local(); ++local) {
    if (segment_->member_state(local).left.load() == 0) continue;
    uint32_t member = topology_.local_members()[local];
    for (uint32_t id = 0; id < calls_.size(); ++id) {
      if (calls_[id] == nullptr) continue;
      auto not_arrived = log_.missing(id);
      if (std::count(not_arrived.begin(), not_arrived.end(), member) > 0)
        withdraw(id, CallError{RD_PEER_LOST, int(member)}, &ended);
    }
  }
  run_callbacks(lock, ended);
}

void AnnouncedCalls::end_all(Lock& lock, CallError error) {
  if (closing_) error = CallError{RD_CLOSED};
  Calls ended;
  for (size_t id = 0; id < calls_.size(); ++id) {
    if (calls_[id] == nullptr) continue;
    ended.push_back(calls_[id]);
    remove(*ended.back());
    ended.back()->end_before_start(error);
  }
  notify();
  run_callbacks(lock, ended);
}

// Takes back an announced call, if there is one and not all members have announced it.
bool AnnouncedCalls::withdraw(uint32_t id, const CallError& error, Calls* ended) {
  std::shared_ptr<Call> call = calls_[id];
  if (call == nullptr || !log_.withdraw(id)) return false;
  remove(*call);
  call->end_before_start(error);
  ended->push_back(call);
  notify();
  log_.wake();  // the thread that waits for it
  return true;
}

void AnnouncedCalls::remove(const Call& call) {
  calls_[size_t(call.announced_id)] = nullptr;
  --num_announced_;
}

std::optional<CallError> AnnouncedCalls::find_abort() const {
  try {
    abort_signal_->check();
    segment_->check();
  } catch (const CallError& error) {
    return error;
  }
  return std::nullopt;
}

bool AnnouncedCalls::leave() {
  Lock lock(mutex_);
  closing_ = true;
  Calls ended;
  for (uint32_t id = 0; id < calls_.size(); ++id) withdraw(id, CallError{RD_CLOSED}, &ended);
  bool is_idle = num_announced_ == 0 && current_ == nullptr;
  run_callbacks(lock, ended);
  return is_idle;
}

void AnnouncedCalls::close() {
  {
    Lock lock(mutex_);
    closing_ = true;
  }
  log_.wake();
  if (thread_.joinable()) thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
  Lock lock(mutex_);
  Deadline deadline(kMaxCloseS);
  while (current_ != nullptr && executor_ != std::this_thread::get_id() && !deadline.expired()) {
    sleep_until_change(lock, deadline);
    lock.lock();
  }
  end_all(lock, CallError{RD_CLOSED});
}

}  // namespace ronde
