/* XXH3's 128-bit hash without a seed, written from its specification (xxHash fast digest algorithm, version 0.2.0).

   Of a row above 240 bytes almost all the time is spent in `sums`, so there is one for each width of vectors. */

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
enum { STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES };
static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9;
static const uint64_t P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
static const uint64_t MIX_1 = 0x165667919E3779F9, MIX_2 = 0x9FB21C651E98DF25;

typedef struct { uint64_t low, high; } pair;

INLINE uint64_t word(const uint8_t *at) { uint64_t x; memcpy(&x, at, 8); return x; }
INLINE uint32_t half(const uint8_t *at) { uint32_t x; memcpy(&x, at, 4); return x; }
INLINE uint64_t key(int at) { return word(SECRET + at); }

INLINE pair product(uint64_t a, uint64_t b) {
#ifdef __SIZEOF_INT128__
    unsigned __int128 all = (unsigned __int128)a * b;
    return (pair){(uint64_t)all, (uint64_t)(all >> 64)};
#else
    uint64_t al = (uint32_t)a, ah = a >> 32, bl = (uint32_t)b, bh = b >> 32;
    uint64_t middle = ah * bl + (al * bl >> 32), other = al * bh + (uint32_t)middle;
    return (pair){a * b, ah * bh + (middle >> 32) + (other >> 32)};
#endif
}

INLINE uint64_t folded(uint64_t a, uint64_t b) { pair p = product(a, b); return p.low ^ p.high; }
INLINE uint64_t avalanche(uint64_t x) { x ^= x >> 37; x *= MIX_1; return x ^ x >> 32; }
INLINE uint64_t avalanche64(uint64_t x) { x ^= x >> 33; x *= P64_2; x ^= x >> 29; x *= P64_3; return x ^ x >> 32; }

static pair upto16(const uint8_t *in, uint64_t length) {
    if (length > 8) {
        uint64_t first = word(in), last = word(in + length - 8);
        pair p = product(key(32) ^ key(40) ^ first ^ last, P64_1);
        uint64_t other = key(48) ^ key(56) ^ last;
        p.low += (length - 1) << 54;
        p.high += other + (uint32_t)other * (P32_2 - 1);
        p.low ^= __builtin_bswap64(p.high);
        pair q = product(p.low, P64_2);
        return (pair){avalanche(q.low), avalanche(q.high + p.high * P64_2)};
    }
    if (length >= 4) {
        uint64_t both = half(in) | (uint64_t)half(in + length - 4) << 32;
        pair p = product((key(16) ^ key(24)) ^ both, P64_1 + (length << 2));
        p.high += p.low << 1;
        p.low ^= p.high >> 3;
        p.low = (p.low ^ p.low >> 35) * MIX_2;
        return (pair){p.low ^ p.low >> 28, avalanche(p.high)};
    }
    if (length) {
        uint32_t all = in[length - 1] | (uint32_t)length << 8 | (uint32_t)in[0] << 16 | (uint32_t)in[length >> 1] << 24;
        uint32_t back = __builtin_bswap32(all);
        back = back << 13 | back >> 19;
        return (pair){avalanche64((half(SECRET) ^ half(SECRET + 4)) ^ (uint64_t)all),
                      avalanche64((half(SECRET + 8) ^ half(SECRET + 12)) ^ (uint64_t)back)};
    }
    return (pair){avalanche64(key(64) ^ key(72)), avalanche64(key(80) ^ key(88))};
}

INLINE void mix(pair *sum, const uint8_t *a, const uint8_t *b, int at) {
    sum->low += folded(word(a) ^ key(at), word(a + 8) ^ key(at + 8));
    sum->high += folded(word(b) ^ key(at + 16), word(b + 8) ^ key(at + 24));
    sum->low ^= word(b) + word(b + 8);
    sum->high ^= word(a) + word(a + 8);
}

static pair upto240(const uint8_t *in, uint64_t length) {
    pair sum = {length * P64_1, 0};
    if (length <= 128) {
        for (int i = (int)((length - 1) >> 5); i >= 0; i--) mix(&sum, in + 16 * i, in + length - 16 * i - 16, 32 * i);
    } else {
        for (int i = 0; i < 4; i++) mix(&sum, in + 32 * i, in + 32 * i + 16, 32 * i);
        sum = (pair){avalanche(sum.low), avalanche(sum.high)};
        for (int i = 4; i < (int)(length >> 5); i++) mix(&sum, in + 32 * i, in + 32 * i + 16, 32 * (i - 4) + 3);
        mix(&sum, in + length - 16, in + length - 32, 103);
    }
    return (pair){avalanche(sum.low + sum.high), -avalanche(sum.low * P64_1 + sum.high * P64_4 + length * P64_2)};
}

/* The 8 accumulators of a row above 240 bytes. STRIPE_SUM adds the stripe at `from` with the secret at `by`, SCRAMBLE
   mixes the accumulators after each block but the last. */
