// What happens when members' calls differ, or members abort, die or are late: every wait ends, and its error names the
// member that caused it.
#include <atomic>
#include <cerrno>
#include <future>

#include "check.h"
#include "thread_ranks.h"

using namespace thread_ranks;

namespace {

const std::vector<std::vector<uint32_t>> kTopologies = {{0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1}};

rd_call sum_of(std::vector<float>& array, rd_span* span) {
  *span = {array.data(), array.data(), array.size()};
  rd_call c = make_call(RD_ALLREDUCE);
  c.spans = span;
  c.num_spans = 1;
  return c;
}

int allreduce(Channel& channel, uint64_t count, double remaining_s = 60, rd_result* result = nullptr) {
  std::vector<float> array(count, 1);
  rd_span span;
  auto call = run(channel, sum_of(array, &span), remaining_s);
  if (result != nullptr) *result = call->result;
  return call->result.status;
}

}  // namespace

TEST(different_calls_are_a_mismatch_for_everyone_and_the_channel_goes_on) {
  for (const auto& hosts : kTopologies) {
    ThreadRanks all({hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<float> array(10 + (rank == 1 ? 1 : 0), 1);
      rd_span span;
      rd_call c = sum_of(array, &span);
      std::string text = "I am " + std::to_string(rank);
      c.description = text.c_str();
      c.signature = rank == 1 ? 5 : 4;
      auto call = run(channel, c);
      CHECK_EQ(call->result.status, int(RD_MISMATCH));
      CHECK_EQ(call->member_calls.size(), size_t(all.size()));
      for (uint32_t other = 0; other < call->member_calls.size(); ++other)
        CHECK_EQ(std::string(call->member_calls[other].description), "I am " + std::to_string(other));
      CHECK_EQ(allreduce(channel, 1000), int(RD_OK));
    });
  }
}

TEST(a_timeout_names_the_member_that_is_missing) {
  for (const auto& hosts : kTopologies) {
    ThreadRanks all({hosts});
    uint32_t late = all.size() - 1;
    std::atomic<uint32_t> ended{0};
    all.run([&](uint32_t rank, Channel& channel) {
      if (rank == late) return;
      rd_result result;
      CHECK_EQ(allreduce(channel, 100, rank == 0 ? 0.05 : 60, &result), int(RD_TIMEOUT));
      if (all.size() == 2) CHECK_EQ(result.member, int(late));
      ++ended;
    });
    CHECK_EQ(ended.load(), all.size() - 1);
  }
}

TEST(an_abort_from_another_thread_ends_every_wait_and_names_the_lost_member) {
  for (const auto& hosts : kTopologies) {
    ThreadRanks all({hosts});
    uint32_t dead = all.size() - 1;
    all.run([&](uint32_t rank, Channel& channel) {
      if (rank == dead) {
        // All others wait for this member; the abort reaches them through the first member alone.
        all.channel(0).abort({RD_PEER_LOST, int(dead), ETIMEDOUT});
        return;
      }
      rd_result result;
      CHECK_EQ(allreduce(channel, 100, 60, &result), int(RD_PEER_LOST));
      CHECK_EQ(result.member, int(dead));
      CHECK_EQ(result.detail, ETIMEDOUT);
      CHECK_EQ(allreduce(channel, 100), int(RD_PEER_LOST));  // and so does every later call
    });
  }
}

TEST(a_member_that_closes_is_named_by_those_who_still_need_it) {
  for (const auto& hosts : kTopologies) {
    GroupSetup setup{hosts};
    setup.counts_bytes = true;  // with copies of the sockets, such as a forked child may have
    ThreadRanks all(setup);
    uint32_t gone = all.size() - 1;
    std::atomic<uint32_t> stayed{0};
    all.run([&](uint32_t rank, Channel& channel) {
      CHECK_EQ(allreduce(channel, 5000), int(RD_OK));  // its last bytes arrive although it leaves at once
      if (rank == gone) return all.destroy(gone);
      // The first call that needs it aborts the channel for all: that must wait until everyone has the first result.
      ++stayed;
      while (stayed < gone) std::this_thread::yield();
      rd_result result;
      CHECK_EQ(allreduce(channel, 5000, 60, &result), int(RD_PEER_LOST));
      CHECK_EQ(result.member, int(gone));
    });
  }
}

