// Messages between pairs of ranks: what meets what, in which order, and what a lost, late or leaving rank ends.
#include <cstdlib>
#include <random>

#include "check.h"
#include "message_ranks.h"

using ronde::CallError;
using namespace message_ranks;

namespace {

const std::vector<std::vector<uint32_t>> kHosts = {{0, 0}, {0, 1}, {0, 0, 0}, {0, 1, 2}, {0, 0, 1}};

uint64_t large_bytes() { return std::getenv("RONDE_TEST_SMALL") != nullptr ? 10'000'000 : 100'000'000; }

}  // namespace

TEST(all_may_send_before_anyone_receives_whatever_the_size) {
  for (const auto& hosts : kHosts) {
    for (uint64_t bytes : {uint64_t(0), uint64_t(1), uint64_t(5000), uint64_t(300'000), large_bytes()}) {
      Ranks all(hosts);
      all.run([&](uint32_t rank, Endpoint& endpoint) {
        std::vector<char> data(bytes, char(rank + 1));
        for (uint32_t to = 0; to < all.size(); ++to) {
          if (to == rank) continue;
          CHECK_EQ(run(endpoint, make(RD_SEND, int(to), 0, data.data(), bytes))->result.status, int(RD_OK));
        }
        std::fill(data.begin(), data.end(), 0);  // a send that has finished no longer reads its memory
        for (uint32_t from = 0; from < all.size(); ++from) {
          if (from == rank) continue;
          CHECK_EQ(run(endpoint, make(RD_RECEIVE, int(from), 0, data.data(), bytes))->result.status, int(RD_OK));
          CHECK(std::all_of(data.begin(), data.end(), [&](char value) { return value == char(from + 1); }));
        }
      });
    }
  }
}

TEST(messages_meet_by_tag_and_keep_their_order) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    all.run([&](uint32_t rank, Endpoint& endpoint) {
      if (rank == 0) {
        for (uint64_t i = 0; i < 100; ++i) CHECK_EQ(send(endpoint, 1, i % 3, i), int(RD_OK));
      } else if (rank == 1) {
        for (uint64_t tag : {2, 0, 1})
          for (uint64_t i = tag; i < 100; i += 3) CHECK_EQ(receive(endpoint, 0, tag), int64_t(i));
      }
    });
  }
}

TEST(a_receive_from_any_rank_says_who_sent_it) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    all.run([&](uint32_t rank, Endpoint& endpoint) {
      constexpr uint64_t kEach = 50;
      if (rank != 0) {
        for (uint64_t i = 0; i < kEach; ++i) CHECK_EQ(send(endpoint, 0, 3, rank * 1000 + i), int(RD_OK));
        return;
      }
      std::vector<uint64_t> next(all.size(), 0);
      for (uint64_t i = 0; i < kEach * (all.size() - 1); ++i) {
        int source = -1;
        int64_t value = receive(endpoint, RD_ANY_SOURCE, 3, &source);
        CHECK_EQ(value, int64_t(uint64_t(source) * 1000 + next[uint32_t(source)]++));
      }
    });
  }
}

TEST(a_message_that_does_not_fit_is_refused_and_the_next_arrives) {
  for (const auto& hosts : kHosts) {
    for (bool receiver_first : {false, true}) {
      Ranks all(hosts);
      for (uint64_t bytes : {8, 1'000'000}) {
        std::vector<char> sent(bytes, 1), out(bytes, 0);
        rd_message wrong = make(RD_SEND, 1, 0, sent.data(), bytes), right = wrong;
        wrong.signature = 5;
        rd_message wanted = make(RD_RECEIVE, 0, 0, out.data(), bytes);
        std::shared_ptr<Message> first;
        if (receiver_first) first = submit(all[1], wanted);
        auto both = {submit(all[0], wrong), submit(all[0], right)};
        if (!receiver_first) first = submit(all[1], wanted);
        auto second = submit(all[1], wanted);
        CHECK(all[1].wait(first, Deadline(60)) && all[1].wait(second, Deadline(60)));
        CHECK_EQ(first->result.status, int(RD_MISMATCH));
        CHECK_EQ(first->received_header, std::string("a send"));
        CHECK_EQ(second->result.status, int(RD_OK));
        CHECK_EQ(int(out[bytes - 1]), 1);
        for (auto& message : both) CHECK(all[0].wait(message, Deadline(60)));
      }
    }
  }
}

