// Every collective × algorithm × link × dtype × operation × odd size, with ranks as threads.
#include <cstdlib>
#include <random>

#include "check.h"
#include "small_integers.h"
#include "thread_ranks.h"

using namespace thread_ranks;

namespace {

struct HostCase {
  const char* name;
  std::vector<uint32_t> hosts;
  std::vector<rd_algorithm> allreduce;  // the algorithms that can run on these hosts
};

const std::vector<HostCase>& cases() {
  static const std::vector<HostCase> all = {
      {"one member", {0}, {RD_AUTO}},
      {"one host, 2", {0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING}},
      {"one host, 3", {0, 0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING}},
      {"one host, 5", {0, 0, 0, 0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING}},
      {"two hosts, 1 + 1", {0, 1}, {RD_AUTO, RD_RING, RD_DOUBLING, RD_TWO_LEVEL}},
      {"three hosts, 1 each", {0, 1, 2}, {RD_RING, RD_DOUBLING}},
      {"two hosts, 2 + 2", {0, 0, 1, 1}, {RD_AUTO, RD_RING, RD_DOUBLING, RD_TWO_LEVEL}},
      {"two hosts, alternating", {0, 1, 0, 1}, {RD_RING, RD_TWO_LEVEL}},
      {"three hosts, 2 + 1 + 2", {0, 0, 1, 2, 2}, {RD_RING, RD_DOUBLING, RD_TWO_LEVEL}},
  };
  return all;
}

const uint64_t kSizes[] = {0, 1, 2, 37, 1000, 4099, 70001};

void check_allreduce(Channel& channel, uint32_t rank, rd_algorithm algorithm, rd_dtype dtype, rd_op op, uint64_t count,
                     bool in_place) {
  uint32_t size = channel.topology().size;
  auto in = small_integers::array(dtype, count, [&](uint64_t i) { return small_integers::input(op, size, rank, i); });
  auto want =
      small_integers::array(dtype, count, [&](uint64_t i) { return small_integers::expected(dtype, op, size, i); });
  std::vector<char> out(in.size() + 1);
  void* target = in_place ? in.data() : out.data();
  rd_span span{in.data(), target, count};
  rd_call c = make_call(RD_ALLREDUCE, dtype, op);
  c.algorithm = algorithm;
  c.spans = &span;
  c.num_spans = 1;
  CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
  CHECK(count == 0 || std::memcmp(target, want.data(), want.size()) == 0);
}

bool defined(rd_dtype dtype, rd_op op) { return op != RD_ADASUM && !(dtype == RD_BOOL && op == RD_MEAN); }

// Returns the random numbers of a rank, the same every time.
std::vector<float> noise(uint32_t rank, uint64_t count) {
  std::mt19937 random(rank + 1);
  std::normal_distribution<float> normal(0, 1000);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

TEST(allreduce_of_every_dtype_and_operation) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      for (rd_algorithm algorithm : one.allreduce)
        for (int dtype = 0; dtype < RD_NUM_DTYPES; ++dtype)
          for (int op = 0; op < RD_NUM_OPS; ++op)
            if (defined(rd_dtype(dtype), rd_op(op)))
              check_allreduce(channel, rank, algorithm, rd_dtype(dtype), rd_op(op), 37, false);
    });
  }
}

TEST(allreduce_of_every_size) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      for (rd_algorithm algorithm : one.allreduce)
        for (uint64_t count : kSizes)
          for (rd_dtype dtype : {RD_FLOAT32, RD_FLOAT16, RD_INT8})
            for (bool in_place : {false, true})
              check_allreduce(channel, rank, algorithm, dtype, RD_MEAN, count, in_place);
    });
  }
}

TEST(allreduce_of_several_spans_is_that_of_each) {
  const uint64_t counts[] = {3, 0, 5000, 1, 17, 20000};
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      for (rd_algorithm algorithm : one.allreduce) {
        std::vector<std::vector<float>> arrays;
        std::vector<rd_span> spans;
        for (uint64_t count : counts) {
          arrays.emplace_back(count, float(rank + 1));
          spans.push_back({arrays.back().data(), arrays.back().data(), count});
        }
        rd_call c = make_call(RD_ALLREDUCE);
        c.algorithm = algorithm;
        c.spans = spans.data();
        c.num_spans = spans.size();
        CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
        float want = float(all.size() * (all.size() + 1) / 2);
        for (const auto& array : arrays)
          for (float value : array) CHECK_EQ(value, want);
      }
    });
  }
}