TEST(channels_do_not_wait_for_each_other) {
  for (const auto& hosts : kTopologies) {
    ThreadRanks left({hosts}), right({hosts});
    left.run([&](uint32_t rank, Channel& channel) {
      // Half of the members start with one channel, half with the other.
      std::vector<float> a(3000, 1), b(3000, 1);
      rd_span span_a, span_b;
      rd_call call_a = sum_of(a, &span_a), call_b = sum_of(b, &span_b);
      bool odd = rank % 2 == 1;
      auto first = submit(odd ? right.channel(rank) : channel, odd ? call_b : call_a);
      auto second = submit(odd ? channel : right.channel(rank), odd ? call_a : call_b);
      CHECK_EQ(wait(odd ? right.channel(rank) : channel, first), RD_OK);
      CHECK_EQ(wait(odd ? channel : right.channel(rank), second), RD_OK);
      CHECK_EQ(a[0], float(left.size()));
      CHECK_EQ(b[2999], float(left.size()));
    });
  }
}

TEST(submitted_calls_keep_their_order) {
  ThreadRanks all({{0, 0, 0}});
  all.run([&](uint32_t, Channel& channel) {
    std::vector<std::vector<float>> arrays(50, std::vector<float>(100, 1));
    std::vector<rd_span> spans(arrays.size());
    std::vector<std::shared_ptr<Call>> calls;
    for (size_t i = 0; i < arrays.size(); ++i) {
      rd_call c = sum_of(arrays[i], &spans[i]);
      c.signature = i;  // any other order is a mismatch
      calls.push_back(submit(channel, c));
    }
    CHECK_EQ(allreduce(channel, 10), int(RD_OK));  // a blocking call runs after the queued ones
    for (auto& call : calls) CHECK_EQ(wait(channel, call), RD_OK);
  });
}

TEST(a_joined_member_contributes_zeros_until_all_have_joined) {
  for (const auto& hosts : kTopologies) {
    ThreadRanks all({hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      // Rank r has data for r + 1 steps.
      for (uint32_t step = 0; step <= rank; ++step) {
        for (uint64_t count : {10, 20000}) {
          std::vector<float> array(count, 1);
          rd_span span;
          CHECK_EQ(run(channel, sum_of(array, &span))->result.status, int(RD_OK));
          CHECK_EQ(array[0], float(all.size() - step));
          CHECK_EQ(array[count - 1], float(all.size() - step));
        }
      }
      CHECK_EQ(run(channel, make_call(RD_JOIN))->result.status, int(RD_OK));
      CHECK_EQ(allreduce(channel, 10), int(RD_OK));
    });
  }
}

TEST(a_joined_member_contributes_zeros_to_buckets_too_and_keeps_what_its_first_area_holds) {
  for (const auto& hosts : kTopologies) {
    GroupSetup setup{hosts};
    setup.bucket_bytes = 100000;
    ThreadRanks all(setup);
    all.run([&](uint32_t rank, Channel& channel) {
      float* bucket = reinterpret_cast<float*>(channel.bucket());
      for (uint32_t step = 0; step <= rank; ++step)
        for (uint64_t count : {10, 20000}) {
          std::fill(bucket + 100, bucket + 100 + count, 1.0f);
          rd_span span{bucket + 100, bucket + 100, count};
          rd_call c = make_call(RD_ALLREDUCE);
          c.spans = &span;
          c.num_spans = 1;
          CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          CHECK_EQ(bucket[100], float(all.size() - step));
          CHECK_EQ(bucket[99 + count], float(all.size() - step));
        }
      CHECK_EQ(run(channel, make_call(RD_JOIN))->result.status, int(RD_OK));
      CHECK_EQ(bucket[100], float(all.size() - rank));
      CHECK_EQ(bucket[99 + 20000], float(all.size() - rank));
    });
  }
}

TEST(an_operation_that_cannot_be_joined_is_a_mismatch_for_those_who_ask_for_it) {
  ThreadRanks all({{0, 0, 0}});
  all.run([&](uint32_t rank, Channel& channel) {
    if (rank != 0) {
      int32_t value = 0;
      rd_span span{&value, &value, 1};
      rd_call c = make_call(RD_BROADCAST, RD_INT32);
      c.peer = 1;
      c.spans = &span;
      c.num_spans = 1;
      CHECK_EQ(run(channel, c)->result.status, int(RD_MISMATCH));
    }
    CHECK_EQ(run(channel, make_call(RD_JOIN))->result.status, int(RD_OK));
  });
}

