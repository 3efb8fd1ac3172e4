// Announced calls: members of one host agree in shared memory on what is ready and in which order it runs.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <future>
#include <numeric>
#include <random>
#include <utility>

#include "base/python_signals.h"
#include "check.h"
#include "thread_ranks.h"

using namespace thread_ranks;
using ronde::AnnouncedCalls;

namespace {

const bool kSmall = std::getenv("RONDE_TEST_SMALL") != nullptr;

GroupSetup setup_of(uint32_t size, uint32_t max_announced, uint64_t fusion_bytes = 1 << 20) {
  GroupSetup setup{std::vector<uint32_t>(size, 0)};
  setup.max_announced = max_announced;
  setup.fusion_bytes = fusion_bytes;
  return setup;
}

// An allreduce under an id. Every run of every id has other numbers, so that two runs cannot be taken for each other.
struct Operation {
  Operation(uint32_t id, uint64_t count, float value) : id(id), data(count, value) {
    span = {data.data(), data.data(), data.size()};
    params = make_call(RD_ALLREDUCE);
    params.signature = 100 + id;
    params.spans = &span;
    params.num_spans = 1;
  }
  Operation(const Operation&) = delete;

  void announce(Channel& channel, bool will_wait, double timeout_s = 60) {
    call = std::make_shared<Call>(params, channel.topology(), Deadline(timeout_s));
    call->timeout_s = timeout_s;
    if (on_end.function != nullptr) call->add_callback(on_end);
    agree(channel);
    channel.announced().announce(id, call, will_wait);
  }
  void agree(Channel& channel) const {
    channel.announced().agree(id, "id " + std::to_string(id), Call(params, channel.topology(), Deadline(0)));
  }
  rd_status wait(Channel& channel, double remaining_s = 60) {
    return channel.announced().wait(call, Deadline(remaining_s)) ? rd_status(call->result.status) : RD_TIMEOUT;
  }
  rd_status run(Channel& channel) {
    announce(channel, true);
    return wait(channel);
  }
  void check(float expected) const {
    for (float value : data)
      if (value != expected) return CHECK_EQ(value, expected);
  }

  uint32_t id;
  std::vector<float> data;
  rd_span span;
  rd_call params;
  std::shared_ptr<Call> call;
  ronde::Callback on_end{};
};

// A Python whose signal handler does this whenever the main thread has slept for a moment. Other threads run none.
class SignalHandler {
 public:
  explicit SignalHandler(std::function<int()> handler) {
    function() = std::move(handler);
    static const rd_interpreter interpreter{[] { return 0; }, [] { return function()(); },
                                            [](void** a, void** b, void** c) { *a = *b = *c = nullptr; }, [](int) {}};
    ronde::set_interpreter(&interpreter);
  }
  ~SignalHandler() { ronde::set_interpreter(nullptr); }
  SignalHandler(const SignalHandler&) = delete;

 private:
  static std::function<int()>& function() {
    static std::function<int()> current;
    return current;
  }
};

// Waits for the call in the main thread. Returns also what ended the wait and not the call.
rd_status wait_or_catch(Operation& operation, Channel& channel, int* detail = nullptr) {
  try {
    return operation.wait(channel);
  } catch (const ronde::CallError& error) {
    if (detail != nullptr) *detail = error.detail;
    return error.status;
  }
}

void yield_for(double duration_s) {
  Deadline end(duration_s);
  while (!end.expired()) std::this_thread::yield();
}

float value_of(uint32_t id, uint32_t round) { return float(1 + id % 7 + 10 * (round % 5)); }

}  // namespace

TEST(a_call_runs_when_every_member_has_announced_it_in_whatever_order) {
  for (uint32_t size : {2, 3, 4}) {
    for (bool will_wait : {true, false}) {
      ThreadRanks all(setup_of(size, 8));
      all.run([&](uint32_t rank, Channel& channel) {
        // One rank after the other way round could not run without the log: each would wait for another id.
        std::vector<std::unique_ptr<Operation>> operations;
        for (uint32_t i = 0; i < 5; ++i) {
          uint32_t id = rank % 2 == 0 ? i : 4 - i;
          operations.push_back(std::make_unique<Operation>(id, 50 + 3000 * id, value_of(id, 0)));
          operations.back()->announce(channel, will_wait);
        }
        for (auto& operation : operations) {
          CHECK_EQ(operation->wait(channel), RD_OK);
          operation->check(float(size) * value_of(operation->id, 0));
        }
      });
    }
  }
}

