//! Properties of packed trees over random samples, against the plainest oracle: sets of prefixes.

use std::collections::HashSet;

use proptest::prelude::*;
use treepack::{pack, KeptSets, Options, Order, Packed, Placement, Samples, TokenColumn};

#[derive(Debug, Clone)]
struct Sample {
    ids: Vec<i64>,
    mask: Vec<u8>,
    identity: Vec<u8>,
    /// Kept set of each token; empty = none.
    kept: Vec<Vec<i32>>,
}

/// Few ids and short lengths, so that prefixes, duplicates and single tokens are common.
fn sample(with_kept: bool) -> impl Strategy<Value = Sample> {
    prop::collection::vec((0..3i64, 0..2u8, 0..2u8, 0..4usize), 1..9).prop_map(move |tokens| {
        let ids: Vec<i64> = tokens.iter().map(|t| t.0).collect();
        // Sets that contain the target, in an order that varies.
        let set = |&(id, _, _, shape): &(i64, u8, u8, usize)| match (with_kept, shape) {
            (false, _) => vec![],
            (true, 0) => vec![id as i32],
            (true, 1) => vec![id as i32, 7],
            (true, 2) => vec![7, id as i32],
            (true, _) => vec![9, 7, id as i32],
        };
        Sample {
            ids,
            mask: tokens.iter().map(|t| t.1).collect(),
            // mostly equal, or nothing would merge
            identity: tokens.iter().map(|t| (t.2 == 1 && t.3 == 3) as u8).collect(),
            kept: tokens.iter().map(set).collect(),
        }
    })
}

fn samples(with_kept: bool) -> impl Strategy<Value = Vec<Sample>> {
    prop::collection::vec(sample(with_kept), 0..12)
}

fn run(input: &[Sample], options: &Options, with_identity: bool, with_kept: bool) -> Packed {
    let kept_ids: Vec<Vec<i32>> = input.iter().map(|s| s.kept.concat()).collect();
    let counts: Vec<Vec<i32>> = input.iter().map(|s| s.kept.iter().map(|set| set.len() as i32).collect()).collect();
    let mut samples = Samples::new(input.iter().map(|s| &s.ids[..]).collect());
    samples.mask = Some(input.iter().map(|s| &s.mask[..]).collect());
    if with_identity {
        let rows = input.iter().map(|s| &s.identity[..]).collect();
        samples.identity = Some(TokenColumn { name: "identity".into(), width: 1, rows });
    }
    if with_kept {
        let ids = kept_ids.iter().map(|ids| &ids[..]).collect();
        samples.kept = Some(KeptSets { ids, counts: counts.iter().map(|c| &c[..]).collect() });
    }
    pack(&samples, options).expect("valid input packs")
}

/// Elements that tell prefixes apart: token, identity, and with labels the next token.
fn keys(sample: &Sample, label: bool, with_identity: bool) -> Key {
    let next = |i: usize| if label { sample.ids.get(i + 1).copied().unwrap_or(-1) } else { 0 };
    let identity = |i: usize| if with_identity { sample.identity[i] } else { 0 };
    (0..sample.ids.len()).map(|i| (sample.ids[i], identity(i), next(i))).collect()
}

type Key = Vec<(i64, u8, i64)>;

/// Prefixes, samples and terms of a tree.
type NaiveTree = (HashSet<Key>, Vec<i32>, usize);

/// First fit on sets of prefixes: positions of each tree and the samples in it.
fn first_fit(
    input: &[Sample],
    max_tokens: usize,
    max_terms: usize,
    key: impl Fn(&Sample) -> Key,
) -> Vec<(usize, Vec<i32>)> {
    let mut trees: Vec<NaiveTree> = Vec::new();
    for (index, sample) in input.iter().enumerate() {
        let key = key(sample);
        let prefixes: Vec<Vec<_>> = (1..=key.len()).map(|n| key[..n].to_vec()).collect();
        let terms = sample.mask.iter().skip(1).filter(|&&m| m == 1).count();
        let fits = |tree: &&mut NaiveTree| {
            let new = prefixes.iter().filter(|prefix| !tree.0.contains(*prefix)).count();
            tree.0.len() + new <= max_tokens && tree.2 + terms <= max_terms
        };
        let mut found = trees.iter_mut().find(fits);
        if found.is_none() {
            trees.push(Default::default());
            found = trees.last_mut();
        }
        if let Some(tree) = found {
            tree.0.extend(prefixes);
            tree.1.push(index as i32);
            tree.2 += terms;
        }
    }
    trees.into_iter().map(|(prefixes, members, _)| (prefixes.len(), members)).collect()
}