TEST(a_reduction_that_zeros_would_change_cannot_be_joined) {
  for (const auto& hosts : kTopologies) {
    GroupSetup setup{hosts};
    setup.bucket_bytes = 100000;
    ThreadRanks all(setup);
    all.run([&](uint32_t rank, Channel& channel) {
      float* bucket = reinterpret_cast<float*>(channel.bucket());
      for (rd_op op : {RD_MIN, RD_MAX, RD_PRODUCT, RD_ADASUM}) {
        for (uint64_t count : {10, 20000}) {
          if (rank == 0) break;  // has joined
          std::vector<float> array(count, 2);
          std::fill(bucket, bucket + count, 2.0f);
          for (float* data : {array.data(), bucket}) {
            rd_span span{data, data, count};
            rd_call c = make_call(RD_ALLREDUCE, RD_FLOAT32, op);
            c.spans = &span;
            c.num_spans = 1;
            CHECK_EQ(run(channel, c)->result.status, int(RD_MISMATCH));
            CHECK_EQ(data[0], 2.0f);
            c.op = RD_MEAN;  // is divided by all members
            CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
            CHECK_EQ(data[0], 2.0f * float(all.size() - 1) / float(all.size()));
            c.dtype = RD_UINT32;  // of these zero is the least
            c.op = RD_MAX;
            CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
            c.dtype = RD_BFLOAT16;  // with wide partial results
            c.op = RD_SUM;
            auto* ones = reinterpret_cast<uint16_t*>(data);
            std::fill(ones, ones + count, uint16_t(0x3f80));
            CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
            const float sum = float(all.size() - 1);
            uint32_t bits;
            std::memcpy(&bits, &sum, sizeof bits);
            CHECK_EQ(ones[0], bits >> 16);
            CHECK_EQ(ones[count - 1], bits >> 16);
          }
        }
      }
      CHECK_EQ(run(channel, make_call(RD_JOIN))->result.status, int(RD_OK));
      CHECK_EQ(allreduce(channel, 10), int(RD_OK));
    });
  }
}

TEST(an_invalid_call_is_refused_and_the_channel_stays_usable) {
  ThreadRanks all({{0, 0}});
  all.run([&](uint32_t rank, Channel& channel) {
    std::vector<float> array(4, 1);
    rd_span span;
    std::vector<rd_call> wrong(11, sum_of(array, &span));
    wrong[0].kind = 99;
    wrong[1].dtype = -1;
    wrong[2].op = RD_NUM_OPS;
    wrong[3].kind = RD_BROADCAST, wrong[3].peer = 2;
    wrong[4].kind = RD_ALLGATHER;  // without counts
    wrong[5].kind = RD_SEND, wrong[5].peer = int(rank);
    wrong[6].dtype = RD_BOOL, wrong[6].op = RD_MEAN;
    wrong[7].kind = RD_REDUCE, wrong[7].peer = 2;
    wrong[8].kind = RD_GATHER, wrong[8].peer = 0;   // without counts
    wrong[9].kind = RD_SCATTER, wrong[9].peer = 0;  // without counts
    wrong[10].op = RD_BIT_AND;                      // of floats
    for (const rd_call& c : wrong) {
      rd_status status = RD_OK;
      try {
        run(channel, c);
      } catch (const ronde::CallError& error) {
        status = error.status;
      }
      CHECK_EQ(status, RD_BAD_CALL);
    }
    CHECK_EQ(allreduce(channel, 4), int(RD_OK));
  });
}

TEST(the_current_call_shows_who_is_missing) {
  for (const auto& hosts : kTopologies) {
    ThreadRanks all({hosts});
    uint32_t late = all.size() - 1;
    std::promise<void> seen;
    auto may_come = seen.get_future().share();
    all.run([&](uint32_t rank, Channel& channel) {
      if (rank == late) may_come.wait();
      if (rank != 0) {
        CHECK_EQ(allreduce(channel, 100), int(RD_OK));
        return;
      }
      std::thread watch([&] {
        rd_current_call current;
        uint32_t missing[8];
        do {  // until only the late one is missing
          channel.get_current_call(&current, missing);
        } while (current.start_ns == 0 || current.num_missing != 1);
        CHECK_EQ(current.kind, int(RD_ALLREDUCE));
        if (hosts.size() == 2 || hosts.back() == 0) CHECK_EQ(missing[0], late);
        seen.set_value();
      });
      CHECK_EQ(allreduce(channel, 100), int(RD_OK));
      watch.join();
    });
  }
}
