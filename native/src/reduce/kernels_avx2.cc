// The kernels for CPUs with AVX2 and F16C; compiled with those flags, and empty on other architectures.
#if defined(__x86_64__)
#define RONDE_LEVEL kernels_avx2
#define RONDE_LEVEL_NAME "avx2"
#include "reduce/kernels.inc"
#endif
