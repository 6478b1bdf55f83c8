//! Bytes to samples and options, `pack()`, and what must hold: no panic on any input; on good input every sample is
//! rebuilt, sees exactly its own past, keeps every loss term and its kept sets, and shares all that can be shared.

#![no_main]

use std::collections::HashSet;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use treepack::{
    pack, Added, Fault, KeptSets, Options, Order, Packed, Placement, Samples, Stream, TokenColumn, TreeView,
};

#[derive(Arbitrary, Debug)]
struct Case {
    samples: Vec<Draft>,
    max_tokens: u8,
    max_terms: Option<u8>,
    max_kept: Option<u8>,
    vocab_size: Option<u8>,
    label: bool,
    first_seen: bool,
    first_fit: bool,
    skip: bool,
    multiple: u8,
    ranks: u8,
    with_mask: bool,
    with_identity: bool,
    with_sets: bool,
    /// Pass ids, masks, counts and sets on as they are, good or not.
    wild: bool,
}

/// The start of an earlier sample and some tokens more, so that prefixes, forks and duplicates are common.
#[derive(Arbitrary, Debug)]
struct Draft {
    base: u8,
    keep: u8,
    tail: Vec<Draw>,
}

#[derive(Arbitrary, Debug, Clone)]
struct Draw {
    id: i16,
    mask: u8,
    identity: u8,
    count: i8,
    set: Vec<i8>,
}

/// One sample with all the columns it could bring.
#[derive(Default, Clone)]
struct Sample {
    ids: Vec<i64>,
    mask: Vec<u8>,
    identity: Vec<u8>,
    counts: Vec<i32>,
    sets: Vec<i32>,
}

impl Sample {
    fn targets(&self, with_mask: bool) -> Vec<usize> {
        (1..self.ids.len()).filter(|&token| !with_mask || self.mask[token] == 1).collect()
    }

    fn set(&self, token: usize) -> Vec<i32> {
        let end: i32 = self.counts[..=token].iter().sum();
        let mut set = self.sets[(end - self.counts[token]) as usize..end as usize].to_vec();
        set.sort_unstable();
        set
    }
}

impl Case {
    fn samples(&self) -> Vec<Sample> {
        let mut drafts: Vec<Vec<Draw>> = Vec::new();
        for draft in &self.samples {
            let mut draws = match drafts.len() {
                0 => Vec::new(),
                earlier => {
                    let base = &drafts[draft.base as usize % earlier];
                    base[..draft.keep as usize % (base.len() + 1)].to_vec()
                }
            };
            draws.extend(draft.tail.iter().cloned());
            drafts.push(draws);
        }
        let filled = drafts.into_iter().filter(|draws| self.wild || !draws.is_empty());
        filled.map(|draws| self.sample(&draws)).collect()
    }

    fn sample(&self, draws: &[Draw]) -> Sample {
        let mut sample = Sample::default();
        for draw in draws {
            sample.identity.push(draw.identity & 1);
            if self.wild {
                sample.ids.push(if draw.mask & 64 == 0 { draw.id as i64 } else { (draw.id as i64) << 40 });
                sample.mask.push(draw.mask & 3);
                sample.counts.push(draw.count as i32);
                sample.sets.extend(draw.set.iter().map(|&id| id as i32));
                continue;
            }
            let id = draw.id as i64 & 3;
            let mut set = vec![id as i32];
            set.extend(draw.set.iter().map(|&id| id as i32 & 7));
            let mut seen = HashSet::new();
            set.retain(|&id| seen.insert(id));
            let turn = draw.count as usize % set.len();
            set.rotate_left(turn);
            sample.ids.push(id);
            sample.mask.push(draw.mask & 1);
            sample.counts.push(set.len() as i32);
            sample.sets.extend(set);
        }
        sample
    }

