/* The C ABI of ronde's data plane, called from Python through ctypes and from native code.
 *
 * A channel is one total order of collectives among its members. The caller opens every socket and shared-memory file,
 * authenticates it and passes the descriptors: the library resolves no name and reads neither settings nor environment
 * variables. No exception crosses this interface; every function that can fail returns an rd_status.
 *
 * Handles. rd_channel and rd_work are counted references: who made one, or called its retain function, calls its
 * release function once. A handle stays valid until then, also after rd_close, from when on its calls return RD_CLOSED.
 * All functions may be called from any thread at the same time, rd_close included.
 *
 * Threads. rd_run runs a call in the thread of the caller when the channel is idle. Every other call runs in the
 * channel's own thread ("ronde-channel", with all signals blocked), one after the other.
 *
 * Callbacks run in that thread, each once, after its call has ended (rd_done returns 1) and before the next queued call
 * starts: a slow callback delays those behind it. Those of announced calls may also run in a thread that waits for an
 * announced call. No lock is held. A callback may call everything but rd_run and rd_wait, which return RD_BAD_CALL with
 * EDEADLK as detail there: it would wait for itself. rd_close and rd_release in a callback do not wait for the thread
 * that they are called in.
 *
 * Forks. A channel belongs to the process that opened it. In a forked child (fork(2), not vfork or clone) every
 * function with a handle of the parent returns RD_FORKED or does nothing, and nothing that the child does reaches the
 * parent: the child's copies of sockets are closed right after the fork, and shared memory becomes private to it.
 */
#ifndef RONDE_H
#define RONDE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RD_ABI 7                 /* changes when a struct or a function of this file changes */
#define RD_DESCRIPTION_BYTES 128 /* bytes of a call's description, with its closing zero */
#define RD_MAX_MEMBERS 65536
#define RD_MAX_LOCAL_MEMBERS 1024 /* of one host */
#define RD_MAX_ANNOUNCED 65536    /* ids of announced calls in one channel */
#define RD_NO_SEQUENCE UINT64_MAX

typedef enum rd_status {
  RD_OK = 0,
  RD_BAD_CALL = 1,   /* the caller's mistake: nothing was sent, the channel stays usable; .detail may be EDEADLK */
  RD_MISMATCH = 2,   /* the members' calls differ: no data moved, the channel stays usable */
  RD_TIMEOUT = 3,    /* the deadline expired; the channel is aborted for every member */
  RD_ABORTED = 4,    /* rd_abort was called here or by another member */
  RD_PEER_LOST = 5,  /* a member's socket closed; rd_result.member is that member, .detail is errno or 0 */
  RD_SYSTEM = 6,     /* the operating system refused; rd_result.detail is errno */
  RD_CLOSED = 7,     /* the channel was closed here, before the call or while it was under way */
  RD_CANCELLED = 8,  /* rd_cancel ended the call before it started: nothing was sent, its memory was not touched */
  RD_FORKED = 9,     /* this process is a forked child of the one that opened the channel */
  RD_WITHDRAWN = 10, /* rd_revoke took the announcement back: the call did not run */
  RD_NOT_AGREED = 11 /* the members have not agreed on what the id stands for: nothing was announced */
} rd_status;

typedef enum rd_dtype {
  RD_UINT8 = 0,
  RD_INT8 = 1,
  RD_UINT16 = 2,
  RD_INT16 = 3,
  RD_UINT32 = 4,
  RD_INT32 = 5,
  RD_UINT64 = 6,
  RD_INT64 = 7,
  RD_FLOAT16 = 8,
  RD_BFLOAT16 = 9,
  RD_FLOAT32 = 10,
  RD_FLOAT64 = 11,
  RD_BOOL = 12,
  RD_NUM_DTYPES = 13
} rd_dtype;

typedef enum rd_op {
  RD_SUM = 0,
  RD_MEAN = 1,
  RD_MIN = 2,
  RD_MAX = 3,
  RD_PRODUCT = 4,
  RD_ADASUM = 5,
  RD_BIT_AND = 6, /* operations on bits are for integers and bool */
  RD_BIT_OR = 7,
  RD_BIT_XOR = 8,
  RD_NUM_OPS = 9
} rd_op;

