#include "call_queue.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>

namespace ronde {

void CallQueue::execute(const std::shared_ptr<Call>& call, std::unique_lock<std::mutex>& lock) {
  current_ = call;
  lock.unlock();
  run_call_(*call);
  lock.lock();
  current_ = nullptr;
  call->finished = true;
  changed_.notify_all();
}

void CallQueue::run(const std::shared_ptr<Call>& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (current_ == nullptr && queued_.empty()) return execute(call, lock);
  lock.unlock();
  submit(call);
  lock.lock();
  changed_.wait(lock, [&] { return call->finished; });  // the call's own deadline ends this wait
}

void CallQueue::submit(const std::shared_ptr<Call>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  queued_.push_back(call);
  if (!thread_.joinable()) {
    // The thread blocks all signals: they are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { thread_loop(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "ronde-channel");
  }
  changed_.notify_all();
}

void CallQueue::thread_loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return current_ == nullptr && (closing_ || !queued_.empty()); });
    if (queued_.empty()) return;
    std::shared_ptr<Call> next = queued_.front();
    queued_.pop_front();
    execute(next, lock);
  }
}

bool CallQueue::wait(const std::shared_ptr<Call>& call, const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto finished = [&] { return call->finished; };
  int64_t remaining_ns = deadline.remaining_ns();
  if (remaining_ns > int64_t(1e17)) {
    changed_.wait(lock, finished);
    return true;
  }
  return changed_.wait_for(lock, std::chrono::nanoseconds(remaining_ns), finished);
}

bool CallQueue::done(const std::shared_ptr<Call>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  return call->finished;
}

bool CallQueue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return current_ == nullptr && queued_.empty();
}

std::shared_ptr<Call> CallQueue::current() {
  std::lock_guard<std::mutex> lock(mutex_);
  return current_;
}

void CallQueue::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ronde
