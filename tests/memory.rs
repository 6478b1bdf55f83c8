//! The memory that a packing says it may need, against what it takes: `memory::working_bytes` is a bound on the peak.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use treepack::{pack, working_bytes, KeptSets, Options, Placement, Samples, TokenColumn};

/// Counts what is allocated and the most that was.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// What is asked for and not taken does not count.
static ASKED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = if layout.size() == ASKED.load(Relaxed) { 0 } else { layout.size() };
        PEAK.fetch_max(ALLOCATED.fetch_add(size, Relaxed) + size, Relaxed);
        System.alloc(layout)
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let size = if layout.size() == ASKED.load(Relaxed) { 0 } else { layout.size() };
        ALLOCATED.fetch_sub(size, Relaxed);
        System.dealloc(at, layout)
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both lie in memory while one is copied to the other.
        PEAK.fetch_max(ALLOCATED.fetch_add(size, Relaxed) + size, Relaxed);
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        System.realloc(at, layout, size)
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A packing and its name: ids of all samples, masks or none, kept ids of each token or none, an identity or none.
struct Case {
    name: &'static str,
    ids: Vec<Vec<i64>>,
    mask: bool,
    kept: usize,
    identity: bool,
}

fn cases() -> Vec<Case> {
    let few = if cfg!(debug_assertions) { 20 } else { 1 };
    let case = |name, ids| Case { name, ids, mask: false, kept: 0, identity: false };
    let mut random = 1u64;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((random >> 33) % below) as i64
    };
    let binary: Vec<Vec<i64>> = (0..20_000 / few).map(|_| (0..16).map(|_| next(2)).collect()).collect();
    let mut out = vec![
        case("one token each", (0..100_000 / few).map(|i| vec![i]).collect()),
        case("the same token", vec![vec![5]; 100_000 / few as usize]),
        case("one long sample", vec![(0..1_000_000 / few).map(|i| i % 7).collect()]),
        case("nothing shared", (0..1000 / few).map(|s| (0..500).map(|i| s * 500 + i).collect()).collect()),
        case("a fork at each token", (0..700 / few).map(|s| (0..=s).chain([100_000 + s]).collect()).collect()),
        case("binary trees", binary.clone()),
        Case { mask: true, ..case("masks that change at each token", binary.clone()) },
        Case { kept: 1, ..case("kept sets of one", binary.clone()) },
        Case { kept: 4, ..case("kept sets of four", binary[..5000 / few as usize].to_vec()) },
        Case { identity: true, ..case("identities", binary) },
        case("two tokens", (0..50_000 / few).map(|i| vec![i % 300, i]).collect()),
        case("nothing", vec![]),
        case("one", vec![vec![1, 2, 3]]),
    ];
    out.push(Case {
        mask: true,
        ..case("long masks", vec![(0..300_000 / few).collect(), (0..300_000 / few).rev().collect()])
    });
    out
}

fn options() -> Vec<(&'static str, Options)> {
    let wide = Options::new(1 << 30);
    vec![
        ("one tree", wide.clone()),
        ("shared", Options::new(1 << 20)),
        ("first fit", Options { placement: Placement::FirstFit, ..Options::new(1 << 20) }),
        ("labels", Options { label_branching: true, ..wide }),
        ("ranks", Options { ranks: 8, ..Options::new(1 << 20) }),
        ("terms", Options { max_terms: Some(1 << 20), max_kept: Some(1 << 22), ..Options::new(1 << 20) }),
    ]
}

#[test]
fn a_packing_takes_no_more_than_it_says() {
    let mut worst = Vec::new();
    for case in cases() {
        let tokens: usize = case.ids.iter().map(Vec::len).sum();
        let mask: Vec<Vec<u8>> = case.ids.iter().map(|ids| (0..ids.len()).map(|i| (i % 2) as u8).collect()).collect();
        let identity: Vec<Vec<u8>> = case.ids.iter().map(|ids| vec![1; 8 * ids.len()]).collect();
        let counts: Vec<Vec<i32>> = case.ids.iter().map(|ids| vec![case.kept as i32; ids.len()]).collect();
        let set = |id: i64| (0..case.kept as i32).map(move |more| id as i32 + more);
        let kept: Vec<Vec<i32>> = case.ids.iter().map(|ids| ids.iter().flat_map(|&id| set(id)).collect()).collect();
        let mut samples = Samples::new(case.ids.iter().map(|ids| &ids[..]).collect());
        let runs_of = |ids: &Vec<i64>| if case.mask { ids.len() / 2 } else { (ids.len() > 1) as usize };
        let runs = case.ids.iter().map(runs_of).sum();
        let kept_terms = if case.kept > 0 { tokens - case.ids.len() } else { 0 };
        if case.mask {
            samples.mask = Some(mask.iter().map(|mask| &mask[..]).collect());
        }
        if case.kept > 0 {
            let (ids, counts) = (kept.iter().map(|x| &x[..]).collect(), counts.iter().map(|x| &x[..]).collect());
            samples.kept = Some(KeptSets { ids, counts });
        }
        if case.identity {
            let rows = identity.iter().map(|rows| &rows[..]).collect();
            samples.identity = Some(TokenColumn { name: "identity".into(), width: 8, rows });
        }
        for (how, options) in options() {
            let said = working_bytes(case.ids.len(), runs, kept_terms) as usize;
            ASKED.store(said, Relaxed);
            let before = ALLOCATED.load(Relaxed);
            PEAK.store(before, Relaxed);
            let packed = pack(&samples, &options).expect("it fits");
            let taken = PEAK.load(Relaxed) - before;
            drop(packed);
            worst.push((taken as f64 / said as f64, format!("{} / {how}: {taken} of {said}", case.name)));
        }
    }
    worst.sort_by(|a, b| b.0.total_cmp(&a.0));
    let shown: Vec<&str> = worst.iter().take(12).map(|(_, text)| &text[..]).collect();
    println!("{}", shown.join("\n"));
    assert!(worst[0].0 <= 1.0, "{}", shown[0]);
}
