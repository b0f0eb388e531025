// Rows between memory and planes: the components of the turning units, one plane each, then the
// entries that do not turn. Every part is readable in whole vectors, with zeros past its end.
#pragma once

#include "keys.h"

namespace anymamba::ANYMAMBA_VARIANT {

struct Planes {
    int64_t pairing, size, count;  // count: how many units turn
    int64_t parts, plane;          // components of a unit; floats of a plane
    int64_t still, padded;         // entries that do not turn; floats of a row, room to spare

    explicit Planes(const KeyShape &shape)
        : pairing(shape.pairing),
          size(shape.size),
          count(shape.turning),
          parts(pairing == kBlocks ? 4 : 2),
          plane(round_lanes(count)),
          still(size - parts * count),
          padded(lanes() + kWidth) {}

    int64_t turning_lanes() const { return parts * plane; }
    int64_t lanes() const { return turning_lanes() + round_lanes(still); }
};

template <class T>
ANYMAMBA_INLINE void split_pairs(const T *from, int64_t count, float *even, float *odd) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const Vec first = load(from + 2 * place), last = load(from + 2 * place + kWidth);
        store(even + place, evens(first, last));
        store(odd + place, odds(first, last));
    }
    for (; place < round_lanes(count); ++place) {
        even[place] = place < count ? widen(from[2 * place]) : 0;
        odd[place] = place < count ? widen(from[2 * place + 1]) : 0;
    }
}

template <class T>
ANYMAMBA_INLINE void join_pairs(const float *even, const float *odd, int64_t count, T *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const Vec a = load(even + place), b = load(odd + place);
        store(to + 2 * place, zip_first(a, b));
        store(to + 2 * place + kWidth, zip_last(a, b));
    }
    for (; place < count; ++place) {
        narrow(to + 2 * place, even[place]);
        narrow(to + 2 * place + 1, odd[place]);
    }
}

// Four components at a distance of `plane`.
template <class T>
ANYMAMBA_INLINE void split_blocks(const T *from, int64_t count, int64_t plane, float *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const T *at = from + 4 * place;
        const Vec a = load(at), b = load(at + kWidth), c = load(at + 2 * kWidth),
                  d = load(at + 3 * kWidth);
        const Vec even_first = evens(a, b), even_last = evens(c, d);
        const Vec odd_first = odds(a, b), odd_last = odds(c, d);
        store(to + place, evens(even_first, even_last));
        store(to + plane + place, evens(odd_first, odd_last));
        store(to + 2 * plane + place, odds(even_first, even_last));
        store(to + 3 * plane + place, odds(odd_first, odd_last));
    }
    for (; place < round_lanes(count); ++place)
        for (int64_t part = 0; part < 4; ++part)
            to[part * plane + place] = place < count ? widen(from[4 * place + part]) : 0;
}

template <class T>
ANYMAMBA_INLINE void join_blocks(const float *from, int64_t count, int64_t plane, T *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const Vec w = load(from + place), x = load(from + plane + place),
                  y = load(from + 2 * plane + place), z = load(from + 3 * plane + place);
        const Vec even_first = zip_first(w, y), even_last = zip_last(w, y);
        const Vec odd_first = zip_first(x, z), odd_last = zip_last(x, z);
        T *at = to + 4 * place;
        store(at, zip_first(even_first, odd_first));
        store(at + kWidth, zip_last(even_first, odd_first));
        store(at + 2 * kWidth, zip_first(even_last, odd_last));
        store(at + 3 * kWidth, zip_last(even_last, odd_last));
    }
    for (; place < count; ++place)
        for (int64_t part = 0; part < 4; ++part)
            narrow(to + 4 * place + part, from[part * plane + place]);
}

// Three vectors end to end are triples. `taken` has component `part` of each of them, `given` the
// vector number `part` of them, out of a vector for each component.
template <int part, class All>
struct Triples;

template <int part, int... lane>
struct Triples<part, Lanes<lane...>> {
    static constexpr int kCount = (int)kWidth;