#define SUMS(NAME, TARGET, ACCUMULATORS, STRIPE_SUM, SCRAMBLE)                                                         \
    TARGET static void NAME(uint64_t sums[8], const uint8_t *in, uint64_t length) {                                    \
        ACCUMULATORS acc;                                                                                              \
        memcpy(&acc, sums, sizeof acc);                                                                                \
        for (; length > BLOCK; in += BLOCK, length -= BLOCK) {                                                         \
            UNROLLED                                                                                                   \
            for (int n = 0; n < STRIPES; n++) STRIPE_SUM(acc, in + n * STRIPE, SECRET + 8 * n);                        \
            SCRAMBLE(acc);                                                                                             \
        }                                                                                                              \
        for (uint64_t n = 0; n < (length - 1) / STRIPE; n++) STRIPE_SUM(acc, in + n * STRIPE, SECRET + 8 * n);         \
        STRIPE_SUM(acc, in + length - STRIPE, SECRET + 121);                                                           \
        memcpy(sums, &acc, sizeof acc);                                                                                \
    }

typedef struct { uint64_t word[8]; } words;

INLINE void stripe_sum(words *acc, const uint8_t *from, const uint8_t *by) {
    UNROLLED
    for (int i = 0; i < 8; i++) {
        uint64_t value = word(from + 8 * i) ^ word(by + 8 * i);
        acc->word[i] += word(from + 8 * (i ^ 1)) + (uint64_t)(uint32_t)value * (value >> 32);
    }
}

INLINE void scramble(words *acc) {
    for (int i = 0; i < 8; i++) acc->word[i] = (acc->word[i] ^ acc->word[i] >> 47 ^ key(128 + 8 * i)) * P32_1;
}

#define WORDS_SUM(acc, from, by) stripe_sum(&acc, from, by)
#define WORDS_SCRAMBLE(acc) scramble(&acc)
SUMS(sums_portable, , words, WORDS_SUM, WORDS_SCRAMBLE)

#ifdef WIDE
/* P: prefix of the functions for one width; `at`: the vectors of a stripe. A product by a prime of 32 bits is that of
   both halves. */
#define WIDE_SUM(P, S, VECTOR, COUNT, from, by)                                                                        \
    for (int i = 0; i < COUNT; i++) {                                                                                  \
        VECTOR data = P##_loadu_##S((const VECTOR *)(from) + i);                                                       \
        VECTOR value = P##_xor_##S(data, P##_loadu_##S((const VECTOR *)(by) + i));                                     \
        VECTOR all = P##_mul_epu32(value, P##_srli_epi64(value, 32));                                                  \
        acc.at[i] = P##_add_epi64(acc.at[i], P##_add_epi64(all, P##_shuffle_epi32(data, 0x4E)));                       \
    }
#define WIDE_SCRAMBLE(P, S, VECTOR, COUNT)                                                                             \
    for (int i = 0; i < COUNT; i++) {                                                                                  \
        VECTOR prime = P##_set1_epi32((int)P32_1), x = acc.at[i];                                                      \
        x = P##_xor_##S(P##_xor_##S(x, P##_srli_epi64(x, 47)), P##_loadu_##S((const VECTOR *)(SECRET + 128) + i));     \
        VECTOR high = P##_slli_epi64(P##_mul_epu32(P##_srli_epi64(x, 32), prime), 32);                                 \
        acc.at[i] = P##_add_epi64(P##_mul_epu32(x, prime), high);                                                      \
    }
typedef struct { __m256i at[2]; } halves;
typedef struct { __m512i at[1]; } wholes;
#define HALVES_SUM(acc, from, by) WIDE_SUM(_mm256, si256, __m256i, 2, from, by)
#define HALVES_SCRAMBLE(acc) WIDE_SCRAMBLE(_mm256, si256, __m256i, 2)
SUMS(sums_avx2, __attribute__((target("avx2"))), halves, HALVES_SUM, HALVES_SCRAMBLE)
#define WHOLES_SUM(acc, from, by) WIDE_SUM(_mm512, si512, __m512i, 1, from, by)
#define WHOLES_SCRAMBLE(acc) WIDE_SCRAMBLE(_mm512, si512, __m512i, 1)
SUMS(sums_avx512, __attribute__((target("avx512f"))), wholes, WHOLES_SUM, WHOLES_SCRAMBLE)
#endif

static uint64_t merged(const uint64_t sums[8], uint64_t start, int at) {
    for (int i = 0; i < 8; i += 2) start += folded(sums[i] ^ key(at + 8 * i), sums[i + 1] ^ key(at + 8 * i + 8));
    return avalanche(start);
}

/* Write the digest, 16 bytes in canonical form, of each of the rows. `vectors`: the most bits of a vector; see below. */
EXPORT void ts_row_digests(const uint8_t *rows, uint64_t count, uint64_t length, uint32_t vectors, uint8_t *digests) {
    void (*summed)(uint64_t *, const uint8_t *, uint64_t) = sums_portable;
#ifdef WIDE
    if (vectors >= 256 && __builtin_cpu_supports("avx2")) summed = sums_avx2;
    if (vectors >= 512 && __builtin_cpu_supports("avx512f")) summed = sums_avx512;
#endif
    for (uint64_t row = 0; row < count; row++, rows += length, digests += 16) {
        pair found;
        if (length <= 16) found = upto16(rows, length);
        else if (length <= 240) found = upto240(rows, length);
        else {
            uint64_t sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
            summed(sums, rows, length);
            found = (pair){merged(sums, length * P64_1, 11), merged(sums, ~(length * P64_2), 117)};
        }
        uint64_t big[2] = {__builtin_bswap64(found.high), __builtin_bswap64(found.low)};
        memcpy(digests, big, 16);
    }
}
