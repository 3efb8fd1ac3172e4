// Calls in order. A call runs in the caller's thread when no other is queued or running (no hand-over, no wakeup), and
// otherwise in the queue's own thread, after those before it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/fork.h"
#include "call.h"

namespace ronde {

class CallQueue {
 public:
  // `run_call` fills call.result and does not throw. `abort` ends all calls, running and later ones, with this error.
  CallQueue(std::function<void(Call&)> run_call, std::function<void(const CallError&)> abort)
      : run_call_(std::move(run_call)), abort_(std::move(abort)), state_(std::make_shared<QueueState>()) {}
  ~CallQueue() { close(); }

  // Returns when the call has finished. Throws CallError, without any effect, when the queue is closed or its thread
  // cannot be started. Throws CallError after it has aborted the channel when a call that waits for others before it
  // reaches its deadline (RD_TIMEOUT), or a signal handler raises an exception meanwhile (RD_ABORTED, EINTR). Throws
  // CallError{RD_FORKED} in a child that a signal handler has forked meanwhile.
  void run(const std::shared_ptr<Call>& call);

  // Queues the call; the queue's thread runs it and then its callbacks. Throws CallError as run() does.
  void submit(const std::shared_ptr<Call>& call);

  // The running call, or null.
  std::shared_ptr<Call> current();

  // Takes no more calls. Returns whether no call was queued or running.
  bool refuse_calls();

  // Ends the queued calls with RD_CLOSED and joins the thread, after the running call was aborted. A call that runs in
  // another thread may outlast this. In a callback, which the queue's own thread runs, nothing is joined.
  void close();

 private:
  // Shared with the thread, which uses it for a moment after a callback has closed and destroyed the queue.
  struct QueueState {
    std::mutex mutex;  // guards everything below
    std::condition_variable changed;
    std::deque<std::shared_ptr<Call>> queued;
    std::shared_ptr<Call> current;
    bool closing = false;
  };

  static void thread_loop(QueueState& state, const std::function<void(Call&)>& run_call);
  void enqueue(const std::shared_ptr<Call>& call);
  void wait_for_turn_and_end(Call& call);

  const uint32_t generation_ = fork_generation.load();
  const std::function<void(Call&)> run_call_;
  const std::function<void(const CallError&)> abort_;
  const std::shared_ptr<QueueState> state_;
  std::thread thread_;  // "ronde-channel", started by the first queued call; runs run_call_ and callbacks
};

}  // namespace ronde
