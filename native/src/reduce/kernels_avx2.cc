// The inner loops for CPUs with AVX2 and F16C; compiled with its flags, empty elsewhere.
#if defined(__x86_64__)
#define RONDE_LEVEL kernels_avx2
#define RONDE_LEVEL_NAME "avx2"
#include "reduce/kernels.inc"
#endif
