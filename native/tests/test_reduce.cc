// The reduce kernels of every CPU level against a slow reference that is written differently.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "reduce/kernels.h"
#include "reduce/reduce.h"
#include "reduce_reference.h"

using namespace ronde;
using namespace reference;

namespace {

struct ReduceCase {
  ReduceParams params;
  size_t num_ins, num_outs, count, shift;
  bool in_place, streaming;
};

std::string name_of(const ReduceCase& c, const std::string& level) {
  const ReduceParams& params = c.params;
  return level + " dtype " + std::to_string(params.dtype) + " op " + std::to_string(params.op) + " scale " +
         std::to_string(params.prescale) + "," + std::to_string(params.postscale) + " ins " +
         std::to_string(c.num_ins) + " outs " + std::to_string(c.num_outs) + " count " + std::to_string(c.count) +
         " shift " + std::to_string(c.shift) + (c.in_place ? " in place" : "") + (c.streaming ? " streaming" : "");
}

void run_case(const ReduceCase& c, const std::string& level, const std::vector<Bytes>& contents,
              const std::vector<Value>& wanted) {
  const size_t bytes = element_bytes(c.params.dtype);
  std::vector<Shifted> ins, outs;
  std::vector<const void*> in_pointers;
  std::vector<void*> out_pointers;
  for (size_t j = 0; j < c.num_ins; ++j) {
    ins.emplace_back(Bytes(contents[j].begin(), contents[j].begin() + c.count * bytes), c.shift);
  }
  for (size_t k = 0; k < c.num_outs; ++k) outs.emplace_back(Bytes(c.count * bytes, 1), c.shift);
  for (Shifted& in : ins) in_pointers.push_back(in.begin());
  // In reverse, so that the first output is not the first input.
  std::vector<Shifted>& targets = c.in_place ? ins : outs;
  for (size_t k = c.num_outs; k-- > 0;) out_pointers.push_back(targets[k].begin());

  force_cpu(level.c_str());
  reduce_many(c.params, in_pointers.data(), c.num_ins, out_pointers.data(), c.num_outs, c.count, c.streaming);

  const std::string name = name_of(c, level);
  for (size_t k = 0; k < c.num_outs; ++k) {
    if (!targets[k].intact()) check::fail(__FILE__, __LINE__, name + ": wrote beyond the end");
    for (size_t i = 0; i < c.count; ++i) {
      if (same(read(c.params.dtype, targets[k].begin(), i), wanted[i])) continue;
      check::fail(__FILE__, __LINE__, name + ": element " + std::to_string(i) + " is wrong");
      break;
    }
  }
}

// Runs one reduction at every CPU level with every count, alignment, number of outputs, in place or not.
void run_cases(const ReduceParams& params, size_t num_ins, const std::vector<size_t>& counts) {
  std::vector<Bytes> contents;
  std::vector<const char*> pointers;
  for (size_t j = 0; j < num_ins; ++j) contents.push_back(data(params.dtype, counts.back(), 100 * params.dtype + j));
  for (const Bytes& content : contents) pointers.push_back(content.data());
  std::vector<Value> wanted(counts.back());
  for (size_t i = 0; i < counts.back(); ++i) wanted[i] = expected(params, pointers, i);
  for (const std::string& level : levels()) {
    for (size_t count : counts) {
      for (size_t shift : {0, 1, 20}) {
        run_case({params, num_ins, 1, count, shift, false, false}, level, contents, wanted);
        run_case({params, num_ins, 3, count, shift, false, true}, level, contents, wanted);
        run_case({params, num_ins, std::min<size_t>(num_ins, 2), count, shift, true, false}, level, contents, wanted);
        run_case({params, num_ins, num_ins, count, shift, true, true}, level, contents, wanted);
      }
    }
  }
}

struct Scaling {
  double prescale, postscale;
};

std::vector<rd_op> folds() { return {RD_SUM, RD_MEAN, RD_MIN, RD_MAX, RD_PRODUCT, RD_BIT_AND, RD_BIT_OR, RD_BIT_XOR}; }

}  // namespace

