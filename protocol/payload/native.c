/* Fast path of the codec: the loops of arrays.py, int2.py and the outer step, with the same bits.

   numpy and torch are the reference. Each operation below is the reference's IEEE operation, in the reference's order,
   so the compiler may not contract or reorder (-ffp-contract=off, no -ffast-math). Sums of float32 run in LANES lanes.
   native.py loads this file and passes addresses; it has checked all sizes. */
#include <stdint.h>
#include <string.h>

#define VERSION 1 /* raise it with every change of a function's arguments or results */
#define GROUP 4096
#define LANES 64
#define BLOCK 16
#define OFFSETS 16
#define SUMMED 256 /* blocks whose squares are added in float32 */
#define MAX_CODE 7.0f
#define LLOYD_STEPS 3
#define LARGEST 0x1p40f
#define MIN_BASE (-72)
#define MAX_BASE 40
#define LARGEST_SUBNORMAL (0x1p-126f - 0x1p-149f)

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LEVELS, INT4, SPARSE, FLOATS };

typedef struct {
  int64_t kind;
  double weight;
  const float *magnitudes;  /* LEVELS, SPARSE: (groups, 2) */
  const uint8_t *codes;     /* LEVELS: packed */
  const int8_t *int4;       /* INT4: (elements,) */
  const uint8_t *offsets;   /* INT4: (blocks,) */
  int64_t base;             /* INT4 */
  const int64_t *positions; /* SPARSE: (kept,) ascending */
  const uint8_t *signs, *second;
  int64_t kept;
  const float *numbers;     /* FLOATS: (elements,) */
} Part;

/* What native.py expects: it refuses a library that was built from another version of this file. */
int64_t version(void) { return 1000 * VERSION + (int64_t)sizeof(Part); }

INLINE float absolute(float v) { return __builtin_fabsf(v); }
INLINE float flushed(float v) { return absolute(v) <= LARGEST_SUBNORMAL ? 0.0f : v; } /* NaN stays */

INLINE double power_of_two(int64_t exponent) { /* for normal numbers */
  uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

INLINE float bfloat16(double wide) { /* nearest, ties to even; of a finite number that is not negative */
  float value = (float)wide;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&value, &bits, 4);
  value = value > LARGEST ? LARGEST : value;
  return value < 0x1p-72f ? 0.0f : value;
}

