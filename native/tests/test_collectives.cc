// Every collective × algorithm × link × dtype × operation × odd size, with ranks as threads.
#include <cstdlib>
#include <random>

#include "check.h"
#include "choose_algorithm.h"
#include "reduce_reference.h"
#include "small_integers.h"
#include "thread_ranks.h"

using namespace thread_ranks;
using ronde::ReduceParams;

namespace {

struct HostCase {
  const char* name;
  std::vector<uint32_t> hosts;
  std::vector<rd_algorithm> allreduce;  // the algorithms that can run on these hosts
};

const std::vector<HostCase>& cases() {
  static const std::vector<HostCase> all = {
      {"one member", {0}, {RD_AUTO}},
      {"one host, 2", {0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING, RD_HALVING}},
      {"one host, 3", {0, 0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING, RD_HALVING}},
      {"one host, 5", {0, 0, 0, 0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING, RD_HALVING, RD_PAIRWISE}},
      {"two hosts, 1 + 1", {0, 1}, {RD_AUTO, RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
      {"three hosts, 1 each", {0, 1, 2}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_PAIRWISE}},
      {"two hosts, 2 + 2", {0, 0, 1, 1}, {RD_AUTO, RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
      {"two hosts, alternating", {0, 1, 0, 1}, {RD_RING, RD_TWO_LEVEL}},
      {"three hosts, 2 + 1 + 2", {0, 0, 1, 2, 2}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
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

bool defined(rd_dtype dtype, rd_op op) { return op != RD_ADASUM && ronde::supported({dtype, op}); }

// Runs one call with one span on every rank, and checks that it succeeds.
void run_one(Channel& channel, rd_call c, const void* input, void* output, uint64_t count) {
  rd_span span{input, output, count};
  c.spans = &span;
  c.num_spans = 1;
  CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
}

// Elements per rank when `total` are divided, with more for the first.
std::vector<uint64_t> shares_of(uint64_t total, uint32_t size) {
  std::vector<uint64_t> counts;
  for (uint32_t rank = 0; rank < size; ++rank) counts.push_back(total / size + (rank < total % size ? 1 : 0));
  return counts;
}

uint64_t sum_before(const std::vector<uint64_t>& counts, uint32_t rank) {
  uint64_t sum = 0;
  for (uint32_t other = 0; other < rank; ++other) sum += counts[other];
  return sum;
}

TEST(a_ring_is_used_where_its_steps_are_long_and_fewer_steps_where_they_would_be_short) {
  using ronde::choose_allreduce_between_hosts;
  constexpr uint64_t kMiB = 1 << 20;
  CHECK(choose_allreduce_between_hosts(2, kMiB) == RD_RING);
  CHECK(choose_allreduce_between_hosts(2048, 4096) == RD_DOUBLING);
  CHECK(choose_allreduce_between_hosts(64, kMiB) == RD_HALVING);
  CHECK(choose_allreduce_between_hosts(64, 64 * kMiB) == RD_RING);
  CHECK(choose_allreduce_between_hosts(2048, 64 * kMiB) == RD_HALVING);
  CHECK(choose_allreduce_between_hosts(65, 2 * kMiB) == RD_RING);  // no power of two: one array more
  CHECK(choose_allreduce_between_hosts(65, kMiB / 2) == RD_HALVING);
}

// ---- 16-bit floats: within one rounding of float32 ----------------------------------------------------------------

const std::vector<HostCase>& many_hosts() {
  static const std::vector<HostCase> all = {
      {"2 on one host", {0, 0}, {RD_DIRECT, RD_RING, RD_DOUBLING, RD_HALVING}},
      {"1 + 1", {0, 1}, {RD_AUTO, RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
      {"3 hosts", {0, 1, 2}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_PAIRWISE}},
      {"2 + 2", {0, 0, 1, 1}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
      {"5 hosts", {0, 1, 2, 3, 4}, {RD_AUTO, RD_RING, RD_DOUBLING, RD_HALVING}},
      {"3 + 2 + 1", {0, 0, 0, 1, 1, 2}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
      {"7, alternating", {0, 1, 0, 1, 0, 1, 0}, {RD_RING, RD_TWO_LEVEL}},
      {"4 + 4", {0, 0, 0, 0, 1, 1, 1, 1}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_TWO_LEVEL}},
      {"8 hosts", {0, 1, 2, 3, 4, 5, 6, 7}, {RD_RING, RD_DOUBLING, RD_HALVING, RD_PAIRWISE}},
  };
  return all;
}

// Elements of a rank: in the first third random, then large ones that cancel or do not fit together, among them
// 40,000; then subnormal ones beside large ones. Products get numbers near one.
std::vector<uint16_t> awkward(rd_dtype dtype, rd_op op, uint32_t rank, uint64_t count) {
  std::mt19937 random(rank * 100 + dtype);
  std::vector<uint16_t> bits(count);
  const uint16_t half[] = {0x78e2, 0x78e2, 0xf8e2, 0x7bff, 0xfbff, 0x3c00, 0x0001, 0x8001};  // 40,000, ±65,504, …
  const uint16_t brain[] = {0x7c00, 0x7c00, 0xfc00, 0x7d80, 0xfd80, 0x3f80, 0x0001, 0x8001};
  const uint16_t* large = dtype == RD_FLOAT16 ? half : brain;
  const uint16_t one = dtype == RD_FLOAT16 ? 0x3c00 : 0x3f80;
  for (uint64_t i = 0; i < count; ++i) {
    if (op == RD_PRODUCT || i % 3 == 0) {
      bits[i] = uint16_t(one ^ (random() & 0x807f));
    } else {
      bits[i] = i % 3 == 1 ? large[i % 8 < 2 ? i % 8 : random() % 6] : large[4 + random() % 4];
    }
  }
  return bits;
}

// Counts the elements that are not what rounding a float32 result to 16 bits could give; of many elements every 11th is
// looked at. The exact result and the float32 result differ by at most one float32 rounding of the sum of all sizes per
// step; rounding is monotonic.
uint64_t num_wrong(const ReduceParams& params, const std::vector<std::vector<uint16_t>>& inputs, uint64_t begin,
                   const uint16_t* results, uint64_t count) {
  using namespace reference;
  const double steps = double(inputs.size()) + 2;
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < count; i += count < 1000 ? 1 : 11) {
    double value = params.op == RD_PRODUCT ? 1 : 0, size = 0;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      const double x = params.prescale * decode(params.dtype, inputs[rank][begin + i]);
      if (params.op == RD_PRODUCT) {
        value *= x;
      } else if (params.op == RD_SUM || params.op == RD_MEAN) {
        value += x;
      } else if (rank == 0 || (params.op == RD_MIN ? x < value : x > value)) {
        value = x;
      }
      size = params.op == RD_SUM || params.op == RD_MEAN ? size + std::abs(x) : std::abs(value);
    }
    const double factor = params.postscale / (params.op == RD_MEAN ? double(inputs.size()) : 1);
    const double error = steps * std::abs(factor) * (size * 0x1p-24 + 0x1p-149);
    const double result = decode(params.dtype, results[i]);
    wrong += !(result >= round_to(params.dtype, value * factor - error) &&
               result <= round_to(params.dtype, value * factor + error));
  }
  return wrong;
}

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

TEST(results_in_16_bits_are_float32_results_rounded_once) {
  for (const HostCase& one : many_hosts()) {
    // Small slots make many chunks, and large ones chunks that go by ring.
    constexpr uint64_t kSmallSlots = 64 << 10, kLargeSlots = 1 << 20;
    for (uint64_t slot_bytes : {kSmallSlots, kLargeSlots}) {
      GroupSetup setup{one.hosts};
      setup.slot_bytes = slot_bytes;
      setup.bucket_bytes = 200000;
      ThreadRanks all(setup);
      auto run_all = [&](const ReduceParams& params, uint64_t count) {
        std::vector<std::vector<uint16_t>> inputs;
        for (uint32_t rank = 0; rank < all.size(); ++rank)
          inputs.push_back(awkward(params.dtype, params.op, rank, count));
        std::vector<uint64_t> counts = shares_of(count, all.size());
        rd_call c = make_call(RD_ALLREDUCE, params.dtype, params.op);
        c.prescale = params.prescale;
        c.postscale = params.postscale;
        for (rd_algorithm algorithm : one.allreduce) {
          std::vector<std::vector<uint16_t>> results(all.size(), std::vector<uint16_t>(count));
          c.algorithm = algorithm;
          all.run([&](uint32_t rank, Channel& channel) {
            run_one(channel, c, inputs[rank].data(), results[rank].data(), count);
          });
          CHECK_EQ(num_wrong(params, inputs, 0, results[0].data(), count), uint64_t(0));
          for (const auto& result : results) CHECK(result == results[0]);
        }
        c.algorithm = RD_AUTO;
        all.run([&](uint32_t rank, Channel& channel) {
          uint16_t* bucket = reinterpret_cast<uint16_t*>(channel.bucket());
          std::copy(inputs[rank].begin(), inputs[rank].end(), bucket);
          run_one(channel, c, bucket, bucket, count);
          if (rank == 0) CHECK_EQ(num_wrong(params, inputs, 0, bucket, count), uint64_t(0));
          std::vector<uint16_t> out(count);
          rd_call scatter = c, reduce = c;
          scatter.kind = RD_REDUCE_SCATTER;
          scatter.counts = counts.data();
          run_one(channel, scatter, inputs[rank].data(), out.data(), count);
          CHECK_EQ(num_wrong(params, inputs, sum_before(counts, rank), out.data(), counts[rank]), uint64_t(0));
          reduce.kind = RD_REDUCE;
          reduce.peer = int(all.size()) - 1;
          run_one(channel, reduce, inputs[rank].data(), out.data(), count);
          if (rank + 1 == all.size()) CHECK_EQ(num_wrong(params, inputs, 0, out.data(), count), uint64_t(0));
        });
      };
      for (rd_dtype dtype : {RD_FLOAT16, RD_BFLOAT16}) {
        if (slot_bytes == kLargeSlots) {
          run_all({dtype, RD_MEAN, 1, 1, all.size()}, 40001);
          continue;
        }
        for (rd_op op : {RD_SUM, RD_MEAN, RD_MIN, RD_MAX, RD_PRODUCT}) run_all({dtype, op, 1, 1, all.size()}, 101);
        for (rd_op op : {RD_SUM, RD_MEAN, RD_MIN}) run_all({dtype, op, 0.25, 3, all.size()}, 101);
        run_all({dtype, RD_SUM, 0.25, 3, all.size()}, 12001);
      }
    }
  }
}

TEST(sixteen_bits_send_half_the_bytes_or_three_quarters_where_a_host_has_several_members) {
  struct Case {
    std::vector<uint32_t> hosts;
    rd_kind kind;
    double share;
  };
  for (const Case& one : {Case{{0, 1}, RD_ALLREDUCE, 0.5}, Case{{0, 1, 2, 3}, RD_ALLREDUCE, 0.5},
                          Case{{0, 1, 2, 3}, RD_REDUCE_SCATTER, 0.5}, Case{{0, 0, 1, 1}, RD_ALLREDUCE, 0.75},
                          Case{{0, 1}, RD_ALLGATHER, 0.5}}) {
    GroupSetup setup{one.hosts};
    setup.slot_bytes = 4 << 20;
    setup.counts_bytes = true;
    ThreadRanks all(setup);
    uint64_t sent[2];
    for (rd_dtype dtype : {RD_FLOAT32, RD_BFLOAT16}) {
      const uint64_t count = 400000, before = all.bytes_sent();
      std::vector<uint64_t> counts = shares_of(count, all.size());
      all.run([&](uint32_t rank, Channel& channel) {
        std::vector<char> in(count * 4), out(count * 4);
        rd_call c = make_call(one.kind, dtype);
        if (one.kind != RD_ALLREDUCE) c.counts = counts.data();
        run_one(channel, c, in.data(), out.data(), one.kind == RD_ALLGATHER ? counts[rank] : count);
      });
      sent[dtype == RD_BFLOAT16] = all.bytes_sent() - before;
    }
    CHECK(double(sent[1]) < double(sent[0]) * (one.share + 0.01));
    CHECK(double(sent[1]) > double(sent[0]) * (one.share - 0.01));
  }
}

TEST(a_mean_of_40000_is_40000_in_float16) {
  for (const HostCase& one : many_hosts()) {
    ThreadRanks all({one.hosts});
    all.run([&](uint32_t, Channel& channel) {
      for (rd_algorithm algorithm : one.allreduce) {
        std::vector<uint16_t> array(3, 0x78e2);
        rd_call c = make_call(RD_ALLREDUCE, RD_FLOAT16, RD_MEAN);
        c.algorithm = algorithm;
        run_one(channel, c, array.data(), array.data(), array.size());
        for (uint16_t bits : array) CHECK_EQ(bits, 0x78e2);
      }
    });
  }
}

TEST(a_mean_of_integers_never_wraps) {
  for (const HostCase& one : many_hosts()) {
    ThreadRanks all({one.hosts});
    for (rd_dtype dtype : {RD_UINT8, RD_INT8, RD_UINT16, RD_INT32, RD_UINT64, RD_INT64}) {
      const reference::IntegerRange range = reference::range_of(dtype);
      const size_t width = ronde::element_bytes(dtype);
      for (uint64_t count : {6, 9001}) {
        // Per element all members have the ends of the range, or one more or less; one has another number.
        auto input = [&](uint32_t rank, uint64_t i) -> __int128 {
          if (i % 6 == 5) return rank == 0 ? range.low() + 1 : range.high();
          const __int128 values[] = {range.high(), range.low(), range.high() - 1, range.low() + 1, rank};
          return values[i % 6] + (i % 6 == 2 && rank == 0 ? 1 : 0);
        };
        all.run([&](uint32_t rank, Channel& channel) {
          std::vector<char> in(count * width), out(count * width);
          for (uint64_t i = 0; i < count; ++i) {
            const auto bits = static_cast<uint64_t>(input(rank, i));
            std::memcpy(&in[i * width], &bits, width);
          }
          for (rd_algorithm algorithm : one.allreduce) {
            rd_call c = make_call(RD_ALLREDUCE, dtype, RD_MEAN);
            c.algorithm = algorithm;
            run_one(channel, c, in.data(), out.data(), count);
            uint64_t wrong = 0;
            for (uint64_t i = 0; i < count; ++i) {
              __int128 sum = 0;
              for (uint32_t other = 0; other < all.size(); ++other) sum += input(other, i);
              wrong += reference::read(dtype, out.data(), i).whole != sum / __int128(all.size());
            }
            CHECK_EQ(wrong, uint64_t(0));
          }
        });
      }
    }
  }
}

TEST(collectives_in_a_bucket_are_in_place) {
  for (const HostCase& one : cases()) {
    GroupSetup setup{one.hosts};
    setup.bucket_bytes = 400000;
    ThreadRanks all(setup);
    uint32_t size = all.size();
    all.run([&](uint32_t rank, Channel& channel) {
      int32_t* bucket = reinterpret_cast<int32_t*>(channel.bucket()) + 16;
      for (uint64_t total : {1, 20000, 90001}) {
        for (bool uneven : {false, true}) {
          std::vector<uint64_t> counts = shares_of(total, size);
          if (uneven && size > 1) {
            counts[size - 1] += counts[0];
            counts[0] = 0;
          }
          uint64_t begin = sum_before(counts, rank);
          for (int repeat = 0; repeat < 2; ++repeat) {
            for (uint64_t i = 0; i < total; ++i) bucket[i] = int32_t((rank + 1) * (i % 7));
            rd_call c = make_call(RD_REDUCE_SCATTER, RD_INT32);
            c.counts = counts.data();
            run_one(channel, c, bucket, bucket + begin, total);
            for (uint64_t i = begin; i < begin + counts[rank]; ++i)
              CHECK_EQ(bucket[i], int32_t(size * (size + 1) / 2 * (i % 7)));

            for (uint64_t i = 0; i < total; ++i) bucket[i] = -1;
            for (uint64_t i = begin; i < begin + counts[rank]; ++i) bucket[i] = int32_t(i);
            c = make_call(RD_ALLGATHER, RD_INT32);
            c.counts = counts.data();
            run_one(channel, c, bucket + begin, bucket, counts[rank]);
            for (uint64_t i = 0; i < total; ++i) CHECK_EQ(bucket[i], int32_t(i));

            for (uint64_t i = 0; i < total; ++i) bucket[i] = int32_t(rank + i);
            c = make_call(RD_BROADCAST, RD_INT32);
            c.peer = int(size) - 1;
            run_one(channel, c, bucket, bucket, total);
            for (uint64_t i = 0; i < total; ++i) CHECK_EQ(bucket[i], int32_t(size - 1 + i));
          }
        }
      }
    });
  }
}

TEST(reduce_gives_the_result_to_every_root) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    uint32_t size = all.size();
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<rd_algorithm> algorithms = {RD_AUTO};
      if (size > 1) algorithms.push_back(RD_TREE);
      for (rd_algorithm algorithm : algorithms)
        for (uint32_t root = 0; root < size; ++root)
          for (uint64_t count : {0, 1, 37, 4099, root == 1 ? 70001 : 1000})
            for (rd_op op : {RD_SUM, RD_MEAN, RD_BIT_XOR}) {
              std::vector<int32_t> in(count), out(count, -2);
              for (uint64_t i = 0; i < count; ++i) in[i] = small_integers::input(op, size, rank, i);
              // Two spans, and no output but on the root.
              int32_t* output = rank == root ? out.data() : nullptr;
              std::vector<rd_span> spans = {
                  {in.data(), output, count / 3},
                  {in.data() + count / 3, output == nullptr ? nullptr : output + count / 3, count - count / 3}};
              rd_call c = make_call(RD_REDUCE, RD_INT32, op);
              c.algorithm = algorithm;
              c.peer = int(root);
              c.spans = spans.data();
              c.num_spans = 2;
              CHECK_EQ(run(channel, c)->result.status, int(RD_OK));
              for (uint64_t i = 0; i < count; ++i)
                CHECK_EQ(out[i], rank == root ? small_integers::expected(RD_INT32, op, size, i) : -2);
            }
    });
  }
}

TEST(gather_and_scatter_of_different_lengths) {
  for (const HostCase& one : cases()) {
    ThreadRanks all({one.hosts});
    uint32_t size = all.size();
    all.run([&](uint32_t rank, Channel& channel) {
      std::vector<rd_algorithm> algorithms = {RD_AUTO};
      if (size > 1) algorithms.push_back(RD_TREE);
      for (rd_algorithm algorithm : algorithms)
        for (uint32_t root = 0; root < size; ++root)
          for (uint64_t base : {0, 1, 700, 5000, root == 1 ? 20000 : 2}) {  // more than a segment of the tree
            std::vector<uint64_t> counts;
            std::vector<int64_t> everything;
            for (uint32_t other = 0; other < size; ++other) {
              counts.push_back(base * ((other + 1) % 3));
              for (uint64_t i = 0; i < counts.back(); ++i) everything.push_back(int64_t(other * 1000000 + i));
            }
            const int64_t* begin = everything.data() + sum_before(counts, rank);
            std::vector<int64_t> mine(begin, begin + counts[rank]), gathered(everything.size(), -1);
            rd_call c = make_call(RD_GATHER, RD_INT64);
            c.algorithm = algorithm;
            c.peer = int(root);
            c.counts = counts.data();
            run_one(channel, c, mine.data(), rank == root ? gathered.data() : nullptr, mine.size());
            if (rank == root) CHECK(gathered == everything);

            std::vector<int64_t> received(counts[rank], -1);
            c.kind = RD_SCATTER;
            run_one(channel, c, rank == root ? everything.data() : nullptr, received.data(), received.size());
            CHECK(received == mine);
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
