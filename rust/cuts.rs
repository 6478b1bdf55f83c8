//! Where a tree is cut into ranges of rows, each small enough for one pass.
//!
//! In depth-first order a range `[a, b)` of rows needs, beside itself, exactly the ancestors of row a: one chain, of as
//! many rows as a is deep. A range *waits* where a later range needs some of its rows, that is where the parent of row b
//! lies in it: what its own backward pass needs stays until its last descendant is done.
//!
//! Of all ways to cut, the one taken cuts fewest segments inside, and among those costs least:
//!
//! ```text
//! cost of [a, b), in rows = a part of max_rows, for the pass itself
//!                         + the ancestors of a, whose keys it reads
//!                         + b - a where it waits, for what stays
//! ```
//!
//! so that a stem which many ranges need becomes a range of its own instead of keeping a full one waiting. O(c log c) for
//! c places where a cut may lie: the starts of segments, rows of segments that are longer than a range, and the row of a
//! segment at which `max_ancestors` is reached.

/// A pass costs as much as this part of a full range.
const PASSES: u32 = 16;
/// Places for a cut in a segment that is longer than a range: so many for each range.
const INSIDE: u32 = 64;
/// More than any sum of costs.
const CUT_INSIDE: i128 = 1 << 80;
const NEVER: i128 = i128::MAX / 2;

/// A row before which the tree may be cut.
#[derive(Clone, Copy)]
struct Place {
    row: u32,
    /// Its ancestors.
    depth: u32,
    inside: bool,
    /// Places up to this number lie at or before the row's parent; 0: it has none.
    behind_parent: u32,
}

/// The boundaries of the ranges: from 0 to the number of rows. `Err(row)`: all of the rows from this one that are deeper
/// than `max_ancestors` follow each other, with the row before them, over more than `max_rows`.
///
/// `cu_segments` are the offsets of the segments in depth-first order, `parents` the parent segment of each, -1 at a root.
pub fn cut(cu_segments: &[i32], parents: &[i32], max_rows: u32, max_ancestors: u32) -> Result<Vec<i32>, u32> {
    let places = places(cu_segments, parents, max_rows.max(1), max_ancestors);
    let rows = cu_segments.last().map_or(0, |&last| last as u32);
    let pass = i128::from(max_rows.div_ceil(PASSES));
    let mut before = vec![0u32; places.len() + 1];
    // What it costs to begin a range at each place, all before it included; the same less its row.
    let (mut begin, mut begin_less_row) = (Minimum::new(places.len()), Minimum::new(places.len()));
    let mut first = 0;
    for at in 0..=places.len() {
        let end = Place { row: rows, depth: 0, inside: false, behind_parent: 0 };
        let place = places.get(at).copied().unwrap_or(end);
        let mut cost = 0;
        if at > 0 {
            while first < at && place.row - places[first].row > max_rows {
                first += 1;
            }
            let waits = (place.behind_parent as usize).max(first);
            let (free, from_free) = begin.least(waits, at);
            let (waiting, from_waiting) = begin_less_row.least(first, waits);
            let waiting = waiting + place.row as i128;
            // Of equal costs the longer range, which begins earlier.
            (cost, before[at]) = if waiting <= free { (waiting, from_waiting) } else { (free, from_free) };
            if cost >= NEVER / 2 {
                return Err(places[at - 1].row);
            }
        }
        if at < places.len() {
            cost += pass + place.depth as i128 + if place.inside { CUT_INSIDE } else { 0 };
            begin.set(at, cost);
            begin_less_row.set(at, cost - place.row as i128);
        }
    }
    let mut out = vec![rows as i32];
    let mut at = places.len();
    while at > 0 {
        at = before[at] as usize;
        out.push(places[at].row as i32);
    }
    out.reverse();
    Ok(out)
}

fn places(cu_segments: &[i32], parents: &[i32], max_rows: u32, max_ancestors: u32) -> Vec<Place> {
    let mut out = Vec::with_capacity(parents.len());
    // Of each segment: the depth below it, and the number of places up to its last row.
    let mut below = Vec::with_capacity(parents.len());
    for (segment, &parent) in parents.iter().enumerate() {
        let (start, stop) = (cu_segments[segment] as u32, cu_segments[segment + 1] as u32);
        let (depth, behind_parent) = if parent < 0 { (0, 0) } else { below[parent as usize] };
        let mut add = |row: u32, inside: bool| {
            let depth = depth + (row - start);
            if depth <= max_ancestors {
                let behind_parent = if inside { out.len() as u32 } else { behind_parent };
                out.push(Place { row, depth, inside, behind_parent });
            }
        };
        add(start, false);
        let step = if stop - start > max_rows { max_rows.div_ceil(INSIDE).max(1) } else { stop - start };
        let deepest = start.saturating_add(max_ancestors.saturating_sub(depth)).max(start);
        let mut row = start;
        while row < stop {
            let next = row.saturating_add(step);
            if row < deepest && deepest < next.min(stop) {
                add(deepest, true);
            }
            if next < stop {
                add(next, true);
            }
            row = next;
        }
        below.push((depth + (stop - start), out.len() as u32));
    }
    out
}

