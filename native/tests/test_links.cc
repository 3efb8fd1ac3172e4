// Links between hosts: opened by the first call that sends over them, and by no other.
#include <fcntl.h>

#include <cerrno>

#include "check.h"
#include "thread_ranks.h"

using namespace thread_ranks;

namespace {

struct Sum {
  explicit Sum(size_t count, bool pre_agreed = true) : array(count, 1), span{array.data(), array.data(), count} {
    call = make_call(RD_ALLREDUCE);
    call.spans = &span;
    call.num_spans = 1;
    call.flags = pre_agreed ? RD_PRE_AGREED : 0;
  }

  std::vector<float> array;
  rd_span span;
  rd_call call;
};

constexpr size_t kSmall = 100, kLarge = 300'000;

}  // namespace

TEST(a_channel_opens_links_to_the_neighbours_of_its_algorithms_and_each_once) {
  struct Case {
    std::vector<uint32_t> hosts;
    uint32_t small_links, large_links;  // of all members together, in one direction each
  };
  // Recursive doubling: log2(hosts) partners. Ring: one neighbour to send to.
  for (const Case& expected : {Case{{0, 1}, 2, 2}, Case{{0, 1, 2, 3}, 8, 4}, Case{{0, 0, 0, 0}, 0, 0}}) {
    ThreadRanks all({expected.hosts});
    CHECK_EQ(all.num_links(), 0u);
    for (int i = 0; i < 2; ++i) {
      all.run([&](uint32_t, Channel& channel) {
        Sum sum(kSmall);
        CHECK_EQ(run(channel, sum.call)->result.status, int(RD_OK));
        CHECK_EQ(sum.array[kSmall - 1], float(all.size()));
      });
      CHECK_EQ(all.num_links(), expected.small_links + (i == 0 ? 0 : expected.large_links));
      all.run([&](uint32_t, Channel& channel) {
        Sum sum(kLarge);
        CHECK_EQ(run(channel, sum.call)->result.status, int(RD_OK));
        CHECK_EQ(sum.array[kLarge - 1], float(all.size()));
      });
      CHECK_EQ(all.num_links(), expected.small_links + expected.large_links);
    }
  }
}

TEST(a_link_that_nobody_opens_ends_the_call_at_its_deadline_and_names_the_member) {
  for (uint64_t count : {kSmall, kLarge}) {
    GroupSetup setup{{0, 1}};
    setup.opens_links = false;
    ThreadRanks all(setup);
    Sum sum(count);
    auto call = run(all.channel(0), sum.call, 0.2);
    CHECK_EQ(call->result.status, int(RD_TIMEOUT));
    CHECK_EQ(call->result.member, 1);
  }
}

TEST(an_abort_ends_a_call_that_waits_for_a_link) {
  GroupSetup setup{{0, 1}};
  setup.opens_links = false;
  ThreadRanks all(setup);
  all.run([&](uint32_t rank, Channel& channel) {
    if (rank == 1) return channel.abort({RD_ABORTED});
    Sum sum(kLarge);
    CHECK_EQ(run(channel, sum.call)->result.status, int(RD_ABORTED));
  });
}

TEST(sockets_are_closed_that_come_for_a_closed_channel_a_second_time_or_for_no_link) {
  std::vector<uint32_t> hosts = {0, 1};
  rd_channel_params params{RD_ABI, 2, 0, 2, hosts.data(), 4096, 4096, 0, 0, 0};
  int events[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, events), 0);
  rd_channel* channel;
  CHECK_EQ(rd_open(&params, -1, events[1], 7, &channel), RD_OK);
  auto give = [&](uint32_t member, int32_t kind) {
    auto [one, other] = tcp_pair();
    int fd = dup(one.get());
    rd_status status = rd_open_link(channel, member, kind, 1, &fd, 1);
    return std::pair(status, fcntl(fd, F_GETFD) >= 0);
  };
  CHECK(give(0, RD_LINK_SINGLE) == std::pair(RD_BAD_CALL, false));  // itself
  CHECK(give(2, RD_LINK_SINGLE) == std::pair(RD_BAD_CALL, false));
  CHECK(give(1, RD_NUM_LINK_KINDS) == std::pair(RD_BAD_CALL, false));
  CHECK(give(1, RD_LINK_SINGLE) == std::pair(RD_OK, true));
  CHECK(give(1, RD_LINK_SINGLE) == std::pair(RD_OK, false));
  rd_close(channel);
  CHECK(give(1, RD_LINK_RING) == std::pair(RD_CLOSED, false));
  rd_release(channel);
  for (int fd : events) close(fd);
}

TEST(a_call_that_fails_is_reported_once_and_one_that_was_told_is_not) {
  std::vector<uint32_t> hosts = {0, 1};
  rd_channel_params params{RD_ABI, 2, 0, 2, hosts.data(), 4096, 4096, 0, 0, 0};
  for (bool told : {false, true}) {
    int events[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, events), 0);
    rd_channel* channel;
    CHECK_EQ(rd_open(&params, -1, events[1], 7, &channel), RD_OK);
    if (told) rd_abort(channel, RD_TIMEOUT, 1, 0);
    Sum sum(kSmall);
    rd_result result;
    for (int i = 0; i < 2; ++i) CHECK_EQ(rd_run(channel, &sum.call, &result, 0.05), RD_TIMEOUT);
    CHECK_EQ(result.member, 1);
    rd_release(channel);
    close(events[1]);
    std::vector<rd_event> received;
    rd_event event;
    while (read(events[0], &event, sizeof event) == ssize_t(sizeof event)) received.push_back(event);
    CHECK_EQ(received.size(), told ? 0u : 2u);
    if (!told) {
      CHECK_EQ(received[0].kind, int(RD_LINK_WANTED));
      CHECK_EQ(received[0].channel, uint64_t(7));
      CHECK_EQ(received[0].status, int(RD_LINK_SINGLE));
      CHECK(received[0].deadline_ns > 0 && received[0].deadline_ns < ronde::now_ns());
      CHECK_EQ(received[1].kind, int(RD_CHANNEL_ABORTED));
      CHECK_EQ(received[1].status, int(RD_TIMEOUT));
    }
    for (const rd_event& each : received) CHECK_EQ(each.member, 1);
    close(events[0]);
  }
}
