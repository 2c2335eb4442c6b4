/* Conversions of float16 and bfloat16, rounded to the nearest even: without branches, so that loops of them become
 * vectors, and without arithmetic on subnormal numbers, which is slow. */
#ifndef DMESH_FP16_H
#define DMESH_FP16_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of_f32(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}

static inline float f32_of_bits(uint32_t bits) {
    float a;
    memcpy(&a, &bits, sizeof a);
    return a;
}

/* As `condition ? a : b`, but always calculates both: else compilers jump around floating-point arithmetic, for fear
 * that it traps, and make no vectors. */
static inline uint32_t pick(int condition, uint32_t a, uint32_t b) {
    const uint32_t mask = -(uint32_t)condition;
    return (a & mask) | (b & ~mask);
}

static inline float f32_of_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    const uint32_t normal = (rest << 13) + rebias;
    /* Infinity and NaN have the largest exponent in both; NaN keeps its payload. */
    const uint32_t special = normal + rebias;
    const uint32_t subnormal = bits_of_f32((float)(int32_t)rest * 0x1p-24f);
    return f32_of_bits(sign | pick(rest < 0x0400, subnormal, pick(rest >= 0x7c00, special, normal)));
}

static inline uint16_t f16_of_f32(float a) {
    const uint32_t bits = bits_of_f32(a);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;
    const uint32_t rebias = (uint32_t)(127 - 15) << 23;
    /* Half of the last place, less one if what stays is even; a carry goes into the exponent, and on to infinity. */
    const uint32_t rounded = (rest - rebias + 0xfff + (rest >> 13 & 1)) >> 13;
    /* A half's subnormal locations are the last ones of 0.5: the addition rounds. */
    const uint32_t subnormal = bits_of_f32(f32_of_bits(rest) + 0.5f) - bits_of_f32(0.5f);
    const uint32_t payload = rest >> 13 & 0x3ff;
    /* A NaN whose payload is lost would be an infinity. */
    const uint32_t nan = 0x7c00 | payload | (payload == 0);
    uint32_t half = pick(rest < (uint32_t)(127 - 14) << 23, subnormal, rounded);
    half = pick(rest >= (uint32_t)(127 + 16) << 23, 0x7c00, half);
    half = pick(rest > 0x7f800000, nan, half);
    return (uint16_t)(sign | half);
}

static inline float f32_of_bf16(uint16_t half) { return f32_of_bits((uint32_t)half << 16); }

/* NaN loses its payload and keeps its sign, as in ml_dtypes. */
static inline uint16_t bf16_of_f32(float a) {
    const uint32_t bits = bits_of_f32(a);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)pick((bits & 0x7fffffff) > 0x7f800000, nan, rounded);
}

/* float16 is compared without conversion. A number whose order is that of the half: both zeros are equal. */
static inline int16_t f16_order(uint16_t half) {
    const int16_t rest = (int16_t)(half & 0x7fff);
    return (int16_t)(half & 0x8000 ? -rest : rest);
}

static inline int f16_is_nan(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

static inline uint16_t pick_f16(int condition, uint16_t a, uint16_t b) {
    const uint16_t mask = (uint16_t)-condition;
    return (uint16_t)((a & mask) | (b & (uint16_t)~mask));
}

/* The first NaN, or else the first one of two that are equal. */
static inline uint16_t smaller_f16(uint16_t a, uint16_t b) {
    const int number = !f16_is_nan(b), first = f16_order(a) <= f16_order(b);
    return pick_f16(f16_is_nan(a) | (number & first), a, b);
}

static inline uint16_t larger_f16(uint16_t a, uint16_t b) {
    const int number = !f16_is_nan(b), first = f16_order(a) >= f16_order(b);
    return pick_f16(f16_is_nan(a) | (number & first), a, b);
}

#endif