fn check_tree(packed: &Packed, index: usize, input: &[Sample], with_kept: bool) -> Result<(), TestCaseError> {
    let tree = packed.tree(index);
    let (ids, depth) = (tree.array::<i64>("input_ids"), tree.array::<i64>("position_ids"));
    let (parent, end) = (tree.array::<i32>("parent"), tree.array::<i32>("subtree_end"));
    let n = tree.sizes.positions;
    // subtree_end from the parents alone, and depth + 1 visible keys for each query
    let mut brute: Vec<i32> = (1..=n as i32).collect();
    for i in (0..n).rev().filter(|&i| parent[i] >= 0) {
        brute[parent[i] as usize] = brute[parent[i] as usize].max(brute[i]);
    }
    prop_assert_eq!(&brute[..], &end[..n]);
    for (q, depth) in depth.iter().enumerate().take(n) {
        let seen = (0..=q).filter(|&k| (q as i32) < end[k]).count();
        prop_assert_eq!(seen as i64, depth + 1);
    }
    for q in n..tree.sizes.padded {
        prop_assert_eq!((ids[q], depth[q], parent[q], end[q]), (0, 0, -1, q as i32));
    }
    let (cuts, above) = (tree.array::<i32>("cu_segments"), tree.array::<i32>("segment_parent"));
    let members = tree.array::<i32>("sample_index");
    let (rows, row_of) = (tree.array::<i32>("row_position"), tree.array::<i32>("term_row"));
    let (targets, cu_terms) = (tree.array::<i32>("term_target"), tree.array::<i32>("cu_terms"));
    let counts = tree.array::<i32>("sampling_mask_counts");
    let kept = tree.array::<i32>("sampling_mask");
    let mut distinct = HashSet::new();
    let mut term = 0;
    for (place, &member) in members.iter().enumerate() {
        let sample = &input[member as usize];
        let mut path = Vec::new();
        let mut segment = tree.array::<i32>("sample_last_segment")[place];
        while segment >= 0 {
            path.extend((cuts[segment as usize]..cuts[segment as usize + 1]).rev());
            segment = above[segment as usize];
        }
        path.reverse();
        let rebuilt: Vec<i64> = path.iter().map(|&p| ids[p as usize]).collect();
        prop_assert_eq!(&rebuilt, &sample.ids);
        prop_assert_eq!(cu_terms[place] as usize, term);
        for token in (1..sample.ids.len()).filter(|&t| sample.mask[t] == 1) {
            let row = row_of[term] as usize;
            prop_assert_eq!(rows[row], path[token - 1]);
            prop_assert_eq!(targets[term] as i64, sample.ids[token]);
            let set: Vec<i32> = if with_kept {
                let start: i32 = counts[..row].iter().sum();
                kept[start as usize..(start + counts[row]) as usize].to_vec()
            } else {
                vec![]
            };
            let sorted = |mut set: Vec<i32>| {
                set.sort_unstable();
                set
            };
            let set = sorted(set);
            let recorded = if with_kept { sample.kept[token].clone() } else { vec![] };
            prop_assert_eq!(&set, &sorted(recorded));
            distinct.insert((rows[row], set));
            term += 1;
        }
    }
    prop_assert_eq!((term, distinct.len()), (tree.sizes.terms, tree.sizes.rows));
    prop_assert!(rows.windows(2).all(|pair| pair[0] <= pair[1]));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn trees_hold_exactly_their_samples(
        input in samples(true),
        budget in 8u64..40,
        max_terms in prop::option::of(8u64..20),
        label: bool,
        first_seen: bool,
        identity: bool,
        kept: bool,
        multiple in 1u64..5,
    ) {
        let mut options = Options::new(budget + 4);
        options.placement = Placement::FirstFit;
        options.max_terms = max_terms;
        options.label_branching = label;
        options.order = if first_seen { Order::FirstSeen } else { Order::LargestFirst };
        options.pad_to_multiple_of = multiple;
        let packed = run(&input, &options, identity, kept);
        let limit = (options.max_tokens - options.max_tokens % multiple) as usize;
        let terms = max_terms.map_or(usize::MAX, |terms| terms as usize);
        let expected = first_fit(&input, limit, terms, |sample| keys(sample, label, identity));
        prop_assert_eq!(packed.trees.len(), expected.len());
        for (index, (positions, members)) in expected.iter().enumerate() {
            let tree = packed.tree(index);
            prop_assert_eq!(tree.sizes.positions, *positions);
            prop_assert_eq!(tree.sizes.padded as u64 % multiple, 0);
            prop_assert_eq!(tree.array::<i32>("sample_index"), &members[..]);
            check_tree(&packed, index, &input, kept)?;
        }
        let again = run(&input, &options, identity, kept);
        for index in 0..packed.trees.len() {
            prop_assert!(packed.tree(index).buffer() == again.tree(index).buffer());
        }
    }

    #[test]
    fn kept_ids_stay_within_their_budget(input in samples(true), max_kept in 24u64..40) {
        let mut options = Options::new(1000);
        options.max_kept = Some(max_kept);
        let packed = run(&input, &options, false, true);
        let mut seen: Vec<i32> = Vec::new();
        for index in 0..packed.trees.len() {
            prop_assert!(packed.tree(index).sizes.kept_ids as u64 <= max_kept);
            seen.extend(packed.tree(index).array::<i32>("sample_index"));
            check_tree(&packed, index, &input, true)?;
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..input.len() as i32).collect::<Vec<_>>());
    }

    #[test]
    fn long_runs_compare_like_short_ones(prefix in 0usize..200, tails in prop::collection::vec((0i64..3, 0usize..90), 1..8)) {
        let input: Vec<Sample> = tails.iter().map(|&(id, length)| {
            let mut ids: Vec<i64> = (0..prefix as i64).collect();
            ids.extend(std::iter::repeat_n(id, length + 1));
            let n = ids.len();
            Sample { mask: (0..n).map(|i| (i % 70 < 35) as u8).collect(), identity: vec![0; n], kept: vec![vec![]; n], ids }
        }).collect();
        let packed = run(&input, &Options::new(10_000), false, false);
        check_tree(&packed, 0, &input, false)?;
    }
}
