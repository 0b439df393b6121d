#ifndef CFEDAVG_H
#define CFEDAVG_H
#include <stddef.h>
#include <stdint.h>
#if defined(_WIN32)
#define CFEDAVG_API __declspec(dllexport)
#else
#define CFEDAVG_API __attribute__((visibility("default")))
#endif
enum { CFEDAVG_FP32, CFEDAVG_FP64 };
enum { CFEDAVG_OK, CFEDAVG_NO_MEMORY, CFEDAVG_BAD_ARGUMENT, CFEDAVG_NOT_FINITE };
int cfedavg_find_largest(const void *values, int kind, uint64_t d, uint64_t k, int64_t *indices);
uint64_t cfedavg_bits53(int64_t key, uint64_t coordinate);
int64_t cfedavg_key(uint64_t seed, uint64_t round, uint64_t client, uint64_t purpose);
double cfedavg_norm2(const float *values, uint64_t n);
uint16_t cfedavg_to_bf16(float value);
float cfedavg_from_bf16(uint16_t bits);
void cfedavg_to_levels(const float *values, uint64_t n, uint32_t block, int top, int8_t *levels, float *scales);
#endif
