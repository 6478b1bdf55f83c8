//! Padded batches -> where the tokens of each row lie, and masks of any integer type as bytes.

use std::ops::{BitOrAssign, BitXor};

use crate::simd::{run_end_body, with_avx2};

/// The integers of a mask, seen without their sign: 0 and 1 have the same bits in both.
pub trait Bits: bytemuck::Pod + Default + PartialEq + From<u8> + BitXor<Output = Self> + BitOrAssign {
    /// The lowest byte.
    fn low(self) -> u8;
    fn token_spans(mask: &[Self], rows: usize, starts: &mut [i64], ends: &mut [i64]) -> bool;
    fn mask_bytes(mask: &[Self], to: &mut [u8]) -> bool;
}

macro_rules! bits {
    ($($word:ident: $module:ident),*) => { $(
        mod $module {
            use super::*;
            with_avx2! {
                fn token_spans(mask: &[$word], rows: usize, starts: &mut [i64], ends: &mut [i64]) -> bool = token_spans_body
            }
            with_avx2! {
                fn mask_bytes(mask: &[$word], to: &mut [u8]) -> bool = mask_bytes_body
            }
            impl Bits for $word {
                #[inline(always)]
                fn low(self) -> u8 {
                    self as u8
                }
                fn token_spans(mask: &[Self], rows: usize, starts: &mut [i64], ends: &mut [i64]) -> bool {
                    token_spans(mask, rows, starts, ends)
                }
                fn mask_bytes(mask: &[Self], to: &mut [u8]) -> bool {
                    mask_bytes(mask, to)
                }
            }
        }
    )* };
}
bits!(u8: one_byte, u16: two_bytes, u32: four_bytes, u64: eight_bytes);

/// Where the tokens of each row of an attention mask (rows, width) lie in the flattened batch, or `None` where a row
/// has a hole between tokens, or a value that is neither 0 nor 1. A row without a token is an empty span. One pass.
pub fn token_spans<T: Bits>(mask: &[T], rows: usize) -> Option<(Vec<i64>, Vec<i64>)> {
    let (mut starts, mut ends) = (vec![0; rows], vec![0; rows]);
    T::token_spans(mask, rows, &mut starts, &mut ends).then_some((starts, ends))
}

#[inline(always)]
fn token_spans_body<T: Bits>(mask: &[T], rows: usize, starts: &mut [i64], ends: &mut [i64]) -> bool {
    let width = mask.len() / rows.max(1);
    for row in 0..rows {
        let values = &mask[row * width..(row + 1) * width];
        let start = run_end_body(values, 0, T::from(0));
        let end = run_end_body(values, start, T::from(1));
        if run_end_body(values, end, T::from(0)) < width {
            return false;
        }
        starts[row] = (row * width + start) as i64;
        ends[row] = (row * width + end) as i64;
    }
    true
}

/// Some samples of a flat mask end to end, one byte for each token; `None` where a value is neither 0 nor 1.
pub fn mask_bytes<T: Bits>(samples: &[&[T]]) -> Option<Vec<u8>> {
    let mut out = vec![0; samples.iter().map(|mask| mask.len()).sum()];
    let mut rest = &mut out[..];
    for mask in samples {
        let (to, behind) = rest.split_at_mut(mask.len());
        rest = behind;
        if !T::mask_bytes(mask, to) {
            return None;
        }
    }
    Some(out)
}

