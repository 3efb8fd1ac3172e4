// The queue in which a framework's thread leaves jobs for a thread of Python.
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/job_queue.h"

namespace {

struct NamedJob {
  std::string name;
};

std::vector<std::string> ended;

void end_untaken(NamedJob* job) { ended.push_back(job->name); }

using Queue = ronde_kernels::JobQueue<NamedJob>;

void put(Queue& queue, const char* name, int64_t priority = 0) {
  queue.put(std::make_unique<NamedJob>(NamedJob{name}), priority);
}

std::string take(Queue& queue) {
  std::unique_ptr<NamedJob> job(queue.take(10.0));
  return job ? job->name : "";
}

}  // namespace

TEST(jobs_of_a_higher_priority_are_taken_first_and_equal_ones_in_order) {
  Queue queue(end_untaken);
  put(queue, "first");
  put(queue, "urgent", 5);
  put(queue, "last", -3);
  put(queue, "second");
  put(queue, "urgent too", 5);
  for (const char* name : {"urgent", "urgent too", "first", "second", "last"}) CHECK(take(queue) == name);
  CHECK(queue.take(0.0) == nullptr);
}

TEST(who_waits_gets_a_job_that_is_put_later) {
  Queue queue(end_untaken);
  std::thread other([&queue] { put(queue, "late"); });
  CHECK(take(queue) == "late");
  other.join();
}

TEST(a_stopped_queue_ends_what_nobody_has_taken_and_what_comes_later) {
  ended.clear();
  Queue queue(end_untaken);
  put(queue, "waiting");
  CHECK(!queue.is_stopped());
  queue.stop();
  put(queue, "too late");
  CHECK(queue.is_stopped());
  CHECK(queue.take(10.0) == nullptr);
  CHECK(ended == (std::vector<std::string>{"waiting", "too late"}));
}
