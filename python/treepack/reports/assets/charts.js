"use strict";
// A histogram as SVG bars with axes.

const SVG = "http://www.w3.org/2000/svg";
const SIZE = { height: 250, left: 62, right: 14, top: 14, bottom: 46 };

function element(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** 1, 2, 5, 10 ... up to `most`, or powers of ten alone where those are many. */
function logTicks(most) {
  const digits = most > 200 ? [1] : [1, 2, 5];
  const out = [];
  for (let power = 1; power <= most; power *= 10) out.push(...digits.map((digit) => digit * power).filter((tick) => tick <= most));
  return out;
}

/**
 * Draws `{first, width, values}` into `place`. `label(value)` says what a bar stands for; `log` starts the axis at 1,
 * the least that values have then.
 */
function chart(place, { first, width, values }, { across, up, label, log = false }) {
  const most = Math.max(largest(values), log ? 2 : 1);
  const total = Math.max(place.clientWidth, 240);
  const inner = { width: total - SIZE.left - SIZE.right, height: SIZE.height - SIZE.top - SIZE.bottom };
  const bottom = SIZE.top + inner.height;
  const end = first + width * Math.max(values.length, 1); // padding alone has no sample
  const x = (value) => SIZE.left + ((value - first) / (end - first)) * inner.width;
  const y = (value) => bottom - (log ? Math.log(value) / Math.log(most) : value / most) * inner.height;
  const svg = element("svg", { viewBox: `0 0 ${total} ${SIZE.height}`, role: "img", "aria-label": `${up} by ${across}` });
  for (const tick of log ? logTicks(most) : ticks(0, most, 5)) {
    svg.append(element("line", { x1: SIZE.left, x2: total - SIZE.right, y1: y(tick), y2: y(tick) }));
    svg.append(element("text", { x: SIZE.left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick, most)));
  }
  const wide = inner.width / values.length;
  const gap = wide > 4 ? 1 : 0;
  values.forEach((value, i) => {
    if (!value) return;
    const from = first + i * width;
    const height = Math.max(bottom - y(value), 1.5); // one sample among thousands is still there
    const bar = element("rect", { class: "value", x: x(from) + gap / 2, y: bottom - height, width: wide - gap, height });
    bar.append(element("title", {}, `${count(from)}${width > 1 ? ` to ${count(from + width - 1)}` : ""} tokens: ${label(value)}`));
    svg.append(bar);
  });
  for (const tick of ticks(first, end, inner.width / 80)) {
    svg.append(element("line", { x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }));
    svg.append(element("text", { x: Math.min(x(tick), total - 18), y: bottom + 18, "text-anchor": "middle" }, short(tick, end)));
  }
  svg.append(element("text", { x: SIZE.left + inner.width / 2, y: SIZE.height - 6, "text-anchor": "middle" }, across));
  const middle = SIZE.top + inner.height / 2;
  svg.append(element("text", { x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, up));
  place.replaceChildren(svg);
}
