// The model's lines, tiles and listing side by side: a click on one lights what belongs to it in the others.

const LINE = 18;
const columns = {};
const SOURCE = /([\w./-]+\.py:\d+)/;
const LABEL = /label = "([^"]+)"/;

// Only the lines in sight are in the document.
function column(name, lines, chosen) {
  const of = $(`#${name}`), room = element(of, "div");
  room.style.height = `${lines.length * LINE}px`;
  const self = (columns[name] = { of, lines, lit: new Set() });
  self.draw = () => {
    for (const old of of.querySelectorAll(".row")) old.remove();
    const first = Math.max(0, Math.floor(of.scrollTop / LINE) - 5), last = first + Math.ceil(of.clientHeight / LINE) + 10;
    for (let k = first; k < Math.min(last, lines.length); k++) {
      const row = element(of, "div", lines[k] || " ");
      row.className = self.lit.has(k) ? "row lit" : "row";
      row.dataset.line = k;
      row.style.top = `${k * LINE}px`;
    }
  };
  self.light = (numbers) => {
    self.lit = new Set(numbers);
    const first = Math.min(...numbers);
    if (Number.isFinite(first)) of.scrollTop = Math.max(0, first * LINE - of.clientHeight / 3);
    self.draw();
  };
  of.addEventListener("scroll", self.draw);
  of.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) chosen(Number(row.dataset.line));
  });
  self.draw();
}

const indexed = (lines, pattern) => {
  const table = new Map();
  lines.forEach((text, k) => {
    const match = pattern.exec(text);
    if (!match) return;
    if (!table.has(match[1])) table.set(match[1], []);
    table.get(match[1]).push(k);
  });
  return table;
};

// Made when first asked: a page of many chips has tens of thousands of lines.
const tables = {};
const linesOf = (stage, pattern) => (tables[`${stage} ${pattern}`] ||= indexed(data.stages[stage] || [], pattern));
const labelled = (label) => linesOf("placed", LABEL).get(label);
const tilesFrom = (source) => linesOf("placed", SOURCE).get(source) || [];
const traceFrom = (source) => linesOf("captured", SOURCE).get(source) || [];

const targetOf = (i) => (/^(?:recv |load )?([\w.]+)/.exec(i.action) || ["", ""])[1];

// An instruction of the listing, by its line.
function show(line) {
  const i = byLine.get(line);
  if (!i) return;
  columns.listing.light([line]);
  columns.placed.light(labelled(targetOf(i)) || tilesFrom(i.source));
  columns.captured.light(traceFrom(i.source));
}

function showTile(line) {
  const text = columns.placed.lines[line], label = (LABEL.exec(text) || [])[1], source = (SOURCE.exec(text) || [])[1];
  columns.placed.light([line]);
  columns.listing.light(instructions.filter((i) => label && targetOf(i) === label).map((i) => i.index));
  columns.captured.light(traceFrom(source));
}

function showLine(line) {
  const source = (SOURCE.exec(columns.captured.lines[line]) || [])[1];
  columns.captured.light([line]);
  columns.placed.light(tilesFrom(source));
  columns.listing.light(instructions.filter((i) => source && i.source === source).map((i) => i.index));
}

function startColumns() {
  column("captured", data.stages.captured || [], showLine);
  column("placed", data.stages.placed || [], showTile);
  column("listing", data.stages.listing, show);
}