TEST(every_dtype_and_op_agrees_with_the_reference_at_every_level) {
  for (rd_dtype dtype : dtypes()) {
    for (rd_op op : folds()) {
      for (size_t num_ins : {1, 2, 3, 5}) {
        const ReduceParams params{dtype, op, 1.0, 1.0, num_ins};
        if (supported(params)) run_cases(params, num_ins, {0, 1, 3, 17, 4097});
      }
    }
  }
}

TEST(scaling_before_and_after_agrees_with_the_reference) {
  for (rd_dtype dtype : dtypes()) {
    for (rd_op op : folds()) {
      for (Scaling s : {Scaling{0.5, 1.0}, {1.0, 0.3}, {-1.7, 1e3}, {1e300, kNan}, {1.0, 1e-40}}) {
        const ReduceParams params{dtype, op, s.prescale, s.postscale, 3};
        if (supported(params)) run_cases(params, 2, {17, 1025});
        if (supported(params) && s.postscale != 1.0) run_cases(params, 3, {3, 1025});
      }
    }
  }
}

TEST(a_large_buffer_agrees_with_the_reference) {
  for (rd_dtype dtype : dtypes()) {
    for (rd_op op : {RD_SUM, RD_MEAN, RD_MAX}) {
      const ReduceParams params{dtype, op, 1.0, 1.0, 2};
      if (supported(params)) run_cases(params, 2, {100003});
    }
  }
}

TEST(partial_results_lose_nothing_in_any_order_of_combining_them) {
  // (a op b) op c in all ways: of inputs as in a ring, of partial results as in a tree, with the last step apart or
  // not.
  for (rd_dtype dtype : dtypes()) {
    const Bytes contents[3] = {data(dtype, 4097, 1), data(dtype, 4097, 2), data(dtype, 4097, 3)};
    for (rd_op op : folds()) {
      for (Scaling s : {Scaling{1.0, 1.0}, {0.25, 1.0}, {1.0, 0.3}, {3.3, -0.7}}) {
        const ReduceParams params{dtype, op, s.prescale, s.postscale, 3};
        if (!supported(params)) continue;
        const size_t wide = partial_bytes(params);
        CHECK_EQ(has_wide_partials(params), wide != element_bytes(dtype));
        for (const std::string& level : levels()) {
          force_cpu(level.c_str());
          Shifted a(contents[0], 1), b(contents[1], 3), c(contents[2], 2), out(contents[0], 5);
          Shifted first(Bytes(4097 * wide), 1), second(Bytes(4097 * wide), 2);
          const void* ins[] = {a.begin(), b.begin()};
          reduce_to_partial(params, ins, 2, first.begin(), 4097);
          combine(params, {a.begin(), Form::kInput}, {b.begin(), Form::kInput}, second.begin(), Form::kPartial, 4097);
          size_t wrong = 0, differing = 0;
          const Operand left{first.begin(), Form::kPartial};
          combine(params, left, {c.begin(), Form::kInput}, out.begin(), Form::kResult, 4097);
          for (size_t i = 0; i < 4097; ++i) {
            const Value wanted = expected(params, {contents[0].data(), contents[1].data(), contents[2].data()}, i);
            wrong += !same(read(dtype, out.begin(), i), wanted);
          }
          // The same from two partial results, with the last step made apart.
          const void* last[] = {c.begin()};
          Shifted third(Bytes(4097 * wide), 3), again(contents[0], 6);
          reduce_to_partial(params, last, 1, third.begin(), 4097);
          combine(params, left, {third.begin(), Form::kPartial}, again.begin(), Form::kResult, 4097);
          for (size_t i = 0; i < 4097; ++i)
            differing += !same(read(dtype, out.begin(), i), read(dtype, again.begin(), i));
          combine(params, left, {third.begin(), Form::kPartial}, first.begin(), Form::kPartial, 4097);
          finish_partial(params, first.begin(), again.begin(), 4097);
          for (size_t i = 0; i < 4097; ++i)
            differing += !same(read(dtype, out.begin(), i), read(dtype, again.begin(), i));
          combine(params, {second.begin(), Form::kPartial}, {c.begin(), Form::kInput}, second.begin(), Form::kPartial,
                  4097);
          finish_partial(params, second.begin(), again.begin(), 4097);
          for (size_t i = 0; i < 4097; ++i)
            differing += !same(read(dtype, out.begin(), i), read(dtype, again.begin(), i));
          CHECK_EQ(wrong, 0u);
          CHECK_EQ(differing, 0u);
          for (const Shifted* used : {&a, &b, &c, &out, &first, &second, &third, &again}) CHECK(used->intact());
        }
      }
    }
  }
}

