// How headers are matched between hosts: a digest when they are equal, all of them when they differ.
#include <atomic>

#include "check.h"
#include "link/tcp_link.h"
#include "thread_ranks.h"

using namespace thread_ranks;
using ronde::CallHeader;
using ronde::CallMatcher;
using ronde::MatchResult;

namespace {

// A link that counts the bytes it sends.
class CountedLink final : public ronde::Link {
 public:
  CountedLink(std::unique_ptr<ronde::Link> link, std::atomic<uint64_t>* count)
      : Link(link->peer()), link_(std::move(link)), count_(count) {}
  size_t try_send(const char* data, size_t bytes) override {
    size_t sent = link_->try_send(data, bytes);
    *count_ += sent;
    return sent;
  }
  size_t try_receive(char* buffer, size_t bytes) override { return link_->try_receive(buffer, bytes); }
  int sending_socket() const override { return link_->sending_socket(); }
  int receiving_socket() const override { return link_->receiving_socket(); }

 private:
  std::unique_ptr<ronde::Link> link_;
  std::atomic<uint64_t>* count_;
};

struct Outcome {
  MatchResult result;
  std::vector<CallHeader> headers;
};

// Matches one header per host, each host having one member. Returns what each got and the bytes that were sent.
std::pair<std::vector<Outcome>, uint64_t> match(const std::vector<CallHeader>& headers) {
  uint32_t size = uint32_t(headers.size());
  std::atomic<uint64_t> sent{0};
  std::vector<std::unique_ptr<ronde::AbortSignal>> signals(size);
  std::vector<std::vector<std::unique_ptr<ronde::Link>>> links(size);
  for (uint32_t rank = 0; rank < size; ++rank) {
    signals[rank] = std::make_unique<ronde::AbortSignal>(std::vector<FileDescriptor>{});
    links[rank].resize(size);
  }
  for (uint32_t a = 0; a < size; ++a) {
    for (uint32_t b = a + 1; b < size; ++b) {
      auto pair = tcp_pair();
      std::vector<FileDescriptor> ends[2];
      ends[0].push_back(std::move(pair.first));
      ends[1].push_back(std::move(pair.second));
      for (int side = 0; side < 2; ++side) {
        uint32_t here = side == 0 ? a : b, there = side == 0 ? b : a;
        links[here][there] = std::make_unique<CountedLink>(
            std::make_unique<ronde::TcpLink>(there, std::move(ends[side]), signals[here].get()), &sent);
      }
    }
  }
  std::vector<uint32_t> hosts(size);
  for (uint32_t rank = 0; rank < size; ++rank) hosts[rank] = rank;
  std::vector<Outcome> outcomes(size);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ronde::Topology topology({RD_ABI, size, rank, 2, hosts.data(), 4096, 4096, 0, 0, 0});
      ronde::HostBarrier barrier(topology, nullptr);
      Deadline deadline(60);
      std::atomic<int32_t> waiting_for{-1};
      ronde::CallWait wait(topology, nullptr, signals[rank].get(), deadline, &waiting_for);
      ronde::ScratchBuffer scratch[3];
      uint32_t slots_used = 0;
      CallMatcher matcher(topology);
      ronde::Group group{topology,   nullptr,    barrier,    links[rank], wait,
                         scratch[0], scratch[1], scratch[2], slots_used,  matcher.headers()};
      const CallHeader* requested;
      outcomes[rank].headers = matcher.match(group, headers[rank], false);
      outcomes[rank].result = match_headers(outcomes[rank].headers, &requested);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return {std::move(outcomes), sent.load()};
}

CallHeader some_header() {
  CallHeader header{};
  header.sequence = 7;
  header.signature = 11;
  header.count = 1000;
  header.kind = RD_ALLREDUCE;
  header.dtype = RD_FLOAT32;
  header.op = RD_SUM;
  header.algorithm = RD_RING;
  header.peer = -1;
  header.prescale = header.postscale = 1.0;
  return header;
}

}  // namespace

TEST(equal_headers_travel_as_a_digest) {
  for (uint32_t hosts : {2, 3, 5, 8, 13}) {
    auto [outcomes, sent] = match(std::vector<CallHeader>(hosts, some_header()));
    for (const Outcome& outcome : outcomes) CHECK(outcome.result == MatchResult::kMatch);
    uint32_t steps = 0;
    while ((1u << steps) < hosts) ++steps;
    CHECK_EQ(sent, uint64_t(hosts) * steps * 24);
  }
}

TEST(any_difference_is_known_to_every_host_with_the_headers_of_all) {
  std::vector<std::function<void(CallHeader&)>> changes = {
      [](CallHeader& header) { header.sequence = 8; },     [](CallHeader& header) { header.signature = 12; },
      [](CallHeader& header) { header.count = 1001; },     [](CallHeader& header) { header.bucket_offset = 64; },
      [](CallHeader& header) { header.kind = RD_REDUCE; }, [](CallHeader& header) { header.dtype = RD_INT32; },
      [](CallHeader& header) { header.op = RD_MAX; },      [](CallHeader& header) { header.algorithm = RD_DOUBLING; },
      [](CallHeader& header) { header.peer = 0; },         [](CallHeader& header) { header.in_bucket = 1; },
      [](CallHeader& header) { header.prescale = 0.5; },   [](CallHeader& header) { header.postscale = 0.5; }};
  for (const auto& change : changes) {
    for (uint32_t hosts : {2, 5}) {
      for (uint32_t odd = 0; odd < hosts; ++odd) {
        std::vector<CallHeader> headers(hosts, some_header());
        change(headers[odd]);
        auto [outcomes, sent] = match(headers);
        for (const Outcome& outcome : outcomes) {
          CHECK(outcome.result == MatchResult::kMismatch);
          CHECK_EQ(outcome.headers.size(), size_t(hosts));
          for (uint32_t host = 0; host < hosts; ++host)
            CHECK_EQ(std::memcmp(&outcome.headers[host], &headers[host], sizeof(CallHeader)), 0);
        }
      }
    }
  }
}

TEST(members_may_differ_in_what_they_give_to_an_allgather_and_a_joined_one_learns_what_the_others_ask_for) {
  std::vector<CallHeader> headers(5, some_header());
  for (uint32_t host = 0; host < 5; ++host) {
    headers[host].kind = RD_ALLGATHER;
    headers[host].count = host;
  }
  for (const Outcome& outcome : match(headers).first) CHECK(outcome.result == MatchResult::kMatch);
  for (CallHeader& header : headers) header = some_header();
  headers[3] = CallHeader{};
  headers[3].kind = RD_JOIN;
  headers[3].sequence = 7;
  for (const Outcome& outcome : match(headers).first) {
    CHECK(outcome.result == MatchResult::kMatch);
    CHECK_EQ(outcome.headers.size(), size_t(5));
  }
}