    /// The samples with the columns that this case has.
    fn borrow<'a>(&self, samples: &'a [Sample]) -> Samples<'a> {
        let mut input = Samples::new(samples.iter().map(|sample| &sample.ids[..]).collect());
        if self.with_mask {
            input.mask = Some(samples.iter().map(|sample| &sample.mask[..]).collect());
        }
        if self.with_identity {
            let rows = samples.iter().map(|sample| &sample.identity[..]).collect();
            input.identity = Some(TokenColumn { name: "identity".to_string(), width: 1, rows });
        }
        if self.with_sets {
            let ids = samples.iter().map(|sample| &sample.sets[..]).collect();
            let counts = samples.iter().map(|sample| &sample.counts[..]).collect();
            input.kept = Some(KeptSets { ids, counts });
        }
        input
    }

    fn options(&self) -> Options {
        Options {
            max_terms: self.max_terms.map(u64::from),
            max_kept: self.max_kept.map(u64::from),
            vocab_size: if self.wild { self.vocab_size.map(u64::from) } else { None },
            label_branching: self.label,
            order: if self.first_seen { Order::FirstSeen } else { Order::LargestFirst },
            placement: if self.first_fit { Placement::FirstFit } else { Placement::Shared },
            skip_overlong: self.skip,
            pad_to_multiple_of: self.multiple as u64,
            ranks: self.ranks as u64 % 6,
            ..Options::new(self.max_tokens as u64)
        }
    }
}

fuzz_target!(|case: Case| {
    let samples = case.samples();
    let input = case.borrow(&samples);
    let options = case.options();
    let packed = match pack(&input, &options) {
        Ok(packed) => packed,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let expected = matches!(error.fault, Fault::Option { .. } | Fault::Overlong { .. });
            assert!(case.wild || expected, "good input is refused: {error}");
            return;
        }
    };
    let again = pack(&input, &options).unwrap();
    let mut seen = vec![0; samples.len()];
    for skipped in &packed.skipped {
        seen[skipped.sample] += 1;
    }
    for index in 0..packed.trees.len() {
        let tree = packed.tree(index);
        assert_eq!(tree.buffer(), again.tree(index).buffer());
        for &sample in tree.array::<i32>("sample_index") {
            seen[sample as usize] += 1;
        }
        // Wild input that passes the checks is good input, but its unused sets may be anything.
        if !case.wild {
            check_tree(&case, &samples, &tree);
        }
    }
    assert!(seen.iter().all(|&times| times == 1), "samples lost or doubled: {seen:?}");
    check_stats(&packed);
    assert_eq!(packed.trees.len() % options.ranks as usize, 0);
    stream(&case, &samples, &options);
});

/// The same samples one by one: each lies in one closed micro-batch, or is reported.
fn stream(case: &Case, samples: &[Sample], options: &Options) {
    let mut stream = Stream::new(options.clone()).unwrap();
    let (mut open, mut skipped) = (Vec::new(), 0);
    let close = |packed: Packed, open: &mut Vec<Sample>, rest: Vec<Sample>| {
        let members: usize = packed.trees.iter().map(|tree| tree.sizes.samples).sum();
        assert_eq!((members, packed.trees.len()), (open.len(), options.ranks as usize));
        for index in (0..packed.trees.len()).filter(|_| !case.wild) {
            check_tree(case, open, &packed.tree(index));
        }
        *open = rest;
    };
    for sample in samples {
        let one = std::slice::from_ref(sample);
        match stream.add(&case.borrow(one)) {
            Ok(Added::Open) => open.push(sample.clone()),
            Ok(Added::Skipped(_)) => skipped += 1,
            Ok(Added::Closed(packed)) => close(*packed, &mut open, vec![sample.clone()]),
            // `pack` does not look at the ids of a sample that it leaves out for its length.
            Err(error) => assert!(case.wild, "good input is refused: {error}"),
        }
    }
    assert!(skipped <= samples.len());
    match stream.flush().unwrap() {
        Some(packed) => close(packed, &mut open, Vec::new()),
        None => assert!(open.is_empty()),
    }
}

