// Small parts: elements, canvases at the screen's resolution, colours.

const $ = (selector) => document.querySelector(selector);
const COLOURS = { matrix: "#2563eb", vector: "#16a34a", copy: "#9333ea", host: "#64748b", dram: "#0891b2", link: "#ea580c" };
const CAUSES = { bound: "#64748b", dependence: "#2563eb", port: "#9333ea", link: "#ea580c", imbalance: "#ca8a04", fill: "#16a34a" };

function element(parent, tag, text = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.appendChild(made);
  return made;
}

function canvas(section, height) {
  const of = $(`#${section} canvas`), scale = window.devicePixelRatio || 1;
  const width = of.clientWidth;
  of.style.height = `${height}px`;
  of.width = width * scale;
  of.height = height * scale;
  const draw = of.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.font = "11px system-ui, sans-serif";
  return { of, draw, width, height };
}

function ink() {
  return getComputedStyle(document.documentElement).getPropertyValue("--ink");
}

function colour(unit) {
  return COLOURS[unit.replace(/\d+$/, "")] || COLOURS.link;
}

function tooltip(event, text) {
  const tip = $("#tooltip");
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - 300)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}
