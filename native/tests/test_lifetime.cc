// Handles, callbacks, cancellation, closing, signals and forks, through the C ABI: nothing waits for ever, nothing is
// used after it was freed, and every callback comes once.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <future>

#include "check.h"
#include "thread_ranks.h"

using thread_ranks::LinkOpener;
using thread_ranks::make_call;

namespace {

const std::vector<std::vector<uint32_t>> kTopologies = {{0, 0}, {0, 1}};
constexpr double kLongS = 300;

// Two members of this process, opened through the C ABI. Those on one host share a memory file.
class Pair {
 public:
  explicit Pair(const std::vector<uint32_t>& hosts, uint64_t bucket_bytes = 0, uint32_t max_announced = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    bool one_host = hosts[0] == hosts[1];
    for (uint32_t member : {0, 1}) {
      rd_channel_params params{RD_ABI, 2, member, 2, hosts.data(), 64 * 1024, 4096, bucket_bytes, 0, max_announced};
      if (one_host && segment_ < 0) {
        segment_ = memfd_create("test", MFD_CLOEXEC);
        CHECK_EQ(ftruncate(segment_, off_t(rd_segment_bytes(&params))), 0);
      }
      rd_status status = rd_open(&params, one_host ? segment_ : -1, links_.socket(), member, &channels_[member]);
      CHECK_EQ(status, RD_OK);
    }
  }

  ~Pair() {
    links_.stop();
    for (rd_channel* channel : channels_)
      if (channel != nullptr) rd_release(channel);
    if (segment_ >= 0) ::close(segment_);
  }

  rd_channel* operator[](int member) { return channels_[member]; }

  rd_channel* take(int member) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(channels_[member], nullptr);
  }

 private:
  int segment_ = -1;
  std::mutex mutex_;  // guards the channels from being taken while they get links
  rd_channel* channels_[2] = {nullptr, nullptr};
  LinkOpener links_{2, false,
                    [this](uint32_t member, uint32_t peer, rd_link_kind kind, bool opened_here, auto sockets) {
                      std::lock_guard<std::mutex> lock(mutex_);
                      if (channels_[member] == nullptr) return;
                      std::vector<int> fds;
                      for (auto& socket : sockets) fds.push_back(dup(socket.get()));
                      rd_open_link(channels_[member], peer, kind, opened_here, fds.data(), uint32_t(fds.size()));
                    },
                    [this](uint32_t from, const ronde::CallError& error) {
                      std::lock_guard<std::mutex> lock(mutex_);
                      if (channels_[1 - from] != nullptr)
                        rd_abort(channels_[1 - from], error.status, error.member, error.detail);
                    }};
};

// An allreduce of floats, with its memory.
struct Sum {
  explicit Sum(size_t count = 8, float value = 1) : array(count, value), span{array.data(), array.data(), count} {
    call = make_call(RD_ALLREDUCE);
    call.spans = &span;
    call.num_spans = 1;
  }
  Sum(const Sum&) = delete;

  rd_status run(rd_channel* channel, rd_result* result = nullptr, double remaining_s = kLongS) {
    rd_result own;
    return rd_run(channel, &call, result == nullptr ? &own : result, remaining_s);
  }

  rd_work* submit(rd_channel* channel, rd_callback callback = nullptr, void* context = nullptr,
                  double remaining_s = kLongS) {
    rd_work* work = nullptr;
    CHECK_EQ(rd_submit(channel, &call, remaining_s, callback, context, &work, nullptr), RD_OK);
    return work;
  }

  std::vector<float> array;
  rd_span span;
  rd_call call;
};

rd_status wait_and_release(rd_work* work) {
  rd_result result;
  rd_status status = rd_wait(work, &result, kLongS);
  CHECK_EQ(result.status, int(status));
  rd_release_work(work);
  return status;
}

// Waits until the channel runs a call.
void until_running(rd_channel* channel) {
  rd_current_call current{};
  uint32_t missing[2];
  do {
    std::this_thread::yield();
    rd_get_current_call(channel, &current, missing);
  } while (current.start_ns == 0);
}

// Counts the calls of a callback, and keeps the last status and thread.
struct Told {
  std::atomic<int> times{0};
  std::atomic<int> status{-1};
  std::thread::id thread;
  std::promise<void> told;
  std::atomic<rd_work*> work{nullptr};

