// Every equation by its arithmetic intensity and the rate it reached, under the roofs of memory and of computing.

function rooflineView() {
  const element = el("div", { class: "view" });
  if (!data.profile) {
    element.append(noMeasurement());
    return { element, changed() {} };
  }
  const rates = data.profile.rates;
  const points = data.profile.rows.map((row, number) => ({ row, number })).filter(({ row }) => row[COLUMN.bytes] && row[COLUMN.flops] && row[COLUMN.seconds]);
  const x = ({ row }) => Math.log10(row[COLUMN.flops] / row[COLUMN.bytes]), y = ({ row }) => Math.log10(row[COLUMN.flops] / row[COLUMN.seconds]);
  const LEFT = 90, RIGHT = 32, TOP = 28, BOTTOM = 48;
  const roof = (intensity, rate) => Math.min(Math.log10(rates.bandwidth) + intensity, Math.log10(rate));
  let drawn = [];
  const chart = new Chart("Roofline", {
    draw,
    hit: (px, py) => {
      let best = null, least = 100;
      for (const [cx, cy, point] of drawn) {
        const far = (cx - px) ** 2 + (cy - py) ** 2;
        if (far < least) [best, least] = [point, far];
      }
      return best;
    },
    told: (point) => tellRow(point.number),
    chosen: (point) => { app.graph = point.row[COLUMN.graph]; pin({ line: lineOfRow(point.row) }); },
  });

  // The least and the greatest value, but none further than two decades from the middle half.
  function bulk(values) {
    const sorted = [...values].sort((a, b) => a - b), last = sorted.length - 1;
    return [Math.max(sorted[0], sorted[Math.floor(last / 4)] - 2), Math.min(sorted[last], sorted[Math.ceil((3 * last) / 4)] + 2)];
  }

  function draw(context, width, height, colour) {
    if (!points.length) return;
    const xs = points.map(x), ys = points.map(y);
    const ridge = Math.log10(rates.matrix_flops / rates.bandwidth);
    const summit = Math.log10(rates.matrix_flops);
    // What lies far off stands at the edge: it would make everything else small.
    const [left, right] = bulk(xs), [low, high] = bulk(ys);
    const [x0, x1] = [Math.min(left, ridge - 1) - 0.2, Math.max(right, ridge + 0.5) + 0.3];
    const [y0, y1] = [low - 0.3, Math.max(high, summit) + 0.3];
    const within = (v, low, high) => (Math.min(Math.max(v, low), high) - low) / (high - low);
    const sx = (v) => LEFT + within(v, x0, x1) * (width - LEFT - RIGHT);
    const sy = (v) => height - BOTTOM - within(v, y0, y1) * (height - TOP - BOTTOM);
    for (let v = Math.ceil(y0); v <= y1; v++) {
      context.fillStyle = colour("edge");
      context.fillRect(LEFT, sy(v), width - LEFT - RIGHT, 1);
      context.fillStyle = colour("soft");
      context.textAlign = "right";
      context.fillText(scaled(10 ** v, "flop/s"), LEFT - 10, sy(v));
    }
    context.textAlign = "center";
    for (let v = Math.ceil(x0); v <= x1; v++) {
      context.fillStyle = colour("edge");
      context.fillRect(sx(v), TOP, 1, height - TOP - BOTTOM);
      context.fillStyle = colour("soft");
      context.fillText(String(Number((10 ** v).toPrecision(2))), sx(v), height - BOTTOM + 16);
    }
    context.fillText("flops for each byte moved", LEFT + (width - LEFT - RIGHT) / 2, height - 14);
    context.textAlign = "left";
    for (const [rate, name] of rates.flops === rates.matrix_flops ? [[rates.flops, "products"]] : [[rates.matrix_flops, "matrix units"], [rates.flops, "outside matrix units"]]) {
      context.strokeStyle = colour("soft");
      context.lineWidth = 1.5;
      context.beginPath();
      const bend = Math.log10(rate / rates.bandwidth);
      context.moveTo(sx(x0), sy(roof(x0, rate)));
      context.lineTo(sx(Math.min(Math.max(bend, x0), x1)), sy(roof(Math.max(bend, x0), rate)));
      context.lineTo(sx(x1), sy(roof(x1, rate)));
      context.stroke();
      context.fillText(`${name}: ${scaled(rate, "flop/s")}`, sx(Math.max(bend, x0)) + 4, sy(Math.log10(rate)) - 12);
    }
    const middle = (x0 + ridge) / 2;
    context.textAlign = "right";
    context.fillText(`copy: ${scaled(rates.bandwidth, "B/s")}`, sx(middle) - 10, sy(roof(middle, rates.flops)) - 6);
    context.textAlign = "left";
    const most = data.profile.rows[0][COLUMN.seconds];
    drawn = [];
    for (const point of [...points].reverse()) {
      const px = sx(x(point)), py = sy(y(point)), radius = 2.5 + 9 * Math.sqrt(point.row[COLUMN.seconds] / most);
      const id = lineOfRow(point.row), chosen = app.pinned?.line === id;
      context.globalAlpha = app.filter && !matches(id) ? 0.06 : 0.6;
      context.fillStyle = colour(hueOf(point.row[COLUMN.operator]));
      context.beginPath();
      context.arc(px, py, radius, 0, 7);
      context.fill();
      context.globalAlpha = 1;
      if (chosen) {
        context.strokeStyle = colour("text");
        context.lineWidth = 2;
        context.stroke();
      }
      drawn.push([px, py, point]);
    }
  }
  element.append(el("div", { class: "bar" }, el("h2", { text: "Roofline" }),
    el("span", { text: `${points.length} equations that compute, on ${rates.device}; a larger circle took longer` }),
    el("span", { class: "count grow", text: "rates are measured: small tensors that stay in a cache may rise above the roof; what lies far off stands at the edge" })),
    el("div", { class: "bar" }, operatorLegend()), chart.element);
  return { element, changed: (what) => { if (what !== "hover") chart.draw(); } };
}
