/* Jobs that a framework's thread leaves for a thread of Python: a queue that never blocks who puts something in. Used
 * by the libraries for TensorFlow and MXNet, which have no other way to reach Python without entering it. */
#ifndef RONDE_FRAMEWORK_JOB_QUEUE_H
#define RONDE_FRAMEWORK_JOB_QUEUE_H

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace framework {

template <typename Job>
class JobQueue {
 public:
  // Ends a job that nobody will take, because the process is ending.
  using EndUntaken = void (*)(Job*);

  explicit JobQueue(EndUntaken end_untaken) : end_untaken_(end_untaken) {}

  // Jobs of a higher priority are taken first, equal ones in the order in which they were put in.
  void put(std::unique_ptr<Job> job, int64_t priority = 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!stopped_) {
        jobs_.emplace(-priority, std::move(job));
        changed_.notify_one();
        return;
      }
    }
    end_untaken_(job.get());
  }

  // Returns the next job; null after timeout_s or when stopped.
  std::unique_ptr<Job> take(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return stopped_ || !jobs_.empty(); });
    if (jobs_.empty()) return nullptr;
    std::unique_ptr<Job> job = std::move(jobs_.begin()->second);
    jobs_.erase(jobs_.begin());
    return job;
  }

  bool is_stopped() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }

  // Ends all jobs that nobody has taken, and all later ones.
  void stop() {
    std::multimap<int64_t, std::unique_ptr<Job>> left;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      left.swap(jobs_);
      changed_.notify_all();
    }
    for (auto& each : left) end_untaken_(each.second.get());
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<int64_t, std::unique_ptr<Job>> jobs_;  // by negative priority
  EndUntaken end_untaken_;
  bool stopped_ = false;
};

}  // namespace framework

#endif
