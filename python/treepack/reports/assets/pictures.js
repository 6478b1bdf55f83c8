"use strict";
// The attention mask of a tree and its tiles: shares from a PNG, in the colours of the theme, with axes in positions.

const FRAME = { left: 62, right: 10, top: 6, bottom: 40 };
const TILE = 128;

class Picture {
  /** `paint` turns the bytes of a cell (red, green) into a colour; `describe` says what a cell holds. */
  constructor(canvas, { paint, describe, grid }) {
    Object.assign(this, { canvas, paint, describe, grid, shares: null });
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => tip(""));
  }

  /** Shows a PNG whose cells are `step` positions along a side, of a mask of `side` x `side`. */
  async show(png, step, side) {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    this.asked = image;
    await image.decode();
    if (this.asked !== image) return; // another tree was chosen meanwhile
    const cells = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    const pen = cells.getContext("2d", { willReadFrequently: true });
    pen.drawImage(image, 0, 0);
    this.shares = pen.getImageData(0, 0, image.width, image.height);
    Object.assign(this, { cells, pen, step, side });
    this.draw();
  }

  draw() {
    if (!this.shares) return;
    const { cells, pen, shares, step, side } = this;
    const painted = pen.createImageData(cells.width, cells.height);
    const paint = this.paint();
    for (let at = 0; at < shares.data.length; at += 4) {
      painted.data.set(paint(shares.data[at], shares.data[at + 1]), at);
      painted.data[at + 3] = 255;
    }
    pen.putImageData(painted, 0, 0);
    const width = Math.min(this.canvas.parentElement.clientWidth, 480 + FRAME.left + FRAME.right);
    this.canvas.style.maxWidth = `${width}px`;
    this.size = width - FRAME.left - FRAME.right;
    const { context } = sharp(this.canvas, this.size + FRAME.top + FRAME.bottom);
    this.scale = this.size / side;
    // The last row and column of cells may reach past the mask: the frame cuts them.
    context.save();
    context.beginPath();
    context.rect(FRAME.left, FRAME.top, this.size, this.size);
    context.clip();
    context.imageSmoothingEnabled = step * this.scale < 1;
    context.drawImage(cells, FRAME.left, FRAME.top, cells.width * step * this.scale, cells.height * step * this.scale);
    if (this.grid && step * this.scale >= 7) this.lines(context);
    context.restore();
    this.axes(context);
  }

  lines(context) {
    context.strokeStyle = colour("paper");
    context.lineWidth = 1;
    for (let at = this.step; at < this.side; at += this.step) {
      const place = Math.round(at * this.scale);
      context.strokeRect(FRAME.left + place + 0.5, FRAME.top, 0, this.size);
      context.strokeRect(FRAME.left, FRAME.top + place + 0.5, this.size, 0);
    }
  }

  axes(context) {
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.strokeRect(FRAME.left - 0.5, FRAME.top - 0.5, this.size + 1, this.size + 1);
    context.fillStyle = colour("muted");
    const bottom = FRAME.top + this.size;
    for (const tick of ticks(0, this.side, 6)) {
      const place = tick * this.scale;
      context.textAlign = "center";
      context.fillText(short(tick, this.side), FRAME.left + Math.min(Math.max(place, 4), this.size - 12), bottom + 17);
      context.textAlign = "right";
      context.fillText(short(tick, this.side), FRAME.left - 6, Math.min(Math.max(FRAME.top + place + 4, FRAME.top + 9), bottom));
    }
    context.textAlign = "center";
    context.fillText("keys (packed positions)", FRAME.left + this.size / 2, bottom + 35);
    sideways(context, "queries (packed positions)", 12, FRAME.top + this.size / 2);
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const cell = (place) => Math.floor(place / this.scale / this.step);
    const [key, query] = [cell(event.clientX - box.left - FRAME.left), cell(event.clientY - box.top - FRAME.top)];
    if (!this.shares || Math.min(key, query) < 0 || Math.max(key, query) >= this.cells.width) return tip("");
    const at = 4 * (query * this.cells.width + key);
    const places = (i) => range(i * this.step, Math.min((i + 1) * this.step, this.side) - 1);
    const text = this.describe(this.shares.data[at], this.shares.data[at + 1]);
    tip(`queries ${places(query)}\nkeys ${places(key)}\n${text}`, event.clientX, event.clientY);
  }
}

const mix = (from, to, share) => from.map((value, i) => value + (to[i] - value) * share);
// Of a large tree most cells hold a few visible pairs: a root keeps them apart from those that hold none.
const strength = (share) => Math.sqrt(share);

function maskPicture(canvas) {
  const paint = () => {
    const greys = Array.from({ length: 256 }, (_, byte) => mix(channels("paper"), channels("ink"), strength(byte / 255)));
    return (share) => greys[share];
  };
  return new Picture(canvas, { paint, describe: (share) => `${share ? "about " : ""}${percent(share / 255)} of the pairs visible` });
}

function tilesPicture(canvas) {
  const paint = () => {
    const [empty, full, partial] = ["unseen", "full", "partial"].map(channels);
    return (fulls, partials) => {
      const seen = fulls + partials;
      return seen ? mix(empty, mix(partial, full, fulls / seen), strength(Math.min(seen / 255, 1))) : empty;
    };
  };
  const describe = (fulls, partials) => {
    const empty = Math.max(255 - fulls - partials, 0);
    const kinds = [[fulls, "full"], [partials, "partial"], [empty, "empty"]].filter(([share]) => share > 1);
    return kinds.length === 1 ? kinds[0][1] : kinds.map(([share, name]) => `about ${percent(share / 255)} ${name}`).join(", ");
  };
  return new Picture(canvas, { paint, describe, grid: true });
}

/** What stands under the pictures: shares of visible pairs, and a table of the tiles of each kind. */
function pictureNotes(tree) {
  const all = tree.tokens + tree.padding;
  const cell = `${count(tree.mask.step)} x ${count(tree.mask.step)}`;
  document.getElementById("mask-note").textContent =
    `${count(tree.pairs)} of ${count(all * all)} pairs visible (${percent(tree.pairs / (all * all))}). A cell shows the share of its ${cell} pairs:`;
  const { side, full, partial, step } = tree.tiles;
  const table = document.createElement("table");
  table.className = "kinds";
  const rows = [["full", "full: no mask", full], ["partial", "partial: masked", partial], ["unseen", "empty: skipped", side * side - full - partial]];
  for (const [key, name, tiles] of rows) {
    const row = table.insertRow();
    row.insertCell().append(Object.assign(document.createElement("span"), { className: `key ${key}` }), name);
    row.insertCell().textContent = plural(tiles, "tile");
    row.insertCell().textContent = percent(tiles / (side * side));
  }
  const note = document.getElementById("tiles-note");
  note.replaceChildren();
  if (step > 1) note.textContent = `A cell mixes ${step} x ${step} tiles; it is paler the more of them are empty.`;
  note.before(table);
  note.parentElement.querySelectorAll("table").forEach((each) => each !== table && each.remove());
}

/** The greys of the mask. */
function greyScale(place) {
  const legend = [0, 0.01, 0.1, 0.5, 1].map((share) => {
    const [paper, ink] = [channels("paper"), channels("ink")];
    const key = Object.assign(document.createElement("span"), { className: "key" });
    key.style.backgroundColor = `rgb(${mix(paper, ink, strength(share)).map(Math.round).join(" ")})`;
    const item = Object.assign(document.createElement("span"), { className: "item" });
    item.append(key, `${100 * share} %`);
    return item;
  });
  place.replaceChildren(...legend);
}
