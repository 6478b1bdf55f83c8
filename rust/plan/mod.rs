//! Placement: which sample goes into which tree. Works on the nodes of the one trie over all samples, so that no
//! token is compared again for any tree.
//!
//! ```text
//! room <- demand, tournament, free_room <- trees_of_node, outline
//! <- first_fit, cuts (textbook rules), top_down, bottom_up (starts)
//! tree_counts, free_room <- draft <- cost <- dissolve, exchange (what improves a start) <- place
//! work, draft <- even <- ranks (micro-batches)
//! ```

mod bottom_up;
mod cost;
mod cuts;
mod demand;
mod dissolve;
mod draft;
mod even;
mod exchange;
mod first_fit;
mod forest;
mod free_room;
mod outline;
mod place;
mod random;
mod ranks;
mod room;
mod top_down;
mod tournament;
mod tree_counts;
mod trees_of_node;
mod work;

pub use demand::Demand;
pub use forest::Forest;
pub use place::place;
pub use ranks::{rank_trees, split_for_ranks, Balance};
pub use room::{has_room, Room};
pub use trees_of_node::TreesOfNode;
pub use work::work;