typedef enum rd_kind {
  RD_BARRIER = 0,
  RD_ALLREDUCE = 1,
  RD_ALLGATHER = 2,
  RD_BROADCAST = 3,
  RD_REDUCE_SCATTER = 4,
  RD_ALLTOALL = 5,
  RD_SEND = 6, /* of rd_message, not of rd_call */
  RD_RECEIVE = 7,
  RD_JOIN = 8, /* contribute zeros to the other members' allreduces until every member has joined */
  RD_REDUCE = 9,
  RD_GATHER = 10,
  RD_SCATTER = 11,
  RD_NUM_KINDS = 12
} rd_kind;

typedef enum rd_algorithm {
  RD_AUTO = 0,   /* by the table in choose_algorithm.cc */
  RD_DIRECT = 1, /* shared memory, when all members are on one host */
  RD_DOUBLING = 2,
  RD_RING = 3,
  RD_TWO_LEVEL = 4,
  RD_TREE = 5,
  RD_PAIRWISE = 6,
  RD_HALVING = 7,
  RD_NUM_ALGORITHMS = 8
} rd_algorithm;

/* A flag of rd_call: the members have agreed on this call in advance (it was negotiated or planned), so hosts do not
 * exchange headers. */
#define RD_PRE_AGREED 1u
/* A flag of rd_call: this member computes while the call runs, so waits leave the core to that. */
#define RD_OVERLAPPED 2u

typedef struct rd_channel rd_channel;
typedef struct rd_work rd_work; /* a submitted call */

/* The members of a channel and their hosts. Equal on every member but for member_index and num_cores. */
typedef struct rd_channel_params {
  uint32_t abi; /* RD_ABI */
  uint32_t num_members;
  uint32_t member_index; /* of this process */
  uint32_t num_cores;    /* of this host; decides how long a wait spins */
  const uint32_t* hosts; /* per member: the index of its host, counted from 0 in order of appearance */
  uint64_t slot_bytes;   /* size of a staging slot; each member has two; a multiple of 64, at least chunk_bytes */
  uint64_t chunk_bytes;  /* bytes of a slot that one step of the direct algorithm uses; a multiple of 64, at least 8 for
                          * each member of the host that has the most */
  uint64_t bucket_bytes; /* size of each of a member's two bucket areas, or 0 */
  uint64_t fusion_bytes; /* the most bytes of announced calls that are fused into one */
  /* Ids of announced calls, from 0; then all members are on one host, and collectives are announced. Otherwise 0. */
  uint32_t max_announced;
} rd_channel_params;

/* One contiguous piece of a member's memory. A call with several spans works on their concatenation. */
typedef struct rd_span {
  const void* input;
  void* output;
  uint64_t count; /* elements */
} rd_span;

typedef struct rd_call {
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t algorithm;
  uint32_t flags;
  int32_t peer; /* root of a broadcast, reduce, gather or scatter */
  double prescale;
  double postscale;
  uint64_t signature;      /* must be equal on all members */
  const char* description; /* this member's call in words, for the error that names a mismatch */
  const rd_span* spans;
  uint64_t num_spans;
  /* Elements per member. allgather, gather: what each member contributes. reduce_scatter, scatter: what each member
   * receives. alltoall: what this member receives from each. Otherwise null. */
  const uint64_t* counts;
  const uint64_t* splits; /* alltoall: elements that this member sends to each */
} rd_call;

typedef struct rd_result {
  int32_t status;
  int32_t member;    /* the member that caused the error, or -1 */
  int32_t detail;    /* errno, or 0 */
  int32_t algorithm; /* the algorithm that ran */
  int64_t start_ns;  /* CLOCK_MONOTONIC, when the call started to run */
  int64_t ready_ns;  /* when every member had arrived */
  int64_t end_ns;    /* when it finished here */
  /* The number of the collective; all members count alike. RD_NO_SEQUENCE for all but one of the announced calls that
   * were fused into one, and for a call that did not run. */
  uint64_t sequence;
  /* When this member had come to it: for announced calls, when it had announced all that were fused and finished what
   * was before them; otherwise start_ns. */
  int64_t arrived_ns;
} rd_result;