INLINE float folded(float *lanes) {
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

INLINE double square_sum(const float *values, int64_t size) { /* for a report: its last bits depend on LANES */
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += values[i + lane] * values[i + lane];
  for (; i < size; i++) lanes[i % LANES] += values[i] * values[i];
  return folded(lanes);
}

/* Places two magnitudes for `count` values, of which `total` is the sum of magnitudes. */
typedef struct { double low, high; float boundary; } Placed;

INLINE void placed(Placed *of, double total, double count, double number, double above) {
  of->high = number > 0 ? above / number : (double)of->boundary;
  of->low = number < count ? (total - above) / (count - number) : (double)of->boundary;
  of->boundary = (float)((of->low + of->high) / 2);
}

/* One group: size magnitudes, padded with zeros to whole lanes. */
INLINE Placed place_group(const float *sizes, int64_t padded, int64_t size) {
  float lanes[LANES] = {0};
  for (int64_t i = 0; i < padded; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += sizes[i + lane];
  double total = folded(lanes);
  Placed of = {total / (double)size, total / (double)size, 0};
  of.boundary = (float)(1.3 * of.low);
  for (int step = 0; step < LLOYD_STEPS; step++) {
    float sums[LANES] = {0};
    int32_t counts[LANES] = {0};
    const float boundary = of.boundary;
    for (int64_t i = 0; i < padded; i += LANES)
      for (int lane = 0; lane < LANES; lane++) {
        const float value = sizes[i + lane];
        sums[lane] += value > boundary ? value : 0.0f;
        counts[lane] += value > boundary;
      }
    int64_t number = 0;
    for (int lane = 0; lane < LANES; lane++) number += counts[lane];
    placed(&of, total, (double)size, (double)number, folded(sums));
  }
  return of;
}

/* Encodes; where `left` is not null, it loses what the codes decode to. It may be `values`. Returns Σ left². */
FAST double int2_encode(const float *values, int64_t elements, float *magnitudes, uint8_t *codes, float *left) {
  float sizes[GROUP] __attribute__((aligned(64)));
  uint8_t unpacked[GROUP] __attribute__((aligned(64)));
  double squares = 0;
  for (int64_t start = 0, group = 0; start < elements; start += GROUP, group++) {
    const float *from = values + start;
    const int64_t size = elements - start < GROUP ? elements - start : GROUP;
    const int64_t padded = (size + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; i < size; i++) sizes[i] = absolute(from[i]);
    for (int64_t i = size; i < padded; i++) sizes[i] = 0.0f;
    const Placed of = place_group(sizes, padded, size);
    const float boundary = of.boundary, low = bfloat16(of.low), high = bfloat16(of.high);
    magnitudes[2 * group] = low;
    magnitudes[2 * group + 1] = high;
    for (int64_t i = 0; i < size; i++) unpacked[i] = (uint8_t)((sizes[i] > boundary) << 1 | (from[i] < 0));
    if (left)
      for (int64_t i = 0; i < size; i++) {
        const float magnitude = sizes[i] > boundary ? high : low;
        left[start + i] -= from[i] < 0 ? -magnitude : magnitude;
      }
    if (left) squares += square_sum(left + start, size);
    for (int64_t i = size; i < padded; i++) unpacked[i] = 0;
    uint8_t *to = codes + start / 4;
    const int64_t bytes = (size + 3) / 4;
    for (int64_t i = 0; i < bytes; i++) {
      uint32_t word;
      memcpy(&word, unpacked + 4 * i, 4);
      word |= word >> 6;
      word |= word >> 12;
      to[i] = (uint8_t)word;
    }
  }
  return squares;
}

/* Counts the second magnitudes of each group. */
FAST void int2_second(const uint8_t *codes, int64_t elements, int64_t *counts) {
  const int64_t bytes = (elements + 3) / 4;
  for (int64_t start = 0, group = 0; start < bytes; start += GROUP / 4, group++) {
    const int64_t stop = bytes - start < GROUP / 4 ? bytes : start + GROUP / 4;
    int64_t count = 0, i = start;
    for (; i + 8 <= stop; i += 8) {
      uint64_t word;
      memcpy(&word, codes + i, 8);
      count += __builtin_popcountll(word & 0xAAAAAAAAAAAAAAAAull);
    }
    for (; i < stop; i++) count += __builtin_popcount(codes[i] & 0xAAu);
    counts[group] = count;
  }
}

/* Adds one part of a payload to `total`, values start … start + size of one group; `first`: nothing was added before. */
INLINE void add_levels(const Part *part, int64_t start, int64_t size, double *total, int first) {
  const float *magnitudes = part->magnitudes + 2 * (start / GROUP);
  const double low = (double)magnitudes[0] * part->weight, high = (double)magnitudes[1] * part->weight;
  const double value[4] = {low, -low, high, -high};
  double pairs[16][2], quads[256][4];
  for (int code = 0; code < 16; code++) pairs[code][0] = value[code & 3], pairs[code][1] = value[code >> 2];
  for (int code = 0; code < 256; code++) memcpy(quads[code], pairs[code & 15], 16), memcpy(quads[code] + 2, pairs[code >> 4], 16);
  const uint8_t *codes = part->codes + start / 4;
  const int64_t whole = size / 4;
  if (first)
    for (int64_t i = 0; i < whole; i++) memcpy(total + 4 * i, quads[codes[i]], 32);
  else
    for (int64_t i = 0; i < whole; i++)
      for (int j = 0; j < 4; j++) total[4 * i + j] += quads[codes[i]][j];
  for (int64_t i = 4 * whole; i < size; i++) {
    const double each = value[codes[i / 4] >> 2 * (i % 4) & 3];
    total[i] = first ? each : total[i] + each;
  }
}

INLINE void add_int4(const Part *part, int64_t start, int64_t size, double *total, int first) {
  const int8_t *codes = part->int4 + start;
  for (int64_t at = 0; at < size; at += BLOCK) {
    const double scale = power_of_two(part->base + part->offsets[(start + at) / BLOCK]);
    const int64_t stop = size - at < BLOCK ? size : at + BLOCK;
    if (first)
      for (int64_t i = at; i < stop; i++) total[i] = (double)codes[i] * scale * part->weight;
    else
      for (int64_t i = at; i < stop; i++) total[i] += (double)codes[i] * scale * part->weight;
  }
}

INLINE void add_floats(const Part *part, int64_t start, int64_t size, double *total, int first) {
  const float *numbers = part->numbers + start;
  if (first)
    for (int64_t i = 0; i < size; i++) total[i] = (double)numbers[i] * part->weight;
  else
    for (int64_t i = 0; i < size; i++) total[i] += (double)numbers[i] * part->weight;
}

INLINE int64_t first_at(const int64_t *positions, int64_t kept, int64_t from) {
  int64_t low = 0, high = kept;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (positions[middle] < from) low = middle + 1;
    else high = middle;
  }
  return low;
}

INLINE void add_sparse(const Part *part, int64_t start, int64_t size, double *total) {
  const float *magnitudes = part->magnitudes + 2 * (start / GROUP);
  const double low = (double)magnitudes[0] * part->weight, high = (double)magnitudes[1] * part->weight;
  const double value[4] = {low, high, -low, -high};
  int64_t i = first_at(part->positions, part->kept, start);
  for (; i < part->kept && part->positions[i] < start + size; i++)
    total[part->positions[i] - start] += value[part->signs[i] << 1 | part->second[i]];
}

INLINE void add_few(const Part *part, int64_t start, int64_t stop, float *values) {
  for (int64_t i = first_at(part->positions, part->kept, start); i < part->kept && part->positions[i] < stop; i++) {
    const int64_t at = part->positions[i];
    const double size = (double)part->magnitudes[2 * (at / GROUP) + part->second[i]] * part->weight;
    values[at - start] += (float)(part->signs[i] ? -size : size);
  }
}

INLINE void add_all(const Part *parts, int64_t count, int64_t start, int64_t size, double *total) {
  int first = 1;
  if (parts[0].kind == SPARSE) memset(total, 0, (size_t)size * sizeof *total), first = 0;
  for (int64_t k = 0; k < count; k++, first = 0) switch (parts[k].kind) {
      case LEVELS: add_levels(parts + k, start, size, total, first); break;
      case INT4: add_int4(parts + k, start, size, total, first); break;
      case FLOATS: add_floats(parts + k, start, size, total, first); break;
      default: add_sparse(parts + k, start, size, total);
    }
}

/* Σ wᵢ xᵢ of flat values start … stop; start is a multiple of GROUP. */
FAST void weighted_sum(const Part *parts, int64_t count, int64_t start, int64_t stop, double *total) {
  for (int64_t at = start; at < stop; at += GROUP)
    add_all(parts, count, at, stop - at < GROUP ? stop - at : GROUP, total + (at - start));
}

/* values += float(Σ wᵢ xᵢ); values: of start … stop. */
FAST void add_to(const Part *parts, int64_t count, int64_t start, int64_t stop, float *values) {
  if (count == 1 && parts[0].kind == SPARSE) { /* others keep their bits, also -0 */
    add_few(parts, start, stop, values);
    return;
  }
  double total[GROUP] __attribute__((aligned(64)));
  for (int64_t at = start; at < stop; at += GROUP) {
    const int64_t size = stop - at < GROUP ? stop - at : GROUP;
    add_all(parts, count, at, size, total);
    float *to = values + (at - start);
    for (int64_t i = 0; i < size; i++) to[i] += (float)total[i];
  }
}

INLINE void step(const double *gradients, int64_t size, float *theta, float *momentum, float rate, float decay) {
  for (int64_t i = 0; i < size; i++) {
    const float gradient = flushed((float)gradients[i]);
    const float moved = flushed(momentum[i] * decay + gradient);
    momentum[i] = moved;
    theta[i] = flushed(theta[i] - (moved * decay + gradient) * rate);
  }
}

/* Nesterov's step of values start … stop by the mean of payloads. */
FAST void mean_step(const Part *parts, int64_t count, int64_t start, int64_t stop, float *theta, float *momentum, float rate, float decay) {
  double total[GROUP] __attribute__((aligned(64)));
  for (int64_t at = start; at < stop; at += GROUP) {
    const int64_t size = stop - at < GROUP ? stop - at : GROUP;
    add_all(parts, count, at, size, total);
    step(total, size, theta + (at - start), momentum + (at - start), rate, decay);
  }
}

/* Unpacks nibbles, low half first; returns 1 if one is -8, plus 2 if the padding is not 0. */
FAST int64_t int4_unpack(const uint8_t *packed, int64_t count, int8_t *codes) {
  uint8_t bad = 0;
  for (int64_t i = 0; i < count / 2; i++) {
    const uint8_t low = packed[i] & 15, high = packed[i] >> 4;
    bad |= (low == 8) | (high == 8);
    codes[2 * i] = (int8_t)((low ^ 8) - 8);
    codes[2 * i + 1] = (int8_t)((high ^ 8) - 8);
  }
  if (count % 2) {
    const uint8_t low = packed[count / 2] & 15;
    bad |= low == 8;
    codes[count - 1] = (int8_t)((low ^ 8) - 8);
    bad |= (uint8_t)((packed[count / 2] >> 4 != 0) << 1);
  }
  return bad;
}

FAST void int4_pack(const int8_t *codes, int64_t count, uint8_t *packed) {
  for (int64_t i = 0; i < count / 2; i++) packed[i] = (uint8_t)((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
  if (count % 2) packed[count / 2] = (uint8_t)(codes[count - 1] & 15);
}

/* Adds Σ code² of each block to the sum of its offset. */
FAST void int4_squares(const int8_t *codes, int64_t rows, int64_t columns, const uint8_t *offsets, int64_t *sums) {
  for (int64_t row = 0; row < rows; row++, codes += columns, offsets += (columns + BLOCK - 1) / BLOCK) {
    for (int64_t block = 0; block < columns / BLOCK; block++) {
      int32_t sum = 0;
      for (int i = 0; i < BLOCK; i++) sum += codes[BLOCK * block + i] * codes[BLOCK * block + i];
      sums[offsets[block]] += sum;
    }
    for (int64_t i = columns / BLOCK * BLOCK; i < columns; i++) sums[offsets[i / BLOCK]] += codes[i] * codes[i];
  }
}

INLINE int32_t exponent_of(float peak) { /* the least e with 2^e >= peak / MAX_CODE */
  const float wanted = peak / MAX_CODE;
  uint32_t bits;
  memcpy(&bits, &wanted, 4);
  const int32_t exponent = (int32_t)(bits >> 23) - 127;
  return exponent + ((bits & 0x7fffff) != 0); /* subnormal numbers: far below every base */
}

typedef float Half __attribute__((vector_size(32)));
typedef int32_t Mask __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(8)));
typedef struct { Half low, high; } Block;

INLINE float float_power(int64_t exponent) { /* for normal numbers */
  const uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE Half chosen(Mask mask, Half yes, Half no) { return (Half)(((Mask)yes & mask) | ((Mask)no & ~mask)); }

INLINE Half rounded(Half values, float inverse) { /* to the nearest code, ties to even */
  const Half most = (Half){0} + MAX_CODE;
  Half codes = values * inverse;
  codes = chosen(codes > most, most, codes);
  codes = chosen(codes < -most, -most, codes);
  return (codes + 0x1.8p23f) - 0x1.8p23f;
}

INLINE Half squared_errors(const Block *values, int64_t exponent) { /* of both halves, added */
  const float scale = float_power(exponent), inverse = float_power(-exponent);
  const Half low = rounded(values->low, inverse) * scale - values->low;
  const Half high = rounded(values->high, inverse) * scale - values->high;
  return low * low + high * high;
}

/* Whether the finer scale has the smaller sum of squared errors. Halves are added, as the reference does: lanes 0 to 3
   for the coarse scale, 4 to 7 for the fine one. */
INLINE int is_finer_better(const Block *values, int64_t exponent, int64_t finer) {
  const Half coarse = squared_errors(values, exponent), fine = squared_errors(values, finer);
  Half sums = __builtin_shuffle(coarse, fine, (Mask){0, 1, 2, 3, 8, 9, 10, 11});
  sums += __builtin_shuffle(coarse, fine, (Mask){4, 5, 6, 7, 12, 13, 14, 15});
  sums += __builtin_shuffle(sums, (Mask){2, 3, 0, 1, 6, 7, 4, 5});
  sums += __builtin_shuffle(sums, (Mask){1, 0, 3, 2, 5, 4, 7, 6});
  return sums[4] < sums[0];
}

INLINE void narrow(Half codes, int8_t *to) {
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(codes, Mask), Bytes);
  memcpy(to, &bytes, 8);
}

INLINE Half larger(Half a, Half b) { return chosen(a > b, a, b); }

INLINE float peak_of(Block values) {
  Half most = larger(larger(values.low, -values.low), larger(values.high, -values.high));
  most = larger(most, __builtin_shuffle(most, (Mask){4, 5, 6, 7, 0, 1, 2, 3}));
  most = larger(most, __builtin_shuffle(most, (Mask){2, 3, 0, 1, 6, 7, 4, 5}));
  most = larger(most, __builtin_shuffle(most, (Mask){1, 0, 3, 2, 5, 4, 7, 6}));
  return most[0];
}

INLINE int32_t row_exponents(const float *values, int64_t columns, int8_t *exponents) {
  int32_t top = -128;
  for (int64_t at = 0, block = 0; at < columns; at += BLOCK, block++) {
    Block part = {{0}, {0}};
    if (columns - at >= BLOCK) memcpy(&part, values + at, sizeof part);
    else memcpy(&part, values + at, (size_t)(columns - at) * sizeof *values);
    const float peak = peak_of(part);
    int32_t exponent = peak > 0 ? exponent_of(peak) : -128;
    exponent = exponent < -127 ? -128 : exponent > 127 ? 127 : exponent;
    exponents[block] = (int8_t)exponent;
    top = exponent > top ? exponent : top;
  }
  return top;
}

/* The exponents that the blocks of all rows need, -128 for all zeros; returns the largest. */
FAST int64_t int4_exponents(const float *values, int64_t rows, int64_t columns, int8_t *exponents) {
  const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
  int32_t top = -128;
  for (int64_t row = 0; row < rows; row++) {
    const int32_t most = row_exponents(values + row * columns, columns, exponents + row * blocks);
    top = most > top ? most : top;
  }
  return top;
}

INLINE double row_round(const float *values, int64_t columns, const int8_t *exponents, int64_t base, uint8_t *offsets, int8_t *codes, float *left) {
  double rest = 0;
  Half squares = {0};
  for (int64_t at = 0, block = 0; at < columns; at += BLOCK, block++) {
    const int64_t size = columns - at < BLOCK ? columns - at : BLOCK;
    Block part = {{0}, {0}}, after = {{0}, {0}};
    int8_t found[BLOCK];
    if (size == BLOCK) memcpy(&part, values + at, sizeof part);
    else memcpy(&part, values + at, (size_t)size * sizeof *values);
    int64_t exponent = exponents[block] < base ? base : exponents[block];
    exponent = exponent > base + OFFSETS - 1 ? base + OFFSETS - 1 : exponent;
    const int64_t finer = exponent - 1 < base ? base : exponent - 1;
    const int64_t better = is_finer_better(&part, exponent, finer) ? finer : exponent;
    const float scale = float_power(better), inverse = float_power(-better);
    const Half low = rounded(part.low, inverse), high = rounded(part.high, inverse);
    offsets[block] = (uint8_t)(better - base);
    narrow(low, found);
    narrow(high, found + BLOCK / 2);
    if (size == BLOCK) memcpy(codes + at, found, BLOCK);
    else memcpy(codes + at, found, (size_t)size);
    if (!left) continue;
    if (size == BLOCK) memcpy(&after, left + at, sizeof after);
    else memcpy(&after, left + at, (size_t)size * sizeof *left);
    after.low -= low * scale;
    after.high -= high * scale;
    if (size == BLOCK) memcpy(left + at, &after, sizeof after);
    else memcpy(left + at, &after, (size_t)size * sizeof *left);
    squares += after.low * after.low + after.high * after.high;
    if (block % SUMMED == SUMMED - 1 || at + BLOCK >= columns) {
      for (int i = 0; i < BLOCK / 2; i++) rest += squares[i];
      squares = (Half){0};
    }
  }
  return rest;
}

/* Rounds all rows. `left`: loses what the codes decode to, where it is not null. Returns Σ left². */
FAST double int4_round(const float *values, int64_t rows, int64_t columns, const int8_t *exponents, int64_t base, uint8_t *offsets, int8_t *codes, float *left) {
  const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
  double squares = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * columns, block = row * blocks;
    squares += row_round(values + at, columns, exponents + block, base, offsets + block, codes + at, left ? left + at : 0);
  }
  return squares;
}

