//! Which tiles of the attention matrix hold a visible pair: segments to tile lists, in O(segments + visible tiles).
//!
//! A query q sees a key k when `k <= q < subtree_end[k]`. For square tiles of `tile` tokens, key tile n is
//! *visible* to query tile m when n is not after m and `max(subtree_end in n)` lies past the start of m; it is *full*
//! (no mask needed) when it lies wholly at or before the start of m and `min(subtree_end in n)` reaches the end of m; else it is *partial*.
//!
//! Lists per query tile, as the kernels read them (python/treepack/attention/tiles.py writes the same):
//!
//! ```text
//! rows   (tiles, 4)  start, runs, full tiles in them, partials
//! items  (T,)        from start: first, last (exclusive) of each run of full tiles, then the partial tiles, all ascending
//! ```
//!
//! A key tile is visible from its own query tile until its last subtree ends and never again, so one list of the tiles
//! still alive is swept once over the query tiles: what is emitted is what is looked at, and a tile is dropped once.

/// Tile sizes for which lists are made: the forward kernels read the first, those of dQ the second.
pub const TILE_SIZES: [usize; 2] = [128, 64];

/// A run of full tiles shorter than this is listed as partial tiles: masking them costs less than a kernel loop of their own.
pub const MIN_RUN: usize = 2;

/// Numbers after the last list, which the kernels' walk over the runs may read.
const SPARE: usize = 2;

/// The lists of one tile size.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TileLists {
    /// (tiles, 4), flat: start, runs, full tiles in them, partials of each query tile.
    pub rows: Vec<i32>,
    /// Pairs of the runs, then the partial tiles, query tile by query tile.
    pub items: Vec<i32>,
}

/// Builds the lists for tiles of `tile` tokens.
///
/// `cu_segments` are the offsets of the segments (empty, or starting at 0), whose tokens share `subtree_end`; what follows the last segment is
/// padding, which sees and is seen by nothing. Returns `None` where the items would not be indexed by an int32.
pub fn tile_lists(cu_segments: &[i32], subtree_end: &[i32], tile: usize) -> Option<TileLists> {
    let tokens = subtree_end.len();
    let tiles = tokens.div_ceil(tile);
    let (largest, smallest) = ends_per_tile(cu_segments, subtree_end, tile, tiles);

    let mut lists = TileLists { rows: Vec::with_capacity(3 * tiles), items: Vec::new() };
    let mut alive: Vec<usize> = Vec::new();
    let mut partials: Vec<i32> = Vec::new();
    for m in 0..tiles {
        let first = m * tile;
        let last = (first + tile).min(tokens);
        alive.push(m);
        alive.retain(|&n| largest[n] > first);

        let start = lists.items.len();
        partials.clear();
        let mut run: (usize, usize) = (0, 0);
        for &n in &alive {
            if (n + 1) * tile <= first + 1 && smallest[n] >= last {
                if run.1 != n {
                    close_run(run, &mut lists.items, &mut partials);
                    run = (n, n);
                }
                run.1 = n + 1;
            } else {
                close_run(run, &mut lists.items, &mut partials);
                run = (0, 0);
                partials.push(n as i32);
            }
        }
        close_run(run, &mut lists.items, &mut partials);
        let runs = (lists.items.len() - start) / 2;
        lists.items.extend_from_slice(&partials);
        i32::try_from(lists.items.len()).ok()?;
        let fulls: i32 = lists.items[start..start + 2 * runs].chunks_exact(2).map(|run| run[1] - run[0]).sum();
        lists.rows.extend([start as i32, runs as i32, fulls, partials.len() as i32]);
    }
    lists.items.extend([0; SPARE]);
    Some(lists)
}

/// The largest and the smallest subtree end in each tile: 0 and 0 where padding is in it (so that it is never full).
fn ends_per_tile(cu_segments: &[i32], subtree_end: &[i32], tile: usize, tiles: usize) -> (Vec<usize>, Vec<usize>) {
    let mut largest = vec![0; tiles];
    let mut smallest = vec![usize::MAX; tiles];
    for pair in cu_segments.windows(2) {
        let (start, stop) = (pair[0] as usize, pair[1] as usize);
        if start == stop {
            continue;
        }
        let end = subtree_end[start] as usize;
        for n in start / tile..=(stop - 1) / tile {
            largest[n] = largest[n].max(end);
            smallest[n] = smallest[n].min(end);
        }
    }
    let real = cu_segments.last().map_or(0, |&end| end as usize);
    if real < subtree_end.len() {
        smallest[real / tile..].fill(0);
    }
    (largest, smallest)
}