TEST(a_receive_that_timed_out_has_taken_nothing) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    int source = -1;
    CHECK_EQ(receive(all[1], 0, 0, &source, 0.01), int64_t(-RD_TIMEOUT));
    CHECK_EQ(source, 0);
    uint64_t value = 0;
    auto late = submit(all[1], make(RD_RECEIVE, 0, 0, &value, sizeof value), 0.01);
    CHECK(all[1].wait(late, Deadline(60)));
    CHECK_EQ(late->result.status, int(RD_TIMEOUT));
    CHECK_EQ(send(all[0], 1, 0, 42), int(RD_OK));
    CHECK_EQ(receive(all[1], 0, 0), int64_t(42));
    // Receives end in the middle of the message until one has enough time.
    std::vector<uint64_t> data(large_bytes() / 8), out(data.size());
    for (size_t i = 0; i < data.size(); ++i) data[i] = i;
    auto sent = submit(all[0], make(RD_SEND, 1, 0, data.data(), data.size() * 8));
    double remaining_s = 0.0005;
    int status = RD_TIMEOUT;
    for (; status == RD_TIMEOUT; remaining_s *= 2) {
      std::fill(out.begin(), out.end(), 0);
      status = run(all[1], make(RD_RECEIVE, 0, 0, out.data(), out.size() * 8), remaining_s)->result.status;
    }
    CHECK_EQ(status, int(RD_OK));
    CHECK(out == data);
    CHECK(all[0].wait(sent, Deadline(60)));
  }
}