#[inline(always)]
fn mask_bytes_body<T: Bits>(mask: &[T], to: &mut [u8]) -> bool {
    let mut bits = T::default();
    for (to, &value) in to.iter_mut().zip(mask) {
        bits |= value;
        *to = value.low();
    }
    bits == T::from(0) || bits == T::from(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wide(mask: &[Vec<u8>]) -> Vec<u64> {
        mask.concat().into_iter().map(u64::from).collect()
    }

    #[test]
    fn three_rows() {
        let mask = [[1u8, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]].concat();
        assert_eq!(token_spans(&mask, 3), Some((vec![0, 7, 12], vec![2, 8, 12])));
        assert_eq!(token_spans(&[1u8, 0, 1], 1), None);
        assert_eq!(token_spans(&[1u8, 1, 2], 1), None);
        assert_eq!(token_spans(&[0xFFu8, 1, 1], 1), None);
        assert_eq!(token_spans::<u8>(&[], 2), Some((vec![0, 0], vec![0, 0])));
        assert_eq!(token_spans::<u8>(&[], 0), Some((vec![], vec![])));
    }

    #[test]
    fn bytes_of_a_mask() {
        let (a, b) = ([1u32, 0, 1], [0u32, 1]);
        assert_eq!(mask_bytes(&[&a, &[], &b]), Some(vec![1, 0, 1, 0, 1]));
        assert_eq!(mask_bytes(&[&a, &[0, 256][..]]), None);
        assert_eq!(mask_bytes::<u64>(&[]), Some(vec![]));
    }

    /// What was compiled for AVX2 against the same body for the baseline, and against what is known of the row: every
    /// length up to four blocks at several alignments, and a wrong value with any bit.
    macro_rules! lengths_and_alignments {
        ($($word:ident),*) => { $(
            for (length, shift) in (0..131).flat_map(|length| [0, 1, 3].map(|shift| (length, shift))) {
                let near = [0, 31, 32, 33, length / 2, length.max(1) - 1, length];
                for (start, end) in near.iter().flat_map(|&a| near.map(|b| (a, b))).filter(|&(a, b)| a < b && b <= length) {
                    let mut padded: Vec<$word> = vec![0; shift + length];
                    padded[shift + start..shift + end].fill(1);
                    let bytes: Vec<u8> = padded[shift..].iter().map(|&value| value as u8).collect();
                    let expected = Some((vec![start as i64], vec![end as i64]));
                    assert_eq!(spans(&padded[shift..]), [expected.clone(), expected]);
                    assert_eq!(narrow(&padded[shift..]), [Some(bytes.clone()), Some(bytes)]);
                    for bit in [1, 7, 8, 31, $word::BITS - 1].into_iter().filter(|&bit| bit < $word::BITS) {
                        let mut wrong = padded.clone();
                        wrong[shift + (start + end) / 2] ^= 1 << bit;
                        assert_eq!(spans(&wrong[shift..]), [None, None]);
                        assert_eq!(narrow(&wrong[shift..]), [None, None]);
                    }
                }
            }
        )* };
    }

    /// (starts, ends) of one row by either way.
    fn spans<T: Bits>(row: &[T]) -> [Option<(Vec<i64>, Vec<i64>)>; 2] {
        [T::token_spans, token_spans_body::<T>].map(|find| {
            let (mut starts, mut ends) = (vec![0], vec![0]);
            find(row, 1, &mut starts, &mut ends).then_some((starts, ends))
        })
    }

    /// Bytes of a mask by either way.
    fn narrow<T: Bits>(mask: &[T]) -> [Option<Vec<u8>>; 2] {
        [T::mask_bytes, mask_bytes_body::<T>].map(|narrow| {
            let mut to = vec![9; mask.len()];
            narrow(mask, &mut to).then_some(to)
        })
    }

    #[test]
    fn every_width_length_and_alignment() {
        lengths_and_alignments!(u8, u16, u32, u64);
    }

    proptest! {
        #[test]
        fn spans_are_where_the_ones_are(
            width in 0usize..200,
            runs in prop::collection::vec((0usize..200, 0usize..200), 0..5),
            hole in any::<Option<(prop::sample::Index, u8)>>(),
        ) {
            let mut mask: Vec<Vec<u8>> = Vec::new();
            for &(a, b) in &runs {
                mask.push((0..width).map(|at| (a.min(b)..a.max(b)).contains(&at) as u8).collect());
            }
            if let (Some((at, value)), true) = (hole, width * runs.len() > 0) {
                let at = at.index(width * runs.len());
                mask[at / width][at % width] = value;
            }
            let mut expected = Some((Vec::new(), Vec::new()));
            for (row, values) in mask.iter().enumerate() {
                let ones: Vec<usize> = (0..width).filter(|&at| values[at] != 0).collect();
                let start = ones.first().map_or(width, |&at| at);
                let end = start + ones.len();
                let one_run = ones.last().is_none_or(|&last| last + 1 == end);
                expected = expected.filter(|_| one_run && values.iter().all(|&x| x <= 1));
                if let Some((starts, ends)) = &mut expected {
                    starts.push((row * width + start) as i64);
                    ends.push((row * width + end) as i64);
                }
            }
            prop_assert_eq!(token_spans(&mask.concat(), mask.len()), expected.clone());
            prop_assert_eq!(token_spans(&wide(&mask), mask.len()), expected);
            let bytes = mask.concat().iter().all(|&x| x <= 1).then(|| mask.concat());
            prop_assert_eq!(mask_bytes(&[&wide(&mask)[..]]), bytes);
        }
    }
}
