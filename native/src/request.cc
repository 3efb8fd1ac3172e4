#include "request.h"

#include "base/error.h"
#include "reduce/reduce.h"

namespace ronde {

namespace {

const rd_call& checked(const rd_call& call) {
  bool sane = call.kind >= 0 && call.kind < RD_NUM_KINDS && call.dtype >= 0 && call.dtype < RD_NUM_DTYPES &&
              call.op >= 0 && call.op < RD_NUM_OPS && call.algorithm >= RD_CHOOSE && call.algorithm <= RD_PAIRWISE &&
              (call.parts != nullptr || call.num_parts == 0);
  if (!sane) throw CallError{RD_BAD_CALL};
  return call;
}

std::vector<uint64_t> copied(const uint64_t* numbers, uint32_t size) {
  return numbers == nullptr ? std::vector<uint64_t>() : std::vector<uint64_t>(numbers, numbers + size);
}

uint64_t sum(const std::vector<uint64_t>& numbers) {
  uint64_t total = 0;
  for (uint64_t number : numbers) total += number;
  return total;
}

void require(bool fine) {
  if (!fine) throw CallError{RD_BAD_CALL};
}

}  // namespace

Request::Request(const rd_call& call, const Topology& topology, double remaining_s)
    : kind(rd_kind(checked(call).kind)),
      dtype(rd_dtype(call.dtype)),
      op(rd_op(call.op)),
      algorithm(rd_algorithm(call.algorithm)),
      trusted((call.flags & RD_TRUSTED) != 0),
      peer(call.peer),
      prescale(call.prescale),
      postscale(call.postscale),
      signature(call.signature),
      text(call.text == nullptr ? "" : call.text),
      parts(call.parts, call.num_parts, element_bytes(rd_dtype(call.dtype))),
      counts(copied(call.counts, topology.size)),
      splits(copied(call.splits, topology.size)),
      deadline(remaining_s) {
  bool reduces = kind == RD_ALLREDUCE || kind == RD_REDUCE_SCATTER;
  bool whole = parts.pieces().size() == 1;
  if (reduces) require(supported({dtype, op, prescale, postscale, topology.size}));
  if (kind == RD_REDUCE_SCATTER)
    require(whole && op != RD_ADASUM && counts.size() == topology.size && sum(counts) == parts.count());
  if (kind == RD_ALLGATHER)
    require(whole && counts.size() == topology.size && counts[topology.member_index] == parts.count());
  if (kind == RD_ALLTOALL)
    require(whole && counts.size() == topology.size && splits.size() == topology.size &&
            splits[topology.member_index] == counts[topology.member_index] && sum(splits) <= parts.count());
  if (kind == RD_BROADCAST) require(peer >= 0 && uint32_t(peer) < topology.size);
  if (kind == RD_SEND || kind == RD_RECEIVE)
    require(whole && peer >= 0 && uint32_t(peer) < topology.size && uint32_t(peer) != topology.member_index);
}

}  // namespace ronde
