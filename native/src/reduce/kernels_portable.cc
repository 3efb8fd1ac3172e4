// The kernels for any CPU.
#define RONDE_LEVEL kernels_portable
#define RONDE_LEVEL_NAME "portable"
#include "reduce/kernels.inc"