  static void callback(void* context, const rd_result* result) {
    auto* self = static_cast<Told*>(context);
    self->thread = std::this_thread::get_id();
    self->status = result->status;
    if (++self->times == 1) self->told.set_value();
  }

  rd_status wait() {
    told.get_future().wait();
    return rd_status(status.load());
  }
};

// What Python would do when a signal has come: tests say what the handler does. Only the main thread runs it.
std::function<int()> signal_handler;
std::atomic<bool> signal_came{false};

void install_interpreter() {
  static const rd_interpreter interpreter{
      [] { return 0; },
      [] { return signal_came.exchange(false) ? signal_handler() : 0; },
      [](void** kind, void** value, void** traceback) { *kind = *value = *traceback = nullptr; },
      [](int) {},
  };
  rd_set_interpreter(&interpreter);
}

}  // namespace

TEST(close_ends_a_call_that_another_thread_runs) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    rd_result result{};
    std::thread runs([&] { CHECK_EQ(Sum().run(pair[0], &result), RD_CLOSED); });
    until_running(pair[0]);
    rd_close(pair[0]);
    runs.join();
    CHECK_EQ(result.member, -1);
    CHECK_EQ(Sum().run(pair[0]), RD_CLOSED);  // the handle is valid until it is released
    CHECK_EQ(Sum().run(pair[1], &result), RD_PEER_LOST);
    CHECK_EQ(result.member, 0);
  }
}

TEST(close_ends_all_waits_and_tells_every_callback_once) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    constexpr int kCalls = 10;
    Told told[kCalls];
    std::vector<std::unique_ptr<Sum>> sums;
    std::vector<rd_work*> works;
    for (auto& each : told) {
      sums.push_back(std::make_unique<Sum>());
      works.push_back(sums.back()->submit(pair[0], Told::callback, &each));
    }
    std::vector<std::thread> waiting;
    for (rd_work* work : works) {
      rd_retain_work(work);
      waiting.emplace_back([work] { CHECK_EQ(wait_and_release(work), RD_CLOSED); });
    }
    rd_retain(pair[0]);  // the thread may begin late
    std::thread behind([channel = pair[0]] {
      CHECK_EQ(Sum().run(channel), RD_CLOSED);
      rd_release(channel);
    });
    until_running(pair[0]);
    rd_close(pair[0]);
    for (auto& each : told) CHECK_EQ(each.times.load(), 1);  // the thread has ended, so all of them have come
    sums.clear();                                            // nobody touches the memory any more
    rd_release(pair.take(0));
    for (auto& thread : waiting) thread.join();
    behind.join();
    for (rd_work* work : works) {
      CHECK_EQ(rd_done(work), 1);  // a work outlives its channel
      CHECK_EQ(wait_and_release(work), RD_CLOSED);
    }
  }
}

TEST(a_member_that_left_before_links_were_open_is_lost) {
  Pair pair(kTopologies[1]);
  rd_close(pair[0]);
  rd_release(pair.take(0));
  rd_result result;
  CHECK_EQ(Sum().run(pair[1], &result), RD_PEER_LOST);
  CHECK_EQ(result.member, 0);
  CHECK(result.end_ns - result.start_ns < int64_t(kLongS / 2 * 1e9));
}

TEST(threads_may_come_and_go_while_the_channel_is_closed) {
  for (int round = 0; round < 20; ++round) {
    Pair pair(kTopologies[round % 2]);
    std::atomic<int> times{0}, submitted{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      rd_retain(pair[0]);
      threads.emplace_back([&, i, channel = pair[0]] {
        rd_status status = RD_OK;
        while (status != RD_CLOSED) {
          Sum sum;
          if (i % 2 == 0) {
            status = sum.run(channel);
          } else {
            rd_work* work = nullptr;
            auto count = [](void* context, const rd_result*) { ++*static_cast<std::atomic<int>*>(context); };
            status = rd_submit(channel, &sum.call, kLongS, count, &times, &work, nullptr);
            if (status == RD_OK) {
              ++submitted;
              status = wait_and_release(work);
            }
          }
          CHECK(status == RD_OK || status == RD_CLOSED);
        }
        rd_release(channel);
      });
    }
    std::thread other([&] {
      while (Sum().run(pair[1]) == RD_OK) {
      }
    });
    std::thread closer([channel = pair[0]] { rd_close(channel); });
    rd_release(pair.take(0));
    closer.join();
    for (auto& thread : threads) thread.join();
    other.join();
    CHECK_EQ(times.load(), submitted.load());
  }
}

