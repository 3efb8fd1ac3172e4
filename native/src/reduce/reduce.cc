// The functions of reduce.h: they choose the kernels and run them block by block. Blocks stay in the first-level cache,
// so the passes that follow (scaling, rounding, copying to other outputs) are cheap. How an element is computed is
// known only to the kernels.
#include "reduce/reduce.h"

#include <cassert>
#include <cstdint>
#include <cstring>

#include "reduce/kernels.h"

namespace ronde {
namespace {

constexpr size_t kBlockBytes = 8192;
constexpr size_t kLine = 64;

constexpr size_t kElementBytes[RD_NUM_DTYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1};

struct alignas(kLine) CacheBlock {
  char bytes[kBlockBytes];
};

bool is_16bit_float(rd_dtype dtype) { return dtype == RD_FLOAT16 || dtype == RD_BFLOAT16; }

bool is_float(rd_dtype dtype) { return is_16bit_float(dtype) || dtype == RD_FLOAT32 || dtype == RD_FLOAT64; }

bool is_bitwise(rd_op op) { return op == RD_BIT_AND || op == RD_BIT_OR || op == RD_BIT_XOR; }

bool is_scaled(const ReduceParams& params) { return params.prescale != 1.0 || params.postscale != 1.0; }

FoldOp fold_op(rd_op op) {
  switch (op) {
    case RD_MIN:
      return kMin;
    case RD_MAX:
      return kMax;
    case RD_PRODUCT:
      return kProduct;
    case RD_BIT_AND:
      return kBitAnd;
    case RD_BIT_OR:
      return kBitOr;
    case RD_BIT_XOR:
      return kBitXor;
    default:
      return kSum;
  }
}

const char* at(const void* data, size_t bytes) { return static_cast<const char*>(data) + bytes; }

char* at(void* data, size_t bytes) { return static_cast<char*>(data) + bytes; }

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// Which type partial results have.
enum class Partial {
  kOwn,   // the dtype
  kWide,  // float32, for 16-bit floats
  kSums,  // wide integers, for means of integers
};

Partial partial_of(const ReduceParams& params) {
  if (params.op == RD_MEAN && !is_float(params.dtype)) return Partial::kSums;
  if (!is_16bit_float(params.dtype)) return Partial::kOwn;
  const bool is_exact = (params.op == RD_MIN || params.op == RD_MAX) && !is_scaled(params);
  return is_exact ? Partial::kOwn : Partial::kWide;
}

// The arithmetic of one reduction, on at most block_count() elements at a time.
class Reduction {
 public:
  explicit Reduction(const ReduceParams& params)
      : own_(kernels().of[params.dtype]),
        wide_(kernels().of[wide_dtype(params.dtype)]),
        fold_op_(fold_op(params.op)),
        partial_(partial_of(params)),
        bytes_(element_bytes(params.dtype)),
        partial_bytes_(ronde::partial_bytes(params)),
        block_count_(kBlockBytes / larger(partial_bytes_, element_bytes(wide_dtype(params.dtype)))),
        prescale_(params.prescale),
        divisor_(params.divisor),
        factor_(params.op == RD_MEAN && is_float(params.dtype) ? params.postscale / static_cast<double>(params.divisor)
                                                               : params.postscale),
        scales_sums_(fold_op_ == kSum && is_float(params.dtype)) {}

  size_t bytes() const { return bytes_; }
  size_t partial_bytes() const { return partial_bytes_; }
  size_t block_count() const { return block_count_; }

  // Whether no passes are needed but those that fold: inputs need no scaling, and the result at most a factor, which
  // the pass that adds can apply.
  bool is_single_pass() const {
    return prescale_ == 1.0 && partial_ != Partial::kSums && (factor_ == 1.0 || scales_sums_);
  }

  // Reduces elements first … first + n - 1 of the inputs into out, and into out2 unless it is null.
  void reduce(const void* const* ins, size_t num_ins, size_t first, size_t n, void* out, void* out2) {
    if (num_ins > 1 && is_single_pass()) return fold_inputs(ins, num_ins, first, n, out, out2);
    reduce_to_partial(ins, num_ins, first, n, folded_.bytes);
    finish(folded_.bytes, out, n);
    copy_to_second(out, out2, n);
  }

