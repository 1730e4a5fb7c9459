// A core's memory over time: every buffer at its address, for as long as it lives.

const memory = { core: cores[0] };

function drawMemory() {
  const own = buffers.filter((b) => b.core === memory.core);
  const top = Math.max(...own.map((b) => b.address + b.size), 1);
  const { draw, width, height } = canvas("memory", 260);
  draw.clearRect(0, 0, width, height);
  memory.boxes = own.map((b, number) => {
    const x = (b.from / data.cycles) * width, y = height - ((b.address + b.size) / top) * height;
    const box = { b, x, y, w: Math.max(((b.to - b.from) / data.cycles) * width, 1), h: Math.max((b.size / top) * height, 1) };
    draw.fillStyle = `hsl(${(number * 47) % 360} 45% 55%)`;
    draw.fillRect(box.x, box.y, box.w - 0.5, box.h - 0.5);
    draw.fillStyle = "#ffffff";
    if (box.w > 60 && box.h > 11) draw.fillText(b.name, box.x + 3, box.y + 10, box.w - 6);
    return box;
  });
  $("#memory output").textContent = `${top.toLocaleString("en")} of ${data.sram.toLocaleString("en")} bytes`;
}

function showMemory(core) {
  memory.core = core;
  $("#memory select").value = core;
  drawMemory();
}

function startMemory() {
  const choice = $("#memory select"), of = $("#memory canvas");
  const at = (event) => memory.boxes.find((o) => o.x <= event.offsetX && event.offsetX < o.x + o.w && o.y <= event.offsetY && event.offsetY < o.y + o.h);
  for (const core of cores) element(choice, "option", core).value = core;
  choice.addEventListener("change", () => showMemory(choice.value));
  of.addEventListener("pointermove", (event) => {
    const box = at(event);
    tooltip(event, box ? `${box.b.name}: ${box.b.size.toLocaleString("en")} bytes, cycles ${box.b.from}..${box.b.to}` : "");
  });
  of.addEventListener("pointerleave", (event) => tooltip(event, ""));
  of.addEventListener("click", (event) => {
    const box = at(event);
    const writer = box && instructions.find((i) => i.core === memory.core && new RegExp(`(^|recv )${box.b.name}\\b`).test(i.action));
    if (writer) show(writer.index);
  });
  drawMemory();
}