TEST(a_send_that_timed_out_in_the_middle_leaves_whole_messages) {
  // Nobody empties the link: the other side has no endpoint yet.
  for (bool local : {true, false}) {
    auto [one, other] = local ? unix_pair() : thread_ranks::tcp_pair();
    FileDescriptor memory(local ? memfd_create("link", MFD_CLOEXEC) : -1);
    if (local) CHECK_EQ(ftruncate(memory.get(), sizeof(ronde::LinkMemory)), 0);
    Endpoint sender(0, 2, ronde::spin_policy(2, 2)), receiver(1, 2, ronde::spin_policy(2, 2));
    sender.add_link(1, true, std::move(one), memory.get());
    std::vector<uint64_t> data(4'000'000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = i;
    auto late = run(sender, make(RD_SEND, 1, 0, data.data(), data.size() * 8), 0.05);
    CHECK_EQ(late->result.status, int(RD_TIMEOUT));
    CHECK_EQ(late->result.member, 1);
    std::vector<uint64_t> sent = data, out(data.size());
    std::fill(data.begin(), data.end(), 0);  // the caller has its memory back
    uint64_t value = 42;
    auto next = submit(sender, make(RD_SEND, 1, 0, &value, sizeof value));
    receiver.add_link(0, false, std::move(other), memory.get());
    CHECK_EQ(run(receiver, make(RD_RECEIVE, 0, 0, out.data(), out.size() * 8))->result.status, int(RD_OK));
    CHECK(out == sent);
    CHECK_EQ(receive(receiver, 0, 0), int64_t(42));
    CHECK(sender.wait(next, Deadline(60)));
  }
}

TEST(a_lost_rank_ends_what_involves_it_and_nothing_else) {
  for (const auto& hosts : kHosts) {
    if (hosts.size() < 3) continue;
    for (bool noticed_by_link : {false, true}) {
      Ranks all(hosts);
      CHECK_EQ(send(all[2], 0, 9, 1), int(RD_OK));
      uint64_t from_lost = 0, from_other = 0, from_any = 0;
      auto lost = submit(all[0], make(RD_RECEIVE, 2, 0, &from_lost, 8));
      auto other = submit(all[0], make(RD_RECEIVE, 1, 0, &from_other, 8));
      auto any = submit(all[0], make(RD_RECEIVE, RD_ANY_SOURCE, 1, &from_any, 8));
      if (noticed_by_link) {
        all.destroy(2);
      } else {
        all[0].lose_peer(2);
      }
      CHECK(all[0].wait(lost, Deadline(60)));
      CHECK_EQ(lost->result.status, int(RD_PEER_LOST));
      CHECK_EQ(lost->result.member, 2);
      CHECK_EQ(send(all[0], 2, 0, 1), int(RD_PEER_LOST));
      CHECK_EQ(receive(all[0], 2, 0), int64_t(-RD_PEER_LOST));
      CHECK_EQ(receive(all[0], 2, 9), int64_t(1));  // what it had sent before is still there
      CHECK_EQ(receive(all[0], 2, 9), int64_t(-RD_PEER_LOST));
      CHECK_EQ(send(all[1], 0, 0, 5), int(RD_OK));
      CHECK_EQ(send(all[1], 0, 1, 6), int(RD_OK));
      CHECK(all[0].wait(other, Deadline(60)) && all[0].wait(any, Deadline(60)));
      CHECK_EQ(other->result.status, int(RD_OK));
      CHECK_EQ(any->result.status, int(RD_OK));
      CHECK_EQ(from_other + from_any, uint64_t(11));
    }
  }
}

TEST(a_rank_that_leaves_has_delivered_everything) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    uint64_t bytes = large_bytes() / 10;
    all.run([&](uint32_t rank, Endpoint& endpoint) {
      std::vector<char> data(bytes, char(rank + 1));
      if (rank == 0) {
        std::vector<std::shared_ptr<Message>> sent;
        for (uint32_t to = 1; to < all.size(); ++to)
          for (int i = 0; i < 3; ++i) sent.push_back(submit(endpoint, make(RD_SEND, int(to), 0, data.data(), bytes)));
        CHECK(endpoint.leave(Deadline(60)));
        for (auto& message : sent) CHECK_EQ(message->result.status, int(RD_OK));
        CHECK_EQ(send(endpoint, 1, 0, 1), int(RD_CLOSED));
        all.destroy(0);
        return;
      }
      for (int i = 0; i < 3; ++i) {
        CHECK_EQ(run(endpoint, make(RD_RECEIVE, 0, 0, data.data(), bytes))->result.status, int(RD_OK));
        CHECK_EQ(int(data[bytes - 1]), 1);
      }
      CHECK_EQ(run(endpoint, make(RD_RECEIVE, 0, 0, data.data(), bytes))->result.status, int(RD_PEER_LOST));
    });
  }
}

TEST(a_rank_that_leaves_has_delivered_what_waited_for_its_window) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    std::vector<char> data(200'000, 1), out(data.size());
    rd_message params = make(RD_SEND, 1, 0, data.data(), data.size());
    params.window_bytes = 300'000;
    std::vector<std::shared_ptr<Message>> sent;
    for (int i = 0; i < 10; ++i) sent.push_back(submit(all[0], params));
    CHECK(!all[0].leave(Deadline(0)));
    std::thread leaving([&] { CHECK(all[0].leave(Deadline(60))); });
    for (int i = 0; i < 10; ++i)
      CHECK_EQ(run(all[1], make(RD_RECEIVE, 0, 0, out.data(), out.size()))->result.status, int(RD_OK));
    leaving.join();
    for (auto& message : sent) CHECK_EQ(message->result.status, int(RD_OK));
    CHECK_EQ(receive(all[1], 0, 0), int64_t(-RD_PEER_LOST));
  }
}

