// Calls that come in any order on any member of one host, each announced under an id on whose meaning all members have
// agreed before. They run in the order of the shared ReadyLog.
//
// A thread that waits for its call executes what is ready meanwhile, its own call included, so a lone call never
// changes threads. The object's own thread executes only when calls are announced and nobody waits for one. One thread
// of the process executes at a time.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "call.h"
#include "link/abort.h"
#include "link/ready_log.h"
#include "link/shared_memory.h"
#include "link/wait.h"

namespace ronde {

class AnnouncedCalls {
 public:
  // `run_call` fills call.result and does not throw.
  AnnouncedCalls(const Topology& topology, SharedSegment* segment, AbortSignal* abort_signal,
                 std::function<void(Call&)> run_call);
  ~AnnouncedCalls() { close(); }

  // From now on the id stands for the call with this signature, until revoke().
  void agree(uint32_t id, uint64_t signature);
  // The id stands for nothing any more. Returns true if that took an announced call back, which ends with RD_WITHDRAWN.
  // A call that all members have announced runs nevertheless.
  bool revoke(uint32_t id);

  // Makes the call ready on this member. `call->timeout_s` counts from the moment when it starts to run. With
  // `will_wait` the caller promises to call wait() at once. Throws CallError: RD_NOT_AGREED if the id does not stand
  // for this call, RD_BAD_CALL while a call is announced under it.
  void announce(uint32_t id, const std::shared_ptr<Call>& call, bool will_wait);

  // Waits for an announced call. Returns false when the deadline expires first, or a signal interrupts the wait: then
  // the call is still announced, or running.
  bool wait(const std::shared_ptr<Call>& call, const Deadline& deadline);
  bool done(const std::shared_ptr<Call>& call);

  // Members that have not announced the id. Called from any thread.
  std::vector<uint32_t> missing(uint32_t id) const { return log_.missing(id); }
  // The running call, or null.
  std::shared_ptr<Call> current();
  // Lets the threads of all members look again: the channel was aborted, or a member has left.
  void wake() { log_.wake(); }

  // Withdraws what can be withdrawn. Returns whether nothing is left: then this member can leave in good order.
  bool leave();
  // Ends what is left with RD_CLOSED and joins the thread.
  void close();

 private:
  enum class Woken { kByChange, kBySignal, kByClock };
  using Lock = std::unique_lock<std::mutex>;

  // All of these are called with the mutex locked; those that take the lock unlock it while they wait or execute.
  void thread_loop();
  void wake_thread();
  void execute_next(Lock& lock, const Deadline* limit);
  uint32_t propose_batch() const;
  Woken wait_for_entry(Lock& lock, const Deadline& deadline, bool spin);
  Woken wait_for_change(Lock& lock, const Deadline& deadline);
  void check_abort() const;
  void end_if_impossible(std::shared_ptr<Call> call);
  void fail(const CallError& error);
  void end_all(const CallError& error);
  void end(Call& call, const CallError& error);
  void remove(Call& call);
  void notify();

  const Topology& topology_;
  SharedSegment* segment_;
  AbortSignal* abort_signal_;
  const std::function<void(Call&)> run_call_;
  ReadyLog log_;
  const SpinPolicy spin_policy_;
  std::mutex mutex_;                             // guards everything below
  std::vector<std::optional<uint64_t>> agreed_;  // by id: the signature of the call that it stands for
  std::vector<std::shared_ptr<Call>> calls_;     // by id: what is announced and does not run yet
  uint32_t num_announced_ = 0;                   // of those
  uint32_t position_ = 0;                        // of the next entry of the log to execute
  int64_t last_end_ns_ = 0;                      // when the last batch ended here
  std::shared_ptr<Call> current_;
  uint32_t num_waiting_ = 0;  // threads in wait() that execute what is ready
  bool closing_ = false;
  bool thread_sleeps_ = false;
  std::atomic<uint32_t> num_changes_{0};  // futex word: calls have ended
  std::atomic<uint32_t> waiters_{0};      // threads that sleep on it
  std::atomic<uint32_t> num_wakeups_{0};  // futex word of the thread
  std::thread thread_;  // "ronde-channel", started when nobody waits for an announced call; runs run_call_ and touches
                        // what the mutex guards
};

}  // namespace ronde
