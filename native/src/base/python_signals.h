// Lets Python run its signal handlers while a thread waits inside the library. Python runs them only when asked, and a
// Ctrl-C must end a wait that could last for hours. The functions of the interpreter come from the caller
// (rd_interpreter), so no Python header is needed.
#pragma once

#include "ronde.h"

namespace ronde {

// Called once when the library is loaded. Without an interpreter (null) no handlers run.
void set_interpreter(const rd_interpreter* interpreter);

// Called when a signal interrupted a wait. Returns true when a handler raised an exception: the wait must end.
bool run_signal_handlers();

// Hands over the exception that a handler raised in this thread, once. Returns false when there is none.
bool fetch_exception(void* exception[3]);

}  // namespace ronde
