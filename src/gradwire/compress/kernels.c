/* The codecs' inner loops, one pass over memory each; kernels.py compiles them on first use. The eager code in quantize.py
 * and cast.py is the definition: the same operations in the same order, so the same bits (no fast-math, no contraction).
 *
 * A quantised block is 256 numbers: a float32 scale, then 128 bytes (4 bits: number i low, number i + 128 high) or 256
 * bytes (8 bits). What a row lacks of its last block counts as zero. residual and left (what the message lost) may be NULL.
 */
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define HALF 128
#define LARGEST 3e38f        /* so that a decoded number cannot overflow */
#define SMALLEST 1e-36f      /* below it 1 / scale would overflow: the block is sent as zeros */
#define ROUND 12582912.0f    /* 1.5 * 2^23: adding it rounds to a whole number, half to even, and leaves it in the low bits */

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Scale of a block; its reciprocal in *inverse. Magnitudes are compared as integers: that order is the same, takes NaN for
 * the largest as torch does, and may be vectorised. */
static float scale_of(const float *block, float levels, float *inverse) {
    uint32_t top = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = bits_of(block[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    float absmax = float_of(top);
    if (absmax < SMALLEST) {
        *inverse = 0.0f;
        return 0.0f;
    }
    float scale = (absmax > LARGEST ? LARGEST : absmax) / levels;
    *inverse = 1.0f / scale;
    return scale;
}

/* block: 256 numbers, replaced by their whole multiples of scale; codes: those multiples plus offset. */
static void round_block(float *restrict block, uint8_t *restrict codes, float inverse, float levels, int offset) {
    for (int i = 0; i < BLOCK; i++) {
        float x = block[i] * inverse;
        x = x > levels ? levels : x;
        x = x < -levels ? -levels : x;
        float shifted = x + ROUND;
        codes[i] = (uint8_t)(bits_of(shifted) + (uint32_t)offset);
        block[i] = shifted - ROUND;
    }
}

static void load(float *restrict block, const float *restrict values, const float *restrict residual, int count) {
    if (residual)
        for (int i = 0; i < count; i++) block[i] = values[i] + residual[i];
    else
        memcpy(block, values, sizeof(float) * (size_t)count);
    for (int i = count; i < BLOCK; i++) block[i] = 0.0f;
}

void gw_quantize(const float *values, const float *residual, uint8_t *messages, float *left, int64_t rows, int64_t numel,
                 int32_t bits) {
    const float levels = bits == 4 ? 7.0f : 127.0f;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < numel; start += BLOCK) {
            const int count = numel - start < BLOCK ? (int)(numel - start) : BLOCK;
            const int64_t at = row * numel + start;
            float wanted[BLOCK], block[BLOCK];
            uint8_t codes[BLOCK];
            load(wanted, values + at, residual ? residual + at : 0, count);
            memcpy(block, wanted, sizeof block);
            float inverse, scale = scale_of(wanted, levels, &inverse);
            round_block(block, codes, inverse, levels, bits == 4 ? 8 : 0);
            memcpy(messages, &scale, 4);
            messages += 4;
            if (bits == 4) {
                for (int i = 0; i < HALF; i++) messages[i] = (uint8_t)(codes[i] | codes[i + HALF] << 4);
                messages += HALF;
            } else {
                memcpy(messages, codes, BLOCK);
                messages += BLOCK;
            }
            if (left)
                for (int i = 0; i < count; i++) left[at + i] = wanted[i] - block[i] * scale;
        }
}

static int64_t block_bytes(int32_t bits) { return 4 + (bits == 4 ? HALF : BLOCK); }

static void decode_block(const uint8_t *restrict message, float *restrict block, int32_t bits) {
    float scale;
    memcpy(&scale, message, 4);
    message += 4;
    if (bits == 4) {
        for (int i = 0; i < HALF; i++) block[i] = (float)((message[i] & 15) - 8) * scale;
        for (int i = 0; i < HALF; i++) block[i + HALF] = (float)((message[i] >> 4) - 8) * scale;
    } else
        for (int i = 0; i < BLOCK; i++) block[i] = (float)(int8_t)message[i] * scale;
}

void gw_dequantize(const uint8_t *messages, float *out, int64_t rows, int64_t numel, int32_t bits) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < numel; start += BLOCK) {
            const int count = numel - start < BLOCK ? (int)(numel - start) : BLOCK;
            float whole[BLOCK], *block = count == BLOCK ? out : whole;
            decode_block(messages, block, bits);
            messages += block_bytes(bits);
            if (count < BLOCK) memcpy(out, whole, sizeof(float) * (size_t)count);
            out += count;
        }
}

/* The rows' sum, in row order: a block at a time, so that nothing but the messages is read from memory. */
void gw_dequantize_sum(const uint8_t *messages, float *out, int64_t rows, int64_t numel, int32_t bits) {
    const int64_t stride = (numel + BLOCK - 1) / BLOCK * block_bytes(bits);
    for (int64_t start = 0; start < numel; start += BLOCK) {
        const int count = numel - start < BLOCK ? (int)(numel - start) : BLOCK;
        float sum[BLOCK], block[BLOCK];
        decode_block(messages, sum, bits);
        for (int64_t row = 1; row < rows; row++) {
            decode_block(messages + row * stride, block, bits);
            for (int i = 0; i < BLOCK; i++) sum[i] += block[i];
        }
        memcpy(out + start, sum, sizeof(float) * (size_t)count);
        messages += block_bytes(bits);
    }
}

#define BFLOAT16_MAX 0x1.fep127f

static uint16_t bfloat16_of(float value) {
    value = value > BFLOAT16_MAX ? BFLOAT16_MAX : value;
    value = value < -BFLOAT16_MAX ? -BFLOAT16_MAX : value;
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

void gw_to_bfloat16(const float *restrict values, const float *restrict residual, uint16_t *restrict messages,
                    float *restrict left, int64_t numel) {
    if (!left)
        for (int64_t i = 0; i < numel; i++) messages[i] = bfloat16_of(values[i]);
    else
        for (int64_t i = 0; i < numel; i++) {
            float wanted = values[i] + residual[i];
            messages[i] = bfloat16_of(wanted);
            left[i] = wanted - float_of((uint32_t)messages[i] << 16);
        }
}

/* Whether all of it is finite: no magnitude has all exponent bits. */
int32_t gw_finite(const float *values, int64_t numel) {
    uint32_t top = 0;
    for (int64_t i = 0; i < numel; i++) {
        uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    return top < 0x7f800000u;
}

/* out = scale * values; whether all of it is finite. Written and looked at while it is in a register. */
int32_t gw_scale(const float *restrict values, float *restrict out, float scale, int64_t numel) {
    uint32_t top = 0;
    for (int64_t i = 0; i < numel; i++) {
        float value = values[i] * scale;
        uint32_t bits = bits_of(value) & 0x7fffffffu;
        out[i] = value;
        top = bits > top ? bits : top;
    }
    return top < 0x7f800000u;
}

/* out = left - right; whether all of it is finite. */
int32_t gw_subtract(const float *restrict left, const float *restrict right, float *restrict out, int64_t numel) {
    uint32_t top = 0;
    for (int64_t i = 0; i < numel; i++) {
        float value = left[i] - right[i];
        uint32_t bits = bits_of(value) & 0x7fffffffu;
        out[i] = value;
        top = bits > top ? bits : top;
    }
    return top < 0x7f800000u;
}
