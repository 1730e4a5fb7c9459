// The data, and how its parts are found from each other: line <-> place in the source <-> kernel <-> measured row.

const data = JSON.parse($("data").textContent);
const lines = data.lines;
const COLUMN = data.profile ? Object.fromEntries(data.profile.columns.map((name, i) => [name, i])) : {};

const keyOf = (file, line) => file * 1e6 + line;
const placeKey = (number) => keyOf(data.places[number][0], data.places[number][1]);
const shortName = (file) => data.files[file].name.split("/").pop();
const whereOf = (number) => `${shortName(data.places[number][0])}:${data.places[number][1]}`;

// Stages by name; the program that runs is called final.
function stageNames(graph) {
  const names = graph.stages.map((stage) => stage.name);
  for (const { name, stage } of graph.programs) names[stage] = name === "inference" ? "final" : `${name} final`;
  return names;
}

// The names a line defines: "a, b = f(x)" defines a and b.
const nameCache = new Map();
function namesOf(id) {
  if (!nameCache.has(id)) {
    const found = /^\s*([\w, ]+?),? = /.exec(lines.text[id]);
    nameCache.set(id, found ? found[1].split(",").map((name) => name.trim()).filter((name) => name && name !== "_") : []);
  }
  return nameCache.get(id);
}

const moduleOf = (id) => (lines.places[id].length ? data.places[lines.places[id][0]][2] : "");
const noteOf = (id) => (lines.places[id].length ? data.places[lines.places[id][0]][3] : "");

// What the final programs of a graph say: which line computes a name, which line runs at a place, which row measures it.
const finals = new Map();
function finalOf(graph) {
  if (finals.has(graph)) return finals.get(graph);
  const found = { byName: new Map(), byPlace: new Map(), rowOf: new Map(), equations: [] };
  for (const program of data.graphs[graph].programs) {
    for (const id of program.equations) {
      found.equations.push(id);
      for (const inner of [id, ...lines.body[id]]) for (const name of namesOf(inner)) found.byName.set(name, id);
      for (const place of lines.places[id]) {
        const key = `${placeKey(place)} ${data.places[place][2]}`;
        if (!found.byPlace.has(key)) found.byPlace.set(key, []);
        found.byPlace.get(key).push(id);
      }
    }
  }
  if (data.profile) {
    data.profile.rows.forEach((row, number) => {
      if (row[COLUMN.graph] === graph) found.rowOf.set(lineOfRow(row), number);
    });
  }
  finals.set(graph, found);
  return found;
}

const lineOfRow = (row) => data.graphs[row[COLUMN.graph]].programs[row[COLUMN.program]].equations[row[COLUMN.index]];

// The lines of the final programs that carry out a line of any stage.
function finalLines(graph, id) {
  const final = finalOf(graph);
  const named = [...new Set(namesOf(id).map((name) => final.byName.get(name)).filter((x) => x !== undefined))];
  if (named.length) return named;
  const at = lines.places[id].flatMap((place) => final.byPlace.get(`${placeKey(place)} ${data.places[place][2]}`) || []);
  return [...new Set(at)];
}

function rowOfLine(graph, id) {
  const final = finalOf(graph);
  for (const line of [id, ...finalLines(graph, id)]) if (final.rowOf.has(line)) return final.rowOf.get(line);
  return undefined;
}

function kernelsOfLine(graph, id) {
  if (lines.kernel[id] >= 0) return [lines.kernel[id]];
  return [...new Set(finalLines(graph, id).map((line) => lines.kernel[line]).filter((kernel) => kernel >= 0))];
}

const usesOfKernel = (graph, kernel) => finalOf(graph).equations.filter((id) => lines.kernel[id] === kernel);

// What belongs together with a choice: a line, a place in the source, or a kernel.
function related(graph, chosen) {
  const final = finalOf(graph);
  if (chosen.line !== undefined) {
    const names = new Set(namesOf(chosen.line));
    return {
      places: new Set(lines.places[chosen.line].map(placeKey)),
      has: (id) => id === chosen.line || namesOf(id).some((name) => names.has(name)),
      kernels: kernelsOfLine(graph, chosen.line),
    };
  }
  if (chosen.place !== undefined) {
    const at = (id) => lines.places[id].some((place) => placeKey(place) === chosen.place);
    const kernels = final.equations.filter((id) => lines.kernel[id] >= 0 && at(id)).map((id) => lines.kernel[id]);
    return { places: new Set([chosen.place]), has: at, kernels: [...new Set(kernels)] };
  }
  const uses = usesOfKernel(graph, chosen.kernel);
  const names = new Set(uses.flatMap((id) => [id, ...lines.body[id]].flatMap(namesOf)));
  return {
    places: new Set(uses.flatMap((id) => lines.places[id].map(placeKey))),
    has: (id) => lines.kernel[id] === chosen.kernel || namesOf(id).some((name) => names.has(name)),
    kernels: [chosen.kernel],
  };
}

// --- what is chosen, and who wants to know ---

const app = { graph: 0, stage: 0, file: 0, kernel: -1, pinned: null, hover: null, filter: "", listeners: [] };

app.graph = Math.max(0, data.graphs.findIndex((graph) => graph.stages.length));
openGraph(app.graph);

// Its first program as it is run, and the file that it comes from.
function openGraph(graph) {
  Object.assign(app, { graph, stage: data.graphs[graph]?.programs[0]?.stage ?? 0, pinned: null });
  const first = (data.graphs[graph]?.programs[0]?.equations || []).find((id) => lines.places[id].length);
  if (first !== undefined) app.file = data.places[lines.places[first][0]][0];
}

function graphPicker() {
  const made = choice("Graph", data.graphs.map((graph) => graph.name), app.graph, (i) => { openGraph(i); tell("graph"); });
  made.hidden = data.graphs.length < 2;
  return made;
}

const tell = (what) => app.listeners.forEach((listener) => listener(what));

// A place or a kernel that this graph knows nothing of is looked for in the others.
function graphOf(chosen) {
  if (!chosen || chosen.line !== undefined) return app.graph;
  const knows = (graph) => finalOf(graph).equations.some(related(graph, chosen).has);
  if (knows(app.graph)) return app.graph;
  const other = data.graphs.findIndex((_, graph) => knows(graph));
  return other < 0 ? app.graph : other;
}

function pin(chosen) {
  const graph = graphOf(chosen);
  if (graph !== app.graph) openGraph(graph);
  app.pinned = chosen;
  app.hover = null;
  tell("pinned");
}

function hover(chosen) {
  app.hover = chosen;
  tell("hover");
}

function matches(id) {
  if (!app.filter) return true;
  const where = lines.places[id].map((p) => `${whereOf(p)} ${data.places[p][2]} ${data.places[p][3]}`).join(" ");
  return `${lines.text[id]} ${lines.types[id]} ${where}`.toLowerCase().includes(app.filter);
}
