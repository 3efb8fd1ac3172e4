// A small test harness. A test program is one file that includes this header, which defines main().
//
//   TEST(a_sum_wraps) { CHECK_EQ(sum(200, 100), 44); }
//
// The program runs all tests, or those whose name contains its argument. Checks may be made from several threads. A
// failed check prints where it is and what failed, and the test goes on.
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// Counts a failure, and prints it unless the same test has printed many already.
inline void fail(const char* file, int line, const std::string& what) {
  constexpr int kMostPrinted = 20;
  const int count = ++failures();
  if (count <= kMostPrinted) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  if (count == kMostPrinted) std::fprintf(stderr, "… more failures of this test are not shown\n");
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  out.precision(17);
  // The unary plus shows a char as a number.
  if constexpr (std::is_arithmetic_v<T>) {
    out << +value;
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << value;
  }
  return out.str();
}

template <typename A, typename B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
}

// Runs one test and returns whether it passed.
inline bool run(const Test& test) {
  failures() = 0;
  try {
    test.run();
  } catch (const std::exception& error) {
    fail(test.name, 0, std::string("threw ") + error.what());
  }
  std::printf("%s %s\n", failures() == 0 ? "ok    " : "FAILED", test.name);
  std::fflush(stdout);
  return failures() == 0;
}

inline int run_all(const char* wanted) {
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    ++(run(test) ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                           \
  static void name();                                        \
  static const check::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) check::fail(__FILE__, __LINE__, "not " #condition); \
  } while (false)

#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, (a), (b))

int main(int argc, char** argv) { return check::run_all(argc > 1 ? argv[1] : ""); }
