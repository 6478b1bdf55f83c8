//! A slow search for good placements: ruin and recreate with simulated annealing, from several starts. It shares no code
//! with the planner, so that one can be measured against the other.
//!
//! `placement_search INPUT OUTPUT SECONDS SEED`. INPUT is little-endian u32: nodes, samples, max_tokens, price of a tree,
//! most trees, starts; then the parent and the length of each node (0 is the root, parents come first), the last node of
//! each sample, and for each start the tree of each sample. OUTPUT is the tree of each sample in the best placement: the
//! least sum of positions and prices, with no more than so many trees wherever a start has no more.

use std::time::{Duration, Instant};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, input, output, seconds, seed] = &arguments[..] else {
        eprintln!("placement_search INPUT OUTPUT SECONDS SEED");
        std::process::exit(2);
    };
    let bytes = std::fs::read(input).expect("INPUT can be read");
    let words: Vec<u32> = bytes.chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
    let (problem, mut starts) = Problem::parse(&words);
    let seconds: f64 = seconds.parse().expect("SECONDS is a number");
    let mut random = Random(seed.parse::<u64>().expect("SEED is a whole number") * 2 + 1);
    starts.sort_by_key(|start| Search::new(&problem, start).cost());
    starts.dedup();
    starts.truncate(3);
    // The best start gets half of the time, the others an eighth each, the best that was found the rest.
    let mut best = starts[0].clone();
    let mut least = Search::new(&problem, &best).cost();
    for (number, start) in starts.into_iter().enumerate() {
        let share = if number == 0 { 0.5 } else { 0.125 };
        anneal(&problem, &start, seconds * share, &mut random, 0.02, &mut best, &mut least);
    }
    anneal(&problem, &best.clone(), seconds * 0.25, &mut random, 0.005, &mut best, &mut least);
    let bytes: Vec<u8> = best.iter().flat_map(|tree| tree.to_le_bytes()).collect();
    std::fs::write(output, bytes).expect("OUTPUT can be written");
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn unit(&mut self) -> f64 {
        (self.next() & 0xFFFF_FFFF) as f64 / 4_294_967_296.0
    }
}

struct Problem {
    parent: Vec<u32>,
    length: Vec<u32>,
    end: Vec<u32>,
    leaf: Vec<u32>,
    /// Samples in depth-first order, and the place of each in it.
    order: Vec<u32>,
    place: Vec<u32>,
    max_tokens: u32,
    price: u64,
    most_trees: usize,
}

impl Problem {
    fn parse(words: &[u32]) -> (Self, Vec<Vec<u32>>) {
        let [nodes, samples, max_tokens, price, most_trees, starts] = words[..6] else { panic!("INPUT is cut off") };
        let (nodes, samples) = (nodes as usize, samples as usize);
        let mut rest = &words[6..];
        let mut take = |count: usize| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head.to_vec()
        };
        let (parent, length, leaf) = (take(nodes), take(nodes), take(samples));
        let starts: Vec<Vec<u32>> = (0..starts).map(|_| take(samples)).collect();
        let mut end = vec![0; nodes];
        let mut children = vec![Vec::new(); nodes];
        for node in 1..nodes {
            end[node] = end[parent[node] as usize] + length[node];
            children[parent[node] as usize].push(node);
        }
        let (mut number, mut next, mut stack) = (vec![0; nodes], 0, vec![0]);
        while let Some(node) = stack.pop() {
            number[node] = next;
            next += 1;
            stack.extend(children[node].iter().rev());
        }
        let mut order: Vec<u32> = (0..samples as u32).collect();
        order.sort_by_key(|&sample| (number[leaf[sample as usize] as usize], sample));
        let mut place = vec![0; samples];
        for (at, &sample) in order.iter().enumerate() {
            place[sample as usize] = at as u32;
        }
        let (price, most_trees) = (price as u64, most_trees as usize);
        (Problem { parent, length, end, leaf, order, place, max_tokens, price, most_trees }, starts)
    }

    /// The last node that the paths of two samples have in common.
    fn meet(&self, a: u32, b: u32) -> u32 {
        let (mut a, mut b) = (self.leaf[a as usize], self.leaf[b as usize]);
        while a != b {
            if self.end[a as usize] >= self.end[b as usize] && a != 0 {
                a = self.parent[a as usize];
            } else {
                b = self.parent[b as usize];
            }
        }
        a
    }
}

/// A placement that changes: how many samples of each tree pass each node.
struct Search<'a> {
    problem: &'a Problem,
    tree_of: Vec<u32>,
    /// (tree, samples) of each node; node 0 is in all trees and has none.
    trees: Vec<Vec<(u32, u32)>>,
    members: Vec<u32>,
    free: Vec<u32>,
    positions: u64,
    used: usize,
    mark: Vec<u32>,
    stamp: u32,
}

