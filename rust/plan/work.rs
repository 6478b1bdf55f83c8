//! The work of a tree, by which ranks are balanced.

/// Work of a position beside its attention, in (query, key) pairs. A transformer layer spends about 24 h^2 FLOPs on a
/// token and 4 h on a pair (h = hidden size), so 6 h: this is a hidden size of about 1,400.
const PAIRS_PER_TOKEN: u64 = 8192;

/// Work of a tree: attention pairs plus a linear term per position.
pub fn work(pairs: u64, tokens: u64) -> u64 {
    pairs.saturating_add(PAIRS_PER_TOKEN.saturating_mul(tokens))
}