    static ANYMAMBA_INLINE Vec taken(Vec a, Vec b, Vec c) {
        const Vec ab = __builtin_shufflevector(
            a, b, (3 * lane + part < 2 * kCount ? 3 * lane + part : lane)...);
        return __builtin_shufflevector(
            ab, c, (3 * lane + part < 2 * kCount ? lane : 3 * lane + part - kCount)...);
    }
    static ANYMAMBA_INLINE Vec given(Vec x, Vec y, Vec z) {
        const Vec xy = __builtin_shufflevector(
            x, y, ((part * kCount + lane) % 3 < 2
                       ? (part * kCount + lane) % 3 * kCount + (part * kCount + lane) / 3
                       : lane)...);
        return __builtin_shufflevector(
            xy, z,
            ((part * kCount + lane) % 3 < 2 ? lane : kCount + (part * kCount + lane) / 3)...);
    }
};

// Three components at a distance of `plane`. What lies behind the last of them is left alone.
template <class T>
ANYMAMBA_INLINE void split_triples(const T *from, int64_t count, int64_t plane, float *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const T *at = from + 3 * place;
        const Vec a = load(at), b = load(at + kWidth), c = load(at + 2 * kWidth);
        store(to + place, Triples<0, AllLanes>::taken(a, b, c));
        store(to + plane + place, Triples<1, AllLanes>::taken(a, b, c));
        store(to + 2 * plane + place, Triples<2, AllLanes>::taken(a, b, c));
    }
    for (; place < count; ++place)
        for (int64_t part = 0; part < 3; ++part)
            to[part * plane + place] = widen(from[3 * place + part]);
}

template <class T>
ANYMAMBA_INLINE void join_triples(const float *from, int64_t count, int64_t plane, T *to) {
    int64_t place = 0;
    for (; place + kWidth <= count; place += kWidth) {
        const Vec x = load(from + place), y = load(from + plane + place),
                  z = load(from + 2 * plane + place);
        T *at = to + 3 * place;
        store(at, Triples<0, AllLanes>::given(x, y, z));
        store(at + kWidth, Triples<1, AllLanes>::given(x, y, z));
        store(at + 2 * kWidth, Triples<2, AllLanes>::given(x, y, z));
    }
    for (; place < count; ++place)
        for (int64_t part = 0; part < 3; ++part)
            narrow(to + 3 * place + part, from[part * plane + place]);
}

template <class T>
ANYMAMBA_INLINE void split_row(const Planes &planes, const T *from, float *to) {
    const int64_t count = planes.count, half = planes.size / 2, still = planes.still;
    float *rest = to + planes.turning_lanes();
    if (still > 0) store(rest + round_lanes(still) - kWidth, Vec{});
    if (planes.pairing == kHalfSplit) {
        widen_row(from, count, to);
        widen_row(from + half, count, to + planes.plane);
        widen_row(from + count, half - count, rest);
        widen_row(from + half + count, half - count, rest + half - count);
        return;
    }
    if (planes.pairing == kInterleaved)
        split_pairs(from, count, to, to + planes.plane);
    else
        split_blocks(from, count, planes.plane, to);
    widen_row(from + planes.parts * count, still, rest);
}

template <class T>
ANYMAMBA_INLINE void join_row(const Planes &planes, const float *from, T *to) {
    const int64_t count = planes.count, half = planes.size / 2;
    const float *rest = from + planes.turning_lanes();
    if (planes.pairing == kHalfSplit) {
        narrow_row(from, count, to);
        narrow_row(from + planes.plane, count, to + half);
        narrow_row(rest, half - count, to + count);
        narrow_row(rest + half - count, half - count, to + half + count);
        return;
    }
    if (planes.pairing == kInterleaved)
        join_pairs(from, from + planes.plane, count, to);
    else
        join_blocks(from, count, planes.plane, to);
    narrow_row(rest, planes.still, to + planes.parts * count);
}

inline void read_planes(const Planes &planes, const anymamba_tensor &tensor, int64_t offset,
                        float *to) {
    if (tensor.dtype == ANYMAMBA_FLOAT32)
        split_row(planes, static_cast<const float *>(tensor.data) + offset, to);
    else
        split_row(planes, static_cast<const BFloat16 *>(tensor.data) + offset, to);
}

inline void write_planes(const Planes &planes, const float *from, const anymamba_tensor &tensor,
                         int64_t offset) {
    if (tensor.dtype == ANYMAMBA_FLOAT32)
        join_row(planes, from, static_cast<float *>(tensor.data) + offset);
    else
        join_row(planes, from, static_cast<BFloat16 *>(tensor.data) + offset);
}

}  // namespace anymamba::ANYMAMBA_VARIANT