TEST(all_ids_in_any_order_give_right_numbers_round_after_round) {
  for (uint32_t size : {2, 4}) {
    for (uint64_t fusion_bytes : {0, 3000, 1 << 20}) {
      const uint32_t num_ids = 40, rounds = kSmall ? 15 : 100;
      ThreadRanks all(setup_of(size, num_ids, fusion_bytes));
      all.run([&](uint32_t rank, Channel& channel) {
        std::mt19937 random(rank);
        for (uint32_t round = 0; round < rounds; ++round) {
          std::vector<std::unique_ptr<Operation>> operations;
          for (uint32_t id = 0; id < num_ids; ++id)
            operations.push_back(std::make_unique<Operation>(id, 1 + (id * 37) % 300, value_of(id, round)));
          std::shuffle(operations.begin(), operations.end(), random);
          for (auto& operation : operations) operation->announce(channel, false);
          std::shuffle(operations.begin(), operations.end(), random);
          for (auto& operation : operations) {
            CHECK_EQ(operation->wait(channel), RD_OK);
            operation->check(float(size) * value_of(operation->id, round));
          }
        }
      });
    }
  }
}

TEST(a_log_with_few_entries_is_used_again_and_again) {
  // The ids of one member run ahead of those of the others by different distances.
  const uint32_t rounds = kSmall ? 300 : 5000;
  ThreadRanks all(setup_of(3, 2));
  all.run([&](uint32_t rank, Channel& channel) {
    for (uint32_t round = 0; round < rounds; ++round) {
      Operation first(rank == 1 ? 1 : 0, 5, value_of(rank == 1 ? 1 : 0, round));
      Operation second(rank == 1 ? 0 : 1, 5, value_of(rank == 1 ? 0 : 1, round));
      first.announce(channel, false);
      CHECK_EQ(second.run(channel), RD_OK);
      CHECK_EQ(first.wait(channel), RD_OK);
      first.check(3 * value_of(first.id, round));
      second.check(3 * value_of(second.id, round));
    }
  });
}

TEST(every_kind_of_collective_can_be_announced) {
  ThreadRanks all(setup_of(3, 8));
  all.run([&](uint32_t rank, Channel& channel) {
    std::vector<int32_t> mine{int(rank), int(rank) + 10}, gathered(6), root{rank == 2 ? 7 : 0}, scattered{0};
    std::vector<int32_t> shares{1, 2, 3};
    std::vector<uint64_t> two(3, 2), one(3, 1);
    rd_span spans[] = {
        {mine.data(), gathered.data(), 2}, {root.data(), root.data(), 1}, {shares.data(), scattered.data(), 3}};
    std::vector<rd_call> params{make_call(RD_ALLGATHER, RD_INT32), make_call(RD_BROADCAST, RD_INT32),
                                make_call(RD_REDUCE_SCATTER, RD_INT32), make_call(RD_BARRIER, RD_UINT8)};
    params[0].counts = two.data();
    params[1].peer = 2;
    params[2].counts = one.data();
    for (int i = 0; i < 3; ++i) params[i].spans = &spans[i], params[i].num_spans = 1;
    std::vector<std::shared_ptr<Call>> calls;
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t id = (i + rank) % 4;
      calls.push_back(std::make_shared<Call>(params[id], channel.topology(), Deadline(60)));
      calls.back()->timeout_s = 60;
      channel.announced().agree(id, "any", *calls.back());
      channel.announced().announce(id, calls.back(), false);
    }
    for (auto& call : calls) {
      CHECK(channel.announced().wait(call, Deadline(60)));
      CHECK_EQ(call->result.status, int(RD_OK));
    }
    CHECK(gathered == (std::vector<int32_t>{0, 10, 1, 11, 2, 12}));
    CHECK_EQ(root[0], 7);
    CHECK_EQ(scattered[0], 3 * (int(rank) + 1));
  });
}

