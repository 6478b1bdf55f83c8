//! The inner loops over flat arrays, written so that the compiler vectorises them, and the choice of AVX2 at run time.

use std::ops::{BitOrAssign, BitXor};

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

#[inline(always)]
pub fn iota_i64(to: &mut [i64], start: i64) {
    for (i, x) in to.iter_mut().enumerate() {
        *x = start + i as i64;
    }
}

#[inline(always)]
pub fn iota_i32(to: &mut [i32], start: i32) {
    for (i, x) in to.iter_mut().enumerate() {
        *x = start.wrapping_add(i as i32);
    }
}

/// Copies ids and returns the bitwise or of all of them shifted to the range test: 0 if none is negative or above `i32::MAX`.
#[inline(always)]
pub fn copy_ids(to: &mut [i64], from: &[i64]) -> u64 {
    let mut bits = 0u64;
    for (x, &id) in to.iter_mut().zip(from) {
        bits |= id as u64;
        *x = id;
    }
    bits >> 31
}

#[inline(always)]
pub fn narrow(to: &mut [i32], from: &[i64]) {
    for (x, &id) in to.iter_mut().zip(from) {
        *x = id as i32;
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
    fn run_end_finds_the_first_other_byte() {
        let mut mask = vec![0u8; 90];
        mask[70] = 1;
        assert_eq!(run_end(&mask, 0, 0), 70);
        assert_eq!(run_end(&mask, 70, 1), 71);
        assert_eq!(run_end(&mask, 71, 0), 90);
        assert_eq!(run_end(&mask, 90, 0), 90);
    }
}
