// Makes recorded calls again, in order; see recording.py for who writes them down.

#include "recording.h"

// A call is `width` slots: the kernel's `..._slots` function, which of its arguments is the number
// of rows (-1: none), the arguments. `rows` takes that argument's place in every call.
extern "C" void replay(int64_t* calls, int64_t count, int64_t width, int64_t rows) {
    for (int64_t* call = calls; call < calls + count * width; call += width) {
        int64_t* arguments = call + 2;
        if (call[1] >= 0) arguments[call[1]] = rows;
        in_slot<void (*)(const int64_t*)>(call[0])(arguments);
    }
}