TEST(a_callback_comes_from_the_thread_of_the_channel_with_the_result) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    Told told;
    Sum mine, other;
    told.work = mine.submit(
        pair[0],
        [](void* context, const rd_result* result) {
          auto* self = static_cast<Told*>(context);
          CHECK(result->end_ns >= result->start_ns && result->start_ns > 0);
          CHECK_EQ(rd_done(self->work), 1);
          Told::callback(context, result);
        },
        &told);
    CHECK_EQ(other.run(pair[1]), RD_OK);
    CHECK_EQ(told.wait(), RD_OK);
    CHECK(told.thread != std::this_thread::get_id());
    CHECK_EQ(mine.array[0], 2.0f);
    CHECK_EQ(wait_and_release(told.work), RD_OK);
    CHECK_EQ(told.times.load(), 1);
  }
}

TEST(a_callback_learns_of_every_kind_of_failure) {
  Pair pair({0, 0});
  static rd_channel* channel;
  channel = pair[0];
  Told mismatch, timeout;
  Sum mine, other(9);
  mine.call.description = "mine";
  other.call.signature = 2;
  other.call.description = "other";
  rd_release_work(mine.submit(
      channel,
      [](void* context, const rd_result* result) {
        rd_member_call calls[2];
        CHECK_EQ(rd_get_mismatch(channel, calls), RD_OK);
        CHECK_EQ(std::string(calls[1].description), "other");
        CHECK_EQ(rd_kind(calls[1].kind), RD_ALLREDUCE);
        Told::callback(context, result);
      },
      &mismatch));
  CHECK_EQ(other.run(pair[1]), RD_MISMATCH);
  CHECK_EQ(mismatch.wait(), RD_MISMATCH);
  rd_release_work(mine.submit(channel, Told::callback, &timeout, 0.01));
  CHECK_EQ(timeout.wait(), RD_TIMEOUT);
}

TEST(a_callback_may_submit_the_next_call_but_not_wait) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    struct Chain {
      rd_channel* channel;
      int remaining = 3;
      Sum sum;
      std::promise<void> over;

      static void next(void* context, const rd_result* ended) {
        auto* self = static_cast<Chain*>(context);
        CHECK_EQ(ended->status, int(RD_OK));
        rd_result refused;
        CHECK_EQ(Sum().run(self->channel, &refused), RD_BAD_CALL);
        CHECK_EQ(refused.detail, EDEADLK);
        if (--self->remaining == 0) return self->over.set_value();
        rd_work* work = self->sum.submit(self->channel, next, context);
        CHECK_EQ(rd_wait(work, &refused, kLongS), RD_BAD_CALL);
        CHECK_EQ(refused.detail, EDEADLK);
        CHECK_EQ(refused.end_ns, 0);
        rd_release_work(work);
      }
    } chain;
    chain.channel = pair[0];
    rd_release_work(chain.sum.submit(pair[0], Chain::next, &chain));
    for (int i = 0; i < 3; ++i) CHECK_EQ(Sum().run(pair[1]), RD_OK);
    chain.over.get_future().wait();
    CHECK_EQ(chain.sum.array[0], 4.0f);  // one more each time
  }
}

TEST(a_callback_may_close_and_release_its_channel) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    struct Closing {
      rd_channel* channel;
      Told told, behind;
    } closing;
    closing.channel = pair[0];
    rd_retain(pair[0]);
    Sum sum, queued;
    rd_callback callback = [](void* context, const rd_result* result) {
      auto* self = static_cast<Closing*>(context);
      rd_close(self->channel);
      rd_release(self->channel);
      Told::callback(&self->told, result);
    };
    CHECK_EQ(rd_submit(closing.channel, &sum.call, kLongS, callback, &closing, nullptr, nullptr), RD_OK);
    CHECK_EQ(rd_submit(closing.channel, &queued.call, kLongS, Told::callback, &closing.behind, nullptr, nullptr),
             RD_OK);
    rd_status status = Sum().run(pair[1]);  // it may still be in the call when the other one aborts that behind it
    CHECK(status == RD_OK || status == RD_PEER_LOST);
    CHECK_EQ(closing.told.wait(), RD_OK);
    CHECK_EQ(closing.behind.wait(), RD_CLOSED);
    CHECK_EQ(Sum().run(pair[1]), RD_PEER_LOST);
  }
}

