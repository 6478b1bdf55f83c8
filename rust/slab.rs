//! Memory for packed trees: pages that were used before. Fresh pages cost more than the packing itself, so what the
//! last view of a packing gives back is kept for the next one.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;

use memmap2::MmapMut;

/// Memory kept for reuse, at most. Beyond it, or beyond 8 pieces, the smallest piece goes back to the system.
const POOL_BYTES: usize = 1 << 30;
const POOL_PIECES: usize = 8;
/// Pieces are a multiple of this size, the size of a huge page.
const PIECE: usize = 2 << 20;

static POOL: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());

fn pool() -> std::sync::MutexGuard<'static, Vec<MmapMut>> {
    // A panic while the lock was held leaves a list that is still valid.
    POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A page-aligned piece of memory with arbitrary content, given back to the pool when dropped.
pub struct Slab(Option<MmapMut>);

impl Slab {
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let mut pool = pool();
        // A small batch does not take the memory of a large one.
        let sizes = bytes..=(4 * bytes).max(8 * PIECE);
        let fitting = pool.iter().enumerate().filter(|(_, piece)| sizes.contains(&piece.len()));
        if let Some((at, _)) = fitting.min_by_key(|(_, piece)| piece.len()) {
            return Ok(Slab(Some(pool.swap_remove(at))));
        }
        drop(pool);
        // A quarter more, so that batches that vary a little find their memory again.
        let piece = MmapMut::map_anon((bytes + bytes / 4).next_multiple_of(PIECE).max(PIECE))?;
        #[cfg(target_os = "linux")]
        // Refused on systems without huge pages; small pages work as well.
        let _ = piece.advise(memmap2::Advice::HugePage);
        Ok(Slab(Some(piece)))
    }

    /// Where the memory lies, for views that outlive the borrow and keep the slab alive otherwise.
    pub fn address(&self) -> *mut u8 {
        self.as_ptr() as *mut u8
    }
}

impl Deref for Slab {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or(&[])
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or(&mut [])
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let Some(piece) = self.0.take() else { return };
        let mut pool = pool();
        pool.push(piece);
        while pool.len() > POOL_PIECES || pool.iter().map(|piece| piece.len()).sum::<usize>() > POOL_BYTES {
            let Some((at, _)) = pool.iter().enumerate().min_by_key(|(_, piece)| piece.len()) else { break };
            pool.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_only_after_the_drop() {
        let first = Slab::new(100 << 20).unwrap();
        let second = Slab::new(100 << 20).unwrap();
        assert_ne!(first.address(), second.address());
        let address = first.address() as usize;
        drop(first);
        assert_eq!(Slab::new(100 << 20).unwrap().address() as usize, address);
    }
}
