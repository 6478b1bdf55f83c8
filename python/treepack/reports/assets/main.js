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

/** The names of the trees in a list, as packed or by the tokens that they save. */
function fillTrees(select, trees, sort) {
  const chosen = select.value || "0";
  const saved = (i) => trees[i].alone - trees[i].tokens;
  const order = trees.map((_, i) => i);
  if (sort === "saved") order.sort((a, b) => saved(b) - saved(a) || a - b);
  const name = (i) => `${i}: ${plural(trees[i].samples, "sample")}, ${plural(trees[i].tokens, "token")}, ${count(saved(i))} saved`;
  select.replaceChildren(...order.map((i) => new Option(name(i), i)));
  select.value = chosen;
}

async function start() {
  const id = (name) => document.getElementById(name);
  const data = await readData(id("data").textContent);
  const select = id("tree");
  fillTrees(select, data.trees, "order");
  fillLegend(id("legend"));

  const icicle = new Icicle(id("icicle"), {
    onView(view, items, zoomed) {
      id("zoom-out").disabled = id("whole").disabled = !zoomed;
      id("status").textContent =
        `Shown: depth ${range(view.depth, view.reach - 1)} of ${plural(view.rows, "sample")}, in ${plural(items.length, "bar")}.`;
      icicle.canvas.setAttribute("aria-label", id("status").textContent);
    },
    onSpeak: (text) => (id("spoken").textContent = text),
    onPick: (item) => fillDetail(id("detail"), icicle.tree, icicle.bars, item, item ? icicle.describe(item) : []),
  });
  const search = new Search(data.trees, {
    onFound() {
      icicle.flags = search.flags[select.value];
      icicle.draw();
      id("found").textContent = search.text(icicle.tree, icicle.bars, select.value);
    },
    onGo(number, row) {
      if (String(number) !== select.value) {
        select.value = number;
        show();
      }
      icicle.goTo(row);
      id("found").textContent = search.text(icicle.tree, icicle.bars, select.value);
    },
  });
  const mask = maskPicture(id("mask"));
  const tiles = tilesPicture(id("tiles"));
  id("zoom-out").addEventListener("click", () => icicle.out());
  id("whole").addEventListener("click", () => icicle.out(true));

  async function show() {
    const root = document.documentElement;
    const tree = data.trees[select.value];
    const side = tree.tokens + tree.padding;
    delete root.dataset.shown;
    id("facts").textContent = facts(tree);
    icicle.flags = search.flags[select.value];
    icicle.show(tree);
    id("found").textContent = search.text(tree, icicle.bars, select.value);
    pictureNotes(tree);
    greyScale(id("greys"));
    id("mask").setAttribute("aria-label", `Attention mask of tree ${select.value}: ${id("mask-note").textContent}`);
    id("tiles").setAttribute("aria-label", `Tiles of tree ${select.value}: ${tree.tiles.full} full, ${tree.tiles.partial} partial`);
    const chosen = select.value;
    await Promise.all([mask.show(tree.mask.png, tree.mask.step, side), tiles.show(tree.tiles.png, tree.tiles.step * TILE, side)]);
    if (chosen === select.value) root.dataset.shown = chosen; // for whoever drives the page: all of this tree is drawn
  }

  function histograms() {
    const lengths = { across: "length (tokens)", up: "samples", label: (value) => plural(value, "sample") };
    const perPosition = (value) => `${value.toFixed(2)} samples on a position`;
    chart(id("lengths"), data.lengths, lengths);
    chart(id("sharing"), data.sharing, { across: "depth (tokens)", up: "samples per position (log)", label: perPosition, log: true });
  }

  function again() {
    icicle.draw();
    mask.draw();
    tiles.draw();
    histograms();
    greyScale(id("greys"));
  }

  histograms();
  select.addEventListener("change", show);
  id("groups")?.addEventListener("click", (event) => {
    const name = event.target.dataset.group;
    if (name === undefined) return;
    search.field.value = `group_id=${name}`;
    search.go(1);
    search.field.scrollIntoView({ block: "center" });
  });
  id("sort")?.addEventListener("change", (event) => {
    fillTrees(select, data.trees, event.target.value);
    if (event.target.value === "saved") select.selectedIndex = 0;
    show();
  });
  window.addEventListener("resize", again);
  dark.addEventListener("change", again);
  return show();
}

start();