TEST(a_callback_can_be_added_until_the_call_has_ended) {
  Pair pair({0, 0});
  Told first, second, late;
  Sum sum;
  rd_work* work = sum.submit(pair[0], Told::callback, &first);
  CHECK_EQ(rd_add_callback(work, Told::callback, &second), 1);
  CHECK_EQ(Sum().run(pair[1]), RD_OK);
  CHECK_EQ(first.wait(), RD_OK);
  CHECK_EQ(second.wait(), RD_OK);
  CHECK_EQ(rd_add_callback(work, Told::callback, &late), 0);
  rd_release_work(work);
  rd_close(pair[0]);
  CHECK_EQ(first.times.load() + second.times.load() + late.times.load(), 2);
}

TEST(a_call_that_has_not_started_can_be_cancelled_and_its_memory_freed) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    Told started, cancelled;
    Sum first;
    auto second = std::make_unique<Sum>();
    rd_work* running = first.submit(pair[0], Told::callback, &started);
    rd_work* queued = second->submit(pair[0], Told::callback, &cancelled);
    until_running(pair[0]);
    CHECK_EQ(rd_cancel(running), 0);
    CHECK_EQ(rd_cancel(queued), 1);
    CHECK_EQ(rd_done(queued), 1);
    CHECK_EQ(rd_cancel(queued), 0);
    CHECK_EQ(second->array[0], 1.0f);
    second.reset();
    CHECK_EQ(wait_and_release(queued), RD_CANCELLED);
    CHECK_EQ(Sum().run(pair[1]), RD_OK);
    CHECK_EQ(started.wait(), RD_OK);
    CHECK_EQ(cancelled.wait(), RD_CANCELLED);
    CHECK_EQ(wait_and_release(running), RD_OK);
    std::thread other([&] { CHECK_EQ(Sum().run(pair[1]), RD_OK); });
    CHECK_EQ(Sum().run(pair[0]), RD_OK);  // the channel goes on
    other.join();
    rd_close(pair[0]);
    CHECK_EQ(started.times.load() + cancelled.times.load(), 2);
  }
}

TEST(callbacks_wait_until_who_cancels_a_call_has_written_its_result) {
  const uint32_t host = 0;
  ronde::Topology topology(rd_channel_params{RD_ABI, 1, 0, 2, &host, 64 * 1024, 4096, 0, 0, 0});
  auto barrier = [&] {
    return std::make_shared<ronde::Call>(make_call(RD_BARRIER), topology, ronde::Deadline(kLongS));
  };
  struct Gate {
    std::promise<void> reached, opened;
  } gate;
  Told told, added;
  auto ahead = barrier(), cancelled = barrier();
  ahead->add_callback({[](void* context, const rd_result*) {
                         static_cast<Gate*>(context)->reached.set_value();
                         static_cast<Gate*>(context)->opened.get_future().wait();
                       },
                       &gate});
  cancelled->add_callback({Told::callback, &told});
  ronde::CallQueue queue([](ronde::Call&) {}, [](const ronde::CallError&) {});
  queue.submit(ahead);
  queue.submit(cancelled);
  gate.reached.get_future().wait();
  CHECK(cancelled->start());  // with this end_before_start() begins; now the queue's thread comes to the call
  gate.opened.set_value();
  for (ronde::Deadline moment(0.2); !moment.expired() && told.times == 0;) std::this_thread::yield();
  CHECK_EQ(told.times.load(), 0);
  CHECK(cancelled->add_callback({Told::callback, &added}));
  cancelled->result.status = RD_CANCELLED;
  cancelled->finish();
  queue.close();
  for (Told* each : {&told, &added}) {
    CHECK_EQ(each->times.load(), 1);
    CHECK_EQ(each->status.load(), int(RD_CANCELLED));
  }
}

TEST(a_blocking_call_behind_others_ends_at_its_own_deadline) {
  Pair pair({0, 0});
  Sum ahead;
  rd_work* work = ahead.submit(pair[0]);
  rd_result result;
  CHECK_EQ(Sum().run(pair[0], &result, 0.05), RD_TIMEOUT);
  CHECK_EQ(wait_and_release(work), RD_TIMEOUT);  // the channel is aborted for all
  CHECK_EQ(Sum().run(pair[1]), RD_TIMEOUT);
}

