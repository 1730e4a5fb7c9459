// The mesh of ranks, what goes along its axes, and the schedule of a pipeline.

const SHOWN_RANKS = 64;
const ACTIONS = { F: ["c0", "forward"], B: ["c1", "backward"], W: ["c2", "gradients of weights"] };

function meshView() {
  const view = el("div", { class: "view scroll" });
  for (const graph of data.graphs) if (graph.mesh) view.append(...meshSections(graph));
  return { element: view, changed() {} };
}

function meshSections(graph) {
  const { axes, exchanges, schedule, told } = graph.mesh;
  const sections = [section(`${graph.name}: the mesh`, axes.map(([axis, size]) => `${axis}=${size}`).join(" "), ranksTable(axes))];
  sections.push(exchanges.length ? section("Bytes by axis", "Sent by one rank, each time its programs run.", bytesTable(exchanges))
    : section("Bytes by axis", "Ranks exchange nothing inside of programs."));
  if (schedule.length) sections.push(section("Schedule", "If stages are equal. The number is the microbatch; where a rank has several stages, the stage stands behind it.", scheduleChart(schedule), ...told.map((text) => el("p", { text }))));
  return sections;
}

// One row for each place along all axes but the last, which is a row's own.
function ranksTable(axes) {
  const sizes = axes.map(([, size]) => size), ranks = sizes.reduce((product, size) => product * size, 1), last = sizes.at(-1);
  const rows = [];
  for (let first = 0; first < Math.min(ranks, SHOWN_RANKS); first += last) {
    let rest = first / last;
    const places = axes.slice(0, -1).map(([axis, size]) => [axis, size]).reverse().map(([axis, size]) => {
      const place = rest % size;
      rest = Math.floor(rest / size);
      return `${axis} ${place}`;
    }).reverse();
    rows.push([places.join(", "), ...Array.from({ length: last }, (_, i) => `rank ${first + i}`)]);
  }
  const heads = [["", ""], ...Array.from({ length: last }, (_, i) => [`${axes.at(-1)[0]} ${i}`, "number"])];
  const more = ranks > rows.length * last ? el("p", { text: `The first ${rows.length * last} of ${ranks} ranks.` }) : null;
  return el("div", {}, grid(heads, rows), more);
}

function bytesTable(exchanges) {
  const most = Math.max(1, ...exchanges.map(([, , , , bytes]) => bytes));
  const rows = exchanges.map(([axis, name, calls, joined, bytes]) => {
    const share = el("span", { class: "share" });
    share.style.width = `${(140 * bytes) / most}px`;
    return [axis, name, String(calls), String(joined), scaled(bytes, "B"), share];
  });
  return grid([["axis", "code"], ["collective", "code"], ["calls", "number"], ["exchanges joined in them", "number"], ["bytes", "number"], ["", ""]], rows);
}

function scheduleChart(rows) {
  const end = Math.max(...rows.flat().map(([, , , , stop]) => stop)), several = rows.some((row) => new Set(row.map(([, , stage]) => stage)).size > 1);
  const chart = el("div", { class: "schedule" });
  rows.forEach((row, rank) => {
    const track = el("div", { class: "track" });
    for (const [kind, microbatch, stage, start, stop] of row) {
      const text = `${kind}${microbatch}${several ? `/${stage}` : ""}`;
      const cell = el("span", { class: "action", text, title: `${ACTIONS[kind][1]} of microbatch ${microbatch} on stage ${stage}` });
      cell.style.left = `${(100 * start) / end}%`;
      cell.style.width = `${(100 * (stop - start)) / end}%`;
      cell.style.background = `var(--${ACTIONS[kind][0]})`;
      track.append(cell);
    }
    chart.append(el("div", { class: "lane" }, el("span", { class: "label", text: `rank ${rank}` }), track));
  });
  const kinds = new Set(rows.flat().map(([kind]) => kind));
  return el("div", {}, legend(...Object.entries(ACTIONS).filter(([kind]) => kinds.has(kind)).map(([, entry]) => entry)), chart);
}
