"use strict";
// The samples of a tree, from the top of its picture down: which rows of a file a bar is, their values, sums and text.

const SHOWN = 20; // samples of a bar that the table shows
const NAMED = 3; // samples and values that the tooltip names

/** The numbers, deflated JSON in base64, that Python wrote. */
async function readData(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const shown = (value) => (value === null || value === undefined ? "none" : typeof value === "number" ? String(value) : `${value}`);

/** The column that says where a sample is: its line or row of a file where that is known, else its number. */
const placeName = (columns) => ["line", "row", "sample"].find((name) => columns[name]);

function sampleName(columns, i) {
  const name = placeName(columns);
  return `${columns.file ? `${shown(columns.file[i])}, ` : ""}${name} ${shown(columns[name][i])}`;
}

const ownColumns = ["sample", "line", "row", "file", "length", "terms", "turns"];
/** The columns that come from the user. */
const valueNames = (columns) => Object.keys(columns).filter((name) => !ownColumns.includes(name));

/** Lines about the samples of a bar, for the tooltip. */
function samplesTip(columns, item) {
  if (!columns.sample.length) return [];
  const end = item.row + item.rows;
  const names = [];
  for (let i = item.row; i < Math.min(end, item.row + NAMED); i++) names.push(sampleName(columns, i));
  const more = item.rows - names.length;
  const lines = [names.join(" · ") + (more > 0 ? ` and ${count(more)} more` : "")];
  for (const name of valueNames(columns).slice(0, 4)) lines.push(`${name} ${valuesOf(columns[name], item.row, end)}`);
  return lines;
}

/** A few different values of a column, or their range where all are numbers. */
function valuesOf(column, start, end) {
  const seen = new Set();
  let [least, most, numbers] = [Infinity, -Infinity, true];
  for (let i = start; i < end; i++) {
    const value = column[i];
    if (typeof value === "number") [least, most] = [Math.min(least, value), Math.max(most, value)];
    else numbers = false;
    if (seen.size <= NAMED) seen.add(value);
  }
  if (seen.size <= NAMED) return [...seen].map(shown).join(", ");
  return numbers ? `${shown(least)} to ${shown(most)}` : `${[...seen].slice(0, NAMED).map(shown).join(", ")} ...`;
}

/** What a bar and all below it sum up to: packed tokens, tokens of its samples alone from its depth on, terms. */
function sumsBelow(tree, bars, item) {
  const end = bars.end[item.bars[item.bars.length - 1]];
  const sums = { tokens: 0, terms: 0, alone: 0 };
  for (let i = item.first; i < end; i++) {
    sums.tokens += bars.tokens[i];
    sums.terms += bars.terms[i];
  }
  for (let i = item.row; i < item.row + item.rows; i++) sums.alone += tree.of_samples.length[i] - item.depth;
  return sums;
}

const share = (part, of) => percent(of ? part / of : 0);

/** One line of sums with their shares of the tree. */
function sumsLine(tree, sums) {
  const parts = [`${plural(sums.tokens, "packed token")} (${share(sums.tokens, tree.tokens)} of the tree)`];
  if (sums.alone !== undefined) {
    parts.push(`${plural(sums.alone, "token")} of the samples alone (${share(sums.alone, tree.alone)})`);
    parts.push(`${count(sums.alone - sums.tokens)} saved (${share(sums.alone - sums.tokens, tree.alone - tree.tokens)} of what the tree saves)`);
  }
  parts.push(`${plural(sums.terms, "loss term")} (${share(sums.terms, tree.terms)})`);
  return parts.join(" · ");
}

function htmlOf(tag, className, text) {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

/** Everything about a chosen bar, below the picture: sums, text, a table of its samples. */
function fillDetail(place, tree, bars, item, description) {
  place.hidden = !item;
  place.replaceChildren();
  if (!item) return;
  place.append(htmlOf("h3", "", description[0]), htmlOf("p", "", description.slice(1, 5).join(" · ")));
  place.append(htmlOf("p", "sums", `With all below it: ${sumsLine(tree, sumsBelow(tree, bars, item))}`));
  const text = item.bars.length === 1 && item.segments === 1 ? tree.texts[item.first] : undefined;
  if (text) place.append(textOf(text));
  else if (Object.keys(tree.texts).length) place.append(htmlOf("p", "note", "The page has no room for the text of these segments."));
  if (item.rows && tree.of_samples.sample.length) place.append(tableOf(tree, item));
}

/** The text of a segment; what is trained is marked. */
function textOf(runs) {
  const box = htmlOf("pre", "text", "");
  box.tabIndex = 0;
  for (const [kind, text] of runs) box.append(kind === 1 ? htmlOf("mark", "", text) : kind === 2 ? htmlOf("i", "", text) : text);
  return box;
}

function tableOf(tree, item) {
  const columns = tree.of_samples;
  const names = Object.keys(columns);
  const order = [...["file", "line", "row", "sample"].filter((name) => names.includes(name)), ...valueNames(columns), "length", "terms", "turns"];
  const table = htmlOf("table", "samples", "");
  const head = table.createTHead().insertRow();
  for (const name of order) head.append(htmlOf("th", "", name));
  const body = table.createTBody();
  const end = Math.min(item.row + item.rows, item.row + SHOWN);
  for (let i = item.row; i < end; i++) {
    const row = body.insertRow();
    for (const name of order) row.append(htmlOf("td", "", shown(columns[name][i])));
  }
  const box = htmlOf("div", "scroll", "");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "samples of the chosen bar");
  box.append(table);
  const notes = [];
  if (item.rows > SHOWN) notes.push(`The first ${SHOWN} of ${plural(item.rows, "sample")}.`);
  if (tree.left_of_samples) notes.push(`The page has no room for ${plural(tree.left_of_samples, "more column")}.`);
  if (notes.length) box.append(htmlOf("p", "note", notes.join(" ")));
  return box;
}
