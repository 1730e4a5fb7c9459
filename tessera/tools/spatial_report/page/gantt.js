// What every unit of every core does when. Wheel zooms, a drag moves, a click leads to the line. Only rows in sight are
// drawn: of many chips there are more than a canvas holds.

const gantt = { from: 0, to: Math.max(data.cycles, 1), rows: [], first: 0, top: 18, step: 14, left: 110, most: 480 };

function ganttRows() {
  const seen = new Map();
  for (const i of instructions) {
    for (const unit of i.units) {
      const key = `${i.core} ${unit}`;
      if (!seen.has(key)) seen.set(key, { core: i.core, unit, instructions: [] });
      seen.get(key).instructions.push(i);
    }
  }
  const order = new Map(cores.map((core, number) => [core, number]));
  return [...seen.values()].sort((a, b) => order.get(a.core) - order.get(b.core) || (a.unit < b.unit ? -1 : 1));
}

function drawGantt() {
  const all = Math.ceil(gantt.top + gantt.rows.length * gantt.step + 4), box = $("#gantt .rows");
  $("#gantt .rows > div").style.height = `${all}px`;
  const { draw, width, height } = canvas("gantt", Math.min(all, gantt.most));
  gantt.first = Math.floor(box.scrollTop / gantt.step);
  const scale = (gantt.scale = (width - gantt.left) / (gantt.to - gantt.from));
  draw.clearRect(0, 0, width, height);
  draw.fillStyle = ink();
  for (let k = 0; k <= 8; k++) {
    const at = gantt.from + ((gantt.to - gantt.from) * k) / 8;
    draw.fillText(Math.round(at).toLocaleString("en"), Math.min(gantt.left + (at - gantt.from) * scale, width - 40), 11);
  }
  gantt.rows.slice(gantt.first, gantt.first + Math.ceil(height / gantt.step)).forEach((row, number) => {
    const y = gantt.top + number * gantt.step;
    draw.fillStyle = ink();
    draw.fillText(`${row.core} ${row.unit}`, 2, y + gantt.step - 4);
    for (const i of row.instructions) {
      if (i.start > gantt.to || i.start + i.duration < gantt.from) continue;
      const x = Math.max(gantt.left, gantt.left + (i.start - gantt.from) * scale);
      const end = Math.min(width, gantt.left + (i.start + i.duration - gantt.from) * scale);
      draw.fillStyle = critical.has(i.index) ? "#dc2626" : colour(row.unit);
      draw.fillRect(x, y, Math.max(end - x - 0.5, 0.5), gantt.step - 1);
    }
  });
}

function ganttAt(event) {
  const number = Math.floor((event.offsetY - gantt.top) / gantt.step);
  const row = number < 0 ? undefined : gantt.rows[gantt.first + number];
  const cycle = gantt.from + (event.offsetX - gantt.left) / gantt.scale;
  return row?.instructions.find((i) => i.start <= cycle && cycle < i.start + i.duration);
}

function zoomGantt(factor, around) {
  const from = Math.max(0, around - (around - gantt.from) * factor);
  const to = Math.min(data.cycles, around + (gantt.to - around) * factor);
  if (to - from < 4) return;
  gantt.from = from;
  gantt.to = to;
  drawGantt();
}

function startGantt() {
  const of = $("#gantt canvas"), box = $("#gantt .rows");
  let held = null, moved = 0;
  gantt.rows = ganttRows();
  drawGantt();
  box.addEventListener("scroll", drawGantt);
  of.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomGantt(event.deltaY > 0 ? 1.25 : 0.8, gantt.from + (event.offsetX - gantt.left) / gantt.scale);
  }, { passive: false });
  of.addEventListener("pointerdown", (event) => { held = event.offsetX; moved = 0; });
  of.addEventListener("pointerup", (event) => {
    held = null;
    const at = moved < 4 && ganttAt(event);
    if (at) show(at.index);
  });
  of.addEventListener("pointermove", (event) => {
    if (held !== null && event.buttons) {
      const by = (held - event.offsetX) / gantt.scale, span = gantt.to - gantt.from;
      moved += Math.abs(event.offsetX - held) + Math.abs(event.movementY);
      held = event.offsetX;
      box.scrollTop -= event.movementY;
      gantt.from = Math.min(Math.max(0, gantt.from + by), data.cycles - span);
      gantt.to = gantt.from + span;
      drawGantt();
      return;
    }
    const at = ganttAt(event);
    tooltip(event, at ? `${at.core} @${at.start}..${at.start + at.duration} ${at.action} ${at.source}` : "");
  });
  of.addEventListener("pointerleave", (event) => tooltip(event, ""));
}
