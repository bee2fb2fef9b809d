/* The device's C++ as one source: torch's headers take a compiler longer than it. */

#include "device.cpp"
#include "memory_operators.cpp"
#include "module.cpp"
#include "operators.cpp"
#include "process_group.cpp"
