"use strict";
// The page: which tree is shown, what stands around it, when to draw again.

function fillLegend(place) {
  const scale = Object.assign(document.createElement("div"), { className: "scale" });
  const cell = (className, text = "") => scale.append(Object.assign(document.createElement("span"), { className, textContent: text }));
  for (const kind of ["prompt", "trained"]) {
    cell("name", kind);
    for (let level = 0; level < LEVELS.length; level++) cell(`swatch ${kind}-${level}`);
  }
  cell("name", "samples");
  for (const name of LEVEL_NAMES) cell("", name);
  const merged = Object.assign(document.createElement("span"), { className: "item" });
  for (const kind of ["prompt", "trained"]) merged.append(Object.assign(document.createElement("span"), { className: `swatch merged-${kind}` }));
  merged.append("n more segments, too thin to draw: the colour of most of their tokens");
  place.append(scale, merged);
}

function facts(tree) {
  const drawn = tree.bars.parent.length - tree.bars.merged.length;
  const parts = [
    plural(tree.samples, "sample"),
    `${plural(tree.alone, "raw token")} in ${plural(tree.tokens, "position")}` + (tree.padding ? ` and ${count(tree.padding)} of padding` : ""),
    plural(tree.segments, "segment") + (drawn < tree.segments ? ` (the ${count(drawn)} largest are drawn)` : ""),
    plural(tree.rows, "row"),
    plural(tree.terms, "loss term"),
  ];
  if (tree.bars.grain > 1) parts.push(`prompt and trained drawn in steps of ${count(tree.bars.grain)} tokens`);
  if (tree.columns.length) {
    parts.push(`columns ${tree.columns.join(", ")}` + (tree.more_columns ? ` and ${count(tree.more_columns)} more` : ""));
  }
  return parts.join(" · ");
}

function start() {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const select = find("tree");
  data.trees.forEach((tree, i) =>
    select.add(new Option(`${i}: ${plural(tree.samples, "sample")}, ${plural(tree.tokens, "token")}`, i)),
  );
  fillLegend(find("legend"));

  const icicle = new Icicle(find("icicle"), {
    onView(view, items, zoomed) {
      find("zoom-out").disabled = find("whole").disabled = !zoomed;
      find("status").textContent =
        `Shown: depth ${range(view.depth, view.reach - 1)} of ${plural(view.rows, "sample")}, in ${plural(items.length, "bar")}.`;
      icicle.canvas.setAttribute("aria-label", find("status").textContent);
    },
    onSpeak: (text) => (find("spoken").textContent = text),
  });
  const mask = maskPicture(find("mask"));
  const tiles = tilesPicture(find("tiles"));
  find("zoom-out").addEventListener("click", () => icicle.out());
  find("whole").addEventListener("click", () => icicle.out(true));

  async function show() {
    const root = document.documentElement;
    const tree = data.trees[select.value];
    const side = tree.tokens + tree.padding;
    delete root.dataset.shown;
    find("facts").textContent = facts(tree);
    icicle.show(tree);
    pictureNotes(tree);
    greyScale(find("greys"));
    find("mask").setAttribute("aria-label", `Attention mask of tree ${select.value}: ${find("mask-note").textContent}`);
    find("tiles").setAttribute("aria-label", `Tiles of tree ${select.value}: ${tree.tiles.full} full, ${tree.tiles.partial} partial`);
    const chosen = select.value;
    await Promise.all([mask.show(tree.mask.png, tree.mask.step, side), tiles.show(tree.tiles.png, tree.tiles.step * TILE, side)]);
    if (chosen === select.value) root.dataset.shown = chosen; // for whoever drives the page: all of this tree is drawn
  }

  function histograms() {
    const lengths = { across: "length (tokens)", up: "samples", label: (value) => plural(value, "sample") };
    const perPosition = (value) => `${value.toFixed(2)} samples on a position`;
    chart(find("lengths"), data.lengths, lengths);
    chart(find("sharing"), data.sharing, { across: "depth (tokens)", up: "samples per position (log)", label: perPosition, log: true });
  }

  function again() {
    icicle.draw();
    mask.draw();
    tiles.draw();
    histograms();
    greyScale(find("greys"));
  }

  histograms();
  select.addEventListener("change", show);
  window.addEventListener("resize", again);
  dark.addEventListener("change", again);
  return show();
}

start();
