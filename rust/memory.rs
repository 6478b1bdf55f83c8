//! How much memory a packing may need, asked for before it is taken. Rust ends the process where an allocation fails,
//! so a call for which there is not enough has to be refused before.

use crate::error::Fault;

/// Below this nothing is asked: where so little is missing, whatever comes next fails as well.
const ASKED_FROM: u64 = 16 << 20;
/// Bytes for a sample (its nodes in the trie, what placement knows of them), a run of its mask, a loss term with a kept
/// set: the most that any input takes, `tests/memory.rs` measures it.
const SAMPLE: u64 = 800;
const RUN: u64 = 64;
const KEPT_TERM: u64 = 64;

/// Bytes that a packing holds at most beside its input and its trees, for which it asks apart.
pub fn working_bytes(samples: usize, runs: usize, kept_terms: usize) -> u64 {
    let counts = [(samples, SAMPLE), (runs, RUN), (kept_terms, KEPT_TERM)];
    counts.iter().fold(1 << 20, |bytes, &(count, each)| bytes + count as u64 * each)
}

/// An error where so many bytes are not to be had at once. Takes none of them.
pub fn ask(bytes: u64) -> Result<(), Fault> {
    if bytes < ASKED_FROM {
        return Ok(());
    }
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    Vec::<u8>::new().try_reserve_exact(size).map_err(|error| Fault::memory(bytes, error))
}

/// Room for so many more items, or an error.
pub fn room_for<T>(items: &mut Vec<T>, more: usize) -> Result<(), Fault> {
    let bytes = (items.len() + more) as u64 * size_of::<T>() as u64;
    items.try_reserve(more).map_err(|error| Fault::memory(bytes, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_to_be_had_is_an_error() {
        assert_eq!(ask(ASKED_FROM), Ok(()));
        for bytes in [1 << 62, u64::MAX] {
            assert!(matches!(ask(bytes), Err(Fault::Memory { bytes: b, .. }) if b == bytes));
        }
        let mut items = vec![1u32];
        assert!(matches!(room_for(&mut items, usize::MAX / 8), Err(Fault::Memory { .. })));
        assert_eq!((room_for(&mut items, 100), items), (Ok(()), vec![1]));
    }
}
