// Plain facts: the gap by cause, the critical path, the machine's numbers and where they come from.

function startFacts() {
  $("#title").textContent = data.title;
  $("#summary").textContent = data.summary;
  const bar = $("#gap .bar"), shares = { bound: data.bound, ...data.gap };
  for (const [cause, cycles] of Object.entries(shares)) {
    if (!cycles) continue;
    const part = element(bar, "span", `${cause} ${cycles.toLocaleString("en")}`);
    part.style.flex = `${cycles} 0 0`;
    part.style.background = CAUSES[cause];
    part.dataset.cycles = cycles;
  }
  $("#gap p").textContent = `${data.cycles.toLocaleString("en")} cycles: the bound (${data.reasons[0]}), and by cause what is above it.`;
  const list = $("#critical ol");
  for (const [line, kind] of data.critical.slice(0, 2000)) {
    const i = byLine.get(line - 1);
    const item = element(list, "li", `@${i.start} +${i.duration}  core ${i.core}  ${i.action}  (${kind})`);
    item.addEventListener("click", () => show(i.index));
  }
  for (const row of data.sources) {
    const cells = element($("#sources tbody"), "tr");
    for (const text of row) element(cells, "td", text);
  }
}
