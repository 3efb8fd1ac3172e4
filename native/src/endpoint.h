// Messages between pairs of ranks: sends and receives that meet by context, source and tag. No rank has to be there for
// another one's send: whoever moves bytes, a waiting caller or the endpoint's thread, empties all links at all times,
// into the memory of a receive that waits or else into memory of the endpoint. So sends and receives can come in any
// order on any rank, and no message waits behind another one that nobody has asked for.
//
// A rank opens a link to another one before it sends to it for the first time. Messages go along the link, and credits
// come back. A message counts as *outstanding* from its start until the receiver has taken it; when more bytes of one
// context are outstanding than the message allows (window_bytes), it waits at the sender. A receiver reports what it
// has taken in batches, so a sender must not need less than kCreditBatchBytes to be reported:
//
//   outstanding (as the sender knows it)    may a message start?
//   at most kCreditBatchBytes               always: all of it may have been taken and not yet been reported
//   above, and it fits into the window      yes
//   above, and it does not fit              it waits, and a report will come: not all of that can be unreported
//
// The loss of a rank ends the sends to it and the receives that name it, and nothing else. What it had sent before can
// still be received.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "link/message_link.h"
#include "link/wait.h"
#include "message_memory.h"

namespace ronde {

// Bytes that a message counts for until it was taken: an empty one needs memory, too.
inline uint64_t message_cost(uint64_t bytes, uint64_t header_bytes) { return bytes + header_bytes + 64; }

// One send or receive of this rank, from its start to its end.
struct Message {
  using DeadlineList = std::multimap<int64_t, std::shared_ptr<Message>>;
  static constexpr uint64_t kMinPlacedBytes = 32 * 1024;  // what is smaller is copied through a FIFO at once

  // Copies the caller's rd_message. Throws CallError{RD_BAD_CALL}.
  Message(const rd_message& params, uint32_t num_ranks, const Deadline& deadline);

  bool has_flag(uint32_t flag) const { return (flags & flag) != 0; }
  // Whether its data may lie in the memory of a link: it is for a receive of any size, which can use it there.
  bool may_be_placed() const { return kind == RD_SEND && has_header && bytes >= kMinPlacedBytes; }
  uint64_t cost() const;  // bytes that count as outstanding

  // What the caller asked for, as in rd_message.
  const rd_kind kind;
  const uint64_t context;
  const int peer;
  const uint64_t tag;
  const uint32_t flags;
  const uint64_t signature;
  const uint64_t window_bytes;
  const bool has_header;
  const std::string description;
  const std::string header;  // of a send: what travels ahead of the data
  char* data;
  const uint64_t bytes;
  const Deadline deadline;

  // What became of it; valid when `finished` is 1, guarded by the endpoint's mutex before.
  std::atomic<uint32_t> finished{0};  // futex word
  rd_result result{};
  MessageMemory block;  // of a receive of any size: the header, and the data or what keeps it
  char* received_data = nullptr;
  uint64_t received_bytes = 0;
  std::string received_header;  // of a receive of any size, and after a mismatch

  // For the endpoint, guarded by its mutex.
  uint32_t num_sleepers = 0;
  MessageMemory own_data;                              // of a send whose caller no longer waits
  std::shared_ptr<PlacedData> placed;                  // of a send whose data is in the memory of the link already
  std::optional<DeadlineList::iterator> in_deadlines;  // of a submitted message
};

class Endpoint {
 public:
  Endpoint(uint32_t rank, uint32_t num_ranks, SpinPolicy policy);
  ~Endpoint();

  // Adds a link that this rank has opened to send to `peer`, or that `peer` has opened to send to this rank. Throws
  // CallError{RD_SYSTEM}.
  void add_link(uint32_t peer, bool opened_here, FileDescriptor socket, int memory);

  // Returns when the message has finished: at its deadline at the latest.
  void run(const std::shared_ptr<Message>& message);
  void submit(const std::shared_ptr<Message>& message);
  // Waits for a submitted message. Returns false when the deadline expires first.
  bool wait(const std::shared_ptr<Message>& message, const Deadline& deadline);