TEST(two_inputs_make_a_result_in_one_step) {
  for (rd_dtype dtype : dtypes()) {
    const Bytes left = data(dtype, 4097, 1), right = data(dtype, 4097, 2);
    for (rd_op op : folds()) {
      for (Scaling s : {Scaling{1.0, 1.0}, {0.25, 3.0}}) {
        const ReduceParams params{dtype, op, s.prescale, s.postscale, 2};
        if (!supported(params)) continue;
        for (const std::string& level : levels()) {
          force_cpu(level.c_str());
          Shifted a(left, 1), b(right, 3);
          combine(params, {a.begin(), Form::kInput}, {b.begin(), Form::kInput}, b.begin(), Form::kResult, 4097);
          size_t wrong = 0;
          for (size_t i = 0; i < 4097; ++i)
            wrong += !same(read(dtype, b.begin(), i), expected(params, {left.data(), right.data()}, i));
          CHECK_EQ(wrong, 0u);
          CHECK(b.intact());
        }
      }
    }
  }
}

TEST(a_mean_of_16_bit_floats_neither_overflows_nor_loses_small_numbers) {
  for (const std::string& level : levels()) {
    force_cpu(level.c_str());
    // 40,000 and the least subnormal number of float16, on eight members.
    const uint16_t in[2] = {0x78e2, 0x0001};
    const ReduceParams params{RD_FLOAT16, RD_MEAN, 1.0, 1.0, 8};
    float sums[2];
    const void* ins[] = {in};
    reduce_to_partial(params, ins, 1, sums, 2);
    for (int member = 1; member < 8; ++member)
      combine(params, {sums, Form::kPartial}, {in, Form::kInput}, sums, Form::kPartial, 2);
    uint16_t out[2];
    finish_partial(params, sums, out, 2);
    CHECK_EQ(sums[0], 320000.0f);
    CHECK(std::memcmp(in, out, sizeof in) == 0);
  }
}

TEST(a_mean_of_integers_is_that_of_whole_numbers_at_the_ends_of_their_range) {
  for (rd_dtype dtype : dtypes()) {
    if (is_float(dtype) || dtype == RD_BOOL) continue;
    const IntegerRange range = range_of(dtype);
    const size_t bytes = element_bytes(dtype);
    const __int128 values[][3] = {{range.high(), range.high(), range.high()},
                                  {range.low(), range.low(), range.low()},
                                  {range.low(), range.high(), 0},
                                  {range.high(), range.high() - 1, 1},
                                  {range.low(), range.low() + 1, range.low()},
                                  {range.low(), 1, 1}};
    Bytes contents[3];
    for (int member = 0; member < 3; ++member) {
      for (const auto& row : values) {
        const auto bits = static_cast<uint64_t>(row[member]);
        contents[member].insert(contents[member].end(), reinterpret_cast<const char*>(&bits),
                                reinterpret_cast<const char*>(&bits) + bytes);
      }
    }
    const ReduceParams params{dtype, RD_MEAN, 1.0, 1.0, 3};
    const void* ins[] = {contents[0].data(), contents[1].data(), contents[2].data()};
    for (const std::string& level : levels()) {
      force_cpu(level.c_str());
      Bytes out(contents[0].size());
      void* outs[] = {out.data()};
      reduce_many(params, ins, 3, outs, 1, 6, false);
      for (size_t i = 0; i < 6; ++i)
        CHECK(read(dtype, out.data(), i).whole == (values[i][0] + values[i][1] + values[i][2]) / 3);
    }
  }
}

