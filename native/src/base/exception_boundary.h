// The edge of the C API: no exception leaves it.
#pragma once

#include <cerrno>
#include <exception>
#include <new>

#include "base/error.h"

namespace ronde {

inline rd_status report(const CallError& error, rd_result* result) {
  if (result != nullptr) *result = rd_result{error.status, error.member, error.detail, 0, 0, 0, 0, RD_NO_SEQUENCE, 0};
  return error.status;
}

// Calls the function and returns its status; reports what it throws.
template <class Function>
rd_status guarded(rd_result* result, Function function) {
  try {
    return function();
  } catch (const CallError& error) {
    return report(error, result);
  } catch (const std::bad_alloc&) {
    return report(CallError{RD_SYSTEM, -1, ENOMEM}, result);
  } catch (const std::exception&) {
    return report(CallError{RD_SYSTEM}, result);
  }
}

}  // namespace ronde
