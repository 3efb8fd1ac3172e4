// The kernels for CPUs with AVX-512 (F, BW, VL, DQ); compiled with those flags, and empty on other architectures.
#if defined(__x86_64__)
#define RONDE_LEVEL kernels_avx512
#define RONDE_LEVEL_NAME "avx512"
#include "reduce/kernels.inc"
#endif
