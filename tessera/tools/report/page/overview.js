// The first page: the numbers that matter, and what compiling did.

function overviewView() {
  const view = el("div", { class: "view scroll" });
  view.append(tiles());
  if (data.profile) view.append(hotLines());
  view.append(graphTable(), claimTable(), unfusedTable());
  return { element: view, changed() {} };
}

function tile(value, label) {
  return el("div", { class: "tile" }, el("div", { class: "value", text: value }), el("div", { class: "label", text: label }));
}

function tiles() {
  const made = el("div", { class: "tiles" });
  const p = data.profile;
  if (p) {
    made.append(tile(duration(p.step_seconds), "a step, median, as it runs"));
    if (p.device_seconds) {
      made.append(tile(duration(p.device_seconds), "GPU busy in a step"), tile(duration(p.idle_seconds), "GPU idle between the kernels of a step"));
    } else made.append(tile(duration(p.equation_seconds), `in equations, of ${duration(p.measured_seconds)} with each one timed`));
    const best = p.rows.reduce((sum, row) => sum + row[COLUMN.best], 0);
    made.append(tile(percent(best / p.equation_seconds), "of the roofline, over all equations"));
  }
  const programs = data.graphs.flatMap((graph) => graph.programs);
  const equations = programs.reduce((sum, program) => sum + program.equations.length, 0);
  made.append(tile(String(equations), `equations in ${counted(programs.length, "final program")}`));
  made.append(tile(String(data.kernels.length), `generated ${data.kernels.length === 1 ? "kernel" : "kernels, each counted once"}`));
  const peak = Math.max(0, ...programs.map((program) => program.base + Math.max(0, ...(program.measured || program.live))));
  const how = programs.some((program) => program.measured) ? "measured" : "predicted";
  made.append(tile(memory(peak), `${how} peak of one program, beyond its inputs`));
  const breaks = data.graphs.filter((graph) => graph.break_reason).length;
  made.append(tile(String(data.graphs.length), `${data.graphs.length === 1 ? "graph" : "graphs"}, ${counted(breaks, "break")}`));
  return made;
}

function section(title, text, ...rest) {
  return el("section", {}, el("h2", { text: title }), text ? el("p", { text }) : null, ...rest);
}

function grid(heads, rows) {
  const head = el("tr", {}, ...heads.map(([text, kind]) => el("th", { text, class: kind })));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, i) => {
    const made = el("td", { class: heads[i][1] });
    made.append(cell);
    return made;
  })));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

function hotLines() {
  const sums = new Map();
  for (const row of data.profile.rows) {
    const place = lines.places[lineOfRow(row)][0];
    const key = place === undefined ? -1 : placeKey(place);
    if (!sums.has(key)) sums.set(key, { place, seconds: 0, best: 0 });
    sums.get(key).seconds += row[COLUMN.seconds];
    sums.get(key).best += row[COLUMN.best];
  }
  const sorted = [...sums.values()].sort((a, b) => b.seconds - a.seconds).slice(0, 10);
  const total = data.profile.equation_seconds || 1;
  const rows = sorted.map(({ place, seconds, best }) => {
    const share = el("span", { class: "share" });
    share.style.width = `${(140 * seconds) / sorted[0].seconds}px`;
    if (place === undefined) return [duration(seconds), percent(seconds / total), share, percent(best / seconds), "", "no line of yours: an optimizer's, or the compiler's own"];
    const [file, line] = data.places[place];
    const text = (data.files[file].lines[line - 1] || "").trim();
    const go = link(whereOf(place), () => { openTab("program"); pin({ place: keyOf(file, line) }); });
    return [duration(seconds), percent(seconds / total), share, percent(best / seconds), go, text];
  });
  return section("Where the time goes", `Your lines, forward and backward together; shares of the ${duration(data.profile.equation_seconds)} in equations.`,
    grid([["time", "number"], ["share", "number"], ["", ""], ["of roofline", "number"], ["line", "code"], ["", "code"]], rows));
}

function graphTable() {
  const rows = data.graphs.map((graph) => {
    const words = [];
    if (graph.called_at) words.push(`compiled for the call at ${graph.called_at}`);
    if (graph.recompile_reason) words.push(`recompiled because ${graph.recompile_change || graph.recompile_reason}`, graph.recompile_advice);
    if (graph.break_reason) words.push(`ends in a graph break at ${graph.break_line}: ${graph.break_reason.split("\n")[0]}`, graph.break_advice);
    if (graph.eager_reason) words.push(`runs eagerly: ${graph.eager_reason}`);
    if (graph.saved_bytes) words.push(`saves ${memory(graph.saved_bytes)} for backward in ${graph.saved.length} tensors`);
    const told = el("div", {}, ...words.filter(Boolean).map((text) => el("div", { text })));
    return [graph.name, String(graph.operators), `${graph.seconds.toFixed(2)} s`, String(graph.stages.length), told];
  });
  return section("Graphs", "", grid([["graph", "code"], ["operators captured", "number"], ["compiled in", "number"], ["stages", "number"], ["", ""]], rows));
}

function claimTable() {
  const sums = new Map();
  for (const graph of data.graphs) {
    for (const [executor, count, operators, why] of graph.claims) {
      const key = `${executor} ${why}`;
      if (!sums.has(key)) sums.set(key, { executor, why, calls: 0, count: 0, operators: new Set() });
      const sum = sums.get(key);
      sum.calls += 1;
      sum.count += count;
      operators.forEach((name) => sum.operators.add(name));
    }
  }
  const rows = [...sums.values()].map((sum) => [
    sum.executor, String(sum.count), String(sum.calls), sum.why,
    folded([...sum.operators].map((name) => name.replace(/^aten\./, "")).sort().join(", "), 200),
  ]);
  return section("Who runs what", "Executors in the order in which they were asked. A region is one kernel, and one equation of a final program, over several operators.",
    grid([["executor", ""], ["operators", "number"], ["regions or groups", "number"], ["how", ""], ["operators", "code"]], rows));
}

function unfusedTable() {
  const rows = data.graphs.flatMap((graph) => graph.unfused.map(([reason, names, places]) => [reason, String(names.length), folded(places.join(", "), 60), folded(names.join(", "), 120)]));
  if (!rows.length) return section("Not fused", "Every equation that an executor could fuse is in a region, or no executor that fuses took part.");
  return section("Not fused, and why", "", grid([["reason", ""], ["equations", "number"], ["lines", "code"], ["which", "code"]], rows));
}

function folded(text, length) {
  if (text.length <= length) return text;
  return el("details", {}, el("summary", { text: `${text.slice(0, length)}…` }), text);
}