TEST(a_send_waits_while_its_window_is_full_and_others_pass) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    std::vector<char> data(400'000, 1), out(data.size());
    rd_message params = make(RD_SEND, 1, 0, data.data(), data.size());
    params.window_bytes = 1'000'000;
    CHECK_EQ(run(all[0], params)->result.status, int(RD_OK));
    CHECK_EQ(run(all[0], params)->result.status, int(RD_OK));
    auto refused = run(all[0], params, 0.05);
    CHECK_EQ(refused->result.status, int(RD_TIMEOUT));
    CHECK_EQ(refused->result.detail, ENOBUFS);
    auto third = submit(all[0], params);
    rd_message elsewhere = params;
    elsewhere.context = 8;
    CHECK_EQ(run(all[0], elsewhere)->result.status, int(RD_OK));  // another context has a window of its own
    CHECK_EQ(int(third->finished.load()), 0);
    for (int i = 0; i < 3; ++i)
      CHECK_EQ(run(all[1], make(RD_RECEIVE, 0, 0, out.data(), out.size()))->result.status, int(RD_OK));
    CHECK(all[0].wait(third, Deadline(60)));
    CHECK_EQ(third->result.status, int(RD_OK));
    // One message may be larger than the window, and small ones never wait for a report that does not come.
    for (int i = 0; i < 5; ++i) {
      std::vector<char> larger(3'000'000, 2), got(larger.size());
      rd_message large = make(RD_SEND, 1, 0, larger.data(), larger.size());
      large.window_bytes = 1'000'000;
      CHECK_EQ(run(all[0], large)->result.status, int(RD_OK));
      CHECK_EQ(run(all[1], make(RD_RECEIVE, 0, 0, got.data(), got.size()))->result.status, int(RD_OK));
      CHECK_EQ(send(all[0], 1, 0, 1), int(RD_OK));
      CHECK_EQ(receive(all[1], 0, 0), int64_t(1));
    }
  }
}

TEST(a_send_that_gives_up_its_turn_lets_a_smaller_one_pass) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    std::vector<char> data(400'000);
    uint64_t value = 5;
    rd_message large = make(RD_SEND, 1, 0, data.data(), data.size()), small = make(RD_SEND, 1, 1, &value, sizeof value);
    large.window_bytes = small.window_bytes = 1'000'000;
    for (int i = 0; i < 2; ++i) CHECK_EQ(run(all[0], large)->result.status, int(RD_OK));
    auto refused = submit(all[0], large, 0.05), passes = submit(all[0], small);
    CHECK(all[0].wait(refused, Deadline(60)));
    CHECK_EQ(refused->result.status, int(RD_TIMEOUT));
    CHECK_EQ(receive(all[1], 0, 1), int64_t(5));
    CHECK(all[0].wait(passes, Deadline(60)));
  }
}

TEST(a_receive_of_any_size_gets_the_header_and_new_memory) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    for (int from : {0, 1}) {  // also from itself
      for (uint64_t bytes : {0, 3, 2'000'000}) {
        std::vector<char> data(bytes, 9);
        rd_message sent = make(RD_SEND, 1, 0, data.data(), bytes);
        std::string header(bytes == 3 ? 0 : 1000, 'h');
        sent.header = header.data();
        sent.header_bytes = header.size();
        auto sending = submit(all[uint32_t(from)], sent);
        rd_message wanted = make(RD_RECEIVE, RD_ANY_SOURCE, 0, nullptr, 0);
        wanted.flags = RD_ANY_SIZE;
        auto got = run(all[1], wanted);
        CHECK_EQ(got->result.status, int(RD_OK));
        CHECK_EQ(got->result.member, from);
        CHECK_EQ(got->received_bytes, bytes);
        CHECK_EQ(got->received_header, header);
        const char* received = got->received_data;
        CHECK(std::all_of(received, received + bytes, [](char value) { return value == 9; }));
        CHECK(all[uint32_t(from)].wait(sending, Deadline(60)));
      }
    }
  }
}

