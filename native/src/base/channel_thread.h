// The thread of a channel, "ronde-channel". All signals are blocked in it: they are for the threads of the program.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>

#include "base/error.h"

namespace ronde {

// Throws CallError{RD_SYSTEM} when the system has no thread left.
template <class Body>
std::thread start_channel_thread(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits it
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
    pthread_setname_np(thread.native_handle(), "ronde-channel");
  } catch (const std::system_error& error) {
    failure = error.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0) throw CallError{RD_SYSTEM, -1, failure};
  return thread;
}

}  // namespace ronde
