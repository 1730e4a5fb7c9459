// Bytes alive at every equation, the programs of a step one after the other; the peak is marked.

function memoryView() {
  const bar = el("div", { class: "bar" });
  let points = [], starts = [];
  const chart = new Chart("Memory over equations", {
    draw, hit,
    chosen: (i) => pin({ line: points[i].line }),
    told: (i) => [memory(points[i].bytes), [`${points[i].program}, equation ${points[i].index + 1}`, lines.text[points[i].line].trim().slice(0, 160),
      [lines.places[points[i].line].map(whereOf).slice(0, 3).join(", "), moduleOf(points[i].line)].filter(Boolean).join(" · ")]],
    keys: {},
  });
  const LEFT = 80, RIGHT = 24, TOP = 28, BOTTOM = 40;
  let sx = (i) => i;

  function refresh() {
    points = [];
    starts = [];
    for (const program of data.graphs[app.graph]?.programs || []) {
      starts.push([points.length, program]);
      (program.measured || program.live).forEach((bytes, index) => points.push({ bytes: bytes + program.base, predicted: program.live[index] + program.base, base: program.base, program: program.name, index, line: program.equations[index] }));
    }
    const peaks = starts.map(([, program]) => `${program.name} ${memory(program.base + Math.max(0, ...(program.measured || program.live)))}`);
    bar.replaceChildren(el("h2", { text: "Memory" }), graphPicker(), el("span", { text: `peak beyond inputs: ${peaks.join(", ")}` }),
      legend(["c0", "alive"], ["c4", "saved for backward"], ...(starts.some(([, program]) => program.measured) ? [["text", "predicted"]] : [])),
      el("span", { class: "count grow", text: `${starts.some(([, program]) => program.measured) ? "measured; the line is predicted" : "predicted from the programs"}; what forward saves is held through backward` }));
    chart.draw();
  }
  function draw(context, width, height, colour) {
    if (!points.length) return;
    const most = Math.max(...points.map((point) => Math.max(point.bytes, point.predicted)), 1);
    sx = (i) => LEFT + (i / points.length) * (width - LEFT - RIGHT);
    const sy = (bytes) => height - BOTTOM - (bytes / most) * (height - TOP - BOTTOM);
    context.textAlign = "right";
    const step = 2 ** Math.ceil(Math.log2(most / 6));  // bytes are counted in powers of two
    for (let at = 0; at <= most; at += step) {
      context.fillStyle = colour("edge");
      context.fillRect(LEFT, sy(at), width - LEFT - RIGHT, 1);
      context.fillStyle = colour("soft");
      context.fillText(memory(at), LEFT - 10, sy(at));
    }
    context.textAlign = "left";
    area(context, sy, (point) => point.bytes, colour("c0"), 0.55);
    area(context, sy, (point) => point.base, colour("c4"), 0.6);
    outline(context, sy, colour("text"));
    for (const [start, program] of starts) {
      context.fillStyle = colour("faint");
      context.fillRect(sx(start), TOP, 1, height - TOP - BOTTOM);
      context.fillStyle = colour("soft");
      context.fillText(program.base ? `${program.name}, above ${memory(program.base)} saved` : program.name, sx(start) + 6, height - BOTTOM + 18);
    }
    const peak = points.reduce((best, point, i) => (point.bytes > points[best].bytes ? i : best), 0);
    context.fillStyle = colour("text");
    context.beginPath();
    context.arc(sx(peak + 0.5), sy(points[peak].bytes), 4, 0, 7);
    context.fill();
    const text = `peak ${memory(points[peak].bytes)}`, wide = context.measureText(text).width;
    context.fillText(text, sx(peak) + 10 + wide > width ? sx(peak) - wide - 10 : sx(peak) + 10, TOP - 12);
    const here = app.pinned?.line === undefined ? -1 : points.findIndex((point) => point.line === app.pinned.line);
    if (here >= 0) {
      context.fillStyle = colour("accent");
      context.fillRect(sx(here + 0.5), TOP, 1.5, height - TOP - BOTTOM);
    }
  }
  function area(context, sy, height, colour, alpha) {
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    context.beginPath();
    context.moveTo(sx(0), sy(0));
    points.forEach((point, i) => { context.lineTo(sx(i), sy(height(point))); context.lineTo(sx(i + 1), sy(height(point))); });
    context.lineTo(sx(points.length), sy(0));
    context.fill();
    context.globalAlpha = 1;
  }
  function outline(context, sy, colour) {
    if (points.every((point) => point.bytes === point.predicted)) return;
    context.strokeStyle = colour;
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    context.beginPath();
    points.forEach((point, i) => { context.lineTo(sx(i), sy(point.predicted)); context.lineTo(sx(i + 1), sy(point.predicted)); });
    context.stroke();
    context.globalAlpha = 1;
  }
  function hit(x, y) {
    const width = chart.element.clientWidth, i = Math.floor(((x - LEFT) / (width - LEFT - RIGHT)) * points.length);
    return i >= 0 && i < points.length && y > TOP && y < chart.element.clientHeight - BOTTOM ? i : null;
  }
  const element = el("div", { class: "view" }, bar, chart.element);
  return { element, changed: (what) => { if (what !== "hover") refresh(); } };
}
