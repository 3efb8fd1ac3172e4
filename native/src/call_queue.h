// Calls in order. A call runs in the caller's thread when no other is queued or running (no hand-over, no wakeup), and
// otherwise in the queue's own thread, after those before it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "call.h"

namespace ronde {

class CallQueue {
 public:
  // `run_call` fills call.result and does not throw.
  explicit CallQueue(std::function<void(Call&)> run_call) : run_call_(std::move(run_call)) {}
  ~CallQueue() { close(); }

  // Returns when the call has finished.
  void run(const std::shared_ptr<Call>& call);
  void submit(const std::shared_ptr<Call>& call);

  // Waits for a submitted call. Returns false when the deadline expires first.
  bool wait(const std::shared_ptr<Call>& call, const Deadline& deadline);
  bool done(const std::shared_ptr<Call>& call);

  // Whether no call is queued or running.
  bool idle();
  // The running call, or null.
  std::shared_ptr<Call> current();

  // Runs the calls that are still queued (they end at once when the channel is aborted) and joins the thread.
  void close();

 private:
  void thread_loop();
  void execute(const std::shared_ptr<Call>& call, std::unique_lock<std::mutex>& lock);

  std::function<void(Call&)> run_call_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Call>> queued_;
  std::shared_ptr<Call> current_;
  bool closing_ = false;
  std::thread
      thread_;  // "ronde-channel", started by the first submit; runs run_call_ and touches what the mutex guards
};

}  // namespace ronde
