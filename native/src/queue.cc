#include "queue.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>

namespace ronde {

void Queue::execute(const std::shared_ptr<Request>& request, std::unique_lock<std::mutex>& lock) {
  current_ = request;
  lock.unlock();
  work_(*request);
  lock.lock();
  current_ = nullptr;
  request->finished = true;
  changed_.notify_all();
}

void Queue::run(const std::shared_ptr<Request>& request) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (current_ == nullptr && waiting_.empty()) return execute(request, lock);
  lock.unlock();
  submit(request);
  lock.lock();
  changed_.wait(lock, [&] { return request->finished; });  // it ends by its own deadline
}

void Queue::submit(const std::shared_ptr<Request>& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(request);
  if (!thread_.joinable()) {
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { loop(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "ronde-channel");
  }
  changed_.notify_all();
}

void Queue::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return current_ == nullptr && (closing_ || !waiting_.empty()); });
    if (waiting_.empty()) return;
    std::shared_ptr<Request> next = waiting_.front();
    waiting_.pop_front();
    execute(next, lock);
  }
}

bool Queue::wait(const std::shared_ptr<Request>& request, const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto finished = [&] { return request->finished; };
  int64_t left = deadline.remaining_ns();
  if (left > int64_t(1e17)) {
    changed_.wait(lock, finished);
    return true;
  }
  return changed_.wait_for(lock, std::chrono::nanoseconds(left), finished);
}

bool Queue::done(const std::shared_ptr<Request>& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  return request->finished;
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return current_ == nullptr && waiting_.empty();
}

std::shared_ptr<Request> Queue::current() {
  std::lock_guard<std::mutex> lock(mutex_);
  return current_;
}

void Queue::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ronde