/* The call of one member, when a call ended in RD_MISMATCH. */
typedef struct rd_member_call {
  uint64_t signature;
  int32_t kind;
  char description[RD_DESCRIPTION_BYTES];
} rd_member_call;

/* The call that a channel is running. */
typedef struct rd_current_call {
  uint64_t sequence; /* number of the last collective; all members count alike */
  int64_t start_ns;  /* CLOCK_MONOTONIC, or 0 when no call is running */
  int32_t kind;
  int32_t num_missing; /* members that have not arrived */
  char description[RD_DESCRIPTION_BYTES];
} rd_current_call;

uint32_t rd_abi(void);
const char* rd_version(void); /* the version, and a digest of the sources of this library */
const char* rd_cpu(void);     /* the reduce kernels in use: "portable", "avx2" or "avx512" */

/* Returns the bytes of shared memory that the members of this host need, or 0 when params is invalid or that would be
 * more than a file can have. The host's lowest member creates the memory, filled with zeros. */
uint64_t rd_segment_bytes(const rd_channel_params* params);

/* What a channel between hosts needs from its caller while calls run. The channel sends records of this type
 * through the socket that rd_open gets. */
typedef enum rd_event_kind {
  RD_LINK_WANTED = 0,    /* a call wants to send to a member of another host: give it a link (rd_open_link) */
  RD_CHANNEL_ABORTED = 1 /* a call has failed here: tell the members of other hosts (rd_abort) */
} rd_event_kind;

typedef enum rd_link_kind {
  RD_LINK_SINGLE = 0, /* of one socket */
  RD_LINK_RING = 1,   /* for large data: of several sockets, if that is faster */
  RD_NUM_LINK_KINDS = 2
} rd_link_kind;

typedef struct rd_event {
  uint64_t channel;    /* the number given to rd_open */
  int32_t kind;        /* rd_event_kind */
  int32_t member;      /* that the link goes to, or that has caused the abort, or -1 */
  int32_t status;      /* of a link its rd_link_kind, of an abort its rd_status */
  int32_t detail;      /* of an abort: errno, or 0 */
  int64_t deadline_ns; /* of a link: when the call ends that wants it, CLOCK_MONOTONIC; INT64_MAX for never */
} rd_event;

/* Opens a channel. It has no links to members of other hosts yet: each is opened when a call first uses it. `segment`
 * is the descriptor of the shared memory, or -1 for the only member of a host. `events` is one end of a pair
 * of Unix sockets (SOCK_SEQPACKET), or -1 if all members are on one host; `number` tells channels apart in it. The
 * caller keeps both descriptors. RD_BAD_CALL when params is invalid or the memory has another size than
 * rd_segment_bytes; after RD_SYSTEM, errno says what failed. */
rd_status rd_open(const rd_channel_params* params, int segment, int events, uint64_t number, rd_channel** channel);

/* Opens one direction of a link to a member of another host: the one in which this member sends if it has asked for
 * the link (opened_here), otherwise the other. The sockets are connected to that member, which is given their other
 * ends in the same order; the channel owns them from here on, even when this function fails. A direction that is open
 * stays as it is. */
rd_status rd_open_link(rd_channel* channel, uint32_t member, int32_t kind, int opened_here, const int* sockets,
                       uint32_t num_sockets);

/* Count one more user of a channel, and one less. The last release closes the channel, if nobody has, and frees it. */
void rd_retain(rd_channel* channel);
void rd_release(rd_channel* channel);

/* Leaves the channel: in good order when no call is queued or running; otherwise the members that need this one lose
 * it. All calls under way and all later ones end with RD_CLOSED. When this returns, queued and announced calls have
 * ended and the channel's thread has too; a thread that is inside rd_run leaves it within moments. Sockets are closed
 * and memory is unmapped when the last thread has left. It can be called repeatedly (only the first call waits), from
 * any thread, also from a signal handler of Python that runs inside rd_run or rd_wait, and from a callback. An
 * announced call in the middle of which a signal handler runs ends after the handler: this function waits two seconds
 * for it at most, and not at all when that handler calls it. */
