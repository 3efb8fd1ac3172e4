// Ranks as threads: channels among members on imaginary hosts, over shared memory and real loopback sockets.
#pragma once

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "channel.h"

namespace thread_ranks {

using ronde::Call;
using ronde::Channel;
using ronde::Deadline;
using ronde::FileDescriptor;
using ronde::SharedSegment;

struct GroupSetup {
  std::vector<uint32_t> hosts;  // per member: the index of its host
  uint64_t slot_bytes = 64 * 1024;
  uint64_t chunk_bytes = 4096;  // small, so that few elements make many chunks
  uint64_t bucket_bytes = 0;
  uint32_t num_sockets = 3;  // one for aborts and two for data
  uint32_t num_cores = 2;
  uint64_t fusion_bytes = 1 << 20;
  uint32_t max_announced = 0;  // ids of announced calls
  bool counts_bytes = false;   // whether bytes_sent() is wanted; then members do not see when another one closes
};

// A connected pair of TCP sockets on the loopback interface.
inline std::pair<FileDescriptor, FileDescriptor> tcp_pair() {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM, 0)), one(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  bool fine = bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
              listen(listener.get(), 1) == 0 &&
              getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
              connect(one.get(), reinterpret_cast<sockaddr*>(&address), length) == 0;
  FileDescriptor other(fine ? accept(listener.get(), nullptr, nullptr) : -1);
  if (other.get() < 0) throw std::runtime_error("no loopback sockets");
  int on = 1;  // as Python does for real channels: a small message must not wait for the previous one's acknowledgement
  for (int fd : {one.get(), other.get()}) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return {std::move(one), std::move(other)};
}

class ThreadRanks {
 public:
  explicit ThreadRanks(const GroupSetup& setup) : setup_(setup), size_(uint32_t(setup.hosts.size())) {
    std::vector<std::vector<std::vector<FileDescriptor>>> sockets(size_);
    for (uint32_t rank = 0; rank < size_; ++rank) sockets[rank].resize(size_);
    for (uint32_t a = 0; a < size_; ++a) {
      for (uint32_t b = a + 1; b < size_; ++b) {
        if (setup_.hosts[a] == setup_.hosts[b]) continue;
        for (uint32_t i = 0; i < setup_.num_sockets; ++i) {
          auto [one, other] = tcp_pair();
          if (setup_.counts_bytes)
            for (int fd : {one.get(), other.get()}) counted_.emplace_back(dup(fd));
          sockets[a][b].push_back(std::move(one));
          sockets[b][a].push_back(std::move(other));
        }
      }
    }
    for (uint32_t rank = 0; rank < size_; ++rank)
      channels_.push_back(
          std::make_unique<Channel>(ronde::Topology(params(rank)), segment(rank), std::move(sockets[rank])));
  }

  ~ThreadRanks() {
    channels_.clear();
    for (auto& [base, bytes] : memory_) munmap(base, bytes);
  }

  uint32_t size() const { return size_; }
  Channel& channel(uint32_t rank) { return *channels_[rank]; }
  void destroy(uint32_t rank) { channels_[rank].reset(); }

  // The bytes that all ranks together have sent to ranks of other hosts in collectives.
  uint64_t bytes_sent() const {
    uint64_t sum = 0;
    for (const FileDescriptor& socket : counted_) {
      tcp_info info{};
      socklen_t length = sizeof info;
      getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length);
      sum += info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
    }
    return sum;
  }

  // Runs `body` for every rank in a thread of its own and returns when all have finished.
  void run(const std::function<void(uint32_t, Channel&)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < size_; ++rank) threads.emplace_back([&, rank] { body(rank, *channels_[rank]); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  rd_channel_params params(uint32_t rank) const {
    return {RD_ABI,
            size_,
            rank,
            setup_.num_cores,
            setup_.hosts.data(),
            setup_.slot_bytes,
            setup_.chunk_bytes,
            setup_.bucket_bytes,
            setup_.fusion_bytes,
            setup_.max_announced};
  }

  // All ranks of a host use one mapping, so that a sanitizer sees them touch the same memory.
  std::shared_ptr<SharedSegment> segment(uint32_t rank) {
    ronde::Topology topology(params(rank));
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

  GroupSetup setup_;
  uint32_t size_;
  std::vector<FileDescriptor> counted_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<void*> bases_;
  std::vector<std::pair<void*, uint64_t>> memory_;
};

// Returns a call with defaults, to be filled in.
inline rd_call make_call(rd_kind kind, rd_dtype dtype = RD_FLOAT32, rd_op op = RD_SUM) {
  rd_call c{};
  c.kind = kind;
  c.dtype = dtype;
  c.op = op;
  c.peer = -1;
  c.prescale = c.postscale = 1.0;
  c.signature = 1;
  c.description = "test";
  return c;
}

inline std::shared_ptr<Call> run(Channel& channel, const rd_call& params, double remaining_s = 60) {
  auto call = std::make_shared<Call>(params, channel.topology(), Deadline(remaining_s));
  channel.queue().run(call);
  return call;
}

inline std::shared_ptr<Call> submit(Channel& channel, const rd_call& params, double remaining_s = 60) {
  auto call = std::make_shared<Call>(params, channel.topology(), Deadline(remaining_s));
  channel.queue().submit(call);
  return call;
}

inline rd_status wait(Channel&, const std::shared_ptr<Call>& call, double remaining_s = 60) {
  if (!call->wait(Deadline(remaining_s))) return RD_TIMEOUT;
  return rd_status(call->result.status);
}

}  // namespace thread_ranks
