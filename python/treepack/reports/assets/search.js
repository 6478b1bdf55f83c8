"use strict";
// A query to the samples of all drawn trees that fit it.
//
//   12              the line, the row or else the sample with this number, or a group of this name
//   abc             any text that has it
//   advantage>=0.5  one column; the beginning of its name is enough

const COMPARE = {
  "=": (a, b) => a === b,
  "!=": (a, b) => a !== b,
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
};

/** A query as a test of (columns, i), or a text that says what is wrong with it. */
function readQuery(query, names) {
  const parts = query.trim().match(/^([^<>=!]+?)\s*(<=|>=|!=|=|<|>)\s*(.*)$/);
  if (!parts) return anyColumn(query.trim());
  const [, asked, sign, wanted] = parts;
  const name = names.find((each) => each === asked) ?? names.find((each) => each.startsWith(asked));
  if (name === undefined) return `No column begins with "${asked}"; there are ${names.join(", ")}.`;
  const number = Number(wanted);
  const orders = sign.includes("<") || sign.includes(">");
  if (orders && (wanted === "" || Number.isNaN(number))) return `"${wanted}" is no number; ${name}${sign} needs one.`;
  const compare = COMPARE[sign];
  return (columns, i) => {
    const value = columns[name]?.[i];
    if (orders) return typeof value === "number" && compare(value, number);
    return compare(typeof value === "number" && wanted !== "" ? value === number : shown(value) === wanted, true);
  };
}

function anyColumn(wanted) {
  const low = wanted.toLowerCase();
  const exact = ["line", "row", "sample"];
  return (columns, i) => {
    if (shown(columns[placeName(columns)][i]) === wanted || (columns.group_id && shown(columns.group_id[i]) === wanted)) return true;
    return Object.keys(columns).some(
      (name) => !exact.includes(name) && typeof columns[name][i] === "string" && columns[name][i].toLowerCase().includes(low),
    );
  };
}

/** What fits a query: for each tree a flag for each sample, and all of them one after the other. */
function find(trees, query) {
  const names = [...new Set(trees.flatMap((tree) => Object.keys(tree.of_samples)))];
  const fits = readQuery(query, names);
  if (typeof fits === "string") return { wrong: fits, flags: trees.map(() => null), places: [] };
  const places = [];
  const flags = trees.map((tree, number) => {
    const columns = tree.of_samples;
    return Uint8Array.from(columns.sample, (_, i) => {
      if (!fits(columns, i)) return 0;
      places.push([number, i]);
      return 1;
    });
  });
  return { wrong: "", flags, places };
}

/** Packed tokens and terms of the samples with a flag: bars that any of them passes through; a merged one counts whole. */
function sumsOf(tree, bars, flags) {
  const before = new Int32Array(flags.length + 1);
  for (let i = 0; i < flags.length; i++) before[i + 1] = before[i] + flags[i];
  const sums = { tokens: 0, terms: 0, samples: before[flags.length] };
  for (let i = 0; i < bars.n; i++) {
    if (before[bars.row[i] + bars.samples[i]] > before[bars.row[i]]) sums.tokens += bars.tokens[i];
  }
  for (let i = 0; i < flags.length; i++) if (flags[i]) sums.terms += tree.of_samples.terms[i];
  return sums;
}

/** The search field: finds as one types, and goes from one sample to the next. */
class Search {
  constructor(trees, { onFound, onGo }) {
    Object.assign(this, { trees, onFound, onGo, places: [], at: -1 });
    this.field = document.getElementById("query");
    document.getElementById("search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.go(1);
    });
    document.getElementById("previous").addEventListener("click", () => this.go(-1));
    this.field.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.look(), 150);
    });
    this.flags = trees.map(() => null);
  }

  look() {
    clearTimeout(this.timer);
    this.query = this.field.value;
    const empty = !this.query.trim();
    const found = empty ? { wrong: "", flags: this.trees.map(() => null), places: [] } : find(this.trees, this.query);
    Object.assign(this, found, { at: -1 });
    this.onFound();
  }

  /** What the page says of the search, with the sums of the shown tree. */
  text(tree, bars, number) {
    if (this.wrong || !this.query?.trim()) return this.wrong || "";
    const trees = new Set(this.places.map(([each]) => each)).size;
    const where = this.trees.length > 1 ? ` in ${plural(trees, "tree")}` : "";
    const head = `${plural(this.places.length, "sample")} found${where}`;
    if (!this.flags[number]?.includes(1)) return `${head}.`;
    const sums = sumsOf(tree, bars, this.flags[number]);
    const at = this.at < 0 ? "" : `, at ${count(this.at + 1)}`;
    return `${head}${at}. Here ${plural(sums.samples, "sample")}: ${sumsLine(tree, sums)}.`;
  }

  go(step) {
    if (this.query !== this.field.value) this.look();
    if (!this.places.length) return;
    const n = this.places.length;
    this.at = this.at < 0 ? (step > 0 ? 0 : n - 1) : (this.at + step + n) % n;
    this.onGo(...this.places[this.at]);
  }
}