TEST(received_data_stays_until_it_is_freed_however_much_there_is_and_when_its_sender_is_gone) {
  Ranks all({0, 0});
  constexpr uint64_t kBytes = ronde::LinkMemory::kAreaBytes / 5 * 2;  // two fit into the memory of the link
  std::vector<char> data(kBytes);
  auto send_and_receive = [&](char value) {
    data[0] = data[kBytes - 1] = value;
    rd_message sent = make(RD_SEND, 1, 0, data.data(), kBytes);
    sent.header = "h";
    sent.header_bytes = 1;
    auto sending = submit(all[0], sent);
    rd_message wanted = make(RD_RECEIVE, RD_ANY_SOURCE, 0, nullptr, 0);
    wanted.flags = RD_ANY_SIZE;
    auto got = run(all[1], wanted);
    CHECK_EQ(got->result.status, int(RD_OK));
    CHECK(all[0].wait(sending, Deadline(60)));
    return got;
  };
  auto holds = [&](const std::shared_ptr<Message>& got, char value) {
    return got->received_bytes == kBytes && got->received_data[0] == value && got->received_data[kBytes - 1] == value;
  };
  std::vector<std::shared_ptr<Message>> kept;
  for (char value = 1; value <= 4; ++value) kept.push_back(send_and_receive(value));
  const char* freed = kept[1]->received_data;
  kept[1] = nullptr;
  kept.push_back(send_and_receive(5));
  CHECK(kept[4]->received_data == freed);
  all.destroy(0);
  for (size_t i : {0, 2, 3, 4}) CHECK(holds(kept[i], char(i + 1)));
  all.destroy(1);
  CHECK(holds(kept[0], 1));
}

TEST(data_in_the_memory_of_a_link_is_copied_for_a_receive_of_its_size) {
  Ranks all({0, 0});
  std::vector<char> data(1'000'000, 7), received(data.size());
  rd_message sent = make(RD_SEND, 1, 0, data.data(), data.size());
  sent.header = "h";
  sent.header_bytes = 1;
  auto sending = submit(all[0], sent);
  CHECK_EQ(run(all[1], make(RD_RECEIVE, 0, 0, received.data(), received.size()))->result.status, int(RD_OK));
  CHECK(received == data);
  CHECK(all[0].wait(sending, Deadline(60)));
}

TEST(an_expected_message_without_a_receive_is_dropped) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    uint64_t value = 1;
    rd_message reply = make(RD_SEND, 1, 5, &value, sizeof value);
    reply.flags = RD_EXPECTED;
    CHECK_EQ(run(all[0], reply)->result.status, int(RD_OK));
    CHECK_EQ(send(all[0], 1, 6, 2), int(RD_OK));
    CHECK_EQ(receive(all[1], 0, 6), int64_t(2));  // so the first message has arrived
    uint64_t got = 0;
    auto waiting = submit(all[1], make(RD_RECEIVE, 0, 5, &got, sizeof got));
    value = 3;
    CHECK_EQ(run(all[0], reply)->result.status, int(RD_OK));
    CHECK(all[1].wait(waiting, Deadline(60)));
    CHECK_EQ(got, uint64_t(3));
  }
}

TEST(losses_are_reported_after_the_messages_and_once) {
  for (const auto& hosts : kHosts) {
    if (hosts.size() < 3) continue;
    Ranks all(hosts);
    CHECK_EQ(send(all[1], 0, 0, 7), int(RD_OK));
    CHECK(all[1].leave(Deadline(60)));
    all[0].lose_peer(1);
    rd_message wanted = make(RD_RECEIVE, RD_ANY_SOURCE, 0, nullptr, 0);
    wanted.flags = RD_ANY_SIZE | RD_REPORT_LOSSES;
    auto first = run(all[0], wanted), second = run(all[0], wanted);
    CHECK_EQ(first->result.status, int(RD_OK));
    CHECK_EQ(second->result.status, int(RD_PEER_LOST));
    CHECK_EQ(second->result.member, 1);
    auto third = submit(all[0], wanted);
    all.destroy(2);
    all[0].lose_peer(2);
    CHECK(all[0].wait(third, Deadline(60)));
    CHECK_EQ(third->result.status, int(RD_PEER_LOST));
    CHECK_EQ(third->result.member, 2);
    CHECK_EQ(run(all[0], wanted, 0.01)->result.status, int(RD_TIMEOUT));
    // A receive from any source ends when nobody is left who could send.
    CHECK_EQ(receive(all[0], RD_ANY_SOURCE, 1, nullptr, 0.01), int64_t(-RD_TIMEOUT));
    uint64_t value;
    auto any = submit(all[0], make(RD_RECEIVE, RD_ANY_SOURCE, 1, &value, sizeof value));
    all[0].end_any_source(7, 2);
    CHECK(all[0].wait(any, Deadline(60)));
    CHECK_EQ(any->result.status, int(RD_PEER_LOST));
    CHECK_EQ(receive(all[0], RD_ANY_SOURCE, 1), int64_t(-RD_PEER_LOST));
  }
}