void rd_close(rd_channel* channel);

/* Ends all waits of the members of this host with this rd_status, the member that has caused it, or -1, and errno or
 * 0. Who calls it tells the members of other hosts. It can be called from any thread and repeatedly; only the first
 * abort counts. */
void rd_abort(rd_channel* channel, int32_t status, int32_t member, int32_t detail);

/* Returns this member's bucket memory, which all members of its host can access, or null when bucket_bytes is 0
 * or the channel is closed: two areas of bucket_bytes, one behind the other. A call on one span of an area, in place,
 * copies nothing; each member may choose another area for it, but the same offset. A member that has joined contributes
 * zeros from its second area: the first keeps what it holds. The memory stays mapped until rd_release_bucket, even
 * after rd_close, because arrays may still view it. */
void* rd_get_bucket(rd_channel* channel);
void rd_release_bucket(void* bucket);

/* Runs the call and waits at most remaining_s seconds for it. It runs in this thread when the channel is idle,
 * otherwise after the calls that are queued. RD_SYSTEM with end_ns 0 means that no thread could be started for that
 * (EAGAIN): nothing was sent, and the channel stays usable. */
rd_status rd_run(rd_channel* channel, const rd_call* call, rd_result* result, double remaining_s);

/* Called once when a submitted call has ended, in the channel's thread; the rules are at the top of this file. */
typedef void (*rd_callback)(void* context, const rd_result* result);

/* Queues the call. spans, counts, splits and description are copied; the memory of the spans must stay valid until the
 * call has ended. `callback` may be null; unless this function fails it is called exactly once, however the call ends.
 * `work`, which may be null, receives a handle. `result` may be null and is filled only when the call is refused:
 * RD_BAD_CALL, RD_CLOSED, RD_FORKED, or RD_SYSTEM when no thread could be started. Then nothing was queued. */
rd_status rd_submit(rd_channel* channel, const rd_call* call, double remaining_s, rd_callback callback, void* context,
                    rd_work** work, rd_result* result);

/* Count one more user of a submitted call, and one less. The call goes on without any. */
void rd_retain_work(rd_work* work);
void rd_release_work(rd_work* work);

/* Waits for a submitted call; any number of threads may, any number of times. With end_ns 0 the wait has ended and not
 * the call, which goes on if it has not ended meanwhile: after RD_TIMEOUT, after RD_ABORTED with EINTR (a signal
 * handler raised an exception), after RD_BAD_CALL with EDEADLK (in a callback), and after RD_FORKED. */
rd_status rd_wait(rd_work* work, rd_result* result, double remaining_s);

/* Returns 1 when the call has ended, 2 when it has ended with RD_WITHDRAWN, else 0. */
int rd_done(rd_work* work);

/* Adds a callback to a submitted call. Returns 1, or 0 when the call has ended: then the callback is not called. */
int rd_add_callback(rd_work* work, rd_callback callback, void* context);

/* Ends a call that has not started with RD_CANCELLED and returns 1; its memory is not touched from then on. Its
 * callbacks run when the channel's thread comes to it. Returns 0 when the call has started or ended: it cannot be
 * cancelled, only aborted with its channel. The other members do not learn of it: cancel a call on all of them or on
 * none. */
int rd_cancel(rd_work* work);

/* The members have agreed that from now on `id` (below max_announced) stands for this call of this name: its signature,
 * kind, dtype, op, peer, scales, and the number of elements in its spans, whose memory is not used. */
rd_status rd_agree(rd_channel* channel, uint32_t id, const char* name, const rd_call* call);

/* The id stands for nothing any more. Returns 1 if this took back a call that this member had announced: it does not
 * run, and ends with RD_WITHDRAWN. Returns 0 if there is none, or if all members have announced it: then it runs. */
int rd_revoke(rd_channel* channel, uint32_t id);

