// What the reduce kernels must compute, one element at a time and without regard to speed, and the data for
// test_reduce.cc.
//
// A float of any format is a double here, an integer an __int128. Formats are described by their bits, so nothing is
// shared with the conversions of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "reduce/reduce.h"

namespace reference {

using ronde::element_bytes;
using ronde::ReduceParams;
using Bytes = std::vector<char>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline bool is_float(rd_dtype dtype) { return dtype >= RD_FLOAT16 && dtype <= RD_FLOAT64; }

struct Format {
  int fraction_bits, least_exponent, bits;
};

inline Format format_of(rd_dtype dtype) {
  if (dtype == RD_FLOAT16) return {10, -14, 16};
  if (dtype == RD_BFLOAT16) return {7, -126, 16};
  if (dtype == RD_FLOAT32) return {23, -126, 32};
  return {52, -1022, 64};
}

inline double decode(rd_dtype dtype, uint64_t bits) {
  const Format f = format_of(dtype);
  const uint64_t fraction = bits & ((1ull << f.fraction_bits) - 1);
  const int exponent_bits = f.bits - 1 - f.fraction_bits;
  const int exponent = static_cast<int>((bits >> f.fraction_bits) & ((1ull << exponent_bits) - 1));
  const double sign = bits >> (f.bits - 1) & 1 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? kNan : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(static_cast<double>(fraction), f.least_exponent - f.fraction_bits);
  const double whole = static_cast<double>(fraction | 1ull << f.fraction_bits);
  return sign * std::ldexp(whole, exponent - 1 + f.least_exponent - f.fraction_bits);
}

// Rounds to the nearest value of the format, ties to even.
inline double round_to(rd_dtype dtype, double x) {
  if (!std::isfinite(x) || x == 0 || dtype == RD_FLOAT64) return x;
  const Format f = format_of(dtype);
  const int exponent = std::max(std::ilogb(x), f.least_exponent);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(x, f.fraction_bits - exponent)), exponent - f.fraction_bits);
  const double end = std::ldexp(1.0, 2 - f.least_exponent);
  return std::abs(rounded) >= end ? std::copysign(kInfinity, x) : rounded;
}

struct IntegerRange {
  int bits;
  bool is_signed;
  __int128 low() const { return is_signed ? -(static_cast<__int128>(1) << (bits - 1)) : 0; }
  __int128 high() const { return (static_cast<__int128>(1) << (is_signed ? bits - 1 : bits)) - 1; }
  __int128 wrap(unsigned __int128 x) const {
    const unsigned __int128 low_bits = x & ((static_cast<unsigned __int128>(1) << bits) - 1);
    const __int128 value = static_cast<__int128>(low_bits);
    return value > high() ? value - (static_cast<__int128>(1) << bits) : value;
  }
};

inline IntegerRange range_of(rd_dtype dtype) {
  return {static_cast<int>(8 * element_bytes(dtype)), (dtype & 1) == 1 && dtype < RD_FLOAT16};
}

// An element: `real` holds a float, `whole` any other dtype.
struct Value {
  double real = 0;
  __int128 whole = 0;
};

inline Value read(rd_dtype dtype, const char* data, size_t i) {
  uint64_t bits = 0;
  std::memcpy(&bits, data + i * element_bytes(dtype), element_bytes(dtype));
  if (is_float(dtype)) return {decode(dtype, bits), 0};
  if (dtype == RD_BOOL) return {0, bits != 0};
  return {0, range_of(dtype).wrap(bits)};
}

inline rd_dtype accumulator(rd_dtype dtype) { return dtype == RD_FLOAT16 || dtype == RD_BFLOAT16 ? RD_FLOAT32 : dtype; }

inline double fold_real(rd_op op, double x, double y) {
  if (op == RD_MIN || op == RD_MAX) {
    if (std::isnan(x) || std::isnan(y)) return kNan;
    return op == RD_MIN ? (x < y ? x : y) : (x > y ? x : y);
  }
  return op == RD_PRODUCT ? x * y : x + y;
}

inline __int128 fold_whole(rd_dtype dtype, rd_op op, __int128 x, __int128 y) {
  if (op == RD_BIT_AND) return x & y;
  if (op == RD_BIT_OR) return x | y;
  if (op == RD_BIT_XOR) return x ^ y;
  if (op == RD_MIN || (dtype == RD_BOOL && op == RD_PRODUCT)) return std::min(x, y);
  if (op == RD_MAX || dtype == RD_BOOL) return std::max(x, y);
  if (op == RD_MEAN) return x + y;  // the sum of a mean does not wrap
  const auto a = static_cast<unsigned __int128>(x), b = static_cast<unsigned __int128>(y);
  return range_of(dtype).wrap(op == RD_PRODUCT ? a * b : a + b);
}

inline Value fold(rd_dtype dtype, rd_op op, Value x, Value y) {
  if (!is_float(dtype)) return {0, fold_whole(dtype, op, x.whole, y.whole)};
  return {round_to(accumulator(dtype), fold_real(op, x.real, y.real)), 0};
}