  void reduce_to_partial(const void* const* ins, size_t num_ins, size_t first, size_t n, void* out) {
    size_t done = 1;
    if (num_ins > 1 && prescale_ == 1.0 && partial_ == Partial::kWide) {
      own_.fold_first[fold_op_](input(ins, 0, first), input(ins, 1, first), out, n);
      for (done = 2; done < num_ins; ++done) own_.fold[fold_op_](out, input(ins, done, first), out, n);
      return;
    }
    load(input(ins, 0, first), out, n);
    for (; done < num_ins; ++done) {
      load(input(ins, done, first), next_.bytes, n);
      combine_partials(out, next_.bytes, out, n);
    }
  }

  // Combines elements first … first + n - 1.
  void combine(Operand a, Operand b, void* out, Form out_form, size_t first, size_t n) {
    const void *x = operand(a, first), *y = operand(b, first);
    void* to = at(out, first * (out_form == Form::kPartial ? partial_bytes_ : bytes_));
    if (combine_in_one_pass(a.form, x, b.form, y, out_form, to, n)) return;
    if (a.form == Form::kInput) {
      load(x, folded_.bytes, n);
      x = folded_.bytes;
    }
    if (b.form == Form::kInput) {
      load(y, next_.bytes, n);
      y = next_.bytes;
    }
    if (out_form == Form::kPartial) return combine_partials(x, y, to, n);
    combine_partials(x, y, folded_.bytes, n);
    finish(folded_.bytes, to, n);
  }

  void finish(const void* partial, void* out, size_t n) {
    switch (partial_) {
      case Partial::kOwn:
        return scale_own(partial, out, n, factor_);
      case Partial::kWide:
        return own_.store(partial, out, n, factor_);
      case Partial::kSums:
        own_.divide(partial, out, n, divisor_);
        return scale_own(out, out, n, factor_);
    }
  }

 private:
  const char* input(const void* const* ins, size_t j, size_t first) const { return at(ins[j], first * bytes_); }

  const char* operand(Operand operand, size_t first) const {
    return at(operand.data, first * (operand.form == Form::kPartial ? partial_bytes_ : bytes_));
  }

  // Computes out[i] = factor * in[i], with the dtype on both sides. 16-bit floats come here without a factor only.
  void scale_own(const void* in, void* out, size_t n, double factor) {
    if (factor != 1.0) return own_.load(in, out, n, factor);
    if (in != out) kernels().copy(out, in, n * bytes_);
  }

  void load(const void* in, void* partial, size_t n) {
    switch (partial_) {
      case Partial::kOwn:
        return scale_own(in, partial, n, prescale_);
      case Partial::kWide:
        return own_.load(in, partial, n, prescale_);
      case Partial::kSums:
        if (prescale_ == 1.0) return own_.widen(in, partial, n);
        scale_own(in, scaled_.bytes, n, prescale_);
        return own_.widen(scaled_.bytes, partial, n);
    }
  }

  void combine_partials(const void* a, const void* b, void* out, size_t n) {
    if (partial_ == Partial::kSums) return own_.add_sums(a, b, out, n);
    (partial_ == Partial::kOwn ? own_ : wide_).combine[fold_op_](a, b, out, n);
  }

  // Combines with one kernel and returns true, if there is one that does it.
  bool combine_in_one_pass(Form a_form, const void* a, Form b_form, const void* b, Form out_form, void* out, size_t n) {
    const bool to_partial = out_form == Form::kPartial;
    if (!(to_partial ? prescale_ == 1.0 && partial_ != Partial::kSums : is_single_pass())) return false;
    const bool is_wide = partial_ == Partial::kWide;
    const bool wide_a = is_wide && a_form == Form::kPartial, wide_b = is_wide && b_form == Form::kPartial;
    if (wide_b) {
      if (wide_a && to_partial) combine_partials(a, b, out, n);
      return wide_a && to_partial;
    }
    if (to_partial) {
      (wide_a ? own_.fold : is_wide ? own_.fold_first : own_.combine)[fold_op_](a, b, out, n);
    } else if (scales_sums_) {
      (wide_a ? own_.sum_last : own_.sum)(a, b, out, nullptr, n, factor_);
    } else {
      (wide_a ? own_.fold_last : own_.combine)[fold_op_](a, b, out, n);
    }
    return true;
  }

