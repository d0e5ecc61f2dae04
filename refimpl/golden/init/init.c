/* Golden weights and inputs without a file: refimpl's hash, in C99.  cc -O2 init.c -lm; ./a.out SEED NAME N OFFSET SCALE

   value(name, i)  = offset + n * scale / 2^23,  n: draw i of the stream of name, less 2^23; with an offset its lowest bit is 0
   token(step, i)  = an integer below the vocabulary, for position i of [B, T + 1] in C order; targets are the tokens that follow
   ignored(step, i): whether the target at position i of [B, T] is ignored (-100)
   i counts in the whole array, in C order, so a shard is made alone: for the rows a..b and columns c..d of [R, C] take i = r * C + c.
   Names, shapes, offsets and scales are in a bundle's manifest, under "weights". */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static uint64_t fnv1a64(const char *text) {
    uint64_t h = UINT64_C(0xCBF29CE484222325);
    for (; *text; text++) h = (h ^ (unsigned char)*text) * UINT64_C(0x100000001B3);
    return h;
}

static uint64_t stream(uint64_t seed, const char *name) { return mix64(fnv1a64(name) ^ mix64(seed)); }

static uint64_t stream_of_step(uint64_t seed, const char *name, uint64_t step) { return mix64(stream(seed, name) ^ mix64(step)); }

static uint64_t draw24(uint64_t key, uint64_t i) { return mix64(key + (i + 1) * UINT64_C(0x9E3779B97F4A7C15)) >> 40; }

static double value(uint64_t key, uint64_t i, double offset, double scale) {
    int64_t n = (int64_t)draw24(key, i) - 8388608;
    if (offset != 0) n -= n & 1;
    return offset + (double)n * (scale / 8388608);
}

static int64_t token(uint64_t seed, uint64_t step, uint64_t i, uint64_t vocabulary) {
    uint64_t key = stream_of_step(seed, "tokens", step);
    return (int64_t)((draw24(key, 2 * i) << 24 | draw24(key, 2 * i + 1)) % vocabulary);
}

static int ignored(uint64_t seed, uint64_t step, uint64_t i) { return draw24(stream_of_step(seed, "ignored", step), i) < 1048576; }

/* SEED NAME N OFFSET SCALE: the first N values.  SEED tokens STEP N VOCABULARY, SEED ignored STEP N: of a step. */
int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    if (argc == 6 && !strcmp(argv[2], "tokens"))
        for (uint64_t i = 0; i < strtoull(argv[4], NULL, 10); i++)
            printf("%" PRId64 "\n", token(seed, strtoull(argv[3], NULL, 10), i, strtoull(argv[5], NULL, 10)));
    else if (argc == 5 && !strcmp(argv[2], "ignored"))
        for (uint64_t i = 0; i < strtoull(argv[4], NULL, 10); i++)
            printf("%d\n", ignored(seed, strtoull(argv[3], NULL, 10), i));
    else if (argc == 6)
        for (uint64_t i = 0; i < strtoull(argv[3], NULL, 10); i++)
            printf("%.17g\n", value(stream(seed, argv[2]), i, strtod(argv[4], NULL), strtod(argv[5], NULL)));
    else
        fprintf(stderr, "give SEED NAME N OFFSET SCALE, SEED tokens STEP N VOCABULARY, or SEED ignored STEP N\n");
    return 0;
}
