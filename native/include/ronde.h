/* The whole surface of ronde's data plane: plain C, called from Python through ctypes.
 *
 * A *channel* is one total order of collectives among its *members*. The caller opens every socket and
 * shared-memory file, authenticates it, and hands over descriptors: nothing here resolves a name, reads
 * a setting or looks at the environment. No exception crosses this border; every function that can fail
 * returns an rd_status.
 */
#ifndef RONDE_H
#define RONDE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RD_ABI 1    /* changes when a struct or a function of this file does */
#define RD_TEXT 128 /* bytes of a call's description, with its closing zero */
#define RD_MAX_MEMBERS 1024

typedef enum rd_status {
  RD_OK = 0,
  RD_BAD_CALL = 1,  /* the caller's mistake: nothing was sent, the channel goes on */
  RD_MISMATCH = 2,  /* members asked for different things: no data moved, the channel goes on */
  RD_TIMEOUT = 3,   /* the deadline passed; the channel is aborted for every member */
  RD_ABORTED = 4,   /* rd_abort was called here or by another member */
  RD_PEER_LOST = 5, /* a member's socket closed; rd_result.member says whose, .detail is errno or 0 */
  RD_SYSTEM = 6,    /* the operating system refused; rd_result.detail is errno */
  RD_CLOSED = 7     /* the channel was closed while the call waited */
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
  RD_NUM_OPS = 6
} rd_op;

typedef enum rd_kind {
  RD_BARRIER = 0,
  RD_ALLREDUCE = 1,
  RD_ALLGATHER = 2,
  RD_BROADCAST = 3,
  RD_REDUCE_SCATTER = 4,
  RD_ALLTOALL = 5,
  RD_SEND = 6,
  RD_RECEIVE = 7,
  RD_JOIN = 8, /* take part in others' allreduces with zeros until every member has joined */
  RD_NUM_KINDS = 9
} rd_kind;

typedef enum rd_algorithm {
  RD_CHOOSE = 0, /* by the table in choose.cc */
  RD_DIRECT = 1, /* shared memory, everybody on one host */
  RD_DOUBLING = 2,
  RD_RING = 3,
  RD_TWO_LEVEL = 4,
  RD_TREE = 5,
  RD_PAIRWISE = 6
} rd_algorithm;

/* The members agreed on this call already (negotiated, or planned): skip the exchange of headers between hosts. */
#define RD_TRUSTED 1u

typedef struct rd_channel rd_channel;

/* Who the members are and how they reach each other. Equal on every member but for `me`. */
typedef struct rd_layout {
  uint32_t abi; /* RD_ABI */
  uint32_t num_members;
  uint32_t me;
  uint32_t num_cores;     /* of this host: decides how long a wait may spin */
  const uint32_t* places; /* per member: index of its host; members of one place share memory */
  uint64_t slot_bytes;    /* staging room per member and slot */
  uint64_t chunk_bytes;   /* how much of a slot one step of the shared-memory algorithm uses */
  uint64_t bucket_bytes;  /* room for planned buckets per member; 0 for none */
} rd_layout;

/* One member's piece of a call. A call with several parts works on their concatenation. */
typedef struct rd_part {
  const void* in;
  void* out;
  uint64_t count;
} rd_part;

typedef struct rd_call {
  int32_t kind;
  int32_t dtype;
  int32_t op;
  int32_t algorithm;
  uint32_t flags;
  int32_t peer; /* root of a broadcast, other side of a send or receive */
  double prescale;
  double postscale;
  uint64_t signature; /* must be equal on all members */
  const char* text;   /* what this member asks for, in words, for the error that names a difference */
  const rd_part* parts;
  uint64_t num_parts;
  /* Elements per member. allgather: what each gives. reduce_scatter: what each gets.
   * alltoall: what I get from each. Otherwise null. */
  const uint64_t* counts;
  const uint64_t* splits; /* alltoall: elements I give to each member */
} rd_call;

typedef struct rd_result {
  int32_t status;
  int32_t member;    /* whom the error is about, or -1 */
  int32_t detail;    /* errno, or 0 */
  int32_t algorithm; /* which one ran */
  int64_t start_ns;  /* CLOCK_MONOTONIC: taken up */
  int64_t ready_ns;  /* every member had arrived */
  int64_t end_ns;    /* finished here */
} rd_result;

