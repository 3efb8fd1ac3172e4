// One order of calls. A call runs in the caller's thread when nothing else is under way (no hand-over, no wake-up), and
// otherwise in the queue's own thread, behind those before it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "request.h"

namespace ronde {

class Queue {
 public:
  // `work` fills request.result and does not throw.
  explicit Queue(std::function<void(Request&)> work) : work_(std::move(work)) {}
  ~Queue() { close(); }

  void run(const std::shared_ptr<Request>& request);
  void submit(const std::shared_ptr<Request>& request);

  // False when the deadline passes first.
  bool wait(const std::shared_ptr<Request>& request, const Deadline& deadline);
  bool done(const std::shared_ptr<Request>& request);

  // Nothing queued, nothing under way.
  bool idle();
  // The call under way, or null.
  std::shared_ptr<Request> current();

  // Joins the thread; calls still queued are worked off (they end at once when the channel is aborted).
  void close();

 private:
  void loop();
  void execute(const std::shared_ptr<Request>& request, std::unique_lock<std::mutex>& lock);

  std::function<void(Request&)> work_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Request>> waiting_;
  std::shared_ptr<Request> current_;
  bool closing_ = false;
  std::thread thread_;  // made by the first submit; runs work_ and touches only what the mutex guards
};

}  // namespace ronde
