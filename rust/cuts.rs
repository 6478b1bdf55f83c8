//! Where a tree is cut into ranges of rows, each small enough for one pass.
//!
//! In depth-first order a range `[a, b)` of rows needs, beside itself, exactly the ancestors of row a: one chain, of as
//! many rows as a is deep. A range *waits* where a later range needs some of its rows, that is where the parent of row b
//! lies in it: what its own backward pass needs stays until its last descendant is done.
//!
//! Of all ways to cut, the one taken cuts fewest segments inside, and among those costs least:
//!
//! ```text
//! cost of [a, b), in rows = a sixteenth of max_rows, for the pass itself
//!                         + what b - a lacks to half of max_rows: a short pass takes as long as its launches
//!                         + an eighth of the ancestors of a, whose keys it reads
//!                         + an eighth of b - a where it waits: what it keeps goes to the host and back
//! ```
//!
//! An ancestor takes memory beside the rows, for its keys, its values and their gradients. So a range is shorter than
//! `max_rows` by a quarter of its ancestors, and one that waits by a quarter of those of the next range (but for this no
//! shorter than half of `max_rows`), unless that costs more than a sixteenth of all rows.
//!
//! O(c log c) for c places where a cut may lie: the starts of segments, rows of segments that are longer than a range, and
//! the row of a segment at which `max_ancestors` is reached.

/// A pass costs as much as this part of a full range, beside its rows.
const PASSES: u32 = 16;
/// A range of fewer rows than this part of a full one costs as much as one of so many.
const SHORT: u32 = 2;
/// An ancestor, or a row that waits, costs as much as this part of a row. Costs are counted in such parts.
const PART: i128 = 8;
/// A range with ancestors is shorter by this part of their number, ...
const ANCESTORS: u32 = 4;
/// ... but no shorter than this part of a full one.
const SHORTEST: u32 = 2;
/// Shorter ranges may cost this part of all rows more.
const DEARER: i128 = 16;
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
    let (full, full_cost) = cut_by(cu_segments, parents, max_rows, max_ancestors, |_| max_rows)?;
    let dearer = PART * cu_segments.last().map_or(0, |&rows| i128::from(rows)) / DEARER;
    match cut_by(cu_segments, parents, max_rows, max_ancestors, |depth| most_rows(max_rows, depth)) {
        Ok((shorter, cost)) if cost <= full_cost + dearer => Ok(shorter),
        _ => Ok(full),
    }
}

/// The most rows of a range that begins at a depth.
fn most_rows(max_rows: u32, depth: u32) -> u32 {
    max_rows.saturating_sub(depth / ANCESTORS).max(max_rows.div_ceil(SHORTEST))
}

/// The boundaries, and what they cost beside the rows.
///
/// `most`: the most rows of a range by the depth where it begins, from `max_rows` down; it falls slower than depth rises.
fn cut_by(
    cu_segments: &[i32],
    parents: &[i32],
    max_rows: u32,
    max_ancestors: u32,
    most: impl Fn(u32) -> u32,
) -> Result<(Vec<i32>, i128), u32> {
    let places = places(cu_segments, parents, max_rows.max(1), max_ancestors, &most);
    let rows = cu_segments.last().map_or(0, |&last| last as u32);
    let pass = PART * i128::from(max_rows.div_ceil(PASSES));
    let short = max_rows / SHORT;
    let mut before = vec![0u32; places.len() + 1];
    // What it costs to begin a range at each place, all before it included, plus its row so many times as the cost of a
    // range grows with the row where it begins.
    let mut begin = Kind::ALL.map(|kind| (kind, Minimum::new(places.len())));
    let (mut first, mut long, mut cost) = (0, 0, 0);
    for at in 0..=places.len() {
        let end = Place { row: rows, depth: 0, inside: false, behind_parent: 0 };
        let place = places.get(at).copied().unwrap_or(end);
        cost = 0;
        if at > 0 {
            // A later place is past its most rows no earlier, since a row is at most one deeper than that before it.
            while first < at && place.row - places[first].row > most(places[first].depth) {
                first += 1;
            }
            // Ranges that begin before `long` are no shorter than `short`.
            while long < at && place.row - places[long].row >= short {
                long += 1;
            }
            let (long, waits) = (long.max(first), (place.behind_parent as usize).max(first));
            let least_row = place.row.saturating_sub(most(place.depth));
            let first_waits = first.max(places.partition_point(|place| place.row < least_row)).min(waits);
            let mut least = (NEVER, u32::MAX);
            for (kind, begin) in &begin {
                let (from, to) = if kind.waits { (first_waits, waits) } else { (waits, at) };
                let (from, to) = if kind.short { (from.max(long), to) } else { (from, to.min(long)) };
                let (found, place_of) = begin.least(from, to);
                // Of equal costs the longer range, which begins earlier.
                least = least.min((found + kind.at_end(place.row, short), place_of));
            }
            (cost, before[at]) = least;
            if cost >= NEVER / 2 {
                return Err(places[at - 1].row);
            }
        }
        if at < places.len() {
            cost += pass + place.depth as i128 + if place.inside { CUT_INSIDE } else { 0 };
            for (kind, begin) in &mut begin {
                begin.set(at, cost + kind.at_begin(place.row));
            }
        }
    }
    let mut out = vec![rows as i32];
    let mut at = places.len();
    while at > 0 {
        at = before[at] as usize;
        out.push(places[at].row as i32);
    }
    out.reverse();
    Ok((out, cost))
}