TEST(calls_that_are_ready_together_are_fused_alike_on_every_member) {
  const uint32_t num_ids = 30;
  ThreadRanks all(setup_of(2, num_ids));
  std::atomic<uint32_t> num_ready{0};
  std::vector<std::vector<uint64_t>> sequences(2, std::vector<uint64_t>(num_ids));
  all.run([&](uint32_t rank, Channel& channel) {
    // Nobody executes before all are announced: will_wait keeps the thread from it.
    std::vector<std::unique_ptr<Operation>> operations;
    for (uint32_t id = 0; id < num_ids; ++id) {
      operations.push_back(std::make_unique<Operation>(id, 10, 1));
      operations.back()->announce(channel, true);
    }
    ++num_ready;
    while (num_ready.load() < 2) std::this_thread::yield();
    for (auto& operation : operations) {
      CHECK_EQ(operation->wait(channel), RD_OK);
      sequences[rank][operation->id] = operation->call->result.sequence;
      CHECK(operation->call->result.arrived_ns > 0);
    }
  });
  CHECK(sequences[0] == sequences[1]);
  // One batch of all: one of them has its number.
  CHECK_EQ(std::count(sequences[0].begin(), sequences[0].end(), RD_NO_SEQUENCE), long(num_ids) - 1);
}

TEST(several_threads_of_a_member_wait_for_different_calls) {
  const uint32_t num_threads = 4, rounds = kSmall ? 20 : 200;
  ThreadRanks all(setup_of(2, num_threads));
  all.run([&](uint32_t, Channel& channel) {
    std::vector<std::thread> threads;
    for (uint32_t id = 0; id < num_threads; ++id)
      threads.emplace_back([&, id] {
        for (uint32_t round = 0; round < rounds; ++round) {
          Operation operation(id, 20, value_of(id, round));
          CHECK_EQ(operation.run(channel), RD_OK);
          operation.check(2 * value_of(id, round));
        }
      });
    for (auto& thread : threads) thread.join();
  });
}

TEST(a_call_that_nobody_waits_for_runs_nevertheless) {
  ThreadRanks all(setup_of(2, 4));
  all.run([&](uint32_t rank, Channel& channel) {
    Operation forgotten(0, 10, 1);
    forgotten.announce(channel, false);
    if (rank == 0) {
      while (!forgotten.call->finished()) std::this_thread::yield();
    } else {
      CHECK_EQ(forgotten.wait(channel), RD_OK);
    }
    forgotten.check(2);
  });
}

TEST(a_wait_that_is_over_too_early_leaves_the_call_announced_and_names_who_is_missing) {
  ThreadRanks all(setup_of(3, 4));
  std::promise<void> timed_out;
  auto may_come = timed_out.get_future().share();
  all.run([&](uint32_t rank, Channel& channel) {
    Operation operation(1, 10, 1);
    if (rank == 2) may_come.wait();
    // With much less time than the call may take, this thread does not execute; the other one gave up, too.
    for (double remaining_s : {0.01, 50.0}) {
      if (rank != 0) break;
      if (operation.call == nullptr) operation.announce(channel, true);
      if (remaining_s > 1) {
        while (channel.announced().missing(1) != std::vector<uint32_t>{2}) std::this_thread::yield();
        timed_out.set_value();
      }
      CHECK_EQ(operation.wait(channel, remaining_s), remaining_s > 1 ? RD_OK : RD_TIMEOUT);
    }
    if (rank != 0) CHECK_EQ(operation.run(channel), RD_OK);
    operation.check(3);
  });
}

TEST(a_wait_that_is_over_too_early_ends_nothing_that_runs_meanwhile) {
  ThreadRanks all(setup_of(2, 4));
  std::promise<void> timed_out;
  auto may_execute = timed_out.get_future().share();
  all.run([&](uint32_t rank, Channel& channel) {
    Operation ready(0, 10, 1), lonely(1, 10, 1);
    ready.announce(channel, true);
    if (rank == 1) {
      may_execute.wait();
    } else {
      while (!channel.announced().missing(0).empty()) std::this_thread::yield();
      lonely.announce(channel, true, 0.1);
      CHECK_EQ(lonely.wait(channel, 0.1), RD_TIMEOUT);
      CHECK(!ready.call->finished());
      CHECK(channel.announced().cancel(lonely.call));
      timed_out.set_value();
    }
    CHECK_EQ(ready.wait(channel), RD_OK);
    ready.check(2);
  });
}

