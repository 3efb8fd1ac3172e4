// What a channel needs from its caller, sent as rd_event records through the caller's socket: links to members of other
// hosts, and that they learn of an abort.
#pragma once

#include <sys/socket.h>

#include <cstdint>

#include "base/error.h"
#include "base/file_descriptor.h"

namespace ronde {

class ChannelEvents {
 public:
  // `socket` keeps records apart (SOCK_SEQPACKET). It may be -1 when all members are on one host.
  ChannelEvents(FileDescriptor socket, uint64_t channel_number)
      : socket_(std::move(socket)), channel_(channel_number) {}

  // Asks for a link to a member, until a deadline. Returns false when the socket is full: ask again.
  bool want_link(uint32_t member, rd_link_kind kind) {
    return send_event({channel_, RD_LINK_WANTED, int32_t(member), int32_t(kind), 0, deadline_ns_});
  }

  void report_abort(const CallError& error) {
    send_event({channel_, RD_CHANNEL_ABORTED, error.member, error.status, error.detail, 0});
  }

  // The deadline of the call that runs. Called by the thread that runs it, which also asks for links.
  void set_deadline(int64_t deadline_ns) { deadline_ns_ = deadline_ns; }

 private:
  bool send_event(const rd_event& event) {
    return send(socket_.get(), &event, sizeof event, MSG_DONTWAIT | MSG_NOSIGNAL) == ssize_t(sizeof event);
  }

  FileDescriptor socket_;
  const uint64_t channel_;
  int64_t deadline_ns_ = 0;
};

}  // namespace ronde
