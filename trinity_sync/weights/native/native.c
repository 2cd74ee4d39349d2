/* Row digests and the gap codes of deltas. Python calls this library through ctypes (weights/native/__init__.py), without the
   interpreter's lock. Nothing here allocates, and nothing outlives a call. */

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "weights are little-endian; other machines use numpy"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && !defined(PORTABLE)
#define WIDE
#include <immintrin.h>
#endif
/* Each function twice, for old and new processors: the loader chooses, where it can. */
#if defined(WIDE) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#define UNROLLED _Pragma("GCC unroll 8")

#include "digests.h"

enum { CLASSES = 16, GROUP = 128, FLUSH = 31, BF16 = 7, BROKEN = 1 };
static const uint64_t NEVER = 1ull << 62;

/* How bits are read: the exponent is `bits >> shift & mask`, the class of an element by how far it lies below `top`. */
typedef struct { int32_t shift, mask, top, floating, classes; } form;

/* The streams of a class, as they are written: `skipped` elements since the last change, and `room` for as many bytes or
   values in each. */
typedef struct {
    uint8_t *gaps;
    int8_t *steps;
    uint8_t *values;
    uint64_t gap_bytes, changes, value_count, room;
    int64_t skipped;
} sink;

/* Count skipped elements into the gaps, as far as they are certain. Returns whether there is room for FLUSH groups. */
INLINE int flushed(sink *sinks, int classes) {
    int room = 1;
    for (sink *s = sinks; s < sinks + classes; s++) {
        for (; s->skipped >= 255; s->skipped -= 255) s->gaps[s->gap_bytes++] = 255;
        room &= s->room - s->gap_bytes > FLUSH * GROUP * 2;
    }
    return room;
}

/* The streams of a class, as they are read: `ahead` elements until the next change. */
typedef struct {
    const uint8_t *gap, *gaps_end;
    const int8_t *step, *steps_end;
    const uint8_t *value, *values_end;
    uint64_t ahead;
} source;

/* The classes of a group's elements, CLASSES behind the end of the array. */
typedef uint8_t lanes __attribute__((vector_size(32)));
enum { LANES = GROUP / sizeof(lanes) };
typedef union { uint8_t of[GROUP]; lanes at[LANES]; } group;

/* The sum of the lanes, of which each is at most 127. */
INLINE uint64_t total(const lanes *counts) {
    uint64_t sum = 0;
#ifdef WIDE
    const __m128i *at = (const __m128i *)counts;
    __m128i sums = _mm_sad_epu8(_mm_add_epi8(at[0], at[1]), _mm_setzero_si128());
    sum = _mm_cvtsi128_si64(_mm_add_epi64(sums, _mm_unpackhi_epi64(sums, sums)));
#else
    for (size_t i = 0; i < sizeof *counts; i++) sum += (*counts)[i];
#endif
    return sum;
}

INLINE void tally(lanes *counts, const group *classes, uint8_t c) {
    UNROLLED
    for (int i = 0; i < LANES; i++) *counts -= (lanes)(classes->at[i] == c);
}

/* One more than the highest class of a group: of most groups no element is small. */
INLINE int present(const group *classes) {
#ifdef WIDE
    const __m128i *at = (const __m128i *)classes->of;
    __m128i most = at[0];
    UNROLLED
    for (int i = 1; i < GROUP / 16; i++) most = _mm_max_epu8(most, at[i]);
    most = _mm_max_epu8(most, _mm_srli_si128(most, 8));
    most = _mm_max_epu8(most, _mm_srli_si128(most, 4));
    most = _mm_max_epu8(most, _mm_srli_si128(most, 2));
    int last = (uint8_t)_mm_cvtsi128_si32(_mm_max_epu8(most, _mm_srli_si128(most, 1)));
#else
    int last = 0;
    for (int j = 0; j < GROUP; j++) last = classes->of[j] > last ? classes->of[j] : last;
#endif
    return last < CLASSES ? last + 1 : CLASSES;
}

/* The rank of element j among those of its class. */
INLINE uint32_t before(const group *classes, uint32_t j) {
    static const uint8_t below[2 * GROUP] = {[0 ... GROUP - 1] = 255};
    lanes counts = {0}, mask;
    UNROLLED
    for (int i = 0; i < LANES; i++) {
        memcpy(&mask, below + GROUP - j + i * sizeof mask, sizeof mask);
        counts -= (lanes)(classes->at[i] == classes->of[j]) & mask;
    }
    return total(&counts);
}

/* The elements of a class, as bits. */
INLINE void mark(const group *classes, uint8_t c, uint64_t *members) {
#ifdef WIDE
    const __m128i *at = (const __m128i *)classes->of, same = _mm_set1_epi8(c);
    memset(members, 0, GROUP / 8);
    UNROLLED
    for (int i = 0; i < GROUP / 16; i++)
        members[i / 4] |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(at[i], same)) << 16 * (i % 4);
#else
    group equal;
    for (int i = 0; i < LANES; i++) equal.at[i] = (lanes)(classes->at[i] == c) & 1;
    for (int w = 0; w < GROUP / 64; w++) {
        members[w] = 0;
        for (int b = 0; b < 8; b++) members[w] |= (word(equal.of + 64 * w + 8 * b) * 0x0102040810204080 >> 56) << 8 * b;
    }
#endif
}

INLINE uint64_t next_gap(source *s) {
    uint64_t gap = 0;
    while (s->gap < s->gaps_end) {
        gap += *s->gap;
        if (*s->gap++ < 255) return gap;
    }
    return NEVER;
}

INLINE int ended(const source *sources, int classes) {
    for (const source *s = sources; s < sources + classes; s++)
        if (s->ahead < NEVER / 2 || s->step != s->steps_end || s->value != s->values_end) return 0;
    return 1;
}

#define BITS 8
#include "gaps.h"
#define BITS 16
#include "gaps.h"
#define BITS 32
#include "gaps.h"

/* hatch_build.py gives the checksum of the sources; weights/native/__init__.py compares it. */
EXPORT uint32_t ts_sources(void) { return SOURCES; }