TEST(allreduce_scales_before_and_after) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      for (rd_algorithm algorithm : one.allreduce) {
        std::vector<double> array(5003, rank + 1.0);
        rd_span span{array.data(), array.data(), array.size()};
        rd_call c = make_call(RD_ALLREDUCE, RD_FLOAT64, RD_SUM);
        c.algorithm = algorithm;
        c.spans = &span;
        c.num_spans = 1;
        c.prescale = 0.5;
        c.postscale = 8;
        CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
        double want = all.size() * (all.size() + 1) / 2 * 4.0;
        for (double value : array) CHECK_EQ(value, want);
      }
    });
  }
}

TEST(results_are_the_same_bits_on_every_rank_and_in_every_run) {
  for (const HostCase& one : cases()) {
    for (rd_algorithm algorithm : one.allreduce) {
      for (uint64_t count : {uint64_t(501), uint64_t(30011)}) {
        std::vector<std::vector<float>> first;
        for (int repeat = 0; repeat < 2; ++repeat) {
          ThreadRanks all({one.hosts});
          std::vector<std::vector<float>> results(all.size());
          all.run([&](uint32_t rank, Channel& channel) {
            std::vector<float>& array = results[rank] = noise(rank, count);
            rd_span span{array.data(), array.data(), count};
            rd_call c = make_call(RD_ALLREDUCE);
            c.algorithm = algorithm;
            c.spans = &span;
            c.num_spans = 1;
            CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          });
          if (repeat == 0) first = results;
          for (const auto& result : results) CHECK(std::memcmp(result.data(), first[0].data(), count * 4) == 0);
        }
      }
    }
  }
}

TEST(buckets_are_reduced_in_place) {
  for (const HostCase& one : cases()) {
    GroupSetup setup{one.hosts};
    setup.bucket_bytes = 400000;
    ThreadRanks all(setup);
    all.run([&](uint32_t rank, Channel& channel) {
      float* bucket = reinterpret_cast<float*>(channel.bucket());
      for (uint64_t offset : {0, 16, 1000})
        for (uint64_t count : {1, 37, 90001}) {
          for (uint64_t i = 0; i < count; ++i) bucket[offset + i] = float((rank + 1) * (i % 5));
          rd_span span{bucket + offset, bucket + offset, count};
          rd_call c = make_call(RD_ALLREDUCE, RD_FLOAT32, RD_MEAN);
          c.spans = &span;
          c.num_spans = 1;
          c.flags = RD_PRE_AGREED;
          CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          float mean = float(all.size() + 1) / 2;
          for (uint64_t i = 0; i < count; ++i) CHECK_EQ(bucket[offset + i], mean * float(i % 5));
        }
    });
  }
}

TEST(each_member_may_use_either_of_its_bucket_areas_and_the_other_keeps_what_it_holds) {
  for (const HostCase& one : cases()) {
    GroupSetup setup{one.hosts};
    setup.bucket_bytes = 400000;
    ThreadRanks all(setup);
    all.run([&](uint32_t rank, Channel& channel) {
      for (uint32_t step = 0; step < 8; ++step) {
        uint32_t area = (rank >> (step / 2)) & 1;
        float* bucket = reinterpret_cast<float*>(channel.bucket(area));
        float* other = reinterpret_cast<float*>(channel.bucket(1 - area));
        constexpr uint64_t kOffset = 16, kCount = 90001;
        std::fill(other, other + setup.bucket_bytes / 4, -1.0f);
        for (uint64_t i = 0; i < kCount; ++i) bucket[kOffset + i] = float((rank + 1) * (i % 5));
        rd_span span{bucket + kOffset, bucket + kOffset, kCount};
        rd_call c = make_call(RD_ALLREDUCE, RD_FLOAT32, RD_MEAN);
        c.spans = &span;
        c.num_spans = 1;
        c.flags = step % 2 == 0 ? RD_PRE_AGREED : 0;
        CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
        float mean = float(all.size() + 1) / 2;
        for (uint64_t i = 0; i < kCount; ++i) CHECK_EQ(bucket[kOffset + i], mean * float(i % 5));
        for (uint64_t i = 0; i < setup.bucket_bytes / 4; ++i) CHECK_EQ(other[i], -1.0f);
      }
    });
  }
}