TEST(scaled_integers_stop_at_the_ends_of_their_range) {
  for (rd_dtype dtype : dtypes()) {
    if (is_float(dtype) || dtype == RD_BOOL) continue;
    const IntegerRange range = range_of(dtype);
    // A power of two and its negative: doubled, they arrive exactly at, or next to, the ends.
    const __int128 half_way = static_cast<__int128>(1) << (range.bits - (range.is_signed ? 2 : 1));
    const int64_t values[] = {static_cast<int64_t>(half_way), static_cast<int64_t>(-half_way), 1, -1, 0};
    Bytes content(5 * element_bytes(dtype));
    for (size_t i = 0; i < 5; ++i) std::memcpy(&content[i * element_bytes(dtype)], &values[i], element_bytes(dtype));
    for (double factor : {2.0, -2.0, 1.9999, 2.5, 1e30, -1e30, kInfinity, kNan, -0.6, 0.0}) {
      const ReduceParams params{dtype, RD_SUM, factor};
      for (const std::string& level : levels()) {
        force_cpu(level.c_str());
        Shifted out(content, 1);
        const void* ins[] = {content.data()};
        reduce_to_partial(params, ins, 1, out.begin(), 5);
        for (size_t i = 0; i < 5; ++i) {
          CHECK(same(read(dtype, out.begin(), i), scaled(dtype, read(dtype, content.data(), i), factor)));
        }
      }
    }
  }
}