  // Ends what involves this rank, after everything that has come from it was read. Later sends to it and receives from
  // it end at once, except for receives of messages that are already here.
  void lose_peer(uint32_t peer);
  // Ends the receives from any source in a context, because the last rank that could have sent something is lost.
  void end_any_source(uint64_t context, uint32_t last);
  // Ends all messages of a context, and drops those that arrive from now on.
  void end_context(uint64_t context);
  // Waits until the other ranks have everything that this one has sent, and tells them that nothing more will come.
  // Returns false when the deadline expires first.
  bool leave(const Deadline& deadline);
  // Ends all messages and joins the thread. Idempotent.
  void close();

  // Fills in the message of this context that has been under way for longest, and the rank that it waits for, or -1.
  void get_current_message(uint64_t context, rd_current_call* current, int32_t* missing);

  uint32_t num_ranks() const { return uint32_t(peers_.size()); }
  bool is_of_parent() const { return made_by_parent(generation_); }  // in a forked child: it may not be touched

  // Where the data begins in the block of a received message.
  static uint64_t block_offset(uint64_t header_bytes) { return (header_bytes + 63) / 64 * 64; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using MessagePtr = std::shared_ptr<Message>;

  struct Frame {
    enum Kind : uint32_t { kMessage = 1, kGoodbye = 2, kPlacedMessage = 3 };
    uint32_t kind;
    uint32_t flags;
    uint64_t context;
    uint64_t tag;
    uint64_t signature;
    uint64_t header_bytes;
    uint64_t bytes;
    uint64_t place;  // of a kPlacedMessage: where its data is in the memory of the link
  };

  // What a receiver sends back: so many bytes of a context are no longer outstanding.
  struct Credit {
    uint64_t context;
    uint64_t bytes;
  };

  // A message of another rank, or of this one to itself, from when its header has been read.
  struct Arrival {
    uint32_t source = 0;
    Frame frame{};
    std::string header;
    uint64_t received = 0;
    char* target = nullptr;  // where the data goes, and what has been received is; null when it is thrown away
    MessageMemory block;     // the header and the data, unless the data goes into the receiver's memory
    std::shared_ptr<PlacedData> placed;  // the data, if it is in the memory of the link
    MessagePtr receive;                  // the receive that it was matched with, if any
    bool unexpected = false;             // whether it is among the unexpected ones of its tag

    bool complete() const { return received == frame.bytes; }
    char* block_data() const { return block.get() + block_offset(frame.header_bytes); }
    void drop_data() {
      target = nullptr;
      block = nullptr;
      placed = nullptr;
    }
  };
  using ArrivalPtr = std::shared_ptr<Arrival>;

  // Receives and messages of one tag that have not met.
  struct Tag {
    std::deque<MessagePtr> receives;    // in the order in which they were started
    std::deque<ArrivalPtr> unexpected;  // in the order in which they arrived
  };

  struct Context {
    std::unordered_map<uint64_t, Tag> tags;
    bool ended = false;
    bool reports_losses = false;
    std::deque<uint32_t> losses;  // ranks whose loss has not been reported
    int last_source = -1;         // the last rank to be lost, when no other can send any more
  };

  struct OutgoingLink {
    OutgoingLink(FileDescriptor socket, int memory) : link(std::move(socket), memory, true) {}
    MessageLink link;
    std::deque<MessagePtr> queue;
    Frame frame{};          // of the first message in the queue
    uint64_t position = 0;  // bytes of it that have been sent, with frame and header
    bool says_goodbye = false, goodbye_sent = false;
    char credit[sizeof(Credit)];
    size_t credit_bytes = 0;
    bool watched_for_output = false;
    bool has_output() const { return !queue.empty() || (says_goodbye && !goodbye_sent); }
  };

  struct IncomingLink {
    IncomingLink(FileDescriptor socket, int memory) : link(std::move(socket), memory, false) {}
    MessageLink link;
    Frame frame{};
    size_t frame_bytes = 0, header_bytes = 0;  // that have been read
    std::string header;
    ArrivalPtr arrival;  // whose data is being read
    bool ended = false;  // nothing more is read from it: the peer has said goodbye, or there is an error
    int error = 0;
    std::string credits;  // to be sent back
    bool watched_for_output = false;
    bool has_output() const { return !credits.empty(); }
    void end(int why) {
      ended = true;
      error = why;
    }
  };

  // What was sent to a rank in one context.
  struct Flow {
    uint64_t outstanding = 0;
    std::deque<MessagePtr> waiting;
  };

  struct Peer {
    std::unique_ptr<OutgoingLink> outgoing;
    std::unique_ptr<IncomingLink> incoming;
    std::unordered_map<uint64_t, Flow> flows;           // by context
    std::unordered_map<uint64_t, uint64_t> unreported;  // by context: bytes taken, not yet sent back as credit
    bool lost = false;                                  // a link to it has ended, or the caller has declared it lost
    bool declared = false;                              // the caller has
    int error = 0;
    bool has_waiting() const {
      return std::any_of(flows.begin(), flows.end(), [](const auto& flow) { return !flow.second.waiting.empty(); });
    }
  };

  static constexpr uint64_t kKickKey = UINT64_MAX;  // in the epoll set, in place of a link
  static constexpr uint64_t kCreditBatchBytes = 256 * 1024;
  static constexpr uint64_t kMaxHeaderBytes = 1 << 20;
  static constexpr uint64_t kMaxBytes = uint64_t(1) << 50;
  static constexpr uint64_t kBudgetBytes = 1 << 20;  // moved on one link before others get their turn

  void place(const MessagePtr& message);
  void start(const MessagePtr& message);
  void start_send(const MessagePtr& message);
  void start_receive(const MessagePtr& message);
  void admit(uint32_t peer, uint64_t context);
  void deliver_to_self(const MessagePtr& message);
  void report_loss(Context& context, const MessagePtr& receive);
  void finish(const MessagePtr& message, rd_status status, int member, int detail = 0);
  void withdraw(const MessagePtr& message, rd_status status, int member, int detail = 0);
  void withdraw_receive(const MessagePtr& message);
  bool withdraw_send(const MessagePtr& message);

  bool wait_for(const MessagePtr& message, const Deadline& deadline, bool run_handlers, Lock& lock);
  bool spin(const MessagePtr& message, const Deadline& deadline, Lock& lock);
  void run_handlers_unlocked(const Message& message, Lock& lock);
  bool progress(bool poll_sockets);
  bool poll_sockets();
  bool write(OutgoingLink& outgoing);
  bool read_credits(uint32_t peer);
  bool read(uint32_t peer);
  bool send_credits(IncomingLink& incoming);
  void check_links(uint32_t peer);
  void lose_peer_locked(uint32_t peer, int error);
  void remove_outgoing(Peer& peer);
  void remove_incoming(Peer& peer);
  void end_receives(Context& context, const std::function<bool(const MessagePtr&)>& ended);
  void for_each_message(const std::function<void(const MessagePtr&)>& visit);

  bool begin_arrival(const ArrivalPtr& arrival);
  bool allocate_block(Arrival& arrival);
  bool match(const ArrivalPtr& arrival, const MessagePtr& receive);
  void complete(const ArrivalPtr& arrival);
  void remove_unexpected(const ArrivalPtr& arrival);
  void give_credit(const Arrival& arrival);
  void erase_if_empty(Context& context, uint64_t tag);

  void ensure_thread();
  void thread_loop();
  bool callers_are_active(uint32_t* last_num_waits) const;
  void clear_kicks();
  void kick();
  void hand_over();
  bool prepare_sleep();
  int64_t expire_deadlines(int64_t now);
  void watch_output(MessageLink& link, bool wanted, bool* watched, uint64_t key);

  const uint32_t rank_;
  const SpinPolicy policy_;
  const uint32_t generation_ = fork_generation.load();
  FileDescriptor epoll_, kick_;
  std::mutex mutex_;              // guards everything below
  std::vector<Peer> peers_;       // by rank
  std::vector<uint32_t> linked_;  // ranks with a link, and a few that had one
  std::unordered_map<uint64_t, Context> contexts_;
  Message::DeadlineList deadlines_;  // of submitted messages
  // Changed under the mutex; the thread also looks at them without it, because it must not get in the callers' way.
  std::atomic<uint32_t> num_spinning_{0};  // callers that move bytes themselves
  std::atomic<uint32_t> num_asleep_{0};    // callers that sleep until the thread has moved their bytes
  std::atomic<uint32_t> num_waits_{0};     // of callers, so far
  uint32_t num_sockets_ = 0;               // links between hosts
  bool thread_sleeps_ = false;             // until the next look at the callers, or as below
  bool thread_polls_ = false;              // it sleeps until the kernel has something for it, or hand_over() is called
  bool leaving_ = false;
  bool closed_ = false;
  std::atomic<bool> closing_{false};  // as closed_, for the thread when it does not have the mutex
  std::thread thread_;  // "ronde-messages"; moves bytes when no caller does, and ends messages at their deadlines
};

}  // namespace ronde
