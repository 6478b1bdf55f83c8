//! Loss terms and the rows that they share.
//!
//! Terms come in pieces: stretches of trained tokens of one sample whose predecessors lie side by side in the packed
//! tree. Without kept sets a row is a position with a term, found with one bit per position; with kept sets a row is
//! a distinct (position, set).

use hashbrown::HashTable;

use crate::arrays::Arrays;
use crate::groups::Groups;
use crate::kept_sets::{same_set, set_hash, KeptIndex};
use crate::layout::{Place, Shape};
use crate::runs::Runs;
use crate::samples::{KeptSets, SampleColumn, Samples, TokenColumn};
use crate::simd::Stores;
use crate::trie::NONE;

/// Positions with more sets than this get a hash table.
const SCAN: usize = 8;

struct Piece {
    /// Position of the first row.
    at: u32,
    length: u32,
    /// First target token within the sample.
    token: u32,
    /// Place of the sample in `sample_index`.
    member: u32,
}

/// A stretch of a sample's path: depths `start..end` at packed index `at` on.
struct Stretch {
    start: u32,
    end: u32,
    at: u32,
}

/// The terms of one tree before they are written. Reused from tree to tree.
#[derive(Default)]
pub struct Terms {
    pieces: Vec<Piece>,
    stretches: Vec<Stretch>,
    pub count: usize,
    pub rows: usize,
    pub kept_ids: usize,
    /// Without kept sets: one bit per position with a row, and the number of rows before each word.
    bits: Vec<u64>,
    rank: Vec<u32>,
    kept: KeptRows,
}

impl Terms {
    /// Finds pieces and rows. O(path stretches + runs + N / 64), with kept sets O(M + kept ids).
    pub fn plan(&mut self, shape: &Shape, runs: &Runs, members: &[u32], kept: Option<(&KeptSets, &KeptIndex)>) {
        self.pieces.clear();
        self.count = 0;
        for (member, &sample) in members.iter().enumerate() {
            self.add_pieces(shape, runs, sample, member as u32);
        }
        match kept {
            Some((sets, index)) => {
                self.kept.plan(&self.pieces, shape.positions, members, sets, index);
                self.rows = self.kept.rows.len();
                self.kept_ids = self.kept.ids;
            }
            None => {
                self.mark_rows(shape.positions);
                self.kept_ids = 0;
            }
        }
    }

    fn add_pieces(&mut self, shape: &Shape, runs: &Runs, sample: u32, member: u32) {
        let runs = runs.ranges(sample);
        let (Some(&(first, _)), Some(&(_, last))) = (runs.first(), runs.last()) else { return };
        // Stretches from the leaf up, as far as a predecessor of a target can lie.
        self.stretches.clear();
        let mut place = shape.leaves[member as usize];
        while place != NONE {
            let Place { end, top, .. } = shape.places[place as usize];
            let Place { start, at, parent, .. } = shape.places[top as usize];
            if start < last - 1 {
                self.stretches.push(Stretch { start, end, at });
            }
            if start < first {
                break;
            }
            place = parent;
        }
        for &(start, end) in runs {
            let mut depth = start - 1;
            while depth < end - 1 {
                while self.stretches.last().is_some_and(|stretch| stretch.end <= depth) {
                    self.stretches.pop();
                }
                let Some(stretch) = self.stretches.last() else { return };
                let length = stretch.end.min(end - 1) - depth;
                let at = stretch.at + depth - stretch.start;
                self.pieces.push(Piece { at, length, token: depth + 1, member });
                self.count += length as usize;
                depth += length;
            }
        }
    }

