//! treepack folds token sequences that share prefixes into prefix trees within a budget, so that every shared token
//! is there once and no loss term is lost, and lays each tree out as flat arrays in depth-first order.
//!
//! The crate knows no Python (that is the feature `python`). Modules import in one direction:
//!
//! ```text
//! error, simd <- samples <- runs, trie <- kept_sets <- plan, terms
//! error <- memory <- runs, arena, pack
//! error <- options <- plan, layout
//! arrays, trie <- layout <- terms <- writer
//! plan, layout, slab <- packed <- writer <- pack, stream
//! groups, padding, arena, tiles, cuts: one job each, beside them
//! ```
//!
//! ```
//! use treepack::{pack, Options, Samples};
//! let (a, b) = ([1i64, 2, 3], [1i64, 2, 4]);
//! let packed = pack(&Samples::new(vec![&a, &b]), &Options::new(16)).unwrap();
//! assert_eq!(packed.tree(0).array::<i64>("input_ids"), [1, 2, 3, 4]);
//! assert_eq!(packed.tree(0).array::<i32>("subtree_end"), [4, 4, 3, 4]);
//! ```

mod arena;
mod arrays;
mod cuts;
mod error;
mod groups;
mod kept_sets;
mod layout;
mod memory;
mod options;
mod pack;
mod packed;
mod padding;
mod plan;
mod runs;
mod samples;
mod simd;
mod slab;
mod stream;
mod terms;
mod tiles;
mod trie;
mod writer;

#[cfg(feature = "python")]
mod python;

pub use arrays::{Axis, Field, Present, Sizes, TreeArray, TreeView, ALIGN, ARRAYS};
pub use cuts::cut;
pub use error::{Fault, PackError, Words, MAX_INDEX};
pub use layout::Disagreement;
pub use memory::working_bytes;
pub use options::{Options, Order, Placement};
pub use pack::pack;
pub use packed::{Packed, Skipped, Stats, Tree};
pub use padding::{mask_bytes, token_spans, Bits};
pub use plan::{work, Balance};
pub use samples::{KeptSets, SampleColumn, Samples, TokenColumn};
pub use stream::{Added, Stream};
pub use tiles::{tile_lists, TileLists, MIN_RUN, TILE_SIZES};
