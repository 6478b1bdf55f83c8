//! The arrays of a packed tree and where they lie in its one buffer: each aligned to 64 bytes, in a fixed order.

use bytemuck::{cast_slice, cast_slice_mut, Pod};

use crate::samples::Samples;

/// Every array starts at a multiple of this, and so does every tree.
pub const ALIGN: usize = 64;

/// Lengths that the arrays of a tree share. Letters as in the design: N, S, n, R, M, T.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// N without padding.
    pub positions: usize,
    /// N: positions and padding.
    pub padded: usize,
    pub segments: usize,
    pub samples: usize,
    pub rows: usize,
    pub terms: usize,
    pub kept_ids: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Positions,
    Segments,
    SegmentsAndOne,
    Samples,
    SamplesAndOne,
    Rows,
    Terms,
    KeptIds,
    /// Positions, in trees in which the samples agree on this per-token column.
    PositionsOf(usize),
}

struct Spec {
    name: String,
    length: Length,
    width: usize,
}

/// The arrays that every tree of a call has.
pub struct Schema {
    specs: Vec<Spec>,
    label: bool,
    kept: bool,
    token_columns: usize,
}

/// One array of one tree: where it starts in the tree's buffer and how many rows it has.
pub struct Field {
    /// Index into `Schema::names`.
    pub index: usize,
    pub offset: usize,
    pub rows: usize,
}

impl Schema {
    pub fn new(samples: &Samples, label: bool) -> Self {
        use Length::*;
        let kept = samples.kept.is_some();
        let core = [
            ("input_ids", Positions, 8, true),
            ("position_ids", Positions, 8, true),
            ("shift_labels", Positions, 8, label),
            ("parent", Positions, 4, true),
            ("subtree_end", Positions, 4, true),
            ("position_source", Positions, 4, true),
            ("position_samples", Positions, 4, true),
            ("cu_segments", SegmentsAndOne, 4, true),
            ("segment_parent", Segments, 4, true),
            ("sample_index", Samples, 4, true),
            ("sample_last_segment", Samples, 4, true),
            ("cu_terms", SamplesAndOne, 4, true),
            ("row_position", Rows, 4, true),
            ("term_row", Terms, 4, true),
            ("term_target", Terms, 4, true),
            ("term_sample", Terms, 4, true),
            ("term_source", Terms, 4, true),
            ("sampling_mask", KeptIds, 4, kept),
            ("sampling_mask_counts", Rows, 4, kept),
        ];
        let mut specs: Vec<Spec> = core
            .into_iter()
            .filter(|&(_, _, _, present)| present)
            .map(|(name, length, width, _)| Spec { name: name.to_string(), length, width })
            .collect();
        let columns = || samples.token_columns.iter().enumerate();
        let mut add = |name: String, length, width| specs.push(Spec { name, length, width });
        for (_, column) in columns() {
            add(format!("terms.{}", column.name), Terms, column.width);
        }
        for column in &samples.sample_columns {
            if column.per_term {
                add(format!("terms.{}", column.name), Terms, column.width);
            }
            add(format!("samples.{}", column.name), Samples, column.width);
        }
        for (i, column) in columns() {
            add(format!("positions.{}", column.name), PositionsOf(i), column.width);
        }
        Schema { specs, label, kept, token_columns: samples.token_columns.len() }
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.specs.iter().map(|spec| &spec.name[..])
    }

    /// Bytes of a tree. `agrees` says for each per-token column whether the samples agree on it.
    pub fn bytes(&self, sizes: &Sizes, agrees: &[bool]) -> usize {
        self.specs.iter().map(|spec| spec.bytes(sizes, agrees).next_multiple_of(ALIGN)).sum()
    }