const NONE: u32 = u32::MAX;

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, tree_of: &[u32]) -> Self {
        let trees = tree_of.iter().max().map_or(0, |&tree| tree as usize + 1);
        let mut out = Search {
            problem,
            tree_of: vec![NONE; tree_of.len()],
            trees: vec![Vec::new(); problem.parent.len()],
            members: vec![0; trees],
            free: vec![problem.max_tokens; trees],
            positions: 0,
            used: 0,
            mark: vec![0; problem.parent.len()],
            stamp: 0,
        };
        for (sample, &tree) in tree_of.iter().enumerate() {
            out.put(sample as u32, tree);
        }
        out
    }

    fn cost(&self) -> u64 {
        let beyond = self.used.saturating_sub(self.problem.most_trees) as u64;
        self.positions + self.used as u64 * self.problem.price + beyond * self.problem.max_tokens as u64
    }

    fn put(&mut self, sample: u32, tree: u32) {
        let mut node = self.problem.leaf[sample as usize];
        let mut added = 0;
        while node != 0 {
            let list = &mut self.trees[node as usize];
            match list.iter_mut().find(|entry| entry.0 == tree) {
                Some(entry) => entry.1 += 1,
                None => {
                    list.push((tree, 1));
                    added += self.problem.length[node as usize];
                }
            }
            node = self.problem.parent[node as usize];
        }
        self.free[tree as usize] -= added;
        self.positions += added as u64;
        self.used += usize::from(self.members[tree as usize] == 0);
        self.members[tree as usize] += 1;
        self.tree_of[sample as usize] = tree;
    }

    fn take(&mut self, sample: u32) {
        let tree = self.tree_of[sample as usize];
        let mut node = self.problem.leaf[sample as usize];
        let mut gone = 0;
        while node != 0 {
            let list = &mut self.trees[node as usize];
            let at = list.iter().position(|entry| entry.0 == tree).expect("the tree holds the sample");
            list[at].1 -= 1;
            if list[at].1 == 0 {
                list.swap_remove(at);
                gone += self.problem.length[node as usize];
            }
            node = self.problem.parent[node as usize];
        }
        self.free[tree as usize] += gone;
        self.positions -= gone as u64;
        self.members[tree as usize] -= 1;
        self.used -= usize::from(self.members[tree as usize] == 0);
        self.tree_of[sample as usize] = NONE;
    }

    /// The tree to which something below `node`, of `below` positions, adds least; ties: the fullest.
    fn best_tree(&self, node: u32, below: u32, random: &mut Random) -> Option<u32> {
        let mut node = node;
        let reach = below + self.problem.end[node as usize];
        let mut blinks = 0.01;
        loop {
            let added = reach - self.problem.end[node as usize];
            let mut best = None;
            let mut consider = |tree: u32| {
                let free = self.free[tree as usize];
                if free >= added && best.is_none_or(|(least, _)| free < least) && random.unit() >= blinks {
                    best = Some((free, tree));
                }
            };
            if node == 0 {
                (0..self.free.len() as u32).filter(|&tree| self.members[tree as usize] > 0).for_each(&mut consider);
                return best.map(|(_, tree)| tree);
            }
            self.trees[node as usize].iter().for_each(|entry| consider(entry.0));
            if let Some((_, tree)) = best {
                return Some(tree);
            }
            node = self.problem.parent[node as usize];
            blinks = 0.03;
        }
    }

    /// Positions of the samples below `top`.
    fn union(&mut self, samples: &[u32], top: u32) -> u32 {
        self.stamp += 1;
        let mut sum = 0;
        for &sample in samples {
            let mut node = self.problem.leaf[sample as usize];
            while node != top && self.mark[node as usize] != self.stamp {
                self.mark[node as usize] = self.stamp;
                sum += self.problem.length[node as usize];
                node = self.problem.parent[node as usize];
            }
        }
        sum
    }

    fn new_tree(&mut self) -> u32 {
        if let Some(tree) = self.members.iter().position(|&members| members == 0) {
            return tree as u32;
        }
        self.members.push(0);
        self.free.push(self.problem.max_tokens);
        self.free.len() as u32 - 1
    }

    /// Puts samples (in depth-first order) back: all into one tree where one has room, else in two halves that part where
    /// they share least.
    fn put_back(&mut self, samples: &[u32], random: &mut Random) {
        let mut stack = vec![samples];
        while let Some(part) = stack.pop() {
            let (Some(&first), Some(&last)) = (part.first(), part.last()) else { continue };
            let top = if part.len() == 1 { self.problem.leaf[first as usize] } else { self.problem.meet(first, last) };
            let below = self.union(part, top);
            let fits = below + self.problem.end[top as usize] <= self.problem.max_tokens;
            let found = if fits { self.best_tree(top, below, random) } else { None };
            let may_open = self.used < self.problem.most_trees || part.len() == 1;
            let tree = match found {
                Some(tree) => tree,
                None if part.len() > 1 && !(fits && may_open && random.unit() < 0.7) => {
                    let meets = |at: &usize| self.problem.end[self.problem.meet(part[*at - 1], part[*at]) as usize];
                    let cut = match random.below(3) {
                        0 => 1 + random.below(part.len() - 1),
                        _ => (1..part.len()).min_by_key(|at| (meets(at), at.abs_diff(part.len() / 2))).unwrap_or(1),
                    };
                    let (left, right) = part.split_at(cut);
                    stack.push(right);
                    stack.push(left);
                    continue;
                }
                None => self.new_tree(),
            };
            for &sample in part {
                self.put(sample, tree);
            }
        }
    }

    /// Samples to take out: neighbours of one in depth-first order and what lies beside them, or whole trees.
    fn ruin(&mut self, members: &[Vec<u32>], random: &mut Random) -> Vec<u32> {
        let samples = self.problem.order.len();
        let mut out = Vec::new();
        let seed = self.problem.order[random.below(samples)];
        let (kind, trees) = (random.below(4), 1 + random.below(4));
        let mut touched: Vec<u32> = Vec::new();
        let at = self.problem.place[seed as usize] as usize;
        for step in 0..samples.min(400) {
            // Outwards from the seed, one side after the other.
            let half = step.div_ceil(2);
            let near = if step % 2 == 0 { at + half } else { at.wrapping_sub(half) };
            let Some(&sample) = self.problem.order.get(near) else { continue };
            let tree = self.tree_of[sample as usize];
            if !touched.contains(&tree) {
                touched.push(tree);
                if touched.len() >= trees {
                    break;
                }
            }
        }
        if kind == 1 {
            // Trees that share nothing in particular: their rooms are what is to be joined.
            touched.truncate(1);
            for _ in 0..random.below(3) + 1 {
                touched.push(self.tree_of[random.below(samples)]);
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for &tree in &touched {
            let list = &members[tree as usize];
            let size = [4, 16, 64][random.below(3)];
            let part = 1 + random.below(size.min(list.len()));
            let whole = (kind == 2 && tree == self.tree_of[seed as usize]) || list.len() <= part;
            let middle = list.partition_point(|&x| (self.problem.place[x as usize] as usize) < at).min(list.len() - 1);
            let middle = if kind == 1 { random.below(list.len()) } else { middle };
            let low = middle.saturating_sub(random.below(part)).min(list.len().saturating_sub(part));
            out.extend_from_slice(if whole { list } else { &list[low..low + part] });
        }
        out.sort_unstable_by_key(|&sample| self.problem.place[sample as usize]);
        out
    }
}

fn anneal(
    problem: &Problem,
    start: &[u32],
    seconds: f64,
    random: &mut Random,
    heat: f64,
    best: &mut Vec<u32>,
    least: &mut u64,
) {
    let mut search = Search::new(problem, start);
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); search.free.len()];
    for &sample in &problem.order {
        members[search.tree_of[sample as usize] as usize].push(sample);
    }
    let (clock, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut temperature = 0.0;
    for round in 0u64.. {
        if round % 64 == 0 {
            let part = clock.elapsed().as_secs_f64() / limit.as_secs_f64();
            if part >= 1.0 {
                break;
            }
            temperature = heat * problem.max_tokens as f64 * (1e-3f64).powf(part);
        }
        let before = search.cost();
        let mut out = search.ruin(&members, random);
        let old: Vec<(u32, u32)> = out.iter().map(|&sample| (sample, search.tree_of[sample as usize])).collect();
        for &sample in &out {
            search.take(sample);
        }
        // Blocks of neighbours, in an order of chance.
        for _ in 0..random.below(4) {
            let turn = random.below(out.len());
            out.rotate_left(turn);
        }
        let mut from = 0;
        while from < out.len() {
            let to = (from + 1 + random.below(out.len())).min(out.len());
            let wraps = (from + 1..to).find(|&i| problem.place[out[i] as usize] < problem.place[out[i - 1] as usize]);
            let to = wraps.unwrap_or(to);
            search.put_back(&out[from..to], random);
            from = to;
        }
        let after = search.cost();
        if after as f64 > before as f64 - temperature * random.unit().max(1e-12).ln() {
            for &(sample, _) in &old {
                search.take(sample);
            }
            for &(sample, tree) in &old {
                search.put(sample, tree);
            }
            continue;
        }
        members.resize(search.free.len(), Vec::new());
        for &(sample, tree) in &old {
            let new = search.tree_of[sample as usize];
            if new != tree {
                let place = |x: &u32| problem.place[*x as usize];
                let list = &mut members[tree as usize];
                let at = list.binary_search_by_key(&place(&sample), place).expect("the tree lists the sample");
                list.remove(at);
                let list = &mut members[new as usize];
                let at = list.partition_point(|x| place(x) < place(&sample));
                list.insert(at, sample);
            }
        }
        if after < *least {
            *least = after;
            best.clone_from(&search.tree_of);
        }
    }
}
