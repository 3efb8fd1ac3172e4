// Endpoints as ranks: messages among members on imaginary hosts, over shared memory and real loopback sockets.
#pragma once

#include <sys/mman.h>

#include "endpoint.h"
#include "thread_ranks.h"

namespace message_ranks {

using ronde::Deadline;
using ronde::Endpoint;
using ronde::FileDescriptor;
using ronde::Message;

constexpr uint64_t kWindow = 1 << 30;

inline std::pair<FileDescriptor, FileDescriptor> unix_pair() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) throw std::runtime_error("no Unix sockets");
  return {FileDescriptor(sockets[0]), FileDescriptor(sockets[1])};
}

// Ranks on imaginary hosts, each with an endpoint, and links between all of them.
class Ranks {
 public:
  explicit Ranks(const std::vector<uint32_t>& hosts) : size_(uint32_t(hosts.size())) {
    for (uint32_t rank = 0; rank < size_; ++rank)
      endpoints_.push_back(std::make_unique<Endpoint>(rank, size_, ronde::spin_policy(size_, 2)));
    for (uint32_t from = 0; from < size_; ++from) {
      for (uint32_t to = 0; to < size_; ++to) {
        if (from == to) continue;
        bool local = hosts[from] == hosts[to];
        auto [one, other] = local ? unix_pair() : thread_ranks::tcp_pair();
        FileDescriptor memory(local ? memfd_create("link", MFD_CLOEXEC) : -1);
        if (local && ftruncate(memory.get(), sizeof(ronde::LinkMemory)) != 0) throw std::runtime_error("no memory");
        endpoints_[from]->add_link(to, true, std::move(one), memory.get());
        endpoints_[to]->add_link(from, false, std::move(other), memory.get());
      }
    }
  }

  Endpoint& operator[](uint32_t rank) { return *endpoints_[rank]; }
  uint32_t size() const { return size_; }
  void destroy(uint32_t rank) { endpoints_[rank].reset(); }

  // Runs `body` for every rank in a thread of its own and returns when all have finished.
  void run(const std::function<void(uint32_t, Endpoint&)>& body) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < size_; ++rank) threads.emplace_back([&, rank] { body(rank, *endpoints_[rank]); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  uint32_t size_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

inline rd_message make(rd_kind kind, int peer, uint64_t tag, void* data, uint64_t bytes) {
  rd_message m{};
  m.context = 7;
  m.kind = kind;
  m.peer = peer;
  m.tag = tag;
  m.window_bytes = kWindow;
  m.description = kind == RD_SEND ? "a send" : "a receive";
  m.data = data;
  m.bytes = bytes;
  return m;
}

inline std::shared_ptr<Message> run(Endpoint& endpoint, const rd_message& params, double remaining_s = 60) {
  auto message = std::make_shared<Message>(params, endpoint.num_ranks(), Deadline(remaining_s));
  endpoint.run(message);
  return message;
}

inline std::shared_ptr<Message> submit(Endpoint& endpoint, const rd_message& params, double remaining_s = 60) {
  auto message = std::make_shared<Message>(params, endpoint.num_ranks(), Deadline(remaining_s));
  endpoint.submit(message);
  return message;
}

inline int send(Endpoint& endpoint, int to, uint64_t tag, uint64_t value, double remaining_s = 60) {
  return run(endpoint, make(RD_SEND, to, tag, &value, sizeof value), remaining_s)->result.status;
}

// The received number; -status when there is none.
inline int64_t receive(Endpoint& endpoint, int from, uint64_t tag, int* source = nullptr, double remaining_s = 60) {
  uint64_t value = 0;
  auto message = run(endpoint, make(RD_RECEIVE, from, tag, &value, sizeof value), remaining_s);
  if (source != nullptr) *source = message->result.member;
  return message->result.status == RD_OK ? int64_t(value) : -message->result.status;
}

}  // namespace message_ranks
