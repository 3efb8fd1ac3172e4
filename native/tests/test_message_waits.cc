// Waits for messages: who moves the bytes and who has to be woken for that, what a receive that ends early leaves to
// others, and signal handlers that run in the middle.
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "base/python_signals.h"
#include "check.h"
#include "message_ranks.h"

using ronde::MessageLink;
using namespace message_ranks;

namespace {

constexpr double kLimitS = 60;
constexpr uint64_t kTag = 5;
const ronde::SpinPolicy kSpins = ronde::spin_policy(2, 2);
const ronde::SpinPolicy kSpinsForever{UINT32_MAX, 50};

// Whether the thread of the only endpoint is inside of epoll_wait, and whether it gets no core when it is woken.
std::atomic<bool> thread_sleeps{false}, thread_is_held{false};

template <class Condition>
bool until(Condition condition) {
  Deadline deadline(kLimitS);
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

// Endpoint::Frame, which is private.
struct RawFrame {
  uint32_t kind, flags;
  uint64_t context, tag, signature, header_bytes, bytes, place;
};

// A rank without an endpoint: its bytes come when a test says so.
class RawPeer {
 public:
  RawPeer(Endpoint& endpoint, uint32_t rank, bool has_memory) {
    auto [own, other] = unix_pair();
    FileDescriptor memory(has_memory ? memfd_create("link", MFD_CLOEXEC) : -1);
    if (has_memory && ftruncate(memory.get(), sizeof(ronde::LinkMemory)) != 0) throw std::runtime_error("no memory");
    link_ = std::make_unique<MessageLink>(std::move(own), memory.get(), true);
    endpoint.add_link(rank, false, std::move(other), memory.get());
  }

  // Returns whether the endpoint has taken them, or the link had room for them.
  bool send(const void* data, size_t bytes) {
    size_t sent = 0;
    return until([&] {
      iovec piece{static_cast<char*>(const_cast<void*>(data)) + sent, bytes - sent};
      sent += link_->try_send(&piece, 1);
      return sent == bytes;
    });
  }

  bool send_frame(uint64_t tag, uint64_t bytes, uint32_t flags = 0) {
    RawFrame frame{1, flags, 7, tag, 0, 0, bytes, 0};
    return send(&frame, sizeof frame);
  }

  bool send_number(uint64_t tag, uint64_t value) { return send_frame(tag, sizeof value) && send(&value, sizeof value); }

  // Sends half a number and waits until it has been read.
  bool send_half(uint64_t tag, uint64_t value, uint32_t flags = 0) {
    return send_frame(tag, sizeof value, flags) && send(&value, 4) && is_socket_read();
  }
  bool send_other_half(uint64_t value) { return send(reinterpret_cast<char*>(&value) + 4, 4); }

  // Waits until the endpoint has read what is in the socket: with memory, the bytes that wake it.
  bool is_socket_read() {
    return until([&] {
      int unread = 0;
      return ioctl(link_->socket(), SIOCOUTQ, &unread) == 0 && unread == 0;
    });
  }

  void die() { link_.reset(); }

 private:
  std::unique_ptr<MessageLink> link_;
};

// A Python whose signal handlers are this function, while this lives. They run in the main thread.
class SignalHandler {
 public:
  explicit SignalHandler(std::function<int()> handler) {
    function = std::move(handler);
    static const rd_interpreter interpreter{
        [] { return 0; },
        [] { return function(); },
        [](void** kind, void** value, void** traceback) { *kind = *value = *traceback = nullptr; },
        [](int) {},
    };
    ronde::set_interpreter(&interpreter);
  }
  ~SignalHandler() {
    ronde::set_interpreter(nullptr);
    void* exception[3];
    ronde::fetch_exception(exception);
  }

 private:
  inline static std::function<int()> function;
};

// Runs a message until the signal handler ends it.
void run_interrupted(Endpoint& endpoint, const rd_message& params, std::function<int()> handler) {
  SignalHandler installed(std::move(handler));
  auto message = run(endpoint, params, kLimitS);
  CHECK_EQ(message->result.status, int(RD_ABORTED));
  CHECK_EQ(message->result.detail, EINTR);
}

rd_message wanted(int from, uint64_t* value, uint32_t flags = 0) {
  bool any_size = (flags & RD_ANY_SIZE) != 0;
  rd_message params = make(RD_RECEIVE, from, kTag, any_size ? nullptr : value, any_size ? 0 : sizeof *value);
  params.flags = flags;
  return params;
}

// The number that a message with this memory has received.
uint64_t number_of(const Message& message, uint64_t value) {
  if (message.block != nullptr)
    std::memcpy(&value, message.block.get() + Endpoint::block_offset(message.received_header.size()), sizeof value);
  return value;
}

}  // namespace

// As in the kernel: a thread that was woken and finds no event any more sleeps on.
extern "C" int epoll_wait(int epoll, epoll_event* events, int num, int timeout_ms) {
  auto look = [&] { return int(syscall(SYS_epoll_pwait, epoll, events, num, 0, nullptr, 8)); };
  if (timeout_ms == 0) return look();
  int count = 0;
  while (count == 0) {
    thread_sleeps = true;
    pollfd ready{epoll, POLLIN, 0};
    if (poll(&ready, 1, timeout_ms) == 0) break;
    while (thread_is_held) usleep(100);
    count = look();
  }
  thread_sleeps = false;
  return count;
}

TEST(the_thread_empties_the_links_after_a_caller_took_the_byte_that_was_to_wake_it) {
  Endpoint endpoint(0, 2, kSpinsForever);
  RawPeer peer(endpoint, 1, true);
  CHECK(until([] { return thread_sleeps.load(); }));
  thread_is_held = true;
  std::thread caller([&] { CHECK_EQ(receive(endpoint, 1, 2), int64_t(2)); });
  CHECK(peer.send_number(1, 1));  // wakes the thread
  CHECK(peer.is_socket_read());   // by the caller
  CHECK(peer.send_number(2, 2));
  caller.join();
  thread_is_held = false;
  std::vector<char> large(4 << 20);  // more than the link holds, and nobody calls the endpoint
  CHECK(peer.send_frame(3, large.size()) && peer.send(large.data(), large.size()));
  CHECK_EQ(receive(endpoint, 1, 1), int64_t(1));
}

TEST(the_thread_sends_the_rest_of_a_send_that_timed_out) {
  for (bool local : {true, false}) {
    auto [one, other] = local ? unix_pair() : thread_ranks::tcp_pair();
    FileDescriptor memory(local ? memfd_create("link", MFD_CLOEXEC) : -1);
    if (local) CHECK_EQ(ftruncate(memory.get(), sizeof(ronde::LinkMemory)), 0);
    MessageLink reader(std::move(other), memory.get(), false);
    Endpoint sender(0, 2, {1, 1});
    sender.add_link(1, true, std::move(one), memory.get());
    CHECK(until([] { return thread_sleeps.load(); }));
    std::vector<char> data(32 << 20), got(data.size());
    CHECK_EQ(run(sender, make(RD_SEND, 1, 0, data.data(), data.size()), 0)->result.status, int(RD_TIMEOUT));
    size_t ahead = sizeof(RawFrame) + std::strlen("a send"), received = 0;
    CHECK(until([&] {
      received += reader.try_receive(got.data(), std::min(got.size(), ahead + data.size() - received));
      return received == ahead + data.size();
    }));
  }
}

TEST(a_message_whose_receive_ends_in_the_middle_goes_to_the_next_receive) {
  for (uint32_t first_flags : {0u, RD_ANY_SIZE}) {
    for (uint32_t next_flags : {0u, RD_ANY_SIZE}) {
      for (int next_from : {1, RD_ANY_SOURCE}) {
        Endpoint endpoint(0, 2, kSpins);
        RawPeer peer(endpoint, 1, false);
        uint64_t one = 1ull << 32 | 1, first_value = 0, next_value = 0;
        std::shared_ptr<Message> next;
        run_interrupted(endpoint, wanted(1, &first_value, first_flags), [&] {
          next = submit(endpoint, wanted(next_from, &next_value, next_flags));
          CHECK(peer.send_half(kTag, one));
          return -1;
        });
        CHECK(peer.send_other_half(one) && peer.send_number(kTag, 2));
        CHECK(endpoint.wait(next, Deadline(kLimitS)));
        CHECK_EQ(next->result.status, int(RD_OK));
        CHECK_EQ(number_of(*next, next_value), one);
        CHECK_EQ(receive(endpoint, 1, kTag), int64_t(2));
      }
    }
  }
}

TEST(a_reply_whose_receive_ends_in_the_middle_is_dropped) {
  for (uint32_t flags : {0u, RD_ANY_SIZE}) {
    Endpoint endpoint(0, 2, kSpins);
    RawPeer peer(endpoint, 1, false);
    uint64_t value = 0;
    run_interrupted(endpoint, wanted(1, &value, flags), [&] {
      CHECK(peer.send_half(kTag, 1, RD_EXPECTED));
      return -1;
    });
    CHECK(peer.send_other_half(1) && peer.send_number(kTag, 2));
    CHECK_EQ(receive(endpoint, 1, kTag), int64_t(2));
  }
}

TEST(a_context_may_end_in_the_middle_of_a_message) {
  Endpoint endpoint(0, 2, kSpins);
  RawPeer peer(endpoint, 1, false);
  uint64_t values[2] = {};
  auto first = submit(endpoint, wanted(1, &values[0])), second = submit(endpoint, wanted(1, &values[1]));
  CHECK(peer.send_half(kTag, 1));
  endpoint.end_context(7);
  CHECK_EQ(first->result.status, int(RD_CLOSED));
  CHECK_EQ(second->result.status, int(RD_CLOSED));
  CHECK(peer.send_other_half(1) && peer.send_number(kTag, 2) && peer.is_socket_read());
}

TEST(a_receive_from_any_rank_whose_sender_is_lost_takes_what_is_here) {
  Endpoint endpoint(0, 3, kSpins);
  RawPeer lost(endpoint, 1, false), other(endpoint, 2, false);
  uint64_t value = 0;
  auto any = submit(endpoint, wanted(RD_ANY_SOURCE, &value));
  CHECK(lost.send_half(kTag, 1));
  CHECK(other.send_number(kTag, 2) && other.is_socket_read());
  lost.die();
  CHECK(endpoint.wait(any, Deadline(kLimitS)));
  CHECK_EQ(any->result.status, int(RD_OK));
  CHECK_EQ(any->result.member, 2);
  CHECK_EQ(value, uint64_t(2));
}

TEST(a_receive_from_any_rank_whose_sender_is_lost_keeps_its_turn) {
  Endpoint endpoint(0, 3, kSpins);
  RawPeer lost(endpoint, 1, false), other(endpoint, 2, false);
  uint64_t values[3] = {};
  auto named = submit(endpoint, wanted(2, &values[0]));
  auto any = submit(endpoint, wanted(RD_ANY_SOURCE, &values[1]));
  auto last = submit(endpoint, wanted(RD_ANY_SOURCE, &values[2]));
  CHECK(lost.send_half(kTag, 1));
  lost.die();
  CHECK_EQ(receive(endpoint, 1, 9), int64_t(-RD_PEER_LOST));
  for (uint64_t i = 10; i < 13; ++i) CHECK(other.send_number(kTag, i));
  for (auto& message : {named, any, last}) CHECK(endpoint.wait(message, Deadline(kLimitS)));
  for (uint64_t i = 0; i < 3; ++i) CHECK_EQ(values[i], 10 + i);
}

TEST(a_receive_that_reports_losses_does_so_when_its_sender_is_lost_in_the_middle) {
  Endpoint endpoint(0, 3, kSpins);
  RawPeer lost(endpoint, 1, false);
  auto any = submit(endpoint, wanted(RD_ANY_SOURCE, nullptr, RD_ANY_SIZE | RD_REPORT_LOSSES));
  CHECK(lost.send_half(kTag, 1));
  endpoint.lose_peer(2);
  CHECK_EQ(int(any->finished.load()), 0);  // a message comes first
  lost.die();
  CHECK(endpoint.wait(any, Deadline(kLimitS)));
  CHECK_EQ(any->result.status, int(RD_PEER_LOST));
  CHECK_EQ(any->result.member, 2);
}

TEST(signal_handlers_run_while_bytes_move) {
  for (bool are_own : {false, true}) {  // those of the message, or of others
    Endpoint endpoint(0, 2, kSpinsForever);
    RawPeer peer(endpoint, 1, true);
    std::vector<char> data(4 << 20);
    std::atomic<bool> stop{false};
    std::thread traffic([&] {
      if (are_own) CHECK(peer.send_frame(kTag, data.size()));
      for (uint64_t i = 0; i < data.size() && !stop; ++i) {
        CHECK(are_own ? peer.send(&i, 1) : peer.send_number(9, i));
        usleep(50);
      }
    });
    run_interrupted(endpoint, make(RD_RECEIVE, 1, kTag, data.data(), data.size()), [] { return -1; });
    stop = true;
    traffic.join();
  }
}

TEST(deadlines_of_submitted_messages_hold_while_callers_are_busy) {
  Endpoint endpoint(0, 2, kSpinsForever);
  RawPeer peer(endpoint, 1, true);
  std::thread busy([&] { CHECK_EQ(receive(endpoint, 1, 2), int64_t(2)); });
  rd_current_call current{};
  int32_t missing;
  while (current.start_ns == 0) endpoint.get_current_message(7, &current, &missing);
  uint64_t value = 0;
  auto late = submit(endpoint, wanted(1, &value), 0.01);
  CHECK(until(
      [&] { return send(endpoint, 0, 3, 1) == RD_OK && receive(endpoint, 0, 3) == 1 && late->finished.load() != 0; }));
  CHECK_EQ(late->result.status, int(RD_TIMEOUT));
  CHECK(peer.send_number(2, 2));
  busy.join();
}

TEST(a_child_that_a_signal_handler_forks_is_refused) {
  rd_endpoint endpoint = 0;
  CHECK_EQ(rd_open_endpoint(0, 2, 2, 2, &endpoint), RD_OK);
  pid_t child = -1;
  SignalHandler handler([&] {
    if (child == 0) _exit(2);
    if (child > 0) return -1;
    child = fork();
    if (child == 0) alarm(60);
    return 0;
  });
  uint64_t value = 0;
  rd_message params = wanted(1, &value);
  rd_result result{};
  rd_status status = rd_run_message(endpoint, &params, &result, kLimitS);
  if (child == 0) _exit(status == RD_FORKED && rd_run_message(endpoint, &params, &result, 1) == RD_FORKED ? 0 : 1);
  CHECK_EQ(status, RD_ABORTED);
  int child_status = -1;
  CHECK_EQ(waitpid(child, &child_status, 0), child);
  CHECK_EQ(child_status, 0);
  rd_close_endpoint(endpoint);
}
