// Any two stages of a graph, side by side. What is equal is folded away until it is asked for.

function compareView() {
  const chosen = ends();
  let of = app.graph;
  let rows = [], open = new Set(), everything = false, left = [], right = [];
  const list = new VirtualList("Differences", 20, draw, {
    chosen: (i) => {
      if (rows[i].fold === undefined) return pin({ line: rows[i].b >= 0 ? right[rows[i].b] : left[rows[i].a] });
      open.add(rows[i].fold);
      refresh();
    },
  });
  list.element.id = "differences";
  list.element.classList.add("compare");
  const bar = el("div", { class: "bar" });
  const element = el("div", { class: "view" }, bar, list.element);

  function controls() {
    const names = stageNames(data.graphs[app.graph]);
    const pick = (side) => {
      const made = choice(side ? "After" : "Before", names, chosen[side], (i) => { chosen[side] = i; open = new Set(); refresh(); });
      made.id = side ? "after" : "before";
      return made;
    };
    const changes = rows.filter((row) => row.kind && row.kind !== "same").length;
    bar.replaceChildren(el("h2", { text: "Compare" }), graphPicker(), pick(0), "with", pick(1),
      segments(["Changes", "Everything"], everything ? 1 : 0, (i) => { everything = i === 1; refresh(); }),
      el("span", { class: "count grow", text: `${changes} ${changes === 1 ? "difference" : "differences"}` }));
  }
  function refresh() {
    const stages = data.graphs[app.graph].stages;
    if (!stages.length) return list.show(0);
    [left, right] = chosen.map((i) => stages[i].lines);
    const pairs = align(left, right).map(([a, b]) => ({ a, b, kind: a < 0 ? "added" : b < 0 ? "removed" : left[a] === right[b] ? "same" : "changed" }));
    rows = everything ? pairs : foldEqual(pairs, open);
    controls();
    list.show(rows.length);
  }
  function half(at, ids, other, kind, sign) {
    if (at < 0) return el("div", { class: "half absent" });
    const text = lines.text[ids[at]];
    let shown = painted(text, "python");
    if (other !== undefined) {
      const [start, end] = difference(text, other);
      shown = el("span", { class: "text" }, text.slice(0, start), el("b", { text: text.slice(start, text.length - end) }), text.slice(text.length - end));
    }
    return el("div", { class: `half ${kind}`, title: text.length > 80 ? text.trim().slice(0, 400) : undefined },
      el("span", { class: "gutter", text: `${sign}${at + 1}` }), shown);
  }
  function draw(i) {
    const row = rows[i];
    if (row.fold !== undefined) return el("div", {}, el("div", { class: "fold", text: `${row.count} equal lines` }));
    const differs = row.kind !== "same", both = row.kind === "changed";
    return el("div", {},
      half(row.a, left, both ? lines.text[right[row.b]] : undefined, differs ? "removed" : "", ""),
      half(row.b, right, both ? lines.text[left[row.a]] : undefined, differs ? "added" : "", ""));
  }
  function changed(what) {
    if (of !== app.graph) {
      of = app.graph;
      [chosen[0], chosen[1]] = ends();
    }
    if (what === "graph" || what === "opened") { open = new Set(); refresh(); }
  }
  return { element, changed };
}

// As captured, and as the first program is run.
const ends = () => [0, data.graphs[app.graph]?.programs[0]?.stage ?? 0];

// Runs of equal lines become one row, with three left at either end.
function foldEqual(pairs, open) {
  const rows = [];
  for (let i = 0; i < pairs.length; ) {
    let j = i;
    while (j < pairs.length && pairs[j].kind === "same") j++;
    if (j - i > 8 && !open.has(i)) {
      rows.push(...pairs.slice(i, i + 3), { fold: i, count: j - i - 6 }, ...pairs.slice(j - 3, j));
    } else rows.push(...pairs.slice(i, j));
    if (j < pairs.length) rows.push(pairs[j++]);
    i = j;
  }
  return rows;
}