  void fold_inputs(const void* const* ins, size_t num_ins, size_t first, size_t n, void* out, void* out2) {
    const size_t last = num_ins - 1;
    const void* left = input(ins, 0, first);
    if (num_ins > 2) {
      left = folded_.bytes;
      own_.fold_first[fold_op_](input(ins, 0, first), input(ins, 1, first), folded_.bytes, n);
      for (size_t j = 2; j < last; ++j) own_.fold[fold_op_](folded_.bytes, input(ins, j, first), folded_.bytes, n);
    }
    if (fold_op_ == kSum) {
      (num_ins > 2 ? own_.sum_last : own_.sum)(left, input(ins, last, first), out, out2, n, factor_);
    } else {
      (num_ins > 2 ? own_.fold_last : own_.combine)[fold_op_](left, input(ins, last, first), out, n);
      copy_to_second(out, out2, n);
    }
  }

  void copy_to_second(const void* out, void* out2, size_t n) {
    if (out2 != nullptr) std::memcpy(out2, out, n * bytes_);
  }

  const DtypeKernels& own_;
  const DtypeKernels& wide_;
  const FoldOp fold_op_;
  const Partial partial_;
  const size_t bytes_, partial_bytes_, block_count_;
  const double prescale_;
  const uint64_t divisor_;
  const double factor_;  // what the result is multiplied by
  const bool scales_sums_;
  CacheBlock folded_, next_, scaled_;
};

bool any_shared(const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs) {
  for (size_t k = 0; k < num_outs; ++k) {
    for (size_t j = 0; j < num_ins; ++j) {
      if (outs[k] == ins[j]) return true;
    }
  }
  return false;
}

// Computes the first two outputs at once and copies the others from the first, which is still in the cache.
void reduce_cached(Reduction& reduction, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                   size_t count) {
  const size_t step = reduction.block_count(), bytes = reduction.bytes();
  for (size_t i = 0; i < count; i += step) {
    const size_t n = smaller(step, count - i);
    char* result = at(outs[0], i * bytes);
    reduction.reduce(ins, num_ins, i, n, result, num_outs > 1 ? at(outs[1], i * bytes) : nullptr);
    for (size_t k = 2; k < num_outs; ++k) std::memcpy(at(outs[k], i * bytes), result, n * bytes);
  }
}

void reduce_streaming(Reduction& reduction, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                      size_t count) {
  const Kernels& level = kernels();
  const size_t step = reduction.block_count(), bytes = reduction.bytes();
  CacheBlock result;
  // The first block may be shorter, so that the others begin at a cache line.
  size_t n = smaller(count, step - reinterpret_cast<uintptr_t>(outs[0]) % kLine / bytes);
  for (size_t i = 0; i < count; i += n, n = smaller(step, count - i)) {
    reduction.reduce(ins, num_ins, i, n, result.bytes, nullptr);
    for (size_t k = 0; k < num_outs; ++k) level.stream(at(outs[k], i * bytes), result.bytes, n * bytes);
  }
  level.store_fence();
}

double sum_lanes(const double lanes[kLanes]) {
  static_assert(kLanes == 8, "the order of this sum is part of the result");
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Returns the coefficient of a vector: 1 minus half of the part that it shares with the other. Below the threshold the
// square of its length has too little precision to divide by.
double adasum_coefficient(double overlap, double square) {
  constexpr double kAllButZero = 0x1p-511;
  return square >= kAllButZero ? 1.0 - overlap / (2.0 * square) : 1.0;
}

}  // namespace

size_t element_bytes(rd_dtype dtype) {
  const auto index = static_cast<size_t>(dtype);
  return index < RD_NUM_DTYPES ? kElementBytes[index] : 0;
}

rd_dtype wide_dtype(rd_dtype dtype) { return is_16bit_float(dtype) ? RD_FLOAT32 : dtype; }

size_t partial_bytes(const ReduceParams& params) {
  const size_t own = element_bytes(params.dtype);
  switch (partial_of(params)) {
    case Partial::kWide:
      return sizeof(float);
    case Partial::kSums:
      return own < sizeof(int64_t) ? sizeof(int64_t) : 2 * sizeof(int64_t);
    default:
      return own;
  }
}

bool supported(const ReduceParams& params) {
  if (element_bytes(params.dtype) == 0 || static_cast<size_t>(params.op) >= RD_NUM_OPS) return false;
  if (params.op == RD_MEAN && params.divisor == 0) return false;
  if (params.op == RD_ADASUM) return is_float(params.dtype);
  if (is_bitwise(params.op)) return !is_float(params.dtype) && !is_scaled(params);
  return params.dtype != RD_BOOL || (params.op != RD_MEAN && !is_scaled(params));
}

void reduce_many(const ReduceParams& params, const void* const* ins, size_t num_ins, void* const* outs, size_t num_outs,
                 size_t count, bool streaming) {
  assert(supported(params) && params.op != RD_ADASUM);
  if (num_ins == 0 || num_outs == 0 || count == 0) return;
  Reduction reduction(params);
  // An output that is also an input is in the cache already, because it was read: writing around the cache would not
  // pay.
  if (streaming && !any_shared(ins, num_ins, outs, num_outs)) {
    reduce_streaming(reduction, ins, num_ins, outs, num_outs, count);
  } else {
    reduce_cached(reduction, ins, num_ins, outs, num_outs, count);
  }
}

void reduce_to_partial(const ReduceParams& params, const void* const* ins, size_t num_ins, void* out, size_t count) {
  if (!has_wide_partials(params)) {
    if (num_ins == 1 && params.prescale == 1.0)
      return copy_bytes(out, ins[0], count * element_bytes(params.dtype), false);
    ReduceParams fold = params;
    if (fold.op == RD_MEAN || fold.op == RD_ADASUM) fold.op = RD_SUM;
    fold.postscale = 1.0;
    return reduce_many(fold, ins, num_ins, &out, 1, count, false);
  }
  Reduction reduction(params);
  const size_t step = reduction.block_count();
  for (size_t i = 0; i < count; i += step)
    reduction.reduce_to_partial(ins, num_ins, i, smaller(step, count - i), at(out, i * reduction.partial_bytes()));
}

void combine(const ReduceParams& params, Operand a, Operand b, void* out, Form out_form, size_t count) {
  Reduction reduction(params);
  const size_t step = reduction.block_count();
  for (size_t i = 0; i < count; i += step) reduction.combine(a, b, out, out_form, i, smaller(step, count - i));
}

void finish_partial(const ReduceParams& params, const void* partial, void* out, size_t count) {
  Reduction(params).finish(partial, out, count);
}

void adasum_dots(rd_dtype dtype, const void* a, const void* b, size_t count, double dots[3]) {
  assert(dtype == RD_FLOAT32 || dtype == RD_FLOAT64);
  Dots sums = {};
  kernels().of[dtype].dots(a, b, count, &sums);
  dots[0] = sum_lanes(sums.ab);
  dots[1] = sum_lanes(sums.aa);
  dots[2] = sum_lanes(sums.bb);
}

void adasum_mix(rd_dtype dtype, const void* a, const void* b, void* out, size_t count, const double dots[3]) {
  assert(dtype == RD_FLOAT32 || dtype == RD_FLOAT64);
  const double ca = adasum_coefficient(dots[0], dots[1]), cb = adasum_coefficient(dots[0], dots[2]);
  kernels().of[dtype].mix(a, b, out, count, ca, cb);
}

void copy_bytes(void* out, const void* in, size_t bytes, bool streaming) {
  if (out == in || bytes == 0) return;
  const Kernels& level = kernels();
  if (!streaming) return level.copy(out, in, bytes);
  level.stream(out, in, bytes);
  level.store_fence();
}

}  // namespace ronde