    fn mark_rows(&mut self, positions: usize) {
        self.bits.clear();
        self.bits.resize(positions / 64 + 1, 0);
        for piece in &self.pieces {
            let (first, last) = (piece.at as usize, (piece.at + piece.length) as usize - 1);
            let (from, to) = (!0u64 << (first % 64), !0u64 >> (63 - last % 64));
            let (a, b) = (first / 64, last / 64);
            if a == b {
                self.bits[a] |= from & to;
            } else {
                self.bits[a] |= from;
                self.bits[a + 1..b].fill(!0);
                self.bits[b] |= to;
            }
        }
        self.rank.clear();
        self.rows = 0;
        for word in &self.bits {
            self.rank.push(self.rows as u32);
            self.rows += word.count_ones() as usize;
        }
    }

    /// Writes rows, terms and the columns gathered per term.
    #[inline(always)]
    pub fn write(
        &self,
        samples: &Samples,
        offsets: &[u32],
        members: &[u32],
        kept: Option<(&KeptSets, &KeptIndex)>,
        stores: Stores,
        out: &mut Arrays,
    ) {
        match kept {
            Some((sets, index)) => self.kept.write(sets, index, out),
            None => self.write_rows(stores, out.row_position),
        }
        let mut at = 0;
        let mut closed = 0;
        for piece in &self.pieces {
            let Piece { token, member, length, .. } = *piece;
            out.cu_terms[closed..=member as usize].fill(at as i32);
            closed = member as usize + 1;
            let sample = members[member as usize] as usize;
            let range = at..at + length as usize;
            let targets = &samples.ids[sample][token as usize..(token + length) as usize];
            if kept.is_none() {
                stores.iota_i32(&mut out.term_row[range.clone()], self.row(piece.at) as i32);
            }
            stores.narrow(&mut out.term_target[range.clone()], targets);
            stores.fill(&mut out.term_sample[range.clone()], member as i32);
            stores.iota_i32(&mut out.term_source[range], (offsets[sample] + token) as i32);
            if !out.shift_labels.is_empty() {
                out.shift_labels[piece.at as usize..][..length as usize].copy_from_slice(targets);
            }
            at += length as usize;
        }
        out.cu_terms[closed..].fill(at as i32);
    }

    #[inline(always)]
    fn row(&self, position: u32) -> u32 {
        let (word, bit) = (position as usize / 64, position % 64);
        self.rank[word] + (self.bits[word] & !(!0u64 << bit)).count_ones()
    }

    #[inline(always)]
    fn write_rows(&self, stores: Stores, row_position: &mut [i32]) {
        let mut row = 0;
        for (i, &word) in self.bits.iter().enumerate() {
            let base = (i * 64) as i32;
            if word == !0 {
                stores.iota_i32(&mut row_position[row..row + 64], base);
                row += 64;
                continue;
            }
            let mut word = word;
            while word != 0 {
                row_position[row] = base + word.trailing_zeros() as i32;
                row += 1;
                word &= word - 1;
            }
        }
    }

    /// A per-token column, gathered at the target of each term.
    pub fn write_token_column(&self, column: &TokenColumn, members: &[u32], stores: Stores, out: &mut [u8]) {
        let width = column.width;
        let mut at = 0;
        for piece in &self.pieces {
            let rows = column.rows[members[piece.member as usize] as usize];
            let bytes = piece.length as usize * width;
            stores.copy_bytes(&mut out[at..at + bytes], &rows[piece.token as usize * width..][..bytes]);
            at += bytes;
        }
    }

    /// A per-sample column, repeated for each term.
    pub fn write_sample_column(&self, column: &SampleColumn, members: &[u32], stores: Stores, out: &mut [u8]) {
        let width = column.width;
        let mut at = 0;
        for piece in &self.pieces {
            let sample = members[piece.member as usize] as usize;
            let value = &column.rows[sample * width..(sample + 1) * width];
            let bytes = piece.length as usize * width;
            repeat(value, stores, &mut out[at..at + bytes]);
            at += bytes;
        }
    }
}

