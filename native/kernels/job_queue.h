/* The jobs of a framework's kernels, from the threads of the framework to one thread of Python. Used by the libraries
 * for TensorFlow, JAX and MXNet. */
#ifndef RONDE_KERNELS_JOB_QUEUE_H_
#define RONDE_KERNELS_JOB_QUEUE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace ronde_kernels {

constexpr const char* kForked =
    "this process is a forked child of a rank and cannot take part; start workers with the method 'spawn'";
constexpr const char* kStopped = "ronde has ended in this process, because the process is ending";

// A queue that is never destroyed: kernels may run while the process ends. `refuse` ends the kernel of a job that
// nobody will take any more.
template <typename Job>
class JobQueue {
 public:
  explicit JobQueue(void (*refuse)(Job*)) : refuse_(refuse) {}

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
    refuse_(job.get());
  }

  // Returns the next job; null after timeout_s or when stopped.
  Job* take(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return stopped_ || !jobs_.empty(); });
    if (jobs_.empty()) return nullptr;
    Job* job = jobs_.begin()->second.release();
    jobs_.erase(jobs_.begin());
    return job;
  }

  bool is_stopped() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }

  void stop() {
    std::multimap<int64_t, std::unique_ptr<Job>> left;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      left.swap(jobs_);
      changed_.notify_all();
    }
    for (auto& each : left) refuse_(each.second.get());
  }

 private:
  void (*refuse_)(Job*);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<int64_t, std::unique_ptr<Job>> jobs_;  // by negative priority
  bool stopped_ = false;
};

}  // namespace ronde_kernels

#endif
