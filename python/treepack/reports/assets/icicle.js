"use strict";
// One tree as nested bars on a canvas: depth to the right, samples down. Zooms by click and by keys.

const LEVELS = [1, 2, 4, 8, 16]; // samples from which each step of colour is used
const LEVEL_NAMES = ["1", "2-3", "4-7", "8-15", "16+"];
const levelOf = (samples) => LEVELS.filter((least) => samples >= least).length - 1;
const EDGE = { left: 62, right: 12, top: 4, bottom: 42 };
const THIN = 1; // pixels: lower subtrees are drawn as one bar with their neighbours
const MERGED = 26; // pixels: about as much of them goes into one such bar, so that zooming takes it apart
const GAP = 3; // pixels: bars at least this high are set apart by a line

class Icicle {
  constructor(canvas, { onView, onSpeak, onPick }) {
    Object.assign(this, { canvas, onView, onSpeak, onPick, bars: null, items: [], chosen: null, flags: null });
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => tip(""));
    canvas.addEventListener("click", (event) => {
      const item = this.at(event);
      if (!item) return;
      this.onPick(item);
      this.zoom(item);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && this.choose(this.items[this.chosen ?? 0]));
    canvas.addEventListener("blur", () => {
      this.chosen = null;
      tip("");
      this.draw();
    });
  }

  show(tree) {
    this.tree = tree;
    this.bars = placeBars(tree.bars);
    this.all = { depth: 0, reach: Math.max(largest(this.bars.reach), 1), row: 0, rows: Math.max(tree.samples, 1) };
    this.views = [this.all];
    this.chosen = null;
    this.onPick(null);
    this.draw();
  }

  /** Zooms to the lowest bar that a row of samples passes through. */
  goTo(row) {
    const { bars } = this;
    let found = 0;
    for (let i = 0; i < bars.n; ) {
      const inside = row >= bars.row[i] && row < bars.row[i] + bars.samples[i];
      if (inside) found = i;
      i = inside ? i + 1 : bars.end[i];
    }
    const view = { depth: bars.depth[found], reach: bars.reach[found], row: bars.row[found], rows: bars.samples[found] };
    this.views = [this.all, view];
    this.chosen = null;
    this.draw();
    const item = this.items.find((each) => each.bars.includes(found)) ?? this.items[0];
    this.onPick(item);
    this.onSpeak(this.describe(item).join(", "));
  }

  get view() {
    return this.views[this.views.length - 1];
  }

  zoom(item) {
    const { bars, view } = this;
    const reach = largest(item.bars.map((i) => bars.reach[i]));
    const next = { depth: item.depth, reach, row: item.row, rows: item.rows };
    if (Object.keys(next).every((name) => next[name] === view[name])) return;
    this.views.push(next);
    this.chosen = null;
    tip("");
    this.draw();
  }

  out(whole = false) {
    this.views = whole ? [this.all] : this.views.slice(0, Math.max(this.views.length - 1, 1));
    this.chosen = null;
    tip("");
    this.draw();
  }

  // --- drawing ---

