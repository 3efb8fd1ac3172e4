// The links of an endpoint: moving bytes, messages that arrive, and ranks that are lost.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "endpoint.h"

namespace ronde {

namespace {

constexpr int kMaxReadsOfLost = 256;  // of what a lost rank has sent: 256 MB are more than a socket holds

}  // namespace

// --- moving bytes ----------------------------------------------------------------------------------------------------

// Moves what can be moved on all links. Returns whether anything was.
bool Endpoint::progress(bool poll_kernel) {
  bool moved = false;
  for (size_t i = 0; i < linked_.size(); ++i) {
    uint32_t peer = linked_[i];
    Peer& other = peers_[peer];
    if (other.incoming != nullptr) {
      if (other.incoming->link.has_input()) moved |= read(peer);
      if (other.incoming != nullptr && other.incoming->has_output()) moved |= send_credits(*other.incoming);
    }
    if (other.outgoing != nullptr) {
      if (other.outgoing->link.has_input()) moved |= read_credits(peer);
      if (other.outgoing != nullptr && other.outgoing->has_output()) moved |= write(*other.outgoing);
    }
    check_links(peer);
    if (other.incoming == nullptr && other.outgoing == nullptr) linked_.erase(linked_.begin() + ptrdiff_t(i--));
  }
  if (poll_kernel) moved |= poll_sockets();
  return moved;
}

// Handles the sockets that are ready. Returns whether bytes were moved.
bool Endpoint::poll_sockets() {
  epoll_event events[16];
  int count = epoll_wait(epoll_.get(), events, 16, 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == kKickKey) continue;
    auto peer = uint32_t(events[i].data.u64 / 2);
    Peer& other = peers_[peer];
    bool is_outgoing = events[i].data.u64 % 2 == 1;
    MessageLink* link = is_outgoing ? (other.outgoing == nullptr ? nullptr : &other.outgoing->link)
                                    : (other.incoming == nullptr ? nullptr : &other.incoming->link);
    if (link == nullptr) continue;  // it ended with an event before this one
    if (link->clear_wakeups()) hand_over();
    moved |= is_outgoing ? read_credits(peer) : read(peer);
    if (other.outgoing != nullptr && is_outgoing) moved |= write(*other.outgoing);
    if (other.incoming != nullptr && !is_outgoing) moved |= send_credits(*other.incoming);
    check_links(peer);
  }
  return moved;
}

bool Endpoint::write(OutgoingLink& outgoing) {
  uint64_t moved = 0;
  while (!outgoing.queue.empty() && moved < kBudgetBytes) {
    MessagePtr message = outgoing.queue.front();
    if (outgoing.position == 0) {
      bool is_placed = message->placed != nullptr;
      outgoing.frame = {is_placed ? Frame::kPlacedMessage : Frame::kMessage,
                        message->flags,
                        message->context,
                        message->tag,
                        message->signature,
                        message->header.size(),
                        message->bytes,
                        is_placed ? message->placed->offset() : 0};
      message->result.ready_ns = now_ns();
    }
    uint64_t before = outgoing.position;
    iovec pieces[3];
    int num_pieces = 0;
    uint64_t skipped = outgoing.position;
    auto add = [&](const void* data, uint64_t bytes) {
      uint64_t skip = std::min(skipped, bytes);
      skipped -= skip;
      if (bytes > skip) pieces[num_pieces++] = {const_cast<char*>(static_cast<const char*>(data)) + skip, bytes - skip};
    };
    add(&outgoing.frame, sizeof(Frame));
    add(message->header.data(), message->header.size());
    uint64_t bytes = message->placed == nullptr ? message->bytes : 0;
    add(message->data, bytes);
    uint64_t total = sizeof(Frame) + message->header.size() + bytes;
    outgoing.position += outgoing.link.try_send(pieces, num_pieces);
    moved += outgoing.position - before;
    if (outgoing.position < total) break;
    outgoing.queue.pop_front();
    outgoing.position = 0;
    if (message->placed != nullptr) {
      message->placed->hand_over();
      message->placed = nullptr;
    }
    finish(message, RD_OK, message->peer);
  }
  if (outgoing.queue.empty() && outgoing.says_goodbye && !outgoing.goodbye_sent) {
    Frame goodbye{};
    goodbye.kind = Frame::kGoodbye;
    iovec piece{reinterpret_cast<char*>(&goodbye) + outgoing.position, sizeof(Frame) - outgoing.position};
    outgoing.position += outgoing.link.try_send(&piece, 1);
    outgoing.goodbye_sent = outgoing.position == sizeof(Frame);
  }
  if (outgoing.has_output()) hand_over();
  return moved > 0;
}