inline Value scaled(rd_dtype dtype, Value x, double factor) {
  if (factor == 1) return x;
  if (is_float(dtype)) return {round_to(accumulator(dtype), x.real * factor), 0};
  const IntegerRange range = range_of(dtype);
  const double product = static_cast<double>(x.whole) * factor;
  if (std::isnan(product)) return {0, 0};
  if (product >= std::ldexp(1.0, 100)) return {0, range.high()};
  if (product <= -std::ldexp(1.0, 100)) return {0, range.low()};
  return {0, std::min(std::max(static_cast<__int128>(product), range.low()), range.high())};
}

inline Value finished(const ReduceParams& params, Value x) {
  if (params.op != RD_MEAN) return scaled(params.dtype, x, params.postscale);
  if (is_float(params.dtype)) return scaled(params.dtype, x, params.postscale / static_cast<double>(params.divisor));
  return scaled(params.dtype, {0, x.whole / static_cast<__int128>(params.divisor)}, params.postscale);
}

inline Value expected(const ReduceParams& params, const std::vector<const char*>& ins, size_t i) {
  Value result = scaled(params.dtype, read(params.dtype, ins[0], i), params.prescale);
  for (size_t j = 1; j < ins.size(); ++j) {
    result =
        fold(params.dtype, params.op, result, scaled(params.dtype, read(params.dtype, ins[j], i), params.prescale));
  }
  result = finished(params, result);
  return {round_to(params.dtype, result.real), result.whole};
}

// Returns whether two values are equal to the bit; all NaNs count as equal.
inline bool same(Value x, Value y) {
  if (std::isnan(x.real) || std::isnan(y.real)) return std::isnan(x.real) && std::isnan(y.real);
  return x.real == y.real && std::signbit(x.real) == std::signbit(y.real) && x.whole == y.whole;
}

// ---- The matrix --------------------------------------------------------------------------------------------------

// Returns the CPU levels that this machine can run; the last one stays in use.
inline std::vector<std::string> levels() {
  std::vector<std::string> found;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (ronde::force_cpu(name)) found.push_back(name);
  }
  return found;
}

inline std::vector<rd_dtype> dtypes() {
  std::vector<rd_dtype> all;
  for (int d = 0; d < RD_NUM_DTYPES; ++d) all.push_back(static_cast<rd_dtype>(d));
  return all;
}

// ---- Data ------------------------------------------------------------------------------------------------------

// Returns random elements. Every third one is any bit pattern (for floats: NaN, infinity, subnormal, huge); the others
// are moderate.
inline Bytes data(rd_dtype dtype, size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  const size_t bytes = element_bytes(dtype);
  Bytes made(count * bytes);
  for (size_t i = 0; i < count; ++i) {
    uint64_t bits = random();
    if (dtype == RD_BOOL) bits &= 1;
    if (is_float(dtype) && bits % 3 != 0) {
      // An exponent within 2^±4 of one.
      const Format f = format_of(dtype);
      const uint64_t one = (1ull << (f.bits - 2 - f.fraction_bits)) - 1;
      const uint64_t exponent = one + (bits >> 60 & 7) - 4;
      const uint64_t fraction = bits & ((1ull << f.fraction_bits) - 1);
      bits = exponent << f.fraction_bits | fraction | (bits >> 59 & 1) << (f.bits - 1);
    } else if (is_float(dtype) && bits % 5 == 0) {
      constexpr uint64_t kTops[] = {0x7f80, 0xff80, 0x7c00, 0xfc00, 0x7fc1, 0x7e01, 0x0000, 0x8000, 0x0001};
      bits = kTops[bits >> 8 & 7] << (8 * bytes - 16);
    }
    std::memcpy(&made[i * bytes], &bits, bytes);
  }
  return made;
}

// Returns random elements whose sum of squares is finite.
inline Bytes moderate(rd_dtype dtype, size_t count, unsigned seed) {
  Bytes made = data(dtype, count, seed);
  const size_t bytes = element_bytes(dtype);
  for (size_t i = 0; i < count; ++i) {
    const double size = std::abs(read(dtype, made.data(), i).real);
    if (!(size < 100)) std::memset(&made[i * bytes], 0, bytes);
  }
  return made;
}

// A buffer that begins `shift` bytes after an aligned address and has a guard after its end.
class Shifted {
 public:
  Shifted(const Bytes& content, size_t shift)
      : memory_(new char[shift + content.size() + 1]), begin_(memory_.get() + shift), end_(begin_ + content.size()) {
    std::copy(content.begin(), content.end(), begin_);
    *end_ = kGuard;
  }
  char* begin() { return begin_; }
  bool intact() const { return *end_ == kGuard; }

 private:
  static constexpr char kGuard = 0x5a;
  std::unique_ptr<char[]> memory_;
  char* begin_;
  char* end_;
};

}  // namespace reference