/// Fills `out` with copies of `value`; the usual widths as numbers.
#[inline]
fn repeat(value: &[u8], stores: Stores, out: &mut [u8]) {
    if let (&[a, b, c, d], Ok(out)) = (value, bytemuck::try_cast_slice_mut::<u8, [u8; 4]>(out)) {
        return stores.fill(out, [a, b, c, d]);
    }
    if value.is_empty() {
        return;
    }
    for copy in out.chunks_exact_mut(value.len()) {
        copy.copy_from_slice(value);
    }
}

/// Rows with kept sets: ascending by position, then by first term.
#[derive(Default)]
struct KeptRows {
    /// Position and set (sample, term of the call) of each row.
    rows: Vec<KeptRow>,
    term_row: Vec<u32>,
    ids: usize,
    /// (position, sample, term of the call) of each term of the tree.
    terms: Vec<(u32, u32, u32)>,
    /// Terms by position, in their order where several share one.
    by_position: Groups,
    table: HashTable<u32>,
}

struct KeptRow {
    position: u32,
    sample: u32,
    term: u32,
    hash: u64,
}

impl KeptRows {
    fn plan(&mut self, pieces: &[Piece], positions: usize, members: &[u32], sets: &KeptSets, index: &KeptIndex) {
        self.list_terms(pieces, members, index);
        let terms = self.terms.iter().enumerate();
        self.by_position.fill(positions, terms.map(|(term, &(position, ..))| (position, term as u32)));
        self.rows.clear();
        self.ids = 0;
        self.term_row.clear();
        self.term_row.resize(self.terms.len(), 0);
        let by_position = std::mem::take(&mut self.by_position);
        for position in 0..positions as u32 {
            let first = self.rows.len();
            self.table.clear();
            for &term in by_position.values(position) {
                let row = self.find_or_add(first, term, sets, index);
                self.term_row[term as usize] = row;
            }
        }
        self.by_position = by_position;
    }

    fn list_terms(&mut self, pieces: &[Piece], members: &[u32], index: &KeptIndex) {
        self.terms.clear();
        let (mut member, mut term) = (NONE, 0);
        for piece in pieces {
            let sample = members[piece.member as usize];
            if piece.member != member {
                member = piece.member;
                term = index.first_term[sample as usize];
            }
            for i in 0..piece.length {
                self.terms.push((piece.at + i, sample, term + i));
            }
            term += piece.length;
        }
    }

    /// The row of a term among the rows from `first` on, which are those of its position.
    fn find_or_add(&mut self, first: usize, term: u32, sets: &KeptSets, index: &KeptIndex) -> u32 {
        let (position, sample, term) = self.terms[term as usize];
        let set = index.set(sets, sample, term);
        let hash = set_hash(set);
        let rows = &self.rows;
        let same = |&row: &u32| {
            let row = &rows[row as usize];
            row.hash == hash && same_set(index.set(sets, row.sample, row.term), set)
        };
        let known = if rows.len() - first <= SCAN {
            (first as u32..rows.len() as u32).find(|row| same(row))
        } else {
            self.table.find(hash, same).copied()
        };
        if let Some(row) = known {
            return row;
        }
        let row = self.rows.len() as u32;
        self.rows.push(KeptRow { position, sample, term, hash });
        self.ids += set.len();
        let count = self.rows.len() - first;
        let from = if count == SCAN + 1 { first as u32 } else { row };
        if count > SCAN {
            for row in from..=row {
                let hash_of = |&row: &u32| self.rows[row as usize].hash;
                self.table.insert_unique(hash_of(&row), row, hash_of);
            }
        }
        row
    }

    fn write(&self, sets: &KeptSets, index: &KeptIndex, out: &mut Arrays) {
        let mut at = 0;
        for (i, row) in self.rows.iter().enumerate() {
            let set = index.set(sets, row.sample, row.term);
            out.row_position[i] = row.position as i32;
            out.sampling_mask_counts[i] = set.len() as i32;
            out.sampling_mask[at..at + set.len()].copy_from_slice(set);
            at += set.len();
        }
        for (to, &row) in out.term_row.iter_mut().zip(&self.term_row) {
            *to = row as i32;
        }
    }
}
