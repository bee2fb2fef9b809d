// One translation unit: torch's headers take most of the time.
#include "dtypes.cpp"
#include "fused.cpp"
#include "module.cpp"
#include "operators.cpp"
#include "tasks.cpp"