TEST(an_ended_context_ends_its_messages_and_drops_what_arrives) {
  for (const auto& hosts : kHosts) {
    Ranks all(hosts);
    uint64_t value = 1;
    auto waiting = submit(all[1], make(RD_RECEIVE, 0, 4, &value, sizeof value));
    CHECK_EQ(send(all[0], 1, 0, 1), int(RD_OK));
    all[1].end_context(7);
    CHECK(all[1].wait(waiting, Deadline(60)));
    CHECK_EQ(waiting->result.status, int(RD_CLOSED));
    CHECK_EQ(receive(all[1], 0, 0), int64_t(-RD_CLOSED));
    for (int i = 0; i < 10; ++i) {  // more than its window: what is dropped is reported as taken
      std::vector<char> data(400'000);
      rd_message params = make(RD_SEND, 1, 0, data.data(), data.size());
      params.window_bytes = 500'000;
      CHECK_EQ(run(all[0], params)->result.status, int(RD_OK));
    }
    rd_message other = make(RD_SEND, 1, 0, &value, sizeof value);
    other.context = 8;
    auto sent = submit(all[0], other);
    other = make(RD_RECEIVE, 0, 0, &value, sizeof value);
    other.context = 8;
    CHECK_EQ(run(all[1], other)->result.status, int(RD_OK));
    CHECK(all[0].wait(sent, Deadline(60)));
  }
}

TEST(closing_ends_every_wait) {
  Ranks all({0, 0});
  uint64_t value;
  auto submitted = submit(all[0], make(RD_RECEIVE, 1, 0, &value, sizeof value));
  std::thread waiting([&] { CHECK_EQ(receive(all[0], 1, 1), int64_t(-RD_CLOSED)); });
  int32_t missing = -1;
  rd_current_call current{};
  while (current.start_ns == 0) all[0].get_current_message(7, &current, &missing);
  CHECK_EQ(missing, 1);
  CHECK_EQ(std::string(current.description), std::string("a receive"));
  all[0].close();
  waiting.join();
  CHECK_EQ(submitted->result.status, int(RD_CLOSED));
  CHECK_EQ(send(all[0], 1, 0, 1), int(RD_CLOSED));
}

TEST(an_invalid_message_is_refused) {
  Ranks all({0, 0});
  uint64_t value = 0;
  rd_message good = make(RD_SEND, 1, 0, &value, sizeof value);
  std::vector<rd_message> wrong(5, good);
  wrong[0].kind = RD_ALLREDUCE;
  wrong[1].peer = 2;
  wrong[2].peer = RD_ANY_SOURCE;
  wrong[3].data = nullptr;
  wrong[4].flags = RD_ANY_SIZE;
  for (const rd_message& params : wrong) {
    rd_status status = RD_OK;
    try {
      run(all[0], params);
    } catch (const CallError& error) {
      status = error.status;
    }
    CHECK_EQ(status, RD_BAD_CALL);
  }
  CHECK_EQ(run(all[0], good)->result.status, int(RD_OK));
}

TEST(bytes_that_are_no_messages_end_the_link_and_harm_nobody) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    auto [one, other] = thread_ranks::tcp_pair();
    Endpoint endpoint(0, 2, ronde::spin_policy(2, 2));
    // Words that begin like a frame of a message, with what follows at random.
    std::vector<uint64_t> words(2 + random() % 200);
    for (uint64_t& word : words) word = random() % 3 == 0 ? random() % 100 : (uint64_t(random()) << 32 | random());
    if (seed % 2 == 0) words[0] = 1 + (uint64_t(random() % 16) << 32);
    if (seed % 4 == 0) words[1] = 7;
    CHECK(::send(other.get(), words.data(), words.size() * 8, 0) == ssize_t(words.size() * 8));
    endpoint.add_link(1, false, std::move(one), -1);
    other = FileDescriptor();
    uint64_t value;
    rd_message wanted = make(RD_RECEIVE, 1, 99, &value, sizeof value);
    CHECK_EQ(run(endpoint, wanted)->result.status, int(RD_PEER_LOST));
  }
}