// Threads with a stack of this size cannot be made: the same error as at the limit of processes.
TEST(a_thread_that_cannot_be_started_is_an_error_and_nothing_is_lost) {
  Pair pair({0, 0});
  pthread_attr_t before, without_memory;
  CHECK_EQ(pthread_getattr_default_np(&before), 0);
  CHECK_EQ(pthread_getattr_default_np(&without_memory), 0);
  CHECK_EQ(pthread_attr_setstacksize(&without_memory, size_t(1) << 47), 0);
  CHECK_EQ(pthread_setattr_default_np(&without_memory), 0);
  Told never;
  Sum sum;
  rd_work* work = nullptr;
  rd_result result{};
  CHECK_EQ(rd_submit(pair[0], &sum.call, kLongS, Told::callback, &never, &work, &result), RD_SYSTEM);
  CHECK_EQ(pthread_setattr_default_np(&before), 0);
  CHECK_EQ(result.detail, EAGAIN);
  CHECK(work == nullptr);
  std::thread other([&] {
    for (int i = 0; i < 2; ++i) CHECK_EQ(Sum().run(pair[1]), RD_OK);
  });
  CHECK_EQ(Sum().run(pair[0]), RD_OK);
  CHECK_EQ(wait_and_release(sum.submit(pair[0])), RD_OK);
  other.join();
  rd_close(pair[0]);
  CHECK_EQ(never.times.load(), 0);
}

TEST(an_exception_of_a_signal_handler_ends_a_call_that_waits_behind_another) {
  install_interpreter();
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts);
    Sum ahead;
    auto behind = std::make_unique<Sum>();
    rd_work* work = ahead.submit(pair[0]);
    until_running(pair[0]);
    signal_handler = [] { return -1; };
    signal_came = true;
    rd_result result;
    CHECK_EQ(behind->run(pair[0], &result), RD_ABORTED);
    CHECK_EQ(result.detail, EINTR);
    behind.reset();
    void* exception[3];
    CHECK_EQ(rd_fetch_exception(exception), 1);
    CHECK_EQ(wait_and_release(work), RD_ABORTED);
    CHECK_EQ(Sum().run(pair[1]), RD_ABORTED);
  }
  rd_set_interpreter(nullptr);
}

TEST(an_exception_of_a_signal_handler_ends_only_the_wait_for_a_submitted_call) {
  install_interpreter();
  Pair pair({0, 0});
  Sum sum;
  rd_work* work = sum.submit(pair[0]);
  signal_handler = [] { return -1; };
  signal_came = true;
  rd_result result;
  CHECK_EQ(rd_wait(work, &result, kLongS), RD_ABORTED);
  CHECK_EQ(result.detail, EINTR);
  CHECK_EQ(result.end_ns, 0);
  void* exception[3];
  CHECK_EQ(rd_fetch_exception(exception), 1);
  CHECK_EQ(Sum().run(pair[1]), RD_OK);
  CHECK_EQ(wait_and_release(work), RD_OK);
  rd_set_interpreter(nullptr);
}

TEST(a_signal_handler_may_close_the_channel_in_whose_call_it_runs_but_not_wait) {
  install_interpreter();
  for (const auto& hosts : kTopologies) {
    for (const char* where : {"running", "behind another", "waiting"}) {
      Pair pair(hosts);
      Sum ahead, own;
      rd_work* work = where == std::string("running") ? nullptr : ahead.submit(pair[0]);
      rd_status inside = RD_OK;
      signal_handler = [&] {
        rd_result result;
        inside = Sum().run(pair[0], &result);
        CHECK_EQ(result.detail, EDEADLK);
        rd_close(pair[0]);
        return 0;
      };
      signal_came = true;
      rd_result result;
      CHECK_EQ(where == std::string("waiting") ? rd_wait(work, &result, kLongS) : own.run(pair[0], &result), RD_CLOSED);
      CHECK_EQ(inside, RD_BAD_CALL);
      if (work != nullptr) CHECK_EQ(wait_and_release(work), RD_CLOSED);
      CHECK_EQ(Sum().run(pair[1]), RD_PEER_LOST);
    }
  }
  rd_set_interpreter(nullptr);
}

