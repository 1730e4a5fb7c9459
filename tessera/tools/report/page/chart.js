// A canvas that keeps its size, its colours and its sharpness, and knows what the pointer is over.

class Chart {
  // draw(context, width, height, colour) paints; hit(x, y) gives what is there; told(thing) gives [head, lines].
  constructor(label, { draw, hit, told, chosen, keys }) {
    Object.assign(this, { drawing: draw, hit, told, chosen, keys: keys || {} });
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": label });
    this.element = el("div", { class: "chart" }, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.canvas.addEventListener("mousemove", (event) => this.move(event));
    this.canvas.addEventListener("mouseleave", hideTooltip);
    this.canvas.addEventListener("click", (event) => {
      const thing = this.hit(event.offsetX, event.offsetY);
      if (thing !== null && thing !== undefined && !this.dragged) this.chosen(thing);
    });
    this.canvas.addEventListener("keydown", (event) => {
      if (!(event.key in this.keys)) return;
      this.keys[event.key]();
      this.draw();
      event.preventDefault();
    });
  }

  draw() {
    const width = this.element.clientWidth, height = this.element.clientHeight;
    if (!width || !height) return;
    const sharp = devicePixelRatio || 1;
    this.canvas.width = width * sharp;
    this.canvas.height = height * sharp;
    const context = this.canvas.getContext("2d");
    context.scale(sharp, sharp);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    const styles = getComputedStyle(document.documentElement), known = {};
    this.drawing(context, width, height, (name) => (known[name] ??= styles.getPropertyValue(`--${name}`).trim()));
  }

  move(event) {
    const thing = this.dragging ? null : this.hit(event.offsetX, event.offsetY);
    this.canvas.style.cursor = thing === null || thing === undefined ? "default" : "pointer";
    if (thing === null || thing === undefined) return hideTooltip();
    const [head, about] = this.told(thing);
    showTooltip(event, head, about);
  }
}

// The same operator has the same colour everywhere; the seven that take longest have one each, the others share one.
const hues = new Map(), spent = new Map();
for (const row of data.profile?.rows || []) {
  const operator = row[COLUMN.operator];
  spent.set(operator, (spent.get(operator) || 0) + row[COLUMN.seconds]);
}
const longest = [...spent.keys()].sort((a, b) => spent.get(b) - spent.get(a));
longest.forEach((operator, i) => hues.set(operator, i < 7 ? `c${i}` : "c7"));
const hueOf = (operator) => hues.get(operator) || "c7";

// Long names differ at their ends.
const shortened = (name) => (name.length > 30 ? `${name.slice(0, 12)}…${name.slice(-17)}` : name);

function operatorLegend() {
  const shown = longest.slice(0, 7).map((operator) => [hueOf(operator), shortened(operator.replace(/aten\./g, ""))]);
  return legend(...shown, ...(longest.length > 7 ? [["c7", "others"]] : []));
}

function tellRow(number) {
  const row = data.profile.rows[number], id = lineOfRow(row), get = (name) => row[COLUMN[name]];
  const rate = get("seconds") ? get("best") / get("seconds") : 0;
  return [
    `${get("executor") === "aten" ? "" : `${get("executor")}: `}${get("operator")}`,
    [
      `${duration(get("seconds"))}${get("limit") ? `, ${percent(rate)} of the roofline, limited by ${get("limit")}` : ""}`,
      get("bytes") ? `${scaled(get("bytes"), "B")} moved, ${scaled(get("flops"), "flop")}` : "a view: nothing is moved",
      [lines.places[id].map(whereOf).slice(0, 4).join(", "), moduleOf(id), noteOf(id)].filter(Boolean).join(" · "),
      lines.text[id].trim().slice(0, 160),
    ],
  ];
}

// Round steps for an axis: 1, 2 or 5 times a power of ten.
function ticks(from, to, count) {
  const rough = (to - from) / count, scale = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * scale).find((s) => s >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function noMeasurement() {
  return el("div", { class: "empty", text: "Nothing was measured. Pass arguments to call the function with: tessera.report(fast, path, args=(…))." });
}