TEST(an_operation_other_than_allreduce_works_in_a_bucket_too) {
  for (const HostCase& one : cases()) {
    GroupSetup setup{one.hosts};
    setup.bucket_bytes = 100000;
    ThreadRanks all(setup);
    all.run([&](uint32_t rank, Channel& channel) {
      int32_t* bucket = reinterpret_cast<int32_t*>(channel.bucket());
      for (uint64_t count : {1, 20000}) {
        std::fill(bucket, bucket + count, int32_t(rank) + 1);
        rd_span span{bucket, bucket, count};
        rd_call c = make_call(RD_BROADCAST, RD_INT32);
        c.peer = 0;
        c.spans = &span;
        c.num_spans = 1;
        CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
        for (uint64_t i = 0; i < count; ++i) CHECK_EQ(bucket[i], 1);
      }
    });
  }
}

TEST(broadcast_from_every_root) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<rd_algorithm> algorithms = {RD_AUTO};
      if (all.size() > 1) algorithms.push_back(RD_TREE);
      for (rd_algorithm algorithm : algorithms)
        for (uint32_t root = 0; root < all.size(); ++root)
          for (uint64_t count : kSizes) {
            std::vector<int32_t> in(count, rank == root ? 7 + int(root) : -1), out(count, -2);
            std::vector<rd_span> spans = {{in.data(), out.data(), count / 3},
                                          {in.data() + count / 3, out.data() + count / 3, count - count / 3}};
            rd_call c = make_call(RD_BROADCAST, RD_INT32);
            c.algorithm = algorithm;
            c.peer = int(root);
            c.spans = spans.data();
            c.num_spans = 2;
            CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
            for (int32_t value : out) CHECK_EQ(value, 7 + int(root));
          }
    });
  }
}

TEST(allgather_of_different_lengths) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<rd_algorithm> algorithms = {RD_AUTO};
      if (all.size() > 1) algorithms.push_back(RD_RING);
      for (rd_algorithm algorithm : algorithms)
        for (uint64_t base : {0, 1, 700, 5000}) {
          std::vector<uint64_t> counts;
          std::vector<int64_t> want;
          for (uint32_t other = 0; other < all.size(); ++other) {
            counts.push_back(base * ((other + 1) % 3));
            want.insert(want.end(), counts.back(), int64_t(other) + 100);
          }
          std::vector<int64_t> in(counts[rank], int64_t(rank) + 100), out(want.size(), -1);
          rd_span span{in.data(), out.data(), in.size()};
          rd_call c = make_call(RD_ALLGATHER, RD_INT64);
          c.algorithm = algorithm;
          c.spans = &span;
          c.num_spans = 1;
          c.counts = counts.data();
          CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          CHECK(out == want);
        }
    });
  }
}

TEST(reduce_scatter_with_remainders) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<rd_algorithm> algorithms = {RD_AUTO};
      if (all.size() > 1) algorithms.push_back(RD_RING);
      for (rd_algorithm algorithm : algorithms)
        for (uint64_t total : {0, 1, 7, 2003, 30001}) {
          std::vector<uint64_t> counts;
          uint64_t start = 0;
          for (uint32_t other = 0; other < all.size(); ++other) {
            counts.push_back(total / all.size() + (other < total % all.size() ? 1 : 0));
            if (other < rank) start += counts.back();
          }
          std::vector<float> in(total), out(counts[rank]);
          for (uint64_t i = 0; i < total; ++i) in[i] = float((rank + 1) * (i % 11));
          rd_span span{in.data(), out.data(), total};
          rd_call c = make_call(RD_REDUCE_SCATTER, RD_FLOAT32, RD_MEAN);
          c.algorithm = algorithm;
          c.spans = &span;
          c.num_spans = 1;
          c.counts = counts.data();
          CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
          for (uint64_t i = 0; i < out.size(); ++i)
            CHECK_EQ(out[i], float((start + i) % 11) * float(all.size() + 1) / 2);
        }
    });
  }
}

