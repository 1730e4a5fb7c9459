// Source, trace and kernel beside each other. Pointing at one marks what belongs to it in the others; choosing stays.

function programView() {
  const panes = [sourcePane(), tracePane(), ...(data.kernels.length ? [kernelPane()] : [])];  // no kernels, no third pane
  const element = el("div", { class: "view" }, el("div", { class: `panes of${panes.length}` }, ...panes.map((pane) => pane.element)));
  return { element, changed: (what) => panes.forEach((pane) => pane.changed(what)) };
}

// Marks are asked for every row that is seen: what belongs to the two choices is worked out once.
function marker(test) {
  const pinned = app.pinned && related(app.graph, app.pinned), near = app.hover && related(app.graph, app.hover);
  return (what) => (pinned && test(pinned, what) ? " pinned" : near && test(near, what) ? " near" : "");
}

function sourcePane() {
  let mark = () => "", used = new Set();
  const here = (i) => keyOf(app.file, i + 1);
  const list = new VirtualList("Your source", 20, draw, {
    chosen: (i) => pin({ place: here(i) }),
    entered: (i) => hover(i >= 0 && used.has(here(i)) ? { place: here(i) } : null),
    mark: (i) => `${used.has(here(i)) ? "linked" : ""}${mark(here(i))}`,
  });
  list.element.id = "source";
  const picker = choice("File", data.files.map((file, i) => (data.files.filter((_, j) => shortName(j) === shortName(i)).length > 1 ? file.name : shortName(i))), 0, (i) => { app.file = i; refresh(); });
  const bar = el("div", { class: "bar" }, el("h2", { text: "Source" }), picker);
  const element = el("div", { class: "pane" }, bar, list.element);

  function draw(i) {
    return el("div", {}, el("span", { class: "gutter", text: i + 1 }), painted(data.files[app.file].lines[i], quoted(app.file).has(i) ? "prose" : "python"));
  }
  const remark = () => { mark = marker((found, key) => found.places.has(key)); };
  function refresh() {
    used = new Set(data.places.map((_, number) => placeKey(number)));
    remark();
    picker.value = app.file;
    picker.title = data.files[app.file]?.path || "";
    list.show(data.files.length ? data.files[app.file].lines.length : 0);
  }
  function changed(what) {
    if (what === "pinned" && app.pinned) {
      const places = [...related(app.graph, app.pinned).places].sort((a, b) => a - b);
      if (places.length && !places.some((key) => Math.floor(key / 1e6) === app.file)) app.file = Math.floor(places[0] / 1e6);
      refresh();
      const first = places.find((key) => Math.floor(key / 1e6) === app.file);
      if (first !== undefined && app.pinned.place === undefined) list.reveal((first % 1e6) - 1);
      if (app.pinned.place !== undefined) list.reveal((app.pinned.place % 1e6) - 1);
    } else if (what === "hover") {
      remark();
      list.remark();
    } else refresh();
    if ((what === "opened" || what === "graph") && !app.pinned) list.reveal(Math.min(...[...used].filter((key) => Math.floor(key / 1e6) === app.file)) % 1e6);
  }
  return { element, changed };
}

function tracePane() {
  let shown = [], mark = () => "";
  const list = new VirtualList("Program", 20, draw, {
    chosen: (i) => pin({ line: shown[i] }),
    entered: (i) => hover(i >= 0 ? { line: shown[i] } : null),
    mark: (i) => `${lines.kernel[shown[i]] >= 0 ? "linked" : ""}${mark(shown[i])}`,
  });
  list.element.id = "trace";
  const graphs = graphPicker();
  let stages = el("span");
  const count = el("span", { class: "count grow" });
  const colours = legend(...(data.kernels.length ? [["accent", "a kernel runs it"]] : []), ...(data.profile ? [["c2", "its time"]] : []));
  const bar = el("div", { class: "bar" }, el("h2", { text: "Program" }), graphs, stages, colours, count);
  const element = el("div", { class: "pane" }, bar, list.element);
  const most = data.profile ? Math.max(...data.profile.rows.map((row) => row[COLUMN.seconds])) : 0;

  function draw(i) {
    const id = shown[i], notes = [lines.types[id], lines.places[id].slice(0, 1).map(whereOf).join(), moduleOf(id), noteOf(id), lines.tags[id]];
    const row = data.profile ? finalOf(app.graph).rowOf.get(id) : undefined;
    const heat = el("i");
    const share = row === undefined ? 0 : data.profile.rows[row][COLUMN.seconds] / most;
    heat.style.width = `${36 * share}px`;
    heat.hidden = share < 0.03;
    return el("div", {}, el("span", { class: "gutter", text: i + 1 }), data.profile ? el("span", { class: "heat" }, heat) : null,
      painted(lines.text[id], "python"), el("span", { class: "note", text: notes.filter(Boolean).join("  ") }));
  }
  function refresh() {
    const graph = data.graphs[app.graph], all = graph?.stages.length ? graph.stages[app.stage].lines : [];
    graphs.value = app.graph;
    shown = app.filter ? all.filter(matches) : all;
    mark = marker((found, id) => found.has(id));
    const labels = stageNames(graph).map((name, i) => `${name} (${graph.stages[i].equations})`);
    const picker = choice("Stage", labels, app.stage, (i) => { app.stage = i; tell("stage"); });
    picker.id = "stage";
    stages.replaceWith(picker);
    stages = picker;
    count.textContent = app.filter ? `${shown.length} of ${all.length} lines` : `${all.length} lines`;
    list.show(shown.length);
  }
  function changed(what) {
    if (what === "hover") {
      mark = marker((found, id) => found.has(id));
      list.remark();
      return;
    }
    if (what === "pinned" && app.pinned) showStageOf(app.pinned);
    refresh();
    if (what !== "theme" && app.pinned) {
      const found = related(app.graph, app.pinned);
      const first = app.pinned.line !== undefined && shown.includes(app.pinned.line) ? shown.indexOf(app.pinned.line) : shown.findIndex(found.has);
      if (first >= 0) { list.active = first; list.reveal(first); list.paint(); }
    }
  }
  return { element, changed };
}

