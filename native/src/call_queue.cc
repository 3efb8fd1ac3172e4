#include "call_queue.h"

#include "base/channel_thread.h"

namespace ronde {

void CallQueue::run(const std::shared_ptr<Call>& call) {
  bool runs_here = false;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->closing) throw CallError{RD_CLOSED};
    runs_here = state_->current == nullptr && state_->queued.empty();
    if (runs_here) {
      call->start();
      state_->current = call;
    } else {
      enqueue(call);
    }
  }
  if (!runs_here) return wait_for_turn_and_end(*call);
  run_call_(*call);                                             // it is not finish()ed: nobody else waits for it
  if (made_by_parent(generation_)) throw CallError{RD_FORKED};  // who held the mutex may not be in this process
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->current = nullptr;
  state_->changed.notify_all();
}

void CallQueue::submit(const std::shared_ptr<Call>& call) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->closing) throw CallError{RD_CLOSED};
  enqueue(call);
}

void CallQueue::enqueue(const std::shared_ptr<Call>& call) {
  if (!thread_.joinable()) {
    thread_ = start_channel_thread([state = state_, &run_call = run_call_] { thread_loop(*state, run_call); });
  }
  state_->queued.push_back(call);
  state_->changed.notify_all();
}

// Waits for a call of this thread that is behind others. The other members may be in that very call, and an operation
// that some members do and others do not cannot be repaired: who gives it up aborts the channel.
void CallQueue::wait_for_turn_and_end(Call& call) {
  CallError given_up{RD_OK};
  try {
    if (call.wait(call.deadline)) return;
    given_up = CallError{RD_TIMEOUT};
  } catch (const CallError& interrupted) {
    if (interrupted.status == RD_FORKED) throw;
    given_up = interrupted;
  }
  bool has_started = !call.end_before_start(given_up);
  if (has_started && given_up.status == RD_TIMEOUT) return call.wait_uninterrupted();  // it sees its deadline itself
  abort_(given_up);
  call.wait_uninterrupted();
  throw given_up;
}

void CallQueue::thread_loop(QueueState& state, const std::function<void(Call&)>& run_call) {
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.closing || (state.current == nullptr && !state.queued.empty()); });
    if (state.queued.empty()) return;
    std::shared_ptr<Call> call = state.queued.front();
    state.queued.pop_front();
    if (state.closing) {
      lock.unlock();
      call->end_before_start(CallError{RD_CLOSED});
    } else if (call->start()) {
      state.current = call;
      lock.unlock();
      run_call(*call);
      lock.lock();
      state.current = nullptr;
      lock.unlock();
      call->finish();
    } else {
      lock.unlock();
    }
    call->wait_uninterrupted();  // if it was cancelled, that may be under way: the result is not complete yet
    call->run_callbacks();
    call.reset();  // before the wait, which may be long
    lock.lock();
  }
}

std::shared_ptr<Call> CallQueue::current() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->current;
}

bool CallQueue::refuse_calls() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->closing = true;
  state_->changed.notify_all();
  return state_->current == nullptr && state_->queued.empty();
}

void CallQueue::close() {
  refuse_calls();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

}  // namespace ronde