TEST(a_forked_child_is_refused_and_its_parent_notices_nothing) {
  for (const auto& hosts : kTopologies) {
    Pair pair(hosts, 4096);
    auto* bucket = static_cast<float*>(rd_get_bucket(pair[0]));
    auto* other_bucket = static_cast<float*>(rd_get_bucket(pair[1]));
    bucket[0] = 1, other_bucket[0] = 2;
    Sum ended, sum;
    rd_work* work = sum.submit(pair[0]);
    until_running(pair[0]);
    int lives[2];
    CHECK_EQ(pipe(lives), 0);
    pid_t child = fork();
    if (child == 0) {
      int mistakes = 0;
      auto expect = [&](bool holds) { mistakes += !holds; };
      rd_result result;
      expect(bucket[0] == 1 || bucket[0] == 3);  // it reads what is there, now or later
      bucket[0] = 100;
      expect(Sum().run(pair[0], &result) == RD_FORKED);
      expect(rd_submit(pair[0], &sum.call, kLongS, nullptr, nullptr, nullptr, &result) == RD_FORKED);
      expect(rd_wait(work, &result, kLongS) == RD_FORKED);
      expect(rd_cancel(work) == 0);
      expect(rd_get_bucket(pair[0]) == nullptr);
      rd_abort(pair[0], RD_PEER_LOST, 1, 0);
      rd_current_call current;
      uint32_t missing[2];
      rd_get_current_call(pair[0], &current, missing);
      expect(current.start_ns == 0);
      for (int member : {0, 1}) {
        rd_close(pair[member]);
        rd_release(pair[member]);
      }
      rd_release_work(work);
      rd_release_bucket(bucket);
      close(lives[1]);
      char byte;
      if (mistakes == 0 && read(lives[0], &byte, 1) != 0) mistakes = 1;  // lives until the parent lets it go
      _exit(mistakes);
    }
    CHECK_EQ(Sum().run(pair[1]), RD_OK);
    CHECK_EQ(wait_and_release(work), RD_OK);
    CHECK_EQ(sum.array[0], 2.0f);
    // In the bucket, too.
    auto reduce_bucket = [&](int member, float* memory) {
      rd_span span{memory, memory, 1};
      rd_call call = make_call(RD_ALLREDUCE);
      call.spans = &span;
      call.num_spans = 1;
      rd_result result;
      CHECK_EQ(rd_run(pair[member], &call, &result, kLongS), RD_OK);
    };
    std::thread other([&] { reduce_bucket(1, other_bucket); });
    reduce_bucket(0, bucket);
    other.join();
    CHECK_EQ(bucket[0], 3.0f);
    // The child lives, but the end of a member is noticed.
    rd_close(pair[0]);
    CHECK_EQ(Sum().run(pair[1]), RD_PEER_LOST);
    close(lives[1]);
    close(lives[0]);
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    rd_release_bucket(bucket);
    rd_release_bucket(other_bucket);
  }
}

TEST(a_child_that_a_signal_handler_forks_in_the_middle_of_a_wait_is_refused) {
  install_interpreter();
  for (const std::string where : {"running", "behind another", "waiting", "announced"}) {
    bool is_announced = where == "announced";
    Pair pair({0, 0}, 0, is_announced ? 1 : 0);
    Sum ahead, own, others[2];
    auto run = [&](int member, Sum& sum, rd_work** work) {
      rd_result result;
      if (!is_announced) return sum.run(pair[member]);
      CHECK_EQ(rd_agree(pair[member], 0, "sum", &sum.call), RD_OK);
      return rd_run_announced(pair[member], 0, &sum.call, kLongS, kLongS, &result, work);
    };
    rd_work *work = where == "running" || is_announced ? nullptr : ahead.submit(pair[0]), *unfinished = nullptr;
    std::promise<void> forked;
    pid_t child = -1;
    signal_handler = [&] {
      child = fork();
      if (child == 0) return int(alarm(60));  // ends a child that waits
      forked.set_value();
      return 0;
    };
    signal_came = true;
    std::thread other([&] {
      forked.get_future().wait();
      rd_work* none = nullptr;
      for (int i = 0; i < (where == "behind another" ? 2 : 1); ++i) CHECK_EQ(run(1, others[i], &none), RD_OK);
    });
    rd_result result;
    rd_status status = where == "waiting" ? rd_wait(work, &result, kLongS) : run(0, own, &unfinished);
    if (child == 0) _exit(status == RD_FORKED && unfinished == nullptr ? 0 : 1);
    CHECK_EQ(status, RD_OK);
    other.join();
    CHECK_EQ((where == "waiting" ? ahead : own).array[0], 2.0f);
    if (work != nullptr) CHECK_EQ(wait_and_release(work), RD_OK);
    int ended = -1;
    CHECK_EQ(waitpid(child, &ended, 0), child);
    CHECK_EQ(ended, 0);
  }
  rd_set_interpreter(nullptr);
}