/* Positions and values whose magnitude exceeds the threshold, in order; returns how many there are. The last LANES of `room` places
   may be overwritten with others: a caller that finds more asks again with more room. */
FAST int64_t above(const float *values, int64_t elements, float threshold, int64_t *positions, float *large, int64_t room) {
  int64_t found = 0;
  for (int64_t at = 0; at < elements; at += LANES) {
    const int64_t size = elements - at < LANES ? elements - at : LANES;
    if (found + LANES <= room)
      for (int64_t i = at; i < at + size; i++) { /* without a branch: which values are large cannot be guessed */
        positions[found] = i;
        large[found] = values[i];
        found += absolute(values[i]) > threshold;
      }
    else
      for (int64_t i = at; i < at + size; i++) found += absolute(values[i]) > threshold;
  }
  return found;
}

/* Places two magnitudes in each group of the values that a sparse payload keeps; cuts: (groups + 1,). */
void sparse_levels(const float *sizes, const int64_t *cuts, int64_t groups, float *magnitudes, uint8_t *second) {
  for (int64_t group = 0; group < groups; group++) {
    const int64_t start = cuts[group], stop = cuts[group + 1], count = stop - start;
    double total = 0;
    for (int64_t i = start; i < stop; i++) total += (double)sizes[i];
    Placed of = {total / (double)(count ? count : 1), total / (double)(count ? count : 1), 0};
    of.boundary = (float)(1.3 * of.low);
    for (int step = 0; step < LLOYD_STEPS; step++) {
      double more = 0;
      int64_t number = 0;
      for (int64_t i = start; i < stop; i++) {
        const int is = sizes[i] > of.boundary;
        more += is ? (double)sizes[i] : 0.0;
        number += is;
      }
      placed(&of, total, (double)count, (double)number, more);
    }
    magnitudes[2 * group] = bfloat16(of.low);
    magnitudes[2 * group + 1] = bfloat16(of.high);
    for (int64_t i = start; i < stop; i++) second[i] = sizes[i] > of.boundary;
  }
}
