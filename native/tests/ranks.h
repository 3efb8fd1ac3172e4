// Ranks as threads: channels among the members of made-up places, over shared memory and real loopback sockets.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "channel.h"

namespace ranks {

using ronde::Channel;
using ronde::FileDescriptor;
using ronde::Request;
using ronde::SharedSegment;

struct Setup {
  std::vector<uint32_t> places;  // per member
  uint64_t slot_bytes = 64 * 1024;
  uint64_t chunk_bytes = 4096;  // small, so that few elements make many chunks
  uint64_t bucket_bytes = 0;
  uint32_t num_sockets = 3;  // the alarm and two for data
  uint32_t num_cores = 2;
};

// A connected pair of TCP sockets on the loopback interface.
inline std::pair<FileDescriptor, FileDescriptor> tcp_pair() {
  FileDescriptor door(socket(AF_INET, SOCK_STREAM, 0)), one(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  bool fine = bind(door.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(door.get(), 1) == 0 &&
              getsockname(door.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
              connect(one.get(), reinterpret_cast<sockaddr*>(&address), length) == 0;
  FileDescriptor other(fine ? accept(door.get(), nullptr, nullptr) : -1);
  if (other.get() < 0) throw std::runtime_error("no loopback sockets");
  int on = 1;  // as the doors do: a small message must not wait for the answer to the one before
  for (int fd : {one.get(), other.get()}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return {std::move(one), std::move(other)};
}

class Ranks {
 public:
  explicit Ranks(const Setup& setup) : setup_(setup), size_(uint32_t(setup.places.size())) {
    std::vector<std::vector<std::vector<FileDescriptor>>> sockets(size_);
    std::vector<std::vector<FileDescriptor>> direct(size_);
    for (uint32_t rank = 0; rank < size_; ++rank) {
      sockets[rank].resize(size_);
      for (uint32_t i = 0; i < size_; ++i) direct[rank].emplace_back();
    }
    for (uint32_t a = 0; a < size_; ++a) {
      for (uint32_t b = a + 1; b < size_; ++b) {
        if (setup_.places[a] == setup_.places[b]) continue;
        for (uint32_t i = 0; i < setup_.num_sockets; ++i) {
          auto [one, other] = tcp_pair();
          sockets[a][b].push_back(std::move(one));
          sockets[b][a].push_back(std::move(other));
        }
        auto [one, other] = tcp_pair();
        direct[a][b] = std::move(one);
        direct[b][a] = std::move(other);
      }
    }
    for (uint32_t rank = 0; rank < size_; ++rank)
      channels_.push_back(
          std::make_unique<Channel>(layout(rank), segment(rank), std::move(sockets[rank]), std::move(direct[rank])));
  }

  ~Ranks() {
    channels_.clear();
    for (auto& [base, bytes] : memory_) munmap(base, bytes);
  }

  uint32_t size() const { return size_; }
  Channel& channel(uint32_t rank) { return *channels_[rank]; }
  void destroy(uint32_t rank) { channels_[rank].reset(); }

  // Every rank in a thread of its own; returns when all are done.
  void run(const std::function<void(uint32_t, Channel&)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < size_; ++rank) threads.emplace_back([&, rank] { body(rank, *channels_[rank]); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  rd_layout layout(uint32_t rank) const {
    return {RD_ABI,
            size_,
            rank,
            setup_.num_cores,
            setup_.places.data(),
            setup_.slot_bytes,
            setup_.chunk_bytes,
            setup_.bucket_bytes};
  }

  // One mapping per place for all its ranks, so that a sanitizer sees them touch the same memory.
  std::shared_ptr<SharedSegment> segment(uint32_t rank) {
    rd_layout given = layout(rank);
    ronde::Topology topology(given);
    if (topology.num_local() == 1) return nullptr;
    if (bases_.size() <= topology.my_host) bases_.resize(topology.my_host + 1);
    void*& base = bases_[topology.my_host];
    if (base == nullptr) {
      uint64_t bytes = SharedSegment::bytes(topology);
      base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (base == MAP_FAILED) throw std::runtime_error("no memory for a segment");
      memory_.emplace_back(base, bytes);
    }
    return std::make_shared<SharedSegment>(topology, base);
  }

  Setup setup_;
  uint32_t size_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<void*> bases_;
  std::vector<std::pair<void*, uint64_t>> memory_;
};

// A call with sane defaults, to be filled in.
inline rd_call call(rd_kind kind, rd_dtype dtype = RD_FLOAT32, rd_op op = RD_SUM) {
  rd_call c{};
  c.kind = kind;
  c.dtype = dtype;
  c.op = op;
  c.peer = -1;
  c.prescale = c.postscale = 1.0;
  c.signature = 1;
  c.text = "test";
  return c;
}

inline std::shared_ptr<Request> run(Channel& channel, const rd_call& call, double remaining_s = 60) {
  auto request = std::make_shared<Request>(call, channel.topology(), remaining_s);
  channel.queue_of(*request).run(request);
  return request;
}

inline std::shared_ptr<Request> submit(Channel& channel, const rd_call& call, double remaining_s = 60) {
  auto request = std::make_shared<Request>(call, channel.topology(), remaining_s);
  channel.queue_of(*request).submit(request);
  return request;
}

inline rd_status wait(Channel& channel, const std::shared_ptr<Request>& request, double remaining_s = 60) {
  if (!channel.queue_of(*request).wait(request, ronde::Deadline(remaining_s))) return RD_TIMEOUT;
  return rd_status(request->result.status);
}

}  // namespace ranks
