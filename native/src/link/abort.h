// Ends every wait of this channel after an abort, of this process or of a member on another host; the caller of the
// library brings the latter (rd_abort). It also wakes a wait on sockets when a link was opened.
#pragma once

#include <atomic>
#include <mutex>

#include "base/error.h"
#include "base/file_descriptor.h"

namespace ronde {

class AbortSignal {
 public:
  AbortSignal();  // throws CallError{RD_SYSTEM}

  // Ends the waits of this process. Only the first error counts; returns whether this is it.
  bool trigger(const CallError& error);

  // Throws the error that was triggered, if any.
  void check() const {
    if (triggered_.load(std::memory_order_acquire)) throw error_;
  }

  // Readable after an abort, and after wake() until clear_wakeup(). A wait on sockets polls it, too.
  int descriptor() const { return wakeup_.get(); }
  void wake();
  void clear_wakeup();

  // Returns why a socket to this member closed, with this errno or 0: the error of an abort when there is one (the
  // member may have aborted because of a third one), otherwise that this member is lost.
  CallError reason_closed(uint32_t member, int socket_errno);

 private:
  FileDescriptor wakeup_;
  std::mutex mutex_;  // guards error_ until triggered_ is set
  std::atomic<bool> triggered_{false};
  CallError error_{RD_OK};
};

}  // namespace ronde
