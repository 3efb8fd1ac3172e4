// Calls that come in any order on any member of one host, each announced under an id on whose meaning all members have
// agreed before. They run in the order of the shared ReadyLog.
//
// A thread that waits for its call executes what is ready meanwhile, its own call included, so a lone call never
// changes threads. The object's own thread executes only when calls are announced and nobody waits for one, or whoever
// does has too little time: the end of a wait must not end what other members take part in. One thread of the process
// executes at a time.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/fork.h"
#include "call.h"
#include "link/abort.h"
#include "link/ready_log.h"
#include "link/shared_memory.h"
#include "link/wait.h"

namespace ronde {

// What an id stands for: a call without its memory.
class AgreedCall {
 public:
  AgreedCall(const std::string& name, const Call& call);
  AgreedCall(const AgreedCall&) = delete;

  const std::string& name() const { return name_; }
  uint64_t signature() const { return params_.signature; }
  // The call on this memory. Throws CallError{RD_BAD_CALL} when its size is another.
  std::shared_ptr<Call> make_call(const rd_span* spans, uint64_t num_spans, const Topology& topology,
                                  double timeout_s) const;
  // Whether the caller asks for this, apart from its memory. Not for kinds whose members may give different numbers of
  // elements: who knows only its own cannot tell.
  bool is_asked_for(const rd_call& params) const;

 private:
  const std::string name_, description_;
  const std::vector<uint64_t> counts_, splits_;
  const uint64_t num_spans_, count_;
  rd_call params_{};  // points to what is above
};

// Made as a shared_ptr: its thread uses it for a moment after a callback has closed and destroyed the channel.
class AnnouncedCalls : public std::enable_shared_from_this<AnnouncedCalls> {
 public:
  // `run_call` fills call.result and does not throw.
  AnnouncedCalls(const Topology& topology, SharedSegment* segment, AbortSignal* abort_signal,
                 std::function<void(Call&)> run_call);

  // From now on the id stands for this call of this name, until revoke(). Throws CallError{RD_BAD_CALL}.
  void agree(uint32_t id, const std::string& name, const Call& call);
  // The id stands for nothing any more. Returns true if that took an announced call back, which ends with RD_WITHDRAWN.
  // A call that all members have announced runs nevertheless.
  bool revoke(uint32_t id);

  // Makes the call ready on this member. `call->timeout_s` counts from the moment when it starts to run. With
  // `will_wait` the caller promises to call wait() at once. Throws CallError: RD_NOT_AGREED if the id does not stand
  // for this call, RD_BAD_CALL while a call is announced under it, RD_SYSTEM if there is no thread that could execute
  // it.
  void announce(uint32_t id, const std::shared_ptr<Call>& call, bool will_wait);

  // Announces many calls at once, so that they become ready together if the other members have announced them. `spans`
  // has those of all calls, one after the other. A call whose id does not stand for it is null in the result, and not
  // announced. Without any calls, somebody executes what is announced, also if a thread does not keep its promise to
  // wait.
  std::vector<std::shared_ptr<Call>> announce_many(const rd_announcement* announcements, uint32_t num_announcements,
                                                   const rd_span* spans, double timeout_s, bool will_wait);

  // Returns the id that stands for what the caller asks for under this name, and what was agreed on. Throws
  // CallError{RD_NOT_AGREED}.
  uint32_t find_id(const std::string& name, const rd_call& params, std::shared_ptr<const AgreedCall>* agreed);

  // Waits for an announced call. Returns false when the deadline expires first. Throws CallError{RD_ABORTED, -1, EINTR}
  // when a signal handler of Python raised an exception. In both cases the call goes on, if it has not ended. A thread
  // that executes may come back later than at the deadline: by a tenth of the time that a call may take.
  bool wait(const std::shared_ptr<Call>& call, const Deadline& deadline);

  // Takes an announcement back: the call ends with RD_CANCELLED. Returns false if all members have announced it, or it
  // has ended.
  bool cancel(const std::shared_ptr<Call>& call);

  // Members that have not announced the id. Called from any thread.
  std::vector<uint32_t> missing(uint32_t id) const { return log_.missing(id); }
  // What was announced here until this time and does not run yet, `max_calls` at most.
  std::vector<rd_announced> announced_until(int64_t until_ns, size_t max_calls);
  // The running call, or null.
  std::shared_ptr<Call> current();
  // Lets the threads of all members look again: the channel was aborted, or a member has left.
  void wake() { log_.wake(); }

  // Takes no more calls and withdraws those that it can. Returns whether nothing is left: then this member can leave in
  // good order.
  bool leave();
  // Ends what is left with RD_CLOSED and joins the thread, after the running call was aborted. When this returns, no
  // thread executes on the memory of a call, with two exceptions: the thread in whose execution a signal handler calls
  // this; and one in which a signal handler runs for longer than kMaxCloseS, maybe because it waits for the caller.
  void close();

  static constexpr double kMaxCloseS = 2;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Calls = std::vector<std::shared_ptr<Call>>;

  // All of these are called with the mutex locked; those that take the lock unlock it meanwhile.
  void forget(uint32_t id);
  bool add(uint32_t id, const std::shared_ptr<Call>& call);
  void start_thread();
  void want_thread();
  void want_thread_or_fail(Lock& lock);
  void wait_and_execute(Lock& lock, const Call& call, const Deadline& deadline);
  bool has_time_for_next(int64_t remaining_ns) const;
  bool wait_for_entry(Lock& lock, const Deadline& deadline);
  void wait_for_end_of_batch(Lock& lock, const Deadline& deadline);
  bool sleep_until_change(Lock& lock, const Deadline& deadline);
  void execute_next(Lock& lock);
  Calls next_batch();
  uint32_t propose_batch_size() const;
  void abort_for_others();
  void end_impossible(Lock& lock);
  void end_all(Lock& lock, CallError error);
  bool withdraw(uint32_t id, const CallError& error, Calls* ended);
  void run_callbacks(Lock& lock, const Calls& ended);
  void remove(const Call& call);
  void notify();

  // These need no mutex; the thread locks it.
  void thread_loop();
  std::optional<CallError> find_abort() const;
  void check_signals() const;

  const uint32_t generation_ = fork_generation.load();
  const Topology& topology_;
  SharedSegment* segment_;
  AbortSignal* abort_signal_;
  const std::function<void(Call&)> run_call_;
  ReadyLog log_;
  const SpinPolicy spin_policy_;
  std::mutex mutex_;                                       // guards everything below
  std::vector<std::shared_ptr<const AgreedCall>> agreed_;  // by id
  std::unordered_map<std::string, uint32_t> ids_;          // by name
  Calls calls_;                                            // by id: what is announced and does not run yet
  uint32_t num_announced_ = 0;                             // of those
  uint32_t position_ = 0;                                  // of the next entry of the log to execute
  int64_t last_end_ns_ = 0;                                // when the last batch ended here
  std::shared_ptr<Call> current_;
  std::thread::id executor_;  // the thread that executes current_
  uint32_t num_waiting_ = 0;  // threads in wait() that execute what is ready
  bool closing_ = false;
  bool thread_is_idle_ = false;           // it sleeps until it is woken
  std::atomic<uint32_t> num_changes_{0};  // futex word: calls have ended
  std::atomic<uint32_t> waiters_{0};      // threads that sleep on it
  std::thread thread_;  // "ronde-channel", started when nobody waits for an announced call; runs run_call_ and
                        // callbacks, and touches what the mutex guards
};

}  // namespace ronde
