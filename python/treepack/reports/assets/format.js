"use strict";
// Numbers as text, round ticks, colours of the theme, sharp canvases, the tooltip.

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 6 });
const count = (n) => grouped.format(Math.round(n));
const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;
/** A number on an axis that goes up to `most`: 8k and 12k where that is 10,000 and more. */
function short(n, most) {
  const [unit, letter] = most >= 1e7 ? [1e6, "M"] : most >= 1e4 ? [1e3, "k"] : [1, ""];
  return n && letter ? `${grouped.format(n / unit)}${letter}` : count(n);
}
const range = (first, last) => (first === last ? count(first) : `${count(first)} to ${count(last)}`);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.01 ? 2 : 1)} %`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = window.matchMedia("(prefers-color-scheme: dark)");

const largest = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 0);
/** The last item that `fits`, or undefined. */
const lastOf = (items, fits) => items.slice().reverse().find(fits);

/** [red, green, blue] of a colour of the theme, which are all #rrggbb. */
function channels(name) {
  const hex = colour(name);
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Round numbers from `low` to `high`, about `most` of them, whole ones. */
function ticks(low, high, most) {
  const rough = Math.max((high - low) / Math.max(most, 1), 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].map((digit) => digit * power).find((each) => each >= rough), 1);
  const out = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + 1e-9; tick += step) out.push(tick);
  return out;
}

/** Gives a canvas of the page's width a height, with as many pixels as the screen has; its context, in CSS pixels. */
function sharp(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return { context, width, height, ratio };
}

/** The text of a vertical axis, centred at (x, y), read from below. */
function sideways(context, text, x, y) {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(text, 0, 0);
  context.restore();
}

/** Shows `text` beside a point of the window, or nothing. */
function tip(text, x, y) {
  const box = document.getElementById("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth ? x - 14 - width : x + 14;
  const top = y + 14 + height > window.innerHeight ? y - 14 - height : y + 14;
  box.style.left = `${Math.max(left, 4)}px`;
  box.style.top = `${Math.max(top, 4)}px`;
}
