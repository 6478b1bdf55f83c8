//! Placement: which sample goes into which tree. Works on the nodes of the one trie over all samples, so that no
//! token is compared again for any tree.
//!
//! ```text
//! room <- demand, tournament <- trees_of_node, outline
//! <- first_fit, top_down, bottom_up (placements) <- place <- ranks (micro-batches)
//! ```

mod bottom_up;
mod demand;
mod first_fit;
mod forest;
mod outline;
mod place;
mod ranks;
mod room;
mod top_down;
mod tournament;
mod trees_of_node;

pub use demand::Demand;
pub use forest::Forest;
pub use place::place;
pub use ranks::{rank_trees, split_for_ranks, work, Balance};
pub use room::{has_room, Room};
pub use trees_of_node::TreesOfNode;