bool Endpoint::read_credits(uint32_t peer) {
  bool moved = false;
  while (peers_[peer].outgoing != nullptr) {
    OutgoingLink& outgoing = *peers_[peer].outgoing;
    size_t received =
        outgoing.link.try_receive(outgoing.credit + outgoing.credit_bytes, sizeof(Credit) - outgoing.credit_bytes);
    if (received == 0) break;
    moved = true;
    outgoing.credit_bytes += received;
    if (outgoing.credit_bytes < sizeof(Credit)) break;
    Credit credit;
    std::memcpy(&credit, outgoing.credit, sizeof credit);
    outgoing.credit_bytes = 0;
    Flow& flow = peers_[peer].flows[credit.context];
    flow.outstanding -= std::min(flow.outstanding, credit.bytes);
    admit(peer, credit.context);
  }
  return moved;
}

bool Endpoint::read(uint32_t peer) {
  IncomingLink& incoming = *peers_[peer].incoming;
  uint64_t moved = 0;
  while (moved < kBudgetBytes && !incoming.ended) {
    size_t received = 0;
    if (incoming.arrival != nullptr) {
      Arrival& arrival = *incoming.arrival;
      uint64_t wanted = arrival.frame.bytes - arrival.received;
      char dropped[4096];
      received = arrival.target != nullptr
                     ? incoming.link.try_receive(arrival.target + arrival.received, std::min(wanted, kBudgetBytes))
                     : incoming.link.try_receive(dropped, std::min<uint64_t>(wanted, sizeof dropped));
      arrival.received += received;
      if (arrival.complete()) {
        ArrivalPtr ended = std::move(incoming.arrival);
        incoming.arrival = nullptr;
        complete(ended);
        moved += received;
        continue;
      }
    } else if (incoming.frame_bytes < sizeof(Frame)) {
      auto* frame = reinterpret_cast<char*>(&incoming.frame);
      received = incoming.link.try_receive(frame + incoming.frame_bytes, sizeof(Frame) - incoming.frame_bytes);
      incoming.frame_bytes += received;
      if (incoming.frame_bytes == sizeof(Frame)) {
        bool is_message = incoming.frame.kind == Frame::kMessage || incoming.frame.kind == Frame::kPlacedMessage;
        bool valid = is_message && incoming.frame.header_bytes <= kMaxHeaderBytes && incoming.frame.bytes <= kMaxBytes;
        if (!valid) {
          incoming.end(incoming.frame.kind == Frame::kGoodbye ? 0 : EPROTO);
          return true;
        }
        incoming.header.resize(incoming.frame.header_bytes);
        incoming.header_bytes = 0;
      }
    } else if (incoming.header_bytes < incoming.header.size()) {
      received = incoming.link.try_receive(incoming.header.data() + incoming.header_bytes,
                                           incoming.header.size() - incoming.header_bytes);
      incoming.header_bytes += received;
    }
    moved += received;
    bool header_read = incoming.frame_bytes == sizeof(Frame) && incoming.header_bytes == incoming.header.size();
    if (incoming.arrival == nullptr && header_read) {
      auto arrival = std::make_shared<Arrival>();
      arrival->source = peer;
      arrival->frame = incoming.frame;
      arrival->header = std::move(incoming.header);
      incoming.header.clear();
      incoming.frame_bytes = incoming.header_bytes = 0;
      if (arrival->frame.kind == Frame::kPlacedMessage) {
        arrival->placed = incoming.link.find_placed(arrival->frame.place, arrival->frame.bytes);
        if (arrival->placed == nullptr) {
          incoming.end(EPROTO);
          return true;
        }
        arrival->target = arrival->placed->data();
        arrival->received = arrival->frame.bytes;
      }
      if (!begin_arrival(arrival)) {
        incoming.end(ENOMEM);
        return true;
      }
      if (arrival->complete()) {
        complete(arrival);
      } else {
        incoming.arrival = arrival;
      }
      continue;
    }
    if (received == 0) break;
  }
  if (moved >= kBudgetBytes) hand_over();  // there may be more, that has been taken from the kernel
  return moved > 0;
}

bool Endpoint::send_credits(IncomingLink& incoming) {
  if (incoming.credits.empty()) return false;
  iovec piece{incoming.credits.data(), incoming.credits.size()};
  size_t sent = incoming.link.try_send(&piece, 1);
  incoming.credits.erase(0, sent);
  if (incoming.has_output()) hand_over();
  return sent > 0;
}