    pub fn fields<'a>(&'a self, sizes: &'a Sizes, agrees: &'a [bool]) -> impl Iterator<Item = Field> + 'a {
        let mut at = 0;
        self.specs.iter().enumerate().filter_map(move |(index, spec)| {
            let offset = at;
            at += spec.bytes(sizes, agrees).next_multiple_of(ALIGN);
            let rows = spec.rows(sizes, agrees)?;
            Some(Field { index, offset, rows })
        })
    }

    /// Cuts a tree's buffer into its arrays. What lies between two arrays is cleared, so that the buffer depends on
    /// the input alone.
    pub fn carve<'b>(&self, mut buffer: &'b mut [u8], sizes: &Sizes, agrees: &[bool]) -> Arrays<'b> {
        let mut next = self.specs.iter().map(|spec| {
            let bytes = spec.bytes(sizes, agrees);
            let (array, rest) = std::mem::take(&mut buffer).split_at_mut(bytes.next_multiple_of(ALIGN));
            buffer = rest;
            let (array, gap) = array.split_at_mut(bytes);
            gap.fill(0);
            array
        });
        let mut bytes = || next.next().unwrap_or_default();
        Arrays {
            input_ids: cast_slice_mut(bytes()),
            position_ids: cast_slice_mut(bytes()),
            shift_labels: if self.label { cast_slice_mut(bytes()) } else { &mut [] },
            parent: cast_slice_mut(bytes()),
            subtree_end: cast_slice_mut(bytes()),
            position_source: cast_slice_mut(bytes()),
            position_samples: cast_slice_mut(bytes()),
            cu_segments: cast_slice_mut(bytes()),
            segment_parent: cast_slice_mut(bytes()),
            sample_index: cast_slice_mut(bytes()),
            sample_last_segment: cast_slice_mut(bytes()),
            cu_terms: cast_slice_mut(bytes()),
            row_position: cast_slice_mut(bytes()),
            term_row: cast_slice_mut(bytes()),
            term_target: cast_slice_mut(bytes()),
            term_sample: cast_slice_mut(bytes()),
            term_source: cast_slice_mut(bytes()),
            sampling_mask: if self.kept { cast_slice_mut(bytes()) } else { &mut [] },
            sampling_mask_counts: if self.kept { cast_slice_mut(bytes()) } else { &mut [] },
            columns: next.collect(),
        }
    }

    pub fn token_columns(&self) -> usize {
        self.token_columns
    }
}

impl Spec {
    fn rows(&self, sizes: &Sizes, agrees: &[bool]) -> Option<usize> {
        Some(match self.length {
            Length::Positions => sizes.padded,
            Length::Segments => sizes.segments,
            Length::SegmentsAndOne => sizes.segments + 1,
            Length::Samples => sizes.samples,
            Length::SamplesAndOne => sizes.samples + 1,
            Length::Rows => sizes.rows,
            Length::Terms => sizes.terms,
            Length::KeptIds => sizes.kept_ids,
            Length::PositionsOf(column) => return agrees[column].then_some(sizes.padded),
        })
    }

    fn bytes(&self, sizes: &Sizes, agrees: &[bool]) -> usize {
        self.rows(sizes, agrees).unwrap_or(0) * self.width
    }
}

/// The arrays of one tree while they are written. `columns`: terms of the per-token columns; terms and samples of
/// each per-sample column; positions of the per-token columns (empty where samples disagree).
pub struct Arrays<'b> {
    pub input_ids: &'b mut [i64],
    pub position_ids: &'b mut [i64],
    pub shift_labels: &'b mut [i64],
    pub parent: &'b mut [i32],
    pub subtree_end: &'b mut [i32],
    pub position_source: &'b mut [i32],
    pub position_samples: &'b mut [i32],
    pub cu_segments: &'b mut [i32],
    pub segment_parent: &'b mut [i32],
    pub sample_index: &'b mut [i32],
    pub sample_last_segment: &'b mut [i32],
    pub cu_terms: &'b mut [i32],
    pub row_position: &'b mut [i32],
    pub term_row: &'b mut [i32],
    pub term_target: &'b mut [i32],
    pub term_sample: &'b mut [i32],
    pub term_source: &'b mut [i32],
    pub sampling_mask: &'b mut [i32],
    pub sampling_mask_counts: &'b mut [i32],
    pub columns: Vec<&'b mut [u8]>,
}

/// The arrays of a finished tree, for readers in Rust.
pub struct TreeView<'a> {
    pub sizes: Sizes,
    pub(crate) schema: &'a Schema,
    pub(crate) agrees: &'a [bool],
    pub(crate) buffer: &'a [u8],
}

impl<'a> TreeView<'a> {
    /// The bytes of an array, by the name it has in Python (`"terms.advantage"` for a gathered column).
    pub fn bytes(&self, name: &str) -> Option<&'a [u8]> {
        let mut at = 0;
        for spec in &self.schema.specs {
            let bytes = spec.bytes(&self.sizes, self.agrees);
            if spec.name == name {
                spec.rows(&self.sizes, self.agrees)?;
                return Some(&self.buffer[at..at + bytes]);
            }
            at += bytes.next_multiple_of(ALIGN);
        }
        None
    }

    /// An array as numbers; empty if the tree has no such array.
    pub fn array<T: Pod>(&self, name: &str) -> &'a [T] {
        match self.bytes(name) {
            Some(bytes) if !bytes.is_empty() => cast_slice(bytes),
            _ => &[],
        }
    }

    pub fn buffer(&self) -> &'a [u8] {
        self.buffer
    }
}
