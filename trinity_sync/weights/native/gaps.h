/* Gap codes of elements of one width: native.c includes this file with BITS = 8, 16, 32. docs/delta.md has the format.

   Elements are taken in groups, of which each class is counted with vectors; single changes are then found by their rank
   among the elements of their class. Element arrays may lie at any address. */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define F(name) JOIN(name, BITS)
#define T JOIN(JOIN(uint, BITS), _t)
#define S JOIN(JOIN(int, BITS), _t)
typedef T __attribute__((aligned(1), may_alias)) F(element);

/* The order of values: negative floats ascend with the magnitude's complement. It is its own inverse. */
INLINE T F(ordered)(T bits, const form *f) { return bits >> (BITS - 1) && f->floating ? bits ^ (T)((T)~0 >> 1) : bits; }

INLINE void F(classify)(const F(element) *old, uint32_t m, const form *f, int shift, uint8_t *class) {
    const T mask = f->mask, top = f->top;
    for (uint32_t j = 0; j < m; j++) {
        T exponent = (T)(old[j] >> shift) & mask, capped = exponent < top ? exponent : top, below = top - capped;
        class[j] = below < CLASSES ? below : CLASSES - 1;
    }
}

INLINE void F(classes)(const F(element) *old, uint32_t m, const form *f, group *classes) {
    if (m == GROUP && f->shift == BF16) F(classify)(old, GROUP, f, BF16, classes->of); /* constants: for vectors */
    else {
        memset(classes, CLASSES, sizeof *classes);
        F(classify)(old, m, f, f->shift, classes->of);
    }
}

/* Whether each element of a group differs; returns whether any does. */
INLINE T F(compare)(const F(element) *old, const F(element) *new, uint32_t m, uint8_t *changed) {
    T any = 0;
    for (uint32_t j = 0; j < m; j++) any |= old[j] ^ new[j];
    if (any)
        for (uint32_t j = 0; j < m; j++) changed[j] = old[j] != new[j];
    return any;
}

INLINE uint64_t F(encode)(const F(element) *old, const F(element) *new, uint64_t n, const form *f, sink *sinks, int classes) {
    uint8_t changed[GROUP];
    group class;
    lanes counts[CLASSES] = {0}; /* of elements that are not in `skipped` yet */
    for (uint64_t start = 0, groups = 1; start < n; start += GROUP, old += GROUP, new += GROUP, groups++) {
        uint32_t m = n - start < GROUP ? n - start : GROUP;
        if (m < GROUP) memset(changed, 0, GROUP);
        if (classes > 1) F(classes)(old, m, f, &class);
        if (m == GROUP ? F(compare)(old, new, GROUP, changed) : F(compare)(old, new, m, changed)) {
            for (uint32_t at = 0; at < GROUP; at += 8) {
                uint64_t flags;
                for (memcpy(&flags, changed + at, 8); flags; flags &= flags - 1) {
                    uint32_t j = at + (__builtin_ctzll(flags) >> 3), c = classes > 1 ? class.of[j] : 0;
                    uint32_t rank = classes > 1 ? before(&class, j) : j;
                    sink *to = sinks + c;
                    uint64_t gap = to->skipped + rank;
                    if (classes > 1) {
                        gap += total(counts + c);
                        counts[c] = (lanes){0};
                    }
                    for (; gap >= 255; gap -= 255) to->gaps[to->gap_bytes++] = 255;
                    to->gaps[to->gap_bytes++] = gap;
                    to->skipped = -(int64_t)rank - 1;
                    S step = (S)(F(ordered)(new[j], f) - F(ordered)(old[j], f));
                    if (sizeof(T) > 1 && (step < -128 || step > 127)) {
                        ((F(element) *)to->values)[to->value_count++] = new[j];
                        step = 0;
                    }
                    to->steps[to->changes++] = step;
                }
            }
        }
        if (classes == 1) sinks->skipped += m;
        else for (int c = 0, last = present(&class); c < last; c++) tally(counts + c, &class, c);
        if (groups % FLUSH && start + GROUP < n) continue;
        for (int c = 0; c < classes && classes > 1; c++) { /* before a lane overflows */
            sinks[c].skipped += total(counts + c);
            counts[c] = (lanes){0};
        }
        if (!flushed(sinks, classes)) return start + m;
    }
    return n;
}

/* Take the next change of a class and make it at `to` (NULL: only check the streams). */
INLINE int F(change)(source *s, F(element) *to, const form *f) {
    if (s->step == s->steps_end) return BROKEN;
    int step = *s->step++;
    if (!step && s->value == s->values_end) return BROKEN;
    if (to) *to = step ? F(ordered)((T)(F(ordered)(*to, f) + (T)(S)step), f) : *(const F(element) *)s->value;
    if (!step) s->value += sizeof(T);
    s->ahead += 1 + next_gap(s);
    return 0;
}

INLINE int F(decode)(const F(element) *old, F(element) *out, uint64_t n, const form *f, source *sources, int classes) {
    group class;
    for (int c = 0; c < classes; c++) sources[c].ahead = next_gap(sources + c);
    for (uint64_t start = 0; start < n; start += GROUP, old += GROUP) {
        uint32_t m = n - start < GROUP ? n - start : GROUP;
        if (classes > 1) F(classes)(old, m, f, &class);
        if (out && out != old) memcpy(out, old, m * sizeof(T));
        if (classes == 1) {
            while (sources->ahead < m)
                if (F(change)(sources, out ? out + sources->ahead : out, f)) return BROKEN;
            sources->ahead -= m;
        }
        for (int c = 0, last = classes > 1 ? present(&class) : 0; c < last; c++) {
            lanes counts = {0};
            tally(&counts, &class, c);
            uint32_t have = total(&counts), at = 0, passed = 0, ones;
            if (sources[c].ahead < have) {
                source s = sources[c]; /* a copy, so that its fields stay in registers */
                uint64_t members[GROUP / 64], rest;
                mark(&class, c, members);
                rest = members[0];
                while (s.ahead < have) {
                    uint32_t skip = s.ahead - passed;
                    while (skip >= (ones = __builtin_popcountll(rest))) skip -= ones, rest = members[++at];
                    for (; skip; skip--) rest &= rest - 1;
                    passed = s.ahead + 1;
                    if (F(change)(&s, out ? out + 64 * at + __builtin_ctzll(rest) : out, f)) return BROKEN;
                    rest &= rest - 1;
                }
                sources[c] = s;
            }
            sources[c].ahead -= have;
        }
        if (out) out += GROUP;
    }
    return ended(sources, classes) ? 0 : BROKEN;
}

/* Returns how many elements were taken, fewer than n where a stream has no more room. */
EXPORT CLONES uint64_t F(ts_encode)(const void *old, const void *new, uint64_t n, const form *f, sink *sinks) {
    return f->classes > 1 ? F(encode)(old, new, n, f, sinks, CLASSES) : F(encode)(old, new, n, f, sinks, 1);
}

EXPORT CLONES int F(ts_decode)(const void *old, void *out, uint64_t n, const form *f, source *sources) {
    return f->classes > 1 ? F(decode)(old, out, n, f, sources, CLASSES) : F(decode)(old, out, n, f, sources, 1);
}

#undef T
#undef S
#undef BITS
