// Kernels that can be called with their arguments in slots of eight bytes, one after the other,
// and so be written down and called again by `replay` without going through Python.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

// An argument lies at the beginning of its slot, whatever its size.
template <class T>
T in_slot(const int64_t& slot) {
    static_assert(sizeof(T) <= sizeof slot);
    T value;
    std::memcpy(&value, &slot, sizeof value);
    return value;
}

template <class... Arguments, size_t... I>
void call_slots(void (*kernel)(Arguments...), const int64_t* slots, std::index_sequence<I...>) {
    kernel(in_slot<Arguments>(slots[I])...);
}

template <class... Arguments>
void call_slots(void (*kernel)(Arguments...), const int64_t* slots) {
    call_slots(kernel, slots, std::index_sequence_for<Arguments...>{});
}

}  // namespace

#define RECORDABLE(kernel) \
    extern "C" void kernel##_slots(const int64_t* slots) { call_slots(kernel, slots); }