/* Announces a call that may come in any order on any member, by its name: for native code, such as the kernel of a
 * framework's operation. It runs when all members have announced it, in the same order on every member; calls that can
 * travel together are fused. From then on it may take timeout_s seconds. The name can be announced again when the call
 * has ended. RD_NOT_AGREED: the members have not agreed on this call of this name, or its kind is one where members may
 * give different numbers of elements. Then, and when the call ends with RD_WITHDRAWN, the caller announces the
 * operation through Python, which agrees on it with the other members; they may announce it in either way.
 * call->signature and ->description are not used. The rest is as with rd_submit, but a thread that waits for one
 * announced call executes the others, too, and runs their callbacks, if the rest of its wait is at least nine tenths of
 * what the next one may take: so it may come back late by a tenth. rd_cancel takes the announcement of this member
 * back. */
rd_status rd_announce_named(rd_channel* channel, const char* name, const rd_call* call, double timeout_s,
                            rd_callback callback, void* context, rd_work** work, rd_result* result);

/* Calls that were announced together; counted references, as rd_work. */
typedef struct rd_works rd_works;

typedef struct rd_announcement {
  uint64_t signature;
  uint32_t id;
  uint32_t num_spans;
} rd_announcement;

/* Announces many calls at once: those that the other members have announced run as one, as far as they can be fused.
 * All but their memory is what their ids stand for; `spans` has that of all calls, one after the other. is_announced[i]
 * becomes 1, or 0 if an id does not stand for a call with this signature, or is announced already. With will_wait (not
 * 0) the caller promises to wait for one of them at once, so that no other thread is woken. Whether it keeps the
 * promise or not, a later call without will_wait, and be it with no announcements, sees to it that somebody executes
 * them. */
rd_status rd_announce_many(rd_channel* channel, const rd_announcement* announcements, uint32_t num_announcements,
                           const rd_span* spans, double timeout_s, int will_wait, uint8_t* is_announced,
                           rd_works** works, rd_result* result);
void rd_release_works(rd_works* works);

/* One of the calls, by its index, as a handle of its own. Null if it was not announced. */
rd_work* rd_get_work(rd_works* works, uint32_t index);

/* Returns as rd_done. */
int rd_done_one(rd_works* works, uint32_t index);

/* Waits for one of the calls, as rd_wait. With an index beyond the last it waits for none. Also reports other calls
 * that have succeeded and were not reported before, max_ended at most: num_ended, and of each its index and its result.
 */
rd_status rd_wait_one(rd_works* works, uint32_t index, double remaining_s, rd_result* result, uint32_t* num_ended,
                      uint32_t* ended, rd_result* ended_results, uint32_t max_ended);

/* Announces a call under an id that stands for it, and waits for it as rd_wait does: in one step, so that no other
 * thread is woken. RD_NOT_AGREED: the id does not stand for this call. When the wait has ended and not the call (see
 * rd_wait), `work` receives its handle, otherwise null. */
rd_status rd_run_announced(rd_channel* channel, uint32_t id, const rd_call* call, double timeout_s, double remaining_s,
                           rd_result* result, rd_work** work);

/* An announced call that waits for other members. */
typedef struct rd_announced {
  uint32_t id;
  int64_t announced_ns; /* CLOCK_MONOTONIC */
} rd_announced;

/* Fills `calls` with the calls that this member announced before until_ns and that do not run yet, max_calls at most;
 * returns how many. */
uint32_t rd_get_announced(rd_channel* channel, int64_t until_ns, rd_announced* calls, uint32_t max_calls);

/* Fills `missing` (with space for num_members) with the members that have not announced the id; returns how many. */
uint32_t rd_get_not_announced(rd_channel* channel, uint32_t id, uint32_t* missing);

/* Fills num_members rows with the calls of all members, after rd_run or rd_wait returned RD_MISMATCH in this thread,
 * and in the callback of a call that ended so. */
rd_status rd_get_mismatch(rd_channel* channel, rd_member_call* calls);

/* Fills `current`, and `missing` (with space for num_members) with the members that have not arrived. */
void rd_get_current_call(rd_channel* channel, rd_current_call* current, uint32_t* missing);

