// The mesh: how busy each core and each link is in one of sixty parts of the time.

const PARTS = 60;
const mesh = { cores: new Map(), links: new Map() };

function addBusy(table, key, start, end) {
  if (!table.has(key)) table.set(key, new Float64Array(PARTS));
  const shares = table.get(key), each = Math.max(data.cycles, 1) / PARTS;
  for (let k = Math.floor(start / each); k < PARTS && k * each < end; k++) {
    shares[k] += Math.max(0, Math.min(end, (k + 1) * each) - Math.max(start, k * each)) / each;
  }
}

function fillMesh() {
  for (const core of cores) mesh.cores.set(core, new Float64Array(PARTS));
  for (const i of instructions) {
    if (i.units.some((unit) => /^(matrix|vector)/.test(unit))) addBusy(mesh.cores, i.core, i.start, i.start + i.duration);
    const links = new Set();
    for (const route of i.routes.split(" ").filter(Boolean)) {
      const stops = route.split(">");
      for (let k = 1; k < stops.length; k++) links.add(`${stops[k - 1]}>${stops[k]}`);
    }
    for (const link of links) addBusy(mesh.links, link, i.start, i.start + i.duration);
  }
}

function place(core) {
  const [chip, rest] = core.includes(":") ? core.split(":") : ["0", core];
  const [row, column] = rest.split(",").map(Number);
  return { chip: Number(chip), row, column };
}

function heat(share) {
  return `hsl(${210 - 190 * Math.min(share, 1)} 75% ${88 - 40 * Math.min(share, 1)}%)`;
}

function drawMesh(part) {
  const [rows, columns] = data.grid, chips = Math.max(...cores.map((core) => place(core).chip), 0) + 1;
  const across = Math.ceil(Math.sqrt(chips * 2)), down = Math.ceil(chips / across);
  const width = $("#mesh canvas").clientWidth;
  const cell = Math.max(4, Math.min(48, width / (across * (columns + 0.5)), 700 / (down * (rows + 0.5))));
  const { draw, height } = canvas("mesh", Math.ceil(down * (rows + 0.5) * cell + 8));
  const middle = (core) => {
    const { chip, row, column } = place(core);
    const x = ((chip % across) * (columns + 0.5) + column + 0.5) * cell;
    return [x, (Math.floor(chip / across) * (rows + 0.5) + row + 0.5) * cell + 4];
  };
  draw.clearRect(0, 0, width, height);
  for (const [link, shares] of mesh.links) {
    const [[ax, ay], [bx, by]] = link.split(">").map(middle);
    draw.strokeStyle = heat(shares[part]);
    draw.lineWidth = 1 + 4 * Math.min(shares[part], 1);
    // One way beside the other.
    const side = 3 * Math.sign(bx - ax || by - ay);
    draw.beginPath();
    draw.moveTo(ax + (ay === by ? 0 : side), ay + (ay === by ? side : 0));
    draw.lineTo(bx + (ay === by ? 0 : side), by + (ay === by ? side : 0));
    draw.stroke();
  }
  mesh.cells = [];
  for (const [core, shares] of mesh.cores) {
    const [x, y] = middle(core), half = cell * 0.32;
    draw.fillStyle = heat(shares[part]);
    draw.fillRect(x - half, y - half, 2 * half, 2 * half);
    mesh.cells.push({ core, x, y, half, share: shares[part] });
  }
  const each = data.cycles / PARTS;
  $("#mesh output").textContent = `cycles ${Math.round(part * each).toLocaleString("en")} to ${Math.round((part + 1) * each).toLocaleString("en")}`;
}

function startMesh() {
  const slider = $("#mesh input"), of = $("#mesh canvas");
  const at = (event) => mesh.cells.find((c) => Math.abs(c.x - event.offsetX) <= c.half && Math.abs(c.y - event.offsetY) <= c.half);
  fillMesh();
  drawMesh(0);
  slider.addEventListener("input", () => drawMesh(Number(slider.value)));
  of.addEventListener("pointermove", (event) => {
    const cell = at(event);
    tooltip(event, cell ? `core ${cell.core}: ${(100 * cell.share).toFixed(0)} % busy` : "");
  });
  of.addEventListener("pointerleave", (event) => tooltip(event, ""));
  of.addEventListener("click", (event) => {
    const cell = at(event);
    if (cell) showMemory(cell.core);
  });
}
