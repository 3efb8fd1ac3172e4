// A file descriptor that its one owner closes, and a forked child at once.
#pragma once

#include <unistd.h>

#include <utility>

#include "base/fork.h"

namespace ronde {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {
    if (fd >= 0) own_descriptor(fd);
  }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close_descriptor(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace ronde