// Notices when the links of a rank have ended.
void Endpoint::check_links(uint32_t peer) {
  Peer& other = peers_[peer];
  if (other.incoming != nullptr && other.incoming->ended) return lose_peer_locked(peer, other.incoming->error);
  if (other.incoming != nullptr && other.incoming->link.closed() && !other.incoming->link.has_input())
    return lose_peer_locked(peer, other.incoming->link.error());
  if (other.outgoing == nullptr || !other.outgoing->link.closed()) return;
  if (other.outgoing->goodbye_sent) {  // it has read everything
    remove_outgoing(other);
  } else {
    lose_peer_locked(peer, other.outgoing->link.error());
  }
}

void Endpoint::lose_peer(uint32_t peer) {
  Lock lock(mutex_);
  if (peer >= peers_.size() || peer == rank_ || peers_[peer].declared) return;
  lose_peer_locked(peer, 0);
  peers_[peer].declared = true;
  for (auto& [number, context] : contexts_) {
    if (!context.reports_losses || context.ended) continue;
    context.losses.push_back(peer);
    end_receives(context, [&](const MessagePtr& receive) {
      bool reports = receive->has_flag(RD_REPORT_LOSSES) && !context.losses.empty();
      if (reports) report_loss(context, receive);
      return reports;
    });
  }
}

void Endpoint::end_any_source(uint64_t number, uint32_t last) {
  Lock lock(mutex_);
  if (last >= peers_.size() || !peers_[last].lost) return;
  Context& context = contexts_[number];
  context.last_source = int(last);
  end_receives(context, [&](const MessagePtr& receive) {
    bool ends = receive->peer == RD_ANY_SOURCE && !receive->has_flag(RD_REPORT_LOSSES);
    if (ends) finish(receive, RD_PEER_LOST, int(last), peers_[last].error);
    return ends;
  });
}

// Removes the receives for which `ended` returns true.
void Endpoint::end_receives(Context& context, const std::function<bool(const MessagePtr&)>& ended) {
  for (auto at = context.tags.begin(); at != context.tags.end();) {
    auto& receives = at->second.receives;
    receives.erase(std::remove_if(receives.begin(), receives.end(), ended), receives.end());
    at = receives.empty() && at->second.unexpected.empty() ? context.tags.erase(at) : std::next(at);
  }
}

// The loss of a rank is noticed here, by the end of a link, or by the caller of lose_peer.
void Endpoint::lose_peer_locked(uint32_t peer, int error) {
  Peer& other = peers_[peer];
  if (other.lost) return;
  other.lost = true;
  other.error = error;
  for (int i = 0; i < kMaxReadsOfLost && other.incoming != nullptr && read(peer); ++i) {
  }
  if (other.incoming != nullptr && other.incoming->arrival != nullptr) {
    ArrivalPtr arrival = std::move(other.incoming->arrival);
    other.incoming->arrival = nullptr;
    MessagePtr receive = std::move(arrival->receive);
    if (arrival->unexpected) {
      remove_unexpected(arrival);
    } else if (receive != nullptr && receive->peer == RD_ANY_SOURCE) {
      start_receive(receive);  // a message of another rank will do, and one may be here
    } else if (receive != nullptr) {
      finish(receive, RD_PEER_LOST, int(peer), error);
    }
  }
  for (auto& [number, context] : contexts_)
    end_receives(context, [&](const MessagePtr& receive) {
      if (receive->peer == int(peer)) finish(receive, RD_PEER_LOST, int(peer), error);
      return receive->peer == int(peer);
    });
  for (auto& [number, flow] : other.flows)
    for (const MessagePtr& send : flow.waiting) finish(send, RD_PEER_LOST, int(peer), error);
  other.flows.clear();
  other.unreported.clear();
  if (other.outgoing != nullptr)
    for (const MessagePtr& send : other.outgoing->queue) finish(send, RD_PEER_LOST, int(peer), error);
  remove_outgoing(other);
  remove_incoming(other);
}

// A closed descriptor leaves the epoll set by itself only when no child process has a copy of it.
void Endpoint::remove_outgoing(Peer& peer) {
  if (peer.outgoing == nullptr) return;
  MessageLink& link = peer.outgoing->link;
  if (!link.is_shared_memory()) --num_sockets_;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket(), nullptr);
  peer.outgoing.reset();
}

void Endpoint::remove_incoming(Peer& peer) {
  if (peer.incoming == nullptr) return;
  MessageLink& link = peer.incoming->link;
  if (!link.is_shared_memory()) --num_sockets_;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.socket(), nullptr);
  peer.incoming.reset();
}

// --- messages that arrive --------------------------------------------------------------------------------------------