TEST(memory_of_messages_is_kept_for_the_next_ones) {
  using ronde::allocate_message_memory;
  using ronde::free_message_memory;
  free_message_memory(nullptr);
  std::vector<char*> many;  // more than is kept, so that nothing of other tests is
  for (int i = 0; i < 60; ++i) many.push_back(allocate_message_memory(10'000'000));
  for (char* memory : many) free_message_memory(memory);
  for (uint64_t bytes : {uint64_t(0), uint64_t(1), uint64_t(100'000), uint64_t(3'000'000)}) {
    char* first = allocate_message_memory(bytes);
    CHECK_EQ(uint64_t(first) % 64, uint64_t(0));
    if (bytes > 0) first[0] = first[bytes - 1] = 1;
    char* second = allocate_message_memory(bytes);
    CHECK(first != second);
    free_message_memory(first);
    char* third = allocate_message_memory(bytes - bytes / 10);
    if (bytes >= 100'000) CHECK(third == first);
    free_message_memory(second);
    free_message_memory(third);
  }
}

TEST(many_threads_of_all_ranks_exchange_random_messages) {
  for (const auto& hosts : {std::vector<uint32_t>{0, 0, 0}, {0, 1, 2}, {0, 0, 1}}) {
    Ranks all(hosts);
    constexpr uint32_t kThreads = 3, kMessages = 60;
    all.run([&](uint32_t rank, Endpoint& endpoint) {
      // Thread t of each rank exchanges messages with thread t of all others; the tag is t.
      std::vector<std::thread> threads;
      for (uint32_t tag = 0; tag < kThreads; ++tag) {
        threads.emplace_back([&, tag] {
          auto size_of = [&](uint32_t from, uint32_t to, uint32_t i) {
            std::mt19937 random(((from * 10 + to) * 10 + tag) * 1000 + i);
            return size_t(1) << random() % 19;
          };
          std::vector<std::shared_ptr<Message>> sent;
          std::deque<std::vector<uint32_t>> kept;
          for (uint32_t i = 0; i < kMessages; ++i) {
            for (uint32_t to = 0; to < all.size(); ++to) {
              if (to == rank) continue;
              auto& data = kept.emplace_back(size_of(rank, to, i), i * 100 + rank);
              rd_message params = make(RD_SEND, int(to), tag, data.data(), data.size() * 4);
              if (i % 2 == 0) {
                sent.push_back(submit(endpoint, params));
              } else {
                CHECK_EQ(run(endpoint, params)->result.status, int(RD_OK));
                kept.pop_back();
              }
            }
          }
          for (uint32_t from = 0; from < all.size(); ++from) {
            if (from == rank) continue;
            for (uint32_t i = 0; i < kMessages; ++i) {
              std::vector<uint32_t> out(size_of(from, rank, i));
              auto got = run(endpoint, make(RD_RECEIVE, int(from), tag, out.data(), out.size() * 4));
              CHECK_EQ(got->result.status, int(RD_OK));
              CHECK(std::all_of(out.begin(), out.end(), [&](uint32_t value) { return value == i * 100 + from; }));
            }
          }
          for (auto& message : sent) CHECK(endpoint.wait(message, Deadline(60)));
        });
      }
      for (std::thread& thread : threads) thread.join();
      CHECK(endpoint.leave(Deadline(60)));
    });
  }
}
