/* The device in one source: torch headers compile slower than all of it. */

#include "device.cpp"
#include "memory_operators.cpp"
#include "module.cpp"
#include "operators.cpp"
#include "process_group.cpp"