TEST(a_revoked_id_takes_its_call_back_and_can_be_agreed_on_again) {
  ThreadRanks all(setup_of(2, 4));
  std::promise<void> withdrawn;
  auto may_come = withdrawn.get_future().share();
  all.run([&](uint32_t rank, Channel& channel) {
    if (rank == 0) {
      Operation operation(3, 10, 100);
      operation.announce(channel, true);
      std::thread other([&] {
        while (channel.announced().missing(3) != std::vector<uint32_t>{1}) std::this_thread::yield();
        CHECK(channel.announced().revoke(3));
        CHECK(!channel.announced().revoke(3));
      });
      CHECK_EQ(operation.wait(channel), RD_WITHDRAWN);
      other.join();
      operation.check(100);
      withdrawn.set_value();
    } else {
      may_come.wait();
    }
    Operation again(3, 10, 1);
    CHECK_EQ(again.run(channel), RD_OK);
    again.check(2);
    CHECK(!channel.announced().revoke(3));
  });
}

TEST(a_call_is_withdrawn_or_runs_but_never_both) {
  const uint32_t rounds = kSmall ? 200 : 3000, num_ids = 4;
  ThreadRanks all(setup_of(3, num_ids));
  std::atomic<uint32_t> num_withdrawn{0};
  all.run([&](uint32_t rank, Channel& channel) {
    std::mt19937 random(rank);
    for (uint32_t round = 0; round < rounds; ++round) {
      uint32_t id = round % num_ids;
      // Whoever withdraws its call announces it again, so that it runs exactly once per round in the end.
      while (true) {
        Operation operation(id, 5, value_of(id, round));
        operation.announce(channel, random() % 2 == 0);
        for (uint32_t i = random() % 50; i > 0; --i) std::this_thread::yield();
        if (random() % 2 == 0 && channel.announced().revoke(id)) {
          CHECK_EQ(operation.wait(channel), RD_WITHDRAWN);
          operation.check(value_of(id, round));
          ++num_withdrawn;
          continue;
        }
        CHECK_EQ(operation.wait(channel), RD_OK);
        operation.check(3 * value_of(id, round));
        break;
      }
    }
  });
  CHECK(num_withdrawn.load() > 0);
}

TEST(an_abort_ends_every_wait_and_what_nobody_waits_for) {
  ThreadRanks all(setup_of(3, 4));
  std::atomic<uint32_t> num_announced{0};
  all.run([&](uint32_t rank, Channel& channel) {
    if (rank == 2) {
      while (num_announced.load() < 2) std::this_thread::yield();
      channel.abort({RD_PEER_LOST, 2});
      return;
    }
    Operation waited(0, 10, 1), forgotten(1, 10, 1);
    forgotten.announce(channel, false);
    waited.announce(channel, true);
    ++num_announced;
    CHECK_EQ(waited.wait(channel), RD_PEER_LOST);
    CHECK_EQ(waited.call->result.member, 2);
    CHECK_EQ(forgotten.wait(channel), RD_PEER_LOST);
    Operation late(2, 10, 1);
    CHECK_EQ(late.run(channel), RD_PEER_LOST);
  });
}

TEST(a_member_that_leaves_ends_only_the_calls_that_need_it) {
  ThreadRanks all(setup_of(3, 4));
  std::atomic<uint32_t> num_finished{0};
  all.run([&](uint32_t rank, Channel& channel) {
    Operation both(0, 10, 1);
    CHECK_EQ(both.run(channel), RD_OK);
    Operation pending(1, 10, 1), forgotten(2, 10, 1);
    if (rank == 2) {
      forgotten.announce(channel, false);  // withdrawn when the channel closes
      while (num_finished.load() < 2) std::this_thread::yield();
      all.destroy(2);
      return;
    }
    pending.announce(channel, rank == 0);
    if (rank == 0) forgotten.announce(channel, false);
    ++num_finished;
    CHECK_EQ(pending.wait(channel), RD_PEER_LOST);
    CHECK_EQ(pending.call->result.member, 2);
    if (rank == 0) CHECK_EQ(forgotten.wait(channel), RD_PEER_LOST);
  });
}

