// A byte stream to and from one other rank, for messages. Its socket can be polled together with those of other links.
//
// Between hosts the bytes go through the socket. Inside a host they go through two FIFOs in memory that both ranks have
// mapped, and the socket carries single bytes that wake the other side:
//
//   a side that wants to sleep     sets its own `asleep`, then tests once more whether it can go on
//   a side that has moved bytes    clears the other's `asleep`; if it was set, it writes one byte to the socket
//
// So either the sleeper sees the moved bytes, or the mover sees the sleeper. A socket that ends tells that the other
// side has closed the link or died; what is still in the FIFO can be read after that.
//
// The memory also has an area for data that is too large for a FIFO (placed_data.h).
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <memory>

#include "base/file_descriptor.h"
#include "link/placed_data.h"
#include "link/shared_memory.h"

namespace ronde {

struct LinkMemory {
  // Where ranks share cores, every time that a FIFO is full the scheduler has to change to the other rank: a large FIFO
  // for the messages, and a small one for what comes back.
  static constexpr uint64_t kMessageBytes = 512 * 1024, kReportBytes = 16 * 1024;
  static constexpr uint64_t kAreaBytes = 128 * 1024 * 1024;  // what is never used of it costs nothing

  // What one rank writes, and whether it sleeps.
  struct alignas(64) Side {
    std::atomic<uint64_t> head;                // of its FIFO, written by it
    alignas(64) std::atomic<uint64_t> tail;    // of its FIFO, written by the other rank
    alignas(64) std::atomic<uint32_t> asleep;  // 1 while it needs a byte on the socket to go on
  };
  Side sides[2];  // of the rank that opened the link, and of the other
  alignas(64) char messages[kMessageBytes];
  alignas(64) char reports[kReportBytes];
  alignas(64) char area[kAreaBytes];  // for data of the rank that opened the link

  char* data(int side) { return side == 0 ? messages : reports; }
  static uint64_t capacity(int side) { return side == 0 ? kMessageBytes : kReportBytes; }
};

class MessageLink {
 public:
  // Takes over the socket. `memory` is the descriptor of a LinkMemory, or -1 between hosts; the caller keeps it. Throws
  // CallError{RD_SYSTEM}.
  MessageLink(FileDescriptor socket, int memory, bool opened_here);
  ~MessageLink();
  MessageLink(const MessageLink&) = delete;

  // Move what can be moved without waiting and return how many bytes that was. When the link has ended they return 0,
  // and closed() is true.
  size_t try_send(iovec* pieces, int num_pieces);  // changes `pieces`
  size_t try_receive(char* buffer, size_t bytes);

  bool is_shared_memory() const { return memory_ != nullptr; }
  // A place for data that this side sends; null when there is none.
  std::shared_ptr<PlacedData> place(uint64_t bytes);
  // What the other side has placed, of which it has sent the offset; null if that cannot be.
  std::shared_ptr<PlacedData> find_placed(uint64_t offset, uint64_t bytes) const;
  bool has_input() const;  // whether bytes can be received without asking the kernel
  // Whether the other side has ended the link. Bytes that it sent before may still be there to receive.
  bool closed() const { return closed_; }
  int error() const { return error_; }  // the errno with which it ended, or 0
  int socket() const { return socket_.get(); }

  // Called when the socket is readable: takes the bytes that only wake this side, and notices the end of the link.
  // Returns whether there were such bytes: this side is then no longer taken for asleep.
  bool clear_wakeups();
  // Called before this side sleeps. Returns false when it can go on at once: there is input, or space for the output
  // that it wants to send.
  bool prepare_sleep(bool has_output);
  void end_sleep();

 private:
  size_t write_memory(const char* data, size_t bytes);
  size_t read_memory(char* buffer, size_t bytes);
  void notify_other();
  void set_closed(int error);
  size_t receive_from_socket(char* buffer, size_t bytes);

  // Inside a host a FIFO is filled and emptied in steps of this size, so that both sides copy at the same time.
  static constexpr size_t kStepBytes = 32 * 1024;
  static constexpr size_t kInputBytes = 64 * 1024;

  FileDescriptor socket_;
  std::shared_ptr<LinkMapping> mapping_;
  LinkMemory* memory_ = nullptr;
  PlacementArea placement_area_;
  int own_side_;
  bool closed_ = false;
  int error_ = 0;
  // Bytes that came with others through the socket, so that a small message needs one call of the kernel.
  std::unique_ptr<char[]> input_;
  size_t input_start_ = 0, input_end_ = 0;
};

}  // namespace ronde