fn close_run(run: (usize, usize), runs: &mut Vec<i32>, partials: &mut Vec<i32>) {
    if run.1 - run.0 >= MIN_RUN {
        runs.extend([run.0 as i32, run.1 as i32]);
    } else {
        partials.extend((run.0..run.1).map(|n| n as i32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws a forest of `tokens` tokens: (cu_segments, subtree_end), by a walk that branches at random.
    fn forest(tokens: usize, padding: usize, seed: &mut u64) -> (Vec<i32>, Vec<i32>) {
        let mut draw = |below: usize| {
            *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (*seed >> 33) as usize % below.max(1)
        };
        let mut cu = vec![0];
        let mut end = vec![0i32; tokens];
        let mut open: Vec<usize> = Vec::new(); // starts of the segments on the current path
        let mut at = 0;
        while at < tokens {
            let keep = draw(open.len() + 1);
            for &start in &open[keep..] {
                end[start] = at as i32;
            }
            open.truncate(keep);
            open.push(at);
            at = (at + 1 + draw(40)).min(tokens);
            cu.push(at as i32);
        }
        for &start in &open {
            end[start] = tokens as i32;
        }
        for pair in cu.windows(2) {
            let value = end[pair[0] as usize];
            end[pair[0] as usize..pair[1] as usize].fill(value);
        }
        end.extend((tokens..tokens + padding).map(|k| k as i32));
        (cu, end)
    }

    fn unpack(lists: &TileLists, m: usize) -> (Vec<usize>, Vec<usize>) {
        let [start, runs, fulls, partials] = [0, 1, 2, 3].map(|i| lists.rows[4 * m + i] as usize);
        let items: Vec<usize> = lists.items[start..].iter().map(|&n| n as usize).collect();
        let full: Vec<usize> = items[..2 * runs].chunks(2).flat_map(|pair| pair[0]..pair[1]).collect();
        assert_eq!(full.len(), fulls);
        (full, items[2 * runs..2 * runs + partials].to_vec())
    }

    #[test]
    fn a_chain_is_one_run_and_the_diagonal() {
        let lists = tile_lists(&[0, 8], &[8; 8], 2).unwrap();
        assert_eq!(lists.rows, [0, 0, 0, 1, 1, 0, 0, 2, 3, 1, 2, 1, 6, 1, 3, 1]);
        assert_eq!(lists.items, [0, 0, 1, 0, 2, 2, 0, 3, 3, 0, 0]);
    }

    #[test]
    fn two_samples_do_not_see_each_other() {
        let lists = tile_lists(&[0, 4, 8], &[4, 4, 4, 4, 8, 8, 8, 8], 4).unwrap();
        assert_eq!(lists.rows, [0, 0, 0, 1, 1, 0, 0, 1]);
        assert_eq!(lists.items, [0, 1, 0, 0]);
    }

    #[test]
    fn padding_is_listed_nowhere() {
        let lists = tile_lists(&[0, 2], &[2, 2, 2, 3, 4, 5], 2).unwrap();
        assert_eq!(lists.rows, [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(lists.items, [0, 0, 0]);
        assert_eq!(tile_lists(&[0], &[], 64), Some(TileLists { rows: vec![], items: vec![0, 0] }));
    }

    #[test]
    fn brute_force() {
        let mut seed = 1;
        for round in 0..400 {
            let (tokens, tile) = (1 + round * 3 % 331, [4, 8, 16][round % 3]);
            let (cu, end) = forest(tokens, round % 7 * 3, &mut seed);
            let total = end.len();
            let lists = tile_lists(&cu, &end, tile).unwrap();
            let sees = |q: usize, k: usize| k <= q && q < end[k] as usize;
            for m in 0..total.div_ceil(tile) {
                let queries = m * tile..((m + 1) * tile).min(total);
                let (full, partial) = unpack(&lists, m);
                assert!(full.is_sorted() && partial.is_sorted());
                for n in 0..total.div_ceil(tile) {
                    let keys = n * tile..((n + 1) * tile).min(total);
                    let any = queries.clone().any(|q| keys.clone().any(|k| sees(q, k)));
                    let all = queries.clone().all(|q| keys.clone().all(|k| sees(q, k)));
                    assert_eq!(full.contains(&n) || partial.contains(&n), any, "tile {m} {n} of {end:?}");
                    assert!(!full.contains(&n) || all);
                    let alone = (n == 0 || !full.contains(&(n - 1))) && !full.contains(&(n + 1));
                    assert!(!full.contains(&n) || !alone, "a run of one tile");
                }
            }
        }
    }

    #[test]
    fn wide_and_deep_forests_stay_linear() {
        // 2^18 roots of one token, then a chain of as many segments of one token: a quadratic step would not end.
        let n = 1 << 18;
        let cu: Vec<i32> = (0..=n).collect();
        let roots: Vec<i32> = (1..=n).collect();
        assert_eq!(tile_lists(&cu, &roots, 64).unwrap().items.len(), n as usize / 64 + SPARE);
        let lists = tile_lists(&cu, &vec![n; n as usize], 64).unwrap();
        assert!(lists.items.len() <= 3 * n as usize / 64 + 1 + SPARE);
    }
}
