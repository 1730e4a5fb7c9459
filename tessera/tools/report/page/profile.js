// Every row of the profile, to sort, to filter and to sum up by what rows have in common.

const GROUPS = ["equation", "operator", "line", "module"];
const PROFILE_COLUMNS = [
  ["time", "w-time number", (g) => g.seconds], ["", "w-bar", (g) => g.seconds], ["of roofline", "w-roof number", (g) => g.best / g.seconds],
  ["limit", "w-limit", (g) => g.limit], ["bytes", "w-size number", (g) => g.bytes], ["flops", "w-size number", (g) => g.flops],
  ["what", "w-what code", (g) => g.what], ["line", "w-where code", (g) => g.where], ["module", "w-module code", (g) => g.module],
];

function profileView() {
  const element = el("div", { class: "view" });
  if (!data.profile) {
    element.append(noMeasurement());
    return { element, changed() {} };
  }
  let by = 0, sort = 0, down = true, groups = [];
  const list = new VirtualList("Profile", 26, draw, {
    chosen: (i) => {
      app.graph = groups[i].graph;
      pin(by === 2 && groups[i].place !== undefined ? { place: groups[i].place } : { line: groups[i].line });
    },
    mark: (i) => (app.pinned && app.pinned.line === groups[i].line ? "pinned" : ""),
  });
  list.element.id = "profile";
  list.element.classList.add("grid");
  const heads = el("div", { class: "heads" });
  const count = el("span", { class: "count grow" });
  element.append(el("div", { class: "bar" }, el("h2", { text: "Profile" }), "summed by", segments(GROUPS, 0, (i) => { by = i; refresh(); }), count), heads, list.element);

  function gather() {
    const found = new Map();
    data.profile.rows.forEach((row, number) => {
      const id = lineOfRow(row), get = (name) => row[COLUMN[name]];
      if (!matches(id) && !get("operator").toLowerCase().includes(app.filter)) return;
      const place = lines.places[id][0], where = place === undefined ? "" : whereOf(place), module = moduleOf(id);
      const key = [number, `${get("executor")} ${get("operator")}`, where, module][by];
      if (!found.has(key)) {
        const what = `${get("executor") === "aten" ? "" : `${get("executor")}: `}${get("operator").replace(/^aten\./, "")}`;
        found.set(key, { what, where, module, line: id, place: place === undefined ? undefined : placeKey(place), graph: get("graph"), count: 0, seconds: 0, best: 0, bytes: 0, flops: 0, limits: {} });
      }
      const group = found.get(key);
      group.count += 1;
      for (const name of ["seconds", "best", "bytes", "flops"]) group[name] += get(name);
      group.limits[get("limit")] = (group.limits[get("limit")] || 0) + get("best");
      if (group.where !== where) group.where = "";
      if (group.module !== module) group.module = "";
    });
    for (const group of found.values()) {
      group.limit = Object.entries(group.limits).sort((a, b) => b[1] - a[1])[0][0];
      if (by > 1) group.what = `${group.count} equations`;
      else if (group.count > 1) group.what += `  × ${group.count}`;
    }
    return [...found.values()];
  }
  function refresh() {
    const of = PROFILE_COLUMNS[sort][2];
    groups = gather().sort((a, b) => (of(a) > of(b) ? 1 : of(a) < of(b) ? -1 : 0) * (down ? -1 : 1));
    const total = groups.reduce((sum, group) => sum + group.seconds, 0);
    count.textContent = `${groups.length} rows, ${duration(total)}`;
    heads.replaceChildren(...PROFILE_COLUMNS.map(([name, kind], i) => el("button", {
      type: "button", class: kind.replace(" code", ""), text: name + (i === sort ? (down ? " ↓" : " ↑") : ""),
      "aria-sort": i === sort ? (down ? "descending" : "ascending") : undefined, "aria-label": name || "time",
      onclick: () => { down = i === sort ? !down : true; sort = i; refresh(); },
    })));
    list.show(groups.length);
  }
  function draw(i) {
    const group = groups[i], most = groups.reduce((best, g) => Math.max(best, g.seconds), 0) || 1, mark = el("i");
    mark.style.width = `${(86 * group.seconds) / most}px`;
    const cells = [duration(group.seconds), mark, group.best ? percent(group.best / group.seconds) : "", group.limit,
      group.bytes ? scaled(group.bytes, "B") : "", group.flops ? scaled(group.flops, "") : "", group.what, group.where, group.module];
    const row = el("div");
    cells.forEach((cell, j) => {
      const made = el("span", { class: `cell ${PROFILE_COLUMNS[j][1]}`, title: j === 6 ? group.what : undefined });
      made.append(cell);
      row.append(made);
    });
    return row;
  }
  return { element, changed: (what) => { if (what !== "hover") refresh(); } };
}
