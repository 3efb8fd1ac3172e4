// The members of a channel and the host of each: the caller's rd_channel_params, checked, with what follows from them.
#pragma once

#include <cstdint>
#include <vector>

#include "ronde.h"

namespace ronde {

struct Topology {
  explicit Topology(const rd_channel_params& params);  // throws CallError{RD_BAD_CALL}

  uint32_t size;          // number of members
  uint32_t member_index;  // of this process
  uint32_t num_cores;
  uint64_t slot_bytes;
  uint64_t chunk_bytes;
  uint64_t bucket_bytes;
  uint32_t max_announced;
  uint64_t fusion_bytes;
  std::vector<uint32_t> hosts;                         // per member: the index of its host
  std::vector<std::vector<uint32_t>> members_by_host;  // per host: its members in order
  uint32_t my_host;
  uint32_t local_index;  // position of this member among those of its host

  const std::vector<uint32_t>& local_members() const { return members_by_host[my_host]; }
  uint32_t num_local() const { return uint32_t(local_members().size()); }
  uint32_t num_hosts() const { return uint32_t(members_by_host.size()); }
  bool single_host() const { return members_by_host.size() == 1; }
  bool is_leader() const { return local_index == 0; }
  uint32_t host_leader(uint32_t host) const { return members_by_host[host][0]; }
  // The i-th members of all hosts are cross group i. There are as many as the smallest host has members.
  uint32_t num_cross_groups() const;
};

}  // namespace ronde