  draw() {
    if (!this.bars) return;
    const height = EDGE.top + EDGE.bottom + Math.min(Math.max(this.all.rows * 26, 180), 520);
    const area = sharp(this.canvas, height);
    const view = this.view;
    this.inner = { width: area.width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
    // Edges lie between pixels of the screen: thousands of bars narrower than one would fade where they blend.
    const snap = (place) => Math.round(place * area.ratio) / area.ratio;
    this.pixel = 1 / area.ratio;
    this.x = (depth) => snap(EDGE.left + ((depth - view.depth) / (view.reach - view.depth)) * this.inner.width);
    this.y = (row) => snap(EDGE.top + ((row - view.row) / view.rows) * this.inner.height);
    this.ink = colour("ink");
    this.colours = {};
    for (const kind of ["prompt", "trained"]) this.colours[kind] = LEVELS.map((_, level) => colour(`${kind}-${level}`));
    this.axes(area.context);
    this.items = this.layout();
    this.hatches = { prompt: this.hatch(area, "prompt"), trained: this.hatch(area, "trained") };
    for (const item of this.items) this.bar(area.context, item);
    if (this.flags) this.marks(area);
    if (this.chosen !== null) this.frame(area.context, this.items[this.chosen]);
    this.onView(view, this.items, this.views.length > 1);
  }

  /** What is drawn in this view: bars, and neighbours too low for a line of their own as one. In pre-order. */
  layout() {
    const { bars, view } = this;
    const [rows, most] = [THIN, MERGED].map((pixels) => (pixels * view.rows) / this.inner.height);
    const items = [];
    for (let i = 0; i < bars.n; ) {
      const below = bars.row[i] + bars.samples[i];
      if (below <= view.row || bars.row[i] >= view.row + view.rows || bars.depth[i] >= view.reach) {
        i = bars.end[i];
      } else if (bars.reach[i] <= view.depth) {
        i = bars.end[i];
      } else if (bars.depth[i] + bars.tokens[i] <= view.depth && bars.segments[i] === 1) {
        i++; // above what is shown
      } else if (bars.samples[i] >= rows && bars.segments[i] === 1) {
        items.push(this.item([i], i + 1));
        i++;
      } else {
        const low = [i];
        let [end, room] = [bars.end[i], most - bars.samples[i]];
        const joins = (j) => bars.parent[j] === bars.parent[i] && (bars.samples[j] < rows || bars.segments[j] > 1);
        for (; end < bars.n && room >= bars.samples[end] && joins(end); end = bars.end[end]) {
          low.push(end);
          room -= bars.samples[end];
        }
        items.push(this.item(low, end));
        i = end;
      }
    }
    return items;
  }

  /** One drawn bar: the bars `list` side by side, with all bars before `end`. */
  item(list, end) {
    const { bars } = this;
    const first = list[0];
    const sum = (of) => list.reduce((total, i) => total + of[i], 0);
    const item = { bars: list, depth: bars.depth[first], row: bars.row[first], rows: sum(bars.samples), first };
    item.start = bars.start[first];
    if (end === first + 1 && bars.segments[first] === 1) {
      Object.assign(item, { segments: 1, tokens: bars.tokens[first], trained: bars.trained[first], reach: item.depth + bars.tokens[first] });
    } else {
      Object.assign(item, { segments: 0, tokens: 0, trained: 0, reach: largest(list.map((i) => bars.reach[i])) });
      for (let i = first; i < end; i++) {
        item.segments += bars.segments[i];
        item.tokens += bars.tokens[i];
        item.trained += bars.trained[i];
      }
    }
    item.left = Math.max(this.x(item.depth), EDGE.left);
    item.top = this.y(item.row);
    item.width = this.x(item.reach) - item.left;
    item.height = this.y(item.row + item.rows) - item.top;
    return item;
  }

  bar(context, item) {
    const gap = item.height >= GAP ? 1 : 0;
    const height = Math.max(item.height - gap, this.pixel);
    const split = item.width >= 3 * GAP ? 1 : 0;
    if (item.segments > 1) {
      context.fillStyle = this.hatches[2 * item.trained >= item.tokens ? "trained" : "prompt"];
      context.fillRect(item.left, item.top, Math.max(item.width - split, this.pixel), height);
      this.label(context, item, this.ink, () => [`${count(item.segments)} more segments`, count(item.segments)]);
      return;
    }
    const level = levelOf(item.rows);
    const shared = item.rows > 1 ? `, shared by ${count(item.rows)}` : "";
    let depth = item.depth;
    for (let run = this.bars.run[item.first], rest = item.tokens; rest > 0; run++) {
      const kind = this.bars.runs[run] < 0 ? "trained" : "prompt";
      const length = Math.abs(this.bars.runs[run]);
      const left = Math.max(this.x(depth), EDGE.left);
      depth += length;
      rest -= length;
      const width = Math.max(this.x(depth) - left - (rest ? 0 : split), this.pixel);
      context.fillStyle = this.colours[kind][level];
      context.fillRect(left, item.top, width, height);
      this.label(context, { ...item, left, width }, this.onColour(kind, level), () => [
        `${count(length)} ${kind} ${length === 1 ? "token" : "tokens"}${shared}`,
        plural(length, "token"),
        count(length),
      ]);
    }
  }

  /** Writes the first of `texts()` that fits, if any does. */
  label(context, { left, top, width, height }, fill, texts) {
    if (height < 14 || width < 24) return;
    const text = texts().find((each) => context.measureText(each).width <= width - 12);
    if (!text) return;
    context.fillStyle = fill;
    context.textAlign = "left";
    context.fillText(text, left + 6, top + height / 2 + 4);
  }

  /** The colour of text on a bar: dark on a light bar, light on a dark one. */
  onColour(kind, level) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(this.colours[kind][level].slice(at, at + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b > 135 ? "#10151a" : "#ffffff";
  }

  /** The fill of merged bars: lines over the colour of most of their tokens. */
  hatch({ context, ratio }, kind) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6 * ratio;
    const pen = tile.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = this.colours[kind][0];
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = this.colours[kind][1];
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift - 1, 7);
      pen.lineTo(shift + 7, -1);
    }
    pen.stroke();
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  axes(context) {
    const { view, inner } = this;
    const bottom = EDGE.top + inner.height;
    context.lineWidth = 1;
    context.strokeStyle = colour("line");
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    for (const depth of ticks(view.depth, view.reach, inner.width / 110)) {
      const x = Math.round(this.x(depth)) + 0.5;
      context.strokeRect(x, EDGE.top, 0, inner.height + 4);
      context.fillText(short(depth, view.reach), Math.min(Math.max(x, EDGE.left + 4), EDGE.left + inner.width - 12), bottom + 17);
    }
    context.fillText("depth (tokens)", EDGE.left + inner.width / 2, bottom + 36);
    sideways(context, "samples", 12, EDGE.top + inner.height / 2);
    context.textAlign = "right";
    for (const row of ticks(view.row, view.row + view.rows, inner.height / 60)) {
      const y = Math.min(Math.max(this.y(row) + 4, EDGE.top + 9), bottom + 1);
      context.fillText(short(row, view.row + view.rows), EDGE.left - 6, y);
    }
  }

