// Views, the bar below that tells about what is chosen, the filter and the theme.

const VIEWS = [["overview", "Overview", overviewView], ["program", "Program", programView], ["compare", "Compare", compareView],
  ["timeline", "Timeline", timelineView], ["memory", "Memory", memoryView], ["roofline", "Roofline", rooflineView], ["profile", "Profile", profileView]];
if (data.graphs.some((graph) => graph.mesh)) VIEWS.splice(1, 0, ["mesh", "Mesh", meshView]);
const made = new Map();
let current = "";

function openTab(name) {
  if (!VIEWS.some(([known]) => known === name)) name = "overview";
  if (current === name) return;
  current = name;
  if (!made.has(name)) {
    made.set(name, VIEWS.find(([known]) => known === name)[2]());
    made.get(name).element.id = `view-${name}`;
    made.get(name).element.setAttribute("role", "tabpanel");
    $("views").append(made.get(name).element);
  }
  for (const [other, view] of made) view.element.hidden = other !== name;
  for (const tab of $("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.id === `tab-${name}`));
    tab.tabIndex = tab.id === `tab-${name}` ? 0 : -1;
  }
  if (location.protocol !== "about:") history.replaceState(null, "", `#${name}`);  // a notebook's frame has no address
  made.get(name).changed("opened");
  if (app.pinned) made.get(name).changed("pinned");
}

function buildTabs() {
  for (const [name, label] of VIEWS) {
    $("tabs").append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, text: label, onclick: () => openTab(name) }));
  }
  $("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = VIEWS.findIndex(([name]) => name === current), next = VIEWS[(at + step + VIEWS.length) % VIEWS.length][0];
    openTab(next);
    $(`tab-${next}`).focus();
  });
}

function inspect() {
  const bar = $("inspector");
  bar.hidden = !app.pinned;
  bar.replaceChildren();
  if (!app.pinned) return;
  const facts = [], found = related(app.graph, app.pinned);
  const fact = (label, text) => facts.push(el("span", { class: "fact" }, `${label} `, el("b", { text })));
  let what = "";
  if (app.pinned.line !== undefined) {
    const id = app.pinned.line, number = data.profile ? rowOfLine(app.graph, id) : undefined;
    what = lines.text[id].trim();
    if (lines.types[id]) fact("gives", lines.types[id]);
    if (number !== undefined) {
      const row = data.profile.rows[number], get = (name) => row[COLUMN[name]];
      fact("takes", duration(get("seconds")));
      if (get("limit")) fact(`limited by ${get("limit")}, reaches`, percent(get("best") / get("seconds")));
      if (get("bytes")) fact("moves", scaled(get("bytes"), "B"));
    }
    if (moduleOf(id)) fact("in", moduleOf(id));
    if (noteOf(id)) fact("as", noteOf(id));
  } else if (app.pinned.place !== undefined) {
    const file = Math.floor(app.pinned.place / 1e6), line = app.pinned.place % 1e6;
    what = (data.files[file].lines[line - 1] || "").trim();
    fact("line", `${shortName(file)}:${line}`);
    fact("equations", String(finalOf(app.graph).equations.filter(found.has).length));
    if (data.profile) {
      const rows = data.profile.rows.filter((row) => row[COLUMN.graph] === app.graph && found.has(lineOfRow(row)));
      fact("take", duration(rows.reduce((sum, row) => sum + row[COLUMN.seconds], 0)));
    }
  } else {
    what = data.kernels[app.pinned.kernel].operators;
    fact("kernel", data.kernels[app.pinned.kernel].name);
    fact("used", `${usesOfKernel(app.graph, app.pinned.kernel).length} times`);
  }
  if (found.kernels.length && app.pinned.kernel === undefined) fact("kernels", found.kernels.map((k) => data.kernels[k].name).join(", "));
  const go = link("Show in program", () => openTab("program"));
  go.hidden = current === "program";
  bar.append(el("span", { class: "what", text: what, title: what.slice(0, 400) }), ...facts, el("span", { class: "grow" }), go, link("Close", () => pin(null)));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  tell("theme");
}

function start() {
  $("title").textContent = data.title;
  $("machine").textContent = `Tessera ${data.version} · ${data.machine}`;
  $("machine").title = data.machine;
  buildTabs();
  app.listeners.push((what) => { if (made.has(current)) made.get(current).changed(what); });
  app.listeners.push((what) => { if (what !== "hover") inspect(); });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  $("search").addEventListener("input", () => { app.filter = $("search").value.trim().toLowerCase(); tell("filter"); });
  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing) { $("search").focus(); event.preventDefault(); }
    if (event.key === "Escape" && app.pinned && !typing) pin(null);
    else if (event.key === "Escape") {
      [$("search").value, app.filter] = ["", ""];
      $("search").blur();
      tell("filter");
    }
  });
  addEventListener("hashchange", () => openTab(location.hash.slice(1)));
  openTab(location.hash.slice(1) || "overview");
  document.documentElement.dataset.ready = "yes";
}

start();
