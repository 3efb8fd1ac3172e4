// How headers are matched between hosts: a digest when they are equal, all of them when they differ.
#include <atomic>
#include <numeric>

#include "check.h"
#include "thread_ranks.h"

using namespace thread_ranks;
using ronde::CallHeader;
using ronde::CallMatcher;
using ronde::MatchResult;

namespace {

struct Outcome {
  MatchResult result;
  std::vector<CallHeader> headers;
};

// Matches one header per host, each host having one member. Returns what each got and the bytes that were sent.
std::pair<std::vector<Outcome>, uint64_t> match(const std::vector<CallHeader>& headers) {
  uint32_t size = uint32_t(headers.size());
  std::vector<uint32_t> hosts(size);
  std::iota(hosts.begin(), hosts.end(), 0);
  std::vector<ronde::Topology> topologies;
  std::vector<std::unique_ptr<ronde::AbortSignal>> signals;
  std::vector<std::unique_ptr<ronde::ChannelEvents>> events;
  std::vector<std::unique_ptr<ronde::Links>> links;
  LinkOpener opener(
      1, true,
      [&](uint32_t member, uint32_t peer, rd_link_kind kind, bool opened_here, auto sockets) {
        links[member]->open(peer, kind, opened_here, std::move(sockets));
      },
      [](uint32_t, const ronde::CallError&) {});
  topologies.reserve(size);
  for (uint32_t rank = 0; rank < size; ++rank) {
    topologies.emplace_back(rd_channel_params{RD_ABI, size, rank, 2, hosts.data(), 4096, 4096, 0, 0, 0});
    signals.push_back(std::make_unique<ronde::AbortSignal>());
    events.push_back(std::make_unique<ronde::ChannelEvents>(opener.events(rank)));
    links.push_back(std::make_unique<ronde::Links>(topologies[rank], nullptr, signals[rank].get(), events[rank].get()));
  }
  std::vector<Outcome> outcomes(size);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const ronde::Topology& topology = topologies[rank];
      ronde::HostBarrier barrier(topology, nullptr);
      Deadline deadline(60);
      std::atomic<int32_t> waiting_for{-1};
      ronde::CallWait wait(topology, nullptr, signals[rank].get(), deadline, false, &waiting_for);
      ronde::ScratchBuffer scratch[3];
      uint32_t slots_used = 0;
      CallMatcher matcher(topology);
      ronde::CallContext context{topology,   nullptr,    barrier,    *links[rank], wait,
                                 scratch[0], scratch[1], scratch[2], slots_used,   matcher.headers()};
      const CallHeader* requested;
      outcomes[rank].headers = matcher.match(context, headers[rank], false);
      outcomes[rank].result = match_headers(outcomes[rank].headers, &requested);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return {std::move(outcomes), opener.bytes_sent()};
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