  /** A mark at the right edge for each sample that the search has found. */
  marks({ context, width }) {
    const { view, flags } = this;
    context.fillStyle = colour("focus");
    let drawn = -1;
    for (let i = view.row; i < view.row + view.rows; i++) {
      if (!flags[i] || this.y(i + 1) <= drawn) continue;
      const top = Math.min(this.y(i), this.y(view.row + view.rows) - 2);
      drawn = Math.max(this.y(i + 1), top + 2);
      context.fillRect(width - EDGE.right + 3, top, EDGE.right - 4, drawn - top);
    }
  }

  // --- pointing and choosing ---

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const inside = (item) => x >= item.left && x < item.left + item.width && y >= item.top && y < item.top + item.height;
    return lastOf(this.items, inside);
  }

  hover(event) {
    const item = this.at(event);
    tip(item ? this.describe(item).join("\n") : "", event.clientX, event.clientY);
  }

  describe(item) {
    const { bars } = this;
    const first = bars.segment[item.first];
    const many = item.segments > 1;
    const lines = [
      many ? `Segments ${range(first, first + item.segments - 1)}: ${count(item.segments)} too thin to draw` : `Segment ${count(first)}`,
      `${plural(item.tokens, "token")}, packed ${item.tokens === 1 ? "position" : "positions"} ${range(item.start, item.start + item.tokens - 1)}`,
      `depth ${range(item.depth, item.reach - 1)}`,
      many ? `${plural(item.rows, "sample")} in them` : item.rows === 1 ? "1 sample alone" : `shared by ${plural(item.rows, "sample")}`,
      `${plural(item.trained, "token")} trained (${percent(item.trained / item.tokens)})`,
    ];
    if (item.bars.length === 1 && bars.segments[item.first] > 1) lines.push("the page does not hold them one by one");
    return [...lines, ...samplesTip(this.tree.of_samples, item)];
  }

  choose(item) {
    if (!item) return;
    this.chosen = this.items.indexOf(item);
    this.draw();
    const box = this.canvas.getBoundingClientRect();
    tip(this.describe(item).join("\n"), box.left + item.left + Math.min(item.width, 60), box.top + item.top + Math.min(item.height, 30));
    this.onSpeak(this.describe(item).join(", "));
    this.onPick(item);
  }

  frame(context, item) {
    context.strokeStyle = colour("focus");
    context.lineWidth = 2;
    context.strokeRect(item.left, item.top, Math.max(item.width - 1, 2), Math.max(item.height - 1, 2));
  }

  key(event) {
    const { items, bars } = this;
    const item = items[this.chosen ?? 0];
    if (!item) return;
    const parent = bars.parent[item.first];
    const beside = (each) => bars.parent[each.first] === parent;
    const moves = {
      ArrowRight: () => this.choose(items.find((each) => bars.parent[each.first] === item.first && item.segments === 1)),
      ArrowLeft: () => this.choose(items.find((each) => each.segments === 1 && each.first === parent)),
      ArrowDown: () => this.choose(items.slice(this.chosen + 1).find(beside)),
      ArrowUp: () => this.choose(lastOf(items.slice(0, this.chosen), beside)),
      Enter: () => this.zoomByKey(item),
      " ": () => this.zoomByKey(item),
      Escape: () => this.outByKey(),
      Backspace: () => this.outByKey(),
      Home: () => this.outByKey(true),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  zoomByKey(item) {
    this.zoom(item);
    this.choose(this.items[0]);
  }

  outByKey(whole = false) {
    this.out(whole);
    this.choose(this.items[0]);
  }
}
