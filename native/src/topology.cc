#include "topology.h"

#include <algorithm>

#include "base/error.h"

namespace ronde {

Topology::Topology(const rd_channel_params& params)
    : size(params.num_members),
      member_index(params.member_index),
      num_cores(std::max(1u, params.num_cores)),
      slot_bytes(params.slot_bytes),
      chunk_bytes(params.chunk_bytes),
      bucket_bytes(params.bucket_bytes),
      max_announced(params.max_announced),
      fusion_bytes(params.fusion_bytes) {
  bool valid = params.abi == RD_ABI && size >= 1 && size <= RD_MAX_MEMBERS && member_index < size &&
               params.hosts != nullptr && chunk_bytes >= 64 && slot_bytes >= chunk_bytes && chunk_bytes % 64 == 0 &&
               slot_bytes % 64 == 0 && max_announced <= RD_MAX_ANNOUNCED;
  if (!valid) throw CallError{RD_BAD_CALL};
  hosts.assign(params.hosts, params.hosts + size);
  for (uint32_t member = 0; member < size; ++member) {
    uint32_t host = hosts[member];
    if (host > members_by_host.size()) throw CallError{RD_BAD_CALL, int(member)};  // hosts count up from 0
    if (host == members_by_host.size()) members_by_host.emplace_back();
    if (member == member_index) local_index = uint32_t(members_by_host[host].size());
    members_by_host[host].push_back(member);
  }
  my_host = hosts[member_index];
  // A chunk of a reduce-scatter has at least one element of every member. The same verdict on all hosts.
  constexpr uint64_t kWidestElement = 8;
  for (const auto& members : members_by_host)
    if (members.size() > RD_MAX_LOCAL_MEMBERS || chunk_bytes < members.size() * kWidestElement)
      throw CallError{RD_BAD_CALL};
  // Who has announced what is in shared memory.
  if (max_announced > 0 && (size == 1 || !single_host())) throw CallError{RD_BAD_CALL};
}

uint32_t Topology::num_cross_groups() const {
  size_t smallest = members_by_host[0].size();
  for (const auto& members : members_by_host) smallest = std::min(smallest, members.size());
  return uint32_t(smallest);
}

}  // namespace ronde
