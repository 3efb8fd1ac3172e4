// Ranks as threads: channels among members on imaginary hosts, over shared memory and real loopback sockets.
#pragma once

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
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
  uint32_t num_sockets = 2;  // of a ring's link
  uint32_t num_cores = 2;
  uint64_t fusion_bytes = 1 << 20;
  uint32_t max_announced = 0;  // ids of announced calls
  bool opens_links = true;     // whether calls get the links that they ask for
  bool counts_bytes = false;   // whether bytes_sent() is wanted; copies of all sockets are kept for that
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

// Does for the channels of this process what the ranks' control threads and the coordinator do for real ones: it opens
// the links that calls ask for, and passes aborts on. The number of a channel in the events is its member index.
class LinkOpener {
 public:
  using Open = std::function<void(uint32_t member, uint32_t peer, rd_link_kind kind, bool opened_here,
                                  std::vector<FileDescriptor> sockets)>;
  using Abort = std::function<void(uint32_t from_member, const ronde::CallError& error)>;

  // Both functions are called in a thread of this object, one at a time.
  LinkOpener(uint32_t ring_sockets, bool counts_bytes, Open open, Abort abort)
      : ring_sockets_(ring_sockets), counts_bytes_(counts_bytes), open_(std::move(open)), abort_(std::move(abort)) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) throw std::runtime_error("no sockets");
    reader_ = FileDescriptor(ends[0]);
    writer_ = FileDescriptor(ends[1]);
    thread_ = std::thread([this] { serve(); });
  }

  ~LinkOpener() { stop(); }

  // Called before the channels are destroyed. Idempotent.
  void stop() {
    if (!thread_.joinable()) return;
    rd_event end{};
    end.kind = kStop;
    while (write(writer_.get(), &end, sizeof end) < 0) std::this_thread::yield();
    thread_.join();
  }

  int socket() const { return writer_.get(); }
  ronde::ChannelEvents events(uint32_t member) const { return {FileDescriptor(dup(writer_.get())), member}; }
  uint32_t num_links() const { return num_links_.load(); }

  // The bytes that were sent over all links together.
  uint64_t bytes_sent() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t sum = 0;
    for (const FileDescriptor& socket : counted_) {
      tcp_info info{};
      socklen_t length = sizeof info;
      getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length);
      sum += info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
    }
    return sum;
  }

 private:
  static constexpr int32_t kStop = -1;

  void serve() {
    rd_event event;
    while (read(reader_.get(), &event, sizeof event) == ssize_t(sizeof event) && event.kind != kStop) {
      auto from = uint32_t(event.channel);
      if (event.kind == RD_CHANNEL_ABORTED) {
        abort_(from, {rd_status(event.status), event.member, event.detail});
        continue;
      }
      auto kind = rd_link_kind(event.status);
      std::vector<FileDescriptor> here, there;
      for (uint32_t i = 0; i < (kind == RD_LINK_RING ? ring_sockets_ : 1); ++i) {
        auto [one, other] = tcp_pair();
        if (counts_bytes_) {
          std::lock_guard<std::mutex> lock(mutex_);
          counted_.emplace_back(dup(one.get()));
        }
        here.push_back(std::move(one));
        there.push_back(std::move(other));
      }
      ++num_links_;
      open_(from, uint32_t(event.member), kind, true, std::move(here));
      open_(uint32_t(event.member), from, kind, false, std::move(there));
    }
  }

  const uint32_t ring_sockets_;
  const bool counts_bytes_;
  const Open open_;
  const Abort abort_;
  FileDescriptor reader_, writer_;
  std::mutex mutex_;  // guards the next one
  std::vector<FileDescriptor> counted_;
  std::atomic<uint32_t> num_links_{0};
  std::thread thread_;
};

class ThreadRanks {
 public:
  explicit ThreadRanks(const GroupSetup& setup)
      : setup_(setup),
        size_(uint32_t(setup.hosts.size())),
        links_(
            setup.num_sockets, setup.counts_bytes,
            [this](uint32_t member, uint32_t peer, rd_link_kind kind, bool opened_here, auto sockets) {
              std::lock_guard<std::mutex> lock(mutex_);
              if (channels_[member] != nullptr && setup_.opens_links)
                channels_[member]->open_link(peer, kind, opened_here, std::move(sockets));
            },
            [this](uint32_t from, const ronde::CallError& error) {
              std::lock_guard<std::mutex> lock(mutex_);
              for (uint32_t member = 0; member < size_; ++member)
                if (member != from && channels_[member] != nullptr) channels_[member]->abort(error, false);
            }) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t rank = 0; rank < size_; ++rank)
      channels_.push_back(std::make_unique<Channel>(ronde::Topology(params(rank)), segment(rank), links_.events(rank)));
  }

  ~ThreadRanks() {
    links_.stop();
    channels_.clear();
    for (auto& [base, bytes] : memory_) munmap(base, bytes);
  }

  uint32_t size() const { return size_; }
  Channel& channel(uint32_t rank) { return *channels_[rank]; }
  void destroy(uint32_t rank) {
    std::unique_ptr<Channel> destroyed;  // after the lock
    std::lock_guard<std::mutex> lock(mutex_);
    destroyed.swap(channels_[rank]);
  }

  // Links in one direction that were opened between hosts, and the bytes that were sent over them.
  uint32_t num_links() const { return links_.num_links(); }
  uint64_t bytes_sent() { return links_.bytes_sent(); }

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
  std::mutex mutex_;  // guards the channels from being destroyed while they get links
  std::vector<std::unique_ptr<Channel>> channels_;
  LinkOpener links_;  // after the channels: its thread uses them
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