fn check_tree(case: &Case, samples: &[Sample], tree: &TreeView) {
    let (ids, ends) = (tree.array::<i64>("input_ids"), tree.array::<i32>("subtree_end"));
    let (depth, parent) = (tree.array::<i64>("position_ids"), tree.array::<i32>("parent"));
    let cu_segments = tree.array::<i32>("cu_segments");
    let positions = *cu_segments.last().unwrap() as usize;
    assert!(ids.len() <= case.max_tokens as usize && ids.len() % case.multiple as usize == 0);
    for query in 0..ids.len() {
        let visible: Vec<usize> = (0..=query).filter(|&key| query < ends[key] as usize).collect();
        let past = std::iter::successors((query < positions).then_some(query), |&at| usize::try_from(parent[at]).ok());
        let mut past: Vec<usize> = past.collect();
        past.reverse();
        assert_eq!(visible, past);
        assert_eq!(depth[query], past.len().saturating_sub(1) as i64);
    }

    let (cu_terms, rows) = (tree.array::<i32>("cu_terms"), tree.array::<i32>("row_position"));
    let (term_row, target_ids) = (tree.array::<i32>("term_row"), tree.array::<i32>("term_target"));
    let (kept, counts) = (tree.array::<i32>("sampling_mask"), tree.array::<i32>("sampling_mask_counts"));
    let row_sets = if case.with_sets { split(kept, counts) } else { vec![Vec::new(); rows.len()] };
    let mut keys = HashSet::new();
    for (place, &index) in tree.array::<i32>("sample_index").iter().enumerate() {
        let sample = &samples[index as usize];
        let path = path(tree, place);
        assert_eq!(path.iter().map(|&at| ids[at]).collect::<Vec<_>>(), sample.ids);
        for (token, &at) in path.iter().enumerate() {
            let next = if case.label { sample.ids.get(token + 1) } else { None };
            let identity = case.with_identity.then(|| sample.identity[token]);
            keys.insert((at, parent[at], ids[at], identity, next));
        }
        let targets = sample.targets(case.with_mask);
        let terms = cu_terms[place] as usize..cu_terms[place + 1] as usize;
        assert_eq!(terms.len(), targets.len());
        for (term, target) in terms.zip(targets) {
            let row = term_row[term] as usize;
            assert_eq!(target_ids[term] as i64, sample.ids[target]);
            assert_eq!(rows[row] as usize, path[target - 1]);
            assert_eq!(row_sets[row], if case.with_sets { sample.set(target) } else { Vec::new() });
        }
    }
    // One key for each position, and no key twice below one parent: nothing is merged that differs, all is that agrees.
    assert_eq!(keys.len(), positions);
    let shared: HashSet<_> = keys.iter().map(|&(_, parent, id, identity, next)| (parent, id, identity, next)).collect();
    assert_eq!(shared.len(), positions);
    let distinct: HashSet<_> = rows.iter().zip(&row_sets).collect();
    assert_eq!(distinct.len(), rows.len());
    assert!(case.max_terms.map_or(true, |most| term_row.len() <= most as usize));
    assert!(case.max_kept.map_or(true, |most| kept.len() <= most as usize));
}

/// Packed indices of a sample's tokens: its last segment and those above it.
fn path(tree: &TreeView, place: usize) -> Vec<usize> {
    let (cu_segments, parents) = (tree.array::<i32>("cu_segments"), tree.array::<i32>("segment_parent"));
    let last = tree.array::<i32>("sample_last_segment")[place] as usize;
    let mut segments: Vec<usize> =
        std::iter::successors(Some(last), |&segment| usize::try_from(parents[segment]).ok()).collect();
    segments.reverse();
    segments.iter().flat_map(|&at| cu_segments[at] as usize..cu_segments[at + 1] as usize).collect()
}

fn split(kept: &[i32], counts: &[i32]) -> Vec<Vec<i32>> {
    let mut rest = kept;
    let take = |&count: &i32| {
        let (set, after) = rest.split_at(count as usize);
        rest = after;
        let mut set = set.to_vec();
        set.sort_unstable();
        set
    };
    let sets = counts.iter().map(take).collect();
    assert!(rest.is_empty());
    sets
}

fn check_stats(packed: &Packed) {
    let trees = (0..packed.trees.len()).map(|index| packed.tree(index));
    let (mut positions, mut terms) = (0, 0);
    for tree in trees {
        positions += tree.array::<i32>("cu_segments").last().map_or(0, |&end| end as u64);
        terms += tree.array::<i32>("term_row").len() as u64;
    }
    assert_eq!((packed.stats.packed_tokens, packed.stats.terms), (positions, terms));
}
