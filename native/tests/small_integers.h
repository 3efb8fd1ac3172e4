// Small integers, which every dtype represents exactly, so that one reference serves all dtypes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "reduce/reduce.h"

namespace small_integers {

inline uint16_t half_of(int value) {
  if (value == 0) return 0;
  int exponent;
  double fraction = std::frexp(double(value), &exponent);  // in [0.5, 1)
  return uint16_t(((exponent + 14) << 10) | (int(fraction * 2048) & 1023));
}

inline void put(rd_dtype dtype, char* at, int value) {
  float f = float(value);
  double d = value;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t half = half_of(value), brain = uint16_t(bits >> 16);
  int64_t whole = dtype == RD_BOOL ? value != 0 : value;
  switch (dtype) {
    case RD_FLOAT16:
      std::memcpy(at, &half, 2);
      break;
    case RD_BFLOAT16:
      std::memcpy(at, &brain, 2);
      break;
    case RD_FLOAT32:
      std::memcpy(at, &f, 4);
      break;
    case RD_FLOAT64:
      std::memcpy(at, &d, 8);
      break;
    default:
      std::memcpy(at, &whole, ronde::element_bytes(dtype));  // little-endian
  }
}

template <class Value>
std::vector<char> array(rd_dtype dtype, uint64_t count, Value value) {
  size_t width = ronde::element_bytes(dtype);
  std::vector<char> bytes(count * width);
  for (uint64_t i = 0; i < count; ++i) put(dtype, bytes.data() + i * width, value(i));
  return bytes;
}

// Element i of a rank's input. Results stay below 128 and means are integers for up to 5 ranks.
inline int input(rd_op op, uint32_t size, uint32_t rank, uint64_t i) {
  if (op == RD_PRODUCT) return 1 + int((i + rank) % 2);
  return int(size) * int((i * 7 + rank) % 3);
}

// Element i of the result.
inline int expected(rd_dtype dtype, rd_op op, uint32_t size, uint64_t i) {
  int sum = 0, product = 1, least = 1 << 20, most = 0, bits_and = -1, bits_or = 0, bits_xor = 0;
  for (uint32_t rank = 0; rank < size; ++rank) {
    int value = input(op, size, rank, i);
    if (dtype == RD_BOOL) value = value != 0;
    sum += value;
    product *= value;
    least = std::min(least, value);
    most = std::max(most, value);
    bits_and &= value;
    bits_or |= value;
    bits_xor ^= value;
  }
  switch (op) {
    case RD_SUM:
      return sum;
    case RD_MEAN:
      return sum / int(size);
    case RD_MIN:
      return least;
    case RD_MAX:
      return most;
    case RD_BIT_AND:
      return bits_and;
    case RD_BIT_OR:
      return bits_or;
    case RD_BIT_XOR:
      return bits_xor;
    default:
      return product;
  }
}

}  // namespace small_integers
