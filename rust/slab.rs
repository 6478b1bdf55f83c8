//! Memory for packed trees: pages that were used before. Fresh pages cost more than the packing itself, so what the
//! last view of a packing gives back is kept for the next one.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

use memmap2::MmapMut;

/// Pieces kept for reuse, at most.
const POOL_PIECES: usize = 8;
/// A piece that was not used again while this many others were taken goes back to the system.
const POOL_AGE: u64 = 16;
/// Pieces are a multiple of this size, the size of a huge page.
const PIECE: usize = 2 << 20;

struct Pool {
    /// Free pieces, and how many had been taken when they came back.
    pieces: Vec<(MmapMut, u64)>,
    taken: u64,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { pieces: Vec::new(), taken: 0 });

fn pool() -> MutexGuard<'static, Pool> {
    // A panic under the lock leaves a pool that is still valid.
    POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Pool {
    /// The smallest piece that holds so many bytes; a small batch does not take the memory of a large one.
    fn take(&mut self, bytes: usize) -> Option<MmapMut> {
        let sizes = bytes..=(4 * bytes).max(8 * PIECE);
        let fitting = self.pieces.iter().enumerate().filter(|(_, (piece, _))| sizes.contains(&piece.len()));
        // Of equal ones the last that came back: it is still in the caches.
        let found = fitting.min_by_key(|&(at, (piece, _))| (piece.len(), std::cmp::Reverse(at))).map(|(at, _)| at);
        self.taken += 1;
        let piece = found.map(|at| self.pieces.remove(at).0);
        let oldest = self.taken.saturating_sub(POOL_AGE);
        self.pieces.retain(|&(_, since)| since >= oldest);
        piece
    }

    fn give_back(&mut self, piece: MmapMut) {
        if self.pieces.len() == POOL_PIECES {
            self.pieces.remove(0);
        }
        self.pieces.push((piece, self.taken));
    }
}

/// A page-aligned piece of memory with arbitrary content, given back to the pool when dropped.
pub struct Slab(Option<MmapMut>);

impl Slab {
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        if let Some(piece) = pool().take(bytes) {
            return Ok(Slab(Some(piece)));
        }
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
        if let Some(piece) = self.0.take() {
            pool().give_back(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(bytes: usize) -> MmapMut {
        MmapMut::map_anon(bytes).unwrap()
    }

    #[test]
    fn a_piece_is_taken_again_if_it_fits_well() {
        let mut pool = Pool { pieces: Vec::new(), taken: 0 };
        for size in [64 * PIECE, 16 * PIECE, 32 * PIECE] {
            pool.give_back(piece(size));
        }
        assert_eq!(pool.take(10 * PIECE).map(|p| p.len()), Some(16 * PIECE));
        assert_eq!(pool.take(PIECE).map(|p| p.len()), None);
        assert_eq!(pool.take(40 * PIECE).map(|p| p.len()), Some(64 * PIECE));
        assert_eq!(pool.take(40 * PIECE).map(|p| p.len()), None);
    }

    #[test]
    fn of_equal_pieces_the_last_one_is_taken() {
        let mut pool = Pool { pieces: Vec::new(), taken: 0 };
        let pieces = [piece(PIECE), piece(PIECE)];
        let last = pieces[1].as_ptr();
        pieces.into_iter().for_each(|piece| pool.give_back(piece));
        assert_eq!(pool.take(PIECE).map(|p| p.as_ptr()), Some(last));
    }

    #[test]
    fn unused_pieces_go_back_to_the_system() {
        let mut pool = Pool { pieces: Vec::new(), taken: 0 };
        pool.give_back(piece(100 * PIECE));
        for _ in 0..POOL_AGE + 1 {
            let taken = pool.take(PIECE).unwrap_or_else(|| piece(PIECE));
            pool.give_back(taken);
        }
        assert_eq!(pool.pieces.len(), 1);
        assert_eq!(pool.pieces[0].0.len(), PIECE);
    }

    #[test]
    fn two_slabs_at_a_time_are_apart() {
        let (a, b) = (Slab::new(PIECE).unwrap(), Slab::new(PIECE).unwrap());
        assert_ne!(a.address(), b.address());
    }
}
