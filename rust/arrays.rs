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

/// What an array has a row for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    Positions,
    Segments,
    SegmentsAndOne,
    Samples,
    SamplesAndOne,
    Rows,
    Terms,
    KeptIds,
}

impl Axis {
    /// The length of an array, in the letters of the design.
    pub const fn letters(self) -> &'static str {
        match self {
            Axis::Positions => "N",
            Axis::Segments => "S",
            Axis::SegmentsAndOne => "S+1",
            Axis::Samples => "n",
            Axis::SamplesAndOne => "n+1",
            Axis::Rows => "R",
            Axis::Terms => "M",
            Axis::KeptIds => "T",
        }
    }

    fn length(self, sizes: &Sizes) -> usize {
        match self {
            Axis::Positions => sizes.padded,
            Axis::Segments => sizes.segments,
            Axis::SegmentsAndOne => sizes.segments + 1,
            Axis::Samples => sizes.samples,
            Axis::SamplesAndOne => sizes.samples + 1,
            Axis::Rows => sizes.rows,
            Axis::Terms => sizes.terms,
            Axis::KeptIds => sizes.kept_ids,
        }
    }
}

/// When trees have an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    Always,
    WithLabels,
    WithKeptSets,
}

impl Present {
    pub const fn name(self) -> &'static str {
        match self {
            Present::Always => "always",
            Present::WithLabels => "label branching",
            Present::WithKeptSets => "kept sets",
        }
    }
}

/// An array that trees have beside the gathered columns.
pub struct TreeArray {
    pub name: &'static str,
    /// As NumPy calls it.
    pub dtype: &'static str,
    pub axis: Axis,
    pub present: Present,
    width: usize,
}

trait Number: Pod {
    const DTYPE: &'static str;
}

impl Number for i64 {
    const DTYPE: &'static str = "int64";
}

impl Number for i32 {
    const DTYPE: &'static str = "int32";
}

/// Makes of one list what is known of the arrays, the struct that they are written through, and the cut of a buffer.
macro_rules! arrays {
    ($($name:ident: $number:ty, $axis:ident, $present:ident;)*) => {
        /// The arrays of a tree in the order of their buffer; the gathered columns follow.
        pub const ARRAYS: &[TreeArray] = &[$(TreeArray {
            name: stringify!($name),
            dtype: <$number as Number>::DTYPE,
            axis: Axis::$axis,
            present: Present::$present,
            width: size_of::<$number>(),
        }),*];

        /// The arrays of one tree while they are written; those that it has not are empty. `columns`: terms of the
        /// per-token columns; terms and samples of each per-sample column; positions of the per-token columns (empty
        /// where samples disagree).
        pub struct Arrays<'b> {
            $(pub $name: &'b mut [$number],)*
            pub columns: Vec<&'b mut [u8]>,
        }

        impl<'b> Arrays<'b> {
            fn cut(schema: &Schema, mut pieces: impl Iterator<Item = &'b mut [u8]>) -> Self {
                Arrays {
                    $($name: match schema.has(Present::$present) {
                        true => cast_slice_mut(pieces.next().unwrap_or_default()),
                        false => &mut [],
                    },)*
                    columns: pieces.collect(),
                }
            }
        }
    };
}

arrays! {
    input_ids: i64, Positions, Always;
    position_ids: i64, Positions, Always;
    shift_labels: i64, Positions, WithLabels;
    parent: i32, Positions, Always;
    subtree_end: i32, Positions, Always;
    position_source: i32, Positions, Always;
    position_samples: i32, Positions, Always;
    cu_segments: i32, SegmentsAndOne, Always;
    segment_parent: i32, Segments, Always;
    sample_index: i32, Samples, Always;
    sample_last_segment: i32, Samples, Always;
    cu_terms: i32, SamplesAndOne, Always;
    row_position: i32, Rows, Always;
    term_row: i32, Terms, Always;
    term_target: i32, Terms, Always;
    term_sample: i32, Terms, Always;
    term_source: i32, Terms, Always;
    sampling_mask: i32, KeptIds, WithKeptSets;
    sampling_mask_counts: i32, Rows, WithKeptSets;
}

enum Length {
    Axis(Axis),
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
        let kept = samples.kept.is_some();
        let token_columns = samples.token_columns.len();
        let mut schema = Schema { specs: Vec::new(), label, kept, token_columns };
        for array in ARRAYS {
            if schema.has(array.present) {
                schema.add(array.name.to_string(), Length::Axis(array.axis), array.width);
            }
        }
        for column in &samples.token_columns {
            schema.add(format!("terms.{}", column.name), Length::Axis(Axis::Terms), column.width);
        }
        for column in &samples.sample_columns {
            if column.per_term {
                schema.add(format!("terms.{}", column.name), Length::Axis(Axis::Terms), column.width);
            }
            schema.add(format!("samples.{}", column.name), Length::Axis(Axis::Samples), column.width);
        }
        for (i, column) in samples.token_columns.iter().enumerate() {
            schema.add(format!("positions.{}", column.name), Length::PositionsOf(i), column.width);
        }
        schema
    }

    fn add(&mut self, name: String, length: Length, width: usize) {
        self.specs.push(Spec { name, length, width });
    }

    fn has(&self, present: Present) -> bool {
        match present {
            Present::Always => true,
            Present::WithLabels => self.label,
            Present::WithKeptSets => self.kept,
        }
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
        let pieces = self.specs.iter().map(|spec| {
            let bytes = spec.bytes(sizes, agrees);
            let (array, rest) = std::mem::take(&mut buffer).split_at_mut(bytes.next_multiple_of(ALIGN));
            buffer = rest;
            let (array, gap) = array.split_at_mut(bytes);
            gap.fill(0);
            array
        });
        Arrays::cut(self, pieces)
    }

    pub fn token_columns(&self) -> usize {
        self.token_columns
    }
}

impl Spec {
    fn rows(&self, sizes: &Sizes, agrees: &[bool]) -> Option<usize> {
        match self.length {
            Length::Axis(axis) => Some(axis.length(sizes)),
            Length::PositionsOf(column) => agrees[column].then_some(sizes.padded),
        }
    }

    fn bytes(&self, sizes: &Sizes, agrees: &[bool]) -> usize {
        self.rows(sizes, agrees).unwrap_or(0) * self.width
    }
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
