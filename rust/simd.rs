//! The inner loops over flat arrays, written so that the compiler vectorises them, and the choice of AVX2 at run time.

use std::ops::{BitOrAssign, BitXor};

use bytemuck::Pod;

/// Compiles a function once for the baseline and once for AVX2, and calls what the machine has (10-25 % on long
/// runs). The body must be `#[inline(always)]`, or it is compiled for the baseline alone.
macro_rules! with_avx2 {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $body:path) => {
        $(#[$doc])*
        #[inline]
        $vis fn $name($($arg: $ty),*) -> $ret {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
                unsafe fn wide($($arg: $ty),*) -> $ret {
                    $body($($arg),*)
                }
                if crate::simd::has_avx2() {
                    // SAFETY: the features were found on this machine.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use with_avx2;

#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("popcnt")
        && is_x86_feature_detected!("lzcnt")
}

const BLOCK: usize = 32;

#[inline(always)]
fn common_prefix_body<T>(a: &[T], b: &[T]) -> usize
where
    T: Copy + Default + PartialEq + BitXor<Output = T> + BitOrAssign,
{
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut at = 0;
    for (x, y) in a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)) {
        let mut differ = T::default();
        for (&x, &y) in x.iter().zip(y) {
            differ |= x ^ y;
        }
        if differ != T::default() {
            break;
        }
        at += BLOCK;
    }
    at + a[at..].iter().zip(&b[at..]).take_while(|(x, y)| x == y).count()
}

with_avx2! {
    /// Length of the common prefix.
    pub fn common_prefix(a: &[i64], b: &[i64]) -> usize = common_prefix_body
}
with_avx2! {
    /// Length of the common prefix of two byte strings.
    pub fn common_prefix_bytes(a: &[u8], b: &[u8]) -> usize = common_prefix_body
}

/// First index at or after `from` whose value is another than `value` (`mask.len()` if there is none).
#[inline(always)]
pub(crate) fn run_end_body<T>(mask: &[T], from: usize, value: T) -> usize
where
    T: Copy + Default + PartialEq + BitXor<Output = T> + BitOrAssign,
{
    let mut at = from;
    for block in mask[from..].chunks_exact(BLOCK) {
        let mut differ = T::default();
        for &x in block {
            differ |= x ^ value;
        }
        if differ != T::default() {
            break;
        }
        at += BLOCK;
    }
    at + mask[at..].iter().take_while(|&&x| x == value).count()
}
with_avx2! {
    /// First index at or after `from` whose byte is not `value`; the length if there is none.
    pub fn run_end(mask: &[u8], from: usize, value: u8) -> usize = run_end_body
}

#[inline(always)]
fn all_ids_body(ids: &[i64]) -> u64 {
    ids.iter().fold(0, |bits, &id| bits | id as u64) >> 31
}
with_avx2! {
    /// 0 if no id is negative or above `i32::MAX`.
    pub fn id_overflow(ids: &[i64]) -> u64 = all_ids_body
}

/// Asks for an item to be brought into the caches; a number that the slice does not have is nothing.
#[inline(always)]
pub fn prefetch<T>(items: &[T], at: u32) {
    #[cfg(target_arch = "x86_64")]
    if let Some(item) = items.get(at as usize) {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: reads nothing; every x86-64 processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(item).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box((items.len(), at));
}

#[inline(always)]
pub fn iota_i32(to: &mut [i32], start: i32) {
    Stores::Plain.iota_i32(to, start)
}

/// More than this has mostly left the caches when all of it is written. Trees of 70 to 290 MB are written and read once in
/// a sixth less time past the caches, those of 8 MB in a sixth more.
const CACHED: usize = 32 << 20;
/// Shorter runs than this many bytes are written plainly: the lines at their ends are written in parts, which costs more
/// past the caches (answers of 40 to 250 tokens took a sixth longer).
const RUN: usize = 4096;
/// Bytes of a cache line.
const LINE: usize = 64;

/// How arrays are written. A plain store reads the line that it overwrites; where the lines are not in the caches, and
/// will have left them before anyone reads, stores past the caches save that reading.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stores {
    Plain,
    PastCaches,
}

impl Stores {
    /// For so many bytes in all.
    pub fn of(bytes: usize) -> Self {
        if bytes > CACHED && cfg!(target_arch = "x86_64") {
            Stores::PastCaches
        } else {
            Stores::Plain
        }
    }

    #[inline(always)]
    pub fn iota_i64(self, to: &mut [i64], start: i64) {
        self.write::<i64, 8>(to, |i| start + i as i64);
    }

    #[inline(always)]
    pub fn iota_i32(self, to: &mut [i32], start: i32) {
        self.write::<i32, 16>(to, |i| start.wrapping_add(i as i32));
    }

    #[inline(always)]
    pub fn fill<T: Pod>(self, to: &mut [T], value: T) {
        match size_of::<T>() {
            4 => self.write::<T, 16>(to, |_| value),
            _ => to.fill(value),
        }
    }

    /// Copies ids and returns the bitwise or of all of them shifted to the range test: 0 if none is negative or above
    /// `i32::MAX`.
    #[inline(always)]
    pub fn copy_ids(self, to: &mut [i64], from: &[i64]) -> u64 {
        let mut bits = 0u64;
        if self == Stores::Plain {
            for (x, &id) in to.iter_mut().zip(from) {
                bits |= id as u64;
                *x = id;
            }
            return bits >> 31;
        }
        from.iter().for_each(|&id| bits |= id as u64);
        self.copy(to, from);
        bits >> 31
    }

    #[inline(always)]
    pub fn narrow(self, to: &mut [i32], from: &[i64]) {
        let from = &from[..to.len()];
        self.write::<i32, 16>(to, |i| from[i] as i32);
    }

    /// Copies as many values as `to` has.
    #[inline(always)]
    pub fn copy<T: Pod>(self, to: &mut [T], from: &[T]) {
        let from = &from[..to.len()];
        match size_of::<T>() {
            8 => self.write::<T, 8>(to, |i| from[i]),
            4 => self.write::<T, 16>(to, |i| from[i]),
            _ => to.copy_from_slice(from),
        }
    }

    #[inline(always)]
    pub fn copy_bytes(self, to: &mut [u8], from: &[u8]) {
        match (bytemuck::try_cast_slice_mut::<u8, u32>(to), bytemuck::try_cast_slice::<u8, u32>(from)) {
            (Ok(to), Ok(from)) => self.copy(to, from),
            _ => to.copy_from_slice(from),
        }
    }

    /// `to[i] = value(i)`; `N` values are a line.
    #[inline(always)]
    fn write<T: Pod, const N: usize>(self, to: &mut [T], value: impl Fn(usize) -> T) {
        let (mut lines, length) = (0..0, to.len());
        #[cfg(target_arch = "x86_64")]
        if self == Stores::PastCaches && size_of_val(to) >= RUN {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            let start = to.as_ptr().align_offset(LINE).min(length);
            lines = start..start + (length - start) / N * N;
            for at in lines.clone().step_by(N) {
                let line: [T; N] = std::array::from_fn(|i| value(at + i));
                let from = line.as_ptr().cast::<__m128i>();
                for part in 0..LINE / size_of::<__m128i>() {
                    // SAFETY: `at + N <= lines.end <= length`, the address is that of a line, and N values are one.
                    unsafe {
                        let to = to.as_mut_ptr().add(at).cast::<__m128i>().add(part);
                        _mm_stream_si128(to, _mm_loadu_si128(from.add(part)));
                    }
                }
            }
        }
        for (i, x) in to[..lines.start].iter_mut().enumerate() {
            *x = value(i);
        }
        for (i, x) in to[lines.end..].iter_mut().enumerate() {
            *x = value(lines.end + i);
        }
    }

    /// Before others may read what was written.
    pub fn finish(self) {
        #[cfg(target_arch = "x86_64")]
        if self == Stores::PastCaches {
            // SAFETY: a fence touches no memory.
            unsafe { std::arch::x86_64::_mm_sfence() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefix_stops_at_the_first_difference_of_any_length() {
        for n in 0..100 {
            let a: Vec<i64> = (0..n).collect();
            assert_eq!(common_prefix(&a, &a), n as usize);
            for at in 0..n as usize {
                let mut b = a.clone();
                b[at] = -1;
                assert_eq!(common_prefix(&a, &b), at);
                assert_eq!(common_prefix(&a, &b[..at]), at);
                let (x, y): (Vec<u8>, Vec<u8>) =
                    (a.iter().map(|&v| v as u8).collect(), b.iter().map(|&v| v as u8).collect());
                assert_eq!(common_prefix_bytes(&x, &y), at);
            }
        }
    }

    /// What was compiled for AVX2, the same body for the baseline, and one by one: slices of every length up to four
    /// blocks at several alignments.
    #[test]
    fn every_length_and_alignment_gives_what_one_by_one_gives() {
        let plain: Vec<i64> = (0..170).map(|at| at * 7919 % 1000).collect();
        for (length, start) in (0..131usize).flat_map(|length| [0, 1, 3, 31].map(|start| (length, start))) {
            let a = &plain[start..start + length];
            let zeros = vec![0u8; start + length];
            for at in (0..length).step_by(3).chain(length.checked_sub(1)) {
                let mut other = plain.clone();
                other[start + at] ^= 1 << 40;
                let b = &other[start..start + length];
                assert_eq!((common_prefix(a, b), common_prefix_body(a, b)), (at, at));
                assert_eq!((id_overflow(b) != 0, all_ids_body(b) != 0), (true, true));
                let mut mask = zeros.clone();
                mask[start + at] = 128;
                let mask = &mask[start..];
                assert_eq!((run_end(mask, 0, 0), run_end_body(mask, 0, 0)), (at, at));
                assert_eq!(common_prefix_bytes(mask, &zeros[start..]), at);
                assert_eq!(common_prefix_body(mask, &zeros[start..]), at);
            }
            assert_eq!((common_prefix(a, a), id_overflow(a), run_end(&zeros[start..], 0, 0)), (length, 0, length));
        }
    }

    #[test]
    fn stores_past_the_caches_write_what_plain_ones_write() {
        let ids: Vec<i64> = (0..3000).map(|at| at * 7919 % 1000).collect();
        let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
        for (length, start) in
            [0, 1, 600, 1023, 1024, 1025, 1040, 2500].into_iter().flat_map(|n| [(n, 0), (n, 1), (n, 13)])
        {
            let written = [Stores::Plain, Stores::PastCaches].map(|stores| {
                let (mut longs, mut ints) = (vec![-1i64; 3000], vec![[-1i32; 3000]; 4]);
                let (mut copied, mut plain) = (vec![-1i64; 3000], vec![255u8; 3000]);
                let range = start..start + length;
                let from = &ids[7..7 + length];
                stores.iota_i64(&mut longs[range.clone()], 5);
                stores.iota_i32(&mut ints[0][range.clone()], -5);
                stores.fill(&mut ints[1][range.clone()], 17);
                stores.narrow(&mut ints[2][range.clone()], from);
                stores.fill(bytemuck::cast_slice_mut::<i32, [u8; 4]>(&mut ints[3][range.clone()]), [1, 2, 3, 4]);
                assert_eq!(stores.copy_ids(&mut copied[range.clone()], from), 0);
                stores.copy_bytes(&mut plain[range.clone()], &bytes[4..4 + length]);
                stores.finish();
                (longs, ints, copied, plain)
            });
            assert!(written[0] == written[1], "{length} values from {start}");
            assert_eq!(written[0].2[start..start + length], ids[7..7 + length]);
            assert_eq!(written[0].2[start + length], -1);
        }
        let mut to = vec![0; 1200];
        let mut from = vec![3i64; 1200];
        from[1100] = -1;
        assert!([Stores::Plain, Stores::PastCaches].iter().all(|stores| stores.copy_ids(&mut to, &from) != 0));
    }

    #[test]
    fn run_end_finds_the_first_other_byte() {
        let mut mask = vec![0u8; 90];
        mask[70] = 1;
        assert_eq!(run_end(&mask, 0, 0), 70);
        assert_eq!(run_end(&mask, 70, 1), 71);
        assert_eq!(run_end(&mask, 71, 0), 90);
        assert_eq!(run_end(&mask, 90, 0), 90);
    }
}