/// The least of values and its place, over any stretch of places. O(log n) to set and to ask.
struct Minimum {
    /// A heap of halves; the places are its leaves.
    values: Vec<(i128, u32)>,
    leaves: usize,
}

impl Minimum {
    fn new(count: usize) -> Self {
        let leaves = count.next_power_of_two().max(1);
        Minimum { values: vec![(NEVER, u32::MAX); 2 * leaves], leaves }
    }

    fn set(&mut self, place: usize, value: i128) {
        let mut at = self.leaves + place;
        self.values[at] = (value, place as u32);
        while at > 1 {
            at /= 2;
            self.values[at] = self.values[2 * at].min(self.values[2 * at + 1]);
        }
    }

    /// Over `from..to`; of equal values the first.
    fn least(&self, from: usize, to: usize) -> (i128, u32) {
        let mut best = (NEVER, u32::MAX);
        if from >= to {
            return best;
        }
        let (mut from, mut to) = (from + self.leaves, to + self.leaves);
        while from < to {
            if from & 1 == 1 {
                best = best.min(self.values[from]);
                from += 1;
            }
            if to & 1 == 1 {
                to -= 1;
                best = best.min(self.values[to]);
            }
            from /= 2;
            to /= 2;
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: u32 = u32::MAX;

    /// 0 - 1 - 2 ─┬─ 3 - 4      and  8 - 9
    ///            └─ 5 - 6 - 7
    const ENDS: [i32; 5] = [0, 3, 5, 8, 10];
    const PARENTS: [i32; 4] = [-1, 0, 0, -1];

    #[test]
    fn a_tree_that_fits_is_one_range() {
        assert_eq!(cut(&ENDS, &PARENTS, 10, ANY), Ok(vec![0, 10]));
        assert_eq!(cut(&[0], &[], 4, ANY), Ok(vec![0]));
    }

    #[test]
    fn cuts_lie_at_segments_where_they_can() {
        // All of the first tree, then the second: nothing waits.
        assert_eq!(cut(&ENDS, &PARENTS, 8, ANY), Ok(vec![0, 8, 10]));
        // No segment is longer than 3, so none is cut, though 4 + 4 + 2 rows would be as few ranges.
        assert_eq!(cut(&ENDS, &PARENTS, 4, ANY), Ok(vec![0, 3, 5, 8, 10]));
        // Two ranges would do, [0, 5) and [5, 10), but all five rows of the first would wait.
        assert_eq!(cut(&ENDS, &PARENTS, 5, ANY), Ok(vec![0, 3, 8, 10]));
    }

    #[test]
    fn a_long_segment_is_cut_inside() {
        assert_eq!(cut(&[0, 7], &[-1], 3, ANY), Ok(vec![0, 1, 4, 7]));
        assert_eq!(cut(&[0, 3], &[-1], 1, ANY), Ok(vec![0, 1, 2, 3]));
    }

    #[test]
    fn ancestors_are_bounded() {
        // Rows 3, 4, 5, 6, 7 have 3, 4, 3, 4, 5 ancestors.
        assert_eq!(cut(&ENDS, &PARENTS, 4, 2), Err(2));
        assert_eq!(cut(&ENDS, &PARENTS, 6, 2), Ok(vec![0, 2, 8, 10]));
        assert_eq!(cut(&[0, 7], &[-1], 3, 3), Err(3));
        assert_eq!(cut(&[0, 7], &[-1], 3, 4), Ok(vec![0, 1, 4, 7]));
    }

    #[test]
    fn a_stem_becomes_a_range_of_its_own() {
        // A stem of 40 rows and 8 branches of 50: no range of 100 that waits holds more than the stem.
        let ends: Vec<i32> = std::iter::once(0).chain((0..9).map(|i| 40 + 50 * i)).collect();
        let parents: Vec<i32> = std::iter::once(-1).chain([0; 8]).collect();
        assert_eq!(cut(&ends, &parents, 100, ANY), Ok(vec![0, 40, 140, 240, 340, 440]));
    }
}