TEST(a_call_that_nobody_waits_for_ends_if_it_needs_a_member_that_had_left_before) {
  for (bool is_aborted : {false, true}) {
    ThreadRanks all(setup_of(2, 4));
    Channel& channel = all.channel(0);
    Operation both(0, 10, 1), other(0, 10, 1);
    both.announce(channel, false);  // the thread executes it
    CHECK_EQ(other.run(all.channel(1)), RD_OK);
    CHECK(both.call->wait(Deadline(60)));
    if (is_aborted) all.channel(1).abort({RD_PEER_LOST, 1});
    all.destroy(1);
    for (double idle_s : {0.0, 0.2}) {
      yield_for(idle_s);  // after a moment without calls the thread sleeps until it is woken
      Operation late(0, 10, 1);
      late.announce(channel, false);
      CHECK(late.call->wait(Deadline(60)));
      CHECK_EQ(late.call->result.status, int(RD_PEER_LOST));
      CHECK_EQ(late.call->result.member, 1);
    }
  }
}

TEST(an_exception_of_a_signal_handler_ends_the_wait_and_not_the_call) {
  // Handlers run in the main thread, so the first rank is this very thread.
  ThreadRanks all(setup_of(2, 4));
  Operation operation(0, 10, 1), other(0, 10, 1);
  operation.announce(all.channel(0), true);
  {
    SignalHandler raises([] { return -1; });
    int detail = 0;
    CHECK_EQ(wait_or_catch(operation, all.channel(0), &detail), RD_ABORTED);
    CHECK_EQ(detail, EINTR);
  }
  std::thread second([&] { CHECK_EQ(other.run(all.channel(1)), RD_OK); });
  CHECK_EQ(operation.wait(all.channel(0)), RD_OK);
  second.join();
  operation.check(2);
}

TEST(an_exception_of_a_signal_handler_is_not_lost_when_the_call_has_ended_meanwhile) {
  ThreadRanks all(setup_of(2, 4));
  Channel& channel = all.channel(0);
  Operation operation(0, 10, 1);
  operation.announce(channel, true);
  SignalHandler handler([&] {
    CHECK(channel.announced().cancel(operation.call));
    return -1;
  });
  int detail = 0;
  CHECK_EQ(wait_or_catch(operation, channel, &detail), RD_ABORTED);
  CHECK_EQ(detail, EINTR);
  CHECK_EQ(operation.wait(channel), RD_CANCELLED);
}

TEST(a_child_that_a_signal_handler_forks_ends_its_wait_and_runs_no_callbacks) {
  for (bool is_executing : {false, true}) {
    ThreadRanks all(setup_of(2, 4));
    std::atomic<int> num_told{0};
    std::promise<void> forked;
    pid_t child = -1;
    Operation operation(0, 10, 1), other(0, 10, 1);
    operation.on_end = {[](void* context, const rd_result*) { ++*static_cast<std::atomic<int>*>(context); }, &num_told};
    operation.announce(all.channel(0), true);
    if (is_executing) other.announce(all.channel(1), true);
    std::thread second([&] {
      forked.get_future().wait();
      CHECK_EQ(is_executing ? other.wait(all.channel(1)) : other.run(all.channel(1)), RD_OK);
    });
    rd_status status;
    {
      SignalHandler handler([&] {
        if (child >= 0) return 0;
        child = fork();
        if (child > 0) forked.set_value();
        return child > 0 ? 0 : int(alarm(60));  // ends a child that waits
      });
      status = wait_or_catch(operation, all.channel(0));
    }
    if (child == 0) _exit(status == RD_FORKED && num_told == 0 ? 0 : 1);
    CHECK_EQ(status, RD_OK);
    second.join();
    operation.check(2);
    CHECK_EQ(num_told.load(), 1);
    int ended = -1;
    CHECK_EQ(waitpid(child, &ended, 0), child);
    CHECK_EQ(ended, 0);
  }
}