/// What the cost of a range depends on, beside where it begins.
#[derive(Clone, Copy)]
struct Kind {
    waits: bool,
    short: bool,
}

impl Kind {
    const ALL: [Kind; 4] = [
        Kind { waits: false, short: false },
        Kind { waits: false, short: true },
        Kind { waits: true, short: false },
        Kind { waits: true, short: true },
    ];

    /// The part of the cost that the first row of a range makes, ...
    fn at_begin(self, row: u32) -> i128 {
        -self.by_row(row)
    }

    /// ... and the row after its last one.
    fn at_end(self, row: u32, short: u32) -> i128 {
        self.by_row(row) + if self.short { PART * i128::from(short) } else { 0 }
    }

    fn by_row(self, row: u32) -> i128 {
        i128::from(row) * (i128::from(self.waits) - if self.short { PART } else { 0 })
    }
}

fn places(
    cu_segments: &[i32],
    parents: &[i32],
    max_rows: u32,
    max_ancestors: u32,
    most: impl Fn(u32) -> u32,
) -> Vec<Place> {
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
        let step = if stop - start > most(depth) { max_rows.div_ceil(INSIDE).max(1) } else { stop - start };
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
        // All of the first tree, then the second, would be 8 rows and 2: a short range costs more than 5 rows that wait.
        assert_eq!(cut(&ENDS, &PARENTS, 8, ANY), Ok(vec![0, 5, 10]));
        // No segment is longer than 3, so none is cut, though 4 + 4 + 2 rows would be as few ranges.
        assert_eq!(cut(&ENDS, &PARENTS, 4, ANY), Ok(vec![0, 3, 5, 8, 10]));
        assert_eq!(cut(&ENDS, &PARENTS, 5, ANY), Ok(vec![0, 5, 10]));
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

    /// A stem, and branches of equal length.
    fn fan(stem: i32, branch: i32, count: i32) -> (Vec<i32>, Vec<i32>) {
        let ends = std::iter::once(0).chain((0..=count).map(|i| stem + branch * i)).collect();
        (ends, std::iter::once(-1).chain(vec![0; count as usize]).collect())
    }

    #[test]
    fn a_long_stem_becomes_a_range_of_its_own() {
        // So what waits is the stem; with the first branch it would be two more passes' worth.
        let (ends, parents) = fan(60, 50, 8);
        assert_eq!(cut(&ends, &parents, 100, ANY), Ok(vec![0, 60, 160, 260, 360, 460]));
    }

    #[test]
    fn a_short_stem_runs_with_a_branch() {
        let (ends, parents) = fan(2, 98, 4);
        assert_eq!(cut(&ends, &parents, 100, ANY), Ok(vec![0, 100, 198, 296, 394]));
    }

    #[test]
    fn ancestors_take_the_place_of_rows_where_that_is_cheap() {
        // A quarter of 40 ancestors: 90 rows, nine branches, where ten would fit.
        let (ends, parents) = fan(40, 10, 36);
        assert_eq!(cut(&ends, &parents, 100, ANY), Ok(vec![0, 50, 130, 220, 310, 400]));
        // Here it would be a branch for a range, and twice the passes.
        let (ends, parents) = fan(60, 50, 8);
        assert!(cut(&ends, &parents, 100, ANY).unwrap().windows(2).any(|pair| pair[1] - pair[0] == 100));
    }
}
