// One step: programs, modules and equations as a flame, and the kernels of a GPU below. Drag or arrows move, wheel or
// + and - zoom, 0 shows everything.

function timelineView() {
  const element = el("div", { class: "view" });
  if (!data.profile) {
    element.append(noMeasurement());
    return { element, changed() {} };
  }
  const { bars, depth, tracks } = flame();
  const whole = data.profile.spans[0][3];
  let from = 0, to = whole, drawn = [];
  const ROW = 26, TOP = 30;
  const zoom = (factor, at = (from + to) / 2) => {
    const span = Math.min(whole, Math.max(whole / 1e5, (to - from) * factor));
    from = Math.max(0, Math.min(whole - span, at - ((at - from) / (to - from)) * span));
    to = from + span;
  };
  const pan = (by) => {
    const span = to - from;
    from = Math.max(0, Math.min(whole - span, from + by * span));
    to = from + span;
  };
  const chart = new Chart("A step over time", {
    draw, hit, chosen: (bar) => (bar.line === undefined ? ([from, to] = [bar.start, bar.start + bar.seconds], chart.draw()) : pinLine(bar)),
    told: (bar) => (bar.row === undefined || bar.row === null ? [bar.name, [duration(bar.seconds)]] : [bar.kernel ? bar.name : tellRow(bar.row)[0], [duration(bar.seconds), ...tellRow(bar.row)[1]]]),
    keys: { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => { [from, to] = [0, whole]; } },
  });
  const canvas = chart.canvas;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / canvas.clientWidth);
    else zoom(Math.exp(event.deltaY / 400), from + (event.offsetX / canvas.clientWidth) * (to - from));
    chart.draw();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { chart.dragging = { x: event.clientX, from, to }; chart.dragged = false; });
  addEventListener("pointerup", () => { chart.dragging = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!chart.dragging) return;
    const moved = chart.dragging.x - event.clientX;
    if (Math.abs(moved) > 3) chart.dragged = true;
    [from, to] = [chart.dragging.from, chart.dragging.to];
    pan(moved / canvas.clientWidth);
    chart.draw();
  });
  canvas.addEventListener("dblclick", () => { [from, to] = [0, whole]; chart.draw(); });

  function pinLine(bar) {
    app.graph = data.profile.rows[bar.row][COLUMN.graph];
    pin({ line: bar.line });
  }
  function draw(context, width, height, colour) {
    const scale = width / (to - from);
    drawn = [];
    context.fillStyle = colour("soft");
    for (const at of ticks(from, to, 8)) {
      const x = (at - from) * scale;
      context.fillStyle = colour("edge");
      context.fillRect(x, 0, 1, height);
      context.fillStyle = colour("soft");
      if (x < width - 64) context.fillText(duration(at), x + 4, 14);
    }
    const seen = app.filter ? (bar) => bar.row === undefined || bar.row === null || matches(bar.line ?? -1) : () => true;
    for (const bar of bars) {
      if (bar.start > to || bar.start + bar.seconds < from) continue;
      const x = Math.max(0, (bar.start - from) * scale), end = Math.min(width, (bar.start + bar.seconds - from) * scale);
      const y = TOP + bar.depth * ROW, w = Math.max(end - x - 0.5, 0.5);
      context.globalAlpha = seen(bar) ? 1 : 0.15;
      context.fillStyle = colour(bar.colour);
      context.fillRect(x, y, w, ROW - 2);
      if (w > 30) label(context, bar.name, x, y, w, colour(bar.colour === "module" ? "text" : "panel"));
      context.globalAlpha = 1;
      drawn.push([x, y, w, bar]);
    }
    context.fillStyle = colour("soft");
    for (const [name, at] of tracks) context.fillText(name, 8, TOP + at * ROW + ROW / 2);
  }
  function label(context, text, x, y, w, colour) {
    const room = Math.floor((w - 8) / 6.6);
    context.fillStyle = colour;
    context.fillText(text.length > room ? `${text.slice(0, Math.max(room - 1, 1))}…` : text, x + 4, y + ROW / 2 - 1);
  }
  function hit(x, y) {
    for (let i = drawn.length - 1; i >= 0; i--) {
      const [left, top, w, bar] = drawn[i];
      if (x >= left && x <= left + Math.max(w, 2) && y >= top && y <= top + ROW - 2) return bar;
    }
    return null;
  }
  const p = data.profile;
  const words = p.device_seconds
    ? `GPU busy ${duration(p.device_seconds)}, idle ${duration(p.idle_seconds)}; ${p.gaps.length} gaps, longest ${p.gaps.length ? duration(p.gaps[0][1]) : "none"}`
    : `host between equations ${duration(p.between_seconds)}`;
  const reset = el("button", { type: "button", text: "Whole step", onclick: () => { [from, to] = [0, whole]; chart.draw(); } });
  element.append(el("div", { class: "bar" }, el("h2", { text: "A step" }), el("span", { text: `${duration(whole)}, the fastest of ${data.profile.steps} measured; ${words}` }),
    el("span", { class: "count grow", text: "wheel or + − to zoom, drag or arrows to move" }), reset),
    el("div", { class: "bar" }, operatorLegend(), legend(["module", "programs and modules"])), chart.element);
  return { element, changed: (what) => { if (what !== "hover") chart.draw(); }, depth };
}

