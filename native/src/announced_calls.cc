#include "announced_calls.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "base/futex.h"

namespace ronde {

namespace {

constexpr int64_t kMaxSleepNs = 50'000'000;  // after this, an abort that raced with the sleep is seen
constexpr int64_t kMaxIdleNs = 3'600'000'000'000;

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

void AnnouncedCalls::agree(uint32_t id, uint64_t signature) {
  Lock lock(mutex_);
  if (id >= log_.num_ids()) throw CallError{RD_BAD_CALL};
  if (id >= calls_.size()) {
    size_t size = std::min<size_t>(log_.num_ids(), 2 * size_t(id) + 64);
    agreed_.resize(size);
    calls_.resize(size);
  }
  agreed_[id] = signature;
}

bool AnnouncedCalls::revoke(uint32_t id) {
  Lock lock(mutex_);
  if (id >= calls_.size()) return false;
  agreed_[id].reset();
  std::shared_ptr<Call> call = calls_[id];
  if (call == nullptr || !log_.withdraw(id)) return false;
  remove(*call);
  end(*call, CallError{RD_WITHDRAWN});
  notify();
  log_.wake();  // the thread that waits for it
  return true;
}

void AnnouncedCalls::announce(uint32_t id, const std::shared_ptr<Call>& call, bool will_wait) {
  Lock lock(mutex_);
  if (closing_) throw CallError{RD_CLOSED};
  if (id >= calls_.size() || agreed_[id] != call->signature) throw CallError{RD_NOT_AGREED};
  if (calls_[id] != nullptr) throw CallError{RD_BAD_CALL};
  if (!will_wait && num_waiting_ == 0) wake_thread();
  call->announced_id = int(id);
  call->announced_ns = now_ns();
  calls_[id] = call;
  ++num_announced_;
  log_.arrive(id);  // when the call is in its place: another member may find it ready at once
}

bool AnnouncedCalls::wait(const std::shared_ptr<Call>& call, const Deadline& deadline) {
  Lock lock(mutex_);
  // Whoever executes may be held up until the deadline of what it executes. A thread with less time lets others do it.
  bool executes = deadline.remaining_ns() >= int64_t(call->timeout_s * 0.5e9);
  if (executes) ++num_waiting_;
  try {
    if (!executes && !call->finished && num_waiting_ == 0) wake_thread();
    while (!call->finished && !deadline.expired()) {
      Woken woken = Woken::kByChange;
      if (!executes || current_ != nullptr) {
        woken = wait_for_change(lock, deadline);
      } else if (log_.is_published(position_)) {
        execute_next(lock, &deadline);
      } else {
        woken = wait_for_entry(lock, deadline, true);
      }
      if (woken == Woken::kBySignal) break;
      if (woken == Woken::kByClock) end_if_impossible(call);
    }
    if (executes && num_waiting_ == 1 && num_announced_ > 0 && !closing_) wake_thread();
  } catch (const CallError& error) {
    fail(error);
  }
  if (executes) --num_waiting_;
  return call->finished;
}

bool AnnouncedCalls::done(const std::shared_ptr<Call>& call) {
  Lock lock(mutex_);
  return call->finished && call->result.status != RD_WITHDRAWN;  // that one will run as another call
}

std::shared_ptr<Call> AnnouncedCalls::current() {
  Lock lock(mutex_);
  return current_;
}

bool AnnouncedCalls::leave() {
  Lock lock(mutex_);
  closing_ = true;
  for (uint32_t id = 0; id < calls_.size(); ++id) {
    std::shared_ptr<Call> call = calls_[id];
    if (call == nullptr || !log_.withdraw(id)) continue;
    remove(*call);
    end(*call, CallError{RD_CLOSED, int(topology_.member_index)});
  }
  notify();
  return num_announced_ == 0 && current_ == nullptr;
}

void AnnouncedCalls::close() {
  {
    Lock lock(mutex_);
    closing_ = true;
    if (thread_.joinable()) wake_thread();
  }
  log_.wake();
  if (thread_.joinable()) thread_.join();
  Lock lock(mutex_);
  end_all(CallError{RD_CLOSED, int(topology_.member_index)});
}

// Lets the thread look for what it has to do; starts it the first time. Throws CallError{RD_SYSTEM}.
void AnnouncedCalls::wake_thread() {
  if (thread_.joinable()) {
    num_wakeups_.fetch_add(1);
    if (thread_sleeps_) futex_wake_all(&num_wakeups_);
    thread_sleeps_ = false;
    return;
  }
  // The thread blocks all signals: they are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = 0;
  try {
    thread_ = std::thread([this] { thread_loop(); });
    pthread_setname_np(thread_.native_handle(), "ronde-channel");
  } catch (const std::system_error& error) {
    failure = error.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0) throw CallError{RD_SYSTEM, -1, failure};
}

void AnnouncedCalls::thread_loop() {
  const Deadline never(1e9);
  Lock lock(mutex_);
  while (!closing_) {
    try {
      if (num_announced_ == 0 || num_waiting_ > 0 || current_ != nullptr) {
        uint32_t seen = num_wakeups_.load();
        thread_sleeps_ = true;
        lock.unlock();
        futex_wait(&num_wakeups_, seen, kMaxIdleNs);
        lock.lock();
        thread_sleeps_ = false;
      } else if (log_.is_published(position_)) {
        execute_next(lock, nullptr);
      } else if (wait_for_entry(lock, never, false) == Woken::kByClock) {
        for (size_t id = 0; id < calls_.size(); ++id)
          if (calls_[id] != nullptr) end_if_impossible(calls_[id]);
      }
    } catch (const CallError& error) {
      fail(error);
    }
  }
}

// Takes the next batch of the log and executes it. Nobody else executes.
void AnnouncedCalls::execute_next(Lock& lock, const Deadline* limit) {
  check_abort();
  uint32_t size = log_.batch_size(position_);
  if (size == 0) size = log_.seal_batch(position_, propose_batch());
  std::vector<std::shared_ptr<Call>> batch;
  int64_t arrived_ns = last_end_ns_;
  try {
    batch.reserve(size);
    for (; batch.size() < size; ++position_) {
      std::shared_ptr<Call> call = calls_.at(log_.id_at(position_));
      if (call == nullptr) throw std::out_of_range("no such call");
      batch.push_back(call);
      remove(*call);
      log_.mark_executed(uint32_t(call->announced_id));
      call->deadline = Deadline(call->timeout_s);
      if (limit != nullptr) call->deadline = std::min(call->deadline, *limit);
      arrived_ns = std::max(arrived_ns, call->announced_ns);
    }
    current_ = size == 1 ? batch[0] : fuse(batch, topology_);
  } catch (const std::exception&) {  // no memory; or somebody has written to ours
    for (const auto& call : batch) end(*call, CallError{RD_SYSTEM, -1, ENOMEM});
    throw CallError{RD_SYSTEM, -1, ENOMEM};
  }
  lock.unlock();
  run_call_(*current_);
  lock.lock();
  current_->result.arrived_ns = arrived_ns;
  last_end_ns_ = current_->result.end_ns;
  for (const auto& call : batch) {
    if (call != current_) {
      call->result = current_->result;
      call->member_calls = current_->member_calls;
      if (call != batch.back()) call->result.sequence = RD_NO_SEQUENCE;
    }
    call->finished = true;
  }
  current_ = nullptr;
  notify();
}

// As many published entries as can be fused into one call.
uint32_t AnnouncedCalls::propose_batch() const {
  auto call_at = [&](uint32_t position) -> const Call* {
    uint32_t id = log_.id_at(position);
    return id < calls_.size() ? calls_[id].get() : nullptr;
  };
  const Call* first = call_at(position_);
  if (first == nullptr) return 1;
  uint64_t bytes = first->spans.bytes();
  uint32_t size = 1;
  for (; size < log_.num_ids() && log_.is_published(position_ + size); ++size) {
    const Call* next = call_at(position_ + size);
    if (next == nullptr || !can_fuse(*first, *next)) break;
    bytes += next->spans.bytes();
    if (bytes > topology_.fusion_bytes) break;
  }
  return size;
}

// Waits until there is an entry to execute, or calls have ended. Throws CallError when the channel was aborted.
AnnouncedCalls::Woken AnnouncedCalls::wait_for_entry(Lock& lock, const Deadline& deadline, bool spin) {
  check_abort();
  uint32_t position = position_, changes = num_changes_.load();
  auto is_over = [&] { return log_.is_published(position) || num_changes_.load() != changes; };
  lock.unlock();
  bool over = is_over(), interrupted = false;
  for (uint32_t i = 1; spin && !over && i < spin_policy_.spins; ++i) {
    i % spin_policy_.yield_every == 0 ? void(sched_yield()) : cpu_pause();
    over = is_over();
  }
  if (!over) {
    uint32_t seen = log_.word()->load();
    log_.waiters()->fetch_add(1);  // before the last test: whoever publishes reads this afterwards
    int64_t limit_ns = std::min(kMaxSleepNs, deadline.remaining_ns());
    if (!is_over() && limit_ns > 0) interrupted = !futex_wait(log_.word(), seen, limit_ns) && errno == EINTR;
    log_.waiters()->fetch_sub(1);
    over = is_over();
  }
  lock.lock();
  check_abort();
  if (over) return Woken::kByChange;
  return interrupted ? Woken::kBySignal : Woken::kByClock;
}

// Waits until calls have ended.
AnnouncedCalls::Woken AnnouncedCalls::wait_for_change(Lock& lock, const Deadline& deadline) {
  uint32_t seen = num_changes_.load();
  waiters_.fetch_add(1);
  lock.unlock();
  int64_t limit_ns = std::min(kMaxIdleNs, deadline.remaining_ns());
  bool interrupted = limit_ns > 0 && !futex_wait(&num_changes_, seen, limit_ns) && errno == EINTR;
  waiters_.fetch_sub(1);
  lock.lock();
  return interrupted && num_changes_.load() == seen ? Woken::kBySignal : Woken::kByChange;
}

void AnnouncedCalls::check_abort() const {
  abort_signal_->check();
  segment_->check();
}

// Ends a call that can never become ready, because a member has left that had not announced it.
void AnnouncedCalls::end_if_impossible(std::shared_ptr<Call> call) {
  uint32_t id = uint32_t(call->announced_id);
  if (calls_[id] != call) return;
  for (uint32_t local = 0; local < topology_.num_local(); ++local) {
    if (segment_->member_state(local).left.load() == 0) continue;
    int member = int(topology_.local_members()[local]);
    auto not_arrived = log_.missing(id);
    if (std::find(not_arrived.begin(), not_arrived.end(), uint32_t(member)) == not_arrived.end()) continue;
    if (!log_.withdraw(id)) return;
    remove(*call);
    end(*call, CallError{RD_PEER_LOST, member});
    return notify();
  }
}

// Nothing can run here any more: the channel was aborted, or this member cannot go on and aborts it.
void AnnouncedCalls::fail(const CallError& error) {
  if (error.status == RD_SYSTEM) segment_->abort(CallError{RD_PEER_LOST, int(topology_.member_index)});
  end_all(error);
}

void AnnouncedCalls::end_all(const CallError& error) {
  for (auto& announced : calls_) {
    if (announced == nullptr) continue;
    std::shared_ptr<Call> call = announced;
    remove(*call);
    end(*call, error);
  }
  notify();
}

void AnnouncedCalls::end(Call& call, const CallError& error) {
  call.result.status = error.status;
  call.result.member = error.member;
  call.result.detail = error.detail;
  call.result.sequence = RD_NO_SEQUENCE;
  call.result.arrived_ns = call.announced_ns;
  call.result.start_ns = call.result.ready_ns = call.result.end_ns = now_ns();
  call.finished = true;
}

void AnnouncedCalls::remove(Call& call) {
  calls_[uint32_t(call.announced_id)] = nullptr;
  --num_announced_;
}

void AnnouncedCalls::notify() {
  num_changes_.fetch_add(1);
  if (waiters_.load() > 0) futex_wake_all(&num_changes_);
}

}  // namespace ronde