TEST(native_code_announces_by_name_what_the_members_have_agreed_on) {
  ThreadRanks all(setup_of(2, 8));
  all.run([&](uint32_t, Channel& channel) {
    AnnouncedCalls& announced = channel.announced();
    Operation agreed(5, 10, 1);
    auto find = [&](const rd_call& params, const std::string& name = "id 5") {
      std::shared_ptr<const ronde::AgreedCall> found;
      try {
        return int(announced.find_id(name, params, &found));
      } catch (const ronde::CallError& error) {
        return -int(error.status);
      }
    };
    CHECK_EQ(find(agreed.params), -int(RD_NOT_AGREED));
    agreed.agree(channel);
    CHECK_EQ(find(agreed.params), 5);
    std::vector<rd_call> others(6, agreed.params);
    rd_span longer{agreed.data.data(), agreed.data.data(), 11};
    others[0].spans = &longer;
    others[1].dtype = RD_INT32;
    others[2].op = RD_MAX;
    others[3].prescale = 2;
    others[4].postscale = 2;
    others[5].kind = RD_BROADCAST;
    for (const rd_call& other : others) CHECK_EQ(find(other), -int(RD_NOT_AGREED));
    announced.revoke(5);
    CHECK_EQ(find(agreed.params), -int(RD_NOT_AGREED));
    for (bool is_revoked : {true, false}) {  // the id stands for another name
      agreed.agree(channel);
      CHECK_EQ(find(agreed.params, "another"), -int(RD_NOT_AGREED));
      if (is_revoked) announced.revoke(5);
      announced.agree(5, "another", Call(agreed.params, channel.topology(), Deadline(0)));
      CHECK_EQ(find(agreed.params), -int(RD_NOT_AGREED));
      CHECK_EQ(find(agreed.params, "another"), 5);
    }
    announced.agree(6, "another", Call(agreed.params, channel.topology(), Deadline(0)));  // the name has another id
    announced.revoke(5);
    CHECK_EQ(find(agreed.params, "another"), 6);
  });
}

TEST(calls_that_are_announced_together_run_as_one) {
  const uint32_t num_ids = 200, rounds = kSmall ? 5 : 50;
  ThreadRanks all(setup_of(2, num_ids));
  std::atomic<uint32_t> num_batches{0};
  all.run([&](uint32_t rank, Channel& channel) {
    std::mt19937 random(rank);
    std::vector<std::unique_ptr<Operation>> operations;
    for (uint32_t id = 0; id < num_ids; ++id) {
      operations.push_back(std::make_unique<Operation>(id, 1 + id % 7, 0));
      operations.back()->agree(channel);
    }
    for (uint32_t round = 0; round < rounds; ++round) {
      std::shuffle(operations.begin(), operations.end(), random);
      std::vector<rd_announcement> announcements;
      std::vector<rd_span> spans;
      for (auto& operation : operations) {
        std::fill(operation->data.begin(), operation->data.end(), value_of(operation->id, round));
        announcements.push_back({operation->params.signature, operation->id, 1});
        spans.push_back(operation->span);
      }
      announcements.push_back({1, 7, 0});         // not agreed on
      announcements.push_back(announcements[0]);  // here twice
      spans.push_back(spans[0]);
      auto calls = channel.announced().announce_many(announcements.data(), uint32_t(announcements.size()), spans.data(),
                                                     60, true);
      CHECK(calls[num_ids] == nullptr);
      CHECK(calls[num_ids + 1] == nullptr);
      for (uint32_t i = 0; i < num_ids; ++i) {
        CHECK(channel.announced().wait(calls[i], Deadline(60)));
        CHECK_EQ(calls[i]->result.status, int(RD_OK));
        operations[i]->check(2 * value_of(operations[i]->id, round));
        if (calls[i]->result.sequence != RD_NO_SEQUENCE) ++num_batches;
      }
    }
  });
  CHECK(num_batches.load() <= 2 * rounds * 10);  // mostly one or two per round, and never one per call
}

TEST(what_waits_for_other_members_is_known_with_its_time) {
  ThreadRanks all(setup_of(2, 8));
  Channel& channel = all.channel(0);
  Operation first(2, 10, 1), second(6, 10, 1);
  first.announce(channel, true);
  int64_t between_ns = ronde::now_ns();
  while (ronde::now_ns() == between_ns) continue;
  second.announce(channel, true);
  auto early = channel.announced().announced_until(between_ns, 10);
  CHECK_EQ(early.size(), size_t(1));
  CHECK_EQ(early[0].id, 2u);
  CHECK(early[0].announced_ns <= between_ns);
  CHECK_EQ(channel.announced().announced_until(ronde::now_ns(), 10).size(), size_t(2));
  CHECK_EQ(channel.announced().announced_until(ronde::now_ns(), 1).size(), size_t(1));
}