// Bars of the flame: one level for the program, one for each part of the module's path, then the equation.
function flame() {
  const bars = [], open = [];
  let depth = 0;
  const names = data.profile.names, tracks = data.profile.tracks;
  const close = (level, end) => { while (open.length > level) { const bar = open.pop(); bar.seconds = end - bar.start; } };
  let last = 0;
  for (const [name, track, start, seconds, row] of data.profile.spans) {
    if (tracks[track] !== "host") continue;
    const at = data.profile.rows[row], id = lineOfRow(at);
    const graph = data.graphs[at[COLUMN.graph]], program = graph.programs[at[COLUMN.program]].name;
    const path = [data.graphs.length > 1 ? `${graph.name} ${program}` : program, ...modulePath(moduleOf(id))];
    let same = 0;
    while (same < open.length && same < path.length && open[same].name === path[same]) same++;
    close(same, last);
    for (let level = same; level < path.length; level++) {
      const bar = { name: path[level], start, seconds: 0, depth: level, colour: "module" };
      open.push(bar);
      bars.push(bar);
    }
    bars.push({ name: names[name].replace(/^aten\./, ""), start, seconds, depth: path.length, row, line: id, colour: hueOf(at[COLUMN.operator]) });
    depth = Math.max(depth, path.length + 1);
    last = start + seconds;
  }
  close(0, last);
  const streams = tracks.filter((track) => !["step", "program", "host"].includes(track));
  const labels = [];
  streams.forEach((stream, i) => {
    const level = depth + 1 + i * 3;
    labels.push([stream, level]);
    for (const [name, track, start, seconds, row] of data.profile.spans) {
      if (tracks[track] !== stream) continue;
      const operator = row === null ? "" : data.profile.rows[row][COLUMN.operator];
      bars.push({ name: names[name], start, seconds, depth: level + 1, row, kernel: true, line: row === null ? undefined : lineOfRow(data.profile.rows[row]), colour: row === null ? "faint" : hueOf(operator) });
    }
  });
  return { bars, depth, tracks: labels };
}

// "blocks.3.mlp.up" -> ["blocks.3", "mlp", "up"]: a number belongs to the list before it.
function modulePath(module) {
  const parts = [];
  for (const part of module ? module.split(".") : []) {
    if (/^\d+$/.test(part) && parts.length) parts[parts.length - 1] += `.${part}`;
    else parts.push(part);
  }
  return parts;
}