TEST(alltoall_with_uneven_splits) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      for (uint64_t base : {0, 1, 900, 40000}) {
        auto gives = [&](uint32_t from, uint32_t to) { return base * ((from + 2 * to) % 3); };
        std::vector<uint64_t> splits, counts;
        std::vector<int32_t> in, want;
        for (uint32_t other = 0; other < all.size(); ++other) {
          splits.push_back(gives(rank, other));
          counts.push_back(gives(other, rank));
          in.insert(in.end(), splits.back(), int32_t(rank * 100 + other));
          want.insert(want.end(), counts.back(), int32_t(other * 100 + rank));
        }
        std::vector<int32_t> out(want.size(), -1);
        rd_span span{in.data(), out.data(), in.size()};
        rd_call c = make_call(RD_ALLTOALL, RD_INT32);
        c.spans = &span;
        c.num_spans = 1;
        c.splits = splits.data();
        c.counts = counts.data();
        CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
        CHECK(out == want);
      }
    });
  }
}

TEST(adasum_of_equal_vectors_is_the_vector_and_of_orthogonal_ones_the_sum) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      uint32_t size = all.size();
      std::vector<float> equal(1001, 3), own(size * 10, 0);
      for (uint32_t i = 0; i < 10; ++i) own[rank * 10 + i] = float(rank + 1);
      std::vector<rd_span> spans = {{equal.data(), equal.data(), equal.size()}, {own.data(), own.data(), own.size()}};
      rd_call c = make_call(RD_ALLREDUCE, RD_FLOAT32, RD_ADASUM);
      c.spans = spans.data();
      c.num_spans = 2;
      CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
      for (float value : equal) CHECK_EQ(value, 3.0f);
      for (uint32_t i = 0; i < own.size(); ++i) CHECK_EQ(own[i], float(i / 10 + 1));
    });
  }
}

TEST(send_and_receive_do_not_wait_for_collectives) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t rank, Channel& channel) {
      uint32_t size = all.size();
      if (size == 1) return;
      uint32_t next = (rank + 1) % size, before = (rank + size - 1) % size;
      for (uint64_t count : {0, 1, 1000, 300000}) {  // the last is larger than any buffer on the way
        std::vector<int32_t> out(count, int32_t(rank)), in(count, -1);
        rd_span sent{out.data(), nullptr, count}, received{nullptr, in.data(), count};
        rd_call send = make_call(RD_SEND, RD_INT32), receive = make_call(RD_RECEIVE, RD_INT32);
        send.peer = int(next);
        send.spans = &sent;
        send.num_spans = 1;
        receive.peer = int(before);
        receive.spans = &received;
        receive.num_spans = 1;
        auto sending = submit(channel, send);
        CHECK_EQ(run(channel, make_call(RD_BARRIER))->result.status, int(RD_OK));
        CHECK_EQ(run(channel, receive)->result.status, int(RD_OK));
        CHECK_EQ(wait(channel, sending), RD_OK);
        CHECK(in == std::vector<int32_t>(count, int32_t(before)));
      }
    });
  }
}

TEST(more_than_two_gibibytes) {
  if (std::getenv("RONDE_TEST_SMALL") != nullptr) return;  // sanitizers need several times the memory
  for (std::vector<uint32_t> hosts : {std::vector<uint32_t>{0, 0}, {0, 1}}) {
    GroupSetup setup{hosts};
    setup.chunk_bytes = 256 * 1024;
    setup.slot_bytes = 4 << 20;
    ThreadRanks all(setup);
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<uint8_t> array((uint64_t(1) << 31) + 4099, uint8_t(rank + 1));
      rd_span span{array.data(), array.data(), array.size()};
      rd_call c = make_call(RD_ALLREDUCE, RD_UINT8);
      c.spans = &span;
      c.num_spans = 1;
      CHECK_EQ(run(channel, c, 300)->result.status, int(RD_OK));
      uint64_t wrong = 0;
      for (uint8_t value : array) wrong += value != 3;
      CHECK_EQ(wrong, uint64_t(0));
    });
  }
}