TEST(callbacks_run_once_however_a_call_ends_and_may_announce) {
  struct Ended {
    std::atomic<int> count{0}, status{-1};
  };
  auto on_end = [](void* context, const rd_result* result) {
    static_cast<Ended*>(context)->status = result->status;
    ++static_cast<Ended*>(context)->count;
  };
  for (bool will_wait : {true, false}) {
    ThreadRanks all(setup_of(2, 8));
    all.run([&](uint32_t rank, Channel& channel) {
      Ended ran, cancelled, revoked, closed;
      Operation operations[] = {{0, 10, 1}, {1, 10, 1}, {2, 10, 1}, {3, 10, 1}};
      Ended* ended[] = {&ran, &cancelled, &revoked, &closed};
      for (uint32_t id = 0; id < 4; ++id) {
        if (rank == 1 && id > 0) break;
        operations[id].on_end = {on_end, ended[id]};
        operations[id].announce(channel, will_wait);
      }
      CHECK_EQ(operations[0].wait(channel), RD_OK);
      while (ran.count == 0) std::this_thread::yield();
      if (rank == 1) return;
      CHECK(channel.announced().cancel(operations[1].call));
      CHECK(!channel.announced().cancel(operations[1].call));
      CHECK(channel.announced().revoke(2));
      channel.close();
      CHECK_EQ(cancelled.status, int(RD_CANCELLED));
      CHECK_EQ(revoked.status, int(RD_WITHDRAWN));
      CHECK_EQ(closed.status, int(RD_CLOSED));
      for (Ended* each : ended) CHECK_EQ(each->count, 1);
    });
  }
}

TEST(a_channel_can_be_closed_and_destroyed_in_a_callback_of_its_thread) {
  ThreadRanks all(setup_of(2, 4));
  std::promise<void> destroyed;
  struct Context {
    ThreadRanks* all;
    std::promise<void>* destroyed;
  } context{&all, &destroyed};
  Operation first(0, 10, 1), second(0, 10, 1);
  first.on_end = {[](void* context, const rd_result*) {
                    auto* given = static_cast<Context*>(context);
                    given->all->destroy(0);
                    given->destroyed->set_value();
                  },
                  &context};
  first.announce(all.channel(0), false);
  CHECK_EQ(second.run(all.channel(1)), RD_OK);
  destroyed.get_future().wait();
}

TEST(a_wait_starts_no_thread_while_the_channel_is_being_closed) {
  ThreadRanks all(setup_of(2, 4));
  Operation mine(0, 10, 1), other(0, 10, 1);
  mine.announce(all.channel(0), true);
  other.announce(all.channel(1), true);
  CHECK(!all.channel(0).announced().leave());  // with this close() begins; all have announced the call, so it is left
  pthread_attr_t before, without_memory;       // a thread would be an error now
  CHECK_EQ(pthread_getattr_default_np(&before), 0);
  CHECK_EQ(pthread_getattr_default_np(&without_memory), 0);
  CHECK_EQ(pthread_attr_setstacksize(&without_memory, size_t(1) << 47), 0);
  CHECK_EQ(pthread_setattr_default_np(&without_memory), 0);
  CHECK_EQ(mine.wait(all.channel(0), 0.01), RD_TIMEOUT);
  CHECK_EQ(pthread_setattr_default_np(&before), 0);
  all.channel(0).close();
  CHECK_EQ(mine.wait(all.channel(0)), RD_CLOSED);
  CHECK_EQ(other.wait(all.channel(1)), RD_PEER_LOST);
}

TEST(close_returns_when_the_thread_that_executes_has_left_the_memory_of_its_call) {
  ThreadRanks all(setup_of(2, 4));
  Channel& channel = all.channel(0);
  Operation mine(0, 10, 1), other(0, 10, 1);
  mine.announce(channel, true);
  other.announce(all.channel(1), true);  // and nobody executes it there
  std::promise<void> executing;
  std::atomic<bool> is_closed{false};
  std::thread closer([&] {
    executing.get_future().wait();
    channel.close();
    is_closed = true;
    CHECK(mine.call->finished());
  });
  bool is_first = true;
  SignalHandler handler([&] {  // in the middle of the call
    if (!std::exchange(is_first, false)) return 0;
    executing.set_value();
    for (Deadline moment(0.2); !moment.expired() && !is_closed;) std::this_thread::yield();
    CHECK(!is_closed);
    return 0;
  });
  CHECK_EQ(mine.wait(channel), RD_CLOSED);
  closer.join();
}

