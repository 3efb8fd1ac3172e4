// A signal came while a thread slept inside the library. Python runs its signal handlers only when asked, and a Ctrl-C
// must end a wait that would last for hours: so ask, through the functions the caller gave (no Python header is needed
// for that).
#pragma once

#include "ronde.h"

namespace ronde {

void set_interpreter(const rd_interpreter* interpreter);  // null: nobody to ask

// Lets signal handlers run. True when one of them raised: the wait must end.
bool interrupted();

// What it raised in this thread, once.
bool take_raised(void* raised[3]);

}  // namespace ronde