/* --- messages between pairs of ranks ---
 *
 * An endpoint is one rank's end of all links to other ranks. Sends and receives meet by context, source and tag, in the
 * order of the sends for each source and tag. A receiver need not be there for a send: messages that nobody has asked
 * for yet are kept at the receiver. The loss of a rank ends what involves it and nothing else.
 *
 * Handles are numbers: one that was closed is refused, and closing ends all calls under way with RD_CLOSED. */
typedef uint64_t rd_endpoint;

#define RD_ANY_SOURCE (-1)

/* Flags of rd_message. */
#define RD_ANY_SIZE 1u   /* a receive that takes any message of its tag into new memory: see rd_take_received */
#define RD_EXPECTED 2u   /* a send whose receive was started before: it needs no window, and is dropped without one */
#define RD_BACKGROUND 4u /* rd_get_current_message does not show it, and a wait for it spins less */
#define RD_REPORT_LOSSES 8u /* a receive from any source that ends with RD_PEER_LOST once for each lost rank */

typedef struct rd_message {
  uint64_t context; /* equal on both sides; messages of different contexts never meet */
  int32_t kind;     /* RD_SEND or RD_RECEIVE */
  int32_t peer;     /* rank of the other side, or RD_ANY_SOURCE */
  uint64_t tag;
  uint64_t signature;    /* must be equal on both sides, or the receive is a mismatch */
  uint64_t window_bytes; /* a send waits while more of its context is on the way to, or kept by, its receiver */
  const char* description;
  void* data;
  uint64_t bytes;
  const void* header; /* of a send for a receive of any size; null for any other message */
  uint64_t header_bytes;
  uint32_t flags;
  uint32_t reserved;
} rd_message;

/* What a receive of any size got, or the sender's description after a mismatch. */
typedef struct rd_received {
  void* block; /* what the caller frees with rd_free_received when it needs the data no longer; or null */
  void* data;
  uint64_t bytes;
  const void* header; /* valid until the next call of rd_take_received in this thread */
  uint64_t header_bytes;
} rd_received;

/* Opens an endpoint without links. num_local is the number of ranks on this host, num_cores that of its cores. */
rd_status rd_open_endpoint(uint32_t rank, uint32_t num_ranks, uint32_t num_local, uint32_t num_cores,
                           rd_endpoint* endpoint);

/* Returns the bytes of the shared memory of a link inside a host; its maker fills it with zeros. */
uint64_t rd_link_bytes(void);

/* Adds a link that this rank opened to send to `peer` (opened_here is 1), or that `peer` opened. `socket` is a TCP
 * socket and `memory` -1 between hosts; inside a host it is a Unix socket, and `memory` the descriptor of
 * rd_link_bytes() bytes. The endpoint owns the socket from here on, even when this function fails; the caller keeps
 * `memory`. */
rd_status rd_add_link(rd_endpoint endpoint, uint32_t peer, int32_t opened_here, int socket, int memory);

/* As rd_run, rd_submit, rd_wait and rd_done. A send has finished when its memory may be used again. rd_result.member is
 * the rank of the other side. A deadline, a signal handler that raises or a lost rank ends this message only. After
 * RD_TIMEOUT, detail is ENOBUFS for a send that waited because its window was full. */
rd_status rd_run_message(rd_endpoint endpoint, const rd_message* message, rd_result* result, double remaining_s);
rd_status rd_submit_message(rd_endpoint endpoint, const rd_message* message, double remaining_s, uint64_t* work);
rd_status rd_wait_message(rd_endpoint endpoint, uint64_t work, rd_result* result, double remaining_s);
int rd_message_done(rd_endpoint endpoint, uint64_t work);

/* Hands over what the last rd_run_message or rd_wait_message of this thread has received, once. */
rd_status rd_take_received(rd_received* received);
void rd_free_received(void* block);

/* Returns memory from where received messages get theirs, or null: what was freed is kept for a while, so that large
 * arrays need no new pages each time. Freed with rd_free_received. */