TEST(close_does_not_wait_for_a_signal_handler_that_calls_it_or_waits_for_it) {
  for (bool in_another_thread : {false, true}) {
    ThreadRanks all(setup_of(2, 4));
    Channel& channel = all.channel(0);
    Operation mine(0, 10, 1), other(0, 10, 1);
    mine.announce(channel, true);
    other.announce(all.channel(1), true);  // and nobody executes it there
    bool is_first = true;
    double took_s = 0;
    SignalHandler handler([&] {  // in the middle of the call
      if (!std::exchange(is_first, false)) return 0;
      int64_t begin_ns = ronde::now_ns();
      if (in_another_thread) {
        std::thread([&] { channel.close(); }).join();
      } else {
        channel.close();
      }
      took_s = double(ronde::now_ns() - begin_ns) / 1e9;
      CHECK(!mine.call->finished());
      return 0;
    });
    CHECK_EQ(mine.wait(channel), RD_CLOSED);
    CHECK_EQ(took_s >= AnnouncedCalls::kMaxCloseS, in_another_thread);
  }
}

TEST(an_id_that_is_unknown_or_in_use_is_refused_and_so_is_an_ordered_call) {
  ThreadRanks all(setup_of(2, 4));
  auto status_of = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const ronde::CallError& error) {
      return error.status;
    }
    return RD_OK;
  };
  all.run([&](uint32_t, Channel& channel) {
    AnnouncedCalls& announced = channel.announced();
    Operation first(0, 10, 1), second(0, 10, 1);
    first.call = std::make_shared<Call>(first.params, channel.topology(), Deadline(60));
    first.call->timeout_s = 60;
    CHECK_EQ(status_of([&] { announced.agree(4, "unknown", *first.call); }), RD_BAD_CALL);
    CHECK_EQ(status_of([&] { announced.announce(4, first.call, true); }), RD_NOT_AGREED);
    CHECK_EQ(status_of([&] { announced.announce(0, first.call, true); }), RD_NOT_AGREED);
    second.params.signature = first.params.signature + 1;
    second.agree(channel);
    CHECK_EQ(status_of([&] { announced.announce(0, first.call, true); }), RD_NOT_AGREED);
    second.params.signature = first.params.signature;
    first.agree(channel);
    announced.revoke(0);
    CHECK_EQ(status_of([&] { announced.announce(0, first.call, true); }), RD_NOT_AGREED);
    first.announce(channel, true);
    CHECK_EQ(status_of([&] { second.announce(channel, true); }), RD_BAD_CALL);
    CHECK_EQ(first.wait(channel), RD_OK);
    CHECK_EQ(status_of([&] { run(channel, first.params); }), RD_BAD_CALL);
  });
  ThreadRanks ordered(setup_of(2, 0));
  CHECK_EQ(status_of([&] { ordered.channel(0).announced(); }), RD_BAD_CALL);
}

TEST(members_that_announced_different_calls_under_one_id_get_an_error_and_no_wrong_number) {
  ThreadRanks all(setup_of(2, 4));
  all.run([&](uint32_t rank, Channel& channel) {
    Operation operation(0, 10, 1);
    operation.params.signature = rank;
    CHECK_EQ(operation.run(channel), RD_MISMATCH);
    operation.check(1);
    Operation next(0, 10, 1);
    CHECK_EQ(next.run(channel), RD_OK);
  });
}

TEST(the_current_call_shows_who_is_missing_in_a_call_that_runs) {
  ThreadRanks all(setup_of(2, 4));
  std::promise<void> seen;
  auto may_execute = seen.get_future().share();
  all.run([&](uint32_t rank, Channel& channel) {
    Operation operation(0, 10, 1);
    operation.announce(channel, true);
    if (rank == 1) {
      may_execute.wait();
      CHECK_EQ(operation.wait(channel), RD_OK);
      return;
    }
    std::thread watch([&] {
      rd_current_call current;
      uint32_t missing[2];
      do {
        channel.get_current_call(&current, missing);
      } while (current.start_ns == 0 || current.num_missing != 1);
      CHECK_EQ(missing[0], 1u);
      CHECK_EQ(std::string(current.description), std::string("test"));
      seen.set_value();
    });
    CHECK_EQ(operation.wait(channel), RD_OK);
    watch.join();
  });
}