TEST(every_16_bit_float_survives_the_way_to_float32_and_back) {
  for (rd_dtype dtype : {RD_FLOAT16, RD_BFLOAT16}) {
    std::vector<uint16_t> all(65536), back(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> widened(65536), portable;
    for (const std::string& level : levels()) {
      force_cpu(level.c_str());
      kernels().of[dtype].load(all.data(), widened.data(), all.size(), 1.0);
      kernels().of[dtype].store(widened.data(), back.data(), all.size(), 1.0);
      if (level == "portable") portable = widened;
      CHECK(std::memcmp(portable.data(), widened.data(), widened.size() * sizeof(float)) == 0);
      size_t wrong = 0;
      const uint16_t quiet = dtype == RD_FLOAT16 ? 0x200 : 0x40;
      for (size_t i = 0; i < all.size(); ++i) {
        const double value = decode(dtype, i);
        wrong += !same({widened[i], 0}, {value, 0});
        wrong += back[i] != (std::isnan(value) ? all[i] | quiet : all[i]);
      }
      CHECK_EQ(wrong, 0u);
    }
  }
}

TEST(rounding_to_16_bits_goes_to_the_nearest_and_ties_to_even) {
  for (rd_dtype dtype : {RD_FLOAT16, RD_BFLOAT16}) {
    // Around the middle between any value and the next, where the direction is decided; then any bits at all.
    std::vector<float> floats;
    const uint32_t end = dtype == RD_FLOAT16 ? 0x7c00 : 0x7f80;
    for (uint32_t bits = 0; bits < end; ++bits) {
      const double next =
          bits + 1 < end ? decode(dtype, bits + 1) : std::ldexp(1.0, 2 - format_of(dtype).least_exponent);
      const double middle = (decode(dtype, bits) + next) / 2;
      const float f = static_cast<float>(middle);
      for (float x : {f, std::nextafterf(f, INFINITY), std::nextafterf(f, 0)}) floats.insert(floats.end(), {x, -x});
    }
    std::mt19937 random(5);
    for (int i = 0; i < 300000; ++i) {
      const uint32_t bits = random();
      floats.emplace_back();
      std::memcpy(&floats.back(), &bits, sizeof bits);
    }
    std::vector<uint16_t> rounded(floats.size());
    for (const std::string& level : levels()) {
      force_cpu(level.c_str());
      kernels().of[dtype].store(floats.data(), rounded.data(), floats.size(), 1.0);
      size_t wrong = 0;
      for (size_t i = 0; i < floats.size(); ++i) {
        wrong += !same({decode(dtype, rounded[i]), 0}, {round_to(dtype, floats[i]), 0});
      }
      CHECK_EQ(wrong, 0u);
    }
  }
}

TEST(adasum_dots_are_close_to_exact_and_equal_at_every_level) {
  for (rd_dtype dtype : {RD_FLOAT32, RD_FLOAT64}) {
    for (size_t count : {0, 1, 7, 17, 4097, 100003}) {
      Shifted a(moderate(dtype, count, 6), 1), b(moderate(dtype, count, 7), 3);
      long double exact[3] = {}, sizes[3] = {};
      for (size_t i = 0; i < count; ++i) {
        const long double x = read(dtype, a.begin(), i).real, y = read(dtype, b.begin(), i).real;
        const long double terms[3] = {x * y, x * x, y * y};
        for (int k = 0; k < 3; ++k) exact[k] += terms[k];
        for (int k = 0; k < 3; ++k) sizes[k] += std::abs(terms[k]);
      }
      double portable[3] = {};
      for (const std::string& level : levels()) {
        force_cpu(level.c_str());
        double dots[3] = {kNan, kNan, kNan};
        adasum_dots(dtype, a.begin(), b.begin(), count, dots);
        if (level == "portable") std::memcpy(portable, dots, sizeof dots);
        CHECK(std::memcmp(portable, dots, sizeof dots) == 0);
        for (int k = 0; k < 3; ++k) CHECK(std::abs(dots[k] - exact[k]) <= 1e-12L * sizes[k]);
      }
    }
  }
}

TEST(adasum_mix_takes_the_overlap_out_once) {
  const double cases[][3] = {{0.0, 2.0, 3.0}, {1.5, 2.0, 3.0}, {-0.3, 0.7, 9.0}, {0.0, 0.0, 5.0}, {0.0, 4.0, 1e-300}};
  for (rd_dtype dtype : {RD_FLOAT32, RD_FLOAT64}) {
    const Bytes left = moderate(dtype, 4097, 8), right = moderate(dtype, 4097, 9);
    for (const double* dots : cases) {
      const double ca = dots[1] > 1e-100 ? 1 - dots[0] / (2 * dots[1]) : 1;
      const double cb = dots[2] > 1e-100 ? 1 - dots[0] / (2 * dots[2]) : 1;
      for (const std::string& level : levels()) {
        force_cpu(level.c_str());
        Shifted a(left, 1), b(right, 3), out(Bytes(left.size()), 1);
        adasum_mix(dtype, a.begin(), b.begin(), out.begin(), 4097, dots);
        adasum_mix(dtype, a.begin(), b.begin(), b.begin(), 4097, dots);
        size_t wrong = 0;
        for (size_t i = 0; i < 4097; ++i) {
          const double mixed = ca * read(dtype, left.data(), i).real + cb * read(dtype, right.data(), i).real;
          const Value wanted = {round_to(dtype, mixed), 0};
          wrong += !same(read(dtype, out.begin(), i), wanted) + !same(read(dtype, b.begin(), i), wanted);
        }
        CHECK_EQ(wrong, 0u);
        CHECK(out.intact());
      }
    }
  }
}

TEST(adasum_of_equal_vectors_is_the_vector_and_of_orthogonal_ones_the_sum) {
  const float a[4] = {1, 2, 0, 0}, orthogonal[4] = {0, 0, 3, 4};
  float out[4];
  double dots[3];
  adasum_dots(RD_FLOAT32, a, a, 4, dots);
  adasum_mix(RD_FLOAT32, a, a, out, 4, dots);
  for (int i = 0; i < 4; ++i) CHECK_EQ(out[i], a[i]);
  adasum_dots(RD_FLOAT32, a, orthogonal, 4, dots);
  adasum_mix(RD_FLOAT32, a, orthogonal, out, 4, dots);
  for (int i = 0; i < 4; ++i) CHECK_EQ(out[i], a[i] + orthogonal[i]);
}

TEST(copies_of_any_size_and_alignment_are_complete_and_no_more) {
  for (const std::string& level : levels()) {
    force_cpu(level.c_str());
    for (size_t bytes : {0, 1, 63, 64, 65, 200, 4097, 100003}) {
      const Bytes content = data(RD_UINT8, bytes, 10);
      for (size_t shift : {0, 1, 33, 63}) {
        for (bool streaming : {false, true}) {
          Shifted in(content, 7), out(Bytes(bytes, 1), shift);
          copy_bytes(out.begin(), in.begin(), bytes, streaming);
          CHECK(Bytes(out.begin(), out.begin() + bytes) == content);
          CHECK(out.intact());
        }
      }
    }
  }
}

TEST(nothing_is_touched_when_there_is_nothing_to_reduce) {
  float in = 1, out = 7;
  const void* ins[] = {&in};
  void* outs[] = {&out};
  const ReduceParams sum{RD_FLOAT32, RD_SUM};
  reduce_many(sum, ins, 0, outs, 1, 1, false);
  reduce_many(sum, ins, 1, outs, 1, 0, true);
  reduce_many(sum, ins, 1, outs, 0, 1, false);
  CHECK_EQ(out, 7.0f);
}

TEST(a_bool_that_is_not_one_counts_as_true) {
  const uint8_t a[4] = {0, 2, 0, 128}, b[4] = {0, 0, 4, 1};
  for (const std::string& level : levels()) {
    force_cpu(level.c_str());
    uint8_t any[4], all[4], one[4];
    uint8_t* outs[] = {any, any, all, all, one};
    const rd_op ops[] = {RD_SUM, RD_BIT_OR, RD_PRODUCT, RD_BIT_AND, RD_BIT_XOR};
    for (int k = 0; k < 5; ++k) {
      combine({RD_BOOL, ops[k]}, {a, Form::kInput}, {b, Form::kInput}, outs[k], Form::kResult, 4);
      for (int i = 0; i < 4; ++i)
        CHECK_EQ(outs[k][i], k < 2 ? (a[i] || b[i]) : k < 4 ? (a[i] && b[i]) : ((a[i] != 0) != (b[i] != 0)));
    }
  }
}

TEST(undefined_operations_are_not_supported) {
  CHECK(supported({RD_FLOAT32, RD_MEAN, 0.5, 2.0, 4}));
  CHECK(supported({RD_BOOL, RD_SUM}));
  CHECK(supported({RD_BFLOAT16, RD_ADASUM}));
  CHECK(supported({RD_BOOL, RD_BIT_XOR}));
  CHECK(supported({RD_INT8, RD_BIT_AND}));
  CHECK(!supported({RD_FLOAT32, RD_BIT_AND}));
  CHECK(!supported({RD_INT8, RD_BIT_OR, 0.5}));
  CHECK(!supported({RD_BOOL, RD_MEAN}));
  CHECK(!supported({RD_BOOL, RD_SUM, 0.5}));
  CHECK(!supported({RD_INT32, RD_ADASUM}));
  CHECK(!supported({RD_INT32, RD_MEAN, 1.0, 1.0, 0}));
  CHECK(!supported({RD_NUM_DTYPES, RD_SUM}));
  CHECK(!supported({RD_INT32, RD_NUM_OPS}));
  CHECK_EQ(element_bytes(RD_FLOAT16), 2u);
  CHECK_EQ(element_bytes(RD_NUM_DTYPES), 0u);
}

TEST(a_cpu_level_that_does_not_exist_cannot_be_forced) {
  CHECK(force_cpu("portable"));
  CHECK_EQ(std::string(cpu_name()), "portable");
  CHECK(!force_cpu("abacus"));
  CHECK_EQ(std::string(cpu_name()), "portable");
}