void* rd_allocate_memory(uint64_t bytes);

/* Ends all messages to and from this rank: it is gone. What it had sent can still be received. */
void rd_lose_peer(rd_endpoint endpoint, uint32_t peer);

/* Ends the receives from any source in a context: `last`, a lost rank, was the last that could have sent something. */
void rd_end_any_source(rd_endpoint endpoint, uint64_t context, uint32_t last);

/* Ends all messages of a context with RD_CLOSED, and drops what arrives for it from now on. */
void rd_end_context(rd_endpoint endpoint, uint64_t context);

/* Waits until all that was sent is with its receivers, and tells them that this rank leaves. Nothing can be sent
 * afterwards. Returns RD_TIMEOUT when that takes longer. */
rd_status rd_leave_endpoint(rd_endpoint endpoint, double remaining_s);
void rd_close_endpoint(rd_endpoint endpoint);

/* Fills in the message of this context that is under way for longest; start_ns is 0 when there is none. `missing` is
 * the rank that it waits for, or RD_ANY_SOURCE. */
void rd_get_current_message(rd_endpoint endpoint, uint64_t context, rd_current_call* current, int32_t* missing);

/* Python's PyGILState_Ensure, PyErr_CheckSignals, PyErr_Fetch and PyGILState_Release. When a signal interrupts a wait
 * of rd_run or rd_wait in the main thread, the library lets Python run its signal handlers, within 50 ms. When one of
 * them raises an exception, rd_run ends its call with RD_ABORTED and EINTR as detail and aborts the channel, also when
 * the call still waited for others before it; rd_wait ends only the wait. rd_run and rd_wait inside of such a handler
 * return RD_BAD_CALL with EDEADLK. */
typedef struct rd_interpreter {
  int (*acquire_gil)(void);
  int (*run_signal_handlers)(void);
  void (*fetch_exception)(void**, void**, void**);
  void (*release_gil)(int);
} rd_interpreter;

void rd_set_interpreter(const rd_interpreter* interpreter);

/* Hands over the exception that a signal handler raised in this thread, once. Returns 0 when there is none. */
int rd_fetch_exception(void* exception[3]);

/* Runs the reduce kernels alone: outputs[*] = postscale * op(prescale * inputs[*]). RD_MEAN divides by num_inputs. */
rd_status rd_reduce(int32_t dtype, int32_t op, double prescale, double postscale, const void* const* inputs,
                    uint64_t num_inputs, void* const* outputs, uint64_t num_outputs, uint64_t count);

/* What an optimizer does with one array of parameters: rd_optimizer_update. Which options and states a rule uses is
 * said in optimizer/optimizer.h. */
typedef enum rd_optimizer_kind {
  RD_SGD = 0,
  RD_ADAM = 1,
  RD_ADAGRAD = 2,
  RD_RMSPROP = 3,
  RD_LAMB = 4
} rd_optimizer_kind;

/* Flags of rd_optimizer_step. */
#define RD_NESTEROV 1u        /* SGD */
#define RD_DECOUPLED_DECAY 2u /* Adam: weight decay is not part of the gradient (AdamW) */
#define RD_CENTERED 4u        /* RMSProp */

typedef struct rd_optimizer_step {
  int32_t kind;  /* rd_optimizer_kind */
  int32_t dtype; /* RD_FLOAT32 or RD_FLOAT64 */
  uint32_t flags;
  uint32_t reserved;
  uint64_t count;
  int64_t step; /* of the optimizer, from 1 */
  const void* values;
  const void* gradient;
  void* out;       /* the new values; may be `values` */
  void* states[3]; /* changed in place; those that the rule has not are null */
  double lr;
  double weight_decay;
  double first;  /* momentum, beta1, or the decay of Adagrad's lr */
  double second; /* dampening, beta2, or alpha */
  double epsilon;
} rd_optimizer_step;

/* Computes one step. Runs in the thread of the caller. Returns RD_BAD_CALL for what is not known. */
rd_status rd_optimizer_update(const rd_optimizer_step* step);

#ifdef __cplusplus
}
#endif

#endif