/* What each member asked for in the call that ended in RD_MISMATCH. */
typedef struct rd_asked {
  uint64_t signature;
  char text[RD_TEXT];
} rd_asked;

/* What a channel is doing right now, for the stall watch. */
typedef struct rd_status_now {
  uint64_t calls;   /* collectives begun so far; all members count alike */
  int64_t since_ns; /* start of the call under way, 0 when idle */
  int32_t kind;
  int32_t num_missing; /* members that have not arrived */
  char text[RD_TEXT];
} rd_status_now;

uint32_t rd_abi(void);
const char* rd_version(void);
const char* rd_cpu(void); /* the reduce kernels in use: "portable", "avx2", "avx512" */

/* Bytes the shared memory of my place needs; the lowest member of the place makes it (zero-filled). */
uint64_t rd_segment_bytes(const rd_layout* layout);

/* `segment` is the descriptor of that memory (-1 when I am alone at my place). `sockets` holds
 * num_members * num_sockets descriptors, row by row, -1 towards members of my own place and myself;
 * `direct` holds one per member for send and receive, or is null. The channel owns the sockets from
 * here on, even when this fails; the segment's descriptor stays the caller's. */
rd_status rd_open(const rd_layout* layout, int segment, const int* sockets, uint32_t num_sockets, const int* direct,
                  rd_channel** channel);

/* Ends all waits (RD_CLOSED), joins the threads, unmaps, closes the sockets. Null is fine. */
void rd_close(rd_channel* channel);

/* Ends all waits of all members of my place at once, and of the others through their closed sockets.
 * `member` is who is to blame, or -1. Callable from any thread, any number of times; the first wins. */
void rd_abort(rd_channel* channel, int32_t member);

/* My bucket memory (topology.bucket_bytes of it), seen by all members of my place. Null without one. It stays where it
 * is, even after rd_close, until rd_release: arrays that look into it may outlive the channel. */
void* rd_bucket(rd_channel* channel);
void rd_release(void* bucket);

/* Runs the call, in this thread when the channel is idle, and waits at most remaining_s seconds. */
rd_status rd_run(rd_channel* channel, const rd_call* call, rd_result* result, double remaining_s);

/* Queues the call behind those before it. All that the call points to but parts, counts, splits and text
 * (which are copied) must stay until it is waited for. */
rd_status rd_submit(rd_channel* channel, const rd_call* call, double remaining_s, uint64_t* ticket);

/* Waits for a submitted call and forgets it. RD_TIMEOUT here leaves the call under way. */
rd_status rd_wait(rd_channel* channel, uint64_t ticket, rd_result* result, double remaining_s);

/* 1 when the call has finished, 0 when not, -1 when there is no such ticket. */
int rd_done(rd_channel* channel, uint64_t ticket);

/* What all members asked for in this thread's last call that ended in RD_MISMATCH; `asked` has num_members rows.
 * For a submitted call: the last rd_wait of this thread that said RD_MISMATCH. */
rd_status rd_asked_by(rd_channel* channel, rd_asked* asked);

/* `missing` has room for num_members and receives the members that have not arrived. */
void rd_look(rd_channel* channel, rd_status_now* now, uint32_t* missing);

/* Python's PyGILState_Ensure, PyErr_CheckSignals, PyErr_Fetch and PyGILState_Release. When a signal interrupts a wait
 * of rd_run in the main thread, the library lets Python run its signal handlers. When one of them raises an exception,
 * the call ends with RD_ABORTED and EINTR as detail, and the channel is aborted. */
typedef struct rd_interpreter {
  int (*acquire_gil)(void);
  int (*run_signal_handlers)(void);
  void (*fetch_exception)(void**, void**, void**);
  void (*release_gil)(int);
} rd_interpreter;

void rd_set_interpreter(const rd_interpreter* interpreter);

/* Hands over the exception that a signal handler raised in this thread, once. Returns 0 when there is none. */
int rd_take_raised(void* exception[3]);

/* The reduce kernels by themselves: outs[*] = postscale * op(prescale * ins[*]); RD_MEAN divides by num_ins.
 * Used by the in-process backend and by tests. */
rd_status rd_reduce(int32_t dtype, int32_t op, double prescale, double postscale, const void* const* ins,
                    uint64_t num_ins, void* const* outs, uint64_t num_outs, uint64_t count);

#ifdef __cplusplus
}
#endif

#endif