// Decides where the data of a message goes, when it begins and when the receive that it was for has ended early: to the
// first receive that it fits, or into memory of the endpoint. Returns false when there is no memory for it.
bool Endpoint::begin_arrival(const ArrivalPtr& arrival) {
  Context& context = contexts_[arrival->frame.context];
  bool has_memory = true, is_kept = false;
  if (!context.ended) {
    Tag& tag = context.tags[arrival->frame.tag];
    auto found = std::find_if(tag.receives.begin(), tag.receives.end(), [&](const MessagePtr& receive) {
      return receive->peer == RD_ANY_SOURCE || receive->peer == int(arrival->source);
    });
    if (found != tag.receives.end()) {
      MessagePtr receive = *found;
      tag.receives.erase(found);
      has_memory = match(arrival, receive);
      is_kept = true;
    } else if ((arrival->frame.flags & RD_EXPECTED) == 0) {
      has_memory = is_kept = allocate_block(*arrival);
      arrival->unexpected = is_kept;
      if (is_kept) tag.unexpected.push_back(arrival);
    }
    erase_if_empty(context, arrival->frame.tag);
  }
  if (!is_kept) arrival->drop_data();
  return has_memory;
}

// Lets a message have memory of its own, with what has been received of it. Returns false when there is none.
bool Endpoint::allocate_block(Arrival& arrival) {
  if (arrival.block != nullptr) return true;
  uint64_t data_bytes = arrival.placed == nullptr ? arrival.frame.bytes : 0;
  MessageMemory block(allocate_message_memory(block_offset(arrival.frame.header_bytes) + data_bytes));
  if (block == nullptr) return false;
  std::memcpy(block.get(), arrival.header.data(), arrival.header.size());
  arrival.block = std::move(block);
  if (arrival.placed != nullptr) {
    keep_with_message_memory(arrival.block.get(), std::move(arrival.placed));
    return true;
  }
  if (arrival.received > 0) std::memcpy(arrival.block_data(), arrival.target, arrival.received);
  arrival.target = arrival.block_data();
  return true;
}

// Gives a message to a receive. Returns false when there is no memory for it.
bool Endpoint::match(const ArrivalPtr& arrival, const MessagePtr& receive) {
  receive->result.ready_ns = now_ns();
  if (receive->has_flag(RD_ANY_SIZE)) {
    if (!allocate_block(*arrival)) {
      finish(receive, RD_SYSTEM, int(arrival->source), ENOMEM);
      return false;
    }
  } else if (receive->signature != arrival->frame.signature || receive->bytes != arrival->frame.bytes) {
    arrival->drop_data();
    receive->received_header = arrival->header;
    finish(receive, RD_MISMATCH, int(arrival->source));
    return true;
  } else {
    // The memory of two receives may overlap.
    if (arrival->received > 0) std::memmove(receive->data, arrival->target, arrival->received);
    arrival->target = receive->data;
    arrival->block = nullptr;
    arrival->placed = nullptr;
  }
  arrival->receive = receive;
  return true;
}

// Called when all data of a message has arrived, and when a message whose data was there is taken.
void Endpoint::complete(const ArrivalPtr& arrival) {
  if (arrival->unexpected) return;
  give_credit(*arrival);
  MessagePtr receive = std::move(arrival->receive);
  if (receive == nullptr) return;
  receive->received_bytes = arrival->frame.bytes;
  if (receive->has_flag(RD_ANY_SIZE)) {
    receive->received_header = std::move(arrival->header);
    receive->received_data = arrival->target;
    receive->block = std::move(arrival->block);
  }
  finish(receive, RD_OK, int(arrival->source));
}

void Endpoint::remove_unexpected(const ArrivalPtr& arrival) {
  Context& context = contexts_[arrival->frame.context];
  auto& unexpected = context.tags[arrival->frame.tag].unexpected;
  unexpected.erase(std::remove(unexpected.begin(), unexpected.end(), arrival), unexpected.end());
  erase_if_empty(context, arrival->frame.tag);
}

void Endpoint::give_credit(const Arrival& arrival) {
  if ((arrival.frame.flags & RD_EXPECTED) != 0) return;
  Peer& other = peers_[arrival.source];
  uint64_t cost = message_cost(arrival.frame.bytes, arrival.frame.header_bytes), context = arrival.frame.context;
  if (arrival.source == rank_) {
    other.flows[context].outstanding -= cost;
    return admit(rank_, context);
  }
  if (other.incoming == nullptr) return;
  uint64_t& unreported = other.unreported[context];
  unreported += cost;
  if (unreported < kCreditBatchBytes) return;
  Credit credit{context, unreported};
  unreported = 0;
  other.incoming->credits.append(reinterpret_cast<const char*>(&credit), sizeof credit);
  send_credits(*other.incoming);
}

void Endpoint::erase_if_empty(Context& context, uint64_t number) {
  auto tag = context.tags.find(number);
  if (tag != context.tags.end() && tag->second.receives.empty() && tag->second.unexpected.empty())
    context.tags.erase(tag);
}

}  // namespace ronde