// A choice that this stage does not show is looked for in the final programs.
function showStageOf(chosen) {
  const graph = data.graphs[app.graph], found = related(app.graph, chosen);
  if (!graph.stages.length || graph.stages[app.stage].lines.some(found.has)) return;
  const program = graph.programs.find((p) => graph.stages[p.stage].lines.some(found.has));
  if (program) app.stage = program.stage;
}

const KERNEL_TEXTS = [["source", "Kernel"], ["tile", "Tile program"], ["region", "Region"], ["launch", "Launch"]];

function kernelPane() {
  let text = [], which = 0, language = "python";
  const list = new VirtualList("Kernel", 20, draw, {
    chosen: () => { if (app.kernel >= 0) pin({ kernel: app.kernel }); },
    entered: (i) => {
      const chosen = i >= 0 && app.kernel >= 0 ? { kernel: app.kernel } : null;
      if (chosen?.kernel !== app.hover?.kernel || !chosen) hover(chosen);
    },
  });
  list.element.id = "kernel";
  const labels = data.kernels.map((kernel) => `${kernel.name}${kernel.language ? ` (${kernel.language})` : ""}`);
  const picker = choice("Kernel", ["no kernel", ...labels], 0, (i) => { if (i) pin({ kernel: i - 1 }); });
  const facts = el("div", { class: "facts" }), uses = el("div", { class: "chips" });
  const views = segments(KERNEL_TEXTS.map(([, label]) => label), 0, (i) => { which = i; refresh(); });
  const bar = el("div", { class: "bar" }, el("h2", { text: "Kernel" }), picker, views);
  const element = el("div", { class: "pane" }, bar, facts, list.element, uses);

  function draw(i) {
    return el("div", {}, el("span", { class: "gutter", text: i + 1 }), painted(text[i], language));
  }
  function refresh() {
    picker.value = app.kernel + 1;
    const kernel = data.kernels[app.kernel];
    const kind = KERNEL_TEXTS[which][0];
    language = kind === "tile" ? "mlir" : kind === "source" && kernel?.language === "LLVM IR" ? "llvm" : "python";
    uses.replaceChildren();
    if (!kernel) {
      text = [];
      facts.textContent = unclaimed();
    } else {
      const users = usesOfKernel(app.graph, app.kernel);
      const mine = users.find((id) => app.pinned?.line !== undefined && related(app.graph, { line: id }).has(app.pinned.line)) ?? users[0];
      text = kind === "region" ? (lines.body[mine] || []).map((id) => lines.text[id].trim()) : (kernel[kind] || "").split("\n");
      if (text.length === 1 && !text[0]) text = [`# ${kernel.executor} does not show this`];
      facts.textContent = [kernel.operators, kernel.schedule].filter(Boolean).join(" · ");
      uses.append(`Used by ${users.length} ${users.length === 1 ? "equation" : "equations"}`);
      for (const id of users) uses.append(link(moduleOf(id) || namesOf(id)[0] || "", () => pin({ line: id })));
    }
    list.show(text.length);
  }
  function unclaimed() {
    if (app.pinned?.line === undefined) return "Choose a line that a kernel runs: its number is coloured.";
    return "No generated kernel: an operator of PyTorch, or of a library, runs this line.";
  }
  function changed(what) {
    if (what === "hover") return;
    if (what === "pinned" && app.pinned) {
      const found = related(app.graph, app.pinned).kernels;
      if (!found.includes(app.kernel)) { app.kernel = found[0] ?? -1; list.element.scrollTop = 0; }
    }
    if (what === "graph") app.kernel = -1;
    refresh();
  }
  return { element, changed };
}
