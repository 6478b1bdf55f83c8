"use strict";
// The bars of a tree, as Python wrote them (bars.py), to where each of them lies. O(bars + runs).

/** The bars of a tree with where each lies: depth, first position, first row of samples, end of the bars below. */
function placeBars({ parent, tokens, samples, trained, terms, runs, merged }) {
  const n = parent.length;
  const make = () => new Int32Array(n);
  const bars = { n, parent, tokens, samples, trained, terms, runs, segments: make().fill(1), depth: make(), reach: make() };
  Object.assign(bars, { start: make(), row: make(), end: make(), segment: make(), run: make() });
  for (const [i, segments, reach] of merged) {
    bars.segments[i] = segments;
    bars.reach[i] = reach;
  }
  const next = make(); // the row for the next bar below each bar
  for (let i = 0; i < n; i++) next[i] = samples[i];
  for (let i = 0; i < n; i++) if (parent[i] >= 0) next[parent[i]] -= samples[i]; // samples that end here lie on top
  let [start, segment, row, run] = [0, 0, 0, 0];
  for (let i = 0; i < n; i++) {
    const p = parent[i];
    bars.depth[i] = p < 0 ? 0 : bars.depth[p] + tokens[p];
    if (bars.segments[i] === 1) bars.reach[i] = bars.depth[i] + tokens[i];
    bars.row[i] = p < 0 ? row : next[p];
    if (p < 0) row += samples[i];
    else next[p] += samples[i];
    next[i] += bars.row[i];
    bars.start[i] = start;
    bars.segment[i] = segment;
    bars.run[i] = run;
    for (let left = tokens[i]; left > 0; run++) left -= Math.abs(runs[run]);
    start += tokens[i];
    segment += bars.segments[i];
  }
  for (let i = n - 1; i >= 0; i--) {
    bars.end[i] = Math.max(bars.end[i], i + 1);
    const p = parent[i];
    if (p < 0) continue;
    bars.end[p] = Math.max(bars.end[p], bars.end[i]);
    bars.reach[p] = Math.max(bars.reach[p], bars.reach[i]);
  }
  return bars;
}
