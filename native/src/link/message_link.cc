#include "link/message_link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ronde {

MessageLink::MessageLink(FileDescriptor socket, int memory, bool opened_here)
    : socket_(std::move(socket)), own_side_(opened_here ? 0 : 1) {
  if (memory < 0) return;
  mapping_ = std::make_shared<LinkMapping>(memory);
  memory_ = mapping_->memory();
}

MessageLink::~MessageLink() {
  shutdown(socket_.get(), SHUT_RDWR);  // a child process may have a copy of the socket, so closing it is not enough
}

std::shared_ptr<PlacedData> MessageLink::place(uint64_t bytes) {
  return memory_ == nullptr || closed_ ? nullptr : placement_area_.place(mapping_, bytes);
}

std::shared_ptr<PlacedData> MessageLink::find_placed(uint64_t offset, uint64_t bytes) const {
  return ronde::find_placed(mapping_, offset, bytes);
}

void MessageLink::set_closed(int error) {
  closed_ = true;
  error_ = error;
}

void MessageLink::notify_other() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::atomic<uint32_t>& asleep = memory_->sides[1 - own_side_].asleep;
  if (asleep.load() == 0 || asleep.exchange(0) == 0) return;
  char wakeup = 0;
  // When the socket is full, the other side has bytes to wake up from.
  (void)!send(socket_.get(), &wakeup, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

size_t MessageLink::write_memory(const char* data, size_t bytes) {
  LinkMemory::Side& own = memory_->sides[own_side_];
  return write_fifo(own.head, own.tail, memory_->data(own_side_), LinkMemory::capacity(own_side_), data, bytes);
}

size_t MessageLink::read_memory(char* buffer, size_t bytes) {
  int side = 1 - own_side_;
  LinkMemory::Side& other = memory_->sides[side];
  return read_fifo(other.head, other.tail, memory_->data(side), LinkMemory::capacity(side), buffer, bytes);
}

size_t MessageLink::try_send(iovec* pieces, int num_pieces) {
  size_t total = 0;
  while (num_pieces > 0 && !closed_) {
    if (pieces[0].iov_len == 0) {
      ++pieces, --num_pieces;
      continue;
    }
    size_t moved;
    if (memory_ != nullptr) {
      auto* from = static_cast<const char*>(pieces[0].iov_base);
      moved = write_memory(from, std::min(pieces[0].iov_len, kStepBytes));
      if (moved == 0) break;
      notify_other();
    } else {
      msghdr message{};
      message.msg_iov = pieces;
      message.msg_iovlen = size_t(num_pieces);
      ssize_t sent = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (sent < 0) {
        set_closed(errno);
        break;
      }
      moved = size_t(sent);
    }
    total += moved;
    while (num_pieces > 0 && moved >= pieces[0].iov_len) {
      moved -= pieces[0].iov_len;
      ++pieces, --num_pieces;
    }
    if (num_pieces == 0) break;
    pieces[0].iov_base = static_cast<char*>(pieces[0].iov_base) + moved;
    pieces[0].iov_len -= moved;
  }
  return total;
}

size_t MessageLink::try_receive(char* buffer, size_t bytes) {
  size_t total = 0;
  while (total < bytes) {
    size_t moved;
    if (memory_ != nullptr) {
      moved = read_memory(buffer + total, std::min(bytes - total, kStepBytes));
      if (moved > 0 && !closed_) notify_other();
    } else {
      moved = receive_from_socket(buffer + total, bytes - total);
    }
    if (moved == 0) break;
    total += moved;
  }
  return total;
}

size_t MessageLink::receive_from_socket(char* buffer, size_t bytes) {
  if (input_start_ == input_end_) {
    if (closed_) return 0;
    bool direct = bytes >= kInputBytes;
    if (!direct && input_ == nullptr) input_.reset(new char[kInputBytes]);
    ssize_t received;
    do {
      received = recv(socket_.get(), direct ? buffer : input_.get(), direct ? bytes : kInputBytes, MSG_DONTWAIT);
    } while (received < 0 && errno == EINTR);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (received <= 0) {
      set_closed(received < 0 ? errno : 0);
      return 0;
    }
    if (direct) return size_t(received);
    input_start_ = 0;
    input_end_ = size_t(received);
  }
  size_t moved = std::min(bytes, input_end_ - input_start_);
  std::memcpy(buffer, input_.get() + input_start_, moved);
  input_start_ += moved;
  return moved;
}

bool MessageLink::has_input() const {
  if (memory_ == nullptr) return input_start_ != input_end_;
  const LinkMemory::Side& other = memory_->sides[1 - own_side_];
  return other.head.load() != other.tail.load();
}

bool MessageLink::clear_wakeups() {
  char wakeups[64];
  bool any = false;
  while (memory_ != nullptr && !closed_) {
    ssize_t received = recv(socket_.get(), wakeups, sizeof wakeups, MSG_DONTWAIT);
    any |= received > 0;
    if (received > 0 || (received < 0 && errno == EINTR)) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    set_closed(received < 0 ? errno : 0);
  }
  return any;
}

bool MessageLink::prepare_sleep(bool has_output) {
  if (memory_ == nullptr) return !has_input();
  memory_->sides[own_side_].asleep.store(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const LinkMemory::Side& own = memory_->sides[own_side_];
  bool is_full = own.head.load() - own.tail.load() == LinkMemory::capacity(own_side_);
  return !has_input() && !(has_output && !is_full);
}

void MessageLink::end_sleep() {
  if (memory_ != nullptr) memory_->sides[own_side_].asleep.store(0, std::memory_order_relaxed);
}

}  // namespace ronde
